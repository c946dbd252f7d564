//! `start`: the address of the pod's shim, which is started where there is none.

use std::ffi::{CString, OsStr};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use containerd_shim::Flags;
use containerd_shim::bootstrap::{BootstrapParams, BootstrapResult};
use containerd_shim_protos::protobuf::Message;
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use nix::fcntl::{Flock, FlockArg, OFlag};
use nix::sys::signal::{Signal, kill};
use serde::Deserialize;

use super::{MAX_SOCKET_PATH, ServiceError, bundle};
use crate::options::Asked;
use crate::report::{chain, log};
use crate::spawn::Program;
use crate::{Node, bundle as bundle_files, cgroup, runc};

/// containerd sends no more than this.
const MAX_INPUT: u64 = 10 << 20;
/// Containers with the same value of the first of these that is there share a shim.
const GROUPS: [&str; 2] = ["io.containerd.runc.v2.group", "io.kubernetes.cri.sandbox-id"];

/// What containerd sent, in either of its ways.
struct Call {
    bootstrap: bool,
    daemon: String,
    events: String,
    options: Option<Any>,
}

#[derive(Deserialize)]
struct Annotated {
    #[serde(default)]
    annotations: std::collections::HashMap<String, String>,
}

pub(super) fn start(node: &Node, flags: &Flags) -> Result<(), ServiceError> {
    let bundle = bundle(flags)?;
    let call = read_call(flags)?;
    let asked = Asked::from_any(call.options.as_ref())?;
    let (_, config) = asked.config(&node.default_config)?;
    let group = group(&bundle)?.unwrap_or_else(|| flags.id.clone());
    let directory = directory(&config.run_dir)?;
    let socket = socket_path(&directory, &call.daemon, &flags.namespace, &group)?;
    let address = format!("unix://{}", socket.display());
    if let Some(listener) = bind_or_find(&directory, &socket)? {
        let started = spawn(node, flags, &bundle, &socket, &call, listener.into());
        let pid = started.inspect_err(|_| drop(fs::remove_file(&socket)))?;
        if let Err(error) = settle(pid, &asked.shim_cgroup) {
            kill(pid, Signal::SIGKILL).ok();
            drop(fs::remove_file(&socket));
            return Err(error);
        }
    }
    bundle_files::replace(&bundle.join("address"), address.as_bytes())?;
    let answer = if call.bootstrap {
        let result =
            BootstrapResult { version: 3, address, protocol: "ttrpc".into(), ..BootstrapResult::default() };
        result.write_to_bytes().map_err(|error| ServiceError::Options(Box::new(error)))?
    } else {
        address.into_bytes()
    };
    io::stdout().write_all(&answer).map_err(ServiceError::Server)
}

/// Standard input tells the daemons apart: bootstrap parameters from 2.3 on, before that the options or nothing.
fn read_call(flags: &Flags) -> Result<Call, ServiceError> {
    let mut input = Vec::new();
    let stdin = io::stdin();
    if !io::IsTerminal::is_terminal(&stdin) {
        stdin.lock().take(MAX_INPUT).read_to_end(&mut input).map_err(ServiceError::Server)?;
    }
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    let params = BootstrapParams::parse_from_bytes(&input).ok();
    let ours =
        |params: &BootstrapParams| params.instance_id == flags.id && params.namespace == flags.namespace;
    if let Some(params) = params.filter(|params| !input.is_empty() && ours(params)) {
        let options = params
            .extensions
            .into_iter()
            .filter_map(|extension| extension.value.into_option())
            .find(|any| any.type_url.ends_with("Options"));
        let daemon = params.containerd_grpc_address;
        return Ok(Call { bootstrap: true, daemon, events: params.containerd_ttrpc_address, options });
    }
    let options = Any::parse_from_bytes(&input).ok().filter(|any| !any.type_url.is_empty());
    let daemon = if flags.address.is_empty() { variable("GRPC_ADDRESS") } else { flags.address.clone() };
    let events = match variable("TTRPC_ADDRESS") {
        events if events.is_empty() => format!("{daemon}.ttrpc"),
        events => events,
    };
    Ok(Call { bootstrap: false, daemon, events, options })
}

