//! Keeps connections to applications open between requests. There is one pool per edge thread.
//!
//! Not here: the data on them (`transfer`).

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::hash::{Hash, Hasher};
use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::BytesMut;
use foldhash::quality::RandomState;
use nagaya_keeper_api::protocol::InstanceId;
use nagaya_keeper_api::quiet_stream::QuietStream;
use nagaya_records::record::Http;
use nagaya_records::{Site, SiteName};
use rustix::net::AddressFamily;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

use crate::backends::cell_lease::RequestCell;
use crate::backends::upstream::transfer::UpstreamTransfer;
use crate::http::refusal::Refusal;
use crate::idle_timer::IdleTimer;
use crate::metrics::{EdgeMetrics, UpstreamConnection};

/// Maximum number of idle connections per address. `IDLE_MAX` is the maximum in total. Beyond it
/// a finished connection is closed.
const IDLE_PER_ADDRESS_MAX: usize = 128;
const IDLE_MAX: usize = 2048;

/// Maximum age of an idle connection that is used again. It is below the keep-alive of the common
/// servers. Apache's 5 s is the exception: there the check for a closed connection decides.
const IDLE_AGE_MAX: Duration = Duration::from_secs(30);

/// Address of an application.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum UpstreamAddress {
    /// `host:port`. Names are resolved at connect time.
    Tcp(Box<str>),
    /// The keeper makes the connection: this process cannot name the socket.
    Unix(ServerSocket),
    /// The keeper makes the connection, while this thread uses the instance.
    Instance(InstanceId),
}

impl UpstreamAddress {
    /// Parses the form of the site's record: `host:port`, `[v6]:port` or `unix:/path`.
    pub fn of(site: &Arc<Site>, http: &Http) -> Self {
        match http.address.starts_with("unix:") {
            true => Self::Unix(ServerSocket(Arc::clone(site))),
            false => Self::Tcp(http.address.as_str().into()),
        }
    }
}

/// The Unix socket of a site's server. It is a different one once the record of its site changes.
#[derive(Debug, Clone)]
pub struct ServerSocket(Arc<Site>);

impl ServerSocket {
    pub fn site(&self) -> &SiteName {
        &self.0.name
    }
}

impl PartialEq for ServerSocket {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || (self.0.name == other.0.name && self.0.backend == other.0.backend)
    }
}

impl Eq for ServerSocket {}

impl Hash for ServerSocket {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.name.hash(state);
    }
}

/// Makes new connections.
pub trait Connector {
    fn connect(&self, address: &UpstreamAddress) -> impl Future<Output = Result<UpstreamSocket, Refusal>>;

    /// Returns the request cell for the request that is about to use this connection. It is held
    /// until its answer has ended.
    fn seat(
        &self,
        _address: &UpstreamAddress,
        _socket: &UpstreamSocket,
    ) -> impl Future<Output = Option<RequestCell>> {
        std::future::ready(None)
    }
}

/// Connects to `host:port`.
pub async fn dial(address: &str) -> io::Result<UpstreamSocket> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    Ok(UpstreamSocket::Tcp(stream))
}

/// Registers a connection of the keeper, Unix or TCP, with this thread's runtime.
pub fn watch_socket(socket: OwnedFd) -> io::Result<UpstreamSocket> {
    if rustix::net::sockopt::socket_domain(&socket)? == AddressFamily::UNIX {
        return QuietStream::new(socket).map(UpstreamSocket::Unix);
    }
    let stream = std::net::TcpStream::from(socket);
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    TcpStream::from_std(stream).map(UpstreamSocket::Tcp)
}

/// Reason why there is no connection.
#[derive(Debug)]
pub enum NoConnection {
    Refused(Refusal),
    /// There was no reply for this time.
    Silent(Duration),
}

impl From<NoConnection> for Refusal {
    fn from(failure: NoConnection) -> Self {
        match failure {
            NoConnection::Refused(refusal) => refusal,
            NoConnection::Silent(limit) => {
                Self::BackendUnreachable(format!("no connection within {} ms", limit.as_millis()))
            }
        }
    }
}

pub enum UpstreamSocket {
    Tcp(TcpStream),
    Unix(QuietStream),
}

/// A connection, and the buffers it keeps from one exchange to the next.
pub struct PooledConnection {
    pub socket: UpstreamSocket,
    /// Bytes that were read and not yet used.
    pub input: BytesMut,
    /// Bytes that were encoded and not yet accepted by the application.
    pub output: BytesMut,
    pub silence: IdleTimer,
}

