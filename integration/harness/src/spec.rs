//! The OCI spec of a test container: what `ctr` writes by default, plus exactly what a test asks for.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

/// A device node granted to a container, and the host path that stands for it.
#[derive(Clone, Debug)]
pub struct Device {
    /// Path in the container.
    pub path: String,
    /// Major and minor number.
    pub number: (u32, u32),
    /// File bound over the node: the emulated GPU's. None: a real node.
    pub file: Option<PathBuf>,
}

/// What a spec is made of.
#[derive(Clone, Debug)]
pub(crate) struct Parts<'a> {
    pub(crate) rootfs: &'a Path,
    pub(crate) cgroup: String,
    pub(crate) args: &'a [String],
    pub(crate) env: &'a [String],
    pub(crate) terminal: bool,
    pub(crate) annotations: &'a [(String, String)],
    pub(crate) devices: &'a [Device],
    pub(crate) binds: &'a [(PathBuf, String)],
    pub(crate) seccomp: Option<&'a Value>,
    pub(crate) memory_limit: Option<u64>,
}

const CAPABILITIES: [&str; 14] = [
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FSETID",
    "CAP_FOWNER",
    "CAP_MKNOD",
    "CAP_NET_RAW",
    "CAP_SETGID",
    "CAP_SETUID",
    "CAP_SETFCAP",
    "CAP_SETPCAP",
    "CAP_NET_BIND_SERVICE",
    "CAP_SYS_CHROOT",
    "CAP_KILL",
    "CAP_AUDIT_WRITE",
];

/// The spec as JSON.
pub(crate) fn build(parts: &Parts<'_>) -> Value {
    let mut mounts = standard_mounts();
    for device in parts.devices {
        if let Some(file) = &device.file {
            mounts.push(bind(file, &device.path));
        }
    }
    mounts.extend(parts.binds.iter().map(|(from, to)| bind(from, to)));
    let mut rules = vec![json!({"allow": false, "access": "rwm"})];
    let mut nodes = Vec::new();
    for device in parts.devices {
        let (major, minor) = device.number;
        rules.push(json!({"allow": true, "type": "c", "major": major, "minor": minor, "access": "rwm"}));
        nodes.push(json!({
            "path": device.path, "type": "c", "major": major, "minor": minor, "fileMode": 0o666, "uid": 0, "gid": 0,
        }));
    }
    let annotations: serde_json::Map<String, Value> =
        parts.annotations.iter().map(|(key, value)| (key.clone(), json!(value))).collect();
    let mut linux = json!({
        "cgroupsPath": parts.cgroup,
        "devices": nodes,
        "resources": {"devices": rules},
        "namespaces": [
            {"type": "pid"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}, {"type": "network"},
        ],
        "maskedPaths": [
            "/proc/acpi", "/proc/asound", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list",
            "/proc/timer_stats", "/proc/sched_debug", "/sys/firmware", "/proc/scsi",
        ],
        "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
    });
    if let (Some(profile), Some(linux)) = (parts.seccomp, linux.as_object_mut()) {
        linux.insert("seccomp".to_owned(), profile.clone());
    }
    if let (Some(limit), Some(resources)) = (parts.memory_limit, linux.pointer_mut("/resources"))
        && let Some(resources) = resources.as_object_mut()
    {
        resources.insert("memory".to_owned(), json!({"limit": limit}));
    }
    json!({
        "ociVersion": "1.0.2",
        "process": {
            "terminal": parts.terminal,
            "user": {"uid": 0, "gid": 0},
            "args": parts.args,
            "env": parts.env,
            "cwd": "/",
            "noNewPrivileges": true,
            "capabilities": {"bounding": CAPABILITIES, "effective": CAPABILITIES, "permitted": CAPABILITIES},
            "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 1024, "soft": 1024}],
        },
        "root": {"path": parts.rootfs},
        "hostname": "tenant",
        "mounts": mounts,
        "annotations": annotations,
        "linux": linux,
    })
}

fn standard_mounts() -> Vec<Value> {
    vec![
        json!({"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "noexec", "nodev"]}),
        json!({"destination": "/dev", "type": "tmpfs", "source": "tmpfs",
               "options": ["nosuid", "strictatime", "mode=755", "size=65536k"]}),
        json!({"destination": "/dev/pts", "type": "devpts", "source": "devpts",
               "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"]}),
        json!({"destination": "/dev/shm", "type": "tmpfs", "source": "shm",
               "options": ["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"]}),
        json!({"destination": "/dev/mqueue", "type": "mqueue", "source": "mqueue",
               "options": ["nosuid", "noexec", "nodev"]}),
        json!({"destination": "/sys", "type": "sysfs", "source": "sysfs",
               "options": ["nosuid", "noexec", "nodev", "ro"]}),
        json!({"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev", "mode=1777"]}),
    ]
}

fn bind(from: &Path, to: &str) -> Value {
    json!({"destination": to, "type": "bind", "source": from, "options": ["rbind", "rw"]})
}
