//! Where things lie.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// Top of the repository.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(Path::to_path_buf).unwrap_or_default()
}

/// Cargo's target directory.
pub(crate) fn target() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(path) if Path::new(&path).is_absolute() => path.into(),
        Some(path) => root().join(path),
        None => root().join("target"),
    }
}

/// The cargo that runs this program.
pub(crate) fn cargo() -> std::process::Command {
    let mut command = std::process::Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    command
}

/// Says no, and why, to anybody but root.
pub(crate) fn require_root(task: &str) -> Result<()> {
    if nix::unistd::geteuid().is_root() {
        return Ok(());
    }
    bail!(
        "`cargo xtask {task}` starts a private containerd and real containers, so it must run as root; \
         this is uid {}. Run it as root (for example under `sudo -E`), or use `cargo xtask lint` and \
         `cargo test`, which need no root",
        nix::unistd::geteuid()
    );
}

/// A program on PATH or in a system directory that a PATH may lack.
pub(crate) fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/local/bin", "/usr/bin", "/bin"];
    std::env::split_paths(&path)
        .chain(system.iter().map(PathBuf::from))
        .map(|directory| directory.join(name))
        .find(|candidate| candidate.is_file())
}

/// A fresh directory for one run, and the lock that says that the run lives.
pub(crate) struct Scratch {
    path: PathBuf,
    sweeper: PathBuf,
}

impl Scratch {
    /// Makes the directory; `sweeper` is the harness program that can clear it.
    ///
    /// Directories of runs that were killed before they could clear up are cleared first.
    pub(crate) fn new(sweeper: &Path) -> Result<Self> {
        for entry in std::fs::read_dir("/tmp").context("list /tmp")?.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let owner = name.strip_prefix("gpuslice-").and_then(|rest| rest.parse::<u32>().ok());
            if owner.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
                drop(Scratch { path: entry.path(), sweeper: sweeper.to_path_buf() });
            }
        }
        let path = PathBuf::from(format!("/tmp/gpuslice-{}", std::process::id()));
        std::fs::create_dir(&path).with_context(|| format!("make the directory {}", path.display()))?;
        Ok(Scratch { path, sweeper: sweeper.to_path_buf() })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    /// Ends whatever an interrupted run left: processes, mounts, cgroups, files.
    fn drop(&mut self) {
        let swept = std::process::Command::new(&self.sweeper).arg("sweep").arg(&self.path).status();
        if !swept.is_ok_and(|status| status.success()) {
            eprintln!("xtask: could not clear {} completely", self.path.display());
        }
    }
}
