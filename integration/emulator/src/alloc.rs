//! Allocation of objects: RM_ALLOC, the legacy memory escape and the heap escape.
//!
//! Mirrors driver 580: the class names the size of its parameters (paramsSize is ignored), then privilege,
//! client, parent, chip support, allowed parents and handle are checked in that order, then the object is made.

use nix::errno::Errno;

use crate::bytes::Bytes;
use crate::call::Call;
use crate::memory::{Place, rounded};
use crate::nodes::Node;
use crate::state::{Channel, Detail, Group, Object};
use crate::status::Status;
use crate::table::{self, Class, Parameters, Privilege};

/// GPU memory that the driver takes for a graphics channel group: context buffers.
const GROUP_BYTES: u64 = 15 << 19;
/// GPU memory that the driver takes for a channel: instance block, RAMFC, method buffers.
const CHANNEL_BYTES: u64 = 64 << 10;
/// Size of a doorbell page.
const DOORBELL_BYTES: u64 = 64 << 10;
/// Host page.
const HOST_PAGE: u64 = 4096;
/// Most device instances.
const MAX_DEVICES: u32 = 32;

/// Handles that every allocation carries.
#[derive(Clone, Copy, Debug)]
struct Names {
    client: u32,
    parent: u32,
    new: u32,
}

/// `NV_ESC_RM_ALLOC`, both forms.
///
/// # Errors
/// EINVAL: not on this node.
pub(crate) fn rm_alloc(call: &mut Call<'_>, block: &mut Bytes) -> Result<(), Errno> {
    let status_at = if block.len() == 48 { 40 } else { 28 };
    let id = block.u32(12);
    let is_event = matches!(id, 5 | 0x78 | 0x79 | 0x7e);
    if call.node != Node::Control && !is_event {
        return Err(Errno::EINVAL);
    }
    let is_root = matches!(id, 0 | 1 | 0x41);
    let names = Names { client: block.u32(0), parent: block.u32(4), new: block.u32(8) };
    call.about.what = Some(id);
    call.about.client = names.client;
    call.about.object = names.new;
    let pointer = block.u64(16);
    let result = if is_root { root(call, names.new, pointer) } else { object(call, id, names, pointer) };
    if is_root {
        block.set_u32(12, 0x41);
    }
    let status = match result {
        Ok(handle) => {
            block.set_u32(8, handle);
            call.about.object = handle;
            Status::OK
        }
        Err(status) => status,
    };
    call.about.status = Some(status.0);
    block.set_u32(status_at, status.0);
    Ok(())
}

fn root(call: &mut Call<'_>, wanted: u32, pointer: u64) -> Result<u32, Status> {
    let (pid, uid) = (call.caller.pid, call.caller.uid());
    let handle = call.state.create_client(wanted, call.file, pid, uid)?;
    call.about.client = handle;
    if pointer != 0 {
        let mut out = Bytes::zeroed(4);
        out.set_u32(0, handle);
        if let Err(status) = call.write(pointer, &out) {
            call.state.free(handle, handle, pid);
            return Err(status);
        }
    }
    Ok(handle)
}

fn object(call: &mut Call<'_>, id: u32, names: Names, pointer: u64) -> Result<u32, Status> {
    let class = table::class(id).ok_or(Status::INVALID_CLASS)?;
    let size = usize::try_from(class.size).map_err(|_| Status::INVALID_CLASS)?;
    let given = pointer != 0 && class.parameters != Parameters::None;
    if !given && class.parameters == Parameters::Required {
        return Err(Status::INVALID_ARGUMENT);
    }
    let mut parameters = if given { call.read(pointer, size)? } else { Bytes::zeroed(size) };
    let allowed = class.privilege == Privilege::Any || (class.privilege == Privilege::Root && call.admin());
    if !allowed {
        return Err(Status::INSUFFICIENT_PERMISSIONS);
    }
    let handle = make(call, class, names, &mut parameters, given)?;
    if given {
        call.write(pointer, &parameters).inspect_err(|_| {
            call.state.free(names.client, handle, call.caller.pid);
        })?;
    }
    Ok(handle)
}

