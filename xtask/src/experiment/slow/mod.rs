//! Clients on slow lines: uploads that trickle, and responses that are read a few bytes at a time.
//!
//! One thread runs them all. Each line is one connection with one request. It fails if it is
//! refused, cut off, or gets an incomplete response. Not here: the measured clients beside them
//! (`clients`, `buffering`).

pub mod buffering;
pub mod clients;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use rustix::process::{Resource, getrlimit, setrlimit};
use socket2::SockRef;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::LocalSet;
use tokio::time::{sleep, timeout};

use crate::interrupt;

/// Receive buffer of a slow reader, in bytes: its kernel reads little ahead of it.
const RECEIVE_BUFFER: u32 = 4096;

/// Longest segment that it accepts, in bytes: as on Ethernet. Loopback's is longer than the receive
/// buffer. The kernel sends into such a window only by its probes, which come more and more rarely.
const SEGMENT: u32 = 1460;

/// Largest header section of a response, in bytes.
const HEAD_MAX: usize = 16 << 10;

/// Longest wait for the whole response of a line that finishes quickly at its end.
const HURRY_MAX: Duration = Duration::from_secs(120);

/// Interval of checks of a condition.
const POLL: Duration = Duration::from_millis(20);

/// The behaviour of one slow client.
#[derive(Debug, Clone)]
pub struct SlowLine {
    pub address: SocketAddr,
    pub host: String,
    pub path: &'static str,
    pub direction: SlowDirection,
    /// Bytes that go over the line at once, and the time between two such steps.
    pub step_bytes: usize,
    pub step_every: Duration,
    /// From the start of all of them.
    pub begins_after: Duration,
    /// The client's address.
    pub from: Ipv4Addr,
    /// At the end it reads the rest at once, and checks it; otherwise it leaves.
    pub hurries: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlowDirection {
    /// A body of this many bytes; the response begins with that number.
    Upload(usize),
    /// A response with a body of this many bytes.
    Download(usize),
}

/// Results of the lines.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SlowTally {
    /// Lines that were in progress at some time.
    pub flowed: usize,
    /// Exchanges that were complete and right.
    pub whole: usize,
    /// Lines that were refused, cut off or got a wrong response.
    pub failed: usize,
}

/// State shared by the lines and their waiters.
#[derive(Debug, Default)]
struct SlowState {
    stop: AtomicBool,
    flowed: AtomicUsize,
    whole: AtomicUsize,
    failed: AtomicUsize,
    /// Why the first one failed.
    why: Mutex<Option<String>>,
}

/// Slow clients at work.
pub struct SlowLines {
    shared: Arc<SlowState>,
    count: usize,
    thread: Option<JoinHandle<Result<()>>>,
}

impl SlowLines {
    pub fn start(lines: Vec<SlowLine>) -> Self {
        let shared = Arc::new(SlowState::default());
        let count = lines.len();
        let thread = {
            let shared = Arc::clone(&shared);
            std::thread::spawn(move || run_lines(lines, &shared))
        };
        Self { shared, count, thread: Some(thread) }
    }

    /// Waits until all lines are in progress. Fails if one failed, or `limit` passes.
    pub fn wait_flowing(&self, limit: Duration) -> Result<()> {
        let begun = Instant::now();
        loop {
            let tally = self.tally();
            if tally.flowed + tally.failed >= self.count {
                return Ok(());
            }
            if begun.elapsed() > limit {
                bail!("{} of {} slow clients are under way after {limit:?}", tally.flowed, self.count);
            }
            interrupt::check()?;
            std::thread::sleep(POLL);
        }
    }

    pub fn tally(&self) -> SlowTally {
        let read = |number: &AtomicUsize| number.load(Ordering::SeqCst);
        let shared = &self.shared;
        SlowTally { flowed: read(&shared.flowed), whole: read(&shared.whole), failed: read(&shared.failed) }
    }

    /// Ends all lines; those that finish quickly first read the rest.
    pub fn stop(mut self) -> Result<SlowTally> {
        self.shared.stop.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            thread.join().map_err(|_| anyhow!("the slow clients panicked"))??;
        }
        if let Ok(Some(why)) = self.shared.why.lock().map(|why| why.clone()) {
            eprintln!("a slow client failed: {why}");
        }
        interrupt::check()?;
        Ok(self.tally())
    }
}

impl Drop for SlowLines {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            // An error is on its way up already.
            let _ = thread.join();
        }
    }
}

/// Raises this process's limit of connections as far as possible.
pub fn raise_open_files(needed: u64) -> Result<()> {
    let mut limit = getrlimit(Resource::Nofile);
    if limit.maximum.is_some_and(|maximum| maximum < needed) {
        // Root may have more.
        limit.maximum = Some(needed);
    }
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).with_context(|| format!("asking for {needed} open files"))
}

