//! What no container of this runtime may have (rule S6), with a GPU or without.
//!
//! Owns: the verdict on a container's spec at create and on a process at exec. Trusts: containerd for the
//! truth of the spec, nobody for its harmlessness. Promises: changes nothing; a spec that passes gives its
//! container no way to the driver but the trapped one. Failure: a refusal says what was found and the remedy.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde_json::Value;

mod names;

use super::spec::{self, Malformed, Numbers};

/// Capabilities refused to every container: each opens a way around the trap.
const CAPABILITIES: [&str; 5] = ["SYS_ADMIN", "SYS_MODULE", "SYS_RAWIO", "BPF", "PERFMON"];
/// Refused as well while no fence ties a GPU's file to its sandbox.
const CAPABILITIES_UNFENCED: [&str; 1] = ["SYS_PTRACE"];
const CAPABILITY_SETS: [&str; 5] = ["bounding", "effective", "inheritable", "permitted", "ambient"];

/// Devices that runtimes give every container: type, major, minor.
const DEFAULT_DEVICES: [(u32, Option<u32>); 10] = [
    (1, Some(3)),
    (1, Some(5)),
    (1, Some(7)),
    (1, Some(8)),
    (1, Some(9)),
    (5, Some(0)),
    (5, Some(1)),
    (5, Some(2)),
    (136, None),
    (10, Some(200)),
];
const FUSE: Numbers = Numbers { kind: 'c', major: Some(10), minor: Some(229) };
/// Memory and port devices, which reach every device of the host.
const MEMORY: [u32; 3] = [1, 2, 4];

const BY_CDI: &str = "grant the GPU by CDI instead: `ctr run --device nvidia.com/gpu=0`, `nerdctl run --gpus` of \
                      nerdctl 2.3 or newer, or enable_cdi in containerd's configuration for Kubernetes";

/// Whether the kernel ties a GPU's open file to its sandbox (BPF LSM).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fence {
    #[cfg_attr(not(test), expect(dead_code, reason = "no fence is built yet; the rules for it are tested"))]
    Present,
    Absent,
}

/// Why a container or process is not admitted.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum Refusal {
    #[error(
        "device rule `{rule}` allows every device, as for a privileged container: drop --privileged and name the devices"
    )]
    Privileged { rule: String },
    #[error("device rule `{rule}` is wider than the devices listed in linux.devices: grant devices by name")]
    DeviceRule { rule: String },
    #[error("device {device} reaches the host's memory: drop it")]
    MemoryDevice { device: String },
    #[error(
        "/dev/fuse is refused while no fence (BPF LSM) is active: a FUSE server in the container could block the sandbox"
    )]
    Fuse,
    #[error(
        "CAP_{name} in the {set} set: containers of this runtime must not hold it; drop it (privileged containers hold it too)"
    )]
    Capability { name: String, set: &'static str },
    #[error("the container shares the host's {kind} namespace: give it a namespace of its own or its pod's")]
    HostNamespace { kind: &'static str },
    #[error("namespace {}: can't be read ({reason})", path.display())]
    Namespace { path: PathBuf, reason: String },
    #[error(
        "a bind mount of {source_path} shows the container this node's sockets in {run_dir}, which take root's word: drop it"
    )]
    Sockets { source_path: String, run_dir: String },
    #[error(
        "the mount at {at} lets the container write to the host's cgroups, and so leave its own: mount it read-only or give the container a cgroup namespace"
    )]
    Cgroups { at: String },
    #[error(
        "the name {found:?} at {place} is another form of {known:?}, for which runtimes may take it: write it so"
    )]
    Name { found: String, place: String, known: String },
    #[error(
        "the seccomp profile uses notifications itself ({at}): the kernel allows one listener; use a profile without SCMP_ACT_NOTIFY"
    )]
    Notify { at: &'static str },
    #[error("hook {hook} of NVIDIA's toolkit would add the GPU behind the runtime's back: {BY_CDI}")]
    ToolkitHook { hook: String },
    #[error(
        "the runtime binary {runtime} is NVIDIA's wrapper, which adds GPUs behind the shim's back: set BinaryName to runc or crun; {BY_CDI}"
    )]
    ToolkitRuntime { runtime: String },
    #[error(transparent)]
    Malformed(#[from] Malformed),
}

/// Where the host's own namespaces are found: `/proc`, or a folder like it in tests.
#[derive(Clone, Debug)]
pub(crate) struct Host {
    pub(crate) proc: PathBuf,
}

impl Default for Host {
    fn default() -> Self {
        Host { proc: PathBuf::from("/proc") }
    }
}

/// Judges a container at create.
///
/// # Errors
/// The first [`Refusal`] met.
pub(crate) fn judge_container(
    root: &Value,
    runtime: &Path,
    host: &Host,
    fence: Fence,
) -> Result<(), Refusal> {
    judge_runtime(runtime)?;
    names::judge(root)?;
    judge_devices(root, fence)?;
    judge_namespaces(root, host, fence)?;
    judge_profile(root)?;
    judge_hooks(root)?;
    match root.get("process") {
        Some(process) => judge_process(process, fence),
        None => Ok(()),
    }
}

