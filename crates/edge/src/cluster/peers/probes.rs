//! Holds what all threads know about the presence of other nodes. That is the time of each one's
//! last message. It also holds the questions to the thread that probes them.
//!
//! Not here: that thread (`probe`).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use foldhash::fast::RandomState;
use nagaya_placement::liveness::ProbeResult;
use nagaya_placement::{Moment, liveness};
use nagaya_records::{NodeName, NodeRecord};
use parking_lot::{Mutex, RwLock};
use tokio::sync::{mpsc, oneshot};

use crate::cluster::node_lease::boottime;
use crate::cluster::peers::probe::vouch::VouchOrder;

/// Maximum number of probed nodes.
pub const LINES_MAX: usize = 1024;

/// The requests' side, shared by all threads.
#[derive(Debug, Default)]
pub struct PeerProbes {
    /// Last time each node was heard, CLOCK_BOOTTIME.
    heard: RwLock<HashMap<NodeName, Arc<AtomicU64>, RandomState>>,
    asks: Mutex<Option<mpsc::Sender<ProbeRequest>>>,
    orders: Mutex<Option<mpsc::Sender<VouchOrder>>>,
}

/// A request's question.
pub struct ProbeRequest {
    pub record: Arc<NodeRecord>,
    /// A recent finding is not enough.
    pub is_anew: bool,
    pub found: oneshot::Sender<ProbeFinding>,
}

/// The answer to a request's question.
#[derive(Debug, Clone, Copy)]
pub struct ProbeFinding {
    pub verdict: ProbeResult,
    /// Time from this question to the next probe, while requests wait.
    pub again: Duration,
}

impl ProbeFinding {
    /// The node was not probed.
    pub const NOTHING: Self = Self { verdict: ProbeResult::Pending, again: liveness::BOUND_MAX };
}

impl PeerProbes {
    /// From now on the thread that asks nodes takes questions and orders.
    pub fn open(&self, asks: mpsc::Sender<ProbeRequest>, orders: mpsc::Sender<VouchOrder>) {
        *self.asks.lock() = Some(asks);
        *self.orders.lock() = Some(orders);
    }

    /// Records that data of a response has come from there.
    pub fn heard(&self, node: &NodeName) {
        self.heard_at(node, boottime());
    }

    pub fn heard_at(&self, node: &NodeName, at: Moment) {
        if let Some(heard) = self.heard.read().get(node) {
            heard.fetch_max(at.0, Ordering::Relaxed);
            return;
        }
        let mut all = self.heard.write();
        if all.len() >= LINES_MAX {
            all.clear();
        }
        all.entry(node.clone()).or_default().fetch_max(at.0, Ordering::Relaxed);
    }

    /// Returns the last time by a request or a probe.
    pub fn last_heard(&self, node: &NodeName) -> Option<Moment> {
        self.heard.read().get(node).map(|heard| Moment(heard.load(Ordering::Relaxed)))
    }

    /// Passes an order of the supervisor about vouching on. If there is no space, it counts as
    /// lost on the way.
    pub fn vouch(&self, order: VouchOrder) {
        if let Some(orders) = &*self.orders.lock() {
            let _ = orders.try_send(order);
        }
    }

    /// Returns whether it was heard just now, so that it needs no probe.
    pub fn is_fresh(&self, node: &NodeName) -> bool {
        self.last_heard(node).is_some_and(|heard| boottime().since(heard) < liveness::FRESH)
    }

    /// Probes the node, together with all present requests. Returns `Pending` if it was not
    /// probed, because that is impossible or the queue is full.
    pub async fn ask(&self, record: &Arc<NodeRecord>) -> ProbeFinding {
        self.send(record, false).await
    }

    /// Probes the node in spite of a recent finding against it.
    pub async fn ask_anew(&self, record: &Arc<NodeRecord>) -> ProbeFinding {
        self.send(record, true).await
    }

    async fn send(&self, record: &Arc<NodeRecord>, is_anew: bool) -> ProbeFinding {
        let (sender, found) = oneshot::channel();
        let asked = ProbeRequest { record: Arc::clone(record), is_anew, found: sender };
        let is_asked = self.asks.lock().as_ref().is_some_and(|asks| asks.try_send(asked).is_ok());
        if is_asked { found.await.unwrap_or(ProbeFinding::NOTHING) } else { ProbeFinding::NOTHING }
    }
}
