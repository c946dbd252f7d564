//! Both sides of the handshake over real sockets, with peers that are slow, dead, out of order, or hostile.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

#[allow(unreachable_pub, reason = "a module of a test")]
mod node;

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

use gpuslice_proto::*;
use gpuslice_sys::Socket;
use node::*;

#[test]
fn a_container_registers_announces_its_sandbox_and_reports() {
    let scheduler = Scheduler::start(1_800_000_000);
    let mut tenant = scheduler.tenant("a", GIB);
    let ping = tenant.session.ping().unwrap();
    tenant.session.report(ping, 5 << 20);
    scheduler.until("the report", |_, tenants| {
        tenants.iter().any(|t| {
            t.container.as_str() == "ns/a"
                && t.lease == tenant.lease
                && t.usage.iter().any(|usage| usage.used == 5 << 20)
        })
    });
    let (gpus, _) = scheduler.status();
    assert_eq!((gpus[0].guaranteed, gpus[0].tenants, gpus[1].tenants), (GIB, 1, 0));
}

#[test]
fn a_closed_socket_ends_the_tenant_and_frees_its_place() {
    let scheduler = Scheduler::start(1_800_000_100);
    let mut tenant = scheduler.tenant("a", CARD / 2);
    scheduler.fake.hold(0, tenant.process.pid(), 1);
    let mut other = scheduler.shim();
    let ask = ShimToScheduler::Register(register("b", CARD, CARD));
    assert_eq!(other.refused(&ask).0, Reason::MemoryExhausted);
    tenant.process.end();
    let pid = tenant.process.pid();
    drop((tenant.shim, tenant.session));
    // Still listed by the driver: the lease stays until it lets go.
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(scheduler.status().1.len(), 1);
    scheduler.fake.release(pid);
    let released = Instant::now();
    scheduler.until("the lease is freed", |_, tenants| tenants.is_empty());
    assert!(released.elapsed() < Duration::from_secs(1), "{:?}", released.elapsed());
    scheduler.shim().granted(register("b", CARD, CARD));
}

#[test]
fn a_shim_that_dies_leaves_its_guarantee_until_its_sandbox_has_ended() {
    let scheduler = Scheduler::start(1_800_000_200);
    let mut tenant = scheduler.tenant("a", CARD / 2);
    drop((tenant.shim, tenant.session));
    scheduler.until("seen", |gpus, _| gpus[0].guaranteed == CARD / 2);
    tenant.process.end();
    scheduler.until("freed", |gpus, tenants| gpus[0].guaranteed == 0 && tenants.is_empty());
}

#[test]
fn an_announcement_is_acknowledged_each_time() {
    let scheduler = Scheduler::start(1_800_000_300);
    let mut tenant = scheduler.tenant("a", GIB);
    for _ in 0..3 {
        announce(&mut tenant.shim, &tenant.process);
    }
}

#[test]
fn a_silent_peer_is_closed_at_the_deadline() {
    let scheduler = Scheduler::start(1_800_000_400);
    let begun = Instant::now();
    assert_eq!(scheduler.shim().answer(), None);
    let took = begun.elapsed();
    assert!((Duration::from_millis(900)..Duration::from_secs(4)).contains(&took), "{took:?}");
}

#[test]
fn a_shim_that_never_announces_its_sandbox_loses_the_lease() {
    let scheduler = Scheduler::start(1_800_000_500);
    let mut shim = scheduler.shim();
    shim.granted(register("a", GIB, GIB));
    let begun = Instant::now();
    assert_eq!(shim.answer(), None);
    assert!(begun.elapsed() > Duration::from_secs(4));
    scheduler.until("freed", |gpus, tenants| gpus[0].guaranteed == 0 && tenants.is_empty());
}

#[test]
fn a_message_out_of_order_is_refused_and_closes() {
    let scheduler = Scheduler::start(1_800_000_600);
    // Twice registered on one connection.
    let mut shim = scheduler.shim();
    shim.granted(register("a", GIB, GIB));
    assert_eq!(shim.refused(&ShimToScheduler::Register(register("b", GIB, GIB))).0, Reason::OutOfOrder);
    scheduler.until("lease gone with its connection", |_, tenants| tenants.is_empty());
    // A session on a shim's connection.
    let mut shim = scheduler.shim();
    let lease = shim.granted(register("a", GIB, GIB)).lease;
    assert_eq!(shim.refused(&ShimToScheduler::OpenSandbox { lease }).0, Reason::OutOfOrder);
    // A session for a lease that isn't there.
    let open = ShimToScheduler::OpenSandbox { lease: LeaseId(1) };
    assert_eq!(scheduler.shim().refused(&open).0, Reason::NoLease);
    // An announcement before a registration: a newcomer's file is dropped by the kernel, the frame refused.
    let process = Process::start(1_800_000_600);
    let pidfd = process.pidfd();
    let started = ShimToScheduler::SandboxStarted { pid: process.pid() };
    assert_eq!(scheduler.shim().ask(&started, &[pidfd.as_fd()]), None);
}

