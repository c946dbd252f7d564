//! Death and return of the scheduler, adoption, audits, a driver that hangs.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

#[allow(unreachable_pub, reason = "a module of a test")]
mod node;

use std::time::{Duration, Instant};

use gpuslice_proto::*;
use node::*;

fn stopped(shim: &mut Shim, text: &str) {
    match shim.answer() {
        Some(SchedulerToShim::Stop { detail }) => assert!(detail.contains(text), "{detail}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_second_scheduler_on_the_same_socket_is_refused() {
    let scheduler = Scheduler::start(1_810_000_000);
    let (stop, _stopper) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC).unwrap();
    let error =
        gpuslice_scheduler::run_with(&scheduler.config, Box::new(Fake::default()), &stop).unwrap_err();
    assert!(error.to_string().contains("another gpuslice-scheduler"), "{error}");
    scheduler.shim().granted(register("a", GIB, GIB));
}

#[test]
fn a_clean_stop_removes_the_socket_and_lets_tenants_run() {
    let mut scheduler = Scheduler::start(1_810_000_100);
    let mut tenant = scheduler.tenant("a", GIB);
    let mut silent = scheduler.shim();
    // The connection is taken up before the stop comes.
    scheduler.status();
    scheduler.stop().unwrap();
    assert!(!scheduler.socket().exists());
    assert_eq!(tenant.shim.answer(), None);
    match silent.answer() {
        Some(SchedulerToShim::Refused { reason: Reason::Stopping, .. }) => {}
        other => panic!("{other:?}"),
    }
    assert!(tenant.process.0.try_wait().unwrap().is_none());
}

#[test]
fn a_range_of_somebody_elses_uids_is_refused_at_start() {
    let directory = tempfile::tempdir().unwrap();
    let (stop, _stopper) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC).unwrap();
    let config = config(directory.path(), 65_530);
    let error = gpuslice_scheduler::run_with(&config, Box::new(Fake::default()), &stop).unwrap_err();
    assert!(error.to_string().contains("65530 to 65545 overlap 65534 (+1) of \"nobody\""), "{error}");
}

#[test]
fn after_a_restart_a_tenant_with_an_equal_ledger_is_adopted() {
    let mut scheduler = Scheduler::start(1_810_000_200);
    let mut tenant = scheduler.tenant("a", GIB);
    scheduler.fake.hold(0, tenant.process.pid(), 300 << 20);
    scheduler.stop().unwrap();
    scheduler.again();
    tenant.come_back(&scheduler.socket(), register("a", 4 * GIB, GIB));
    tenant.session.serve(300 << 20, 6);
    let (gpus, tenants) = scheduler.status();
    assert_eq!((gpus[0].guaranteed, tenants[0].lease), (GIB, tenant.lease));
    assert_eq!((tenants[0].usage[0].used, tenants[0].audited[0]), (300 << 20, 300 << 20));
    // No order to stop came.
    let mut buffer = [0; MAX_FRAME];
    assert!(tenant.shim.socket.recv(&mut buffer, 0, Instant::now()).is_err());
}

#[test]
fn after_a_restart_a_tenant_whose_ledger_hides_memory_is_stopped() {
    let mut scheduler = Scheduler::start(1_810_000_300);
    let mut tenant = scheduler.tenant("a", GIB);
    scheduler.fake.hold(0, tenant.process.pid(), 300 << 20);
    scheduler.stop().unwrap();
    scheduler.again();
    tenant.come_back(&scheduler.socket(), register("a", 4 * GIB, GIB));
    tenant.session.serve(100 << 20, 6);
    stopped(&mut tenant.shim, "does not equal");
}

#[test]
fn new_containers_wait_until_those_of_before_are_back() {
    let mut scheduler = Scheduler::start(1_810_000_400);
    let full = || register("a", CARD, CARD);
    let mut tenant = Tenant::start(&scheduler.socket(), full());
    scheduler.stop().unwrap();
    scheduler.again();
    let mut early = scheduler.shim();
    early.send(&ShimToScheduler::Register(register("b", GIB, GIB)), &[]);
    std::thread::sleep(Duration::from_millis(200));
    tenant.come_back(
        &scheduler.socket(),
        Register { gpus: register("a", CARD, CARD).gpus, ..register("a", 1, 1) },
    );
    match early.answer() {
        Some(SchedulerToShim::Refused { reason: Reason::MemoryExhausted, .. }) => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn uids_of_sandboxes_that_nobody_adopts_are_not_given_out() {
    let mut scheduler = Scheduler::start(1_810_000_500);
    let tenant = scheduler.tenant("a", GIB);
    scheduler.stop().unwrap();
    drop(tenant.shim);
    scheduler.again();
    let begun = Instant::now();
    let uids: Vec<u32> = (0..15)
        .map(|n| {
            let mut shim = scheduler.shim();
            let lease = shim.granted(register(&format!("n{n}"), 1, 1));
            std::mem::forget(shim);
            lease.uid
        })
        .collect();
    assert!(begun.elapsed() >= Duration::from_millis(500), "held until the time to come back is over");
    assert!(!uids.contains(&tenant.lease.uid));
    let last = scheduler.shim().refused(&ShimToScheduler::Register(register("z", 1, 1)));
    assert_eq!(last.0, Reason::UidsExhausted);
}

#[test]
fn a_tenant_over_its_limit_by_the_drivers_figure_is_stopped() {
    let scheduler = Scheduler::start(1_810_000_600);
    let mut tenant = scheduler.tenant("a", GIB);
    scheduler.fake.hold(0, tenant.process.pid(), 4 * GIB + (17 << 20));
    stopped(&mut tenant.shim, "by the driver's figure");
}

#[test]
fn a_driver_that_fails_or_hangs_closes_the_card_to_new_containers_only() {
    let scheduler = Scheduler::start(1_810_000_700);
    let tenant = scheduler.tenant("a", GIB);
    let refusal = |text: &str, patience: u64| {
        let deadline = Instant::now() + Duration::from_secs(patience);
        for n in 0.. {
            let mut shim = scheduler.shim();
            match shim.ask(&ShimToScheduler::Register(register(&format!("b{n}"), 1, 1)), &[]) {
                Some(SchedulerToShim::Refused { reason: Reason::GpuUnhealthy, detail }) => {
                    assert!(detail.contains(text), "{detail}");
                    return;
                }
                Some(SchedulerToShim::Granted(_)) => assert!(Instant::now() < deadline, "still healthy"),
                other => panic!("{other:?}"),
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    };
    let Tenant { shim, mut session, process, .. } = tenant;
    let keep_up = std::thread::spawn(move || session.serve(0, usize::MAX));
    scheduler.fake.0.lock().unwrap().fails = true;
    refusal("status 0x40", 10);
    scheduler.fake.0.lock().unwrap().fails = false;
    scheduler.until("healthy again", |_, _| {
        let answer = scheduler.shim().ask(&ShimToScheduler::Register(register("c", 1, 1)), &[]);
        matches!(answer, Some(SchedulerToShim::Granted(_)))
    });
    scheduler.fake.0.lock().unwrap().hangs = true;
    refusal("unanswered", 15);
    scheduler.fake.0.lock().unwrap().hangs = false;
    let mut buffer = [0; MAX_FRAME];
    assert!(shim.socket.recv(&mut buffer, 0, Instant::now()).is_err(), "the tenant was left alone");
    drop((shim, process, scheduler));
    keep_up.join().unwrap();
}
