//! A private node for tests, the demo and the benchmark: containerd, scheduler and GPU in a temporary directory.
#![forbid(unsafe_code)]

pub mod bench;
mod container;
pub mod demo;
mod gpu;
mod layout;
mod leftovers;
mod node;
pub mod process;
mod programs;
pub mod run;
mod running;
pub mod scripted;
mod spec;
pub mod sweep;
pub mod wait;

pub use container::{Container, Runtime};
pub use gpu::Gpus;
pub use node::{Node, Options};
pub use programs::Programs;
pub use running::{Ended, Running};
pub use spec::Device;
