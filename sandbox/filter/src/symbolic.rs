//! A filter program run on sets of calls instead of one call.
//!
//! Owns: the sets. Promises: the results given out cover the starting set exactly: each of its calls is in one
//! of them, with the program's own result. Failure: an instruction that can't be followed on sets, or more sets
//! than the budget allows, ends the run with an error; nothing is guessed.

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

/// The sets that one run may make before it gives up: some twenty times what real profiles need.
const BUDGET: usize = 400_000;

/// A set of calls: each word lies in its cube.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Calls([Cube; 16]);

impl Calls {
    /// Every call.
    pub(crate) const ALL: Calls = Calls([Cube::ALL; 16]);

    /// Those of `self` whose word `word` lies in `cube`.
    pub(crate) fn with(mut self, word: usize, cube: Cube) -> Option<Calls> {
        let slot = self.0.get_mut(word)?;
        *slot = slot.intersect(cube)?;
        Some(self)
    }

    pub(crate) fn word(&self, word: usize) -> Cube {
        self.0.get(word).copied().unwrap_or(Cube::ALL)
    }

    /// One of them.
    pub(crate) fn example(&self) -> Call {
        Call::from_words(&self.0.map(|cube| low(cube.value)))
    }

    #[cfg(test)]
    pub(crate) fn contains(&self, call: &Call) -> bool {
        self.0.iter().zip(call.words()).all(|(cube, word)| cube.contains(word.into()))
    }
}

/// Why a program can't be followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unclear {
    #[error("instruction {at} (operation {code:#x}) can't be followed on sets of calls")]
    Operation { at: usize, code: u16 },
    #[error("the program leaves its {length} instructions")]
    End { length: usize },
    #[error("the program makes more than {BUDGET} sets of calls")]
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

#[derive(Clone, Copy)]
struct State {
    a: Value,
    calls: Calls,
}

/// Runs `program` on all calls of `start` and gives each result to `each`, with the calls that it holds for.
pub(crate) fn follow(
    program: &[Instruction],
    start: impl IntoIterator<Item = Calls>,
    mut each: impl FnMut(Calls, Action),
) -> Result<(), Unclear> {
    let mut waiting: Vec<Vec<State>> = Vec::new();
    waiting.resize_with(program.len(), Vec::new);
    let end = Unclear::End { length: program.len() };
    let first = waiting.first_mut().ok_or(end)?;
    first.extend(start.into_iter().map(|calls| State { a: Value::Constant(0), calls }));
    let mut budget = BUDGET;
    let mut here = Vec::new();
    for (at, instruction) in program.iter().enumerate() {
        std::mem::swap(&mut here, waiting.get_mut(at).ok_or(end)?);
        if here.is_empty() {
            continue;
        }
        budget = budget.checked_sub(here.len()).ok_or(Unclear::Budget)?;
        let mut go = |distance: usize, state: State| -> Result<(), Unclear> {
            let target = at.checked_add(1).and_then(|next| next.checked_add(distance)).ok_or(end)?;
            waiting.get_mut(target).ok_or(end)?.push(state);
            Ok(())
        };
        for state in here.drain(..) {
            step(*instruction, at, state, &mut go, &mut each)?;
        }
    }
    Ok(())
}

fn step(
    Instruction { code, jt, jf, k }: Instruction,
    at: usize,
    state: State,
    go: &mut impl FnMut(usize, State) -> Result<(), Unclear>,
    each: &mut impl FnMut(Calls, Action),
) -> Result<(), Unclear> {
    let unclear = Unclear::Operation { at, code };
    let operand = usize::try_from(k).map_err(|_| unclear)?;
    let set = |a: Value| State { a, ..state };
    match code {
        op::LOAD_WORD if k % 4 == 0 && k < 64 => {
            go(0, set(Value::Masked { word: operand / 4, mask: u32::MAX }))
        }
        op::LOAD_CONSTANT => go(0, set(Value::Constant(k))),
        op::AND => go(
            0,
            set(match state.a {
                Value::Constant(value) => Value::Constant(value & k),
                Value::Masked { word, mask } => Value::Masked { word, mask: mask & k },
            }),
        ),
        op::JUMP => go(operand, state),
        op::RETURN => {
            each(state.calls, Action::of(k));
            Ok(())
        }
        op::JUMP_EQUAL | op::JUMP_GREATER | op::JUMP_AT_LEAST | op::JUMP_ANY_BIT => {
            let (yes, no) = (usize::from(jt), usize::from(jf));
            let (word, mask) = match state.a {
                Value::Constant(value) => return go(if holds(code, value, k) { yes } else { no }, state),
                Value::Masked { word, mask } => (word, mask),
            };
            if yes == no {
                return go(yes, state);
            }
            split(
                code,
                mask,
                k,
                state.calls.word(word),
                &mut |cube, holds| match state.calls.with(word, cube) {
                    Some(calls) => go(if holds { yes } else { no }, State { calls, ..state }),
                    None => Ok(()),
                },
            )
        }
        _ => Err(unclear),
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

/// Splits the words of `within` by a comparison of their bits `mask` with `k`, into disjoint cubes.
fn split(
    code: u16,
    mask: u32,
    k: u32,
    within: Cube,
    each: &mut impl FnMut(Cube, bool) -> Result<(), Unclear>,
) -> Result<(), Unclear> {
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

fn split_by(
    within: Cube,
    cube: Cube,
    inside: bool,
    each: &mut impl FnMut(Cube, bool) -> Result<(), Unclear>,
) -> Result<(), Unclear> {
    if let Some(both) = within.intersect(cube) {
        each(both, inside)?;
    }
    let mut result = Ok(());
    within.without(cube, |rest| {
        if result.is_ok() {
            result = each(rest, !inside);
        }
    });
    result
}

/// `word & mask >= k`: bit by bit from the top, as long as the word's bits equal those of `k`.
fn split_by_size(
    mask: u32,
    k: u32,
    within: Cube,
    each: &mut impl FnMut(Cube, bool) -> Result<(), Unclear>,
) -> Result<(), Unclear> {
    let mut equal = within;
    for bit in (0..32).rev().map(|n| 1_u32 << n) {
        let (one, zero) = (Cube::new(bit.into(), bit.into()), Cube::new(bit.into(), 0));
        let wanted = k & bit != 0;
        if mask & bit == 0 {
            // The compared value has a zero here.
            if wanted {
                return each(equal, false);
            }
            continue;
        }
        let (same, other) = if wanted { (one, zero) } else { (zero, one) };
        if let Some(decided) = equal.intersect(other) {
            each(decided, !wanted)?;
        }
        match equal.intersect(same) {
            Some(rest) => equal = rest,
            None => return Ok(()),
        }
    }
    each(equal, true)
}

#[cfg(test)]
mod tests;
