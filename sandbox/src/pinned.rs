//! Tenant memory that the driver is to pin: shared with the sandbox, which registers its own mapping of it.
//!
//! Owns: the state of one move for each process. Trusts: the shim's answers. A range that is a shared file
//! mapping already is mapped through the file that the shim passes. A private one is moved first: the shim
//! interrupts every thread of the process, answers `Stopping`, moves the range onto a memory file of ours, and
//! answers once more before the threads go on.
//!
//! | state | a call of the process that needs a move |
//! | --- | --- |
//! | idle | asks for it |
//! | asked | waits: its thread may not be interrupted yet, so a restart would reach the program as a number |
//! | stopping | is answered with a restart: every thread of the process is interrupted |
//!
//! Without `WAIT_KILLABLE_RECV` the interruption itself cancels the pending calls: a wait ends then too.
//!
//! The call comes again when the threads go on, and finds its range shared. That the shim's last answer is
//! known by then is certain: it was sent before the threads went on, and the call asks the shim again on the
//! same socket before it looks at the state. Failure: the error number of the move's failed step, once.

use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use gpuslice_proto::{MemoryRange, PrivilegedRequest, PrivilegedResult};
use gpuslice_sys::{Listener, SharedMapping, memory};
use nix::errno::Errno;

use crate::closer::Closer;
use crate::confine::LARGEST_FILE;
use crate::gate::locked;
use crate::link::{LinkError, Shim};
use crate::log;
use crate::tenant::{PinError, Pinned};
use crate::threads::Process;

const PAGE: u64 = 4096;
/// Longest wait for the shim's answer and for a move to begin.
const WAIT: Duration = Duration::from_secs(10);
/// How often a waiting call looks whether it was cancelled.
const LOOK: Duration = Duration::from_millis(1);
/// Most bytes shared with the container at a time.
const MOST_BYTES: u64 = LARGEST_FILE;

/// What is going on in one process.
#[derive(Debug, Default)]
pub(crate) struct Pins {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    moving: Moving,
    failed: Option<(MemoryRange, Errno)>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Moving {
    #[default]
    Idle,
    Asked(MemoryRange),
    Stopping(MemoryRange),
}

/// Moves that the shim has been asked for, and every mapping made.
#[derive(Debug, Default)]
pub(crate) struct Moves {
    asked: Mutex<Vec<(u32, Weak<Process>)>>,
    mappings: Mutex<Vec<Weak<SharedMapping>>>,
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

impl PinCall<'_> {
    /// Shares the range, or begins to.
    pub(crate) fn pin(&self, address: u64, length: u64) -> Result<Pinned, PinError> {
        let (range, offset) = pages(address, length).ok_or(PinError::Errno(Errno::EINVAL))?;
        for _ in 0..3 {
            if let Some(mapping) = self.shared(range).map_err(PinError::Errno)? {
                self.touch(range).map_err(PinError::Errno)?;
                return Ok(Pinned { address: mapping.address() + offset, keep: mapping });
            }
            match self.process.pins.claim(range, &|| self.listener.is_valid(self.id))? {
                Claim::Mine => return Err(self.begin_move(range)),
                Claim::Changed => {}
            }
        }
        Err(PinError::Errno(Errno::EAGAIN))
    }

    /// Maps the range if it is shared; `None` if it is private.
    fn shared(&self, range: MemoryRange) -> Result<Option<Arc<SharedMapping>>, Errno> {
        let ask = PrivilegedRequest::SharedRange { tid: self.tid, range };
        let request = self.shim.ask(ask, &[]).map_err(|failed| late(&failed))?;
        match request.answer(WAIT).map_err(|failed| late(&failed))? {
            (PrivilegedResult::Private, _) => Ok(None),
            (PrivilegedResult::Shared { offset }, files) => {
                let file = files.into_iter().next().ok_or(Errno::EIO)?;
                let mapping = self.map(&file, offset, range);
                self.closer.close(file);
                mapping.map(Some)
            }
            (PrivilegedResult::Failed { errno, .. }, _) => Err(Errno::from_raw(errno)),
            (other, _) => {
                log::line(format_args!("pinned memory: the shim answered {other:?}"));
                Err(Errno::EIO)
            }
        }
    }

