//! The process that makes a call: its memory, its open files, its privileges.
//!
//! Owns: a descriptor of the process. Trusts: the socket's peer credentials, which the kernel wrote at connect.
//! Promises: memory is copied as the kernel's copy_from_user and copy_to_user do it, through the caller's own
//! page tables. Failure: [`Fault`], which the caller of the ioctl sees as EFAULT.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, OwnedFd};

use nix::sys::uio::{RemoteIoVec, process_vm_readv, process_vm_writev};
use nix::unistd::Pid;

use crate::sys;

/// A range that is not mapped (or not so) in the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault;

/// A calling process.
#[derive(Debug)]
pub struct Caller {
    /// Its process id in the emulator's namespace.
    pub pid: u32,
    process: OwnedFd,
}

const PAGE: u64 = 4096;
/// Most ranges that one copy takes (UIO_MAXIOV).
const PAGES_AT_ONCE: usize = 1024;
const CAP_SYS_ADMIN: u32 = 21;
const CAP_SYS_NICE: u32 = 23;

impl Caller {
    /// The process with this id.
    ///
    /// # Errors
    /// It is gone.
    pub fn new(pid: u32) -> io::Result<Self> {
        Ok(Caller { pid, process: sys::pidfd_open(pid)? })
    }

    fn id(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.pid).unwrap_or(i32::MAX))
    }

    /// Copies `length` bytes in.
    ///
    /// # Errors
    /// The range is not readable.
    pub fn read(&self, address: u64, length: usize) -> Result<Vec<u8>, Fault> {
        let mut buffer = vec![0; length];
        if length == 0 {
            return Ok(buffer);
        }
        let base = usize::try_from(address).map_err(|_| Fault)?;
        let remote = [RemoteIoVec { base, len: length }];
        let got = process_vm_readv(self.id(), &mut [IoSliceMut::new(&mut buffer)], &remote);
        if got == Ok(length) { Ok(buffer) } else { Err(Fault) }
    }

    /// Copies bytes out.
    ///
    /// # Errors
    /// The range is not writable.
    pub fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Fault> {
        if bytes.is_empty() {
            return Ok(());
        }
        let base = usize::try_from(address).map_err(|_| Fault)?;
        let remote = [RemoteIoVec { base, len: bytes.len() }];
        let put = process_vm_writev(self.id(), &[IoSlice::new(bytes)], &remote);
        if put == Ok(bytes.len()) { Ok(()) } else { Err(Fault) }
    }

    /// Has every page of the range exist in the caller, as pinning does: pages that nobody touched yet come into
    /// being here and are charged to the caller.
    ///
    /// # Errors
    /// A page is not readable.
    pub fn populate(&self, address: u64, length: u64) -> Result<(), Fault> {
        let base = |at| usize::try_from(at).map_err(|_| Fault);
        let end = address.checked_add(length).ok_or(Fault)?;
        let mut at = address & !(PAGE - 1);
        let mut bytes = [0; PAGES_AT_ONCE];
        while at < end {
            let mut remote = Vec::with_capacity(PAGES_AT_ONCE);
            while at < end && remote.len() < PAGES_AT_ONCE {
                remote.push(RemoteIoVec { base: base(at)?, len: 1 });
                at = at.checked_add(PAGE).ok_or(Fault)?;
            }
            let local = bytes.get_mut(..remote.len()).ok_or(Fault)?;
            if process_vm_readv(self.id(), &mut [IoSliceMut::new(local)], &remote) != Ok(remote.len()) {
                return Err(Fault);
            }
        }
        Ok(())
    }

    /// A copy of the caller's open file `n`.
    ///
    /// # Errors
    /// No such file.
    pub fn file(&self, n: i32) -> io::Result<OwnedFd> {
        sys::pidfd_getfd(self.process.as_fd(), n)
    }

    /// Whether it has CAP_SYS_ADMIN now, which makes it the driver's administrator.
    pub fn is_admin(&self) -> bool {
        self.has_capability(CAP_SYS_ADMIN)
    }

    /// Whether it has CAP_SYS_NICE now.
    pub fn may_renice(&self) -> bool {
        self.has_capability(CAP_SYS_NICE)
    }

    fn has_capability(&self, bit: u32) -> bool {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid)).unwrap_or_default();
        let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
        let bits = effective.and_then(|text| u64::from_str_radix(text.trim(), 16).ok()).unwrap_or(0);
        bits & (1 << bit) != 0
    }

    /// Its effective user id.
    pub fn uid(&self) -> u32 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid)).unwrap_or_default();
        let ids = status.lines().find_map(|line| line.strip_prefix("Uid:"));
        ids.and_then(|text| text.split_whitespace().nth(1)?.parse().ok()).unwrap_or(u32::MAX)
    }

    /// Whether its file table holds an open file with this device and inode number. An emulator that calls
    /// itself, in tests, has one of each node that doesn't count.
    pub fn holds(&self, device: u64, inode: u64) -> bool {
        use std::os::unix::fs::MetadataExt;
        let Ok(table) = std::fs::read_dir(format!("/proc/{}/fd", self.pid)) else { return false };
        let same = |entry: &std::fs::DirEntry| {
            std::fs::metadata(entry.path()).is_ok_and(|file| file.dev() == device && file.ino() == inode)
        };
        let own = usize::from(self.pid == std::process::id());
        table.flatten().filter(same).count() > own
    }

    /// Whether the whole range is mapped in it, readable (what pinning pages needs).
    pub fn mapped(&self, address: u64, length: u64) -> bool {
        let Some(end) = address.checked_add(length) else { return false };
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.pid)).unwrap_or_default();
        let mut reached = address;
        for line in maps.lines() {
            let Some((from, to)) = crate::maps::range(line) else { continue };
            if from <= reached && reached < to {
                if !line.split_whitespace().nth(1).is_some_and(|rights| rights.starts_with('r')) {
                    return false;
                }
                reached = to;
            }
            if reached >= end {
                return true;
            }
        }
        length == 0
    }
}
