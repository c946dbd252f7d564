//! A scheduler that is a process of its own: killed by SIGKILL, replaced, and ended by SIGTERM.
//!
//! Without the test framework, whose other threads would take the signal: started with `schedule` and a
//! directory it is the scheduler, else the test.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

#[allow(unreachable_pub, reason = "a module of a test")]
mod node;

use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use node::*;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        [_, "schedule", directory] => {
            let config = config(Path::new(directory), 1_820_000_000);
            gpuslice_scheduler::run(&config, Box::new(Fake::default())).unwrap();
        }
        [_, "--list", ..] => {}
        _ => {
            a_killed_scheduler_is_replaced_and_adopts_its_tenants();
            println!("test a_killed_scheduler_is_replaced_and_adopts_its_tenants ... ok");
        }
    }
}

/// Starts it, as systemd would, and waits for its word that it is ready.
fn scheduler_process(directory: &Path) -> Child {
    let notify = directory.join("notify.sock");
    std::fs::remove_file(&notify).ok();
    let manager = UnixDatagram::bind(&notify).unwrap();
    manager.set_read_timeout(Some(PATIENCE)).unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["schedule", directory.to_str().unwrap()])
        .env("NOTIFY_SOCKET", &notify)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut message = [0; 64];
    let length = manager.recv(&mut message).unwrap();
    assert_eq!(&message[..length], b"READY=1");
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    assert!(status.contains("Seccomp:\t2") && status.contains("NoNewPrivs:\t1"), "{status}");
    child
}

fn a_killed_scheduler_is_replaced_and_adopts_its_tenants() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::set_permissions(directory.path(), std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    let socket = directory.path().join("scheduler.sock");
    let mut first = scheduler_process(directory.path());
    let mut tenant = Tenant::start(&socket, register("a", 4 * GIB, GIB));
    first.kill().unwrap();
    first.wait().unwrap();
    assert!(socket.exists(), "a killed process leaves its socket");
    while tenant.session.ping().is_some() {}
    assert_eq!(tenant.shim.answer(), None);
    let mut second = scheduler_process(directory.path());
    let begun = Instant::now();
    tenant.come_back(&socket, register("a", 4 * GIB, GIB));
    assert!(begun.elapsed() < Duration::from_secs(1));
    tenant.session.serve(0, 2);
    // And it ends on SIGTERM, with its socket.
    let pid = nix::unistd::Pid::from_raw(i32::try_from(second.id()).unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
    assert!(second.wait().unwrap().success());
    assert!(!socket.exists());
}
