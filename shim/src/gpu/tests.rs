//! The GPU half against the real runtime, with a scripted scheduler and a program in the sandbox's place. Needs
//! root, runc and a static busybox.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use serde_json::json;

use super::*;
use crate::{DeviceKind, SandboxProgram};

mod scripted;

use scripted::Scripted;

const UUID: &str = "GPU-00000000-0000-0000-0000-00000000000a";
const SECOND: Duration = Duration::from_secs(1);

/// A node with an emulated card, a configuration, and one container's bundle.
struct Bench {
    folder: tempfile::TempDir,
    node: Node,
    config: Config,
    context: CreateContext,
    cgroup: String,
}

impl Bench {
    /// `manner` is how the sandbox behaves.
    fn new(manner: &str) -> Bench {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let folder = tempfile::tempdir().unwrap();
        let at = |path: &str| folder.path().join(path);
        for path in [
            "dev",
            "driver/gpus/0000:01:00.0",
            "bundle/rootfs/bin",
            "bundle/rootfs/proc",
            "bundle/rootfs/dev",
            "runc",
        ] {
            fs::create_dir_all(at(path)).unwrap();
        }
        for name in ["nvidiactl", "nvidia0", "nvidia-uvm"] {
            fs::write(at("dev").join(name), "").unwrap();
        }
        fs::write(
            at("driver/version"),
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release\n",
        )
        .unwrap();
        let card =
            format!("Model: NVIDIA H200\nGPU UUID: {UUID}\nBus Location: 0000:01:00.0\nDevice Minor: 0\n");
        fs::write(at("driver/gpus/0000:01:00.0/information"), card).unwrap();
        fs::write(at("devices"), "Character devices:\n195 nvidia\n511 nvidia-uvm\n").unwrap();
        fs::copy("/bin/busybox", at("bundle/rootfs/bin/busybox")).unwrap();
        fs::set_permissions(at("bundle"), fs::Permissions::from_mode(0o711)).unwrap();
        let program = fake_sandbox();
        let node = Node {
            dev: at("dev"),
            proc_driver: at("driver"),
            proc_devices: at("devices"),
            devices: DeviceKind::Regular,
            sandbox: SandboxProgram { path: Some(program), ..SandboxProgram::default() },
            ..Node::default()
        };
        let mut config = Config { run_dir: at("run"), ..Config::default() };
        config.scheduler.deadline = 1;
        let id = format!("{manner}-{}-{number}", std::process::id());
        let context = CreateContext {
            id: id.clone(),
            namespace: "test".into(),
            bundle: at("bundle"),
            pod: None,
            runtime: "runc".into(),
        };
        Bench { cgroup: format!("/gpuslice-test/{id}"), folder, node, config, context }
    }

    fn spec(&self, gpu: bool) -> Value {
        let node = |path: &str, major: u32, minor: u32| json!({ "path": path, "type": "c", "major": major, "minor": minor });
        let devices = match gpu {
            true => vec![
                node("/dev/nvidiactl", 195, 255),
                node("/dev/nvidia-uvm", 511, 0),
                node("/dev/nvidia0", 195, 0),
            ],
            false => Vec::new(),
        };
        json!({
            "ociVersion": "1.0.2",
            "process": {
                "args": ["/bin/busybox", "sleep", "100"], "cwd": "/", "user": { "uid": 0, "gid": 0 }, "noNewPrivileges": true,
                "capabilities": { "bounding": ["CAP_CHOWN"], "effective": ["CAP_CHOWN"], "permitted": ["CAP_CHOWN"] },
            },
            "root": { "path": "rootfs" },
            "mounts": [{ "destination": "/proc", "type": "proc", "source": "proc" }],
            "linux": {
                "cgroupsPath": self.cgroup,
                "devices": devices,
                "namespaces": [{ "type": "pid" }, { "type": "ipc" }, { "type": "mount" }, { "type": "network" }],
            },
        })
    }

    fn runc(&self, arguments: &[&str]) -> Output {
        Command::new("runc")
            .arg("--root")
            .arg(self.folder.path().join("runc"))
            .args(arguments)
            .current_dir(&self.context.bundle)
            .stdin(Stdio::null())
            .output()
            .unwrap()
    }

