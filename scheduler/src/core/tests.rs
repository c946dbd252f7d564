use super::audit::LEDGER_TOLERANCE;
use super::*;
use crate::backend::Holding;
use proptest::prelude::*;

const CARD: u64 = 100 << 20;
const DRIVER: &str = "580.159.04";

fn uuid(minor: u32) -> GpuUuid {
    GpuUuid::try_from(format!("GPU-0000000{minor}-0000-0000-0000-000000000000")).unwrap()
}

fn slice(minor: u32, hard: u64, soft: u64) -> GpuSlice {
    GpuSlice { uuid: uuid(minor), minor, memory_hard: hard, memory_soft: soft, weight: 100 }
}

fn ask(name: &str, gpus: Vec<GpuSlice>) -> Register {
    let container = ContainerId::try_from(name.to_owned()).unwrap();
    Register { container, pod: None, gpus, driver: DRIVER.into(), adopt: None }
}

fn core(uids: u32) -> Core {
    let cards = (0..2).map(|minor| Card { uuid: uuid(minor), minor, memory: CARD }).collect();
    Core::new(DRIVER.into(), cards, UidRange { first: 5000, count: uids }, 1)
}

fn reason(result: Result<Lease, Refusal>) -> (Reason, String) {
    let refusal = result.unwrap_err();
    (refusal.reason, refusal.detail)
}

fn usage(minor: u32, used: u64) -> GpuUsage {
    GpuUsage { minor, used, peak: used, denied: 0 }
}

fn figures(pid: u32, bytes: u64) -> BTreeMap<u32, BTreeMap<u32, Holding>> {
    let held = if bytes == 0 { BTreeMap::new() } else { [(pid, Holding { bytes, listed: true })].into() };
    [(0, held), (1, BTreeMap::new())].into()
}

#[test]
fn a_registration_gets_a_lease_with_a_uid_of_its_own() {
    let mut core = core(4);
    let first = core.register(&ask("ns/a", vec![slice(0, 50 << 20, 10)])).unwrap();
    let second = core.register(&ask("ns/b", vec![slice(1, 50 << 20, 10)])).unwrap();
    assert_ne!((first.lease, first.uid), (second.lease, second.uid));
    assert_ne!(first.lease, second.lease);
    assert_ne!(first.uid, second.uid);
}

#[test]
fn each_refusal_says_what_was_found_and_what_is_allowed() {
    let mut core = core(1);
    let good = slice(0, 50 << 20, 50 << 20);
    core.register(&ask("ns/a", vec![good.clone()])).unwrap();
    let cases = [
        (ask("ns/a", vec![good.clone()]), Reason::Duplicate, "ns/a"),
        (ask("ns/b", vec![good.clone()]), Reason::UidsExhausted, "uid_count"),
        (ask("ns/b", vec![slice(0, 60 << 20, 60 << 20)]), Reason::MemoryExhausted, "50 MiB left"),
        (ask("ns/b", vec![]), Reason::BadLimit, "1 to 16"),
        (ask("ns/b", vec![good.clone(); 2]), Reason::BadLimit, "named twice"),
        (ask("ns/b", vec![slice(0, 0, 0)]), Reason::BadLimit, "memory-hard is 0"),
        (ask("ns/b", vec![slice(0, CARD + 1, 0)]), Reason::BadLimit, "100 MiB"),
        (ask("ns/b", vec![slice(0, 1, 2)]), Reason::BadLimit, "memory-soft is 2"),
        (ask("ns/b", vec![GpuSlice { weight: 0, ..good.clone() }]), Reason::BadLimit, "weight is 0"),
        (ask("ns/b", vec![GpuSlice { weight: 10_001, ..good.clone() }]), Reason::BadLimit, "weight is 10001"),
        (ask("ns/b", vec![slice(7, 1, 1)]), Reason::UnknownGpu, "nvidia7"),
        (ask("ns/b", vec![GpuSlice { minor: 1, ..good.clone() }]), Reason::UnknownGpu, "nvidia1"),
        (Register { driver: "580.1".into(), ..ask("ns/b", vec![good]) }, Reason::DriverChanged, "580.1,"),
    ];
    for (register, expected, text) in cases {
        let (found, detail) = reason(core.register(&register));
        assert_eq!(found, expected, "{detail}");
        assert!(detail.contains(text), "{detail}");
    }
}

