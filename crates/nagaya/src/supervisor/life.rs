//! The node while it runs: one loop that takes the next event and acts on it.
//!
//! Every wait is an event (a signal, the end of a process, its news, a timer), so that the order of things is
//! decided in one place. Not here: making what the node needs (`supervisor`), starting one process (`child`).

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nagaya_base::{Clock as _, Reckoning, SystemClock};
use nagaya_cmdb::check::IdPolicy;
use nagaya_cmdb::feed::Down;
use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use super::Serve;
use super::backoff::{Backoff, FAST_RESTARTS};
use super::child::{self, Child, Role};
use super::cluster::{Order, Place};
use super::edge_root::EdgeRoot;
use super::error::ServeError;
use super::feed::{Feed, News};
use super::identity::Identity;
use super::node::{KeeperFacts, Node};
use super::priority;
use super::sockets::{Listening, Peers, expect_signs};
use super::{notify, place, reload};
use crate::config::{self, Settings};
use crate::inherit::{Inherited, InheritedListener, InheritedPeers, number};
use crate::logging::{self, Sink};
use crate::tenant_ids::IdSource;

/// Events that wait to be acted on. Each source has at most a few at once.
const EVENTS_MAX: usize = 256;

/// What the edge gets beyond the drain time until it is ended by force: it enforces the time itself.
const DRAIN_MARGIN: Duration = Duration::from_secs(2);

/// How long the keeper has to end what it started.
const KEEPER_END: Duration = Duration::from_secs(10);

/// How long a process may go on whose feed is over, before it is ended by force.
const FEEDLESS_MAX: Duration = Duration::from_secs(1);

/// Ends of one process before the node was ever ready, after which the start has failed.
const FAILED_STARTS_MAX: u32 = FAST_RESTARTS + 1;

/// What was made before the life begins.
pub struct Parts {
    pub serve: Serve,
    pub settings: Settings,
    pub sink: Sink,
    pub listening: Vec<Listening>,
    pub keeper_socket: OwnedFd,
    pub edge_identity: Option<Identity>,
    pub ids: IdSource,
    /// Where the edge keeps what it promised. None: it promises nothing.
    pub tickets: Option<OwnedFd>,
    /// Where the edge keeps large bodies. None: it keeps none.
    pub spool: Option<OwnedFd>,
    /// What the edge sees of the file system. None: all that its user may.
    pub edge_root: Option<Arc<EdgeRoot>>,
    /// Goes on while edges come and go.
    pub reckoning: Reckoning,
    /// Where other nodes of a cluster reach the edge. None: it can be in none.
    pub peers: Option<Peers>,
    pub node: Arc<Node>,
}

#[derive(Debug)]
enum Event {
    Told(Told),
    /// A process has ended. `run` tells its life from the next one of the same role.
    Ended {
        role: Role,
        run: u64,
        reason: String,
    },
    News {
        role: Role,
        run: u64,
        news: News,
    },
    /// The node's place in its cluster has changed.
    Credentials,
    /// The wait before a restart is over.
    Start(Role),
    /// A process had its time to end.
    Overdue {
        role: Role,
        run: u64,
    },
}

/// What an operator tells the node by a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Told {
    End,
    Reload,
    ReopenLogs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    Starting,
    Serving,
    /// The edge finishes what runs.
    Draining,
    /// The edge is gone; the keeper ends what it started.
    Closing,
}

/// One process: whether it runs now, and how it went so far.
struct Slot {
    child: Option<Child>,
    run: u64,
    since: Instant,
    backoff: Backoff,
}

pub struct Life {
    parts: Parts,
    phase: Phase,
    slots: HashMap<&'static str, Slot>,
    tell: mpsc::Sender<Event>,
    events: mpsc::Receiver<Event>,
}

impl Life {
    pub fn new(parts: Parts) -> Result<Self, ServeError> {
        let (tell, events) = mpsc::channel(EVENTS_MAX);
        for (kind, told) in [
            (SignalKind::terminate(), Told::End),
            (SignalKind::interrupt(), Told::End),
            (SignalKind::hangup(), Told::Reload),
            (SignalKind::user_defined1(), Told::ReopenLogs),
        ] {
            let mut signal = signal(kind).map_err(ServeError::Runtime)?;
            let tell = tell.clone();
            tokio::task::spawn_local(async move {
                while signal.recv().await.is_some() {
                    if tell.send(Event::Told(told)).await.is_err() {
                        break;
                    }
                }
            });
        }
        follow_credentials(&parts.node, tell.clone());
        let now = SystemClock.now();
        let slot =
            |role: Role| (role.name(), Slot { child: None, run: 0, since: now, backoff: Backoff::default() });
        let slots = Role::ALL.into_iter().map(slot).collect();
        Ok(Self { parts, phase: Phase::Starting, slots, tell, events })
    }

