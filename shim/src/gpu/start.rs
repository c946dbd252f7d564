//! The start of a GPU container: lease, cgroup leaf, sandbox, listener socket, in this order.
//!
//! Owns: what exists between `prepare` and the container's end, as fields in the order in which they go: listener
//! socket, sandbox, lease, leaf and files. Promises: dropping a [`Running`] at any point takes all of it down in
//! that order; nothing is handed to the sandbox before it was checked to be confined. Failure: typed by step.

use std::fs::{File, OpenOptions};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use gpuslice_config::{Config, NodeError};
use gpuslice_policy::{Branch, UnknownDriver};
use gpuslice_proto::{
    ContainerId, GpuSettings, GpuUuid, IdError, Register, SandboxSettings, SandboxToShim, ShimToSandbox,
};
use gpuslice_sys::identify;
use gpuslice_sys::socket::StateListener;
use nix::libc;

use super::leaf::{Leaf, LeafError, LeafLimits};
use super::listener::{self, Expected};
use super::majors::{Majors, NVIDIA_MAJOR};
use super::privileged::UvmFile;
use super::record::{self, LEAF_PREFIX, Record};
use super::sandbox::{self, Sandbox, SandboxError, Wanted};
use super::scheduler::{self, Connection, SchedulerError};
use super::slice::{SliceError, Wishes};
use crate::{CreateContext, DeviceKind, Node};

/// Where cgroups are mounted.
pub(crate) const CGROUPS: &str = "/sys/fs/cgroup";
/// How much less a sandbox attracts the out-of-memory killer than its tenant.
const OOM_DISTANCE: i64 = 50;

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
            crate::report::log(&self.name, "the sandbox's cgroup is not empty: a driver call is stuck");
        }
        record::remove_sockets(&self.sockets);
    }
}

/// A container's helpers. Fields are dropped from the first to the last: that is the order of the teardown.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) listening: StateListener,
    pub(crate) sandbox: Sandbox,
    /// `None` while a scheduler that went away is dialled again.
    pub(crate) scheduler: Option<Connection>,
    pub(crate) ground: Ground,
    pub(crate) name: String,
    pub(crate) expected: Expected,
    /// What was registered, and the lease: for a scheduler that was started anew.
    pub(crate) register: Register,
    pub(crate) scheduler_path: PathBuf,
    pub(crate) uvm: UvmFile,
    pub(crate) patience: Duration,
    pub(crate) uid: u32,
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

/// Everything before `runc create`: what comes back has a lease and a sandbox that is starting.
///
/// # Errors
/// [`StartError`]; nothing is left.
pub(crate) fn begin(
    node: &Node,
    config: &Config,
    context: &CreateContext,
    minors: &[u32],
    majors: &Majors,
    spec: &serde_json::Value,
    mut notes: Vec<String>,
) -> Result<Running, StartError> {
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
    let mut register =
        Register { container: id(&context.id)?, pod, gpus: resolved.gpus, driver, adopt: None };

    let patience = config.deadline();
    let scheduler_path = config.scheduler_socket();
    let mut scheduler = Connection::open(&scheduler_path, patience)?;
    let lease = scheduler.register(register.clone())?;
    register.adopt = Some(lease);

    let short = short(&name);
    let ground = ground(config, context, &name, &short, spec)?;
    let socket = ground.sockets.join(super::SOCKET);
    let listening = StateListener::bind(&socket).map_err(|source| StartError::Io {
        step: "listen",
        path: socket.clone(),
        source,
    })?;
    let nonce = listener::nonce().map_err(|source| StartError::Io {
        step: "random numbers",
        path: "/dev/urandom".into(),
        source,
    })?;

    let files = open_devices(node, minors, majors)?;
    let uvm = uvm_file(node, majors, &files)?;
    let program = sandbox::program_path(node.sandbox.path.as_deref(), config.sandbox.as_deref());
    let wanted = Wanted {
        program: &program,
        uid: lease.uid,
        container: &name,
        leaf: &ground.leaf,
        extra: &node.sandbox.extra_files,
        oom_score_adj: oom_score(spec),
    };
    let mut sandbox = Sandbox::start(&wanted)?;
    let settings = settings(&register, majors);
    let borrowed: Vec<BorrowedFd<'_>> = files.iter().map(File::as_fd).collect();
    sandbox.begin(settings, &borrowed, patience)?;

    if let Some(lease) = register.adopt.as_mut() {
        lease.sandbox_pid = sandbox.pid;
    }
    write_record(&register, notes, &ground)?;
    let expected = Expected { id: context.id.clone(), nonce };
    Ok(Running {
        listening,
        sandbox,
        scheduler: Some(scheduler),
        ground,
        name,
        expected,
        register,
        scheduler_path,
        uvm,
        patience,
        uid: lease.uid,
    })
}

