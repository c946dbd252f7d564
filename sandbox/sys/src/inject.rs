//! Moving a range of another process's private memory onto a memory file, for a pinned registration.
//!
//! The calling thread traces every thread of the process and stops it, copies the range, lets thread `tid` map
//! the file over it, and lets all go on. `tid` waits in a trapped call meanwhile, which is made again.
//!
//! | phase | who acts |
//! | --- | --- |
//! | every thread interrupted | `interrupted` is called: now the pending calls may be answered with a restart |
//! | every thread stopped, range copied and mapped | the injected mmap is itself trapped and answered |
//! | `finished` is called with the result | then every thread goes on |
//!
//! [`populate`] has the same phases with thread `tid` alone: the others run on. The thread makes the pages of a
//! range of shared memory, which are charged to its cgroup then.
//!
//! If this process dies meanwhile, so does the traced one. A thread that can't be stopped before the deadline
//! dies with its process as soon as the calling thread ends, so call this from a thread of its own. Copying
//! may block as long as the process's page faults do: a watchdog must kill the process past the deadline.

mod maps;
mod process;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::time::Instant;

use crate::call::error;
use crate::identify::identify;
use crate::memory::{TenantMemory, seal_size};
use maps::Segment;
use process::{Pending, Stopped};

/// What to move.
#[derive(Debug)]
pub struct Move<'a> {
    /// The thread whose trapped call waits for it.
    pub tid: u32,
    /// First address and length, multiples of the page size.
    pub range: (u64, u64),
    /// An empty memory file of that length.
    pub memfd: BorrowedFd<'a>,
    /// Its number in the file table of `tid`; closed there by the move.
    pub tenant_file: u32,
    /// When to give up.
    pub deadline: Instant,
}

/// What to populate.
#[derive(Debug)]
pub struct Populate {
    /// The thread whose trapped call waits for it.
    pub tid: u32,
    /// First address and length, multiples of the page size.
    pub range: (u64, u64),
    /// When to give up.
    pub deadline: Instant,
}

/// Why a range was not moved or populated. The process goes on as before, unless it is said otherwise.
#[derive(Debug)]
pub enum MoveError {
    /// A thread could not be stopped. Those that could not will die.
    Stop(io::Error),
    /// The range could not be copied: a hole, or memory of a kind that can't be moved.
    Copy(io::Error),
    /// The file could not be mapped over the range.
    Map(io::Error),
    /// The thread could not make the range's pages.
    Populate(io::Error),
}

impl MoveError {
    /// The error of the step that failed.
    pub fn cause(&self) -> &io::Error {
        match self {
            MoveError::Stop(cause)
            | MoveError::Copy(cause)
            | MoveError::Map(cause)
            | MoveError::Populate(cause) => cause,
        }
    }
}

impl std::fmt::Display for MoveError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            MoveError::Stop(_) => "stopping the process's threads",
            MoveError::Copy(_) => "copying the range",
            MoveError::Map(_) => "mapping the file over the range",
            MoveError::Populate(_) => "making the range's pages",
        })
    }
}

impl std::error::Error for MoveError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(self.cause())
    }
}

/// Moves the range; see the module's description.
///
/// # Errors
/// Any [`MoveError`]; `finished` has been told.
pub fn move_range(
    wanted: &Move<'_>,
    interrupted: impl FnOnce() -> io::Result<()>,
    finished: impl FnOnce(&Result<(), MoveError>),
) -> Result<(), MoveError> {
    let pending = process::interrupt(wanted.tid, wanted.deadline);
    with_stopped(pending, wanted.deadline, interrupted, finished, |stopped| copy_and_map(stopped, wanted))
}

/// Has thread `tid` make every page of the range; see the module's description. A page that exists stays as it is.
///
/// # Errors
/// [`MoveError::Stop`] or [`MoveError::Populate`]; `finished` has been told.
pub fn populate(
    wanted: &Populate,
    interrupted: impl FnOnce() -> io::Result<()>,
    finished: impl FnOnce(&Result<(), MoveError>),
) -> Result<(), MoveError> {
    let pending = process::interrupt_one(wanted.tid);
    with_stopped(pending, wanted.deadline, interrupted, finished, |stopped| stopped.populate(wanted))
}

