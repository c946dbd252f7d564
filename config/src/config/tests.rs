use super::*;
use crate::parse;

const SHIPPED: &str = include_str!("../../files/config.toml");
const UUID: &str = "GPU-01234567-89ab-cdef-0123-456789abcdef";

fn uuid() -> GpuUuid {
    GpuUuid::try_from(UUID.to_owned()).unwrap()
}

#[test]
fn the_shipped_file_equals_the_defaults() {
    assert_eq!(parse(SHIPPED).unwrap(), Config::default());
}

#[test]
fn the_shipped_files_commented_keys_are_all_known() {
    // A line `#key = value` or `#[table]` is an example; with its mark taken away it must parse.
    let all: String = SHIPPED
        .lines()
        .map(|line| match line.strip_prefix('#') {
            Some(rest) if rest.starts_with(|c: char| c.is_ascii_lowercase() || c == '[') => {
                format!("{rest}\n")
            }
            _ => format!("{line}\n"),
        })
        .collect();
    let config = parse(&all).unwrap();
    assert!(
        config.sandbox.is_some()
            && config.scheduler.socket.is_some()
            && config.runtime.systemd_cgroup.is_some()
    );
    assert!(config.limits.memory_hard.is_some() && config.limits.memory_soft.is_some());
    assert!(
        config.limits.weight.is_some() && config.defaults.memory_soft.is_some() && !config.gpus.is_empty()
    );
}

#[test]
fn the_defaults_pass_their_own_check() {
    Config::default().check().unwrap();
}

#[test]
fn an_unknown_key_is_named_with_those_allowed() {
    for (text, key, allowed) in [
        ("run_dri = \"/x\"", "run_dri", "run_dir"),
        ("[scheduler]\nsokcet = \"/x\"", "sokcet", "audit_interval"),
        ("[limits]\nmemory-hard = \"4Gi\"", "memory-hard", "memory_hard"),
        (&format!("[gpus.{UUID}]\nmemory = 1"), "memory", "default_memory_hard"),
        ("[fense]", "fense", "fence"),
    ] {
        let error = parse(text).unwrap_err().to_string();
        assert!(error.contains(key) && error.contains(allowed), "{text}: {error}");
    }
}

#[test]
fn a_value_out_of_range_is_named_with_what_is_allowed() {
    for (text, expected) in [
        ("run_dir = \"run\"", "run_dir = run: an absolute path"),
        ("run_dir = \"/run/../etc\"", "an absolute path without .."),
        ("sandbox = \"x\"", "sandbox = x"),
        ("[runtime]\nbinary_name = \"\"", "runtime.binary_name"),
        ("[scheduler]\ndeadline = 0", "scheduler.deadline = 0: 1 to 60 allowed"),
        ("[scheduler]\naudit_interval = 61", "scheduler.audit_interval = 61"),
        ("[sandboxes]\nuid_first = 999", "sandboxes.uid_first = 999: 1000 to"),
        ("[sandboxes]\nuid_first = 4294967290\nuid_count = 5", "sandboxes.uid_count = 5: 1 to 4 allowed"),
        ("[sandboxes]\nuid_count = 0", "sandboxes.uid_count = 0"),
        ("[sandboxes]\nmemory = \"1Mi\"", "sandboxes.memory = 1Mi: at least 16Mi"),
        ("[limits]\nweight = 10001", "limits.weight = 10001: 1 to 10000 allowed"),
        ("[limits]\nmemory_hard = \"0\"", "zero"),
        ("[limits]\nmemory_hard = -1", "not a quantity"),
        ("[defaults]\nmemory_hard = \"1Gi\"\nmemory_soft = \"2Gi\"", "defaults.memory_soft = 2Gi: at most"),
        ("[defaults]\nweight = 0", "defaults.weight = 0"),
        ("fence = \"maybe\"", "`required`, `preferred`, `off`"),
        ("[gpus.GPU-1]", "bad GPU uuid"),
    ] {
        let error = parse(text).unwrap_err().to_string();
        assert!(error.contains(expected), "{text}: {error}");
    }
    let long = format!("run_dir = \"/{}\"", "x".repeat(100));
    assert!(parse(&long).unwrap_err().to_string().contains("at most 107 bytes"));
}

#[test]
fn a_gpus_own_bounds_win_and_the_rest_is_inherited() {
    let config = parse(&format!(
        "[limits]\nmemory_hard = \"8Gi\"\nweight = 500\n[gpus.{UUID}]\nlimits = {{ memory_hard = \"2Gi\" }}\n\
         default_memory_hard = \"1Gi\"\n"
    ))
    .unwrap();
    let bounds = config.bounds(&uuid());
    assert_eq!(bounds.limits.memory_hard, Bytes::new(2 << 30));
    assert_eq!(bounds.limits.weight, Some(500));
    assert_eq!(bounds.defaults.memory_hard.count(), 1 << 30);
    assert_eq!(bounds.defaults.weight, 100);
    let other = GpuUuid::try_from(UUID.replace("GPU-0", "GPU-1")).unwrap();
    assert_eq!(config.bounds(&other).limits.memory_hard, Bytes::new(8 << 30));
}
