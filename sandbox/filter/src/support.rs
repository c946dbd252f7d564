//! What this kernel, container runtime and libseccomp offer, and what is lost without.
//!
//! Owns: the probes. Trusts the runtime's binary (it runs as root anyway). Promises: changes nothing on the
//! node. Failure: what can't be found out counts as not there.

mod runtime;

use std::fs;
use std::path::Path;

pub use runtime::{Runtime, SupportError, killable};

/// A kernel release, as far as it matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Release {
    /// First number.
    pub major: u32,
    /// Second number.
    pub minor: u32,
}

impl Release {
    const FLOOR: Release = Release { major: 5, minor: 14 };
    const KILLABLE: Release = Release { major: 5, minor: 19 };
    const SYNC_WAKE_UP: Release = Release { major: 6, minor: 6 };
    const THREAD_PIDFD: Release = Release { major: 6, minor: 9 };

    /// The two numbers that a text like `6.1.0-13-amd64` begins with.
    pub fn parse(text: &str) -> Option<Release> {
        let mut numbers = text.split(|c: char| !c.is_ascii_digit());
        let major = numbers.next()?.parse().ok()?;
        let minor = numbers.next()?.parse().ok()?;
        Some(Release { major, minor })
    }

    /// The running kernel's.
    pub fn running() -> Option<Release> {
        Release::parse(&read("/proc/sys/kernel/osrelease"))
    }
}

impl std::fmt::Display for Release {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// One line of `gpuslice doctor`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// What was looked at.
    pub what: &'static str,
    /// What is there.
    pub found: String,
    /// What is needed.
    pub needed: String,
    /// What is lost without it.
    pub lost: &'static str,
    /// It is there.
    pub ok: bool,
    /// No container of this runtime starts without it.
    pub required: bool,
}

/// Everything that was probed.
#[derive(Clone, Debug)]
pub struct Support {
    /// The kernel's release, if it could be read.
    pub kernel: Option<Release>,
    /// The container runtime, or why it couldn't be asked.
    pub runtime: Result<Runtime, String>,
    /// The kernel knows the action USER_NOTIF.
    pub notify: bool,
    /// This process may read another one's compiled filter.
    pub reads_programs: bool,
    /// BPF is in the kernel's list of security modules. Whether a program loads is another question.
    pub bpf_listed: bool,
}

impl Support {
    /// Looks at the running kernel and at `runtime`, the runtime's binary.
    pub fn probe(runtime: &Path) -> Support {
        let status = read("/proc/self/status");
        Support {
            kernel: Release::running(),
            runtime: Runtime::probe(runtime).map_err(|error| chain(&error)),
            notify: read("/proc/sys/kernel/seccomp/actions_avail")
                .split_whitespace()
                .any(|name| name == "user_notif"),
            reads_programs: may_read_programs(&status),
            bpf_listed: read("/sys/kernel/security/lsm").trim().split(',').any(|name| name == "bpf"),
        }
    }

    /// The runtime can be asked for `SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV`.
    pub fn killable(&self) -> bool {
        self.kernel.is_some_and(|kernel| kernel >= Release::KILLABLE)
            && self.runtime.as_ref().is_ok_and(|runtime| runtime.killable)
    }

    /// The rows of `gpuslice doctor`.
    pub fn rows(&self) -> Vec<Row> {
        let mut rows = vec![
            self.kernel_row(
                "kernel",
                Release::FLOOR,
                "everything: no container of this runtime starts",
                true,
            ),
            Row {
                what: "seccomp user notification",
                found: yes_no(self.notify),
                needed: "yes".to_owned(),
                lost: "everything: no GPU container starts",
                ok: self.notify,
                required: true,
            },
            Row {
                what: "reading a process's compiled filter",
                found: yes_no(self.reads_programs),
                needed: "CAP_SYS_ADMIN, and no seccomp filter on the shim".to_owned(),
                lost: "everything: a filter that can't be judged starts no GPU container",
                ok: self.reads_programs,
                required: true,
            },
        ];
        rows.extend(self.runtime_rows());
        rows.extend([
            self.kernel_row(
                "synchronous wake-up of the sandbox",
                Release::SYNC_WAKE_UP,
                "speed: some 10 us more for each NVIDIA ioctl",
                false,
            ),
            self.kernel_row(
                "pidfds of threads",
                Release::THREAD_PIDFD,
                "NVIDIA ioctls of threads that have a file table of their own (they are refused)",
                false,
            ),
            Row {
                what: "calls that signals don't cancel (WAIT_KILLABLE_RECV)",
                found: yes_no(self.killable()),
                needed: "kernel 5.19, and a runtime that lists the flag (runc 1.5 with libseccomp 2.6)".to_owned(),
                lost: "speed under signals: a cancelled call's result is kept and given to its repetition",
                ok: self.killable(),
                required: false,
            },
            Row {
                what: "BPF LSM (fence)",
                found: if self.bpf_listed { "listed, no fence loaded" } else { "not listed" }.to_owned(),
                needed: "lsm=...,bpf on the kernel's command line".to_owned(),
                lost: "the second wall: a GPU file passed to a container of another runtime can be used there",
                ok: false,
                required: false,
            },
        ]);
        rows
    }

