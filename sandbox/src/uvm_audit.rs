//! UVM mappings: charged before they are made, compared with what is mapped.
//!
//! A mapping that was charged and left to the kernel comes into being a moment later; an audit in between
//! would take it for one that is gone. So an audit waits until the last charge is [`SETTLED`] old, and no
//! charge is made while it waits. Failure: more mapped than charged ends the container.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use gpuslice_proto::{PrivilegedRequest, PrivilegedResult, SandboxToShim};
use nix::errno::Errno;

use crate::dispatch::{Sandbox, UvmVerdict};
use crate::driver::Driver;
use crate::gate::locked;
use crate::link::Shim;
use crate::log;

/// The kernel has made a mapping this long after it was told to.
const SETTLED: Duration = Duration::from_millis(300);
/// Longest time without an audit while mappings are made.
const LONGEST: Duration = Duration::from_secs(10);
/// Longest wait for the shim's answer.
const ASK: Duration = Duration::from_secs(5);

/// When what happened.
#[derive(Debug, Default)]
pub(crate) struct UvmAudit {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    charged: Option<Instant>,
    audited: Option<Instant>,
}

impl UvmAudit {
    /// Charges a mapping of `length` bytes that the caller is about to let happen.
    pub(crate) fn charge<D: Driver>(
        &self,
        sandbox: &Sandbox<D>,
        shim: &Shim,
        length: u64,
    ) -> Result<(), Errno> {
        let mut state = locked(&self.state);
        let overdue = state.charged.is_some() && state.audited.is_none_or(|at| at.elapsed() > LONGEST);
        if overdue {
            state.audit(sandbox, shim);
        }
        let mut result = sandbox.charge_uvm_mapping(length);
        if result.is_err() {
            state.audit(sandbox, shim);
            result = sandbox.charge_uvm_mapping(length);
        }
        if result.is_ok() {
            state.charged = Some(Instant::now());
            state.audited.get_or_insert_with(Instant::now);
        }
        result
    }

    /// Audits if there is anything to audit and the last charge has settled.
    pub(crate) fn look<D: Driver>(&self, sandbox: &Sandbox<D>, shim: &Shim) {
        let mut state = locked(&self.state);
        if state.charged.is_some_and(|at| at.elapsed() > SETTLED) {
            state.audit(sandbox, shim);
        }
    }
}

impl State {
    fn audit<D: Driver>(&mut self, sandbox: &Sandbox<D>, shim: &Shim) {
        if let Some(charged) = self.charged {
            let left = SETTLED.saturating_sub(charged.elapsed());
            if !left.is_zero() {
                std::thread::sleep(left);
            }
        }
        self.audited = Some(Instant::now());
        let answer = shim.ask(PrivilegedRequest::UvmRanges, &[]).and_then(|request| request.answer(ASK));
        let total = match answer {
            Ok((PrivilegedResult::UvmRanges { total, .. }, _)) => total,
            Ok((other, _)) => {
                log::line(format_args!("UVM audit: the shim answered {other:?}"));
                return;
            }
            Err(failed) => {
                log::line(format_args!("UVM audit: asking the shim failed: {failed}"));
                return;
            }
        };
        if total == 0 {
            self.charged = None;
        }
        if let UvmVerdict::Uncharged { found, charged } = sandbox.audit_uvm(total) {
            let detail = format!("{found} bytes of the UVM device are mapped, {charged} were charged");
            if let Err(failed) = shim.send(&SandboxToShim::Stop { detail }) {
                log::line(format_args!("asking for the container's end failed: {failed}"));
            }
        }
    }
}
