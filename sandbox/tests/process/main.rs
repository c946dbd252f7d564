//! The sandbox's process, confined as in production, between a scripted shim and real tenant processes under a
//! real seccomp filter. The driver is a counting fake. Needs root.
//!
//! This program is all of them: `process <uid> <container>` is the sandbox, `process tenant <name>` a tenant,
//! else it runs the tests whose names contain its first argument.
#![forbid(unsafe_code)]
#![allow(unreachable_pub, clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "a test")]

mod cases;
mod driver;
mod shim;
mod tenant;

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["tenant", name] => tenant::run(name),
        [uid, _] if uid.parse::<u32>().is_ok() => {
            return gpuslice_sandbox::run(4, || Ok(()), |(), _, files| driver::Counting::new(files));
        }
        _ => return cases::run(&arguments),
    }
    ExitCode::SUCCESS
}
