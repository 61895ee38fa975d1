//! The right to run: who gets it now, who waits for it, and who is told when to come back.
//!
//! In reading order: this file (a request's way to its permit), `lanes` (the one machine of all threads), `lent` (how most
//! requests never meet it), `turned` (those that are sent away), `tickets` (what they are given), `store` (where that is
//! kept), `page` and `events` (what people see of it), `held` (bodies that arrive meanwhile), `way` (whose work gives way on
//! the processor). Not here: what is decided (`nagaya_admission`), what lanes there are (records, rules).

mod events;
mod explain;
mod exposition;
mod held;
mod lanes;
mod lent;
mod page;
mod pressure;
mod store;
mod tickets;
mod turned;
mod way;

#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::hash::{BuildHasher, Hash, Hasher};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use foldhash::fast::FixedState;
use http::{HeaderName, HeaderValue};
use nagaya_admission::{Ask, Class, Offer, Pass, Refused, Ticket, Used};
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

pub use self::events::answer as events;
pub use self::explain::row;
pub use self::exposition::text as exposition;
pub use self::held::BYTES_MAX as BODY_HELD_MAX;
pub use self::lanes::{Lane, Lanes};
pub use self::page::BASE_STYLE;
pub use self::tickets::{Mark, Tickets, open, take_away};
pub use self::turned::{Notice, seconds, unplaced, without_ticket};
pub use self::way::keep as keep_way;

use self::held::Held;
use self::lanes::{Entered, Told};
use self::tickets::keep_rest;
use crate::account::Account;
use crate::message::{Head, Request, RequestBody};
use crate::node::Node;
use crate::refusal::Refusal;
use crate::route::Route;
use crate::serving;

/// One in so many requests on lent permits is learned from.
const SAMPLE: u32 = 16;

/// Parts of a path that tell kinds of requests apart.
const CLASS_SEGMENTS: usize = 3;

const X_REQUEST_START: HeaderName = HeaderName::from_static("x-request-start");
const X_QUEUE_START: HeaderName = HeaderName::from_static("x-queue-start");

/// How often the node's work is looked at, where bounds adapt and something runs.
const FELT_EVERY: Duration = Duration::from_millis(100);

/// Shortest time between two ticks: what comes due in it is done together.
const TICK_MIN: Duration = Duration::from_millis(2);

/// What a rule said about a request's turn.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wish {
    /// Goes before who came so many steps earlier.
    pub priority: i8,
    /// It is counted, and never held back.
    pub passes: bool,
}

/// The right to run in a lane, given back when dropped.
pub struct Permit {
    of: Of,
    kind: Kind,
    /// From its permit to its end, once it has ended as it should.
    used: Option<Duration>,
}

/// Whose lane a permit is of. A site's is reached by its route, of which each thread has its own: nothing is counted that
/// other threads count too.
enum Of {
    Site(Rc<Route>),
    Lane(Arc<Lane>),
}

enum Kind {
    /// One of those that were lent to the lane. Some are learned from.
    Lent(Option<Class>),
    Pass(Pass),
}

impl Permit {
    /// One of those lent to the site, if there is one: the way of most requests.
    pub fn of_site(route: &Rc<Route>, class: impl FnOnce() -> Class) -> Option<Self> {
        if !route.lane.enter() {
            return None;
        }
        // Few are learned from: they end sooner than their time could be asked.
        let kind = Kind::Lent(is_sampled().then(class));
        Some(Self { of: Of::Site(Rc::clone(route)), kind, used: None })
    }

    /// One of those lent to the lane, which has been taken.
    fn lent(of: Of) -> Self {
        Self { of, kind: Kind::Lent(None), used: None }
    }

    fn of_pass(lane: &Arc<Lane>, pass: Pass) -> Self {
        Self { of: Of::Lane(Arc::clone(lane)), kind: Kind::Pass(pass), used: None }
    }

    /// Whose it is.
    pub fn lane(&self) -> &Arc<Lane> {
        match &self.of {
            Of::Site(route) => &route.lane,
            Of::Lane(lane) => lane,
        }
    }

    /// Somebody learns from how long it was held.
    pub fn is_timed(&self) -> bool {
        !matches!(self.kind, Kind::Lent(None))
    }

