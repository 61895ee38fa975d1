//! `admission-correlation`, the first experiment of paper 002: does the server know how long its
//! clients wait? The peer is an Apache whose queue is the kernel's, out of its sight.
//!
//! Not here: the other experiments.

use std::collections::HashMap;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::crowd::{self, SeenAnswer, SentPost, failed, percentile, times_ms};
use super::{HOST, PATH, PATIENT, board, message, serve};
use crate::clients::to_float;
use crate::experiment::harness::ExperimentSetting;
use crate::http::free_address;
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report};
use crate::server::{StartProbe, TestServer, make_dir, words, write};

const CLIENTS: usize = 150;
const RUN: u32 = 10;
const WAIT: u32 = 200;

/// Bytes of a message, as in the paper.
const BYTES: usize = 10 << 10;

const MODULES: &str = "/usr/lib/apache2/modules";

const GOALS: [Goal; 2] = [
    Goal { key: "corr_nagaya", bound: Bound::AtLeast(0.995), aim: 0.999 },
    Goal { key: "failed", bound: Bound::AtMost(0.0), aim: 0.0 },
];

pub fn run(setting: &ExperimentSetting) -> Result<()> {
    let mut report = Report::new("admission-correlation");
    let window = Duration::from_secs(if setting.quick { 12 } else { 60 });
    let access = setting.dir().join("nagaya-access.log");
    let tables = format!("{PATIENT}[log]\naccess = \"{}\"\naccess_format = \"json\"\n", access.display());
    let record = json!({"max_concurrent": RUN, "admission": {"waiting": WAIT, "wait_seconds": 3600}});
    let (node, nagaya) = serve(setting, "nagaya", &tables, record)?;
    let (apache, apache_log) = apache(setting)?;
    let post = |address: SocketAddr| SentPost {
        address,
        host: HOST.into(),
        path: PATH.into(),
        body: Some(message(BYTES)),
    };
    let mut failures = 0;
    let rounds = if setting.quick { 3 } else { 5 };
    for round in 0..rounds {
        for (variant, address) in [("nagaya", nagaya.address), ("apache", apache.address)] {
            let log = if variant == "nagaya" { &access } else { &apache_log };
            let skip = fs::metadata(log).map_or(0, |file| file.len());
            let seen = crowd::closed(&post(address), CLIENTS, window, Duration::ZERO)?;
            failures += failed(&seen);
            let known = || -> Result<HashMap<u64, f64>> {
                let text = fs::read_to_string(log).with_context(|| format!("reading {}", log.display()))?;
                let new = text.get(usize::try_from(skip).unwrap_or(usize::MAX)..).unwrap_or_default();
                Ok(if variant == "nagaya" { of_nagaya(new) } else { of_apache(new) })
            };
            let known = settled(known, seen.len())?;
            let pairs = pairs(&seen, &known);
            ensure!(
                pairs.len() * 10 > seen.len() * 9,
                "{variant}: only {} of {} in its log",
                pairs.len(),
                seen.len()
            );
            report.sample(round, "post", variant, "correlation", correlation(&pairs));
            report.sample(round, "post", variant, "p50_ms", percentile(times_ms(&seen), 0.5));
            let unseen = pairs.iter().map(|(client, server)| client - server).collect();
            report.sample(round, "post", variant, "unseen_p50_ms", percentile(unseen, 0.5));
        }
        eprintln!("round {} of {rounds} done", round + 1);
    }
    drop(node);
    finish(report, setting, failures)
}

fn finish(mut report: Report, setting: &ExperimentSetting, failures: usize) -> Result<()> {
    report.note("clients, run, wait, bytes", json!([CLIENTS, RUN, WAIT, BYTES]));
    report.note(
        "apache",
        json!("event, MaxRequestWorkers 10, ListenBacklog 5000, no keep-alive; time of its log (%D)"),
    );
    for variant in ["nagaya", "apache"] {
        report.set(format!("corr_{variant}"), report.median("post", variant, "correlation")?);
        report.set(format!("{variant}_unseen_p50_ms"), report.median("post", variant, "unseen_p50_ms")?);
    }
    report.set("failed", to_float(failures));
    let variants = ["nagaya", "apache"];
    let chart = Chart {
        title: "Does the server know how long its clients wait?".into(),
        subtitle: format!("{CLIENTS} clients, closed loop of POSTs of 10 KB, {RUN} run at once"),
        panels: vec![
            report.panel("Correlation of server's and client's time", "", "post", "correlation", &variants),
            report.panel(
                "Time the server knows nothing of",
                "milliseconds",
                "post",
                "unseen_p50_ms",
                &variants,
            ),
            report.panel("Median of the client's time", "milliseconds", "post", "p50_ms", &variants),
        ],
    };
    report.write(&setting.out, &chart, &GOALS)
}

/// Reads until all log lines are there, or no more come. They are written with some delay.
fn settled(read: impl Fn() -> Result<HashMap<u64, f64>>, all: usize) -> Result<HashMap<u64, f64>> {
    const TRIES: u32 = 20;
    let mut known = read()?;
    for _ in 0..TRIES {
        if known.len() >= all {
            break;
        }
        std::thread::sleep(Duration::from_millis(200));
        known = read()?;
    }
    Ok(known)
}

