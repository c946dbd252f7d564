//! Describes one container and runs it through `ctr`.

use std::fs::File;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::node::Node;
use crate::run;
use crate::running::{Ended, Running};
use crate::spec::{self, Device, Parts};

/// Which runtime performs a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Runtime {
    /// The one under test.
    Gpuslice,
    /// containerd's own, as the unprotected control.
    Runc,
}

impl Runtime {
    /// Its name for containerd.
    pub fn name(self) -> &'static str {
        match self {
            Runtime::Gpuslice => "io.containerd.gpuslice.v1",
            Runtime::Runc => "io.containerd.runc.v2",
        }
    }
}

/// A container to be run.
#[derive(Clone, Debug)]
pub struct Container<'n> {
    node: &'n Node,
    id: String,
    runtime: Runtime,
    args: Vec<String>,
    env: Vec<String>,
    annotations: Vec<(String, String)>,
    devices: Vec<Device>,
    binds: Vec<(PathBuf, String)>,
    seccomp: Option<Value>,
    terminal: bool,
    memory_limit: Option<u64>,
    edits: Vec<(String, Value)>,
}

impl<'n> Container<'n> {
    pub(crate) fn new(node: &'n Node, id: &str) -> Self {
        Container {
            node,
            id: id.to_owned(),
            runtime: if node.programs.stock { Runtime::Runc } else { Runtime::Gpuslice },
            args: vec!["/bin/true".to_owned()],
            env: vec!["PATH=/bin".to_owned(), "TERM=xterm".to_owned()],
            annotations: Vec::new(),
            devices: Vec::new(),
            binds: Vec::new(),
            seccomp: None,
            terminal: false,
            memory_limit: None,
            edits: Vec::new(),
        }
    }

    /// Run by another runtime.
    pub fn runtime(mut self, runtime: Runtime) -> Self {
        self.runtime = runtime;
        self
    }

    /// The program and its arguments.
    pub fn args<S: AsRef<str>>(mut self, args: &[S]) -> Self {
        self.args = args.iter().map(|arg| arg.as_ref().to_owned()).collect();
        self
    }

    /// A line for the shell.
    pub fn shell(self, line: &str) -> Self {
        self.args(&["/bin/sh", "-c", line])
    }

    /// The tenant program.
    pub fn tenant(self, args: &[&str]) -> Self {
        let mut all = vec!["/bin/gpuslice-tenant"];
        all.extend(args);
        self.args(&all)
    }

