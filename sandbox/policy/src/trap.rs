//! Which ioctl numbers a granted device node acts on: the set that the container's filter must trap.
//!
//! Owns: the numbers. Promises: a number for which [`acts_on`] is false does nothing on any NVIDIA node that a
//! container may hold, whatever its argument; the reverse may be over-cautious. The same set holds for every
//! driver branch known.

/// Number bytes (`cmd & 0xff`) that the driver's control and GPU nodes look at, ascending. The driver ignores
/// the type byte, the direction bits and, up to this point, the size.
const ESCAPE_BYTES: [u8; 41] = [
    0x27, 0x28, 0x29, 0x2a, 0x2b, 0x32, 0x33, 0x34, 0x35, 0x37, 0x38, 0x39, 0x41, 0x4a, 0x4d, 0x4e, 0x4f,
    0x52, 0x54, 0x56, 0x57, 0x58, 0x59, 0x5c, 0x5d, 0x5e, 0x5f, 0xc8, 0xc9, 0xce, 0xcf, 0xd1, 0xd2, 0xd3,
    0xd4, 0xd5, 0xd6, 0xd7, 0xd8, 0xd9, 0xda,
];

/// Terminal and socket commands whose number byte collides with an escape's but whose size differs from it, so
/// that every NVIDIA node refuses them: they may run natively. Ascending.
const HARMLESS: [u32; 18] = [
    0x5427,      // TIOCSBRK
    0x5428,      // TIOCCBRK
    0x5429,      // TIOCGSID
    0x5437,      // TIOCVHANGUP
    0x5441,      // TIOCGPTPEER
    0x5452,      // FIOASYNC
    0x5459,      // TIOCSERGETLSR
    0x545c,      // TIOCMIWAIT
    0x545d,      // TIOCGICOUNT
    0x8927,      // SIOCGIFHWADDR
    0x8933,      // SIOCGIFINDEX
    0x8954,      // SIOCGARP
    0xae41,      // KVM_CREATE_VCPU
    0x402c_542b, // TCSETS2
    0x8004_5432, // TIOCGDEV
    0x8004_5438, // TIOCGPKT
    0x8004_5439, // TIOCGPTLCK
    0x802c_542a, // TCGETS2
];

/// Number bytes below which (with the rest of the command zero or one) the UVM nodes' raw numbers lie.
const UVM_RAW_END: u32 = 512;
/// Prefix of UVM's two commands outside that range.
const UVM_PREFIX: u32 = 0x3000_0000;

/// The number bytes that the driver's control and GPU nodes act on, ascending.
pub fn escape_bytes() -> &'static [u8] {
    &ESCAPE_BYTES
}

/// Exact commands that no NVIDIA node acts on though their number byte collides, ascending.
pub fn harmless() -> &'static [u32] {
    &HARMLESS
}

/// Whether some granted device node may act on the ioctl command `cmd`.
pub fn acts_on(cmd: u32) -> bool {
    if cmd < UVM_RAW_END || cmd & 0xffff_ff00 == UVM_PREFIX {
        return true;
    }
    let [byte, ..] = cmd.to_le_bytes();
    ESCAPE_BYTES.binary_search(&byte).is_ok() && HARMLESS.binary_search(&cmd).is_err()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_lists_are_sorted_and_free_of_repeats() {
        assert!(ESCAPE_BYTES.windows(2).all(|pair| pair[0] < pair[1]));
        assert!(HARMLESS.windows(2).all(|pair| pair[0] < pair[1]));
    }

    #[test]
    fn the_type_byte_and_the_direction_do_not_matter() {
        for cmd in [0xc020_462a, 0x0000_542a, 0xffff_ff2a, 0xc030_462b, 0x8000_00d3] {
            assert!(acts_on(cmd), "{cmd:#x}");
        }
    }

    #[test]
    fn well_sized_tun_commands_and_raw_uvm_numbers_are_trapped() {
        for cmd in
            [0x4004_54c9, 0x4004_54d4, 0x4004_54d8, 0x4004_54da, 1, 2, 80, 311, 0x3000_0001, 0x3000_0002]
        {
            assert!(acts_on(cmd), "{cmd:#x}");
        }
    }

    #[test]
    fn common_terminal_and_socket_commands_run_natively() {
        for cmd in [0x5401, 0x5413, 0x5421, 0x541b, 0x802c_542a, 0x5452, 0x8933, 0x8927] {
            assert!(!acts_on(cmd), "{cmd:#x}");
        }
    }

    #[test]
    fn every_harmless_command_has_a_size_that_its_escape_refuses() {
        for cmd in HARMLESS {
            let size = (cmd >> 16) & 0x3fff;
            assert!(matches!(size, 0 | 4 | 44), "{cmd:#x}");
            assert!(ESCAPE_BYTES.contains(&cmd.to_le_bytes()[0]), "{cmd:#x} needs no exception");
        }
    }
}
