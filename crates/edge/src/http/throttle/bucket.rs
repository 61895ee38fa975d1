//! Implements one rate: each sender of bytes gets a time at which they may go.
//!
//! The bucket knows until when it is reserved. Bytes taken from it are appended there, so turns
//! come in the order of asking. A sender that woke too late loses nothing, because its next turn is
//! in the past. Time is exact here, and the sleep of a sender is not. Not here: the waiting
//! (`throttle::flow`).

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Maximum time in the past that can be made up for. Timers wake senders a millisecond late, and
/// a busy thread some more. A cell that was idle for longer starts again with no more than this
/// in reserve.
const CATCH_UP: Duration = Duration::from_millis(100);

/// A rate that one or many senders share.
#[derive(Debug)]
pub struct RateBucket(Mutex<BucketLevel>);

#[derive(Debug)]
struct BucketLevel {
    /// Bytes per second, at least 1.
    rate: u64,
    /// All turns until then are taken.
    taken_until: Instant,
}

impl RateBucket {
    pub fn new(rate: u64) -> Self {
        Self(Mutex::new(BucketLevel { rate: rate.max(1), taken_until: Instant::now() }))
    }

    /// Sets the rate for bytes taken from now on.
    pub fn set_rate(&self, rate: u64) {
        self.0.lock().rate = rate.max(1);
    }

    pub fn rate(&self) -> u64 {
        self.0.lock().rate
    }

    /// Returns whether no turn is still to come, and none can be made up for.
    pub fn is_idle(&self) -> bool {
        self.0.lock().taken_until + CATCH_UP <= Instant::now()
    }

    /// Takes `bytes` out of the bucket. They may go from the returned time on.
    pub fn take(&self, bytes: u64) -> Instant {
        let mut state = self.0.lock();
        let now = Instant::now();
        let turn = state.taken_until.max(now.checked_sub(CATCH_UP).unwrap_or(now));
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(state.rate);
        state.taken_until = turn + Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        turn
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn turns_follow_each_other_at_the_rate() {
        let bucket = RateBucket::new(1000);
        let start = Instant::now();
        let turns: Vec<_> = (0..4).map(|_| bucket.take(500) - start).collect();
        assert_eq!(turns, [0, 500, 1000, 1500].map(Duration::from_millis));
    }

    #[tokio::test(start_paused = true)]
    async fn late_sender_makes_up_for_a_little_and_not_for_a_pause() {
        let bucket = RateBucket::new(1000);
        bucket.take(10);
        tokio::time::advance(Duration::from_millis(50)).await;
        assert!(bucket.take(10) < Instant::now(), "40 ms late, which counts");
        tokio::time::advance(Duration::from_secs(60)).await;
        let now = Instant::now();
        let free = (0..100).filter(|_| bucket.take(10) <= now).count();
        assert_eq!(free, 11, "a tenth of a second's bytes, and the turn that begins now");
    }

    #[tokio::test(start_paused = true)]
    async fn a_rate_of_nothing_is_slow_and_not_for_ever() {
        let bucket = RateBucket::new(0);
        bucket.take(2);
        assert_eq!(bucket.take(1) - Instant::now(), Duration::from_secs(2));
    }
}
