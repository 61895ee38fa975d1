//! Who wakes now: so many at once as there are cores, the others in the order in which they came, with a predicted wait.
//! Pure.
//!
//! More at once would make each of them later and none earlier: waking is work for the CPU. A start that does little work, or
//! goes on for long, gives its place to the next one and is late from then on: it holds up nobody but its own tenant.
//! Not here: what a wake is (`lifecycle`), who is seen to be late (`lateness`).

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use nagaya_cmdb::TenantName;

/// Instances that may wait for their turn.
pub const QUEUE_MAX: usize = 16_384;

/// With so many late starts of one tenant, its next ones wait for one of them to end. Those that have a place by then may become late
/// as well, so it has fewer than this and `at_once` together.
pub const LATE_PER_TENANT_MAX: usize = 4;

/// What a wake is taken to last before one was seen.
const FIRST_GUESS: Duration = Duration::from_millis(500);

/// Each wake moves what is expected of the next by an eighth.
const LEARN: u32 = 8;

/// Of instances, by what the driver numbers them with.
pub type Key = u32;

#[derive(Debug)]
pub struct Wakes {
    at_once: usize,
    /// All wait, whoever else is awake.
    is_held: bool,
    /// Those whose turn it is, since then.
    awake: HashMap<Key, Turn>,
    /// Those that gave their places back and go on.
    late: HashMap<Key, TenantName>,
    queue: VecDeque<(Key, TenantName)>,
    /// Those that came to the front of the queue while their tenants had as many late starts as they may, in their order.
    parked: HashMap<TenantName, VecDeque<Key>>,
    /// How long one takes.
    typical: Duration,
}

#[derive(Debug)]
struct Turn {
    since: Instant,
    tenant: TenantName,
}

impl Wakes {
    pub fn new(at_once: usize) -> Self {
        Self {
            at_once: at_once.max(1),
            is_held: false,
            awake: HashMap::new(),
            late: HashMap::new(),
            queue: VecDeque::new(),
            parked: HashMap::new(),
            typical: FIRST_GUESS,
        }
    }

    /// From now on nobody's turn comes, or no longer so.
    pub fn hold(&mut self, is_held: bool) {
        self.is_held = is_held;
    }

    pub fn set_at_once(&mut self, at_once: usize) {
        self.at_once = at_once.max(1);
    }

    /// Takes a place at the end. False: there is none left.
    pub fn join(&mut self, key: Key, tenant: TenantName) -> bool {
        debug_assert!(self.place(key).is_none() && !self.awake.contains_key(&key), "one wake at a time");
        if self.waiting() >= QUEUE_MAX {
            return false;
        }
        self.queue.push_back((key, tenant));
        true
    }

    /// Gives the place up before its turn came.
    pub fn leave(&mut self, key: Key) {
        self.queue.retain(|(one, _)| *one != key);
        self.parked.retain(|_, keys| {
            keys.retain(|one| *one != key);
            !keys.is_empty()
        });
    }

    /// The next whose turn it is, if there is room.
    pub fn next(&mut self, now: Instant) -> Option<Key> {
        if self.is_held || self.awake.len() >= self.at_once {
            return None;
        }
        loop {
            let (key, tenant) = self.queue.pop_front()?;
            if self.late_of(&tenant) < LATE_PER_TENANT_MAX {
                self.awake.insert(key, Turn { since: now, tenant });
                return Some(key);
            }
            self.parked.entry(tenant).or_default().push_back(key);
        }
    }

    /// It goes on, and somebody else has the place.
    pub fn give_back(&mut self, key: Key, now: Instant) {
        let Some(turn) = self.awake.remove(&key) else { return };
        self.learn(now.saturating_duration_since(turn.since));
        self.late.insert(key, turn.tenant);
    }

    /// Its turn is over. `woke`: it came to the end of a wake, which says how long one takes.
    pub fn release(&mut self, key: Key, now: Instant, woke: bool) {
        if let Some(tenant) = self.late.remove(&key) {
            let next = self.parked.remove(&tenant).unwrap_or_default();
            next.into_iter().rev().for_each(|key| self.queue.push_front((key, tenant.clone())));
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

    /// How many go before it. Of a parked one: how many of its own tenant.
    fn place(&self, key: Key) -> Option<usize> {
        let parked = || self.parked.values().find_map(|keys| keys.iter().position(|one| *one == key));
        self.queue.iter().position(|(one, _)| *one == key).or_else(parked)
    }

    /// How long one that asks now, or waits at this place, has to wait for its turn.
    pub fn predicted(&self, key: Key, now: Instant) -> Duration {
        let ahead = self.place(key).unwrap_or(self.queue.len());
        // The places that are free or become free first, in the order in which they do.
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
        self.queue.len() + self.parked.values().map(VecDeque::len).sum::<usize>()
    }

    /// Those that have a place, and those that are late.
    pub fn awake(&self) -> usize {
        self.awake.len() + self.late.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(tenant: &str) -> TenantName {
        TenantName::new(tenant).unwrap()
    }

    #[test]
    fn who_is_late_holds_up_its_own_tenant_and_nobody_else() {
        let now = Instant::now();
        let mut wakes = Wakes::new(1);
        let late = Key::try_from(LATE_PER_TENANT_MAX).unwrap();
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
    fn so_many_at_once_and_the_others_in_order() {
        let now = Instant::now();
        let mut wakes = Wakes::new(2);
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
        let mut wakes = Wakes::new(2);
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
    fn what_never_woke_teaches_nothing() {
        let now = Instant::now();
        let mut wakes = Wakes::new(1);
        wakes.join(1, of("t"));
        wakes.next(now);
        wakes.release(1, now + Duration::from_secs(300), false);
        assert_eq!(wakes.typical, FIRST_GUESS);
    }

    #[test]
    fn the_queue_has_an_end() {
        let mut wakes = Wakes::new(1);
        wakes.queue.extend((0..Key::try_from(QUEUE_MAX).unwrap()).map(|key| (key, of("t"))));
        assert!(!wakes.join(Key::MAX, of("t")));
        assert_eq!(wakes.waiting(), QUEUE_MAX);
    }
}
