//! Load over TLS from h2load: a constant number of requests in flight, each followed by the next.
//!
//! Failed requests are counted, not hidden: they are part of the outcome. Not here: load over
//! HTTP/1.1 (`load` runs wrk).

use std::net::SocketAddr;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::interrupt;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HttpVersion {
    Http1,
    Http2,
}

impl HttpVersion {
    /// Name in TLS (RFC 7301).
    fn protocol(self) -> &'static str {
        match self {
            Self::Http1 => "http/1.1",
            Self::Http2 => "h2",
        }
    }
}

/// The request, and the concurrency.
#[derive(Debug, Clone)]
pub struct StreamLoad {
    pub version: HttpVersion,
    pub host: String,
    pub path: String,
    /// Bytes of the right response's body.
    pub body_bytes: f64,
    pub connections: u32,
    /// Without meaning in HTTP/1.1.
    pub streams_per_connection: u32,
    pub duration: Duration,
}

/// One run's outcome.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StreamOutcome {
    /// Complete responses with a 2xx status.
    pub requests: f64,
    pub rps: f64,
    /// Requests without a response, or with another status.
    pub errors: f64,
}

/// Runs h2load once against a server at `address` that speaks TLS.
pub fn run(address: SocketAddr, load: &StreamLoad) -> Result<StreamOutcome> {
    interrupt::check()?;
    let output = Command::new("h2load")
        .args(["--threads", "1", "--clients", &load.connections.to_string()])
        .args(["--max-concurrent-streams", &load.streams_per_connection.to_string()])
        // h2load counts whole seconds only.
        .args(["--duration", &load.duration.as_secs().max(1).to_string()])
        .arg(format!("--npn-list={}", load.version.protocol()))
        .arg(format!("--connect-to={address}"))
        .arg(format!("https://{}{}", load.host, load.path))
        .output()
        .context("running h2load")?;
    interrupt::check()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success(), "h2load failed: {text}{}", String::from_utf8_lossy(&output.stderr));
    read_outcome(&text, load).with_context(|| {
        format!("load on https://{}{} at {address}: h2load said\n{text}", load.host, load.path)
    })
}

/// Reads h2load's final output.
fn read_outcome(text: &str, load: &StreamLoad) -> Result<StreamOutcome> {
    let protocol = load.version.protocol();
    let is_chosen = text.lines().any(|line| line.strip_prefix("Application protocol: ") == Some(protocol));
    ensure!(is_chosen, "the server did not choose {protocol}");
    let line = |start: &str| {
        text.lines().find_map(|line| line.strip_prefix(start)).with_context(|| format!("no line '{start}'"))
    };
    let finished = line("finished in ")?;
    let rps = number_before(finished, " req/s")?;
    let answers = line("requests: ")?;
    let statuses = line("status codes: ")?;
    // Requests without a response are among the failed ones, and so are statuses from 400 on.
    let redirected = number_before(statuses, " 3xx")?;
    let errors = number_before(answers, " failed")? + redirected;
    // Complete responses. There are more statuses: those of responses in progress at the end.
    let requests = number_before(answers, " succeeded")? - redirected;
    ensure!(requests > 0.0, "no request was answered");
    let data = line("traffic: ")?;
    let (_, data) = data.rsplit_once('(').context("no bytes of bodies")?;
    let data = number_before(data, ") data")?;
    // Responses in progress at the end have bytes here, and are not counted.
    let under_way = f64::from(load.connections * load.streams_per_connection) * load.body_bytes;
    let right = requests * load.body_bytes;
    // Refusals have bodies, too.
    let most = if errors > 0.0 { f64::INFINITY } else { right + under_way };
    ensure!(
        (right..=most).contains(&data),
        "{data} bytes of bodies, where {right} are right for {requests} answers of {} bytes",
        load.body_bytes
    );
    Ok(StreamOutcome { requests, rps, errors })
}

/// Returns the number directly before these words: `12 failed`.
fn number_before(text: &str, words: &str) -> Result<f64> {
    let (before, _) = text.split_once(words).with_context(|| format!("no '{words}' in '{text}'"))?;
    let number = before.rsplit([' ', '(']).next().unwrap_or_default();
    number.parse().with_context(|| format!("no number before '{words}' in '{text}'"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load() -> StreamLoad {
        StreamLoad {
            version: HttpVersion::Http2,
            host: "files.example".into(),
            path: "/1k.bin".into(),
            body_bytes: 1024.0,
            connections: 5,
            streams_per_connection: 20,
            duration: Duration::from_secs(1),
        }
    }

    const GOOD: &str = "\
TLS Protocol: TLSv1.3
Application protocol: h2

finished in 1.01s, 47083.00 req/s, 48.88MB/s
requests: 47083 total, 47183 started, 47083 done, 47083 succeeded, 0 failed, 0 errored, 0 timeout
status codes: 47090 2xx, 0 3xx, 0 4xx, 0 5xx
traffic: 48.88MB (51252186) total, 1.36MB (1429520) headers (space savings 83.51%), 45.98MB (48212992) data
";

    #[test]
    fn outcome_is_read() {
        let outcome = read_outcome(GOOD, &load()).unwrap();
        assert_eq!(outcome, StreamOutcome { requests: 47_083.0, rps: 47_083.0, errors: 0.0 });
    }

    #[test]
    fn refused_requests_are_errors() {
        let refused = GOOD
            .replace("47083 succeeded, 0 failed", "47073 succeeded, 10 failed")
            .replace("47090 2xx, 0 3xx, 0 4xx, 0 5xx", "47080 2xx, 0 3xx, 0 4xx, 10 5xx");
        assert_eq!(read_outcome(&refused, &load()).unwrap().errors, 10.0);
        let redirected = GOOD.replace("47090 2xx, 0 3xx", "47087 2xx, 3 3xx");
        assert_eq!(read_outcome(&redirected, &load()).unwrap().errors, 3.0);
    }

    #[test]
    fn wrong_runs_are_no_outcome() {
        for (from, to) in [
            ("Application protocol: h2", "Application protocol: http/1.1"),
            ("(48212992) data", "(470830) data"),
            ("(48212992) data", "(58212992) data"),
            ("47083 succeeded, 0 failed", "0 succeeded, 47083 failed"),
        ] {
            assert!(read_outcome(&GOOD.replace(from, to), &load()).is_err(), "{to}");
        }
    }
}
