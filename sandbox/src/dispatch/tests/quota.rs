//! The quota: nothing beyond it, and everything that is charged comes back.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::alloc::CONTEXT_BYTES;
use crate::bytes::{get32, put32, put64};
use crate::testing::{Tenant, sandbox};

const MIB: u64 = 1 << 20;

#[test]
fn an_allocation_over_the_quota_is_refused_and_never_reaches_the_driver() {
    let sandbox = sandbox(64 * MIB);
    let tenant = Tenant::new(&sandbox);
    assert_eq!(tenant.memory(1, 10, 60 * MIB), 0);
    sandbox.driver().calls();
    assert_eq!(tenant.memory(1, 11, 6 * MIB), 0x51);
    let reached = sandbox.driver().calls();
    assert!(reached.iter().all(|(cmd, _)| cmd & 0xff == 0x2a), "only our question whether clients live");
    assert_eq!(tenant.memory(1, 12, 4 * MIB), 0);
    assert_eq!(tenant.used(), 64 * MIB);
    assert_eq!(sandbox.usage()[0].denied, 1);
    assert_eq!((sandbox.usage()[1].used, sandbox.usage()[1].minor), (0, 2));
    assert_eq!(tenant.memory(1, 13, u64::MAX), 0x51);
}

#[test]
fn a_refusal_by_the_driver_gives_the_charge_back() {
    let sandbox = sandbox(64 * MIB);
    let tenant = Tenant::new(&sandbox);
    assert_eq!(tenant.memory(1, 10, 4 * MIB), 0);
    assert_eq!(tenant.memory(1, 10, 4 * MIB), 0x19);
    assert_eq!(tenant.used(), 4 * MIB);
}

#[test]
fn the_charge_becomes_what_the_driver_answers() {
    let sandbox = sandbox(64 * MIB);
    let tenant = Tenant::new(&sandbox);
    sandbox.driver().state.lock().unwrap().grow = Some(3 * MIB);
    assert_eq!(tenant.memory(1, 10, 1), 0);
    assert_eq!((tenant.used(), sandbox.driver().in_use(0)), (3 * MIB, 3 * MIB));
}

#[test]
fn an_allocation_that_the_driver_makes_larger_than_fits_is_freed_again() {
    let sandbox = sandbox(4 * MIB);
    let tenant = Tenant::new(&sandbox);
    sandbox.driver().state.lock().unwrap().grow = Some(5 * MIB);
    assert_eq!(tenant.memory(1, 10, 1), 0x51);
    assert_eq!((tenant.used(), sandbox.driver().in_use(0)), (0, 0));
    assert!(!sandbox.driver().has(tenant.client, 10));
    assert_eq!(sandbox.usage()[0].denied, 1);
}

#[test]
fn each_card_has_a_quota_of_its_own() {
    let sandbox = sandbox(64 * MIB);
    let tenant = Tenant::new(&sandbox);
    let mut device = vec![0; 56];
    put32(&mut device, 0, 2).unwrap();
    assert_eq!(tenant.alloc(tenant.client, 3, 0x80, &device), 0);
    assert_eq!(tenant.memory(1, 10, 64 * MIB), 0);
    assert_eq!(tenant.memory(3, 11, 32 * MIB), 0);
    assert_eq!(tenant.memory(1, 12, 1), 0x51);
    let used: Vec<u64> = sandbox.usage().iter().map(|gpu| gpu.used).collect();
    assert_eq!(used, [64 * MIB, 32 * MIB]);
}

#[test]
fn fixed_places_and_privileged_channels_are_taken_out() {
    let sandbox = sandbox(64 * MIB);
    let tenant = Tenant::new(&sandbox);
    sandbox.driver().calls();
    let mut memory = vec![0; 128];
    put32(&mut memory, 8, 0x2_0011).unwrap();
    put64(&mut memory, 64, 4096).unwrap();
    assert_eq!(tenant.alloc(1, 10, 0x40, &memory), 0);
    let mut channel = vec![0; 368];
    put32(&mut channel, 20, 0x21).unwrap();
    put32(&mut channel, 128, 9).unwrap();
    assert_eq!(tenant.alloc(1, 11, 0xc86f, &channel), 0);
    assert_eq!(tenant.alloc(2, 12, 0xc661, &[1, 1]), 0);
    let calls = sandbox.driver().calls();
    assert_eq!(get32(&calls[0].1.links[0].bytes, 8), Ok(1));
    assert_eq!(get32(&calls[1].1.links[0].bytes, 20), Ok(1));
    assert_eq!(calls[2].1.links[0].bytes, [1, 0]);
}

#[test]
fn a_context_of_the_graphics_engine_is_charged_a_fixed_sum() {
    let sandbox = sandbox(64 * MIB);
    let tenant = Tenant::new(&sandbox);
    let group = |engine: u32| {
        let mut params = vec![0; 20];
        put32(&mut params, 12, engine).unwrap();
        params
    };
    assert_eq!(tenant.alloc(1, 10, 0xa06c, &group(1)), 0);
    assert_eq!(tenant.alloc(1, 11, 0xa06c, &group(11)), 0);
    assert_eq!(tenant.used(), CONTEXT_BYTES);
    // A channel in the group costs nothing more; one outside any group makes a group.
    let mut channel = vec![0; 368];
    put32(&mut channel, 128, 1).unwrap();
    assert_eq!(tenant.alloc(10, 20, 0xc86f, &channel), 0);
    assert_eq!(tenant.used(), CONTEXT_BYTES);
    assert_eq!(tenant.alloc(1, 21, 0xc86f, &channel), 0);
    assert_eq!(tenant.used(), 2 * CONTEXT_BYTES);
    tenant.free(10);
    tenant.free(21);
    assert_eq!(tenant.used(), 0);
}

