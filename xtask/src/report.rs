//! Results of an experiment: raw samples, their medians and paired ratios, and the targets. It
//! writes the files and the table that show them.
//!
//! Not here: drawing a plot (`plot`), the machine (`facts`).

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::facts;
use crate::load::LoadOutcome;
use crate::plot::{Bar, Chart, Panel};

/// One measured number: `metric` of `variant` doing `case` in `round`.
#[derive(Debug, Clone)]
struct Sample {
    round: usize,
    case: String,
    variant: String,
    metric: &'static str,
    value: f64,
}

/// The required value of a key, and the goal.
#[derive(Debug, Clone, Copy)]
pub struct Goal {
    pub key: &'static str,
    pub bound: Bound,
    pub aim: f64,
}

#[derive(Debug, Clone, Copy)]
pub enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

impl Bound {
    fn holds(self, value: f64) -> bool {
        match self {
            Self::AtLeast(bound) => value >= bound,
            Self::AtMost(bound) => value <= bound,
        }
    }

    fn text(self) -> String {
        match self {
            Self::AtLeast(bound) => format!(">= {}", number(bound)),
            Self::AtMost(bound) => format!("<= {}", number(bound)),
        }
    }
}

/// All of one experiment's results.
#[derive(Debug)]
pub struct Report {
    name: &'static str,
    samples: Vec<Sample>,
    /// Top level of the JSON file: flat keys, in this order.
    metrics: Vec<(String, f64)>,
    notes: BTreeMap<String, Value>,
}

impl Report {
    pub fn new(name: &'static str) -> Self {
        Self { name, samples: Vec::new(), metrics: Vec::new(), notes: BTreeMap::new() }
    }

    pub fn sample(&mut self, round: usize, case: &str, variant: &str, metric: &'static str, value: f64) {
        self.samples.push(Sample { round, case: case.into(), variant: variant.into(), metric, value });
    }

    /// Adds all numbers of one load run, and the server's CPU time for each request.
    pub fn outcome(
        &mut self,
        round: usize,
        case: &str,
        variant: &str,
        outcome: &LoadOutcome,
        cpu_seconds: f64,
    ) {
        let values = [
            ("rps", outcome.rps),
            ("p50_ms", outcome.p50_ms),
            ("p99_ms", outcome.p99_ms),
            ("max_ms", outcome.max_ms),
            ("mib_per_second", outcome.mib_per_second),
            ("cpu_us_per_request", cpu_seconds * 1e6 / outcome.requests),
        ];
        for (metric, value) in values {
            self.sample(round, case, variant, metric, value);
        }
    }

    /// Sets a key of the result file.
    pub fn set(&mut self, key: impl Into<String>, value: f64) {
        self.metrics.push((key.into(), value));
    }

    pub fn get(&self, key: &str) -> Option<f64> {
        self.metrics.iter().find(|(k, _)| k == key).map(|(_, value)| *value)
    }

    /// Notes a fact that is not a number: the load, and choices with their reasons.
    pub fn note(&mut self, key: &str, value: Value) {
        self.notes.insert(key.into(), value);
    }

    /// Returns the values of all rounds, by round.
    fn values(&self, case: &str, variant: &str, metric: &str) -> Vec<(usize, f64)> {
        let wanted = |s: &&Sample| s.case == case && s.variant == variant && s.metric == metric;
        self.samples.iter().filter(wanted).map(|s| (s.round, s.value)).collect()
    }

    /// Returns the median over the rounds; an error if this was never measured.
    pub fn median(&self, case: &str, variant: &str, metric: &str) -> Result<f64> {
        median(self.values(case, variant, metric).into_iter().map(|(_, value)| value).collect())
            .with_context(|| format!("{}: no {metric} of {variant} doing {case}", self.name))
    }

