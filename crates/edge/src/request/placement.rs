//! Finds the node that runs the site's application, and forwards the request to it.
//!
//! Only sites with an application are placed, and only in a cluster. Every other request passes
//! with one look. A request for a site placed here goes on here, while this node may run the site.
//! A request for a site placed elsewhere is sent there, one hop, and its answer comes back
//! (`search`, `peer_forward`). It is sent a second time only if that can do no harm
//! (`idempotence`). No part of an answer may have been passed on (`response_buffer`).
//!
//! Not here: connections to other nodes (`peers`), whether they are alive (`peers::probe`),
//! choosing a new node (the supervisor).

pub mod idempotence;
pub mod peer_forward;
pub mod placer;
pub mod replay_body;
pub mod response_buffer;
pub mod search;

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nagaya_records::{Backend, Site};
use tokio::time::timeout;

use crate::backends::instances::InstanceTable;
use crate::backends::lookup::HandlerLookup;
use crate::cluster::membership::EdgeCluster;
use crate::cluster::serving_epoch::{HOLD_MAX, ServingEpoch};
use crate::http::message::{Request, Response};
use crate::http::peer_meta::PeerRequestMeta;
use crate::http::refusal::Refusal;
use crate::http::route::SiteRoute;
use crate::http::serving;
use crate::request::backend_step;
use crate::request::context::RequestContext;
use crate::request::placement::idempotence::{RepeatSafety, may_repeat};
use crate::request::placement::placer::Placer;
use crate::request::placement::replay_body::ReplayBody;
use crate::request::placement::search::{ASKS_AT_ONCE, PlacementFinding, Search, check_retry, wait_for_move};
use crate::request::services::Services;

/// Like `HOLD_MAX`, for a request that another node has forwarded. That node can find the site
/// another place, so the wait is short.
const HOLD_FORWARDED_MAX: Duration = Duration::from_millis(250);

/// Maximum time until the records here show a placement that another node knows.
pub const CATCH_UP_MAX: Duration = Duration::from_millis(500);

/// Where a request continues.
pub enum Routed {
    /// `serving` is its right to be served here; `None` if its site is not placed.
    Here {
        request: Request,
        serving: Option<ServingEpoch>,
    },
    Answered(Response),
}

/// Finds the node for the request. The request continues here, or another node has answered it.
pub async fn arrive(
    placer: &Placer,
    route: &SiteRoute,
    request: Request,
    context: &mut RequestContext,
) -> Result<Routed, Refusal> {
    if !placer.cluster.is_member() || !is_placed(&route.site) {
        if request.head.conn.carried.is_some() {
            return Err(Refusal::OtherSite);
        }
        return Ok(Routed::Here { request, serving: None });
    }
    serving::need_client();
    // Boxed, or its state would be part of every request's.
    let conn = Rc::clone(&request.head.conn);
    match &conn.carried {
        Some(carried) => {
            let serving = Box::pin(receive(placer, route, carried, context)).await?;
            Ok(Routed::Here { request, serving: Some(serving) })
        }
        None => Box::pin(find(placer, route, request, context)).await,
    }
}

fn is_placed(site: &Site) -> bool {
    matches!(site.backend, Backend::App(_))
}

async fn find(
    placer: &Placer,
    route: &SiteRoute,
    request: Request,
    context: &mut RequestContext,
) -> Result<Routed, Refusal> {
    let Request { head, body } = request;
    let mut keep = ReplayBody::new(body);
    let found = Search::new(placer, route, &head).run(&mut keep, context).await?;
    Ok(match found {
        PlacementFinding::Answered(response) => Routed::Answered(response),
        PlacementFinding::Here(serving) => {
            let request = Request { head, body: keep.into_body() };
            Routed::Here { request, serving: Some(serving) }
        }
    })
}

