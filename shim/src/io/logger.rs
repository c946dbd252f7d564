//! A logger: a program that a client names (`binary://`) and that gets a process's output.
//!
//! It finds standard output as descriptor 3, standard error as 4, and closes 5 once it is ready. It reads until
//! the process's last copy is closed, and then has a while to finish.

use std::ffi::CString;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::fcntl::OFlag;
use nix::sys::signal::{Signal, kill};
use nix::unistd::pipe2;

use super::{IoError, Setting, null, watch};
use crate::reaper::Child;
use crate::runc;
use crate::spawn::Program;

/// How long a logger may take to become ready.
pub(super) const READY: Duration = Duration::from_secs(30);
/// From SIGTERM to SIGKILL.
const TERMINATE: Duration = Duration::from_secs(10);

/// A running logger.
pub(super) struct Logger {
    child: Child,
}

impl Logger {
    /// Starts it and waits until it is ready.
    pub(super) async fn start(
        path: &Path,
        arguments: &[String],
        [out, err]: [OwnedFd; 2],
        setting: &Setting,
    ) -> Result<Logger, IoError> {
        let fail = |source| IoError::Logger { path: PathBuf::from(path), source };
        let text = |text: &str| CString::new(text).map_err(|e| fail(std::io::Error::other(e)));
        let name = path.to_str().ok_or_else(|| fail(std::io::Error::other("the path is not UTF-8")))?;
        let (ready, signal) = pipe2(OFlag::O_CLOEXEC).map_err(|e| IoError::Pipe(e.into()))?;
        let mut environment = runc::environment();
        environment.push(text(&format!("CONTAINER_ID={}", setting.container))?);
        environment.push(text(&format!("CONTAINER_NAMESPACE={}", setting.namespace))?);
        let mut words = vec![text(name)?];
        for argument in arguments {
            words.push(text(argument)?);
        }
        let (nothing, nowhere) = (null(false)?, null(true)?);
        let program = Program {
            path: text(name)?,
            arguments: words,
            environment: &environment,
            files: vec![
                nothing.as_fd(),
                nowhere.as_fd(),
                nowhere.as_fd(),
                out.as_fd(),
                err.as_fd(),
                signal.as_fd(),
            ],
        };
        let child = setting.reaper.spawn(&program).map_err(fail)?;
        drop(program);
        drop((signal, out, err));
        let logger = Logger { child };
        let ready = watch(ready, tokio::io::Interest::READABLE)?;
        // A byte or the end: both mean ready, unless the logger ended.
        if tokio::time::timeout(READY, ready.readable()).await.is_err() {
            logger.end(Duration::ZERO).await;
            return Err(IoError::LoggerSilent { path: path.to_owned() });
        }
        Ok(logger)
    }

    /// Gives it `patience` to read the rest, then tells it to end; kills it later if it doesn't.
    pub(super) async fn end(mut self, patience: Duration) {
        if tokio::time::timeout(patience, &mut self.child.exit).await.is_ok() {
            return;
        }
        // Not yet collected, so the pid is still its own.
        kill(self.child.pid, Signal::SIGTERM).ok();
        tokio::spawn(async move {
            if tokio::time::timeout(TERMINATE, &mut self.child.exit).await.is_err() {
                kill(self.child.pid, Signal::SIGKILL).ok();
                drop(self.child.exit.await);
            }
        });
    }
}
