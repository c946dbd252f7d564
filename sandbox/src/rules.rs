//! Controls that are checked, rewritten or answered here.

use gpuslice_policy::row::{ControlRule, Handle, Tie};
use gpuslice_policy::status;

use crate::bytes::{get32, part_mut, put32, put64};
use crate::control::Request;
use crate::dispatch::{Call, Sandbox, Stop};
use crate::driver::{Done, Driver};
use crate::objects::Name;
use crate::rewrite::{self, View};

/// The timeslice that a group has before anybody sets it, microseconds.
const DEFAULT_TIMESLICE: u64 = 2048;
/// "All GPUs" in the first place of a list to attach.
const ATTACH_ALL: u32 = 0xffff;
/// End of a list of GPU ids.
pub(crate) const NO_GPU: u32 = 0xffff_ffff;

impl<D: Driver> Sandbox<D> {
    /// Forwarded as it is; ties the object to what the row says that it depends on.
    pub(crate) fn forward_plain(&self, call: &Call<'_>, request: &mut Request<'_>) -> Result<Done, Stop> {
        let mut names = Vec::new();
        for handle in request.row.handles {
            if let Handle::Object { at, tie: Tie::Depends, .. } = *handle {
                let handle = get32(&request.params, at)?;
                if handle != 0 {
                    names.push(Name { client: request.name.client, handle });
                }
            }
        }
        if names.is_empty() {
            return self.forward_control(call, request);
        }
        names.push(request.name);
        let pins = self.objects.pin(&names).map_err(|_gone| Stop::Status(status::OBJECT_NOT_FOUND))?;
        let done = self.forward_control(call, request)?;
        if Self::control_status(request.outer)? == status::OK
            && let Some((object, others)) = pins.ids().split_last()
        {
            let mut graph = self.objects.lock();
            for other in others {
                graph.depend(*object, *other);
            }
        }
        drop(pins);
        Ok(done)
    }

    /// Answered without the driver.
    pub(crate) fn answer(&self, request: &mut Request<'_>) -> Result<Done, Stop> {
        match request.row.rule {
            ControlRule::AnswerZeros => request.params.fill(0),
            ControlRule::Processes => rewrite::no_processes(&mut request.params)?,
            ControlRule::ProcessInfo => rewrite::idle_processes(&mut request.params)?,
            ControlRule::DeviceMask => {
                let bit = |instance: u32| 1u32.checked_shl(instance).unwrap_or(0);
                let mask = self.own.cards().iter().fold(0, |mask, card| mask | bit(card.instance));
                put32(&mut request.params, 0, mask)?;
            }
            ControlRule::SetTimeslice => {
                let microseconds = crate::bytes::get64(&request.params, 0)?;
                let mut graph = self.objects.lock();
                if let Some(id) = graph.find(request.name) {
                    graph.set_timeslice(id, microseconds);
                }
            }
            ControlRule::GetTimeslice => {
                let graph = self.objects.lock();
                let set = graph.find(request.name).map_or(0, |id| graph.timeslice(id));
                put64(&mut request.params, 0, if set == 0 { DEFAULT_TIMESLICE } else { set })?;
            }
            _ => {}
        }
        Self::answered(request.outer)
    }

    /// Checked before, or rewritten after, the driver's turn.
    pub(crate) fn rewritten(&self, call: &Call<'_>, request: &mut Request<'_>) -> Result<Done, Stop> {
        match request.row.rule {
            ControlRule::RequireIds { at, count, used } => {
                let used = match used {
                    Some(at) => get32(&request.params, at)?.min(count),
                    None => count,
                };
                self.require_ids(&request.params, at, used)?;
            }
            ControlRule::RequireIdMatrix => {
                for (number, at) in [(0, 8), (4, 40)] {
                    let used = get32(&request.params, number)?;
                    if used > 8 {
                        return Err(Stop::Status(status::INVALID_ARGUMENT));
                    }
                    self.require_ids(&request.params, at, used)?;
                }
            }
            ControlRule::AttachIds => self.attach_ids(&mut request.params)?,
            ControlRule::PreemptionMode => {
                let (flags, mode) = (get32(&request.params, 0)?, get32(&request.params, 12)?);
                // "Set the compute mode" to wait-for-idle would let a long kernel outstay its slice.
                if flags & 1 != 0 && mode == 0 {
                    return Self::answered(request.outer);
                }
            }
            // A group's first start is what puts it on the runlist; a stop is the scheduler's business.
            ControlRule::Schedule if request.params.first() == Some(&0) => {
                return Self::answered(request.outer);
            }
            ControlRule::ChannelList => {
                let list = request.behind.first().map(|(_, bytes)| bytes.clone()).unwrap_or_default();
                self.require_channels(request.name.client, &list)?;
            }
            ControlRule::InlineChannels => {
                let count = get32(&request.params, 0)?;
                if count > 4096 {
                    return Err(Stop::Status(status::INVALID_ARGUMENT));
                }
                let list = crate::bytes::part(&request.params, 4, count.saturating_mul(4))?.to_vec();
                self.require_channels(request.name.client, &list)?;
            }
            _ => {}
        }
        let view = self.view(request)?;
        let done = self.forward_control(call, request)?;
        if Self::control_status(request.outer)? == status::OK {
            self.rewrite(request, view)?;
        }
        Ok(done)
    }

