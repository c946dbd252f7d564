//! `RM_CONTROL`: the second dispatch, by control number.

use gpuslice_policy::row::{Control, ControlRule, Direction, Length, Pointer};
use gpuslice_policy::status;
use gpuslice_sys::Arg;
use nix::errno::Errno;

use crate::bytes::{get32, get64, index, put64};
use crate::dispatch::{Call, MOST_COPIED, Sandbox, Stop, Translated};
use crate::driver::{Done, Driver};
use crate::objects::Name;
use crate::own_client::{NR_CONTROL, escape_command};
use crate::refusals::Refused;

/// Fields of the command.
const CLIENT: u32 = 0;
const OBJECT: u32 = 4;
const CMD: u32 = 8;
const FLAGS: u32 = 12;
const PARAMS: u32 = 16;
const PARAMS_SIZE: u32 = 24;
const STATUS: u32 = 28;

/// A control being performed: its row, its parameters and what they point at.
pub(crate) struct Request<'a> {
    pub(crate) row: &'static Control,
    /// The object that it is called on.
    pub(crate) name: Name,
    /// The command's own structure.
    pub(crate) outer: &'a mut Vec<u8>,
    /// Parameters.
    pub(crate) params: Vec<u8>,
    /// One per pointer of the row: where it pointed, and the bytes.
    pub(crate) behind: Vec<(u64, Vec<u8>)>,
    files: Vec<Translated>,
}

impl<D: Driver> Sandbox<D> {
    /// `outer` is the command's structure, 32 bytes.
    pub(crate) fn control(&self, call: &Call<'_>, outer: &mut Vec<u8>) -> Result<i32, Stop> {
        let cmd = get32(outer, CMD)?;
        let Some(row) = self.table.control(cmd) else {
            self.refusals.note(Refused::Control, cmd, self.table.control_name(cmd), "not allowed");
            return Err(Stop::Status(status::NOT_SUPPORTED));
        };
        if get32(outer, FLAGS)? != 0 {
            self.refusals.note(Refused::Control, cmd, row.name, "flags set");
            return Err(Stop::Status(status::INVALID_FLAGS));
        }
        if get32(outer, PARAMS_SIZE)? != row.size {
            self.refusals.note(Refused::Control, cmd, row.name, "wrong size of parameters");
            return Err(Stop::Status(status::INVALID_PARAM_STRUCT));
        }
        let name = Name { client: get32(outer, CLIENT)?, handle: get32(outer, OBJECT)? };
        self.check_client(name.client)?;
        self.check_object(name)?;
        let addr = get64(outer, PARAMS)?;
        if addr == 0 && row.size != 0 {
            return Err(Stop::Status(status::INVALID_POINTER));
        }
        let params = call.read(addr, index(row.size))?;
        self.check_handles(row.handles, name.client, &params)?;
        let mut request = Request { row, name, outer, params, behind: Vec::new(), files: Vec::new() };
        self.read_behind(call, &mut request)?;
        let done = self.perform(call, &mut request)?;
        self.finish(call, request, addr, done)
    }

    /// Copies in what the row's pointers name; lengths come from the copied parameters.
    fn read_behind(&self, call: &Call<'_>, request: &mut Request<'_>) -> Result<(), Stop> {
        let mut total = request.params.len();
        for pointer in request.row.pointers {
            let target = get64(&request.params, pointer.at)?;
            let length = length_behind(pointer, &request.params)?;
            let length = if target == 0 { 0 } else { length };
            total = total.saturating_add(length);
            if total > MOST_COPIED {
                return Err(Stop::Errno(Errno::EINVAL));
            }
            let bytes = match pointer.direction {
                Direction::Out => vec![0; length],
                Direction::In | Direction::Both => call.read(target, length)?,
            };
            request.behind.push((target, bytes));
        }
        Ok(())
    }

