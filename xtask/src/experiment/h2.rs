//! `h2`: a file of 1 KiB over HTTP/2 and TLS with 100 to 2,000 streams in flight, against nginx.
//!
//! nagaya has the limits of a new node. A tenant may have 256 requests at once, which must not
//! affect files. Not here: HTTP/1.1 (`static_files`).

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use crate::content::population::UID_BASE;
use crate::content::run as run_command;
use crate::experiment::harness::ExperimentSetting;
use crate::h2load::{self, HttpVersion, StreamLoad};
use crate::http::free_address;
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report};
use crate::server::nagaya::{NagayaNode, NagayaSettings};
use crate::server::{StartProbe, TestServer, make_dir, nginx};

pub const HOST: &str = "files.example";
pub const BODY_BYTES: u16 = 1024;

/// Streams in flight: names of cases, and numbers.
const STREAMS: [(&str, u32); 4] = [("100", 100), ("200", 200), ("1000", 1_000), ("2000", 2_000)];

/// Streams of one connection, far below both servers' limit (128): so that all threads of a server
/// have connections.
const STREAMS_PER_CONNECTION: u32 = 20;

const VARIANTS: [&str; 2] = ["nagaya", "nginx"];

const GOALS: [Goal; 9] = [
    Goal { key: "errors", bound: Bound::AtMost(0.0), aim: 0.0 },
    Goal { key: "ratio_nginx_100", bound: Bound::AtLeast(0.9), aim: 1.2 },
    Goal { key: "ratio_nginx_200", bound: Bound::AtLeast(0.9), aim: 1.2 },
    Goal { key: "ratio_nginx_1000", bound: Bound::AtLeast(0.9), aim: 1.2 },
    Goal { key: "ratio_nginx_2000", bound: Bound::AtLeast(0.9), aim: 1.2 },
    Goal { key: "cpu_ratio_nginx_100", bound: Bound::AtMost(1.1), aim: 0.9 },
    Goal { key: "cpu_ratio_nginx_200", bound: Bound::AtMost(1.1), aim: 0.9 },
    Goal { key: "cpu_ratio_nginx_1000", bound: Bound::AtMost(1.1), aim: 0.9 },
    Goal { key: "cpu_ratio_nginx_2000", bound: Bound::AtMost(1.1), aim: 0.9 },
];

/// A running server, and its TLS address.
pub struct SecureServer {
    pub name: &'static str,
    pub server: TestServer,
    pub address: SocketAddr,
}

pub fn run(setting: &ExperimentSetting) -> Result<()> {
    let mut report = Report::new("h2");
    let dir = setting.dir();
    let root = make_dir(dir, "files")?;
    fs::write(root.join("1k.bin"), vec![b'x'; BODY_BYTES.into()]).context("writing the file")?;
    let certificate = make_certificate(dir)?;
    let address = free_address()?;
    let nginx = nginx::http2(&dir.join("nginx"), &root, HOST, address, &certificate)?;
    let servers = [
        start_nagaya(setting, dir, &root, &certificate)?,
        SecureServer { name: VARIANTS[1], server: nginx, address },
    ];
    measure(setting, &mut report, &servers)?;
    report.note(
        "limits",
        json!("nagaya's are those of a new node; those of networks of clients do not hold for loopback clients, by default"),
    );
    report.note("TLS", json!("the same certificate (P-256), TLS 1.2 and 1.3; connections are kept"));
    summarise(&mut report)?;
    for server in &servers {
        report.set(format!("{}_rss_mb", server.name), server.server.memory_mib()?);
    }
    let chart = chart(&report);
    report.write(&setting.out, &chart, &GOALS)
}

/// Makes a directory with a file named after the host: a certificate and its key.
pub fn make_certificate(dir: &Path) -> Result<PathBuf> {
    let file = make_dir(dir, "certificates")?.join(format!("{HOST}.pem"));
    let (key, certificate) = (dir.join("key.pem"), dir.join("certificate.pem"));
    run_command(
        Command::new("openssl")
            .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"])
            .args(["-days", "300", "-subj", &format!("/CN={HOST}")])
            .args(["-addext", &format!("subjectAltName=DNS:{HOST}")])
            .arg("-keyout")
            .arg(&key)
            .arg("-out")
            .arg(&certificate),
    )?;
    let read = |path: &Path| fs::read_to_string(path).with_context(|| format!("reading {}", path.display()));
    fs::write(&file, read(&certificate)? + &read(&key)?)
        .with_context(|| format!("writing {}", file.display()))?;
    Ok(file)
}

/// Starts a node in `dir` with these files, and the limits of a new one.
pub fn start_nagaya(
    setting: &ExperimentSetting,
    dir: &Path,
    root: &Path,
    certificate: &Path,
) -> Result<SecureServer> {
    use std::io::Write as _;
    let address = free_address()?;
    let certificates = certificate.parent().context("the directory of the certificate")?;
    let tables = format!(
        "[[listen]]\naddress = \"{address}\"\ntls = true\n[tls]\ncertificates = \"{}\"\n",
        certificates.display()
    );
    let settings = NagayaSettings { default_limits: true, tables, ..NagayaSettings::default() };
    let node = NagayaNode::create(&setting.program, dir, "nagaya", settings)?;
    let (path, mut writer) = node.records("sites.jsonl")?;
    let tenant = json!({"tenant": {"name": "files", "uid": UID_BASE, "gid": UID_BASE}});
    let site = json!({"site": {
        "name": "files", "tenant": "files", "hosts": [HOST], "backend": {"kind": "static", "root": root},
    }});
    write!(writer, "{tenant}\n{site}\n").and_then(|()| writer.flush()).context("writing records")?;
    drop(writer);
    node.import(&path)?;
    let server = node.start(&StartProbe { host: HOST.into(), path: "/1k.bin".into() })?;
    Ok(SecureServer { name: VARIANTS[0], server, address })
}

