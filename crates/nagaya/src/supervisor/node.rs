//! What is known of the running node, for the admin interface: status, health, metrics, and handing on what
//! was committed.
//!
//! Not here: deciding about processes (`supervisor`), HTTP (`admin`).

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nagaya_base::{Clock, SystemClock};
use nagaya_cmdb::feed::{Down, Question};
use nagaya_cmdb::instance::{Act, Exec};
use nagaya_cmdb::store::{Store, StoreError};
use nagaya_edge::options::ClusterOptions;
use nagaya_keeper::image::ClusterKey;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::balance::Balance;
use super::certificates::Watch;
use super::child::{Role, rss_bytes};
use super::cluster;
use super::exposition::{Page, merge};
use super::feed::{Changes, Feed};
use super::identity::{self, Protection};
use super::stored_rules::StoredRules;
use super::tenant_watch;
use crate::admin::{self, Ask, BoxFuture, Health, Problem};

/// How long something done to an instance may take: more than the longest start, and less than the command waits.
const ACT_TIMEOUT: Duration = Duration::from_secs(330);

/// How long who changed a record waits for the processes to serve by it. An import of a hundred thousand sites is within it.
const SERVED_WAIT_MAX: Duration = Duration::from_secs(10);

/// Shared by the supervisor, which writes it, and the admin interface, which reads it.
pub struct Node {
    pub name: String,
    pub store: Arc<dyn Store>,
    pub started: Instant,
    /// Unix time of the start, seconds.
    pub started_unix: u64,
    pub listen: Vec<ListenView>,
    pub protections: Vec<Protection>,
    /// None on a node that can be in no cluster.
    pub cluster: Option<cluster::Handle>,
    /// What the edge is told of the cluster, whenever that changes. None: this node is in none.
    pub credentials: watch::Sender<Option<Arc<ClusterOptions>>>,
    /// What the keeper is told besides. The edge never is.
    keeper_facts: Mutex<KeeperFacts>,
    pub balance: Balance,
    pub certificates: Watch,
    pub tenants: tenant_watch::Watch,
    pub rules: StoredRules,
    state: Mutex<State>,
    /// By which revision each process serves.
    revisions: watch::Sender<[Option<u64>; 2]>,
}

/// What the keeper has to know of the cluster. On a node alone it is nothing.
#[derive(Clone, Default)]
pub struct KeeperFacts {
    /// Of images, the newest first.
    pub image_keys: Vec<ClusterKey>,
    /// `host:port` of each endpoint of etcd.
    pub etcd: Vec<String>,
}

/// One address as it is listened on.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct ListenView {
    pub address: String,
    pub tls: bool,
    pub proxy_protocol: bool,
}

#[derive(Default)]
struct State {
    processes: [Process; 2],
    ready: bool,
    draining: bool,
    reloads: u64,
    reloads_refused: u64,
    /// Settings that were changed in the file and hold from the next start.
    needs_restart: Vec<&'static str>,
}

/// One process, whether it runs or waits to be started.
#[derive(Default, Clone)]
pub struct Process {
    pub pid: Option<i32>,
    pub feed: Option<Arc<Feed>>,
    pub restarts: u64,
    /// What it serves. None: it has not said yet.
    pub revision: Option<u64>,
    pub last_end: Option<String>,
}

impl Node {
    pub fn new(
        name: String,
        store: Arc<dyn Store>,
        listen: Vec<ListenView>,
        protections: Vec<Protection>,
        cluster: Option<cluster::Handle>,
        rules: StoredRules,
    ) -> Self {
        let wall = SystemClock.wall().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        Self {
            name,
            store,
            started: SystemClock.now(),
            started_unix: wall.as_secs(),
            listen,
            protections,
            cluster,
            credentials: watch::Sender::new(None),
            keeper_facts: Mutex::default(),
            balance: Balance::default(),
            certificates: Watch::default(),
            tenants: tenant_watch::Watch::default(),
            rules,
            state: Mutex::default(),
            revisions: watch::Sender::default(),
        }
    }

    /// Before the credentials that go with them: these have the processes told.
    pub fn set_member(&self, member: &cluster::Member) {
        let etcd = member.etcd.places();
        *self.keeper_facts.lock() = KeeperFacts { image_keys: member.image_keys.clone(), etcd };
    }

    pub fn keeper_facts(&self) -> KeeperFacts {
        self.keeper_facts.lock().clone()
    }

    pub fn process(&self, role: Role, change: impl FnOnce(&mut Process)) {
        let mut state = self.state.lock();
        let process = &mut state.processes[role as usize];
        change(process);
        let revision = process.revision;
        self.revisions
            .send_if_modified(|all| std::mem::replace(&mut all[role as usize], revision) != revision);
    }

    pub fn feed(&self, role: Role) -> Option<Arc<Feed>> {
        self.state.lock().processes[role as usize].feed.clone()
    }

