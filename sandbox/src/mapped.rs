//! Video memory that the tenant maps into its own address space.
//!
//! The driver never takes such a mapping away: who keeps it reaches the pages after they were freed, and whatever
//! they hold by then. So our own client duplicates the memory before the first mapping is made, and frees the
//! duplicate only when every process that had it mapped has ended. Until then the memory stays allocated and
//! charged, whatever the tenant frees. Owns: the duplicates. Trusts: the driver's answers. Failure: memory that
//! can't be duplicated isn't mapped.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use gpuslice_policy::status;

use crate::dispatch::{Sandbox, Stop};
use crate::driver::Driver;
use crate::objects::{Id, MemoryId, Name};

/// Class of video memory.
const VIDEO_MEMORY: u32 = 0x40;

struct Held {
    /// Our duplicate.
    handle: u32,
    /// Processes that mapped it.
    processes: BTreeSet<u32>,
}

/// All of it.
#[derive(Default)]
pub(crate) struct Mapped {
    held: Mutex<HashMap<MemoryId, Held>>,
}

impl Mapped {
    fn lock(&self) -> MutexGuard<'_, HashMap<MemoryId, Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes another process of memory that is held already.
    fn add(&self, memory: MemoryId, process: u32) -> bool {
        let mut held = self.lock();
        let known = held.get_mut(&memory);
        known.is_some_and(|held| {
            held.processes.insert(process);
            true
        })
    }

    /// Takes out what only `process` had mapped.
    fn end(&self, process: u32) -> Vec<(MemoryId, u32)> {
        let mut held = self.lock();
        for held in held.values_mut() {
            held.processes.remove(&process);
        }
        let gone = held.extract_if(|_, held| held.processes.is_empty());
        gone.map(|(memory, held)| (memory, held.handle)).collect()
    }
}

impl<D: Driver> Sandbox<D> {
    /// Holds the memory of `id`, pinned by the caller, for `process`, which is about to map it.
    pub(crate) fn hold_mapped(&self, name: Name, id: Id, process: u32) -> Result<(), Stop> {
        let graph = self.objects.lock();
        let memory = graph.memory(id).filter(|memory| graph.memory_class(*memory) == Some(VIDEO_MEMORY));
        let gpu = graph.gpu(id);
        drop(graph);
        let Some(memory) = memory else { return Ok(()) };
        if self.mapped.add(memory, process) {
            return Ok(());
        }
        let refused = Stop::Status(status::INSUFFICIENT_RESOURCES);
        let handle = gpu.and_then(|gpu| self.own.duplicate(&self.driver, gpu, name)).ok_or(refused)?;
        self.objects.lock().keep(memory);
        let mut held = self.mapped.lock();
        let extra = match held.get_mut(&memory) {
            // Another thread was faster.
            Some(held) => {
                held.processes.insert(process);
                true
            }
            None => {
                held.insert(memory, Held { handle, processes: BTreeSet::from([process]) });
                false
            }
        };
        drop(held);
        if extra {
            self.own.free(&self.driver, handle);
            self.release(vec![memory]);
        }
        Ok(())
    }

    /// A process ended, and its mappings with it.
    pub(crate) fn end_mapped(&self, process: u32) {
        for (memory, handle) in self.mapped.end(process) {
            if self.own.free(&self.driver, handle) {
                self.release(vec![memory]);
            }
        }
    }
}
