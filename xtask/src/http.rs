//! One plain GET over TCP: enough to check that a server serves the right bytes before the
//! measurement.
//!
//! Not here: load (`load` runs wrk) and browser behaviour (the demo's check uses curl).

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

/// Longer silence than this is a failure, not a slow server. Twenty programs that share a fifth of
/// a core delay a client by half a minute.
const SILENCE_MAX: Duration = Duration::from_secs(300);

/// Largest response read, in bytes: above the largest file of the experiments.
const ANSWER_MAX: u64 = 8 << 20;

/// Longest header section of a response, in bytes, a common limit of servers.
const HEAD_MAX: usize = 256 << 10;

/// Returns status and body of one GET with `Connection: close`. Chunked bodies come as they are on
/// the wire.
pub fn get(address: SocketAddr, host: &str, path: &str) -> Result<(u16, Vec<u8>)> {
    visit(address, host, path).map(|visit| (visit.status, visit.body))
}

/// A response, and its times.
#[derive(Debug, Clone)]
pub struct HttpVisit {
    pub status: u16,
    /// Status line and fields.
    pub head: String,
    /// As it is on the wire.
    pub body: Vec<u8>,
    /// From before connecting to the first byte of the response.
    pub first_byte_ms: f64,
    /// To the last byte.
    pub whole_ms: f64,
}

/// Sends one GET with `Connection: close`, timed.
pub fn visit(address: SocketAddr, host: &str, path: &str) -> Result<HttpVisit> {
    exchange(address, &format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"))
}

/// Sends one request in its wire form, which asks to close the connection; timed.
pub fn exchange(address: SocketAddr, request: &str) -> Result<HttpVisit> {
    let begun = Instant::now();
    let since = || begun.elapsed().as_secs_f64() * 1e3;
    let mut stream = TcpStream::connect_timeout(&address, SILENCE_MAX).context("connecting")?;
    stream.set_read_timeout(Some(SILENCE_MAX)).context("setting a read timeout")?;
    stream.write_all(request.as_bytes()).context("sending")?;
    let mut answer = vec![0; 16 << 10];
    let first = stream.read(&mut answer).context("receiving")?;
    let first_byte_ms = since();
    answer.truncate(first);
    stream.take(ANSWER_MAX).read_to_end(&mut answer).context("receiving")?;
    let whole_ms = since();
    let end = answer.windows(4).position(|w| w == b"\r\n\r\n").context("an answer without a head")?;
    let head = String::from_utf8_lossy(&answer[..end]).into_owned();
    let status = head.split(' ').nth(1).and_then(|s| s.parse().ok()).context("an answer without a status")?;
    Ok(HttpVisit { status, head, body: answer.split_off(end + 4), first_byte_ms, whole_ms })
}

/// Returns a time in a header section, in milliseconds: `Server-Timing: METRIC;dur=1.5`.
pub fn server_timing(head: &str, metric: &str) -> Option<f64> {
    server_timings(head).flat_map(|field| field.split(',')).find_map(|entry| {
        let mut parts = entry.split(';').map(str::trim);
        (parts.next()? == metric).then_some(())?;
        parts.find_map(|part| part.strip_prefix("dur=")?.parse().ok())
    })
}

/// Returns the values of all `Server-Timing` fields of a header section.
pub fn server_timings(head: &str) -> impl Iterator<Item = &str> {
    head.lines().skip(1).filter_map(|line| {
        let (found, value) = line.split_once(':')?;
        found.eq_ignore_ascii_case("server-timing").then_some(value.trim())
    })
}

/// Like `get`, but anything other than 200 is an error with the response.
pub fn get_ok(address: SocketAddr, host: &str, path: &str) -> Result<Vec<u8>> {
    let (status, body) =
        get(address, host, path).with_context(|| format!("GET http://{host}{path} at {address}"))?;
    let shown = String::from_utf8_lossy(&body[..body.len().min(300)]).into_owned();
    ensure!(status == 200, "GET http://{host}{path} at {address}: status {status}\n{shown}");
    Ok(body)
}

/// Reads a 200 response to its end without keeping it, and returns the length of its body.
pub fn drain(address: SocketAddr, host: &str, path: &str) -> Result<u64> {
    let mut stream = TcpStream::connect_timeout(&address, SILENCE_MAX).context("connecting")?;
    stream.set_read_timeout(Some(SILENCE_MAX)).context("setting a read timeout")?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n").context("sending")?;
    let mut head = Vec::new();
    let mut buffer = vec![0; 64 << 10];
    let mut body = loop {
        let count = stream.read(&mut buffer).context("receiving")?;
        ensure!(count > 0 && head.len() < HEAD_MAX, "http://{host}{path}: an answer without a head");
        head.extend_from_slice(&buffer[..count]);
        if let Some(end) = head.windows(4).position(|w| w == b"\r\n\r\n") {
            break head.len() - end - 4;
        }
    } as u64;
    let status = String::from_utf8_lossy(&head[..head.len().min(40)]).into_owned();
    ensure!(status.split(' ').nth(1) == Some("200"), "http://{host}{path}: {status}");
    loop {
        match stream.read(&mut buffer).context("receiving")? {
            0 => return Ok(body),
            count => body += count as u64,
        }
    }
}

/// Returns a loopback address that was free a moment ago. The next process to bind it has it. The
/// caller starts its server at once, and a server that lost the race says so in its log.
pub fn free_address() -> Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("looking for a free port")?;
    listener.local_addr().context("asking for the port")
}

#[cfg(test)]
mod tests {
    use super::server_timing;

    #[test]
    fn a_time_is_found_in_any_of_the_fields() {
        let head = "HTTP/1.1 200 OK\r\nServer-Timing: total;dur=2.5, wake;dur=1\r\nserver-timing: peer;desc=\"n2\";dur=7";
        assert_eq!(server_timing(head, "wake"), Some(1.0));
        assert_eq!(server_timing(head, "peer"), Some(7.0));
        assert_eq!(server_timing(head, "wak"), None);
    }
}