    /// What the rule says, up to the parameters as the tenant will see them.
    fn perform(&self, call: &Call<'_>, request: &mut Request<'_>) -> Result<Done, Stop> {
        match request.row.rule {
            ControlRule::Forward => self.forward_plain(call, request),
            ControlRule::Answer
            | ControlRule::AnswerZeros
            | ControlRule::Processes
            | ControlRule::ProcessInfo
            | ControlRule::DeviceMask
            | ControlRule::GetTimeslice
            | ControlRule::SetTimeslice => self.answer(request),
            ControlRule::RegisterMemory | ControlRule::UnregisterMemory => self.registration(call, request),
            ControlRule::CreateExport
            | ControlRule::ExportOne
            | ControlRule::ExportMany
            | ControlRule::ExportInfo
            | ControlRule::ImportOne
            | ControlRule::ImportMany => self.sharing(call, request),
            _ => self.rewritten(call, request),
        }
    }

    /// The driver's turn. The row's "depends" handles tie the object to what they name.
    pub(crate) fn forward_control(&self, call: &Call<'_>, request: &mut Request<'_>) -> Result<Done, Stop> {
        let row = request.row;
        request.files = self.translate(call, row.files, &mut request.params)?;
        let mut arg = Arg::flat(std::mem::take(request.outer));
        let params = arg.link(None, index(PARAMS), std::mem::take(&mut request.params));
        for (pointer, (_, bytes)) in row.pointers.iter().zip(&mut request.behind) {
            arg.link(Some(params), index(pointer.at), std::mem::take(bytes));
        }
        let done = match call.still_waiting() {
            Ok(()) => self.forward(call, escape_command(NR_CONTROL, 32), &mut arg),
            Err(gone) => Err(gone),
        };
        let mut buffers = arg.links.into_iter().map(|link| link.bytes);
        request.params = buffers.next().unwrap_or_default();
        for ((_, bytes), back) in request.behind.iter_mut().zip(buffers) {
            *bytes = back;
        }
        *request.outer = arg.bytes;
        Self::restore(&request.files, &mut request.params)?;
        Ok(done?)
    }

    /// The file that the row's first file field named.
    pub(crate) fn named(files: &[Translated]) -> Option<&std::os::fd::OwnedFd> {
        files.first().map(|file| &file.copy)
    }

    /// Copies out: what the pointers name, then the parameters with the tenant's own pointers.
    fn finish(&self, call: &Call<'_>, mut request: Request<'_>, addr: u64, done: Done) -> Result<i32, Stop> {
        put64(request.outer, PARAMS, addr)?;
        let done_well = Self::control_status(request.outer)? == status::OK;
        for (pointer, (target, bytes)) in request.row.pointers.iter().zip(&request.behind) {
            put64(&mut request.params, pointer.at, *target)?;
            // After a refusal there is nothing behind the pointers that the driver wrote.
            if done_well && pointer.direction != Direction::In {
                call.write(*target, bytes)?;
            }
        }
        call.write(addr, &request.params)?;
        Ok(self.deliver(call, done, &request.files)?)
    }

    /// The status that the driver put into the command's structure.
    pub(crate) fn control_status(outer: &[u8]) -> Result<u32, Errno> {
        get32(outer, STATUS)
    }

    /// Answers without the driver: the status is "done".
    pub(crate) fn answered(outer: &mut [u8]) -> Result<Done, Stop> {
        crate::bytes::put32(outer, STATUS, status::OK)?;
        Ok(Done::default())
    }
}

impl Request<'_> {
    pub(crate) fn files(&self) -> &[Translated] {
        &self.files
    }
}

/// Bytes behind a pointer. Too long a list is refused as the driver would.
fn length_behind(pointer: &Pointer, params: &[u8]) -> Result<usize, Stop> {
    let (count, element, most) = match pointer.length {
        Length::Never => return Ok(0),
        Length::Fixed(bytes) => return Ok(index(bytes)),
        Length::List { count, element, most } => (get32(params, count)?, element, most),
        Length::Square { count, element, most } => {
            let side = get32(params, count)?;
            if side > most {
                return Err(Stop::Status(status::INVALID_ARGUMENT));
            }
            (side.saturating_mul(side), element, most.saturating_mul(most))
        }
    };
    if count > most {
        return Err(Stop::Status(status::INVALID_ARGUMENT));
    }
    Ok(index(count.saturating_mul(element)))
}
