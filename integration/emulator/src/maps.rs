//! What processes map of a file, from /proc: how the emulator sees managed memory, which is made by mmap alone.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// One mapping of the file looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mapping {
    /// The process.
    pub pid: u32,
    /// First address.
    pub start: u64,
    /// Address after the last.
    pub end: u64,
    /// Offset in the file of the first byte.
    pub offset: u64,
}

/// First address and end of a line of a maps file.
pub(crate) fn range(line: &str) -> Option<(u64, u64)> {
    let (from, to) = line.split_whitespace().next()?.split_once('-')?;
    Some((u64::from_str_radix(from, 16).ok()?, u64::from_str_radix(to, 16).ok()?))
}

/// Shared mappings of this line's file at `inode`.
fn of_line(pid: u32, line: &str, inode: u64) -> Option<Mapping> {
    let mut fields = line.split_whitespace();
    let (start, end) = range(fields.next()?)?;
    let rights = fields.next()?;
    let offset = u64::from_str_radix(fields.next()?, 16).ok()?;
    let found: u64 = fields.nth(1)?.parse().ok()?;
    (found == inode && rights.ends_with('s')).then_some(Mapping { pid, start, end, offset })
}

/// Every shared mapping of the file at `path` in any process. Threads and vanished processes are skipped.
pub(crate) fn of_file(path: &Path) -> Vec<Mapping> {
    let Ok(file) = std::fs::metadata(path) else { return Vec::new() };
    let Ok(processes) = std::fs::read_dir("/proc") else { return Vec::new() };
    let mut found = Vec::new();
    for process in processes.flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let maps = std::fs::read_to_string(process.path().join("maps")).unwrap_or_default();
        let marker = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        for line in maps.lines().filter(|line| line.contains(marker)) {
            found.extend(of_line(pid, line, file.ino()));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_maps_line_is_read_with_its_inode_and_sharing() {
        let line = "7f0000200000-7f0000400000 rw-s 7f0000200000 00:2b 3          /dev/nvidia-uvm";
        let mapping = of_line(9, line, 3).unwrap();
        assert_eq!(
            (mapping.start, mapping.end, mapping.offset),
            (0x7f00_0020_0000, 0x7f00_0040_0000, 0x7f00_0020_0000)
        );
        assert!(of_line(9, line, 4).is_none());
        assert!(of_line(9, &line.replace("rw-s", "rw-p"), 3).is_none());
    }
}
