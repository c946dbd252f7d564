//! Sockets: files on messages, deadlines, truncation, paths.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "helpers of tests")]

mod support;

use std::fs::File;
use std::io::{ErrorKind, IoSlice, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use gpuslice_sys::Socket;
use gpuslice_sys::socket::StateListener;
use support::soon;

/// A directory, removed on drop.
struct Place(PathBuf);

impl Place {
    fn new(name: &str) -> Place {
        let path = std::env::temp_dir().join(format!("gpuslice-{name}-{}", std::process::id()));
        Place(path)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _removed = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_message_arrives_whole_with_its_files_close_on_exec() {
    let (a, b) = Socket::pair().unwrap();
    let files =
        [File::open("/dev/null").unwrap(), File::open("/dev/zero").unwrap(), File::open("/proc").unwrap()];
    let borrowed: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    a.send(b"three", &borrowed, soon()).unwrap();
    a.send(b"none", &[], soon()).unwrap();
    let mut buf = [0; 16];
    let (length, received) = b.recv(&mut buf, 3, soon()).unwrap();
    assert_eq!(&buf[..length], b"three");
    for (sent, received) in files.iter().zip(&received) {
        assert_eq!(
            gpuslice_sys::identify(sent.as_fd()).unwrap(),
            gpuslice_sys::identify(received.as_fd()).unwrap()
        );
        // SAFETY: F_GETFD touches no memory.
        let flags = unsafe { libc::fcntl(received.as_raw_fd(), libc::F_GETFD) };
        assert_eq!(flags, libc::FD_CLOEXEC);
    }
    let (length, received) = b.recv(&mut buf, 3, soon()).unwrap();
    assert_eq!((&buf[..length], received.len()), (&b"none"[..], 0));
    drop(a);
    assert_eq!(b.recv(&mut buf, 3, soon()).unwrap().0, 0);
    assert_eq!(b.send(b"x", &[], soon()).unwrap_err().kind(), ErrorKind::BrokenPipe);
}

#[test]
fn too_long_a_message_and_too_many_files_are_errors_and_leak_nothing() {
    let open_files = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let (a, b) = Socket::pair().unwrap();
    let null = File::open("/dev/null").unwrap();
    let many = vec![null.as_fd(); 5];
    let mut buf = [0; 8];
    let before = open_files();
    a.send(b"longer than eight", &many, soon()).unwrap();
    assert_eq!(b.recv(&mut buf, 8, soon()).unwrap_err().raw_os_error(), Some(libc::EMSGSIZE));
    a.send(b"files", &many, soon()).unwrap();
    assert_eq!(b.recv(&mut buf, 4, soon()).unwrap_err().raw_os_error(), Some(libc::EMSGSIZE));
    a.send(b"files", &many, soon()).unwrap();
    assert_eq!(b.recv(&mut buf, 0, soon()).unwrap_err().raw_os_error(), Some(libc::EMSGSIZE));
    let too_many = vec![null.as_fd(); 33];
    assert_eq!(a.send(b"x", &too_many, soon()).unwrap_err().raw_os_error(), Some(libc::EMSGSIZE));
    // Other tests of this program open and close files meanwhile, but none this many.
    assert!(open_files() < before + 5);
}

#[test]
fn waits_end_at_their_deadline() {
    let (a, b) = Socket::pair().unwrap();
    let began = Instant::now();
    let late = || Instant::now() + Duration::from_millis(30);
    assert_eq!(b.recv(&mut [0; 8], 0, late()).unwrap_err().kind(), ErrorKind::TimedOut);
    while a.send(&[0; 4096], &[], Instant::now()).is_ok() {}
    assert_eq!(a.send(&[0; 4096], &[], late()).unwrap_err().kind(), ErrorKind::TimedOut);
    assert!(began.elapsed() >= Duration::from_millis(60));
}

#[test]
fn a_path_socket_is_private_and_replaces_only_an_abandoned_one() {
    let place = Place::new("path");
    let path = place.0.join("a").join("s.sock");
    let listening = Socket::listen(&path).unwrap();
    let mode = |path: &std::path::Path| std::fs::symlink_metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&path), 0o600);
    assert_eq!(mode(path.parent().unwrap()), 0o700);
    assert_eq!(Socket::listen(&path).unwrap_err().kind(), ErrorKind::AddrInUse);
    let client = Socket::connect(&path, soon()).unwrap();
    // The probe of the second listen may wait in the queue before it.
    let mut server = listening.accept(soon()).unwrap();
    if server.recv(&mut [0], 0, Instant::now()).is_ok_and(|(length, _)| length == 0) {
        server = listening.accept(soon()).unwrap();
    }
    client.send(b"hello", &[], soon()).unwrap();
    let mut buf = [0; 8];
    assert_eq!(server.recv(&mut buf, 0, soon()).unwrap().0, 5);
    assert_eq!(server.peer().unwrap().pid, std::process::id());
    drop(listening);
    drop(Socket::listen(&path).unwrap());
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, b"precious").unwrap();
    assert_eq!(Socket::listen(&path).unwrap_err().kind(), ErrorKind::AddrInUse);
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    assert!(Socket::connect(&place.0.join("missing"), soon()).is_err());
    assert!(Socket::connect(&PathBuf::from("x".repeat(108)), soon()).is_err());
}

#[test]
fn a_runtimes_state_comes_with_exactly_one_file() {
    let place = Place::new("state");
    let path = place.0.join("n.sock");
    let listener = StateListener::bind(&path).unwrap();
    let send = |parts: &[&[u8]], files: usize| {
        let mut stream = UnixStream::connect(&path).unwrap();
        let null = File::open("/dev/null").unwrap();
        let numbers = vec![null.as_raw_fd(); files];
        let control = [nix::sys::socket::ControlMessage::ScmRights(&numbers)];
        let control = if files == 0 { &[][..] } else { &control[..] };
        let flags = nix::sys::socket::MsgFlags::empty();
        let first = [IoSlice::new(parts[0])];
        nix::sys::socket::sendmsg::<()>(stream.as_raw_fd(), &first, control, flags, None).unwrap();
        for part in &parts[1..] {
            stream.write_all(part).unwrap();
        }
    };
    send(&[b"{\"a\":", b"1}"], 1);
    let (state, file) = listener.accept(soon()).unwrap().receive(soon()).unwrap();
    assert_eq!(state, b"{\"a\":1}");
    assert_eq!(gpuslice_sys::identify(file.as_fd()).unwrap().rdev_minor, 3);
    for files in [0, 2] {
        send(&[b"{}"], files);
        let failed = listener.accept(soon()).unwrap().receive(soon()).unwrap_err();
        assert_eq!(failed.raw_os_error(), Some(libc::EMSGSIZE));
    }
    let silent = UnixStream::connect(&path).unwrap();
    let accepted = listener.accept(soon()).unwrap();
    assert_eq!(accepted.peer().unwrap().pid, std::process::id());
    let failed = accepted.receive(Instant::now() + Duration::from_millis(20)).unwrap_err();
    assert_eq!(failed.kind(), ErrorKind::TimedOut);
    drop(silent);
}
