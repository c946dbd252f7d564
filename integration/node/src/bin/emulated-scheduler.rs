//! `gpuslice-scheduler` on an emulated driver.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;
use gpuslice_node::{Connections, EmulatedRm, root};
use gpuslice_scheduler::Stock;

/// The node's scheduler, on an emulated driver.
#[derive(Debug, Parser)]
struct Options {
    /// Configuration; a missing file means the defaults.
    #[arg(long, default_value = gpuslice_config::DEFAULT_PATH)]
    config: PathBuf,
}

fn serve(options: &Options) -> anyhow::Result<()> {
    let config = gpuslice_config::load(&options.config).context("configuration")?;
    let root = root()?;
    let connections = Connections::open(&root, 2).context("the emulator's socket")?;
    let node = gpuslice_config::Node { dev: root.join("dev"), proc_driver: root.join("proc/driver/nvidia") };
    let backend = Stock::new(&node, EmulatedRm(connections)).context("driver")?;
    gpuslice_scheduler::run(&config, Box::new(backend))?;
    Ok(())
}

fn main() -> ExitCode {
    match serve(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gpuslice-scheduler: {error:#}");
            ExitCode::FAILURE
        }
    }
}