fn make(
    call: &mut Call<'_>,
    class: &'static Class,
    names: Names,
    parameters: &mut Bytes,
    given: bool,
) -> Result<u32, Status> {
    let client = call.state.client(names.client, call.file, Status::INVALID_OBJECT_HANDLE)?;
    let parent = client.objects.get(&names.parent).ok_or(Status::OBJECT_NOT_FOUND)?;
    let (parent_kind, parent_gpu) = (parent.kind, parent.gpu);
    if names.new == names.client {
        return Err(Status::INVALID_OBJECT_HANDLE);
    }
    if client.objects.contains_key(&names.new) {
        return Err(Status::INSERT_DUPLICATE_NAME);
    }
    if let Some(gpu) = parent_gpu.and_then(|index| call.state.gpus.get(index)) {
        if gpu.lost {
            return Err(Status::GPU_IS_LOST);
        }
        if chip_decides(class.kind) && !gpu.model.classes.contains(&class.id) {
            return Err(Status::NOT_SUPPORTED);
        }
    }
    let any_parent = class.parents.contains(&"RS_ANY_PARENT");
    if !any_parent && !class.parents.contains(&parent_kind) {
        return Err(Status::INVALID_OBJECT_PARENT);
    }
    let mut made = Object::new(class.id, class.kind, names.parent, parent_gpu);
    if let Err(status) = construct(call, class, names, parameters, given, &mut made) {
        made.held.into_iter().for_each(|id| call.state.store.release(id));
        return Err(status);
    }
    call.state.insert(names.client, names.new, made)
}

/// Kinds of object that a chip has in one generation's form only.
fn chip_decides(kind: &str) -> bool {
    matches!(
        kind,
        "KernelChannel" | "KernelGraphicsObject" | "KernelCeContext" | "UserModeApi" | "Sec2Context"
    )
}

fn construct(
    call: &mut Call<'_>,
    class: &Class,
    names: Names,
    parameters: &mut Bytes,
    given: bool,
    made: &mut Object,
) -> Result<(), Status> {
    check_owner(class.kind, parameters)?;
    match class.kind {
        "Device" => device(call, parameters, given, made),
        "Subdevice" => {
            if parameters.u32(0) == 0 {
                Ok(())
            } else {
                Err(Status::INVALID_ARGUMENT)
            }
        }
        "VideoMemory" => card_memory(call, names.client, parameters, made),
        "SystemMemory" | "NoDeviceMemory" => host_memory(call, names.client, parameters, made),
        "VirtualMemory" => depend(call, names.client, parameters.u32(108), made),
        "VirtualMemoryRange" => depend(call, names.client, parameters.u32(16), made),
        "GpuUserSharedData" => host_pages(call, HOST_PAGE, names.client, made),
        "UserModeApi" => host_pages(call, DOORBELL_BYTES, names.client, made),
        "KernelChannelGroupApi" => group(call, names.client, parameters, made),
        "KernelCtxShareApi" => depend(call, names.client, parameters.u32(0), made),
        "KernelChannel" => channel(call, names, parameters, made),
        "Event" => event(call, names, class.id, parameters),
        "KernelSMDebuggerSession" => debugger(call, parameters),
        "MIGConfigSession" | "MIGMonitorSession" if !call.admin() => Err(Status::INSUFFICIENT_PERMISSIONS),
        "SemaphoreSurface" | "ContextDma" => {
            let at = if class.id == 2 { 8 } else { 0 };
            let memory = call.state.object(names.client, parameters.u32(at)).and_then(Object::memory);
            let memory = memory.ok_or(Status::OBJECT_NOT_FOUND)?;
            call.state.store.retain(memory);
            made.held.push(memory);
            Ok(())
        }
        "VaSpaceApi"
        | "MIGConfigSession"
        | "MIGMonitorSession"
        | "KernelGraphicsObject"
        | "KernelCeContext"
        | "Sec2Context"
        | "BinaryApi"
        | "BinaryApiPrivileged"
        | "DiagApi"
        | "GenericEngineApi"
        | "ConfidentialComputeApi"
        | "ThirdPartyP2P"
        | "P2PApi"
        | "DeferredApiObject"
        | "TimerApi"
        | "EventBuffer"
        | "ZbcApi"
        | "SoftwareMethodTest" => Ok(()),
        _ => Err(Status::NOT_SUPPORTED),
    }
}

