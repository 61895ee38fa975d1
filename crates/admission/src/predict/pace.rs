//! How long requests of one kind take: a mean that is steady while nothing changes and quick when something does.
//!
//! A long memory gives little noise and follows slowly; a short one is the other way round. Both are kept. While they agree
//! within what chance explains, the long one counts; the more they differ, the more the short one does; and when chance does not
//! explain it at all, the past is dropped.
//!
//! Not here: which requests are of one kind (`predict`).

use crate::Moment;

/// Samples that the long memory holds.
const LONG: f32 = 400.0;
/// And the short one.
const SHORT: f32 = 24.0;
/// Time after which a sample weighs half as much as a new one, if few come.
const HALF_LIFE_US: f32 = 30e6;
/// What is left of an old memory still counts as one sample.
const LEAST: f32 = 1.0;
/// The short memory differs by so many standard errors: from here on it begins to count,
const DOUBT: f32 = 2.0;
/// and from here on it replaces the long one.
const CERTAIN: f32 = 4.5;
/// Samples from which on a mean can be relied on,
const SURE: f32 = 16.0;
/// and from which on it is more than an accident.
const FAIR: f32 = 2.0;
/// What is known after a change counts as so many samples: little, as the short memory still holds some from before it.
const AFTER_CHANGE: f32 = 4.0;

/// What is left of a request at least, if it should have ended already, and at most, as parts of the service.
const REST_LEAST: f64 = 0.05;
const REST_MOST: f64 = 3.0;

/// Service times of one kind of request, in microseconds.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Pace {
    /// Samples that the long memory holds, faded; 0: nothing is known.
    held: f32,
    mean: f32,
    variance: f32,
    short: f32,
    short_held: f32,
    /// What a request is expected to take, of both.
    expected: f32,
    last: Moment,
}

impl Pace {
    pub(crate) fn is_known(&self) -> bool {
        self.held > 0.0
    }

    /// Enough samples are held for the mean to be relied on.
    pub(crate) fn is_sure(&self) -> bool {
        self.held >= SURE
    }

    /// It rests on more than one sample.
    pub(crate) fn is_fair(&self) -> bool {
        self.held >= FAIR
    }

    /// Adds a sample. True: the pace has changed by more than chance explains, and the past was dropped.
    pub(crate) fn add(&mut self, now: Moment, sample: f32) -> bool {
        if self.held > 0.0 {
            let idle = now.0.saturating_sub(self.last.0) as f32 / HALF_LIFE_US;
            // Nearly always no time has passed to speak of, and this is done for each request.
            let fade = if idle < 1e-3 { 1.0 - idle * std::f32::consts::LN_2 } else { (-idle).exp2() };
            self.held = (self.held * fade).max(self.held.min(LEAST));
        }
        self.last = now;
        self.held = (self.held + 1.0).min(LONG);
        let off = sample - self.mean;
        self.mean += off / self.held;
        self.variance += (off * (sample - self.mean) - self.variance) / self.held;
        self.short_held = (self.short_held + 1.0).min(SHORT);
        self.short += (sample - self.short) / self.short_held;
        let doubt = self.doubt();
        let has_changed = doubt > CERTAIN;
        if has_changed {
            let scale = self.short / self.mean.max(1.0);
            self.variance *= scale * scale;
            self.mean = self.short;
            self.held = AFTER_CHANGE;
            self.short_held = AFTER_CHANGE;
        }
        let trust = ((doubt - DOUBT) / (CERTAIN - DOUBT)).clamp(0.0, 1.0);
        self.expected = self.mean + trust * (self.short - self.mean);
        has_changed
    }

    /// All that was learned so far would have taken so many times as long.
    pub(crate) fn scale(&mut self, by: f32) {
        self.mean *= by;
        self.short *= by;
        self.expected *= by;
        self.variance *= by * by;
    }

    /// By how much a later pace is expected to take longer, in logarithms. 0 if one of them says too little.
    pub(crate) fn moved_to(&self, later: &Self) -> f32 {
        let moved = later.expected.max(1.0) / self.expected.max(1.0);
        if self.is_fair() && moved != 1.0 { moved.ln() } else { 0.0 }
    }

