//! What goes from one place of the simulated cluster to another.
//!
//! Not here: whether and when it arrives (`world`), what is done with it (`node`, `store`).

use std::time::Duration;

use nagaya_placement::Moment;
use nagaya_placement::fence::{RenewId, RoundId, Vouch};
use nagaya_placement::liveness::Probe;
use nagaya_placement::relocation::{AskId, At};

pub(crate) type NodeId = u32;
pub(crate) type SiteId = u32;
pub(crate) type RequestId = u32;

/// Which nodes have a site, each under its epoch, the first in front. It changes as a record does (`nagaya_cmdb`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Parts {
    /// Of the whole: one more with each change.
    pub epoch: u64,
    pub all: Vec<At<NodeId>>,
}

impl Parts {
    pub fn one(node: NodeId, epoch: u64) -> Self {
        Self { epoch, all: vec![At { node, epoch }] }
    }

    /// The epoch under which this node has it.
    pub fn of(&self, node: NodeId) -> Option<u64> {
        self.all.iter().find(|part| part.node == node).map(|part| part.epoch)
    }

    pub fn with(&self, node: NodeId) -> Self {
        let mut next = Self { epoch: self.epoch + 1, ..self.clone() };
        next.all.push(At { node, epoch: next.epoch });
        next
    }

    /// None: it is the only one that has it, or does not.
    pub fn without(&self, node: NodeId) -> Option<Self> {
        let mut next = Self { epoch: self.epoch + 1, ..self.clone() };
        next.all.retain(|part| part.node != node);
        (!next.all.is_empty() && next.all.len() < self.all.len()).then_some(next)
    }

    pub fn moved(&self, from: NodeId, to: NodeId) -> Self {
        let mut next = Self { epoch: self.epoch + 1, ..self.clone() };
        let epoch = next.epoch;
        next.all.iter_mut().filter(|part| part.node == from).for_each(|part| *part = At { node: to, epoch });
        next
    }
}

/// Something that happens to a node: a message, or the end of a time.
#[derive(Debug, Clone)]
pub(crate) enum What {
    Start,
    /// A client's request comes in.
    Request(RequestId),
    /// A request is looked at again here: it waits for its time, an instance, or authority.
    Work(Work),
    Renew,
    /// Its record is to be written.
    List,
    /// The node has known for long that this site was removed, at this revision.
    LetGo {
        site: SiteId,
        removed_at: u64,
    },
    /// The node's relocations have something to do by now.
    Tick,
    /// The probe of this peer has to go on, or ends.
    ProbeTime(NodeId),
    Probe {
        from: NodeId,
        probe: Probe,
        sent_at: Moment,
    },
    /// `life` tells that it was started anew: connections to it are gone.
    ProbeAnswer {
        from: NodeId,
        probe: Probe,
        sent_at: Moment,
        life: u32,
    },
    /// Nobody listens there; the host says so.
    ProbeRefused {
        from: NodeId,
        probe: Probe,
    },
    /// `committed`: how long ago, and for how long from then on others may serve it.
    Forward {
        work: Work,
        committed: Option<(Duration, Duration)>,
    },
    Answer {
        from: NodeId,
        work: Work,
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

/// A request on the node that is to serve it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Work {
    pub request: RequestId,
    pub site: SiteId,
    pub epoch: u64,
    /// Of the whole placement by which it was sent.
    pub seen: u64,
    /// The node whose client sent it.
    pub entry: NodeId,
    /// Real time at which it came here.
    pub since: u64,
}

/// From a node to the store.
#[derive(Debug, Clone)]
pub(crate) enum StoreAsk {
    /// This node's record is to say whether it heeds marks. What it asked before it was started anew changes nothing any more.
    List {
        life: u32,
        heeds_marks: bool,
    },
    /// Takes away the mark against this node that it knows of first, if that still stands.
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
        /// For so long others may serve it from the commit on.
        wait: Duration,
        /// Of `from`, which has to stand and to be newer than the placement and than the node's record.
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
        /// Of a removed site, as long as it is: one that was added again is given up by a node that has ended it first.
        is_removed: bool,
    },
    /// Nothing is left of a removed site under this epoch.
    Forget {
        site: SiteId,
        epoch: u64,
    },
}

/// What was there instead of what a commit expected.
#[derive(Debug, Clone)]
pub(crate) enum Instead {
    Placement(Option<Parts>),
    NoSite,
    /// What stands there is as it was seen, and something else that was counted on is not so.
    Otherwise,
}

/// The store's answer.
#[derive(Debug, Clone)]
pub(crate) enum StoreSays {
    Listed,
    Renewed {
        id: RenewId,
        revision: u64,
        /// It stands against the node that has read this.
        mark: Option<u64>,
    },
    /// A mark of this revision stands against the node.
    Marked {
        node: NodeId,
        revision: u64,
    },
    Found {
        site: SiteId,
        ask: AskId,
        placement: Option<Parts>,
    },
    /// `done`: the revision of the commit.
    Committed {
        site: SiteId,
        ask: AskId,
        from: Option<NodeId>,
        wait: Duration,
        done: Result<u64, Instead>,
    },
    /// Done, or it does not fit any more; the copy will show which.
    Heard,
}