fn settings(register: &Register, majors: &Majors) -> SandboxSettings {
    let gpus = register.gpus.iter().map(|slice| GpuSettings {
        uuid: slice.uuid.clone(),
        minor: slice.minor,
        memory_hard: slice.memory_hard,
    });
    SandboxSettings {
        container: register.container.clone(),
        gpus: gpus.collect(),
        driver: register.driver.clone(),
        uvm_major: majors.uvm.unwrap_or(0),
        killable: false,
    }
}

fn ground(
    config: &Config,
    context: &CreateContext,
    name: &str,
    short: &str,
    spec: &serde_json::Value,
) -> Result<Ground, StartError> {
    let sockets = config.run_dir.join("c").join(short);
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&sockets)
        .map_err(|source| StartError::Io { step: "create", path: sockets.clone(), source })?;
    let cgroups_path = spec.pointer("/linux/cgroupsPath").and_then(serde_json::Value::as_str).unwrap_or("");
    let limits = LeafLimits { memory: config.sandboxes.memory.count(), pids: config.sandboxes.pids };
    let leaf = Leaf::create(Path::new(CGROUPS), cgroups_path, &format!("{LEAF_PREFIX}{short}"), limits);
    match leaf {
        Ok(leaf) => Ok(Ground { name: name.to_owned(), bundle: context.bundle.clone(), sockets, leaf }),
        Err(error) => {
            record::remove_sockets(&sockets);
            Err(error.into())
        }
    }
}

fn write_record(register: &Register, notes: Vec<String>, ground: &Ground) -> Result<(), StartError> {
    let mut record = Record::of(register, notes);
    if let Some(lease) = register.adopt {
        record.lease = lease.lease.0;
        record.uid = lease.uid;
        record.sandbox_pid = lease.sandbox_pid;
    }
    record.sockets.clone_from(&ground.sockets);
    record.cgroups = ground.leaf.directories().to_vec();
    record.write(&ground.bundle).map_err(|source| StartError::Io {
        step: "write gpuslice.json",
        path: ground.bundle.clone(),
        source,
    })
}

/// `nvidiactl`, `nvidia-uvm`, then each GPU: the order of the first message to the sandbox.
fn open_devices(node: &Node, minors: &[u32], majors: &Majors) -> Result<Vec<File>, StartError> {
    let uvm = majors.uvm.unwrap_or(0);
    let mut wanted = vec![("nvidiactl".to_owned(), (NVIDIA_MAJOR, 255)), ("nvidia-uvm".to_owned(), (uvm, 0))];
    wanted.extend(minors.iter().map(|minor| (format!("nvidia{minor}"), (NVIDIA_MAJOR, *minor))));
    wanted.iter().map(|(name, numbers)| open_device(&node.dev.join(name), node.devices, *numbers)).collect()
}

