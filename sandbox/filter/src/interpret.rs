//! A classic BPF interpreter for the subset that the kernel accepts in seccomp filters.
//!
//! Promises: the kernel's result for every program that the kernel accepts; for any other program, or one that
//! runs out of its instructions, [`Action::KillProcess`].

use gpuslice_sys::Instruction;

/// `AUDIT_ARCH_X86_64`.
pub(crate) const NATIVE_ARCH: u32 = 0xc000_003e;

/// The system call that a filter judges (`struct seccomp_data`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// System call number.
    pub nr: u32,
    /// `AUDIT_ARCH_*`.
    pub arch: u32,
    /// Address of the instruction that made it.
    pub instruction_pointer: u64,
    /// All six arguments, as the registers hold them.
    pub args: [u64; 6],
}

impl Call {
    /// A call of this machine's own architecture.
    pub fn native(nr: u32, args: [u64; 6]) -> Call {
        Call { nr, arch: NATIVE_ARCH, instruction_pointer: 0, args }
    }

    /// The call as the 16 words that a program loads.
    pub(crate) fn words(&self) -> [u32; 16] {
        let mut words = [0; 16];
        let wide = [self.instruction_pointer].into_iter().chain(self.args);
        let halves = wide.flat_map(|value| [low(value), low(value >> 32)]);
        for (word, value) in words.iter_mut().zip([self.nr, self.arch].into_iter().chain(halves)) {
            *word = value;
        }
        words
    }

    /// The reverse of [`Call::words`].
    pub(crate) fn from_words(words: &[u32; 16]) -> Call {
        let [nr, arch, rest @ ..] = words;
        let mut wide = rest.chunks_exact(2).map(|pair| match pair {
            [low, high] => u64::from(*low) | u64::from(*high) << 32,
            _ => 0,
        });
        let instruction_pointer = wide.next().unwrap_or(0);
        let mut args = [0; 6];
        for (arg, value) in args.iter_mut().zip(wide) {
            *arg = value;
        }
        Call { nr: *nr, arch: *arch, instruction_pointer, args }
    }
}

/// The low half.
pub(crate) fn low(value: u64) -> u32 {
    let [a, b, c, d, ..] = value.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}

/// What a filter does with a call, strictest first: of several filters the strictest counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Action {
    /// The process dies; also the kernel's answer to a value that it doesn't know.
    KillProcess,
    /// The thread dies.
    KillThread,
    /// SIGSYS.
    Trap,
    /// The call fails with an errno.
    Errno,
    /// The listener decides.
    Notify,
    /// The tracer decides.
    Trace,
    /// Performed and logged.
    Log,
    /// Performed.
    Allow,
}

impl Action {
    /// The action that a program's return value names.
    pub fn of(value: u32) -> Action {
        match value & 0xffff_0000 {
            0x0000_0000 => Action::KillThread,
            0x0003_0000 => Action::Trap,
            0x0005_0000 => Action::Errno,
            0x7fc0_0000 => Action::Notify,
            0x7ff0_0000 => Action::Trace,
            0x7ffc_0000 => Action::Log,
            0x7fff_0000 => Action::Allow,
            _ => Action::KillProcess,
        }
    }

    /// The call may be performed without the sandbox.
    pub(crate) fn lets_through(self) -> bool {
        matches!(self, Action::Trace | Action::Log | Action::Allow)
    }
}

/// Operation codes (`linux/bpf_common.h`), whole.
pub(crate) mod op {
    pub(crate) const LOAD_WORD: u16 = 0x20;
    pub(crate) const LOAD_LENGTH: u16 = 0x80;
    pub(crate) const LOAD_LENGTH_X: u16 = 0x81;
    pub(crate) const LOAD_CONSTANT: u16 = 0x00;
    pub(crate) const LOAD_CONSTANT_X: u16 = 0x01;
    pub(crate) const LOAD_MEMORY: u16 = 0x60;
    pub(crate) const LOAD_MEMORY_X: u16 = 0x61;
    pub(crate) const STORE: u16 = 0x02;
    pub(crate) const STORE_X: u16 = 0x03;
    pub(crate) const TO_X: u16 = 0x07;
    pub(crate) const FROM_X: u16 = 0x87;
    pub(crate) const RETURN: u16 = 0x06;
    pub(crate) const RETURN_A: u16 = 0x16;
    pub(crate) const JUMP: u16 = 0x05;
    pub(crate) const JUMP_EQUAL: u16 = 0x15;
    pub(crate) const JUMP_GREATER: u16 = 0x25;
    pub(crate) const JUMP_AT_LEAST: u16 = 0x35;
    pub(crate) const JUMP_ANY_BIT: u16 = 0x45;
    pub(crate) const AND: u16 = 0x54;
    pub(crate) const NEGATE: u16 = 0x84;
    /// With the operand in X instead of the instruction.
    pub(crate) const BY_X: u16 = 0x08;
}

/// Runs one program.
pub fn run(program: &[Instruction], call: &Call) -> Action {
    result(program, &call.words()).map_or(Action::KillProcess, Action::of)
}

