//! Implements a rate with a burst in one atomic number, by the generic cell rate algorithm (ITU-T
//! I.371, virtual scheduling).
//!
//! Not here: the counted events.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const SECOND_NS: u64 = 1_000_000_000;

/// A rate, and the number of events that may come at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RateLimit {
    /// With 0, there is no limit.
    pub per_second: u32,
    pub burst: u32,
}

/// Time when the next event is due at the rate, in nanoseconds. If it is in the past, the whole
/// burst is there.
#[derive(Debug, Default)]
pub struct RateMeter(AtomicU64);

impl RateMeter {
    /// Counts an event that comes now.
    ///
    /// # Errors
    /// Returns the time until one may come, if the burst is used up. Then it is not counted.
    pub fn take(&self, now_ns: u64, rate: RateLimit) -> Result<(), Duration> {
        if rate.per_second == 0 {
            return Ok(());
        }
        let interval = SECOND_NS / u64::from(rate.per_second);
        let tolerance = interval.saturating_mul(rate.burst.max(1).into());
        let count = |due: u64| {
            let next = due.max(now_ns).saturating_add(interval);
            (next - now_ns <= tolerance).then_some(next)
        };
        match self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, count) {
            Ok(_) => Ok(()),
            Err(due) => {
                let next = due.max(now_ns).saturating_add(interval);
                Err(Duration::from_nanos(next.saturating_sub(now_ns).saturating_sub(tolerance)))
            }
        }
    }

    /// Returns whether the whole burst is there again.
    pub fn is_calm(&self, now_ns: u64) -> bool {
        self.0.load(Ordering::Relaxed) <= now_ns
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const RATE: RateLimit = RateLimit { per_second: 10, burst: 3 };

    #[test]
    fn a_burst_passes_then_the_rate_holds() {
        let meter = RateMeter::default();
        let start = 5 * SECOND_NS;
        assert!((0..3).all(|_| meter.take(start, RATE).is_ok()));
        assert_eq!(meter.take(start, RATE), Err(Duration::from_millis(100)));
        assert_eq!(meter.take(start + SECOND_NS / 20, RATE), Err(Duration::from_millis(50)));
        assert_eq!(meter.take(start + SECOND_NS / 10, RATE), Ok(()), "one is earned in a tenth of a second");
        assert!(meter.take(start + SECOND_NS / 10, RATE).is_err());
        assert!(!meter.is_calm(start + SECOND_NS / 10));
        assert!(meter.is_calm(start + SECOND_NS));
        assert!((0..3).all(|_| meter.take(start + SECOND_NS, RATE).is_ok()));
    }

    #[test]
    fn zero_is_no_limit() {
        let meter = RateMeter::default();
        assert!((0..1000).all(|_| meter.take(0, RateLimit { per_second: 0, burst: 1 }).is_ok()));
    }

    proptest! {
        /// In no window do more pass than the burst and what the rate gives in it.
        #[test]
        fn no_window_lets_more_pass(
            gaps in proptest::collection::vec(0..300_000_000_u64, 1..200),
            per_second in 1..50_u32,
            burst in 1..20_u32,
        ) {
            let (meter, rate) = (RateMeter::default(), RateLimit { per_second, burst });
            let mut now = 0;
            let mut passed = Vec::new();
            for gap in gaps {
                now += gap;
                if meter.take(now, rate).is_ok() {
                    passed.push(now);
                }
            }
            for (first, from) in passed.iter().enumerate() {
                for (last, until) in passed.iter().enumerate().skip(first) {
                    let earned = (until - from) / (SECOND_NS / u64::from(per_second));
                    prop_assert!(((last - first) as u64) < u64::from(burst) + earned + 1);
                }
            }
        }
    }
}
