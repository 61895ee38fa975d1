//! The list of all metrics of a process, and its text form.
//!
//! Not here: the counting (`series`).

use std::fmt::{self, Debug};

use prometheus_client::encoding::{EncodeMetric, text};
use prometheus_client::registry::Unit;

use crate::series::{Counter, CounterFamily, Gauge, Histogram};

/// One label and every value it can have.
#[derive(Clone, Copy)]
pub struct LabelDimension {
    pub label: &'static str,
    pub values: &'static [&'static str],
}

/// Declares metrics and writes them out. Names begin with `nagaya_`, which is added here. Units and
/// `_total` are appended as OpenMetrics demands, and are not part of the given names.
pub struct Registry(prometheus_client::registry::Registry);

/// A failed assertion shows its owner, not all metrics.
impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry").finish_non_exhaustive()
    }
}

impl fmt::Debug for LabelDimension {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.label, self.values.len())
    }
}

impl Default for Registry {
    fn default() -> Self {
        Self::new()
    }
}

impl Registry {
    pub fn new() -> Self {
        Self(prometheus_client::registry::Registry::with_prefix("nagaya"))
    }

    /// Declares a counter of events: `nagaya_{name}_total`.
    pub fn counter(&mut self, name: &str, help: &str) -> Counter {
        self.add(name, help, Counter::new())
    }

    /// Declares a counter of bytes: `nagaya_{name}_bytes_total`.
    pub fn bytes_counter(&mut self, name: &str, help: &str) -> Counter {
        let counter = Counter::new();
        self.0.register_with_unit(name, help, Unit::Bytes, counter.clone());
        counter
    }

    /// Declares counters with labels: `nagaya_{name}_total{...}`.
    pub fn counters<const D: usize>(
        &mut self,
        name: &str,
        help: &str,
        dimensions: [LabelDimension; D],
    ) -> CounterFamily<D> {
        self.add(name, help, CounterFamily::new(dimensions))
    }

    /// Declares counters of bytes with labels: `nagaya_{name}_bytes_total{...}`.
    pub fn bytes_counters<const D: usize>(
        &mut self,
        name: &str,
        help: &str,
        dimensions: [LabelDimension; D],
    ) -> CounterFamily<D> {
        let counters = CounterFamily::new(dimensions);
        self.0.register_with_unit(name, help, Unit::Bytes, counters.clone());
        counters
    }

    /// Declares sums of time with labels, added to in microseconds:
    /// `nagaya_{name}_seconds_total{...}`.
    pub fn time_counters<const D: usize>(
        &mut self,
        name: &str,
        help: &str,
        dimensions: [LabelDimension; D],
    ) -> CounterFamily<D> {
        let counters = CounterFamily::of_time(dimensions);
        self.0.register_with_unit(name, help, Unit::Seconds, counters.clone());
        counters
    }

    /// Declares a gauge: `nagaya_{name}`.
    pub fn gauge(&mut self, name: &str, help: &str) -> Gauge {
        self.add(name, help, Gauge::default())
    }

    /// Declares a histogram of durations: `nagaya_{name}_seconds_{bucket,sum,count}`. `bounds_us`
    /// are upper bounds, ascending, in microseconds.
    pub fn histogram(
        &mut self,
        name: &str,
        help: &str,
        dimension: LabelDimension,
        bounds_us: &'static [u64],
    ) -> Histogram {
        let histogram = Histogram::new(dimension, bounds_us);
        self.0.register_with_unit(name, help, Unit::Seconds, histogram.clone());
        histogram
    }

    /// Returns all metrics in Prometheus' text format, version 0.0.4 ("Exposition formats" in its
    /// documentation).
    pub fn encode(&self) -> String {
        let mut out = String::new();
        text::encode(&mut out, &self.0).expect("a String takes whatever is written to it");
        name_counters_by_samples(&out)
    }

    fn add<M>(&mut self, name: &str, help: &str, metric: M) -> M
    where
        M: EncodeMetric + Clone + Debug + Send + Sync + 'static,
    {
        self.0.register(name, help, metric.clone());
        metric
    }
}

