//! The pure part: who holds which lease, what each was guaranteed, and what an audit means.
//!
//! Owns: the node's tenants, the uid pool, the cards' sums. Does no I/O and reads no clock; time is an
//! argument. Invariants, each property-tested against a naive model: no two tenants share a uid, a lease
//! number or a container id; the guaranteed memory of all tenants on a card, those that are leaving
//! included, exceeds the card only by what was adopted or outlives its sandbox; a uid comes back only when the driver shows nothing
//! of its sandbox. Failure: a typed [`Refusal`] with what was found, what is allowed, and the remedy.
//!
//! ```text
//!          register            closed               sandbox gone and driver shows nothing
//!  (none) ──────────> Active ──────────> Leaving ──────────────────────────────────────────> (none)
//!                       ^   adopt           │
//!                       └───────────────────┘
//! ```

mod admission;
mod audit;
mod uids;

use std::collections::BTreeMap;

use gpuslice_config::UidRange;
use gpuslice_proto::{
    ContainerId, GpuSlice, GpuUsage, GpuUuid, Lease, LeaseId, Reason, Register, StatusGpu, StatusTenant,
};

pub(crate) use audit::Verdict;
use uids::UidPool;

use crate::backend::Card;

/// A refusal as it goes to the peer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}: {detail}")]
pub(crate) struct Refusal {
    /// Stable code.
    pub(crate) reason: Reason,
    /// Found, allowed, remedy.
    pub(crate) detail: String,
}

impl Refusal {
    pub(crate) fn new(reason: Reason, detail: impl Into<String>) -> Refusal {
        Refusal { reason, detail: detail.into() }
    }
}

/// A card and its state.
#[derive(Clone, Debug)]
pub(crate) struct Gpu {
    pub(crate) card: Card,
    /// Why no container may start on it, where that is so.
    pub(crate) unhealthy: Option<String>,
}

/// Where a tenant is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Its shim's socket is open.
    Active,
    /// Its shim's socket closed; the sandbox or its clients may still be there.
    Leaving,
}

/// What the ledger of an adopted tenant was found to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ledger {
    /// Equal to the driver's figure, or never in doubt: the tenant started under this scheduler.
    Proven,
    /// Not compared yet, or the last so many comparisons failed.
    Unproven { failed: u8 },
}

/// One tenant.
#[derive(Clone, Debug)]
struct Tenant {
    container: ContainerId,
    uid: u32,
    sandbox_pid: u32,
    gpus: Vec<GpuSlice>,
    state: State,
    ledger: Ledger,
    /// The sandbox process has ended.
    sandbox_ended: bool,
    /// Audits of the driver since it left and ended that showed something of it.
    lingered: u32,
    usage: Vec<GpuUsage>,
    /// `used` of the report before, in the same order.
    used_before: Vec<u64>,
    refused: u64,
    /// The driver's figure per granted GPU at the last audit.
    audited: Vec<u64>,
    /// That figure was not compared with the ledger yet.
    fresh: bool,
}

/// The node.
#[derive(Debug)]
pub(crate) struct Core {
    driver: String,
    gpus: BTreeMap<GpuUuid, Gpu>,
    uids: UidPool,
    tenants: BTreeMap<LeaseId, Tenant>,
    next_lease: u64,
}

impl Core {
    /// A node without tenants. `first_lease` is larger than any lease number given out before on this node.
    pub(crate) fn new(driver: String, cards: Vec<Card>, uids: UidRange, first_lease: u64) -> Core {
        let gpus = cards.into_iter().map(|card| (card.uuid.clone(), Gpu { card, unhealthy: None })).collect();
        Core { driver, gpus, uids: UidPool::new(uids), tenants: BTreeMap::new(), next_lease: first_lease }
    }

    /// Driver version.
    pub(crate) fn driver(&self) -> &str {
        &self.driver
    }

    /// The cards.
    pub(crate) fn gpus(&self) -> impl Iterator<Item = &Gpu> {
        self.gpus.values()
    }

    /// A uid that a process of an earlier time still has: not given out until it is adopted or set free.
    pub(crate) fn quarantine(&mut self, uid: u32) {
        self.uids.quarantine(uid);
    }

