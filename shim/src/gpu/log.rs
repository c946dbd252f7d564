//! The sandbox's log, copied line by line to the shim's.
//!
//! Trusts nothing in it. Promises: no more than [`BURST`] lines at once and [`PER_SECOND`] on average; a line is
//! cut, and control characters are taken out.

use std::time::Instant;

use crate::report;

const BURST: f64 = 100.0;
const PER_SECOND: f64 = 20.0;
const LONGEST: usize = 500;

/// Takes bytes and gives lines.
#[derive(Debug)]
pub(crate) struct Lines {
    container: String,
    partial: Vec<u8>,
    last: Option<String>,
    tokens: f64,
    refilled: Instant,
    dropped: u64,
}

impl Lines {
    pub(crate) fn new(container: String) -> Lines {
        Lines {
            container,
            partial: Vec::new(),
            last: None,
            tokens: BURST,
            refilled: Instant::now(),
            dropped: 0,
        }
    }

    /// The last whole line, whether it was copied or dropped.
    pub(crate) fn last(&self) -> Option<&str> {
        self.last.as_deref()
    }

    /// Copies what has become whole lines.
    pub(crate) fn copy(&mut self, bytes: &[u8]) {
        for line in self.split(bytes) {
            if self.allowed(Instant::now()) {
                report::log(&self.container, &line);
            }
        }
    }

    fn split(&mut self, bytes: &[u8]) -> Vec<String> {
        let mut lines = Vec::new();
        for byte in bytes {
            if *byte != b'\n' {
                // The rest of a line that is too long is lost.
                if self.partial.len() < LONGEST {
                    self.partial.push(*byte);
                }
                continue;
            }
            let text = String::from_utf8_lossy(&self.partial);
            let line: String = text.chars().filter(|c| !c.is_control()).collect();
            self.partial.clear();
            if !line.is_empty() {
                self.last = Some(line.clone());
                lines.push(line);
            }
        }
        lines
    }

    fn allowed(&mut self, now: Instant) -> bool {
        let since = now.saturating_duration_since(self.refilled).as_secs_f64();
        self.refilled = now;
        self.tokens = (self.tokens + since * PER_SECOND).min(BURST);
        if self.tokens < 1.0 {
            self.dropped = self.dropped.saturating_add(1);
            return false;
        }
        self.tokens -= 1.0;
        if self.dropped > 0 {
            report::log(&self.container, &format!("{} lines of the sandbox were dropped", self.dropped));
            self.dropped = 0;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn lines_are_whole_cut_and_plain() {
        let mut lines = Lines::new("c".into());
        assert_eq!(lines.split(b"one\ntw"), ["one"]);
        assert_eq!(lines.split(b"o\n\n\x1b[31mred\r\n"), ["two", "[31mred"]);
        let mut long = vec![b'x'; 2 * LONGEST];
        long.push(b'\n');
        assert_eq!(lines.split(&long), ["x".repeat(LONGEST)]);
        assert_eq!(lines.last().map(str::len), Some(LONGEST));
    }

    #[test]
    fn a_flood_is_bounded() {
        let mut lines = Lines::new("c".into());
        let start = Instant::now();
        let passed = (0..10_000).filter(|_| lines.allowed(start)).count();
        assert_eq!(passed, 100);
        let later = start + Duration::from_secs(1);
        assert_eq!((0..1000).filter(|_| lines.allowed(later)).count(), 20);
    }
}
