//! From annotations and the node's policy to a slice of each granted GPU.
//!
//! Owns: the annotations' grammar and the narrowing. Trusts: the node's configuration, which was checked when it
//! was read; annotations are a wish. Promises: no value of a slice exceeds the node's ceiling, whatever is
//! written and in whatever order; a wish that was lowered is reported. Failure: a value that can't be followed
//! is refused by key, with what was found and what is allowed; nothing is guessed.

use std::collections::BTreeMap;

use gpuslice_config::{Bytes, Config, MAX_WEIGHT};
use gpuslice_proto::{GpuSlice, GpuUuid};
use serde_json::Value;

const PREFIX: &str = "gpuslice.io/";
const HARD: &str = "gpuslice.io/memory-hard";
const SOFT: &str = "gpuslice.io/memory-soft";
const WEIGHT: &str = "gpuslice.io/weight";

/// Why annotations are refused.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum SliceError {
    #[error("annotation {key} is unknown: {HARD}, {SOFT} and {WEIGHT} are allowed")]
    UnknownKey { key: String },
    #[error("annotation {key}: not a text")]
    NotText { key: String },
    #[error("annotation {key}={found:?}: {reason}")]
    Value { key: &'static str, found: String, reason: String },
    #[error("annotation {key}: {uuid} is not granted to this container: {granted} {verb}", verb = if granted.contains(',') { "are" } else { "is" })]
    NotGranted { key: &'static str, uuid: GpuUuid, granted: String },
    #[error("annotation {key}: {uuid} is named twice")]
    Duplicate { key: &'static str, uuid: GpuUuid },
    #[error(
        "annotation {SOFT}={soft} is above {origin} {hard} of {uuid}: at most {hard} is allowed; raise {HARD} or lower {SOFT}"
    )]
    SoftAboveHard { uuid: GpuUuid, soft: Bytes, hard: Bytes, origin: &'static str },
}

/// One value for all granted GPUs, or one each for some.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Wish<T> {
    All(T),
    Each(BTreeMap<GpuUuid, T>),
}

impl<T: Copy> Wish<T> {
    fn of(&self, uuid: &GpuUuid) -> Option<T> {
        match self {
            Wish::All(value) => Some(*value),
            Wish::Each(values) => values.get(uuid).copied(),
        }
    }
}

/// What a container's annotations ask for; well formed, not yet narrowed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wishes {
    hard: Option<Wish<Bytes>>,
    soft: Option<Wish<Bytes>>,
    weight: Option<Wish<u32>>,
}

/// A slice of each granted GPU, and what was lowered on the way to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Resolved {
    pub(crate) gpus: Vec<GpuSlice>,
    pub(crate) notes: Vec<String>,
}

impl Wishes {
    /// Reads the `gpuslice.io/` annotations of a spec. Those of other programs are passed over.
    ///
    /// # Errors
    /// An unknown key or a value that isn't well formed.
    pub(crate) fn read(root: &Value) -> Result<Self, SliceError> {
        let mut wishes = Wishes::default();
        let Some(annotations) = root.get("annotations").and_then(Value::as_object) else { return Ok(wishes) };
        for (key, value) in annotations.iter().filter(|(key, _)| key.starts_with(PREFIX)) {
            let text = value.as_str().ok_or_else(|| SliceError::NotText { key: key.clone() })?;
            match key.as_str() {
                HARD => wishes.hard = Some(parse(HARD, text, bytes)?),
                SOFT => wishes.soft = Some(parse(SOFT, text, bytes)?),
                WEIGHT => wishes.weight = Some(parse(WEIGHT, text, weight)?),
                _ => return Err(SliceError::UnknownKey { key: key.chars().take(100).collect() }),
            }
        }
        Ok(wishes)
    }

    /// Narrows the wishes to the node's policy, for GPUs given by UUID and minor number.
    ///
    /// # Errors
    /// A GPU named that isn't granted, or a soft limit written above the hard one.
    pub(crate) fn resolve(
        &self,
        granted: &[(GpuUuid, u32)],
        config: &Config,
    ) -> Result<Resolved, SliceError> {
        check_names(HARD, self.hard.as_ref(), granted)?;
        check_names(SOFT, self.soft.as_ref(), granted)?;
        check_names(WEIGHT, self.weight.as_ref(), granted)?;
        let mut notes = Vec::new();
        let gpus = granted
            .iter()
            .map(|(uuid, minor)| self.resolve_one(uuid, *minor, config, &mut notes))
            .collect::<Result<_, _>>()?;
        Ok(Resolved { gpus, notes })
    }

