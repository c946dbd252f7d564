//! The driver's objects: clients, what they allocated, and who depends on whom.
//!
//! Owns: clients and objects, the cascade of a free, and what happens when a file is closed.
//! Invariants: an object's parent exists; a client lives exactly as long as its control file or until freed;
//! each reference that an object holds on memory is given back once, when it goes.
//! Rules mirrored (driver 580): a client belongs to the control file it was made on; a registered file keeps its
//! control file alive; freeing frees the object, its children and what depends on it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;

use serde::Serialize;

use crate::files::{self, Export, FileId, Files};
use crate::memory::{MemoryId, Place, Store};
use crate::model::Gpu;
use crate::nodes::Node;
use crate::status::Status;
use crate::uvm::VaSpace;

/// A channel group.
#[derive(Clone, Debug)]
pub struct Group {
    /// Engine type, 1 for the first graphics engine.
    pub engine: u32,
    /// Microseconds.
    pub timeslice: u64,
    /// 0 low, 1 medium, 2 high.
    pub interleave: u32,
    /// On the runlist.
    pub scheduled: bool,
}

/// A channel.
#[derive(Clone, Debug)]
pub struct Channel {
    /// Hardware id, also the id in the trace.
    pub id: u32,
    /// Engine type.
    pub engine: u32,
    /// Memory and offset of its USERD.
    pub userd: Option<(MemoryId, u64)>,
    /// On the runlist by its own schedule call.
    pub scheduled: bool,
    /// Taken off by DISABLE_CHANNELS.
    pub disabled: bool,
    /// The allocating process was an administrator: physical addressing.
    pub privileged: bool,
    /// Work items the engine has consumed.
    pub consumed: u32,
}

/// What an object is beyond its class.
#[derive(Clone, Debug)]
pub enum Detail {
    /// Nothing more.
    Plain,
    /// A memory object.
    Memory(MemoryId),
    /// A channel group.
    Group(Group),
    /// A channel.
    Channel(Channel),
}

/// A share policy set by RM_SHARE.
#[derive(Clone, Copy, Debug, Default)]
pub struct Shared {
    /// Every client.
    pub all: bool,
    /// Clients of the same user.
    pub user: bool,
    /// One client.
    pub client: Option<u32>,
}

/// One object of a client.
#[derive(Clone, Debug)]
pub struct Object {
    /// Its class as allocated.
    pub class: u32,
    /// The driver's internal class.
    pub kind: &'static str,
    /// Handle of its parent; of a client, its own.
    pub parent: u32,
    /// Card that it belongs to.
    pub gpu: Option<usize>,
    /// References on memory that go when it goes.
    pub held: Vec<MemoryId>,
    /// Handles in the same client that it does not outlive.
    pub depends: Vec<u32>,
    /// The rest.
    pub detail: Detail,
    /// Whose clients may duplicate it, beyond those of the same process.
    pub shared: Shared,
    /// CPU mappings of it: address cookie and number of the mapping.
    pub mappings: Vec<(u64, u64)>,
}

/// A client.
#[derive(Debug)]
pub struct Client {
    /// The control file it belongs to.
    pub file: FileId,
    /// Process that made it.
    pub pid: u32,
    /// Effective uid of that process.
    pub uid: u32,
    /// Its objects; the client itself is under its own handle.
    pub objects: BTreeMap<u32, Object>,
    next_handle: u32,
}

/// A CPU mapping: lives until the last close and munmap of the file that was handed out for it.
#[derive(Debug)]
pub struct CpuMapping {
    /// Control file kept alive by it.
    pub control: FileId,
    /// Memory shown.
    pub memory: MemoryId,
    /// Bytes.
    pub length: u64,
    probe: File,
}

impl CpuMapping {
    /// A mapping whose file carries the mark `at` in `probe`'s file.
    pub fn new(control: FileId, memory: MemoryId, length: u64, probe: File) -> Self {
        CpuMapping { control, memory, length, probe }
    }

    fn alive(&self, at: u64) -> bool {
        files::marked(&self.probe, i64::try_from(at).unwrap_or(0))
    }
}

/// An OS event: the match key of class 0x79.
#[derive(Clone, Debug)]
pub struct OsEvent {
    /// Client named by the caller (not checked, as in the driver).
    pub client: u32,
    /// Number given by the caller.
    pub fd: u32,
    /// File it was made on, to which it is delivered.
    pub file: FileId,
}

/// Something that the stock driver allows and a sandbox must not let happen.
#[derive(Clone, Debug, Serialize)]
pub struct Violation {
    /// Stable name.
    pub kind: &'static str,
    /// Process whose call it was.
    pub pid: u32,
    /// What exactly.
    pub detail: String,
}

