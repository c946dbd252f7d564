//! Commands of the control and GPU nodes.

use gpuslice_policy::row::{Escape, EscapeRule, FileField, FileKind, On};
use gpuslice_policy::status;
use gpuslice_sys::Arg;
use nix::errno::Errno;

use crate::bytes::{get32, get64, index, part, part_mut, put32, put64};
use crate::dispatch::{Call, Outcome, Sandbox, Stop, conclude};
use crate::driver::{Driver, Node};
use crate::own_client::{CARD_BYTES, CARDS, escape_command};
use crate::refusals::Refused;

/// The command that carries another one: its size.
const TRANSFER_BYTES: u32 = 16;
/// Direction bits of `_IOWR`.
const READ_WRITE: u32 = 3;
/// GPU ids in one "attach" as the driver gets it.
const ATTACH_IDS: u32 = 32;
/// Mapping into a GPU address space, and its end; where the latter says how much, 0 for all.
const MAP_DMA: u8 = 0x57;
const UNMAP_DMA: u8 = 0x58;
const UNMAP_DMA_SIZE: u32 = 32;
/// Bytes of one event.
const EVENT_BYTES: usize = 40;

impl<D: Driver> Sandbox<D> {
    /// A command of the front end. The driver looks at the number byte and the size alone; its own libraries say
    /// `_IOWR('F', …)`, and whatever else has its number byte is refused.
    pub(crate) fn front_end(&self, call: &Call<'_>, cmd: u32, arg: u64) -> Result<Outcome, Errno> {
        let [nr, kind, ..] = cmd.to_le_bytes();
        let size = (cmd >> 16) & 0x3fff;
        if kind != b'F' || cmd >> 30 != READ_WRITE {
            self.refusals.note(Refused::Escape, u32::from(nr), "foreign", "another type byte or direction");
            return Err(Errno::EINVAL);
        }
        let row = self.escape_row(call, nr, size)?;
        if row.rule != EscapeRule::Transfer {
            return self.escape(call, row, size, arg);
        }
        let transfer = call.read(arg, index(TRANSFER_BYTES))?;
        let (inner, size, arg) = (get32(&transfer, 0)?, get32(&transfer, 4)?, get64(&transfer, 8)?);
        let inner = u8::try_from(inner).map_err(|_| Errno::EINVAL)?;
        let row = self.escape_row(call, inner, size)?;
        if row.rule == EscapeRule::Transfer {
            return Err(Errno::EINVAL);
        }
        self.escape(call, row, size, arg)
    }

