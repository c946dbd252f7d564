//! The sandbox's threads, all of which exist before the seccomp program does.
//!
//! | thread | what it does |
//! | --- | --- |
//! | main | sockets to shim and scheduler, ends of threads ([`crate::supervise`]) |
//! | 6 workers | one of them blocked in NOTIF_RECV of the first listener ([`crate::turns`]): only there the kernel's fast wake-up works |
//! | relief | has another worker wait there while that one serves a long call |
//! | exec watcher | polls the listeners of execs, takes their notifications; sees any listener hang up |
//! | 2 exec workers | serve what the watcher took |
//! | closer | closes foreign files ([`crate::closer`]) |
//! | keeper | asks the driver who still lives, audits UVM mappings ([`crate::keeper`]) |

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use gpuslice_proto::SandboxToShim;
use gpuslice_sys::wait::{Wanted, poll};
use gpuslice_sys::{Listener, Notification, Socket};

use crate::driver::Driver;
use crate::gate::{Gate, locked, rest};
use crate::keeper;
use crate::kept::Trace;
use crate::log;
use crate::serve::Server;
use crate::turns::Turns;

const WORKERS: usize = 6;
const EXEC_WORKERS: usize = 2;
/// The relief, the watcher, the closer, the keeper.
const OTHERS: usize = 4;
const STACK: usize = 128 * 1024;

/// What the threads wait for and share.
pub(crate) struct Crew<D: Driver> {
    server: Gate<Arc<Server<D>>>,
    first: Gate<Arc<Listener>>,
    pub(crate) turns: Turns,
    execs: Execs,
    pub(crate) keeper: keeper::Calls,
    at_rest: Mutex<usize>,
    more_at_rest: Condvar,
}

/// The listeners that are polled, and their notifications.
struct Execs {
    listeners: Mutex<Vec<(u32, Arc<Listener>)>>,
    tell: Socket,
    hear: Socket,
    queue: Mutex<VecDeque<(Arc<Listener>, Notification)>>,
    more: Condvar,
}

