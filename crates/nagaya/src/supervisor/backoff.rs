//! Computes the wait before an ended process is restarted: none for a few times, then growing
//! steps. Pure: the supervisor measures and waits.

use std::time::Duration;

/// Restarts that happen at once, so that a single crash costs no second.
pub const FAST_RESTARTS: u32 = 5;
/// How much longer each further restart waits than the one before.
pub const STEP: Duration = Duration::from_secs(1);
/// Longest wait: after an operator has repaired a fault, the node must not stay down for long.
pub const WAIT_MAX: Duration = Duration::from_secs(30);
/// For each such time that a process ran, one earlier end is forgotten. So a process that is ended
/// occasionally, for example when memory runs out, is always restarted at once.
pub const FORGIVEN_EACH: Duration = Duration::from_secs(10);
/// A process that ran this long was healthy; its earlier ends are forgotten.
pub const HEALTHY_AFTER: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Default)]
pub struct RestartBackoff {
    /// Ends that are not forgotten.
    ends: u32,
}

impl RestartBackoff {
    /// Notes that the process ended after `ran`. Returns the wait before the next start.
    pub fn next_delay(&mut self, ran: Duration) -> Duration {
        let stretches = ran.as_secs() / FORGIVEN_EACH.as_secs();
        let forgiven =
            if ran >= HEALTHY_AFTER { u32::MAX } else { u32::try_from(stretches).unwrap_or(u32::MAX) };
        self.ends = self.ends.saturating_sub(forgiven).saturating_add(1);
        let slow = self.ends.saturating_sub(FAST_RESTARTS);
        STEP.saturating_mul(slow).min(WAIT_MAX)
    }

    /// Returns the number of ends that are not forgotten.
    pub fn ends(&self) -> u32 {
        self.ends
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(5);

    #[test]
    fn first_restarts_are_immediate_and_later_ones_wait_longer() {
        let mut backoff = RestartBackoff::default();
        let waits: Vec<u64> = (0..50).map(|_| backoff.next_delay(SHORT).as_secs()).collect();
        assert_eq!(waits[..8], [0, 0, 0, 0, 0, 1, 2, 3]);
        assert_eq!(waits[49], WAIT_MAX.as_secs());
        assert!(waits.is_sorted());
        assert_eq!(backoff.ends(), 50);
    }

    #[test]
    fn a_process_that_ran_for_a_while_is_restarted_at_once() {
        let mut backoff = RestartBackoff::default();
        assert!((0..100).all(|_| backoff.next_delay(FORGIVEN_EACH).is_zero()));
        assert_eq!(backoff.ends(), 1);
        // What came quickly before is forgotten one by one.
        let mut backoff = RestartBackoff::default();
        (0..8).for_each(|_| _ = backoff.next_delay(SHORT));
        let waits: Vec<u64> = (0..4).map(|_| backoff.next_delay(2 * FORGIVEN_EACH).as_secs()).collect();
        assert_eq!(waits, [2, 1, 0, 0]);
    }

    #[test]
    fn a_healthy_run_forgets_what_was_before() {
        let mut backoff = RestartBackoff::default();
        for _ in 0..20 {
            backoff.next_delay(SHORT);
        }
        assert_eq!(backoff.next_delay(HEALTHY_AFTER), Duration::ZERO);
        assert_eq!(backoff.ends(), 1);
    }
}
