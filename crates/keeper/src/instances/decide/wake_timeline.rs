//! The timeline of one wake: the duration of each stage, and the part that a waiter has waited for.
//! Pure.
//!
//! Not here: when a stage begins (`instances`, `start`).

use std::time::{Duration, Instant};

use nagaya_records::instance::{Tier, WakeReport, WakeStage};

/// Maximum number of stages of one wake: a failed restore is followed by a start.
const MARKS_MAX: usize = 2 * WakeStage::ALL.len();

#[derive(Debug, Clone)]
pub struct WakeTimeline {
    from: Tier,
    /// Each begins here and lasts until the next.
    marks: Vec<(WakeStage, Instant)>,
}

impl WakeTimeline {
    pub fn new(from: Tier, now: Instant) -> Self {
        Self { from, marks: vec![(WakeStage::Decide, now)] }
    }

    /// Returns the tier it woke from. Whether there is an image may have become known only on the
    /// way.
    pub fn from(&self) -> Tier {
        let has = |wanted| self.marks.iter().any(|(stage, _)| *stage == wanted);
        let is_restored = has(WakeStage::Restore) && !has(WakeStage::Boot);
        if self.from == Tier::Cold && is_restored { Tier::Image } else { self.from }
    }

    pub fn mark(&mut self, stage: WakeStage, now: Instant) {
        let is_same = self.marks.last().is_some_and(|(last, _)| *last == stage);
        if !is_same && self.marks.len() < MARKS_MAX {
            self.marks.push((stage, now));
        }
    }

    /// Returns the duration of each stage until now, in their order.
    pub fn stages(&self, now: Instant) -> Vec<(WakeStage, Duration)> {
        self.since(self.marks[0].1, now)
    }

    /// Returns the wake that the first waiter has waited for.
    pub fn wake_whole(&self, now: Instant) -> WakeReport {
        self.wake(self.marks[0].1, now)
    }

    /// Returns the wake that a waiter since `joined` has waited for.
    pub fn wake(&self, joined: Instant, now: Instant) -> WakeReport {
        let micros = |took: Duration| u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let stages = self.since(joined, now).into_iter().map(|(stage, took)| (stage, micros(took)));
        WakeReport { from: self.from(), stages: stages.collect(), predicted_us: None }
    }

    fn since(&self, joined: Instant, now: Instant) -> Vec<(WakeStage, Duration)> {
        let mut took: Vec<(WakeStage, Duration)> = Vec::new();
        for (index, (stage, began)) in self.marks.iter().enumerate() {
            let ended = self.marks.get(index + 1).map_or(now, |(_, next)| *next);
            let part = ended.saturating_duration_since(joined.max(*began));
            if part.is_zero() {
                continue;
            }
            match took.iter_mut().find(|(of, _)| of == stage) {
                // Reached for the second time, after a failed restore.
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
            (&[WakeStage::Sandbox, WakeStage::Restore][..], Tier::Image),
            (&[WakeStage::Sandbox, WakeStage::Boot], Tier::Cold),
            (&[WakeStage::Sandbox, WakeStage::Restore, WakeStage::Sandbox, WakeStage::Boot], Tier::Cold),
        ] {
            let mut timeline = WakeTimeline::new(Tier::Cold, now);
            stages.iter().for_each(|stage| timeline.mark(*stage, now + Duration::from_millis(1)));
            assert_eq!((timeline.from(), timeline.wake_whole(now).from), (from, from), "{stages:?}");
        }
    }

    #[test]
    fn stages_add_up_to_the_wait_of_each() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut timeline = WakeTimeline::new(Tier::Image, start);
        for (stage, ms) in [
            (WakeStage::Queue, 1),
            (WakeStage::Sandbox, 5),
            (WakeStage::Restore, 7),
            (WakeStage::Sandbox, 50),
            (WakeStage::Boot, 52),
            (WakeStage::Ready, 90),
        ] {
            timeline.mark(stage, at(ms));
        }
        let wake = timeline.wake(start, at(100));
        let expected = [
            (WakeStage::Decide, 1000),
            (WakeStage::Queue, 4000),
            (WakeStage::Sandbox, 4000),
            (WakeStage::Restore, 43_000),
            (WakeStage::Boot, 38_000),
            (WakeStage::Ready, 10_000),
        ];
        assert_eq!((wake.from, &wake.stages[..]), (Tier::Image, &expected[..]));
        let late = timeline.wake(at(60), at(100));
        assert_eq!(late.stages, [(WakeStage::Boot, 30_000), (WakeStage::Ready, 10_000)]);
        assert_eq!(timeline.wake(at(100), at(100)).stages, []);
    }
}
