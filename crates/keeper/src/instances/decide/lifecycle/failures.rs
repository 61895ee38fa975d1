//! How often an instance failed of late, and when it may be started again. Pure.

use std::time::{Duration, Instant};

/// Pause before a failed instance is started again; doubled for each further failure.
pub const BACKOFF_FIRST: Duration = Duration::from_secs(1);
pub const BACKOFF_MAX: Duration = Duration::from_secs(60);

/// A run of this length had a good start: earlier failures are forgotten.
const GOOD_RUN: Duration = Duration::from_secs(60);

/// Counts recent failures.
#[derive(Debug, Default)]
pub struct RecentFailures {
    pub count: u32,
    pub not_before: Option<Instant>,
}

impl RecentFailures {
    /// It did not become ready.
    pub fn not_started(&mut self, now: Instant) {
        self.count = self.count.saturating_add(1);
        self.pause(now, self.count);
    }

    /// It ended by itself after this time. After the first time it may start again at once.
    pub fn ended(&mut self, now: Instant, ran: Duration) {
        self.ran(ran);
        self.count = self.count.saturating_add(1);
        self.pause(now, self.count - 1);
    }

    pub fn ran(&mut self, ran: Duration) {
        if ran >= GOOD_RUN {
            *self = Self::default();
        }
    }

    fn pause(&mut self, now: Instant, times: u32) {
        let doubled = |times: u32| BACKOFF_FIRST.saturating_mul(1 << (times - 1).min(10)).min(BACKOFF_MAX);
        self.not_before = (times > 0).then(|| now + doubled(times));
    }

    pub fn left(&self, now: Instant) -> Option<Duration> {
        self.not_before.and_then(|then| then.checked_duration_since(now)).filter(|left| !left.is_zero())
    }
}
