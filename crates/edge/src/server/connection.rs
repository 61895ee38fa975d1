//! Begins a client's connection, from its place among the others until its protocol is known.
//!
//! With the PROXY protocol, the connection first belongs to the proxy. After its header, the
//! client's address is used everywhere: for limits, rules, logs and fields to backends.
//!
//! A connection gets a place if its network may have one more. The thread must also have one left,
//! or another connection makes room. A client that gets none receives the reason where that needs
//! no handshake. Not here: accepting (`server::thread`), the protocols (`h1`, `h2`, `tls`), which
//! connection makes room (`http::clients::crowd`).

use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use bytes::BytesMut;
use ipnet::IpNet;
use nagaya_base::OwnCaller;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::server::TlsStream;

use crate::http::clients::crowd::ConnectionGroup;
use crate::http::clients::limits::{AdmittedConnection, ClientLimits, RETRY_CONNECTION_SECONDS};
use crate::http::connections::ConnectionGuard;
use crate::http::message::{ConnInfo, TlsInfo};
use crate::http::proxy_protocol::ProxiedAddresses;
use crate::http::refusal::Refusal;
use crate::http::tls::{Alpn, ThreadTls};
use crate::http::{h1, h2, proxy_protocol};
use crate::metrics::{ConnectionPhase, LimitKind};
use crate::server::node::ThreadContext;

/// First bytes of an HTTP/2 client with prior knowledge (RFC 9113 section 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Time in which an idle connection that makes room may say goodbye. HTTP/2 then informs the
/// client which streams were accepted.
const GOODBYE_MAX: Duration = Duration::from_secs(2);

/// Maximum number of goodbyes at once, per thread. Other connections are closed at once, so that
/// a flood of newcomers costs no descriptors.
const GOODBYES_MAX: usize = 64;

/// Maximum time until the header of a proxy arrives. A proxy sends it at once.
const PROXY_HEADER_WAIT: Duration = Duration::from_secs(5);

/// Protocols of one address.
pub struct ListenerConfig {
    pub tls: Option<Rc<ThreadTls>>,
    /// Proxies whose PROXY headers are accepted. If empty, those are the trusted proxies. `None`
    /// if no PROXY protocol is used.
    pub proxies: Option<Vec<IpNet>>,
}

/// Gives the connection a place and begins to serve it, or refuses it.
pub fn begin(stream: TcpStream, peer: SocketAddr, entrance: &Rc<ListenerConfig>, node: &Rc<ThreadContext>) {
    let admitted = match &entrance.proxies {
        Some(proxies) if node.services.clients.is_proxy(proxies, peer.ip()) => {
            Ok(node.services.clients.admit_alone())
        }
        Some(_) if is_own_caller(peer) => node.services.clients.admit_connection(peer.ip()),
        Some(_) => {
            let what = format_args!("{peer}, which may not speak the PROXY protocol here");
            return node.services.clients.note(LimitKind::ProxyHeader, what);
        }
        None => node.services.clients.admit_connection(peer.ip()),
    };
    let admitted = admitted.and_then(|admitted| take_place(admitted, node));
    let Ok(local) = stream.local_addr() else { return };
    let conn = ConnInfo { peer, local, tls: None, carried: None, network: None };
    match admitted {
        Ok((entered, admitted)) => {
            node.shared.metrics.connections_accepted.inc();
            let conn = ConnInfo { network: admitted.network.clone(), ..conn };
            let serving = run(stream, conn, entered, admitted, Rc::clone(entrance), Rc::clone(node));
            tokio::task::spawn_local(serving);
        }
        Err(refusal) => refuse(stream, conn, refusal, entrance, node),
    }
}

fn is_own_caller(peer: SocketAddr) -> bool {
    OwnCaller::from_address(peer.ip()).is_some()
}

/// Takes a place on this thread. Another connection may have to end for it.
fn take_place(
    admitted: AdmittedConnection,
    node: &ThreadContext,
) -> Result<(ConnectionGuard, AdmittedConnection), Refusal> {
    if node.connections.places_taken() >= node.limits().connections {
        make_room(admitted.group, node)?;
    }
    Ok((node.connections.enter_from(admitted.group), admitted))
}

