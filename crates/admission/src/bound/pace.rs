//! Detects whether service times have changed, and records how many requests ran at once.
//!
//! Not here: the reaction to a change (`bound`).

use crate::Moment;

/// Level changes that are kept. An older moment counts as the oldest one known.
const LEVELS: usize = 8;
/// Weight of the newest request in the current pace, and in the earlier pace.
const QUICK_WEIGHT: f64 = 0.25;
const SLOW_WEIGHT: f64 = 0.01;
/// Requests before a change is believed, and the least change (as a logarithm) and certainty.
const PACE_COUNT: u32 = 20;
const CHANGE: f64 = 0.4;
const CHANGE_ERRORS: f64 = 4.0;

/// Tracks whether service takes as long as before, by the logarithm of the stretch.
#[derive(Debug, Clone, Default)]
pub struct StretchPace {
    count: u32,
    quick: f64,
    slow: f64,
    variance: f64,
}

impl StretchPace {
    /// Adds one request. Returns whether those before it had another pace; the pace is then learned
    /// again.
    pub fn has_changed(&mut self, stretch: f64, part: f64) -> bool {
        let pace = stretch.max(1e-9).ln();
        self.count = self.count.saturating_add(1);
        let weight = (1.0 / f64::from(self.count)).max(SLOW_WEIGHT * part);
        let off = pace - self.slow;
        self.quick += (pace - self.quick) * weight.max(QUICK_WEIGHT * part);
        if self.count > PACE_COUNT {
            let error = (self.variance * QUICK_WEIGHT / (2.0 - QUICK_WEIGHT)).sqrt();
            let shift = (self.quick - self.slow).abs();
            if shift > CHANGE && shift > CHANGE_ERRORS * error {
                *self =
                    Self { count: PACE_COUNT, quick: self.quick, slow: self.quick, variance: self.variance };
                return true;
            }
        }
        // One extreme outlier shows a change, not the spread.
        let off = off.clamp(-3.0, 3.0);
        self.variance += (off * off * (1.0 - weight) - self.variance) * weight;
        self.slow += (pace - self.slow) * weight;
        false
    }
}

/// How many requests ran at once recently.
#[derive(Debug, Clone)]
pub struct RunLevels {
    /// Ring of the time of each change, the level from then on, and its logarithm.
    changes: [(Moment, u32, f64); LEVELS],
    newest: usize,
}

impl RunLevels {
    pub fn new(level: u32) -> Self {
        Self { changes: [(Moment(0), level, f64::from(level).ln()); LEVELS], newest: 0 }
    }

    pub fn now(&self) -> u32 {
        self.changes[self.newest].1
    }

    pub fn enter(&mut self, now: Moment, level: u32) {
        if level != self.now() {
            self.newest = (self.newest + 1) % LEVELS;
            self.changes[self.newest] = (now, level, f64::from(level.max(1)).ln());
        }
    }

    pub fn logarithm(&self) -> f64 {
        self.changes[self.newest].2
    }

    /// Returns the mean logarithm of the level between two moments.
    pub fn mean(&self, from: Moment, to: Moment) -> f64 {
        let mut end = to;
        let mut area = 0.0;
        for back in 0..LEVELS {
            let (begin, _, level) = self.changes[(self.newest + LEVELS - back) % LEVELS];
            let is_last = begin <= from || back + 1 == LEVELS;
            let begin = if is_last { from } else { begin };
            area += level * (end.0.saturating_sub(begin.0)) as f64;
            end = begin;
            if is_last {
                break;
            }
        }
        let length = to.0.saturating_sub(from.0);
        if length == 0 { self.changes[self.newest].2 } else { area / length as f64 }
    }
}
