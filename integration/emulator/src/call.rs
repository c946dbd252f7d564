//! One ioctl on its way through the driver: who, on which file, and what comes of it.

use std::os::fd::OwnedFd;

use nix::errno::Errno;

use crate::bytes::Bytes;
use crate::caller::Caller;
use crate::files::FileId;
use crate::nodes::{Node, Nodes};
use crate::state::State;
use crate::status::Status;

/// A file that replaces one of the caller's.
#[derive(Debug)]
pub struct Install {
    /// Its number in the caller's table.
    pub at: i32,
    /// What takes its place.
    pub file: OwnedFd,
}

/// One call.
#[derive(Debug)]
pub(crate) struct Call<'a> {
    /// Who makes it.
    pub caller: &'a Caller,
    /// The driver.
    pub state: &'a mut State,
    /// The nodes.
    pub nodes: &'a Nodes,
    /// The file it is made on.
    pub file: FileId,
    /// That file's node.
    pub node: Node,
    /// What it is about, for the journal: class or control, client and object.
    pub about: About,
    /// A file to hand out.
    pub install: Option<Install>,
}

/// What a call was about, for the journal.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct About {
    /// Class, control or UVM command.
    pub what: Option<u32>,
    /// Client.
    pub client: u32,
    /// Object.
    pub object: u32,
    /// Status answered.
    pub status: Option<u32>,
}

impl Call<'_> {
    /// Whether the caller has CAP_SYS_ADMIN, which makes it the driver's administrator.
    pub(crate) fn admin(&self) -> bool {
        self.caller.is_admin()
    }

    /// Whether the caller itself holds an open file of that card, as the driver asks.
    pub(crate) fn holds_gpu(&self, index: usize) -> bool {
        let Some(gpu) = self.state.gpus.get(index) else { return false };
        let identity = self.nodes.identity(Node::Gpu(gpu.minor));
        identity.is_some_and(|(device, inode)| self.caller.holds(device, inode))
    }

    /// The open file behind the caller's file number `n`.
    ///
    /// # Errors
    /// No such file, or not one of the driver's.
    pub(crate) fn file_behind(&mut self, n: i32) -> Result<(FileId, Node), Errno> {
        let file = self.caller.file(n).map_err(|_| Errno::EBADF)?;
        let node = self.nodes.of(&file).ok_or(Errno::EINVAL)?;
        Ok((self.state.files.identify(&file, node)?, node))
    }

    /// Copies a nested block in.
    ///
    /// # Errors
    /// [`Status::INVALID_ADDRESS`].
    pub(crate) fn read(&self, address: u64, length: usize) -> Result<Bytes, Status> {
        self.caller.read(address, length).map(Bytes).map_err(|_| Status::INVALID_ADDRESS)
    }

    /// Copies a nested block out.
    ///
    /// # Errors
    /// [`Status::INVALID_ADDRESS`].
    pub(crate) fn write(&self, address: u64, bytes: &Bytes) -> Result<(), Status> {
        self.caller.write(address, &bytes.0).map_err(|_| Status::INVALID_ADDRESS)
    }
}
