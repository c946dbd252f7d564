//! Runs a program to its end, shows its lines as they come, and passes an interrupt on by waiting for it.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};

/// Set once Ctrl-C, SIGTERM or SIGHUP came. The terminal sends Ctrl-C to the children as well; this program
/// stays to sweep after them.
pub(crate) struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// From here on an interrupt is noted instead of ending this program.
    pub(crate) fn watch() -> Result<Self> {
        let flag = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP]
        {
            signal_hook::flag::register(signal, Arc::clone(&flag)).context("watch for interrupts")?;
        }
        Ok(Interrupt(flag))
    }

    /// Fails once the run was interrupted.
    pub(crate) fn check(&self) -> Result<()> {
        if self.0.load(Ordering::Relaxed) {
            bail!("interrupted");
        }
        Ok(())
    }
}

static QUIET: AtomicBool = AtomicBool::new(false);

/// With `true`, steps go to standard error, so that standard output carries JSON alone.
pub(crate) fn quiet(json: bool) {
    QUIET.store(json, Ordering::Relaxed);
}

/// Announces a step.
pub(crate) fn say(text: &str) {
    if QUIET.load(Ordering::Relaxed) {
        eprintln!("==> {text}");
    } else {
        println!("==> {text}");
    }
}

/// Runs `command`; an error names it unless it succeeded.
pub(crate) fn succeed(command: &mut Command, what: &str) -> Result<()> {
    let status = command.status().with_context(|| format!("{what}: start {:?}", command.get_program()))?;
    if !status.success() {
        bail!("{what}: {:?} ended with {status}", command.get_program());
    }
    Ok(())
}

/// Runs `command`, printing each line of its standard output after giving it to `line`; true if it succeeded.
pub(crate) fn stream(command: &mut Command, mut line: impl FnMut(&str)) -> Result<bool> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("start {:?}", command.get_program()))?;
    if let Some(output) = child.stdout.take() {
        for text in BufReader::new(output).split(b'\n') {
            let text = text.context("read a program's output")?;
            let text = String::from_utf8_lossy(&text);
            println!("{text}");
            line(&text);
        }
    }
    Ok(child.wait().context("wait for a program")?.success())
}
