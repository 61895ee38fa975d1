//! Decides which instances wake now: as many at once as there are cores. The others wait in order
//! of arrival, with a predicted wait. Pure.
//!
//! More at once would make each of them later and none earlier, because waking is work for the CPU.
//! A start that does little work, or takes long, gives its slot to the next one. It is then late,
//! and delays only its own tenant. Not here: what a wake is (`lifecycle`), which start is late
//! (`lateness`).

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use nagaya_records::TenantName;

/// Maximum number of instances that wait for their turn.
pub const QUEUE_MAX: usize = 16_384;

/// Maximum number of late starts of one tenant. Its next ones wait for one of them to end. Those
/// with a slot by then may become late as well. So it has fewer than the sum of this and `at_once`.
pub const LATE_PER_TENANT_MAX: usize = 4;

/// Assumed duration of a wake before one was measured.
const FIRST_GUESS: Duration = Duration::from_millis(500);

/// Each wake moves the expected duration of the next by an eighth.
const LEARN: u32 = 8;

/// The driver's number of an instance.
pub type InstanceKey = u32;

#[derive(Debug)]
pub struct WakeQueue {
    at_once: usize,
    /// All wait, however few are awake.
    is_held: bool,
    /// Instances whose turn it is, and since when.
    awake: HashMap<InstanceKey, WakeTurn>,
    /// Instances that gave their slots back and continue.
    late: HashMap<InstanceKey, TenantName>,
    /// Instances that wait, by their arrival number.
    queue: BTreeMap<u64, (InstanceKey, TenantName)>,
    /// Instances that reached the front of the queue while their tenants had the maximum number of
    /// late starts. By arrival number.
    parked: HashMap<TenantName, BTreeMap<u64, InstanceKey>>,
    last_coming: u64,
    /// Expected duration of a wake.
    typical: Duration,
}

#[derive(Debug)]
struct WakeTurn {
    since: Instant,
    tenant: TenantName,
}

impl WakeQueue {
    pub fn new(at_once: usize) -> Self {
        Self {
            at_once: at_once.max(1),
            is_held: false,
            awake: HashMap::new(),
            late: HashMap::new(),
            queue: BTreeMap::new(),
            parked: HashMap::new(),
            last_coming: 0,
            typical: FIRST_GUESS,
        }
    }

    /// Stops granting turns, or resumes it.
    pub fn hold(&mut self, is_held: bool) {
        self.is_held = is_held;
    }

    pub fn set_at_once(&mut self, at_once: usize) {
        self.at_once = at_once.max(1);
    }

    /// Joins the queue at its end. False if it is full.
    pub fn join(&mut self, key: InstanceKey, tenant: TenantName) -> bool {
        let has_place = self.awake.contains_key(&key) || self.late.contains_key(&key);
        debug_assert!(self.place(key).is_none() && !has_place, "one wake at a time");
        if self.waiting() >= QUEUE_MAX {
            return false;
        }
        self.last_coming += 1;
        self.queue.insert(self.last_coming, (key, tenant));
        true
    }

    /// Leaves the queue before its turn.
    pub fn leave(&mut self, key: InstanceKey) {
        self.queue.retain(|_, (one, _)| *one != key);
        self.parked.retain(|_, keys| {
            keys.retain(|_, one| *one != key);
            !keys.is_empty()
        });
    }

    /// Returns the next instance whose turn it is, if a slot is free.
    pub fn next(&mut self, now: Instant) -> Option<InstanceKey> {
        if self.is_held || self.awake.len() >= self.at_once {
            return None;
        }
        loop {
            let (coming, (key, tenant)) = self.queue.pop_first()?;
            if self.late_of(&tenant) < LATE_PER_TENANT_MAX {
                self.awake.insert(key, WakeTurn { since: now, tenant });
                return Some(key);
            }
            self.parked.entry(tenant).or_default().insert(coming, key);
        }
    }

