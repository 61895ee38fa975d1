//! Watches one other node for one thread, while requests wait for it. One timer and one probe
//! serve all of them. A request that is answered at once costs neither.
//!
//! Not here: how a node is asked (`probe`), the consequences of a suspicion against it
//! (`placement`).

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nagaya_placement::liveness::ProbeResult;
use nagaya_records::NodeRecord;
use tokio::sync::Notify;
use tokio::task::spawn_local;
use tokio::time::sleep;

use crate::cluster::membership::EdgeCluster;
use crate::cluster::peers::probes::ProbeFinding;

/// Time a request waits for its response before its node is probed. A response proves as much,
/// and most fast applications respond within it. It is short against the bound of a probe.
const GRACE: Duration = Duration::from_millis(2);

/// Interval of the check for waiting requests. Requests that come just after something was heard
/// wake nobody.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Number of checks in a row without a waiting request after which they pause until a request
/// comes.
const IDLE_LOOKS: u32 = 10;

/// The watch over one node, in repeated rounds.
#[derive(Default)]
pub(super) struct PeerWatch(RefCell<Rc<WatchTurn>>);

/// From the first request to a finding against the node.
#[derive(Default)]
struct WatchTurn {
    waiting: Cell<usize>,
    /// A task runs it.
    is_kept: Cell<bool>,
    /// A request has come for which the node was not probed yet.
    is_new: Cell<bool>,
    /// Notified by such a request, unless the node was heard just before.
    came: Notify,
    found: Cell<Option<ProbeResult>>,
    told: Notify,
}

impl PeerWatch {
    /// Completes with a finding against the node: it refuses, or it is silent. It stays pending
    /// while the node answers, or while it cannot be probed.
    pub async fn against(&self, cluster: &Arc<EdgeCluster>, record: &Arc<NodeRecord>) -> ProbeResult {
        let turn = self.turn();
        let _waiting = WatchWaiter::new(&turn.waiting);
        turn.is_new.set(true);
        if !turn.is_kept.replace(true) {
            spawn_local(Rc::clone(&turn).keep(Arc::clone(cluster), Arc::clone(record)));
        } else if !cluster.peers.probes.is_fresh(&record.name) {
            turn.came.notify_one();
        }
        loop {
            if let Some(verdict) = turn.found.get() {
                return verdict;
            }
            turn.told.notified().await;
        }
    }

    /// Records that the awaited data is not complete. If the rest does not come, the node is
    /// probed as for a new request.
    pub fn renew(&self) {
        self.turn().is_new.set(true);
    }

    fn turn(&self) -> Rc<WatchTurn> {
        let mut turn = self.0.borrow_mut();
        if turn.found.get().is_some() {
            *turn = Rc::default();
        }
        Rc::clone(&turn)
    }
}

impl WatchTurn {
    /// Runs until there is a finding, or no request waits any more.
    async fn keep(self: Rc<Self>, cluster: Arc<EdgeCluster>, record: Arc<NodeRecord>) {
        let probes = &cluster.peers.probes;
        let is_silent = || self.waiting.get() > 0 && !probes.is_fresh(&record.name);
        // Requests that wait for their responses have their node probed again. So a node that
        // dies then is detected, too.
        let (mut idle, mut due) = (0, Instant::now());
        if is_silent() {
            sleep(GRACE).await;
        }
        loop {
            if is_silent() && (self.is_new.replace(false) || Instant::now() >= due) {
                let asked = Instant::now();
                let ProbeFinding { verdict, again } = probes.ask(&record).await;
                due = asked + again;
                if matches!(verdict, ProbeResult::Refuses | ProbeResult::Silent) {
                    self.found.set(Some(verdict));
                    return self.told.notify_waiters();
                }
            }
            let left = due.saturating_duration_since(Instant::now());
            let pause = if left.is_zero() { LOOK_EVERY } else { left.min(LOOK_EVERY) };
            tokio::select! {
                () = self.came.notified() => sleep(GRACE).await,
                () = sleep(pause) => {}
            }
            idle = if self.waiting.get() > 0 { 0 } else { idle + 1 };
            if idle == IDLE_LOOKS {
                return self.is_kept.set(false);
            }
        }
    }
}

/// Counts one waiting request while it waits.
pub(super) struct WatchWaiter<'a>(&'a Cell<usize>);

impl<'a> WatchWaiter<'a> {
    pub fn new(count: &'a Cell<usize>) -> Self {
        count.set(count.get() + 1);
        Self(count)
    }
}

impl Drop for WatchWaiter<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}
