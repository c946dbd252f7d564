//! Commands of the UVM node.

use std::os::fd::{AsFd, OwnedFd};

use gpuslice_policy::row::{Uvm, UvmRule};
use gpuslice_policy::status;
use gpuslice_sys::Arg;
use nix::errno::Errno;

use crate::bytes::{get32, get64, index, part, put64};
use crate::dispatch::{Call, Outcome, Sandbox, Stop, conclude};
use crate::driver::{Driver, Node};
use crate::objects::{MemoryId, Name};
use crate::refusals::Refused;
use crate::uvm_files::{Uuid, UvmFile};

/// `UVM_INITIALIZE`: lets processes other than the one that calls map the file.
const MULTI_PROCESS_SHARING: u64 = 2;
const FREE: u32 = 34;
const FREE_BYTES: usize = 24;
const CLEAN_UP_ZOMBIES: u32 = 69;
const UNREGISTER_GPU: u32 = 38;
const UNREGISTER_GPU_BYTES: usize = 20;
/// `UVM_MAP_EXTERNAL_ALLOCATION`: attributes a GPU, and where their number stands.
const ATTRIBUTES: u32 = 24;
const ATTRIBUTES_BYTES: u32 = 36;
const ATTRIBUTES_COUNT: u32 = 9240;
const MOST_ATTRIBUTES: u64 = 256;
/// Where a command that is about one GPU names it.
const GPU: u32 = 16;

/// What is to be done when the driver has done its part.
enum After {
    Nothing,
    Initialized,
    Range,
    Map { memory: Option<MemoryId> },
    Unmapped { maps: Vec<u64> },
    Freed { maps: Vec<u64> },
}

impl<D: Driver> Sandbox<D> {
    pub(crate) fn refuse_uvm(&self, cmd: u32) {
        let name = self.table.uvm(cmd).map_or("unknown", |row| row.name);
        self.refusals.note(Refused::Uvm, cmd, name, "not allowed");
    }

    /// A command of the UVM node: the whole number counts.
    pub(crate) fn uvm(&self, call: &Call<'_>, cmd: u32, addr: u64) -> Result<Outcome, Errno> {
        let Some(row) = self.table.uvm(cmd) else {
            self.refuse_uvm(cmd);
            return Err(Errno::EINVAL);
        };
        let mut bytes = call.read(addr, index(row.size))?;
        let result = match row.rule {
            UvmRule::Deny => {
                self.refuse_uvm(cmd);
                Err(Stop::Status(status::NOT_SUPPORTED))
            }
            _ => self.uvm_checked(call, row, &mut bytes),
        };
        conclude(call, addr, &mut bytes, (row.size != 0).then_some(row.status), result)
    }

    fn uvm_checked(&self, call: &Call<'_>, row: &'static Uvm, bytes: &mut Vec<u8>) -> Result<i32, Stop> {
        self.check_handles(row.handles, 0, bytes)?;
        let mut files = self.translate(call, row.files, bytes)?;
        let known = match row.rule {
            UvmRule::Forward => None,
            _ => self.uvm_files.find(call.file, call.caller.tgid()),
        };
        // A file that nobody initialised does nothing in the driver either.
        let file = || known.ok_or(Stop::Status(status::ILLEGAL_ACTION));
        let mut pins = None;
        let mut flags = None;
        let after = match row.rule {
            UvmRule::Forward | UvmRule::Deny => After::Nothing,
            UvmRule::Initialize => {
                let set = get64(bytes, 0)?;
                put64(bytes, 0, set | MULTI_PROCESS_SHARING)?;
                flags = Some(set);
                self.uvm_files.begin();
                if known.is_none() {
                    self.uvm_files.room().map_err(|_full| Stop::Status(status::NO_MEMORY))?;
                    After::Initialized
                } else {
                    After::Nothing
                }
            }
            UvmRule::CreateRange => {
                file()?;
                self.uvm_files.room().map_err(|_full| Stop::Status(status::NO_MEMORY))?;
                After::Range
            }
            UvmRule::MapExternal { client, memory } => {
                file()?;
                self.uvm_files.room_for_map().map_err(|_full| Stop::Status(status::NO_MEMORY))?;
                let name = Name { client: get32(bytes, client)?, handle: get32(bytes, memory)? };
                let held = self.objects.pin(&[name]);
                let held = held.map_err(|_gone| Stop::Status(status::OBJECT_NOT_FOUND))?;
                let graph = self.objects.lock();
                let memory = held.ids().first().and_then(|id| graph.memory(*id));
                drop(graph);
                pins = Some(held);
                After::Map { memory }
            }
            UvmRule::UnmapExternal => {
                let maps = self.uvm_files.maps_within(file()?, get64(bytes, 0)?, get64(bytes, 8)?);
                After::Unmapped { maps }
            }
            UvmRule::FreeRange => {
                After::Freed { maps: self.uvm_files.maps_of_range(file()?, get64(bytes, 0)?) }
            }
        };
        let mut arg = Arg::flat(std::mem::take(bytes));
        let done = match call.still_waiting() {
            Ok(()) => self.forward(call, row.cmd, &mut arg),
            Err(gone) => Err(gone),
        };
        *bytes = arg.bytes;
        if let Some(set) = flags {
            put64(bytes, 0, set)?;
        }
        Self::restore(&files, bytes)?;
        let done = done?;
        if row.size != 0 && get32(bytes, row.status)? == status::OK {
            self.uvm_enter(call, known, after, bytes)?;
        }
        drop(pins);
        let value = self.deliver(call, done, &files)?;
        files.clear();
        Ok(value)
    }

