//! Whose turn it is to wait for the next notification.
//!
//! The kernel wakes every thread that waits in NOTIF_RECV for each notification (`recv_wait_event`, 6.6 and
//! later), so only one waits: with six, a call took twice as long. It serves what it receives itself, which is
//! the fastest for the one caller that most moments have. While its call takes long, another takes over: the
//! relief thread looks every half millisecond, as long as there is activity, whether nobody waits and nothing
//! has been received since it last looked.
//!
//! Owns: the count of waiting workers, and the parked ones. Promises: a notification waits for a worker at most
//! about two looks, unless every worker is busy.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::gate::locked;

/// How often the relief thread looks.
const LOOK: Duration = Duration::from_micros(500);
/// It goes on looking for so long after the last activity.
const AFTER: Duration = Duration::from_millis(250);

/// The turns of one listener's workers.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    waiting: AtomicUsize,
    received: AtomicU64,
    called: Mutex<usize>,
    call: Condvar,
    active: Mutex<Option<Instant>>,
    activity: Condvar,
}

impl Turns {
    /// Blocks until it is the calling worker's turn to wait. Ended by [`Turns::received`].
    pub(crate) fn take(&self) {
        while self.waiting.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Acquire).is_err() {
            let mut called = locked(&self.called);
            while *called == 0 {
                called = self.call.wait(called).unwrap_or_else(PoisonError::into_inner);
            }
            *called -= 1;
        }
    }

    /// The worker whose turn it was no longer waits.
    pub(crate) fn received(&self) {
        self.received.fetch_add(1, Ordering::AcqRel);
        self.waiting.store(0, Ordering::Release);
    }

    /// Something is being served: looks are needed from now on.
    pub(crate) fn active(&self) {
        *locked(&self.active) = Some(Instant::now());
        self.activity.notify_one();
    }

    /// Calls another worker whenever one is needed, for ever.
    pub(crate) fn relieve(&self) -> ! {
        let mut seen = 0;
        loop {
            self.await_activity();
            std::thread::sleep(LOOK);
            let received = self.received.load(Ordering::Acquire);
            if received == seen && self.waiting.load(Ordering::Acquire) == 0 {
                // One call at a time is enough: if it isn't taken by the next look, all workers are busy.
                *locked(&self.called) = 1;
                self.call.notify_one();
            }
            seen = received;
        }
    }

    fn await_activity(&self) {
        let mut active = locked(&self.active);
        loop {
            match *active {
                Some(at) if at.elapsed() < AFTER => return,
                // A call that takes longer keeps the looks going until somebody waits again.
                Some(_) if self.waiting.load(Ordering::Acquire) == 0 => return,
                _ => active = self.activity.wait(active).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::mpsc::channel;

    #[test]
    fn one_waits_until_it_takes_long_and_then_another() {
        let turns = Arc::new(Turns::default());
        let (tell, hear) = channel();
        for number in 0..3 {
            let (turns, tell) = (Arc::clone(&turns), tell.clone());
            std::thread::spawn(move || {
                turns.take();
                tell.send(number).unwrap();
            });
        }
        let first = hear.recv().unwrap();
        assert!(hear.recv_timeout(Duration::from_millis(50)).is_err(), "two wait at once");
        let relief = Arc::clone(&turns);
        std::thread::spawn(move || relief.relieve());
        turns.active();
        assert!(hear.recv_timeout(Duration::from_millis(50)).is_err(), "one waits: no relief is needed");
        turns.received();
        let second = hear.recv_timeout(Duration::from_secs(5)).unwrap();
        assert_ne!(first, second);
        assert!(hear.recv_timeout(Duration::from_millis(50)).is_err(), "relieved twice");
    }
}
