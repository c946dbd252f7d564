//! One message a frame: encoding, decoding, sequence numbers.

use std::marker::PhantomData;

use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// Largest frame in bytes, header included.
pub const MAX_FRAME: usize = 4096;
/// Changes whenever a message changes; peers of another version are refused by name.
pub const PROTOCOL_VERSION: u16 = 1;
const MAGIC: u32 = 0x6770_736c; // "gpsl"

/// Which link a frame belongs to. A frame of one link is never accepted on another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[repr(u8)]
pub enum Link {
    /// Between shim and scheduler, and command line and scheduler.
    Scheduler = 1,
    /// Between sandbox and scheduler.
    SandboxScheduler = 2,
    /// Between shim and sandbox.
    ShimSandbox = 3,
    /// Between the command line tool and the scheduler.
    Tool = 4,
}

/// A message type of one link and direction.
pub trait Carries: Serialize + DeserializeOwned {
    /// The link that this message belongs to.
    const LINK: Link;
    /// How many files ride on this message.
    fn files(&self) -> usize {
        0
    }
}

/// Why a frame was refused. Every one of these closes the peer.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum FrameError {
    /// Longer than [`MAX_FRAME`].
    #[error("message of {length} bytes, at most {MAX_FRAME} allowed")]
    TooLong {
        /// Length met.
        length: usize,
    },
    /// Not a frame of ours.
    #[error("not a gpuslice frame")]
    Foreign,
    /// Peer speaks another version.
    #[error(
        "peer speaks protocol version {found}, this side {PROTOCOL_VERSION}: install one release of all parts"
    )]
    Version {
        /// Version met.
        found: u16,
    },
    /// Frame of another link, or not decodable, or with bytes left over.
    #[error("malformed frame")]
    Malformed,
    /// Frames lost or repeated.
    #[error("frame number {found}, expected {expected}")]
    Sequence {
        /// Number met.
        found: u32,
        /// Number due.
        expected: u32,
    },
    /// Wrong number of files on the frame.
    #[error("{found} files on a frame that carries {expected}")]
    Files {
        /// Files met.
        found: usize,
        /// Files due.
        expected: usize,
    },
}

#[derive(Serialize, Deserialize)]
struct Header {
    magic: u32,
    version: u16,
    link: Link,
    sequence: u32,
}

fn header_of(frame: &[u8]) -> Result<(Header, &[u8]), FrameError> {
    if frame.len() > MAX_FRAME {
        return Err(FrameError::TooLong { length: frame.len() });
    }
    // Magic and version come first and alone: a later version may have another header behind them.
    let (magic, rest): (u32, &[u8]) = postcard::take_from_bytes(frame).map_err(|_| FrameError::Foreign)?;
    if magic != MAGIC {
        return Err(FrameError::Foreign);
    }
    let (version, _): (u16, &[u8]) = postcard::take_from_bytes(rest).map_err(|_| FrameError::Foreign)?;
    if version != PROTOCOL_VERSION {
        return Err(FrameError::Version { found: version });
    }
    postcard::take_from_bytes(frame).map_err(|_| FrameError::Malformed)
}

/// The link that a frame says it belongs to, so that one listening socket can serve shims and the command
/// line tool. Decides nothing: the frame is still to be decoded by that link's [`Receiver`].
///
/// # Errors
/// [`FrameError::TooLong`], [`FrameError::Foreign`], [`FrameError::Version`] or [`FrameError::Malformed`].
pub fn peek_link(frame: &[u8]) -> Result<Link, FrameError> {
    header_of(frame).map(|(header, _)| header.link)
}

/// Encodes messages of one direction; counts them.
#[derive(Debug)]
pub struct Sender<M> {
    next: u32,
    message: PhantomData<fn(M)>,
}

impl<M: Carries> Default for Sender<M> {
    fn default() -> Self {
        Sender { next: 0, message: PhantomData }
    }
}

impl<M: Carries> Sender<M> {
    /// The frame for `message`.
    ///
    /// # Errors
    /// [`FrameError::TooLong`] when the message doesn't fit; [`FrameError::Malformed`] when it can't be encoded.
    pub fn encode(&mut self, message: &M) -> Result<Vec<u8>, FrameError> {
        let header = Header { magic: MAGIC, version: PROTOCOL_VERSION, link: M::LINK, sequence: self.next };
        let frame = postcard::to_stdvec(&(header, message)).map_err(|_| FrameError::Malformed)?;
        if frame.len() > MAX_FRAME {
            return Err(FrameError::TooLong { length: frame.len() });
        }
        self.next = self.next.wrapping_add(1);
        Ok(frame)
    }
}

/// Decodes messages of one direction; checks their order.
#[derive(Debug)]
pub struct Receiver<M> {
    next: u32,
    message: PhantomData<fn() -> M>,
}

impl<M: Carries> Default for Receiver<M> {
    fn default() -> Self {
        Receiver { next: 0, message: PhantomData }
    }
}

impl<M: Carries> Receiver<M> {
    /// The one message in `frame`, which came with `files` files.
    ///
    /// # Errors
    /// Any [`FrameError`]; the caller closes the peer.
    pub fn decode(&mut self, frame: &[u8], files: usize) -> Result<M, FrameError> {
        let (header, rest) = header_of(frame)?;
        if header.link != M::LINK {
            return Err(FrameError::Malformed);
        }
        let (message, left): (M, &[u8]) =
            postcard::take_from_bytes(rest).map_err(|_| FrameError::Malformed)?;
        if !left.is_empty() {
            return Err(FrameError::Malformed);
        }
        if header.sequence != self.next {
            return Err(FrameError::Sequence { found: header.sequence, expected: self.next });
        }
        if message.files() != files {
            return Err(FrameError::Files { found: files, expected: message.files() });
        }
        self.next = self.next.wrapping_add(1);
        Ok(message)
    }
}
