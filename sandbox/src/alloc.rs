//! `RM_ALLOC`: the second dispatch, by class; and the older allocation of pinned memory.

use gpuslice_policy::row::{Account as Kinds, Class, ClassRule, Handle, Tie};
use gpuslice_policy::status;
use gpuslice_sys::Arg;
use nix::errno::Errno;

use crate::bytes::{get32, get64, index, part_mut, put_file, put32, put64};
use crate::dispatch::{Call, HOST_PAGE, Outcome, Sandbox, Stop, conclude};
use crate::driver::Driver;
use crate::ledger::{Charge, rounded, taken};
use crate::objects::{Id, Kind, Name, New};
use crate::own_client::{NR_ALLOC, escape_command};
use crate::refusals::Refused;
use crate::tenant::PinError;

/// What the driver allocates for a context of the graphics engine beside what it was asked for. Measured: 6.5 to
/// 9 MiB on an H200.
pub(crate) const CONTEXT_BYTES: u64 = 9 << 20;
/// Engines 1 to 8 are graphics engines; 0 lets the driver choose one.
const LAST_GRAPHICS_ENGINE: u32 = 8;
/// Class of a channel group.
const CHANNEL_GROUP: u32 = 0xa06c;
/// Where a channel names its engine.
const CHANNEL_ENGINE: u32 = 128;
/// "Make it a privileged channel".
const PRIVILEGED_CHANNEL: u32 = 1 << 5;
/// Asks for a place in video memory: by address, or between two.
const FIXED_PLACE: u32 = 0x10 | 0x2_0000;
/// OS events, the only events whose "data" isn't an address.
const OS_EVENT: u32 = 0x79;
/// System memory, and pinned memory of the caller.
const SYSTEM_MEMORY: u32 = 0x3e;
const OS_DESCRIPTOR: u32 = 0x71;
/// Bytes of the page that takes the place of the driver's shared one.
const SHARED_PAGE: u64 = 64 << 10;

/// Where the fields of the two forms of the command stand.
struct Form {
    rights: Option<u32>,
    flags: Option<u32>,
    status: u32,
}

impl Form {
    fn of(length: usize) -> Form {
        if length == 48 {
            Form { rights: Some(24), flags: Some(36), status: 40 }
        } else {
            Form { rights: None, flags: None, status: 28 }
        }
    }
}

/// An allocation on its way.
struct Plan {
    kind: Kind,
    gpu: Option<usize>,
    charge: Option<Charge>,
    /// Where the driver answers the size that it allocated.
    size: Option<u32>,
}

impl Plan {
    fn of(kind: Kind) -> Plan {
        Plan { kind, gpu: None, charge: None, size: None }
    }
}

impl<D: Driver> Sandbox<D> {
    /// `outer` is the command's structure, in either form.
    pub(crate) fn alloc(&self, call: &Call<'_>, addr: u64, mut outer: Vec<u8>) -> Result<Outcome, Errno> {
        let form = Form::of(outer.len());
        let result = self.allocate(call, &form, &mut outer);
        conclude(call, addr, &mut outer, Some(form.status), result)
    }

