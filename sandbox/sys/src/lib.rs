//! System calls of the gpuslice parts: the only crate with `unsafe` code.
//!
//! Owns: thin, safe functions over kernel interfaces that std and nix don't have, or have with raw file
//! numbers. Trusts: the running kernel. Promises: no file number leaves this crate unowned, every received
//! file is close-on-exec, no reference into another process's memory exists. Fails with `std::io::Error`
//! that carries the kernel's error number.
//!
//! | module | what |
//! | --- | --- |
//! | [`arg`], [`mod@ioctl`] | driver calls on copied parameters with embedded buffers |
//! | [`notify`] | seccomp user notification, the supervisor's side |
//! | [`process`] | pidfds, file table comparison, a stopped process's seccomp programs |
//! | [`bpf`] | seccomp programs of this process |
//! | [`memory`] | tenant memory, shared mappings, memfds |
//! | [`socket`] | SEQPACKET sockets with files; the listener socket that runtimes send to |
//! | [`mod@identify`] | what a file is, without blocking on it |
//! | [`mod@spawn`] | start a sealed executable with exactly the files named |
//! | [`jail`] | giving up rights, one step each |
//! | [`inject`] | another process's memory: moving a range onto a memfd, making the pages of one |
//! | [`resident`] | an idle process gives back its code pages |
//! | [`wait`] | poll with a deadline |

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
compile_error!("gpuslice runs on Linux on x86-64 only");

pub mod arg;
pub mod bpf;
mod call;
pub mod identify;
pub mod inject;
pub mod ioctl;
pub mod jail;
pub mod memory;
pub mod notify;
pub mod process;
mod ptrace;
pub mod resident;
pub mod socket;
pub mod spawn;
pub mod wait;

pub use arg::{Arg, Link};
pub use bpf::Instruction;
pub use identify::{FileIdentity, identify};
pub use ioctl::{ioctl, with_addresses};
pub use memory::{SharedMapping, TenantMemory};
pub use notify::{Answer, Listener, Notification};
pub use socket::{Listening, Peer, Socket};
pub use spawn::{Spawn, spawn};
