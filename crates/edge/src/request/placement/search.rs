//! The search for the node that serves a request from a client.
//!
//! If several nodes have the site, one is chosen (`replica_picker`), and another one can replace
//! it. If that node is silent, refuses, is fenced or has left, the supervisor is asked for another
//! one. The same request goes there.
//!
//! ```text
//!   Locate ──► ServeHere ──► Done(Here)
//!     ▲  │         └──► Locate, if the site has moved
//!     │  ├────► Forward ──► Done(Answered)
//!     │  │         └──► Locate, or Relocate if no other node has the site
//!     │  └────► Relocate
//!     └──────────────┘
//! ```
//!
//! Invariant: each way back to `Locate` takes from the budget, or waits for a change of the
//! records. Not here: the request's way to a node (`peer_forward`), a request that is served here
//! (`placement`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use nagaya_base::Code;
use nagaya_records::feed::PlaceReply;
use nagaya_records::{NodeName, NodeRecord, Placement, PlacementReason, RecordIndex, Replica, SiteName};
use tokio::task::spawn_local;
use tokio::time::timeout;

use crate::admission::deferral;
use crate::cluster::membership::EdgeCluster;
use crate::cluster::replica_picker::InFlightGuard;
use crate::cluster::retry_budget::RetryBudget;
use crate::cluster::serving_epoch::{HOLD_MAX, ServingEpoch};
use crate::cluster::wait_estimate::PlacementWait;
use crate::cluster::{replica_picker, wait_estimate};
use crate::http::message::{RequestHead, Response};
use crate::http::refusal::{Refusal, RetryHint};
use crate::http::route::SiteRoute;
use crate::record::access_record::Relocation;
use crate::request::context::RequestContext;
use crate::request::placement::idempotence::{RepeatSafety, may_repeat};
use crate::request::placement::peer_forward;
use crate::request::placement::peer_forward::{ForwardFailure, PeerForward};
use crate::request::placement::placer::Placer;
use crate::request::placement::replay_body::ReplayBody;

/// Number of times that one request may ask for another node without a pause.
pub const ASKS_AT_ONCE: usize = 3;

/// Number of times after that. Before each of them the known node gets a moment: it may be one
/// whose lease comes back.
const ASKS_AFTER_PAUSE: usize = 4;

/// First of these pauses. Each further one is twice as long.
const ASK_PAUSE: Duration = Duration::from_millis(250);

/// Maximum number of times that the site has moved while the request was on its way.
const STRAYS_MAX: usize = 3;

/// Maximum number of times a request is sent to the same node again after a broken connection.
const RESENDS_MAX: u32 = 1;

/// Maximum time a request waits while its site moves away. The requests that run there may take
/// that long to end.
pub const LEAVE_MAX: Duration = Duration::from_secs(30);

/// The result of a search.
pub enum PlacementFinding {
    /// The request may be served here.
    Here(ServingEpoch),
    /// Another node has answered it.
    Answered(Response),
}

/// The next step of a search.
enum SearchState {
    /// Find out where the site is to be served, as far as is known here.
    Locate,
    /// Serve it here, as soon as this node may.
    ServeHere { epoch: u64, is_one_of_many: bool },
    /// Send it to the node that has the site.
    Forward { record: Arc<NodeRecord>, epoch: u64, is_one_of_many: bool },
    /// Have the supervisor find another node.
    Relocate(PlaceSearch),
    /// It is over.
    Done(PlacementFinding),
}

/// Why another node is to be found: none of the site's places serves it, or it has none.
struct PlaceSearch {
    seen: Option<Placement>,
    lost: Option<NodeName>,
    why: PlacementReason,
    /// How long it took to find out that `lost` does not answer.
    detect: Duration,
}

/// How often a search has taken each way back.
#[derive(Default)]
struct SearchBudget {
    /// It was sent to the same node again.
    resends: u32,
    /// The site had moved while the request was on its way.
    strays: usize,
    /// The supervisor said that the node is there after all.
    returns: usize,
    /// It waited before another node was asked for.
    pauses: usize,
}