/// The whole state of the emulated driver.
#[derive(Debug)]
pub struct State {
    /// Driver version.
    pub version: String,
    /// The cards.
    pub gpus: Vec<Gpu>,
    /// Physical memory.
    pub store: Store,
    /// Open files.
    pub files: Files,
    /// Clients by handle.
    pub clients: BTreeMap<u32, Client>,
    /// UVM address spaces by file.
    pub spaces: BTreeMap<FileId, VaSpace>,
    /// OS events.
    pub os_events: Vec<OsEvent>,
    /// CPU mappings by number.
    pub mappings: BTreeMap<u64, CpuMapping>,
    /// Violations so far.
    pub violations: Vec<Violation>,
    /// Memory block size set by SYS_PARAMS, 0 before.
    pub memory_block: u64,
    closed: BTreeMap<FileId, crate::files::OpenFile>,
    next_client: u32,
    next_channel: u32,
    next_mapping: u64,
}

/// First client handle that the driver gives out.
pub(crate) const FIRST_CLIENT: u32 = 0xc1d0_0000;
/// First object handle that the driver gives out within a client.
const FIRST_OBJECT: u32 = 0xcaf0_0000;

impl State {
    /// A driver just loaded.
    pub fn new(version: &str, gpus: Vec<Gpu>, files: Files) -> Self {
        let sizes: Vec<u64> = gpus.iter().map(|gpu| gpu.memory.saturating_sub(gpu.reserved)).collect();
        State {
            version: version.to_owned(),
            gpus,
            store: Store::new(&sizes),
            files,
            clients: BTreeMap::new(),
            spaces: BTreeMap::new(),
            os_events: Vec::new(),
            mappings: BTreeMap::new(),
            violations: Vec::new(),
            memory_block: 0,
            closed: BTreeMap::new(),
            next_client: FIRST_CLIENT,
            next_channel: 2,
            next_mapping: 1,
        }
    }

    /// A fresh number of a channel.
    pub fn channel_id(&mut self) -> u32 {
        let id = self.next_channel;
        self.next_channel = self.next_channel.wrapping_add(1);
        id
    }

    /// A fresh number of a CPU mapping.
    pub fn mapping_id(&mut self) -> u64 {
        let id = self.next_mapping;
        self.next_mapping = self.next_mapping.wrapping_add(1);
        id
    }

    /// Makes a client; `wanted` 0 lets the driver choose its handle.
    ///
    /// # Errors
    /// The wanted handle is taken.
    pub fn create_client(&mut self, wanted: u32, file: FileId, pid: u32, uid: u32) -> Result<u32, Status> {
        let handle = if wanted == 0 {
            while self.clients.contains_key(&self.next_client) {
                self.next_client = self.next_client.wrapping_add(1);
            }
            let handle = self.next_client;
            self.next_client = self.next_client.wrapping_add(1);
            handle
        } else {
            wanted
        };
        if self.clients.contains_key(&handle) {
            return Err(Status::INSERT_DUPLICATE_NAME);
        }
        let mut client = Client { file, pid, uid, objects: BTreeMap::new(), next_handle: FIRST_OBJECT };
        let root = Object::new(0x41, "RmClientResource", handle, None);
        client.objects.insert(handle, root);
        self.clients.insert(handle, client);
        Ok(handle)
    }

    /// The client, if `file` is the control file that it belongs to.
    ///
    /// # Errors
    /// `unknown` where there is no such client; [`Status::INVALID_CLIENT`] where it belongs to another file.
    pub fn client(&mut self, handle: u32, file: FileId, unknown: Status) -> Result<&mut Client, Status> {
        let control = self.files.find(file).and_then(|open| open.control).unwrap_or(file);
        let client = self.clients.get_mut(&handle).ok_or(unknown)?;
        if client.file == control { Ok(client) } else { Err(Status::INVALID_CLIENT) }
    }

    /// An object of any client.
    pub fn object(&self, client: u32, handle: u32) -> Option<&Object> {
        self.clients.get(&client)?.objects.get(&handle)
    }

    /// An object of any client.
    pub fn object_mut(&mut self, client: u32, handle: u32) -> Option<&mut Object> {
        self.clients.get_mut(&client)?.objects.get_mut(&handle)
    }

    /// Puts an object under `wanted`, or a handle of the driver's choice for 0.
    ///
    /// # Errors
    /// The handle is taken or the client's own. What the object holds is given back.
    pub fn insert(&mut self, client: u32, wanted: u32, object: Object) -> Result<u32, Status> {
        let held = object.held.clone();
        let placed = self.place(client, wanted, object);
        if placed.is_err() {
            held.into_iter().for_each(|id| self.store.release(id));
        }
        placed
    }

