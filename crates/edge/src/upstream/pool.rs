//! Connections to applications, kept open between requests. One pool per edge thread.
//!
//! Not here: what is said over them (`transfer`).

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
use nagaya_cmdb::record::Http;
use nagaya_cmdb::{Site, SiteName};
use nagaya_keeper::protocol::InstanceId;
use rustix::net::AddressFamily;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::{Instant, timeout};

use super::transfer::Transfer;
use crate::metrics::{Metrics, UpstreamConnection};
use crate::refusal::Refusal;
use crate::seat::Seat;
use crate::silence::Silence;

/// Idle connections kept per address, and in all. Beyond it a finished connection is closed.
const IDLE_PER_ADDRESS_MAX: usize = 128;
const IDLE_MAX: usize = 2048;

/// An idle connection older than this is not used again. Below the keep-alive of the common servers
/// (Apache 5 s is the exception: there the check for a closed connection decides).
const IDLE_AGE_MAX: Duration = Duration::from_secs(30);

/// Where an application listens.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Address {
    /// `host:port`; names are resolved at connect time.
    Tcp(Box<str>),
    /// The keeper makes the connection: this process cannot name the socket.
    Unix(ServerSocket),
    /// The keeper makes the connection, for as long as this thread uses the instance.
    Instance(InstanceId),
}

impl Address {
    /// As in the site's record: `host:port`, `[v6]:port` or `unix:/path`.
    pub fn of(site: &Arc<Site>, http: &Http) -> Self {
        match http.address.starts_with("unix:") {
            true => Self::Unix(ServerSocket(Arc::clone(site))),
            false => Self::Tcp(http.address.as_str().into()),
        }
    }
}

/// The Unix socket of a site's server. It is another one once the record of its site says something else.
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
    fn connect(&self, address: &Address) -> impl Future<Output = Result<Socket, Refusal>>;

    /// What the request that is about to go over this connection holds until its answer has ended.
    fn seat(&self, _address: &Address, _socket: &Socket) -> impl Future<Output = Option<Seat>> {
        std::future::ready(None)
    }
}

/// Connects to what already listens at `host:port`.
pub async fn dial(address: &str) -> io::Result<Socket> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    Ok(Socket::Tcp(stream))
}

/// A connection that the keeper has made, Unix or TCP, as this thread's runtime watches it.
pub fn watch_socket(socket: OwnedFd) -> io::Result<Socket> {
    if rustix::net::sockopt::socket_domain(&socket)? == AddressFamily::UNIX {
        let stream = std::os::unix::net::UnixStream::from(socket);
        stream.set_nonblocking(true)?;
        return UnixStream::from_std(stream).map(Socket::Unix);
    }
    let stream = std::net::TcpStream::from(socket);
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    TcpStream::from_std(stream).map(Socket::Tcp)
}

/// Why there is no connection.
#[derive(Debug)]
pub enum NoConnection {
    Refused(Refusal),
    /// Nothing happened for so long.
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

pub enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// A connection, and what it keeps from one exchange to the next so that none needs to make it.
pub struct Connection {
    pub socket: Socket,
    /// Read and not yet used.
    pub input: BytesMut,
    /// Encoded and not yet taken by the application.
    pub output: BytesMut,
    pub silence: Silence,
}

impl Connection {
    /// Silent and open, so far as can be seen without waiting.
    fn is_fresh(&self) -> bool {
        let mut byte = [0; 1];
        let read = match &self.socket {
            Socket::Tcp(stream) => stream.try_read(&mut byte),
            Socket::Unix(stream) => stream.try_read(&mut byte),
        };
        // Anything it says unasked, or its end, makes it useless.
        self.input.is_empty() && matches!(read, Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }
}

struct Idle {
    connection: Connection,
    since: Instant,
}

/// Keeps idle connections, newest first.
pub struct Pool {
    idle: RefCell<HashMap<Address, Vec<Idle>>>,
    count: Cell<usize>,
    metrics: Arc<Metrics>,
}

impl Pool {
    pub fn new(metrics: Arc<Metrics>) -> Self {
        Self { idle: RefCell::default(), count: Cell::new(0), metrics }
    }

    /// A connection to `address`, and whether it has served before. `fresh` asks for a new one.
    pub async fn checkout(
        &self,
        address: &Address,
        connector: &impl Connector,
        limit: Duration,
        fresh: bool,
    ) -> Result<(Connection, bool), NoConnection> {
        if !fresh && let Some(connection) = self.take_idle(address) {
            self.metrics.upstream_connection(UpstreamConnection::Reused);
            return Ok((connection, true));
        }
        let connection = Connection {
            socket: self.open(address, connector, limit).await?,
            input: BytesMut::new(),
            output: BytesMut::new(),
            silence: Silence::new(limit),
        };
        Ok((connection, false))
    }

    /// A new connection, for one exchange.
    pub async fn open(
        &self,
        address: &Address,
        connector: &impl Connector,
        limit: Duration,
    ) -> Result<Socket, NoConnection> {
        let connected = match timeout(limit, connector.connect(address)).await {
            Ok(connected) => connected.map_err(NoConnection::Refused),
            Err(_) => Err(NoConnection::Silent(limit)),
        };
        let how = if connected.is_ok() { UpstreamConnection::Opened } else { UpstreamConnection::Failed };
        self.metrics.upstream_connection(how);
        connected
    }

    fn take_idle(&self, address: &Address) -> Option<Connection> {
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

    /// Keeps the connection of a finished transfer, if it can be used again: once its request has left its seat.
    pub fn give_back(self: &Rc<Self>, address: &Address, mut transfer: Transfer) {
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

    fn keep(&self, address: &Address, connection: Connection) {
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
            list.push(Idle { connection, since: Instant::now() });
            self.count.set(self.count.get() + 1);
        }
    }

    /// Closes the idle connections to this address.
    pub fn forget(&self, address: &Address) {
        if let Some(list) = self.idle.borrow_mut().remove(address) {
            self.count.set(self.count.get() - list.len());
        }
    }

    /// Closes what has been idle too long. To be called now and then.
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

impl AsyncRead for Socket {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_read(cx, buf),
            Self::Unix(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Socket {
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