    /// Returns the median of the ratios within each round. Both of a pair ran within seconds of
    /// each other. So a slow phase of the whole machine does not affect the ratio.
    pub fn ratio(&self, case: &str, variant: &str, peer: &str, metric: &str) -> Result<f64> {
        let peers: BTreeMap<usize, f64> = self.values(case, peer, metric).into_iter().collect();
        let pairs = self.values(case, variant, metric);
        median(pairs.into_iter().filter_map(|(round, value)| Some(value / peers.get(&round)?)).collect())
            .with_context(|| format!("{}: no {metric} of {variant} and {peer} doing {case}", self.name))
    }

    /// Returns the median of the differences within each round.
    pub fn difference(&self, case: &str, variant: &str, peer: &str, metric: &str) -> Result<f64> {
        let peers: BTreeMap<usize, f64> = self.values(case, peer, metric).into_iter().collect();
        let pairs = self.values(case, variant, metric);
        median(pairs.into_iter().filter_map(|(round, value)| Some(value - peers.get(&round)?)).collect())
            .with_context(|| format!("{}: no {metric} of {variant} and {peer} doing {case}", self.name))
    }

    /// Returns the sum over all rounds.
    pub fn sum(&self, case: &str, variant: &str, metric: &str) -> f64 {
        self.values(case, variant, metric).into_iter().map(|(_, value)| value).sum()
    }

    /// Returns the one of `variants` with the highest median.
    pub fn best<'v>(&self, case: &str, variants: &[&'v str], metric: &str) -> Result<&'v str> {
        let mut best: Option<(f64, &str)> = None;
        for variant in variants {
            let value = self.median(case, variant, metric)?;
            if best.is_none_or(|(most, _)| value > most) {
                best = Some((value, variant));
            }
        }
        best.map(|(_, variant)| variant).context("best of nothing")
    }

    /// Returns one panel of the plot: a bar for each variant, with the least and the greatest round
    /// as whiskers.
    pub fn panel(&self, title: &str, unit: &str, case: &str, metric: &str, variants: &[&str]) -> Panel {
        let bars = variants.iter().filter_map(|variant| {
            let values: Vec<f64> = self.values(case, variant, metric).into_iter().map(|(_, v)| v).collect();
            Some(Bar {
                label: (*variant).into(),
                min: values.iter().copied().reduce(f64::min)?,
                max: values.iter().copied().reduce(f64::max)?,
                value: median(values)?,
            })
        });
        Panel { title: title.into(), unit: unit.into(), bars: bars.collect() }
    }

    /// Writes `NAME.json`, `NAME.csv` and `NAME.svg`, and prints the table.
    pub fn write(&self, out: &Path, chart: &Chart, goals: &[Goal]) -> Result<()> {
        fs::create_dir_all(out).with_context(|| format!("creating {}", out.display()))?;
        let file = |ending: &str, text: String| {
            let path = out.join(format!("{}.{ending}", self.name));
            fs::write(&path, text).with_context(|| format!("writing {}", path.display()))
        };
        file("json", self.json(goals)?)?;
        file("csv", self.csv())?;
        file("svg", chart.svg())?;
        print!("{}", self.table(goals));
        println!("written: {}/{}.{{json,csv,svg}}", out.display(), self.name);
        Ok(())
    }

    fn json(&self, goals: &[Goal]) -> Result<String> {
        let mut whole = serde_json::Map::new();
        whole.insert("experiment".into(), json!(self.name));
        for (key, value) in &self.metrics {
            whole.insert(key.clone(), json!(round_to_significant(*value)));
        }
        let goals = goals.iter().filter_map(|goal| {
            let value = self.get(goal.key)?;
            let verdict =
                json!({"target": goal.bound.text(), "aim": goal.aim, "reached": goal.bound.holds(value)});
            Some((goal.key.to_string(), verdict))
        });
        whole.insert("targets".into(), Value::Object(goals.collect()));
        whole.insert("setting".into(), json!(self.notes));
        whole.insert("machine".into(), Value::Object(facts::gather()));
        let mut text = serde_json::to_string_pretty(&whole).context("writing JSON")?;
        text.push('\n');
        Ok(text)
    }

    fn csv(&self) -> String {
        let mut text = String::from("round,case,variant,metric,value\n");
        for s in &self.samples {
            text.push_str(&format!("{},{},{},{},{}\n", s.round, s.case, s.variant, s.metric, s.value));
        }
        text
    }

    /// Returns keys, their values and their targets.
    pub fn table(&self, goals: &[Goal]) -> String {
        let width = self.metrics.iter().map(|(key, _)| key.len()).max().unwrap_or(0).max(3);
        let mut text = format!("{:width$}  {:>12}  {:>10}  {:>8}\n", "key", "measured", "target", "aim");
        for (key, value) in &self.metrics {
            text.push_str(&format!("{key:width$}  {:>12}", number(*value)));
            if let Some(goal) = goals.iter().find(|goal| goal.key == key) {
                let verdict = if goal.bound.holds(*value) { "reached" } else { "MISSED" };
                text.push_str(&format!("  {:>10}  {:>8}  {verdict}", goal.bound.text(), number(goal.aim)));
            }
            text.push('\n');
        }
        text
    }
}

