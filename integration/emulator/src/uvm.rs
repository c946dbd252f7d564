//! `/dev/nvidia-uvm`: address spaces, registered cards, external ranges, managed ranges.
//!
//! Owns: one [`VaSpace`] per initialised file. Managed ranges are made by mmap alone, so they are looked up in
//! the maps of all processes when a command needs one: the mapping's start must equal its offset, and a mapping
//! of another process than the initialising one counts only in multi-process mode (flag 2), as in the kernel,
//! where such an mmap fails.
//! Rules mirrored (driver 580): commands before UVM_INITIALIZE answer ILLEGAL_ACTION; external mappings hold the
//! memory after its handle is freed; handles are checked against the process that made their client.

use std::collections::{BTreeMap, BTreeSet};

use nix::errno::Errno;

use crate::bytes::Bytes;
use crate::call::Call;
use crate::maps;
use crate::memory::{MemoryId, Place};
use crate::nodes::Node;
use crate::state::State;
use crate::status::Status;
use crate::table::{self, UvmNode};

const MULTI_PROCESS: u64 = 2;
const KNOWN_FLAGS: u64 = 7;

/// A range that maps memory of the resource manager.
#[derive(Clone, Debug, Default)]
struct External {
    length: u64,
    held: Vec<MemoryId>,
}

/// State of one initialised UVM file.
#[derive(Clone, Debug, Default)]
pub struct VaSpace {
    flags: u64,
    pid: u32,
    /// UVM_MM_INITIALIZE named it: its process's memory is known. Not needed in multi-process mode.
    mm: bool,
    cards: BTreeSet<[u8; 16]>,
    gpu_spaces: BTreeSet<[u8; 16]>,
    channels: BTreeMap<(u32, u32), Vec<MemoryId>>,
    external: BTreeMap<u64, External>,
    groups: BTreeSet<u64>,
    next_group: u64,
    /// Managed ranges whose pages were moved to a card.
    resident: BTreeMap<u64, (u64, MemoryId)>,
}

impl VaSpace {
    /// Everything it holds, one entry per reference.
    pub fn into_held(self) -> Vec<MemoryId> {
        let external = self.external.into_values().flat_map(|range| range.held);
        let channels = self.channels.into_values().flatten();
        external.chain(channels).chain(self.resident.into_values().map(|(_, memory)| memory)).collect()
    }

    fn multi_process(&self) -> bool {
        self.flags & MULTI_PROCESS != 0
    }

    fn free_of(&self, base: u64, length: u64) -> bool {
        let Some(end) = base.checked_add(length) else { return false };
        self.external.iter().all(|(at, range)| at.saturating_add(range.length) <= base || *at >= end)
    }

    fn range_over(&mut self, base: u64, length: u64) -> Option<&mut External> {
        let end = base.checked_add(length)?;
        let (at, range) = self.external.range_mut(..=base).next_back()?;
        (end <= at.saturating_add(range.length)).then_some(range)
    }
}

/// Performs a UVM command whose parameters lie at `address`.
///
/// # Errors
/// The errno: EINVAL for a number that the node doesn't take.
pub(crate) fn perform(call: &mut Call<'_>, cmd: u32, address: u64) -> Result<i32, Errno> {
    let row = table::uvm_command(cmd).ok_or(Errno::EINVAL)?;
    let right_node = (row.node == UvmNode::Tools) == (call.node == Node::UvmTools);
    if !right_node {
        return Err(Errno::EINVAL);
    }
    call.about.what = Some(cmd);
    let mut block = Bytes(call.caller.read(address, row.size).map_err(|_| Errno::EFAULT)?);
    let status = command(call, cmd, &mut block).err().unwrap_or(Status::OK);
    if let Some(at) = row.status {
        call.about.status = Some(status.0);
        block.set_u32(at, status.0);
    }
    call.caller.write(address, &block.0).map_err(|_| Errno::EFAULT)?;
    Ok(0)
}

fn space<'a>(call: &'a mut Call<'_>) -> Result<&'a mut VaSpace, Status> {
    call.state.spaces.get_mut(&call.file).ok_or(Status::ILLEGAL_ACTION)
}

fn uuid(block: &Bytes, at: usize) -> [u8; 16] {
    block.slice(at, 16).try_into().unwrap_or([0; 16])
}

