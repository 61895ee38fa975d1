//! The handles of metrics for code that counts, and their text form.
//!
//! Not here: their names (`registry`).

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

use crate::registry::LabelDimension;
use crate::shards::ShardedSums;

/// A value that only grows.
#[derive(Debug, Clone)]
pub struct Counter(Arc<ShardedSums>);

impl Counter {
    pub(crate) fn new() -> Self {
        Self(Arc::new(ShardedSums::new(1)))
    }

    #[inline]
    pub fn add(&self, n: u64) {
        self.0.add(0, n);
    }

    #[inline]
    pub fn inc(&self) {
        self.add(1);
    }

    pub fn get(&self) -> u64 {
        self.0.sum(0)
    }
}

impl EncodeMetric for Counter {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        encoder.encode_counter::<NoLabelSet, u64, f64>(&self.get(), None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Counter
    }
}

/// Counters that differ in `D` labels, each label with a closed set of values.
///
/// They count events, bytes, or microseconds. With more than one label, combinations that never
/// occurred are left out of the text.
#[derive(Debug, Clone)]
pub struct CounterFamily<const D: usize> {
    dimensions: [LabelDimension; D],
    cells: Arc<ShardedSums>,
    /// Counted in whole microseconds, written out in seconds.
    is_time: bool,
}

impl<const D: usize> CounterFamily<D> {
    pub(crate) fn new(dimensions: [LabelDimension; D]) -> Self {
        let width = dimensions.iter().map(|d| d.values.len()).product();
        Self { dimensions, cells: Arc::new(ShardedSums::new(width)), is_time: false }
    }

    pub(crate) fn of_time(dimensions: [LabelDimension; D]) -> Self {
        Self { is_time: true, ..Self::new(dimensions) }
    }

    /// Adds to a counter. `at` holds, for each label, the position of its value in the declaration.
    #[inline]
    pub fn add(&self, at: [usize; D], n: u64) {
        self.cells.add(self.index(at), n);
    }

    pub fn get(&self, at: [usize; D]) -> u64 {
        self.cells.sum(self.index(at))
    }

    #[inline]
    fn index(&self, at: [usize; D]) -> usize {
        let mut index = 0;
        for (dimension, at) in self.dimensions.iter().zip(at) {
            debug_assert!(at < dimension.values.len(), "no value {at} in label {}", dimension.label);
            index = index * dimension.values.len() + at;
        }
        index
    }
}

impl<const D: usize> EncodeMetric for CounterFamily<D> {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let width: usize = self.dimensions.iter().map(|d| d.values.len()).product();
        for index in 0..width {
            let value = self.cells.sum(index);
            if value == 0 && D > 1 {
                continue;
            }
            let mut labels = [("", ""); D];
            let mut rest = index;
            for (label, dimension) in labels.iter_mut().zip(&self.dimensions).rev() {
                *label = (dimension.label, dimension.values[rest % dimension.values.len()]);
                rest /= dimension.values.len();
            }
            let mut series = encoder.encode_family(&labels)?;
            if self.is_time {
                series.encode_counter::<NoLabelSet, f64, f64>(&seconds(value), None)?;
            } else {
                series.encode_counter::<NoLabelSet, u64, f64>(&value, None)?;
            }
        }
        Ok(())
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Counter
    }
}

/// A value that goes up and down, or is set. It has one cell: it is for changes per connection or
/// process, not per request.
#[derive(Debug, Clone, Default)]
pub struct Gauge(Arc<AtomicI64>);

impl Gauge {
    pub fn inc(&self) {
        self.add(1);
    }

    pub fn dec(&self) {
        self.add(-1);
    }

    pub fn add(&self, n: i64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub fn set(&self, value: i64) {
        self.0.store(value, Ordering::Relaxed);
    }

    pub fn get(&self) -> i64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl EncodeMetric for Gauge {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        encoder.encode_gauge(&self.get())
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Gauge
    }
}

/// Durations by one label. Stored in whole microseconds, written out in seconds.
#[derive(Debug, Clone)]
pub struct Histogram {
    dimension: LabelDimension,
    bounds_us: &'static [u64],
    /// For each label value: one cell per bound, one above all bounds, one for the sum of
    /// microseconds.
    cells: Arc<ShardedSums>,
}

impl Histogram {
    pub(crate) fn new(dimension: LabelDimension, bounds_us: &'static [u64]) -> Self {
        assert!(bounds_us.is_sorted(), "bounds of a histogram ascend");
        let width = dimension.values.len() * (bounds_us.len() + 2);
        Self { dimension, bounds_us, cells: Arc::new(ShardedSums::new(width)) }
    }

    /// Adds a duration. `at` is the position of the label's value in the declaration.
    #[inline]
    pub fn observe(&self, at: usize, took: Duration) {
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let bucket = self.bounds_us.partition_point(|bound| *bound < us);
        let first = at * (self.bounds_us.len() + 2);
        self.cells.add(first + bucket, 1);
        self.cells.add(first + self.bounds_us.len() + 1, us);
    }

    /// Returns the number of observations with this label value.
    pub fn count(&self, at: usize) -> u64 {
        let first = at * (self.bounds_us.len() + 2);
        (first..=first + self.bounds_us.len()).map(|index| self.cells.sum(index)).sum()
    }
}

#[expect(clippy::cast_precision_loss, reason = "2^53 us are 285 years")]
pub(crate) fn seconds(us: u64) -> f64 {
    us as f64 / 1e6
}

impl EncodeMetric for Histogram {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        for (at, value) in self.dimension.values.iter().enumerate() {
            let first = at * (self.bounds_us.len() + 2);
            let bounds = self.bounds_us.iter().map(|us| seconds(*us)).chain([f64::INFINITY]);
            let buckets: Vec<(f64, u64)> =
                bounds.zip(first..).map(|(bound, index)| (bound, self.cells.sum(index))).collect();
            let count = buckets.iter().map(|(_, n)| n).sum();
            let sum = seconds(self.cells.sum(first + self.bounds_us.len() + 1));
            encoder
                .encode_family(&[(self.dimension.label, *value)])?
                .encode_histogram::<NoLabelSet>(sum, count, &buckets, None)?;
        }
        Ok(())
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}
