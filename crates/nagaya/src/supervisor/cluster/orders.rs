//! How the rest of the supervisor reaches the cluster's thread.
//!
//! Not here: carrying the orders out (`commands`).

use std::collections::BTreeMap;
use std::sync::Arc;

use http::StatusCode;
use nagaya_placement::balance::NodeLoad;
use nagaya_records::feed::{FromSupervisor, PlaceReply};
use nagaya_records::{NodeName, PlacementReason, SiteName};
use serde_json::Value;
use tokio::sync::{mpsc, oneshot};

use super::codes::{NOT_CONFIGURED, NOWHERE};
use super::store_health::StoreHealth;
use crate::admin::{BoxFuture, ClusterCommand, ProblemReply};
use crate::supervisor::feed::ProcessFeed;

/// Orders that wait for the cluster's thread: the edge has one open for each site that it has
/// placed.
const ORDERS_MAX: usize = 65_536;

/// How the rest of the supervisor reaches the cluster's thread.
#[derive(Clone)]
pub struct ClusterHandle {
    orders: mpsc::Sender<ClusterOrder>,
    /// Health of the cluster's store, for queries about the node.
    pub health: Arc<StoreHealth>,
}

/// The edge's query where a site's application runs.
pub struct PlacementRequest {
    pub tag: u64,
    pub site: SiteName,
    pub seen: Option<u64>,
    pub why: PlacementReason,
    /// Of several nodes that have it, the one that does not serve it. `None` means the first.
    pub lost: Option<NodeName>,
    /// Time that the request waited for that node.
    pub probe_us: u64,
    /// Receiver of the reply.
    pub edge: Arc<ProcessFeed>,
}

pub enum ClusterOrder {
    Ask(ClusterCommand, oneshot::Sender<Result<Value, Box<ProblemReply>>>),
    Place(PlacementRequest),
    /// Load of each member. The reply is empty if this node is in no cluster.
    Loads(oneshot::Sender<Vec<MemberLoad>>),
    /// A step for the load of a site that runs here.
    Shift {
        site: SiteName,
        shift: RebalanceStep,
        answer: oneshot::Sender<Result<(), String>>,
    },
    /// A member that may count as silent was heard from.
    Heard(NodeName),
    /// A member's reply to a probe is late.
    Doubt(NodeName),
    /// A member asks this node to vouch for it.
    Vouch {
        tag: u64,
        id: String,
        edge: Arc<ProcessFeed>,
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
pub struct MemberLoad {
    pub load: NodeLoad<String>,
    /// CPUs used there by sites that run on several nodes.
    pub shared: BTreeMap<SiteName, f32>,
}

/// A change of a site's nodes because of load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RebalanceStep {
    /// From here to that node.
    Move(String),
    /// That node gets it, too.
    Copy(String),
    /// This node gives it up to the others.
    Uncopy,
}

impl ClusterHandle {
    pub fn run_command(&self, ask: ClusterCommand) -> BoxFuture<'_, Result<Value, Box<ProblemReply>>> {
        Box::pin(async move {
            let (answer, answered) = oneshot::channel();
            let gone = || ProblemReply::silent("cluster");
            self.orders.send(ClusterOrder::Ask(ask, answer)).await.map_err(|_| gone())?;
            answered.await.map_err(|_| gone())?
        })
    }

    pub async fn loads(&self) -> Vec<MemberLoad> {
        let (answer, answered) = oneshot::channel();
        match self.orders.send(ClusterOrder::Loads(answer)).await {
            Ok(()) => answered.await.unwrap_or_default(),
            Err(_) => Vec::new(),
        }
    }

    /// Carries out a step. Returns when it is done, or when nothing has changed.
    pub async fn shift(&self, site: SiteName, shift: RebalanceStep) -> Result<(), String> {
        let (answer, answered) = oneshot::channel();
        let gone = || "the cluster's thread has ended".to_owned();
        self.orders.send(ClusterOrder::Shift { site, shift, answer }).await.map_err(|_| gone())?;
        answered.await.map_err(|_| gone())?
    }

    /// Passes on a message between members. Never blocks; a message that finds no room is sent
    /// again.
    pub fn send_order(&self, order: ClusterOrder) {
        let _ = self.orders.try_send(order);
    }

    /// Requests a placement. The reply is `Down::PlaceReply` in any case. Never blocks.
    pub fn place(&self, place: PlacementRequest) {
        if let Err(
            mpsc::error::TrySendError::Full(ClusterOrder::Place(place))
            | mpsc::error::TrySendError::Closed(ClusterOrder::Place(place)),
        ) = self.orders.try_send(ClusterOrder::Place(place))
        {
            let reason = format!("more than {ORDERS_MAX} sites look for a node at once");
            let placed = PlaceReply::Nowhere { reason, code: NOWHERE.to_string() };
            place.edge.send(FromSupervisor::Placed { tag: place.tag, placed });
        }
    }
}

/// Makes both ends of the cluster thread's channel. The thread need not run yet.
pub fn channel() -> (ClusterHandle, mpsc::Receiver<ClusterOrder>) {
    let (orders, taken) = mpsc::channel(ORDERS_MAX);
    (ClusterHandle { orders, health: Arc::default() }, taken)
}

/// Returns the refusal of all cluster commands on a node without `[cluster] listen`.
pub fn not_configured() -> Box<ProblemReply> {
    let detail =
        "this node cannot be in a cluster: set listen in [cluster] of its configuration, and restart it";
    ProblemReply::cluster(StatusCode::CONFLICT, NOT_CONFIGURED, detail)
}
