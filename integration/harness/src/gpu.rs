//! The GPUs of a node: emulated ones, or the machine's own.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::node::spawn_logged;
use crate::programs::Programs;
use crate::spec::Device;
use crate::wait::{SOON, until_true};

/// Major number of NVIDIA's control and GPU nodes.
const NVIDIA: u32 = 195;
/// Major number under which the emulated UVM node is granted.
const EMULATED_UVM: u32 = 510;

/// The emulated cards: four times any quota under test.
const CARD: &str = "h200:65536";

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
        command.arg("serve").arg("--root").arg(&root);
        for _ in 0..count {
            command.args(["--gpu", CARD]);
        }
        command.env("GPUSLICE_TEST_NODE", directory);
        let child = spawn_logged(&mut command, directory, "emulator")?;
        let gpus = Gpus { emulator: Some(child), root, count };
        let log = directory.join("log/emulator");
        until_true("the emulator is ready", SOON, || {
            std::fs::read_to_string(&log).is_ok_and(|text| text.contains("\"ready\":true"))
        })?;
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

    /// Asks the emulated driver something: `{"do": "usage"}` and the like.
    ///
    /// # Errors
    /// When it doesn't answer, or says no.
    pub fn ask(&self, request: &Value) -> Result<Value> {
        let socket = self.root.join("ctl.sock");
        let mut stream = UnixStream::connect(&socket)
            .with_context(|| format!("reach the emulator at {}", socket.display()))?;
        stream.set_read_timeout(Some(SOON)).context("set a deadline")?;
        writeln!(stream, "{request}").context("ask the emulator")?;
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).context("read the emulator's answer")?;
        let answer: Value = serde_json::from_str(&line).context("read the emulator's answer")?;
        if answer.get("ok") != Some(&Value::Bool(true)) {
            bail!("the emulator refused {request}: {answer}");
        }
        Ok(answer)
    }

    /// Number of the last call that reached the driver.
    ///
    /// # Errors
    /// When the emulator doesn't answer.
    pub fn calls(&self) -> Result<u64> {
        self.ask(&json!({"do": "usage"}))?.get("calls").and_then(Value::as_u64).context("no number of calls")
    }

    /// Calls that reached the driver after number `after`.
    ///
    /// # Errors
    /// When the emulator doesn't answer.
    pub fn journal(&self, after: u64) -> Result<Vec<Value>> {
        let answer = self.ask(&json!({"do": "journal", "after": after}))?;
        answer.get("calls").and_then(Value::as_array).cloned().context("no journal")
    }

    /// Bytes in use on the card with this minor number.
    ///
    /// # Errors
    /// When the emulator doesn't answer or has no such card.
    pub fn used(&self, minor: u32) -> Result<u64> {
        let usage = self.ask(&json!({"do": "usage"}))?;
        let gpus = usage.get("gpus").and_then(Value::as_array).context("no GPUs")?;
        gpus.iter()
            .find(|gpu| gpu.get("minor").and_then(Value::as_u64) == Some(minor.into()))
            .and_then(|gpu| gpu.get("used")?.as_u64())
            .with_context(|| format!("no card {minor}"))
    }

    /// UUID of the card with this minor number.
    ///
    /// # Errors
    /// When the emulator doesn't answer or has no such card.
    pub fn uuid(&self, minor: u32) -> Result<String> {
        let usage = self.ask(&json!({"do": "usage"}))?;
        let gpus = usage.get("gpus").and_then(Value::as_array).context("no GPUs")?;
        let found = gpus.iter().find(|gpu| gpu.get("minor").and_then(Value::as_u64) == Some(minor.into()));
        let uuid =
            found.and_then(|gpu| gpu.get("uuid")?.as_str()).with_context(|| format!("no card {minor}"))?;
        Ok(uuid.to_owned())
    }

    /// Plants a fault; see the emulator's faults.
    ///
    /// # Errors
    /// When the emulator refuses.
    pub fn fault(&self, matches: &Value, effect: &Value) -> Result<()> {
        self.ask(&json!({"do": "fault", "match": matches, "effect": effect})).map(drop)
    }

    /// Takes all faults away.
    ///
    /// # Errors
    /// When the emulator refuses.
    pub fn release(&self) -> Result<()> {
        self.ask(&json!({"do": "release"})).map(drop)
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
        let Some(mut child) = self.emulator.take() else { return };
        let ended = crate::process::signal(child.id(), nix::sys::signal::Signal::SIGTERM)
            .and_then(|()| crate::run::status_within(&mut child, "the emulator", SOON));
        if let Err(error) = ended {
            eprintln!("harness: {error:#}");
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