    /// Sends a frame to every process that runs.
    pub fn send_all(&self, frame: &Down) {
        for role in Role::ALL {
            if let Some(feed) = self.feed(role) {
                feed.send(frame.clone());
            }
        }
    }

    /// Whether every process has said that it serves.
    pub fn all_ready(&self) -> bool {
        self.state.lock().processes.iter().all(|process| process.revision.is_some())
    }

    pub fn set_ready(&self) {
        self.state.lock().ready = true;
    }

    pub fn set_draining(&self) {
        self.state.lock().draining = true;
    }

    pub fn reloaded(&self, needs_restart: Vec<&'static str>) {
        let mut state = self.state.lock();
        state.reloads += 1;
        state.needs_restart = needs_restart;
    }

    pub fn reload_refused(&self) {
        self.state.lock().reloads_refused += 1;
    }

    /// A process that is being started gets this revision, too.
    async fn serves(&self, revision: u64) -> bool {
        let mut revisions = self.revisions.subscribe();
        let all = revisions.wait_for(|all| all.iter().all(|one| one.is_some_and(|one| one >= revision)));
        tokio::time::timeout(SERVED_WAIT_MAX, all).await.is_ok_and(|waited| waited.is_ok())
    }

    /// Hands a committed transaction to every process, and its rules to the edge's directory. Must be called in order of revision.
    pub fn committed(&self, changes: Changes) {
        self.rules.follow(&changes.changes);
        let changes = Arc::new(changes);
        for role in Role::ALL {
            if let Some(feed) = self.feed(role) {
                feed.changes(Arc::clone(&changes));
            }
        }
    }

    /// Why the node does not serve, if it does not.
    fn unhealthy(&self) -> Option<String> {
        let state = self.state.lock();
        if state.draining {
            return Some("the node is being stopped".into());
        }
        let starting = |role: &&Role| state.processes[**role as usize].revision.is_none();
        Role::ALL.iter().find(starting).map(|role| format!("the {role} process is being started"))
    }

    async fn full_status(&self) -> Value {
        let (edge, keeper) =
            tokio::join!(self.ask(Role::Edge, Question::Status), self.ask(Role::Keeper, Question::Status));
        let parsed = |text: Option<String>| text.and_then(|text| serde_json::from_str::<Value>(&text).ok());
        let (revision, counts) = (self.store.revision(), self.store.counts());
        let store_error = revision.as_ref().err().or(counts.as_ref().err()).map(StoreError::to_string);
        let counts = counts.unwrap_or_default();
        let unhealthy = self.unhealthy();
        let keeper = parsed(keeper);
        let apart = keeper.as_ref().and_then(|keeper| keeper["enclosures"]["off"].as_str());
        let protections = identity::with_keepers(self.protections.clone(), apart);
        let state = self.state.lock();
        json!({
            "node": self.name,
            "version": env!("CARGO_PKG_VERSION"),
            "healthy": unhealthy.is_none(),
            "reason": unhealthy,
            "uptime_seconds": SystemClock.now().duration_since(self.started).as_secs(),
            "revision": revision.ok(),
            "store_error": store_error,
            "tenants": counts.tenants,
            "sites": counts.sites,
            "settings": counts.settings,
            "listen": self.listen,
            "processes": processes(&state),
            "protections": protections,
            "needs_restart": state.needs_restart,
            "certificates": self.certificates.status(),
            "cluster_store": self.cluster.as_ref().map(|cluster| cluster.health.status()),
            "edge": parsed(edge),
            "keeper": keeper,
        })
    }

    async fn all_metrics(&self) -> String {
        let (edge, keeper) =
            tokio::join!(self.ask(Role::Edge, Question::Metrics), self.ask(Role::Keeper, Question::Metrics));
        let mut pages = vec![self.own_metrics()];
        pages.extend(edge);
        pages.extend(keeper);
        merge(&pages)
    }

    /// None: it does not run, or did not answer in time.
    pub async fn ask(&self, role: Role, question: Question) -> Option<String> {
        let feed = self.feed(role)?;
        feed.ask(question).await
    }