    /// Looks at each page where the tenant has it. A page that nobody touched yet comes into being there and is
    /// charged to the container; the driver's pinning would make it in our mapping and charge it to the sandbox.
    fn touch(&self, range: MemoryRange) -> Result<(), Errno> {
        let mut byte = [0];
        let mut at = range.start;
        while at < range.start.saturating_add(range.length) {
            self.process.memory().read_at(at, &mut byte).map_err(|failed| errno(&failed))?;
            at = at.saturating_add(PAGE);
        }
        Ok(())
    }

    fn map(&self, file: &impl AsFd, offset: u64, range: MemoryRange) -> Result<Arc<SharedMapping>, Errno> {
        let length = usize::try_from(range.length).map_err(|_| Errno::ENOMEM)?;
        let mut mappings = locked(&self.moves.mappings);
        mappings.retain(|mapping| mapping.strong_count() > 0);
        let used: u64 =
            mappings.iter().filter_map(Weak::upgrade).map(|mapping| mapping.length() as u64).sum();
        if used.saturating_add(range.length) > MOST_BYTES {
            return Err(Errno::ENOMEM);
        }
        let mapping = SharedMapping::new(file.as_fd(), offset, length, true)
            .or_else(|_| SharedMapping::new(file.as_fd(), offset, length, false))
            .map_err(|failed| errno(&failed))?;
        let mapping = Arc::new(mapping);
        mappings.push(Arc::downgrade(&mapping));
        Ok(mapping)
    }

    /// Asks for the move and waits until it has begun. The claim is given back if it doesn't.
    fn begin_move(&self, range: MemoryRange) -> PinError {
        match self.ask_move(range) {
            Ok(()) => PinError::Restart,
            Err(errno) => {
                self.process.pins.set(Moving::Idle, None);
                PinError::Errno(errno)
            }
        }
    }

    fn ask_move(&self, range: MemoryRange) -> Result<(), Errno> {
        let file = memory::memfd("gpuslice-pinned", range.length).map_err(|failed| errno(&failed))?;
        let number =
            self.listener.add_file(self.id, file.as_fd(), None, false).map_err(|failed| errno(&failed))?;
        let ask = PrivilegedRequest::MoveRange { tid: self.tid, range, tenant_file: number };
        let request = self.shim.request();
        // Known before it is sent: the answer may come at once.
        locked(&self.moves.asked).push((request.number(), Arc::downgrade(self.process)));
        if let Err(failed) = request.send(ask, &[file.as_fd()]) {
            locked(&self.moves.asked).retain(|(number, _)| *number != request.number());
            return Err(late(&failed));
        }
        self.process.pins.await_beginning(&|| self.listener.is_valid(self.id))
    }
}

/// What came of asking to move.
enum Claim {
    /// The caller moves the range.
    Mine,
    /// A move ended meanwhile: look again.
    Changed,
}

impl Pins {
    fn claim(&self, range: MemoryRange, still_waiting: &dyn Fn() -> bool) -> Result<Claim, PinError> {
        let deadline = Instant::now() + WAIT;
        let mut state = locked(&self.state);
        if let Some((_, errno)) = state.failed.take_if(|(failed, _)| *failed == range) {
            return Err(PinError::Errno(errno));
        }
        match state.moving {
            Moving::Idle => {
                state.moving = Moving::Asked(range);
                return Ok(Claim::Mine);
            }
            Moving::Stopping(_) => return Err(PinError::Restart),
            Moving::Asked(_) => {}
        }
        while let Moving::Asked(_) = state.moving {
            if deadline < Instant::now() {
                return Err(PinError::Errno(Errno::EAGAIN));
            }
            state = self.changed.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner).0;
            if !still_waiting() {
                return Err(PinError::Restart);
            }
        }
        if matches!(state.moving, Moving::Stopping(_)) { Err(PinError::Restart) } else { Ok(Claim::Changed) }
    }

