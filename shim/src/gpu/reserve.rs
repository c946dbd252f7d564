//! What a GPU container holds before its sandbox exists: lease, cgroup leaf, listener socket, in this order.
//!
//! Owns: [`Reserved`], from the registration to the container's end. Promises: nothing is created for a container
//! that the scheduler has not admitted; dropping a [`Reserved`] closes the listener socket, then the lease, then
//! removes leaf, sockets and record. Failure: typed by step, nothing left.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use gpuslice_config::{Config, NodeError};
use gpuslice_policy::{Branch, UnknownDriver};
use gpuslice_proto::{ContainerId, GpuSlice, GpuUuid, IdError, Lease, Register};
use gpuslice_sys::socket::StateListener;

use super::leaf::{Leaf, LeafError, LeafLimits};
use super::listener::{self, Expected};
use super::record::{self, LEAF_PREFIX, Record};
use super::sandbox::SandboxError;
use super::scheduler::{Connection, SchedulerError};
use super::slice::{SliceError, Wishes};
use crate::{CreateContext, Node, report};

/// Where cgroups are mounted.
pub(crate) const CGROUPS: &str = "/sys/fs/cgroup";

/// Why a GPU container can't be started.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    #[error(
        "fence = \"required\": this release has no fence, so no GPU container starts; set \"preferred\" or \"off\""
    )]
    Fence,
    #[error(transparent)]
    Node(#[from] NodeError),
    #[error(transparent)]
    Driver(#[from] UnknownDriver),
    #[error("/dev/nvidia{minor} is granted, but the driver knows no such GPU")]
    UnknownGpu { minor: u32 },
    #[error(transparent)]
    Slice(#[from] SliceError),
    #[error(transparent)]
    Id(#[from] IdError),
    #[error(transparent)]
    Scheduler(#[from] SchedulerError),
    #[error(transparent)]
    Leaf(#[from] LeafError),
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    #[error("device {}: {reason}", path.display())]
    Device { path: PathBuf, reason: String },
    #[error("{step}: {}", path.display())]
    Io { step: &'static str, path: PathBuf, source: io::Error },
}

/// What is prepared for a container on the node's file system.
#[derive(Debug)]
pub(crate) struct Ground {
    name: String,
    bundle: PathBuf,
    sockets: PathBuf,
    leaf: Leaf,
}

impl Drop for Ground {
    fn drop(&mut self) {
        self.leaf.kill();
        if self.leaf.remove(Instant::now() + Duration::from_secs(1)) {
            record::forget(&self.bundle);
        } else {
            report::log(&self.name, "the sandbox's cgroup is not empty: a driver call is stuck");
        }
        record::remove_sockets(&self.sockets);
    }
}

/// A container that the scheduler has admitted. Fields are dropped from the first to the last.
#[derive(Debug)]
pub(crate) struct Reserved {
    pub(crate) listening: StateListener,
    /// `None` while a scheduler that went away is dialled again.
    pub(crate) scheduler: Option<Connection>,
    pub(crate) ground: Ground,
    pub(crate) name: String,
    pub(crate) expected: Expected,
    /// What was registered, for a scheduler that is started anew.
    pub(crate) register: Register,
    pub(crate) lease: Lease,
    pub(crate) scheduler_path: PathBuf,
    pub(crate) patience: Duration,
    notes: Vec<String>,
}

/// The granted GPUs as the driver names them.
fn named(node: &gpuslice_config::Node, minors: &[u32]) -> Result<Vec<(GpuUuid, u32)>, StartError> {
    let cards = node.gpus()?;
    minors
        .iter()
        .map(|minor| {
            let card = cards.iter().find(|card| card.minor == *minor);
            card.map(|card| (card.uuid.clone(), *minor)).ok_or(StartError::UnknownGpu { minor: *minor })
        })
        .collect()
}

/// 16 hex digits for a container: a short name for its socket's directory and its leaf.
fn short(name: &str) -> String {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

/// Resolves the slice, asks the scheduler for a lease and makes the leaf and the listener socket.
///
/// # Errors
/// [`StartError`]; nothing is left.
pub(crate) fn reserve(
    node: &Node,
    config: &Config,
    context: &CreateContext,
    minors: &[u32],
    spec: &serde_json::Value,
    mut notes: Vec<String>,
) -> Result<Reserved, StartError> {
    if config.fence == gpuslice_config::Fence::Required {
        return Err(StartError::Fence);
    }
    let kernel = gpuslice_config::Node { dev: node.dev.clone(), proc_driver: node.proc_driver.clone() };
    let driver = kernel.driver_version()?;
    Branch::for_version(&driver)?;
    let resolved = Wishes::read(spec)?.resolve(&named(&kernel, minors)?, config)?;
    notes.extend(resolved.notes);

    let name = format!("{}/{}", context.namespace, context.id);
    let id = |id: &str| ContainerId::try_from(format!("{}/{id}", context.namespace));
    let pod = context.pod.as_deref().map(id).transpose()?;
    let register = Register { container: id(&context.id)?, pod, gpus: resolved.gpus, driver, adopt: None };

    let patience = config.deadline();
    let scheduler_path = config.scheduler_socket();
    let mut scheduler = Connection::open(&scheduler_path, patience)?;
    let lease = scheduler.register(register.clone())?;

    let ground = ground(config, context, &name, &register.gpus, spec)?;
    let socket = ground.sockets.join(super::SOCKET);
    let failed = |step, path: &Path| {
        let path = path.to_owned();
        move |source| StartError::Io { step, path, source }
    };
    let listening = StateListener::bind(&socket).map_err(failed("listen", &socket))?;
    let random = Path::new("/dev/urandom");
    let nonce = listener::nonce().map_err(failed("random numbers", random))?;
    let expected = Expected { id: context.id.clone(), nonce };
    for note in &notes {
        report::log(&name, note);
    }
    let reserved = Reserved {
        listening,
        scheduler: Some(scheduler),
        ground,
        name,
        expected,
        register,
        lease,
        scheduler_path,
        patience,
        notes,
    };
    // Before there is a sandbox: whoever cleans up after a crash finds it by its leaf.
    reserved.write_record()?;
    Ok(reserved)
}

fn ground(
    config: &Config,
    context: &CreateContext,
    name: &str,
    gpus: &[GpuSlice],
    spec: &serde_json::Value,
) -> Result<Ground, StartError> {
    let short = short(name);
    let sockets = config.run_dir.join("c").join(&short);
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&sockets)
        .map_err(|source| StartError::Io { step: "create", path: sockets.clone(), source })?;
    let cgroups_path = spec.pointer("/linux/cgroupsPath").and_then(serde_json::Value::as_str).unwrap_or("");
    let limits = LeafLimits::of(&config.sandboxes, gpus);
    let leaf = Leaf::create(Path::new(CGROUPS), cgroups_path, &format!("{LEAF_PREFIX}{short}"), limits);
    match leaf {
        Ok(leaf) => Ok(Ground { name: name.to_owned(), bundle: context.bundle.clone(), sockets, leaf }),
        Err(error) => {
            record::remove_sockets(&sockets);
            Err(error.into())
        }
    }
}

impl Reserved {
    /// The listener's socket, as the spec names it.
    pub(crate) fn listener_path(&self) -> PathBuf {
        self.ground.sockets.join(super::SOCKET)
    }

    /// The sandbox's cgroup leaf.
    pub(crate) fn leaf(&self) -> &Leaf {
        &self.ground.leaf
    }

    /// Keeps the pid of the sandbox with the lease, and in the bundle.
    ///
    /// # Errors
    /// [`StartError::Io`].
    pub(crate) fn set_sandbox(&mut self, pid: u32) -> Result<(), StartError> {
        self.lease.sandbox_pid = pid;
        self.write_record()
    }

    fn write_record(&self) -> Result<(), StartError> {
        let mut record = Record::of(&self.register, &self.lease, self.notes.clone());
        record.sockets.clone_from(&self.ground.sockets);
        record.cgroups = self.ground.leaf.directories().to_vec();
        record.write(&self.ground.bundle).map_err(|source| StartError::Io {
            step: "write gpuslice.json",
            path: self.ground.bundle.clone(),
            source,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_names_are_short_and_differ() {
        assert_eq!(short("default/c1").len(), 16);
        assert_ne!(short("default/c1"), short("default/c2"));
        assert_eq!(short("default/c1"), short("default/c1"));
    }
}
