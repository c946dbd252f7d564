//! Controls of the client object: the node's cards, version, exports.

use crate::bytes::Bytes;
use crate::call::Call;
use crate::control::Request;
use crate::share;
use crate::status::Status;

/// No more entries in an id list.
const END: u32 = u32::MAX;

/// Performs a control of class 0.
pub(crate) fn perform(call: &mut Call<'_>, request: &mut Request) -> Result<(), Status> {
    let client = request.client;
    let block = &mut request.parameters;
    match request.cmd {
        0x101 => build_version(call, block),
        0x1f0 => {
            block.set_u32(0, 8);
            Ok(())
        }
        0x201 => {
            fill_ids(call, block, 0, 32);
            Ok(())
        }
        0x202 => id_info(call, block, 24),
        0x205 => id_info(call, block, 16),
        0x204 => {
            let mask = call
                .state
                .gpus
                .iter()
                .fold(0, |mask, gpu| mask | 1_u32.checked_shl(gpu.instance).unwrap_or(0));
            block.set_u32(0, mask);
            Ok(())
        }
        0x214 => {
            fill_ids(call, block, 0, 32);
            (32..64).for_each(|i| block.set_u32(i * 4, END));
            Ok(())
        }
        0x215 => attach(call, block),
        0x216 | 0x289 | 0x290 | 0x27b | 0xd04 | 0xa04 => Ok(()),
        0x21b => {
            let bus = card(call, block.u32(0))?;
            block.set_u32(4, 0);
            block.set_u16(8, u16::from(bus));
            block.set_u16(10, 0);
            Ok(())
        }
        0x275 => uuid(call, block),
        0x279 => card(call, block.u32(0)).map(|_| {
            block.set_u32(4, 0);
            block.set_u32(8, 0);
        }),
        0x288 => {
            let ids: Vec<u32> = call.state.gpus.iter().map(crate::model::Gpu::id).collect();
            block.set_u32(0, u32::try_from(ids.len()).unwrap_or(0));
            for (i, id) in ids.iter().enumerate() {
                block.set_u32(4 + i * 12, *id);
                block.set_u32(8 + i * 12, END);
                block.set_u32(12 + i * 12, END);
            }
            Ok(())
        }
        0xd01 => {
            let found = call.state.object(client, block.u32(0)).ok_or(Status::OBJECT_NOT_FOUND)?;
            let kind = match found.kind {
                "VideoMemory" => 2,
                "SystemMemory" | "OsDescMemory" => 1,
                _ => 3,
            };
            block.set_u32(8, kind);
            Ok(())
        }
        0x3d05 => share::export(call, client, block),
        0x3d06 => share::import(call, client, block),
        0x3d08 => share::export_info(call, block),
        0x3d0b => share::export_many(call, client, block),
        0x3d0c => share::import_many(call, client, block),
        _ => Ok(()),
    }
}

fn fill_ids(call: &Call<'_>, block: &mut Bytes, at: usize, room: usize) {
    let ids = call.state.gpus.iter().filter(|gpu| !gpu.lost).map(crate::model::Gpu::id);
    for (i, id) in ids.chain(std::iter::repeat(END)).take(room).enumerate() {
        block.set_u32(at + i * 4, id);
    }
}

/// Bus number of the card with this id.
fn card(call: &Call<'_>, id: u32) -> Result<u8, Status> {
    call.state.gpus.iter().find(|gpu| gpu.id() == id).map(|gpu| gpu.bus).ok_or(Status::INVALID_ARGUMENT)
}

fn id_info(call: &Call<'_>, block: &mut Bytes, tail: usize) -> Result<(), Status> {
    let id = block.u32(0);
    let gpu = call.state.gpus.iter().find(|gpu| gpu.id() == id).ok_or(Status::INVALID_ARGUMENT)?;
    block.set_u32(4, 0);
    block.set_u32(8, gpu.instance);
    block.set_u32(12, 0);
    block.set_u32(tail, 0x41);
    block.set_u32(tail + 4, gpu.id());
    block.set_u32(tail + 8, gpu.instance);
    block.set_u32(tail + 12, u32::MAX);
    Ok(())
}

fn attach(call: &Call<'_>, block: &mut Bytes) -> Result<(), Status> {
    for i in 0..32 {
        let id = block.u32(i * 4);
        if id == END {
            break;
        }
        if card(call, id).is_err() {
            block.set_u32(128, id);
            return Err(Status::INVALID_ARGUMENT);
        }
    }
    Ok(())
}

fn uuid(call: &Call<'_>, block: &mut Bytes) -> Result<(), Status> {
    const BINARY: u32 = 2;
    let id = block.u32(0);
    let gpu = call.state.gpus.iter().find(|gpu| gpu.id() == id).ok_or(Status::INVALID_ARGUMENT)?;
    if block.u32(4) & 3 == BINARY {
        block.set(8, &gpu.uuid);
        block.set_u32(264, 16);
    } else {
        let text = gpu.uuid_text();
        block.set_text(8, 256, &text);
        block.set_u32(264, u32::try_from(text.len()).unwrap_or(0).saturating_add(1));
    }
    Ok(())
}

/// Three strings behind pointers, `size@0` bytes of room each.
fn build_version(call: &Call<'_>, block: &mut Bytes) -> Result<(), Status> {
    const MOST: u32 = 4096;
    let size = block.u32(0);
    if size > MOST {
        return Err(Status::INVALID_ARGUMENT);
    }
    let room = usize::try_from(size).map_err(|_| Status::INVALID_ARGUMENT)?;
    let texts = [call.state.version.clone(), call.state.version.clone(), "NVIDIA UNIX".to_owned()];
    for (text, at) in texts.iter().zip([8, 16, 24]) {
        let pointer = block.u64(at);
        if pointer != 0 {
            let mut out = Bytes::zeroed(room);
            out.set_text(0, room, text);
            call.write(pointer, &out).map_err(|_| Status::INVALID_PARAM_STRUCT)?;
        }
    }
    block.set_u32(32, 0);
    block.set_u32(36, 0x0242_246f);
    Ok(())
}
