//! `static`: files of three sizes with 100,000 sites, against nginx and Apache.
//!
//! Not here: the other experiments.

use std::path::Path;

use anyhow::Result;
use serde_json::json;

use crate::content::population::{HELLO, SitePopulation};
use crate::experiment::harness::{ExperimentCase, ExperimentSetting, interleave};
use crate::load::LoadTarget;
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report};
use crate::server::apache::{self, ApacheMpm};
use crate::server::nagaya::{NagayaNode, NagayaSettings};
use crate::server::nginx::{self, NginxForm};
use crate::server::{StartProbe, TestServer};

const SITES: usize = 100_000;

/// The cost of an access log does not depend on the number of sites: these two servers have fewer.
const SITES_LOGGED: usize = 1_000;

const NGINX: [&str; 2] = ["nginx", "nginx-names"];
/// A virtual host for each site: each may have its own settings, as in nagaya.
const APACHE: [&str; 2] = ["apache-prefork", "apache-event"];
/// All sites in one virtual host with roots computed from names (`mod_vhost_alias`). It is faster,
/// and no site can have its own settings. It runs under prefork, which serves it faster than event
/// does.
const APACHE_ALIAS: &str = "apache-alias";

const GOALS: [Goal; 7] = [
    Goal { key: "ratio_nginx", bound: Bound::AtLeast(1.15), aim: 1.5 },
    Goal { key: "ratio_apache", bound: Bound::AtLeast(3.0), aim: 3.0 },
    Goal { key: "ratio_nginx_64k", bound: Bound::AtLeast(0.95), aim: 1.1 },
    Goal { key: "ratio_nginx_1m", bound: Bound::AtLeast(0.95), aim: 1.1 },
    Goal { key: "p99_ratio_nginx", bound: Bound::AtMost(1.0), aim: 1.0 },
    Goal { key: "nagaya_rss_mb", bound: Bound::AtMost(400.0), aim: 200.0 },
    Goal { key: "ratio_nginx_log", bound: Bound::AtLeast(1.15), aim: 1.5 },
];

/// All servers, kept until the end: all run throughout, one of them under load at a time.
struct FileField {
    nagaya: TestServer,
    nginx_blocks: TestServer,
    nginx_names: TestServer,
    apache: Vec<(&'static str, TestServer)>,
    nagaya_logged: TestServer,
    nginx_logged: TestServer,
}

pub fn run(setting: &ExperimentSetting) -> Result<()> {
    let mut report = Report::new("static");
    let population = SitePopulation::create(setting.dir(), SITES)?;
    let logged = SitePopulation { count: SITES_LOGGED, ..population.clone() };
    let field = start(setting, &population, &logged)?;
    let cases = cases(&field, &population, &logged);
    interleave(&mut report, setting, &setting.load(), &cases)?;
    drop(cases);
    summarise(&mut report, &field)?;
    let chart = chart(&report);
    report.write(&setting.out, &chart, &GOALS)
}

fn start(
    setting: &ExperimentSetting,
    population: &SitePopulation,
    logged: &SitePopulation,
) -> Result<FileField> {
    let dir = setting.dir();
    eprintln!("starting the servers with {} sites each", population.count);
    let apache = |name: &'static str, mpm, form| -> Result<_> {
        Ok((name, apache::sites(dir, population, mpm, form)?))
    };
    Ok(FileField {
        nagaya: start_nagaya(setting, (dir, "nagaya"), population, NagayaSettings::default())?,
        nginx_blocks: nginx::sites(&dir.join("blocks"), population, NginxForm::Blocks, false)?,
        nginx_names: nginx::sites(&dir.join("names"), population, NginxForm::Names, false)?,
        apache: vec![
            apache(APACHE[0], ApacheMpm::Prefork, apache::ApacheForm::VirtualHosts)?,
            apache(APACHE[1], ApacheMpm::Event, apache::ApacheForm::VirtualHosts)?,
            apache(APACHE_ALIAS, ApacheMpm::Prefork, apache::ApacheForm::Alias)?,
        ],
        nagaya_logged: start_nagaya(
            setting,
            (dir, "nagaya-logged"),
            logged,
            NagayaSettings { log: true, ..NagayaSettings::default() },
        )?,
        nginx_logged: nginx::sites(&dir.join("logged"), logged, NginxForm::Blocks, true)?,
    })
}

/// Starts a node of this name with the population, imported before it starts.
pub fn start_nagaya(
    setting: &ExperimentSetting,
    (dir, name): (&Path, &str),
    population: &SitePopulation,
    settings: NagayaSettings,
) -> Result<TestServer> {
    let node = NagayaNode::create(&setting.program, dir, name, settings)?;
    let (path, writer) = node.records("sites.jsonl")?;
    population.write_records(writer)?;
    node.import(&path)?;
    node.start(&StartProbe { host: population.host(population.count / 2), path: "/hello.txt".into() })
}