    /// `runc create`; init's pid.
    fn create(&self, spec: &Value) -> u32 {
        fs::write(self.context.bundle.join("config.json"), spec.to_string()).unwrap();
        self.detached(&["create", "--pid-file", "pid", &self.context.id]);
        fs::read_to_string(self.context.bundle.join("pid")).unwrap().trim().parse().unwrap()
    }

    /// Runs runc without pipes, which the container would hold open.
    fn detached(&self, arguments: &[&str]) {
        let status = Command::new("runc")
            .arg("--root")
            .arg(self.folder.path().join("runc"))
            .args(arguments)
            .current_dir(&self.context.bundle)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(self.folder.path().join("runc.log")).unwrap())
            .status()
            .unwrap();
        assert!(status.success(), "{}", fs::read_to_string(self.folder.path().join("runc.log")).unwrap());
    }

    async fn prepare(&self, spec: &mut Value) -> Result<Prepared, GpuError> {
        prepare(&self.node, &self.config, &self.context, spec).await
    }

    async fn served(&self, spec: &mut Value) -> Result<GpuContainer, GpuError> {
        let prepared = self.prepare(spec).await?;
        prepared.created(self.create(spec)).await
    }

    fn record(&self) -> Value {
        serde_json::from_slice(&fs::read(self.context.bundle.join("gpuslice.json")).unwrap()).unwrap()
    }

    /// No sandbox, leaf, socket or record is left.
    fn assert_nothing_left(&self) {
        let sockets = self.config.run_dir.join("c");
        assert_eq!(fs::read_dir(sockets).map_or(0, Iterator::count), 0, "sockets are left");
        assert!(!self.context.bundle.join("gpuslice.json").exists(), "the record is left");
        let leaf = |name: &fs::DirEntry| name.file_name().to_string_lossy().starts_with("gpuslice-");
        for controller in ["memory", "pids", ""] {
            let parent = Path::new("/sys/fs/cgroup").join(controller).join("gpuslice-test");
            let left = fs::read_dir(parent).into_iter().flatten().flatten().filter(leaf);
            let short: Vec<_> = left.map(|entry| entry.file_name()).collect();
            assert!(
                !short.iter().any(|name| *name == *format!("gpuslice-{}", self.short())),
                "the leaf is left"
            );
        }
    }

    fn short(&self) -> String {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut hasher = DefaultHasher::new();
        format!("test/{}", self.context.id).hash(&mut hasher);
        format!("{:016x}", hasher.finish())
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.runc(&["delete", "-f", &self.context.id]);
        for hierarchy in fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten() {
            // Empty once the last container of these tests is gone.
            fs::remove_dir(hierarchy.path().join("gpuslice-test")).unwrap_or(());
        }
    }
}

/// The program of `examples/`, which cargo builds beside the tests, unless they were filtered by name.
fn fake_sandbox() -> PathBuf {
    static BUILT: std::sync::Once = std::sync::Once::new();
    let profile = std::env::current_exe().unwrap().parent().unwrap().parent().unwrap().to_owned();
    let program = profile.join("examples/fake_sandbox");
    BUILT.call_once(|| {
        let name = profile.file_name().unwrap().to_str().unwrap();
        let name = if name == "debug" { "dev" } else { name };
        let arguments = ["build", "--quiet", "--profile", name, "--example", "fake_sandbox"];
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(arguments).current_dir(env!("CARGO_MANIFEST_DIR"));
        assert!(program.exists() || cargo.status().unwrap().success());
    });
    program
}

fn alive(pid: u64) -> bool {
    let state = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    !state.is_empty() && !state.contains(") Z")
}

