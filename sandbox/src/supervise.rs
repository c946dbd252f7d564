//! The main thread: messages of the shim and the scheduler, and the ends of threads.
//!
//! Failure: an error or the end of the shim's socket ends the process; those of the scheduler's are logged
//! and the process goes on without one.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpuslice_proto::{Receiver, SandboxToShim, ShimToSandbox};
use gpuslice_sys::Listener;
use gpuslice_sys::resident::Code;
use gpuslice_sys::wait::{Wanted, poll};

use crate::crew::Crew;
use crate::driver::Driver;
use crate::link::{LinkError, Scheduler};
use crate::log;
use crate::serve::Server;
use crate::threads::Thread;

/// Why the sandbox ends.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EndError {
    #[error("link to the shim")]
    Link(#[source] LinkError),
    #[error("a message that isn't legal now: {0}")]
    OutOfOrder(&'static str),
    #[error("a listener that can't be served")]
    Listener(#[source] std::io::Error),
    #[error("waiting for messages")]
    Poll(#[source] std::io::Error),
}

/// Shortest time between two reports that nobody asked for.
const PAUSE: Duration = Duration::from_millis(100);
/// Quiet time after which the code's memory is given back.
const REST: Duration = Duration::from_secs(1);
/// Longest wait for a message that was announced.
const READ: Duration = Duration::from_secs(1);

struct Supervisor<'a, D: Driver> {
    server: &'a Server<D>,
    crew: &'a Crew<D>,
    receiver: Receiver<ShimToSandbox>,
    scheduler: Scheduler,
    deaf_until: Instant,
    code: Code,
    rest_at: Option<Instant>,
}

/// Runs until the shim closes its socket.
pub(crate) fn supervise<D: Driver + 'static>(
    server: &Server<D>,
    crew: &Crew<D>,
    receiver: Receiver<ShimToSandbox>,
    code: Code,
) -> Result<(), EndError> {
    let now = Instant::now();
    let (scheduler, rest_at) = (Scheduler::default(), Some(now + REST));
    let mut supervisor = Supervisor { server, crew, receiver, scheduler, deaf_until: now, code, rest_at };
    loop {
        match supervisor.turn() {
            Ok(()) => {}
            Err(EndError::Link(LinkError::Closed)) => return Ok(()),
            Err(failed) => return Err(failed),
        }
    }
}

impl<D: Driver + 'static> Supervisor<'_, D> {
    fn turn(&mut self) -> Result<(), EndError> {
        let threads = self.server.services.threads.all();
        let read = |file| Wanted { file, read: true, write: false };
        // Activity is listened to at the pace of the reports: each time costs a worker a wake-up.
        let listens = Instant::now() >= self.deaf_until;
        let mut wanted = vec![read(self.server.services.shim.as_fd())];
        wanted.extend(listens.then(|| read(self.server.activity.as_fd())));
        wanted.extend(self.scheduler.file().map(read));
        wanted.extend(threads.iter().map(|(_, thread)| read(thread.as_fd())));
        let pause = if listens { self.rest_at } else { Some(self.deaf_until) };
        let ready = poll(&wanted, pause).map_err(EndError::Poll)?;
        let mut ready = ready.into_iter().map(|ready| ready.readable || ready.closed);
        let mut next = || ready.next() == Some(true);
        let (shim, activity) = (next(), listens && next());
        let scheduler = self.scheduler.file().is_some() && next();
        for (tid, thread) in &threads {
            if next() {
                self.thread_ended(*tid, thread);
            }
        }
        if scheduler {
            self.serve_scheduler();
        }
        if activity && self.server.activity.take() {
            self.deaf_until = Instant::now() + PAUSE;
            self.rest_at = Some(self.deaf_until + REST);
            self.crew.turns.active();
            self.crew.keeper.look();
            self.report();
        }
        self.rest();
        if shim { self.serve_shim() } else { Ok(()) }
    }

    /// Gives the code's memory back, once, when there was no call for a while.
    fn rest(&mut self) {
        if self.rest_at.take_if(|at| *at <= Instant::now()).is_some()
            && let Err(failed) = self.code.release()
        {
            log::line(format_args!("can't give memory back: {failed}"));
        }
    }

    fn thread_ended(&self, tid: u32, thread: &Arc<Thread>) {
        self.server.services.threads.ended(tid, thread);
        self.crew.keeper.thread_ended();
    }

    fn serve_scheduler(&mut self) {
        let (usage, refused) = (self.server.sandbox.usage(), self.server.sandbox.refused());
        if let Err(failed) = self.scheduler.serve(usage, refused) {
            self.lost_scheduler(&failed);
        }
    }

    fn report(&mut self) {
        let (usage, refused) = (self.server.sandbox.usage(), self.server.sandbox.refused());
        if let Err(failed) = self.scheduler.report(usage, refused) {
            self.lost_scheduler(&failed);
        }
    }

    fn lost_scheduler(&mut self, failed: &LinkError) {
        log::line(format_args!("the scheduler is gone ({failed}): serving goes on"));
        self.scheduler.disconnect();
    }

    fn serve_shim(&mut self) -> Result<(), EndError> {
        let services = &self.server.services;
        let (message, files) =
            services.shim.receive(&mut self.receiver, Instant::now() + READ).map_err(EndError::Link)?;
        match message {
            ShimToSandbox::Start(_) => return Err(EndError::OutOfOrder("a second Start")),
            ShimToSandbox::Scheduler => {
                self.scheduler.connect(only(files)?);
                self.report();
            }
            ShimToSandbox::Listener { serial } => self.listen(serial, only(files)?)?,
            ShimToSandbox::Result { request, result } => {
                if !services.moves.deliver(request, &result) {
                    services.shim.deliver(request, (result, files));
                }
            }
        }
        Ok(())
    }

    fn listen(&self, serial: u32, file: OwnedFd) -> Result<(), EndError> {
        let listener = Listener::new(file).map_err(EndError::Listener)?;
        if !self.crew.listen(serial, listener) {
            return Err(EndError::OutOfOrder("a second first listener"));
        }
        self.server.services.shim.send(&SandboxToShim::Serving { serial }).map_err(EndError::Link)
    }
}

fn only(files: Vec<OwnedFd>) -> Result<OwnedFd, EndError> {
    files.into_iter().next().ok_or(EndError::OutOfOrder("a message without its file"))
}
