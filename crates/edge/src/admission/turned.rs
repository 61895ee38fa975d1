//! Those who are sent away for now: what they are promised, and how they are told.
//!
//! People get a page that lets them in by itself, programs a problem document (RFC 9457), both with `Retry-After`, and both with a
//! ticket where one is promised. A promise is made only once it is stored. Crawlers get neither. Not here: who is sent away
//! (`nagaya_admission`), how the page looks (`page`), the status (`refusal`).

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::header::{
    ACCEPT, ACCEPT_LANGUAGE, CONTENT_LANGUAGE, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFRESH, RETRY_AFTER,
    SET_COOKIE, USER_AGENT, VARY,
};
use http::{HeaderMap, HeaderValue, Method};
use nagaya_admission::{Keys, Offer, Prediction, Promise, Record, Refused};
use nagaya_base::Code;
use nagaya_cmdb::Site;

use super::events::events_path;
use super::lanes::Lane;
use super::page::{self, Facts, Kept, Slip};
use super::text;
use super::tickets::{self, NAGAYA_TICKET};
use crate::message::{Head, Request};
use crate::node::Node;
use crate::refusal::Refusal;
use crate::route::Route;

/// The shortest wait that is worth a new attempt.
const RETRY_AFTER_MIN: u32 = 1;

/// What a refused client is told where nothing is known. Pages try again by themselves: sooner would be a load of its own.
const RETRY_AFTER_UNKNOWN: u32 = 5;

/// As the table of refusals has them.
pub const CODE_PROMISED: Code = Code(450);
pub const CODE_EARLY: Code = Code(451);

/// Clients that are held for coming again too early. More than these are answered at once.
const PENALISED_MAX: u32 = 10_000;

/// A ticket's cookie is kept so much longer than its slot: who comes late goes before newcomers all the same.
const LATE: Duration = Duration::from_secs(3600);

/// What somebody who is turned away is told, all but the status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    pub headers: HeaderMap,
    pub body: Bytes,
}

/// Turns a request away as the machine decided. `records` are those of a promise that was just made.
pub async fn away(
    node: &Node,
    route: &Route,
    lane: &Lane,
    offer: Offer,
    records: Vec<Record>,
    request: &Request,
) -> Refusal {
    let (promise, is_early) = match offer {
        Offer::Next(promise) => (promise, false),
        Offer::Early(promise) => (promise, true),
        Offer::Refused(why) => return refused(why, &route.site, &request.head),
        Offer::Run(_) | Offer::Wait(..) => unreachable!("these are not turned away"),
    };
    let begins = begins_in(node, &promise);
    let without = || {
        let (ahead, wait) = (promise.ahead, Some(begins));
        let prediction = Prediction { ahead, wait, at_most: None, guess: wait };
        without_ticket(full(), Some(prediction), &route.site, &request.head)
    };
    let Some(tickets) = node.shared.tickets() else { return without() };
    let Some(keys) = tickets.keys(node.shared.cluster.ticket_mark()) else { return without() };
    if promise.is_new {
        if tickets.store.keep(records).await.is_err() {
            // The store has said why. Nothing is promised that would be forgotten.
            node.shared.lanes.withdraw(promise.ticket.nonce);
            return without();
        }
    } else {
        penalise(Duration::from_millis(node.shared.options().admission.penalty_ms)).await;
    }
    let notice = Box::new(of_promise(node, route, lane, &keys, &promise, is_early, request));
    Refusal::TurnedAway { notice, is_early }
}

/// Without a promise.
pub fn refused(why: Refused, site: &Site, head: &Head) -> Refusal {
    match why {
        Refused::Full(prediction) | Refused::NoSlot(prediction) => {
            without_ticket(full(), Some(prediction), site, head)
        }
        Refused::Replayed => Refusal::TicketUsed,
        Refused::Expired => Refusal::TicketInvalid("it ended long ago".into()),
        Refused::NoLane => Refusal::UnknownHost,
    }
}

fn full() -> Refusal {
    Refusal::QueueFull { retry_after_seconds: RETRY_AFTER_UNKNOWN, notice: None }
}

/// It has waited as long as it may. `prediction` is for the rest of its way.
pub fn too_long(prediction: Option<Prediction>, site: &Site, head: &Head) -> Refusal {
    let late = Refusal::QueueTimeout { retry_after_seconds: RETRY_AFTER_UNKNOWN, notice: None };
    without_ticket(late, prediction, site, head)
}

