//! Every thread of a process, interrupted, stopped, and let go again; system calls in one of them.

use std::collections::BTreeSet;
use std::io;
use std::time::{Duration, Instant};

use libc::user_regs_struct;

use super::maps::{self, Segment};
use super::{Move, MoveError, Populate};
use crate::call::error;
use crate::memory::TenantMemory;
use crate::ptrace::{Stop, Tracee};

/// Threads that have been told to stop.
pub(super) struct Pending {
    caller: Tracee,
    siblings: Vec<Tracee>,
}

/// Threads that have stopped.
pub(super) struct Stopped {
    caller: Tracee,
    siblings: Vec<Tracee>,
    registers: user_regs_struct,
    memory: TenantMemory,
    /// Taken by the calling thread when it goes on.
    signal: libc::c_int,
}

/// The process dies if its tracer does; system call stops can be told from others.
const OPTIONS: libc::c_int = libc::PTRACE_O_EXITKILL | libc::PTRACE_O_TRACESYSGOOD;
/// The instruction `syscall`.
const SYSTEM_CALL: [u8; 2] = [0x0f, 0x05];
/// Kernel-internal results of a call that was interrupted: ERESTARTSYS, -NOINTR, -NOHAND.
const RESTART: std::ops::RangeInclusive<i64> = -514..=-512;
/// ERESTART_RESTARTBLOCK: goes on by restart_syscall(2).
const RESTART_BLOCK: i64 = -516;

/// Interrupts every thread of the process of `tid`. Once a listing shows no thread that isn't interrupted,
/// there will be none: the kernel lets no interrupted thread finish making another.
pub(super) fn interrupt(tid: u32, deadline: Instant) -> io::Result<Pending> {
    let caller = Tracee::seize(tid, OPTIONS)?;
    caller.interrupt()?;
    let mut pending = Pending { caller, siblings: Vec::new() };
    let mut known = BTreeSet::from([tid]);
    loop {
        let mut grown = false;
        for thread in threads(tid)? {
            if !known.insert(thread) {
                continue;
            }
            grown = true;
            if let Some(tracee) = seize_living(thread, tid)? {
                tracee.interrupt()?;
                pending.siblings.push(tracee);
            }
        }
        if !grown {
            return Ok(pending);
        }
        if Instant::now() >= deadline {
            return Err(io::Error::from(io::ErrorKind::TimedOut));
        }
    }
}

/// Interrupts thread `tid` and no other.
pub(super) fn interrupt_one(tid: u32) -> io::Result<Pending> {
    let caller = Tracee::seize(tid, OPTIONS)?;
    caller.interrupt()?;
    Ok(Pending { caller, siblings: Vec::new() })
}

fn threads(tid: u32) -> io::Result<Vec<u32>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{tid}/task"))? {
        if let Some(thread) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) {
            found.push(thread);
        }
    }
    Ok(found)
}

/// `None` for a thread that has ended, or is a zombie.
fn seize_living(thread: u32, tid: u32) -> io::Result<Option<Tracee>> {
    match Tracee::seize(thread, OPTIONS) {
        Ok(tracee) => Ok(Some(tracee)),
        Err(failed) if failed.raw_os_error() == Some(libc::ESRCH) => Ok(None),
        Err(failed) => {
            let stat = std::fs::read_to_string(format!("/proc/{tid}/task/{thread}/stat")).unwrap_or_default();
            // The state follows the name, which may hold anything but ends with the last parenthesis.
            let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
            if matches!(state, None | Some('Z' | 'X' | 'x')) { Ok(None) } else { Err(failed) }
        }
    }
}

impl Pending {
    /// Waits until every thread has stopped. On failure those that have are let go again.
    pub(super) fn wait(self, stopped: &mut Option<Stopped>, deadline: Instant) -> io::Result<()> {
        let result = self.all_stopped(deadline).and_then(|()| {
            let memory =
                std::fs::File::options().read(true).open(format!("/proc/{}/mem", self.caller.tid()))?;
            let signal = self.caller.signal_on_its_way()?;
            Ok((self.caller.registers()?, TenantMemory::new(memory.into()), signal))
        });
        let Pending { caller, siblings } = self;
        match result {
            Ok((registers, memory, signal)) => {
                *stopped = Some(Stopped { caller, siblings, registers, memory, signal });
                Ok(())
            }
            Err(failed) => {
                for tracee in siblings.iter().chain([&caller]) {
                    let_go(tracee);
                }
                Err(failed)
            }
        }
    }

