//! One tenant ioctl from its registers to its answer.
//!
//! Owns: the shared state of one container's calls and the road of a call: node, row, copy in, checks, forward,
//! enter, copy out. Trusts: the policy table and the driver's answers; nothing of the tenant's. Promises: each
//! range of tenant memory is read once and everything is decided on that copy; every pointer that reaches the
//! driver is a buffer of ours or null; what has no row is refused; no lock is held across a driver call or an
//! access to tenant memory. Failure: the status or errno that the driver itself would give; a copy-out that
//! fails leaves ledger and graph as the driver has them.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use gpuslice_policy::Branch;
use gpuslice_policy::row::{FileField, FileKind, Handle};
use gpuslice_policy::status;
use gpuslice_proto::{GpuUsage, SandboxSettings};
use gpuslice_sys::Arg;
use nix::errno::Errno;

use crate::bytes::{get_file, get32, put_file, put32};
use crate::driver::{Done, Driver, Node};
use crate::exports::Exports;
use crate::ledger::{Account, DmaMaps, UvmCharges};
use crate::mapped::Mapped;
use crate::objects::{Name, Objects};
use crate::own_client::{Card, OwnClient};
use crate::refusals::Refusals;
use crate::tenant::Caller;
use crate::uvm_files::UvmFiles;

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

/// Most host memory that the driver may allocate for a container, and pin of it: it is in no cgroup.
const HOST_MEMORY: u64 = 256 << 30;
/// Page of the processor.
pub(crate) const HOST_PAGE: u64 = 4096;
/// Most bytes that one call may copy in.
pub(crate) const MOST_COPIED: usize = 1 << 20;

/// Why a handler stops before its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// The call fails.
    Errno(Errno),
    /// The call succeeds, and its parameters carry this status.
    Status(u32),
    /// The call must be made again.
    Restart,
}

impl From<Errno> for Stop {
    fn from(errno: Errno) -> Self {
        Stop::Errno(errno)
    }
}

/// A call being handled.
pub(crate) struct Call<'a> {
    pub(crate) caller: &'a dyn Caller,
    pub(crate) file: &'a OwnedFd,
    pub(crate) node: Node,
}

impl Call<'_> {
    /// `length` bytes of tenant memory.
    pub(crate) fn read(&self, addr: u64, length: usize) -> Result<Vec<u8>, Errno> {
        let mut bytes = vec![0; length];
        if length != 0 {
            self.caller.read(addr, &mut bytes)?;
        }
        Ok(bytes)
    }

    pub(crate) fn write(&self, addr: u64, bytes: &[u8]) -> Result<(), Errno> {
        if bytes.is_empty() { Ok(()) } else { self.caller.write(addr, bytes) }
    }

    /// The call was not cancelled meanwhile: the last moment before the driver acts.
    pub(crate) fn still_waiting(&self) -> Result<(), Errno> {
        if self.caller.still_waiting() { Ok(()) } else { Err(Errno::ENOENT) }
    }
}

/// A tenant's file in parameters, replaced by a copy for the time of the call.
pub(crate) struct Translated {
    at: u32,
    theirs: i32,
    pub(crate) copy: OwnedFd,
}

