//! `isolation-io`: how exactly limits on disk throughput hold. Programs read and write, in a cell
//! each and in one for all. A static file is paced.
//!
//! Not here: the other experiments.

use std::fs;
use std::io::Write as _;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::{program, question, start};
use crate::clients::{self, to_float};
use crate::content;
use crate::content::population::UID_BASE;
use crate::experiment::harness::ExperimentSetting;
use crate::http;
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report};
use crate::server::TestServer;

const MIB: u64 = 1 << 20;

/// MiB that one program reads or writes, in the full run and in the quick one.
const MIB_EACH: u64 = 200;
const MIB_EACH_QUICK: u64 = 100;

/// Limits, MiB/s. Below any disk's rate, so that the limit decides.
const LIMIT_MIB: u64 = 25;

/// Programs that share one cell.
const SHARED: usize = 2;

const HOSTS: [&str; 2] = ["own.example", "shared.example"];

/// Bypasses the page cache, as a limit on a disk only counts data that reaches the disk. `dd`
/// reports its own time.
const IO: &str = "#!/bin/sh\nexec 2>&1\nprintf 'Content-Type: text/plain\\r\\n\\r\\n'\ncase $QUERY_STRING in\n\
     read*) dd if=data.bin of=/dev/null bs=1M iflag=direct count=${QUERY_STRING#read=} ;;\n\
     write*) f=written.$$; dd if=/dev/zero of=$f bs=1M oflag=direct count=${QUERY_STRING#write=}; rm -f $f ;;\nesac\n";

const GOALS: [Goal; 6] = [
    Goal { key: "read_err_pct", bound: Bound::AtMost(5.0), aim: 5.0 },
    Goal { key: "write_err_pct", bound: Bound::AtMost(5.0), aim: 5.0 },
    Goal { key: "shared_read_err_pct", bound: Bound::AtMost(5.0), aim: 5.0 },
    Goal { key: "shared_write_err_pct", bound: Bound::AtMost(5.0), aim: 5.0 },
    Goal { key: "pace_err_pct", bound: Bound::AtMost(5.0), aim: 5.0 },
    Goal { key: "failed", bound: Bound::AtMost(0.0), aim: 0.0 },
];

pub fn run(setting: &ExperimentSetting) -> Result<()> {
    let mut report = Report::new("isolation-io");
    let each = if setting.quick { MIB_EACH_QUICK } else { MIB_EACH };
    let root = program(setting.dir(), "io.cgi", IO)?;
    write_data(&root.join("data.bin"), each * MIB)?;
    content::give(&root, UID_BASE)?;
    let limits = format!("read: \"{LIMIT_MIB}M\", write: \"{LIMIT_MIB}M\"");
    let rules = format!(
        "case request.host\nwhen \"{}\"\n  limit {limits}\nwhen \"{}\"\n  cell \"disk\", {limits}\nend\n",
        HOSTS[0], HOSTS[1]
    );
    let server = start(setting, &root, &HOSTS, &rules, "/io.cgi?none")?;
    report.note("limit, MiB/s", json!(LIMIT_MIB));
    report.note("MiB of each program", json!(each));
    report.note("programs in the shared cell", json!(SHARED));

    let mut failed = 0;
    for round in 0..if setting.quick { 3 } else { 5 } {
        for direction in ["read", "write"] {
            for (host, at_once) in [(HOSTS[0], 1), (HOSTS[1], SHARED)] {
                let (rate, bad) = rate(&server, host, direction, each, at_once)?;
                failed += bad;
                report.sample(round, direction, host, "mib_per_second", rate);
            }
        }
        report.sample(round, "pace", HOSTS[0], "mib_per_second", paced(&server, each)?);
        eprintln!("round {} done", round + 1);
    }
    for (key, case, host) in [
        ("read_err_pct", "read", HOSTS[0]),
        ("write_err_pct", "write", HOSTS[0]),
        ("shared_read_err_pct", "read", HOSTS[1]),
        ("shared_write_err_pct", "write", HOSTS[1]),
        ("pace_err_pct", "pace", HOSTS[0]),
    ] {
        let rate = report.median(case, host, "mib_per_second")?;
        report.set(key.replace("err_pct", "mib_per_second"), rate);
        let limit = to_float(usize::try_from(LIMIT_MIB).context("the limit")?);
        report.set(key, (rate - limit).abs() / limit * 100.0);
    }
    report.set("failed", to_float(failed));
    let chart = chart(&report);
    report.write(&setting.out, &chart, &GOALS)
}

fn write_data(path: &std::path::Path, len: u64) -> Result<()> {
    let mut file = fs::File::create(path).with_context(|| format!("creating {}", path.display()))?;
    let piece: Vec<u8> = (0..MIB).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    for _ in 0..len / MIB {
        file.write_all(&piece).context("writing the data")?;
    }
    // Data that is not on the disk yet could not be read past the page cache at the disk's speed.
    file.sync_all().context("writing the data to the disk")
}

/// Returns the throughput of all programs together by their own clocks, and how many failed.
fn rate(server: &TestServer, host: &str, direction: &str, each: u64, at_once: usize) -> Result<(f64, usize)> {
    let ask = question(server, host, format!("/io.cgi?{direction}={each}"));
    let answers = clients::ask(&ask, at_once, at_once)?;
    ensure!(answers.times_ms.len() + answers.failed == at_once, "an answer is missing");
    let all = to_float(usize::try_from(each).context("MiB of each")?) * to_float(at_once);
    Ok((all / answers.seconds, answers.failed))
}

/// Returns the throughput of the data as a static file, MiB/s.
fn paced(server: &TestServer, each: u64) -> Result<f64> {
    let begun = std::time::Instant::now();
    let len = http::drain(server.address, HOSTS[0], "/data.bin")?;
    ensure!(len == each * MIB, "{len} bytes of a file of {} MiB", each);
    Ok(to_float(usize::try_from(each).context("MiB of the file")?) / begun.elapsed().as_secs_f64())
}

fn chart(report: &Report) -> Chart {
    let panel = |title: &str, case: &str| report.panel(title, "MiB/s", case, "mib_per_second", &HOSTS);
    Chart {
        title: format!("Throughput under a limit of {LIMIT_MIB} MiB/s"),
        subtitle:
            "dd past the page cache as CGI, in a cell of its own and two in one cell; a static file, paced"
                .into(),
        panels: vec![panel("Read", "read"), panel("Write", "write"), panel("Static file", "pace")],
    }
}
