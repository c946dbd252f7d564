//! The sandbox process of a GPU container: its start, its identity, its link to this shim.
//!
//! Owns: the process from spawn to its end, the control socket, the pipe of its log. Trusts the sandbox no more
//! than its tenant: it gets exactly the files named here, and what it says is checked. Promises: it runs from a
//! sealed copy, in its leaf, with nothing of this process's environment; [`check_confined`] passes only one that
//! gave everything up but CAP_SYS_PTRACE. Failure: it is killed; every wait has a deadline.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use gpuslice_proto::{
    FrameError, MAX_FRAME, Receiver, SandboxSettings, SandboxToShim, Sender, ShimToSandbox,
};
use gpuslice_sys::{Socket, Spawn, memory, process, spawn, wait};
use nix::sys::socket::{Shutdown, shutdown};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};

use super::leaf::Leaf;

const USUAL_PLACE: &str = "/usr/local/bin/gpuslice-sandbox";
const NAME: &str = "gpuslice-sandbox";
const SIGKILL: i32 = 9;
/// Time that a sandbox gets to end by itself once its control socket is closed.
const GRACE: Duration = Duration::from_millis(100);
/// Time that a killed process gets to be gone: more only if the driver holds it.
const DEATH: Duration = Duration::from_secs(5);

/// Why there is no sandbox, or none any more.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SandboxError {
    #[error("can't read the sandbox's program {}: install it there or set `sandbox` in the configuration", path.display())]
    Program { path: PathBuf, source: io::Error },
    #[error("can't start the sandbox: {step}")]
    Start { step: &'static str, source: io::Error },
    #[error("the sandbox gave no sign within {seconds} s: {step}{log}")]
    Silent { step: &'static str, seconds: f32, log: String },
    #[error("the sandbox ended: {step}{log}")]
    Ended { step: &'static str, log: String },
    #[error("the sandbox's link: {step}")]
    Link { step: &'static str, source: io::Error },
    #[error("the sandbox sent what is no message: {step}")]
    Frame { step: &'static str, source: FrameError },
    #[error("the sandbox sent another message than expected: {step}")]
    Unexpected { step: &'static str },
    #[error("the sandbox is not confined as it must be: {field} is {found:?}, expected {expected}")]
    Confinement { field: String, found: String, expected: String },
}

/// What a sandbox is started with.
pub(crate) struct Wanted<'a> {
    pub(crate) program: &'a Path,
    pub(crate) uid: u32,
    pub(crate) container: &'a str,
    pub(crate) leaf: &'a Leaf,
    pub(crate) extra: &'a [std::sync::Arc<File>],
    pub(crate) oom_score_adj: i32,
}

/// A running sandbox.
#[derive(Debug)]
pub(crate) struct Sandbox {
    container: String,
    pub(crate) pid: u32,
    pub(crate) pidfd: OwnedFd,
    pub(crate) link: Link,
    pub(crate) log: File,
}

/// The control socket.
#[derive(Debug)]
pub(crate) struct Link {
    socket: Socket,
    sender: Sender<ShimToSandbox>,
    receiver: Receiver<SandboxToShim>,
}

/// The program's path: the node's, the configuration's, beside the shim, or the usual place.
pub(crate) fn program_path(node: Option<&Path>, configured: Option<&Path>) -> PathBuf {
    let beside = || {
        let path = std::env::current_exe().ok()?.with_file_name(NAME);
        path.exists().then_some(path)
    };
    node.or(configured).map(Path::to_owned).or_else(beside).unwrap_or_else(|| USUAL_PLACE.into())
}

/// The sealed copy of the program, made once per shim and file.
fn executable(path: &Path) -> io::Result<OwnedFd> {
    type Identity = (PathBuf, u64, u64, u64, i64, i64);
    static SEALED: Mutex<Option<(Identity, OwnedFd)>> = Mutex::new(None);
    let data = std::fs::metadata(path)?;
    let identity = (path.to_owned(), data.dev(), data.ino(), data.size(), data.mtime(), data.mtime_nsec());
    let mut sealed = SEALED.lock().unwrap_or_else(PoisonError::into_inner);
    match sealed.as_ref() {
        Some((known, copy)) if *known == identity => copy.try_clone(),
        _ => {
            let copy = memory::sealed_copy(path)?;
            let handed = copy.try_clone()?;
            *sealed = Some((identity, copy));
            Ok(handed)
        }
    }
}

impl Sandbox {
    /// Starts the program in its leaf. It waits for [`Sandbox::begin`].
    ///
    /// # Errors
    /// [`SandboxError::Program`] or [`SandboxError::Start`].
    pub(crate) fn start(wanted: &Wanted<'_>) -> Result<Sandbox, SandboxError> {
        let failed = |step| move |source| SandboxError::Start { step, source };
        let program = |source| SandboxError::Program { path: wanted.program.to_owned(), source };
        let executable = executable(wanted.program).map_err(program)?;
        let (ours, theirs) = Socket::pair().map_err(failed("socket pair"))?;
        let (log, log_in) = io::pipe().map_err(failed("log pipe"))?;
        let null =
            OpenOptions::new().read(true).write(true).open("/dev/null").map_err(failed("/dev/null"))?;
        let mut files = vec![
            null.into(),
            OwnedFd::from(log_in.try_clone().map_err(failed("log pipe"))?),
            OwnedFd::from(log_in),
            theirs.into_fd(),
        ];
        for file in wanted.extra {
            files.push(file.try_clone().map_err(failed("extra files"))?.into());
        }
        let argv = [NAME, &wanted.uid.to_string(), wanted.container]
            .into_iter()
            .map(CString::new)
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| SandboxError::Start { step: "arguments", source: error.into() })?;
        let cgroup_procs = wanted
            .leaf
            .entrances()
            .map_err(|error| SandboxError::Start { step: "cgroup leaf", source: io::Error::other(error) })?;
        let log = File::from(OwnedFd::from(log));
        set_nonblocking(&log).map_err(failed("log pipe"))?;
        let (pid, pidfd) =
            spawn(Spawn { executable, argv, files, cgroup_procs, oom_score_adj: Some(wanted.oom_score_adj) })
                .map_err(failed("spawn"))?;
        let link = Link { socket: ours, sender: Sender::default(), receiver: Receiver::default() };
        Ok(Sandbox { container: wanted.container.to_owned(), pid, pidfd, link, log })
    }

    /// Sends the settings with the device files, in the order that the protocol fixes.
    ///
    /// # Errors
    /// [`SandboxError`].
    pub(crate) fn begin(
        &mut self,
        settings: SandboxSettings,
        files: &[BorrowedFd<'_>],
        patience: Duration,
    ) -> Result<(), SandboxError> {
        const STEP: &str = "the settings";
        match self.link.send(&ShimToSandbox::Start(settings), files, patience, STEP) {
            Err(SandboxError::Link { source, .. }) if source.kind() == ErrorKind::BrokenPipe => {
                Err(SandboxError::Ended { step: STEP, log: self.last_words() })
            }
            sent => sent,
        }
    }

    /// Waits for `wanted`, and for nothing else.
    ///
    /// # Errors
    /// [`SandboxError`], with the last lines of the sandbox's log if it ended.
    pub(crate) fn expect(
        &mut self,
        wanted: &SandboxToShim,
        patience: Duration,
        step: &'static str,
    ) -> Result<(), SandboxError> {
        match self.link.receive(Instant::now() + patience, step) {
            Ok(Some((message, _))) if message == *wanted => Ok(()),
            Ok(Some(_)) => Err(SandboxError::Unexpected { step }),
            Ok(None) => Err(SandboxError::Ended { step, log: self.last_words() }),
            Err(SandboxError::Link { source, .. }) if source.kind() == ErrorKind::TimedOut => {
                Err(SandboxError::Silent { step, seconds: patience.as_secs_f32(), log: self.last_words() })
            }
            Err(error) => Err(error),
        }
    }

    /// What lies in the log pipe, as the end of an error text.
    fn last_words(&mut self) -> String {
        // An ending process writes its reason before it closes its link; the pipe closes with it.
        drop(wait::readable(self.log.as_fd(), Some(Instant::now() + GRACE)));
        let mut buffer = [0; 2048];
        let length = io::Read::read(&mut self.log, &mut buffer).unwrap_or(0);
        let text =
            String::from_utf8_lossy(buffer.get(..length).unwrap_or_default()).trim().replace('\n', "; ");
        if text.is_empty() { text } else { format!(": {text}") }
    }

    /// How it ended, as far as can be told: the shim's reaper may have taken its status already.
    pub(crate) fn how_it_ended(&self) -> String {
        let pidfd = self.pidfd.as_fd();
        // Its files close a moment before it can be waited for.
        if !exits_by(pidfd, GRACE) {
            return "it closed its link".to_owned();
        }
        match waitid(Id::PIDFd(pidfd), WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT) {
            Ok(WaitStatus::Exited(_, code)) => format!("exit status {code}"),
            Ok(WaitStatus::Signaled(_, signal, _)) => format!("killed by {signal}"),
            Ok(_) | Err(_) => "it ended".to_owned(),
        }
    }

    /// Its link, its end and its log, to wait for.
    pub(crate) fn files(&self) -> [BorrowedFd<'_>; 3] {
        [self.link.as_fd(), self.pidfd.as_fd(), self.log.as_fd()]
    }
}

/// Ends it: closes its control socket, kills it after a grace, waits until it is gone.
impl Drop for Sandbox {
    fn drop(&mut self) {
        shutdown(self.link.as_fd().as_raw_fd(), Shutdown::Both).unwrap_or(());
        let pidfd = self.pidfd.as_fd();
        if !exits_by(pidfd, GRACE) {
            drop(process::pidfd_kill(pidfd, SIGKILL));
        }
        if !exits_by(pidfd, DEATH) {
            crate::report::log(
                &self.container,
                &format!("sandbox {} does not end: driver call stuck", self.pid),
            );
        }
        collect(pidfd);
    }
}

fn exits_by(pidfd: BorrowedFd<'_>, patience: Duration) -> bool {
    wait::readable(pidfd, Some(Instant::now() + patience)).unwrap_or(true)
}

/// Takes the exit status, unless the shim's reaper was faster.
fn collect(pidfd: BorrowedFd<'_>) {
    if waitid(Id::PIDFd(pidfd), WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG).is_err() {
        // It was.
    }
}

fn set_nonblocking(file: &File) -> io::Result<()> {
    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    fcntl(file, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    Ok(())
}

impl Link {
    /// Sends one message.
    ///
    /// # Errors
    /// [`SandboxError::Link`] or [`SandboxError::Frame`].
    pub(crate) fn send(
        &mut self,
        message: &ShimToSandbox,
        files: &[BorrowedFd<'_>],
        patience: Duration,
        step: &'static str,
    ) -> Result<(), SandboxError> {
        let frame = self.sender.encode(message).map_err(|source| SandboxError::Frame { step, source })?;
        self.socket
            .send(&frame, files, Instant::now() + patience)
            .map_err(|source| SandboxError::Link { step, source })
    }

    /// Receives one message and its files; `None` when the sandbox closed the link.
    ///
    /// # Errors
    /// [`SandboxError::Link`] (`TimedOut` included) or [`SandboxError::Frame`].
    pub(crate) fn receive(
        &mut self,
        deadline: Instant,
        step: &'static str,
    ) -> Result<Option<(SandboxToShim, Vec<OwnedFd>)>, SandboxError> {
        let mut buffer = [0; MAX_FRAME];
        let (length, files) = self
            .socket
            .recv(&mut buffer, 1, deadline)
            .map_err(|source| SandboxError::Link { step, source })?;
        if length == 0 {
            return Ok(None);
        }
        let message = self
            .receiver
            .decode(buffer.get(..length).unwrap_or_default(), files.len())
            .map_err(|source| SandboxError::Frame { step, source })?;
        Ok(Some((message, files)))
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Checks in `/proc` that every thread of the sandbox gave up what it must.
///
/// # Errors
/// [`SandboxError::Confinement`] names the first field that is not as expected.
pub(crate) fn check_confined(pid: u32, uid: u32) -> Result<(), SandboxError> {
    let folder = PathBuf::from(format!("/proc/{pid}/task"));
    let failed = |source| SandboxError::Start { step: "read its threads' status", source };
    for thread in std::fs::read_dir(&folder).map_err(failed)? {
        let text = std::fs::read_to_string(thread.map_err(failed)?.path().join("status")).map_err(failed)?;
        check_status(&text, uid)?;
    }
    Ok(())
}

fn check_status(text: &str, uid: u32) -> Result<(), SandboxError> {
    const PTRACE: u64 = 1 << 19;
    let field = |name: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        value.map(|value| value.split_whitespace().collect::<Vec<_>>().join(" ")).unwrap_or_default()
    };
    let check = |name: &str, right: bool, expected: String| {
        let field_name = name.to_owned();
        if right {
            Ok(())
        } else {
            Err(SandboxError::Confinement { field: field_name, found: field(name), expected })
        }
    };
    let ids = [uid; 4].map(|uid| uid.to_string()).join(" ");
    for name in ["Uid", "Gid"] {
        check(name, field(name) == ids, ids.clone())?;
    }
    let groups = field("Groups");
    check("Groups", groups.is_empty() || groups == uid.to_string(), format!("none or {uid}"))?;
    let set = |name: &str| u64::from_str_radix(&field(name), 16).ok();
    for name in ["CapEff", "CapPrm"] {
        check(name, set(name) == Some(PTRACE), format!("{PTRACE:016x} (CAP_SYS_PTRACE)"))?;
    }
    for name in ["CapInh", "CapAmb"] {
        check(name, set(name) == Some(0), "empty".to_owned())?;
    }
    check(
        "CapBnd",
        set("CapBnd").is_some_and(|found| found & !PTRACE == 0),
        "at most CAP_SYS_PTRACE".to_owned(),
    )?;
    check("NoNewPrivs", field("NoNewPrivs") == "1", "1".to_owned())?;
    check("Seccomp", field("Seccomp") == "2", "2 (filter)".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFINED: &str = "Name:\tgpuslice-sandbo\nUid:\t1900000001\t1900000001\t1900000001\t1900000001\n\
        Gid:\t1900000001\t1900000001\t1900000001\t1900000001\nGroups:\t \nCapInh:\t0000000000000000\n\
        CapPrm:\t0000000000080000\nCapEff:\t0000000000080000\nCapBnd:\t0000000000000000\nCapAmb:\t0000000000000000\n\
        NoNewPrivs:\t1\nSeccomp:\t2\nSeccomp_filters:\t1\n";
    const UID: u32 = 1_900_000_001;

    #[test]
    fn a_confined_process_passes() {
        check_status(CONFINED, UID).unwrap();
        check_status(&CONFINED.replace("Groups:\t ", "Groups:\t1900000001 "), UID).unwrap();
    }

    #[test]
    fn each_right_kept_too_many_is_found() {
        for (from, to, field) in [
            ("Uid:\t1900000001", "Uid:\t0", "Uid"),
            ("Gid:\t1900000001\t1900000001\t1900000001\t1900000001", "Gid:\t0\t0\t0\t0", "Gid"),
            ("Groups:\t ", "Groups:\t0 1900000001", "Groups"),
            ("CapPrm:\t0000000000080000", "CapPrm:\t0000000000280000", "CapPrm"),
            ("CapEff:\t0000000000080000", "CapEff:\t0000000000000000", "CapEff"),
            ("CapInh:\t0000000000000000", "CapInh:\t0000000000080000", "CapInh"),
            ("CapBnd:\t0000000000000000", "CapBnd:\t000001ffffffffff", "CapBnd"),
            ("CapAmb:\t0000000000000000", "CapAmb:\t1", "CapAmb"),
            ("NoNewPrivs:\t1", "NoNewPrivs:\t0", "NoNewPrivs"),
            ("Seccomp:\t2", "Seccomp:\t0", "Seccomp"),
            ("CapBnd:", "Other:", "CapBnd"),
        ] {
            let text = CONFINED.replace(from, to);
            assert_ne!(text, CONFINED);
            let error = check_status(&text, UID).unwrap_err();
            assert!(
                matches!(&error, SandboxError::Confinement { field: found, .. } if found == field),
                "{field}: {error}"
            );
        }
    }

    #[test]
    fn this_process_is_not_confined() {
        assert!(check_confined(std::process::id(), UID).is_err());
    }
}
