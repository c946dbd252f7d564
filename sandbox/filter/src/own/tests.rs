use super::*;
use crate::interpret::{Action, Call, run};
use crate::symbolic::{Calls, follow};

const COMMANDS: [u32; 4] = [0xc020_462a, 0xc030_462b, 0x3000_0001, 25];

fn action(nr: u32, args: [u64; 6]) -> Action {
    run(&own_program(&COMMANDS), &Call::native(nr, args))
}

/// Calls with a condition: number, an argument list that is allowed, and lists that are not.
fn conditional() -> Vec<(u32, [u64; 6], Vec<[u64; 6]>)> {
    let with = |at: usize, value: u64| {
        let mut args = [0; 6];
        args[at] = value;
        args
    };
    vec![
        (9, with(2, 3), vec![with(2, 4), with(2, 7), with(2, u64::MAX)]),
        (10, with(2, 3), vec![with(2, 4), with(2, 5)]),
        (72, with(1, 1033), vec![with(1, 1032), with(1, 0), with(1, 1031)]),
        (72, with(1, 1030), vec![with(1, 2), with(1, 4)]),
        (312, with(2, 0), vec![with(2, 1), with(2, 2), with(2, u64::MAX)]),
        (317, with(0, 3), vec![with(0, 0), with(0, 1), with(0, 2)]),
        (332, with(2, 0x5000), vec![with(2, 0), with(2, 0x4000), with(2, 0x800)]),
    ]
}

#[test]
fn every_call_on_the_list_is_allowed_and_every_other_kills() {
    let conditional: Vec<u32> = conditional().iter().map(|(nr, ..)| *nr).chain([16]).collect();
    for nr in (0..1000).chain([0x4000_0000, 0x4000_0001, 0x7fff_ffff, u32::MAX]) {
        if conditional.contains(&nr) {
            continue;
        }
        let listed = ALLOWED.iter().any(|(number, _)| *number == nr);
        let wanted = if listed { Action::Allow } else { Action::KillProcess };
        for args in [[0; 6], [u64::MAX; 6], [1, 2, 4, 8, 16, 32]] {
            assert_eq!(action(nr, args), wanted, "call {nr}");
        }
    }
}

#[test]
fn conditions_hold_with_the_allowed_value_only() {
    for (nr, good, bad) in conditional() {
        assert_eq!(action(nr, good), Action::Allow, "call {nr}");
        for args in bad {
            assert_eq!(action(nr, args), Action::KillProcess, "call {nr} {args:x?}");
        }
    }
}

#[test]
fn ioctl_takes_the_given_numbers_and_the_listeners_and_no_other() {
    let known: Vec<u32> = COMMANDS.iter().chain(&LISTENER_COMMANDS).copied().collect();
    for command in &known {
        for high in [0, u64::from(u32::MAX) << 32] {
            assert_eq!(
                action(16, [3, high | u64::from(*command), 9, 0, 0, 0]),
                Action::Allow,
                "{command:#x}"
            );
        }
        for bit in 0..32 {
            let other = command ^ 1 << bit;
            let wanted = if known.contains(&other) { Action::Allow } else { Action::KillProcess };
            assert_eq!(action(16, [3, u64::from(other), 9, 0, 0, 0]), wanted, "{other:#x}");
        }
    }
}

#[test]
fn exactly_the_listed_calls_of_all_calls_are_allowed() {
    // Over all calls at once: which numbers can end in anything but death.
    let mut numbers = Vec::new();
    let program = own_program(&COMMANDS);
    follow(&program, Calls::default(), |calls, action| {
        if action == Action::Allow {
            assert_eq!(calls.word(1), [crate::cube::Cube::word(0xc000_003e)]);
            assert_eq!(calls.word(0).len(), 1);
            assert_eq!(calls.word(0)[0].mask, u64::from(u32::MAX));
            numbers.push(u32::try_from(calls.word(0)[0].value).unwrap());
        } else {
            assert_eq!(action, Action::KillProcess);
        }
    })
    .unwrap();
    numbers.sort_unstable();
    numbers.dedup();
    let mut wanted: Vec<u32> =
        ALLOWED.iter().map(|(number, _)| *number).chain([9, 10, 16, 72, 312, 317, 332]).collect();
    wanted.sort_unstable();
    assert_eq!(numbers, wanted);
}

#[test]
fn names_and_numbers_agree_with_the_system_headers() {
    let numbers = [
        (libc::SYS_read, "read"),
        (libc::SYS_write, "write"),
        (libc::SYS_close, "close"),
        (libc::SYS_munmap, "munmap"),
        (libc::SYS_brk, "brk"),
        (libc::SYS_rt_sigprocmask, "rt_sigprocmask"),
        (libc::SYS_rt_sigreturn, "rt_sigreturn"),
        (libc::SYS_pread64, "pread64"),
        (libc::SYS_pwrite64, "pwrite64"),
        (libc::SYS_sched_yield, "sched_yield"),
        (libc::SYS_mremap, "mremap"),
        (libc::SYS_madvise, "madvise"),
        (libc::SYS_sendmsg, "sendmsg"),
        (libc::SYS_recvmsg, "recvmsg"),
        (libc::SYS_exit, "exit"),
        (libc::SYS_ftruncate, "ftruncate"),
        (libc::SYS_sigaltstack, "sigaltstack"),
        (libc::SYS_gettid, "gettid"),
        (libc::SYS_futex, "futex"),
        (libc::SYS_restart_syscall, "restart_syscall"),
        (libc::SYS_clock_gettime, "clock_gettime"),
        (libc::SYS_clock_nanosleep, "clock_nanosleep"),
        (libc::SYS_exit_group, "exit_group"),
        (libc::SYS_epoll_wait, "epoll_wait"),
        (libc::SYS_epoll_ctl, "epoll_ctl"),
        (libc::SYS_ppoll, "ppoll"),
        (libc::SYS_set_robust_list, "set_robust_list"),
        (libc::SYS_epoll_pwait, "epoll_pwait"),
        (libc::SYS_getrandom, "getrandom"),
        (libc::SYS_memfd_create, "memfd_create"),
        (libc::SYS_rseq, "rseq"),
        (libc::SYS_pidfd_getfd, "pidfd_getfd"),
    ];
    let listed: Vec<(i64, &str)> = ALLOWED.iter().map(|(number, name)| (i64::from(*number), *name)).collect();
    assert_eq!(listed, numbers);
    assert_eq!(
        [
            libc::SYS_mmap,
            libc::SYS_mprotect,
            libc::SYS_ioctl,
            libc::SYS_fcntl,
            libc::SYS_kcmp,
            libc::SYS_seccomp,
            libc::SYS_statx
        ],
        [9, 10, 16, 72, 312, 317, 332]
    );
    assert_eq!(libc::F_DUPFD_CLOEXEC, 1030);
    assert_eq!(libc::F_ADD_SEALS, 1033);
    assert_eq!(libc::AT_EMPTY_PATH, 0x1000);
    assert_eq!(libc::PROT_EXEC, 4);
}

#[test]
fn the_program_fits_the_kernel_with_many_commands() {
    let many: Vec<u32> = (0..500).map(|n| 0xc000_0000 | n << 8).collect();
    let program = own_program(&many);
    assert!(program.len() < 4096, "{}", program.len());
    for command in many {
        assert_eq!(run(&program, &Call::native(16, [0, u64::from(command), 0, 0, 0, 0])), Action::Allow);
    }
}
