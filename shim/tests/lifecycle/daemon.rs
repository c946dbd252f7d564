//! A daemon as far as the shim can tell: starts it, talks to it, takes its events.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use containerd_shim_protos::api::{CreateTaskRequest, DeleteRequest, KillRequest, StartRequest, WaitRequest};
use containerd_shim_protos::events::task::TaskExit;
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::protobuf::{Message, MessageField};
use containerd_shim_protos::shim::events::ForwardRequest;
use containerd_shim_protos::shim_async::{Client, Events, TaskClient, create_events};
use containerd_shim_protos::ttrpc::r#async::{Server, TtrpcContext};
use containerd_shim_protos::ttrpc::{self, context::Context};

/// Topic, and for an exit whose it is.
type Seen = Arc<Mutex<Vec<String>>>;

struct Collector(Seen);

#[async_trait]
impl Events for Collector {
    async fn forward(
        &self,
        _: &TtrpcContext,
        request: ForwardRequest,
    ) -> ttrpc::Result<containerd_shim_protos::api::Empty> {
        let envelope = request.envelope.unwrap_or_default();
        let event = envelope.event.unwrap_or_default();
        let mut text = envelope.topic;
        if event.type_url == "containerd.events.TaskExit" {
            let exit = TaskExit::parse_from_bytes(&event.value).unwrap();
            text = format!("{text} {} {}", exit.id, exit.exit_status);
        }
        self.0.lock().unwrap().push(text);
        Ok(Default::default())
    }
}

/// One temporary node.
pub(crate) struct Daemon {
    pub(crate) directory: tempfile::TempDir,
    pub(crate) events: Seen,
    server: Option<Server>,
}

pub(crate) fn soon() -> Context {
    ttrpc::context::with_duration(Duration::from_secs(20))
}

impl Daemon {
    pub(crate) fn new() -> Daemon {
        let directory = tempfile::tempdir().unwrap();
        let rootfs = directory.path().join("rootfs/bin");
        std::fs::create_dir_all(&rootfs).unwrap();
        std::fs::copy("/bin/busybox", rootfs.join("busybox")).unwrap();
        for name in ["sh", "sleep", "cat", "echo", "kill", "true", "dd"] {
            std::os::unix::fs::symlink("busybox", rootfs.join(name)).unwrap();
        }
        let run = directory.path().join("run");
        let config = format!("run_dir = {run:?}\n[runtime]\nroot = {:?}\n", directory.path().join("runc"));
        std::fs::write(directory.path().join("config.toml"), config).unwrap();
        Daemon { directory, events: Seen::default(), server: None }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Takes events from now on.
    pub(crate) async fn listen(&mut self) {
        let path = self.path("events.sock");
        drop(std::fs::remove_file(&path));
        let services = create_events(Arc::new(Collector(self.events.clone())));
        let mut server = Server::new().bind(&format!("unix://{}", path.display())).unwrap();
        server = server.register_service(services);
        server.start().await.unwrap();
        self.server = Some(server);
    }

    /// Is away from now on.
    pub(crate) async fn leave(&mut self) {
        if let Some(mut server) = self.server.take() {
            server.shutdown().await.unwrap();
        }
        drop(std::fs::remove_file(self.path("events.sock")));
    }

    /// A bundle whose container runs `script`.
    pub(crate) fn bundle(&self, id: &str, script: &str) -> PathBuf {
        let bundle = self.path(id);
        std::fs::create_dir(&bundle).unwrap();
        let namespaces =
            ["pid", "ipc", "uts", "mount", "network"].map(|kind| serde_json::json!({ "type": kind }));
        let spec = serde_json::json!({
            "ociVersion": "1.0.2",
            "process": {
                "user": { "uid": 0, "gid": 0 },
                "args": ["/bin/sh", "-c", script],
                "env": ["PATH=/bin"],
                "cwd": "/",
                "capabilities": { "bounding": [], "effective": [], "permitted": [] },
            },
            "root": { "path": self.path("rootfs") },
            "mounts": [{ "destination": "/proc", "type": "proc", "source": "proc" }],
            "linux": { "cgroupsPath": format!("/gpuslice-test-{}/{id}", std::process::id()), "namespaces": namespaces },
        });
        std::fs::write(bundle.join("config.json"), spec.to_string()).unwrap();
        bundle
    }

    /// Options that name this node's configuration: `runtimeoptions.v1.Options`, field 2.
    pub(crate) fn options(&self) -> Any {
        let path = self.path("config.toml").display().to_string();
        let mut value = vec![18, u8::try_from(path.len()).unwrap()];
        value.extend(path.as_bytes());
        Any { type_url: "runtimeoptions.v1.Options".into(), value, ..Any::default() }
    }

    pub(crate) fn shim(&self, bundle: &Path, id: &str, action: &str, stdin: &[u8]) -> Vec<u8> {
        let mut child = Command::new(env!("CARGO_BIN_EXE_containerd-shim-gpuslice-v1"))
            .args(["-namespace", "test", "-id", id, "-address", "/nowhere/c.sock", action])
            .env("TTRPC_ADDRESS", self.path("events.sock"))
            .current_dir(bundle)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        std::io::Write::write_all(&mut child.stdin.take().unwrap(), stdin).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success());
        output.stdout
    }

