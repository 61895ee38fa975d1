//! A node's own clock: it starts at the wall clock's time and continues with the monotonic clock,
//! which never jumps.
//!
//! Promises for a time use it, so that a change of the wall clock moves no promise. A process that
//! replaces another one takes its clock over. Otherwise it would start with the wall clock as it
//! was set meanwhile.
//!
//! Not here: the clock interface of simulations (`clock`), dates and times that people read.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Microseconds since 1970, by the wall clock at its start.
#[derive(Debug, Clone, Copy)]
pub struct AnchoredClock {
    began: Instant,
    at_begin: u64,
}

impl AnchoredClock {
    /// Starts at the present wall clock.
    pub fn of_wall() -> Self {
        Self::at(wall_us())
    }

    /// Continues from another process's time.
    pub fn at(now_us: u64) -> Self {
        Self { began: Instant::now(), at_begin: now_us }
    }

    pub fn now_us(&self) -> u64 {
        self.at_begin.saturating_add(micros(self.began.elapsed()))
    }

    /// Returns what the wall clock will show at that moment, unless it is set again. It serves
    /// readers with their own clock.
    pub fn on_wall_us(&self, moment_us: u64) -> u64 {
        shown_at(wall_us(), self.now_us(), moment_us)
    }
}

fn shown_at(wall_us: u64, now_us: u64, moment_us: u64) -> u64 {
    if moment_us >= now_us {
        wall_us.saturating_add(moment_us - now_us)
    } else {
        wall_us.saturating_sub(now_us - moment_us)
    }
}

fn wall_us() -> u64 {
    micros(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_goes_on_from_where_it_was() {
        let hour_ago = wall_us() - 3_600_000_000;
        let anchored_clock = AnchoredClock::at(hour_ago);
        let first = anchored_clock.now_us();
        assert!(first >= hour_ago && anchored_clock.now_us() >= first);
        assert!(first < wall_us() - 1_800_000_000, "the wall clock is of no concern to it");
    }

    #[test]
    fn a_moment_keeps_its_distance_to_now_on_the_wall_clock() {
        for wall in [5_000, 5_000_000] {
            assert_eq!(shown_at(wall, 1_000_000, 1_000_250), wall + 250);
            assert_eq!(shown_at(wall, 1_000_000, 999_750), wall - 250);
        }
        assert_eq!(shown_at(100, 1_000_000, 0), 0);
        assert_eq!(shown_at(u64::MAX, 0, 1), u64::MAX);
    }
}
