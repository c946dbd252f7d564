//! `gpuslice`: what the node's administrator asks.
//!
//! Reads, never changes anything. Exit status: 0 all is well, 1 something is wrong or can't be reached, 2 the
//! command line is wrong.
#![forbid(unsafe_code)]

mod doctor;
mod drivers;
mod query;
mod status;
mod table;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Parser, Subcommand};
use gpuslice_config::{DEFAULT_PATH, Node};

/// Looks after gpuslice on this node: who shares the GPUs, what this machine offers, whether the
/// configuration is right. Changes nothing. Run it as root.
#[derive(Parser)]
#[command(version, arg_required_else_help = true)]
#[command(
    after_help = "Exit status: 0 all is well, 1 something is wrong or can't be reached, 2 wrong usage.\n\n\
    Examples:\n  gpuslice status             tenants, their quotas and use\n  \
    gpuslice doctor             what must be there and isn't\n  \
    gpuslice config check       the configuration as daemon and shim read it"
)]
struct Options {
    /// Configuration; a missing file means the defaults.
    #[arg(long, global = true, default_value = DEFAULT_PATH, value_name = "PATH")]
    config: PathBuf,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Tenants, GPUs, quotas, use and refused calls, as the scheduler has them.
    ///
    /// HARD is the quota, SOFT the guaranteed part of it, USED what the sandbox's ledger charges now, DRIVER
    /// what the driver itself says of it, DENIED allocations refused at the quota, REFUSED commands refused.
    Status {
        /// One JSON object.
        #[arg(long)]
        json: bool,
    },
    /// Looks at everything that gpuslice needs on this node, and says what is lost where something is missing.
    ///
    /// A row marked MISSING keeps GPU containers from starting; one marked "without" costs what it says.
    Doctor {
        /// One JSON object.
        #[arg(long)]
        json: bool,
    },
    /// NVIDIA driver versions that this release knows, and the one found here.
    Drivers {
        /// One JSON object.
        #[arg(long)]
        json: bool,
    },
    /// The configuration.
    Config {
        #[command(subcommand)]
        command: ConfigCommand,
    },
}

#[derive(Subcommand)]
enum ConfigCommand {
    /// Reads a configuration as the daemon and the shim do: unknown keys, values out of range, a file that
    /// others could write, uids that somebody else has.
    Check {
        /// The file; without it that of --config.
        path: Option<PathBuf>,
    },
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("gpuslice: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// True: all is well.
fn run(options: &Options) -> anyhow::Result<bool> {
    let load = || gpuslice_config::load(&options.config).context("configuration");
    match &options.command {
        Command::Status { json } => {
            let answer = query::ask(&load()?)?;
            print!("{}", if *json { status::json(&answer) } else { status::text(&answer) });
            Ok(true)
        }
        Command::Doctor { json } => {
            let rows = doctor::examine(&gpuslice_config::load(&options.config), &doctor::Places::node());
            print!("{}", if *json { doctor::json(&rows) } else { doctor::text(&rows) });
            Ok(doctor::well(&rows))
        }
        Command::Drivers { json } => {
            let (text, known) = drivers::list(&Node::kernel(), *json);
            print!("{text}");
            Ok(known)
        }
        Command::Config { command: ConfigCommand::Check { path } } => {
            let path = path.as_ref().unwrap_or(&options.config);
            let config = gpuslice_config::load(path)?;
            gpuslice_config::check_uids(config.uids(), "/etc".as_ref())?;
            let found = if path.exists() { "ok" } else { "not there: the defaults hold" };
            println!("{}: {found}", path.display());
            Ok(true)
        }
    }
}
