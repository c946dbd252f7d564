//! The policy table: what the driver's commands look like and what the sandbox does with each.
//!
//! Owns: every fact about the driver's interface that filter and dispatch act on, as constant data, one table
//! a driver branch, and the decision for each command. Trusts: nothing at run time; it is data and look-ups.
//! Promises: no wildcard rows. What has no row is refused; a row names every pointer, file number and handle
//! of its command; a class of memory without an accounting rule doesn't compile. Failure: [`UnknownDriver`].
#![forbid(unsafe_code)]

mod branch;
pub mod row;
pub mod status;
mod trap;
mod v580;

pub use branch::{Branch, UnknownDriver, Version};
pub use trap::{acts_on, escape_bytes, harmless};
