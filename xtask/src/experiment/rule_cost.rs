//! `rule-cost`: the time of one evaluation of a rule without a server, and the memory of a virtual
//! machine. It also tests whether constant rewriting of a rule under load spoils a response.
//!
//! Not here: the cost of rules in a server (`isolation::overhead`).

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use nagaya_records::cell::{CellName, CgroupController, RequestUsage};
use nagaya_rules::{
    Engine, FactSource, NumberFact, OnError, RuleBudget, RuleFile, RulePhase, RuleSet, ScalarValue, TextFact,
    Verdict,
};
use serde_json::json;

use crate::clients::to_float;
use crate::content::population::{HELLO, SitePopulation};
use crate::experiment::harness::ExperimentSetting;
use crate::load::{self, LoadSettings, LoadTarget};
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report};
use crate::server::StartProbe;
use crate::server::nagaya::{NagayaNode, NagayaSettings};
use crate::workspace;

/// The published figure, as in the tests of the rules.
const FIGURE: &str = "crates/rules/fixtures/figure4.rb";

/// Settings of a host by its name: the rule does not grow with hosts.
const KVS: &str = "shares = KVS.get(Apache::Request.new.hostname)\nif shares\n  c = Cgroup::CPU.new \"limited\"\n  \
     c.shares = shares\n  c.create\n  c.attach\nend\n";

/// The rule runs. Or its verdict for the same facts is remembered, as for most requests.
const RUN: &str = "run";
const REMEMBERED: &str = "remembered";

/// Hosts with a setting, in the two cases.
const FEW: usize = 4;
const MANY: usize = 10_000;

/// Virtual machines whose memory is measured together, so that pages of the allocator do not count.
const MACHINES: usize = 50;

/// Pause between two versions of the rule under load: some hundred in a run.
const REWRITE_EVERY: Duration = Duration::from_millis(10);

const GOALS: [Goal; 3] = [
    Goal { key: "fig4_us", bound: Bound::AtMost(2.0), aim: 2.0 },
    Goal { key: "kvs_us", bound: Bound::AtMost(1.0), aim: 1.0 },
    Goal { key: "reload_errors", bound: Bound::AtMost(0.0), aim: 0.0 },
];

pub fn run(setting: &ExperimentSetting) -> Result<()> {
    let mut report = Report::new("rule-cost");
    evaluations(&mut report, setting)?;
    report.set("vm_kib", memory(setting)?);
    reloads(&mut report, setting)?;
    let chart = chart(&report);
    report.write(&setting.out, &chart, &GOALS)
}

/// Measures the rules, each with its host and the number of settings.
fn evaluations(report: &mut Report, setting: &ExperimentSetting) -> Result<()> {
    let figure = workspace::root().join(FIGURE);
    let figure = fs::read_to_string(&figure).with_context(|| format!("reading {}", figure.display()))?;
    let cases: [(&str, &str, String, usize); 5] = [
        ("fig4", &figure, "target4.example.com".into(), 0),
        ("fig4_else", &figure, "other.example.com".into(), 0),
        ("kvs", KVS, host(MANY / 2), MANY),
        ("kvs_few", KVS, host(FEW / 2), FEW),
        ("empty", "Apache::Request.new\n", host(0), 0),
    ];
    let count = if setting.quick { 200_000 } else { 1_000_000 };
    let mut prepared = Vec::new();
    for (name, text, host, settings) in cases {
        let file = setting.dir().join(format!("{name}.rb"));
        let mut engine = Engine::new(rules(&file, text)?);
        let facts = RuleHosts::new(host, settings);
        evaluate(&mut engine, &facts, count / 10, run_each)?;
        prepared.push((name, engine, facts));
    }
    for round in 0..setting.rounds() {
        let turns = round % prepared.len();
        prepared.rotate_left(turns);
        for (name, engine, facts) in &mut prepared {
            for (variant, begin) in [(RUN, run_each as Begin), (REMEMBERED, Engine::blank)] {
                let seconds = evaluate(engine, facts, count, begin)?;
                report.sample(round, name, variant, "us", seconds * 1e6 / to_float(count));
            }
        }
    }
    for name in ["fig4", "fig4_else", "kvs", "kvs_few", "empty"] {
        report.set(format!("{name}_us"), report.median(name, RUN, "us")?);
        report.set(format!("{name}_remembered_us"), report.median(name, REMEMBERED, "us")?);
    }
    report.note("evaluations in each round", json!(count));
    Ok(())
}

