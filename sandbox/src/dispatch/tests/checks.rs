//! What is refused, and how.

use gpuslice_policy::row::{Control, Length};
use nix::errno::Errno;

use crate::bytes::{get32, put32, put64};
use crate::dispatch::Outcome;
use crate::driver::Node;
use crate::testing::{FakeCaller, PARAMS, Tenant, file, sandbox};

const GIB: u64 = 1 << 30;

/// Parameters of a control with each pointer set into the tenant's memory and each count to two.
pub(super) fn pointed(row: &Control) -> Vec<u8> {
    let mut params = vec![0; usize::try_from(row.size).unwrap()];
    for (place, pointer) in (0u64..).zip(row.pointers) {
        put64(&mut params, pointer.at, PARAMS + 0x10000 + 0x4000 * place).unwrap();
        if let Length::List { count, .. } | Length::Square { count, .. } = pointer.length {
            put32(&mut params, count, 2).unwrap();
        }
    }
    params
}

#[test]
fn other_type_bytes_and_directions_never_reach_the_driver() {
    // The driver takes them for the same command; no library makes them.
    let sandbox = sandbox(GIB);
    let tenant = Tenant::new(&sandbox);
    sandbox.driver().calls();
    let outer = tenant.control_outer(2, 0x2080_1303, 1028);
    for (cmd, outcome) in [
        (0xc020_462a_u32, Outcome::Return(0)),
        (0x0020_542a, Outcome::Error(Errno::EINVAL)),
        (0x8020_462a, Outcome::Error(Errno::EINVAL)),
        (0xc020_ff2a, Outcome::Error(Errno::EINVAL)),
    ] {
        assert_eq!(tenant.call_on(&tenant.control, Node::Control, cmd, &outer).0, outcome, "{cmd:#x}");
    }
    assert_eq!(sandbox.driver().calls().len(), 1);
}

#[test]
fn wrong_sizes_nodes_and_unknown_numbers_never_reach_the_driver() {
    let sandbox = sandbox(GIB);
    let tenant = Tenant::new(&sandbox);
    sandbox.driver().calls();
    let einval = Outcome::Error(Errno::EINVAL);
    let wrong = [
        (0x2a, 31),
        (0x2a, 0),
        (0x2b, 40),
        (0xda, 0),
        (0xda, 4),
        (0x5f, 0),
        (0xc8, 71),
        (0xd4, 0),
        (0x99, 8),
    ];
    for (nr, size) in wrong {
        assert_eq!(tenant.call(nr, &vec![0; size]).0, einval, "{nr:#x} {size}");
    }
    // OS-descriptor memory is a command of the GPU's node, controls of the control node.
    assert_eq!(tenant.call(0x27, &[0; 56]).0, einval);
    let on_gpu = tenant.call_on(&tenant.gpu, Node::Gpu { minor: 0 }, 0xc020_462a, &[0; 32]);
    assert_eq!(on_gpu.0, einval);
    for cmd in [0, 1, 2, 81, 199, 200, 311, 0x3000_0003] {
        assert_eq!(tenant.uvm(cmd, &[0; 64]).0, einval, "{cmd}");
    }
    assert_eq!(tenant.call_on(&tenant.uvm, Node::UvmTools, 56, &[0; 56]).0, einval);
    let foreign = tenant.call_on(&tenant.gpu, Node::Gpu { minor: 1 }, 0xc008_46da, &[0; 8]);
    assert_eq!(foreign.0, Outcome::Error(Errno::ENOTTY));
    assert!(sandbox.driver().calls().is_empty());
    assert!(sandbox.refused() > 10);
}

#[test]
fn a_wrapped_command_is_treated_as_the_command_it_carries() {
    let sandbox = sandbox(GIB);
    let tenant = Tenant::new(&sandbox);
    let inner = PARAMS + 0x8000;
    let wrap = |nr: u32, size: u32| {
        let mut bytes = vec![0; 16];
        put32(&mut bytes, 0, nr).unwrap();
        put32(&mut bytes, 4, size).unwrap();
        put64(&mut bytes, 8, inner).unwrap();
        tenant.call(0xd3, &bytes).0
    };
    let denied = tenant.control_outer(tenant.client, 0x2080_110b, 536);
    tenant.caller.put(inner, &denied);
    assert_eq!(wrap(0x2a, 32), Outcome::Return(0));
    assert_eq!(get32(&tenant.caller.get(inner, 32), 28), Ok(0x56));
    for (nr, size) in [(0x2a, 31), (0xd3, 16), (0x12a, 32), (0x2a, 0x4000_0020)] {
        assert_eq!(wrap(nr, size), Outcome::Error(Errno::EINVAL), "{nr:#x} {size:#x}");
    }
}

