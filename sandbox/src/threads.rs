//! The container's threads as far as they have called: a pidfd and a memory file each.
//!
//! Owns: the cache. Trusts: the shim's answer (it checks the container's cgroup). A thread id alone names
//! nobody: an entry is used only through its pidfd, which answers ESRCH once the thread has ended, and its
//! memory file, which reads nothing once the process has ended or executed a program. Both are asked for
//! again, once. Where the kernel has no pidfds of threads (before 6.9) nothing is cached, since a process's
//! pidfd doesn't tell whether the thread still is the one that it was.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, Weak};
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
/// Most threads kept: each holds two files.
const MOST: usize = 1024;

/// One thread of the container.
#[derive(Debug)]
pub(crate) struct Thread {
    pub(crate) process: Arc<Process>,
    pub(crate) memory: TenantMemory,
    /// Its calls in the sandbox.
    pub(crate) calls: Calls,
    pidfd: OwnedFd,
}

/// One process of the container.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) tgid: u32,
    pub(crate) pins: Pins,
}

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct Threads {
    known: Mutex<HashMap<u32, Arc<Thread>>>,
    processes: Mutex<HashMap<u32, Weak<Process>>>,
}

impl Thread {
    /// A copy of the thread's file `number`.
    pub(crate) fn file(&self, number: i32) -> io::Result<OwnedFd> {
        gpuslice_sys::process::pidfd_getfd(self.pidfd.as_fd(), number)
    }

    /// The process has ended, or executed another program.
    fn memory_is_gone(&self) -> bool {
        let mut byte = [0];
        let result = self.memory.read_at(0, &mut byte);
        result.is_err_and(|failed| failed.kind() == io::ErrorKind::UnexpectedEof)
    }
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
        let thread = Arc::new(Thread {
            process: self.process(tgid),
            memory: TenantMemory::new(memory),
            calls: Calls::default(),
            pidfd,
        });
        let mut known = locked(&self.known);
        if of_thread {
            if known.len() >= MOST {
                known.clear();
            }
            known.insert(tid, Arc::clone(&thread));
        }
        Ok(thread)
    }

    fn process(&self, tgid: u32) -> Arc<Process> {
        let mut processes = locked(&self.processes);
        if let Some(process) = processes.get(&tgid).and_then(Weak::upgrade) {
            return process;
        }
        processes.retain(|_, process| process.strong_count() > 0);
        let process = Arc::new(Process { tgid, pins: Pins::default() });
        processes.insert(tgid, Arc::downgrade(&process));
        process
    }

    /// Every thread kept, for poll.
    pub(crate) fn all(&self) -> Vec<(u32, Arc<Thread>)> {
        locked(&self.known).iter().map(|(tid, thread)| (*tid, Arc::clone(thread))).collect()
    }

    /// Forgets a thread that has ended. Answers its process's id if that has ended too, as far as is known.
    pub(crate) fn ended(&self, tid: u32, thread: &Arc<Thread>) -> Option<u32> {
        let mut known = locked(&self.known);
        if known.get(&tid).is_some_and(|found| Arc::ptr_eq(found, thread)) {
            known.remove(&tid);
        }
        drop(known);
        thread.memory_is_gone().then_some(thread.process.tgid)
    }
}
