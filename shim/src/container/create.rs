//! Create: from a request to a container whose init waits to be started, or to nothing at all.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use containerd_shim_protos::api::CreateTaskRequest;
use containerd_shim_protos::events::task::{TaskCreate, TaskIO};
use containerd_shim_protos::protobuf::MessageField;
use serde_json::Value;
use tokio::sync::Mutex as VerbMutex;

use super::{Container, Process, State};
use crate::bundle::{self, Record};
use crate::cgroup::{self, Cgroups};
use crate::events::{Event, Publisher};
use crate::gpu;
use crate::io::{ConsoleSocket, Io, Paths, Setting};
use crate::options::{Asked, Options};
use crate::reaper::{Child, Reaper};
use crate::report::{chain, log};
use crate::runc::{self, Runc};
use crate::status::TaskError;
use crate::{CreateContext, Node, mounts};

/// Where a container is made: what all containers of a shim have in common.
pub(crate) struct Place {
    pub(crate) node: Node,
    pub(crate) namespace: String,
    /// Address of the shim's socket.
    pub(crate) socket: String,
    /// Root-only directory for sockets.
    pub(crate) socket_directory: PathBuf,
    pub(crate) reaper: Reaper,
    pub(crate) events: Publisher,
}

/// Makes a container. An error comes after everything was undone, and says what of that failed.
pub(crate) async fn create(place: &Place, request: &CreateTaskRequest) -> Result<Arc<Container>, TaskError> {
    if !request.checkpoint.is_empty() {
        return Err(TaskError::Unsupported { what: "restoring a checkpoint" });
    }
    let bundle = PathBuf::from(&request.bundle);
    if request.id.is_empty() || !bundle.is_absolute() {
        return Err(TaskError::Request { what: "container id or bundle" });
    }
    let asked = Asked::from_any(request.options.as_ref()).map_err(TaskError::Options)?;
    let (config_path, config) = asked.config(&place.node.default_config).map_err(TaskError::Options)?;
    let options = asked.complete(&config);
    let mut spec = bundle::spec(&bundle).map_err(TaskError::Bundle)?;
    let record = Record {
        binary: runc::find(&options.binary_name).map_err(TaskError::Runc)?,
        root: options.root.join(&place.namespace),
        systemd_cgroup: options.systemd_cgroup.unwrap_or_else(|| cgroup::is_systemd(cgroups_path(&spec))),
        config: config_path,
        socket: place.socket.clone(),
    };
    bundle::write_record(&bundle, &record).map_err(TaskError::Bundle)?;
    let runc = Runc::new(&record, &bundle, place.reaper.clone()).map_err(TaskError::Runc)?;
    let rootfs = bundle.join("rootfs");
    if let Err(first) = mount(request, &rootfs).await {
        return Err(undone(first, unmount(&rootfs).await.err().into_iter().collect()));
    }
    let context = CreateContext {
        id: request.id.clone(),
        namespace: place.namespace.clone(),
        bundle: bundle.clone(),
        pod: bundle::annotation(&spec, "io.kubernetes.cri.sandbox-id").map(str::to_owned),
        runtime: record.binary.clone(),
    };
    let prepared = match gpu::prepare(&place.node, &config, &context, &mut spec).await {
        Ok(prepared) => prepared,
        Err(error) => {
            let cleanup = unmount(&rootfs).await.err().into_iter().collect();
            return Err(undone(TaskError::Gpu(error), cleanup));
        }
    };
    let made = init(place, request, &options, &bundle, &spec, &runc).await;
    let (child, process) = match made {
        Ok(made) => made,
        Err(first) => {
            let cleanup = remove(&runc, &request.id, &rootfs).await;
            prepared.abandon().await;
            return Err(undone(first, cleanup));
        }
    };
    let gpu = match prepared.created(process.state().pid()).await {
        Ok(gpu) => gpu,
        Err(error) => {
            close(&process).await;
            return Err(undone(TaskError::Gpu(error), remove(&runc, &request.id, &rootfs).await));
        }
    };
    let container = assemble(place, request, &options, &spec, runc, process, Slice { gpu, config });
    place.events.publish(&Event::Create(create_event(request, &container)));
    container.clone().watch_init(child);
    Ok(container)
}