fn open_device(path: &Path, kind: DeviceKind, numbers: (u32, u32)) -> Result<File, StartError> {
    let refuse = |reason: String| StartError::Device { path: path.to_owned(), reason };
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NOFOLLOW)
        .open(path)
        .map_err(|error| refuse(format!("can't be opened: {error}")))?;
    let found = identify(file.as_fd()).map_err(|error| refuse(error.to_string()))?;
    let right = match kind {
        DeviceKind::Character => {
            found.is_character_device() && (found.rdev_major, found.rdev_minor) == numbers
        }
        DeviceKind::Regular => file.metadata().is_ok_and(|data| {
            let kind = data.file_type();
            kind.is_file() && !kind.is_char_device()
        }),
    };
    if right { Ok(file) } else { Err(refuse(format!("it is not the device {}:{}", numbers.0, numbers.1))) }
}

fn uvm_file(node: &Node, majors: &Majors, files: &[File]) -> Result<UvmFile, StartError> {
    let path = || node.dev.join("nvidia-uvm");
    match (node.devices, majors.uvm, files.get(1)) {
        (DeviceKind::Character, Some(major), _) => Ok(UvmFile::Device { major }),
        (DeviceKind::Regular, _, Some(file)) => {
            let found = identify(file.as_fd()).map_err(|source| StartError::Io {
                step: "identify",
                path: path(),
                source,
            })?;
            Ok(UvmFile::File { device: found.dev, inode: found.inode })
        }
        _ => Err(StartError::Device { path: path(), reason: "the driver has no UVM device".to_owned() }),
    }
}

fn oom_score(spec: &serde_json::Value) -> i32 {
    let tenant = spec.pointer("/process/oomScoreAdj").and_then(serde_json::Value::as_i64).unwrap_or(0);
    i32::try_from(tenant.saturating_sub(OOM_DISTANCE).clamp(-999, 1000)).unwrap_or(0)
}

impl Running {
    /// The listener's socket, as the spec names it.
    pub(crate) fn listener_path(&self) -> PathBuf {
        self.ground.sockets.join(super::SOCKET)
    }

    /// Waits for the sandbox, checks it, announces it and gives it its connection to the scheduler. Runs beside
    /// `runc create`.
    ///
    /// # Errors
    /// [`StartError`].
    pub(crate) fn shake_hands(&mut self) -> Result<(), StartError> {
        self.sandbox.expect(&SandboxToShim::Ready, self.patience, "it got ready")?;
        sandbox::check_confined(self.sandbox.pid, self.uid)?;
        if let Some(scheduler) = self.scheduler.as_mut() {
            scheduler.announce(self.sandbox.pid, self.sandbox.pidfd.as_fd())?;
        }
        if let Some(lease) = self.register.adopt {
            let connection = scheduler::open_for_sandbox(&self.scheduler_path, lease.lease, self.patience)?;
            self.sandbox.link.send(
                &ShimToSandbox::Scheduler,
                &[connection.as_fd()],
                self.patience,
                "the scheduler's connection",
            )?;
        }
        Ok(())
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

    #[test]
    fn a_sandbox_attracts_the_oom_killer_less_than_its_tenant() {
        for (tenant, own) in [(Some(1000), 950), (None, -50), (Some(-998), -999), (Some(i64::MAX), 1000)] {
            assert_eq!(oom_score(&serde_json::json!({ "process": { "oomScoreAdj": tenant } })), own);
        }
    }

    #[test]
    fn a_device_is_opened_only_if_it_is_what_it_should_be() {
        let null = Path::new("/dev/null");
        open_device(null, DeviceKind::Character, (1, 3)).unwrap();
        assert!(open_device(null, DeviceKind::Character, (1, 5)).is_err());
        assert!(open_device(null, DeviceKind::Regular, (1, 3)).is_err());
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("nvidia0");
        std::fs::write(&file, "").unwrap();
        open_device(&file, DeviceKind::Regular, (195, 0)).unwrap();
        assert!(open_device(&file, DeviceKind::Character, (195, 0)).is_err());
        std::os::unix::fs::symlink(&file, folder.path().join("link")).unwrap();
        assert!(open_device(&folder.path().join("link"), DeviceKind::Regular, (195, 0)).is_err());
    }
}
