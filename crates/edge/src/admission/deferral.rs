//! Sends clients away for now: makes the promise, and builds the response.
//!
//! People get a page that lets them in by itself, programs a problem document (RFC 9457). Both
//! come with `Retry-After`, and with a ticket if one is promised. A promise is made only once it
//! is stored. Crawlers get neither. Not here: choosing whom to send away (`nagaya_admission`),
//! the content of the page (`page`), the status (`refusal`).

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::header::{
    ACCEPT, ACCEPT_LANGUAGE, CONTENT_LANGUAGE, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFRESH, RETRY_AFTER,
    SET_COOKIE, USER_AGENT, VARY,
};
use http::{HeaderMap, HeaderValue, Method};
use nagaya_admission::{AdmissionRefusal, Decision, Prediction, SlotPromise, TicketKeyring, TicketRecord};
use nagaya_base::Code;
use nagaya_records::Site;

use crate::admission::events::events_path;
use crate::admission::gate::Gate;
use crate::admission::lanes::EdgeLane;
use crate::admission::page::{PageFacts, TicketOffer, TicketView, negotiation};
use crate::admission::tickets::NAGAYA_TICKET;
use crate::admission::{page, tickets};
use crate::http::message::{Request, RequestHead, text};
use crate::http::refusal::{DeferralContent, Refusal};
use crate::http::route::SiteRoute;

/// Minimum wait that is worth a new attempt.
const RETRY_AFTER_MIN: u32 = 1;

/// Value for a refused client if no prediction is known. Pages retry by themselves: sooner would
/// be a load of its own.
const RETRY_AFTER_UNKNOWN: u32 = 5;

/// Codes as in the table of refusals.
pub const CODE_PROMISED: Code = Code(450);
pub const CODE_EARLY: Code = Code(451);

/// Maximum number of clients that are delayed for coming again too early. Others are answered at
/// once.
const PENALISED_MAX: u32 = 10_000;

/// Time for which a ticket's cookie outlives its slot. A late holder still goes before newcomers.
const LATE: Duration = Duration::from_secs(3600);

/// Turns a request away as the machine decided. `records` are those of a promise that was just
/// made.
pub async fn away(
    gate: &Gate,
    route: &SiteRoute,
    lane: &EdgeLane,
    offer: Decision,
    records: Vec<TicketRecord>,
    request: &Request,
) -> Refusal {
    let (promise, is_early) = match offer {
        Decision::Next(promise) => (promise, false),
        Decision::Early(promise) => (promise, true),
        Decision::Refused(why) => return refused(why, &route.site, &request.head),
        Decision::Run(_) | Decision::Wait(..) => unreachable!("these are not turned away"),
    };
    let begins = begins_in(gate, &promise);
    let without = || {
        let (ahead, wait) = (promise.ahead, Some(begins));
        let prediction = Prediction { ahead, wait, at_most: None, guess: wait };
        without_ticket(full(), Some(prediction), &route.site, &request.head)
    };
    let Some(tickets) = gate.tickets.get() else { return without() };
    let Some(keys) = tickets.keys(gate.mark()) else { return without() };
    if promise.is_new {
        if tickets.store.keep(records).await.is_err() {
            // The store has logged the reason. A promise that would be forgotten is not given.
            gate.lanes.withdraw(promise.ticket.nonce);
            return without();
        }
    } else {
        penalise(Duration::from_millis(gate.options.get().admission.penalty_ms)).await;
    }
    let notice = Box::new(of_promise(gate, route, lane, &keys, &promise, is_early, request));
    Refusal::TurnedAway { notice, is_early }
}

/// Refuses without a promise.
pub fn refused(why: AdmissionRefusal, site: &Site, head: &RequestHead) -> Refusal {
    match why {
        AdmissionRefusal::Full(prediction) | AdmissionRefusal::NoSlot(prediction) => {
            without_ticket(full(), Some(prediction), site, head)
        }
        AdmissionRefusal::Replayed => Refusal::TicketUsed,
        AdmissionRefusal::Expired => Refusal::TicketInvalid("it ended long ago".into()),
        AdmissionRefusal::NoLane => Refusal::UnknownHost,
    }
}

fn full() -> Refusal {
    Refusal::QueueFull { retry_after_seconds: RETRY_AFTER_UNKNOWN, notice: None }
}

/// Refuses a request that has waited its maximum time. `prediction` is for the rest of its wait.
pub fn too_long(prediction: Option<Prediction>, site: &Site, head: &RequestHead) -> Refusal {
    let late = Refusal::QueueTimeout { retry_after_seconds: RETRY_AFTER_UNKNOWN, notice: None };
    without_ticket(late, prediction, site, head)
}

/// Adds the known prediction to a refusal of a lane, in a form for people or programs. Crawlers
/// get the node's plain page.
pub fn without_ticket(
    mut refusal: Refusal,
    prediction: Option<Prediction>,
    site: &Site,
    head: &RequestHead,
) -> Refusal {
    let code = refusal.row().code;
    if let Refusal::QueueFull { retry_after_seconds, notice }
    | Refusal::QueueTimeout { retry_after_seconds, notice } = &mut refusal
    {
        if let Some(guess) = prediction.and_then(|prediction| prediction.guess) {
            *retry_after_seconds = seconds(Some(guess));
        }
        if !negotiation::is_crawler(text(head, &USER_AGENT)) {
            let id = head.id.to_string();
            let told = told(head, &id, prediction, *retry_after_seconds);
            *notice = Some(Box::new(notice_of(site, head, &told, None, code)));
        }
    }
    refusal
}