/// Returns the load of so many streams in flight.
pub fn stream_load(streams: u32, duration: Duration) -> StreamLoad {
    StreamLoad {
        version: HttpVersion::Http2,
        host: HOST.into(),
        path: "/1k.bin".into(),
        body_bytes: BODY_BYTES.into(),
        connections: streams / STREAMS_PER_CONNECTION,
        streams_per_connection: STREAMS_PER_CONNECTION,
        duration,
    }
}

fn measure(setting: &ExperimentSetting, report: &mut Report, servers: &[SecureServer; 2]) -> Result<()> {
    let duration = setting.load().duration;
    report.note(
        "load",
        json!({
            "generator": "h2load, one thread, the next request of a stream's place right after the answer",
            "streams per connection": STREAMS_PER_CONNECTION,
            "seconds": duration.as_secs(),
            "rounds": setting.rounds(),
        }),
    );
    let loads = STREAMS.map(|(case, streams)| (case, stream_load(streams, duration)));
    interleave_loads(setting, report, servers, &loads)
}

/// Measures every server once per load and round, in an order that rotates with the round. Errors
/// are counted. Those of the first load before the first round end it.
pub fn interleave_loads(
    setting: &ExperimentSetting,
    report: &mut Report,
    servers: &[SecureServer; 2],
    loads: &[(&str, StreamLoad)],
) -> Result<()> {
    const WARM_UP: Duration = Duration::from_secs(1);
    let (case, first) = loads.first().context("a load")?;
    for server in servers {
        let outcome = h2load::run(server.address, &StreamLoad { duration: WARM_UP, ..first.clone() })?;
        let errors = outcome.errors;
        ensure!(errors == 0.0, "{}: {errors} errors doing {case} before it is measured", server.name);
    }
    for round in 0..setting.rounds() {
        for (case, load) in loads {
            let order = if round.is_multiple_of(2) { [0, 1] } else { [1, 0] };
            for server in order.map(|index| &servers[index]) {
                let cpu = server.server.cpu_seconds();
                let outcome = h2load::run(server.address, load)
                    .with_context(|| format!("{} doing {case}", server.name))?;
                let cpu = server.server.cpu_seconds() - cpu;
                report.sample(round, case, server.name, "rps", outcome.rps);
                report.sample(round, case, server.name, "errors", outcome.errors);
                report.sample(round, case, server.name, "cpu_us_per_request", cpu * 1e6 / outcome.requests);
            }
        }
        eprintln!("round {} of {} done", round + 1, setting.rounds());
    }
    Ok(())
}

fn summarise(report: &mut Report) -> Result<()> {
    for (key, variant) in [("errors", VARIANTS[0]), ("nginx_errors", VARIANTS[1])] {
        let errors = STREAMS.iter().map(|(case, _)| report.sum(case, variant, "errors")).sum();
        report.set(key, errors);
    }
    for (case, _) in STREAMS {
        for variant in VARIANTS {
            report.set(format!("{variant}_{case}_rps"), report.median(case, variant, "rps")?);
            let cpu = report.median(case, variant, "cpu_us_per_request")?;
            report.set(format!("{variant}_{case}_cpu_us_per_request"), cpu);
        }
        report.set(format!("ratio_nginx_{case}"), report.ratio(case, VARIANTS[0], VARIANTS[1], "rps")?);
        let cpu = report.ratio(case, VARIANTS[0], VARIANTS[1], "cpu_us_per_request")?;
        report.set(format!("cpu_ratio_nginx_{case}"), cpu);
    }
    Ok(())
}

fn chart(report: &Report) -> Chart {
    let panels = STREAMS.iter().flat_map(|(case, _)| {
        [("requests/s", "rps"), ("CPU microseconds a request", "cpu_us_per_request")]
            .map(|(unit, metric)| report.panel(&format!("{case} streams"), unit, case, metric, &VARIANTS))
    });
    Chart {
        title: "A file of 1 KiB over HTTP/2 and TLS".into(),
        subtitle: format!(
            "h2load, {STREAMS_PER_CONNECTION} streams per connection, load generator on the same cores; median, whiskers: \
             least and greatest round"
        ),
        panels: panels.collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A round in which both servers do the same, but for what `nagaya` says.
    fn judge(nagaya: [(&'static str, f64); 3]) -> String {
        let mut report = Report::new("h2");
        for (case, _) in STREAMS {
            for (metric, value) in [("rps", 1_000.0), ("errors", 0.0), ("cpu_us_per_request", 20.0)] {
                report.sample(0, case, "nginx", metric, value);
            }
            for (metric, value) in nagaya {
                report.sample(0, case, "nagaya", metric, value);
            }
        }
        summarise(&mut report).unwrap();
        report.table(&GOALS)
    }

    #[test]
    fn each_row_is_judged() {
        let good = judge([("rps", 950.0), ("errors", 0.0), ("cpu_us_per_request", 21.0)]);
        assert_eq!(good.matches("reached").count(), GOALS.len(), "{good}");
        let refuses = judge([("rps", 950.0), ("errors", 1.0), ("cpu_us_per_request", 21.0)]);
        assert_eq!(refuses.matches("MISSED").count(), 1, "{refuses}");
        let slow = judge([("rps", 300.0), ("errors", 0.0), ("cpu_us_per_request", 80.0)]);
        assert_eq!(slow.matches("MISSED").count(), 8, "{slow}");
    }
}
