//! The runtime's command line: runc 1.1 or later, or crun.
//!
//! Owns: how each command is called, and the reading of its errors from the JSON log. Trusts: the runtime's
//! executable. Each call has a log file of its own, so that a call's error is never another call's. A call that
//! outlasts its deadline is killed with its process group. The runtime gets PATH and no other variable.

use std::ffi::{CString, OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nix::sys::signal::{Signal, killpg};

use crate::bundle::Record;
use crate::reaper::Reaper;
use crate::spawn::Program;

/// Hooks run inside create, start and delete; a runtime that takes longer than this hangs.
const DEADLINE: Duration = Duration::from_secs(120);
/// Most bytes of a log or an answer that are looked at.
const MAX_OUTPUT: u64 = 1 << 20;

/// Why a runtime command failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RuncError {
    #[error("runtime \"{name}\" is not in PATH ({path})")]
    Missing { name: String, path: String },
    #[error("can't run {}", binary.display())]
    Spawn {
        binary: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{what} failed: {message}")]
    Failed { what: &'static str, message: String },
    #[error("{what} failed: no answer within {} s; the runtime was killed", DEADLINE.as_secs())]
    Deadline { what: &'static str },
    #[error("can't handle a file of the runtime")]
    File(#[source] io::Error),
    #[error("unexpected answer of the runtime to {what}: {text}")]
    Answer { what: &'static str, text: String },
}

impl RuncError {
    /// What the runtime itself said.
    pub(crate) fn message(&self) -> &str {
        match self {
            RuncError::Failed { message, .. } => message,
            RuncError::Missing { .. }
            | RuncError::Spawn { .. }
            | RuncError::Deadline { .. }
            | RuncError::File(_)
            | RuncError::Answer { .. } => "",
        }
    }

    /// The runtime says that the process is gone.
    pub(crate) fn is_finished(&self) -> bool {
        let message = self.message();
        ["process already finished", "container not running", "no such process", "already stopped"]
            .iter()
            .any(|text| message.contains(text))
    }

    /// The runtime says that it doesn't have the container.
    pub(crate) fn is_absent(&self) -> bool {
        self.message().contains("does not exist")
    }
}

/// Standard input, output and error of a runtime command, and so of a container's process.
#[derive(Clone, Copy)]
pub(crate) struct Stdio<'a>(pub(crate) [BorrowedFd<'a>; 3]);

/// One container's runtime.
pub(crate) struct Runc {
    binary: PathBuf,
    root: PathBuf,
    systemd_cgroup: bool,
    /// Directory of the logs: the bundle.
    directory: PathBuf,
    environment: Vec<CString>,
    null: File,
    calls: AtomicU64,
    reaper: Reaper,
}

/// The absolute path of a program.
pub(crate) fn find(name: &str) -> Result<PathBuf, RuncError> {
    let path = std::env::var_os("PATH").unwrap_or_else(default_path);
    if name.contains('/') {
        return Ok(name.into());
    }
    std::env::split_paths(&path)
        .filter(|directory| directory.is_absolute())
        .map(|directory| directory.join(name))
        .find(|file| {
            fs::metadata(file).is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
        })
        .ok_or_else(|| RuncError::Missing {
            name: name.to_owned(),
            path: path.to_string_lossy().into_owned(),
        })
}

fn default_path() -> OsString {
    "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".into()
}

/// What the runtime and loggers see of the environment.
pub(crate) fn environment() -> Vec<CString> {
    let mut variable = OsString::from("PATH=");
    variable.push(std::env::var_os("PATH").unwrap_or_else(default_path));
    CString::new(variable.into_encoded_bytes()).into_iter().collect()
}

fn word(text: &OsStr) -> Result<CString, RuncError> {
    CString::new(text.as_bytes()).map_err(|e| RuncError::File(io::Error::new(io::ErrorKind::InvalidInput, e)))
}

impl Runc {
    /// A runtime as recorded in a bundle.
    pub(crate) fn new(record: &Record, bundle: &Path, reaper: Reaper) -> Result<Runc, RuncError> {
        Ok(Runc {
            binary: record.binary.clone(),
            root: record.root.clone(),
            systemd_cgroup: record.systemd_cgroup,
            directory: bundle.to_owned(),
            environment: environment(),
            null: fs::OpenOptions::new().read(true).write(true).open("/dev/null").map_err(RuncError::File)?,
            calls: AtomicU64::new(0),
            reaper,
        })
    }

    /// `create`: the container with its init, stopped before the user's program.
    pub(crate) async fn create(
        &self,
        id: &str,
        pid_file: &Path,
        console: Option<&Path>,
        flags: &[&str],
        stdio: Option<Stdio<'_>>,
    ) -> Result<(), RuncError> {
        let mut arguments: Vec<&OsStr> =
            vec!["create".as_ref(), "--bundle".as_ref(), self.directory.as_os_str()];
        arguments.extend([OsStr::new("--pid-file"), pid_file.as_os_str()]);
        if let Some(socket) = console {
            arguments.extend([OsStr::new("--console-socket"), socket.as_os_str()]);
        }
        arguments.extend(flags.iter().map(OsStr::new));
        arguments.push(id.as_ref());
        self.call("OCI runtime create", &arguments, stdio).await
    }

    /// `start`: lets init run the user's program.
    pub(crate) async fn start(&self, id: &str) -> Result<(), RuncError> {
        self.call("OCI runtime start", &["start".as_ref(), id.as_ref()], None).await
    }

    /// `exec`: one more process.
    pub(crate) async fn exec(
        &self,
        id: &str,
        process: &Path,
        pid_file: &Path,
        console: Option<&Path>,
        stdio: Option<Stdio<'_>>,
    ) -> Result<(), RuncError> {
        let mut arguments: Vec<&OsStr> = vec!["exec".as_ref(), "--process".as_ref(), process.as_os_str()];
        arguments.extend([OsStr::new("--pid-file"), pid_file.as_os_str(), OsStr::new("--detach")]);
        if let Some(socket) = console {
            arguments.extend([OsStr::new("--console-socket"), socket.as_os_str()]);
        }
        arguments.push(id.as_ref());
        self.call("OCI runtime exec", &arguments, stdio).await
    }

    /// `kill`: a signal to init, or to all of the container.
    pub(crate) async fn kill(&self, id: &str, signal: u32, all: bool) -> Result<(), RuncError> {
        let signal = signal.to_string();
        let mut arguments: Vec<&OsStr> = vec!["kill".as_ref()];
        if all {
            arguments.push("--all".as_ref());
        }
        arguments.extend([OsStr::new(id), OsStr::new(&signal)]);
        self.call("OCI runtime kill", &arguments, None).await
    }

    /// `pause`: freezes the container.
    pub(crate) async fn pause(&self, id: &str) -> Result<(), RuncError> {
        self.call("OCI runtime pause", &["pause".as_ref(), id.as_ref()], None).await
    }

    /// `resume`: lets a frozen container go on.
    pub(crate) async fn resume(&self, id: &str) -> Result<(), RuncError> {
        self.call("OCI runtime resume", &["resume".as_ref(), id.as_ref()], None).await
    }

    /// `update`: new limits, as the JSON of OCI's LinuxResources.
    pub(crate) async fn update(&self, id: &str, resources: &[u8]) -> Result<(), RuncError> {
        let mut file = self.scratch()?;
        io::Write::write_all(&mut file, resources).map_err(RuncError::File)?;
        file.seek(SeekFrom::Start(0)).map_err(RuncError::File)?;
        let stdio = Stdio([file.as_fd(), self.null.as_fd(), self.null.as_fd()]);
        let arguments = ["update".as_ref(), "--resources".as_ref(), "-".as_ref(), id.as_ref()];
        self.call("OCI runtime update", &arguments, Some(stdio)).await
    }

    /// `delete`: takes the container's state and cgroups away; by force kills it first.
    pub(crate) async fn delete(&self, id: &str, force: bool) -> Result<(), RuncError> {
        let mut arguments: Vec<&OsStr> = vec!["delete".as_ref()];
        if force {
            arguments.push("--force".as_ref());
        }
        arguments.push(id.as_ref());
        self.call("OCI runtime delete", &arguments, None).await
    }

    /// `ps`: the pids of the container.
    pub(crate) async fn processes(&self, id: &str) -> Result<Vec<u32>, RuncError> {
        let arguments = ["ps".as_ref(), "--format".as_ref(), "json".as_ref(), id.as_ref()];
        let text = self.ask("OCI runtime ps", &arguments).await?;
        // runc prints null for a container without processes.
        let pids: Result<Option<Vec<u32>>, _> = serde_json::from_slice(&text);
        pids.map(Option::unwrap_or_default).map_err(|_| RuncError::Answer {
            what: "ps",
            text: String::from_utf8_lossy(&text).chars().take(200).collect(),
        })
    }

    /// `features`: what the runtime can do, as its own JSON.
    pub(crate) async fn features(&self) -> Result<Vec<u8>, RuncError> {
        self.ask("OCI runtime features", &["features".as_ref()]).await
    }

    /// A file without a name.
    fn scratch(&self) -> Result<File, RuncError> {
        use nix::sys::memfd::{MFdFlags, memfd_create};
        let file = memfd_create(c"gpuslice-runtime", MFdFlags::MFD_CLOEXEC);
        file.map(File::from).map_err(|e| RuncError::File(e.into()))
    }

    async fn ask(&self, what: &'static str, arguments: &[&OsStr]) -> Result<Vec<u8>, RuncError> {
        let answer = self.scratch()?;
        let stdio = Stdio([self.null.as_fd(), answer.as_fd(), self.null.as_fd()]);
        self.call(what, arguments, Some(stdio)).await?;
        let mut text = Vec::new();
        let mut answer = answer;
        answer.seek(SeekFrom::Start(0)).map_err(RuncError::File)?;
        answer.take(MAX_OUTPUT).read_to_end(&mut text).map_err(RuncError::File)?;
        Ok(text)
    }

    async fn call(
        &self,
        what: &'static str,
        arguments: &[&OsStr],
        stdio: Option<Stdio<'_>>,
    ) -> Result<(), RuncError> {
        let number = self.calls.fetch_add(1, Ordering::Relaxed);
        let log = self.directory.join(format!("runtime-{}-{number}.log", std::process::id()));
        let mut words =
            vec![word(self.binary.as_os_str())?, word("--root".as_ref())?, word(self.root.as_os_str())?];
        words.extend([word("--log".as_ref())?, word(log.as_os_str())?]);
        words.extend([word("--log-format".as_ref())?, word("json".as_ref())?]);
        if self.systemd_cgroup {
            words.push(word("--systemd-cgroup".as_ref())?);
        }
        for argument in arguments {
            words.push(word(argument)?);
        }
        let files = match stdio {
            Some(Stdio(files)) => files.to_vec(),
            None => vec![self.null.as_fd(), self.null.as_fd(), self.null.as_fd()],
        };
        let program = Program {
            path: word(self.binary.as_os_str())?,
            arguments: words,
            environment: &self.environment,
            files,
        };
        let spawn_error = |source| RuncError::Spawn { binary: self.binary.clone(), source };
        let mut child = self.reaper.spawn(&program).map_err(spawn_error)?;
        drop(program);
        let exit = match tokio::time::timeout(DEADLINE, &mut child.exit).await {
            Ok(exit) => exit,
            Err(_) => {
                killpg(child.pid, Signal::SIGKILL).ok();
                drop(child.exit.await);
                drop(fs::remove_file(&log));
                return Err(RuncError::Deadline { what });
            }
        };
        let message = match exit {
            Ok(exit) if exit.status == 0 => None,
            Ok(exit) => Some(last_error(&log).unwrap_or_else(|| format!("exit status {}", exit.status))),
            Err(_) => Some("its exit was lost".to_owned()),
        };
        drop(fs::remove_file(&log));
        message.map_or(Ok(()), |message| Err(RuncError::Failed { what, message }))
    }
}

/// The last line of level error in a runtime's JSON log.
fn last_error(log: &Path) -> Option<String> {
    let mut text = Vec::new();
    File::open(log).ok()?.take(MAX_OUTPUT).read_to_end(&mut text).ok()?;
    let text = String::from_utf8_lossy(&text);
    text.lines().rev().find_map(|line| {
        let entry: serde_json::Value = serde_json::from_str(line).ok()?;
        let level = entry.get("level")?.as_str()?;
        // logrus calls what ends a program fatal, libocispec and crun call it error.
        matches!(level, "error" | "fatal").then(|| entry.get("msg")?.as_str().map(str::to_owned))?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_error_of_a_log_is_what_the_runtime_meant() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        fs::write(
            &log,
            "{\"level\":\"warning\",\"msg\":\"w\"}\n{\"level\":\"error\",\"msg\":\"first\"}\nnoise\n\
             {\"level\":\"error\",\"msg\":\"container does not exist\"}\n{\"level\":\"info\",\"msg\":\"i\"}\n",
        )
        .unwrap();
        assert_eq!(last_error(&log).as_deref(), Some("container does not exist"));
        let error = RuncError::Failed { what: "x", message: last_error(&log).unwrap() };
        assert!(error.is_absent() && !error.is_finished());
    }

    #[test]
    fn a_program_is_found_by_path_or_named_as_missing() {
        assert!(find("sh").unwrap().is_absolute());
        assert_eq!(find("/x/y").unwrap(), Path::new("/x/y"));
        assert!(matches!(find("no-such-runtime"), Err(RuncError::Missing { .. })));
    }
}
