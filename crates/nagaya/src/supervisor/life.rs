//! The node while it runs: one loop that takes the next event and acts on it.
//!
//! Every wait is an event: a signal, the end of a process, its news, a timer. So one place decides
//! the order. Not here: making the node's parts (`supervisor`), starting one process (`child`).

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nagaya_base::{AnchoredClock, Clock as _, SystemClock};
use nagaya_records::check::IdPolicy;
use nagaya_records::feed::FromSupervisor;
use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use super::ServeOptions;
use super::backoff::{FAST_RESTARTS, RestartBackoff};
use super::child::{self, ChildProcess, ProcessRole};
use super::cluster::{ClusterOrder, PlacementRequest};
use super::edge_root::EdgeRoot;
use super::error::ServeError;
use super::feed::{FeedNews, ProcessFeed};
use super::node::{KeeperFacts, SupervisedNode};
use super::priority;
use super::sockets::{BoundSockets, PeerSocketsFile, expect_signs};
use super::{notify, reload};
use crate::config::{self, NodeSettings};
use crate::identity::ProcessIdentity;
use crate::inherit::{InheritedFds, InheritedListener, InheritedPeers, number};
use crate::logging::{self, LogSink};
use crate::supervisor::runtime_dir;
use crate::tenant_ids::IdSource;

/// Events that wait to be handled. Each source has at most a few at once.
const EVENTS_MAX: usize = 256;

/// Time beyond the drain time until the edge is ended by force: it enforces the drain time itself.
const DRAIN_MARGIN: Duration = Duration::from_secs(2);

/// Time for the keeper to end everything that it started.
const KEEPER_END: Duration = Duration::from_secs(10);

/// Time for a process whose feed is over, before it is ended by force.
const FEEDLESS_MAX: Duration = Duration::from_secs(1);

/// Ends of one process before the node was ever ready, after which the start has failed.
const FAILED_STARTS_MAX: u32 = FAST_RESTARTS + 1;

/// Parts that were made before the loop starts.
pub struct ManagerParts {
    pub serve: ServeOptions,
    pub settings: NodeSettings,
    pub sink: LogSink,
    pub listening: Vec<BoundSockets>,
    pub keeper_socket: OwnedFd,
    pub edge_identity: Option<ProcessIdentity>,
    pub ids: IdSource,
    /// Directory of the edge's promises. `None` if it promises nothing.
    pub tickets: Option<OwnedFd>,
    /// Directory of the edge's large bodies. `None` if it stores none.
    pub spool: Option<OwnedFd>,
    /// The file system that the edge sees. `None` means all that its user may see.
    pub edge_root: Option<Arc<EdgeRoot>>,
    /// Continues across restarts of edges.
    pub anchored_clock: AnchoredClock,
    /// Where other nodes of a cluster reach the edge. `None` if it cannot join one.
    pub peers: Option<PeerSocketsFile>,
    pub node: Arc<SupervisedNode>,
}

#[derive(Debug)]
enum ProcessEvent {
    Told(OperatorSignal),
    /// A process has ended. `run` distinguishes its life from the next one of the same role.
    Ended {
        role: ProcessRole,
        run: u64,
        reason: String,
    },
    News {
        role: ProcessRole,
        run: u64,
        news: FeedNews,
    },
    /// The node's membership in its cluster has changed.
    Credentials,
    /// The wait before a restart is over.
    Start(ProcessRole),
    /// A process's time to end is over.
    Overdue {
        role: ProcessRole,
        run: u64,
    },
}

/// An operator's signal to the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OperatorSignal {
    End,
    Reload,
    ReopenLogs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum ProcessPhase {
    Starting,
    Serving,
    /// The edge finishes running requests.
    Draining,
    /// The edge is gone; the keeper ends everything that it started.
    Closing,
}

/// One process: whether it runs now, and its history.
struct ProcessSlot {
    child: Option<ChildProcess>,
    run: u64,
    since: Instant,
    backoff: RestartBackoff,
}

pub struct ProcessManager {
    parts: ManagerParts,
    phase: ProcessPhase,
    slots: HashMap<&'static str, ProcessSlot>,
    tell: mpsc::Sender<ProcessEvent>,
    events: mpsc::Receiver<ProcessEvent>,
}

