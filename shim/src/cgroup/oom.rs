//! Out-of-memory kills in a container, told by the kernel.
//!
//! cgroup v1 signals an eventfd, v2 changes `memory.events`, which inotify sees. Sleeps in between.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::{CgroupError, Cgroups};

/// Watches one container's memory cgroup.
pub(crate) struct OomWatch {
    /// File with the count of kills.
    counter: PathBuf,
    signal: AsyncFd<OwnedFd>,
    v2: bool,
    /// The kernel needs it open as long as it is to signal.
    _control: Option<File>,
}

impl OomWatch {
    /// None where no memory controller is.
    pub(crate) fn new(cgroups: &Cgroups) -> Result<Option<OomWatch>, CgroupError> {
        let Some(directory) = cgroups.memory() else { return Ok(None) };
        let v2 = matches!(cgroups, Cgroups::V2(_));
        let counter = directory.join(if v2 { "memory.events" } else { "memory.oom_control" });
        if !counter.exists() {
            return Ok(None);
        }
        let watch = if v2 { Self::v2(&counter) } else { Self::v1(&directory, &counter) };
        let (signal, control) = watch.map_err(|source| CgroupError::Watch { path: directory, source })?;
        Ok(Some(OomWatch { counter, signal, v2, _control: control }))
    }

    fn v1(directory: &Path, counter: &Path) -> io::Result<(AsyncFd<OwnedFd>, Option<File>)> {
        let event = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let control = File::open(counter)?;
        let text = format!("{} {}", event.as_raw_fd(), control.as_raw_fd());
        OpenOptions::new()
            .write(true)
            .open(directory.join("cgroup.event_control"))?
            .write_all(text.as_bytes())?;
        Ok((crate::io::watched(event.into(), Interest::READABLE)?, Some(control)))
    }

    fn v2(counter: &Path) -> io::Result<(AsyncFd<OwnedFd>, Option<File>)> {
        let watch = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
        watch.add_watch(counter, AddWatchFlags::IN_MODIFY)?;
        Ok((crate::io::watched(watch.as_fd().try_clone_to_owned()?, Interest::READABLE)?, None))
    }

    /// How many processes were killed so far; none once the cgroup is gone.
    pub(crate) fn count(counter: &Path) -> Option<u64> {
        let text = fs::read_to_string(counter).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix("oom_kill "))?;
        line.trim().parse().ok()
    }

    /// The file with the count.
    pub(crate) fn counter(&self) -> &Path {
        &self.counter
    }

    /// Resolves at the next sign of an out-of-memory kill; to false once the cgroup is gone.
    pub(crate) async fn next(&self, known: u64) -> bool {
        let mut buffer = [0; 4096];
        loop {
            let Ok(mut guard) = self.signal.readable().await else { return false };
            let read = guard.try_io(|file| Ok(nix::unistd::read(file.get_ref(), &mut buffer)?));
            match read {
                Ok(Ok(_)) => {}
                Ok(Err(_)) => return false,
                Err(_would_block) => continue,
            }
            match Self::count(&self.counter) {
                None => return false,
                // v1 signals when memory ran out, before it counts the kill.
                Some(count) if !self.v2 || count > known => return true,
                Some(_) => {}
            }
        }
    }
}
