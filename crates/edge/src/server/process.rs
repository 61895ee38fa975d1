//! Runs the edge's process. It starts threads once all sites are known, and sends them every
//! change until it has drained.
//!
//! Not here: a thread (`server::thread`), the other end of the feed (`nagaya`).

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread::JoinHandle;

use nagaya_admission::LaneReport;
use nagaya_base::AnchoredClock;
use nagaya_records::cell::NamedCell;
use nagaya_records::feed::{FeedQuery, FetchResult, FromSupervisor, PlaceReply, ToSupervisor};
use nagaya_records::instance::{AppLoad, DemandReport};
use nagaya_records::record::RecordChange;
use nagaya_records::{TenantName, feed};
use nagaya_telemetry::MetricPage;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::admission::lanes::EdgeLane;
use crate::admission::{explain, exposition, tickets};
use crate::cluster::peers::images::orders::ImageOrder;
use crate::cluster::peers::probe;
use crate::cluster::peers::probe::vouch::VouchOrder;
use crate::cluster::wait_estimate;
use crate::metrics::EdgeMetrics;
use crate::options::EdgeConfig;
use crate::record::access_log::AccessLog;
use crate::record::receipt;
use crate::server::shared::SharedContext;
use crate::server::thread;
use crate::server::thread::{ListenSocket, ThreadOrders, ThreadStart};

/// Maximum number of rows of each kind for `nagaya top`.
const ROWS_MAX: usize = 1000;

/// One address, with a socket for each thread.
pub struct Listener {
    pub address: String,
    pub tls: bool,
    /// Proxies whose PROXY headers are accepted. If empty, those are the trusted proxies. `None`
    /// if no PROXY protocol is used.
    pub proxies: Option<Vec<String>>,
    pub sockets: Vec<OwnedFd>,
}

/// Start parameters from the supervisor.
pub struct EdgeStart {
    pub listeners: Vec<Listener>,
    pub feed: UnixStream,
    /// Directory of tickets. `None` if none are issued.
    pub tickets: Option<OwnedFd>,
    /// Directory of large bodies. `None` if they are refused.
    pub spool: Option<OwnedFd>,
    /// The node's clock. A restarted edge keeps the promises of the previous one.
    pub anchored_clock: AnchoredClock,
    /// Sockets for other nodes of a cluster. `None` if this node can be in none.
    pub peers: Option<PeerSockets>,
}

/// Sockets for other nodes, bound to one address and port.
pub struct PeerSockets {
    /// Listening, TCP, one for each thread.
    pub streams: Vec<OwnedFd>,
    /// UDP.
    pub probes: OwnedFd,
}

/// Runs until the order to drain, or until the supervisor has ended.
pub fn run(start: EdgeStart) -> ExitCode {
    match EdgeProcess::begin(start).and_then(EdgeProcess::follow) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(code = "NGY0423", %error, "the edge cannot continue");
            ExitCode::FAILURE
        }
    }
}

struct EdgeProcess {
    shared: Arc<SharedContext>,
    feed: UnixStream,
    /// Its other direction, which several threads write to.
    feed_up: Arc<Mutex<UnixStream>>,
    /// Until the first commit: sockets for other nodes.
    peers: Option<PeerSockets>,
    /// Until the first commit: listeners of the threads.
    waiting: Vec<Listener>,
    threads: Vec<JoinHandle<io::Result<()>>>,
    orders: watch::Sender<ThreadOrders>,
    /// Changes that wait for their commit.
    pending: Vec<RecordChange>,
}

impl EdgeProcess {
    fn begin(mut start: EdgeStart) -> io::Result<Self> {
        let Some(FromSupervisor::Options(options)) = feed::read(&mut start.feed)? else {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the feed does not begin with settings"));
        };
        let options: EdgeConfig = serde_json::from_value(options)?;
        let metrics = Arc::new(EdgeMetrics::new());
        let log = open_log(&options, &metrics);
        let shared = Arc::new(SharedContext::new(options, log, metrics, start.anchored_clock, start.spool));
        if let Some(directory) = start.tickets {
            tickets::open(&shared.tickets, &shared.lanes, directory);
        }
        let feed_up = Arc::new(Mutex::new(start.feed.try_clone()?));
        let process = Self {
            shared,
            feed: start.feed,
            feed_up,
            peers: start.peers,
            waiting: start.listeners,
            threads: Vec::new(),
            orders: watch::Sender::new(ThreadOrders::default()),
            pending: Vec::new(),
        };
        process.open_desk()?;
        Ok(process)
    }

