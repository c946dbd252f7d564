//! A child process for tests: this test program again, running one ignored test, with a socket as its
//! standard input.
#![allow(dead_code, unreachable_pub, reason = "each test file uses a part")]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use gpuslice_sys::{Instruction, Listener, Socket, bpf, jail};

/// Command that the tests' filter traps.
pub const TRAPPED: u32 = 0x4e56_0001;

pub fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

/// Kills and reaps on drop.
pub struct Running(pub Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _gone = self.0.kill();
        let _status = self.0.wait();
    }
}

/// Runs the ignored test `name` in a process of its own.
pub fn start(name: &str) -> (Running, Socket) {
    let (ours, theirs) = Socket::pair().unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--ignored", "--nocapture", "--test-threads=1"])
        .stdin(Stdio::from(theirs.into_fd()))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    (Running(child), ours)
}

/// The child's end; `None` when the ignored test was run by hand.
pub fn parent() -> Option<Socket> {
    let stdin = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let socket = Socket::from_fd(stdin);
    socket.peer().is_ok().then_some(socket)
}

pub fn tell(socket: &Socket, text: &str, files: &[BorrowedFd<'_>]) {
    socket.send(text.as_bytes(), files, soon()).unwrap();
}

pub fn hear(socket: &Socket) -> (String, Vec<OwnedFd>) {
    let mut buf = [0; 256];
    let (length, files) = socket.recv(&mut buf, 8, soon()).unwrap();
    assert_ne!(length, 0, "the other side ended");
    (String::from_utf8(buf[..length].to_vec()).unwrap(), files)
}

/// "name number number ..." as numbers.
pub fn numbers(text: &str) -> Vec<u64> {
    text.split(' ').skip(1).map(|number| number.parse().unwrap()).collect()
}

fn load(offset: u32) -> Instruction {
    Instruction { code: 0x20, jt: 0, jf: 0, k: offset }
}

fn equal(value: u32, jt: u8, jf: u8) -> Instruction {
    Instruction { code: 0x15, jt, jf, k: value }
}

fn give(value: u32) -> Instruction {
    Instruction { code: 0x06, jt: 0, jf: 0, k: value }
}

pub const ALLOW: u32 = 0x7fff_0000;
pub const NOTIFY: u32 = 0x7fc0_0000;

/// Notifies of ioctl [`TRAPPED`] and of shared mappings of files; allows the rest.
pub fn trap() -> Vec<Instruction> {
    let flags = 16 + 8 * 3;
    vec![
        load(0),
        equal(16, 0, 2),
        load(16 + 8),
        equal(TRAPPED, 6, 5),
        equal(9, 0, 4),
        load(flags),
        // MAP_SHARED and MAP_ANONYMOUS.
        Instruction { code: 0x54, jt: 0, jf: 0, k: 0x21 },
        equal(1, 2, 1),
        give(ALLOW),
        give(ALLOW),
        give(NOTIFY),
    ]
}

/// Puts the calling thread under [`trap`] and sends the listener to the parent.
pub fn under_the_trap(parent: &Socket) {
    under_the_trap_of_kind(parent, false);
}

/// The same, with `WAIT_KILLABLE_RECV` if `killable`.
pub fn under_the_trap_of_kind(parent: &Socket, killable: bool) {
    jail::no_new_privileges().unwrap();
    let listener = bpf::install_with_listener(&trap(), killable).unwrap();
    tell(parent, "listener", &[listener.as_fd()]);
}

pub fn listener(child: &Socket) -> Listener {
    let (_, mut files) = hear(child);
    Listener::new(files.pop().unwrap()).unwrap()
}
