//! Signals, pause, resume and new limits.

use std::sync::atomic::Ordering;

use std::os::fd::AsFd;

use containerd_shim_protos::events::task::{TaskPaused, TaskResumed};
use gpuslice_sys::process::{pidfd_kill, pidfd_open};
use nix::unistd::Pid;

use super::{Container, State};
use crate::events::Event;
use crate::report::{chain, log};
use crate::status::{TaskError, kill_error};

/// The last signal of Linux.
const LAST: u32 = 64;

/// A pid as nix has it; the shim only meets pids that fit.
pub(super) fn raw(pid: u32) -> Pid {
    Pid::from_raw(i32::try_from(pid).unwrap_or(i32::MAX))
}

/// Sends a signal to a process that this process has not collected yet: its pid is its own.
fn send(pid: u32, signal: u32) -> Result<(), TaskError> {
    let number = i32::try_from(signal).ok().filter(|_| signal <= LAST);
    let number = number.ok_or(TaskError::Request { what: "signal" })?;
    let sent = pidfd_open(pid, false).and_then(|process| pidfd_kill(process.as_fd(), number));
    sent.map_err(|_| TaskError::Finished)
}

impl Container {
    /// Sends a signal to a process, or to all of the container.
    pub(crate) async fn kill(&self, exec: &str, signal: u32, all: bool) -> Result<(), TaskError> {
        let process = self.process(exec)?;
        let state = process.state();
        let pid = match state {
            State::Added => return Err(state.refuse("kill")),
            State::Stopped { .. } => return Err(TaskError::Finished),
            State::Created { pid } | State::Running { pid } => pid,
        };
        // The runtime knows how to signal what is frozen, and who all are.
        let by_runtime = process.exec.is_none() && (all || self.paused.load(Ordering::Relaxed));
        if by_runtime {
            return self.runc.kill(&self.id, signal, all).await.map_err(kill_error);
        }
        send(pid, signal)
    }

    /// Kills every process of the container.
    pub(super) async fn kill_all(&self) {
        if let Some(pid) = self.init.state().alive().filter(|_| !self.ending.load(Ordering::Relaxed)) {
            drop(send(pid, 9));
        }
        let killed = self.cgroups.as_ref().is_some_and(crate::cgroup::Cgroups::kill);
        if !killed
            && let Err(error) = self.runc.kill(&self.id, 9, true).await
            && !error.is_finished()
        {
            log(&self.id, &format!("can't kill the whole container: {}", chain(&error)));
        }
        // A frozen process of cgroup v1 dies once it is thawed.
        if self.paused.swap(false, Ordering::Relaxed) {
            drop(self.runc.resume(&self.id).await);
        }
    }

    /// Freezes the container.
    pub(crate) async fn pause(&self) -> Result<(), TaskError> {
        let _verb = self.verbs.lock().await;
        let state = self.init.state();
        if !matches!(state, State::Running { .. }) || self.ending.load(Ordering::Relaxed) {
            return Err(state.refuse("pause"));
        }
        if self.paused.load(Ordering::Relaxed) {
            return Err(TaskError::State { verb: "pause", state: "paused" });
        }
        self.runc.pause(&self.id).await.map_err(TaskError::Runc)?;
        self.paused.store(true, Ordering::Relaxed);
        let event = TaskPaused { container_id: self.id.clone(), ..TaskPaused::default() };
        self.events.publish(&Event::Paused(event));
        Ok(())
    }

    /// Lets a frozen container go on.
    pub(crate) async fn resume(&self) -> Result<(), TaskError> {
        let _verb = self.verbs.lock().await;
        if !self.paused.load(Ordering::Relaxed) {
            return Err(self.init.state().refuse("resume"));
        }
        self.runc.resume(&self.id).await.map_err(TaskError::Runc)?;
        self.paused.store(false, Ordering::Relaxed);
        let event = TaskResumed { container_id: self.id.clone(), ..TaskResumed::default() };
        self.events.publish(&Event::Resumed(event));
        Ok(())
    }

    /// Sets new limits.
    pub(crate) async fn update(&self, resources: &[u8]) -> Result<(), TaskError> {
        let _verb = self.verbs.lock().await;
        if self.init.state().alive().is_none() {
            return Err(self.init.state().refuse("update"));
        }
        self.runc.update(&self.id, resources).await.map_err(TaskError::Runc)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_is_one_of_linux_or_refused() {
        let me = std::process::id();
        assert!(send(me, 0).is_ok());
        for bad in [65, 99, u32::MAX] {
            assert!(matches!(send(me, bad), Err(TaskError::Request { .. })), "{bad}");
        }
        assert!(matches!(send(0, 9), Err(TaskError::Finished)));
        // Window change: ignored unless asked for.
        assert!(send(me, 28).is_ok());
    }
}
