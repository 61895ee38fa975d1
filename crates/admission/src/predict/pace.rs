//! Estimates the service time of one kind: a mean that is steady while nothing changes and quick
//! after a change.
//!
//! A long memory has little noise and follows slowly; a short one is the opposite. Both are
//! maintained. While they agree within chance, the long one counts. The more they differ, the more
//! the short one counts. If chance does not explain the difference at all, the past is dropped.
//!
//! Not here: which requests are of one kind (`predict`).

use crate::Moment;

/// Samples in the long memory.
const LONG: f32 = 400.0;
/// Samples in the short memory.
const SHORT: f32 = 24.0;
/// Time after which a sample weighs half as much as a new one, if few come.
const HALF_LIFE_US: f32 = 30e6;
/// The rest of an old memory still counts as one sample.
const LEAST: f32 = 1.0;
/// Standard errors of difference from which on the short memory begins to count.
const DOUBT: f32 = 2.0;
/// Standard errors of difference from which on the short memory replaces the long one.
const CERTAIN: f32 = 4.5;
/// Samples from which on a mean is reliable.
const SURE: f32 = 16.0;
/// Samples from which on a mean is more than an accident.
const FAIR: f32 = 2.0;
/// Samples for which the estimate counts after a change: few, as the short memory still has some
/// from before it.
const AFTER_CHANGE: f32 = 4.0;

/// Least and greatest remaining service of a request, as parts of the service. The least applies if
/// it should have ended already.
const REST_LEAST: f64 = 0.05;
const REST_MOST: f64 = 3.0;

/// Service times of one kind of request, in microseconds.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ServicePace {
    /// Samples in the long memory, faded; 0 if nothing is known.
    held: f32,
    mean: f32,
    variance: f32,
    short: f32,
    short_held: f32,
    /// Expected service time, from both memories.
    expected: f32,
    last: Moment,
}

impl ServicePace {
    pub(crate) fn is_known(&self) -> bool {
        self.held > 0.0
    }

    /// Returns whether there are enough samples for a reliable mean.
    pub(crate) fn is_sure(&self) -> bool {
        self.held >= SURE
    }

    /// Returns whether it rests on more than one sample.
    pub(crate) fn is_fair(&self) -> bool {
        self.held >= FAIR
    }

    /// Adds a sample. Returns true if the pace has changed by more than chance explains, so that
    /// the past was dropped.
    pub(crate) fn add(&mut self, now: Moment, sample: f32) -> bool {
        if self.held > 0.0 {
            let idle = now.0.saturating_sub(self.last.0) as f32 / HALF_LIFE_US;
            // Normally almost no time has passed, and this runs for each request.
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

    /// Scales all samples so far by a factor.
    pub(crate) fn scale(&mut self, by: f32) {
        self.mean *= by;
        self.short *= by;
        self.expected *= by;
        self.variance *= by * by;
    }

    /// Returns how much longer a later pace takes, as a logarithm. 0 if one of them is not well
    /// known.
    pub(crate) fn moved_to(&self, later: &Self) -> f32 {
        let moved = later.expected.max(1.0) / self.expected.max(1.0);
        if self.is_fair() && moved != 1.0 { moved.ln() } else { 0.0 }
    }

    /// Returns the expected service time. `None` if nothing is known.
    pub(crate) fn expected(&self) -> Option<f32> {
        self.is_known().then_some(self.expected)
    }

    /// Returns the average remaining service of a request that has run for this long. If all take
    /// equally long, the time it has run is done. If they vary at random, its age says nothing
    /// about the rest. In between, the result is in between. If few take very long, an old request
    /// will run for long.
    pub(crate) fn rest(&self, has_run: f64) -> Option<f64> {
        let service = f64::from(self.expected()?);
        let spread = f64::from(self.spread());
        // The mean rest of a generalized Pareto distribution, which covers each of these cases by
        // its spread.
        let rest = service + has_run * (spread - 1.0) / (spread + 1.0);
        Some(rest.clamp(service * REST_LEAST, service * REST_MOST))
    }

    /// Returns the part of all requests that runs for this long, by the same distribution. 1 if
    /// nothing is known.
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

    /// Returns the squared coefficient of variation. 0 means that all take equally long. 1 is as
    /// random as radioactive decay.
    pub(crate) fn spread(&self) -> f32 {
        if self.mean > 0.0 { self.variance / (self.mean * self.mean) } else { 1.0 }
    }

    /// Returns by how many standard errors the short memory differs from the long one.
    fn doubt(&self) -> f32 {
        if self.held < 2.0 * SHORT {
            return 0.0;
        }
        // A mean that forgets exponentially is as exact as one of twice as many samples.
        let error = (self.variance / (2.0 * SHORT - 1.0)).sqrt();
        // Without this, a kind that has never varied would make any small difference certain.
        (self.short - self.mean).abs() / error.max(self.mean * 0.01).max(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fed with a fixed spread around `mean`, one sample each 10 ms. The number of changes seen.
    fn feed(pace: &mut ServicePace, from: u64, count: u64, mean: f32) -> usize {
        let spread = [0.2f32, 1.9, 0.7, 0.4, 1.5, 1.0, 0.6, 2.4, 0.3, 1.0];
        let at = |step: u64| usize::try_from(step * 7 % 10).expect("small");
        (from..from + count).filter(|step| pace.add(Moment(step * 10_000), mean * spread[at(*step)])).count()
    }

    #[test]
    fn the_mean_is_steady_while_nothing_changes() {
        let mut pace = ServicePace::default();
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
            let mut pace = ServicePace::default();
            feed(&mut pace, 0, 1_000, 50_000.0);
            feed(&mut pace, 1_000, 100, 50_000.0 * factor);
            let expected = pace.expected().expect("it is known");
            assert!((expected / (50_000.0 * factor) - 1.0).abs() < 0.10, "{factor}: {expected}");
        }
    }

    #[test]
    fn after_an_hour_the_past_counts_little() {
        let mut pace = ServicePace::default();
        feed(&mut pace, 0, 1_000, 50_000.0);
        for step in 0..8 {
            pace.add(Moment(3_600_000_000 + step * 1_000_000), 10_000.0);
        }
        let expected = pace.expected().expect("it is known");
        assert!(expected < 20_000.0, "{expected}");
    }
}