    /// Starts the processes and keeps them running until the node has ended.
    pub async fn run(mut self) -> Result<(), ServeError> {
        for role in Role::ALL {
            self.start(role)?;
        }
        loop {
            // The sender is held by this very value, so the channel stays open.
            let Some(event) = self.events.recv().await else { return Ok(()) };
            if let ControlFlow::Break(result) = self.apply(event) {
                return result;
            }
        }
    }

    fn apply(&mut self, event: Event) -> ControlFlow<Result<(), ServeError>> {
        match event {
            Event::Told(Told::End) => return self.end(),
            Event::Told(Told::Reload) => self.reload(),
            Event::Told(Told::ReopenLogs) => self.reopen_logs(),
            Event::Credentials => self.tell_options(),
            Event::News { role, run, news } if run == self.slot(role).run => self.news(role, news),
            Event::Ended { role, run, reason } if run == self.slot(role).run => {
                return self.ended(role, reason);
            }
            Event::Overdue { role, run } if run == self.slot(role).run => {
                if let Some(child) = &self.slot(role).child {
                    tracing::warn!("the {role} process did not end in time and is ended by force");
                    child.signal(Signal::KILL);
                }
            }
            Event::Start(role) if self.phase < Phase::Draining || self.wanted_while_draining(role) => {
                if let Err(error) = self.start(role) {
                    tracing::error!(code = "NGY0504", "{error}");
                    let wait = self.slot(role).backoff.ended(Duration::ZERO);
                    self.later(wait, Event::Start(role));
                }
            }
            // News of a process that has ended, or a start that nobody wants any more.
            Event::News { .. } | Event::Ended { .. } | Event::Overdue { .. } | Event::Start(_) => {}
        }
        ControlFlow::Continue(())
    }

    /// Requests that still run need the keeper.
    fn wanted_while_draining(&self, role: Role) -> bool {
        self.phase == Phase::Draining && role == Role::Keeper
    }

    fn slot(&mut self, role: Role) -> &mut Slot {
        self.slots.get_mut(role.name()).expect("every role has a slot from the beginning")
    }

    fn later(&self, wait: Duration, event: Event) {
        let tell = self.tell.clone();
        tokio::task::spawn_local(async move {
            tokio::time::sleep(wait).await;
            // The node may have ended meanwhile.
            let _ = tell.send(event).await;
        });
    }

