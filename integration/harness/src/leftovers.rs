//! The check at the end of each test: nothing of its containers is left.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, bail};

use crate::node::Node;
use crate::process;
use crate::sweep;
use crate::wait::until_true;

/// Fails with a list of what is left. Waits a little: a shim ends after its last container is deleted.
pub(crate) fn check(node: &Node) -> Result<()> {
    let mut found = Vec::new();
    let clean = until_true("nothing is left", Duration::from_secs(8), || {
        found = list(node);
        found.is_empty()
    });
    if clean.is_err() {
        bail!("left behind: {}", found.join("; "));
    }
    Ok(())
}

fn list(node: &Node) -> Vec<String> {
    let directory = node.directory.to_string_lossy().into_owned();
    let own = node.own_processes();
    let mut found = Vec::new();
    for pid in sweep::processes(&[&directory, &node.namespace]) {
        if !own.contains(&pid) && !process::command_line(pid).is_empty() {
            found.push(format!("process {pid} ({})", process::command_line(pid)));
        }
    }
    for point in sweep::mounts(&node.directory) {
        if node.gpus.as_ref().is_some_and(|gpus| point == gpus.root().join("dev")) {
            continue;
        }
        found.push(format!("mount {}", point.display()));
    }
    for group in sweep::control_groups(&node.namespace) {
        // runc leaves the parent of its groups.
        if group.file_name().is_none_or(|name| name != node.namespace.as_str()) {
            found.push(format!("control group {}", group.display()));
        }
    }
    for folder in
        [node.tasks(), node.run_dir().join("c"), Path::new("/run/containerd/runc").join(&node.namespace)]
    {
        for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
            found.push(format!("file {}", entry.path().display()));
        }
    }
    found
}
