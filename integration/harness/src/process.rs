//! What /proc says of a process.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Fields of `/proc/PID/status` that the promises are about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Effective user.
    pub uid: u32,
    /// Effective capabilities.
    pub capabilities: u64,
    /// Bounding set.
    pub bounding: u64,
    /// Set: no rights can be gained by executing anything.
    pub no_new_privileges: bool,
    /// 2: a filter is on.
    pub seccomp: u32,
    /// Number of filters.
    pub filters: u32,
    /// Resident memory in KiB.
    pub resident: u64,
}

/// Identity of `pid`.
///
/// # Errors
/// When the process is gone or a field is missing.
pub fn identity(pid: u32) -> Result<Identity> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status"))
        .with_context(|| format!("read the status of process {pid}"))?;
    let field = |name: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
            .map(str::trim)
            .with_context(|| format!("process {pid} has no {name}"))
    };
    let words = |name: &str, index: usize| -> Result<String> {
        Ok(field(name)?.split_whitespace().nth(index).unwrap_or_default().to_owned())
    };
    Ok(Identity {
        uid: words("Uid", 1)?.parse()?,
        capabilities: u64::from_str_radix(field("CapEff")?, 16)?,
        bounding: u64::from_str_radix(field("CapBnd")?, 16)?,
        no_new_privileges: field("NoNewPrivs")? == "1",
        seccomp: field("Seccomp")?.parse()?,
        filters: field("Seccomp_filters")?.parse()?,
        resident: words("VmRSS", 0).ok().and_then(|kib| kib.parse().ok()).unwrap_or(0),
    })
}

/// Memory that `pid` alone keeps resident, in KiB: private pages plus its share of common ones.
///
/// # Errors
/// When the process is gone.
pub fn proportional_memory(pid: u32) -> Result<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))
        .with_context(|| format!("read the memory of process {pid}"))?;
    text.lines()
        .find_map(|line| line.strip_prefix("Pss:"))
        .and_then(|rest| rest.split_whitespace().next())
        .and_then(|kib| kib.parse().ok())
        .with_context(|| format!("process {pid} shows no Pss"))
}

/// All process ids.
pub fn all() -> Vec<u32> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    entries.flatten().filter_map(|entry| entry.file_name().to_string_lossy().parse().ok()).collect()
}

/// Name of the program as the kernel keeps it (15 characters).
pub fn name(pid: u32) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim_end().to_owned()
}

/// Arguments of a process, joined by spaces.
pub fn command_line(pid: u32) -> String {
    let bytes = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&bytes).replace('\0', " ").trim_end().to_owned()
}

/// State letter, or none if the process is gone. A zombie is `Z`.
pub fn state(pid: u32) -> Option<char> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    text.rsplit_once(") ")?.1.chars().next()
}

/// True while the process runs (a zombie does not).
pub fn runs(pid: u32) -> bool {
    state(pid).is_some_and(|state| state != 'Z' && state != 'X')
}

/// Parent of a process.
pub fn parent(pid: u32) -> Option<u32> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    text.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
}

/// True if the process carries `mark` in its environment, its arguments, its root or its cgroup.
pub(crate) fn marked(pid: u32, mark: &str) -> bool {
    let directory = PathBuf::from(format!("/proc/{pid}"));
    let contains = |file: &str| {
        let bytes = std::fs::read(directory.join(file)).unwrap_or_default();
        bytes.windows(mark.len().max(1)).any(|window| window == mark.as_bytes())
    };
    let links_to = |link: &str| link_mentions(&directory.join(link), mark);
    contains("environ") || contains("cmdline") || contains("cgroup") || links_to("cwd") || links_to("root")
}

fn link_mentions(link: &Path, mark: &str) -> bool {
    std::fs::read_link(link).is_ok_and(|target| target.to_string_lossy().contains(mark))
}

/// Sends a signal; a process that is gone is no error.
///
/// # Errors
/// When the signal can't be sent for another reason.
pub fn signal(pid: u32, signal: nix::sys::signal::Signal) -> Result<()> {
    let pid = nix::unistd::Pid::from_raw(i32::try_from(pid)?);
    match nix::sys::signal::kill(pid, signal) {
        Ok(()) | Err(nix::errno::Errno::ESRCH) => Ok(()),
        Err(error) => Err(error).with_context(|| format!("send {signal} to process {pid}")),
    }
}
