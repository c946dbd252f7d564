//! Time since the start, the only clock that the state sees.

use std::time::{Duration, Instant};

/// A clock that starts at zero.
#[derive(Debug)]
pub(super) struct Clock(Instant);

impl Clock {
    pub(super) fn start() -> Clock {
        Clock(Instant::now())
    }

    pub(super) fn now(&self) -> Duration {
        self.0.elapsed()
    }

    pub(super) fn instant(&self, at: Duration) -> Instant {
        self.0 + at
    }
}
