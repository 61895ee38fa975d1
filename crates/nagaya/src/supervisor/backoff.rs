//! How long to wait before a process that ended is started again: at once for a few times, then in growing
//! steps. Pure: the supervisor measures and waits.

use std::time::Duration;

/// Restarts that happen at once, so that a single crash costs nobody a second.
pub const FAST_RESTARTS: u32 = 5;
/// What each further restart waits longer than the one before.
pub const STEP: Duration = Duration::from_secs(1);
/// Longest wait: a fault that an operator has repaired must not keep the node down for long.
pub const WAIT_MAX: Duration = Duration::from_secs(30);
/// For each such time that a process ran, one end before is forgotten: one that is ended now and then, as by who runs out of
/// memory, is always started at once.
pub const FORGIVEN_EACH: Duration = Duration::from_secs(10);
/// A process that ran this long was healthy; what was before is forgotten.
pub const HEALTHY_AFTER: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Default)]
pub struct Backoff {
    /// Ends that are not forgotten.
    ends: u32,
}

impl Backoff {
    /// The process ended after `ran`: how long to wait until the next start.
    pub fn ended(&mut self, ran: Duration) -> Duration {
        let stretches = ran.as_secs() / FORGIVEN_EACH.as_secs();
        let forgiven =
            if ran >= HEALTHY_AFTER { u32::MAX } else { u32::try_from(stretches).unwrap_or(u32::MAX) };
        self.ends = self.ends.saturating_sub(forgiven).saturating_add(1);
        let slow = self.ends.saturating_sub(FAST_RESTARTS);
        STEP.saturating_mul(slow).min(WAIT_MAX)
    }

    /// Ends so far that are not forgotten.
    pub fn ends(&self) -> u32 {
        self.ends
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(5);

    #[test]
    fn the_first_restarts_are_at_once_and_later_ones_wait_ever_longer_up_to_a_bound() {
        let mut backoff = Backoff::default();
        let waits: Vec<u64> = (0..50).map(|_| backoff.ended(SHORT).as_secs()).collect();
        assert_eq!(waits[..8], [0, 0, 0, 0, 0, 1, 2, 3]);
        assert_eq!(waits[49], WAIT_MAX.as_secs());
        assert!(waits.is_sorted());
        assert_eq!(backoff.ends(), 50);
    }

    #[test]
    fn who_runs_for_a_while_between_its_ends_is_started_at_once_each_time() {
        let mut backoff = Backoff::default();
        assert!((0..100).all(|_| backoff.ended(FORGIVEN_EACH).is_zero()));
        assert_eq!(backoff.ends(), 1);
        // What came quickly before is forgotten one by one.
        let mut backoff = Backoff::default();
        (0..8).for_each(|_| _ = backoff.ended(SHORT));
        let waits: Vec<u64> = (0..4).map(|_| backoff.ended(2 * FORGIVEN_EACH).as_secs()).collect();
        assert_eq!(waits, [2, 1, 0, 0]);
    }

    #[test]
    fn a_healthy_run_forgets_what_was_before() {
        let mut backoff = Backoff::default();
        for _ in 0..20 {
            backoff.ended(SHORT);
        }
        assert_eq!(backoff.ended(HEALTHY_AFTER), Duration::ZERO);
        assert_eq!(backoff.ends(), 1);
    }
}
