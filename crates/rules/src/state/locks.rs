//! Locks of rules, which have names and belong to a run, and a thread's total wait for them.
//!
//! A waiting thread serves no request meanwhile. So each wait is short, and all waits take at most
//! a twentieth of a thread's time. Not here: which run holds which lock (`super::Run`).

use std::cell::Cell;
use std::collections::HashSet;
use std::time::{Duration, Instant};

use foldhash::fast::RandomState;
use parking_lot::{Condvar, Mutex};

/// Longest wait for a lock. A run that holds one ends within 100 ms of CPU time, and usually within
/// microseconds.
pub const WAIT_MAX: Duration = Duration::from_millis(50);

/// A thread may wait for at most one part in this number of the time.
const WAIT_SHARE: u32 = 20;

#[derive(Debug, Default)]
pub struct LockTable {
    held: Mutex<HashSet<Box<str>, RandomState>>,
    given_back: Condvar,
}

/// Time that one thread may still wait. It comes back with time, up to `WAIT_MAX`.
#[derive(Debug)]
pub struct WaitAllowance {
    left: Cell<Duration>,
    of: Cell<Instant>,
}

impl Default for WaitAllowance {
    fn default() -> Self {
        Self { left: Cell::new(WAIT_MAX), of: Cell::new(Instant::now()) }
    }
}

impl WaitAllowance {
    fn left(&self, now: Instant) -> Duration {
        let passed = now.saturating_duration_since(self.of.replace(now));
        let left = (self.left.get() + passed / WAIT_SHARE).min(WAIT_MAX);
        self.left.set(left);
        left
    }

    fn waited(&self, time: Duration) {
        self.left.set(self.left.get().saturating_sub(time));
    }
}

impl LockTable {
    /// Takes a lock. Returns whether it was free, or came free within this time and this patience.
    pub fn take(&self, name: &str, within: Duration, patience: &WaitAllowance) -> bool {
        let mut held = self.held.lock();
        if !held.contains(name) {
            return held.insert(name.into());
        }
        if within.is_zero() {
            return false;
        }
        let begun = Instant::now();
        let until = begun + within.min(patience.left(begun));
        let mut timed_out = false;
        while held.contains(name) && !timed_out {
            timed_out = self.given_back.wait_until(&mut held, until).timed_out();
        }
        patience.waited(begun.elapsed());
        !held.contains(name) && held.insert(name.into())
    }

    pub fn give_back(&self, name: &str) {
        let mut held = self.held.lock();
        held.remove(name);
        // Locks have one condition in common, because waits are rare.
        self.given_back.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_is_used_up_and_comes_back_with_time() {
        let begun = Instant::now();
        let patience = WaitAllowance { left: Cell::new(WAIT_MAX), of: Cell::new(begun) };
        patience.waited(2 * WAIT_MAX);
        assert_eq!(patience.left(begun), Duration::ZERO);
        assert_eq!(patience.left(begun + Duration::from_millis(200)), Duration::from_millis(10));
        assert_eq!(patience.left(begun + Duration::from_millis(400)), Duration::from_millis(20));
        assert_eq!(patience.left(begun + Duration::from_secs(3600)), WAIT_MAX);
    }

    #[test]
    fn rule_without_patience_left_does_not_wait_for_a_lock() {
        let locks = LockTable::default();
        let patience = WaitAllowance::default();
        assert!(locks.take("a", Duration::ZERO, &patience));
        assert!(!locks.take("a", Duration::from_secs(3600), &patience), "within WAIT_MAX");
        assert!(patience.left.get() < WAIT_MAX / 2, "{patience:?}");
        locks.give_back("a");
        assert!(locks.take("a", Duration::ZERO, &patience));
    }
}
