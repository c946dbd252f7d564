//! The few things that a sandbox can't do itself, done for it on its own container only.
//!
//! Owns: nothing between requests. Trusts the sandbox no more than its tenant: each thread named is checked to lie
//! in the container's cgroup, before and after it is opened. Promises: no file of a process outside the container
//! leaves this module; nothing here waits on a tenant, but for the pinned move and the population of a range,
//! which run on threads of their own under a deadline. Failure: the request is answered with the step that failed.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Instant;

use gpuslice_proto::{MemoryRange, PrivilegedRequest, PrivilegedResult};
use gpuslice_sys::inject::{Move, MoveError, Populate};
use gpuslice_sys::{FileIdentity, identify, inject, memory, process};
use nix::errno::Errno;
use nix::libc;

use super::maps::{self, Mapping};
use super::membership::{Membership, processes};

/// Ranges on one answer: as many as fit a frame.
const MOST_RANGES: usize = 128;
const PAGE: u64 = 4096;
/// Bytes of `/proc/PID/pagemap` for a page, and pages looked at in one read.
const ENTRY: usize = 8;
const PAGES_AT_ONCE: usize = 8192;
/// Kernel file systems whose files can be opened without asking a server of the tenant's.
const SAFE_FILE_SYSTEMS: [&str; 4] = ["tmpfs", "hugetlbfs", "ext4", "xfs"];

/// How the UVM device's mappings are recognised.
#[derive(Clone, Copy, Debug)]
pub(crate) enum UvmFile {
    /// A character device of this major, minor 0, wherever its node lies.
    Device { major: u32 },
    /// One regular file, of an emulated driver.
    File { device: (u32, u32), inode: u64 },
}

impl UvmFile {
    fn is(&self, found: &FileIdentity) -> bool {
        match self {
            UvmFile::Device { major } => {
                found.is_character_device() && (found.rdev_major, found.rdev_minor) == (*major, 0)
            }
            UvmFile::File { device, inode } => found.dev == *device && found.inode == *inode,
        }
    }
}

/// The container that requests are about.
#[derive(Clone, Debug)]
pub(crate) struct Container {
    pub(crate) proc: PathBuf,
    pub(crate) cgroups: PathBuf,
    pub(crate) membership: Membership,
    pub(crate) uvm: UvmFile,
}

/// An answer, with the files that go along.
pub(crate) type Answer = (PrivilegedResult, Vec<OwnedFd>);

/// A step that failed.
struct Failed {
    errno: i32,
    detail: String,
}

impl Failed {
    fn answer(self) -> Answer {
        (PrivilegedResult::Failed { errno: self.errno, detail: self.detail }, Vec::new())
    }
}

fn failed(step: &'static str) -> impl Fn(io::Error) -> Failed {
    move |error| Failed {
        errno: error.raw_os_error().unwrap_or(libc::EIO),
        detail: format!("{step}: {error}"),
    }
}

fn refused(errno: Errno, detail: &str) -> Failed {
    Failed { errno: errno as i32, detail: detail.to_owned() }
}

fn last_answer(result: &Result<(), MoveError>, done: PrivilegedResult) -> Answer {
    let Err(error) = result else { return (done, Vec::new()) };
    let errno = match error.cause() {
        cause if cause.kind() == io::ErrorKind::TimedOut => libc::ETIMEDOUT,
        cause => cause.raw_os_error().unwrap_or(libc::EIO),
    };
    Failed { errno, detail: format!("{error}: {}", error.cause()) }.answer()
}

