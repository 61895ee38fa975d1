//! When an idle instance goes down, and how deep. It depends on time, expected requests, measured
//! costs of each tier, and memory pressure. Pure.
//!
//! The settings' times are made for one application (`TYPICAL_KIB`). Times of another are longer if
//! its visitors would wait longer for its wake. They are shorter if it holds more memory. Not here:
//! other operations (`lifecycle`), how a step is taken (`rest`), measurements (`costs`).

use std::time::{Duration, Instant};

use nagaya_records::instance::Tier;
use nagaya_records::record::{APP_LINGER_SECONDS, AfterWake, App, ImageWhen};

use crate::instances::decide::costs::{KnownCosts, MeasuredBy, assumed};
use crate::options::IdleOptions;

/// The tiers that an idle instance goes down to, in this order. The last two are one step: the
/// first with an image, the second without one.
const STEPS: [Tier; 5] = [Tier::Quiet, Tier::Frozen, Tier::Reclaimed, Tier::Image, Tier::Cold];

/// Number of gaps between requests that are kept.
const GAPS_MAX: usize = 8;

/// This many gaps make a pattern, if the longest is at most twice the shortest.
const GAPS_MIN: usize = 4;

/// A step is taken in a quarter of its time if the next request is far away. Far away means this
/// many times as long.
const FAR: u32 = 8;
const EARLY: u32 = 4;

/// Factor on the duration of a wake. For this time more an instance stays where it is, to avoid a
/// wake soon after.
const PATIENCE: u32 = 100;

/// The application that the settings' times are made for. It gives back this many KiB, and wakes in
/// the time that is assumed without a measurement.
const TYPICAL_KIB: f64 = 100.0 * 1024.0;

/// Measurements make a time at most this many times longer or shorter.
const BEND: f64 = 4.0;

/// Memory pressure affects only instances that were idle for this long: the next request may follow
/// at once.
pub const PRESSED_AFTER: Duration = Duration::from_secs(1);

/// Settings for one instance, from its site's record and the node's settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdlePolicy {
    /// Time after its last request at which each of `STEPS` is taken. `None`: never.
    pub after: [Option<Duration>; 5],
    /// Steps that the record sets: measurements do not change these.
    pub is_said: [bool; 5],
    /// It always has a process.
    pub keep: bool,
    /// Images can be taken and restored here.
    pub images: bool,
    /// Images are taken when it goes to rest.
    pub image_at_rest: bool,
    /// How long it may compute after its last request before it rests all the same.
    pub linger: Duration,
    /// A run in use may continue beside the run that replaces it.
    pub beside: bool,
}

