//! The socket's place on the node.
//!
//! Owns: the run directory (0700, root's), the lock beside the socket, the socket (0600). One scheduler a
//! place: the lock is held for life and goes with the process, however it ends; the socket file of a dead one
//! is replaced. Removed on a clean exit.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use gpuslice_sys::Listening;
use nix::fcntl::{Flock, FlockArg};

/// Why the place can't be taken.
#[derive(Debug, thiserror::Error)]
pub enum PlaceError {
    /// Another scheduler runs.
    #[error("another gpuslice-scheduler holds {}: stop it first", path.display())]
    Taken {
        /// The lock.
        path: PathBuf,
    },
    /// The directory is open to others.
    #[error("{}: owner {uid}, mode {mode:o}: must be root's with mode 0700", path.display())]
    Open {
        /// The directory.
        path: PathBuf,
        /// Its owner.
        uid: u32,
        /// Its mode.
        mode: u32,
    },
    /// A step failed.
    #[error("{what} {}", path.display())]
    Step {
        /// Which.
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// A taken place.
#[derive(Debug)]
pub(crate) struct Place {
    listening: Listening,
    path: PathBuf,
    /// Held as long as this lives.
    _lock: Flock<File>,
}

impl Place {
    /// Takes the place of `socket`.
    pub(crate) fn take(socket: &Path) -> Result<Place, PlaceError> {
        let failed = |what, path: &Path| {
            let path = path.to_owned();
            move |source| PlaceError::Step { what, path, source }
        };
        let directory = socket.parent().unwrap_or(Path::new("/"));
        if !directory.exists() {
            let made = DirBuilder::new().recursive(true).mode(0o700).create(directory);
            made.map_err(failed("can't create", directory))?;
        }
        let found = fs::metadata(directory).map_err(failed("can't look at", directory))?;
        if found.uid() != 0 || found.mode() & 0o077 != 0 {
            return Err(PlaceError::Open {
                path: directory.to_owned(),
                uid: found.uid(),
                mode: found.mode() & 0o7777,
            });
        }
        let path = socket.with_extension("lock");
        let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
        let file = file.map_err(failed("can't open", &path))?;
        let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| match errno {
            nix::errno::Errno::EWOULDBLOCK => PlaceError::Taken { path: path.clone() },
            errno => PlaceError::Step { what: "can't lock", path: path.clone(), source: errno.into() },
        })?;
        let listening = gpuslice_sys::Socket::listen(socket).map_err(failed("can't listen at", socket))?;
        Ok(Place { listening, path: socket.to_owned(), _lock: lock })
    }

    pub(crate) fn listening(&self) -> &Listening {
        &self.listening
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.listening.as_fd()
    }
}

impl Drop for Place {
    /// The lock file stays: removing it would let two processes hold two locks of one name.
    fn drop(&mut self) {
        fs::remove_file(&self.path).ok();
    }
}