fn make_room(newcomer: ConnectionGroup, node: &ThreadContext) -> Result<(), Refusal> {
    if let Some(phase) = node.connections.make_room(newcomer) {
        node.shared.metrics.evicted(phase);
        return Ok(());
    }
    node.shared.metrics.connections_refused.inc();
    match newcomer {
        ConnectionGroup::Network(prefix) => node.services.clients.note(LimitKind::Full, prefix),
        ConnectionGroup::Alone(_) => node.services.clients.note(LimitKind::Full, "a trusted proxy"),
    }
    Err(Refusal::ConnectionsFull { retry_after_seconds: RETRY_CONNECTION_SECONDS })
}

/// Informs the client why it is not served, if that costs little. Otherwise it closes the
/// connection.
fn refuse(
    stream: TcpStream,
    conn: ConnInfo,
    refusal: Refusal,
    entrance: &ListenerConfig,
    node: &Rc<ThreadContext>,
) {
    if entrance.tls.is_some() {
        return;
    }
    if let Some(turned_away) = ClientLimits::turn_away(&node.services.clients) {
        let node = Rc::clone(node);
        tokio::task::spawn_local(async move {
            h1::connection::turn_away(stream, Rc::new(conn), refusal, node).await;
            drop(turned_away);
        });
    }
}

/// Serves the connection to its end, or until it has to make room.
async fn run(
    stream: TcpStream,
    conn: ConnInfo,
    entered: ConnectionGuard,
    admitted: AdmittedConnection,
    entrance: Rc<ListenerConfig>,
    node: Rc<ThreadContext>,
) {
    let open = &node.shared.metrics.connections_open;
    open.inc();
    // Without it the last segment of a response may wait for the acknowledgement of the previous
    // one.
    let _ = stream.set_nodelay(true);
    let phases = entered.phases();
    let mut serving = pin!(async {
        match entrance.proxies {
            // Boxed, because other connections should not reserve memory for it. A program of
            // this node has no proxy before it.
            Some(_) if !is_own_caller(conn.peer) => {
                Box::pin(proxied(stream, conn, entered, &entrance, &node)).await
            }
            _ => serve(stream, conn, entered, &entrance, &node).await,
        }
    });
    let evicted = tokio::select! {
        biased;
        () = serving.as_mut() => None,
        phase = phases.evicted() => Some(phase),
    };
    if evicted == Some(ConnectionPhase::Idle) && node.connections.leaving() <= GOODBYES_MAX {
        let _ = timeout(GOODBYE_MAX, serving).await;
    }
    drop(admitted);
    open.dec();
}

/// Reads the client from the header, and serves the connection as that client's.
async fn proxied(
    mut stream: TcpStream,
    conn: ConnInfo,
    entered: ConnectionGuard,
    entrance: &ListenerConfig,
    node: &Rc<ThreadContext>,
) {
    let told = match timeout(PROXY_HEADER_WAIT, proxy_protocol::read(&mut stream)).await {
        Ok(Ok(header)) => header.told,
        Ok(Err(error)) => {
            return node
                .services
                .clients
                .note(LimitKind::ProxyHeader, format_args!("{}: {error}", conn.peer));
        }
        Err(_) => {
            let seconds = PROXY_HEADER_WAIT.as_secs();
            let what = format_args!("{}: it sent no whole PROXY header in {seconds} s", conn.peer);
            return node.services.clients.note(LimitKind::ProxyHeader, what);
        }
    };
    // The connection is the proxy's own, or its client has no address. Then the proxy counts as
    // the client.
    let Some(ProxiedAddresses { source, destination }) = told else {
        return serve(stream, conn, entered, entrance, node).await;
    };
    // An IPv4 address may come in its IPv6 form.
    let canonical = |address: SocketAddr| SocketAddr::new(address.ip().to_canonical(), address.port());
    let conn = ConnInfo { peer: canonical(source), local: canonical(destination), ..conn };
    match node.services.clients.admit_connection(source.ip()) {
        Ok(admitted) => {
            entered.belongs_to(admitted.group);
            let conn = ConnInfo { network: admitted.network.clone(), ..conn };
            serve(stream, conn, entered, entrance, node).await;
            drop(admitted);
        }
        Err(refusal) => {
            drop(entered);
            refuse(stream, conn, refusal, entrance, node);
        }
    }
}

async fn serve(
    stream: TcpStream,
    conn: ConnInfo,
    entered: ConnectionGuard,
    entrance: &ListenerConfig,
    node: &Rc<ThreadContext>,
) {
    match &entrance.tls {
        Some(tls) => encrypted(stream, conn, entered, tls, node).await,
        None => plain(stream, conn, entered, node).await,
    }
}