    /// A variable of its environment.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push(format!("{name}={value}"));
        self
    }

    /// The unprotected control: the stock runtime, and a tenant program that talks to the emulated driver itself,
    /// as a program talks to the kernel's driver in a plain container.
    ///
    /// # Errors
    /// When the node has no GPU.
    pub fn direct(self) -> Result<Self> {
        let socket = self.node.gpus()?.root().join("emulator.sock");
        let place = "/run/emulator.sock";
        Ok(self.runtime(Runtime::Runc).bind(socket, place).env("GPUSLICE_TENANT_DIRECT", place))
    }

    /// An annotation.
    pub fn annotation(mut self, key: &str, value: &str) -> Self {
        self.annotations.push((key.to_owned(), value.to_owned()));
        self
    }

    /// A hard memory quota for all granted GPUs.
    pub fn quota(self, value: &str) -> Self {
        self.annotation("gpuslice.io/memory-hard", value)
    }

    /// Grants the GPU with this minor number.
    ///
    /// # Errors
    /// When the node has none.
    pub fn gpu(mut self, minor: u32) -> Result<Self> {
        for device in self.node.gpus()?.devices(minor)? {
            if !self.devices.iter().any(|known| known.path == device.path) {
                self.devices.push(device);
            }
        }
        Ok(self)
    }

    /// Binds a path of the host into the container.
    pub fn bind(mut self, from: impl Into<PathBuf>, to: &str) -> Self {
        self.binds.push((from.into(), to.to_owned()));
        self
    }

    /// A seccomp profile of its own.
    pub fn seccomp(mut self, profile: Value) -> Self {
        self.seccomp = Some(profile);
        self
    }

    /// A terminal.
    pub fn terminal(mut self) -> Self {
        self.terminal = true;
        self
    }

    /// A limit of the memory control group in bytes.
    pub fn memory_limit(mut self, bytes: u64) -> Self {
        self.memory_limit = Some(bytes);
        self
    }

    /// Replaces a value of the finished spec, by JSON pointer; `-` at the end appends to a list.
    pub fn edit(mut self, pointer: &str, value: Value) -> Self {
        self.edits.push((pointer.to_owned(), value));
        self
    }

    /// The finished spec.
    ///
    /// # Errors
    /// When an edit names no place.
    pub fn spec(&self) -> Result<Value> {
        let mut spec = spec::build(&Parts {
            rootfs: &self.node.rootfs(),
            cgroup: format!("/{}/{}", self.node.namespace, self.id),
            args: &self.args,
            env: &self.env,
            terminal: self.terminal,
            annotations: &self.annotations,
            devices: &self.devices,
            binds: &self.binds,
            seccomp: self.seccomp.as_ref(),
            memory_limit: self.memory_limit,
        });
        for (pointer, value) in &self.edits {
            let (parent, key) = pointer.rsplit_once('/').context("an edit is a JSON pointer")?;
            let place = spec.pointer_mut(parent).with_context(|| format!("the spec has no {parent}"))?;
            match place {
                Value::Array(list) if key == "-" => list.push(value.clone()),
                Value::Array(list) => {
                    let index: usize = key.parse().with_context(|| format!("{key} is no index"))?;
                    *list.get_mut(index).with_context(|| format!("the list has no {index}"))? = value.clone();
                }
                Value::Object(map) => drop(map.insert(key.to_owned(), value.clone())),
                Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {
                    bail!("{parent} holds nothing")
                }
            }
        }
        Ok(spec)
    }

    fn command(&self, flags: &[&str]) -> Result<Command> {
        let path = self.node.directory.join("spec").join(format!("{}.json", self.id));
        std::fs::write(&path, serde_json::to_vec_pretty(&self.spec()?)?).context("write the spec")?;
        let mut command = self.node.ctr();
        command.args(["run", "--runtime", self.runtime.name()]).args(flags);
        if self.runtime == Runtime::Gpuslice {
            command.arg("--runtime-config-path").arg(self.node.config());
        }
        if self.terminal {
            command.arg("--tty");
        }
        command.arg("--config").arg(&path).arg(&self.id);
        Ok(command)
    }

    /// Runs it to its end and removes it.
    ///
    /// # Errors
    /// When `ctr` can't be started or the container doesn't end in time. A container that could not be created
    /// is no error here: see [`Ended`].
    pub fn run(&self) -> Result<Ended> {
        self.background(&["--rm"])?.ended()
    }

    /// Starts it, with `ctr` attached to it in the background, and waits until it runs.
    ///
    /// # Errors
    /// When it doesn't come up, with the message.
    pub fn start(&self) -> Result<Running<'n>> {
        let mut running = self.background(&[])?;
        running.wait_until_running()?;
        Ok(running)
    }

    /// Starts it without anybody attached.
    ///
    /// # Errors
    /// When it doesn't come up, with the message.
    pub fn detach(&self) -> Result<Running<'n>> {
        let mut running = self.background(&["--detach", "--null-io"])?;
        running.wait_until_running()?;
        Ok(running)
    }

    /// `ctr run` attached to it, not yet started; it removes the container at its end.
    ///
    /// # Errors
    /// When the spec can't be written.
    pub fn attached(&self) -> Result<Command> {
        self.command(&["--rm"])
    }

    /// Runs it to its end with `ctr` on a terminal of its own; what the terminal showed.
    ///
    /// # Errors
    /// When it can't be started or doesn't end in time.
    pub fn on_terminal(&self) -> Result<String> {
        run::on_terminal(&self.attached()?)
    }

    /// Starts it without waiting.
    ///
    /// # Errors
    /// When `ctr` can't be started.
    pub fn background(&self, flags: &[&str]) -> Result<Running<'n>> {
        let out = self.node.directory.join("log").join(format!("{}.out", self.id));
        let err = self.node.directory.join("log").join(format!("{}.err", self.id));
        let file = |path: &PathBuf| File::create(path).with_context(|| format!("make {}", path.display()));
        let child = self
            .command(flags)?
            .stdin(Stdio::null())
            .stdout(file(&out)?)
            .stderr(file(&err)?)
            .spawn()
            .context("start ctr run")?;
        Ok(Running {
            node: self.node,
            id: self.id.clone(),
            ctr: child,
            out,
            err,
            detached: flags.contains(&"--detach"),
            kept: !flags.contains(&"--rm"),
        })
    }
}
