//! What the node's administrator says, and what the node itself says about its GPUs.
//!
//! Owns: the types of `/etc/gpuslice/config.toml`, their defaults and checks; the strict parser of byte
//! quantities, which the slice annotations use as well; the reading of `/proc/driver/nvidia`; the check of
//! the sandbox uid range against the node's other uids. Trusts root's files only: [`load()`] refuses a file
//! that somebody else can write. Promises: a value that comes out of [`Config`] was checked; a key that it
//! doesn't know is an error that names the key and those allowed. Fails closed: every error means that
//! nothing starts.
#![forbid(unsafe_code)]

mod bytes;
mod config;
mod load;
mod node;
mod uids;

pub use bytes::{Bytes, QuantityError};
pub use config::{
    Bounds, Config, Defaults, Fence, GpuOverride, InvalidConfig, Limits, MAX_WEIGHT, Runtime, Sandboxes,
    Scheduler,
};
pub use load::{DEFAULT_PATH, LoadError, load, parse};
pub use node::{Gpu, Node, NodeError};
pub use uids::{UidConflict, UidRange, check_uids};
