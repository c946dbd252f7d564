//! `gpuslice-harness`: what `cargo xtask` runs beside the tests.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Shows what two tenants on one GPU see and are refused.
    Demo {
        /// One JSON object a line.
        #[arg(long)]
        json: bool,
        /// The emulated GPU although there is a real one.
        #[arg(long)]
        emulated: bool,
    },
    /// Measures what gpuslice costs.
    Bench {
        /// One JSON object a line.
        #[arg(long)]
        json: bool,
        /// Only these ids.
        only: Vec<String>,
    },
    /// Ends and removes whatever a run left in its directory.
    Sweep {
        /// The directory.
        directory: PathBuf,
    },
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Demo { json, emulated } => gpuslice_harness::demo::run(json, emulated),
        Command::Bench { json, only } => gpuslice_harness::bench::run(json, &only).map(|()| true),
        Command::Sweep { directory } => gpuslice_harness::sweep::clear(&directory).map(|()| true),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("harness: {error:#}");
            ExitCode::FAILURE
        }
    }
}
