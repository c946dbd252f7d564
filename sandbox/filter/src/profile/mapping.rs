//! mmap in GPU containers: shared file mappings trapped, all others as the pod's profile has them.
//!
//! Promises: a mapping that the profile denies is denied; a shared file mapping is trapped or denied.

use serde_json::Value;

use super::ProfileError;
use super::rule::{Condition, Effect, Piece, Rule, deny};
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
    let mut pieces = Vec::new();
    let mut early = Vec::new();
    if default.permits() {
        if let Some(rule) = denying.iter().find(|rule| rule.is_unconditional()) {
            pieces.push(Piece { cube: Cube::ALL, others: Vec::new(), effect: rule.effect });
            return Ok(print(pieces));
        }
        pieces.push(Piece { cube: SHARED_FILE, others: Vec::new(), effect: Effect::Notify });
        for rule in denying {
            match rule.on(FLAGS) {
                Some(Condition::In(cube)) if rule.conditions.len() == 1 => deny(&mut pieces, *cube, rule.effect),
                // Compares of earlier arguments are made first.
                None if rule.conditions.iter().all(|(index, _)| *index < FLAGS) => {
                    let others = rule.others(FLAGS);
                    early.push(Piece { cube: Cube::ALL, others, effect: rule.effect });
                }
                _ => return Err(rule.refusal("a denial may compare the flags (argument 3) by SCMP_CMP_EQ or SCMP_CMP_MASKED_EQ alone, or arguments 0 to 2")),
            }
        }
    } else {
        if let (Some(rule), false) = (denying.first(), allowing.is_empty()) {
            return Err(rule.refusal(
                "the profile denies by default and allows the call elsewhere; write what is allowed only",
            ));
        }
        let all = allowing.iter().find(|rule| rule.is_unconditional()).copied();
        for rule in all.map_or(allowing, |rule| vec![rule]) {
            let within = match rule.on(FLAGS) {
                None => Cube::ALL,
                Some(Condition::In(cube)) => *cube,
                Some(_) => {
                    return Err(
                        rule.refusal("the flags must be compared by SCMP_CMP_EQ or SCMP_CMP_MASKED_EQ")
                    );
                }
            };
            let others = OTHERS.iter().map(|cube| (*cube, rule.effect));
            for (cube, effect) in others.chain([(SHARED_FILE, Effect::Notify)]) {
                let Some(cube) = cube.intersect(within) else { continue };
                let piece = Piece { cube, others: rule.others(FLAGS), effect };
                if !pieces.contains(&piece) {
                    pieces.push(piece);
                }
            }
        }
    }
    early.extend(pieces);
    Ok(print(early))
}

fn print(pieces: Vec<Piece>) -> Vec<Value> {
    pieces.into_iter().map(|piece| piece.print(SYSCALL, FLAGS)).collect()
}
