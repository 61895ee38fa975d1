//! How much may be written in a while, and how many lines were dropped because they were more.
//!
//! Not here: what the lines are (`lines`), where they go (`journal`, `follow`).

use std::time::{Duration, Instant};

/// After this, one that is kept may write as much again.
pub const RENEWED_AFTER: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub struct Meter {
    left: usize,
    began: Instant,
    is_spent: bool,
    dropped: u64,
}

/// Whether a line is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Paid {
    Yes,
    /// It is the first that is not.
    NoMore,
    No,
}

impl Meter {
    pub fn new(bytes_max: usize, now: Instant) -> Self {
        Self { left: bytes_max, began: now, is_spent: false, dropped: 0 }
    }

    pub fn is_due(&self, now: Instant) -> bool {
        now.duration_since(self.began) >= RENEWED_AFTER
    }

    /// From now on as much may be written again. Returns how many lines were dropped before.
    pub fn renew(&mut self, bytes_max: usize, now: Instant) -> u64 {
        std::mem::replace(self, Self::new(bytes_max, now)).dropped
    }

    /// After the first line that is dropped all are, so that what is there has no holes.
    pub fn pay(&mut self, bytes: usize) -> Paid {
        if !self.is_spent && bytes <= self.left {
            self.left -= bytes;
            return Paid::Yes;
        }
        self.dropped += 1;
        if std::mem::replace(&mut self.is_spent, true) { Paid::No } else { Paid::NoMore }
    }

    pub fn is_spent(&self) -> bool {
        self.is_spent
    }

    /// These lines were not even asked for.
    pub fn drop_lines(&mut self, lines: u64) {
        self.dropped += lines;
    }

    /// How many lines were dropped; they are counted anew from now on.
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
        let mut meter = Meter::new(8, now);
        assert_eq!(
            [5, 5, 1, 1].map(|bytes| meter.pay(bytes)),
            [Paid::Yes, Paid::NoMore, Paid::No, Paid::No],
            "a short line has no place after a long one that had none"
        );
        meter.drop_lines(7);
        assert!(!meter.is_due(now) && meter.is_due(now + RENEWED_AFTER));
        assert_eq!(meter.renew(2, now + RENEWED_AFTER), 10);
        assert_eq!([1, 1, 1].map(|bytes| meter.pay(bytes)), [Paid::Yes, Paid::Yes, Paid::NoMore]);
    }
}
