//! `sites-scale`: the cost of 1,000, 10,000 and 100,000 sites. It covers import, start, look-up,
//! memory, and the time until a change is live.
//!
//! Not here: the other experiments.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use crate::content::population::{HELLO, SitePopulation};
use crate::experiment::harness::ExperimentSetting;
use crate::load::{self, LoadSettings, LoadTarget};
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report};
use crate::server::nagaya::{NagayaNode, NagayaSettings};
use crate::server::{StartProbe, TestServer};
use crate::{http, interrupt};

/// Numbers of sites, and their names in keys and plots.
const SIZES: [(usize, &str); 3] = [(1_000, "1000"), (10_000, "10000"), (100_000, "100000")];

/// Changes whose way to the edge is timed, for each size and round.
const CHANGES: usize = 5;

/// New connections in a row that must find the new site. They spread over the edge's threads, and a
/// site is live when every thread has it.
const IN_A_ROW: usize = 16;

/// Longest wait for a change to be live before it counts as lost.
const LIVE_MAX: Duration = Duration::from_secs(10);

const GOALS: [Goal; 3] = [
    Goal { key: "import_s_100000", bound: Bound::AtMost(20.0), aim: 20.0 },
    Goal { key: "start_s_100000", bound: Bound::AtMost(2.0), aim: 2.0 },
    Goal { key: "live_ms_100000", bound: Bound::AtMost(50.0), aim: 50.0 },
];

pub fn run(setting: &ExperimentSetting) -> Result<()> {
    let mut report = Report::new("sites-scale");
    let most = SIZES.iter().map(|(count, _)| *count).max().context("no sizes")?;
    let population = SitePopulation::create(setting.dir(), most)?;
    for round in 0..setting.rounds() {
        let mut order = SIZES;
        order.rotate_left(round % SIZES.len());
        for (count, name) in order {
            let sites = SitePopulation { count, ..population.clone() };
            measure(&mut report, setting, &sites, round, name)
                .with_context(|| format!("with {count} sites"))?;
        }
        eprintln!("round {} of {} done", round + 1, setting.rounds());
    }
    summarise(&mut report)?;
    let chart = chart(&report);
    report.write(&setting.out, &chart, &GOALS)
}

/// Measures a new node with this many sites: imported into it while it runs, then started from its
/// store.
fn measure(
    report: &mut Report,
    setting: &ExperimentSetting,
    sites: &SitePopulation,
    round: usize,
    name: &str,
) -> Result<()> {
    interrupt::check()?;
    let dir = format!("node-{name}-{round}");
    let node = NagayaNode::create(&setting.program, setting.dir(), &dir, NagayaSettings::default())?;
    let (path, writer) = node.records("sites.jsonl")?;
    sites.write_records(writer)?;
    let mut first = node.serve()?;
    let import = node.import(&path)?;
    first.stop();

    let probe = StartProbe { host: sites.host(sites.count / 2), path: "/hello.txt".into() };
    let server = node.start(&probe)?;
    report.sample(round, "import", name, "seconds", import.as_secs_f64());
    report.sample(round, "start", name, "seconds", server.started_in.as_secs_f64());
    report.sample(round, "memory", name, "mib", server.memory_mib()?);
    report.sample(round, "lookup", name, "microseconds", lookup(&server, sites)?);
    for change in 0..CHANGES {
        let live = change_until_live(&node, &server, sites, round * CHANGES + change)?;
        report.sample(round, "live", name, "milliseconds", live.as_secs_f64() * 1e3);
    }
    Ok(())
}

/// Returns the time of one request on one connection, hosts spread over all sites. The part that
/// grows with their number is the look-up.
fn lookup(server: &TestServer, sites: &SitePopulation) -> Result<f64> {
    let hello = HELLO.len() as u64;
    let target = LoadTarget { hosts: sites.spread(), path: "/hello.txt".into(), body_bytes: hello..=hello };
    let one = LoadSettings { connections: 1, duration: Duration::from_secs(1) };
    // The first second opens each host's document root.
    load::run(server.address, &target, &one)?;
    Ok(load::run(server.address, &target, &one)?.p50_ms * 1e3)
}

/// Returns the time from the start of the command line's program until every new connection finds
/// the site.
fn change_until_live(
    node: &NagayaNode,
    server: &TestServer,
    sites: &SitePopulation,
    number: usize,
) -> Result<Duration> {
    let host = format!("new-{number}.example");
    let (status, _) = http::get(server.address, &host, "/hello.txt")?;
    ensure!(status == 404, "{host} is already served: status {status}");
    let (name, root) = (format!("new-{number}"), sites.root(0));
    let root = root.to_string_lossy();

    let begun = Instant::now();
    node.run(&[
        "site",
        "add",
        &name,
        "--tenant",
        "tenant-0",
        "--host",
        &host,
        "--backend",
        "static",
        "--root",
        &root,
    ])?;
    loop {
        let asked = Instant::now();
        let found = (0..IN_A_ROW)
            .all(|_| http::get(server.address, &host, "/hello.txt").is_ok_and(|(status, _)| status == 200));
        if found {
            return Ok(asked - begun);
        }
        ensure!(begun.elapsed() < LIVE_MAX, "{host} is not served {LIVE_MAX:?} after it was added");
        interrupt::check()?;
    }
}

fn summarise(report: &mut Report) -> Result<()> {
    for (_, name) in SIZES {
        report.set(format!("import_s_{name}"), report.median("import", name, "seconds")?);
        report.set(format!("start_s_{name}"), report.median("start", name, "seconds")?);
        report.set(format!("lookup_us_{name}"), report.median("lookup", name, "microseconds")?);
        report.set(format!("memory_mb_{name}"), report.median("memory", name, "mib")?);
        report.set(format!("live_ms_{name}"), report.median("live", name, "milliseconds")?);
    }
    let (least, most) = (report.median("memory", "1000", "mib")?, report.median("memory", "100000", "mib")?);
    report.set("memory_bytes_per_site", (most - least) * f64::from(1 << 20) / 99_000.0);
    Ok(())
}

fn chart(report: &Report) -> Chart {
    let names = SIZES.map(|(_, name)| name);
    Chart {
        title: "What very many sites cost".into(),
        subtitle: "one node, ten sites for each tenant; median, whiskers: least and greatest round".into(),
        panels: vec![
            report.panel("Import", "seconds", "import", "seconds", &names),
            report.panel("Start until the first answer", "seconds", "start", "seconds", &names),
            report.panel("Memory of all processes", "MiB", "memory", "mib", &names),
            report.panel("One request, spread hosts", "microseconds", "lookup", "microseconds", &names),
            report.panel("Change until live", "milliseconds", "live", "milliseconds", &names),
        ],
    }
}