    fn start(&mut self, role: Role) -> Result<(), ServeError> {
        let failed = |error| ServeError::Spawn { process: role.name(), error };
        let (ours, theirs) = UnixStream::pair().map_err(failed)?;
        let (inherited, descriptors) = describe(&self.parts, role, &theirs);
        let (child, end) = child::spawn(role, &inherited, descriptors, &self.parts.sink).map_err(failed)?;
        drop(theirs);
        let slot = self.slot(role);
        slot.run += 1;
        slot.since = SystemClock.now();
        let (run, pid) = (slot.run, child.pid);
        slot.child = Some(child);
        let tell = self.tell.clone();
        tokio::task::spawn_local(async move {
            let reason = child::reason(end.await);
            let _ = tell.send(Event::Ended { role, run, reason }).await;
        });
        let tell = self.tell.clone();
        let feed = Arc::new(Feed::new(ours, move |news| {
            let _ = tell.blocking_send(Event::News { role, run, news });
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

    /// Without root the edge has the uid of whoever started nagaya.
    fn tenant_ids(&self) -> IdPolicy {
        let edge = self.parts.edge_identity;
        let edge_uid = edge.map_or_else(|| nix::unistd::geteuid().as_raw(), |edge| edge.uid);
        IdPolicy { edge_uid, ..self.parts.ids.policy() }
    }

    /// What the process is told of the configuration.
    fn options(&self, role: Role) -> serde_json::Value {
        let settings = &self.parts.settings;
        let cluster = self.parts.node.credentials.borrow().as_deref().cloned();
        match role {
            Role::Edge => serde_json::to_value(nagaya_edge::Options { cluster, ..settings.edge_options() }),
            Role::Keeper => {
                let mut options = settings.keeper_options(self.tenant_ids());
                options.node = cluster.map(|cluster| cluster.node);
                let KeeperFacts { image_keys, etcd } = self.parts.node.keeper_facts();
                (options.instances.image_keys, options.etcd) = (image_keys, etcd);
                serde_json::to_value(options)
            }
        }
        .expect("options hold numbers, texts and paths that came from a text")
    }

    fn news(&mut self, role: Role, news: News) {
        match news {
            News::Ready { revision } => {
                let mut started = None;
                self.parts.node.process(role, |process| {
                    if process.revision.replace(revision).is_none() {
                        started = process.pid;
                    }
                });
                if let (Role::Edge, Some(edge)) = (role, started) {
                    priority::have_one_thread_first(edge);
                }
                if self.phase == Phase::Starting && self.parts.node.all_ready() {
                    self.phase = Phase::Serving;
                    self.parts.node.set_ready();
                    notify::notify("READY=1");
                    let ms = SystemClock.now().duration_since(self.parts.node.started).as_millis();
                    tracing::info!(revision, "the node serves after {ms} ms");
                }
            }
            News::Place { tag, site, seen, why, lost, probe_us } => {
                if let (Some(cluster), Some(edge)) = (&self.parts.node.cluster, self.parts.node.feed(role)) {
                    cluster.place(Place { tag, site, seen, why, lost, probe_us, edge });
                }
            }
            News::Heard { node } => {
                if let Some(cluster) = &self.parts.node.cluster {
                    cluster.tell(Order::Heard(node));
                }
            }
            News::Doubt { node } => {
                if let Some(cluster) = &self.parts.node.cluster {
                    cluster.tell(Order::Doubt(node));
                }
            }
            News::VouchAsked { tag, id } => {
                if let (Some(cluster), Some(edge)) = (&self.parts.node.cluster, self.parts.node.feed(role)) {
                    cluster.tell(Order::Vouch { tag, id, edge });
                }
            }
            News::Vouched { round, id, moved } => {
                if let Some(cluster) = &self.parts.node.cluster {
                    cluster.tell(Order::Vouched { round, id, moved });
                }
            }
            News::Over { reason } => {
                // A process that is about to end closes its feed first; its end is told as such. One that does
                // not end can no longer be told anything, and must. One that was told to end has its own time for that.
                if self.slot(role).child.is_some() && self.phase < Phase::Draining {
                    let run = self.slot(role).run;
                    tracing::debug!("the feed of the {role} process is over: {reason}");
                    self.later(FEEDLESS_MAX, Event::Overdue { role, run });
                }
            }
        }
    }

    fn ended(&mut self, role: Role, reason: String) -> ControlFlow<Result<(), ServeError>> {
        let ran = SystemClock.now().duration_since(self.slot(role).since);
        self.slot(role).child = None;
        self.parts.node.process(role, |process| {
            process.pid = None;
            process.feed = None;
            process.revision = None;
            process.last_end = Some(reason.clone());
        });
        match (self.phase, role) {
            (Phase::Draining, Role::Edge) => {
                tracing::info!("the edge process has ended: {reason}");
                return self.close();
            }
            (Phase::Closing, Role::Keeper) => {
                tracing::info!("the keeper process has ended: {reason}");
                return ControlFlow::Break(Ok(()));
            }
            _ => {}
        }
        // While the node starts, nothing has served yet that could be forgiven for it.
        let served = if self.phase == Phase::Starting { Duration::ZERO } else { ran };
        let wait = self.slot(role).backoff.ended(served);
        let times = self.slot(role).backoff.ends();
        if self.phase == Phase::Starting && times >= FAILED_STARTS_MAX {
            return ControlFlow::Break(Err(ServeError::NeverReady { process: role.name(), times, reason }));
        }
        tracing::error!(
            code = "NGY0505",
            "the {role} process ended with {reason} after {} ms; it is started again in {} ms",
            ran.as_millis(),
            wait.as_millis()
        );
        self.later(wait, Event::Start(role));
        ControlFlow::Continue(())
    }

    /// The first time: let what runs finish. The second time: at once. The keeper still ends what it started, which
    /// is quick and leaves nothing behind; only if that hangs too, a further signal cuts it off.
    fn end(&mut self) -> ControlFlow<Result<(), ServeError>> {
        if self.phase >= Phase::Draining {
            let role = if self.phase == Phase::Draining { Role::Edge } else { Role::Keeper };
            tracing::warn!("told to end again: the {role} process is cut off");
            if let Some(child) = &self.slot(role).child {
                child.signal(Signal::KILL);
            }
            return ControlFlow::Continue(());
        }
        let drain = Duration::from_millis(self.parts.settings.edge.limits.drain_ms);
        tracing::info!("told to end: requests that run have {} ms to finish", drain.as_millis());
        notify::notify("STOPPING=1");
        self.phase = Phase::Draining;
        self.parts.node.set_draining();
        let run = self.slot(Role::Edge).run;
        if self.slot(Role::Edge).child.is_none() {
            return self.close();
        }
        if let Some(feed) = self.parts.node.feed(Role::Edge) {
            feed.send(Down::Drain);
        }
        // Otherwise new connections would be taken by the kernel and never answered.
        self.parts.listening.clear();
        self.parts.peers = None;
        self.later(drain + DRAIN_MARGIN, Event::Overdue { role: Role::Edge, run });
        ControlFlow::Continue(())
    }

    /// The edge is gone: the keeper ends everything that was started for it.
    fn close(&mut self) -> ControlFlow<Result<(), ServeError>> {
        self.phase = Phase::Closing;
        if self.slot(Role::Keeper).child.is_none() {
            return ControlFlow::Break(Ok(()));
        }
        if let Some(feed) = self.parts.node.feed(Role::Keeper) {
            feed.send(Down::Drain);
        }
        let run = self.slot(Role::Keeper).run;
        self.later(KEEPER_END, Event::Overdue { role: Role::Keeper, run });
        ControlFlow::Continue(())
    }

    fn reload(&mut self) {
        if self.phase == Phase::Serving {
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
                place::prepare_access_log(&self.parts.settings, self.parts.edge_identity);
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
        if self.phase == Phase::Serving {
            notify::notify("READY=1");
        }
    }

    /// From clients and nodes that connect from now on, as the limits are now.
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
        for role in Role::ALL {
            if let Some(feed) = self.parts.node.feed(role) {
                feed.send(Down::Options(self.options(role)));
            }
        }
    }

    fn reopen_logs(&self) {
        if let Err(error) = self.parts.sink.reopen() {
            tracing::error!(code = "NGY0506", "the log goes on to the old file: {error}");
        }
        place::prepare_access_log(&self.parts.settings, self.parts.edge_identity);
        if let Some(root) = &self.parts.edge_root {
            root.refresh();
        }
        self.parts.node.send_all(&Down::ReopenLogs);
        tracing::info!("logs were opened anew");
    }
}

/// Wakes the loop when the node becomes a member of a cluster, or its certificate changes.
fn follow_credentials(node: &Node, tell: mpsc::Sender<Event>) {
    let mut credentials = node.credentials.subscribe();
    tokio::task::spawn_local(async move {
        while credentials.changed().await.is_ok() {
            if tell.send(Event::Credentials).await.is_err() {
                return;
            }
        }
    });
}

/// What a process of this role inherits, described and borrowed.
fn describe<'a>(parts: &'a Parts, role: Role, feed: &'a UnixStream) -> (Inherited, Vec<BorrowedFd<'a>>) {
    let mut inherited = Inherited {
        supervisor: i32::try_from(std::process::id()).expect("Linux pids fit 22 bits"),
        feed: number(feed),
        listeners: Vec::new(),
        keeper: None,
        tickets: None,
        spool: None,
        root: None,
        now_us: parts.reckoning.now_us(),
        peers: None,
        identity: None,
        small_pages: false,
        log_level: parts.serve.log.clone().unwrap_or_else(|| parts.settings.log.level.clone()),
        log_json: logging::is_json(&parts.settings.log),
    };
    let mut descriptors = vec![feed.as_fd()];
    match role {
        Role::Keeper => {
            inherited.keeper = Some(number(&parts.keeper_socket));
            inherited.small_pages = rustix::thread::transparent_huge_pages_are_disabled() == Ok(false);
            descriptors.push(parts.keeper_socket.as_fd());
        }
        Role::Edge => {
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
