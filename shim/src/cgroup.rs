//! A container's cgroups: what they use, who is in them, and what is left of them after a crash.
//!
//! Owns nothing: the runtime makes and removes them. Paths are read from init once, when it was created, and
//! hold for cgroup v1, v2, cgroupfs and systemd alike. Trusts the kernel's files.

pub(crate) mod oom;
mod stats;

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cgroups_rs::fs::cgroup::get_cgroups_relative_paths_by_pid;
use cgroups_rs::fs::hierarchies;
use cgroups_rs::fs::memory::MemController;
use cgroups_rs::fs::{Cgroup, Controller};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// What failed on a cgroup.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CgroupError {
    #[error("can't find the cgroups of process {pid}: {reason}")]
    Find { pid: u32, reason: String },
    #[error("can't read the figures: {reason}")]
    Stats { reason: String },
    #[error("can't watch for out-of-memory kills in {}", path.display())]
    Watch {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("can't remove {}", path.display())]
    Remove {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// Where a container's cgroups are.
#[derive(Clone)]
pub(crate) enum Cgroups {
    /// Paths by controller, relative to each hierarchy.
    V1(HashMap<String, String>),
    /// The one directory.
    V2(PathBuf),
}

impl Cgroups {
    /// Those that a process is in.
    pub(crate) fn of(pid: u32) -> Result<Cgroups, CgroupError> {
        let failed = |reason: String| CgroupError::Find { pid, reason };
        if hierarchies::is_cgroup2_unified_mode() {
            let path = containerd_shim::cgroup::get_cgroups_v2_path_by_pid(pid);
            return path.map(Cgroups::V2).map_err(|e| failed(e.to_string()));
        }
        get_cgroups_relative_paths_by_pid(pid).map(Cgroups::V1).map_err(|e| failed(e.to_string()))
    }

    fn load(&self) -> Cgroup {
        match self {
            Cgroups::V1(paths) => {
                Cgroup::load_with_relative_paths(hierarchies::auto(), Path::new("."), paths.clone())
            }
            Cgroups::V2(path) => Cgroup::load(hierarchies::auto(), path),
        }
    }

    /// Kills every process in them. False where that isn't known to have reached all.
    pub(crate) fn kill(&self) -> bool {
        let Some(directory) = self.memory() else { return false };
        if !directory.join("cgroup.procs").exists() {
            return false;
        }
        kill_all(&[directory]);
        true
    }

    /// The directory with the memory controller's files.
    fn memory(&self) -> Option<PathBuf> {
        match self {
            Cgroups::V1(_) => Some(self.load().controller_of::<MemController>()?.path().to_owned()),
            Cgroups::V2(path) => Some(path.clone()),
        }
    }
}

/// Lets the shim join the cgroup that the options name.
pub(crate) fn join(path: &str, pid: u32) -> Result<(), CgroupError> {
    containerd_shim::cgroup::add_task_to_cgroup(path, pid)
        .map_err(|e| CgroupError::Find { pid, reason: e.to_string() })
}

/// The directories that a spec's `cgroupsPath` stands for, in every hierarchy where one is there.
pub(crate) fn directories(cgroups_path: &str) -> Vec<PathBuf> {
    let Some(relative) = relative(cgroups_path) else { return Vec::new() };
    let list = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mut found = Vec::new();
    for line in list.lines() {
        let Some((mount, filesystem)) = line.split_once(" - ") else { continue };
        if !filesystem.starts_with("cgroup ") && !filesystem.starts_with("cgroup2 ") {
            continue;
        }
        let Some(point) = mount.split(' ').nth(4) else { continue };
        let directory = Path::new(point).join(&relative);
        if directory.join("cgroup.procs").exists() {
            found.push(directory);
        }
    }
    found
}

/// From `/a/b` to `a/b`, from `a-b.slice:prefix:name` to `a.slice/a-b.slice/prefix-name.scope`.
fn relative(cgroups_path: &str) -> Option<PathBuf> {
    if let Some(path) = cgroups_path.strip_prefix('/') {
        let safe = !path.is_empty() && Path::new(path).components().all(|part| part.as_os_str() != "..");
        return safe.then(|| path.into());
    }
    let mut parts = cgroups_path.split(':');
    let (slice, prefix, name) = (parts.next()?, parts.next()?, parts.next()?);
    if parts.next().is_some() || name.is_empty() {
        return None;
    }
    let slice = if slice.is_empty() { "system.slice" } else { slice };
    let stem = slice.strip_suffix(".slice")?;
    let mut path = PathBuf::new();
    let mut so_far = String::new();
    for step in stem.split('-') {
        if step.is_empty() {
            // "-.slice" is the root.
            continue;
        }
        if !so_far.is_empty() {
            so_far.push('-');
        }
        so_far.push_str(step);
        path.push(format!("{so_far}.slice"));
    }
    let unit = match (name.ends_with(".slice"), prefix) {
        (true, _) => name.to_owned(),
        (false, "") => format!("{name}.scope"),
        (false, prefix) => format!("{prefix}-{name}.scope"),
    };
    path.push(unit);
    Some(path)
}

/// Whether a `cgroupsPath` has systemd's form.
pub(crate) fn is_systemd(cgroups_path: &str) -> bool {
    !cgroups_path.starts_with('/') && cgroups_path.split(':').count() == 3
}

/// A directory and those below it, deepest first.
fn tree(directory: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    if let Ok(entries) = fs::read_dir(directory) {
        for entry in entries.flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                all.extend(tree(&entry.path()));
            }
        }
    }
    all.push(directory.to_owned());
    all
}

