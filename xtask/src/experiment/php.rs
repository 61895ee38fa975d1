//! `php`: a DokuWiki page and a trivial script, against nginx with php-fpm over the same files.
//!
//! Not here: the other experiments.

use std::fs;
use std::io::Write as _;
use std::path::Path;

use anyhow::{Context as _, Result};
use serde_json::json;

use crate::content::population::{HELLO, UID_BASE};
use crate::content::{self, dokuwiki};
use crate::experiment::harness::{ExperimentCase, ExperimentSetting, interleave};
use crate::facts;
use crate::load::{LoadSettings, LoadTarget};
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report};
use crate::server::nagaya::{NagayaNode, NagayaSettings};
use crate::server::{StartProbe, TestServer, nginx, phpfpm};

/// Workers of each side for each core: enough that a worker that waits for a file leaves no core
/// idle.
const WORKERS_PER_CORE: usize = 2;

/// More than there are workers, so that all of them are always busy and some requests wait.
pub const CONNECTIONS: u32 = 16;

/// nagaya's default for the requests of one worker's life; php-fpm gets the same.
const REQUESTS_PER_WORKER: u32 = 100_000;

const HOST: &str = "wiki.example";
const PAGE: &str = "/doku.php?id=start";
const VARIANTS: [&str; 2] = ["nagaya", "nginx + php-fpm"];

/// The page is about 15 KB, in any release of DokuWiki.
const PAGE_BYTES: std::ops::RangeInclusive<u64> = 4_000..=60_000;

const GOALS: [Goal; 2] = [
    Goal { key: "ratio_page", bound: Bound::AtLeast(1.0), aim: 1.1 },
    Goal { key: "ratio_trivial", bound: Bound::AtLeast(1.0), aim: 1.1 },
];

/// Both sides, over the same files.
pub struct PhpPair {
    nagaya: TestServer,
    nginx: TestServer,
    workers: u32,
}

impl PhpPair {
    pub fn start(setting: &ExperimentSetting, dir: &Path) -> Result<Self> {
        let tree = dir.join("wiki");
        fs::create_dir_all(&tree).with_context(|| format!("creating {}", tree.display()))?;
        dokuwiki::create(&tree, UID_BASE)?;
        let script = tree.join("hello.php");
        fs::write(&script, format!("<?php\necho {:?};\n", HELLO)).context("writing the trivial script")?;
        content::give(&script, UID_BASE)?;

        let workers = u32::try_from(facts::cores() * WORKERS_PER_CORE).context("number of workers")?;
        let probe = StartProbe { host: HOST.into(), path: PAGE.into() };
        let fpm = phpfpm::start(dir, UID_BASE, workers, REQUESTS_PER_WORKER)?;
        let mut nginx = nginx::php(dir, &tree, &fpm.socket, &probe)?;
        nginx.behind = Some(fpm.process);
        Ok(Self { nagaya: nagaya(setting, (dir, &tree), workers, &probe)?, nginx, workers })
    }

    /// A page and a script of one line.
    pub fn cases(&self) -> Vec<ExperimentCase<'_>> {
        let servers = vec![(VARIANTS[0], &self.nagaya), (VARIANTS[1], &self.nginx)];
        let target =
            |path: &str, body_bytes| LoadTarget { hosts: vec![HOST.into()], path: path.into(), body_bytes };
        // Both respond in chunks, whose sizes are between the bytes.
        let hello = HELLO.len() as u64..=HELLO.len() as u64 + 16;
        vec![
            ExperimentCase { name: "page", target: target(PAGE, PAGE_BYTES), servers: servers.clone() },
            ExperimentCase { name: "trivial", target: target("/hello.php", hello), servers },
        ]
    }
}

pub fn run(setting: &ExperimentSetting) -> Result<()> {
    let mut report = Report::new("php");
    let pair = PhpPair::start(setting, setting.dir())?;
    let load = LoadSettings { connections: CONNECTIONS, ..setting.load() };
    interleave(&mut report, setting, &load, &pair.cases())?;

    report.note("workers", json!(pair.workers));
    report.note("opcache", json!("as packaged, for both"));
    for (case, key) in [("page", "page"), ("trivial", "trivial")] {
        report.set(format!("ratio_{key}"), report.ratio(case, VARIANTS[0], VARIANTS[1], "rps")?);
        report.set(format!("p99_ratio_{key}"), report.ratio(case, VARIANTS[0], VARIANTS[1], "p99_ms")?);
        let cpu = report.ratio(case, VARIANTS[0], VARIANTS[1], "cpu_us_per_request")?;
        report.set(format!("cpu_ratio_{key}"), cpu);
        report.set(format!("nagaya_{key}_rps"), report.median(case, VARIANTS[0], "rps")?);
        report.set(format!("nginx_fpm_{key}_rps"), report.median(case, VARIANTS[1], "rps")?);
    }
    report.set("nagaya_rss_mb", pair.nagaya.memory_mib()?);
    report.set("nginx_fpm_rss_mb", pair.nginx.memory_mib()?);
    let chart = chart(&report);
    report.write(&setting.out, &chart, &GOALS)
}

fn nagaya(
    setting: &ExperimentSetting,
    (dir, tree): (&Path, &Path),
    workers: u32,
    probe: &StartProbe,
) -> Result<TestServer> {
    let settings = NagayaSettings { php_workers: workers, ..NagayaSettings::default() };
    let node = NagayaNode::create(&setting.program, dir, "nagaya", settings)?;
    let (path, mut writer) = node.records("sites.jsonl")?;
    let tenant = json!({"tenant": {"name": "wiki", "uid": UID_BASE, "gid": UID_BASE, "home": tree}});
    let site = json!({"site": {
        "name": "wiki",
        "tenant": "wiki",
        "hosts": [HOST],
        "backend": {"kind": "php", "root": tree, "index": ["doku.php"], "deny": dokuwiki::DENIED},
    }});
    write!(writer, "{tenant}\n{site}\n").and_then(|()| writer.flush()).context("writing records")?;
    drop(writer);
    node.import(&path)?;
    node.start(probe)
}

fn chart(report: &Report) -> Chart {
    Chart {
        title: "PHP: the same files, the same number of workers".into(),
        subtitle: format!(
            "wrk, {CONNECTIONS} keep-alive connections; opcache as packaged; median, whiskers: least and greatest \
             round"
        ),
        panels: vec![
            report.panel("DokuWiki page", "requests/s", "page", "rps", &VARIANTS),
            report.panel("Trivial script", "requests/s", "trivial", "rps", &VARIANTS),
            report.panel("DokuWiki page, 99th percentile", "milliseconds", "page", "p99_ms", &VARIANTS),
        ],
    }
}
