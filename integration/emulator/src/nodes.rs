//! The emulated device nodes and the procfs files that name the driver.
//!
//! Owns: `<root>/dev` (a tmpfs, since managed memory maps the UVM file at offsets as high as addresses) and
//! `<root>/proc`. Promises: a file is a node of ours exactly when device and inode number agree.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::statfs::{TMPFS_MAGIC, statfs};

use crate::model::Gpu;

/// A node of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Node {
    /// `/dev/nvidiactl`.
    Control,
    /// `/dev/nvidiaN`.
    Gpu(u32),
    /// `/dev/nvidia-uvm`.
    Uvm,
    /// `/dev/nvidia-uvm-tools`.
    UvmTools,
}

impl Node {
    /// Its name as traces and the journal have it.
    pub fn name(self) -> String {
        match self {
            Node::Control => "ctl".to_owned(),
            Node::Gpu(minor) => format!("gpu{minor}"),
            Node::Uvm => "uvm".to_owned(),
            Node::UvmTools => "uvm-tools".to_owned(),
        }
    }

    /// The node of this name.
    pub fn named(name: &str) -> Option<Node> {
        Some(match name {
            "ctl" => Node::Control,
            "uvm" => Node::Uvm,
            "uvm-tools" => Node::UvmTools,
            _ => Node::Gpu(name.strip_prefix("gpu")?.parse().ok()?),
        })
    }

    /// Its file name under `/dev`.
    pub fn file_name(self) -> String {
        match self {
            Node::Control => "nvidiactl".to_owned(),
            Node::Gpu(minor) => format!("nvidia{minor}"),
            Node::Uvm => "nvidia-uvm".to_owned(),
            Node::UvmTools => "nvidia-uvm-tools".to_owned(),
        }
    }
}

/// Highest address that a process can map, so the length of the UVM file.
const ADDRESSES: u64 = 1 << 47;
/// Major number that the emulated `/proc/devices` gives UVM.
pub const UVM_MAJOR: u32 = 510;

/// The nodes of one emulated machine.
#[derive(Debug)]
pub struct Nodes {
    root: PathBuf,
    /// (device, inode) of each node.
    known: Vec<(Node, u64, u64)>,
    mounted: bool,
}

impl Nodes {
    /// Makes the files under `root`.
    ///
    /// # Errors
    /// A file can't be made, or `<root>/dev` is no tmpfs and none can be mounted.
    pub fn create(root: &Path, gpus: &[Gpu], driver: &str) -> io::Result<Self> {
        let dev = root.join("dev");
        fs::create_dir_all(&dev)?;
        let mounted = if statfs(&dev)?.filesystem_type() == TMPFS_MAGIC {
            false
        } else {
            mount(Some("gpuslice-emulator"), &dev, Some("tmpfs"), MsFlags::MS_NOSUID, Some("mode=0755"))?;
            true
        };
        let mut nodes = Nodes { root: root.to_owned(), known: Vec::new(), mounted };
        let mut names = vec![Node::Control, Node::Uvm, Node::UvmTools];
        names.extend(gpus.iter().map(|gpu| Node::Gpu(gpu.minor)));
        for node in names {
            let path = dev.join(node.file_name());
            let file = OpenOptions::new().create(true).truncate(true).read(true).write(true).open(&path)?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o666))?;
            if node == Node::Uvm {
                file.set_len(ADDRESSES)?;
            }
            let identity = file.metadata()?;
            nodes.known.push((node, identity.dev(), identity.ino()));
        }
        nodes.write_proc(gpus, driver)?;
        Ok(nodes)
    }

    /// Writes what procfs would say.
    ///
    /// # Errors
    /// A file can't be written.
    pub fn write_proc(&self, gpus: &[Gpu], driver: &str) -> io::Result<()> {
        let proc = self.root.join("proc");
        let nvidia = proc.join("driver/nvidia");
        fs::create_dir_all(&nvidia)?;
        let version = format!(
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {driver}  Release Build  (emulated)\n\
             GCC version:  none\n"
        );
        fs::write(nvidia.join("version"), version)?;
        let devices = format!(
            "Character devices:\n195 nvidia\n195 nvidiactl\n{UVM_MAJOR} nvidia-uvm\n\nBlock devices:\n"
        );
        fs::write(proc.join("devices"), devices)?;
        for gpu in gpus {
            let place = nvidia.join("gpus").join(gpu.pci_text());
            fs::create_dir_all(&place)?;
            let text = format!(
                "Model: \t\t {}\nIRQ:   \t\t 64\nGPU UUID: \t {}\nVideo BIOS: \t 96.00.00.00.00\n\
                 Bus Type: \t PCIe\nDMA Size: \t 52 bits\nDMA Mask: \t 0xfffffffffffff\nBus Location: \t {}\n\
                 Device Minor: \t {}\nGPU Firmware: \t {driver}\nGPU Excluded:\t No\n",
                gpu.model.name,
                gpu.uuid_text(),
                gpu.pci_text(),
                gpu.minor
            );
            fs::write(place.join("information"), text)?;
        }
        Ok(())
    }

    /// Which node `file` is an open file of.
    pub fn of(&self, file: impl AsFd) -> Option<Node> {
        let identity = nix::sys::stat::fstat(file).ok()?;
        let found = self
            .known
            .iter()
            .find(|(_, device, inode)| (*device, *inode) == (identity.st_dev, identity.st_ino));
        found.map(|(node, _, _)| *node)
    }

    /// Device and inode number of a node.
    pub fn identity(&self, node: Node) -> Option<(u64, u64)> {
        self.known.iter().find(|(known, _, _)| *known == node).map(|(_, device, inode)| (*device, *inode))
    }

    /// Path of a node.
    pub fn path(&self, node: Node) -> PathBuf {
        self.root.join("dev").join(node.file_name())
    }

    /// Opens a node for the emulator itself.
    ///
    /// # Errors
    /// That of open.
    pub fn open(&self, node: Node) -> io::Result<File> {
        OpenOptions::new().read(true).write(true).open(self.path(node))
    }

    /// Takes the mounted file system away again.
    pub fn remove(&self) {
        if self.mounted {
            // Detached, for a container may still have a node bound: the files go with the last of them.
            if let Err(error) = umount2(&self.root.join("dev"), MntFlags::MNT_DETACH) {
                eprintln!("gpuslice-emulator: {}/dev stays mounted: {error}", self.root.display());
            }
        }
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        self.remove();
    }
}
