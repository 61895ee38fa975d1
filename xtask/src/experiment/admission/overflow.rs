//! `admission-overflow`, the third experiment of paper 002: more clients than the queue has
//! positions. Admitted clients are served as if there were no others.
//!
//! Not here: the other experiments.

use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::json;

use super::crowd::{self, failed, percentile, times_ms};
use super::{HOST, PATIENT, post, serve};
use crate::clients::to_float;
use crate::experiment::harness::ExperimentSetting;
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report};

const RUN: u32 = 10;
const WAIT: u32 = 150;
const CLIENTS: [usize; 3] = [150, 180, 1000];

/// Bytes of a message.
const BYTES: usize = 1 << 10;

/// The paper's pause after a refusal.
const AFTER_503: Duration = Duration::from_secs(3);

const GOALS: [Goal; 2] = [
    Goal { key: "p99_admitted_ratio", bound: Bound::AtMost(1.2), aim: 1.2 },
    Goal { key: "failed", bound: Bound::AtMost(0.0), aim: 0.0 },
];

pub fn run(setting: &ExperimentSetting) -> Result<()> {
    let mut report = Report::new("admission-overflow");
    let record = json!({"max_concurrent": RUN, "admission": {"waiting": WAIT, "wait_seconds": 3600}});
    let (_node, server) = serve(setting, "nagaya", PATIENT, record)?;
    let post = post(&server, HOST, BYTES);
    let window = Duration::from_secs(if setting.quick { 12 } else { 60 });
    crowd::closed(&post, 20, Duration::from_secs(3), AFTER_503)?;
    let (mut failures, mut longest) = (0, 0.0_f64);
    for round in 0..if setting.quick { 3 } else { 5 } {
        for clients in CLIENTS {
            let variant = format!("{clients}");
            let seen = crowd::closed(&post, clients, window, AFTER_503)?;
            let times = times_ms(&seen);
            ensure!(times.len() > 50, "only {} requests of {clients} clients were answered", times.len());
            failures += failed(&seen);
            let refused = seen.iter().filter(|seen| seen.status == 503).count();
            let of = to_float(seen.len());
            report.sample(round, "post", &variant, "p50_ms", percentile(times.clone(), 0.5));
            report.sample(round, "post", &variant, "p99_ms", percentile(times.clone(), 0.99));
            report.sample(round, "post", &variant, "refused_pct", to_float(refused) / of * 100.0);
            report.sample(
                round,
                "post",
                &variant,
                "throughput",
                to_float(times.len()) / window.as_secs_f64(),
            );
            longest = longest.max(times.into_iter().fold(0.0, f64::max));
        }
        eprintln!("round {} done", round + 1);
    }
    report.note("run, wait", json!([RUN, WAIT]));
    report.note("seconds after a refusal", json!(AFTER_503.as_secs()));
    for clients in CLIENTS {
        let variant = clients.to_string();
        report.set(format!("p99_ms_{clients}"), report.median("post", &variant, "p99_ms")?);
        report.set(format!("refused_pct_{clients}"), report.median("post", &variant, "refused_pct")?);
        report.set(format!("throughput_{clients}"), report.median("post", &variant, "throughput")?);
    }
    report.set("p99_admitted_ratio", report.ratio("post", "1000", "150", "p99_ms")?);
    report.set("refused_pct", report.median("post", "1000", "refused_pct")?);
    report.set("max_ms", longest);
    report.set("failed", to_float(failures));
    let variants = ["150", "180", "1000"];
    let chart = Chart {
        title: "More clients than the line has places".into(),
        subtitle: format!("closed loop of POSTs, {RUN} run, {WAIT} wait; by number of clients"),
        panels: vec![
            report.panel("99th percentile of those admitted", "milliseconds", "post", "p99_ms", &variants),
            report.panel("Refused", "percent", "post", "refused_pct", &variants),
            report.panel("Answered in a second", "requests", "post", "throughput", &variants),
        ],
    };
    report.write(&setting.out, &chart, &GOALS)
}
