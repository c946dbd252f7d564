//! A driver call on copied parameters.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::arg::Arg;
use crate::call::check;

fn address_of(bytes: &[u8]) -> u64 {
    if bytes.is_empty() { 0 } else { bytes.as_ptr().expose_provenance() as u64 }
}

/// Calls `f` with the address of the top-level bytes while every pointer field holds its buffer's address.
///
/// # Errors
/// EINVAL, with `f` not called, when a link doesn't lie within its parent.
pub fn with_addresses<R>(arg: &mut Arg, f: impl FnOnce(u64) -> R) -> io::Result<R> {
    arg.patch(|link| address_of(&link.bytes))?;
    // The driver writes through this address: it must come from a mutable borrow.
    let address = if arg.bytes.is_empty() { 0 } else { arg.bytes.as_mut_ptr().expose_provenance() as u64 };
    let result = f(address);
    arg.patch(|_| 0)?;
    Ok(result)
}

/// Performs `cmd` on `file` with `arg`. The driver's changes are in `arg` afterwards, also when it failed.
///
/// # Errors
/// The driver's error, or EINVAL when a link doesn't lie within its parent.
pub fn ioctl(file: BorrowedFd<'_>, cmd: u32, arg: &mut Arg) -> io::Result<i32> {
    with_addresses(arg, |address| {
        // SAFETY: the command must touch only memory that this call may touch: `address` and the pointer
        // fields are buffers of `arg`, borrowed mutably for the call, of the lengths in the caller's table.
        check(unsafe { libc::ioctl(file.as_raw_fd(), libc::c_ulong::from(cmd), address) })
    })?
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn pointer_fields_hold_addresses_only_during_the_call() {
        let mut arg = Arg::flat(vec![0xff; 24]);
        let outer = arg.link(None, 8, vec![0; 16]);
        arg.link(Some(outer), 0, vec![7; 4]);
        let seen = with_addresses(&mut arg, |address| address).unwrap();
        assert_eq!(seen, arg.bytes.as_ptr() as u64);
        assert_eq!(arg.bytes[8..16], [0; 8]);
        assert_eq!(arg.bytes[..8], [0xff; 8]);
        assert_eq!(arg.links[outer].bytes, vec![0; 16]);
    }

    #[test]
    fn a_link_outside_its_parent_is_refused_before_the_call() {
        for (parent, at) in [(None, 1), (None, usize::MAX), (Some(3), 0)] {
            let mut arg = Arg::flat(vec![0; 8]);
            arg.link(parent, at, vec![1]);
            let result = with_addresses(&mut arg, |_| panic!("called"));
            assert_eq!(result.map(|(): ()| ()).unwrap_err().raw_os_error(), Some(libc::EINVAL));
        }
    }

    #[test]
    fn the_kernel_sees_and_fills_the_buffer() {
        let (mut reader, mut writer) = io::pipe().unwrap();
        io::Write::write_all(&mut writer, b"12345").unwrap();
        let mut arg = Arg::flat(vec![0; 4]);
        ioctl(reader.as_fd(), u32::try_from(libc::FIONREAD).unwrap(), &mut arg).unwrap();
        assert_eq!(arg.bytes, 5u32.to_ne_bytes());
        let mut rest = [0; 5];
        io::Read::read_exact(&mut reader, &mut rest).unwrap();
    }

    #[test]
    fn the_drivers_error_comes_back() {
        let file = std::fs::File::open("/dev/null").unwrap();
        let failed = ioctl(file.as_fd(), 0xc020_462a, &mut Arg::flat(vec![0; 32])).unwrap_err();
        assert_eq!(failed.raw_os_error(), Some(libc::ENOTTY));
    }
}
