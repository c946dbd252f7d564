//! A container gets the GPU memory that its slice says, sees that and no more, and can only make the slice smaller.

use anyhow::{Result, ensure};
use gpuslice_harness::{Ended, Node, Options};
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// The driver's status for "no memory", which CUDA reports as CUDA_ERROR_OUT_OF_MEMORY.
const NO_MEMORY: u64 = 0x51;
/// Class of card memory.
const CARD_MEMORY: u64 = 0x40;
/// Exit status of the tenant program when the driver refused.
const REFUSED: i32 = 3;

/// Calls of the journal that tried to make card memory.
fn allocations(journal: &[Value]) -> Vec<&Value> {
    journal.iter().filter(|call| call.get("what").and_then(Value::as_u64) == Some(CARD_MEMORY)).collect()
}

fn total(ended: &Ended) -> Result<u64> {
    ended.number("total")
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn a_tenant_sees_its_quota_as_the_size_of_the_card() -> Result<()> {
    let node = Node::start()?;
    let control = node.container("control").gpu(0)?.direct()?.tenant(&["info"]).run()?.success()?;
    ensure!(total(&control)? > 32 * GIB, "the control sees the whole card: {}", control.stdout);
    let ended = node.container("a").gpu(0)?.quota("1Gi").tenant(&["info"]).run()?.success()?;
    ensure!(total(&ended)? == GIB, "{}", ended.stdout);
    ensure!(ended.number("free")? <= GIB && ended.number("heap")? <= GIB, "{}", ended.stdout);
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn an_allocation_beyond_the_quota_is_refused_and_never_reaches_the_driver() -> Result<()> {
    let node = Node::start()?;
    let gpus = node.gpus()?;
    let control =
        node.container("control").gpu(0)?.direct()?.tenant(&["alloc", "256M", "16"]).run()?.success()?;
    ensure!(control.number("bytes")? == 4 * GIB, "the control gets the memory: {}", control.stdout);
    let before = gpus.calls()?;
    let ended = node.container("a").gpu(0)?.quota("1Gi").tenant(&["alloc", "256M", "16"]).run()?;
    ensure!(ended.status == REFUSED && ended.number("status")? == NO_MEMORY, "{ended:?}");
    let got = ended.number("bytes")?;
    ensure!((GIB - 256 * MIB..=GIB).contains(&got), "{got} bytes under a quota of {GIB}");
    let journal = gpus.journal(before)?;
    let made = u64::try_from(allocations(&journal).len())?;
    ensure!(made == ended.number("count")?, "{made} allocations reached the driver: {}", ended.stdout);
    ensure!(gpus.used(0)? == 0, "{} bytes stay allocated", gpus.used(0)?);
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn memory_that_was_freed_can_be_had_again() -> Result<()> {
    let node = Node::start()?;
    let running = node.container("a").gpu(0)?.quota("1Gi").args(&["/bin/sleep", "1000"]).start()?;
    for _ in 0..4 {
        let ended = running.exec(&["/bin/gpuslice-tenant", "alloc", "512M", "1"])?.success()?;
        ensure!(ended.number("bytes")? == GIB / 2, "{}", ended.stdout);
    }
    running.stop()?;
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn two_processes_of_a_container_share_one_quota() -> Result<()> {
    let node = Node::start()?;
    let running = node.container("a").gpu(0)?.quota("1Gi").tenant(&["hold", "768M", "1000"]).start()?;
    running.wait_for_output("holding")?;
    let second = running.exec(&["/bin/gpuslice-tenant", "alloc", "512M", "1"])?;
    ensure!(second.status == REFUSED && second.number("status")? == NO_MEMORY, "{second:?}");
    ensure!(second.number("free_before")? <= GIB / 4, "free is what is left of the quota: {}", second.stdout);
    running.stop()?;
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn two_tenants_side_by_side_have_different_quotas() -> Result<()> {
    let node = Node::start()?;
    let one = node.container("one").gpu(0)?.quota("1Gi").tenant(&["hold", "700M", "1000"]).start()?;
    one.wait_for_output("holding")?;
    let two = node.container("two").gpu(0)?.quota("3Gi").tenant(&["alloc", "512M", "16"]).run()?;
    ensure!(total(&two)? == 3 * GIB, "{}", two.stdout);
    ensure!(two.number("free_before")? > 2 * GIB, "the first tenant's use does not show: {}", two.stdout);
    let got = two.number("bytes")?;
    ensure!(two.status == REFUSED && got > 2 * GIB && got <= 3 * GIB, "{got} bytes: {}", two.stdout);
    ensure!(one.stdout().contains(&format!("\"total\":{GIB}")), "{}", one.stdout());
    one.stop()?;
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn a_container_without_a_limit_gets_the_default_of_the_node() -> Result<()> {
    let config = "[defaults]\nmemory_hard = \"2Gi\"\n".to_owned();
    let node = Node::with(Options { config, ..Options::default() })?;
    let ended = node.container("a").gpu(0)?.tenant(&["info"]).run()?.success()?;
    ensure!(total(&ended)? == 2 * GIB, "{}", ended.stdout);
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn an_annotation_lowers_the_ceiling_of_the_node_and_never_raises_it() -> Result<()> {
    let config = "[limits]\nmemory_hard = \"2Gi\"\n[defaults]\nmemory_hard = \"2Gi\"\n".to_owned();
    let node = Node::with(Options { config, ..Options::default() })?;
    for (asked, seen) in [("8Gi", 2 * GIB), ("1Gi", GIB)] {
        let ended = node.container("a").gpu(0)?.quota(asked).tenant(&["info"]).run()?.success()?;
        ensure!(total(&ended)? == seen, "asked for {asked}: {}", ended.stdout);
    }
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn each_gpu_can_have_a_limit_of_its_own() -> Result<()> {
    let node = Node::with(Options { gpus: 2, ..Options::default() })?;
    let (first, second) = (node.gpus()?.uuid(0)?, node.gpus()?.uuid(1)?);
    let value = format!("{first}=1Gi,{second}=2Gi");
    let ended = node.container("a").gpu(0)?.gpu(1)?.quota(&value).tenant(&["info"]).run()?.success()?;
    ensure!(total(&ended)? == GIB, "{}", ended.stdout);
    let value = format!("{second}=2Gi");
    let ended = node.container("b").gpu(1)?.quota(&value).tenant(&["info"]).run()?.success()?;
    ensure!(total(&ended)? == 2 * GIB, "{}", ended.stdout);
    let ended = node.container("c").gpu(0)?.quota(&value).tenant(&["info"]).run()?;
    ended.refused(&["memory-hard", &second, "not granted"])?;
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn a_bad_annotation_is_refused_with_its_key_and_value() -> Result<()> {
    let node = Node::start()?;
    let cases: [(&str, &str); 10] = [
        ("gpuslice.io/memory-hard", "0"),
        ("gpuslice.io/memory-hard", "lots"),
        ("gpuslice.io/memory-hard", "-1Gi"),
        ("gpuslice.io/memory-hard", "1.5Gi"),
        ("gpuslice.io/memory-hard", "99999999999999999999"),
        ("gpuslice.io/memory-hard", "18446744073709551615Gi"),
        ("gpuslice.io/memory-soft", "0"),
        ("gpuslice.io/weight", "0"),
        ("gpuslice.io/weight", "heavy"),
        ("gpuslice.io/colour", "red"),
    ];
    for (key, value) in cases {
        let ended = node.container("a").gpu(0)?.annotation(key, value).run()?;
        let texts: &[&str] = if key.ends_with("colour") { &[key] } else { &[key, value] };
        ended.refused(texts)?;
    }
    let soft_above_hard =
        node.container("a").gpu(0)?.quota("1Gi").annotation("gpuslice.io/memory-soft", "2Gi").run()?;
    soft_above_hard.refused(&["gpuslice.io/memory-soft", "2Gi", "above"])?;
    node.check_clean()?;
    node.container("a").gpu(0)?.tenant(&["info"]).run()?.success()?;
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn an_environment_variable_grants_no_gpu() -> Result<()> {
    let node = Node::start()?;
    let ended = node
        .container("a")
        .env("NVIDIA_VISIBLE_DEVICES", "all")
        .env("NVIDIA_DRIVER_CAPABILITIES", "all")
        .shell("ls /dev | grep nvidia; echo none")
        .run()?
        .success()?;
    ensure!(ended.stdout == "none\n", "{ended:?}");
    ensure!(node.sandboxes().is_empty(), "a sandbox runs");
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn a_gpu_by_a_hook_of_the_toolkit_is_refused_with_the_way_by_cdi() -> Result<()> {
    let node = Node::start()?;
    let hook = json!({"prestart": [{"path": "/usr/bin/nvidia-container-runtime-hook",
                                    "args": ["nvidia-container-runtime-hook", "prestart"]}]});
    node.container("a").edit("/hooks", hook).run()?.refused(&["hook", "CDI"])?;
    let cli =
        json!({"prestart": [{"path": "/usr/bin/nvidia-container-cli", "args": ["nvidia-container-cli"]}]});
    node.container("a").edit("/hooks", cli).run()?.refused(&["hook", "CDI"])?;
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn eight_containers_that_start_at_once_each_get_their_slice() -> Result<()> {
    let node = Node::start()?;
    let mut starting = Vec::new();
    for i in 1..=8_u64 {
        let container = node.container(&format!("c{i}")).gpu(0)?.quota(&format!("{i}Gi")).tenant(&["info"]);
        starting.push((i, container.background(&["--rm"])?));
    }
    for (i, one) in starting {
        let ended = one.ended()?.success()?;
        ensure!(total(&ended)? == i * GIB, "container {i}: {}", ended.stdout);
    }
    node.finish()
}
