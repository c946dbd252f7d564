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
    /// Ends and removes whatever a run left in its directory.
    Sweep {
        /// The directory.
        directory: PathBuf,
    },
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
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
