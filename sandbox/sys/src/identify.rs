//! What a file is, asked without waiting for whoever serves it.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::call::check;

/// A file's type, device and place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileIdentity {
    /// File type and mode bits (`S_IFCHR` etc.).
    pub mode: u32,
    /// Major number of the device that it is.
    pub rdev_major: u32,
    /// Minor number of the device that it is.
    pub rdev_minor: u32,
    /// Device (major, minor) that it lies on.
    pub dev: (u32, u32),
    /// Inode number there.
    pub inode: u64,
}

impl FileIdentity {
    /// It is a character device.
    pub fn is_character_device(&self) -> bool {
        self.mode & libc::S_IFMT == libc::S_IFCHR
    }
}

/// Identifies an open file. Doesn't block, also not for a file of a FUSE file system whose server hangs.
///
/// # Errors
/// Those of statx(2).
pub fn identify(file: BorrowedFd<'_>) -> io::Result<FileIdentity> {
    let flags = libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC;
    let mut found = std::mem::MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: statx needs a file, a path that ends in NUL, and room for one struct statx: all are given.
    let result = unsafe {
        libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            flags,
            libc::STATX_TYPE | libc::STATX_MODE | libc::STATX_INO,
            found.as_mut_ptr(),
        )
    };
    check(result)?;
    // SAFETY: assume_init needs an initialised value: it was zeroed (valid for its integers) and filled.
    let found = unsafe { found.assume_init() };
    Ok(FileIdentity {
        mode: u32::from(found.stx_mode),
        rdev_major: found.stx_rdev_major,
        rdev_minor: found.stx_rdev_minor,
        dev: (found.stx_dev_major, found.stx_dev_minor),
        inode: found.stx_ino,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn a_character_device_shows_its_numbers() {
        let null = std::fs::File::open("/dev/null").unwrap();
        let found = identify(null.as_fd()).unwrap();
        assert!(found.is_character_device());
        assert_eq!((found.rdev_major, found.rdev_minor), (1, 3));
    }

    #[test]
    fn two_opens_of_one_file_are_one_file() {
        let path = tempfile_path();
        let first = std::fs::File::create(&path).unwrap();
        let second = std::fs::File::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let found = identify(first.as_fd()).unwrap();
        assert_eq!(found, identify(second.as_fd()).unwrap());
        assert!(!found.is_character_device());
    }

    fn tempfile_path() -> std::path::PathBuf {
        std::env::temp_dir().join(format!("gpuslice-identify-{}", std::process::id()))
    }
}
