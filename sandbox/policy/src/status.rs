//! Status codes that the driver answers in a command's parameters.

/// Done.
pub const OK: u32 = 0x00;
/// The handle is taken.
pub const INSERT_DUPLICATE_NAME: u32 = 0x19;
/// Out of something that isn't memory.
pub const INSUFFICIENT_RESOURCES: u32 = 0x1a;
/// The caller may not.
pub const INSUFFICIENT_PERMISSIONS: u32 = 0x1b;
/// A field has a value that isn't allowed.
pub const INVALID_ARGUMENT: u32 = 0x1f;
/// No such class.
pub const INVALID_CLASS: u32 = 0x22;
/// No such client, or not the caller's.
pub const INVALID_CLIENT: u32 = 0x23;
/// Flags that aren't allowed.
pub const INVALID_FLAGS: u32 = 0x29;
/// What an unknown client's handle gives in a lookup.
pub const INVALID_OBJECT_HANDLE: u32 = 0x33;
/// No such parent.
pub const INVALID_OBJECT_PARENT: u32 = 0x36;
/// Parameters of the wrong size.
pub const INVALID_PARAM_STRUCT: u32 = 0x3a;
/// A pointer that isn't one.
pub const INVALID_POINTER: u32 = 0x3d;
/// Not in this state.
pub const INVALID_STATE: u32 = 0x40;
/// No memory left.
pub const NO_MEMORY: u32 = 0x51;
/// Not known here.
pub const NOT_SUPPORTED: u32 = 0x56;
/// No such object.
pub const OBJECT_NOT_FOUND: u32 = 0x57;
/// A UVM call before `UVM_INITIALIZE`.
pub const ILLEGAL_ACTION: u32 = 0x16;
