//! Wire messages between shim, sandbox and scheduler.
//!
//! Owns: the three links' message types, the frame format, the refusal codes. Does no I/O; sockets are
//! `gpuslice_sys::socket`. Trusts nothing: a frame that doesn't decode to exactly one message of the link
//! and direction expected is an error, and the reader closes the peer.
//!
//! A frame is one SEQPACKET message: magic, protocol version, kind of link, sequence number, then one
//! message. At most [`MAX_FRAME`] bytes. How many files ride on a frame is a property of its message
//! ([`Carries`]); a frame with another number of files is refused.
//!
//! Each direction of each link counts its frames from 0. The connection that a shim opens for the sandbox
//! starts as shim – scheduler for one message and its answer, and is sandbox – scheduler, counting from 0
//! again, from then on.
//!
//! | link | carried by | from | to |
//! | --- | --- | --- | --- |
//! | shim – scheduler | path socket, root only | [`ShimToScheduler`] | [`SchedulerToShim`] |
//! | sandbox – scheduler | a second connection that the shim opened | [`SandboxToScheduler`] | [`SchedulerToSandbox`] |
//! | shim – sandbox | socket pair | [`ShimToSandbox`] | [`SandboxToShim`] |
//! | command line – scheduler | path socket, root only | [`ToolToScheduler`] | [`SchedulerToTool`] |

#![forbid(unsafe_code)]

mod frame;
mod id;
mod messages;
mod reason;

pub use frame::{Carries, FrameError, Link, MAX_FRAME, PROTOCOL_VERSION, Receiver, Sender, peek_link};
pub use id::{ContainerId, GpuUuid, IdError, LeaseId};
pub use messages::{
    GpuSettings, GpuSlice, GpuUsage, Lease, MemoryRange, PrivilegedRequest, PrivilegedResult, Register,
    SandboxSettings, SandboxToScheduler, SandboxToShim, SchedulerToSandbox, SchedulerToShim, SchedulerToTool,
    ShimToSandbox, ShimToScheduler, StatusGpu, StatusTenant, ToolToScheduler,
};
pub use reason::Reason;

/// Most bytes of a container's memory that its sandbox has mapped for pinning at a time.
pub const MOST_PINNED: u64 = 1 << 38;

#[cfg(test)]
mod tests;