/// Kills every process in these directories.
pub(crate) fn kill_all(directories: &[PathBuf]) -> usize {
    let mut met = 0_usize;
    for directory in directories.iter().flat_map(|directory| tree(directory)) {
        if fs::write(directory.join("cgroup.kill"), "1").is_ok() {
            continue;
        }
        let list = fs::read_to_string(directory.join("cgroup.procs")).unwrap_or_default();
        for pid in list.lines().filter_map(|line| line.trim().parse::<i32>().ok()).filter(|pid| *pid > 1) {
            met = met.saturating_add(1);
            kill(Pid::from_raw(pid), Signal::SIGKILL).ok();
        }
    }
    met
}

/// Kills what is left in these cgroups and removes them. For `delete` only: it may wait.
pub(crate) fn sweep(directories: &[PathBuf]) -> Result<(), CgroupError> {
    let mut result = Ok(());
    for attempt in 0..40 {
        kill_all(directories);
        result = Ok(());
        for directory in directories.iter().flat_map(|directory| tree(directory)) {
            match fs::remove_dir(&directory) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(source) => result = Err(CgroupError::Remove { path: directory, source }),
            }
        }
        if result.is_ok() {
            break;
        }
        std::thread::sleep(Duration::from_millis(if attempt < 10 { 5 } else { 50 }));
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cgroups_path_is_read_in_both_forms() {
        let path = |text| relative(text).map(|path| path.display().to_string());
        assert_eq!(path("/default/c1").as_deref(), Some("default/c1"));
        let pod = "kubepods-burstable-pod7.slice:cri-containerd:abc";
        assert_eq!(
            path(pod).as_deref(),
            Some(
                "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod7.slice/cri-containerd-abc.scope"
            )
        );
        assert_eq!(path(":x:y").as_deref(), Some("system.slice/x-y.scope"));
        for bad in ["", "/", "/../etc", "a:b", "a.slice:b:", "relative"] {
            assert_eq!(path(bad), None, "{bad}");
        }
        assert!(is_systemd(pod) && !is_systemd("/default/c1") && !is_systemd("/a:b:c"));
    }

    #[test]
    fn figures_of_this_process_can_be_read() {
        let cgroups = Cgroups::of(std::process::id()).unwrap();
        let (kind, bytes) = cgroups.stats().unwrap();
        assert!(kind.ends_with(".Metrics") && !bytes.is_empty());
    }
}
