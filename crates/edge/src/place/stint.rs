//! A request's right to be served here: under which epoch, and whether that still holds.
//!
//! Not here: how it is earned (`cluster::tenure`), what becomes of a request that loses it (`place`).

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nagaya_cmdb::{NodeName, SiteName};
use tokio::time::sleep;

use super::spread::Way;
use crate::cluster::boottime;
use crate::refusal::Refusal;
use crate::shared::Shared;

/// Of one request whose site is placed here.
#[derive(Clone)]
pub struct Stint {
    shared: Arc<Shared>,
    site: SiteName,
    epoch: u64,
    /// The application may have seen some of it.
    handed: Rc<Cell<bool>>,
    /// Where several nodes have its site and it came from a client.
    _way: Option<Rc<Way>>,
}

impl Stint {
    pub fn new(shared: &Arc<Shared>, site: &SiteName, epoch: u64, way: Option<Way>) -> Self {
        let (shared, way) = (Arc::clone(shared), way.map(Rc::new));
        Self { shared, site: site.clone(), epoch, handed: Rc::default(), _way: way }
    }

    /// The site is still placed here, as it was when the request came; what else has it does not matter.
    pub fn is_current(&self) -> bool {
        let cluster = &self.shared.cluster;
        let Some(member) = cluster.member() else { return false };
        let standing =
            self.shared.with_table(|table| cluster.standing(table, self.site.as_str(), &member.node));
        standing.is_some_and(|standing| standing.epoch == Some(self.epoch))
    }

    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The newest epoch that is known; 0: it is placed nowhere.
    pub fn newest(&self) -> u64 {
        let cluster = &self.shared.cluster;
        let placement = self.shared.with_table(|table| cluster.placement(table, self.site.as_str()));
        placement.map_or(0, |placement| placement.epoch)
    }

    /// This node.
    pub fn node(&self) -> NodeName {
        self.shared.cluster.own_name()
    }

    pub fn was_handed(&self) -> bool {
        self.handed.get()
    }

    /// The instance is awake. The request may go into it once whoever had the site before can have no authority left, and
    /// while this node has its own. Returns how long the former took.
    pub async fn begin(&self, patience: Duration) -> Result<Duration, Refusal> {
        let cluster = &self.shared.cluster;
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
            if cluster.tenure.holds() {
                self.handed.set(true);
                return Ok(fence);
            }
            if !self.regained(patience).await {
                return Err(Refusal::Fenced);
            }
        }
    }

    /// An answer is here. True: it may be passed on; false: the site has moved, and it is nobody's answer.
    pub async fn confirmed(&self, patience: Duration) -> Result<bool, Refusal> {
        loop {
            if !self.is_current() {
                return Ok(false);
            }
            if self.shared.cluster.tenure.holds() {
                return Ok(true);
            }
            if !self.regained(patience).await {
                return Err(Refusal::Fenced);
            }
        }
    }

    /// Ends when this node has had no authority for so long: the application stands still, and may be another node's by now.
    pub async fn barred(&self, patience: Duration) {
        let tenure = &self.shared.cluster.tenure;
        loop {
            let left = tenure.left();
            if !left.is_zero() {
                sleep(left).await;
            } else if !tenure.regained(patience).await {
                return;
            }
        }
    }

    /// Waits for authority, or until the site has moved. False: neither in time.
    async fn regained(&self, patience: Duration) -> bool {
        tokio::select! {
            regained = self.shared.cluster.tenure.regained(patience) => regained,
            () = self.ended() => true,
        }
    }

    /// Ends when the site is no longer placed here as it was.
    pub async fn ended(&self) {
        let mut moves = self.shared.cluster.follow_moves();
        while self.is_current() {
            if moves.changed().await.is_err() {
                return;
            }
        }
    }
}

impl std::fmt::Debug for Stint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stint").field("site", &self.site).field("epoch", &self.epoch).finish_non_exhaustive()
    }
}
