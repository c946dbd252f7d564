//! The messages of each link, one type per direction.

use serde::{Deserialize, Serialize};

use crate::{Carries, ContainerId, GpuUuid, LeaseId, Link, Reason};

/// One granted GPU with its resolved limits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuSlice {
    /// The GPU.
    pub uuid: GpuUuid,
    /// Minor number of its device node (`/dev/nvidiaN`).
    pub minor: u32,
    /// Most GPU memory in bytes: the quota.
    pub memory_hard: u64,
    /// Guaranteed GPU memory in bytes, at most `memory_hard`.
    pub memory_soft: u64,
    /// Compute weight, 1 to 10000.
    pub weight: u32,
}

/// A container that asks for a lease, or one that ran under an earlier scheduler.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Register {
    /// The container.
    pub container: ContainerId,
    /// Its pod's sandbox id, where it has one.
    pub pod: Option<ContainerId>,
    /// Its GPUs, 1 to 16.
    pub gpus: Vec<GpuSlice>,
    /// Driver version found by the shim, e.g. `580.159.04`.
    pub driver: String,
    /// Set when the container runs already: the lease and uid it held, and its sandbox's pid.
    pub adopt: Option<Lease>,
}

/// What a registered container holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// The lease.
    pub lease: LeaseId,
    /// Uid and gid of its sandbox, used by nobody else.
    pub uid: u32,
    /// Pid of its sandbox in the initial pid namespace; 0 until announced.
    pub sandbox_pid: u32,
}

/// Shim to scheduler.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ShimToScheduler {
    /// First message of a shim's connection. One container a connection.
    Register(Register),
    /// The sandbox runs; sent again until acknowledged. Carries the sandbox's pidfd.
    SandboxStarted {
        /// Its pid.
        pid: u32,
    },
    /// First message of a connection that will be the sandbox's: after the answer only
    /// [`SandboxToScheduler`] is accepted on it.
    OpenSandbox {
        /// The lease that the sandbox acts for.
        lease: LeaseId,
    },
}

/// Scheduler to shim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SchedulerToShim {
    /// Answer to [`ShimToScheduler::Register`].
    Granted(Lease),
    /// Answer to any message; the connection closes.
    Refused {
        /// Stable code.
        reason: Reason,
        /// What was found and what is allowed, for a person.
        detail: String,
    },
    /// Answer to [`ShimToScheduler::SandboxStarted`] and [`ShimToScheduler::OpenSandbox`].
    Acknowledged,
    /// The scheduler orders the container's end (over its limit by audit, lying sandbox).
    Stop {
        /// Why, for a person.
        detail: String,
    },
}

/// GPU memory of one GPU as the sandbox's ledger has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuUsage {
    /// Minor number of the GPU.
    pub minor: u32,
    /// Bytes charged now.
    pub used: u64,
    /// Highest `used` so far.
    pub peak: u64,
    /// Allocations refused at the quota so far.
    pub denied: u64,
}

/// Sandbox to scheduler.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SandboxToScheduler {
    /// The ledger, after a change (at most ten a second) and as the answer to a ping.
    Usage {
        /// Number of the ping answered, or 0.
        ping: u32,
        /// One entry per granted GPU.
        gpus: Vec<GpuUsage>,
        /// Commands refused so far.
        refused: u64,
    },
}

/// Scheduler to sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SchedulerToSandbox {
    /// Asks for a [`SandboxToScheduler::Usage`] with this number (never 0).
    Ping {
        /// Number to send back.
        ping: u32,
    },
}

/// One granted GPU as the sandbox needs it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuSettings {
    /// The GPU.
    pub uuid: GpuUuid,
    /// Minor number of its node.
    pub minor: u32,
    /// Quota in bytes.
    pub memory_hard: u64,
}

