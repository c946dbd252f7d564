//! The shim's side of a sandbox: starts it, serves its requests, hands it listeners.

use std::collections::VecDeque;
use std::ffi::CString;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use gpuslice_proto::{
    ContainerId, GpuSettings, GpuUuid, MAX_FRAME, PrivilegedRequest, PrivilegedResult, Receiver,
    SandboxSettings, SandboxToShim, Sender, ShimToSandbox,
};
use gpuslice_sys::inject::{Move, MoveError, Populate, move_range, populate};
use gpuslice_sys::{Socket, Spawn, memory, process, spawn};

use crate::tenant::soon;

/// A sandbox that is ready.
pub struct Shim {
    pub pid: u32,
    pub pidfd: OwnedFd,
    pub container: Arc<Link>,
    folder: PathBuf,
    pub nodes: Vec<File>,
}

/// The socket and what has come over it.
pub struct Link {
    socket: Socket,
    sender: Mutex<Sender<ShimToSandbox>>,
    heard: Mutex<VecDeque<SandboxToShim>>,
    more: Condvar,
    pub log: Mutex<Vec<String>>,
    /// Populations asked for.
    pub populations: AtomicU32,
}

pub struct Tenant {
    pub child: Child,
    pub socket: Socket,
}

impl Drop for Tenant {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _status = self.child.wait();
    }
}

impl Drop for Shim {
    fn drop(&mut self) {
        let _gone = process::pidfd_kill(self.pidfd.as_fd(), 9);
        let pid = nix::unistd::Pid::from_raw(self.pid.cast_signed());
        let _status = nix::sys::wait::waitpid(pid, None);
        let _removed = std::fs::remove_dir_all(&self.folder);
    }
}

