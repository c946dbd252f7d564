//! ptrace(2), as much as this crate needs of it.
//!
//! A tracee belongs to the thread that seized it; that thread's end lets it go. Stops are found by asking the
//! tracee itself, not by waitpid alone: another thread of this process may reap with waitpid(-1) and take
//! the status away.

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::ptr;
use std::time::{Duration, Instant};

use libc::{c_int, c_uint, pid_t, user_regs_struct};

use crate::bpf::Instruction;
use crate::call::{check_long, error};

/// A traced thread. Not detached on drop: the tracing thread's end does that.
#[derive(Debug)]
pub(crate) struct Tracee {
    tid: pid_t,
}

/// Where a stopped thread is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// Neither entering nor leaving a system call as far as the stop tells.
    Other,
    /// About to enter a system call.
    Entry,
    /// A system call has returned this.
    Exit(i64),
}

/// `PTRACE_SECCOMP_GET_FILTER`.
const SECCOMP_GET_FILTER: c_uint = 0x420c;
const STACK: usize = 128 * 1024;

/// Runs `work` on a thread that ends afterwards, and with it every trace that it began.
pub(crate) fn on_own_thread<T: Send + 'static, E: Send + 'static + From<io::Error>>(
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, E> {
    let thread = std::thread::Builder::new().name("tracer".into()).stack_size(STACK).spawn(work)?;
    thread.join().unwrap_or_else(|_| Err(E::from(io::Error::other("tracing thread panicked"))))
}

impl Tracee {
    /// Seizes thread `tid` without stopping it.
    pub(crate) fn seize(tid: u32, options: c_int) -> io::Result<Tracee> {
        let tid = pid_t::try_from(tid).map_err(|_| error(libc::ESRCH))?;
        let options = usize::try_from(options).map_err(|_| error(libc::EINVAL))?;
        let tracee = Tracee { tid };
        tracee.plain(libc::PTRACE_SEIZE, options)?;
        Ok(tracee)
    }

    pub(crate) fn tid(&self) -> u32 {
        self.tid.unsigned_abs()
    }

    /// A request whose `addr` is unused and whose `data` is a number.
    fn plain(&self, request: c_uint, data: usize) -> io::Result<()> {
        // SAFETY: these requests take numbers only and touch no memory of this process.
        let result = unsafe {
            libc::ptrace(request, self.tid, ptr::null_mut::<u8>(), ptr::without_provenance_mut::<u8>(data))
        };
        check_long(result).map(|_| ())
    }

    pub(crate) fn interrupt(&self) -> io::Result<()> {
        self.plain(libc::PTRACE_INTERRUPT, 0)
    }

    /// Lets the stopped thread go on, with `signal` delivered to it (0: none).
    pub(crate) fn detach(&self, signal: c_int) -> io::Result<()> {
        self.plain(libc::PTRACE_DETACH, usize::try_from(signal).unwrap_or(0))
    }

    /// The signal that the thread stopped to take; 0 when it stopped for another reason.
    pub(crate) fn signal_on_its_way(&self) -> io::Result<c_int> {
        let mut found = MaybeUninit::<libc::siginfo_t>::zeroed();
        // SAFETY: GETSIGINFO writes one siginfo_t to `data`: `found` has room for one.
        let result = unsafe {
            libc::ptrace(
                libc::PTRACE_GETSIGINFO,
                self.tid,
                ptr::null_mut::<u8>(),
                found.as_mut_ptr().cast::<u8>(),
            )
        };
        check_long(result)?;
        // SAFETY: assume_init needs a valid value: it was zeroed, and the kernel wrote integers over it.
        let found = unsafe { found.assume_init() };
        // A stop of ptrace's own: SIGTRAP, with SIGTRAP in the low bits of the code.
        let own = found.si_signo == libc::SIGTRAP && found.si_code & 0x7f == libc::SIGTRAP;
        Ok(if own { 0 } else { found.si_signo })
    }

    /// Lets the thread run to its next entry into or exit from a system call.
    pub(crate) fn resume_to_system_call(&self) -> io::Result<()> {
        self.plain(libc::PTRACE_SYSCALL, 0)
    }

    /// Where the thread stands; `None` while it runs.
    pub(crate) fn stopped(&self) -> io::Result<Option<Stop>> {
        let mut found = MaybeUninit::<libc::ptrace_syscall_info>::zeroed();
        let size = ptr::without_provenance_mut::<u8>(size_of::<libc::ptrace_syscall_info>());
        // SAFETY: GET_SYSCALL_INFO writes at most `addr` bytes to `data`: the size of `found`.
        let result = unsafe {
            libc::ptrace(libc::PTRACE_GET_SYSCALL_INFO, self.tid, size, found.as_mut_ptr().cast::<u8>())
        };
        match check_long(result) {
            Err(failed) if failed.raw_os_error() == Some(libc::ESRCH) => return self.alive().map(|()| None),
            Err(failed) => return Err(failed),
            Ok(_) => {}
        }
        // SAFETY: assume_init needs a valid value: it was zeroed, and the kernel wrote integers over it.
        let found = unsafe { found.assume_init() };
        Ok(Some(match found.op {
            libc::PTRACE_SYSCALL_INFO_ENTRY => Stop::Entry,
            libc::PTRACE_SYSCALL_INFO_EXIT => {
                // SAFETY: reading the field `exit` needs that it was written: `op` says so.
                Stop::Exit(unsafe { found.u.exit.sval })
            }
            _ => Stop::Other,
        }))
    }

    /// ESRCH once the thread has ended. Looks only: the exit itself may be another thread's to take, as that of
    /// a container's init is the reaper's.
    fn alive(&self) -> io::Result<()> {
        let mut seen = MaybeUninit::<libc::siginfo_t>::zeroed();
        let id = libc::id_t::try_from(self.tid).map_err(|_| error(libc::ESRCH))?;
        let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT | libc::__WALL;
        // SAFETY: waitid writes one siginfo_t: `seen` has room for one.
        let result = unsafe { libc::waitid(libc::P_PID, id, seen.as_mut_ptr(), options) };
        // SAFETY: assume_init needs a valid value: it was zeroed, and the kernel wrote integers over it.
        let seen = unsafe { seen.assume_init() };
        // A stop of a traced thread is reported too, though it wasn't asked for; nothing at all has code 0.
        let ended = matches!(seen.si_code, libc::CLD_EXITED | libc::CLD_KILLED | libc::CLD_DUMPED);
        if ended || result < 0 { Err(error(libc::ESRCH)) } else { Ok(()) }
    }

    /// Waits until the thread has stopped.
    pub(crate) fn wait_stopped(&self, deadline: Instant) -> io::Result<Stop> {
        let mut pause = Duration::from_micros(10);
        loop {
            if let Some(stop) = self.stopped()? {
                return Ok(stop);
            }
            if Instant::now() >= deadline {
                return Err(io::Error::from(io::ErrorKind::TimedOut));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
    }

    pub(crate) fn registers(&self) -> io::Result<user_regs_struct> {
        let mut registers = MaybeUninit::<user_regs_struct>::zeroed();
        // SAFETY: GETREGS writes one user_regs_struct to `data`: `registers` has room for one.
        let result = unsafe {
            libc::ptrace(
                libc::PTRACE_GETREGS,
                self.tid,
                ptr::null_mut::<u8>(),
                registers.as_mut_ptr().cast::<u8>(),
            )
        };
        check_long(result)?;
        // SAFETY: assume_init needs a valid value: it was zeroed, and the kernel wrote integers over it.
        Ok(unsafe { registers.assume_init() })
    }

    pub(crate) fn set_registers(&self, registers: &user_regs_struct) -> io::Result<()> {
        let data = ptr::from_ref(registers).cast_mut().cast::<u8>();
        // SAFETY: SETREGS reads one user_regs_struct from `data`: `registers` is one.
        let result = unsafe { libc::ptrace(libc::PTRACE_SETREGS, self.tid, ptr::null_mut::<u8>(), data) };
        check_long(result).map(|_| ())
    }

    /// The thread's blocked signals.
    pub(crate) fn signal_mask(&self) -> io::Result<u64> {
        let mut mask = 0u64;
        let size = ptr::without_provenance_mut::<u8>(size_of::<u64>());
        // SAFETY: GETSIGMASK writes `addr` = 8 bytes to `data`: the size of `mask`.
        let result =
            unsafe { libc::ptrace(libc::PTRACE_GETSIGMASK, self.tid, size, (&raw mut mask).cast::<u8>()) };
        check_long(result)?;
        Ok(mask)
    }

    pub(crate) fn set_signal_mask(&self, mask: u64) -> io::Result<()> {
        let size = ptr::without_provenance_mut::<u8>(size_of::<u64>());
        let data = (&raw const mask).cast_mut().cast::<u8>();
        // SAFETY: SETSIGMASK reads `addr` = 8 bytes from `data`: the size of `mask`.
        let result = unsafe { libc::ptrace(libc::PTRACE_SETSIGMASK, self.tid, size, data) };
        check_long(result).map(|_| ())
    }

    /// The `index`-th of the thread's seccomp programs in the kernel's order; `None` past the last.
    pub(crate) fn seccomp_program(&self, index: usize) -> io::Result<Option<Vec<Instruction>>> {
        let get = |data: *mut Instruction| {
            let index = ptr::without_provenance_mut::<u8>(index);
            // SAFETY: SECCOMP_GET_FILTER with null data writes nothing, else as many instructions as the
            // call with null data returned: the caller below passes room for that many.
            check_long(unsafe { libc::ptrace(SECCOMP_GET_FILTER, self.tid, index, data.cast::<u8>()) })
        };
        let length = match get(ptr::null_mut()) {
            Ok(length) => usize::try_from(length).map_err(|_| error(libc::EINVAL))?,
            Err(failed) if matches!(failed.raw_os_error(), Some(libc::ENOENT | libc::EINVAL)) => {
                return Ok(None);
            }
            Err(failed) => return Err(failed),
        };
        let mut program = vec![Instruction::default(); length];
        get(program.as_mut_ptr())?;
        Ok(Some(program))
    }
}
