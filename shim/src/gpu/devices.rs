//! The NVIDIA devices in a spec: which GPUs are granted, and which nodes are taken out.
//!
//! Owns: the reading of `linux.devices` and the removal of nodes that a tenant has no use for. Trusts:
//! `/proc/devices` for the dynamic majors; never an environment variable. Promises: after [`narrow`] the spec
//! names no NVIDIA node but `nvidiactl`, `nvidia-uvm` and GPUs, and no device rule for a node taken out.

use serde_json::Value;

use super::majors::{DRM_MAJOR, Majors, NVIDIA_MAJOR};
use super::spec::{self, Malformed, Numbers};

const CONTROL_MINOR: u32 = 255;
const MODESET_MINOR: u32 = 254;
/// The protocol carries at most this many GPUs of one container.
const MOST_GPUS: usize = 16;

/// What a spec grants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Granted {
    /// Minors of the GPUs, ascending, without duplicates; empty for a container without a GPU.
    pub(crate) minors: Vec<u32>,
    /// Nodes that are taken out, with the path they had.
    pub(crate) dropped: Vec<(String, Numbers)>,
}

/// Why the devices of a spec are refused.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum DeviceError {
    #[error("{path} is a {what} device: {remedy}")]
    Refused { path: String, what: &'static str, remedy: &'static str },
    #[error(
        "a GPU is granted without {missing}: CUDA can't work; grant all nodes of the card, as a CDI device nvidia.com/gpu=N does"
    )]
    Incomplete { missing: &'static str },
    #[error("{path} is granted without a GPU: grant a GPU too (`--device nvidia.com/gpu=0`), or neither")]
    NoGpu { path: String },
    #[error("{found} GPUs in one container, at most {MOST_GPUS} are allowed")]
    TooMany { found: usize },
    #[error("device {path} has no single major and minor number")]
    Wildcard { path: String },
    #[error(transparent)]
    Malformed(#[from] Malformed),
}

enum Class {
    Gpu(u32),
    Control,
    Uvm,
    Dropped,
    Direct,
    Refused(&'static str, &'static str),
    Other,
}

fn classify(numbers: Numbers, majors: &Majors) -> Class {
    let ('c', Some(major), Some(minor)) = (numbers.kind, numbers.major, numbers.minor) else {
        return Class::Other;
    };
    let is = |known: Option<u32>| known == Some(major);
    match (major, minor) {
        (NVIDIA_MAJOR, CONTROL_MINOR) => Class::Control,
        (NVIDIA_MAJOR, MODESET_MINOR) => Class::Dropped,
        (NVIDIA_MAJOR, minor) => Class::Gpu(minor),
        (DRM_MAJOR, _) => Class::Direct,
        (_, 0) if is(majors.uvm) => Class::Uvm,
        _ if is(majors.uvm) => Class::Dropped,
        _ if is(majors.caps) => {
            Class::Refused("MIG capability", "grant whole GPUs; a MIG device can't be sliced")
        }
        _ if is(majors.nvswitch) => Class::Refused("NVSwitch", "the fabric is the node's: drop it"),
        _ if is(majors.imex) => {
            Class::Refused("IMEX channel", "memory across nodes is not supported: drop it")
        }
        _ => Class::Other,
    }
}

/// Reads the devices that a spec grants.
///
/// # Errors
/// A node that can't be granted, or a GPU without the nodes it needs.
pub(crate) fn granted(root: &Value, majors: &Majors) -> Result<Granted, DeviceError> {
    let mut granted = Granted::default();
    let (mut control, mut uvm) = (None, None);
    for device in spec::list(root, "/linux/devices")? {
        let numbers = Numbers::of(device)?;
        let path = spec::text(device, "path")?.unwrap_or("?").to_owned();
        if matches!(numbers.kind, 'b' | 'c') && (numbers.major.is_none() || numbers.minor.is_none()) {
            return Err(DeviceError::Wildcard { path });
        }
        match classify(numbers, majors) {
            Class::Gpu(minor) => granted.minors.push(minor),
            Class::Control => control = Some(path),
            Class::Uvm => uvm = Some(path),
            Class::Dropped | Class::Direct => granted.dropped.push((path, numbers)),
            Class::Refused(what, remedy) => return Err(DeviceError::Refused { path, what, remedy }),
            Class::Other => {}
        }
    }
    granted.minors.sort_unstable();
    granted.minors.dedup();
    if granted.minors.len() > MOST_GPUS {
        return Err(DeviceError::TooMany { found: granted.minors.len() });
    }
    if granted.minors.is_empty() {
        let stray = control.or(uvm).or_else(|| granted.dropped.first().map(|(path, _)| path.clone()));
        return match stray {
            Some(path) => Err(DeviceError::NoGpu { path }),
            None => Ok(granted),
        };
    }
    match (control, uvm) {
        (None, _) => Err(DeviceError::Incomplete { missing: "/dev/nvidiactl" }),
        (_, None) => Err(DeviceError::Incomplete { missing: "/dev/nvidia-uvm" }),
        (Some(_), Some(_)) => Ok(granted),
    }
}

/// Takes the dropped nodes out of `linux.devices`, and the rules that name them out of the device cgroup's list.
pub(crate) fn narrow(root: &mut Value, granted: &Granted) {
    let dropped = |item: &Value| {
        Numbers::of(item).is_ok_and(|numbers| granted.dropped.iter().any(|(_, gone)| *gone == numbers))
    };
    if let Some(devices) = spec::list_mut(root, "/linux/devices") {
        devices.retain(|device| !dropped(device));
    }
    if let Some(rules) = spec::list_mut(root, "/linux/resources/devices") {
        rules.retain(|rule| rule.get("allow").and_then(Value::as_bool) != Some(true) || !dropped(rule));
    }
}

#[cfg(test)]
mod tests;
