use super::*;
use crate::ledger::Account;

fn name(client: u32, handle: u32) -> Name {
    Name { client, handle }
}

fn add(
    objects: &Objects,
    client: u32,
    handle: u32,
    parent: u32,
    bytes: Option<(&std::sync::Arc<Account>, u64)>,
) -> Id {
    let kind = if client == handle { Kind::Client } else { Kind::Other };
    let charge = bytes.map(|(account, bytes)| account.charge(bytes).unwrap());
    let new = New {
        name: name(client, handle),
        parent,
        class: 0x40,
        kind,
        gpu: None,
        charge,
        holds: Vec::new(),
        depends: Vec::new(),
        mapping: None,
    };
    objects.lock().insert(new).0
}

#[test]
fn a_free_waits_for_the_call_that_uses_the_object() {
    let objects = Objects::default();
    add(&objects, 1, 1, 0, None);
    add(&objects, 1, 2, 1, None);
    let pins = objects.pin(&[name(1, 2)]).unwrap_or_else(|_| panic!());
    std::thread::scope(|scope| {
        let free = scope.spawn(|| drop(objects.begin_free(name(1, 1)).unwrap().finish()));
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(!free.is_finished());
        assert!(objects.has(name(1, 2)));
        drop(pins);
    });
    assert!(!objects.has(name(1, 1)) && !objects.has(name(1, 2)));
}

#[test]
fn a_call_waits_for_the_free_and_finds_the_object_gone() {
    let objects = Objects::default();
    add(&objects, 1, 1, 0, None);
    add(&objects, 1, 2, 1, None);
    let freeing = objects.begin_free(name(1, 2)).unwrap();
    std::thread::scope(|scope| {
        let pin = scope.spawn(|| objects.pin(&[name(1, 2)]).map(drop));
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(!pin.is_finished());
        drop(freeing.finish());
        assert_eq!(pin.join().unwrap(), Err(name(1, 2)));
    });
}

#[test]
fn a_free_that_the_driver_refused_leaves_the_object_usable() {
    let objects = Objects::default();
    add(&objects, 1, 1, 0, None);
    drop(objects.begin_free(name(1, 1)));
    assert!(objects.pin(&[name(1, 1)]).is_ok());
}

#[test]
fn a_handle_given_out_again_proves_the_old_object_gone() {
    let objects = Objects::default();
    let account = Account::new(100);
    add(&objects, 1, 1, 0, None);
    add(&objects, 1, 2, 1, Some((&account, 10)));
    add(&objects, 1, 3, 2, Some((&account, 5)));
    add(&objects, 1, 2, 1, Some((&account, 20)));
    assert_eq!(account.used(), 25, "the old object's charge is gone, its child's stays");
    drop(objects.begin_free(name(1, 1)).unwrap().finish());
    assert_eq!(account.used(), 0);
    let graph = objects.lock();
    assert_eq!((graph.len(), graph.memories()), (0, 0));
}

#[test]
fn an_object_whose_client_went_meanwhile_stays_charged_until_a_sweep() {
    let objects = Objects::default();
    let account = Account::new(100);
    add(&objects, 7, 2, 1, Some((&account, 10)));
    assert_eq!(objects.lock().clients(), [7]);
    assert_eq!(account.used(), 10);
    let freed = objects.begin_free(name(7, 7)).unwrap().finish();
    assert_eq!(freed.charges(), 1);
    drop(freed);
    assert_eq!(account.used(), 0);
}

#[test]
fn a_question_waits_for_calls_in_the_client_and_holds_back_new_ones() {
    let objects = Objects::default();
    add(&objects, 1, 1, 0, None);
    add(&objects, 1, 2, 1, None);
    let pins = objects.pin(&[name(1, 2)]).unwrap_or_else(|_| panic!());
    std::thread::scope(|scope| {
        let ask = scope.spawn(|| objects.ask(1).map(|asking| drop(asking.gone())));
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(!ask.is_finished());
        let late = scope.spawn(|| objects.pin(&[name(1, 2)]).map(drop));
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(!late.is_finished());
        drop(pins);
        assert!(ask.join().unwrap().is_some());
        assert_eq!(late.join().unwrap(), Err(name(1, 2)));
    });
    assert_eq!(objects.lock().len(), 0);
}

#[test]
fn a_client_that_lives_goes_on_after_the_question() {
    let objects = Objects::default();
    add(&objects, 1, 1, 0, None);
    drop(objects.ask(1));
    assert!(objects.pin(&[name(1, 1)]).is_ok());
    assert!(objects.ask(2).is_none());
}

#[test]
fn a_free_that_is_refused_does_not_open_what_goes_with_another() {
    let objects = Objects::default();
    let account = Account::new(10);
    add(&objects, 1, 1, 0, None);
    add(&objects, 1, 2, 1, None);
    add(&objects, 1, 3, 2, Some((&account, 4)));
    // Of an object through a file that isn't its client's: the driver refuses.
    let refused = objects.begin_free(name(1, 3)).unwrap();
    std::thread::scope(|scope| {
        let parent = scope.spawn(|| objects.begin_free(name(1, 2)).unwrap());
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(!parent.is_finished());
        drop(refused);
        let parent = parent.join().unwrap();
        let pin = scope.spawn(|| objects.pin(&[name(1, 3)]).map(drop));
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(!pin.is_finished(), "memory in use while its device is being freed");
        drop(parent.finish());
        assert_eq!(pin.join().unwrap(), Err(name(1, 3)));
    });
    assert_eq!(account.used(), 0);
}

#[test]
fn frees_that_meet_all_come_to_an_end() {
    let objects = Objects::default();
    std::thread::scope(|scope| {
        for thread in 0..4u32 {
            let objects = &objects;
            scope.spawn(move || {
                for round in 0..500 {
                    add(objects, 1, 1, 0, None);
                    add(objects, 1, 2, 1, None);
                    add(objects, 1, 3, 2, None);
                    let freeing = objects.begin_free(name(1, 1 + (round + thread) % 3));
                    if round % 2 == 0 {
                        drop(freeing);
                    } else {
                        drop(freeing.map(Freeing::finish));
                    }
                }
            });
        }
    });
}
