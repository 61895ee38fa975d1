//! Counts placements whenever records change, and has the replicas of this node looked after.

use std::rc::Rc;
use std::time::Duration;

use nagaya_store::Store as _;

use super::placement_counts::{PlacementCounts, count_placements};
use super::replicas::ReplicaManager;
use super::view::ClusterView;

/// Interval at which placements are counted, if there were changes.
const COUNT_EVERY: Duration = Duration::from_secs(2);

pub struct PlacementCounter {
    pub view: Rc<ClusterView>,
    pub counts: Rc<PlacementCounts>,
    pub replicas: Rc<ReplicaManager>,
}

impl PlacementCounter {
    /// Counts for as long as this node is a member.
    pub async fn run(self) {
        let mut counted_at = None;
        let mut shared_now = Vec::new();
        loop {
            let revision = self.view.context.records.revision().ok();
            // A recent arrival becomes an old one without a change of the records.
            let is_due = revision != counted_at || self.counts.has_arrivals();
            if is_due
                && let Some(counted) = count_placements(&self.view.context.records, &self.view.node).await
            {
                self.counts.replace(counted.totals);
                shared_now = counted.shared;
                counted_at = revision;
            }
            // Unchanged sites are included: a step that began for one of them may have failed.
            self.replicas.look_after(&shared_now);
            tokio::time::sleep(COUNT_EVERY).await;
        }
    }
}
