//! `static`: files of three sizes with 100,000 sites, against nginx and Apache.
//!
//! Not here: the other experiments.

use anyhow::Result;
use serde_json::json;

use super::{Case, HELLO, Population, Setting, interleave};
use crate::load::Target;
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report};
use crate::server::apache::{self, Mpm};
use crate::server::nagaya::{Node, Settings};
use crate::server::nginx::{self, Form};
use crate::server::{Probe, Server};

const SITES: usize = 100_000;

/// The cost of an access log does not depend on the number of sites: these two servers have fewer.
const SITES_LOGGED: usize = 1_000;

const NGINX: [&str; 2] = ["nginx", "nginx-names"];
/// A virtual host for each site: each may have its own settings, as in nagaya.
const APACHE: [&str; 2] = ["apache-prefork", "apache-event"];
/// All sites in one virtual host with roots computed from names (`mod_vhost_alias`): faster, and no site can have
/// settings of its own. Under prefork, which serves it faster than event does.
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

/// Everything that serves, kept until the end: all servers run throughout, one of them under load at a time.
struct Field {
    nagaya: Server,
    nginx_blocks: Server,
    nginx_names: Server,
    apache: Vec<(&'static str, Server)>,
    nagaya_logged: Server,
    nginx_logged: Server,
}

pub fn run(setting: &Setting) -> Result<()> {
    let mut report = Report::new("static");
    let population = Population::create(setting.dir(), SITES)?;
    let logged = Population { count: SITES_LOGGED, ..population.clone() };
    let field = start(setting, &population, &logged)?;
    let cases = cases(&field, &population, &logged);
    interleave(&mut report, setting, &setting.load(), &cases)?;
    drop(cases);
    summarise(&mut report, &field)?;
    let chart = chart(&report);
    report.write(&setting.out, &chart, &GOALS)
}

fn start(setting: &Setting, population: &Population, logged: &Population) -> Result<Field> {
    let dir = setting.dir();
    eprintln!("starting the servers with {} sites each", population.count);
    let apache = |name: &'static str, mpm, form| -> Result<_> {
        Ok((name, apache::sites(dir, population, mpm, form)?))
    };
    Ok(Field {
        nagaya: nagaya(setting, "nagaya", population, false)?,
        nginx_blocks: nginx::sites(&dir.join("blocks"), population, Form::Blocks, false)?,
        nginx_names: nginx::sites(&dir.join("names"), population, Form::Names, false)?,
        apache: vec![
            apache(APACHE[0], Mpm::Prefork, apache::Form::VirtualHosts)?,
            apache(APACHE[1], Mpm::Event, apache::Form::VirtualHosts)?,
            apache(APACHE_ALIAS, Mpm::Prefork, apache::Form::Alias)?,
        ],
        nagaya_logged: nagaya(setting, "nagaya-logged", logged, true)?,
        nginx_logged: nginx::sites(&dir.join("logged"), logged, Form::Blocks, true)?,
    })
}

/// A node with the population, imported before it starts.
fn nagaya(setting: &Setting, name: &str, population: &Population, log: bool) -> Result<Server> {
    let node = Node::create(&setting.program, setting.dir(), name, Settings { log, ..Settings::default() })?;
    let (path, writer) = node.records("sites.jsonl")?;
    population.write_records(writer)?;
    node.import(&path)?;
    node.start(&Probe { host: population.host(population.count / 2), path: "/hello.txt".into() })
}

fn cases<'f>(field: &'f Field, population: &Population, logged: &Population) -> Vec<Case<'f>> {
    let target =
        |hosts, path: &str, bytes: u64| Target { hosts, path: path.into(), body_bytes: bytes..=bytes };
    // In the middle of the population: Apache compares names one after the other, so that the first site would
    // flatter it and the last one would wrong it.
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
        Case { name: "hello", target: target(one(), "/hello.txt", hello), servers: all },
        Case { name: "64k", target: target(one(), "/64k.bin", 64 << 10), servers: large.clone() },
        Case { name: "1m", target: target(one(), "/1m.bin", 1 << 20), servers: large },
        Case { name: "spread", target: target(population.spread(), "/hello.txt", hello), servers: spread },
        Case {
            name: "log",
            target: target(vec![logged.host(logged.count / 2)], "/hello.txt", hello),
            servers: logs,
        },
    ]
}

fn summarise(report: &mut Report, field: &Field) -> Result<()> {
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
    report.set("nagaya_rss_mb", field.nagaya.process.memory_mib()?);
    report.set("nginx_rss_mb", nginx_server.process.memory_mib()?);
    report.set("nginx_names_rss_mb", field.nginx_names.process.memory_mib()?);
    report.set("apache_rss_mb", field.apache[0].1.process.memory_mib()?);
    for (name, server) in &field.apache {
        report.set(format!("{}_rss_mb", name.replace('-', "_")), server.process.memory_mib()?);
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