    fn uvm_enter(&self, call: &Call<'_>, file: Option<u64>, after: After, bytes: &[u8]) -> Result<(), Errno> {
        let gone = match (after, file) {
            (After::Initialized, _) => {
                let copy = call.file.try_clone().map_err(|_| Errno::EMFILE)?;
                self.uvm_files.add(call.caller.tgid(), copy);
                return Ok(());
            }
            (After::Range, Some(file)) => {
                self.uvm_files.add_range(file, get64(bytes, 0)?, get64(bytes, 8)?);
                return Ok(());
            }
            (After::Map { memory: Some(memory) }, Some(file)) => {
                let gpus = mapped_gpus(bytes)?;
                self.objects.lock().keep(memory);
                let (base, length) = (get64(bytes, 0)?, get64(bytes, 8)?);
                if self.uvm_files.add_map(file, base, length, gpus, memory) {
                    return Ok(());
                }
                vec![memory]
            }
            (After::Unmapped { maps }, Some(file)) => {
                self.uvm_files.remove_maps(file, &maps, uuid(part(bytes, GPU, 16)?))
            }
            (After::Freed { maps }, Some(file)) => self.uvm_files.remove_range(file, get64(bytes, 0)?, &maps),
            _ => return Ok(()),
        };
        self.release(gone);
        Ok(())
    }

    /// Gives references back, outside the lock.
    pub(crate) fn release(&self, memory: Vec<MemoryId>) {
        let mut graph = self.objects.lock();
        let freed: Vec<_> = memory.into_iter().map(|memory| graph.release(memory)).collect();
        drop(graph);
        drop(freed);
    }

    /// The sandbox ends, and with it what it knows of the memory in UVM files. One that is open in another container
    /// would keep that memory, charged to nobody. May call the driver.
    pub fn ended(&self) {
        let files = self.uvm_files.take_all();
        // One call for all memory on a card: the shim waits for a moment only.
        for file in &files {
            for gpu in file.gpus() {
                let mut bytes = gpu.to_vec();
                bytes.resize(UNREGISTER_GPU_BYTES, 0);
                self.uvm_call(&file.copy, UNREGISTER_GPU, bytes);
            }
        }
        self.free_uvm_files(files);
    }

    /// Frees what a process that ended had mapped, and closes the copies of its files.
    pub(crate) fn end_uvm_files(&self, tgid: u32) {
        self.free_uvm_files(self.uvm_files.take(tgid));
    }

    fn free_uvm_files(&self, files: Vec<UvmFile>) {
        for file in files {
            for (base, length) in file.ranges() {
                let mut bytes = vec![0; FREE_BYTES];
                if put64(&mut bytes, 0, base).and_then(|()| put64(&mut bytes, 8, length)).is_ok() {
                    self.uvm_call(&file.copy, FREE, bytes);
                }
            }
            self.uvm_call(&file.copy, CLEAN_UP_ZOMBIES, vec![0; 4]);
            let memory = file.memory();
            drop(file);
            self.release(memory);
        }
    }

    /// A call of ours on a tenant's file; what it answers changes nothing, for the file is closed next.
    fn uvm_call(&self, file: &OwnedFd, cmd: u32, bytes: Vec<u8>) {
        let _answer = self.driver.ioctl(file.as_fd(), Node::Uvm, cmd, &mut Arg::flat(bytes));
    }
}

fn uuid(bytes: &[u8]) -> Uuid {
    bytes.try_into().unwrap_or_default()
}

/// GPUs that an external mapping is made on. None named: one that no unmapping names, so that the charge stays.
fn mapped_gpus(bytes: &[u8]) -> Result<Vec<Uuid>, Errno> {
    let count = get64(bytes, ATTRIBUTES_COUNT)?.min(MOST_ATTRIBUTES);
    let count = u32::try_from(count).map_err(|_| Errno::EINVAL)?;
    let mut gpus = Vec::new();
    for place in 0..count {
        let gpu = uuid(part(bytes, ATTRIBUTES + place * ATTRIBUTES_BYTES, 16)?);
        if !gpus.contains(&gpu) {
            gpus.push(gpu);
        }
    }
    if gpus.is_empty() {
        gpus.push(Uuid::default());
    }
    Ok(gpus)
}
