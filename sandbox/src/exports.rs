//! Objects that leave a client through a file: VMM handles and the like.
//!
//! Owns: a copy of each file that carries exports of this container, and what it carries. Promises: only files
//! that a living process of this container exported to are imported from; exported memory stays charged, for
//! the driver keeps it as long as anybody has the file. The copies go when the exporting process ends; what it
//! exported then stays charged until the container ends, for nobody can tell whether the file is still open
//! somewhere.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use gpuslice_policy::row::{ControlRule, FileField};
use gpuslice_policy::status;

use crate::bytes::{get16, get32};
use crate::control::Request;
use crate::dispatch::{Call, Sandbox, Stop};
use crate::driver::{Done, Driver};
use crate::objects::{Kind, MemoryId, Name, New};

/// Most files with exports.
const MOST_FILES: usize = 1024;
/// Objects in one export, and in one import.
const MOST_EXPORTED: u32 = 512;
const MOST_IMPORTED: u32 = 128;

struct Export {
    copy: OwnedFd,
    owner: u32,
    slots: HashMap<u32, MemoryId>,
}

/// All files with exports.
#[derive(Default)]
pub(crate) struct Exports {
    files: Mutex<Vec<Export>>,
}

impl Exports {
    fn lock(&self) -> MutexGuard<'_, Vec<Export>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn position(files: &[Export], file: &OwnedFd) -> Option<usize> {
        files.iter().position(|known| {
            gpuslice_sys::process::same_open_file(known.copy.as_fd(), file.as_fd()).unwrap_or(false)
        })
    }

    fn knows(&self, file: &OwnedFd) -> bool {
        Self::position(&self.lock(), file).is_some()
    }

    fn room(&self) -> bool {
        self.lock().len() < MOST_FILES
    }

    /// Enters exports from slot `first` on. Answers memory whose place in the file was taken before.
    fn add(
        &self,
        owner: u32,
        file: &OwnedFd,
        first: u32,
        memory: &[Option<MemoryId>],
    ) -> std::io::Result<Vec<MemoryId>> {
        let mut files = self.lock();
        let position = match Self::position(&files, file) {
            Some(position) => position,
            None => {
                files.push(Export { copy: file.try_clone()?, owner, slots: HashMap::new() });
                files.len() - 1
            }
        };
        let mut replaced = Vec::new();
        if let Some(export) = files.get_mut(position) {
            for (slot, memory) in (first..).zip(memory) {
                if let Some(memory) = memory {
                    replaced.extend(export.slots.insert(slot, *memory));
                }
            }
        }
        Ok(replaced)
    }

    /// Memory in slots of a file.
    fn memory(&self, file: &OwnedFd, slots: impl Iterator<Item = u32>) -> Vec<Option<MemoryId>> {
        let files = self.lock();
        let export = Self::position(&files, file).and_then(|at| files.get(at));
        slots.map(|slot| export.and_then(|export| export.slots.get(&slot).copied())).collect()
    }
}

impl<D: Driver> Sandbox<D> {
    /// A process that exported ended.
    pub(crate) fn end_exports(&self, tgid: u32) {
        let gone: Vec<Export> = self.exports.lock().extract_if(.., |export| export.owner == tgid).collect();
        drop(gone);
    }

    /// Exports and imports.
    pub(crate) fn sharing(&self, call: &Call<'_>, request: &mut Request<'_>) -> Result<Done, Stop> {
        match request.row.rule {
            ControlRule::ExportOne => self.export(call, request, &[(12, 0)]),
            ControlRule::ExportMany => {
                let count = u32::from(get16(&request.params, 2124)?);
                let first = u32::from(get16(&request.params, 2126)?);
                if count > MOST_EXPORTED {
                    return Err(Stop::Status(status::INVALID_ARGUMENT));
                }
                let places: Vec<(u32, u32)> = (0..count).map(|n| (76 + 4 * n, first + n)).collect();
                self.export(call, request, &places)
            }
            ControlRule::ImportOne => self.import(call, request, 12, &[(16, 0)]),
            ControlRule::ImportMany => {
                let count = u32::from(get16(&request.params, 648)?);
                let first = u32::from(get16(&request.params, 650)?);
                if count > MOST_IMPORTED {
                    return Err(Stop::Status(status::INVALID_ARGUMENT));
                }
                let places: Vec<(u32, u32)> = (0..count).map(|n| (8 + 4 * n, first + n)).collect();
                self.import(call, request, 4, &places)
            }
            ControlRule::ExportInfo => {
                self.known_file(call, request)?;
                self.forward_control(call, request)
            }
            _ => self.forward_control(call, request),
        }
    }

