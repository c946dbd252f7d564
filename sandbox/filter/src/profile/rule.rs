//! One rule of a profile: what it does, under which conditions on the arguments.
//!
//! Owns: parsing and printing. Promises: a rule that is not understood whole is an error.

use serde_json::{Map, Value, json};

use super::{EPERM, ProfileError, malformed, refuse_look_alikes, shortened};
use crate::cube::Cube;

/// The fields of a rule.
pub(super) const FIELDS: [&str; 4] = ["names", "action", "errnoRet", "args"];
/// The fields of a condition.
const CONDITION_FIELDS: [&str; 4] = ["index", "value", "valueTwo", "op"];

/// The low half of an argument.
pub(super) const LOW: u64 = 0xffff_ffff;

/// What a rule does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    Allow,
    Log,
    Trace,
    Errno(u64),
    Kill,
    KillProcess,
    KillThread,
    Trap,
    Notify,
}

impl Effect {
    /// None: not an action that a profile may hold.
    pub(super) fn parse(action: &Value, errno: Option<&Value>) -> Option<Effect> {
        Some(match action.as_str()? {
            "SCMP_ACT_ALLOW" => Effect::Allow,
            "SCMP_ACT_LOG" => Effect::Log,
            "SCMP_ACT_TRACE" => Effect::Trace,
            "SCMP_ACT_ERRNO" => match errno {
                None | Some(Value::Null) => Effect::Errno(EPERM),
                Some(value) => Effect::Errno(value.as_u64()?),
            },
            "SCMP_ACT_KILL" => Effect::Kill,
            "SCMP_ACT_KILL_PROCESS" => Effect::KillProcess,
            "SCMP_ACT_KILL_THREAD" => Effect::KillThread,
            "SCMP_ACT_TRAP" => Effect::Trap,
            _ => return None,
        })
    }

    /// The call is performed.
    pub(super) fn permits(self) -> bool {
        matches!(self, Effect::Allow | Effect::Log)
    }

    const fn name(self) -> &'static str {
        match self {
            Effect::Allow => "SCMP_ACT_ALLOW",
            Effect::Log => "SCMP_ACT_LOG",
            Effect::Trace => "SCMP_ACT_TRACE",
            Effect::Errno(_) => "SCMP_ACT_ERRNO",
            Effect::Kill => "SCMP_ACT_KILL",
            Effect::KillProcess => "SCMP_ACT_KILL_PROCESS",
            Effect::KillThread => "SCMP_ACT_KILL_THREAD",
            Effect::Trap => "SCMP_ACT_TRAP",
            Effect::Notify => "SCMP_ACT_NOTIFY",
        }
    }
}

/// A condition on one argument.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Condition {
    /// The argument is in the cube.
    In(Cube),
    /// The argument is not this value.
    Not(u64),
    /// A comparison by size.
    Order(Value),
}

/// A rule of the pod's profile for one system call.
#[derive(Clone, Debug)]
pub(super) struct Rule {
    pub(super) effect: Effect,
    /// Argument numbers, at most one condition each.
    pub(super) conditions: Vec<(u64, Condition)>,
    syscall: &'static str,
    text: String,
    args: Vec<Value>,
}

impl Rule {
    pub(super) fn parse(
        syscall: &'static str,
        entry: &Value,
        fields: &Map<String, Value>,
    ) -> Result<Rule, ProfileError> {
        let action = fields.get("action").unwrap_or(&Value::Null);
        let effect = Effect::parse(action, fields.get("errnoRet"))
            .ok_or_else(|| malformed("action of a rule", action, "an OCI seccomp action"))?;
        let args = match fields.get("args") {
            None | Some(Value::Null) => &[],
            Some(Value::Array(args)) => args.as_slice(),
            Some(other) => return Err(malformed("args of a rule", other, "a list of objects")),
        };
        let mut rule = Rule {
            effect,
            conditions: Vec::with_capacity(args.len()),
            syscall,
            text: shortened(entry),
            args: args.to_vec(),
        };
        if effect == Effect::Trace {
            return Err(rule.refusal("it hands the call to a tracer, which would escape the trap"));
        }
        for arg in args {
            refuse_look_alikes(arg.as_object().unwrap_or(&Map::new()), &CONDITION_FIELDS)?;
            let (index, condition) = condition(arg).ok_or_else(|| {
                malformed("args of a rule", arg, "index 0 to 5, a number and an SCMP_CMP_ operator")
            })?;
            if rule.conditions.iter().any(|(other, _)| *other == index) {
                return Err(rule.refusal(
                    "runtimes disagree on two conditions on one argument (all or any); write one condition per argument and rule",
                ));
            }
            rule.conditions.push((index, condition));
        }
        Ok(rule)
    }

