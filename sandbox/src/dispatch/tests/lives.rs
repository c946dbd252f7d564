//! How long memory stays charged.

use crate::bytes::{get32, put32, put64};
use crate::driver::Node;
use crate::testing::{Tenant, sandbox};

const MIB: u64 = 1 << 20;

#[test]
fn a_duplicate_keeps_the_charge_until_the_last_handle_goes() {
    let sandbox = sandbox(64 * MIB);
    let mut tenant = Tenant::new(&sandbox);
    tenant.memory(1, 10, 8 * MIB);
    let (first, second) = (tenant.client, tenant.new_client());
    tenant.client = second;
    tenant.alloc(second, 1, 0x80, &[0; 56]);
    assert_eq!(tenant.dup(1, 20, (first, 10)), 0);
    assert_eq!(tenant.used(), 8 * MIB);
    tenant.client = first;
    tenant.free(first);
    assert_eq!((tenant.used(), sandbox.driver().in_use(0)), (8 * MIB, 8 * MIB));
    tenant.client = second;
    tenant.free(20);
    assert_eq!((tenant.used(), sandbox.driver().in_use(0)), (0, 0));
}

#[test]
fn freeing_a_parent_frees_what_is_below_and_what_depends_on_it() {
    let sandbox = sandbox(64 * MIB);
    let tenant = Tenant::new(&sandbox);
    tenant.memory(1, 10, 2 * MIB);
    tenant.memory(2, 11, 2 * MIB);
    tenant.alloc(1, 30, 0x90f1, &[0; 56]);
    let mut channel = vec![0; 368];
    for (at, value) in [(28, 30), (32, 10), (128, 9)] {
        put32(&mut channel, at, value).unwrap();
    }
    assert_eq!(tenant.alloc(1, 31, 0xc86f, &channel), 0);
    // The channel keeps its USERD memory; the address space takes the channel along.
    tenant.free(10);
    assert_eq!(tenant.used(), 4 * MIB);
    tenant.free(30);
    assert!(!sandbox.driver().has(tenant.client, 31));
    assert_eq!((tenant.used(), sandbox.driver().in_use(0)), (2 * MIB, 2 * MIB));
    tenant.free(1);
    assert_eq!((tenant.used(), sandbox.driver().in_use(0)), (0, 0));
}

#[test]
fn freeing_an_unknown_handle_succeeds_and_frees_nothing() {
    let sandbox = sandbox(64 * MIB);
    let tenant = Tenant::new(&sandbox);
    tenant.memory(1, 10, 2 * MIB);
    assert_eq!(tenant.free(0x999), 0);
    assert_eq!(tenant.used(), 2 * MIB);
}

#[test]
fn memory_mapped_into_uvm_stays_charged_until_the_range_is_freed() {
    let sandbox = sandbox(64 * MIB);
    let tenant = Tenant::new(&sandbox);
    tenant.memory(1, 10, 2 * MIB);
    assert_eq!(tenant.uvm_map(0x10000, 10), 0x16, "not before the file is initialised");
    tenant.uvm_initialize();
    assert_eq!(tenant.uvm_map(0x10000, 10), 0);
    tenant.free(10);
    assert_eq!((tenant.used(), sandbox.driver().in_use(0)), (2 * MIB, 2 * MIB));
    assert_eq!(tenant.uvm_free(0x10000), 0);
    assert_eq!((tenant.used(), sandbox.driver().in_use(0)), (0, 0));
}

#[test]
fn one_files_range_is_not_anothers() {
    let sandbox = sandbox(64 * MIB);
    let mut tenant = Tenant::new(&sandbox);
    tenant.memory(1, 10, 8 * MIB);
    tenant.uvm_initialize();
    assert_eq!(tenant.uvm_map(0x10000, 10), 0);
    tenant.free(10);
    let first = std::mem::replace(&mut tenant.uvm, sandbox.driver().open(Node::Uvm));
    tenant.uvm_initialize();
    // The driver in small has one space for all files: only the ledger counts here.
    tenant.uvm_free(0x10000);
    assert_eq!(tenant.used(), 8 * MIB);
    tenant.uvm = first;
    tenant.uvm_free(0x10000);
    assert_eq!(tenant.used(), 0);
}

