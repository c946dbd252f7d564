//! Which processes are the container's: by cgroup.
//!
//! Owns: the container's cgroup paths, read once from its first process. Trusts: the kernel's
//! `/proc/PID/cgroup`. Promises: a thread belongs to the container only if it lies, in every hierarchy, in the
//! container's cgroup or below it; the sandbox, in a leaf beside it, never does.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::leaf;

/// Lines of `/proc/PID/cgroup`: controllers and path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Membership {
    lines: Vec<(String, String)>,
}

impl Membership {
    /// Where thread or process `id` lies.
    ///
    /// # Errors
    /// Those of reading `/proc`; a text of another form.
    pub(crate) fn of(proc: &Path, id: u32) -> io::Result<Membership> {
        let text = fs::read_to_string(proc.join(id.to_string()).join("cgroup"))?;
        Membership::parse(&text)
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "strange /proc/PID/cgroup"))
    }

    fn parse(text: &str) -> Option<Membership> {
        let lines = text
            .lines()
            .map(|line| {
                let (_, rest) = line.split_once(':')?;
                let (controllers, path) = rest.split_once(':')?;
                path.starts_with('/').then(|| (controllers.to_owned(), path.to_owned()))
            })
            .collect::<Option<Vec<_>>>()?;
        (!lines.is_empty()).then_some(Membership { lines })
    }

    /// Whether `other` lies in this cgroup, or below it, in every hierarchy.
    pub(crate) fn contains(&self, other: &Membership) -> bool {
        self.lines.len() == other.lines.len()
            && self.lines.iter().zip(&other.lines).all(|((own, path), (theirs, found))| {
                own == theirs
                    && (path == "/"
                        || found
                            .strip_prefix(path.as_str())
                            .is_some_and(|rest| rest.is_empty() || rest.starts_with('/')))
            })
    }

    /// Its directory in a hierarchy that is mounted below `root`, to list its processes.
    pub(crate) fn directory(&self, root: &Path) -> Option<PathBuf> {
        let below = |mount: PathBuf, path: &str| {
            let directory = mount.join(path.trim_start_matches('/'));
            directory.join("cgroup.procs").exists().then_some(directory)
        };
        if leaf::is_v2(root) {
            return self
                .lines
                .iter()
                .find(|(name, _)| name.is_empty())
                .and_then(|(_, path)| below(root.to_owned(), path));
        }
        ["pids", "memory", "freezer", "devices"].iter().find_map(|wanted| {
            let (name, path) = self
                .lines
                .iter()
                .find(|(name, path)| path != "/" && name.split(',').any(|part| part == *wanted))?;
            below(root.join(name), path)
        })
    }
}

/// All processes in a cgroup and below it.
pub(crate) fn processes(directory: &Path) -> Vec<u32> {
    let mut found = leaf::members(directory);
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.extend(processes(&entry.path()));
        }
    }
    found.sort_unstable();
    found.dedup();
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn member(text: &str) -> Membership {
        Membership::parse(text).unwrap()
    }

    const CONTAINER: &str = "4:memory:/pod/c1\n3:pids:/pod/c1\n1:name=systemd:/\n0::/\n";

    #[test]
    fn a_thread_of_the_container_and_of_a_cgroup_below_it_belong() {
        let container = member(CONTAINER);
        assert!(container.contains(&member(CONTAINER)));
        assert!(container.contains(&member("4:memory:/pod/c1/x\n3:pids:/pod/c1\n1:name=systemd:/\n0::/a\n")));
    }

    #[test]
    fn the_sandbox_a_neighbour_and_a_longer_name_do_not() {
        let container = member(CONTAINER);
        for other in ["gpuslice-0", "c2", "c12"] {
            assert!(!container.contains(&member(&CONTAINER.replace("c1", other))), "{other}");
        }
        assert!(!container.contains(&member("4:memory:/pod\n3:pids:/pod\n1:name=systemd:/\n0::/\n")));
        assert!(!container.contains(&member("4:memory:/pod/c1\n3:pids:/pod/c2\n1:name=systemd:/\n0::/\n")));
        assert!(!container.contains(&member("0::/pod/c1\n")));
    }

    #[test]
    fn strange_texts_are_no_membership() {
        for text in ["", "x", "1:memory", "1:memory:pod"] {
            assert_eq!(Membership::parse(text), None, "{text}");
        }
        Membership::of(Path::new("/proc"), std::process::id()).unwrap();
        assert!(Membership::of(Path::new("/proc"), 0).is_err());
    }

    #[test]
    fn processes_below_a_cgroup_are_found() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("pids/pod/c1/below")).unwrap();
        fs::write(root.path().join("pids/pod/c1/cgroup.procs"), "3\n1\n").unwrap();
        fs::write(root.path().join("pids/pod/c1/below/cgroup.procs"), "2\n").unwrap();
        let directory = member(CONTAINER).directory(root.path()).unwrap();
        assert_eq!(processes(&directory), [1, 2, 3]);
    }

    proptest! {
        #[test]
        fn whatever_is_contained_has_the_containers_path(path in "/[a-c1/]{0,8}") {
            let container = member("0::/pod/c1");
            let text = format!("0::{path}");
            if container.contains(&member(&text)) {
                prop_assert!(Path::new(&path).starts_with("/pod/c1"));
            }
        }
    }
}
