use super::*;
use proptest::prelude::*;

const MIB: u64 = 1 << 20;

#[test]
fn sizes_are_rounded_as_the_driver_rounds_them() {
    assert_eq!(rounded(0), 64 << 10);
    assert_eq!(rounded(1), 64 << 10);
    assert_eq!(rounded((64 << 10) + 1), 128 << 10);
    assert_eq!(rounded(2 * MIB - 1), 2 * MIB);
    assert_eq!(rounded(2 * MIB), 2 * MIB);
    assert_eq!(rounded(2 * MIB + 1), 4 * MIB);
    assert_eq!(rounded(u64::MAX), u64::MAX);
}

#[test]
fn a_charge_beyond_the_limit_changes_nothing() {
    let account = Account::new(10);
    let held = account.charge(7).unwrap();
    assert_eq!(account.charge(4).unwrap_err(), Over);
    assert_eq!(account.charge(u64::MAX).unwrap_err(), Over);
    assert_eq!((account.used(), account.peak()), (7, 7));
    drop(held);
    assert_eq!((account.used(), account.peak()), (0, 7));
}

#[test]
fn settling_to_more_than_fits_keeps_the_charge() {
    let account = Account::new(10);
    let mut charge = account.charge(7).unwrap();
    assert_eq!(charge.settle(11), Err(Over));
    assert_eq!((charge.bytes(), account.used()), (7, 7));
    charge.settle(3).unwrap();
    assert_eq!(account.used(), 3);
    charge.settle(10).unwrap();
    assert_eq!(account.used(), 10);
}

#[test]
fn racing_threads_never_get_a_byte_more_than_the_limit() {
    let account = Account::new(1000);
    let most = AtomicU64::new(0);
    let sum = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let (account, most, sum) = (&account, &most, &sum);
            scope.spawn(move || {
                let mut held = Vec::new();
                for round in 0..5000u64 {
                    let bytes = (thread * 37 + round * 13) % 170 + 1;
                    if let Ok(charge) = account.charge(bytes) {
                        let now = sum.fetch_add(bytes, Ordering::SeqCst) + bytes;
                        most.fetch_max(now, Ordering::SeqCst);
                        held.push((charge, bytes));
                    }
                    if round % 3 == 0
                        && let Some((charge, bytes)) = held.pop()
                    {
                        sum.fetch_sub(bytes, Ordering::SeqCst);
                        drop(charge);
                    }
                }
                for (charge, bytes) in held {
                    sum.fetch_sub(bytes, Ordering::SeqCst);
                    drop(charge);
                }
            });
        }
    });
    assert!(most.load(Ordering::SeqCst) <= 1000);
    assert!(account.peak() <= 1000 && account.peak() > 800);
    assert_eq!(account.used(), 0);
}

fn two_gpus() -> (Vec<Arc<Account>>, UvmCharges, Instant) {
    let accounts = vec![Account::new(100), Account::new(50)];
    let uvm = UvmCharges::new(accounts.clone());
    (accounts, uvm, Instant::now())
}

#[test]
fn a_uvm_mapping_is_charged_to_every_gpu_and_refused_where_one_is_full() {
    let (accounts, uvm, now) = two_gpus();
    uvm.charge(40, now).unwrap();
    assert_eq!(uvm.charge(20, now), Err(Over));
    assert_eq!((accounts[0].used(), accounts[1].used()), (40, 40));
}

#[test]
fn a_young_uvm_charge_survives_an_audit_that_does_not_show_it_yet() {
    let (accounts, uvm, now) = two_gpus();
    uvm.charge(40, now).unwrap();
    assert_eq!(uvm.audit(0, now + SETTLING / 2), UvmVerdict::Charged);
    assert_eq!(accounts[0].used(), 40);
    assert_eq!(uvm.audit(40, now + SETTLING * 2), UvmVerdict::Charged);
    assert_eq!(accounts[1].used(), 40);
    assert_eq!(uvm.audit(10, now + SETTLING * 2), UvmVerdict::Charged);
    assert_eq!((accounts[0].used(), accounts[1].used(), uvm.bytes()), (10, 10, 10));
    assert_eq!(uvm.audit(0, now + SETTLING * 2), UvmVerdict::Charged);
    assert_eq!((accounts[0].used(), accounts[1].used()), (0, 0));
}

#[test]
fn a_uvm_mapping_that_was_never_charged_is_found() {
    let (_, uvm, now) = two_gpus();
    uvm.charge(40, now).unwrap();
    assert_eq!(uvm.audit(41, now), UvmVerdict::Uncharged { found: 41, charged: 40 });
}

proptest! {
    #[test]
    fn the_account_equals_the_sum_of_the_charges_held(
        steps in proptest::collection::vec((0u8..4, 0usize..8, 0u64..400), 1..200)
    ) {
        let account = Account::new(1000);
        let mut held: Vec<Charge> = Vec::new();
        for (action, index, bytes) in steps {
            let sum: u64 = held.iter().map(Charge::bytes).sum();
            match action {
                0 | 1 => match account.charge(bytes) {
                    Ok(charge) => { prop_assert!(sum + bytes <= 1000); held.push(charge); }
                    Err(Over) => prop_assert!(sum + bytes > 1000),
                },
                2 if !held.is_empty() => { let at = index % held.len(); held.swap_remove(at); }
                3 if !held.is_empty() => {
                    let at = index % held.len();
                    let fits = sum - held[at].bytes() + bytes <= 1000;
                    prop_assert_eq!(held[at].settle(bytes).is_ok(), fits);
                }
                _ => {}
            }
            prop_assert_eq!(account.used(), held.iter().map(Charge::bytes).sum::<u64>());
        }
        drop(held);
        prop_assert_eq!(account.used(), 0);
    }
}
