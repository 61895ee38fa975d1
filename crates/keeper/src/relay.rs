//! The relay: connections of applications to what their records name, passed on byte by byte: places outside, and sockets
//! of databases on the node.
//!
//! It listens inside each sandbox at the addresses of those places (`plan`), or behind a socket that is bound into it, and
//! connects from the node's own network. It has one thread, so that however much passes holds up none of the keeper's verbs. What
//! an application has open here ends with its processes. Conversations with databases are listened to as far as it takes to
//! know how long the application waits for them. Not here: the sockets inside (`sandbox::outlet`), who has which places
//! (`instances`).

mod forbidden;
mod names;
mod outside;
mod pass;
mod place;
mod plan;
pub(crate) mod socket;
mod tcp;
pub(crate) mod turns;
mod watched;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::Duration;

use nagaya_cmdb::record::Endpoint;
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tokio::task::LocalSet;
use tokio::time::timeout;

use crate::metrics::Metrics;
use crate::sandbox::Capture;
use crate::tally::Tally;

pub use forbidden::ForbiddenPlaces;
pub use plan::Plan;
pub use socket::{Socket, listen};

/// Connections at once: of one instance, and of the node. Each takes two descriptors and two buffers.
pub const PER_INSTANCE_MAX: u64 = 256;
const CONNECTIONS_MAX: u64 = 4096;

/// Instances that may wait to be taken up.
const ORDERS_MAX: usize = 4096;

/// Threads that look up names, so that one name that nobody answers for does not hold up the others.
const RESOLVERS_MAX: usize = 8;

/// How long a pause may take to begin. The relay's thread waits for nothing outside then.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// The keeper's end.
#[derive(Debug, Clone)]
pub struct Relay {
    orders: mpsc::Sender<Order>,
    forbidden: Arc<ForbiddenPlaces>,
}

/// What one instance is to reach, and the sockets that listen for it there. Not blocking.
#[derive(Default)]
pub struct Ways {
    pub places: Vec<(OwnedFd, Endpoint)>,
    pub sockets: Vec<(OwnedFd, Socket)>,
    /// All else.
    pub outside: Option<Capture>,
    /// Ports of the node's own addresses that are outside, too.
    pub own_ports: Vec<u16>,
    /// Ports of the cluster's other nodes that are outside, besides those.
    pub shared_ports: Vec<u16>,
}

struct Order {
    ways: Ways,
    counts: Arc<Counts>,
    tally: Arc<Tally>,
    /// Its sender goes with the instance.
    wanted: watch::Receiver<Wanted>,
    /// Until it is taken up.
    busy: Busy,
}

/// What the keeper wants of connections that no image carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wanted {
    Pass,
    /// Those there are are closed, and no other is taken: who connects waits.
    Pause,
}

/// Who may have such a connection open, or take one. Each value counts.
#[derive(Debug)]
struct Busy(Idle);

/// The same, not counted.
#[derive(Debug, Clone)]
struct Idle(Arc<watch::Sender<usize>>);

impl Idle {
    fn begin(&self) -> Busy {
        self.0.send_modify(|busy| *busy += 1);
        Busy(self.clone())
    }
}

impl Busy {
    fn rest(self) -> Idle {
        self.0.clone()
    }
}

impl Clone for Busy {
    fn clone(&self) -> Self {
        self.0.begin()
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.0.send_modify(|busy| *busy -= 1);
    }
}

/// The open places of one instance. Dropping it closes them, and all connections through them.
#[derive(Debug)]
pub struct Outlets {
    counts: Arc<Counts>,
    tally: Arc<Tally>,
    wanted: watch::Sender<Wanted>,
    busy: watch::Receiver<usize>,
}

/// A pause of what no image carries. It ends when this is dropped.
#[derive(Debug)]
pub struct Pause<'a>(&'a Outlets);

impl Drop for Pause<'_> {
    fn drop(&mut self) {
        self.0.wanted.send_replace(Wanted::Pass);
    }
}

/// What went through the places of one instance.
#[derive(Debug, Default)]
struct Counts {
    open: AtomicU64,
    taken: AtomicU64,
    failed: AtomicU64,
    last_failure: Mutex<Option<String>>,
    waited_us: AtomicU64,
    queries: AtomicU64,
}

/// The same, as it is shown.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Traffic {
    pub open: u64,
    pub taken: u64,
    pub failed: u64,
    pub last_failure: Option<String>,
    /// With a question to a database open, microseconds.
    pub database_us: u64,
    pub queries: u64,
}

impl Counts {
    fn failed(&self, why: String) {
        self.failed.fetch_add(1, Ordering::Relaxed);
        *self.last_failure.lock() = Some(why);
    }
}

impl Outlets {
    /// For who is to know how long it waited for databases.
    pub fn tally(&self) -> io::Result<OwnedFd> {
        self.tally.reader()
    }

    /// Closes what no image carries, as the application would find it after its image has come back, and keeps it closed.
    pub async fn pause(&self) -> Pause<'_> {
        self.wanted.send_replace(Wanted::Pause);
        let mut busy = self.busy.clone();
        if timeout(PAUSE_MAX, busy.wait_for(|busy| *busy == 0)).await.is_err() {
            tracing::debug!("the relay is late in closing connections: an image may not be possible");
        }
        Pause(self)
    }

    pub fn traffic(&self) -> Traffic {
        let Counts { open, taken, failed, last_failure, waited_us, queries } = &*self.counts;
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Traffic {
            open: read(open),
            taken: read(taken),
            failed: read(failed),
            last_failure: last_failure.lock().clone(),
            database_us: read(waited_us),
            queries: read(queries),
        }
    }
}

impl Relay {
    /// Starts its thread, which ends with the last of these.
    pub fn start(metrics: Metrics, forbidden: ForbiddenPlaces) -> io::Result<Self> {
        let forbidden = Arc::new(forbidden);
        let judge = Arc::clone(&forbidden);
        let (orders, incoming) = mpsc::channel(ORDERS_MAX);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(RESOLVERS_MAX)
            .build()?;
        let (begun, begins) = sync_channel(1);
        let serve = move || {
            let is_root = rustix::process::geteuid().is_root();
            let own = if is_root { socket::write_as_nobody() } else { Ok(()) };
            let may_serve = own.is_ok();
            // Whoever starts it waits for this.
            let _ = begun.send(own);
            if may_serve {
                LocalSet::new().block_on(&runtime, pass::serve(incoming, metrics, judge));
            }
        };
        thread::Builder::new().name("keeper-relay".into()).spawn(serve)?;
        begins.recv().map_err(io::Error::other)??;
        Ok(Self { orders, forbidden })
    }

    /// The store of the cluster has these endpoints from now on, `host:port`.
    pub fn set_etcd(&self, etcd: &[String]) {
        self.forbidden.set_etcd(etcd);
    }

    /// Opens the ways of one instance. Does not wait for anything outside.
    pub fn open(&self, ways: Ways) -> io::Result<Outlets> {
        let (sender, wanted) = watch::channel(Wanted::Pass);
        let (count, counted) = watch::channel(0);
        let busy = Idle(Arc::new(count)).begin();
        let (counts, tally) = (Arc::new(Counts::default()), Arc::new(Tally::new()?));
        let order = Order { ways, counts: Arc::clone(&counts), tally: Arc::clone(&tally), wanted, busy };
        self.orders
            .try_send(order)
            .map_err(|_| io::Error::new(io::ErrorKind::WouldBlock, "the relay is busy"))?;
        Ok(Outlets { counts, tally, wanted: sender, busy: counted })
    }
}
