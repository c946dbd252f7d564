//! Giving back the memory of a process that has nothing to do.
//!
//! Most of what a small daemon holds is code that it ran once. Those pages are clean copies of files: the
//! kernel can drop them from the process, and brings back from its cache what runs again.

use std::ffi::c_void;
use std::io;
use std::ptr;

use crate::call::check;

/// Where this process's code lies.
#[derive(Debug)]
pub struct Code(Vec<(usize, usize)>);

impl Code {
    /// Looks in `/proc/self/maps`.
    ///
    /// # Errors
    /// Those of reading it.
    pub fn find() -> io::Result<Code> {
        let maps = std::fs::read_to_string("/proc/self/maps")?;
        Ok(Code(maps.lines().filter_map(code).collect()))
    }

    /// Drops the code's pages. Nothing may have been unmapped since they were found.
    ///
    /// # Errors
    /// Those of madvise(2); nothing is lost then.
    pub fn release(&self) -> io::Result<()> {
        for (start, length) in &self.0 {
            let address = ptr::without_provenance_mut::<c_void>(*start);
            // SAFETY: MADV_DONTNEED must not drop bytes that somebody needs: the mapping is private, executable
            // and not writable, so every page is a copy of its file, which the kernel reads again at the next use.
            let result = unsafe { libc::madvise(address, *length, libc::MADV_DONTNEED) };
            check(result)?;
        }
        Ok(())
    }
}

/// Drops the code pages of this process and the unused ends of its heap.
///
/// # Errors
/// Those of [`Code`]; nothing is lost then.
pub fn release() -> io::Result<()> {
    Code::find()?.release()?;
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim has no conditions; it takes the allocator's own locks.
    unsafe {
        libc::malloc_trim(0);
    }
    Ok(())
}

/// Start and length of a mapping of a file's code; nothing for other lines.
fn code(line: &str) -> Option<(usize, usize)> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let (rights, _offset, _device, _inode) = (words.next()?, words.next()?, words.next()?, words.next()?);
    if rights != "r-xp" || !words.next()?.starts_with('/') {
        return None;
    }
    let (start, end) = (usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?);
    Some((start, end.checked_sub(start)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_code_of_files_is_dropped() {
        let line = "55d0c0a00000-55d0c0b80000 r-xp 0001f000 fe:00 1311 /usr/bin/x";
        assert_eq!(code(line), Some((0x55d0_c0a0_0000, 0x18_0000)));
        for other in [
            "55d0c0a00000-55d0c0b80000 r--p 0001f000 fe:00 1311 /usr/bin/x",
            "55d0c0a00000-55d0c0b80000 rw-p 0001f000 fe:00 1311 /usr/bin/x",
            "7ffd0c0a0000-7ffd0c0a2000 r-xp 00000000 00:00 0 [vdso]",
            "7ffd0c0a0000-7ffd0c0a2000 r-xp 00000000 00:00 0",
        ] {
            assert_eq!(code(other), None, "{other}");
        }
    }

    #[test]
    fn a_process_goes_on_after_it_gave_back_its_code() {
        let before = vec![7_u8; 1 << 20];
        release().unwrap();
        assert!(before.iter().all(|byte| *byte == 7));
    }
}
