//! `buffering`: a gunicorn with one worker, and 20 clients that upload or read at 8 KB/s. It
//! measures the effect on other visitors behind nagaya, and behind nginx before the same gunicorn.
//!
//! Not here: thousands of slow clients (`clients`).

use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::json;

use super::{SlowDirection, SlowLine, SlowLines};
use crate::clients::{ClientQuestion, ask, ask_steadily, to_float};
use crate::content::population::UID_BASE;
use crate::experiment::harness::ExperimentSetting;
use crate::http::free_address;
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report};
use crate::server::nagaya::{NagayaNode, NagayaSettings};
use crate::server::{StartProbe, TestServer, make_dir, nginx, words, write};

/// From `apps`, as the Django of other experiments.
const GUNICORN: &str = "/usr/bin/gunicorn";

const HOST: &str = "application.example";

/// One process that serves one request at a time: a client that occupies it blocks all.
const APPLICATION: &str = "\
def application(environ, start_response):
    if environ['REQUEST_METHOD'] == 'POST':
        body = environ['wsgi.input'].read(int(environ['CONTENT_LENGTH']))
        answer = b'%d bytes' % len(body)
    elif environ['PATH_INFO'] == '/large':
        answer = b'x' * (4 << 20)
    else:
        answer = b'here'
    start_response('200 OK', [('Content-Length', str(len(answer))), ('Content-Type', 'text/plain')])
    return [answer]
";

const CLIENTS: u32 = 20;

/// 8 KB per second, in steps of an eighth of a second.
const STEP_BYTES: usize = 1_000;
const STEP_EVERY: Duration = Duration::from_millis(125);

/// Size of a slow upload; some end during the measurement, all within 12 s of their start.
const UPLOAD_BYTES: usize = 96 << 10;

/// Size of a slow response: far more than the kernel holds for a connection.
const DOWNLOAD_BYTES: usize = 4 << 20;

/// Interval of the others' requests.
const EVERY: Duration = Duration::from_millis(20);

const DIRECTIONS: [(&str, &str, SlowDirection); 2] = [
    ("uploads", "/", SlowDirection::Upload(UPLOAD_BYTES)),
    ("downloads", "/large", SlowDirection::Download(DOWNLOAD_BYTES)),
];

const VARIANTS: [&str; 2] = ["nagaya", "nginx"];

const GOALS: [Goal; 4] = [
    Goal { key: "uploads_p99_ratio_nginx", bound: Bound::AtMost(1.1), aim: 1.0 },
    Goal { key: "downloads_p99_ratio_nginx", bound: Bound::AtMost(1.1), aim: 1.0 },
    Goal { key: "errors", bound: Bound::AtMost(0.0), aim: 0.0 },
    Goal { key: "slow_failed", bound: Bound::AtMost(0.0), aim: 0.0 },
];

pub fn run(setting: &ExperimentSetting) -> Result<()> {
    let mut report = Report::new("buffering");
    let gunicorn = start_gunicorn(setting)?;
    let nagaya = start_nagaya(setting, &gunicorn)?;
    let nginx = nginx::buffering_proxy(&setting.dir().join("front"), gunicorn.address, HOST, UPLOAD_BYTES)?;
    let servers = [(VARIANTS[0], &nagaya), (VARIANTS[1], &nginx)];
    let window = Duration::from_secs(if setting.quick { 15 } else { 30 });
    let rounds = setting.rounds();
    report.note("slow clients", json!({"clients": CLIENTS, "bytes a second": STEP_BYTES * 8}));
    report.note("rounds", json!(rounds));
    report.note("the same before both", json!("one gunicorn with one synchronous worker, on loopback TCP"));
    for (_, server) in servers {
        ask(&question(server), 2, 100)?;
    }
    for round in 0..rounds {
        let mut order = servers;
        order.rotate_left(round % servers.len());
        for (variant, server) in order {
            let alone = ask_steadily(&question(server), EVERY, window / 3)?;
            report.sample(round, "alone", variant, "p99_ms", alone.percentile_ms(0.99));
            report.sample(round, "alone", variant, "failed", to_float(alone.failed));
            for (case, path, direction) in DIRECTIONS {
                let lines = SlowLines::start(slow_lines(server.address, path, direction, window));
                let seen = ask_steadily(&question(server), EVERY, window)?;
                let tally = lines.stop()?;
                report.sample(round, case, variant, "p50_ms", seen.percentile_ms(0.5));
                report.sample(round, case, variant, "p99_ms", seen.percentile_ms(0.99));
                report.sample(round, case, variant, "max_ms", seen.percentile_ms(1.0));
                report.sample(round, case, variant, "failed", to_float(seen.failed));
                report.sample(round, case, variant, "slow_failed", to_float(tally.failed));
                report.sample(round, case, variant, "slow_flowed", to_float(tally.flowed));
            }
        }
        eprintln!("round {} of {rounds} done", round + 1);
    }
    summarise(&mut report)?;
    let chart = chart(&report);
    report.write(&setting.out, &chart, &GOALS)
}