/// Memory of the heap has a size and an owner, any number but 0 and all ones.
fn check_owner(kind: &str, parameters: &Bytes) -> Result<(), Status> {
    if !matches!(kind, "VideoMemory" | "SystemMemory" | "VirtualMemory") {
        return Ok(());
    }
    match (parameters.u64(64), parameters.u32(0)) {
        (0, _) => Err(Status::INVALID_ARGUMENT),
        (_, 0 | u32::MAX) => Err(Status::INVALID_OWNER),
        _ => Ok(()),
    }
}

fn device(call: &mut Call<'_>, parameters: &Bytes, given: bool, made: &mut Object) -> Result<(), Status> {
    let instance = parameters.u32(0);
    if !given || instance >= MAX_DEVICES {
        return Err(Status::INVALID_ARGUMENT);
    }
    let index = call.state.gpus.iter().position(|gpu| gpu.instance == instance && !gpu.lost);
    let index = index.ok_or(Status::INVALID_STATE)?;
    if !call.holds_gpu(index) {
        return Err(Status::INSUFFICIENT_PERMISSIONS);
    }
    made.gpu = Some(index);
    Ok(())
}

fn owner(call: &Call<'_>, client: u32) -> u32 {
    call.state.clients.get(&client).map_or(0, |client| client.pid)
}

fn card_memory(
    call: &mut Call<'_>,
    client: u32,
    parameters: &mut Bytes,
    made: &mut Object,
) -> Result<(), Status> {
    let (attr, attr2, size) = (parameters.u32(24), parameters.u32(28), parameters.u64(64));
    if (attr >> 25) & 3 != 0 || size == 0 {
        return Err(Status::INVALID_ARGUMENT);
    }
    let size = rounded(size, attr, attr2).ok_or(Status::NO_MEMORY)?;
    let index = made.gpu.ok_or(Status::INVALID_OBJECT_PARENT)?;
    let taken = call.state.store.used(index);
    let owner = owner(call, client);
    let memory = call.state.store.allocate(Place::Card(index), size, owner)?;
    made.held.push(memory);
    made.detail = Detail::Memory(memory);
    parameters.set_u64(64, size);
    parameters.set_u64(80, taken);
    parameters.set_u64(88, size.wrapping_sub(1));
    parameters.set_u64(96, 0);
    Ok(())
}

fn host_memory(
    call: &mut Call<'_>,
    client: u32,
    parameters: &mut Bytes,
    made: &mut Object,
) -> Result<(), Status> {
    let (attr, size) = (parameters.u32(24), parameters.u64(64));
    if (attr >> 25) & 3 == 0 || size == 0 {
        return Err(Status::INVALID_ARGUMENT);
    }
    let size = size.checked_next_multiple_of(HOST_PAGE).ok_or(Status::NO_MEMORY)?;
    host_pages(call, size, client, made)?;
    parameters.set_u64(64, size);
    parameters.set_u64(88, size.wrapping_sub(1));
    parameters.set_u64(96, 0);
    Ok(())
}

fn host_pages(call: &mut Call<'_>, size: u64, client: u32, made: &mut Object) -> Result<(), Status> {
    let owner = owner(call, client);
    let memory = call.state.store.allocate(Place::Host, size, owner)?;
    made.held.push(memory);
    made.detail = Detail::Memory(memory);
    Ok(())
}

fn depend(call: &Call<'_>, client: u32, on: u32, made: &mut Object) -> Result<(), Status> {
    if on == 0 {
        return Ok(());
    }
    call.state.object(client, on).ok_or(Status::OBJECT_NOT_FOUND)?;
    made.depends.push(on);
    Ok(())
}

/// Holds the memory behind an error notifier or another object named by handle.
fn hold(call: &mut Call<'_>, client: u32, handle: u32, made: &mut Object) -> Result<(), Status> {
    if handle == 0 {
        return Ok(());
    }
    let found = call.state.object(client, handle).ok_or(Status::OBJECT_NOT_FOUND)?;
    let Some(memory) = found.memory().or_else(|| found.held.first().copied()) else { return Ok(()) };
    call.state.store.retain(memory);
    made.held.push(memory);
    Ok(())
}

