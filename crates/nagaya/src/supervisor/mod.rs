//! The life of a node: made in order, kept running, taken down in reverse. Start reading here for
//! everything that is not a request.
//!
//! The supervisor owns the store, the listening sockets and the admin interface. It starts the
//! keeper and the edge, feeds them, and restarts them when they end. Not here: requests
//! (`nagaya_edge`), tenants' processes (`nagaya_keeper`).

mod backoff;
mod balance;
mod call_filter;
mod certificates;
mod child;
mod cluster;
mod edge_root;
mod error;
mod exposition;
mod feed;
mod life;
mod node;
mod notify;
mod priority;
mod reload;
mod rights;
mod rule_checker;
mod runtime_dir;
mod sockets;
mod stored_rules;
mod tenant_watch;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use nagaya_base::AnchoredClock;
use nagaya_store::{RedbStore, Store};
use nix::unistd::Uid;
use tokio::task::LocalSet;

pub use cluster::{StoreAccess, hold_certificate};
pub use edge_root::try_edge_root;
pub use error::ServeError;
pub use node::SupervisedNode;
pub use rights::{run_edge, run_keeper};
pub use rule_checker::{run_rule_check, run_rule_try};

use self::cluster::NodeRecords;
use self::edge_root::EdgeRoot;
use self::feed::CommittedBatch;
use self::life::{ManagerParts, ProcessManager};
use self::node::ListenView;
use self::sockets::{AdminAudience, BoundSockets, PeerSocketsFile};
use self::stored_rules::StoredRules;
use crate::config::settings::ListenSettings;
use crate::config::{self, LoadedConfig, NodeSettings};
use crate::identity::{self, KernelFacts, ProcessIdentity};
use crate::logging::{self, LogSink};
use crate::tenant_ids::{IdSource, gid_of};
use crate::{admin, doctor};

/// Values from the command line.
#[derive(Debug, Clone)]
pub struct ServeOptions {
    pub config: Option<PathBuf>,
    /// Overrides the configured log level.
    pub log: Option<String>,
}

/// `nagaya serve`: runs the node until a signal ends it.
pub fn serve(serve: ServeOptions) -> Result<(), ServeError> {
    let LoadedConfig { settings, file } =
        config::load(serve.config.as_deref()).map_err(ServeError::Configuration)?;
    let sink = open_log(&settings)?;
    logging::start(
        serve.log.as_deref().unwrap_or(&settings.log.level),
        logging::is_json(&settings.log),
        sink.clone(),
    );
    log_start(file.as_deref());

    // Held to the end of this function: sockets and directories go once they are unused.
    let place = runtime_dir::RuntimeDir::claim(&settings)?;
    let records = Arc::new(NodeRecords::new(RedbStore::open(&settings.store())?));
    let edge_identity = identity::of_edge(&settings);
    let edge_root = edge_root(edge_identity);
    let protections = identity::protections(facts(edge_root.is_some()));
    log_protections(&protections, edge_identity);
    let listening = sockets::listen(&settings.listen, settings.edge_threads(), &settings.edge.limits)?;
    let peers = peers(&settings)?;
    let rules = stored_rules(&settings, edge_identity, &*records)?;
    let owner = edge_identity.map(|identity| (identity.uid, identity.gid));
    let keeper_socket = sockets::listen_keeper(&settings.keeper_socket(), owner)?;
    let audience = admin_audience(&settings);
    let admin_socket = sockets::listen_admin(&settings.admin_socket(), audience)?;
    runtime_dir::prepare_access_log(&settings, edge_identity);
    if let Some(root) = &edge_root {
        root.configure(&settings);
    }

    let listen = listening.iter().map(view_listening).collect();
    let (handle, orders) = cluster::channel();
    let node = Arc::new(SupervisedNode::new(
        settings.node_name(),
        Arc::clone(&records) as Arc<dyn Store>,
        listen,
        protections,
        peers.is_some().then_some(handle),
        rules,
    ));
    node.balance.configure(&settings.balance);
    node.certificates.configure(settings.keeper.certificates.clone());
    log_listening(&listening);
    if let Some(peers) = &peers {
        begin_cluster(&settings, peers, &node, records, orders)?;
    }
    let ids = IdSource::of(&settings);
    let parts = ManagerParts {
        serve,
        settings: settings.clone(),
        sink,
        listening,
        keeper_socket,
        edge_identity,
        ids: ids.clone(),
        tickets: runtime_dir::prepare_tickets(&settings, edge_identity, edge_root.is_some()),
        spool: runtime_dir::prepare_spool(&settings, edge_identity, edge_root.is_some()),
        edge_root,
        anchored_clock: AnchoredClock::of_wall(),
        peers,
        node: Arc::clone(&node),
    };
    let access = admin::AccessList::new(&settings.admin, Uid::effective().as_raw());
    let result = run(parts, admin_socket, admin_parts(ids, node, access));
    drop(place);
    if result.is_ok() {
        tracing::info!("nagaya has ended");
    }
    result
}

