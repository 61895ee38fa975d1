//! Marking nodes whose probes are late in the store, and what a mark saves whoever takes a site from them.
//!
//! Not here: why that is safe (`nagaya_placement::doubt`), when a probe is late (`nagaya_edge::peers`), taking a mark against this
//! node away, which is a part of its being confirmed (`nagaya_cmdb`).

use std::rc::Rc;
use std::time::Duration;

use nagaya_cmdb::NodeName;
use nagaya_placement::doubt::{self, Mark};

use super::authority::now;
use super::membership::Membership;

impl Membership {
    /// A probe of this node has no answer yet, and the edge goes on asking.
    pub fn doubt(self: &Rc<Self>, node: NodeName) {
        // What another version does with a mark is not known.
        let is_same = |version: &str| version == env!("CARGO_PKG_VERSION");
        let record = self.records().node(node.as_str()).ok().flatten();
        let is_other = record.is_some_and(|record| record.id != self.id && is_same(&record.version));
        if !is_other || !self.doubts.borrow_mut().raise(now(), &node) {
            return;
        }
        let membership = Rc::clone(self);
        tokio::task::spawn_local(async move {
            match membership.store.doubt(&node, &membership.node).await {
                Ok(Some(revision)) => membership.doubts.borrow_mut().marked(now(), &node, revision),
                Ok(None) => {}
                Err(error) => tracing::debug!(%node, "it is not marked in the store: {error}"),
            }
        });
    }

    /// For how long after a commit of now the node may serve on that a site is taken from, and the mark by which that is so.
    pub fn may_serve_on(&self, from: Option<&NodeName>) -> (Duration, Option<Mark>) {
        let Some(from) = from else { return (Duration::ZERO, None) };
        let mark = self.doubts.borrow().against(from);
        (doubt::left(mark, now(), self.context.fence()), mark)
    }
}
