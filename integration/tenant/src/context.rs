//! A CUDA context's worth of driver calls: address space, channel group, channel with USERD, doorbell.

use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::bytes::Block;
use crate::driver::{Trouble, step};
use crate::memory::{Mapping, Uvm, number, uvm};
use crate::report::{self, Outcome};
use crate::rm::Client;

const CHANNEL_MEMORY: u64 = 2 << 20;
const ENTRIES: u32 = 1024;
const USERD: u64 = 0x2000;
const GET: usize = 0x88;
const PUT: usize = 0x8c;

/// What a context holds. Dropping it leaves the freeing to the driver, as a dying process does.
#[derive(Debug)]
pub(crate) struct Context {
    uvm: Uvm,
    group: u32,
    /// Handle of its channel.
    pub channel: u32,
    memory: u32,
    token: u32,
}

/// Class of a doorbell and of a channel, by what the card offers.
fn classes(client: &Client) -> Result<(u32, u32, u32), Trouble> {
    let list = client.control(client.device, 0x0080_0292, 804)?;
    let count = usize::try_from(list.u32(0)).unwrap_or(0);
    let offered: Vec<u32> = (0..count).map(|i| list.u32(4 + i * 4)).collect();
    let first = |wanted: &[u32]| wanted.iter().copied().find(|class| offered.contains(class));
    let found =
        (first(&[0xc661, 0xc461]), first(&[0xc86f, 0xc56f, 0xc46f]), first(&[0xcbc0, 0xc7c0, 0xc6c0]));
    match found {
        (Some(doorbell), Some(channel), Some(compute)) => Ok((doorbell, channel, compute)),
        _ => Err(Trouble::Machine("the card offers no channel class known here".to_owned())),
    }
}

/// Card memory at a GPU address, by the UVM driver.
fn placed(client: &mut Client, uvm: &Uvm, at: u64, size: u64) -> Result<u32, Trouble> {
    let (memory, got) = client.card_memory(size)?;
    let mut range = Block::zeroed(24);
    range.set_u64(0, at);
    range.set_u64(8, got);
    step("UVM_CREATE_EXTERNAL_RANGE", uvm, 73, &mut range, 16)?;
    let mut map = Block::zeroed(9264);
    map.set_u64(0, at);
    map.set_u64(8, got);
    map.set(24, &client.uuid);
    map.set_u32(40, 1);
    map.set_u64(9240, 1);
    map.set(9248, &client.control.as_raw_fd().to_le_bytes());
    map.set_u32(9252, client.handle);
    map.set_u32(9256, memory);
    step("UVM_MAP_EXTERNAL_ALLOCATION", uvm, 33, &mut map, 9260)?;
    Ok(memory)
}

/// An address space that the UVM driver manages, registered with it.
pub(crate) fn address_space(client: &mut Client, uvm: &Uvm) -> Result<u32, Trouble> {
    let mut space = Block::zeroed(56);
    space.set_u32(4, 0x48);
    space.set_u64(40, 0x1000);
    let space = client.alloc(client.device, 0x90f1, &mut space)?;
    let mut register = Block::zeroed(32);
    register.set(0, &client.uuid);
    register.set(16, &client.control.as_raw_fd().to_le_bytes());
    register.set_u32(20, client.handle);
    register.set_u32(24, space);
    step("UVM_REGISTER_GPU_VASPACE", uvm, 25, &mut register, 28)?;
    Ok(space)
}

