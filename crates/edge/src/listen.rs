//! One thread of the edge: its runtime, its listening sockets, and each connection until its protocol is known.
//!
//! Not here: the protocols (`http1`, `http2`, `tls`), what a thread has (`node`), the process (`lib`).

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use nagaya_keeper::client::Keeper;
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::LocalSet;
use tokio::time::{sleep, timeout};

use crate::admission;
use crate::http1;
use crate::http2;
use crate::message::ConnInfo;
use crate::node::Node;
use crate::peers::acceptor::Acceptor;
use crate::peers::images;
use crate::place;
use crate::rules;
use crate::shared::Shared;
use crate::tls::{Alpn, Tls};

/// What an HTTP/2 client with prior knowledge says first (RFC 9113 section 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// When no descriptor is left, accepting pauses this long; the clients wait in the kernel's queue meanwhile.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// One in so many descriptors is left to those who are connected: for their files, backends and programs. New
/// clients wait in the kernel's queue meanwhile, too.
const RESERVE: u64 = 4;

/// How often idle things are looked through.
const TEND_EVERY: Duration = Duration::from_secs(1);

/// One listening socket as this thread has it.
pub struct Socket {
    pub fd: OwnedFd,
    pub tls: bool,
}

/// What the main thread tells all threads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Orders {
    /// Raised when settings or log files changed.
    pub settings: u64,
    pub drain: bool,
}

/// What one thread is given.
pub struct Thread {
    pub sockets: Vec<Socket>,
    /// Where other nodes of a cluster pass requests on.
    pub peers: Option<OwnedFd>,
    pub orders: watch::Receiver<Orders>,
    /// One thread of the process also tends what all share.
    pub tends_shared: bool,
}

/// Runs one thread until it has drained.
pub fn run(shared: Arc<Shared>, thread: Thread) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    LocalSet::new().block_on(&runtime, async move {
        let keeper = Keeper::later(&shared.options().keeper);
        let node = Rc::new(Node::new(Arc::clone(&shared), Rc::clone(&keeper)));
        let tls = Rc::new(Tls::new(Rc::clone(&keeper), Arc::clone(&shared.metrics)));
        // One that is not there yet is looked for by the first request that needs it.
        tokio::task::spawn_local({
            let keeper = Rc::clone(&keeper);
            async move { keeper.greet().await }
        });
        let mut acceptors = Vec::with_capacity(thread.sockets.len());
        for socket in thread.sockets {
            let listener = std::net::TcpListener::from(socket.fd);
            listener.set_nonblocking(true)?;
            let listener = TcpListener::from_std(listener)?;
            let tls = socket.tls.then(|| Rc::clone(&tls));
            acceptors.push(tokio::task::spawn_local(accept(listener, tls, Rc::clone(&node))));
        }
        let passed_on = Acceptor::new(Arc::clone(&shared), Rc::clone(&node), Rc::clone(&keeper));
        if let Some(fd) = thread.peers {
            let listener = std::net::TcpListener::from(fd);
            listener.set_nonblocking(true)?;
            let accepting = Rc::clone(&passed_on).run(TcpListener::from_std(listener)?);
            acceptors.push(tokio::task::spawn_local(accepting));
        }
        let turns = Rc::clone(&node.turns);
        tokio::task::spawn_local(async move { turns.count().await });
        let tending = tokio::task::spawn_local(tend(Rc::clone(&node)));
        let ruling = tokio::task::spawn_local(rules::follow(Rc::clone(&node), thread.tends_shared));
        let leaving = tokio::task::spawn_local(place::give_up_leaving(Rc::clone(&node)));
        if thread.tends_shared {
            tokio::task::spawn_local(Arc::clone(&shared.php).tend());
            tokio::task::spawn_local(admission::tend(Rc::clone(&node)));
            tokio::task::spawn_local(admission::keep_way(Rc::clone(&node)));
            tokio::task::spawn_local(images::follow(Rc::clone(&node)));
        }
        follow(&node, &passed_on, thread.orders).await;
        // Draining: no new connections, and those at work end with their answer.
        acceptors.iter().for_each(tokio::task::JoinHandle::abort);
        node.connections.drain();
        let patience = Duration::from_millis(node.limits().drain_ms);
        let left = async {
            while !node.connections.is_empty() {
                sleep(Duration::from_millis(10)).await;
            }
        };
        if timeout(patience, left).await.is_err() {
            tracing::warn!(connections = node.connections.len(), "gave up waiting for connections to end");
        }
        tending.abort();
        ruling.abort();
        leaving.abort();
        node.tend();
        Ok(())
    })
}

/// Carries out orders until the one to drain.
async fn follow(node: &Node, passed_on: &Acceptor<Node>, mut orders: watch::Receiver<Orders>) {
    let mut settings = orders.borrow_and_update().settings;
    loop {
        let now = *orders.borrow_and_update();
        if now.settings != settings {
            settings = now.settings;
            node.refresh();
            passed_on.refresh();
        }
        if now.drain || orders.changed().await.is_err() {
            return;
        }
    }
}

