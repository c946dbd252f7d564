//! Controls of devices and subdevices that report what the card is and how full it is.

use crate::bytes::Bytes;
use crate::call::Call;
use crate::control::{Request, fill_pairs, pair_list};
use crate::state::Object;
use crate::status::Status;

const KNOWN: &[u32] = &[
    0x0080_0201,
    0x0080_0280,
    0x0080_0289,
    0x0080_0292,
    0x0080_1307,
    0x2080_0110,
    0x2080_0111,
    0x2080_0142,
    0x2080_014a,
    0x2080_014b,
    0x2080_0170,
    0x2080_018d,
    0x2080_018e,
    0x2080_1301,
    0x2080_1303,
    0x2080_1320,
    0x2080_1322,
    0x2080_1357,
    0x2080_1701,
    0x2080_1801,
    0x2080_1201,
    0x2080_1802,
    0x0080_1104,
    0x2080_0403,
    0x2080_0123,
    0x2080_8546,
];

/// Whether this module performs the control.
pub(crate) fn knows(cmd: u32) -> bool {
    KNOWN.contains(&cmd)
}

/// Performs a control of class 0x80 or 0x2080.
pub(crate) fn perform(call: &mut Call<'_>, request: &mut Request) -> Result<(), Status> {
    let index = request.gpu.ok_or(Status::INVALID_OBJECT)?;
    let gpu = call.state.gpus.get(index).ok_or(Status::INVALID_DEVICE)?.clone();
    let block = &mut request.parameters;
    match request.cmd {
        0x0080_0201 => class_pointer(call, block, gpu.model.classes)?,
        0x0080_0280 => block.set_u32(0, 1),
        0x0080_0289 => block.set(0, &[0; 8]),
        0x0080_0292 => class_list(block, gpu.model.classes),
        0x0080_1307 => block.set(0, &[0x0b, 0x81, 0x12]),
        0x2080_0110 => {
            if block.u32(0) == 0 {
                block.set_text(4, 64, gpu.model.name);
            } else {
                let wide: Vec<u8> = gpu.model.name.bytes().flat_map(|byte| [byte, 0]).collect();
                block.set(4, &wide);
            }
        }
        0x2080_0111 => block.set_text(0, 64, gpu.model.short_name),
        0x2080_0142 => block.set_u32(0, gpu.id()),
        0x2080_014a => gid(block, &gpu.uuid, &gpu.uuid_text())?,
        0x2080_014b => inforom_version(block)?,
        0x2080_8546 => firmware_reading(block)?,
        0x2080_1322 | 0x2080_1357 => return Err(Status::NOT_SUPPORTED),
        0x2080_0170 => {
            let engines = [1_u32, 9, 10, 11, 12, 13];
            block.set_u32(0, 6);
            for (i, engine) in engines.iter().enumerate() {
                block.set_u32(4 + i * 4, *engine);
            }
        }
        0x2080_018d => pids(call, index, block),
        0x2080_018e => pid_info(call, index, block)?,
        0x2080_1301 => {
            let info = memory_info(call, index);
            pair_list(call, block.u32(0), block.u64(8), info)?;
        }
        0x2080_1303 => {
            let count = block.u32(0);
            if count == 0 || count > 128 {
                return Err(Status::INVALID_ARGUMENT);
            }
            fill_pairs(block, 4, count, memory_info(call, index));
        }
        0x2080_1320 => {
            let length = block.len();
            *block = Bytes::zeroed(length);
            block.set_u32(0, 1);
            block.set_u64(16, gpu.memory.wrapping_sub(1));
        }
        0x2080_1701 => {
            block.set_u32(0, gpu.model.arch.0);
            block.set_u32(4, gpu.model.arch.1);
            block.set_u32(8, 0xa1);
        }
        0x2080_1801 => {
            block.set_u32(0, (u32::from(gpu.model.device_id) << 16) | 0x10de);
            block.set_u32(8, 0xa1);
        }
        0x2080_1201 | 0x0080_1104 | 0x2080_1802 => pair_list(call, block.u32(0), block.u64(8), |_| Some(0))?,
        0x2080_0123 => pair_list(call, 0, block.u64(8), |_| None)?,
        0x2080_0403 => block.set_u64(0, nanoseconds()),
        _ => return Err(Status::NOT_SUPPORTED),
    }
    Ok(())
}

fn nanoseconds() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(0)
}

