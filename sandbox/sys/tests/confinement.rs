//! Starting a sealed program, and giving up rights.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "helpers of tests")]

mod support;

use std::ffi::CString;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use gpuslice_sys::jail::{self, Limits};
use gpuslice_sys::{Socket, Spawn, memory, process, spawn};
use support::{hear, parent, start, tell};

fn as_child(name: &str, files: Vec<OwnedFd>) -> Spawn {
    let program = memory::sealed_copy(&std::env::current_exe().unwrap()).unwrap();
    let argv = ["gpuslice-test", name, "--exact", "--ignored", "--nocapture", "--test-threads=1"];
    Spawn {
        executable: program,
        argv: argv.iter().map(|text| CString::new(*text).unwrap()).collect(),
        files,
        cgroup_procs: Vec::new(),
        oom_score_adj: Some(500),
    }
}

fn null() -> OwnedFd {
    File::options().read(true).write(true).open("/dev/null").unwrap().into()
}

#[test]
#[ignore = "the child of another test"]
fn child_reports_what_it_was_started_with() {
    let Some(parent) = parent() else { return };
    // `spawn` gives it its score when it runs already.
    hear(&parent);
    let environment = std::env::vars_os().count();
    // SAFETY: getsid and getpid have no conditions.
    let leads = unsafe { libc::getsid(0) } == std::process::id().cast_signed();
    let score = std::fs::read_to_string("/proc/self/oom_score_adj").unwrap();
    let here = std::env::current_dir().unwrap();
    let program = std::fs::read_link("/proc/self/exe").unwrap();
    let write = File::options().write(true).open("/proc/self/exe").is_err();
    tell(
        &parent,
        &format!(
            "{environment} {leads} {} {} {} {write}",
            score.trim(),
            here.display(),
            program.display().to_string().starts_with("/memfd:")
        ),
        &[],
    );
    hear(&parent);
}

#[test]
fn a_sealed_program_starts_with_exactly_what_it_was_given() {
    let (ours, theirs) = Socket::pair().unwrap();
    let (mut log, log_writer) = std::io::pipe().unwrap();
    let secret = File::open("/proc/self/status").unwrap();
    // SAFETY: F_SETFD touches no memory. Without close-on-exec, a careless start would pass it on.
    unsafe { libc::fcntl(secret.as_raw_fd(), libc::F_SETFD, 0) };
    let files = vec![theirs.into_fd(), log_writer.try_clone().unwrap().into(), log_writer.into()];
    let (pid, pidfd) = spawn(as_child("child_reports_what_it_was_started_with", files)).unwrap();
    tell(&ours, "go", &[]);
    let (report, _) = hear(&ours);
    assert_eq!(report, "0 true 500 / true true");
    // 0, 1, 2 and what the program opened itself: the copy of its socket.
    let mut open: Vec<String> = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .map(|entry| std::fs::read_link(entry.unwrap().path()).unwrap().display().to_string())
        .collect();
    open.sort();
    assert!(open.iter().all(|file| file.starts_with("socket:") || file.starts_with("pipe:")), "{open:?}");
    tell(&ours, "end", &[]);
    // SAFETY: waitpid takes null for a status that is not wanted.
    assert_eq!(unsafe { libc::waitpid(pid.cast_signed(), std::ptr::null_mut(), 0) }, pid.cast_signed());
    assert!(process::pidfd_exited(pidfd.as_fd()));
    let mut text = String::new();
    log.read_to_string(&mut text).unwrap();
    assert!(text.contains("1 passed"), "{text}");
}

#[test]
fn the_first_step_that_fails_is_the_error() {
    let mut wanted = as_child("no matter", vec![null()]);
    wanted.executable = null();
    assert_eq!(spawn(wanted).unwrap_err().raw_os_error(), Some(libc::EACCES));
    let mut wanted = as_child("no matter", vec![null()]);
    wanted.cgroup_procs = vec![File::open("/proc/self/status").unwrap().into()];
    assert_eq!(spawn(wanted).unwrap_err().raw_os_error(), Some(libc::EBADF));
}

