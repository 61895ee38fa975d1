//! What each tier costs, as measured here: how long it takes to come back from it, and how much memory is held there. Pure.
//!
//! Each is a mean in which what was long ago fades. What an instance has measured itself stands for it; else what all
//! instances of the node have; else what is assumed of the application that the times of the settings are made for.
//! Not here: what follows from them (`policy`), measuring (`measured`).

use std::time::{Duration, Instant};

use nagaya_cmdb::instance::Tier;

/// From so many on, each measurement moves its mean by one part of as many.
const FADE: u32 = 8;

/// What was measured longer ago says nothing any more: else a tier that seems bad would never be tried again.
const KEPT: Duration = Duration::from_secs(86_400);

/// How much of the memory above a tier it must give back, one part of so many, to be worth a step.
const WORTH: u64 = 16;

/// How long it takes to come back, where nobody has measured it.
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
struct Mean {
    value: u64,
    samples: u32,
    /// The last one.
    at: Option<Instant>,
}

impl Mean {
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

/// What has been measured at each tier, by `Tier::ALL`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Costs {
    /// Microseconds.
    returns: [Mean; Tier::ALL.len()],
    /// Bytes.
    held: [Mean; Tier::ALL.len()],
}

impl Costs {
    /// To come back from there took so long.
    pub fn returned(&mut self, from: Tier, took: Duration, now: Instant) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.returns[from as usize].saw(micros, now);
    }

    /// What is held there was counted less than so long ago.
    pub fn is_counted(&self, at: Tier, now: Instant, ago: Duration) -> bool {
        self.held[at as usize].at.is_some_and(|at| now.saturating_duration_since(at) < ago)
    }

    /// So many bytes were held there.
    pub fn holds(&mut self, at: Tier, bytes: u64, now: Instant) {
        self.held[at as usize].saw(bytes, now);
    }
}

/// Whose measurements a figure is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whose {
    Own,
    Node,
    /// Nobody has measured it.
    Assumed,
}

impl Whose {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Own => "own",
            Self::Node => "node",
            Self::Assumed => "assumed",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Figure<T> {
    pub value: T,
    pub samples: u32,
    pub whose: Whose,
}

/// What is known for one instance.
#[derive(Debug, Clone, Copy, Default)]
pub struct Known {
    pub own: Costs,
    /// Of all instances of the node: it stands in for what this one has not measured.
    pub node: Costs,
}

impl Known {
    /// How long it takes to come back from there.
    pub fn returns(&self, tier: Tier, now: Instant) -> Figure<Duration> {
        let measured = self.find(now, |costs| &costs.returns[tier as usize]);
        let (value, samples, whose) = match measured {
            Some((mean, whose)) => (Duration::from_micros(mean.value), mean.samples, whose),
            None => (assumed(tier), 0, Whose::Assumed),
        };
        Figure { value, samples, whose }
    }

    /// The memory that it holds there. None: nobody knows.
    pub fn holds(&self, tier: Tier, now: Instant) -> Option<Figure<u64>> {
        if !tier.has_process() {
            return Some(Figure { value: 0, samples: 0, whose: Whose::Assumed });
        }
        let (mean, whose) = self.find(now, |costs| &costs.held[tier as usize])?;
        Some(Figure { value: mean.value, samples: mean.samples, whose })
    }

    /// The same of what keeps all its memory.
    pub fn holds_in_memory(&self, now: Instant) -> Option<u64> {
        let tiers = [Tier::Frozen, Tier::Quiet, Tier::Running].into_iter();
        tiers.filter_map(|tier| self.holds(tier, now)).map(|figure| figure.value).next()
    }

    fn find(&self, now: Instant, of: impl Fn(&Costs) -> &Mean) -> Option<(Mean, Whose)> {
        let (own, node) = (of(&self.own), of(&self.node));
        let owned = own.holds(now).then_some((*own, Whose::Own));
        owned.or_else(|| node.holds(now).then_some((*node, Whose::Node)))
    }

    /// Whether memory in swap is worth nothing here: it is still held, or `deeper` is as quick to come back from and holds
    /// less. Never where something of it was not measured.
    pub fn is_swap_useless(&self, deeper: Option<Tier>, now: Instant) -> bool {
        let Some(held) = self.holds(Tier::Reclaimed, now) else { return false };
        let is_held = self.holds_in_memory(now).is_some_and(|all| held.value >= all - all / WORTH);
        let back = self.returns(Tier::Reclaimed, now);
        let is_beaten = deeper.is_some_and(|tier| {
            let other = self.returns(tier, now);
            let are_measured = back.whose != Whose::Assumed && other.whose != Whose::Assumed;
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
        let (now, mut mean) = (Instant::now(), Mean::default());
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
            let (now, mut mean) = (Instant::now(), Mean::default());
            for value in &values {
                mean.saw(*value, now);
                // Whole parts only are counted.
                let least = values.iter().min().unwrap().saturating_sub(u64::from(FADE * FADE));
                proptest::prop_assert!(mean.value >= least && mean.value <= *values.iter().max().unwrap() + u64::from(FADE));
            }
        });
    }

    #[test]
    fn its_own_goes_before_the_nodes_and_the_nodes_before_what_is_assumed() {
        let (now, mut known) = (Instant::now(), Known::default());
        let told = |known: &Known, now| {
            let Figure { value, samples, whose } = known.returns(Tier::Image, now);
            (value, samples, whose)
        };
        assert_eq!(told(&known, now), (MS(150), 0, Whose::Assumed));
        known.node.returned(Tier::Image, MS(40), now);
        known.node.returned(Tier::Image, MS(40), now);
        assert_eq!(told(&known, now), (MS(40), 2, Whose::Node));
        known.own.returned(Tier::Image, MS(70), now);
        assert_eq!(told(&known, now), (MS(70), 1, Whose::Own));
        assert_eq!(told(&known, now + KEPT), (MS(150), 0, Whose::Assumed));
        assert_eq!(known.returns(Tier::Cold, now).whose, Whose::Assumed, "each tier for itself");
    }

    #[test]
    fn without_a_process_nothing_is_held() {
        let (now, mut known) = (Instant::now(), Known::default());
        assert_eq!(known.holds(Tier::Frozen, now), None);
        assert_eq!(known.holds(Tier::Image, now).map(|figure| figure.value), Some(0));
        known.node.holds(Tier::Running, 7 << 20, now);
        assert_eq!(known.holds_in_memory(now), Some(7 << 20));
    }

    /// Memory in MiB held frozen and reclaimed, return in milliseconds from reclaimed and from the image; 0: not measured.
    fn known(frozen: u64, reclaimed: u64, back: u64, image: u64, now: Instant) -> Known {
        let mut own = Costs::default();
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
        Known { own, node: Costs::default() }
    }

    #[test]
    fn swap_is_useless_where_it_holds_as_much_or_is_no_quicker_than_what_holds_less() {
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