/// The same refusal, if it is one of a line, with what is known of it told to people and programs in their own way. Crawlers get
/// the node's plain page.
pub fn without_ticket(
    mut refusal: Refusal,
    prediction: Option<Prediction>,
    site: &Site,
    head: &Head,
) -> Refusal {
    let code = refusal.row().code;
    if let Refusal::QueueFull { retry_after_seconds, notice }
    | Refusal::QueueTimeout { retry_after_seconds, notice } = &mut refusal
    {
        if let Some(guess) = prediction.and_then(|prediction| prediction.guess) {
            *retry_after_seconds = seconds(Some(guess));
        }
        if !page::is_crawler(text(head, &USER_AGENT)) {
            let id = head.id.to_string();
            let told = told(head, &id, prediction, *retry_after_seconds);
            *notice = Some(Box::new(notice_of(site, head, &told, None, code)));
        }
    }
    refusal
}

fn told<'a>(
    head: &'a Head,
    id: &'a str,
    prediction: Option<Prediction>,
    begins_in_seconds: u32,
) -> Facts<'a> {
    let known = |span: Option<Duration>| span.map(|span| seconds(Some(span)));
    Facts {
        site: &head.host,
        ahead: prediction.map(|prediction| prediction.ahead),
        wait_seconds: known(prediction.and_then(|prediction| prediction.wait)),
        at_most_seconds: known(prediction.and_then(|prediction| prediction.at_most)),
        begins_in_seconds,
        kept: None,
        is_post: !head.method.is_safe(),
        language: page::language(text(head, &ACCEPT_LANGUAGE)),
        request_id: id,
    }
}

/// For a program whose request waited for a place of its site in vain.
pub fn unplaced(head: &Head, code: Code, again_in: u32, predicted: Option<Duration>) -> Option<Notice> {
    if page::wants_html(text(head, &ACCEPT)) || page::is_crawler(text(head, &USER_AGENT)) {
        return None;
    }
    let mut headers = HeaderMap::new();
    headers.insert(RETRY_AFTER, HeaderValue::from(again_in));
    headers.insert(VARY, HeaderValue::from_static("Accept"));
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    let wait = predicted.map(|wait| seconds(Some(wait)));
    let body = page::unplaced_json(&head.host, &head.id.to_string(), code, again_in, wait);
    Some(Notice { headers, body: Bytes::from(body) })
}

/// In whole seconds, at least one.
pub fn seconds(wait: Option<Duration>) -> u32 {
    let up = wait.map_or(0, |wait| wait.as_millis().div_ceil(1000));
    u32::try_from(up).unwrap_or(u32::MAX).max(RETRY_AFTER_MIN)
}

fn begins_in(node: &Node, promise: &Promise) -> Duration {
    Duration::from_micros(promise.ticket.begins.0.saturating_sub(node.shared.lanes.now().0))
}

/// Holds whoever comes again before its time: it keeps its slot, and costs no permit and no thread meanwhile.
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
    node: &Node,
    route: &Route,
    lane: &Lane,
    keys: &Keys,
    promise: &Promise,
    is_early: bool,
    request: &Request,
) -> Notice {
    let (head, lanes) = (&request.head, &node.shared.lanes);
    let ticket = keys.sign(&promise.ticket);
    let begins = begins_in(node, promise);
    let window = Duration::from_micros(promise.ticket.ends.0.saturating_sub(promise.ticket.begins.0));
    let (events_path, id) = (events_path(lane), head.id.to_string());
    let facts = Facts {
        ahead: Some(promise.ahead),
        wait_seconds: Some(seconds(Some(begins))),
        at_most_seconds: Some(seconds(Some(begins + window))),
        kept: Some(Kept { window_seconds: seconds(Some(window)), events_path: &events_path }),
        ..told(head, &id, None, seconds(Some(begins)))
    };
    let slot = lanes.on_wall(promise.ticket.begins)..lanes.on_wall(promise.ticket.ends);
    let slip = Slip { text: &ticket, slot };
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

/// A page for people, a document for programs.
fn notice_of(site: &Site, head: &Head, facts: &Facts<'_>, slip: Option<&Slip<'_>>, code: Code) -> Notice {
    let mut headers = HeaderMap::new();
    headers.insert(RETRY_AFTER, HeaderValue::from(facts.begins_in_seconds));
    headers.insert(VARY, HeaderValue::from_static("Accept, Accept-Language, Cookie"));
    let body = if page::wants_html(text(head, &ACCEPT)) {
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8"));
        headers.insert(CONTENT_LANGUAGE, HeaderValue::from_static(facts.language.tag()));
        if let Some(template) = &site.admission.page {
            // Nobody knows what it does by itself.
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
    Notice { headers, body: Bytes::from(body) }
}
