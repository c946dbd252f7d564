//! Counts what passed and what failed, and prints the closing line.

/// Results of a run.
#[derive(Default)]
pub(crate) struct Tally {
    passed: u64,
    failed: u64,
    failures: Vec<String>,
}

impl Tally {
    /// Books one check under its name.
    pub(crate) fn check(&mut self, name: &str, ok: bool) {
        if ok {
            self.passed += 1;
            println!("ok      {name}");
        } else {
            self.fail(name);
            println!("FAILED  {name}");
        }
    }

    /// Books one failure.
    pub(crate) fn fail(&mut self, name: &str) {
        self.failed += 1;
        self.failures.push(name.to_owned());
    }

    /// Books the figures of a test program's own summary line; false if `line` isn't one.
    pub(crate) fn summary_line(&mut self, line: &str) -> bool {
        let Some(rest) = line.strip_prefix("test result: ") else { return false };
        for part in rest.split(['.', ';']) {
            let mut words = part.split_whitespace();
            let (Some(number), Some(kind)) = (words.next(), words.next()) else { continue };
            let Ok(number) = number.parse::<u64>() else { continue };
            match kind {
                "passed" => self.passed += number,
                "failed" => self.failed += number,
                _ => {}
            }
        }
        true
    }

    /// Remembers the name of a failed test, which the summary line counts.
    pub(crate) fn name_failure(&mut self, group: &str, name: &str) {
        self.failures.push(format!("{group}: {name}"));
    }

    /// How many failed so far.
    pub(crate) fn failed(&self) -> u64 {
        self.failed
    }

    /// Prints what failed and the closing line; true if nothing failed and something ran.
    pub(crate) fn close(self) -> bool {
        for name in &self.failures {
            println!("failed: {name}");
        }
        println!("{} passed, {} failed", self.passed, self.failed);
        self.failed == 0 && self.passed > 0
    }
}

#[cfg(test)]
mod tests {
    use super::Tally;

    #[test]
    fn a_summary_line_of_a_test_program_is_counted() {
        let mut tally = Tally::default();
        assert!(
            tally.summary_line(
                "test result: FAILED. 12 passed; 3 failed; 1 ignored; 0 measured; 4 filtered out"
            )
        );
        assert_eq!((tally.passed, tally.failed), (12, 3));
        assert!(!tally.summary_line("test lifecycle::a_container_runs ... ok"));
    }

    #[test]
    fn a_run_in_which_nothing_ran_is_no_success() {
        assert!(!Tally::default().close());
    }
}
