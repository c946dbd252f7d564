//! A copied parameter block with little-endian fields.
//!
//! Owns: the copy. Promises: a field outside the block reads as 0 and is not written; block sizes are checked
//! before fields are used, so that happens only in the shorter forms of a few commands.

/// A parameter block copied from the caller.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Bytes(pub Vec<u8>);

impl Bytes {
    /// A block of zeros.
    pub(crate) fn zeroed(length: usize) -> Self {
        Bytes(vec![0; length])
    }

    /// Its length.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether it has no bytes.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn field<const N: usize>(&self, at: usize) -> [u8; N] {
        let end = at.saturating_add(N);
        self.0.get(at..end).and_then(|bytes| bytes.try_into().ok()).unwrap_or([0; N])
    }

    /// The bytes at `at`, `length` of them, zeros beyond the end.
    pub(crate) fn slice(&self, at: usize, length: usize) -> Vec<u8> {
        let mut out: Vec<u8> = self.0.iter().skip(at).take(length).copied().collect();
        out.resize(length, 0);
        out
    }

    /// One byte.
    pub(crate) fn u8(&self, at: usize) -> u8 {
        u8::from_le_bytes(self.field(at))
    }

    /// Two bytes.
    pub(crate) fn u16(&self, at: usize) -> u16 {
        u16::from_le_bytes(self.field(at))
    }

    /// Four bytes.
    pub(crate) fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.field(at))
    }

    /// Four bytes, signed.
    pub(crate) fn i32(&self, at: usize) -> i32 {
        i32::from_le_bytes(self.field(at))
    }

    /// Eight bytes.
    pub(crate) fn u64(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.field(at))
    }

    /// Writes bytes; nothing where they don't fit.
    pub(crate) fn set(&mut self, at: usize, bytes: &[u8]) {
        let end = at.saturating_add(bytes.len());
        if let Some(target) = self.0.get_mut(at..end) {
            target.copy_from_slice(bytes);
        }
    }

    /// Writes four bytes.
    pub(crate) fn set_u32(&mut self, at: usize, value: u32) {
        self.set(at, &value.to_le_bytes());
    }

    /// Writes two bytes.
    pub(crate) fn set_u16(&mut self, at: usize, value: u16) {
        self.set(at, &value.to_le_bytes());
    }

    /// Writes eight bytes.
    pub(crate) fn set_u64(&mut self, at: usize, value: u64) {
        self.set(at, &value.to_le_bytes());
    }

    /// Writes text and zeros up to `room` bytes.
    pub(crate) fn set_text(&mut self, at: usize, room: usize, text: &str) {
        let mut field = text.as_bytes().to_vec();
        field.truncate(room.saturating_sub(1));
        field.resize(room, 0);
        self.set(at, &field);
    }
}