#[test]
fn a_frame_of_another_link_or_none_at_all_closes() {
    let scheduler = Scheduler::start(1_800_000_700);
    let ready = Sender::default().encode(&SandboxToShim::Ready).unwrap();
    let usage = SandboxToScheduler::Usage { ping: 0, gpus: vec![], refused: 0 };
    let usage = Sender::default().encode(&usage).unwrap();
    let long = vec![0; MAX_FRAME + 1];
    for frame in [ready.as_slice(), &usage, b"GET / HTTP/1.1\r\n", &[0], &long] {
        let mut shim = scheduler.shim();
        shim.socket.send(frame, &[], Instant::now() + PATIENCE).unwrap();
        assert_eq!(shim.answer(), None, "{frame:?}");
    }
    // A sandbox's session takes nothing of a shim's.
    let mut tenant = scheduler.tenant("a", GIB);
    let open = ShimToScheduler::OpenSandbox { lease: tenant.lease.lease };
    let frame = Sender::<ShimToScheduler>::default().encode(&open).unwrap();
    tenant.session.socket.send(&frame, &[], Instant::now() + PATIENCE).unwrap();
    stopped(&mut tenant.shim, "broke the protocol");
    while tenant.session.ping().is_some() {}
}

/// The next message is the order to stop.
fn stopped(shim: &mut Shim, text: &str) {
    match shim.answer() {
        Some(SchedulerToShim::Stop { detail }) => assert!(detail.contains(text), "{detail}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_sandbox_that_sends_too_much_is_cut_off_and_stopped() {
    let scheduler = Scheduler::start(1_800_000_800);
    let mut tenant = scheduler.tenant("a", GIB);
    let mut neighbour = scheduler.tenant("b", GIB);
    for _ in 0..200 {
        tenant.session.report(0, 0);
    }
    stopped(&mut tenant.shim, "more messages than allowed");
    // Nobody else notices.
    let ping = neighbour.session.ping().unwrap();
    neighbour.session.report(ping, 7);
    scheduler.until("the neighbour's report", |_, tenants| {
        tenants.iter().any(|t| t.usage.iter().any(|usage| usage.used == 7))
    });
}

#[test]
fn a_sandbox_that_falls_silent_is_stopped() {
    let scheduler = Scheduler::start(1_800_000_900);
    let mut tenant = scheduler.tenant("a", GIB);
    let begun = Instant::now();
    stopped(&mut tenant.shim, "didn't answer");
    assert!(begun.elapsed() > Duration::from_secs(4));
}

#[test]
fn a_sandbox_that_reports_foreign_gpus_or_forged_answers_is_stopped() {
    let scheduler = Scheduler::start(1_800_001_000);
    for (name, minor, ping, text) in [("a", 1, 0, "other GPUs"), ("b", 0, 77, "answers ping 77")] {
        let mut tenant = scheduler.tenant(name, GIB);
        let gpus = vec![GpuUsage { minor, used: 0, peak: 0, denied: 0 }];
        let frame =
            tenant.session.sender.encode(&SandboxToScheduler::Usage { ping, gpus, refused: 0 }).unwrap();
        tenant.session.socket.send(&frame, &[], Instant::now() + PATIENCE).unwrap();
        stopped(&mut tenant.shim, text);
    }
}

#[test]
fn only_a_pidfd_of_the_process_with_the_leases_uid_is_acknowledged() {
    let scheduler = Scheduler::start(1_800_001_100);
    let wrong_uid = Process::start(65_534);
    let cases: [(u32, OwnedFd, &str); 3] = [
        (wrong_uid.pid(), wrong_uid.pidfd(), "has uid 65534"),
        (1, wrong_uid.pidfd(), "the message 1"),
        (wrong_uid.pid(), fs::File::open("/dev/null").unwrap().into(), "a pidfd is needed"),
    ];
    for (pid, file, text) in cases {
        let mut shim = scheduler.shim();
        shim.granted(register("a", GIB, GIB));
        match shim.ask(&ShimToScheduler::SandboxStarted { pid }, &[file.as_fd()]) {
            Some(SchedulerToShim::Refused { reason: Reason::NoLease, detail }) => {
                assert!(detail.contains(text), "{detail}");
            }
            other => panic!("{other:?}"),
        }
        scheduler.until("gone", |_, tenants| tenants.is_empty());
    }
}

#[test]
fn a_sandboxs_session_takes_no_files() {
    let scheduler = Scheduler::start(1_800_001_200);
    let mut tenant = scheduler.tenant("a", GIB);
    let file = fs::File::open("/dev/null").unwrap();
    let gpus = vec![GpuUsage { minor: 0, used: 0, peak: 0, denied: 0 }];
    let frame =
        tenant.session.sender.encode(&SandboxToScheduler::Usage { ping: 0, gpus, refused: 0 }).unwrap();
    tenant.session.socket.send(&frame, &[file.as_fd()], Instant::now() + PATIENCE).unwrap();
    stopped(&mut tenant.shim, "broke the protocol");
}

#[test]
fn a_peer_that_takes_nothing_is_closed_and_the_loop_goes_on() {
    let scheduler = Scheduler::start(1_800_001_300);
    let tenants: Vec<_> = (0..8).map(|n| scheduler.tenant(&format!("t{n}"), 1)).collect();
    // Status asked for and never read.
    let deaf: Vec<Socket> = (0..20)
        .map(|_| {
            let socket = Socket::connect(&scheduler.socket(), Instant::now() + PATIENCE).unwrap();
            let frame = Sender::default().encode(&ToolToScheduler::Status).unwrap();
            socket.send(&frame, &[], Instant::now() + PATIENCE).unwrap();
            socket
        })
        .collect();
    assert_eq!(scheduler.status().1.len(), tenants.len());
    drop(deaf);
}

/// Not a test of its own: what the next one runs as another user.
#[test]
fn child_that_connects() {
    let Ok(path) = std::env::var("GPUSLICE_TEST_CONNECT") else { return };
    match Socket::connect(path.as_ref(), Instant::now() + Duration::from_secs(5)) {
        Err(error) => println!("connect: {error}"),
        Ok(socket) => {
            let mut shim = Shim { socket, sender: Sender::default(), receiver: Receiver::default() };
            println!("answer: {:?}", shim.ask(&ShimToScheduler::Register(register("x", GIB, GIB)), &[]));
        }
    }
}

#[test]
fn a_peer_that_is_not_root_gets_nothing() {
    let scheduler = Scheduler::start(1_800_001_400);
    let program =
        scheduler.directory.path().parent().unwrap().join(format!("gpuslice-test-{}", std::process::id()));
    fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let socket = scheduler.socket();
    let run = |uid: u32| {
        let output = Command::new(&program)
            .args(["--exact", "child_that_connects", "--nocapture"])
            .env("GPUSLICE_TEST_CONNECT", &socket)
            .uid(uid)
            .gid(uid)
            .output()
            .unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    // The control: root is let in.
    let root = run(0);
    let by_mode = run(65_534);
    // With the directory and the socket open to all, the kernel's word on the peer still holds.
    fs::set_permissions(scheduler.directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(&socket, fs::Permissions::from_mode(0o666)).unwrap();
    let by_credentials = run(65_534);
    fs::remove_file(&program).unwrap();
    assert!(root.contains("Granted"), "{root}");
    assert!(by_mode.contains("connect: Permission denied"), "{by_mode}");
    assert!(by_credentials.contains("Refused { reason: NotRoot"), "{by_credentials}");
}

#[test]
fn the_socket_and_its_directory_are_roots_alone() {
    let scheduler = Scheduler::start(1_800_001_500);
    let mode = |path: &std::path::Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(scheduler.directory.path()), mode(&scheduler.socket())), (0o700, 0o600));
    let other = tempfile::tempdir().unwrap();
    fs::set_permissions(other.path(), fs::Permissions::from_mode(0o750)).unwrap();
    let (stop, _stopper) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC).unwrap();
    let config = config(other.path(), 1_800_001_500);
    let error = gpuslice_scheduler::run_with(&config, Box::new(Fake::default()), &stop).unwrap_err();
    assert!(error.to_string().contains("must be root's with mode 0700"), "{error}");
}
