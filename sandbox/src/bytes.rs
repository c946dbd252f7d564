//! Fields of parameter structures.
//!
//! Every access is bounds-checked; a field outside its structure is `EINVAL`, which only a wrong row of the
//! table could cause.

use nix::errno::Errno;

/// `at` as an index.
pub(crate) fn index(at: u32) -> usize {
    usize::try_from(at).unwrap_or(usize::MAX)
}

/// `length` bytes from `at` on.
pub(crate) fn part(bytes: &[u8], at: u32, length: u32) -> Result<&[u8], Errno> {
    let end = at.checked_add(length).ok_or(Errno::EINVAL)?;
    bytes.get(index(at)..index(end)).ok_or(Errno::EINVAL)
}

/// `length` bytes from `at` on, to write.
pub(crate) fn part_mut(bytes: &mut [u8], at: u32, length: u32) -> Result<&mut [u8], Errno> {
    let end = at.checked_add(length).ok_or(Errno::EINVAL)?;
    bytes.get_mut(index(at)..index(end)).ok_or(Errno::EINVAL)
}

/// The 16-bit field at `at`.
pub(crate) fn get16(bytes: &[u8], at: u32) -> Result<u16, Errno> {
    part(bytes, at, 2)?.try_into().map(u16::from_le_bytes).map_err(|_| Errno::EINVAL)
}

/// The 32-bit field at `at`.
pub(crate) fn get32(bytes: &[u8], at: u32) -> Result<u32, Errno> {
    part(bytes, at, 4)?.try_into().map(u32::from_le_bytes).map_err(|_| Errno::EINVAL)
}

/// The 64-bit field at `at`.
pub(crate) fn get64(bytes: &[u8], at: u32) -> Result<u64, Errno> {
    part(bytes, at, 8)?.try_into().map(u64::from_le_bytes).map_err(|_| Errno::EINVAL)
}

/// Sets the 32-bit field at `at`.
pub(crate) fn put32(bytes: &mut [u8], at: u32, value: u32) -> Result<(), Errno> {
    part_mut(bytes, at, 4)?.copy_from_slice(&value.to_le_bytes());
    Ok(())
}

/// Sets the 64-bit field at `at`.
pub(crate) fn put64(bytes: &mut [u8], at: u32, value: u64) -> Result<(), Errno> {
    part_mut(bytes, at, 8)?.copy_from_slice(&value.to_le_bytes());
    Ok(())
}

/// A file number as the driver's structures hold it.
pub(crate) fn get_file(bytes: &[u8], at: u32) -> Result<i32, Errno> {
    part(bytes, at, 4)?.try_into().map(i32::from_le_bytes).map_err(|_| Errno::EINVAL)
}

/// Sets a file number.
pub(crate) fn put_file(bytes: &mut [u8], at: u32, number: i32) -> Result<(), Errno> {
    part_mut(bytes, at, 4)?.copy_from_slice(&number.to_le_bytes());
    Ok(())
}
