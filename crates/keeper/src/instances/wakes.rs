//! Who wakes now: so many at once as there are cores, the others in the order in which they came, with a predicted wait.
//! Pure.
//!
//! More at once would make each of them later and none earlier: waking is work for the CPU. Not here: what a wake is
//! (`lifecycle`).

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

/// Instances that may wait for their turn.
pub const QUEUE_MAX: usize = 16_384;

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
    awake: HashMap<Key, Instant>,
    queue: VecDeque<Key>,
    /// How long one takes.
    typical: Duration,
}

impl Wakes {
    pub fn new(at_once: usize) -> Self {
        Self {
            at_once: at_once.max(1),
            is_held: false,
            awake: HashMap::new(),
            queue: VecDeque::new(),
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
    pub fn join(&mut self, key: Key) -> bool {
        debug_assert!(!self.queue.contains(&key) && !self.awake.contains_key(&key), "one wake at a time");
        if self.queue.len() >= QUEUE_MAX {
            return false;
        }
        self.queue.push_back(key);
        true
    }

    /// Gives the place up before its turn came.
    pub fn leave(&mut self, key: Key) {
        self.queue.retain(|one| *one != key);
    }

    /// The next whose turn it is, if there is room.
    pub fn next(&mut self, now: Instant) -> Option<Key> {
        if self.is_held || self.awake.len() >= self.at_once {
            return None;
        }
        let key = self.queue.pop_front()?;
        self.awake.insert(key, now);
        Some(key)
    }

    /// Its turn is over. `woke`: it came to the end of a wake, which says how long one takes.
    pub fn release(&mut self, key: Key, now: Instant, woke: bool) {
        let Some(since) = self.awake.remove(&key) else { return };
        if woke {
            let took = now.saturating_duration_since(since);
            self.typical = self.typical * (LEARN - 1) / LEARN + took / LEARN;
        }
    }

    /// How long one that asks now, or waits at this place, has to wait for its turn.
    pub fn predicted(&self, key: Key, now: Instant) -> Duration {
        let ahead = self.queue.iter().position(|one| *one == key).unwrap_or(self.queue.len());
        // The places that are free or become free first, in the order in which they do.
        let mut free: Vec<Duration> = self
            .awake
            .values()
            .map(|since| self.typical.saturating_sub(now.saturating_duration_since(*since)))
            .collect();
        free.resize(self.at_once.max(free.len()), Duration::ZERO);
        free.sort_unstable();
        let rounds = u32::try_from(ahead / self.at_once).unwrap_or(u32::MAX);
        free[ahead % self.at_once] + self.typical.saturating_mul(rounds)
    }

    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    pub fn awake(&self) -> usize {
        self.awake.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_at_once_and_the_others_in_order() {
        let now = Instant::now();
        let mut wakes = Wakes::new(2);
        for key in [5, 3, 9, 1] {
            assert!(wakes.join(key));
        }
        assert_eq!((wakes.next(now), wakes.next(now), wakes.next(now)), (Some(5), Some(3), None));
        wakes.leave(9);
        wakes.release(3, now, true);
        assert_eq!((wakes.next(now), wakes.next(now)), (Some(1), None));
        wakes.set_at_once(3);
        assert_eq!(wakes.next(now), None);
        assert_eq!((wakes.awake(), wakes.waiting()), (2, 0));
        wakes.hold(true);
        assert!(wakes.join(7));
        assert_eq!(wakes.next(now), None);
        wakes.hold(false);
        assert_eq!(wakes.next(now), Some(7));
    }

    #[test]
    fn a_wait_is_predicted_from_what_wakes_took() {
        let mut now = Instant::now();
        let mut wakes = Wakes::new(2);
        for _ in 0..100 {
            wakes.join(0);
            wakes.next(now);
            now += Duration::from_millis(80);
            wakes.release(0, now, true);
        }
        let near = |wait: Duration, ms: u64| wait.as_millis().abs_diff(u128::from(ms)) <= 2;
        assert_eq!(wakes.predicted(7, now), Duration::ZERO, "there is room");
        for key in 1..=6 {
            wakes.join(key);
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
        wakes.join(1);
        wakes.next(now);
        wakes.release(1, now + Duration::from_secs(300), false);
        assert_eq!(wakes.typical, FIRST_GUESS);
    }

    #[test]
    fn the_queue_has_an_end() {
        let mut wakes = Wakes::new(1);
        wakes.queue.extend(0..Key::try_from(QUEUE_MAX).unwrap());
        assert!(!wakes.join(Key::MAX));
        assert_eq!(wakes.waiting(), QUEUE_MAX);
    }
}
