//! Those who are sent away for now: what they are promised, and how they are told.
//!
//! People get a page that lets them in by itself, programs a problem document (RFC 9457), both with `Retry-After`, and both with a
//! ticket where one is promised. A promise is made only once it is stored. Not here: who is sent away
//! (`nagaya_admission`), how the page looks (`page`), the status (`refusal`).

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::header::{
    ACCEPT, ACCEPT_LANGUAGE, CONTENT_LANGUAGE, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFRESH, RETRY_AFTER,
    SET_COOKIE, VARY,
};
use http::{HeaderMap, HeaderValue, Method};
use nagaya_admission::{Keys, Offer, Promise, Record, Refused};
use nagaya_base::Code;

use super::events::events_path;
use super::lanes::Lane;
use super::page::{self, Facts};
use super::text;
use super::tickets::{self, NAGAYA_TICKET};
use crate::message::Request;
use crate::node::Node;
use crate::refusal::Refusal;
use crate::route::Route;

/// What a refused client is told where nothing is known: the shortest wait that is worth a new attempt.
const RETRY_AFTER_MIN: u32 = 1;

/// As the table of refusals has them.
pub const CODE_PROMISED: Code = Code(450);
pub const CODE_EARLY: Code = Code(451);

/// Clients that are held for coming again too early. More than these are answered at once.
const PENALISED_MAX: u32 = 10_000;

/// A ticket's cookie is kept so much longer than its slot: who comes late goes before newcomers all the same.
const LATE: Duration = Duration::from_secs(3600);

/// The answer to somebody who holds a ticket for later, all but its status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turned {
    pub headers: HeaderMap,
    pub body: Bytes,
    /// It showed a ticket, too early.
    pub is_early: bool,
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
        Offer::Refused(why) => return refused(why),
        Offer::Run(_) | Offer::Wait(..) => unreachable!("these are not turned away"),
    };
    let none = Refusal::QueueFull { retry_after_seconds: RETRY_AFTER_MIN };
    let Some(tickets) = node.shared.tickets() else { return none };
    let Some(keys) = tickets.store.keys() else { return none };
    if promise.is_new {
        if tickets.store.keep(records).await.is_err() {
            // The store has said why. Nothing is promised that would be forgotten.
            node.shared.lanes.withdraw(promise.ticket.nonce);
            let begins = begins_in(node, &promise);
            return Refusal::QueueFull { retry_after_seconds: seconds(Some(begins)) };
        }
    } else {
        penalise(Duration::from_millis(node.shared.options().admission.penalty_ms)).await;
    }
    Refusal::TurnedAway(Box::new(turned(node, route, lane, &keys, &promise, is_early, request)))
}

/// Without a promise.
pub fn refused(why: Refused) -> Refusal {
    match why {
        Refused::Full(prediction) | Refused::NoSlot(prediction) => {
            Refusal::QueueFull { retry_after_seconds: seconds(prediction.guess) }
        }
        Refused::Replayed => Refusal::TicketUsed,
        Refused::Expired => Refusal::TicketInvalid("it ended long ago".into()),
        Refused::NoLane => Refusal::UnknownHost,
    }
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

fn turned(
    node: &Node,
    route: &Route,
    lane: &Lane,
    keys: &Keys,
    promise: &Promise,
    is_early: bool,
    request: &Request,
) -> Turned {
    let (head, lanes) = (&request.head, &node.shared.lanes);
    let ticket = keys.sign(&promise.ticket);
    let begins = begins_in(node, promise);
    let window = Duration::from_micros(promise.ticket.ends.0.saturating_sub(promise.ticket.begins.0));
    let language = page::language(text(head, &ACCEPT_LANGUAGE));
    let id = head.id.to_string();
    let facts = Facts {
        site: &head.host,
        ahead: promise.ahead,
        wait_seconds: Some(seconds(Some(begins))),
        at_most_seconds: Some(seconds(Some(begins + window))),
        begins_in_seconds: seconds(Some(begins)),
        window_seconds: seconds(Some(window)),
        events_path: &events_path(lane),
        is_post: !head.method.is_safe(),
        language,
        request_id: &id,
    };
    let mut headers = HeaderMap::new();
    let number = |seconds: u32| HeaderValue::from(seconds);
    headers.insert(RETRY_AFTER, number(facts.begins_in_seconds));
    headers.insert(VARY, HeaderValue::from_static("Accept, Accept-Language, Cookie"));
    if let Ok(value) = HeaderValue::try_from(ticket.as_str()) {
        headers.insert(NAGAYA_TICKET, value);
    }
    let name = tickets::cookie_name(lane);
    let life = (begins + window + LATE).as_secs();
    headers.insert(SET_COOKIE, tickets::set_cookie(&name, &ticket, life, head.conn.tls.is_some()));
    let body = if page::wants_html(text(head, &ACCEPT)) {
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8"));
        headers.insert(CONTENT_LANGUAGE, HeaderValue::from_static(language.tag()));
        match &route.site.admission.page {
            Some(template) => {
                // Nobody knows what it does by itself.
                if matches!(head.method, Method::GET | Method::HEAD) {
                    headers.insert(REFRESH, number(facts.begins_in_seconds));
                }
                page::render_own(template, &facts)
            }
            None => {
                headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(page::csp()));
                page::render(&facts)
            }
        }
    } else {
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        let slot = lanes.on_wall(promise.ticket.begins)..lanes.on_wall(promise.ticket.ends);
        page::problem_json(&facts, &ticket, &slot, if is_early { CODE_EARLY } else { CODE_PROMISED })
    };
    Turned { headers, body: Bytes::from(body), is_early }
}