fn log_start(file: Option<&Path>) {
    match file {
        Some(file) => {
            tracing::info!(config = %file.display(), version = env!("CARGO_PKG_VERSION"), "nagaya starts")
        }
        None => {
            tracing::info!(version = env!("CARGO_PKG_VERSION"), "nagaya starts without a configuration file")
        }
    }
}

/// Returns the edge's own root directory. `None` without root, and if no mounts can be made.
fn edge_root(identity: Option<ProcessIdentity>) -> Option<Arc<EdgeRoot>> {
    identity?;
    match EdgeRoot::make() {
        Ok(root) => Some(Arc::new(root)),
        Err(error) => {
            tracing::warn!(code = %edge_root::CODE, %error, "the edge has no root directory of its own");
            None
        }
    }
}

/// Returns the rules of the store as files for the edge, before it starts.
fn stored_rules(
    settings: &NodeSettings,
    edge: Option<ProcessIdentity>,
    records: &dyn Store,
) -> Result<StoredRules, ServeError> {
    let dir = settings.rules_dir();
    let failed = |error| ServeError::Directory { path: dir.clone(), error };
    let rules = StoredRules::make(dir.clone(), edge.map(|edge| edge.gid)).map_err(failed)?;
    rules.take_all(records);
    Ok(rules)
}

/// Returns the sockets for other nodes, if this one can join a cluster.
fn peers(settings: &NodeSettings) -> Result<Option<PeerSocketsFile>, ServeError> {
    let Some(listen) = &settings.cluster.listen else { return Ok(None) };
    let address = listen.parse().expect("the check of the configuration has parsed it");
    let peers = sockets::listen_peers(address, settings.edge_threads(), &settings.edge.limits)?;
    tracing::info!(address = %peers.address, "listening for other nodes");
    Ok(Some(peers))
}

/// Starts the cluster's thread, which waits for commands if this node is not a member.
fn begin_cluster(
    settings: &NodeSettings,
    peers: &PeerSocketsFile,
    node: &Arc<SupervisedNode>,
    records: Arc<NodeRecords>,
    orders: tokio::sync::mpsc::Receiver<cluster::ClusterOrder>,
) -> Result<(), ServeError> {
    let dir = settings.cluster_dir();
    let member = cluster::ClusterMember::load(&dir)?;
    let configured = &settings.cluster;
    if let Some(member) = &member {
        // Before the processes start: they must run nothing that is not placed here.
        node.set_member(member);
        let credentials = cluster::edge_options(member, configured);
        node.credentials.send_replace(Some(credentials));
    }
    let advertise = configured
        .advertise
        .as_deref()
        .map(|address| address.parse().expect("the check of the configuration has parsed it"));
    let context = cluster::ClusterContext {
        node: Arc::clone(node),
        records,
        dir,
        peer: advertise.unwrap_or(peers.address),
        configured: configured.clone(),
    };
    cluster::start(context, member, orders).map_err(ServeError::Runtime)
}

