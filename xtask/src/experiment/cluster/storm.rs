//! `relocation-storm`: a node with 200 small sites dies while all of them get requests.
//!
//! All its processes are killed at one moment; its kernel stays, so that connections to it are
//! refused. There are no images: these programs start faster than most are restored. Not here: a
//! node that falls silent (`relocation`).

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde_json::json;

use super::small::SmallCluster;
use super::{OpenLoad, ask_each, epochs, errors, import, lab, setting_note, times_ms};
use crate::experiment::admission::crowd::percentile;
use crate::experiment::harness::ExperimentSetting;
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report};

const SITES: usize = 200;
const NODES: usize = 3;

/// The one that dies.
const VICTIM: &str = "n1";

/// Time of a request in the application.
const WORK_SECONDS: f64 = 0.001;

const PER_SECOND: u32 = 100;

/// When the node dies, and how long requests continue.
const DIES_AFTER: Duration = Duration::from_secs(5);
const ASKED_AFTER: Duration = Duration::from_secs(20);

/// The percentiles are of requests sent up to this long after the death.
const COUNTED: Duration = Duration::from_secs(10);

const GOALS: [Goal; 2] = [
    Goal { key: "errors", bound: Bound::AtMost(0.0), aim: 0.0 },
    Goal { key: "all_back_ms", bound: Bound::AtMost(10_000.0), aim: 5_000.0 },
];

pub fn run(setting: &ExperimentSetting) -> Result<()> {
    let mut report = Report::new("relocation-storm");
    let rounds = if setting.quick { 1 } else { 5 };
    report.note("rounds", json!(rounds));
    report.note("load", json!({"requests_per_second": PER_SECOND, "open loop": true}));
    let lab = lab(setting, "storm", NODES, "[instances]\nimage_bytes = \"0B\"\n")?;
    report.note("lab", setting_note(&lab)?);
    let small = SmallCluster::create(&lab, SITES, WORK_SECONDS)?;
    import(&lab, small.records())?;
    let survivors: Vec<String> = lab.node_names().into_iter().filter(|name| name != VICTIM).collect();
    let load = |seconds| OpenLoad {
        lab: &lab,
        edges: survivors.clone(),
        hosts: small.hosts(),
        per_second: PER_SECOND,
        lasts: seconds,
    };
    // The node of each site is chosen at its first request.
    ask_each(&lab, &small.hosts())?;
    for round in 0..rounds {
        small.gather(&lab, VICTIM)?;
        let before = epochs(&lab, &survivors[0])?;
        let (answers, died) = load(DIES_AFTER + ASKED_AFTER).run(|begun: Instant| {
            std::thread::sleep(DIES_AFTER.saturating_sub(begun.elapsed()));
            lab.kill(VICTIM)?;
            Ok(begun.elapsed())
        })?;
        let mut back = vec![None; SITES];
        for answer in answers.iter().filter(|answer| answer.is_right && answer.at >= died) {
            let ended = answer.ended();
            let first = back[answer.site].get_or_insert(ended);
            *first = ended.min(*first);
        }
        let all_back: Option<Vec<Duration>> = back.into_iter().collect();
        let all_back = all_back.context("a site did not come back")?.into_iter().max().unwrap_or_default();
        let times = times_ms(&answers, died, COUNTED);
        let moves = epochs(&lab, &survivors[0])? - before;
        for (metric, value) in [
            ("p50_ms", percentile(times.clone(), 0.5)),
            ("p99_ms", percentile(times.clone(), 0.99)),
            ("max_ms", percentile(times, 1.0)),
            ("errors", errors(&answers)),
            ("all_back_ms", (all_back - died).as_secs_f64() * 1e3),
            ("relocations", moves),
        ] {
            report.sample(round, "storm", "nagaya", metric, value);
        }
        lab.start(VICTIM)?;
        eprintln!("round {} of {rounds} done", round + 1);
    }
    for key in ["p50_ms", "p99_ms", "max_ms", "all_back_ms", "relocations"] {
        report.set(key, report.median("storm", "nagaya", key)?);
    }
    report.set("errors", report.sum("storm", "nagaya", "errors"));
    let panel = |title: &str, metric: &str| report.panel(title, "milliseconds", "storm", metric, &["nagaya"]);
    let chart = Chart {
        title: format!("A node with {SITES} sites dies"),
        subtitle: "requests sent in the 10 s after it; median of rounds, whiskers: least and greatest".into(),
        panels: vec![
            panel("median", "p50_ms"),
            panel("99th percentile", "p99_ms"),
            panel("all are back", "all_back_ms"),
        ],
    };
    report.write(&setting.out, &chart, &GOALS)
}
