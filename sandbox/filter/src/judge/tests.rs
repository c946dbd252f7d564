use super::*;
use crate::interpret::{low, op, run};

fn instruction(code: u16, jt: u8, jf: u8, k: u32) -> Instruction {
    Instruction { code, jt, jf, k }
}

const ALLOW: u32 = 0x7fff_0000;
const KILL: u32 = 0;
const NOTIFY: u32 = 0x7fc0_0000;
const ERRNO: u32 = 0x5_0019;

fn load(word: u32) -> Instruction {
    instruction(op::LOAD_WORD, 0, 0, word * 4)
}

fn give(value: u32) -> Instruction {
    instruction(op::RETURN, 0, 0, value)
}

/// Native calls only, io_uring, remap_file_pages and shared file mappings refused; `ioctl` decides on ioctl.
fn program(ioctl: &[Instruction]) -> Vec<Instruction> {
    let mut program = vec![
        load(1),
        instruction(op::JUMP_EQUAL, 1, 0, NATIVE_ARCH),
        give(KILL),
        load(0),
        instruction(op::JUMP_AT_LEAST, 0, 1, 0x4000_0000),
        give(KILL),
    ];
    for number in [425, 426, 427, 216] {
        program.extend([instruction(op::JUMP_EQUAL, 0, 1, number), give(ERRNO)]);
    }
    program.extend([
        instruction(op::JUMP_EQUAL, 0, 4, MMAP),
        load(10),
        instruction(op::AND, 0, 0, 0x2d),
        instruction(op::JUMP_EQUAL, 0, 1, 1),
        give(NOTIFY),
        load(0),
        instruction(op::JUMP_EQUAL, 1, 0, IOCTL),
        give(ALLOW),
        load(6),
    ]);
    program.extend_from_slice(ioctl);
    program
}

/// Every number byte of the driver and every raw number, but for `missing`.
fn trap(missing: impl Fn(u32) -> bool) -> Vec<Instruction> {
    let mut code = Vec::new();
    for cube in trapped() {
        let (mask, value) = (u32::try_from(cube.mask).unwrap(), u32::try_from(cube.value).unwrap());
        if !missing(value) {
            code.extend([
                load(6),
                instruction(op::AND, 0, 0, mask),
                instruction(op::JUMP_EQUAL, 0, 1, value),
                give(NOTIFY),
            ]);
        }
    }
    code.push(give(ALLOW));
    code
}

fn hole(program: &[Instruction], kind: Kind) -> Call {
    let found = judge(&[program.to_vec()], kind).unwrap_err();
    let example = found.example().unwrap_or_else(|| panic!("{found}"));
    assert!(run(program, &example).lets_through(), "{found}");
    example
}

#[test]
fn a_program_that_traps_every_number_keeps_all_promises() {
    assert_eq!(judge(&[program(&trap(|_| false))], Kind::Notify), Ok(()));
    assert_eq!(judge(&[program(&trap(|_| false))], Kind::Errno), Ok(()));
}

#[test]
fn no_program_is_a_hole() {
    assert_eq!(judge(&[], Kind::Errno), Err(Hole::NoFilter));
    assert!(matches!(judge(&[Vec::new()], Kind::Errno), Err(Hole::Unclear { .. })));
}

#[test]
fn each_missing_number_is_found_and_named() {
    for cube in trapped() {
        let missing = u32::try_from(cube.value).unwrap();
        let example = hole(&program(&trap(|value| value == missing)), Kind::Notify);
        let command = low(example.args[1]);
        assert!(cube.contains(command.into()) && gpuslice_policy::acts_on(command), "{command:#x}");
    }
}

#[test]
fn one_command_of_four_billion_is_found() {
    for command in [0xdead_be2a, 0x0000_0001, 0x3000_00ff, 0x0000_5454, 0x8927_8927] {
        let mut code = vec![instruction(op::JUMP_EQUAL, 0, 1, command), give(ALLOW)];
        code.extend(trap(|_| false));
        assert_eq!(low(hole(&program(&code), Kind::Notify).args[1]), command);
    }
}

