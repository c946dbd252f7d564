//! CPU mappings: RM_MAP_MEMORY, RM_UNMAP_MEMORY and what the caller gets to mmap.
//!
//! In the kernel a mapping's context is stored in the file behind `fd`; here that file is replaced by a memfd
//! with the memory's contents, so that every mapping shows its own memory at offset 0 and mmap stays native.
//! The memfd carries a mark that lasts until its last close or munmap, as the real context does.
//! Rules mirrored: only the process that made the client maps; one context per file; unmapping and freeing take
//! no page away from the process, which is recorded as a violation where it happens with card memory.

use std::os::fd::{AsFd, OwnedFd};

use crate::bytes::Bytes;
use crate::call::{Call, Install};
use crate::files;
use crate::memory::MemoryId;
use crate::state::{CpuMapping, Object};
use crate::status::Status;
use crate::sys;

/// Address cookies start here; they are keys, not addresses.
const COOKIES: u64 = 0x7000_0000_0000;

/// `NV_ESC_RM_MAP_MEMORY`.
pub(crate) fn map(call: &mut Call<'_>, block: &mut Bytes) {
    let (client, handle) = (block.u32(0), block.u32(8));
    call.about.client = client;
    call.about.object = handle;
    let status = match try_map(call, block, client, handle) {
        Ok(cookie) => {
            block.set_u64(32, cookie);
            Status::OK
        }
        Err(status) => status,
    };
    call.about.status = Some(status.0);
    block.set_u32(40, status.0);
}

fn try_map(call: &mut Call<'_>, block: &Bytes, client: u32, handle: u32) -> Result<u64, Status> {
    let (device, offset, length, fd) = (block.u32(4), block.u64(16), block.u64(24), block.i32(48));
    let owner = call.state.client(client, call.file, Status::INVALID_CLIENT)?;
    let (owner_pid, control) = (owner.pid, owner.file);
    let object = owner.objects.get(&handle).ok_or(Status::OBJECT_NOT_FOUND)?;
    let parent = owner.objects.get(&device).ok_or(Status::OBJECT_NOT_FOUND)?;
    if !matches!(parent.kind, "Device" | "Subdevice") {
        return Err(Status::INVALID_OBJECT_PARENT);
    }
    let memory = mappable(object).ok_or(Status::NOT_SUPPORTED)?;
    let size = call.state.store.find(memory).map_or(0, |one| one.size);
    let end = offset.checked_add(length).ok_or(Status::INVALID_LIMIT)?;
    if length == 0 || end > size {
        return Err(Status::INVALID_LIMIT);
    }
    if owner_pid != call.caller.pid {
        return Err(Status::INVALID_CLIENT);
    }
    let (file, _) = call.file_behind(fd).map_err(|_| Status::INVALID_ARGUMENT)?;
    let open = call.state.files.find_mut(file).ok_or(Status::INVALID_ARGUMENT)?;
    if open.mapping || !open.exports.is_empty() {
        return Err(Status::STATE_IN_USE);
    }
    open.mapping = true;
    let number = call.state.mapping_id();
    let handed = hand_out(call, control, memory, offset, length, number)?;
    call.install = Some(Install { at: fd, file: handed });
    let cookie = COOKIES.wrapping_add(number << 21);
    if let Some(object) = call.state.object_mut(client, handle) {
        object.mappings.push((cookie, number));
    }
    Ok(cookie)
}

fn mappable(object: &Object) -> Option<MemoryId> {
    object.memory()
}

fn hand_out(
    call: &mut Call<'_>,
    control: crate::files::FileId,
    memory: MemoryId,
    offset: u64,
    length: u64,
    number: u64,
) -> Result<OwnedFd, Status> {
    let page = length.checked_next_multiple_of(4096).ok_or(Status::INVALID_LIMIT)?;
    let contents = call.state.store.contents(memory, offset & !4095, page)?;
    let probe = contents.try_clone().map_err(|_| Status::NO_MEMORY)?;
    let handed = sys::reopen(contents.as_fd()).map_err(|_| Status::NO_MEMORY)?;
    let at = i64::try_from(number).map_err(|_| Status::NO_MEMORY)?;
    files::mark(&handed, at).map_err(|_| Status::NO_MEMORY)?;
    call.state.mappings.insert(number, CpuMapping::new(control, memory, length, probe));
    Ok(OwnedFd::from(handed))
}

/// `NV_ESC_RM_UNMAP_MEMORY`: by the address cookie.
pub(crate) fn unmap(call: &mut Call<'_>, block: &mut Bytes) {
    let (client, handle, cookie) = (block.u32(0), block.u32(8), block.u64(16));
    call.about.client = client;
    call.about.object = handle;
    let status = try_unmap(call, client, handle, cookie).err().unwrap_or(Status::OK);
    call.about.status = Some(status.0);
    block.set_u32(24, status.0);
}

fn try_unmap(call: &mut Call<'_>, client: u32, handle: u32, cookie: u64) -> Result<(), Status> {
    let owner = call.state.client(client, call.file, Status::INVALID_CLIENT)?;
    let object = owner.objects.get_mut(&handle).ok_or(Status::OBJECT_NOT_FOUND)?;
    let at =
        object.mappings.iter().position(|(key, _)| *key == cookie).ok_or(Status::INVALID_OBJECT_HANDLE)?;
    let (_, number) = object.mappings.remove(at);
    let what = format!("mapping of object {handle:#x} of client {client:#x} undone");
    call.state.check_stale(number, call.caller.pid, &what);
    Ok(())
}

/// `NV_ESC_RM_UPDATE_DEVICE_MAPPING_INFO`: the old key becomes the new one.
pub(crate) fn update(call: &mut Call<'_>, block: &mut Bytes) {
    let (client, handle, old, new) = (block.u32(0), block.u32(8), block.u64(16), block.u64(24));
    call.about.client = client;
    call.about.object = handle;
    let status = match call.state.client(client, call.file, Status::INVALID_CLIENT) {
        Ok(owner) => match owner.objects.get_mut(&handle) {
            Some(object) => {
                object.mappings.iter_mut().filter(|(key, _)| *key == old).for_each(|(key, _)| *key = new);
                Status::OK
            }
            None => Status::OBJECT_NOT_FOUND,
        },
        Err(status) => status,
    };
    call.about.status = Some(status.0);
    block.set_u32(32, status.0);
}

/// `NV_ESC_RM_MAP_MEMORY_DMA`: into a GPU address space; the emulator checks the handles only.
pub(crate) fn map_dma(call: &mut Call<'_>, block: &mut Bytes) {
    let status = check_dma(call, block).err().unwrap_or(Status::OK);
    call.about.status = Some(status.0);
    block.set_u32(56, status.0);
}

fn check_dma(call: &mut Call<'_>, block: &Bytes) -> Result<(), Status> {
    let client = block.u32(0);
    call.about.client = client;
    let owner = call.state.client(client, call.file, Status::INVALID_OBJECT_HANDLE)?;
    for at in [4, 8, 12] {
        owner.objects.get(&block.u32(at)).ok_or(Status::OBJECT_NOT_FOUND)?;
    }
    Ok(())
}

/// `NV_ESC_RM_UNMAP_MEMORY_DMA`.
pub(crate) fn unmap_dma(call: &mut Call<'_>, block: &mut Bytes) {
    let status = check_dma(call, block).err().unwrap_or(Status::OK);
    call.about.status = Some(status.0);
    block.set_u32(40, status.0);
}