    fn resolve_one(
        &self,
        uuid: &GpuUuid,
        minor: u32,
        config: &Config,
        notes: &mut Vec<String>,
    ) -> Result<GpuSlice, SliceError> {
        let bounds = config.bounds(uuid);
        let mut note = |key: &str, wish: String, got: String, cause: &str| {
            notes.push(format!("{key}={wish} for {uuid} lowered to {got}, {cause}"));
        };

        let wished_hard = self.hard.as_ref().and_then(|wish| wish.of(uuid));
        let unlimited_hard = wished_hard.unwrap_or(bounds.defaults.memory_hard);
        let hard = bounds.limits.memory_hard.map_or(unlimited_hard, |most| most.min(unlimited_hard));
        if let Some(wish) = wished_hard.filter(|wish| *wish > hard) {
            note(HARD, wish.to_string(), hard.to_string(), "the node's ceiling");
        }

        let wished_soft = self.soft.as_ref().and_then(|wish| wish.of(uuid));
        if let Some(soft) = wished_soft.filter(|soft| *soft > unlimited_hard) {
            let origin =
                if wished_hard.is_some() { "the hard limit" } else { "the node's default hard limit" };
            return Err(SliceError::SoftAboveHard { uuid: uuid.clone(), soft, hard: unlimited_hard, origin });
        }
        let unlimited_soft = wished_soft.or(bounds.defaults.memory_soft).unwrap_or(hard);
        let soft =
            bounds.limits.memory_soft.map_or(unlimited_soft, |most| most.min(unlimited_soft)).min(hard);
        if let Some(wish) = wished_soft.filter(|wish| *wish > soft) {
            let cause = if soft == hard { "the hard limit" } else { "the node's ceiling" };
            note(SOFT, wish.to_string(), soft.to_string(), cause);
        }

        let wished_weight = self.weight.as_ref().and_then(|wish| wish.of(uuid));
        let most = bounds.limits.weight.unwrap_or(MAX_WEIGHT);
        let weight = wished_weight.unwrap_or(bounds.defaults.weight).min(most);
        if let Some(wish) = wished_weight.filter(|wish| *wish > weight) {
            note(WEIGHT, wish.to_string(), weight.to_string(), "the node's ceiling");
        }
        Ok(GpuSlice {
            uuid: uuid.clone(),
            minor,
            memory_hard: hard.count(),
            memory_soft: soft.count(),
            weight,
        })
    }
}

fn check_names<T>(
    key: &'static str,
    wish: Option<&Wish<T>>,
    granted: &[(GpuUuid, u32)],
) -> Result<(), SliceError> {
    let Some(Wish::Each(values)) = wish else { return Ok(()) };
    match values.keys().find(|uuid| !granted.iter().any(|(own, _)| own == *uuid)) {
        None => Ok(()),
        Some(uuid) => {
            let granted = granted.iter().map(|(uuid, _)| uuid.as_str()).collect::<Vec<_>>().join(", ");
            Err(SliceError::NotGranted { key, uuid: uuid.clone(), granted })
        }
    }
}

fn parse<T>(
    key: &'static str,
    text: &str,
    value: fn(&str) -> Result<T, String>,
) -> Result<Wish<T>, SliceError> {
    let refuse = |reason| SliceError::Value { key, found: text.chars().take(100).collect(), reason };
    if !text.contains(['=', ',']) {
        return value(text).map(Wish::All).map_err(refuse);
    }
    let mut values = BTreeMap::new();
    for part in text.split(',') {
        let Some((uuid, amount)) = part.split_once('=') else {
            return Err(refuse("write one value for all GPUs, or GPU-uuid=value,GPU-uuid=value".to_owned()));
        };
        let uuid = GpuUuid::try_from(uuid.to_owned()).map_err(|error| refuse(error.to_string()))?;
        let amount = value(amount).map_err(refuse)?;
        if values.insert(uuid.clone(), amount).is_some() {
            return Err(SliceError::Duplicate { key, uuid });
        }
    }
    Ok(Wish::Each(values))
}

fn bytes(text: &str) -> Result<Bytes, String> {
    Bytes::parse(text).map_err(|error| error.to_string())
}

fn weight(text: &str) -> Result<u32, String> {
    text.bytes()
        .all(|b| b.is_ascii_digit())
        .then(|| text.parse::<u32>().ok())
        .flatten()
        .filter(|weight| (1..=MAX_WEIGHT).contains(weight))
        .ok_or_else(|| format!("a weight is a whole number from 1 to {MAX_WEIGHT}"))
}

#[cfg(test)]
mod tests;
