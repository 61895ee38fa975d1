//! The life of a node: made in order, kept running, taken down in reverse. Start reading here for everything
//! that is not a request.
//!
//! The supervisor owns the store, the listening sockets and the admin interface; it starts the keeper and the edge, feeds them,
//! and starts them anew when they end. Not here: requests (`nagaya_edge`), tenants' processes (`nagaya_keeper`).

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
pub mod identity;
mod life;
mod node;
mod notify;
mod place;
mod priority;
mod reload;
mod rights;
mod rule_checker;
mod sockets;
mod stored_rules;
mod tenant_watch;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use nagaya_base::Reckoning;
use nagaya_cmdb::store::{RedbStore, Store};
use nix::unistd::Uid;
use tokio::task::LocalSet;

pub use cluster::{Etcd, StoreAccess, hold_certificate};
pub use edge_root::try_edge_root;
pub use error::ServeError;
pub use identity::of_edge;
pub use node::Node;
pub use rights::{run_edge, run_keeper};
pub use rule_checker::{run_rule_check, run_rule_try};

use self::cluster::Records;
use self::edge_root::EdgeRoot;
use self::feed::Changes;
use self::identity::{Facts, Identity};
use self::life::{Life, Parts};
use self::node::ListenView;
use self::sockets::{AdminAudience, Listening, Peers};
use self::stored_rules::StoredRules;
use crate::config::settings::Listen;
use crate::config::{self, Loaded, Settings};
use crate::logging::{self, Sink};
use crate::tenant_ids::{IdSource, gid_of};
use crate::{admin, doctor};

/// What the command line gives.
#[derive(Debug, Clone)]
pub struct Serve {
    pub config: Option<PathBuf>,
    /// Overrides the configured log level.
    pub log: Option<String>,
}

