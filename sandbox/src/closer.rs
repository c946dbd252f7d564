//! Closing files that may block whoever closes them.
//!
//! A copy of a tenant's file that isn't the driver's may lie on a file system that the tenant serves itself:
//! its close blocks as long as the tenant likes. So such copies are closed by one thread that does nothing
//! else. Owns: the queue. Promises: nobody else ever waits. Failure: three files that took or waited longer
//! than a second end the container ([`Closer::blocked`]).

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::gate::locked;

/// A close that takes longer is counted.
const SLOW: Duration = Duration::from_secs(1);
/// That many end the container.
const MOST: usize = 3;

/// The queue of files to be closed.
#[derive(Debug, Default)]
pub(crate) struct Closer {
    state: Mutex<State>,
    more: Condvar,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<(OwnedFd, Instant)>,
    closing_since: Option<Instant>,
    slow: usize,
}

impl Closer {
    /// Has `file` closed.
    pub(crate) fn close(&self, file: OwnedFd) {
        locked(&self.state).queue.push_back((file, Instant::now()));
        self.more.notify_one();
    }

    /// Closes files, for ever.
    pub(crate) fn serve(&self) -> ! {
        loop {
            let (file, since) = self.next();
            drop(file);
            let mut state = locked(&self.state);
            state.closing_since = None;
            if since.elapsed() > SLOW {
                state.slow += 1;
            }
        }
    }

    fn next(&self) -> (OwnedFd, Instant) {
        let mut state = locked(&self.state);
        loop {
            if let Some((file, _)) = state.queue.pop_front() {
                let now = Instant::now();
                state.closing_since = Some(now);
                return (file, now);
            }
            state = self.more.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Something is being closed or waits for it.
    pub(crate) fn is_busy(&self) -> bool {
        let state = locked(&self.state);
        state.closing_since.is_some() || !state.queue.is_empty()
    }

    /// The container must end: its files have blocked too often.
    pub(crate) fn blocked(&self) -> bool {
        let state = locked(&self.state);
        let late = |since: &Instant| since.elapsed() > SLOW;
        let stuck = usize::from(state.closing_since.as_ref().is_some_and(late));
        let waiting = state.queue.iter().filter(|(_, since)| late(since)).count();
        state.slow + stuck + waiting >= MOST
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_closed_on_the_closing_thread() {
        let closer = std::sync::Arc::new(Closer::default());
        let serving = std::sync::Arc::clone(&closer);
        std::thread::spawn(move || serving.serve());
        let (mut reader, writer) = std::io::pipe().unwrap();
        closer.close(writer.into());
        let mut rest = Vec::new();
        std::io::Read::read_to_end(&mut reader, &mut rest).unwrap();
        assert!(!closer.blocked());
    }

    #[test]
    fn three_files_that_wait_too_long_end_the_container() {
        let closer = Closer::default();
        let long_ago = Instant::now().checked_sub(SLOW * 2).unwrap();
        for count in 1..=3 {
            let file = std::fs::File::open("/dev/null").unwrap();
            locked(&closer.state).queue.push_back((file.into(), long_ago));
            assert_eq!(closer.blocked(), count == 3);
        }
    }
}
