//! Holds one thread's connections to other nodes: HTTP/2 over mutually authenticated TLS. Each is
//! shared by as many requests as it has streams. A few more are made when those are used up. Idle
//! ones are closed.
//!
//! Not here: one request on its way (`peer_exchange`), the certificates (`credentials`), whether a
//! node is there (`watch`).

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use foldhash::fast::RandomState;
use h2::client::{Builder, SendRequest};
use nagaya_placement::liveness::ProbeResult;
use nagaya_records::{NodeName, NodeRecord};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::task::{AbortHandle, spawn_local};
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsConnector;

use crate::cluster::member::LocalMember;
use crate::cluster::membership::EdgeCluster;
use crate::cluster::peers::credentials::{ALPN, server_name};
use crate::cluster::peers::stalled_responses::StalledResponses;
use crate::cluster::peers::watch::PeerWatch;

/// Maximum number of requests at once on one connection. With `CONNECTION_WINDOW_BYTES`, a body
/// that is not read blocks no other one.
pub const STREAMS_MAX: usize = 128;

/// Maximum number of connections of one thread to one node: 1,024 requests at once. Beyond that,
/// requests wait for a stream.
const CONNECTIONS_MAX: usize = 8;

/// Maximum response body bytes under way before they are read, for one stream.
/// `CONNECTION_WINDOW_BYTES` is the limit for a connection.
pub const STREAM_WINDOW_BYTES: u32 = 256 << 10;
pub const CONNECTION_WINDOW_BYTES: u32 = STREAM_WINDOW_BYTES * STREAMS_MAX as u32;

/// Maximum size of a response's fields, decoded: more than an application's may have.
const HEAD_BYTES: u32 = 256 << 10;

/// Maximum request body bytes that wait for the other node, per stream.
const SEND_BUFFER_BYTES: usize = 64 << 10;

/// Maximum time for a connection with its handshake. A node that does not accept one is found
/// silent long before.
const CONNECT_MAX: Duration = Duration::from_secs(3);

/// Time without a request after which a connection is closed. It is below `acceptor::IDLE`, so
/// that the requesting side closes first.
pub const IDLE_MAX: Duration = Duration::from_secs(60);

/// Time of silence after which a connection with waiting requests gets a PING. `PING_PATIENCE` is
/// the time for its answer. The probe finds out sooner whether the node is alive. This ends
/// connections, not waits.
const PING_EVERY: Duration = Duration::from_secs(5);
const PING_PATIENCE: Duration = Duration::from_secs(10);

/// Reason why there is no connection to a node.
#[derive(Debug, Clone, thiserror::Error)]
pub enum NoPeer {
    #[error("this node is not in a cluster any more")]
    Alone,
    #[error("its address '{0}' is not valid")]
    Address(String),
    #[error("it refuses connections: {0}")]
    Refused(String),
    #[error("it cannot be connected to: {0}")]
    Network(String),
    /// Most likely its edge ended meanwhile: a listening socket may outlive its process.
    #[error("the connection broke while it was made: {0}")]
    Broken(String),
    #[error("the connection is not trusted: {0}")]
    Tls(String),
    #[error("its HTTP/2 is broken: {0}")]
    Protocol(String),
    #[error("no connection within {} s", CONNECT_MAX.as_secs())]
    Late,
}

/// Connections of one thread.
pub struct PeerPool {
    cluster: Arc<EdgeCluster>,
    nodes: RefCell<HashMap<NodeName, Rc<PeerNode>, RandomState>>,
    /// The member whose credentials the connections use.
    member: RefCell<Option<Arc<LocalMember>>>,
}

/// Connections to one node as its record describes it.
struct PeerNode {
    cluster: Arc<EdgeCluster>,
    record: Arc<NodeRecord>,
    links: RefCell<Vec<Rc<PeerLink>>>,
    /// A connection is being made.
    connecting: Cell<bool>,
    failed: RefCell<Option<NoPeer>>,
    /// It is no longer in the pool, and nobody would close its connections.
    is_retired: Cell<bool>,
    /// A stream has become free, a connection was made, or making one has failed.
    changed: Notify,
    watch: PeerWatch,
    lulls: Rc<StalledResponses>,
}

/// One connection.
struct PeerLink {
    send: SendRequest<Bytes>,
    streams: Cell<usize>,
    idle_since: Cell<Instant>,
    is_over: Cell<bool>,
    task: RefCell<Option<AbortHandle>>,
    _counted: CountedLink,
}

/// A connection, in the count of all threads.
struct CountedLink {
    cluster: Arc<EdgeCluster>,
    node: NodeName,
}

impl CountedLink {
    fn new(cluster: &Arc<EdgeCluster>, node: &NodeName) -> Self {
        cluster.peers.tallies.connected(node, 1);
        Self { cluster: Arc::clone(cluster), node: node.clone() }
    }
}