/// The next step after `asks` for another node, and `pauses` before some of them.
#[derive(Debug, PartialEq, Eq)]
enum AskStep {
    Ask,
    /// Wait, and try the known node once more.
    Pause(Duration),
    GiveUp,
}

impl AskStep {
    fn after(asks: usize, pauses: usize) -> Self {
        match asks.checked_sub(ASKS_AT_ONCE) {
            None => Self::Ask,
            Some(ASKS_AFTER_PAUSE..) => Self::GiveUp,
            Some(more) if pauses > more => Self::Ask,
            Some(_) => Self::Pause(ASK_PAUSE * (1 << pauses)),
        }
    }
}

/// Nodes and epochs that did not serve this request.
type TriedReplicas = Vec<(NodeName, u64)>;

/// One request that goes after its site.
pub struct Search<'a> {
    placer: &'a Placer,
    route: &'a SiteRoute,
    head: &'a RequestHead,
    hop: PeerForward<'a>,
    budget: SearchBudget,
    tried: TriedReplicas,
}

impl<'a> Search<'a> {
    pub fn new(placer: &'a Placer, route: &'a SiteRoute, head: &'a RequestHead) -> Self {
        let hop = PeerForward::new(placer, route, head);
        Self { placer, route, head, hop, budget: SearchBudget::default(), tried: TriedReplicas::new() }
    }

    /// Goes after the site until the request may be served here or was answered elsewhere.
    ///
    /// # Errors
    /// If no node can serve it, or it must not be sent again.
    pub async fn run(
        mut self,
        keep: &mut ReplayBody,
        context: &mut RequestContext,
    ) -> Result<PlacementFinding, Refusal> {
        let mut state = SearchState::Locate;
        loop {
            state = match state {
                SearchState::Locate => self.locate(),
                SearchState::ServeHere { epoch, is_one_of_many } => {
                    self.serve_here(epoch, is_one_of_many, context).await?
                }
                SearchState::Forward { record, epoch, is_one_of_many } => {
                    self.forward((record, epoch), is_one_of_many, keep, context).await?
                }
                SearchState::Relocate(relocation) => self.relocate(relocation, context).await?,
                SearchState::Done(found) => return Ok(found),
            };
        }
    }

