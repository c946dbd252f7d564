//! "Something was served": what the workers tell the main thread, at most once until it has listened.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use gpuslice_sys::Socket;

/// A flag that can be waited for with poll.
#[derive(Debug)]
pub(crate) struct Activity {
    noted: AtomicBool,
    tell: Socket,
    hear: Socket,
}

impl Activity {
    pub(crate) fn new() -> io::Result<Activity> {
        let (tell, hear) = Socket::pair()?;
        Ok(Activity { noted: AtomicBool::new(false), tell, hear })
    }

    /// Something happened.
    pub(crate) fn note(&self) {
        if !self.noted.load(Ordering::Relaxed) && !self.noted.swap(true, Ordering::AcqRel) {
            // One message at most is in the queue: it always has room.
            if self.tell.send(&[1], &[], Instant::now()).is_err() {
                self.noted.store(false, Ordering::Release);
            }
        }
    }

    /// Something happened since the last time; from now on it will be told again.
    pub(crate) fn take(&self) -> bool {
        let mut byte = [0];
        let heard = self.hear.recv(&mut byte, 0, Instant::now()).is_ok();
        self.noted.store(false, Ordering::Release);
        heard
    }
}

impl AsFd for Activity {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.hear.as_fd()
    }
}
