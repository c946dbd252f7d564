//! Who the sandbox is, what confines it and the tenants, and which containers are refused outright.

use anyhow::{Context, Result, ensure};
use gpuslice_harness::{Container, Node, Runtime, process};
use serde_json::{Value, json};

const SYS_PTRACE: u64 = 1 << 19;

fn sleeper<'n>(node: &'n Node, id: &str) -> Result<Container<'n>> {
    Ok(node.container(id).gpu(0)?.quota("1Gi").args(&["/bin/sleep", "1000"]))
}

fn groups(pid: u32) -> Result<Vec<String>> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
    Ok(text.lines().filter_map(|line| line.rsplit_once(':')).map(|(_, path)| path.to_owned()).collect())
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn the_sandbox_has_one_capability_a_uid_of_its_own_and_a_filter() -> Result<()> {
    let node = Node::start()?;
    let running = sleeper(&node, "a")?.start()?;
    let sandbox = node.sandbox()?;
    let identity = process::identity(sandbox)?;
    ensure!(identity.uid != 0 && identity.uid != process::identity(running.pid()?)?.uid, "{identity:?}");
    ensure!(identity.capabilities == SYS_PTRACE, "capabilities {:x}", identity.capabilities);
    ensure!(identity.bounding & !SYS_PTRACE == 0, "bounding set {:x}", identity.bounding);
    ensure!(identity.no_new_privileges && identity.seccomp == 2 && identity.filters >= 1, "{identity:?}");
    for thread in std::fs::read_dir(format!("/proc/{sandbox}/task"))? {
        let tid = thread?.file_name().to_string_lossy().parse()?;
        ensure!(process::identity(tid)? == process::Identity { ..identity.clone() }, "thread {tid} differs");
    }
    running.stop()?;
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn the_sandbox_sees_no_file_system_no_environment_and_no_network() -> Result<()> {
    let node = Node::start()?;
    let running = sleeper(&node, "a")?.start()?;
    let sandbox = node.sandbox()?;
    let root: Vec<_> =
        std::fs::read_dir(format!("/proc/{sandbox}/root/"))?.flatten().map(|e| e.file_name()).collect();
    ensure!(root.is_empty(), "its root holds {root:?}");
    ensure!(std::fs::read(format!("/proc/{sandbox}/environ"))?.is_empty(), "it has an environment");
    for namespace in ["mnt", "net", "ipc", "uts"] {
        let of = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/{namespace}"));
        ensure!(of(&sandbox.to_string())? != of("self")?, "it shares the host's {namespace} namespace");
    }
    running.stop()?;
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn the_sandbox_is_in_a_group_of_its_own_beside_the_container() -> Result<()> {
    let node = Node::start()?;
    let running = sleeper(&node, "a")?.start()?;
    let (sandbox, tenant) = (groups(node.sandbox()?)?, groups(running.pid()?)?);
    let own = format!("/{}", node.namespace());
    let placed = sandbox.iter().filter(|path| path.starts_with(&own)).count();
    ensure!(placed > 0, "the sandbox is in {sandbox:?}");
    let container = format!("{own}/a");
    ensure!(tenant.contains(&container), "the container is in {tenant:?}");
    let inside = |path: &String| *path == container || path.starts_with(&format!("{container}/"));
    ensure!(!sandbox.iter().any(inside), "a frozen container would freeze its sandbox: {sandbox:?}");
    running.stop()?;
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn a_paused_container_does_not_stop_its_sandbox() -> Result<()> {
    let node = Node::start()?;
    let one = sleeper(&node, "a")?.start()?;
    one.task("pause", &[])?;
    ensure!(process::state(node.sandbox()?) != Some('D'), "the sandbox is frozen");
    one.task("resume", &[])?;
    one.exec(&["/bin/gpuslice-tenant", "info"])?.success()?;
    one.stop()?;
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn two_sandboxes_have_different_uids() -> Result<()> {
    let node = Node::start()?;
    let (one, two) = (sleeper(&node, "a")?.start()?, sleeper(&node, "b")?.start()?);
    let mut uids = Vec::new();
    for pid in node.sandboxes() {
        uids.push(process::identity(pid)?.uid);
    }
    uids.sort_unstable();
    uids.dedup();
    ensure!(uids.len() == 2, "uids {uids:?}");
    one.stop()?;
    two.stop()?;
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn every_container_of_this_runtime_carries_a_filter_and_so_do_its_execs() -> Result<()> {
    let node = Node::start()?;
    let line = "grep -E 'Seccomp:|NoNewPrivs' /proc/self/status";
    let control = node.container("control").runtime(Runtime::Runc).shell(line).run()?.success()?;
    ensure!(control.stdout.contains("Seccomp:\t0"), "the control has no filter: {}", control.stdout);
    for (id, gpu) in [("plain", false), ("gpu", true)] {
        let container = node.container(id).args(&["/bin/sleep", "1000"]);
        let running = if gpu { container.gpu(0)?.start()? } else { container.start()? };
        ensure!(process::identity(running.pid()?)?.seccomp == 2, "{id} has no filter");
        let exec = running.exec(&["/bin/sh", "-c", line])?.success()?;
        ensure!(exec.stdout.contains("Seccomp:\t2"), "an exec of {id} has no filter: {}", exec.stdout);
        running.stop()?;
    }
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn an_exec_can_use_the_gpu_within_the_same_quota() -> Result<()> {
    let node = Node::start()?;
    let running = sleeper(&node, "a")?.start()?;
    for _ in 0..3 {
        let ended = running.exec(&["/bin/gpuslice-tenant", "info"])?.success()?;
        ensure!(ended.number("total")? == 1 << 30, "{}", ended.stdout);
    }
    running.stop()?;
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn a_profile_of_the_container_keeps_holding_beside_ours() -> Result<()> {
    let node = Node::start()?;
    let profile = json!({"defaultAction": "SCMP_ACT_ALLOW", "architectures": ["SCMP_ARCH_X86_64"],
        "syscalls": [{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 1}]});
    let line = "mkdir /tmp/x 2>&1; gpuslice-tenant info";
    let ended = node.container("a").gpu(0)?.quota("1Gi").seccomp(profile).shell(line).run()?.success()?;
    ensure!(ended.stdout.contains("not permitted"), "the container's own rule is gone: {}", ended.stdout);
    ensure!(ended.stdout.contains(&format!("\"total\":{}", 1_u64 << 30)), "{}", ended.stdout);
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn a_default_deny_profile_that_allows_ioctl_does_not_let_the_driver_through() -> Result<()> {
    let node = Node::start()?;
    // containerd's own default profile allows ioctl without a look at its arguments.
    let output = node.ctr_profile()?;
    let ended =
        node.container("a").gpu(0)?.quota("1Gi").seccomp(output).tenant(&["info"]).run()?.success()?;
    ensure!(ended.number("total")? == 1 << 30, "{}", ended.stdout);
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn annotations_for_the_oci_runtime_are_dropped() -> Result<()> {
    let node = Node::start()?;
    let running = sleeper(&node, "a")?
        .annotation("run.oci.seccomp_fail_unknown_syscall", "0")
        .annotation("run.oci.hooks.stdout", "/tmp/x")
        .annotation("example.com/other", "kept")
        .start()?;
    let text = std::fs::read(node.bundle("a").join("config.json"))?;
    let spec: Value = serde_json::from_slice(&text)?;
    let annotations = spec.get("annotations").and_then(Value::as_object).context("no annotations")?;
    ensure!(!annotations.keys().any(|key| key.starts_with("run.oci.")), "{annotations:?}");
    ensure!(annotations.contains_key("example.com/other"), "{annotations:?}");
    running.stop()?;
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn containers_with_too_many_rights_are_refused() -> Result<()> {
    let node = Node::start()?;
    let all_devices = json!({"allow": true, "access": "rwm"});
    let notify = json!({"defaultAction": "SCMP_ACT_ALLOW",
        "syscalls": [{"names": ["mkdir"], "action": "SCMP_ACT_NOTIFY"}]});
    let host_pid = json!([{"type": "ipc"}, {"type": "uts"}, {"type": "mount"}, {"type": "network"}]);
    let admin = json!(["CAP_SYS_ADMIN"]);
    for gpu in [false, true] {
        let container = |id: &str| -> Result<Container<'_>> {
            let container = node.container(id).shell("echo ran");
            if gpu { container.gpu(0) } else { Ok(container) }
        };
        container("a")?
            .edit("/linux/resources/devices/-", all_devices.clone())
            .run()?
            .refused(&["device rule"])?;
        container("b")?
            .edit("/process/capabilities/bounding", admin.clone())
            .run()?
            .refused(&["CAP_SYS_ADMIN"])?;
        container("c")?.edit("/linux/namespaces", host_pid.clone()).run()?.refused(&["pid namespace"])?;
        container("d")?.seccomp(notify.clone()).run()?.refused(&["notif"])?;
    }
    node.finish()
}
