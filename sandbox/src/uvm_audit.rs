//! UVM mappings: charged before they are made, compared with what is mapped.
//!
//! The ledger knows that a mapping which was just charged may not be there yet. Failure: more mapped than
//! charged ends the container.

use std::time::Duration;

use gpuslice_proto::{PrivilegedRequest, PrivilegedResult, SandboxToShim};
use nix::errno::Errno;

use crate::dispatch::{Sandbox, UvmVerdict};
use crate::driver::Driver;
use crate::link::Shim;
use crate::log;

/// Longest wait for the shim's answer.
const ASK: Duration = Duration::from_secs(5);

/// Charges a mapping of `length` bytes that the caller is about to let happen. At the quota, what is mapped is
/// looked at first: unmapping is not seen otherwise.
pub(crate) fn charge<D: Driver>(sandbox: &Sandbox<D>, shim: &Shim, length: u64) -> Result<(), Errno> {
    sandbox.charge_uvm_mapping(length).or_else(|_| {
        audit(sandbox, shim);
        sandbox.charge_uvm_mapping(length)
    })
}

/// Compares what is mapped with what was charged.
pub(crate) fn audit<D: Driver>(sandbox: &Sandbox<D>, shim: &Shim) {
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
    if let UvmVerdict::Uncharged { found, charged } = sandbox.audit_uvm(total) {
        let detail = format!("{found} bytes of the UVM device are mapped, {charged} were charged");
        if let Err(failed) = shim.send(&SandboxToShim::Stop { detail }) {
            log::line(format_args!("asking for the container's end failed: {failed}"));
        }
    }
}
