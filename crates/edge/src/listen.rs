//! One thread of the edge: its runtime and its listening sockets.
//!
//! Not here: a connection (`connection`), what a thread has (`node`), the process (`lib`).

mod connection;

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nagaya_keeper::client::Keeper;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::LocalSet;
use tokio::time::{sleep, timeout};

use crate::admission;
use crate::clients::limits::parse_networks;
use crate::node::Node;
use crate::peers::acceptor::Acceptor;
use crate::peers::images;
use crate::place;
use crate::rules;
use crate::shared::Shared;
use crate::tls::Tls;
use connection::Entrance;

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
    /// Whose PROXY headers are accepted; if empty, those of trusted proxies. None: there are none.
    pub proxies: Option<Vec<String>>,
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
            let proxies = socket.proxies.as_deref().map(parse_networks);
            let entrance = Entrance { tls: socket.tls.then(|| Rc::clone(&tls)), proxies };
            acceptors.push(tokio::task::spawn_local(accept(listener, Rc::new(entrance), Rc::clone(&node))));
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
        let tending = tokio::task::spawn_local(tend(Rc::clone(&node), thread.tends_shared));
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

async fn tend(node: Rc<Node>, tends_shared: bool) {
    for round in 0.. {
        sleep(TEND_EVERY).await;
        node.tend();
        if tends_shared {
            node.shared.networks.sweep(round);
        }
    }
}

async fn accept(listener: TcpListener, entrance: Rc<Entrance>, node: Rc<Node>) {
    let reserved = first_reserved();
    let mut newest = 0;
    loop {
        if newest >= reserved {
            wait_for_room(&listener, reserved).await;
        }
        match listener.accept().await {
            Ok((stream, peer)) => {
                newest = stream.as_raw_fd();
                connection::begin(stream, peer, &entrance, &node);
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
