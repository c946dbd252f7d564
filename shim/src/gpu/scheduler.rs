//! The shim's side of the link to the node daemon.
//!
//! Owns: connecting, registering, announcing the sandbox. Trusts: a scheduler that runs as root at the
//! configured socket. Promises: each step ends by its deadline; no lease, no start. Failure: an error that names
//! the socket and the reason; the connection is closed, and with it what the scheduler held for it.

use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use gpuslice_proto::LeaseId;
use gpuslice_proto::{
    FrameError, Lease, MAX_FRAME, Reason, Receiver, Register, SchedulerToShim, Sender, ShimToScheduler,
};
use gpuslice_sys::Socket;

/// Time after which an announcement that nobody acknowledged is sent again.
const AGAIN: Duration = Duration::from_millis(300);

/// Why there is no lease.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SchedulerError {
    #[error("can't reach gpuslice-scheduler at {}: is it running? GPU containers start only with it", socket.display())]
    Connect { socket: PathBuf, source: std::io::Error },
    #[error("gpuslice-scheduler at {} gave no answer to {step} within {seconds} s", socket.display())]
    Silent { socket: PathBuf, step: &'static str, seconds: f32 },
    #[error("gpuslice-scheduler at {} refused {step}: {reason}: {detail}", socket.display())]
    Refused { socket: PathBuf, step: &'static str, reason: Reason, detail: String },
    #[error("gpuslice-scheduler at {} closed the connection at {step}", socket.display())]
    Closed { socket: PathBuf, step: &'static str },
    #[error("gpuslice-scheduler at {}: {step}", socket.display())]
    Io { socket: PathBuf, step: &'static str, source: std::io::Error },
    #[error("gpuslice-scheduler at {}: {step}", socket.display())]
    Frame { socket: PathBuf, step: &'static str, source: FrameError },
    #[error("gpuslice-scheduler at {} gave an answer to {step} that doesn't belong there", socket.display())]
    Unexpected { socket: PathBuf, step: &'static str },
    #[error("the socket {} belongs to uid {uid}, not to root's gpuslice-scheduler", socket.display())]
    Impostor { socket: PathBuf, uid: u32 },
    #[error("gpuslice-scheduler stops the container: {detail}")]
    Stopped { detail: String },
}

/// A connection of the shim to the scheduler, for one container.
#[derive(Debug)]
pub(crate) struct Connection {
    path: PathBuf,
    socket: Socket,
    sender: Sender<ShimToScheduler>,
    receiver: Receiver<SchedulerToShim>,
    patience: Duration,
}

impl Connection {
    /// Connects; each later step may take `patience`.
    ///
    /// # Errors
    /// [`SchedulerError::Connect`], or a peer that isn't root.
    pub(crate) fn open(path: &Path, patience: Duration) -> Result<Connection, SchedulerError> {
        let connect = |source| SchedulerError::Connect { socket: path.to_owned(), source };
        let socket = Socket::connect(path, Instant::now() + patience).map_err(connect)?;
        let peer = socket.peer().map_err(connect)?;
        if peer.uid != 0 {
            return Err(SchedulerError::Impostor { socket: path.to_owned(), uid: peer.uid });
        }
        let (sender, receiver) = (Sender::default(), Receiver::default());
        Ok(Connection { path: path.to_owned(), socket, sender, receiver, patience })
    }

    /// Asks for a lease, or to adopt the one that the register names.
    ///
    /// # Errors
    /// A refusal, or no answer in time.
    pub(crate) fn register(&mut self, register: Register) -> Result<Lease, SchedulerError> {
        let step = "the registration";
        self.send(&ShimToScheduler::Register(register), &[], step)?;
        match self.answer(step, Instant::now() + self.patience)? {
            SchedulerToShim::Granted(lease) => Ok(lease),
            other => Err(self.not_expected(step, other)),
        }
    }

    /// Announces the sandbox, again and again until it is acknowledged.
    ///
    /// # Errors
    /// No acknowledgement in time, or an order to stop.
    pub(crate) fn announce(&mut self, pid: u32, pidfd: BorrowedFd<'_>) -> Result<(), SchedulerError> {
        let step = "the announcement of the sandbox";
        let deadline = Instant::now() + self.patience;
        loop {
            self.send(&ShimToScheduler::SandboxStarted { pid }, &[pidfd], step)?;
            match self.answer(step, deadline.min(Instant::now() + AGAIN)) {
                Ok(SchedulerToShim::Acknowledged) => return Ok(()),
                Ok(other) => return Err(self.not_expected(step, other)),
                Err(SchedulerError::Silent { .. }) if Instant::now() < deadline => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// What the scheduler says next; for use when the socket is readable.
    ///
    /// # Errors
    /// The connection can't be used any more.
    pub(crate) fn next(&mut self) -> Result<SchedulerToShim, SchedulerError> {
        self.answer("a message", Instant::now())
    }

    fn send(
        &mut self,
        message: &ShimToScheduler,
        files: &[BorrowedFd<'_>],
        step: &'static str,
    ) -> Result<(), SchedulerError> {
        let socket = || self.path.clone();
        let frame = self.sender.encode(message).map_err(|source| SchedulerError::Frame {
            socket: socket(),
            step,
            source,
        })?;
        self.socket.send(&frame, files, Instant::now() + self.patience).map_err(|error| match error.kind() {
            ErrorKind::TimedOut => self.silent(step),
            ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => {
                SchedulerError::Closed { socket: socket(), step }
            }
            _ => SchedulerError::Io { socket: socket(), step, source: error },
        })
    }

    fn answer(&mut self, step: &'static str, deadline: Instant) -> Result<SchedulerToShim, SchedulerError> {
        let mut buffer = [0; MAX_FRAME];
        let (length, _) = self.socket.recv(&mut buffer, 0, deadline).map_err(|error| match error.kind() {
            ErrorKind::TimedOut => self.silent(step),
            _ => SchedulerError::Io { socket: self.path.clone(), step, source: error },
        })?;
        if length == 0 {
            return Err(SchedulerError::Closed { socket: self.path.clone(), step });
        }
        self.receiver
            .decode(buffer.get(..length).unwrap_or_default(), 0)
            .map_err(|source| SchedulerError::Frame { socket: self.path.clone(), step, source })
    }

    fn silent(&self, step: &'static str) -> SchedulerError {
        SchedulerError::Silent { socket: self.path.clone(), step, seconds: self.patience.as_secs_f32() }
    }

    fn not_expected(&self, step: &'static str, answer: SchedulerToShim) -> SchedulerError {
        let socket = self.path.clone();
        match answer {
            SchedulerToShim::Refused { reason, detail } => {
                SchedulerError::Refused { socket, step, reason, detail }
            }
            SchedulerToShim::Stop { detail } => SchedulerError::Stopped { detail },
            SchedulerToShim::Granted(_) | SchedulerToShim::Acknowledged => {
                SchedulerError::Unexpected { socket, step }
            }
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// A second connection, which will be the sandbox's: from here on only the sandbox speaks on it.
///
/// # Errors
/// As [`Connection::open`] and [`Connection::register`].
pub(crate) fn open_for_sandbox(
    path: &Path,
    lease: LeaseId,
    patience: Duration,
) -> Result<OwnedFd, SchedulerError> {
    let step = "the sandbox's connection";
    let mut connection = Connection::open(path, patience)?;
    connection.send(&ShimToScheduler::OpenSandbox { lease }, &[], step)?;
    match connection.answer(step, Instant::now() + patience)? {
        SchedulerToShim::Acknowledged => Ok(connection.socket.into_fd()),
        other => Err(connection.not_expected(step, other)),
    }
}

#[cfg(test)]
mod tests;