fn run_lines(lines: Vec<SlowLine>, shared: &Arc<SlowState>) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("a runtime")?;
    let local = LocalSet::new();
    local.block_on(&runtime, async {
        let tasks: Vec<_> = lines
            .into_iter()
            .map(|line| {
                let shared = Arc::clone(shared);
                tokio::task::spawn_local(async move { run_line(&line, &shared).await })
            })
            .collect();
        for task in tasks {
            task.await.context("a slow client panicked")?;
        }
        Ok(())
    })
}

async fn run_line(line: &SlowLine, shared: &SlowState) {
    sleep(line.begins_after).await;
    if shared.stop.load(Ordering::SeqCst) {
        return;
    }
    let outcome = match line.direction {
        SlowDirection::Upload(bytes) => upload(line, bytes, shared).await,
        SlowDirection::Download(bytes) => download(line, bytes, shared).await,
    };
    match outcome {
        Ok(true) => {
            shared.whole.fetch_add(1, Ordering::SeqCst);
        }
        Ok(false) => {}
        Err(error) => {
            shared.failed.fetch_add(1, Ordering::SeqCst);
            if let Ok(mut why) = shared.why.lock() {
                why.get_or_insert_with(|| format!("{}: {error:#}", line.path));
            }
        }
    }
}

async fn connect(line: &SlowLine) -> Result<TcpStream> {
    let socket = TcpSocket::new_v4().context("a socket")?;
    if matches!(line.direction, SlowDirection::Download(_)) {
        socket.set_recv_buffer_size(RECEIVE_BUFFER).context("setting a buffer's size")?;
        SockRef::from(&socket).set_tcp_mss(SEGMENT).context("setting the length of segments")?;
    }
    socket.bind(SocketAddr::new(IpAddr::V4(line.from), 0)).context("binding")?;
    socket.connect(line.address).await.context("connecting")
}

/// Returns true if the upload was complete with a right response, false if it was left.
async fn upload(line: &SlowLine, bytes: usize, shared: &SlowState) -> Result<bool> {
    let mut stream = connect(line).await?;
    let head = format!(
        "POST {} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/octet-stream\r\nContent-Length: {bytes}\r\n\
         Connection: close\r\n\r\n",
        line.path, line.host
    );
    stream.write_all(head.as_bytes()).await.context("sending a head")?;
    let step = vec![b'x'; line.step_bytes];
    let mut sent = 0;
    while sent < bytes && !shared.stop.load(Ordering::SeqCst) {
        let count = line.step_bytes.min(bytes - sent);
        stream.write_all(&step[..count]).await.with_context(|| format!("after {sent} bytes"))?;
        if sent == 0 {
            shared.flowed.fetch_add(1, Ordering::SeqCst);
        }
        sent += count;
        sleep(line.step_every).await;
        if sent < bytes {
            ensure_silent(&stream, sent)?;
        }
    }
    if sent < bytes && !line.hurries {
        return Ok(false);
    }
    let finish = async {
        stream.write_all(&vec![b'x'; bytes - sent]).await.context("sending the rest")?;
        let mut answer = Vec::new();
        (&mut stream).take(HEAD_MAX as u64).read_to_end(&mut answer).await.context("receiving")?;
        anyhow::Ok(answer)
    };
    let answer = timeout(HURRY_MAX, finish).await.context("no answer")??;
    check_upload(&answer, bytes)?;
    Ok(true)
}

/// Checks that there is no response yet: one before the body's end is a refusal.
fn ensure_silent(stream: &TcpStream, sent: usize) -> Result<()> {
    let mut said = [0; 200];
    match stream.try_read(&mut said) {
        Ok(0) => bail!("closed after {sent} bytes"),
        Ok(count) => bail!("answered after {sent} bytes: {}", first_line(&said[..count])),
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(()),
        Err(error) => Err(error).with_context(|| format!("after {sent} bytes")),
    }
}

/// Checks that the response has 200 and the number of received bytes.
fn check_upload(answer: &[u8], bytes: usize) -> Result<()> {
    let text = String::from_utf8_lossy(answer);
    ensure!(status(answer) == Some(200), "an upload was answered '{}'", describe_refusal(answer));
    ensure!(text.contains(&format!("{bytes} bytes")), "an upload of {bytes} bytes did not arrive whole");
    Ok(())
}

