//! Objects in more than one place: duplicates, share policies, exports to files and imports from them.
//!
//! Rules mirrored: a duplicate is allowed where source and target client were made by the same process; an
//! export lives until its file closes, whatever becomes of the exporting client.

use crate::bytes::Bytes;
use crate::call::Call;
use crate::files::Export;
use crate::nodes::Node;
use crate::state::{Detail, Object};
use crate::status::Status;

/// `NV_ESC_RM_DUP_OBJECT`.
pub(crate) fn dup_object(call: &mut Call<'_>, block: &mut Bytes) {
    let (client, source) = (block.u32(0), block.u32(12));
    call.about.client = client;
    call.about.object = block.u32(8);
    let status = match duplicate(call, block, client, source) {
        Ok(handle) => {
            block.set_u32(8, handle);
            Status::OK
        }
        Err(status) => status,
    };
    call.about.status = Some(status.0);
    block.set_u32(24, status.0);
}

fn duplicate(call: &mut Call<'_>, block: &Bytes, client: u32, source: u32) -> Result<u32, Status> {
    let (parent, wanted, from) = (block.u32(4), block.u32(8), block.u32(16));
    let owner = call.state.clients.get(&source).ok_or(Status::INVALID_OBJECT_HANDLE)?;
    let (owner, owner_uid) = (owner.pid, owner.uid);
    let target = call.state.client(client, call.file, Status::INVALID_OBJECT_HANDLE)?;
    let (same_process, same_user) = (target.pid == owner, target.uid == owner_uid);
    let target_parent = target.objects.get(&parent).map(|object| object.gpu);
    let object = call.state.object(source, from).ok_or(Status::OBJECT_NOT_FOUND)?.clone();
    let parent_gpu = target_parent.ok_or(Status::OBJECT_NOT_FOUND)?;
    let copies = matches!(
        object.kind,
        "VideoMemory"
            | "SystemMemory"
            | "OsDescMemory"
            | "NoDeviceMemory"
            | "VaSpaceApi"
            | "Subdevice"
            | "Device"
    );
    if !copies {
        return Err(Status::INVALID_ARGUMENT);
    }
    let shared = object.shared.all
        || (object.shared.user && same_user)
        || object.shared.client.is_some_and(|named| named == client);
    if !same_process && !shared {
        return Err(Status::INSUFFICIENT_PERMISSIONS);
    }
    let mut copy = Object::new(object.class, object.kind, parent, parent_gpu.or(object.gpu));
    if let Some(memory) = object.memory() {
        call.state.store.retain(memory);
        copy.held.push(memory);
        copy.detail = Detail::Memory(memory);
    }
    call.state.insert(client, wanted, copy)
}

/// `NV_ESC_RM_SHARE`: sets or takes back a policy for an object of the client's own.
pub(crate) fn share(call: &mut Call<'_>, block: &mut Bytes) {
    let (client, handle) = (block.u32(0), block.u32(4));
    call.about.client = client;
    call.about.object = handle;
    let status = set_policy(call, block, client, handle).err().unwrap_or(Status::OK);
    call.about.status = Some(status.0);
    block.set_u32(20, status.0);
}

fn set_policy(call: &mut Call<'_>, block: &Bytes, client: u32, handle: u32) -> Result<(), Status> {
    const DUPLICATE: u32 = 1;
    const REVOKE: u8 = 1;
    let (target, rights, kind, action) = (block.u32(8), block.u32(12), block.u16(16), block.u8(18));
    let owner = call.state.client(client, call.file, Status::INVALID_OBJECT_HANDLE)?;
    let object = owner.objects.get_mut(&handle).ok_or(Status::OBJECT_NOT_FOUND)?;
    if kind > 7 {
        return Err(Status::INVALID_ARGUMENT);
    }
    let granted = action & REVOKE == 0;
    if rights & DUPLICATE != 0 {
        match kind {
            1 => object.shared.all = granted,
            2 => object.shared.user = granted,
            3 => object.shared.client = granted.then_some(target),
            _ => {}
        }
    }
    Ok(())
}

/// Control 0x3d05: export of one object to a file of the driver's.
///
/// # Errors
/// The driver's status.
pub(crate) fn export(call: &mut Call<'_>, client: u32, parameters: &mut Bytes) -> Result<(), Status> {
    if parameters.u32(0) != 1 {
        return Err(Status::INVALID_ARGUMENT);
    }
    let export = exported(call, client, parameters.u32(12))?;
    put(call, parameters.i32(16), 0, export)
}

