//! Hundreds and thousands of clients, each with its own clock: closed loops, open arrivals, and
//! people who honour tickets.
//!
//! One thread runs them all. Every request has its own connection, and its time is the client's:
//! from before connecting to the last byte. Not here: load that saturates a fast server (`load`
//! runs wrk), the requests themselves.

use std::cell::RefCell;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpSocket;
use tokio::task::LocalSet;
use tokio::time::{sleep, sleep_until, timeout};

use crate::{http, interrupt};

/// Longest time of a request; then the client gives up, which counts as a failure.
const PATIENCE: Duration = Duration::from_secs(300);

/// Largest response read, bytes.
const ANSWER_MAX: usize = 1 << 20;

/// Interval at which a running crowd checks for an interrupt.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// The request to send.
#[derive(Debug, Clone)]
pub struct SentPost {
    pub address: SocketAddr,
    pub host: String,
    pub path: String,
    /// `None` means a GET.
    pub body: Option<Rc<[u8]>>,
}

/// One request from its client's side.
#[derive(Debug, Clone, Default)]
pub struct SeenAnswer {
    /// Its number, which the query carries as `n`.
    pub number: u64,
    /// For `open`: the index of its arrival.
    pub arrival: usize,
    /// From before connecting to the last byte.
    pub took_ms: f64,
    /// Time of its end, since the crowd began.
    pub ended: Duration,
    /// 0 if there was no response.
    pub status: u16,
    /// `Server-Timing: queue` and `predicted`, milliseconds.
    pub queued_ms: Option<f64>,
    pub predicted_ms: Option<f64>,
    pub retry_after: Option<f64>,
    pub ticket: Option<String>,
    /// The error that the response names: `NGY0451`.
    pub code: Option<String>,
    /// Why there was no response.
    pub why: Option<String>,
}

/// State that clients share.
pub struct PostingCrowd {
    begun: Instant,
    seen: RefCell<Vec<SeenAnswer>>,
    next: std::cell::Cell<u64>,
    /// End of the path of the lane's events, once a ticket's cookie has shown it.
    stream: RefCell<Option<String>>,
}

impl PostingCrowd {
    /// Runs `clients` on this thread until they end.
    pub fn run<F>(clients: impl FnOnce(Rc<Self>) -> F) -> Result<Vec<SeenAnswer>>
    where
        F: Future<Output = ()> + 'static,
    {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().context("a runtime")?;
        let crowd = Rc::new(Self {
            begun: Instant::now(),
            seen: RefCell::default(),
            next: 0.into(),
            stream: RefCell::default(),
        });
        let local = LocalSet::new();
        let clients = clients(Rc::clone(&crowd));
        local.block_on(&runtime, async move {
            let mut clients = tokio::task::spawn_local(clients);
            loop {
                match timeout(LOOK_EVERY, &mut clients).await {
                    Ok(ended) => return ended.context("a client panicked"),
                    Err(_) => interrupt::check()?,
                }
            }
        })?;
        drop(local);
        Ok(crowd.seen.take())
    }

    /// Sends one request and records it. `from` is the client's address.
    pub async fn ask(&self, post: &SentPost, from: Option<Ipv4Addr>, ticket: Option<&str>) -> SeenAnswer {
        let number = self.next.get();
        self.next.set(number + 1);
        let begun = Instant::now();
        let answer = timeout(PATIENCE, exchange(post, number, from, ticket)).await;
        let took_ms = begun.elapsed().as_secs_f64() * 1e3;
        let seen = match answer {
            Ok(Ok((head, body))) => {
                if let Some(name) =
                    head.split("nagaya-ticket-").nth(1).and_then(|rest| rest.split('=').next())
                {
                    *self.stream.borrow_mut() = Some(name.to_owned());
                }
                SeenAnswer { number, took_ms, code: code(&body), ..read(&head) }
            }
            Ok(Err(error)) => {
                SeenAnswer { number, took_ms, why: Some(format!("{error:#}")), ..SeenAnswer::default() }
            }
            Err(_) => {
                SeenAnswer { number, took_ms, why: Some("it took too long".into()), ..SeenAnswer::default() }
            }
        };
        let seen = SeenAnswer { ended: self.elapsed(), ..seen };
        self.seen.borrow_mut().push(seen.clone());
        seen
    }

