//! Accepts connections of other nodes, authenticates them, and serves each request as if its
//! client had come here.
//!
//! Only members get a connection. It needs TLS 1.3 and a certificate of the cluster's authority,
//! for the name of a node in the records. It uses the same HTTP/2 code as a client's connection.
//! Not here: whether a request is to be served here (`placement`), our own connections to other
//! nodes (`pool`).

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use nagaya_base::{Code, RequestId};
use nagaya_keeper_api::client::KeeperClient;
use nagaya_records::NodeName;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::spawn_local;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;

use crate::cluster::member::LocalMember;
use crate::cluster::membership::EdgeCluster;
use crate::cluster::peers::credentials::{ALPN, node_of};
use crate::cluster::peers::images::ImageRequest;
use crate::cluster::peers::images::give::give;
use crate::cluster::peers::pool::{CONNECTION_WINDOW_BYTES, STREAM_WINDOW_BYTES, STREAMS_MAX};
use crate::cluster::peers::splice;
use crate::http::connections::{ConnectionGuard, OpenConnections};
use crate::http::handler::ConnectionHost;
use crate::http::message::{ConnInfo, Request, RequestBody, RequestHead, Response};
use crate::http::refusal::Refusal;
use crate::http::{h2, peer_fields};
use crate::metrics::EdgeMetrics;
use crate::options::{EdgeLimits, PaceOptions};

/// Maximum number of other nodes' connections, per thread: a hundred nodes of eight threads with
/// a few connections each. Beyond it a new one is closed, and the other node uses its existing
/// ones.
const CONNECTIONS_MAX: usize = 4096;

/// Maximum time of a handshake.
const HANDSHAKE_MAX: Duration = Duration::from_secs(3);

/// Maximum time for which a refused connection is read, so that the other side learns the reason.
/// `LINGER_BYTES` is the maximum length.
const LINGER_MAX: Duration = Duration::from_secs(1);
const LINGER_BYTES: u64 = 64 << 10;

/// Time without a request after which a connection is closed. The requesting side closes it
/// sooner.
const IDLE: Duration = Duration::from_secs(300);

/// Maximum time in which neither a body nor a response moves. The forwarding node has shorter
/// limits of its own against slow clients. An upgraded connection may be silent for this time.
const SILENCE_MAX: Duration = Duration::from_secs(3600);

/// Bytes and header fields that forwarding adds to a client's request.
const EXTRA_BYTES: usize = 8 << 10;
const EXTRA_FIELDS: usize = 24;

/// Pause of accepting when no descriptor is left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Interval at which a peer that is not trusted is reported.
const REPORT_EVERY: Duration = Duration::from_secs(60);

const CODE_UNTRUSTED: Code = Code(466);

/// One thread's end for other nodes. `host` serves the requests they forward.
pub struct PeerAcceptor<H> {
    cluster: Arc<EdgeCluster>,
    metrics: Arc<EdgeMetrics>,
    host: Rc<H>,
    keeper: Rc<KeeperClient>,
    /// Connections made with the present credentials, and their owner.
    current: RefCell<(Option<Arc<LocalMember>>, Rc<OpenConnections>)>,
    open: Cell<usize>,
    reported: Cell<Option<Instant>>,
}

/// Reason why a connection is not served.
#[derive(Debug, thiserror::Error)]
enum UntrustedPeer {
    #[error("the handshake failed: {0}")]
    Handshake(#[from] std::io::Error),
    #[error("its certificate is not for the name of one node")]
    Nameless,
    #[error("it says to be '{0}', which is not a member")]
    NoMember(NodeName),
    #[error("it does not speak h2")]
    Protocol,
}

impl<H: ConnectionHost> PeerAcceptor<H> {
    pub fn new(
        cluster: Arc<EdgeCluster>,
        metrics: Arc<EdgeMetrics>,
        host: Rc<H>,
        keeper: Rc<KeeperClient>,
    ) -> Rc<Self> {
        Rc::new(Self {
            cluster,
            metrics,
            host,
            keeper,
            current: RefCell::default(),
            open: Cell::new(0),
            reported: Cell::new(None),
        })
    }