    /// Quarantined uids that no tenant holds.
    pub(crate) fn quarantined(&self) -> Vec<u32> {
        self.uids.quarantined().collect()
    }

    /// No process has this uid any more.
    pub(crate) fn end_quarantine(&mut self, uid: u32) {
        self.uids.end_quarantine(uid);
    }

    /// Gives out a lease, or takes one over that an earlier scheduler gave out.
    pub(crate) fn register(&mut self, register: &Register) -> Result<Lease, Refusal> {
        self.check(register)?;
        let lease = match register.adopt {
            Some(lease) => {
                self.check_adoption(&register.container, lease)?;
                self.uids.adopt(lease.uid)?;
                self.next_lease = self.next_lease.max(lease.lease.0.saturating_add(1));
                lease
            }
            None => {
                self.check_guarantees(&register.gpus)?;
                let uid = self.uids.take()?;
                let lease = Lease { lease: LeaseId(self.next_lease), uid, sandbox_pid: 0 };
                self.next_lease += 1;
                lease
            }
        };
        let tenant = Tenant {
            container: register.container.clone(),
            uid: lease.uid,
            sandbox_pid: lease.sandbox_pid,
            gpus: register.gpus.clone(),
            state: State::Active,
            ledger: if register.adopt.is_some() { Ledger::Unproven { failed: 0 } } else { Ledger::Proven },
            sandbox_ended: false,
            lingered: 0,
            usage: Vec::new(),
            used_before: Vec::new(),
            refused: 0,
            audited: Vec::new(),
            fresh: false,
        };
        self.tenants.insert(lease.lease, tenant);
        Ok(lease)
    }

    /// An adopted lease must be free, or the same tenant's own from before its socket closed.
    fn check_adoption(&mut self, container: &ContainerId, lease: Lease) -> Result<(), Refusal> {
        match self.tenants.get(&lease.lease) {
            Some(old)
                if old.state == State::Leaving && old.container == *container && old.uid == lease.uid =>
            {
                self.uids.release(lease.uid);
                self.tenants.remove(&lease.lease);
                Ok(())
            }
            Some(old) => Err(Refusal::new(
                Reason::Duplicate,
                format!("lease {} belongs to container {} (uid {})", lease.lease, old.container, old.uid),
            )),
            None => Ok(()),
        }
    }

    /// The tenant's sandbox is process `pid`. Saying it again is no error; saying another pid is.
    pub(crate) fn started(&mut self, lease: LeaseId, pid: u32) -> Result<(), Refusal> {
        let tenant = self.tenant(lease)?;
        if pid == 0 || (tenant.sandbox_pid != 0 && tenant.sandbox_pid != pid) {
            return Err(Refusal::new(
                Reason::OutOfOrder,
                format!(
                    "sandbox of lease {lease} announced as pid {pid}, known as pid {}",
                    tenant.sandbox_pid
                ),
            ));
        }
        tenant.sandbox_pid = pid;
        Ok(())
    }

    /// The lease is there and its shim is connected.
    pub(crate) fn active(&mut self, lease: LeaseId) -> Result<(), Refusal> {
        self.tenant(lease).map(|_| ())
    }

    /// Uid of the lease's sandbox.
    pub(crate) fn uid(&mut self, lease: LeaseId) -> Result<u32, Refusal> {
        self.tenant(lease).map(|tenant| tenant.uid)
    }

    fn tenant(&mut self, lease: LeaseId) -> Result<&mut Tenant, Refusal> {
        match self.tenants.get_mut(&lease) {
            Some(tenant) if tenant.state == State::Active => Ok(tenant),
            Some(_) | None => {
                Err(Refusal::new(Reason::NoLease, format!("lease {lease} is not held: register first")))
            }
        }
    }

