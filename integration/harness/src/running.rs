//! A container that was started, and how it ended.

use std::path::PathBuf;
use std::process::{Child, Command, Output};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::node::Node;
use crate::process;
use crate::run;
use crate::wait::{SOON, until, until_true};

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

/// A container that was started.
#[derive(Debug)]
pub struct Running<'n> {
    pub(crate) node: &'n Node,
    pub(crate) id: String,
    pub(crate) ctr: Child,
    pub(crate) out: PathBuf,
    pub(crate) err: PathBuf,
    pub(crate) detached: bool,
    pub(crate) kept: bool,
}

impl Running<'_> {
    pub(crate) fn wait_until_running(&mut self) -> Result<()> {
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
        self.exec_with(&[], args)
    }

    /// `ctr tasks exec` with flags of its own, not yet started.
    pub fn exec_with(&self, flags: &[&str], args: &[&str]) -> Command {
        use std::sync::atomic::{AtomicU32, Ordering};
        static EXECS: AtomicU32 = AtomicU32::new(1);
        let exec = format!("x{}", EXECS.fetch_add(1, Ordering::Relaxed));
        let mut command = self.node.ctr();
        command.args(["tasks", "exec", "--exec-id", &exec]).args(flags).arg(&self.id).args(args);
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
