//! Tenant memory, mappings shared with a tenant, memfds.
//!
//! Tenant memory is only ever copied; no reference into it exists. A shared mapping's contents are never
//! read or written here either: only its address is given out, for the driver to pin.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::ptr::NonNull;

use crate::call::{check, error, new_file, uninterrupted};

/// A process's memory, by its `/proc/PID/mem`. Goes stale when the process ends or executes a program.
#[derive(Debug)]
pub struct TenantMemory(File);

impl TenantMemory {
    /// Takes over an open `/proc/PID/mem`.
    pub fn new(file: OwnedFd) -> TenantMemory {
        TenantMemory(File::from(file))
    }

    /// Copies `buf.len()` bytes from `address`.
    ///
    /// # Errors
    /// `UnexpectedEof` when the memory file is stale; EFAULT when a byte can't be read.
    pub fn read_at(&self, address: u64, buf: &mut [u8]) -> io::Result<()> {
        check_range(address, buf.len())?;
        let mut done = 0;
        while let Some(rest) = buf.get_mut(done..).filter(|rest| !rest.is_empty()) {
            let count = uninterrupted(|| self.0.read_at(rest, address + done as u64)).map_err(fault)?;
            done += advance(count, done)?;
        }
        Ok(())
    }

    /// Copies `buf` to `address`.
    ///
    /// # Errors
    /// As [`TenantMemory::read_at`]; bytes before the one that can't be written may have been.
    pub fn write_at(&self, address: u64, buf: &[u8]) -> io::Result<()> {
        check_range(address, buf.len())?;
        let mut done = 0;
        while let Some(rest) = buf.get(done..).filter(|rest| !rest.is_empty()) {
            let count = uninterrupted(|| self.0.write_at(rest, address + done as u64)).map_err(fault)?;
            done += advance(count, done)?;
        }
        Ok(())
    }
}

fn advance(count: usize, done: usize) -> io::Result<usize> {
    match (count, done) {
        (0, 0) => Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
        (0, _) => Err(error(libc::EFAULT)),
        _ => Ok(count),
    }
}

fn fault(failed: io::Error) -> io::Error {
    // mem_rw answers EIO for what a process's own access would get EFAULT for.
    if failed.raw_os_error() == Some(libc::EIO) { error(libc::EFAULT) } else { failed }
}

fn check_range(address: u64, length: usize) -> io::Result<()> {
    // User addresses are below 2^47 (2^56 with five levels): a file offset can express them all.
    let end = u64::try_from(length).ok().and_then(|length| address.checked_add(length));
    match end.map(i64::try_from) {
        Some(Ok(_)) => Ok(()),
        _ => Err(error(libc::EFAULT)),
    }
}

/// A shared mapping of a file, unmapped on drop.
#[derive(Debug)]
pub struct SharedMapping {
    address: NonNull<libc::c_void>,
    length: usize,
}

// SAFETY: Send needs that another thread may own and drop it: a mapping belongs to the process, not to a
// thread, and nothing is ever read or written through the pointer.
unsafe impl Send for SharedMapping {}
// SAFETY: Sync needs that threads may share references: the methods only read the address and length.
unsafe impl Sync for SharedMapping {}

impl SharedMapping {
    /// Maps `length` bytes of `file` from `offset`.
    ///
    /// # Errors
    /// Those of mmap(2).
    pub fn new(file: BorrowedFd<'_>, offset: u64, length: usize, writable: bool) -> io::Result<Self> {
        let offset = libc::off_t::try_from(offset).map_err(|_| error(libc::EINVAL))?;
        let protection = libc::PROT_READ | if writable { libc::PROT_WRITE } else { 0 };
        // SAFETY: mmap without MAP_FIXED takes any arguments: it touches no mapping that exists.
        let address = unsafe {
            libc::mmap(std::ptr::null_mut(), length, protection, libc::MAP_SHARED, file.as_raw_fd(), offset)
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let address = NonNull::new(address).ok_or_else(|| error(libc::EFAULT))?;
        Ok(SharedMapping { address, length })
    }

    /// Where it lies in this process.
    pub fn address(&self) -> u64 {
        self.address.as_ptr().expose_provenance() as u64
    }

    /// Its length in bytes.
    pub fn length(&self) -> usize {
        self.length
    }
}

impl Drop for SharedMapping {
    fn drop(&mut self) {
        // SAFETY: munmap needs a range that nobody uses any more: it was mapped by `new`, is owned by this
        // value alone, and no reference into it was ever made.
        let result = unsafe { libc::munmap(self.address.as_ptr(), self.length) };
        debug_assert_eq!(result, 0, "munmap of an own mapping failed");
    }
}

fn create_memfd(name: &str, flags: libc::c_uint) -> io::Result<OwnedFd> {
    let name = CString::new(name).map_err(|_| error(libc::EINVAL))?;
    // SAFETY: memfd_create needs a string that ends in NUL: `name` is one and lives on.
    let result = unsafe { libc::memfd_create(name.as_ptr(), flags) };
    new_file(i64::from(result))
}

/// A new, zeroed memory file of `length` bytes that can be sealed.
///
/// # Errors
/// Those of memfd_create(2) and ftruncate(2).
pub fn memfd(name: &str, length: u64) -> io::Result<OwnedFd> {
    let file = create_memfd(name, libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING)?;
    let length = libc::off_t::try_from(length).map_err(|_| error(libc::EINVAL))?;
    // SAFETY: ftruncate touches only the file, which `file` keeps open.
    check(unsafe { libc::ftruncate(file.as_raw_fd(), length) })?;
    Ok(file)
}

/// Forbids any further change of size of a memory file.
///
/// # Errors
/// Those of fcntl(2) with `F_ADD_SEALS`.
pub fn seal_size(file: BorrowedFd<'_>) -> io::Result<()> {
    add_seals(file, libc::F_SEAL_SHRINK | libc::F_SEAL_GROW)
}

fn add_seals(file: BorrowedFd<'_>, seals: libc::c_int) -> io::Result<()> {
    // SAFETY: fcntl with F_ADD_SEALS takes its argument by value and touches no memory.
    check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) }).map(|_| ())
}

/// A copy of the executable at `path` in a memory file that nobody can change any more.
///
/// # Errors
/// Those of reading `path` and of making the file.
pub fn sealed_copy(path: &Path) -> io::Result<OwnedFd> {
    let mut source = File::open(path)?;
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // MFD_EXEC (kernel 6.3) says so where vm.memfd_noexec would otherwise forbid it.
    let file = create_memfd("gpuslice-sandbox", flags | libc::MFD_EXEC)
        .or_else(|_| create_memfd("gpuslice-sandbox", flags))?;
    let mut copy = File::from(file);
    io::copy(&mut source, &mut copy)?;
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_WRITE | libc::F_SEAL_SEAL;
    add_seals(copy.as_fd(), seals)?;
    Ok(OwnedFd::from(copy))
}
