//! No address of the tenant reaches the driver.

use gpuslice_policy::row::Length;

use super::checks::pointed;
use crate::bytes::{put32, put64};
use crate::testing::{PARAMS, Tenant, sandbox};

/// Whether any eight bytes of `bytes` are an address in the tenant's memory.
fn has_address(bytes: &[u8]) -> bool {
    bytes.windows(8).any(|window| u64::from_le_bytes(window.try_into().unwrap()) >> 32 == PARAMS >> 32)
}

#[test]
fn every_pointer_of_every_control_is_replaced() {
    let sandbox = sandbox(1 << 30);
    let tenant = Tenant::new(&sandbox);
    let control = tenant.control.try_clone().unwrap();
    tenant.caller.files.lock().unwrap().insert(0, control);
    let mut pointers = 0;
    for row in sandbox.table.controls() {
        let params = pointed(row);
        pointers += row.pointers.len();
        sandbox.driver().calls();
        let (_, after) = tenant.control(2, row.cmd, &params);
        for pointer in row.pointers {
            let at = usize::try_from(pointer.at).unwrap();
            assert_eq!(after[at..at + 8], params[at..at + 8], "{}: the tenant's own comes back", row.name);
        }
        for (_, arg) in sandbox.driver().calls() {
            assert!(!has_address(&arg.bytes), "{}", row.name);
            assert!(arg.links.iter().all(|link| !has_address(&link.bytes)), "{}", row.name);
        }
    }
    assert!(pointers > 10);
}

#[test]
fn parameters_and_rights_of_an_allocation_are_replaced() {
    let sandbox = sandbox(1 << 30);
    let tenant = Tenant::new(&sandbox);
    let mut forwarded = 0;
    for row in sandbox.table.classes() {
        // A class without parameters as well: a pointer given for nothing must not get through.
        let mut long = tenant.alloc_outer(1, 0x6000, row.id);
        put64(&mut long, 24, PARAMS + 0x9000).unwrap();
        let mut short = long[..32].to_vec();
        put64(&mut short, 24, 0).unwrap();
        put32(&mut short, 8, 0x6001).unwrap();
        for outer in [long, short] {
            sandbox.driver().calls();
            let (_, after) = tenant.call(0x2b, &outer);
            assert_eq!(after[16..24], outer[16..24], "{}: the tenant's own comes back", row.name);
            for (_, arg) in sandbox.driver().calls() {
                forwarded += 1;
                assert!(!has_address(&arg.bytes), "{}", row.name);
            }
        }
    }
    assert!(forwarded > 50);
}

#[test]
fn events_are_fetched_into_a_buffer_of_ours() {
    let sandbox = sandbox(1 << 30);
    let tenant = Tenant::new(&sandbox);
    sandbox.driver().calls();
    let mut bytes = vec![0; 16];
    put64(&mut bytes, 0, PARAMS).unwrap();
    let (_, after) = tenant.call(0x52, &bytes);
    assert_eq!(after[..8], bytes[..8]);
    let calls = sandbox.driver().calls();
    assert_eq!(calls[0].1.links[0].bytes.len(), 40);
    assert!(!has_address(&calls[0].1.bytes));
}

#[test]
fn lists_that_are_too_long_are_refused() {
    let sandbox = sandbox(1 << 30);
    let tenant = Tenant::new(&sandbox);
    sandbox.driver().calls();
    for row in sandbox.table.controls() {
        let mut params = pointed(row);
        for pointer in row.pointers {
            let (Length::List { count, .. } | Length::Square { count, .. }) = pointer.length else {
                continue;
            };
            put32(&mut params, count, u32::MAX).unwrap();
            // Handles are looked at first, where a row has both.
            let status = tenant.control(2, row.cmd, &params).0;
            assert!(matches!(status, 0x1f | 0x57), "{} {status:#x}", row.name);
        }
    }
    assert!(sandbox.driver().calls().is_empty());
}
