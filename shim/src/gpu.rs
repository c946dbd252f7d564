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

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use gpuslice_config::Config;
use gpuslice_filter::{Form, Kind};
use gpuslice_proto::{SandboxToShim, ShimToSandbox};
use serde_json::Value;
use tokio::sync::watch;
use tokio::task::{JoinHandle, spawn_blocking};

use crate::{CreateContext, Node, report};
use admission::{Fence, Host, Refusal};
use control::{Handle, Order};
use devices::DeviceError;
use edit::EditError;
use judged::JudgeError;
use launch::{Failed, Launch, Running};
use listener::ListenerError;
use majors::Majors;
use membership::Membership;
use reserve::StartError;
use sandbox::SandboxError;
use slice::{SliceError, Wishes};

mod admission;
mod again;
mod control;
mod devices;
mod edit;
mod judged;
mod launch;
mod leaf;
mod listener;
mod log;
mod majors;
mod maps;
mod membership;
mod privileged;
mod record;
mod reserve;
mod sandbox;
mod scheduler;
mod slice;
mod spec;

/// Name of a container's listener socket in its directory.
const SOCKET: &str = "notify.sock";
const PROC: &str = "/proc";

/// Why a container is not created, or not kept.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GpuError {
    #[error("gpuslice: not admitted: {0}")]
    Refused(#[from] Refusal),
    #[error("gpuslice: not admitted: {0}")]
    Devices(#[from] DeviceError),
    #[error("gpuslice: can't read the device majors in {}", path.display())]
    Majors { path: PathBuf, source: std::io::Error },
    #[error("gpuslice: {0}")]
    Slice(#[from] SliceError),
    #[error("gpuslice: {0}")]
    Spec(#[from] EditError),
    #[error("gpuslice: {0}")]
    Start(#[source] StartError),
    #[error("gpuslice: {0}")]
    Sandbox(#[source] SandboxError),
    #[error("gpuslice: {0}")]
    Listener(#[source] ListenerError),
    #[error("gpuslice: {0}")]
    Judged(#[source] JudgeError),
    #[error("gpuslice: {step}")]
    Io { step: &'static str, source: std::io::Error },
    #[error(
        "gpuslice: the container has no cgroup of its own apart from {apart}: processes can't be told apart"
    )]
    Cgroup { apart: &'static str },
    #[error("gpuslice: interrupted while {0}")]
    Interrupted(&'static str),
}

/// A container that is ready for `runc create`.
#[must_use = "call created or abandon"]
pub(crate) struct Prepared {
    run_dir: PathBuf,
    /// The sandbox getting ready, for a container with a GPU.
    gpu: Option<JoinHandle<Result<Running, Box<Failed>>>>,
}

/// A created container under its rules.
pub(crate) struct GpuContainer {
    gpu: Option<Gpu>,
}

struct Gpu {
    /// Gone once the end was ordered.
    handle: Mutex<Option<Arc<Handle>>>,
    reason: watch::Receiver<Option<String>>,
    done: watch::Receiver<bool>,
}

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
    admission::judge_container(spec, &context.runtime, &Host::default(), Fence::Absent)?;
    admission::judge_mounts(spec, &config.run_dir)?;
    let majors = Majors::read(&node.proc_devices)
        .map_err(|source| GpuError::Majors { path: node.proc_devices.clone(), source })?;
    let granted = devices::granted(spec, &majors)?;
    // Also where there is no GPU: the pod's author hears of a wrong key from the first container on.
    Wishes::read(spec)?;
    edit::drop_runtime_annotations(spec);
    let run_dir = config.run_dir.clone();
    if granted.minors.is_empty() {
        edit::set_rules(spec, &Form::Errno)?;
        return Ok(Prepared { run_dir, gpu: None });
    }

    let notes =
        granted.dropped.iter().map(|(path, numbers)| format!("{path} ({numbers}) is taken out")).collect();
    let reserved = {
        let (node, config, context) = (node.clone(), config.clone(), context.clone());
        let (minors, before) = (granted.minors.clone(), spec.clone());
        let reserve = move || reserve::reserve(&node, &config, &context, &minors, &before, notes);
        spawn_blocking(reserve)
            .await
            .map_err(|_| GpuError::Interrupted("starting"))?
            .map_err(GpuError::Start)?
    };
    devices::narrow(spec, &granted);
    let form = Form::Notify {
        listener_path: reserved.listener_path().to_string_lossy().into_owned(),
        metadata: reserved.expected.nonce.clone(),
        killable: false,
    };
    if let Err(error) = edit::set_rules(spec, &form) {
        take_down(reserved).await;
        return Err(error.into());
    }
    let launch = Launch {
        node: node.clone(),
        program: sandbox::program_path(node.sandbox.path.as_deref(), config.sandbox.as_deref()),
        minors: granted.minors,
        majors,
        oom_score_adj: launch::oom_score(spec),
    };
    // The sandbox is started while the runtime creates the container.
    Ok(Prepared { run_dir, gpu: Some(spawn_blocking(move || launch.run(reserved))) })
}

/// Judges the process of an exec before the runtime sees it.
///
/// # Errors
/// [`GpuError::Refused`].
pub(crate) fn check_exec(_config: &Config, process: &Value) -> Result<(), GpuError> {
    Ok(admission::judge_process(process, Fence::Absent)?)
}

/// Dropping what was started waits for its end: not on the runtime's own thread.
async fn take_down(started: impl Send + 'static) {
    drop(spawn_blocking(move || drop(started)).await);
}

impl Prepared {
    /// After `runc create`: takes the listener, judges the program that init carries, hands it to the sandbox.
    ///
    /// # Errors
    /// [`GpuError`]; the sandbox and the lease are gone, the caller force-deletes the container.
    pub(crate) async fn created(self, init_pid: u32) -> Result<GpuContainer, GpuError> {
        let Prepared { run_dir, gpu } = self;
        let Some(ready) = gpu else {
            let judge = move || judged::judge_init(init_pid, Kind::Errno, &run_dir).map(drop);
            spawn_blocking(judge)
                .await
                .map_err(|_| GpuError::Interrupted("judging"))?
                .map_err(GpuError::Judged)?;
            return Ok(GpuContainer { gpu: None });
        };
        let started = ready.await.map_err(|_| GpuError::Interrupted("the sandbox got ready"))?;
        let running = match started {
            Ok(running) => running,
            Err(failed) => {
                take_down(failed.reserved).await;
                return Err(GpuError::Start(failed.error));
            }
        };
        let serve = move || serve(running, init_pid, &run_dir);
        let gpu = spawn_blocking(serve).await.map_err(|_| GpuError::Interrupted("handing over"))??;
        Ok(GpuContainer { gpu: Some(gpu) })
    }

    /// `runc create` failed: ends the sandbox, gives the lease back, removes sockets and cgroup leaf.
    pub(crate) async fn abandon(self) {
        let Some(ready) = self.gpu else { return };
        match ready.await {
            Ok(Ok(running)) => take_down(running).await,
            Ok(Err(failed)) => {
                report::log(&failed.reserved.name, &report::chain(&failed.error));
                take_down(failed.reserved).await;
            }
            Err(_) => {}
        }
    }
}

/// From a created container with a ready sandbox to one that is served.
fn serve(mut running: Running, init_pid: u32, run_dir: &Path) -> Result<Gpu, GpuError> {
    let deadline = Instant::now() + running.reserved.patience;
    let listener = listener::accept(&running.reserved.listening, &running.reserved.expected, deadline)
        .map_err(GpuError::Listener)?;
    let passed = judged::judge_init(init_pid, Kind::Notify, run_dir).map_err(GpuError::Judged)?;
    let container = privileged::Container {
        proc: PROC.into(),
        cgroups: reserve::CGROUPS.into(),
        membership: membership_of(init_pid, running.sandbox.pid)?,
        uvm: running.uvm,
    };
    let message = ShimToSandbox::Listener { serial: 0 };
    let files = [std::os::fd::AsFd::as_fd(&listener)];
    running
        .sandbox
        .link
        .send(&message, &files, running.reserved.patience, "the listener")
        .map_err(GpuError::Sandbox)?;
    let served = SandboxToShim::Serving { serial: 0 };
    running
        .sandbox
        .expect(&served, running.reserved.patience, "it serves the listener")
        .map_err(GpuError::Sandbox)?;
    let control = control::start(running, container, passed)
        .map_err(|source| GpuError::Io { step: "start the container's thread", source })?;
    let handle = Mutex::new(Some(control.handle));
    Ok(Gpu { handle, reason: control.reason, done: control.done })
}

/// The container's cgroup, which must set its processes apart from the shim and from the sandbox.
fn membership_of(init_pid: u32, sandbox_pid: u32) -> Result<Membership, GpuError> {
    let of = |pid| {
        Membership::of(Path::new(PROC), pid)
            .map_err(|source| GpuError::Io { step: "read /proc/PID/cgroup", source })
    };
    let own = of(init_pid)?;
    for (other, apart) in [(std::process::id(), "the shim"), (sandbox_pid, "the sandbox")] {
        if own.contains(&of(other)?) {
            return Err(GpuError::Cgroup { apart });
        }
    }
    Ok(own)
}

impl GpuContainer {
    /// Tells of an exec'ed process, whose program is then compared with init's.
    pub(crate) fn exec_started(&self, pid: u32) {
        let Some(gpu) = &self.gpu else { return };
        if let Some(handle) = gpu.handle.lock().unwrap_or_else(PoisonError::into_inner).as_ref() {
            handle.send(Order::ExecStarted(pid));
        }
    }

    /// Resolves when the container must be killed, with the reason; never for a container without a GPU, nor for
    /// one that ended. Any number of tasks may wait.
    pub(crate) async fn died(&self) -> String {
        if let Some(gpu) = &self.gpu {
            let mut reason = gpu.reason.clone();
            if let Ok(found) = reason.wait_for(Option::is_some).await
                && let Some(reason) = found.clone()
            {
                return reason;
            }
        }
        std::future::pending().await
    }

    /// The container's processes are gone: ends the sandbox, then the lease, then sockets and cgroup leaf. May be
    /// called again.
    pub(crate) async fn ended(&self) {
        let Some(gpu) = &self.gpu else { return };
        drop(gpu.handle.lock().unwrap_or_else(PoisonError::into_inner).take());
        // An error means that the thread is gone, and all with it.
        drop(gpu.done.clone().wait_for(|done| *done).await);
    }
}

/// For `delete` when the shim is gone: kills the sandbox by its cgroup leaf, removes leaf and sockets. Needs only
/// the bundle; one without `gpuslice.json` has nothing to clean up. Blocks for at most a few seconds.
pub(crate) fn clean_up_after_crash(bundle: &Path) {
    if let Some(problem) = record::clean_up(bundle) {
        report::log(
            &bundle.file_name().unwrap_or_default().to_string_lossy(),
            &format!("clean-up: {problem}"),
        );
    }
}

#[cfg(test)]
mod tests;
