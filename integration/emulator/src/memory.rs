//! Physical allocations: what backs memory objects, and how much of each card is taken.
//!
//! Owns: every allocation and its count of references. Invariant: the sum of a card's allocations is its `used`,
//! never more than its size. An allocation goes when its last reference goes: handles, duplicates, exports,
//! UVM mappings and channels each hold one. Failure: a full card is [`Status::NO_MEMORY`].

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsFd;

use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::status::Status;
use crate::sys;

/// Names an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MemoryId(pub u64);

/// Where an allocation lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// On the card of this index.
    Card(usize),
    /// In the host's memory, or a register page: counted nowhere.
    Host,
    /// Pages of a process that a client pinned.
    Pinned {
        /// The process.
        pid: u32,
        /// First address.
        address: u64,
    },
}

/// One allocation.
#[derive(Debug)]
pub struct Allocation {
    /// Where it lies.
    pub place: Place,
    /// Bytes.
    pub size: u64,
    /// Process that made the client which allocated it; 0 for the driver's own.
    pub owner: u32,
    references: u32,
    /// Contents for CPU mappings, by offset of the mapping. Made at the first mapping.
    backing: BTreeMap<u64, File>,
}

/// All allocations of a node.
#[derive(Debug, Default)]
pub struct Store {
    next: u64,
    allocations: BTreeMap<MemoryId, Allocation>,
    cards: Vec<Card>,
}

#[derive(Debug)]
struct Card {
    size: u64,
    used: u64,
}

const PAGE: u64 = 64 << 10;
const HUGE_PAGE: u64 = 2 << 20;

/// `size` as the driver's heap rounds it: to 2 MiB from 2 MiB up, else to 64 KiB, unless the attributes of the
/// request name a page size.
pub(crate) fn rounded(size: u64, attr: u32, attr2: u32) -> Option<u64> {
    let page = match (attr >> 23) & 3 {
        1 | 2 => PAGE,
        3 if (attr2 >> 20) & 3 == 2 => 512 << 20,
        3 => HUGE_PAGE,
        _ if size >= HUGE_PAGE => HUGE_PAGE,
        _ => PAGE,
    };
    size.checked_next_multiple_of(page)
}

impl Store {
    /// A node with cards of these sizes.
    pub fn new(sizes: &[u64]) -> Self {
        let cards = sizes.iter().map(|size| Card { size: *size, used: 0 }).collect();
        Store { next: 1, cards, ..Store::default() }
    }

    /// Takes memory. One reference is the caller's.
    ///
    /// # Errors
    /// [`Status::NO_MEMORY`]: the card is full.
    pub fn allocate(&mut self, place: Place, size: u64, owner: u32) -> Result<MemoryId, Status> {
        if let Place::Card(index) = place {
            let card = self.cards.get_mut(index).ok_or(Status::INVALID_DEVICE)?;
            let used = card.used.checked_add(size).filter(|used| *used <= card.size);
            card.used = used.ok_or(Status::NO_MEMORY)?;
        }
        let id = MemoryId(self.next);
        self.next = self.next.wrapping_add(1);
        let allocation = Allocation { place, size, owner, references: 1, backing: BTreeMap::new() };
        self.allocations.insert(id, allocation);
        Ok(id)
    }

    /// One more reference.
    pub fn retain(&mut self, id: MemoryId) {
        if let Some(allocation) = self.allocations.get_mut(&id) {
            allocation.references = allocation.references.saturating_add(1);
        }
    }

    /// One reference less; the memory goes with the last.
    pub fn release(&mut self, id: MemoryId) {
        let Some(allocation) = self.allocations.get_mut(&id) else { return };
        allocation.references = allocation.references.saturating_sub(1);
        if allocation.references > 0 {
            return;
        }
        if let Some(gone) = self.allocations.remove(&id)
            && let Place::Card(index) = gone.place
            && let Some(card) = self.cards.get_mut(index)
        {
            card.used = card.used.saturating_sub(gone.size);
        }
    }

    /// The allocation.
    pub fn find(&self, id: MemoryId) -> Option<&Allocation> {
        self.allocations.get(&id)
    }

    /// Bytes taken of a card.
    pub fn used(&self, card: usize) -> u64 {
        self.cards.get(card).map_or(0, |card| card.used)
    }

