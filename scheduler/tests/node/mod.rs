//! A scheduler on a socket of its own, and peers that say exactly what a test tells them.
#![allow(dead_code, reason = "each test file uses a part of it")]

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use gpuslice_config::Config;
use gpuslice_proto::*;
use gpuslice_scheduler::{Backend, BackendError, Card, Holding, RunError, run_with};
use gpuslice_sys::Socket;

pub const DRIVER: &str = "580.159.04";
pub const CARD: u64 = 8 << 30;
pub const GIB: u64 = 1 << 30;
pub const PATIENCE: Duration = Duration::from_secs(10);

/// What the fake driver says and does.
#[derive(Default)]
pub struct Figures {
    /// By minor number and pid.
    pub held: BTreeMap<(u32, u32), u64>,
    pub fails: bool,
    pub hangs: bool,
}

#[derive(Clone, Default)]
pub struct Fake(pub Arc<Mutex<Figures>>);

impl Fake {
    pub fn hold(&self, minor: u32, pid: u32, bytes: u64) {
        self.0.lock().unwrap().held.insert((minor, pid), bytes);
    }
    pub fn release(&self, pid: u32) {
        self.0.lock().unwrap().held.retain(|(_, holder), _| *holder != pid);
    }
}

impl Backend for Fake {
    fn driver(&self) -> &str {
        DRIVER
    }
    fn cards(&self) -> Vec<Card> {
        (0..2).map(|minor| Card { uuid: uuid(minor), minor, memory: CARD }).collect()
    }
    fn audit(&mut self, minor: u32, sandboxes: &[u32]) -> Result<BTreeMap<u32, Holding>, BackendError> {
        while self.0.lock().unwrap().hangs {
            std::thread::sleep(Duration::from_millis(10));
        }
        let figures = self.0.lock().unwrap();
        if figures.fails {
            return Err(BackendError::Status { what: "audit", status: 0x40 });
        }
        let of_card =
            figures.held.iter().filter(|((card, pid), _)| *card == minor && sandboxes.contains(pid));
        Ok(of_card.map(|((_, pid), bytes)| (*pid, Holding { bytes: *bytes, listed: true })).collect())
    }
}

pub fn uuid(minor: u32) -> GpuUuid {
    GpuUuid::try_from(format!("GPU-0000000{minor}-0000-0000-0000-000000000000")).unwrap()
}

pub fn register(name: &str, hard: u64, soft: u64) -> Register {
    Register {
        container: ContainerId::try_from(format!("ns/{name}")).unwrap(),
        pod: None,
        gpus: vec![GpuSlice { uuid: uuid(0), minor: 0, memory_hard: hard, memory_soft: soft, weight: 100 }],
        driver: DRIVER.into(),
        adopt: None,
    }
}

/// Each test has uids of its own: they run at the same time, and quarantines look at the whole node.
pub fn config(directory: &Path, uid_first: u32) -> Config {
    let text = format!(
        "run_dir = \"{}\"\n[scheduler]\ndeadline = 1\naudit_interval = 1\n[sandboxes]\nuid_first = {uid_first}\nuid_count = 16\n",
        directory.display()
    );
    gpuslice_config::parse(&text).unwrap()
}

pub struct Scheduler {
    pub directory: tempfile::TempDir,
    pub config: Config,
    pub fake: Fake,
    running: Option<(OwnedFd, JoinHandle<Result<(), RunError>>)>,
}

