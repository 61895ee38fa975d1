//! `isolation-overhead`: experiment 1 of per-request isolation: static hellos of 100,000 hosts with no rule, with a rule
//! that is evaluated, with one that attaches (Figure 4 of the original), with and without receipts, and what Apache and
//! nginx do meanwhile.
//!
//! Not here: the other experiments.

use std::fs;

use anyhow::{Context as _, Result};
use serde_json::json;

use crate::experiment::{Case, HELLO, Population, Setting, interleave};
use crate::load::Target;
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report};
use crate::server::apache::{self, Mpm};
use crate::server::nagaya::{Node, Settings};
use crate::server::nginx::{self, Form};
use crate::server::{Probe, Server};
use crate::workspace;

const SITES: usize = 100_000;

/// The rule that attaches every request: the published figure, as the tests of the rules have it.
const FIGURE: &str = "crates/rules/fixtures/figure4.rb";

/// The same question, and no answer for those who are no target.
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

pub fn run(setting: &Setting) -> Result<()> {
    let mut report = Report::new("isolation-overhead");
    let population = Population::create(setting.dir(), SITES)?;
    eprintln!("starting the servers with {SITES} sites each");
    let servers = start(setting, &population)?;
    let target = Target {
        hosts: vec![population.host(population.count / 2)],
        path: "/hello.txt".into(),
        body_bytes: HELLO.len() as u64..=HELLO.len() as u64,
    };
    let cases = [Case {
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

fn start(setting: &Setting, population: &Population) -> Result<Vec<(&'static str, Server)>> {
    let dir = setting.dir();
    let figure = workspace::root().join(FIGURE);
    let figure = fs::read_to_string(&figure).with_context(|| format!("reading {}", figure.display()))?;
    let rules = |text: &str| vec![("access_checker", text.to_owned())];
    let no_receipts = "[receipts]\nkeep = 0\n".to_owned();
    let variants = [
        (OFF, "off", Settings::default()),
        (BARE, "bare", Settings { tables: no_receipts, ..Settings::default() }),
        (RULE, "rule", Settings { rules: rules(EVALUATED), ..Settings::default() }),
        (ATTACH, "attach", Settings { rules: rules(&figure), ..Settings::default() }),
    ];
    let mut all = Vec::new();
    for (variant, name, settings) in variants {
        let node = Node::create(&setting.program, dir, name, settings)?;
        let (path, writer) = node.records("sites.jsonl")?;
        population.write_records(writer)?;
        node.import(&path)?;
        let probe = Probe { host: population.host(population.count / 2), path: "/hello.txt".into() };
        all.push((variant, node.start(&probe)?));
    }
    all.push((NGINX[0], nginx::sites(&dir.join("blocks"), population, Form::Blocks, false)?));
    all.push((NGINX[1], nginx::sites(&dir.join("names"), population, Form::Names, false)?));
    all.push((APACHE, apache::sites(dir, population, Mpm::Prefork, apache::Form::VirtualHosts)?));
    all.push((APACHE_ALIAS, apache::sites(dir, population, Mpm::Prefork, apache::Form::Alias)?));
    Ok(all)
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