/// Returns true if the response was complete, false if it was left.
async fn download(line: &SlowLine, bytes: usize, shared: &SlowState) -> Result<bool> {
    let mut stream = connect(line).await?;
    let head = format!("GET {} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", line.path, line.host);
    stream.write_all(head.as_bytes()).await.context("sending")?;
    let mut buffer = vec![0; line.step_bytes];
    let mut head = Vec::new();
    let mut read = loop {
        let count = stream.read(&mut buffer).await.context("receiving a head")?;
        head.extend_from_slice(&buffer[..count]);
        if let Some(end) = head.windows(4).position(|window| window == b"\r\n\r\n") {
            break head.len() - end - 4;
        }
        ensure!(count > 0 && head.len() < HEAD_MAX, "an answer without a head: {}", first_line(&head));
    };
    if status(&head) != Some(200) {
        let mut rest = Vec::new();
        // Reads the available part; the reason for its end does not matter.
        let _ = timeout(HURRY_MAX, (&mut stream).take(HEAD_MAX as u64).read_to_end(&mut rest)).await;
        head.extend_from_slice(&rest);
        bail!("answered '{}'", describe_refusal(&head));
    }
    shared.flowed.fetch_add(1, Ordering::SeqCst);
    while read < bytes && !shared.stop.load(Ordering::SeqCst) {
        sleep(line.step_every).await;
        let count = stream.read(&mut buffer).await.with_context(|| format!("after {read} bytes"))?;
        ensure!(count > 0, "cut off after {read} of {bytes} bytes");
        read += count;
    }
    if read < bytes && !line.hurries {
        return Ok(false);
    }
    let rest = async {
        let mut buffer = vec![0; 64 << 10];
        loop {
            match stream.read(&mut buffer).await.context("receiving the rest")? {
                0 => return anyhow::Ok(()),
                count => read += count,
            }
        }
    };
    timeout(HURRY_MAX, rest).await.context("the rest did not come")??;
    ensure!(read == bytes, "{read} bytes came, where {bytes} are right");
    Ok(true)
}

fn status(answer: &[u8]) -> Option<u16> {
    first_line(answer).split(' ').nth(1)?.parse().ok()
}

/// Returns its first line, and the code of the error that its page names: `NGY0471`.
fn describe_refusal(answer: &[u8]) -> String {
    let text = String::from_utf8_lossy(answer);
    let code =
        text.split_once("NGY").map(|(_, rest)| rest.chars().take_while(char::is_ascii_digit).collect());
    let code: String = code.unwrap_or_default();
    if code.is_empty() { first_line(answer) } else { format!("{} NGY{code}", first_line(answer)) }
}

fn first_line(answer: &[u8]) -> String {
    String::from_utf8_lossy(answer).lines().next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::TcpListener;

    use super::*;

    /// Has one client, which gets `answer` once `taken` bytes of it came.
    fn serve(answer: &'static str, taken: usize) -> (SocketAddr, JoinHandle<()>) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut buffer = vec![0; taken];
            stream.read_exact(&mut buffer).unwrap();
            stream.write_all(answer.as_bytes()).unwrap();
            // Until the client leaves.
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            let _ = stream.read_to_end(&mut buffer);
        });
        (address, server)
    }

    fn tally(answer: &'static str, taken: usize, direction: SlowDirection) -> SlowTally {
        let (address, server) = serve(answer, taken);
        let line = SlowLine {
            address,
            host: "a.example".into(),
            path: "/",
            direction,
            step_bytes: 10,
            step_every: Duration::from_millis(1),
            begins_after: Duration::ZERO,
            from: Ipv4Addr::LOCALHOST,
            hurries: true,
        };
        let lines = SlowLines::start(vec![line]);
        lines.wait_flowing(Duration::from_secs(60)).unwrap();
        server.join().unwrap();
        let tally = lines.stop().unwrap();
        SlowTally { flowed: 0, ..tally }
    }

    const RIGHT: SlowTally = SlowTally { flowed: 0, whole: 1, failed: 0 };
    const FAILED: SlowTally = SlowTally { flowed: 0, whole: 0, failed: 1 };

    #[test]
    fn whole_exchanges_are_right() {
        let answer = "HTTP/1.1 200 OK\r\n\r\n30 bytes";
        assert_eq!(tally(answer, 40, SlowDirection::Download(8)), RIGHT);
        let head_and_body = 115 + 30;
        assert_eq!(tally(answer, head_and_body, SlowDirection::Upload(30)), RIGHT);
    }

    #[test]
    fn refusals_are_told_with_their_code() {
        let page = b"HTTP/1.1 503 Service Unavailable\r\n\r\n<p>NGY0471</p>";
        assert_eq!(describe_refusal(page), "HTTP/1.1 503 Service Unavailable NGY0471");
        assert_eq!(describe_refusal(b"HTTP/1.1 404 Not Found\r\n\r\n"), "HTTP/1.1 404 Not Found");
    }

    #[test]
    fn refused_and_cut_exchanges_fail() {
        let refused = "HTTP/1.1 503 Service Unavailable\r\n\r\n";
        assert_eq!(tally(refused, 40, SlowDirection::Download(8)), FAILED);
        assert_eq!(tally(refused, 100, SlowDirection::Upload(30_000)), FAILED);
        let short = "HTTP/1.1 200 OK\r\n\r\n29 bytes";
        assert_eq!(tally(short, 40, SlowDirection::Download(9)), FAILED);
        assert_eq!(tally(short, 115 + 30, SlowDirection::Upload(30)), FAILED);
    }
}
