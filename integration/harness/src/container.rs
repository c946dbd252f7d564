//! Describes, runs and handles one container through `ctr`.

use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::node::Node;
use crate::process;
use crate::run;
use crate::spec::{self, Device, Parts};
use crate::wait::{SOON, until, until_true};

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

/// How a container ended.
#[derive(Clone, Debug)]
pub struct Ended {
    /// Exit status as `ctr` passes it on; 1 with a message on `stderr` when the container never ran.
    pub status: i32,
    /// What the container wrote.
    pub stdout: String,
    /// What the container or `ctr` wrote.
    pub stderr: String,
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
        // `script` gives ctr the terminal that it insists on.
        let ctr = self.attached()?;
        let mut line = shell_word(ctr.get_program());
        for arg in ctr.get_args() {
            line.push(' ');
            line.push_str(&shell_word(arg));
        }
        let mut command = Command::new(crate::programs::system("script")?);
        command.args(["--quiet", "--return", "--command", &line, "/dev/null"]);
        let output = run::output(&mut command)?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
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

/// A container that was started.
#[derive(Debug)]
pub struct Running<'n> {
    node: &'n Node,
    id: String,
    ctr: Child,
    out: PathBuf,
    err: PathBuf,
    detached: bool,
    kept: bool,
}

impl Running<'_> {
    fn wait_until_running(&mut self) -> Result<()> {
        let id = self.id.clone();
        until(&format!("container {id} runs"), SOON, || {
            if let Some(status) = self.ctr.try_wait().context("ask for ctr's status")?
                && !(self.detached && status.success())
            {
                // It may have run to its end already: only a message of ctr's own is a failure.
                let message = self.stderr();
                if message.contains("ctr: ") {
                    bail!("container {id} did not start: {}", message.trim());
                }
                return Ok(Some(()));
            }
            Ok((self.status()?.as_deref() == Some("RUNNING")).then_some(()))
        })
    }

    /// Its id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// What it wrote so far.
    pub fn stdout(&self) -> String {
        std::fs::read(&self.out).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    }

    /// What it, or `ctr`, wrote to standard error so far.
    pub fn stderr(&self) -> String {
        std::fs::read(&self.err).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    }

    /// Waits until the container has written `text`.
    ///
    /// # Errors
    /// When it doesn't.
    pub fn wait_for_output(&self, text: &str) -> Result<()> {
        until_true(&format!("container {} writes {text:?}", self.id), SOON, || self.stdout().contains(text))
            .with_context(|| format!("it wrote {:?} and {:?}", self.stdout(), self.stderr()))
    }

    fn row(&self) -> Result<Option<(u32, String)>> {
        let list = self.node.ctr_ok(&["tasks", "ls"])?;
        Ok(list.lines().find_map(|line| {
            let mut words = line.split_whitespace();
            (words.next()? == self.id).then_some(())?;
            Some((words.next()?.parse().ok()?, words.next()?.to_owned()))
        }))
    }

    /// Status of its task as containerd knows it, or none if there is no task.
    ///
    /// # Errors
    /// When containerd doesn't answer.
    pub fn status(&self) -> Result<Option<String>> {
        Ok(self.row()?.map(|(_, status)| status))
    }

    /// Process id of its init.
    ///
    /// # Errors
    /// When it has none.
    pub fn pid(&self) -> Result<u32> {
        self.row()?.map(|(pid, _)| pid).filter(|pid| *pid > 0).with_context(|| format!("no task {}", self.id))
    }

    /// Process id of its shim.
    ///
    /// # Errors
    /// When it has none.
    pub fn shim(&self) -> Result<u32> {
        process::parent(self.pid()?).context("the container's first process has no parent")
    }

    /// Runs a program in the container.
    ///
    /// # Errors
    /// When `ctr` can't be started.
    pub fn exec(&self, args: &[&str]) -> Result<Ended> {
        let output = run::output(&mut self.exec_command(args))?;
        Ok(Ended::from(&output))
    }

    /// `ctr tasks exec`, not yet started.
    pub fn exec_command(&self, args: &[&str]) -> Command {
        use std::sync::atomic::{AtomicU32, Ordering};
        static EXECS: AtomicU32 = AtomicU32::new(1);
        let exec = format!("x{}", EXECS.fetch_add(1, Ordering::Relaxed));
        let mut command = self.node.ctr();
        command.args(["tasks", "exec", "--exec-id", &exec, &self.id]).args(args);
        command
    }

    /// `ctr tasks VERB [FLAGS] ID`.
    ///
    /// # Errors
    /// When it fails.
    pub fn task(&self, verb: &str, flags: &[&str]) -> Result<String> {
        let mut args = vec!["tasks", verb];
        args.extend(flags);
        args.push(&self.id);
        self.node.ctr_ok(&args)
    }

    /// Sends a signal to its init.
    ///
    /// # Errors
    /// When containerd refuses.
    pub fn kill(&self, signal: &str) -> Result<()> {
        self.task("kill", &["--signal", signal]).map(drop)
    }

    /// Waits for its end and removes it.
    ///
    /// # Errors
    /// When it doesn't end in time.
    pub fn ended(self) -> Result<Ended> {
        self.ended_within(Duration::from_secs(60))
    }

    /// Waits for its end and removes it.
    ///
    /// # Errors
    /// When it doesn't end in time.
    pub fn ended_within(mut self, limit: Duration) -> Result<Ended> {
        let mut status = None;
        let waited = until_true(&format!("container {} ends", self.id), limit, || {
            status = self.ctr.try_wait().ok().flatten();
            status.is_some()
        });
        if let Err(error) = waited {
            self.ctr.kill().context("end ctr")?;
            self.ctr.wait().context("wait for ctr")?;
            return Err(error)
                .with_context(|| format!("it wrote {:?} and {:?}", self.stdout(), self.stderr()));
        }
        let ended = Ended {
            status: status.and_then(|status| status.code()).unwrap_or(-1),
            stdout: self.stdout(),
            stderr: self.stderr(),
        };
        if self.kept && self.node.ctr_ok(&["containers", "info", &self.id]).is_ok() {
            self.node.ctr_ok(&["containers", "rm", &self.id])?;
        }
        Ok(ended)
    }

    /// Kills it, waits for its end and removes it.
    ///
    /// # Errors
    /// When it doesn't end.
    pub fn stop(self) -> Result<Ended> {
        if self.status()?.as_deref().is_some_and(|status| status != "STOPPED") {
            self.kill("SIGKILL")?;
        }
        if self.detached {
            return self.delete();
        }
        self.ended()
    }

    /// Removes the container of a task that containerd has cleaned up.
    ///
    /// # Errors
    /// When containerd refuses.
    pub fn forget(self) -> Result<()> {
        if self.status()?.is_some() {
            run::output(self.node.ctr().args(["tasks", "rm", "--force", &self.id]))?;
        }
        self.node.ctr_ok(&["containers", "rm", &self.id]).map(drop)
    }

    /// Removes a detached container once it has stopped.
    ///
    /// # Errors
    /// When it doesn't stop, or can't be removed.
    pub fn delete(self) -> Result<Ended> {
        until(&format!("container {} stops", self.id), SOON, || {
            Ok((self.status()?.is_none_or(|status| status == "STOPPED")).then_some(()))
        })?;
        // `ctr tasks rm` exits with the container's status.
        let output =
            self.node.ctr().args(["tasks", "rm", &self.id]).output().context("start ctr tasks rm")?;
        self.node.ctr_ok(&["containers", "rm", &self.id])?;
        Ok(Ended::from(&output))
    }
}