impl ProcessManager {
    pub fn new(parts: ManagerParts) -> Result<Self, ServeError> {
        let (tell, events) = mpsc::channel(EVENTS_MAX);
        for (kind, told) in [
            (SignalKind::terminate(), OperatorSignal::End),
            (SignalKind::interrupt(), OperatorSignal::End),
            (SignalKind::hangup(), OperatorSignal::Reload),
            (SignalKind::user_defined1(), OperatorSignal::ReopenLogs),
        ] {
            let mut signal = signal(kind).map_err(ServeError::Runtime)?;
            let tell = tell.clone();
            tokio::task::spawn_local(async move {
                while signal.recv().await.is_some() {
                    if tell.send(ProcessEvent::Told(told)).await.is_err() {
                        break;
                    }
                }
            });
        }
        follow_credentials(&parts.node, tell.clone());
        let now = SystemClock.now();
        let slot = |role: ProcessRole| {
            (role.name(), ProcessSlot { child: None, run: 0, since: now, backoff: RestartBackoff::default() })
        };
        let slots = ProcessRole::ALL.into_iter().map(slot).collect();
        Ok(Self { parts, phase: ProcessPhase::Starting, slots, tell, events })
    }

    /// Starts the processes and keeps them running until the node has ended.
    pub async fn run(mut self) -> Result<(), ServeError> {
        for role in ProcessRole::ALL {
            self.start(role)?;
        }
        loop {
            // This very value holds the sender, so the channel stays open.
            let Some(event) = self.events.recv().await else { return Ok(()) };
            if let ControlFlow::Break(result) = self.apply(event) {
                return result;
            }
        }
    }

    fn apply(&mut self, event: ProcessEvent) -> ControlFlow<Result<(), ServeError>> {
        match event {
            ProcessEvent::Told(OperatorSignal::End) => return self.end(),
            ProcessEvent::Told(OperatorSignal::Reload) => self.reload(),
            ProcessEvent::Told(OperatorSignal::ReopenLogs) => self.reopen_logs(),
            ProcessEvent::Credentials => self.tell_options(),
            ProcessEvent::News { role, run, news } if run == self.slot(role).run => self.news(role, news),
            ProcessEvent::Ended { role, run, reason } if run == self.slot(role).run => {
                return self.ended(role, reason);
            }
            ProcessEvent::Overdue { role, run } if run == self.slot(role).run => {
                if let Some(child) = &self.slot(role).child {
                    tracing::warn!("the {role} process did not end in time and is ended by force");
                    child.signal(Signal::KILL);
                }
            }
            ProcessEvent::Start(role)
                if self.phase < ProcessPhase::Draining || self.wanted_while_draining(role) =>
            {
                if let Err(error) = self.start(role) {
                    tracing::error!(code = "NGY0504", "{error}");
                    let wait = self.slot(role).backoff.next_delay(Duration::ZERO);
                    self.later(wait, ProcessEvent::Start(role));
                }
            }
            // News of a process that has ended, or a start that is no longer wanted.
            ProcessEvent::News { .. }
            | ProcessEvent::Ended { .. }
            | ProcessEvent::Overdue { .. }
            | ProcessEvent::Start(_) => {}
        }
        ControlFlow::Continue(())
    }

    /// Running requests still need the keeper.
    fn wanted_while_draining(&self, role: ProcessRole) -> bool {
        self.phase == ProcessPhase::Draining && role == ProcessRole::Keeper
    }

    fn slot(&mut self, role: ProcessRole) -> &mut ProcessSlot {
        self.slots.get_mut(role.name()).expect("every role has a slot from the beginning")
    }

    fn later(&self, wait: Duration, event: ProcessEvent) {
        let tell = self.tell.clone();
        tokio::task::spawn_local(async move {
            tokio::time::sleep(wait).await;
            // The node may have ended meanwhile.
            let _ = tell.send(event).await;
        });
    }

    fn start(&mut self, role: ProcessRole) -> Result<(), ServeError> {
        let failed = |error| ServeError::Spawn { process: role.name(), error };
        let (ours, theirs) = UnixStream::pair().map_err(failed)?;
        let (inherited, descriptors) = describe(&self.parts, role, &theirs);
        let (child, end) = child::spawn(role, &inherited, descriptors, &self.parts.sink).map_err(failed)?;
        drop(theirs);
        let slot = self.slot(role);
        slot.run += 1;
        slot.since = SystemClock.now();
        let run = slot.run;
        let pid = child.pid;
        slot.child = Some(child);
        let tell = self.tell.clone();
        tokio::task::spawn_local(async move {
            let reason = child::reason(end.await);
            let _ = tell.send(ProcessEvent::Ended { role, run, reason }).await;
        });
        let tell = self.tell.clone();
        let feed = Arc::new(ProcessFeed::new(ours, move |news| {
            let _ = tell.blocking_send(ProcessEvent::News { role, run, news });
        }));
        self.parts.node.process(role, |process| {
            process.pid = Some(pid);
            process.feed = Some(Arc::clone(&feed));
            process.restarts = run - 1;
            process.revision = None;
        });
        tracing::info!(pid, "the {role} process starts");
        feed.begin(self.options(role), Arc::clone(&self.parts.node.store)).map_err(failed)
    }

