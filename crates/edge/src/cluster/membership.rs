//! Holds what all threads of an edge know of its cluster. That is this node's identity, its lease,
//! the placements, and the questions to the supervisor.
//!
//! Not here: the step of a request (`placement`), connections between nodes (`peers`), choosing a
//! node (the supervisor).

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nagaya_base::Code;
use nagaya_placement::Moment;
use nagaya_placement::lease::ServeFrom;
use nagaya_placement::outlook::WakeOutlook;
use nagaya_records::record::RecordChange;
use nagaya_records::{NodeName, NodeRecord, Placement, PlacementView, RecordIndex, SiteName};
use parking_lot::{Mutex, RwLock};
use tokio::sync::watch;

use crate::cluster::member::LocalMember;
use crate::cluster::node_lease::{NodeLease, boottime};
use crate::cluster::nonce_prefix::NoncePrefix;
use crate::cluster::peers::SharedPeers;
use crate::cluster::placement_client::PlacementClient;
use crate::cluster::replica_picker::ReplicaPicker;
use crate::options::EdgeConfig;
use crate::record_table::RecordTable;

const CODE_BAD_CREDENTIALS: Code = Code(465);

/// Maximum number of placements known ahead of the records. Each leaves when the records have
/// caught up, which takes milliseconds. Beyond it, the records are awaited.
const AHEAD_MAX: usize = 16_384;

#[derive(Debug)]
pub struct EdgeCluster {
    /// Makes the check cheap for a node without a cluster.
    is_member: AtomicBool,
    member: watch::Sender<Option<Arc<LocalMember>>>,
    pub lease: NodeLease,
    pub placement_client: PlacementClient,
    pub peers: SharedPeers,
    /// The records, of which placements and nodes are a part.
    pub table: Arc<RecordTable>,
    /// Requests of sites that several nodes have.
    pub replica_picker: Arc<ReplicaPicker>,
    /// Requests that wait for a place, and how long that takes.
    pub outlook: Mutex<WakeOutlook<SiteName>>,
    /// Answers of the supervisor that are not in the records yet.
    ahead: RwLock<HashMap<SiteName, Placement>>,
    /// Time from which each site placed here may be served here.
    arrivals: Mutex<ServeFrom<SiteName>>,
    /// Sites that are about to move away. Requests for them wait until they have moved.
    leaving: RwLock<HashSet<SiteName>>,
    /// Grows when a node or a placement has changed, or a site is about to leave.
    moved: watch::Sender<u64>,
}

impl EdgeCluster {
    pub fn new(options: &EdgeConfig, table: Arc<RecordTable>) -> Self {
        let cluster = Self {
            is_member: AtomicBool::new(false),
            member: watch::Sender::new(None),
            lease: NodeLease::default(),
            placement_client: PlacementClient::default(),
            peers: SharedPeers::default(),
            table,
            replica_picker: Arc::default(),
            outlook: Mutex::default(),
            ahead: RwLock::default(),
            arrivals: Mutex::default(),
            leaving: RwLock::default(),
            moved: watch::Sender::new(0),
        };
        cluster.set_options(options);
        cluster
    }

    /// Sets the options. Unusable credentials are logged and ignored: the previous ones stay in
    /// use.
    pub fn set_options(&self, options: &EdgeConfig) {
        let before = self.member();
        if before.as_ref().map(|member| &member.options) == options.cluster.as_ref() {
            return;
        }
        let member = match &options.cluster {
            None => None,
            Some(options) => match LocalMember::new(options) {
                Ok(member) => Some(Arc::new(member)),
                Err(error) => {
                    tracing::error!(
                        "{CODE_BAD_CREDENTIALS}: the credentials that this node shows other nodes cannot be used: {error}"
                    );
                    return;
                }
            },
        };
        self.is_member.store(member.is_some(), Ordering::Release);
        self.member.send_replace(member);
    }

    pub fn is_member(&self) -> bool {
        self.is_member.load(Ordering::Acquire)
    }

    pub fn member(&self) -> Option<Arc<LocalMember>> {
        self.member.borrow().clone()
    }

    /// Returns the prefix of this node's tickets. `None` if it is in no cluster.
    pub fn ticket_mark(&self) -> Option<NoncePrefix> {
        if self.is_member() { self.member.borrow().as_ref()?.mark } else { None }
    }

    /// Returns the name of this node, also without a cluster.
    pub fn own_name(&self) -> NodeName {
        self.member()
            .map_or_else(|| NodeName::new("localhost").expect("a name"), |member| member.node.clone())
    }

    /// Returns a receiver of moves. It is notified when a node or a placement has changed, or a
    /// site is about to leave.
    pub fn follow_moves(&self) -> watch::Receiver<u64> {
        self.moved.subscribe()
    }

