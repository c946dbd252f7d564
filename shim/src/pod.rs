//! The containers of one shim, and when the shim ends.
//!
//! Owns: the map from id to container. An id is taken from the moment its Create begins until its Delete ends.
//! The shim ends when containerd asks for it and no container is left, or when no container came, or is left,
//! for [`IDLE`]; never while an event waits for the daemon.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use containerd_shim_protos::api::CreateTaskRequest;
use tokio::sync::{Notify, watch};

use crate::container::{self, Container, Place};
use crate::reaper::Exit;
use crate::report::log;
use crate::status::TaskError;

/// A shim that serves nobody for so long ends: the daemon that started it is gone.
const IDLE: Duration = Duration::from_secs(30);
/// After so long without a call the shim gives back what it doesn't need to wait.
const REST: Duration = Duration::from_secs(1);
/// How long an ending shim waits for a daemon to take its last events.
const FLUSH: Duration = Duration::from_secs(600);

enum Slot {
    /// Its Create is under way.
    Creating,
    There(Arc<Container>),
}

/// All containers of this shim.
pub(crate) struct Pod {
    place: Place,
    containers: Mutex<HashMap<String, Slot>>,
    count: watch::Sender<usize>,
    shutdown: Notify,
    /// containerd asked the shim to end while a container was being made.
    asked: AtomicBool,
    active: Notify,
}

impl Pod {
    pub(crate) fn new(place: Place) -> Pod {
        Pod {
            place,
            containers: Mutex::default(),
            count: watch::Sender::new(0),
            shutdown: Notify::new(),
            asked: AtomicBool::new(false),
            active: Notify::new(),
        }
    }

    fn containers(&self) -> MutexGuard<'_, HashMap<String, Slot>> {
        self.containers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The daemon called: it is there.
    pub(crate) fn heard(&self) {
        self.active.notify_one();
        self.place.events.daemon_is_there();
    }

    /// Gives memory back whenever nothing was asked for a while. Never ends.
    pub(crate) async fn rest(&self) {
        loop {
            self.active.notified().await;
            while tokio::time::timeout(REST, self.active.notified()).await.is_ok() {}
            if let Err(error) = gpuslice_sys::resident::release() {
                log("shim", &format!("can't give memory back: {error}"));
                return;
            }
        }
    }

    /// The container with this id.
    pub(crate) fn container(&self, id: &str) -> Result<Arc<Container>, TaskError> {
        match self.containers().get(id) {
            Some(Slot::There(container)) => Ok(container.clone()),
            Some(Slot::Creating) | None => Err(TaskError::NoContainer { id: id.to_owned() }),
        }
    }

    fn count(&self) {
        let count = self.containers().len();
        self.count.send_replace(count);
    }

    /// Makes a container; answers with the pid of its init.
    pub(crate) async fn create(self: &Arc<Self>, request: CreateTaskRequest) -> Result<u32, TaskError> {
        let id = request.id.clone();
        match self.containers().entry(id.clone()) {
            std::collections::hash_map::Entry::Occupied(_) => return Err(TaskError::Exists { id }),
            std::collections::hash_map::Entry::Vacant(free) => drop(free.insert(Slot::Creating)),
        }
        self.asked.store(false, Ordering::Relaxed);
        self.count();
        // In a task of its own: a caller that goes away must not leave it half done.
        let pod = self.clone();
        let made = tokio::spawn(async move {
            let made = container::create(&pod.place, &request).await;
            match &made {
                Ok(container) => {
                    pod.containers().insert(request.id.clone(), Slot::There(container.clone()));
                }
                Err(_) => {
                    pod.containers().remove(&request.id);
                    pod.count();
                    if pod.asked.load(Ordering::Relaxed) {
                        pod.shut_down();
                    }
                }
            }
            made
        });
        let container = made.await.unwrap_or(Err(TaskError::Unsupported { what: "a task that failed" }))?;
        Ok(container.init.state().pid())
    }

    /// Takes a container away.
    pub(crate) async fn delete(self: &Arc<Self>, id: &str) -> Result<(u32, Exit), TaskError> {
        let container = self.container(id)?;
        let (pod, id) = (self.clone(), id.to_owned());
        let deleted = tokio::spawn(async move {
            let deleted = container.delete().await?;
            pod.containers().remove(&id);
            pod.count();
            Ok(deleted)
        });
        deleted.await.unwrap_or(Err(TaskError::Unsupported { what: "a task that failed" }))
    }

    /// containerd asks the shim to end; it does if no container is left.
    pub(crate) fn shut_down(&self) {
        if self.containers().is_empty() {
            self.shutdown.notify_one();
        } else {
            self.asked.store(true, Ordering::Relaxed);
        }
    }

    /// Resolves when the shim is to end.
    pub(crate) async fn over(&self) {
        tokio::select! {
            () = self.shutdown.notified() => {}
            () = self.idle() => {}
        }
        drop(tokio::time::timeout(FLUSH, self.place.events.drained()).await);
    }

    async fn idle(&self) {
        let mut count = self.count.subscribe();
        loop {
            if *count.borrow_and_update() > 0 {
                drop(count.changed().await);
            } else if tokio::time::timeout(IDLE, count.changed()).await.is_err() {
                return;
            }
        }
    }
}