    fn follow(mut self) -> io::Result<()> {
        loop {
            match feed::read(&mut self.feed)? {
                Some(FromSupervisor::Options(options)) => self.options(serde_json::from_value(options)?)?,
                // Nothing is served before the first commit, so the first load needs no second
                // copy in memory.
                Some(FromSupervisor::Apply(changes)) if self.threads.is_empty() => self.apply(changes)?,
                Some(FromSupervisor::Apply(changes)) => self.pending.extend(changes),
                Some(FromSupervisor::Commit { revision }) => self.commit(revision)?,
                Some(FromSupervisor::ReopenLogs) => match self.shared.log() {
                    Some(log) => log.reopen(),
                    None => self.open_log(),
                },
                Some(FromSupervisor::Ask { tag, question }) => self.answer(tag, question)?,
                Some(FromSupervisor::Drain) => return self.drain(),
                // Instances are the keeper's.
                Some(FromSupervisor::Exec(_)) => {}
                Some(FromSupervisor::Authority { until_ns }) => self.shared.cluster.lease.extend(until_ns),
                Some(FromSupervisor::Placed { tag, placed }) => self.placed(tag, placed),
                Some(FromSupervisor::Vouch { round, members }) => {
                    self.vouch(VouchOrder::Ask { round, members })
                }
                Some(FromSupervisor::VouchAnswer { tag, moved }) => {
                    self.vouch(VouchOrder::Vouch { tag, moved })
                }
                Some(FromSupervisor::Wakes { elsewhere }) => {
                    self.shared.cluster.outlook.lock().told(elsewhere as usize)
                }
                Some(FromSupervisor::Leaving { site, on }) => self.shared.cluster.set_leaving(site, on),
                None => {
                    tracing::warn!("the supervisor is gone");
                    return self.drain();
                }
            }
        }
    }

    /// Enables questions about the place of a site, in a cluster.
    fn open_desk(&self) -> io::Result<()> {
        let cluster = &self.shared.cluster;
        if !cluster.is_member() || cluster.placement_client.is_open() {
            return Ok(());
        }
        let feed = Arc::clone(&self.feed_up);
        cluster.placement_client.open(move |question| feed::write(&mut *feed.lock(), question))
    }

    fn vouch(&self, order: VouchOrder) {
        self.shared.cluster.peers.probes.vouch(order);
    }

    /// The placement is known before any waiting request continues.
    fn placed(&self, tag: u64, placed: PlaceReply) {
        if let PlaceReply::At { placement, .. } = &placed {
            self.shared.cluster.placed(placement.clone());
        }
        self.shared.cluster.placement_client.answer(tag, &placed);
    }

    fn options(&mut self, options: EdgeConfig) -> io::Result<()> {
        let before = self.shared.options.get();
        let is_other_log = before.log != options.log;
        self.shared.set_options(options);
        if is_other_log || self.shared.log().is_none() {
            self.open_log();
        }
        self.orders.send_modify(|orders| orders.settings += 1);
        self.open_desk()
    }

    /// Opens the log of the settings, for all threads. Tries again after an obstacle was removed.
    fn open_log(&mut self) {
        self.shared.set_log(open_log(&self.shared.options.get(), &self.shared.metrics));
        self.orders.send_modify(|orders| orders.settings += 1);
    }

    fn apply(&self, changes: impl IntoIterator<Item = RecordChange>) -> io::Result<()> {
        // The supervisor restarts a process whose records are inconsistent, with everything.
        self.shared.apply(changes).map_err(io::Error::other)
    }

    fn commit(&mut self, revision: u64) -> io::Result<()> {
        let changes = std::mem::take(&mut self.pending);
        for change in &changes {
            if let RecordChange::DropTenant(name) = change {
                self.shared.php.forget(name);
            }
        }
        self.apply(changes)?;
        self.shared.set_revision(revision);
        if self.threads.is_empty() {
            self.start_threads()?;
        }
        feed::write(&mut *self.feed_up.lock(), &ToSupervisor::Ready { revision })
    }

    /// Starts the threads. Thread `n` gets the n-th socket of each address.
    fn start_threads(&mut self) -> io::Result<()> {
        let mut of_thread: Vec<Vec<ListenSocket>> = Vec::new();
        for listener in std::mem::take(&mut self.waiting) {
            tracing::info!(address = listener.address, tls = listener.tls, "listening");
            for (n, fd) in listener.sockets.into_iter().enumerate() {
                if of_thread.len() <= n {
                    of_thread.push(Vec::new());
                }
                of_thread[n].push(ListenSocket { fd, tls: listener.tls, proxies: listener.proxies.clone() });
            }
        }
        let mut peers = Vec::new();
        if let Some(sockets) = self.peers.take() {
            peers = sockets.streams;
            probe::start(Arc::clone(&self.shared.cluster), sockets.probes)?;
        }
        let mut peers = peers.into_iter();
        for (n, sockets) in of_thread.into_iter().enumerate() {
            let orders = self.orders.subscribe();
            let thread = ThreadStart { sockets, peers: peers.next(), orders, tends_shared: n == 0 };
            let shared = Arc::clone(&self.shared);
            let named = std::thread::Builder::new().name(format!("edge-{n}"));
            self.threads.push(named.spawn(move || thread::run(shared, thread))?);
        }
        Ok(())
    }