/// Control 0x3d0b: export of several.
///
/// # Errors
/// The driver's status.
pub(crate) fn export_many(call: &mut Call<'_>, client: u32, parameters: &mut Bytes) -> Result<(), Status> {
    const MOST: u16 = 512;
    let (count, first) = (parameters.u16(2124), parameters.u16(2126));
    if count > MOST {
        return Err(Status::INVALID_ARGUMENT);
    }
    for i in 0..count {
        let handle = parameters.u32(76 + 4 * usize::from(i));
        let export = exported(call, client, handle)?;
        put(call, parameters.i32(0), first.wrapping_add(i), export)?;
    }
    Ok(())
}

fn exported(call: &Call<'_>, client: u32, handle: u32) -> Result<Export, Status> {
    let object = call.state.object(client, handle).ok_or(Status::OBJECT_NOT_FOUND)?;
    let memory = object.memory().ok_or(Status::INVALID_OBJECT)?;
    let pid = call.state.clients.get(&client).map_or(0, |owner| owner.pid);
    Ok(Export { class: object.class, gpu: object.gpu, memory: vec![memory], pid })
}

fn put(call: &mut Call<'_>, fd: i32, slot: u16, export: Export) -> Result<(), Status> {
    let (file, node) = call.file_behind(fd).map_err(|_| Status::INVALID_ARGUMENT)?;
    if node != Node::Control {
        return Err(Status::INVALID_ARGUMENT);
    }
    let open = call.state.files.find_mut(file).ok_or(Status::INVALID_ARGUMENT)?;
    if open.exports.contains_key(&slot) {
        return Err(Status::STATE_IN_USE);
    }
    let memory = export.memory.clone();
    open.exports.insert(slot, export);
    memory.into_iter().for_each(|id| call.state.store.retain(id));
    Ok(())
}

fn take(call: &mut Call<'_>, fd: i32, slot: u16) -> Result<Export, Status> {
    let (file, _) = call.file_behind(fd).map_err(|_| Status::INVALID_ARGUMENT)?;
    let open = call.state.files.find(file).ok_or(Status::INVALID_ARGUMENT)?;
    open.exports.get(&slot).cloned().ok_or(Status::OBJECT_NOT_FOUND)
}

/// Control 0x3d06: import of one object.
///
/// # Errors
/// The driver's status.
pub(crate) fn import(call: &mut Call<'_>, client: u32, parameters: &mut Bytes) -> Result<(), Status> {
    let export = take(call, parameters.i32(0), 0)?;
    let (parent, wanted) = (parameters.u32(12), parameters.u32(16));
    let handle = place(call, client, parent, wanted, &export)?;
    parameters.set_u32(16, handle);
    Ok(())
}

/// Control 0x3d0c: import of several.
///
/// # Errors
/// The driver's status.
pub(crate) fn import_many(call: &mut Call<'_>, client: u32, parameters: &mut Bytes) -> Result<(), Status> {
    const MOST: u16 = 128;
    let (count, first) = (parameters.u16(648), parameters.u16(650));
    if count > MOST {
        return Err(Status::INVALID_ARGUMENT);
    }
    for i in 0..count {
        let at = 8 + 4 * usize::from(i);
        let export = take(call, parameters.i32(0), first.wrapping_add(i))?;
        let handle = place(call, client, parameters.u32(4), parameters.u32(at), &export)?;
        parameters.set_u32(at, handle);
        let kind = if export.class == 0x40 { 1 } else { 0 };
        parameters.set(520 + usize::from(i), &[kind]);
    }
    Ok(())
}

fn place(call: &mut Call<'_>, client: u32, parent: u32, wanted: u32, export: &Export) -> Result<u32, Status> {
    let parent_gpu = call.state.object(client, parent).ok_or(Status::OBJECT_NOT_FOUND)?.gpu;
    let kind = if export.class == 0x40 { "VideoMemory" } else { "SystemMemory" };
    let mut copy = Object::new(export.class, kind, parent, export.gpu.or(parent_gpu));
    let memory = *export.memory.first().ok_or(Status::INVALID_OBJECT)?;
    call.state.store.retain(memory);
    copy.held.push(memory);
    copy.detail = Detail::Memory(memory);
    call.state.insert(client, wanted, copy)
}

/// Control 0x3d08: what a file carries.
///
/// # Errors
/// The driver's status.
pub(crate) fn export_info(call: &mut Call<'_>, parameters: &mut Bytes) -> Result<(), Status> {
    let (file, _) = call.file_behind(parameters.i32(0)).map_err(|_| Status::INVALID_ARGUMENT)?;
    let open = call.state.files.find(file).ok_or(Status::INVALID_ARGUMENT)?;
    let first = open.exports.values().next().ok_or(Status::OBJECT_NOT_FOUND)?;
    let count = u16::try_from(open.exports.len()).unwrap_or(u16::MAX);
    let instance =
        first.gpu.and_then(|index| call.state.gpus.get(index)).map_or(u32::MAX, |gpu| gpu.instance);
    parameters.set_u32(4, instance);
    parameters.set_u32(8, u32::MAX);
    parameters.set_u16(12, count);
    Ok(())
}
