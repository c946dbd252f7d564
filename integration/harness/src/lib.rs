//! A private node for tests, the demo and the benchmark: containerd, scheduler and GPU in a temporary directory.
#![forbid(unsafe_code)]

pub mod bench;
mod container;
pub mod demo;
mod gpu;
mod leftovers;
mod node;
pub mod process;
mod programs;
pub mod run;
pub mod scripted;
mod spec;
pub mod sweep;
pub mod wait;

pub use container::{Container, Ended, Running, Runtime};
pub use gpu::Gpus;
pub use node::{Node, Options};
pub use programs::Programs;
pub use spec::Device;
