use super::*;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

const INFORMATION: &str = "Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-01234567-89ab-cdef-0123-456789abcdef\n\
    Bus Location: \t 0000:1b:00.0\nDevice Minor: \t 0\n";

/// A node in a directory. Real device nodes stand behind links: /dev/null is a character device anywhere.
fn places(root: &Path) -> Places {
    let proc_driver = root.join("proc");
    fs::create_dir_all(proc_driver.join("gpus/0000:1b:00.0")).unwrap();
    fs::write(proc_driver.join("gpus/0000:1b:00.0/information"), INFORMATION).unwrap();
    let version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n";
    fs::write(proc_driver.join("version"), version).unwrap();
    fs::write(proc_driver.join("params"), "RmProfilingAdminOnly: 1\nRegistryDwords: \"\"\n").unwrap();
    fs::create_dir_all(root.join("dev")).unwrap();
    for name in ["nvidiactl", "nvidia0", "nvidia-uvm"] {
        std::os::unix::fs::symlink("/dev/null", root.join("dev").join(name)).unwrap();
    }
    fs::create_dir_all(root.join("cgroup")).unwrap();
    fs::write(root.join("cgroup/cgroup.controllers"), "").unwrap();
    fs::create_dir_all(root.join("bin")).unwrap();
    for name in ["containerd-shim-gpuslice-v1", "gpuslice-sandbox"] {
        fs::write(root.join("bin").join(name), "").unwrap();
        fs::set_permissions(root.join("bin").join(name), fs::Permissions::from_mode(0o755)).unwrap();
    }
    Places {
        node: Node { dev: root.join("dev"), proc_driver },
        etc: root.join("etc"),
        cgroup: root.join("cgroup"),
        modules: root.join("modules"),
        programs: vec![root.join("bin")],
        nvidia_smi: root.join("bin/nvidia-smi"),
    }
}

fn row<'a>(rows: &'a [Row], what: &str) -> &'a Row {
    rows.iter().find(|row| row.what == what).unwrap_or_else(|| panic!("no row {what} in {rows:?}"))
}

fn config(root: &Path) -> Result<Config, LoadError> {
    gpuslice_config::parse(&format!("run_dir = {root:?}\n[scheduler]\ndeadline = 1\n"))
}

#[test]
fn each_thing_that_is_there_is_ok_and_each_that_is_taken_away_is_named() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path();
    let places = places(path);
    let rows = examine(&config(path), &places);
    for what in [
        "configuration",
        "NVIDIA driver",
        "device nvidiactl",
        "device nvidia-uvm",
        "GPUs",
        "uids for sandboxes",
        "containerd-shim-gpuslice-v1",
        "gpuslice-sandbox",
        "cgroups",
        "fence setting",
        "scrubbing of freed GPU memory",
        "profiling for administrators only",
        "built-in tests of nvidia-uvm",
    ] {
        assert!(row(&rows, what).ok, "{:?}", row(&rows, what));
    }
    let scheduler = row(&rows, "gpuslice-scheduler");
    assert!(!scheduler.ok && scheduler.required && scheduler.found.contains("scheduler.sock"));
    assert!(!row(&rows, "ECC of GPU memory").ok);

    type Taken<'a> = (&'a str, Box<dyn Fn() + 'a>, &'a str);
    let write = |name: &str, text: &str| {
        fs::create_dir_all(path.join(name).parent().unwrap()).unwrap();
        fs::write(path.join(name), text).unwrap();
    };
    let cases: Vec<Taken> = vec![
        ("NVIDIA driver", Box::new(|| write("proc/version", "NVRM version: x  999.1.1\n")), "999.1.1"),
        (
            "device nvidia-uvm",
            Box::new(|| fs::remove_file(path.join("dev/nvidia-uvm")).unwrap()),
            "nvidia-uvm",
        ),
        ("GPUs", Box::new(|| fs::remove_file(path.join("dev/nvidia0")).unwrap()), "nvidia0"),
        ("uids for sandboxes", Box::new(|| write("etc/subuid", "eve:1900000000:1\n")), "eve"),
        (
            "gpuslice-sandbox",
            Box::new(|| fs::remove_file(path.join("bin/gpuslice-sandbox")).unwrap()),
            "not at",
        ),
        ("cgroups", Box::new(|| fs::remove_file(path.join("cgroup/cgroup.controllers")).unwrap()), "neither"),
        (
            "scrubbing of freed GPU memory",
            Box::new(|| write("proc/params", "RegistryDwords: \"RMDisableScrubOnFree=1;\"\n")),
            "RMDisableScrubOnFree",
        ),
        (
            "built-in tests of nvidia-uvm",
            Box::new(|| write("modules/nvidia_uvm/parameters/uvm_enable_builtin_tests", "1\n")),
            "on",
        ),
    ];
    for (what, take, text) in cases {
        take();
        let rows = examine(&config(path), &places);
        let row = row(&rows, what);
        assert!(!row.ok && row.found.contains(text), "{row:?}");
    }
}

#[test]
fn a_required_fence_and_a_broken_configuration_are_missing() {
    let root = tempfile::tempdir().unwrap();
    let places = places(root.path());
    let rows = examine(&gpuslice_config::parse("fence = \"required\""), &places);
    assert!(!row(&rows, "fence setting").ok && !well(&rows));
    let rows = examine(&gpuslice_config::parse("x = 1"), &places);
    assert!(row(&rows, "configuration").found.contains("unknown field"));
}

#[test]
fn ecc_is_asked_of_nvidia_smi() {
    let root = tempfile::tempdir().unwrap();
    let places = places(root.path());
    for (script, ok) in
        [("echo Enabled; echo Enabled", true), ("echo Enabled; echo Disabled", false), ("exit 9", false)]
    {
        fs::write(&places.nvidia_smi, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&places.nvidia_smi, fs::Permissions::from_mode(0o755)).unwrap();
        let rows = checks::cards(&places);
        assert_eq!(row(&rows, "ECC of GPU memory").ok, ok, "{script}: {rows:?}");
    }
}

#[test]
fn the_verdict_counts_required_rows_only() {
    let good = Row::new("a", true, "x", "y", "z");
    let lacking = Row::new("b", false, "x", "y", "z");
    assert!(well(&[good.clone(), lacking.clone().optional()]));
    assert!(!well(&[good.clone(), lacking.clone()]));
    let text = super::text(&[good.clone(), lacking.clone()]);
    assert!(text.contains("MISSING  b: x") && text.contains("1 thing is missing"), "{text}");
    let value: Value = serde_json::from_str(&json(&[good, lacking])).unwrap();
    assert_eq!((&value["ok"], &value["rows"][1]["required"]), (&Value::Bool(false), &Value::Bool(true)));
}
