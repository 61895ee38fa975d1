//! Costs of each tier, as measured here: the duration of a wake from it, and the memory that it
//! holds. Pure.
//!
//! Each is a mean in which old measurements fade. An instance's own measurements come first. Then
//! come those of all instances of the node. Last come the values assumed for the application that
//! the settings' times are made for. Not here: the decisions (`policy`), measuring (`measured`).

use std::time::{Duration, Instant};

use nagaya_records::instance::Tier;

/// Number of measurements from which on each moves its mean by one part in as many.
const FADE: u32 = 8;

/// Maximum age of a measurement. Without it, a tier that seems bad would never be tried again.
const KEPT: Duration = Duration::from_secs(86_400);

/// A step must give back at least one part in this many of the memory above it.
const WORTH: u64 = 16;

/// Returns the duration of a wake from this tier without a measurement.
pub fn assumed(tier: Tier) -> Duration {
    Duration::from_millis(match tier {
        Tier::Running | Tier::Quiet => 0,
        Tier::Frozen => 1,
        Tier::Reclaimed => 50,
        Tier::Image => 150,
        Tier::Cold => 1200,
    })
}

/// A mean of the last measurements.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct RecentMean {
    value: u64,
    samples: u32,
    /// When the last one was made.
    at: Option<Instant>,
}

impl RecentMean {
    fn saw(&mut self, value: u64, now: Instant) {
        if !self.holds(now) {
            self.samples = 0;
        }
        self.samples = self.samples.saturating_add(1);
        let parts = u64::from(self.samples.min(FADE));
        self.value = self.value - self.value / parts + value / parts;
        self.at = Some(now);
    }

    fn holds(&self, now: Instant) -> bool {
        self.at.is_some_and(|at| now.saturating_duration_since(at) < KEPT)
    }
}

/// Measurements at each tier, by `Tier::ALL`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TierCosts {
    /// Microseconds.
    returns: [RecentMean; Tier::ALL.len()],
    /// Bytes.
    held: [RecentMean; Tier::ALL.len()],
}

impl TierCosts {
    /// Adds the duration of a wake from this tier.
    pub fn returned(&mut self, from: Tier, took: Duration, now: Instant) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.returns[from as usize].saw(micros, now);
    }

    /// Whether the memory there was counted less than this time ago.
    pub fn is_counted(&self, at: Tier, now: Instant, ago: Duration) -> bool {
        self.held[at as usize].at.is_some_and(|at| now.saturating_duration_since(at) < ago)
    }

    /// Adds the number of bytes that were held there.
    pub fn holds(&mut self, at: Tier, bytes: u64, now: Instant) {
        self.held[at as usize].saw(bytes, now);
    }
}

/// Origin of a figure's measurements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MeasuredBy {
    Own,
    Node,
    /// Nobody has measured it.
    Assumed,
}

impl MeasuredBy {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Own => "own",
            Self::Node => "node",
            Self::Assumed => "assumed",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CostFigure<T> {
    pub value: T,
    pub samples: u32,
    pub whose: MeasuredBy,
}

/// Known costs of one instance.
#[derive(Debug, Clone, Copy, Default)]
pub struct KnownCosts {
    pub own: TierCosts,
    /// Costs of all instances of the node. Used for values that this one has not measured.
    pub node: TierCosts,
}

impl KnownCosts {
    /// Returns the costs known to the node, for an instance that has measured nothing itself.
    pub fn of_node(costs: TierCosts) -> Self {
        Self { own: TierCosts::default(), node: costs }
    }

    /// Returns the duration of a wake from this tier.
    pub fn returns(&self, tier: Tier, now: Instant) -> CostFigure<Duration> {
        let measured = self.find(now, |costs| &costs.returns[tier as usize]);
        let (value, samples, whose) = match measured {
            Some((mean, whose)) => (Duration::from_micros(mean.value), mean.samples, whose),
            None => (assumed(tier), 0, MeasuredBy::Assumed),
        };
        CostFigure { value, samples, whose }
    }

    /// Returns the memory that it holds there. `None` if it is not known.
    pub fn holds(&self, tier: Tier, now: Instant) -> Option<CostFigure<u64>> {
        if !tier.has_process() {
            return Some(CostFigure { value: 0, samples: 0, whose: MeasuredBy::Assumed });
        }
        let (mean, whose) = self.find(now, |costs| &costs.held[tier as usize])?;
        Some(CostFigure { value: mean.value, samples: mean.samples, whose })
    }

    /// Returns the same for an instance that keeps all its memory.
    pub fn holds_in_memory(&self, now: Instant) -> Option<u64> {
        let tiers = [Tier::Frozen, Tier::Quiet, Tier::Running].into_iter();
        tiers.filter_map(|tier| self.holds(tier, now)).map(|figure| figure.value).next()
    }

    fn find(&self, now: Instant, of: impl Fn(&TierCosts) -> &RecentMean) -> Option<(RecentMean, MeasuredBy)> {
        let (own, node) = (of(&self.own), of(&self.node));
        let owned = own.holds(now).then_some((*own, MeasuredBy::Own));
        owned.or_else(|| node.holds(now).then_some((*node, MeasuredBy::Node)))
    }