/// Returns milliseconds by the number in the query.
fn of_nagaya(log: &str) -> HashMap<u64, f64> {
    let line = |line: &str| {
        let line: Value = serde_json::from_str(line).ok()?;
        Some((number(line["target"].as_str()?)?, line["duration_us"].as_f64()? / 1e3))
    };
    log.lines().filter_map(line).collect()
}

/// Reads lines of `%D %r`.
fn of_apache(log: &str) -> HashMap<u64, f64> {
    let line = |line: &str| {
        let (took_us, request) = line.split_once(' ')?;
        Some((number(request.split(' ').nth(1)?)?, took_us.parse::<f64>().ok()? / 1e3))
    };
    log.lines().filter_map(line).collect()
}

fn number(target: &str) -> Option<u64> {
    target.rsplit_once("n=")?.1.parse().ok()
}

fn pairs(seen: &[SeenAnswer], known: &HashMap<u64, f64>) -> Vec<(f64, f64)> {
    let answered = seen.iter().filter(|seen| seen.status == 200);
    answered.filter_map(|seen| Some((seen.took_ms, *known.get(&seen.number)?))).collect()
}

/// Returns Pearson's correlation.
fn correlation(pairs: &[(f64, f64)]) -> f64 {
    let count = to_float(pairs.len());
    let (sum_a, sum_b) = pairs.iter().fold((0.0, 0.0), |(a, b), pair| (a + pair.0, b + pair.1));
    let (mean_a, mean_b) = (sum_a / count, sum_b / count);
    let sums = pairs.iter().fold((0.0, 0.0, 0.0), |(ab, aa, bb), (a, b)| {
        let (a, b) = (a - mean_a, b - mean_b);
        (ab + a * b, aa + a * a, bb + b * b)
    });
    sums.0 / (sums.1 * sums.2).sqrt()
}

/// Starts Apache as in the paper, as near as Apache 2.4 comes. Ten run at once, all others are in
/// the kernel's queue.
fn apache(setting: &ExperimentSetting) -> Result<(TestServer, PathBuf)> {
    let dir = make_dir(setting.dir(), "apache")?;
    let root = board(setting.dir(), "apache-board", www_data()?)?;
    let address = free_address()?;
    let log = dir.join("access.log");
    let file = dir.join("apache2.conf");
    write(&file, &config(&dir, &root, address, &log))?;
    let command = words(&["apache2", "-DFOREGROUND", "-f", &file.to_string_lossy()]);
    let probe = StartProbe { host: HOST.into(), path: PATH.into() };
    Ok((TestServer::start("apache", &command, &dir, address, &probe)?, log))
}

fn config(dir: &Path, root: &Path, address: SocketAddr, log: &Path) -> String {
    let (dir, root, log) = (dir.display(), root.display(), log.display());
    format!(
        "ServerRoot {dir}\nServerName localhost\nPidFile {dir}/apache2.pid\nDefaultRuntimeDir {dir}\n\
         ErrorLog {dir}/error.log\nLogLevel error\nMutex fcntl:{dir}\nListen {address}\nListenBacklog 5000\n\
         LoadModule mpm_prefork_module {MODULES}/mod_mpm_prefork.so\n\
         LoadModule authz_core_module {MODULES}/mod_authz_core.so\nLoadModule mime_module {MODULES}/mod_mime.so\n\
         LoadModule cgi_module {MODULES}/mod_cgi.so\nTypesConfig /etc/mime.types\nUser www-data\nGroup www-data\n\
         StartServers {RUN}\nMinSpareServers {RUN}\nMaxSpareServers {RUN}\nServerLimit {RUN}\n\
         MaxRequestWorkers {RUN}\nMaxConnectionsPerChild 0\nKeepAlive Off\nTimeout 300\nHostnameLookups Off\n\
         LogFormat \"%D %r\" times\nCustomLog {log} times\nDocumentRoot {root}\nAddHandler cgi-script .cgi\n\
         <Directory />\nAllowOverride None\nRequire all denied\n</Directory>\n\
         <Directory {root}>\nOptions ExecCGI\nRequire all granted\n</Directory>\n"
    )
}

fn www_data() -> Result<u32> {
    let users = fs::read_to_string("/etc/passwd").context("reading /etc/passwd")?;
    let uid = users.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some("www-data")).then(|| fields.nth(1)?.parse().ok()).flatten()
    });
    uid.context("there is no user www-data")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_grow_together_correlate() {
        assert!((correlation(&[(1.0, 10.0), (2.0, 20.0), (3.0, 30.0)]) - 1.0).abs() < 1e-9);
        assert!((correlation(&[(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)]) + 1.0).abs() < 1e-9);
    }

    #[test]
    fn logs_are_read_by_the_number_in_the_query() {
        assert_eq!(of_apache("1500 POST /board.cgi?n=7 HTTP/1.1\nbroken\n"), HashMap::from([(7, 1.5)]));
        assert_eq!(
            of_nagaya("{\"target\":\"/board.cgi?n=3\",\"duration_us\":2500}\n"),
            HashMap::from([(3, 2.5)])
        );
    }
}