fn rules(file: &Path, text: &str) -> Result<Arc<RuleSet>> {
    fs::write(file, text).with_context(|| format!("writing {}", file.display()))?;
    let rule = RuleFile {
        phase: RulePhase::AccessChecker,
        path: file.into(),
        cache: false,
        on_error: OnError::Refuse,
    };
    Ok(RuleSet::new(vec![rule], RuleBudget::default()))
}

/// Returns the verdict with which an evaluation begins.
type Begin = fn(&Engine) -> Rc<Verdict>;

/// Returns a separate verdict that the engine does not know to be empty: the rule runs.
fn run_each(_: &Engine) -> Rc<Verdict> {
    Rc::default()
}

/// Returns the seconds for this many evaluations.
fn evaluate(engine: &mut Engine, facts: &RuleHosts, count: usize, begin: Begin) -> Result<f64> {
    let begun = Instant::now();
    for _ in 0..count {
        let mut verdict = begin(engine);
        if !engine.recall(RulePhase::AccessChecker, facts, &mut verdict) {
            engine
                .evaluate(RulePhase::AccessChecker, facts, &mut verdict)
                .map_err(|fault| anyhow!("the rule failed: {fault:?}"))?;
        }
        std::hint::black_box(&verdict);
    }
    Ok(begun.elapsed().as_secs_f64())
}

/// Returns the KiB of one virtual machine that has evaluated the figure.
fn memory(setting: &ExperimentSetting) -> Result<f64> {
    let file = setting.dir().join("fig4.rb");
    let text = fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
    let set = rules(&file, &text)?;
    let facts = RuleHosts::new("target4.example.com".into(), 0);
    let before = resident_kib()?;
    let mut machines = Vec::new();
    for _ in 0..MACHINES {
        let mut engine = Engine::new(Arc::clone(&set));
        evaluate(&mut engine, &facts, 100, run_each)?;
        machines.push(engine);
    }
    Ok((resident_kib()? - before) / to_float(machines.len()))
}

fn resident_kib() -> Result<f64> {
    let text = fs::read_to_string("/proc/self/status").context("reading /proc/self/status")?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
    line.split_whitespace().next().and_then(|number| number.parse().ok()).context("VmRSS is no number")
}

