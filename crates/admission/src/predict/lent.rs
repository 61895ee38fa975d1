//! Estimates which requests run on lent permits. They are not recorded, and a queue behind them
//! depends on them.
//!
//! They are assumed to be of the kinds that come here. They are assumed to have begun with the
//! requests that ran when permits were recalled. After that, the quick ones end and the slow ones
//! stay. So a request that still runs long after holds its permit as long as slow ones do.
//!
//! Not here: how permits are lent (`machine::lending`), service times of a kind (`predict::pace`).

use super::expected::ExpectedService;
use super::outlook::PARTS;
use super::replay::PermitReplay;
use super::{ClassStats, LaneStats};
use crate::Moment;

/// Lowest survival of a kind: no kind that comes here can be excluded. It is too small to matter
/// against a likely kind.
const SURVIVAL_LEAST: f64 = 1e-6;

/// When permits were last recalled.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct LentAge {
    recalled: Moment,
    /// Average age of the requests that ran with own permits at that moment.
    age: f64,
}

impl LentAge {
    /// Returns the age of such a request at this part (0 to 1) of them by age.
    pub(super) fn age(&self, now: Moment, expected: ExpectedService<'_>, part: f64) -> f64 {
        let since = now.0.saturating_sub(self.recalled.0) as f64;
        since + 2.0 * part * self.age.min(expected.service() / 2.0)
    }
}

/// Estimated number of requests of each kind on lent permits.
#[derive(Debug)]
pub(super) struct LentKinds([f64; PARTS]);

impl LentKinds {
    pub(super) fn of(&self, kind: usize) -> f64 {
        self.0.get(kind).copied().unwrap_or(0.0)
    }
}

impl LaneStats {
    /// Notes a recall: no more permits are lent, and those in use come back one by one.
    pub(crate) fn lent_are_recalled(&mut self, now: Moment) {
        let mut running = 0.0;
        let mut ages = 0.0;
        for kind in &self.kinds {
            running += f64::from(kind.running);
            ages += (u128::from(now.0) * u128::from(kind.running)).saturating_sub(kind.started) as f64;
        }
        let age = if running > 0.0 { ages / running } else { f64::INFINITY };
        self.lent = LentAge { recalled: now, age };
    }

    /// Returns the kinds of the requests on this many lent permits.
    pub(super) fn lent_kinds(&self, now: Moment, lent: u32) -> LentKinds {
        let mut found = [0.0; PARTS];
        if lent > 0 {
            for (found, kind) in found.iter_mut().zip(&self.kinds) {
                *found = f64::from(kind.share) * self.has_survived(now, kind).max(SURVIVAL_LEAST);
            }
            let all: f64 = found.iter().sum();
            found.iter_mut().for_each(|found| *found *= f64::from(lent) / all.max(f64::MIN_POSITIVE));
        }
        LentKinds(found)
    }

    /// Returns the part of a kind that ran when permits were recalled and still runs.
    fn has_survived(&self, now: Moment, kind: &ClassStats) -> f64 {
        let Some(expected) = self.of_kind(kind, self.any_in_line()) else { return 1.0 };
        let at = |now| expected.survival(self.lent.age(now, expected, 0.5));
        at(now) / at(self.lent.recalled).max(SURVIVAL_LEAST)
    }

    /// Puts the requests on their permits, at different ages.
    pub(super) fn play_lent(&self, now: Moment, lent: u32, replay: &mut PermitReplay) -> Option<()> {
        let kinds = self.lent_kinds(now, lent);
        let mut due = 0.0;
        let mut left = lent;
        for (at, kind) in self.kinds.iter().enumerate() {
            due += kinds.of(at);
            // Rounded, so that none is lost.
            let count = (due.round().max(0.0) as u32).saturating_sub(lent - left).min(left);
            if count == 0 {
                continue;
            }
            left -= count;
            let expected = self.of_kind(kind, self.any_in_line())?;
            for one in 0..count {
                let part = (f64::from(one) + 0.5) / f64::from(count);
                replay.runs(expected.rest(self.lent.age(now, expected, part)));
            }
        }
        Some(())
    }
}
