//! The thread that stands by a running GPU container.
//!
//! Owns: the container's [`Running`] from the created container to its end. Waits on the sandbox's link, end and
//! log, the scheduler's connection, the listener socket (execs) and its orders; never on a tenant. Promises: a
//! dead or lying sandbox, an order of the scheduler and a failed check each give one reason to kill the container,
//! the first of which is kept; privileged requests that may take long run on threads of their own. When the last
//! [`Handle`] is gone or the end was ordered, everything is taken down in the order of [`Running`]'s fields.
//!
//! No locks: the thread owns its state, others send orders.

use std::cell::Cell;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{self, TryRecvError};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use gpuslice_proto::{PrivilegedRequest, PrivilegedResult, SandboxToShim, SchedulerToShim, ShimToSandbox};
use gpuslice_sys::wait::{self, Wanted};
use gpuslice_sys::{identify, memory};
use nix::libc;
use tokio::sync::watch;

use super::again::{self, Adopted};
use super::judged::{JudgeError, Passed};
use super::launch::Running;
use super::listener;
use super::log::Lines;
use super::privileged::{Answer, Container};
use crate::report;

/// Requests that may run at a time; an honest sandbox has fewer workers.
const MOST_REQUESTS: usize = 16;
/// Time that a pinned move or a population gets, and what it gets more for each GiB.
const MOVE: Duration = Duration::from_secs(10);
const MOVE_PER_GIB: Duration = Duration::from_secs(2);
/// Longest wait of a move for its answer to be on its way.
const ANSWER: Duration = Duration::from_secs(1);
/// How often an exec'ed process that can't be stopped is tried again.
const EXEC_TRIES: u32 = 5;
const STACK: usize = 256 * 1024;

/// What others ask of the thread.
pub(crate) enum Order {
    /// An exec'ed process runs.
    ExecStarted(u32),
    /// A privileged request was served; `sent` hears when the sandbox was told.
    Answer { request: u32, answer: Answer, sent: Option<mpsc::SyncSender<()>> },
    /// A scheduler that was started anew has adopted the container.
    Adopted(Adopted),
    /// The container must be killed.
    Kill(String),
}

/// Sends orders; the thread ends when the last one is dropped.
#[derive(Debug)]
pub(crate) struct Handle {
    orders: mpsc::Sender<Order>,
    wake: UnixStream,
}

impl Handle {
    /// Sends an order; false when the thread has ended.
    pub(crate) fn send(&self, order: Order) -> bool {
        let sent = self.orders.send(order).is_ok();
        self.wake();
        sent
    }

    fn wake(&self) {
        // A full socket wakes the thread just as well.
        drop(std::io::Write::write(&mut (&self.wake), &[1]));
    }
}

/// Wakes the thread, which then finds that nobody can send any more.
impl Drop for Handle {
    fn drop(&mut self) {
        self.wake();
    }
}

/// What the rest of the shim sees of the thread.
pub(crate) struct Control {
    pub(crate) handle: Arc<Handle>,
    /// The reason to kill the container, once there is one.
    pub(crate) reason: watch::Receiver<Option<String>>,
    /// True once everything was taken down.
    pub(crate) done: watch::Receiver<bool>,
}

struct Keeper {
    running: Running,
    /// The link is in use: the sandbox lives and has kept to the protocol.
    serving: bool,
    logging: bool,
    container: Arc<Container>,
    passed: Arc<Passed>,
    next_serial: u32,
    busy: Vec<(u32, Option<Instant>)>,
    log: Lines,
    orders: mpsc::Receiver<Order>,
    woken: UnixStream,
    handle: Weak<Handle>,
    reason: watch::Sender<Option<String>>,
}

