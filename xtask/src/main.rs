//! The one entry to everything a developer or a CI job does: `cargo xtask --help`.
//!
//! It builds, installs what a bare Debian machine lacks, runs the programs that do the work, counts their results
//! and sweeps what an interrupted run left behind. The private node itself is in `integration/harness`.
#![forbid(unsafe_code)]

mod bench;
mod build;
mod demo;
mod layering;
mod lint;
mod run;
mod setup;
mod size;
mod tally;
mod test;
mod workspace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Builds, tests, measures and shows gpuslice.
///
/// `demo`, `test` and `bench` start a private containerd in a temporary directory and must run as root;
/// nothing outside that directory is touched and nothing is left behind.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Installs from Debian what is missing (containerd, runc, busybox-static) and builds containerd 2.4.2 where
    /// Go 1.26 or newer is there. Does nothing where all of it is there.
    Setup,
    /// Runs two tenants on one GPU and shows what each of them sees and is refused. On the real GPU where
    /// /dev/nvidiactl exists, else on the emulated one.
    Demo(demo::Options),
    /// Runs the unit, property and end-to-end tests, the last on both containerd versions.
    Test(test::Options),
    /// Measures what a start costs, what the parts keep in memory, and what a proxied call costs.
    Bench(bench::Options),
    /// Formatting, clippy, layering, file length, use of `unsafe`, docs.
    Lint,
    /// All of `lint`, then all of `test`.
    Ci,
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Setup => setup::all().map(|_| true),
        Command::Demo(options) => demo::run(&options),
        Command::Test(options) => test::run(&options),
        Command::Bench(options) => bench::run(&options),
        Command::Lint => lint::run(),
        Command::Ci => ci(),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Lints first: they are quick and need no root.
fn ci() -> anyhow::Result<bool> {
    workspace::require_root("ci")?;
    let mut tally = tally::Tally::default();
    lint::collect(&mut tally)?;
    test::collect(&test::Options::default(), &mut tally)?;
    Ok(tally.close())
}