    /// What the sandbox claims. Must name exactly its own GPUs. `asked`: it answers a ping that was sent
    /// after the last audit, so that the two can be compared.
    pub(crate) fn usage(
        &mut self,
        lease: LeaseId,
        mut usage: Vec<GpuUsage>,
        refused: u64,
        asked: bool,
    ) -> Result<Vec<Verdict>, Refusal> {
        let tenant = self.tenant(lease)?;
        usage.sort_by_key(|gpu| tenant.gpus.iter().position(|slice| slice.minor == gpu.minor));
        if !usage.iter().map(|gpu| gpu.minor).eq(tenant.gpus.iter().map(|slice| slice.minor)) {
            return Err(Refusal::new(
                Reason::OutOfOrder,
                format!("sandbox of lease {lease} reports other GPUs than it was granted"),
            ));
        }
        tenant.used_before = tenant.usage.iter().map(|gpu| gpu.used).collect();
        tenant.usage = usage;
        tenant.refused = refused;
        Ok(if asked { tenant.compare(lease).into_iter().collect() } else { Vec::new() })
    }

    /// The shim's socket closed. Its guarantees end at once where the sandbox is known to have ended; what the driver
    /// goes on showing of it stays taken, and its uid waits for the driver.
    pub(crate) fn closed(&mut self, lease: LeaseId, sandbox_ended: bool) {
        let Some(tenant) = self.tenants.get_mut(&lease) else { return };
        tenant.state = State::Leaving;
        tenant.sandbox_ended = sandbox_ended;
        if tenant.sandbox_pid == 0 {
            // Never announced: no driver client can be found by its pid, but a process may have the uid.
            let uid = tenant.uid;
            self.tenants.remove(&lease);
            self.uids.release(uid);
            self.uids.quarantine(uid);
        }
    }

    /// The sandbox process has ended.
    pub(crate) fn sandbox_ended(&mut self, lease: LeaseId) {
        if let Some(tenant) = self.tenants.get_mut(&lease) {
            tenant.sandbox_ended = true;
        }
    }

    /// Someone is leaving: an audit would bring something.
    pub(crate) fn leaving(&self) -> bool {
        self.tenants.values().any(|tenant| tenant.state == State::Leaving)
    }

    /// Pids of all announced sandboxes.
    pub(crate) fn sandboxes(&self) -> Vec<u32> {
        self.tenants.values().map(|tenant| tenant.sandbox_pid).filter(|pid| *pid != 0).collect()
    }

    /// Marks a card: no new container starts on an unhealthy one. True if that changed.
    pub(crate) fn set_health(&mut self, minor: u32, unhealthy: Option<String>) -> bool {
        let Some(gpu) = self.gpus.values_mut().find(|gpu| gpu.card.minor == minor) else { return false };
        let changed = gpu.unhealthy.is_some() != unhealthy.is_some();
        gpu.unhealthy = unhealthy;
        changed
    }

    /// Rows for `gpuslice status`.
    pub(crate) fn status(&self) -> (Vec<StatusGpu>, Vec<StatusTenant>) {
        let gpus = self
            .gpus
            .values()
            .map(|gpu| {
                let uuid = &gpu.card.uuid;
                let on_it = |tenant: &&Tenant| tenant.gpus.iter().any(|slice| slice.uuid == *uuid);
                let used = |tenant: &Tenant| {
                    let usage = tenant.usage.iter().find(|usage| usage.minor == gpu.card.minor);
                    usage.map_or(0, |usage| usage.used)
                };
                StatusGpu {
                    uuid: uuid.clone(),
                    minor: gpu.card.minor,
                    memory: gpu.card.memory,
                    guaranteed: self.guaranteed(uuid),
                    used: self.tenants.values().map(used).fold(0, u64::saturating_add),
                    tenants: u32::try_from(self.tenants.values().filter(on_it).count()).unwrap_or(u32::MAX),
                }
            })
            .collect();
        let tenants = self
            .tenants
            .iter()
            .map(|(lease, tenant)| StatusTenant {
                container: tenant.container.clone(),
                lease: Lease { lease: *lease, uid: tenant.uid, sandbox_pid: tenant.sandbox_pid },
                gpus: tenant.gpus.clone(),
                usage: tenant.usage.clone(),
                audited: tenant.audited.clone(),
                refused: tenant.refused,
            })
            .collect();
        (gpus, tenants)
    }
}

#[cfg(test)]
mod tests;
