//! Detects that a node is lost while its responses pause after their beginning. One task of a
//! thread checks for all of them. It checks seldom, because a stream of events may be silent for
//! hours.
//!
//! A response that has begun cannot come from another node. So it is not given up as soon as the
//! node is silent, unlike a request without a response. A node that comes back continues it, if
//! it may still serve under its lease. After the lease its application is frozen or runs
//! elsewhere, and the wait for the rest ends.
//!
//! Not here: requests without a response (`watch`), the probe itself (`probe`).

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nagaya_placement::lease::{lease_term, max_elapsed};
use nagaya_placement::liveness::ProbeResult;
use nagaya_records::NodeRecord;
use tokio::sync::Notify;
use tokio::task::spawn_local;
use tokio::time::sleep;

use crate::cluster::membership::EdgeCluster;
use crate::cluster::node_lease::boottime;
use crate::cluster::peers::watch::WatchWaiter;

/// Time without data after which a response counts as paused.
const PAUSE: Duration = Duration::from_millis(50);

/// Time without any sign of a node after which it is probed, while its responses pause.
const ASK_AFTER: Duration = Duration::from_millis(250);

/// Interval of the check for signs.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Paused responses of one node, on one thread.
#[derive(Default)]
pub(super) struct StalledResponses {
    /// Number of responses that pause.
    waiting: Cell<usize>,
    /// A task checks them.
    is_kept: Cell<bool>,
    lost: Notify,
}

impl StalledResponses {
    /// Waits from the beginning of a pause. Completes when the node was silent for longer than
    /// its last possible lease, and does not answer now.
    pub async fn lost(self: &Rc<Self>, cluster: &Arc<EdgeCluster>, record: &Arc<NodeRecord>) {
        sleep(PAUSE).await;
        let _waiting = WatchWaiter::new(&self.waiting);
        let lost = self.lost.notified();
        if !self.is_kept.replace(true) {
            spawn_local(Rc::clone(self).keep(Arc::clone(cluster), Arc::clone(record)));
        }
        lost.await;
    }

    async fn keep(self: Rc<Self>, cluster: Arc<EdgeCluster>, record: Arc<NodeRecord>) {
        let probes = &cluster.peers.probes;
        let began = boottime();
        let silent_for = || {
            let heard = probes.last_heard(&record.name).map_or(began, |heard| heard.max(began));
            boottime().since(heard)
        };
        while self.waiting.get() > 0 {
            sleep(LOOK_EVERY).await;
            if silent_for() < ASK_AFTER {
                continue;
            }
            let term = max_elapsed(lease_term(record.fence_ms));
            if silent_for() < term {
                // An answer to it is heard, whenever it arrives.
                probes.ask(&record).await;
                continue;
            }
            // An earlier finding may be out of date.
            let found = probes.ask_anew(&record).await;
            let is_against = matches!(found.verdict, ProbeResult::Silent | ProbeResult::Refuses);
            if is_against && silent_for() >= term {
                self.lost.notify_waiters();
            }
        }
        self.is_kept.set(false);
    }
}