    /// The expected service time. `None`: nothing is known.
    pub(crate) fn expected(&self) -> Option<f32> {
        self.is_known().then_some(self.expected)
    }

    /// What is left, on average, of one that has run for so long. That all take equally long means: what has run is done. That they
    /// vary at random means: how long one has run says nothing about its rest. In between it is in between, and where few take
    /// very long, what has run for long will run for long.
    pub(crate) fn rest(&self, has_run: f64) -> Option<f64> {
        let (service, spread) = (f64::from(self.expected()?), f64::from(self.spread()));
        // The mean rest of a generalized Pareto distribution, which is one of these for each spread.
        let rest = service + has_run * (spread - 1.0) / (spread + 1.0);
        Some(rest.clamp(service * REST_LEAST, service * REST_MOST))
    }

    /// The part of all that runs for so long, by the same distribution. 1 if nothing is known.
    pub(crate) fn survival(&self, has_run: f64) -> f64 {
        let Some(service) = self.expected().map(f64::from).filter(|service| *service > 0.0) else {
            return 1.0;
        };
        let spread = f64::from(self.spread());
        let slope = (spread - 1.0) / (spread + 1.0);
        let parts = has_run / service;
        // As random as radioactive decay.
        if slope.abs() < 1e-3 {
            return (-parts).exp();
        }
        (1.0 + slope * parts).max(0.0).powf(-(1.0 + slope) / slope)
    }

    /// Squared coefficient of variation: 0 if all take equally long, 1 if it is as random as radioactive decay.
    pub(crate) fn spread(&self) -> f32 {
        if self.mean > 0.0 { self.variance / (self.mean * self.mean) } else { 1.0 }
    }

    /// By how many standard errors the short memory differs from the long one.
    fn doubt(&self) -> f32 {
        if self.held < 2.0 * SHORT {
            return 0.0;
        }
        // A mean that forgets exponentially is as exact as one of twice as many samples.
        let error = (self.variance / (2.0 * SHORT - 1.0)).sqrt();
        // A kind that has never varied would make each hair's breadth a certainty.
        (self.short - self.mean).abs() / error.max(self.mean * 0.01).max(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fed with a fixed spread around `mean`, one sample each 10 ms. The number of changes seen.
    fn feed(pace: &mut Pace, from: u64, count: u64, mean: f32) -> usize {
        let spread = [0.2f32, 1.9, 0.7, 0.4, 1.5, 1.0, 0.6, 2.4, 0.3, 1.0];
        let at = |step: u64| usize::try_from(step * 7 % 10).expect("small");
        (from..from + count).filter(|step| pace.add(Moment(step * 10_000), mean * spread[at(*step)])).count()
    }

    #[test]
    fn the_mean_is_steady_while_nothing_changes() {
        let mut pace = Pace::default();
        assert_eq!(pace.expected(), None);
        assert_eq!(feed(&mut pace, 0, 1_000, 50_000.0), 0);
        for step in 1_000..1_100 {
            feed(&mut pace, step, 1, 50_000.0);
            let expected = pace.expected().expect("it is known");
            assert!((expected / 50_000.0 - 1.0).abs() < 0.03, "{expected}");
        }
    }

    #[test]
    fn a_step_is_followed_within_a_second_and_both_ways() {
        for factor in [3.0, 1.0 / 3.0] {
            let mut pace = Pace::default();
            feed(&mut pace, 0, 1_000, 50_000.0);
            feed(&mut pace, 1_000, 100, 50_000.0 * factor);
            let expected = pace.expected().expect("it is known");
            assert!((expected / (50_000.0 * factor) - 1.0).abs() < 0.10, "{factor}: {expected}");
        }
    }

    #[test]
    fn after_an_hour_the_past_counts_little() {
        let mut pace = Pace::default();
        feed(&mut pace, 0, 1_000, 50_000.0);
        for step in 0..8 {
            pace.add(Moment(3_600_000_000 + step * 1_000_000), 10_000.0);
        }
        let expected = pace.expected().expect("it is known");
        assert!(expected < 20_000.0, "{expected}");
    }
}
