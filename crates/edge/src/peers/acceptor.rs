//! Requests that other nodes pass on: their connections, who they are, and each request as if its client had come here.
//!
//! A connection is a member's or it is none: TLS 1.3 with a certificate of the cluster's authority, for the name of a node
//! that the records know. What is said over it goes through the same HTTP/2 as a client's. Not here: whether a request is
//! to be served here (`place`), our own connections to other nodes (`pool`).

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use nagaya_base::{Code, RequestId};
use nagaya_cmdb::NodeName;
use nagaya_keeper::client::Keeper;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::spawn_local;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;

use super::credentials::{ALPN, node_of};
use super::fields;
use super::images::{self, Asked};
use super::pool::{CONNECTION_WINDOW_BYTES, STREAM_WINDOW_BYTES, STREAMS_MAX};
use super::splice;
use crate::cluster::Member;
use crate::drain::{Connections, Entered};
use crate::http1::connection::Host;
use crate::http2;
use crate::message::{ConnInfo, Head, Request, RequestBody, Response};
use crate::options::{Limits, PaceOptions};
use crate::refusal::Refusal;
use crate::shared::Shared;

/// Connections of other nodes open at once, per thread: a hundred nodes of eight threads with a few connections each. Beyond
/// it a new one is closed, and the node that wanted it uses those it has.
const CONNECTIONS_MAX: usize = 4096;

/// Longest for a handshake.
const HANDSHAKE_MAX: Duration = Duration::from_secs(3);

/// A connection that is refused is read for so long, and so far, until the other side has learnt it.
const LINGER_MAX: Duration = Duration::from_secs(1);
const LINGER_BYTES: u64 = 64 << 10;

/// A connection without a request for so long is closed. The asking side does so sooner.
const IDLE: Duration = Duration::from_secs(300);

/// Longest that neither a body nor an answer moves. The node in front has bounds of its own against slow clients, which are
/// shorter; an upgraded connection may be silent for so long.
const SILENCE_MAX: Duration = Duration::from_secs(3600);

/// Bytes and header fields by which a request is longer here than it was when its client sent it.
const EXTRA_BYTES: usize = 8 << 10;
const EXTRA_FIELDS: usize = 24;

/// When no descriptor is left, accepting pauses this long.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A peer that is not trusted is reported this often.
const REPORT_EVERY: Duration = Duration::from_secs(60);

const CODE_UNTRUSTED: Code = Code(466);

/// One thread's end for other nodes; `host` serves what they pass on.
pub struct Acceptor<H> {
    shared: Arc<Shared>,
    host: Rc<H>,
    keeper: Rc<Keeper>,
    /// Connections made with the credentials of now, and whose they are.
    current: RefCell<(Option<Arc<Member>>, Rc<Connections>)>,
    open: Cell<usize>,
    reported: Cell<Option<Instant>>,
}

