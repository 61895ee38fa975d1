//! Holds a request's right to be served here: its epoch, and whether it is still valid.
//!
//! Not here: how a node gets the right (`cluster::node_lease`), a request that loses it
//! (`placement`).

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nagaya_records::{NodeName, SiteName};
use tokio::time::sleep;

use crate::cluster::membership::EdgeCluster;
use crate::cluster::node_lease::boottime;
use crate::cluster::replica_picker::InFlightGuard;
use crate::http::refusal::Refusal;

/// Maximum time a request waits for this node's lease to come back, or for its site to be placed
/// elsewhere.
pub const HOLD_MAX: Duration = Duration::from_secs(5);

/// The right of one request whose site is placed here.
#[derive(Clone)]
pub struct ServingEpoch {
    cluster: Arc<EdgeCluster>,
    site: SiteName,
    epoch: u64,
    /// The application may have seen some of it.
    handed: Rc<Cell<bool>>,
    /// Set if several nodes have its site and it came from a client.
    _way: Option<Rc<InFlightGuard>>,
}

impl ServingEpoch {
    pub fn new(cluster: &Arc<EdgeCluster>, site: &SiteName, epoch: u64, way: Option<InFlightGuard>) -> Self {
        let cluster = Arc::clone(cluster);
        Self { cluster, site: site.clone(), epoch, handed: Rc::default(), _way: way.map(Rc::new) }
    }

    /// Returns whether the site is still placed here, as it was when the request arrived. Other
    /// nodes with the site do not matter.
    pub fn is_current(&self) -> bool {
        let cluster = &self.cluster;
        let Some(member) = cluster.member() else { return false };
        let standing = cluster.table.read(|table| cluster.standing(table, self.site.as_str(), &member.node));
        standing.is_some_and(|standing| standing.epoch == Some(self.epoch))
    }

    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns the newest known epoch. 0 if the site has no place.
    pub fn newest(&self) -> u64 {
        let cluster = &self.cluster;
        let placement = cluster.table.read(|table| cluster.placement(table, self.site.as_str()));
        placement.map_or(0, |placement| placement.epoch)
    }

    /// Returns this node.
    pub fn node(&self) -> NodeName {
        self.cluster.own_name()
    }

    pub fn was_handed(&self) -> bool {
        self.handed.get()
    }

    /// Waits until a request may enter the awake instance. Earlier owners of the site must have
    /// no lease left, and this node must hold its own. Returns the time spent on the former.
    pub async fn begin(&self, patience: Duration) -> Result<Duration, Refusal> {
        let cluster = &self.cluster;
        let mut fence = Duration::ZERO;
        loop {
            if !self.is_current() {
                return Err(Refusal::Moved);
            }
            let from = cluster.arrived(&self.site, self.epoch).ok_or(Refusal::Moved)?;
            let early = from.since(boottime());
            if !early.is_zero() {
                let began = Instant::now();
                sleep(early).await;
                fence += began.elapsed();
                continue;
            }
            if cluster.lease.holds() {
                self.handed.set(true);
                return Ok(fence);
            }
            if !self.regained(patience).await {
                return Err(Refusal::Fenced);
            }
        }
    }

    /// Checks an answer that is here. Returns true if it may be passed on. Returns false if the
    /// site has moved, which makes the answer void.
    pub async fn confirmed(&self, patience: Duration) -> Result<bool, Refusal> {
        loop {
            if !self.is_current() {
                return Ok(false);
            }
            if self.cluster.lease.holds() {
                return Ok(true);
            }
            if !self.regained(patience).await {
                return Err(Refusal::Fenced);
            }
        }
    }

    /// Completes when this node has had no lease for `patience`. The application is then frozen,
    /// and may run on another node by now.
    pub async fn barred(&self, patience: Duration) {
        let lease = &self.cluster.lease;
        loop {
            let left = lease.left();
            if !left.is_zero() {
                sleep(left).await;
            } else if !lease.regained(patience).await {
                return;
            }
        }
    }

    /// Waits for the lease, or until the site has moved. Returns false if neither happens in
    /// time.
    async fn regained(&self, patience: Duration) -> bool {
        tokio::select! {
            regained = self.cluster.lease.regained(patience) => regained,
            () = self.ended() => true,
        }
    }

    /// Completes when the site is no longer placed here as it was.
    pub async fn ended(&self) {
        let mut moves = self.cluster.follow_moves();
        while self.is_current() {
            if moves.changed().await.is_err() {
                return;
            }
        }
    }
}

impl std::fmt::Debug for ServingEpoch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stint").field("site", &self.site).field("epoch", &self.epoch).finish_non_exhaustive()
    }
}
