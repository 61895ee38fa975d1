//! This node as one of several: it takes part in a cluster, keeps its right to serve, and finds sites another node.
//!
//! All of it runs on a thread of its own, so that nothing the supervisor does else can make it late. The order of a node's
//! life here: [`Desk`] takes what operators and the edge ask for; `membership` is the cluster while this node is in one;
//! `authority` renews the right to serve, by `trust`, `relocating` finds sites a place and `placing` chooses it, `doubting` shortens the wait for a node that may be dead, `pulse` measures what planners have to know, `images` has what they need there before, `moves` empties nodes
//! and moves sites without an error, `wishes` has another node do so, `copies` has one run on several nodes, `leftovers` sees to what removed sites leave behind, `events` keeps what has happened lately,
//! `signing` has records signed anew, `store_health` says whether the store can be trusted, `tickets` has the keys that all nodes sign tickets with, and `certificates` takes over and exchanges the keys of members.
//!
//! Not here: the records and their store (`nagaya_cmdb`), what is decided (`nagaya_placement`), forwarding (`nagaya_edge`).

mod allotment;
mod asks;
mod authority;
mod certificates;
mod copies;
mod doubting;
mod events;
mod images;
mod leftovers;
pub mod load;
mod member;
mod membership;
mod moves;
mod pki;
mod placing;
mod pulse;
mod records;
mod relocating;
mod signing;
mod store_health;
mod suspects;
mod tickets;
mod trust;
mod wishes;

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use nagaya_base::Code;
use nagaya_cmdb::feed::{Down, Placed};
use nagaya_cmdb::{NodeName, SiteName, Why};
use nagaya_edge::options::ClusterOptions;
use nagaya_placement::balance::NodeLoad;
use serde_json::Value;
use tokio::sync::{mpsc, oneshot};
use tokio::task::LocalSet;

use super::feed::Feed;
use super::node::Node;
use crate::admin::{Ask, BoxFuture, Problem};
use crate::config::settings::Cluster as Configured;

pub use authority::now;
pub use member::{Etcd, Member, MemberError};
pub use membership::unix_ms;
pub use pki::hold as hold_certificate;
pub use records::Records;
pub use store_health::StoreHealth;

use self::asks::Desk;

/// Orders that wait for the cluster's thread: the edge has one open for each site it looks for a place for.
const ORDERS_MAX: usize = 65_536;

pub const NOT_CONFIGURED: Code = Code(240);
pub const NO_MEMBER: Code = Code(241);
pub const MEMBER_ALREADY: Code = Code(242);
pub const NOT_JOINED: Code = Code(243);
pub const NOWHERE: Code = Code(244);
pub const INSECURE: Code = Code(239);
pub const FORGED: Code = Code(238);
pub const NO_AUTHORITY: Code = Code(520);

/// How the rest of the supervisor reaches the cluster's thread.
#[derive(Clone)]
pub struct Handle {
    orders: mpsc::Sender<Order>,
    /// Of the cluster's store, for who asks about the node.
    pub health: Arc<StoreHealth>,
}

/// The edge asks where a site's application is to run.
pub struct Place {
    pub tag: u64,
    pub site: SiteName,
    pub seen: Option<u64>,
    pub why: Why,
    /// Of several nodes that have it, the one that does not serve it. None: the first.
    pub lost: Option<NodeName>,
    /// For so long the request that asks waited for that node.
    pub probe_us: u64,
    /// Where the answer goes.
    pub edge: Arc<Feed>,
}

pub enum Order {
    Ask(Ask, oneshot::Sender<Result<Value, Box<Problem>>>),
    Place(Place),
    /// How busy each member is. None of them: this node is in no cluster.
    Loads(oneshot::Sender<Vec<Neighbour>>),
    /// What the load of a site that runs here asks for.
    Shift {
        site: SiteName,
        shift: Shift,
        answer: oneshot::Sender<Result<(), String>>,
    },
    /// A member that may count as silent was heard from.
    Heard(NodeName),
    /// A member's answer to a probe is late.
    Doubt(NodeName),
    /// A member asks this node to vouch for it.
    Vouch {
        tag: u64,
        id: String,
        edge: Arc<Feed>,
    },
    /// A member vouches for this node.
    Vouched {
        round: u64,
        id: String,
        moved: u64,
    },
}

/// A member, as the balance of load sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct Neighbour {
    pub load: NodeLoad<String>,
    /// CPUs that sites use there which run on several nodes.
    pub shared: BTreeMap<SiteName, f32>,
}

/// What load changes about the nodes that have a site.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Shift {
    /// From here to there.
    Move(String),
    /// That one gets it, too.
    Copy(String),
    /// This one gives it up to the others.
    Uncopy,
}

