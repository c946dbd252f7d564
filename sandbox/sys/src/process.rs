//! Processes and threads by handle.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use crate::bpf::Instruction;
use crate::call::{check_long, error, new_file};
use crate::{ptrace, wait};

/// `PIDFD_THREAD`, kernel 6.9: the same value as O_EXCL.
const PIDFD_THREAD: libc::c_int = libc::O_EXCL;
/// `KCMP_FILE`.
const KCMP_FILE: libc::c_int = 0;
/// `KCMP_FILES`.
const KCMP_FILES: libc::c_int = 2;

/// A pidfd of a process, or of the thread itself (`PIDFD_THREAD`).
///
/// # Errors
/// ESRCH when it is gone; EINVAL when the kernel has no `PIDFD_THREAD` (before 6.9), or when `id` is a
/// thread but not a process and `thread` is false.
pub fn pidfd_open(id: u32, thread: bool) -> io::Result<OwnedFd> {
    let id = libc::pid_t::try_from(id).map_err(|_| error(libc::ESRCH))?;
    let flags = if thread { PIDFD_THREAD } else { 0 };
    // SAFETY: pidfd_open takes its arguments by value.
    new_file(unsafe { libc::syscall(libc::SYS_pidfd_open, id, flags) })
}

/// A copy of file `number` of the process or thread, close-on-exec.
///
/// # Errors
/// ESRCH when it has ended, EBADF when there is no such file, EPERM without the right to trace it.
pub fn pidfd_getfd(pidfd: BorrowedFd<'_>, number: i32) -> io::Result<OwnedFd> {
    // SAFETY: pidfd_getfd takes its arguments by value.
    new_file(unsafe { libc::syscall(libc::SYS_pidfd_getfd, pidfd.as_raw_fd(), number, 0) })
}

/// Sends `signal`.
///
/// # Errors
/// ESRCH when it has ended.
pub fn pidfd_kill(pidfd: BorrowedFd<'_>, signal: i32) -> io::Result<()> {
    let no_information = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: pidfd_send_signal takes a null or valid siginfo: null is passed.
    let result =
        unsafe { libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_raw_fd(), signal, no_information, 0) };
    check_long(result).map(|_| ())
}

/// The process has ended (it may not have been waited for yet).
pub fn pidfd_exited(pidfd: BorrowedFd<'_>) -> bool {
    wait::readable(pidfd, Some(std::time::Instant::now())).unwrap_or(true)
}

/// Both threads use one file table.
///
/// # Errors
/// ESRCH when one is gone, EPERM without the right to trace both.
pub fn same_file_table(a_tid: u32, b_tid: u32) -> io::Result<bool> {
    // SAFETY: kcmp with KCMP_FILES takes its arguments by value.
    let result = unsafe { libc::syscall(libc::SYS_kcmp, a_tid, b_tid, KCMP_FILES, 0, 0) };
    Ok(check_long(result)? == 0)
}

/// Both file numbers of this process stand for one open file.
///
/// # Errors
/// ENOSYS on a kernel without kcmp.
pub fn same_open_file(a: BorrowedFd<'_>, b: BorrowedFd<'_>) -> io::Result<bool> {
    // SAFETY: gettid takes no arguments.
    let own = unsafe { libc::syscall(libc::SYS_gettid) };
    // SAFETY: kcmp with KCMP_FILE takes its arguments by value.
    let result = unsafe { libc::syscall(libc::SYS_kcmp, own, own, KCMP_FILE, a.as_raw_fd(), b.as_raw_fd()) };
    Ok(check_long(result)? == 0)
}

/// The seccomp programs that thread `tid` runs under, newest first. The thread is stopped meanwhile and
/// goes on undisturbed afterwards.
///
/// # Errors
/// ESRCH when it is gone, EPERM without CAP_SYS_ADMIN, `TimedOut` when it didn't stop within 2 s.
pub fn program_of(tid: u32) -> io::Result<Vec<Vec<Instruction>>> {
    // The tracer is a thread of its own: its end detaches the tracee whatever happened.
    ptrace::on_own_thread(move || {
        let tracee = ptrace::Tracee::seize(tid, 0)?;
        tracee.interrupt()?;
        tracee.wait_stopped(std::time::Instant::now() + std::time::Duration::from_secs(2))?;
        let mut programs = Vec::new();
        while let Some(program) = tracee.seccomp_program(programs.len())? {
            programs.push(program);
        }
        // The kernel's numbers begin with the oldest, whatever ptrace(2) says (tried on 6.18).
        programs.reverse();
        tracee.detach(tracee.signal_on_its_way()?)?;
        Ok(programs)
    })
}

extern "C" fn nothing(_signal: libc::c_int) {}

/// Makes `signal` interrupt this process's calls, which are then made again, and do nothing else.
///
/// # Errors
/// EINVAL for a signal that can't be caught.
pub fn catch(signal: i32) -> io::Result<()> {
    let action = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: assume_init needs a valid value: an empty mask, no flags and no restorer are valid.
    let mut action = unsafe { action.assume_init() };
    action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as usize;
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: sigaction reads one sigaction and takes null for the old one that is not wanted; the handler
    // does nothing, so it is safe at any moment.
    let result = unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) };
    crate::call::check(result).map(|_| ())
}
