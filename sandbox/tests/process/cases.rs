//! The tests.

use std::os::fd::AsFd;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use gpuslice_proto::{
    Receiver, SandboxToScheduler, SandboxToShim, SchedulerToSandbox, Sender, ShimToSandbox,
};
use gpuslice_sys::{Answer, Listener, Socket, process};

use crate::shim::{Shim, start};
use crate::tenant::soon;

const ALL: &[(&str, fn())] = &[
    ("the_process_is_confined_when_it_says_ready", confined),
    ("a_call_takes_microseconds", latency),
    ("a_storm_of_signals_makes_no_call_happen_twice", storm),
    ("files_and_numbers_that_are_not_the_drivers_are_told_apart", files),
    ("pinned_memory_moves_once_and_stays_coherent", pinned),
    ("shared_memory_is_populated_where_it_is_not_and_only_then", populated),
    ("eight_threads_are_served_at_once", threads),
    ("an_exec_is_served_until_it_hangs_up", exec),
    ("a_long_call_holds_up_nobody_else", long),
    ("a_thread_with_files_of_its_own_is_served_by_its_own_table", tables),
    ("a_program_that_was_executed_is_served_on_its_new_memory", executed),
    ("a_tenant_killed_in_mid_call_leaves_the_others_served", killed),
    ("it_serves_without_a_scheduler_and_takes_a_new_one", scheduler),
    ("it_ends_with_the_shims_socket", end),
    ("a_message_out_of_order_ends_it", out_of_order),
];

pub fn run(arguments: &[String]) -> ExitCode {
    let wanted = arguments.iter().find(|argument| !argument.starts_with("--"));
    let chosen = |name: &str| wanted.is_none_or(|wanted| name.contains(wanted.as_str()));
    if arguments.iter().any(|argument| argument == "--list") {
        ALL.iter().for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    let mut failed: Vec<&str> = Vec::new();
    for (name, test) in ALL.iter().filter(|(name, _)| chosen(name)) {
        let result = std::panic::catch_unwind(*test);
        println!("test {name} ... {}", if result.is_ok() { "ok" } else { "FAILED" });
        failed.extend(result.is_err().then_some(*name));
    }
    println!("test result: {} failed", failed.len());
    ExitCode::from(u8::from(!failed.is_empty()))
}

fn ready() -> Shim {
    start(&std::env::current_exe().unwrap())
}

fn status_of(pid: u32, field: &str) -> String {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_once(':').unwrap().1.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn confined() {
    let shim = ready();
    for thread in std::fs::read_dir(format!("/proc/{}/task", shim.pid)).unwrap() {
        let tid: u32 = thread.unwrap().file_name().to_str().unwrap().parse().unwrap();
        let field = |name| status_of(tid, name);
        assert_eq!(field("Uid"), "61007 61007 61007 61007");
        assert_eq!(field("CapEff"), format!("{:016x}", 1 << 19));
        assert_eq!(field("CapPrm"), field("CapEff"));
        assert_eq!(field("CapBnd"), "0000000000000000");
        assert_eq!((field("NoNewPrivs").as_str(), field("Seccomp").as_str()), ("1", "2"));
    }
    let root = std::fs::read_dir(format!("/proc/{}/root/", shim.pid)).unwrap().count();
    assert_eq!(root, 0, "its root directory is empty");
    println!(
        "    sandbox: {} threads, {} KiB resident, {} KiB of that anonymous",
        status_of(shim.pid, "Threads"),
        shim.resident("VmRSS"),
        shim.resident("RssAnon")
    );
}

/// What the kernel alone takes: a listener that answers at once.
fn bare(shim: &Shim) -> String {
    let (tenant, listener) = shim.unserved_tenant("latency");
    let listener = Listener::new(listener).unwrap();
    listener.sync_wake_up().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while let Ok(call) = listener.recv() {
                if listener.answer(call.id, Answer::Return(0)).is_err() {
                    return;
                }
            }
        });
        tenant.tell("go");
        let report = tenant.hear();
        tenant.tell("end");
        report
    })
}

fn latency() {
    let shim = ready();
    println!("    bare round trip: {}", bare(&shim));
    let tenant = shim.tenant("latency", 0);
    println!("    first listener: {}", tenant.hear());
    tenant.tell("more");
    println!("    a control of 384 bytes: {}", tenant.hear());
    let exec = shim.tenant("latency", 1);
    println!("    exec's listener: {}", exec.hear());
    exec.tell("end");
    tenant.tell("end");
}

fn storm() {
    let shim = ready();
    let tenant = shim.tenant("storm", 0);
    assert!(tenant.hear().starts_with("storm "));
    let pidfd = process::pidfd_open(tenant.child.id(), false).unwrap();
    let began = Instant::now();
    let mut sent = 0;
    while began.elapsed() < Duration::from_secs(3) {
        process::pidfd_kill(pidfd.as_fd(), 23).unwrap();
        sent += 1;
        std::thread::sleep(Duration::from_millis(1));
    }
    println!("    {sent} signals; {} calls", tenant.hear());
    assert!(sent > 1000);
    tenant.tell("end");
}

fn files() {
    let shim = ready();
    let tenant = shim.tenant("files", 0);
    // ENOTTY twice (from the sandbox, from the kernel), mappings work, EFAULT, and the driver saw one call.
    assert_eq!(tenant.hear(), "25 25 true Ok(()) 14 1");
    tenant.tell("end");
}