#[tokio::test]
async fn a_gpu_container_is_served_runs_execs_and_leaves_nothing() {
    let bench = Bench::new("good");
    let scheduler = Scripted::start(&bench.config.scheduler_socket(), |_| {});
    let mut spec = bench.spec(true);
    spec["annotations"] = json!({ "gpuslice.io/memory-hard": "2Gi", "run.oci.x": "y", "other": "z" });
    let container = bench.served(&mut spec).await.unwrap();
    assert_eq!(spec["annotations"], json!({ "gpuslice.io/memory-hard": "2Gi", "other": "z" }));
    let record = bench.record();
    assert_eq!(record["gpus"][0]["memory_hard"], 2_u64 << 30);
    let sandbox = record["sandbox_pid"].as_u64().unwrap();
    let cgroups = fs::read_to_string(format!("/proc/{sandbox}/cgroup")).unwrap();
    assert!(cgroups.contains(&format!("/gpuslice-test/gpuslice-{}", bench.short())), "{cgroups}");
    assert_eq!(scheduler.announced(), [sandbox]);

    assert!(bench.runc(&["start", &bench.context.id]).status.success());
    for _ in 0..2 {
        bench.detached(&[
            "exec",
            "-d",
            "--pid-file",
            "exec.pid",
            &bench.context.id,
            "/bin/busybox",
            "sleep",
            "50",
        ]);
        let pid = fs::read_to_string(bench.context.bundle.join("exec.pid")).unwrap();
        container.exec_started(pid.trim().parse().unwrap());
    }
    assert!(
        tokio::time::timeout(SECOND, container.died()).await.is_err(),
        "both execs carry the same program"
    );

    // A process without the program is not one of the container's.
    let mut stranger = Command::new("sleep").arg("50").spawn().unwrap();
    container.exec_started(stranger.id());
    let reason = tokio::time::timeout(5 * SECOND, container.died()).await.unwrap();
    stranger.kill().unwrap();
    stranger.wait().unwrap();
    assert!(reason.contains("doesn't carry the seccomp program"), "{reason}");

    assert!(bench.runc(&["delete", "-f", &bench.context.id]).status.success());
    container.ended().await;
    container.ended().await;
    assert!(!alive(sandbox));
    assert!(scheduler.all_closed());
    bench.assert_nothing_left();
}

#[tokio::test]
async fn a_container_without_a_gpu_gets_the_rules_and_no_sandbox() {
    let bench = Bench::new("none");
    let mut spec = bench.spec(false);
    let container = bench.served(&mut spec).await.unwrap();
    assert_eq!(spec["linux"]["seccomp"]["listenerPath"], Value::Null);
    container.exec_started(1);
    container.ended().await;
    bench.assert_nothing_left();
}

#[tokio::test]
async fn an_unmerged_spec_is_found_in_the_compiled_program() {
    let bench = Bench::new("none");
    let mut spec = bench.spec(false);
    let prepared = bench.prepare(&mut spec).await.unwrap();
    // What libseccomp 2.5 makes of rules with arguments beside a plain one.
    spec["linux"]["seccomp"] = json!({
        "defaultAction": "SCMP_ACT_ALLOW",
        "syscalls": [{ "names": ["mknod"], "action": "SCMP_ACT_ERRNO" }],
    });
    let error = prepared.created(bench.create(&spec)).await.err().unwrap();
    assert!(matches!(error, GpuError::Judged(JudgeError::Hole { .. })), "{error}");
}

#[tokio::test]
async fn a_sandbox_that_does_not_get_ready_fails_the_create() {
    for (manner, part) in [("early", "no driver here"), ("mute", "within 1 s"), ("loose", "Uid")] {
        let bench = Bench::new(manner);
        let _scheduler = Scripted::start(&bench.config.scheduler_socket(), |_| {});
        let error = bench.served(&mut bench.spec(true)).await.err().unwrap();
        let text = report::chain(&error);
        assert!(text.contains(part), "{manner}: {text}");
        bench.assert_nothing_left();
    }
}

#[tokio::test]
async fn a_create_that_fails_gives_everything_back() {
    let bench = Bench::new("good");
    let scheduler = Scripted::start(&bench.config.scheduler_socket(), |_| {});
    bench.prepare(&mut bench.spec(true)).await.unwrap().abandon().await;
    bench.assert_nothing_left();
    assert!(scheduler.all_closed());
    // The runtime never came: no listener arrives.
    let prepared = bench.prepare(&mut bench.spec(true)).await.unwrap();
    let error = prepared.created(std::process::id()).await.err().unwrap();
    assert!(matches!(error, GpuError::Listener(ListenerError::Late)), "{error}");
    bench.assert_nothing_left();
    // A profile that can't be merged.
    let mut spec = bench.spec(true);
    spec["linux"]["seccomp"] = json!({ "defaultAction": "SCMP_ACT_WHATEVER" });
    assert!(matches!(bench.prepare(&mut spec).await.err().unwrap(), GpuError::Spec(_)));
    bench.assert_nothing_left();
}