impl<D: Driver + 'static> Crew<D> {
    /// Starts every thread and waits until each has come to rest.
    pub(crate) fn start() -> io::Result<Arc<Crew<D>>> {
        let (tell, hear) = Socket::pair()?;
        let (listeners, queue) = (Mutex::default(), Mutex::default());
        let crew = Arc::new(Crew {
            server: Gate::new(),
            first: Gate::new(),
            turns: Turns::default(),
            execs: Execs { listeners, tell, hear, queue, more: Condvar::new() },
            keeper: keeper::Calls::default(),
            at_rest: Mutex::new(0),
            more_at_rest: Condvar::new(),
        });
        for _ in 0..WORKERS {
            crew.spawn("worker", |crew, server| crew.work(&server))?;
        }
        for _ in 0..EXEC_WORKERS {
            crew.spawn("exec-worker", |crew, server| crew.work_for_execs(&server))?;
        }
        crew.spawn("relief", |crew, _| crew.turns.relieve())?;
        crew.spawn("exec-watcher", |crew, server| crew.watch(&server))?;
        crew.spawn("closer", |_, server| server.services.closer.serve())?;
        crew.spawn("keeper", |crew, server| crew.keeper.serve(&server))?;
        let mut at_rest = locked(&crew.at_rest);
        while *at_rest < WORKERS + EXEC_WORKERS + OTHERS {
            at_rest = crew.more_at_rest.wait(at_rest).unwrap_or_else(PoisonError::into_inner);
        }
        drop(at_rest);
        Ok(crew)
    }

    fn spawn(
        self: &Arc<Self>,
        name: &str,
        work: impl FnOnce(&Self, Arc<Server<D>>) + Send + 'static,
    ) -> io::Result<()> {
        let crew = Arc::clone(self);
        let body = move || {
            *locked(&crew.at_rest) += 1;
            crew.more_at_rest.notify_one();
            let server = crew.server.wait();
            work(&crew, server);
            rest()
        };
        std::thread::Builder::new().name(name.into()).stack_size(STACK).spawn(body).map(drop)
    }

    /// Lets the threads begin.
    pub(crate) fn begin(&self, server: Arc<Server<D>>) {
        self.server.open(server);
    }

    /// Serves a listener from now on. False if `serial` is 0 and there is a first one already.
    pub(crate) fn listen(&self, serial: u32, listener: Listener) -> bool {
        let listener = Arc::new(listener);
        if serial == 0 {
            if let Err(failed) = listener.sync_wake_up() {
                log::line(format_args!("the kernel has no fast wake-up for notifications ({failed})"));
            }
            if !self.first.open(Arc::clone(&listener)) {
                return false;
            }
        }
        locked(&self.execs.listeners).push((serial, listener));
        // A message in the queue is enough: if there is no room, there is one.
        self.execs.tell.send(&[1], &[], Instant::now()).is_ok() || serial != 0
    }

    fn work(&self, server: &Server<D>) {
        let listener = self.first.wait();
        let mut scratch = Trace::default();
        loop {
            self.turns.take();
            let received = listener.recv();
            self.turns.received();
            match received {
                Ok(call) => server.serve(&listener, &call, &mut scratch),
                Err(failed) if failed.kind() == io::ErrorKind::Interrupted => {}
                // Cancelled before it was taken, or nobody is left.
                Err(failed) if failed.raw_os_error() == Some(nix::libc::ENOENT) => {
                    if has_hung_up(&listener) {
                        return;
                    }
                }
                Err(failed) => {
                    log::line(format_args!("receiving a notification failed: {failed}"));
                    return;
                }
            }
        }
    }

    fn work_for_execs(&self, server: &Server<D>) {
        let mut scratch = Trace::default();
        loop {
            let mut queue = locked(&self.execs.queue);
            let (listener, call) = loop {
                if let Some(next) = queue.pop_front() {
                    break next;
                }
                queue = self.execs.more.wait(queue).unwrap_or_else(PoisonError::into_inner);
            };
            drop(queue);
            server.serve(&listener, &call, &mut scratch);
        }
    }

    /// Polls every listener: the first for its end, the others for notifications too.
    fn watch(&self, server: &Server<D>) {
        loop {
            let listeners = locked(&self.execs.listeners).clone();
            let mut wanted = vec![Wanted { file: self.execs.hear.as_fd(), read: true, write: false }];
            wanted.extend(listeners.iter().map(|(serial, listener)| Wanted {
                file: listener.as_fd(),
                read: *serial != 0,
                write: false,
            }));
            let Ok(ready) = poll(&wanted, None) else { continue };
            let mut ready = ready.into_iter();
            if ready.next().is_some_and(|ready| ready.readable) {
                // Only tells that the list has grown.
                let told = self.execs.hear.recv(&mut [0], 0, Instant::now());
                debug_assert!(told.is_ok());
            }
            for ((serial, listener), ready) in listeners.iter().zip(ready) {
                if ready.readable {
                    self.take(listener);
                } else if ready.closed {
                    self.close(server, *serial);
                }
            }
        }
    }

    fn take(&self, listener: &Arc<Listener>) {
        // The caller may have been interrupted since: then there is nothing to take.
        if let Ok(call) = listener.recv() {
            locked(&self.execs.queue).push_back((Arc::clone(listener), call));
            self.execs.more.notify_one();
        }
    }

    fn close(&self, server: &Server<D>, serial: u32) {
        locked(&self.execs.listeners).retain(|(found, _)| *found != serial);
        if let Err(failed) = server.services.shim.send(&SandboxToShim::ListenerClosed { serial }) {
            log::line(format_args!("reporting the end of listener {serial} failed: {failed}"));
        }
    }
}

fn has_hung_up(listener: &Listener) -> bool {
    let wanted = [Wanted { file: listener.as_fd(), read: false, write: false }];
    poll(&wanted, Some(Instant::now())).is_ok_and(|ready| ready.first().is_some_and(|ready| ready.closed))
}