struct Slice {
    gpu: gpu::GpuContainer,
    config: gpuslice_config::Config,
}

fn assemble(
    place: &Place,
    request: &CreateTaskRequest,
    options: &Options,
    spec: &Value,
    runc: Runc,
    init: Arc<Process>,
    slice: Slice,
) -> Arc<Container> {
    let cgroups = match Cgroups::of(init.state().pid()) {
        Ok(cgroups) => Some(cgroups),
        Err(error) => {
            log(&request.id, &format!("no stats and no word of out-of-memory kills: {}", chain(&error)));
            None
        }
    };
    Arc::new(Container {
        id: request.id.clone(),
        bundle: PathBuf::from(&request.bundle),
        init,
        runc,
        reaper: place.reaper.clone(),
        events: place.events.clone(),
        setting: setting(place, &request.id, options),
        socket_directory: place.socket_directory.clone(),
        cgroups,
        own_pid_namespace: has_own_pid_namespace(spec),
        verbs: VerbMutex::default(),
        execs: Mutex::default(),
        paused: AtomicBool::new(false),
        ending: AtomicBool::new(false),
        gpu: Arc::new(slice.gpu),
        config: slice.config,
        teardown: Mutex::default(),
    })
}

fn create_event(request: &CreateTaskRequest, container: &Container) -> TaskCreate {
    TaskCreate {
        container_id: request.id.clone(),
        bundle: request.bundle.clone(),
        rootfs: request.rootfs.clone(),
        io: MessageField::some(TaskIO {
            stdin: request.stdin.clone(),
            stdout: request.stdout.clone(),
            stderr: request.stderr.clone(),
            terminal: request.terminal,
            ..TaskIO::default()
        }),
        pid: container.init.state().pid(),
        ..TaskCreate::default()
    }
}

fn setting(place: &Place, id: &str, options: &Options) -> Setting {
    Setting {
        container: id.to_owned(),
        namespace: place.namespace.clone(),
        uid: options.io_uid,
        gid: options.io_gid,
        reaper: place.reaper.clone(),
    }
}

/// Runs the runtime's create, with io.
async fn init(
    place: &Place,
    request: &CreateTaskRequest,
    options: &Options,
    bundle: &Path,
    spec: &Value,
    runc: &Runc,
) -> Result<(Child, Arc<Process>), TaskError> {
    bundle::write_spec(bundle, spec).map_err(TaskError::Bundle)?;
    let paths = Paths {
        stdin: request.stdin.clone(),
        stdout: request.stdout.clone(),
        stderr: request.stderr.clone(),
        terminal: request.terminal,
    };
    let mut flags = Vec::new();
    if options.no_pivot_root {
        flags.push("--no-pivot");
    }
    if options.no_new_keyring {
        flags.push("--no-new-keyring");
    }
    let setting = setting(place, &request.id, options);
    let pid_file = bundle::init_pid_file(bundle);
    // Init becomes a child of this process; it may end before its pid is known here.
    let hold = place.reaper.hold();
    let io = if paths.terminal {
        let socket = ConsoleSocket::new(&place.socket_directory).map_err(TaskError::Io)?;
        runc.create(&request.id, &pid_file, Some(socket.path()), &flags, None)
            .await
            .map_err(TaskError::Runc)?;
        let master = socket.receive().await.map_err(TaskError::Io)?;
        Io::terminal(&paths, master, &setting).await.map_err(TaskError::Io)?
    } else {
        let (mut io, ends) = Io::pipes(&paths, &setting).await.map_err(TaskError::Io)?;
        if let Err(error) = runc.create(&request.id, &pid_file, None, &flags, Some(ends.stdio())).await {
            io.close(std::time::Duration::ZERO).await;
            return Err(TaskError::Runc(error));
        }
        io.begin();
        io
    };
    let pid = match bundle::pid(&pid_file) {
        Ok(pid) => pid,
        Err(error) => {
            io.close(std::time::Duration::ZERO).await;
            return Err(TaskError::Bundle(error));
        }
    };
    let child = place.reaper.claim(super::signal::raw(pid), &hold);
    Ok((child, Process::new(None, paths, None, State::Created { pid }, Some(io))))
}

