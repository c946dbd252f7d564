//! What the node says about its GPUs and driver.
//!
//! Owns: the reading of `/proc/driver/nvidia`. Trusts the kernel's files, but parses them strictly: a GPU
//! whose file doesn't say everything is left out, and so can't be granted. The paths are fields, so that
//! another tree can stand in for the kernel's.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use gpuslice_proto::GpuUuid;

/// Where the driver's nodes and files are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Directory of `nvidiactl`, `nvidia0`, `nvidia-uvm`.
    pub dev: PathBuf,
    /// The driver's directory in procfs.
    pub proc_driver: PathBuf,
}

/// A GPU of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Its UUID.
    pub uuid: GpuUuid,
    /// Minor number of its device node.
    pub minor: u32,
    /// PCI address, as in `0000:1b:00.0`.
    pub bus: String,
    /// Model name.
    pub model: String,
}

/// Why the node's files say nothing.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// No file, no driver.
    #[error("can't read {}: is the NVIDIA driver loaded (modprobe nvidia)?", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// No version in the version file.
    #[error("no driver version in {}: {found:?}", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// Its first line, shortened.
        found: String,
    },
    /// A GPU's file lacks a field or holds something odd in it.
    #[error("{}: {field} is {found:?}: a GPU that nobody opened yet has no UUID; run nvidia-smi once, or nvidia-persistenced", path.display())]
    Gpu {
        /// The file.
        path: PathBuf,
        /// Which field.
        field: &'static str,
        /// What it says.
        found: String,
    },
}

impl Node {
    /// The kernel's own.
    pub fn kernel() -> Node {
        Node { dev: "/dev".into(), proc_driver: "/proc/driver/nvidia".into() }
    }

    /// The control device's path.
    pub fn control(&self) -> PathBuf {
        self.dev.join("nvidiactl")
    }

    /// The path of a GPU's device.
    pub fn gpu(&self, minor: u32) -> PathBuf {
        self.dev.join(format!("nvidia{minor}"))
    }

    /// The managed-memory device's path.
    pub fn uvm(&self) -> PathBuf {
        self.dev.join("nvidia-uvm")
    }

    /// The loaded driver's version, as in `580.159.04`.
    ///
    /// # Errors
    /// [`NodeError::Read`] where no driver is loaded, [`NodeError::Version`] for a file that says none.
    pub fn driver_version(&self) -> Result<String, NodeError> {
        let path = self.proc_driver.join("version");
        let text = read(&path)?;
        version_in(&text).map(str::to_owned).ok_or_else(|| {
            let found = text.lines().next().unwrap_or_default().chars().take(120).collect();
            NodeError::Version { path, found }
        })
    }

    /// All GPUs, by minor number, each usable or not.
    ///
    /// # Errors
    /// [`NodeError::Read`] where no driver is loaded.
    pub fn scan(&self) -> Result<Vec<Result<Gpu, NodeError>>, NodeError> {
        let directory = self.proc_driver.join("gpus");
        let failed = |source| NodeError::Read { path: directory.clone(), source };
        let mut found = Vec::new();
        for entry in fs::read_dir(&directory).map_err(failed)? {
            let path = entry.map_err(failed)?.path().join("information");
            found.push(read(&path).and_then(|text| gpu_in(&path, &text)));
        }
        found.sort_by_key(|gpu| gpu.as_ref().map_or(u32::MAX, |gpu| gpu.minor));
        Ok(found)
    }

    /// The usable GPUs, by minor number.
    ///
    /// # Errors
    /// As [`Node::scan`].
    pub fn gpus(&self) -> Result<Vec<Gpu>, NodeError> {
        Ok(self.scan()?.into_iter().flatten().collect())
    }
}

fn read(path: &Path) -> Result<String, NodeError> {
    fs::read_to_string(path).map_err(|source| NodeError::Read { path: path.to_owned(), source })
}

/// The first word of the NVRM line that is two or three numbers joined by points, the first of three digits
/// or more. The words around it differ between the open and the closed module.
fn version_in(text: &str) -> Option<&str> {
    let line = text.lines().find_map(|line| line.strip_prefix("NVRM version:"))?;
    line.split_whitespace().find(|word| {
        let parts: Vec<&str> = word.split('.').collect();
        (2..=3).contains(&parts.len())
            && parts
                .iter()
                .all(|part| !part.is_empty() && part.len() <= 5 && part.bytes().all(|b| b.is_ascii_digit()))
            && parts.first().is_some_and(|major| major.len() >= 3)
    })
}

