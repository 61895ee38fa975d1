//! The edge's process: threads started once it knows all sites, then told of every change until it has drained.
//!
//! Not here: a thread (`listen`), the other end of the feed (`nagaya`).

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread::JoinHandle;

use nagaya_admission::Explained;
use nagaya_base::Reckoning;
use nagaya_cmdb::feed::{self, Down, Fetched, Placed, Question, Up};
use nagaya_cmdb::instance::{Busy, Needed};
use nagaya_cmdb::record::Change;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::access_log::AccessLog;
use crate::admission::{self, Lane};
use crate::listen::{self, Orders, Socket, Thread};
use crate::metrics::Metrics;
use crate::options::Options;
use crate::peers::images::ImageOrder;
use crate::peers::probe;
use crate::peers::probe::vouch::Order;
use crate::place;
use crate::receipt;
use crate::shared::Shared;

/// Rows of each kind in what `nagaya top` is told.
const ROWS_MAX: usize = 1000;

/// One address, with a socket for each thread.
pub struct Listener {
    pub address: String,
    pub tls: bool,
    /// Whose PROXY headers are accepted; if empty, those of trusted proxies. None: there are none.
    pub proxies: Option<Vec<String>>,
    pub sockets: Vec<OwnedFd>,
}

/// What the supervisor gives to the process.
pub struct Start {
    pub listeners: Vec<Listener>,
    pub feed: UnixStream,
    /// Where tickets are kept. None: none are given.
    pub tickets: Option<OwnedFd>,
    /// Where large bodies wait. None: they are refused.
    pub spool: Option<OwnedFd>,
    /// What the node says that time it is: an edge that was started anew keeps what the one before it promised.
    pub reckoning: Reckoning,
    /// Where other nodes of a cluster ask. None: this node can be in none.
    pub peers: Option<PeerSockets>,
}

/// What other nodes reach this edge by, bound to one address and port.
pub struct PeerSockets {
    /// Listening, TCP, one for each thread.
    pub streams: Vec<OwnedFd>,
    /// UDP.
    pub probes: OwnedFd,
}

/// Runs until told to drain, or until the supervisor is gone.
pub fn run(start: Start) -> ExitCode {
    match Process::begin(start).and_then(Process::follow) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(code = "NGY0423", %error, "the edge cannot go on");
            ExitCode::FAILURE
        }
    }
}

struct Process {
    shared: Arc<Shared>,
    feed: UnixStream,
    /// Its other direction, which several threads write to.
    feed_up: Arc<Mutex<UnixStream>>,
    /// Until the first commit: where other nodes will be served.
    peers: Option<PeerSockets>,
    /// Until the first commit: what the threads will listen on.
    waiting: Vec<Listener>,
    threads: Vec<JoinHandle<io::Result<()>>>,
    orders: watch::Sender<Orders>,
    /// Changes that wait for their commit.
    pending: Vec<Change>,
}

impl Process {
    fn begin(mut start: Start) -> io::Result<Self> {
        let Some(Down::Options(options)) = feed::read(&mut start.feed)? else {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the feed does not begin with settings"));
        };
        let options: Options = serde_json::from_value(options)?;
        let metrics = Arc::new(Metrics::new());
        let log = open_log(&options, &metrics);
        let shared = Arc::new(Shared::new(options, log, metrics, start.reckoning, start.spool));
        if let Some(directory) = start.tickets {
            admission::open(&shared, directory);
        }
        let feed_up = Arc::new(Mutex::new(start.feed.try_clone()?));
        let process = Self {
            shared,
            feed: start.feed,
            feed_up,
            peers: start.peers,
            waiting: start.listeners,
            threads: Vec::new(),
            orders: watch::Sender::new(Orders::default()),
            pending: Vec::new(),
        };
        process.open_desk()?;
        Ok(process)
    }

