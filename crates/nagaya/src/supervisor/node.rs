//! State of the running node for the admin interface: status, health, metrics, and handing on
//! committed changes.
//!
//! Not here: deciding about processes (`supervisor`), HTTP (`admin`).

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nagaya_base::{Clock, SystemClock};
use nagaya_edge::options::ClusterOptions;
use nagaya_keeper::image::ClusterKey;
use nagaya_records::feed::{FeedQuery, FromSupervisor};
use nagaya_records::instance::{ExecCommand, InstanceCommand};
use nagaya_store::{Store, StoreError};
use nagaya_telemetry::{MetricFamily, MetricPage};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::balance::BalanceState;
use super::certificates::CertificateWatch;
use super::child::{ProcessRole, rss_bytes};
use super::cluster::{ClusterHandle, ClusterMember, not_configured};
use super::exposition::merge;
use super::feed::{CommittedBatch, ProcessFeed};
use super::stored_rules::StoredRules;
use super::tenant_watch;
use crate::admin::{self, BoxFuture, ClusterCommand, NodeHealth, ProblemReply};
use crate::identity::{self, MissingProtection};

/// Longest time of an action on an instance: more than the longest start, and less than the
/// command's wait.
const ACT_TIMEOUT: Duration = Duration::from_secs(330);

/// Time for which a writer of a record waits for the processes to have it in effect. It covers an
/// import of a hundred thousand sites.
const SERVED_WAIT_MAX: Duration = Duration::from_secs(10);

/// Shared by the supervisor, which writes it, and the admin interface, which reads it.
pub struct SupervisedNode {
    pub name: String,
    pub store: Arc<dyn Store>,
    pub started: Instant,
    /// Unix time of the start, seconds.
    pub started_unix: u64,
    pub listen: Vec<ListenView>,
    pub protections: Vec<MissingProtection>,
    /// `None` on a node that cannot join a cluster.
    pub cluster: Option<ClusterHandle>,
    /// The edge's options about the cluster, on each change. `None` if this node is in none.
    pub credentials: watch::Sender<Option<Arc<ClusterOptions>>>,
    /// Additional data for the keeper. The edge never gets it.
    keeper_facts: Mutex<KeeperFacts>,
    pub balance: BalanceState,
    pub certificates: CertificateWatch,
    pub tenants: tenant_watch::TenantWatch,
    pub rules: StoredRules,
    state: Mutex<NodeState>,
    /// The revision that each process has in effect.
    revisions: watch::Sender<[Option<u64>; 2]>,
}

/// The keeper's data about the cluster. Empty on a node alone.
#[derive(Clone, Default)]
pub struct KeeperFacts {
    /// Keys of images, the newest first.
    pub image_keys: Vec<ClusterKey>,
    /// `host:port` of each endpoint of etcd.
    pub etcd: Vec<String>,
}

/// One listening address.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct ListenView {
    pub address: String,
    pub tls: bool,
    pub proxy_protocol: bool,
}

#[derive(Default)]
struct NodeState {
    processes: [ProcessStatus; 2],
    ready: bool,
    draining: bool,
    reloads: u64,
    reloads_refused: u64,
    /// Settings that were changed in the file and take effect at the next start.
    needs_restart: Vec<&'static str>,
}

/// One process, whether it runs or waits to be started.
#[derive(Default, Clone)]
pub struct ProcessStatus {
    pub pid: Option<i32>,
    pub feed: Option<Arc<ProcessFeed>>,
    pub restarts: u64,
    /// The revision that it serves. `None` before its first report.
    pub revision: Option<u64>,
    pub last_end: Option<String>,
}

