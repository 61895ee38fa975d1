//! `slow-clients`: 2,000 trickling uploads and 2,000 slow downloads of one tenant. It measures
//! their effect on the tenant's other visitors, on those of another tenant, and on the node's
//! memory.
//!
//! The node has the limits of a new one. No client is exempt from the limits of networks: the slow
//! ones come from many addresses. Not here: a comparison with another server (`buffering`).

use std::fs;
use std::io::Write as _;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};
use serde_json::json;

use super::{SlowDirection, SlowLine, SlowLines, raise_open_files};
use crate::clients::{ClientAnswers, ClientQuestion, ask, ask_steadily, to_float};
use crate::content::give;
use crate::content::population::UID_BASE;
use crate::experiment::harness::ExperimentSetting;
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report};
use crate::server::nagaya::{NagayaNode, NagayaSettings};
use crate::server::{StartProbe, TestServer};

/// Slow clients in each direction.
const UPLOADS: usize = 2_000;
const DOWNLOADS: usize = 2_000;

/// Bytes per second of each: above the least rate of bodies, 500.
const STEP_BYTES: usize = 1_000;
const STEP_EVERY: Duration = Duration::from_secs(1);

/// Sizes, in bytes: more than a client reads during the measurement, and more than the kernel holds
/// for its connection.
const UPLOAD_BYTES: usize = 256 << 10;
const FILE_BYTES: usize = 4 << 20;
const ANSWER_BYTES: usize = 768 << 10;

/// Time over which they start: a crowd that comes at one moment is another experiment.
const ARRIVAL: Duration = Duration::from_secs(20);

/// Longest wait until all are in progress.
const FLOWING_MAX: Duration = Duration::from_secs(120);

/// One client in this number finishes quickly at the end, and is checked for completeness.
const HURRIES: usize = 20;

/// Source addresses of the clients.
const ADDRESSES: usize = 200;

/// Interval of requests of each of the others.
const EVERY: Duration = Duration::from_millis(20);

const SLOW_TENANT: &str = "slow";
const OTHER_TENANT: &str = "other";
const PAGE: &str = "/page.php";
const FILE: &str = "/small.txt";

/// Requests beside the slow clients: case, tenant and path.
const ASKED: [(&str, &str, &str); 4] = [
    ("own_page", SLOW_TENANT, PAGE),
    ("own_file", SLOW_TENANT, FILE),
    ("other_page", OTHER_TENANT, PAGE),
    ("other_file", OTHER_TENANT, FILE),
];

const VARIANTS: [&str; 2] = ["alone", "beside"];

const SCRIPTS: [(&str, &str); 3] = [
    ("page.php", "<?php\nfor ($i = 0, $s = ''; $i < 1000; $i++) { $s = md5($s . $i); }\necho $s;\n"),
    ("upload.php", "<?php\necho strlen(file_get_contents('php://input')), ' bytes';\n"),
    (
        "answer.php",
        "<?php\nheader('Content-Length: 786432');\n$part = str_repeat('x', 65536);\nfor ($i = 0; $i < 12; $i++) { echo $part; }\n",
    ),
];

const GOALS: [Goal; 7] = [
    Goal { key: "own_page_p99_ratio", bound: Bound::AtMost(2.0), aim: 1.2 },
    Goal { key: "own_file_p99_ratio", bound: Bound::AtMost(2.0), aim: 1.2 },
    Goal { key: "other_page_p99_ratio", bound: Bound::AtMost(2.0), aim: 1.2 },
    Goal { key: "other_file_p99_ratio", bound: Bound::AtMost(2.0), aim: 1.2 },
    Goal { key: "memory_kib_each", bound: Bound::AtMost(64.0), aim: 32.0 },
    Goal { key: "errors", bound: Bound::AtMost(0.0), aim: 0.0 },
    Goal { key: "slow_failed", bound: Bound::AtMost(0.0), aim: 0.0 },
];

