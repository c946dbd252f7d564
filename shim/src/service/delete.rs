//! `delete`: takes away what a container left whose shim is gone, from its bundle alone.
//!
//! Each step is tried whatever the others did; what failed goes to the log, which containerd keeps. Order: the
//! runtime that was still making it, the container, its cgroups, its slice, its mounts, its shim's socket.

use std::fs;
use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use containerd_shim::Flags;
use containerd_shim_protos::api::DeleteResponse;
use containerd_shim_protos::protobuf::Message;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use super::{ServiceError, bundle};
use crate::bundle::{self as bundle_files, Record};
use crate::events::timestamp;
use crate::options::Asked;
use crate::reaper::{Exit, Reaper};
use crate::report::{chain, log};
use crate::runc::{self, Runc};
use crate::{Node, cgroup, gpu, mounts};

/// SIGKILL, as a shell counts it.
const KILLED: u32 = 137;

pub(super) fn delete(node: &Node, flags: &Flags) -> Result<(), ServiceError> {
    let mut bundle = bundle(flags)?;
    if bundle.file_name().and_then(|name| name.to_str()) != Some(flags.id.as_str()) {
        // containerd may call from a neighbour's bundle.
        if let Some(own) = bundle.parent().map(|parent| parent.join(&flags.id)).filter(|own| own.is_dir()) {
            bundle = own;
        }
    }
    let note =
        |what: &str, error: &dyn std::fmt::Display| log(&flags.id, &format!("delete: {what}: {error}"));
    let record = match bundle_files::record(&bundle) {
        Ok(record) => record,
        Err(error) => {
            note("record", &chain(&error));
            None
        }
    };
    kill_runtimes(&bundle);
    if let Some(record) = record.clone().or_else(|| guess(node, &flags.namespace))
        && let Err(error) = force_delete(&record, &bundle, &flags.id)
    {
        note("runtime", &chain(&error));
    }
    gpu::clean_up_after_crash(&bundle);
    let spec = bundle_files::spec(&bundle).unwrap_or_default();
    let cgroups = spec.pointer("/linux/cgroupsPath").and_then(Value::as_str).unwrap_or_default();
    if let Err(error) = cgroup::sweep(&cgroup::directories(cgroups)) {
        note("cgroups", &chain(&error));
    }
    if let Err(error) = mounts::unmount_all(&bundle.join("rootfs")) {
        note("root file system", &chain(&error));
    }
    if let Some(record) = record {
        remove_dead_socket(&record.socket);
    } else if let Ok(address) = fs::read_to_string(bundle.join("address")) {
        remove_dead_socket(address.trim().trim_start_matches("unix://"));
    }
    let (pid, exit) = bundle_files::exit(&bundle).unwrap_or_else(|| {
        let pid = bundle_files::pid(&bundle_files::init_pid_file(&bundle)).unwrap_or(0);
        (pid, Exit { status: KILLED, at: SystemTime::now() })
    });
    let answer = DeleteResponse {
        pid,
        exit_status: exit.status,
        exited_at: timestamp(exit.at),
        ..DeleteResponse::default()
    };
    let bytes = answer.write_to_bytes().map_err(|error| ServiceError::Bundle(Box::new(error)))?;
    io::stdout().write_all(&bytes).map_err(ServiceError::Server)
}

/// A shim that died before it wrote its record: the runtime may yet have been run as the node says.
fn guess(node: &Node, namespace: &str) -> Option<Record> {
    let asked = Asked::default();
    let (config_path, config) = asked.config(&node.default_config).ok()?;
    let options = asked.complete(&config);
    Some(Record {
        binary: runc::find(&options.binary_name).ok()?,
        root: options.root.join(namespace),
        systemd_cgroup: false,
        config: config_path,
        socket: String::new(),
    })
}

fn force_delete(record: &Record, bundle: &Path, id: &str) -> Result<(), ServiceError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(ServiceError::Server)?.block_on(async {
        let reaper = Reaper::start().map_err(ServiceError::Server)?;
        match Runc::new(record, bundle, reaper)?.delete(id, true).await {
            Err(error) if !error.is_absent() => Err(error.into()),
            Ok(()) | Err(_) => Ok(()),
        }
    })
}

/// Kills runtimes that still work on this bundle: the shim that would have read their answer is gone, and one
/// that ends after the container was deleted would bring it back.
fn kill_runtimes(bundle: &Path) {
    let Ok(entries) = fs::read_dir("/proc") else { return };
    for entry in entries.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        if pid > 1 && works_on(&entry.path(), bundle) {
            kill(Pid::from_raw(pid), Signal::SIGKILL).ok();
        }
    }
}

/// A runtime of ours: in this process's own pid namespace, with a log file in this very bundle among its first
/// arguments. A container's process isn't even looked at: its arguments lie in its memory, which may answer late.
fn works_on(process: &Path, bundle: &Path) -> bool {
    let namespace = |process: &Path| fs::read_link(process.join("ns/pid")).ok();
    if namespace(process).is_none_or(|found| Some(found) != namespace(Path::new("/proc/self"))) {
        return false;
    }
    let Ok(line) = fs::read(process.join("cmdline")) else { return false };
    let mut words = line.split(|byte| *byte == 0).take(8);
    let names_log = words.any(|word| word == b"--log");
    let log = words.next().and_then(|word| std::str::from_utf8(word).ok()).map(PathBuf::from);
    names_log && log.is_some_and(|log| log.parent() == Some(bundle))
}

/// Removes a socket that nobody listens on.
fn remove_dead_socket(path: &str) {
    let path = Path::new(path);
    if path.is_absolute()
        && UnixStream::connect(path).is_err_and(|e| e.kind() == io::ErrorKind::ConnectionRefused)
    {
        drop(fs::remove_file(path));
    }
}
