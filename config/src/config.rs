//! The types of the configuration file.
//!
//! Owns: every key, its default and its range. Trusts nothing: [`Config::check`] runs before a
//! configuration is handed out. The file in `config/files/config.toml` shows the same defaults; a test
//! compares them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use gpuslice_proto::GpuUuid;
use serde::Deserialize;

use crate::{Bytes, UidRange};

/// Largest compute weight.
pub const MAX_WEIGHT: u32 = 10_000;
/// Longest path that a Unix socket takes (`sun_path` is 108 bytes with its end).
const MAX_SOCKET_PATH: usize = 107;

/// The node's configuration.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Directory of sockets and run-time state; made with mode 0700 where it is missing.
    pub run_dir: PathBuf,
    /// Path of `gpuslice-sandbox`; unset: beside the shim, then `/usr/local/bin`.
    pub sandbox: Option<PathBuf>,
    /// Whether the second wall (BPF LSM) must be there.
    pub fence: Fence,
    /// The OCI runtime underneath.
    pub runtime: Runtime,
    /// The node daemon and how it is reached.
    pub scheduler: Scheduler,
    /// Identity and size of the sandboxes.
    pub sandboxes: Sandboxes,
    /// Ceilings: no annotation gets more.
    pub limits: Limits,
    /// What a container gets that says nothing.
    pub defaults: Defaults,
    /// Ceilings and defaults for single GPUs, by UUID.
    pub gpus: BTreeMap<GpuUuid, GpuOverride>,
}

/// Whether starts need the BPF LSM fence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fence {
    /// No fence, no start. This release has no fence yet, so no GPU container starts.
    Required,
    /// Used where it is available; a warning where it is not.
    Preferred,
    /// Not used.
    Off,
}

/// The OCI runtime underneath. The shim's options from containerd, where given, win.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Runtime {
    /// Name or absolute path of runc or crun.
    pub binary_name: String,
    /// State directory given to it with `--root`; the namespace is appended.
    pub root: PathBuf,
    /// Use systemd cgroups; unset: judged by the form of the spec's cgroups path.
    pub systemd_cgroup: Option<bool>,
}

/// The node daemon.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Scheduler {
    /// Its socket; unset: `scheduler.sock` in `run_dir`.
    pub socket: Option<PathBuf>,
    /// Seconds that a step of the handshake may take, on either side: 1 to 60.
    pub deadline: u32,
    /// Seconds between two audits of the ledgers against the driver: 1 to 60.
    pub audit_interval: u32,
}

/// Identity and size of the sandboxes.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Sandboxes {
    /// First uid (and gid) for sandboxes: used by nobody else on the node.
    pub uid_first: u32,
    /// How many: also the most GPU containers at a time.
    pub uid_count: u32,
    /// Memory limit of a sandbox's own cgroup. Added to it is what the kernel charges there for the container: half a
    /// GiB of page tables for pinned memory, and the quota of one GPU for managed memory.
    pub memory: Bytes,
    /// Limit on its threads.
    pub pids: u32,
}

/// Ceilings for what annotations ask.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Highest quota; unset: the card.
    pub memory_hard: Option<Bytes>,
    /// Highest guaranteed memory; unset: the quota.
    pub memory_soft: Option<Bytes>,
    /// Highest compute weight, 1 to 10000; unset: 10000.
    pub weight: Option<u32>,
}

/// What a container gets that has a GPU and no annotation.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Defaults {
    /// Quota.
    pub memory_hard: Bytes,
    /// Guaranteed memory; unset: the quota. Clamped to a quota that is lower.
    pub memory_soft: Option<Bytes>,
    /// Compute weight, 1 to 10000.
    pub weight: u32,
}

/// Ceilings and defaults of one GPU; what is unset comes from `[limits]` and `[defaults]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GpuOverride {
    /// Ceilings.
    pub limits: Limits,
    /// Default quota.
    pub default_memory_hard: Option<Bytes>,
    /// Default guaranteed memory.
    pub default_memory_soft: Option<Bytes>,
    /// Default compute weight.
    pub default_weight: Option<u32>,
}

/// Ceilings and defaults that hold for one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Ceilings.
    pub limits: Limits,
    /// Defaults; not yet lowered to the ceilings.
    pub defaults: Defaults,
}

/// A value out of range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key} = {found}: {allowed}")]
pub struct InvalidConfig {
    /// The key, with its table.
    pub key: String,
    /// What the file says.
    pub found: String,
    /// What is allowed.
    pub allowed: String,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            run_dir: "/run/gpuslice".into(),
            sandbox: None,
            fence: Fence::Preferred,
            runtime: Runtime::default(),
            scheduler: Scheduler::default(),
            sandboxes: Sandboxes::default(),
            limits: Limits::default(),
            defaults: Defaults::default(),
            gpus: BTreeMap::new(),
        }
    }
}

impl Default for Runtime {
    fn default() -> Self {
        Runtime { binary_name: "runc".into(), root: "/run/containerd/runc".into(), systemd_cgroup: None }
    }
}

impl Default for Scheduler {
    fn default() -> Self {
        Scheduler { socket: None, deadline: 2, audit_interval: 3 }
    }
}

const MIB: u64 = 1 << 20;

/// A constant of this file; zero, which none of them is, would become one byte.
const fn quantity(count: u64) -> Bytes {
    match Bytes::new(count) {
        Some(bytes) => bytes,
        None => quantity(1),
    }
}

