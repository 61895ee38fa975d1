//! The form of `docs/measurements.md`: a fixed head, and for each experiment its machine, results
//! and values.
//!
//! Not here: where the numbers come from (`stored`).

use std::fmt::Write as _;

use super::stored::{SampleSeries, StoredRun};
use crate::report::number;

const HEAD: &str = "\
# Measurements

This page is made from the files in [measurements](measurements). Do not edit it. `./dev experiment --report` makes it anew;
with `--from DIR` it takes in new results first. [Experiments](experiments.md) says how each is measured.

- Results are medians over all rounds, and ratios paired by round. A result's name ends with its unit.
- *nagaya's ratio* is nagaya's value divided by this row's value: the median of the ratios within each round.
  Above 1 is better for rates (1/s), below 1 is better for times and memory.
- A commit with `+changes` had files that were not committed.
";

/// Metrics that only repeat the rate of a load run in another form, or its one slowest request.
const REPEATED_METRICS: [&str; 3] = ["p50_ms", "max_ms", "mib_per_second"];

/// Renders the whole page.
pub fn render(runs: &[StoredRun]) -> String {
    let mut text = HEAD.to_owned();
    text.push_str("\n| experiment | date | commit | machine |\n|---|---|---|---|\n");
    for run in runs {
        let name = &run.experiment;
        let commit = run.machine_fact("commit").unwrap_or("unknown");
        let day = run.date().split('T').next().unwrap_or_default();
        let _ = writeln!(text, "| [{name}](#{name}) | {day} | {commit} | {} |", describe_machine(run));
    }
    for run in runs {
        let _ = write!(text, "\n## {}\n", run.experiment);
        render_results(&mut text, run);
        render_series(&mut text, run);
    }
    text
}

fn describe_machine(run: &StoredRun) -> String {
    let fact = |key| run.machine_fact(key).unwrap_or("unknown");
    let count = |key| run.machine_count(key).map_or_else(|| "?".to_owned(), |count| count.to_string());
    format!(
        "{}, {} cores, {} MiB, Linux {}, {}",
        fact("cpu"),
        count("cores"),
        count("memory_mib"),
        fact("kernel"),
        fact("distribution")
    )
}

fn render_results(text: &mut String, run: &StoredRun) {
    text.push_str("\n| result | value | must reach | aim | reached |\n|---|---|---|---|---|\n");
    for (key, value) in &run.results {
        let _ = match run.targets.get(key) {
            Some(goal) => writeln!(
                text,
                "| `{key}` | {} | {} | {} | {} |",
                number(*value),
                goal.target,
                number(goal.aim),
                if goal.reached { "yes" } else { "**no**" }
            ),
            None => writeln!(text, "| `{key}` | {} | | | |", number(*value)),
        };
    }
}

fn render_series(text: &mut String, run: &StoredRun) {
    let shown: Vec<&SampleSeries> = run.series.iter().filter(|series| !is_repeated(run, series)).collect();
    if shown.is_empty() {
        return;
    }
    text.push_str(
        "\n| case | measured | metric | unit | median | least | greatest | runs | nagaya's ratio |\n\
         |---|---|---|---|---|---|---|---|---|\n",
    );
    for series in shown {
        let Some(summary) = series.summary() else { continue };
        let ratio = nagayas_series(run, series).and_then(|own| own.ratio_to(series)).map(number);
        let _ = writeln!(
            text,
            "| {} | {} | `{}` | {} | {} | {} | {} | {} | {} |",
            escape_cell(&series.case),
            escape_cell(&series.variant),
            series.metric,
            find_unit(&series.metric),
            number(summary.median),
            number(summary.least),
            number(summary.greatest),
            summary.runs,
            ratio.unwrap_or_default()
        );
    }
}

fn is_repeated(run: &StoredRun, series: &SampleSeries) -> bool {
    let has_rate = |other: &SampleSeries| {
        other.metric == "rps" && other.case == series.case && other.variant == series.variant
    };
    REPEATED_METRICS.contains(&series.metric.as_str()) && run.series.iter().any(has_rate)
}

