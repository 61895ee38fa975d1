//! `admission-fair`: one tenant floods a full node with fifty times the requests of others; nine
//! ordinary tenants run beside it.
//!
//! Not here: the other experiments.

use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};

use super::crowd::{self, SeenAnswer, failed, percentile, served_within, times_ms};
use super::{board, post, serve_records};
use crate::clients::to_float;
use crate::content::population::UID_BASE;
use crate::experiment::harness::ExperimentSetting;
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report};
use crate::server::TestServer;

const TENANTS: usize = 10;

/// Requests of all tenants at once, and of one tenant: so that no single crowd takes everything.
const NODE: u32 = 4;
const TENANT: u32 = 2;

/// The flood requests as much as the whole node can do: fifty times as much as each ordinary
/// tenant.
const FLOOD: f64 = 50.0;

/// Bytes of a message.
const BYTES: usize = 1 << 10;

const GOALS: [Goal; 3] = [
    Goal { key: "victim_p99_ratio", bound: Bound::AtMost(1.3), aim: 1.1 },
    Goal { key: "jain_index", bound: Bound::AtLeast(0.95), aim: 1.0 },
    Goal { key: "failed", bound: Bound::AtMost(0.0), aim: 0.0 },
];

pub fn run(setting: &ExperimentSetting) -> Result<()> {
    let mut report = Report::new("admission-fair");
    let window = Duration::from_secs(if setting.quick { 15 } else { 60 });
    let tables = format!("[admission]\ntickets = false\nnode_max_concurrent = {NODE}\n");
    let (_node, server) = serve_records(setting, "nagaya", &tables, &records(setting)?)?;
    let warm = Duration::from_secs(4);
    let seen = crowd::closed(&post(&server, &host(0), BYTES), 4, warm, Duration::ZERO)?;
    let capacity = to_float(times_ms(&seen).len()) / warm.as_secs_f64();
    let ordinary = capacity / FLOOD;
    report.note("capacity, requests a second", json!(capacity));
    let mut failures = 0;
    let rounds = if setting.quick { 3 } else { 5 };
    for round in 0..rounds {
        for (variant, flood) in [("alone", 0.0), ("flooded", FLOOD)] {
            let (mut asked, mut served) = (Vec::new(), Vec::new());
            let mut victims = Vec::new();
            for (tenant, seen) in load(&server, window, ordinary, flood)?.into_iter().enumerate() {
                failures += failed(&seen);
                if !seen.is_empty() {
                    asked.push(to_float(seen.len()));
                    served.push(to_float(served_within(&seen, window)));
                }
                let times = times_ms(&seen);
                if tenant > 0 {
                    victims.extend(times);
                } else if flood > 0.0 {
                    report.sample(round, "post", variant, "flood_p50_ms", percentile(times, 0.5));
                }
            }
            report.sample(round, "post", variant, "p50_ms", percentile(victims.clone(), 0.5));
            report.sample(round, "post", variant, "p99_ms", percentile(victims, 0.99));
            let due = max_min(&asked, served.iter().sum());
            let got: Vec<f64> = served.iter().zip(&due).map(|(served, due)| served / due).collect();
            report.sample(round, "post", variant, "jain", jain(&got));
        }
        eprintln!("round {} of {rounds} done", round + 1);
    }
    report.note("requests at once on the node, of a tenant", json!([NODE, TENANT]));
    report.note("an ordinary tenant asks, requests a second", json!(ordinary));
    report.note(
        "jain_index",
        json!("over all ten: what each was served while the load lasted, in parts of its max-min fair share of what all were"),
    );
    for variant in ["alone", "flooded"] {
        report.set(format!("{variant}_p99_ms"), report.median("post", variant, "p99_ms")?);
    }
    report.set("flood_p50_ms", report.median("post", "flooded", "flood_p50_ms")?);
    report.set("victim_p99_ratio", report.ratio("post", "flooded", "alone", "p99_ms")?);
    report.set("jain_index", report.median("post", "flooded", "jain")?);
    report.set("failed", to_float(failures));
    let variants = ["alone", "flooded"];
    let chart = Chart {
        title: "One tenant floods, nine are ordinary".into(),
        subtitle: format!("{NODE} requests at once on the node; the ordinary tenants' requests"),
        panels: vec![
            report.panel("99th percentile", "milliseconds", "post", "p99_ms", &variants),
            report.panel("Median", "milliseconds", "post", "p50_ms", &variants),
        ],
    };
    report.write(&setting.out, &chart, &GOALS)
}

