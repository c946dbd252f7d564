//! `gpuslice.json` in the bundle: the resolved slice for people, and what `delete` needs when the shim is gone.
//!
//! Owns: that file; the cleaning up by it. Trusts: the bundle, which only root writes; the paths in it are checked
//! all the same before anything is killed or removed. Promises: works when shim, scheduler and containerd are
//! gone; kills by the sandbox's own cgroup leaf, never by a bare pid. Failure: each step is tried.

use std::fs;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use gpuslice_proto::{GpuSlice, Lease, Register};
use serde::{Deserialize, Serialize};

use super::leaf::Leaf;

const FILE: &str = "gpuslice.json";
/// Beginning of a sandbox leaf's name.
pub(crate) const LEAF_PREFIX: &str = "gpuslice-";
const CGROUPS: &str = "/sys/fs/cgroup";
/// Time that a killed sandbox gets to leave its cgroup.
const DEATH: Duration = Duration::from_secs(5);

/// What is recorded of a GPU container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) container: String,
    pub(crate) driver: String,
    pub(crate) gpus: Vec<Gpu>,
    /// What was lowered or taken out, for a person.
    pub(crate) notes: Vec<String>,
    pub(crate) lease: u64,
    pub(crate) uid: u32,
    /// 0 before there is one.
    pub(crate) sandbox_pid: u32,
    /// Directory of the listener's socket.
    pub(crate) sockets: PathBuf,
    /// Directories of the sandbox's cgroup leaf.
    pub(crate) cgroups: Vec<PathBuf>,
}

/// One GPU's slice.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Gpu {
    pub(crate) uuid: String,
    pub(crate) minor: u32,
    pub(crate) memory_hard: u64,
    pub(crate) memory_soft: u64,
    pub(crate) weight: u32,
}

impl Record {
    /// A record of what was registered and granted; its places come later.
    pub(crate) fn of(register: &Register, lease: &Lease, notes: Vec<String>) -> Record {
        let gpu = |slice: &GpuSlice| Gpu {
            uuid: slice.uuid.to_string(),
            minor: slice.minor,
            memory_hard: slice.memory_hard,
            memory_soft: slice.memory_soft,
            weight: slice.weight,
        };
        Record {
            container: register.container.to_string(),
            driver: register.driver.clone(),
            gpus: register.gpus.iter().map(gpu).collect(),
            notes,
            lease: lease.lease.0,
            uid: lease.uid,
            sandbox_pid: lease.sandbox_pid,
            sockets: PathBuf::new(),
            cgroups: Vec::new(),
        }
    }

    /// Writes it to the bundle, as a whole.
    ///
    /// # Errors
    /// Those of the file system.
    pub(crate) fn write(&self, bundle: &Path) -> io::Result<()> {
        let fresh = bundle.join(format!(".{FILE}.new"));
        let mut options = fs::OpenOptions::new();
        let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&fresh)?;
        io::Write::write_all(&mut file, &serde_json::to_vec_pretty(self)?)?;
        fs::rename(&fresh, bundle.join(FILE))
    }

    fn read(bundle: &Path) -> io::Result<Record> {
        Ok(serde_json::from_slice(&fs::read(bundle.join(FILE))?)?)
    }

    /// The places in the record have the form that this program gives them.
    fn plausible(&self, cgroups: &Path) -> bool {
        let named = |path: &Path, prefix: &str| {
            path.file_name()
                .and_then(|name| name.to_str())
                .and_then(|name| name.strip_prefix(prefix))
                .is_some_and(|rest| rest.len() == 16 && rest.bytes().all(|byte| byte.is_ascii_hexdigit()))
        };
        let plain = |path: &Path| path.components().all(|part| part != std::path::Component::ParentDir);
        let leaf = |path: &PathBuf| path.starts_with(cgroups) && plain(path) && named(path, LEAF_PREFIX);
        let sockets = plain(&self.sockets)
            && named(&self.sockets, "")
            && self.sockets.parent().and_then(Path::file_name).is_some_and(|name| name == "c");
        self.cgroups.iter().all(leaf) && sockets
    }
}

