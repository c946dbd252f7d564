use std::os::unix::fs::symlink;

use proptest::prelude::*;
use serde_json::json;

use super::*;

/// What `ctr run` writes for a container of default settings, as far as it is judged.
fn default_spec() -> Value {
    let caps = [
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
    json!({
        "process": { "capabilities": { "bounding": caps, "effective": caps, "permitted": caps }, "noNewPrivileges": true },
        "linux": {
            "namespaces": [{ "type": "pid" }, { "type": "ipc" }, { "type": "uts" }, { "type": "mount" }, { "type": "network" }],
            "resources": { "devices": [
                { "allow": false, "access": "rwm" },
                { "allow": true, "type": "c", "major": 1, "minor": 3, "access": "rwm" },
                { "allow": true, "type": "c", "major": 136, "access": "rwm" },
                { "allow": true, "type": "c", "major": 5, "minor": 2, "access": "rwm" },
                { "allow": true, "type": "c", "access": "m" },
                { "allow": true, "type": "b", "major": -1, "minor": -1, "access": "m" },
            ] },
        },
    })
}

fn judge(root: &Value) -> Result<(), Refusal> {
    judge_container(root, Path::new("runc"), &Host::default(), Fence::Absent)
}

fn refusal(root: &Value) -> String {
    judge(root).unwrap_err().to_string()
}

fn add(root: &mut Value, pointer: &str, item: Value) {
    spec::list_mut(root, pointer).unwrap().push(item);
}

#[test]
fn a_container_of_default_settings_passes() {
    judge(&default_spec()).unwrap();
}

#[test]
fn a_device_rule_for_everything_is_refused_as_privileged() {
    for rule in [
        json!({ "allow": true, "access": "rwm" }),
        json!({ "allow": true, "type": "a", "access": "r" }),
        // The kernel reads no further than "a".
        json!({ "allow": true, "type": "a", "access": "m" }),
        json!({ "allow": true, "access": "" }),
    ] {
        let mut root = default_spec();
        add(&mut root, "/linux/resources/devices", rule);
        assert!(refusal(&root).contains("--privileged"));
    }
}

#[test]
fn a_rule_wider_than_the_listed_devices_is_refused() {
    for rule in [
        json!({ "allow": true, "type": "c", "major": 195, "access": "rw" }),
        json!({ "allow": true, "type": "c", "major": 195, "minor": 1, "access": "r" }),
        json!({ "allow": true, "type": "c", "major": -1, "minor": 3, "access": "w" }),
        json!({ "allow": true, "type": "b", "access": "rwm" }),
        json!({ "allow": true, "type": "c", "major": 1, "minor": 3 + 5000 }),
    ] {
        let mut root = default_spec();
        root["linux"]["devices"] = json!([{ "path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0 }]);
        add(
            &mut root,
            "/linux/resources/devices",
            json!({ "allow": true, "type": "c", "major": 195, "minor": 0, "access": "rwm" }),
        );
        judge(&root).unwrap();
        add(&mut root, "/linux/resources/devices", rule.clone());
        assert!(refusal(&root).contains("wider"), "{rule}");
    }
}

#[test]
fn fuse_and_memory_devices_are_refused() {
    let mut root = default_spec();
    root["linux"]["devices"] = json!([{ "path": "/dev/fuse", "type": "c", "major": 10, "minor": 229 }]);
    assert_eq!(judge(&root), Err(Refusal::Fuse));
    judge_container(&root, Path::new("runc"), &Host::default(), Fence::Present).unwrap();
    let mut root = default_spec();
    add(
        &mut root,
        "/linux/resources/devices",
        json!({ "allow": true, "type": "c", "major": 10, "minor": 229, "access": "rwm" }),
    );
    assert_eq!(judge(&root), Err(Refusal::Fuse));
    let mut root = default_spec();
    root["linux"]["devices"] = json!([{ "path": "/dev/mem", "type": "c", "major": 1, "minor": 1 }]);
    assert!(matches!(judge(&root), Err(Refusal::MemoryDevice { .. })));
}

#[test]
fn each_capability_is_refused_in_each_set_at_create_and_at_exec() {
    for name in [
        "CAP_SYS_ADMIN",
        "CAP_SYS_MODULE",
        "CAP_SYS_RAWIO",
        "CAP_BPF",
        "CAP_PERFMON",
        "CAP_SYS_PTRACE",
        "sys_admin",
        "21",
        "0x15",
    ] {
        for set in CAPABILITY_SETS {
            let mut root = default_spec();
            root["process"]["capabilities"][set] = json!(["CAP_CHOWN", name]);
            let plain = name.to_ascii_uppercase().replace("CAP_", "");
            assert!(refusal(&root).contains(&format!("CAP_{plain} in the {set} set")));
            assert!(judge_process(&root["process"], Fence::Absent).is_err());
        }
    }
    let process = json!({ "capabilities": { "bounding": ["CAP_SYS_PTRACE"] } });
    judge_process(&process, Fence::Present).unwrap();
}

#[test]
fn a_missing_namespace_is_the_hosts() {
    for kind in ["pid", "ipc", "network", "mount"] {
        let mut root = default_spec();
        spec::list_mut(&mut root, "/linux/namespaces").unwrap().retain(|entry| entry["type"] != kind);
        assert!(matches!(judge(&root), Err(Refusal::HostNamespace { kind: found }) if found == kind));
    }
    let mut root = default_spec();
    spec::list_mut(&mut root, "/linux/namespaces").unwrap().retain(|entry| entry["type"] != "network");
    judge_container(&root, Path::new("runc"), &Host::default(), Fence::Present).unwrap();
}

#[test]
fn a_joined_namespace_is_compared_with_the_hosts_by_inode() {
    let folder = tempfile::tempdir().unwrap();
    for file in ["host", "pod"] {
        fs::write(folder.path().join(file), "").unwrap();
    }
    for owner in ["1", "self"] {
        fs::create_dir_all(folder.path().join(owner).join("ns")).unwrap();
        for kind in ["pid", "ipc", "net"] {
            symlink(folder.path().join("host"), folder.path().join(owner).join("ns").join(kind)).unwrap();
        }
    }
    let host = Host { proc: folder.path().to_owned() };
    let joined = |file: &str| {
        let mut root = default_spec();
        root["linux"]["namespaces"][1]["path"] = json!(folder.path().join(file));
        judge_container(&root, Path::new("runc"), &host, Fence::Absent)
    };
    joined("pod").unwrap();
    assert_eq!(joined("host"), Err(Refusal::HostNamespace { kind: "ipc" }));
    assert!(matches!(joined("gone"), Err(Refusal::Namespace { .. })));
    // Named twice, each of the two counts.
    let mut root = default_spec();
    add(&mut root, "/linux/namespaces", json!({ "type": "ipc" }));
    root["linux"]["namespaces"][1]["path"] = json!(folder.path().join("host"));
    let judged = judge_container(&root, Path::new("runc"), &host, Fence::Absent);
    assert_eq!(judged, Err(Refusal::HostNamespace { kind: "ipc" }));
}

#[test]
fn a_profile_with_notifications_is_refused() {
    for profile in [
        json!({ "defaultAction": "SCMP_ACT_NOTIFY" }),
        json!({ "defaultAction": "SCMP_ACT_ERRNO", "syscalls": [{ "names": ["mknod"], "action": "SCMP_ACT_NOTIFY" }] }),
        json!({ "defaultAction": "SCMP_ACT_ALLOW", "listenerPath": "/x" }),
    ] {
        let mut root = default_spec();
        root["linux"]["seccomp"] = profile;
        assert!(matches!(judge(&root), Err(Refusal::Notify { .. })));
    }
    let mut root = default_spec();
    root["linux"]["seccomp"] = json!({ "defaultAction": "SCMP_ACT_ERRNO", "listenerPath": "" });
    judge(&root).unwrap();
}

#[test]
fn hooks_that_add_a_gpu_are_refused_and_those_of_cdi_pass() {
    for (path, arguments) in [
        ("/usr/bin/nvidia-container-runtime-hook", vec!["nvidia-container-runtime-hook", "prestart"]),
        ("/usr/bin/nvidia-container-toolkit", vec!["nvidia-container-toolkit", "prestart"]),
        (
            "/usr/bin/containerd",
            vec!["containerd", "oci-hook", "--", "/usr/bin/nvidia-container-cli", "configure"],
        ),
        ("/usr/bin/nvidia-ctk", vec!["nvidia-ctk", "runtime"]),
        ("/usr/bin/nvidia-container-runtime.cdi", vec![]),
    ] {
        for kind in ["prestart", "createRuntime", "poststop"] {
            let mut root = default_spec();
            root["hooks"] = json!({ kind: [{ "path": path, "args": arguments }] });
            let text = refusal(&root);
            assert!(
                text.contains(path) && text.contains("nvidia.com/gpu=0") && text.contains("nerdctl"),
                "{text}"
            );
        }
    }
    for (path, arguments) in [
        ("/usr/bin/nvidia-cdi-hook", vec!["nvidia-cdi-hook", "update-ldcache", "--folder", "/usr/lib"]),
        ("/usr/bin/nvidia-ctk", vec!["nvidia-ctk", "hook", "create-symlinks"]),
        ("/usr/bin/true", vec![]),
    ] {
        let mut root = default_spec();
        root["hooks"] = json!({ "createContainer": [{ "path": path, "args": arguments }] });
        judge(&root).unwrap();
    }
}

#[test]
fn nvidias_runtime_underneath_is_refused() {
    for runtime in ["/usr/bin/nvidia-container-runtime", "nvidia-container-runtime.legacy"] {
        let error = judge_container(&default_spec(), Path::new(runtime), &Host::default(), Fence::Absent);
        assert!(error.unwrap_err().to_string().contains(runtime));
    }
}

#[test]
fn a_field_of_the_wrong_type_is_refused_by_name() {
    for (pointer, value) in [
        ("/linux/devices", json!({})),
        ("/linux/namespaces", json!("pid")),
        ("/linux/resources/devices", json!([{ "allow": true, "type": "cc" }])),
        ("/linux/resources/devices", json!([{ "allow": true, "type": "c", "major": "195" }])),
        ("/linux/resources/devices", json!([{ "allow": true, "type": "c", "major": -2 }])),
    ] {
        let mut root = default_spec();
        let (parent, field) = pointer.rsplit_once('/').unwrap();
        root.pointer_mut(parent).unwrap()[field] = value;
        assert!(matches!(judge(&root), Err(Refusal::Malformed(_))), "{pointer}");
    }
}

#[test]
fn a_name_that_go_takes_for_another_is_refused() {
    let forms =
        [("linux", "Linux"), ("linux", "LINUX"), ("process", "proce\u{17f}s"), ("hooks", "hoo\u{212a}s")];
    for (known, found) in forms {
        let mut root = default_spec();
        root[found] = json!({});
        assert!(matches!(judge(&root), Err(Refusal::Name { known: named, .. }) if named == known), "{found}");
    }
    for pointer in ["/linux", "/linux/resources/devices/0", "/linux/namespaces/0"] {
        let mut root = default_spec();
        root.pointer_mut(pointer).unwrap()["\u{17f}eccomp"] = json!(null);
        assert!(matches!(judge(&root), Err(Refusal::Name { .. })), "{pointer}");
    }
    let process = json!({ "Capabilities": { "bounding": ["CAP_SYS_ADMIN"] } });
    assert!(matches!(judge_process(&process, Fence::Absent), Err(Refusal::Name { .. })));
    let mut root = default_spec();
    root["annotations"] = json!({ "Linux": "1", "TYPE": "2" });
    root["future"] = json!({ "New": 1 });
    judge(&root).unwrap();
}

#[test]
fn a_mount_of_the_sockets_is_refused_by_whatever_path() {
    let folder = tempfile::tempdir().unwrap();
    let run_dir = folder.path().join("gpuslice");
    fs::create_dir_all(run_dir.join("c")).unwrap();
    symlink(&run_dir, folder.path().join("other")).unwrap();
    let judged = |source: &Path| {
        let root = json!({ "mounts": [{ "type": "proc", "source": "proc" }, { "source": source }] });
        judge_mounts(&root, &run_dir)
    };
    for source in ["gpuslice", "gpuslice/c", "gpuslice/scheduler.sock", "other/c", "gpuslice/./c/.."] {
        assert!(matches!(judged(&folder.path().join(source)), Err(Refusal::Sockets { .. })), "{source}");
    }
    fs::create_dir(folder.path().join("gpuslice2")).unwrap();
    judged(&folder.path().join("gpuslice2")).unwrap();
}

#[test]
fn cgroups_that_can_be_written_are_the_containers_own_or_none() {
    let mount = |kind: &str, source: &str, options: &[&str], namespace: bool| {
        let namespaces = if namespace { json!([{ "type": "cgroup" }]) } else { json!([]) };
        let mounts = json!([{ "type": kind, "source": source, "destination": "/c", "options": options }]);
        judge_mounts(
            &json!({ "linux": { "namespaces": namespaces }, "mounts": mounts }),
            Path::new("/run/gpuslice"),
        )
    };
    let refused = Err(Refusal::Cgroups { at: "/c".to_owned() });
    for kind in ["cgroup", "cgroup2"] {
        assert_eq!(mount(kind, "cgroup", &["nosuid"], false), refused);
        assert_eq!(mount(kind, "cgroup", &["ro", "rw"], false), refused);
        mount(kind, "cgroup", &["nosuid", "ro"], false).unwrap();
        mount(kind, "cgroup", &["rw"], true).unwrap();
    }
    for source in ["/sys", "/sys/fs/cgroup", "/sys/fs/../fs/cgroup", "/sys/fs/cgroup/pids/pod"] {
        assert_eq!(mount("bind", source, &["rbind"], true), refused, "{source}");
        mount("bind", source, &["rbind", "ro"], false).unwrap();
    }
    mount("sysfs", "sysfs", &["nosuid"], false).unwrap();
    mount("bind", "/sys/class", &["rbind"], false).unwrap();
}

proptest! {
    #[test]
    fn only_exact_rules_of_listed_devices_pass(
        kind in prop::sample::select(vec!["a", "b", "c", ""]),
        major in -1_i64..300, minor in -1_i64..300, access in "[rwm]{1,3}",
    ) {
        let mut root = default_spec();
        root["linux"]["devices"] = json!([{ "path": "/dev/x", "type": "c", "major": 240, "minor": 7 }]);
        add(&mut root, "/linux/resources/devices", json!({ "allow": true, "type": kind, "major": major, "minor": minor, "access": access }));
        if judge(&root).is_ok() && access.contains(['r', 'w']) {
            let default = DEFAULT_DEVICES.iter().any(|(a, b)| {
                major == i64::from(*a) && b.is_none_or(|b| i64::from(b) == minor)
            });
            prop_assert!(kind == "c" && (default || (major, minor) == (240, 7)));
        }
    }
}
