//! The count of refused commands, and one log line a minute for each name.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A name is logged at most this often.
const PERIOD: Duration = Duration::from_secs(60);
/// Names remembered; when there are more, the oldest notes are dropped.
const MOST: usize = 512;

/// What kind of command was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Refused {
    /// A front-end command.
    Escape,
    /// A UVM command.
    Uvm,
    /// A class.
    Class,
    /// A control.
    Control,
}

impl Refused {
    fn word(self) -> &'static str {
        match self {
            Refused::Escape => "command",
            Refused::Uvm => "UVM command",
            Refused::Class => "class",
            Refused::Control => "control",
        }
    }
}

/// Counter and notes.
pub(crate) struct Refusals {
    container: String,
    count: AtomicU64,
    last: Mutex<HashMap<(Refused, u32), Instant>>,
}

impl Refusals {
    pub(crate) fn new(container: String) -> Self {
        Refusals { container, count: AtomicU64::new(0), last: Mutex::new(HashMap::new()) }
    }

    pub(crate) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Counts a refusal, and logs it unless that was done within the last minute.
    pub(crate) fn note(&self, what: Refused, number: u32, name: &str, why: &str) {
        self.count.fetch_add(1, Ordering::Relaxed);
        if self.due(what, number, Instant::now()) {
            let container = &self.container;
            eprintln!("gpuslice-sandbox[{container}]: refused {} {number:#x} {name}: {why}", what.word());
        }
    }

    fn due(&self, what: Refused, number: u32, now: Instant) -> bool {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let recent = |since: &Instant| now.saturating_duration_since(*since) < PERIOD;
        if last.get(&(what, number)).is_some_and(recent) {
            return false;
        }
        if last.len() >= MOST {
            last.retain(|_, since| recent(since));
            // A tenant that invents numbers gets no more lines until some are a minute old.
            if last.len() >= MOST {
                return false;
            }
        }
        last.insert((what, number), now);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_logged_once_a_minute_and_counted_always() {
        let refusals = Refusals::new("test".to_owned());
        let now = Instant::now();
        assert!(refusals.due(Refused::Class, 1, now));
        assert!(!refusals.due(Refused::Class, 1, now + PERIOD / 2));
        assert!(refusals.due(Refused::Control, 1, now));
        assert!(refusals.due(Refused::Class, 1, now + PERIOD));
        refusals.note(Refused::Class, 1, "x", "y");
        assert_eq!(refusals.count(), 1);
    }

    #[test]
    fn invented_numbers_do_not_grow_the_notes_without_bound() {
        let refusals = Refusals::new("test".to_owned());
        let now = Instant::now();
        let logged = (0..10_000).filter(|number| refusals.due(Refused::Control, *number, now)).count();
        assert_eq!(logged, MOST);
        assert!(refusals.due(Refused::Control, 10_001, now + PERIOD));
    }
}
