//! Which node runs the site's application, and the request's way there.
//!
//! Only sites with an application are placed, and only in a cluster: every other request passes with one look. What is placed
//! here goes on here, for as long as this node may run it. What is placed elsewhere is sent there, one hop, and its answer
//! comes back. Where several nodes have it, one is chosen (`spread`), and another one stands in for it. Where that node is
//! silent, refuses, is fenced or has left, the supervisor is asked for another one, and the same request goes there. It is sent
//! a second time only if that can do no harm (`repeat`) and nothing of an answer was passed on (`beginning`).
//!
//! Not here: connections to other nodes (`peers`), whether they are there (`peers::probe`), choosing one (the supervisor).

mod beginning;
mod hop;
mod keep;
mod repeat;
mod retries;
mod spread;
mod stint;
pub mod told;
pub mod wait;

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nagaya_base::Code;
use nagaya_cmdb::feed::Placed;
use nagaya_cmdb::{Backend, NodeName, NodeRecord, Part, Placement, Site, SiteName, Table, Why};
use tokio::task::spawn_local;
use tokio::time::timeout;

use crate::account::Account;
use crate::cluster::Cluster;
use crate::exchange;
use crate::message::{Head, Request, Response};
use crate::node::Node;
use crate::peers::Carried;
use crate::refusal::{Later, Refusal};
use crate::route::Route;
use crate::serving;
use hop::{Hop, Lost};
use keep::Keep;
use repeat::{Repeat, may_repeat};
pub use retries::{RETRIES_MAX, Retries};
pub use spread::Spread;
use spread::Way;
pub use stint::Stint;
pub use told::{Passed, Relocated};
use wait::{Wait, come_back};

/// How often one request may find its site a new node.
pub const RELOCATIONS_MAX: usize = 3;

/// How often a request is sent to the same node again, after a connection to it broke.
const RESENDS_MAX: u32 = 1;

/// So long a request waits for this node's authority to come back, or for its site to be placed elsewhere.
pub const HOLD_MAX: Duration = Duration::from_secs(5);

/// So long a request waits while its site moves away: what runs there may take that long to end.
pub const LEAVE_MAX: Duration = Duration::from_secs(30);

/// The same as `HOLD_MAX` of a request that another node has sent here: it can find the site another place, so it is not held long.
const HOLD_FORWARDED_MAX: Duration = Duration::from_millis(250);

/// So long the records may take to say what another node knows already.
pub const CATCH_UP_MAX: Duration = Duration::from_millis(500);

/// Where a request goes on.
pub enum Arrival {
    Here(Request),
    Answered(Response),
}

/// Finds the node for the request. It goes on here, or has been answered elsewhere.
pub async fn arrive(
    node: &Node,
    route: &Route,
    request: Request,
    account: &mut Account,
) -> Result<Arrival, Refusal> {
    if !node.shared.cluster.is_member() || !is_placed(&route.site) {
        if request.head.conn.carried.is_some() {
            return Err(Refusal::OtherSite);
        }
        return Ok(Arrival::Here(request));
    }
    serving::need_client();
    // Boxed, or its state would be part of every request's.
    let conn = Rc::clone(&request.head.conn);
    match &conn.carried {
        Some(carried) => {
            Box::pin(receive(node, route, carried, account)).await.map(|()| Arrival::Here(request))
        }
        None => Box::pin(find(node, route, request, account)).await,
    }
}

fn is_placed(site: &Site) -> bool {
    matches!(site.backend, Backend::App(_))
}

/// Lets the application here answer. If its site has moved before it has, what it says is nobody's answer, and the request
/// goes where the site is now.
pub async fn answer(
    node: &Node,
    route: &Route,
    request: Request,
    account: &mut Account,
) -> Result<Response, Refusal> {
    if account.stint().is_none() {
        return exchange::run(node, route, request, account).await;
    }
    node.shared.metrics.stayed_here();
    Box::pin(watched(node, route, request, account)).await
}

// === Where ===

/// Where a site is to be served, as far as is known here.
#[derive(Debug)]
enum Where {
    Here {
        epoch: u64,
        /// Others could do it, too.
        is_one_of_many: bool,
    },
    There {
        record: Arc<NodeRecord>,
        epoch: u64,
        is_one_of_many: bool,
    },
    /// None of its places does, or it has none.
    Ask {
        seen: Option<Placement>,
        lost: Option<NodeName>,
        why: Why,
    },
}