    /// Returns the policy. Without root the edge has the uid of the user that started nagaya.
    fn tenant_ids(&self) -> IdPolicy {
        let edge = self.parts.edge_identity;
        let edge_uid = edge.map_or_else(|| nix::unistd::geteuid().as_raw(), |edge| edge.uid);
        IdPolicy { edge_uid, ..self.parts.ids.policy() }
    }

    /// Returns the process's part of the configuration.
    fn options(&self, role: ProcessRole) -> serde_json::Value {
        let settings = &self.parts.settings;
        let cluster = self.parts.node.credentials.borrow().as_deref().cloned();
        match role {
            ProcessRole::Edge => {
                serde_json::to_value(nagaya_edge::EdgeConfig { cluster, ..settings.edge_options() })
            }
            ProcessRole::Keeper => {
                let mut options = settings.keeper_options(self.tenant_ids());
                // A site's program may send requests to its own site.
                options.programs.own_addresses = self.parts.listening.iter().map(|at| at.address).collect();
                options.node = cluster.map(|cluster| cluster.node);
                let KeeperFacts { image_keys, etcd } = self.parts.node.keeper_facts();
                options.instances.image_keys = image_keys;
                options.etcd = etcd;
                serde_json::to_value(options)
            }
        }
        .expect("options hold numbers, texts and paths that came from a text")
    }

    fn news(&mut self, role: ProcessRole, news: FeedNews) {
        match news {
            FeedNews::Ready { revision } => {
                let mut started = None;
                self.parts.node.process(role, |process| {
                    if process.revision.replace(revision).is_none() {
                        started = process.pid;
                    }
                });
                if let (ProcessRole::Edge, Some(edge)) = (role, started) {
                    priority::have_one_thread_first(edge);
                }
                if self.phase == ProcessPhase::Starting && self.parts.node.all_ready() {
                    self.phase = ProcessPhase::Serving;
                    self.parts.node.set_ready();
                    notify::notify("READY=1");
                    let ms = SystemClock.now().duration_since(self.parts.node.started).as_millis();
                    tracing::info!(revision, "the node serves after {ms} ms");
                }
            }
            FeedNews::Place { tag, site, seen, why, lost, probe_us } => {
                if let (Some(cluster), Some(edge)) = (&self.parts.node.cluster, self.parts.node.feed(role)) {
                    cluster.place(PlacementRequest { tag, site, seen, why, lost, probe_us, edge });
                }
            }
            FeedNews::Heard { node } => {
                if let Some(cluster) = &self.parts.node.cluster {
                    cluster.send_order(ClusterOrder::Heard(node));
                }
            }
            FeedNews::Doubt { node } => {
                if let Some(cluster) = &self.parts.node.cluster {
                    cluster.send_order(ClusterOrder::Doubt(node));
                }
            }
            FeedNews::VouchAsked { tag, id } => {
                if let (Some(cluster), Some(edge)) = (&self.parts.node.cluster, self.parts.node.feed(role)) {
                    cluster.send_order(ClusterOrder::Vouch { tag, id, edge });
                }
            }
            FeedNews::Vouched { round, id, moved } => {
                if let Some(cluster) = &self.parts.node.cluster {
                    cluster.send_order(ClusterOrder::Vouched { round, id, moved });
                }
            }
            FeedNews::Over { reason } => {
                // A process that is about to end closes its feed first; its end is reported
                // separately. A process that does not end can get no more messages, and must end. A
                // process that was ordered to end has its own time for that.
                if self.slot(role).child.is_some() && self.phase < ProcessPhase::Draining {
                    let run = self.slot(role).run;
                    tracing::debug!("the feed of the {role} process is over: {reason}");
                    self.later(FEEDLESS_MAX, ProcessEvent::Overdue { role, run });
                }
            }
        }
    }

