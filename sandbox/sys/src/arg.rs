//! Parameters of a driver call.
//!
//! Owns: the top-level bytes and each embedded buffer. Promises: while the driver runs, every pointer field
//! named by a [`Link`] holds the address of that link's buffer (or null if it is empty), and before and after
//! it holds zero, so no address of this process leaves it and none of a tenant enters the driver by way of
//! such a field. Trusts: the caller's table that each buffer is as long as the driver takes it to be; this
//! crate can't know the driver's structures.

use std::io;

use crate::call::error;

const POINTER: usize = 8;

/// A command's parameters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Arg {
    /// The structure that the command's argument points to; empty = the argument is null.
    pub bytes: Vec<u8>,
    /// Embedded buffers.
    pub links: Vec<Link>,
}

/// A buffer that a pointer field names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// Offset of the pointer field in its parent.
    pub at: usize,
    /// The parent: `None` is [`Arg::bytes`], `Some(i)` is `links[i]`.
    pub parent: Option<usize>,
    /// The buffer; empty = the field is null.
    pub bytes: Vec<u8>,
}

impl Arg {
    /// Parameters without pointers.
    pub fn flat(bytes: Vec<u8>) -> Arg {
        Arg { bytes, links: Vec::new() }
    }

    /// Adds a buffer and returns its index.
    pub fn link(&mut self, parent: Option<usize>, at: usize, bytes: Vec<u8>) -> usize {
        self.links.push(Link { at, parent, bytes });
        self.links.len() - 1
    }

    fn set_field(&mut self, parent: Option<usize>, at: usize, value: u64) -> io::Result<()> {
        let buffer = match parent {
            None => Some(&mut self.bytes),
            Some(index) => self.links.get_mut(index).map(|link| &mut link.bytes),
        };
        let end = at.checked_add(POINTER).ok_or_else(|| error(libc::EINVAL))?;
        let field = buffer.and_then(|bytes| bytes.get_mut(at..end)).ok_or_else(|| error(libc::EINVAL))?;
        field.copy_from_slice(&value.to_ne_bytes());
        Ok(())
    }

    /// Sets every pointer field to `value` of its link.
    pub(crate) fn patch(&mut self, value: impl Fn(&Link) -> u64) -> io::Result<()> {
        for index in 0..self.links.len() {
            let Some(link) = self.links.get(index) else { break };
            let (parent, at, field) = (link.parent, link.at, value(link));
            self.set_field(parent, at, field)?;
        }
        Ok(())
    }
}
