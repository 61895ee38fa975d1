//! `isolation-accuracy`, experiment 2 of per-request isolation. It measures how near a limit of 50
//! % comes to halving the speed of requests. The requests take 1 ms to 500 ms of CPU time.
//!
//! The original does not say whether its limit was of one group for all requests or of one for
//! each. Both are measured. Ten requests at once get a fifth of a core each on two cores without
//! limits. So half of that is a tenth of a core for each request's own cell. The named cell has
//! half of all cores.
//!
//! Not here: the other experiments.

use anyhow::{Context as _, Result};
use serde_json::json;

use super::{COUNT, program, question, start};
use crate::clients::{self, ClientAnswers, to_float};
use crate::experiment::harness::ExperimentSetting;
use crate::facts;
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report};
use crate::server::TestServer;

const AT_ONCE: usize = 10;

/// CPU time of one request, milliseconds.
const LENGTHS_MS: [u32; 10] = [1, 2, 5, 10, 20, 50, 100, 200, 350, 500];

const HOSTS: [&str; 3] = ["free.example", "own.example", "named.example"];
const READINGS: [&str; 2] = ["own", "named"];

/// Requests of each point in the full run, as in the original.
const REQUESTS: usize = 1_000;

/// CPU time of a point in the quick run, milliseconds, which limits its requests.
const QUICK_MS: u32 = 6_000;
const QUICK_REQUESTS_MIN: usize = 40;

const GOALS: [Goal; 7] = [
    Goal { key: "err_points_10ms_own", bound: Bound::AtMost(4.0), aim: 1.0 },
    Goal { key: "err_points_50ms_own", bound: Bound::AtMost(2.0), aim: 0.5 },
    Goal { key: "err_points_200ms_own", bound: Bound::AtMost(1.0), aim: 0.5 },
    Goal { key: "err_points_10ms_named", bound: Bound::AtMost(4.0), aim: 1.0 },
    Goal { key: "err_points_50ms_named", bound: Bound::AtMost(2.0), aim: 0.5 },
    Goal { key: "err_points_200ms_named", bound: Bound::AtMost(1.0), aim: 0.5 },
    Goal { key: "failed", bound: Bound::AtMost(0.0), aim: 0.0 },
];

pub fn run(setting: &ExperimentSetting) -> Result<()> {
    let mut report = Report::new("isolation-accuracy");
    let cores = facts::cores();
    let own_percent = 50 * cores / AT_ONCE;
    let named_percent = 50 * cores;
    let root = program(setting.dir(), "count.cgi", COUNT)?;
    let rules = format!(
        "case request.host\nwhen \"{}\"\n  limit cpu: \"{own_percent}%\"\nwhen \"{}\"\n  cell \"half\", cpu: \
         \"{named_percent}%\"\nend\n",
        HOSTS[1], HOSTS[2]
    );
    let server = start(setting, &root, &HOSTS, &rules, "/count.cgi?n=10")?;
    let counts_per_ms = calibrate(&server)?;
    report.note("requests at once", json!(AT_ONCE));
    report.note("limit of each request's own cell, % of a core", json!(own_percent));
    report.note("limit of the named cell, % of a core", json!(named_percent));
    report.note("loop turns per millisecond of CPU time", json!(counts_per_ms));

    let mut failed = 0;
    for round in 0..if setting.quick { 1 } else { 3 } {
        for length in LENGTHS_MS {
            failed += point(&mut report, setting, &server, round, length, counts_per_ms)?;
        }
    }
    summarise(&mut report)?;
    report.set("failed", to_float(failed));
    let chart = chart(&report);
    report.write(&setting.out, &chart, &GOALS)
}

/// Returns loop turns per millisecond of CPU time, from one long undisturbed request.
fn calibrate(server: &TestServer) -> Result<f64> {
    const TURNS: u32 = 1_000_000;
    let time = |turns: u32| -> Result<f64> {
        let ask = question(server, HOSTS[0], format!("/count.cgi?n={turns}"));
        let answers = clients::ask(&ask, 1, 5)?;
        Ok(answers.percentile_ms(0.5))
    };
    let (short, long) = (time(1)?, time(TURNS)?);
    Ok(f64::from(TURNS) / (long - short))
}

/// Measures one length: the three kinds of limits one after the other. Returns how many requests
/// failed.
fn point(
    report: &mut Report,
    setting: &ExperimentSetting,
    server: &TestServer,
    round: usize,
    length_ms: u32,
    counts_per_ms: f64,
) -> Result<usize> {
    let requests = if setting.quick {
        REQUESTS.min((QUICK_MS / length_ms) as usize).max(QUICK_REQUESTS_MIN)
    } else {
        REQUESTS
    };
    let turns = f64::from(length_ms) * counts_per_ms;
    let ask = |host: &str| -> Result<ClientAnswers> {
        let ask = question(server, host, format!("/count.cgi?n={turns:.0}"));
        clients::ask(&ask, AT_ONCE, requests).with_context(|| format!("{host}, {length_ms} ms"))
    };
    let mut order = [0, 1, 2];
    order.rotate_left(round % 3);
    let mut answers = [const { None }; 3];
    for host in order {
        answers[host] = Some(ask(HOSTS[host])?);
    }
    let [Some(free), Some(own), Some(named)] = answers else { unreachable!("each of the three was asked") };
    let case = format!("{length_ms} ms");
    for (reading, limited) in READINGS.into_iter().zip([&own, &named]) {
        let rate = free.mean_ms() / limited.mean_ms() * 100.0;
        report.sample(round, &case, reading, "rate_percent", rate);
        report.sample(round, &case, reading, "mean_ms", limited.mean_ms());
    }
    report.sample(round, &case, "free", "mean_ms", free.mean_ms());
    eprintln!(
        "{length_ms} ms: free {:.1} ms, own {:.1} ms, named {:.1} ms",
        free.mean_ms(),
        own.mean_ms(),
        named.mean_ms()
    );
    Ok(free.failed + own.failed + named.failed)
}

fn summarise(report: &mut Report) -> Result<()> {
    for reading in READINGS {
        for length in LENGTHS_MS {
            let rate = report.median(&format!("{length} ms"), reading, "rate_percent")?;
            report.set(format!("rate_percent_{length}ms_{reading}"), rate);
            report.set(format!("err_points_{length}ms_{reading}"), (rate - 50.0).abs());
        }
    }
    Ok(())
}

fn chart(report: &Report) -> Chart {
    let panel = |length: &u32| {
        report.panel(
            &format!("{length} ms of CPU time"),
            "% of the unlimited speed",
            &format!("{length} ms"),
            "rate_percent",
            &READINGS,
        )
    };
    Chart {
        title: "How exactly a limit of 50 % halves a request's speed".into(),
        subtitle: format!(
            "shell loop as CGI, {AT_ONCE} requests at once; a cell for each request, and one for all"
        ),
        panels: LENGTHS_MS.iter().map(panel).collect(),
    }
}
