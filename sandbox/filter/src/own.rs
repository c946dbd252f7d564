//! The sandbox's own seccomp program.
//!
//! Owns: the list of what a confined sandbox may still call. Promises: whatever is not on the list kills the
//! process; no file is opened, no socket made or connected, no process or thread started, traced or signalled,
//! no executable memory made. There is one program: no weaker variant exists.

mod assemble;

use gpuslice_sys::Instruction;

use assemble::{Case, Test, any, cases, program, when};

/// `PROT_EXEC`.
const PROT_EXEC: u32 = 4;
/// `AT_EMPTY_PATH`: statx looks at a file that is open, not at a path.
const AT_EMPTY_PATH: u32 = 0x1000;
/// `F_GETFD`: whether a number is open; std asks it before each close in unoptimised builds.
const F_GETFD: u32 = 1;
/// `F_DUPFD_CLOEXEC`: a copy of a file that is kept beyond a call.
const F_DUPFD_CLOEXEC: u32 = 1030;
/// `F_ADD_SEALS`.
const F_ADD_SEALS: u32 = 1033;
/// `KCMP_FILE`: whether two files are one. It names processes by number, but tells no more than that.
const KCMP_FILE: u32 = 0;
/// `SECCOMP_GET_NOTIF_SIZES`.
const GET_NOTIF_SIZES: u32 = 3;

/// `SECCOMP_IOCTL_NOTIF_*`: RECV, SEND, ID_VALID (and its old number), ADDFD, SET_FLAGS.
const LISTENER_COMMANDS: [u32; 6] =
    [0xc050_2100, 0xc018_2101, 0x4008_2102, 0x8008_2102, 0x4018_2103, 0x4008_2104];

/// System calls that are allowed whatever their arguments: (number, name).
pub(crate) const ALLOWED: [(u32, &str); 32] = [
    (0, "read"),
    (1, "write"),
    (3, "close"),
    (11, "munmap"),
    (12, "brk"),
    (14, "rt_sigprocmask"),
    (15, "rt_sigreturn"),
    (17, "pread64"),
    (18, "pwrite64"),
    (24, "sched_yield"),
    // realloc of large buffers; it can't make memory executable.
    (25, "mremap"),
    (28, "madvise"),
    (46, "sendmsg"),
    (47, "recvmsg"),
    (60, "exit"),
    (77, "ftruncate"),
    // A thread that ends takes down its signal stack.
    (131, "sigaltstack"),
    // A panic names its thread.
    (186, "gettid"),
    (202, "futex"),
    // A wait with a deadline that a stop interrupted.
    (219, "restart_syscall"),
    (228, "clock_gettime"),
    (230, "clock_nanosleep"),
    (231, "exit_group"),
    (232, "epoll_wait"),
    (233, "epoll_ctl"),
    (271, "ppoll"),
    (273, "set_robust_list"),
    (281, "epoll_pwait"),
    (318, "getrandom"),
    (319, "memfd_create"),
    (334, "rseq"),
    (438, "pidfd_getfd"),
];

/// The program. `driver_commands`: every ioctl number that the sandbox itself issues to the driver.
pub fn own_program(driver_commands: &[u32]) -> Vec<Instruction> {
    let commands = LISTENER_COMMANDS.iter().chain(driver_commands).map(|command| Case::new(*command, any()));
    let no_exec = || when(2, Test::NoneOf(PROT_EXEC));
    let mut calls: Vec<Case> = ALLOWED.iter().map(|(number, _)| Case::new(*number, any())).collect();
    calls.extend([
        Case::new(9, no_exec()),
        Case::new(10, no_exec()),
        // The kernel looks at the low half of the command: so does the filter.
        Case::new(16, cases(1, commands.collect())),
        Case::new(
            72,
            cases(
                1,
                vec![
                    Case::new(F_GETFD, any()),
                    Case::new(F_DUPFD_CLOEXEC, any()),
                    Case::new(F_ADD_SEALS, any()),
                ],
            ),
        ),
        Case::new(312, when(2, Test::Equals(KCMP_FILE))),
        Case::new(317, when(0, Test::Equals(GET_NOTIF_SIZES))),
        Case::new(332, when(2, Test::AnyOf(AT_EMPTY_PATH))),
    ]);
    program(calls)
}

#[cfg(test)]
mod tests;