    fn class_row(&self, class: u32) -> Result<&'static Class, Stop> {
        let (name, status) = match self.table.class(class) {
            Some(Class { rule: ClassRule::Deny(status), name, .. }) => (*name, *status),
            Some(row) => return Ok(row),
            None => ("unknown", status::INVALID_CLASS),
        };
        self.refusals.note(Refused::Class, class, name, "not allowed");
        Err(Stop::Status(status))
    }

    fn allocate(&self, call: &Call<'_>, form: &Form, outer: &mut Vec<u8>) -> Result<i32, Stop> {
        let row = self.class_row(get32(outer, 12)?)?;
        if let Some(at) = form.flags
            && get32(outer, at)? != 0
        {
            return Err(Stop::Status(status::INVALID_FLAGS));
        }
        let (client, parent) = (get32(outer, 0)?, get32(outer, 4)?);
        let is_client = row.rule == ClassRule::Client;
        if is_client {
            // Whoever chooses the number of a client can leave one for a neighbour's to get: the driver chooses.
            if client != 0 || get32(outer, 8)? != 0 {
                return Err(Stop::Status(status::INVALID_ARGUMENT));
            }
        } else {
            self.check_client(client)?;
            if !self.objects.has(Name { client, handle: parent }) {
                return Err(Stop::Status(status::INVALID_OBJECT_PARENT));
            }
        }
        let addr = get64(outer, 16)?;
        let mut params = if addr == 0 { Vec::new() } else { call.read(addr, index(row.size))? };
        let theirs = params.clone();
        let rights_addr = form.rights.map(|at| get64(outer, at)).transpose()?.unwrap_or(0);
        let rights = if rights_addr == 0 { Vec::new() } else { call.read(rights_addr, 4)? };
        if params.is_empty() && (needs_parameters(row.rule) || !row.handles.is_empty()) {
            return Err(Stop::Status(status::INVALID_POINTER));
        }
        self.check_handles(row.handles, client, &params)?;
        let name = Name { client, handle: parent };
        let plan = self.plan(row, name, &mut params)?;
        self.objects.lock().room(plan.kind).map_err(|_full| Stop::Status(status::INSUFFICIENT_RESOURCES))?;
        if row.rule == ClassRule::SharedData {
            return self.substitute(call, form, outer, plan, name);
        }
        // What the new object is tied to can't be freed until it is entered.
        let tied = ties(row.handles, client, &params)?;
        let mut names: Vec<Name> = tied.iter().map(|(name, _)| *name).collect();
        if !is_client {
            names.push(name);
        }
        let pins = self.objects.pin(&names).map_err(|_gone| Stop::Status(status::OBJECT_NOT_FOUND))?;
        let mut arg = Arg::flat(std::mem::take(outer));
        arg.link(None, 16, params);
        if let Some(at) = form.rights {
            arg.link(None, index(at), rights);
        }
        let done = match call.still_waiting() {
            Ok(()) => self.forward(call, escape_command(NR_ALLOC, form_size(form)), &mut arg),
            Err(gone) => Err(gone),
        };
        *outer = arg.bytes;
        let mut params = arg.links.into_iter().next().map(|link| link.bytes).unwrap_or_default();
        put64(outer, 16, addr)?;
        if let Some(at) = form.rights {
            put64(outer, at, rights_addr)?;
        }
        let done = done?;
        if get32(outer, form.status)? == status::OK {
            let handle = get32(outer, 8)?;
            let client = if is_client { handle } else { client };
            let pick = |wanted: Tie| -> Vec<Id> {
                let pairs = tied.iter().zip(pins.ids());
                pairs.filter(|((_, tie), _)| *tie == wanted).map(|(_, id)| *id).collect()
            };
            let new = New {
                name: Name { client, handle },
                parent,
                class: row.id,
                kind: plan.kind,
                gpu: plan.gpu,
                charge: plan.charge,
                holds: pick(Tie::Holds),
                depends: pick(Tie::Depends),
                mapping: None,
            };
            let size = plan.size.map(|at| get64(&params, at)).transpose()?;
            let is_video = matches!(row.rule, ClassRule::Memory(Kinds::Gpu { .. }));
            let size = size.map(|size| if is_video { taken(size) } else { size });
            let entered = self.enter(new, size);
            drop(pins);
            if entered.is_err() {
                self.give_back(call, Name { client, handle }, parent);
                put32(outer, form.status, status::NO_MEMORY)?;
            }
        }
        if row.rule == ClassRule::Event {
            // The driver answers an address of its own there.
            let number = get64(&theirs, 16)?;
            put64(&mut params, 16, number)?;
        }
        if !params.is_empty() {
            call.write(addr, &params)?;
        }
        Ok(self.deliver(call, done, &[])?)
    }

    /// Enters a new object with its charge settled to `size`. When that is more than fits, the object is entered
    /// with the charge as it was, and the error says that it must go.
    fn enter(&self, mut new: New, size: Option<u64>) -> Result<(), ()> {
        let fits = match (new.charge.as_mut(), size) {
            (Some(charge), Some(size)) if size != 0 => charge.settle(size).is_ok(),
            _ => true,
        };
        let (_, freed) = self.objects.lock().insert(new);
        drop(freed);
        if fits { Ok(()) } else { Err(()) }
    }

    /// Frees an object that the driver made larger than fits.
    fn give_back(&self, call: &Call<'_>, name: Name, parent: u32) {
        let graph = self.objects.lock();
        let gpu = graph.find(name).and_then(|id| graph.gpu(id));
        drop(graph);
        if let Some(account) = gpu.and_then(|gpu| self.accounts.get(gpu)) {
            account.count_denied();
        }
        // A refusal leaves the object, and its charge, as the driver has them.
        let _status = self.free_object(call, name, parent);
    }

    /// Charges and changes to the parameters that a class asks for.
    fn plan(&self, row: &Class, parent: Name, params: &mut [u8]) -> Result<Plan, Stop> {
        let mut plan = Plan::of(Kind::Other);
        match row.rule {
            ClassRule::Client => plan.kind = Kind::Client,
            ClassRule::AddressSpace => plan.kind = Kind::AddressSpace,
            ClassRule::Device => {
                let instance = if params.is_empty() { 0 } else { get32(params, 0)? };
                let gpu = self.own.cards().iter().position(|card| card.instance == instance);
                plan.gpu = Some(gpu.ok_or(Stop::Status(status::INSUFFICIENT_PERMISSIONS))?);
            }
            ClassRule::Memory(Kinds::Gpu { size }) => {
                let flags = get32(params, 8)?;
                put32(params, 8, flags & !FIXED_PLACE)?;
                let bytes = paged(get64(params, size)?, get32(params, 24)?, get32(params, 28)?);
                plan.charge = Some(self.charge_gpu(parent, bytes)?);
                plan.size = Some(size);
            }
            ClassRule::Memory(Kinds::Host { size }) => {
                plan.charge = Some(self.charge_host(get64(params, size)?)?);
                plan.size = Some(size);
            }
            ClassRule::Event => {
                // Anything else would make the driver take "data" for an address in the kernel.
                if get32(params, 8)? != OS_EVENT {
                    return Err(Stop::Status(status::INVALID_ARGUMENT));
                }
            }
            ClassRule::ChannelGroup { engine } => {
                plan.kind = Kind::ChannelGroup;
                if get32(params, engine)? <= LAST_GRAPHICS_ENGINE {
                    plan.charge = Some(self.charge_gpu(parent, CONTEXT_BYTES)?);
                }
            }
            ClassRule::Channel { flags } => {
                plan.kind = Kind::Channel;
                let set = get32(params, flags)?;
                put32(params, flags, set & !PRIVILEGED_CHANNEL)?;
                // Outside a group the driver makes a group for it.
                let graph = self.objects.lock();
                let grouped = graph.find(parent).and_then(|id| graph.class(id)) == Some(CHANNEL_GROUP);
                drop(graph);
                if !grouped && get32(params, CHANNEL_ENGINE)? <= LAST_GRAPHICS_ENGINE {
                    plan.charge = Some(self.charge_gpu(parent, CONTEXT_BYTES)?);
                }
            }
            ClassRule::UserMode { privileged: Some(at) } if !params.is_empty() => {
                part_mut(params, at, 1)?.fill(0);
            }
            ClassRule::SharedData => plan.charge = Some(self.charge_host(SHARED_PAGE)?),
            ClassRule::Memory(Kinds::Virtual)
            | ClassRule::UserMode { .. }
            | ClassRule::Plain
            | ClassRule::Deny(_) => {}
        }
        Ok(plan)
    }

    /// Charges the GPU that `parent` stands under. Clients that died unseen are looked for before it is refused.
    fn charge_gpu(&self, parent: Name, bytes: u64) -> Result<Charge, Stop> {
        let graph = self.objects.lock();
        let gpu = graph.find(parent).and_then(|id| graph.gpu(id));
        drop(graph);
        let account = gpu.and_then(|gpu| self.accounts.get(gpu));
        let account = account.ok_or(Stop::Status(status::INVALID_OBJECT_PARENT))?;
        if let Ok(charge) = account.charge(bytes) {
            return Ok(charge);
        }
        self.sweep();
        account.charge(bytes).map_err(|_over| {
            account.count_denied();
            Stop::Status(status::NO_MEMORY)
        })
    }

    fn charge_host(&self, bytes: u64) -> Result<Charge, Stop> {
        let bytes = bytes.max(1).checked_next_multiple_of(HOST_PAGE).unwrap_or(u64::MAX);
        self.host.charge(bytes).map_err(|_over| Stop::Status(status::NO_MEMORY))
    }

    /// The page that the driver shares with all clients, replaced by one of system memory under the same handle:
    /// zeros, read-only for the user.
    fn substitute(
        &self,
        call: &Call<'_>,
        form: &Form,
        outer: &mut [u8],
        plan: Plan,
        subdevice: Name,
    ) -> Result<i32, Stop> {
        let pins = self.objects.pin(&[subdevice]).map_err(|_gone| Stop::Status(status::OBJECT_NOT_FOUND))?;
        let graph = self.objects.lock();
        let device = pins.ids().first().and_then(|id| graph.parent(*id));
        drop(graph);
        let device = device.ok_or(Stop::Status(status::INVALID_OBJECT_PARENT))?.handle;
        let mut params = vec![0; 128];
        // Owner tag; attributes: system memory, cached, not contiguous; not writable by the user; size.
        put32(&mut params, 0, 0x6770_6c73)?;
        put32(&mut params, 24, 1 << 25 | 1 << 27 | 1 << 29)?;
        put32(&mut params, 28, 1 << 22)?;
        put64(&mut params, 64, SHARED_PAGE)?;
        let mut bytes = vec![0; 48];
        for (at, value) in [(0, subdevice.client), (4, device), (8, get32(outer, 8)?), (12, SYSTEM_MEMORY)] {
            put32(&mut bytes, at, value)?;
        }
        let mut arg = Arg::flat(bytes);
        arg.link(None, 16, params);
        call.still_waiting()?;
        let done = self.forward(call, escape_command(NR_ALLOC, 48), &mut arg)?;
        let (handle, status) = (get32(&arg.bytes, 8)?, get32(&arg.bytes, 40)?);
        put32(outer, 8, handle)?;
        put32(outer, form.status, status)?;
        if status == status::OK {
            let name = Name { client: subdevice.client, handle };
            let plain = New::plain(name, subdevice.handle, get32(outer, 12)?);
            let new = New { kind: plan.kind, charge: plan.charge, ..plain };
            let (_, freed) = self.objects.lock().insert(new);
            drop(freed);
        }
        drop(pins);
        Ok(self.deliver(call, done, &[])?)
    }

    /// The older allocation: only OS-descriptor memory, which pins a range of the caller's. The range is shared
    /// with the sandbox first, and the driver pins the sandbox's mapping of it.
    pub(crate) fn alloc_memory(&self, call: &Call<'_>, bytes: &mut Vec<u8>) -> Result<i32, Stop> {
        let class = get32(bytes, 12)?;
        if class != OS_DESCRIPTOR {
            let name = self.table.class(class).map_or("unknown", |row| row.name);
            self.refusals.note(Refused::Class, class, name, "not by the older allocation");
            return Err(Stop::Status(status::INVALID_CLASS));
        }
        let name = Name { client: get32(bytes, 0)?, handle: get32(bytes, 4)? };
        self.check_client(name.client)?;
        if !self.objects.has(name) {
            return Err(Stop::Status(status::INVALID_OBJECT_PARENT));
        }
        let (addr, limit) = (get64(bytes, 24)?, get64(bytes, 32)?);
        let length = limit.checked_add(1).ok_or(Stop::Status(status::INVALID_ARGUMENT))?;
        if addr.checked_add(length).is_none() || addr == 0 {
            return Err(Stop::Status(status::INVALID_ARGUMENT));
        }
        self.objects
            .lock()
            .room(Kind::Other)
            .map_err(|_full| Stop::Status(status::INSUFFICIENT_RESOURCES))?;
        let charge = self.charge_host(length)?;
        let pinned = call.caller.pinned(addr, length).map_err(|error| match error {
            PinError::Restart => Stop::Restart,
            PinError::Errno(Errno::ENOMEM) => Stop::Status(status::NO_MEMORY),
            PinError::Errno(errno) => Stop::Errno(errno),
        })?;
        let pins = self.objects.pin(&[name]).map_err(|_gone| Stop::Status(status::OBJECT_NOT_FOUND))?;
        let file = get32(bytes, 48)?;
        put64(bytes, 24, pinned.address)?;
        put_file(bytes, 48, -1)?;
        let mut arg = Arg::flat(std::mem::take(bytes));
        let done = match call.still_waiting() {
            Ok(()) => self.forward(call, escape_command(0x27, 56), &mut arg),
            Err(gone) => Err(gone),
        };
        *bytes = arg.bytes;
        put64(bytes, 24, addr)?;
        put32(bytes, 48, file)?;
        let done = done?;
        if get32(bytes, 40)? == status::OK {
            let plain =
                New::plain(Name { client: name.client, handle: get32(bytes, 8)? }, name.handle, class);
            let new = New { charge: Some(charge), mapping: Some(pinned.keep), ..plain };
            let (_, freed) = self.objects.lock().insert(new);
            drop(freed);
        }
        drop(pins);
        Ok(self.deliver(call, done, &[])?)
    }
}

