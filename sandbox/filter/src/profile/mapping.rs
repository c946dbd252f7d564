//! mmap in GPU containers: shared file mappings trapped, all others as the pod's profile has them.
//!
//! Promises: a mapping that the profile denies is denied; a shared file mapping is trapped or denied.

use serde_json::Value;

use super::ProfileError;
use super::rule::{Condition, Effect, Piece, Rule, compare, deny, print};
use crate::cube::Cube;

const SYSCALL: &str = "mmap";
/// The argument that holds the flags.
const FLAGS: u64 = 3;
/// MAP_SHARED (1) or MAP_SHARED_VALIDATE (3) of the type bits, without MAP_ANONYMOUS (0x20).
pub(crate) const SHARED_FILE: Cube = Cube::new(0x2d, 0x01);

/// Every other mapping; the cubes overlap each other, never [`SHARED_FILE`].
const OTHERS: [Cube; 4] =
    [Cube::new(0x01, 0), Cube::new(0x04, 0x04), Cube::new(0x08, 0x08), Cube::new(0x20, 0x20)];

/// Our rules for mmap, from the profile's own.
pub(super) fn rules(own: &[Rule], default: &Effect) -> Result<Vec<Value>, ProfileError> {
    let (allowing, denying): (Vec<&Rule>, Vec<&Rule>) = own.iter().partition(|rule| rule.effect.permits());
    let pieces =
        if let Some(rule) = allowing.iter().find(|rule| rule.effect != *default && rule.is_unconditional()) {
            if let (Some(denial), false) = (denying.first(), default.permits()) {
                return Err(denial.refusal(BOTH));
            }
            let mut pieces = Vec::new();
            allow(&mut pieces, rule, Cube::ALL);
            deny_all(pieces, &denying)?
        } else if default.permits() {
            deny_all(vec![Piece { cube: SHARED_FILE, others: Vec::new(), effect: Effect::Notify }], &denying)?
        } else {
            if let (Some(rule), false) = (denying.first(), allowing.is_empty()) {
                return Err(rule.refusal(BOTH));
            }
            let mut pieces = Vec::new();
            for rule in allowing {
                match rule.on(FLAGS) {
                    None => allow(&mut pieces, rule, Cube::ALL),
                    Some(Condition::In(cube)) => allow(&mut pieces, rule, cube),
                    Some(_) => {
                        return Err(
                            rule.refusal("the flags must be compared by SCMP_CMP_EQ or SCMP_CMP_MASKED_EQ")
                        );
                    }
                }
            }
            pieces
        };
    Ok(print(pieces, SYSCALL, FLAGS))
}

const BOTH: &str = "the profile denies by default and allows the call elsewhere; write what is allowed only";

/// What `rule` allows of the mappings in `within`: shared file mappings trapped.
fn allow(pieces: &mut Vec<Piece>, rule: &Rule, within: Cube) {
    let others = OTHERS.iter().map(|cube| (*cube, rule.effect));
    for (cube, effect) in others.chain([(SHARED_FILE, Effect::Notify)]) {
        let Some(cube) = cube.intersect(within) else { continue };
        let piece = Piece { cube, others: rule.others(FLAGS), effect };
        if !pieces.contains(&piece) {
            pieces.push(piece);
        }
    }
}

/// Adds what the profile denies. A denial by the protection or the length would be compared after the trap: there
/// the trap gets the opposite condition.
fn deny_all(mut pieces: Vec<Piece>, denying: &[&Rule]) -> Result<Vec<Piece>, ProfileError> {
    let mut early = Vec::new();
    let mut late: Vec<Vec<(u64, Cube)>> = vec![Vec::new()];
    for rule in denying {
        let whole = Piece { cube: Cube::ALL, others: rule.others(FLAGS), effect: rule.effect };
        match (rule.on(FLAGS), rule.conditions.as_slice()) {
            (_, []) => return Ok(vec![whole]),
            (Some(Condition::In(cube)), [_]) => deny(&mut pieces, cube, rule.effect),
            // Compared before the flags.
            (None, conditions) if conditions.iter().all(|(index, _)| *index > FLAGS) => early.push(whole),
            (None, [(index, Condition::In(cube))]) => {
                late = late.iter().flat_map(|conditions| opposite(conditions, *index, *cube)).collect();
                early.push(whole);
            }
            _ => return Err(rule.refusal(DENIAL)),
        }
        if late.len() > 100 {
            return Err(rule
                .refusal("too many denials by address, length and protection; use fewer and coarser ones"));
        }
    }
    for piece in pieces {
        for conditions in &late {
            let others = conditions.iter().map(|(index, cube)| compare(*index, *cube));
            early.push(Piece {
                others: piece.others.iter().cloned().chain(others).collect(),
                ..piece.clone()
            });
        }
    }
    Ok(early)
}

const DENIAL: &str = "a denial may compare one of the arguments 0 to 3 by SCMP_CMP_EQ or SCMP_CMP_MASKED_EQ, or arguments 4 and 5 alone";

/// `conditions` and the opposite of "argument `index` is in `cube`", one for each bit that may differ.
fn opposite(conditions: &[(u64, Cube)], index: u64, cube: Cube) -> Vec<Vec<(u64, Cube)>> {
    let bits = (0..64).map(|n| 1 << n).filter(|bit| cube.mask & bit != 0);
    let flipped = bits.map(|bit| Cube::new(bit, !cube.value));
    flipped
        .filter_map(|flipped| {
            let mut conditions = conditions.to_vec();
            match conditions.iter_mut().find(|(other, _)| *other == index) {
                Some((_, there)) => *there = there.intersect(flipped)?,
                None => conditions.push((index, flipped)),
            }
            Some(conditions)
        })
        .collect()
}