    fn follow(mut self) -> io::Result<()> {
        loop {
            match feed::read(&mut self.feed)? {
                Some(Down::Options(options)) => self.options(serde_json::from_value(options)?)?,
                // Nobody is served before the first commit, so the first load needs no second copy in memory.
                Some(Down::Apply(changes)) if self.threads.is_empty() => self.apply(changes)?,
                Some(Down::Apply(changes)) => self.pending.extend(changes),
                Some(Down::Commit { revision }) => self.commit(revision)?,
                Some(Down::ReopenLogs) => match self.shared.log() {
                    Some(log) => log.reopen(),
                    None => self.open_log(),
                },
                Some(Down::Ask { tag, question }) => self.answer(tag, question)?,
                Some(Down::Drain) => return self.drain(),
                // Instances are the keeper's.
                Some(Down::Exec(_)) => {}
                Some(Down::Authority { until_ns }) => self.shared.cluster.tenure.extend(until_ns),
                Some(Down::Placed { tag, placed }) => self.placed(tag, placed),
                Some(Down::Vouch { round, members }) => self.vouch(Order::Ask { round, members }),
                Some(Down::VouchAnswer { tag, moved }) => self.vouch(Order::Vouch { tag, moved }),
                Some(Down::Wakes { elsewhere }) => {
                    self.shared.cluster.outlook.lock().told(elsewhere as usize)
                }
                Some(Down::Leaving { site, on }) => self.shared.cluster.set_leaving(site, on),
                None => {
                    tracing::warn!("the supervisor is gone");
                    return self.drain();
                }
            }
        }
    }

    /// In a cluster, requests may ask where their sites are to run.
    fn open_desk(&self) -> io::Result<()> {
        let cluster = &self.shared.cluster;
        if !cluster.is_member() || cluster.desk.is_open() {
            return Ok(());
        }
        let feed = Arc::clone(&self.feed_up);
        cluster.desk.open(move |question| feed::write(&mut *feed.lock(), question))
    }

    fn vouch(&self, order: Order) {
        self.shared.cluster.peers.probes.vouch(order);
    }

    /// The placement is known before anybody who waits for it goes on.
    fn placed(&self, tag: u64, placed: Placed) {
        if let Placed::At { placement, .. } = &placed {
            self.shared.cluster.placed(placement.clone());
        }
        self.shared.cluster.desk.answer(tag, &placed);
    }

    fn options(&mut self, options: Options) -> io::Result<()> {
        let before = self.shared.options();
        let is_other_log = before.log != options.log;
        self.shared.set_options(options);
        if is_other_log || self.shared.log().is_none() {
            self.open_log();
        }
        self.orders.send_modify(|orders| orders.settings += 1);
        self.open_desk()
    }

    /// Opens the log that the settings name, for all threads. Also anew, after somebody has removed what was in the way.
    fn open_log(&mut self) {
        self.shared.set_log(open_log(&self.shared.options(), &self.shared.metrics));
        self.orders.send_modify(|orders| orders.settings += 1);
    }

    fn apply(&self, changes: impl IntoIterator<Item = Change>) -> io::Result<()> {
        // A copy that lost step is started anew by the supervisor, with everything.
        self.shared.apply(changes).map_err(io::Error::other)
    }

    fn commit(&mut self, revision: u64) -> io::Result<()> {
        let changes = std::mem::take(&mut self.pending);
        for change in &changes {
            if let Change::DropTenant(name) = change {
                self.shared.php.forget(name);
            }
        }
        self.apply(changes)?;
        self.shared.set_revision(revision);
        if self.threads.is_empty() {
            self.start_threads()?;
        }
        feed::write(&mut *self.feed_up.lock(), &Up::Ready { revision })
    }

    /// Thread `n` gets the n-th socket of each address.
    fn start_threads(&mut self) -> io::Result<()> {
        let mut of_thread: Vec<Vec<Socket>> = Vec::new();
        for listener in std::mem::take(&mut self.waiting) {
            tracing::info!(address = listener.address, tls = listener.tls, "listening");
            for (n, fd) in listener.sockets.into_iter().enumerate() {
                if of_thread.len() <= n {
                    of_thread.push(Vec::new());
                }
                of_thread[n].push(Socket { fd, tls: listener.tls, proxies: listener.proxies.clone() });
            }
        }
        let mut peers = Vec::new();
        if let Some(sockets) = self.peers.take() {
            peers = sockets.streams;
            probe::start(Arc::clone(&self.shared), sockets.probes)?;
        }
        let mut peers = peers.into_iter();
        for (n, sockets) in of_thread.into_iter().enumerate() {
            let orders = self.orders.subscribe();
            let thread = Thread { sockets, peers: peers.next(), orders, tends_shared: n == 0 };
            let shared = Arc::clone(&self.shared);
            let named = std::thread::Builder::new().name(format!("edge-{n}"));
            self.threads.push(named.spawn(move || listen::run(shared, thread))?);
        }
        Ok(())
    }

