//! What a command prints: one JSON object a line on standard output.

use std::io::Write;

use serde_json::{Value, json};

use crate::driver::Trouble;

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// As asked; for an attack: every case was refused.
    Done,
    /// The driver refused.
    Refused,
    /// An attack got through.
    Reached,
}

/// Prints a line.
pub(crate) fn line(value: &Value) {
    let mut out = std::io::stdout().lock();
    let printed = writeln!(out, "{value}").and_then(|()| out.flush());
    if printed.is_err() {
        // Nobody reads: there is nobody to tell.
        std::process::abort();
    }
}

/// Prints what went wrong.
pub(crate) fn failure(error: &Trouble) {
    line(&json!({"ok": false, "error": error.to_string(), "errno": error.errno(), "status": error.status()}));
}
