//! Freeing, duplicating, sharing and mapping of objects.

use gpuslice_policy::row::{Escape, FileField, FileKind};
use gpuslice_policy::status;
use gpuslice_sys::Arg;
use nix::errno::Errno;

use crate::bytes::{get32, put32};
use crate::dispatch::{Call, Sandbox, Stop};
use crate::driver::{Done, Driver};
use crate::objects::{Kind, Name, New};
use crate::own_client::{NR_FREE, escape_command};

impl<D: Driver> Sandbox<D> {
    /// `RM_FREE`. Freeing a handle that doesn't exist succeeds in the driver; here it frees nothing.
    pub(crate) fn free(&self, call: &Call<'_>, bytes: &mut [u8]) -> Result<i32, Stop> {
        let (client, parent, handle) = (get32(bytes, 0)?, get32(bytes, 4)?, get32(bytes, 8)?);
        self.check_client(client)?;
        call.still_waiting()?;
        let (status, done) = self.free_object(call, Name { client, handle }, parent)?;
        put32(bytes, 12, status)?;
        Ok(self.deliver(call, done, &[])?)
    }

    /// Frees an object with all that goes with it, in the driver and then in the graph.
    pub(crate) fn free_object(&self, call: &Call<'_>, name: Name, parent: u32) -> Result<(u32, Done), Errno> {
        let freeing = self.objects.begin_free(name);
        let mut bytes = vec![0; 16];
        for (at, value) in [(0, name.client), (4, parent), (8, name.handle)] {
            put32(&mut bytes, at, value)?;
        }
        let mut arg = Arg::flat(bytes);
        let done = self.forward(call, escape_command(NR_FREE, 16), &mut arg)?;
        let status = get32(&arg.bytes, 12)?;
        if status == status::OK
            && let Some(freeing) = freeing
        {
            drop(freeing.finish());
        }
        Ok((status, done))
    }

    /// `RM_DUP_OBJECT`: another handle of the same object; memory stays charged until the last one goes.
    pub(crate) fn dup(&self, call: &Call<'_>, bytes: &mut Vec<u8>) -> Result<i32, Stop> {
        let (client, parent) = (get32(bytes, 0)?, get32(bytes, 4)?);
        let source = Name { client: get32(bytes, 12)?, handle: get32(bytes, 16)? };
        self.check_client(client)?;
        self.check_client(source.client)?;
        self.check_object(source)?;
        let parent_name = Name { client, handle: parent };
        if !self.objects.has(parent_name) {
            return Err(Stop::Status(status::INVALID_OBJECT_PARENT));
        }
        self.objects
            .lock()
            .room(Kind::Other)
            .map_err(|_full| Stop::Status(status::INSUFFICIENT_RESOURCES))?;
        let pins = self
            .objects
            .pin(&[source, parent_name])
            .map_err(|_gone| Stop::Status(status::OBJECT_NOT_FOUND))?;
        let mut arg = Arg::flat(std::mem::take(bytes));
        let done = match call.still_waiting() {
            Ok(()) => self.forward(call, escape_command(0x34, 28), &mut arg),
            Err(gone) => Err(gone),
        };
        *bytes = arg.bytes;
        let done = done?;
        if get32(bytes, 24)? == status::OK
            && let Some(source) = pins.ids().first()
        {
            let mut graph = self.objects.lock();
            let name = Name { client, handle: get32(bytes, 8)? };
            let new = New::plain(name, parent, graph.class(*source).unwrap_or(0));
            let memory = graph.memory(*source);
            let (id, freed) = graph.insert(new);
            if let Some(memory) = memory {
                graph.refer(id, memory);
            }
            drop(graph);
            drop(freed);
        }
        drop(pins);
        Ok(self.deliver(call, done, &[])?)
    }

    /// `RM_SHARE`: who may duplicate an own object. Others can't name it to their own sandbox anyway.
    pub(crate) fn share(&self, call: &Call<'_>, row: &Escape, bytes: &mut Vec<u8>) -> Result<i32, Stop> {
        let (client, handle, target) = (get32(bytes, 0)?, get32(bytes, 4)?, get32(bytes, 8)?);
        self.check_client(client)?;
        self.check_object(Name { client, handle })?;
        if target != 0 {
            self.check_client(target)?;
        }
        let done = self.forward_flat(call, row, bytes)?;
        Ok(self.deliver(call, done, &[])?)
    }

    fn check_mapped(&self, bytes: &[u8]) -> Result<(), Stop> {
        let client = get32(bytes, 0)?;
        self.check_client(client)?;
        for at in [4, 8] {
            self.check_object(Name { client, handle: get32(bytes, at)? })?;
        }
        Ok(())
    }

    /// `RM_MAP_MEMORY`: leaves a mapping context in a file of the tenant's, which maps it natively.
    pub(crate) fn map_memory(&self, call: &Call<'_>, row: &Escape, bytes: &mut Vec<u8>) -> Result<i32, Stop> {
        self.check_mapped(bytes)?;
        let name = Name { client: get32(bytes, 0)?, handle: get32(bytes, 8)? };
        let field = FileField { at: 48, kind: FileKind::Frontend, optional: true };
        let files = self.translate(call, &[field], bytes)?;
        let pins = self.objects.pin(&[name]).map_err(|_gone| Stop::Status(status::OBJECT_NOT_FOUND))?;
        let held = pins.ids().first().map(|id| self.hold_mapped(name, *id));
        let done = match held.transpose() {
            Ok(_) => self.forward_flat(call, row, bytes).map_err(Stop::from),
            Err(stop) => Err(stop),
        };
        drop(pins);
        Self::restore(&files, bytes)?;
        Ok(self.deliver(call, done?, &files)?)
    }

    /// `RM_UNMAP_MEMORY`.
    pub(crate) fn unmap_memory(
        &self,
        call: &Call<'_>,
        row: &Escape,
        bytes: &mut Vec<u8>,
    ) -> Result<i32, Stop> {
        self.check_mapped(bytes)?;
        let done = self.forward_flat(call, row, bytes)?;
        Ok(self.deliver(call, done, &[])?)
    }
}
