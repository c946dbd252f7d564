//! A private node: containerd, scheduler and emulated GPU in a directory of their own.
//!
//! Owns every process and file below its directory and every control group of its containerd namespace; trusts
//! only the built programs. Nothing of the machine's own containerd is used or touched. [`Node::finish`] checks
//! that the containers of a test left nothing; dropping a node ends and removes everything whatever happened.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, bail};

use crate::container::Container;
use crate::gpu::Gpus;
use crate::layout::make_directory;
use crate::leftovers;
use crate::process;
use crate::programs::Programs;
use crate::run;
use crate::sweep;
use crate::wait::{SOON, until_true};

/// Uids for the sandboxes of one node.
pub(crate) const UIDS: u32 = 64;
static NODES: AtomicU32 = AtomicU32::new(1);

/// What a node is made of.
#[derive(Clone, Debug)]
pub struct Options {
    /// Number of emulated GPUs; 0: no GPU, no scheduler.
    pub gpus: u32,
    /// Start the scheduler.
    pub scheduler: bool,
    /// Use the machine's own GPUs and the programs as shipped.
    pub real: bool,
    /// Further tables of the node's gpuslice configuration.
    pub config: String,
}

impl Default for Options {
    fn default() -> Self {
        Options { gpus: 1, scheduler: true, real: false, config: String::new() }
    }
}

/// A running private node.
#[derive(Debug)]
pub struct Node {
    pub(crate) programs: Programs,
    pub(crate) directory: PathBuf,
    pub(crate) namespace: String,
    pub(crate) gpus: Option<Gpus>,
    pub(crate) major: u32,
    version: String,
    pub(crate) uid_first: u32,
    pub(crate) options: Options,
    containerd: Mutex<Option<Child>>,
    scheduler: Mutex<Option<Child>>,
    finished: bool,
}

impl Node {
    /// A node with one emulated GPU and a scheduler.
    ///
    /// # Errors
    /// When a part can't be started.
    pub fn start() -> Result<Self> {
        Node::with(Options::default())
    }

    /// A node without a GPU and without a scheduler.
    ///
    /// # Errors
    /// When a part can't be started.
    pub fn plain() -> Result<Self> {
        Node::with(Options { gpus: 0, scheduler: false, ..Options::default() })
    }

    /// A node as described.
    ///
    /// # Errors
    /// When a part can't be started; what was started is ended again.
    pub fn with(options: Options) -> Result<Self> {
        let programs = Programs::from_environment()?;
        let number = NODES.fetch_add(1, Ordering::Relaxed);
        let directory = programs.scratch.join(format!("{}n{number:03}", std::process::id() % 100_000));
        let namespace = format!("gs{}n{number:03}", std::process::id());
        let version = programs.daemon_version()?;
        let major =
            version.split('.').next().and_then(|major| major.parse().ok()).context("no major version")?;
        make_directory(&directory)?;
        let mut node = Node {
            programs,
            directory,
            namespace,
            gpus: None,
            major,
            version,
            // Nodes of parallel tests must not share uids.
            uid_first: 1_900_000_000 + ((std::process::id() % 10_000) * 16 + number % 16) * UIDS,
            options,
            containerd: Mutex::new(None),
            scheduler: Mutex::new(None),
            finished: false,
        };
        node.prepare()?;
        Ok(node)
    }

    fn prepare(&mut self) -> Result<()> {
        std::fs::write(self.directory.join("namespace"), &self.namespace).context("note the namespace")?;
        for folder in ["bin", "run", "log", "spec"] {
            make_directory(&self.directory.join(folder))?;
        }
        self.make_rootfs()?;
        self.link_programs()?;
        if self.options.real {
            self.gpus = Some(Gpus::real()?);
        } else if self.options.gpus > 0 {
            self.gpus = Some(Gpus::emulated(&self.programs, &self.directory, self.options.gpus)?);
        }
        self.write_config()?;
        if self.options.scheduler {
            self.start_scheduler()?;
        }
        self.start_containerd()
    }

    /// The node's gpuslice configuration.
    pub fn config(&self) -> PathBuf {
        self.directory.join("config.toml")
    }

    /// Where shim and scheduler meet.
    pub fn run_dir(&self) -> PathBuf {
        self.directory.join("run")
    }

    /// The scheduler's socket.
    pub fn scheduler_socket(&self) -> PathBuf {
        self.run_dir().join("scheduler.sock")
    }

