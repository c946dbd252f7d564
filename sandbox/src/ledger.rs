//! How much memory the container uses, and how much it may.
//!
//! Owns: one account per granted GPU and one for host memory that the driver allocates. Promises: the sum of
//! all charges of an account never exceeds its limit, whatever threads race (one atomic step a charge); each
//! charge is returned exactly once, when it is dropped. Failure: [`Over`]; nothing changes then.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use gpuslice_policy::status;

use crate::dispatch::{Stop, UvmVerdict};

/// The account is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Over;

/// Memory of one kind.
#[derive(Debug)]
pub(crate) struct Account {
    limit: u64,
    used: AtomicU64,
    peak: AtomicU64,
    denied: AtomicU64,
}

impl Account {
    /// An empty account.
    pub(crate) fn new(limit: u64) -> Arc<Self> {
        Arc::new(Account {
            limit,
            used: AtomicU64::new(0),
            peak: AtomicU64::new(0),
            denied: AtomicU64::new(0),
        })
    }

    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }
    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Acquire)
    }
    pub(crate) fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }
    pub(crate) fn denied(&self) -> u64 {
        self.denied.load(Ordering::Relaxed)
    }
    /// Counts a refusal that reached the tenant.
    pub(crate) fn count_denied(&self) {
        self.denied.fetch_add(1, Ordering::Relaxed);
    }

    fn add(&self, bytes: u64) -> Result<(), Over> {
        let step = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= self.limit);
        let before = self.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, step).map_err(|_| Over)?;
        self.peak.fetch_max(before.saturating_add(bytes), Ordering::Relaxed);
        Ok(())
    }

    fn take(&self, bytes: u64) {
        // The closure always answers, so the update can't fail; a charge is never larger than the sum.
        let _before = self
            .used
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| Some(used.saturating_sub(bytes)));
    }

    /// Charges `bytes`.
    pub(crate) fn charge(self: &Arc<Self>, bytes: u64) -> Result<Charge, Over> {
        self.add(bytes)?;
        Ok(Charge { account: Arc::clone(self), bytes })
    }
}

/// A charge; dropping it gives the bytes back.
#[derive(Debug)]
pub(crate) struct Charge {
    account: Arc<Account>,
    bytes: u64,
}

impl Charge {
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Makes the charge what the driver really allocated. When that doesn't fit, the charge stays as it was.
    pub(crate) fn settle(&mut self, bytes: u64) -> Result<(), Over> {
        if bytes > self.bytes {
            self.account.add(bytes.saturating_sub(self.bytes))?;
        } else {
            self.account.take(self.bytes.saturating_sub(bytes));
        }
        self.bytes = bytes;
        Ok(())
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.account.take(self.bytes);
    }
}

/// Most mappings that the tenant makes in GPU address spaces itself. Each may need page tables of its own, 16 KiB of
/// the card that no allocation shows. CUDA makes none: it maps through the UVM file.
const MOST_DMA_MAPS: u64 = 1 << 14;

/// Their count. What goes with an object isn't seen: only an unmapping lowers it.
#[derive(Debug, Default)]
pub(crate) struct DmaMaps(AtomicU64);

impl DmaMaps {
    /// One more.
    ///
    /// # Errors
    /// "Insufficient resources" when there are as many as may be.
    pub(crate) fn take(&self) -> Result<(), Stop> {
        let more = |count: u64| (count < MOST_DMA_MAPS).then_some(count + 1);
        let taken = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, more);
        taken.map(drop).map_err(|_full| Stop::Status(status::INSUFFICIENT_RESOURCES))
    }

    /// One less.
    pub(crate) fn give(&self) {
        let _before =
            self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, |count| Some(count.saturating_sub(1)));
    }
}

/// GPU memory comes in pages of this size ...
const PAGE: u64 = 64 << 10;
/// ... or, from this size up, of this size.
const HUGE_PAGE: u64 = 2 << 20;

/// What an allocation of `size` bytes of GPU memory takes at least.
pub(crate) fn rounded(size: u64) -> u64 {
    let page = if size >= HUGE_PAGE { HUGE_PAGE } else { PAGE };
    size.max(1).checked_next_multiple_of(page).unwrap_or(u64::MAX)
}

/// What an allocation takes that the driver answers `size` for: also of small pages it hands out large ones, and
/// says no word of the rest.
pub(crate) fn taken(size: u64) -> u64 {
    size.checked_next_multiple_of(PAGE).unwrap_or(u64::MAX)
}

/// A mapping stays counted this long before an audit that doesn't show it takes its charge away.
const SETTLING: Duration = Duration::from_secs(1);

/// Mappings of the UVM file. Each may fill any granted GPU, so each is charged to all.
pub(crate) struct UvmCharges {
    accounts: Vec<Arc<Account>>,
    state: Mutex<UvmState>,
}

#[derive(Default)]
struct UvmState {
    /// One a GPU; their bytes are the sum that audits confirmed.
    confirmed: Vec<Charge>,
    confirmed_bytes: u64,
    recent: Vec<Recent>,
}

struct Recent {
    charges: Vec<Charge>,
    bytes: u64,
    since: Instant,
}

impl UvmCharges {
    pub(crate) fn new(accounts: Vec<Arc<Account>>) -> Self {
        UvmCharges { accounts, state: Mutex::new(UvmState::default()) }
    }

    fn charge_all(&self, bytes: u64) -> Result<Vec<Charge>, Over> {
        self.accounts.iter().map(|account| account.charge(bytes)).collect()
    }

    /// Charges a mapping that is about to be made.
    pub(crate) fn charge(&self, bytes: u64, now: Instant) -> Result<(), Over> {
        let charges = self.charge_all(bytes)?;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.recent.push(Recent { charges, bytes, since: now });
        Ok(())
    }

    /// Sum charged.
    pub(crate) fn bytes(&self) -> u64 {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.recent.iter().fold(state.confirmed_bytes, |sum, recent| sum.saturating_add(recent.bytes))
    }

    /// Takes away the charges of mappings that are gone: `total` bytes are mapped.
    pub(crate) fn audit(&self, total: u64, now: Instant) -> UvmVerdict {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let recent = state.recent.iter().fold(0u64, |sum, recent| sum.saturating_add(recent.bytes));
        let charged = state.confirmed_bytes.saturating_add(recent);
        if total > charged {
            return UvmVerdict::Uncharged { found: total, charged };
        }
        // What is young may be mapped already or not yet: it stays, and all that is mapped stays beside it.
        let (young, old): (Vec<Recent>, Vec<Recent>) = std::mem::take(&mut state.recent)
            .into_iter()
            .partition(|recent| now.saturating_duration_since(recent.since) < SETTLING);
        state.recent = young;
        let settled = old.iter().fold(state.confirmed_bytes, |sum, old| sum.saturating_add(old.bytes));
        let keep = settled.min(total);
        for old in old {
            for (index, charge) in old.charges.into_iter().enumerate() {
                match state.confirmed.get_mut(index) {
                    Some(confirmed) => confirmed.absorb(charge),
                    None => state.confirmed.push(charge),
                }
            }
        }
        for confirmed in &mut state.confirmed {
            // Only ever smaller: it always fits.
            let _fits = confirmed.settle(keep);
        }
        state.confirmed_bytes = keep;
        UvmVerdict::Charged
    }
}

impl Charge {
    /// Takes over another charge of the same account.
    fn absorb(&mut self, mut other: Charge) {
        self.bytes = self.bytes.saturating_add(other.bytes);
        other.bytes = 0;
    }
}

#[cfg(test)]
mod tests;
