//! The container's UVM files and the memory that is mapped into each.
//!
//! Owns: a copy of each UVM file that a living process of the container initialised, its external ranges and
//! what is mapped in them: the driver keeps that memory allocated until it is unmapped or the file's last copy
//! is closed, and tells nobody about a close. So one copy is kept as long as the process that initialised the file
//! lives; when that ends, the ranges are freed through the copy, whoever else has the file, and the copy is
//! closed. Trusts: the driver's answers. Promises: what is taken out was entered before the driver was asked.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::errno::Errno;

use crate::objects::MemoryId;

/// Most UVM files, and most ranges and mappings in all of them.
const MOST_FILES: usize = 512;
const MOST_RANGES: usize = 1 << 17;
const MOST_MAPS: usize = 1 << 18;

/// A GPU's UUID in the driver's form.
pub(crate) type Uuid = [u8; 16];

/// Memory mapped into a range.
#[derive(Debug)]
struct Map {
    number: u64,
    base: u64,
    length: u64,
    gpus: Vec<Uuid>,
    memory: MemoryId,
}

#[derive(Debug, Default)]
struct Range {
    length: u64,
    maps: Vec<Map>,
}

/// A file of a process.
pub(crate) struct UvmFile {
    number: u64,
    owner: u32,
    /// The kept copy.
    pub(crate) copy: OwnedFd,
    ranges: BTreeMap<u64, Range>,
}

impl UvmFile {
    /// Base and length of each range.
    pub(crate) fn ranges(&self) -> Vec<(u64, u64)> {
        self.ranges.iter().map(|(base, range)| (*base, range.length)).collect()
    }

    /// The cards that memory is mapped on.
    pub(crate) fn gpus(&self) -> BTreeSet<Uuid> {
        self.ranges.values().flat_map(|range| &range.maps).flat_map(|map| map.gpus.iter().copied()).collect()
    }

    /// All memory mapped.
    pub(crate) fn memory(&self) -> Vec<MemoryId> {
        self.ranges.values().flat_map(|range| &range.maps).map(|map| map.memory).collect()
    }
}

#[derive(Default)]
struct State {
    files: Vec<UvmFile>,
    next: u64,
    maps: usize,
    /// A file was initialised, or nearly.
    any: bool,
}

impl State {
    fn file(&mut self, number: u64) -> Option<&mut UvmFile> {
        self.files.iter_mut().find(|file| file.number == number)
    }
}

/// All of them.
#[derive(Default)]
pub(crate) struct UvmFiles {
    state: Mutex<State>,
}

impl UvmFiles {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of the file that `file` is a copy of; those of process `tgid` are looked at first.
    pub(crate) fn find(&self, file: &OwnedFd, tgid: u32) -> Option<u64> {
        let state = self.lock();
        let (own, others): (Vec<_>, Vec<_>) = state.files.iter().partition(|known| known.owner == tgid);
        let alone = own.len() == 1;
        own.iter()
            .chain(&others)
            .find(|known| match gpuslice_sys::process::same_open_file(file.as_fd(), known.copy.as_fd()) {
                Ok(same) => same,
                // A kernel that can't compare: right as long as each process has one file.
                Err(_) => alone && known.owner == tgid,
            })
            .map(|known| known.number)
    }

    /// A UVM file is about to be initialised. From then on somebody may map one, whatever becomes of the call and
    /// whatever is closed meanwhile.
    pub(crate) fn begin(&self) {
        self.lock().any = true;
    }

    /// Whether that was ever so.
    pub(crate) fn were_any(&self) -> bool {
        self.lock().any
    }

    /// Enters a file that process `tgid` initialised.
    pub(crate) fn add(&self, tgid: u32, copy: OwnedFd) {
        let mut state = self.lock();
        state.next += 1;
        let number = state.next;
        state.files.push(UvmFile { number, owner: tgid, copy, ranges: BTreeMap::new() });
    }

    /// Whether another file, or another range, is allowed.
    pub(crate) fn room(&self) -> Result<(), Errno> {
        let state = self.lock();
        let ranges: usize = state.files.iter().map(|file| file.ranges.len()).sum();
        if state.files.len() < MOST_FILES && ranges < MOST_RANGES { Ok(()) } else { Err(Errno::ENOMEM) }
    }

