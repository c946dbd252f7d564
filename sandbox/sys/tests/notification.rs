//! Seccomp notification, tenant memory and handles, with a real process under a real filter.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "helpers of tests")]

mod support;

use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::{AsFd, AsRawFd};

use gpuslice_sys::{Answer, Arg, TenantMemory, ioctl, process};
use support::{TRAPPED, hear, listener, numbers, parent, start, tell, under_the_trap};

#[test]
#[ignore = "the child of other tests"]
fn child_makes_trapped_calls() {
    let Some(parent) = parent() else { return };
    under_the_trap(&parent);
    let file = File::open("/dev/null").unwrap();
    let mut secret = vec![7u8; 5000];
    tell(&parent, &format!("at {} {}", secret.as_ptr() as usize, file.as_raw_fd()), &[]);
    loop {
        let result = ioctl(file.as_fd(), TRAPPED, &mut Arg::flat(vec![1, 2, 3, 4]));
        let result = match result {
            Ok(value) => format!("value {value}"),
            Err(failed) => format!("error {}", failed.raw_os_error().unwrap()),
        };
        tell(&parent, &result, &[]);
        match hear(&parent).0.as_str() {
            "again" => {}
            "end" => return,
            "secret" => {
                tell(&parent, &format!("secret {} {}", secret[0], secret[4999]), &[]);
                secret[0] = 0;
            }
            other => panic!("{other}"),
        }
    }
}

#[test]
fn every_answer_reaches_the_caller() {
    let (child, socket) = start("child_makes_trapped_calls");
    let listener = listener(&socket);
    listener.sync_wake_up().unwrap();
    let (at, _) = hear(&socket);
    let answers = [
        (Answer::Return(77), "value 77"),
        (Answer::Error(libc::EACCES), "error 13"),
        (Answer::Continue, "error 25"),
    ];
    for (answer, expected) in answers {
        let call = listener.recv().unwrap();
        assert_eq!((call.nr, call.args[1]), (16, u64::from(TRAPPED)));
        assert_eq!(call.args[0], numbers(&at)[1]);
        assert!(listener.is_valid(call.id));
        listener.answer(call.id, answer).unwrap();
        assert!(!listener.is_valid(call.id));
        // A second answer finds nobody, or the caller on its way out.
        let failed = listener.answer(call.id, answer).unwrap_err().raw_os_error();
        assert!(matches!(failed, Some(libc::ENOENT | libc::EINPROGRESS)), "{failed:?}");
        assert_eq!(hear(&socket).0, expected);
        tell(&socket, "again", &[]);
    }
    let call = listener.recv().unwrap();
    let null = File::open("/dev/null").unwrap();
    let number = listener.add_file(call.id, null.as_fd(), Some(200), false).unwrap();
    assert_eq!(number, 200);
    let number = listener.add_file(call.id, null.as_fd(), None, true).unwrap();
    assert_eq!(hear(&socket).0, format!("value {number}"));
    tell(&socket, "end", &[]);
    drop(child);
}

#[test]
fn memory_is_copied_both_ways_and_goes_stale_with_its_process() {
    let (mut child, socket) = start("child_makes_trapped_calls");
    let listener = listener(&socket);
    let at = numbers(&hear(&socket).0)[0];
    let call = listener.recv().unwrap();
    let file = File::options().read(true).write(true).open(format!("/proc/{}/mem", call.tid)).unwrap();
    let memory = TenantMemory::new(file.into());
    let mut bytes = [0; 5000];
    memory.read_at(at, &mut bytes).unwrap();
    assert_eq!(bytes, [7; 5000]);
    let mut parameters = [0; 4];
    memory.read_at(call.args[2], &mut parameters).unwrap();
    assert_eq!(parameters, [1, 2, 3, 4]);
    memory.write_at(at, &[9; 5000]).unwrap();
    for address in [0, 4096, u64::MAX - 2, 1 << 62] {
        let failed = memory.read_at(address, &mut parameters).unwrap_err();
        assert_eq!(failed.raw_os_error(), Some(libc::EFAULT), "{address:#x}");
        let failed = memory.write_at(address, &parameters).unwrap_err();
        assert_eq!(failed.raw_os_error(), Some(libc::EFAULT), "{address:#x}");
    }
    listener.answer(call.id, Answer::Return(0)).unwrap();
    hear(&socket);
    tell(&socket, "secret", &[]);
    assert_eq!(hear(&socket).0, "secret 9 9");
    child.0.kill().unwrap();
    child.0.wait().unwrap();
    assert_eq!(memory.read_at(at, &mut parameters).unwrap_err().kind(), ErrorKind::UnexpectedEof);
    // Nobody is left under the filter.
    assert_eq!(listener.recv().unwrap_err().raw_os_error(), Some(libc::ENOENT));
}

#[test]
fn a_threads_files_are_reached_through_its_pidfd() {
    let (mut child, socket) = start("child_makes_trapped_calls");
    let listener = listener(&socket);
    let number = numbers(&hear(&socket).0)[1];
    let call = listener.recv().unwrap();
    let pidfd = process::pidfd_open(call.tid, true).unwrap();
    let copy = process::pidfd_getfd(pidfd.as_fd(), i32::try_from(number).unwrap()).unwrap();
    assert_eq!(gpuslice_sys::identify(copy.as_fd()).unwrap().rdev_minor, 3);
    let missing = process::pidfd_getfd(pidfd.as_fd(), 999).unwrap_err();
    assert_eq!(missing.raw_os_error(), Some(libc::EBADF));
    assert!(process::same_file_table(call.tid, child.0.id()).unwrap());
    assert!(!process::same_file_table(call.tid, std::process::id()).unwrap());
    assert!(!process::pidfd_exited(pidfd.as_fd()));
    child.0.kill().unwrap();
    child.0.wait().unwrap();
    assert!(process::pidfd_exited(pidfd.as_fd()));
    let gone = process::pidfd_getfd(pidfd.as_fd(), 0).unwrap_err();
    assert_eq!(gone.raw_os_error(), Some(libc::ESRCH));
}