impl IdlePolicy {
    pub fn new(app: &App, node: &IdleOptions, images: bool) -> Self {
        let own = app.idle;
        let of = |own: Option<AfterWake>, node_ms: u64| match own {
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
        let is_said = [own.quiet, own.frozen, own.reclaimed, own.image, own.cold].map(|own| own.is_some());
        let image_at_rest = app.image_when == ImageWhen::Rest;
        let linger = Duration::from_secs(app.linger_seconds.unwrap_or(APP_LINGER_SECONDS).into());
        Self { after, is_said, keep: app.min == Some(1), images, image_at_rest, linger, beside: false }
    }

    /// Returns the next step of an instance that is idle since then, and its time. The step must be
    /// deeper than `below`. If several steps are due, it returns the deepest. The same `since`
    /// gives the same result at any time, except for steps that are due.
    pub fn next(
        &self,
        idle: IdleSpan,
        below: Tier,
        has_image: bool,
        habit: &ArrivalPattern,
        known: &KnownCosts,
    ) -> Option<(Tier, Instant)> {
        let (since, now) = (idle.since, idle.now);
        let mut next: Option<(Tier, Instant)> = None;
        for ((tier, after), is_said) in STEPS.into_iter().zip(self.after).zip(self.is_said) {
            let is_step = tier < below && self.is_worth(tier, has_image, known, since);
            let Some(after) = after.filter(|_| is_step) else { continue };
            let weight = self.weight(tier, known, since);
            // The time of a step that gives back only CPU time, and no memory, is not adjusted.
            let after = if is_said || tier > Tier::Reclaimed { after } else { after.mul_f64(weight) };
            let due = since + habit.adjusted(after, (assumed(tier) * PATIENCE).mul_f64(weight));
            let is_better = match next {
                None => true,
                // A step that is due already, or at the same time, is skipped for a deeper one.
                Some((_, before)) => due <= before.max(now),
            };
            if is_better {
                next = Some((tier, due));
            }
        }
        next
    }

    /// Returns the step that gives memory back soonest. An instance at rest continues from its
    /// tier.
    pub fn pressed(&self, below: Tier, has_image: bool, known: &KnownCosts, now: Instant) -> Option<Tier> {
        [Tier::Reclaimed, Tier::Image, Tier::Cold]
            .into_iter()
            .find(|tier| *tier < below && self.is_worth(*tier, has_image, known, now))
    }

    /// Whether a step to this tier is possible and saves something.
    fn is_worth(&self, tier: Tier, has_image: bool, known: &KnownCosts, at: Instant) -> bool {
        let mut deeper = STEPS.into_iter().zip(self.after).filter(|(_, after)| after.is_some());
        let deeper = deeper.find(|(tier, _)| !tier.has_process() && self.may_reach(*tier, has_image));
        let is_useless = || known.is_swap_useless(deeper.map(|(tier, _)| tier), at);
        self.may_reach(tier, has_image) && (tier != Tier::Reclaimed || !is_useless())
    }

    /// Factor on the waiting time for this step, compared with the application that the settings'
    /// times are made for. It grows with the duration of the wake, and falls with the memory that
    /// the step gives back.
    fn weight(&self, tier: Tier, known: &KnownCosts, at: Instant) -> f64 {
        let above = self.above(tier, known, at);
        let added = |of: &dyn Fn(Tier) -> Duration| of(tier).saturating_sub(of(above)).as_secs_f64();
        let (typical, here) = (added(&assumed), added(&|tier| known.returns(tier, at).value));
        if typical == 0.0 {
            return 1.0;
        }
        let given = given(tier, above, known, at).unwrap_or(TYPICAL_KIB).max(1.0);
        (here / typical * (TYPICAL_KIB / given)).clamp(1.0 / BEND, BEND)
    }

    /// Returns the tier where it stays while it does not go to this one.
    fn above(&self, tier: Tier, known: &KnownCosts, at: Instant) -> Tier {
        let has_swap = self.after[2].is_some()
            && known.holds(Tier::Reclaimed, at).is_some()
            && known.returns(Tier::Reclaimed, at).whose != MeasuredBy::Assumed
            && !known.is_swap_useless((!tier.has_process()).then_some(tier), at);
        match tier {
            Tier::Running | Tier::Quiet => Tier::Running,
            Tier::Frozen => Tier::Quiet,
            Tier::Image | Tier::Cold if has_swap => Tier::Reclaimed,
            Tier::Reclaimed | Tier::Image | Tier::Cold => Tier::Frozen,
        }
    }

    /// Whether an instance may be at this tier at all.
    pub fn may_reach(&self, tier: Tier, has_image: bool) -> bool {
        match tier {
            Tier::Image => !self.keep && has_image,
            Tier::Cold => !self.keep && !has_image,
            Tier::Reclaimed | Tier::Frozen | Tier::Quiet | Tier::Running => true,
        }
    }
}

/// Time since when nobody uses it.
#[derive(Debug, Clone, Copy)]
pub struct IdleSpan {
    pub since: Instant,
    pub now: Instant,
}

/// Its last idle times, which predict when the next request may come.
#[derive(Debug, Clone, Default)]
pub struct ArrivalPattern {
    gaps: [Duration; GAPS_MAX],
    /// Number of gaps ever seen.
    seen: usize,
}

impl ArrivalPattern {
    pub fn saw(&mut self, gap: Duration) {
        self.gaps[self.seen % GAPS_MAX] = gap;
        self.seen += 1;
    }