#[test]
fn controls_with_flags_wrong_sizes_or_null_parameters_get_the_drivers_status() {
    let sandbox = sandbox(GIB);
    let tenant = Tenant::new(&sandbox);
    sandbox.driver().calls();
    let status = |outer: &[u8]| get32(&tenant.call(0x2a, outer).1, 28).unwrap();
    let good = tenant.control_outer(2, 0x2080_1303, 1028);
    let changed = |at: u32, value: u32| {
        let mut outer = good.clone();
        put32(&mut outer, at, value).unwrap();
        outer
    };
    assert_eq!(status(&changed(12, 1)), 0x29);
    assert_eq!(status(&changed(24, 1024)), 0x3a);
    let mut null = good.clone();
    put64(&mut null, 16, 0).unwrap();
    assert_eq!(status(&null), 0x3d);
    // The firmware's controls take any size in the driver: here only theirs.
    let mut huge = tenant.control_outer(2, 0x2080_8159, 332);
    put32(&mut huge, 24, 0xffff_ffff).unwrap();
    assert_eq!(status(&huge), 0x3a);
    let mut wild = good;
    put64(&mut wild, 16, 0xdead_0000).unwrap();
    assert_eq!(tenant.call(0x2a, &wild).0, Outcome::Error(Errno::EFAULT));
    assert!(sandbox.driver().calls().is_empty());
}

#[test]
fn clients_and_objects_that_are_not_own_are_refused_everywhere() {
    let sandbox = sandbox(GIB);
    let mut tenant = Tenant::new(&sandbox);
    tenant.memory(1, 10, 4096);
    tenant.uvm_initialize();
    let own = tenant.client;
    // The driver has it; this sandbox didn't make it.
    let foreign = sandbox.driver().foreign_client();
    sandbox.driver().calls();
    tenant.client = foreign;
    assert_eq!(tenant.control(foreign, 0x201, &[0; 128]).0, 0x23);
    assert_eq!(tenant.memory(foreign, 11, 4096), 0x23);
    assert_eq!(tenant.free(1), 0x23);
    assert_eq!(tenant.dup(1, 12, (own, 10)), 0x23);
    tenant.client = own;
    assert_eq!(tenant.dup(1, 12, (foreign, foreign)), 0x23);
    assert_eq!(tenant.dup(1, 12, (own, 99)), 0x57);
    assert_eq!(tenant.dup(77, 12, (own, 10)), 0x36);
    assert_eq!(tenant.control(99, 0x2080_1303, &[0; 1028]).0, 0x57);
    assert_eq!(tenant.memory(99, 11, 4096), 0x36);
    // In parameters: a channel's memory, an event's client, a channel of a control, a share's target.
    let mut channel = vec![0; 368];
    put32(&mut channel, 32, 0x999).unwrap();
    assert_eq!(tenant.alloc(1, 20, 0xc86f, &channel), 0x57);
    let mut event = vec![0; 24];
    put32(&mut event, 0, foreign).unwrap();
    put32(&mut event, 8, 0x79).unwrap();
    assert_eq!(tenant.alloc(2, 21, 0x79, &event), 0x23);
    let mut mode = vec![0; 32];
    put32(&mut mode, 4, 0x999).unwrap();
    assert_eq!(tenant.control(2, 0x2080_1210, &mode).0, 0x57);
    let mut share = vec![0; 24];
    for (at, value) in [(0, own), (4, 10), (8, foreign)] {
        put32(&mut share, at, value).unwrap();
    }
    assert_eq!(get32(&tenant.call(0x35, &share).1, 20), Ok(0x23));
    let mut external = vec![0; 9264];
    for (at, value) in [(9248, u32::MAX), (9252, foreign), (9256, foreign)] {
        put32(&mut external, at, value).unwrap();
    }
    assert_eq!(get32(&tenant.uvm(33, &external).1, 9260), Ok(0x23));
    assert!(sandbox.driver().calls().is_empty());
}

