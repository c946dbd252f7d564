//! What the container runtime says about itself.

use std::fs;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::Release;

/// A container runtime's own words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Runtime {
    /// First line of its `--version`.
    pub version: String,
    /// The libseccomp that it runs with, if it says.
    pub libseccomp: Option<String>,
    /// It knows `SCMP_ACT_NOTIFY`; None: it doesn't list its features.
    pub notify: Option<bool>,
    /// It lists `SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV` among its supported flags.
    pub killable: bool,
}

/// Why a runtime could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum SupportError {
    /// It didn't run.
    #[error("can't run {path} {argument}")]
    Run {
        /// The binary.
        path: PathBuf,
        /// What it was asked.
        argument: &'static str,
        /// Why.
        source: std::io::Error,
    },
    /// It ran too long.
    #[error("{path} {argument} didn't end within {seconds} s")]
    Deadline {
        /// The binary.
        path: PathBuf,
        /// What it was asked.
        argument: &'static str,
        /// The limit.
        seconds: u64,
    },
    /// It failed.
    #[error("{path} {argument} failed ({status})")]
    Failed {
        /// The binary.
        path: PathBuf,
        /// What it was asked.
        argument: &'static str,
        /// How it ended.
        status: std::process::ExitStatus,
    },
}

const DEADLINE: Duration = Duration::from_secs(5);
const FLAG: &str = "SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV";

impl Runtime {
    /// Asks the binary at `path` for its version and features.
    ///
    /// # Errors
    /// It can't be run or hangs. One that doesn't know `features` is no error.
    pub fn probe(path: &Path) -> Result<Runtime, SupportError> {
        let version = ask(path, "--version")?;
        let features = match ask(path, "features") {
            Ok(text) => serde_json::from_str(&text).unwrap_or(Value::Null),
            Err(SupportError::Failed { .. }) => Value::Null,
            Err(other) => return Err(other),
        };
        Ok(Runtime::parse(&version, &features))
    }

    fn parse(version: &str, features: &Value) -> Runtime {
        let seccomp = features.pointer("/linux/seccomp");
        let lists = |field: &str, name: &str| {
            seccomp.and_then(|s| s.get(field)?.as_array()).is_some_and(|list| list.iter().any(|v| v == name))
        };
        let library =
            features.pointer("/annotations/io.github.seccomp.libseccomp.version").and_then(Value::as_str);
        let printed = version.lines().find_map(|line| line.strip_prefix("libseccomp:"));
        Runtime {
            version: version.lines().next().unwrap_or_default().trim().to_owned(),
            libseccomp: library.or(printed).map(|text| text.trim().to_owned()),
            notify: seccomp.map(|_| lists("actions", "SCMP_ACT_NOTIFY")),
            killable: lists("supportedFlags", FLAG),
        }
    }
}

/// Whether a container under the runtime at `path` can have `WAIT_KILLABLE_RECV`. The answer is kept in the file
/// `cache` (in a directory of root's) as long as the binary stays the same, for asking costs more than a start may.
/// Whatever goes wrong: false.
pub fn killable(path: &Path, cache: &Path) -> bool {
    if Release::running().is_none_or(|kernel| kernel < Release::KILLABLE) {
        return false;
    }
    let Ok(metadata) = fs::metadata(path) else { return false };
    let identity = json!([
        path,
        metadata.dev(),
        metadata.ino(),
        metadata.size(),
        metadata.mtime(),
        metadata.mtime_nsec(),
        metadata.ctime(),
    ]);
    let kept: Value =
        fs::read(cache).ok().and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default();
    if kept.get("runtime") == Some(&identity) {
        return kept.get("killable") == Some(&Value::Bool(true));
    }
    let killable = Runtime::probe(path).is_ok_and(|runtime| runtime.killable);
    let text = json!({ "runtime": identity, "killable": killable }).to_string();
    // Replaced whole, so that no reader sees half of it. Not being able to keep it costs time only.
    let fresh = cache.with_extension(format!("{}.new", std::process::id()));
    if fs::write(&fresh, text).and_then(|()| fs::rename(&fresh, cache)).is_err() {
        drop(fs::remove_file(&fresh));
    }
    killable
}