/// Removes a container's socket directory.
pub(crate) fn remove_sockets(sockets: &Path) {
    // Only what this program makes there; a directory that holds more stays.
    drop(fs::remove_file(sockets.join(super::SOCKET)));
    drop(fs::remove_dir(sockets));
}

/// Forgets a container that was taken down in good order.
pub(crate) fn forget(bundle: &Path) {
    drop(fs::remove_file(bundle.join(FILE)));
}

/// Kills the sandbox that a dead shim left and removes its leaf and sockets. Returns what could not be done.
pub(crate) fn clean_up(bundle: &Path) -> Option<String> {
    clean_up_below(bundle, Path::new(CGROUPS))
}

fn clean_up_below(bundle: &Path, cgroups: &Path) -> Option<String> {
    let record = match Record::read(bundle) {
        Ok(record) => record,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        Err(error) => return Some(format!("{FILE}: {error}")),
    };
    if !record.plausible(cgroups) {
        return Some(format!("{FILE} names places that are not gpuslice's: nothing of them is touched"));
    }
    let leaf = Leaf::from_directories(record.cgroups);
    leaf.kill();
    let gone = leaf.remove(Instant::now() + DEATH);
    remove_sockets(&record.sockets);
    if !gone {
        return Some(format!("the sandbox (pid {}) does not end: driver call stuck", record.sandbox_pid));
    }
    forget(bundle);
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(sockets: &Path, cgroup: PathBuf) -> Record {
        Record {
            container: "default/c1".into(),
            driver: "580.159.04".into(),
            gpus: Vec::new(),
            notes: vec!["x".into()],
            lease: 7,
            uid: 1_900_000_000,
            sandbox_pid: 1,
            sockets: sockets.to_owned(),
            cgroups: vec![cgroup],
        }
    }

    #[test]
    fn a_bundle_without_a_record_has_nothing_to_clean_up() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(clean_up(folder.path()), None);
    }

    #[test]
    fn leaf_and_sockets_of_a_crashed_shim_are_removed_once() {
        let folder = tempfile::tempdir().unwrap();
        let sockets = folder.path().join("c/0123456789abcdef");
        let cgroup = folder.path().join("cgroup/pod/gpuslice-0123456789abcdef");
        for path in [&sockets, &cgroup] {
            fs::create_dir_all(path).unwrap();
        }
        fs::write(sockets.join(super::super::SOCKET), "").unwrap();
        let written = record(&sockets, cgroup.clone());
        written.write(folder.path()).unwrap();
        assert_eq!(Record::read(folder.path()).unwrap(), written);
        for _ in 0..2 {
            assert_eq!(clean_up_below(folder.path(), &folder.path().join("cgroup")), None);
            assert!(!sockets.exists() && !cgroup.exists());
        }
    }

    #[test]
    fn a_record_that_names_other_places_touches_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let good = folder.path().join("cgroup/pod/gpuslice-0123456789abcdef");
        let sockets = folder.path().join("c/0123456789abcdef");
        for (sockets, cgroup) in [
            (sockets.clone(), folder.path().join("cgroup/pod/c1")),
            (sockets.clone(), folder.path().join("cgroup/../x/gpuslice-0123456789abcdef")),
            (sockets.clone(), PathBuf::from("/elsewhere/gpuslice-0123456789abcdef")),
            (folder.path().join("etc"), good.clone()),
            (folder.path().join("c/../../0123456789abcdef"), good.clone()),
        ] {
            fs::create_dir_all(&good).unwrap();
            record(&sockets, cgroup.clone()).write(folder.path()).unwrap();
            assert!(
                clean_up_below(folder.path(), &folder.path().join("cgroup")).is_some(),
                "{cgroup:?} {sockets:?}"
            );
            assert!(good.exists());
        }
    }
}