/// Serves the ioctls of one container. Shared by all workers.
pub struct Sandbox<D: Driver> {
    pub(crate) driver: D,
    pub(crate) table: &'static Branch,
    pub(crate) own: OwnClient,
    pub(crate) accounts: Vec<Arc<Account>>,
    pub(crate) host: Arc<Account>,
    pub(crate) uvm_charges: UvmCharges,
    pub(crate) objects: Objects,
    pub(crate) uvm_files: UvmFiles,
    pub(crate) exports: Exports,
    pub(crate) mapped: Mapped,
    pub(crate) dma_maps: DmaMaps,
    pub(crate) refusals: Refusals,
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
        let own = OwnClient::new(&driver, settings, files)?;
        let accounts: Vec<Arc<Account>> =
            settings.gpus.iter().map(|gpu| Account::new(gpu.memory_hard)).collect();
        Ok(Sandbox {
            driver,
            table,
            own,
            uvm_charges: UvmCharges::new(accounts.clone()),
            accounts,
            host: Account::new(HOST_MEMORY),
            objects: Objects::default(),
            uvm_files: UvmFiles::default(),
            exports: Exports::default(),
            mapped: Mapped::default(),
            dma_maps: DmaMaps::default(),
            refusals: Refusals::new(settings.container.to_string()),
        })
    }

    /// The driver that this sandbox calls.
    pub fn driver(&self) -> &D {
        &self.driver
    }

    /// Performs one ioctl of the tenant on `file`, a copy of the tenant's open file of `node`.
    pub fn ioctl(&self, caller: &dyn Caller, file: &OwnedFd, node: Node, cmd: u32, arg: u64) -> Outcome {
        let call = Call { caller, file, node };
        let result = match node {
            Node::Control => self.front_end(&call, cmd, arg),
            Node::Gpu { minor } if self.own.cards().iter().any(|card| card.minor == minor) => {
                self.front_end(&call, cmd, arg)
            }
            // A GPU that wasn't granted: nobody should hold such a file.
            Node::Gpu { .. } => Err(Errno::ENOTTY),
            Node::Uvm => self.uvm(&call, cmd, arg),
            Node::UvmTools => {
                self.refuse_uvm(cmd);
                Err(Errno::EINVAL)
            }
        };
        match result {
            Ok(outcome) => outcome,
            Err(errno) => Outcome::Error(errno),
        }
    }

    /// Charges a mapping of the UVM file that is about to be made, on every granted GPU. It stays charged until
    /// an [`audit_uvm`](Self::audit_uvm) finds it gone. At the quota: audit, then try once more.
    ///
    /// # Errors
    /// `ENOMEM` over the quota.
    pub fn charge_uvm_mapping(&self, length: u64) -> Result<(), Errno> {
        // Whole pages are mapped.
        let length = length.checked_next_multiple_of(HOST_PAGE).ok_or(Errno::ENOMEM)?;
        if length == 0 {
            // The kernel maps nothing, and says so.
            return Ok(());
        }
        self.uvm_charges.charge(length, Instant::now()).map_err(|_over| {
            for account in &self.accounts {
                account.count_denied();
            }
            Errno::ENOMEM
        })
    }

    /// Compares the charges with `total`, the sum in bytes of all UVM mappings found in the container's processes.
    pub fn audit_uvm(&self, total: u64) -> UvmVerdict {
        self.uvm_charges.audit(total, Instant::now())
    }

    /// A process of the container ended. May call the driver: not for a notification worker.
    pub fn process_ended(&self, tgid: u32) {
        self.end_uvm_files(tgid);
        self.end_exports(tgid);
        self.sweep();
    }

    /// Asks the driver which clients still live and releases what dead ones were charged. May call the driver.
    pub fn sweep(&self) {
        let clients = self.objects.lock().clients();
        for client in clients {
            let Some(asking) = self.objects.ask(client) else { continue };
            if !self.own.lives(&self.driver, client) {
                drop(asking.gone());
            }
        }
    }

    /// Some client or mapping is charged, so that [`sweep`](Self::sweep) once a second has something to find.
    pub fn has_charges(&self) -> bool {
        self.accounts.iter().any(|account| account.used() != 0) || self.host.used() != 0
    }

    /// The container may have mappings of the UVM file, so that [`audit_uvm`](Self::audit_uvm) has something to
    /// compare: also those that were made behind our back, when nothing is charged.
    pub fn has_uvm(&self) -> bool {
        self.uvm_files.were_any() || self.uvm_charges.bytes() != 0
    }

    /// The ledger of each granted GPU, in the order of the settings.
    pub fn usage(&self) -> Vec<GpuUsage> {
        let gpus = self.own.cards().iter().zip(&self.accounts);
        gpus.map(|(card, account)| GpuUsage {
            minor: card.minor,
            used: account.used(),
            peak: account.peak(),
            denied: account.denied(),
        })
        .collect()
    }

    /// Commands refused so far.
    pub fn refused(&self) -> u64 {
        self.refusals.count()
    }

    pub(crate) fn card_of_id(&self, id: u32) -> Option<&Card> {
        self.own.cards().iter().find(|card| card.id == id)
    }

    /// The driver's turn.
    pub(crate) fn forward(&self, call: &Call<'_>, cmd: u32, arg: &mut Arg) -> Result<Done, Errno> {
        self.driver
            .ioctl(call.file.as_fd(), call.node, cmd, arg)
            .map_err(|error| error.raw_os_error().map_or(Errno::EIO, Errno::from_raw))
    }

    /// Hands files that the driver made to the tenant.
    pub(crate) fn deliver(&self, call: &Call<'_>, done: Done, files: &[Translated]) -> Result<i32, Errno> {
        for install in done.install {
            let theirs = install.at.map(|ours| {
                let named = files.iter().find(|file| u32::try_from(file.copy.as_raw_fd()) == Ok(ours));
                named.and_then(|file| u32::try_from(file.theirs).ok()).unwrap_or(ours)
            });
            call.caller.install(install.file, theirs)?;
        }
        Ok(done.value)
    }

    /// Replaces the tenant's file numbers in `bytes` by numbers of copies; refuses files of the wrong kind.
    pub(crate) fn translate(
        &self,
        call: &Call<'_>,
        fields: &[FileField],
        bytes: &mut [u8],
    ) -> Result<Vec<Translated>, Stop> {
        let mut files = Vec::new();
        for field in fields {
            let theirs = get_file(bytes, field.at)?;
            if field.optional && theirs < 0 {
                continue;
            }
            let copy = self.named_file(call, theirs, field.kind)?;
            put_file(bytes, field.at, copy.as_raw_fd())?;
            files.push(Translated { at: field.at, theirs, copy });
        }
        Ok(files)
    }

    /// A copy of the tenant's file `number`, which must be of `kind`.
    fn named_file(&self, call: &Call<'_>, number: i32, kind: FileKind) -> Result<OwnedFd, Stop> {
        let copy = call.caller.file(number)?;
        let node = self.driver.node_of(copy.as_fd()).ok().flatten();
        let granted = |minor: u32| self.own.cards().iter().any(|card| card.minor == minor);
        let fits = match (kind, node) {
            (FileKind::Control | FileKind::Frontend, Some(Node::Control)) => true,
            (FileKind::Frontend, Some(Node::Gpu { minor })) => granted(minor),
            (FileKind::Uvm, Some(Node::Uvm)) => true,
            _ => false,
        };
        if !fits {
            call.caller.discard(copy);
            return Err(Stop::Errno(Errno::EINVAL));
        }
        Ok(copy)
    }

    /// Puts the tenant's own numbers back.
    pub(crate) fn restore(files: &[Translated], bytes: &mut [u8]) -> Result<(), Errno> {
        files.iter().try_for_each(|file| put_file(bytes, file.at, file.theirs))
    }

    /// Every handle field of a row must name something of this container's. `client` makes the call.
    pub(crate) fn check_handles(&self, handles: &[Handle], client: u32, bytes: &[u8]) -> Result<(), Stop> {
        for handle in handles {
            match *handle {
                Handle::Client { at, optional } => {
                    let named = get32(bytes, at)?;
                    if !(optional && named == 0) {
                        self.check_client(named)?;
                    }
                }
                Handle::Object { at, client: in_client, optional, .. } => {
                    let handle = get32(bytes, at)?;
                    let client = match in_client {
                        Some(at) => get32(bytes, at)?,
                        None => client,
                    };
                    if !(optional && handle == 0) {
                        self.check_object(Name { client, handle })?;
                    }
                }
            }
        }
        Ok(())
    }

    pub(crate) fn check_client(&self, client: u32) -> Result<(), Stop> {
        if self.objects.has(Name { client, handle: client }) {
            Ok(())
        } else {
            Err(Stop::Status(status::INVALID_CLIENT))
        }
    }

    pub(crate) fn check_object(&self, name: Name) -> Result<(), Stop> {
        if self.objects.has(name) { Ok(()) } else { Err(Stop::Status(status::OBJECT_NOT_FOUND)) }
    }
}

/// Ends a call whose handler may have stopped early: the status goes into `bytes` at `status`, and `bytes` to the
/// tenant.
pub(crate) fn conclude(
    call: &Call<'_>,
    addr: u64,
    bytes: &mut [u8],
    status: Option<u32>,
    result: Result<i32, Stop>,
) -> Result<Outcome, Errno> {
    let value = match result {
        Ok(value) => value,
        Err(Stop::Errno(errno)) => return Err(errno),
        Err(Stop::Restart) => return Ok(Outcome::Restart),
        Err(Stop::Status(code)) => {
            put32(bytes, status.ok_or(Errno::EINVAL)?, code)?;
            0
        }
    };
    call.write(addr, bytes)?;
    Ok(Outcome::Return(value))
}

#[cfg(test)]
mod tests;
