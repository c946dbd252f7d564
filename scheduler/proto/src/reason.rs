//! Refusal codes that cross a socket. Numbers are part of the protocol: never reused.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Why the scheduler refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "u16", into = "u16")]
#[repr(u16)]
pub enum Reason {
    /// The peer isn't root.
    NotRoot = 1,
    /// A container of this id holds a lease.
    Duplicate = 2,
    /// The driver found on the node isn't the one that the scheduler was started on.
    DriverChanged = 3,
    /// No such GPU on this node.
    UnknownGpu = 4,
    /// The guaranteed memory of all tenants would exceed the card.
    MemoryExhausted = 5,
    /// No uid of the configured range is free.
    UidsExhausted = 6,
    /// A limit is out of range.
    BadLimit = 7,
    /// The lease named doesn't exist or isn't this peer's.
    NoLease = 8,
    /// The GPU is marked unhealthy.
    GpuUnhealthy = 9,
    /// The scheduler is stopping.
    Stopping = 10,
    /// A message that isn't legal in this phase.
    OutOfOrder = 11,
    /// An adopted container's ledger doesn't equal what the driver says.
    LedgerMismatch = 12,
}

impl From<Reason> for u16 {
    fn from(reason: Reason) -> u16 {
        reason as u16
    }
}

impl TryFrom<u16> for Reason {
    type Error = String;
    fn try_from(code: u16) -> Result<Self, String> {
        use Reason::*;
        [
            NotRoot,
            Duplicate,
            DriverChanged,
            UnknownGpu,
            MemoryExhausted,
            UidsExhausted,
            BadLimit,
            NoLease,
            GpuUnhealthy,
            Stopping,
            OutOfOrder,
            LedgerMismatch,
        ]
        .into_iter()
        .find(|reason| u16::from(*reason) == code)
        .ok_or_else(|| format!("unknown refusal code {code}"))
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Reason::NotRoot => "the peer is not root",
            Reason::Duplicate => "a container of this id holds a lease",
            Reason::DriverChanged => "the driver's version changed since the scheduler started",
            Reason::UnknownGpu => "no such GPU on this node",
            Reason::MemoryExhausted => "the guaranteed memory of all tenants would exceed the card",
            Reason::UidsExhausted => "no uid of the configured range is free",
            Reason::BadLimit => "a limit is out of range",
            Reason::NoLease => "no such lease",
            Reason::GpuUnhealthy => "the GPU is marked unhealthy",
            Reason::Stopping => "the scheduler is stopping",
            Reason::OutOfOrder => "the message is not legal now",
            Reason::LedgerMismatch => "the ledger does not equal what the driver says",
        })
    }
}
