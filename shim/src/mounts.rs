//! The root file system of a container: mounted from the request, unmounted at delete.
//!
//! Trusts: containerd's mounts. An option that the kernel takes as a flag is a flag, the rest is data for the
//! file system. A long overlay (more layers than fit a page of options) is mounted from a thread of its own
//! with a working directory of its own, so that layers can be named by short paths and nothing forks.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use containerd_shim_protos::types::mount::Mount;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

/// Options and NUL must fit a page; some room is left for what file systems add.
const PAGE: usize = 4096 - 512;

/// What failed on a mount.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MountError {
    #[error("mount {kind} of {origin} on {}", target.display())]
    Mount {
        kind: String,
        origin: String,
        target: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("mount option \"{option}\" is not supported: mount options of containerd's snapshotters are")]
    Option { option: String },
    #[error("mount target \"{target}\" leaves the root file system")]
    Target { target: String },
    #[error("{layers} overlay layers don't fit the kernel's page of mount options")]
    TooLong { layers: usize },
    #[error("unmount {}", target.display())]
    Unmount {
        target: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("can't read the list of mounts")]
    List(#[source] io::Error),
}

/// A mount as the kernel takes it.
#[derive(Debug, PartialEq, Eq)]
struct Parsed {
    flags: MsFlags,
    propagation: MsFlags,
    data: Vec<String>,
}

/// Name of an option, the flag it sets or clears.
const FLAGS: [(&str, MsFlags, bool); 26] = [
    ("async", MsFlags::MS_SYNCHRONOUS, false),
    ("atime", MsFlags::MS_NOATIME, false),
    ("bind", MsFlags::MS_BIND, true),
    ("defaults", MsFlags::empty(), true),
    ("dev", MsFlags::MS_NODEV, false),
    ("diratime", MsFlags::MS_NODIRATIME, false),
    ("dirsync", MsFlags::MS_DIRSYNC, true),
    ("exec", MsFlags::MS_NOEXEC, false),
    ("mand", MsFlags::MS_MANDLOCK, true),
    ("noatime", MsFlags::MS_NOATIME, true),
    ("nodev", MsFlags::MS_NODEV, true),
    ("nodiratime", MsFlags::MS_NODIRATIME, true),
    ("noexec", MsFlags::MS_NOEXEC, true),
    ("nomand", MsFlags::MS_MANDLOCK, false),
    ("norelatime", MsFlags::MS_RELATIME, false),
    ("nostrictatime", MsFlags::MS_STRICTATIME, false),
    ("nosuid", MsFlags::MS_NOSUID, true),
    ("rbind", MsFlags::MS_BIND.union(MsFlags::MS_REC), true),
    ("relatime", MsFlags::MS_RELATIME, true),
    ("remount", MsFlags::MS_REMOUNT, true),
    ("ro", MsFlags::MS_RDONLY, true),
    ("rw", MsFlags::MS_RDONLY, false),
    ("strictatime", MsFlags::MS_STRICTATIME, true),
    ("suid", MsFlags::MS_NOSUID, false),
    ("sync", MsFlags::MS_SYNCHRONOUS, true),
    ("iversion", MsFlags::MS_I_VERSION, true),
];

const PROPAGATIONS: [(&str, MsFlags); 8] = [
    ("private", MsFlags::MS_PRIVATE),
    ("rprivate", MsFlags::MS_PRIVATE.union(MsFlags::MS_REC)),
    ("shared", MsFlags::MS_SHARED),
    ("rshared", MsFlags::MS_SHARED.union(MsFlags::MS_REC)),
    ("slave", MsFlags::MS_SLAVE),
    ("rslave", MsFlags::MS_SLAVE.union(MsFlags::MS_REC)),
    ("unbindable", MsFlags::MS_UNBINDABLE),
    ("runbindable", MsFlags::MS_UNBINDABLE.union(MsFlags::MS_REC)),
];

