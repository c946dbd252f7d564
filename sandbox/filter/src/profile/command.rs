//! ioctl: the driver's commands trapped, all others as the pod's profile has them.
//!
//! Promises: a command that the profile denies is denied; one that the driver acts on is trapped or denied.

use serde_json::Value;

use super::rule::{Condition, Effect, LOW, Piece, Rule, deny, print};
use super::{ENOTTY, EPERM, Form, ProfileError};
use crate::cube::Cube;
use crate::dispatch::{Fate, partition, trapped, trapped_around_needed};

const SYSCALL: &str = "ioctl";
/// The argument that holds the command.
const COMMAND: u64 = 1;

/// Our rules for ioctl, from the profile's own.
pub(super) fn rules(own: &[Rule], default: &Effect, form: &Form) -> Result<Vec<Value>, ProfileError> {
    // Runtimes leave out a rule that does what the default does.
    let errno = Effect::Errno(if *default == Effect::Errno(ENOTTY) { EPERM } else { ENOTTY });
    let trap = match form {
        Form::Notify { .. } => Effect::Notify,
        Form::Errno => errno,
    };
    let (allowing, denying): (Vec<&Rule>, Vec<&Rule>) = own.iter().partition(|rule| rule.effect.permits());
    if let Some(rule) = denying.iter().find(|rule| rule.is_unconditional()) {
        if default.permits() {
            let denial = Piece { cube: Cube::ALL, others: Vec::new(), effect: rule.effect };
            return Ok(print(vec![denial], SYSCALL, COMMAND));
        }
        if !allowing.is_empty() {
            return Err(
                rule.refusal("the profile both allows and denies the call; keep one of the two rules")
            );
        }
        return Ok(Vec::new());
    }
    let mut pieces = Vec::new();
    if let Some(rule) = allowing.iter().find(|rule| rule.is_unconditional() && rule.effect != *default) {
        allow(&mut pieces, rule, Cube::ALL, trap);
    } else if default.permits() {
        let cubes = if trap == errno { trapped_around_needed() } else { trapped() };
        pieces.extend(cubes.into_iter().map(|cube| Piece { cube, others: Vec::new(), effect: trap }));
    } else {
        for rule in &allowing {
            allow_part(&mut pieces, rule, allowing.len(), trap, errno)?;
        }
    }
    for rule in denying {
        let effect = if rule.effect == *default { errno } else { rule.effect };
        match rule.on(COMMAND) {
            Some(Condition::In(cube)) if rule.conditions.len() == 1 => deny(&mut pieces, cube, effect),
            _ => return Err(rule.refusal(
                "a denial must compare the command (argument 1) by SCMP_CMP_EQ or SCMP_CMP_MASKED_EQ alone",
            )),
        }
    }
    Ok(print(pieces, SYSCALL, COMMAND))
}

/// What `rule` allows of the commands in `within`, split by fate.
fn allow(pieces: &mut Vec<Piece>, rule: &Rule, within: Cube, trap: Effect) {
    for (cube, fate) in partition() {
        let effect = if fate == Fate::Trap { trap } else { rule.effect };
        let Some(cube) = cube.intersect(within) else { continue };
        // A wider cube that comes to the same set here is never reached.
        let same = |piece: &Piece| piece.cube == cube && piece.others == rule.others(COMMAND);
        if !pieces.iter().any(same) {
            pieces.push(Piece { cube, others: rule.others(COMMAND), effect });
        }
    }
}

fn allow_part(
    pieces: &mut Vec<Piece>,
    rule: &Rule,
    rules: usize,
    trap: Effect,
    errno: Effect,
) -> Result<(), ProfileError> {
    match rule.on(COMMAND) {
        None => allow(pieces, rule, Cube::ALL, trap),
        Some(Condition::In(cube)) => allow(pieces, rule, cube, trap),
        Some(Condition::Not(value)) if rules == 1 && rule.conditions.len() == 1 => {
            allow(pieces, rule, Cube::ALL, trap);
            deny(pieces, Cube::new(LOW, value), errno);
        }
        Some(Condition::Not(_)) => {
            return Err(rule.refusal(
                "SCMP_CMP_NE on the command is understood only where it is the call's one rule and condition",
            ));
        }
        Some(Condition::Order(_)) => {
            return Err(rule
                .refusal("the command must be compared by SCMP_CMP_EQ, SCMP_CMP_MASKED_EQ or SCMP_CMP_NE"));
        }
    }
    Ok(())
}