/// What a sandbox serves: sent once, first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxSettings {
    /// The container, for log lines.
    pub container: ContainerId,
    /// Granted GPUs, in the order of their files on the frame.
    pub gpus: Vec<GpuSettings>,
    /// Driver version found by the shim.
    pub driver: String,
    /// Major number of the UVM device (dynamic), 0 where there is none.
    pub uvm_major: u32,
    /// The listeners were made with `SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV`.
    pub killable: bool,
}

/// Shim to sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ShimToSandbox {
    /// First message. Carries `nvidiactl`, `nvidia-uvm`, then one file per GPU.
    Start(SandboxSettings),
    /// A scheduler connection, at start and after each restart of the scheduler. Carries it.
    Scheduler,
    /// A seccomp listener of the container: its first process's, or an exec's. Carries it.
    Listener {
        /// Number given by the shim, 0 for the container's first process.
        serial: u32,
    },
    /// Answer to a [`SandboxToShim::Request`].
    Result {
        /// The request answered.
        request: u32,
        /// What came of it.
        result: PrivilegedResult,
    },
}

/// Sandbox to shim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SandboxToShim {
    /// Confined, and `Start` accepted. The shim checks `/proc/PID/status` before it goes on.
    Ready,
    /// The listener is served from now on.
    Serving {
        /// Which.
        serial: u32,
    },
    /// The listener hung up: nobody is left under it.
    ListenerClosed {
        /// Which.
        serial: u32,
    },
    /// One of the few things that the sandbox can't do itself.
    Request {
        /// Number to answer with.
        request: u32,
        /// What is asked.
        ask: PrivilegedRequest,
    },
    /// The container must end (three foreign files that could block a close, a UVM range never charged).
    Stop {
        /// Why, for a person.
        detail: String,
    },
}

/// A range of tenant addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryRange {
    /// First address, page aligned.
    pub start: u64,
    /// Length in bytes, a multiple of the page size.
    pub length: u64,
}

/// What the sandbox may ask of the shim. Each is checked against the container's cgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PrivilegedRequest {
    /// A pidfd and a memory file of this thread.
    Thread {
        /// Thread id in the initial pid namespace.
        tid: u32,
    },
    /// Copy `range` into a new memfd and map that over it, in the process of thread `tid`, whose call waits
    /// for an answer. The shim interrupts every thread of the process and answers
    /// [`PrivilegedResult::Stopping`]; only then may the sandbox answer with a restart (before, the number
    /// would reach the program). The shim answers once more when the move is done.
    ///
    /// `tenant_file` is the number of the (empty, right-sized) memfd that the sandbox put into the tenant's
    /// table. Carries that memfd as well.
    MoveRange {
        /// The calling thread.
        tid: u32,
        /// What to move; private, anonymous or file-backed.
        range: MemoryRange,
        /// The memfd's number in the tenant's table; closed by the move.
        tenant_file: u32,
    },
    /// The file behind a range that is a shared file mapping already.
    SharedRange {
        /// Any thread of the process.
        tid: u32,
        /// The range.
        range: MemoryRange,
    },
    /// All mappings of `/dev/nvidia-uvm` in every process of the container.
    UvmRanges,
    /// Have thread `tid`, whose call waits for an answer, make every page of a shared range, so that they are
    /// charged to the container. Answered as a move is: [`PrivilegedResult::Stopping`] once that thread, and no
    /// other, has been interrupted, then once more before it goes on.
    PopulateRange {
        /// The calling thread.
        tid: u32,
        /// What to populate.
        range: MemoryRange,
    },
}

