//! One experiment's run as `docs/measurements` stores it: its results, the machine and the values
//! of all rounds.
//!
//! It is made from the `NAME.json` and `NAME.csv` of `report`. Long settings and long series are
//! cut. Not here: which of several runs is stored (`measurements`), and the page (`page`).

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::report::{median, round_to_significant};

/// Most values of a series that is stored whole. A longer one is stored as its summary: single
/// requests are too many for a file that people compare.
const SERIES_VALUES_MAX: usize = 64;

/// Most bytes of JSON of a setting that is stored. A longer one is left out: some experiments write
/// down each request that they followed.
const SETTING_BYTES_MAX: usize = 256;

/// One experiment's run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StoredRun {
    pub experiment: String,
    /// The experiment's own conclusions: medians, and ratios paired by round.
    pub results: BTreeMap<String, f64>,
    pub targets: BTreeMap<String, Target>,
    setting: Map<String, Value>,
    machine: Map<String, Value>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub series: Vec<SampleSeries>,
}

/// The bound that a result must keep to, and whether it did.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Target {
    pub target: String,
    pub aim: f64,
    pub reached: bool,
}

/// All values of one metric of one variant that did one case.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SampleSeries {
    pub case: String,
    pub variant: String,
    pub metric: String,
    pub values: SeriesValues,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(untagged)]
pub enum SeriesValues {
    /// Round and value, in the order of measuring.
    Rounds(Vec<(usize, f64)>),
    Summary(Summary),
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    pub median: f64,
    pub least: f64,
    pub greatest: f64,
    pub runs: usize,
}

impl StoredRun {
    /// Reads a stored file.
    pub fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
        serde_json::from_str(&text).with_context(|| format!("{}", path.display()))
    }

    /// Reads an experiment's `NAME.json`, and `NAME.csv` beside it. `None` if the file is no
    /// experiment's.
    pub fn from_result(path: &Path) -> Result<Option<Self>> {
        let text = fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
        let Ok(Value::Object(mut whole)) = serde_json::from_str(&text) else { return Ok(None) };
        let name = whole.remove("experiment").and_then(|name| Some(name.as_str()?.to_owned()));
        let stem = path.file_stem().and_then(|stem| stem.to_str());
        let Some(name) = name.filter(|name| stem == Some(name.as_str())) else { return Ok(None) };
        let setting = short_settings(take_object(&mut whole, "setting"));
        let machine = take_object(&mut whole, "machine");
        let targets = Value::Object(take_object(&mut whole, "targets"));
        let targets =
            serde_json::from_value(targets).with_context(|| format!("targets in {}", path.display()))?;
        let csv = path.with_extension("csv");
        let csv = fs::read_to_string(&csv).with_context(|| format!("reading {}", csv.display()))?;
        Ok(Some(Self {
            experiment: name,
            results: whole.into_iter().filter_map(|(key, value)| Some((key, value.as_f64()?))).collect(),
            targets,
            setting,
            machine,
            series: read_series(&csv).with_context(|| format!("samples of {}", path.display()))?,
        }))
    }

    /// The text of the stored file, with each series on a line of its own.
    pub fn text(&self) -> Result<String> {
        let head = Self { series: Vec::new(), ..self.clone() };
        let head = serde_json::to_string_pretty(&head).context("writing JSON")?;
        let head = head.trim_end().trim_end_matches('}').trim_end();
        let lines: Result<Vec<_>, _> = self.series.iter().map(serde_json::to_string).collect();
        let lines = lines.context("writing JSON")?.join(",\n    ");
        Ok(format!("{head},\n  \"series\": [\n    {lines}\n  ]\n}}\n"))
    }

    /// When the run ended, in UTC by ISO 8601; empty if that is not known.
    pub fn date(&self) -> &str {
        self.machine_fact("date").unwrap_or_default()
    }

    /// A fact of the machine that is a text. `None` if it could not be found out.
    pub fn machine_fact(&self, key: &str) -> Option<&str> {
        self.machine.get(key)?.as_str()
    }

    /// A fact of the machine that is a count. `None` if it could not be found out.
    pub fn machine_count(&self, key: &str) -> Option<u64> {
        self.machine.get(key)?.as_u64()
    }
}

impl SampleSeries {
    pub fn summary(&self) -> Option<Summary> {
        match &self.values {
            SeriesValues::Rounds(values) => summarize(values),
            SeriesValues::Summary(summary) => Some(*summary),
        }
    }

    /// Returns the median of the ratios to `other` within each round. `None` if the two have no
    /// round in common.
    pub fn ratio_to(&self, other: &Self) -> Option<f64> {
        let (SeriesValues::Rounds(values), SeriesValues::Rounds(others)) = (&self.values, &other.values)
        else {
            return None;
        };
        let others: BTreeMap<usize, f64> = others.iter().copied().collect();
        let ratios = values.iter().filter_map(|(round, value)| Some(value / others.get(round)?));
        median(ratios.filter(|ratio| ratio.is_finite()).collect())
    }
}

fn take_object(whole: &mut Map<String, Value>, key: &str) -> Map<String, Value> {
    match whole.remove(key) {
        Some(Value::Object(object)) => object,
        _ => Map::new(),
    }
}

fn short_settings(setting: Map<String, Value>) -> Map<String, Value> {
    setting.into_iter().filter(|(_, value)| value.to_string().len() <= SETTING_BYTES_MAX).collect()
}

