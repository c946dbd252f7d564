//! The containerd shim of gpuslice: one process per pod, runc (or crun) underneath, a sandbox beside each
//! GPU container.
//!
//! Owns: containers from Create to Delete (`container`), their processes, io, events and exit statuses; what
//! makes a container a slice is in `gpu`. Trusts: root, containerd, the node's configuration. Trusts neither
//! images nor anything that a container wrote. Fails closed: an error before a container runs undoes all that
//! was done for it.
#![forbid(unsafe_code)]

mod bundle;
mod cgroup;
mod container;
mod events;
mod gpu;
mod io;
mod mounts;
mod options;
mod pod;
mod reaper;
mod report;
mod runc;
mod service;
mod spawn;
mod status;
mod task;

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

pub use service::{ServiceError, run};

/// Writes why the program failed to standard error, with all causes: containerd shows it to the user.
pub fn report_error(error: &ServiceError) {
    report::log("shim", &report::chain(error));
}

/// The machine as the shim sees it; tests put an emulated GPU in these places.
#[derive(Clone)]
pub struct Node {
    /// Directory of the device nodes.
    pub dev: PathBuf,
    /// The driver's directory in procfs.
    pub proc_driver: PathBuf,
    /// The kernel's list of device majors.
    pub proc_devices: PathBuf,
    /// What the nodes in `dev` are.
    pub devices: DeviceKind,
    /// The proxy that is started for each GPU container.
    pub sandbox: SandboxProgram,
    /// The configuration where containerd names none.
    pub default_config: PathBuf,
    /// Variables of the environment that the shim keeps; all others are dropped when it starts itself anew.
    pub keep_environment: Vec<&'static str>,
}

/// What kind of file stands for a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// The driver's character devices.
    Character,
    /// Regular files, as an emulated driver has them.
    Regular,
}

/// The sandbox's executable.
#[derive(Clone, Default)]
pub struct SandboxProgram {
    /// Where it is; none: the configuration, or its usual places, say it.
    pub path: Option<PathBuf>,
    /// Files that it gets besides its own, from descriptor 4 on. None in a release.
    pub extra_files: Vec<Arc<File>>,
}

impl Default for Node {
    /// The kernel's own places.
    fn default() -> Self {
        Node {
            dev: "/dev".into(),
            proc_driver: "/proc/driver/nvidia".into(),
            proc_devices: "/proc/devices".into(),
            devices: DeviceKind::Character,
            sandbox: SandboxProgram::default(),
            default_config: gpuslice_config::DEFAULT_PATH.into(),
            keep_environment: Vec::new(),
        }
    }
}

/// What Create says about a container.
#[derive(Clone, Debug)]
pub(crate) struct CreateContext {
    /// The container's id.
    pub(crate) id: String,
    /// Its namespace in containerd.
    pub(crate) namespace: String,
    /// Its bundle, absolute.
    pub(crate) bundle: PathBuf,
    /// The pod's id, where the container is one of a pod.
    pub(crate) pod: Option<String>,
    /// Name or path of the OCI runtime underneath.
    pub(crate) runtime: PathBuf,
}