    fn ended(&mut self, role: ProcessRole, reason: String) -> ControlFlow<Result<(), ServeError>> {
        let ran = SystemClock.now().duration_since(self.slot(role).since);
        self.slot(role).child = None;
        self.parts.node.process(role, |process| {
            process.pid = None;
            process.feed = None;
            process.revision = None;
            process.last_end = Some(reason.clone());
        });
        match (self.phase, role) {
            (ProcessPhase::Draining, ProcessRole::Edge) => {
                tracing::info!("the edge process has ended: {reason}");
                return self.close();
            }
            (ProcessPhase::Closing, ProcessRole::Keeper) => {
                tracing::info!("the keeper process has ended: {reason}");
                return ControlFlow::Break(Ok(()));
            }
            _ => {}
        }
        // While the node starts, it has served nothing yet, so no earlier end is forgotten.
        let served = if self.phase == ProcessPhase::Starting { Duration::ZERO } else { ran };
        let wait = self.slot(role).backoff.next_delay(served);
        let times = self.slot(role).backoff.ends();
        if self.phase == ProcessPhase::Starting && times >= FAILED_STARTS_MAX {
            return ControlFlow::Break(Err(ServeError::NeverReady { process: role.name(), times, reason }));
        }
        tracing::error!(
            code = "NGY0505",
            "the {role} process ended with {reason} after {} ms; it is started again in {} ms",
            ran.as_millis(),
            wait.as_millis()
        );
        self.later(wait, ProcessEvent::Start(role));
        ControlFlow::Continue(())
    }

    /// Ends the node. The first time, running requests finish. The second time, it ends at once.
    /// The keeper still ends everything that it started, which is quick and leaves nothing behind.
    /// Only if that hangs, too, a further signal ends it.
    fn end(&mut self) -> ControlFlow<Result<(), ServeError>> {
        if self.phase >= ProcessPhase::Draining {
            let role =
                if self.phase == ProcessPhase::Draining { ProcessRole::Edge } else { ProcessRole::Keeper };
            tracing::warn!("second signal to end: the {role} process is killed");
            if let Some(child) = &self.slot(role).child {
                child.signal(Signal::KILL);
            }
            return ControlFlow::Continue(());
        }
        let drain = Duration::from_millis(self.parts.settings.edge.limits.drain_ms);
        tracing::info!("signal to end: running requests have {} ms to finish", drain.as_millis());
        notify::notify("STOPPING=1");
        self.phase = ProcessPhase::Draining;
        self.parts.node.set_draining();
        let run = self.slot(ProcessRole::Edge).run;
        if self.slot(ProcessRole::Edge).child.is_none() {
            return self.close();
        }
        if let Some(feed) = self.parts.node.feed(ProcessRole::Edge) {
            feed.send(FromSupervisor::Drain);
        }
        // Otherwise the kernel would accept new connections that are never answered.
        self.parts.listening.clear();
        self.parts.peers = None;
        self.later(drain + DRAIN_MARGIN, ProcessEvent::Overdue { role: ProcessRole::Edge, run });
        ControlFlow::Continue(())
    }

    /// Handles the end of the edge: the keeper ends everything that was started for it.
    fn close(&mut self) -> ControlFlow<Result<(), ServeError>> {
        self.phase = ProcessPhase::Closing;
        if self.slot(ProcessRole::Keeper).child.is_none() {
            return ControlFlow::Break(Ok(()));
        }
        if let Some(feed) = self.parts.node.feed(ProcessRole::Keeper) {
            feed.send(FromSupervisor::Drain);
        }
        let run = self.slot(ProcessRole::Keeper).run;
        self.later(KEEPER_END, ProcessEvent::Overdue { role: ProcessRole::Keeper, run });
        ControlFlow::Continue(())
    }

    fn reload(&mut self) {
        if self.phase == ProcessPhase::Serving {
            notify::reloading();
        }
        match config::load(self.parts.serve.config.as_deref()) {
            Ok(loaded) => {
                let (settings, held) = reload::merge(&self.parts.settings, loaded.settings);
                self.parts.settings = settings;
                self.parts.node.balance.configure(&self.parts.settings.balance);
                self.parts.node.certificates.configure(self.parts.settings.keeper.certificates.clone());
                self.parts.ids.reload(&self.parts.settings);
                for key in &held {
                    tracing::warn!(code = "NGY0507", "{key} was changed; this needs a restart of nagaya");
                }
                if self.parts.serve.log.is_none() {
                    logging::set_level(&self.parts.settings.log.level);
                }
                runtime_dir::prepare_access_log(&self.parts.settings, self.parts.edge_identity);
                if let Some(root) = &self.parts.edge_root {
                    root.configure(&self.parts.settings);
                }
                self.expect_signs();
                self.tell_options();
                self.parts.node.reloaded(held);
                tracing::info!("the configuration was read again");
            }
            Err(mistakes) => {
                self.parts.node.reload_refused();
                for mistake in &mistakes {
                    tracing::error!(code = %mistake.code, "{mistake}");
                }
                tracing::error!(
                    "the configuration stays as it was: the file has {} mistakes",
                    mistakes.len()
                );
            }
        }
        if self.phase == ProcessPhase::Serving {
            notify::notify("READY=1");
        }
    }

