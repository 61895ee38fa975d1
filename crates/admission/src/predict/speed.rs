//! How much slower or faster everything in a lane has become at once: a neighbour on the machine, a processor that is taken away or throttled,
//! a bound that lets more run beside each other.
//!
//! Kinds that come often follow such a step on their own, and quickly. What they have in common is kept here, and the time of a kind that has
//! not been seen since is taken to have changed as much. It is told by where paces have moved, not by single requests: those move only where
//! chance does not explain it. One kind that moves alone says nothing about others.
//!
//! Where what is common goes up and down again, it is not the machine but who runs beside whom, which the time of a kind that comes in
//! bursts has in it already. The more of that there was lately, the less is made of what is common.
//!
//! Not here: what one kind takes (`predict::pace`), what a line does to times of quiet hours (`predict::expected`).

use super::{CLASSES, Learned, Slot};
use crate::Moment;

/// Times are compared by their logarithms. Moves of less than this, about a fifth, are left to each kind alone.
const MOVE_LEAST: f32 = 0.2;
/// Time constant with which moves and requests of a kind fade: those of several kinds count together if they come within about this.
const TOGETHER_US: f32 = 20e6;
/// Requests in line after which moves of a kind are no longer those of getting to know it.
const SETTLED: u32 = 48;
/// A kind has a say if it had so many lately, and however many it had, no more than
const SAY_LEAST: f32 = 3.0;
/// so many count.
const SAY_MOST: f32 = 12.0;
/// Kinds that must agree.
const KINDS_LEAST: usize = 2;
/// Time constant of what is remembered of ups and downs.
const UPS_AND_DOWNS_US: f64 = 60e6;
/// A kind's time is made no more than so many times as long, nor as short.
const SCALE_MOST: f64 = 8.0;

/// What all kinds have in common.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Speed {
    /// Logarithm of how many times as long requests take as when the lane was made.
    slowness: f64,
    /// How far that has moved lately from beginning to end, and back and forth.
    net: f64,
    way: f64,
    last: Moment,
}

/// How one kind goes along.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Follower {
    /// What of the common slowness is in its pace.
    slowness: f64,
    /// How far its pace has moved lately, beyond that.
    moved: f32,
    /// Requests lately.
    say: f32,
    /// Requests ever, until it is settled.
    count: u32,
    last: Moment,
}

impl Speed {
    /// How many times as long a kind takes now as its pace says.
    pub(super) fn scale(&self, follower: &Follower) -> f64 {
        let since = self.slowness - follower.slowness;
        // Nearly always.
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

impl Follower {
    /// What is common is in its pace now.
    pub(super) fn catches_up(&mut self, speed: &Speed) {
        self.slowness = speed.slowness;
    }

    /// Its pace has moved with one more request.
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
        // Nearly always no time has passed to speak of, and this is done for each request.
        let keep = if passed < 1e-3 { 1.0 - passed } else { (-passed).exp() };
        self.moved *= keep;
        self.say *= keep;
        self.last = now;
    }

    /// Of a move that all have in common, this part is in its pace already.
    fn absorbs(&mut self, common: f32) {
        let part = if common > 0.0 { self.moved.clamp(0.0, common) } else { self.moved.clamp(common, 0.0) };
        self.slowness += f64::from(part);
        self.moved -= part;
    }
}

impl Learned {
    /// The pace of a kind in line has moved by this, in logarithms. True: and with it all others.
    pub(super) fn has_moved(&mut self, now: Moment, slot: Slot, by: f32) -> bool {
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

    /// How far more than half of those who have a say have moved in this direction at least.
    fn common_move(&mut self, now: Moment, sign: f32) -> f32 {
        let mut moves = [(0.0f32, 0.0f32); CLASSES + 1];
        let (mut count, mut all) = (0, 0.0);
        for kind in &mut self.kinds {
            kind.follower.fade(now);
            let Follower { moved, say, .. } = kind.follower;
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
    use super::super::Times;
    use super::*;
    use crate::Class;

    const MS: f64 = 1_000.0;

    /// Feeds these kinds for a second, one after the other, each a millisecond apart, each a tenth more or less than said.
    fn feed(learned: &mut Learned, second: u64, kinds: &[(u32, f64)]) {
        for step in 0..1_000u64 {
            let now = Moment((second * 1_000 + step) * 1_000);
            let (class, mean) = kinds[step as usize % kinds.len()];
            let slot = learned.slot(now, Class(class));
            let part = 0.9 + (step / kinds.len() as u64 % 3) as f64 / 10.0;
            learned.learn(now, slot, mean * part * MS, Times::Queued);
        }
    }

    /// What a kind is expected to take, in milliseconds.
    fn expected(learned: &mut Learned, second: u64, class: u32) -> f64 {
        let slot = learned.slot(Moment(second * 1_000_000), Class(class));
        learned.expected(slot).expect("something is known") / MS
    }

    /// Reads, writes, and reports, the last of which have been there, and are there no more.
    fn with_reports() -> Learned {
        let mut learned = Learned::default();
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
        let mut learned = Learned::default();
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
    fn what_goes_up_and_down_again_and_again_is_not_followed() {
        let mut learned = with_reports();
        for second in 3..20 {
            let factor = if second % 2 == 0 { 4.0 } else { 1.0 };
            feed(&mut learned, second, &[(1, 5.0 * factor), (2, 10.0 * factor)]);
            let reports = expected(&mut learned, second + 1, 3);
            assert!(second < 6 || (400.0..700.0).contains(&reports), "{reports}");
        }
    }

    #[test]
    fn a_time_is_scaled_within_bounds_and_an_unknown_one_stays_unknown() {
        let mut learned = with_reports();
        feed(&mut learned, 3, &[(1, 500.0), (2, 1_000.0)]);
        is_near(expected(&mut learned, 4, 3), 500.0 * SCALE_MOST);
        let new = learned.slot(Moment(4_000_000), Class(7));
        learned.waits(new);
        assert!(!learned.is_known());
    }
}
