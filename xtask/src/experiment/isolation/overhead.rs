//! `isolation-overhead`, experiment 1 of per-request isolation: static hellos of 100,000 hosts. It
//! has no rule, a rule that is evaluated, and one that attaches (Figure 4 of the original).
//! Receipts are on and off. Apache and nginx are the peers.
//!
//! Not here: the other experiments.

use std::fs;

use anyhow::{Context as _, Result};
use serde_json::json;

use crate::content::population::{HELLO, SitePopulation};
use crate::experiment::harness::{ExperimentCase, ExperimentSetting, interleave};
use crate::experiment::static_files;
use crate::load::LoadTarget;
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report};
use crate::server::TestServer;
use crate::server::apache::{self, ApacheMpm};
use crate::server::nagaya::NagayaSettings;
use crate::server::nginx::{self, NginxForm};
use crate::workspace;

const SITES: usize = 100_000;

/// The rule that attaches every request: the published figure, as in the tests of the rules.
const FIGURE: &str = "crates/rules/fixtures/figure4.rb";

/// The same test, without an action for hosts that are not targets.
const EVALUATED: &str = "targets = %w(\n  target1.example.com\n  target2.example.com\n  target3.example.com\n  \
     target4.example.com\n)\nr = Apache::Request.new\nif targets.include? r.hostname\n  c = Cgroup::CPU.new \
     \"httpd-limited\"\n  c.shares = 25\n  c.create\n  c.attach\nend\n";

const OFF: &str = "nagaya, no rule";
const BARE: &str = "nagaya, no receipts";
const RULE: &str = "nagaya, rule evaluated";
const ATTACH: &str = "nagaya, rule attaches";
const NGINX: [&str; 2] = ["nginx", "nginx-names"];
const APACHE: &str = "apache-prefork";
const APACHE_ALIAS: &str = "apache-alias";

const GOALS: [Goal; 3] = [
    Goal { key: "ratio_rule", bound: Bound::AtLeast(0.98), aim: 0.995 },
    Goal { key: "ratio_receipt", bound: Bound::AtLeast(0.99), aim: 0.99 },
    Goal { key: "ratio_nginx", bound: Bound::AtLeast(1.1), aim: 1.4 },
];

pub fn run(setting: &ExperimentSetting) -> Result<()> {
    let mut report = Report::new("isolation-overhead");
    let population = SitePopulation::create(setting.dir(), SITES)?;
    eprintln!("starting the servers with {SITES} sites each");
    let servers = start(setting, &population)?;
    let target = LoadTarget {
        hosts: vec![population.host(population.count / 2)],
        path: "/hello.txt".into(),
        body_bytes: HELLO.len() as u64..=HELLO.len() as u64,
    };
    let cases = [ExperimentCase {
        name: "hello",
        target,
        servers: servers.iter().map(|(name, server)| (*name, server)).collect(),
    }];
    interleave(&mut report, setting, &setting.load(), &cases)?;
    report.note("sites", json!(SITES));
    summarise(&mut report)?;
    let chart = chart(&report);
    report.write(&setting.out, &chart, &GOALS)
}

fn start(
    setting: &ExperimentSetting,
    population: &SitePopulation,
) -> Result<Vec<(&'static str, TestServer)>> {
    let dir = setting.dir();
    let figure = read_figure()?;
    let rules = |text: &str| vec![("access_checker", text.to_owned())];
    let no_receipts = "[receipts]\nkeep = 0\n".to_owned();
    let variants = [
        (OFF, "off", NagayaSettings::default()),
        (BARE, "bare", NagayaSettings { tables: no_receipts, ..NagayaSettings::default() }),
        (RULE, "rule", NagayaSettings { rules: rules(EVALUATED), ..NagayaSettings::default() }),
        (ATTACH, "attach", NagayaSettings { rules: rules(&figure), ..NagayaSettings::default() }),
    ];
    let mut all = Vec::new();
    for (variant, name, settings) in variants {
        all.push((variant, static_files::start_nagaya(setting, (dir, name), population, settings)?));
    }
    all.push((NGINX[0], nginx::sites(&dir.join("blocks"), population, NginxForm::Blocks, false)?));
    all.push((NGINX[1], nginx::sites(&dir.join("names"), population, NginxForm::Names, false)?));
    all.push((APACHE, apache::sites(dir, population, ApacheMpm::Prefork, apache::ApacheForm::VirtualHosts)?));
    all.push((APACHE_ALIAS, apache::sites(dir, population, ApacheMpm::Prefork, apache::ApacheForm::Alias)?));
    Ok(all)
}

/// Reads the rule that attaches every request.
pub fn read_figure() -> Result<String> {
    let figure = workspace::root().join(FIGURE);
    fs::read_to_string(&figure).with_context(|| format!("reading {}", figure.display()))
}

fn summarise(report: &mut Report) -> Result<()> {
    let nginx = report.best("hello", &NGINX, "rps")?;
    report.note("ratio_nginx is of", json!(nginx));
    for (key, variant) in [
        ("off_rps", OFF),
        ("no_receipt_rps", BARE),
        ("rule_rps", RULE),
        ("attach_rps", ATTACH),
        ("nginx_rps", nginx),
        ("apache_rps", APACHE),
        ("apache_alias_rps", APACHE_ALIAS),
    ] {
        report.set(key, report.median("hello", variant, "rps")?);
    }
    for (key, variant, peer) in [
        ("ratio_rule", RULE, OFF),
        ("ratio_attach", ATTACH, OFF),
        ("ratio_receipt", OFF, BARE),
        ("ratio_nginx", ATTACH, nginx),
        ("ratio_apache", ATTACH, APACHE),
        ("ratio_apache_alias", ATTACH, APACHE_ALIAS),
    ] {
        report.set(key, report.ratio("hello", variant, peer, "rps")?);
    }
    for (key, variant) in
        [("off_cpu_us", OFF), ("no_receipt_cpu_us", BARE), ("rule_cpu_us", RULE), ("attach_cpu_us", ATTACH)]
    {
        report.set(key, report.median("hello", variant, "cpu_us_per_request")?);
    }
    Ok(())
}

fn chart(report: &Report) -> Chart {
    let own = [BARE, OFF, RULE, ATTACH];
    let all = [ATTACH, NGINX[0], NGINX[1], APACHE, APACHE_ALIAS];
    Chart {
        title: "What rules and receipts cost a static hello, 100,000 hosts".into(),
        subtitle:
            "wrk, 100 keep-alive connections on the same cores; median, whiskers: least and greatest round"
                .into(),
        panels: vec![
            report.panel("nagaya", "requests/s", "hello", "rps", &own),
            report.panel("CPU time of the server", "us/request", "hello", "cpu_us_per_request", &own),
            report.panel("With rule and receipts, and peers", "requests/s", "hello", "rps", &all),
        ],
    }
}