    /// Takes the slot of an instance that continues.
    pub fn give_back(&mut self, key: InstanceKey, now: Instant) {
        let Some(turn) = self.awake.remove(&key) else { return };
        self.learn(now.saturating_duration_since(turn.since));
        self.late.insert(key, turn.tenant);
    }

    /// Ends its turn. `woke`: it came to the end of a wake, which is then a measurement.
    pub fn release(&mut self, key: InstanceKey, now: Instant, woke: bool) {
        if let Some(tenant) = self.late.remove(&key) {
            let next = self.parked.remove(&tenant).unwrap_or_default();
            self.queue.extend(next.into_iter().map(|(coming, key)| (coming, (key, tenant.clone()))));
        }
        let Some(turn) = self.awake.remove(&key) else { return };
        if woke {
            self.learn(now.saturating_duration_since(turn.since));
        }
    }

    fn learn(&mut self, took: Duration) {
        self.typical = self.typical * (LEARN - 1) / LEARN + took / LEARN;
    }

    fn late_of(&self, tenant: &TenantName) -> usize {
        self.late.values().filter(|one| *one == tenant).count()
    }

    /// Returns how many go before it. For a parked one: how many of its own tenant.
    fn place(&self, key: InstanceKey) -> Option<usize> {
        let parked = || self.parked.values().find_map(|keys| keys.values().position(|one| *one == key));
        self.queue.values().position(|(one, _)| *one == key).or_else(parked)
    }

    /// Predicts the wait for its turn, for an instance in the queue or one that would join now.
    pub fn predicted(&self, key: InstanceKey, now: Instant) -> Duration {
        let ahead = self.place(key).unwrap_or(self.queue.len());
        // Slots that are free or become free first, in the order in which they do.
        let mut free: Vec<Duration> = self
            .awake
            .values()
            .map(|turn| self.typical.saturating_sub(now.saturating_duration_since(turn.since)))
            .collect();
        free.resize(self.at_once.max(free.len()), Duration::ZERO);
        free.sort_unstable();
        let rounds = u32::try_from(ahead / self.at_once).unwrap_or(u32::MAX);
        free[ahead % self.at_once] + self.typical.saturating_mul(rounds)
    }

    pub fn waiting(&self) -> usize {
        self.queue.len() + self.parked.values().map(BTreeMap::len).sum::<usize>()
    }

    /// Returns how many have a slot or are late.
    pub fn awake(&self) -> usize {
        self.awake.len() + self.late.len()
    }

