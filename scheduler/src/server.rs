//! The poll loop.
//!
//! Owns: all connections, the node's state, every deadline. One thread, no locks; the auditor is the only
//! other one. Nothing here waits on a peer: sockets never block, queues are bounded, each step of a handshake
//! has a deadline. A peer that breaks a rule is closed with one line in the log; a sandbox that does so gets
//! its container stopped.

mod clock;
mod messages;
mod rounds;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use gpuslice_config::{Config, UidConflict, check_uids};
use gpuslice_policy::Branch;
use gpuslice_proto::{LeaseId, Reason, SchedulerToShim};
use gpuslice_sys::wait::{Ready, Wanted, poll};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use crate::auditor::Auditor;
use crate::backend::Backend;
use crate::core::Core;
use crate::log::log;
use crate::peer::{Ended, Peer, Phase, Shim};
use crate::place::{Place, PlaceError};
use crate::processes::uids_in_use;
use crate::readiness::Readiness;
use clock::Clock;

/// Connections that have said nothing yet.
const MOST_NEWCOMERS: usize = 256;
/// How long after a restart new containers wait at most for the old ones to be adopted; never longer than three
/// quarters of the deadline that a shim waits.
const SETTLE: Duration = Duration::from_millis(1500);
/// Longest time between two turns of the loop: each tells systemd's watchdog that it goes on.
const SIGN_OF_LIFE: Duration = Duration::from_secs(5);
/// Pause after the file table was full.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Why the scheduler ends.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The socket's place.
    #[error(transparent)]
    Place(PlaceError),
    /// The uid range is somebody else's.
    #[error(transparent)]
    Uids(UidConflict),
    /// A system call of the loop.
    #[error("{what}")]
    System {
        /// Which.
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// The audit thread.
    #[error("the audit thread died: restart")]
    AuditorDied,
}

fn system<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> RunError {
    move |source| RunError::System { what, source: source.into() }
}

/// Serves until SIGTERM or SIGINT.
///
/// # Errors
/// [`RunError`]; containers that run go on without the scheduler, new ones don't start.
pub fn run(config: &Config, backend: Box<dyn Backend>) -> Result<(), RunError> {
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTERM);
    signals.add(Signal::SIGINT);
    // Before the auditor's thread: a thread inherits the mask.
    signals.thread_block().map_err(system("block signals"))?;
    let stop = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK);
    let stop = stop.map_err(system("signalfd"))?;
    let stop = stop.as_fd().try_clone_to_owned().map_err(system("signalfd"))?;
    serve(config, backend, &stop, || crate::confine::confine().map_err(system("install the seccomp filter")))
}

/// Serves until `stop` is readable, in a process that does other things as well: it is not confined.
///
/// # Errors
/// As [`run`].
pub fn run_with(config: &Config, backend: Box<dyn Backend>, stop: &OwnedFd) -> Result<(), RunError> {
    serve(config, backend, stop, || Ok(()))
}

fn serve(
    config: &Config,
    backend: Box<dyn Backend>,
    stop: &OwnedFd,
    confine: impl FnOnce() -> Result<(), RunError>,
) -> Result<(), RunError> {
    check_uids(config.uids(), Path::new("/etc")).map_err(RunError::Uids)?;
    let readiness = Readiness::from_env();
    let place = Place::take(&config.scheduler_socket()).map_err(RunError::Place)?;
    if let Ok((_, most)) = getrlimit(Resource::RLIMIT_NOFILE) {
        setrlimit(Resource::RLIMIT_NOFILE, most, most).ok();
    }
    let mut server = Server::new(config, backend, place).map_err(system("start the audit thread"))?;
    confine()?;
    readiness.tell("READY=1");
    log!("serving {} on driver {}", config.scheduler_socket().display(), server.core.driver());
    if let Err(unknown) = Branch::for_version(server.core.driver()) {
        log!("no GPU container will start: {unknown}");
    }
    for gpu in server.core.gpus() {
        log!("{} (nvidia{}): {} MiB", gpu.card.uuid, gpu.card.minor, gpu.card.memory >> 20);
    }
    while !server.turn(stop.as_fd())? {
        readiness.tell("WATCHDOG=1");
    }
    readiness.tell("STOPPING=1");
    server.say_goodbye();
    log!("stopped");
    Ok(())
}

/// A connection's number.
type Token = u64;

/// What a ready file belongs to.
#[derive(Clone, Copy)]
enum Source {
    Stop,
    Listening,
    Auditor,
    Peer(Token),
    /// The sandbox that the shim of this connection announced.
    Sandbox(Token),
    /// The sandbox of a tenant whose shim is gone.
    Orphan(LeaseId),
}

struct Server {
    clock: Clock,
    core: Core,
    place: Place,
    auditor: Auditor,
    peers: BTreeMap<Token, Peer>,
    next_token: Token,
    most_peers: usize,
    /// Connections by lease.
    shims: BTreeMap<LeaseId, Token>,
    sessions: BTreeMap<LeaseId, Token>,
    /// Sandboxes whose shim is gone, until they have ended.
    orphans: BTreeMap<LeaseId, OwnedFd>,
    /// How long each step of a handshake may take.
    deadline: Duration,
    uids: gpuslice_config::UidRange,
    /// New containers are held back until then, while containers of before are not adopted.
    settled_at: Duration,
    accept_at: Duration,
    rounds: rounds::Rounds,
}

