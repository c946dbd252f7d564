//! The sandbox's own program on a real process: what it allows works, what it doesn't kills.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test ends at the first surprise"
)]

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};

const PROBE: &str = "GPUSLICE_FILTER_PROBE";
const SIGSYS: i32 = libc::SIGSYS;
/// The one driver command that the program of these tests lets through.
const COMMAND: u32 = 0xc020_462a;

/// One system call with up to six numbers.
fn raw(nr: i64, args: [i64; 6]) -> i64 {
    let [a, b, c, d, e, f] = args;
    // SAFETY: any system call may be made as long as it writes to no memory that is in use and unmaps none: the
    // calls of this file pass null, numbers, or addresses of nothing that anybody uses.
    unsafe { libc::syscall(nr, a, b, c, d, e, f) }
}

fn confine() {
    nix::sys::prctl::set_no_new_privs().unwrap();
    gpuslice_sys::bpf::install(&gpuslice_filter::own_program(&[COMMAND])).unwrap();
}

/// Runs one probe in a process of its own.
fn probe(name: &str) -> ExitStatus {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "probing", "--nocapture", "--test-threads=1"]).env(PROBE, name);
    command.stdout(std::process::Stdio::null()).status().unwrap()
}

/// Calls that must kill: name, number, arguments.
fn forbidden() -> Vec<(&'static str, i64, [i64; 6])> {
    let command = i64::from(COMMAND);
    vec![
        ("open", libc::SYS_open, [0; 6]),
        ("openat", libc::SYS_openat, [0; 6]),
        ("openat2", libc::SYS_openat2, [0; 6]),
        ("creat", libc::SYS_creat, [0; 6]),
        ("socket", libc::SYS_socket, [1, 1, 0, 0, 0, 0]),
        ("connect", libc::SYS_connect, [0; 6]),
        ("bind", libc::SYS_bind, [0; 6]),
        ("accept4", libc::SYS_accept4, [0; 6]),
        ("sendto", libc::SYS_sendto, [0; 6]),
        ("clone", libc::SYS_clone, [0; 6]),
        ("clone3", libc::SYS_clone3, [0; 6]),
        ("fork", libc::SYS_fork, [0; 6]),
        ("vfork", libc::SYS_vfork, [0; 6]),
        ("execve", libc::SYS_execve, [0; 6]),
        ("execveat", libc::SYS_execveat, [0; 6]),
        ("ptrace", libc::SYS_ptrace, [1, 0, 0, 0, 0, 0]),
        ("process_vm_readv", libc::SYS_process_vm_readv, [1, 0, 0, 0, 0, 0]),
        ("process_vm_writev", libc::SYS_process_vm_writev, [1, 0, 0, 0, 0, 0]),
        ("pidfd_open", libc::SYS_pidfd_open, [1, 0, 0, 0, 0, 0]),
        ("pidfd_send_signal", libc::SYS_pidfd_send_signal, [-1, 0, 0, 0, 0, 0]),
        ("kill", libc::SYS_kill, [1, 0, 0, 0, 0, 0]),
        ("tgkill", libc::SYS_tgkill, [1, 1, 0, 0, 0, 0]),
        ("kcmp", libc::SYS_kcmp, [1, 1, 2, 0, 0, 0]),
        ("setns", libc::SYS_setns, [-1, 0, 0, 0, 0, 0]),
        ("unshare", libc::SYS_unshare, [0; 6]),
        ("mount", libc::SYS_mount, [0; 6]),
        ("umount2", libc::SYS_umount2, [0; 6]),
        ("chroot", libc::SYS_chroot, [0; 6]),
        ("setuid", libc::SYS_setuid, [0; 6]),
        ("capset", libc::SYS_capset, [0; 6]),
        ("prctl", libc::SYS_prctl, [3, 0, 0, 0, 0, 0]),
        ("io_uring_setup", libc::SYS_io_uring_setup, [0; 6]),
        ("io_uring_enter", libc::SYS_io_uring_enter, [-1, 0, 0, 0, 0, 0]),
        ("io_uring_register", libc::SYS_io_uring_register, [-1, 0, 0, 0, 0, 0]),
        ("bpf", libc::SYS_bpf, [0; 6]),
        ("userfaultfd", libc::SYS_userfaultfd, [0; 6]),
        ("perf_event_open", libc::SYS_perf_event_open, [0; 6]),
        ("a filter of its own", libc::SYS_seccomp, [1, 0, 0, 0, 0, 0]),
        ("a file number copied", libc::SYS_fcntl, [0, i64::from(libc::F_DUPFD), 0, 0, 0, 0]),
        ("dup2", libc::SYS_dup2, [0, 9, 0, 0, 0, 0]),
        ("statx by path", libc::SYS_statx, [-100, 0, 0, 0, 0, 0]),
        ("executable mmap", libc::SYS_mmap, [0, 4096, 5, 0x22, -1, 0]),
        ("executable mprotect", libc::SYS_mprotect, [0, 0, 4, 0, 0, 0]),
        ("another ioctl", libc::SYS_ioctl, [0, 0x5401, 0, 0, 0, 0]),
        ("a neighbour of the driver's ioctl", libc::SYS_ioctl, [0, command ^ 0x100, 0, 0, 0, 0]),
        ("a number that is no call", 9999, [0; 6]),
    ]
}

