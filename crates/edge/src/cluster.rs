//! What all threads of an edge know of its cluster: who this node is, until when it may run what is placed on it, where
//! sites are placed, and the question to the supervisor where they are to be.
//!
//! Not here: the step of a request (`place`), connections between nodes (`peers`), choosing a node (the supervisor).

mod desk;
mod tenure;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nagaya_base::Code;
use nagaya_cmdb::record::Change;
use nagaya_cmdb::{NodeName, NodeRecord, Placement, SiteName, Standing, Table};
use nagaya_placement::Moment;
use nagaya_placement::fence::Arrivals;
use nagaya_placement::outlook::Outlook;
use parking_lot::{Mutex, RwLock};
use tokio::sync::watch;

pub use desk::{Desk, Unanswered};
pub use tenure::{Tenure, boottime};

use crate::admission::Mark;
use crate::options::{ClusterOptions, Options};
use crate::peers::{Credentials, Peers};
use crate::place::Spread;

const CODE_BAD_CREDENTIALS: Code = Code(465);

/// Placements that are known ahead of the records. They leave when the records have caught up, which takes milliseconds;
/// beyond this the records are waited for.
const AHEAD_MAX: usize = 16_384;

/// This node as a member.
#[derive(Debug)]
pub struct Member {
    pub node: NodeName,
    pub options: ClusterOptions,
    pub credentials: Credentials,
    /// In the numbers of the tickets that it gives.
    pub mark: Option<Mark>,
}

#[derive(Debug)]
pub struct Cluster {
    /// So that a node without a cluster pays for one look.
    is_member: AtomicBool,
    member: watch::Sender<Option<Arc<Member>>>,
    pub tenure: Tenure,
    pub desk: Desk,
    pub peers: Peers,
    /// Requests of sites that several nodes have.
    pub spread: Spread,
    /// Requests that wait for a place, and how long that takes.
    pub outlook: Mutex<Outlook<SiteName>>,
    /// What the supervisor answered, until the records say it too.
    ahead: RwLock<HashMap<SiteName, Placement>>,
    /// From when on what is placed here may be served here.
    arrivals: Mutex<Arrivals<SiteName>>,
    /// Sites that are about to move away from here: requests for them wait until they have.
    leaving: RwLock<HashSet<SiteName>>,
    /// Raised when a node or a placement has changed, or a site is about to leave.
    moved: watch::Sender<u64>,
}

impl Cluster {
    pub fn new(options: &Options) -> Self {
        let cluster = Self {
            is_member: AtomicBool::new(false),
            member: watch::Sender::new(None),
            tenure: Tenure::default(),
            desk: Desk::default(),
            peers: Peers::default(),
            spread: Spread::default(),
            outlook: Mutex::default(),
            ahead: RwLock::default(),
            arrivals: Mutex::default(),
            leaving: RwLock::default(),
            moved: watch::Sender::new(0),
        };
        cluster.set_options(options);
        cluster
    }