impl SupervisedNode {
    pub fn new(
        name: String,
        store: Arc<dyn Store>,
        listen: Vec<ListenView>,
        protections: Vec<MissingProtection>,
        cluster: Option<ClusterHandle>,
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
            balance: BalanceState::default(),
            certificates: CertificateWatch::default(),
            tenants: tenant_watch::TenantWatch::default(),
            rules,
            state: Mutex::default(),
            revisions: watch::Sender::default(),
        }
    }

    /// Sets the member. It comes before the matching credentials, which are the signal for the
    /// processes.
    pub fn set_member(&self, member: &ClusterMember) {
        let etcd = member.etcd.places();
        *self.keeper_facts.lock() = KeeperFacts { image_keys: member.image_keys.clone(), etcd };
    }

    pub fn keeper_facts(&self) -> KeeperFacts {
        self.keeper_facts.lock().clone()
    }

    pub fn process(&self, role: ProcessRole, change: impl FnOnce(&mut ProcessStatus)) {
        let mut state = self.state.lock();
        let process = &mut state.processes[role as usize];
        change(process);
        let revision = process.revision;
        self.revisions
            .send_if_modified(|all| std::mem::replace(&mut all[role as usize], revision) != revision);
    }

    pub fn feed(&self, role: ProcessRole) -> Option<Arc<ProcessFeed>> {
        self.state.lock().processes[role as usize].feed.clone()
    }

    /// Sends a frame to every process that runs.
    pub fn send_all(&self, frame: &FromSupervisor) {
        for role in ProcessRole::ALL {
            if let Some(feed) = self.feed(role) {
                feed.send(frame.clone());
            }
        }
    }

    /// Returns whether every process has reported that it serves.
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

    /// Waits for a revision. A process that is being restarted gets it, too.
    async fn serves(&self, revision: u64) -> bool {
        let mut revisions = self.revisions.subscribe();
        let all = revisions.wait_for(|all| all.iter().all(|one| one.is_some_and(|one| one >= revision)));
        tokio::time::timeout(SERVED_WAIT_MAX, all).await.is_ok_and(|waited| waited.is_ok())
    }

    /// Hands a committed transaction to every process, and its rules to the edge's directory. Must
    /// be called in order of revision.
    pub fn committed(&self, changes: CommittedBatch) {
        self.rules.follow(&changes.changes);
        let changes = Arc::new(changes);
        for role in ProcessRole::ALL {
            if let Some(feed) = self.feed(role) {
                feed.changes(Arc::clone(&changes));
            }
        }
    }

    /// Returns why the node does not serve, if it does not.
    fn unhealthy(&self) -> Option<String> {
        let state = self.state.lock();
        if state.draining {
            return Some("the node is being stopped".into());
        }
        let starting = |role: &&ProcessRole| state.processes[**role as usize].revision.is_none();
        ProcessRole::ALL.iter().find(starting).map(|role| format!("the {role} process is being started"))
    }

    async fn full_status(&self) -> Value {
        let (edge, keeper) = tokio::join!(
            self.query_process(ProcessRole::Edge, FeedQuery::Status),
            self.query_process(ProcessRole::Keeper, FeedQuery::Status)
        );
        let parsed = |text: Option<String>| text.and_then(|text| serde_json::from_str::<Value>(&text).ok());
        let revision = self.store.revision();
        let counts = self.store.counts();
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
        let (edge, keeper) = tokio::join!(
            self.query_process(ProcessRole::Edge, FeedQuery::Metrics),
            self.query_process(ProcessRole::Keeper, FeedQuery::Metrics)
        );
        let mut pages = vec![self.own_metrics()];
        pages.extend(edge);
        pages.extend(keeper);
        merge(&pages)
    }

    /// Queries a process. `None` if it does not run, or did not answer in time.
    pub async fn query_process(&self, role: ProcessRole, question: FeedQuery) -> Option<String> {
        let feed = self.feed(role)?;
        feed.query(question).await
    }

    fn own_metrics(&self) -> String {
        let revision = self.store.revision().unwrap_or_default();
        let counts = self.store.counts().unwrap_or_default();
        let state = self.state.lock();
        let mut page = MetricPage::default();
        page.gauges("nagaya_build_info", "The version that runs.")
            .add([("version", env!("CARGO_PKG_VERSION"))], 1u64);
        page.gauges("nagaya_start_time_seconds", "Unix time at which the node started.")
            .add([], self.started_unix);
        page.gauges("nagaya_ready", "Whether the node serves.")
            .add([], u64::from(state.ready && !state.draining));
        page.gauges("nagaya_store_tenants", "Tenants in the store.").add([], counts.tenants);
        page.gauges("nagaya_store_sites", "Sites in the store.").add([], counts.sites);
        page.gauges("nagaya_store_settings", "Settings of rules in the store.").add([], counts.settings);
        page.gauges("nagaya_store_revision", "Revision of the store.").add([], revision);
        let add_each = |family: &mut MetricFamily, value: fn(&ProcessStatus) -> Option<u64>| {
            for role in ProcessRole::ALL {
                if let Some(value) = value(&state.processes[role as usize]) {
                    family.add([("process", role.name())], value);
                }
            }
        };
        let fed = page.gauges("nagaya_process_revision", "Revision each process serves.");
        add_each(fed, |process| process.revision);
        let up = page.gauges("nagaya_process_up", "Whether the process runs.");
        add_each(up, |process| Some(u64::from(process.pid.is_some())));
        let restarts = page.counters("nagaya_process_restarts_total", "Starts after an unwanted end.");
        add_each(restarts, |process| Some(process.restarts));
        let rss = page.gauges("nagaya_process_resident_memory_bytes", "Resident memory of the process.");
        add_each(rss, |process| process.pid.and_then(rss_bytes));
        if let Some(bytes) = own_pid().and_then(rss_bytes) {
            rss.add([("process", "supervisor")], bytes);
        }
        let reloads = page.counters("nagaya_config_reloads_total", "Reloads of the configuration.");
        reloads.add([("result", "accepted")], state.reloads);
        reloads.add([("result", "refused")], state.reloads_refused);
        if let Some(cluster) = &self.cluster {
            cluster.health.expose(&mut page);
        }
        self.certificates.expose(&mut page);
        self.tenants.expose(&mut page);
        self.balance.told.expose(&mut page);
        page.encode()
    }
}