    /// Listens as a waiting page does, no longer than `until`; true if it was called.
    pub async fn listen(&self, post: &SentPost, from: Ipv4Addr, ticket: &str, until: Duration) -> bool {
        const OK: &[u8] = b"HTTP/1.1 200";
        let listening = async {
            let short = self.stream.borrow().clone()?;
            let socket = TcpSocket::new_v4().ok()?;
            socket.bind(SocketAddr::new(IpAddr::V4(from), 0)).ok()?;
            let mut stream = socket.connect(post.address).await.ok()?;
            let head = format!(
                "GET /.nagaya/wait/{short} HTTP/1.1\r\nHost: {}\r\nAccept: text/event-stream\r\nNagaya-Ticket: {ticket}\r\n\r\n",
                post.host
            );
            stream.write_all(head.as_bytes()).await.ok()?;
            let mut told = Vec::new();
            let mut buffer = [0; 4096];
            loop {
                let count = stream.read(&mut buffer).await.ok()?;
                told.extend_from_slice(&buffer[..count]);
                if told.windows(11).any(|window| window == b"event: come") {
                    return Some(());
                }
                // Too many listen: it comes when its slot begins, and holds no connection until
                // then.
                let is_refused = told.len() >= OK.len() && !told.starts_with(OK);
                if count == 0 || is_refused || told.len() > ANSWER_MAX {
                    return None;
                }
            }
        };
        timeout(until, listening).await.ok().flatten().is_some()
    }

    pub fn elapsed(&self) -> Duration {
        self.begun.elapsed()
    }
}

/// Runs this many clients for this time. Each sends a request as soon as it has a response. A
/// deferred client waits before its next request.
pub fn closed(
    post: &SentPost,
    clients: usize,
    for_time: Duration,
    after_503: Duration,
) -> Result<Vec<SeenAnswer>> {
    let post = post.clone();
    PostingCrowd::run(|crowd| async move {
        let clients: Vec<_> = (0..clients)
            .map(|_| {
                let (crowd, post) = (Rc::clone(&crowd), post.clone());
                tokio::task::spawn_local(async move {
                    while crowd.elapsed() < for_time {
                        if crowd.ask(&post, None, None).await.status == 503 {
                            sleep(after_503).await;
                        }
                    }
                })
            })
            .collect();
        for client in clients {
            // A panic of a client was reported; its missing results will be noticed.
            let _ = client.await;
        }
    })
}

/// Sends requests at given times, whatever happens to earlier ones.
pub fn open(arrivals: Vec<(Duration, SentPost)>) -> Result<Vec<SeenAnswer>> {
    PostingCrowd::run(|crowd| async move {
        let begun = tokio::time::Instant::now();
        let clients: Vec<_> = arrivals
            .into_iter()
            .enumerate()
            .map(|(arrival, (at, post))| {
                let crowd = Rc::clone(&crowd);
                tokio::task::spawn_local(async move {
                    sleep_until(begun + at).await;
                    let seen = crowd.ask(&post, None, None).await;
                    let mut all = crowd.seen.borrow_mut();
                    if let Some(seen) = all.iter_mut().rfind(|other| other.number == seen.number) {
                        seen.arrival = arrival;
                    }
                })
            })
            .collect();
        for client in clients {
            let _ = client.await;
        }
    })
}