/// Runs the node's loop and the admin interface side by side, on this thread.
fn run(
    parts: ManagerParts,
    admin_socket: std::os::unix::net::UnixListener,
    admin_parts: admin::AdminParts,
) -> Result<(), ServeError> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(ServeError::Runtime)?;
    let result = LocalSet::new().block_on(&runtime, async {
        let admin_socket = tokio::net::UnixListener::from_std(admin_socket).map_err(ServeError::Runtime)?;
        let admin = tokio::task::spawn_local(admin::serve(admin_socket, admin_parts));
        let balance = tokio::task::spawn_local(balance::keep(Arc::clone(&parts.node)));
        let rules = tokio::task::spawn_local(stored_rules::keep(Arc::clone(&parts.node)));
        let certificates = tokio::task::spawn_local(certificates::keep(Arc::clone(&parts.node)));
        let tenants =
            tokio::task::spawn_local(tenant_watch::keep(Arc::clone(&parts.node), parts.ids.clone()));
        let edge_root = parts.edge_root.clone().map(|root| tokio::task::spawn_local(edge_root::keep(root)));
        let result = ProcessManager::new(parts)?.run().await;
        balance.abort();
        rules.abort();
        certificates.abort();
        tenants.abort();
        if let Some(edge_root) = edge_root {
            edge_root.abort();
        }
        admin.abort();
        result
    });
    // Running store calls of the admin interface must not delay the end.
    runtime.shutdown_background();
    result
}

/// Returns the parts of the admin interface: the node hands committed changes to the processes.
fn admin_parts(ids: IdSource, node: Arc<SupervisedNode>, access: admin::AccessList) -> admin::AdminParts {
    let watcher = Arc::clone(&node);
    admin::AdminParts {
        store: Arc::clone(&node.store),
        on_change: Arc::new(move |changes, revision| watcher.committed(CommittedBatch { revision, changes })),
        node,
        ids,
        access,
    }
}

fn open_log(settings: &NodeSettings) -> Result<LogSink, ServeError> {
    let path = settings.log.file.as_deref();
    LogSink::open(path).map_err(|error| ServeError::Log { path: path.unwrap_or("-".as_ref()).into(), error })
}

fn facts(edge_root: bool) -> KernelFacts {
    KernelFacts {
        edge_root,
        root: Uid::effective().is_root(),
        cgroup: Uid::effective().is_root() && doctor::cgroup_is_usable(),
        openat2: doctor::has_openat2(),
    }
}

/// Logs disabled protections at start, so that no operator relies on them.
fn log_protections(protections: &[identity::MissingProtection], edge: Option<ProcessIdentity>) {
    for protection in protections.iter().filter(|protection| !protection.on) {
        tracing::warn!(
            code = "NGY0508",
            "{} is off: {}; {}",
            protection.name,
            protection.why,
            protection.how
        );
    }
    if let Some(identity) = edge.filter(|identity| identity.fallback) {
        tracing::warn!(
            code = "NGY0509",
            uid = identity.uid,
            "there is no user 'nagaya': the edge uses a uid without a user; to make the user: useradd \
             --system --no-create-home --shell /usr/sbin/nologin nagaya"
        );
    }
}

fn view_listening(at: &BoundSockets) -> ListenView {
    let ListenSettings { tls, proxy_protocol, .. } = at.wanted;
    ListenView { address: at.address.to_string(), tls, proxy_protocol }
}

fn log_listening(listening: &[BoundSockets]) {
    for at in listening {
        tracing::info!(address = %at.address, tls = at.wanted.tls, sockets = at.sockets.len(), "listening");
    }
}

/// Returns who may connect to the admin interface. The check of the configuration has reported
/// unknown users and groups.
fn admin_audience(settings: &NodeSettings) -> AdminAudience {
    let admin = &settings.admin;
    if !(admin.read.is_empty() && admin.operate.is_empty() && admin.all.is_empty()) {
        return AdminAudience::Everybody;
    }
    match admin.group.as_deref().and_then(gid_of) {
        Some(gid) => AdminAudience::Group(gid),
        None => AdminAudience::Owner,
    }
}
