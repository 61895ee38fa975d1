//! Answers of one other node that have begun and pause: whether the node is still there. One task of a thread asks for all of them,
//! and seldom: a stream of events may be silent for hours.
//!
//! What has begun cannot be had from another node, so it is not given up as soon as the node is silent, as a request is that has no
//! answer yet. A node that comes back goes on with it, as long as it may serve without a word from the store; after that its
//! application stands still or runs elsewhere, and nobody has to wait for the rest.
//!
//! Not here: requests without an answer (`watch`), how a node is asked (`probe`).

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nagaya_cmdb::NodeRecord;
use nagaya_placement::fence::{outlasting, term_of};
use nagaya_placement::liveness::Verdict;
use tokio::sync::Notify;
use tokio::task::spawn_local;
use tokio::time::sleep;

use super::watch::Waiting;
use crate::cluster::boottime;
use crate::shared::Shared;

/// Nothing more has come of an answer for so long: that is a pause.
const PAUSE: Duration = Duration::from_millis(50);

/// A node of which nothing was heard for so long is asked, while answers of it pause.
const ASK_AFTER: Duration = Duration::from_millis(250);

/// How often it is looked when it was heard.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Of one thread, for one node.
#[derive(Default)]
pub(super) struct Lulls {
    /// Answers that pause.
    waiting: Cell<usize>,
    /// A task looks after them.
    is_kept: Cell<bool>,
    lost: Notify,
}

impl Lulls {
    /// An answer pauses from now on. Ends when nothing was heard of the node for longer than it may serve by the last word it had from the
    /// store, and it does not answer now.
    pub async fn lost(self: &Rc<Self>, shared: &Arc<Shared>, record: &Arc<NodeRecord>) {
        sleep(PAUSE).await;
        let _waiting = Waiting::new(&self.waiting);
        let lost = self.lost.notified();
        if !self.is_kept.replace(true) {
            spawn_local(Rc::clone(self).keep(Arc::clone(shared), Arc::clone(record)));
        }
        lost.await;
    }

    async fn keep(self: Rc<Self>, shared: Arc<Shared>, record: Arc<NodeRecord>) {
        let probes = &shared.cluster.peers.probes;
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
            let term = outlasting(term_of(record.fence_ms));
            if silent_for() < term {
                // An answer to it is heard, whenever it comes.
                probes.ask(&record).await;
                continue;
            }
            // What was found before may be over.
            let found = probes.ask_anew(&record).await;
            let is_against = matches!(found.verdict, Verdict::Silent | Verdict::Refuses);
            if is_against && silent_for() >= term {
                self.lost.notify_waiters();
            }
        }
        self.is_kept.set(false);
    }
}
