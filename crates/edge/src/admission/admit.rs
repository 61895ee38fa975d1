//! Decides about the right to run. A request gets it now, waits for it, or has to come back later.
//!
//! In reading order:
//! - this file: a request's way to its permit
//! - `lanes`: the one machine of all threads
//! - `lent_permits`: the way by which most requests never meet that machine
//! - `deferral`: the requests that are sent away
//! - `tickets`: the tickets that these get
//! - `store`: the storage of tickets
//! - `guests`, `visits` and `origins`: clients let in before, and scripts of other origins
//! - `page` and `events`: the parts that people see
//! - `buffered_body`: bodies that arrive meanwhile
//! - `cpu_yield`: the work that gives way on the processor
//!
//! Not here: the decisions (`nagaya_admission`), the list of lanes (records, rules).

use std::hash::{BuildHasher, Hash, Hasher};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use foldhash::fast::FixedState;
use http::{HeaderMap, HeaderName, HeaderValue};
use nagaya_admission::{
    AdmissionRefusal, AdmissionRequest, CostClass, Decision, Nonce, Prediction, RequestKey,
};
use nagaya_records::Backend;
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

use crate::admission::buffered_body::BufferedBody;
use crate::admission::gate::Gate;
use crate::admission::guests::{GuestGuard, GuestKey};
use crate::admission::lanes::{AdmitResult, EdgeLane, LaneSet, TurnResult};
use crate::admission::page::negotiation;
use crate::admission::permit::Permit;
use crate::admission::site_lane::SiteLane;
use crate::admission::tickets::{CurrentTickets, PresentedTicket, TicketIssuer, keep_rest, take_away};
use crate::admission::{buffered_body, deferral, guests, pressure, tickets, visits};
use crate::http::message::{Request, RequestBody, RequestHead, text};
use crate::http::refusal::Refusal;
use crate::http::serving;

#[cfg(test)]
pub mod tests;

/// Number of path segments that distinguish request classes.
const CLASS_SEGMENTS: usize = 3;

const X_REQUEST_START: HeaderName = HeaderName::from_static("x-request-start");
const X_QUEUE_START: HeaderName = HeaderName::from_static("x-queue-start");

/// Maximum wait of a client with a running visit for its next permit. It holds if the site lets
/// others wait for less.
const VISITOR_WAIT_MAX: Duration = Duration::from_secs(60);

/// Interval at which the node's load is observed while limits adapt and something runs.
const FELT_EVERY: Duration = Duration::from_millis(100);

/// Minimum time between two ticks. Events that fall due in it are handled together.
const TICK_MIN: Duration = Duration::from_millis(2);

/// Hints of a rule for the admission of a request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AdmissionHints {
    /// Steps of priority. Each step overtakes requests that arrived a given time earlier.
    pub priority: i8,
    /// The request is counted, and never held back.
    pub passes: bool,
}

/// The right to run, and what is to be said of how it was got.
pub struct Admitted {
    pub permit: Permit,
    /// Prediction made when the request began to wait. `None` if it did not wait.
    pub waited: Option<Prediction>,
    /// Cookies that its client is given, or that are taken away.
    pub cookies: Vec<HeaderValue>,
}

impl Admitted {
    fn at_once(permit: Permit) -> Self {
        Self { permit, waited: None, cookies: Vec::new() }
    }
}

/// Waits for the right to run in `lane`, or in the site's own. `begun` is when the request came.
///
/// # Errors
/// If it is turned away: with a ticket, or without.
pub async fn admit(
    gate: &Gate,
    route: &Rc<SiteLane>,
    lane: Option<Arc<EdgeLane>>,
    hints: AdmissionHints,
    request: &mut Request,
    begun: Instant,
) -> Result<Admitted, Refusal> {
    if lane.is_none()
        && let Some(permit) = Permit::of_site(route, || class_of(&request.head))
    {
        return Ok(Admitted::at_once(permit));
    }
    let lane = lane.unwrap_or_else(|| Arc::clone(&route.lane));
    // Boxed, because few requests take this path and its state is large.
    Box::pin(ask(gate, route, lane, hints, request, begun)).await
}