/// Parts of a placement under which this request was not served.
type Tried = Vec<(NodeName, u64)>;

fn look(node: &Node, site: &SiteName, head: &Head, tried: &Tried) -> Where {
    let cluster = &node.shared.cluster;
    let member = cluster.member();
    let me = member.as_ref().map(|member| &member.node);
    node.shared.with_table(|table| {
        let Some(placement) = cluster.placement(table, site.as_str()) else {
            return Where::Ask { seen: None, lost: None, why: Why::First };
        };
        let is_one_of_many = !placement.copies.is_empty();
        let part = match is_one_of_many {
            false => Some((&placement.node, placement.first_epoch())),
            true => among(cluster, table, &placement, me, head, tried),
        };
        let Some((name, epoch)) = part.filter(|(name, epoch)| !has(tried, name, *epoch)) else {
            let lost = tried.last().map(|(node, _)| node.clone());
            let why = if lost.is_some() { Why::Silent } else { Why::Draining };
            return Where::Ask { seen: Some(placement), lost, why };
        };
        if me == Some(name) {
            return Where::Here { epoch, is_one_of_many };
        }
        match table.node(name.as_str()) {
            Some(record) => Where::There { record, epoch, is_one_of_many },
            None => {
                let lost = Some(name.clone());
                Where::Ask { seen: Some(placement), lost, why: Why::Draining }
            }
        }
    })
}

fn has(tried: &Tried, node: &NodeName, epoch: u64) -> bool {
    tried.iter().any(|(name, of)| name == node && *of == epoch)
}

/// Of several nodes the one that gets this request: of those that can answer at once, if there are any.
fn among<'a>(
    cluster: &Cluster,
    table: &Table,
    placement: &'a Placement,
    me: Option<&NodeName>,
    head: &Head,
    tried: &Tried,
) -> Option<(&'a NodeName, u64)> {
    let site = &placement.site;
    let is_fit = |part: &Part<'_>| {
        let can = match me == Some(part.node) {
            true => cluster.tenure.holds() && !cluster.is_leaving(site),
            false => !cluster.spread.is_shunned(part.node),
        };
        part.ready && can
    };
    let is_member = |part: &Part<'_>| me == Some(part.node) || table.node(part.node.as_str()).is_some();
    let open = placement.parts().filter(|part| !has(tried, part.node, part.epoch) && is_member(part));
    let (fit, rest): (Vec<_>, Vec<_>) = open.partition(is_fit);
    let parts = if fit.is_empty() { rest } else { fit };
    let load = |part: &Part<'_>| spread::Load {
        is_here: me == Some(part.node),
        under_way: cluster.spread.under_way(site, part.node),
    };
    let loads: Vec<_> = parts.iter().map(load).collect();
    // A request's number is random.
    let chosen = (!loads.is_empty()).then(|| spread::choose(&loads, head.id.0 as u64))?;
    parts.get(chosen).map(|part| (part.node, part.epoch))
}

// === Sent here by another node ===

