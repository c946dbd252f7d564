//! What is going on in one process: a move of all of it, populations of single threads.
//!
//! Owns: the state between the requests to the shim and its answers. Promises: no move goes on beside another or
//! beside a population (a thread has one tracer); populations of several threads go on side by side; a call is
//! told to restart only while its thread is interrupted.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use gpuslice_proto::MemoryRange;
use nix::errno::Errno;

use crate::gate::locked;
use crate::tenant::PinError;

/// Longest wait for a move or population to begin, and for one that has not begun.
pub(super) const WAIT: Duration = Duration::from_secs(10);
/// How often a waiting call looks whether it was cancelled.
const LOOK: Duration = Duration::from_millis(1);
/// How many results of populations are kept for calls to come again.
const MOST_RESULTS: usize = 64;

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
    /// At most one for each thread.
    populations: Vec<Population>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Moving {
    #[default]
    Idle,
    Asked(MemoryRange),
    Stopping(MemoryRange),
}

#[derive(Clone, Copy, Debug)]
struct Population {
    tid: u32,
    range: MemoryRange,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Asked,
    Stopping,
    /// Kept until the call comes again.
    Done(Result<(), Errno>),
}

/// What a call wants to begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    Move,
    Population,
}

/// What came of it.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Claim {
    /// The caller begins.
    Mine,
    /// Something ended meanwhile: look again.
    Changed,
}

/// What keeps a call from beginning.
enum Obstacle {
    /// It must restart: its thread is interrupted.
    Interrupted,
    /// It must wait for something that has or has not begun.
    Busy { begun: bool },
}

impl State {
    fn obstacle(&self, tid: u32, wanted: Wanted) -> Option<Obstacle> {
        let own = |population: &&Population| population.tid == tid;
        if matches!(self.moving, Moving::Stopping(_))
            || self.populations.iter().filter(own).any(|own| own.stage == Stage::Stopping)
        {
            return Some(Obstacle::Interrupted);
        }
        if matches!(self.moving, Moving::Asked(_)) {
            return Some(Obstacle::Busy { begun: false });
        }
        let in_the_way = |population: &&Population| wanted == Wanted::Move || own(population);
        let mut stages = self.populations.iter().filter(in_the_way).map(|population| population.stage);
        stages
            .find(|stage| !matches!(stage, Stage::Done(_)))
            .map(|stage| Obstacle::Busy { begun: stage == Stage::Stopping })
    }

    fn begin(&mut self, tid: u32, wanted: Wanted, range: MemoryRange) {
        match wanted {
            Wanted::Move => self.moving = Moving::Asked(range),
            Wanted::Population => {
                let full = self.populations.len() >= MOST_RESULTS;
                self.populations
                    .retain(|old| old.tid != tid && !(full && matches!(old.stage, Stage::Done(_))));
                self.populations.push(Population { tid, range, stage: Stage::Asked });
            }
        }
    }
}

