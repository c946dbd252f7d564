//! Each way of getting GPU memory works in a slice, is charged to it, and comes back when the tenant is done.

use std::time::Duration;

use anyhow::{Result, ensure};
use gpuslice_harness::Node;
use gpuslice_harness::wait::until;

/// Runs a tenant command to its success and checks that the card is empty a second later.
fn works(args: &[&str]) -> Result<()> {
    works_within("2Gi", args)
}

fn works_within(quota: &str, args: &[&str]) -> Result<()> {
    let node = Node::start()?;
    node.container("control").gpu(0)?.direct()?.tenant(args).run()?.success()?;
    let ended = node.container("a").gpu(0)?.quota(quota).tenant(args).run()?.success()?;
    for line in ended.lines()? {
        ensure!(line.get("ok").is_none_or(|ok| ok == true), "{line}");
    }
    until("the memory is back", Duration::from_secs(1), || Ok((node.gpus()?.used(0)? == 0).then_some(())))?;
    node.finish()
}

macro_rules! ways {
    ($($test:ident: $args:expr;)*) => {
        $(
            #[test]
            #[ignore = "needs root and containerd: cargo xtask test"]
            fn $test() -> Result<()> {
                works(&$args)
            }
        )*
    };
}

ways! {
    card_memory_can_be_mapped_and_unmapped: ["map", "16M"];
    a_compute_context_runs_work: ["context", "run"];
    several_contexts_live_in_one_process: ["contexts", "3"];
    memory_of_the_tenant_can_be_pinned: ["pinned", "4M"];
    untouched_shared_memory_can_be_pinned: ["pinned-shared", "64K"];
    managed_memory_works: ["managed", "64M"];
    memory_is_shared_between_two_processes: ["ipc", "16M"];
    memory_is_shared_between_two_clients: ["dup", "16M"];
    a_child_uses_the_files_that_it_inherited: ["fork-alloc", "16M"];
    no_call_runs_twice_under_a_storm_of_signals: ["storm", "2000"];
}

/// A sandbox may have 256 MiB, half a GiB of page tables and the quota.
const MORE_THAN_A_SANDBOX_MAY_HAVE: &str = "1000M";

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn more_memory_than_the_sandbox_may_have_can_be_pinned() -> Result<()> {
    works_within("64Mi", &["pinned", MORE_THAN_A_SANDBOX_MAY_HAVE])
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn more_untouched_shared_memory_than_the_sandbox_may_have_can_be_pinned() -> Result<()> {
    works_within("64Mi", &["pinned-shared", MORE_THAN_A_SANDBOX_MAY_HAVE])
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn pinned_memory_counts_against_the_containers_own_limit() -> Result<()> {
    let node = Node::start()?;
    let container = |id| node.container(id).gpu(0).map(|container| container.memory_limit(128 << 20));
    container("a")?.tenant(&["pinned-shared", "64M"]).run()?.success()?;
    for kind in ["pinned", "pinned-shared"] {
        let ended = container(kind)?.tenant(&[kind, "200M"]).run()?;
        ensure!(ended.status == 128 + 9, "the kernel did not kill it: {ended:?}");
    }
    // 200 MiB are less than a sandbox may have: it would have lived to see the container succeed.
    ensure!(!node.log("containerd").contains("sandbox died"), "{}", node.log("containerd"));
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn managed_memory_counts_against_the_quota() -> Result<()> {
    let node = Node::start()?;
    node.container("control").gpu(0)?.direct()?.tenant(&["managed", "2G"]).run()?.success()?;
    let ended = node.container("a").gpu(0)?.quota("1Gi").tenant(&["managed", "2G"]).run()?;
    ensure!(ended.status != 0 && ended.stdout.contains("\"errno\":12"), "{ended:?}");
    let ended = node.container("b").gpu(0)?.quota("1Gi").tenant(&["managed", "512M"]).run()?.success()?;
    ensure!(ended.number("free")? + (512 << 20) <= ended.number("free_before")?, "{}", ended.stdout);
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn memory_that_is_still_mapped_is_not_handed_on() -> Result<()> {
    let node = Node::start()?;
    let control = node.container("control").gpu(0)?.direct()?.tenant(&["stale", "64M"]).run()?.success()?;
    ensure!(
        control.number("free_while_mapped")? == control.number("free_at_first")?,
        "the bare driver hands mapped memory on: {}",
        control.stdout
    );
    let running = node.container("a").gpu(0)?.quota("1Gi").args(&["/bin/sleep", "1000"]).start()?;
    let ended = running.exec(&["/bin/gpuslice-tenant", "stale", "64M"])?.success()?;
    let first = ended.number("free_at_first")?;
    ensure!(ended.number("free_while_mapped")? + (64 << 20) <= first, "{}", ended.stdout);
    // The process is gone; the file that it mapped could have gone to any other of the container, and be mapped again.
    std::thread::sleep(Duration::from_millis(1500));
    let later = running.exec(&["/bin/gpuslice-tenant", "info"])?.success()?;
    ensure!(later.number("free")? + (64 << 20) <= first, "handed on: {}", later.stdout);
    ensure!(node.gpus()?.used(0)? >= 64 << 20, "{}", node.gpus()?.used(0)?);
    running.stop()?;
    until("the memory goes with the container", Duration::from_secs(1), || {
        Ok((node.gpus()?.used(0)? == 0).then_some(()))
    })?;
    node.finish()
}
