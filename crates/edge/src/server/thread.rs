//! Runs one thread of the edge: its runtime and its listening sockets.
//!
//! Not here: a connection (`connection`), the thread's state (`node`), the process (`lib`).

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nagaya_keeper_api::client::KeeperClient;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::LocalSet;
use tokio::time::{sleep, timeout};

use crate::admission::{admit, cpu_yield};
use crate::cluster::peers::acceptor::PeerAcceptor;
use crate::cluster::peers::images::take;
use crate::cluster::peers::images::take::ImageFetcher;
use crate::http::networks::parse_networks;
use crate::http::tls::ThreadTls;
use crate::request::placement::give_up_leaving;
use crate::rules::follow::follow as follow_rules;
use crate::server::connection;
use crate::server::connection::ListenerConfig;
use crate::server::node::ThreadContext;
use crate::server::shared::SharedContext;

/// Pause of accepting when no descriptor is left. The clients wait in the kernel's queue
/// meanwhile.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// One in this many descriptors is reserved for connected clients: for their files, backends and
/// programs. New clients wait in the kernel's queue meanwhile, too.
const RESERVE: u64 = 4;

/// Interval of the check for idle resources.
const TEND_EVERY: Duration = Duration::from_secs(1);

/// One listening socket of this thread.
pub struct ListenSocket {
    pub fd: OwnedFd,
    pub tls: bool,
    /// Proxies whose PROXY headers are accepted. If empty, those are the trusted proxies. `None`
    /// if no PROXY protocol is used.
    pub proxies: Option<Vec<String>>,
}

/// Orders of the main thread to all threads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ThreadOrders {
    /// Grows when settings or log files changed.
    pub settings: u64,
    pub drain: bool,
}

/// Start parameters of one thread.
pub struct ThreadStart {
    pub sockets: Vec<ListenSocket>,
    /// Socket on which other nodes of a cluster forward requests.
    pub peers: Option<OwnedFd>,
    pub orders: watch::Receiver<ThreadOrders>,
    /// One thread of the process also tends the shared state.
    pub tends_shared: bool,
}

/// Runs one thread until it has drained.
pub fn run(shared: Arc<SharedContext>, thread: ThreadStart) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    LocalSet::new().block_on(&runtime, async move {
        let keeper = KeeperClient::later(&shared.options.get().keeper);
        let node = Rc::new(ThreadContext::new(Arc::clone(&shared), Rc::clone(&keeper)));
        let tls = Rc::new(ThreadTls::new(Rc::clone(&keeper), Arc::clone(&shared.metrics)));
        // A missing one is opened by the first request that needs it.
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
            let entrance = ListenerConfig { tls: socket.tls.then(|| Rc::clone(&tls)), proxies };
            acceptors.push(tokio::task::spawn_local(accept(listener, Rc::new(entrance), Rc::clone(&node))));
        }
        let passed_on = PeerAcceptor::new(
            Arc::clone(&shared.cluster),
            Arc::clone(&shared.metrics),
            Rc::clone(&node),
            Rc::clone(&keeper),
        );
        if let Some(fd) = thread.peers {
            let listener = std::net::TcpListener::from(fd);
            listener.set_nonblocking(true)?;
            let accepting = Rc::clone(&passed_on).run(TcpListener::from_std(listener)?);
            acceptors.push(tokio::task::spawn_local(accepting));
        }
        let turns = Rc::clone(&node.turns);
        tokio::task::spawn_local(async move { turns.count().await });
        let tending = tokio::task::spawn_local(tend(Rc::clone(&node), thread.tends_shared));
        let applied =
            tokio::task::spawn_local(follow_rules(Rc::clone(&node.services.rules), thread.tends_shared));
        let leaving = tokio::task::spawn_local(give_up_leaving(
            Arc::clone(&shared.cluster),
            Rc::clone(&node.services.backends.instances),
        ));
        if thread.tends_shared {
            tokio::task::spawn_local(Arc::clone(&shared.php).tend());
            tokio::task::spawn_local(admit::tend(Arc::clone(&shared.lanes), Arc::clone(&shared.tickets)));
            tokio::task::spawn_local(cpu_yield::keep(Arc::clone(&shared.lanes), Rc::clone(&keeper)));
            tokio::task::spawn_local(take::follow(image_fetcher(&node)));
        }
        follow(&node, &passed_on, thread.orders).await;
        // Draining: no new connections, and working ones end with their response.
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
        applied.abort();
        leaving.abort();
        node.tend();
        Ok(())
    })
}

fn image_fetcher(node: &ThreadContext) -> ImageFetcher {
    let placer = &node.services.placer;
    ImageFetcher {
        keeper: Rc::clone(&node.keeper),
        pool: Rc::clone(&placer.peers),
        cluster: Arc::clone(&placer.cluster),
        metrics: Arc::clone(&placer.metrics),
    }
}

/// Carries out orders until the one to drain.
async fn follow(
    node: &ThreadContext,
    passed_on: &PeerAcceptor<ThreadContext>,
    mut orders: watch::Receiver<ThreadOrders>,
) {
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

async fn tend(node: Rc<ThreadContext>, tends_shared: bool) {
    for round in 0.. {
        sleep(TEND_EVERY).await;
        node.tend();
        if tends_shared {
            node.shared.networks.sweep(round);
        }
    }
}

async fn accept(listener: TcpListener, entrance: Rc<ListenerConfig>, node: Rc<ThreadContext>) {
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

/// Returns the first descriptor of the reserve. The kernel gives out the lowest free number, so
/// higher ones mean that the reserve is in use.
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

/// Returns whether it is an error of the accepted connection and not of the listener (accept(2)).
fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind as E;
    matches!(error.kind(), E::ConnectionAborted | E::ConnectionReset | E::Interrupted | E::NetworkUnreachable)
}
