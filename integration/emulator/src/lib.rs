//! An emulated NVIDIA driver: speaks the ABI of driver 580 over a socket, without a GPU.
//!
//! Test-only; no part of a release. See DESIGN.md for the transport and the rules that it plays.

mod alloc;
mod bytes;
mod call;
mod caller;
mod control;
mod control_client;
mod control_gpu;
mod control_runlist;
mod ctl;
mod emulator;
mod engine;
mod escape;
mod faults;
mod files;
mod journal;
mod mapping;
mod maps;
mod memory;
mod model;
mod nodes;
mod replay;
mod server;
mod share;
mod state;
mod status;
mod sys;
mod table;
mod uvm;
mod wire;

pub use call::Install;
pub use caller::Caller;
pub use ctl::ask;
pub use emulator::{Answer, DEFAULT_VERSION, Emulator, Options};
pub use model::{Gpu, MODELS, Model, model};
pub use nodes::{Node, UVM_MAJOR};
pub use replay::{Difference, Perform, Recording, ReplayError, Summary, replay};
pub use server::start;
pub use wire::{CONTROL_SOCKET, FRAME, Reply, Request, SOCKET};
