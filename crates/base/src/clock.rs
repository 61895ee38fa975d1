//! The seam through which code learns the time, so that simulation can put its own clock there.
//!
//! Not here: timers and sleeping; those belong to the runtime of the process that waits.

use std::time::{Instant, SystemTime};

pub trait Clock {
    /// Monotonic: for measuring how long something took.
    fn now(&self) -> Instant;
    /// Wall clock: for dates a person or a protocol reads.
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
