//! A thread's calls, so that a signal never makes the driver act twice.
//!
//! A signal that reaches a thread while its call is served cancels the notification, and the kernel makes the
//! call again when the signal is handled, though the driver has acted. So: while a thread's call is being
//! performed, a later one of the same thread waits; a result that found nobody is kept for a second; a call
//! of the same thread with the same registers, which finds the same bytes wherever the first one read, gets it,
//! once, instead of the driver. The bytes may also be as the result left them, since it may have been written
//! before the reply found nobody. Kept with the thread's cache entry, and so gone when the thread ends or executes a program.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use gpuslice_sys::{Listener, TenantMemory};

use crate::dispatch::Outcome;
use crate::gate::locked;

/// How long a result is kept.
const LIFETIME: Duration = Duration::from_secs(1);
/// How often a waiting call looks whether it was cancelled itself.
const LOOK: Duration = Duration::from_millis(2);
/// Most results kept for one thread: a signal handler's own calls may be among them.
const MOST: usize = 2;

/// The registers of a call: file, command, argument.
pub(crate) type Registers = [u64; 3];

/// Pieces of tenant memory, one after the other.
#[derive(Debug, Default)]
struct Pieces {
    bytes: Vec<u8>,
    /// Address and length of each.
    list: Vec<(u64, usize)>,
}

impl Pieces {
    fn push(&mut self, address: u64, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        self.list.push((address, bytes.len()));
    }

    fn iter(&self) -> impl Iterator<Item = (u64, &[u8])> {
        let mut at = 0;
        self.list.iter().map(move |(address, length)| {
            let piece = self.bytes.get(at..at + length).unwrap_or_default();
            at += length;
            (*address, piece)
        })
    }

    /// One of the pieces has a byte among these.
    fn touch(&self, address: u64, length: usize) -> bool {
        let end =
            |address: u64, length: usize| address.saturating_add(u64::try_from(length).unwrap_or(u64::MAX));
        self.list.iter().any(|(at, size)| *at < end(address, length) && address < end(*at, *size))
    }

    /// Empties it and keeps its buffer, unless that has grown large.
    fn clear(&mut self) {
        const LARGE: usize = 64 * 1024;
        self.bytes.clear();
        self.bytes.shrink_to(LARGE);
        self.list.clear();
    }
}

/// What a call read of tenant memory, and what is to be done when it is answered.
#[derive(Debug, Default)]
pub(crate) struct Trace {
    reads: Pieces,
    writes: Pieces,
    /// Files that replace others in the tenant's table.
    files: Vec<(u32, OwnedFd)>,
}

/// How what was read must be found again.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wanted {
    /// As it was, or as the writes leave it.
    BeforeOrAfter,
    /// As the writes leave it.
    After,
}

impl Trace {
    /// Empties it, to be used again.
    pub(crate) fn clear(&mut self) {
        self.reads.clear();
        self.writes.clear();
        self.files.clear();
    }

    /// Nothing is to be done.
    pub(crate) fn is_empty(&self) -> bool {
        self.writes.list.is_empty() && self.files.is_empty()
    }

    /// Notes a read.
    pub(crate) fn read(&mut self, address: u64, bytes: &[u8]) {
        self.reads.push(address, bytes);
    }

    /// Adds a write, unless it would leave what was read there.
    pub(crate) fn write(&mut self, address: u64, bytes: &[u8]) {
        let unchanged = self.reads.iter().any(|piece| piece == (address, bytes));
        if !unchanged || self.writes.touch(address, bytes.len()) {
            self.writes.push(address, bytes);
        }
    }

    /// Adds a file.
    pub(crate) fn install(&mut self, number: u32, file: OwnedFd) {
        self.files.push((number, file));
    }