    fn site(&self) -> &'a SiteName {
        &self.route.site.name
    }

    /// Counts the request for this node, where several have the site.
    fn count(&self, node: &NodeName, is_one_of_many: bool) -> Option<InFlightGuard> {
        is_one_of_many.then(|| InFlightGuard::begin(&self.placer.cluster.replica_picker, self.site(), node))
    }

    async fn serve_here(
        &self,
        epoch: u64,
        is_one_of_many: bool,
        context: &mut RequestContext,
    ) -> Result<SearchState, Refusal> {
        let cluster = &self.placer.cluster;
        if cluster.is_leaving(self.site()) {
            wait_for_move(cluster, self.site(), context).await?;
            return Ok(SearchState::Locate);
        }
        if !cluster.lease.holds() && !wait_for_lease(cluster, context).await? {
            return Ok(SearchState::Locate);
        }
        let member = cluster.member();
        let way = member.and_then(|member| self.count(&member.node, is_one_of_many));
        Ok(SearchState::Done(PlacementFinding::Here(ServingEpoch::new(cluster, self.site(), epoch, way))))
    }

    async fn forward(
        &mut self,
        (record, epoch): (Arc<NodeRecord>, u64),
        is_one_of_many: bool,
        keep: &mut ReplayBody,
        context: &mut RequestContext,
    ) -> Result<SearchState, Refusal> {
        let began = Instant::now();
        let _way = self.count(&record.name, is_one_of_many);
        let why = match self.hop.send(&record, epoch, keep, context).await {
            Ok(response) => return Ok(SearchState::Done(PlacementFinding::Answered(response))),
            Err(lost) => self.check_lost(lost, keep, &record.name, &context.retries)?,
        };
        if matches!(why, peer_forward::FailureKind::Broken) && self.budget.resends < RESENDS_MAX {
            self.budget.resends += 1;
            return Ok(SearchState::Locate);
        }
        let cluster = &self.placer.cluster;
        let seen = cluster.table.read(|table| cluster.placement(table, self.site().as_str()));
        let part = seen.as_ref().and_then(|seen| seen.part(&record.name)).map(|part| part.epoch);
        if part != Some(epoch) && seen.is_some() && self.budget.strays < STRAYS_MAX {
            // The site has moved during the check.
            self.budget.strays += 1;
            return Ok(SearchState::Locate);
        }
        self.tried.push((record.name.clone(), epoch));
        // The connection to the next node may be stale as well.
        self.budget.resends = 0;
        if self.stand_in(seen.as_ref(), why, began.elapsed()) {
            return Ok(SearchState::Locate);
        }
        let (lost, why) = (Some(record.name.clone()), why.as_record());
        Ok(SearchState::Relocate(PlaceSearch { seen, lost, why, detect: began.elapsed() }))
    }

    async fn relocate(
        &mut self,
        relocation: PlaceSearch,
        context: &mut RequestContext,
    ) -> Result<SearchState, Refusal> {
        self.tried.clear();
        match AskStep::after(context.relocations() + self.budget.returns, self.budget.pauses) {
            AskStep::Ask => {}
            AskStep::Pause(pause) => {
                self.budget.pauses += 1;
                wait_for_placement(&self.placer.cluster, pause, context).await;
                return Ok(SearchState::Locate);
            }
            AskStep::GiveUp => return Err(Refusal::MovedTooOften("no node that was found served it")),
        }
        let relocated = find_place(self.placer, self.route, relocation, context).await;
        if !relocated.map_err(|refusal| come_back(refusal, &self.placer.cluster, self.site(), self.head))? {
            self.budget.returns += 1;
        }
        Ok(SearchState::Locate)
    }

    /// Where the site is to be served, as far as is known here.
    fn locate(&self) -> SearchState {
        let cluster = &self.placer.cluster;
        let (site, tried) = (self.site(), &self.tried);
        let relocate =
            |seen, lost, why| SearchState::Relocate(PlaceSearch { seen, lost, why, detect: Duration::ZERO });
        let member = cluster.member();
        let me = member.as_ref().map(|member| &member.node);
        cluster.table.read(|table| {
            let Some(placement) = cluster.placement(table, site.as_str()) else {
                return relocate(None, None, PlacementReason::First);
            };
            let is_one_of_many = !placement.copies.is_empty();
            let part = if is_one_of_many {
                choose_replica(cluster, table, &placement, me, self.head, tried)
            } else {
                Some((&placement.node, placement.first_epoch()))
            };
            let Some((name, epoch)) = part.filter(|(name, epoch)| !was_tried(tried, name, *epoch)) else {
                let lost = tried.last().map(|(node, _)| node.clone());
                let why = if lost.is_some() { PlacementReason::Silent } else { PlacementReason::Draining };
                return relocate(Some(placement), lost, why);
            };
            if me == Some(name) {
                return SearchState::ServeHere { epoch, is_one_of_many };
            }
            match table.node(name.as_str()) {
                Some(record) => SearchState::Forward { record, epoch, is_one_of_many },
                None => {
                    let lost = Some(name.clone());
                    relocate(Some(placement), lost, PlacementReason::Draining)
                }
            }
        })
    }

    /// Returns why the request may go elsewhere, or the refusal if it may not.
    fn check_lost(
        &self,
        lost: ForwardFailure,
        keep: &ReplayBody,
        node: &NodeName,
        retries: &RetryBudget,
    ) -> Result<peer_forward::FailureKind, Refusal> {
        let why = lost.why.ok_or(lost.refusal)?;
        check_retry(self.head, lost.handed, keep, node, retries).map(|()| why)
    }

    /// Returns whether another node has the site, too, after the last node tried did not serve it.
    /// Then the request goes there, and the failed node is taken out meanwhile.
    fn stand_in(&self, seen: Option<&Placement>, why: peer_forward::FailureKind, probe: Duration) -> bool {
        let (Some((lost, _)), Some(seen)) = (self.tried.last().cloned(), seen) else { return false };
        if matches!(self.locate(), SearchState::Relocate(_)) {
            return false;
        }
        self.placer.cluster.replica_picker.eject(&lost);
        if !matches!(why, peer_forward::FailureKind::NotThere) {
            let cluster = Arc::clone(&self.placer.cluster);
            let (site, seen) = (self.site().clone(), seen.epoch);
            spawn_local(async move {
                let asked = cluster
                    .placement_client
                    .ask(&site, Some(seen), why.as_record(), Some(&lost), probe)
                    .await;
                if let Ok((PlaceReply::At { placement, .. }, _)) = asked {
                    cluster.placed(placement);
                }
            });
        }
        true
    }
}

