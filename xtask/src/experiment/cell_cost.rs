//! `cell-cost`: the cost of a cell. It measures a CGI program that is born in one, and a worker
//! that is moved in and out. Both run on a quiet machine and while others fork.
//!
//! The keeper is the node's own. It is called as the edge calls it, so that the cost of an
//! execution includes both messages.
//!
//! Not here: whether limits hold (`isolation`).

use std::io::Write as _;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context as _, Result, anyhow};
use nagaya_keeper_api::client::KeeperClient;
use nagaya_records::SiteName;
use nagaya_records::cell::{Confinement, CpuQuota, LimitSet};
use serde_json::json;
use tokio::task::LocalSet;

use crate::clients::ClientAnswers;
use crate::content;
use crate::content::population::UID_BASE;
use crate::experiment::harness::{ExperimentCase, ExperimentSetting, interleave};
use crate::load::{LoadSettings, LoadTarget};
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report};
use crate::server::nagaya::{NagayaNode, NagayaSettings};
use crate::server::{StartProbe, TestServer};

/// Programs at once in the CGI case: enough to keep two cores busy.
const CONNECTIONS: u32 = 8;

/// The smallest useful program.
const HELLO_CGI: &str = "#!/bin/sh\nprintf 'Content-Type: text/plain\\r\\n\\r\\nHello, world!\\n'\n";
const HELLO_BYTES: u64 = 14;

const CELLS: &str = "cells";
const NO_CELLS: &str = "no cells";

const GOALS: [Goal; 3] = [
    Goal { key: "enter_leave_p50_us", bound: Bound::AtMost(60.0), aim: 30.0 },
    Goal { key: "enter_leave_p99_us", bound: Bound::AtMost(400.0), aim: 150.0 },
    Goal { key: "cgi_ratio_with_cell", bound: Bound::AtLeast(0.97), aim: 0.97 },
];

pub fn run(setting: &ExperimentSetting) -> Result<()> {
    let mut report = Report::new("cell-cost");
    let root = setting.dir().join("programs");
    std::fs::create_dir_all(&root).with_context(|| format!("creating {}", root.display()))?;
    let file = root.join("hello.cgi");
    std::fs::write(&file, HELLO_CGI).with_context(|| format!("writing {}", file.display()))?;
    std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .context("making a program executable")?;
    content::give(&root, UID_BASE)?;

    let (with, node) = node(setting, "cells", &root, "")?;
    let (without, _) = self::node(setting, "bare", &root, "[cells]\nback_end = \"process-group\"\n")?;
    stays(&mut report, setting, &node)?;
    let target = LoadTarget {
        hosts: vec!["a.example".into()],
        path: "/hello.cgi".into(),
        body_bytes: HELLO_BYTES..=HELLO_BYTES + 16,
    };
    let cases = [ExperimentCase { name: "cgi", target, servers: vec![(CELLS, &with), (NO_CELLS, &without)] }];
    let load = LoadSettings { connections: CONNECTIONS, ..setting.load() };
    interleave(&mut report, setting, &load, &cases)?;
    report.set("cgi_ratio_with_cell", report.ratio("cgi", CELLS, NO_CELLS, "rps")?);
    report.set("cgi_rps", report.median("cgi", CELLS, "rps")?);
    report.set("cgi_rps_no_cells", report.median("cgi", NO_CELLS, "rps")?);
    let chart = chart(&report);
    report.write(&setting.out, &chart, &GOALS)
}

/// Makes one tenant with two sites, each with its own limit, so that a worker of both has to move.
fn node(
    setting: &ExperimentSetting,
    name: &str,
    root: &std::path::Path,
    tables: &str,
) -> Result<(TestServer, NagayaNode)> {
    let settings = NagayaSettings { tables: tables.into(), ..NagayaSettings::default() };
    let node = NagayaNode::create(&setting.program, setting.dir(), name, settings)?;
    let (path, mut writer) = node.records("sites.jsonl")?;
    let tenant = json!({"tenant": {"name": "t", "uid": UID_BASE, "gid": UID_BASE, "home": root}});
    writeln!(writer, "{tenant}").context("writing records")?;
    for (site, kind) in [("a", "cgi"), ("b", "php"), ("c", "php")] {
        let record = json!({"site": {"name": site, "tenant": "t", "hosts": [format!("{site}.example")],
            "limits": {"cpu": "150%"}, "backend": {"kind": kind, "root": root}}});
        writeln!(writer, "{record}").context("writing records")?;
    }
    writer.flush().context("writing records")?;
    drop(writer);
    node.import(&path)?;
    let server = node.start(&StartProbe { host: "a.example".into(), path: "/hello.cgi".into() })?;
    Ok((server, node))
}

