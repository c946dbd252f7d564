//! Which programs a private node is made of: the daemon under test, and the parts as `cargo xtask` built them.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};

/// Programs of one run.
#[derive(Clone, Debug)]
pub struct Programs {
    /// Folder with the built parts.
    pub folder: PathBuf,
    /// Folder with containerd, ctr and the stock shim; none: the system's.
    pub daemon: Option<PathBuf>,
    /// Where private nodes get their directories.
    pub scratch: PathBuf,
    /// Containers run under the stock shim where a test doesn't say otherwise: this proves the test itself.
    pub stock: bool,
}

impl Programs {
    /// From the environment that `cargo xtask` sets up.
    ///
    /// # Errors
    /// When this runs outside `cargo xtask`, not as root, or something is missing.
    pub fn from_environment() -> Result<Self> {
        let variable = |name: &str| std::env::var_os(name).map(PathBuf::from);
        let folder = variable("GPUSLICE_PROGRAMS").context(
            "GPUSLICE_PROGRAMS is not set: run this through `cargo xtask test`, `demo` or `bench`",
        )?;
        let scratch = variable("GPUSLICE_SCRATCH")
            .context("GPUSLICE_SCRATCH is not set: run this through `cargo xtask test`, `demo` or `bench`")?;
        if !nix::unistd::geteuid().is_root() {
            bail!("containers need root; this is uid {}", nix::unistd::geteuid());
        }
        let stock = std::env::var_os("GPUSLICE_STOCK").is_some();
        Ok(Programs { folder, daemon: variable("GPUSLICE_DAEMON"), scratch, stock })
    }

    /// A built part.
    ///
    /// # Errors
    /// When it wasn't built.
    pub fn part(&self, name: &str) -> Result<PathBuf> {
        let path = self.folder.join(name);
        if !path.is_file() {
            bail!("{} is missing: build the parts with `cargo xtask test`", path.display());
        }
        Ok(path)
    }

    /// A program of the daemon under test.
    ///
    /// # Errors
    /// When it is nowhere.
    pub fn daemon_program(&self, name: &str) -> Result<PathBuf> {
        match &self.daemon {
            Some(folder) => Ok(folder.join(name)),
            None => system(name),
        }
    }

    /// Version of the daemon, as in `1.6.20`.
    ///
    /// # Errors
    /// When it doesn't say.
    pub fn daemon_version(&self) -> Result<String> {
        let output = Command::new(self.daemon_program("containerd")?)
            .arg("--version")
            .output()
            .context("ask containerd for its version")?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.split_whitespace()
            .nth(2)
            .and_then(|version| version.trim_start_matches('v').split(['~', '-', '+']).next())
            .map(str::to_owned)
            .with_context(|| format!("containerd says no version: {text:?}"))
    }
}

/// A program of the system.
///
/// # Errors
/// When it is nowhere.
pub(crate) fn system(name: &str) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/local/bin", "/usr/bin", "/bin"];
    std::env::split_paths(&path)
        .chain(system.iter().map(PathBuf::from))
        .map(|folder| folder.join(name))
        .find(|candidate| candidate.is_file())
        .with_context(|| format!("{name} is not installed: run `cargo xtask setup`"))
}
