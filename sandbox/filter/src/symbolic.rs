//! A filter program run on sets of calls instead of one call.
//!
//! Owns: the sets. Promises: the results given out cover the starting set exactly: each of its calls is in one
//! of them, with the program's own result. Failure: an instruction that can't be followed on sets, or more sets
//! than the budget allows, ends the run with an error; nothing is guessed.

use std::rc::Rc;

use gpuslice_sys::Instruction;

use crate::cube::Cube;
use crate::interpret::{Action, Call, low, op};

/// Which of a call's 16 words is which.
pub(crate) const NR: usize = 0;
pub(crate) const ARCH: usize = 1;

/// The word that holds the low half of an argument.
pub(crate) const fn low_word(argument: usize) -> usize {
    4 + 2 * argument
}

/// The sets that one run may make before it gives up: far more than real profiles need.
const BUDGET: usize = 100_000;
/// The same for the cubes that all sets together are made of.
const CUBES: usize = 4_000_000;

/// A set of words: the union of its cubes. None: every word.
type Words = Option<Rc<[Cube]>>;

/// A set of calls: all combinations of one word of each of 16 sets.
#[derive(Clone, Debug, Default)]
pub(crate) struct Calls([Words; 16]);

impl Calls {
    /// Those of `self` whose word `word` lies in one of `cubes`. Must be the first limit on that word.
    pub(crate) fn with(mut self, word: usize, cubes: Vec<Cube>) -> Calls {
        if let Some(slot) = self.0.get_mut(word) {
            debug_assert!(slot.is_none());
            *slot = Some(cubes.into());
        }
        self
    }

    /// The values that a word takes.
    pub(crate) fn word(&self, word: usize) -> &[Cube] {
        self.0.get(word).and_then(Option::as_deref).unwrap_or(&[Cube::ALL])
    }

    /// Takes in the calls of `other` if that changes one word only.
    fn join(&mut self, other: &Calls) -> bool {
        let differs = |(ours, theirs): &(&mut Words, &Words)| match (ours, theirs) {
            (Some(ours), Some(theirs)) => !Rc::ptr_eq(ours, theirs) && ours != theirs,
            (None, None) => false,
            _ => true,
        };
        let mut differing = self.0.iter_mut().zip(&other.0).filter(differs);
        match (differing.next(), differing.next()) {
            (Some((Some(ours), Some(theirs))), None) => {
                *ours = ours.iter().chain(theirs.iter()).copied().collect();
                true
            }
            _ => false,
        }
    }

    /// One of them, with a given value of one word.
    pub(crate) fn example(&self, word: usize, value: Cube) -> Call {
        let mut words = [0; 16];
        for (at, slot) in words.iter_mut().enumerate() {
            let cube = if at == word { Some(&value) } else { self.word(at).first() };
            *slot = cube.map_or(0, |cube| low(cube.value));
        }
        Call::from_words(&words)
    }

    #[cfg(test)]
    pub(crate) fn contains(&self, call: &Call) -> bool {
        let words = call.words();
        (0..16).all(|at| self.word(at).iter().any(|cube| cube.contains(words[at].into())))
    }
}

/// Why a program can't be followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unclear {
    #[error("instruction {at} (operation {code:#x}) can't be followed on sets of calls")]
    Operation { at: usize, code: u16 },
    #[error("the program leaves its {length} instructions")]
    End { length: usize },
    #[error("the program splits the calls into more than {BUDGET} sets, or {CUBES} parts")]
    Budget,
}

/// What the accumulator holds.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Value {
    Constant(u32),
    /// Some bits of a word of the call.
    Masked {
        word: usize,
        mask: u32,
    },
}

struct State {
    a: Value,
    calls: Calls,
}

/// Runs `program` on all calls of `start` and gives each result to `each`, with the calls that it holds for.
pub(crate) fn follow(
    program: &[Instruction],
    start: Calls,
    mut each: impl FnMut(Calls, Action),
) -> Result<(), Unclear> {
    let mut run = Run { waiting: Vec::new(), sets: BUDGET, cubes: CUBES };
    run.waiting.resize_with(program.len(), Vec::new);
    run.go(0, State { a: Value::Constant(0), calls: start })?;
    for (at, instruction) in program.iter().enumerate() {
        for state in joined(run.waiting.get_mut(at).map(std::mem::take).unwrap_or_default()) {
            run.step(*instruction, at, state, &mut each)?;
        }
    }
    Ok(())
}

/// Joins sets that differ in one word only: the two sides of a compare that doesn't matter any more.
fn joined(states: Vec<State>) -> Vec<State> {
    /// How many sets back to look for one to join.
    const NEAR: usize = 16;
    if states.len() < 2 {
        return states;
    }
    let mut joined: Vec<State> = Vec::with_capacity(states.len());
    for state in states {
        let near = joined.iter_mut().rev().take(NEAR);
        if !near.into_iter().any(|other| other.a == state.a && other.calls.join(&state.calls)) {
            joined.push(state);
        }
    }
    joined
}

struct Run {
    /// The sets that have come to each instruction.
    waiting: Vec<Vec<State>>,
    sets: usize,
    cubes: usize,
}

