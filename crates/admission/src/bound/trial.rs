//! Evaluates a trial with two bounds: how throughput changes with the number of requests that run
//! at once.
//!
//! Requests are assigned to an arm by when they *ended*. Assignment by their start would leave out
//! the long ones at the end of each turn. A request that ran under both bounds counts with the mean
//! of both logarithms. The difference between the arms is then divided by the difference of these
//! means.
//!
//! Not here: when to try which bound (`bound`).

use std::time::Duration;

/// Kinds of work. Each kind is four times as large as the one before and is compared only with
/// itself. The average request belongs to the sixth kind.
const KINDS: usize = 10;
const SMALLEST_KIND: f64 = 1.0 / 1024.0;
/// Least growth of throughput (as a part of the growth of the bound) that justifies a step up. For
/// a step down, throughput must shrink by less than this.
const WORTH: f64 = 0.10;
const HARMLESS: f64 = 0.07;
/// Largest plausible difference between the elasticities of two kinds.
const KINDS_DIFFER: f64 = 0.5;
/// Standard errors above 1 from which on an elasticity is invalid.
const ABSURD_ERRORS: f64 = 3.0;
/// Spread of service times that is assumed before a few were seen, and its weight in samples.
const ASSUMED_SPREAD: f64 = 0.1;
const ASSUMED_COUNT: f64 = 2.0;
/// Factor on the variance, because requests that run side by side are not independent.
const COMMON_FATE: f64 = 1.5;
/// Part of the trial's step by which the arms must differ before they are compared.
const LEAST_DIFFERENCE: f64 = 0.2;
/// Requests in each arm of a kind before the kind counts.
const LEAST_COUNT: f64 = 4.0;

/// Observations of one kind of work at one bound.
#[derive(Debug, Clone, Copy, Default)]
struct KindCounts {
    count: f64,
    /// Seconds of service, their squares, and the seconds times the logarithm of how many ran.
    time: f64,
    squares: f64,
    level: f64,
}

/// Observations at one bound.
#[derive(Debug, Clone, Copy, Default)]
pub struct TrialArm {
    kinds: [KindCounts; KINDS],
    added: u32,
    /// Seconds, and seconds times the logarithm of how many ran.
    seconds: f64,
    levels: f64,
}

impl TrialArm {
    /// Counts time that passed with a full bound.
    pub fn pass(&mut self, seconds: f64, level: f64) {
        self.seconds += seconds;
        self.levels += seconds * level;
    }

    /// Counts a request that ended and ran with a full bound throughout. `level` is the mean
    /// logarithm of how many ran at once meanwhile.
    pub fn add(&mut self, service: Duration, work: f64, level: f64) {
        let seconds = service.as_secs_f64().max(1e-6);
        // Between two kinds it counts for both in part. The expectation of a class changes all the
        // time. With a sharp border, a class could be of one kind in one arm and of another in the
        // other.
        let place = ((work / SMALLEST_KIND).log2() / 2.0).clamp(0.0, (KINDS - 1) as f64);
        let kind = place as usize;
        let part = place - place.floor();
        self.kinds[kind].add(1.0 - part, seconds, level);
        if let Some(above) = self.kinds.get_mut(kind + 1) {
            above.add(part, seconds, level);
        }
        self.added += 1;
    }

    /// Halves the weight of earlier observations.
    pub fn fade(&mut self) {
        for tally in &mut self.kinds {
            tally.count *= 0.5;
            tally.squares *= 0.5;
            tally.time *= 0.5;
            tally.level *= 0.5;
        }
        self.seconds *= 0.5;
        self.levels *= 0.5;
    }
}

impl KindCounts {
    fn add(&mut self, part: f64, seconds: f64, level: f64) {
        self.count += part;
        self.time += part * seconds;
        self.squares += part * seconds * seconds;
        self.level += part * seconds * level;
    }

    /// Returns the squared coefficient of variation of the service time.
    fn spread(&self) -> f64 {
        let mean = self.time / self.count;
        let spread = (self.squares / self.count / (mean * mean) - 1.0).max(0.0);
        (spread * self.count + ASSUMED_SPREAD * ASSUMED_COUNT) / (self.count + ASSUMED_COUNT)
    }