async fn ask(
    gate: &Gate,
    route: &SiteLane,
    lane: Arc<EdgeLane>,
    hints: AdmissionHints,
    request: &mut Request,
    begun: Instant,
) -> Result<Admitted, Refusal> {
    let lanes = &gate.lanes;
    let tickets = gate.tickets.get();
    let mark = gate.mark();
    let shown = tickets.as_deref().map_or(Ok(None), |tickets| tickets.shown(&lane, &request.head, mark))?;
    if shown.is_none()
        && !hints.passes
        && let Some(permit) = lanes.enter_calm(&lane)
    {
        return Ok(Admitted::at_once(permit));
    }
    let may_promise =
        tickets.is_some() && !negotiation::is_crawler(text(&request.head, &http::header::USER_AGENT));
    let client = TicketIssuer::client_key(gate.forwarding.client(&request.head));
    let visit = visits::shown(gate, &lane, &request.head, client);
    let guest = guest_of(lanes, route, request, visit);
    let mut ask = AdmissionRequest {
        class: class_of(&request.head),
        client,
        bytes: request
            .body
            .len()
            .unwrap_or(buffered_body::BYTES_MAX as u64)
            .min(buffered_body::BYTES_MAX as u64),
        priority: hints.priority,
        ticket: shown.as_ref().map(|shown| shown.ticket),
        adopts: shown.as_ref().is_some_and(|shown| shown.is_foreign),
        can_wait: true,
        nonce: may_promise.then(|| tickets::nonce(mark)),
        passes: hints.passes || guest.as_ref().is_some_and(GuestGuard::passes),
        is_visiting: guest.as_ref().is_some_and(|guest| !guest.passes()),
    };
    let entered = enter(lanes, &lane, &mut ask, shown.as_ref());
    let (mut permit, predicted) = match entered {
        AdmitResult::Runs(pass) => (Permit::of_pass(&lane, pass), None),
        AdmitResult::Waits(pass, prediction, told) => {
            serving::need_client();
            let patience = patience(lanes, &lane, &ask);
            let permit = wait(lanes, route, &lane, pass, patience, told, request).await?;
            tell_backend(request, begun);
            (permit, Some(prediction))
        }
        AdmitResult::Turned(offer, records) => {
            return Err(deferral::away(gate, route, &lane, offer, records, request).await);
        }
    };
    let mut cookies = Vec::new();
    if let Some(shown) = &shown {
        cookies.extend(shown.cookie.as_deref().map(take_away));
        keep_rest(&gate.tickets, lanes);
    }
    let has_waited = predicted.is_some() || ask.ticket.is_some();
    if has_waited && visit.is_none() {
        cookies.extend(visits::begin(gate, (&lane, &route.site), (&request.head, client)));
    }
    permit.set_guest(guest);
    Ok(Admitted { permit, waited: predicted, cookies })
}

/// Asks the machine. A leftover cookie is no error: its holder is treated as anybody else.
fn enter(
    lanes: &LaneSet,
    lane: &EdgeLane,
    ask: &mut AdmissionRequest,
    shown: Option<&PresentedTicket>,
) -> AdmitResult {
    let mut entered = lanes.enter(lane, *ask);
    if let AdmitResult::Turned(Decision::Refused(AdmissionRefusal::Replayed | AdmissionRefusal::Expired), _) =
        entered
        && shown.is_some_and(|shown| shown.cookie.is_some())
    {
        ask.ticket = None;
        entered = lanes.enter(lane, *ask);
    }
    lanes.stirred.notify_one();
    entered
}

/// Returns the guest that the lane treats the request as. `None` for a newcomer, or if there are
/// too many guests of its kind.
fn guest_of(
    lanes: &LaneSet,
    route: &SiteLane,
    request: &Request,
    visit: Option<Nonce>,
) -> Option<GuestGuard> {
    let key = match visit {
        Some(visit) => GuestKey::Visit(visit),
        None if guests::is_preflight(request) => GuestKey::Preflight(route.tenant.name.clone()),
        None => return None,
    };
    lanes.guests.enter(key)
}

