//! Moving a range under a process with busy threads.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "helpers of tests")]

mod support;

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gpuslice_sys::inject::{Move, MoveError, move_range};
use gpuslice_sys::{Answer, Arg, Listener, Notification, ioctl, memory};
use support::{TRAPPED, hear, listener, numbers, parent, soon, start, tell, under_the_trap};

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