    /// Returns how long after the last request the next one comes, if recent gaps were much the
    /// same.
    pub fn expected(&self) -> Option<Duration> {
        let mut gaps = self.gaps;
        let gaps = &mut gaps[..self.seen.min(GAPS_MAX)];
        gaps.sort_unstable();
        let (shortest, longest) = (*gaps.first()?, *gaps.last()?);
        (gaps.len() >= GAPS_MIN && longest <= shortest * 2).then(|| gaps[gaps.len() / 2])
    }

    /// Delays a step while a request is expected soon, and advances it if none is expected for
    /// long.
    fn adjusted(&self, after: Duration, patience: Duration) -> Duration {
        match self.expected() {
            Some(expected) if expected >= after && expected - after < patience => {
                // A request may be this much later than expected before it is no longer expected.
                expected + patience / 2
            }
            Some(expected) if expected / FAR > after => after / EARLY,
            _ => after,
        }
    }
}

/// KiB of memory that a step from one tier to the other gives back. `None` if it is not known, or
/// the step is not for memory.
fn given(tier: Tier, above: Tier, known: &KnownCosts, at: Instant) -> Option<f64> {
    if tier > Tier::Reclaimed {
        return None;
    }
    let all = match above {
        Tier::Reclaimed => known.holds(above, at)?.value,
        _ => known.holds_in_memory(at)?,
    };
    let kib = all.saturating_sub(known.holds(tier, at)?.value) / 1024;
    Some(u32::try_from(kib).map_or(f64::MAX, f64::from))
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: fn(u64) -> Duration = Duration::from_secs;

    fn terms() -> IdlePolicy {
        let after = [Some(S(2)), Some(S(10)), Some(S(120)), Some(S(900)), Some(S(3600))];
        IdlePolicy {
            after,
            is_said: [false; 5],
            keep: false,
            images: true,
            image_at_rest: false,
            linger: Duration::ZERO,
            beside: false,
        }
    }

    fn steps(terms: &IdlePolicy, has_image: bool, habit: &ArrivalPattern) -> Vec<(Tier, u64)> {
        steps_of(terms, has_image, habit, &KnownCosts::default())
    }

    fn steps_of(
        terms: &IdlePolicy,
        has_image: bool,
        habit: &ArrivalPattern,
        known: &KnownCosts,
    ) -> Vec<(Tier, u64)> {
        let since = Instant::now();
        let (mut below, mut now, mut steps) = (Tier::Running, since, Vec::new());
        while let Some((tier, due)) = terms.next(IdleSpan { since, now }, below, has_image, habit, known) {
            (below, now) = (tier, due.max(now));
            steps.push((tier, (now - since).as_secs()));
        }
        steps
    }

    #[test]
    fn it_goes_down_step_by_step_at_its_times() {
        let habit = ArrivalPattern::default();
        let down = [(Tier::Quiet, 2), (Tier::Frozen, 10), (Tier::Reclaimed, 120)];
        let expected = [&down[..], &[(Tier::Image, 900)]].concat();
        assert_eq!(steps(&terms(), true, &habit), expected);
        let expected = [&down[..], &[(Tier::Cold, 3600)]].concat();
        assert_eq!(steps(&terms(), false, &habit), expected);
    }

    #[test]
    fn kept_site_keeps_its_process() {
        let kept = IdlePolicy { keep: true, ..terms() };
        assert_eq!(steps(&kept, true, &ArrivalPattern::default()).last(), Some(&(Tier::Reclaimed, 120)));
        assert_eq!(kept.pressed(Tier::Reclaimed, true, &KnownCosts::default(), Instant::now()), None);
    }

    #[test]
    fn a_step_that_is_not_before_the_next_is_left_out() {
        let mut terms = terms();
        (terms.after[0], terms.after[2]) = (Some(S(10)), None);
        assert_eq!(steps(&terms, true, &ArrivalPattern::default()), [(Tier::Frozen, 10), (Tier::Image, 900)]);
    }

    #[test]
    fn late_is_deep_at_once() {
        let since = Instant::now();
        let idle = IdleSpan { since, now: since + S(1000) };
        let next =
            terms().next(idle, Tier::Running, true, &ArrivalPattern::default(), &KnownCosts::default());
        assert_eq!(next.map(|(tier, _)| tier), Some(Tier::Image));
    }

    #[test]
    fn a_habit_needs_some_gaps_alike() {
        let mut habit = ArrivalPattern::default();
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
        let mut habit = ArrivalPattern::default();
        for _ in 0..GAPS_MIN {
            habit.saw(S(905));
        }
        let image = steps(&terms(), true, &habit).last().copied();
        assert_eq!(image, Some((Tier::Image, 912)), "7.5 s after it was expected");
    }

    #[test]
    fn a_request_that_is_expected_late_lets_it_go_early() {
        let mut habit = ArrivalPattern::default();
        for _ in 0..GAPS_MIN {
            habit.saw(S(86_400));
        }
        let early = [(Tier::Quiet, 0), (Tier::Frozen, 2), (Tier::Reclaimed, 30), (Tier::Image, 225)];
        assert_eq!(steps(&terms(), true, &habit), early);
    }

    #[test]
    fn pressure_takes_memory_first_and_then_the_process() {
        let pressed =
            |below, has_image| terms().pressed(below, has_image, &KnownCosts::default(), Instant::now());
        assert_eq!(pressed(Tier::Running, true), Some(Tier::Reclaimed));
        assert_eq!(pressed(Tier::Reclaimed, true), Some(Tier::Image));
        assert_eq!(pressed(Tier::Reclaimed, false), Some(Tier::Cold));
    }

    /// An application of so many MiB, so many of them reclaimed, and milliseconds to come back:
    /// reclaimed, image, cold.
    fn measured(frozen: u64, reclaimed: u64, returns: [u64; 3]) -> KnownCosts {
        let (now, mut known) = (Instant::now(), KnownCosts::default());
        for (tier, mib) in [(Tier::Frozen, frozen), (Tier::Reclaimed, reclaimed)] {
            if mib > 0 {
                known.own.holds(tier, mib << 20, now);
            }
        }
        for (tier, ms) in [Tier::Reclaimed, Tier::Image, Tier::Cold].into_iter().zip(returns) {
            if ms > 0 {
                known.node.returned(tier, Duration::from_millis(ms), now);
            }
        }
        known
    }

    #[test]
    fn much_memory_with_a_quick_return_is_given_back_sooner() {
        let reclaimed_and_image = |known: &KnownCosts| {
            let steps = steps_of(&terms(), true, &ArrivalPattern::default(), known);
            let at = |tier| steps.iter().find(|(of, _)| *of == tier).map(|(_, seconds)| *seconds);
            (at(Tier::Reclaimed), at(Tier::Image))
        };
        for (known, reclaimed, image) in [
            (KnownCosts::default(), Some(120), Some(900)),
            // As assumed of the typical one, without swap.
            (measured(100, 0, [0, 150, 0]), Some(120), Some(900)),
            (measured(200, 0, [0, 150, 0]), Some(120), Some(450)),
            (measured(50, 0, [0, 150, 0]), Some(120), Some(1800)),
            (measured(100, 0, [0, 75, 0]), Some(120), Some(446)),
            // Within bounds, whatever was measured.
            (measured(1, 0, [0, 9000, 0]), Some(120), Some(3600)),
            (measured(9000, 0, [0, 1, 0]), Some(120), Some(225)),
            // From swap the image gives back little, and takes little longer.
            (measured(100, 20, [50, 150, 0]), Some(150), Some(3600)),
            (measured(100, 50, [50, 75, 0]), Some(240), Some(450)),
        ] {
            assert_eq!(reclaimed_and_image(&known), (reclaimed, image), "{known:?}");
        }
    }

    #[test]
    fn swap_is_passed_over_where_the_image_is_no_slower() {
        let beaten = measured(100, 20, [80, 60, 0]);
        let steps: Vec<Tier> = steps_of(&terms(), true, &ArrivalPattern::default(), &beaten)
            .into_iter()
            .map(|step| step.0)
            .collect();
        assert_eq!(steps, [Tier::Quiet, Tier::Frozen, Tier::Image]);
        let now = Instant::now();
        assert_eq!(terms().pressed(Tier::Frozen, true, &beaten, now), Some(Tier::Image));
        // Not where the record or a missing image forbids what is deeper.
        let mut never = terms();
        never.after[3] = None;
        assert_eq!(never.pressed(Tier::Frozen, true, &beaten, now), Some(Tier::Reclaimed));
        assert_eq!(terms().pressed(Tier::Frozen, false, &beaten, now), Some(Tier::Reclaimed));
        let kept = IdlePolicy { keep: true, ..terms() };
        assert_eq!(kept.pressed(Tier::Frozen, true, &beaten, now), Some(Tier::Reclaimed));
    }

    #[test]
    fn the_times_that_a_record_says_are_kept() {
        let said = IdlePolicy { is_said: [false, false, true, true, false], ..terms() };
        let known = measured(9000, 0, [0, 1, 0]);
        let expected = [(Tier::Quiet, 2), (Tier::Frozen, 10), (Tier::Reclaimed, 120), (Tier::Image, 900)];
        assert_eq!(steps_of(&said, true, &ArrivalPattern::default(), &known), expected);
    }

    #[test]
    fn application_that_returns_slowly_is_kept_longer() {
        let mut habit = ArrivalPattern::default();
        for _ in 0..GAPS_MIN {
            habit.saw(S(925));
        }
        let said = IdlePolicy { is_said: [true; 5], ..terms() };
        let image = |known: &KnownCosts| steps_of(&said, true, &habit, known).last().copied();
        assert_eq!(image(&KnownCosts::default()), Some((Tier::Image, 900)), "it is not expected soon enough");
        assert_eq!(image(&measured(100, 0, [0, 300, 0])), Some((Tier::Image, 940)));
    }

    #[test]
    fn every_step_stays_within_bounds_and_is_due_at_its_time() {
        let any =
            (proptest::num::u32::ANY, proptest::num::u32::ANY, proptest::array::uniform3(0..100_000_u64));
        proptest::proptest!(|((frozen, reclaimed, returns) in any, has_image: bool, gap in 0..10_000_u64)| {
            let known = measured(frozen.into(), reclaimed.into(), returns);
            let (terms, mut habit) = (terms(), ArrivalPattern::default());
            (0..GAPS_MIN).for_each(|_| habit.saw(S(gap)));
            let since = Instant::now();
            let mut below = Tier::Running;
            while let Some((tier, due)) = terms.next(IdleSpan { since, now: since }, below, has_image, &habit, &known) {
                proptest::prop_assert!(tier < below);
                let set = terms.after[STEPS.iter().position(|step| *step == tier).unwrap()].unwrap();
                let (least, most) = (set / 4 / EARLY, set * 4 + assumed(tier) * PATIENCE * 6);
                proptest::prop_assert!(due >= since + least && due <= since + most, "{tier} {:?}", due - since);
                // What is looked at then is done then: no alarm is for nothing.
                let then = terms.next(IdleSpan { since, now: due }, below, has_image, &habit, &known);
                proptest::prop_assert!(then.is_some_and(|(deep, at)| deep <= tier && at <= due));
                below = tier;
            }
            proptest::prop_assert_eq!(below, if has_image { Tier::Image } else { Tier::Cold });
        });
    }

    #[test]
    fn a_record_goes_before_the_nodes_settings() {
        let json = r#"{"command":["x"],"directory":"a","idle":{"frozen":3,"image":"never"},"min":1}"#;
        let app: App = serde_json::from_str(json).unwrap();
        let terms = IdlePolicy::new(&app, &IdleOptions::default(), true);
        let node = IdleOptions::default();
        let expected = [Some(node.quiet_ms), Some(3000), Some(node.reclaimed_ms), None, Some(node.cold_ms)];
        assert_eq!(terms.after, expected.map(|ms| ms.map(Duration::from_millis)));
        assert_eq!(terms.is_said, [false, true, false, true, false]);
        assert!(terms.keep);
    }
}