/// Returns records with a board for each tenant.
fn records(setting: &ExperimentSetting) -> Result<Vec<Value>> {
    let mut records = Vec::new();
    for tenant in 0..TENANTS {
        let uid = UID_BASE + u32::try_from(tenant)?;
        let root = board(setting.dir(), &format!("board-{tenant}"), uid)?;
        let name = format!("tenant-{tenant}");
        records.push(
            json!({"tenant": {"name": name, "uid": uid, "gid": uid, "home": root, "max_concurrent": TENANT}}),
        );
        records.push(json!({"site": {
            "name": format!("board-{tenant}"), "tenant": name, "hosts": [host(tenant)],
            "admission": {"wait_seconds": 3600},
            "backend": {"kind": "cgi", "root": root, "extensions": [".cgi"]},
        }}));
    }
    Ok(records)
}

fn host(tenant: usize) -> String {
    format!("board-{tenant}.example")
}

/// Returns each client's observations, by tenant; the first tenant is the flood. Requests come at
/// random moments, whatever happens to earlier ones.
fn load(server: &TestServer, window: Duration, ordinary: f64, flood: f64) -> Result<Vec<Vec<SeenAnswer>>> {
    let mut arrivals = Vec::new();
    let mut of_tenant = Vec::new();
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    for tenant in 0..TENANTS {
        let rate = if tenant == 0 { ordinary * flood } else { ordinary };
        let post = post(server, &host(tenant), BYTES);
        if rate == 0.0 {
            continue;
        }
        let mut at = 0.0;
        loop {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            // From 53 random bits, never 0; the gaps between independent arrivals are exponential.
            let part = ((random >> 11) + 1) as f64 / (1_u64 << 53) as f64;
            at -= part.ln() / rate;
            if at >= window.as_secs_f64() {
                break;
            }
            arrivals.push((Duration::from_secs_f64(at), post.clone()));
            of_tenant.push(tenant);
        }
    }
    let mut by_tenant = vec![Vec::new(); TENANTS];
    for seen in crowd::open(arrivals)? {
        by_tenant[of_tenant[seen.arrival]].push(seen);
    }
    Ok(by_tenant)
}

/// Returns the fair part of each demand in a sum. A demand below an equal part is met, and the
/// others share the rest in the same way.
fn max_min(asked: &[f64], sum: f64) -> Vec<f64> {
    let mut order: Vec<usize> = (0..asked.len()).collect();
    order.sort_by(|a, b| asked[*a].total_cmp(&asked[*b]));
    let mut due = vec![0.0; asked.len()];
    let mut left = sum;
    for (place, which) in order.into_iter().enumerate() {
        let equal = left / to_float(asked.len() - place);
        due[which] = asked[which].min(equal);
        left -= due[which];
    }
    due
}

/// Returns Jain's fairness index: 1 if all have the same, 1/n if one has all.
fn jain(shares: &[f64]) -> f64 {
    let sum: f64 = shares.iter().sum();
    let squares: f64 = shares.iter().map(|share| share * share).sum();
    sum * sum / (to_float(shares.len()) * squares)
}

#[cfg(test)]
mod tests {
    #[test]
    fn small_demand_is_met_and_the_rest_is_shared() {
        let due = super::max_min(&[50.0, 1.0, 1.0], 30.0);
        assert_eq!(due, [28.0, 1.0, 1.0]);
        assert_eq!(super::max_min(&[50.0, 40.0, 2.0], 32.0), [15.0, 15.0, 2.0]);
        // A flood that is served in the order of arrival crowds out the others.
        let got = [28.0 / 28.0, 0.5, 0.5];
        assert!(super::jain(&got) < 0.9);
    }

    #[test]
    fn equal_shares_are_fair() {
        assert!((super::jain(&[2.0, 2.0, 2.0]) - 1.0).abs() < 1e-9);
        assert!((super::jain(&[6.0, 0.0, 0.0]) - 1.0 / 3.0).abs() < 1e-9);
    }
}
