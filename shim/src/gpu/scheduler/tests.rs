use std::thread::JoinHandle;

use gpuslice_proto::{ContainerId, GpuSlice, GpuUuid};
use gpuslice_sys::{Listening, process};

use super::*;

const PATIENCE: Duration = Duration::from_millis(700);

fn register() -> Register {
    Register {
        container: ContainerId::try_from("default/c1".to_owned()).unwrap(),
        pod: None,
        gpus: vec![GpuSlice {
            uuid: GpuUuid::try_from("GPU-00000000-0000-0000-0000-00000000000a".to_owned()).unwrap(),
            minor: 0,
            memory_hard: 1 << 30,
            memory_soft: 1 << 29,
            weight: 100,
        }],
        driver: "580.159.04".into(),
        adopt: None,
    }
}

const LEASE: Lease = Lease { lease: LeaseId(7), uid: 1_900_000_001, sandbox_pid: 0 };

/// One connection of a scripted scheduler.
struct Peer {
    socket: Socket,
    sender: Sender<SchedulerToShim>,
    receiver: Receiver<ShimToScheduler>,
}

impl Peer {
    fn accept(listening: &Listening) -> Peer {
        let socket = listening.accept(Instant::now() + Duration::from_secs(5)).unwrap();
        Peer { socket, sender: Sender::default(), receiver: Receiver::default() }
    }

    fn hear(&mut self) -> Option<ShimToScheduler> {
        let mut buffer = [0; MAX_FRAME];
        let (length, files) =
            self.socket.recv(&mut buffer, 4, Instant::now() + Duration::from_secs(5)).unwrap();
        (length > 0).then(|| self.receiver.decode(&buffer[..length], files.len()).unwrap())
    }

    fn say(&mut self, message: &SchedulerToShim) {
        let frame = self.sender.encode(message).unwrap();
        self.socket.send(&frame, &[], Instant::now() + Duration::from_secs(5)).unwrap();
    }
}

/// Runs `script` as the scheduler behind a socket of its own.
fn scheduler<T: Send + 'static>(
    script: impl FnOnce(&Listening) -> T + Send + 'static,
) -> (tempfile::TempDir, PathBuf, JoinHandle<T>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("scheduler.sock");
    let listening = Socket::listen(&path).unwrap();
    (folder, path, std::thread::spawn(move || script(&listening)))
}

#[test]
fn a_lease_is_had_announced_and_opened_for_the_sandbox() {
    let (_folder, path, script) = scheduler(|listening| {
        let mut shim = Peer::accept(listening);
        assert_eq!(shim.hear(), Some(ShimToScheduler::Register(register())));
        shim.say(&SchedulerToShim::Granted(LEASE));
        let mut sandbox = Peer::accept(listening);
        assert_eq!(sandbox.hear(), Some(ShimToScheduler::OpenSandbox { lease: LEASE.lease }));
        sandbox.say(&SchedulerToShim::Acknowledged);
        // The first announcement is lost; it comes again.
        let pid = std::process::id();
        assert_eq!(shim.hear(), Some(ShimToScheduler::SandboxStarted { pid }));
        assert_eq!(shim.hear(), Some(ShimToScheduler::SandboxStarted { pid }));
        shim.say(&SchedulerToShim::Acknowledged);
        shim.say(&SchedulerToShim::Stop { detail: "over its limit".into() });
        shim.hear()
    });
    let mut connection = Connection::open(&path, PATIENCE).unwrap();
    assert_eq!(connection.register(register()).unwrap(), LEASE);
    drop(open_for_sandbox(&path, LEASE.lease, PATIENCE).unwrap());
    let pidfd = process::pidfd_open(std::process::id(), false).unwrap();
    connection.announce(std::process::id(), pidfd.as_fd()).unwrap();
    assert!(gpuslice_sys::wait::readable(connection.as_fd(), Some(Instant::now() + PATIENCE)).unwrap());
    assert!(matches!(connection.next(), Ok(SchedulerToShim::Stop { .. })));
    drop(connection);
    assert_eq!(script.join().unwrap(), None);
}

#[test]
fn an_absent_scheduler_is_named_by_its_socket() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("scheduler.sock");
    let error = Connection::open(&path, PATIENCE).unwrap_err();
    assert!(matches!(error, SchedulerError::Connect { .. }));
    assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
}

#[test]
fn a_silent_scheduler_costs_its_deadline_and_no_more() {
    let (_folder, path, script) = scheduler(|listening| {
        let mut shim = Peer::accept(listening);
        shim.hear();
        shim.hear()
    });
    let begun = Instant::now();
    let mut connection = Connection::open(&path, PATIENCE).unwrap();
    let error = connection.register(register()).unwrap_err();
    assert!(matches!(error, SchedulerError::Silent { .. }), "{error}");
    assert!(begun.elapsed() >= PATIENCE && begun.elapsed() < PATIENCE * 3);
    assert!(
        error.to_string().contains("0.7 s") && error.to_string().contains(path.to_str().unwrap()),
        "{error}"
    );
    drop(connection);
    assert_eq!(script.join().unwrap(), None);
}

#[test]
fn a_refusal_carries_the_schedulers_reason() {
    let (_folder, path, script) = scheduler(|listening| {
        let mut shim = Peer::accept(listening);
        shim.hear();
        shim.say(&SchedulerToShim::Refused {
            reason: Reason::MemoryExhausted,
            detail: "3Gi of 80Gi free".into(),
        });
    });
    let error = Connection::open(&path, PATIENCE).unwrap().register(register()).unwrap_err().to_string();
    assert!(
        error.contains("3Gi of 80Gi free") && error.contains(&Reason::MemoryExhausted.to_string()),
        "{error}"
    );
    script.join().unwrap();
}

#[test]
fn a_scheduler_that_dies_in_the_middle_and_one_that_babbles_are_errors() {
    let (_folder, path, script) = scheduler(|listening| {
        let mut shim = Peer::accept(listening);
        shim.hear();
        drop(shim);
        let mut shim = Peer::accept(listening);
        shim.hear();
        shim.socket.send(b"hello", &[], Instant::now() + PATIENCE).unwrap();
        let mut shim = Peer::accept(listening);
        shim.hear();
        shim.say(&SchedulerToShim::Acknowledged);
    });
    let register_once = || Connection::open(&path, PATIENCE).unwrap().register(register()).unwrap_err();
    assert!(matches!(register_once(), SchedulerError::Closed { .. }));
    assert!(matches!(register_once(), SchedulerError::Frame { .. }));
    assert!(matches!(register_once(), SchedulerError::Unexpected { .. }));
    script.join().unwrap();
}
