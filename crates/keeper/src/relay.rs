//! The relay: connections of applications to the endpoints that their records name, passed on byte
//! by byte. These are places outside, and sockets of databases on the node.
//!
//! It listens inside each sandbox at the addresses of those places (`plan`), or behind a socket
//! bound into it. It connects from the node's own network. It has one thread, so that heavy traffic
//! delays none of the keeper's verbs. An application's connections here end with its processes.
//! Conversations with databases are followed only to measure how long the application waits for
//! them. Where a record wants it, the keeper itself sends one query to a database (`ask`). Not
//! here: the sockets inside (`sandbox::outlet`), which instance has which places (`instances`).

pub(crate) mod ask;
mod counts;
mod endpoint;
mod forbidden;
mod names;
mod order;
mod outside;
mod own_sites;
mod pass;
mod plan;
pub(crate) mod query_tag;
pub(crate) mod socket;
mod tcp;
mod transport;
pub(crate) mod turns;
mod watched;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::Duration;

use nagaya_keeper_api::database_waits::DatabaseWaits;
use tokio::sync::{mpsc, watch};
use tokio::task::LocalSet;
use tokio::time::timeout;

use crate::mail::MailDesk;
use crate::metrics::KeeperMetrics;
use crate::options::MailOptions;

use self::counts::RelayCounts;
use self::order::{BusyCounter, RelayMode, RelayOrder};

pub use counts::EgressTraffic;
pub use forbidden::ForbiddenPlaces;
pub use order::EgressSockets;
pub use own_sites::OwnSites;
pub use plan::{EgressPlan, OWN_NAMES_MAX};
pub use socket::{SocketTarget, listen};

/// Maximum number of instances that wait for the relay's thread.
const ORDERS_MAX: usize = 4096;

/// Threads that look up names, so that one name without a response does not delay the others.
const RESOLVERS_MAX: usize = 8;

/// Maximum time until a pause begins. The relay's thread waits for nothing outside then.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// The keeper's end.
#[derive(Debug, Clone)]
pub struct Relay {
    orders: mpsc::Sender<RelayOrder>,
    forbidden: Arc<ForbiddenPlaces>,
    desk: Arc<MailDesk>,
}

/// The open sockets of one instance. Dropping it closes them, and all connections through them.
#[derive(Debug)]
pub struct EgressGuard {
    counts: Arc<RelayCounts>,
    tally: Arc<DatabaseWaits>,
    /// It may reach more than mail and its tenant's own sites.
    reaches_others: bool,
    wanted: watch::Sender<RelayMode>,
    busy: watch::Receiver<usize>,
}

/// A pause of connections that no image carries. It ends when this is dropped.
#[derive(Debug)]
pub struct RelayPause<'a>(&'a EgressGuard);

impl Drop for RelayPause<'_> {
    fn drop(&mut self) {
        self.0.wanted.send_replace(RelayMode::Pass);
    }
}

impl EgressGuard {
    /// Returns the counter of its waits for databases, for a reader. `None` if it may reach none.
    pub fn tally(&self) -> Option<OwnedFd> {
        // Without it only a figure is missing.
        if self.reaches_others { self.tally.reader().ok() } else { None }
    }

    /// Closes connections that no image carries, as the application would find them after a
    /// restore, and keeps them closed.
    pub async fn pause(&self) -> RelayPause<'_> {
        self.wanted.send_replace(RelayMode::Pause);
        let mut busy = self.busy.clone();
        if timeout(PAUSE_MAX, busy.wait_for(|busy| *busy == 0)).await.is_err() {
            tracing::debug!("the relay is late in closing connections: an image may not be possible");
        }
        RelayPause(self)
    }

    pub fn traffic(&self) -> EgressTraffic {
        let RelayCounts { open, taken, failed, last_failure, waited_us, queries } = &*self.counts;
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        EgressTraffic {
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
    /// Starts its thread, which ends with the last clone of this.
    pub fn start(metrics: KeeperMetrics, forbidden: ForbiddenPlaces, desk: MailDesk) -> io::Result<Self> {
        let desk = Arc::new(desk);
        let mail = Arc::clone(&desk);
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
            // The caller waits for this.
            let _ = begun.send(own);
            if may_serve {
                LocalSet::new().block_on(&runtime, pass::serve(incoming, metrics, judge, mail));
            }
        };
        thread::Builder::new().name("keeper-relay".into()).spawn(serve)?;
        begins.recv().map_err(io::Error::other)??;
        Ok(Self { orders, forbidden, desk })
    }

    /// Sets the endpoints of the cluster's store, `host:port`.
    pub fn set_etcd(&self, etcd: &[String]) {
        self.forbidden.set_etcd(etcd);
    }

    /// Sets the limits of mail.
    pub fn set_mail(&self, options: &MailOptions) {
        self.desk.set_options(options);
    }

    /// Opens the sockets of one instance. Waits for nothing outside.
    pub fn open(&self, ways: EgressSockets) -> io::Result<EgressGuard> {
        let (sender, wanted) = watch::channel(RelayMode::Pass);
        let (count, counted) = watch::channel(0);
        let busy = BusyCounter(Arc::new(count)).begin();
        let (counts, tally) = (Arc::new(RelayCounts::default()), Arc::new(DatabaseWaits::new()?));
        let reaches_others = !ways.places.is_empty() || !ways.sockets.is_empty() || ways.outside.is_some();
        let order = RelayOrder { ways, counts: Arc::clone(&counts), tally: Arc::clone(&tally), wanted, busy };
        self.orders
            .try_send(order)
            .map_err(|_| io::Error::new(io::ErrorKind::WouldBlock, "the relay is busy"))?;
        Ok(EgressGuard { counts, tally, reaches_others, wanted: sender, busy: counted })
    }
}
