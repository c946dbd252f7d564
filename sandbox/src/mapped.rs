//! Video memory that the tenant maps into its own address space.
//!
//! The driver never takes such a mapping away: who keeps it reaches the pages after they were freed, and whatever
//! they hold by then; so does who keeps the file that the mapping was made for, and maps it again. Both outlive the
//! process: a child inherits the mapping, a file goes through execve(2) and over sockets, and nobody can tell
//! whether one is still on its way. So our own client duplicates the memory before the first mapping is made, and
//! the duplicate goes with the container. Until then the memory stays allocated and charged, whatever the tenant
//! frees. CUDA maps 2 MiB a process. Owns: the duplicates. Trusts: the driver's answers. Failure: memory that can't
//! be duplicated isn't mapped.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use gpuslice_policy::status;

use crate::dispatch::{Sandbox, Stop};
use crate::driver::Driver;
use crate::objects::{Id, MemoryId, Name};

/// Class of video memory.
const VIDEO_MEMORY: u32 = 0x40;

/// All of it.
#[derive(Default)]
pub(crate) struct Mapped {
    held: Mutex<HashSet<MemoryId>>,
}

impl Mapped {
    fn lock(&self) -> MutexGuard<'_, HashSet<MemoryId>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<D: Driver> Sandbox<D> {
    /// Holds the memory of `id`, pinned by the caller, that a process is about to map.
    pub(crate) fn hold_mapped(&self, name: Name, id: Id) -> Result<(), Stop> {
        let graph = self.objects.lock();
        let memory = graph.memory(id).filter(|memory| graph.memory_class(*memory) == Some(VIDEO_MEMORY));
        let gpu = graph.gpu(id);
        drop(graph);
        let Some(memory) = memory else { return Ok(()) };
        if self.mapped.lock().contains(&memory) {
            return Ok(());
        }
        let refused = Stop::Status(status::INSUFFICIENT_RESOURCES);
        let handle = gpu.and_then(|gpu| self.own.duplicate(&self.driver, gpu, name)).ok_or(refused)?;
        self.objects.lock().keep(memory);
        if !self.mapped.lock().insert(memory) {
            // Another thread was faster.
            self.own.free(&self.driver, handle);
            self.release(vec![memory]);
        }
        Ok(())
    }
}
