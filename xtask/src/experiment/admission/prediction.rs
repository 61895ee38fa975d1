//! `admission-prediction`, the second experiment of paper 002: how good the predicted waits are.
//! The loads are closed loops of three sizes, and an open mix of fast reads and slow reports. It
//! also measures the throughput that the queue costs.
//!
//! Not here: the other experiments.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::crowd::{self, SeenAnswer, SentPost, failed, percentile, served_within};
use super::{HOST, PATIENT, post, serve};
use crate::clients::to_float;
use crate::content;
use crate::content::population::UID_BASE;
use crate::experiment::harness::ExperimentSetting;
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report};

const RUN: u32 = 10;
const WAIT: u32 = 1000;
const CLIENTS: [usize; 3] = [50, 100, 150];
/// The loads: closed loops by number of clients, and the open mix.
const VARIANTS: [&str; CLIENTS.len() + 1] = ["50", "100", "150", "mix"];

/// Bytes of a message, as in the paper.
const BYTES: usize = 1 << 10;

/// Shortest wait that is judged: an error of a few milliseconds does not matter.
const JUDGED_MS: f64 = 100.0;

/// Time of requests before the measurement: a node that has run for a while knows as much.
const WARM_UP: Duration = Duration::from_secs(5);

/// A report takes as long as a counting loop does; a read prints at once.
const REPORT: &str = "#!/bin/sh\ni=0\nwhile [ \"$i\" -lt 200000 ]; do i=$((i + 1)); done\n\
     printf 'Content-Type: text/plain\\r\\n\\r\\nreport of %s\\n' \"$i\"\n";

const GOALS: [Goal; 5] = [
    Goal { key: "p90_error_pct", bound: Bound::AtMost(20.0), aim: 10.0 },
    Goal { key: "bias_abs_pct", bound: Bound::AtMost(5.0), aim: 2.0 },
    Goal { key: "told_pct", bound: Bound::AtLeast(90.0), aim: 100.0 },
    Goal { key: "throughput_ratio", bound: Bound::AtLeast(0.98), aim: 1.0 },
    Goal { key: "failed", bound: Bound::AtMost(0.0), aim: 0.0 },
];

