//! Results of system calls as `io::Result`.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use libc::{c_int, c_long};

/// `result` of a call that returns -1 and sets errno on failure.
pub(crate) fn check(result: c_int) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// The same for `libc::syscall`.
pub(crate) fn check_long(result: c_long) -> io::Result<c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Takes ownership of the file that a system call has just returned (or its error).
pub(crate) fn new_file(result: c_long) -> io::Result<OwnedFd> {
    let number = check_long(result)?;
    let number = RawFd::try_from(number).map_err(|_| error(libc::EBADF))?;
    // SAFETY: from_raw_fd needs an open file that nobody else owns: the kernel made `number` for this call.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// An error of this number.
pub(crate) fn error(errno: c_int) -> io::Error {
    io::Error::from_raw_os_error(errno)
}

/// Runs `call` again while it is interrupted by a signal.
pub(crate) fn uninterrupted<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(failed) if failed.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}
