//! Where the time of one wake went, stage by stage, and what of it one who waits has waited through. Pure.
//!
//! Not here: when a stage begins (`instances`, `start`).

use std::time::{Duration, Instant};

use nagaya_cmdb::instance::{Stage, Tier, Wake};

/// Stages of one wake at most: a restoration that fails is followed by a start.
const MARKS_MAX: usize = 2 * Stage::ALL.len();

#[derive(Debug, Clone)]
pub struct Ledger {
    from: Tier,
    /// Each begins here and lasts until the next.
    marks: Vec<(Stage, Instant)>,
}

impl Ledger {
    pub fn new(from: Tier, now: Instant) -> Self {
        Self { from, marks: vec![(Stage::Decide, now)] }
    }

    /// Where it rested. Whether there is an image may have become known only on the way.
    pub fn from(&self) -> Tier {
        let has = |wanted| self.marks.iter().any(|(stage, _)| *stage == wanted);
        let is_restored = has(Stage::Restore) && !has(Stage::Boot);
        if self.from == Tier::Cold && is_restored { Tier::Image } else { self.from }
    }

    pub fn mark(&mut self, stage: Stage, now: Instant) {
        let is_same = self.marks.last().is_some_and(|(last, _)| *last == stage);
        if !is_same && self.marks.len() < MARKS_MAX {
            self.marks.push((stage, now));
        }
    }

    /// How long each stage took until now, in their order.
    pub fn stages(&self, now: Instant) -> Vec<(Stage, Duration)> {
        self.since(self.marks[0].1, now)
    }

    /// What the first who asked has waited for.
    pub fn wake_whole(&self, now: Instant) -> Wake {
        self.wake(self.marks[0].1, now)
    }

    /// What one who waits since `joined` has waited for.
    pub fn wake(&self, joined: Instant, now: Instant) -> Wake {
        let micros = |took: Duration| u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let stages = self.since(joined, now).into_iter().map(|(stage, took)| (stage, micros(took)));
        Wake { from: self.from(), stages: stages.collect(), predicted_us: None }
    }

    fn since(&self, joined: Instant, now: Instant) -> Vec<(Stage, Duration)> {
        let mut took: Vec<(Stage, Duration)> = Vec::new();
        for (index, (stage, began)) in self.marks.iter().enumerate() {
            let ended = self.marks.get(index + 1).map_or(now, |(_, next)| *next);
            let part = ended.saturating_duration_since(joined.max(*began));
            if part.is_zero() {
                continue;
            }
            match took.iter_mut().find(|(of, _)| of == stage) {
                // The second time, after a restoration that failed.
                Some((_, sum)) => *sum += part,
                None => took.push((*stage, part)),
            }
        }
        took.sort_unstable_by_key(|(stage, _)| *stage);
        took
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_that_was_found_on_the_way_is_where_it_rested() {
        let now = Instant::now();
        for (stages, from) in [
            (&[Stage::Sandbox, Stage::Restore][..], Tier::Image),
            (&[Stage::Sandbox, Stage::Boot], Tier::Cold),
            (&[Stage::Sandbox, Stage::Restore, Stage::Sandbox, Stage::Boot], Tier::Cold),
        ] {
            let mut ledger = Ledger::new(Tier::Cold, now);
            stages.iter().for_each(|stage| ledger.mark(*stage, now + Duration::from_millis(1)));
            assert_eq!((ledger.from(), ledger.wake_whole(now).from), (from, from), "{stages:?}");
        }
    }

    #[test]
    fn stages_add_up_to_the_wait_of_each() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut ledger = Ledger::new(Tier::Image, start);
        for (stage, ms) in [
            (Stage::Queue, 1),
            (Stage::Sandbox, 5),
            (Stage::Restore, 7),
            (Stage::Sandbox, 50),
            (Stage::Boot, 52),
            (Stage::Ready, 90),
        ] {
            ledger.mark(stage, at(ms));
        }
        let wake = ledger.wake(start, at(100));
        let expected = [
            (Stage::Decide, 1000),
            (Stage::Queue, 4000),
            (Stage::Sandbox, 4000),
            (Stage::Restore, 43_000),
            (Stage::Boot, 38_000),
            (Stage::Ready, 10_000),
        ];
        assert_eq!((wake.from, &wake.stages[..]), (Tier::Image, &expected[..]));
        let late = ledger.wake(at(60), at(100));
        assert_eq!(late.stages, [(Stage::Boot, 30_000), (Stage::Ready, 10_000)]);
        assert_eq!(ledger.wake(at(100), at(100)).stages, []);
    }
}