    /// The quota as the object that is asked shows it.
    fn view(&self, request: &Request<'_>) -> Result<Option<View>, Stop> {
        let name = match request.row.rule {
            ControlRule::MemoryInfo | ControlRule::MemoryInfoList => request.name,
            ControlRule::MemorySize => {
                Name { client: request.name.client, handle: get32(&request.params, 0)? }
            }
            _ => return Ok(None),
        };
        let graph = self.objects.lock();
        let gpu = graph.find(name).and_then(|id| graph.gpu(id));
        drop(graph);
        let account = gpu.and_then(|gpu| self.accounts.get(gpu));
        let account = account.ok_or(Stop::Status(status::INVALID_ARGUMENT))?;
        Ok(Some(View { limit: account.limit(), used: account.used() }))
    }

    fn rewrite(&self, request: &mut Request<'_>, view: Option<View>) -> Result<(), Stop> {
        let granted = |id: u32| self.card_of_id(id).is_some();
        match (request.row.rule, view) {
            (ControlRule::FilterIds { at, count, lists }, _) => {
                for list in 0..lists {
                    let at = at.saturating_add(list.saturating_mul(count).saturating_mul(4));
                    rewrite::filter_ids(part_mut(&mut request.params, at, count.saturating_mul(4))?, granted);
                }
            }
            (ControlRule::FilterEntries { at, stride }, _) => {
                rewrite::filter_entries(&mut request.params, at, stride, granted)?;
            }
            (ControlRule::MemoryInfo, Some(view)) => {
                let count = get32(&request.params, 0)?;
                let length = count.saturating_mul(8).min(request.row.size.saturating_sub(4));
                rewrite::memory_info(part_mut(&mut request.params, 4, length)?, view);
            }
            (ControlRule::MemoryInfoList, Some(view)) => {
                if let Some((_, entries)) = request.behind.first_mut() {
                    rewrite::memory_info(entries, view);
                }
            }
            (ControlRule::MemorySize, Some(view)) => rewrite::memory_size(&mut request.params, view)?,
            _ => {}
        }
        Ok(())
    }

    /// Each of `count` ids at `at` is a granted GPU's.
    fn require_ids(&self, params: &[u8], at: u32, count: u32) -> Result<(), Stop> {
        for place in 0..count {
            let id = get32(params, at.saturating_add(place.saturating_mul(4)))?;
            if self.card_of_id(id).is_none() {
                return Err(Stop::Status(status::INVALID_ARGUMENT));
            }
        }
        Ok(())
    }

    fn attach_ids(&self, params: &mut [u8]) -> Result<(), Stop> {
        if get32(params, 0)? == ATTACH_ALL {
            part_mut(params, 0, 128)?.fill(0xff);
            for (card, at) in self.own.cards().iter().zip((0..128).step_by(4)) {
                put32(params, at, card.id)?;
            }
            return Ok(());
        }
        for at in (0..128).step_by(4) {
            let id = get32(params, at)?;
            if id == NO_GPU {
                break;
            }
            self.require_ids(params, at, 1)?;
        }
        Ok(())
    }

    fn require_channels(&self, client: u32, list: &[u8]) -> Result<(), Stop> {
        let graph = self.objects.lock();
        let known =
            |bytes: &[u8]| get32(bytes, 0).is_ok_and(|handle| graph.find(Name { client, handle }).is_some());
        if list.chunks_exact(4).all(known) { Ok(()) } else { Err(Stop::Status(status::OBJECT_NOT_FOUND)) }
    }

    /// A third party begins or ends to keep memory.
    pub(crate) fn registration(&self, call: &Call<'_>, request: &mut Request<'_>) -> Result<Done, Stop> {
        let handle = get32(&request.params, 0)?;
        let memory = Name { client: request.name.client, handle };
        let pins = self
            .objects
            .pin(&[request.name, memory])
            .map_err(|_gone| Stop::Status(status::OBJECT_NOT_FOUND))?;
        let done = self.forward_control(call, request)?;
        if Self::control_status(request.outer)? == status::OK
            && let [object, memory] = pins.ids()
        {
            let mut graph = self.objects.lock();
            let freed = match request.row.rule {
                ControlRule::UnregisterMemory => graph.unregister(*object, handle),
                _ => {
                    if let Some(memory) = graph.memory(*memory) {
                        graph.register(*object, handle, memory);
                    }
                    crate::objects::Freed::default()
                }
            };
            drop(graph);
            drop(freed);
        }
        drop(pins);
        Ok(done)
    }
}