#[test]
fn nobody_can_write_to_a_sealed_copy() {
    let copy = memory::sealed_copy(Path::new("/proc/self/exe")).unwrap();
    let mut file = File::from(copy);
    assert_eq!(std::io::Write::write(&mut file, b"x").unwrap_err().raw_os_error(), Some(libc::EPERM));
    assert!(file.set_len(0).is_err());
}

#[test]
#[ignore = "the child of another test"]
fn child_gives_up_its_rights() {
    let Some(parent) = parent() else { return };
    let (target, _) = hear(&parent);
    let [target, number] = support::numbers(&target)[..] else { panic!("{target}") };
    let other = process::pidfd_open(u32::try_from(target).unwrap(), false).unwrap();
    // Namespaces want a process with one thread: this test runs in a thread of the harness, which does no harm
    // but leaves the main thread behind.
    jail::namespaces().unwrap();
    jail::limits(Limits { files: 64, file_size: 8192 }).unwrap();
    jail::drop_to(61234).unwrap();
    jail::not_dumpable().unwrap();
    jail::no_new_privileges().unwrap();
    let listing: Vec<_> = std::fs::read_dir("/").unwrap().collect();
    let written = std::fs::write("/x", b"x").is_err();
    let copied = process::pidfd_getfd(other.as_fd(), i32::try_from(number).unwrap());
    let large = memory::memfd("large", 8192).is_ok();
    // SAFETY: gettid has no conditions.
    let tid = unsafe { libc::gettid() };
    tell(
        &parent,
        &format!("{} {} {written} {} {large} {tid}", std::process::id(), listing.len(), copied.is_ok()),
        &[],
    );
    hear(&parent);
}

#[test]
fn one_capability_is_left_and_it_still_reaches_other_processes_files() {
    let (_child, socket) = start("child_gives_up_its_rights");
    // A process of root, as a tenant may be.
    let mut target = std::process::Command::new("sleep").arg("20").spawn().unwrap();
    tell(&socket, &format!("target {} 0", target.id()), &[]);
    let (report, _) = hear(&socket);
    let words: Vec<&str> = report.split(' ').collect();
    assert_eq!(words[1..5], ["0", "true", "true", "true"], "{report}");
    let status = std::fs::read_to_string(format!("/proc/{}/task/{}/status", words[0], words[5])).unwrap();
    let field = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_once(':').unwrap().1.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(field("Uid"), "61234 61234 61234 61234");
    assert_eq!(field("Gid"), "61234 61234 61234 61234");
    assert_eq!(field("Groups"), "");
    let ptrace = format!("{:016x}", 1 << 19);
    assert_eq!(field("CapEff"), ptrace);
    assert_eq!(field("CapPrm"), ptrace);
    for none in ["CapInh", "CapBnd", "CapAmb"] {
        assert_eq!(field(none), "0000000000000000", "{none}");
    }
    assert_eq!(field("NoNewPrivs"), "1");
    tell(&socket, "end", &[]);
    target.kill().unwrap();
    target.wait().unwrap();
}

#[test]
fn root_is_no_identity_to_drop_to() {
    assert_eq!(jail::drop_to(0).unwrap_err().raw_os_error(), Some(libc::EINVAL));
}

#[test]
fn an_inherited_file_is_taken_once() {
    let file = jail::inherited_file(2).unwrap();
    assert_eq!(jail::inherited_file(2).unwrap_err().raw_os_error(), Some(libc::EBUSY));
    std::mem::forget(file);
    assert_eq!(jail::inherited_file(61).unwrap_err().raw_os_error(), Some(libc::EBADF));
    assert_eq!(jail::inherited_file(64).unwrap_err().raw_os_error(), Some(libc::EBUSY));
}
