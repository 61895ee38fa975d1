//! When an idle instance goes down, and how deep: by time, by what is expected next, and under memory pressure. Pure.
//!
//! Not here: what else an instance does (`lifecycle`), how a step is taken (`rest`).

use std::time::{Duration, Instant};

use nagaya_cmdb::instance::Tier;
use nagaya_cmdb::record::{After, App};

use crate::options::IdleOptions;

/// The tiers an idle instance goes down to, in this order. The last two stand for one step: the first where there is an
/// image, the second where there is none.
const STEPS: [Tier; 5] = [Tier::Quiet, Tier::Frozen, Tier::Reclaimed, Tier::Image, Tier::Cold];

/// Gaps between requests that are remembered.
const GAPS_MAX: usize = 8;

/// So many gaps make a habit, if the longest of them is no longer than twice the shortest.
const GAPS_MIN: usize = 4;

/// A step is taken in a quarter of its time, if the next request is expected only after this many times as long.
const FAR: u32 = 8;
const EARLY: u32 = 4;

/// Memory pressure takes down only what was idle for this long: the next request may follow at once.
pub const PRESSED_AFTER: Duration = Duration::from_secs(1);

/// What a site's record and the node's settings say of one instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    /// How long after its last request each of `STEPS` is taken. None: never.
    pub after: [Option<Duration>; 5],
    /// It always has a process.
    pub keep: bool,
    /// Images can be taken and restored here.
    pub images: bool,
}

impl Terms {
    pub fn new(app: &App, node: &IdleOptions, images: bool) -> Self {
        let own = app.idle;
        let of = |own: Option<After>, node_ms: u64| match own {
            Some(after) => after.seconds().map(|seconds| Duration::from_secs(seconds.into())),
            None => Some(Duration::from_millis(node_ms)),
        };
        let after = [
            of(own.quiet, node.quiet_ms),
            of(own.frozen, node.frozen_ms),
            of(own.reclaimed, node.reclaimed_ms),
            of(own.image, node.image_ms),
            of(own.cold, node.cold_ms),
        ];
        Self { after, keep: app.min == Some(1), images }
    }

    /// The next step of one that is idle since then and must go deeper than `below`, and when it is due. Of several that
    /// are due, the deepest.
    pub fn next(&self, idle: Idle, below: Tier, has_image: bool, habit: &Habit) -> Option<(Tier, Instant)> {
        let (since, now) = (idle.since, idle.now);
        let mut next: Option<(Tier, Instant)> = None;
        for (tier, after) in STEPS.into_iter().zip(self.after) {
            let Some(after) = after.filter(|_| tier < below && self.may_reach(tier, has_image)) else {
                continue;
            };
            let due = since + habit.adjusted(tier, after);
            let is_better = match next {
                None => true,
                // What is due already, or at the same time, is passed over for what is deeper.
                Some((_, before)) => due <= before.max(now),
            };
            if is_better {
                next = Some((tier, due));
            }
        }
        next
    }

    /// The step that gives memory back soonest: what rests already goes on from there.
    pub fn pressed(&self, below: Tier, has_image: bool) -> Option<Tier> {
        [Tier::Reclaimed, Tier::Image, Tier::Cold]
            .into_iter()
            .find(|tier| *tier < below && self.may_reach(*tier, has_image))
    }

    /// Whether an instance may be here at all.
    pub fn may_reach(&self, tier: Tier, has_image: bool) -> bool {
        match tier {
            Tier::Image => !self.keep && has_image,
            Tier::Cold => !self.keep && !has_image,
            Tier::Reclaimed | Tier::Frozen | Tier::Quiet | Tier::Running => true,
        }
    }
}

/// Since when nobody needs it.
#[derive(Debug, Clone, Copy)]
pub struct Idle {
    pub since: Instant,
    pub now: Instant,
}

/// How long it was idle the last times, and so when the next request may come.
#[derive(Debug, Clone, Default)]
pub struct Habit {
    gaps: [Duration; GAPS_MAX],
    /// How many there ever were.
    seen: usize,
}

impl Habit {
    pub fn saw(&mut self, gap: Duration) {
        self.gaps[self.seen % GAPS_MAX] = gap;
        self.seen += 1;
    }

    /// How long after the last request the next one comes, if that has been much the same of late.
    pub fn expected(&self) -> Option<Duration> {
        let mut gaps = self.gaps;
        let gaps = &mut gaps[..self.seen.min(GAPS_MAX)];
        gaps.sort_unstable();
        let (shortest, longest) = (*gaps.first()?, *gaps.last()?);
        (gaps.len() >= GAPS_MIN && longest <= shortest * 2).then(|| gaps[gaps.len() / 2])
    }

    /// A step is put off while a request is expected soon, and taken early if none is for long.
    fn adjusted(&self, tier: Tier, after: Duration) -> Duration {
        match self.expected() {
            Some(expected) if expected >= after && expected - after < patience(tier) => {
                // As late again as it was expected before it is given up.
                expected + patience(tier) / 2
            }
            Some(expected) if expected / FAR > after => after / EARLY,
            _ => after,
        }
    }
}

