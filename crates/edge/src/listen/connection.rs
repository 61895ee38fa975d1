//! A client's connection, from its place among the others until its protocol is known.
//!
//! Where the PROXY protocol is spoken, the connection is first the proxy's. Once the header has told whose it is, the client's
//! address stands in all that follows: limits, rules, logs, and what backends are told.
//!
//! A connection gets a place if its network may have one more and the thread has one left, or another connection makes room
//! for it. A client that gets none is told why where that needs no handshake.
//! Not here: accepting (`listen`), the protocols (`http1`, `http2`, `tls`), which connection makes room (`clients::crowd`).

use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use bytes::BytesMut;
use ipnet::IpNet;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::server::TlsStream;

use crate::clients::crowd::{Group, Phase};
use crate::clients::limits::{Admitted, RETRY_CONNECTION_SECONDS};
use crate::clients::{ClientLimits, LimitKind};
use crate::drain::Entered;
use crate::http1;
use crate::http2;
use crate::message::{ConnInfo, TlsInfo};
use crate::node::Node;
use crate::proxy_header::{self, Told};
use crate::refusal::Refusal;
use crate::tls::{Alpn, Tls};

/// What an HTTP/2 client with prior knowledge says first (RFC 9113 section 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// An idle connection that makes room may take so long to say goodbye: HTTP/2 tells the client which streams were taken up.
const GOODBYE_MAX: Duration = Duration::from_secs(2);

/// So many may say goodbye at once, per thread. Others are closed at once, so that a flood of newcomers costs no descriptors.
const GOODBYES_MAX: usize = 64;

/// A proxy sends its header at once; so long it may take on its way.
const PROXY_HEADER_WAIT: Duration = Duration::from_secs(5);

/// What is spoken at one address.
pub struct Entrance {
    pub tls: Option<Rc<Tls>>,
    /// Whose PROXY headers are accepted; if empty, those of trusted proxies. `None`: there are none.
    pub proxies: Option<Vec<IpNet>>,
}