/// Starts the thread for a container whose first listener the sandbox serves.
///
/// # Errors
/// No thread or no socket could be made; everything is taken down.
pub(crate) fn start(running: Running, container: Container, passed: Passed) -> std::io::Result<Control> {
    let (wake, woken) = UnixStream::pair()?;
    wake.set_nonblocking(true)?;
    woken.set_nonblocking(true)?;
    let (sender, orders) = mpsc::channel();
    let handle = Arc::new(Handle { orders: sender, wake });
    let (reason, reasons) = watch::channel(None);
    let (finished, done) = watch::channel(false);
    let weak = Arc::downgrade(&handle);
    let body = move || {
        let log = Lines::new(running.reserved.name.clone());
        let mut keeper = Keeper {
            running,
            serving: true,
            logging: true,
            container: Arc::new(container),
            passed: Arc::new(passed),
            next_serial: 1,
            busy: Vec::new(),
            log,
            orders,
            woken,
            handle: weak,
            reason,
        };
        keeper.run();
        drop(keeper);
        finished.send_replace(true);
    };
    std::thread::Builder::new().name("gpuslice-keeper".into()).stack_size(STACK).spawn(body)?;
    Ok(Control { handle, reason: reasons, done })
}

/// What became ready.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    Orders,
    Link,
    End,
    Log,
    Scheduler,
    Listener,
}

impl Keeper {
    fn run(&mut self) {
        loop {
            let ready = match self.wait() {
                Ok(ready) => ready,
                Err(error) => {
                    self.kill(format!("the shim can't wait on its files: {error}"));
                    return;
                }
            };
            for source in ready {
                match source {
                    Source::Orders => {}
                    Source::Log => self.copy_log(),
                    Source::Link => self.hear_sandbox(),
                    Source::End => self.sandbox_ended(),
                    Source::Scheduler => self.hear_scheduler(),
                    Source::Listener => self.take_listener(),
                }
            }
            self.check_deadlines();
            if !self.take_orders() {
                return;
            }
        }
    }

    fn wait(&mut self) -> std::io::Result<Vec<Source>> {
        let mut sources = vec![Source::Orders];
        let mut files = vec![self.woken.as_fd()];
        let [link, end, log] = self.running.sandbox.files();
        if self.logging {
            sources.push(Source::Log);
            files.push(log);
        }
        if self.serving {
            sources.extend([Source::Link, Source::End, Source::Listener]);
            files.extend([link, end, self.running.reserved.listening.as_fd()]);
        }
        if let Some(scheduler) = self.running.reserved.scheduler.as_ref() {
            sources.push(Source::Scheduler);
            files.push(scheduler.as_fd());
        }
        let wanted: Vec<Wanted<'_>> =
            files.into_iter().map(|file| Wanted { file, read: true, write: false }).collect();
        let deadline = self.busy.iter().filter_map(|(_, deadline)| *deadline).min();
        let ready = wait::poll(&wanted, deadline)?;
        Ok(sources
            .into_iter()
            .zip(ready)
            .filter(|(_, ready)| ready.readable || ready.closed)
            .map(|(source, _)| source)
            .collect())
    }

