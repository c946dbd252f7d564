//! Open files of the nodes, one entry per open file description.
//!
//! Owns: the table of open files. How it tells them apart: a file that is met for the first time gets a number,
//! kept as its file offset, and an open-file-description lock on that byte of the node, taken through the copy
//! that came with the request. Duplicates and forks share the description, so they show the same number. The
//! kernel drops the lock at the last close or munmap, whoever held it and however it died: that is how the
//! emulator learns of a close.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::unistd::{Whence, lseek};

use crate::memory::MemoryId;
use crate::nodes::{Node, Nodes};

/// Names an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileId(pub u64);

/// An object that a client exported to a file: it lives at least as long as the file.
#[derive(Clone, Debug)]
pub struct Export {
    /// Class of the object.
    pub class: u32,
    /// Card that it belongs to.
    pub gpu: Option<usize>,
    /// Memory behind it, one reference of each.
    pub memory: Vec<MemoryId>,
    /// Process of the exporting client.
    pub pid: u32,
}

/// State of an open file.
#[derive(Debug)]
pub struct OpenFile {
    /// The node.
    pub node: Node,
    /// Control file that it was registered with.
    pub control: Option<FileId>,
    /// GPUs attached to it.
    pub attached: Vec<u32>,
    /// It carries an mmap context (once, for life).
    pub mapping: bool,
    /// What was exported to it, by slot.
    pub exports: BTreeMap<u16, Export>,
}

/// All open files.
#[derive(Debug, Default)]
pub struct Files {
    next: i64,
    open: BTreeMap<FileId, OpenFile>,
    probes: BTreeMap<Node, File>,
}

fn lock(kind: libc::c_int, at: i64) -> libc::flock {
    let narrow = |value: libc::c_int| libc::c_short::try_from(value).unwrap_or(0);
    libc::flock { l_type: narrow(kind), l_whence: narrow(libc::SEEK_SET), l_start: at, l_len: 1, l_pid: 0 }
}

/// Marks an open file description with a byte lock that lasts as long as it does.
///
/// # Errors
/// That of fcntl; EBADF for a write-only file.
pub(crate) fn mark(file: impl AsFd, at: i64) -> Result<(), Errno> {
    fcntl(file, FcntlArg::F_OFD_SETLK(&lock(libc::F_RDLCK, at))).map(drop)
}

/// Whether some other open file description still holds the mark at `at`.
pub(crate) fn marked(probe: impl AsFd, at: i64) -> bool {
    let mut found = lock(libc::F_WRLCK, at);
    match fcntl(probe, FcntlArg::F_OFD_GETLK(&mut found)) {
        Ok(_) => libc::c_int::from(found.l_type) != libc::F_UNLCK,
        Err(_) => true,
    }
}

impl Files {
    /// No open files; the nodes are opened once to look for marks.
    ///
    /// # Errors
    /// A node can't be opened.
    pub fn new(nodes: &Nodes, names: &[Node]) -> io::Result<Self> {
        let mut probes = BTreeMap::new();
        for node in names {
            probes.insert(*node, nodes.open(*node)?);
        }
        Ok(Files { next: 1, open: BTreeMap::new(), probes })
    }

    /// The number of an open file; a new one for a file met for the first time.
    ///
    /// # Errors
    /// The file can't be marked (EBADF: opened for writing only).
    pub fn identify(&mut self, file: &OwnedFd, node: Node) -> Result<FileId, Errno> {
        let at = lseek(file, 0, Whence::SeekCur)?;
        let id = FileId(u64::try_from(at).unwrap_or(0));
        if at != 0 && self.open.get(&id).is_some_and(|known| known.node == node) {
            return Ok(id);
        }
        let at = self.next;
        mark(file, at)?;
        lseek(file, at, Whence::SeekSet)?;
        self.next = self.next.wrapping_add(1);
        let id = FileId(u64::try_from(at).unwrap_or(0));
        let fresh =
            OpenFile { node, control: None, attached: Vec::new(), mapping: false, exports: BTreeMap::new() };
        self.open.insert(id, fresh);
        Ok(id)
    }

    /// The open file.
    pub fn find(&self, id: FileId) -> Option<&OpenFile> {
        self.open.get(&id)
    }

    /// The open file.
    pub fn find_mut(&mut self, id: FileId) -> Option<&mut OpenFile> {
        self.open.get_mut(&id)
    }

    /// Every open file.
    pub fn all(&self) -> impl Iterator<Item = (&FileId, &OpenFile)> {
        self.open.iter()
    }

    /// Takes out the files that were closed since.
    pub fn take_closed(&mut self) -> Vec<(FileId, OpenFile)> {
        let closed: Vec<FileId> = self
            .open
            .iter()
            .filter(|(id, file)| {
                let at = i64::try_from(id.0).unwrap_or(0);
                self.probes.get(&file.node).is_some_and(|probe| !marked(probe, at))
            })
            .map(|(id, _)| *id)
            .collect();
        closed.into_iter().filter_map(|id| Some((id, self.open.remove(&id)?))).collect()
    }
}
