//! Giving up rights for good, one step each, for a process with one thread.
//!
//! Threads started afterwards inherit what these steps left. The order is the caller's: see the sandbox's
//! `confine` module.

use std::ffi::CStr;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use libc::{c_int, c_ulong, rlim_t};

use crate::call::{check, check_long, error};

/// Closes every file whose number is `first` or higher.
///
/// # Errors
/// ENOSYS before kernel 5.9.
pub fn close_from(first: u32) -> io::Result<()> {
    // SAFETY: close_range takes numbers only. The caller gives up the files: this is for a process's first
    // steps, before anything in it owns a file of these numbers.
    let result = unsafe { libc::syscall(libc::SYS_close_range, first, libc::c_uint::MAX, 0) };
    check_long(result).map(|_| ())
}

/// Keeps glibc's malloc from opening files. Left alone it counts the machine's processors by a file in /sys when
/// the ninth thread or so allocates for the first time, and asks /proc for the overcommit mode when it first gives
/// back the end of a thread's heap: long after open is forbidden. So: at most `heaps` heaps, and none shrinks.
///
/// # Errors
/// EINVAL when malloc refuses.
pub fn quiet_malloc(heaps: c_int) -> io::Result<()> {
    #[cfg(target_env = "gnu")]
    for (option, value) in [(libc::M_ARENA_MAX, heaps), (libc::M_TRIM_THRESHOLD, c_int::MAX)] {
        // SAFETY: mallopt takes two integers; it is called before there is a second thread.
        if unsafe { libc::mallopt(option, value) } == 0 {
            return Err(error(libc::EINVAL));
        }
    }
    #[cfg(not(target_env = "gnu"))]
    let _unused = heaps;
    Ok(())
}

/// Takes ownership of a file that this process was started with. Each number once.
///
/// # Errors
/// EBADF when there is no such file, EBUSY when it was taken before or is above 63.
pub fn inherited_file(number: u32) -> io::Result<OwnedFd> {
    static TAKEN: AtomicU64 = AtomicU64::new(0);
    let bit = 1u64.checked_shl(number).ok_or_else(|| error(libc::EBUSY))?;
    if TAKEN.fetch_or(bit, Ordering::AcqRel) & bit != 0 {
        return Err(error(libc::EBUSY));
    }
    let number = RawFd::try_from(number).map_err(|_| error(libc::EBADF))?;
    // SAFETY: fcntl with F_GETFD touches no memory.
    check(unsafe { libc::fcntl(number, libc::F_GETFD) })?;
    // SAFETY: from_raw_fd needs an open file that nobody else owns: it is open, and no number is taken twice.
    // A program calls this before it opens files of its own, as the module says.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// New mount, network, IPC, UTS and cgroup namespaces, with an empty read-only root directory.
///
/// # Errors
/// EPERM without CAP_SYS_ADMIN; otherwise that of the step that failed.
pub fn namespaces() -> io::Result<()> {
    let flags = libc::CLONE_NEWNS
        | libc::CLONE_NEWNET
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUTS
        | libc::CLONE_NEWCGROUP;
    // SAFETY: unshare takes flags only.
    check(unsafe { libc::unshare(flags) })?;
    mount(None, c"/", None, libc::MS_REC | libc::MS_PRIVATE)?;
    let flags = libc::MS_RDONLY | libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
    // Any directory will do: it is covered, then becomes the root.
    let place = [c"/proc", c"/sys", c"/dev", c"/tmp"]
        .into_iter()
        .find(|place| mount(Some(c"tmpfs"), place, Some(c"size=4k,nr_inodes=2,mode=0555"), flags).is_ok())
        .ok_or_else(|| error(libc::ENOENT))?;
    change_directory(place)?;
    // SAFETY: pivot_root reads two strings that end in NUL.
    let pivoted = unsafe { libc::syscall(libc::SYS_pivot_root, c".".as_ptr(), c".".as_ptr()) };
    match check_long(pivoted) {
        Ok(_) => {
            // SAFETY: umount2 reads a string that ends in NUL.
            check(unsafe { libc::umount2(c".".as_ptr(), libc::MNT_DETACH) })?;
        }
        // The first root file system of a kernel can't be pivoted away: cover it.
        Err(failed) if failed.raw_os_error() == Some(libc::EINVAL) => {
            mount(Some(c"."), c"/", None, libc::MS_MOVE)?;
            // SAFETY: chroot reads a string that ends in NUL.
            check(unsafe { libc::chroot(c".".as_ptr()) })?;
        }
        Err(failed) => return Err(failed),
    }
    change_directory(c"/")
}

fn mount(source: Option<&CStr>, target: &CStr, options: Option<&CStr>, flags: c_ulong) -> io::Result<()> {
    let source = source.map_or(ptr::null(), CStr::as_ptr);
    let kind = options.map_or(ptr::null(), |_| c"tmpfs".as_ptr());
    let options = options.map_or(ptr::null(), CStr::as_ptr).cast();
    // SAFETY: mount reads strings that end in NUL, or null where the kind of mount has none.
    check(unsafe { libc::mount(source, target.as_ptr(), kind, flags, options) }).map(|_| ())
}

fn change_directory(path: &CStr) -> io::Result<()> {
    // SAFETY: chdir reads a string that ends in NUL.
    check(unsafe { libc::chdir(path.as_ptr()) }).map(|_| ())
}

/// Resource limits of a confined process, both soft and hard.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most open files.
    pub files: u64,
    /// Largest file that it may make, in bytes (also bounds a memfd's size).
    pub file_size: u64,
}