fn told<'a>(
    head: &'a RequestHead,
    id: &'a str,
    prediction: Option<Prediction>,
    begins_in_seconds: u32,
) -> PageFacts<'a> {
    let known = |span: Option<Duration>| span.map(|span| seconds(Some(span)));
    PageFacts {
        site: &head.host,
        ahead: prediction.map(|prediction| prediction.ahead),
        wait_seconds: known(prediction.and_then(|prediction| prediction.wait)),
        at_most_seconds: known(prediction.and_then(|prediction| prediction.at_most)),
        begins_in_seconds,
        kept: None,
        is_post: !head.method.is_safe(),
        language: negotiation::language(text(head, &ACCEPT_LANGUAGE)),
        request_id: id,
    }
}

/// Returns the content for a program whose request waited in vain for a place of its site.
pub fn unplaced(
    head: &RequestHead,
    code: Code,
    again_in: u32,
    predicted: Option<Duration>,
) -> Option<DeferralContent> {
    if negotiation::wants_html(text(head, &ACCEPT)) || negotiation::is_crawler(text(head, &USER_AGENT)) {
        return None;
    }
    let mut headers = HeaderMap::new();
    headers.insert(RETRY_AFTER, HeaderValue::from(again_in));
    headers.insert(VARY, HeaderValue::from_static("Accept"));
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    let wait = predicted.map(|wait| seconds(Some(wait)));
    let body = page::unplaced_json(&head.host, &head.id.to_string(), code, again_in, wait);
    Some(DeferralContent { headers, body: Bytes::from(body) })
}

/// Returns whole seconds, at least one.
pub fn seconds(wait: Option<Duration>) -> u32 {
    let up = wait.map_or(0, |wait| wait.as_millis().div_ceil(1000));
    u32::try_from(up).unwrap_or(u32::MAX).max(RETRY_AFTER_MIN)
}

fn begins_in(gate: &Gate, promise: &SlotPromise) -> Duration {
    Duration::from_micros(promise.ticket.begins.0.saturating_sub(gate.lanes.now().0))
}

/// Delays a client that comes again before its time. It keeps its slot, and needs no permit and
/// no thread meanwhile.
async fn penalise(penalty: Duration) {
    static HELD: AtomicU32 = AtomicU32::new(0);
    struct Leaving;
    impl Drop for Leaving {
        fn drop(&mut self) {
            HELD.fetch_sub(1, Ordering::Relaxed);
        }
    }
    let held = HELD.fetch_add(1, Ordering::Relaxed);
    let _leaving = Leaving;
    if held < PENALISED_MAX {
        tokio::time::sleep(penalty).await;
    }
}

fn of_promise(
    gate: &Gate,
    route: &SiteRoute,
    lane: &EdgeLane,
    keys: &TicketKeyring,
    promise: &SlotPromise,
    is_early: bool,
    request: &Request,
) -> DeferralContent {
    let (head, lanes) = (&request.head, &gate.lanes);
    let ticket = keys.sign(&promise.ticket);
    let begins = begins_in(gate, promise);
    let window = Duration::from_micros(promise.ticket.ends.0.saturating_sub(promise.ticket.begins.0));
    let (events_path, id) = (events_path(lane), head.id.to_string());
    let facts = PageFacts {
        ahead: Some(promise.ahead),
        wait_seconds: Some(seconds(Some(begins))),
        at_most_seconds: Some(seconds(Some(begins + window))),
        kept: Some(TicketOffer { window_seconds: seconds(Some(window)), events_path: &events_path }),
        ..told(head, &id, None, seconds(Some(begins)))
    };
    let slot = lanes.on_wall(promise.ticket.begins)..lanes.on_wall(promise.ticket.ends);
    let slip = TicketView { text: &ticket, slot };
    let code = if is_early { CODE_EARLY } else { CODE_PROMISED };
    let mut notice = notice_of(&route.site, head, &facts, Some(&slip), code);
    if let Ok(value) = HeaderValue::try_from(ticket.as_str()) {
        notice.headers.insert(NAGAYA_TICKET, value);
    }
    let name = tickets::cookie_name(lane);
    let life = (begins + window + LATE).as_secs();
    let cookie = tickets::set_cookie(&name, &ticket, life, head.conn.tls.is_some());
    notice.headers.insert(SET_COOKIE, cookie);
    notice
}

/// Returns a page for people, a document for programs.
fn notice_of(
    site: &Site,
    head: &RequestHead,
    facts: &PageFacts<'_>,
    slip: Option<&TicketView<'_>>,
    code: Code,
) -> DeferralContent {
    let mut headers = HeaderMap::new();
    headers.insert(RETRY_AFTER, HeaderValue::from(facts.begins_in_seconds));
    headers.insert(VARY, HeaderValue::from_static("Accept, Accept-Language, Cookie"));
    let body = if negotiation::wants_html(text(head, &ACCEPT)) {
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8"));
        headers.insert(CONTENT_LANGUAGE, HeaderValue::from_static(facts.language.tag()));
        if let Some(template) = &site.admission.page {
            // Repeating any other method may have an effect.
            if matches!(head.method, Method::GET | Method::HEAD) {
                headers.insert(REFRESH, HeaderValue::from(facts.begins_in_seconds));
            }
            page::render_own(template, facts)
        } else {
            headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(page::csp()));
            page::render(facts)
        }
    } else {
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        page::problem_json(facts, slip, code)
    };
    DeferralContent { headers, body: Bytes::from(body) }
}
