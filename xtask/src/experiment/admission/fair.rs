//! `admission-fair`: one tenant floods a full node with fifty times what others ask; nine ordinary ones beside it.
//!
//! Not here: the other experiments.

use std::rc::Rc;
use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};

use super::crowd::{Crowd, Seen, failed, percentile, times_ms};
use super::{board, post, serve_records};
use crate::clients::to_float;
use crate::experiment::{Setting, UID_BASE};
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report};
use crate::server::Server;

const TENANTS: usize = 10;

/// Requests of all tenants at once.
const NODE: u32 = 4;

/// An ordinary tenant asks so often; the flood as often from fifty clients that do not wait.
const EVERY: Duration = Duration::from_millis(800);
const FLOOD: usize = 50;

/// Bytes of a message.
const BYTES: usize = 1 << 10;

const GOALS: [Goal; 3] = [
    Goal { key: "victim_p99_ratio", bound: Bound::AtMost(1.3), aim: 1.1 },
    Goal { key: "jain_index", bound: Bound::AtLeast(0.95), aim: 1.0 },
    Goal { key: "failed", bound: Bound::AtMost(0.0), aim: 0.0 },
];

pub fn run(setting: &Setting) -> Result<()> {
    let mut report = Report::new("admission-fair");
    let window = Duration::from_secs(if setting.quick { 15 } else { 60 });
    let tables = format!("[admission]\ntickets = false\nnode_max_concurrent = {NODE}\n");
    let mut records: Vec<Value> = Vec::new();
    for tenant in 0..TENANTS {
        let uid = UID_BASE + u32::try_from(tenant)?;
        let root = board(setting.dir(), &format!("board-{tenant}"), uid)?;
        let name = format!("tenant-{tenant}");
        records.push(json!({"tenant": {"name": name, "uid": uid, "gid": uid}}));
        records.push(json!({"site": {
            "name": format!("board-{tenant}"), "tenant": name, "hosts": [host(tenant)],
            "admission": {"wait_seconds": 3600},
            "backend": {"kind": "cgi", "root": root, "extensions": [".cgi"]},
        }}));
    }
    let (_node, server) = serve_records(setting, "nagaya", &tables, &records)?;
    load(&server, Duration::from_secs(3), FLOOD)?;
    let mut failures = 0;
    let rounds = if setting.quick { 3 } else { 5 };
    for round in 0..rounds {
        for (variant, flood) in [("alone", 0), ("flooded", FLOOD)] {
            let mut served = Vec::new();
            let mut victims = Vec::new();
            for (tenant, seen) in load(&server, window, flood)?.into_iter().enumerate() {
                failures += failed(&seen);
                let times = times_ms(&seen);
                if tenant > 0 {
                    served.push(to_float(times.len()));
                    victims.extend(times);
                } else if flood > 0 {
                    report.sample(
                        round,
                        "post",
                        variant,
                        "flood_per_s",
                        to_float(times.len()) / window.as_secs_f64(),
                    );
                }
            }
            report.sample(round, "post", variant, "p50_ms", percentile(victims.clone(), 0.5));
            report.sample(round, "post", variant, "p99_ms", percentile(victims, 0.99));
            report.sample(round, "post", variant, "jain", jain(&served));
        }
        eprintln!("round {} of {rounds} done", round + 1);
    }
    report.note("requests at once", json!(NODE));
    report.note("ordinary tenants ask every ms", json!(EVERY.as_millis()));
    report.note("jain_index", json!("over what the nine ordinary tenants, who ask the same, were served"));
    for variant in ["alone", "flooded"] {
        report.set(format!("{variant}_p99_ms"), report.median("post", variant, "p99_ms")?);
    }
    report.set("flood_per_s", report.median("post", "flooded", "flood_per_s")?);
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

fn host(tenant: usize) -> String {
    format!("board-{tenant}.example")
}

/// What each tenant's clients saw; the first one's are the flood.
fn load(server: &Server, window: Duration, flood: usize) -> Result<Vec<Vec<Seen>>> {
    let posts: Vec<_> = (0..TENANTS).map(|tenant| post(server, &host(tenant), BYTES)).collect();
    let by_tenant: Rc<std::cell::RefCell<Vec<Vec<Seen>>>> = Rc::new(vec![Vec::new(); TENANTS].into());
    let to = Rc::clone(&by_tenant);
    Crowd::run(move |crowd| async move {
        let mut clients = Vec::new();
        for (tenant, post) in posts.into_iter().enumerate() {
            for client in 0..if tenant == 0 { flood } else { 1 } {
                let (crowd, post, to) = (Rc::clone(&crowd), post.clone(), Rc::clone(&to));
                clients.push(tokio::task::spawn_local(async move {
                    // Ordinary tenants do not all come at the same moment.
                    tokio::time::sleep(EVERY / 10 * u32::try_from((tenant + client) % 10).unwrap_or(0)).await;
                    while crowd.elapsed() < window {
                        let begun = tokio::time::Instant::now();
                        let seen = crowd.ask(&post, None, None).await;
                        to.borrow_mut()[tenant].push(seen);
                        if tenant > 0 {
                            tokio::time::sleep_until(begun + EVERY).await;
                        }
                    }
                }));
            }
        }
        for client in clients {
            // A client that panicked has said so.
            let _ = client.await;
        }
    })?;
    Ok(by_tenant.take())
}

/// Jain's fairness index: 1 where all have the same, 1/n where one has all.
fn jain(shares: &[f64]) -> f64 {
    let sum: f64 = shares.iter().sum();
    let squares: f64 = shares.iter().map(|share| share * share).sum();
    sum * sum / (to_float(shares.len()) * squares)
}

#[cfg(test)]
mod tests {
    #[test]
    fn equal_shares_are_fair() {
        assert!((super::jain(&[2.0, 2.0, 2.0]) - 1.0).abs() < 1e-9);
        assert!((super::jain(&[6.0, 0.0, 0.0]) - 1.0 / 3.0).abs() < 1e-9);
    }
}