    /// Whether swap is useless here: its memory is still held, or `deeper` wakes as fast and holds
    /// less. Never true if a measurement is missing.
    pub fn is_swap_useless(&self, deeper: Option<Tier>, now: Instant) -> bool {
        let Some(held) = self.holds(Tier::Reclaimed, now) else { return false };
        let is_held = self.holds_in_memory(now).is_some_and(|all| held.value >= all - all / WORTH);
        let back = self.returns(Tier::Reclaimed, now);
        let is_beaten = deeper.is_some_and(|tier| {
            let other = self.returns(tier, now);
            let are_measured = back.whose != MeasuredBy::Assumed && other.whose != MeasuredBy::Assumed;
            are_measured
                && other.value <= back.value
                && self.holds(tier, now).is_some_and(|other| other.value < held.value)
        });
        is_held || is_beaten
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    #[test]
    fn a_mean_is_of_the_first_few_and_then_fades() {
        let (now, mut mean) = (Instant::now(), RecentMean::default());
        for value in [100, 300, 200] {
            mean.saw(value, now);
        }
        assert!(mean.value.abs_diff(200) <= 3, "{mean:?}");
        for _ in 0..100 {
            mean.saw(1000, now);
        }
        assert!(mean.value.abs_diff(1000) <= 10, "{mean:?}");
        mean.saw(9000, now);
        assert!(mean.value.abs_diff(2000) <= 10, "one of many: {mean:?}");
        mean.saw(50, now + KEPT);
        assert_eq!((mean.value, mean.samples), (50, 1), "what was is forgotten");
    }

    #[test]
    fn a_mean_stays_within_what_was_seen() {
        proptest::proptest!(|(values: Vec<u64>)| {
            let (now, mut mean) = (Instant::now(), RecentMean::default());
            for value in &values {
                mean.saw(*value, now);
                // Whole parts only are counted.
                let least = values.iter().min().unwrap().saturating_sub(u64::from(FADE * FADE));
                proptest::prop_assert!(mean.value >= least && mean.value <= *values.iter().max().unwrap() + u64::from(FADE));
            }
        });
    }

    #[test]
    fn own_cost_precedes_the_nodes_and_that_the_assumed_one() {
        let (now, mut known) = (Instant::now(), KnownCosts::default());
        let told = |known: &KnownCosts, now| {
            let CostFigure { value, samples, whose } = known.returns(Tier::Image, now);
            (value, samples, whose)
        };
        assert_eq!(told(&known, now), (MS(150), 0, MeasuredBy::Assumed));
        known.node.returned(Tier::Image, MS(40), now);
        known.node.returned(Tier::Image, MS(40), now);
        assert_eq!(told(&known, now), (MS(40), 2, MeasuredBy::Node));
        known.own.returned(Tier::Image, MS(70), now);
        assert_eq!(told(&known, now), (MS(70), 1, MeasuredBy::Own));
        assert_eq!(told(&known, now + KEPT), (MS(150), 0, MeasuredBy::Assumed));
        assert_eq!(known.returns(Tier::Cold, now).whose, MeasuredBy::Assumed, "each tier for itself");
    }

    #[test]
    fn without_a_process_nothing_is_held() {
        let (now, mut known) = (Instant::now(), KnownCosts::default());
        assert_eq!(known.holds(Tier::Frozen, now), None);
        assert_eq!(known.holds(Tier::Image, now).map(|figure| figure.value), Some(0));
        known.node.holds(Tier::Running, 7 << 20, now);
        assert_eq!(known.holds_in_memory(now), Some(7 << 20));
    }

    /// Memory in MiB held frozen and reclaimed, return in milliseconds from reclaimed and from the
    /// image; 0: not measured.
    fn known(frozen: u64, reclaimed: u64, back: u64, image: u64, now: Instant) -> KnownCosts {
        let mut own = TierCosts::default();
        for (tier, mib) in [(Tier::Frozen, frozen), (Tier::Reclaimed, reclaimed)] {
            if mib > 0 {
                own.holds(tier, mib << 20, now);
            }
        }
        for (tier, ms) in [(Tier::Reclaimed, back), (Tier::Image, image)] {
            if ms > 0 {
                own.returned(tier, MS(ms), now);
            }
        }
        KnownCosts { own, node: TierCosts::default() }
    }

    #[test]
    fn swap_is_useless_if_it_saves_no_memory_or_no_time() {
        let now = Instant::now();
        let deeper = Some(Tier::Image);
        for (frozen, reclaimed, back, image, is_useless) in [
            (100, 20, 30, 60, false),
            (100, 20, 60, 60, true),
            (100, 20, 90, 60, true),
            (100, 97, 30, 60, true),
            (100, 90, 30, 60, false),
            // Nobody knows one of them.
            (100, 20, 200, 0, false),
            (100, 20, 0, 40, false),
            (100, 0, 200, 40, false),
            (0, 90, 30, 60, false),
        ] {
            let known = known(frozen, reclaimed, back, image, now);
            assert_eq!(known.is_swap_useless(deeper, now), is_useless, "{frozen} {reclaimed} {back} {image}");
        }
        assert!(!known(100, 20, 90, 60, now).is_swap_useless(None, now), "there is nothing deeper");
        assert!(known(100, 97, 30, 60, now).is_swap_useless(None, now));
    }
}