    /// Sets keepalive for connections of clients and nodes from now on, by the present limits.
    fn expect_signs(&self) {
        let sockets = self.parts.listening.iter().flat_map(|at| &at.sockets);
        let peers = self.parts.peers.iter().flat_map(|peers| &peers.streams);
        for socket in sockets.chain(peers) {
            if let Err(error) = expect_signs(socket, &self.parts.settings.edge.limits) {
                tracing::warn!(%error, "a listening socket keeps the limits it had");
            }
        }
    }

    fn tell_options(&self) {
        for role in ProcessRole::ALL {
            if let Some(feed) = self.parts.node.feed(role) {
                feed.send(FromSupervisor::Options(self.options(role)));
            }
        }
    }

    fn reopen_logs(&self) {
        if let Err(error) = self.parts.sink.reopen() {
            tracing::error!(code = "NGY0506", "the log continues in the old file: {error}");
        }
        runtime_dir::prepare_access_log(&self.parts.settings, self.parts.edge_identity);
        if let Some(root) = &self.parts.edge_root {
            root.refresh();
        }
        self.parts.node.send_all(&FromSupervisor::ReopenLogs);
        tracing::info!("logs were opened again");
    }
}

/// Wakes the loop when the node becomes a member of a cluster, or its certificate changes.
fn follow_credentials(node: &SupervisedNode, tell: mpsc::Sender<ProcessEvent>) {
    let mut credentials = node.credentials.subscribe();
    tokio::task::spawn_local(async move {
        while credentials.changed().await.is_ok() {
            if tell.send(ProcessEvent::Credentials).await.is_err() {
                return;
            }
        }
    });
}

/// Returns the inheritance of a process of this role, described and borrowed.
fn describe<'a>(
    parts: &'a ManagerParts,
    role: ProcessRole,
    feed: &'a UnixStream,
) -> (InheritedFds, Vec<BorrowedFd<'a>>) {
    let mut inherited = InheritedFds {
        supervisor: i32::try_from(std::process::id()).expect("Linux pids fit 22 bits"),
        feed: number(feed),
        listeners: Vec::new(),
        keeper: None,
        tickets: None,
        spool: None,
        root: None,
        now_us: parts.anchored_clock.now_us(),
        peers: None,
        identity: None,
        small_pages: false,
        log_level: parts.serve.log.clone().unwrap_or_else(|| parts.settings.log.level.clone()),
        log_json: logging::is_json(&parts.settings.log),
    };
    let mut descriptors = vec![feed.as_fd()];
    match role {
        ProcessRole::Keeper => {
            inherited.keeper = Some(number(&parts.keeper_socket));
            inherited.small_pages = rustix::thread::transparent_huge_pages_are_disabled() == Ok(false);
            descriptors.push(parts.keeper_socket.as_fd());
        }
        ProcessRole::Edge => {
            if let Some(tickets) = &parts.tickets {
                inherited.tickets = Some(number(tickets));
                descriptors.push(tickets.as_fd());
            }
            if let Some(spool) = &parts.spool {
                inherited.spool = Some(number(spool));
                descriptors.push(spool.as_fd());
            }
            if let Some(root) = &parts.edge_root {
                inherited.root = Some(number(&root.namespace()));
                descriptors.push(root.namespace());
            }
            inherited.identity = parts.edge_identity.map(|identity| (identity.uid, identity.gid));
            if let Some(peers) = &parts.peers {
                let streams = peers.streams.iter().map(number).collect();
                inherited.peers = Some(InheritedPeers { streams, probes: number(&peers.probes) });
                descriptors.extend(peers.streams.iter().map(|socket| socket.as_fd()));
                descriptors.push(peers.probes.as_fd());
            }
            for at in &parts.listening {
                inherited.listeners.push(InheritedListener {
                    address: at.address.to_string(),
                    tls: at.wanted.tls,
                    proxies: at.wanted.proxy_protocol.then(|| at.wanted.proxy_protocol_from.clone()),
                    sockets: at.sockets.iter().map(number).collect(),
                });
                descriptors.extend(at.sockets.iter().map(|socket| socket.as_fd()));
            }
        }
    }
    (inherited, descriptors)
}
