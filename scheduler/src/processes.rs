//! What procfs says about sandboxes.
//!
//! A pid in a message is a claim: the pidfd that comes with it says which process is meant, and procfs says
//! whose uid it has. After a restart, processes with uids of our range are containers that will be adopted.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};

use gpuslice_config::UidRange;

/// Checks that `file` is a pidfd of process `pid`, and that this process is alive and has `uid`. The error is
/// a text for the shim.
pub(crate) fn check_sandbox(file: &OwnedFd, pid: u32, uid: u32) -> Result<(), String> {
    let number = file.as_raw_fd();
    // Neither readlink nor fdinfo blocks, whatever the file is.
    let target = fs::read_link(format!("/proc/self/fd/{number}")).map_err(|error| error.to_string())?;
    let target = target.to_string_lossy();
    if target != "anon_inode:[pidfd]" && !target.starts_with("pidfd:[") {
        return Err(format!("the file with SandboxStarted is {target:.64}, a pidfd is needed"));
    }
    let info =
        fs::read_to_string(format!("/proc/self/fdinfo/{number}")).map_err(|error| error.to_string())?;
    let found = field(&info, "Pid:").unwrap_or_default();
    if found != pid.to_string() {
        return Err(format!(
            "the pidfd names pid {found:.16}, the message {pid}: the sandbox has ended, or is another"
        ));
    }
    match uid_of(pid) {
        Some(found) if found == uid => Ok(()),
        Some(found) => Err(format!(
            "process {pid} has uid {found}, its lease {uid}: announce a sandbox when it is ready"
        )),
        None => Err(format!("process {pid} has ended")),
    }
}

/// Real uid of a process.
fn uid_of(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    field(&status, "Uid:")?.parse().ok()
}

/// The first word behind `name`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next())
}

/// Uids of `range` that processes have, with one of their pids.
pub(crate) fn uids_in_use(range: UidRange) -> BTreeMap<u32, u32> {
    let Ok(entries) = fs::read_dir("/proc") else { return BTreeMap::new() };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter_map(|pid| Some((uid_of(pid)?, pid)))
        .filter(|(uid, _)| range.contains(*uid))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    #[test]
    fn only_a_pidfd_of_the_process_named_is_accepted() {
        let me = std::process::id();
        let uid = uid_of(me).unwrap();
        let pidfd = gpuslice_sys::process::pidfd_open(me, false).unwrap();
        check_sandbox(&pidfd, me, uid).unwrap();
        assert!(check_sandbox(&pidfd, 1, uid).unwrap_err().contains("the message 1"));
        assert!(check_sandbox(&pidfd, me, uid + 1).unwrap_err().contains("when it is ready"));
        let file = OwnedFd::from(File::open("/dev/null").unwrap());
        assert!(check_sandbox(&file, me, uid).unwrap_err().contains("/dev/null"));
    }

    #[test]
    fn a_pidfd_of_an_ended_process_is_refused() {
        let mut child = std::process::Command::new("/bin/true").spawn().unwrap();
        let pidfd = gpuslice_sys::process::pidfd_open(child.id(), false).unwrap();
        child.wait().unwrap();
        assert!(check_sandbox(&pidfd, child.id(), 0).unwrap_err().contains("names pid -1"));
    }

    #[test]
    fn own_uid_is_found_in_use() {
        let uid = uid_of(std::process::id()).unwrap();
        assert!(uids_in_use(UidRange { first: uid, count: 1 }).contains_key(&uid));
    }
}
