//! The policy table: what the driver's commands look like and what the sandbox does with each.

mod trap;

pub use trap::{acts_on, escape_bytes, harmless};

/// A driver branch.
#[derive(Debug)]
pub struct Branch {}