fn form_size(form: &Form) -> u32 {
    if form.rights.is_some() { 48 } else { 32 }
}

/// Classes whose parameters the rule looks into.
fn needs_parameters(rule: ClassRule) -> bool {
    matches!(
        rule,
        ClassRule::Memory(_) | ClassRule::Event | ClassRule::ChannelGroup { .. } | ClassRule::Channel { .. }
    )
}

/// Objects that the new one keeps or goes with.
fn ties(handles: &[Handle], client: u32, params: &[u8]) -> Result<Vec<(Name, Tie)>, Errno> {
    let mut ties = Vec::new();
    for handle in handles {
        if let Handle::Object { at, tie: tie @ (Tie::Holds | Tie::Depends), .. } = *handle {
            let handle = get32(params, at)?;
            if handle != 0 {
                ties.push((Name { client, handle }, tie));
            }
        }
    }
    Ok(ties)
}

/// What an allocation of video memory takes at least, by its page size attributes.
fn paged(size: u64, attributes: u32, attributes2: u32) -> u64 {
    const HUGE: u32 = 3;
    let page = match ((attributes >> 23) & 3, (attributes2 >> 20) & 3) {
        (HUGE, 2) => 512 << 20,
        (HUGE, 3) => 256 << 30,
        (HUGE, _) => 2 << 20,
        _ => return rounded(size),
    };
    size.max(1).checked_next_multiple_of(page).unwrap_or(u64::MAX)
}
