//! The checks of the node itself.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use gpuslice_config::{Config, Fence, LoadError, Node, check_uids};
use gpuslice_policy::Branch;

use super::{Places, Row, chain};
use crate::query;

const NO_START: &str = "everything: no GPU container starts";
/// How long nvidia-smi may take.
const PATIENCE: Duration = Duration::from_secs(10);

pub(super) fn configuration(config: &Result<Config, LoadError>) -> Row {
    let (ok, found) = match config {
        Ok(_) => (true, "read and checked".to_owned()),
        Err(error) => (false, chain(error)),
    };
    Row::new("configuration", ok, found, "a file of root's with known keys, or none", NO_START)
}

/// Driver and device nodes.
pub(super) fn node(node: &Node, modules: &Path) -> Vec<Row> {
    let mut rows = Vec::new();
    let version = node.driver_version();
    let (ok, found) = match &version {
        Ok(version) => match Branch::for_version(version) {
            Ok(_) => (true, format!("{version}, known")),
            Err(error) => (false, chain(&error)),
        },
        Err(error) => (false, chain(&error)),
    };
    let known: Vec<String> =
        Branch::all().iter().map(|branch| format!("{} to {}.x", branch.floor, branch.major)).collect();
    rows.push(Row::new("NVIDIA driver", ok, found, &known.join(", "), NO_START));
    let needed = "a character device of the driver (nvidia-modprobe -c0 -u makes them)";
    let control = is_device(&node.control());
    rows.push(Row::new("device nvidiactl", control.0, control.1, needed, NO_START));
    let uvm = is_device(&node.uvm());
    rows.push(Row::new("device nvidia-uvm", uvm.0, uvm.1, needed, NO_START));
    let (ok, found) = match node.scan() {
        Err(error) => (false, chain(&error)),
        Ok(gpus) if gpus.is_empty() => (false, "none".to_owned()),
        Ok(gpus) => {
            let texts: Vec<String> = gpus
                .iter()
                .map(|gpu| match gpu {
                    Ok(gpu) => {
                        let device = is_device(&node.gpu(gpu.minor));
                        let lacks = if device.0 { String::new() } else { format!(" ({})", device.1) };
                        format!("nvidia{} {} {}{lacks}", gpu.minor, gpu.model, gpu.uuid)
                    }
                    Err(error) => chain(error),
                })
                .collect();
            let all = gpus.iter().all(|gpu| gpu.as_ref().is_ok_and(|gpu| is_device(&node.gpu(gpu.minor)).0));
            (all, texts.join("; "))
        }
    };
    rows.push(Row::new("GPUs", ok, found, "each with its UUID and device node", "the GPUs that lack it"));
    let tests = fs::read_to_string(modules.join("nvidia_uvm/parameters/uvm_enable_builtin_tests"));
    let off = tests.as_deref().map_or("0", str::trim) == "0";
    let found = if off { "off" } else { "on" };
    let lost = "safety: test commands of the driver are reachable behind any hole";
    rows.push(
        Row::new("built-in tests of nvidia-uvm", off, found, "off (uvm_enable_builtin_tests=0)", lost)
            .optional(),
    );
    rows
}

fn is_device(path: &Path) -> (bool, String) {
    match fs::metadata(path) {
        Ok(found) if found.file_type().is_char_device() => {
            let (major, minor) = ((found.rdev() >> 8) & 0xfff, found.rdev() & 0xff);
            (true, format!("character device {major}:{minor}"))
        }
        Ok(_) => (false, format!("{} is not a character device", path.display())),
        Err(error) => (false, format!("{}: {error}", path.display())),
    }
}

/// What protects memory contents: settings of the driver and the cards, as far as they show.
pub(super) fn cards(places: &Places) -> Vec<Row> {
    let params = fs::read_to_string(places.node.proc_driver.join("params")).unwrap_or_default();
    let value = |name: &str| {
        params.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
    };
    let words = value("RegistryDwords").unwrap_or_default();
    let scrub = !params.is_empty()
        && !words.contains("RMDisableScrubOnFree=1")
        && !words.contains("RMDisableScrubOnFree=0x1");
    let found = match (params.is_empty(), scrub) {
        (true, _) => "unknown",
        (false, true) => "on",
        (false, false) => "off (RMDisableScrubOnFree)",
    };
    let lost = "secrecy: a tenant can find what another one left in memory";
    let scrubbing = Row::new("scrubbing of freed GPU memory", scrub, found, "on", lost).optional();
    let admin = value("RmProfilingAdminOnly");
    let lost = "secrecy: performance counters show neighbours' work";
    let profiling = Row::new(
        "profiling for administrators only",
        admin.is_some_and(|value| value != "0"),
        admin.map_or_else(|| "unknown".to_owned(), |value| format!("RmProfilingAdminOnly {value}")),
        "RmProfilingAdminOnly 1",
        lost,
    );
    let ecc = ecc(&places.nvidia_smi);
    let on = ecc
        .as_deref()
        .is_ok_and(|modes| !modes.is_empty() && modes.lines().all(|mode| mode.trim() == "Enabled"));
    let found = match &ecc {
        Ok(modes) => modes.lines().map(str::trim).collect::<Vec<_>>().join(", "),
        Err(reason) => format!("unknown: {reason}"),
    };
    let lost = "integrity: Rowhammer on GPU memory reaches other tenants' data";
    vec![
        scrubbing,
        profiling.optional(),
        Row::new("ECC of GPU memory", on, found, "Enabled on each card", lost).optional(),
    ]
}

