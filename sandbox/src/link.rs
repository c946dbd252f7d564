//! The sandbox's two sockets: to the shim and to the scheduler.
//!
//! Owns: both, the order of the frames on them, and the requests that wait for the shim's answer. Trusts: the
//! shim; of the scheduler only that it sends frames. Lock order: the sender's lock is held over one send; the
//! lock of the waiting requests is never held across anything else. Failure: the shim's socket closing ends
//! the process; the scheduler's closing is forgotten until a new one comes.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use gpuslice_proto::{
    Carries, FrameError, GpuUsage, MAX_FRAME, PrivilegedRequest, PrivilegedResult, Receiver,
    SandboxToScheduler, SandboxToShim, SchedulerToSandbox, Sender, ShimToSandbox,
};
use gpuslice_sys::socket::{MAX_FILES, Socket};

use crate::gate::locked;

/// Longest wait for room in a socket's queue.
const SEND_DEADLINE: Duration = Duration::from_secs(5);

/// Why a link failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError {
    #[error("socket")]
    Socket(#[source] io::Error),
    #[error("frame")]
    Frame(#[source] FrameError),
    #[error("the other side closed the socket")]
    Closed,
    #[error("no answer within {0:?}")]
    Late(Duration),
}

fn send<M: Carries>(
    socket: &Socket,
    sender: &mut Sender<M>,
    message: &M,
    files: &[BorrowedFd<'_>],
    wait: Duration,
) -> Result<(), LinkError> {
    let frame = sender.encode(message).map_err(LinkError::Frame)?;
    socket.send(&frame, files, Instant::now() + wait).map_err(LinkError::Socket)
}

fn receive<M: Carries>(
    socket: &Socket,
    receiver: &mut Receiver<M>,
    most_files: usize,
    deadline: Instant,
) -> Result<(M, Vec<OwnedFd>), LinkError> {
    let mut buf = [0; MAX_FRAME];
    let (length, files) = socket.recv(&mut buf, most_files, deadline).map_err(LinkError::Socket)?;
    if length == 0 {
        return Err(LinkError::Closed);
    }
    let frame = buf.get(..length).unwrap_or_default();
    let message = receiver.decode(frame, files.len()).map_err(LinkError::Frame)?;
    Ok((message, files))
}

/// The link to the shim.
#[derive(Debug)]
pub(crate) struct Shim {
    socket: Socket,
    sender: Mutex<Sender<SandboxToShim>>,
    waiting: Mutex<Waiting>,
    answered: Condvar,
}

type Answer = (PrivilegedResult, Vec<OwnedFd>);

#[derive(Debug, Default)]
struct Waiting {
    last: u32,
    answers: HashMap<u32, VecDeque<Answer>>,
}

/// A request on its way. Dropped, its answers are no longer waited for.
#[derive(Debug)]
pub(crate) struct Request<'a> {
    shim: &'a Shim,
    number: u32,
}

impl Shim {
    pub(crate) fn new(socket: Socket) -> Shim {
        Shim { socket, sender: Mutex::default(), waiting: Mutex::default(), answered: Condvar::new() }
    }

    pub(crate) fn send(&self, message: &SandboxToShim) -> Result<(), LinkError> {
        send(&self.socket, &mut locked(&self.sender), message, &[], SEND_DEADLINE)
    }

    /// The next message. One thread receives.
    pub(crate) fn receive(
        &self,
        receiver: &mut Receiver<ShimToSandbox>,
        deadline: Instant,
    ) -> Result<(ShimToSandbox, Vec<OwnedFd>), LinkError> {
        receive(&self.socket, receiver, MAX_FILES, deadline)
    }

    /// Asks something of the shim.
    pub(crate) fn ask(
        &self,
        ask: PrivilegedRequest,
        files: &[BorrowedFd<'_>],
    ) -> Result<Request<'_>, LinkError> {
        let request = self.request();
        request.send(ask, files)?;
        Ok(request)
    }

    /// A request that has its number but was not sent yet.
    pub(crate) fn request(&self) -> Request<'_> {
        let mut waiting = locked(&self.waiting);
        waiting.last = waiting.last.wrapping_add(1);
        let number = waiting.last;
        waiting.answers.insert(number, VecDeque::new());
        Request { shim: self, number }
    }

    /// Hands an answer to whoever waits for it; the files of one that nobody waits for are closed.
    pub(crate) fn deliver(&self, number: u32, answer: Answer) {
        if let Some(answers) = locked(&self.waiting).answers.get_mut(&number) {
            answers.push_back(answer);
            self.answered.notify_all();
        }
    }
}

