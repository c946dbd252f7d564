//! The GPUs of a node: emulated ones, or the machine's own.

use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use anyhow::{Context, Result, bail};

use crate::node::{Node, spawn_logged};
use crate::programs::Programs;
use crate::spec::Device;
use crate::wait::{SOON, until_true};

/// Major number of NVIDIA's control and GPU nodes.
const NVIDIA: u32 = 195;
/// Major number under which the emulated UVM node is granted.
const EMULATED_UVM: u32 = 511;

/// The GPUs of a node.
#[derive(Debug)]
pub struct Gpus {
    emulator: Option<Child>,
    root: PathBuf,
    count: u32,
}

impl Gpus {
    /// Starts the emulator.
    pub(crate) fn emulated(programs: &Programs, directory: &Path, count: u32) -> Result<Self> {
        let root = directory.join("gpu");
        std::fs::create_dir_all(&root).context("make the emulator's directory")?;
        let mut command = Command::new(programs.part("gpuslice-emulator")?);
        command.arg("--root").arg(&root).arg("--gpus").arg(count.to_string());
        command.env("GPUSLICE_TEST_NODE", directory);
        let child = spawn_logged(&mut command, directory, "emulator")?;
        let gpus = Gpus { emulator: Some(child), root, count };
        let socket = gpus.root.join("emulator.sock");
        until_true("the emulator listens", SOON, || socket.exists())?;
        Ok(gpus)
    }

    /// The machine's own.
    pub(crate) fn real() -> Result<Self> {
        let count = (0..64).take_while(|minor| Path::new(&format!("/dev/nvidia{minor}")).exists()).count();
        if count == 0 {
            bail!("this machine has no /dev/nvidia0");
        }
        Ok(Gpus { emulator: None, root: PathBuf::from("/"), count: u32::try_from(count)? })
    }

    /// Top of the emulator's files.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Process id of the emulator.
    pub fn pid(&self) -> Option<u32> {
        self.emulator.as_ref().map(Child::id)
    }

    /// Tells a part where the emulated GPUs are.
    pub(crate) fn environment(&self, command: &mut Command) {
        if self.emulator.is_some() {
            command.env("GPUSLICE_EMULATED_ROOT", &self.root);
        }
    }

    /// Device nodes that grant the GPU with this minor number.
    ///
    /// # Errors
    /// When there is no such GPU.
    pub fn devices(&self, minor: u32) -> Result<Vec<Device>> {
        if minor >= self.count {
            bail!("the node has {} GPUs, there is no minor number {minor}", self.count);
        }
        let uvm = match self.emulator {
            Some(_) => EMULATED_UVM,
            None => uvm_major()?,
        };
        let node = |name: String, number: (u32, u32)| Device {
            file: self.emulator.as_ref().map(|_| self.root.join("dev").join(&name)),
            path: format!("/dev/{name}"),
            number,
        };
        Ok(vec![
            node("nvidiactl".to_owned(), (NVIDIA, 255)),
            node(format!("nvidia{minor}"), (NVIDIA, minor)),
            node("nvidia-uvm".to_owned(), (uvm, 0)),
        ])
    }
}

impl Drop for Gpus {
    fn drop(&mut self) {
        if let Some(mut child) = self.emulator.take()
            && child.kill().and_then(|()| child.wait()).is_err()
        {
            eprintln!("harness: the emulator does not end");
        }
    }
}

fn uvm_major() -> Result<u32> {
    let table = std::fs::read_to_string("/proc/devices").context("read /proc/devices")?;
    table
        .lines()
        .filter_map(|line| line.trim().split_once(' '))
        .find(|(_, name)| *name == "nvidia-uvm")
        .and_then(|(major, _)| major.parse().ok())
        .context("the kernel knows no nvidia-uvm")
}

/// The lines that every private node's configuration starts with.
pub(crate) fn base_config(node: &Node) -> String {
    format!("run_dir = \"{}\"\n", node.run_dir().display())
}
