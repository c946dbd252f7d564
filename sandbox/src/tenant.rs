//! What a command may ask of the thread that made the call.
//!
//! Owns: the [`Caller`] trait, the only road from dispatch to tenant memory, tenant files and pinned memory.
//! Trusts: nothing that comes through it. Promises nothing about time: a read may block for ever, so no lock
//! is held across a call of this trait. Failure: an errno, which becomes the call's answer.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use gpuslice_sys::SharedMapping;
use nix::errno::Errno;

/// A range of tenant memory that the sandbox maps as well.
#[derive(Clone, Debug)]
pub struct Pinned {
    /// Address of the range's first byte in the sandbox.
    pub address: u64,
    /// Keeps the sandbox's mapping; dropped when the driver lets go of the pages.
    pub keep: Arc<SharedMapping>,
}

/// Why a range is not (yet) shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PinError {
    /// The range is being moved: answer the call with a restart, it will come again.
    Restart,
    /// It can't be shared.
    Errno(Errno),
}

/// The calling thread, for the time of one call.
pub trait Caller {
    /// Fills `buf` from tenant memory at `addr`.
    ///
    /// # Errors
    /// `EFAULT` when any byte can't be read.
    fn read(&self, addr: u64, buf: &mut [u8]) -> Result<(), Errno>;

    /// Writes `buf` into tenant memory at `addr`.
    ///
    /// # Errors
    /// `EFAULT` when any byte can't be written.
    fn write(&self, addr: u64, buf: &[u8]) -> Result<(), Errno>;

    /// A copy of the thread's file number `n`.
    ///
    /// # Errors
    /// `EBADF` when there is none.
    fn file(&self, n: i32) -> Result<OwnedFd, Errno>;

    /// Takes a copy made by [`file`](Self::file) that turned out not to be the driver's: closing it may block.
    fn discard(&self, file: OwnedFd) {
        drop(file);
    }

    /// The process that the thread belongs to.
    fn tgid(&self) -> u32;

    /// The call still waits for its answer.
    fn still_waiting(&self) -> bool;

    /// Shares a range of tenant memory, moving it first where it must.
    ///
    /// # Errors
    /// [`PinError::Restart`] while the range is being moved.
    fn pinned(&self, addr: u64, length: u64) -> Result<Pinned, PinError>;

    /// Puts `file` into the thread's table: at number `at`, or at a free one. Answers the number.
    ///
    /// # Errors
    /// `EMFILE` when the table is full, `ENOENT` when the call was cancelled.
    fn install(&self, file: OwnedFd, at: Option<u32>) -> Result<u32, Errno>;
}