    #[cfg(test)]
    pub(crate) fn late(&self) -> usize {
        self.late.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(tenant: &str) -> TenantName {
        TenantName::new(tenant).unwrap()
    }

    #[test]
    fn late_wakes_hold_up_their_own_tenant_and_nobody_else() {
        let now = Instant::now();
        let mut wakes = WakeQueue::new(1);
        let late = InstanceKey::try_from(LATE_PER_TENANT_MAX).unwrap();
        for key in 0..late + 2 {
            assert!(wakes.join(key, of("slow")));
        }
        for key in 0..late {
            assert_eq!(wakes.next(now), Some(key));
            assert_eq!(wakes.next(now), None, "the place is taken");
            wakes.give_back(key, now);
        }
        assert_eq!(wakes.next(now), None, "as many are late as may");
        assert!(wakes.join(50, of("other")) && wakes.join(51, of("other")));
        assert_eq!((wakes.awake(), wakes.waiting()), (LATE_PER_TENANT_MAX, 4));
        assert_eq!((wakes.next(now), wakes.next(now)), (Some(50), None));
        // One of them ends: the next of its tenant goes before those that came later.
        wakes.release(2, now, true);
        wakes.release(50, now, true);
        assert_eq!(wakes.next(now), Some(late));
        wakes.leave(late + 1);
        wakes.release(late, now, false);
        assert_eq!((wakes.next(now), wakes.next(now)), (Some(51), None));
        wakes.release(51, now, true);
        (0..late).for_each(|key| wakes.release(key, now, false));
        assert_eq!((wakes.awake(), wakes.waiting()), (0, 0));
        assert_eq!((wakes.late.len(), wakes.parked.len()), (0, 0), "nothing is left behind");
    }

    #[test]
    fn wake_held_up_by_its_own_tenant_keeps_its_place() {
        let now = Instant::now();
        let mut wakes = WakeQueue::new(1);
        let most = InstanceKey::try_from(LATE_PER_TENANT_MAX).unwrap();
        for (first, tenant) in [(0, "a"), (100, "b")] {
            for key in first..first + most {
                wakes.join(key, of(tenant));
                assert_eq!(wakes.next(now), Some(key));
                wakes.give_back(key, now);
            }
        }
        for (key, tenant) in [(50, "a"), (150, "b"), (7, "c"), (8, "c")] {
            wakes.join(key, of(tenant));
        }
        assert_eq!(wakes.next(now), Some(7), "the others are held up");
        // Both may go on now, in the order in which they came, whoever's start has ended first.
        wakes.release(0, now, true);
        wakes.release(100, now, true);
        for (ended, next) in [(7, 50), (50, 150), (150, 8)] {
            wakes.release(ended, now, true);
            assert_eq!(wakes.next(now), Some(next));
        }
    }

    #[test]
    fn so_many_at_once_and_the_others_in_order() {
        let now = Instant::now();
        let mut wakes = WakeQueue::new(2);
        for key in [5, 3, 9, 1] {
            assert!(wakes.join(key, of("t")));
        }
        assert_eq!((wakes.next(now), wakes.next(now), wakes.next(now)), (Some(5), Some(3), None));
        wakes.leave(9);
        wakes.release(3, now, true);
        assert_eq!((wakes.next(now), wakes.next(now)), (Some(1), None));
        wakes.set_at_once(3);
        assert_eq!(wakes.next(now), None);
        assert_eq!((wakes.awake(), wakes.waiting()), (2, 0));
        wakes.hold(true);
        assert!(wakes.join(7, of("t")));
        assert_eq!(wakes.next(now), None);
        wakes.hold(false);
        assert_eq!(wakes.next(now), Some(7));
    }

    #[test]
    fn a_wait_is_predicted_from_what_wakes_took() {
        let mut now = Instant::now();
        let mut wakes = WakeQueue::new(2);
        for _ in 0..100 {
            wakes.join(0, of("t"));
            wakes.next(now);
            now += Duration::from_millis(80);
            wakes.release(0, now, true);
        }
        let near = |wait: Duration, ms: u64| wait.as_millis().abs_diff(u128::from(ms)) <= 2;
        assert_eq!(wakes.predicted(7, now), Duration::ZERO, "there is room");
        for key in 1..=6 {
            wakes.join(key, of("t"));
        }
        wakes.next(now);
        wakes.next(now);
        now += Duration::from_millis(30);
        assert!(near(wakes.predicted(3, now), 50), "{:?}", wakes.predicted(3, now));
        assert!(near(wakes.predicted(4, now), 50));
        assert!(near(wakes.predicted(5, now), 130));
        assert!(near(wakes.predicted(99, now), 210), "one that would come now");
    }

    #[test]
    fn failed_wake_teaches_no_time() {
        let now = Instant::now();
        let mut wakes = WakeQueue::new(1);
        wakes.join(1, of("t"));
        wakes.next(now);
        wakes.release(1, now + Duration::from_secs(300), false);
        assert_eq!(wakes.typical, FIRST_GUESS);
    }

    #[test]
    fn the_queue_has_an_end() {
        let mut wakes = WakeQueue::new(1);
        let many = (0..InstanceKey::try_from(QUEUE_MAX).unwrap()).map(|key| (u64::from(key), (key, of("t"))));
        wakes.queue.extend(many);
        assert!(!wakes.join(InstanceKey::MAX, of("t")));
        assert_eq!(wakes.waiting(), QUEUE_MAX);
    }
}