impl Drop for CountedLink {
    fn drop(&mut self) {
        self.cluster.peers.tallies.connected(&self.node, -1);
    }
}

/// A stream for one request on a connection. It is given back when it is dropped.
pub struct StreamSlot {
    node: Rc<PeerNode>,
    link: Rc<PeerLink>,
}

impl PeerPool {
    pub fn new(cluster: Arc<EdgeCluster>) -> Self {
        Self { cluster, nodes: RefCell::default(), member: RefCell::default() }
    }

    /// Returns a stream to this node. Also returns the time for making the connection, if one had
    /// to be made.
    pub async fn seat(&self, record: &Arc<NodeRecord>) -> Result<(StreamSlot, Option<Duration>), NoPeer> {
        let member = self.cluster.member().ok_or(NoPeer::Alone)?;
        self.renew(&member);
        let begun = Instant::now();
        let mut waited = false;
        loop {
            let node = self.node(record);
            if let Some(seat) = PeerNode::take(&node) {
                return Ok((seat, waited.then(|| begun.elapsed())));
            }
            waited = true;
            let changed = node.changed.notified();
            let may_grow = node.links.borrow().len() < CONNECTIONS_MAX;
            if may_grow && !node.connecting.replace(true) {
                node.failed.take();
                spawn_local(Rc::clone(&node).connect(Arc::clone(&member)));
            }
            changed.await;
            // A request that waited for a failed connection gets the error. One that waits for a
            // stream waits on.
            if let (Some(error), true) = (&*node.failed.borrow(), node.links.borrow().is_empty()) {
                return Err(error.clone());
            }
        }
    }

    /// Completes with a finding against the node: it refuses, or it is silent.
    pub async fn against(&self, record: &Arc<NodeRecord>) -> ProbeResult {
        let node = self.node(record);
        node.watch.against(&self.cluster, record).await
    }

    /// Records that a response has begun. `against` continues for the rest of it.
    pub fn began(&self, record: &Arc<NodeRecord>) {
        self.node(record).watch.renew();
    }

    /// Retires the connections of earlier credentials: they take no new requests.
    fn renew(&self, member: &Arc<LocalMember>) {
        let mut known = self.member.borrow_mut();
        if known.as_ref().is_some_and(|known| Arc::ptr_eq(known, member)) {
            return;
        }
        *known = Some(Arc::clone(member));
        for (_, node) in self.nodes.borrow_mut().drain() {
            node.retire();
        }
    }

    fn node(&self, record: &Arc<NodeRecord>) -> Rc<PeerNode> {
        let mut nodes = self.nodes.borrow_mut();
        if let Some(node) = nodes.get(&record.name) {
            if node.record.peer == record.peer && node.record.id == record.id {
                return Rc::clone(node);
            }
            node.retire();
        }
        let node = Rc::new(PeerNode {
            cluster: Arc::clone(&self.cluster),
            record: Arc::clone(record),
            links: RefCell::default(),
            connecting: Cell::new(false),
            failed: RefCell::default(),
            is_retired: Cell::new(false),
            changed: Notify::new(),
            watch: PeerWatch::default(),
            lulls: Rc::default(),
        });
        nodes.insert(record.name.clone(), Rc::clone(&node));
        node
    }

    /// Drops the connections of a node that was found silent. No request uses or awaits one.
    pub fn forget(&self, name: &NodeName) {
        if let Some(node) = self.nodes.borrow_mut().remove(name) {
            node.retire();
        }
    }

    /// Closes connections that were idle too long. Call it periodically.
    pub fn sweep(&self) {
        self.nodes.borrow_mut().retain(|_, node| {
            node.links.borrow_mut().retain(|link| {
                let is_idle = link.streams.get() == 0 && link.idle_since.get().elapsed() >= IDLE_MAX;
                if is_idle {
                    link.close();
                }
                !is_idle && !link.is_over.get()
            });
            node.connecting.get() || !node.links.borrow().is_empty()
        });
    }
}

impl PeerNode {
    /// Returns a stream on the connection with the fewest requests.
    fn take(node: &Rc<Self>) -> Option<StreamSlot> {
        let mut links = node.links.borrow_mut();
        links.retain(|link| !link.is_over.get());
        let link = links.iter().min_by_key(|link| link.streams.get())?;
        // The other node may allow fewer.
        let max = STREAMS_MAX.min(link.send.current_max_send_streams());
        if link.streams.get() >= max {
            return None;
        }
        link.streams.set(link.streams.get() + 1);
        Some(StreamSlot { node: Rc::clone(node), link: Rc::clone(link) })
    }