/// Calls that must work; with these arguments most fail with an errno, which is not the filter's doing.
fn allowed() -> Vec<(i64, [i64; 6])> {
    let nowhere = -1;
    vec![
        (libc::SYS_read, [nowhere, 0, 0, 0, 0, 0]),
        (libc::SYS_write, [nowhere, 0, 0, 0, 0, 0]),
        (libc::SYS_close, [nowhere, 0, 0, 0, 0, 0]),
        (libc::SYS_munmap, [1, 0, 0, 0, 0, 0]),
        (libc::SYS_brk, [0; 6]),
        (libc::SYS_rt_sigprocmask, [0, 0, 0, 8, 0, 0]),
        (libc::SYS_pread64, [nowhere, 0, 0, 0, 0, 0]),
        (libc::SYS_pwrite64, [nowhere, 0, 0, 0, 0, 0]),
        (libc::SYS_sched_yield, [0; 6]),
        (libc::SYS_mremap, [1, 0, 0, 0, 0, 0]),
        (libc::SYS_madvise, [1, 0, 0, 0, 0, 0]),
        (libc::SYS_sendmsg, [nowhere, 0, 0, 0, 0, 0]),
        (libc::SYS_recvmsg, [nowhere, 0, 0, 0, 0, 0]),
        (libc::SYS_ftruncate, [nowhere, 0, 0, 0, 0, 0]),
        (libc::SYS_sigaltstack, [0; 6]),
        (libc::SYS_gettid, [0; 6]),
        (libc::SYS_futex, [0, 1, 1, 0, 0, 0]),
        (libc::SYS_restart_syscall, [0; 6]),
        (libc::SYS_clock_gettime, [9999, 0, 0, 0, 0, 0]),
        (libc::SYS_clock_nanosleep, [9999, 0, 0, 0, 0, 0]),
        (libc::SYS_epoll_wait, [nowhere, 0, 0, 0, 0, 0]),
        (libc::SYS_epoll_ctl, [nowhere, 0, 0, 0, 0, 0]),
        (libc::SYS_epoll_pwait, [nowhere, 0, 0, 0, 0, 0]),
        (libc::SYS_ppoll, [0, 0, 1, 0, 0, 0]),
        (libc::SYS_set_robust_list, [0, 1, 0, 0, 0, 0]),
        (libc::SYS_getrandom, [0, 0, 0, 0, 0, 0]),
        (libc::SYS_memfd_create, [0, 0, 0, 0, 0, 0]),
        (libc::SYS_rseq, [0, 1, 0, 0, 0, 0]),
        (libc::SYS_pidfd_getfd, [nowhere, 0, 0, 0, 0, 0]),
        (libc::SYS_mmap, [0, 4096, 3, 0x22, -1, 0]),
        (libc::SYS_mprotect, [0, 0, 3, 0, 0, 0]),
        (libc::SYS_ioctl, [nowhere, i64::from(COMMAND), 0, 0, 0, 0]),
        // SECCOMP_IOCTL_NOTIF_RECV
        (libc::SYS_ioctl, [nowhere, 0xc050_2100, 0, 0, 0, 0]),
        (libc::SYS_fcntl, [nowhere, i64::from(libc::F_ADD_SEALS), 0, 0, 0, 0]),
        (libc::SYS_fcntl, [nowhere, i64::from(libc::F_GETFD), 0, 0, 0, 0]),
        (libc::SYS_fcntl, [nowhere, i64::from(libc::F_DUPFD_CLOEXEC), 0, 0, 0, 0]),
        (libc::SYS_kcmp, [0; 6]),
        (libc::SYS_seccomp, [3, 0, 0, 0, 0, 0]),
        (libc::SYS_statx, [nowhere, 0, 0x5000, 0, 0, 0]),
    ]
}

/// Not a test of its own: what a probing process does.
#[test]
fn probing() {
    let Ok(name) = std::env::var(PROBE) else { return };
    // A thread's first steps need more than the program allows: it must have come to rest.
    let (ready, started) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        ready.send(()).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(50));
    });
    started.recv().unwrap();
    if name.starts_with("unconfined ") {
        let name = name.trim_start_matches("unconfined ");
        let (_, nr, args) = forbidden().into_iter().find(|(other, ..)| *other == name).unwrap();
        raw(nr, args);
        raw(libc::SYS_exit_group, [0; 6]);
    }
    confine();
    if name == "allowed" {
        for (nr, args) in allowed() {
            raw(nr, args);
        }
        // A thread that was there before ends, memory comes and goes.
        thread.join().unwrap();
        let large = vec![1_u8; 64 << 20];
        let larger: Vec<u8> = large.iter().copied().chain([2]).collect();
        drop((large, larger));
        std::thread::sleep(std::time::Duration::from_millis(1));
        eprintln!("a line in the log");
        raw(libc::SYS_exit_group, [0; 6]);
    }
    let (_, nr, args) = forbidden().into_iter().find(|(other, ..)| *other == name).unwrap();
    raw(nr, args);
    raw(libc::SYS_exit_group, [0; 6]);
}

#[test]
fn each_allowed_call_gets_through_and_threads_and_memory_work() {
    assert_eq!(probe("allowed").code(), Some(0));
}

#[test]
fn each_forbidden_call_dies_with_sigsys() {
    for (name, ..) in forbidden() {
        let status = probe(name);
        assert_eq!(status.signal(), Some(SIGSYS), "{name}: {status}");
    }
}

#[test]
fn without_the_program_the_same_calls_do_not_kill() {
    for name in [
        "open",
        "socket",
        "ptrace",
        "pidfd_open",
        "kill",
        "prctl",
        "another ioctl",
        "a number that is no call",
    ] {
        let status = probe(&format!("unconfined {name}"));
        assert_eq!(status.code(), Some(0), "{name}: {status}");
    }
}
