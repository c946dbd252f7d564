//! A process's standard io: pipes to fifos, files or a logger, a terminal, or nothing.
//!
//! Owns: the shim's ends of all of them, from before the process starts until it is deleted. Trusts: the paths
//! that containerd sends. Promises: nothing is lost while somebody reads; a reader that stops holds up its own
//! container only; a close never waits for a process that holds the other end longer than [`DRAIN`]. The fifo
//! of standard input is held open for writing until CloseIO, so that a client may come and go.

mod console;
mod logger;
mod pump;
mod uri;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::unistd::{Gid, Uid, fchown, pipe2};
use tokio::io::unix::AsyncFd;
use tokio::task::JoinHandle;

use crate::reaper::Reaper;
use crate::runc::Stdio;

use console::Console;
pub(crate) use console::ConsoleSocket;
use logger::Logger;
use pump::Target;
use uri::Uri;

/// How long a delete waits for the rest of a process's output.
pub(crate) const DRAIN: Duration = Duration::from_secs(2);

/// What failed on standard io.
#[derive(Debug, thiserror::Error)]
pub(crate) enum IoError {
    #[error("can't open {what} {}", path.display())]
    Open {
        what: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "{what} \"{found}\": scheme \"{scheme}\" is not known; fifo paths, fifo://, binary:// and file:// are"
    )]
    Scheme { what: &'static str, found: String, scheme: String },
    #[error("{what} \"{found}\" is not a valid URI")]
    Uri { what: &'static str, found: String },
    #[error("can't make a pipe")]
    Pipe(#[source] io::Error),
    #[error("can't watch a file of standard io")]
    Watch(#[source] io::Error),
    #[error("can't start the logger {}", path.display())]
    Logger {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("logger {} was not ready within {} s", path.display(), logger::READY.as_secs())]
    LoggerSilent { path: PathBuf },
    #[error("console socket {}", path.display())]
    ConsoleSocket {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the runtime sent no terminal within {} s", console::DEADLINE.as_secs())]
    NoConsole,
    #[error("can't set the terminal's size")]
    Resize(#[source] io::Error),
}

/// Where a process's io is to go, as containerd sent it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Paths {
    pub(crate) stdin: String,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    pub(crate) terminal: bool,
}

/// What io needs to know besides paths.
#[derive(Clone)]
pub(crate) struct Setting {
    pub(crate) container: String,
    pub(crate) namespace: String,
    /// Owner of the pipes.
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) reaper: Reaper,
}

/// The process's ends; dropped once it runs.
pub(crate) struct Ends([OwnedFd; 3]);

impl Ends {
    /// These, to start a program with.
    pub(crate) fn stdio(&self) -> Stdio<'_> {
        let Ends([stdin, stdout, stderr]) = self;
        Stdio([stdin.as_fd(), stdout.as_fd(), stderr.as_fd()])
    }
}

/// The shim's ends.
#[derive(Default)]
pub(crate) struct Io {
    /// Keeps the client's fifo from ending between clients.
    stdin_held: Option<OwnedFd>,
    stdin: Option<JoinHandle<()>>,
    outputs: Vec<JoinHandle<()>>,
    /// Moved once the process is there: what a runtime that fails writes is no output of the process.
    waiting: Vec<(AsyncFd<OwnedFd>, Target)>,
    stdin_waiting: Option<(AsyncFd<OwnedFd>, AsyncFd<OwnedFd>)>,
    console: Option<Arc<Console>>,
    logger: Option<Logger>,
}

fn null(write: bool) -> Result<OwnedFd, IoError> {
    let path = Path::new("/dev/null");
    let file = OpenOptions::new().read(!write).write(write).open(path);
    file.map(OwnedFd::from).map_err(|source| IoError::Open {
        what: "standard io",
        path: path.to_owned(),
        source,
    })
}

fn watch(file: OwnedFd, interest: tokio::io::Interest) -> Result<AsyncFd<OwnedFd>, IoError> {
    let flags = fcntl(&file, FcntlArg::F_GETFL).map_err(|e| IoError::Watch(e.into()))?;
    let flags = OFlag::from_bits_retain(flags) | OFlag::O_NONBLOCK;
    fcntl(&file, FcntlArg::F_SETFL(flags)).map_err(|e| IoError::Watch(e.into()))?;
    watched(file, interest).map_err(IoError::Watch)
}

/// Registers a file that doesn't block with the runtime.
pub(crate) fn watched(file: OwnedFd, interest: tokio::io::Interest) -> io::Result<AsyncFd<OwnedFd>> {
    #[expect(
        deprecated,
        reason = "the file is owned, so it stays open and its own as long as it is registered"
    )]
    AsyncFd::with_interest(file, interest)
}

