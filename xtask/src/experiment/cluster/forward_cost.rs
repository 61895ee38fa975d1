//! `forward-cost`: the same small response from the node that runs the site, and through another,
//! which forwards.
//!
//! The application is an nginx that responds from memory, so that the measured time is that of the
//! route. Both nodes, the application and the clients share this machine's cores. So the CPU time
//! of the hop counts twice, once at each edge, and no wire adds to it. Not here: proxying to a
//! server outside (`proxy`).

use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::json;

use super::{host, import, lab, place_on, setting_note};
use crate::content::give;
use crate::content::population::UID_BASE;
use crate::experiment::harness::ExperimentSetting;
use crate::load::{self, LoadSettings, LoadTarget};
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report};

const SITE: &str = "hello";
const BODY: &str = "hello, world\n";

/// The node that runs it, and the one that forwards.
const VARIANTS: [(&str, &str); 2] = [("local", "n1"), ("nagaya one hop", "n2")];
const LOCAL: &str = VARIANTS[0].0;
const HOP: &str = VARIANTS[1].0;

/// A connection that waits for its response shows the time of one; many show the rate. The tool wrk
/// has two threads, each with at least one.
const CASES: [(&str, u32); 2] = [("alone", 1), ("many", 64)];

const GOALS: [Goal; 1] = [Goal { key: "added_p50_us", bound: Bound::AtMost(150.0), aim: 80.0 }];

/// One process, all of it within the sandbox's own /tmp.
const START: &str = r#"cat >/tmp/nginx.conf <<END
daemon off;
master_process off;
pid /tmp/nginx.pid;
error_log /tmp/error.log crit;
events { worker_connections 1024; }
http {
    access_log off;
    client_body_temp_path /tmp/b; proxy_temp_path /tmp/p; fastcgi_temp_path /tmp/f; uwsgi_temp_path /tmp/u; scgi_temp_path /tmp/s;
    keepalive_requests 1000000000;
    server { listen unix:$NAGAYA_SOCKET; location / { return 200 "hello, world\n"; } }
}
END
exec /usr/sbin/nginx -e /tmp/error.log -c /tmp/nginx.conf"#;

pub fn run(setting: &ExperimentSetting) -> Result<()> {
    let mut report = Report::new("forward-cost");
    // It stays where it is, and awake.
    let lab = lab(setting, "forward", 2, "[instances]\nimage_bytes = \"0B\"\nfrozen_after = \"1d\"\n")?;
    report.note("lab", setting_note(&lab)?);
    let dir = lab.shared().join(SITE);
    std::fs::create_dir_all(&dir).with_context(|| format!("creating {}", dir.display()))?;
    give(&dir, UID_BASE)?;
    let backend =
        json!({"kind": "app", "command": ["/bin/sh", "-c", START], "directory": dir, "release": "1"});
    import(
        &lab,
        &[
            json!({"tenant": {"name": SITE, "uid": UID_BASE, "gid": UID_BASE}}),
            json!({"site": {"name": SITE, "tenant": SITE, "hosts": [host(SITE)], "backend": backend}}),
        ],
    )?;
    place_on(&lab, SITE, VARIANTS[0].1)?;
    let bytes = BODY.len() as u64;
    let target = LoadTarget { hosts: vec![host(SITE)], path: "/".into(), body_bytes: bytes..=bytes };
    let full = setting.load();
    report.note(
        "load",
        json!({
            "generator": "wrk, closed loop, keep-alive", "seconds": full.duration.as_secs(),
            "rounds": setting.rounds(), "connections": CASES.map(|(_, connections)| connections),
        }),
    );
    let measure = |edge: &str, connections, duration| {
        let address = lab.address(edge)?;
        lab.as_client(|| load::run(address, &target, &LoadSettings { connections, duration }))?
    };
    for (_, edge) in VARIANTS {
        measure(edge, 2, Duration::from_secs(1))?;
    }
    for round in 0..setting.rounds() {
        for (case, connections) in CASES {
            let mut order = VARIANTS;
            order.rotate_left(round % VARIANTS.len());
            for (variant, edge) in order {
                let outcome = measure(edge, connections, full.duration)?;
                report.outcome(round, case, variant, &outcome, f64::NAN);
                report.sample(round, case, variant, "p50_us", outcome.p50_ms * 1e3);
            }
        }
        eprintln!("round {} of {} done", round + 1, setting.rounds());
    }
    summarise(&mut report)?;
    let panel = |title: &str, unit: &str, case: &str, metric: &str| {
        report.panel(title, unit, case, metric, &[LOCAL, HOP])
    };
    let chart = Chart {
        title: "What one hop costs".into(),
        subtitle: "13 bytes from memory; median of rounds, whiskers: least and greatest".into(),
        panels: vec![
            panel("One request at a time, median", "microseconds", "alone", "p50_us"),
            panel("64 connections", "requests/s", "many", "rps"),
        ],
    };
    report.write(&setting.out, &chart, &GOALS)
}

fn summarise(report: &mut Report) -> Result<()> {
    let added = report.difference("alone", HOP, LOCAL, "p50_us")?;
    report.set("added_p50_us", added);
    report.set("throughput_ratio", report.ratio("many", HOP, LOCAL, "rps")?);
    for (key, case, variant, metric) in [
        ("local_p50_us", "alone", LOCAL, "p50_us"),
        ("hop_p50_us", "alone", HOP, "p50_us"),
        ("local_rps", "many", LOCAL, "rps"),
        ("hop_rps", "many", HOP, "rps"),
        ("local_p99_ms", "many", LOCAL, "p99_ms"),
        ("hop_p99_ms", "many", HOP, "p99_ms"),
    ] {
        report.set(key, report.median(case, variant, metric)?);
    }
    Ok(())
}