fn parse(kind: &str, options: &[String]) -> Result<Parsed, MountError> {
    let mut parsed = Parsed { flags: MsFlags::empty(), propagation: MsFlags::empty(), data: Vec::new() };
    if kind == "bind" {
        parsed.flags |= MsFlags::MS_BIND;
    }
    for option in options {
        let name = option.as_str();
        if let Some((_, flag, sets)) = FLAGS.iter().find(|(known, ..)| *known == name) {
            parsed.flags.set(*flag, *sets);
        } else if let Some((_, flag)) = PROPAGATIONS.iter().find(|(known, _)| *known == name) {
            parsed.propagation |= *flag;
        } else if name == "loop" || name.starts_with("uidmap=") || name.starts_with("gidmap=") {
            return Err(MountError::Option { option: option.clone() });
        } else if !name.starts_with("X-containerd.") {
            parsed.data.push(option.clone());
        }
    }
    Ok(parsed)
}

/// Mounts everything of a request under `root`, in order.
pub(crate) fn mount_all(mounts: &[Mount], root: &Path) -> Result<(), MountError> {
    for one in mounts {
        let target = below(root, &one.target)?;
        mount_one(one, &target)?;
    }
    Ok(())
}

fn below(root: &Path, target: &str) -> Result<PathBuf, MountError> {
    let mut path = root.to_owned();
    for part in Path::new(target).components() {
        match part {
            std::path::Component::Normal(name) => path.push(name),
            std::path::Component::RootDir | std::path::Component::CurDir => {}
            std::path::Component::ParentDir | std::path::Component::Prefix(_) => {
                return Err(MountError::Target { target: target.to_owned() });
            }
        }
    }
    Ok(path)
}

fn mount_one(one: &Mount, target: &Path) -> Result<(), MountError> {
    let parsed = parse(&one.type_, &one.options)?;
    let fail = |source: io::Error| MountError::Mount {
        kind: one.type_.clone(),
        origin: one.source.clone(),
        target: target.to_owned(),
        source,
    };
    let call = |source: &str, target: &Path, flags: MsFlags, data: &str| {
        let data = Some(data).filter(|data| !data.is_empty());
        mount(Some(source), target, Some(one.type_.as_str()), flags, data).map_err(|e| fail(e.into()))
    };
    let data = parsed.data.join(",");
    if one.type_ == "overlay" && data.len() > PAGE {
        let layers =
            parsed.data.iter().find_map(|option| option.strip_prefix("lowerdir=")).unwrap_or_default();
        let (directory, data) = shorten(&parsed.data);
        if data.len() > PAGE {
            return Err(MountError::TooLong { layers: layers.split(':').count() });
        }
        let flags = parsed.flags;
        let (source, target_path) = (one.source.clone(), target.to_owned());
        let mounter = std::thread::Builder::new().stack_size(128 << 10).spawn(move || -> io::Result<()> {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_FS)?;
            std::env::set_current_dir(&directory)?;
            Ok(mount(Some(source.as_str()), &target_path, Some("overlay"), flags, Some(data.as_str()))?)
        });
        let ended = mounter.map_err(fail)?.join();
        ended.unwrap_or_else(|_| Err(io::Error::other("the mounting thread failed"))).map_err(fail)?;
    } else {
        call(&one.source, target, parsed.flags, &data)?;
    }
    if !parsed.propagation.is_empty() {
        call("", target, parsed.propagation, "")?;
    }
    // A bind mount takes its other flags only when it is mounted again.
    let read_only_bind = MsFlags::MS_BIND | MsFlags::MS_RDONLY;
    if parsed.flags.contains(read_only_bind) {
        call("", target, parsed.flags | MsFlags::MS_REMOUNT, "")?;
    }
    Ok(())
}

