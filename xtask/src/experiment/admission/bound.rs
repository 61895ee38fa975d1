//! `admission-bound`, the fourth experiment of paper 002: how many requests should run at once. It
//! compares fixed numbers as in the paper with the adaptive bound.
//!
//! Not here: the other experiments.

use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::crowd::{self, failed, percentile, times_ms};
use super::{HOST, PATIENT, lane, post, serve};
use crate::clients::to_float;
use crate::experiment::harness::ExperimentSetting;
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report};

/// As in the paper.
const CLIENTS: usize = 150;
const WAIT: u32 = 150;

/// Bytes of a message.
const BYTES: usize = 1 << 10;

const FIXED: [u32; 3] = [10, 40, 70];
const VARIANTS: [&str; 4] = ["10", "40", "70", "auto"];

const GOALS: [Goal; 3] = [
    Goal { key: "auto_throughput_ratio", bound: Bound::AtLeast(0.97), aim: 1.0 },
    Goal { key: "auto_p99_ratio", bound: Bound::AtMost(1.15), aim: 1.0 },
    Goal { key: "failed", bound: Bound::AtMost(0.0), aim: 0.0 },
];

pub fn run(setting: &ExperimentSetting) -> Result<()> {
    let mut report = Report::new("admission-bound");
    let window = Duration::from_secs(if setting.quick { 12 } else { 60 });
    let mut failures = 0;
    let mut found = Vec::new();
    let admission = |auto: bool| json!({"waiting": WAIT, "wait_seconds": 3600, "auto": auto});
    let mut servers = Vec::new();
    for run in FIXED {
        let record = json!({"max_concurrent": run, "admission": admission(false)});
        servers.push((run.to_string(), serve(setting, &format!("run-{run}"), PATIENT, record)?));
    }
    servers.push(("auto".into(), serve(setting, "auto", PATIENT, json!({ "admission": admission(true) }))?));
    for (variant, (_, server)) in &servers {
        crowd::closed(&post(server, HOST, BYTES), 20, Duration::from_secs(2), Duration::ZERO)
            .with_context(|| format!("warming up {variant}"))?;
    }
    let rounds = if setting.quick { 3 } else { 5 };
    for round in 0..rounds {
        servers.rotate_left(1);
        for (variant, (node, server)) in &servers {
            let seen = crowd::closed(&post(server, HOST, BYTES), CLIENTS, window, Duration::ZERO)?;
            let times = times_ms(&seen);
            failures += failed(&seen);
            let refused = to_float(seen.iter().filter(|seen| seen.status == 503).count());
            report.sample(round, "post", variant, "refused", refused);
            report.sample(round, "post", variant, "throughput", to_float(times.len()) / window.as_secs_f64());
            report.sample(
                round,
                "post",
                variant,
                "mean_ms",
                times.iter().sum::<f64>() / to_float(times.len()),
            );
            report.sample(round, "post", variant, "p99_ms", percentile(times.clone(), 0.99));
            report.sample(round, "post", variant, "max_ms", times.into_iter().fold(0.0, f64::max));
            if variant == "auto" {
                found.push(lane(node, "board")?["run"].clone());
            }
        }
        eprintln!("round {} of {rounds} done", round + 1);
    }
    let best = report.best("post", &VARIANTS[..3], "throughput")?;
    let quickest = FIXED
        .map(|run| run.to_string())
        .into_iter()
        .map(|run| Ok((report.median("post", &run, "p99_ms")?, run)))
        .collect::<Result<Vec<_>>>()?;
    let quickest = quickest.into_iter().min_by(|a, b| a.0.total_cmp(&b.0)).context("three were measured")?.1;
    report.note("clients, wait", json!([CLIENTS, WAIT]));
    report.note("best fixed by throughput, by p99", json!([best, quickest]));
    report.note("bound found at the end of each round", Value::Array(found));
    for variant in VARIANTS {
        for metric in ["throughput", "mean_ms", "p99_ms", "max_ms"] {
            report.set(format!("{variant}_{metric}"), report.median("post", variant, metric)?);
        }
    }
    report.set("auto_throughput_ratio", report.ratio("post", "auto", best, "throughput")?);
    report.set("auto_p99_ratio", report.ratio("post", "auto", &quickest, "p99_ms")?);
    report.set("failed", to_float(failures));
    let chart = Chart {
        title: "How many run at once".into(),
        subtitle: format!("closed loop of {CLIENTS} clients; 10, 40, 70, and the bound that adapts"),
        panels: vec![
            report.panel("Answered in a second", "requests", "post", "throughput", &VARIANTS),
            report.panel("99th percentile", "milliseconds", "post", "p99_ms", &VARIANTS),
            report.panel("Longest", "milliseconds", "post", "max_ms", &VARIANTS),
        ],
    };
    report.write(&setting.out, &chart, &GOALS)
}