#[test]
fn an_unhealthy_card_takes_nobody_new_and_keeps_those_it_has() {
    let mut core = core(4);
    assert!(core.set_health(0, Some("stuck".into())));
    let (found, detail) = reason(core.register(&ask("ns/a", vec![slice(0, 10, 10)])));
    assert_eq!((found, detail.contains("stuck")), (Reason::GpuUnhealthy, true));
    core.register(&ask("ns/a", vec![slice(1, 10, 10)])).unwrap();
    let old = Lease { lease: LeaseId(7), uid: 5003, sandbox_pid: 9 };
    core.register(&Register { adopt: Some(old), ..ask("ns/c", vec![slice(0, 10, 10)]) }).unwrap();
    assert!(core.set_health(0, None));
    core.register(&ask("ns/b", vec![slice(0, 10, 10)])).unwrap();
}

#[test]
fn a_uid_waits_for_the_driver_and_for_the_end_of_the_sandbox() {
    let mut core = core(1);
    let lease = core.register(&ask("ns/a", vec![slice(0, 10, 10)])).unwrap();
    core.started(lease.lease, 42).unwrap();
    core.closed(lease.lease, false);
    assert!(core.leaving());
    // The driver shows nothing, but the process is there.
    assert!(core.audited(&[42], &figures(42, 0)).is_empty());
    core.sandbox_ended(lease.lease);
    // The process is gone, but the driver shows its client, or memory; or was not asked.
    let listed = [(0, [(42, Holding { bytes: 0, listed: true })].into())].into();
    for (asked, figures) in [(42, listed), (42, figures(42, 5)), (43, figures(42, 0)), (42, BTreeMap::new())]
    {
        assert!(core.audited(&[asked], &figures).is_empty());
        assert_eq!(reason(core.register(&ask("ns/b", vec![slice(0, 10, 10)]))).0, Reason::UidsExhausted);
    }
    assert_eq!(core.audited(&[42], &figures(42, 0)), [Verdict::Freed { lease: lease.lease }]);
    core.register(&ask("ns/b", vec![slice(0, 10, 10)])).unwrap();
}

#[test]
fn a_guarantee_ends_with_the_sandbox_and_not_before() {
    let mut core = core(4);
    let lease = core.register(&ask("ns/a", vec![slice(0, CARD, CARD)])).unwrap().lease;
    core.started(lease, 42).unwrap();
    core.closed(lease, false);
    assert_eq!(reason(core.register(&ask("ns/b", vec![slice(0, 10, 10)]))).0, Reason::MemoryExhausted);
    core.sandbox_ended(lease);
    core.register(&ask("ns/b", vec![slice(0, CARD, CARD)])).unwrap();
}

#[test]
fn memory_that_outlives_its_sandbox_is_not_promised_again() {
    let mut core = core(4);
    let lease = core.register(&ask("ns/a", vec![slice(0, CARD, CARD)])).unwrap().lease;
    core.started(lease, 42).unwrap();
    core.closed(lease, true);
    let register = |core: &mut Core, soft| core.register(&ask("ns/b", vec![slice(0, CARD, soft)]));
    let outlived = figures(42, 60 << 20);
    // An audit that began before the end shows nothing new.
    assert!(core.audited(&[42], &outlived).is_empty());
    assert_eq!(core.status().0[0].guaranteed, 0);
    assert!(core.audited(&[42], &outlived).is_empty());
    assert!(core.audited(&[42], &BTreeMap::new()).is_empty());
    assert_eq!(core.status().0[0].guaranteed, 60 << 20);
    assert_eq!(reason(register(&mut core, 41 << 20)).0, Reason::MemoryExhausted);
    let noted: Vec<_> = (0..20).flat_map(|_| core.audited(&[42], &outlived)).collect();
    assert!(matches!(&noted[..], [Verdict::Note { detail }] if detail.contains("ns/a")), "{noted:?}");
    assert_eq!(core.audited(&[42], &figures(42, 0)), [Verdict::Freed { lease }]);
    register(&mut core, CARD).unwrap();
}

#[test]
fn a_uid_of_a_sandbox_never_announced_waits_until_no_process_has_it() {
    let mut core = core(1);
    let lease = core.register(&ask("ns/a", vec![slice(0, 10, 10)])).unwrap();
    core.closed(lease.lease, true);
    assert_eq!(core.quarantined(), [lease.uid]);
    assert_eq!(reason(core.register(&ask("ns/b", vec![slice(0, 10, 10)]))).0, Reason::UidsExhausted);
    core.end_quarantine(lease.uid);
    core.register(&ask("ns/b", vec![slice(0, 10, 10)])).unwrap();
}