pub fn run(setting: &ExperimentSetting) -> Result<()> {
    let mut report = Report::new("admission-prediction");
    let window = Duration::from_secs(if setting.quick { 12 } else { 60 });
    let line = json!({"max_concurrent": RUN, "admission": {"waiting": WAIT, "wait_seconds": 3600}});
    let (_held, held) = serve(setting, "held", PATIENT, line.clone())?;
    let (_free, free) = serve(setting, "free", PATIENT, json!({"admission": {"waiting": WAIT}}))?;
    let slow = setting.dir().join("held-board/report.cgi");
    std::fs::write(&slow, REPORT).with_context(|| format!("writing {}", slow.display()))?;
    std::fs::set_permissions(&slow, std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .context("making a program executable")?;
    content::give(&setting.dir().join("held-board"), UID_BASE)?;
    for server in [&held, &free] {
        crowd::closed(&post(server, HOST, BYTES), 20, WARM_UP, Duration::ZERO)?;
    }
    let mut failures = 0;
    let mut judged = [JudgedWait::default(); VARIANTS.len()];
    let rounds = if setting.quick { 3 } else { 5 };
    for round in 0..rounds {
        for (of, clients) in CLIENTS.into_iter().enumerate() {
            let variant = VARIANTS[of];
            let unqueued = format!("{variant} unqueued");
            let mut pair = [(variant, &held), (unqueued.as_str(), &free)];
            // The order alternates, so the influence of the previous load does, too.
            if (round + of) % 2 == 1 {
                pair.reverse();
            }
            for (name, server) in pair {
                let seen = crowd::closed(&post(server, HOST, BYTES), clients, window, Duration::ZERO)?;
                failures += failed(&seen);
                if name == variant {
                    judged[of].add(judge(&mut report, round, variant, &seen)?);
                }
                let rate = to_float(served_within(&seen, window)) / window.as_secs_f64();
                report.sample(round, "post", name, "throughput", rate);
            }
        }
        let seen = mix(&held, window)?;
        failures += failed(&seen);
        judged[CLIENTS.len()].add(judge(&mut report, round, VARIANTS[CLIENTS.len()], &seen)?);
        eprintln!("round {} of {rounds} done", round + 1);
    }
    report.note("run, wait", json!([RUN, WAIT]));
    report.note(
        "judged",
        json!("waits of 100 ms and more; the prediction made at arrival against the wait it became"),
    );
    report.note(
        "told_pct",
        json!("the part of all these waits, of all rounds, that was told a time and not that it is unknown; the least of all loads"),
    );
    sums(&mut report, &judged, failures)?;
    let rates = ["50", "50 unqueued", "100", "100 unqueued", "150", "150 unqueued"];
    let chart = Chart {
        title: "How good the predicted waits are".into(),
        subtitle: format!("closed loops of 50, 100 and 150 clients and an open mix; {RUN} run at once"),
        panels: vec![
            report.panel("Error, nine of ten below", "percent", "post", "p90_error_pct", &VARIANTS),
            report.panel("Bias", "percent", "post", "bias_pct", &VARIANTS),
            report.panel("Answered in a second", "requests", "post", "throughput", &rates),
        ],
    };
    report.write(&setting.out, &chart, &GOALS)
}

fn sums(report: &mut Report, judged: &[JudgedWait], failures: usize) -> Result<()> {
    let (mut p50, mut p90, mut bias, mut ratio) = (0.0_f64, 0.0_f64, 0.0_f64, f64::INFINITY);
    let mut told = f64::INFINITY;
    for (variant, judged) in VARIANTS.into_iter().zip(judged) {
        let get = |metric| report.median("post", variant, metric);
        let found = (get("p50_error_pct")?, get("p90_error_pct")?, get("bias_pct")?);
        report.set(format!("p50_error_pct_{variant}"), found.0);
        report.set(format!("p90_error_pct_{variant}"), found.1);
        report.set(format!("bias_pct_{variant}"), found.2);
        report.set(format!("told_pct_{variant}"), judged.told_pct());
        told = told.min(judged.told_pct());
        (p50, p90) = (p50.max(found.0), p90.max(found.1));
        if found.2.abs() > bias.abs() {
            bias = found.2;
        }
        if variant != "mix" {
            let of = report.ratio("post", variant, &format!("{variant} unqueued"), "throughput")?;
            report.set(format!("throughput_ratio_{variant}"), of);
            ratio = ratio.min(of);
        }
    }
    // The worst of all loads.
    report.set("p50_error_pct", p50);
    report.set("p90_error_pct", p90);
    report.set("bias_pct", bias);
    report.set("bias_abs_pct", bias.abs());
    report.set("told_pct", told);
    report.set("throughput_ratio", ratio);
    report.set("failed", to_float(failures));
    Ok(())
}

/// Waits that were long enough, and those of them with a prediction.
#[derive(Debug, Default, Clone, Copy)]
struct JudgedWait {
    waits: usize,
    told: usize,
}

impl JudgedWait {
    fn add(&mut self, other: Self) {
        self.waits += other.waits;
        self.told += other.told;
    }

    fn told_pct(self) -> f64 {
        to_float(self.told) / to_float(self.waits) * 100.0
    }
}

/// Compares each request's predicted and real wait, as its client saw them.
fn judge(report: &mut Report, round: usize, variant: &str, seen: &[SeenAnswer]) -> Result<JudgedWait> {
    let held = seen.iter().filter(|seen| seen.status == 200);
    let waits: Vec<(Option<f64>, f64)> = held
        .filter_map(|seen| Some((seen.predicted_ms, seen.queued_ms?)))
        .filter(|(_, actual)| *actual >= JUDGED_MS)
        .collect();
    let pairs: Vec<(f64, f64)> =
        waits.iter().filter_map(|(said, actual)| Some(((*said)?, *actual))).collect();
    let judged = JudgedWait { waits: waits.len(), told: pairs.len() };
    ensure!(pairs.len() >= 20, "{variant}: only {} of {} waited and were predicted", pairs.len(), seen.len());
    let errors: Vec<f64> =
        pairs.iter().map(|(said, actual)| (said - actual).abs() / actual * 100.0).collect();
    let (said, actual) = pairs.iter().fold((0.0, 0.0), |sum, pair| (sum.0 + pair.0, sum.1 + pair.1));
    report.sample(round, "post", variant, "p50_error_pct", percentile(errors.clone(), 0.5));
    report.sample(round, "post", variant, "p90_error_pct", percentile(errors, 0.9));
    report.sample(round, "post", variant, "bias_pct", (said - actual) / actual * 100.0);
    report.sample(round, "post", variant, "judged", to_float(pairs.len()));
    report.sample(round, "post", variant, "told_pct", judged.told_pct());
    Ok(judged)
}

/// Sends bursts of reads with an occasional report, so that a queue builds up and goes again.
fn mix(server: &crate::server::TestServer, window: Duration) -> Result<Vec<SeenAnswer>> {
    const BURST: u32 = 120;
    const EVERY: Duration = Duration::from_secs(3);
    let read = SentPost { body: None, ..post(server, HOST, BYTES) };
    let slow = SentPost { path: "/report.cgi".into(), ..read.clone() };
    let mut arrivals = Vec::new();
    let mut at = Duration::ZERO;
    while at < window {
        for place in 0..BURST {
            let which = if place % 6 == 5 { &slow } else { &read };
            arrivals.push((at + Duration::from_millis(u64::from(place)), which.clone()));
        }
        at += EVERY;
    }
    crowd::open(arrivals)
}
