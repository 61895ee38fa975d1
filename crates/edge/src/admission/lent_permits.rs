//! Counts the permits that a lane has been lent. Each is taken and given back with one atomic
//! operation, while no request waits.
//!
//! Most requests find their lane nearly empty, without a line in the last minute. They need no
//! place in a line and no prediction, only a count. So the machine lends such a lane some permits
//! in bulk. It recalls them when a request waits in the lane or its parents. Then no request
//! takes one any more, and each comes back when its request ends. Not here: when permits are lent
//! and recalled (`nagaya_admission`), a request without one (`lanes`).

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Permits lent to a lane, with a share for each thread. So no other thread writes where a
/// request is counted.
#[derive(Debug)]
pub struct LentPermits(Box<[LentShare]>);

/// Two cache lines apart from the next one, because CPUs fetch them in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
struct LentShare(PermitCount);

impl LentPermits {
    pub fn new(threads: usize) -> Self {
        Self((0..threads.max(1)).map(|_| LentShare::default()).collect())
    }

    /// Returns the calling thread's share. Permits that were taken there are given back there.
    pub fn own(&self) -> &PermitCount {
        &self.0[thread() % self.0.len()].0
    }

    /// Ends the lending. Returns the number of permits not in use, which go back at once. Call it
    /// only under the machine's lock.
    pub fn recall(&self) -> u32 {
        self.0.iter().map(|share| share.0.recall()).sum()
    }

    /// Returns the number of permits not in use.
    pub fn spare(&self) -> u32 {
        self.0.iter().map(|share| share.0.spare()).sum()
    }
}

/// Returns the calling thread's number, counted from 0 in the order in which threads first ask.
fn thread() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static OWN: usize = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    OWN.with(|own| *own)
}

/// Holds `used` in the low bits, `lent` above it, and the recalled flag on top.
#[derive(Debug, Default)]
pub struct PermitCount(AtomicU64);

const BITS: u32 = 31;
const MASK: u64 = (1 << BITS) - 1;
const ONE_USED: u64 = 1;
const ONE_LENT: u64 = 1 << BITS;
const RECALLED: u64 = 1 << 63;

fn used(word: u64) -> u64 {
    word & MASK
}

fn lent(word: u64) -> u64 {
    (word >> BITS) & MASK
}

impl PermitCount {
    /// Takes one, if there is one.
    pub fn enter(&self) -> bool {
        let take = |word| (word & RECALLED == 0 && used(word) < lent(word)).then_some(word + ONE_USED);
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, take).is_ok()
    }

    /// Gives one back. Returns false if they have been recalled. Then it goes back to the machine
    /// by [`Self::settle`].
    pub fn leave(&self) -> bool {
        let give = |word| (word & RECALLED == 0).then(|| word - ONE_USED);
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, give).is_ok()
    }

    /// Lends `count` more permits, of which the caller takes the first. Call it and the functions
    /// below only under the machine's lock.
    pub fn grant(&self, count: u32) {
        let grant = |word: u64| Some((word & !RECALLED) + u64::from(count) * ONE_LENT + ONE_USED);
        let _ = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, grant);
    }

    /// Ends the lending. Returns the number of permits not in use, which go back at once.
    pub fn recall(&self) -> u32 {
        let recall = |word| Some(RECALLED | (used(word) << BITS) | used(word));
        let before = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, recall).unwrap_or_default();
        u32::try_from(lent(before) - used(before)).expect("it has 31 bits")
    }

    /// Records that a recalled permit is free. Returns whether it goes back now. It stays if
    /// permits have been lent again meanwhile.
    pub fn settle(&self) -> bool {
        let give =
            |word: u64| Some(if word & RECALLED == 0 { word - ONE_USED } else { word - ONE_USED - ONE_LENT });
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, give).is_ok_and(|word| word & RECALLED != 0)
    }

    /// Returns the number of permits not in use.
    pub fn spare(&self) -> u32 {
        let word = self.0.load(Ordering::Relaxed);
        u32::try_from(lent(word) - used(word)).expect("it has 31 bits")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_enter_as_are_lent() {
        let lane = PermitCount::default();
        assert!(!lane.enter());
        lane.grant(2);
        assert!(lane.enter());
        assert!(!lane.enter());
        assert!(lane.leave() && lane.enter());
        assert_eq!(lane.spare(), 0);
    }

    #[test]
    fn recalled_ones_come_back_when_their_requests_end() {
        let lane = PermitCount::default();
        lane.grant(5);
        assert_eq!(lane.recall(), 4);
        assert!(!lane.enter() && !lane.leave());
        assert!(lane.settle(), "the one in use goes back");
        assert_eq!((lane.recall(), lane.spare()), (0, 0));
    }

    #[test]
    fn lending_again_keeps_the_permits_in_use() {
        let lane = PermitCount::default();
        lane.grant(2);
        lane.recall();
        lane.grant(3);
        assert!(lane.leave() && lane.leave());
        assert_eq!(lane.spare(), 4);
    }

    #[test]
    fn each_thread_counts_in_a_share_of_its_own() {
        let lane = LentPermits::new(2);
        lane.own().grant(3);
        std::thread::scope(|scope| {
            let other = || {
                let is_other = !std::ptr::eq(lane.own(), &lane.0[thread().wrapping_add(1) % 2].0);
                lane.own().grant(2);
                is_other
            };
            assert!(scope.spawn(other).join().unwrap());
        });
        assert_eq!((lane.spare(), lane.recall(), lane.spare()), (3, 3, 0));
    }

    #[test]
    fn threads_neither_lose_nor_double_them() {
        let lane = PermitCount::default();
        let given = std::sync::atomic::AtomicU32::new(0);
        std::thread::scope(|scope| {
            for seed in 0..4_u32 {
                let (lane, given) = (&lane, &given);
                scope.spawn(move || {
                    for turn in 0..20_000_u32 {
                        match (turn.wrapping_mul(2_654_435_761) ^ seed) >> 29 {
                            0 if seed == 0 => {
                                given.fetch_sub(lane.recall(), Ordering::SeqCst);
                            }
                            1 if seed == 0 => {
                                given.fetch_add(3, Ordering::SeqCst);
                                lane.grant(3);
                                if !lane.leave() && lane.settle() {
                                    given.fetch_sub(1, Ordering::SeqCst);
                                }
                            }
                            _ if lane.enter() && !lane.leave() && lane.settle() => {
                                given.fetch_sub(1, Ordering::SeqCst);
                            }
                            _ => {}
                        }
                    }
                });
            }
        });
        given.fetch_sub(lane.recall(), Ordering::SeqCst);
        assert_eq!(given.load(Ordering::SeqCst), 0);
    }
}
