//! Branch 580: read in 580.142, traced on 580.159.04, layouts compared from 580.65.06 on.

mod classes;
mod controls_device;
mod controls_engines;
mod controls_root;
mod controls_subdevice;
mod escapes;
mod refused_rest;
mod refused_root_device;
mod refused_subdevice_a;
mod refused_subdevice_b;
mod refused_subdevice_c;
mod uvm;

use crate::branch::{Branch, Version};
use crate::row::{Class, ClassRule};

/// The table.
pub(crate) static BRANCH: Branch = Branch {
    major: 580,
    floor: Version { major: 580, minor: 65, patch: 6 },
    escapes: escapes::ESCAPES,
    uvm: uvm::UVM,
    classes: classes::CLASSES,
    controls: &[
        controls_root::ROOT,
        controls_device::DEVICE,
        controls_subdevice::SUBDEVICE,
        controls_engines::ENGINES,
    ],
    refused: &[
        refused_root_device::ROOT_DEVICE,
        refused_subdevice_a::SUBDEVICE_A,
        refused_subdevice_b::SUBDEVICE_B,
        refused_subdevice_c::SUBDEVICE_C,
        refused_rest::REST,
    ],
};

/// Every class that makes, aliases or imports memory.
const MEMORY_CLASSES: [u32; 21] = [
    0x3e, 0x3f, 0x40, 0x42, 0x70, 0x71, 0x76, 0x81, 0x82, 0x83, 0xb1, 0xc2, 0xc3, 0xe0, 0xf3, 0xf8, 0xf9,
    0xfb, 0xfd, 0x50a0, 0x90ce,
];

/// A memory class is refused or says how it is accounted.
const fn accounted(classes: &[Class], id: u32) -> bool {
    let mut rows = classes;
    while let [row, rest @ ..] = rows {
        if row.id == id {
            return matches!(row.rule, ClassRule::Deny(_) | ClassRule::Memory(_));
        }
        rows = rest;
    }
    false
}

const fn all_accounted(classes: &[Class], ids: &[u32]) -> bool {
    let mut ids = ids;
    while let [id, rest @ ..] = ids {
        if !accounted(classes, *id) {
            return false;
        }
        ids = rest;
    }
    true
}

const _: () = assert!(
    all_accounted(classes::CLASSES, &MEMORY_CLASSES),
    "a memory class of branch 580 has no accounting rule"
);

#[cfg(test)]
mod tests;