/// How much longer an instance may stay where it is, rather than come back from this tier in a moment: some hundred times
/// what coming back takes.
fn patience(tier: Tier) -> Duration {
    match tier {
        Tier::Running | Tier::Quiet => Duration::ZERO,
        Tier::Frozen => Duration::from_millis(100),
        Tier::Reclaimed => Duration::from_secs(5),
        Tier::Image => Duration::from_secs(15),
        Tier::Cold => Duration::from_secs(120),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: fn(u64) -> Duration = Duration::from_secs;

    fn terms() -> Terms {
        let after = [Some(S(2)), Some(S(10)), Some(S(120)), Some(S(900)), Some(S(3600))];
        Terms { after, keep: false, images: true }
    }

    fn steps(terms: &Terms, has_image: bool, habit: &Habit) -> Vec<(Tier, u64)> {
        let since = Instant::now();
        let (mut below, mut now, mut steps) = (Tier::Running, since, Vec::new());
        while let Some((tier, due)) = terms.next(Idle { since, now }, below, has_image, habit) {
            (below, now) = (tier, due.max(now));
            steps.push((tier, (now - since).as_secs()));
        }
        steps
    }

    #[test]
    fn it_goes_down_step_by_step_at_its_times() {
        let habit = Habit::default();
        let down = [(Tier::Quiet, 2), (Tier::Frozen, 10), (Tier::Reclaimed, 120)];
        let expected = [&down[..], &[(Tier::Image, 900)]].concat();
        assert_eq!(steps(&terms(), true, &habit), expected);
        let expected = [&down[..], &[(Tier::Cold, 3600)]].concat();
        assert_eq!(steps(&terms(), false, &habit), expected);
    }

    #[test]
    fn what_is_kept_keeps_its_process() {
        let kept = Terms { keep: true, ..terms() };
        assert_eq!(steps(&kept, true, &Habit::default()).last(), Some(&(Tier::Reclaimed, 120)));
        assert_eq!(kept.pressed(Tier::Reclaimed, true), None);
    }

    #[test]
    fn a_step_that_is_not_before_the_next_is_left_out() {
        let mut terms = terms();
        (terms.after[0], terms.after[2]) = (Some(S(10)), None);
        assert_eq!(steps(&terms, true, &Habit::default()), [(Tier::Frozen, 10), (Tier::Image, 900)]);
    }

    #[test]
    fn late_is_deep_at_once() {
        let since = Instant::now();
        let idle = Idle { since, now: since + S(1000) };
        let next = terms().next(idle, Tier::Running, true, &Habit::default());
        assert_eq!(next.map(|(tier, _)| tier), Some(Tier::Image));
    }

    #[test]
    fn a_habit_needs_some_gaps_alike() {
        let mut habit = Habit::default();
        for _ in 0..3 {
            habit.saw(S(60));
        }
        assert_eq!(habit.expected(), None);
        habit.saw(S(70));
        assert_eq!(habit.expected(), Some(S(60)));
        habit.saw(S(300));
        assert_eq!(habit.expected(), None, "not alike any more");
        for _ in 0..GAPS_MAX {
            habit.saw(S(300));
        }
        assert_eq!(habit.expected(), Some(S(300)), "the old ones are forgotten");
    }

    #[test]
    fn a_request_that_is_expected_soon_is_waited_for() {
        let mut habit = Habit::default();
        for _ in 0..GAPS_MIN {
            habit.saw(S(905));
        }
        let image = steps(&terms(), true, &habit).last().copied();
        assert_eq!(image, Some((Tier::Image, 912)), "7.5 s after it was expected");
    }

    #[test]
    fn a_request_that_is_expected_late_lets_it_go_early() {
        let mut habit = Habit::default();
        for _ in 0..GAPS_MIN {
            habit.saw(S(86_400));
        }
        let early = [(Tier::Quiet, 0), (Tier::Frozen, 2), (Tier::Reclaimed, 30), (Tier::Image, 225)];
        assert_eq!(steps(&terms(), true, &habit), early);
    }

    #[test]
    fn pressure_takes_memory_first_and_then_the_process() {
        assert_eq!(terms().pressed(Tier::Running, true), Some(Tier::Reclaimed));
        assert_eq!(terms().pressed(Tier::Reclaimed, true), Some(Tier::Image));
        assert_eq!(terms().pressed(Tier::Reclaimed, false), Some(Tier::Cold));
    }

    #[test]
    fn a_record_goes_before_the_nodes_settings() {
        let json = r#"{"command":["x"],"directory":"a","idle":{"frozen":3,"image":"never"},"min":1}"#;
        let app: App = serde_json::from_str(json).unwrap();
        let terms = Terms::new(&app, &IdleOptions::default(), true);
        let node = IdleOptions::default();
        let expected = [Some(node.quiet_ms), Some(3000), Some(node.reclaimed_ms), None, Some(node.cold_ms)];
        assert_eq!(terms.after, expected.map(|ms| ms.map(Duration::from_millis)));
        assert!(terms.keep);
    }
}