    /// What it was for has ended: after how long, and as it should.
    pub fn ended(&mut self, service: Duration, is_whole: bool) {
        self.used = is_whole.then_some(service);
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let used = Used { service: self.used.unwrap_or_default(), is_whole: self.used.is_some() };
        match self.kind {
            Kind::Lent(class) => {
                self.lane().leave(class.filter(|_| used.is_whole).map(|class| (class, used)))
            }
            Kind::Pass(pass) => {
                if let Some(lanes) = self.lane().lanes() {
                    lanes.release(pass, used);
                }
            }
        }
    }
}

/// Waits for the right to run in `lane`, or in the site's own.
///
/// # Errors
/// If it is turned away: with a ticket, or without.
pub async fn admit(
    node: &Node,
    route: &Rc<Route>,
    lane: Option<Arc<Lane>>,
    wish: Wish,
    request: &mut Request,
    account: &mut Account,
) -> Result<(), Refusal> {
    if lane.is_none()
        && let Some(permit) = Permit::of_site(route, || class_of(&request.head))
    {
        account.admitted(permit, None);
        return Ok(());
    }
    let lane = lane.unwrap_or_else(|| Arc::clone(&route.lane));
    // Boxed, because few come this way and it holds much.
    Box::pin(ask(node, route, lane, wish, request, account)).await
}

async fn ask(
    node: &Node,
    route: &Route,
    lane: Arc<Lane>,
    wish: Wish,
    request: &mut Request,
    account: &mut Account,
) -> Result<(), Refusal> {
    let lanes = &node.shared.lanes;
    let (tickets, mark) = (node.shared.tickets(), node.shared.cluster.ticket_mark());
    let shown = tickets.as_deref().map_or(Ok(None), |tickets| tickets.shown(&lane, &request.head, mark))?;
    if shown.is_none()
        && !wish.passes
        && let Some(permit) = lanes.enter_calm(&lane)
    {
        account.admitted(permit, None);
        return Ok(());
    }
    let may_promise = tickets.is_some() && !page::is_crawler(text(&request.head, &http::header::USER_AGENT));
    let mut ask = Ask {
        class: class_of(&request.head),
        client: Tickets::client_key(node.forwarding.client(&request.head)),
        bytes: request.body.len().unwrap_or(held::BYTES_MAX as u64).min(held::BYTES_MAX as u64),
        priority: wish.priority,
        ticket: shown.as_ref().map(|shown| shown.ticket),
        adopts: shown.as_ref().is_some_and(|shown| shown.is_foreign),
        can_wait: true,
        nonce: may_promise.then(|| tickets::nonce(mark)),
        passes: wish.passes,
    };
    let mut entered = lanes.enter(&lane, ask);
    if let Entered::Turned(Offer::Refused(Refused::Replayed | Refused::Expired), _) = entered
        && shown.as_ref().is_some_and(|shown| shown.cookie.is_some())
    {
        // A cookie that is left over is no offence: its holder comes like anybody else.
        ask.ticket = None;
        entered = lanes.enter(&lane, ask);
    }
    lanes.stirred.notify_one();
    let (permit, predicted) = match entered {
        Entered::Runs(pass) => (Permit::of_pass(&lane, pass), None),
        Entered::Waits(pass, prediction, told) => {
            serving::need_client();
            let ticket = shown.as_ref().map(|shown| &shown.ticket);
            let patience = patience(lanes, &lane, ticket);
            let permit = wait(node, route, &lane, pass, patience, told, request).await?;
            tell_backend(request, account);
            (permit, Some(prediction))
        }
        Entered::Turned(offer, records) => {
            return Err(turned::away(node, route, &lane, offer, records, request).await);
        }
    };
    tickets::used(node, account, shown.as_ref());
    account.admitted(permit, predicted);
    Ok(())
}

/// A place in line, given up when dropped: also when the client leaves.
struct Place<'a> {
    lanes: &'a Lanes,
    pass: Pass,
    is_over: bool,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            self.lanes.cancel(self.pass);
        }
    }
}

