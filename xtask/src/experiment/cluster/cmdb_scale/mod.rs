//! `cmdb-scale`: the cost of 100,000 sites in the records' store, alone (redb) and in a cluster
//! (etcd). It covers loading, following, changing, the bytes of it on a node's wire, and the memory
//! of a node.
//!
//! Loading, following and changing are measured at the stores themselves (`stores`, `crowd`). They
//! run in this program, in the lab's networks, with the lab's etcd. Memory is that of real nodes,
//! started from their stores (`nodes`).
//!
//! Not here: the look-up cost of a site on a node alone (`sites_scale`).

mod crowd;
mod fixture;
mod nodes;
mod stores;
mod wire;

use anyhow::{Context as _, Result};
use serde_json::json;

use self::fixture::{SITES, WATCHERS};
use super::{STORES, setting_note};
use crate::content::population::SitePopulation;
use crate::experiment::harness::ExperimentSetting;
use crate::lab::{Lab, LabPlan, PROBE};
use crate::plot::Chart;
use crate::report::Report;

pub fn run(setting: &ExperimentSetting) -> Result<()> {
    let mut report = Report::new("cmdb-scale");
    let rounds = if setting.quick { 1 } else { 5 };
    report.note("rounds", json!(rounds));
    report.note("sites", json!(SITES));
    report.note("watchers", json!({"at once": WATCHERS, "sites of their cluster": crowd::SITES}));
    let sites = SitePopulation { documents: setting.dir().join("documents"), count: SITES };
    for round in 0..rounds {
        let lab = lab(setting, round)?;
        report.note("lab", setting_note(&lab)?);
        stores::redb(&mut report, setting, &sites, round).context("redb")?;
        stores::etcd(&mut report, setting, &lab, &sites, round).context("etcd")?;
        crowd::measure(&mut report, setting, &lab, round).context("many watchers")?;
        nodes::measure(&mut report, &lab, &sites, round).context("nodes")?;
        lab.down()?;
        eprintln!("round {} of {rounds} done", round + 1);
    }
    summarise(&mut report)?;
    let chart = chart(&report);
    report.write(&setting.out, &chart, &[])
}

/// Makes two nodes that are alone at first, and etcd.
fn lab(setting: &ExperimentSetting, round: usize) -> Result<Lab> {
    eprintln!("starting 2 nodes and {STORES} members of etcd");
    Lab::up(&LabPlan {
        nodes: 2,
        stores: STORES,
        fence_ms: super::FENCE_MS,
        probe: PROBE.into(),
        tag: format!("scale-{}-{round}", std::process::id()),
        dir: setting.dir().join(format!("lab-scale-{round}")),
        program: setting.program.clone(),
        is_joined: false,
        tables: String::new(),
    })
}

// === What came of it ===

/// Key of the result, and where its samples are.
const KEYS: [(&str, &str, &str, &str); 24] = [
    ("load_s_redb", "load", "redb", "seconds"),
    ("load_s_etcd", "load", "etcd", "seconds"),
    ("watched_s_etcd", "load", "node that follows", "seconds"),
    ("whole_s_etcd", "load", "node that comes later", "seconds"),
    ("whole_bytes_per_site", "load", "node that comes later", "bytes_per_site"),
    ("updates_per_s_redb", "updates", "redb", "per_second"),
    ("updates_per_s_etcd", "updates", "etcd", "per_second"),
    ("placements_per_s_etcd", "placements", "one at a time", "per_second"),
    ("placements_per_s_etcd_64", "placements", "64 at a time", "per_second"),
    ("idle_bytes_per_s", "traffic", "idle", "bytes"),
    ("site_bytes", "traffic", "site", "bytes"),
    ("placement_bytes", "traffic", "placement", "bytes"),
    ("site_p50_ms_100", "site to 100", "half have it", "milliseconds"),
    ("site_all_ms_100", "site to 100", "all have it", "milliseconds"),
    ("placement_p50_ms_100", "placement to 100", "half have it", "milliseconds"),
    ("placement_all_ms_100", "placement to 100", "all have it", "milliseconds"),
    ("idle_bytes_per_s_100", "traffic to 100", "idle", "bytes"),
    ("site_bytes_100", "traffic to 100", "site", "bytes"),
    ("placement_bytes_100", "traffic to 100", "placement", "bytes"),
    ("move_s", "node", "moves into the cluster", "seconds"),
    ("join_s", "node", "joins", "seconds"),
    ("join_bytes", "node", "joins", "bytes"),
    ("memory_mb_redb", "memory", "redb", "mib"),
    ("memory_mb_etcd", "memory", "etcd", "mib"),
];

fn summarise(report: &mut Report) -> Result<()> {
    for (key, case, variant, metric) in KEYS {
        report.set(key, report.median(case, variant, metric)?);
    }
    for store in ["redb", "etcd"] {
        for process in ["supervisor", "edge", "keeper"] {
            let value = report.median("memory", &format!("{store}: {process}"), "mib")?;
            report.set(format!("{process}_mb_{store}"), value);
        }
    }
    Ok(())
}

fn chart(report: &Report) -> Chart {
    let panel = |title: &str, unit: &str, case: &str, metric: &str, variants: &[&str]| {
        report.panel(title, unit, case, metric, variants)
    };
    let delivered = ["half have it", "all have it"];
    let changes = ["site", "placement"];
    Chart {
        title: format!("Records of {SITES} sites, alone and in a cluster"),
        subtitle: "etcd: three members on this machine; median, whiskers: least and greatest round".into(),
        panels: vec![
            panel(
                "Until all are there",
                "seconds",
                "load",
                "seconds",
                &["redb", "etcd", "node that follows", "node that comes later"],
            ),
            panel(
                "Sites changed, one after the other",
                "per second",
                "updates",
                "per_second",
                &["redb", "etcd"],
            ),
            panel(
                "Placements written",
                "per second",
                "placements",
                "per_second",
                &["one at a time", "64 at a time"],
            ),
            panel("A change on a node's wire", "bytes", "traffic", "bytes", &changes),
            panel("A site's change, 100 watchers", "milliseconds", "site to 100", "milliseconds", &delivered),
            panel(
                "A placement, 100 watchers",
                "milliseconds",
                "placement to 100",
                "milliseconds",
                &delivered,
            ),
            panel("Memory of a node's processes", "MiB", "memory", "mib", &["redb", "etcd"]),
        ],
    }
}
