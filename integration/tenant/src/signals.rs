//! Driver calls under a storm of signals: none may run twice, none may be lost.

use std::sync::atomic::{AtomicU64, Ordering};

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use serde_json::json;

use crate::bytes::Block;
use crate::driver::Trouble;
use crate::memory::number;
use crate::report::{self, Outcome};
use crate::rm::Client;

static TAKEN: AtomicU64 = AtomicU64::new(0);

extern "C" fn count(_: libc::c_int) {
    TAKEN.fetch_add(1, Ordering::Relaxed);
}

fn every(microseconds: libc::suseconds_t) -> Result<(), Trouble> {
    let period = libc::timeval { tv_sec: 0, tv_usec: microseconds };
    let timer = libc::itimerval { it_interval: period, it_value: period };
    // SAFETY: setitimer reads one itimerval, alive here, and accepts a null pointer for the old value.
    let result = unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut()) };
    if result == 0 { Ok(()) } else { Err(Trouble::Machine(std::io::Error::last_os_error().to_string())) }
}

/// `storm`: named objects, so a call that ran twice is answered "duplicate name" the second time.
pub(crate) fn storm(text: &str) -> Result<Outcome, Trouble> {
    let wanted = number(text)?;
    let client = Client::new()?;
    let (_, _, before) = client.memory_sizes()?;
    let action = SigAction::new(SigHandler::Handler(count), SaFlags::SA_RESTART, SigSet::empty());
    // SAFETY: the handler only adds to an atomic, which is allowed in a signal handler.
    unsafe { sigaction(Signal::SIGALRM, &action) }.map_err(|error| Trouble::Machine(error.to_string()))?;
    every(150)?;
    let (mut twice, mut failed, mut last) = (0_u64, 0_u64, None);
    for i in 0..wanted {
        let handle = 0x6000_0000_u32.wrapping_add(u32::try_from(i).unwrap_or(0));
        let mut parameters = Block::zeroed(128);
        parameters.set_u32(0, client.handle);
        parameters.set_u32(8, 0x0001_c101);
        parameters.set_u32(24, 0x1800_0000);
        parameters.set_u64(64, 64 << 10);
        match client.alloc_as(handle, client.device, 0x40, &mut parameters) {
            Ok(_) => {}
            Err(Trouble::Status { status: 0x19, .. }) => twice = twice.saturating_add(1),
            Err(error) => {
                failed = failed.saturating_add(1);
                last = Some(error.to_string());
            }
        }
        if i % 2 == 1
            && let Err(error) = client.free(handle)
        {
            failed = failed.saturating_add(1);
            last = Some(error.to_string());
        }
    }
    every(0)?;
    let (_, _, after) = client.memory_sizes()?;
    let expected = wanted.div_ceil(2).saturating_mul(64 << 10);
    let fine = twice == 0 && failed == 0 && before.saturating_sub(after) == expected;
    report::line(&json!({
        "ok": fine, "calls": wanted, "signals": TAKEN.load(Ordering::Relaxed), "ran_twice": twice, "failed": failed,
        "error": last, "taken": before.saturating_sub(after), "expected": expected,
    }));
    Ok(if fine { Outcome::Done } else { Outcome::Reached })
}