#[test]
fn an_announcement_may_be_repeated_but_not_changed() {
    let mut core = core(4);
    let lease = core.register(&ask("ns/a", vec![slice(0, 10, 10)])).unwrap().lease;
    assert!(core.started(lease, 0).is_err());
    core.started(lease, 42).unwrap();
    core.started(lease, 42).unwrap();
    assert_eq!(core.started(lease, 43).unwrap_err().reason, Reason::OutOfOrder);
    assert_eq!(core.started(LeaseId(99), 42).unwrap_err().reason, Reason::NoLease);
    core.closed(lease, false);
    assert_eq!(core.started(lease, 42).unwrap_err().reason, Reason::NoLease);
}

#[test]
fn an_adopted_lease_keeps_its_number_and_uid_even_on_a_full_card() {
    let mut core = core(4);
    core.quarantine(5002);
    core.register(&ask("ns/a", vec![slice(0, CARD, CARD)])).unwrap();
    let old = Lease { lease: LeaseId(1000), uid: 5002, sandbox_pid: 9 };
    let adopt = |name: &str, lease| Register { adopt: Some(lease), ..ask(name, vec![slice(0, CARD, CARD)]) };
    assert_eq!(core.register(&adopt("ns/b", old)).unwrap(), old);
    assert!(core.quarantined().is_empty());
    // New numbers stay above it; nobody else can have its uid or number.
    assert_eq!(core.register(&ask("ns/c", vec![slice(1, 10, 10)])).unwrap().lease, LeaseId(1001));
    for (lease, expected) in [
        (Lease { lease: LeaseId(1000), ..old }, Reason::Duplicate),
        (Lease { lease: LeaseId(5), ..old }, Reason::Duplicate),
        (Lease { lease: LeaseId(5), uid: 4999, ..old }, Reason::NoLease),
    ] {
        assert_eq!(reason(core.register(&adopt("ns/d", lease))).0, expected);
    }
}

#[test]
fn a_shim_that_lost_its_connection_takes_its_own_lease_up_again() {
    let mut core = core(1);
    let lease = core.register(&ask("ns/a", vec![slice(0, 10, 10)])).unwrap();
    core.started(lease.lease, 42).unwrap();
    core.closed(lease.lease, false);
    let lease = Lease { sandbox_pid: 42, ..lease };
    assert_eq!(
        reason(core.register(&Register { adopt: Some(lease), ..ask("ns/x", vec![slice(0, 10, 10)]) })).0,
        Reason::Duplicate
    );
    let again = Register { adopt: Some(lease), ..ask("ns/a", vec![slice(0, 10, 10)]) };
    assert_eq!(core.register(&again).unwrap(), lease);
    assert!(!core.leaving());
}

#[test]
fn a_tenant_over_its_limit_by_the_drivers_figure_is_stopped() {
    let mut core = core(4);
    let lease = core.register(&ask("ns/a", vec![slice(0, 10 << 20, 0)])).unwrap().lease;
    core.started(lease, 42).unwrap();
    assert!(core.audited(&[42], &figures(42, (10 << 20) + LEDGER_TOLERANCE)).is_empty());
    let verdicts = core.audited(&[42], &figures(42, (10 << 20) + LEDGER_TOLERANCE + 1));
    assert!(matches!(verdicts.as_slice(), [Verdict::Stop { lease: found, .. }] if *found == lease));
}

#[test]
fn memory_on_a_card_that_was_not_granted_stops_the_tenant() {
    let mut core = core(4);
    let lease = core.register(&ask("ns/a", vec![slice(1, CARD, 0)])).unwrap().lease;
    core.started(lease, 42).unwrap();
    let verdicts = core.audited(&[42], &figures(42, LEDGER_TOLERANCE + 1));
    assert!(matches!(verdicts.as_slice(), [Verdict::Stop { .. }]));
}

fn adopted() -> (Core, LeaseId) {
    let mut core = core(4);
    let old = Lease { lease: LeaseId(1000), uid: 5002, sandbox_pid: 42 };
    core.register(&Register { adopt: Some(old), ..ask("ns/a", vec![slice(0, CARD, 0)]) }).unwrap();
    (core, old.lease)
}