impl Server {
    fn new(config: &Config, backend: Box<dyn Backend>, place: Place) -> io::Result<Server> {
        // Larger than any number given out before on this node, whatever the clock's resolution.
        let first_lease = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros();
        let first_lease = u64::try_from(first_lease).unwrap_or(1);
        let mut core = Core::new(backend.driver().to_owned(), backend.cards(), config.uids(), first_lease);
        for (uid, pid) in uids_in_use(config.uids()) {
            log!("process {pid} has uid {uid} of the sandboxes' range: waiting for its shim");
            core.quarantine(uid);
        }
        let most_peers = usize::try_from(config.sandboxes.uid_count).unwrap_or(usize::MAX);
        Ok(Server {
            clock: Clock::start(),
            core,
            place,
            auditor: Auditor::start(backend)?,
            peers: BTreeMap::new(),
            next_token: 0,
            most_peers: most_peers.saturating_mul(2).saturating_add(MOST_NEWCOMERS),
            shims: BTreeMap::new(),
            sessions: BTreeMap::new(),
            orphans: BTreeMap::new(),
            deadline: config.deadline(),
            uids: config.uids(),
            settled_at: SETTLE.min(config.deadline() * 3 / 4),
            accept_at: Duration::ZERO,
            rounds: rounds::Rounds::new(config.audit_interval()),
        })
    }

    /// Waits for something and deals with it. True: stop.
    fn turn(&mut self, stop: BorrowedFd<'_>) -> Result<bool, RunError> {
        let (sources, ready) = self.wait(stop).map_err(system("poll"))?;
        let now = self.clock.now();
        for (source, ready) in sources.into_iter().zip(ready) {
            if ready == Ready::default() {
                continue;
            }
            match source {
                Source::Stop => return Ok(true),
                Source::Listening => self.accept(now),
                Source::Auditor => self.round_answered(now)?,
                Source::Peer(token) => self.serve(token, ready, now),
                Source::Sandbox(token) => self.sandbox_ended(token, now),
                Source::Orphan(lease) => {
                    self.orphans.remove(&lease);
                    self.core.sandbox_ended(lease);
                    self.rounds.hurry(now);
                }
            }
        }
        self.tick(now);
        Ok(false)
    }

    fn wait(&self, stop: BorrowedFd<'_>) -> io::Result<(Vec<Source>, Vec<Ready>)> {
        let now = self.clock.now();
        let (mut sources, mut wanted) = (Vec::new(), Vec::new());
        let mut add = |source, file, read, write| {
            sources.push(source);
            wanted.push(Wanted { file, read, write });
        };
        add(Source::Stop, stop, true, false);
        add(Source::Auditor, self.auditor.as_fd(), true, false);
        if now >= self.accept_at {
            add(Source::Listening, self.place.as_fd(), true, false);
        }
        for (token, peer) in &self.peers {
            add(Source::Peer(*token), peer.as_fd(), true, peer.sending());
            if let Phase::Shim(Shim { sandbox: Some(sandbox), .. }) = &peer.phase {
                add(Source::Sandbox(*token), sandbox.as_fd(), true, false);
            }
        }
        for (lease, sandbox) in &self.orphans {
            add(Source::Orphan(*lease), sandbox.as_fd(), true, false);
        }
        let ready = poll(&wanted, Some(self.clock.instant(self.next_event(now))))?;
        Ok((sources, ready))
    }

    /// When something is to be done though nobody asked.
    fn next_event(&self, now: Duration) -> Duration {
        let mut next = self.rounds.next_event().min(now + SIGN_OF_LIFE);
        if now < self.accept_at {
            next = next.min(self.accept_at);
        }
        for peer in self.peers.values() {
            if let Some((due, _)) = peer.due {
                next = next.min(due);
            }
            if matches!(peer.phase, Phase::Held(_)) {
                next = next.min(self.settled_at.max(now + Duration::from_millis(20)));
            }
        }
        next
    }

    fn accept(&mut self, now: Duration) {
        let socket = match self.place.listening().accept(Instant::now()) {
            Ok(socket) => socket,
            Err(error) if error.kind() == io::ErrorKind::TimedOut => return,
            Err(error) => {
                log!("can't accept a connection: {error}");
                self.accept_at = now + ACCEPT_PAUSE;
                return;
            }
        };
        let newcomers = self.peers.values().filter(|peer| matches!(peer.phase, Phase::New)).count();
        if self.peers.len() >= self.most_peers || newcomers >= MOST_NEWCOMERS {
            log!("a connection closed: {} open, {newcomers} of them silent", self.peers.len());
            return;
        }
        let Ok(credentials) = socket.peer() else { return };
        let token = self.next_token;
        self.next_token += 1;
        let mut peer = Peer::new(socket, credentials.pid, now);
        peer.due = Some((now + self.deadline, "first message"));
        self.peers.insert(token, peer);
        if credentials.uid != 0 {
            let detail = format!("uid {} connected, only uid 0 may", credentials.uid);
            self.refuse(token, Reason::NotRoot, detail, now);
        }
    }

