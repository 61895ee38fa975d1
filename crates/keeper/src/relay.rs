//! The relay: connections of applications to what their records name outside, passed on byte by byte.
//!
//! It listens inside each sandbox at the addresses of those places (`plan`), and connects outside from the node's own
//! network. It has one thread, so that however much passes holds up none of the keeper's verbs. What an application has
//! open here ends with its processes. Conversations with databases are listened to as far as it takes to know how long the
//! application waits for them. Not here: the sockets inside (`sandbox::outlet`), who has which places
//! (`instances`).

mod pass;
mod plan;
mod turns;
mod watched;

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use nagaya_cmdb::record::Endpoint;
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tokio::task::LocalSet;

use crate::metrics::Metrics;
use crate::tally::Tally;

pub use plan::Plan;

/// Connections at once: of one instance, and of the node. Each takes two descriptors and two buffers.
pub const PER_INSTANCE_MAX: u64 = 256;
const CONNECTIONS_MAX: u64 = 4096;

/// Instances that may wait to be taken up.
const ORDERS_MAX: usize = 4096;

/// Threads that look up names, so that one name that nobody answers for does not hold up the others.
const RESOLVERS_MAX: usize = 8;

/// The keeper's end.
#[derive(Debug, Clone)]
pub struct Relay {
    orders: mpsc::Sender<Order>,
}

/// What one instance is to reach.
#[derive(Debug)]
struct Order {
    listeners: Vec<(OwnedFd, Endpoint)>,
    counts: Arc<Counts>,
    tally: Arc<Tally>,
    /// Its sender goes with the instance.
    gone: watch::Receiver<()>,
}

/// The open places of one instance. Dropping it closes them, and all connections through them.
#[derive(Debug)]
pub struct Outlets {
    counts: Arc<Counts>,
    tally: Arc<Tally>,
    _gone: watch::Sender<()>,
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
    pub fn start(metrics: Metrics) -> io::Result<Self> {
        let (orders, incoming) = mpsc::channel(ORDERS_MAX);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(RESOLVERS_MAX)
            .build()?;
        let serve = move || LocalSet::new().block_on(&runtime, pass::serve(incoming, metrics));
        thread::Builder::new().name("keeper-relay".into()).spawn(serve)?;
        Ok(Self { orders })
    }

    /// Opens the places of one instance: `listen` makes the sockets inside, one for each address. Does not wait for
    /// anything outside.
    pub fn open(
        &self,
        plan: &Plan,
        listen: impl FnOnce(&[SocketAddr]) -> io::Result<Vec<OwnedFd>>,
    ) -> io::Result<Outlets> {
        let listeners = listen(&plan.addresses())?.into_iter().zip(plan.endpoints()).collect();
        let (sender, gone) = watch::channel(());
        let (counts, tally) = (Arc::new(Counts::default()), Arc::new(Tally::new()?));
        let order = Order { listeners, counts: Arc::clone(&counts), tally: Arc::clone(&tally), gone };
        self.orders
            .try_send(order)
            .map_err(|_| io::Error::new(io::ErrorKind::WouldBlock, "the relay is busy"))?;
        Ok(Outlets { counts, tally, _gone: sender })
    }
}
