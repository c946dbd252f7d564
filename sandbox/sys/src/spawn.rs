//! Starting the sandbox: an executable from a sealed memory file, exactly the files named, no environment.
//!
//! The child between clone and exec makes system calls on values prepared before; it allocates nothing.
//! The first step that fails is reported through a pipe, so the caller gets its error number.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read};
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::time::{Duration, Instant};

use crate::call::{check, check_long, error};
use crate::{process, wait};

/// What to start.
#[derive(Debug)]
pub struct Spawn {
    /// The executable, best from [`crate::memory::sealed_copy`].
    pub executable: OwnedFd,
    /// Its arguments, its own name first.
    pub argv: Vec<CString>,
    /// Its files 0, 1, 2, and so on. It gets no others.
    pub files: Vec<OwnedFd>,
    /// `cgroup.procs` (or v1 `tasks`) files of the cgroups that it enters, open for writing.
    pub cgroup_procs: Vec<OwnedFd>,
    /// Its `oom_score_adj`; a kernel that forbids it leaves the parent's.
    pub oom_score_adj: Option<i32>,
}

/// Longest wait for the exec.
const EXEC_DEADLINE: Duration = Duration::from_secs(10);
/// Lowest number for files on their way, above every number that the child ends up with.
const PARKED: RawFd = 64;

/// Everything that the child uses, made before it exists.
struct Plan {
    executable: RawFd,
    argv: Vec<*const libc::c_char>,
    environment: [*const libc::c_char; 1],
    files: Vec<RawFd>,
    cgroup_procs: Vec<RawFd>,
    report: RawFd,
}

/// Starts it in a session of its own and returns its pid and pidfd. The caller reaps it.
///
/// # Errors
/// The error of the first step that failed, in this process or in the child before its exec.
pub fn spawn(wanted: Spawn) -> io::Result<(u32, OwnedFd)> {
    if wanted.files.len() >= usize::try_from(PARKED).unwrap_or(0) {
        return Err(error(libc::EMFILE));
    }
    let parked = |file: &OwnedFd| park(file.as_raw_fd());
    let files = wanted.files.iter().map(parked).collect::<io::Result<Vec<OwnedFd>>>()?;
    let cgroups = wanted.cgroup_procs.iter().map(parked).collect::<io::Result<Vec<OwnedFd>>>()?;
    let executable = park(wanted.executable.as_raw_fd())?;
    let (report_in, report_out) = io::pipe()?;
    let report = park(report_out.as_raw_fd())?;
    drop(report_out);
    let mut argv: Vec<*const libc::c_char> = wanted.argv.iter().map(|text| text.as_ptr()).collect();
    argv.push(ptr::null());
    let plan = Plan {
        executable: executable.as_raw_fd(),
        argv,
        environment: [ptr::null()],
        files: files.iter().map(AsRawFd::as_raw_fd).collect(),
        cgroup_procs: cgroups.iter().map(AsRawFd::as_raw_fd).collect(),
        report: report.as_raw_fd(),
    };
    let (pid, pidfd) = clone(&plan)?;
    drop(report);
    let started = wait_for_exec(&File::from(OwnedFd::from(report_in)))
        .and_then(|()| set_oom_score(pid, wanted.oom_score_adj));
    if let Err(failed) = started {
        end(pid, &pidfd)?;
        return Err(failed);
    }
    Ok((pid, pidfd))
}

/// A copy with a high number, closed by exec.
fn park(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: fcntl with F_DUPFD_CLOEXEC takes its argument by value and touches no memory.
    let copy = check(unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, PARKED) })?;
    // SAFETY: from_raw_fd needs an open file that nobody else owns: fcntl has just made this one.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

/// fork(2) that returns a pidfd with the pid.
fn clone(plan: &Plan) -> io::Result<(u32, OwnedFd)> {
    let mut pidfd: RawFd = -1;
    let arguments = MaybeUninit::<libc::clone_args>::zeroed();
    // SAFETY: assume_init needs a valid value: zero is valid for each integer of clone_args.
    let mut arguments = unsafe { arguments.assume_init() };
    arguments.flags = u64::try_from(libc::CLONE_PIDFD).unwrap_or(0);
    arguments.pidfd = (&raw mut pidfd).expose_provenance() as u64;
    arguments.exit_signal = u64::try_from(libc::SIGCHLD).unwrap_or(0);
    // SAFETY: clone3 reads one clone_args and writes one file number to `pidfd`; both are locals. Without
    // CLONE_VM the child has its own copy of this memory; `run_child` makes async-signal-safe calls only.
    let result =
        unsafe { libc::syscall(libc::SYS_clone3, &raw mut arguments, size_of::<libc::clone_args>()) };
    let pid = check_long(result)?;
    if pid == 0 {
        run_child(plan);
    }
    // SAFETY: from_raw_fd needs an open file that nobody else owns: clone3 has just made this one.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    Ok((u32::try_from(pid).map_err(|_| error(libc::ESRCH))?, pidfd))
}

