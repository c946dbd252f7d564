//! The container's threads as far as they have called: a pidfd and a memory file each.
//!
//! Owns: the cache. Trusts: the shim's answer (it checks the container's cgroup). A thread id alone names
//! nobody: an entry is used only through its pidfd, which answers ESRCH once the thread has ended, and its
//! memory file, which reads nothing once the process has ended or executed a program. Both are asked for
//! again, once. Where the kernel has no pidfds of threads (before 6.9) they are asked for at each call, since a
//! process's pidfd doesn't tell whether the thread still is the one that it was.
//!
//! A process counts as ended when its memory is gone: that is so when its last thread has ended, known here or
//! not, and when it has executed another program.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use gpuslice_proto::{PrivilegedRequest, PrivilegedResult};
use gpuslice_sys::TenantMemory;
use nix::errno::Errno;

use crate::gate::locked;
use crate::kept::Calls;
use crate::link::Shim;
use crate::log;
use crate::pinned::Pins;

/// Longest wait for the shim's answer.
const ASK: Duration = Duration::from_secs(5);
/// An address that no process has: reading there only tells whether there is a process.
const NOWHERE: u64 = 1 << 60;
/// Most threads kept: each holds two files.
const MOST: usize = 1024;

/// One thread of the container.
#[derive(Debug)]
pub(crate) struct Thread {
    pub(crate) process: Arc<Process>,
    pub(crate) memory: Arc<TenantMemory>,
    /// Its calls in the sandbox.
    pub(crate) calls: Arc<Calls>,
    pidfd: OwnedFd,
}

/// One process of the container.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) tgid: u32,
    pub(crate) pins: Pins,
    memory: Arc<TenantMemory>,
}

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct Threads {
    known: Mutex<HashMap<u32, Arc<Thread>>>,
    processes: Mutex<Processes>,
    /// Calls of threads that are asked for each time, by thread and process.
    calls: Mutex<HashMap<(u32, u32), Arc<Calls>>>,
}

#[derive(Debug, Default)]
struct Processes {
    living: HashMap<u32, Arc<Process>>,
    ended: Vec<u32>,
}

impl Thread {
    /// A copy of the thread's file `number`.
    pub(crate) fn file(&self, number: i32) -> io::Result<OwnedFd> {
        gpuslice_sys::process::pidfd_getfd(self.pidfd.as_fd(), number)
    }

    /// It has not ended, and not executed another program.
    fn is_living(&self) -> bool {
        !gpuslice_sys::process::pidfd_exited(self.pidfd.as_fd()) && !is_gone(&self.memory)
    }
}

impl Process {
    /// It has ended, or executed another program.
    fn is_gone(&self) -> bool {
        is_gone(&self.memory)
    }
}

fn is_gone(memory: &TenantMemory) -> bool {
    let result = memory.read_at(NOWHERE, &mut [0]);
    result.is_err_and(|failed| failed.kind() == io::ErrorKind::UnexpectedEof)
}

impl AsFd for Thread {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

impl Threads {
    /// The thread `tid`, if it has been asked for before.
    pub(crate) fn known(&self, tid: u32) -> Option<Arc<Thread>> {
        locked(&self.known).get(&tid).cloned()
    }

    /// Asks the shim for thread `tid`, whatever is known of it.
    pub(crate) fn ask(&self, shim: &Shim, tid: u32) -> Result<Arc<Thread>, Errno> {
        let answer = shim.ask(PrivilegedRequest::Thread { tid }, &[]).and_then(|request| request.answer(ASK));
        let (tgid, of_thread, files) = match answer {
            Ok((PrivilegedResult::Thread { tgid, thread }, files)) => (tgid, thread, files),
            Ok((PrivilegedResult::Failed { errno, detail }, _)) => {
                log::line(format_args!("thread {tid}: the shim refused: {detail}"));
                return Err(Errno::from_raw(errno));
            }
            Ok((other, _)) => {
                log::line(format_args!("thread {tid}: the shim answered {other:?}"));
                return Err(Errno::EIO);
            }
            Err(failed) => {
                log::line(format_args!("thread {tid}: asking the shim failed: {failed}"));
                return Err(Errno::EIO);
            }
        };
        let mut files = files.into_iter();
        let (Some(pidfd), Some(memory)) = (files.next(), files.next()) else { return Err(Errno::EIO) };
        let memory = Arc::new(TenantMemory::new(memory));
        let process = self.process(tgid, &memory);
        let calls = if of_thread { Arc::default() } else { self.calls_of(tid, tgid) };
        let thread = Arc::new(Thread { process, memory, calls, pidfd });
        if of_thread {
            let mut known = locked(&self.known);
            // Another worker may have asked meanwhile, for an earlier call of this thread: one thread has one list
            // of calls, else a repeated call would not be known.
            if let Some(living) = known.get(&tid).filter(|found| found.is_living()) {
                return Ok(Arc::clone(living));
            }
            if known.len() >= MOST {
                known.retain(|_, thread| !thread.calls.are_idle());
            }
            known.insert(tid, Arc::clone(&thread));
        }
        Ok(thread)
    }

    /// The process `tgid`, whose memory this is.
    fn process(&self, tgid: u32, memory: &Arc<TenantMemory>) -> Arc<Process> {
        let mut processes = locked(&self.processes);
        if let Some(process) = processes.living.get(&tgid) {
            if !process.is_gone() {
                return Arc::clone(process);
            }
            processes.ended.push(tgid);
        }
        let process = Arc::new(Process { tgid, pins: Pins::default(), memory: Arc::clone(memory) });
        processes.living.insert(tgid, Arc::clone(&process));
        process
    }

    fn calls_of(&self, tid: u32, tgid: u32) -> Arc<Calls> {
        let mut calls = locked(&self.calls);
        if calls.len() >= MOST {
            calls.retain(|_, calls| !calls.are_idle());
        }
        Arc::clone(calls.entry((tid, tgid)).or_default())
    }

    /// Every thread kept, for poll.
    pub(crate) fn all(&self) -> Vec<(u32, Arc<Thread>)> {
        locked(&self.known).iter().map(|(tid, thread)| (*tid, Arc::clone(thread))).collect()
    }

    /// Forgets a thread that has ended.
    pub(crate) fn ended(&self, tid: u32, thread: &Arc<Thread>) {
        let mut known = locked(&self.known);
        if known.get(&tid).is_some_and(|found| Arc::ptr_eq(found, thread)) {
            known.remove(&tid);
        }
    }

    /// Forgets the processes that have ended, and names them.
    pub(crate) fn take_ended_processes(&self) -> Vec<u32> {
        let mut processes = locked(&self.processes);
        let mut ended = std::mem::take(&mut processes.ended);
        processes.living.retain(|tgid, process| {
            let gone = process.is_gone();
            if gone {
                ended.push(*tgid);
            }
            !gone
        });
        ended
    }
}
