//! When a part is absent, slow, wrong or killed, no container runs unprotected and nothing is lost or left behind.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use gpuslice_harness::scripted::{Script, Scripted};
use gpuslice_harness::wait::{SOON, until, until_true};
use gpuslice_harness::{Node, Options, process};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

fn without_scheduler() -> Result<Node> {
    Node::with(Options { scheduler: false, ..Options::default() })
}

/// A second, in which memory and charges must be back.
const A_SECOND: Duration = Duration::from_secs(1);

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn without_a_scheduler_no_gpu_container_starts() -> Result<()> {
    let node = without_scheduler()?;
    let socket = node.scheduler_socket().to_string_lossy().into_owned();
    let ended = node.container("a").gpu(0)?.shell("echo ran").run()?;
    ended.refused(&["gpuslice-scheduler", &socket, "is it running"])?;
    ensure!(node.gpus()?.calls()? == 0, "the driver was reached");
    // A container without a GPU needs none.
    node.container("b").run()?.success()?;
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn a_scheduler_that_never_answers_is_given_up_at_the_deadline() -> Result<()> {
    let node = without_scheduler()?;
    let socket = node.scheduler_socket();
    let scripted = Scripted::listen(&socket, Script::Silent)?;
    let start = Instant::now();
    let ended = node.container("a").gpu(0)?.shell("echo ran").run()?;
    ended.refused(&["gpuslice-scheduler", &socket.to_string_lossy(), "no answer", "within"])?;
    ensure!(start.elapsed() < Duration::from_secs(10), "it took {:?}", start.elapsed());
    drop(scripted);
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn a_scheduler_that_closes_or_babbles_is_refused() -> Result<()> {
    for script in [Script::Closes, Script::Babbles] {
        let node = without_scheduler()?;
        let socket = node.scheduler_socket();
        let scripted = Scripted::listen(&socket, script)?;
        let ended = node.container("a").gpu(0)?.shell("echo ran").run()?;
        ended.refused(&["gpuslice-scheduler", &socket.to_string_lossy()])?;
        drop(scripted);
        node.finish()?;
    }
    Ok(())
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn a_scheduler_that_refuses_is_quoted() -> Result<()> {
    let node = Node::start()?;
    let first = node.container("a").gpu(0)?.quota("40Gi").args(&["/bin/sleep", "1000"]).start()?;
    let socket = node.scheduler_socket().to_string_lossy().into_owned();
    let ended = node.container("b").gpu(0)?.quota("40Gi").shell("echo ran").run()?;
    ended.refused(&["gpuslice-scheduler", &socket, "refused", "guaranteed memory"])?;
    first.stop()?;
    // What the refused container had is back: now it starts.
    node.container("b").gpu(0)?.quota("40Gi").run()?.success()?;
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn a_killed_sandbox_takes_its_container_along() -> Result<()> {
    let node = Node::start()?;
    let running = node.container("a").gpu(0)?.quota("1Gi").tenant(&["hold", "512M", "1000"]).start()?;
    running.wait_for_output("holding")?;
    process::signal(node.sandbox()?, Signal::SIGKILL)?;
    let ended = running.ended_within(Duration::from_secs(10))?;
    ensure!(ended.status == 137, "status {}", ended.status);
    until("the memory is back", A_SECOND, || Ok((node.gpus()?.used(0)? == 0).then_some(())))?;
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn a_killed_shim_is_cleaned_up_after_by_the_daemon() -> Result<()> {
    let node = Node::start()?;
    let running = node.container("a").gpu(0)?.quota("1Gi").args(&["/bin/sleep", "1000"]).detach()?;
    let (pid, sandbox) = (running.pid()?, node.sandbox()?);
    process::signal(running.shim()?, Signal::SIGKILL)?;
    until_true("the container ends", SOON, || !process::runs(pid))?;
    until_true("the sandbox ends", SOON, || !process::runs(sandbox))?;
    until("the task is gone", SOON, || {
        Ok(running.status()?.is_none_or(|status| status == "STOPPED" || status == "UNKNOWN").then_some(()))
    })?;
    running.forget()?;
    node.check_clean()?;
    // The id, the lease and the memory are free again.
    node.container("a").gpu(0)?.quota("1Gi").tenant(&["alloc", "512M", "1"]).run()?.success()?;
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn running_containers_outlive_the_scheduler_and_are_adopted_by_the_next() -> Result<()> {
    let node = Node::start()?;
    let running = node.container("a").gpu(0)?.quota("1Gi").tenant(&["hold", "512M", "1000"]).start()?;
    running.wait_for_output("holding")?;
    node.kill_scheduler()?;
    node.container("b").gpu(0)?.run()?.refused(&["gpuslice-scheduler"])?;
    ensure!(running.status()?.as_deref() == Some("RUNNING"), "the first container ended");
    // Its GPU goes on working, within its quota.
    let ended = running.exec(&["/bin/gpuslice-tenant", "alloc", "256M", "8"])?;
    ensure!(ended.status == 3 && ended.number("count")? == 2, "{ended:?}");
    node.start_scheduler()?;
    until("the next scheduler knows the container", SOON, || {
        let status = node.tool(&["status"])?;
        Ok(String::from_utf8_lossy(&status.stdout).contains(&format!("{}/a", node.namespace())).then_some(()))
    })?;
    // Its guarantee counts again: a container that needs the whole card is refused.
    node.container("c").gpu(0)?.quota("64Gi").run()?.refused(&["guaranteed memory"])?;
    node.container("b").gpu(0)?.run()?.success()?;
    running.stop()?;
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn a_tenant_killed_in_the_middle_of_an_ioctl_leaves_no_stuck_worker_and_no_charge() -> Result<()> {
    let node = Node::start()?;
    let gpus = node.gpus()?;
    let hanging = || -> Result<u64> {
        gpus.ask(&json!({"do": "usage"}))?.get("hanging").and_then(Value::as_u64).context("no count")
    };
    let running = node.container("a").gpu(0)?.quota("1Gi").args(&["/bin/sleep", "1000"]).start()?;
    // More victims than the sandbox has workers: one after the other dies inside the driver.
    for _ in 0..10 {
        gpus.fault(&json!({"what": 0x40}), &json!({"hang": true}))?;
        let mut command = running.exec_command(&["/bin/gpuslice-tenant", "alloc", "512M", "1"]);
        let mut exec = command.spawn()?;
        until("the call hangs in the driver", SOON, || Ok((hanging()? == 1).then_some(())))?;
        running.exec(&[
            "/bin/sh",
            "-c",
            "kill -9 $(cat /proc/[0-9]*/stat | grep gpuslice-tenant | cut -d' ' -f1)",
        ])?;
        gpus.release()?;
        exec.wait()?;
    }
    until("the memory is back", A_SECOND, || Ok((gpus.used(0)? == 0).then_some(())))?;
    let ended = running.exec(&["/bin/gpuslice-tenant", "alloc", "768M", "1"])?.success()?;
    ensure!(ended.number("bytes")? == 768 << 20, "{}", ended.stdout);
    running.stop()?;
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn a_container_killed_while_the_driver_hangs_still_ends() -> Result<()> {
    let node = Node::start()?;
    let gpus = node.gpus()?;
    gpus.fault(&json!({"what": 0x40}), &json!({"hang": true}))?;
    let running = node.container("a").gpu(0)?.quota("1Gi").tenant(&["alloc", "512M", "1"]).start()?;
    until("the call hangs in the driver", SOON, || {
        let usage = gpus.ask(&json!({"do": "usage"}))?;
        Ok((usage.get("hanging").and_then(Value::as_u64) == Some(1)).then_some(()))
    })?;
    let ended = running.stop()?;
    ensure!(ended.status == 137, "{ended:?}");
    gpus.release()?;
    until("the memory is back", A_SECOND, || Ok((gpus.used(0)? == 0).then_some(())))?;
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn a_gpu_container_outlives_a_restart_of_the_daemon() -> Result<()> {
    let node = Node::start()?;
    let running = node.container("a").gpu(0)?.quota("1Gi").args(&["/bin/sleep", "1000"]).detach()?;
    let sandbox = node.sandbox()?;
    node.stop_containerd()?;
    ensure!(process::runs(sandbox), "the sandbox ended with the daemon");
    node.start_containerd()?;
    ensure!(running.status()?.as_deref() == Some("RUNNING"), "status {:?}", running.status()?);
    let ended = running.exec(&["/bin/gpuslice-tenant", "alloc", "512M", "4"])?;
    ensure!(ended.status == 3 && ended.number("count")? == 2, "{ended:?}");
    running.stop()?;
    node.finish()
}
