//! The calling thread of one notification, as dispatch sees it.
//!
//! Reads go to the tenant's memory at once; the first brings some of what follows, which is not read again. Writes,
//! and files that replace others in the tenant's table, are collected and performed when the call is answered: a
//! call that was cancelled meanwhile is then known with all that it would have done ([`crate::kept`]).

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

/// Most bytes that the first read of a call brings.
const WINDOW: usize = 1024;
const PAGE: u64 = 4096;

/// What the first read of a call brought beside what was asked for: some of what follows in its page. A read costs
/// far more than its bytes, and inner parameters mostly lie close behind the outer ones.
struct Window {
    address: u64,
    length: usize,
    bytes: [u8; WINDOW],
}

impl Window {
    /// Bytes from `address` to the end of its page, no more than a window has.
    fn room(address: u64) -> usize {
        usize::try_from(PAGE - address % PAGE).unwrap_or(WINDOW).min(WINDOW)
    }

    /// Fills `buf` if all of it was brought.
    fn give(&self, address: u64, buf: &mut [u8]) -> bool {
        let offset = address.checked_sub(self.address).and_then(|offset| usize::try_from(offset).ok());
        let brought = self.bytes.get(..self.length).unwrap_or_default();
        let piece = offset.and_then(|offset| brought.get(offset..offset.checked_add(buf.len())?));
        piece.map(|piece| buf.copy_from_slice(piece)).is_some()
    }
}

/// A call that waits on `listener`.
pub(crate) struct Call<'a> {
    services: &'a Services,
    listener: &'a Listener,
    id: u64,
    tid: u32,
    thread: RefCell<Arc<Thread>>,
    trace: RefCell<Trace>,
    window: RefCell<Window>,
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
        let window = RefCell::new(Window { address: 0, length: 0, bytes: [0; WINDOW] });
        Call { services, listener, id, tid, thread, trace, window, cancelled: Cell::new(false) }
    }

    /// Reads from tenant memory; the first time with what follows.
    fn fetch(&self, addr: u64, buf: &mut [u8]) -> Result<(), Errno> {
        let mut window = self.window.borrow_mut();
        let length = Window::room(addr);
        let windowed = window.length == 0 && buf.len() <= length;
        let target = if windowed { window.bytes.get_mut(..length).unwrap_or_default() } else { &mut *buf };
        let target = RefCell::new(target);
        self.with_thread(|thread| thread.memory.read_at(addr, &mut target.borrow_mut()))
            .map_err(|failed| if failed == Errno::EIO { Errno::EFAULT } else { failed })?;
        if windowed {
            (window.address, window.length) = (addr, length);
            window.give(addr, buf);
        }
        Ok(())
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
        if !buf.is_empty() && !self.window.borrow().give(addr, buf) {
            self.fetch(addr, buf)?;
        }
        self.trace.borrow_mut().read(addr, buf);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_gives_what_it_has_whole_and_nothing_else() {
        let mut window = Window { address: 0x7fff_0f00, length: 0x100, bytes: [0; WINDOW] };
        window.bytes[0x20..0x24].copy_from_slice(&[1, 2, 3, 4]);
        window.bytes[0x100] = 9;
        let mut buf = [0; 4];
        assert!(window.give(0x7fff_0f20, &mut buf) && buf == [1, 2, 3, 4]);
        assert!(window.give(0x7fff_0ffc, &mut buf), "its last bytes");
        for outside in [0x7fff_0efe, 0x7fff_0ffd, 0x7fff_1000, 0, u64::MAX - 1] {
            assert!(!window.give(outside, &mut buf), "{outside:#x}");
        }
        assert!(window.give(0x7fff_0f10, &mut []));
    }

    #[test]
    fn a_window_ends_with_its_page() {
        assert_eq!(Window::room(0x1000), WINDOW);
        assert_eq!(Window::room(0x1fff), 1);
        assert_eq!(Window::room(u64::MAX), 1);
        assert_eq!(Window::room(0x1000 - 8), 8);
    }
}
