//! The budget of a program's output, and the number of lines dropped beyond it.
//!
//! Not here: splitting lines (`lines`), their destination (`journal`, `follow`).

use std::time::{Duration, Instant};

/// Time after which a kept program may write as much again.
pub const RENEWED_AFTER: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub struct LogMeter {
    left: usize,
    began: Instant,
    is_spent: bool,
    dropped: u64,
}

/// Whether a line is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MeterResult {
    Yes,
    /// It is the first that is not.
    NoMore,
    No,
}

impl LogMeter {
    pub fn new(bytes_max: usize, now: Instant) -> Self {
        Self { left: bytes_max, began: now, is_spent: false, dropped: 0 }
    }

    pub fn is_due(&self, now: Instant) -> bool {
        now.duration_since(self.began) >= RENEWED_AFTER
    }

    /// Renews the budget. Returns how many lines were dropped before.
    pub fn renew(&mut self, bytes_max: usize, now: Instant) -> u64 {
        std::mem::replace(self, Self::new(bytes_max, now)).dropped
    }

    /// Pays for a line. After the first dropped line all are dropped, so that the kept part has no
    /// holes.
    pub fn pay(&mut self, bytes: usize) -> MeterResult {
        if !self.is_spent && bytes <= self.left {
            self.left -= bytes;
            return MeterResult::Yes;
        }
        self.dropped += 1;
        if std::mem::replace(&mut self.is_spent, true) { MeterResult::No } else { MeterResult::NoMore }
    }

    pub fn is_spent(&self) -> bool {
        self.is_spent
    }

    /// Counts lines that were dropped without payment.
    pub fn drop_lines(&mut self, lines: u64) {
        self.dropped += lines;
    }

    /// Returns how many lines were dropped, and restarts the count.
    pub fn take_dropped(&mut self) -> u64 {
        std::mem::take(&mut self.dropped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beyond_the_budget_it_says_so_once_and_counts() {
        let now = Instant::now();
        let mut meter = LogMeter::new(8, now);
        assert_eq!(
            [5, 5, 1, 1].map(|bytes| meter.pay(bytes)),
            [MeterResult::Yes, MeterResult::NoMore, MeterResult::No, MeterResult::No],
            "a short line has no place after a long one that had none"
        );
        meter.drop_lines(7);
        assert!(!meter.is_due(now) && meter.is_due(now + RENEWED_AFTER));
        assert_eq!(meter.renew(2, now + RENEWED_AFTER), 10);
        assert_eq!(
            [1, 1, 1].map(|bytes| meter.pay(bytes)),
            [MeterResult::Yes, MeterResult::Yes, MeterResult::NoMore]
        );
    }
}
