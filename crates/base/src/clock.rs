//! The clock interface, so that a simulation can use its own clock.
//!
//! Not here: timers and sleeping; those belong to the runtime of the waiting process.

use std::time::{Instant, SystemTime};

pub trait Clock {
    /// Returns the monotonic time, for measuring durations.
    fn now(&self) -> Instant;
    /// Returns the wall clock, for dates that a person or a protocol reads.
    fn wall(&self) -> SystemTime;
}

/// The machine's own clocks.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn wall(&self) -> SystemTime {
        SystemTime::now()
    }
}