    fn all_stopped(&self, deadline: Instant) -> io::Result<()> {
        self.caller.wait_stopped(deadline)?;
        for sibling in &self.siblings {
            match sibling.wait_stopped(deadline) {
                Ok(_) => {}
                Err(failed) if failed.raw_os_error() == Some(libc::ESRCH) => {}
                Err(failed) => return Err(failed),
            }
        }
        Ok(())
    }
}

/// Lets a stopped thread go on. One that runs or has ended can't be let go: the tracer's end deals with it.
fn let_go(tracee: &Tracee) {
    let signal = tracee.signal_on_its_way().unwrap_or(0);
    if tracee.detach(signal).is_err() {
        // ESRCH: nothing to let go of.
    }
}

impl Stopped {
    /// Lets the calling thread give the file its pages, has it filled, and lets the thread map it over each
    /// segment and close it. Pages that are the thread's are charged to its own cgroup, whoever writes to them.
    pub(super) fn map(
        &mut self,
        wanted: &Move<'_>,
        segments: &[Segment],
        fill: impl FnOnce() -> io::Result<()>,
    ) -> Result<(), MoveError> {
        self.undisturbed(MoveError::Map, || {
            self.allocate(wanted)
                .and_then(|()| fill())
                .map_err(MoveError::Copy)
                .and_then(|()| self.map_segments(wanted, segments).map_err(MoveError::Map))
        })
    }

    /// Lets the calling thread make every page of the range.
    pub(super) fn populate(&mut self, wanted: &Populate) -> Result<(), MoveError> {
        self.undisturbed(MoveError::Populate, || self.advise(wanted).map_err(MoveError::Populate))
    }

    /// Makes calls in the calling thread, which then goes on as if none had been made.
    fn undisturbed(
        &self,
        kind: fn(io::Error) -> MoveError,
        calls: impl FnOnce() -> Result<(), MoveError>,
    ) -> Result<(), MoveError> {
        let mask = self.caller.signal_mask().map_err(kind)?;
        // Signals wait until the thread goes on: one in the middle would cancel a trapped call.
        self.caller.set_signal_mask(u64::MAX).map_err(kind)?;
        let result = calls();
        self.caller.set_registers(&resumed(&self.registers)).map_err(kind)?;
        self.caller.set_signal_mask(mask).map_err(kind)?;
        result
    }

    fn advise(&self, wanted: &Populate) -> io::Result<()> {
        let at = self.system_call_instruction()?;
        let (start, length) = wanted.range;
        let advise = |advice: libc::c_int| {
            let arguments = [start, length, u64::from(advice.unsigned_abs()), 0, 0, 0];
            self.call(at, libc::SYS_madvise, arguments, wanted.deadline)
        };
        let result = match advise(libc::MADV_POPULATE_WRITE) {
            // Memory that may not be written.
            Err(failed) if failed.raw_os_error() == Some(libc::EINVAL) => advise(libc::MADV_POPULATE_READ),
            result => result,
        };
        unless_refused(result)
    }

    fn allocate(&self, wanted: &Move<'_>) -> io::Result<()> {
        let at = self.system_call_instruction()?;
        let arguments = [u64::from(wanted.tenant_file), 0, 0, wanted.range.1, 0, 0];
        unless_refused(self.call(at, libc::SYS_fallocate, arguments, wanted.deadline))
    }

