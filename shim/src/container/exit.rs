//! What happens when a process ends: stored, then published, init last.

use std::sync::Arc;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use containerd_shim_protos::events::task::{TaskExit, TaskOOM};
use tokio::sync::oneshot;

use super::{Container, Process, State};
use crate::bundle;
use crate::cgroup::oom::OomWatch;
use crate::events::{Event, timestamp};
use crate::reaper::{Child, Exit};
use crate::report::{chain, log};

/// How long the exit of init waits for the exits of execs, which the kernel has killed by then.
const EXECS: Duration = Duration::from_secs(10);

impl Container {
    /// Follows init to its end; also its sandbox and its memory.
    pub(super) fn watch_init(self: Arc<Self>, child: Child) {
        self.watch_sandbox();
        let oom = self.watch_memory();
        let container = self;
        tokio::spawn(async move {
            let exit = received(child.exit).await;
            container.init_ended(exit).await;
            if let Some(oom) = oom {
                oom.abort();
            }
        });
    }

    async fn init_ended(&self, exit: Exit) {
        self.ending.store(true, Ordering::Relaxed);
        // Its start, if one is under way, is told first.
        let gate = self.init.gate.lock().await;
        if !self.own_pid_namespace {
            self.kill_all().await;
        }
        let execs: Vec<Arc<Process>> = self.execs().values().cloned().collect();
        let all_ended = async {
            for exec in &execs {
                // Also one that is being started.
                drop(exec.gate.lock().await);
                if exec.state() != State::Added {
                    exec.ended().await;
                }
            }
        };
        if tokio::time::timeout(EXECS, all_ended).await.is_err() {
            log(&self.id, "an exec outlives the container's init; its exit is told later");
        }
        let pid = self.init.state().pid();
        if let Err(error) = bundle::write_exit(&self.bundle, pid, exit) {
            log(&self.id, &chain(&error));
        }
        self.init.state.send_replace(State::Stopped { pid, exit });
        self.publish_exit(&self.id, pid, exit);
        drop(gate);
        let gpu = self.gpu.clone();
        let teardown = tokio::spawn(async move { gpu.ended().await });
        *self.teardown.lock().unwrap_or_else(PoisonError::into_inner) = Some(teardown);
    }

    /// Follows an exec to its end.
    pub(super) fn watch_exec(self: Arc<Self>, process: Arc<Process>, child: Child) {
        tokio::spawn(async move {
            let exit = received(child.exit).await;
            // Its start is told first.
            let _gate = process.gate.lock().await;
            let pid = process.state().pid();
            process.state.send_replace(State::Stopped { pid, exit });
            self.publish_exit(process.exec.as_deref().unwrap_or_default(), pid, exit);
        });
    }

    fn publish_exit(&self, id: &str, pid: u32, exit: Exit) {
        self.events.publish(&Event::Exit(TaskExit {
            container_id: self.id.clone(),
            id: id.to_owned(),
            pid,
            exit_status: exit.status,
            exited_at: timestamp(exit.at),
            ..TaskExit::default()
        }));
    }

    /// Kills the container once its sandbox is gone: it has no way to the driver any more.
    fn watch_sandbox(self: &Arc<Self>) {
        let container = self.clone();
        tokio::spawn(async move {
            tokio::select! {
                reason = container.gpu.died() => {
                    log(&container.id, &format!("container is killed: {reason}"));
                    container.kill_all().await;
                }
                _ = container.init.ended() => {}
            }
        });
    }

    /// Tells of out-of-memory kills.
    fn watch_memory(self: &Arc<Self>) -> Option<tokio::task::JoinHandle<()>> {
        let watch = match OomWatch::new(self.cgroups.as_ref()?) {
            Ok(watch) => watch?,
            Err(error) => {
                log(&self.id, &chain(&error));
                return None;
            }
        };
        let (id, events) = (self.id.clone(), self.events.clone());
        Some(tokio::spawn(async move {
            let mut known = OomWatch::count(watch.counter()).unwrap_or(0);
            while watch.next(known).await {
                known = OomWatch::count(watch.counter()).unwrap_or(known).max(known);
                events.publish(&Event::Oom(TaskOOM { container_id: id.clone(), ..TaskOOM::default() }));
            }
        }))
    }
}

/// The exit; a reaper that lost it is as good as a kill.
async fn received(exit: oneshot::Receiver<Exit>) -> Exit {
    exit.await.unwrap_or_else(|_| Exit { status: 137, at: SystemTime::now() })
}
