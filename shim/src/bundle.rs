//! A container's bundle: its OCI spec and the few files that the shim keeps beside it.
//!
//! The spec is kept as a JSON value, so that fields unknown here reach the runtime unchanged. The shim's own
//! file says how the runtime was run: `delete` has nothing else when the shim is gone. The exit status is
//! written before it is published. Trusts the bundle: containerd makes it, root only.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::reaper::Exit;

const CONFIG: &str = "config.json";
const RECORD: &str = "gpuslice-shim.json";
const EXIT: &str = "gpuslice-exit.json";
const INIT_PID: &str = "init.pid";

/// What failed on a bundle.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BundleError {
    #[error("can't read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("can't write {}", path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} is not what it should be", path.display())]
    Json {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    #[error("{} holds \"{found}\", not a pid", path.display())]
    Pid { path: PathBuf, found: String },
}

/// How a container's runtime was run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// The runtime's executable.
    pub(crate) binary: PathBuf,
    /// Its state directory, with the namespace.
    pub(crate) root: PathBuf,
    /// Whether it was told to use systemd.
    pub(crate) systemd_cgroup: bool,
    /// The node's configuration.
    pub(crate) config: PathBuf,
    /// The socket of the shim.
    pub(crate) socket: String,
}

#[derive(Serialize, Deserialize)]
struct StoredExit {
    pid: u32,
    status: u32,
    seconds: u64,
    nanoseconds: u32,
}

fn read(path: PathBuf) -> Result<Vec<u8>, BundleError> {
    fs::read(&path).map_err(|source| BundleError::Read { path, source })
}

fn parse<'a, T: Deserialize<'a>>(path: &Path, bytes: &'a [u8]) -> Result<T, BundleError> {
    serde_json::from_slice(bytes).map_err(|source| BundleError::Json { path: path.to_owned(), source })
}

/// Replaces a file as a whole: readers see the old one or the new one.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> Result<(), BundleError> {
    let fail = |source| BundleError::Write { path: path.to_owned(), source };
    let new = path.with_extension("new");
    let mut file = fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&new)
        .map_err(fail)?;
    file.write_all(bytes).map_err(fail)?;
    fs::rename(&new, path).map_err(fail)
}

fn replace_json<T: Serialize>(path: &Path, value: &T) -> Result<(), BundleError> {
    let bytes =
        serde_json::to_vec(value).map_err(|source| BundleError::Json { path: path.to_owned(), source })?;
    replace(path, &bytes)
}

/// The container's OCI spec.
pub(crate) fn spec(bundle: &Path) -> Result<Value, BundleError> {
    let path = bundle.join(CONFIG);
    let bytes = read(path.clone())?;
    parse(&path, &bytes)
}

/// Replaces the container's OCI spec.
pub(crate) fn write_spec(bundle: &Path, spec: &Value) -> Result<(), BundleError> {
    replace_json(&bundle.join(CONFIG), spec)
}

/// The annotation of a spec.
pub(crate) fn annotation<'a>(spec: &'a Value, key: &str) -> Option<&'a str> {
    spec.get("annotations")?.get(key)?.as_str()
}

/// The record of how the runtime was run; none before Create came so far.
pub(crate) fn record(bundle: &Path) -> Result<Option<Record>, BundleError> {
    let path = bundle.join(RECORD);
    match read(path.clone()) {
        Ok(bytes) => parse(&path, &bytes).map(Some),
        Err(BundleError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Writes that record.
pub(crate) fn write_record(bundle: &Path, record: &Record) -> Result<(), BundleError> {
    replace_json(&bundle.join(RECORD), record)
}

/// Where the runtime writes the pid of init.
pub(crate) fn init_pid_file(bundle: &Path) -> PathBuf {
    bundle.join(INIT_PID)
}

/// The pid in a file that the runtime wrote.
pub(crate) fn pid(path: &Path) -> Result<u32, BundleError> {
    let text =
        fs::read_to_string(path).map_err(|source| BundleError::Read { path: path.to_owned(), source })?;
    let found = text.trim();
    match found.parse::<u32>() {
        Ok(pid) if pid > 0 && i32::try_from(pid).is_ok() => Ok(pid),
        Ok(_) | Err(_) => {
            Err(BundleError::Pid { path: path.to_owned(), found: found.chars().take(40).collect() })
        }
    }
}

/// Stores how init ended, for a `delete` without a shim.
pub(crate) fn write_exit(bundle: &Path, pid: u32, exit: Exit) -> Result<(), BundleError> {
    let since = exit.at.duration_since(UNIX_EPOCH).unwrap_or_default();
    let stored =
        StoredExit { pid, status: exit.status, seconds: since.as_secs(), nanoseconds: since.subsec_nanos() };
    replace_json(&bundle.join(EXIT), &stored)
}

/// How init ended, if that was stored: its pid and exit.
pub(crate) fn exit(bundle: &Path) -> Option<(u32, Exit)> {
    let bytes = fs::read(bundle.join(EXIT)).ok()?;
    let stored: StoredExit = serde_json::from_slice(&bytes).ok()?;
    let since = Duration::new(stored.seconds, stored.nanoseconds.min(999_999_999));
    let at = UNIX_EPOCH.checked_add(since).unwrap_or_else(SystemTime::now);
    Some((stored.pid, Exit { status: stored.status, at }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stored_exit_is_read_back_as_it_was() {
        let bundle = tempfile::tempdir().unwrap();
        assert_eq!(exit(bundle.path()), None);
        let ended = Exit { status: 137, at: UNIX_EPOCH + Duration::new(1_700_000_000, 5) };
        write_exit(bundle.path(), 77, ended).unwrap();
        assert_eq!(exit(bundle.path()), Some((77, ended)));
    }

    #[test]
    fn unknown_fields_of_a_spec_survive_a_rewrite() {
        let bundle = tempfile::tempdir().unwrap();
        fs::write(bundle.path().join(CONFIG), r#"{"ociVersion":"1.0","future":{"a":[1]}}"#).unwrap();
        let spec = spec(bundle.path()).unwrap();
        write_spec(bundle.path(), &spec).unwrap();
        let again: Value = serde_json::from_slice(&fs::read(bundle.path().join(CONFIG)).unwrap()).unwrap();
        assert_eq!(again.get("future"), spec.get("future"));
    }

    #[test]
    fn a_pid_file_must_hold_a_pid() {
        let bundle = tempfile::tempdir().unwrap();
        let path = init_pid_file(bundle.path());
        for bad in ["", "0", "-4", "x", "99999999999"] {
            fs::write(&path, bad).unwrap();
            assert!(matches!(pid(&path), Err(BundleError::Pid { .. })), "{bad}");
        }
        fs::write(&path, "41\n").unwrap();
        assert_eq!(pid(&path).unwrap(), 41);
    }
}
