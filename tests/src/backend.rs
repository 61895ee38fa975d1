//! Servers behind nagaya that do exactly what a test says, also what no server should do. Plain threads.
//!
//! Not here: programs that nagaya starts itself; those are files the tests write.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Longest silence of the node before a server's thread gives up.
const PATIENCE: Duration = Duration::from_secs(30);

/// A server on a loopback port of its own.
#[derive(Debug)]
pub struct Backend {
    pub address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    connections: AtomicUsize,
    received: Mutex<Vec<u8>>,
    ended: AtomicBool,
}

impl Backend {
    /// Calls `script` for each connection, on a thread of its own.
    pub fn start(script: impl Fn(&mut Peer) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a loopback port");
        let address = listener.local_addr().expect("a bound socket has an address");
        let shared = Arc::new(Shared::default());
        let theirs = Arc::clone(&shared);
        let script = Arc::new(script);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if theirs.ended.load(Ordering::Relaxed) {
                    return;
                }
                let Ok(stream) = stream else { continue };
                theirs.connections.fetch_add(1, Ordering::Relaxed);
                let shared = Arc::clone(&theirs);
                let script = Arc::clone(&script);
                std::thread::spawn(move || {
                    // Without them a thread could wait for ever; a test that needs longer is wrong.
                    let _ = stream.set_read_timeout(Some(PATIENCE));
                    let _ = stream.set_nodelay(true);
                    script(&mut Peer { stream, input: Vec::new(), shared });
                });
            }
        });
        Self { address, shared }
    }

    /// Answers every request of every connection by `answer`, until it says that the connection ends.
    pub fn answering(answer: impl Fn(&mut Peer, &Request) -> bool + Send + Sync + 'static) -> Self {
        Self::start(move |peer| {
            while let Some(request) = peer.request() {
                if !answer(peer, &request) {
                    return;
                }
            }
        })
    }

    /// Connections accepted so far.
    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::Relaxed)
    }

    /// Everything that was ever received, in order of arrival.
    pub fn received(&self) -> String {
        let bytes = self.shared.received.lock().expect("no server thread panics while it holds this");
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Relaxed);
        // Wakes the thread that waits for the next connection.
        let _ = TcpStream::connect(self.address);
    }
}

/// The node's end of one connection.
#[derive(Debug)]
pub struct Peer {
    stream: TcpStream,
    input: Vec<u8>,
    shared: Arc<Shared>,
}

/// A request as it arrived.
#[derive(Debug, Clone)]
pub struct Request {
    /// With the empty line at its end.
    pub head: String,
    pub body: Vec<u8>,
}

impl Request {
    pub fn method(&self) -> &str {
        self.head.split(' ').next().unwrap_or_default()
    }

    pub fn target(&self) -> &str {
        self.head.split(' ').nth(1).unwrap_or_default()
    }

    /// The values of a field, joined as lists are.
    pub fn field(&self, name: &str) -> Option<String> {
        let lines = self.head.lines().filter_map(|line| line.split_once(':'));
        let values: Vec<_> = lines
            .filter(|(known, _)| known.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.trim())
            .collect();
        (!values.is_empty()).then(|| values.join(", "))
    }
}

impl Peer {
    /// The next request with its whole body. `None` when the node has closed the connection.
    pub fn request(&mut self) -> Option<Request> {
        let head = self.head()?;
        let body = match (head.field("content-length"), head.field("transfer-encoding")) {
            (Some(length), _) => self.take(length.parse().ok()?)?,
            (None, Some(_)) => self.chunked()?,
            (None, None) => Vec::new(),
        };
        Some(Request { body, ..head })
    }

    /// The head of the next request; what follows is left unread.
    pub fn head(&mut self) -> Option<Request> {
        loop {
            if let Some(end) = self.input.windows(4).position(|four| four == b"\r\n\r\n") {
                let head = self.input.drain(..end + 4).collect::<Vec<_>>();
                return Some(Request { head: String::from_utf8_lossy(&head).into_owned(), body: Vec::new() });
            }
            self.fill()?;
        }
    }

    /// Bytes of an upgraded connection: at least one, unless it has ended.
    pub fn some_bytes(&mut self) -> Option<Vec<u8>> {
        if self.input.is_empty() {
            self.fill()?;
        }
        Some(std::mem::take(&mut self.input))
    }

    /// False if the node takes no more.
    pub fn send(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        self.stream.write_all(bytes.as_ref()).is_ok()
    }

    /// A complete answer with a length.
    pub fn answer(&mut self, status: &str, body: &str) -> bool {
        self.send(format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n{body}", body.len()))
    }

    /// Sends a byte at a time, slowly.
    pub fn trickle(&mut self, bytes: &[u8], pause: Duration) -> bool {
        bytes.iter().all(|byte| {
            std::thread::sleep(pause);
            self.send([*byte])
        })
    }

    /// Waits until the node closes the connection.
    pub fn wait_for_end(&mut self) {
        while self.fill().is_some() {}
    }

    /// Says that it sends no more, and goes on reading.
    pub fn finish(&mut self) {
        // It may be closed already.
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    pub fn close(&mut self) {
        // It may be closed already.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    fn fill(&mut self) -> Option<()> {
        let mut buffer = [0; 64 << 10];
        let read = loop {
            match self.stream.read(&mut buffer) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                other => break other.ok().filter(|read| *read > 0)?,
            }
        };
        self.input.extend_from_slice(&buffer[..read]);
        self.shared.received.lock().ok()?.extend_from_slice(&buffer[..read]);
        Some(())
    }

    fn take(&mut self, count: usize) -> Option<Vec<u8>> {
        while self.input.len() < count {
            self.fill()?;
        }
        Some(self.input.drain(..count).collect())
    }

    fn line(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.input.windows(2).position(|pair| pair == b"\r\n") {
                let line = self.input.drain(..end + 2).collect::<Vec<_>>();
                return Some(String::from_utf8_lossy(&line).trim_end().to_owned());
            }
            self.fill()?;
        }
    }

    fn chunked(&mut self) -> Option<Vec<u8>> {
        let mut body = Vec::new();
        loop {
            let length = usize::from_str_radix(&self.line()?, 16).ok()?;
            if length == 0 {
                while !self.line()?.is_empty() {}
                return Some(body);
            }
            body.extend(self.take(length)?);
            self.line()?;
        }
    }
}
