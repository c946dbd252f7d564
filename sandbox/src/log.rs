//! Log lines: one write to standard error each, with the container's name in front.
//!
//! A log that can't be written is no reason to stop serving.

use std::fmt::Arguments;
use std::io::Write;
use std::sync::OnceLock;

static CONTAINER: OnceLock<String> = OnceLock::new();

/// Names the container. Once, at start.
pub(crate) fn name(container: &str) {
    CONTAINER.get_or_init(|| container.to_owned());
}

/// Writes one line.
pub(crate) fn line(text: Arguments<'_>) {
    let container = CONTAINER.get().map_or("?", String::as_str);
    let line = format!("gpuslice-sandbox[{container}]: {text}\n");
    if std::io::stderr().write_all(line.as_bytes()).is_err() {
        // The shim is gone: the control socket will say so.
    }
}