fn group(call: &mut Call<'_>, client: u32, parameters: &Bytes, made: &mut Object) -> Result<(), Status> {
    let engine = parameters.u32(12);
    hold(call, client, parameters.u32(0), made)?;
    depend(call, client, parameters.u32(8), made)?;
    let index = made.gpu.ok_or(Status::INVALID_OBJECT_PARENT)?;
    if engine == 1 {
        made.held.push(call.state.store.allocate(Place::Card(index), GROUP_BYTES, 0)?);
    }
    let timeslice = if engine == 1 { 2048 } else { 1024 };
    made.detail = Detail::Group(Group { engine, timeslice, interleave: 0, scheduled: false });
    Ok(())
}

fn channel(call: &mut Call<'_>, names: Names, parameters: &Bytes, made: &mut Object) -> Result<(), Status> {
    let client = names.client;
    let group_engine = match call.state.object(client, names.parent).map(|parent| &parent.detail) {
        Some(Detail::Group(group)) => Some(group.engine),
        _ => None,
    };
    hold(call, client, parameters.u32(0), made)?;
    depend(call, client, parameters.u32(24), made)?;
    depend(call, client, parameters.u32(28), made)?;
    let (userd, offset) = (parameters.u32(32), parameters.u64(64));
    let userd = if userd == 0 {
        None
    } else {
        let memory =
            call.state.object(client, userd).and_then(Object::memory).ok_or(Status::OBJECT_NOT_FOUND)?;
        let size = call.state.store.find(memory).map_or(0, |one| one.size);
        if !offset.is_multiple_of(512) || offset.checked_add(512).is_none_or(|end| end > size) {
            return Err(Status::INVALID_ARGUMENT);
        }
        call.state.store.retain(memory);
        made.held.push(memory);
        Some((memory, offset))
    };
    let index = made.gpu.ok_or(Status::INVALID_OBJECT_PARENT)?;
    made.held.push(call.state.store.allocate(Place::Card(index), CHANNEL_BYTES, 0)?);
    made.detail = Detail::Channel(Channel {
        id: call.state.channel_id(),
        engine: group_engine.unwrap_or_else(|| parameters.u32(128)),
        userd,
        scheduled: false,
        disabled: false,
        privileged: call.admin(),
        consumed: 0,
    });
    Ok(())
}

/// Source 0 means the parent. The driver writes a kernel address into the parameters; this one says so.
fn event(call: &Call<'_>, names: Names, class: u32, parameters: &mut Bytes) -> Result<(), Status> {
    const KERNEL_ADDRESS: u64 = 0xffff_8881_0000_0000;
    if class == 0x78 || class == 0x7e {
        return Err(Status::ILLEGAL_ACTION);
    }
    if parameters.u32(4) == 0 {
        parameters.set_u32(4, names.parent);
    }
    let source = call.state.object(parameters.u32(0), parameters.u32(4));
    source.ok_or(Status::INVALID_OBJECT)?;
    let number = parameters.u32(16);
    let matched = call.state.os_events.iter().any(|event| event.client == names.client && event.fd == number);
    parameters.set_u64(16, KERNEL_ADDRESS | u64::from(number));
    if matched { Ok(()) } else { Err(Status::OBJECT_NOT_FOUND) }
}

fn debugger(call: &Call<'_>, parameters: &Bytes) -> Result<(), Status> {
    let (client, handle) = (parameters.u32(4), parameters.u32(8));
    let target = call.state.clients.get(&client).ok_or(Status::INVALID_OBJECT_HANDLE)?;
    target.objects.get(&handle).ok_or(Status::OBJECT_NOT_FOUND)?;
    let same = target.pid == call.caller.pid || target.uid == call.caller.uid();
    if same || call.admin() { Ok(()) } else { Err(Status::INSUFFICIENT_PERMISSIONS) }
}

/// `NV_ESC_RM_ALLOC_MEMORY`: host memory, virtual ranges, and pages of the caller pinned for the card.
///
/// # Errors
/// None beyond those of the shape check.
pub(crate) fn legacy_memory(call: &mut Call<'_>, block: &mut Bytes) -> Result<(), Errno> {
    let names = Names { client: block.u32(0), parent: block.u32(4), new: block.u32(8) };
    call.about.what = Some(block.u32(12));
    call.about.client = names.client;
    call.about.object = names.new;
    let status = match legacy(call, block, names) {
        Ok(handle) => {
            block.set_u32(8, handle);
            Status::OK
        }
        Err(status) => status,
    };
    call.about.status = Some(status.0);
    block.set_u32(40, status.0);
    Ok(())
}

