//! The sandbox's own cgroup: a leaf beside the container's, under the pod's.
//!
//! Owns: the leaf's directories from creation to removal. Trusts: the spec's `cgroupsPath`, which containerd
//! wrote; a path that climbs is refused all the same. Promises: never inside the container's own cgroup, where a
//! freeze would stop the sandbox that the container waits for; memory and process limits set before anybody is
//! in it, where the node has the controllers. Failure: directories made are removed again.

use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant};

use gpuslice_config::Sandboxes;
use gpuslice_proto::{GpuSlice, MOST_PINNED};
use gpuslice_sys::process;

/// Version 1 hierarchies that the sandbox gets a leaf in.
const V1_CONTROLLERS: [&str; 2] = ["memory", "pids"];
const SIGKILL: i32 = 9;

/// Why there is no leaf.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LeafError {
    #[error("cgroupsPath {path:?}: {reason}")]
    Path { path: String, reason: &'static str },
    #[error("cgroup {}: {step}", path.display())]
    Io { path: PathBuf, step: &'static str, source: io::Error },
    #[error("cgroup {} has processes already: a sandbox of an earlier container of this id still runs", path.display())]
    Busy { path: PathBuf },
}

/// What a sandbox may use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LeafLimits {
    pub(crate) memory: u64,
    pub(crate) pids: u32,
}

/// Page tables for everything that a sandbox may have mapped for pinning: 8 bytes a page, and the levels above.
const PAGE_TABLES: u64 = MOST_PINNED / 511;

impl LeafLimits {
    /// What the sandbox of a container with these GPUs may use: its own, and what the kernel charges to it on the
    /// container's behalf. That is page tables of pinned memory, and managed memory that a migration command
    /// brings to the host: the driver charges it to the command's caller. It is bounded by each GPU's quota.
    pub(crate) fn of(sandboxes: &Sandboxes, gpus: &[GpuSlice]) -> LeafLimits {
        let managed = gpus.iter().map(|gpu| gpu.memory_hard).min().unwrap_or(0);
        let memory = sandboxes.memory.count().saturating_add(PAGE_TABLES).saturating_add(managed);
        LeafLimits { memory, pids: sandboxes.pids }
    }
}

/// A leaf; one directory per hierarchy.
#[derive(Debug)]
pub(crate) struct Leaf {
    directories: Vec<PathBuf>,
}

/// The leaf's path below a hierarchy's root: beside the container's cgroup, whose path the spec names.
///
/// `/pod/container` is cgroupfs; `slice:prefix:name` is systemd, where the pod is the slice.
pub(crate) fn leaf_path(cgroups_path: &str, name: &str) -> Result<PathBuf, LeafError> {
    let refuse = |reason| LeafError::Path { path: cgroups_path.to_owned(), reason };
    let parent = match cgroups_path.split(':').collect::<Vec<_>>().as_slice() {
        [slice, _, _] => slice_path(if slice.is_empty() { "system.slice" } else { slice })
            .ok_or_else(|| refuse("the slice's name is not one of systemd"))?,
        _ => Path::new(cgroups_path).parent().map_or_else(PathBuf::new, Path::to_path_buf),
    };
    let mut path = PathBuf::new();
    for part in parent.components() {
        match part {
            Component::RootDir | Component::CurDir => {}
            Component::Normal(part) => path.push(part),
            Component::ParentDir | Component::Prefix(_) => {
                return Err(refuse("it climbs out of its hierarchy"));
            }
        }
    }
    Ok(path.join(name))
}

/// `a-b.slice` lies at `a.slice/a-b.slice`, as systemd has it.
fn slice_path(slice: &str) -> Option<PathBuf> {
    let stem = slice.strip_suffix(".slice")?;
    if stem == "-" {
        return Some(PathBuf::new());
    }
    if stem.contains('/') || stem.split('-').any(str::is_empty) {
        return None;
    }
    let mut path = PathBuf::new();
    let mut prefix = String::new();
    for part in stem.split('-') {
        if !prefix.is_empty() {
            prefix.push('-');
        }
        prefix.push_str(part);
        path.push(format!("{prefix}.slice"));
    }
    Some(path)
}

impl Leaf {
    /// Makes the leaf `name` beside the container's cgroup; `root` is where cgroups are mounted.
    ///
    /// # Errors
    /// [`LeafError`].
    pub(crate) fn create(
        root: &Path,
        cgroups_path: &str,
        name: &str,
        limits: LeafLimits,
    ) -> Result<Leaf, LeafError> {
        let below = leaf_path(cgroups_path, name)?;
        let mut leaf = Leaf { directories: Vec::new() };
        let made = if is_v2(root) {
            leaf.create_v2(root, &below, limits)
        } else {
            leaf.create_v1(root, &below, limits)
        };
        match made {
            Ok(()) => Ok(leaf),
            Err(error) => {
                leaf.remove(Instant::now());
                Err(error)
            }
        }
    }

