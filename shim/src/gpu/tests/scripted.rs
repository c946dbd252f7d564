//! A scheduler that keeps to the protocol, but for what a test asks otherwise.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use gpuslice_proto::{Lease, LeaseId, MAX_FRAME, Reason, Receiver, SchedulerToShim, Sender, ShimToScheduler};
use gpuslice_sys::Socket;

pub(super) const UID: u32 = 1_900_000_123;

/// What it does otherwise.
#[derive(Clone, Copy, Default)]
pub(super) struct Manner {
    pub(super) refuse: bool,
    pub(super) silent: bool,
    pub(super) dies_after_lease: bool,
}

#[derive(Default)]
struct Seen {
    announced: Vec<u64>,
    adopted: Vec<u64>,
    sandboxes: u32,
    open: u32,
    stopping: bool,
    order: Option<String>,
}

pub(super) struct Scripted {
    seen: Arc<Mutex<Seen>>,
    main: Option<JoinHandle<()>>,
}

impl Scripted {
    pub(super) fn start(path: &Path, set: impl FnOnce(&mut Manner)) -> Scripted {
        let mut manner = Manner::default();
        set(&mut manner);
        let listening = Socket::listen(path).unwrap();
        let seen = Arc::new(Mutex::new(Seen::default()));
        let shared = Arc::clone(&seen);
        let main = std::thread::spawn(move || {
            let mut peers = Vec::new();
            while !shared.lock().unwrap().stopping {
                if let Ok(socket) = listening.accept(Instant::now() + Duration::from_millis(20)) {
                    let shared = Arc::clone(&shared);
                    peers.push(std::thread::spawn(move || peer(&socket, &shared, manner)));
                }
            }
            drop(listening);
            peers.into_iter().for_each(|peer| peer.join().unwrap());
        });
        Scripted { seen, main: Some(main) }
    }

    pub(super) fn announced(&self) -> Vec<u64> {
        self.seen.lock().unwrap().announced.clone()
    }

    pub(super) fn adopted(&self) -> Vec<u64> {
        self.seen.lock().unwrap().adopted.clone()
    }

    pub(super) fn sandboxes(&self) -> u32 {
        self.seen.lock().unwrap().sandboxes
    }

    pub(super) fn order_stop(&self, detail: &str) {
        self.seen.lock().unwrap().order = Some(detail.to_owned());
    }

    /// Every connection was closed by its peer, within a second.
    pub(super) fn all_closed(&self) -> bool {
        let deadline = Instant::now() + Duration::from_secs(1);
        while self.seen.lock().unwrap().open > 0 {
            if Instant::now() > deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        true
    }

    pub(super) fn stop(self) {}
}

impl Drop for Scripted {
    fn drop(&mut self) {
        self.seen.lock().unwrap().stopping = true;
        self.main.take().unwrap().join().unwrap();
    }
}

fn peer(socket: &Socket, seen: &Mutex<Seen>, manner: Manner) {
    seen.lock().unwrap().open += 1;
    let mut sender: Sender<SchedulerToShim> = Sender::default();
    let mut receiver: Receiver<ShimToScheduler> = Receiver::default();
    let mut say = |message: SchedulerToShim| {
        let frame = sender.encode(&message).unwrap();
        socket.send(&frame, &[], Instant::now() + Duration::from_secs(1)).is_ok()
    };
    let mut announced = false;
    loop {
        {
            let mut seen = seen.lock().unwrap();
            if seen.stopping {
                break;
            }
            if announced && let Some(detail) = seen.order.take() {
                say(SchedulerToShim::Stop { detail });
            }
        }
        let mut buffer = [0; MAX_FRAME];
        let (length, files) = match socket.recv(&mut buffer, 1, Instant::now() + Duration::from_millis(20)) {
            Ok((0, _)) => break,
            Ok(received) => received,
            Err(error) if error.kind() == std::io::ErrorKind::TimedOut => continue,
            Err(_) => break,
        };
        if manner.silent {
            continue;
        }
        let goes_on = match receiver.decode(&buffer[..length], files.len()).unwrap() {
            ShimToScheduler::Register(_) if manner.refuse => {
                say(SchedulerToShim::Refused { reason: Reason::MemoryExhausted, detail: "no more".into() });
                false
            }
            ShimToScheduler::Register(register) => {
                if let Some(lease) = register.adopt {
                    seen.lock().unwrap().adopted.push(lease.uid.into());
                }
                let lease = register.adopt.unwrap_or(Lease { lease: LeaseId(7), uid: UID, sandbox_pid: 0 });
                say(SchedulerToShim::Granted(lease)) && !manner.dies_after_lease
            }
            ShimToScheduler::SandboxStarted { pid } => {
                seen.lock().unwrap().announced.push(pid.into());
                announced = true;
                say(SchedulerToShim::Acknowledged)
            }
            ShimToScheduler::OpenSandbox { .. } => {
                seen.lock().unwrap().sandboxes += 1;
                say(SchedulerToShim::Acknowledged)
            }
        };
        if !goes_on {
            break;
        }
    }
    seen.lock().unwrap().open -= 1;
}