async fn close(process: &Process) {
    let io = process.io().take();
    if let Some(io) = io {
        io.close(std::time::Duration::ZERO).await;
    }
}

async fn mount(request: &CreateTaskRequest, rootfs: &Path) -> Result<(), TaskError> {
    if request.rootfs.is_empty() {
        return Ok(());
    }
    let (list, rootfs) = (request.rootfs.clone(), rootfs.to_owned());
    blocking(move || {
        // containerd makes it, but for clients that leave the mounting to the shim.
        drop(std::fs::create_dir(&rootfs));
        mounts::mount_all(&list, &rootfs).map_err(TaskError::Mount)
    })
    .await
}

/// Unmounts the root file system of a container.
pub(super) async fn unmount(rootfs: &Path) -> Result<(), TaskError> {
    let rootfs = rootfs.to_owned();
    blocking(move || mounts::unmount_all(&rootfs).map_err(TaskError::Mount)).await
}

async fn blocking<F>(work: F) -> Result<(), TaskError>
where
    F: FnOnce() -> Result<(), TaskError> + Send + 'static,
{
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or(Err(TaskError::Unsupported { what: "a worker that failed" }))
}

/// Takes away what the runtime made so far, and the root file system. Answers with what could not be done.
async fn remove(runc: &Runc, id: &str, rootfs: &Path) -> Vec<TaskError> {
    let mut failures = Vec::new();
    match runc.delete(id, true).await {
        Ok(()) => {}
        Err(error) if error.is_absent() => {}
        Err(error) => failures.push(TaskError::Runc(error)),
    }
    failures.extend(unmount(rootfs).await.err());
    failures
}

fn undone(first: TaskError, failures: Vec<TaskError>) -> TaskError {
    if failures.is_empty() {
        return first;
    }
    let cleanup = failures.iter().map(TaskError::text).collect::<Vec<_>>().join("; ");
    TaskError::Cleanup { first: Box::new(first), cleanup }
}

/// The cgroups path of a spec; empty where it has none.
fn cgroups_path(spec: &Value) -> &str {
    spec.pointer("/linux/cgroupsPath").and_then(Value::as_str).unwrap_or_default()
}

/// Whether the container has a pid namespace of its own: its processes then end with init.
fn has_own_pid_namespace(spec: &Value) -> bool {
    let namespaces = spec.pointer("/linux/namespaces").and_then(Value::as_array);
    namespaces.into_iter().flatten().any(|namespace| {
        let text = |key| namespace.get(key).and_then(Value::as_str).unwrap_or_default();
        text("type") == "pid" && text("path").is_empty()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shared_pid_namespace_is_not_the_containers_own() {
        let spec = |namespaces: &str| -> Value {
            serde_json::from_str(&format!(r#"{{"linux":{{"namespaces":{namespaces}}}}}"#)).unwrap()
        };
        assert!(has_own_pid_namespace(&spec(r#"[{"type":"mount"},{"type":"pid"}]"#)));
        assert!(!has_own_pid_namespace(&spec(r#"[{"type":"pid","path":"/proc/7/ns/pid"}]"#)));
        assert!(!has_own_pid_namespace(&spec(r#"[{"type":"mount"}]"#)));
        assert!(!has_own_pid_namespace(&serde_json::json!({})));
    }
}