impl PooledConnection {
    /// Returns whether it is silent and open, as far as can be seen without waiting.
    fn is_fresh(&self) -> bool {
        let mut byte = [0; 1];
        let read = match &self.socket {
            UpstreamSocket::Tcp(stream) => stream.try_read(&mut byte),
            UpstreamSocket::Unix(stream) => stream.try_read(&mut byte),
        };
        // Unexpected data, or its end, makes it useless.
        self.input.is_empty() && matches!(read, Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }
}

struct IdleConnection {
    connection: PooledConnection,
    since: Instant,
}

/// Keeps idle connections, newest first.
pub struct UpstreamPool {
    idle: RefCell<HashMap<UpstreamAddress, Vec<IdleConnection>, RandomState>>,
    count: Cell<usize>,
    metrics: Arc<EdgeMetrics>,
}

impl UpstreamPool {
    pub fn new(metrics: Arc<EdgeMetrics>) -> Self {
        Self { idle: RefCell::default(), count: Cell::new(0), metrics }
    }

    /// Returns a connection to `address`, and whether it was used before. `fresh` asks for a new
    /// one.
    pub async fn checkout(
        &self,
        address: &UpstreamAddress,
        connector: &impl Connector,
        limit: Duration,
        fresh: bool,
    ) -> Result<(PooledConnection, bool), NoConnection> {
        if !fresh && let Some(connection) = self.take_idle(address) {
            self.metrics.upstream_connection(UpstreamConnection::Reused);
            return Ok((connection, true));
        }
        let connection = PooledConnection {
            socket: self.open(address, connector, limit).await?,
            input: BytesMut::new(),
            output: BytesMut::new(),
            silence: IdleTimer::new(limit),
        };
        Ok((connection, false))
    }

    /// Returns a new connection, for one exchange.
    pub async fn open(
        &self,
        address: &UpstreamAddress,
        connector: &impl Connector,
        limit: Duration,
    ) -> Result<UpstreamSocket, NoConnection> {
        let connected = match timeout(limit, connector.connect(address)).await {
            Ok(connected) => connected.map_err(NoConnection::Refused),
            Err(_) => Err(NoConnection::Silent(limit)),
        };
        let how = if connected.is_ok() { UpstreamConnection::Opened } else { UpstreamConnection::Failed };
        self.metrics.upstream_connection(how);
        connected
    }

    fn take_idle(&self, address: &UpstreamAddress) -> Option<PooledConnection> {
        let mut idle = self.idle.borrow_mut();
        let list = idle.get_mut(address)?;
        while let Some(candidate) = list.pop() {
            self.count.set(self.count.get() - 1);
            if candidate.since.elapsed() < IDLE_AGE_MAX && candidate.connection.is_fresh() {
                return Some(candidate.connection);
            }
        }
        None
    }

    /// Keeps the connection of a finished transfer if it can be used again, once its request has
    /// left its cell.
    pub fn give_back(self: &Rc<Self>, address: &UpstreamAddress, mut transfer: UpstreamTransfer) {
        let seat = transfer.take_seat();
        let Some(connection) = transfer.into_reusable() else { return };
        match seat {
            None => self.keep(address, connection),
            Some(seat) => {
                let (pool, address) = (Rc::clone(self), address.clone());
                seat.leave(move || pool.keep(&address, connection));
            }
        }
    }

    fn keep(&self, address: &UpstreamAddress, connection: PooledConnection) {
        let mut idle = self.idle.borrow_mut();
        if self.count.get() >= IDLE_MAX {
            idle.clear();
            self.count.set(0);
        }
        let list = match idle.get_mut(address) {
            Some(list) => list,
            None => idle.entry(address.clone()).or_default(),
        };
        if list.len() < IDLE_PER_ADDRESS_MAX {
            list.push(IdleConnection { connection, since: Instant::now() });
            self.count.set(self.count.get() + 1);
        }
    }

    /// Closes the idle connections to this address.
    pub fn forget(&self, address: &UpstreamAddress) {
        if let Some(list) = self.idle.borrow_mut().remove(address) {
            self.count.set(self.count.get() - list.len());
        }
    }

    /// Closes connections that were idle too long. Call it periodically.
    pub fn sweep(&self) {
        let mut count = 0;
        self.idle.borrow_mut().retain(|_, list| {
            list.retain(|idle| idle.since.elapsed() < IDLE_AGE_MAX);
            count += list.len();
            !list.is_empty()
        });
        self.count.set(count);
    }

    pub fn count_retry(&self) {
        self.metrics.upstream_retries.inc();
    }
}

impl AsyncRead for UpstreamSocket {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_read(cx, buf),
            Self::Unix(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for UpstreamSocket {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_write(cx, bytes),
            Self::Unix(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_flush(cx),
            Self::Unix(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Unix(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