#[tokio::test]
async fn without_a_scheduler_nothing_starts_and_the_socket_is_named() {
    let bench = Bench::new("good");
    let socket = bench.config.scheduler_socket();
    let error = report::chain(&bench.prepare(&mut bench.spec(true)).await.err().unwrap());
    assert!(error.contains(socket.to_str().unwrap()) && error.contains("is it running"), "{error}");
    bench.assert_nothing_left();

    let refusing = Scripted::start(&socket, |manner| manner.refuse = true);
    let error = report::chain(&bench.prepare(&mut bench.spec(true)).await.err().unwrap());
    assert!(error.contains(socket.to_str().unwrap()) && error.contains("no more"), "{error}");
    refusing.stop();

    let silent = Scripted::start(&socket, |manner| manner.silent = true);
    let error = report::chain(&bench.prepare(&mut bench.spec(true)).await.err().unwrap());
    assert!(error.contains("within 1 s"), "{error}");
    silent.stop();

    let dying = Scripted::start(&socket, |manner| manner.dies_after_lease = true);
    let error = bench.served(&mut bench.spec(true)).await.err().unwrap();
    assert!(matches!(&error, GpuError::Start(StartError::Scheduler(_))), "{error}");
    bench.assert_nothing_left();
    drop(dying);
}

#[tokio::test]
async fn a_sandbox_that_dies_stops_babbles_or_asks_ends_the_container() {
    for (manner, part) in [
        ("mortal", "it said: I am dying"),
        ("stops", "three foreignfiles"),
        ("babbles", "no message"),
        ("asks", "failed 1; UvmRanges { ranges: [], total: 0 } with 0 files"),
    ] {
        let bench = Bench::new(manner);
        let _scheduler = Scripted::start(&bench.config.scheduler_socket(), |_| {});
        let container = bench.served(&mut bench.spec(true)).await.unwrap();
        let reason = tokio::time::timeout(5 * SECOND, container.died()).await.unwrap();
        assert!(reason.contains(part), "{manner}: {reason}");
        container.ended().await;
        bench.assert_nothing_left();
    }
}

#[tokio::test]
async fn a_scheduler_that_comes_back_adopts_the_container() {
    let bench = Bench::new("good");
    let socket = bench.config.scheduler_socket();
    let first = Scripted::start(&socket, |_| {});
    let container = bench.served(&mut bench.spec(true)).await.unwrap();
    first.stop();
    assert!(tokio::time::timeout(SECOND / 2, container.died()).await.is_err(), "it runs on without");
    let second = Scripted::start(&socket, |_| {});
    let sandbox = bench.record()["sandbox_pid"].as_u64().unwrap();
    let deadline = Instant::now() + 3 * SECOND;
    while second.announced() != [sandbox] || second.sandboxes() != 1 {
        assert!(Instant::now() < deadline, "not adopted");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(second.adopted(), [u64::from(scripted::UID)]);
    second.order_stop("over its limit");
    let reason = tokio::time::timeout(5 * SECOND, container.died()).await.unwrap();
    assert!(reason.contains("over its limit"), "{reason}");
    container.ended().await;
    bench.assert_nothing_left();
}

#[tokio::test]
async fn a_container_that_is_not_adopted_must_end() {
    let bench = Bench::new("good");
    let socket = bench.config.scheduler_socket();
    let first = Scripted::start(&socket, |_| {});
    let container = bench.served(&mut bench.spec(true)).await.unwrap();
    first.stop();
    let _second = Scripted::start(&socket, |manner| manner.refuse = true);
    let reason = tokio::time::timeout(5 * SECOND, container.died()).await.unwrap();
    assert!(reason.contains("not adopted"), "{reason}");
    container.ended().await;
    bench.assert_nothing_left();
}

#[tokio::test]
async fn clean_up_needs_the_bundle_alone() {
    let bench = Bench::new("good");
    let _scheduler = Scripted::start(&bench.config.scheduler_socket(), |_| {});
    let container = bench.served(&mut bench.spec(true)).await.unwrap();
    let sandbox = bench.record()["sandbox_pid"].as_u64().unwrap();
    assert!(alive(sandbox));
    clean_up_after_crash(&bench.context.bundle);
    assert!(!alive(sandbox));
    bench.assert_nothing_left();
    let reason = tokio::time::timeout(5 * SECOND, container.died()).await.unwrap();
    assert!(reason.contains("sandbox died"), "{reason}");
    container.ended().await;
}