/// Whether the process has no page in some place of the range: then perhaps nobody made that page yet. A page that
/// only others have counts as absent too.
fn has_absent_pages(folder: &Path, range: MemoryRange) -> io::Result<bool> {
    let pagemap = File::open(folder.join("pagemap"))?;
    let mut entries = vec![0; PAGES_AT_ONCE * ENTRY];
    let (mut page, mut left) = (range.start / PAGE, range.length.div_ceil(PAGE));
    while left > 0 {
        let count = usize::try_from(left).unwrap_or(PAGES_AT_ONCE).min(PAGES_AT_ONCE);
        let part = entries.get_mut(..count * ENTRY).unwrap_or_default();
        pagemap.read_exact_at(part, page.saturating_mul(ENTRY as u64))?;
        // Bit 63 of an entry: a page is there. Numbers are little-endian on this machine.
        if part.chunks_exact(ENTRY).any(|entry| entry.last().is_none_or(|byte| byte & 0x80 == 0)) {
            return Ok(true);
        }
        page += count as u64;
        left -= count as u64;
    }
    Ok(false)
}

impl Container {
    /// Serves a request; `file` is what came with it. `tell` gets the answer. A [`PrivilegedRequest::MoveRange`] and a
    /// [`PrivilegedRequest::PopulateRange`] have two: [`PrivilegedResult::Stopping`], then the last one, before
    /// the threads go on; they may take until `deadline`.
    pub(crate) fn serve(
        &self,
        request: PrivilegedRequest,
        file: Option<OwnedFd>,
        deadline: Instant,
        tell: &dyn Fn(Answer),
    ) {
        let answer = match request {
            PrivilegedRequest::Thread { tid } => self.thread(tid),
            PrivilegedRequest::SharedRange { tid, range } => self.shared_range(tid, range),
            PrivilegedRequest::UvmRanges => Ok((self.uvm_ranges(), Vec::new())),
            PrivilegedRequest::MoveRange { tid, range, tenant_file } => {
                return self.move_range(tid, range, file, tenant_file, deadline, tell);
            }
            PrivilegedRequest::PopulateRange { tid, range } => {
                return self.populate_range(tid, range, deadline, tell);
            }
        };
        tell(answer.unwrap_or_else(Failed::answer));
    }

    fn check(&self, tid: u32) -> Result<(), Failed> {
        let found = Membership::of(&self.proc, tid).map_err(failed("cgroup of the thread"))?;
        if self.membership.contains(&found) {
            Ok(())
        } else {
            Err(refused(Errno::EPERM, "not a thread of the container"))
        }
    }

