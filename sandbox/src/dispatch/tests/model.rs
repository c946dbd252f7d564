//! Any order of calls leaves ledger and driver with the same sum.

use proptest::prelude::*;

use crate::bytes::put32;
use crate::testing::{Tenant, sandbox};

#[derive(Clone, Debug)]
enum Step {
    Alloc { client: usize, handle: u32, size: u64 },
    Dup { client: usize, handle: u32, from: usize, source: u32 },
    Channel { client: usize, handle: u32, userd: u32 },
    Map { client: usize, base: u64, handle: u32 },
    Unmap { base: u64 },
    Look { client: usize, handle: u32 },
    Free { client: usize, handle: u32 },
    FreeClient { client: usize },
    Close { client: usize },
    Sweep,
    End,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let client = || 0usize..3;
    let handle = || 10u32..20;
    let base = || (0u64..4).prop_map(|n| n << 24);
    let step = prop_oneof![
        4 => (client(), handle(), 0u64..(6 << 20))
            .prop_map(|(client, handle, size)| Step::Alloc { client, handle, size }),
        3 => (client(), handle(), client(), handle())
            .prop_map(|(client, handle, from, source)| Step::Dup { client, handle, from, source }),
        1 => (client(), handle(), handle())
            .prop_map(|(client, handle, userd)| Step::Channel { client, handle, userd }),
        2 => (client(), base(), handle()).prop_map(|(client, base, handle)| Step::Map { client, base, handle }),
        1 => base().prop_map(|base| Step::Unmap { base }),
        1 => (client(), handle()).prop_map(|(client, handle)| Step::Look { client, handle }),
        4 => (client(), prop_oneof![9 => handle(), 1 => Just(1u32), 1 => Just(2)])
            .prop_map(|(client, handle)| Step::Free { client, handle }),
        1 => client().prop_map(|client| Step::FreeClient { client }),
        1 => client().prop_map(|client| Step::Close { client }),
        1 => Just(Step::Sweep),
        1 => Just(Step::End),
    ];
    proptest::collection::vec(step, 1..60)
}

fn device(tenant: &Tenant<'_>) {
    tenant.alloc(tenant.client, 1, 0x80, &[0; 56]);
    tenant.alloc(1, 2, 0x2080, &[0; 4]);
}

/// Makes a client with its device and subdevice the current one.
fn open(tenant: &mut Tenant<'_>) -> u32 {
    tenant.client = tenant.new_client();
    device(tenant);
    tenant.client
}

fn perform(tenant: &mut Tenant<'_>, clients: &mut [u32], step: Step) {
    match step {
        Step::Alloc { client, handle, size } => {
            tenant.client = clients[client];
            tenant.memory(1, handle, size);
        }
        Step::Dup { client, handle, from, source } => {
            tenant.client = clients[client];
            tenant.dup(1, handle, (clients[from], source));
        }
        Step::Channel { client, handle, userd } => {
            tenant.client = clients[client];
            let mut params = vec![0; 368];
            put32(&mut params, 32, userd).unwrap();
            put32(&mut params, 128, 9).unwrap();
            tenant.alloc(1, handle, 0xc86f, &params);
        }
        Step::Map { client, base, handle } => {
            tenant.client = clients[client];
            tenant.uvm_map(base, handle);
        }
        Step::Unmap { base } => {
            tenant.uvm_free(base);
        }
        Step::Look { client, handle } => {
            tenant.client = clients[client];
            tenant.map(handle);
        }
        Step::Free { client, handle } => {
            tenant.client = clients[client];
            tenant.free(handle);
            device(tenant);
        }
        Step::FreeClient { client } => {
            tenant.client = clients[client];
            tenant.free(tenant.client);
            clients[client] = open(tenant);
        }
        Step::Close { client } => {
            tenant.sandbox.driver().drop_client(clients[client]);
            // Nobody tells the sandbox: until it asks, the charge stays.
            assert!(tenant.used() >= tenant.sandbox.driver().in_use(0));
            tenant.sandbox.sweep();
            clients[client] = open(tenant);
        }
        Step::Sweep => tenant.sandbox.sweep(),
        Step::End => {
            tenant.sandbox.process_ended(tenant.caller.process);
            tenant.uvm_initialize();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]
    #[test]
    fn ledger_and_driver_agree_after_any_order_of_calls(steps in steps()) {
        let quota = 24 << 20;
        let sandbox = sandbox(quota);
        let mut tenant = Tenant::new(&sandbox);
        tenant.uvm_initialize();
        let mut clients = vec![tenant.client];
        clients.push(open(&mut tenant));
        clients.push(open(&mut tenant));
        let looked = steps.iter().any(|step| matches!(step, Step::Look { .. }));
        for step in steps {
            perform(&mut tenant, &mut clients, step);
            prop_assert_eq!(tenant.used(), sandbox.driver().in_use(0));
            prop_assert!(tenant.used() <= quota);
        }
        for client in clients {
            tenant.client = client;
            tenant.free(client);
        }
        sandbox.process_ended(tenant.caller.process);
        prop_assert_eq!(tenant.used(), sandbox.driver().in_use(0));
        let graph = sandbox.objects.lock();
        prop_assert_eq!(graph.len(), 0);
        // What was mapped stays as long as the container.
        prop_assert!(looked || (tenant.used(), graph.memories()) == (0, 0));
    }
}

#[test]
fn threads_that_use_the_same_handles_end_with_the_drivers_sum() {
    let sandbox = sandbox(256 << 20);
    let shared = Tenant::new(&sandbox).client;
    std::thread::scope(|scope| {
        for thread in 0..4u32 {
            let sandbox = &sandbox;
            scope.spawn(move || {
                let mut tenant = Tenant::new(sandbox);
                tenant.client = shared;
                for round in 0..400u32 {
                    let handle = 10 + (round * 7 + thread) % 4;
                    match (round + thread) % 4 {
                        0 | 1 => {
                            tenant.memory(1, handle, u64::from(round % 5 + 1) << 20);
                        }
                        2 => {
                            tenant.dup(1, 10 + (round + 1) % 4, (shared, handle));
                        }
                        _ => {
                            tenant.free(handle);
                        }
                    }
                }
            });
        }
    });
    assert!(sandbox.usage()[0].used >= sandbox.driver().in_use(0));
    assert_eq!(sandbox.usage()[0].used, sandbox.driver().in_use(0));
}
