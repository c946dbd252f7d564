//! `cargo xtask lint`: every check that needs no root and no containerd.

use anyhow::Result;

use crate::run::say;
use crate::tally::Tally;
use crate::workspace::cargo;
use crate::{layering, size};

/// Runs all checks and prints the closing line; true if all hold.
pub(crate) fn run() -> Result<bool> {
    let mut tally = Tally::default();
    collect(&mut tally)?;
    Ok(tally.close())
}

/// Runs all checks and books them.
pub(crate) fn collect(tally: &mut Tally) -> Result<()> {
    say("lints");
    tally.check("formatting (cargo fmt)", cargo().args(["fmt", "--all", "--check"]).status()?.success());
    findings(tally, "layering", layering::check()?);
    findings(tally, "file length", size::long_files()?);
    findings(tally, "unsafe code", size::unsafe_code()?);
    findings(tally, "test names are sentences", size::test_names()?);
    let mut clippy = cargo();
    clippy.args(["clippy", "--quiet", "--workspace", "--all-targets", "--", "-D", "warnings"]);
    tally.check("clippy", clippy.status()?.success());
    let mut docs = cargo();
    docs.args(["doc", "--quiet", "--workspace", "--no-deps", "--document-private-items"]);
    docs.env("RUSTDOCFLAGS", "-D warnings");
    tally.check("docs (rustdoc without warnings)", docs.status()?.success());
    Ok(())
}

fn findings(tally: &mut Tally, name: &str, found: Vec<String>) {
    for line in &found {
        println!("        {line}");
    }
    tally.check(name, found.is_empty());
}
