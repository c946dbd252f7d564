//! Installs what the tests need and a bare Debian machine lacks. Where a binary is there nothing is installed.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::run::{say, succeed};
use crate::workspace::{find_program, require_root, target};

/// The second containerd that the end-to-end tests run on.
pub(crate) const CONTAINERD_2: &str = "2.4.2";
/// Oldest Go that builds it.
const GO_FLOOR: (u32, u32) = (1, 26);

/// A containerd to test on.
pub(crate) struct Daemon {
    /// Version as asked for.
    pub(crate) version: String,
    /// Folder with containerd, ctr and the stock shim; none: those on PATH.
    pub(crate) folder: Option<PathBuf>,
}

/// Binary that must be there, and Debian's package of it.
const NEEDED: [(&str, &str); 6] = [
    ("containerd", "containerd"),
    ("ctr", "containerd"),
    ("runc", "runc"),
    ("busybox", "busybox-static"),
    ("cc", "gcc"),
    ("xz", "xz-utils"),
];

/// Installs what is missing; returns the daemons that tests can run on.
pub(crate) fn all() -> Result<Vec<Daemon>> {
    packages()?;
    let mut daemons = vec![Daemon { version: system_version()?, folder: None }];
    daemons.extend(second_daemon()?);
    Ok(daemons)
}

/// Installs Debian's packages where their binaries are missing.
pub(crate) fn packages() -> Result<()> {
    let mut missing: Vec<&str> = NEEDED
        .iter()
        .filter(|(binary, _)| find_program(binary).is_none())
        .map(|(_, package)| *package)
        .collect();
    if find_program("cc").is_some() && !Path::new("/usr/lib/x86_64-linux-gnu/libc.a").exists() {
        missing.push("libc6-dev");
    }
    missing.dedup();
    if missing.is_empty() {
        say("containerd, ctr, runc, busybox, xz and a C linker are there: nothing to install");
        return Ok(());
    }
    require_root("setup")?;
    say(&format!("installing from Debian: {}", missing.join(" ")));
    let mut update = Command::new("apt-get");
    succeed(update.args(["-qq", "update"]), "refresh the package lists")?;
    let mut install = Command::new("apt-get");
    install.env("DEBIAN_FRONTEND", "noninteractive").args([
        "-qq",
        "-y",
        "--no-install-recommends",
        "install",
    ]);
    // A package that starts a daemon of its own would touch the machine beyond this run.
    install.env("RUNLEVEL", "1").args(&missing);
    succeed(&mut install, "install packages")
}

fn system_version() -> Result<String> {
    let containerd = find_program("containerd").context("containerd is missing after setup")?;
    let output =
        Command::new(containerd).arg("--version").output().context("ask containerd for its version")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let version = text.split_whitespace().nth(2).unwrap_or("unknown");
    Ok(version.trim_start_matches('v').split('~').next().unwrap_or(version).to_owned())
}

/// Builds containerd 2 where a Go that can is there.
fn second_daemon() -> Result<Option<Daemon>> {
    let folder = target().join("tools").join(format!("containerd-{CONTAINERD_2}"));
    let daemon = Daemon { version: CONTAINERD_2.to_owned(), folder: Some(folder.clone()) };
    let binaries = ["containerd", "ctr", "containerd-shim-runc-v2"];
    if binaries.iter().all(|binary| folder.join(binary).is_file()) {
        return Ok(Some(daemon));
    }
    let Some(go) = find_program("go").filter(|go| go_version(go).is_some_and(|found| found >= GO_FLOOR))
    else {
        say(&format!(
            "no Go {}.{} or newer here: tests run on the containerd of this system only",
            GO_FLOOR.0, GO_FLOOR.1
        ));
        return Ok(None);
    };
    say(&format!("building containerd {CONTAINERD_2} with Go (about a minute)"));
    std::fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
    let mut command = Command::new(go);
    command.current_dir("/").env("GOBIN", &folder).env("GOFLAGS", "-buildvcs=false").arg("install");
    for binary in binaries {
        command.arg(format!("github.com/containerd/containerd/v2/cmd/{binary}@v{CONTAINERD_2}"));
    }
    succeed(&mut command, "build containerd")?;
    Ok(Some(daemon))
}

fn go_version(go: &Path) -> Option<(u32, u32)> {
    let output = Command::new(go).current_dir("/").arg("env").arg("GOVERSION").output().ok()?;
    parse_go_version(&String::from_utf8_lossy(&output.stdout))
}

fn parse_go_version(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.trim().strip_prefix("go")?.split('.');
    let major = numbers.next()?.parse().ok()?;
    let minor: String = numbers.next()?.chars().take_while(char::is_ascii_digit).collect();
    Some((major, minor.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::parse_go_version;

    #[test]
    fn the_version_of_go_is_read_with_and_without_a_suffix() {
        assert_eq!(parse_go_version("go1.26.8\n"), Some((1, 26)));
        assert_eq!(parse_go_version("go1.27rc1"), Some((1, 27)));
        assert_eq!(parse_go_version("devel"), None);
    }
}