/// Runs a node under load whose rule alternates between two versions, both right, and sometimes a
/// broken one in between.
fn reloads(report: &mut Report, setting: &ExperimentSetting) -> Result<()> {
    let population = SitePopulation::create(setting.dir(), 1)?;
    let version = |shares: u32| {
        format!(
            "c = Cgroup::CPU.new \"g\"\nc.shares = {shares}\nc.create\nc.attach\nr = Apache::Request.new\nr.hostname\n"
        )
    };
    let settings =
        NagayaSettings { rules: vec![("access_checker", version(1))], ..NagayaSettings::default() };
    let node = NagayaNode::create(&setting.program, setting.dir(), "nagaya", settings)?;
    let (path, writer) = node.records("sites.jsonl")?;
    population.write_records(writer)?;
    node.import(&path)?;
    let server = node.start(&StartProbe { host: population.host(0), path: "/hello.txt".into() })?;
    let target = LoadTarget {
        hosts: vec![population.host(0)],
        path: "/hello.txt".into(),
        body_bytes: HELLO.len() as u64..=HELLO.len() as u64,
    };
    let stop = AtomicBool::new(false);
    let file = node.rule(0);
    let load =
        LoadSettings { duration: Duration::from_secs(if setting.quick { 3 } else { 10 }), ..setting.load() };
    let (outcome, written) = std::thread::scope(|scope| {
        let writer = scope.spawn(|| -> Result<u32> {
            let mut turn = 0;
            while !stop.load(Ordering::Relaxed) {
                turn += 1;
                let text = if turn % 10 == 0 { "if (\n".to_owned() } else { version(2 + turn % 2) };
                fs::write(&file, text).context("rewriting the rule")?;
                std::thread::sleep(REWRITE_EVERY);
            }
            Ok(turn)
        });
        // wrk's run is an error if a single response was not right.
        let outcome = load::run(server.address, &target, &load);
        stop.store(true, Ordering::Relaxed);
        (outcome, writer.join())
    });
    let written = written.map_err(|_| anyhow!("the writer panicked"))??;
    ensure!(written > 20, "the rule was rewritten only {written} times");
    report.note("versions of the rule under load", json!(written));
    report.note(
        "reload",
        json!(outcome.as_ref().map_or_else(|error| format!("{error:#}"), |_| "all right".into())),
    );
    report.set("reload_errors", if outcome.is_ok() { 0.0 } else { 1.0 });
    if let Ok(outcome) = outcome {
        report.set("reload_rps", outcome.rps);
    }
    Ok(())
}

fn host(index: usize) -> String {
    format!("host-{index}.example.com")
}

/// The facts of an evaluation here: a host, and settings of hosts.
struct RuleHosts {
    host: String,
    settings: HashMap<String, i64>,
}

impl RuleHosts {
    fn new(host: String, settings: usize) -> Self {
        let settings = (0..settings).map(|index| (self::host(index), 25)).collect();
        Self { host, settings }
    }
}

impl FactSource for RuleHosts {
    fn text(&self, text: TextFact) -> Option<Cow<'_, str>> {
        (text == TextFact::Hostname).then_some(Cow::Borrowed(self.host.as_str()))
    }

    fn number(&self, _: NumberFact) -> Option<i64> {
        None
    }

    fn header_in(&self, _: &str) -> Option<Cow<'_, str>> {
        None
    }

    fn each_header_in(&self, _: &mut dyn FnMut(&str, &str)) {}

    fn header_out(&self, _: &str) -> Option<Cow<'_, str>> {
        None
    }

    fn each_header_out(&self, _: &mut dyn FnMut(&str, &str)) {}

    fn setting(&self, key: &str, each: &mut dyn FnMut(Option<&str>, ScalarValue<'_>)) -> bool {
        let found = self.settings.get(key);
        if let Some(value) = found {
            each(None, ScalarValue::Int(*value));
        }
        found.is_some()
    }

    fn cell_exists(&self, _: CgroupController, _: &CellName) -> bool {
        false
    }

    fn cell_value(&self, _: CgroupController, _: &CellName, _: &str) -> Option<String> {
        None
    }

    fn usage(&self) -> Option<RequestUsage> {
        None
    }

    fn elapsed_us(&self) -> u64 {
        0
    }

    fn load(&self) -> [f64; 3] {
        [0.0; 3]
    }

    fn env(&self, _: &str) -> Option<Cow<'_, str>> {
        None
    }

    fn each_env(&self, _: &mut dyn FnMut(&str, &str)) {}

    fn is_tls(&self) -> bool {
        false
    }

    fn site_rests(&self) -> bool {
        false
    }
}

fn chart(report: &Report) -> Chart {
    let panel = |title: &str, case: &str| report.panel(title, "microseconds", case, "us", &[RUN, REMEMBERED]);
    Chart {
        title: "One evaluation of a rule".into(),
        subtitle: "one thread; median, whiskers: least and greatest round".into(),
        panels: vec![
            panel("Figure 4, fourth target", "fig4"),
            panel("Figure 4, no target", "fig4_else"),
            panel("Setting of 10,000", "kvs"),
            panel("Setting of 4", "kvs_few"),
            panel("Nothing but a call", "empty"),
        ],
    }
}