impl Run {
    fn go(&mut self, target: usize, state: State) -> Result<(), Unclear> {
        let end = Unclear::End { length: self.waiting.len() };
        self.sets = self.sets.checked_sub(1).ok_or(Unclear::Budget)?;
        self.waiting.get_mut(target).ok_or(end)?.push(state);
        Ok(())
    }

    fn step(
        &mut self,
        Instruction { code, jt, jf, k }: Instruction,
        at: usize,
        mut state: State,
        each: &mut impl FnMut(Calls, Action),
    ) -> Result<(), Unclear> {
        let unclear = Unclear::Operation { at, code };
        let operand = usize::try_from(k).map_err(|_| unclear)?;
        // Far below the end of the address space: a program has at most 65535 instructions.
        let next = at + 1;
        match code {
            op::LOAD_WORD if k % 4 == 0 && k < 64 => {
                state.a = Value::Masked { word: operand / 4, mask: u32::MAX };
                self.go(next, state)
            }
            op::LOAD_CONSTANT => {
                state.a = Value::Constant(k);
                self.go(next, state)
            }
            op::AND => {
                state.a = match state.a {
                    Value::Constant(value) => Value::Constant(value & k),
                    Value::Masked { word, mask } => Value::Masked { word, mask: mask & k },
                };
                self.go(next, state)
            }
            op::JUMP => self.go(next.checked_add(operand).ok_or(unclear)?, state),
            op::RETURN => {
                each(state.calls, Action::of(k));
                Ok(())
            }
            op::JUMP_EQUAL | op::JUMP_GREATER | op::JUMP_AT_LEAST | op::JUMP_ANY_BIT => {
                let (yes, no) = (next + usize::from(jt), next + usize::from(jf));
                match state.a {
                    Value::Constant(value) => self.go(if holds(code, value, k) { yes } else { no }, state),
                    Value::Masked { .. } if yes == no => self.go(yes, state),
                    Value::Masked { word, mask } => {
                        self.branch(Compare { code, mask, k }, word, state, yes, no)
                    }
                }
            }
            _ => Err(unclear),
        }
    }

    fn branch(
        &mut self,
        compare: Compare,
        word: usize,
        state: State,
        yes: usize,
        no: usize,
    ) -> Result<(), Unclear> {
        let (mut inside, mut outside) = (Vec::new(), Vec::new());
        for cube in state.calls.word(word) {
            compare.split(*cube, |part, holds| if holds { inside.push(part) } else { outside.push(part) });
        }
        self.cubes = self.cubes.checked_sub(inside.len() + outside.len()).ok_or(Unclear::Budget)?;
        if outside.is_empty() {
            return self.go(yes, state);
        }
        if inside.is_empty() {
            return self.go(no, state);
        }
        for (target, cubes) in [(yes, inside), (no, outside)] {
            let mut calls = state.calls.clone();
            if let Some(slot) = calls.0.get_mut(word) {
                *slot = Some(cubes.into());
            }
            self.go(target, State { a: state.a, calls })?;
        }
        Ok(())
    }
}

fn holds(code: u16, value: u32, k: u32) -> bool {
    match code {
        op::JUMP_EQUAL => value == k,
        op::JUMP_GREATER => value > k,
        op::JUMP_AT_LEAST => value >= k,
        _ => value & k != 0,
    }
}

/// A comparison of some bits of a word with a constant.
#[derive(Clone, Copy)]
struct Compare {
    code: u16,
    mask: u32,
    k: u32,
}

impl Compare {
    /// Splits the words of `within` into disjoint cubes for which it holds or not.
    fn split(self, within: Cube, mut each: impl FnMut(Cube, bool)) {
        let Compare { code, mask, k } = self;
        match code {
            op::JUMP_EQUAL if k & !mask != 0 => each(within, false),
            op::JUMP_EQUAL => split_by(within, Cube::new(mask.into(), k.into()), true, each),
            op::JUMP_ANY_BIT => split_by(within, Cube::new((mask & k).into(), 0), false, each),
            op::JUMP_GREATER => match k.checked_add(1) {
                Some(k) => split_by_size(mask, k, within, each),
                None => each(within, false),
            },
            _ => split_by_size(mask, k, within, each),
        }
    }
}

fn split_by(within: Cube, cube: Cube, inside: bool, mut each: impl FnMut(Cube, bool)) {
    if let Some(both) = within.intersect(cube) {
        each(both, inside);
    }
    within.without(cube, |rest| each(rest, !inside));
}

/// `word & mask >= k`: bit by bit from the top, as long as the word's bits equal those of `k`.
fn split_by_size(mask: u32, k: u32, within: Cube, mut each: impl FnMut(Cube, bool)) {
    let mut equal = within;
    for bit in (0..32).rev().map(|n| 1_u32 << n) {
        let wanted = k & bit != 0;
        if mask & bit == 0 {
            // The compared value has a zero here.
            if wanted {
                return each(equal, false);
            }
            continue;
        }
        let (one, zero) = (Cube::new(bit.into(), bit.into()), Cube::new(bit.into(), 0));
        let (same, other) = if wanted { (one, zero) } else { (zero, one) };
        if let Some(decided) = equal.intersect(other) {
            each(decided, !wanted);
        }
        match equal.intersect(same) {
            Some(rest) => equal = rest,
            None => return,
        }
    }
    each(equal, true);
}

#[cfg(test)]
mod tests;
