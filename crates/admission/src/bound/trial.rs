//! What a trial with two bounds says: how throughput changes with the number that run at once.
//!
//! Requests are told apart by when they *ended*, as choosing by when they began would leave out the long ones at the end of each
//! turn. One that ran under both bounds counts with the mean of both (of their logarithms), and the difference between the arms
//! is set against the difference of these means.
//!
//! Not here: when to try what (`bound`).

use std::time::Duration;

/// Kinds of work that are compared with their like only: each four times as much as the one before. The average request is of
/// the sixth one.
const KINDS: usize = 10;
const SMALLEST_KIND: f64 = 1.0 / 1024.0;
/// How much throughput must grow with the bound (as a part of the growth of the bound) to be worth a step up, and how much less
/// it must shrink for a step down.
const WORTH: f64 = 0.10;
const HARMLESS: f64 = 0.07;
/// How far the elasticity of one kind may be from that of another one.
const KINDS_DIFFER: f64 = 0.5;
/// An elasticity that is so many standard errors above 1 is no elasticity.
const ABSURD_ERRORS: f64 = 3.0;
/// Spread that is assumed of service times until a few were seen, and how many it counts for.
const ASSUMED_SPREAD: f64 = 0.1;
const ASSUMED_COUNT: f64 = 2.0;
/// Requests that run side by side are not independent: the variance is so many times what it would be if they were.
const COMMON_FATE: f64 = 1.5;
/// Arms must differ by at least this part of the trial's step before they are compared.
const LEAST_DIFFERENCE: f64 = 0.2;
/// Requests in each arm of a kind before the kind counts.
const LEAST_COUNT: f64 = 4.0;

/// What was seen of one kind of work at one bound.
#[derive(Debug, Clone, Copy, Default)]
struct Tally {
    count: f64,
    /// Seconds of service, their squares, and the seconds times the logarithm of how many ran.
    time: f64,
    squares: f64,
    level: f64,
}

/// What was seen at one bound.
#[derive(Debug, Clone, Copy, Default)]
pub struct Arm {
    kinds: [Tally; KINDS],
    added: u32,
    /// Seconds, and the same times the logarithm of how many ran.
    seconds: f64,
    levels: f64,
}

impl Arm {
    /// Time that passed with a full bound.
    pub fn pass(&mut self, seconds: f64, level: f64) {
        self.seconds += seconds;
        self.levels += seconds * level;
    }

    /// One that ended and ran with a full bound throughout; `level` is the mean logarithm of how many ran at once meanwhile.
    pub fn add(&mut self, service: Duration, work: f64, level: f64) {
        let seconds = service.as_secs_f64().max(1e-6);
        // Between two kinds it counts for both in part: what is expected of a class changes all the time, and a class on a sharp
        // border would be of one kind in one arm and of the other one in the other.
        let place = ((work / SMALLEST_KIND).log2() / 2.0).clamp(0.0, (KINDS - 1) as f64);
        let kind = place as usize;
        let part = place - place.floor();
        self.kinds[kind].add(1.0 - part, seconds, level);
        if let Some(above) = self.kinds.get_mut(kind + 1) {
            above.add(part, seconds, level);
        }
        self.added += 1;
    }

    /// Halves the weight of what was seen so far.
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

impl Tally {
    fn add(&mut self, part: f64, seconds: f64, level: f64) {
        self.count += part;
        self.time += part * seconds;
        self.squares += part * seconds * seconds;
        self.level += part * seconds * level;
    }

    /// Squared coefficient of variation of the service time.
    fn spread(&self) -> f64 {
        let mean = self.time / self.count;
        let spread = (self.squares / self.count / (mean * mean) - 1.0).max(0.0);
        (spread * self.count + ASSUMED_SPREAD * ASSUMED_COUNT) / (self.count + ASSUMED_COUNT)
    }

    /// Variance of the logarithm of the mean service time.
    fn variance(&self) -> f64 {
        COMMON_FATE * self.spread() / self.count
    }
}

/// What is thought of the elasticity before anything is seen, and how far off that may be.
#[derive(Debug, Clone, Copy)]
pub struct Expected {
    elasticity: f64,
    error: f64,
}

impl Expected {
    pub const UNKNOWN: Self = Self { elasticity: 0.4, error: 0.7 };
    /// The CPU is short: more at once would wait for it.
    pub const NO_GROWTH: Self = Self { elasticity: 0.0, error: 0.25 };
    /// The CPU idles: what runs waits for something else.
    pub const GROWTH: Self = Self { elasticity: 0.7, error: 0.35 };

    /// With what was seen: the mean of both by their certainty.
    fn and_seen(self, elasticity: f64, error: f64) -> (f64, f64) {
        let known = (self.error / error.max(f64::MIN_POSITIVE)).powi(2).min(f64::MAX);
        ((elasticity * known + self.elasticity) / (known + 1.0), self.error / (known + 1.0).sqrt())
    }
}

/// When a trial is looked at. The more often, the more certain must be what is seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Look {
    WithinTurn,
    TurnOver,
    Last,
}

