//! The messages between places of the simulated cluster.
//!
//! Not here: whether and when they arrive (`world`), their handling (`node`, `store`).

use std::time::Duration;

use nagaya_placement::Moment;
use nagaya_placement::lease::{RenewId, RoundId, Vouch};
use nagaya_placement::liveness::PeerProbe;
use nagaya_placement::relocation::{AskId, PlacedAt};

pub(crate) type NodeId = u32;
pub(crate) type SiteId = u32;
pub(crate) type RequestId = u32;

/// The nodes of a site, each with its epoch, the first in front. It changes as a record does
/// (`nagaya_records`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SiteParts {
    /// Of the whole: it grows by one with each change.
    pub epoch: u64,
    pub all: Vec<PlacedAt<NodeId>>,
}

impl SiteParts {
    pub fn one(node: NodeId, epoch: u64) -> Self {
        Self { epoch, all: vec![PlacedAt { node, epoch }] }
    }

    /// Returns the epoch under which this node has it.
    pub fn of(&self, node: NodeId) -> Option<u64> {
        self.all.iter().find(|part| part.node == node).map(|part| part.epoch)
    }

    pub fn with(&self, node: NodeId) -> Self {
        let mut next = Self { epoch: self.epoch + 1, ..self.clone() };
        next.all.push(PlacedAt { node, epoch: next.epoch });
        next
    }

    /// Returns it without this node. `None` if the node is the only one that has it, or does not
    /// have it.
    pub fn without(&self, node: NodeId) -> Option<Self> {
        let mut next = Self { epoch: self.epoch + 1, ..self.clone() };
        next.all.retain(|part| part.node != node);
        (!next.all.is_empty() && next.all.len() < self.all.len()).then_some(next)
    }

    pub fn moved(&self, from: NodeId, to: NodeId) -> Self {
        let mut next = Self { epoch: self.epoch + 1, ..self.clone() };
        let epoch = next.epoch;
        next.all
            .iter_mut()
            .filter(|part| part.node == from)
            .for_each(|part| *part = PlacedAt { node: to, epoch });
        next
    }
}

/// An event of a node: a message, or the end of a time.
#[derive(Debug, Clone)]
pub(crate) enum NodeEvent {
    Start,
    /// A client's request comes in.
    Request(RequestId),
    /// A request is checked again here: it waits for its time, an instance, or a lease.
    Work(ForwardedRequest),
    Renew,
    /// Its record must be written.
    List,
    /// The node has known for long that this site was removed, at this revision.
    LetGo {
        site: SiteId,
        removed_at: u64,
    },
    /// The node's relocations have something to do by now.
    Tick,
    /// The probe of this peer has to continue, or ends.
    ProbeTime(NodeId),
    Probe {
        from: NodeId,
        probe: PeerProbe,
        sent_at: Moment,
    },
    /// `life` shows a restart: connections to it are gone.
    ProbeAnswer {
        from: NodeId,
        probe: PeerProbe,
        sent_at: Moment,
        life: u32,
    },
    /// No process listens there; the host says so.
    ProbeRefused {
        from: NodeId,
        probe: PeerProbe,
    },
    /// `committed` is how long ago, and how long from then on others may serve it.
    Forward {
        work: ForwardedRequest,
        committed: Option<(Duration, Duration)>,
    },
    Answer {
        from: NodeId,
        work: ForwardedRequest,
        is_served: bool,
    },
    VouchAsk {
        from: NodeId,
        round: RoundId,
    },
    VouchAnswer {
        from: NodeId,
        round: RoundId,
        vouch: Vouch,
    },
    /// All changes up to this revision.
    Watch(u64),
    Stored(StoreSays),
}

/// A request on the node that should serve it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ForwardedRequest {
    pub request: RequestId,
    pub site: SiteId,
    pub epoch: u64,
    /// Epoch of the whole placement by which it was sent.
    pub seen: u64,
    /// The node whose client sent it.
    pub entry: NodeId,
    /// Real time at which it came here.
    pub since: u64,
}

/// From a node to the store.
#[derive(Debug, Clone)]
pub(crate) enum StoreAsk {
    /// This node's record says whether it honors marks. Its requests from before a restart change
    /// nothing any more.
    List {
        life: u32,
        heeds_marks: bool,
    },
    /// Clears the mark against this node that it knows of first, if that still exists.
    Renew {
        id: RenewId,
        mark: Option<u64>,
    },
    /// Marks a node that may be dead.
    Doubt(NodeId),
    Look {
        site: SiteId,
        ask: AskId,
    },
    Commit {
        site: SiteId,
        ask: AskId,
        node: NodeId,
        from: Option<NodeId>,
        expect: Option<u64>,
        /// How long others may serve it from the commit on.
        wait: Duration,
        /// The mark against `from`. It must exist and be newer than the placement and the node's
        /// record.
        mark: Option<u64>,
        /// The placement must not be newer than this revision.
        written_by: Option<u64>,
    },
    /// One more node gets the site.
    Copy {
        site: SiteId,
        node: NodeId,
        expect: u64,
        wait: Duration,
        written_by: Option<u64>,
    },
    /// This node has given its part up; others have the site, too.
    Leave {
        site: SiteId,
        node: NodeId,
        expect: u64,
        /// Only while the site is removed. A node gives up one that was added again only after it
        /// has ended it.
        is_removed: bool,
    },
    /// Nothing is left of a removed site under this epoch.
    Forget {
        site: SiteId,
        epoch: u64,
    },
}

/// The store's state that differs from a commit's expectation.
#[derive(Debug, Clone)]
pub(crate) enum FoundInstead {
    Placement(Option<SiteParts>),
    NoSite,
    /// The placement is as expected, but another precondition does not hold.
    Otherwise,
}

/// The store's reply.
#[derive(Debug, Clone)]
pub(crate) enum StoreSays {
    Listed,
    Renewed {
        id: RenewId,
        revision: u64,
        /// The mark against the node that has read this.
        mark: Option<u64>,
    },
    /// A mark of this revision exists against the node.
    Marked {
        node: NodeId,
        revision: u64,
    },
    Found {
        site: SiteId,
        ask: AskId,
        placement: Option<SiteParts>,
    },
    /// `done` is the revision of the commit.
    Committed {
        site: SiteId,
        ask: AskId,
        from: Option<NodeId>,
        wait: Duration,
        done: Result<u64, FoundInstead>,
    },
    /// Done, or no longer applicable; the copy will show which.
    Heard,
}
