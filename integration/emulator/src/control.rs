//! RM_CONTROL: the checks in the driver's order, then the control itself.
//!
//! Mirrors driver 580: the client first, then size and pointer, the object, whether the object's class has the
//! control, the caller's privilege, and last the control. Firmware controls (bit 0x8000 of the number, and all of
//! class 0x2081) have no size check in the kernel; the firmware refuses what it doesn't know.

use crate::bytes::Bytes;
use crate::call::Call;
use crate::status::Status;
use crate::table::{self, Control, Privilege};
use crate::{control_client, control_gpu, control_runlist};

/// Longest parameter block accepted.
const MAX_PARAMETERS: u32 = 1 << 20;

/// A control on its way: client, object and the copied parameters.
#[derive(Debug)]
pub(crate) struct Request {
    /// The client.
    pub client: u32,
    /// The object.
    pub object: u32,
    /// The control.
    pub cmd: u32,
    /// Its parameters, copied in; copied out when the control succeeded.
    pub parameters: Bytes,
    /// Card of the object.
    pub gpu: Option<usize>,
}

/// `NV_ESC_RM_CONTROL`.
pub(crate) fn rm_control(call: &mut Call<'_>, block: &mut Bytes) {
    call.about.what = Some(block.u32(8));
    call.about.client = block.u32(0);
    call.about.object = block.u32(4);
    let status = control(call, block).err().unwrap_or(Status::OK);
    call.about.status = Some(status.0);
    block.set_u32(28, status.0);
}

fn control(call: &mut Call<'_>, block: &Bytes) -> Result<(), Status> {
    let (client, object, cmd, flags) = (block.u32(0), block.u32(4), block.u32(8), block.u32(12));
    let (pointer, size) = (block.u64(16), block.u32(24));
    if cmd & 0xffff == 0 {
        return Ok(());
    }
    if flags & 3 != 0 {
        return Err(Status::INVALID_ARGUMENT);
    }
    if !call.state.clients.contains_key(&client) {
        return Err(Status::INVALID_CLIENT);
    }
    let row = table::control(cmd);
    let firmware = is_firmware(cmd);
    let wrong_size = row.is_some_and(|row| row.size != size) && !firmware;
    if (size != 0) != (pointer != 0) || wrong_size || size > MAX_PARAMETERS {
        return Err(Status::INVALID_ARGUMENT);
    }
    let length = usize::try_from(size).map_err(|_| Status::INVALID_ARGUMENT)?;
    let parameters = call.read(pointer, length)?;
    let owner = call.state.client(client, call.file, Status::INVALID_CLIENT)?;
    let target = owner.objects.get(&object).ok_or(Status::OBJECT_NOT_FOUND)?;
    let gpu = target.gpu;
    let row = row.filter(|_| has_control(target.class, target.kind, cmd)).ok_or(Status::NOT_SUPPORTED)?;
    if firmware && row.size != size {
        return Err(Status::NOT_SUPPORTED);
    }
    check_privilege(call, row)?;
    if gpu.and_then(|index| call.state.gpus.get(index)).is_some_and(|gpu| gpu.lost) {
        return Err(Status::GPU_IS_LOST);
    }
    let mut request = Request { client, object, cmd, parameters, gpu };
    perform(call, &mut request)?;
    call.write(pointer, &request.parameters)
}

/// Whether the kernel passes this number to the firmware without looking at its size.
fn is_firmware(cmd: u32) -> bool {
    let class = cmd >> 16;
    class == 0x2081 || (matches!(class, 0x80 | 0x2080) && cmd & 0x8000 != 0)
}

/// Whether objects of this class take controls of the number's class.
fn has_control(class: u32, kind: &str, cmd: u32) -> bool {
    let group = cmd >> 16;
    match kind {
        "RmClientResource" => group == 0,
        "KernelChannel" => matches!(group, 0x506f | 0x906f | 0xa06f | 0xb06f | 0xc36f | 0xc56f | 0xc86f),
        "VideoMemory" | "SystemMemory" | "OsDescMemory" => group == 0x41,
        "BinaryApi" | "BinaryApiPrivileged" => matches!(group, 0x2081 | 0x2082),
        "DiagApi" => group == 0x208f,
        "KernelSMDebuggerSession" => group == 0x83de,
        _ => group == class,
    }
}

fn check_privilege(call: &Call<'_>, row: &Control) -> Result<(), Status> {
    let nice = control_runlist::needs_nice(row.cmd);
    let allowed = match row.privilege {
        Privilege::Any => !nice || call.admin() || call.caller.may_renice(),
        Privilege::Root => call.admin(),
        Privilege::Kernel => false,
    };
    if allowed { Ok(()) } else { Err(Status::INSUFFICIENT_PERMISSIONS) }
}

fn perform(call: &mut Call<'_>, request: &mut Request) -> Result<(), Status> {
    match request.cmd >> 16 {
        0 => control_client::perform(call, request),
        0x80 | 0x2080 if control_gpu::knows(request.cmd) => control_gpu::perform(call, request),
        0x80 | 0x2080 | 0xa06c | 0xa06f | 0xc36f | 0x906f => control_runlist::perform(call, request),
        0x90e7 if request.cmd == 0x90e7_0113 => Err(Status::NOT_READY),
        // Known by number and size, no behaviour to play: the block goes back as it came.
        _ => Ok(()),
    }
}

/// A list of {index, data} pairs behind a pointer: copied in, answered, copied out.
///
/// # Errors
/// [`Status::INVALID_ADDRESS`], [`Status::INVALID_ARGUMENT`] for a list too long.
pub(crate) fn pair_list(
    call: &Call<'_>,
    count: u32,
    pointer: u64,
    answer: impl Fn(u32) -> Option<u32>,
) -> Result<(), Status> {
    const MOST: u32 = 1024;
    if count > MOST {
        return Err(Status::OUT_OF_RANGE);
    }
    let length = usize::try_from(count).map_err(|_| Status::INVALID_ARGUMENT)?.saturating_mul(8);
    let mut list = call.read(pointer, length)?;
    fill_pairs(&mut list, 0, count, answer);
    call.write(pointer, &list)
}

/// Answers `count` {index, data} pairs that start at `at`.
pub(crate) fn fill_pairs(list: &mut Bytes, at: usize, count: u32, answer: impl Fn(u32) -> Option<u32>) {
    let mut at = at;
    for _ in 0..count {
        if let Some(data) = answer(list.u32(at)) {
            list.set_u32(at.saturating_add(4), data);
        }
        at = at.saturating_add(8);
    }
}