impl Pins {
    pub(super) fn claim(
        &self,
        tid: u32,
        wanted: Wanted,
        range: MemoryRange,
        still_waiting: &dyn Fn() -> bool,
    ) -> Result<Claim, PinError> {
        let mut deadline = Instant::now() + WAIT;
        let mut waited = false;
        let mut state = locked(&self.state);
        if wanted == Wanted::Move
            && let Some((_, errno)) = state.failed.take_if(|(failed, _)| *failed == range)
        {
            return Err(PinError::Errno(errno));
        }
        loop {
            match state.obstacle(tid, wanted) {
                None if waited => return Ok(Claim::Changed),
                None => {
                    state.begin(tid, wanted, range);
                    return Ok(Claim::Mine);
                }
                Some(Obstacle::Interrupted) => return Err(PinError::Restart),
                // The shim sees to it that what has begun ends.
                Some(Obstacle::Busy { begun: true }) => deadline = Instant::now() + WAIT,
                Some(Obstacle::Busy { begun: false }) => {}
            }
            if deadline < Instant::now() {
                return Err(PinError::Errno(Errno::EAGAIN));
            }
            waited = true;
            state = self.changed.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner).0;
            if !still_waiting() {
                return Err(PinError::Restart);
            }
        }
    }

    /// Waits until every thread has been interrupted.
    pub(super) fn await_move(&self, still_waiting: &dyn Fn() -> bool) -> Result<(), Errno> {
        self.wait(still_waiting, |state| match state.moving {
            Moving::Stopping(_) => Some(Ok(())),
            // If it is done already, so was the interruption.
            Moving::Idle => Some(state.failed.take().map_or(Ok(()), |(_, errno)| Err(errno))),
            Moving::Asked(_) => None,
        })
    }

    /// Waits until the thread has been interrupted.
    pub(super) fn await_population(&self, tid: u32, still_waiting: &dyn Fn() -> bool) -> Result<(), Errno> {
        self.wait(still_waiting, |state| {
            match state.populations.iter().find(|population| population.tid == tid)?.stage {
                Stage::Asked => None,
                Stage::Stopping => Some(Ok(())),
                Stage::Done(result) => Some(result),
            }
        })
    }

    fn wait(
        &self,
        still_waiting: &dyn Fn() -> bool,
        begun: impl Fn(&mut State) -> Option<Result<(), Errno>>,
    ) -> Result<(), Errno> {
        let deadline = Instant::now() + WAIT;
        let mut state = locked(&self.state);
        loop {
            if let Some(result) = begun(&mut state) {
                return result;
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

    pub(super) fn set(&self, moving: Moving, failed: Option<(MemoryRange, Errno)>) {
        let mut state = locked(&self.state);
        state.moving = moving;
        if failed.is_some() {
            state.failed = failed;
        }
        self.changed.notify_all();
    }

    /// The range that is being moved.
    pub(super) fn range(&self) -> Option<MemoryRange> {
        match locked(&self.state).moving {
            Moving::Idle => None,
            Moving::Asked(range) | Moving::Stopping(range) => Some(range),
        }
    }

    /// Notes how far the thread's population is.
    pub(super) fn set_population(&self, tid: u32, stage: Stage) {
        let mut state = locked(&self.state);
        if let Some(population) = state.populations.iter_mut().find(|population| population.tid == tid) {
            population.stage = stage;
        }
        self.changed.notify_all();
    }

    /// Forgets the thread's population.
    pub(super) fn end_population(&self, tid: u32) {
        locked(&self.state).populations.retain(|population| population.tid != tid);
        self.changed.notify_all();
    }

    /// Takes the result of the thread's population of this range, once.
    pub(super) fn populated(&self, tid: u32, range: MemoryRange) -> Option<Result<(), Errno>> {
        let mut state = locked(&self.state);
        let index = state.populations.iter().position(|found| (found.tid, found.range) == (tid, range))?;
        let Stage::Done(result) = state.populations.get(index)?.stage else { return None };
        state.populations.swap_remove(index);
        Some(result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANGE: MemoryRange = MemoryRange { start: 4096, length: 8192 };

    fn claim(pins: &Pins, still_waiting: bool) -> Result<Claim, PinError> {
        pins.claim(1, Wanted::Move, RANGE, &|| still_waiting)
    }

    fn populate(pins: &Pins, tid: u32) -> Result<Claim, PinError> {
        pins.claim(tid, Wanted::Population, RANGE, &|| true)
    }

    #[test]
    fn one_call_moves_and_others_restart_only_once_all_threads_are_interrupted() {
        let pins = Pins::default();
        assert!(matches!(claim(&pins, true), Ok(Claim::Mine)));
        std::thread::scope(|scope| {
            let others = [scope.spawn(|| claim(&pins, true)), scope.spawn(|| populate(&pins, 2))];
            let mover = scope.spawn(|| pins.await_move(&|| true));
            std::thread::sleep(Duration::from_millis(20));
            assert!(others.iter().all(|other| !other.is_finished()) && !mover.is_finished());
            pins.set(Moving::Stopping(RANGE), None);
            for other in others {
                assert!(matches!(other.join().unwrap(), Err(PinError::Restart)));
            }
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
        assert_eq!(pins.await_move(&|| false), Ok(()));
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

    #[test]
    fn threads_populate_side_by_side_and_only_the_interrupted_one_restarts() {
        let pins = Pins::default();
        assert!(matches!(populate(&pins, 1), Ok(Claim::Mine)));
        pins.set_population(1, Stage::Stopping);
        assert_eq!(pins.await_population(1, &|| true), Ok(()));
        assert!(matches!(populate(&pins, 2), Ok(Claim::Mine)));
        assert!(matches!(populate(&pins, 1), Err(PinError::Restart)));
        assert_eq!(pins.populated(1, RANGE), None, "it is still going on");
    }

    #[test]
    fn a_move_waits_for_the_end_of_other_threads_populations() {
        let pins = Pins::default();
        assert!(matches!(populate(&pins, 2), Ok(Claim::Mine)));
        pins.set_population(2, Stage::Stopping);
        std::thread::scope(|scope| {
            let mover = scope.spawn(|| claim(&pins, true));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!mover.is_finished());
            pins.set_population(2, Stage::Done(Ok(())));
            assert!(matches!(mover.join().unwrap(), Ok(Claim::Changed)));
        });
        assert!(matches!(claim(&pins, true), Ok(Claim::Mine)));
    }

    #[test]
    fn the_result_of_a_population_is_for_the_same_call_and_for_one_time() {
        let pins = Pins::default();
        let other = MemoryRange { start: 0, length: 4096 };
        for result in [Ok(()), Err(Errno::ENOMEM)] {
            assert!(matches!(populate(&pins, 1), Ok(Claim::Mine)));
            pins.set_population(1, Stage::Done(result));
            assert_eq!(pins.populated(2, RANGE), None);
            assert_eq!(pins.populated(1, other), None);
            assert_eq!(pins.populated(1, RANGE), Some(result));
            assert_eq!(pins.populated(1, RANGE), None);
        }
    }

    #[test]
    fn results_that_nobody_comes_for_are_bounded() {
        let pins = Pins::default();
        for tid in 0..10 * u32::try_from(MOST_RESULTS).unwrap() {
            assert!(matches!(populate(&pins, tid), Ok(Claim::Mine)));
            pins.set_population(tid, Stage::Done(Ok(())));
        }
        assert!(locked(&pins.state).populations.len() <= MOST_RESULTS);
    }
}
