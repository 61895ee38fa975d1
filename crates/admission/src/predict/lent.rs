//! What the requests are that run on lent permits: nobody has noted it, and a line behind them depends on it.
//!
//! They are taken to be of the kinds that come here, and to have begun when those did that ran beside them when they were recalled. From
//! then on the quick ones end and the slow ones stay: one that still runs long after is a slow one, and holds its permit for as
//! long as slow ones do.
//!
//! Not here: how permits are lent (`machine::lending`), what a kind of request takes (`predict::pace`).

use super::expected::Expected;
use super::outlook::PARTS;
use super::replay::Replay;
use super::{Kind, Learned};
use crate::Moment;

/// No kind that comes here can be left out for certain. As little as makes no difference beside one that is likely.
const SURVIVAL_LEAST: f64 = 1e-6;

/// When permits were last recalled.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Lent {
    recalled: Moment,
    /// How long those beside them had run then, on average.
    age: f64,
}

impl Lent {
    /// For how long such a request has run, if it is at this part (0 to 1) of them by age.
    pub(super) fn age(&self, now: Moment, expected: Expected<'_>, part: f64) -> f64 {
        let since = now.0.saturating_sub(self.recalled.0) as f64;
        since + 2.0 * part * self.age.min(expected.service() / 2.0)
    }
}

/// How many of each kind run on lent permits, as far as that can be told.
#[derive(Debug)]
pub(super) struct LentKinds([f64; PARTS]);

impl LentKinds {
    pub(super) fn of(&self, kind: usize) -> f64 {
        self.0.get(kind).copied().unwrap_or(0.0)
    }
}

impl Learned {
    /// Permits are lent no more: those in use come back one by one.
    pub(crate) fn lent_are_recalled(&mut self, now: Moment) {
        let (mut running, mut ages) = (0.0, 0.0);
        for kind in &self.kinds {
            running += f64::from(kind.running);
            ages += (u128::from(now.0) * u128::from(kind.running)).saturating_sub(kind.started) as f64;
        }
        let age = if running > 0.0 { ages / running } else { f64::INFINITY };
        self.lent = Lent { recalled: now, age };
    }

    /// Of what kinds they are who run on so many lent permits.
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

    /// The part of those of a kind that ran when permits were recalled and still run.
    fn has_survived(&self, now: Moment, kind: &Kind) -> f64 {
        let Some(expected) = self.of_kind(kind, self.any_in_line()) else { return 1.0 };
        let at = |now| expected.survival(self.lent.age(now, expected, 0.5));
        at(now) / at(self.lent.recalled).max(SURVIVAL_LEAST)
    }

    /// Puts them on their permits, some further on than others.
    pub(super) fn play_lent(&self, now: Moment, lent: u32, replay: &mut Replay) -> Option<()> {
        let kinds = self.lent_kinds(now, lent);
        let (mut due, mut left) = (0.0, lent);
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
