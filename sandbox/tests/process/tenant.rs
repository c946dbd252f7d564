//! Tenant programs. Each puts itself under the filter, sends its listener, and says what it found.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::CommandExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gpuslice_sys::{Arg, Instruction, SharedMapping, Socket, bpf, ioctl, jail, memory, process};

use crate::driver::{ALLOC, ALLOC_MEMORY, CONTROL, FREE, SYS_PARAMS};

pub fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

struct Tenant {
    shim: Socket,
    control: File,
    gpu: File,
    uvm: File,
}

/// Runs under the filter: NOTIFY for ioctl commands of type 'F' and for 0x1234, and shared file mappings.
fn trap() -> Vec<Instruction> {
    let step = |code, jt, jf, k| Instruction { code, jt, jf, k };
    let load = |offset| step(0x20, 0, 0, offset);
    vec![
        load(0),
        step(0x15, 0, 4, 16),
        load(24),
        step(0x15, 7, 0, 0x1234),
        step(0x54, 0, 0, 0xff00),
        step(0x15, 5, 4, 0x4600),
        step(0x15, 0, 3, 9),
        load(40),
        step(0x54, 0, 0, 0x21),
        step(0x15, 1, 0, 1),
        step(0x06, 0, 0, 0x7fff_0000),
        step(0x06, 0, 0, 0x7fc0_0000),
    ]
}

fn say(shim: &Socket, text: &str) {
    shim.send(text.as_bytes(), &[], soon()).unwrap();
}

/// Waits for a word of the test.
fn word(shim: &Socket) -> String {
    let mut buf = [0; 64];
    let (length, _) = shim.recv(&mut buf, 0, soon()).unwrap();
    String::from_utf8(buf[..length].to_vec()).unwrap()
}

