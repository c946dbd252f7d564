//! The driver as the sandbox sees it: which node a file is, and one ioctl on it.
//!
//! Owns: the [`Driver`] trait and the kernel's implementation of it. Trusts: the kernel's `statx` and the
//! driver's answers. Promises: every call goes out on the file that was passed, with buffers of ours behind
//! each pointer ([`Arg`]). Failure: the errno of the call, unchanged.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use gpuslice_sys::Arg;

/// A device node of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Node {
    /// `/dev/nvidiactl`.
    Control,
    /// `/dev/nvidiaN`.
    Gpu {
        /// N.
        minor: u32,
    },
    /// `/dev/nvidia-uvm`.
    Uvm,
    /// `/dev/nvidia-uvm-tools`.
    UvmTools,
}

/// A file that the driver made for the tenant.
#[derive(Debug)]
pub struct Install {
    /// Number whose file it replaces: a number from the parameters of the call (the sandbox's copy of a file that
    /// the tenant named; it becomes the tenant's number). `None`: any free number.
    pub at: Option<u32>,
    /// The file.
    pub file: OwnedFd,
}

/// What a successful call brought, beside the bytes written into the [`Arg`].
#[derive(Debug, Default)]
pub struct Done {
    /// The call's value, normally 0.
    pub value: i32,
    /// Files to hand to the tenant.
    pub install: Vec<Install>,
}

/// Something that answers the driver's ioctls: the kernel, or an emulated driver in tests.
pub trait Driver: Send + Sync {
    /// Which node `file` is an open file of; `None` for anything else.
    ///
    /// # Errors
    /// The file can't be identified.
    fn node_of(&self, file: BorrowedFd<'_>) -> io::Result<Option<Node>>;

    /// Performs command `cmd` on `file`.
    ///
    /// # Errors
    /// The errno that the driver answered.
    fn ioctl(&self, file: BorrowedFd<'_>, node: Node, cmd: u32, arg: &mut Arg) -> io::Result<Done>;
}

/// Major number of the control and GPU nodes.
const NVIDIA_MAJOR: u32 = 195;
/// Minor number of the control node.
const CONTROL_MINOR: u32 = 255;
/// Highest minor number of a GPU node.
const LAST_GPU_MINOR: u32 = 247;

/// The kernel's driver.
#[derive(Clone, Copy, Debug)]
pub struct KernelDriver {
    uvm_major: u32,
}

impl KernelDriver {
    /// The driver whose UVM nodes have this major number (0: there are none).
    pub fn new(uvm_major: u32) -> Self {
        KernelDriver { uvm_major }
    }
}

impl Driver for KernelDriver {
    fn node_of(&self, file: BorrowedFd<'_>) -> io::Result<Option<Node>> {
        let identity = gpuslice_sys::identify(file)?;
        if identity.mode & 0o170_000 != 0o020_000 {
            return Ok(None);
        }
        Ok(match (identity.rdev_major, identity.rdev_minor) {
            (NVIDIA_MAJOR, CONTROL_MINOR) => Some(Node::Control),
            (NVIDIA_MAJOR, minor @ 0..=LAST_GPU_MINOR) => Some(Node::Gpu { minor }),
            (major, 0) if major == self.uvm_major && major != 0 => Some(Node::Uvm),
            (major, 1) if major == self.uvm_major && major != 0 => Some(Node::UvmTools),
            _ => None,
        })
    }

    fn ioctl(&self, file: BorrowedFd<'_>, _node: Node, cmd: u32, arg: &mut Arg) -> io::Result<Done> {
        let value = gpuslice_sys::ioctl(file, cmd, arg)?;
        Ok(Done { value, install: Vec::new() })
    }
}