/// Records the origins whose scripts may read the site's responses, as its response says.
pub fn note_origins(route: Option<&SiteLane>, headers: &HeaderMap) {
    if let Some(route) = route.filter(|route| !matches!(route.site.backend, Backend::Static(_))) {
        route.lane.origins.learn(headers, Instant::now());
    }
}

/// Lets the script of `origin` read a response of the node, if the site lets it read its own.
pub fn let_read(route: Option<&SiteLane>, origin: Option<&HeaderValue>, headers: &mut HeaderMap) {
    if let Some((route, origin)) = route.zip(origin) {
        route.lane.origins.let_read(origin, headers, Instant::now());
    }
}

/// A place in line. Gives it up when dropped, also when the client leaves.
struct QueueEntry<'a> {
    lanes: &'a LaneSet,
    pass: RequestKey,
    is_over: bool,
}

impl Drop for QueueEntry<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            self.lanes.cancel(self.pass);
        }
    }
}

/// Waits in line. Takes in the body meanwhile, up to a limit, so that it is there later.
async fn wait(
    lanes: &LaneSet,
    route: &SiteLane,
    lane: &Arc<EdgeLane>,
    pass: RequestKey,
    patience: Duration,
    mut told: oneshot::Receiver<TurnResult>,
    request: &mut Request,
) -> Result<Permit, Refusal> {
    let mut place = QueueEntry { lanes, pass, is_over: false };
    let body = std::mem::replace(&mut request.body, RequestBody::empty());
    let mut held = BufferedBody::new(body);
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
            Err(deferral::refused(why, &route.site, &request.head))
        }
        // The machine has dropped the lane.
        Ok(Err(_)) => Err(deferral::refused(AdmissionRefusal::NoLane, &route.site, &request.head)),
        Err(_) => Err(deferral::too_long(lanes.prediction(pass), &route.site, &request.head)),
    }
}

/// Returns the maximum wait of a request here. The holder of a ticket waits until well after its
/// slot, because its place is valuable.
fn patience(lanes: &LaneSet, lane: &EdgeLane, ask: &AdmissionRequest) -> Duration {
    let of_visit = if ask.is_visiting { VISITOR_WAIT_MAX } else { Duration::ZERO };
    let of_ticket = ask.ticket.map_or(Duration::ZERO, |ticket| {
        let slot = ticket.ends.0.saturating_sub(ticket.begins.0);
        Duration::from_micros(ticket.ends.0.saturating_sub(lanes.now().0).saturating_add(slot))
    });
    lane.patience().max(of_ticket).max(of_visit)
}

/// Adds the field from which tools of Ruby, Python and others compute the queue time. It holds
/// the arrival of the request in microseconds since 1970.
fn tell_backend(request: &mut Request, begun: Instant) {
    let came = SystemTime::now() - begun.elapsed();
    let came = came.duration_since(UNIX_EPOCH).unwrap_or_default().as_micros();
    let value = HeaderValue::try_from(format!("t={came}")).expect("digits are a valid field value");
    request.head.headers.insert(X_REQUEST_START, value.clone());
    request.head.headers.insert(X_QUEUE_START, value);
}

/// Does work that falls due with time: slots that begin and end, unanswered calls, adaptive
/// limits. Runs on one thread, for all.
pub async fn tend(lanes: Arc<LaneSet>, current: Arc<CurrentTickets>) {
    let mut gauge = pressure::PressureGauge::new();
    let mut felt = Instant::now();
    if let Some(tickets) = current.get() {
        tokio::task::spawn_local(tickets::restore_later(tickets, Arc::clone(&lanes)));
    }
    loop {
        let next = lanes.tick();
        keep_rest(&current, &lanes);
        if felt.elapsed() >= FELT_EVERY && lanes.any_adapts() {
            felt = Instant::now();
            lanes.observe_pressure(gauge.read());
        }
        // Nothing is due and nothing waits: sleeps until something does.
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

/// Returns the class of requests with a likely equal cost. A class consists of the safety of the
/// method, the path's beginning without numbers, and the parameter names.
fn class_of(head: &RequestHead) -> CostClass {
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
    CostClass(hasher.finish() as u32)
}