impl Default for Sandboxes {
    fn default() -> Self {
        Sandboxes { uid_first: 1_900_000_000, uid_count: 4096, memory: quantity(256 * MIB), pids: 64 }
    }
}

impl Default for Defaults {
    fn default() -> Self {
        Defaults { memory_hard: quantity(4096 * MIB), memory_soft: None, weight: 100 }
    }
}

impl Config {
    /// The scheduler's socket.
    pub fn scheduler_socket(&self) -> PathBuf {
        self.scheduler.socket.clone().unwrap_or_else(|| self.run_dir.join("scheduler.sock"))
    }

    /// How long a step of the handshake may take.
    pub fn deadline(&self) -> Duration {
        Duration::from_secs(self.scheduler.deadline.into())
    }

    /// Time between two audits.
    pub fn audit_interval(&self) -> Duration {
        Duration::from_secs(self.scheduler.audit_interval.into())
    }

    /// The uids for sandboxes.
    pub fn uids(&self) -> UidRange {
        UidRange { first: self.sandboxes.uid_first, count: self.sandboxes.uid_count }
    }

    /// Ceilings and defaults of a GPU.
    pub fn bounds(&self, gpu: &GpuUuid) -> Bounds {
        let mut bounds = Bounds { limits: self.limits.clone(), defaults: self.defaults.clone() };
        if let Some(special) = self.gpus.get(gpu) {
            let limits = &special.limits;
            bounds.limits.memory_hard = limits.memory_hard.or(bounds.limits.memory_hard);
            bounds.limits.memory_soft = limits.memory_soft.or(bounds.limits.memory_soft);
            bounds.limits.weight = limits.weight.or(bounds.limits.weight);
            bounds.defaults.memory_hard = special.default_memory_hard.unwrap_or(bounds.defaults.memory_hard);
            bounds.defaults.memory_soft = special.default_memory_soft.or(bounds.defaults.memory_soft);
            bounds.defaults.weight = special.default_weight.unwrap_or(bounds.defaults.weight);
        }
        bounds
    }

    /// Checks every value that a type alone can't.
    ///
    /// # Errors
    /// The first key out of range, what was found, what is allowed.
    pub fn check(&self) -> Result<(), InvalidConfig> {
        absolute("run_dir", &self.run_dir)?;
        absolute("runtime.root", &self.runtime.root)?;
        if let Some(sandbox) = &self.sandbox {
            absolute("sandbox", sandbox)?;
        }
        if self.runtime.binary_name.is_empty() {
            return Err(invalid("runtime.binary_name", "\"\"", "a name or an absolute path"));
        }
        let socket = self.scheduler_socket();
        absolute("scheduler.socket", &socket)?;
        if socket.as_os_str().len() > MAX_SOCKET_PATH {
            let allowed = format!("at most {MAX_SOCKET_PATH} bytes: choose a shorter run_dir or socket");
            return Err(invalid("scheduler.socket", socket.display(), allowed));
        }
        within("scheduler.deadline", self.scheduler.deadline, 1, 60)?;
        within("scheduler.audit_interval", self.scheduler.audit_interval, 1, 60)?;
        within("sandboxes.uid_first", self.sandboxes.uid_first, 1000, u32::MAX - 2)?;
        // The two highest numbers mean "no uid" to the kernel.
        within("sandboxes.uid_count", self.sandboxes.uid_count, 1, u32::MAX - 1 - self.sandboxes.uid_first)?;
        within("sandboxes.pids", self.sandboxes.pids, 24, 4096)?;
        if self.sandboxes.memory.count() < 16 * MIB {
            return Err(invalid("sandboxes.memory", self.sandboxes.memory, "at least 16Mi"));
        }
        check_limits("limits", &self.limits)?;
        check_defaults("defaults", &self.defaults)?;
        for (uuid, special) in &self.gpus {
            check_limits(&format!("gpus.{uuid}.limits"), &special.limits)?;
            check_defaults(&format!("gpus.{uuid}"), &self.bounds(uuid).defaults)?;
        }
        Ok(())
    }
}

fn invalid(key: &str, found: impl ToString, allowed: impl Into<String>) -> InvalidConfig {
    InvalidConfig { key: key.to_owned(), found: found.to_string(), allowed: allowed.into() }
}

fn absolute(key: &str, path: &Path) -> Result<(), InvalidConfig> {
    let plain = !path.components().any(|part| part == std::path::Component::ParentDir);
    if path.is_absolute() && plain {
        Ok(())
    } else {
        Err(invalid(key, path.display(), "an absolute path without .."))
    }
}

fn within(key: &str, found: u32, least: u32, most: u32) -> Result<(), InvalidConfig> {
    if (least..=most).contains(&found) {
        Ok(())
    } else {
        Err(invalid(key, found, format!("{least} to {most} allowed")))
    }
}

fn check_limits(table: &str, limits: &Limits) -> Result<(), InvalidConfig> {
    limits.weight.map_or(Ok(()), |weight| within(&format!("{table}.weight"), weight, 1, MAX_WEIGHT))
}

fn check_defaults(table: &str, defaults: &Defaults) -> Result<(), InvalidConfig> {
    within(&format!("{table}.weight"), defaults.weight, 1, MAX_WEIGHT)?;
    match defaults.memory_soft {
        Some(soft) if soft > defaults.memory_hard => Err(invalid(
            &format!("{table}.memory_soft"),
            soft,
            format!("at most the memory_hard that goes with it, {}", defaults.memory_hard),
        )),
        Some(_) | None => Ok(()),
    }
}

#[cfg(test)]
#[path = "config/tests.rs"]
mod tests;