    /// Starts a shim and a container in it.
    pub(crate) async fn create(&self, id: &str, script: &str) -> (TaskClient, u32) {
        let bundle = self.bundle(id, script);
        let options = self.options();
        let address = self.shim(&bundle, id, "start", &options.write_to_bytes().unwrap());
        let client = Client::connect(std::str::from_utf8(&address).unwrap()).await.unwrap();
        let task = TaskClient::new(client);
        let request = CreateTaskRequest {
            id: id.into(),
            bundle: bundle.display().to_string(),
            options: MessageField::some(options),
            ..CreateTaskRequest::default()
        };
        let created = task.create(soon(), &request).await.unwrap();
        (task, created.pid)
    }

    /// Waits until this event was taken, then gives all.
    pub(crate) async fn events(&self, last: &str) -> Vec<String> {
        for _ in 0..500 {
            if self.events.lock().unwrap().iter().any(|event| event == last) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        self.events.lock().unwrap().clone()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // The parent of the containers' cgroups; still in use by other tests, or empty.
        let name = format!("gpuslice-test-{}", std::process::id());
        drop(std::fs::remove_dir(std::path::Path::new("/sys/fs/cgroup").join(&name)));
        for hierarchy in std::fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten() {
            drop(std::fs::remove_dir(hierarchy.path().join(&name)));
        }
    }
}

pub(crate) async fn start(task: &TaskClient, id: &str, exec: &str) -> u32 {
    let request = StartRequest { id: id.into(), exec_id: exec.into(), ..StartRequest::default() };
    task.start(soon(), &request).await.unwrap().pid
}

pub(crate) async fn wait(task: &TaskClient, id: &str, exec: &str) -> u32 {
    let request = WaitRequest { id: id.into(), exec_id: exec.into(), ..WaitRequest::default() };
    task.wait(soon(), &request).await.unwrap().exit_status
}

pub(crate) async fn kill(task: &TaskClient, id: &str, exec: &str, signal: u32) -> ttrpc::Result<()> {
    let request = KillRequest { id: id.into(), exec_id: exec.into(), signal, ..KillRequest::default() };
    task.kill(soon(), &request).await.map(drop)
}

pub(crate) async fn delete(task: &TaskClient, id: &str, exec: &str) -> ttrpc::Result<u32> {
    let request = DeleteRequest { id: id.into(), exec_id: exec.into(), ..DeleteRequest::default() };
    task.delete(soon(), &request).await.map(|answer| answer.exit_status)
}

/// The code of a refused call.
pub(crate) fn code<T: std::fmt::Debug>(result: ttrpc::Result<T>) -> ttrpc::Code {
    match result.unwrap_err() {
        ttrpc::Error::RpcStatus(status) => status.code.unwrap(),
        other => panic!("{other:?}"),
    }
}