fn was_tried(tried: &TriedReplicas, node: &NodeName, epoch: u64) -> bool {
    tried.iter().any(|(name, of)| name == node && *of == epoch)
}

/// Chooses the node for this request among several. Nodes that can answer at once go first.
fn choose_replica<'a>(
    cluster: &EdgeCluster,
    table: &RecordIndex,
    placement: &'a Placement,
    me: Option<&NodeName>,
    head: &RequestHead,
    tried: &TriedReplicas,
) -> Option<(&'a NodeName, u64)> {
    let site = &placement.site;
    let is_fit = |part: &Replica<'_>| {
        let can = if me == Some(part.node) {
            cluster.lease.holds() && !cluster.is_leaving(site)
        } else {
            !cluster.replica_picker.is_ejected(part.node)
        };
        part.ready && can
    };
    let is_member = |part: &Replica<'_>| me == Some(part.node) || table.node(part.node.as_str()).is_some();
    let open = placement.parts().filter(|part| !was_tried(tried, part.node, part.epoch) && is_member(part));
    let (fit, rest): (Vec<_>, Vec<_>) = open.partition(is_fit);
    let parts = if fit.is_empty() { rest } else { fit };
    let load = |part: &Replica<'_>| replica_picker::ReplicaLoad {
        is_here: me == Some(part.node),
        under_way: cluster.replica_picker.under_way(site, part.node),
    };
    let loads: Vec<_> = parts.iter().map(load).collect();
    // The id of a request is random.
    let chosen = (!loads.is_empty()).then(|| replica_picker::choose(&loads, head.id.0 as u64))?;
    parts.get(chosen).map(|part| (part.node, part.epoch))
}

/// Allows one more attempt, after `node` was lost or the site left it.
pub fn check_retry(
    head: &RequestHead,
    handed: bool,
    keep: &ReplayBody,
    node: &NodeName,
    retries: &RetryBudget,
) -> Result<(), Refusal> {
    match may_repeat(&head.method, handed, keep.is_whole()) {
        // A request that reached nobody does not count as an attempt.
        RepeatSafety::Yes if !handed || retries.take() => Ok(()),
        RepeatSafety::Yes => Err(Refusal::MovedTooOften("it was sent as often as one request may be")),
        RepeatSafety::No(reason) => Err(Refusal::MayBeDone { node: node.clone(), reason }),
    }
}

/// Waits until a site that is about to move has moved, or stays after all.
pub async fn wait_for_move(
    cluster: &EdgeCluster,
    site: &SiteName,
    context: &mut RequestContext,
) -> Result<(), Refusal> {
    let began = Instant::now();
    let mut moves = cluster.follow_moves();
    let left = async { while cluster.is_leaving(site) && moves.changed().await.is_ok() {} };
    let is_over = timeout(LEAVE_MAX, left).await.is_ok();
    context.record_mut().add_held(began.elapsed());
    if is_over { Ok(()) } else { Err(Refusal::Fenced) }
}

/// Waits for so long, or until the records show another placement of some site.
async fn wait_for_placement(cluster: &EdgeCluster, pause: Duration, context: &mut RequestContext) {
    let began = Instant::now();
    let mut moves = cluster.follow_moves();
    let _ = timeout(pause, moves.changed()).await;
    context.record_mut().add_held(began.elapsed());
}

