//! Builds the programs that a private node consists of and lays them out in one folder.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::run::{say, succeed};
use crate::workspace::{cargo, target};

/// Which build of the parts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Profile {
    /// What `cargo test` has mostly built already.
    Test,
    /// What is shipped: measurements.
    Release,
}

impl Profile {
    fn name(self) -> &'static str {
        match self {
            Profile::Test => "dev",
            Profile::Release => "release",
        }
    }
}

/// Packages with programs of the product, then those for tests only.
const PRODUCT: [&str; 4] = ["gpuslice-shim", "gpuslice-sandbox", "gpuslice-scheduler", "gpuslice-cli"];
const TEST_ONLY: [&str; 3] = ["gpuslice-node", "gpuslice-emulator", "gpuslice-harness"];

/// Builds all programs; returns the folder that they are in.
pub(crate) fn programs(profile: Profile) -> Result<PathBuf> {
    say(&format!("building the parts (profile {})", profile.name()));
    // One cargo call for each group: features of test-only crates must not reach the product.
    for group in [&PRODUCT[..], &TEST_ONLY[..]] {
        let mut command = cargo();
        command.args(["build", "--quiet", "--bins", "--profile", profile.name()]);
        for package in group {
            command.args(["--package", package]);
        }
        succeed(&mut command, "build")?;
    }
    // The tenant program runs in a container without libraries.
    let mut tenant = cargo();
    tenant.args(["rustc", "--quiet", "--package", "gpuslice-tenant", "--bin", "gpuslice-tenant"]);
    tenant.args([
        "--profile",
        profile.name(),
        "--",
        "-C",
        "target-feature=+crt-static",
        "-C",
        "relocation-model=static",
    ]);
    succeed(&mut tenant, "build the tenant program")?;
    let folder = target().join(if profile == Profile::Test { "debug" } else { "release" });
    std::fs::canonicalize(&folder).with_context(|| format!("find {}", folder.display()))
}

/// Builds the harness program only.
pub(crate) fn harness_alone() -> Result<PathBuf> {
    let mut command = cargo();
    succeed(command.args(["build", "--quiet", "--package", "gpuslice-harness"]), "build the harness")?;
    Ok(target().join("debug"))
}

/// The harness program in a folder of programs.
pub(crate) fn harness(programs: &Path) -> PathBuf {
    programs.join("gpuslice-harness")
}