impl Look {
    /// Standard errors for a step up and for a step down. Too low a bound costs more than too high a one, but a step up is
    /// looked at more often.
    fn to_take(self) -> (f64, f64) {
        match self {
            Self::WithinTurn => (4.0, 4.0),
            Self::TurnOver => (2.0, 1.3),
            Self::Last => (1.0, 0.7),
        }
    }

    /// The same to leave it. A trial downward ends sooner, as it may be costing throughput.
    fn to_leave(self) -> (f64, f64) {
        match self {
            Self::WithinTurn => (4.0, 2.0),
            Self::TurnOver | Self::Last => (1.0, 1.0),
        }
    }
}

/// What a trial has said so far.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Verdict {
    /// The other bound is better. The elasticity of throughput with the bound: 1 is in proportion, 0 not at all.
    Take {
        elasticity: f64,
    },
    /// It is not.
    Leave {
        elasticity: f64,
    },
    Unclear,
    /// Throughput cannot grow by more than the bound: the requests under one bound were others than those under the other.
    Absurd,
}

/// Two bounds that are compared.
#[derive(Debug, Clone)]
pub struct Trial {
    from: u32,
    pub to: u32,
    pub base: Arm,
    pub other: Arm,
    looked_at: u32,
}

impl Trial {
    pub fn new(from: u32, to: u32, base: Arm) -> Self {
        Self { from, to, base, other: Arm::default(), looked_at: 0 }
    }

    /// What can be said now.
    pub fn verdict(&mut self, look: Look, expected: Expected) -> Verdict {
        let added = self.other.added;
        // Within a turn it is looked at each time that something has been added to speak of.
        if look == Look::WithinTurn && added < self.looked_at + (self.looked_at / 8).max(4) {
            return Verdict::Unclear;
        }
        self.looked_at = added;
        let Some((elasticity, error)) = self.elasticity() else { return Verdict::Unclear };
        if elasticity - ABSURD_ERRORS * error > 1.0 {
            return Verdict::Absurd;
        }
        let (elasticity, error) = expected.and_seen(elasticity, error);
        let (take, leave) = (look.to_take(), look.to_leave());
        let (is_better, is_worse) = if self.to > self.from {
            (elasticity - take.0 * error > WORTH, elasticity + leave.0 * error < WORTH)
        } else {
            (elasticity + take.1 * error < HARMLESS, elasticity - leave.1 * error > HARMLESS)
        };
        match (is_better, is_worse) {
            (true, _) => Verdict::Take { elasticity },
            (_, true) => Verdict::Leave { elasticity },
            _ => Verdict::Unclear,
        }
    }

    /// Elasticity of throughput with the bound, and its standard error.
    fn elasticity(&self) -> Option<(f64, f64)> {
        let step = self.step();
        let mut sum = Sum::default();
        let (mut time, mut unseen, mut spread) = (0.0, 0.0, 0.0);
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

    /// The logarithm of one bound over the other.
    fn step(&self) -> f64 {
        (f64::from(self.to) / f64::from(self.from)).ln()
    }

    /// The same from how much ended in how much time.
    fn by_count(&self, spread: f64) -> Option<(f64, f64)> {
        let (base, other) = (&self.base, &self.other);
        let (mut base_work, mut base_squares, mut other_work, mut other_squares) = (0.0, 0.0, 0.0, 0.0);
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

/// What several kinds say of them all.
#[derive(Default)]
struct Sum {
    kinds: [(f64, f64, f64, f64); KINDS],
    count: usize,
}

impl Sum {
    /// A kind that takes so much of the time; its elasticity and the variance of that.
    fn add(&mut self, value: f64, variance: f64, time: f64) {
        self.kinds[self.count] = (value, variance, time, time / (variance + KINDS_DIFFER * KINDS_DIFFER));
        self.count += 1;
    }

    /// The mean and its standard error. A kind counts as much as it takes of the time, and less if little is known of it; as far
    /// as that makes the mean one of other requests than there are, it is less certain.
    fn mean(&self, time: f64, unseen: f64) -> Option<(f64, f64)> {
        let kinds = &self.kinds[..self.count];
        let weights: f64 = kinds.iter().map(|kind| kind.3).sum();
        if weights <= 0.0 {
            return None;
        }
        let (mut mean, mut variance, mut off) = (0.0, 0.0, (unseen / time).powi(2));
        for (value, of_value, share, weight) in kinds {
            let weight = weight / weights;
            mean += weight * value;
            variance += weight * weight * of_value;
            off += (weight - share / time).powi(2);
        }
        Some((mean, (variance + off * KINDS_DIFFER * KINDS_DIFFER).sqrt()))
    }
}
