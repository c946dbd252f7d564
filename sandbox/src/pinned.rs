//! Tenant memory that the driver is to pin: shared with the sandbox, which registers its own mapping of it.
//!
//! Owns: the way of one range to a mapping. Trusts: the shim's answers. A range that is a shared file mapping
//! already is mapped through the file that the shim passes; if pages are absent, the calling thread makes them
//! first: the driver's pinning would make them in our mapping and charge them to the sandbox. A private one is
//! moved onto a memory file of ours first, for which every thread of the process stops. For both, the shim
//! interrupts, answers `Stopping`, does it, and answers once more before the interrupted go on ([`state`]):
//!
//! | state | a call that needs a move, or of a thread that populates |
//! | --- | --- |
//! | idle | asks for it |
//! | asked | waits: its thread may not be interrupted yet, so a restart would reach the program as a number |
//! | stopping | is answered with a restart: its thread is interrupted |
//!
//! Without `WAIT_KILLABLE_RECV` the interruption itself cancels the pending calls: a wait ends then too.
//!
//! The call comes again when its thread goes on, and finds its range shared and populated. That the shim's last
//! answer is known by then is certain: it was sent before the thread went on, and the call asks the shim again on
//! the same socket before it looks at the state. A range is populated once for a call, whatever becomes of its
//! pages then. Failure: the error number of the failed step, once.

mod state;

use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, Weak};

use gpuslice_proto::{MOST_PINNED, MemoryRange, PrivilegedRequest, PrivilegedResult};
use gpuslice_sys::{Listener, SharedMapping, memory};
use nix::errno::Errno;

use crate::closer::Closer;
use crate::gate::locked;
use crate::link::{LinkError, Shim};
use crate::log;
use crate::tenant::{PinError, Pinned};
use crate::threads::Process;
pub(crate) use state::Pins;
use state::{Claim, Moving, Stage, WAIT, Wanted};

const PAGE: u64 = 4096;

/// Moves and populations that the shim has been asked for, and every mapping made.
#[derive(Debug, Default)]
pub(crate) struct Moves {
    asked: Mutex<Vec<Asked>>,
    mappings: Mutex<Vec<Weak<SharedMapping>>>,
}

#[derive(Debug)]
struct Asked {
    request: u32,
    process: Weak<Process>,
    /// The thread that populates; `None` for a move.
    populates: Option<u32>,
}

/// The call that needs a range.
pub(crate) struct PinCall<'a> {
    pub(crate) shim: &'a Shim,
    pub(crate) moves: &'a Moves,
    pub(crate) closer: &'a Closer,
    pub(crate) listener: &'a Listener,
    pub(crate) id: u64,
    pub(crate) tid: u32,
    pub(crate) process: &'a Arc<Process>,
}

/// What a range was found to be.
enum Found {
    Mapped(Arc<SharedMapping>),
    /// Shared, with pages that perhaps nobody made yet.
    Absent,
    Private,
}

fn errno(failed: &std::io::Error) -> Errno {
    failed.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}

fn late(failed: &LinkError) -> Errno {
    log::line(format_args!("pinned memory: asking the shim failed: {failed}"));
    Errno::EIO
}

/// The pages that hold a range, and the offset of its first byte in them.
fn pages(address: u64, length: u64) -> Option<(MemoryRange, u64)> {
    let start = address / PAGE * PAGE;
    let end = address.checked_add(length)?.checked_next_multiple_of(PAGE)?;
    (length > 0).then_some((MemoryRange { start, length: end - start }, address - start))
}

/// Keeps living mappings; fails if there is no room for another one of this length.
fn make_room(mappings: &mut Vec<Weak<SharedMapping>>, length: u64) -> Result<(), Errno> {
    mappings.retain(|mapping| mapping.strong_count() > 0);
    let used: u64 = mappings.iter().filter_map(Weak::upgrade).map(|mapping| mapping.length() as u64).sum();
    if used.saturating_add(length) > MOST_PINNED { Err(Errno::ENOMEM) } else { Ok(()) }
}