#[test]
fn devices_and_ids_of_cards_that_were_not_granted_are_refused() {
    let sandbox = sandbox(GIB);
    let tenant = Tenant::new(&sandbox);
    for (instance, status) in [(1u32, 0x1b), (3, 0x1b), (2, 0)] {
        let mut device = vec![0; 56];
        put32(&mut device, 0, instance).unwrap();
        assert_eq!(tenant.alloc(tenant.client, 50 + instance, 0x80, &device), status, "{instance}");
    }
    // 0x207 is the second granted card, 0x107 the one between.
    let mut id = vec![0; 32];
    for (card, status) in [(0x107, 0x1f), (0x207, 0)] {
        put32(&mut id, 0, card).unwrap();
        assert_eq!(tenant.control(tenant.client, 0x205, &id).0, status);
    }
    let mut attach = vec![0xff; 132];
    put32(&mut attach, 0, 0x107).unwrap();
    assert_eq!(tenant.control(tenant.client, 0x215, &attach).0, 0x1f);
    let ids: Vec<u8> = [7u32, 0, 0x107].iter().flat_map(|id| id.to_le_bytes()).collect();
    assert_eq!(tenant.call(0xd4, &ids).0, Outcome::Error(Errno::EINVAL));
    assert_eq!(tenant.call(0xd4, &ids[..8]).0, Outcome::Return(0));
}

#[test]
fn events_that_are_not_os_events_are_refused_and_the_file_number_passes_through() {
    let sandbox = sandbox(GIB);
    let tenant = Tenant::new(&sandbox);
    sandbox.driver().calls();
    let mut event = vec![0; 24];
    put32(&mut event, 0, tenant.client).unwrap();
    put32(&mut event, 4, 2).unwrap();
    put64(&mut event, 16, 41).unwrap();
    for class in [0u32, 5, 0x78, 0x7e] {
        put32(&mut event, 8, class).unwrap();
        assert_eq!(tenant.alloc(2, 30, 5, &event), 0x1f, "{class:#x}");
        assert_eq!(tenant.alloc(2, 30, 0x79, &event), 0x1f, "{class:#x}");
    }
    assert!(sandbox.driver().calls().is_empty());
    put32(&mut event, 8, 0x79).unwrap();
    assert_eq!(tenant.alloc(2, 30, 0x79, &event), 0);
    let calls = sandbox.driver().calls();
    assert_eq!(calls[0].1.links[0].bytes[16..24], 41u64.to_le_bytes());
}

#[test]
fn files_in_parameters_must_be_the_drivers() {
    let sandbox = sandbox(GIB);
    let tenant = Tenant::new(&sandbox);
    let control = tenant.control.try_clone().unwrap();
    tenant.caller.files.lock().unwrap().extend([(3, file()), (4, control)]);
    sandbox.driver().calls();
    assert_eq!(tenant.call(0xc9, &3i32.to_le_bytes()).0, Outcome::Error(Errno::EINVAL));
    assert_eq!(tenant.call(0xc9, &9i32.to_le_bytes()).0, Outcome::Error(Errno::EBADF));
    let (outcome, bytes) = tenant.call(0xc9, &4i32.to_le_bytes());
    assert_eq!((outcome, bytes), (Outcome::Return(0), 4i32.to_le_bytes().to_vec()));
    let calls = sandbox.driver().calls();
    assert_eq!(calls.len(), 1);
    assert_ne!(calls[0].1.bytes, 4i32.to_le_bytes(), "the driver gets the number of our copy");
}

#[test]
fn a_cancelled_call_never_reaches_the_driver() {
    let sandbox = sandbox(GIB);
    let mut tenant = Tenant::new(&sandbox);
    sandbox.driver().calls();
    tenant.caller.cancelled = true;
    let (outcome, _) = tenant.call(0x2b, &tenant.alloc_outer(1, 10, 0x3e));
    assert_eq!(outcome, Outcome::Error(Errno::ENOENT));
    assert!(sandbox.driver().calls().is_empty());
    assert_eq!(sandbox.host.used(), 0);
}