/// Sets `limits`, and forbids core dumps.
///
/// # Errors
/// EPERM when a limit would have to be raised without CAP_SYS_RESOURCE.
pub fn limits(limits: Limits) -> io::Result<()> {
    set_limit(libc::RLIMIT_CORE, 0)?;
    set_limit(libc::RLIMIT_NOFILE, limits.files)?;
    set_limit(libc::RLIMIT_FSIZE, limits.file_size)
}

fn set_limit(which: libc::__rlimit_resource_t, value: rlim_t) -> io::Result<()> {
    let mut found = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: getrlimit writes one rlimit: `found` is one.
    check(unsafe { libc::getrlimit(which, &raw mut found) })?;
    let value = value.min(found.rlim_max);
    let wanted = libc::rlimit { rlim_cur: value, rlim_max: value };
    // SAFETY: setrlimit reads one rlimit: `wanted` is one.
    check(unsafe { libc::setrlimit(which, &raw const wanted) }).map(|_| ())
}

fn prctl(option: c_int, value: c_ulong) -> io::Result<c_int> {
    let zero: c_ulong = 0;
    // SAFETY: the options used in this module take numbers only.
    check(unsafe { libc::prctl(option, value, zero, zero, zero) })
}

/// CAP_SYS_PTRACE.
const CAP_SYS_PTRACE: u32 = 19;
/// `_LINUX_CAPABILITY_VERSION_3`.
const CAPABILITY_VERSION: u32 = 0x2008_0522;

#[repr(C)]
struct CapabilityHeader {
    version: u32,
    pid: c_int,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct CapabilityData {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// Becomes user and group `uid` without other groups, and keeps CAP_SYS_PTRACE alone. The bounding and
/// ambient sets are emptied.
///
/// # Errors
/// EINVAL for uid 0; otherwise that of the step that failed.
pub fn drop_to(uid: u32) -> io::Result<()> {
    if uid == 0 {
        return Err(error(libc::EINVAL));
    }
    // The kernel refuses the first capability that it doesn't know.
    let mut capability = 0;
    while prctl(libc::PR_CAPBSET_READ, capability).is_ok() {
        prctl(libc::PR_CAPBSET_DROP, capability)?;
        capability += 1;
    }
    prctl(libc::PR_SET_KEEPCAPS, 1)?;
    // SAFETY: setgroups reads as many ids as told: none.
    check(unsafe { libc::setgroups(0, ptr::null()) })?;
    // SAFETY: setresgid takes numbers only.
    check(unsafe { libc::setresgid(uid, uid, uid) })?;
    // SAFETY: setresuid takes numbers only.
    check(unsafe { libc::setresuid(uid, uid, uid) })?;
    keep_ptrace_only()?;
    prctl(libc::PR_SET_KEEPCAPS, 0)?;
    Ok(())
}

fn keep_ptrace_only() -> io::Result<()> {
    let header = CapabilityHeader { version: CAPABILITY_VERSION, pid: 0 };
    let kept = 1 << CAP_SYS_PTRACE;
    let none = CapabilityData { effective: 0, permitted: 0, inheritable: 0 };
    let data = [CapabilityData { effective: kept, permitted: kept, inheritable: 0 }, none];
    // SAFETY: capset with version 3 reads a header and two data structures: both are given.
    let result = unsafe { libc::syscall(libc::SYS_capset, &raw const header, &raw const data) };
    check_long(result)?;
    // SAFETY: PR_CAP_AMBIENT with CLEAR_ALL takes numbers only.
    check(unsafe { libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) }).map(|_| ())
}

/// No core dump, and no other process of this uid may trace this one.
///
/// # Errors
/// Those of prctl(2).
pub fn not_dumpable() -> io::Result<()> {
    prctl(libc::PR_SET_DUMPABLE, 0).map(|_| ())
}

/// No program executed from here gains rights; needed before a seccomp program.
///
/// # Errors
/// Those of prctl(2).
pub fn no_new_privileges() -> io::Result<()> {
    prctl(libc::PR_SET_NO_NEW_PRIVS, 1).map(|_| ())
}
