//! How much a peer may send.
//!
//! A token bucket: so many frames a second, and a burst. Time is an argument.

use std::time::Duration;

/// Frames that a peer may still send.
#[derive(Debug)]
pub(crate) struct Budget {
    per_second: u32,
    burst: u32,
    /// Thousandths of a frame.
    left: u64,
    filled: Duration,
}

impl Budget {
    /// A full bucket.
    pub(crate) fn new(now: Duration, per_second: u32, burst: u32) -> Budget {
        Budget { per_second, burst, left: u64::from(burst) * 1000, filled: now }
    }

    /// One more frame; false when the peer sent too many.
    pub(crate) fn spend(&mut self, now: Duration) -> bool {
        // Whole milliseconds only: the rest stays for the next time.
        let passed = u64::try_from(now.saturating_sub(self.filled).as_millis()).unwrap_or(u64::MAX);
        self.filled += Duration::from_millis(passed);
        let more = passed.saturating_mul(self.per_second.into());
        self.left = self.left.saturating_add(more).min(u64::from(self.burst) * 1000);
        match self.left.checked_sub(1000) {
            Some(left) => {
                self.left = left;
                true
            }
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_burst_passes_and_then_so_many_a_second() {
        let mut budget = Budget::new(Duration::ZERO, 10, 5);
        assert_eq!((0..10).filter(|_| budget.spend(Duration::ZERO)).count(), 5);
        assert!(!budget.spend(Duration::from_millis(99)));
        assert!(budget.spend(Duration::from_millis(100)));
        assert!(!budget.spend(Duration::from_millis(100)));
        assert_eq!((0..100).filter(|_| budget.spend(Duration::from_secs(1000))).count(), 5);
    }

    proptest! {
        #[test]
        fn never_more_than_burst_and_rate(steps in proptest::collection::vec(0u64..50, 1..300)) {
            let mut budget = Budget::new(Duration::ZERO, 20, 7);
            let (mut now, mut passed) = (Duration::ZERO, 0u64);
            for step in steps {
                now += Duration::from_millis(step);
                passed += u64::from(budget.spend(now));
                let most = 7 + u64::try_from(now.as_millis()).unwrap() * 20 / 1000 + 1;
                prop_assert!(passed <= most);
            }
        }
    }
}
