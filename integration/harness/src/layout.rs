//! What lies in a node's directory before anything starts: root file system, programs, configurations.

use std::os::unix::fs::{DirBuilderExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::node::{Node, UIDS};
use crate::programs::system;

impl Node {
    pub(crate) fn make_rootfs(&self) -> Result<()> {
        let rootfs = self.rootfs();
        for folder in ["bin", "dev", "etc", "proc", "sys", "tmp", "root", "out"] {
            std::fs::create_dir_all(rootfs.join(folder))
                .with_context(|| format!("make /{folder} of the rootfs"))?;
        }
        let busybox = system("busybox")?;
        std::fs::copy(&busybox, rootfs.join("bin/busybox"))
            .with_context(|| format!("copy {}", busybox.display()))?;
        for library in libraries(&busybox)? {
            let place = rootfs.join(library.strip_prefix("/").unwrap_or(&library));
            std::fs::create_dir_all(place.parent().context("a library lies in a folder")?)
                .context("make a folder")?;
            std::fs::copy(&library, &place).with_context(|| format!("copy {}", library.display()))?;
        }
        let applets = "sh ash cat cut echo env false grep head id kill ls mkdir mount nc ps pwd rm sleep sort stty test \
                       true tty wc yes dd od touch tr seq trap";
        for applet in applets.split_whitespace() {
            symlink("busybox", rootfs.join("bin").join(applet)).with_context(|| format!("link {applet}"))?;
        }
        if self.programs.stock {
            return Ok(());
        }
        let tenant = self.programs.part("gpuslice-tenant")?;
        std::fs::copy(&tenant, rootfs.join("bin/gpuslice-tenant")).context("copy the tenant program")?;
        Ok(())
    }

    /// The parts under the names that containerd, shim and scheduler look for.
    pub(crate) fn link_programs(&self) -> Result<()> {
        if self.programs.stock {
            return Ok(());
        }
        for (name, emulated) in [
            ("containerd-shim-gpuslice-v1", "emulated-shim"),
            ("gpuslice-sandbox", "emulated-sandbox"),
            ("gpuslice-scheduler", "emulated-scheduler"),
            ("gpuslice", "gpuslice"),
        ] {
            // The programs as shipped, except where a GPU must be emulated.
            let shipped = self.options.real || self.options.gpus == 0;
            let part = self.programs.part(if shipped { name } else { emulated })?;
            let place = self.directory.join("bin").join(name);
            std::fs::hard_link(&part, &place)
                .or_else(|_| std::fs::copy(&part, &place).map(drop))
                .with_context(|| format!("place {name}"))?;
        }
        Ok(())
    }

    pub(crate) fn write_config(&self) -> Result<()> {
        let directory = self.directory.display();
        let text = format!(
            "run_dir = \"{directory}/run\"\nsandbox = \"{directory}/bin/gpuslice-sandbox\"\n\
             [runtime]\nroot = \"{directory}/runc\"\n\
             [sandboxes]\nuid_first = {}\nuid_count = {UIDS}\n{}\n",
            self.uid_first, self.options.config
        );
        std::fs::write(self.config(), text).context("write the node's configuration")
    }

    pub(crate) fn containerd_config(&self) -> String {
        let directory = self.directory.display();
        // Only what tests use: no CRI, no snapshotter that would look at the machine's file systems.
        let (version, disabled) = if self.major >= 2 {
            (
                3,
                r#""io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri", "io.containerd.nri.v1.nri", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.blockfile", "io.containerd.snapshotter.v1.erofs", "io.containerd.tracing.processor.v1.otlp""#,
            )
        } else {
            (
                2,
                r#""io.containerd.grpc.v1.cri", "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.btrfs""#,
            )
        };
        format!(
            "version = {version}\nroot = \"{directory}/root\"\nstate = \"{directory}/state\"\n\
             disabled_plugins = [{disabled}]\n\
             [grpc]\naddress = \"{directory}/containerd.sock\"\n\
             [ttrpc]\naddress = \"{directory}/containerd.sock.ttrpc\"\n\
             [debug]\nlevel = \"debug\"\n"
        )
    }

    /// PATH of containerd and of the shims it starts.
    pub(crate) fn path(&self) -> Result<std::ffi::OsString> {
        let mut folders = vec![self.directory.join("bin")];
        folders.extend(self.programs.daemon.clone());
        folders.extend(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()));
        folders.extend(["/usr/sbin", "/usr/bin", "/sbin", "/bin"].map(PathBuf::from));
        std::env::join_paths(folders).context("join PATH")
    }

    /// containerd's default seccomp profile, as `ctr run --seccomp` writes it into a spec.
    ///
    /// # Errors
    /// When a plain container can't be started.
    pub fn ctr_profile(&self) -> Result<Value> {
        let rootfs = self.rootfs().to_string_lossy().into_owned();
        self.ctr_ok(&[
            "run",
            "--detach",
            "--null-io",
            "--seccomp",
            "--rootfs",
            &rootfs,
            "profile",
            "/bin/sleep",
            "1000",
        ])?;
        let spec =
            std::fs::read(self.bundle("profile").join("config.json")).context("read a bundle's spec")?;
        self.ctr_ok(&["tasks", "rm", "--force", "profile"])?;
        self.ctr_ok(&["containers", "rm", "profile"])?;
        let spec: Value = serde_json::from_slice(&spec).context("read a bundle's spec")?;
        spec.pointer("/linux/seccomp").cloned().context("ctr wrote no profile")
    }
}

/// What a program is linked with; nothing for a static one.
fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let output = crate::run::output(std::process::Command::new("ldd").arg(program))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(text
        .split_whitespace()
        .filter(|word| word.starts_with('/'))
        .map(PathBuf::from)
        .filter(|path| path.is_file())
        .collect())
}

/// Makes a directory that only root enters.
pub(crate) fn make_directory(path: &Path) -> Result<()> {
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .with_context(|| format!("make {}", path.display()))
}