impl Context {
    /// Makes one whose ranges start at `at`.
    pub(crate) fn new(client: &mut Client, uvm: Uvm, at: u64) -> Result<Self, Trouble> {
        let (_, channel_class, compute_class) = classes(client)?;
        let space = address_space(client, &uvm)?;
        let mut group = Block::zeroed(20);
        group.set_u32(12, 1);
        let group = client.alloc(client.device, 0xa06c, &mut group)?;
        let share = client.alloc(group, 0x9067, &mut Block::words(&[space, 1, 0]))?;
        let memory = placed(client, &uvm, at, CHANNEL_MEMORY)?;
        let notifier = client.host_memory(4096)?;
        let mut parameters = Block::zeroed(368);
        parameters.set_u32(0, notifier);
        parameters.set_u32(4, memory);
        parameters.set_u64(8, at);
        parameters.set_u32(16, ENTRIES);
        parameters.set_u32(24, share);
        parameters.set_u32(32, memory);
        parameters.set_u64(64, USERD);
        let channel = client.alloc(group, channel_class, &mut parameters)?;
        client.alloc(channel, compute_class, &mut Block::zeroed(16))?;
        let token = client.control(channel, 0xc36f_0108, 4)?.u32(0);
        let mut bind = Block::zeroed(56);
        bind.set(0, &client.uuid);
        bind.set(16, &client.control.as_raw_fd().to_le_bytes());
        bind.set_u32(20, client.handle);
        bind.set_u32(24, channel);
        bind.set_u64(32, at.wrapping_add(0x400_0000));
        bind.set_u64(40, 0x100_0000);
        step("UVM_REGISTER_CHANNEL", &uvm, 27, &mut bind, 48)?;
        client.control_with(group, 0xa06c_0101, &mut Block(vec![1, 0, 0]))?;
        Ok(Context { uvm, group, channel, memory, token })
    }
}

/// `context`: with `run`, work is put into the channel's USERD and its end awaited (emulated card only: there is
/// no real pushbuffer behind it).
pub(crate) fn one(run: bool) -> Result<Outcome, Trouble> {
    const WHERE: u64 = 0x2_0060_0000;
    let mut client = Client::new()?;
    let (total, _, before) = client.memory_sizes()?;
    let uvm = uvm(&client)?;
    let context = Context::new(&mut client, uvm, WHERE)?;
    let (doorbell_class, _, _) = classes(&client)?;
    let mut flags = Block(vec![0, 0]);
    let doorbell = client.alloc(client.subdevice, doorbell_class, &mut flags)?;
    let (doorbell_file, _) = client.map(client.subdevice, doorbell, 64 << 10)?;
    let doorbell = Mapping::new(Some(&doorbell_file), 64 << 10, 0, 0)?;
    let (file, _) = client.map(client.subdevice, context.memory, CHANNEL_MEMORY)?;
    let userd = Mapping::new(Some(&file), CHANNEL_MEMORY, 0, 0)?;
    let base = usize::try_from(USERD).unwrap_or(0);
    let mut waited = None;
    if run {
        userd.write(base + PUT, 5);
        doorbell.write(0x90, context.token);
        let start = Instant::now();
        while userd.read(base + GET) != 5 && start.elapsed() < Duration::from_secs(2) {
            std::thread::sleep(Duration::from_millis(1));
        }
        waited = Some(start.elapsed().as_millis());
    }
    let (_, _, free) = client.memory_sizes()?;
    let ran = userd.read(base + GET) == 5;
    report::line(&json!({
        "ok": !run || ran, "total": total, "free_before": before, "free": free, "token": context.token,
        "group": context.group, "channel": context.channel, "ran": ran, "waited_ms": waited.map(|ms| ms.to_string()),
        "uvm": context.uvm.as_fd().as_raw_fd(), "pid": std::process::id(),
    }));
    Ok(if !run || ran { Outcome::Done } else { Outcome::Refused })
}

/// `contexts`: one after the other in one process, each with a client of its own; all held to the end.
pub(crate) fn many(text: &str) -> Result<Outcome, Trouble> {
    let wanted = number(text)?;
    let mut held = Vec::new();
    let mut refusal = None;
    for _ in 0..wanted {
        let made = Client::new().and_then(|mut client| {
            let file = uvm(&client)?;
            let context = Context::new(&mut client, file, 0x2_0060_0000)?;
            Ok((client, context))
        });
        match made {
            Ok(both) => held.push(both),
            Err(error) => {
                refusal = Some(error.to_string());
                break;
            }
        }
    }
    let free = held.first().and_then(|(client, _)| client.memory_sizes().ok()).map(|(_, _, free)| free);
    report::line(&json!({"ok": true, "made": held.len(), "refusal": refusal, "free": free}));
    Ok(if refusal.is_some() { Outcome::Refused } else { Outcome::Done })
}
