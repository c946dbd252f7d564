//! Delete: of an exec, or of the whole container.

use std::sync::PoisonError;
use std::time::Duration;

use containerd_shim_protos::events::task::TaskDelete;

use super::create::unmount;
use super::{Container, Process, State};
use crate::events::{Event, timestamp};
use crate::io::DRAIN;
use crate::reaper::Exit;
use crate::report::log;
use crate::status::TaskError;

/// How long the slice may take to be given back before delete stops waiting for it.
const TEARDOWN: Duration = Duration::from_secs(30);

impl Container {
    /// Forgets an exec that ended or never started.
    pub(crate) async fn delete_exec(&self, exec: &str) -> Result<(u32, Option<Exit>), TaskError> {
        let process = self.process(exec)?;
        let _gate = process.gate.lock().await;
        let state = process.state();
        if state.alive().is_some() {
            return Err(state.refuse("delete"));
        }
        close(&process).await;
        self.execs().remove(exec);
        Ok((state.pid(), state.exit()))
    }

    /// Takes the container away: io, runtime's state and cgroups, slice, root file system.
    pub(crate) async fn delete(&self) -> Result<(u32, Exit), TaskError> {
        let _verb = self.verbs.lock().await;
        match self.init.state() {
            State::Stopped { .. } => {}
            State::Created { .. } => self.kill_all().await,
            state @ (State::Running { .. } | State::Added) => return Err(state.refuse("delete")),
        }
        let ended = tokio::time::timeout(TEARDOWN, self.init.ended()).await;
        let Ok((pid, exit)) = ended else { return Err(self.init.state().refuse("delete")) };
        let execs: Vec<_> = self.execs().drain().map(|(_, process)| process).collect();
        for process in &execs {
            close(process).await;
        }
        close(&self.init).await;
        self.remove().await?;
        let teardown = self.teardown.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(mut teardown) = teardown
            && tokio::time::timeout(TEARDOWN, &mut teardown).await.is_err()
        {
            log(&self.id, "the slice is still held by the driver; it is given back later");
        }
        unmount(&self.bundle.join("rootfs")).await?;
        self.events.publish(&Event::Delete(TaskDelete {
            container_id: self.id.clone(),
            pid,
            exit_status: exit.status,
            exited_at: timestamp(exit.at),
            ..TaskDelete::default()
        }));
        Ok((pid, exit))
    }

    async fn remove(&self) -> Result<(), TaskError> {
        let Err(error) = self.runc.delete(&self.id, false).await else { return Ok(()) };
        if error.is_absent() {
            return Ok(());
        }
        // Somebody may still be in the cgroup: a process that outlived init.
        self.kill_all().await;
        match self.runc.delete(&self.id, true).await {
            Err(again) if !again.is_absent() => Err(TaskError::Runc(error)),
            Ok(()) | Err(_) => Ok(()),
        }
    }
}

async fn close(process: &Process) {
    let io = process.io().take();
    if let Some(io) = io {
        io.close(DRAIN).await;
    }
}