/// First bytes of a connection where TLS is expected. Lives from the handshake to the next line.
#[expect(clippy::large_enum_variant, reason = "it is taken apart at once")]
enum AcceptedStream {
    Tls(TlsStream<TcpStream>, TlsInfo, Alpn),
    Plain(TcpStream),
}

/// Distinguishes a method of HTTP from TLS records, whose first byte is no letter (RFC 8446
/// section 5.1). Takes nothing off the stream.
async fn is_plain_http(stream: &TcpStream) -> io::Result<bool> {
    let mut first = [0];
    let count = stream.peek(&mut first).await?;
    Ok(count == 1 && first[0].is_ascii_alphabetic())
}

async fn encrypted(
    stream: TcpStream,
    conn: ConnInfo,
    entered: ConnectionGuard,
    tls: &ThreadTls,
    node: &Rc<ThreadContext>,
) {
    let peer = conn.peer;
    let patience = Duration::from_millis(node.limits().handshake_ms);
    let handshake = async {
        // A silent client has begun no handshake, and is idle.
        stream.readable().await?;
        if !node.services.clients.admit_handshake(conn.network.as_deref()) {
            return Ok(None);
        }
        entered.begin(ConnectionPhase::Arriving);
        if is_plain_http(&stream).await? {
            return Ok(Some(AcceptedStream::Plain(stream)));
        }
        tls.accept(stream).await.map(|(stream, info, alpn)| Some(AcceptedStream::Tls(stream, info, alpn)))
    };
    let (stream, info, alpn) = match timeout(patience, handshake).await {
        Ok(Ok(Some(AcceptedStream::Tls(stream, info, alpn)))) => (stream, info, alpn),
        Ok(Ok(Some(AcceptedStream::Plain(stream)))) => {
            // As few at once, and as briefly, as other clients that are turned away.
            if let Some(turned_away) = ClientLimits::turn_away(&node.services.clients) {
                let conn = Rc::new(conn);
                h1::connection::turn_away(stream, conn, Refusal::PlainHttp, Rc::clone(node)).await;
                drop(turned_away);
            }
            return;
        }
        Ok(Ok(None)) => return,
        Ok(Err(error)) => return tracing::debug!(%peer, %error, "a TLS handshake failed"),
        Err(_) => return tracing::debug!(%peer, "a TLS handshake took too long"),
    };
    entered.begin(ConnectionPhase::Idle);
    let conn = Rc::new(ConnInfo { tls: Some(info), ..conn });
    match alpn {
        Alpn::Http2 => second(stream, BytesMut::new(), conn, entered, node).await,
        Alpn::Http1 => h1::connection::serve(stream, BytesMut::new(), conn, entered, Rc::clone(node)).await,
    }
}

async fn plain(mut stream: TcpStream, conn: ConnInfo, entered: ConnectionGuard, node: &Rc<ThreadContext>) {
    let conn = Rc::new(conn);
    if !node.shared.options.get().h2c {
        return h1::connection::serve(stream, BytesMut::new(), conn, entered, Rc::clone(node)).await;
    }
    let patience = Duration::from_millis(node.limits().head_ms);
    let mut input = BytesMut::new();
    match timeout(patience, speaks_http2(&mut stream, &mut input)).await {
        Ok(Ok(true)) => second(stream, input, conn, entered, node).await,
        Ok(Ok(false)) => h1::connection::serve(stream, input, conn, entered, Rc::clone(node)).await,
        // It sent nothing, or too little to know the protocol for a response.
        Ok(Err(_)) | Err(_) => {}
    }
}

/// Reads just enough to distinguish the two protocols, usually the first byte.
async fn speaks_http2(stream: &mut TcpStream, input: &mut BytesMut) -> io::Result<bool> {
    loop {
        // An idle connection holds no buffer.
        stream.readable().await?;
        input.reserve(8 << 10);
        if stream.read_buf(input).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let common = input.len().min(PREFACE.len());
        if input[..common] != PREFACE[..common] {
            return Ok(false);
        }
        if common == PREFACE.len() {
            return Ok(true);
        }
    }
}

async fn second<S>(
    stream: S,
    input: BytesMut,
    conn: Rc<ConnInfo>,
    entered: ConnectionGuard,
    node: &Rc<ThreadContext>,
) where
    S: h1::wire::ClientStream,
{
    let peer = conn.peer;
    if let Err(error) = h2::serve(stream, input, conn, entered, Rc::clone(node)).await {
        tracing::debug!(%peer, %error, "an HTTP/2 connection broke");
    }
}