fn class_list(block: &mut Bytes, classes: &[u32]) {
    block.set_u32(0, u32::try_from(classes.len()).unwrap_or(0));
    for (i, class) in classes.iter().enumerate() {
        block.set_u32(4 + i * 4, *class);
    }
}

/// A null pointer asks for the count, otherwise as many as there is room for.
fn class_pointer(call: &Call<'_>, block: &mut Bytes, classes: &[u32]) -> Result<(), Status> {
    let (room, pointer) = (usize::try_from(block.u32(0)).unwrap_or(0), block.u64(8));
    if pointer != 0 {
        let bytes = classes.iter().take(room).flat_map(|class| class.to_le_bytes()).collect();
        call.write(pointer, &Bytes(bytes))?;
    }
    block.set_u32(0, u32::try_from(classes.len()).unwrap_or(0));
    Ok(())
}

fn gid(block: &mut Bytes, uuid: &[u8; 16], text: &str) -> Result<(), Status> {
    const BINARY: u32 = 2;
    if block.u32(0) != 0 {
        return Err(Status::INVALID_ARGUMENT);
    }
    if block.u32(4) & BINARY != 0 {
        block.set_u32(8, 16);
        block.set(12, uuid);
    } else {
        block.set_u32(8, u32::try_from(text.len()).unwrap_or(0).saturating_add(1));
        block.set_text(12, 256, text);
    }
    Ok(())
}

/// Version of an InfoROM object by its name; this card has three.
fn inforom_version(block: &mut Bytes) -> Result<(), Status> {
    let version: [u8; 2] = match block.slice(0, 3).as_slice() {
        b"OBD" => [2, 1],
        b"ECC" => [7, 16],
        b"EEN" => [1, 0],
        _ => return Err(Status::OBJECT_NOT_FOUND),
    };
    block.set(3, &version);
    Ok(())
}

/// An undocumented reading of nvidia-smi's, by number: which ones an H200 has was recorded.
fn firmware_reading(block: &Bytes) -> Result<(), Status> {
    match block.u32(0) {
        0x0a | 0x0c | 0x0d | 0x12 | 0x13 | 0x16 => Ok(()),
        _ => Err(Status::NOT_SUPPORTED),
    }
}

/// KiB by index, as FB_GET_INFO reports the whole card.
fn memory_info(call: &Call<'_>, index: usize) -> impl Fn(u32) -> Option<u32> + use<> {
    let total = call.state.gpus.get(index).map_or(0, |gpu| gpu.memory);
    let heap = call.state.store.size(index);
    let free = heap.saturating_sub(call.state.store.used(index));
    move |what| {
        let bytes = match what {
            0x07 | 0x08 => total,
            0x09 | 0x0a | 0x20 => heap,
            0x12 | 0x15 | 0x16 => free,
            0x05 => 1 << 38,
            0x1d | 0x1f => 1 << 37,
            0x10 | 0x11 | 0x13 | 0x1e | 0x27 | 0x29 | 0x33 | 0x34 => 0,
            _ => return None,
        };
        u32::try_from(bytes >> 10).ok()
    }
}

/// Processes that hold an object on the card: of the class asked for, or any.
fn pids(call: &Call<'_>, index: usize, block: &mut Bytes) {
    let (kind, wanted) = (block.u32(0), block.u32(4));
    let matches = |object: &Object| {
        object.gpu == Some(index) && (kind != 0 || wanted == 0 || wanted == 0x80 || object.class == wanted)
    };
    let mut found: Vec<u32> = call
        .state
        .clients
        .values()
        .filter(|client| client.objects.values().any(matches))
        .map(|client| client.pid)
        .collect();
    found.sort_unstable();
    found.dedup();
    found.truncate(950);
    block.set_u32(8, u32::try_from(found.len()).unwrap_or(0));
    for (i, pid) in found.iter().enumerate() {
        block.set_u32(12 + i * 4, *pid);
    }
}

fn pid_info(call: &Call<'_>, index: usize, block: &mut Bytes) -> Result<(), Status> {
    const MOST: u32 = 200;
    let count = block.u32(0);
    if count > MOST {
        return Err(Status::INVALID_ARGUMENT);
    }
    let sums = call.state.store.by_owner(index);
    let mut at = 8;
    for _ in 0..count {
        let pid = block.u32(at);
        let known = call.state.clients.values().any(|client| client.pid == pid);
        block.set_u32(at + 8, if known { 0 } else { 0x57 });
        block.set_u64(at + 16, sums.get(&pid).copied().unwrap_or(0));
        block.set(at + 24, &[0; 40]);
        at += 72;
    }
    Ok(())
}