impl PinCall<'_> {
    /// Shares the range, or begins to.
    pub(crate) fn pin(&self, address: u64, length: u64) -> Result<Pinned, PinError> {
        let (range, offset) = pages(address, length).ok_or(PinError::Errno(Errno::EINVAL))?;
        for _ in 0..3 {
            let wanted = match self.find(range).map_err(PinError::Errno)? {
                Found::Mapped(mapping) => {
                    return Ok(Pinned { address: mapping.address() + offset, keep: mapping });
                }
                Found::Absent => Wanted::Population,
                Found::Private => Wanted::Move,
            };
            match self.process.pins.claim(self.tid, wanted, range, &|| self.listener.is_valid(self.id))? {
                Claim::Mine => return Err(self.begin(wanted, range)),
                Claim::Changed => {}
            }
        }
        Err(PinError::Errno(Errno::EAGAIN))
    }

    /// Maps the range if it is shared and populated.
    fn find(&self, range: MemoryRange) -> Result<Found, Errno> {
        let ask = PrivilegedRequest::SharedRange { tid: self.tid, range };
        let request = self.shim.ask(ask, &[]).map_err(|failed| late(&failed))?;
        match request.answer(WAIT).map_err(|failed| late(&failed))? {
            (PrivilegedResult::Private, _) => Ok(Found::Private),
            (PrivilegedResult::Shared { offset, absent }, files) => {
                let file = files.into_iter().next().ok_or(Errno::EIO)?;
                let found = match (self.process.pins.populated(self.tid, range), absent) {
                    (Some(Err(errno)), true) => Err(errno),
                    (None, true) => Ok(Found::Absent),
                    (Some(Ok(())), true) | (_, false) => self.map(&file, offset, range).map(Found::Mapped),
                };
                self.closer.close(file);
                found
            }
            (PrivilegedResult::Failed { errno, .. }, _) => Err(Errno::from_raw(errno)),
            (other, _) => {
                log::line(format_args!("pinned memory: the shim answered {other:?}"));
                Err(Errno::EIO)
            }
        }
    }

    fn map(&self, file: &impl AsFd, offset: u64, range: MemoryRange) -> Result<Arc<SharedMapping>, Errno> {
        let length = usize::try_from(range.length).map_err(|_| Errno::ENOMEM)?;
        let mut mappings = locked(&self.moves.mappings);
        make_room(&mut mappings, range.length)?;
        let mapping = SharedMapping::new(file.as_fd(), offset, length, true)
            .or_else(|_| SharedMapping::new(file.as_fd(), offset, length, false))
            .map_err(|failed| errno(&failed))?;
        let mapping = Arc::new(mapping);
        mappings.push(Arc::downgrade(&mapping));
        Ok(mapping)
    }

    /// Asks for it and waits until it has begun. The claim is given back if it doesn't.
    fn begin(&self, wanted: Wanted, range: MemoryRange) -> PinError {
        let begun = match wanted {
            Wanted::Move => self.ask_move(range),
            Wanted::Population => self.ask_population(range),
        };
        let Err(errno) = begun else { return PinError::Restart };
        match wanted {
            Wanted::Move => self.process.pins.set(Moving::Idle, None),
            Wanted::Population => self.process.pins.end_population(self.tid),
        }
        PinError::Errno(errno)
    }

    fn ask_move(&self, range: MemoryRange) -> Result<(), Errno> {
        let file = memory::memfd("gpuslice-pinned", range.length).map_err(|failed| errno(&failed))?;
        let number =
            self.listener.add_file(self.id, file.as_fd(), None, false).map_err(|failed| errno(&failed))?;
        let ask = PrivilegedRequest::MoveRange { tid: self.tid, range, tenant_file: number };
        self.send(ask, &[file.as_fd()], None)?;
        self.process.pins.await_move(&|| self.listener.is_valid(self.id))
    }

    fn ask_population(&self, range: MemoryRange) -> Result<(), Errno> {
        make_room(&mut locked(&self.moves.mappings), range.length)?;
        self.send(PrivilegedRequest::PopulateRange { tid: self.tid, range }, &[], Some(self.tid))?;
        self.process.pins.await_population(self.tid, &|| self.listener.is_valid(self.id))
    }

    fn send(
        &self,
        ask: PrivilegedRequest,
        files: &[std::os::fd::BorrowedFd<'_>],
        populates: Option<u32>,
    ) -> Result<(), Errno> {
        let request = self.shim.request();
        let number = request.number();
        // Known before it is sent: the answer may come at once.
        let asked = Asked { request: number, process: Arc::downgrade(self.process), populates };
        locked(&self.moves.asked).push(asked);
        request.send(ask, files).map_err(|failed| {
            locked(&self.moves.asked).retain(|asked| asked.request != number);
            late(&failed)
        })
    }
}

impl Moves {
    /// Takes an answer that belongs to a move or a population; false if it doesn't.
    pub(crate) fn deliver(&self, request: u32, result: &PrivilegedResult) -> bool {
        let mut asked = locked(&self.asked);
        let Some(index) = asked.iter().position(|asked| asked.request == request) else { return false };
        let Some(Asked { process, populates, .. }) = asked.get(index) else { return false };
        let (process, populates) = (process.upgrade(), *populates);
        if !matches!(result, PrivilegedResult::Stopping) {
            asked.swap_remove(index);
        }
        drop(asked);
        let Some(process) = process else { return true };
        match populates {
            Some(tid) => populating(&process, tid, result),
            None => moving(&process, result),
        }
        true
    }
}

fn populating(process: &Process, tid: u32, result: &PrivilegedResult) {
    let stage = match result {
        PrivilegedResult::Stopping => Stage::Stopping,
        PrivilegedResult::Populated => Stage::Done(Ok(())),
        other => Stage::Done(Err(failure(other, "populating a range"))),
    };
    process.pins.set_population(tid, stage);
}

fn moving(process: &Process, result: &PrivilegedResult) {
    let Some(range) = process.pins.range() else { return };
    match result {
        PrivilegedResult::Stopping => process.pins.set(Moving::Stopping(range), None),
        PrivilegedResult::Moved => process.pins.set(Moving::Idle, None),
        other => process.pins.set(Moving::Idle, Some((range, failure(other, "moving a range")))),
    }
}

fn failure(result: &PrivilegedResult, what: &str) -> Errno {
    match result {
        PrivilegedResult::Failed { errno, detail } => {
            log::line(format_args!("pinned memory: {what} failed: {detail}"));
            Errno::from_raw(*errno)
        }
        other => {
            log::line(format_args!("pinned memory: the shim answered {other:?}"));
            Errno::EIO
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_whole_pages_around_its_bytes() {
        let range = |start, length| Some(MemoryRange { start, length });
        assert_eq!(pages(8192, 4096).map(|found| found.0), range(8192, 4096));
        assert_eq!(pages(8190, 4), Some((MemoryRange { start: 4096, length: 8192 }, 4094)));
        assert_eq!(pages(8192, 0), None);
        assert_eq!(pages(u64::MAX - 10, 100), None);
        assert_eq!(pages(u64::MAX - 100, 50), None);
    }
}
