//! The containerd shim of gpuslice, for the kernel's own devices.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use gpuslice_shim::{Node, report_error, run};

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    match run(Node::default(), &arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report_error(&error);
            ExitCode::FAILURE
        }
    }
}