fn ecc(nvidia_smi: &Path) -> Result<String, String> {
    if !nvidia_smi.exists() {
        return Err(format!("no {}", nvidia_smi.display()));
    }
    let mut child = Command::new(nvidia_smi)
        .args(["--query-gpu=ecc.mode.current", "--format=csv,noheader"])
        .env_clear()
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| error.to_string())?;
    let deadline = Instant::now() + PATIENCE;
    while child.try_wait().map_err(|error| error.to_string())?.is_none() {
        if Instant::now() >= deadline {
            child.kill().ok();
            return Err(format!("nvidia-smi didn't end within {PATIENCE:?}"));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let output = child.wait_with_output().map_err(|error| error.to_string())?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        Err(format!("nvidia-smi ended with {}", output.status))
    }
}

pub(super) fn uids(config: &Config, etc: &Path) -> Row {
    let (ok, found) = match check_uids(config.uids(), etc) {
        Ok(()) => (true, format!("{}, used by nobody else", config.uids())),
        Err(error) => (false, chain(&error)),
    };
    Row::new(
        "uids for sandboxes",
        ok,
        found,
        "a range apart from users and subuids",
        "the scheduler doesn't start",
    )
}

pub(super) fn scheduler(config: &Config) -> Row {
    let (ok, found) = match query::ask(config) {
        Ok(answer) => (true, format!("up {} s, {} tenants", answer.uptime, answer.tenants.len())),
        Err(error) => (false, chain(&error)),
    };
    Row::new("gpuslice-scheduler", ok, found, "running", NO_START)
}

/// The shim and the sandbox.
pub(super) fn programs(config: &Config, directories: &[PathBuf]) -> Vec<Row> {
    let installed = |path: &Path| {
        fs::metadata(path).is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
    };
    let look = |name: &str, set: Option<&PathBuf>| {
        let candidates = match set {
            Some(path) => vec![path.clone()],
            None => directories.iter().map(|directory| directory.join(name)).collect(),
        };
        let found = candidates.iter().find(|path| installed(path)).map(|path| path.display().to_string());
        let looked: Vec<String> = candidates.iter().map(|path| path.display().to_string()).collect();
        (found.is_some(), found.unwrap_or_else(|| format!("not at {}", looked.join(", "))))
    };
    let shim = look("containerd-shim-gpuslice-v1", None);
    let sandbox = look("gpuslice-sandbox", config.sandbox.as_ref());
    vec![
        Row::new(
            "containerd-shim-gpuslice-v1",
            shim.0,
            shim.1,
            "on containerd's PATH",
            "everything: containerd finds no such runtime",
        ),
        Row::new("gpuslice-sandbox", sandbox.0, sandbox.1, "an executable of root's", NO_START),
    ]
}

/// First match of a program's name; the name itself where there is none.
pub(super) fn find_program(name: &str, directories: &[&str]) -> PathBuf {
    if name.contains('/') {
        return name.into();
    }
    let candidates = directories.iter().map(|directory| Path::new(directory).join(name));
    candidates.into_iter().find(|path| path.exists()).unwrap_or_else(|| name.into())
}

pub(super) fn cgroups(root: &Path) -> Row {
    let unified = root.join("cgroup.controllers").exists();
    let legacy = root.join("devices").exists() && root.join("memory").exists();
    let found = match (unified, legacy) {
        (true, _) => "version 2",
        (false, true) => "version 1",
        (false, false) => "neither version 1 nor 2",
    };
    Row::new("cgroups", unified || legacy, found, "version 1 or 2", NO_START)
}

pub(super) fn fence(config: &Config) -> Row {
    let (ok, found) = match config.fence {
        Fence::Required => (false, "required; this release has none"),
        Fence::Preferred => (true, "preferred; this release has none"),
        Fence::Off => (true, "off"),
    };
    Row::new("fence setting", ok, found, "fence = \"preferred\" or \"off\" in the configuration", NO_START)
}
