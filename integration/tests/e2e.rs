//! End-to-end tests through real containerd and `ctr`, one file per promise. Each test has a private node of its
//! own and ends with the check that its containers left nothing behind.
//!
//! They are ignored by plain `cargo test`: they need root, and programs built beforehand. `cargo xtask test` runs
//! them, once on each containerd.
#![forbid(unsafe_code)]

mod fail_closed;
mod identity;
mod isolation;
mod lifecycle;
mod memory;
mod slice;