    /// Reads and writes on a connection that is ready.
    fn serve(&mut self, token: Token, ready: Ready, now: Duration) {
        let Some(peer) = self.peers.get_mut(&token) else { return };
        if ready.writable
            && let Err(ended) = peer.flush()
        {
            return self.close(token, &ended, now);
        }
        if ready.readable || ready.closed {
            match peer.receive(now) {
                Ok(Some(message)) => {
                    if let Err(ended) = self.message(token, message, now) {
                        self.close(token, &ended, now);
                    }
                }
                Ok(None) => {}
                Err(ended) => self.close(token, &ended, now),
            }
        }
    }

    /// Deadlines, held registrations, pings, audits.
    fn tick(&mut self, now: Duration) {
        let late: Vec<(Token, &'static str)> = self
            .peers
            .iter()
            .filter_map(|(token, peer)| {
                peer.due.filter(|(due, _)| now >= *due).map(|(_, what)| (*token, what))
            })
            .collect();
        for (token, what) in late {
            self.close(token, &Ended::Late(what), now);
        }
        self.release_held(now);
        self.run_rounds(now);
    }

    /// Ends a connection and draws the consequences.
    fn close(&mut self, token: Token, ended: &Ended, now: Duration) {
        if let Some(peer) = self.peers.remove(&token) {
            self.left(token, peer.phase, peer.pid, ended, now);
        }
    }

    /// A peer has left this phase for good.
    fn left(&mut self, token: Token, phase: Phase, pid: u32, ended: &Ended, now: Duration) {
        match phase {
            Phase::Shim(shim) => {
                log!("lease {}: shim (pid {pid}): {ended}", shim.lease);
                self.shims.remove(&shim.lease);
                let sandbox_ended = shim.sandbox.is_none();
                self.core.closed(shim.lease, sandbox_ended);
                if let Some(sandbox) = shim.sandbox {
                    self.orphans.insert(shim.lease, sandbox);
                }
                if let Some(session) = self.sessions.remove(&shim.lease) {
                    self.peers.remove(&session);
                }
                self.rounds.hurry(now);
            }
            Phase::Sandbox(session) => {
                if self.sessions.get(&session.lease) == Some(&token) {
                    self.sessions.remove(&session.lease);
                }
                log!("lease {}: sandbox: {ended}", session.lease);
                if !matches!(ended, Ended::Closed) {
                    self.stop(session.lease, &format!("its sandbox broke the protocol: {ended}"));
                }
            }
            Phase::New | Phase::Held(_) => match ended {
                // A refusal has its own line.
                Ended::Closed | Ended::Misbehaved(_) => {}
                ended => log!("connection of pid {pid}: {ended}"),
            },
            Phase::Closing => {}
        }
    }

    /// The announced sandbox of a shim has ended; the shim will kill the container and close.
    fn sandbox_ended(&mut self, token: Token, now: Duration) {
        if let Some(Peer { phase: Phase::Shim(shim), .. }) = self.peers.get_mut(&token) {
            shim.sandbox = None;
            self.core.sandbox_ended(shim.lease);
            self.rounds.hurry(now);
        }
    }

    /// Orders the end of a tenant, once.
    fn stop(&mut self, lease: LeaseId, detail: &str) {
        let Some(peer) = self.shims.get(&lease).and_then(|token| self.peers.get_mut(token)) else { return };
        let Phase::Shim(shim) = &mut peer.phase else { return };
        if shim.stopped {
            return;
        }
        shim.stopped = true;
        log!("lease {lease}: stop: {detail}");
        let detail = detail.chars().take(400).collect();
        // A shim that doesn't take the order will find its queue full and be closed.
        peer.tell_shim(&SchedulerToShim::Stop { detail }).ok();
    }

    /// Refuses and ends a connection; a shim loses its lease.
    fn refuse(&mut self, token: Token, reason: Reason, detail: String, now: Duration) {
        let deadline = self.deadline;
        let Some(peer) = self.peers.get_mut(&token) else { return };
        let pid = peer.pid;
        log!("connection of pid {pid}: refused: {reason}: {detail}");
        let detail: String = detail.chars().take(400).collect();
        let told = peer.tell_shim(&SchedulerToShim::Refused { reason, detail: detail.clone() });
        let phase = peer.finish(now + deadline);
        if told.is_err() {
            self.peers.remove(&token);
        }
        self.left(token, phase, pid, &Ended::Misbehaved(detail), now);
    }

    /// Those who wait for an answer get one; tenants run on and their shims dial again.
    fn say_goodbye(&mut self) {
        let waiting = |peer: &Peer| matches!(peer.phase, Phase::New | Phase::Held(_));
        let tokens: Vec<Token> =
            self.peers.iter().filter(|(_, peer)| waiting(peer)).map(|(token, _)| *token).collect();
        let now = self.clock.now();
        for token in tokens {
            self.refuse(token, Reason::Stopping, "try again when it is back".to_owned(), now);
        }
    }
}
