//! Detects that everything in a lane has become slower or faster at once. Causes are a neighbour on
//! the machine, a CPU that is removed or throttled, or a higher bound.
//!
//! Frequent kinds follow such a step on their own, and quickly. Their common factor is kept here. A
//! kind that has not been seen since is assumed to have changed as much. The factor is derived from
//! changes of paces and not from single requests. Paces change only where chance does not explain a
//! difference. One kind that changes alone says nothing about others.
//!
//! If the common factor goes up and down again, the cause is not the machine but the mix of
//! requests. The time of a kind that comes in bursts includes that already. So the more it varied
//! recently, the less the common factor counts.
//!
//! Not here: the service time of one kind (`predict::pace`), the effect of a queue on times of
//! quiet hours (`predict::expected`).

use super::{CLASSES, ClassSlot, LaneStats};
use crate::Moment;

/// Least logarithm of a change, about a fifth. Each kind follows smaller changes alone.
const MOVE_LEAST: f32 = 0.2;
/// Time constant with which changes and requests of a kind fade. Changes of several kinds count
/// together if they come within about this.
const TOGETHER_US: f32 = 20e6;
/// Requests in the queue after which changes of a kind are no longer those of first learning it.
const SETTLED: u32 = 48;
/// Least number of recent requests with which a kind counts.
const SAY_LEAST: f32 = 3.0;
/// Most recent requests of a kind that count.
const SAY_MOST: f32 = 12.0;
/// Kinds that must agree.
const KINDS_LEAST: usize = 2;
/// Time constant of the memory of ups and downs.
const UPS_AND_DOWNS_US: f64 = 60e6;
/// Largest factor, up or down, on the time of a kind.
const SCALE_MOST: f64 = 8.0;

/// The common change of all kinds.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct CommonDrift {
    /// Logarithm of how many times as long requests take as when the lane was made.
    slowness: f64,
    /// Its recent net change, and its recent total change back and forth.
    net: f64,
    way: f64,
    last: Moment,
}

/// How one kind follows the common change.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct ClassDrift {
    /// The common slowness that its pace already includes.
    slowness: f64,
    /// Recent change of its pace beyond that.
    moved: f32,
    /// Recent requests.
    say: f32,
    /// Requests ever, until it is settled.
    count: u32,
    last: Moment,
}

impl CommonDrift {
    /// Returns the factor from a kind's pace to its present time.
    pub(super) fn scale(&self, follower: &ClassDrift) -> f64 {
        let since = self.slowness - follower.slowness;
        // The normal case.
        if since == 0.0 {
            return 1.0;
        }
        let steady = if self.way > 0.0 { self.net / self.way } else { 1.0 };
        (since * steady * steady).exp().clamp(1.0 / SCALE_MOST, SCALE_MOST)
    }

    fn moves(&mut self, now: Moment, by: f64) {
        let keep = (-(now.0.saturating_sub(self.last.0) as f64) / UPS_AND_DOWNS_US).exp();
        self.slowness += by;
        self.net = self.net * keep + by;
        self.way = self.way * keep + by.abs();
        self.last = now;
    }
}

impl ClassDrift {
    /// Notes that its pace now includes the common change.
    pub(super) fn catches_up(&mut self, speed: &CommonDrift) {
        self.slowness = speed.slowness;
    }

    /// Notes that its pace has changed with one more request.
    fn moves(&mut self, now: Moment, by: f32) {
        self.fade(now);
        self.say = (self.say + 1.0).min(SAY_MOST);
        if self.is_settled() {
            self.moved += by;
        } else {
            self.count += 1;
        }
    }

    fn is_settled(&self) -> bool {
        self.count >= SETTLED
    }

    fn fade(&mut self, now: Moment) {
        let passed = now.0.saturating_sub(self.last.0) as f32 / TOGETHER_US;
        // Normally almost no time has passed, and this runs for each request.
        let keep = if passed < 1e-3 { 1.0 - passed } else { (-passed).exp() };
        self.moved *= keep;
        self.say *= keep;
        self.last = now;
    }

    /// Removes the part of a common change that its pace already includes.
    fn absorbs(&mut self, common: f32) {
        let part = if common > 0.0 { self.moved.clamp(0.0, common) } else { self.moved.clamp(common, 0.0) };
        self.slowness += f64::from(part);
        self.moved -= part;
    }
}

impl LaneStats {
    /// Notes that the pace of a queued kind has changed by this logarithm. Returns true if all
    /// others change with it.
    pub(super) fn has_moved(&mut self, now: Moment, slot: ClassSlot, by: f32) -> bool {
        let own = &mut self.kinds[slot.0 as usize].follower;
        own.moves(now, by);
        if own.moved.abs() < MOVE_LEAST {
            return false;
        }
        let sign = own.moved.signum();
        let common = self.common_move(now, sign);
        if common < MOVE_LEAST {
            return false;
        }
        self.speed.moves(now, f64::from(common * sign));
        self.kinds.iter_mut().for_each(|kind| kind.follower.absorbs(common * sign));
        true
    }

