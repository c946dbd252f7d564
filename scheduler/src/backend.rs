//! What the scheduler asks of the driver.
//!
//! Owns: the interface to a node's cards, its errors. [`Stock`] is the driver as it is shipped; tests inject
//! others. A backend is used by one thread alone, which may block in it: the poll loop never does.
//! The planner of compute time will add its orders here.

mod rm;
mod stock;

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;

use gpuslice_config::NodeError;
use gpuslice_proto::GpuUuid;

pub use rm::{KernelRm, Rm};
pub use stock::Stock;

/// A card as the driver has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Card {
    /// Its UUID.
    pub uuid: GpuUuid,
    /// Minor number of its device node.
    pub minor: u32,
    /// Device memory that clients can have, bytes.
    pub memory: u64,
}

/// What the driver holds for one process on one card.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holding {
    /// Device memory, bytes.
    pub bytes: u64,
    /// The driver lists a client of the process on this card.
    pub listed: bool,
}

/// Why a card can't be asked.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// The node's files.
    #[error(transparent)]
    Node(NodeError),
    /// A device node can't be opened.
    #[error("can't open {}", path.display())]
    Open {
        /// The node.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The call itself failed.
    #[error("driver call {what}")]
    Call {
        /// Which.
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// The driver answered with a status.
    #[error("driver call {what}: status {status:#x}")]
    Status {
        /// Which.
        what: &'static str,
        /// Not 0.
        status: u32,
    },
    /// The driver's answer makes no sense.
    #[error("driver call {what}: {found}")]
    Answer {
        /// Which.
        what: &'static str,
        /// What it said.
        found: String,
    },
}

/// A node's cards.
pub trait Backend: Send {
    /// Driver version.
    fn driver(&self) -> &str;

    /// The cards, as found when the backend was made.
    fn cards(&self) -> Vec<Card>;

    /// What these processes hold on the card `minor`. A process without an entry holds nothing.
    ///
    /// # Errors
    /// [`BackendError`]: nothing is known about the card.
    fn audit(&mut self, minor: u32, sandboxes: &[u32]) -> Result<BTreeMap<u32, Holding>, BackendError>;
}
