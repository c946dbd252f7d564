//! What a hostile tenant tries: every attack is refused before the driver, and each is first shown to get through
//! to the driver of an unprotected container.

use anyhow::{Context, Result, ensure};
use gpuslice_harness::{Node, Options, Runtime};
use serde_json::Value;

/// Exit status of the tenant program when an attack got through.
const REACHED: i32 = 10;

/// Runs an attack on the unprotected control, then under this runtime, and checks that nothing which the driver
/// would have to refuse reached it.
fn attack(name: &str) -> Result<()> {
    let node = Node::start()?;
    let gpus = node.gpus()?;
    ensure!(works_unprotected(&node, name)?, "the unprotected control resists {name}");
    let before = gpus.calls()?;
    let ended = node.container("a").gpu(0)?.quota("1Gi").tenant(&["attack", name]).run()?;
    let through: Vec<&str> = ended.stdout.lines().filter(|line| line.contains("\"reached\":true")).collect();
    ensure!(ended.status == 0, "{name} got through: {through:?} {}", ended.stderr);
    let journal = gpus.journal(before)?;
    for (index, call) in journal.iter().enumerate() {
        // The sandbox's last call may have been under way when it was ended with its container.
        let last = !journal.iter().skip(index + 1).any(|later| later.get("pid") == call.get("pid"));
        ensure!(last || well_formed(call)?, "a malformed call of {name} reached the driver: {call}");
    }
    // The node still serves: a tenant that behaves gets its memory.
    node.container("b").gpu(0)?.quota("1Gi").tenant(&["alloc", "512M", "1"]).run()?.success()?;
    node.finish()
}

/// Whether the attack gets somewhere without this runtime: the driver obeys, or at least has to refuse by itself;
/// or the kernel executes the call natively.
fn works_unprotected(node: &Node, name: &str) -> Result<bool> {
    let before = node.gpus()?.calls()?;
    let direct = node.container("control").gpu(0)?.direct()?.tenant(&["attack", name]).run()?;
    if direct.status == REACHED {
        return Ok(true);
    }
    for call in node.gpus()?.journal(before)? {
        if !well_formed(&call)? {
            return Ok(true);
        }
    }
    let native = node.container("control").gpu(0)?.runtime(Runtime::Runc).tenant(&["attack", name]).run()?;
    // Many kernels have no x32 table at all; there the call fails by itself.
    let no_table = name == "x32" && native.stdout.contains("\"result\":-38");
    Ok(native.status == REACHED || no_table)
}

/// Whether a call has a number that the driver's own header knows, with its size, and good addresses.
fn well_formed(call: &Value) -> Result<bool> {
    let number =
        |key: &str| call.get(key).and_then(Value::as_u64).with_context(|| format!("no {key} in {call}"));
    let node = call.get("node").and_then(Value::as_str).context("no node")?;
    let cmd = number("cmd")?;
    if number("errno")? != 0 {
        return Ok(false);
    }
    if node.starts_with("uvm") {
        return Ok(cmd < 100 || cmd == 0x3000_0001);
    }
    let (direction, size, kind, escape) = (cmd >> 30, (cmd >> 16) & 0x3fff, (cmd >> 8) & 0xff, cmd & 0xff);
    let sizes: &[u64] = match escape {
        0x27 => &[56],
        0x28 | 0x29 => &[16],
        0x2a => &[32],
        0x2b => &[32, 48],
        0x32 => &[12],
        0x34 => &[28],
        0x35 => &[16],
        0x41 | 0x4a | 0x4e | 0x4f | 0x54 | 0x56 | 0x57 | 0x58 | 0x59 | 0x5a | 0x5b | 0x5c | 0x5e => {
            return Ok(true);
        }
        0xc8 => &[72 * 32],
        0xc9 => &[4],
        0xce | 0xcf => &[16],
        0xd2 => &[72],
        0xd6 => &[8],
        0xda => &[8],
        _ => return Ok(false),
    };
    Ok(direction == 3 && kind == u64::from(b'F') && sizes.contains(&size))
}

macro_rules! attacks {
    ($($test:ident: $name:literal;)*) => {
        $(
            #[test]
            #[ignore = "needs root and containerd: cargo xtask test"]
            fn $test() -> Result<()> {
                attack($name)
            }
        )*
    };
}

attacks! {
    parameters_of_a_wrong_size_are_refused: "sizes";
    wild_pointers_are_refused: "pointers";
    foreign_files_are_refused: "files";
    handles_of_others_are_refused: "handles";
    calls_of_the_32_bit_table_are_refused: "abi32";
    calls_of_the_x32_table_are_refused: "x32";
    io_uring_is_refused: "io-uring";
    high_bits_in_the_command_are_refused: "high-bits";
    other_type_bytes_are_refused: "type-bytes";
    a_file_swapped_by_another_thread_is_refused: "swap";
    a_thread_with_files_of_its_own_is_refused: "clone";
    commands_for_administrators_are_refused: "raw";
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn a_gpu_file_is_useless_in_a_container_without_a_gpu() -> Result<()> {
    let node = Node::start()?;
    let dev = node.gpus()?.root().join("dev");
    let files = ["nvidiactl", "nvidia0", "nvidia-uvm"];
    // The file itself is there, as if a GPU container had passed it on.
    let with_files = |id: &str, runtime: Runtime| {
        files.iter().fold(node.container(id).runtime(runtime), |container, file| {
            container.bind(dev.join(file), &format!("/dev/{file}"))
        })
    };
    // Both runs try FIGETBSZ, a driver number that the kernel performs on any file unless a filter stops it.
    let control = with_files("control", Runtime::Runc).tenant(&["attack", "swap"]).run()?;
    ensure!(control.status == REACHED, "without a filter the kernel performs the call: {control:?}");
    let before = node.gpus()?.calls()?;
    let ended = with_files("a", Runtime::Gpuslice).tenant(&["attack", "swap"]).run()?;
    ensure!(ended.status == 0, "the kernel performed the call: {ended:?}");
    let ended = with_files("a", Runtime::Gpuslice).tenant(&["info"]).run()?;
    ensure!(ended.status == 2 && ended.stdout.contains("\"errno\":25"), "{ended:?}");
    ensure!(node.gpus()?.calls()? == before, "the driver was reached");
    node.finish()
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test"]
fn one_tenant_sees_nothing_of_another() -> Result<()> {
    let node = Node::with(Options { gpus: 2, ..Options::default() })?;
    let first = node.container("first").gpu(0)?.quota("2Gi").tenant(&["hold", "1G", "1000"]).start()?;
    first.wait_for_output("holding")?;
    let second = node.container("second").gpu(0)?.quota("1Gi").tenant(&["info"]).run()?.success()?;
    ensure!(second.number("free")? > 900 << 20, "the other's use shows: {}", second.stdout);
    let line = second.lines()?.pop().context("no line")?;
    let minors = line.get("minors").and_then(Value::as_array).context("no cards")?;
    ensure!(minors.len() == 1, "cards that were not granted show: {line}");
    ensure!(
        line.get("processes").and_then(Value::as_u64).unwrap_or(0) <= 1,
        "others' processes show: {line}"
    );
    first.stop()?;
    node.finish()
}
