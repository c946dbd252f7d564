//! One tenant ioctl from its registers to its answer.

use std::os::fd::OwnedFd;

use gpuslice_policy::Branch;
use gpuslice_proto::{GpuUsage, SandboxSettings};
use nix::errno::Errno;

use crate::driver::{Driver, Node};
use crate::tenant::Caller;

/// What becomes of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The call returns this value.
    Return(i32),
    /// The call fails.
    Error(Errno),
    /// The call must be made again (the kernel restarts it).
    Restart,
}

/// The sandbox's own open files of the driver.
#[derive(Debug)]
pub struct OwnFiles {
    /// `/dev/nvidiactl`.
    pub control: OwnedFd,
    /// `/dev/nvidia-uvm`, where there is one.
    pub uvm: Option<OwnedFd>,
    /// One per granted GPU, in the order of the settings.
    pub gpus: Vec<OwnedFd>,
}

/// Why a sandbox can't serve.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A step of our own set-up with the driver failed.
    #[error("driver refused {step}: {cause}")]
    Driver {
        /// Which step.
        step: &'static str,
        /// What it answered.
        cause: String,
    },
    /// A granted GPU isn't in the driver's list.
    #[error("the driver lists no GPU with minor number {minor} (it lists {found:?})")]
    NoSuchGpu {
        /// The minor number granted.
        minor: u32,
        /// Those found.
        found: Vec<u32>,
    },
    /// Another number of files than of GPUs.
    #[error("{files} GPU files for {gpus} granted GPUs")]
    Files {
        /// Files passed.
        files: usize,
        /// GPUs granted.
        gpus: usize,
    },
}

/// What an audit of the container's UVM mappings found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UvmVerdict {
    /// All of it is charged.
    Charged,
    /// More is mapped than was ever charged: the container must end.
    Uncharged {
        /// Bytes mapped.
        found: u64,
        /// Bytes charged.
        charged: u64,
    },
}

/// Serves the ioctls of one container. Shared by all workers.
pub struct Sandbox<D: Driver> {
    driver: D,
    table: &'static Branch,
}

impl<D: Driver> Sandbox<D> {
    /// Sets up our own client of the driver.
    ///
    /// # Errors
    /// [`StartError`] when the driver doesn't let us, or doesn't know a granted GPU.
    pub fn new(
        driver: D,
        table: &'static Branch,
        settings: &SandboxSettings,
        files: OwnFiles,
    ) -> Result<Self, StartError> {
        if files.gpus.len() != settings.gpus.len() {
            return Err(StartError::Files { files: files.gpus.len(), gpus: settings.gpus.len() });
        }
        Ok(Sandbox { driver, table })
    }

    /// The driver that this sandbox calls.
    pub fn driver(&self) -> &D {
        &self.driver
    }

    /// Performs one ioctl of the tenant on `file`, a copy of the tenant's open file of `node`.
    pub fn ioctl(&self, caller: &dyn Caller, file: &OwnedFd, node: Node, cmd: u32, arg: u64) -> Outcome {
        let _ = (self.table, caller, file, node, cmd, arg);
        Outcome::Error(Errno::EINVAL)
    }

    /// Charges a mapping of the UVM file that is about to be made, on every granted GPU. It stays charged until
    /// an [`audit_uvm`](Self::audit_uvm) finds it gone. At the quota: audit, then try once more.
    ///
    /// # Errors
    /// `ENOMEM` over the quota.
    pub fn charge_uvm_mapping(&self, length: u64) -> Result<(), Errno> {
        let _ = length;
        Err(Errno::ENOMEM)
    }

    /// Compares the charges with `total`, the sum in bytes of all UVM mappings found in the container's processes.
    pub fn audit_uvm(&self, total: u64) -> UvmVerdict {
        let _ = total;
        UvmVerdict::Charged
    }

    /// A process of the container ended. May call the driver: not for a notification worker.
    pub fn process_ended(&self, tgid: u32) {
        let _ = tgid;
    }

    /// Asks the driver which clients still live and releases what dead ones were charged. May call the driver.
    pub fn sweep(&self) {}

    /// Some client or mapping is charged, so that [`sweep`](Self::sweep) once a second has something to find.
    pub fn has_charges(&self) -> bool {
        false
    }

    /// The ledger of each granted GPU, in the order of the settings.
    pub fn usage(&self) -> Vec<GpuUsage> {
        Vec::new()
    }

    /// Commands refused so far.
    pub fn refused(&self) -> u64 {
        0
    }
}
