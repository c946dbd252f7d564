//! Containers made by a real runtime, to read the filter that their first process carries.

use std::fs;
use std::io::Read;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use gpuslice_sys::Instruction;
use serde_json::{Value, json};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Runtime {
    Runc,
    Crun,
}

impl Runtime {
    /// The runtimes that this machine has. Their absence is printed, so that a skipped test shows.
    pub(crate) fn installed() -> Vec<Runtime> {
        let mut there = Vec::new();
        for (runtime, binary) in [(Runtime::Runc, "runc"), (Runtime::Crun, "crun")] {
            let works = Command::new(binary)
                .arg("--version")
                .stdout(Stdio::null())
                .status()
                .is_ok_and(|s| s.success());
            if !works {
                println!("SKIPPED: {binary} is not installed");
            } else if !nix::unistd::geteuid().is_root() {
                println!("SKIPPED: {binary} needs root");
            } else {
                there.push(runtime);
            }
        }
        there
    }

    fn command(self, root: &Path) -> Command {
        match self {
            Runtime::Runc => {
                let mut command = Command::new("runc");
                command.arg("--root").arg(root);
                command
            }
            // crun refuses a hybrid cgroup host: it gets a cgroup2 mount of its own and leaves cgroups alone.
            Runtime::Crun => {
                let mut command = Command::new("unshare");
                command.args(["--mount", "--propagation", "private", "sh", "-c"]);
                command.arg(
                    "mount -t cgroup2 none /sys/fs/cgroup && exec crun --cgroup-manager=disabled \"$@\"",
                );
                command.arg("crun").arg("--root").arg(root);
                command
            }
        }
    }
}

/// A created container that was not started.
pub(crate) struct Container {
    directory: tempfile::TempDir,
    runtime: Runtime,
    id: String,
    pub(crate) pid: u32,
    /// What `create` took.
    pub(crate) took: Duration,
}

/// Where the listener of a test's container goes: a path inside its directory.
pub(crate) const LISTENER: &str = "@LISTENER@";

impl Container {
    /// # Errors
    /// The runtime's message.
    pub(crate) fn create(
        runtime: Runtime,
        seccomp: Option<&Value>,
        args: &[&str],
    ) -> Result<Container, String> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let directory = tempfile::tempdir().unwrap();
        let base = directory.path();
        let socket = base.join("notify.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        for part in ["bin", "proc", "dev", "sys", "tmp"] {
            fs::create_dir_all(base.join("bundle/rootfs").join(part)).unwrap();
        }
        fs::copy("/bin/busybox", base.join("bundle/rootfs/bin/busybox")).unwrap();
        let mut seccomp = seccomp.cloned();
        if let Some(path) = seccomp.as_mut().and_then(|value| value.get_mut("listenerPath")) {
            assert_eq!(path, LISTENER);
            *path = json!(socket);
        }
        // crun installs the filter of a process without new privileges only at the start.
        let spec = spec(seccomp.as_ref(), args, runtime == Runtime::Runc);
        fs::write(base.join("bundle/config.json"), spec.to_string()).unwrap();
        // The runtime needs somebody to take the listener. Read without room for files, it is closed at once.
        std::thread::spawn(move || {
            let (mut peer, _) = listener.accept()?;
            peer.read_to_end(&mut Vec::new())
        });
        let id = format!("filter-test-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let pid_file = base.join("pid");
        let log = base.join("log");
        let mut command = runtime.command(&base.join("state"));
        command.arg("--log").arg(&log).arg("create").arg("--bundle").arg(base.join("bundle"));
        command.arg("--pid-file").arg(&pid_file).arg(&id);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let start = Instant::now();
        let status = command.status().unwrap();
        let took = start.elapsed();
        let mut container = Container { directory, runtime, id, pid: 0, took };
        if !status.success() {
            return Err(fs::read_to_string(&log).unwrap_or_default());
        }
        container.pid = fs::read_to_string(&pid_file).unwrap().trim().parse().unwrap();
        Ok(container)
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let mut command = self.runtime.command(&self.path("state"));
        command.args(arguments).arg(&self.id).stdin(Stdio::null()).output().unwrap()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn programs(&self) -> Vec<Vec<Instruction>> {
        gpuslice_sys::process::program_of(self.pid).unwrap()
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        self.run(&["delete", "--force"]);
    }
}

fn spec(seccomp: Option<&Value>, args: &[&str], no_new_privileges: bool) -> Value {
    let namespaces: Vec<Value> =
        ["pid", "mount", "ipc", "uts"].iter().map(|kind| json!({ "type": kind })).collect();
    json!({
        "ociVersion": "1.0.2",
        "process": {
            "user": { "uid": 0, "gid": 0 }, "cwd": "/", "args": args, "noNewPrivileges": no_new_privileges,
            "env": ["PATH=/bin"],
        },
        "root": { "path": "rootfs", "readonly": true },
        "mounts": [{ "destination": "/proc", "type": "proc", "source": "proc" }],
        "linux": { "namespaces": namespaces, "seccomp": seccomp },
    })
}