/// Turns OpenMetrics text into Prometheus' older format. There, `HELP` and `TYPE` of a counter have
/// the name of its samples, which ends with `_total`, and nothing states units or the end.
fn name_counters_by_samples(openmetrics: &str) -> String {
    let mut out = String::with_capacity(openmetrics.len());
    let mut help: Option<&str> = None;
    for line in openmetrics.lines() {
        if line.starts_with("# HELP ") {
            // Its kind follows on the next line.
            help = Some(line);
            continue;
        }
        let counter = line.strip_prefix("# TYPE ").and_then(|rest| rest.strip_suffix(" counter"));
        if let Some(help) = help.take() {
            let text = counter.and_then(|name| help.strip_prefix("# HELP ")?.strip_prefix(name));
            match (counter, text) {
                (Some(name), Some(text)) => out.extend(["# HELP ", name, "_total", text, "\n"]),
                _ => out.extend([help, "\n"]),
            }
        }
        match counter {
            Some(name) => out.extend(["# TYPE ", name, "_total counter\n"]),
            None if line.starts_with("# UNIT ") || line == "# EOF" => {}
            None => out.extend([line, "\n"]),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const COLOUR: LabelDimension = LabelDimension { label: "colour", values: &["red", "blue"] };
    const SIZE: LabelDimension = LabelDimension { label: "size", values: &["s", "m", "l"] };

    #[test]
    fn debug_output_of_metrics_leaves_out_their_numbers() {
        let mut registry = Registry::new();
        let all: Vec<_> =
            (0..100).map(|n| registry.counters(&format!("n{n}"), "N", [COLOUR, SIZE])).collect();
        let shown = format!("{registry:?}");
        assert!(shown.len() < 100, "{} bytes", shown.len());
        let shown = format!("{:?}", all[0]);
        assert!(shown.len() < 200 && shown.contains("colour of 2"), "{} bytes: {shown:.300}", shown.len());
    }

    #[test]
    fn names_and_labels_come_out_in_prometheus_text_format() {
        let mut registry = Registry::new();
        let hats = registry.counter("hats", "Hats sold");
        let felt = registry.bytes_counter("felt", "Felt used");
        let by = registry.counters("hats_by", "Hats by kind", [COLOUR, SIZE]);
        let open = registry.gauge("shops_open", "Shops open now");
        let worn = registry.time_counters("worn", "Time hats were worn", [COLOUR]);
        let lace = registry.bytes_counters("lace", "Lace used", [COLOUR]);
        worn.add([1], 1_500_000);
        lace.add([0], 9);
        hats.add(3);
        felt.add(70);
        by.add([1, 2], 5);
        by.add([0, 0], 1);
        open.add(2);
        open.add(-3);
        assert_eq!(by.get([1, 2]), 5);
        let text = registry.encode();
        for line in [
            "# HELP nagaya_hats_total Hats sold.",
            "# TYPE nagaya_hats_total counter",
            "# TYPE nagaya_shops_open gauge",
            "nagaya_hats_total 3",
            "nagaya_felt_bytes_total 70",
            r#"nagaya_hats_by_total{colour="red",size="s"} 1"#,
            r#"nagaya_hats_by_total{colour="blue",size="l"} 5"#,
            "nagaya_shops_open -1",
            r#"nagaya_worn_seconds_total{colour="blue"} 1.5"#,
            r#"nagaya_lace_bytes_total{colour="red"} 9"#,
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is missing in\n{text}");
        }
        assert_eq!(text.matches("nagaya_hats_by_total{").count(), 2, "only what occurred");
        assert!(!text.contains("# UNIT") && !text.contains("# EOF"), "{text}");
    }

    #[test]
    fn a_histogram_counts_durations_in_the_first_fitting_bucket() {
        let mut registry = Registry::new();
        let fitting = registry.histogram("fitting", "Time to fit", COLOUR, &[1_000, 250_000]);
        for us in [0, 1_000, 1_001, 250_000, 250_001, 3_000_000] {
            fitting.observe(1, Duration::from_micros(us));
        }
        assert_eq!((fitting.count(0), fitting.count(1)), (0, 6));
        let text = registry.encode();
        for line in [
            "# TYPE nagaya_fitting_seconds histogram",
            r#"nagaya_fitting_seconds_bucket{le="0.001",colour="blue"} 2"#,
            r#"nagaya_fitting_seconds_bucket{le="0.25",colour="blue"} 4"#,
            r#"nagaya_fitting_seconds_bucket{le="+Inf",colour="blue"} 6"#,
            r#"nagaya_fitting_seconds_count{colour="blue"} 6"#,
            r#"nagaya_fitting_seconds_sum{colour="blue"} 3.502002"#,
            r#"nagaya_fitting_seconds_count{colour="red"} 0"#,
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is missing in\n{text}");
        }
    }
}
