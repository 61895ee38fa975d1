//! `drain`: an operator empties a node with 100 busy sites, and no request fails.
//!
//! Not here: a node that dies without notice (`storm`).

use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::json;

use super::small::SmallCluster;
use super::{OpenLoad, ask_each, errors, import, lab, setting_note, times_ms, until};
use crate::experiment::admission::crowd::percentile;
use crate::experiment::harness::ExperimentSetting;
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report};

const SITES: usize = 100;
const NODES: usize = 3;
const VICTIM: &str = "n1";

/// Time of a request in the application: long enough that some are always in flight.
const WORK_SECONDS: f64 = 0.02;

const PER_SECOND: u32 = 100;
const DRAINED_AFTER: Duration = Duration::from_secs(5);
const ASKED_AFTER: Duration = Duration::from_secs(25);

const GOALS: [Goal; 1] = [Goal { key: "errors", bound: Bound::AtMost(0.0), aim: 0.0 }];

pub fn run(setting: &ExperimentSetting) -> Result<()> {
    let mut report = Report::new("drain");
    let rounds = if setting.quick { 1 } else { 5 };
    report.note("rounds", json!(rounds));
    report.note("load", json!({"requests_per_second": PER_SECOND, "open loop": true}));
    let lab = lab(setting, "drain", NODES, "[instances]\nimage_bytes = \"0B\"\n")?;
    report.note("lab", setting_note(&lab)?);
    let small = SmallCluster::create(&lab, SITES, WORK_SECONDS)?;
    import(&lab, small.records())?;
    let operator = lab.node("n2")?;
    let load = |lasts| OpenLoad {
        lab: &lab,
        // Includes those of the drained node: it still serves for others.
        edges: lab.node_names(),
        hosts: small.hosts(),
        per_second: PER_SECOND,
        lasts,
    };
    // The node of each site is chosen at its first request.
    ask_each(&lab, &small.hosts())?;
    for round in 0..rounds {
        small.gather(&lab, VICTIM)?;
        let (answers, (began, ended)) = load(DRAINED_AFTER + ASKED_AFTER).run(|begun: Instant| {
            std::thread::sleep(DRAINED_AFTER.saturating_sub(begun.elapsed()));
            let began = begun.elapsed();
            operator.run(&["cluster", "drain", VICTIM])?;
            until("the node is empty", || {
                Ok(lab.placements("n2")?.iter().all(|placement| placement["node"] != VICTIM))
            })?;
            Ok((began, begun.elapsed()))
        })?;
        let (before, during) =
            (times_ms(&answers, Duration::ZERO, began), times_ms(&answers, began, ended - began));
        for (metric, value) in [
            ("errors", errors(&answers)),
            ("p99_ms", percentile(during.clone(), 0.99)),
            ("max_ms", percentile(during, 1.0)),
            ("before_p99_ms", percentile(before, 0.99)),
            ("drained_ms", (ended - began).as_secs_f64() * 1e3),
        ] {
            report.sample(round, "drain", "nagaya", metric, value);
        }
        operator.run(&["cluster", "undrain", VICTIM])?;
        eprintln!("round {} of {rounds} done", round + 1);
    }
    for key in ["p99_ms", "max_ms", "before_p99_ms", "drained_ms"] {
        report.set(key, report.median("drain", "nagaya", key)?);
    }
    report.set("errors", report.sum("drain", "nagaya", "errors"));
    let panel = |title: &str, metric: &str| report.panel(title, "milliseconds", "drain", metric, &["nagaya"]);
    let chart = Chart {
        title: format!("A node with {SITES} busy sites is drained"),
        subtitle: "median of rounds, whiskers: least and greatest".into(),
        panels: vec![
            panel("99th percentile before", "before_p99_ms"),
            panel("99th percentile meanwhile", "p99_ms"),
            panel("until it is empty", "drained_ms"),
        ],
    };
    report.write(&setting.out, &chart, &GOALS)
}
