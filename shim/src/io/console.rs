//! A process's terminal: the socket on which the runtime sends it, and its size.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::termios::{Winsize, tcsetwinsize};
use tokio::io::unix::AsyncFd;
use tokio::net::{UnixListener, UnixStream};

use super::IoError;

/// The runtime has sent the terminal before it ends; this is for one that didn't.
pub(super) const DEADLINE: Duration = Duration::from_secs(10);

static NEXT: AtomicU64 = AtomicU64::new(0);

/// The master side of a terminal.
pub(super) struct Console(AsyncFd<OwnedFd>);

impl Console {
    pub(super) fn new(master: AsyncFd<OwnedFd>) -> Console {
        Console(master)
    }

    pub(super) fn file(&self) -> &AsyncFd<OwnedFd> {
        &self.0
    }

    pub(super) fn resize(&self, width: u16, height: u16) -> Result<(), IoError> {
        let size = Winsize { ws_row: height, ws_col: width, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(self.0.get_ref(), size).map_err(|e| IoError::Resize(e.into()))
    }
}

/// A socket in the shim's root-only directory; gone when dropped.
pub(crate) struct ConsoleSocket {
    path: PathBuf,
    listener: UnixListener,
}

impl ConsoleSocket {
    /// A socket of its own in `directory`.
    pub(crate) fn new(directory: &Path) -> Result<ConsoleSocket, IoError> {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = directory.join(format!("tty-{}-{number}", std::process::id()));
        let listener = UnixListener::bind(&path)
            .map_err(|source| IoError::ConsoleSocket { path: path.clone(), source })?;
        Ok(ConsoleSocket { path, listener })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The terminal that the runtime sends.
    pub(crate) async fn receive(&self) -> Result<OwnedFd, IoError> {
        let received = tokio::time::timeout(DEADLINE, async {
            let (stream, _) = self.listener.accept().await?;
            receive_file(&stream).await
        });
        match received.await {
            Ok(Ok(Some(file))) => Ok(file),
            Ok(Ok(None)) | Err(_) => Err(IoError::NoConsole),
            Ok(Err(source)) => Err(IoError::ConsoleSocket { path: self.path.clone(), source }),
        }
    }
}

async fn receive_file(stream: &UnixStream) -> io::Result<Option<OwnedFd>> {
    loop {
        stream.readable().await?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        // The message's bytes are the terminal's name, which nobody needs.
        let mut name = [0; 4096];
        let received = stream.try_io(tokio::io::Interest::READABLE, || {
            let mut bytes = [IoSliceMut::new(&mut name)];
            Ok(recvmsg(stream, &mut bytes, &mut control, RecvFlags::CMSG_CLOEXEC)?)
        });
        match received {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
            Ok(_) => {
                let files = control.drain().filter_map(|message| match message {
                    RecvAncillaryMessage::ScmRights(files) => Some(files),
                    _ => None,
                });
                return Ok(files.flatten().next());
            }
        }
    }
}

impl Drop for ConsoleSocket {
    fn drop(&mut self) {
        drop(std::fs::remove_file(&self.path));
    }
}