    fn kernel_row(&self, what: &'static str, needed: Release, lost: &'static str, required: bool) -> Row {
        Row {
            what,
            found: self.kernel.map_or_else(|| "unknown".to_owned(), |kernel| format!("kernel {kernel}")),
            needed: format!("kernel {needed}"),
            lost,
            ok: self.kernel.is_some_and(|kernel| kernel >= needed),
            required,
        }
    }

    fn runtime_rows(&self) -> Vec<Row> {
        let (version, seccomp, library) = match &self.runtime {
            Ok(runtime) => (runtime.version.clone(), runtime.notify, runtime.libseccomp.clone()),
            Err(reason) => (reason.clone(), Some(false), None),
        };
        vec![
            Row {
                what: "container runtime",
                found: version,
                needed: "runc 1.1 or later, or crun".to_owned(),
                lost: "everything: no container starts",
                ok: self.runtime.is_ok(),
                required: true,
            },
            Row {
                what: "SCMP_ACT_NOTIFY in the runtime",
                found: seccomp
                    .map_or_else(|| "unknown (the runtime doesn't list its features)".to_owned(), yes_no),
                needed: "yes".to_owned(),
                lost: "everything: no GPU container starts",
                // What the runtime really made is judged at each start.
                ok: seccomp != Some(false),
                required: true,
            },
            Row {
                what: "libseccomp",
                found: library.clone().unwrap_or_else(|| "unknown".to_owned()),
                needed: "2.5 (its compiled filters are judged at each start)".to_owned(),
                lost: "everything: before 2.5 there is no SCMP_ACT_NOTIFY",
                ok: library.is_none_or(|text| {
                    Release::parse(&text).is_some_and(|v| v >= Release { major: 2, minor: 5 })
                }),
                required: true,
            },
        ]
    }
}

fn yes_no(yes: bool) -> String {
    if yes { "yes" } else { "no" }.to_owned()
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// The kernel lets a process read filters that has CAP_SYS_ADMIN (bit 21) and no filter of its own.
fn may_read_programs(status: &str) -> bool {
    let field = |name: &str| {
        status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
    };
    let effective = field("CapEff").and_then(|text| u64::from_str_radix(text, 16).ok());
    effective.is_some_and(|bits| bits & 1 << 21 != 0) && field("Seccomp") == Some("0")
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(next) = source {
        text = format!("{text}: {next}");
        source = next.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_read_from_what_kernels_print() {
        assert_eq!(Release::parse("6.1.0-13-amd64"), Some(Release { major: 6, minor: 1 }));
        assert_eq!(Release::parse("5.14"), Some(Release::FLOOR));
        assert_eq!(Release::parse("x"), None);
        assert!(Release::running().is_some());
    }

    #[test]
    fn filters_are_readable_with_the_capability_and_without_a_filter_only() {
        let status = |caps: &str, seccomp: &str| {
            format!("Name:\tx\nCapEff:\t{caps}\nSeccomp:\t{seccomp}\nSeccomp_filters:\t0\n")
        };
        assert!(may_read_programs(&status("000001ffffffffff", "0")));
        assert!(!may_read_programs(&status("000001ffffdfffff", "0")));
        assert!(!may_read_programs(&status("000001ffffffffff", "2")));
        assert!(!may_read_programs(""));
    }

    #[test]
    fn an_old_kernel_fails_the_floor_and_says_what_is_lost() {
        let support = Support {
            kernel: Some(Release { major: 5, minor: 10 }),
            runtime: Err("not found".to_owned()),
            notify: true,
            reads_programs: true,
            bpf_listed: false,
        };
        let rows = support.rows();
        assert!(rows.iter().any(|row| row.what == "kernel" && !row.ok && row.required));
        assert!(rows.iter().all(|row| !row.lost.is_empty() && !row.needed.is_empty()));
        assert!(!support.killable());
    }
}
