//! The few system calls that have no safe wrapper: a process's file, and files that come over a socket.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// Takes ownership of a file number that a system call just returned.
fn own(number: RawFd) -> OwnedFd {
    // SAFETY: `from_raw_fd` needs an open file number that nothing else owns: every caller of `own` passes
    // the number that the kernel made for it in that same call and gives it to nobody else.
    unsafe { OwnedFd::from_raw_fd(number) }
}

fn number(result: libc::c_long) -> io::Result<RawFd> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    RawFd::try_from(result).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))
}

/// A descriptor of process `pid`.
///
/// # Errors
/// The process is gone.
pub(crate) fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: pidfd_open takes two integers and touches no memory of ours.
    let result = unsafe { libc::syscall(libc::SYS_pidfd_open, libc::c_long::from(pid), 0) };
    number(result).map(own)
}

/// A copy of the process's open file `n`.
///
/// # Errors
/// EBADF: no such file; ESRCH: no such process.
pub(crate) fn pidfd_getfd(process: BorrowedFd<'_>, n: i32) -> io::Result<OwnedFd> {
    let process = libc::c_long::from(process.as_raw_fd());
    // SAFETY: pidfd_getfd takes three integers and touches no memory of ours.
    let result = unsafe { libc::syscall(libc::SYS_pidfd_getfd, process, libc::c_long::from(n), 0) };
    number(result).map(own)
}

/// Takes ownership of files that `recvmsg` put into our table.
pub(crate) fn received(numbers: &[RawFd]) -> Vec<OwnedFd> {
    numbers.iter().map(|n| own(*n)).collect()
}

/// A new open file description of an open file (not a duplicate of its descriptor).
///
/// # Errors
/// That of open.
pub(crate) fn reopen(file: BorrowedFd<'_>) -> io::Result<File> {
    std::fs::OpenOptions::new().read(true).write(true).open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}
