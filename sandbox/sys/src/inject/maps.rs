//! `/proc/PID/maps`, as much of it as a move needs.

use std::io;

use crate::call::error;

/// A part of the range with one protection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) writable: bool,
}

struct Entry<'a> {
    start: u64,
    end: u64,
    rights: &'a str,
    name: &'a str,
}

/// The parts of [start, end), which must be covered by private memory that isn't executable.
pub(super) fn segments(tid: u32, start: u64, end: u64) -> io::Result<Vec<Segment>> {
    parse(&std::fs::read_to_string(format!("/proc/{tid}/maps"))?, start, end)
}

/// Address of a `syscall` instruction in the vdso.
pub(super) fn vdso(tid: u32) -> io::Result<(u64, u64)> {
    let text = std::fs::read_to_string(format!("/proc/{tid}/maps"))?;
    let found = text.lines().filter_map(entry).find(|entry| entry.name == "[vdso]");
    found.map(|entry| (entry.start, entry.end)).ok_or_else(|| error(libc::ENOEXEC))
}

fn entry(line: &str) -> Option<Entry<'_>> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let rights = fields.next()?;
    Some(Entry {
        start: u64::from_str_radix(start, 16).ok()?,
        end: u64::from_str_radix(end, 16).ok()?,
        rights,
        // Offset, device and inode come before it.
        name: fields.nth(3).unwrap_or_default(),
    })
}

fn parse(text: &str, start: u64, end: u64) -> io::Result<Vec<Segment>> {
    let mut segments: Vec<Segment> = Vec::new();
    let mut at = start;
    for line in text.lines() {
        let entry = entry(line).ok_or_else(|| error(libc::EINVAL))?;
        if entry.end <= at || at >= end {
            continue;
        }
        if entry.start > at {
            break;
        }
        let rights = entry.rights.as_bytes();
        let has = |index: usize, letter: u8| rights.get(index) == Some(&letter);
        let of_the_kernel = matches!(entry.name, "[vdso]" | "[vvar]" | "[vvar_vclock]" | "[vsyscall]");
        if !has(0, b'r') || has(2, b'x') || !has(3, b'p') || of_the_kernel {
            return Err(error(libc::EINVAL));
        }
        let upto = entry.end.min(end);
        segments.push(Segment { start: at, end: upto, writable: has(1, b'w') });
        at = upto;
    }
    if at < end { Err(error(libc::EFAULT)) } else { Ok(segments) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
1000-3000 rw-p 00000000 00:00 0 \n\
3000-4000 r--p 00000000 00:00 0 \n\
4000-5000 r-xp 00000000 08:01 77 /bin/true\n\
6000-7000 rw-s 00000000 00:01 9 /memfd:x (deleted)\n\
7000-8000 r--p 00000000 00:00 0 [vvar]\n";

    #[test]
    fn a_range_over_two_mappings_has_two_segments() {
        let found = parse(MAPS, 0x2000, 0x4000).unwrap();
        let wanted = [
            Segment { start: 0x2000, end: 0x3000, writable: true },
            Segment { start: 0x3000, end: 0x4000, writable: false },
        ];
        assert_eq!(found, wanted);
    }

    #[test]
    fn holes_and_memory_that_cannot_be_moved_are_refused() {
        let errno = |start, end| parse(MAPS, start, end).unwrap_err().raw_os_error();
        assert_eq!(errno(0x0, 0x2000), Some(libc::EFAULT));
        assert_eq!(errno(0x5000, 0x6000), Some(libc::EFAULT));
        assert_eq!(errno(0x8000, 0x9000), Some(libc::EFAULT));
        assert_eq!(errno(0x3000, 0x5000), Some(libc::EINVAL));
        assert_eq!(errno(0x6000, 0x7000), Some(libc::EINVAL));
        assert_eq!(errno(0x7000, 0x8000), Some(libc::EINVAL));
    }
}