    /// Accepts until it is dropped.
    pub async fn run(self: Rc<Self>, listener: TcpListener) {
        loop {
            match listener.accept().await {
                Ok((stream, from)) => {
                    let Some((member, connections)) = self.member() else { continue };
                    if self.open.get() >= CONNECTIONS_MAX {
                        continue;
                    }
                    spawn_local(Rc::clone(&self).connection(stream, from, member, connections));
                }
                Err(error) => {
                    tracing::warn!(code = "NGY0422", %error, "accepting other nodes pauses");
                    sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    /// Returns this node's present membership. Connections of an earlier one are drained.
    fn member(&self) -> Option<(Arc<LocalMember>, Rc<OpenConnections>)> {
        let member = self.cluster.member();
        let mut current = self.current.borrow_mut();
        let is_same = match (&current.0, &member) {
            (Some(known), Some(member)) => Arc::ptr_eq(known, member),
            (known, member) => known.is_none() && member.is_none(),
        };
        if !is_same {
            current.1.drain();
            *current = (member, Rc::default());
        }
        current.0.clone().map(|member| (member, Rc::clone(&current.1)))
    }

    /// Drains connections made with credentials that are no longer valid. Call it after a change.
    pub fn refresh(&self) {
        self.member();
    }

    async fn connection(
        self: Rc<Self>,
        stream: TcpStream,
        from: SocketAddr,
        member: Arc<LocalMember>,
        connections: Rc<OpenConnections>,
    ) {
        let _open = OpenPeer::new(&self.open);
        let entered = self.host.enter();
        let _ = stream.set_nodelay(true);
        let Ok(local) = stream.local_addr() else { return };
        let (stream, node) = match timeout(HANDSHAKE_MAX, self.handshake(stream, &member)).await {
            Ok(Ok(accepted)) => accepted,
            Ok(Err(error)) => return self.report(from, &error),
            Err(_) => return tracing::debug!(%from, "another node's handshake took too long"),
        };
        let conn = Rc::new(ConnInfo { peer: from, local, tls: None, carried: None, network: None });
        let ours = Rc::new(PeerStreamHost {
            cluster: Arc::clone(&self.cluster),
            metrics: Arc::clone(&self.metrics),
            host: Rc::clone(&self.host),
            keeper: Rc::clone(&self.keeper),
            from: node,
            connections: Rc::clone(&connections),
            limits: Rc::new(limits(&self.host.limits())),
        });
        let mut serving = std::pin::pin!(h2::serve(stream, BytesMut::new(), conn, connections.enter(), ours));
        let ended = tokio::select! {
            ended = serving.as_mut() => ended,
            () = h2::drained(&entered) => {
                connections.drain();
                serving.await
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%from, %error, "another node's connection broke");
        }
    }

    async fn handshake(
        &self,
        stream: TcpStream,
        member: &LocalMember,
    ) -> Result<(tokio_rustls::server::TlsStream<TcpStream>, NodeName), UntrustedPeer> {
        let acceptor = TlsAcceptor::from(Arc::clone(&member.credentials.server));
        let mut stream = match acceptor.accept(stream).into_fallible().await {
            Ok(stream) => stream,
            Err((error, stream)) => {
                linger(stream).await;
                return Err(error.into());
            }
        };
        match self.trusted(stream.get_ref().1) {
            Ok(node) => Ok((stream, node)),
            Err(error) => {
                linger(&mut stream).await;
                Err(error)
            }
        }
    }

    /// Returns the member on the other side.
    fn trusted(&self, tls: &rustls::ServerConnection) -> Result<NodeName, UntrustedPeer> {
        let certificate = tls.peer_certificates().and_then(<[_]>::first);
        let node = certificate.and_then(node_of).ok_or(UntrustedPeer::Nameless)?;
        if self.cluster.table.read(|table| table.node(node.as_str())).is_none() {
            return Err(UntrustedPeer::NoMember(node));
        }
        if tls.alpn_protocol() != Some(ALPN) {
            return Err(UntrustedPeer::Protocol);
        }
        Ok(node)
    }

    fn report(&self, from: SocketAddr, error: &UntrustedPeer) {
        // Probes by connection, and nodes that give up, end without a log line.
        if matches!(error, UntrustedPeer::Handshake(error) if error.kind() != std::io::ErrorKind::InvalidData)
        {
            return tracing::debug!(%from, %error, "another node broke off its handshake");
        }
        if self.reported.get().is_none_or(|last| last.elapsed() >= REPORT_EVERY) {
            self.reported.set(Some(Instant::now()));
            tracing::warn!(
                "{CODE_UNTRUSTED}: a connection from {from} to the port for other nodes was closed: {error}"
            );
        }
    }
}

/// Ends a connection so that the other side learns the reason. With TLS 1.3 it has sent more data
/// before it is refused. Closing with unread data resets the connection, and a reset overtakes
/// the alert with the reason.
async fn linger(mut stream: impl AsyncRead + AsyncWrite + Unpin) {
    let _ = timeout(LINGER_MAX, async {
        stream.shutdown().await?;
        tokio::io::copy(&mut stream.take(LINGER_BYTES), &mut tokio::io::sink()).await
    })
    .await;
}

/// Counts a connection while it lives.
struct OpenPeer<'a>(&'a Cell<usize>);

impl<'a> OpenPeer<'a> {
    fn new(open: &'a Cell<usize>) -> Self {
        open.set(open.get() + 1);
        Self(open)
    }
}

impl Drop for OpenPeer<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// Returns the limits here. The node that a client sent its request to enforces the limits for
/// clients.
fn limits(of_clients: &EdgeLimits) -> EdgeLimits {
    let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    EdgeLimits {
        head_bytes: of_clients.head_bytes + EXTRA_BYTES,
        header_fields: of_clients.header_fields + EXTRA_FIELDS,
        body_bytes: u64::MAX,
        idle_body_ms: ms(SILENCE_MAX),
        keep_alive_ms: ms(IDLE),
        h2_streams: u32::try_from(STREAMS_MAX).unwrap_or(u32::MAX),
        // One connection carries the requests of all clients of that node.
        keep_alive_requests: u32::MAX,
        pace: PaceOptions { body_ms: 0, h2_resets: u32::MAX, ..of_clients.pace.clone() },
        ..of_clients.clone()
    }
}

/// Serves the streams of one node's connection.
struct PeerStreamHost<H> {
    cluster: Arc<EdgeCluster>,
    metrics: Arc<EdgeMetrics>,
    host: Rc<H>,
    keeper: Rc<KeeperClient>,
    from: NodeName,
    connections: Rc<OpenConnections>,
    limits: Rc<EdgeLimits>,
}

impl<H: ConnectionHost> PeerStreamHost<H> {
    /// Answers a request about images. They contain secrets: the node must be a member now, not
    /// only when it connected.
    async fn give(&self, head: &RequestHead, asked: Result<ImageRequest, &'static str>) -> Response {
        let is_member = self.cluster.table.read(|table| table.node(self.from.as_str())).is_some();
        let asked = asked.and_then(|asked| is_member.then_some(asked).ok_or("it is no member any more"));
        match asked {
            Ok(asked) => give(&self.keeper, &self.metrics, asked).await,
            Err(why) => self.host.refuse(&head.conn, Refusal::BadRequest(why), head.id),
        }
    }
}

impl<H: ConnectionHost> ConnectionHost for PeerStreamHost<H> {
    fn limits(&self) -> Rc<EdgeLimits> {
        Rc::clone(&self.limits)
    }

    fn request_id(&self) -> RequestId {
        // The forwarded id comes with the request. This one is for input that is no request.
        self.host.request_id()
    }

    async fn serve(&self, mut request: Request) -> Response {
        if let Some(asked) = ImageRequest::read(&request.head.headers) {
            return self.give(&request.head, asked).await;
        }
        if let Err(why) = peer_fields::read(&mut request.head, Instant::now()) {
            let (conn, id) = (Rc::clone(&request.head.conn), request.head.id);
            return self.host.refuse(&conn, Refusal::BadRequest(why), id);
        }
        if request.head.upgrade.is_none() {
            return self.host.serve(request).await;
        }
        // The rest of the stream is no body, but the client's data after the switch of protocols.
        let upward = std::mem::replace(&mut request.body, RequestBody::empty());
        splice::open(self.host.serve(request).await, upward)
    }

    fn refuse(&self, conn: &ConnInfo, refusal: Refusal, id: RequestId) -> Response {
        self.host.refuse(conn, refusal, id)
    }

    fn measures(&self) -> bool {
        self.host.measures()
    }

    fn enter(&self) -> ConnectionGuard {
        self.connections.enter()
    }

    fn windows(&self) -> (u32, u32) {
        (STREAM_WINDOW_BYTES, CONNECTION_WINDOW_BYTES)
    }

    /// A node that stood still finds that all its unread requests were given up. That is no
    /// attack.
    fn pending_resets(&self) -> usize {
        STREAMS_MAX
    }
}