    fn create_v2(&mut self, root: &Path, below: &Path, limits: LeafLimits) -> Result<(), LeafError> {
        let parent = root.join(below.parent().unwrap_or(Path::new("")));
        make_all(&parent)?;
        // A controller that the node lacks or that is on already can't be enabled: the limit's file tells.
        let mut level = root.to_owned();
        for part in
            std::iter::once(None).chain(below.parent().into_iter().flat_map(Path::components).map(Some))
        {
            if let Some(part) = part {
                level.push(part);
            }
            for controller in ["+memory", "+pids"] {
                tell(&level.join("cgroup.subtree_control"), controller).unwrap_or(());
            }
        }
        let path = root.join(below);
        self.make_leaf(&path)?;
        limit(&path, "memory.max", &limits.memory.to_string())?;
        limit(&path, "pids.max", &limits.pids.to_string())
    }

    fn create_v1(&mut self, root: &Path, below: &Path, limits: LeafLimits) -> Result<(), LeafError> {
        for controller in V1_CONTROLLERS {
            let mount = root.join(controller);
            if !mount.join("cgroup.procs").exists() {
                continue;
            }
            let path = mount.join(below);
            make_all(path.parent().unwrap_or(&mount))?;
            self.make_leaf(&path)?;
            match controller {
                "memory" => limit(&path, "memory.limit_in_bytes", &limits.memory.to_string())?,
                _ => limit(&path, "pids.max", &limits.pids.to_string())?,
            }
        }
        if self.directories.is_empty() {
            let step = "no memory or pids hierarchy is mounted";
            return Err(LeafError::Io { path: root.to_owned(), step, source: ErrorKind::NotFound.into() });
        }
        Ok(())
    }

