//! `cargo xtask demo`: installs, builds, and lets the harness show the product.

use std::process::Command;

use anyhow::Result;

use crate::build::{self, Profile};
use crate::run::{Interrupt, stream};
use crate::setup;
use crate::workspace::{Scratch, require_root};

/// What to show.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// One JSON object a line instead of text: {"show": "quota", "ok": true, …}.
    #[arg(long)]
    json: bool,
    /// Use the emulated GPU although there is a real one.
    #[arg(long)]
    emulated: bool,
}

/// Runs the demo; true if everything that it shows holds.
pub(crate) fn run(options: &Options) -> Result<bool> {
    require_root("demo")?;
    let interrupt = Interrupt::watch()?;
    crate::run::quiet(options.json);
    setup::packages()?;
    let real = !options.emulated && std::path::Path::new("/dev/nvidiactl").exists();
    let programs = build::programs(if real { Profile::Release } else { Profile::Test })?;
    interrupt.check()?;
    let scratch = Scratch::new(&build::harness(&programs))?;
    let mut command = Command::new(build::harness(&programs));
    command.arg("demo").env("GPUSLICE_PROGRAMS", &programs).env("GPUSLICE_SCRATCH", scratch.path());
    if options.json {
        command.arg("--json");
    }
    if options.emulated {
        command.arg("--emulated");
    }
    let ok = stream(&mut command, |_| {})?;
    interrupt.check()?;
    Ok(ok)
}