    fn answer(&mut self, tag: u64, question: Question) -> io::Result<()> {
        let text = match question {
            Question::Metrics => {
                let lanes = admission::exposition(self.shared.lanes.explain());
                self.shared.metrics.encode()
                    + &self.shared.metrics.encode_tenants()
                    + &lanes
                    + &self.shared.cluster.peers.tallies.exposition()
            }
            Question::Status => self.status().to_string(),
            Question::Requests => self.requests().to_string(),
            Question::Load => serde_json::to_string(&self.needed())?,
            Question::Busy => {
                let requests = self.shared.metrics.placed_requests();
                serde_json::to_string(&Busy { requests, ..Busy::default() })?
            }
            Question::Explain { id } => receipt::explain(&self.shared, &id),
            Question::FetchImage { site, from, order } => {
                if self.shared.cluster.peers.images.put(ImageOrder { tag, site, from, order }) {
                    return Ok(());
                }
                serde_json::to_string(&Fetched::Failed { reason: "too many images are to come".into() })?
            }
            // The keeper's to answer; this process has none.
            Question::Cells | Question::Instances | Question::Instance { .. } => "null".into(),
        };
        feed::write(&mut *self.feed_up.lock(), &Up::Answer { tag, text })
    }

    fn status(&self) -> serde_json::Value {
        let (sites, tenants, revision, bytes) = self.shared.with_table(|table| {
            (table.site_count(), table.tenant_count(), table.revision(), table.heap_bytes())
        });
        let cluster = &self.shared.cluster;
        let authority =
            cluster.is_member().then(|| u64::try_from(cluster.tenure.left().as_millis()).unwrap_or(u64::MAX));
        serde_json::json!({
            "threads": self.threads.len(),
            "sites": sites,
            "tenants": tenants,
            "revision": revision,
            "table_bytes": bytes,
            "connections": self.shared.metrics.connections_open.get(),
            "php_workers": self.shared.php.workers(),
            "rules": self.shared.rules.status(),
            "peers": self.shared.cluster.peers.tallies.status(),
            "authority_ms": authority,
        })
    }

    /// How many requests each site has under way that needs its instance.
    fn needed(&self) -> Vec<Needed> {
        let each = self.shared.needs.each().into_iter();
        each.map(|(site, running, waiting)| Needed { site, requests: running.saturating_add(waiting) })
            .collect()
    }

    /// The busiest sites, tenants and lanes, for `nagaya top`.
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
        let is_busy = |lane: &Explained| {
            lane.running + lane.waiting + lane.promised > 0
                || lane.counts.waited + lane.counts.promised + lane.counts.adopted > 0
        };
        let lane = |(lane, explained): (Arc<Lane>, Explained)| {
            admission::row(&lane, &explained, self.shared.lanes.now())
        };
        serde_json::json!({
            "placing": place::wait::rows(&self.shared),
            "instances": busiest(self.shared.needs.each().into_iter().map(need).collect()),
            "lanes": busiest(lanes.into_iter().filter(|(_, lane)| is_busy(lane)).map(lane).collect()),
        })
    }

    fn drain(self) -> io::Result<()> {
        self.orders.send_modify(|orders| orders.drain = true);
        // The next edge has it from now on; who is turned away meanwhile is promised nothing.
        if let Some(tickets) = self.shared.tickets() {
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

/// A log that cannot be opened is said and counted, and does not keep sites from being served.
fn open_log(options: &Options, metrics: &Arc<Metrics>) -> Option<Arc<AccessLog>> {
    let path = options.log.access.as_deref()?;
    match AccessLog::open(path, options.log.format, Arc::clone(metrics)) {
        Ok(log) => Some(log),
        Err(error) => {
            tracing::error!(code = "NGY0424", %error, "no access log is written");
            None
        }
    }
}
