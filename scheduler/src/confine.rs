//! What the daemon itself may no longer do once it serves.
//!
//! Owns: one seccomp program, for all threads. It allows everything but the calls that the daemon never makes
//! after its start and that somebody who took it over would want: connecting out, starting programs,
//! mounting, tracing, reaching into other processes, loading code into the kernel. Such a call ends the
//! process; systemd starts the next. Failure to install it is an error: the daemon doesn't serve.

use std::io;

use gpuslice_sys::Instruction;

const X86_64: u32 = 0xc000_003e;
/// Numbers from here on are those of the x32 ABI.
const X32: u32 = 0x4000_0000;
const KILL_PROCESS: u32 = 0x8000_0000;
const ALLOW: u32 = 0x7fff_0000;

/// Offsets in `struct seccomp_data`.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;

const LOAD: u16 = 0x20;
const JUMP_EQUAL: u16 = 0x15;
const JUMP_AT_LEAST: u16 = 0x35;
const RETURN: u16 = 0x06;

/// x86-64 numbers of what is refused.
const REFUSED: &[(u32, &str)] = &[
    (42, "connect"),
    (57, "fork"),
    (58, "vfork"),
    (59, "execve"),
    (101, "ptrace"),
    (155, "pivot_root"),
    (161, "chroot"),
    (165, "mount"),
    (166, "umount2"),
    (169, "reboot"),
    (175, "init_module"),
    (176, "delete_module"),
    (246, "kexec_load"),
    (248, "add_key"),
    (250, "keyctl"),
    (272, "unshare"),
    (298, "perf_event_open"),
    (304, "open_by_handle_at"),
    (308, "setns"),
    (310, "process_vm_readv"),
    (311, "process_vm_writev"),
    (313, "finit_module"),
    (320, "kexec_file_load"),
    (321, "bpf"),
    (322, "execveat"),
    (323, "userfaultfd"),
    (425, "io_uring_setup"),
    (426, "io_uring_enter"),
    (427, "io_uring_register"),
    (428, "open_tree"),
    (429, "move_mount"),
    (430, "fsopen"),
    (432, "fsmount"),
    (438, "pidfd_getfd"),
    (440, "process_madvise"),
    (442, "mount_setattr"),
];

fn program() -> Vec<Instruction> {
    let step = |code, jt, jf, k| Instruction { code, jt, jf, k };
    let mut program = vec![
        step(LOAD, 0, 0, ARCHITECTURE),
        step(JUMP_EQUAL, 1, 0, X86_64),
        step(RETURN, 0, 0, KILL_PROCESS),
        step(LOAD, 0, 0, NUMBER),
        step(JUMP_AT_LEAST, 0, 1, X32),
        step(RETURN, 0, 0, KILL_PROCESS),
    ];
    for (number, _) in REFUSED {
        program.push(step(JUMP_EQUAL, 0, 1, *number));
        program.push(step(RETURN, 0, 0, KILL_PROCESS));
    }
    program.push(step(RETURN, 0, 0, ALLOW));
    program
}

/// Gives all of it up, in every thread and for good.
pub(crate) fn confine() -> io::Result<()> {
    gpuslice_sys::jail::no_new_privileges()?;
    gpuslice_sys::bpf::install(&program())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, ExitStatus};

    /// Runs the test below again, in a process of its own, to do `what`.
    fn run(what: &str) -> ExitStatus {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "confine::tests::child", "--nocapture"])
            .env("GPUSLICE_TEST_CONFINED", what)
            .status()
            .unwrap()
    }

    /// Not a test of its own: see [`run`].
    #[test]
    fn child() {
        let Ok(what) = std::env::var("GPUSLICE_TEST_CONFINED") else { return };
        let (call, confined) = what.split_once(' ').unwrap();
        if confined == "confined" {
            confine().unwrap();
        }
        match call {
            "nothing" => {}
            "connect" => drop(std::os::unix::net::UnixStream::connect("/nonexistent")),
            "exec" => drop(std::os::unix::process::CommandExt::exec(&mut Command::new("/nonexistent"))),
            "mount" => drop(nix::mount::umount("/nonexistent")),
            other => panic!("{other}"),
        }
    }

    #[test]
    fn each_refused_call_ends_the_process_and_without_the_filter_does_not() {
        for call in ["connect", "exec", "mount"] {
            assert!(run(&format!("{call} free")).success(), "{call}");
            assert_eq!(run(&format!("{call} confined")).signal(), Some(31), "{call}");
        }
        assert!(run("nothing confined").success());
    }

    #[test]
    fn the_list_is_sorted_and_names_each_call_once() {
        assert!(REFUSED.windows(2).all(|pair| pair[0].0 < pair[1].0));
    }
}