fn command(call: &mut Call<'_>, cmd: u32, block: &mut Bytes) -> Result<(), Status> {
    match cmd {
        0x3000_0001 => return initialize(call, block.u64(0)),
        0x3000_0002 => return Ok(()),
        75 => return mm_initialize(call, block.i32(0)),
        _ => {}
    }
    let multi_process = space(call)?.multi_process();
    let (base, length) = (block.u64(0), block.u64(8));
    match cmd {
        23 => {
            let space = space(call)?;
            space.next_group = space.next_group.wrapping_add(1);
            let id = space.next_group;
            space.groups.insert(id);
            block.set_u64(0, id);
        }
        24 if !space(call)?.groups.remove(&block.u64(0)) => return Err(Status::OBJECT_NOT_FOUND),
        25 => register_space(call, block)?,
        26 if !space(call)?.gpu_spaces.remove(&uuid(block, 0)) => return Err(Status::INVALID_DEVICE),
        27 => register_channel(call, block)?,
        28 => {
            let key = (block.u32(16), block.u32(20));
            let held = space(call)?.channels.remove(&key).ok_or(Status::INVALID_CHANNEL)?;
            held.into_iter().for_each(|id| call.state.store.release(id));
        }
        33 => map_external(call, block)?,
        34 => {
            let range = space(call)?.external.remove(&base).ok_or(Status::INVALID_ADDRESS)?;
            range.held.into_iter().for_each(|id| call.state.store.release(id));
        }
        37 => register_gpu(call, block)?,
        38 if !space(call)?.cards.remove(&uuid(block, 0)) => return Err(Status::INVALID_DEVICE),
        39 => block.set(0, &[u8::from(!multi_process)]),
        70 => block.set(16, &[u8::from(!multi_process)]),
        42..=47 | 72 | 80 => managed(call, base, length)?,
        51 => migrate(call, block)?,
        65 | 68 | 73 => create_range(call, cmd, base, length)?,
        66 => {
            let range = space(call)?.range_over(base, length).ok_or(Status::INVALID_ADDRESS)?;
            let held = std::mem::take(&mut range.held);
            held.into_iter().for_each(|id| call.state.store.release(id));
        }
        69 => drop_zombies(call.state, call.nodes),
        62..=64 | 77 | 78 => return Err(Status::NOT_SUPPORTED),
        _ => {}
    }
    Ok(())
}

fn initialize(call: &mut Call<'_>, flags: u64) -> Result<(), Status> {
    if flags & !KNOWN_FLAGS != 0 {
        return Err(Status::INVALID_ARGUMENT);
    }
    let pid = call.caller.pid;
    match call.state.spaces.get(&call.file) {
        Some(space) if space.flags == flags => Ok(()),
        Some(_) => Err(Status::INVALID_ARGUMENT),
        None => {
            call.state.spaces.insert(call.file, VaSpace { flags, pid, ..VaSpace::default() });
            Ok(())
        }
    }
}

fn mm_initialize(call: &mut Call<'_>, fd: i32) -> Result<(), Status> {
    let (file, node) = call.file_behind(fd).map_err(|_| Status::INVALID_ARGUMENT)?;
    if node != Node::Uvm {
        return Err(Status::INVALID_ARGUMENT);
    }
    match call.state.spaces.get_mut(&file) {
        Some(space) if space.multi_process() => Err(Status::NOTHING_TO_DO),
        Some(space) => {
            space.mm = true;
            Ok(())
        }
        None => Err(Status::INVALID_STATE),
    }
}

/// The client behind a handle that a UVM command names, if the caller's process made it.
fn check_client(call: &Call<'_>, client: u32) -> Result<(), Status> {
    let owner = call.state.clients.get(&client).ok_or(Status::INVALID_OBJECT_HANDLE)?;
    if owner.pid == call.caller.pid { Ok(()) } else { Err(Status::INSUFFICIENT_PERMISSIONS) }
}

fn register_gpu(call: &mut Call<'_>, block: &mut Bytes) -> Result<(), Status> {
    let id = uuid(block, 0);
    let index = call.state.gpus.iter().position(|gpu| gpu.uuid == id && !gpu.lost);
    let index = index.ok_or(Status::GPU_UUID_NOT_FOUND)?;
    if !call.holds_gpu(index) {
        return Err(Status::INSUFFICIENT_PERMISSIONS);
    }
    if !space(call)?.cards.insert(id) {
        return Err(Status::INVALID_DEVICE);
    }
    block.set(16, &[0]);
    block.set_u32(20, u32::MAX);
    Ok(())
}

fn register_space(call: &mut Call<'_>, block: &Bytes) -> Result<(), Status> {
    let (id, client, handle) = (uuid(block, 0), block.u32(20), block.u32(24));
    check_client(call, client)?;
    let found = call.state.object(client, handle).ok_or(Status::OBJECT_NOT_FOUND)?;
    if found.kind != "VaSpaceApi" {
        return Err(Status::INVALID_OBJECT);
    }
    if !space(call)?.multi_process() && !space(call)?.mm {
        return Err(Status::PAGE_TABLE_NOT_AVAIL);
    }
    let space = space(call)?;
    if !space.cards.contains(&id) || !space.gpu_spaces.insert(id) {
        return Err(Status::INVALID_DEVICE);
    }
    Ok(())
}