/// Returns the middle value; with an even count the mean of the middle two.
pub fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    let upper = *values.get(middle)?;
    if values.len() % 2 == 1 { Some(upper) } else { Some(f64::midpoint(values[middle - 1], upper)) }
}

/// Formats a number for people: with all significant digits.
pub fn number(value: f64) -> String {
    match value.abs() {
        v if v >= 1000.0 => {
            let digits = format!("{:.0}", v.round());
            let mut grouped = String::new();
            for (index, digit) in digits.chars().enumerate() {
                if index > 0 && (digits.len() - index).is_multiple_of(3) {
                    grouped.push(',');
                }
                grouped.push(digit);
            }
            if value < 0.0 { format!("-{grouped}") } else { grouped }
        }
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 0.1 || v == 0.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

/// Rounds to six significant digits: more would be noise in a file that people compare.
pub fn round_to_significant(value: f64) -> f64 {
    format!("{value:.5e}").parse().unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_paired_ratios() {
        assert_eq!(median(vec![]), None);
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), Some(2.5));

        let mut report = Report::new("x");
        // The machine halves its speed in the second round; the ratio stays 2 in every round but the last.
        for (round, (a, b)) in [(200.0, 100.0), (100.0, 50.0), (200.0, 50.0)].into_iter().enumerate() {
            report.sample(round, "hello", "a", "rps", a);
            report.sample(round, "hello", "b", "rps", b);
        }
        assert_eq!(report.ratio("hello", "a", "b", "rps").unwrap(), 2.0);
        assert_eq!(report.difference("hello", "a", "b", "rps").unwrap(), 100.0);
        assert_eq!(report.sum("hello", "b", "rps"), 200.0);
        assert_eq!(report.median("hello", "b", "rps").unwrap(), 50.0);
        assert_eq!(report.best("hello", &["b", "a"], "rps").unwrap(), "a");
        assert!(report.median("hello", "c", "rps").is_err());
    }

    #[test]
    fn the_table_says_what_was_missed() {
        let mut report = Report::new("x");
        report.set("ratio", 1.2);
        report.set("rss_mb", 500.0);
        let goals = [
            Goal { key: "ratio", bound: Bound::AtLeast(1.15), aim: 1.5 },
            Goal { key: "rss_mb", bound: Bound::AtMost(400.0), aim: 200.0 },
        ];
        let table = report.table(&goals);
        assert!(table.lines().any(|line| line.starts_with("ratio") && line.ends_with("reached")), "{table}");
        assert!(table.lines().any(|line| line.starts_with("rss_mb") && line.ends_with("MISSED")), "{table}");
    }

    #[test]
    fn numbers_are_short_and_grouped() {
        assert_eq!(number(175_438.14), "175,438");
        assert_eq!(number(-1_234.0), "-1,234");
        assert_eq!(number(12.34), "12.3");
        assert_eq!(number(1.154), "1.15");
        assert_eq!(number(0.0412), "0.0412");
    }
}
