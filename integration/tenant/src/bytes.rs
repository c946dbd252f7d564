//! A parameter block with little-endian fields.

/// A block that a driver call reads and writes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Block(pub Vec<u8>);

impl Block {
    /// A block of zeros.
    pub(crate) fn zeroed(length: usize) -> Self {
        Block(vec![0; length])
    }

    /// A block of 32-bit fields.
    pub(crate) fn words(words: &[u32]) -> Self {
        Block(words.iter().flat_map(|word| word.to_le_bytes()).collect())
    }

    fn field<const N: usize>(&self, at: usize) -> [u8; N] {
        self.0.get(at..at.saturating_add(N)).and_then(|bytes| bytes.try_into().ok()).unwrap_or([0; N])
    }

    /// Four bytes.
    pub(crate) fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.field(at))
    }

    /// Eight bytes.
    pub(crate) fn u64(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.field(at))
    }

    /// Text up to a zero.
    pub(crate) fn text(&self, at: usize, room: usize) -> String {
        let bytes = self.0.iter().skip(at).take(room).take_while(|byte| **byte != 0).copied().collect();
        String::from_utf8(bytes).unwrap_or_default()
    }

    /// Writes bytes.
    pub(crate) fn set(&mut self, at: usize, bytes: &[u8]) {
        if let Some(target) = self.0.get_mut(at..at.saturating_add(bytes.len())) {
            target.copy_from_slice(bytes);
        }
    }

    /// Writes four bytes.
    pub(crate) fn set_u32(&mut self, at: usize, value: u32) {
        self.set(at, &value.to_le_bytes());
    }

    /// Writes eight bytes.
    pub(crate) fn set_u64(&mut self, at: usize, value: u64) {
        self.set(at, &value.to_le_bytes());
    }

    /// Address of the block, for a pointer field of another one.
    pub(crate) fn address(&self) -> u64 {
        if self.0.is_empty() { 0 } else { self.0.as_ptr().expose_provenance().try_into().unwrap_or(0) }
    }
}
