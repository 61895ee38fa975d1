//! `false-alarm`: nodes pause for 50 to 500 ms at random, as virtual machines do, under load. A
//! pause may cause relocations. It may cost no request, and no site may be served by two instances
//! at once.
//!
//! Not here: the proof of that (`ledger`).

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::json;

use super::ledger::{self, LedgerFinding, LedgerPause};
use super::small::SmallCluster;
use super::{FENCE_MS, OpenLoad, ask_each, epochs, errors, import, lab, now_s, setting_note, times_ms};
use crate::clients::to_float;
use crate::experiment::admission::crowd::percentile;
use crate::experiment::harness::ExperimentSetting;
use crate::interrupt;
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report};

const SITES: usize = 24;
const NODES: usize = 3;
const WORK_SECONDS: f64 = 0.005;
const PER_SECOND: u32 = 60;

const LASTS: Duration = Duration::from_secs(300);
const LASTS_QUICK: Duration = Duration::from_secs(60);

/// Length of a pause, and of the time between two pauses, milliseconds.
const PAUSE_MS: [u64; 2] = [50, 500];
const BETWEEN_MS: [u64; 2] = [200, 1_500];

/// Time without pauses at the end, so that each request can end.
const QUIET_END: Duration = Duration::from_secs(3);

/// The same pauses in each run.
const SEED: u64 = 0x6e61_6761_7961;

const GOALS: [Goal; 2] = [
    Goal { key: "double_served", bound: Bound::AtMost(0.0), aim: 0.0 },
    Goal { key: "errors", bound: Bound::AtMost(0.0), aim: 0.0 },
];

pub fn run(setting: &ExperimentSetting) -> Result<()> {
    let mut report = Report::new("false-alarm");
    let lasts = if setting.quick { LASTS_QUICK } else { LASTS };
    report.note("seconds", json!(lasts.as_secs()));
    report.note("load", json!({"requests_per_second": PER_SECOND, "open loop": true, "sites": SITES}));
    report.note("pauses_ms", json!(PAUSE_MS));
    report.note("seed", json!(SEED));
    let lab = lab(setting, "alarm", NODES, "")?;
    report.note("lab", setting_note(&lab)?);
    let small = SmallCluster::create(&lab, SITES, WORK_SECONDS)?;
    import(&lab, small.records())?;
    let load = |lasts| OpenLoad {
        lab: &lab,
        edges: lab.node_names(),
        hosts: small.hosts(),
        per_second: PER_SECOND,
        lasts,
    };
    // Every site has run, and rests on the node that the planner chose.
    ask_each(&lab, &small.hosts())?;
    let before = epochs(&lab, "n1")?;
    let (answers, pauses) = load(lasts).run(|begun| stumble(&lab, begun, lasts.saturating_sub(QUIET_END)))?;
    let mut found = LedgerFinding::default();
    for text in small.ledgers() {
        found.add(ledger::read(&text, &pauses)?);
    }
    ensure!(found.requests >= answers.len(), "the ledgers have fewer requests than were answered");
    let all = times_ms(&answers, Duration::ZERO, lasts);
    for (key, value) in [
        ("pauses", to_float(pauses.len())),
        ("relocations", epochs(&lab, "n1")? - before),
        ("errors", errors(&answers)),
        ("double_served", to_float(found.double_served)),
        ("late_ends", to_float(found.late_ends)),
        ("late_ms_max", found.late_ms_max),
        ("requests", to_float(answers.len())),
        // Requests written more often than they were sent reached a second node.
        ("replayed", to_float(found.requests) - to_float(answers.len()) - to_float(SITES)),
        ("boots", to_float(found.boots)),
        ("fence_ms", f64::from(FENCE_MS)),
        ("p50_ms", percentile(all.clone(), 0.5)),
        ("p99_ms", percentile(all.clone(), 0.99)),
        ("max_ms", percentile(all, 1.0)),
    ] {
        report.set(key, value);
        report.sample(0, "false alarms", "nagaya", key, value);
    }
    for (index, pause) in pauses.iter().enumerate() {
        report.sample(index, "pause", "nagaya", "paused_ms", (pause.to - pause.from) * 1e3);
    }
    let panel = |title: &str, unit: &str, metric: &str| {
        report.panel(title, unit, "false alarms", metric, &["nagaya"])
    };
    let chart = Chart {
        title: "Nodes stand still at random".into(),
        subtitle: format!(
            "{} pauses of {} to {} ms, {SITES} sites on {NODES} nodes",
            pauses.len(),
            PAUSE_MS[0],
            PAUSE_MS[1]
        ),
        panels: vec![
            panel("relocations", "in all", "relocations"),
            panel("served twice", "requests", "double_served"),
            panel("99th percentile", "milliseconds", "p99_ms"),
        ],
    };
    report.write(&setting.out, &chart, &GOALS)
}

/// Pauses one random node after the other. Returns when.
fn stumble(lab: &crate::lab::Lab, begun: Instant, until: Duration) -> Result<Vec<LedgerPause>> {
    let names = lab.node_names();
    let mut random = RandomSource(SEED);
    let mut pauses = Vec::new();
    while begun.elapsed() < until {
        interrupt::check()?;
        std::thread::sleep(Duration::from_millis(random.between(BETWEEN_MS)));
        let victim = usize::try_from(random.next())? % names.len();
        let time = Duration::from_millis(random.between(PAUSE_MS));
        // From before anything stops until after everything continues.
        let from = now_s();
        lab.pause_for(&names[victim], time)?;
        pauses.push(LedgerPause { from, to: now_s() });
    }
    Ok(pauses)
}

/// Marsaglia's xorshift: enough to choose moments, and the same everywhere.
struct RandomSource(u64);

impl RandomSource {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        // The middle bits are the better ones.
        self.0 >> 20
    }

    fn between(&mut self, [least, most]: [u64; 2]) -> u64 {
        least + self.next() % (most - least + 1)
    }
}
