//! `gpuslice-sandbox` on an emulated driver.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::ExitCode;

use gpuslice_node::{Connections, EmulatedDriver};

/// Files that the shim passes: null, log, log, control socket, the emulator's root.
const FILES: u32 = 5;
/// The file whose text is the emulator's root.
const ROOT: u32 = 4;
/// Calls at a time: more than the sandbox has workers.
const CONNECTIONS: usize = 16;

fn connect() -> io::Result<Connections> {
    let file = File::from(gpuslice_sys::jail::inherited_file(ROOT)?);
    let mut text = [0; 4096];
    // By offset: other sandboxes read the same open file.
    let length = file.read_at(&mut text, 0)?;
    let root = std::str::from_utf8(text.get(..length).unwrap_or_default()).map_err(io::Error::other)?;
    Connections::open(&PathBuf::from(root), CONNECTIONS)
}

fn main() -> ExitCode {
    gpuslice_sandbox::run(FILES, connect, |connections, settings, own| {
        EmulatedDriver::new(connections, settings, own)
    })
}
