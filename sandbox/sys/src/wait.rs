//! poll(2) with a deadline.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use crate::call::check;

/// What a file is ready for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ready {
    /// It can be read, or a connection can be accepted, or a notification received.
    pub readable: bool,
    /// It can be written.
    pub writable: bool,
    /// The other side is gone (POLLHUP or POLLERR).
    pub closed: bool,
}

/// What to wait for.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// The file.
    pub file: BorrowedFd<'a>,
    /// Wait until it can be read.
    pub read: bool,
    /// Wait until it can be written.
    pub write: bool,
}

/// Waits until one of `files` is ready, or until `deadline` (`None`: for ever). Returns one entry per
/// file; all are default when the deadline passed. A closed peer always ends the wait.
///
/// # Errors
/// Those of poll(2); an interruption by a signal isn't one.
pub fn poll(files: &[Wanted<'_>], deadline: Option<Instant>) -> io::Result<Vec<Ready>> {
    let mut list: Vec<libc::pollfd> = files
        .iter()
        .map(|wanted| libc::pollfd {
            fd: wanted.file.as_raw_fd(),
            events: if wanted.read { libc::POLLIN } else { 0 } | if wanted.write { libc::POLLOUT } else { 0 },
            revents: 0,
        })
        .collect();
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let timeout = left.map(timespec);
        let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        let count = libc::nfds_t::try_from(list.len()).unwrap_or(libc::nfds_t::MAX);
        // SAFETY: ppoll needs `count` entries at `list`, a valid or null timespec, and a null or valid
        // signal mask: `list` has that many and lives on; `timeout` points to a local or is null.
        let result = unsafe { libc::ppoll(list.as_mut_ptr(), count, timeout, std::ptr::null()) };
        match check(result) {
            Ok(_) => break,
            Err(failed) if failed.kind() == io::ErrorKind::Interrupted => {}
            Err(failed) => return Err(failed),
        }
    }
    Ok(list
        .iter()
        .map(|entry| Ready {
            readable: entry.revents & libc::POLLIN != 0,
            writable: entry.revents & libc::POLLOUT != 0,
            closed: entry.revents & (libc::POLLHUP | libc::POLLERR | libc::POLLNVAL) != 0,
        })
        .collect())
}

/// Waits for one file to become readable (or closed); false when the deadline passed.
///
/// # Errors
/// As [`poll`].
pub fn readable(file: BorrowedFd<'_>, deadline: Option<Instant>) -> io::Result<bool> {
    let ready = poll(&[Wanted { file, read: true, write: false }], deadline)?;
    Ok(ready.first().is_some_and(|ready| ready.readable || ready.closed))
}

fn timespec(duration: Duration) -> libc::timespec {
    libc::timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(duration.subsec_nanos()),
    }
}
