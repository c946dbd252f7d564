//! The escapes of `/dev/nvidiactl` and `/dev/nvidiaN`: sizes, sides, and the ones that are not about objects.
//!
//! Mirrors nvidia_ioctl and RmIoctl of driver 580: the number is the low byte of the command whatever its type,
//! sizes are checked exactly, a failed check is EINVAL, and the block is copied out again also on failure.

use nix::errno::Errno;

use crate::bytes::Bytes;
use crate::call::Call;
use crate::nodes::Node;
use crate::state::OsEvent;
use crate::status::Status;
use crate::table::{self, Side, escape};
use crate::{alloc, control, mapping, share};

/// Longest block that XFER may carry.
const MAX_XFER: u32 = 16384;

/// Performs an escape whose parameters lie at `address`.
///
/// # Errors
/// The errno.
pub(crate) fn perform(call: &mut Call<'_>, cmd: u32, address: u64) -> Result<i32, Errno> {
    let mut nr = cmd & 0xff;
    let mut size = (cmd >> 16) & 0x3fff;
    let mut address = address;
    if nr == escape::IOCTL_XFER_CMD {
        if size != 16 {
            return Err(Errno::EINVAL);
        }
        let block = Bytes(call.caller.read(address, 16).map_err(|_| Errno::EFAULT)?);
        (nr, size, address) = (block.u32(0), block.u32(4), block.u64(8));
        if size > MAX_XFER {
            return Err(Errno::EINVAL);
        }
    }
    let length = usize::try_from(size).map_err(|_| Errno::EINVAL)?;
    let mut block = Bytes(call.caller.read(address, length).map_err(|_| Errno::EFAULT)?);
    let result = dispatch(call, nr, &mut block);
    call.caller.write(address, &block.0).map_err(|_| Errno::EFAULT)?;
    result.map(|()| 0)
}

fn check_shape(nr: u32, block: &Bytes, node: Node) -> Result<(), Errno> {
    let (size, side) = table::escape_shape(nr).ok_or(Errno::EINVAL)?;
    let fits = match nr {
        escape::RM_ALLOC => block.len() == 48 || block.len() == 32,
        escape::CARD_INFO => true,
        escape::ATTACH_GPUS_TO_FD => !block.is_empty() && block.len().is_multiple_of(4),
        escape::QUERY_DEVICE_INTR => block.len() >= size,
        _ => block.len() == size,
    };
    let right_node = match side {
        Side::Control => node == Node::Control,
        Side::Gpu => matches!(node, Node::Gpu(_)),
        Side::Any => true,
    };
    if fits && right_node { Ok(()) } else { Err(Errno::EINVAL) }
}

fn dispatch(call: &mut Call<'_>, nr: u32, block: &mut Bytes) -> Result<(), Errno> {
    check_shape(nr, block, call.node)?;
    if let Node::Gpu(minor) = call.node
        && call.state.gpus.iter().any(|gpu| gpu.minor == minor && gpu.lost)
        && nr != escape::WAIT_OPEN_COMPLETE
    {
        return Err(Errno::EINVAL);
    }
    match nr {
        escape::WAIT_OPEN_COMPLETE => block.set(0, &[0; 8]),
        escape::CARD_INFO => return card_info(call, block),
        escape::ATTACH_GPUS_TO_FD => return attach_gpus(call, block),
        escape::CHECK_VERSION_STR => return check_version(call, block),
        escape::SYS_PARAMS => return sys_params(call, block),
        escape::NUMA_INFO => numa_info(call, block),
        escape::SET_NUMA_STATUS if !call.admin() => return Err(Errno::EACCES),
        escape::REGISTER_FD => return register_fd(call, block),
        escape::ALLOC_OS_EVENT => alloc_os_event(call, block),
        escape::FREE_OS_EVENT => free_os_event(call, block),
        escape::RM_GET_EVENT_DATA => block.set_u32(12, Status::GENERIC.0),
        escape::RM_ALLOC => return alloc::rm_alloc(call, block),
        escape::RM_ALLOC_MEMORY => return alloc::legacy_memory(call, block),
        escape::RM_FREE => free(call, block),
        escape::RM_CONTROL => control::rm_control(call, block),
        escape::RM_DUP_OBJECT => share::dup_object(call, block),
        escape::RM_SHARE => share::share(call, block),
        escape::RM_MAP_MEMORY => mapping::map(call, block),
        escape::RM_UNMAP_MEMORY => mapping::unmap(call, block),
        escape::RM_UPDATE_DEVICE_MAPPING_INFO => mapping::update(call, block),
        escape::RM_VID_HEAP_CONTROL => alloc::heap_control(call, block),
        escape::RM_MAP_MEMORY_DMA => mapping::map_dma(call, block),
        escape::RM_UNMAP_MEMORY_DMA => mapping::unmap_dma(call, block),
        escape::RM_ACCESS_REGISTRY => registry(call, block),
        escape::RM_IDLE_CHANNELS => block.set_u32(48, Status::OK.0),
        escape::QUERY_DEVICE_INTR => block.set(0, &[0; 8]),
        _ => return Err(Errno::EINVAL),
    }
    Ok(())
}

