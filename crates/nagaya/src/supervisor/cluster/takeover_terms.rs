//! Writes suspect marks into the store against nodes whose probes are late, and computes how long a
//! takeover waits.
//!
//! Not here: why that is safe (`nagaya_placement::lease`, `suspect_marks`), when a probe is late
//! (`nagaya_edge::peers`). Also not here: taking away a mark against this node, which is a part of
//! its confirmation (`nagaya_records`).

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use nagaya_placement::lease::{RevisionAges, TERM_MAX, lease_term, max_elapsed};
use nagaya_placement::relocation;
use nagaya_placement::suspect_marks::{self, SuspectMarks};
use nagaya_records::{NodeName, NodeRecord, Replica};
use nagaya_store::etcd::{PlacementBasis, SeenNode};

use super::clock::now;
use super::lease_manager::{TakeoverError, TakeoverId};
use super::lease_state::LeaseState;
use super::view::ClusterView;

pub struct TakeoverTerms {
    view: Rc<ClusterView>,
    lease: Rc<LeaseState>,
    doubts: RefCell<SuspectMarks<NodeName>>,
    /// Ages of the store's revisions.
    ages: RefCell<RevisionAges>,
}

impl TakeoverTerms {
    pub fn new(view: Rc<ClusterView>, lease: Rc<LeaseState>) -> Self {
        Self { view, lease, doubts: RefCell::default(), ages: RefCell::default() }
    }

    /// Begins a change that takes a site from a node which has not given it up, if that is allowed
    /// now. The change has to follow at once.
    pub async fn begin_takeover(&self, from: &NodeName) -> Result<TakeoverId, TakeoverError> {
        let stored = || self.view.records().node(from.as_str()).map_err(|_| TakeoverError::NoStore);
        if stored()?.is_none() {
            // Removed, or so new that this node's copy does not have it.
            self.view.store.in_step(relocation::ASK_LONGEST).await.map_err(|_| TakeoverError::NoStore)?;
        }
        let record = stored()?;
        self.lease.trust().borrow_mut().begin_takeover(now(), from, record.as_ref())
    }

    /// Ends such a change. `is_answered`: the store has said what became of it.
    pub fn end_takeover(&self, id: TakeoverId, is_answered: bool) {
        self.lease.trust().borrow_mut().end_takeover(now(), id, is_answered);
    }

    /// A read of the store has just seen this revision.
    pub fn note_revision(&self, revision: u64) {
        self.ages.borrow_mut().note_revision(now(), revision);
    }

    /// The node was heard from: no mark counts against it any more.
    pub fn clear_mark(&self, node: &NodeName) {
        self.doubts.borrow_mut().forget(node);
    }

    /// Handles a probe of this node that has no reply yet, while the edge continues to probe.
    pub fn mark_suspect(self: &Rc<Self>, node: NodeName) {
        let record = self.view.records().node(node.as_str()).ok().flatten();
        let heeds_it = |record: &NodeRecord| record.id != self.view.id && record.heeds_marks;
        let Some(record) = record.filter(heeds_it) else { return };
        if !self.doubts.borrow_mut().raise(now(), &node) {
            return;
        }
        let terms = Rc::clone(self);
        tokio::task::spawn_local(async move {
            match terms.view.store.mark_suspect(&record, &terms.view.node).await {
                Ok(Some(revision)) => terms.doubts.borrow_mut().marked(now(), &node, revision),
                Ok(None) => {}
                Err(error) => tracing::debug!(%node, "it is not marked in the store: {error}"),
            }
        });
    }

    /// Returns how long others may serve a site after a takeover that commits now, and the
    /// preconditions. `part` is the node's known replica in the placement. `seen` is the node's
    /// state, if known.
    pub fn may_serve_on(
        &self,
        from: &NodeName,
        part: Option<Replica<'_>>,
        seen: Option<SeenNode>,
    ) -> (Duration, PlacementBasis) {
        let term = lease_term(seen.as_ref().map_or(0, SeenNode::fence_ms));
        let (owed, written_by) = self.ages.borrow().remaining_wait(now(), Some(term), wait_of(part));
        let heeds_marks = matches!(&seen, Some(SeenNode::Member(record)) if record.heeds_marks);
        let mark = self.doubts.borrow().mark_against(now(), from).filter(|_| heeds_marks);
        let basis = PlacementBasis { from: seen, mark: mark.map(|mark| mark.revision), written_by };
        (suspect_marks::remaining_wait(mark, now(), owed), basis)
    }

    /// Does the same without any precondition except the node itself.
    pub fn may_serve_anyway(
        &self,
        part: Option<Replica<'_>>,
        seen: Option<SeenNode>,
    ) -> (Duration, PlacementBasis) {
        let term = lease_term(seen.as_ref().map_or(0, SeenNode::fence_ms));
        (max_elapsed(term).max(wait_of(part)), PlacementBasis { from: seen, ..PlacementBasis::default() })
    }

    /// Does the same after this node has given up its replica. Its former owners may have served it
    /// recently without giving it up. `is_lately` says that the placement is known to be new.
    pub fn may_serve_before(&self, part: Option<Replica<'_>>, is_lately: bool) -> (Duration, PlacementBasis) {
        if is_lately {
            (wait_of(part), PlacementBasis::default())
        } else {
            self.may_serve_since(wait_of(part))
        }
    }

    /// Does the same for any node that ever had the site.
    pub fn may_serve_at_all(&self) -> (Duration, PlacementBasis) {
        self.may_serve_since(max_elapsed(TERM_MAX))
    }

    fn may_serve_since(&self, earlier: Duration) -> (Duration, PlacementBasis) {
        let (owed, written_by) = self.ages.borrow().remaining_wait(now(), None, earlier);
        (owed, PlacementBasis { written_by, ..PlacementBasis::default() })
    }
}

fn wait_of(part: Option<Replica<'_>>) -> Duration {
    Duration::from_millis(part.map_or(0, |part| part.wait_ms).into())
}

/// Rounds up to the form in records.
pub fn round_up_ms(wait: Duration) -> u32 {
    u32::try_from(wait.as_micros().div_ceil(1000)).unwrap_or(u32::MAX)
}