impl Link {
    pub fn send(&self, message: &ShimToSandbox, files: &[BorrowedFd<'_>]) {
        let mut sender = self.sender.lock().unwrap();
        let frame = sender.encode(message).unwrap();
        self.socket.send(&frame, files, soon()).unwrap();
    }

    /// Waits for a message that isn't a request.
    pub fn hear(&self) -> SandboxToShim {
        let mut heard = self.heard.lock().unwrap();
        loop {
            if let Some(message) = heard.pop_front() {
                return message;
            }
            let (next, late) = self.more.wait_timeout(heard, Duration::from_secs(30)).unwrap();
            assert!(!late.timed_out(), "the sandbox says nothing; its log: {:?}", self.log.lock().unwrap());
            heard = next;
        }
    }

    /// Ends the connection for both sides.
    pub fn shut_down(&self) {
        nix::sys::socket::shutdown(self.socket.as_fd().as_raw_fd(), nix::sys::socket::Shutdown::Both)
            .unwrap();
    }

    fn serve(self: &Arc<Self>) {
        let mut receiver = Receiver::<SandboxToShim>::default();
        let mut buf = [0; MAX_FRAME];
        let forever = Instant::now() + Duration::from_secs(3600);
        while let Ok((length @ 1.., files)) = self.socket.recv(&mut buf, 4, forever) {
            match receiver.decode(&buf[..length], files.len()).unwrap() {
                SandboxToShim::Request { request, ask } => {
                    let link = Arc::clone(self);
                    std::thread::spawn(move || link.obey(request, ask, files));
                }
                message => {
                    self.heard.lock().unwrap().push_back(message);
                    self.more.notify_all();
                }
            }
        }
    }

    fn answer(&self, request: u32, result: PrivilegedResult, files: &[BorrowedFd<'_>]) {
        self.send(&ShimToSandbox::Result { request, result }, files);
    }

    fn done(&self, request: u32, result: &Result<(), MoveError>, done: PrivilegedResult) {
        let result = match result {
            Ok(()) => done,
            Err(failed) => {
                let detail = format!("{failed:?}");
                self.log.lock().unwrap().push(format!("shim: {detail}"));
                PrivilegedResult::Failed { errno: failed.cause().raw_os_error().unwrap_or(5), detail }
            }
        };
        self.answer(request, result, &[]);
    }

    fn obey(&self, request: u32, ask: PrivilegedRequest, files: Vec<OwnedFd>) {
        match ask {
            PrivilegedRequest::Thread { tid } => {
                let Ok(pidfd) = process::pidfd_open(tid, true) else {
                    let result = PrivilegedResult::Failed { errno: 3, detail: "it has ended".to_owned() };
                    return self.answer(request, result, &[]);
                };
                let memory = File::options().read(true).write(true).open(format!("/proc/{tid}/mem")).unwrap();
                let status = std::fs::read_to_string(format!("/proc/{tid}/status")).unwrap();
                let tgid = status.lines().find_map(|line| line.strip_prefix("Tgid:")).unwrap();
                let tgid = tgid.trim().parse().unwrap();
                let result = PrivilegedResult::Thread { tgid, thread: true };
                self.answer(request, result, &[pidfd.as_fd(), memory.as_fd()]);
            }
            PrivilegedRequest::SharedRange { tid, range } => {
                let maps = std::fs::read_to_string(format!("/proc/{tid}/maps")).unwrap();
                let found = maps.lines().find_map(|line| {
                    let (name, rest) = line.split_once(' ').unwrap();
                    let (start, end) = name.split_once('-').unwrap();
                    let start = u64::from_str_radix(start, 16).unwrap();
                    let end = u64::from_str_radix(end, 16).unwrap();
                    let shared = rest.as_bytes()[3] == b's';
                    let covers = start <= range.start && range.start + range.length <= end;
                    (shared && covers).then(|| (start, name.to_owned()))
                });
                match found {
                    None => self.answer(request, PrivilegedResult::Private, &[]),
                    Some((start, name)) => {
                        let path = format!("/proc/{tid}/map_files/{name}");
                        let file = File::options().read(true).write(true).open(path).unwrap();
                        let offset = range.start - start;
                        let pagemap = File::open(format!("/proc/{tid}/pagemap")).unwrap();
                        let mut entries = vec![0; usize::try_from(range.length).unwrap() / 512];
                        pagemap.read_exact_at(&mut entries, range.start / 512).unwrap();
                        let absent = entries.chunks(8).any(|entry| entry[7] & 0x80 == 0);
                        self.answer(request, PrivilegedResult::Shared { offset, absent }, &[file.as_fd()]);
                    }
                }
            }
            PrivilegedRequest::MoveRange { tid, range, tenant_file } => {
                let deadline = Instant::now() + Duration::from_secs(10);
                let range = (range.start, range.length);
                let wanted = Move { tid, range, memfd: files[0].as_fd(), tenant_file, deadline };
                let interrupted = || {
                    self.answer(request, PrivilegedResult::Stopping, &[]);
                    Ok(())
                };
                let done = |result: &_| self.done(request, result, PrivilegedResult::Moved);
                let _told = move_range(&wanted, interrupted, done);
            }
            PrivilegedRequest::PopulateRange { tid, range } => {
                let deadline = Instant::now() + Duration::from_secs(10);
                let wanted = Populate { tid, range: (range.start, range.length), deadline };
                let interrupted = || {
                    self.answer(request, PrivilegedResult::Stopping, &[]);
                    Ok(())
                };
                self.populations.fetch_add(1, Ordering::Relaxed);
                let done = |result: &_| self.done(request, result, PrivilegedResult::Populated);
                let _told = populate(&wanted, interrupted, done);
            }
            PrivilegedRequest::UvmRanges => {
                let result = PrivilegedResult::UvmRanges { ranges: Vec::new(), total: 0 };
                self.answer(request, result, &[]);
            }
        }
    }
}

/// Starts a sandbox of `program` and waits until it is ready.
pub fn start(program: &std::path::Path) -> Shim {
    static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let folder = std::env::temp_dir().join(format!("gpuslice-process-{}-{number}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    let node = |name: &str| {
        let file = File::options().read(true).write(true).create_new(true).open(folder.join(name)).unwrap();
        file.write_all_at(&[0; 8192], 0).unwrap();
        file
    };
    let nodes = vec![node("control"), node("gpu"), node("uvm")];
    let (ours, theirs) = Socket::pair().unwrap();
    let (log, log_writer) = std::io::pipe().unwrap();
    let null = File::options().read(true).write(true).open("/dev/null").unwrap();
    let argv = ["gpuslice-sandbox", "61007", "test/one"];
    let wanted = Spawn {
        executable: memory::sealed_copy(program).unwrap(),
        argv: argv.iter().map(|text| CString::new(*text).unwrap()).collect(),
        files: vec![null.into(), log_writer.try_clone().unwrap().into(), log_writer.into(), theirs.into_fd()],
        cgroup_procs: Vec::new(),
        oom_score_adj: None,
    };
    let (pid, pidfd) = spawn(wanted).unwrap();
    let container = Arc::new(Link {
        socket: ours,
        sender: Mutex::default(),
        heard: Mutex::default(),
        more: Condvar::new(),
        log: Mutex::default(),
        populations: AtomicU32::new(0),
    });
    let link = Arc::clone(&container);
    std::thread::spawn(move || {
        for line in BufReader::new(log).lines().map_while(Result::ok) {
            eprintln!("    {line}");
            link.log.lock().unwrap().push(line);
        }
    });
    let link = Arc::clone(&container);
    std::thread::spawn(move || link.serve());
    let settings = SandboxSettings {
        container: ContainerId::try_from("test/one".to_owned()).unwrap(),
        gpus: vec![GpuSettings {
            uuid: GpuUuid::try_from("GPU-00000000-0000-0000-0000-000000000001".to_owned()).unwrap(),
            minor: 0,
            memory_hard: 1 << 30,
        }],
        driver: "580.159.04".to_owned(),
        uvm_major: 500,
        killable: false,
    };
    let files = [nodes[0].as_fd(), nodes[2].as_fd(), nodes[1].as_fd()];
    container.send(&ShimToSandbox::Start(settings), &files);
    assert_eq!(container.hear(), SandboxToShim::Ready);
    Shim { pid, pidfd, container, folder, nodes }
}

impl Shim {
    /// Starts a tenant and has the sandbox serve its listener.
    pub fn tenant(&self, name: &str, serial: u32) -> Tenant {
        let (tenant, listener) = self.unserved_tenant(name);
        self.container.send(&ShimToSandbox::Listener { serial }, &[listener.as_fd()]);
        drop(listener);
        assert_eq!(self.container.hear(), SandboxToShim::Serving { serial });
        tenant.tell("go");
        tenant
    }

    /// Starts a tenant, to be told "go" when its listener is served.
    pub fn unserved_tenant(&self, name: &str) -> (Tenant, OwnedFd) {
        let (ours, theirs) = Socket::pair().unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["tenant", name])
            .stdin(Stdio::from(theirs.into_fd()))
            .spawn()
            .unwrap();
        let files: Vec<_> = self.nodes.iter().map(AsFd::as_fd).collect();
        ours.send(b"files", &files, soon()).unwrap();
        let mut buf = [0; 16];
        let (_, mut files) = ours.recv(&mut buf, 1, soon()).unwrap();
        (Tenant { child, socket: ours }, files.pop().unwrap())
    }

    /// Resident memory in KiB.
    pub fn resident(&self, field: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid)).unwrap();
        let line = status.lines().find(|line| line.starts_with(field)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }
}

impl Tenant {
    pub fn tell(&self, word: &str) {
        self.socket.send(word.as_bytes(), &[], soon()).unwrap();
    }

    pub fn hear(&self) -> String {
        let mut buf = [0; 256];
        let (length, _) = self.socket.recv(&mut buf, 0, soon()).unwrap();
        assert_ne!(length, 0, "the tenant died");
        String::from_utf8(buf[..length].to_vec()).unwrap()
    }
}
