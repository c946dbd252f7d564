//! The calling thread of one notification, as dispatch sees it.
//!
//! Reads go to the tenant's memory at once. Writes, and files that replace others in the tenant's table, are
//! collected and performed when the call is answered: a call that was cancelled meanwhile is then known with all
//! that it would have done ([`crate::kept`]).

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use gpuslice_sys::Listener;
use nix::errno::Errno;

use crate::closer::Closer;
use crate::kept::Trace;
use crate::link::Shim;
use crate::pinned::{Moves, PinCall};
use crate::tenant::{Caller, PinError, Pinned};
use crate::threads::{Thread, Threads};

/// What serving one notification needs beside dispatch.
#[derive(Debug)]
pub(crate) struct Services {
    pub(crate) shim: Shim,
    pub(crate) threads: Threads,
    pub(crate) moves: Moves,
    pub(crate) closer: Closer,
}

/// A call that waits on `listener`.
pub(crate) struct Call<'a> {
    services: &'a Services,
    listener: &'a Listener,
    id: u64,
    tid: u32,
    thread: RefCell<Arc<Thread>>,
    trace: RefCell<Trace>,
    /// Dispatch was told that the call is cancelled: it did not act.
    cancelled: Cell<bool>,
}

fn errno(failed: &io::Error) -> Errno {
    failed.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}

impl<'a> Call<'a> {
    /// The call `id` of `thread`. `trace` must be empty.
    pub(crate) fn new(
        services: &'a Services,
        listener: &'a Listener,
        (id, tid): (u64, u32),
        thread: Arc<Thread>,
        trace: Trace,
    ) -> Self {
        let (thread, trace) = (RefCell::new(thread), RefCell::new(trace));
        Call { services, listener, id, tid, thread, trace, cancelled: Cell::new(false) }
    }

    /// What the call read and will have done, and the thread as it is now; `None` when it was found cancelled
    /// before it acted.
    pub(crate) fn finish(self) -> Option<(Trace, Arc<Thread>)> {
        (!self.cancelled.get()).then(|| (self.trace.into_inner(), self.thread.into_inner()))
    }

    /// Does `act` with the thread, which is asked for again, once, when `act` finds it gone.
    fn with_thread<T>(&self, act: impl Fn(&Thread) -> io::Result<T>) -> Result<T, Errno> {
        let thread = Arc::clone(&self.thread.borrow());
        let gone = match act(&thread) {
            Ok(value) => return Ok(value),
            Err(failed) => failed,
        };
        let stale =
            gone.kind() == io::ErrorKind::UnexpectedEof || gone.raw_os_error() == Some(nix::libc::ESRCH);
        if !stale {
            return Err(errno(&gone));
        }
        let fresh = self.services.threads.ask(&self.services.shim, self.tid)?;
        if !self.still_waiting() {
            return Err(Errno::ENOENT);
        }
        self.thread.replace(Arc::clone(&fresh));
        act(&fresh).map_err(|failed| errno(&failed))
    }
}

impl Caller for Call<'_> {
    fn read(&self, addr: u64, buf: &mut [u8]) -> Result<(), Errno> {
        let buffer = RefCell::new(buf);
        self.with_thread(|thread| thread.memory.read_at(addr, &mut buffer.borrow_mut()))
            .map_err(|failed| if failed == Errno::EIO { Errno::EFAULT } else { failed })?;
        self.trace.borrow_mut().read(addr, &buffer.borrow());
        Ok(())
    }

    fn write(&self, addr: u64, buf: &[u8]) -> Result<(), Errno> {
        self.trace.borrow_mut().write(addr, buf);
        Ok(())
    }

    fn file(&self, n: i32) -> Result<OwnedFd, Errno> {
        self.with_thread(|thread| thread.file(n))
    }

    fn discard(&self, file: OwnedFd) {
        self.services.closer.close(file);
    }

    fn tgid(&self) -> u32 {
        self.thread.borrow().process.tgid
    }

    fn still_waiting(&self) -> bool {
        let waiting = self.listener.is_valid(self.id);
        if !waiting {
            self.cancelled.set(true);
        }
        waiting
    }

    fn pinned(&self, addr: u64, length: u64) -> Result<Pinned, PinError> {
        let thread = Arc::clone(&self.thread.borrow());
        let call = PinCall {
            shim: &self.services.shim,
            moves: &self.services.moves,
            closer: &self.services.closer,
            listener: self.listener,
            id: self.id,
            tid: self.tid,
            process: &thread.process,
        };
        call.pin(addr, length)
    }

    fn install(&self, file: OwnedFd, at: Option<u32>) -> Result<u32, Errno> {
        if let Some(number) = at {
            self.trace.borrow_mut().install(number, file);
            return Ok(number);
        }
        self.listener.add_file(self.id, file.as_fd(), None, false).map_err(|failed| errno(&failed))
    }
}