    /// Returns the newest known placement of this site's application. Replicas beyond the
    /// record's number are left out: they go, but may not have gone yet.
    pub fn placement(&self, table: &RecordIndex, site: &str) -> Option<Placement> {
        let known = table.placement(site);
        let newest = match (known, self.ahead.read().get(site)) {
            (Some(known), Some(ahead)) if known.epoch < ahead.epoch => Some(ahead.clone()),
            (None, ahead) => ahead.cloned(),
            (known, _) => known,
        };
        newest.map(|placement| match placement.copies.is_empty() {
            true => placement,
            false => placement.at_most(table.site(site).map_or(1, |site| site.instances_max())),
        })
    }

    /// Returns a node's view of that placement. Every request asks more than once, so usually
    /// nothing is copied for it.
    pub fn standing(&self, table: &RecordIndex, site: &str, node: &NodeName) -> Option<PlacementView> {
        match table.standing(site, node) {
            Some(known) if !known.has_copies && !self.ahead.read().contains_key(site) => Some(known),
            _ => self.placement(table, site).map(|placement| placement.standing(node)),
        }
    }

    /// Adds a placement to which the store has agreed. The records will contain it in a moment.
    pub fn placed(&self, placement: Placement) {
        self.arrive(&placement);
        let mut ahead = self.ahead.write();
        let is_newer = ahead.get(&placement.site).is_none_or(|known| known.epoch < placement.epoch);
        if is_newer && ahead.len() < AHEAD_MAX {
            ahead.insert(placement.site.clone(), placement);
        }
        drop(ahead);
        self.moved.send_modify(|moved| *moved += 1);
    }

    /// Sets whether the site is about to move away.
    pub fn set_leaving(&self, site: SiteName, on: bool) {
        if on {
            self.leaving.write().insert(site);
        } else {
            self.leaving.write().remove(&site);
        }
        self.moved.send_modify(|moved| *moved += 1);
    }

    pub fn is_leaving(&self, site: &SiteName) -> bool {
        self.leaving.read().contains(site)
    }

    pub fn is_any_leaving(&self) -> bool {
        !self.leaving.read().is_empty()
    }

    /// Records that this node now knows the site's placement.
    fn arrive(&self, placement: &Placement) {
        let member = self.member();
        let part = member.as_ref().and_then(|member| placement.part(&member.node));
        let mut arrivals = self.arrivals.lock();
        if let Some(part) = part {
            // Counted from now, because the placement was written no later. Learning it again
            // does not restart the time.
            let wait = Duration::from_millis(part.wait_ms.into());
            arrivals.placed(boottime(), placement.site.clone(), part.epoch, wait, Duration::ZERO);
        } else if self.is_member() {
            arrivals.left(&placement.site);
            self.leaving.write().remove(&placement.site);
        }
    }

    /// Takes over all placements again, because this node may have another name now.
    pub fn arrive_all(&self, table: &RecordIndex) {
        if self.is_member() {
            table.placements().for_each(|placement| self.arrive(&placement));
        }
    }

    /// Returns the time from which the site may be served here under this epoch. `None` if it may
    /// not.
    pub fn arrived(&self, site: &SiteName, epoch: u64) -> Option<Moment> {
        self.arrivals.lock().from(site, epoch)
    }

    /// Drops answers with which the records have caught up. `table` contains the change already.
    pub fn caught_up<'a>(&self, changes: impl Iterator<Item = &'a ClusterChange>) {
        let mut is_moved = false;
        for touched in changes {
            is_moved = true;
            if let ClusterChange::Placement { site, epoch, now } = touched {
                // The records do not undo newer answers.
                let is_older = |known: &Placement| epoch.is_some_and(|epoch| epoch < known.epoch);
                let is_overtaken = self.ahead.read().get(site).is_some_and(is_older);
                match now {
                    Some(_) if is_overtaken => {}
                    Some(placement) => self.arrive(placement),
                    None => self.arrivals.lock().left(site),
                }
                let mut ahead = self.ahead.write();
                if ahead.get(site).is_some_and(|known| epoch.is_none_or(|epoch| known.epoch <= epoch)) {
                    ahead.remove(site);
                }
            }
        }
        if is_moved {
            self.moved.send_modify(|moved| *moved += 1);
        }
    }

    /// Returns the record of a node that may be asked: a member that is not this node.
    pub fn other(&self, table: &RecordIndex, name: &NodeName) -> Option<Arc<NodeRecord>> {
        let is_me = self.member().is_some_and(|member| member.node == *name);
        table.node(name.as_str()).filter(|_| !is_me)
    }
}

/// Effect of a change on the cluster's records.
#[derive(Debug)]
pub enum ClusterChange {
    Node,
    /// `epoch` is `None` if the placement was dropped.
    Placement {
        site: SiteName,
        epoch: Option<u64>,
        now: Option<Placement>,
    },
}

impl ClusterChange {
    pub fn by(change: &RecordChange) -> Option<Self> {
        match change {
            RecordChange::PutNode(_) | RecordChange::DropNode(_) => Some(Self::Node),
            RecordChange::PutPlacement(placement) => {
                let site = placement.site.clone();
                Some(Self::Placement { site, epoch: Some(placement.epoch), now: Some(placement.clone()) })
            }
            RecordChange::DropPlacement(site) => {
                Some(Self::Placement { site: site.clone(), epoch: None, now: None })
            }
            _ => None,
        }
    }
}