/// Gives the connection a place and begins to serve it, or refuses it.
pub fn begin(stream: TcpStream, peer: SocketAddr, entrance: &Rc<Entrance>, node: &Rc<Node>) {
    let admitted = match &entrance.proxies {
        Some(proxies) if node.clients.is_proxy(proxies, peer.ip()) => Ok(node.clients.admit_alone()),
        Some(_) => {
            let what = format_args!("{peer}, which may not speak the PROXY protocol here");
            return node.clients.note(LimitKind::ProxyHeader, what);
        }
        None => node.clients.admit_connection(peer.ip()),
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

/// A place on this thread, for which another connection may have to end.
fn take_place(admitted: Admitted, node: &Node) -> Result<(Entered, Admitted), Refusal> {
    if node.connections.places_taken() >= node.limits().connections {
        make_room(admitted.group, node)?;
    }
    Ok((node.connections.enter_from(admitted.group), admitted))
}

fn make_room(newcomer: Group, node: &Node) -> Result<(), Refusal> {
    if let Some(phase) = node.connections.make_room(newcomer) {
        node.shared.metrics.evicted(phase);
        return Ok(());
    }
    node.shared.metrics.connections_refused.inc();
    match newcomer {
        Group::Network(prefix) => node.clients.note(LimitKind::Full, prefix),
        Group::Alone(_) => node.clients.note(LimitKind::Full, "a trusted proxy"),
    }
    Err(Refusal::ConnectionsFull { retry_after_seconds: RETRY_CONNECTION_SECONDS })
}

/// Tells the client why it is not served, if that costs little; else the connection is closed.
fn refuse(stream: TcpStream, conn: ConnInfo, refusal: Refusal, entrance: &Entrance, node: &Rc<Node>) {
    if entrance.tls.is_some() {
        return;
    }
    if let Some(turned_away) = ClientLimits::turn_away(&node.clients) {
        let node = Rc::clone(node);
        tokio::task::spawn_local(async move {
            http1::connection::turn_away(stream, Rc::new(conn), refusal, node).await;
            drop(turned_away);
        });
    }
}

/// Serves the connection to its end, or until it has to make room.
async fn run(
    stream: TcpStream,
    conn: ConnInfo,
    entered: Entered,
    admitted: Admitted,
    entrance: Rc<Entrance>,
    node: Rc<Node>,
) {
    let open = &node.shared.metrics.connections_open;
    open.inc();
    // Without it the last segment of an answer may wait for the acknowledgement of the one before.
    let _ = stream.set_nodelay(true);
    let phases = entered.phases();
    let mut serving = pin!(async {
        match entrance.proxies {
            // Boxed, because connections without such a header are not to have room for it.
            Some(_) => Box::pin(proxied(stream, conn, entered, &entrance, &node)).await,
            None => serve(stream, conn, entered, &entrance, &node).await,
        }
    });
    let evicted = tokio::select! {
        biased;
        () = serving.as_mut() => None,
        phase = phases.evicted() => Some(phase),
    };
    if evicted == Some(Phase::Idle) && node.connections.leaving() <= GOODBYES_MAX {
        let _ = timeout(GOODBYE_MAX, serving).await;
    }
    drop(admitted);
    open.dec();
}

/// Learns from the header whose connection it is, and serves it as that client's.
async fn proxied(
    mut stream: TcpStream,
    conn: ConnInfo,
    entered: Entered,
    entrance: &Entrance,
    node: &Rc<Node>,
) {
    let told = match timeout(PROXY_HEADER_WAIT, proxy_header::read(&mut stream)).await {
        Ok(Ok(header)) => header.told,
        Ok(Err(error)) => {
            return node.clients.note(LimitKind::ProxyHeader, format_args!("{}: {error}", conn.peer));
        }
        Err(_) => {
            let seconds = PROXY_HEADER_WAIT.as_secs();
            let what = format_args!("{}: it sent no whole PROXY header in {seconds} s", conn.peer);
            return node.clients.note(LimitKind::ProxyHeader, what);
        }
    };
    // The connection is the proxy's own, or its client has no address: the proxy counts as the client.
    let Some(Told { source, destination }) = told else {
        return serve(stream, conn, entered, entrance, node).await;
    };
    // An IPv4 address may be told in its IPv6 form.
    let canonical = |address: SocketAddr| SocketAddr::new(address.ip().to_canonical(), address.port());
    let conn = ConnInfo { peer: canonical(source), local: canonical(destination), ..conn };
    match node.clients.admit_connection(source.ip()) {
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

async fn serve(stream: TcpStream, conn: ConnInfo, entered: Entered, entrance: &Entrance, node: &Rc<Node>) {
    match &entrance.tls {
        Some(tls) => encrypted(stream, conn, entered, tls, node).await,
        None => plain(stream, conn, entered, node).await,
    }
}

/// What came first where TLS is spoken. Lives from the handshake to the next line.
#[expect(clippy::large_enum_variant, reason = "it is taken apart at once")]
enum Hello {
    Tls(TlsStream<TcpStream>, TlsInfo, Alpn),
    Plain(TcpStream),
}

/// Tells a method of HTTP from the records of TLS, which begin with a byte that is no letter (RFC 8446 section 5.1). Takes nothing off the stream.
async fn is_plain_http(stream: &TcpStream) -> io::Result<bool> {
    let mut first = [0];
    let count = stream.peek(&mut first).await?;
    Ok(count == 1 && first[0].is_ascii_alphabetic())
}

async fn encrypted(stream: TcpStream, conn: ConnInfo, entered: Entered, tls: &Tls, node: &Rc<Node>) {
    let peer = conn.peer;
    let patience = Duration::from_millis(node.limits().handshake_ms);
    let handshake = async {
        // A client that says nothing has begun no handshake, and is idle.
        stream.readable().await?;
        if !node.clients.admit_handshake(conn.network.as_deref()) {
            return Ok(None);
        }
        entered.begin(Phase::Arriving);
        if is_plain_http(&stream).await? {
            return Ok(Some(Hello::Plain(stream)));
        }
        tls.accept(stream).await.map(|(stream, info, alpn)| Some(Hello::Tls(stream, info, alpn)))
    };
    let (stream, info, alpn) = match timeout(patience, handshake).await {
        Ok(Ok(Some(Hello::Tls(stream, info, alpn)))) => (stream, info, alpn),
        Ok(Ok(Some(Hello::Plain(stream)))) => {
            // As few at once, and as briefly, as others who are turned away.
            if let Some(turned_away) = ClientLimits::turn_away(&node.clients) {
                let conn = Rc::new(conn);
                http1::connection::turn_away(stream, conn, Refusal::PlainHttp, Rc::clone(node)).await;
                drop(turned_away);
            }
            return;
        }
        Ok(Ok(None)) => return,
        Ok(Err(error)) => return tracing::debug!(%peer, %error, "a TLS handshake failed"),
        Err(_) => return tracing::debug!(%peer, "a TLS handshake took too long"),
    };
    entered.begin(Phase::Idle);
    let conn = Rc::new(ConnInfo { tls: Some(info), ..conn });
    match alpn {
        Alpn::Http2 => second(stream, BytesMut::new(), conn, entered, node).await,
        Alpn::Http1 => {
            http1::connection::serve(stream, BytesMut::new(), conn, entered, Rc::clone(node)).await
        }
    }
}

async fn plain(mut stream: TcpStream, conn: ConnInfo, entered: Entered, node: &Rc<Node>) {
    let conn = Rc::new(conn);
    if !node.shared.options().h2c {
        return http1::connection::serve(stream, BytesMut::new(), conn, entered, Rc::clone(node)).await;
    }
    let patience = Duration::from_millis(node.limits().head_ms);
    let mut input = BytesMut::new();
    match timeout(patience, speaks_http2(&mut stream, &mut input)).await {
        Ok(Ok(true)) => second(stream, input, conn, entered, node).await,
        Ok(Ok(false)) => http1::connection::serve(stream, input, conn, entered, Rc::clone(node)).await,
        // It said nothing, or too little to know which protocol an answer should be in.
        Ok(Err(_)) | Err(_) => {}
    }
}

/// Reads just as much as tells the two protocols apart; mostly that is the first byte.
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

async fn second<S>(stream: S, input: BytesMut, conn: Rc<ConnInfo>, entered: Entered, node: &Rc<Node>)
where
    S: http1::wire::Stream,
{
    let peer = conn.peer;
    if let Err(error) = http2::serve(stream, input, conn, entered, Rc::clone(node)).await {
        tracing::debug!(%peer, %error, "an HTTP/2 connection broke");
    }
}