    /// Root file system of all containers of this node.
    pub fn rootfs(&self) -> PathBuf {
        self.directory.join("rootfs")
    }

    /// Top of the node's files.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Containerd namespace of the node; it is in the path of every control group of its containers.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Major version of the daemon under test.
    pub fn daemon_major(&self) -> u32 {
        self.major
    }

    /// Version of the daemon under test.
    pub fn daemon_version(&self) -> &str {
        &self.version
    }

    /// The node's GPUs.
    ///
    /// # Errors
    /// When it was started without.
    pub fn gpus(&self) -> Result<&Gpus> {
        self.gpus.as_ref().context("this node was started without a GPU")
    }

    /// Bundle of a container.
    pub fn bundle(&self, id: &str) -> PathBuf {
        self.tasks().join(id)
    }

    /// Folder of all bundles.
    pub(crate) fn tasks(&self) -> PathBuf {
        self.directory.join("state/io.containerd.runtime.v2.task").join(&self.namespace)
    }

    /// Ends containerd (its containers go on).
    ///
    /// # Errors
    /// When it doesn't end.
    pub fn stop_containerd(&self) -> Result<()> {
        stop(&self.containerd)
    }

    /// Starts containerd and waits until it answers.
    ///
    /// # Errors
    /// When it doesn't come up.
    pub fn start_containerd(&self) -> Result<()> {
        let config = self.directory.join("containerd.toml");
        std::fs::write(&config, self.containerd_config()).context("write containerd's configuration")?;
        let mut command = Command::new(self.programs.daemon_program("containerd")?);
        command.arg("--config").arg(&config).env("PATH", self.path()?);
        if let Some(gpus) = &self.gpus {
            gpus.environment(&mut command);
        }
        // The mark by which every shim of this node is known.
        command.env("GPUSLICE_TEST_NODE", &self.directory);
        *lock(&self.containerd) = Some(self.spawn(&mut command, "containerd")?);
        until_true("containerd answers", SOON, || {
            run::output(self.ctr().arg("version")).is_ok_and(|output| output.status.success())
        })
    }

    /// Starts the scheduler and waits for its socket.
    ///
    /// # Errors
    /// When it doesn't come up.
    pub fn start_scheduler(&self) -> Result<()> {
        let mut command = Command::new(self.directory.join("bin/gpuslice-scheduler"));
        command.arg("--config").arg(self.config());
        if let Some(gpus) = &self.gpus {
            gpus.environment(&mut command);
        }
        command.env("GPUSLICE_TEST_NODE", &self.directory);
        let child = self.spawn(&mut command, "scheduler")?;
        *lock(&self.scheduler) = Some(child);
        let socket = self.scheduler_socket();
        until_true("the scheduler listens", SOON, || {
            std::os::unix::net::UnixDatagram::unbound().is_ok() && socket.exists()
        })
    }

    /// Ends the scheduler as a service manager would.
    ///
    /// # Errors
    /// When it doesn't end.
    pub fn stop_scheduler(&self) -> Result<()> {
        stop(&self.scheduler)
    }

    /// Kills the scheduler.
    ///
    /// # Errors
    /// When it doesn't run.
    pub fn kill_scheduler(&self) -> Result<()> {
        let mut child = lock(&self.scheduler).take().context("the scheduler does not run")?;
        child.kill().context("kill the scheduler")?;
        child.wait().context("wait for the scheduler").map(drop)
    }

    /// Process id of the scheduler.
    pub fn scheduler_pid(&self) -> Option<u32> {
        lock(&self.scheduler).as_ref().map(Child::id)
    }

    /// Starts a part with its output in the node's log folder.
    pub(crate) fn spawn(&self, command: &mut Command, name: &str) -> Result<Child> {
        spawn_logged(command, &self.directory, name)
    }

    /// What a part has logged so far.
    pub fn log(&self, name: &str) -> String {
        std::fs::read(self.directory.join("log").join(name))
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default()
    }

    /// `ctr` on this node.
    pub fn ctr(&self) -> Command {
        let program = self.programs.daemon_program("ctr").unwrap_or_else(|_| "ctr".into());
        let mut command = Command::new(program);
        command.arg("--address").arg(self.directory.join("containerd.sock"));
        command.args(["--namespace", &self.namespace]).stdin(Stdio::null());
        command
    }