fn with_stopped(
    pending: io::Result<Pending>,
    deadline: Instant,
    interrupted: impl FnOnce() -> io::Result<()>,
    finished: impl FnOnce(&Result<(), MoveError>),
    work: impl FnOnce(&mut Stopped) -> Result<(), MoveError>,
) -> Result<(), MoveError> {
    match pending {
        Err(failed) => {
            let result = Err(MoveError::Stop(failed));
            finished(&result);
            result
        }
        Ok(pending) => {
            let mut stopped = None;
            let result = interrupted()
                .and_then(|()| pending.wait(&mut stopped, deadline))
                .map_err(MoveError::Stop)
                .and_then(|()| match &mut stopped {
                    Some(stopped) => work(stopped),
                    None => Err(MoveError::Stop(error(libc::ESRCH))),
                });
            finished(&result);
            if let Some(stopped) = stopped {
                stopped.release();
            }
            result
        }
    }
}

fn copy_and_map(stopped: &mut Stopped, wanted: &Move<'_>) -> Result<(), MoveError> {
    let (start, length) = wanted.range;
    let end = start.checked_add(length).ok_or_else(|| MoveError::Copy(error(libc::EFAULT)))?;
    let segments = maps::segments(wanted.tid, start, end).map_err(MoveError::Copy)?;
    stopped.map(wanted, &segments, || copy(wanted, &segments))
}

/// Bytes copied at a time.
const CHUNK: usize = 256 * 1024;
const PAGE: usize = 4096;

fn copy(wanted: &Move<'_>, segments: &[Segment]) -> io::Result<()> {
    let target = File::from(wanted.memfd.try_clone_to_owned()?);
    // The tenant holds this file too: from here on its size can't change.
    seal_size(wanted.memfd)?;
    if target.metadata()?.len() != wanted.range.1 || !is_memory_file(wanted.memfd)? {
        return Err(error(libc::EINVAL));
    }
    let source = File::options().read(true).open(format!("/proc/{}/mem", wanted.tid))?;
    let source = TenantMemory::new(source.into());
    let mut buffer = vec![0; CHUNK];
    for segment in segments {
        let mut at = segment.start;
        while at < segment.end {
            if Instant::now() >= wanted.deadline {
                return Err(io::Error::from(io::ErrorKind::TimedOut));
            }
            let count = usize::try_from(segment.end - at).unwrap_or(CHUNK).min(CHUNK);
            let part = buffer.get_mut(..count).unwrap_or_default();
            source.read_at(at, part)?;
            write_pages(&target, part, at - wanted.range.0)?;
            at += count as u64;
        }
    }
    Ok(())
}

/// A file of the kernel's internal shmem mount, as memfds are.
fn is_memory_file(file: BorrowedFd<'_>) -> io::Result<bool> {
    let ours = crate::memory::memfd("gpuslice-probe", 0)?;
    Ok(identify(ours.as_fd())?.dev == identify(file)?.dev)
}

/// Writes pages that aren't zero; the file is zero already.
fn write_pages(target: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    let mut at = offset;
    let mut run: Option<(u64, usize, usize)> = None;
    for (index, page) in bytes.chunks(PAGE).enumerate() {
        let from = index * PAGE;
        if page.iter().all(|byte| *byte == 0) {
            write_run(target, bytes, run.take())?;
        } else {
            run = Some(run.map_or((at, from, from + page.len()), |(o, f, _)| (o, f, from + page.len())));
        }
        at += page.len() as u64;
    }
    write_run(target, bytes, run)
}

fn write_run(target: &File, bytes: &[u8], run: Option<(u64, usize, usize)>) -> io::Result<()> {
    match run {
        Some((offset, from, to)) => target.write_all_at(bytes.get(from..to).unwrap_or_default(), offset),
        None => Ok(()),
    }
}
