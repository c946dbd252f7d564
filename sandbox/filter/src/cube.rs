//! Sets of words given by a mask and a value: what one masked compare of a filter can tell apart.
//!
//! Owns: the algebra (intersection, difference, covers). Promises: every operation is exact.

/// All words `w` with `w & mask == value`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Cube {
    /// The bits that are looked at.
    pub(crate) mask: u64,
    /// Their value; no bit outside `mask` is set.
    pub(crate) value: u64,
}

impl Cube {
    /// Every word.
    pub(crate) const ALL: Cube = Cube { mask: 0, value: 0 };

    pub(crate) const fn new(mask: u64, value: u64) -> Cube {
        Cube { mask, value: value & mask }
    }

    /// The words whose low 32 bits are `value`.
    pub(crate) fn word(value: u32) -> Cube {
        Cube::new(u64::from(u32::MAX), u64::from(value))
    }

    pub(crate) const fn contains(self, word: u64) -> bool {
        word & self.mask == self.value
    }

    pub(crate) const fn intersect(self, other: Cube) -> Option<Cube> {
        if (self.value ^ other.value) & self.mask & other.mask != 0 {
            return None;
        }
        Some(Cube { mask: self.mask | other.mask, value: self.value | other.value })
    }

    pub(crate) const fn is_within(self, other: Cube) -> bool {
        self.mask & other.mask == other.mask && other.contains(self.value)
    }

    /// Gives `each` the words of `self` that are not in `other`, as disjoint cubes.
    pub(crate) fn without(self, other: Cube, mut each: impl FnMut(Cube)) {
        if self.intersect(other).is_none() {
            return each(self);
        }
        let mut rest = self;
        let mut free = other.mask & !self.mask;
        while free != 0 {
            let bit = 1 << (63 - free.leading_zeros());
            free &= !bit;
            let wanted = other.value & bit;
            each(Cube { mask: rest.mask | bit, value: rest.value | (wanted ^ bit) });
            rest = Cube { mask: rest.mask | bit, value: rest.value | wanted };
        }
    }

    /// The words of `self` that are in none of `others`, as disjoint cubes.
    pub(crate) fn without_all(self, others: &[Cube]) -> Vec<Cube> {
        let mut rest = vec![self];
        for other in others {
            let mut next = Vec::with_capacity(rest.len());
            for cube in rest {
                cube.without(*other, |part| next.push(part));
            }
            rest = next;
        }
        rest
    }
}

/// Cubes, overlapping where that saves some, whose union is the part of `cube` within the low 32 bits' view
/// that holds none of `points`.
pub(crate) fn cover_without(cube: Cube, points: &[u32]) -> Vec<Cube> {
    let inside: Vec<u64> = points.iter().map(|p| u64::from(*p)).filter(|p| cube.contains(*p)).collect();
    let mut cover = Vec::new();
    split(cube, &inside, u64::from(u32::MAX) & !cube.mask, &mut cover);
    cover
}

/// `open`: the bits of `cube` that no cube given out so far tells apart.
fn split(cube: Cube, points: &[u64], open: u64, cover: &mut Vec<Cube>) {
    let Some(first) = points.first() else {
        cover.push(cube);
        return;
    };
    let differing = points.iter().fold(0, |bits, p| bits | (p ^ first)) & open;
    let mut agreed = open & !differing;
    while agreed != 0 {
        let bit = agreed & agreed.wrapping_neg();
        agreed &= !bit;
        cover.push(Cube::new(cube.mask | bit, cube.value | ((first & bit) ^ bit)));
    }
    if differing == 0 {
        return;
    }
    let bit = differing & differing.wrapping_neg();
    for side in [0, bit] {
        let there: Vec<u64> = points.iter().copied().filter(|p| p & bit == side).collect();
        split(Cube::new(cube.mask | bit, cube.value | side), &there, differing & !bit, cover);
    }
}

/// The number bytes for which `inside` holds, as the fewest aligned blocks.
pub(crate) fn byte_blocks(inside: impl Fn(u8) -> bool) -> Vec<Cube> {
    let mut blocks = Vec::new();
    let mut start: u16 = 0;
    while start <= 0xff {
        let mut size: u16 = 1;
        let all = |from: u16, size: u16| (from..from + size).all(|b| u8::try_from(b).is_ok_and(&inside));
        if all(start, 1) {
            while start.is_multiple_of(size * 2) && start + size * 2 <= 0x100 && all(start, size * 2) {
                size *= 2;
            }
            blocks.push(Cube::new(u64::from(0x100 - size), u64::from(start)));
        }
        start += size;
    }
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cube() -> impl Strategy<Value = Cube> {
        (any::<u64>(), any::<u64>(), any::<u64>()).prop_map(|(a, b, v)| Cube::new(a & b, v))
    }

    /// Words near a cube: its value with few bits changed.
    fn near(cube: Cube, noise: u64, flip: u32) -> u64 {
        (cube.value | (noise & !cube.mask)) ^ if flip < 64 { 1 << flip } else { 0 }
    }

    proptest! {
        #[test]
        fn a_difference_holds_exactly_the_words_of_the_one_and_not_of_the_other(
            a in cube(), b in cube(), noise: u64, flip in 0_u32..70,
        ) {
            for word in [near(a, noise, flip), near(b, noise, flip), noise] {
                let mut hits = 0;
                a.without(b, |part| hits += u32::from(part.contains(word)));
                prop_assert_eq!(hits, u32::from(a.contains(word) && !b.contains(word)));
                let both = a.intersect(b).is_some_and(|c| c.contains(word));
                prop_assert_eq!(both, a.contains(word) && b.contains(word));
            }
        }

        #[test]
        fn a_cover_without_points_holds_everything_but_them(
            points in proptest::collection::vec(any::<u32>(), 0..5), noise: u32, flip in 0_u32..40,
        ) {
            let points: Vec<u32> = points.iter().map(|p| p & 0xffff_fffc | 0x28 & 0xfc).collect();
            let block = Cube::new(0xfc, 0x28);
            let cover = cover_without(block, &points);
            let flipped = |p: u32| p ^ 1_u32.checked_shl(flip).unwrap_or(0);
            for word in points.iter().copied().chain(points.iter().map(|p| flipped(*p))).chain([noise]) {
                let wanted = block.contains(word.into()) && !points.contains(&word);
                prop_assert_eq!(cover.iter().any(|c| c.contains(word.into())), wanted, "{:#x}", word);
            }
        }
    }

    #[test]
    fn blocks_hold_exactly_the_bytes_asked_for() {
        let odd = |b: u8| b > 0x26 && b < 0x5a || b == 0xff;
        let blocks = byte_blocks(odd);
        for byte in 0..=0xff_u8 {
            let hits = blocks.iter().filter(|c| c.contains(byte.into())).count();
            assert_eq!(hits, usize::from(odd(byte)), "{byte:#x}");
        }
        assert_eq!(byte_blocks(|_| true), vec![Cube::ALL]);
    }
}
