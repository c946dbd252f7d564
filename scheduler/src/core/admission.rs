//! Who gets a lease: checks of a registration, and the sums of guaranteed memory.
//!
//! The guaranteed (soft) memory of all tenants of a card never exceeds it by a registration. An adopted
//! tenant had its guarantee before and keeps it.

use std::collections::BTreeSet;

use gpuslice_config::MAX_WEIGHT;
use gpuslice_proto::{GpuSlice, GpuUuid, Reason, Register};

use super::audit::LINGERS;
use super::{Core, Refusal, State};

/// Most GPUs of one container.
const MAX_GPUS: usize = 16;
/// Longest driver version.
const MAX_VERSION: usize = 32;

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}

impl Core {
    /// Guaranteed on a card, bytes. A tenant that left and whose sandbox has ended holds what the driver goes on
    /// showing of it: a file of its clients may be open in another container.
    pub(super) fn guaranteed(&self, uuid: &GpuUuid) -> u64 {
        let held = |tenant: &super::Tenant| {
            let at = tenant.gpus.iter().position(|slice| slice.uuid == *uuid)?;
            if tenant.state == State::Active || !tenant.sandbox_ended {
                return tenant.gpus.get(at).map(|slice| slice.memory_soft);
            }
            tenant.audited.get(at).copied().filter(|_| tenant.lingered >= LINGERS)
        };
        self.tenants.values().filter_map(held).fold(0, u64::saturating_add)
    }

    /// Everything about a registration but the sums.
    pub(super) fn check(&self, register: &Register) -> Result<(), Refusal> {
        if register.driver.len() > MAX_VERSION || register.driver != self.driver {
            return Err(Refusal::new(
                Reason::DriverChanged,
                format!(
                    "the shim found driver {:.32}, the scheduler was started on {}; restart gpuslice-scheduler",
                    register.driver, self.driver
                ),
            ));
        }
        let same =
            |tenant: &&super::Tenant| tenant.state == State::Active && tenant.container == register.container;
        if let Some(tenant) = self.tenants.values().find(same) {
            return Err(Refusal::new(
                Reason::Duplicate,
                format!("container {} holds a lease already (uid {})", tenant.container, tenant.uid),
            ));
        }
        if register.gpus.is_empty() || register.gpus.len() > MAX_GPUS {
            let found = register.gpus.len();
            return Err(Refusal::new(
                Reason::BadLimit,
                format!("{found} GPUs asked for, 1 to {MAX_GPUS} allowed"),
            ));
        }
        let mut seen = BTreeSet::new();
        register.gpus.iter().try_for_each(|slice| {
            if !seen.insert(&slice.uuid) {
                return Err(Refusal::new(Reason::BadLimit, format!("{} is named twice", slice.uuid)));
            }
            self.check_slice(slice, register.adopt.is_some())
        })
    }

    fn check_slice(&self, slice: &GpuSlice, adopted: bool) -> Result<(), Refusal> {
        let Some(gpu) = self.gpus.get(&slice.uuid).filter(|gpu| gpu.card.minor == slice.minor) else {
            let known: Vec<String> = self
                .gpus
                .values()
                .map(|gpu| format!("{} (nvidia{})", gpu.card.uuid, gpu.card.minor))
                .collect();
            return Err(Refusal::new(
                Reason::UnknownGpu,
                format!(
                    "{} (nvidia{}) is not among the node's: {}; restart gpuslice-scheduler if it was added",
                    slice.uuid,
                    slice.minor,
                    known.join(", ")
                ),
            ));
        };
        if let Some(why) = gpu.unhealthy.as_ref().filter(|_| !adopted) {
            return Err(Refusal::new(Reason::GpuUnhealthy, format!("{}: {why:.200}", slice.uuid)));
        }
        let bad = |what: String| Err(Refusal::new(Reason::BadLimit, format!("{}: {what}", slice.uuid)));
        let (hard, soft, card) = (slice.memory_hard, slice.memory_soft, gpu.card.memory);
        if hard == 0 || hard > card {
            return bad(format!(
                "memory-hard is {hard} bytes, 1 to {card} ({}) allowed: the card has no more",
                mib(card)
            ));
        }
        if soft > hard {
            return bad(format!("memory-soft is {soft} bytes, at most memory-hard ({hard} bytes) allowed"));
        }
        if slice.weight == 0 || slice.weight > MAX_WEIGHT {
            return bad(format!("weight is {}, 1 to {MAX_WEIGHT} allowed", slice.weight));
        }
        Ok(())
    }

    /// The card has room for what is guaranteed.
    pub(super) fn check_guarantees(&self, gpus: &[GpuSlice]) -> Result<(), Refusal> {
        gpus.iter().try_for_each(|slice| {
            let card = self.gpus.get(&slice.uuid).map_or(0, |gpu| gpu.card.memory);
            let taken = self.guaranteed(&slice.uuid);
            if taken.checked_add(slice.memory_soft).is_some_and(|sum| sum <= card) {
                return Ok(());
            }
            let left = card.saturating_sub(taken);
            Err(Refusal::new(
                Reason::MemoryExhausted,
                format!(
                    "{}: {} guaranteed of {}, {} asked for, {} left; lower gpuslice.io/memory-soft or end a container",
                    slice.uuid,
                    mib(taken),
                    mib(card),
                    mib(slice.memory_soft),
                    mib(left)
                ),
            ))
        })
    }
}