fn run_child(plan: &Plan) -> ! {
    let errno = match prepare_and_exec(plan) {
        Ok(()) => 0,
        Err(errno) => errno,
    };
    let bytes = errno.to_ne_bytes();
    // SAFETY: write reads 4 bytes: the length of `bytes`. Its result changes nothing: the child ends.
    unsafe { libc::write(plan.report, bytes.as_ptr().cast(), bytes.len()) };
    // SAFETY: _exit has no conditions.
    unsafe { libc::_exit(127) }
}

fn step(result: libc::c_long) -> Result<(), i32> {
    if result < 0 { Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL)) } else { Ok(()) }
}

fn prepare_and_exec(plan: &Plan) -> Result<(), i32> {
    // SAFETY: setsid has no conditions.
    step(unsafe { libc::setsid() }.into())?;
    for procs in &plan.cgroup_procs {
        // SAFETY: write reads 1 byte: the length of the text. "0" means the writing process.
        step(unsafe { libc::write(*procs, c"0".as_ptr().cast(), 1) } as libc::c_long)?;
    }
    // SAFETY: chdir needs a string that ends in NUL.
    step(unsafe { libc::chdir(c"/".as_ptr()) }.into())?;
    // SAFETY: umask has no conditions.
    unsafe { libc::umask(0o077) };
    let no_signals = 0u64;
    // SAFETY: rt_sigprocmask reads 8 bytes of a mask: the size of `no_signals`.
    step(unsafe {
        libc::syscall(
            libc::SYS_rt_sigprocmask,
            libc::SIG_SETMASK,
            &raw const no_signals,
            ptr::null_mut::<u64>(),
            size_of::<u64>(),
        )
    })?;
    let mut number = 0;
    for file in &plan.files {
        // SAFETY: dup2 takes numbers only. Sources lie at PARKED or above, targets below it: none is lost.
        step(unsafe { libc::dup2(*file, number) }.into())?;
        number += 1;
    }
    let first = libc::c_uint::try_from(number).unwrap_or(0);
    // SAFETY: close_range takes numbers only; with CLOEXEC it closes nothing before the exec.
    step(unsafe {
        libc::syscall(libc::SYS_close_range, first, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC)
    })?;
    // SAFETY: execveat needs strings and null-terminated lists: all were made before the clone and live on.
    step(unsafe {
        libc::syscall(
            libc::SYS_execveat,
            plan.executable,
            c"".as_ptr(),
            plan.argv.as_ptr(),
            plan.environment.as_ptr(),
            libc::AT_EMPTY_PATH,
        )
    })
}

/// Waits until the report pipe closes (exec done) or brings an error number.
fn wait_for_exec(mut report: &File) -> io::Result<()> {
    if !wait::readable(report.as_fd(), Some(Instant::now() + EXEC_DEADLINE))? {
        return Err(io::Error::from(io::ErrorKind::TimedOut));
    }
    let mut bytes = Vec::new();
    report.read_to_end(&mut bytes)?;
    match <[u8; 4]>::try_from(bytes.as_slice()) {
        Ok(errno) => Err(error(i32::from_ne_bytes(errno))),
        Err(_) => Ok(()),
    }
}

fn set_oom_score(pid: u32, value: Option<i32>) -> io::Result<()> {
    let Some(value) = value else { return Ok(()) };
    match std::fs::write(format!("/proc/{pid}/oom_score_adj"), value.to_string()) {
        // Lowering it needs CAP_SYS_RESOURCE, which not every node's root has.
        Err(failed) if failed.kind() == io::ErrorKind::PermissionDenied => Ok(()),
        result => result,
    }
}

/// Kills and reaps a child that did not get as far as its program.
fn end(pid: u32, pidfd: &OwnedFd) -> io::Result<()> {
    let pid = libc::pid_t::try_from(pid).map_err(|_| error(libc::ESRCH))?;
    let killed = process::pidfd_kill(pidfd.as_fd(), libc::SIGKILL);
    // SAFETY: waitpid takes null for a status that is not wanted.
    unsafe { libc::waitpid(pid, ptr::null_mut(), 0) };
    match killed {
        Err(failed) if failed.raw_os_error() != Some(libc::ESRCH) => Err(failed),
        _ => Ok(()),
    }
}