/// The pod of the container in this bundle.
fn group(bundle: &Path) -> Result<Option<String>, ServiceError> {
    let path = bundle.join("config.json");
    let file = File::open(&path).map_err(|source| ServiceError::Path { what: "can't read", path, source })?;
    let spec: Annotated = serde_json::from_reader(io::BufReader::new(file))
        .map_err(|error| ServiceError::Bundle(Box::new(error)))?;
    Ok(GROUPS.iter().find_map(|key| spec.annotations.get(*key).cloned()))
}

/// The directory of the shims' sockets: root's, closed to all others.
fn directory(run_dir: &Path) -> Result<PathBuf, ServiceError> {
    let path = run_dir.join("s");
    let fail = |what| {
        let path = path.clone();
        move |source| ServiceError::Path { what, path, source }
    };
    DirBuilder::new().recursive(true).mode(0o700).create(&path).map_err(fail("can't make"))?;
    let meta = fs::symlink_metadata(&path).map_err(fail("can't look at"))?;
    if meta.uid() != 0 || !meta.is_dir() {
        return Err(fail("must be a directory of root:")(io::Error::from(io::ErrorKind::PermissionDenied)));
    }
    if meta.mode() & 0o077 != 0 {
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).map_err(fail("can't close"))?;
    }
    Ok(path)
}

fn socket_path(
    directory: &Path,
    daemon: &str,
    namespace: &str,
    group: &str,
) -> Result<PathBuf, ServiceError> {
    // The crate hashes daemon, namespace and id as containerd does; 128 bits of it keep the path short.
    let address = containerd_shim::socket_address(daemon, namespace, group);
    let hash = address.rsplit('/').next().unwrap_or_default();
    let path = directory.join(hash.get(..32).unwrap_or(hash));
    if path.as_os_str().len() > MAX_SOCKET_PATH {
        return Err(ServiceError::LongPath { path });
    }
    Ok(path)
}

/// A new listener; none where a shim listens already.
fn bind_or_find(directory: &Path, socket: &Path) -> Result<Option<UnixListener>, ServiceError> {
    let path = directory.join("lock");
    let fail = |what, path: &Path| {
        let path = path.to_owned();
        move |source| ServiceError::Path { what, path, source }
    };
    let file = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&path);
    let lock = Flock::lock(file.map_err(fail("can't open", &path))?, FlockArg::LockExclusive);
    let _lock = lock.map_err(|(_, error)| fail("can't lock", &path)(error.into()))?;
    if UnixStream::connect(socket).is_ok() {
        return Ok(None);
    }
    // Nobody listens: what is there was left by a shim that died.
    drop(fs::remove_file(socket));
    let listener = UnixListener::bind(socket).map_err(fail("can't listen on", socket))?;
    fs::set_permissions(socket, fs::Permissions::from_mode(0o600)).map_err(fail("can't close", socket))?;
    Ok(Some(listener))
}

/// containerd reads a fifo named `log` in the bundle. Opened for both, so that a daemon may come and go.
fn log_file(bundle: &Path) -> io::Result<OwnedFd> {
    let path = bundle.join("log");
    let is_fifo = fs::symlink_metadata(&path).is_ok_and(|meta| meta.file_type().is_fifo());
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(OFlag::O_NONBLOCK.bits());
    options.open(if is_fifo { &path } else { Path::new("/dev/null") }).map(OwnedFd::from)
}

