//! Waiting with a deadline: the only way in which the harness waits for anything.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// How long anything that should come at once may take on a busy two-core machine.
pub const SOON: Duration = Duration::from_secs(20);

/// Asks until the answer is there; fails with `what` after `limit`.
///
/// # Errors
/// When the limit passes without an answer, or the question itself fails.
pub fn until<T>(what: &str, limit: Duration, mut ask: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let end = Instant::now() + limit;
    let mut pause = Duration::from_millis(2);
    loop {
        if let Some(answer) = ask()? {
            return Ok(answer);
        }
        if Instant::now() >= end {
            bail!("{what}: not within {limit:?}");
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(50));
    }
}

/// Waits until `holds` says yes.
///
/// # Errors
/// When the limit passes before.
pub fn until_true(what: &str, limit: Duration, mut holds: impl FnMut() -> bool) -> Result<()> {
    until(what, limit, || Ok(holds().then_some(())))
}