/// Measures the cells of one worker: moved between two sites, and kept in place with other limits.
fn stays(report: &mut Report, setting: &ExperimentSetting, node: &NagayaNode) -> Result<()> {
    let count = if setting.quick { 2_000 } else { 10_000 };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("a runtime")?;
    for round in 0..setting.rounds() {
        for (noise, forking) in [("quiet", false), ("forking", true)] {
            let forks = forking.then(ForkCounter::start);
            for (what, sites) in [("moved", ["b", "c"]), ("limits", ["b", "b"])] {
                let times = LocalSet::new().block_on(&runtime, stay(node, sites, count))?;
                let case = format!("{what}, {noise}");
                report.sample(round, &case, "stay", "p50_us", times.percentile_ms(0.5) * 1e3);
                report.sample(round, &case, "stay", "p99_us", times.percentile_ms(0.99) * 1e3);
            }
            if let Some(forks) = forks {
                forks.stop()?;
            }
        }
    }
    for (key, case) in [
        ("enter_leave", "moved, quiet"),
        ("enter_leave_limits", "limits, quiet"),
        ("enter_leave_forking", "moved, forking"),
        ("enter_leave_limits_forking", "limits, forking"),
    ] {
        report.set(format!("{key}_p50_us"), report.median(case, "stay", "p50_us")?);
        report.set(format!("{key}_p99_us"), report.median(case, "stay", "p99_us")?);
    }
    report.note("stays in each round", json!(count));
    Ok(())
}

async fn stay(node: &NagayaNode, sites: [&str; 2], count: usize) -> Result<ClientAnswers> {
    let keeper = KeeperClient::connect(&node.keeper_socket()).await.context("connecting to the keeper")?;
    let site = SiteName::new("b").context("the site's name")?;
    let worker = keeper.spawn_php(&site, Some(0)).await.context("starting a worker")?;
    let sites: Vec<SiteName> =
        sites.iter().map(|site| SiteName::new(site)).collect::<Result<_, _>>().context("names of sites")?;
    let limited = |thousandths| Confinement {
        limits: LimitSet { cpu: Some(CpuQuota::of_core(thousandths)), ..LimitSet::default() },
        ..Confinement::default()
    };
    let confinements = [limited(500), limited(250)];
    let mut times = ClientAnswers::default();
    for index in 0..count {
        let begun = Instant::now();
        keeper
            .enter(worker.guard.id(), &sites[index % 2], &confinements[index % 2])
            .await
            .context("entering a cell")?;
        keeper.leave(worker.guard.id()).await.context("leaving a cell")?;
        times.times_ms.push(begun.elapsed().as_secs_f64() * 1e3);
    }
    worker.guard.end().await.context("ending the worker")?;
    Ok(times)
}

/// Processes that come and go all the time, and so take the kernel's lock on moving.
struct ForkCounter {
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<Result<()>>,
}

impl ForkCounter {
    fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while !told.load(Ordering::Relaxed) {
                Command::new("/bin/true").stdin(Stdio::null()).status().context("running /bin/true")?;
            }
            Ok(())
        });
        Self { stop, thread }
    }

    fn stop(self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow!("the forking thread panicked"))?
    }
}

fn chart(report: &Report) -> Chart {
    let stay =
        |title: &str, case: &str, metric: &str| report.panel(title, "microseconds", case, metric, &["stay"]);
    Chart {
        title: "What a stay in a cell costs".into(),
        subtitle: "a worker enters for one request and leaves, two messages to the keeper included".into(),
        panels: vec![
            stay("Moved, median", "moved, quiet", "p50_us"),
            stay("Moved, 99th percentile", "moved, quiet", "p99_us"),
            stay("Limits only, median", "limits, quiet", "p50_us"),
            stay("Moved while others fork, median", "moved, forking", "p50_us"),
            stay("Moved while others fork, 99th percentile", "moved, forking", "p99_us"),
            report.panel("CGI hello", "requests/s", "cgi", "rps", &[CELLS, NO_CELLS]),
        ],
    }
}