fn legacy(call: &mut Call<'_>, block: &mut Bytes, names: Names) -> Result<u32, Status> {
    let (id, address, limit) = (block.u32(12), block.u64(24), block.u64(32));
    let class = table::class(id).ok_or(Status::INVALID_CLASS)?;
    let client = call.state.client(names.client, call.file, Status::INVALID_OBJECT_HANDLE)?;
    let parent = client.objects.get(&names.parent).ok_or(Status::OBJECT_NOT_FOUND)?;
    if !class.parents.contains(&parent.kind) {
        return Err(Status::INVALID_OBJECT_PARENT);
    }
    let mut made = Object::new(id, class.kind, names.parent, parent.gpu);
    let size = limit.checked_add(1).ok_or(Status::INVALID_ARGUMENT)?;
    match id {
        0x3e => host_pages(call, size.next_multiple_of(HOST_PAGE), names.client, &mut made)?,
        0x70 => {}
        0x40 => {
            let index = made.gpu.ok_or(Status::INVALID_OBJECT_PARENT)?;
            block.set_u64(32, call.state.store.size(index).wrapping_sub(1));
        }
        0x71 => {
            let pid = call.caller.pid;
            let first = address & !(HOST_PAGE - 1);
            let end = address.checked_add(size).ok_or(Status::INVALID_ARGUMENT)?;
            let length = end.wrapping_sub(first);
            if !call.caller.mapped(first, length) || call.caller.populate(first, length).is_err() {
                return Err(Status::INVALID_ADDRESS);
            }
            let memory = call.state.store.allocate(Place::Pinned { pid, address }, size, pid)?;
            made.held.push(memory);
            made.detail = Detail::Memory(memory);
        }
        _ if class.privilege != Privilege::Any && !call.admin() => {
            return Err(Status::INSUFFICIENT_PERMISSIONS);
        }
        _ => return Err(Status::INVALID_CLASS),
    }
    call.state.insert(names.client, names.new, made)
}

/// `NV_ESC_RM_VID_HEAP_CONTROL`: allocate by size, free, and the heap's size.
pub(crate) fn heap_control(call: &mut Call<'_>, block: &mut Bytes) {
    let (client, parent, function) = (block.u32(0), block.u32(4), block.u32(8));
    call.about.what = Some(function);
    call.about.client = client;
    let status = heap(call, block, Names { client, parent, new: block.u32(44) }, function);
    let status = status.err().unwrap_or(Status::OK);
    call.about.status = Some(status.0);
    block.set_u32(20, status.0);
}

fn heap(call: &mut Call<'_>, block: &mut Bytes, names: Names, function: u32) -> Result<(), Status> {
    let client = call.state.client(names.client, call.file, Status::INVALID_OBJECT_HANDLE)?;
    let parent = client.objects.get(&names.parent).ok_or(Status::OBJECT_NOT_FOUND)?;
    let index = parent.gpu.ok_or(Status::INVALID_OBJECT_PARENT)?;
    match function {
        2 => {
            let attr = block.u32(56);
            let kind = if (attr >> 25) & 3 == 0 { "VideoMemory" } else { "SystemMemory" };
            let mut made =
                Object::new(if kind == "VideoMemory" { 0x40 } else { 0x3e }, kind, names.parent, Some(index));
            let mut parameters = Bytes::zeroed(128);
            parameters.set_u32(24, attr);
            parameters.set_u32(28, block.u32(144));
            parameters.set_u64(64, block.u64(88));
            match kind {
                "VideoMemory" => card_memory(call, names.client, &mut parameters, &mut made)?,
                _ => host_memory(call, names.client, &mut parameters, &mut made)?,
            }
            let handle = call.state.insert(names.client, names.new, made)?;
            block.set_u32(44, handle);
            block.set_u64(88, parameters.u64(64));
            block.set_u64(112, parameters.u64(88));
        }
        3 => call.state.free(names.client, names.new, call.caller.pid),
        5 => {}
        _ => return Err(Status::NOT_SUPPORTED),
    }
    let (size, used) = (call.state.store.size(index), call.state.store.used(index));
    block.set_u64(24, size);
    block.set_u64(32, size.saturating_sub(used));
    Ok(())
}