fn pinned() {
    let shim = ready();
    let tenant = shim.tenant("pinned", 0);
    let report = tenant.hear();
    println!("    {report}");
    assert!(report.starts_with("status 0,") && report.ends_with("; 1 mapping, 0 files"), "{report}");
    tenant.tell("end");
}

fn populated() {
    let shim = ready();
    let tenant = shim.tenant("populated", 0);
    let report = tenant.hear();
    println!("    {report}");
    assert!(report.starts_with("16 MiB of pages, then 64 MiB and 1 moved;"), "{report}");
    // One for each thread's range; none for one that is registered again or was moved.
    assert_eq!(shim.container.populations.load(std::sync::atomic::Ordering::Relaxed), 4);
    tenant.tell("end");
}

fn threads() {
    let shim = ready();
    let tenant = shim.tenant("threads", 0);
    println!("    {}", tenant.hear());
    println!("    sandbox: {} KiB resident afterwards", shim.resident("VmRSS"));
    tenant.tell("end");
}

fn exec() {
    let shim = ready();
    let first = shim.tenant("idle", 0);
    first.hear();
    let second = shim.tenant("idle", 1);
    second.hear();
    let third = shim.tenant("threads", 2);
    drop(second);
    assert_eq!(shim.container.hear(), SandboxToShim::ListenerClosed { serial: 1 });
    third.hear();
    third.tell("end");
    assert_eq!(shim.container.hear(), SandboxToShim::ListenerClosed { serial: 2 });
    drop(first);
    assert_eq!(shim.container.hear(), SandboxToShim::ListenerClosed { serial: 0 });
}

fn long() {
    let shim = ready();
    let tenant = shim.tenant("long", 0);
    let slowest = tenant.hear();
    println!("    slowest call beside one of 60 ms: {slowest}");
    let micros: u64 = slowest.split(' ').next().unwrap().parse().unwrap();
    assert!(micros < 40_000, "{slowest}");
    tenant.tell("end");
}

fn tables() {
    let shim = ready();
    let tenant = shim.tenant("tables", 0);
    assert_eq!(tenant.hear(), "Err(Some(25)) 1");
    tenant.tell("end");
}

fn executed() {
    let shim = ready();
    let tenant = shim.tenant("exec", 0);
    assert_eq!(tenant.hear(), "executed 2");
    tenant.tell("end");
}

fn killed() {
    let shim = ready();
    let neighbour = shim.tenant("idle", 0);
    neighbour.hear();
    for serial in 1..=3 {
        let tenant = shim.tenant("stuck", serial);
        tenant.hear();
        std::thread::sleep(Duration::from_millis(20));
        drop(tenant);
        assert_eq!(shim.container.hear(), SandboxToShim::ListenerClosed { serial });
    }
    let last = shim.tenant("idle", 4);
    last.hear();
    last.tell("end");
}

fn scheduler() {
    let shim = ready();
    let tenant = shim.tenant("idle", 0);
    tenant.hear();
    for ping in 1..=2 {
        let (ours, theirs) = Socket::pair().unwrap();
        shim.container.send(&ShimToSandbox::Scheduler, &[theirs.as_fd()]);
        drop(theirs);
        let mut sender = Sender::<SchedulerToSandbox>::default();
        let mut receiver = Receiver::<SandboxToScheduler>::default();
        let mut buf = [0; 4096];
        let mut report = |socket: &Socket| {
            let (length, _) = socket.recv(&mut buf, 0, soon()).unwrap();
            receiver.decode(&buf[..length], 0).unwrap()
        };
        let SandboxToScheduler::Usage { ping: unasked, gpus, .. } = report(&ours);
        assert_eq!((unasked, gpus.len(), gpus[0].used), (0, 1, 0));
        ours.send(&sender.encode(&SchedulerToSandbox::Ping { ping }).unwrap(), &[], soon()).unwrap();
        let SandboxToScheduler::Usage { ping: answered, .. } = report(&ours);
        assert_eq!(answered, ping);
        // The scheduler dies here.
        drop(ours);
        let exec = shim.tenant("idle", ping);
        exec.hear();
        exec.tell("end");
        assert_eq!(shim.container.hear(), SandboxToShim::ListenerClosed { serial: ping });
    }
    tenant.tell("end");
}

fn end() {
    let shim = ready();
    let (pid, pidfd) = (shim.pid, shim.pidfd.try_clone().unwrap());
    // The listening thread holds the socket too: end it by shutting the socket down.
    shim.container.shut_down();
    assert!(gpuslice_sys::wait::readable(pidfd.as_fd(), Some(soon())).unwrap());
    let status = nix::sys::wait::waitpid(nix::unistd::Pid::from_raw(pid.cast_signed()), None).unwrap();
    assert!(matches!(status, nix::sys::wait::WaitStatus::Exited(_, 0)), "{status:?}");
}

fn out_of_order() {
    let shim = ready();
    let first = shim.tenant("idle", 0);
    first.hear();
    let (a, _b) = Socket::pair().unwrap();
    shim.container.send(&ShimToSandbox::Listener { serial: 0 }, &[a.as_fd()]);
    assert!(gpuslice_sys::wait::readable(shim.pidfd.as_fd(), Some(soon())).unwrap());
    let status = nix::sys::wait::waitpid(nix::unistd::Pid::from_raw(shim.pid.cast_signed()), None).unwrap();
    assert!(matches!(status, nix::sys::wait::WaitStatus::Exited(_, 1)), "{status:?}");
}
