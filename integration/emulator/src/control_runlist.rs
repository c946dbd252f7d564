//! Controls of channels, channel groups and the runlist.

use crate::bytes::Bytes;
use crate::call::Call;
use crate::control::Request;
use crate::state::{Channel, Detail, Group, Object};
use crate::status::Status;

/// Whether the control asks for the right to change priorities (CAP_SYS_NICE of the caller).
pub(crate) fn needs_nice(cmd: u32) -> bool {
    matches!(
        cmd,
        0xa06c_0107 | 0xa06c_0109 | 0xa06c_0110 | 0xa06f_0109 | 0xa06f_0111 | 0x2080_1115 | 0x2080_1121
    )
}

/// Performs it.
pub(crate) fn perform(call: &mut Call<'_>, request: &mut Request) -> Result<(), Status> {
    let (client, object) = (request.client, request.object);
    let block = &mut request.parameters;
    match request.cmd {
        0x2080_110b => disable_channels(call, block)?,
        0x2080_1119 => {
            let live: Vec<u32> = channels(call).map(|(_, _, channel)| channel.id).collect();
            let length = block.len();
            let runlist = block.u32(0);
            *block = Bytes::zeroed(length);
            block.set_u32(0, runlist);
            for id in live {
                let at = usize::try_from(id / 32).unwrap_or(0).saturating_mul(4).saturating_add(4);
                let word = block.u32(at) | (1 << (id % 32));
                block.set_u32(at, word);
            }
        }
        0x2080_1123 => unique_ids(call, block)?,
        0x2080_1210 => {
            let found = call.state.object(client, block.u32(4));
            found.ok_or(Status::OBJECT_NOT_FOUND)?;
        }
        0x2080_1218 => {
            call.state.object(client, block.u32(0)).ok_or(Status::OBJECT_NOT_FOUND)?;
            block.set_u64(8, 0x0052_f000);
        }
        0x0080_170d => channel_list(call, client, block)?,
        0xa06c_0101 => {
            group(call, client, object)?.scheduled = block.u8(0) != 0;
        }
        0xa06c_0103 => {
            let value = block.u64(0);
            if value == 0 {
                return Err(Status::INVALID_ARGUMENT);
            }
            group(call, client, object)?.timeslice = value;
        }
        0xa06c_0104 => {
            let value = group(call, client, object)?.timeslice;
            block.set_u64(0, value);
        }
        0xa06c_0107 => {
            let level = block.u32(0);
            if level > 2 {
                return Err(Status::INVALID_ARGUMENT);
            }
            group(call, client, object)?.interleave = level;
        }
        0xa06f_0103 => channel(call, client, object)?.scheduled = block.u8(0) != 0,
        0xa06f_0112 => channel(call, client, object)?.scheduled = false,
        0xc36f_0108 => {
            let id = channel(call, client, object)?.id;
            block.set_u32(0, id);
        }
        0x906f_0101 => class_engine(call, client, block)?,
        _ => {}
    }
    Ok(())
}

fn channels<'a>(call: &'a Call<'_>) -> impl Iterator<Item = (u32, u32, &'a Channel)> {
    call.state.clients.iter().flat_map(|(client, owner)| {
        owner.objects.iter().filter_map(|(handle, object)| Some((*client, *handle, as_channel(object)?)))
    })
}

fn as_channel(object: &Object) -> Option<&Channel> {
    match &object.detail {
        Detail::Channel(channel) => Some(channel),
        _ => None,
    }
}

fn channel<'a>(call: &'a mut Call<'_>, client: u32, handle: u32) -> Result<&'a mut Channel, Status> {
    match call.state.object_mut(client, handle).map(|object| &mut object.detail) {
        Some(Detail::Channel(channel)) => Ok(channel),
        Some(_) => Err(Status::INVALID_CHANNEL),
        None => Err(Status::OBJECT_NOT_FOUND),
    }
}

fn group<'a>(call: &'a mut Call<'_>, client: u32, handle: u32) -> Result<&'a mut Group, Status> {
    match call.state.object_mut(client, handle).map(|object| &mut object.detail) {
        Some(Detail::Group(group)) => Ok(group),
        Some(_) => Err(Status::INVALID_CHANNEL),
        None => Err(Status::OBJECT_NOT_FOUND),
    }
}

/// The driver asks nobody whose channels they are.
fn disable_channels(call: &mut Call<'_>, block: &Bytes) -> Result<(), Status> {
    const MOST: u32 = 64;
    let (disable, count) = (block.u8(0) != 0, block.u32(4));
    if block.u64(16) != 0 {
        return Err(Status::INSUFFICIENT_PERMISSIONS);
    }
    if count > MOST {
        return Err(Status::INVALID_ARGUMENT);
    }
    let count = usize::try_from(count).unwrap_or(0);
    let named: Vec<(u32, u32)> =
        (0..count).map(|i| (block.u32(24 + i * 4), block.u32(280 + i * 4))).collect();
    for (client, handle) in named {
        if client != 0 {
            channel(call, client, handle).map_err(|_| Status::INVALID_CHANNEL)?.disabled = disable;
        }
    }
    Ok(())
}

/// Answers for anybody's channel or group.
fn unique_ids(call: &Call<'_>, block: &mut Bytes) -> Result<(), Status> {
    const MOST: usize = 128;
    let (client, handle) = (block.u32(0), block.u32(4));
    let owner = call.state.clients.get(&client).ok_or(Status::INVALID_OBJECT_HANDLE)?;
    let object = owner.objects.get(&handle).ok_or(Status::OBJECT_NOT_FOUND)?;
    let group = match object.detail {
        Detail::Group(_) => handle,
        Detail::Channel(_) => object.parent,
        Detail::Plain | Detail::Memory(_) => return Err(Status::OBJECT_NOT_FOUND),
    };
    let ids: Vec<u32> = owner
        .objects
        .iter()
        .filter(|(at, object)| object.parent == group || **at == handle)
        .filter_map(|(_, object)| as_channel(object).map(|channel| channel.id))
        .take(MOST)
        .collect();
    block.set_u32(8, ids.first().copied().unwrap_or(0));
    block.set_u32(12, u32::try_from(ids.len()).unwrap_or(0));
    for (i, id) in ids.iter().enumerate() {
        block.set_u32(16 + i * 4, *id);
    }
    Ok(())
}

fn channel_list(call: &Call<'_>, client: u32, block: &Bytes) -> Result<(), Status> {
    const MOST: u32 = 4096;
    let count = block.u32(0);
    if count == 0 || count > MOST {
        return Err(Status::INVALID_ARGUMENT);
    }
    let length = usize::try_from(count).unwrap_or(0).saturating_mul(4);
    let handles = call.read(block.u64(8), length)?;
    let mut ids = Bytes::zeroed(length);
    for at in (0..length).step_by(4) {
        let object = call.state.object(client, handles.u32(at)).ok_or(Status::OBJECT_NOT_FOUND)?;
        ids.set_u32(at, as_channel(object).ok_or(Status::INVALID_CHANNEL)?.id);
    }
    call.write(block.u64(16), &ids)
}

fn class_engine(call: &Call<'_>, client: u32, block: &mut Bytes) -> Result<(), Status> {
    let object = call.state.object(client, block.u32(0)).ok_or(Status::OBJECT_NOT_FOUND)?;
    let parent = call.state.object(client, object.parent);
    let engine = parent.and_then(as_channel).map_or(1, |channel| channel.engine);
    let class = object.class;
    block.set_u32(4, class);
    block.set_u32(8, class);
    block.set_u32(12, engine);
    Ok(())
}
