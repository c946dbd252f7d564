//! `cargo xtask bench`: builds the release parts and lets the harness measure them.

use std::process::Command;

use anyhow::Result;

use crate::build::{self, Profile};
use crate::run::{Interrupt, stream};
use crate::setup;
use crate::workspace::{Scratch, require_root};

/// What to measure.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// One JSON object a line: {"id": "D5", "case": "…", "value": 4.2, "unit": "us", "baseline": 0.3}.
    #[arg(long)]
    json: bool,
    /// Only this id: D5, D7, E1 or E2. May be given several times.
    #[arg(long, value_parser = ["D5", "D7", "E1", "E2"])]
    only: Vec<String>,
}

/// Runs the measurements; true if all of them came out, whatever their values.
pub(crate) fn run(options: &Options) -> Result<bool> {
    require_root("bench")?;
    let interrupt = Interrupt::watch()?;
    crate::run::quiet(options.json);
    setup::packages()?;
    let programs = build::programs(Profile::Release)?;
    interrupt.check()?;
    let scratch = Scratch::new(&build::harness(&programs))?;
    let mut command = Command::new(build::harness(&programs));
    command.arg("bench").env("GPUSLICE_PROGRAMS", &programs).env("GPUSLICE_SCRATCH", scratch.path());
    if options.json {
        command.arg("--json");
    }
    command.args(&options.only);
    let ok = stream(&mut command, |_| {})?;
    interrupt.check()?;
    Ok(ok)
}
