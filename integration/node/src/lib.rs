//! The product's programs with an emulated driver in the kernel's place, for tests.
//!
//! Owns: the client of the emulator's socket, and how each program learns where the emulator is. Never part of a
//! release: the release programs are other binaries, with the kernel's driver passed to the same `run`.
//!
//! | program | learns the emulator's root from |
//! | --- | --- |
//! | `emulated-shim`, `emulated-scheduler` | `GPUSLICE_EMULATED_ROOT` |
//! | `emulated-sandbox` (empty environment) | the text of the file that it is started with as descriptor 4 |
#![forbid(unsafe_code)]

mod connections;
mod sandbox;
mod scheduler;

use std::path::PathBuf;

pub use connections::Connections;
pub use sandbox::EmulatedDriver;
pub use scheduler::EmulatedRm;

/// Variable with the emulator's root.
pub const ROOT: &str = "GPUSLICE_EMULATED_ROOT";

/// The emulator's root from the environment.
///
/// # Errors
/// The variable is not set.
pub fn root() -> anyhow::Result<PathBuf> {
    match std::env::var_os(ROOT) {
        Some(root) => Ok(root.into()),
        None => anyhow::bail!("{ROOT} is not set: it names the directory of a running gpuslice-emulator"),
    }
}