    /// Returns the variance of the logarithm of the mean service time.
    fn variance(&self) -> f64 {
        COMMON_FATE * self.spread() / self.count
    }
}

/// The elasticity expected before anything is seen, and how far off that may be.
#[derive(Debug, Clone, Copy)]
pub struct PriorElasticity {
    elasticity: f64,
    error: f64,
}

impl PriorElasticity {
    pub const UNKNOWN: Self = Self { elasticity: 0.4, error: 0.7 };
    /// The CPU is short: more requests at once would wait for it.
    pub const NO_GROWTH: Self = Self { elasticity: 0.0, error: 0.25 };
    /// The CPU idles: running requests wait for something else.
    pub const GROWTH: Self = Self { elasticity: 0.7, error: 0.35 };

    /// Combines this with an observation: the mean of both by their certainty.
    fn and_seen(self, elasticity: f64, error: f64) -> (f64, f64) {
        let known = (self.error / error.max(f64::MIN_POSITIVE)).powi(2).min(f64::MAX);
        ((elasticity * known + self.elasticity) / (known + 1.0), self.error / (known + 1.0).sqrt())
    }
}

/// When a trial is evaluated. More frequent evaluation demands more certainty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TestPoint {
    WithinTurn,
    TurnOver,
    Last,
}

impl TestPoint {
    /// Returns the standard errors for a step up and for a step down. A bound that is too low costs
    /// more than one that is too high. But a step up is evaluated more often.
    fn to_take(self) -> (f64, f64) {
        match self {
            Self::WithinTurn => (4.0, 4.0),
            Self::TurnOver => (2.0, 1.3),
            Self::Last => (1.0, 0.7),
        }
    }

    /// Returns the same for leaving the other bound. A trial downward ends sooner, as it may be
    /// costing throughput.
    fn to_leave(self) -> (f64, f64) {
        match self {
            Self::WithinTurn => (4.0, 2.0),
            Self::TurnOver | Self::Last => (1.0, 1.0),
        }
    }
}

/// Result of a trial so far.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum TrialResult {
    /// The other bound is better. Elasticity of throughput with the bound: 1 is in proportion, 0 is
    /// none.
    Take {
        elasticity: f64,
    },
    /// The other bound is not better.
    Leave {
        elasticity: f64,
    },
    Unclear,
    /// Throughput grew by more than the bound, which is impossible: the two arms had different
    /// requests.
    Absurd,
}

/// Two bounds that are compared.
#[derive(Debug, Clone)]
pub struct LimitTrial {
    from: u32,
    pub to: u32,
    pub base: TrialArm,
    pub other: TrialArm,
    looked_at: u32,
}

impl LimitTrial {
    pub fn new(from: u32, to: u32, base: TrialArm) -> Self {
        Self { from, to, base, other: TrialArm::default(), looked_at: 0 }
    }

    /// Returns the result so far.
    pub fn verdict(&mut self, look: TestPoint, expected: PriorElasticity) -> TrialResult {
        let added = self.other.added;
        // Within a turn, the result is evaluated only after enough new observations.
        if look == TestPoint::WithinTurn && added < self.looked_at + (self.looked_at / 8).max(4) {
            return TrialResult::Unclear;
        }
        self.looked_at = added;
        let Some((elasticity, error)) = self.elasticity() else { return TrialResult::Unclear };
        if elasticity - ABSURD_ERRORS * error > 1.0 {
            return TrialResult::Absurd;
        }
        let (elasticity, error) = expected.and_seen(elasticity, error);
        let take = look.to_take();
        let leave = look.to_leave();
        let (is_better, is_worse) = if self.to > self.from {
            (elasticity - take.0 * error > WORTH, elasticity + leave.0 * error < WORTH)
        } else {
            (elasticity + take.1 * error < HARMLESS, elasticity - leave.1 * error > HARMLESS)
        };
        match (is_better, is_worse) {
            (true, _) => TrialResult::Take { elasticity },
            (_, true) => TrialResult::Leave { elasticity },
            _ => TrialResult::Unclear,
        }
    }