/// Lets the application here answer. If its site moves before that, the answer is void. Then the
/// request follows the site.
pub async fn answer(
    services: &Services,
    route: &SiteRoute,
    request: Request,
    lookup: HandlerLookup,
    context: &mut RequestContext,
) -> Result<Response, Refusal> {
    if context.serving.is_none() {
        return backend_step::run(services, route, request, lookup, context).await;
    }
    services.placer.metrics.stayed_here();
    Box::pin(watched(services, route, request, lookup, context)).await
}

// === Sent here by another node ===

/// Waits until this node's records contain the placement by which another node forwarded a
/// request. The record of the site is older, so it is there, too. After the wait the records
/// count as they are.
pub async fn catch_up(cluster: &EdgeCluster, carried: &PeerRequestMeta) {
    let Some(member) = cluster.member() else { return };
    let site = carried.site.as_str();
    let is_behind = || {
        let standing = cluster.table.read(|table| cluster.standing(table, site, &member.node));
        standing.is_none_or(|standing| standing.newest < carried.epoch)
    };
    if !is_behind() {
        return;
    }
    let mut moves = cluster.follow_moves();
    let caught_up = async { while is_behind() && moves.changed().await.is_ok() {} };
    let left = carried.deadline.saturating_duration_since(Instant::now());
    let _ = timeout(CATCH_UP_MAX.min(left), caught_up).await;
}

/// Returns the right to be served here for a request that another node has sent. It goes nowhere
/// else.
async fn receive(
    placer: &Placer,
    route: &SiteRoute,
    carried: &PeerRequestMeta,
    context: &mut RequestContext,
) -> Result<ServingEpoch, Refusal> {
    let cluster = &placer.cluster;
    if carried.site != route.site.name {
        return Err(Refusal::OtherSite);
    }
    let member = cluster.member();
    // Returns the epoch under which this node has the site, if it does, and whether others have
    // it, too.
    let known = || {
        let standing = member.as_ref().and_then(|member| {
            cluster.table.read(|table| cluster.standing(table, carried.site.as_str(), &member.node))
        });
        let newest = standing.map_or(0, |standing| standing.newest);
        let here = standing.and_then(|standing| Some((standing.epoch?, standing.has_copies)));
        here.filter(|(epoch, _)| *epoch >= carried.epoch)
            .ok_or(Refusal::NotPlacedHere { epoch: newest, tries: 0 })
    };
    let (mut epoch, is_one_of_many) = known()?;
    if cluster.is_leaving(&route.site.name) {
        if is_one_of_many {
            return Err(Refusal::NotPlacedHere { epoch, tries: 0 });
        }
        wait_for_move(cluster, &route.site.name, context).await?;
        // Usually the site has moved by now. The node that forwarded the request finds out where.
        epoch = known()?.0;
    }
    let left = carried.deadline.saturating_duration_since(Instant::now());
    if !cluster.lease.regained(HOLD_FORWARDED_MAX.min(left)).await {
        return Err(Refusal::FencedHere { tries: 0 });
    }
    Ok(ServingEpoch::new(cluster, &route.site.name, epoch, None))
}

/// Ends this thread's use of instances whose sites are about to move. Each ends with its last
/// request, so that waiting requests wait for nothing else.
pub async fn give_up_leaving(cluster: Arc<EdgeCluster>, instances: Rc<InstanceTable>) {
    let mut moves = cluster.follow_moves();
    while moves.changed().await.is_ok() {
        if cluster.is_any_leaving() {
            instances.give_up(|site| cluster.is_leaving(site));
        }
    }
}

// === Served here ===