    /// A handle on a thread of the container; while it is alive, the number `tid` means that thread.
    fn open_thread(&self, tid: u32) -> Result<(OwnedFd, u32, bool), Failed> {
        self.check(tid)?;
        let tgid = self.tgid(tid)?;
        let (pidfd, thread) = match process::pidfd_open(tid, true) {
            // Kernels before 6.9 have handles of processes only.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                (process::pidfd_open(tgid, false), false)
            }
            opened => (opened, true),
        };
        Ok((pidfd.map_err(failed("pidfd"))?, tgid, thread))
    }

    /// Checks again, now that it is held.
    fn confirm(&self, tid: u32, tgid: u32, pidfd: &OwnedFd) -> Result<(), Failed> {
        self.check(tid)?;
        if self.tgid(tid)? != tgid || process::pidfd_exited(pidfd.as_fd()) {
            return Err(refused(Errno::ESRCH, "the thread ended meanwhile"));
        }
        Ok(())
    }

    fn tgid(&self, tid: u32) -> Result<u32, Failed> {
        let text =
            fs::read_to_string(self.proc.join(tid.to_string()).join("status")).map_err(failed("status"))?;
        let found = text.lines().find_map(|line| line.strip_prefix("Tgid:")?.trim().parse().ok());
        found.ok_or_else(|| refused(Errno::EIO, "no Tgid in the thread's status"))
    }

    fn thread(&self, tid: u32) -> Result<Answer, Failed> {
        let (pidfd, tgid, thread) = self.open_thread(tid)?;
        let path = self.proc.join(tid.to_string()).join("mem");
        let mem = OpenOptions::new().read(true).write(true).open(path).map_err(failed("memory file"))?;
        self.confirm(tid, tgid, &pidfd)?;
        Ok((PrivilegedResult::Thread { tgid, thread }, vec![pidfd, mem.into()]))
    }

    fn move_range(
        &self,
        tid: u32,
        range: MemoryRange,
        file: Option<OwnedFd>,
        tenant_file: u32,
        deadline: Instant,
        tell: &dyn Fn(Answer),
    ) {
        let checked = file.ok_or_else(|| refused(Errno::EBADF, "no memory file")).and_then(|file| {
            let (pidfd, tgid, _) = self.open_thread(tid)?;
            self.confirm(tid, tgid, &pidfd)?;
            Ok((file, pidfd))
        });
        let (file, _held) = match checked {
            Ok(checked) => checked,
            Err(failed) => return tell(failed.answer()),
        };
        let range = (range.start, range.length);
        let wanted = Move { tid, range, memfd: file.as_fd(), tenant_file, deadline };
        let finished = |result: &_| tell(last_answer(result, PrivilegedResult::Moved));
        let interrupted = || {
            tell((PrivilegedResult::Stopping, Vec::new()));
            Ok(())
        };
        // The result was told already.
        drop(inject::move_range(&wanted, interrupted, finished));
    }

    fn populate_range(&self, tid: u32, range: MemoryRange, deadline: Instant, tell: &dyn Fn(Answer)) {
        let checked = self.open_thread(tid).and_then(|(pidfd, tgid, _)| {
            self.confirm(tid, tgid, &pidfd)?;
            Ok(pidfd)
        });
        let _held = match checked {
            Ok(checked) => checked,
            Err(failed) => return tell(failed.answer()),
        };
        let wanted = Populate { tid, range: (range.start, range.length), deadline };
        let finished = |result: &_| tell(last_answer(result, PrivilegedResult::Populated));
        let interrupted = || {
            tell((PrivilegedResult::Stopping, Vec::new()));
            Ok(())
        };
        // The result was told already.
        drop(inject::populate(&wanted, interrupted, finished));
    }

    fn shared_range(&self, tid: u32, range: MemoryRange) -> Result<Answer, Failed> {
        let (pidfd, tgid, _) = self.open_thread(tid)?;
        let end = range.start.checked_add(range.length).ok_or_else(|| refused(Errno::EINVAL, "range"))?;
        let folder = self.proc.join(tid.to_string());
        let text = fs::read_to_string(folder.join("maps")).map_err(failed("maps"))?;
        let mapping = maps::parse(&text)
            .find(|mapping| mapping.start <= range.start && range.start < mapping.end)
            .ok_or_else(|| refused(Errno::EFAULT, "nothing is mapped there"))?;
        if !mapping.shared {
            return Ok((PrivilegedResult::Private, Vec::new()));
        }
        if end > mapping.end {
            return Err(refused(Errno::EFAULT, "the range is more than one mapping"));
        }
        let file = self.open_mapping(&folder, &mapping)?;
        let absent = has_absent_pages(&folder, range).map_err(failed("pagemap"))?;
        self.confirm(tid, tgid, &pidfd)?;
        let offset = range
            .start
            .checked_sub(mapping.start)
            .and_then(|inside| mapping.offset.checked_add(inside))
            .ok_or_else(|| refused(Errno::EOVERFLOW, "offset"))?;
        Ok((PrivilegedResult::Shared { offset, absent }, vec![file]))
    }

    /// Opens the file behind a mapping, if its file system is the kernel's own: a server of the tenant's could keep
    /// this process waiting for ever.
    fn open_mapping(&self, folder: &Path, mapping: &Mapping) -> Result<OwnedFd, Failed> {
        let own =
            memory::memfd("kind", 0).and_then(|file| identify(file.as_fd())).map_err(failed("memfd"))?;
        if mapping.device != own.dev && !self.safe_device(folder, mapping.device)? {
            return Err(refused(Errno::ENOTSUP, "a shared mapping of a file that can't be pinned"));
        }
        let path = folder.join("map_files").join(mapping.entry());
        let place = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(path);
        let place = place.map_err(failed("file of the mapping"))?;
        let found = identify(place.as_fd()).map_err(failed("identify the file"))?;
        if (found.dev, found.inode) != (mapping.device, mapping.inode) {
            return Err(refused(Errno::ESTALE, "the mapping changed meanwhile"));
        }
        // To open a device is to act on it, with this process's rights: for the driver, a new file of its own.
        if found.mode & libc::S_IFMT != libc::S_IFREG {
            return Err(refused(Errno::ENOTSUP, "a shared mapping of a device can't be pinned"));
        }
        let file = OpenOptions::new()
            .read(true)
            .write(mapping.writable)
            .custom_flags(libc::O_NONBLOCK)
            .open(format!("/proc/self/fd/{}", place.as_raw_fd()))
            .map_err(failed("file of the mapping"))?;
        Ok(file.into())
    }

    fn safe_device(&self, folder: &Path, device: (u32, u32)) -> Result<bool, Failed> {
        let text = fs::read_to_string(folder.join("mountinfo")).map_err(failed("mountinfo"))?;
        let number = format!("{}:{}", device.0, device.1);
        Ok(text.lines().any(|line| {
            let Some((mount, kind)) = line.split_once(" - ") else { return false };
            mount.split(' ').nth(2) == Some(number.as_str())
                && kind.split(' ').next().is_some_and(|kind| SAFE_FILE_SYSTEMS.contains(&kind))
        }))
    }

    fn uvm_ranges(&self) -> PrivilegedResult {
        let mut ranges = Vec::new();
        let mut total = 0_u64;
        let directory = self.membership.directory(&self.cgroups);
        for pid in directory.as_deref().map(processes).unwrap_or_default() {
            // A process that has ended has no mappings.
            let Some((folder, text)) = self.mappings(pid) else { continue };
            let mut known: Vec<((u32, u32), u64, bool)> = Vec::new();
            for mapping in maps::parse(&text).filter(|mapping| mapping.shared && mapping.inode != 0) {
                let seen = known
                    .iter()
                    .find(|(device, inode, _)| (*device, *inode) == (mapping.device, mapping.inode));
                let uvm = match seen {
                    Some((_, _, uvm)) => *uvm,
                    None => {
                        let Some(uvm) = self.is_uvm(&folder, &mapping) else { continue };
                        known.push((mapping.device, mapping.inode, uvm));
                        uvm
                    }
                };
                if uvm {
                    let length = mapping.end.saturating_sub(mapping.start);
                    total = total.saturating_add(length);
                    if ranges.len() < MOST_RANGES {
                        ranges.push((pid, MemoryRange { start: mapping.start, length }));
                    }
                }
            }
        }
        PrivilegedResult::UvmRanges { ranges, total }
    }

    /// The mappings of a process, and the folder of a thread that shows them: a process goes on without its first
    /// thread, whose folder shows none from then on.
    fn mappings(&self, pid: u32) -> Option<(PathBuf, String)> {
        let leader = self.proc.join(pid.to_string());
        let of = |folder: PathBuf| {
            let text = fs::read_to_string(folder.join("maps")).ok().filter(|text| !text.is_empty())?;
            Some((folder, text))
        };
        of(leader.clone()).or_else(|| {
            let threads = fs::read_dir(leader.join("task")).ok()?.flatten();
            threads.into_iter().find_map(|thread| of(self.proc.join(thread.file_name())))
        })
    }

    /// Whether a mapping is one of the UVM device; `None` when it is gone. Opens nothing but the path, so no server
    /// of a file system is asked.
    fn is_uvm(&self, folder: &Path, mapping: &Mapping) -> Option<bool> {
        let path = folder.join("map_files").join(mapping.entry());
        let place = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(path).ok()?;
        Some(self.uvm.is(&identify(place.as_fd()).ok()?))
    }
}

#[cfg(test)]
mod tests;
