//! One line to stderr. Text that came over a socket is escaped: it can't forge a line.

use std::fmt;
use std::io::Write;

/// Writes one line. There is nobody to tell when that fails.
pub(crate) fn line(text: fmt::Arguments<'_>) {
    let mut out = String::from("gpuslice-scheduler: ");
    for c in text.to_string().chars() {
        if c.is_control() { out.extend(c.escape_default()) } else { out.push(c) }
    }
    out.push('\n');
    std::io::stderr().lock().write_all(out.as_bytes()).ok();
}

/// An error with its causes.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        text = format!("{text}: {next}");
        cause = next.source();
    }
    text
}

macro_rules! log {
    ($($text:tt)*) => { $crate::log::line(format_args!($($text)*)) };
}
pub(crate) use log;