pub fn run(setting: &ExperimentSetting) -> Result<()> {
    // A descriptor for each of them, and some.
    raise_open_files((UPLOADS + DOWNLOADS + 1_000) as u64)?;
    let mut report = Report::new("slow-clients");
    let server = start(setting)?;
    let window = Duration::from_secs(if setting.quick { 10 } else { 30 });
    let rounds = if setting.quick { 3 } else { 7 };
    report.note("slow clients", json!({"uploads": UPLOADS, "downloads": DOWNLOADS, "addresses": ADDRESSES}));
    report.note("bytes a second of each", json!(STEP_BYTES));
    report.note("rounds", json!(rounds));
    report.note(
        "limits",
        json!("of a new node, and of networks also for loopback addresses; an even half of the downloads is a file, the rest PHP's answers"),
    );
    for (_, tenant, path) in ASKED {
        // Workers of PHP are started when they are needed.
        ask(&question(&server, tenant, path), 32, 400)?;
    }
    let memory = server.memory_mib()?;
    let kernel = kernel_kib();
    for round in 0..rounds {
        measure_others(&mut report, round, VARIANTS[0], &server, window)?;
        let lines = SlowLines::start(slow_lines(&server));
        lines.wait_flowing(FLOWING_MAX)?;
        measure_others(&mut report, round, VARIANTS[1], &server, window)?;
        let each = |kib: f64| kib / to_float(UPLOADS + DOWNLOADS);
        let more = (server.memory_mib()? - memory) * 1024.0;
        report.sample(round, "memory", VARIANTS[1], "memory_kib_each", each(more));
        report.sample(round, "memory", VARIANTS[1], "sockets_kib_each", each(kernel_kib() - kernel));
        let tally = lines.stop()?;
        report.sample(round, "slow", VARIANTS[1], "failed", to_float(tally.failed));
        report.sample(round, "slow", VARIANTS[1], "flowed", to_float(tally.flowed));
        report.sample(round, "slow", VARIANTS[1], "whole", to_float(tally.whole));
        eprintln!("round {} of {rounds} done", round + 1);
    }
    summarise(&mut report)?;
    let chart = chart(&report);
    report.write(&setting.out, &chart, &GOALS)
}

fn start(setting: &ExperimentSetting) -> Result<TestServer> {
    let tables = "[edge.networks]\nexempt = []\n".to_owned();
    let settings = NagayaSettings { default_limits: true, tables, ..NagayaSettings::default() };
    let node = NagayaNode::create(&setting.program, setting.dir(), "nagaya", settings)?;
    let (path, mut writer) = node.records("sites.jsonl")?;
    for (uid, tenant) in (UID_BASE..).zip([SLOW_TENANT, OTHER_TENANT]) {
        let root = documents(setting, tenant, uid)?;
        // Programs see their tenant's own /tmp, except for his home.
        let record = json!({"tenant": {"name": tenant, "uid": uid, "gid": uid, "home": root}});
        let site = json!({"site": {
            "name": tenant, "tenant": tenant, "hosts": [host(tenant)], "backend": {"kind": "php", "root": root},
        }});
        writeln!(writer, "{record}\n{site}").context("writing records")?;
    }
    writer.flush().context("writing records")?;
    drop(writer);
    node.import(&path)?;
    node.start(&StartProbe { host: host(SLOW_TENANT), path: PAGE.into() })
}

/// Writes a tenant's files.
fn documents(setting: &ExperimentSetting, tenant: &str, uid: u32) -> Result<PathBuf> {
    let root = setting.dir().join("documents").join(tenant);
    fs::create_dir_all(&root).with_context(|| format!("creating {}", root.display()))?;
    let write = |name: &str, bytes: &[u8]| {
        let file = root.join(name);
        fs::write(&file, bytes).with_context(|| format!("writing {}", file.display()))
    };
    for (name, text) in SCRIPTS {
        write(name, text.as_bytes())?;
    }
    write("small.txt", b"small\n")?;
    write("large.bin", &vec![b'x'; FILE_BYTES])?;
    give(&root, uid)?;
    Ok(root)
}

fn host(tenant: &str) -> String {
    format!("{tenant}.example")
}

fn question(server: &TestServer, tenant: &str, path: &str) -> ClientQuestion {
    ClientQuestion { address: server.address, host: host(tenant), path: path.into() }
}

/// Sends all four requests at once, each at a steady pace.
fn measure_others(
    report: &mut Report,
    round: usize,
    variant: &str,
    server: &TestServer,
    window: Duration,
) -> Result<()> {
    let answers: Vec<ClientAnswers> = std::thread::scope(|scope| {
        let visitors = ASKED.map(|(_, tenant, path)| {
            let question = question(server, tenant, path);
            scope.spawn(move || ask_steadily(&question, EVERY, window))
        });
        let seen = visitors.into_iter().map(|one| one.join().map_err(|_| anyhow!("a visitor panicked"))?);
        seen.collect::<Result<_>>()
    })?;
    for ((case, ..), answers) in ASKED.iter().zip(answers) {
        report.sample(round, case, variant, "p50_ms", answers.percentile_ms(0.5));
        report.sample(round, case, variant, "p99_ms", answers.percentile_ms(0.99));
        report.sample(round, case, variant, "failed", to_float(answers.failed));
    }
    Ok(())
}