    /// Credentials that cannot be used are said and change nothing: those before are used on.
    pub fn set_options(&self, options: &Options) {
        let before = self.member();
        if before.as_ref().map(|member| &member.options) == options.cluster.as_ref() {
            return;
        }
        let member = match &options.cluster {
            None => None,
            Some(options) => match Member::new(options) {
                Ok(member) => Some(Arc::new(member)),
                Err(error) => {
                    tracing::error!(
                        "{CODE_BAD_CREDENTIALS}: what this node shows other nodes cannot be used: {error}"
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

    pub fn member(&self) -> Option<Arc<Member>> {
        self.member.borrow().clone()
    }

    /// What marks this node's tickets. None: it is in no cluster.
    pub fn ticket_mark(&self) -> Option<Mark> {
        if self.is_member() { self.member.borrow().as_ref()?.mark } else { None }
    }

    /// The name of this node, also of one that is alone.
    pub fn own_name(&self) -> NodeName {
        self.member()
            .map_or_else(|| NodeName::new("localhost").expect("a name"), |member| member.node.clone())
    }

    /// Who this node is, now and whenever that changes.
    pub fn follow_member(&self) -> watch::Receiver<Option<Arc<Member>>> {
        self.member.subscribe()
    }

    /// Told when a node or a placement has changed, or a site is about to leave.
    pub fn follow_moves(&self) -> watch::Receiver<u64> {
        self.moved.subscribe()
    }

    /// The newest that is known of where this site's application runs. Copies that its record does not allow are not there:
    /// they go, but may not have gone yet.
    pub fn placement(&self, table: &Table, site: &str) -> Option<Placement> {
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

    /// How a node stands in that, which every request asks more than once: mostly nothing is copied for it.
    pub fn standing(&self, table: &Table, site: &str, node: &NodeName) -> Option<Standing> {
        match table.standing(site, node) {
            Some(known) if !known.has_copies && !self.ahead.read().contains_key(site) => Some(known),
            _ => self.placement(table, site).map(|placement| placement.standing(node)),
        }
    }

    /// The store has agreed on this placement; the records will say so in a moment.
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

    /// The site is about to move away, or does not after all.
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

    /// This node knows from now on where the site is placed.
    fn arrive(&self, placement: &Placement) {
        let member = self.member();
        let part = member.as_ref().and_then(|member| placement.part(&member.node));
        let mut arrivals = self.arrivals.lock();
        if let Some(part) = part {
            // Counted from now: whoever wrote it did so no later. Learned again, it does not begin anew.
            let wait = Duration::from_millis(part.wait_ms.into());
            arrivals.placed(boottime(), placement.site.clone(), part.epoch, wait, Duration::ZERO);
        } else if self.is_member() {
            arrivals.left(&placement.site);
            self.leaving.write().remove(&placement.site);
        }
    }

    /// All placements anew: this node may have another name now.
    pub fn arrive_all(&self, table: &Table) {
        if self.is_member() {
            table.placements().for_each(|placement| self.arrive(&placement));
        }
    }

    /// From when on the site may be served here under this epoch. None: not at all.
    pub fn arrived(&self, site: &SiteName, epoch: u64) -> Option<Moment> {
        self.arrivals.lock().from(site, epoch)
    }

    /// What the records have caught up with need not be known ahead any more. `table` holds the change already.
    pub fn caught_up<'a>(&self, changes: impl Iterator<Item = &'a Touched>) {
        let mut is_moved = false;
        for touched in changes {
            is_moved = true;
            if let Touched::Placement { site, epoch, now } = touched {
                // What is known ahead of the records is not undone by them.
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

    /// The record of a node that may be asked: a member that is not this node.
    pub fn other(&self, table: &Table, name: &NodeName) -> Option<Arc<NodeRecord>> {
        let is_me = self.member().is_some_and(|member| member.node == *name);
        table.node(name.as_str()).filter(|_| !is_me)
    }
}

/// What a change has done to the cluster's records.
#[derive(Debug)]
pub enum Touched {
    Node,
    /// `epoch` is none where the placement was dropped.
    Placement {
        site: SiteName,
        epoch: Option<u64>,
        now: Option<Placement>,
    },
}

impl Touched {
    pub fn by(change: &Change) -> Option<Self> {
        match change {
            Change::PutNode(_) | Change::DropNode(_) => Some(Self::Node),
            Change::PutPlacement(placement) => {
                let site = placement.site.clone();
                Some(Self::Placement { site, epoch: Some(placement.epoch), now: Some(placement.clone()) })
            }
            Change::DropPlacement(site) => {
                Some(Self::Placement { site: site.clone(), epoch: None, now: None })
            }
            _ => None,
        }
    }
}

/// Why a node cannot be a member as its settings say.
#[derive(Debug, thiserror::Error)]
pub enum NotAMember {
    #[error("{0}")]
    Name(#[from] nagaya_cmdb::NameError),
    #[error("{0}")]
    Credentials(#[from] crate::peers::CredentialsError),
}

impl Member {
    fn new(options: &ClusterOptions) -> Result<Self, NotAMember> {
        let node = NodeName::new(&options.node)?;
        let credentials = Credentials::new(options)?;
        let mark = Mark::of(&options.id);
        Ok(Self { node, options: options.clone(), credentials, mark })
    }
}
