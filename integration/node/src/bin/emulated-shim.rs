//! `containerd-shim-gpuslice-v1` on an emulated driver.

use std::fs::File;
use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;

use gpuslice_node::{ROOT, root};
use gpuslice_shim::{DeviceKind, Node, SandboxProgram, report_error, run};

fn node() -> anyhow::Result<Node> {
    let root = root()?;
    let mut name =
        File::from(nix::sys::memfd::memfd_create(c"emulator-root", nix::sys::memfd::MFdFlags::MFD_CLOEXEC)?);
    name.write_all(root.as_os_str().as_encoded_bytes())?;
    Ok(Node {
        dev: root.join("dev"),
        proc_driver: root.join("proc/driver/nvidia"),
        proc_devices: root.join("proc/devices"),
        devices: DeviceKind::Regular,
        sandbox: SandboxProgram { path: None, extra_files: vec![Arc::new(name)] },
        keep_environment: vec![ROOT],
        ..Node::default()
    })
}

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let node = match node() {
        Ok(node) => node,
        Err(error) => {
            eprintln!("emulated-shim: {error:#}");
            return ExitCode::FAILURE;
        }
    };
    match run(node, &arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report_error(&error);
            ExitCode::FAILURE
        }
    }
}