    async fn connect(self: Rc<Self>, member: Arc<LocalMember>) {
        let made = timeout(CONNECT_MAX, open(&self.record, &member)).await.unwrap_or(Err(NoPeer::Late));
        self.connecting.set(false);
        match made {
            Ok(_closed_by_being_dropped) if self.is_retired.get() => {}
            Ok((send, connection)) => {
                let link = Rc::new(PeerLink {
                    send,
                    streams: Cell::new(0),
                    idle_since: Cell::new(Instant::now()),
                    is_over: Cell::new(false),
                    task: RefCell::default(),
                    _counted: CountedLink::new(&self.cluster, &self.record.name),
                });
                let task = spawn_local(Rc::clone(&link).run(connection, Rc::clone(&self)));
                *link.task.borrow_mut() = Some(task.abort_handle());
                self.links.borrow_mut().push(link);
            }
            Err(error) => *self.failed.borrow_mut() = Some(error),
        }
        self.changed.notify_waiters();
    }

    /// Stops new requests. Those on their way continue.
    fn retire(&self) {
        self.is_retired.set(true);
        for link in self.links.borrow_mut().drain(..) {
            link.is_over.set(true);
            if link.streams.get() == 0 {
                link.close();
            }
        }
        self.changed.notify_waiters();
    }
}

impl PeerLink {
    /// Moves the bytes of the connection until it ends.
    async fn run(self: Rc<Self>, mut connection: PeerH2Connection, node: Rc<PeerNode>) {
        let pings = connection.ping_pong();
        let alive = async {
            match pings {
                Some(pings) => self.until_dead(pings).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            ended = &mut connection => {
                if let Err(error) = ended {
                    tracing::debug!(node = %node.record.name, %error, "a connection to another node broke");
                }
            }
            () = alive => {
                tracing::debug!(node = %node.record.name, "a connection to another node was given up: it does not answer pings");
            }
        }
        self.is_over.set(true);
        node.links.borrow_mut().retain(|link| !Rc::ptr_eq(link, &self));
        node.changed.notify_waiters();
    }

    /// Completes when requests wait and the other side does not answer a ping.
    async fn until_dead(&self, mut pings: h2::PingPong) {
        loop {
            tokio::time::sleep(PING_EVERY).await;
            if self.streams.get() == 0 {
                continue;
            }
            if !matches!(timeout(PING_PATIENCE, pings.ping(h2::Ping::opaque())).await, Ok(Ok(_))) {
                return;
            }
        }
    }

    fn close(&self) {
        self.is_over.set(true);
        if let Some(task) = self.task.take() {
            task.abort();
        }
    }
}

impl StreamSlot {
    pub fn sender(&self) -> SendRequest<Bytes> {
        self.link.send.clone()
    }

    /// Waits while a response on it pauses. Completes when its node is lost: see
    /// [`StalledResponses::lost`].
    pub fn lost(&self) -> impl Future<Output = ()> + use<> {
        let node = Rc::clone(&self.node);
        async move { node.lulls.lost(&node.cluster, &node.record).await }
    }

    /// Marks that the other side takes no more requests on this connection.
    pub fn spoil(&self) {
        self.link.is_over.set(true);
    }
}

impl Drop for StreamSlot {
    fn drop(&mut self) {
        self.link.streams.set(self.link.streams.get() - 1);
        self.link.idle_since.set(Instant::now());
        if self.link.is_over.get() && self.link.streams.get() == 0 {
            self.link.close();
        }
        self.node.changed.notify_one();
    }
}

type PeerH2Connection = h2::client::Connection<tokio_rustls::client::TlsStream<TcpStream>, Bytes>;

async fn open(
    record: &NodeRecord,
    member: &LocalMember,
) -> Result<(SendRequest<Bytes>, PeerH2Connection), NoPeer> {
    let address: SocketAddr = record.peer.parse().map_err(|_| NoPeer::Address(record.peer.clone()))?;
    let name =
        server_name(&record.name).ok_or_else(|| NoPeer::Tls("its name can be in no certificate".into()))?;
    let stream = TcpStream::connect(address).await.map_err(|error| match error.kind() {
        io::ErrorKind::ConnectionRefused => NoPeer::Refused(error.to_string()),
        _ => NoPeer::Network(error.to_string()),
    })?;
    let _ = stream.set_nodelay(true);
    let connector = TlsConnector::from(Arc::clone(&member.credentials.client));
    let stream = connector.connect(name, stream).await.map_err(|error| match is_break(&error) {
        true => NoPeer::Broken(error.to_string()),
        false => NoPeer::Tls(error.to_string()),
    })?;
    if stream.get_ref().1.alpn_protocol() != Some(ALPN) {
        return Err(NoPeer::Tls("it does not speak h2".into()));
    }
    Builder::new()
        .enable_push(false)
        .initial_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_header_list_size(HEAD_BYTES)
        .max_send_buffer_size(SEND_BUFFER_BYTES)
        .initial_max_send_streams(STREAMS_MAX)
        .handshake(stream)
        .await
        .map_err(|error| match error.get_io().is_some_and(is_break) {
            true => NoPeer::Broken(error.to_string()),
            false => NoPeer::Protocol(error.to_string()),
        })
}

/// Returns whether the connection broke by itself, and not because of its data.
fn is_break(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof)
}
