//! Moving bytes from one end to the other until the source ends.
//!
//! Between pipes the kernel moves the pages; terminals and files are copied. A pump that can't write waits; it
//! never drops a byte and never spins.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use nix::errno::Errno;
use nix::fcntl::{SpliceFFlags, splice};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tokio::io::unix::AsyncFd;

use super::console::Console;

const CHUNK: usize = 64 << 10;
const CONSOLE_CHUNK: usize = 8 << 10;

/// Where bytes go.
pub(super) enum Target {
    /// A pipe or fifo that doesn't block.
    Pipe(AsyncFd<OwnedFd>),
    /// A file: written by a thread that may block.
    File(Arc<File>),
}

fn ready(file: &OwnedFd, event: PollFlags) -> bool {
    let mut one = [PollFd::new(file.as_fd(), event)];
    let polled = poll(&mut one, PollTimeout::ZERO);
    let [one] = one;
    polled.is_ok() && one.any().unwrap_or(false)
}

/// From a pipe to a target.
pub(super) async fn from_pipe(source: AsyncFd<OwnedFd>, target: Target) {
    // A source or target that fails has ended: there is nobody to tell.
    match target {
        Target::Pipe(target) => drop(between_pipes(&source, &target).await),
        Target::File(target) => drop(pipe_to_file(&source, target).await),
    }
}

async fn between_pipes(source: &AsyncFd<OwnedFd>, target: &AsyncFd<OwnedFd>) -> io::Result<()> {
    loop {
        let mut readable = source.readable().await?;
        let mut writable = target.writable().await?;
        let flags = SpliceFFlags::SPLICE_F_NONBLOCK | SpliceFFlags::SPLICE_F_MOVE;
        match splice(source.get_ref(), None, target.get_ref(), None, CHUNK, flags) {
            Ok(0) => return Ok(()),
            Ok(_) => tokio::task::consume_budget().await,
            Err(Errno::EINTR) => {}
            Err(Errno::EAGAIN) => {
                if !ready(source.get_ref(), PollFlags::POLLIN) {
                    readable.clear_ready();
                }
                if !ready(target.get_ref(), PollFlags::POLLOUT) {
                    writable.clear_ready();
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
}

async fn read(source: &AsyncFd<OwnedFd>, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        let mut guard = source.readable().await?;
        let result = guard.try_io(|file| Ok(nix::unistd::read(file.get_ref(), buffer)?));
        match result {
            Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(result) => return result,
            Err(_would_block) => {}
        }
    }
}

async fn write_all(target: &AsyncFd<OwnedFd>, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let mut guard = target.writable().await?;
        let result = guard.try_io(|file| Ok(nix::unistd::write(file.get_ref(), bytes)?));
        match result {
            Ok(Ok(count)) => bytes = bytes.get(count..).unwrap_or_default(),
            Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(Err(error)) => return Err(error),
            Err(_would_block) => {}
        }
    }
    Ok(())
}

async fn to_file(target: &Arc<File>, bytes: Vec<u8>) -> io::Result<Vec<u8>> {
    let target = target.clone();
    let written = tokio::task::spawn_blocking(move || (&*target).write_all(&bytes).map(|()| bytes)).await;
    written.unwrap_or_else(|_| Err(io::Error::other("the writing thread failed")))
}

async fn pipe_to_file(source: &AsyncFd<OwnedFd>, target: Arc<File>) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK];
    loop {
        buffer.resize(CHUNK, 0);
        let count = read(source, &mut buffer).await?;
        if count == 0 {
            return Ok(());
        }
        buffer.truncate(count);
        buffer = to_file(&target, buffer).await?;
    }
}

/// From a terminal to a target; without one, what the process writes is read and dropped, so that it goes on.
pub(super) async fn from_console(console: Arc<Console>, target: Option<Target>) {
    let mut buffer = vec![0; CONSOLE_CHUNK];
    // The last process that had the terminal open is gone: EIO.
    while let Ok(count) = read(console.file(), &mut buffer).await {
        let bytes = buffer.get(..count).unwrap_or_default();
        let written = match &target {
            _ if bytes.is_empty() => return,
            None => Ok(()),
            Some(Target::Pipe(pipe)) => write_all(pipe, bytes).await,
            Some(Target::File(file)) => to_file(file, bytes.to_vec()).await.map(drop),
        };
        if written.is_err() {
            return;
        }
    }
}

/// From a client's fifo to a terminal.
pub(super) async fn to_console(source: AsyncFd<OwnedFd>, console: Arc<Console>) {
    let mut buffer = vec![0; CONSOLE_CHUNK];
    while let Ok(count) = read(&source, &mut buffer).await {
        let bytes = buffer.get(..count).unwrap_or_default();
        if bytes.is_empty() || write_all(console.file(), bytes).await.is_err() {
            return;
        }
    }
}
