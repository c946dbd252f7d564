//! The trap: the seccomp rules that bring a container's NVIDIA calls to its sandbox, the proof that the
//! compiled program holds them, and the sandbox's own filter.
//!
//! Who calls what:
//! - The shim, before `runc create`, for every container of this runtime:
//!   `spec["linux"]["seccomp"] = merge(profile, &form)?` with [`Form::Notify`] for a container that was granted
//!   a GPU and [`Form::Errno`] for all others.
//! - The shim, after `runc create` and before the start, for GPU containers: read the programs of the created
//!   init with `gpuslice_sys::process::program_of(pid)` and `judge(&programs, Kind::Notify)?`. A [`Hole`] means:
//!   don't start. (`form.kind()` gives the [`Kind`]; the other containers may be judged with [`Kind::Errno`].)
//! - The sandbox, as the last step of its confinement: `gpuslice_sys::bpf::install(&own_program(commands))`.
//! - `gpuslice doctor` and the shim: [`Support::probe`] says what kernel and runtime offer.
//!
//! Trusts: the numbers of `gpuslice-policy`; nothing else. The profile is the pod author's, the compiled program
//! is the runtime's: both may be anything. Promises: a merged profile never allows what the pod's profile
//! denies; a program that [`judge()`] passes lets no command of the driver run natively. Failure: an error, and
//! the container does not start.
#![forbid(unsafe_code)]

mod cube;
mod dispatch;
mod interpret;
mod judge;
mod own;
mod profile;
mod support;
mod symbolic;

pub use interpret::{Action, Call, run};
pub use judge::{Hole, Kind, judge};
pub use own::own_program;
pub use profile::{Form, ProfileError, merge};
pub use support::{Release, Row, Runtime, Support, SupportError, killable};
