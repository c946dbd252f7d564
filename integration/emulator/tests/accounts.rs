//! The card's account against a naive model, over random lives of clients, memory and duplicates.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a helper of a test fails the test"
)]

mod rig;

use std::collections::BTreeMap;

use proptest::prelude::*;
use rig::{Client, MIB, OK, Rig};

const CARD: u64 = 16;

#[derive(Clone, Debug)]
enum Step {
    Allocate { client: usize, handle: u32, size: u64 },
    Free { client: usize, handle: u32 },
    Duplicate { from: usize, source: u32, to: usize, handle: u32 },
    Close { client: usize },
}

fn step() -> impl Strategy<Value = Step> {
    let client = 0..3_usize;
    let handle = 0x20..0x26_u32;
    prop_oneof![
        4 => (client.clone(), handle.clone(), 1..6 * MIB)
            .prop_map(|(client, handle, size)| Step::Allocate { client, handle, size }),
        3 => (client.clone(), handle.clone()).prop_map(|(client, handle)| Step::Free { client, handle }),
        2 => (client.clone(), handle.clone(), client.clone(), handle)
            .prop_map(|(from, source, to, handle)| Step::Duplicate { from, source, to, handle }),
        1 => client.prop_map(|client| Step::Close { client }),
    ]
}

/// Which allocation each handle of each client means; sizes by allocation.
#[derive(Default)]
struct Naive {
    handles: BTreeMap<(usize, u32), usize>,
    sizes: Vec<u64>,
}

impl Naive {
    fn used(&self) -> u64 {
        let mut alive: Vec<usize> = self.handles.values().copied().collect();
        alive.sort_unstable();
        alive.dedup();
        alive.into_iter().map(|one| self.sizes[one]).sum()
    }
}

fn rounded(size: u64) -> u64 {
    let page = if size >= 2 * MIB { 2 * MIB } else { 64 << 10 };
    size.div_ceil(page) * page
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn the_card_holds_exactly_what_some_handle_still_names(steps in prop::collection::vec(step(), 1..60)) {
        let rig = Rig::new(&[CARD]);
        let mut clients: Vec<Client<'_>> = (0..3).map(|_| Client::new(&rig)).collect();
        let mut naive = Naive::default();
        for step in steps {
            match step {
                Step::Allocate { client, handle, size } => {
                    let status = clients[client].memory(handle, size);
                    let taken = naive.handles.contains_key(&(client, handle));
                    let fits = naive.used() + rounded(size) <= CARD * MIB;
                    prop_assert_eq!(status, if taken { 0x19 } else if fits { OK } else { 0x51 });
                    if status == OK {
                        naive.handles.insert((client, handle), naive.sizes.len());
                        naive.sizes.push(rounded(size));
                    }
                }
                Step::Free { client, handle } => {
                    prop_assert_eq!(clients[client].free(handle), OK);
                    naive.handles.remove(&(client, handle));
                }
                Step::Duplicate { from, source, to, handle } => {
                    let status = clients[to].dup(handle, &clients[from], source);
                    let meant = naive.handles.get(&(from, source)).copied();
                    let taken = naive.handles.contains_key(&(to, handle));
                    let expected = match meant {
                        None => 0x57,
                        Some(_) if taken => 0x19,
                        Some(_) => OK,
                    };
                    prop_assert_eq!(status, expected);
                    if let (Some(meant), OK) = (meant, status) {
                        naive.handles.insert((to, handle), meant);
                    }
                }
                Step::Close { client } => {
                    clients[client] = Client::new(&rig);
                    naive.handles.retain(|(owner, _), _| *owner != client);
                }
            }
            prop_assert_eq!(rig.used(0), naive.used());
        }
        drop(clients);
        prop_assert_eq!(rig.used(0), 0);
        prop_assert_eq!(rig.clients(), 0);
    }
}