    /// One directory of the leaf; an empty one left by a crash is used again.
    fn make_leaf(&mut self, path: &Path) -> Result<(), LeafError> {
        match fs::create_dir(path) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                if !members(path).is_empty() {
                    return Err(LeafError::Busy { path: path.to_owned() });
                }
            }
            Err(source) => return Err(LeafError::Io { path: path.to_owned(), step: "create", source }),
        }
        self.directories.push(path.to_owned());
        Ok(())
    }

    /// The files through which a process enters the leaf.
    ///
    /// # Errors
    /// [`LeafError::Io`].
    pub(crate) fn entrances(&self) -> Result<Vec<OwnedFd>, LeafError> {
        self.directories
            .iter()
            .map(|path| {
                let path = path.join("cgroup.procs");
                OpenOptions::new()
                    .write(true)
                    .open(&path)
                    .map(OwnedFd::from)
                    .map_err(|source| LeafError::Io { path, step: "open", source })
            })
            .collect()
    }

    /// Its directories, for [`Leaf::from_directories`].
    pub(crate) fn directories(&self) -> &[PathBuf] {
        &self.directories
    }

    /// A leaf that an earlier process made.
    pub(crate) fn from_directories(directories: Vec<PathBuf>) -> Leaf {
        Leaf { directories }
    }

    /// Kills whoever is in it.
    pub(crate) fn kill(&self) {
        for path in &self.directories {
            if tell(&path.join("cgroup.kill"), "1").is_ok() {
                continue;
            }
            for pid in members(path) {
                // Gone meanwhile: nothing left to kill.
                if let Ok(pidfd) = process::pidfd_open(pid, false)
                    && members(path).contains(&pid)
                {
                    drop(process::pidfd_kill(std::os::fd::AsFd::as_fd(&pidfd), SIGKILL));
                }
            }
        }
    }

    /// Removes its directories, which must be empty by `deadline`. True when nothing is left.
    pub(crate) fn remove(&self, deadline: Instant) -> bool {
        loop {
            let left = self.directories.iter().rev().filter(|path| match fs::remove_dir(path) {
                Ok(()) => false,
                Err(error) => error.kind() != ErrorKind::NotFound,
            });
            if left.count() == 0 {
                return true;
            }
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Whether `root` is the unified hierarchy.
pub(crate) fn is_v2(root: &Path) -> bool {
    root.join("cgroup.controllers").exists()
}

/// The processes in a cgroup, not in those below it.
pub(crate) fn members(path: &Path) -> Vec<u32> {
    let text = fs::read_to_string(path.join("cgroup.procs")).unwrap_or_default();
    text.lines().filter_map(|line| line.trim().parse().ok()).filter(|pid| *pid != 0).collect()
}

fn make_all(path: &Path) -> Result<(), LeafError> {
    fs::create_dir_all(path).map_err(|source| LeafError::Io { path: path.to_owned(), step: "create", source })
}

/// Writes to one of the kernel's files; never makes one.
fn tell(path: &Path, value: &str) -> io::Result<()> {
    io::Write::write_all(&mut OpenOptions::new().write(true).open(path)?, value.as_bytes())
}

/// Sets a limit; a node without the controller has no such file, and then no such limit.
fn limit(leaf: &Path, file: &str, value: &str) -> Result<(), LeafError> {
    let path = leaf.join(file);
    match tell(&path, value) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        told => told.map_err(|source| LeafError::Io { path, step: "set the limit", source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpuslice_proto::GpuUuid;
    use proptest::prelude::*;

    #[test]
    fn the_leaf_lies_beside_the_container() {
        for (path, leaf) in [
            ("/default/web", "default/x"),
            ("/kubepods/burstable/pod7/c1", "kubepods/burstable/pod7/x"),
            ("/web", "x"),
            ("web", "x"),
            ("", "x"),
            (
                "kubepods-burstable-pod7.slice:cri-containerd:c1",
                "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod7.slice/x",
            ),
            ("system.slice:docker:c1", "system.slice/x"),
            (":nerdctl:c1", "system.slice/x"),
            ("-.slice:p:c1", "x"),
        ] {
            assert_eq!(leaf_path(path, "x").unwrap(), Path::new(leaf), "{path}");
        }
    }

    #[test]
    fn a_path_that_climbs_and_a_strange_slice_are_refused() {
        for path in
            ["/../../x/c", "/a/../../c", "a--b.slice:p:n", "a/b.slice:p:n", "-a.slice:p:n", "user:p:n"]
        {
            assert!(matches!(leaf_path(path, "x"), Err(LeafError::Path { .. })), "{path}");
        }
    }

    #[test]
    fn the_limit_has_room_for_what_the_kernel_charges_on_the_containers_behalf() {
        let gpu = |memory_hard| GpuSlice {
            uuid: GpuUuid::try_from("GPU-00000000-0000-0000-0000-000000000001".to_owned()).unwrap(),
            minor: 0,
            memory_hard,
            memory_soft: 0,
            weight: 100,
        };
        let sandboxes = Sandboxes::default();
        let memory = |gpus: &[GpuSlice]| LeafLimits::of(&sandboxes, gpus).memory - sandboxes.memory.count();
        // Each 2 MiB of pinned memory has a page of entries.
        assert!(memory(&[]) >= (256 << 30) / (2 << 20) * 4096);
        assert_eq!(memory(&[gpu(4 << 30), gpu(1 << 30)]), memory(&[]) + (1 << 30));
        assert_eq!(LeafLimits::of(&sandboxes, &[gpu(u64::MAX)]).memory, u64::MAX);
    }

    #[test]
    fn a_leaf_of_each_version_gets_its_limits_before_its_process() {
        let limits = LeafLimits { memory: 1 << 20, pids: 7 };
        // Plain files stand for the kernel's; the limits' files are absent as on a node without controllers.
        let v2 = tempfile::tempdir().unwrap();
        fs::write(v2.path().join("cgroup.controllers"), "").unwrap();
        let leaf = Leaf::create(v2.path(), "/pod/c1", "x", limits).unwrap();
        assert_eq!(leaf.directories(), [v2.path().join("pod/x")]);
        let v1 = tempfile::tempdir().unwrap();
        assert!(Leaf::create(v1.path(), "/pod/c1", "x", limits).is_err());
        for controller in V1_CONTROLLERS {
            fs::create_dir_all(v1.path().join(controller)).unwrap();
            fs::write(v1.path().join(controller).join("cgroup.procs"), "").unwrap();
        }
        let leaf = Leaf::create(v1.path(), "/pod/c1", "x", limits).unwrap();
        assert_eq!(leaf.directories(), [v1.path().join("memory/pod/x"), v1.path().join("pids/pod/x")]);
        assert!(leaf.remove(Instant::now()));
        assert!(v1.path().join("pids/pod").exists() && !v1.path().join("pids/pod/x").exists());
    }

    #[test]
    fn a_leaf_with_processes_is_not_taken_over() {
        let v2 = tempfile::tempdir().unwrap();
        fs::write(v2.path().join("cgroup.controllers"), "").unwrap();
        fs::create_dir_all(v2.path().join("pod/x")).unwrap();
        fs::write(v2.path().join("pod/x/cgroup.procs"), "1234\n").unwrap();
        let error = Leaf::create(v2.path(), "/pod/c1", "x", LeafLimits { memory: 1, pids: 1 }).unwrap_err();
        assert!(matches!(error, LeafError::Busy { .. }));
        assert!(v2.path().join("pod/x/cgroup.procs").exists());
    }

    proptest! {
        #[test]
        fn no_path_leads_out_of_the_hierarchy_or_into_the_container(path in "[a-z./:-]{0,30}") {
            if let Ok(leaf) = leaf_path(&path, "x") {
                let inside = leaf.components().all(|part| matches!(part, Component::Normal(_)));
                prop_assert!(inside);
                prop_assert_eq!(leaf.file_name().unwrap(), "x");
                if !path.contains(':') && Path::new(&path).file_name().is_some() {
                    prop_assert!(!Path::new("/").join(&leaf).starts_with(Path::new("/").join(path.trim_start_matches("./"))) || path.ends_with("/x") || path == "x");
                }
            }
        }
    }
}
