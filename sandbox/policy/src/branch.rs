//! A driver branch's table, and which one a driver version has.
//!
//! Owns: the version rules. Promises: a version that no table was checked against has none. Failure:
//! [`UnknownDriver`], which names what was found and what is known.

use std::fmt;

use crate::row::{Class, Control, Escape, EscapeRule, Uvm, UvmRule};
use crate::v580;

/// A driver version, `major.minor` or `major.minor.patch`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// Branch.
    pub major: u32,
    /// Release.
    pub minor: u32,
    /// Patch; 0 where there is none.
    pub patch: u32,
}

impl Version {
    /// Reads `580.159.04` and the like: digits and dots only.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('.').map(|part| {
            let digits = !part.is_empty() && part.len() <= 6 && part.bytes().all(|b| b.is_ascii_digit());
            if digits { part.parse::<u32>().ok() } else { None }
        });
        let version = Version {
            major: parts.next()??,
            minor: parts.next()??,
            patch: match parts.next() {
                Some(patch) => patch?,
                None => 0,
            },
        };
        parts.next().is_none().then_some(version)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{:02}", self.major, self.minor, self.patch)
    }
}

/// No table for this driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownDriver {
    /// Version found, shortened.
    pub found: String,
    /// Versions known.
    pub known: String,
}

impl fmt::Display for UnknownDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "unknown NVIDIA driver version {:?}: known are {}; install one of these, or a gpuslice release that knows it",
            self.found, self.known
        )
    }
}

impl std::error::Error for UnknownDriver {}

/// One branch's table.
pub struct Branch {
    /// Its number, e.g. 580.
    pub major: u32,
    /// Oldest version whose layouts are these.
    pub floor: Version,
    pub(crate) escapes: &'static [Escape],
    pub(crate) uvm: &'static [Uvm],
    pub(crate) classes: &'static [Class],
    pub(crate) controls: &'static [&'static [Control]],
    pub(crate) refused: &'static [&'static [(u32, &'static str)]],
}

impl fmt::Debug for Branch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Branch({})", self.major)
    }
}

/// All tables, ascending.
const BRANCHES: &[&Branch] = &[&v580::BRANCH];

/// First member of ascending `rows` with this key.
fn find<R, K: Ord>(rows: &[R], key: K, of: impl Fn(&R) -> K) -> Option<&R> {
    rows.binary_search_by_key(&key, of).ok().and_then(|index| rows.get(index))
}

impl Branch {
    /// Every table, ascending.
    pub fn all() -> &'static [&'static Branch] {
        BRANCHES
    }

    /// The table of a driver version as `/proc/driver/nvidia/version` names it.
    ///
    /// # Errors
    /// [`UnknownDriver`] for a branch without a table, a version below its floor, or something that isn't a version.
    pub fn for_version(text: &str) -> Result<&'static Branch, UnknownDriver> {
        Version::parse(text)
            .and_then(|version| {
                BRANCHES.iter().find(|branch| branch.major == version.major && version >= branch.floor)
            })
            .copied()
            .ok_or_else(|| UnknownDriver {
                found: text.chars().take(32).collect(),
                known: BRANCHES
                    .iter()
                    .map(|branch| format!("{} to {}.x", branch.floor, branch.major))
                    .collect::<Vec<_>>()
                    .join(", "),
            })
    }

    /// The front-end command with this number byte.
    pub fn escape(&self, nr: u8) -> Option<&'static Escape> {
        find(self.escapes, nr, |row| row.nr)
    }

    /// The UVM command with this number.
    pub fn uvm(&self, cmd: u32) -> Option<&'static Uvm> {
        find(self.uvm, cmd, |row| row.cmd)
    }

    /// The class with this number.
    pub fn class(&self, id: u32) -> Option<&'static Class> {
        find(self.classes, id, |row| row.id)
    }

    /// The control with this number, where it is not refused.
    pub fn control(&self, cmd: u32) -> Option<&'static Control> {
        self.controls
            .iter()
            .find(|rows| rows.last().is_some_and(|last| cmd <= last.cmd))
            .and_then(|rows| find(rows, cmd, |row| row.cmd))
    }

    /// Name of a control, refused ones included; "unknown" for what the driver doesn't know either.
    pub fn control_name(&self, cmd: u32) -> &'static str {
        self.control(cmd)
            .map(|row| row.name)
            .or_else(|| self.refused.iter().find_map(|rows| find(rows, cmd, |row| row.0)).map(|row| row.1))
            .unwrap_or("unknown")
    }

    /// Every ioctl number that the sandbox may issue to the driver, for any branch: what its own seccomp
    /// program allows. Front-end commands in the form that [`Escape::command`](crate::row::Escape::command)
    /// gives, UVM commands as they are.
    pub fn every_command() -> Vec<u32> {
        let mut all: Vec<u32> = Vec::new();
        for branch in BRANCHES {
            let escapes = branch.escapes.iter().filter(|row| row.rule != EscapeRule::Deny);
            all.extend(escapes.flat_map(|row| row.sizes().map(|size| row.command(size))));
            all.extend(branch.uvm.iter().filter(|row| row.rule != UvmRule::Deny).map(|row| row.cmd));
        }
        all.sort_unstable();
        all.dedup();
        all
    }

    /// Every front-end row.
    pub fn escapes(&self) -> &'static [Escape] {
        self.escapes
    }

    /// Every UVM row.
    pub fn uvm_commands(&self) -> &'static [Uvm] {
        self.uvm
    }

    /// Every class row.
    pub fn classes(&self) -> &'static [Class] {
        self.classes
    }

    /// Every control row that isn't refused.
    pub fn controls(&self) -> impl Iterator<Item = &'static Control> {
        self.controls.iter().flat_map(|rows| rows.iter())
    }

    /// Whether a granted node acts on the ioctl command `cmd`: the same for every branch known.
    pub fn acts_on(&self, cmd: u32) -> bool {
        crate::acts_on(cmd)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_release_of_the_branch_from_its_floor_on_has_its_table() {
        for version in ["580.65.06", "580.82.09", "580.95.05", "580.142", "580.159.04", "580.999"] {
            assert_eq!(Branch::for_version(version).unwrap().major, 580, "{version}");
        }
    }

    #[test]
    fn an_unknown_version_is_refused_with_what_was_found_and_what_is_known() {
        for version in
            ["580.65.05", "570.211.01", "595.45.04", "", "580", "580.x", "580.1.2.3", "+580.159", "garbage"]
        {
            let error = Branch::for_version(version).unwrap_err();
            assert_eq!(error.found, version);
            assert!(error.to_string().contains("580.65.06 to 580.x"), "{error}");
        }
    }

    #[test]
    fn a_refused_control_still_has_a_name_for_the_log() {
        let branch = Branch::for_version("580.159.04").unwrap();
        assert!(branch.control(0x2080_110b).is_none());
        assert_eq!(branch.control_name(0x2080_110b), "NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS");
        assert_eq!(branch.control_name(0x1234_5678), "unknown");
    }
}