/// Judges the process of an exec (`process.json`), or a container's first one.
///
/// # Errors
/// The first [`Refusal`] met.
pub(crate) fn judge_process(process: &Value, fence: Fence) -> Result<(), Refusal> {
    names::judge(process)?;
    for set in CAPABILITY_SETS {
        for name in spec::texts(process, &format!("/capabilities/{set}"))? {
            let upper = name.to_ascii_uppercase();
            let plain = upper.strip_prefix("CAP_").unwrap_or(&upper);
            let unfenced = fence == Fence::Absent && CAPABILITIES_UNFENCED.contains(&plain);
            // A runtime's library may take numbers for names.
            let strange = !plain.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_');
            if unfenced || strange || CAPABILITIES.contains(&plain) {
                return Err(Refusal::Capability { name: plain.to_owned(), set });
            }
        }
    }
    Ok(())
}

/// Judges the mounts at create. The sockets of the shim and the scheduler believe whoever is root, and root of a
/// container without a user namespace is. Processes are known by their cgroup, so none may leave its container's.
///
/// # Errors
/// [`Refusal::Sockets`], [`Refusal::Cgroups`].
pub(crate) fn judge_mounts(root: &Value, run_dir: &Path) -> Result<(), Refusal> {
    let whole = |path: &Path| fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let ours = whole(run_dir);
    let mut own_cgroups = false;
    for namespace in spec::list(root, "/linux/namespaces")? {
        let own = spec::text(namespace, "path")?.unwrap_or_default().is_empty();
        own_cgroups |= own && spec::text(namespace, "type")? == Some("cgroup");
    }
    for mount in spec::list(root, "/mounts")? {
        let kind = spec::text(mount, "type")?.unwrap_or_default();
        let shown = whole(Path::new(spec::text(mount, "source")?.unwrap_or_default()));
        // Of a bind mount the namespace doesn't change what is shown.
        let bound = !matches!(kind, "cgroup" | "cgroup2" | "sysfs")
            && (shown == Path::new("/sys")
                || shown == Path::new("/sys/fs")
                || shown.starts_with("/sys/fs/cgroup"));
        let fresh = matches!(kind, "cgroup" | "cgroup2") && !own_cgroups;
        if (bound || fresh) && !is_read_only(&spec::texts(mount, "/options")?) {
            let at = spec::text(mount, "destination")?.unwrap_or("?").to_owned();
            return Err(Refusal::Cgroups { at });
        }
        let Some(source) = spec::text(mount, "source")?.filter(|source| source.starts_with('/')) else {
            continue;
        };
        if whole(Path::new(source)).starts_with(&ours) {
            let run_dir = run_dir.display().to_string();
            return Err(Refusal::Sockets { source_path: source.to_owned(), run_dir });
        }
    }
    Ok(())
}

/// Whether the last word on it among mount options is "read-only".
fn is_read_only(options: &[&str]) -> bool {
    options.iter().rev().find(|option| matches!(**option, "ro" | "rw")) == Some(&"ro")
}

fn judge_runtime(runtime: &Path) -> Result<(), Refusal> {
    let runtime = runtime.to_string_lossy();
    if file_name(&runtime).starts_with("nvidia-container-runtime") {
        return Err(Refusal::ToolkitRuntime { runtime: runtime.into_owned() });
    }
    Ok(())
}

fn judge_devices(root: &Value, fence: Fence) -> Result<(), Refusal> {
    let mut granted = Vec::new();
    for device in spec::list(root, "/linux/devices")? {
        let numbers = Numbers::of(device)?;
        let name = || format!("{} ({numbers})", device.get("path").and_then(Value::as_str).unwrap_or("?"));
        if numbers.kind == 'c'
            && numbers.major == Some(1)
            && numbers.minor.is_some_and(|m| MEMORY.contains(&m))
        {
            return Err(Refusal::MemoryDevice { device: name() });
        }
        if numbers == FUSE && fence == Fence::Absent {
            return Err(Refusal::Fuse);
        }
        granted.push(numbers);
    }
    for rule in spec::list(root, "/linux/resources/devices")? {
        let allow = rule.get("allow").and_then(Value::as_bool).unwrap_or(false);
        let access = spec::text(rule, "access")?.filter(|access| !access.is_empty()).unwrap_or("rwm");
        let numbers = Numbers::of(rule)?;
        // Making a node gives no access to what is behind it. But of a rule for "a" the kernel reads no more: it
        // allows everything.
        if !allow || (numbers.kind != 'a' && !access.contains(['r', 'w'])) {
            continue;
        }
        judge_rule(numbers, access, &granted, fence)?;
    }
    Ok(())
}