/// `nagaya serve`: runs the node until it is told to end.
pub fn serve(serve: Serve) -> Result<(), ServeError> {
    let Loaded { settings, file } =
        config::load(serve.config.as_deref()).map_err(ServeError::Configuration)?;
    let sink = open_log(&settings)?;
    logging::start(
        serve.log.as_deref().unwrap_or(&settings.log.level),
        logging::is_json(&settings.log),
        sink.clone(),
    );
    log_start(file.as_deref());

    // Held to the end of this function: the sockets and directories go when nobody uses them any more.
    let place = place::Place::claim(&settings)?;
    let records = Arc::new(Records::new(RedbStore::open(&settings.store())?));
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
    place::prepare_access_log(&settings, edge_identity);
    if let Some(root) = &edge_root {
        root.configure(&settings);
    }

    let listen = listening.iter().map(view_listening).collect();
    let (handle, orders) = cluster::channel();
    let node = Arc::new(Node::new(
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
    let parts = Parts {
        serve,
        settings: settings.clone(),
        sink,
        listening,
        keeper_socket,
        edge_identity,
        ids: ids.clone(),
        tickets: place::prepare_tickets(&settings, edge_identity, edge_root.is_some()),
        spool: place::prepare_spool(&settings, edge_identity, edge_root.is_some()),
        edge_root,
        reckoning: Reckoning::of_wall(),
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

/// The edge's own root directory. None without root, and where no mounts can be made.
fn edge_root(identity: Option<Identity>) -> Option<Arc<EdgeRoot>> {
    identity?;
    match EdgeRoot::make() {
        Ok(root) => Some(Arc::new(root)),
        Err(error) => {
            tracing::warn!(code = %edge_root::CODE, %error, "the edge has no root directory of its own");
            None
        }
    }
}

/// The rules of the store where the edge finds them, before it starts.
fn stored_rules(
    settings: &Settings,
    edge: Option<Identity>,
    records: &dyn Store,
) -> Result<StoredRules, ServeError> {
    let dir = settings.rules_dir();
    let failed = |error| ServeError::Directory { path: dir.clone(), error };
    let rules = StoredRules::make(dir.clone(), edge.map(|edge| edge.gid)).map_err(failed)?;
    rules.take_all(records);
    Ok(rules)
}

/// The sockets for other nodes, if this one can be in a cluster.
fn peers(settings: &Settings) -> Result<Option<Peers>, ServeError> {
    let Some(listen) = &settings.cluster.listen else { return Ok(None) };
    let address = listen.parse().expect("the check of the configuration has parsed it");
    let peers = sockets::listen_peers(address, settings.edge_threads(), &settings.edge.limits)?;
    tracing::info!(address = %peers.address, "listening for other nodes");
    Ok(Some(peers))
}

/// Starts the thread that makes this node one of several, or waits to be told to.
fn begin_cluster(
    settings: &Settings,
    peers: &Peers,
    node: &Arc<Node>,
    records: Arc<Records>,
    orders: tokio::sync::mpsc::Receiver<cluster::Order>,
) -> Result<(), ServeError> {
    let dir = settings.cluster_dir();
    let member = cluster::Member::load(&dir)?;
    let configured = &settings.cluster;
    if let Some(member) = &member {
        // Before the processes start: they are to run nothing that is not placed here.
        node.set_member(member);
        let credentials = cluster::credentials(member, configured);
        node.credentials.send_replace(Some(credentials));
    }
    let advertise = configured
        .advertise
        .as_deref()
        .map(|address| address.parse().expect("the check of the configuration has parsed it"));
    let context = cluster::Context {
        node: Arc::clone(node),
        records,
        dir,
        peer: advertise.unwrap_or(peers.address),
        configured: configured.clone(),
    };
    cluster::start(context, member, orders).map_err(ServeError::Runtime)
}

/// Runs the node's life and the admin interface side by side, on this thread.
fn run(
    parts: Parts,
    admin_socket: std::os::unix::net::UnixListener,
    admin_parts: admin::Parts,
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
        let result = Life::new(parts)?.run().await;
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
    // Store calls of the admin interface that still run must not hold up the end.
    runtime.shutdown_background();
    result
}

/// What the admin interface needs: a change it commits is handed to the processes by the node.
fn admin_parts(ids: IdSource, node: Arc<Node>, access: admin::AccessList) -> admin::Parts {
    let watcher = Arc::clone(&node);
    admin::Parts {
        store: Arc::clone(&node.store),
        on_change: Arc::new(move |changes, revision| watcher.committed(Changes { revision, changes })),
        node,
        ids,
        access,
    }
}

fn open_log(settings: &Settings) -> Result<Sink, ServeError> {
    let path = settings.log.file.as_deref();
    Sink::open(path).map_err(|error| ServeError::Log { path: path.unwrap_or("-".as_ref()).into(), error })
}

fn facts(edge_root: bool) -> Facts {
    Facts {
        edge_root,
        root: Uid::effective().is_root(),
        cgroup: Uid::effective().is_root() && doctor::cgroup_is_usable(),
        openat2: doctor::has_openat2(),
    }
}

/// What is off is said at start, so that nobody believes to be protected.
fn log_protections(protections: &[identity::Protection], edge: Option<Identity>) {
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
            "there is no user 'nagaya': the edge takes a uid that nobody has; to name it: useradd --system \
             --no-create-home --shell /usr/sbin/nologin nagaya"
        );
    }
}

fn view_listening(at: &Listening) -> ListenView {
    let Listen { tls, proxy_protocol, .. } = at.wanted;
    ListenView { address: at.address.to_string(), tls, proxy_protocol }
}

fn log_listening(listening: &[Listening]) {
    for at in listening {
        tracing::info!(address = %at.address, tls = at.wanted.tls, sockets = at.sockets.len(), "listening");
    }
}

/// Who may connect to the admin interface. The check of the configuration has named unknown users and groups.
fn admin_audience(settings: &Settings) -> AdminAudience {
    let admin = &settings.admin;
    if !(admin.read.is_empty() && admin.operate.is_empty() && admin.all.is_empty()) {
        return AdminAudience::Everybody;
    }
    match admin.group.as_deref().and_then(gid_of) {
        Some(gid) => AdminAudience::Group(gid),
        None => AdminAudience::Owner,
    }
}
