//! Start of init, and execs: added, started, deleted.

use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use containerd_shim_protos::api::ExecProcessRequest;
use containerd_shim_protos::events::task::{TaskExecAdded, TaskExecStarted, TaskStart};
use serde_json::Value;

use super::{Container, Process, State};
use crate::bundle;
use crate::events::Event;
use crate::gpu;
use crate::io::{ConsoleSocket, Io, Paths};
use crate::reaper::Child;
use crate::status::TaskError;

static NEXT: AtomicU64 = AtomicU64::new(0);

/// The files that an exec needs for a moment; gone when dropped.
struct Files {
    process: PathBuf,
    pid: PathBuf,
}

impl Drop for Files {
    fn drop(&mut self) {
        drop(std::fs::remove_file(&self.process));
        drop(std::fs::remove_file(&self.pid));
    }
}

impl Container {
    /// Starts a process; answers with its pid.
    pub(crate) async fn start(self: &Arc<Self>, exec: &str) -> Result<u32, TaskError> {
        if exec.is_empty() { self.start_init().await } else { self.start_exec(exec).await }
    }

    async fn start_init(&self) -> Result<u32, TaskError> {
        let _verb = self.verbs.lock().await;
        let _gate = self.init.gate.lock().await;
        let State::Created { pid } = self.init.state() else {
            return Err(self.init.state().refuse("start"));
        };
        self.runc.start(&self.id).await.map_err(TaskError::Runc)?;
        self.init.state.send_replace(State::Running { pid });
        self.events.publish(&Event::Start(TaskStart {
            container_id: self.id.clone(),
            pid,
            ..TaskStart::default()
        }));
        Ok(pid)
    }

    /// Adds an exec; it is started later.
    pub(crate) fn add_exec(&self, request: &ExecProcessRequest) -> Result<(), TaskError> {
        let id = &request.exec_id;
        if id.is_empty() {
            return Err(TaskError::Request { what: "exec id" });
        }
        if self.ending.load(Ordering::Relaxed) || self.init.state().alive().is_none() {
            return Err(self.init.state().refuse("exec in"));
        }
        let bytes = request.spec.as_ref().map(|any| any.value.as_slice()).unwrap_or_default();
        let malformed = |_| TaskError::Request { what: "process to exec" };
        let mut spec: Value = serde_json::from_slice(bytes).map_err(malformed)?;
        let fields = spec.as_object_mut().ok_or(TaskError::Request { what: "process to exec" })?;
        fields.insert("terminal".into(), Value::Bool(request.terminal));
        gpu::check_exec(&self.config, &spec).map_err(TaskError::Gpu)?;
        let paths = Paths {
            stdin: request.stdin.clone(),
            stdout: request.stdout.clone(),
            stderr: request.stderr.clone(),
            terminal: request.terminal,
        };
        let process = Process::new(Some(id.clone()), paths, Some(spec), State::Added, None);
        match self.execs().entry(id.clone()) {
            std::collections::hash_map::Entry::Occupied(_) => {
                return Err(TaskError::Exists { id: id.clone() });
            }
            std::collections::hash_map::Entry::Vacant(place) => drop(place.insert(process)),
        }
        self.events.publish(&Event::ExecAdded(TaskExecAdded {
            container_id: self.id.clone(),
            exec_id: id.clone(),
            ..TaskExecAdded::default()
        }));
        Ok(())
    }

    async fn start_exec(self: &Arc<Self>, exec: &str) -> Result<u32, TaskError> {
        let process = self.process(exec)?;
        let _gate = process.gate.lock().await;
        if process.state() != State::Added {
            return Err(process.state().refuse("start"));
        }
        let init = self.init.state();
        if self.ending.load(Ordering::Relaxed)
            || !matches!(init, State::Running { .. } | State::Created { .. })
        {
            return Err(init.refuse("exec in"));
        }
        let (child, io) = self.run_exec(&process).await?;
        let pid = u32::try_from(child.pid.as_raw()).unwrap_or(0);
        *process.io() = Some(io);
        process.state.send_replace(State::Running { pid });
        self.gpu.exec_started(pid);
        self.events.publish(&Event::ExecStarted(TaskExecStarted {
            container_id: self.id.clone(),
            exec_id: exec.to_owned(),
            pid,
            ..TaskExecStarted::default()
        }));
        self.clone().watch_exec(process.clone(), child);
        Ok(pid)
    }

    async fn run_exec(&self, process: &Process) -> Result<(Child, Io), TaskError> {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = |kind: &str| self.bundle.join(format!("exec-{}-{number}.{kind}", std::process::id()));
        let files = Files { process: name("json"), pid: name("pid") };
        let spec = process.spec.as_ref().ok_or(TaskError::Request { what: "process to exec" })?;
        let written = serde_json::to_vec(spec).map_err(std::io::Error::other).and_then(|bytes| {
            let mut file =
                std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&files.process)?;
            std::io::Write::write_all(&mut file, &bytes)
        });
        written.map_err(|source| {
            TaskError::Bundle(bundle::BundleError::Write { path: files.process.clone(), source })
        })?;
        let hold = self.reaper.hold();
        let io = if process.paths.terminal {
            let socket = ConsoleSocket::new(&self.socket_directory).map_err(TaskError::Io)?;
            let ran = self.runc.exec(&self.id, &files.process, &files.pid, Some(socket.path()), None).await;
            ran.map_err(TaskError::Runc)?;
            let master = socket.receive().await.map_err(TaskError::Io)?;
            Io::terminal(&process.paths, master, &self.setting).await.map_err(TaskError::Io)?
        } else {
            let (mut io, ends) = Io::pipes(&process.paths, &self.setting).await.map_err(TaskError::Io)?;
            let ran = self.runc.exec(&self.id, &files.process, &files.pid, None, Some(ends.stdio())).await;
            if let Err(error) = ran {
                io.close(std::time::Duration::ZERO).await;
                return Err(TaskError::Runc(error));
            }
            io.begin();
            io
        };
        match bundle::pid(&files.pid) {
            Ok(pid) => Ok((self.reaper.claim(super::signal::raw(pid), &hold), io)),
            Err(error) => {
                io.close(std::time::Duration::ZERO).await;
                Err(TaskError::Bundle(error))
            }
        }
    }
}
