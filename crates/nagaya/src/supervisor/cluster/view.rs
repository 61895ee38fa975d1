//! The cluster as every task of a member reads it: this node, its store, its records, the other
//! members, its lease.
//!
//! Invariant: nothing here changes through the view. `member_keys` changes the member's keys, and
//! `placement_counter` the counts. `lease_renewer` and `takeover_terms` change the lease.

use std::cell::Ref;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nagaya_records::NodeName;
use nagaya_store::etcd::ClusterError;
use nagaya_store::{ClusterStore, Store};

use super::context::ClusterContext;
use super::known_node::KnownNode;
use super::lease_state::LeaseState;
use super::member::{ClusterMember, CurrentMember};
use super::placement_counts::PlacementCounts;
use crate::admin::ProblemReply;

/// Time for which a joining node waits for the cluster's records.
const IN_STEP_WAIT: Duration = Duration::from_secs(60);

pub struct ClusterView {
    pub context: Rc<ClusterContext>,
    pub node: NodeName,
    /// As in its record.
    pub id: String,
    pub store: Arc<ClusterStore>,
    member: Rc<CurrentMember>,
    counts: Rc<PlacementCounts>,
    lease: Rc<LeaseState>,
}

impl ClusterView {
    pub fn new(
        context: Rc<ClusterContext>,
        store: Arc<ClusterStore>,
        member: Rc<CurrentMember>,
        counts: Rc<PlacementCounts>,
        lease: Rc<LeaseState>,
    ) -> Self {
        let node = member.borrow().node.clone();
        let id = member.borrow().id.clone();
        Self { context, node, id, store, member, counts, lease }
    }

    pub fn member(&self) -> ClusterMember {
        self.member.borrow().clone()
    }

    pub fn borrow_member(&self) -> Ref<'_, ClusterMember> {
        self.member.borrow()
    }

    pub fn counts(&self) -> &PlacementCounts {
        &self.counts
    }

    pub fn lease(&self) -> &LeaseState {
        &self.lease
    }

    pub fn records(&self) -> &dyn Store {
        &*self.context.records
    }

    pub async fn in_step(&self) -> Result<(), ClusterError> {
        self.store.in_step(IN_STEP_WAIT).await
    }

    /// Reports whether this node's copy of the records has a record of it. If so, nobody has
    /// removed it, as far as it knows.
    pub fn is_member(&self) -> bool {
        let record = self.records().node(self.node.as_str());
        record.is_ok_and(|record| record.is_some_and(|record| record.id == self.id))
    }

    pub fn find_member(&self, node: &str) -> Result<NodeName, Box<ProblemReply>> {
        let known = self.records().node(node)?;
        known.map(|record| record.name).ok_or_else(|| ClusterError::NoNode { name: node.into() }.into())
    }

    /// Returns all members, with what they tell of themselves.
    pub fn known_nodes(&self) -> Result<Vec<KnownNode>, String> {
        let nodes = self.records().nodes().map_err(|error| error.to_string())?;
        let present = self.store.presences();
        Ok(nodes
            .into_iter()
            .map(|record| {
                let told = present.iter().find(|presence| presence.node == record.name);
                let load = told.map(|presence| serde_json::from_str(&presence.json).unwrap_or_default());
                let placements = self.counts.placements_on(&record.name);
                KnownNode { record, load, placements }
            })
            .collect())
    }
}
