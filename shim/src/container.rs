//! A container and its processes: what they are, and which verb is allowed when.
//!
//! ```text
//! init:  Created --start--> Running <--pause/resume--> paused        exec:  Added --start--> Running
//!           \________________  |  ________________________/                                    |
//!                            Stopped --delete--> gone                                        Stopped
//! ```
//!
//! Owns: the runtime's handle, io, exit statuses and the slice of one container. One verb that changes the
//! container runs at a time (`verbs`); reading the state and sending signals never wait. Lock order: `verbs`, then
//! a process's `gate`, then any of the short locks, of which nobody holds two or waits while holding one.
//! Promises: an exit is stored before it is published; all callers of `wait` see the same; the exit of init is
//! published last. Failure: a verb that fails leaves the state as it was, but for a delete, which can be called again.

mod create;
mod delete;
mod exec;
mod exit;
mod signal;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use containerd_shim_protos::api::Status;
use gpuslice_config::Config;
use serde_json::Value;
use tokio::sync::{Mutex as VerbMutex, watch};
use tokio::task::JoinHandle;

use crate::cgroup::Cgroups;
use crate::events::Publisher;
use crate::gpu::GpuContainer;
use crate::io::{Io, Paths, Setting};
use crate::reaper::{Exit, Reaper};
use crate::runc::Runc;
use crate::status::TaskError;

pub(crate) use create::{Place, create};

/// Where a process is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// An exec that was not started.
    Added,
    /// Init is there, the user's program not yet.
    Created { pid: u32 },
    /// The user's program runs.
    Running { pid: u32 },
    /// Ended and collected.
    Stopped { pid: u32, exit: Exit },
}

impl State {
    /// A word for errors.
    fn name(self) -> &'static str {
        match self {
            State::Added => "not yet started",
            State::Created { .. } => "created",
            State::Running { .. } => "running",
            State::Stopped { .. } => "stopped",
        }
    }

    /// The pid; 0 while there is none.
    pub(crate) fn pid(self) -> u32 {
        match self {
            State::Added => 0,
            State::Created { pid } | State::Running { pid } | State::Stopped { pid, .. } => pid,
        }
    }

    /// How it ended.
    pub(crate) fn exit(self) -> Option<Exit> {
        match self {
            State::Stopped { exit, .. } => Some(exit),
            State::Added | State::Created { .. } | State::Running { .. } => None,
        }
    }

    /// Whether a signal can reach it.
    fn alive(self) -> Option<u32> {
        match self {
            State::Created { pid } | State::Running { pid } => Some(pid),
            State::Added | State::Stopped { .. } => None,
        }
    }

    fn refuse(self, verb: &'static str) -> TaskError {
        TaskError::State { verb, state: self.name() }
    }
}

/// One process: init or an exec.
pub(crate) struct Process {
    /// The exec's id; none for init.
    pub(crate) exec: Option<String>,
    /// Where its io goes.
    pub(crate) paths: Paths,
    /// What an exec runs.
    spec: Option<Value>,
    state: watch::Sender<State>,
    /// Held while it starts: its exit is told after its start.
    gate: VerbMutex<()>,
    io: Mutex<Option<Io>>,
}

impl Process {
    fn new(
        exec: Option<String>,
        paths: Paths,
        spec: Option<Value>,
        state: State,
        io: Option<Io>,
    ) -> Arc<Process> {
        Arc::new(Process {
            exec,
            paths,
            spec,
            state: watch::Sender::new(state),
            gate: VerbMutex::default(),
            io: Mutex::new(io),
        })
    }

    /// Where it is in its life.
    pub(crate) fn state(&self) -> State {
        *self.state.borrow()
    }

    /// Resolves once it ended.
    pub(crate) async fn ended(&self) -> (u32, Exit) {
        let mut states = self.state.subscribe();
        loop {
            if let State::Stopped { pid, exit } = *states.borrow_and_update() {
                return (pid, exit);
            }
            if states.changed().await.is_err() {
                // The sender lives as long as this process.
                std::future::pending::<()>().await;
            }
        }
    }

    fn io(&self) -> MutexGuard<'_, Option<Io>> {
        self.io.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// No more input comes.
    pub(crate) fn close_stdin(&self) {
        if let Some(io) = self.io().as_mut() {
            io.close_stdin();
        }
    }