/// Returns the response's header section, and its body if it is an error.
async fn exchange(
    post: &SentPost,
    number: u64,
    from: Option<Ipv4Addr>,
    ticket: Option<&str>,
) -> Result<(String, String)> {
    let socket = TcpSocket::new_v4().context("a socket")?;
    if let Some(from) = from {
        socket.bind(SocketAddr::new(IpAddr::V4(from), 0)).context("binding")?;
    }
    let mut stream = socket.connect(post.address).await.context("connecting")?;
    let body = post.body.as_deref().unwrap_or_default();
    let method = if post.body.is_some() { "POST" } else { "GET" };
    let join = if post.path.contains('?') { '&' } else { '?' };
    let mut head = format!(
        "{method} {}{join}n={number} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nAccept: application/json\r\n",
        post.path, post.host
    );
    if post.body.is_some() {
        head.push_str("Content-Type: application/x-www-form-urlencoded\r\n");
        head.push_str(&format!("Content-Length: {}\r\n", body.len()));
    }
    if let Some(ticket) = ticket {
        head.push_str(&format!("Nagaya-Ticket: {ticket}\r\n"));
    }
    head.push_str("\r\n");
    let mut request = head.into_bytes();
    request.extend_from_slice(body);
    stream.write_all(&request).await.context("sending")?;
    let mut answer = Vec::new();
    stream.take(ANSWER_MAX as u64).read_to_end(&mut answer).await.context("receiving")?;
    let end = answer.windows(4).position(|w| w == b"\r\n\r\n").context("an answer without a head")?;
    let head = String::from_utf8_lossy(&answer[..end]).into_owned();
    ensure!(head.starts_with("HTTP/1.1 "), "an answer that is none");
    let body = if head.starts_with("HTTP/1.1 2") { &[] } else { &answer[end..] };
    Ok((head, String::from_utf8_lossy(body).into_owned()))
}

/// Returns the first error code in a text.
fn code(text: &str) -> Option<String> {
    let (_, rest) = text.split_once("NGY")?;
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    (!digits.is_empty()).then(|| format!("NGY{digits}"))
}

fn read(head: &str) -> SeenAnswer {
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    let fields = |name: &str| {
        let name = name.to_owned();
        head.lines().skip(1).filter_map(move |line| {
            let (found, value) = line.split_once(':')?;
            found.eq_ignore_ascii_case(&name).then(|| value.trim().to_owned())
        })
    };
    let timing = |metric: &str| http::server_timing(fields("server-timing"), metric);
    SeenAnswer {
        status,
        queued_ms: timing("queue"),
        predicted_ms: timing("predicted"),
        retry_after: fields("retry-after").next().and_then(|text| text.parse().ok()),
        ticket: fields("nagaya-ticket").next(),
        ..SeenAnswer::default()
    }
}

/// Returns the times of requests with a 200 response.
pub fn times_ms(seen: &[SeenAnswer]) -> Vec<f64> {
    seen.iter().filter(|seen| seen.status == 200).map(|seen| seen.took_ms).collect()
}

/// Returns how many had a 200 response within this time of the crowd's start.
pub fn served_within(seen: &[SeenAnswer], window: Duration) -> usize {
    seen.iter().filter(|seen| seen.status == 200 && seen.ended <= window).count()
}

/// Returns how many failed: no response, or another than 200 and 503.
pub fn failed(seen: &[SeenAnswer]) -> usize {
    let failed = seen.iter().filter(|seen| !matches!(seen.status, 200 | 503));
    failed
        .inspect(|seen| {
            eprintln!("request {} failed: {} {}", seen.number, seen.status, seen.why.as_deref().unwrap_or(""))
        })
        .count()
}

/// Returns the value that this part of them does not exceed.
pub fn percentile(mut values: Vec<f64>, part: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let last = values.len().saturating_sub(1);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a part of a length is an index"
    )]
    let at = (last as f64 * part).round() as usize;
    values.get(at).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_is_read() {
        let seen = read(
            "HTTP/1.1 503 Service Unavailable\r\nRetry-After: 40\r\nnagaya-ticket: abc\r\n\
             Server-Timing: cpu;dur=1, queue;dur=12.5\r\nserver-timing: predicted;dur=10",
        );
        assert_eq!((seen.status, seen.retry_after, seen.ticket.as_deref()), (503, Some(40.0), Some("abc")));
        assert_eq!((seen.queued_ms, seen.predicted_ms), (Some(12.5), Some(10.0)));
    }

    #[test]
    fn percentiles_of_few() {
        assert_eq!(percentile(vec![3.0, 1.0, 2.0], 0.5), 2.0);
        assert!(percentile(Vec::new(), 0.5).is_nan());
    }
}
