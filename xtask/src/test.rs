//! `cargo xtask test`: unit and property tests, then the end-to-end tests on each containerd.

use std::path::Path;

use anyhow::Result;

use crate::build::{self, Profile};
use crate::run::{Interrupt, say, stream};
use crate::setup::{self, Daemon};
use crate::tally::Tally;
use crate::workspace::{Scratch, cargo, require_root};

/// Package of the end-to-end tests.
const END_TO_END: &str = "gpuslice-tests";

/// Which tests.
#[derive(clap::Args, Default)]
pub(crate) struct Options {
    /// Only `unit` (these need no root), only `e2e`, or only the end-to-end tests whose name contains this text.
    #[arg(long)]
    only: Option<String>,
    /// Only this containerd: a version, or the start of one.
    #[arg(long)]
    daemon: Option<String>,
    /// Run the containers under containerd's own shim, to prove the tests: for `--only lifecycle`.
    #[arg(long)]
    stock: bool,
}

/// Runs the tests and prints the closing line; true if all passed.
pub(crate) fn run(options: &Options) -> Result<bool> {
    let mut tally = Tally::default();
    collect(options, &mut tally)?;
    Ok(tally.close())
}

/// Runs the tests and books them.
pub(crate) fn collect(options: &Options, tally: &mut Tally) -> Result<()> {
    let only = options.only.as_deref();
    if only != Some("unit") {
        require_root("test")?;
    }
    let interrupt = Interrupt::watch()?;
    if only.is_none_or(|only| only == "unit") {
        say("unit and property tests");
        let mut command = cargo();
        command.args([
            "test",
            "--workspace",
            "--exclude",
            END_TO_END,
            "--no-fail-fast",
            "--lib",
            "--bins",
            "--tests",
        ]);
        group(&mut command, "unit", tally)?;
        interrupt.check()?;
    }
    if only == Some("unit") {
        return Ok(());
    }
    let daemons = setup::all()?;
    let programs = if options.stock { build::harness_alone()? } else { build::programs(Profile::Test)? };
    interrupt.check()?;
    let wanted =
        |daemon: &&Daemon| options.daemon.as_deref().is_none_or(|asked| daemon.version.starts_with(asked));
    for daemon in daemons.iter().filter(wanted) {
        say(&format!("end-to-end tests on containerd {}", daemon.version));
        end_to_end(daemon, &programs, options, tally)?;
        interrupt.check()?;
    }
    Ok(())
}

fn end_to_end(daemon: &Daemon, programs: &Path, options: &Options, tally: &mut Tally) -> Result<()> {
    let filter = options.only.as_deref().filter(|only| *only != "e2e");
    let scratch = Scratch::new(&build::harness(programs))?;
    let mut command = cargo();
    command.args(["test", "--package", END_TO_END, "--no-fail-fast", "--"]);
    // Plain `cargo test` skips them: they need root and the programs built beforehand.
    command.args(["--ignored", "--test-threads", "2"]).args(filter);
    command.env("GPUSLICE_PROGRAMS", programs).env("GPUSLICE_SCRATCH", scratch.path());
    command.env("RUST_BACKTRACE", "0");
    if options.stock {
        command.env("GPUSLICE_STOCK", "1");
    }
    if let Some(folder) = &daemon.folder {
        command.env("GPUSLICE_DAEMON", folder);
    }
    group(&mut command, &format!("containerd {}", daemon.version), tally)
}

/// Runs a `cargo test` and books its results.
fn group(command: &mut std::process::Command, name: &str, tally: &mut Tally) -> Result<()> {
    let before = tally.failed();
    let ok = stream(command, |line| {
        if let Some(test) = line.strip_prefix("test ").and_then(|rest| rest.strip_suffix(" ... FAILED")) {
            tally.name_failure(name, test);
        }
        tally.summary_line(line);
    })?;
    if !ok && tally.failed() == before {
        tally.fail(&format!("{name}: did not build, or a test program ended without a result"));
    }
    Ok(())
}
