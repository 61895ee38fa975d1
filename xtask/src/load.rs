//! Load from wrk: closed loop, HTTP/1.1 keep-alive, one number per question.
//!
//! Not here: the requests to each server (`experiment`), medians and ratios (`report`).
//!
//! wrk runs two threads for its 100 connections on every machine, whatever the server. It shares
//! the cores with the measured server, so its own cost dilutes every ratio the same way, towards 1.

use std::io::Write as _;
use std::net::SocketAddr;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};

use crate::interrupt;

/// Parameters of wrk.
#[derive(Debug, Clone)]
pub struct LoadSettings {
    pub connections: u32,
    pub duration: Duration,
}

/// The request: one path on one host, or on many hosts in turn.
#[derive(Debug, Clone)]
pub struct LoadTarget {
    pub hosts: Vec<String>,
    pub path: String,
    /// Size of the right response's body, in bytes; a response of another size makes the run an
    /// error.
    pub body_bytes: std::ops::RangeInclusive<u64>,
}

/// One run's outcome.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LoadOutcome {
    pub requests: f64,
    pub rps: f64,
    pub p50_ms: f64,
    pub p99_ms: f64,
    pub max_ms: f64,
    /// Received, header sections included.
    pub mib_per_second: f64,
}

/// Largest header section of a response: wrk counts them, too, and no server here sends a larger
/// one.
const HEAD_BYTES_MAX: u64 = 2_000;

/// Runs wrk once. Any failed request, any status above 399 and any body of the wrong size is an
/// error.
pub fn run(address: SocketAddr, target: &LoadTarget, load: &LoadSettings) -> Result<LoadOutcome> {
    interrupt::check()?;
    let mut script =
        tempfile::Builder::new().suffix(".lua").tempfile().context("making a file for wrk's script")?;
    script.write_all(lua(target).as_bytes()).context("writing wrk's script")?;
    let threads = load.connections.min(2);
    let output = Command::new("wrk")
        .args([format!("-t{threads}"), format!("-c{}", load.connections)])
        // wrk counts whole seconds only.
        .arg(format!("-d{}s", load.duration.as_secs().max(1)))
        .args(["--timeout", "30s", "--latency", "-s"])
        .arg(script.path())
        .args(["-H", &format!("Host: {}", target.hosts[0])])
        .arg(format!("http://{address}{}", target.path))
        .output()
        .context("running wrk")?;
    interrupt::check()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success(), "wrk failed: {text}{}", String::from_utf8_lossy(&output.stderr));
    outcome(&text, target)
        .with_context(|| format!("load on http://{}{} at {address}", target.hosts[0], target.path))
}

/// Returns the script: it prints exact numbers at the end and, for many hosts, sends requests
/// prepared at the start.
fn lua(target: &LoadTarget) -> String {
    let mut script = String::new();
    if target.hosts.len() > 1 {
        script.push_str("local hosts = {");
        for host in &target.hosts {
            script.push_str(&format!("\"{host}\","));
        }
        script.push_str("}\nlocal requests, next = {}, 0\n");
        script.push_str(&format!(
            "init = function(args)\n  for i, host in ipairs(hosts) do\n    requests[i] = wrk.format(\"GET\", \"{}\", \
             {{[\"Host\"] = host}})\n  end\nend\n",
            target.path
        ));
        script.push_str(
            "request = function()\n  next = next + 1\n  if next > #requests then next = 1 end\n  return requests[next]\nend\n",
        );
    }
    script.push_str(
        "done = function(summary, latency, requests)\n  local e = summary.errors\n  io.write(string.format(\"outcome \
         %d %d %d %d %d %d %d %d %d %d %d\\n\", summary.requests, summary.duration, summary.bytes, e.connect, e.read, \
         e.write, e.status, e.timeout, latency:percentile(50), latency:percentile(99), latency.max))\nend\n",
    );
    script
}

/// Reads the script's line.
fn outcome(text: &str, target: &LoadTarget) -> Result<LoadOutcome> {
    let line = text.lines().find_map(|l| l.strip_prefix("outcome ")).context("wrk printed no outcome")?;
    let numbers: Vec<f64> =
        line.split(' ').map(str::parse).collect::<Result<_, _>>().context("numbers in wrk's outcome")?;
    let &[requests, duration_us, bytes, connect, read, write, status, timeout, p50_us, p99_us, max_us] =
        &numbers[..]
    else {
        bail!("wrk's outcome has {} numbers", numbers.len());
    };
    ensure!(requests > 0.0, "no request was answered");
    if connect + read + write + status + timeout > 0.0 {
        bail!(
            "failed requests: {connect} connections refused, {read} reads, {write} writes, {timeout} timeouts, \
             {status} answers with a status above 399, of {requests}"
        );
    }
    // wrk counts the bytes of responses in progress at the end, but not those responses.
    let size = bytes / requests;
    let (least, most) =
        (to_float(*target.body_bytes.start()), to_float(*target.body_bytes.end() + HEAD_BYTES_MAX));
    ensure!(
        (least..=most * 1.5).contains(&size),
        "answers of {size:.0} bytes with their heads, where bodies of {:?} bytes are right",
        target.body_bytes
    );
    let seconds = duration_us / 1e6;
    Ok(LoadOutcome {
        requests,
        rps: requests / seconds,
        p50_ms: p50_us / 1e3,
        p99_ms: p99_us / 1e3,
        max_ms: max_us / 1e3,
        mib_per_second: bytes / seconds / f64::from(1 << 20),
    })
}

#[expect(clippy::cast_precision_loss, reason = "sizes of files stay far below 2^53")]
fn to_float(bytes: u64) -> f64 {
    bytes as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target() -> LoadTarget {
        LoadTarget { hosts: vec!["a.example".into()], path: "/".into(), body_bytes: 14..=14 }
    }

    #[test]
    fn an_outcome_is_read_in_its_units() {
        let text = "Running 1s test\noutcome 200 2000000 40000 0 0 0 0 0 1500 9000 12000\n";
        let outcome = outcome(text, &target()).unwrap();
        assert_eq!((outcome.rps, outcome.p50_ms, outcome.p99_ms, outcome.max_ms), (100.0, 1.5, 9.0, 12.0));
    }

    #[test]
    fn a_failed_request_or_a_wrong_body_spoils_the_run() {
        assert!(outcome("outcome 200 2000000 40000 0 0 0 1 0 1500 9000 12000\n", &target()).is_err());
        assert!(outcome("outcome 200 2000000 4000 0 0 0 0 0 0 0 0\n", &target()).unwrap().rps > 0.0);
        assert!(outcome("outcome 200 2000000 400 0 0 0 0 0 0 0 0\n", &target()).is_err());
        assert!(outcome("outcome 200 2000000 4000000 0 0 0 0 0 0 0 0\n", &target()).is_err());
        assert!(outcome("Running\n", &target()).is_err());
    }

    #[test]
    fn many_hosts_make_a_script_with_prepared_requests() {
        let one = lua(&target());
        assert!(!one.contains("request = function"));
        let mut target = target();
        target.hosts.push("b.example".into());
        assert!(lua(&target).contains("\"b.example\""));
    }
}
