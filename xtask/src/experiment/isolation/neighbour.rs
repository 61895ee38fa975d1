//! `isolation-neighbour`: the effect on a wiki's visitor while another tenant's programs burn CPU.
//! It is measured without limits and with a rule that limits them.
//!
//! Not here: the other experiments.

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::{COUNT, program, question};
use crate::clients::{self, BackgroundLoad, ClientQuestion, to_float};
use crate::content::dokuwiki;
use crate::content::population::UID_BASE;
use crate::experiment::harness::ExperimentSetting;
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report};
use crate::server::nagaya::{NagayaNode, NagayaSettings};
use crate::server::{StartProbe, TestServer};

const WIKI: &str = "wiki.example";
const PAGE: &str = "/doku.php?id=start";
const FREE: &str = "free.example";
const LIMITED: &str = "limited.example";

/// Programs that burn CPU at once.
const HOGS: [usize; 3] = [1, 5, 20];

/// Turns of a hog's loop: 300 ms of CPU time on a slow virtual core, and less on others.
const TURNS: u32 = 250_000;

/// A visitor's pace: far below the wiki's capacity, so that a page's time is its own and not a
/// queue's.
const EVERY: Duration = Duration::from_millis(25);

/// Fewest connections to the wiki before the measurement: caches of pages and of compiled scripts
/// are then warm.
const WARM_UP: usize = 50;

/// The rule: the programs together get a fifth of a core, and the lowest priority.
const RULE: &str =
    "if request.host == \"limited.example\"\n  cell \"hogs\", cpu: \"20%\", cpu_shares: 2\nend\n";

const GOALS: [Goal; 2] = [
    Goal { key: "victim_p99_ratio_limited", bound: Bound::AtMost(1.5), aim: 1.2 },
    Goal { key: "hog_failed", bound: Bound::AtMost(0.0), aim: 0.0 },
];

pub fn run(setting: &ExperimentSetting) -> Result<()> {
    let mut report = Report::new("isolation-neighbour");
    let server = serve(setting)?;
    let wiki = question(&server, WIKI, PAGE.into());
    clients::ask(&wiki, 2, WARM_UP)?;
    let window = Duration::from_secs(if setting.quick { 5 } else { 15 });
    report.note("a page each, ms", json!(EVERY.as_millis()));
    report.note("turns of a hog's loop", json!(TURNS));
    report.note("rule", json!(RULE));

    let (mut failed, mut completed) = (0, 0);
    for round in 0..if setting.quick { 3 } else { 5 } {
        visit(&mut report, round, "alone", &wiki, window)?;
        for hogs in HOGS {
            for (host, variant) in [(FREE, "unlimited"), (LIMITED, "limited")] {
                let hog = question(&server, host, format!("/count.cgi?n={TURNS}"));
                let burning = BackgroundLoad::start(&hog, hogs);
                let visited = visit(&mut report, round, &format!("{variant} {hogs}"), &wiki, window);
                let hogs_done = burning.stop()?;
                visited?;
                failed += hogs_done.failed;
                completed += hogs_done.times_ms.len();
            }
        }
        eprintln!("round {} done", round + 1);
    }
    for hogs in HOGS {
        for variant in ["unlimited", "limited"] {
            let ratio = report.ratio("page", &format!("{variant} {hogs}"), "alone", "p99_ms")?;
            report.set(format!("victim_p99_ratio_{variant}_{hogs}"), ratio);
        }
    }
    let most = HOGS[HOGS.len() - 1];
    for variant in ["unlimited", "limited"] {
        let ratio = report.get(&format!("victim_p99_ratio_{variant}_{most}")).context("measured above")?;
        report.set(format!("victim_p99_ratio_{variant}"), ratio);
    }
    report.set("alone_p99_ms", report.median("page", "alone", "p99_ms")?);
    report.set("hog_failed", to_float(failed));
    report.set("hog_completed", to_float(completed));
    let chart = chart(&report);
    report.write(&setting.out, &chart, &GOALS)
}

fn visit(
    report: &mut Report,
    round: usize,
    variant: &str,
    wiki: &ClientQuestion,
    window: Duration,
) -> Result<()> {
    let pages = clients::ask_steadily(wiki, EVERY, window)?;
    let why = pages.why.as_deref().unwrap_or_default();
    ensure!(pages.failed == 0, "{} pages of the wiki failed ({variant}), the first {why}", pages.failed);
    report.sample(round, "page", variant, "p50_ms", pages.percentile_ms(0.5));
    report.sample(round, "page", variant, "p99_ms", pages.percentile_ms(0.99));
    Ok(())
}

fn serve(setting: &ExperimentSetting) -> Result<TestServer> {
    let tree = setting.dir().join("wiki");
    fs::create_dir_all(&tree).with_context(|| format!("creating {}", tree.display()))?;
    dokuwiki::create(&tree, UID_BASE + 1)?;
    let programs = program(setting.dir(), "count.cgi", COUNT)?;
    let settings =
        NagayaSettings { rules: vec![("access_checker", RULE.into())], ..NagayaSettings::default() };
    let node = NagayaNode::create(&setting.program, setting.dir(), "nagaya", settings)?;
    let (path, mut writer) = node.records("sites.jsonl")?;
    for record in records(&tree, &programs) {
        writeln!(writer, "{record}").context("writing records")?;
    }
    writer.flush().context("writing records")?;
    drop(writer);
    node.import(&path)?;
    node.start(&StartProbe { host: WIKI.into(), path: PAGE.into() })
}

fn records(wiki: &Path, programs: &Path) -> Vec<serde_json::Value> {
    let hog = |name: &str, host: &str| json!({"site": {"name": name, "tenant": "hogs", "hosts": [host], "backend": {"kind": "cgi", "root": programs}}});
    vec![
        json!({"tenant": {"name": "hogs", "uid": UID_BASE, "gid": UID_BASE, "home": programs}}),
        json!({"tenant": {"name": "writers", "uid": UID_BASE + 1, "gid": UID_BASE + 1, "home": wiki}}),
        hog("free", FREE),
        hog("limited", LIMITED),
        json!({"site": {
            "name": "wiki",
            "tenant": "writers",
            "hosts": [WIKI],
            "backend": {"kind": "php", "root": wiki, "index": ["doku.php"], "deny": dokuwiki::DENIED},
        }}),
    ]
}

fn chart(report: &Report) -> Chart {
    let with_alone = |variant: &str| -> Vec<String> {
        std::iter::once("alone".to_owned())
            .chain(HOGS.iter().map(|hogs| format!("{variant} {hogs}")))
            .collect()
    };
    let panel = |title: &str, variant: &str, metric: &str| {
        let variants = with_alone(variant);
        let variants: Vec<&str> = variants.iter().map(String::as_str).collect();
        report.panel(title, "milliseconds", "page", metric, &variants)
    };
    Chart {
        title: "A wiki page while another tenant's programs burn CPU".into(),
        subtitle: "99th percentile and median of a page fetched every 25 ms; 1, 5 and 20 programs at once"
            .into(),
        panels: vec![
            panel("Not limited, 99th percentile", "unlimited", "p99_ms"),
            panel("Limited by a rule, 99th percentile", "limited", "p99_ms"),
            panel("Limited by a rule, median", "limited", "p50_ms"),
        ],
    }
}