    /// Obeys what was ordered; false when the thread must end.
    fn take_orders(&mut self) -> bool {
        let mut bytes = [0; 64];
        while matches!((&self.woken).read(&mut bytes), Ok(1..)) {}
        loop {
            match self.orders.try_recv() {
                Ok(Order::ExecStarted(pid)) => self.check_exec(pid),
                Ok(Order::Answer { request, answer, sent }) => {
                    self.answer(request, answer);
                    sent.into_iter().for_each(|sent| sent.try_send(()).unwrap_or(()));
                }
                Ok(Order::Adopted(adopted)) => self.adopted(adopted),
                Ok(Order::Kill(reason)) => self.kill(reason),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    /// The container must be killed; the first reason is kept.
    fn kill(&mut self, why: String) {
        self.reason.send_if_modified(|reason| {
            let first = reason.is_none();
            if first {
                report::log(&self.running.reserved.name, &format!("the container is killed: {why}"));
                *reason = Some(why);
            }
            first
        });
    }

    fn sandbox_ended(&mut self) {
        if !self.serving {
            return;
        }
        self.serving = false;
        let how = self.running.sandbox.how_it_ended();
        self.copy_log();
        let last = self.log.last().map(|line| format!("; it said: {line}")).unwrap_or_default();
        self.kill(format!("sandbox died (pid {}): {how}{last}", self.running.sandbox.pid));
    }

    fn copy_log(&mut self) {
        let mut buffer = [0; 2048];
        match self.running.sandbox.log.read(&mut buffer) {
            Ok(0) => self.logging = false,
            Ok(length) => self.log.copy(buffer.get(..length).unwrap_or_default()),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => self.logging = false,
        }
    }

    fn hear_sandbox(&mut self) {
        if !self.serving {
            return;
        }
        match self.running.sandbox.link.receive(Instant::now(), "a message") {
            Ok(Some((message, files))) => self.obey(message, files.into_iter().next()),
            Ok(None) => self.sandbox_ended(),
            Err(error) => {
                self.serving = false;
                self.kill(report::chain(&error));
            }
        }
    }

    fn obey(&mut self, message: SandboxToShim, file: Option<OwnedFd>) {
        match message {
            SandboxToShim::Serving { serial } if serial < self.next_serial => {}
            SandboxToShim::ListenerClosed { serial } if serial < self.next_serial => {}
            SandboxToShim::Request { request, ask } => self.serve(request, ask, file),
            SandboxToShim::Stop { detail } => {
                self.kill(format!("the sandbox asks for it: {}", plain(&detail)))
            }
            SandboxToShim::Ready | SandboxToShim::Serving { .. } | SandboxToShim::ListenerClosed { .. } => {
                self.kill("the sandbox sent a message that is not legal now".to_owned());
            }
        }
    }

    fn serve(&mut self, request: u32, ask: PrivilegedRequest, file: Option<OwnedFd>) {
        if let PrivilegedRequest::Thread { .. } = ask {
            let answer = Cell::new(None);
            let container = Arc::clone(&self.container);
            container.serve(ask, None, Instant::now(), &|served| answer.set(Some(served)));
            return answer.into_inner().into_iter().for_each(|answer| self.answer(request, answer));
        }
        let file = match file.map(as_memory_file).transpose() {
            Ok(file) => file,
            Err(NotMemory) => {
                return self.kill("the sandbox passed a file that is no memory file".to_owned());
            }
        };
        if self.busy.len() >= MOST_REQUESTS {
            return self.kill(format!("the sandbox has more than {MOST_REQUESTS} requests open"));
        }
        let deadline = match ask {
            PrivilegedRequest::MoveRange { range, .. } | PrivilegedRequest::PopulateRange { range, .. } => {
                let gibs = u32::try_from(range.length >> 30).unwrap_or(u32::MAX);
                Some(Instant::now() + MOVE + MOVE_PER_GIB.saturating_mul(gibs.min(4096)))
            }
            _ => None,
        };
        self.busy.push((request, deadline));
        let container = Arc::clone(&self.container);
        let started = self.in_background(move |post| {
            let deadline = deadline.unwrap_or_else(Instant::now);
            container.serve(ask, file, deadline, &|answer| {
                let (sent, seen) = mpsc::sync_channel(1);
                post(Order::Answer { request, answer, sent: Some(sent) });
                // A move's threads go on only after the sandbox was told that its memory lies elsewhere now.
                seen.recv_timeout(ANSWER).unwrap_or(());
            });
        });
        if !started {
            self.kill("no thread for a request of the sandbox".to_owned());
        }
    }

    /// Runs `work` on a thread of its own, with a way to send orders.
    fn in_background(&self, work: impl FnOnce(&dyn Fn(Order)) + Send + 'static) -> bool {
        let handle = self.handle.clone();
        // Held only to send: work that takes long must not hold up the container's end.
        let post = move |order| {
            if let Some(handle) = handle.upgrade() {
                handle.send(order);
            }
        };
        std::thread::Builder::new().stack_size(STACK).spawn(move || work(&post)).is_ok()
    }

    fn answer(&mut self, request: u32, answer: Answer) {
        let (result, files) = answer;
        if result != PrivilegedResult::Stopping {
            self.busy.retain(|(busy, _)| *busy != request);
        }
        if let PrivilegedResult::Failed { errno: libc::ETIMEDOUT, detail } = &result {
            self.kill(format!("a pinned move or population did not end in time: {detail}"));
        }
        if !self.serving {
            return;
        }
        let borrowed: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        let message = ShimToSandbox::Result { request, result };
        self.send(&message, &borrowed, "the answer to a request");
    }

    fn send(&mut self, message: &ShimToSandbox, files: &[std::os::fd::BorrowedFd<'_>], step: &'static str) {
        let patience = self.running.reserved.patience;
        if let Err(error) = self.running.sandbox.link.send(message, files, patience, step) {
            self.serving = false;
            self.kill(report::chain(&error));
        }
    }

    fn check_deadlines(&mut self) {
        let now = Instant::now();
        if self.busy.iter().any(|(_, deadline)| deadline.is_some_and(|deadline| deadline < now)) {
            self.busy.iter_mut().for_each(|(_, deadline)| *deadline = None);
            self.kill("a pinned move or population did not end in time".to_owned());
        }
    }

    fn hear_scheduler(&mut self) {
        let Some(scheduler) = self.running.reserved.scheduler.as_mut() else { return };
        match scheduler.next() {
            Ok(SchedulerToShim::Stop { detail }) => {
                self.kill(format!("the scheduler orders it: {}", plain(&detail)))
            }
            Ok(SchedulerToShim::Acknowledged) => {}
            Ok(other) => self.lost_scheduler(&format!("it sent {other:?} out of turn")),
            Err(error) => self.lost_scheduler(&report::chain(&error)),
        }
    }

    /// The container runs on under its last plan; the scheduler that comes next is asked to adopt it.
    fn lost_scheduler(&mut self, why: &str) {
        report::log(&self.running.reserved.name, &format!("scheduler lost, dialling again: {why}"));
        self.running.reserved.scheduler = None;
        let again = match again::Again::of(&self.running.reserved, self.running.sandbox.pidfd.as_fd()) {
            Ok(again) => again,
            Err(error) => return self.kill(format!("can't dial the scheduler again: {error}")),
        };
        let handle = self.handle.clone();
        let body = move || again.dial(&handle);
        if std::thread::Builder::new().stack_size(STACK).spawn(body).is_err() {
            self.kill("no thread to dial the scheduler again".to_owned());
        }
    }

    fn adopted(&mut self, adopted: Adopted) {
        report::log(&self.running.reserved.name, "adopted by the scheduler");
        self.running.reserved.scheduler = Some(adopted.connection);
        if self.serving {
            self.send(&ShimToSandbox::Scheduler, &[adopted.sandbox.as_fd()], "the scheduler's connection");
        }
    }

    /// An exec brings a listener of its own, which its first process and its children stay under.
    fn take_listener(&mut self) {
        let deadline = Instant::now() + self.running.reserved.patience;
        let received = self
            .running
            .reserved
            .listening
            .accept(deadline)
            .map_err(|source| listener::ListenerError::Io { step: "accept", source })
            .and_then(|stream| listener::receive(stream, &self.running.reserved.expected, deadline));
        let listener = match received {
            Ok(listener) => listener,
            Err(error) => {
                return report::log(
                    &self.running.reserved.name,
                    &format!("listener dropped: {}", report::chain(&error)),
                );
            }
        };
        let serial = self.next_serial;
        self.next_serial = self.next_serial.saturating_add(1);
        self.send(&ShimToSandbox::Listener { serial }, &[listener.as_fd()], "a listener");
    }

    fn check_exec(&mut self, pid: u32) {
        let passed = Arc::clone(&self.passed);
        let started = self.in_background(move |post| {
            let mut tried = 1;
            loop {
                match passed.check_exec(pid) {
                    Ok(()) => return,
                    Err(JudgeError::Read { .. }) if tried < EXEC_TRIES => tried += 1,
                    Err(error) => return post(Order::Kill(report::chain(&error))),
                }
            }
        });
        if !started {
            self.kill("no thread to check an exec'ed process".to_owned());
        }
    }
}

/// A text of the sandbox's or the scheduler's, fit for a log line.
fn plain(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(300).collect()
}

struct NotMemory;

/// A file of the sandbox's, if it is one of memory. Another one stays open: closing a file of a tenant's file
/// system could wait for ever.
fn as_memory_file(file: OwnedFd) -> Result<OwnedFd, NotMemory> {
    let kind = |file: &OwnedFd| identify(file.as_fd()).map(|found| found.dev);
    let own = memory::memfd("kind", 0).and_then(|own| kind(&own));
    match (own, kind(&file)) {
        (Ok(own), Ok(found)) if own == found => Ok(file),
        _ => {
            std::mem::forget(file);
            Err(NotMemory)
        }
    }
}