/// What does not change while the node runs.
pub struct Context {
    pub node: Arc<Node>,
    pub records: Arc<Records>,
    /// Where what makes it a member is kept.
    pub dir: PathBuf,
    /// Where other nodes reach it.
    pub peer: SocketAddr,
    pub configured: Configured,
}

impl Context {
    pub fn fence(&self) -> Duration {
        Duration::from_millis(self.configured.fence_ms)
    }
}

impl Handle {
    pub fn ask(&self, ask: Ask) -> BoxFuture<'_, Result<Value, Box<Problem>>> {
        Box::pin(async move {
            let (answer, answered) = oneshot::channel();
            let gone = || Problem::silent("cluster");
            self.orders.send(Order::Ask(ask, answer)).await.map_err(|_| gone())?;
            answered.await.map_err(|_| gone())?
        })
    }

    pub async fn loads(&self) -> Vec<Neighbour> {
        let (answer, answered) = oneshot::channel();
        match self.orders.send(Order::Loads(answer)).await {
            Ok(()) => answered.await.unwrap_or_default(),
            Err(_) => Vec::new(),
        }
    }

    /// Answered when that is done, or nothing has changed.
    pub async fn shift(&self, site: SiteName, shift: Shift) -> Result<(), String> {
        let (answer, answered) = oneshot::channel();
        let gone = || "the cluster's thread has ended".to_owned();
        self.orders.send(Order::Shift { site, shift, answer }).await.map_err(|_| gone())?;
        answered.await.map_err(|_| gone())?
    }

    /// What members say to each other. Never blocks; what finds no room is said again.
    pub fn tell(&self, order: Order) {
        let _ = self.orders.try_send(order);
    }

    /// Answered by `Down::Placed`, whatever happens. Never blocks.
    pub fn place(&self, place: Place) {
        if let Err(
            mpsc::error::TrySendError::Full(Order::Place(place))
            | mpsc::error::TrySendError::Closed(Order::Place(place)),
        ) = self.orders.try_send(Order::Place(place))
        {
            let reason = format!("more than {ORDERS_MAX} sites look for a node at once");
            let placed = Placed::Nowhere { reason, code: NOWHERE.to_string() };
            place.edge.send(Down::Placed { tag: place.tag, placed });
        }
    }
}

/// How the member whose file is in a directory reaches the cluster's store.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum StoreAccess {
    /// There is no member.
    #[default]
    None,
    Safe,
    /// Others reach it, too; and why.
    Weak(String),
    /// The file cannot be read, and why.
    Unknown(String),
}

impl StoreAccess {
    pub fn of_member(dir: &Path) -> Self {
        let weakness = |member: Member| asks::etcd_options(&member.cluster, &member.etcd).weakness();
        match Member::load(dir) {
            Ok(None) => Self::None,
            Ok(Some(member)) => weakness(member).map_or(Self::Safe, Self::Weak),
            Err(error) => Self::Unknown(error.to_string()),
        }
    }
}

/// Both ends of what the cluster's thread is told. It need not run yet.
pub fn channel() -> (Handle, mpsc::Receiver<Order>) {
    let (orders, taken) = mpsc::channel(ORDERS_MAX);
    (Handle { orders, health: Arc::default() }, taken)
}

/// What a node without `[cluster] listen` says to all commands about clusters.
pub fn not_configured() -> Box<Problem> {
    let detail =
        "this node can be in no cluster: set listen in [cluster] of its configuration, and start it anew";
    Problem::cluster(StatusCode::CONFLICT, NOT_CONFIGURED, detail)
}

/// What the edge is told of the cluster.
pub fn credentials(member: &Member, configured: &Configured) -> Arc<ClusterOptions> {
    Arc::new(ClusterOptions {
        node: member.node.to_string(),
        id: member.id.clone(),
        authorities: member.authorities.clone(),
        certificate: member.credentials.certificate.clone(),
        key: member.credentials.key.clone(),
        probe_key: member.probe_key.clone(),
        probe_keys_also: member.probe_keys_also.clone(),
        probe: configured.probe,
        probe_ms: configured.probe_ms,
    })
}

/// Starts the cluster's thread. `member`: this node is in a cluster already.
pub fn start(context: Context, member: Option<Member>, mut orders: mpsc::Receiver<Order>) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    std::thread::Builder::new().name("cluster".into()).spawn(move || {
        LocalSet::new().block_on(&runtime, async move {
            let desk = Rc::new(Desk::new(context));
            if let Some(member) = member {
                desk.resume(member);
            }
            while let Some(order) = orders.recv().await {
                tokio::task::spawn_local(Rc::clone(&desk).carry_out(order));
            }
        });
    })?;
    Ok(())
}
