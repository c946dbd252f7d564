//! `gpuslice-scheduler`: the node's daemon.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;

/// Gives out leases on the node's GPUs and watches over their memory. Runs as root, one per node; the shim
/// starts no GPU container without it. Stops on SIGTERM; running containers go on.
#[derive(Parser)]
#[command(version)]
struct Options {
    /// Configuration; a missing file means the defaults.
    #[arg(long, default_value = gpuslice_config::DEFAULT_PATH)]
    config: PathBuf,
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

fn serve(options: &Options) -> anyhow::Result<()> {
    let config = gpuslice_config::load(&options.config).context("configuration")?;
    let backend = gpuslice_scheduler::Stock::kernel().context("driver")?;
    gpuslice_scheduler::run(&config, Box::new(backend))?;
    Ok(())
}
