//! One connection: its phase, its queue, its budget.
//!
//! ```text
//!   New ──Register──> Held (until a restart has settled) ──> Shim(lease) ──SandboxStarted──> ...
//!    ├──OpenSandbox──> Sandbox(lease)
//!    └──Status───────> Closing (when the rows are out)        any refusal: Closing
//! ```
//!
//! A phase decides which messages are legal, how many files may come, how much may be sent. Only a shim's
//! connection takes files; on every other one the kernel drops them. A frame that is wrong in any way closes
//! the connection; a full queue closes it too, and never blocks the loop.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use gpuslice_proto::{
    Carries, FrameError, LeaseId, Link, MAX_FRAME, Receiver, Register, SandboxToScheduler,
    SchedulerToSandbox, SchedulerToShim, SchedulerToTool, Sender, ShimToScheduler, ToolToScheduler,
    peek_link,
};
use gpuslice_sys::Socket;
use nix::sys::socket::{Shutdown, shutdown};

use crate::budget::Budget;

/// Frames a second and burst of a shim or a newcomer: a handful of messages in its whole life.
const SHIM_FRAMES: (u32, u32) = (10, 20);
/// Of a sandbox: ten reports a second and the answers to pings, twice over.
const SANDBOX_FRAMES: (u32, u32) = (20, 60);
/// Shortest time between two pings: audits can follow each other much faster.
const PING_PAUSE: Duration = Duration::from_millis(800);
/// Frames waiting to be taken by a peer.
const QUEUE: usize = 64;
/// The same for the command line tool: a row per tenant and GPU.
const TOOL_QUEUE: usize = 16 * 1024;

/// What a connection is.
#[derive(Debug)]
pub(crate) enum Phase {
    /// Nothing came yet.
    New,
    /// Registered too early after a restart: answered when it has settled.
    Held(Register),
    /// A container's shim.
    Shim(Shim),
    /// A container's sandbox.
    Sandbox(Session),
    /// Said everything: closed when the other side closes, or when it is due. Closing a socket with unread
    /// messages would make the kernel drop the last answer.
    Closing,
}

/// State of a shim's connection.
#[derive(Debug)]
pub(crate) struct Shim {
    pub(crate) lease: LeaseId,
    /// The announced sandbox, until it has ended.
    pub(crate) sandbox: Option<OwnedFd>,
    /// A sandbox was announced.
    pub(crate) announced: bool,
    /// A stop was ordered.
    pub(crate) stopped: bool,
}

/// State of a sandbox's connection.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) lease: LeaseId,
    receiver: Receiver<SandboxToScheduler>,
    sender: Sender<SchedulerToSandbox>,
    last_ping: u32,
    pinged_last: Option<Duration>,
    /// When the unanswered ping was sent.
    pub(crate) pinged: Option<Duration>,
}

impl Session {
    pub(crate) fn new(lease: LeaseId) -> Session {
        let (receiver, sender) = (Receiver::default(), Sender::default());
        Session { lease, receiver, sender, last_ping: 0, pinged_last: None, pinged: None }
    }

    /// Whether this answers the ping that is out.
    pub(crate) fn answered(&mut self, ping: u32) -> bool {
        ping == self.last_ping && self.pinged.take().is_some()
    }
}

/// A message of any peer.
#[derive(Debug)]
pub(crate) enum Message {
    Shim(ShimToScheduler, Option<OwnedFd>),
    Sandbox(SandboxToScheduler),
    Tool(ToolToScheduler),
}

/// Why a connection ends.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Ended {
    #[error("closed")]
    Closed,
    #[error(transparent)]
    Frame(FrameError),
    #[error("more messages than allowed")]
    Budget,
    #[error("doesn't take its messages: {0} waiting")]
    QueueFull(usize),
    #[error(transparent)]
    Socket(io::Error),
    #[error("{0}")]
    Misbehaved(String),
    #[error("no {0} in time")]
    Late(&'static str),
}

