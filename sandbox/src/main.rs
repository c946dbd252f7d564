//! gpuslice-sandbox: started by the shim, one for each GPU container.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use gpuslice_sandbox::driver::KernelDriver;

/// Files that the shim passes: null, log, log, control socket.
const FILES: u32 = 4;

fn main() -> ExitCode {
    gpuslice_sandbox::run(FILES, || Ok(()), |(), settings, _| Ok(KernelDriver::new(settings.uvm_major)))
}