fn spawn(
    node: &Node,
    flags: &Flags,
    bundle: &Path,
    socket: &Path,
    call: &Call,
    listener: OwnedFd,
) -> Result<nix::unistd::Pid, ServiceError> {
    let me = PathBuf::from("/proc/self/exe");
    let fail = |what, path: &Path| {
        let path = path.to_owned();
        move |source| ServiceError::Path { what, path, source }
    };
    let program = fs::read_link(&me).map_err(fail("can't read", &me))?;
    let word = |text: &OsStr| {
        CString::new(text.as_bytes()).map_err(|error| ServiceError::Usage { reason: error.to_string() })
    };
    let mut arguments = vec![word(program.as_os_str())?];
    for text in ["-namespace", &flags.namespace, "-id", &flags.id, "-address", &call.daemon, "-socket"] {
        arguments.push(word(text.as_ref())?);
    }
    arguments.push(word(socket.as_os_str())?);
    let mut environment = runc::environment();
    let mut variables = vec![("TTRPC_ADDRESS", OsStr::new(&call.events).to_owned())];
    // One heap, given back early: the shim is small and there is one per pod.
    variables.extend([("MALLOC_ARENA_MAX", "1".into()), ("MALLOC_TRIM_THRESHOLD_", "65536".into())]);
    variables.extend(node.keep_environment.iter().filter_map(|name| Some((*name, std::env::var_os(name)?))));
    for (name, value) in variables {
        let mut variable = std::ffi::OsString::from(name);
        variable.push("=");
        variable.push(value);
        environment.push(word(&variable)?);
    }
    let out = log_file(bundle).map_err(fail("can't open the log of", bundle))?;
    let program = Program {
        path: word(program.as_os_str())?,
        arguments,
        environment: &environment,
        files: vec![listener.as_fd(), out.as_fd(), out.as_fd()],
    };
    program.start().map_err(fail("can't start", &me))
}

/// The new shim's cgroup and its place among what the kernel kills when memory runs out: after containerd.
fn settle(pid: nix::unistd::Pid, shim_cgroup: &str) -> Result<(), ServiceError> {
    let pid = u32::try_from(pid.as_raw()).unwrap_or(0);
    if !shim_cgroup.is_empty() {
        cgroup::join(shim_cgroup, pid).map_err(|error| ServiceError::Options(Box::new(error)))?;
    }
    // Without CAP_SYS_RESOURCE the score can't be lowered; the shim then keeps what it inherited.
    if let Err(error) = containerd_shim::cgroup::adjust_oom_score(pid) {
        log("start", &format!("out-of-memory score of the shim is unchanged: {}", chain(&error)));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_path_is_short_and_differs_by_daemon_namespace_and_pod() {
        let directory = Path::new("/run/gpuslice/s");
        let path = |daemon, namespace, group| socket_path(directory, daemon, namespace, group).unwrap();
        let one = path("/run/containerd/containerd.sock", "k8s.io", "pod");
        assert!(one.as_os_str().len() < 60, "{}", one.display());
        assert_ne!(one, path("/run/other.sock", "k8s.io", "pod"));
        assert_ne!(one, path("/run/containerd/containerd.sock", "moby", "pod"));
        assert_ne!(one, path("/run/containerd/containerd.sock", "k8s.io", "pod2"));
        let deep = PathBuf::from(format!("/{}", "d".repeat(90)));
        assert!(matches!(socket_path(&deep, "a", "b", "c"), Err(ServiceError::LongPath { .. })));
    }

    #[test]
    fn a_dead_shims_socket_is_replaced_and_a_living_one_found() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("x");
        let first = bind_or_find(directory.path(), &socket).unwrap().unwrap();
        assert_eq!(fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(bind_or_find(directory.path(), &socket).unwrap().is_none());
        drop(first);
        assert!(bind_or_find(directory.path(), &socket).unwrap().is_some());
    }

    #[test]
    fn the_pod_of_a_bundle_is_its_sandbox_annotation() {
        let directory = tempfile::tempdir().unwrap();
        let write = |text: &str| fs::write(directory.path().join("config.json"), text).unwrap();
        write(r#"{"ociVersion":"1","annotations":{"io.kubernetes.cri.sandbox-id":"p1"}}"#);
        assert_eq!(group(directory.path()).unwrap().as_deref(), Some("p1"));
        write(r#"{"ociVersion":"1"}"#);
        assert_eq!(group(directory.path()).unwrap(), None);
    }
}