#[test]
fn a_range_that_is_being_moved_is_asked_for_again_and_then_pinned_through_our_mapping() {
    let sandbox = sandbox(GIB);
    let tenant = Tenant::new(&sandbox);
    *tenant.caller.moving.lock().unwrap() = 1;
    let mut bytes = vec![0; 56];
    for (at, value) in [(0, tenant.client), (4, 1), (8, 60), (12, 0x71), (48, 55)] {
        put32(&mut bytes, at, value).unwrap();
    }
    put64(&mut bytes, 24, 0x7777_0000).unwrap();
    put64(&mut bytes, 32, 0xffff).unwrap();
    let pin = || tenant.call_on(&tenant.gpu, Node::Gpu { minor: 0 }, 0xc038_4627, &bytes);
    assert_eq!(pin().0, Outcome::Restart);
    assert_eq!(sandbox.host.used(), 0);
    sandbox.driver().calls();
    let (outcome, after) = pin();
    assert_eq!(outcome, Outcome::Return(0));
    assert_eq!(after[24..32], bytes[24..32], "the tenant's own address comes back");
    assert_eq!(after[48..52], bytes[48..52]);
    let calls = sandbox.driver().calls();
    assert_ne!(calls[0].1.bytes[24..32], bytes[24..32], "the driver gets the sandbox's mapping");
    assert_eq!(calls[0].1.bytes[48..52], [0xff; 4]);
    assert_eq!(sandbox.host.used(), 0x10000);
    tenant.free(60);
    assert_eq!(sandbox.host.used(), 0);
}

#[test]
fn no_byte_of_tenant_memory_is_read_twice() {
    // The memory changes after each read: what is decided and what is forwarded come from one copy.
    let sandbox = sandbox(GIB);
    let mut tenant = Tenant::new(&sandbox);
    tenant.memory(1, 10, 4096);
    tenant.uvm_initialize();
    tenant.caller.treacherous = true;
    let fresh = |caller: &FakeCaller| caller.memory.lock().unwrap().fill(0);
    let check = |caller: &FakeCaller, what: &str| {
        let mut reads = caller.reads.lock().unwrap().clone();
        reads.sort_unstable();
        assert!(reads.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{what} reads twice: {reads:x?}");
    };
    for row in sandbox.table.controls() {
        fresh(&tenant.caller);
        let params = pointed(row);
        tenant.caller.put(PARAMS, &params);
        tenant.call(0x2a, &tenant.control_outer(2, row.cmd, params.len()));
        check(&tenant.caller, row.name);
    }
    for row in sandbox.table.classes() {
        fresh(&tenant.caller);
        tenant.call(0x2b, &tenant.alloc_outer(1, 0x5000, row.id));
        check(&tenant.caller, row.name);
    }
    for row in sandbox.table.uvm_commands() {
        fresh(&tenant.caller);
        tenant.uvm(row.cmd, &vec![0; usize::try_from(row.size).unwrap()]);
        check(&tenant.caller, row.name);
    }
    for row in sandbox.table.escapes() {
        for size in row.sizes() {
            fresh(&tenant.caller);
            tenant.call(u32::from(row.nr), &vec![0; usize::try_from(size).unwrap()]);
            check(&tenant.caller, row.name);
        }
    }
}

#[test]
fn what_is_charged_and_what_is_forwarded_come_from_one_read() {
    let sandbox = sandbox(GIB);
    let mut tenant = Tenant::new(&sandbox);
    tenant.caller.treacherous = true;
    let mut params = vec![0; 128];
    put64(&mut params, 64, 1 << 20).unwrap();
    tenant.caller.put(PARAMS, &params);
    tenant.call(0x2b, &tenant.alloc_outer(1, 10, 0x40));
    assert_eq!((tenant.used(), sandbox.driver().in_use(0)), (1 << 20, 1 << 20));
}

#[test]
fn a_tenant_does_not_choose_the_number_of_a_client() {
    let sandbox = sandbox(64 << 20);
    let tenant = Tenant::new(&sandbox);
    sandbox.driver().calls();
    for (client, handle) in [(0, 0xc1d0_0abc), (0xc1d0_0abc, 0xc1d0_0abc), (tenant.client, 0)] {
        let mut bytes = vec![0; 48];
        for (at, value) in [(0, client), (8, handle), (12, 0x41)] {
            put32(&mut bytes, at, value).unwrap();
        }
        let (outcome, bytes) = tenant.call(0x2b, &bytes);
        assert_eq!((outcome, get32(&bytes, 40)), (Outcome::Return(0), Ok(0x1f)), "{client:#x} {handle:#x}");
    }
    assert!(sandbox.driver().calls().is_empty());
}