fn slow_lines(server: &TestServer) -> Vec<SlowLine> {
    let line = |index: usize, of: usize, path, direction| {
        let part = u32::try_from(index).unwrap_or(u32::MAX);
        SlowLine {
            address: server.address,
            host: host(SLOW_TENANT),
            path,
            direction,
            step_bytes: STEP_BYTES,
            step_every: STEP_EVERY,
            begins_after: ARRIVAL * part / u32::try_from(of).unwrap_or(u32::MAX),
            from: address(index),
            hurries: index.is_multiple_of(HURRIES),
        }
    };
    let uploads = (0..UPLOADS).map(|i| line(i, UPLOADS, "/upload.php", SlowDirection::Upload(UPLOAD_BYTES)));
    let downloads = (0..DOWNLOADS).map(|i| {
        // Two of four in a row, so that the clients that finish are of both kinds.
        let (path, bytes) = if (i / HURRIES).is_multiple_of(2) {
            ("/large.bin", FILE_BYTES)
        } else {
            ("/answer.php", ANSWER_BYTES)
        };
        line(i, DOWNLOADS, path, SlowDirection::Download(bytes))
    });
    uploads.chain(downloads).collect()
}

fn address(client: usize) -> Ipv4Addr {
    let last = u8::try_from(client % ADDRESSES + 1).unwrap_or(u8::MAX);
    Ipv4Addr::new(127, 0, 1, last)
}

/// Returns the memory of all TCP sockets of this network, in KiB: both ends' buffers.
fn kernel_kib() -> f64 {
    const PAGE_KIB: f64 = 4.0;
    let text = fs::read_to_string("/proc/net/sockstat").unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with("TCP:")).unwrap_or_default();
    let pages = line.split_once(" mem ").and_then(|(_, rest)| rest.split(' ').next()?.parse::<f64>().ok());
    pages.map_or(f64::NAN, |pages| pages * PAGE_KIB)
}

fn summarise(report: &mut Report) -> Result<()> {
    let mut errors = 0.0;
    for (case, ..) in ASKED {
        for variant in VARIANTS {
            report.set(format!("{case}_{variant}_p99_ms"), report.median(case, variant, "p99_ms")?);
            errors += report.sum(case, variant, "failed");
        }
        for (key, metric) in [("p50", "p50_ms"), ("p99", "p99_ms")] {
            let ratio = report.ratio(case, VARIANTS[1], VARIANTS[0], metric)?;
            report.set(format!("{case}_{key}_ratio"), ratio);
        }
    }
    for key in ["memory_kib_each", "sockets_kib_each"] {
        report.set(key, report.median("memory", VARIANTS[1], key)?);
    }
    report.set("errors", errors);
    report.set("slow_failed", report.sum("slow", VARIANTS[1], "failed"));
    report.set("slow_checked", report.sum("slow", VARIANTS[1], "whole"));
    Ok(())
}

fn chart(report: &Report) -> Chart {
    let panel = |title: &str, case: &str| report.panel(title, "milliseconds", case, "p99_ms", &VARIANTS);
    Chart {
        title: format!("{UPLOADS} trickling uploads and {DOWNLOADS} slow downloads of one tenant"),
        subtitle: "99th percentile of other requests, alone and beside them; median, whiskers: least and greatest round"
            .into(),
        panels: vec![
            panel("His pages in PHP", "own_page"),
            panel("His files", "own_file"),
            panel("Another tenant's pages", "other_page"),
            panel("Another tenant's files", "other_file"),
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(beside_p99_ms: f64, failed: f64, slow_failed: f64, kib: f64) -> String {
        let mut report = Report::new("slow-clients");
        for (case, ..) in ASKED {
            for (variant, p99) in [("alone", 4.0), ("beside", beside_p99_ms)] {
                report.sample(0, case, variant, "p50_ms", 1.0);
                report.sample(0, case, variant, "p99_ms", p99);
                report.sample(0, case, variant, "failed", 0.0);
            }
        }
        report.sample(0, "own_page", "beside", "failed", failed);
        report.sample(0, "memory", "beside", "memory_kib_each", kib);
        report.sample(0, "memory", "beside", "sockets_kib_each", 1.0);
        report.sample(0, "slow", "beside", "failed", slow_failed);
        summarise(&mut report).unwrap();
        report.table(&GOALS)
    }

    #[test]
    fn each_row_is_judged() {
        let good = judge(7.0, 0.0, 0.0, 60.0);
        assert_eq!(good.matches("reached").count(), GOALS.len(), "{good}");
        for (table, missed) in [
            (judge(9.0, 0.0, 0.0, 60.0), 4),
            (judge(7.0, 1.0, 0.0, 60.0), 1),
            (judge(7.0, 0.0, 1.0, 60.0), 1),
            (judge(7.0, 0.0, 0.0, 70.0), 1),
        ] {
            assert_eq!(table.matches("MISSED").count(), missed, "{table}");
        }
    }

    #[test]
    fn no_address_has_more_connections_than_a_network_may() {
        let most = (UPLOADS + DOWNLOADS).div_ceil(ADDRESSES);
        assert!(most < 2_000, "{most} of one address");
        assert_ne!(address(0), address(1));
        assert_eq!(address(0), address(ADDRESSES));
    }
}