    /// Sets the size of its terminal, if it has one.
    pub(crate) fn resize(&self, width: u32, height: u32) -> Result<(), TaskError> {
        let side =
            |value: u32| u16::try_from(value).map_err(|_| TaskError::Request { what: "terminal size" });
        let (width, height) = (side(width)?, side(height)?);
        self.io().as_ref().map_or(Ok(()), |io| io.resize(width, height)).map_err(TaskError::Io)
    }
}

/// One container.
pub(crate) struct Container {
    /// Its id.
    pub(crate) id: String,
    /// Its bundle.
    pub(crate) bundle: PathBuf,
    /// Its first process.
    pub(crate) init: Arc<Process>,
    runc: Runc,
    reaper: Reaper,
    events: Publisher,
    setting: Setting,
    /// For console sockets.
    socket_directory: PathBuf,
    cgroups: Option<Cgroups>,
    /// Without one, the container's other processes outlive init and must be killed.
    own_pid_namespace: bool,
    verbs: VerbMutex<()>,
    execs: Mutex<HashMap<String, Arc<Process>>>,
    paused: AtomicBool,
    /// Init ended: nothing more starts.
    ending: AtomicBool,
    gpu: Arc<GpuContainer>,
    /// What holds on this node, as it was at create.
    config: Config,
    /// The slice being given back, from the exit of init on.
    teardown: Mutex<Option<JoinHandle<()>>>,
}

impl Container {
    fn execs(&self) -> MutexGuard<'_, HashMap<String, Arc<Process>>> {
        self.execs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The process with this exec id; init for none.
    pub(crate) fn process(&self, exec: &str) -> Result<Arc<Process>, TaskError> {
        if exec.is_empty() {
            return Ok(self.init.clone());
        }
        let found = self.execs().get(exec).cloned();
        found.ok_or_else(|| TaskError::NoProcess { id: self.id.clone(), exec: exec.to_owned() })
    }

    /// The state of a process as containerd names it.
    pub(crate) fn status(&self, process: &Process) -> Status {
        match process.state() {
            State::Added | State::Created { .. } => Status::CREATED,
            State::Running { .. } if process.exec.is_none() && self.paused.load(Ordering::Relaxed) => {
                Status::PAUSED
            }
            State::Running { .. } => Status::RUNNING,
            State::Stopped { .. } => Status::STOPPED,
        }
    }

    /// The container's pids, with the exec id of those that are execs.
    pub(crate) async fn pids(&self) -> Result<Vec<(u32, Option<String>)>, TaskError> {
        let pids = self.runc.processes(&self.id).await.map_err(TaskError::Runc)?;
        let execs: HashMap<u32, String> = self
            .execs()
            .iter()
            .filter_map(|(id, process)| process.state().alive().map(|pid| (pid, id.clone())))
            .collect();
        Ok(pids.into_iter().map(|pid| (pid, execs.get(&pid).cloned())).collect())
    }

    /// Type and bytes of the container's figures.
    pub(crate) fn stats(&self) -> Result<(&'static str, Vec<u8>), TaskError> {
        let cgroups =
            self.cgroups.as_ref().ok_or(TaskError::Unsupported { what: "stats without cgroups" })?;
        cgroups.stats().map_err(TaskError::Cgroup)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::SystemTime;

    #[test]
    fn a_pid_is_signalled_only_between_create_and_exit() {
        let exit = Exit { status: 3, at: SystemTime::UNIX_EPOCH };
        assert_eq!(State::Added.alive(), None);
        assert_eq!(State::Created { pid: 5 }.alive(), Some(5));
        assert_eq!(State::Running { pid: 5 }.alive(), Some(5));
        assert_eq!(State::Stopped { pid: 5, exit }.alive(), None);
        assert_eq!(State::Stopped { pid: 5, exit }.pid(), 5);
        assert_eq!(State::Stopped { pid: 5, exit }.exit(), Some(exit));
    }

    #[tokio::test]
    async fn all_waiters_see_the_same_exit_also_those_that_come_late() {
        let process = Process::new(None, Paths::default(), None, State::Created { pid: 9 }, None);
        let early = tokio::spawn({
            let process = process.clone();
            async move { process.ended().await }
        });
        tokio::task::yield_now().await;
        let exit = Exit { status: 137, at: SystemTime::now() };
        process.state.send_replace(State::Stopped { pid: 9, exit });
        assert_eq!(early.await.unwrap(), (9, exit));
        assert_eq!(process.ended().await, (9, exit));
    }
}
