//! Moving and populating a range under a process with busy threads.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "helpers of tests")]

mod support;

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gpuslice_sys::inject::{Move, MoveError, Populate, move_range, populate};
use gpuslice_sys::{Answer, Arg, Listener, Notification, SharedMapping, ioctl, memory};
use support::{
    TRAPPED, hear, listener, numbers, parent, soon, start, tell, under_the_trap, under_the_trap_of_kind,
};

const LENGTH: usize = 64 * 4096;

/// Page-aligned numbers, counted up by other threads.
#[repr(align(4096))]
struct Range([AtomicU64; LENGTH / 8]);

static RANGE: Range = Range([const { AtomicU64::new(0) }; LENGTH / 8]);

#[test]
#[ignore = "the child of other tests"]
fn child_has_its_memory_moved() {
    let Some(parent) = parent() else { return };
    under_the_trap(&parent);
    let stop = Arc::new(AtomicBool::new(false));
    RANGE.0[100].store(4711, Ordering::Relaxed);
    let writers: Vec<_> = (0..4)
        .map(|index| {
            let stop = Arc::clone(&stop);
            std::thread::spawn(move || {
                let mut count = 0;
                while !stop.load(Ordering::Relaxed) {
                    count += 1;
                    // Lost while copying, an increment would be missed below.
                    RANGE.0[index * 512].fetch_add(1, Ordering::Relaxed);
                }
                count
            })
        })
        .collect();
    let file = File::open("/dev/null").unwrap();
    tell(&parent, &format!("range {}", RANGE.0.as_ptr() as usize), &[]);
    loop {
        let result = ioctl(file.as_fd(), TRAPPED, &mut Arg::flat(vec![0; 4]));
        let result = result.map_err(|failed| failed.raw_os_error());
        tell(&parent, &format!("{result:?}"), &[]);
        if hear(&parent).0 == "end" {
            break;
        }
    }
    stop.store(true, Ordering::Relaxed);
    for (index, writer) in writers.into_iter().enumerate() {
        let counted: u64 = writer.join().unwrap();
        assert_eq!(RANGE.0[index * 512].load(Ordering::Relaxed), counted);
    }
    assert_eq!(RANGE.0[100].load(Ordering::Relaxed), 4711);
    RANGE.0[101].store(815, Ordering::Relaxed);
    tell(&parent, "done", &[]);
    hear(&parent);
}

/// Answers what arrives until the trapped ioctl comes again.
fn until_the_call_comes_again(listener: &Listener) -> Notification {
    loop {
        match listener.recv() {
            Ok(call) if call.nr == 16 => return call,
            Ok(call) => listener.answer(call.id, Answer::Continue).unwrap(),
            Err(failed) => assert_eq!(failed.raw_os_error(), Some(libc::ENOENT)),
        }
    }
}

fn attempt(call: &Notification, range: (u64, u64), listener: &Arc<Listener>) -> Result<File, MoveError> {
    let file = memory::memfd("moved", range.1).unwrap();
    let tenant_file = listener.add_file(call.id, file.as_fd(), None, false).unwrap();
    let (id, tid) = (call.id, call.tid);
    let copy = file.try_clone().unwrap();
    let answering = Arc::clone(listener);
    std::thread::spawn(move || {
        let deadline = Instant::now() + Duration::from_secs(5);
        let wanted = Move { tid, range, memfd: copy.as_fd(), tenant_file, deadline };
        let mut told = false;
        let interrupted = || {
            // Without WAIT_KILLABLE the interruption has cancelled the call already.
            if let Err(failed) = answering.answer(id, Answer::Restart) {
                assert_eq!(failed.raw_os_error(), Some(libc::ENOENT));
            }
            Ok(())
        };
        let result = move_range(&wanted, interrupted, |_| told = true);
        assert!(told);
        result
    })
    .join()
    .unwrap()
    .map(|()| File::from(file))
}

#[test]
fn a_range_moves_under_running_threads_and_nothing_is_lost() {
    let (_child, socket) = start("child_has_its_memory_moved");
    let listener = Arc::new(listener(&socket));
    let start = numbers(&hear(&socket).0)[0];
    let call = listener.recv().unwrap();
    // The injected mmap is trapped too: somebody must answer while the move goes on.
    let serving = Arc::clone(&listener);
    let server = std::thread::spawn(move || until_the_call_comes_again(&serving));
    let began = Instant::now();
    let moved = attempt(&call, (start, LENGTH as u64), &listener).unwrap();
    println!("moved {LENGTH} bytes under five threads in {:?}", began.elapsed());
    let again = server.join().unwrap();
    assert_eq!((again.tid, again.args), (call.tid, call.args));
    listener.answer(again.id, Answer::Return(5)).unwrap();
    assert_eq!(hear(&socket).0, "Ok(5)");
    tell(&socket, "end", &[]);
    assert_eq!(hear(&socket).0, "done");
    let mut word = [0; 8];
    moved.read_exact_at(&mut word, 101 * 8).unwrap();
    assert_eq!(u64::from_ne_bytes(word), 815, "the process writes to the file that we hold");
    tell(&socket, "end", &[]);
}