/// Waits in line. What the client sends meanwhile is taken in, up to a bound, so that it need not be waited for later.
async fn wait(
    node: &Node,
    route: &Route,
    lane: &Arc<Lane>,
    pass: Pass,
    patience: Duration,
    mut told: oneshot::Receiver<Told>,
    request: &mut Request,
) -> Result<Permit, Refusal> {
    let lanes = &*node.shared.lanes;
    let mut place = Place { lanes, pass, is_over: false };
    let body = std::mem::replace(&mut request.body, RequestBody::empty());
    let mut held = Held::new(body);
    let wait = async {
        tokio::select! {
            biased;
            told = &mut told => return told,
            () = held.fill() => {}
        }
        told.await
    };
    let told = timeout(patience, wait).await;
    request.body = held.into_body();
    match told {
        Ok(Ok(Ok(()))) => {
            place.is_over = true;
            Ok(Permit::of_pass(lane, pass))
        }
        Ok(Ok(Err(why))) => {
            place.is_over = true;
            Err(turned::refused(why, &route.site, &request.head))
        }
        // Its lane is gone with everything.
        Ok(Err(_)) => Err(turned::refused(Refused::NoLane, &route.site, &request.head)),
        Err(_) => Err(turned::too_long(lanes.prediction(pass), &route.site, &request.head)),
    }
}

/// Longest that a request waits here. Whoever holds a ticket stays until well after its slot: its place is worth keeping.
fn patience(lanes: &Lanes, lane: &Lane, ticket: Option<&Ticket>) -> Duration {
    let of_ticket = ticket.map_or(Duration::ZERO, |ticket| {
        let slot = ticket.ends.0.saturating_sub(ticket.begins.0);
        Duration::from_micros(ticket.ends.0.saturating_sub(lanes.now().0).saturating_add(slot))
    });
    lane.patience().max(of_ticket)
}

/// What tools of Ruby, Python and others read the time in line from: microseconds since 1970 at which the request came.
fn tell_backend(request: &mut Request, account: &Account) {
    let came = SystemTime::now() - account.record().begun.elapsed();
    let came = came.duration_since(UNIX_EPOCH).unwrap_or_default().as_micros();
    let value = HeaderValue::try_from(format!("t={came}")).expect("digits are a valid field value");
    request.head.headers.insert(X_REQUEST_START, value.clone());
    request.head.headers.insert(X_QUEUE_START, value);
}

/// Does what time alone brings: slots that begin and end, calls that nobody answered, bounds that adapt. Of one thread, for all.
pub async fn tend(node: Rc<Node>) {
    let lanes = Arc::clone(&node.shared.lanes);
    let mut gauge = pressure::Gauge::new();
    let mut felt = Instant::now();
    if let Some(tickets) = node.shared.tickets() {
        tokio::task::spawn_local(tickets::restore_later(tickets, Arc::clone(&lanes)));
    }
    loop {
        let next = lanes.tick();
        keep_rest(&node);
        if felt.elapsed() >= FELT_EVERY && lanes.any_adapts() {
            felt = Instant::now();
            lanes.feel(gauge.read());
        }
        // Nothing is due, nothing waits: the node sleeps until something does.
        let Some(next) = next else {
            lanes.stirred.notified().await;
            sleep(TICK_MIN).await;
            continue;
        };
        tokio::select! {
            () = sleep(next.max(TICK_MIN)) => {}
            () = lanes.stirred.notified() => sleep(TICK_MIN).await,
        }
    }
}

fn is_sampled() -> bool {
    thread_local! {
        static TURN: Cell<u32> = const { Cell::new(0) };
    }
    TURN.with(|turn| {
        turn.set(turn.get().wrapping_add(1));
        turn.get().is_multiple_of(SAMPLE)
    })
}

/// What is likely to cost the same: whether it changes anything, the beginning of the path without its numbers, and which
/// parameters there are.
fn class_of(head: &Head) -> Class {
    let mut hasher = FixedState::default().build_hasher();
    head.method.is_safe().hash(&mut hasher);
    for segment in head.path.split('/').filter(|segment| !segment.is_empty()).take(CLASS_SEGMENTS) {
        let is_number = segment.bytes().all(|byte| byte.is_ascii_digit());
        hasher.write(if is_number { b"#" } else { segment.as_bytes() });
        hasher.write_u8(b'/');
    }
    for pair in head.query.as_deref().unwrap_or_default().split('&').take(CLASS_SEGMENTS) {
        let name = pair.split_once('=').map_or(pair, |(name, _)| name);
        hasher.write(name.as_bytes());
        hasher.write_u8(b'&');
    }
    #[expect(clippy::cast_possible_truncation, reason = "half of a hash is one too")]
    Class(hasher.finish() as u32)
}

fn text<'a>(head: &'a Head, name: &HeaderName) -> Option<&'a str> {
    head.headers.get(name)?.to_str().ok()
}