    fn map_segments(&self, wanted: &Move<'_>, segments: &[Segment]) -> io::Result<()> {
        let at = self.system_call_instruction()?;
        let file = u64::from(wanted.tenant_file);
        let mut result = Ok(());
        for segment in segments {
            let protection = libc::PROT_READ | if segment.writable { libc::PROT_WRITE } else { 0 };
            let arguments = [
                segment.start,
                segment.end - segment.start,
                u64::from(protection.unsigned_abs()),
                // Populated: a range of which the process has every page need not be stopped for again.
                u64::from((libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_POPULATE).unsigned_abs()),
                file,
                segment.start - wanted.range.0,
            ];
            let mapped = self.call(at, libc::SYS_mmap, arguments, wanted.deadline)?;
            if mapped != segment.start {
                result = Err(error(libc::EFAULT));
                break;
            }
        }
        self.call(at, libc::SYS_close, [file, 0, 0, 0, 0, 0], wanted.deadline)?;
        result
    }

    /// Where the thread can make a system call: at its own last one, else in the vdso.
    fn system_call_instruction(&self) -> io::Result<u64> {
        let last = self.registers.rip.wrapping_sub(2);
        let mut bytes = [0; 2];
        if self.memory.read_at(last, &mut bytes).is_ok() && bytes == SYSTEM_CALL {
            return Ok(last);
        }
        let (start, end) = maps::vdso(self.caller.tid())?;
        let length = usize::try_from(end - start).map_err(|_| error(libc::ENOEXEC))?.min(64 * 1024);
        let mut code = vec![0; length];
        self.memory.read_at(start, &mut code)?;
        let found = code.windows(2).position(|bytes| *bytes == SYSTEM_CALL);
        found.map(|offset| start + offset as u64).ok_or_else(|| error(libc::ENOEXEC))
    }

    /// Makes the thread perform one system call.
    fn call(&self, at: u64, number: libc::c_long, arguments: [u64; 6], deadline: Instant) -> io::Result<u64> {
        let [rdi, rsi, rdx, r10, r8, r9] = arguments;
        let rax = number.cast_unsigned();
        let wanted = user_regs_struct {
            rip: at,
            rax,
            orig_rax: u64::MAX,
            rdi,
            rsi,
            rdx,
            r10,
            r8,
            r9,
            ..self.registers
        };
        loop {
            self.caller.set_registers(&wanted)?;
            match self.run_to_exit(deadline)? {
                // Its own trap was cancelled, by a stop signal for one.
                result if RESTART.contains(&result) => {}
                result if (-4095..0).contains(&result) => {
                    return Err(error(i32::try_from(-result).unwrap_or(libc::EINVAL)));
                }
                result => return Ok(result.cast_unsigned()),
            }
            if Instant::now() >= deadline {
                return Err(io::Error::from(io::ErrorKind::TimedOut));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn run_to_exit(&self, deadline: Instant) -> io::Result<i64> {
        loop {
            self.caller.resume_to_system_call()?;
            if let Stop::Exit(result) = self.caller.wait_stopped(deadline)? {
                return Ok(result);
            }
        }
    }

    /// Lets every thread go on, the calling one first into the call that it was in.
    pub(super) fn release(self) {
        for sibling in &self.siblings {
            let_go(sibling);
        }
        if self.caller.detach(self.signal).is_err() {
            // ESRCH: it was killed meanwhile.
        }
    }
}

/// A profile may refuse a call that makes pages: then whoever touches a page first is charged.
fn unless_refused(result: io::Result<u64>) -> io::Result<()> {
    match result {
        Err(refused) if matches!(refused.raw_os_error(), Some(libc::EPERM | libc::EACCES | libc::ENOSYS)) => {
            Ok(())
        }
        result => result.map(|_| ()),
    }
}

/// Registers with which a thread goes on that was stopped on its way out of an interrupted call: it makes the
/// call again, as the kernel would have had it do.
fn resumed(stopped: &user_regs_struct) -> user_regs_struct {
    let mut registers = *stopped;
    let result = stopped.rax.cast_signed();
    registers.orig_rax = u64::MAX;
    if stopped.orig_rax.cast_signed() >= 0 && (RESTART.contains(&result) || result == RESTART_BLOCK) {
        registers.rip = stopped.rip.wrapping_sub(2);
        registers.rax = if result == RESTART_BLOCK {
            libc::SYS_restart_syscall.cast_unsigned()
        } else {
            stopped.orig_rax
        };
    }
    registers
}