/// A pipe; its ends belong to the owner that the options name, so that a process of that uid can open
/// `/dev/stdout` again.
fn pipe(setting: &Setting) -> Result<(OwnedFd, OwnedFd), IoError> {
    let (read, write) = pipe2(OFlag::O_CLOEXEC).map_err(|e| IoError::Pipe(e.into()))?;
    if setting.uid != 0 || setting.gid != 0 {
        let (uid, gid) = (Uid::from_raw(setting.uid), Gid::from_raw(setting.gid));
        for end in [&read, &write] {
            fchown(end, Some(uid), Some(gid)).map_err(|e| IoError::Pipe(e.into()))?;
        }
    }
    Ok((read, write))
}

/// Opens a client's fifo, or file, for what the process writes.
fn output(what: &'static str, path: &Path) -> Result<Target, IoError> {
    let fail = |source| IoError::Open { what, path: path.to_owned(), source };
    let meta = std::fs::metadata(path).map_err(fail)?;
    if meta.file_type().is_fifo() {
        // Open for both: then nobody has to be there yet, and a reader that leaves is no end.
        let file =
            OpenOptions::new().read(true).write(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path);
        return Ok(Target::Pipe(watch(file.map_err(fail)?.into(), tokio::io::Interest::WRITABLE)?));
    }
    Ok(Target::File(Arc::new(OpenOptions::new().append(true).open(path).map_err(fail)?)))
}

fn log_file(what: &'static str, path: &Path) -> Result<Target, IoError> {
    let fail = |source| IoError::Open { what, path: path.to_owned(), source };
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory).map_err(fail)?;
    }
    let file = OpenOptions::new().append(true).create(true).mode(0o644).open(path).map_err(fail)?;
    Ok(Target::File(Arc::new(file)))
}

/// The client's end of standard input, and the end that keeps it open.
fn input(path: &Path) -> Result<(AsyncFd<OwnedFd>, OwnedFd), IoError> {
    let fail = |source| IoError::Open { what: "standard input", path: path.to_owned(), source };
    let nonblocking = OFlag::O_NONBLOCK.bits();
    let read = OpenOptions::new().read(true).custom_flags(nonblocking).open(path).map_err(fail)?;
    let held: File = OpenOptions::new().write(true).custom_flags(nonblocking).open(path).map_err(fail)?;
    Ok((watch(read.into(), tokio::io::Interest::READABLE)?, held.into()))
}

impl Io {
    /// Io without a terminal: made before the process, whose ends come back with it.
    pub(crate) async fn pipes(paths: &Paths, setting: &Setting) -> Result<(Io, Ends), IoError> {
        let mut made = Io::default();
        let opened = made.open_pipes(paths, setting).await;
        match opened {
            Ok(ends) => Ok((made, ends)),
            Err(error) => {
                made.close(Duration::ZERO).await;
                Err(error)
            }
        }
    }

    async fn open_pipes(&mut self, paths: &Paths, setting: &Setting) -> Result<Ends, IoError> {
        let out = Uri::parse("standard output", &paths.stdout)?;
        if let Some(Uri::Binary { path, arguments }) = &out {
            let (out_read, out_write) = pipe(setting)?;
            let (err_read, err_write) = pipe(setting)?;
            self.logger = Some(Logger::start(path, arguments, [out_read, err_read], setting).await?);
            return Ok(Ends([self.feed(&paths.stdin, setting)?, out_write, err_write]));
        }
        let stdout = match &out {
            None => null(true)?,
            Some(Uri::File { path }) => self.drain(log_file("standard output", path)?, setting)?,
            Some(Uri::Fifo { path }) => self.drain(output("standard output", path)?, setting)?,
            Some(Uri::Binary { .. }) => null(true)?,
        };
        let stderr = match Uri::parse("standard error", &paths.stderr)? {
            None => null(true)?,
            Some(Uri::File { path }) => self.drain(log_file("standard error", &path)?, setting)?,
            Some(Uri::Fifo { path }) => self.drain(output("standard error", &path)?, setting)?,
            Some(Uri::Binary { .. }) => {
                let found = paths.stderr.clone();
                return Err(IoError::Scheme { what: "standard error", found, scheme: "binary".into() });
            }
        };
        Ok(Ends([self.feed(&paths.stdin, setting)?, stdout, stderr]))
    }