    /// Returns the elasticity of throughput with the bound, and its standard error.
    fn elasticity(&self) -> Option<(f64, f64)> {
        let step = self.step();
        let mut sum = KindSum::default();
        let mut time = 0.0;
        let mut unseen = 0.0;
        let mut spread = 0.0;
        for (base, other) in self.base.kinds.iter().zip(&self.other.kinds) {
            let both = base.time + other.time;
            time += both;
            if base.count < LEAST_COUNT || other.count < LEAST_COUNT {
                unseen += both;
                continue;
            }
            let difference = other.level / other.time - base.level / base.time;
            if difference / step < LEAST_DIFFERENCE {
                unseen += both;
                continue;
            }
            spread += both * base.spread().min(other.spread());
            let slower = (other.time / other.count / (base.time / base.count)).ln();
            let variance = (base.variance() + other.variance()) / (difference * difference);
            sum.add(1.0 - slower / difference, variance, both);
        }
        let (by_time, time_error) = sum.mean(time, unseen)?;
        let blend = (spread / (time - unseen).max(f64::MIN_POSITIVE)).min(1.0);
        let Some((by_count, count_error)) = self.by_count(blend) else { return Some((by_time, time_error)) };
        let elasticity = by_time * (1.0 - blend) + by_count * blend;
        let error = time_error * (1.0 - blend) + count_error * blend;
        Some((elasticity, error))
    }

    /// Returns the logarithm of one bound over the other.
    fn step(&self) -> f64 {
        (f64::from(self.to) / f64::from(self.from)).ln()
    }

    /// Returns the same from how much ended in how much time.
    fn by_count(&self, spread: f64) -> Option<(f64, f64)> {
        let base = &self.base;
        let other = &self.other;
        let mut base_work = 0.0;
        let mut base_squares = 0.0;
        let mut other_work = 0.0;
        let mut other_squares = 0.0;
        for (base, other) in base.kinds.iter().zip(&other.kinds) {
            let count = base.count + other.count;
            if count > 0.0 {
                let weight = (base.time + other.time) / count;
                base_work += weight * base.count;
                base_squares += weight * weight * base.count;
                other_work += weight * other.count;
                other_squares += weight * weight * other.count;
            }
        }
        if base_work <= 0.0 || other_work <= 0.0 || base.seconds <= 0.0 || other.seconds <= 0.0 {
            return None;
        }
        let difference = other.levels / other.seconds - base.levels / base.seconds;
        if difference / self.step() < LEAST_DIFFERENCE {
            return None;
        }
        let more = (other_work / other.seconds / (base_work / base.seconds)).ln();
        let variance = spread.max(ASSUMED_SPREAD)
            * COMMON_FATE
            * (base_squares / (base_work * base_work) + other_squares / (other_work * other_work));
        Some((more / difference, variance.sqrt() / difference.abs()))
    }
}

/// Sums the evidence of several kinds.
#[derive(Default)]
struct KindSum {
    kinds: [(f64, f64, f64, f64); KINDS],
    count: usize,
}

impl KindSum {
    /// Adds a kind with its elasticity, the variance of that, and its part of the time.
    fn add(&mut self, value: f64, variance: f64, time: f64) {
        self.kinds[self.count] = (value, variance, time, time / (variance + KINDS_DIFFER * KINDS_DIFFER));
        self.count += 1;
    }

    /// Returns the mean and its standard error. The weight of a kind is its part of the time,
    /// reduced if little is known of it. If the weights differ from the actual mix of requests, the
    /// mean is less certain.
    fn mean(&self, time: f64, unseen: f64) -> Option<(f64, f64)> {
        let kinds = &self.kinds[..self.count];
        let weights: f64 = kinds.iter().map(|kind| kind.3).sum();
        if weights <= 0.0 {
            return None;
        }
        let mut mean = 0.0;
        let mut variance = 0.0;
        let mut off = (unseen / time).powi(2);
        for (value, of_value, share, weight) in kinds {
            let weight = weight / weights;
            mean += weight * value;
            variance += weight * weight * of_value;
            off += (weight - share / time).powi(2);
        }
        Some((mean, (variance + off * KINDS_DIFFER * KINDS_DIFFER).sqrt()))
    }
}
