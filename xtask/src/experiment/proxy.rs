//! `proxy`: an application behind a reverse proxy, against nginx and HAProxy before the same
//! application.
//!
//! Not here: the other experiments.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use serde_json::json;

use crate::content::population::UID_BASE;
use crate::experiment::harness::{ExperimentCase, ExperimentSetting, interleave};
use crate::load::LoadTarget;
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report};
use crate::server::nagaya::{NagayaNode, NagayaSettings};
use crate::server::{StartProbe, TestServer, haproxy, nginx};

/// About the size of a small JSON response.
const SMALL_BYTES: usize = 100;
const LARGE_BYTES: usize = 64 << 10;
const HOST: &str = "application.example";

const VARIANTS: [&str; 3] = ["nagaya", "nginx", "haproxy"];

const GOALS: [Goal; 3] = [
    Goal { key: "ratio_nginx", bound: Bound::AtLeast(1.1), aim: 1.3 },
    Goal { key: "ratio_haproxy", bound: Bound::AtLeast(0.9), aim: 1.1 },
    Goal { key: "p99_ratio_haproxy", bound: Bound::AtMost(1.1), aim: 1.0 },
];

pub fn run(setting: &ExperimentSetting) -> Result<()> {
    let mut report = Report::new("proxy");
    let dir = setting.dir();
    let backend = start_backend(dir)?;
    let nagaya = start_nagaya(setting, dir, &backend)?;
    let nginx = nginx::proxy(&dir.join("front"), backend.address)?;
    let haproxy = haproxy::proxy(dir, backend.address)?;

    let servers = vec![("nagaya", &nagaya), ("nginx", &nginx), ("haproxy", &haproxy)];
    // The last one is the backend by itself: the ceiling of every proxy before it.
    let mut small = servers.clone();
    small.push(("backend", &backend));
    let cases = vec![
        ExperimentCase { name: "small", target: small_target(), servers: small },
        ExperimentCase { name: "64k", target: target("/large", LARGE_BYTES), servers },
    ];
    interleave(&mut report, setting, &setting.load(), &cases)?;
    drop(cases);

    report.note(
        "backend",
        json!("nginx on loopback TCP, keep-alive, 100 bytes from memory or 64 KiB from a file"),
    );
    summarise(&mut report)?;
    for (name, server) in [("nagaya", &nagaya), ("nginx", &nginx), ("haproxy", &haproxy)] {
        report.set(format!("{name}_rss_mb"), server.memory_mib()?);
    }
    let chart = chart(&report);
    report.write(&setting.out, &chart, &GOALS)
}

fn target(path: &str, bytes: usize) -> LoadTarget {
    LoadTarget { hosts: vec![HOST.into()], path: path.into(), body_bytes: bytes as u64..=bytes as u64 }
}

/// Returns the request for the small response.
pub fn small_target() -> LoadTarget {
    target("/small", SMALL_BYTES)
}

/// Starts the application behind all proxies.
pub fn start_backend(dir: &Path) -> Result<TestServer> {
    let root = dir.join("application");
    fs::create_dir_all(&root).with_context(|| format!("creating {}", root.display()))?;
    fs::write(root.join("large"), vec![b'x'; LARGE_BYTES]).context("writing the larger body")?;
    nginx::backend(&dir.join("backend"), &root, &"x".repeat(SMALL_BYTES))
}

/// Starts a node in `dir` that is a proxy before the application.
pub fn start_nagaya(setting: &ExperimentSetting, dir: &Path, backend: &TestServer) -> Result<TestServer> {
    use std::io::Write as _;
    let node = NagayaNode::create(&setting.program, dir, "nagaya", NagayaSettings::default())?;
    let (path, mut writer) = node.records("sites.jsonl")?;
    let tenant = json!({"tenant": {"name": "applications", "uid": UID_BASE, "gid": UID_BASE}});
    let site = json!({"site": {
        "name": "application",
        "tenant": "applications",
        "hosts": [HOST],
        "backend": {"kind": "http", "address": backend.address.to_string()},
    }});
    write!(writer, "{tenant}\n{site}\n").and_then(|()| writer.flush()).context("writing records")?;
    drop(writer);
    node.import(&path)?;
    node.start(&StartProbe { host: HOST.into(), path: "/small".into() })
}

fn summarise(report: &mut Report) -> Result<()> {
    for variant in VARIANTS {
        report.set(format!("{variant}_rps"), report.median("small", variant, "rps")?);
    }
    report.set("backend_rps", report.median("small", "backend", "rps")?);
    for (suffix, case) in [("", "small"), ("_64k", "64k")] {
        for peer in ["nginx", "haproxy"] {
            report.set(format!("ratio_{peer}{suffix}"), report.ratio(case, "nagaya", peer, "rps")?);
            report.set(format!("p99_ratio_{peer}{suffix}"), report.ratio(case, "nagaya", peer, "p99_ms")?);
            let cpu = report.ratio(case, "nagaya", peer, "cpu_us_per_request")?;
            report.set(format!("cpu_ratio_{peer}{suffix}"), cpu);
        }
    }
    for variant in VARIANTS {
        report.set(format!("{variant}_64k_rps"), report.median("64k", variant, "rps")?);
        report.set(format!("{variant}_p99_ms"), report.median("small", variant, "p99_ms")?);
    }
    Ok(())
}

fn chart(report: &Report) -> Chart {
    Chart {
        title: "Reverse proxy before the same application".into(),
        subtitle: "wrk, 100 keep-alive connections; client, proxy and application share the cores; median, whiskers: \
                   least and greatest round"
            .into(),
        panels: vec![
            report.panel("100 bytes", "requests/s", "small", "rps", &VARIANTS),
            report.panel("64 KiB", "requests/s", "64k", "rps", &VARIANTS),
            report.panel("100 bytes, 99th percentile", "milliseconds", "small", "p99_ms", &VARIANTS),
        ],
    }
}
