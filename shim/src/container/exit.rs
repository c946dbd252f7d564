//! What happens when a process ends: stored, then published, init last.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use containerd_shim_protos::events::task::{TaskExit, TaskOOM};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::{Container, Process, State};
use crate::bundle;
use crate::cgroup::oom::OomWatch;
use crate::events::{Event, timestamp};
use crate::reaper::{Child, Exit};
use crate::report::{chain, log};

/// How long the exit of init waits for the exits of execs, which the kernel has killed by then.
const EXECS: Duration = Duration::from_secs(10);

/// The watch for out-of-memory kills.
struct Memory {
    /// File with the count of kills.
    counter: PathBuf,
    /// Something was told.
    told: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

impl Container {
    /// Follows init to its end; also its sandbox and its memory.
    pub(super) fn watch_init(self: Arc<Self>, child: Child) {
        self.watch_sandbox();
        let oom = self.watch_memory();
        let container = self;
        tokio::spawn(async move {
            let exit = received(child.exit).await;
            container.init_ended(exit, oom.as_ref()).await;
            if let Some(oom) = oom {
                oom.task.abort();
            }
        });
    }

    async fn init_ended(&self, exit: Exit, memory: Option<&Memory>) {
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
        if let Some(memory) = memory {
            self.tell_late_kill(memory);
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
    fn watch_memory(self: &Arc<Self>) -> Option<Memory> {
        let watch = match OomWatch::new(self.cgroups.as_ref()?) {
            Ok(watch) => watch?,
            Err(error) => {
                log(&self.id, &chain(&error));
                return None;
            }
        };
        let (counter, told) = (watch.counter().to_owned(), Arc::new(AtomicBool::new(false)));
        let (container, telling) = (self.clone(), told.clone());
        let task = tokio::spawn(async move {
            let mut known = OomWatch::count(watch.counter()).unwrap_or(0);
            while watch.next(known).await {
                known = OomWatch::count(watch.counter()).unwrap_or(known).max(known);
                // Its start, if one is under way, is told first; after its exit nothing is.
                let _gate = container.init.gate.lock().await;
                if container.init.state().exit().is_some() {
                    return;
                }
                telling.store(true, Ordering::Relaxed);
                container.publish_oom();
            }
        });
        Some(Memory { counter, told, task })
    }

    /// Init may have ended by a kill of which the kernel's word is still on its way: it is told before the exit.
    fn tell_late_kill(&self, memory: &Memory) {
        let killed = OomWatch::count(&memory.counter).is_some_and(|count| count > 0);
        if killed && !memory.told.swap(true, Ordering::Relaxed) {
            self.publish_oom();
        }
    }

    fn publish_oom(&self) {
        let event = TaskOOM { container_id: self.id.clone(), ..TaskOOM::default() };
        self.events.publish(&Event::Oom(event));
    }
}

/// The exit; a reaper that lost it is as good as a kill.
async fn received(exit: oneshot::Receiver<Exit>) -> Exit {
    exit.await.unwrap_or_else(|_| Exit { status: 137, at: SystemTime::now() })
}