    /// The file of the request must be one that this container exported to. A copy of it, for look-ups.
    fn known_file(&self, call: &Call<'_>, request: &Request<'_>) -> Result<OwnedFd, Stop> {
        let field: &[FileField] = request.row.files;
        let files = self.translate(call, field, &mut request.params.clone())?;
        let copy = files.into_iter().next().map(|file| file.copy);
        match copy {
            Some(copy) if self.exports.knows(&copy) => Ok(copy),
            _ => Err(Stop::Status(status::INVALID_ARGUMENT)),
        }
    }

    /// Exports the objects named at the offsets of `places` to the slots of `places`.
    fn export(
        &self,
        call: &Call<'_>,
        request: &mut Request<'_>,
        places: &[(u32, u32)],
    ) -> Result<Done, Stop> {
        if !self.exports.room() {
            return Err(Stop::Status(status::INSUFFICIENT_RESOURCES));
        }
        let client = request.name.client;
        let mut named = Vec::new();
        for (at, slot) in places {
            let handle = get32(&request.params, *at)?;
            if handle != 0 {
                named.push((Name { client, handle }, *slot));
            }
        }
        let names: Vec<Name> = named.iter().map(|(name, _)| *name).collect();
        let pins = self.objects.pin(&names).map_err(|_gone| Stop::Status(status::OBJECT_NOT_FOUND))?;
        let done = self.forward_control(call, request)?;
        if Self::control_status(request.outer)? == status::OK
            && let Some(file) = Self::named(request.files())
        {
            let mut graph = self.objects.lock();
            let memory: Vec<Option<MemoryId>> = pins.ids().iter().map(|id| graph.memory(*id)).collect();
            for memory in memory.iter().flatten() {
                graph.keep(*memory);
            }
            drop(graph);
            let mut replaced = Vec::new();
            for ((_, slot), memory) in named.iter().zip(memory) {
                // Without a copy the export can't be imported; its memory stays charged all the same.
                replaced
                    .extend(self.exports.add(call.caller.tgid(), file, *slot, &[memory]).unwrap_or_default());
            }
            // The driver keeps what was in a slot before: it stays charged.
            drop(replaced);
        }
        drop(pins);
        Ok(done)
    }

    /// Imports what is in the slots of `places`; handles stand at their offsets, the parent at `parent`.
    fn import(
        &self,
        call: &Call<'_>,
        request: &mut Request<'_>,
        parent: u32,
        places: &[(u32, u32)],
    ) -> Result<Done, Stop> {
        let file = self.known_file(call, request)?;
        self.objects
            .lock()
            .room(Kind::Other)
            .map_err(|_full| Stop::Status(status::INSUFFICIENT_RESOURCES))?;
        let client = request.name.client;
        let parent = get32(&request.params, parent)?;
        let parent_name = Name { client, handle: parent };
        let pins =
            self.objects.pin(&[parent_name]).map_err(|_gone| Stop::Status(status::OBJECT_NOT_FOUND))?;
        let memory = self.exports.memory(&file, places.iter().map(|(_, slot)| *slot));
        // Kept for the time of the call, whatever becomes of the export.
        let kept: Vec<MemoryId> = memory.iter().flatten().copied().collect();
        let mut graph = self.objects.lock();
        kept.iter().for_each(|memory| graph.keep(*memory));
        drop(graph);
        let result = self.forward_control(call, request);
        if result.is_ok() && Self::control_status(request.outer) == Ok(status::OK) {
            let mut graph = self.objects.lock();
            let mut freed = Vec::new();
            for ((at, _), memory) in places.iter().zip(&memory) {
                let handle = get32(&request.params, *at).unwrap_or(0);
                if handle == 0 {
                    continue;
                }
                let class = memory.and_then(|memory| graph.memory_class(memory)).unwrap_or(0);
                let new = New::plain(Name { client, handle }, parent, class);
                let (id, old) = graph.insert(new);
                freed.push(old);
                if let Some(memory) = memory {
                    graph.refer(id, *memory);
                }
            }
            drop(graph);
            drop(freed);
        }
        self.release(kept);
        drop(pins);
        result
    }
}