#[test]
fn a_harmless_command_may_be_allowed_but_not_its_neighbours() {
    for harmless in gpuslice_policy::harmless() {
        let mut code = vec![instruction(op::JUMP_EQUAL, 0, 1, *harmless), give(ALLOW)];
        code.extend(trap(|_| false));
        assert_eq!(judge(&[program(&code)], Kind::Notify), Ok(()));
        // The same without looking at bit 31.
        let mut code = vec![
            instruction(op::AND, 0, 0, 0x7fff_ffff),
            instruction(op::JUMP_EQUAL, 0, 1, harmless & 0x7fff_ffff),
            give(ALLOW),
        ];
        code.extend(trap(|_| false));
        assert_eq!(low(hole(&program(&code), Kind::Notify).args[1]), harmless ^ 0x8000_0000);
    }
}

#[test]
fn the_high_half_of_the_command_opens_nothing() {
    // A 64-bit compare: with a bit in the high half everything is allowed.
    let mut code = vec![load(7), instruction(op::JUMP_EQUAL, 1, 0, 0), give(ALLOW)];
    code.extend(trap(|_| false));
    assert_ne!(hole(&program(&code), Kind::Notify).args[1] >> 32, 0);
}

#[test]
fn other_arguments_open_nothing() {
    for word in [4, 5, 8, 15, 2] {
        let mut code = vec![load(word), instruction(op::JUMP_EQUAL, 0, 1, 0x1234_5678), give(ALLOW)];
        code.extend(trap(|_| false));
        hole(&program(&code), Kind::Errno);
    }
}

#[test]
fn log_and_trace_let_a_call_through() {
    for action in [0x7ffc_0000, 0x7ff0_0000] {
        let mut code = vec![instruction(op::JUMP_EQUAL, 0, 1, 0xc020_462a), give(action)];
        code.extend(trap(|_| false));
        assert_eq!(low(hole(&program(&code), Kind::Notify).args[1]), 0xc020_462a);
    }
}

#[test]
fn other_architectures_x32_and_io_uring_are_looked_at() {
    let good = program(&trap(|_| false));
    let patched = |at: usize, k: u32| {
        let mut program = good.clone();
        program[at].k = k;
        program
    };
    assert_ne!(hole(&patched(2, ALLOW), Kind::Errno).arch, NATIVE_ARCH);
    let x32 = hole(&patched(4, 0x4000_0010), Kind::Errno);
    assert!(x32.nr & 0x4000_0000 != 0 && x32.nr < 0x4000_0010, "{x32:x?}");
    assert_eq!(hole(&patched(8, 999), Kind::Errno).nr, 426);
}

#[test]
fn shared_file_mappings_are_looked_at_in_gpu_containers_only() {
    let good = program(&trap(|_| false));
    let compare = good.iter().position(|i| i.code == op::AND && i.k == 0x2d).unwrap();
    let mut narrow = good.clone();
    // MAP_SHARED_VALIDATE forgotten.
    narrow[compare].k = 0x2f;
    let example = hole(&narrow, Kind::Notify);
    assert_eq!((example.nr, example.args[3] & 0x2f), (MMAP, 3));
    assert_eq!(judge(&[narrow], Kind::Errno), Ok(()));
    let mut remap = good;
    let at = remap.iter().position(|i| i.k == REMAP_FILE_PAGES).unwrap();
    remap[at].k = 999;
    assert_eq!(hole(&remap, Kind::Notify).nr, REMAP_FILE_PAGES);
    assert_eq!(judge(&[remap], Kind::Errno), Ok(()));
}

#[test]
fn of_several_programs_one_must_keep_each_promise() {
    let good = program(&trap(|_| false));
    let open = vec![give(ALLOW)];
    let mut no_arch = good.clone();
    no_arch[2].k = ALLOW;
    let no_ioctl = program(&[give(ALLOW)]);
    assert_eq!(judge(&[open.clone(), good], Kind::Notify), Ok(()));
    assert_eq!(judge(&[no_arch.clone(), no_ioctl], Kind::Notify), Ok(()));
    assert!(judge(&[no_arch, open], Kind::Notify).is_err());
}

#[test]
fn a_program_that_cannot_be_followed_keeps_no_promise() {
    let mut code = vec![instruction(0x44, 0, 0, 0)];
    code.extend(trap(|_| false));
    let verdict = judge(&[program(&code)], Kind::Errno).unwrap_err();
    assert!(verdict.to_string().contains("0x44"), "{verdict}");
}
