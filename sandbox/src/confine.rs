//! Giving up every right that the sandbox doesn't need, before anything from outside is read.
//!
//! Owns: the order of the steps. Trusts: what the kernel answers to each. Promises: a [`Confined`] exists only
//! after the last step, in which the seccomp program covers every thread; serving needs one. Failure: the
//! process ends before it has read a byte.
//!
//! The order, with one thread up to the start of the others, so that all of them inherit the result: close
//! files, open what the driver needs (nothing, with the kernel's), namespaces with an empty read-only root,
//! limits, bounding set, groups and ids, capabilities, not dumpable, no new privileges, threads, seccomp.
//!
//! There is no Landlock domain: it would deny the one thing that the capability is kept for, since a process
//! in a domain may not reach into one outside of it, `pidfd_getfd` included.

use std::io;

use gpuslice_sys::bpf;
use gpuslice_sys::jail::{self, Limits};

/// Most open files: two for each cached thread, a few for each call, and the rest.
const FILES: u64 = 4096;
/// Largest file: a memory file for a pinned range.
pub(crate) const LARGEST_FILE: u64 = gpuslice_proto::MOST_PINNED;

/// Proof that this process is confined.
#[derive(Debug)]
pub(crate) struct Confined(());

/// A step that failed.
#[derive(Debug, thiserror::Error)]
#[error("confining the sandbox: {step}")]
pub(crate) struct ConfineError {
    step: &'static str,
    source: io::Error,
}

fn at(step: &'static str) -> impl FnOnce(io::Error) -> ConfineError {
    move |source| ConfineError { step, source }
}

/// Confines the process, except for the seccomp program. It must have one thread.
pub(crate) fn drop_rights(uid: u32) -> Result<(), ConfineError> {
    jail::namespaces().map_err(at("namespaces and empty root"))?;
    jail::limits(Limits { files: FILES, file_size: LARGEST_FILE }).map_err(at("resource limits"))?;
    jail::drop_to(uid).map_err(at("ids and capabilities"))?;
    jail::not_dumpable().map_err(at("not dumpable"))?;
    jail::no_new_privileges().map_err(at("no new privileges"))
}

/// Installs the seccomp program in every thread. Each must have come to rest.
pub(crate) fn install_program(driver_commands: &[u32]) -> Result<Confined, ConfineError> {
    let program = gpuslice_filter::own_program(driver_commands);
    bpf::install(&program).map_err(at("seccomp program"))?;
    Ok(Confined(()))
}