fn judge_rule(numbers: Numbers, access: &str, granted: &[Numbers], fence: Fence) -> Result<(), Refusal> {
    let rule = || format!("{numbers} {access}");
    if numbers.kind == 'a' {
        return Err(Refusal::Privileged { rule: rule() });
    }
    if numbers == FUSE && fence == Fence::Absent {
        return Err(Refusal::Fuse);
    }
    let default = numbers.kind == 'c'
        && DEFAULT_DEVICES.iter().any(|(major, minor)| {
            numbers.major == Some(*major) && (minor.is_none() || numbers.minor == *minor)
        });
    let exact = numbers.major.is_some() && numbers.minor.is_some() && granted.contains(&numbers);
    if default || exact { Ok(()) } else { Err(Refusal::DeviceRule { rule: rule() }) }
}

fn judge_namespaces(root: &Value, host: &Host, fence: Fence) -> Result<(), Refusal> {
    let list = spec::list(root, "/linux/namespaces")?;
    let kinds: &[(&'static str, &str)] = match fence {
        Fence::Absent => &[("pid", "pid"), ("ipc", "ipc"), ("mount", "mnt"), ("network", "net")],
        Fence::Present => &[("pid", "pid"), ("ipc", "ipc"), ("mount", "mnt")],
    };
    for (kind, file) in kinds {
        let mut found = false;
        for namespace in list {
            if spec::text(namespace, "type")? == Some(*kind) {
                found = true;
                let path = spec::text(namespace, "path")?.unwrap_or_default();
                if !path.is_empty() {
                    judge_joined(kind, Path::new(path), host, file)?;
                }
            }
        }
        if !found {
            return Err(Refusal::HostNamespace { kind });
        }
    }
    Ok(())
}

fn judge_joined(kind: &'static str, path: &Path, host: &Host, file: &str) -> Result<(), Refusal> {
    let joined = namespace_of(path)?;
    if namespace_of(&host.proc.join("self/ns").join(file))? == joined {
        return Err(Refusal::HostNamespace { kind });
    }
    // Where init's own can't be looked at, not even by root, no container can be put into it either.
    let init = fs::metadata(host.proc.join("1/ns").join(file));
    if init.is_ok_and(|data| (data.dev(), data.ino()) == joined) {
        return Err(Refusal::HostNamespace { kind });
    }
    Ok(())
}

fn namespace_of(path: &Path) -> Result<(u64, u64), Refusal> {
    fs::metadata(path)
        .map(|data| (data.dev(), data.ino()))
        .map_err(|error| Refusal::Namespace { path: path.to_owned(), reason: error.to_string() })
}

fn judge_profile(root: &Value) -> Result<(), Refusal> {
    const NOTIFY: &str = "SCMP_ACT_NOTIFY";
    let Some(profile) = root.pointer("/linux/seccomp").filter(|value| !value.is_null()) else {
        return Ok(());
    };
    if spec::text(profile, "defaultAction")? == Some(NOTIFY) {
        return Err(Refusal::Notify { at: "defaultAction" });
    }
    for rule in spec::list(profile, "/syscalls")? {
        if spec::text(rule, "action")? == Some(NOTIFY) {
            return Err(Refusal::Notify { at: "syscalls" });
        }
    }
    match spec::text(profile, "listenerPath")? {
        None | Some("") => Ok(()),
        Some(_) => Err(Refusal::Notify { at: "listenerPath" }),
    }
}

fn judge_hooks(root: &Value) -> Result<(), Refusal> {
    const KINDS: [&str; 6] =
        ["prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"];
    for kind in KINDS {
        for hook in spec::list(root, &format!("/hooks/{kind}"))? {
            let path = spec::text(hook, "path")?.unwrap_or_default();
            let arguments = spec::texts(hook, "/args")?;
            if adds_gpu(path, &arguments) {
                return Err(Refusal::ToolkitHook { hook: format!("{path} ({kind})") });
            }
        }
    }
    Ok(())
}

/// Whether a hook would grant a GPU: NVIDIA's runtime hook under any of its names, or a program that runs
/// NVIDIA's container tool (containerd's own `oci-hook` for `ctr --gpus`). What a CDI spec brings
/// (`nvidia-cdi-hook`, `nvidia-ctk hook`) only prepares files.
fn adds_gpu(path: &str, arguments: &[&str]) -> bool {
    const GRANTING: [&str; 3] =
        ["nvidia-container-runtime-hook", "nvidia-container-toolkit", "nvidia-container-cli"];
    let grants = |program: &str| {
        let name = file_name(program);
        GRANTING.contains(&name) || name.starts_with("nvidia-container-runtime")
    };
    let name = file_name(path);
    let file_work = name == "nvidia-cdi-hook" || (name == "nvidia-ctk" && arguments.get(1) == Some(&"hook"));
    grants(path)
        || (name == "nvidia-ctk" && !file_work)
        || (!file_work && arguments.iter().any(|a| grants(a)))
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

#[cfg(test)]
mod tests;