    /// A pipe for the process to write; what comes out of it goes to `target`.
    fn drain(&mut self, target: Target, setting: &Setting) -> Result<OwnedFd, IoError> {
        let (read, write) = pipe(setting)?;
        let read = watch(read, tokio::io::Interest::READABLE)?;
        self.waiting.push((read, target));
        Ok(write)
    }

    /// A pipe for the process to read; what the client writes goes into it.
    fn feed(&mut self, stdin: &str, setting: &Setting) -> Result<OwnedFd, IoError> {
        if stdin.is_empty() {
            return null(false);
        }
        let (client, held) = input(Path::new(stdin.strip_prefix("fifo://").unwrap_or(stdin)))?;
        let (read, write) = pipe(setting)?;
        let write = watch(write, tokio::io::Interest::WRITABLE)?;
        self.stdin_held = Some(held);
        self.stdin_waiting = Some((client, write));
        Ok(read)
    }

    /// The process is there: begins to move its output and input.
    pub(crate) fn begin(&mut self) {
        for (read, target) in self.waiting.drain(..) {
            self.outputs.push(tokio::spawn(pump::from_pipe(read, target)));
        }
        if let Some((client, write)) = self.stdin_waiting.take() {
            self.stdin = Some(tokio::spawn(pump::from_pipe(client, Target::Pipe(write))));
        }
    }

    /// Io with a terminal: made after the process, whose terminal's other end is `master`.
    pub(crate) async fn terminal(paths: &Paths, master: OwnedFd, setting: &Setting) -> Result<Io, IoError> {
        let mut made = Io::default();
        let opened = made.open_terminal(paths, master, setting).await;
        match opened {
            Ok(()) => Ok(made),
            Err(error) => {
                made.close(Duration::ZERO).await;
                Err(error)
            }
        }
    }

    async fn open_terminal(
        &mut self,
        paths: &Paths,
        master: OwnedFd,
        setting: &Setting,
    ) -> Result<(), IoError> {
        let both = tokio::io::Interest::READABLE | tokio::io::Interest::WRITABLE;
        let console = Arc::new(Console::new(watch(master, both)?));
        self.console = Some(console.clone());
        let target = match Uri::parse("standard output", &paths.stdout)? {
            None => None,
            Some(Uri::File { path }) => Some(log_file("standard output", &path)?),
            Some(Uri::Fifo { path }) => Some(output("standard output", &path)?),
            Some(Uri::Binary { path, arguments }) => {
                let (read, write) = pipe(setting)?;
                let nothing = null(false)?;
                self.logger = Some(Logger::start(&path, &arguments, [read, nothing], setting).await?);
                Some(Target::Pipe(watch(write, tokio::io::Interest::WRITABLE)?))
            }
        };
        self.outputs.push(tokio::spawn(pump::from_console(console.clone(), target)));
        if !paths.stdin.is_empty() {
            let stdin = paths.stdin.strip_prefix("fifo://").unwrap_or(&paths.stdin);
            let (client, held) = input(Path::new(stdin))?;
            self.stdin_held = Some(held);
            self.stdin = Some(tokio::spawn(pump::to_console(client, console)));
        }
        Ok(())
    }

    /// The client says that no more input comes. What it wrote before still arrives.
    pub(crate) fn close_stdin(&mut self) {
        self.stdin_held = None;
    }

    /// Sets the terminal's size; without a terminal there is nothing to do.
    pub(crate) fn resize(&self, width: u16, height: u16) -> Result<(), IoError> {
        self.console.as_ref().map_or(Ok(()), |console| console.resize(width, height))
    }

    /// Waits up to `patience` for the rest of the output, then closes everything.
    pub(crate) async fn close(mut self, patience: Duration) {
        self.stdin_held = None;
        self.stdin_waiting = None;
        self.waiting.clear();
        if let Some(stdin) = self.stdin.take() {
            stdin.abort();
        }
        let deadline = tokio::time::Instant::now() + patience;
        for mut output in self.outputs.drain(..) {
            if tokio::time::timeout_at(deadline, &mut output).await.is_err() {
                output.abort();
                drop(output.await);
            }
        }
        self.console = None;
        if let Some(logger) = self.logger.take() {
            logger.end(patience).await;
        }
    }
}

#[cfg(test)]
mod tests;