    /// Returns the least change in this direction of more than half of the kinds that count.
    fn common_move(&mut self, now: Moment, sign: f32) -> f32 {
        let mut moves = [(0.0f32, 0.0f32); CLASSES + 1];
        let mut count = 0;
        let mut all = 0.0;
        for kind in &mut self.kinds {
            kind.follower.fade(now);
            let ClassDrift { moved, say, .. } = kind.follower;
            if kind.follower.is_settled() && say >= SAY_LEAST {
                moves[count] = (moved * sign, say);
                count += 1;
                all += say;
            }
        }
        let moves = &mut moves[..count];
        moves.sort_unstable_by(|a, b| b.0.total_cmp(&a.0));
        let mut sum = 0.0;
        let agreed = moves.iter().enumerate().find(|(at, (_, say))| {
            sum += say;
            at + 1 >= KINDS_LEAST && sum * 2.0 > all
        });
        agreed.map_or(0.0, |(_, (moved, _))| *moved)
    }
}

#[cfg(test)]
mod tests {
    use super::super::LoadPeriod;
    use super::*;
    use crate::CostClass;

    const MS: f64 = 1_000.0;

    /// Feeds these kinds for a second, one after the other, each a millisecond apart, each a tenth more or less than said.
    fn feed(learned: &mut LaneStats, second: u64, kinds: &[(u32, f64)]) {
        for step in 0..1_000u64 {
            let now = Moment((second * 1_000 + step) * 1_000);
            let (class, mean) = kinds[step as usize % kinds.len()];
            let slot = learned.slot(now, CostClass(class));
            let part = 0.9 + (step / kinds.len() as u64 % 3) as f64 / 10.0;
            learned.learn(now, slot, mean * part * MS, LoadPeriod::Queued);
        }
    }

    /// What a kind is expected to take, in milliseconds.
    fn expected(learned: &mut LaneStats, second: u64, class: u32) -> f64 {
        let slot = learned.slot(Moment(second * 1_000_000), CostClass(class));
        learned.expected(slot).expect("something is known") / MS
    }

    /// Reads, writes, and reports, the last of which have been there, and are there no more.
    fn with_reports() -> LaneStats {
        let mut learned = LaneStats::default();
        feed(&mut learned, 1, &[(1, 5.0), (2, 10.0), (3, 500.0)]);
        feed(&mut learned, 2, &[(1, 5.0), (2, 10.0)]);
        learned
    }

    /// Up to a move that is left to each kind alone.
    fn is_near(found: f64, wanted: f64) {
        assert!((found / wanted).ln().abs() < f64::from(MOVE_LEAST) * 1.2, "{found} instead of {wanted}");
    }

    #[test]
    fn a_kind_that_is_not_seen_goes_along_with_those_that_are() {
        for factor in [2.0, 0.5] {
            let mut learned = with_reports();
            feed(&mut learned, 3, &[(1, 5.0 * factor), (2, 10.0 * factor)]);
            is_near(expected(&mut learned, 4, 3), 500.0 * factor);
            is_near(expected(&mut learned, 4, 1), 5.0 * factor);
            is_near(expected(&mut learned, 4, 2), 10.0 * factor);
            // When it comes again, its own time counts, and what is common is not added a second time.
            feed(&mut learned, 4, &[(1, 5.0 * factor), (2, 10.0 * factor), (3, 500.0 * factor)]);
            is_near(expected(&mut learned, 5, 3), 500.0 * factor);
        }
    }

    #[test]
    fn one_kind_alone_says_nothing_about_others() {
        let mut learned = with_reports();
        feed(&mut learned, 3, &[(1, 20.0), (2, 10.0)]);
        is_near(expected(&mut learned, 4, 3), 500.0);
        // Nor does it if no other is seen at all.
        feed(&mut learned, 60, &[(1, 80.0)]);
        is_near(expected(&mut learned, 61, 3), 500.0);
        is_near(expected(&mut learned, 61, 2), 10.0);
        assert!(learned.speed.way == 0.0, "{:?}", learned.speed);
    }

    #[test]
    fn the_few_that_move_take_the_many_nowhere() {
        let mut learned = LaneStats::default();
        let mut kinds: Vec<(u32, f64)> = (1..=5).map(|class| (class, 10.0)).collect();
        for second in 1..=4 {
            feed(&mut learned, second, &kinds);
        }
        feed(&mut learned, 5, &[(9, 500.0)]);
        kinds[0].1 = 30.0;
        kinds[1].1 = 30.0;
        feed(&mut learned, 6, &kinds);
        is_near(expected(&mut learned, 7, 9), 500.0);
        kinds[2].1 = 30.0;
        feed(&mut learned, 7, &kinds);
        is_near(expected(&mut learned, 8, 9), 1_500.0);
    }

    #[test]
    fn speed_that_alternates_is_not_followed() {
        let mut learned = with_reports();
        for second in 3..20 {
            let factor = if second % 2 == 0 { 4.0 } else { 1.0 };
            feed(&mut learned, second, &[(1, 5.0 * factor), (2, 10.0 * factor)]);
            let reports = expected(&mut learned, second + 1, 3);
            assert!(second < 6 || (400.0..700.0).contains(&reports), "{reports}");
        }
    }

    #[test]
    fn a_time_is_scaled_within_bounds_and_unknown_stays_unknown() {
        let mut learned = with_reports();
        feed(&mut learned, 3, &[(1, 500.0), (2, 1_000.0)]);
        is_near(expected(&mut learned, 4, 3), 500.0 * SCALE_MOST);
        let new = learned.slot(Moment(4_000_000), CostClass(7));
        learned.waits(new);
        assert!(!learned.is_known());
    }
}