/// What came of a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PrivilegedResult {
    /// Carries the pidfd, then the memory file (opened read and write).
    Thread {
        /// Process that the thread belongs to.
        tgid: u32,
        /// The pidfd names the thread itself (`PIDFD_THREAD`), not its process.
        thread: bool,
    },
    /// First answer to a move (a population): every thread of the process (the calling thread) is being stopped.
    /// From now until the final answer (the same request number) the sandbox may answer their pending calls with
    /// a restart.
    Stopping,
    /// The range lies on the memfd now, at offset 0.
    Moved,
    /// Carries the file (opened through `map_files`); the range starts at `offset` in it.
    Shared {
        /// Offset in bytes.
        offset: u64,
        /// The process has no page in some place of the range: perhaps nobody made it yet.
        absent: bool,
    },
    /// The range is private memory: it must be moved.
    Private,
    /// Mappings of the UVM file. At most 128 a frame; `more` says that some were left out and counted in `total`.
    UvmRanges {
        /// Process and range of each.
        ranges: Vec<(u32, MemoryRange)>,
        /// Sum of all lengths in bytes, those left out included.
        total: u64,
    },
    /// Not done.
    Failed {
        /// Error number of the step that failed.
        errno: i32,
        /// Which step, for the log.
        detail: String,
    },
    /// The thread has every page of the range now.
    Populated,
}

/// Command line tool to scheduler.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToolToScheduler {
    /// First and only message.
    Status,
}

/// Scheduler to command line tool: one frame a row, then [`SchedulerToTool::End`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SchedulerToTool {
    /// A GPU.
    Gpu(StatusGpu),
    /// A tenant.
    Tenant(StatusTenant),
    /// Nothing follows.
    End {
        /// Driver version.
        driver: String,
        /// Seconds since the scheduler started.
        uptime: u64,
    },
}

/// A GPU as `gpuslice status` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatusGpu {
    /// The GPU.
    pub uuid: GpuUuid,
    /// Minor number.
    pub minor: u32,
    /// Its memory in bytes.
    pub memory: u64,
    /// Guaranteed to tenants, bytes.
    pub guaranteed: u64,
    /// Charged by tenants, bytes.
    pub used: u64,
    /// Tenants on it.
    pub tenants: u32,
}

/// A tenant as `gpuslice status` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatusTenant {
    /// The container.
    pub container: ContainerId,
    /// Its lease.
    pub lease: Lease,
    /// Its GPUs and limits.
    pub gpus: Vec<GpuSlice>,
    /// Its use as last reported, in the same order.
    pub usage: Vec<GpuUsage>,
    /// What the driver said of its sandbox's memory at the last audit, bytes per GPU; empty if never.
    pub audited: Vec<u64>,
    /// Commands refused so far.
    pub refused: u64,
}

impl Carries for ShimToScheduler {
    const LINK: Link = Link::Scheduler;
    fn files(&self) -> usize {
        usize::from(matches!(self, ShimToScheduler::SandboxStarted { .. }))
    }
}
impl Carries for SchedulerToShim {
    const LINK: Link = Link::Scheduler;
}
impl Carries for SandboxToScheduler {
    const LINK: Link = Link::SandboxScheduler;
}
impl Carries for SchedulerToSandbox {
    const LINK: Link = Link::SandboxScheduler;
}
impl Carries for ShimToSandbox {
    const LINK: Link = Link::ShimSandbox;
    fn files(&self) -> usize {
        match self {
            ShimToSandbox::Start(settings) => 2 + settings.gpus.len(),
            ShimToSandbox::Scheduler | ShimToSandbox::Listener { .. } => 1,
            ShimToSandbox::Result { result, .. } => match result {
                PrivilegedResult::Thread { .. } => 2,
                PrivilegedResult::Shared { .. } => 1,
                PrivilegedResult::Stopping
                | PrivilegedResult::Moved
                | PrivilegedResult::Populated
                | PrivilegedResult::Private
                | PrivilegedResult::UvmRanges { .. }
                | PrivilegedResult::Failed { .. } => 0,
            },
        }
    }
}
impl Carries for SandboxToShim {
    const LINK: Link = Link::ShimSandbox;
    fn files(&self) -> usize {
        usize::from(matches!(self, SandboxToShim::Request { ask: PrivilegedRequest::MoveRange { .. }, .. }))
    }
}
impl Carries for ToolToScheduler {
    const LINK: Link = Link::Tool;
}
impl Carries for SchedulerToTool {
    const LINK: Link = Link::Tool;
}