fn card_info(call: &Call<'_>, block: &mut Bytes) -> Result<(), Errno> {
    const ENTRY: usize = 72;
    if block.len() / ENTRY < call.state.gpus.len() {
        return Err(Errno::EINVAL);
    }
    let length = block.len();
    *block = Bytes::zeroed(length);
    for (index, gpu) in call.state.gpus.iter().enumerate() {
        let at = index * ENTRY;
        block.set(at, &[1]);
        block.set(at + 8, &[gpu.bus, 0, 0]);
        block.set_u16(at + 12, 0x10de);
        block.set_u16(at + 14, gpu.model.device_id);
        block.set_u32(at + 16, gpu.id());
        block.set_u64(at + 40, 1 << 40);
        block.set_u64(at + 48, 1 << 38);
        block.set_u32(at + 56, gpu.minor);
    }
    Ok(())
}

fn attach_gpus(call: &mut Call<'_>, block: &Bytes) -> Result<(), Errno> {
    let wanted: Vec<u32> = (0..block.len() / 4).map(|i| block.u32(i * 4)).collect();
    let known = |id: &u32| *id == 0 || call.state.gpus.iter().any(|gpu| gpu.id() == *id && !gpu.lost);
    if !wanted.iter().all(known) {
        return Err(Errno::EINVAL);
    }
    let file = call.state.files.find_mut(call.file).ok_or(Errno::EINVAL)?;
    if !file.attached.is_empty() {
        return Err(Errno::EINVAL);
    }
    file.attached = wanted;
    Ok(())
}

fn check_version(call: &Call<'_>, block: &mut Bytes) -> Result<(), Errno> {
    const QUERY: u32 = b'2' as u32;
    const RELAXED: u32 = b'1' as u32;
    let text: Vec<u8> = block.slice(8, 64).into_iter().take_while(|byte| *byte != 0).collect();
    let same = text == call.state.version.as_bytes();
    let command = block.u32(0);
    block.set_u32(4, u32::from(same || command == QUERY));
    if command == QUERY || !same {
        block.set_text(8, 64, &call.state.version);
    }
    if same || command == QUERY || command == RELAXED { Ok(()) } else { Err(Errno::EINVAL) }
}

fn sys_params(call: &mut Call<'_>, block: &Bytes) -> Result<(), Errno> {
    let asked = block.u64(0);
    if call.state.memory_block == 0 {
        call.state.memory_block = asked;
    }
    if call.state.memory_block == asked { Ok(()) } else { Err(Errno::EBUSY) }
}

fn numa_info(call: &Call<'_>, block: &mut Bytes) {
    let length = block.len();
    *block = Bytes::zeroed(length);
    // No memory node: nid -1, status disabled.
    block.set_u32(0, u32::MAX);
    block.set_u64(8, call.state.memory_block);
}

fn register_fd(call: &mut Call<'_>, block: &Bytes) -> Result<(), Errno> {
    let (control, node) = call.file_behind(block.i32(0)).map_err(|_| Errno::EINVAL)?;
    let linked = call.state.files.find(control).is_some_and(|file| file.control.is_some());
    if node != Node::Control || control == call.file || linked {
        return Err(Errno::EINVAL);
    }
    let file = call.state.files.find_mut(call.file).ok_or(Errno::EINVAL)?;
    if file.control.is_some() {
        return Err(Errno::EINVAL);
    }
    file.control = Some(control);
    Ok(())
}

fn alloc_os_event(call: &mut Call<'_>, block: &mut Bytes) {
    let (client, fd) = (block.u32(0), block.u32(8));
    call.about.client = client;
    let taken = call.state.os_events.iter().any(|event| event.client == client && event.fd == fd);
    if !taken {
        call.state.os_events.push(OsEvent { client, fd, file: call.file });
    }
    let status = if taken { Status::INSUFFICIENT_RESOURCES } else { Status::OK };
    call.about.status = Some(status.0);
    block.set_u32(12, status.0);
}

fn free_os_event(call: &mut Call<'_>, block: &mut Bytes) {
    let (client, fd) = (block.u32(0), block.u32(8));
    call.about.client = client;
    let before = call.state.os_events.len();
    call.state.os_events.retain(|event| event.client != client || event.fd != fd);
    let status = if call.state.os_events.len() < before { Status::OK } else { Status::INVALID_EVENT };
    call.about.status = Some(status.0);
    block.set_u32(12, status.0);
}

/// The registry is the administrator's; this driver has no entries in it.
fn registry(call: &mut Call<'_>, block: &mut Bytes) {
    let client = block.u32(0);
    call.about.client = client;
    let admin = call.admin();
    let status = match call.state.client(client, call.file, Status::INVALID_CLIENT) {
        Err(status) => status,
        Ok(_) if !admin => Status::INSUFFICIENT_PERMISSIONS,
        Ok(_) => Status::OBJECT_NOT_FOUND,
    };
    call.about.status = Some(status.0);
    block.set_u32(64, status.0);
}

fn free(call: &mut Call<'_>, block: &mut Bytes) {
    let (client, handle) = (block.u32(0), block.u32(8));
    call.about.client = client;
    call.about.object = handle;
    let status = match call.state.client(client, call.file, Status::INVALID_OBJECT_HANDLE) {
        // Compatibility rule of the driver: freeing what does not exist succeeds.
        Ok(_) => {
            call.state.free(client, handle, call.caller.pid);
            Status::OK
        }
        Err(status) => status,
    };
    call.about.status = Some(status.0);
    block.set_u32(12, status.0);
}