/// Starts it with the packages' settings, except for the experiment's own: one worker, and its
/// address.
fn start_gunicorn(setting: &ExperimentSetting) -> Result<TestServer> {
    let dir = make_dir(setting.dir(), "gunicorn")?;
    write(&dir.join("slow_app.py"), APPLICATION)?;
    let address = free_address()?;
    let place = dir.to_string_lossy();
    let command = [
        GUNICORN,
        "--workers",
        "1",
        "--bind",
        &address.to_string(),
        "--chdir",
        &place,
        "slow_app:application",
    ];
    TestServer::start(
        "gunicorn",
        &words(&command),
        &dir,
        address,
        &StartProbe { host: HOST.into(), path: "/".into() },
    )
    .context("gunicorn of Debian's package: 'sudo ./dev setup experiment' installs it")
}

fn start_nagaya(setting: &ExperimentSetting, gunicorn: &TestServer) -> Result<TestServer> {
    let settings = NagayaSettings { default_limits: true, ..NagayaSettings::default() };
    let node = NagayaNode::create(&setting.program, setting.dir(), "nagaya", settings)?;
    let (path, mut writer) = node.records("sites.jsonl")?;
    let tenant = json!({"tenant": {"name": "application", "uid": UID_BASE, "gid": UID_BASE}});
    let site = json!({"site": {
        "name": "application", "tenant": "application", "hosts": [HOST],
        "backend": {"kind": "http", "address": gunicorn.address.to_string()},
    }});
    write!(writer, "{tenant}\n{site}\n").and_then(|()| writer.flush()).context("writing records")?;
    drop(writer);
    node.import(&path)?;
    node.start(&StartProbe { host: HOST.into(), path: "/".into() })
}

fn question(server: &TestServer) -> ClientQuestion {
    ClientQuestion { address: server.address, host: HOST.into(), path: "/".into() }
}

/// Makes the slow clients. They start one after the other in the first half of the window. So some
/// of the time is with all of them.
fn slow_lines(
    address: SocketAddr,
    path: &'static str,
    direction: SlowDirection,
    window: Duration,
) -> Vec<SlowLine> {
    let line = |index: u32| SlowLine {
        address,
        host: HOST.into(),
        path,
        direction,
        step_bytes: STEP_BYTES,
        step_every: STEP_EVERY,
        begins_after: window / 2 * index / CLIENTS,
        from: Ipv4Addr::LOCALHOST,
        hurries: true,
    };
    (0..CLIENTS).map(line).collect()
}

fn summarise(report: &mut Report) -> Result<()> {
    let (mut errors, mut nginx_errors) = (0.0, 0.0);
    for case in ["alone", DIRECTIONS[0].0, DIRECTIONS[1].0] {
        for variant in VARIANTS {
            report.set(format!("{case}_{variant}_p99_ms"), report.median(case, variant, "p99_ms")?);
        }
        let ratio = report.ratio(case, VARIANTS[0], VARIANTS[1], "p99_ms")?;
        report.set(format!("{case}_p99_ratio_nginx"), ratio);
        errors += report.sum(case, VARIANTS[0], "failed");
        nginx_errors += report.sum(case, VARIANTS[1], "failed");
    }
    report.set("errors", errors);
    report.set("nginx_errors", nginx_errors);
    for (key, variant) in [("slow_failed", VARIANTS[0]), ("nginx_slow_failed", VARIANTS[1])] {
        let failed = DIRECTIONS.iter().map(|(case, ..)| report.sum(case, variant, "slow_failed")).sum();
        report.set(key, failed);
    }
    Ok(())
}

fn chart(report: &Report) -> Chart {
    let panel = |title: &str, case: &str| report.panel(title, "milliseconds", case, "p99_ms", &VARIANTS);
    Chart {
        title: "A gunicorn with one worker, and 20 clients at 8 KB/s".into(),
        subtitle: "99th percentile of other visitors' requests; median, whiskers: least and greatest round"
            .into(),
        panels: vec![
            panel("Without slow clients", "alone"),
            panel("Slow uploads", "uploads"),
            panel("Slow downloads", "downloads"),
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(nagaya_p99_ms: f64, failed: f64, slow_failed: f64) -> String {
        let mut report = Report::new("buffering");
        for case in ["alone", "uploads", "downloads"] {
            for (variant, p99) in [("nginx", 10.0), ("nagaya", nagaya_p99_ms)] {
                report.sample(0, case, variant, "p99_ms", p99);
            }
        }
        report.sample(0, "uploads", "nagaya", "failed", failed);
        report.sample(0, "downloads", "nagaya", "slow_failed", slow_failed);
        summarise(&mut report).unwrap();
        report.table(&GOALS)
    }

    #[test]
    fn each_row_is_judged() {
        let good = judge(10.5, 0.0, 0.0);
        assert_eq!(good.matches("reached").count(), GOALS.len(), "{good}");
        for (table, missed) in
            [(judge(12.0, 0.0, 0.0), 2), (judge(10.5, 1.0, 0.0), 1), (judge(10.5, 0.0, 1.0), 1)]
        {
            assert_eq!(table.matches("MISSED").count(), missed, "{table}");
        }
    }
}