/// The longest directory that all layers share, and the options with the layers named from there. The upper
/// and work directories stay as they are: they may lie elsewhere.
fn shorten(options: &[String]) -> (PathBuf, String) {
    let layers: Vec<&Path> = options
        .iter()
        .filter_map(|option| option.strip_prefix("lowerdir="))
        .flat_map(|list| list.split(':'))
        .map(Path::new)
        .collect();
    let mut common: PathBuf =
        layers.first().and_then(|layer| layer.parent()).unwrap_or(Path::new("/")).to_owned();
    while !layers.iter().all(|layer| layer.starts_with(&common)) {
        if !common.pop() {
            break;
        }
    }
    let short: Vec<String> = layers
        .iter()
        .map(|layer| match layer.strip_prefix(&common) {
            Ok(rest) if !rest.as_os_str().is_empty() => rest.display().to_string(),
            Ok(_) | Err(_) => layer.display().to_string(),
        })
        .collect();
    let data: Vec<String> = options
        .iter()
        .map(|option| {
            if option.starts_with("lowerdir=") {
                format!("lowerdir={}", short.join(":"))
            } else {
                option.clone()
            }
        })
        .collect();
    (common, data.join(","))
}

/// Unmounts everything that is mounted on `root` or below it. What is busy is detached: nothing new can be
/// opened through it, and it goes with its last user.
pub(crate) fn unmount_all(root: &Path) -> Result<(), MountError> {
    let list = fs::read_to_string("/proc/self/mountinfo").map_err(MountError::List)?;
    let mut points: Vec<PathBuf> = list
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .map(unescape)
        .filter(|point| point.starts_with(root))
        .collect();
    points.sort_by_key(|point| std::cmp::Reverse(point.components().count()));
    for point in points {
        let unmounted = match umount2(&point, MntFlags::UMOUNT_NOFOLLOW) {
            Err(nix::errno::Errno::EBUSY) => {
                umount2(&point, MntFlags::UMOUNT_NOFOLLOW | MntFlags::MNT_DETACH)
            }
            other => other,
        };
        match unmounted {
            Ok(()) | Err(nix::errno::Errno::EINVAL | nix::errno::Errno::ENOENT) => {}
            Err(error) => return Err(MountError::Unmount { target: point, source: error.into() }),
        }
    }
    Ok(())
}

/// A path as mountinfo writes it: space, tab, newline and backslash in octal.
fn unescape(text: &str) -> PathBuf {
    let mut path = text.to_owned();
    for (code, character) in [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")] {
        path = path.replace(code, character);
    }
    path.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(list: &[&str]) -> Vec<String> {
        list.iter().map(|&option| option.to_owned()).collect()
    }

    #[test]
    fn flags_and_data_are_told_apart() {
        let parsed =
            parse("overlay", &options(&["ro", "nosuid", "rw", "index=off", "lowerdir=/a:/b"])).unwrap();
        assert_eq!(parsed.flags, MsFlags::MS_NOSUID);
        assert_eq!(parsed.data, ["index=off", "lowerdir=/a:/b"]);
        let bind = parse("bind", &options(&["rbind", "ro", "rprivate"])).unwrap();
        assert_eq!(bind.flags, MsFlags::MS_BIND | MsFlags::MS_REC | MsFlags::MS_RDONLY);
        assert_eq!(bind.propagation, MsFlags::MS_PRIVATE | MsFlags::MS_REC);
    }

    #[test]
    fn options_that_would_be_lost_are_refused_by_name() {
        for bad in ["loop", "uidmap=0:1000:10"] {
            assert!(parse("overlay", &options(&[bad])).unwrap_err().to_string().contains(bad));
        }
    }

    #[test]
    fn many_layers_are_named_from_their_common_directory() {
        let (directory, data) = shorten(&options(&["index=off", "lowerdir=/s/snap/1/fs:/s/snap/2/fs"]));
        assert_eq!(directory, Path::new("/s/snap"));
        assert_eq!(data, "index=off,lowerdir=1/fs:2/fs");
        let (directory, data) = shorten(&options(&["lowerdir=/a/1:/b/2"]));
        assert_eq!((directory.as_path(), data.as_str()), (Path::new("/"), "lowerdir=a/1:b/2"));
    }

    #[test]
    fn a_target_cannot_leave_the_root_file_system() {
        assert_eq!(below(Path::new("/r"), "/etc/x").unwrap(), Path::new("/r/etc/x"));
        assert!(below(Path::new("/r"), "../x").is_err());
    }
}
