//! The text of `/proc/PID/maps`.
//!
//! Owns: its parsing. Trusts: the kernel for the form; a path in it is the tenant's and is never used.

/// One mapping of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mapping {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) writable: bool,
    pub(crate) shared: bool,
    pub(crate) offset: u64,
    /// Major and minor number of the file system that the file lies on.
    pub(crate) device: (u32, u32),
    /// 0 for memory without a file.
    pub(crate) inode: u64,
}

impl Mapping {
    /// Name of the mapping's entry in `/proc/PID/map_files`.
    pub(crate) fn entry(&self) -> String {
        format!("{:x}-{:x}", self.start, self.end)
    }
}

/// All mappings in `text`; lines of another form are left out.
pub(crate) fn parse(text: &str) -> impl Iterator<Item = Mapping> {
    text.lines().filter_map(parse_line)
}

fn parse_line(line: &str) -> Option<Mapping> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let rights = words.next()?.as_bytes();
    let offset = words.next()?;
    let (major, minor) = words.next()?.split_once(':')?;
    let (start, end) = (hex(start)?, hex(end)?);
    let [_, write, _, share] = rights else { return None };
    (start < end).then_some(Mapping {
        start,
        end,
        writable: *write == b'w',
        shared: *share == b's',
        offset: hex(offset)?,
        device: (u32::try_from(hex(major)?).ok()?, u32::try_from(hex(minor)?).ok()?),
        inode: words.next()?.parse().ok()?,
    })
}

fn hex(text: &str) -> Option<u64> {
    // from_str_radix takes a sign, which the kernel never writes.
    (!text.starts_with(['+', '-'])).then(|| u64::from_str_radix(text, 16).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_device_mapping_is_read_with_its_file() {
        let text = "7f0000000000-7f0000200000 rw-s 7f0000000000 00:05 1034                       /dev/nvidia-uvm\n\
                    7ffc0000-7ffd0000 rw-p 00000000 00:00 0                          [stack]\n\
                    55550000-55560000 r--s 00001000 fe:01 77   /tmp/a b (deleted)\n";
        let found: Vec<_> = parse(text).collect();
        assert_eq!(found.len(), 3);
        assert_eq!(
            found[0],
            Mapping {
                start: 0x7f00_0000_0000,
                end: 0x7f00_0020_0000,
                writable: true,
                shared: true,
                offset: 0x7f00_0000_0000,
                device: (0, 5),
                inode: 1034
            }
        );
        assert_eq!(found[0].entry(), "7f0000000000-7f0000200000");
        assert!(!found[1].shared && found[1].inode == 0);
        assert_eq!((found[2].writable, found[2].offset, found[2].device), (false, 0x1000, (0xfe, 1)));
    }

    #[test]
    fn every_line_of_this_process_is_understood() {
        let text = std::fs::read_to_string("/proc/self/maps").unwrap();
        assert_eq!(parse(&text).count(), text.lines().count());
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "(?s).{0,200}") {
            for mapping in parse(&text) {
                prop_assert!(mapping.start < mapping.end);
            }
        }
    }
}
