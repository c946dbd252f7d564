//! The driver's status codes that the emulator answers.

use std::fmt;

/// A status as the driver writes it into a parameter block.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Status(pub u32);

#[allow(missing_docs, reason = "the driver's names")]
impl Status {
    pub const OK: Status = Status(0);
    pub const GPU_IS_LOST: Status = Status(0x0f);
    pub const BUFFER_TOO_SMALL: Status = Status(0x02);
    pub const GPU_UUID_NOT_FOUND: Status = Status(0x12);
    pub const ILLEGAL_ACTION: Status = Status(0x16);
    pub const INSERT_DUPLICATE_NAME: Status = Status(0x19);
    pub const INSUFFICIENT_RESOURCES: Status = Status(0x1a);
    pub const INSUFFICIENT_PERMISSIONS: Status = Status(0x1b);
    pub const INVALID_ADDRESS: Status = Status(0x1e);
    pub const INVALID_ARGUMENT: Status = Status(0x1f);
    pub const INVALID_CHANNEL: Status = Status(0x21);
    pub const INVALID_CLASS: Status = Status(0x22);
    pub const INVALID_CLIENT: Status = Status(0x23);
    pub const INVALID_DEVICE: Status = Status(0x26);
    pub const INVALID_EVENT: Status = Status(0x28);
    pub const INVALID_FUNCTION: Status = Status(0x2a);
    pub const INVALID_LIMIT: Status = Status(0x2e);
    pub const INVALID_OBJECT: Status = Status(0x31);
    pub const INVALID_OBJECT_HANDLE: Status = Status(0x33);
    pub const INVALID_OBJECT_PARENT: Status = Status(0x36);
    pub const INVALID_PARAM_STRUCT: Status = Status(0x3a);
    pub const INVALID_STATE: Status = Status(0x40);
    pub const INVALID_OWNER: Status = Status(0x39);
    pub const NO_MEMORY: Status = Status(0x51);
    pub const NOT_READY: Status = Status(0x55);
    pub const NOT_SUPPORTED: Status = Status(0x56);
    pub const OBJECT_NOT_FOUND: Status = Status(0x57);
    pub const OUT_OF_RANGE: Status = Status(0x5b);
    pub const PAGE_TABLE_NOT_AVAIL: Status = Status(0x5d);
    pub const STATE_IN_USE: Status = Status(0x63);
    pub const UVM_ADDRESS_IN_USE: Status = Status(0x68);
    pub const GENERIC: Status = Status(0xffff);
    pub const NOTHING_TO_DO: Status = Status(0x0001_0006);
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Status({:#x})", self.0)
    }
}
