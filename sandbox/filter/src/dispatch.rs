//! The driver's numbers as sets that a filter can compare with.
//!
//! Owns: the partition of all ioctl commands into those that must be trapped and those that may run natively.
//! Trusts: `gpuslice-policy` for the numbers. Promises: [`trapped`] and [`partition`] agree with
//! `gpuslice_policy::acts_on` for every command.

use crate::cube::{Cube, byte_blocks, cover_without};

/// The raw numbers of the UVM nodes: commands below 512.
const UVM_LOW: Cube = Cube::new(0xffff_fe00, 0);
/// UVM's commands 0x300000xx.
const UVM_HIGH: Cube = Cube::new(0xffff_ff00, 0x3000_0000);

/// What happens to the commands of a cube.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// The sandbox performs it, or it fails.
    Trap,
    /// The kernel performs it.
    Native,
}

fn is_escape(byte: u8) -> bool {
    gpuslice_policy::escape_bytes().contains(&byte)
}

/// Every command that the driver may act on, harmless look-alikes included; cubes may overlap.
pub(crate) fn trapped() -> Vec<Cube> {
    let mut cubes = byte_blocks(is_escape);
    cubes.extend([UVM_LOW, UVM_HIGH]);
    cubes
}

/// The look-alikes that ordinary programs need, of those that the policy calls harmless.
const NEEDED: [u32; 6] = [
    0x5429,      // TIOCGSID
    0x5452,      // FIOASYNC: servers that pass signals over sockets
    0x8927,      // SIOCGIFHWADDR
    0x8933,      // SIOCGIFINDEX: if_nametoindex
    0x402c_542b, // TCSETS2
    0x802c_542a, // TCGETS2: isatty of new C libraries
];

/// Every command that the driver may act on, and the look-alikes that hardly anybody needs; cubes may overlap.
///
/// Where the default is to allow, an exception can't be a rule, so each takes some 25 rules around it, and each
/// rule takes some 45 us of a container's life in the runtime. So only the needed ones are left out.
pub(crate) fn trapped_around_needed() -> Vec<Cube> {
    trapped().into_iter().flat_map(|cube| cover_without(cube, &NEEDED)).collect()
}

/// Every command with its fate. Cubes overlap: where they do, one lies in the other, and the inner one counts.
pub(crate) fn partition() -> Vec<(Cube, Fate)> {
    let mut all: Vec<(Cube, Fate)> =
        gpuslice_policy::harmless().iter().map(|cmd| (Cube::word(*cmd), Fate::Native)).collect();
    all.extend(byte_blocks(is_escape).into_iter().map(|block| (block, Fate::Trap)));
    for block in byte_blocks(|byte| !is_escape(byte)) {
        for raw in [UVM_LOW, UVM_HIGH] {
            all.extend(block.intersect(raw).map(|cube| (cube, Fate::Trap)));
        }
        all.push((block, Fate::Native));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpuslice_policy::acts_on;
    use proptest::prelude::*;

    /// The fate that the order "more specific first" gives.
    fn fate(partition: &[(Cube, Fate)], cmd: u32) -> Fate {
        let hits = partition.iter().filter(|(cube, _)| cube.contains(cmd.into()));
        hits.max_by_key(|(cube, _)| cube.mask.count_ones()).unwrap().1
    }

    fn check(cmd: u32) {
        let partition = partition();
        let wanted = if acts_on(cmd) { Fate::Trap } else { Fate::Native };
        assert_eq!(fate(&partition, cmd), wanted, "{cmd:#x}");
        let (all, around) = (trapped(), trapped_around_needed());
        let holds = |cubes: &[Cube]| cubes.iter().any(|cube| cube.contains(cmd.into()));
        let harmless = gpuslice_policy::harmless().contains(&cmd);
        assert_eq!(holds(&all), acts_on(cmd) || harmless, "{cmd:#x}");
        assert_eq!(holds(&around), holds(&all) && !NEEDED.contains(&cmd), "{cmd:#x}");
    }

    #[test]
    fn overlapping_cubes_of_the_partition_are_ordered_by_their_masks() {
        let partition = partition();
        for (a, fate_a) in &partition {
            for (b, fate_b) in &partition {
                if fate_a != fate_b && a.intersect(*b).is_some() {
                    assert!(a.is_within(*b) || b.is_within(*a), "{a:x?} {b:x?}");
                    assert_ne!(a.mask, b.mask);
                }
            }
        }
    }

    #[test]
    fn what_is_needed_is_harmless() {
        assert!(NEEDED.iter().all(|cmd| gpuslice_policy::harmless().contains(cmd)));
    }

    #[test]
    fn every_number_byte_with_telling_upper_bits_has_the_fate_that_the_policy_says() {
        for byte in 0..=0xff_u32 {
            let harmless = gpuslice_policy::harmless().iter().map(|cmd| cmd & 0xffff_ff00);
            for upper in harmless.chain([0, 0x100, 0x200, 0x3000_0000, 0x3000_0100, 0x2000_0000, 0x1000_0000])
            {
                check(upper | byte);
            }
            for bit in 8..32 {
                check(1 << bit | byte);
            }
        }
    }

    proptest! {
        #[test]
        fn any_command_has_the_fate_that_the_policy_says(cmd: u32, bit in 0_u32..32) {
            check(cmd);
            for harmless in gpuslice_policy::harmless() {
                check(harmless ^ (1 << bit));
            }
        }
    }
}