#[test]
fn racing_allocations_never_exceed_the_quota_by_a_byte() {
    let quota = 64 * MIB;
    let sandbox = sandbox(quota);
    let granted = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for thread in 0..6u32 {
            let (sandbox, granted) = (&sandbox, &granted);
            scope.spawn(move || {
                let tenant = Tenant::new(sandbox);
                for round in 0..120u32 {
                    let handle = 100 + round;
                    if tenant.memory(1, handle, (u64::from(thread + round) % 9 + 1) * MIB) == 0 {
                        granted.fetch_add(1, Ordering::Relaxed);
                    }
                    assert!(sandbox.driver().in_use(0) <= quota);
                    if round % 3 == 2 {
                        tenant.free(handle - 1);
                    }
                    if round % 40 == 39 {
                        for handle in 100..=handle {
                            tenant.free(handle);
                        }
                    }
                }
                tenant.free(tenant.client);
            });
        }
    });
    assert!(granted.load(Ordering::Relaxed) > 50);
    assert!(sandbox.usage()[0].peak <= quota && sandbox.usage()[0].denied > 0);
    assert_eq!((sandbox.usage()[0].used, sandbox.driver().in_use(0)), (0, 0));
}

#[test]
fn address_spaces_are_bounded() {
    let sandbox = sandbox(64 * MIB);
    let tenant = Tenant::new(&sandbox);
    let refused =
        (0..1100u32).filter(|handle| tenant.alloc(1, 0x1000 + handle, 0x90f1, &[0; 56]) == 0x1a).count();
    assert_eq!(refused, 1100 - 1024);
    tenant.free(0x1000);
    assert_eq!(tenant.alloc(1, 0x1000, 0x90f1, &[0; 56]), 0);
}

#[test]
fn uvm_is_audited_from_the_first_file_on_though_nothing_is_charged() {
    let sandbox = sandbox(64 * MIB);
    let tenant = Tenant::new(&sandbox);
    assert!(!sandbox.has_uvm());
    tenant.uvm_initialize();
    assert!(sandbox.has_uvm() && !sandbox.has_charges());
    // A child may have the file still, and a mapping made by a race with the check of its file is charged nowhere.
    sandbox.process_ended(tenant.caller.process);
    assert!(sandbox.has_uvm());
    let verdict = sandbox.audit_uvm(2 * MIB);
    assert_eq!(verdict, crate::dispatch::UvmVerdict::Uncharged { found: 2 * MIB, charged: 0 });
}

#[test]
fn uvm_mappings_are_charged_by_whole_pages_and_empty_ones_leave_nothing() {
    let sandbox = sandbox(64 * MIB);
    for _ in 0..3 {
        sandbox.charge_uvm_mapping(0).unwrap();
    }
    assert_eq!(sandbox.usage()[0].used, 0);
    sandbox.charge_uvm_mapping(1).unwrap();
    assert_eq!(sandbox.usage()[0].used, 4096);
    assert_eq!(sandbox.audit_uvm(4096), crate::dispatch::UvmVerdict::Charged);
    assert!(sandbox.charge_uvm_mapping(u64::MAX).is_err());
}

#[test]
fn small_pages_are_charged_as_the_large_ones_that_they_take() {
    let sandbox = sandbox(64 * MIB);
    let tenant = Tenant::new(&sandbox);
    for (handle, answered, charged) in [(10, 4096, 64 << 10), (11, MIB + 4096, MIB + (64 << 10))] {
        let before = tenant.used();
        sandbox.driver().state.lock().unwrap().grow = Some(answered);
        assert_eq!(tenant.memory(1, handle, answered), 0);
        assert_eq!(tenant.used() - before, charged);
    }
}

#[test]
fn mappings_in_gpu_address_spaces_are_bounded() {
    let sandbox = sandbox(64 * MIB);
    let tenant = Tenant::new(&sandbox);
    tenant.memory(1, 10, 2 * MIB);
    tenant.alloc(1, 11, 0x70, &[0; 24]);
    let map = || {
        let mut bytes = vec![0; 64];
        for (at, value) in [(0, tenant.client), (4, 1), (8, 11), (12, 10)] {
            put32(&mut bytes, at, value).unwrap();
        }
        get32(&tenant.call(0x57, &bytes).1, 56).unwrap()
    };
    let unmap = |size: u64| {
        let mut bytes = vec![0; 48];
        for (at, value) in [(0, tenant.client), (4, 1), (8, 11), (12, 10)] {
            put32(&mut bytes, at, value).unwrap();
        }
        put64(&mut bytes, 32, size).unwrap();
        get32(&tenant.call(0x58, &bytes).1, 40).unwrap()
    };
    assert!((0..1 << 14).all(|_| map() == 0));
    assert_eq!(map(), 0x1a);
    // A part of one mapping: there may be two now.
    assert_eq!((unmap(4096), map()), (0, 0x1a));
    assert_eq!((unmap(0), map(), map()), (0, 0, 0x1a));
}
