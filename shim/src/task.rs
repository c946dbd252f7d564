//! containerd's task API, versions 2 and 3, whose messages are the same. Each call is handed on; errors get their
//! code in `status`.

use std::sync::Arc;

use async_trait::async_trait;
use containerd_shim_protos::api::{
    CheckpointTaskRequest, CloseIORequest, ConnectRequest, ConnectResponse, CreateTaskRequest,
    CreateTaskResponse, DeleteRequest, DeleteResponse, Empty, ExecProcessRequest, KillRequest, PauseRequest,
    PidsRequest, PidsResponse, ProcessInfo, ResizePtyRequest, ResumeRequest, ShutdownRequest, StartRequest,
    StartResponse, StateRequest, StateResponse, StatsRequest, StatsResponse, UpdateTaskRequest, WaitRequest,
    WaitResponse,
};
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::protobuf::{EnumOrUnknown, Message, MessageField};
use containerd_shim_protos::shim::oci::ProcessDetails;
use containerd_shim_protos::shim_async::Task;
use containerd_shim_protos::ttrpc;
use containerd_shim_protos::ttrpc::r#async::TtrpcContext;

use crate::events::timestamp;
use crate::pod::Pod;
use crate::status::TaskError;

/// The service under both of its names.
pub(crate) struct Service(pub(crate) Arc<Pod>);

impl Service {
    fn pod(&self) -> &Arc<Pod> {
        self.0.heard();
        &self.0
    }
}

#[async_trait]
impl Task for Service {
    async fn create(
        &self,
        _: &TtrpcContext,
        request: CreateTaskRequest,
    ) -> ttrpc::Result<CreateTaskResponse> {
        let pid = self.pod().create(request).await?;
        Ok(CreateTaskResponse { pid, ..CreateTaskResponse::default() })
    }

    async fn start(&self, _: &TtrpcContext, request: StartRequest) -> ttrpc::Result<StartResponse> {
        let container = self.pod().container(&request.id)?;
        // In a task of its own: a caller that goes away must not cut it short.
        let started = tokio::spawn(async move { container.start(&request.exec_id).await });
        let pid = started.await.unwrap_or(Err(TaskError::Unsupported { what: "a task that failed" }))?;
        Ok(StartResponse { pid, ..StartResponse::default() })
    }

    async fn state(&self, _: &TtrpcContext, request: StateRequest) -> ttrpc::Result<StateResponse> {
        let container = self.pod().container(&request.id)?;
        let process = container.process(&request.exec_id)?;
        let state = process.state();
        let exit = state.exit();
        Ok(StateResponse {
            id: process.exec.clone().unwrap_or_else(|| container.id.clone()),
            bundle: container.bundle.display().to_string(),
            pid: state.pid(),
            status: EnumOrUnknown::new(container.status(&process)),
            stdin: process.paths.stdin.clone(),
            stdout: process.paths.stdout.clone(),
            stderr: process.paths.stderr.clone(),
            terminal: process.paths.terminal,
            exit_status: exit.map_or(0, |exit| exit.status),
            exited_at: exit.map_or_else(MessageField::none, |exit| timestamp(exit.at)),
            exec_id: request.exec_id,
            ..StateResponse::default()
        })
    }

    async fn delete(&self, _: &TtrpcContext, request: DeleteRequest) -> ttrpc::Result<DeleteResponse> {
        let pod = self.pod();
        let (pid, exit) = if request.exec_id.is_empty() {
            let (pid, exit) = pod.delete(&request.id).await?;
            (pid, Some(exit))
        } else {
            pod.container(&request.id)?.delete_exec(&request.exec_id).await?
        };
        Ok(DeleteResponse {
            pid,
            exit_status: exit.map_or(0, |exit| exit.status),
            exited_at: exit.map_or_else(MessageField::none, |exit| timestamp(exit.at)),
            ..DeleteResponse::default()
        })
    }

    async fn exec(&self, _: &TtrpcContext, request: ExecProcessRequest) -> ttrpc::Result<Empty> {
        self.pod().container(&request.id)?.add_exec(&request)?;
        Ok(Empty::new())
    }

