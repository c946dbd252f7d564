//! Reading the seccomp programs of a stopped process.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "helpers of tests")]

mod support;

use std::io::Read;

use gpuslice_sys::{Instruction, bpf, jail, process};
use support::{ALLOW, parent, start, tell, trap};

fn older() -> Vec<Instruction> {
    vec![Instruction { code: 0x06, jt: 0, jf: 0, k: ALLOW }]
}

#[test]
#[ignore = "the child of other tests"]
fn child_waits_under_two_programs() {
    let Some(parent) = parent() else { return };
    jail::no_new_privileges().unwrap();
    bpf::install(&older()).unwrap();
    bpf::install(&trap()).unwrap();
    let (mut reader, writer) = std::io::pipe().unwrap();
    // SAFETY: gettid has no conditions.
    let tid = unsafe { libc::gettid() };
    tell(&parent, &format!("tid {tid}"), &[std::os::fd::AsFd::as_fd(&writer)]);
    drop(writer);
    let mut word = String::new();
    // Blocks; an interruption would show as an error.
    reader.read_to_string(&mut word).unwrap();
    tell(&parent, &word, &[]);
}

#[test]
fn programs_are_read_newest_first_and_the_process_goes_on() {
    let (_child, socket) = start("child_waits_under_two_programs");
    let (text, mut files) = support::hear(&socket);
    let tid = u32::try_from(support::numbers(&text)[0]).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert_eq!(process::program_of(tid).unwrap(), [trap(), older()]);
    let mut writer = std::fs::File::from(files.pop().unwrap());
    std::io::Write::write_all(&mut writer, b"undisturbed").unwrap();
    drop(writer);
    assert_eq!(support::hear(&socket).0, "undisturbed");
}

#[test]
fn a_process_without_programs_has_none() {
    let mut child = std::process::Command::new("sleep").arg("20").spawn().unwrap();
    assert!(process::program_of(child.id()).unwrap().is_empty());
    assert!(child.try_wait().unwrap().is_none());
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(process::program_of(child.id()).unwrap_err().raw_os_error(), Some(libc::ESRCH));
}