    /// Runs `ctr` with `args`; its output if it succeeded.
    ///
    /// # Errors
    /// When it fails, with its message.
    pub fn ctr_ok(&self, args: &[&str]) -> Result<String> {
        let output = run::output(self.ctr().args(args))?;
        if !output.status.success() {
            bail!("ctr {}: {}", args.join(" "), said(&output));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// The command line tool against this node's scheduler.
    ///
    /// # Errors
    /// When it can't be started.
    pub fn tool(&self, args: &[&str]) -> Result<Output> {
        let mut command = Command::new(self.directory.join("bin/gpuslice"));
        command.arg("--config").arg(self.config()).args(args);
        run::output(&mut command)
    }

    /// Describes a container of this node, to be run.
    pub fn container(&self, id: &str) -> Container<'_> {
        Container::new(self, id)
    }

    /// The sandboxes that run: the processes with a uid of this node's range.
    pub fn sandboxes(&self) -> Vec<u32> {
        let range = self.uid_first..self.uid_first + UIDS;
        process::all()
            .into_iter()
            .filter(|pid| process::runs(*pid))
            .filter(|pid| process::identity(*pid).is_ok_and(|identity| range.contains(&identity.uid)))
            .collect()
    }

    /// The only sandbox that runs.
    ///
    /// # Errors
    /// When there is none, or more.
    pub fn sandbox(&self) -> Result<u32> {
        match self.sandboxes().as_slice() {
            [one] => Ok(*one),
            others => bail!("{} sandboxes run", others.len()),
        }
    }

    /// Processes of the node that belong to no container and are no shim.
    pub(crate) fn own_processes(&self) -> Vec<u32> {
        let mut own: Vec<u32> = Vec::new();
        own.extend(lock(&self.containerd).as_ref().map(Child::id));
        own.extend(lock(&self.scheduler).as_ref().map(Child::id));
        own.extend(self.gpus.as_ref().and_then(Gpus::pid));
        own
    }

    /// Checks that no container, shim, sandbox, mount, socket or control group is left.
    ///
    /// # Errors
    /// Names what is left.
    pub fn check_clean(&self) -> Result<()> {
        leftovers::check(self)
    }

    /// Checks that nothing is left, then ends the node.
    ///
    /// # Errors
    /// Names what is left, or what does not end.
    pub fn finish(mut self) -> Result<()> {
        self.check_clean()?;
        self.finished = true;
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        for part in [&self.containerd, &self.scheduler] {
            if lock(part).is_some() {
                stop(part)?;
            }
        }
        self.gpus = None;
        let directory = self.directory.to_string_lossy().into_owned();
        sweep::clear_marked(&self.directory, &[&directory, &self.namespace])
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        // The test failed: its reader needs the logs before they go.
        for name in ["containerd", "scheduler", "emulator"] {
            let text = self.log(name);
            let lines: Vec<&str> = text.lines().filter(|line| !line.contains("loading plugin")).collect();
            if !lines.is_empty() {
                eprintln!("---- last lines of {name}");
            }
            for line in lines.iter().skip(lines.len().saturating_sub(25)) {
                eprintln!("{line}");
            }
        }
        if let Err(error) = self.end() {
            eprintln!("harness: {error:#}");
        }
    }
}

fn lock(part: &Mutex<Option<Child>>) -> std::sync::MutexGuard<'_, Option<Child>> {
    part.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Starts `command` with its output in a log file of the node.
pub(crate) fn spawn_logged(command: &mut Command, directory: &Path, name: &str) -> Result<Child> {
    let path = directory.join("log").join(name);
    let log = File::options()
        .create(true)
        .append(true)
        .open(&path)
        .with_context(|| format!("open {}", path.display()))?;
    let twin = log.try_clone().context("share a log file")?;
    command.stdin(Stdio::null()).stdout(log).stderr(twin);
    command.spawn().with_context(|| format!("start {:?}", command.get_program()))
}

fn stop(part: &Mutex<Option<Child>>) -> Result<()> {
    let mut child = lock(part).take().context("the part does not run")?;
    process::signal(child.id(), nix::sys::signal::Signal::SIGTERM)?;
    let ended =
        until_true("a part ends on SIGTERM", SOON, || child.try_wait().is_ok_and(|status| status.is_some()));
    if ended.is_err() {
        child.kill().context("kill a part")?;
        child.wait().context("wait for a part")?;
    }
    ended
}

/// Both outputs of a program, for messages.
fn said(output: &Output) -> String {
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    text.trim().to_owned()
}