    fn place(&mut self, client: u32, wanted: u32, object: Object) -> Result<u32, Status> {
        let owner = self.clients.get_mut(&client).ok_or(Status::INVALID_OBJECT_HANDLE)?;
        let handle = if wanted == 0 {
            while owner.objects.contains_key(&owner.next_handle) {
                owner.next_handle = owner.next_handle.wrapping_add(1);
            }
            owner.next_handle
        } else {
            wanted
        };
        if handle == client {
            return Err(Status::INVALID_OBJECT_HANDLE);
        }
        if owner.objects.contains_key(&handle) {
            return Err(Status::INSERT_DUPLICATE_NAME);
        }
        owner.objects.insert(handle, object);
        Ok(handle)
    }

    /// Frees an object with its children and dependants; the client itself frees all of it.
    pub fn free(&mut self, client: u32, handle: u32, by: u32) {
        let Some(owner) = self.clients.get_mut(&client) else { return };
        let mut doomed = BTreeSet::from([handle]);
        if handle == client {
            doomed.extend(owner.objects.keys());
        }
        loop {
            let more: Vec<u32> = owner
                .objects
                .iter()
                .filter(|(at, object)| {
                    !doomed.contains(at)
                        && (doomed.contains(&object.parent)
                            || object.depends.iter().any(|on| doomed.contains(on)))
                })
                .map(|(at, _)| *at)
                .collect();
            if more.is_empty() {
                break;
            }
            doomed.extend(more);
        }
        let gone: Vec<(u32, Object)> =
            doomed.iter().filter_map(|at| Some((*at, owner.objects.remove(at)?))).collect();
        if handle == client {
            self.clients.remove(&client);
            self.os_events.retain(|event| event.client != client);
        }
        for (at, object) in gone {
            for (_, mapping) in &object.mappings {
                self.check_stale(*mapping, by, &format!("object {at:#x} of client {client:#x} freed"));
            }
            object.held.iter().for_each(|id| self.store.release(*id));
        }
    }

    /// Records that card memory was given up while a process still maps it: the stock driver's hole.
    pub fn check_stale(&mut self, mapping: u64, by: u32, what: &str) {
        let Some(found) = self.mappings.get(&mapping) else { return };
        let on_card = self.store.find(found.memory).is_some_and(|one| matches!(one.place, Place::Card(_)));
        if on_card && found.alive(mapping) {
            let detail = format!("{what} while {} bytes of it are mapped or can be", found.length);
            self.violations.push(Violation { kind: "stale-mapping", pid: by, detail });
        }
    }

    /// Looks for closed files and frees what belonged to them.
    pub fn sweep(&mut self) {
        for (id, file) in self.files.take_closed() {
            self.closed.insert(id, file);
        }
        self.mappings.retain(|at, mapping| mapping.alive(*at));
        loop {
            let ready: Vec<FileId> =
                self.closed.keys().filter(|id| !self.kept_alive(**id)).copied().collect();
            if ready.is_empty() {
                return;
            }
            ready.into_iter().for_each(|id| self.close(id));
        }
    }

    /// Whether a registered file or a mapping still holds this control file.
    fn kept_alive(&self, id: FileId) -> bool {
        self.files.all().any(|(_, file)| file.control == Some(id))
            || self.closed.values().any(|file| file.control == Some(id))
            || self.mappings.values().any(|mapping| mapping.control == id)
    }

    fn close(&mut self, id: FileId) {
        let Some(file) = self.closed.remove(&id) else { return };
        let clients: Vec<u32> =
            self.clients.iter().filter(|(_, client)| client.file == id).map(|(handle, _)| *handle).collect();
        for client in clients {
            self.free(client, client, 0);
        }
        self.os_events.retain(|event| event.file != id);
        for export in file.exports.into_values() {
            self.drop_export(export);
        }
        if let Some(space) = self.spaces.remove(&id) {
            space.into_held().into_iter().for_each(|memory| self.store.release(memory));
        }
    }

    /// Gives back what an export held.
    pub fn drop_export(&mut self, export: Export) {
        export.memory.into_iter().for_each(|id| self.store.release(id));
    }

    /// Node of an open file, closed ones included.
    pub fn node(&self, id: FileId) -> Option<Node> {
        self.files.find(id).or_else(|| self.closed.get(&id)).map(|file| file.node)
    }
}

impl Object {
    /// A plain object.
    pub fn new(class: u32, kind: &'static str, parent: u32, gpu: Option<usize>) -> Self {
        Object {
            class,
            kind,
            parent,
            gpu,
            held: Vec::new(),
            depends: Vec::new(),
            detail: Detail::Plain,
            shared: Shared::default(),
            mappings: Vec::new(),
        }
    }

    /// The memory behind a memory object.
    pub fn memory(&self) -> Option<MemoryId> {
        match self.detail {
            Detail::Memory(id) => Some(id),
            Detail::Plain | Detail::Group(_) | Detail::Channel(_) => None,
        }
    }
}
