//! What the tenant is shown in the place of what the driver answered: pure functions on parameters.

use nix::errno::Errno;

use crate::bytes::{get32, get64, index, part_mut, put32, put64};
use crate::rules::NO_GPU;

/// A slice of a card, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct View {
    /// The quota.
    pub(crate) limit: u64,
    /// What is charged.
    pub(crate) used: u64,
}

impl View {
    fn limit_kib(self) -> u32 {
        u32::try_from(self.limit >> 10).unwrap_or(u32::MAX)
    }
    fn free_kib(self) -> u32 {
        u32::try_from(self.limit.saturating_sub(self.used) >> 10).unwrap_or(u32::MAX)
    }
}

/// Indices of the driver's memory figures.
mod figure {
    pub(super) const BAR1_SIZE: u32 = 0x05;
    pub(super) const RAM_SIZE: u32 = 0x07;
    pub(super) const TOTAL_RAM_SIZE: u32 = 0x08;
    pub(super) const HEAP_SIZE: u32 = 0x09;
    pub(super) const MAPPABLE_HEAP_SIZE: u32 = 0x0a;
    pub(super) const TAX: u32 = 0x10;
    pub(super) const HEAP_START: u32 = 0x11;
    pub(super) const LARGEST_FREE: u32 = 0x12;
    pub(super) const LARGEST_FREE_BASE: u32 = 0x13;
    pub(super) const HEAP_FREE_VPR: u32 = 0x15;
    pub(super) const HEAP_FREE: u32 = 0x16;
    pub(super) const BAR1_AVAILABLE: u32 = 0x1d;
    pub(super) const INTERNAL_HEAP_START: u32 = 0x1e;
    pub(super) const BAR1_LARGEST: u32 = 0x1f;
    pub(super) const USABLE_RAM_SIZE: u32 = 0x20;
    pub(super) const SUSPEND_SIZE: u32 = 0x29;
    pub(super) const PROTECTED_TOTAL: u32 = 0x33;
    pub(super) const PROTECTED_FREE: u32 = 0x34;
}

/// One figure, KiB.
fn memory_figure(which: u32, real: u32, view: View) -> u32 {
    match which {
        figure::RAM_SIZE
        | figure::TOTAL_RAM_SIZE
        | figure::HEAP_SIZE
        | figure::MAPPABLE_HEAP_SIZE
        | figure::USABLE_RAM_SIZE
        | figure::SUSPEND_SIZE
        | figure::PROTECTED_TOTAL
        // How much of the window others use would show their load: it is always wholly free.
        | figure::BAR1_SIZE
        | figure::BAR1_AVAILABLE
        | figure::BAR1_LARGEST => real.min(view.limit_kib()),
        figure::LARGEST_FREE | figure::HEAP_FREE_VPR | figure::HEAP_FREE | figure::PROTECTED_FREE => {
            real.min(view.free_kib())
        }
        figure::TAX | figure::HEAP_START | figure::LARGEST_FREE_BASE | figure::INTERNAL_HEAP_START => 0,
        _ => real,
    }
}

/// Entries of {index, figure}.
pub(crate) fn memory_info(entries: &mut [u8], view: View) {
    for entry in entries.chunks_exact_mut(8) {
        if let (Ok(which), Ok(real)) = (get32(entry, 0), get32(entry, 4)) {
            // The entry is eight bytes long: the field is there.
            let _there = put32(entry, 4, memory_figure(which, real, view));
        }
    }
}

/// Sizes of protected and unprotected video memory, KiB.
pub(crate) fn memory_size(params: &mut [u8], view: View) -> Result<(), Errno> {
    for at in [8, 16] {
        let real = get64(params, at)?;
        put64(params, at, real.min(view.limit >> 10))?;
    }
    Ok(())
}

/// Takes ids that aren't `granted` out of a list and fills it up with "none".
pub(crate) fn filter_ids(list: &mut [u8], granted: impl Fn(u32) -> bool) {
    let kept: Vec<u32> =
        list.chunks_exact(4).filter_map(|id| get32(id, 0).ok()).filter(|id| granted(*id)).collect();
    let mut kept = kept.into_iter();
    for place in list.chunks_exact_mut(4) {
        place.copy_from_slice(&kept.next().unwrap_or(NO_GPU).to_le_bytes());
    }
}