    fn escape_row(&self, call: &Call<'_>, nr: u8, size: u32) -> Result<&'static Escape, Errno> {
        let Some(row) = self.table.escape(nr) else {
            self.refusals.note(Refused::Escape, u32::from(nr), "unknown", "not in the table");
            return Err(Errno::EINVAL);
        };
        let accepted = match row.on {
            On::Any => true,
            On::Control => call.node == Node::Control,
            On::Gpu => matches!(call.node, Node::Gpu { .. }),
        };
        if !accepted || !row.size.accepts(size) {
            let why = if accepted { "wrong size" } else { "wrong node" };
            self.refusals.note(Refused::Escape, u32::from(nr), row.name, why);
            return Err(Errno::EINVAL);
        }
        Ok(row)
    }

    fn escape(&self, call: &Call<'_>, row: &'static Escape, size: u32, addr: u64) -> Result<Outcome, Errno> {
        if row.rule == EscapeRule::Deny {
            self.refusals.note(Refused::Escape, u32::from(row.nr), row.name, "denied");
            let Some(at) = row.status else { return Err(Errno::EINVAL) };
            let mut bytes = call.read(addr, index(size))?;
            return conclude(call, addr, &mut bytes, Some(at), Err(Stop::Status(status::NOT_SUPPORTED)));
        }
        let mut bytes = call.read(addr, index(size))?;
        let result = match row.rule {
            EscapeRule::Control => self.control(call, &mut bytes),
            EscapeRule::Alloc => return self.alloc(call, addr, bytes),
            EscapeRule::AllocMemory => self.alloc_memory(call, &mut bytes),
            EscapeRule::Free => self.free(call, &mut bytes),
            EscapeRule::Dup => self.dup(call, &mut bytes),
            EscapeRule::Share => self.share(call, row, &mut bytes),
            EscapeRule::MapMemory => self.map_memory(call, row, &mut bytes),
            EscapeRule::UnmapMemory => self.unmap_memory(call, row, &mut bytes),
            EscapeRule::EventData => self.event_data(call, row, &mut bytes),
            EscapeRule::CardInfo => self.card_info(call, row, &mut bytes),
            EscapeRule::RegisterFile => self.register_file(call, row, &mut bytes),
            EscapeRule::AttachGpus => self.attach_gpus(call, row, &mut bytes),
            EscapeRule::Forward => self.plain(call, row, &mut bytes),
            EscapeRule::Deny | EscapeRule::Transfer => Err(Stop::Errno(Errno::EINVAL)),
        };
        conclude(call, addr, &mut bytes, row.status, result)
    }

    /// Forwards `bytes` as the parameters of `row`, at its full size.
    pub(crate) fn forward_flat(
        &self,
        call: &Call<'_>,
        row: &Escape,
        bytes: &mut Vec<u8>,
    ) -> Result<crate::driver::Done, Errno> {
        let size = u32::try_from(bytes.len()).map_err(|_| Errno::EINVAL)?;
        let mut arg = Arg::flat(std::mem::take(bytes));
        call.still_waiting()?;
        let done = self.forward(call, escape_command(row.nr, size), &mut arg);
        *bytes = arg.bytes;
        done
    }

    fn plain(&self, call: &Call<'_>, row: &Escape, bytes: &mut Vec<u8>) -> Result<i32, Stop> {
        let client = if row.handles.is_empty() { 0 } else { get32(bytes, 0)? };
        self.check_handles(row.handles, client, bytes)?;
        let whole = row.nr == UNMAP_DMA && get64(bytes, UNMAP_DMA_SIZE)? == 0;
        if row.nr == MAP_DMA {
            self.dma_maps.take()?;
        }
        let done = self.forward_flat(call, row, bytes);
        let well = done.is_ok() && row.status.is_none_or(|at| get32(bytes, at) == Ok(status::OK));
        // Of a part that is unmapped more may be left than there was.
        if (row.nr == MAP_DMA && !well) || (whole && well) {
            self.dma_maps.give();
        }
        Ok(self.deliver(call, done?, &[])?)
    }

    fn register_file(&self, call: &Call<'_>, row: &Escape, bytes: &mut Vec<u8>) -> Result<i32, Stop> {
        let field = FileField { at: 0, kind: FileKind::Control, optional: false };
        let files = self.translate(call, &[field], bytes)?;
        let done = self.forward_flat(call, row, bytes);
        Self::restore(&files, bytes)?;
        Ok(self.deliver(call, done?, &files)?)
    }

    fn event_data(&self, call: &Call<'_>, row: &Escape, bytes: &mut Vec<u8>) -> Result<i32, Stop> {
        let target = get64(bytes, 0)?;
        let mut arg = Arg::flat(std::mem::take(bytes));
        arg.link(None, 0, if target == 0 { Vec::new() } else { vec![0; EVENT_BYTES] });
        call.still_waiting()?;
        let done = self.forward(call, escape_command(row.nr, 16), &mut arg);
        *bytes = arg.bytes;
        put64(bytes, 0, target)?;
        let done = done?;
        if let Some(link) = arg.links.first() {
            call.write(target, &link.bytes)?;
        }
        Ok(self.deliver(call, done, &[])?)
    }

    /// The list of cards: asked for at full length, cards that weren't granted are blanked.
    fn card_info(&self, call: &Call<'_>, row: &Escape, bytes: &mut [u8]) -> Result<i32, Stop> {
        let mut full = vec![0; index(CARD_BYTES * CARDS)];
        let done = self.forward_flat(call, row, &mut full)?;
        let granted = |card: &[u8]| get32(card, 16).is_ok_and(|id| self.card_of_id(id).is_some());
        let length = index(CARD_BYTES);
        for card in full.chunks_exact_mut(length) {
            if !granted(card) {
                card.fill(0);
            }
        }
        let fitting = full.len().min(bytes.len());
        let lost = full.get(fitting..).unwrap_or_default().iter().any(|byte| *byte != 0);
        if lost {
            return Err(Stop::Errno(Errno::EINVAL));
        }
        bytes.fill(0);
        let fitting = u32::try_from(fitting).map_err(|_| Errno::EINVAL)?;
        part_mut(bytes, 0, fitting)?.copy_from_slice(part(&full, 0, fitting)?);
        Ok(self.deliver(call, done, &[])?)
    }

    /// A list of GPU ids, zeros between them ignored.
    fn attach_gpus(&self, call: &Call<'_>, row: &Escape, bytes: &mut [u8]) -> Result<i32, Stop> {
        let mut full = vec![0; index(ATTACH_IDS * 4)];
        let mut next = 0;
        for id in bytes.chunks_exact(4) {
            let id = get32(id, 0)?;
            if id == 0 {
                continue;
            }
            if self.card_of_id(id).is_none() || next >= ATTACH_IDS {
                return Err(Stop::Errno(Errno::EINVAL));
            }
            put32(&mut full, next * 4, id)?;
            next += 1;
        }
        let done = self.forward_flat(call, row, &mut full)?;
        Ok(self.deliver(call, done, &[])?)
    }
}
