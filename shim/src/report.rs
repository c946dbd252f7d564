//! One line to the shim's log, and a whole error as one line.

use std::error::Error;
use std::io::Write;

/// An error with all its causes, in one line.
pub(crate) fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        next = cause.source();
    }
    text
}

/// Writes one line to standard error, which is containerd's log of this shim. A log that nobody reads, or
/// that is full, loses the line: the shim never waits for its log.
pub(crate) fn log(container: &str, text: &str) {
    let line = format!("gpuslice-shim[{container}]: {}\n", text.replace('\n', " "));
    drop(std::io::stderr().write_all(line.as_bytes()));
}