/// Waits while the node has the site but no lease. Returns true once the lease is back, false if
/// the site has moved.
async fn wait_for_lease(cluster: &EdgeCluster, context: &mut RequestContext) -> Result<bool, Refusal> {
    let began = Instant::now();
    let mut moves = cluster.follow_moves();
    let regained = tokio::select! {
        regained = cluster.lease.regained(HOLD_MAX.saturating_sub(context.record().held())) => Some(regained),
        _ = moves.changed() => None,
    };
    context.record_mut().add_held(began.elapsed());
    match regained {
        Some(false) => Err(Refusal::Fenced),
        Some(true) => Ok(true),
        None => Ok(cluster.lease.holds()),
    }
}

/// Asks the supervisor for another node for the site. Returns false if there is none, and the
/// node that did not answer is alive after all.
async fn find_place(
    placer: &Placer,
    route: &SiteRoute,
    PlaceSearch { seen, lost, why, detect }: PlaceSearch,
    context: &mut RequestContext,
) -> Result<bool, Refusal> {
    let cluster = &placer.cluster;
    let began = Instant::now();
    let predicted = context.waits_for_place(|| PlacementWait::begin(cluster, &route.site.name));
    let epoch = seen.as_ref().map(|seen| seen.epoch);
    let placed = cluster.placement_client.ask(&route.site.name, epoch, why, lost.as_ref(), detect).await;
    let (placed, _) = placed.map_err(|why| Refusal::Unplaced { why, later: RetryHint::default() })?;
    match placed {
        PlaceReply::At { placement, .. } if lost.is_some() && Some(placement.epoch) == epoch => Ok(false),
        PlaceReply::At { placement, decide_us, store_us } => {
            if epoch.is_some_and(|epoch| placement.epoch <= epoch) {
                return Err(nowhere("no other node was found".into(), Code(461)));
            }
            let relocated = Relocation {
                why,
                from: lost.or_else(|| seen.map(|seen| seen.node)),
                to: placement.node.clone(),
                epoch: placement.epoch,
                detect,
                decide: Duration::from_micros(decide_us),
                store: Duration::from_micros(store_us),
                asked: began.elapsed(),
                predicted,
            };
            placer.metrics.relocated(&relocated);
            context.record_mut().details().relocated.push(relocated);
            cluster.placed(placement);
            Ok(true)
        }
        PlaceReply::Nowhere { reason, code } => {
            let number = code.strip_prefix("NGY").and_then(|code| code.parse().ok());
            Err(nowhere(reason, number.map_or(Code(461), Code)))
        }
    }
}

fn nowhere(reason: String, code: Code) -> Refusal {
    Refusal::Nowhere { reason, code, later: RetryHint::default() }
}

/// Adds the time to come back to a refusal, if it is one of a place.
fn come_back(mut refusal: Refusal, cluster: &EdgeCluster, site: &SiteName, head: &RequestHead) -> Refusal {
    let code = refusal.row().code;
    if let Refusal::Nowhere { later, .. } | Refusal::Unplaced { later, .. } = &mut refusal {
        let predicted = wait_estimate::predicted(cluster, site);
        let retry_after_seconds = deferral::seconds(predicted);
        let notice = deferral::unplaced(head, code, retry_after_seconds, predicted).map(Box::new);
        *later = RetryHint { retry_after_seconds, notice };
    }
    refusal
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_and_each_is_followed_by_one_ask() {
        let (mut asks, mut pauses) = (0, Vec::new());
        loop {
            match AskStep::after(asks, pauses.len()) {
                AskStep::Ask => asks += 1,
                AskStep::Pause(pause) => pauses.push((asks, pause.as_millis())),
                AskStep::GiveUp => break,
            }
        }
        assert_eq!(asks, 7);
        assert_eq!(pauses, [(3, 250), (4, 500), (5, 1000), (6, 2000)]);
    }
}