async fn watched(
    services: &Services,
    route: &SiteRoute,
    request: Request,
    mut lookup: HandlerLookup,
    context: &mut RequestContext,
) -> Result<Response, Refusal> {
    if request.head.conn.carried.is_some() {
        return once(services, route, request, lookup, context).await;
    }
    let Request { head, body } = request;
    let mut keep = ReplayBody::new(body);
    for _ in 0..=ASKS_AT_ONCE {
        let Some(serving) = context.serving.clone() else {
            return Err(Refusal::Fenced);
        };
        let request = Request { head: head.clone(), body: keep.body() };
        // Another attempt makes a look-up of its own.
        let begun = (request, std::mem::take(&mut lookup));
        match attempt(services, route, begun, context, &serving, HOLD_MAX).await? {
            LocalAttempt::Answered(response) => return Ok(response),
            LocalAttempt::Moved => {}
            LocalAttempt::Fenced => return Err(Refusal::Fenced),
        }
        check_retry(&head, serving.was_handed(), &keep, &serving.node(), &context.retries)?;
        match Search::new(&services.placer, route, &head).run(&mut keep, context).await? {
            PlacementFinding::Answered(response) => return Ok(response),
            PlacementFinding::Here(serving) => context.serving = Some(serving),
        }
    }
    Err(Refusal::MovedTooOften("its site left the node each time"))
}

/// Makes the only attempt of a forwarded request. So nothing of it is kept for a second one.
async fn once(
    services: &Services,
    route: &SiteRoute,
    request: Request,
    lookup: HandlerLookup,
    context: &mut RequestContext,
) -> Result<Response, Refusal> {
    let Some(serving) = context.serving.clone() else {
        return Err(Refusal::Fenced);
    };
    let method = request.head.method.clone();
    // If the request cannot be sent again, it is best served by waiting for this node's lease.
    let patience = match may_repeat(&method, true, true) {
        RepeatSafety::Yes => HOLD_FORWARDED_MAX,
        RepeatSafety::No(_) => HOLD_MAX,
    };
    let attempt = attempt(services, route, (request, lookup), context, &serving, patience).await?;
    // The forwarding node finds out where the site is now, if the request may be sent again.
    let handed = serving.was_handed();
    let tries = if handed { 1 + context.retries.used() } else { 0 };
    Err(match (attempt, may_repeat(&method, handed, true)) {
        (LocalAttempt::Answered(response), _) => return Ok(response),
        (LocalAttempt::Moved, RepeatSafety::Yes) => Refusal::NotPlacedHere { epoch: serving.newest(), tries },
        (LocalAttempt::Fenced, RepeatSafety::Yes) => Refusal::FencedHere { tries },
        (_, RepeatSafety::No(reason)) => Refusal::MayBeDone { node: serving.node(), reason },
    })
}

/// Outcome of an attempt by the application here.
enum LocalAttempt {
    Answered(Response),
    /// The site moved before the answer, or the answer is void.
    Moved,
    /// This node has lost its lease. It may be the last to learn where the site is now.
    Fenced,
}

/// Lets the application answer while this node holds its lease. `patience` is the time for which
/// the attempt may go on without one.
async fn attempt(
    services: &Services,
    route: &SiteRoute,
    (request, lookup): (Request, HandlerLookup),
    context: &mut RequestContext,
    serving: &ServingEpoch,
    patience: Duration,
) -> Result<LocalAttempt, Refusal> {
    let answered = tokio::select! {
        biased;
        answered = backend_step::run(services, route, request, lookup, context) => answered,
        () = serving.ended() => Err(Refusal::Moved),
        () = serving.barred(patience) => Err(Refusal::Fenced),
    };
    let attempt = match answered {
        Ok(response) => match serving.confirmed(patience).await {
            Ok(true) => return Ok(LocalAttempt::Answered(response)),
            Ok(false) => LocalAttempt::Moved,
            Err(_fenced) => LocalAttempt::Fenced,
        },
        Err(Refusal::Moved) => LocalAttempt::Moved,
        Err(_) if !serving.is_current() => LocalAttempt::Moved,
        Err(Refusal::Fenced) => LocalAttempt::Fenced,
        Err(refusal) => return Err(refusal),
    };
    // Drops the answer, and with it everything it held.
    context.needs_no_instance();
    Ok(attempt)
}