/// Reads lines of `round,case,variant,metric,value`. A variant's name may have commas.
fn read_series(csv: &str) -> Result<Vec<SampleSeries>> {
    let mut found: Vec<SampleSeries> = Vec::new();
    for line in csv.lines().skip(1) {
        let sample = split_sample(line).with_context(|| format!("no sample: '{line}'"))?;
        let (round, case, variant, metric, value) = sample;
        // Numbers that were not measured are written as NaN.
        if !value.is_finite() {
            continue;
        }
        let is_same = |s: &&mut SampleSeries| s.case == case && s.variant == variant && s.metric == metric;
        match found.iter_mut().find(is_same).map(|series| &mut series.values) {
            Some(SeriesValues::Rounds(values)) => values.push((round, value)),
            Some(SeriesValues::Summary(_)) => bail!("a series was summarized too early"),
            None => found.push(SampleSeries {
                case: case.into(),
                variant: variant.into(),
                metric: metric.into(),
                values: SeriesValues::Rounds(vec![(round, value)]),
            }),
        }
    }
    for series in &mut found {
        if let SeriesValues::Rounds(values) = &series.values
            && values.len() > SERIES_VALUES_MAX
            && let Some(summary) = summarize(values)
        {
            series.values = SeriesValues::Summary(summary);
        }
    }
    Ok(found)
}

/// Round, case, variant, metric and value. `None` if the line has another form.
fn split_sample(line: &str) -> Option<(usize, &str, &str, &str, f64)> {
    let (round, rest) = line.split_once(',')?;
    let (case, rest) = rest.split_once(',')?;
    let (rest, value) = rest.rsplit_once(',')?;
    let (variant, metric) = rest.rsplit_once(',')?;
    Some((round.parse().ok()?, case, variant, metric, round_to_significant(value.parse().ok()?)))
}

fn summarize(values: &[(usize, f64)]) -> Option<Summary> {
    let values: Vec<f64> = values.iter().map(|(_, value)| *value).collect();
    Some(Summary {
        least: values.iter().copied().reduce(f64::min)?,
        greatest: values.iter().copied().reduce(f64::max)?,
        runs: values.len(),
        median: median(values)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(values: &[f64]) -> SampleSeries {
        SampleSeries {
            case: "page".into(),
            variant: "nagaya".into(),
            metric: "rps".into(),
            values: SeriesValues::Rounds(values.iter().copied().enumerate().collect()),
        }
    }

    #[test]
    fn samples_are_grouped_by_what_was_measured() {
        let csv = "round,case,variant,metric,value\n0,hello,nagaya, no rule,rps,10.00000049\n\
                   0,hello,nginx,rps,5\n1,hello,nagaya, no rule,rps,20\n1,hello,nginx,rps,NaN\n";
        let found = read_series(csv).unwrap();
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].variant, "nagaya, no rule");
        let whole = Summary { median: 15.0, least: 10.0, greatest: 20.0, runs: 2 };
        assert_eq!(found[0].summary(), Some(whole));
        // The second round of nginx was not measured, so that the first alone is compared.
        assert_eq!(found[0].ratio_to(&found[1]), Some(2.0));
        assert!(read_series("round\n0,hello\n").is_err());
    }

    #[test]
    fn a_ratio_is_the_median_of_its_rounds() {
        let (fast, slow) = (series(&[200.0, 100.0, 200.0]), series(&[100.0, 50.0, 50.0]));
        assert_eq!(fast.ratio_to(&slow), Some(2.0));
        assert_eq!(slow.ratio_to(&fast), Some(0.5));
        assert_eq!(fast.ratio_to(&series(&[])), None);
    }

    #[test]
    fn long_series_and_long_settings_are_cut() {
        let lines: String = (0..=100).map(|n| format!("0,django,image,request_ms,{n}\n")).collect();
        let found = read_series(&format!("round,case,variant,metric,value\n{lines}")).unwrap();
        let whole = Summary { median: 50.0, least: 0.0, greatest: 100.0, runs: 101 };
        assert!(matches!(found[0].values, SeriesValues::Summary(summary) if summary == whole));

        let settings = serde_json::json!({"rounds": 5, "told": "x".repeat(SETTING_BYTES_MAX)});
        let Value::Object(settings) = settings else { panic!("an object") };
        assert_eq!(short_settings(settings).keys().collect::<Vec<_>>(), ["rounds"]);
    }

    #[test]
    fn a_stored_file_is_read_as_it_was_written() {
        let target = Target { target: ">= 0.95".into(), aim: 1.1, reached: true };
        let run = StoredRun {
            experiment: "php".into(),
            results: BTreeMap::from([("ratio_page".into(), 0.73)]),
            targets: BTreeMap::from([("ratio_page".into(), target)]),
            setting: Map::new(),
            machine: Map::from_iter([("date".into(), "2026-01-01T00:00:00Z".into())]),
            series: vec![series(&[1.5, 2.5]), series(&[3.0])],
        };
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("php.json");
        fs::write(&path, run.text().unwrap()).unwrap();
        let read = StoredRun::read(&path).unwrap();
        assert_eq!(read.text().unwrap(), run.text().unwrap());
        assert_eq!(read.series.len(), 2);
        assert_eq!(read.date(), "2026-01-01T00:00:00Z");
    }
}