    pub(super) fn is_unconditional(&self) -> bool {
        self.conditions.is_empty()
    }

    /// The condition on argument `index`, which must be one of which only the low half means something to the
    /// kernel: only the low half is compared. That lets through no command or flag that wasn't allowed, and it
    /// matters: libseccomp's order holds only among compares of the low half.
    pub(super) fn on(&self, index: u64) -> Option<Condition> {
        let (_, condition) = self.conditions.iter().find(|(other, _)| *other == index)?;
        Some(match condition {
            Condition::In(cube) => Condition::In(Cube::new(cube.mask & LOW, cube.value)),
            other => other.clone(),
        })
    }

    /// The rule's conditions on other arguments than `index`, as they were written.
    pub(super) fn others(&self, index: u64) -> Vec<Value> {
        let others = self.conditions.iter().zip(&self.args).filter(|((other, _), _)| *other != index);
        others.map(|(_, arg)| arg.clone()).collect()
    }

    pub(super) fn refusal(&self, reason: &'static str) -> ProfileError {
        ProfileError::Inexpressible { syscall: self.syscall, rule: self.text.clone(), reason }
    }
}

fn condition(arg: &Value) -> Option<(u64, Condition)> {
    let number = |name: &str| match arg.get(name) {
        None | Some(Value::Null) => Some(0),
        Some(value) => value.as_u64(),
    };
    let (index, value, second) = (number("index")?, number("value")?, number("valueTwo")?);
    let condition = match arg.get("op")?.as_str()? {
        "SCMP_CMP_EQ" => Condition::In(Cube::new(u64::MAX, value)),
        // Here `value` is the mask.
        "SCMP_CMP_MASKED_EQ" if second & !value != 0 => return None,
        "SCMP_CMP_MASKED_EQ" => Condition::In(Cube::new(value, second)),
        "SCMP_CMP_NE" => Condition::Not(value),
        "SCMP_CMP_LT" | "SCMP_CMP_LE" | "SCMP_CMP_GE" | "SCMP_CMP_GT" => Condition::Order(arg.clone()),
        _ => return None,
    };
    (index < 6).then_some((index, condition))
}

/// A rule of ours: `effect` where argument `index` is in `cube` and `others` hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) cube: Cube,
    pub(super) others: Vec<Value>,
    pub(super) effect: Effect,
}

/// The condition "argument `index` is in `cube`".
pub(super) fn compare(index: u64, cube: Cube) -> Value {
    json!({ "index": index, "op": "SCMP_CMP_MASKED_EQ", "value": cube.mask, "valueTwo": cube.value })
}

impl Piece {
    fn print(self, syscall: &'static str, index: u64) -> Value {
        let mut args = self.others;
        if self.cube != Cube::ALL {
            args.push(compare(index, self.cube));
        }
        let mut rule = json!({ "names": [syscall], "action": self.effect.name() });
        if let Value::Object(fields) = &mut rule {
            if let Effect::Errno(errno) = self.effect {
                fields.insert("errnoRet".to_owned(), json!(errno));
            }
            if !args.is_empty() {
                fields.insert("args".to_owned(), Value::Array(args));
            }
        }
        rule
    }
}

/// The rules of a call, in the order in which they must be added.
pub(super) fn print(mut pieces: Vec<Piece>, syscall: &'static str, index: u64) -> Vec<Value> {
    pieces.sort_by_key(|piece| std::cmp::Reverse(piece.cube.mask.count_ones()));
    pieces.into_iter().map(|piece| piece.print(syscall, index)).collect()
}

/// Takes the words of `denied` out of `pieces`: pieces that lie inside go, and where the two overlap the denial
/// gets pieces of its own, inside both. Then `denied` itself.
pub(super) fn deny(pieces: &mut Vec<Piece>, denied: Cube, effect: Effect) {
    pieces.retain(|piece| !piece.cube.is_within(denied));
    let mut denials = vec![Piece { cube: denied, others: Vec::new(), effect }];
    for piece in pieces.iter().filter(|piece| piece.effect != effect) {
        let both = piece.cube.intersect(denied);
        denials.extend(both.map(|cube| Piece { cube, others: piece.others.clone(), effect }));
    }
    for denial in denials {
        if !pieces.contains(&denial) {
            pieces.push(denial);
        }
    }
}
