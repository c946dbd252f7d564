//! What the binary does when it is run: `start`, `delete`, `-v`, `-info`, and the server that `start` leaves.
//!
//! `start` finds the shim of the container's pod, or makes one: it binds the socket and hands it over, so that
//! containerd can call at once. The socket is in a directory that only root enters, named by a hash of the
//! daemon, namespace and pod. One lock orders all starts, so that a dead shim's socket is replaced once.
//! `delete` needs the bundle only. Failure: `start` leaves no process and no socket.

mod delete;
mod info;
mod server;
mod start;

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use containerd_shim::Flags;

use crate::Node;
use crate::bundle::BundleError;
use crate::options::OptionsError;
use crate::runc::RuncError;

/// Longest path that a Unix socket takes.
const MAX_SOCKET_PATH: usize = 107;

/// Why the binary failed.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// The command line is not one of containerd's.
    #[error("command line: {reason}; containerd runs this program, with start, delete, -v or -info")]
    Usage {
        /// What is wrong with it.
        reason: String,
    },
    /// Not root.
    #[error("this shim runs as root only, found uid {uid}: rootless containerd is not supported")]
    Rootless {
        /// Who runs it.
        uid: u32,
    },
    /// What containerd sent is not understood.
    #[error("runtime options")]
    Options(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The bundle can't be read or written.
    #[error("bundle")]
    Bundle(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The runtime failed.
    #[error("runtime")]
    Runtime(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A step of the start failed.
    #[error("{what} {}", path.display())]
    Path {
        /// The step.
        what: &'static str,
        /// On which file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The socket's path is too long.
    #[error("socket path {} has {} bytes, at most {MAX_SOCKET_PATH} allowed: choose a shorter run_dir", path.display(), path.as_os_str().len())]
    LongPath {
        /// The path.
        path: PathBuf,
    },
    /// The server failed.
    #[error("server")]
    Server(#[source] io::Error),
}

impl From<OptionsError> for ServiceError {
    fn from(error: OptionsError) -> Self {
        ServiceError::Options(Box::new(error))
    }
}

impl From<BundleError> for ServiceError {
    fn from(error: BundleError) -> Self {
        ServiceError::Bundle(Box::new(error))
    }
}

impl From<RuncError> for ServiceError {
    fn from(error: RuncError) -> Self {
        ServiceError::Runtime(Box::new(error))
    }
}

/// Does what the command line says; the answer goes to standard output.
///
/// # Errors
/// Any [`ServiceError`]: containerd shows its text to the user.
pub fn run(node: Node, arguments: &[OsString]) -> Result<(), ServiceError> {
    let flags = containerd_shim::parse(arguments)
        .map_err(|error| ServiceError::Usage { reason: error.to_string() })?;
    if flags.version {
        println!("containerd-shim-gpuslice-v1:\n  Version: {}", env!("CARGO_PKG_VERSION"));
        return Ok(());
    }
    if flags.info {
        return info::info(&node);
    }
    let uid = nix::unistd::geteuid().as_raw();
    if uid != 0 {
        return Err(ServiceError::Rootless { uid });
    }
    if flags.namespace.is_empty() || flags.id.is_empty() {
        return Err(ServiceError::Usage { reason: "-namespace and -id are needed".into() });
    }
    match flags.action.as_str() {
        "start" => start::start(&node, &flags),
        "delete" => delete::delete(&node, &flags),
        "" if !flags.socket.is_empty() => server::serve(node, &flags),
        other => Err(ServiceError::Usage { reason: format!("unknown action \"{other}\"") }),
    }
}

/// The bundle of a call: the flag's, or the working directory.
fn bundle(flags: &Flags) -> Result<PathBuf, ServiceError> {
    let path = if flags.bundle.is_empty() { Path::new(".") } else { Path::new(&flags.bundle) };
    std::fs::canonicalize(path).map_err(|source| ServiceError::Path {
        what: "can't find the bundle",
        path: path.to_owned(),
        source,
    })
}