#[test]
fn the_end_of_a_process_frees_what_it_had_mapped_into_uvm() {
    let sandbox = sandbox(64 * MIB);
    let tenant = Tenant::new(&sandbox);
    tenant.memory(1, 10, 2 * MIB);
    tenant.uvm_initialize();
    tenant.uvm_map(0x10000, 10);
    tenant.free(10);
    sandbox.process_ended(tenant.caller.process + 1);
    assert_eq!(tenant.used(), 2 * MIB);
    sandbox.process_ended(tenant.caller.process);
    assert_eq!((tenant.used(), sandbox.driver().in_use(0)), (0, 0));
}

#[test]
fn the_end_of_the_sandbox_frees_what_any_process_had_mapped_into_uvm() {
    let sandbox = sandbox(64 * MIB);
    let mut tenant = Tenant::new(&sandbox);
    for process in [1, 2] {
        tenant.caller.process = process;
        tenant.uvm = sandbox.driver().open(Node::Uvm);
        tenant.uvm_initialize();
        tenant.memory(1, 10 + process, 2 * MIB);
        assert_eq!(tenant.uvm_map(u64::from(process) << 24, 10 + process), 0);
        tenant.free(10 + process);
    }
    assert_eq!(sandbox.driver().in_use(0), 4 * MIB);
    sandbox.driver().calls();
    sandbox.ended();
    assert_eq!((tenant.used(), sandbox.driver().in_use(0)), (0, 0));
    // A file may have many ranges, and the shim doesn't wait long: all cards are taken out of all files first.
    let calls: Vec<u32> = sandbox.driver().calls().iter().map(|(cmd, _)| *cmd).collect();
    assert_eq!(calls, [38, 38, 34, 69, 34, 69]);
}

#[test]
fn memory_mapped_on_two_cards_is_released_when_both_unmapped_it() {
    let sandbox = sandbox(64 * MIB);
    let tenant = Tenant::new(&sandbox);
    tenant.memory(1, 10, 2 * MIB);
    tenant.uvm_initialize();
    assert_eq!(tenant.uvm_map_on(0x10000, 10, &[1, 2]), 0);
    tenant.free(10);
    for (gpu, left) in [(3, 2 * MIB), (1, 2 * MIB), (2, 0)] {
        let mut unmap = vec![0; 40];
        put64(&mut unmap, 0, 0x10000).unwrap();
        put64(&mut unmap, 8, 1 << 21).unwrap();
        unmap[16] = gpu;
        tenant.uvm(66, &unmap);
        assert_eq!(tenant.used(), left, "after card {gpu}");
    }
}

#[test]
fn a_client_that_died_with_its_file_is_found_by_a_sweep() {
    let sandbox = sandbox(64 * MIB);
    let tenant = Tenant::new(&sandbox);
    tenant.memory(1, 10, 60 * MIB);
    assert!(sandbox.has_charges());
    sandbox.sweep();
    assert_eq!(tenant.used(), 60 * MIB);
    sandbox.driver().drop_client(tenant.client);
    sandbox.sweep();
    assert_eq!(tenant.used(), 0);
    assert!(!sandbox.has_charges());
}

#[test]
fn before_an_allocation_is_refused_dead_clients_are_looked_for() {
    let sandbox = sandbox(64 * MIB);
    let first = Tenant::new(&sandbox);
    first.memory(1, 10, 60 * MIB);
    sandbox.driver().drop_client(first.client);
    let second = Tenant::new(&sandbox);
    assert_eq!(second.memory(1, 10, 60 * MIB), 0);
    assert_eq!(sandbox.usage()[0].denied, 0);
}

