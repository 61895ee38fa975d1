//! `admission-cost`: the cost of admission per request, for a small static file and a proxied
//! response.
//!
//! A node without admission does not exist. So its own time is measured in threads of this program,
//! with the node's code and its number of threads. It is compared with the CPU time of a whole
//! request on the node. Not here: the other experiments.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use nagaya_admission::CostClass;
use nagaya_base::AnchoredClock;
use nagaya_edge::{EdgeConfig, LaneSet, Permit, SiteLane};
use nagaya_telemetry::Gauge;
use serde_json::json;

use crate::content::population::SitePopulation;
use crate::experiment::harness::{CONNECTIONS, ExperimentSetting};
use crate::load::{self, LoadSettings, LoadTarget};
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report};
use crate::server::nagaya::{NagayaNode, NagayaSettings};
use crate::server::{StartProbe, TestServer, nginx};

const THREADS: usize = 2;

/// Requests between two reads of the clock.
const BATCH: u64 = 10_000;

/// Assumed service time of each.
const SERVICE: Duration = Duration::from_micros(20);

const GOALS: [Goal; 2] = [
    Goal { key: "ratio", bound: Bound::AtLeast(0.99), aim: 0.99 },
    Goal { key: "ratio_proxy", bound: Bound::AtLeast(0.99), aim: 0.99 },
];

pub fn run(setting: &ExperimentSetting) -> Result<()> {
    let mut report = Report::new("admission-cost");
    let dir = setting.dir();
    let population = SitePopulation::create(dir, 1)?;
    let application = dir.join("application");
    std::fs::create_dir_all(&application).with_context(|| format!("creating {}", application.display()))?;
    let backend = nginx::backend(&dir.join("backend"), &application, "an answer of a hundred bytes or less")?;
    let server = nagaya(setting, &population, &backend)?;
    let target = |host: &str, path: &str, bytes: u64| LoadTarget {
        hosts: vec![host.into()],
        path: path.into(),
        body_bytes: bytes..=bytes,
    };
    let cases = [
        ("static", target(&population.host(0), "/hello.txt", crate::content::population::HELLO.len() as u64)),
        ("proxy", target("application.example", "/small", 36)),
    ];
    let load = LoadSettings { connections: CONNECTIONS, ..setting.load() };
    for round in 0..setting.rounds() {
        let gate = gate_us()?;
        report.sample(round, "gate", "nagaya", "us_per_request", gate);
        for (case, target) in &cases {
            let before = server.cpu_seconds();
            let outcome =
                load::run(server.address, target, &load).with_context(|| format!("doing {case}"))?;
            let spent = server.cpu_seconds() - before;
            let request = spent * 1e6 / outcome.requests;
            report.outcome(round, case, "nagaya", &outcome, spent);
            report.sample(round, case, "nagaya", "ratio", (request - gate) / request);
        }
        eprintln!("round {} of {} done", round + 1, setting.rounds());
    }
    report.note("ratio", json!("a request's CPU time without the gate's part, to the whole; the gate by itself on as many threads"));
    report.set("gate_us", report.median("gate", "nagaya", "us_per_request")?);
    report.set("static_cpu_us", report.median("static", "nagaya", "cpu_us_per_request")?);
    report.set("proxy_cpu_us", report.median("proxy", "nagaya", "cpu_us_per_request")?);
    report.set("ratio", report.median("static", "nagaya", "ratio")?);
    report.set("ratio_proxy", report.median("proxy", "nagaya", "ratio")?);
    let chart = Chart {
        title: "What the gate costs".into(),
        subtitle: "CPU time of a whole request, and of its way through the gate".into(),
        panels: vec![
            report.panel("The gate", "microseconds", "gate", "us_per_request", &["nagaya"]),
            report.panel("A small file", "microseconds", "static", "cpu_us_per_request", &["nagaya"]),
            report.panel("A proxied answer", "microseconds", "proxy", "cpu_us_per_request", &["nagaya"]),
        ],
    };
    report.write(&setting.out, &chart, &GOALS)
}

/// Returns the microseconds of one thread for a request to enter and to leave. As in the node's
/// threads, all are in one lane.
fn gate_us() -> Result<f64> {
    let options = EdgeConfig::default();
    let lanes = LaneSet::new(&options, Gauge::default(), AnchoredClock::of_wall());
    let tenant =
        serde_json::from_value(json!({"name": "people", "uid": 1000, "gid": 1000, "max_concurrent": 4096}));
    let site = serde_json::from_value(json!({
        "name": "hello", "tenant": "people", "hosts": ["hello.example"], "backend": {"kind": "static", "root": "/"},
    }));
    let (site, tenant) = (Arc::new(site.context("a site")?), Arc::new(tenant.context("a tenant")?));
    let lane = lanes.of_site(&site, &tenant, &options);
    let stop = AtomicBool::new(false);
    let times: Vec<f64> = std::thread::scope(|scope| {
        let run = || {
            let route = Rc::new(SiteLane::new(Arc::clone(&site), Arc::clone(&tenant), Arc::clone(&lane)));
            // The first request of a thread finds the lane calm, and permits are lent to it.
            drop(lanes.enter_calm(&lane));
            let (begun, mut requests) = (Instant::now(), 0_u64);
            while !stop.load(Ordering::Relaxed) {
                for _ in 0..BATCH {
                    if let Some(mut permit) = Permit::of_site(&route, || CostClass(1)) {
                        permit.ended(SERVICE, true);
                        requests += 1;
                    }
                }
            }
            begun.elapsed().as_secs_f64() * 1e6 / requests as f64
        };
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(run)).collect();
        std::thread::sleep(Duration::from_millis(500));
        stop.store(true, Ordering::Relaxed);
        threads.into_iter().map(|thread| thread.join().unwrap_or(f64::NAN)).collect()
    });
    Ok(times.iter().sum::<f64>() / times.len() as f64)
}

fn nagaya(
    setting: &ExperimentSetting,
    population: &SitePopulation,
    backend: &TestServer,
) -> Result<TestServer> {
    use std::io::Write as _;
    let node = NagayaNode::create(&setting.program, setting.dir(), "nagaya", NagayaSettings::default())?;
    let (path, mut writer) = node.records("sites.jsonl")?;
    population.write_records(&mut writer)?;
    let tenant = json!({"tenant": {"name": "applications", "uid": 390_000, "gid": 390_000}});
    let site = json!({"site": {
        "name": "application", "tenant": "applications", "hosts": ["application.example"],
        "backend": {"kind": "http", "address": backend.address.to_string()},
    }});
    write!(writer, "{tenant}\n{site}\n").and_then(|()| writer.flush()).context("writing records")?;
    drop(writer);
    node.import(&path)?;
    node.start(&StartProbe { host: population.host(0), path: "/hello.txt".into() })
}
