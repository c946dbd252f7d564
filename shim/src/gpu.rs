//! The GPU half of the shim: what a container of this runtime needs around `runc create`.
//!
//! Owns: admission (S6), the slice, the lease, the sandbox and its cgroup leaf, the seccomp listener's way to
//! the sandbox, the sandbox's privileged requests. Trusts: containerd, the node's configuration, the
//! scheduler; never the sandbox, the image or an environment variable. Promises: a container that was given a
//! GPU runs only while its sandbox serves it; every container of this runtime, the pause container included,
//! carries the rules, those without a GPU in their refusing form. Failure: an error at create leaves nothing
//! behind once [`Prepared::abandon`] ran (errors from [`prepare`] and [`Prepared::created`] clean up themselves).
//!
//! ```text
//! prepare ──> Prepared ──created──> GpuContainer ──ended──> (nothing)
//!                 └────abandon────> (nothing)
//! ```
//!
//! The order for the lifecycle half: [`prepare`] before `runc create`, with the spec that is then written to the
//! bundle; [`Prepared::created`] after it succeeded, with init's pid; [`Prepared::abandon`] if it failed.
//! [`check_exec`] before each `runc exec`, [`GpuContainer::exec_started`] after it. The container must be killed
//! when [`GpuContainer::died`] resolves. [`GpuContainer::ended`] once the last process of the container is gone
//! and before `runc delete` is reported. [`clean_up_after_crash`] on `delete` without a living shim.

use std::path::Path;

use gpuslice_config::Config;
use serde_json::Value;

use crate::{CreateContext, Node};

mod admission;
mod devices;
mod leaf;
mod listener;
mod majors;
mod maps;
mod scheduler;
mod slice;
mod spec;

/// Why a container is not created, or not kept.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GpuError {
    /// S6.
    #[error("gpuslice: not admitted: {0}")]
    Refused(#[from] admission::Refusal),
}

/// A container that is ready for `runc create`.
#[must_use = "call created or abandon"]
pub(crate) struct Prepared {}

/// A created container under its rules.
pub(crate) struct GpuContainer {}

/// Judges the spec, resolves the slice, gets the lease, starts the sandbox and edits the spec.
///
/// # Errors
/// [`GpuError`]; nothing is left behind.
pub(crate) async fn prepare(
    node: &Node,
    config: &Config,
    context: &CreateContext,
    spec: &mut Value,
) -> Result<Prepared, GpuError> {
    todo!()
}

/// Judges the process of an exec before the runtime sees it.
///
/// # Errors
/// [`GpuError::Refused`].
pub(crate) fn check_exec(config: &Config, process: &Value) -> Result<(), GpuError> {
    Ok(admission::judge_process(process, admission::Fence::Absent)?)
}

impl Prepared {
    /// After `runc create`: takes the listener, judges the program that init carries, hands it to the sandbox.
    ///
    /// # Errors
    /// [`GpuError`]; the sandbox and the lease are gone, the caller force-deletes the container.
    pub(crate) async fn created(self, init_pid: u32) -> Result<GpuContainer, GpuError> {
        todo!()
    }

    /// `runc create` failed: ends the sandbox, gives the lease back, removes sockets and cgroup leaf.
    pub(crate) async fn abandon(self) {
        todo!()
    }
}

impl GpuContainer {
    /// The container has a GPU, hence a sandbox.
    pub(crate) fn has_gpu(&self) -> bool {
        todo!()
    }

    /// Tells of an exec'ed process, whose program is then compared with init's.
    pub(crate) fn exec_started(&self, pid: u32) {
        todo!()
    }

    /// Resolves when the container must be killed, with the reason; never for a container without a GPU.
    /// May be awaited by several tasks.
    pub(crate) async fn died(&self) -> String {
        todo!()
    }

    /// The container's processes are gone: ends the sandbox, then the lease, then sockets and cgroup leaf.
    /// Idempotent.
    pub(crate) async fn ended(&self) {
        todo!()
    }

    /// Pid of the sandbox, where there is one. It is a child of the shim; its exit status is of no interest.
    pub(crate) fn sandbox_pid(&self) -> Option<u32> {
        todo!()
    }
}

/// For `delete` when the shim is gone: kills the sandbox by its cgroup leaf, removes leaf and sockets. Needs only
/// the bundle; a bundle without `gpuslice.json` has nothing to clean up.
pub(crate) fn clean_up_after_crash(bundle: &Path) {
    todo!()
}