fn result(program: &[Instruction], words: &[u32; 16]) -> Option<u32> {
    let (mut a, mut x, mut memory) = (0_u32, 0_u32, [0_u32; 16]);
    let mut at = 0_usize;
    loop {
        let Instruction { code, jt, jf, k } = *program.get(at)?;
        at = at.checked_add(1)?;
        let index = usize::try_from(k).ok()?;
        match code {
            op::LOAD_WORD if k % 4 == 0 => a = *words.get(index / 4)?,
            op::LOAD_LENGTH => a = 64,
            op::LOAD_LENGTH_X => x = 64,
            op::LOAD_CONSTANT => a = k,
            op::LOAD_CONSTANT_X => x = k,
            op::LOAD_MEMORY => a = *memory.get(index)?,
            op::LOAD_MEMORY_X => x = *memory.get(index)?,
            op::STORE => *memory.get_mut(index)? = a,
            op::STORE_X => *memory.get_mut(index)? = x,
            op::TO_X => x = a,
            op::FROM_X => a = x,
            op::RETURN => return Some(k),
            op::RETURN_A => return Some(a),
            op::JUMP => at = at.checked_add(index)?,
            op::NEGATE => a = a.wrapping_neg(),
            _ => {
                let operand = if code & op::BY_X == 0 { k } else { x };
                match code & !op::BY_X {
                    op::JUMP_EQUAL => at += distance(a == operand, jt, jf),
                    op::JUMP_GREATER => at += distance(a > operand, jt, jf),
                    op::JUMP_AT_LEAST => at += distance(a >= operand, jt, jf),
                    op::JUMP_ANY_BIT => at += distance(a & operand != 0, jt, jf),
                    other => match arithmetic(other, a, operand)? {
                        Some(value) => a = value,
                        // The kernel ends a program that divides by zero with 0.
                        None => return Some(0),
                    },
                }
            }
        }
    }
}

fn distance(holds: bool, jt: u8, jf: u8) -> usize {
    usize::from(if holds { jt } else { jf })
}

/// None: no such operation. Some(None): division by zero.
fn arithmetic(code: u16, a: u32, operand: u32) -> Option<Option<u32>> {
    Some(match code {
        0x04 => Some(a.wrapping_add(operand)),
        0x14 => Some(a.wrapping_sub(operand)),
        0x24 => Some(a.wrapping_mul(operand)),
        0x34 => a.checked_div(operand),
        0x44 => Some(a | operand),
        op::AND => Some(a & operand),
        0x64 => Some(a.wrapping_shl(operand)),
        0x74 => Some(a.wrapping_shr(operand)),
        0xa4 => Some(a ^ operand),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn op(code: u16, jt: u8, jf: u8, k: u32) -> Instruction {
        Instruction { code, jt, jf, k }
    }

    #[test]
    fn words_of_a_call_lie_where_the_kernel_puts_them() {
        let call = Call {
            nr: 1,
            arch: 2,
            instruction_pointer: 0x4_0000_0003,
            args: [0x6_0000_0005, 0, 0, 0, 0, 0x10_0000_000f],
        };
        assert_eq!(call.words(), [1, 2, 3, 4, 5, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0xf, 0x10]);
        assert_eq!(Call::from_words(&call.words()), call);
    }

    #[test]
    fn a_program_that_runs_off_its_end_or_uses_an_unknown_operation_kills() {
        let call = Call::native(0, [0; 6]);
        assert_eq!(run(&[], &call), Action::KillProcess);
        assert_eq!(
            run(&[op(op::JUMP, 0, 0, 7), op(op::RETURN, 0, 0, 0x7fff_0000)], &call),
            Action::KillProcess
        );
        assert_eq!(run(&[op(0x28, 0, 0, 0), op(op::RETURN, 0, 0, 0x7fff_0000)], &call), Action::KillProcess);
        assert_eq!(
            run(&[op(op::LOAD_WORD, 0, 0, 64), op(op::RETURN, 0, 0, 0x7fff_0000)], &call),
            Action::KillProcess
        );
    }

    #[test]
    fn actions_are_ordered_as_the_kernel_orders_them() {
        let values =
            [0x8000_0000_u32, 0, 0x3_0000, 0x5_0001, 0x7fc0_0000, 0x7ff0_0000, 0x7ffc_0000, 0x7fff_0000];
        let actions: Vec<Action> = values.iter().map(|value| Action::of(*value)).collect();
        assert!(actions.windows(2).all(|pair| pair[0] < pair[1]), "{actions:?}");
    }

    #[test]
    fn arithmetic_and_memory_work() {
        let program = [
            op(op::LOAD_WORD, 0, 0, 24),
            op(op::AND, 0, 0, 0xff),
            op(op::STORE, 0, 0, 3),
            op(op::LOAD_CONSTANT_X, 0, 0, 2),
            op(0x6c, 0, 0, 0),
            op(0x04, 0, 0, 1),
            op(op::TO_X, 0, 0, 0),
            op(op::LOAD_MEMORY, 0, 0, 3),
            op(op::JUMP_EQUAL | op::BY_X, 0, 1, 0),
            op(op::RETURN, 0, 0, 0x7fff_0000),
            op(op::RETURN, 0, 0, 0x5_0000),
        ];
        // (cmd & 0xff) << 2 + 1 == cmd & 0xff never holds.
        assert_eq!(run(&program, &Call::native(16, [0, 0x42a, 0, 0, 0, 0])), Action::Errno);
    }
}