/// Takes entries whose id isn't `granted` out of a list, and counts what is left at 0.
pub(crate) fn filter_entries(
    params: &mut [u8],
    at: u32,
    stride: u32,
    granted: impl Fn(u32) -> bool,
) -> Result<(), Errno> {
    let count = index(get32(params, 0)?);
    let list = params.get_mut(index(at)..).ok_or(Errno::EINVAL)?;
    let entries = list.chunks_exact(index(stride)).take(count);
    let kept: Vec<Vec<u8>> =
        entries.filter(|entry| get32(entry, 0).is_ok_and(&granted)).map(<[u8]>::to_vec).collect();
    list.fill(0);
    for (place, entry) in list.chunks_exact_mut(index(stride)).zip(&kept) {
        place.copy_from_slice(entry);
    }
    put32(params, 0, u32::try_from(kept.len()).unwrap_or(0))
}

/// Processes on a GPU: none. The driver would name every tenant's sandbox.
pub(crate) fn no_processes(params: &mut [u8]) -> Result<(), Errno> {
    let after = u32::try_from(params.len()).unwrap_or(0).saturating_sub(8);
    part_mut(params, 8, after)?.fill(0);
    Ok(())
}

/// Figures of the processes asked for: zeros.
pub(crate) fn idle_processes(params: &mut [u8]) -> Result<(), Errno> {
    const STRIDE: usize = 72;
    let entries = params.get_mut(8..).ok_or(Errno::EINVAL)?;
    for entry in entries.chunks_exact_mut(STRIDE) {
        part_mut(entry, 8, 64)?.fill(0);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const VIEW: View = View { limit: 4 << 30, used: 1 << 30 };

    fn info(entries: &[(u32, u32)]) -> Vec<(u32, u32)> {
        let mut bytes: Vec<u8> =
            entries.iter().flat_map(|(i, v)| [i.to_le_bytes(), v.to_le_bytes()].concat()).collect();
        memory_info(&mut bytes, VIEW);
        bytes.chunks(8).map(|e| (get32(e, 0).unwrap(), get32(e, 4).unwrap())).collect()
    }

    #[test]
    fn the_card_is_as_large_as_the_quota_and_as_free_as_the_ledger_says() {
        let shown = info(&[
            (0x16, 146_591_680),
            (0x08, 147_221_504),
            (0x09, 146_591_680),
            (0x07, 147_221_504),
            (0x10, 5),
        ]);
        assert_eq!(shown, [(0x16, 3 << 20), (0x08, 4 << 20), (0x09, 4 << 20), (0x07, 4 << 20), (0x10, 0)]);
    }

    #[test]
    fn a_card_that_is_fuller_than_the_quota_shows_what_it_really_has() {
        assert_eq!(info(&[(0x16, 1000)]), [(0x16, 1000)]);
    }

    #[test]
    fn facts_about_the_chip_stay() {
        let facts = [(0x0b, 6016), (0x19, 12), (0x1b, 62_914_560), (0x1a, 4095), (0x3b, u32::MAX)];
        assert_eq!(info(&facts), facts);
    }

    #[test]
    fn a_quota_beyond_four_tebibytes_does_not_wrap() {
        let view = View { limit: u64::MAX, used: 0 };
        assert_eq!(memory_figure(figure::TOTAL_RAM_SIZE, 77, view), 77);
    }

    #[test]
    fn ids_that_are_not_granted_leave_no_trace_in_a_list() {
        let mut list: Vec<u8> = [7u32, 8, 9, NO_GPU].iter().flat_map(|id| id.to_le_bytes()).collect();
        filter_ids(&mut list, |id| id == 9);
        let ids: Vec<u32> = list.chunks(4).map(|id| get32(id, 0).unwrap()).collect();
        assert_eq!(ids, [9, NO_GPU, NO_GPU, NO_GPU]);
    }

    #[test]
    fn entries_that_are_not_granted_leave_no_trace_in_a_list() {
        let mut params = vec![0u8; 4 + 3 * 12];
        put32(&mut params, 0, 3).unwrap();
        for (place, id) in [5u32, 6, 7].into_iter().enumerate() {
            let at = 4 + 12 * u32::try_from(place).unwrap();
            put32(&mut params, at, id).unwrap();
            put32(&mut params, at + 4, id * 100).unwrap();
        }
        filter_entries(&mut params, 4, 12, |id| id == 6).unwrap();
        assert_eq!((get32(&params, 0), get32(&params, 4), get32(&params, 8)), (Ok(1), Ok(6), Ok(600)));
        assert!(params[16..].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn processes_of_others_are_not_shown() {
        let mut pids = vec![0xaa; 3812];
        no_processes(&mut pids).unwrap();
        assert!(pids[..8].iter().all(|byte| *byte == 0xaa) && pids[8..].iter().all(|byte| *byte == 0));
        let mut info = vec![0xaa; 14408];
        idle_processes(&mut info).unwrap();
        assert_eq!(&info[8..16], &[0xaa; 8]);
        assert!(info[16..80].iter().all(|byte| *byte == 0));
    }
}