async fn tend(node: Rc<Node>) {
    loop {
        sleep(TEND_EVERY).await;
        node.tend();
    }
}

async fn accept(listener: TcpListener, tls: Option<Rc<Tls>>, node: Rc<Node>) {
    let reserved = first_reserved();
    let mut newest = 0;
    loop {
        if newest >= reserved {
            wait_for_room(&listener, reserved).await;
        }
        match listener.accept().await {
            Ok((stream, peer)) => {
                newest = stream.as_raw_fd();
                if node.connections.len() >= node.limits().connections {
                    // Closing at once tells a balancer to go elsewhere; a response would cost what is short.
                    node.shared.metrics.connections_refused.inc();
                    continue;
                }
                node.shared.metrics.connections_accepted.inc();
                tokio::task::spawn_local(connection(stream, peer, tls.clone(), Rc::clone(&node)));
            }
            Err(error) if is_of_one_connection(&error) => {}
            Err(error) => {
                tracing::warn!(code = "NGY0422", %error, "accepting pauses");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// The kernel gives out the lowest free number, so numbers from this one on mean that the reserve is in use.
fn first_reserved() -> RawFd {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    limit.and_then(|max| RawFd::try_from(max - max / RESERVE).ok()).unwrap_or(RawFd::MAX)
}

async fn wait_for_room(listener: &TcpListener, reserved: RawFd) {
    let lowest_free = || rustix::io::fcntl_dupfd_cloexec(listener, 0).map(|fd| fd.as_raw_fd());
    let mut said = false;
    while lowest_free().map_or(true, |fd| fd >= reserved) {
        if !said {
            tracing::warn!(code = "NGY0422", "accepting pauses: nearly all descriptors are in use");
            said = true;
        }
        sleep(ACCEPT_PAUSE).await;
    }
}

/// accept(2): errors of the connection that was to be accepted, not of the listener.
fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind as E;
    matches!(error.kind(), E::ConnectionAborted | E::ConnectionReset | E::Interrupted | E::NetworkUnreachable)
}

async fn connection(stream: TcpStream, peer: SocketAddr, tls: Option<Rc<Tls>>, node: Rc<Node>) {
    let open = &node.shared.metrics.connections_open;
    open.inc();
    // Without it the last segment of an answer may wait for the acknowledgement of the one before.
    let _ = stream.set_nodelay(true);
    if let Ok(local) = stream.local_addr() {
        match tls {
            Some(tls) => encrypted(stream, peer, local, &tls, &node).await,
            None => plain(stream, ConnInfo { peer, local, tls: None, carried: None }, &node).await,
        }
    }
    open.dec();
}

async fn encrypted(stream: TcpStream, peer: SocketAddr, local: SocketAddr, tls: &Tls, node: &Rc<Node>) {
    let entered = node.connections.enter();
    let patience = Duration::from_millis(node.limits().handshake_ms);
    let accepted = timeout(patience, tls.accept(stream)).await;
    drop(entered);
    let (stream, info, alpn) = match accepted {
        Ok(Ok(accepted)) => accepted,
        Ok(Err(error)) => return tracing::debug!(%peer, %error, "a TLS handshake failed"),
        Err(_) => return tracing::debug!(%peer, "a TLS handshake took too long"),
    };
    let conn = Rc::new(ConnInfo { peer, local, tls: Some(info), carried: None });
    match alpn {
        Alpn::Http2 => second(stream, BytesMut::new(), conn, node).await,
        Alpn::Http1 => http1::connection::serve(stream, BytesMut::new(), conn, Rc::clone(node)).await,
    }
}

async fn plain(mut stream: TcpStream, conn: ConnInfo, node: &Rc<Node>) {
    let conn = Rc::new(conn);
    if !node.shared.options().h2c {
        return http1::connection::serve(stream, BytesMut::new(), conn, Rc::clone(node)).await;
    }
    let entered = node.connections.enter();
    let patience = Duration::from_millis(node.limits().head_ms);
    let mut input = BytesMut::new();
    let known = timeout(patience, speaks_http2(&mut stream, &mut input)).await;
    drop(entered);
    match known {
        Ok(Ok(true)) => second(stream, input, conn, node).await,
        Ok(Ok(false)) => http1::connection::serve(stream, input, conn, Rc::clone(node)).await,
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

async fn second<S>(stream: S, input: BytesMut, conn: Rc<ConnInfo>, node: &Rc<Node>)
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + 'static,
{
    let peer = conn.peer;
    if let Err(error) = http2::serve(stream, input, conn, Rc::clone(node)).await {
        tracing::debug!(%peer, %error, "an HTTP/2 connection broke");
    }
}