pub fn run(name: &str) {
    if name == "executed" {
        return executed();
    }
    let shim = Socket::from_fd(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    let mut buf = [0; 8];
    let (_, files) = shim.recv(&mut buf, 3, soon()).unwrap();
    let mut files = files.into_iter().map(File::from);
    let (control, gpu, uvm) = (files.next().unwrap(), files.next().unwrap(), files.next().unwrap());
    jail::no_new_privileges().unwrap();
    // The thread that makes the calls is the only one then; others inherit the filter.
    let listener = bpf::install_with_listener(&trap(), false).unwrap();
    shim.send(b"listener", &[listener.as_fd()], soon()).unwrap();
    drop(listener);
    assert_eq!(word(&shim), "go");
    let tenant = Tenant { shim, control, gpu, uvm };
    match name {
        "latency" => tenant.latency(),
        "storm" => tenant.storm(),
        "files" => tenant.files(),
        "pinned" => tenant.pinned(),
        "populated" => tenant.populated(),
        "threads" => tenant.threads(),
        "idle" => tenant.idle(),
        "exec" => tenant.exec(),
        "tables" => tenant.tables(),
        "long" => tenant.long(),
        "stuck" => {
            say(&tenant.shim, "stuck");
            counted(&tenant.control, 65_000);
        }
        other => panic!("no tenant {other}"),
    }
}

/// One counted call that takes `micros` in the driver; its count.
fn counted(file: &File, micros: u64) -> u64 {
    let mut arg = Arg::flat((micros << 48).to_ne_bytes().to_vec());
    ioctl(file.as_fd(), SYS_PARAMS, &mut arg).unwrap();
    u64::from_ne_bytes(arg.bytes.try_into().unwrap())
}

/// How long `call` takes, as a line.
fn times(mut call: impl FnMut()) -> String {
    const CALLS: usize = 20_000;
    let mut times: Vec<u128> = (0..CALLS + 1000)
        .map(|_| {
            let began = Instant::now();
            call();
            began.elapsed().as_nanos()
        })
        .skip(1000)
        .collect();
    times.sort_unstable();
    let micros = |index: usize| times[index] as f64 / 1000.0;
    format!(
        "p50 {:.1} us, p90 {:.1} us, p99 {:.1} us, lowest {:.1} us",
        micros(CALLS / 2),
        micros(CALLS * 9 / 10),
        micros(CALLS * 99 / 100),
        micros(0)
    )
}

/// What `Tenant::exec` executes: under the same filter, with the control node as standard output.
fn executed() {
    let shim = Socket::from_fd(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    let control = File::from(std::io::stdout().as_fd().try_clone_to_owned().unwrap());
    say(&shim, &format!("executed {}", counted(&control, 0)));
    word(&shim);
}

impl Tenant {
    fn exec(self) {
        assert_eq!(counted(&self.control, 0), 1);
        let program = std::env::current_exe().unwrap();
        let failed =
            std::process::Command::new(program).args(["tenant", "executed"]).stdout(self.control).exec();
        panic!("{failed}");
    }

    /// A thread with a file table of its own, in which the same number is another file.
    fn tables(&self) {
        let mut copy = std::os::fd::OwnedFd::from(self.control.try_clone().unwrap());
        let number = copy.as_raw_fd();
        let other = std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                nix::sched::unshare(nix::sched::CloneFlags::CLONE_FILES).unwrap();
                let null = File::open("/dev/null").unwrap();
                nix::unistd::dup2(&null, &mut copy).unwrap();
                assert_eq!(copy.as_raw_fd(), number);
                let result = ioctl(copy.as_fd(), SYS_PARAMS, &mut Arg::flat(vec![0; 8]));
                result.map_err(|failed| failed.raw_os_error())
            });
            thread.join().unwrap()
        });
        let own = counted(&File::from(copy), 0);
        say(&self.shim, &format!("{other:?} {own}"));
        word(&self.shim);
    }

    /// One thread's call takes long in the driver; how long another's take meanwhile.
    fn long(&self) {
        counted(&self.control, 0);
        let slowest = std::thread::scope(|scope| {
            let long = scope.spawn(|| counted(&self.control, 60_000));
            std::thread::sleep(Duration::from_millis(10));
            let mut slowest = Duration::ZERO;
            let mut made = 0;
            while !long.is_finished() {
                let began = Instant::now();
                counted(&self.control, 0);
                slowest = slowest.max(began.elapsed());
                made += 1;
            }
            assert!(made > 3, "{made} calls beside the long one");
            slowest
        });
        say(&self.shim, &format!("{} us", slowest.as_micros()));
        word(&self.shim);
    }

    fn latency(&self) {
        let plain = times(|| {
            counted(&self.control, 0);
        });
        say(&self.shim, &plain);
        // Unserved, only the round trip can be measured.
        if word(&self.shim) == "end" {
            return;
        }
        let client = self.alloc(0, 0, 0, 0x41, Vec::new());
        let control: Vec<u8> =
            [client, client, 0x214, 0, 0, 0, 384, 0].into_iter().flat_map(u32::to_ne_bytes).collect();
        let mut arg = Arg::flat(control.clone());
        arg.link(None, 16, vec![0xff; 384]);
        let control = times(|| {
            ioctl(self.control.as_fd(), CONTROL, &mut arg).unwrap();
        });
        assert_eq!(arg.bytes[28..], [0; 4], "status");
        say(&self.shim, &control);
        word(&self.shim);
    }

    /// Makes and frees clients under a storm of signals: their numbers must be consecutive, and each must live
    /// until it is freed.
    fn storm(&self) {
        process::catch(23).unwrap();
        say(&self.shim, &format!("storm {}", std::process::id()));
        let began = Instant::now();
        let first = self.alloc(0, 0, 0, 0x41, Vec::new());
        let mut made = 0;
        while began.elapsed() < Duration::from_secs(3) {
            made += 1;
            let client = self.alloc(0, 0, 0, 0x41, Vec::new());
            assert_eq!(client, first + made, "an allocation was performed twice");
            let mut arg = Arg::flat([client, 0, client, 0].into_iter().flat_map(u32::to_ne_bytes).collect());
            ioctl(self.control.as_fd(), FREE, &mut arg).unwrap();
            assert_eq!(arg.bytes[12..], [0; 4], "a free was performed twice");
        }
        say(&self.shim, &format!("made {}", 2 * made));
        word(&self.shim);
    }

    /// Allocates an object and returns its number.
    fn alloc(&self, parent: u32, handle: u32, client: u32, class: u32, params: Vec<u8>) -> u32 {
        let mut bytes = Vec::new();
        for word in [client, parent, handle, class, 0, 0, 0, 0, 0, 0, 0, 0] {
            bytes.extend(u32::to_ne_bytes(word));
        }
        let mut arg = Arg::flat(bytes);
        if !params.is_empty() {
            arg.link(None, 16, params);
        }
        ioctl(self.control.as_fd(), ALLOC, &mut arg).unwrap();
        let word = |at: usize| u32::from_ne_bytes(arg.bytes[at..at + 4].try_into().unwrap());
        assert_eq!(word(40), 0, "status of allocating class {class:#x}");
        word(8)
    }

    fn files(&self) {
        let errno = |result: std::io::Result<i32>| result.unwrap_err().raw_os_error().unwrap();
        let null = File::open("/dev/null").unwrap();
        let params = || Arg::flat(vec![0; 8]);
        // The driver's number on somebody else's file; a number that no device acts on; no file.
        let foreign = errno(ioctl(null.as_fd(), SYS_PARAMS, &mut params()));
        let other = errno(ioctl(null.as_fd(), 0x4600, &mut params()));
        let mapped = SharedMapping::new(
            File::options().read(true).write(true).open("/dev/zero").unwrap().as_fd(),
            0,
            4096,
            true,
        )
        .is_ok();
        let shared = gpuslice_sys::memory::memfd("x", 4096).unwrap();
        let mapped = mapped && SharedMapping::new(shared.as_fd(), 0, 4096, true).is_ok();
        let uvm = SharedMapping::new(self.uvm.as_fd(), 0, 4096, true)
            .map(drop)
            .map_err(|failed| failed.raw_os_error());
        let mut bad = Arg::default();
        let fault = errno(ioctl(self.control.as_fd(), SYS_PARAMS, &mut bad));
        say(&self.shim, &format!("{foreign} {other} {mapped} {uvm:?} {fault} {}", counted(&self.control, 0)));
        word(&self.shim);
    }

    fn threads(&self) {
        let mut counts: Vec<u64> = std::thread::scope(|scope| {
            let calls = || (0..500).map(|_| counted(&self.control, 0)).collect::<Vec<u64>>();
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(calls)).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        counts.sort_unstable();
        let first = counts[0];
        assert!(
            counts.iter().zip(first..).all(|(found, expected)| *found == expected),
            "a count twice or missing"
        );
        assert_eq!(counts.len(), 4000);
        say(&self.shim, "4000 calls of 8 threads");
        word(&self.shim);
    }

    /// The status of a registration.
    fn pin(&self, client: u32, device: u32, handle: u32, address: u64, length: u64) -> u32 {
        let mut bytes = Vec::new();
        for word in [client, device, handle, 0x71, 0, 0] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.extend(address.to_ne_bytes());
        bytes.extend((length - 1).to_ne_bytes());
        bytes.extend([0; 8]);
        bytes.extend((-1i32).to_ne_bytes());
        bytes.extend([0; 4]);
        let mut arg = Arg::flat(bytes);
        ioctl(self.gpu.as_fd(), ALLOC_MEMORY, &mut arg).unwrap();
        assert_eq!(arg.bytes[24..32], address.to_ne_bytes(), "the tenant's own address");
        u32::from_ne_bytes(arg.bytes[40..44].try_into().unwrap())
    }

    /// Registers shared memory that nobody touched: once, again, and from several threads beside a move.
    fn populated(&self) {
        const LENGTH: usize = 16 << 20;
        static PAGES: [AtomicU64; 512 * 18] = [const { AtomicU64::new(0) }; 512 * 18];
        let client = self.alloc(0, 0, 0, 0x41, Vec::new());
        let device = self.alloc(client, 0x100, client, 0x80, vec![0; 56]);
        let untouched = || {
            let file = memory::memfd("untouched", LENGTH as u64).unwrap();
            SharedMapping::new(file.as_fd(), 0, LENGTH, true).unwrap()
        };
        let shared = || {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let line = status.lines().find_map(|line| line.strip_prefix("RssShmem:")).unwrap();
            line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 1024
        };
        let mapping = untouched();
        let pin = |handle, mapping: &SharedMapping| {
            assert_eq!(self.pin(client, device, handle, mapping.address(), LENGTH as u64), 0);
        };
        let began = Instant::now();
        pin(0x300, &mapping);
        let first = began.elapsed();
        let again = Instant::now();
        pin(0x301, &mapping);
        let (again, made) = (again.elapsed(), shared());
        let others = [untouched(), untouched(), untouched()];
        std::thread::scope(|scope| {
            for (index, other) in others.iter().enumerate() {
                let pin = &pin;
                scope.spawn(move || pin(0x310 + u32::try_from(index).unwrap(), other));
            }
            let address = (PAGES.as_ptr() as u64).next_multiple_of(4096);
            assert_eq!(self.pin(client, device, 0x320, address, 16 * 4096), 0);
            assert_eq!(self.pin(client, device, 0x321, address, 16 * 4096), 0);
        });
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let moved = maps.lines().filter(|line| line.contains("gpuslice-pinned")).count();
        let all = shared();
        say(
            &self.shim,
            &format!(
                "{made} MiB of pages, then {all} MiB and {moved} moved; first {first:?}, again {again:?}"
            ),
        );
        word(&self.shim);
    }

    fn pinned(&self) {
        static PAGES: [AtomicU64; 512 * 18] = [const { AtomicU64::new(0) }; 512 * 18];
        let client = self.alloc(0, 0, 0, 0x41, Vec::new());
        let device = self.alloc(client, 0x100, client, 0x80, vec![0; 56]);
        let first = PAGES.as_ptr() as u64;
        let address = first.next_multiple_of(4096) + 4096 + 16;
        let stop = std::sync::atomic::AtomicBool::new(false);
        let status = std::thread::scope(|scope| {
            let index = |at: u64| usize::try_from((at - first) / 8).unwrap();
            let (mine, yours) = (index(address), index(address) + 600);
            PAGES[mine].store(4711, Ordering::Relaxed);
            let running = || !stop.load(Ordering::Relaxed);
            let writer = scope.spawn(move || {
                let mut count = 0u64;
                while running() {
                    PAGES[yours].fetch_add(1, Ordering::Relaxed);
                    count += 1;
                }
                (count, PAGES[yours].load(Ordering::Relaxed))
            });
            let pin = |handle: u32| self.pin(client, device, handle, address, 16 * 4096);
            let began = Instant::now();
            let status = pin(0x200);
            let took = began.elapsed();
            let again = Instant::now();
            assert_eq!(pin(0x201), status);
            stop.store(true, Ordering::Relaxed);
            let (counted, found) = writer.join().unwrap();
            assert_eq!((PAGES[mine].load(Ordering::Relaxed), counted), (4711, found));
            format!("status {status}, first {took:?}, again {:?}", again.elapsed())
        });
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let shared = maps.lines().filter(|line| line.contains("gpuslice-pinned")).count();
        let open = std::fs::read_dir("/proc/self/fd").unwrap().filter(|entry| {
            let path = entry.as_ref().unwrap().path();
            std::fs::read_link(path).is_ok_and(|file| file.display().to_string().contains("gpuslice-pinned"))
        });
        say(&self.shim, &format!("{status}; {shared} mapping, {} files", open.count()));
        word(&self.shim);
    }

    fn idle(&self) {
        counted(&self.control, 0);
        say(&self.shim, &format!("idle {}", self.control.as_raw_fd()));
        word(&self.shim);
    }
}
