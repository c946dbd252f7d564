use super::*;
use crate::interpret::run;
use proptest::prelude::*;

fn instruction(code: u16, jt: u8, jf: u8, k: u32) -> Instruction {
    Instruction { code, jt, jf, k }
}

/// Constants that compares and calls share, so that both branches are taken.
fn constant() -> impl Strategy<Value = u32> {
    prop_oneof![
        prop::sample::select(vec![0, 1, 9, 16, 0x40, 0x100, 512, 0x5413, 0x3000_0001, 0x4000_0000, u32::MAX]),
        (0_u32..32).prop_map(|bit| 1 << bit),
        (0_u32..32).prop_map(|bit| u32::MAX << bit),
        any::<u32>(),
    ]
}

/// One instruction `left` before the end.
fn any_instruction(left: usize) -> impl Strategy<Value = Instruction> {
    let reach = u8::try_from(left.saturating_sub(1).min(12)).unwrap();
    let jump = (
        prop::sample::select(vec![op::JUMP_EQUAL, op::JUMP_GREATER, op::JUMP_AT_LEAST, op::JUMP_ANY_BIT]),
        0..=reach,
        0..=reach,
        constant(),
    );
    prop_oneof![
        4 => (0_u32..16).prop_map(|word| instruction(op::LOAD_WORD, 0, 0, word * 4)),
        2 => constant().prop_map(|k| instruction(op::AND, 0, 0, k)),
        1 => constant().prop_map(|k| instruction(op::LOAD_CONSTANT, 0, 0, k)),
        8 => jump.prop_map(|(code, jt, jf, k)| instruction(code, jt, jf, k)),
        1 => (0..=u32::from(reach)).prop_map(|k| instruction(op::JUMP, 0, 0, k)),
        1 => prop::sample::select(vec![0, 0x7fff_0000, 0x7fc0_0000, 0x5_0001])
            .prop_map(|k| instruction(op::RETURN, 0, 0, k)),
    ]
}

fn any_program() -> impl Strategy<Value = Vec<Instruction>> {
    (2_usize..60).prop_flat_map(|length| {
        let mut parts: Vec<BoxedStrategy<Instruction>> =
            (1..length).rev().map(|left| any_instruction(left).boxed()).collect();
        parts.push(Just(instruction(op::RETURN, 0, 0, 0x7ffc_0000)).boxed());
        parts
    })
}

fn any_call() -> impl Strategy<Value = Call> {
    prop::array::uniform16(constant()).prop_map(|words| Call::from_words(&words))
}

/// Calls whose words come from the program's own constants, where its branches part.
fn near(program: &[Instruction], seed: &Call) -> Call {
    let constants: Vec<u32> = program.iter().map(|i| i.k).collect();
    let pick = |word: u32| {
        constants[usize::try_from(word).unwrap() % constants.len()].wrapping_add(word >> 30).wrapping_sub(1)
    };
    Call::from_words(&seed.words().map(pick))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(debug_assertions) { 400 } else { 100_000 }))]
    #[test]
    fn each_call_is_in_exactly_one_set_and_has_the_result_that_the_interpreter_gives(
        program in any_program(), calls in prop::collection::vec(any_call(), 1..20),
    ) {
        let mut results = Vec::new();
        let outcome = follow(&program, Calls::default(), |set, action| results.push((set, action)));
        prop_assume!(outcome != Err(Unclear::Budget));
        prop_assert_eq!(outcome, Ok(()));
        let more = calls.iter().map(|call| near(&program, call));
        for call in calls.iter().copied().chain(more) {
            let hits: Vec<Action> =
                results.iter().filter(|(set, _)| set.contains(&call)).map(|(_, action)| *action).collect();
            prop_assert_eq!(hits, vec![run(&program, &call)], "{:x?}", call);
        }
        for (set, action) in &results {
            let example = set.example(0, set.word(0)[0]);
            prop_assert!(set.contains(&example));
            prop_assert_eq!(run(&program, &example), *action);
        }
    }
}

#[test]
fn a_comparison_by_size_of_some_bits_is_exact() {
    let mut ends = 0;
    for mask in [u32::MAX, 0xff, 0xff00_00f0, 0, 0x8000_0001] {
        for k in [0, 1, 0x80, 0xff, 0x100, 0x8000_0000, 0x8000_0001, 0xff00_0010, u32::MAX] {
            for code in [op::JUMP_AT_LEAST, op::JUMP_GREATER, op::JUMP_EQUAL, op::JUMP_ANY_BIT] {
                for word in [
                    0,
                    1,
                    2,
                    0x7f,
                    0x80,
                    0x81,
                    0xff,
                    0x100,
                    0x1ff,
                    0x7fff_ffff,
                    0x8000_0000,
                    0xff00_0010,
                    u32::MAX,
                ] {
                    let mut hits = Vec::new();
                    Compare { code, mask, k }.split(Cube::ALL, |cube, holds| {
                        if cube.contains(word.into()) {
                            hits.push(holds);
                        }
                    });
                    assert_eq!(hits, [holds(code, word & mask, k)], "{code:#x} {mask:#x} {k:#x} {word:#x}");
                    ends += 1;
                }
            }
        }
    }
    assert_eq!(ends, 5 * 9 * 4 * 13);
}

#[test]
fn what_cannot_be_followed_is_an_error() {
    let allow = instruction(op::RETURN, 0, 0, 0x7fff_0000);
    for code in [op::LOAD_MEMORY, op::TO_X, op::RETURN_A, 0x04, 0x44, op::JUMP_EQUAL | op::BY_X, 0xffff] {
        let program = [instruction(code, 0, 0, 0), allow];
        assert_eq!(follow(&program, Calls::default(), |_, _| {}), Err(Unclear::Operation { at: 0, code }));
    }
    let over = [instruction(op::JUMP, 0, 0, 1), allow];
    assert_eq!(follow(&over, Calls::default(), |_, _| {}), Err(Unclear::End { length: 2 }));
    let off = [instruction(op::LOAD_WORD, 0, 0, 0)];
    assert_eq!(follow(&off, Calls::default(), |_, _| {}), Err(Unclear::End { length: 1 }));
    assert_eq!(follow(&[], Calls::default(), |_, _| {}), Err(Unclear::End { length: 0 }));
}

#[test]
fn a_program_made_to_multiply_sets_ends_with_an_error_soon() {
    let mut program = Vec::new();
    for bit in 0..32 {
        for word in 4..16 {
            program.push(instruction(op::LOAD_WORD, 0, 0, word * 4));
            program.push(instruction(op::JUMP_ANY_BIT, 0, 1, 1 << bit));
            program.push(instruction(op::JUMP, 0, 0, 0));
        }
    }
    program.push(instruction(op::RETURN, 0, 0, 0));
    let start = std::time::Instant::now();
    assert_eq!(follow(&program, Calls::default(), |_, _| {}), Err(Unclear::Budget));
    assert!(start.elapsed().as_secs() < 5);
}
