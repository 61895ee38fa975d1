//! How long to wait before a process that ended is started again: at once for a few times, then in growing
//! steps. Pure: the supervisor measures and waits.

use std::time::Duration;

/// Restarts that happen at once, so that a single crash costs nobody a second.
pub const FAST_RESTARTS: u32 = 5;
/// What each further restart waits longer than the one before.
pub const STEP: Duration = Duration::from_secs(1);
/// Longest wait: a fault that an operator has repaired must not keep the node down for long.
pub const WAIT_MAX: Duration = Duration::from_secs(30);
/// A process that ran this long was healthy; what was before is forgotten.
pub const HEALTHY_AFTER: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Default)]
pub struct Backoff {
    /// Ends in a row, none of them after a healthy run.
    ends: u32,
}

impl Backoff {
    /// The process ended after `ran`: how long to wait until the next start.
    pub fn ended(&mut self, ran: Duration) -> Duration {
        if ran >= HEALTHY_AFTER {
            self.ends = 0;
        }
        self.ends = self.ends.saturating_add(1);
        let slow = self.ends.saturating_sub(FAST_RESTARTS);
        STEP.saturating_mul(slow).min(WAIT_MAX)
    }

    /// Ends in a row so far.
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
    fn a_healthy_run_forgets_what_was_before() {
        let mut backoff = Backoff::default();
        for _ in 0..20 {
            backoff.ended(SHORT);
        }
        assert_eq!(backoff.ended(HEALTHY_AFTER), Duration::ZERO);
        assert_eq!(backoff.ends(), 1);
    }
}