    async fn resize_pty(&self, _: &TtrpcContext, request: ResizePtyRequest) -> ttrpc::Result<Empty> {
        let process = self.pod().container(&request.id)?.process(&request.exec_id)?;
        process.resize(request.width, request.height)?;
        Ok(Empty::new())
    }

    async fn kill(&self, _: &TtrpcContext, request: KillRequest) -> ttrpc::Result<Empty> {
        let container = self.pod().container(&request.id)?;
        container.kill(&request.exec_id, request.signal, request.all).await?;
        Ok(Empty::new())
    }

    async fn pids(&self, _: &TtrpcContext, request: PidsRequest) -> ttrpc::Result<PidsResponse> {
        let pids = self.pod().container(&request.id)?.pids().await?;
        let info = |(pid, exec): (u32, Option<String>)| {
            let details = exec.and_then(|exec_id| {
                let details = ProcessDetails { exec_id, ..ProcessDetails::default() };
                let value = details.write_to_bytes().ok()?;
                Some(Any { type_url: "containerd.runc.v1.ProcessDetails".into(), value, ..Any::default() })
            });
            ProcessInfo { pid, info: details.into(), ..ProcessInfo::default() }
        };
        Ok(PidsResponse { processes: pids.into_iter().map(info).collect(), ..PidsResponse::default() })
    }

    async fn pause(&self, _: &TtrpcContext, request: PauseRequest) -> ttrpc::Result<Empty> {
        self.pod().container(&request.id)?.pause().await?;
        Ok(Empty::new())
    }

    async fn resume(&self, _: &TtrpcContext, request: ResumeRequest) -> ttrpc::Result<Empty> {
        self.pod().container(&request.id)?.resume().await?;
        Ok(Empty::new())
    }

    async fn close_io(&self, _: &TtrpcContext, request: CloseIORequest) -> ttrpc::Result<Empty> {
        let process = self.pod().container(&request.id)?.process(&request.exec_id)?;
        if request.stdin {
            process.close_stdin();
        }
        Ok(Empty::new())
    }

    async fn checkpoint(&self, _: &TtrpcContext, _: CheckpointTaskRequest) -> ttrpc::Result<Empty> {
        Err(TaskError::Unsupported { what: "checkpoint" }.into())
    }

    async fn update(&self, _: &TtrpcContext, request: UpdateTaskRequest) -> ttrpc::Result<Empty> {
        let container = self.pod().container(&request.id)?;
        let resources = request.resources.as_ref().ok_or(TaskError::Request { what: "resources" })?;
        container.update(&resources.value).await?;
        Ok(Empty::new())
    }

    async fn wait(&self, _: &TtrpcContext, request: WaitRequest) -> ttrpc::Result<WaitResponse> {
        let process = self.pod().container(&request.id)?.process(&request.exec_id)?;
        let (_, exit) = process.ended().await;
        Ok(WaitResponse {
            exit_status: exit.status,
            exited_at: timestamp(exit.at),
            ..WaitResponse::default()
        })
    }

    async fn stats(&self, _: &TtrpcContext, request: StatsRequest) -> ttrpc::Result<StatsResponse> {
        let (kind, value) = self.pod().container(&request.id)?.stats()?;
        let stats = Any { type_url: kind.to_owned(), value, ..Any::default() };
        Ok(StatsResponse { stats: MessageField::some(stats), ..StatsResponse::default() })
    }

    async fn connect(&self, _: &TtrpcContext, request: ConnectRequest) -> ttrpc::Result<ConnectResponse> {
        let task_pid = self.pod().container(&request.id).map_or(0, |container| container.init.state().pid());
        Ok(ConnectResponse { shim_pid: std::process::id(), task_pid, ..ConnectResponse::default() })
    }

    async fn shutdown(&self, _: &TtrpcContext, _: ShutdownRequest) -> ttrpc::Result<Empty> {
        self.pod().shut_down();
        Ok(Empty::new())
    }
}