#[test]
fn a_third_party_registration_keeps_the_charge() {
    let sandbox = sandbox(64 * MIB);
    let tenant = Tenant::new(&sandbox);
    tenant.memory(1, 10, 2 * MIB);
    assert_eq!(tenant.alloc(2, 20, 0x503c, &[0; 4]), 0);
    let mut register = vec![0; 32];
    put32(&mut register, 0, 10).unwrap();
    assert_eq!(tenant.control(20, 0x503c_0104, &register).0, 0);
    assert_eq!(tenant.control(20, 0x503c_0105, &register[..4]).0, 0);
    assert_eq!(tenant.control(20, 0x503c_0104, &register).0, 0);
    tenant.free(10);
    assert_eq!((tenant.used(), sandbox.driver().in_use(0)), (2 * MIB, 2 * MIB));
    tenant.free(20);
    assert_eq!((tenant.used(), sandbox.driver().in_use(0)), (0, 0));
}

#[test]
fn only_files_that_this_container_exported_to_are_imported_from() {
    let sandbox = sandbox(64 * MIB);
    let tenant = Tenant::new(&sandbox);
    tenant.memory(1, 10, 2 * MIB);
    let exported = sandbox.driver().open(Node::Control);
    let foreign = sandbox.driver().open(Node::Control);
    tenant.caller.files.lock().unwrap().extend([(5, exported), (6, foreign)]);
    let mut export = vec![0; 24];
    put32(&mut export, 12, 10).unwrap();
    put32(&mut export, 16, 5).unwrap();
    let (status, after) = tenant.control(tenant.client, 0x3d05, &export);
    assert_eq!((status, get32(&after, 16)), (0, Ok(5)));
    let mut import = vec![0; 20];
    for (at, value) in [(12, 1), (16, 30), (0, 6)] {
        put32(&mut import, at, value).unwrap();
    }
    assert_eq!(tenant.control(tenant.client, 0x3d06, &import).0, 0x1f);
    put32(&mut import, 0, 5).unwrap();
    let (status, after) = tenant.control(tenant.client, 0x3d06, &import);
    assert_eq!((status, get32(&after, 0)), (0, Ok(5)));
    tenant.free(10);
    tenant.free(30);
    assert_eq!((tenant.used(), sandbox.driver().in_use(0)), (2 * MIB, 2 * MIB), "the file keeps it");
}

#[test]
fn video_memory_that_was_mapped_outlives_handle_client_and_process() {
    let sandbox = sandbox(64 * MIB);
    let mut tenant = Tenant::new(&sandbox);
    tenant.memory(1, 10, 2 * MIB);
    let both = (2 * MIB, 2 * MIB);
    let first = tenant.caller.process;
    assert_eq!((tenant.map(10), tenant.map(10)), (0, 0));
    tenant.caller.process = first + 1;
    assert_eq!(tenant.map(10), 0);
    tenant.free(10);
    assert_eq!((tenant.used(), sandbox.driver().in_use(0)), both);
    // It ends, or only executes another program: the file that was mapped may be anywhere by now.
    sandbox.process_ended(first);
    sandbox.process_ended(first + 1);
    sandbox.driver().drop_client(tenant.client);
    sandbox.sweep();
    assert_eq!((tenant.used(), sandbox.driver().in_use(0)), both);
}

#[test]
fn only_video_memory_is_held_for_its_mapping() {
    let sandbox = sandbox(64 * MIB);
    let tenant = Tenant::new(&sandbox);
    let mut params = vec![0; 128];
    put64(&mut params, 64, 4096).unwrap();
    tenant.alloc(1, 10, 0x3e, &params);
    tenant.alloc(2, 11, 0xc661, &[0, 0]);
    sandbox.driver().calls();
    assert_eq!((tenant.map(10), tenant.map(11)), (0, 0));
    let calls: Vec<u32> = sandbox.driver().calls().iter().map(|(cmd, _)| cmd & 0xff).collect();
    assert_eq!(calls, [0x4e, 0x4e]);
}
