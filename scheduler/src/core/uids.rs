//! The uids of the sandboxes: one each, and the longest possible time between two uses.

use std::collections::BTreeSet;

use gpuslice_config::UidRange;
use gpuslice_proto::Reason;

use super::Refusal;

/// Uids of one range, given out round-robin.
#[derive(Debug)]
pub(super) struct UidPool {
    range: UidRange,
    used: BTreeSet<u32>,
    quarantined: BTreeSet<u32>,
    /// Distance of the next candidate from the range's start.
    next: u32,
}

impl UidPool {
    pub(super) fn new(range: UidRange) -> UidPool {
        UidPool { range, used: BTreeSet::new(), quarantined: BTreeSet::new(), next: 0 }
    }

    /// A uid that nobody has.
    pub(super) fn take(&mut self) -> Result<u32, Refusal> {
        for step in 0..self.range.count {
            let offset =
                u32::try_from((u64::from(self.next) + u64::from(step)) % u64::from(self.range.count));
            let uid = offset.ok().and_then(|offset| self.range.first.checked_add(offset));
            let Some(uid) = uid.filter(|uid| !self.used.contains(uid) && !self.quarantined.contains(uid))
            else {
                continue;
            };
            self.used.insert(uid);
            self.next = (uid - self.range.first + 1) % self.range.count;
            return Ok(uid);
        }
        Err(Refusal::new(
            Reason::UidsExhausted,
            format!(
                "all {} uids of {} are in use; raise [sandboxes] uid_count in the configuration",
                self.range.count, self.range
            ),
        ))
    }

    /// Takes the uid of a container that runs already.
    pub(super) fn adopt(&mut self, uid: u32) -> Result<(), Refusal> {
        if !self.range.contains(uid) {
            return Err(Refusal::new(
                Reason::NoLease,
                format!("uid {uid} to adopt lies outside the configured range {}", self.range),
            ));
        }
        if !self.used.insert(uid) {
            return Err(Refusal::new(Reason::Duplicate, format!("uid {uid} to adopt is another tenant's")));
        }
        self.quarantined.remove(&uid);
        Ok(())
    }

    pub(super) fn release(&mut self, uid: u32) {
        self.used.remove(&uid);
    }

    pub(super) fn quarantine(&mut self, uid: u32) {
        if self.range.contains(uid) && !self.used.contains(&uid) {
            self.quarantined.insert(uid);
        }
    }

    pub(super) fn end_quarantine(&mut self, uid: u32) {
        self.quarantined.remove(&uid);
    }

    pub(super) fn quarantined(&self) -> impl Iterator<Item = u32> + '_ {
        self.quarantined.iter().copied()
    }
}
