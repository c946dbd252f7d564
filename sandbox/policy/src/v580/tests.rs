use super::BRANCH;
use crate::row::*;

/// Every handle offset of a row lies within its structure.
fn fits(handles: &[Handle], size: u32) -> bool {
    handles.iter().all(|handle| match *handle {
        Handle::Client { at, .. } => at + 4 <= size,
        Handle::Object { at, client, .. } => at + 4 <= size && client.is_none_or(|client| client + 4 <= size),
    })
}

#[test]
fn every_list_is_sorted_and_free_of_repeats() {
    assert!(BRANCH.escapes.windows(2).all(|pair| pair[0].nr < pair[1].nr));
    assert!(BRANCH.uvm.windows(2).all(|pair| pair[0].cmd < pair[1].cmd));
    assert!(BRANCH.classes.windows(2).all(|pair| pair[0].id < pair[1].id));
    let controls: Vec<u32> = BRANCH.controls().map(|row| row.cmd).collect();
    assert!(controls.windows(2).all(|pair| pair[0] < pair[1]));
    let refused: Vec<u32> = BRANCH.refused.iter().flat_map(|rows| rows.iter()).map(|row| row.0).collect();
    assert!(refused.windows(2).all(|pair| pair[0] < pair[1]));
    assert!(refused.iter().all(|cmd| BRANCH.control(*cmd).is_none()));
    assert!(controls.iter().all(|cmd| BRANCH.control(*cmd).is_some()));
}

#[test]
fn every_field_of_every_row_lies_within_its_structure() {
    for row in BRANCH.controls() {
        assert!(fits(row.handles, row.size), "{}", row.name);
        for pointer in row.pointers {
            assert!(pointer.at % 8 == 0 && pointer.at + 8 <= row.size, "{}", row.name);
            match pointer.length {
                Length::List { count, element, most } => {
                    assert!(count + 4 <= row.size && element * most <= 1 << 17, "{}", row.name);
                }
                Length::Square { count, element, most } => {
                    assert!(count + 4 <= row.size && element * most * most <= 1 << 17, "{}", row.name);
                }
                Length::Fixed(_) | Length::Never => {}
            }
        }
        assert!(row.files.iter().all(|file| file.at + 4 <= row.size), "{}", row.name);
    }
    for row in BRANCH.classes {
        assert!(fits(row.handles, row.size), "{}", row.name);
    }
    for row in BRANCH.uvm {
        assert!(fits(row.handles, row.size), "{}", row.name);
        assert!(row.size == 0 || row.status + 4 <= row.size, "{}", row.name);
        assert!(row.files.iter().all(|file| file.at + 4 <= row.size), "{}", row.name);
    }
    for row in BRANCH.escapes {
        if let (Size::Exact(size), Some(status)) = (row.size, row.status) {
            assert!(status + 4 <= size, "{}", row.name);
        }
    }
}

#[test]
fn the_trap_covers_every_command_with_a_row() {
    for row in BRANCH.escapes {
        assert!(crate::escape_bytes().contains(&row.nr), "{}", row.name);
        for size in 0..=0x3fffu32 {
            if row.size.accepts(size) {
                for direction in [0u32, 0x4000_0000, 0x8000_0000, 0xc000_0000] {
                    let cmd = direction | size << 16 | 0x4600 | u32::from(row.nr);
                    assert!(crate::acts_on(cmd), "{} {cmd:#x}", row.name);
                    let cmd = direction | size << 16 | 0x5400 | u32::from(row.nr);
                    assert!(
                        crate::acts_on(cmd) || matches!(row.rule, EscapeRule::Deny),
                        "{} {cmd:#x} is called harmless but well sized",
                        row.name
                    );
                }
            }
        }
    }
    for row in BRANCH.uvm {
        assert!(crate::acts_on(row.cmd), "{}", row.name);
    }
}

#[test]
fn every_trapped_number_byte_has_a_row() {
    for nr in crate::escape_bytes() {
        assert!(BRANCH.escape(*nr).is_some(), "{nr:#x}");
    }
}

#[test]
fn commands_that_reach_beyond_the_tenant_are_not_forwarded() {
    let refused = [
        0x2080_110b,
        0x2080_111a,
        0x0080_170f,
        0x2080_1115,
        0xa06c_0105,
        0xa06c_0107,
        0xa06f_0109,
        0xa06f_0111,
        0xa06c_0110,
        0x2080_0122,
        0x2080_220a,
        0x2080_220b,
        0x2080_130e,
        0x2080_1238,
        0x2080_2096,
        0x2080_1123,
        0x2080_1124,
        0x5080_0101,
        0x0000_0b01,
        0x0000_0b03,
        0x0000_0b04,
        0x83de_0316,
        0x2080_1119,
        0x503c_0106,
    ];
    for cmd in refused {
        assert!(BRANCH.control(cmd).is_none(), "{cmd:#x}");
    }
    for cmd in [0x2080_200a, 0x2080_2210, 0x2080_220c, 0x0080_1909, 0x00de_0001] {
        assert_eq!(BRANCH.control(cmd).unwrap().rule, ControlRule::Answer, "{cmd:#x}");
    }
}

#[test]
fn classes_that_alias_or_escape_are_denied() {
    for id in [
        0x42, 0x71, 0xf3, 0xf8, 0xf9, 0xfb, 0xfd, 0xfe, 0xe0, 0xc2, 0x81, 0x82, 0x83, 0x78, 0x7e, 0x5080,
        0x90cd,
    ] {
        assert!(matches!(BRANCH.class(id).unwrap().rule, ClassRule::Deny(_)), "{id:#x}");
    }
}

#[test]
fn everything_that_cuda_was_seen_to_use_has_a_row() {
    let classes = [
        0x41, 0x80, 0x2080, 0x2081, 0x3e, 0x40, 0x50a0, 0x79, 0x503c, 0x83de, 0x9067, 0x90e6, 0x90f1, 0xa06c,
        0xc661, 0xc86f, 0xc8b5, 0xcb33, 0xcbc0, 0xde,
    ];
    for id in classes {
        assert!(!matches!(BRANCH.class(id).unwrap().rule, ClassRule::Deny(_)), "{id:#x}");
    }
    for cmd in [23, 24, 25, 27, 31, 33, 34, 37, 39, 43, 45, 47, 65, 68, 72, 73, 75, 0x3000_0001, 0x3000_0002]
    {
        assert!(!matches!(BRANCH.uvm(cmd).unwrap().rule, UvmRule::Deny), "{cmd}");
    }
    for nr in [0x27, 0x29, 0x2a, 0x2b, 0x34, 0x35, 0x4e, 0x5e, 0xc8, 0xc9, 0xce, 0xd2, 0xd4, 0xd6, 0xd7, 0xda]
    {
        assert!(!matches!(BRANCH.escape(nr).unwrap().rule, EscapeRule::Deny), "{nr:#x}");
    }
}