/// Returns the same case and metric of nagaya. `None` for nagaya itself, and where no variant is
/// called `nagaya`.
fn nagayas_series<'r>(run: &'r StoredRun, series: &SampleSeries) -> Option<&'r SampleSeries> {
    const OWN: &str = "nagaya";
    let is_own = |other: &&SampleSeries| {
        other.variant == OWN && other.case == series.case && other.metric == series.metric
    };
    if series.variant == OWN { None } else { run.series.iter().find(is_own) }
}

fn escape_cell(text: &str) -> String {
    text.replace('|', "\\|")
}

/// The unit that a metric's name ends with, or has in its middle. Empty for counts and ratios.
fn find_unit(metric: &str) -> &'static str {
    const UNITS: [(&str, &str); 17] = [
        ("mib_per_second", "MiB/s"),
        ("us_per_request", "us"),
        ("per_second", "1/s"),
        ("per_s", "1/s"),
        ("rps", "1/s"),
        ("throughput", "1/s"),
        ("milliseconds", "ms"),
        ("microseconds", "us"),
        ("seconds", "s"),
        ("ms", "ms"),
        ("us", "us"),
        ("mb", "MB"),
        ("mib", "MiB"),
        ("kib", "KiB"),
        ("bytes", "bytes"),
        ("pct", "%"),
        ("percent", "%"),
    ];
    let metric = metric.trim_end_matches("_each").trim_end_matches("_per_site");
    let has_unit = |name: &str| {
        metric.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('_'))
    };
    UNITS.iter().find(|(name, _)| has_unit(name)).map_or("", |(_, unit)| unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_shown_with_medians_bounds_and_ratios() {
        let run: StoredRun = serde_json::from_value(serde_json::json!({
            "experiment": "php",
            "results": {"nagaya_page_rps": 488.0, "ratio_page": 0.5},
            "targets": {"ratio_page": {"target": ">= 0.70", "aim": 1.0, "reached": false}},
            "setting": {},
            "machine": {"date": "2026-01-02T03:04:05Z", "commit": "abc", "cpu": "C", "cores": 2,
                        "memory_mib": 4096, "kernel": "6.1", "distribution": "Debian"},
            "series": [
                {"case": "page", "variant": "nagaya", "metric": "rps", "values": [[0, 100.0], [1, 300.0]]},
                {"case": "page", "variant": "a|b", "metric": "rps", "values": [[0, 200.0], [1, 600.0]]},
                {"case": "page", "variant": "a|b", "metric": "p50_ms", "values": [[0, 1.0]]},
                {"case": "page", "variant": "alone", "metric": "p50_ms",
                 "values": {"median": 2.5, "least": 1.0, "greatest": 9.0, "runs": 3000}},
            ],
        }))
        .unwrap();
        let text = render(&[run]);
        let has = |line: &str| assert!(text.lines().any(|shown| shown == line), "no '{line}' in:\n{text}");
        has("| [php](#php) | 2026-01-02 | abc | C, 2 cores, 4096 MiB, Linux 6.1, Debian |");
        has("| `nagaya_page_rps` | 488 | | | |");
        has("| `ratio_page` | 0.50 | >= 0.70 | 1.00 | **no** |");
        has("| page | nagaya | `rps` | 1/s | 200 | 100 | 300 | 2 |  |");
        has("| page | a\\|b | `rps` | 1/s | 400 | 200 | 600 | 2 | 0.50 |");
        has("| page | alone | `p50_ms` | ms | 2.50 | 1.00 | 9.00 | 3000 |  |");
        assert!(!text.contains("| page | a\\|b | `p50_ms`"), "the rate says it already:\n{text}");
    }

    #[test]
    fn units_are_read_from_names_of_metrics() {
        let units = ["rps", "p99_ms", "cpu_us_per_request", "pss_mb_each", "bytes_per_site", "judged"];
        assert_eq!(units.map(find_unit), ["1/s", "ms", "us", "MB", "bytes", ""]);
        let units = ["switches_per_s", "cpu_pct", "rate_percent", "status", "memory_kib_each", "seconds"];
        assert_eq!(units.map(find_unit), ["1/s", "%", "%", "", "KiB", "s"]);
    }
}