    fn own_metrics(&self) -> String {
        let (revision, counts) =
            (self.store.revision().unwrap_or_default(), self.store.counts().unwrap_or_default());
        let state = self.state.lock();
        let one = |value| [(String::new(), value)];
        let each = |value: fn(&Process) -> Option<u64>| -> Vec<(String, u64)> {
            let of = |role: &Role| Some((label(role.name()), value(&state.processes[*role as usize])?));
            Role::ALL.iter().filter_map(of).collect()
        };
        let mut rss = each(|process| process.pid.and_then(rss_bytes));
        rss.extend(own_pid().and_then(rss_bytes).map(|bytes| (label("supervisor"), bytes)));
        let mut page = Page::default();
        let build = [(format!("version=\"{}\"", env!("CARGO_PKG_VERSION")), 1)];
        page.family("nagaya_build_info", "gauge", "The version that runs.", &build);
        page.family(
            "nagaya_start_time_seconds",
            "gauge",
            "Unix time at which the node started.",
            &one(self.started_unix),
        );
        page.family(
            "nagaya_ready",
            "gauge",
            "Whether the node serves.",
            &one(u64::from(state.ready && !state.draining)),
        );
        page.family("nagaya_store_tenants", "gauge", "Tenants in the store.", &one(counts.tenants));
        page.family("nagaya_store_sites", "gauge", "Sites in the store.", &one(counts.sites));
        page.family(
            "nagaya_store_settings",
            "gauge",
            "Settings of rules in the store.",
            &one(counts.settings),
        );
        page.family("nagaya_store_revision", "gauge", "Revision of the store.", &one(revision));
        let fed = each(|process| process.revision);
        page.family("nagaya_process_revision", "gauge", "Revision each process serves.", &fed);
        let up = each(|process| Some(u64::from(process.pid.is_some())));
        page.family("nagaya_process_up", "gauge", "Whether the process runs.", &up);
        let restarts = each(|process| Some(process.restarts));
        page.family("nagaya_process_restarts_total", "counter", "Starts after an unwanted end.", &restarts);
        page.family("nagaya_process_resident_memory_bytes", "gauge", "Resident memory of the process.", &rss);
        let reloads = [
            ("result=\"accepted\"".into(), state.reloads),
            ("result=\"refused\"".into(), state.reloads_refused),
        ];
        page.family("nagaya_config_reloads_total", "counter", "Reloads of the configuration.", &reloads);
        if let Some(cluster) = &self.cluster {
            cluster.health.expose(&mut page);
        }
        self.certificates.expose(&mut page);
        self.tenants.expose(&mut page);
        self.balance.told.expose(&mut page);
        page.into_text()
    }
}

impl admin::Node for Node {
    fn metrics(&self) -> BoxFuture<'_, String> {
        Box::pin(self.all_metrics())
    }

    fn health(&self) -> BoxFuture<'_, Health> {
        let unhealthy = self.unhealthy();
        let health = Health { ok: unhealthy.is_none(), text: unhealthy.unwrap_or_else(|| "ok".into()) };
        Box::pin(std::future::ready(health))
    }

    fn serves_by(&self, revision: u64) -> BoxFuture<'_, bool> {
        Box::pin(self.serves(revision))
    }

    fn status(&self) -> BoxFuture<'_, Value> {
        Box::pin(self.full_status())
    }

    fn cells(&self) -> BoxFuture<'_, Option<String>> {
        Box::pin(self.ask(Role::Keeper, Question::Cells))
    }

    fn instances(&self) -> BoxFuture<'_, Option<String>> {
        Box::pin(self.ask(Role::Keeper, Question::Instances))
    }

    fn instance(&self, site: String, act: Act) -> BoxFuture<'_, Option<String>> {
        Box::pin(async move {
            let feed = self.feed(Role::Keeper)?;
            feed.ask_within(ACT_TIMEOUT, Question::Instance { site, act }).await
        })
    }

    fn exec(&self, exec: Exec, connection: OwnedFd) -> bool {
        let Some(feed) = self.feed(Role::Keeper) else { return false };
        feed.pass(Down::Exec(exec), connection);
        true
    }

    fn cluster(&self, ask: Ask) -> BoxFuture<'_, Result<Value, Box<Problem>>> {
        match &self.cluster {
            Some(cluster) => Box::pin(cluster.ask(ask)),
            None => Box::pin(std::future::ready(Err(cluster::not_configured()))),
        }
    }

    fn balance(&self, site: &str) -> Value {
        self.balance.told.of(site)
    }

    fn requests(&self) -> BoxFuture<'_, Option<String>> {
        Box::pin(self.ask(Role::Edge, Question::Requests))
    }

    fn explain(&self, id: String) -> BoxFuture<'_, Option<String>> {
        Box::pin(self.ask(Role::Edge, Question::Explain { id }))
    }
}

fn label(process: &str) -> String {
    format!("process=\"{process}\"")
}

fn own_pid() -> Option<i32> {
    i32::try_from(std::process::id()).ok()
}

fn processes(state: &State) -> Vec<Value> {
    let own = own_pid();
    let mut all = vec![
        json!({ "name": "supervisor", "pid": own, "rss_bytes": own.and_then(rss_bytes), "restarts": 0 }),
    ];
    all.extend(Role::ALL.iter().map(|role| {
        let process = &state.processes[*role as usize];
        json!({
            "name": role.name(),
            "pid": process.pid,
            "rss_bytes": process.pid.and_then(rss_bytes),
            "restarts": process.restarts,
            "revision": process.revision,
            "last_end": process.last_end,
        })
    }));
    all
}
