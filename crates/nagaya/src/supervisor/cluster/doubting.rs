//! Marking nodes whose probes are late in the store, and for how long whoever takes a site from a node waits for it.
//!
//! Not here: why that is safe (`nagaya_placement::fence`, `doubt`), when a probe is late (`nagaya_edge::peers`), taking a mark against this
//! node away, which is a part of its being confirmed (`nagaya_cmdb`).

use std::rc::Rc;
use std::time::Duration;

use nagaya_cmdb::store::etcd::{Basis, Seen};
use nagaya_cmdb::{NodeName, NodeRecord, Part};
use nagaya_placement::doubt;
use nagaya_placement::fence::{TERM_MAX, outlasting, term_of};

use super::authority::now;
use super::membership::Membership;

impl Membership {
    /// A probe of this node has no answer yet, and the edge goes on asking.
    pub fn doubt(self: &Rc<Self>, node: NodeName) {
        let record = self.records().node(node.as_str()).ok().flatten();
        let heeds_it = |record: &NodeRecord| record.id != self.id && record.heeds_marks;
        let Some(record) = record.filter(heeds_it) else { return };
        if !self.doubts.borrow_mut().raise(now(), &node) {
            return;
        }
        let membership = Rc::clone(self);
        tokio::task::spawn_local(async move {
            match membership.store.doubt(&record, &membership.node).await {
                Ok(Some(revision)) => membership.doubts.borrow_mut().marked(now(), &node, revision),
                Ok(None) => {}
                Err(error) => tracing::debug!(%node, "it is not marked in the store: {error}"),
            }
        });
    }

    /// For how long after a commit of now others may serve a site that is taken from a node, and what has to be so for that. `part`:
    /// what is known of the node's part in the placement. The node is as `seen`, or nothing is known of it.
    pub fn may_serve_on(
        &self,
        from: &NodeName,
        part: Option<Part<'_>>,
        seen: Option<Seen>,
    ) -> (Duration, Basis) {
        let term = term_of(seen.as_ref().map_or(0, Seen::fence_ms));
        let (owed, written_by) = self.ages.borrow().owed(now(), Some(term), wait_of(part));
        let heeds_marks = matches!(&seen, Some(Seen::Member(record)) if record.heeds_marks);
        let mark = self.doubts.borrow().against(now(), from).filter(|_| heeds_marks);
        let basis = Basis { from: seen, mark: mark.map(|mark| mark.revision), written_by };
        (doubt::left(mark, now(), owed), basis)
    }

    /// The same without anything that could be otherwise but the node itself.
    pub fn may_serve_anyway(&self, part: Option<Part<'_>>, seen: Option<Seen>) -> (Duration, Basis) {
        let term = term_of(seen.as_ref().map_or(0, Seen::fence_ms));
        (outlasting(term).max(wait_of(part)), Basis { from: seen, ..Basis::default() })
    }

    /// The same where this node has given its part up: those that it had it from may have served it lately, and not said so.
    /// `is_lately`: the placement is known to be new.
    pub fn may_serve_before(&self, part: Option<Part<'_>>, is_lately: bool) -> (Duration, Basis) {
        match is_lately {
            true => (wait_of(part), Basis::default()),
            false => self.may_serve_since(wait_of(part)),
        }
    }

    /// The same of anybody who had the site at any time.
    pub fn may_serve_at_all(&self) -> (Duration, Basis) {
        self.may_serve_since(outlasting(TERM_MAX))
    }

    fn may_serve_since(&self, earlier: Duration) -> (Duration, Basis) {
        let (owed, written_by) = self.ages.borrow().owed(now(), None, earlier);
        (owed, Basis { written_by, ..Basis::default() })
    }
}

fn wait_of(part: Option<Part<'_>>) -> Duration {
    Duration::from_millis(part.map_or(0, |part| part.wait_ms).into())
}

/// As a record says it: no less.
pub fn whole_ms(wait: Duration) -> u32 {
    u32::try_from(wait.as_micros().div_ceil(1000)).unwrap_or(u32::MAX)
}