impl From<&Output> for Ended {
    fn from(output: &Output) -> Ended {
        Ended {
            status: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

impl Ended {
    /// Fails unless the container ended with 0.
    ///
    /// # Errors
    /// With all that it wrote.
    pub fn success(self) -> Result<Ended> {
        if self.status != 0 {
            bail!("ended with {}: {}{}", self.status, self.stdout, self.stderr);
        }
        Ok(self)
    }

    /// The JSON lines that the tenant program wrote.
    ///
    /// # Errors
    /// When a line is no JSON, or there is none.
    pub fn lines(&self) -> Result<Vec<Value>> {
        let lines: Result<Vec<Value>, _> = self.stdout.lines().map(serde_json::from_str).collect();
        let lines = lines.with_context(|| format!("read {:?} {:?}", self.stdout, self.stderr))?;
        if lines.is_empty() {
            bail!("the tenant wrote nothing: status {}, {}", self.status, self.stderr);
        }
        Ok(lines)
    }

    /// A number in the tenant's last line.
    ///
    /// # Errors
    /// When it isn't there.
    pub fn number(&self, key: &str) -> Result<u64> {
        let lines = self.lines()?;
        let found = lines.iter().rev().find_map(|line| line.get(key)?.as_u64());
        found.with_context(|| format!("no number {key:?} in {:?}", self.stdout))
    }

    /// Fails unless `ctr` refused with a message that contains each of `texts`.
    ///
    /// # Errors
    /// With all that was written instead.
    pub fn refused(&self, texts: &[&str]) -> Result<()> {
        if self.status == 0 || !self.stdout.is_empty() {
            bail!("not refused: status {}, output {:?}", self.status, self.stdout);
        }
        for text in texts {
            if !self.stderr.contains(text) {
                bail!("the refusal does not say {text:?}: {}", self.stderr.trim());
            }
        }
        Ok(())
    }
}

fn shell_word(word: &std::ffi::OsStr) -> String {
    format!("'{}'", word.to_string_lossy().replace('\'', "'\\''"))
}
