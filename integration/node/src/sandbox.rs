//! The emulated driver as the sandbox calls it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use gpuslice_proto::SandboxSettings;
use gpuslice_sandbox::dispatch::OwnFiles;
use gpuslice_sandbox::driver::{Done, Driver, Install, Node};
use gpuslice_sys::{Arg, identify};

use crate::Connections;

type Place = ((u32, u32), u64);

/// A driver behind the emulator's socket. Its nodes are the files that the sandbox was started with, known by
/// device and inode number.
#[derive(Debug)]
pub struct EmulatedDriver {
    connections: Connections,
    nodes: Vec<(Place, Node)>,
}

fn place(file: BorrowedFd<'_>) -> io::Result<Place> {
    let identity = identify(file)?;
    Ok((identity.dev, identity.inode))
}

impl EmulatedDriver {
    /// The driver, with the nodes that are granted.
    ///
    /// # Errors
    /// A granted file can't be identified.
    pub fn new(connections: Connections, settings: &SandboxSettings, own: &OwnFiles) -> io::Result<Self> {
        let mut nodes = vec![(place(own.control.as_fd())?, Node::Control)];
        if let Some(uvm) = &own.uvm {
            nodes.push((place(uvm.as_fd())?, Node::Uvm));
        }
        for (file, gpu) in own.gpus.iter().zip(&settings.gpus) {
            nodes.push((place(file.as_fd())?, Node::Gpu { minor: gpu.minor }));
        }
        Ok(EmulatedDriver { connections, nodes })
    }
}

impl Driver for EmulatedDriver {
    fn node_of(&self, file: BorrowedFd<'_>) -> io::Result<Option<Node>> {
        let found = place(file)?;
        Ok(self.nodes.iter().find(|(known, _)| *known == found).map(|(_, node)| *node))
    }

    fn ioctl(&self, file: BorrowedFd<'_>, _node: Node, cmd: u32, arg: &mut Arg) -> io::Result<Done> {
        let (value, replaced) = self.connections.ioctl(file, cmd, arg)?;
        let install = replaced.map(|(at, file)| Install { at: u32::try_from(at).ok(), file });
        Ok(Done { value, install: install.into_iter().collect() })
    }
}