    /// Whether another mapping is allowed: the driver replaces what was mapped in the same place and says nothing of
    /// it, so what is noted here can grow while nothing does there.
    pub(crate) fn room_for_map(&self) -> Result<(), Errno> {
        if self.lock().maps < MOST_MAPS { Ok(()) } else { Err(Errno::ENOMEM) }
    }

    /// Enters a range.
    pub(crate) fn add_range(&self, file: u64, base: u64, length: u64) {
        if let Some(file) = self.lock().file(file) {
            file.ranges.entry(base).or_default().length = length;
        }
    }

    /// Enters memory mapped at `base`; the caller took a reference for it. False: the file is gone.
    pub(crate) fn add_map(
        &self,
        file: u64,
        base: u64,
        length: u64,
        gpus: Vec<Uuid>,
        memory: MemoryId,
    ) -> bool {
        let mut state = self.lock();
        state.next += 1;
        let number = state.next;
        state.maps += 1;
        let Some(file) = state.file(file) else {
            state.maps -= 1;
            return false;
        };
        let holder = file.ranges.range(..=base).next_back();
        let holder = holder.filter(|(start, range)| base - **start < range.length).map(|(start, _)| *start);
        let range = file.ranges.entry(holder.unwrap_or(base)).or_default();
        range.length = range.length.max(length);
        range.maps.push(Map { number, base, length, gpus, memory });
        true
    }

    /// Numbers of what is mapped in the range that begins at `base`.
    pub(crate) fn maps_of_range(&self, file: u64, base: u64) -> Vec<u64> {
        let mut state = self.lock();
        let range = state.file(file).and_then(|file| file.ranges.get(&base));
        range.map(|range| range.maps.iter().map(|map| map.number).collect()).unwrap_or_default()
    }

    /// Numbers of what is mapped wholly within `length` bytes from `base` on.
    pub(crate) fn maps_within(&self, file: u64, base: u64, length: u64) -> Vec<u64> {
        let end = base.saturating_add(length);
        let mut state = self.lock();
        let Some(file) = state.file(file) else { return Vec::new() };
        let maps = file.ranges.values().flat_map(|range| &range.maps);
        maps.filter(|map| map.base >= base && map.base.saturating_add(map.length) <= end)
            .map(|map| map.number)
            .collect()
    }

    /// The range at `base` is gone, and with it the maps of these numbers: their memory, to release.
    pub(crate) fn remove_range(&self, file: u64, base: u64, maps: &[u64]) -> Vec<MemoryId> {
        let mut state = self.lock();
        let Some(file) = state.file(file) else { return Vec::new() };
        let Some(range) = file.ranges.get_mut(&base) else { return Vec::new() };
        let gone: Vec<_> =
            range.maps.extract_if(.., |map| maps.contains(&map.number)).map(|map| map.memory).collect();
        // What was mapped while the driver freed it belongs to a new range at the same place.
        if range.maps.is_empty() {
            file.ranges.remove(&base);
        }
        state.maps = state.maps.saturating_sub(gone.len());
        gone
    }

    /// The maps of these numbers are gone on one GPU: memory that is mapped on none any more, to release.
    pub(crate) fn remove_maps(&self, file: u64, maps: &[u64], gpu: Uuid) -> Vec<MemoryId> {
        let mut state = self.lock();
        let Some(file) = state.file(file) else { return Vec::new() };
        let mut gone = Vec::new();
        for range in file.ranges.values_mut() {
            for map in range.maps.iter_mut().filter(|map| maps.contains(&map.number)) {
                map.gpus.retain(|known| *known != gpu);
            }
            let unmapped = range.maps.extract_if(.., |map| map.gpus.is_empty());
            gone.extend(unmapped.map(|map| map.memory));
        }
        state.maps = state.maps.saturating_sub(gone.len());
        gone
    }

    /// Takes out the files of a process that ended.
    pub(crate) fn take(&self, tgid: u32) -> Vec<UvmFile> {
        self.take_if(|file| file.owner == tgid)
    }

    /// Takes out every file.
    pub(crate) fn take_all(&self) -> Vec<UvmFile> {
        self.take_if(|_| true)
    }

    fn take_if(&self, wanted: impl Fn(&UvmFile) -> bool) -> Vec<UvmFile> {
        let mut state = self.lock();
        let gone: Vec<UvmFile> = state.files.extract_if(.., |file| wanted(file)).collect();
        let maps: usize = gone.iter().map(|file| file.memory().len()).sum();
        state.maps = state.maps.saturating_sub(maps);
        gone
    }
}