fn register_channel(call: &mut Call<'_>, block: &Bytes) -> Result<(), Status> {
    let (id, client, handle) = (uuid(block, 0), block.u32(20), block.u32(24));
    check_client(call, client)?;
    let found = call.state.object(client, handle).ok_or(Status::OBJECT_NOT_FOUND)?;
    if found.kind != "KernelChannel" {
        return Err(Status::INVALID_CHANNEL);
    }
    let held = found.held.clone();
    if !space(call)?.gpu_spaces.contains(&id) {
        return Err(Status::INVALID_DEVICE);
    }
    if space(call)?.channels.contains_key(&(client, handle)) {
        return Err(Status::INVALID_CHANNEL);
    }
    held.iter().for_each(|memory| call.state.store.retain(*memory));
    space(call)?.channels.insert((client, handle), held);
    Ok(())
}

fn create_range(call: &mut Call<'_>, cmd: u32, base: u64, length: u64) -> Result<(), Status> {
    const POOL: u32 = 68;
    if length == 0 || !base.is_multiple_of(4096) || !length.is_multiple_of(4096) {
        return Err(Status::INVALID_ADDRESS);
    }
    if !space(call)?.free_of(base, length) {
        return Err(Status::UVM_ADDRESS_IN_USE);
    }
    let mut range = External { length, held: Vec::new() };
    if cmd == POOL {
        range.held.push(call.state.store.allocate(Place::Host, length, call.caller.pid)?);
    }
    space(call)?.external.insert(base, range);
    Ok(())
}

fn map_external(call: &mut Call<'_>, block: &Bytes) -> Result<(), Status> {
    let (base, length) = (block.u64(0), block.u64(8));
    let (client, handle) = (block.u32(9252), block.u32(9256));
    check_client(call, client)?;
    let memory = call.state.object(client, handle).ok_or(Status::OBJECT_NOT_FOUND)?.memory();
    let memory = memory.ok_or(Status::INVALID_OBJECT)?;
    let range = space(call)?.range_over(base, length).ok_or(Status::INVALID_ADDRESS)?;
    range.held.push(memory);
    call.state.store.retain(memory);
    Ok(())
}

/// Whether the range lies in a mapping of this UVM file that the kernel would have made.
fn managed(call: &mut Call<'_>, base: u64, length: u64) -> Result<(), Status> {
    let end = base.checked_add(length).ok_or(Status::INVALID_ADDRESS)?;
    if space(call)?.range_over(base, length).is_some() {
        return Ok(());
    }
    let (pid, multi_process) = {
        let space = space(call)?;
        (space.pid, space.multi_process())
    };
    let found = maps::of_file(&call.nodes.path(Node::Uvm))
        .into_iter()
        .find(|mapping| mapping.start <= base && end <= mapping.end && mapping.start == mapping.offset);
    let found = found.ok_or(Status::INVALID_ADDRESS)?;
    if multi_process || found.pid == pid { Ok(()) } else { Err(Status::INVALID_ADDRESS) }
}

/// Moves managed pages: to a card they take its memory, anywhere else they give it back.
fn migrate(call: &mut Call<'_>, block: &Bytes) -> Result<(), Status> {
    let (base, length, id) = (block.u64(0), block.u64(8), uuid(block, 16));
    managed(call, base, length)?;
    if id != [0; 16] && !space(call)?.gpu_spaces.contains(&id) {
        return Err(Status::INVALID_DEVICE);
    }
    let index = call.state.gpus.iter().position(|gpu| gpu.uuid == id);
    if let Some((_, memory)) = space(call)?.resident.remove(&base) {
        call.state.store.release(memory);
    }
    if let Some(index) = index {
        let memory = call.state.store.allocate(Place::Card(index), length, 0)?;
        space(call)?.resident.insert(base, (length, memory));
    }
    Ok(())
}

/// Gives back card memory of managed ranges that nobody maps any more.
pub(crate) fn drop_zombies(state: &mut State, nodes: &crate::nodes::Nodes) {
    if state.spaces.values().all(|space| space.resident.is_empty()) {
        return;
    }
    let live = maps::of_file(&nodes.path(Node::Uvm));
    let mut gone = Vec::new();
    for space in state.spaces.values_mut() {
        space.resident.retain(|base, (length, memory)| {
            let mapped = live.iter().any(|one| one.start <= *base && base.saturating_add(*length) <= one.end);
            if !mapped {
                gone.push(*memory);
            }
            mapped
        });
    }
    gone.into_iter().for_each(|memory| state.store.release(memory));
}
