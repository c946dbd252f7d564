//! Moving a range of another process's private memory onto a memory file, for a pinned registration.
//!
//! The calling thread traces every thread of the process and stops it (killed if this process dies), copies
//! the range, lets thread `tid` map the file over it, and lets all go on. `tid` waits in a trapped call
//! meanwhile; that call is made again. Must run on a thread of its own with a watchdog: copying may block for
//! as long as the process's page faults do.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Instant;

/// What went wrong.
#[derive(Debug)]
pub enum MoveError {
    /// A thread could not be stopped.
    Stop(io::Error),
    /// The range could not be copied: a hole, or memory of a kind that can't be moved.
    Copy(io::Error),
    /// The injected call failed.
    Map(io::Error),
}

/// Not written yet.
///
/// # Errors
/// Any [`MoveError`].
pub fn move_range(
    tid: u32,
    range: (u64, u64),
    memfd: BorrowedFd<'_>,
    tenant_file: u32,
    deadline: Instant,
    interrupted: impl FnOnce() -> io::Result<()>,
) -> Result<(), MoveError> {
    let _ = (tid, range, memfd, tenant_file, deadline, interrupted);
    Err(MoveError::Stop(io::Error::from(io::ErrorKind::Unsupported)))
}