    /// Puts the files into the table of the caller of notification `id`.
    ///
    /// # Errors
    /// ENOENT when nobody waits any more; EBADF or EMFILE for a number that can't be.
    pub(crate) fn install_files(&self, listener: &Listener, id: u64) -> io::Result<()> {
        for (number, file) in &self.files {
            listener.add_file(id, file.as_fd(), Some(*number), false)?;
        }
        Ok(())
    }

    /// Performs the writes.
    ///
    /// # Errors
    /// That of the first write that fails; later ones are not tried.
    pub(crate) fn flush(&self, memory: &TenantMemory) -> io::Result<()> {
        self.writes.iter().try_for_each(|(address, bytes)| memory.write_at(address, bytes))
    }

    /// Each piece that was read is there, in one of the states wanted.
    fn finds(&self, memory: &TenantMemory, wanted: Wanted) -> bool {
        self.reads.iter().all(|(address, before)| {
            let mut now = vec![0; before.len()];
            memory.read_at(address, &mut now).is_ok()
                && (now == self.after(address, before) || wanted == Wanted::BeforeOrAfter && now == before)
        })
    }

    /// A piece that was read, as the writes leave it.
    fn after(&self, address: u64, before: &[u8]) -> Vec<u8> {
        let mut after = before.to_vec();
        for (at, bytes) in self.writes.iter() {
            // Of each write, the part that lies in the piece.
            let skipped = usize::try_from(address.saturating_sub(at)).unwrap_or(usize::MAX);
            let offset = usize::try_from(at.saturating_sub(address)).unwrap_or(usize::MAX);
            for (to, from) in after.iter_mut().skip(offset).zip(bytes.iter().skip(skipped)) {
                *to = *from;
            }
        }
        after
    }
}

/// A finished call.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) outcome: Outcome,
    pub(crate) trace: Trace,
}

#[derive(Debug)]
struct Kept {
    registers: Registers,
    finished: Finished,
    at: Instant,
}

impl Kept {
    fn fits(&self, registers: Registers) -> bool {
        self.registers == registers && self.at.elapsed() < LIFETIME
    }
}

/// What became of a call that was begun.
#[derive(Debug)]
pub(crate) enum Answered {
    /// Answered; asking the same again right away may be meant.
    Query,
    /// Answered; the same again right away can only be the same call.
    Final(Finished),
    /// Nobody waited for the answer.
    Nobody(Finished),
    /// It came to nothing: cancelled before it acted, or to be made again.
    Nothing,
}

/// One thread's calls.
#[derive(Debug, Default)]
pub(crate) struct Calls {
    state: Mutex<State>,
    free: Condvar,
}

#[derive(Debug, Default)]
struct State {
    busy: bool,
    waiting: u32,
    kept: Vec<Kept>,
    /// The last call's result, if it was final.
    answered: Option<Kept>,
}

/// How a call begins.
pub(crate) enum Begin {
    /// Perform it.
    Perform,
    /// It was performed: answer this.
    Repeat(Finished),
    /// It was cancelled while it waited for the thread's earlier one.
    Cancelled,
}

