//! One thread's eye on one other node, while requests wait for it: one timer and one question serve all of them, and a
//! request that is answered at once costs neither.
//!
//! Not here: how a node is asked (`probe`), what follows when something is held against it (`place`).

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nagaya_cmdb::NodeRecord;
use nagaya_placement::liveness::Verdict;
use tokio::sync::Notify;
use tokio::task::spawn_local;
use tokio::time::sleep;

use super::probe::Found;
use crate::shared::Shared;

/// A request waits so long for its answer before its node is asked: an answer says as much, and most fast applications' are
/// here by then. Short against the bound that a probe has.
const GRACE: Duration = Duration::from_millis(2);

/// Requests that come just after something was heard wake nobody. So often it is looked whether one of them still waits.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Looks in a row at which nobody waits, after which there are no more until a request comes.
const IDLE_LOOKS: u32 = 10;

/// Over one node, again and again.
#[derive(Default)]
pub(super) struct Watch(RefCell<Rc<Turn>>);

/// From the first request to a verdict against the node.
#[derive(Default)]
struct Turn {
    waiting: Cell<usize>,
    /// A task looks after it.
    is_kept: Cell<bool>,
    /// A request has come for which the node was not asked yet.
    is_new: Cell<bool>,
    /// The same, and nothing was heard from the node just before.
    came: Notify,
    found: Cell<Option<Verdict>>,
    told: Notify,
}

impl Watch {
    /// Ends when something is held against the node: it refuses, or it is silent. As long as it answers, or nobody can be
    /// asked, this does not end.
    pub async fn against(&self, shared: &Arc<Shared>, record: &Arc<NodeRecord>) -> Verdict {
        let turn = self.turn();
        let _waiting = Waiting::new(&turn.waiting);
        turn.is_new.set(true);
        if !turn.is_kept.replace(true) {
            spawn_local(Rc::clone(&turn).keep(Arc::clone(shared), Arc::clone(record)));
        } else if !shared.cluster.peers.probes.is_fresh(&record.name) {
            turn.came.notify_one();
        }
        loop {
            if let Some(verdict) = turn.found.get() {
                return verdict;
            }
            turn.told.notified().await;
        }
    }

    /// What was heard is not all that is waited for: should the rest not come, the node is asked as for a new request.
    pub fn renew(&self) {
        self.turn().is_new.set(true);
    }

    fn turn(&self) -> Rc<Turn> {
        let mut turn = self.0.borrow_mut();
        if turn.found.get().is_some() {
            *turn = Rc::default();
        }
        Rc::clone(&turn)
    }
}

impl Turn {
    /// Until there is a verdict, or nobody waits any more.
    async fn keep(self: Rc<Self>, shared: Arc<Shared>, record: Arc<NodeRecord>) {
        let probes = &shared.cluster.peers.probes;
        let is_silent = || self.waiting.get() > 0 && !probes.is_fresh(&record.name);
        // While requests wait for their answers, their node is asked again: a node that dies then is found out, too.
        let (mut idle, mut due) = (0, Instant::now());
        if is_silent() {
            sleep(GRACE).await;
        }
        loop {
            if is_silent() && (self.is_new.replace(false) || Instant::now() >= due) {
                let asked = Instant::now();
                let Found { verdict, again } = probes.ask(&record).await;
                due = asked + again;
                if matches!(verdict, Verdict::Refuses | Verdict::Silent) {
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

/// Counts one who waits, as long as he does.
pub(super) struct Waiting<'a>(&'a Cell<usize>);

impl<'a> Waiting<'a> {
    pub fn new(count: &'a Cell<usize>) -> Self {
        count.set(count.get() + 1);
        Self(count)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}
