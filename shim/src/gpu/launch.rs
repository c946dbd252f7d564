//! The start of the sandbox of an admitted container. Runs beside `runc create`.
//!
//! Owns: the order of the steps: devices, process, settings, check of what it gave up, announcement, its connection
//! to the scheduler. Promises: nothing of the tenant is handed to it before all of them are done. Failure: the
//! sandbox is gone, the reservation is given back to the caller with the error: the runtime must still find the
//! listener's socket, or its error would hide this one.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use gpuslice_proto::{GpuSettings, Register, SandboxSettings, SandboxToShim, ShimToSandbox};
use gpuslice_sys::identify;
use nix::libc;

use super::majors::{Majors, NVIDIA_MAJOR};
use super::privileged::UvmFile;
use super::reserve::{Reserved, StartError};
use super::sandbox::{self, Sandbox, Wanted};
use super::scheduler;
use crate::{DeviceKind, Node};

/// How much less a sandbox attracts the out-of-memory killer than its tenant.
const OOM_DISTANCE: i64 = 50;

/// A container's helpers. Fields are dropped from the first to the last: that is the order of the teardown.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) sandbox: Sandbox,
    pub(crate) reserved: Reserved,
    pub(crate) uvm: UvmFile,
}

/// What is started.
#[derive(Clone)]
pub(crate) struct Launch {
    pub(crate) node: Node,
    pub(crate) program: PathBuf,
    pub(crate) minors: Vec<u32>,
    pub(crate) majors: Majors,
    pub(crate) oom_score_adj: i32,
}

/// A start that failed.
#[derive(Debug)]
pub(crate) struct Failed {
    pub(crate) reserved: Reserved,
    pub(crate) error: StartError,
}

impl Launch {
    /// Starts the sandbox and waits until it is ready.
    ///
    /// # Errors
    /// [`Failed`].
    pub(crate) fn run(&self, mut reserved: Reserved) -> Result<Running, Box<Failed>> {
        match self.try_run(&mut reserved) {
            Ok((sandbox, uvm)) => Ok(Running { sandbox, reserved, uvm }),
            Err(error) => Err(Box::new(Failed { reserved, error })),
        }
    }

    fn try_run(&self, reserved: &mut Reserved) -> Result<(Sandbox, UvmFile), StartError> {
        let files = open_devices(&self.node, &self.minors, &self.majors)?;
        let uvm = uvm_file(&self.node, &self.majors, &files)?;
        let mut sandbox = Sandbox::start(&Wanted {
            program: &self.program,
            uid: reserved.lease.uid,
            container: &reserved.name,
            leaf: reserved.leaf(),
            extra: &self.node.sandbox.extra_files,
            oom_score_adj: self.oom_score_adj,
        })?;
        let borrowed: Vec<BorrowedFd<'_>> = files.iter().map(File::as_fd).collect();
        sandbox.begin(settings(&reserved.register, &self.majors), &borrowed, reserved.patience)?;
        reserved.set_sandbox(sandbox.pid)?;
        shake_hands(&mut sandbox, reserved)?;
        Ok((sandbox, uvm))
    }
}

fn shake_hands(sandbox: &mut Sandbox, reserved: &mut Reserved) -> Result<(), StartError> {
    sandbox.expect(&SandboxToShim::Ready, reserved.patience, "it got ready")?;
    sandbox::check_confined(sandbox.pid, reserved.lease.uid)?;
    if let Some(scheduler) = reserved.scheduler.as_mut() {
        scheduler.announce(sandbox.pid, sandbox.pidfd.as_fd())?;
    }
    let connection =
        scheduler::open_for_sandbox(&reserved.scheduler_path, reserved.lease.lease, reserved.patience)?;
    let files = [connection.as_fd()];
    sandbox.link.send(&ShimToSandbox::Scheduler, &files, reserved.patience, "the scheduler's connection")?;
    Ok(())
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

/// `oom_score_adj` for the sandbox of the container with this spec.
pub(crate) fn oom_score(spec: &serde_json::Value) -> i32 {
    let tenant = spec.pointer("/process/oomScoreAdj").and_then(serde_json::Value::as_i64).unwrap_or(0);
    i32::try_from(tenant.saturating_sub(OOM_DISTANCE).clamp(-999, 1000)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

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