#[test]
fn an_adopted_ledger_that_equals_the_drivers_figure_is_proven_once() {
    let (mut core, lease) = adopted();
    assert!(core.audited(&[42], &figures(42, 30 << 20)).is_empty());
    assert!(core.usage(lease, vec![usage(0, 30 << 20)], 0, false).unwrap().is_empty(), "not an answer");
    let verdicts = core.usage(lease, vec![usage(0, 30 << 20)], 0, true).unwrap();
    assert!(matches!(verdicts.as_slice(), [Verdict::Note { .. }]));
    assert!(
        core.usage(lease, vec![usage(0, 30 << 20)], 0, true).unwrap().is_empty(),
        "one figure, one comparison"
    );
}

#[test]
fn an_adopted_ledger_below_the_drivers_figure_stops_the_tenant_at_the_third_time() {
    let (mut core, lease) = adopted();
    for round in 1..=3 {
        assert!(core.audited(&[42], &figures(42, 60 << 20)).is_empty());
        let verdicts = core.usage(lease, vec![usage(0, 30 << 20)], 0, true).unwrap();
        match verdicts.as_slice() {
            [] => assert!(round < 3),
            [Verdict::Stop { detail, .. }] => assert!(round == 3 && detail.contains("does not equal")),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_tenant_that_freed_between_the_two_readings_is_not_wrong() {
    let (mut core, lease) = adopted();
    core.usage(lease, vec![usage(0, 60 << 20)], 0, false).unwrap();
    assert!(core.audited(&[42], &figures(42, 60 << 20)).is_empty());
    let verdicts = core.usage(lease, vec![usage(0, 0)], 0, true).unwrap();
    assert!(matches!(verdicts.as_slice(), [Verdict::Note { .. }]), "{verdicts:?}");
}

#[test]
fn a_report_must_name_the_granted_gpus_and_no_other() {
    let (mut core, lease) = adopted();
    for gpus in [vec![], vec![usage(1, 0)], vec![usage(0, 0), usage(1, 0)], vec![usage(0, 0); 2]] {
        assert_eq!(core.usage(lease, gpus, 0, false).unwrap_err().reason, Reason::OutOfOrder);
    }
    core.usage(lease, vec![usage(0, 5)], 3, false).unwrap();
    let (gpus, tenants) = core.status();
    assert_eq!((gpus[0].used, gpus[0].tenants, tenants[0].refused), (5, 1, 3));
}

#[derive(Clone, Debug)]
enum Step {
    Register { name: u8, minor: u32, soft: u64 },
    Adopt { name: u8, lease: u64, uid: u32, soft: u64 },
    Started { which: usize },
    Closed { which: usize, ended: bool },
    Ended { which: usize },
    Audit { holding: bool },
    EndQuarantine,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let soft = 0u64..60;
    let step = prop_oneof![
        4 => (0u8..6, 0u32..2, soft.clone()).prop_map(|(name, minor, soft)| Step::Register { name, minor, soft: soft << 20 }),
        1 => (0u8..6, 0u64..20, 4998u32..5006, soft).prop_map(|(name, lease, uid, soft)| Step::Adopt { name, lease, uid, soft: soft << 20 }),
        3 => (0usize..6).prop_map(|which| Step::Started { which }),
        2 => (0usize..6, any::<bool>()).prop_map(|(which, ended)| Step::Closed { which, ended }),
        1 => (0usize..6).prop_map(|which| Step::Ended { which }),
        2 => any::<bool>().prop_map(|holding| Step::Audit { holding }),
        1 => Just(Step::EndQuarantine),
    ];
    proptest::collection::vec(step, 1..60)
}

/// The naive model: a list of tenants, searched from end to end.
#[derive(Clone, Debug)]
struct Naive {
    name: u8,
    lease: LeaseId,
    uid: u32,
    pid: u32,
    minor: u32,
    soft: u64,
    active: bool,
    ended: bool,
    adopted: bool,
    lingered: u32,
}

impl Naive {
    /// What it takes of its card; a byte each is what the driver shows of them.
    fn holds(&self) -> u64 {
        if self.active || !self.ended { self.soft } else { u64::from(self.lingered >= 2) }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn leases_uids_and_sums_are_those_of_a_naive_model(steps in steps()) {
        let mut core = core(5);
        let mut model: Vec<Naive> = Vec::new();
        let mut quarantined: Vec<u32> = Vec::new();
        let mut pids = 100;
        for step in steps {
            match step {
                Step::Register { name, minor, soft } => {
                    let sum: u64 = model.iter().filter(|t| t.minor == minor).map(Naive::holds).sum();
                    let free = 5 - model.len() - quarantined.len();
                    let expected = !model.iter().any(|t| t.active && t.name == name) && sum + soft <= CARD && free > 0;
                    let found = core.register(&ask(&format!("ns/{name}"), vec![slice(minor, CARD, soft)]));
                    prop_assert_eq!(found.is_ok(), expected, "{:?}", found);
                    if let Ok(lease) = found {
                        prop_assert!(!quarantined.contains(&lease.uid));
                        model.push(Naive { name, lease: lease.lease, uid: lease.uid, pid: 0, minor, soft, active: true, ended: false, adopted: false, lingered: 0 });
                    }
                }
                Step::Adopt { name, lease, uid, soft } => {
                    let lease = Lease { lease: LeaseId(lease), uid, sandbox_pid: { pids += 1; pids } };
                    let own = model.iter().position(|t| t.lease == lease.lease && !t.active && t.name == name && t.uid == uid);
                    let taken = model.iter().enumerate().any(|(i, t)| Some(i) != own && (t.uid == uid || t.lease == lease.lease));
                    let expected = !model.iter().any(|t| t.active && t.name == name) && !taken && (5000..5005).contains(&uid);
                    let register = Register { adopt: Some(lease), ..ask(&format!("ns/{name}"), vec![slice(0, CARD, soft)]) };
                    let found = core.register(&register);
                    prop_assert_eq!(found.is_ok(), expected, "{:?}", found);
                    if found.is_ok() {
                        if let Some(own) = own { model.remove(own); }
                        quarantined.retain(|q| *q != uid);
                        model.push(Naive { name, lease: lease.lease, uid, pid: lease.sandbox_pid, minor: 0, soft, active: true, ended: false, adopted: true, lingered: 0 });
                    }
                }
                Step::Started { which } => if let Some(t) = model.get_mut(which) {
                    let pid = if t.pid == 0 { pids += 1; pids } else { t.pid };
                    let found = core.started(t.lease, pid).is_ok();
                    prop_assert_eq!(found, t.active);
                    if found { t.pid = pid; }
                },
                Step::Closed { which, ended } => if let Some(t) = model.get(which).cloned().filter(|t| t.active) {
                    core.closed(t.lease, ended);
                    if t.pid == 0 {
                        model.remove(which);
                        quarantined.push(t.uid);
                    } else {
                        model[which].active = false;
                        model[which].ended = ended;
                    }
                },
                Step::Ended { which } => if let Some(t) = model.get_mut(which).filter(|t| !t.active) {
                    core.sandbox_ended(t.lease);
                    t.ended = true;
                },
                Step::Audit { holding } => {
                    let asked = core.sandboxes();
                    let held = |minor: u32| -> BTreeMap<u32, Holding> {
                        let on_it = model.iter().filter(|t| holding && t.minor == minor && t.pid != 0);
                        on_it.map(|t| (t.pid, Holding { bytes: 1, listed: true })).collect()
                    };
                    let verdicts = core.audited(&asked, &[(0, held(0)), (1, held(1))].into());
                    let mut freed: Vec<_> = model.iter().filter(|t| !holding && !t.active && t.ended).map(|t| t.lease).collect();
                    freed.sort();
                    let found: Vec<_> = verdicts.iter().filter_map(|v| match v { Verdict::Freed { lease } => Some(*lease), Verdict::Note { .. } => None, other => panic!("{other:?}") }).collect();
                    model.iter_mut().filter(|t| holding && !t.active && t.ended).for_each(|t| t.lingered += 1);
                    prop_assert_eq!(&found, &freed);
                    model.retain(|t| !freed.contains(&t.lease));
                }
                Step::EndQuarantine => if let Some(uid) = quarantined.pop() { core.end_quarantine(uid) },
            }
            let mut uids: Vec<u32> = model.iter().map(|t| t.uid).collect();
            uids.sort_unstable();
            let count = uids.len();
            uids.dedup();
            prop_assert_eq!(uids.len(), count);
            let (gpus, tenants) = core.status();
            prop_assert_eq!(tenants.len(), model.len());
            for gpu in gpus {
                let outlived = model.iter().filter(|t| !t.active && t.ended).count() as u64;
                if !model.iter().any(|t| t.adopted) {
                    prop_assert!(gpu.guaranteed <= CARD + outlived);
                }
            }
        }
    }
}