/// Waits until this node's copy of the records has the placement by which another node has sent a request here, and with it the
/// site, which is older. What has not come then is looked at as it is.
pub async fn catch_up(node: &Node, carried: &Carried) {
    let cluster = &node.shared.cluster;
    let Some(member) = cluster.member() else { return };
    let site = carried.site.as_str();
    let is_behind = || {
        let standing = node.shared.with_table(|table| cluster.standing(table, site, &member.node));
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

/// Whether this request, which another node has sent here, may be served here. It goes nowhere else.
async fn receive(
    node: &Node,
    route: &Route,
    carried: &Carried,
    account: &mut Account,
) -> Result<(), Refusal> {
    let cluster = &node.shared.cluster;
    if carried.site != route.site.name {
        return Err(Refusal::OtherSite);
    }
    let member = cluster.member();
    // Under which epoch this node has it, if it does, and whether others do, too.
    let known = || {
        let standing = member.as_ref().and_then(|member| {
            node.shared.with_table(|table| cluster.standing(table, carried.site.as_str(), &member.node))
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
        leaves(cluster, &route.site.name, account).await?;
        // Mostly it has moved now, and whoever sent this finds out where.
        epoch = known()?.0;
    }
    let left = carried.deadline.saturating_duration_since(Instant::now());
    if !cluster.tenure.regained(HOLD_FORWARDED_MAX.min(left)).await {
        return Err(Refusal::FencedHere { tries: 0 });
    }
    account.stay_here(Stint::new(&node.shared, &route.site.name, epoch, None));
    Ok(())
}

// === From a client ===

async fn find(
    node: &Node,
    route: &Route,
    request: Request,
    account: &mut Account,
) -> Result<Arrival, Refusal> {
    let Request { head, body } = request;
    let mut keep = Keep::new(body);
    let step = seek(node, route, &head, &mut keep, account).await?;
    Ok(match step {
        Some(response) => Arrival::Answered(response),
        None => Arrival::Here(Request { head, body: keep.into_body() }),
    })
}

/// Goes after the site until it is here (none) or the request was answered elsewhere.
async fn seek(
    node: &Node,
    route: &Route,
    head: &Head,
    keep: &mut Keep,
    account: &mut Account,
) -> Result<Option<Response>, Refusal> {
    let site = &route.site.name;
    let cluster = &node.shared.cluster;
    let hop = Hop::new(node, route, head);
    let (mut resends, mut strays, mut returns) = (0, 0, 0);
    let mut tried = Tried::new();
    let way =
        |to: &NodeName, is_one_of_many: bool| is_one_of_many.then(|| Way::begin(&node.shared, site, to));
    loop {
        let (seen, lost, why, detect) = match look(node, site, head, &tried) {
            Where::Here { .. } if cluster.is_leaving(site) => {
                leaves(cluster, site, account).await?;
                continue;
            }
            Where::Here { epoch, is_one_of_many } => {
                if cluster.tenure.holds() || held(cluster, account).await? {
                    let me = cluster.member().map(|member| member.node.clone());
                    let way = me.and_then(|me| way(&me, is_one_of_many));
                    account.stay_here(Stint::new(&node.shared, site, epoch, way));
                    return Ok(None);
                }
                continue;
            }
            Where::There { record, epoch, is_one_of_many } => {
                let began = Instant::now();
                let _way = way(&record.name, is_one_of_many);
                let why = match hop.send(&record, epoch, keep, account).await {
                    Ok(response) => return Ok(Some(response)),
                    Err(lost) => may_go_on(lost, head, keep, &record.name, account.retries())?,
                };
                if matches!(why, hop::Why::Broken) && resends < RESENDS_MAX {
                    resends += 1;
                    continue;
                }
                let seen = node.shared.with_table(|table| cluster.placement(table, site.as_str()));
                let part = seen.as_ref().and_then(|seen| seen.part(&record.name)).map(|part| part.epoch);
                if part != Some(epoch) && seen.is_some() && strays < RELOCATIONS_MAX {
                    // It has moved while this was found out.
                    strays += 1;
                    continue;
                }
                tried.push((record.name.clone(), epoch));
                // The next node's connection may have gone stale just the same.
                resends = 0;
                if stands_in(node, site, head, &tried, seen.as_ref(), why, began.elapsed()) {
                    continue;
                }
                (seen, Some(record.name.clone()), why.as_record(), began.elapsed())
            }
            Where::Ask { seen, lost, why } => (seen, lost, why, Duration::ZERO),
        };
        tried.clear();
        let relocated = relocate(node, route, seen, lost, why, detect, account).await;
        if !relocated.map_err(|refusal| come_back(refusal, &node.shared, site, head))? {
            returns += 1;
            if returns > RELOCATIONS_MAX {
                return Err(Refusal::MovedTooOften);
            }
        }
    }
}

/// Why the request may go elsewhere, if it may.
fn may_go_on(
    lost: Lost,
    head: &Head,
    keep: &Keep,
    node: &NodeName,
    retries: &Retries,
) -> Result<hop::Why, Refusal> {
    let why = lost.why.ok_or(lost.refusal)?;
    again(head, lost.handed, keep, node, retries).map(|()| why)
}

/// Lets the request be sent once more, after `node` was lost or the site left it.
fn again(head: &Head, handed: bool, keep: &Keep, node: &NodeName, retries: &Retries) -> Result<(), Refusal> {
    match may_repeat(&head.method, handed, keep.is_whole()) {
        // What reached nobody was not yet tried.
        Repeat::Yes if !handed || retries.take() => Ok(()),
        Repeat::Yes => Err(Refusal::MovedTooOften),
        Repeat::No(reason) => Err(Refusal::MayBeDone { node: node.clone(), reason }),
    }
}

/// Whether another node has the site, too, after the last of these did not serve it. Then the request goes there, and that one
/// is taken out meanwhile.
fn stands_in(
    node: &Node,
    site: &SiteName,
    head: &Head,
    tried: &Tried,
    seen: Option<&Placement>,
    why: hop::Why,
    probe: Duration,
) -> bool {
    let (Some((lost, _)), Some(seen)) = (tried.last().cloned(), seen) else { return false };
    if matches!(look(node, site, head, tried), Where::Ask { .. }) {
        return false;
    }
    node.shared.cluster.spread.shun(&lost);
    if !matches!(why, hop::Why::NotThere) {
        let (shared, site, seen) = (Arc::clone(&node.shared), site.clone(), seen.epoch);
        spawn_local(async move {
            let desk = &shared.cluster.desk;
            let asked = desk.ask(&site, Some(seen), why.as_record(), Some(&lost), probe).await;
            if let Ok((Placed::At { placement, .. }, _)) = asked {
                shared.cluster.placed(placement);
            }
        });
    }
    true
}

/// The site is about to move away: waits until it has, or stays after all.
async fn leaves(cluster: &Cluster, site: &SiteName, account: &mut Account) -> Result<(), Refusal> {
    let began = Instant::now();
    let mut moves = cluster.follow_moves();
    let left = async { while cluster.is_leaving(site) && moves.changed().await.is_ok() {} };
    let is_over = timeout(LEAVE_MAX, left).await.is_ok();
    account.was_held(began.elapsed());
    if is_over { Ok(()) } else { Err(Refusal::Fenced) }
}

/// A thread's instances of sites that are about to move away: what runs there ends as soon as its last request has, so that those
/// who wait for the move wait for nothing else.
pub async fn give_up_leaving(node: Rc<Node>) {
    let cluster = &node.shared.cluster;
    let mut moves = cluster.follow_moves();
    while moves.changed().await.is_ok() {
        if cluster.is_any_leaving() {
            node.instances.give_up(|site| cluster.is_leaving(site));
        }
    }
}

/// Placed here, without authority: waits until it is back (true) or the site has moved (false).
async fn held(cluster: &Cluster, account: &mut Account) -> Result<bool, Refusal> {
    let began = Instant::now();
    let mut moves = cluster.follow_moves();
    let regained = tokio::select! {
        regained = cluster.tenure.regained(HOLD_MAX.saturating_sub(account.held())) => Some(regained),
        _ = moves.changed() => None,
    };
    account.was_held(began.elapsed());
    match regained {
        Some(false) => Err(Refusal::Fenced),
        Some(true) => Ok(true),
        None => Ok(cluster.tenure.holds()),
    }
}

/// Has the supervisor find the site another node than it has. False: there is none, and the one that did not answer is there after all.
async fn relocate(
    node: &Node,
    route: &Route,
    seen: Option<Placement>,
    lost: Option<NodeName>,
    why: Why,
    detect: Duration,
    account: &mut Account,
) -> Result<bool, Refusal> {
    if account.relocations() >= RELOCATIONS_MAX {
        return Err(Refusal::MovedTooOften);
    }
    let cluster = &node.shared.cluster;
    let began = Instant::now();
    let predicted = account.waits_for_place(|| Wait::begin(&node.shared, &route.site.name));
    let epoch = seen.as_ref().map(|seen| seen.epoch);
    let placed = cluster.desk.ask(&route.site.name, epoch, why, lost.as_ref(), detect).await;
    let (placed, _) = placed.map_err(|why| Refusal::Unplaced { why, later: Later::default() })?;
    match placed {
        Placed::At { placement, .. } if lost.is_some() && Some(placement.epoch) == epoch => Ok(false),
        Placed::At { placement, decide_us, store_us } => {
            if epoch.is_some_and(|epoch| placement.epoch <= epoch) {
                return Err(nowhere("no other node was found".into(), Code(461)));
            }
            let relocated = Relocated {
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
            node.shared.metrics.relocated(&relocated);
            account.relocated(relocated);
            cluster.placed(placement);
            Ok(true)
        }
        Placed::Nowhere { reason, code } => {
            let number = code.strip_prefix("NGY").and_then(|code| code.parse().ok());
            Err(nowhere(reason, number.map_or(Code(461), Code)))
        }
    }
}

fn nowhere(reason: String, code: Code) -> Refusal {
    Refusal::Nowhere { reason, code, later: Later::default() }
}

// === Served here ===

async fn watched(
    node: &Node,
    route: &Route,
    request: Request,
    account: &mut Account,
) -> Result<Response, Refusal> {
    if request.head.conn.carried.is_some() {
        return once(node, route, request, account).await;
    }
    let Request { head, body } = request;
    let mut keep = Keep::new(body);
    for _ in 0..=RELOCATIONS_MAX {
        let Some(stint) = account.stint() else {
            return Err(Refusal::Fenced);
        };
        let request = Request { head: head.clone(), body: keep.body() };
        match attempt(node, route, request, account, &stint, HOLD_MAX).await? {
            Attempt::Answered(response) => return Ok(response),
            Attempt::Moved => {}
            Attempt::Fenced => return Err(Refusal::Fenced),
        }
        again(&head, stint.was_handed(), &keep, &stint.node(), account.retries())?;
        if let Some(response) = seek(node, route, &head, &mut keep, account).await? {
            return Ok(response);
        }
    }
    Err(Refusal::MovedTooOften)
}

/// One that another node has sent here has one attempt, so nothing of it is kept for a second one.
async fn once(
    node: &Node,
    route: &Route,
    request: Request,
    account: &mut Account,
) -> Result<Response, Refusal> {
    let Some(stint) = account.stint() else {
        return Err(Refusal::Fenced);
    };
    let method = request.head.method.clone();
    // What cannot be sent again is better off if this node's authority comes back.
    let patience = match may_repeat(&method, true, true) {
        Repeat::Yes => HOLD_FORWARDED_MAX,
        Repeat::No(_) => HOLD_MAX,
    };
    let attempt = attempt(node, route, request, account, &stint, patience).await?;
    // The node in front finds out where it is now, if it may be sent again.
    let handed = stint.was_handed();
    let tries = if handed { 1 + account.retries().used() } else { 0 };
    Err(match (attempt, may_repeat(&method, handed, true)) {
        (Attempt::Answered(response), _) => return Ok(response),
        (Attempt::Moved, Repeat::Yes) => Refusal::NotPlacedHere { epoch: stint.newest(), tries },
        (Attempt::Fenced, Repeat::Yes) => Refusal::FencedHere { tries },
        (_, Repeat::No(reason)) => Refusal::MayBeDone { node: stint.node(), reason },
    })
}

/// What became of a request that the application here was to answer.
enum Attempt {
    Answered(Response),
    /// The site has moved before there was an answer, or what was said is nobody's.
    Moved,
    /// This node has lost its authority. Where the site is now it may be the last to hear.
    Fenced,
}

/// Lets the application answer while this node may run it. `patience`: so long may it do without authority.
async fn attempt(
    node: &Node,
    route: &Route,
    request: Request,
    account: &mut Account,
    stint: &Stint,
    patience: Duration,
) -> Result<Attempt, Refusal> {
    let answered = tokio::select! {
        biased;
        answered = exchange::run(node, route, request, account) => answered,
        () = stint.ended() => Err(Refusal::Moved),
        () = stint.barred(patience) => Err(Refusal::Fenced),
    };
    let attempt = match answered {
        Ok(response) => match stint.confirmed(patience).await {
            Ok(true) => return Ok(Attempt::Answered(response)),
            Ok(false) => Attempt::Moved,
            Err(_fenced) => Attempt::Fenced,
        },
        Err(Refusal::Moved) => Attempt::Moved,
        Err(_) if !stint.is_current() => Attempt::Moved,
        Err(Refusal::Fenced) => Attempt::Fenced,
        Err(refusal) => return Err(refusal),
    };
    // What it said is dropped here, and with it what it held.
    account.needs_no_instance();
    Ok(attempt)
}