    /// Bytes of a card.
    pub fn size(&self, card: usize) -> u64 {
        self.cards.get(card).map_or(0, |card| card.size)
    }

    /// Bytes of a card by the process that took them; the driver's own under 0.
    pub fn by_owner(&self, card: usize) -> BTreeMap<u32, u64> {
        let mut sums = BTreeMap::new();
        for allocation in self.allocations.values().filter(|one| one.place == Place::Card(card)) {
            let sum: &mut u64 = sums.entry(allocation.owner).or_default();
            *sum = sum.saturating_add(allocation.size);
        }
        sums
    }

    /// Pinned ranges: process, address, bytes.
    pub(crate) fn pinned(&self) -> impl Iterator<Item = (u32, u64, u64)> {
        self.allocations.values().filter_map(|one| match one.place {
            Place::Pinned { pid, address } => Some((pid, address, one.size)),
            Place::Card(_) | Place::Host => None,
        })
    }

    /// How many allocations there are.
    pub fn count(&self) -> usize {
        self.allocations.len()
    }

    /// The file with the contents that a CPU mapping at `offset` shows, `length` bytes long; made if new.
    ///
    /// # Errors
    /// [`Status::NO_MEMORY`]: the host has no file for it.
    pub fn contents(&mut self, id: MemoryId, offset: u64, length: u64) -> Result<&File, Status> {
        let allocation = self.allocations.get_mut(&id).ok_or(Status::OBJECT_NOT_FOUND)?;
        let made = match allocation.backing.entry(offset) {
            std::collections::btree_map::Entry::Occupied(entry) => return grown(entry.into_mut(), length),
            std::collections::btree_map::Entry::Vacant(entry) => entry,
        };
        let file = match allocation.place {
            Place::Pinned { pid, address } => pinned_file(pid, address.wrapping_add(offset)),
            Place::Card(_) | Place::Host => None,
        };
        let file = match file {
            Some(file) => file,
            None => memfd_create(c"nvidia", MFdFlags::MFD_CLOEXEC)
                .map(File::from)
                .map_err(|_| Status::NO_MEMORY)?,
        };
        grown(made.insert(file), length)
    }

    /// The contents at offset 0, if a mapping made them.
    pub fn existing_contents(&self, id: MemoryId) -> Option<&File> {
        self.allocations.get(&id)?.backing.get(&0)
    }
}

fn grown(file: &mut File, length: u64) -> Result<&File, Status> {
    let now = file.metadata().map_err(|_| Status::NO_MEMORY)?.len();
    if now < length {
        file.set_len(length).map_err(|_| Status::NO_MEMORY)?;
    }
    Ok(file)
}

/// The file behind a shared mapping of `pid` that starts exactly at `address`: what a client sees of pages that
/// it pinned. `None` for private memory, whose pages can't be shown to a second mapping here.
fn pinned_file(pid: u32, address: u64) -> Option<File> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
    let (start, end) = maps.lines().filter_map(crate::maps::range).find(|(start, _)| *start == address)?;
    let file = File::open(format!("/proc/{pid}/map_files/{start:x}-{end:x}")).ok()?;
    sys::reopen(file.as_fd()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_round_as_the_heap_rounds_them() {
        assert_eq!(rounded(1, 0, 0), Some(64 << 10));
        assert_eq!(rounded((2 << 20) - 1, 0, 0), Some(2 << 20));
        assert_eq!(rounded((2 << 20) + 1, 0, 0), Some(4 << 20));
        assert_eq!(rounded((2 << 20) + 1, 1 << 23, 0), Some((2 << 20) + (64 << 10)));
        assert_eq!(rounded(1, 3 << 23, 0), Some(2 << 20));
        assert_eq!(rounded(u64::MAX, 0, 0), None);
    }

    #[test]
    fn a_card_gives_its_last_byte_and_not_one_more() {
        let mut store = Store::new(&[1 << 20]);
        let all = store.allocate(Place::Card(0), 1 << 20, 7).unwrap();
        assert_eq!(store.allocate(Place::Card(0), 1, 7), Err(Status::NO_MEMORY));
        store.retain(all);
        store.release(all);
        assert_eq!(store.by_owner(0).get(&7), Some(&(1 << 20)));
        store.release(all);
        assert_eq!(store.used(0), 0);
        store.release(all);
        assert_eq!(store.used(0), 0);
    }
}