impl admin::AdminNode for SupervisedNode {
    fn metrics(&self) -> BoxFuture<'_, String> {
        Box::pin(self.all_metrics())
    }

    fn health(&self) -> BoxFuture<'_, NodeHealth> {
        let unhealthy = self.unhealthy();
        let health = NodeHealth { ok: unhealthy.is_none(), text: unhealthy.unwrap_or_else(|| "ok".into()) };
        Box::pin(std::future::ready(health))
    }

    fn serves_by(&self, revision: u64) -> BoxFuture<'_, bool> {
        Box::pin(self.serves(revision))
    }

    fn status(&self) -> BoxFuture<'_, Value> {
        Box::pin(self.full_status())
    }

    fn cells(&self) -> BoxFuture<'_, Option<String>> {
        Box::pin(self.query_process(ProcessRole::Keeper, FeedQuery::Cells))
    }

    fn instances(&self) -> BoxFuture<'_, Option<String>> {
        Box::pin(self.query_process(ProcessRole::Keeper, FeedQuery::Instances))
    }

    fn instance(&self, site: String, act: InstanceCommand) -> BoxFuture<'_, Option<String>> {
        Box::pin(async move {
            let feed = self.feed(ProcessRole::Keeper)?;
            feed.query_within(ACT_TIMEOUT, FeedQuery::Instance { site, act }).await
        })
    }

    fn exec(&self, exec: ExecCommand, connection: OwnedFd) -> bool {
        let Some(feed) = self.feed(ProcessRole::Keeper) else { return false };
        feed.pass(FromSupervisor::Exec(exec), connection);
        true
    }

    fn cluster(&self, ask: ClusterCommand) -> BoxFuture<'_, Result<Value, Box<ProblemReply>>> {
        match &self.cluster {
            Some(cluster) => Box::pin(cluster.run_command(ask)),
            None => Box::pin(std::future::ready(Err(not_configured()))),
        }
    }

    fn balance(&self, site: &str) -> Value {
        self.balance.told.describe_site(site)
    }

    fn requests(&self) -> BoxFuture<'_, Option<String>> {
        Box::pin(self.query_process(ProcessRole::Edge, FeedQuery::Requests))
    }

    fn explain(&self, id: String) -> BoxFuture<'_, Option<String>> {
        Box::pin(self.query_process(ProcessRole::Edge, FeedQuery::Explain { id }))
    }
}

fn own_pid() -> Option<i32> {
    i32::try_from(std::process::id()).ok()
}

fn processes(state: &NodeState) -> Vec<Value> {
    let own = own_pid();
    let mut all = vec![
        json!({ "name": "supervisor", "pid": own, "rss_bytes": own.and_then(rss_bytes), "restarts": 0 }),
    ];
    all.extend(ProcessRole::ALL.iter().map(|role| {
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
