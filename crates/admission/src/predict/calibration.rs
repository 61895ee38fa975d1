//! Measures the quality of predictions, and corrects later ones.
//!
//! Two things are learned. The first is the factor between real waits and the computed sum. For
//! example, clients that leave make the queue shorter, and failed requests free their permit
//! sooner. The second is the ratio to the prediction within which nine of ten waits end. The factor
//! is relative to the computed wait, not to the predicted one. So it does not feed on itself.
//!
//! Not here: the computation (`predict`, `machine::waits`).

use crate::{PredictionQuality, QuantileSketch};

/// Shorter waits are not counted. They are never shown, and a fraction of almost nothing says
/// nothing.
const WAIT_LEAST_US: f64 = 100_000.0;
/// Outcomes after which one weighs half as much.
const HALF_LIFE: u32 = 500;
/// Fewest outcomes from which anything is concluded.
const OUTCOMES_LEAST: u64 = 50;
/// Limits of the factor. A larger difference is not a habit of clients, but a mistake that should
/// show.
const FACTOR_LEAST: f64 = 0.5;
const FACTOR_MOST: f64 = 2.0;
/// Ratios are stored in thousandths, because a sketch resolves numbers of 1 and more.
const RATIO_SCALE: f64 = 1_000.0;
/// Errors are stored in hundredths of a percent.
const ERROR_SCALE: f64 = 100.0;

/// One wait that ended with a permit, in microseconds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WaitOutcome {
    /// Wait computed from the work ahead.
    pub(crate) reckoned: f64,
    /// Wait that was predicted.
    pub(crate) told: f64,
    pub(crate) actual: f64,
}

#[derive(Debug)]
pub(crate) struct PredictionRecord {
    count: u64,
    untold: u64,
    /// `|told - actual| / actual`.
    error: QuantileSketch,
    /// `actual / told`.
    ratio: QuantileSketch,
    /// Fading sums.
    told: f64,
    actual: f64,
    factor: BiasFactor,
}

/// Fading sums since the last change of pace.
#[derive(Debug, Default, Clone, Copy)]
struct BiasFactor {
    count: u64,
    reckoned: f64,
    actual: f64,
}

impl Default for PredictionRecord {
    fn default() -> Self {
        let error = QuantileSketch::new(HALF_LIFE);
        let ratio = QuantileSketch::new(HALF_LIFE);
        Self { count: 0, untold: 0, error, ratio, told: 0.0, actual: 0.0, factor: BiasFactor::default() }
    }
}

impl PredictionRecord {
    /// Counts a wait that has ended. `is_current` is set if the pace was well known at the
    /// prediction, and has not changed since.
    pub(crate) fn add(&mut self, outcome: WaitOutcome, is_current: bool) {
        let WaitOutcome { reckoned, told, actual } = outcome;
        let fade = 0.5f64.powf(1.0 / f64::from(HALF_LIFE));
        if is_current && reckoned.max(actual) >= WAIT_LEAST_US {
            self.factor.count += 1;
            self.factor.reckoned = self.factor.reckoned * fade + reckoned;
            self.factor.actual = self.factor.actual * fade + actual;
        }
        if actual >= WAIT_LEAST_US {
            self.count += 1;
            self.error.add((told - actual).abs() / actual * 100.0 * ERROR_SCALE);
            self.ratio.add(actual / told.max(1.0) * RATIO_SCALE);
            self.told = self.told * fade + told;
            self.actual = self.actual * fade + actual;
        }
    }

    /// Counts a wait without a prediction.
    pub(crate) fn add_untold(&mut self, actual: f64) {
        self.untold += u64::from(actual >= WAIT_LEAST_US);
    }

    /// Returns the factor from the computed to the predicted wait.
    pub(crate) fn factor(&self) -> f64 {
        if self.factor.count < OUTCOMES_LEAST || self.factor.reckoned <= 0.0 {
            return 1.0;
        }
        (self.factor.actual / self.factor.reckoned).clamp(FACTOR_LEAST, FACTOR_MOST)
    }

    /// Returns the ratio to the prediction within which nine of ten waits ended. `None` if there
    /// are too few so far.
    pub(crate) fn at_most(&self) -> Option<f64> {
        let ratio = self.ratio.quantile(0.9).filter(|_| self.ratio.count() >= OUTCOMES_LEAST)?;
        Some((ratio / RATIO_SCALE).max(1.0))
    }

    /// Returns the figures for people.
    pub(crate) fn published(&self) -> PredictionQuality {
        let percent = |q| self.error.quantile(q).map(|error| error / ERROR_SCALE);
        PredictionQuality {
            predictions: self.count,
            untold: self.untold,
            error_p50_pct: percent(0.5),
            error_p90_pct: percent(0.9),
            bias_pct: (self.actual > 0.0).then(|| (self.told - self.actual) / self.actual * 100.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_and_bias_are_those_of_what_was_told() {
        let mut record = PredictionRecord::default();
        assert_eq!(record.published(), PredictionQuality::default());
        for step in 0..1_000 {
            let told = if step % 10 == 0 { 1_500_000.0 } else { 1_100_000.0 };
            record.add(WaitOutcome { reckoned: told, told, actual: 1_000_000.0 }, true);
            record.add(WaitOutcome { reckoned: told, told, actual: 50_000.0 }, true);
        }
        record.add_untold(50_000.0);
        record.add_untold(150_000.0);
        let published = record.published();
        assert_eq!((published.predictions, published.untold), (1_000, 1));
        assert!(published.error_p50_pct.is_some_and(|error| (9.0..11.0).contains(&error)), "{published:?}");
        assert!(published.bias_pct.is_some_and(|bias| (13.0..15.0).contains(&bias)), "{published:?}");
        assert_eq!(record.at_most(), Some(1.0));
    }

    #[test]
    fn a_steady_difference_becomes_a_factor_within_bounds() {
        for (actual, factor) in [(800_000.0, 0.8), (1_300_000.0, 1.3), (9_000_000.0, 2.0), (100_000.0, 0.5)] {
            let mut record = PredictionRecord::default();
            assert!((record.factor() - 1.0).abs() < 1e-9);
            for _ in 0..1_000 {
                let told = 1_000_000.0 * record.factor();
                record.add(WaitOutcome { reckoned: 1_000_000.0, told, actual }, true);
            }
            assert!((record.factor() - factor).abs() < 0.01, "{actual}: {}", record.factor());
            let late = record.at_most().expect("there were enough");
            assert!(late >= 1.0);
        }
    }

    #[test]
    fn predictions_from_before_a_change_teach_no_factor() {
        let mut record = PredictionRecord::default();
        for _ in 0..1_000 {
            record.add(WaitOutcome { reckoned: 1e6, told: 1e6, actual: 3e6 }, false);
        }
        assert!((record.factor() - 1.0).abs() < 1e-9);
        assert_eq!(record.published().predictions, 1_000);
    }
}