impl Scheduler {
    pub fn start(uid_first: u32) -> Scheduler {
        let directory = tempfile::tempdir().unwrap();
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o700)).unwrap();
        let config = config(directory.path(), uid_first);
        let mut scheduler = Scheduler { directory, config, fake: Fake::default(), running: None };
        scheduler.again();
        scheduler
    }

    /// Starts it (again).
    pub fn again(&mut self) {
        let (stop, stopper) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC).unwrap();
        let (config, fake) = (self.config.clone(), self.fake.clone());
        let thread = std::thread::spawn(move || run_with(&config, Box::new(fake), &stop));
        self.running = Some((stopper, thread));
        let deadline = Instant::now() + PATIENCE;
        while Socket::connect(&self.socket(), deadline).is_err() {
            assert!(Instant::now() < deadline, "no scheduler");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn stop(&mut self) -> Result<(), RunError> {
        let (stopper, thread) = self.running.take().unwrap();
        drop(stopper);
        thread.join().unwrap()
    }

    pub fn socket(&self) -> PathBuf {
        self.config.scheduler_socket()
    }

    pub fn shim(&self) -> Shim {
        Shim::dial(&self.socket())
    }

    /// A container that runs: registered, announced, with a session of its sandbox.
    pub fn tenant(&self, name: &str, soft: u64) -> Tenant {
        Tenant::start(&self.socket(), register(name, 4 * GIB, soft))
    }

    pub fn status(&self) -> (Vec<StatusGpu>, Vec<StatusTenant>) {
        let socket = Socket::connect(&self.socket(), Instant::now() + PATIENCE).unwrap();
        let frame = Sender::default().encode(&ToolToScheduler::Status).unwrap();
        socket.send(&frame, &[], Instant::now() + PATIENCE).unwrap();
        let (mut receiver, mut gpus, mut tenants) = (Receiver::default(), Vec::new(), Vec::new());
        loop {
            match receive(&socket, &mut receiver).expect("rows until the end") {
                SchedulerToTool::Gpu(gpu) => gpus.push(gpu),
                SchedulerToTool::Tenant(tenant) => tenants.push(tenant),
                SchedulerToTool::End { driver, .. } => {
                    assert_eq!(driver, DRIVER);
                    return (gpus, tenants);
                }
            }
        }
    }

    pub fn until(&self, what: &str, done: impl Fn(&[StatusGpu], &[StatusTenant]) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let (gpus, tenants) = self.status();
            if done(&gpus, &tenants) {
                return;
            }
            assert!(Instant::now() < deadline, "{what}: {gpus:?} {tenants:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        self.fake.0.lock().unwrap().hangs = false;
        if let Some((stopper, thread)) = self.running.take() {
            drop(stopper);
            thread.join().ok();
        }
    }
}

/// One message, or `None` when the other side closed.
pub fn receive<M: Carries>(socket: &Socket, receiver: &mut Receiver<M>) -> Option<M> {
    let mut buffer = [0; MAX_FRAME];
    match socket.recv(&mut buffer, 0, Instant::now() + PATIENCE) {
        Ok((0, _)) => None,
        Ok((length, _)) => Some(receiver.decode(&buffer[..length], 0).unwrap()),
        Err(error) => panic!("nothing came: {error}"),
    }
}

pub struct Shim {
    pub socket: Socket,
    pub sender: Sender<ShimToScheduler>,
    pub receiver: Receiver<SchedulerToShim>,
}

impl Shim {
    pub fn dial(path: &Path) -> Shim {
        let socket = Socket::connect(path, Instant::now() + PATIENCE).unwrap();
        Shim { socket, sender: Sender::default(), receiver: Receiver::default() }
    }

    /// A message that the scheduler may not take any more: whether it did shows in the answer.
    pub fn send(&mut self, message: &ShimToScheduler, files: &[BorrowedFd<'_>]) {
        let frame = self.sender.encode(message).unwrap();
        self.socket.send(&frame, files, Instant::now() + PATIENCE).ok();
    }

    pub fn answer(&mut self) -> Option<SchedulerToShim> {
        receive(&self.socket, &mut self.receiver)
    }

    pub fn ask(&mut self, message: &ShimToScheduler, files: &[BorrowedFd<'_>]) -> Option<SchedulerToShim> {
        self.send(message, files);
        self.answer()
    }

    pub fn granted(&mut self, register: Register) -> Lease {
        match self.ask(&ShimToScheduler::Register(register), &[]) {
            Some(SchedulerToShim::Granted(lease)) => lease,
            other => panic!("{other:?}"),
        }
    }

    pub fn refused(&mut self, message: &ShimToScheduler) -> (Reason, String) {
        match self.ask(message, &[]) {
            Some(SchedulerToShim::Refused { reason, detail }) => {
                assert_eq!(self.answer(), None, "closed after a refusal");
                (reason, detail)
            }
            other => panic!("{other:?}"),
        }
    }
}

/// A process in a sandbox's place.
pub struct Process(pub Child);

impl Process {
    pub fn start(uid: u32) -> Process {
        Process(Command::new("/bin/sleep").arg("600").uid(uid).gid(uid).spawn().unwrap())
    }
    pub fn pid(&self) -> u32 {
        self.0.id()
    }
    pub fn pidfd(&self) -> OwnedFd {
        gpuslice_sys::process::pidfd_open(self.pid(), false).unwrap()
    }
    pub fn end(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.end();
    }
}

/// A sandbox's session.
pub struct Session {
    pub socket: Socket,
    pub sender: Sender<SandboxToScheduler>,
    pub receiver: Receiver<SchedulerToSandbox>,
}

impl Session {
    pub fn open(path: &Path, lease: LeaseId) -> Session {
        let mut shim = Shim::dial(path);
        assert_eq!(
            shim.ask(&ShimToScheduler::OpenSandbox { lease }, &[]),
            Some(SchedulerToShim::Acknowledged)
        );
        Session { socket: shim.socket, sender: Sender::default(), receiver: Receiver::default() }
    }

    pub fn report(&mut self, ping: u32, used: u64) {
        let gpus = vec![GpuUsage { minor: 0, used, peak: used, denied: 0 }];
        let message = SandboxToScheduler::Usage { ping, gpus, refused: 0 };
        let frame = self.sender.encode(&message).unwrap();
        self.socket.send(&frame, &[], Instant::now() + PATIENCE).ok();
    }

    pub fn ping(&mut self) -> Option<u32> {
        receive(&self.socket, &mut self.receiver).map(|SchedulerToSandbox::Ping { ping }| ping)
    }

    /// Answers pings with this figure until the session closes or `enough` pings came.
    pub fn serve(&mut self, used: u64, enough: usize) {
        for _ in 0..enough {
            let Some(ping) = self.ping() else { return };
            self.report(ping, used);
        }
    }
}

pub struct Tenant {
    pub shim: Shim,
    pub session: Session,
    pub process: Process,
    pub lease: Lease,
}

impl Tenant {
    pub fn start(path: &Path, register: Register) -> Tenant {
        let mut shim = Shim::dial(path);
        let lease = shim.granted(register);
        let process = Process::start(lease.uid);
        announce(&mut shim, &process);
        let session = Session::open(path, lease.lease);
        let lease = Lease { sandbox_pid: process.pid(), ..lease };
        Tenant { shim, session, process, lease }
    }

    /// The shim dials again after a restart of the scheduler.
    pub fn come_back(&mut self, path: &Path, register: Register) {
        self.shim = Shim::dial(path);
        let lease = self.shim.granted(Register { adopt: Some(self.lease), ..register });
        assert_eq!(lease, self.lease);
        announce(&mut self.shim, &self.process);
        self.session = Session::open(path, lease.lease);
    }
}

pub fn announce(shim: &mut Shim, process: &Process) {
    let pidfd = process.pidfd();
    let message = ShimToScheduler::SandboxStarted { pid: process.pid() };
    assert_eq!(shim.ask(&message, &[pidfd.as_fd()]), Some(SchedulerToShim::Acknowledged));
}