/// One connection.
#[derive(Debug)]
pub(crate) struct Peer {
    socket: Socket,
    /// Process that connected.
    pub(crate) pid: u32,
    pub(crate) phase: Phase,
    /// When the step that is due must have happened, and its name.
    pub(crate) due: Option<(Duration, &'static str)>,
    receiver: Receiver<ShimToScheduler>,
    sender: Sender<SchedulerToShim>,
    tool: Sender<SchedulerToTool>,
    queue: VecDeque<Vec<u8>>,
    queue_limit: usize,
    budget: Budget,
}

impl Peer {
    pub(crate) fn new(socket: Socket, pid: u32, now: Duration) -> Peer {
        Peer {
            socket,
            pid,
            phase: Phase::New,
            due: None,
            receiver: Receiver::default(),
            sender: Sender::default(),
            tool: Sender::default(),
            queue: VecDeque::new(),
            queue_limit: QUEUE,
            budget: Budget::new(now, SHIM_FRAMES.0, SHIM_FRAMES.1),
        }
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Something waits to be sent.
    pub(crate) fn sending(&self) -> bool {
        !self.queue.is_empty()
    }

    /// From now on this is a sandbox's connection.
    pub(crate) fn become_sandbox(&mut self, lease: LeaseId, now: Duration) {
        self.phase = Phase::Sandbox(Session::new(lease));
        self.budget = Budget::new(now, SANDBOX_FRAMES.0, SANDBOX_FRAMES.1);
        self.due = None;
    }

    /// Receives one message, if there is one.
    pub(crate) fn receive(&mut self, now: Duration) -> Result<Option<Message>, Ended> {
        let mut buffer = [0; MAX_FRAME + 1];
        let most_files = usize::from(matches!(self.phase, Phase::Shim(_)));
        let (length, files) = match self.socket.recv(&mut buffer, most_files, Instant::now()) {
            Ok((0, _)) => return Err(Ended::Closed),
            Ok(received) => received,
            Err(error) if error.kind() == io::ErrorKind::TimedOut => return Ok(None),
            Err(error) => return Err(Ended::Socket(error)),
        };
        if !self.budget.spend(now) {
            return Err(Ended::Budget);
        }
        if matches!(self.phase, Phase::Closing) {
            return Ok(None);
        }
        self.decode(buffer.get(..length).unwrap_or_default(), files).map(Some)
    }

    fn decode(&mut self, frame: &[u8], files: Vec<OwnedFd>) -> Result<Message, Ended> {
        let count = files.len();
        match &mut self.phase {
            Phase::New => match peek_link(frame).map_err(Ended::Frame)? {
                Link::Scheduler => {
                    self.receiver.decode(frame, count).map(|message| Message::Shim(message, None))
                }
                Link::Tool => Receiver::default().decode(frame, count).map(Message::Tool),
                Link::SandboxScheduler | Link::ShimSandbox => Err(FrameError::Malformed),
            },
            Phase::Shim(_) => {
                let message = self.receiver.decode(frame, count);
                message.map(|message| Message::Shim(message, files.into_iter().next()))
            }
            Phase::Sandbox(session) => session.receiver.decode(frame, count).map(Message::Sandbox),
            Phase::Held(_) => {
                return Err(Ended::Misbehaved("a message before the answer to the last".into()));
            }
            Phase::Closing => return Err(Ended::Closed),
        }
        .map_err(Ended::Frame)
    }

    /// Queues a message for a shim.
    pub(crate) fn tell_shim(&mut self, message: &SchedulerToShim) -> Result<(), Ended> {
        let frame = self.sender.encode(message).map_err(Ended::Frame)?;
        self.push(frame)
    }

    /// Queues a row for the command line tool.
    pub(crate) fn tell_tool(&mut self, message: &SchedulerToTool) -> Result<(), Ended> {
        self.queue_limit = TOOL_QUEUE;
        let frame = self.tool.encode(message).map_err(Ended::Frame)?;
        self.push(frame)
    }

    /// Asks a sandbox for a report, unless one is due already or was asked for just now.
    pub(crate) fn ping(&mut self, now: Duration) -> Result<(), Ended> {
        let Phase::Sandbox(session) = &mut self.phase else { return Ok(()) };
        let just_now = session.pinged_last.is_some_and(|last| now.saturating_sub(last) < PING_PAUSE);
        if session.pinged.is_some() || just_now {
            return Ok(());
        }
        session.last_ping = session.last_ping.wrapping_add(1).max(1);
        session.pinged = Some(now);
        session.pinged_last = Some(now);
        let message = SchedulerToSandbox::Ping { ping: session.last_ping };
        let frame = session.sender.encode(&message).map_err(Ended::Frame)?;
        self.push(frame)
    }

    fn push(&mut self, frame: Vec<u8>) -> Result<(), Ended> {
        if self.queue.len() >= self.queue_limit {
            return Err(Ended::QueueFull(self.queue.len()));
        }
        self.queue.push_back(frame);
        self.flush()
    }

    /// Sends what the peer takes now.
    pub(crate) fn flush(&mut self) -> Result<(), Ended> {
        while let Some(frame) = self.queue.front() {
            match self.socket.send(frame, &[], Instant::now()) {
                Ok(()) => drop(self.queue.pop_front()),
                Err(error) if error.kind() == io::ErrorKind::TimedOut => return Ok(()),
                Err(error)
                    if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) =>
                {
                    return Err(Ended::Closed);
                }
                Err(error) => return Err(Ended::Socket(error)),
            }
        }
        self.end_of_stream();
        Ok(())
    }

    /// Nothing more will be sent: the other side sees the end behind the last message.
    fn end_of_stream(&self) {
        if matches!(self.phase, Phase::Closing) {
            // Fails only where the connection is gone already.
            shutdown(self.socket.as_fd().as_raw_fd(), Shutdown::Write).ok();
        }
    }

    /// Only what is queued goes out from now on, and that by `due`.
    pub(crate) fn finish(&mut self, due: Duration) -> Phase {
        let phase = std::mem::replace(&mut self.phase, Phase::Closing);
        self.due = Some((due, "end of the connection"));
        if self.queue.is_empty() {
            self.end_of_stream();
        }
        phase
    }
}

/// Only messages of ours go through [`Peer`]: each is of one link.
const _: () = assert!(matches!(<SchedulerToSandbox as Carries>::LINK, Link::SandboxScheduler));