/// Why a connection is not served.
#[derive(Debug, thiserror::Error)]
enum Untrusted {
    #[error("the handshake failed: {0}")]
    Handshake(#[from] std::io::Error),
    #[error("its certificate is not for the name of one node")]
    Nameless,
    #[error("it says to be '{0}', which is not a member")]
    NoMember(NodeName),
    #[error("it does not speak h2")]
    Protocol,
}

impl<H: Host> Acceptor<H> {
    pub fn new(shared: Arc<Shared>, host: Rc<H>, keeper: Rc<Keeper>) -> Rc<Self> {
        Rc::new(Self {
            shared,
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

    /// Who this node is now. Connections that were made when it was another are let go.
    fn member(&self) -> Option<(Arc<Member>, Rc<Connections>)> {
        let member = self.shared.cluster.member();
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

    /// Lets go of connections that were made with credentials which hold no longer. To be called after a change.
    pub fn refresh(&self) {
        self.member();
    }

    async fn connection(
        self: Rc<Self>,
        stream: TcpStream,
        from: SocketAddr,
        member: Arc<Member>,
        connections: Rc<Connections>,
    ) {
        let _open = Open::new(&self.open);
        let entered = self.host.enter();
        let _ = stream.set_nodelay(true);
        let Ok(local) = stream.local_addr() else { return };
        let (stream, node) = match timeout(HANDSHAKE_MAX, self.handshake(stream, &member)).await {
            Ok(Ok(accepted)) => accepted,
            Ok(Err(error)) => return self.report(from, &error),
            Err(_) => return tracing::debug!(%from, "another node's handshake took too long"),
        };
        let conn = Rc::new(ConnInfo { peer: from, local, tls: None, carried: None, network: None });
        let ours = Rc::new(Ours {
            shared: Arc::clone(&self.shared),
            host: Rc::clone(&self.host),
            keeper: Rc::clone(&self.keeper),
            from: node,
            connections: Rc::clone(&connections),
            limits: Rc::new(limits(&self.host.limits())),
        });
        let mut serving =
            std::pin::pin!(http2::serve(stream, BytesMut::new(), conn, connections.enter(), ours));
        let ended = tokio::select! {
            ended = serving.as_mut() => ended,
            () = http2::drained(&entered) => {
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
        member: &Member,
    ) -> Result<(tokio_rustls::server::TlsStream<TcpStream>, NodeName), Untrusted> {
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

    /// Which member is on the other side.
    fn trusted(&self, tls: &rustls::ServerConnection) -> Result<NodeName, Untrusted> {
        let certificate = tls.peer_certificates().and_then(<[_]>::first);
        let node = certificate.and_then(node_of).ok_or(Untrusted::Nameless)?;
        if self.shared.with_table(|table| table.node(node.as_str())).is_none() {
            return Err(Untrusted::NoMember(node));
        }
        if tls.alpn_protocol() != Some(ALPN) {
            return Err(Untrusted::Protocol);
        }
        Ok(node)
    }

    fn report(&self, from: SocketAddr, error: &Untrusted) {
        // Probes by connection, and nodes that changed their mind, end without a word.
        if matches!(error, Untrusted::Handshake(error) if error.kind() != std::io::ErrorKind::InvalidData) {
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

/// Ends a connection so that the other side learns why. With TLS 1.3 it has spoken on before it is refused; closing
/// with that unread resets the connection, and a reset overtakes the alert that says the reason.
async fn linger(mut stream: impl AsyncRead + AsyncWrite + Unpin) {
    let _ = timeout(LINGER_MAX, async {
        stream.shutdown().await?;
        tokio::io::copy(&mut stream.take(LINGER_BYTES), &mut tokio::io::sink()).await
    })
    .await;
}

/// Counts a connection while it lives.
struct Open<'a>(&'a Cell<usize>);

impl<'a> Open<'a> {
    fn new(open: &'a Cell<usize>) -> Self {
        open.set(open.get() + 1);
        Self(open)
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// Bounds of what a client sent are kept by the node it sent it to.
fn limits(of_clients: &Limits) -> Limits {
    let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    Limits {
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

/// What serves the streams of one node's connection.
struct Ours<H> {
    shared: Arc<Shared>,
    host: Rc<H>,
    keeper: Rc<Keeper>,
    from: NodeName,
    connections: Rc<Connections>,
    limits: Rc<Limits>,
}

impl<H: Host> Ours<H> {
    /// Images hold secrets: the node must be a member now, not only when it connected.
    async fn give(&self, head: &Head, asked: Result<Asked, &'static str>) -> Response {
        let is_member = self.shared.with_table(|table| table.node(self.from.as_str())).is_some();
        let asked = asked.and_then(|asked| is_member.then_some(asked).ok_or("it is no member any more"));
        match asked {
            Ok(asked) => images::give(&self.keeper, &self.shared.metrics, asked).await,
            Err(why) => self.host.refuse(&head.conn, Refusal::BadRequest(why), head.id),
        }
    }
}

impl<H: Host> Host for Ours<H> {
    fn limits(&self) -> Rc<Limits> {
        Rc::clone(&self.limits)
    }

    fn request_id(&self) -> RequestId {
        // Its own comes with it; this one is of those that are none.
        self.host.request_id()
    }

    async fn serve(&self, mut request: Request) -> Response {
        if let Some(asked) = Asked::read(&request.head.headers) {
            return self.give(&request.head, asked).await;
        }
        if let Err(why) = fields::read(&mut request.head, Instant::now()) {
            let (conn, id) = (Rc::clone(&request.head.conn), request.head.id);
            return self.host.refuse(&conn, Refusal::BadRequest(why), id);
        }
        if request.head.upgrade.is_none() {
            return self.host.serve(request).await;
        }
        // What follows on the stream is no body, but what the client says once the protocol has changed.
        let upward = std::mem::replace(&mut request.body, RequestBody::empty());
        splice::open(self.host.serve(request).await, upward)
    }

    fn refuse(&self, conn: &ConnInfo, refusal: Refusal, id: RequestId) -> Response {
        self.host.refuse(conn, refusal, id)
    }

    fn measures(&self) -> bool {
        self.host.measures()
    }

    fn enter(&self) -> Entered {
        self.connections.enter()
    }

    fn windows(&self) -> (u32, u32) {
        (STREAM_WINDOW_BYTES, CONNECTION_WINDOW_BYTES)
    }

    /// A node that stood still finds that all it had not taken up was given up, which is no attack.
    fn pending_resets(&self) -> usize {
        STREAMS_MAX
    }
}
