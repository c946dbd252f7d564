//! Seccomp programs of this process.

use std::io;
use std::os::fd::OwnedFd;

use crate::call::{check_long, error, new_file};

/// One instruction of a classic BPF program (`struct sock_filter`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Instruction {
    /// Operation.
    pub code: u16,
    /// Jump distance if true.
    pub jt: u8,
    /// Jump distance if false.
    pub jf: u8,
    /// Operand.
    pub k: u32,
}

/// `SECCOMP_FILTER_FLAG_NEW_LISTENER`.
const NEW_LISTENER: libc::c_ulong = 1 << 3;
/// `SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV`.
const WAIT_KILLABLE_RECV: libc::c_ulong = 1 << 5;

fn set_filter(program: &[Instruction], flags: libc::c_ulong) -> io::Result<libc::c_long> {
    let length = u16::try_from(program.len()).map_err(|_| error(libc::EINVAL))?;
    if length == 0 {
        return Err(error(libc::EINVAL));
    }
    // Instruction has the layout of sock_filter; the kernel only reads it.
    let filter: *mut libc::sock_filter = program.as_ptr().cast_mut().cast();
    let description = libc::sock_fprog { len: length, filter };
    // SAFETY: SET_MODE_FILTER reads one sock_fprog and the `len` instructions that it names: both live
    // until the call returns.
    let result = unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const description)
    };
    check_long(result)
}

/// Installs `program` in every thread of this process. no_new_privs must be set.
///
/// # Errors
/// EINVAL for an empty, too long or malformed program; ESRCH when a thread could not be brought under it.
pub fn install(program: &[Instruction]) -> io::Result<()> {
    // A positive result is the id of a thread that has another filter.
    if set_filter(program, libc::SECCOMP_FILTER_FLAG_TSYNC)? == 0 { Ok(()) } else { Err(error(libc::ESRCH)) }
}

/// Installs `program` in the calling thread and returns its listener. no_new_privs must be set.
///
/// # Errors
/// As [`install`]; EBUSY when a filter of this thread has a listener already.
pub fn install_with_listener(program: &[Instruction], killable: bool) -> io::Result<OwnedFd> {
    let killable = if killable { WAIT_KILLABLE_RECV } else { 0 };
    new_file(set_filter(program, NEW_LISTENER | killable)?)
}