fn cases<'f>(
    field: &'f FileField,
    population: &SitePopulation,
    logged: &SitePopulation,
) -> Vec<ExperimentCase<'f>> {
    let target =
        |hosts, path: &str, bytes: u64| LoadTarget { hosts, path: path.into(), body_bytes: bytes..=bytes };
    // From the middle of the population: Apache compares names one after the other. So the first
    // site would be too fast and the last one too slow.
    let one = || vec![population.host(population.count / 2)];
    let hello = HELLO.len() as u64;
    let mut all =
        vec![("nagaya", &field.nagaya), ("nginx", &field.nginx_blocks), ("nginx-names", &field.nginx_names)];
    all.extend(field.apache.iter().map(|(name, server)| (*name, server)));
    let large = vec![("nagaya", &field.nagaya), ("nginx", &field.nginx_blocks)];
    let spread =
        vec![("nagaya", &field.nagaya), ("nginx", &field.nginx_blocks), (APACHE_ALIAS, &field.apache[2].1)];
    let logs = vec![("nagaya", &field.nagaya_logged), ("nginx", &field.nginx_logged)];
    vec![
        ExperimentCase { name: "hello", target: target(one(), "/hello.txt", hello), servers: all },
        ExperimentCase { name: "64k", target: target(one(), "/64k.bin", 64 << 10), servers: large.clone() },
        ExperimentCase { name: "1m", target: target(one(), "/1m.bin", 1 << 20), servers: large },
        ExperimentCase {
            name: "spread",
            target: target(population.spread(), "/hello.txt", hello),
            servers: spread,
        },
        ExperimentCase {
            name: "log",
            target: target(vec![logged.host(logged.count / 2)], "/hello.txt", hello),
            servers: logs,
        },
    ]
}

fn summarise(report: &mut Report, field: &FileField) -> Result<()> {
    let nginx = report.best("hello", &NGINX, "rps")?;
    let apache = report.best("hello", &APACHE, "rps")?;
    report.note("nginx_rps and ratio_nginx are of", json!(nginx));
    report.note("apache_rps is of", json!(APACHE[0]));
    report.note("ratio_apache is against", json!(apache));
    report.note("sites", json!(SITES));

    report.set("nagaya_rps", report.median("hello", "nagaya", "rps")?);
    report.set("nginx_rps", report.median("hello", nginx, "rps")?);
    report.set("apache_rps", report.median("hello", APACHE[0], "rps")?);
    report.set("nginx_blocks_rps", report.median("hello", NGINX[0], "rps")?);
    for name in [NGINX[1], APACHE[0], APACHE[1], APACHE_ALIAS] {
        report.set(format!("{}_rps", name.replace('-', "_")), report.median("hello", name, "rps")?);
    }
    report.set("ratio_nginx", report.ratio("hello", "nagaya", nginx, "rps")?);
    report.set("ratio_apache", report.ratio("hello", "nagaya", apache, "rps")?);
    report.set("ratio_apache_alias", report.ratio("hello", "nagaya", APACHE_ALIAS, "rps")?);
    report.set("ratio_nginx_64k", report.ratio("64k", "nagaya", "nginx", "rps")?);
    report.set("ratio_nginx_1m", report.ratio("1m", "nagaya", "nginx", "rps")?);
    report.set("p99_ratio_nginx", report.ratio("hello", "nagaya", nginx, "p99_ms")?);
    report.set("nagaya_p99_ms", report.median("hello", "nagaya", "p99_ms")?);
    report.set("nginx_p99_ms", report.median("hello", nginx, "p99_ms")?);
    report.set("spread_nagaya_rps", report.median("spread", "nagaya", "rps")?);
    report.set("spread_nginx_rps", report.median("spread", "nginx", "rps")?);
    report.set("spread_ratio_nginx", report.ratio("spread", "nagaya", "nginx", "rps")?);
    report.set("ratio_nginx_log", report.ratio("log", "nagaya", "nginx", "rps")?);
    report.set("cpu_ratio_nginx", report.ratio("hello", "nagaya", nginx, "cpu_us_per_request")?);
    report.set("nagaya_cpu_us_per_request", report.median("hello", "nagaya", "cpu_us_per_request")?);
    report.set("nginx_cpu_us_per_request", report.median("hello", nginx, "cpu_us_per_request")?);

    let nginx_server = if nginx == NGINX[0] { &field.nginx_blocks } else { &field.nginx_names };
    report.set("nagaya_rss_mb", field.nagaya.memory_mib()?);
    report.set("nginx_rss_mb", nginx_server.memory_mib()?);
    report.set("nginx_names_rss_mb", field.nginx_names.memory_mib()?);
    report.set("apache_rss_mb", field.apache[0].1.memory_mib()?);
    for (name, server) in &field.apache {
        report.set(format!("{}_rss_mb", name.replace('-', "_")), server.memory_mib()?);
    }
    report.set("nagaya_start_s", field.nagaya.started_in.as_secs_f64());
    report.set("nginx_start_s", field.nginx_blocks.started_in.as_secs_f64());
    for (name, server) in &field.apache[..2] {
        report.set(format!("{}_start_s", name.replace('-', "_")), server.started_in.as_secs_f64());
    }
    Ok(())
}

fn chart(report: &Report) -> Chart {
    let all = ["nagaya", NGINX[0], NGINX[1], APACHE[0], APACHE[1], APACHE_ALIAS];
    let two = ["nagaya", "nginx"];
    Chart {
        title: "Static files, 100,000 sites on one node".into(),
        subtitle:
            "wrk, 100 keep-alive connections, load generator on the same cores; median, whiskers: least and \
                   greatest round"
                .into(),
        panels: vec![
            report.panel("Hello, one host", "requests/s", "hello", "rps", &all),
            report.panel(
                "Hello, 1,000 hosts",
                "requests/s",
                "spread",
                "rps",
                &["nagaya", "nginx", APACHE_ALIAS],
            ),
            report.panel("With access log", "requests/s", "log", "rps", &two),
            report.panel("64 KiB", "requests/s", "64k", "rps", &two),
            report.panel("1 MiB", "requests/s", "1m", "rps", &two),
            report.panel("Hello, 99th percentile", "milliseconds", "hello", "p99_ms", &all[..3]),
        ],
    }
}
