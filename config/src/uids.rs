//! The uid range of the sandboxes, checked against everybody else's.
//!
//! The driver compares uids between its clients, and a sandbox's uid must mean nothing else on the node: not
//! a user, not a uid that some user may map into a namespace (`/etc/subuid`, `/etc/subgid`).

use std::fmt;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// A range of uids, used as gids as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UidRange {
    /// The first.
    pub first: u32,
    /// How many.
    pub count: u32,
}

impl UidRange {
    /// Whether `uid` lies in the range.
    pub fn contains(self, uid: u32) -> bool {
        uid >= self.first && uid - self.first < self.count
    }

    fn overlaps(self, first: u64, count: u64) -> bool {
        let (mine, end) = (u64::from(self.first), u64::from(self.first) + u64::from(self.count));
        first < end && mine < first.saturating_add(count)
    }
}

impl fmt::Display for UidRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {}", self.first, u64::from(self.first) + u64::from(self.count) - 1)
    }
}

/// Why the range can't be used.
#[derive(Debug, thiserror::Error)]
pub enum UidConflict {
    /// Somebody else has uids of it.
    #[error("uids {range} overlap {first} (+{count}) of {owner:?} in {}: set [sandboxes] uid_first to a free range", path.display())]
    Overlap {
        /// Our range.
        range: UidRange,
        /// Where the other use is written.
        path: PathBuf,
        /// Whose it is.
        owner: String,
        /// First uid of the other range.
        first: u64,
        /// Its length.
        count: u64,
    },
    /// A file is there and can't be read.
    #[error("can't read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// Checks `range` against `passwd`, `group`, `subuid` and `subgid` in `etc`. A missing file names nobody.
///
/// # Errors
/// [`UidConflict`]: the first user of one of the uids.
pub fn check_uids(range: UidRange, etc: &Path) -> Result<(), UidConflict> {
    for (name, single) in [("subuid", false), ("subgid", false), ("passwd", true), ("group", true)] {
        let path = etc.join(name);
        let text = match fs::read(&path) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(source) => return Err(UidConflict::Read { path, source }),
        };
        let entries = text.lines().filter_map(|line| entry(line, single));
        for (owner, first, count) in entries {
            if range.overlaps(first, count) {
                return Err(UidConflict::Overlap { range, path, owner: owner.to_owned(), first, count });
            }
        }
    }
    Ok(())
}

/// `owner:first:count` of a subid file, or `name:x:id:...` of passwd and group. Other lines name nothing.
fn entry(line: &str, single: bool) -> Option<(&str, u64, u64)> {
    let mut fields = line.split(':');
    let owner = fields.next()?;
    let second = fields.next()?;
    let third = fields.next()?.trim().parse().ok()?;
    if single { Some((owner, third, 1)) } else { Some((owner, second.trim().parse().ok()?, third)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn etc(files: &[(&str, &str)]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(directory.path().join(name), text).unwrap();
        }
        directory
    }

    #[test]
    fn a_free_range_passes_also_without_any_file() {
        let range = UidRange { first: 200_000, count: 100 };
        check_uids(range, Path::new("/nonexistent")).unwrap();
        let directory = etc(&[
            ("subuid", "a:100000:65536\nb:200100:65536\n\n# odd line\n"),
            ("passwd", "root:x:0:0::/:/bin/sh\nx:x:199999:0::/:/\ny:x:200100:0::/:/\n"),
        ]);
        check_uids(range, directory.path()).unwrap();
    }

    #[test]
    fn an_overlap_by_one_uid_is_refused_and_named() {
        let range = UidRange { first: 200_000, count: 100 };
        for (name, text) in [
            ("subuid", "a:134465:65536\n"),
            ("subgid", "a:200099:1\n"),
            ("subuid", "a:0:18446744073709551615\n"),
            ("passwd", "a:x:200000:0::/:/\n"),
            ("group", "a:x:200099:\n"),
        ] {
            let directory = etc(&[(name, text)]);
            let error = check_uids(range, directory.path()).unwrap_err().to_string();
            assert!(
                error.contains("\"a\"") && error.contains(name) && error.contains("200000 to 200099"),
                "{error}"
            );
        }
    }
}