fn gpu_in(path: &Path, text: &str) -> Result<Gpu, NodeError> {
    let value = |field: &'static str| {
        text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':')).map_or("", str::trim)
    };
    let odd =
        |field: &'static str| NodeError::Gpu { path: path.to_owned(), field, found: value(field).to_owned() };
    let uuid = GpuUuid::try_from(value("GPU UUID").to_owned()).map_err(|_| odd("GPU UUID"))?;
    let minor =
        value("Device Minor").parse().ok().filter(|minor| *minor < 255).ok_or_else(|| odd("Device Minor"))?;
    let bus = value("Bus Location");
    if bus.is_empty()
        || bus.len() > 32
        || !bus.bytes().all(|b| b.is_ascii_hexdigit() || matches!(b, b':' | b'.'))
    {
        return Err(odd("Bus Location"));
    }
    let model = value("Model").chars().filter(|c| !c.is_control()).take(64).collect();
    Ok(Gpu { uuid, minor, bus: bus.to_owned(), model })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const INFORMATION: &str = "Model: \t\t NVIDIA H200\nIRQ:   \t\t 142\nGPU UUID: \t GPU-01234567-89ab-cdef-0123-456789abcdef\n\
        Video BIOS: \t 96.00.d2.00.01\nBus Type: \t PCIe\nDMA Size: \t 52 bits\nBus Location: \t 0000:1b:00.0\n\
        Device Minor: \t 3\nGPU Firmware: \t 580.159.04\nGPU Excluded:\t No\n";

    fn node(directory: &Path) -> Node {
        Node { dev: directory.join("dev"), proc_driver: directory.to_owned() }
    }

    #[test]
    fn versions_of_both_modules_are_read() {
        for (text, version) in [
            (
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (root@host)\n\
                 GCC version:  gcc version 12.2.0 (Debian)\n",
                Some("580.159.04"),
            ),
            ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.142  Sun May  3 2026\n", Some("580.142")),
            ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  12.2.0\n", None),
            ("GCC version:  gcc version 580.12\n", None),
            ("", None),
        ] {
            assert_eq!(version_in(text), version, "{text}");
        }
    }

    #[test]
    fn gpus_come_by_minor_and_an_unusable_one_is_left_out() {
        let directory = tempfile::tempdir().unwrap();
        for (bus, text) in [
            ("0000:1b:00.0", INFORMATION.to_owned()),
            ("0000:0a:00.0", INFORMATION.replace("Minor: \t 3", "Minor: \t 0").replace("GPU-0", "GPU-1")),
            ("0000:ff:00.0", INFORMATION.replace("GPU-01234567", "GPU-????????")),
        ] {
            let gpu = directory.path().join("gpus").join(bus);
            fs::create_dir_all(&gpu).unwrap();
            fs::write(gpu.join("information"), text).unwrap();
        }
        let node = node(directory.path());
        let gpus = node.gpus().unwrap();
        assert_eq!(gpus.iter().map(|gpu| gpu.minor).collect::<Vec<_>>(), [0, 3]);
        let last = gpus.last().unwrap();
        assert_eq!((last.bus.as_str(), last.model.as_str()), ("0000:1b:00.0", "NVIDIA H200"));
        let unusable: Vec<_> = node.scan().unwrap().into_iter().filter_map(Result::err).collect();
        assert_eq!(unusable.len(), 1);
        assert!(unusable.iter().all(|error| error.to_string().contains("GPU-????????")));
    }

    #[test]
    fn no_driver_is_an_error_that_says_so() {
        let node = node(Path::new("/nonexistent"));
        assert!(node.driver_version().unwrap_err().to_string().contains("is the NVIDIA driver loaded"));
        assert!(node.gpus().is_err());
    }

    #[test]
    fn a_strange_field_is_named() {
        for (from, to, field) in [
            ("Device Minor: \t 3", "Device Minor: \t x", "Device Minor"),
            ("Device Minor: \t 3", "Device Minor: \t 255", "Device Minor"),
            ("0000:1b:00.0", "../../x", "Bus Location"),
            ("GPU UUID", "UUID", "GPU UUID"),
        ] {
            let error = gpu_in(Path::new("i"), &INFORMATION.replace(from, to)).unwrap_err().to_string();
            assert!(error.contains(field), "{error}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "(?s).{0,300}") {
            let parsed = gpu_in(Path::new("i"), &text);
            prop_assert!(parsed.is_err() || text.contains("GPU-"));
            prop_assert!(version_in(&text).is_none() || text.contains("NVRM version:"));
        }
    }
}
