//! Identities that cross a socket, checked when they are made and when they are decoded.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Why a string is not an identity.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum IdError {
    /// Empty, too long, or a character that isn't allowed.
    #[error("bad container id {found:?}: 1 to 200 of letters, digits, '.', '_', '-' and '/'")]
    Container {
        /// What was given, shortened.
        found: String,
    },
    /// Not `GPU-` and a UUID in lower case.
    #[error("bad GPU uuid {found:?}: expected GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx in lower-case hex")]
    Gpu {
        /// What was given, shortened.
        found: String,
    },
}

fn shortened(text: &str) -> String {
    text.chars().take(64).collect()
}

/// `namespace/id` of a container, as containerd names it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ContainerId(String);

impl ContainerId {
    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for ContainerId {
    type Error = IdError;
    fn try_from(text: String) -> Result<Self, IdError> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | '/');
        if text.is_empty() || text.len() > 200 || !text.chars().all(allowed) {
            return Err(IdError::Container { found: shortened(&text) });
        }
        Ok(ContainerId(text))
    }
}

impl From<ContainerId> for String {
    fn from(id: ContainerId) -> String {
        id.0
    }
}

impl fmt::Display for ContainerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A GPU's UUID as NVIDIA's tools print it: `GPU-` and a UUID in lower case.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct GpuUuid(String);

impl GpuUuid {
    /// The UUID as text, with its `GPU-` prefix.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for GpuUuid {
    type Error = IdError;
    fn try_from(text: String) -> Result<Self, IdError> {
        let well_formed = text.strip_prefix("GPU-").is_some_and(|uuid| {
            uuid.len() == 36
                && uuid.bytes().enumerate().all(|(i, b)| match i {
                    8 | 13 | 18 | 23 => b == b'-',
                    _ => b.is_ascii_digit() || (b'a'..=b'f').contains(&b),
                })
        });
        if well_formed { Ok(GpuUuid(text)) } else { Err(IdError::Gpu { found: shortened(&text) }) }
    }
}

impl From<GpuUuid> for String {
    fn from(uuid: GpuUuid) -> String {
        uuid.0
    }
}

impl fmt::Display for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A container's place on the node: given out by the scheduler, gone when its shim's socket closes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct LeaseId(pub u64);

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}