    fn answer(&mut self, tag: u64, question: FeedQuery) -> io::Result<()> {
        let text = match question {
            FeedQuery::Metrics => {
                let mut page = MetricPage::default();
                self.shared.metrics.expose_tenants(&mut page);
                self.shared.receipts.turnarounds().expose(&mut page);
                exposition::expose(self.shared.lanes.explain(), &mut page);
                self.shared.cluster.peers.tallies.expose(&mut page);
                self.shared.metrics.encode() + &page.encode()
            }
            FeedQuery::Status => self.status().to_string(),
            FeedQuery::Requests => self.requests().to_string(),
            FeedQuery::Load => serde_json::to_string(&self.needed())?,
            FeedQuery::Busy => {
                let requests = self.shared.metrics.placed_requests();
                serde_json::to_string(&AppLoad { requests, ..AppLoad::default() })?
            }
            FeedQuery::Explain { id } => self.explain(&id),
            FeedQuery::FetchImage { site, from, order } => {
                if self.shared.cluster.peers.images.put(ImageOrder { tag, site, from, order }) {
                    return Ok(());
                }
                serde_json::to_string(&FetchResult::Failed { reason: "too many images are to come".into() })?
            }
            // The keeper answers these. This process has no such data.
            FeedQuery::Cells | FeedQuery::Instances | FeedQuery::Instance { .. } => "null".into(),
        };
        feed::write(&mut *self.feed_up.lock(), &ToSupervisor::Answer { tag, text })
    }

    fn explain(&self, id: &str) -> String {
        let node = &self.shared.options.get().node;
        let limits_of = |cell: &NamedCell, tenant: &TenantName| self.shared.ledger.limits(cell, tenant);
        receipt::explain::explain(&self.shared.receipts, node, id, limits_of)
    }

    fn status(&self) -> serde_json::Value {
        let (sites, tenants, revision, bytes) = self
            .shared
            .table
            .read(|table| (table.site_count(), table.tenant_count(), table.revision(), table.heap_bytes()));
        let cluster = &self.shared.cluster;
        let authority =
            cluster.is_member().then(|| u64::try_from(cluster.lease.left().as_millis()).unwrap_or(u64::MAX));
        serde_json::json!({
            "threads": self.threads.len(),
            "sites": sites,
            "tenants": tenants,
            "revision": revision,
            "table_bytes": bytes,
            "connections": self.shared.metrics.connections_open.get(),
            "php_workers": self.shared.php.workers(),
            "rules": self.shared.rules.set.status(),
            "peers": self.shared.cluster.peers.tallies.status(),
            "authority_ms": authority,
        })
    }

    /// Returns the number of running requests of each site that need its instance.
    fn needed(&self) -> Vec<DemandReport> {
        let each = self.shared.needs.each().into_iter();
        each.map(|(site, running, waiting)| DemandReport { site, requests: running.saturating_add(waiting) })
            .collect()
    }

    /// Returns the busiest sites, tenants and lanes, for `nagaya top`.
    fn requests(&self) -> serde_json::Value {
        let busiest = |mut rows: Vec<serde_json::Value>| {
            let busy = |row: &serde_json::Value| {
                row["running"].as_u64().unwrap_or(0) + row["waiting"].as_u64().unwrap_or(0)
            };
            rows.sort_by_key(|row| std::cmp::Reverse(busy(row)));
            rows.truncate(ROWS_MAX);
            rows
        };
        let need = |(site, running, waiting)| serde_json::json!({ "site": site, "running": running, "waiting": waiting });
        let lanes = self.shared.lanes.explain();
        let is_busy = |lane: &LaneReport| {
            lane.running + lane.waiting + lane.promised > 0
                || lane.counts.waited + lane.counts.promised + lane.counts.adopted > 0
        };
        let lane = |(lane, explained): (Arc<EdgeLane>, LaneReport)| {
            explain::row(&lane, &explained, self.shared.lanes.now())
        };
        serde_json::json!({
            "placing": wait_estimate::rows(&self.shared.cluster),
            "instances": busiest(self.shared.needs.each().into_iter().map(need).collect()),
            "lanes": busiest(lanes.into_iter().filter(|(_, lane)| is_busy(lane)).map(lane).collect()),
        })
    }

    fn drain(self) -> io::Result<()> {
        self.orders.send_modify(|orders| orders.drain = true);
        // The next edge has the store from now on. Deferred clients get no promise meanwhile.
        if let Some(tickets) = self.shared.tickets.get() {
            tickets.store.close();
        }
        for thread in self.threads {
            match thread.join() {
                Ok(result) => result?,
                Err(_) => return Err(io::Error::other("a thread of the edge panicked")),
            }
        }
        Ok(())
    }
}

/// Opens the log. A failure is logged and counted, and sites are served in spite of it.
fn open_log(options: &EdgeConfig, metrics: &Arc<EdgeMetrics>) -> Option<Arc<AccessLog>> {
    let path = options.log.access.as_deref()?;
    match AccessLog::open(path, options.log.format, Arc::clone(metrics)) {
        Ok(log) => Some(log),
        Err(error) => {
            tracing::error!(code = "NGY0424", %error, "no access log is written");
            None
        }
    }
}
