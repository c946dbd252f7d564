//! What the tenant sees.

use nix::errno::Errno;

use crate::bytes::{get32, get64, put32, put64};
use crate::dispatch::Outcome;
use crate::testing::{Tenant, sandbox};

const GIB: u64 = 1 << 30;

#[test]
fn memory_figures_show_the_slice() {
    let sandbox = sandbox(4 * GIB);
    let tenant = Tenant::new(&sandbox);
    tenant.memory(1, 10, GIB);
    let mut params = vec![0; 1028];
    put32(&mut params, 0, 3).unwrap();
    for (at, index) in [(4, 0x16u32), (12, 0x08), (20, 0x09)] {
        put32(&mut params, at, index).unwrap();
    }
    let (status, after) = tenant.control(2, 0x2080_1303, &params);
    let figures: Vec<u32> = (4..28).step_by(8).map(|at| get32(&after, at + 4).unwrap()).collect();
    assert_eq!((status, figures), (0, vec![3 << 20, 4 << 20, 4 << 20]));
    // An absurd count rewrites what is there and nothing else.
    put32(&mut params, 0, u32::MAX).unwrap();
    assert_eq!(tenant.control(2, 0x2080_1303, &params).0, 0);
    // An object that stands under no card has no figures.
    assert_eq!(tenant.control(tenant.client, 0x2080_1303, &params).0, 0x1f);
}

#[test]
fn only_granted_cards_are_listed() {
    let sandbox = sandbox(GIB);
    let tenant = Tenant::new(&sandbox);
    let (_, probed) = tenant.control(tenant.client, 0x214, &[0; 384]);
    let ids: Vec<u32> = (0..128).step_by(4).map(|at| get32(&probed, at).unwrap()).collect();
    assert_eq!(ids[..2], [7, 0x207]);
    assert!(ids[2..].iter().all(|id| *id == u32::MAX));
    let (outcome, cards) = tenant.call(0xc8, &vec![0xee; 72 * 32]);
    assert_eq!(outcome, Outcome::Return(0));
    let listed: Vec<(u8, u32)> =
        cards.chunks(72).take(3).map(|card| (card[0], get32(card, 56).unwrap())).collect();
    assert_eq!(listed, [(1, 0), (0, 0), (1, 2)]);
    assert!(cards[3 * 72..].iter().all(|byte| *byte == 0));
    assert_eq!(tenant.control(tenant.client, 0x204, &[0; 4]).1, 0b101u32.to_le_bytes());
}

#[test]
fn a_list_of_cards_that_is_too_short_fails_as_in_the_driver() {
    let sandbox = sandbox(GIB);
    let tenant = Tenant::new(&sandbox);
    assert_eq!(tenant.call(0xc8, &[0; 72]).0, Outcome::Error(Errno::EINVAL));
    assert_eq!(tenant.call(0xc8, &[0; 72 * 3]).0, Outcome::Return(0));
}

#[test]
fn processes_of_others_and_scheduling_never_reach_the_driver() {
    let sandbox = sandbox(GIB);
    let tenant = Tenant::new(&sandbox);
    let mut group = vec![0; 20];
    put32(&mut group, 12, 11).unwrap();
    assert_eq!(tenant.alloc(1, 10, 0xa06c, &group), 0);
    sandbox.driver().calls();
    let (status, pids) = tenant.control(2, 0x2080_018d, &vec![0xff; 3812]);
    assert_eq!((status, get32(&pids, 8)), (0, Ok(0)));
    for cmd in [0x2080_200au32, 0x0080_1909, 0x2080_2210, 0x2080_220c] {
        let size = sandbox.table.control(cmd).unwrap().size;
        assert_eq!(tenant.control(2, cmd, &vec![0; usize::try_from(size).unwrap()]).0, 0, "{cmd:#x}");
    }
    let mut slice = vec![0; 8];
    assert_eq!(get64(&tenant.control(10, 0xa06c_0104, &slice).1, 0), Ok(2048));
    put64(&mut slice, 0, 500).unwrap();
    assert_eq!(tenant.control(10, 0xa06c_0103, &slice).0, 0);
    assert_eq!(get64(&tenant.control(10, 0xa06c_0104, &[0; 8]).1, 0), Ok(500));
    // Stopping is answered, wait-for-idle preemption is not set.
    assert_eq!(tenant.control(10, 0xa06c_0101, &[0, 0, 0]).0, 0);
    let mut mode = vec![0; 32];
    put32(&mut mode, 0, 1).unwrap();
    put32(&mut mode, 4, 10).unwrap();
    assert_eq!(tenant.control(2, 0x2080_1210, &mode).0, 0);
    assert!(sandbox.driver().calls().is_empty());
    put32(&mut mode, 12, 2).unwrap();
    assert_eq!(tenant.control(2, 0x2080_1210, &mode).0, 0);
    assert_eq!(tenant.control(10, 0xa06c_0101, &[1, 0, 0]).0, 0);
    assert_eq!(sandbox.driver().calls().len(), 2);
}

#[test]
fn the_shared_data_page_is_replaced_by_system_memory_under_the_same_handle() {
    let sandbox = sandbox(GIB);
    let tenant = Tenant::new(&sandbox);
    sandbox.driver().calls();
    assert_eq!(tenant.alloc(2, 40, 0xde, &[0; 8]), 0);
    let calls = sandbox.driver().calls();
    assert_eq!(calls.len(), 1);
    let outer = &calls[0].1.bytes;
    assert_eq!((get32(outer, 4), get32(outer, 8), get32(outer, 12)), (Ok(1), Ok(40), Ok(0x3e)));
    assert_eq!(tenant.control(40, 0x00de_0001, &[0; 8]).0, 0);
    assert!(sandbox.driver().calls().is_empty());
    assert_eq!(sandbox.host.used(), 64 << 10);
    assert_eq!(tenant.free(40), 0);
    assert_eq!(sandbox.host.used(), 0);
}

#[test]
fn multi_process_sharing_is_set_and_hidden() {
    let sandbox = sandbox(GIB);
    let tenant = Tenant::new(&sandbox);
    sandbox.driver().calls();
    let (_, after) = tenant.uvm(0x3000_0001, &[0; 16]);
    assert_eq!(get64(&after, 0), Ok(0));
    assert_eq!(get64(&sandbox.driver().calls()[0].1.bytes, 0), Ok(2));
}

#[test]
fn attaching_all_cards_attaches_the_granted_ones() {
    let sandbox = sandbox(GIB);
    let tenant = Tenant::new(&sandbox);
    sandbox.driver().calls();
    let mut attach = vec![0; 132];
    put32(&mut attach, 0, 0xffff).unwrap();
    assert_eq!(tenant.control(tenant.client, 0x215, &attach).0, 0);
    let calls = sandbox.driver().calls();
    let params = &calls[0].1.links[0].bytes;
    let ids: Vec<u32> = (0..16).step_by(4).map(|at| get32(params, at).unwrap()).collect();
    assert_eq!(ids, [7, 0x207, u32::MAX, u32::MAX]);
}