impl Calls {
    /// Begins a call; ended by [`Calls::end`] unless it was cancelled.
    pub(crate) fn begin(
        &self,
        registers: Registers,
        memory: &TenantMemory,
        still_waiting: impl Fn() -> bool,
    ) -> Begin {
        let mut state = locked(&self.state);
        while state.busy {
            state.waiting += 1;
            let (next, timeout) = self.free.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner);
            state = next;
            state.waiting -= 1;
            if timeout.timed_out() && !still_waiting() {
                return Begin::Cancelled;
            }
        }
        state.busy = true;
        let answered = state.answered.take().filter(|kept| kept.fits(registers));
        state.kept.retain(|kept| kept.at.elapsed() < LIFETIME);
        let index = state.kept.iter().position(|kept| kept.registers == registers);
        let kept = index.map(|index| state.kept.remove(index));
        drop(state);
        // Without the lock: the reads may block. Nobody else touches this thread's calls: it is busy.
        if let Some(answered) = answered
            && answered.finished.trace.finds(memory, Wanted::After)
        {
            return Begin::Repeat(answered.finished);
        }
        if let Some(kept) = kept {
            if kept.finished.trace.finds(memory, Wanted::BeforeOrAfter) {
                return Begin::Repeat(kept.finished);
            }
            locked(&self.state).kept.push(kept);
        }
        Begin::Perform
    }

    /// Nothing is being performed and nothing kept.
    pub(crate) fn are_idle(&self) -> bool {
        let state = locked(&self.state);
        !state.busy && state.waiting == 0 && state.kept.iter().all(|kept| kept.at.elapsed() >= LIFETIME)
    }

    /// Ends a call that was begun.
    pub(crate) fn end(&self, registers: Registers, answered: Answered) {
        let mut state = locked(&self.state);
        state.busy = false;
        match answered {
            Answered::Nobody(finished) => {
                state.kept.retain(|kept| kept.at.elapsed() < LIFETIME && kept.registers != registers);
                if state.kept.len() >= MOST {
                    state.kept.remove(0);
                }
                state.kept.push(Kept { registers, finished, at: Instant::now() });
            }
            Answered::Final(finished) => {
                state.answered = Some(Kept { registers, finished, at: Instant::now() });
            }
            Answered::Query | Answered::Nothing => {}
        }
        let waited_for = state.waiting > 0;
        drop(state);
        // Waking costs a system call, also when there is nobody.
        if waited_for {
            self.free.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    /// Our own memory, as if it were a tenant's.
    fn memory() -> TenantMemory {
        TenantMemory::new(File::options().read(true).write(true).open("/proc/self/mem").unwrap().into())
    }

    /// A call with these parameters that wrote `written` over them.
    fn finished(parameters: &[u8; 8], written: &[u8; 8]) -> (Registers, Finished) {
        let argument = parameters.as_ptr() as u64;
        let mut trace = Trace::default();
        trace.read(argument, parameters);
        trace.write(argument, written);
        ([3, 0x46, argument], Finished { outcome: Outcome::Return(0), trace })
    }

    fn repeats(calls: &Calls, registers: Registers) -> bool {
        let begun = calls.begin(registers, &memory(), || true);
        calls.end([0; 3], Answered::Nothing);
        matches!(begun, Begin::Repeat(_))
    }

    #[test]
    fn the_same_call_gets_the_result_that_found_nobody_once() {
        let (calls, parameters) = (Calls::default(), Box::new([1; 8]));
        let (registers, result) = finished(&parameters, &[2; 8]);
        assert!(!repeats(&calls, registers));
        calls.end(registers, Answered::Nobody(result));
        assert!(repeats(&calls, registers));
        assert!(!repeats(&calls, registers));
    }

    #[test]
    fn a_result_that_was_written_before_the_reply_failed_is_still_the_same_calls() {
        let (calls, parameters) = (Calls::default(), Box::new([1; 8]));
        let (registers, result) = finished(&parameters, &[2; 8]);
        result.trace.flush(&memory()).unwrap();
        assert_eq!(std::hint::black_box(&*parameters), &[2; 8]);
        calls.end(registers, Answered::Nobody(result));
        assert!(repeats(&calls, registers));
    }

    #[test]
    fn another_call_is_performed_and_leaves_the_result_for_its_own() {
        let (calls, mut parameters) = (Calls::default(), Box::new([1; 8]));
        let (registers, result) = finished(&parameters, &[2; 8]);
        calls.end(registers, Answered::Nobody(result));
        let [file, command, argument] = registers;
        for other in
            [[file + 1, command, argument], [file, command + 1, argument], [file, command, argument + 8]]
        {
            assert!(!repeats(&calls, other));
        }
        *std::hint::black_box(&mut *parameters) = [9; 8];
        assert!(!repeats(&calls, registers), "other bytes: another call");
        *std::hint::black_box(&mut *parameters) = [1; 8];
        assert!(repeats(&calls, registers));
    }

    #[test]
    fn every_byte_that_was_read_decides_also_behind_pointers() {
        let (calls, parameters) = (Calls::default(), Box::new([1; 8]));
        let mut inner = Box::new([5; 8]);
        let (registers, mut result) = finished(&parameters, &[1; 8]);
        result.trace.read(inner.as_ptr() as u64, &*inner);
        calls.end(registers, Answered::Nobody(result));
        *std::hint::black_box(&mut *inner) = [5, 5, 5, 5, 5, 5, 5, 6];
        assert!(!repeats(&calls, registers));
        *std::hint::black_box(&mut *inner) = [5; 8];
        assert!(repeats(&calls, registers));
    }

    #[test]
    fn a_write_that_changes_nothing_is_left_out_unless_an_earlier_one_changed_it() {
        let mut trace = Trace::default();
        trace.read(100, &[1; 8]);
        trace.write(100, &[1; 8]);
        assert!(trace.is_empty());
        trace.write(104, &[2; 4]);
        trace.write(100, &[1; 8]);
        assert_eq!(trace.after(100, &[1; 8]), [1; 8]);
        assert_eq!(trace.writes.list.len(), 2);
        trace.write(108, &[1; 8]);
        assert_eq!(trace.writes.list.len(), 3, "read elsewhere");
    }

    #[test]
    fn writes_that_overlap_a_piece_change_only_their_part() {
        let mut trace = Trace::default();
        trace.write(96, &[1; 6]);
        trace.write(104, &[2; 2]);
        trace.write(107, &[3; 9]);
        trace.write(0, &[4; 100]);
        trace.write(108, &[5; 9]);
        assert_eq!(trace.after(100, &[0; 8]), [1, 1, 0, 0, 2, 2, 0, 3]);
    }

    #[test]
    fn an_answered_allocation_is_repeated_only_to_a_next_call_that_finds_its_result() {
        let (calls, mut parameters) = (Calls::default(), Box::new([1; 8]));
        let (registers, result) = finished(&parameters, &[2; 8]);
        calls.end(registers, Answered::Final(result));
        assert!(!repeats(&calls, registers), "the parameters are set anew: another call");
        let (registers, result) = finished(&parameters, &[2; 8]);
        result.trace.flush(&memory()).unwrap();
        calls.end(registers, Answered::Final(result));
        assert!(repeats(&calls, registers));
        assert!(!repeats(&calls, registers));
        *std::hint::black_box(&mut *parameters) = [1; 8];
        let (registers, result) = finished(&parameters, &[2; 8]);
        result.trace.flush(&memory()).unwrap();
        calls.end(registers, Answered::Final(result));
        assert!(!repeats(&calls, [9; 3]));
        assert!(!repeats(&calls, registers), "not the next call");
    }

    #[test]
    fn a_result_is_kept_for_a_second() {
        let (calls, parameters) = (Calls::default(), Box::new([1; 8]));
        let (registers, result) = finished(&parameters, &[2; 8]);
        calls.end(registers, Answered::Nobody(result));
        locked(&calls.state).kept[0].at = Instant::now().checked_sub(LIFETIME).unwrap();
        assert!(!repeats(&calls, registers));
    }

    #[test]
    fn a_call_waits_for_the_threads_earlier_one_unless_it_is_cancelled() {
        let (calls, parameters) = (Calls::default(), Box::new([1; 8]));
        let (registers, result) = finished(&parameters, &[2; 8]);
        assert!(matches!(calls.begin(registers, &memory(), || true), Begin::Perform));
        assert!(matches!(calls.begin(registers, &memory(), || false), Begin::Cancelled));
        std::thread::scope(|scope| {
            let second =
                scope.spawn(|| matches!(calls.begin(registers, &memory(), || true), Begin::Repeat(_)));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!second.is_finished());
            calls.end(registers, Answered::Nobody(result));
            assert!(second.join().unwrap());
        });
    }
}
