//! Scheduler sockets that misbehave on purpose.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, accept, bind, listen, socket};

/// What the socket does with a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Script {
    /// Takes the connection and never answers.
    Silent,
    /// Takes the connection and closes it.
    Closes,
    /// Answers with bytes that are no message.
    Babbles,
}

/// A scripted scheduler; ends when it is dropped.
#[derive(Debug)]
pub struct Scripted {
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Scripted {
    /// Listens at `path`.
    ///
    /// # Errors
    /// When it can't.
    pub fn listen(path: &Path, script: Script) -> Result<Self> {
        let listener = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)
            .context("make a scripted socket")?;
        bind(listener.as_raw_fd(), &UnixAddr::new(path)?)
            .with_context(|| format!("bind {}", path.display()))?;
        listen(&listener, Backlog::new(8)?).context("listen")?;
        let stop = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&stop);
        let thread = std::thread::spawn(move || serve(&listener, script, &flag));
        Ok(Scripted { stop, thread: Some(thread) })
    }
}

fn serve(listener: &OwnedFd, script: Script, stop: &AtomicBool) {
    let mut kept = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let mut waiting = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
        if nix::poll::poll(&mut waiting, PollTimeout::from(50_u8)).unwrap_or(0) == 0 {
            continue;
        }
        let Ok(peer) = accept(listener) else { return };
        match script {
            Script::Silent => kept.push(peer),
            Script::Closes => drop(peer),
            Script::Babbles => {
                if nix::unistd::write(&peer, &[0x5a; 64]).is_err() {
                    eprintln!("harness: a scripted peer went away");
                }
                kept.push(peer);
            }
        }
    }
}

impl Drop for Scripted {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            eprintln!("harness: a scripted scheduler failed");
        }
    }
}
