//! A small assembler: calls and the tests on their arguments to a program.
//!
//! Promises: what no case names ends the process; jumps never overflow their eight bits.

use gpuslice_sys::Instruction;

use crate::interpret::{NATIVE_ARCH, op};
use crate::symbolic::{ARCH, NR, low_word};

const KILL_PROCESS: u32 = 0x8000_0000;
const ALLOW: u32 = 0x7fff_0000;

/// What to do for one value: code that ends in a return whatever happens.
pub(super) struct Case {
    value: u32,
    body: Vec<Instruction>,
}

impl Case {
    pub(super) fn new(value: u32, body: Vec<Instruction>) -> Case {
        Case { value, body }
    }
}

/// A test on the low half of an argument.
pub(super) enum Test {
    Equals(u32),
    AnyOf(u32),
    NoneOf(u32),
}

fn op(code: u16, jt: u8, jf: u8, k: u32) -> Instruction {
    Instruction { code, jt, jf, k }
}

fn load(word: usize) -> Instruction {
    // A call has 16 words.
    op(op::LOAD_WORD, 0, 0, u32::try_from(word * 4).unwrap_or(u32::MAX))
}

fn give(value: u32) -> Instruction {
    op(op::RETURN, 0, 0, value)
}

/// Allowed.
pub(super) fn any() -> Vec<Instruction> {
    vec![give(ALLOW)]
}

/// Allowed if the test on `argument` holds.
pub(super) fn when(argument: usize, test: Test) -> Vec<Instruction> {
    let (code, k, yes) = match test {
        Test::Equals(value) => (op::JUMP_EQUAL, value, true),
        Test::AnyOf(bits) => (op::JUMP_ANY_BIT, bits, true),
        Test::NoneOf(bits) => (op::JUMP_ANY_BIT, bits, false),
    };
    let (first, second) = if yes { (ALLOW, KILL_PROCESS) } else { (KILL_PROCESS, ALLOW) };
    vec![load(low_word(argument)), op(code, 0, 1, k), give(first), give(second)]
}

/// Allowed if one of the cases for `argument` allows it.
pub(super) fn cases(argument: usize, cases: Vec<Case>) -> Vec<Instruction> {
    let mut code = vec![load(low_word(argument))];
    code.extend(search(&sorted(cases)));
    code
}

/// The whole program: the machine's own architecture only, then the case for the call's number. Numbers with
/// the x32 bit match no case.
pub(super) fn program(calls: Vec<Case>) -> Vec<Instruction> {
    let mut code = vec![load(ARCH), op(op::JUMP_EQUAL, 1, 0, NATIVE_ARCH), give(KILL_PROCESS), load(NR)];
    code.extend(search(&sorted(calls)));
    code
}

fn sorted(mut cases: Vec<Case>) -> Vec<Case> {
    cases.sort_by_key(|case| case.value);
    cases.dedup_by_key(|case| case.value);
    cases
}

/// A binary search for the accumulator's value.
fn search(cases: &[Case]) -> Vec<Instruction> {
    let (left, right) = cases.split_at(cases.len() / 2);
    let Some(first) = right.first() else { return vec![give(KILL_PROCESS)] };
    if left.is_empty() {
        let mut code = vec![op(op::JUMP_EQUAL, 1, 0, first.value), give(KILL_PROCESS)];
        code.extend_from_slice(&first.body);
        return code;
    }
    let lower = search(left);
    // A jump of 32 bits over the lower half: a conditional one reaches 255 instructions only.
    let distance = u32::try_from(lower.len()).unwrap_or(u32::MAX);
    let mut code = vec![op(op::JUMP_AT_LEAST, 0, 1, first.value), op(op::JUMP, 0, 0, distance)];
    code.extend(lower);
    code.extend(search(right));
    code
}
