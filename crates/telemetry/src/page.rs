//! Metrics whose labels are known only when a scraper asks: tenants, nodes, lanes, processes.
//!
//! The owner of the numbers copies them into a page. The crate prometheus-client writes the text.
//! Not here: metrics with fixed labels (`registry`).

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeGaugeValue, GaugeValueEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use crate::series::seconds;

/// The families of one scrape, in the order in which they were added.
///
/// Names are written as they are given, with `nagaya_`, unit and `_total`.
#[derive(Debug, Default)]
pub struct MetricPage(Vec<MetricFamily>);

/// A metric and its samples.
#[derive(Debug)]
pub struct MetricFamily {
    name: &'static str,
    help: &'static str,
    kind: MetricType,
    samples: Vec<MetricSample>,
}

#[derive(Debug)]
struct MetricSample {
    labels: Vec<(&'static str, String)>,
    value: SampleValue,
}

#[derive(Debug)]
enum SampleValue {
    Number(MetricValue),
    Histogram(HistogramSample),
}

/// The durations that were observed under one set of labels.
#[derive(Debug)]
pub struct HistogramSample {
    sum_seconds: f64,
    /// Upper bounds in seconds, ascending, and the number of durations above the bound before.
    buckets: Vec<(f64, u64)>,
}

impl HistogramSample {
    /// `bounds_us` are upper bounds, ascending, in microseconds. `counts` has one number more: that
    /// of the durations above all bounds.
    pub fn of_us(bounds_us: &[u64], counts: &[u64], sum_us: u64) -> Self {
        let bounds = bounds_us.iter().copied().map(seconds).chain([f64::INFINITY]);
        Self { sum_seconds: seconds(sum_us), buckets: bounds.zip(counts.iter().copied()).collect() }
    }
}

/// The value of a sample.
#[derive(Debug, Clone, Copy)]
pub enum MetricValue {
    Whole(u64),
    Signed(i64),
    Real(f64),
}

impl MetricPage {
    /// Adds a family of values that only grow.
    pub fn counters(&mut self, name: &'static str, help: &'static str) -> &mut MetricFamily {
        self.family(name, help, MetricType::Counter)
    }

    /// Adds a family of values that go up and down.
    pub fn gauges(&mut self, name: &'static str, help: &'static str) -> &mut MetricFamily {
        self.family(name, help, MetricType::Gauge)
    }

    /// Adds a family of histograms of durations.
    pub fn histograms(&mut self, name: &'static str, help: &'static str) -> &mut MetricFamily {
        self.family(name, help, MetricType::Histogram)
    }

    fn family(&mut self, name: &'static str, help: &'static str, kind: MetricType) -> &mut MetricFamily {
        self.0.push_mut(MetricFamily { name, help, kind, samples: Vec::new() })
    }

    /// Returns the page as text, without `# EOF`.
    pub fn encode(self) -> String {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(self));
        let mut out = String::new();
        text::encode_registry(&mut out, &registry).expect("a String takes whatever is written to it");
        out
    }
}

impl MetricFamily {
    /// Adds a sample. The values of its labels may be any text.
    pub fn add<const D: usize>(&mut self, labels: [(&'static str, &str); D], value: impl Into<MetricValue>) {
        self.push(labels, SampleValue::Number(value.into()));
    }

    /// Adds a histogram, with at least one label. The values of its labels may be any text.
    pub fn add_histogram<const D: usize>(
        &mut self,
        labels: [(&'static str, &str); D],
        histogram: HistogramSample,
    ) {
        self.push(labels, SampleValue::Histogram(histogram));
    }

    fn push<const D: usize>(&mut self, labels: [(&'static str, &str); D], value: SampleValue) {
        let labels = labels.into_iter().map(|(label, value)| (label, value.to_owned())).collect();
        self.samples.push(MetricSample { labels, value });
    }
}

impl Collector for MetricPage {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for MetricFamily { name, help, kind, samples } in &self.0 {
            let mut family = encoder.encode_descriptor(name, help, None, *kind)?;
            for MetricSample { labels, value } in samples {
                // The crate appends `_total` to each counter, as OpenMetrics demands. In the text
                // format of Prometheus `# TYPE` has the whole name, so here it is part of the name.
                // The crate writes a gauge's name as it is.
                match value {
                    SampleValue::Number(value) if labels.is_empty() => family.encode_gauge(value)?,
                    SampleValue::Number(value) => family.encode_family(labels)?.encode_gauge(value)?,
                    SampleValue::Histogram(HistogramSample { sum_seconds, buckets }) => {
                        let count = buckets.iter().map(|(_, count)| count).sum();
                        family.encode_family(labels)?.encode_histogram::<NoLabelSet>(
                            *sum_seconds,
                            count,
                            buckets,
                            None,
                        )?;
                    }
                }
            }
        }
        Ok(())
    }
}

impl EncodeGaugeValue for MetricValue {
    fn encode(&self, encoder: &mut GaugeValueEncoder<'_>) -> fmt::Result {
        match self {
            Self::Whole(value) => value.encode(encoder),
            Self::Signed(value) => value.encode(encoder),
            Self::Real(value) => value.encode(encoder),
        }
    }
}

impl From<u64> for MetricValue {
    fn from(value: u64) -> Self {
        Self::Whole(value)
    }
}

impl From<u32> for MetricValue {
    fn from(value: u32) -> Self {
        Self::Whole(value.into())
    }
}

impl From<i64> for MetricValue {
    fn from(value: i64) -> Self {
        Self::Signed(value)
    }
}

impl From<f64> for MetricValue {
    fn from(value: f64) -> Self {
        Self::Real(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_help_are_written_as_they_are_given() {
        let mut page = MetricPage::default();
        let hats = page.counters("nagaya_hats_total", "Hats sold");
        hats.add([("shop", "a"), ("size", "s")], 3u64);
        hats.add([("shop", "b"), ("size", "l")], u64::MAX);
        page.counters("nagaya_felt_total", "Felt used.");
        page.gauges("nagaya_open", "Shops open now").add([], -1i64);
        page.gauges("nagaya_open_seconds", "Time open").add([("shop", "a")], 0.25);
        let expected = "# HELP nagaya_hats_total Hats sold\n\
            # TYPE nagaya_hats_total counter\n\
            nagaya_hats_total{shop=\"a\",size=\"s\"} 3\n\
            nagaya_hats_total{shop=\"b\",size=\"l\"} 18446744073709551615\n\
            # HELP nagaya_felt_total Felt used.\n\
            # TYPE nagaya_felt_total counter\n\
            # HELP nagaya_open Shops open now\n\
            # TYPE nagaya_open gauge\n\
            nagaya_open -1\n\
            # HELP nagaya_open_seconds Time open\n\
            # TYPE nagaya_open_seconds gauge\n\
            nagaya_open_seconds{shop=\"a\"} 0.25\n";
        assert_eq!(page.encode(), expected);
    }

    #[test]
    fn label_values_are_escaped() {
        let mut page = MetricPage::default();
        page.gauges("nagaya_open", "Shops").add([("shop", "a\"b\\c\nd")], 1u64);
        let text = page.encode();
        assert!(text.ends_with("\nnagaya_open{shop=\"a\\\"b\\\\c\\nd\"} 1\n"), "{text}");
    }
}
