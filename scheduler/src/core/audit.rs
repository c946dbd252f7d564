//! What the driver's figures mean for a tenant.
//!
//! The driver's figure of a process is the sum of its device memory objects, rounded as it rounds them. The
//! sandbox reserves before it forwards, with the driver's rounding, and gives back after the driver did, so
//! its ledger is never below that figure; it lies above it by what it charges besides (managed memory, the
//! fixed sum per context). "Equal" therefore means: the driver shows no more than the ledger has.

use std::collections::BTreeMap;

use gpuslice_proto::{LeaseId, Reason};

use super::{Core, Ledger, State, Tenant};
use crate::backend::Holding;

/// How far the driver's figure may lie above a limit or a ledger: eight workers of a sandbox have one call
/// each in flight, and each may be rounded up by one 2 MiB page that the ledger settles with the answer.
pub(crate) const LEDGER_TOLERANCE: u64 = 8 * (2 << 20);

/// How many comparisons in a row must fail before an adopted tenant is stopped.
const MISMATCHES: u8 = 3;

/// Audits that show something of a tenant that has ended, before it counts: the first may have begun earlier.
pub(super) const LINGERS: u32 = 2;
/// And before it is worth a line.
const LINGERS_LONG: u32 = 20;

/// What must happen to a tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The shim must end it.
    Stop {
        /// Whose.
        lease: LeaseId,
        /// Why, for a person.
        detail: String,
    },
    /// Worth a line in the log.
    Note {
        /// The line.
        detail: String,
    },
    /// The last trace of it is gone; lease and uid are free.
    Freed {
        /// Whose.
        lease: LeaseId,
    },
}

impl Core {
    /// Compares the driver's figures with the limits, and keeps them for the comparison with the ledgers.
    /// `asked` are the sandboxes that the figures are about; a card that couldn't be asked is missing.
    pub(crate) fn audited(
        &mut self,
        asked: &[u32],
        figures: &BTreeMap<u32, BTreeMap<u32, Holding>>,
    ) -> Vec<Verdict> {
        let mut verdicts = Vec::new();
        let mut freed = Vec::new();
        for (lease, tenant) in &mut self.tenants {
            let holding = |minor| {
                let of_card: Option<&BTreeMap<u32, Holding>> = figures.get(&minor);
                of_card.map(|card| card.get(&tenant.sandbox_pid).copied().unwrap_or_default())
            };
            if tenant.state == State::Leaving {
                let gone = |minor| holding(minor).is_some_and(|held| held == Holding::default());
                let none_left = tenant.gpus.iter().all(|slice| gone(slice.minor));
                if !tenant.sandbox_ended || !asked.contains(&tenant.sandbox_pid) {
                    continue;
                }
                if none_left {
                    freed.push((*lease, tenant.uid));
                    continue;
                }
                tenant.lingered = tenant.lingered.saturating_add(1);
                // A card that couldn't be asked keeps what it showed.
                let before = tenant.audited.iter().copied().chain(std::iter::repeat(0));
                let now = tenant.gpus.iter().map(|slice| holding(slice.minor).map(|held| held.bytes));
                tenant.audited = now.zip(before).map(|(now, before)| now.unwrap_or(before)).collect();
                if tenant.lingered == LINGERS_LONG {
                    let bytes = tenant.audited.iter().fold(0, |sum: u64, bytes| sum.saturating_add(*bytes));
                    let detail = format!(
                        "container {} has ended, but the driver shows {bytes} bytes of it: somebody holds a file of its clients",
                        tenant.container
                    );
                    verdicts.push(Verdict::Note { detail });
                }
                continue;
            }
            if !asked.contains(&tenant.sandbox_pid) {
                continue;
            }
            tenant.audited =
                tenant.gpus.iter().map(|slice| holding(slice.minor).map_or(0, |held| held.bytes)).collect();
            for (minor, card) in figures {
                let bytes = card.get(&tenant.sandbox_pid).map_or(0, |held| held.bytes);
                let limit =
                    tenant.gpus.iter().find(|slice| slice.minor == *minor).map_or(0, |s| s.memory_hard);
                if bytes > limit.saturating_add(LEDGER_TOLERANCE) {
                    let detail = format!(
                        "container {} holds {bytes} bytes of nvidia{minor} by the driver's figure, limit {limit}",
                        tenant.container
                    );
                    verdicts.push(Verdict::Stop { lease: *lease, detail });
                }
            }
            tenant.fresh = true;
        }
        for (lease, uid) in freed {
            self.tenants.remove(&lease);
            self.uids.release(uid);
            verdicts.push(Verdict::Freed { lease });
        }
        verdicts
    }
}

impl Tenant {
    /// Compares the driver's figure with the reports before and after it.
    pub(super) fn compare(&mut self, lease: LeaseId) -> Option<Verdict> {
        if !std::mem::take(&mut self.fresh) {
            return None;
        }
        let before = self.used_before.iter().copied().chain(std::iter::repeat(0));
        let above = self.usage.iter().zip(before).zip(&self.audited).find(|((usage, before), audited)| {
            **audited > usage.used.max(*before).saturating_add(LEDGER_TOLERANCE)
        });
        let Some(((usage, _), audited)) = above else {
            let known = std::mem::replace(&mut self.ledger, Ledger::Proven);
            return (known != Ledger::Proven).then(|| Verdict::Note {
                detail: format!(
                    "container {}: adopted, its ledger equals the driver's figure",
                    self.container
                ),
            });
        };
        let detail = format!(
            "container {}: the driver shows {audited} bytes of nvidia{}, its ledger {}",
            self.container, usage.minor, usage.used
        );
        match self.ledger {
            Ledger::Proven => Some(Verdict::Note { detail }),
            // A tenant that allocates between the two readings may look wrong once or twice.
            Ledger::Unproven { failed } if failed + 1 < MISMATCHES => {
                self.ledger = Ledger::Unproven { failed: failed + 1 };
                None
            }
            Ledger::Unproven { .. } => {
                Some(Verdict::Stop { lease, detail: format!("{}: {detail}", Reason::LedgerMismatch) })
            }
        }
    }
}