impl AsFd for Shim {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Request<'_> {
    /// Sends it.
    pub(crate) fn send(&self, ask: PrivilegedRequest, files: &[BorrowedFd<'_>]) -> Result<(), LinkError> {
        let message = SandboxToShim::Request { request: self.number, ask };
        send(&self.shim.socket, &mut locked(&self.shim.sender), &message, files, SEND_DEADLINE)
    }

    /// Its number on the socket.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// Waits for the next answer.
    pub(crate) fn answer(&self, wait: Duration) -> Result<Answer, LinkError> {
        let deadline = Instant::now() + wait;
        let mut waiting = locked(&self.shim.waiting);
        loop {
            if let Some(answer) = waiting.answers.get_mut(&self.number).and_then(VecDeque::pop_front) {
                return Ok(answer);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(LinkError::Late(wait));
            }
            let (next, _) =
                self.shim.answered.wait_timeout(waiting, left).unwrap_or_else(PoisonError::into_inner);
            waiting = next;
        }
    }
}

impl Drop for Request<'_> {
    fn drop(&mut self) {
        locked(&self.shim.waiting).answers.remove(&self.number);
    }
}

/// The link to the scheduler, used by one thread. May be absent.
#[derive(Debug, Default)]
pub(crate) struct Scheduler {
    connection: Option<Connection>,
}

#[derive(Debug)]
struct Connection {
    socket: Socket,
    sender: Sender<SandboxToScheduler>,
    receiver: Receiver<SchedulerToSandbox>,
    reported: Option<Vec<GpuUsage>>,
}

impl Scheduler {
    /// Takes a new connection in the place of the old one.
    pub(crate) fn connect(&mut self, file: OwnedFd) {
        self.connection = Some(Connection {
            socket: Socket::from_fd(file),
            sender: Sender::default(),
            receiver: Receiver::default(),
            reported: None,
        });
    }

    /// The socket, for poll.
    pub(crate) fn file(&self) -> Option<BorrowedFd<'_>> {
        self.connection.as_ref().map(|connection| connection.socket.as_fd())
    }

    /// Forgets a connection that failed.
    pub(crate) fn disconnect(&mut self) {
        self.connection = None;
    }

    /// Answers a ping that has arrived.
    pub(crate) fn serve(&mut self, gpus: Vec<GpuUsage>, refused: u64) -> Result<(), LinkError> {
        let Some(connection) = &mut self.connection else { return Ok(()) };
        let (message, _) = receive(&connection.socket, &mut connection.receiver, 0, Instant::now())?;
        let SchedulerToSandbox::Ping { ping } = message;
        connection.report(ping, gpus, refused)
    }

    /// Reports the ledger if it isn't as last reported.
    pub(crate) fn report(&mut self, gpus: Vec<GpuUsage>, refused: u64) -> Result<(), LinkError> {
        match &mut self.connection {
            Some(connection) if connection.reported.as_ref() != Some(&gpus) => {
                connection.report(0, gpus, refused)
            }
            _ => Ok(()),
        }
    }
}

impl Connection {
    fn report(&mut self, ping: u32, gpus: Vec<GpuUsage>, refused: u64) -> Result<(), LinkError> {
        let message = SandboxToScheduler::Usage { ping, gpus: gpus.clone(), refused };
        // The scheduler's queue being full is the scheduler's trouble: don't wait for it.
        send(&self.socket, &mut self.sender, &message, &[], Duration::ZERO)?;
        self.reported = Some(gpus);
        Ok(())
    }
}
