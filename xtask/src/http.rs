//! Fetches pages by ureq: for checks, and for experiments that time single visits.
//!
//! A server is asked at its address, whatever its name: without DNS, a proxy or redirections. Each
//! request has a connection of its own, in the network of the calling thread. Not here: load
//! (`load` runs wrk) and browser behaviour (the demo's check uses curl).

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use ureq::config::AutoHeaderValue;
use ureq::http::header::{CONNECTION, HOST};
use ureq::http::request::Builder;
use ureq::http::{HeaderMap, Request};
use ureq::{Agent, AsSendBody};

/// Longer silence than this is a failure, not a slow server. Twenty programs that share a fifth of
/// a core delay a client by half a minute.
const SILENCE_MAX: Duration = Duration::from_secs(300);

/// Largest response read, in bytes: above the largest file of the experiments.
const ANSWER_MAX: u64 = 8 << 20;

/// Longest header section of a response, in bytes, a common limit of servers. ureq needs a buffer
/// that holds all of it.
const HEAD_MAX: usize = 256 << 10;

/// The client. It adds no header fields of its own.
static CLIENT: LazyLock<Agent> = LazyLock::new(|| {
    let config = Agent::config_builder()
        .http_status_as_error(false)
        .max_redirects(0)
        .proxy(None)
        .max_idle_connections(0)
        .max_response_header_size(HEAD_MAX)
        .input_buffer_size(HEAD_MAX)
        .timeout_connect(Some(SILENCE_MAX))
        .timeout_per_read(Some(SILENCE_MAX))
        .timeout_per_write(Some(SILENCE_MAX))
        .user_agent(AutoHeaderValue::None)
        .accept(AutoHeaderValue::None)
        .accept_encoding(AutoHeaderValue::None);
    config.build().new_agent()
});

/// Returns status and body of one GET.
pub fn get(address: SocketAddr, host: &str, path: &str) -> Result<(u16, Vec<u8>)> {
    visit(address, host, path).map(|visit| (visit.status, visit.body))
}

/// A response, and its times.
#[derive(Debug, Clone)]
pub struct HttpVisit {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Vec<u8>,
    /// From before connecting to the end of the header section.
    pub first_byte_ms: f64,
    /// To the last byte.
    pub whole_ms: f64,
}

impl HttpVisit {
    /// Returns the values of all fields of this name.
    pub fn fields(&self, name: &str) -> impl Iterator<Item = &str> {
        self.headers.get_all(name).iter().filter_map(|value| value.to_str().ok())
    }
}

/// Sends one GET, timed.
pub fn visit(address: SocketAddr, host: &str, path: &str) -> Result<HttpVisit> {
    exchange(request(address, host, path).body(()))
}

/// Begins a request for this path of a host. It closes its connection.
pub fn request(address: SocketAddr, host: &str, path: &str) -> Builder {
    Request::get(format!("http://{address}{path}")).header(HOST, host).header(CONNECTION, "close")
}

/// Sends one request, timed.
pub fn exchange(request: ureq::http::Result<Request<impl AsSendBody>>) -> Result<HttpVisit> {
    let request = request.context("making a request")?;
    let begun = Instant::now();
    let since = || begun.elapsed().as_secs_f64() * 1e3;
    let mut answer = CLIENT.run(request).context("asking")?;
    let first_byte_ms = since();
    let body = answer.body_mut().with_config().limit(ANSWER_MAX).read_to_vec().context("receiving")?;
    let whole_ms = since();
    let status = answer.status().as_u16();
    let (parts, _) = answer.into_parts();
    Ok(HttpVisit { status, headers: parts.headers, body, first_byte_ms, whole_ms })
}

/// Returns a time of `Server-Timing` fields, in milliseconds: `METRIC;dur=1.5`.
pub fn server_timing<T: AsRef<str>>(fields: impl IntoIterator<Item = T>, metric: &str) -> Option<f64> {
    fields.into_iter().find_map(|field| {
        field.as_ref().split(',').find_map(|entry| {
            let mut parts = entry.split(';').map(str::trim);
            (parts.next()? == metric).then_some(())?;
            parts.find_map(|part| part.strip_prefix("dur=")?.parse().ok())
        })
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
    let request = request(address, host, path).body(()).context("making a request")?;
    let answer = CLIENT.run(request).context("asking")?;
    ensure!(answer.status() == 200, "http://{host}{path}: {}", answer.status());
    io::copy(&mut answer.into_body().into_reader(), &mut io::sink()).context("receiving")
}

/// Returns a loopback address that was free a moment ago. The next process to bind it has it. The
/// caller starts its server at once, and a server that lost the race says so in its log.
pub fn free_address() -> Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("looking for a free port")?;
    listener.local_addr().context("asking for the port")
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use super::*;

    /// Answers one request with these bytes. Returns the address, and the request it gets.
    fn serve(answer: &str) -> (SocketAddr, std::thread::JoinHandle<String>) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let answer = answer.to_owned();
        let served = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte).unwrap();
                request.push(byte[0]);
            }
            stream.write_all(answer.as_bytes()).unwrap();
            String::from_utf8(request).unwrap()
        });
        (address, served)
    }

    #[test]
    fn a_host_is_asked_for_at_any_address() {
        let (address, served) =
            serve("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n");
        assert_eq!(get_ok(address, "a.example", "/x?y=1").unwrap(), b"hello");
        let request = served.join().unwrap().to_ascii_lowercase();
        let mut lines: Vec<_> = request.lines().filter(|line| !line.is_empty()).collect();
        lines[1..].sort_unstable();
        assert_eq!(lines, ["get /x?y=1 http/1.1", "connection: close", "host: a.example"]);
    }

    #[test]
    fn errors_and_redirections_are_answers() {
        let (address, _served) = serve("HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy");
        assert_eq!(get(address, "a.example", "/").unwrap(), (503, b"busy".to_vec()));
        let (address, _served) = serve("HTTP/1.1 302 Found\r\nLocation: /y\r\nContent-Length: 0\r\n\r\n");
        let visit = visit(address, "a.example", "/").unwrap();
        assert_eq!((visit.status, visit.fields("location").collect::<Vec<_>>()), (302, vec!["/y"]));
        let (address, _served) = serve("HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n");
        assert!(drain(address, "a.example", "/").is_err());
        let (address, _served) = serve("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\ncut");
        assert!(get(address, "a.example", "/").is_err(), "a part of a page is none");
    }

    #[test]
    fn a_long_head_is_read() {
        let long = "x".repeat(HEAD_MAX - 100);
        let (address, _served) = serve(&format!("HTTP/1.1 204 No Content\r\nX-Long: {long}\r\n\r\n"));
        assert_eq!(visit(address, "a.example", "/").unwrap().fields("x-long").next(), Some(&*long));
    }

    #[test]
    fn a_time_is_found_in_any_of_the_fields() {
        let fields = ["total;dur=2.5, wake;dur=1", "peer;desc=\"n2\";dur=7"];
        assert_eq!(server_timing(fields, "wake"), Some(1.0));
        assert_eq!(server_timing(fields, "peer"), Some(7.0));
        assert_eq!(server_timing(fields, "wak"), None);
    }
}