fn ask(path: &Path, argument: &'static str) -> Result<String, SupportError> {
    let failed = |source| SupportError::Run { path: path.to_owned(), argument, source };
    let mut child = Command::new(path)
        .arg(argument)
        .env_clear()
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(failed)?;
    // A few KiB at most, but more than a pipe would hold for certain: read beside the wait.
    let reader = child.stdout.take().map(|mut stdout| {
        std::thread::spawn(move || {
            let mut text = String::new();
            stdout.read_to_string(&mut text).map(|_| text)
        })
    });
    let end = Instant::now() + DEADLINE;
    let status = loop {
        if let Some(status) = child.try_wait().map_err(failed)? {
            break status;
        }
        if Instant::now() >= end {
            child.kill().map_err(failed)?;
            child.wait().map_err(failed)?;
            return Err(SupportError::Deadline {
                path: path.to_owned(),
                argument,
                seconds: DEADLINE.as_secs(),
            });
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    if !status.success() {
        return Err(SupportError::Failed { path: path.to_owned(), argument, status });
    }
    match reader.map(std::thread::JoinHandle::join) {
        Some(Ok(text)) => text.map_err(failed),
        _ => Ok(String::new()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    /// A runtime that answers as told and counts how often it is asked.
    fn runtime(directory: &Path, features: &str) -> PathBuf {
        let path = directory.join("runtime");
        let asked = directory.join("asked");
        let text = format!(
            "#!/bin/sh\necho x >> {}\ncase $1 in --version) echo 'runc version 9.9'; echo 'libseccomp: 2.6.0';; features) cat <<'E'\n{features}\nE\n;; esac\n",
            asked.display()
        );
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    #[test]
    fn the_flag_counts_only_where_it_is_listed_as_supported() {
        let listed = json!({ "linux": { "seccomp": { "actions": ["SCMP_ACT_NOTIFY"], "knownFlags": [FLAG], "supportedFlags": [FLAG] } } });
        let known =
            json!({ "linux": { "seccomp": { "actions": [], "knownFlags": [FLAG], "supportedFlags": [] } } });
        let parsed = Runtime::parse("runc version 1.5\nlibseccomp: 2.6.0\n", &listed);
        assert_eq!(parsed.version, "runc version 1.5");
        assert_eq!(parsed.libseccomp.as_deref(), Some("2.6.0"));
        assert!(parsed.killable && parsed.notify == Some(true));
        let parsed = Runtime::parse("runc version 1.5", &known);
        assert!(!parsed.killable && parsed.notify == Some(false));
        assert_eq!(Runtime::parse("crun version 1.8.1", &Value::Null).notify, None);
    }

    #[test]
    fn the_answer_is_kept_until_the_binary_changes() {
        let directory = tempfile::tempdir().unwrap();
        let cache = directory.path().join("cache");
        let asked = || fs::read_to_string(directory.path().join("asked")).unwrap_or_default().lines().count();
        let path = runtime(
            directory.path(),
            &format!("{{\"linux\":{{\"seccomp\":{{\"supportedFlags\":[\"{FLAG}\"]}}}}}}"),
        );
        let new_enough = Release::running().unwrap() >= Release::KILLABLE;
        assert_eq!(killable(&path, &cache), new_enough);
        let first = asked();
        assert_eq!(killable(&path, &cache), new_enough);
        assert_eq!(asked(), first);
        fs::remove_file(&path).unwrap();
        runtime(directory.path(), "{}");
        assert!(!killable(&path, &cache));
    }

    #[test]
    fn a_runtime_that_is_not_there_is_an_error_that_names_it() {
        let error = Runtime::probe(Path::new("/nonexistent/runc")).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/runc --version"), "{error}");
        assert!(!killable(Path::new("/nonexistent/runc"), Path::new("/nonexistent/cache")));
    }
}