    /// Waits until the threads have been interrupted.
    fn await_beginning(&self, still_waiting: &dyn Fn() -> bool) -> Result<(), Errno> {
        let deadline = Instant::now() + WAIT;
        let mut state = locked(&self.state);
        loop {
            match state.moving {
                Moving::Stopping(_) => return Ok(()),
                Moving::Idle => match state.failed.take() {
                    Some((_, errno)) => return Err(errno),
                    // Done already, and so was the interruption.
                    None => return Ok(()),
                },
                Moving::Asked(_) => {}
            }
            if deadline < Instant::now() {
                return Err(Errno::EIO);
            }
            state = self.changed.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner).0;
            if !still_waiting() {
                return Ok(());
            }
        }
    }

    fn set(&self, moving: Moving, failed: Option<(MemoryRange, Errno)>) {
        let mut state = locked(&self.state);
        state.moving = moving;
        if failed.is_some() {
            state.failed = failed;
        }
        self.changed.notify_all();
    }

    fn range(&self) -> Option<MemoryRange> {
        match locked(&self.state).moving {
            Moving::Idle => None,
            Moving::Asked(range) | Moving::Stopping(range) => Some(range),
        }
    }
}

impl Moves {
    /// Takes an answer that belongs to a move; false if it doesn't.
    pub(crate) fn deliver(&self, request: u32, result: &PrivilegedResult) -> bool {
        let mut asked = locked(&self.asked);
        let Some(index) = asked.iter().position(|(number, _)| *number == request) else { return false };
        let process = asked.get(index).and_then(|(_, process)| process.upgrade());
        let begun = matches!(result, PrivilegedResult::Stopping);
        if !begun {
            asked.swap_remove(index);
        }
        drop(asked);
        let Some(process) = process else { return true };
        let Some(range) = process.pins.range() else { return true };
        match result {
            PrivilegedResult::Stopping => process.pins.set(Moving::Stopping(range), None),
            PrivilegedResult::Moved => process.pins.set(Moving::Idle, None),
            PrivilegedResult::Failed { errno, detail } => {
                log::line(format_args!("moving {} bytes of pinned memory failed: {detail}", range.length));
                process.pins.set(Moving::Idle, Some((range, Errno::from_raw(*errno))));
            }
            other => {
                log::line(format_args!("pinned memory: the shim answered {other:?}"));
                process.pins.set(Moving::Idle, Some((range, Errno::EIO)));
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANGE: MemoryRange = MemoryRange { start: 4096, length: 8192 };

    fn claim(pins: &Pins, still_waiting: bool) -> Result<Claim, PinError> {
        pins.claim(RANGE, &|| still_waiting)
    }

    #[test]
    fn a_range_is_whole_pages_around_its_bytes() {
        let range = |start, length| Some(MemoryRange { start, length });
        assert_eq!(pages(8192, 4096).map(|found| found.0), range(8192, 4096));
        assert_eq!(pages(8190, 4), Some((MemoryRange { start: 4096, length: 8192 }, 4094)));
        assert_eq!(pages(8192, 0), None);
        assert_eq!(pages(u64::MAX - 10, 100), None);
        assert_eq!(pages(u64::MAX - 100, 50), None);
    }

    #[test]
    fn one_call_moves_and_others_restart_only_once_all_threads_are_interrupted() {
        let pins = Pins::default();
        assert!(matches!(claim(&pins, true), Ok(Claim::Mine)));
        std::thread::scope(|scope| {
            let other = scope.spawn(|| claim(&pins, true));
            let mover = scope.spawn(|| pins.await_beginning(&|| true));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!other.is_finished() && !mover.is_finished());
            pins.set(Moving::Stopping(RANGE), None);
            assert!(matches!(other.join().unwrap(), Err(PinError::Restart)));
            assert_eq!(mover.join().unwrap(), Ok(()));
        });
        assert!(matches!(claim(&pins, true), Err(PinError::Restart)));
        pins.set(Moving::Idle, None);
        assert!(matches!(claim(&pins, true), Ok(Claim::Mine)));
    }

    #[test]
    fn a_cancelled_call_waits_for_nothing() {
        let pins = Pins::default();
        assert!(matches!(claim(&pins, true), Ok(Claim::Mine)));
        assert!(matches!(claim(&pins, false), Err(PinError::Restart)));
        assert_eq!(pins.await_beginning(&|| false), Ok(()));
    }

    #[test]
    fn a_failed_move_is_an_error_once_and_then_tried_again() {
        let pins = Pins::default();
        assert!(matches!(claim(&pins, true), Ok(Claim::Mine)));
        pins.set(Moving::Stopping(RANGE), None);
        pins.set(Moving::Idle, Some((RANGE, Errno::EFAULT)));
        assert!(matches!(claim(&pins, true), Err(PinError::Errno(Errno::EFAULT))));
        assert!(matches!(claim(&pins, true), Ok(Claim::Mine)));
    }
}