#[test]
fn a_hole_in_the_range_leaves_everything_as_it_was() {
    let (_child, socket) = start("child_has_its_memory_moved");
    let listener = Arc::new(listener(&socket));
    hear(&socket);
    let call = listener.recv().unwrap();
    let failed = attempt(&call, (4096, 8192), &listener).unwrap_err();
    assert!(matches!(failed, MoveError::Copy(_)), "{failed:?}");
    let again = until_the_call_comes_again(&listener);
    listener.answer(again.id, Answer::Error(libc::EFAULT)).unwrap();
    assert_eq!(hear(&socket).0, "Err(Some(14))");
    tell(&socket, "end", &[]);
    assert_eq!(hear(&socket).0, "done");
    tell(&socket, "end", &[]);
}

#[test]
fn a_thread_that_is_gone_is_an_error() {
    let file = memory::memfd("moved", 4096).unwrap();
    let wanted =
        Move { tid: 0x3fff_fff0, range: (4096, 4096), memfd: file.as_fd(), tenant_file: 9, deadline: soon() };
    let failed =
        move_range(&wanted, || panic!("interrupted"), |result| assert!(result.is_err())).unwrap_err();
    assert_eq!(failed.cause().raw_os_error(), Some(libc::ESRCH));
}

#[test]
#[ignore = "the child of other tests"]
fn child_has_its_memory_populated() {
    let Some(parent) = parent() else { return };
    // Under the trap this would wait for an answer.
    let file = memory::memfd("shared", LENGTH as u64).unwrap();
    let (wanted, _) = hear(&parent);
    let (writable, killable) = (wanted.contains("writable"), wanted.contains("killable"));
    let mapping = SharedMapping::new(file.as_fd(), 0, LENGTH, writable).unwrap();
    under_the_trap_of_kind(&parent, killable);
    let stop = Arc::new(AtomicBool::new(false));
    let others: Vec<_> = (0..4)
        .map(|_| {
            let stop = Arc::clone(&stop);
            std::thread::spawn(move || while !stop.load(Ordering::Relaxed) {})
        })
        .collect();
    tell(&parent, &format!("range {}", mapping.address()), &[file.as_fd()]);
    let null = File::open("/dev/null").unwrap();
    let result = ioctl(null.as_fd(), TRAPPED, &mut Arg::flat(vec![0; 4]));
    tell(&parent, &format!("{result:?}"), &[]);
    stop.store(true, Ordering::Relaxed);
    others.into_iter().for_each(|other| other.join().unwrap());
    hear(&parent);
}

/// Threads of the process that are traced.
fn traced(tid: u32) -> Vec<u32> {
    let threads = std::fs::read_dir(format!("/proc/{tid}/task")).unwrap();
    let threads = threads.map(|thread| thread.unwrap().file_name().to_str().unwrap().parse().unwrap());
    threads
        .filter(|thread| {
            let status = std::fs::read_to_string(format!("/proc/{tid}/task/{thread}/status")).unwrap();
            let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:")).unwrap();
            tracer.trim() != "0"
        })
        .collect()
}

/// Populates the child's range, moved by `shift`; what came of it, and the blocks of its file before and after.
fn populated(access: &str, shift: u64) -> (Result<(), Option<i32>>, u64, u64) {
    let (_child, socket) = start("child_has_its_memory_populated");
    tell(&socket, access, &[]);
    let listener = Arc::new(listener(&socket));
    let (text, mut files) = hear(&socket);
    let file = File::from(files.pop().unwrap());
    let before = file.metadata().unwrap().blocks();
    let range = (numbers(&text)[0] + shift, LENGTH as u64);
    let call = listener.recv().unwrap();
    let (id, tid) = (call.id, call.tid);
    let answering = Arc::clone(&listener);
    let acting = std::thread::spawn(move || {
        let interrupted = || {
            // Without WAIT_KILLABLE the interruption has cancelled the call already.
            if let Err(failed) = answering.answer(id, Answer::Restart) {
                assert_eq!(failed.raw_os_error(), Some(libc::ENOENT));
            }
            Ok(())
        };
        let wanted = Populate { tid, range, deadline: Instant::now() + Duration::from_secs(5) };
        populate(&wanted, interrupted, |_| assert_eq!(traced(tid), [tid], "the others run on"))
    });
    let again = until_the_call_comes_again(&listener);
    assert_eq!((again.tid, again.args), (call.tid, call.args), "the call comes again as it was");
    let result = acting.join().unwrap();
    let after = file.metadata().unwrap().blocks();
    listener.answer(again.id, Answer::Return(5)).unwrap();
    assert_eq!(hear(&socket).0, "Ok(5)");
    tell(&socket, "end", &[]);
    if let Err(failed) = &result {
        assert!(matches!(failed, MoveError::Populate(_)), "{failed:?}");
    }
    (result.map_err(|failed| failed.cause().raw_os_error()), before, after)
}

#[test]
fn the_calling_thread_alone_stops_and_makes_the_pages_of_a_range() {
    let blocks = LENGTH as u64 / 512;
    assert_eq!(populated("writable", 0), (Ok(()), 0, blocks));
    assert_eq!(populated("read-only", 0), (Ok(()), 0, blocks));
    assert_eq!(populated("writable killable", 0), (Ok(()), 0, blocks));
}

#[test]
fn a_range_with_a_hole_cannot_be_populated() {
    let (result, _, _) = populated("writable", 1 << 30);
    assert_eq!(result, Err(Some(libc::ENOMEM)));
    let (result, _, _) = populated("writable killable", 1 << 30);
    assert_eq!(result, Err(Some(libc::ENOMEM)));
}
