//! Ends everything that carries the mark of a private node: processes, mounts, cgroups, sockets, files.
//!
//! The mark is a text that nothing else on the machine contains: the node's directory, or its containerd namespace.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;

use crate::process;

/// Processes other than this one that carry one of `marks`.
pub fn processes(marks: &[&str]) -> Vec<u32> {
    let own = std::process::id();
    process::all()
        .into_iter()
        .filter(|pid| {
            *pid != own && process::runs(*pid) && marks.iter().any(|mark| process::marked(*pid, mark))
        })
        .collect()
}

/// Mount points under `directory`, the deepest first.
pub fn mounts(directory: &Path) -> Vec<PathBuf> {
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mut found: Vec<PathBuf> = table
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .map(|point| PathBuf::from(point.replace("\\040", " ")))
        .filter(|point| point.starts_with(directory))
        .collect();
    found.sort_by_key(|point| std::cmp::Reverse(point.components().count()));
    found
}

/// Control groups whose path contains `mark`, the deepest first.
pub fn control_groups(mark: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    groups_below(Path::new("/sys/fs/cgroup"), mark, &mut found, 0);
    found.sort_by_key(|path| std::cmp::Reverse(path.components().count()));
    found
}

fn groups_below(folder: &Path, mark: &str, found: &mut Vec<PathBuf>, depth: u32) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let Ok(kind) = entry.file_type() else { continue };
        if !kind.is_dir() || depth > 12 {
            continue;
        }
        let path = entry.path();
        if path.to_string_lossy().contains(mark) {
            found.push(path.clone());
        }
        groups_below(&path, mark, found, depth + 1);
    }
}

/// Clears a directory of private nodes and all that carries its name, or the name of a namespace in it.
///
/// # Errors
/// When something could not be ended or removed.
pub fn clear(directory: &Path) -> Result<()> {
    if !directory.exists() {
        return Ok(());
    }
    let mut marks = vec![directory.to_string_lossy().into_owned()];
    for entry in
        std::fs::read_dir(directory).with_context(|| format!("list {}", directory.display()))?.flatten()
    {
        if let Ok(namespace) = std::fs::read_to_string(entry.path().join("namespace")) {
            marks.push(namespace.trim().to_owned());
        }
    }
    clear_marked(directory, &marks.iter().map(String::as_str).collect::<Vec<_>>())
}

/// The same for given marks, the first of which is the directory.
///
/// # Errors
/// When something could not be ended or removed.
pub fn clear_marked(directory: &Path, marks: &[&str]) -> Result<()> {
    let end = Instant::now() + Duration::from_secs(15);
    loop {
        let left = processes(marks);
        for pid in &left {
            process::signal(*pid, Signal::SIGKILL)?;
        }
        thaw(marks);
        if left.is_empty() {
            break;
        }
        if Instant::now() > end {
            bail!(
                "processes that do not end: {:?}",
                left.iter().map(|pid| process::command_line(*pid)).collect::<Vec<_>>()
            );
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    for point in mounts(directory) {
        nix::mount::umount2(&point, nix::mount::MntFlags::MNT_DETACH)
            .with_context(|| format!("unmount {}", point.display()))?;
    }
    for mark in marks.iter().skip(1) {
        remove_groups(mark)?;
        // A stock shim keeps runc's state of a namespace here.
        let state = Path::new("/run/containerd/runc").join(mark);
        if state.exists() {
            std::fs::remove_dir_all(&state).with_context(|| format!("remove {}", state.display()))?;
        }
    }
    std::fs::remove_dir_all(directory).with_context(|| format!("remove {}", directory.display()))
}

/// A frozen process only dies once its group is thawed.
fn thaw(marks: &[&str]) {
    for group in marks.iter().skip(1).flat_map(|mark| control_groups(mark)) {
        for (file, text) in [("freezer.state", "THAWED"), ("cgroup.freeze", "0")] {
            let file = group.join(file);
            if file.exists() && std::fs::write(&file, text).is_err() {
                eprintln!("harness: cannot thaw {}", group.display());
            }
        }
    }
}

/// Removes the control groups with `mark` in their path.
///
/// # Errors
/// When one stays busy.
pub fn remove_groups(mark: &str) -> Result<()> {
    crate::wait::until(&format!("control groups of {mark} can be removed"), Duration::from_secs(5), || {
        let left = control_groups(mark);
        let busy = left.iter().filter(|group| std::fs::remove_dir(group).is_err() && group.exists()).count();
        Ok((busy == 0).then_some(()))
    })
}
