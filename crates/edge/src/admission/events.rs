//! Serves the stream of a waiting page: the holder's position, and the call to come. It uses
//! server-sent events of the HTML standard.
//!
//! It holds no permit. A holder who listens can be called before its slot begins, if capacity
//! becomes free early. Its place is kept until then. Not here: choosing the holder to call
//! (`nagaya_admission`), the page that listens (`page`).

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName};
use http::{HeaderValue, Method, StatusCode};
use http_body::Frame;
use nagaya_admission::{Moment, Nonce, TicketStatus};
use tokio::sync::oneshot;
use tokio::time::{Interval, MissedTickBehavior, interval};

use crate::admission::deferral::seconds;
use crate::admission::gate::Gate;
use crate::admission::lanes;
use crate::admission::lanes::{EdgeLane, LaneSet, TicketListenError};
use crate::admission::site_lane::SiteLane;
use crate::http::body_adapters::{FrameResult, PolledBody};
use crate::http::message::{Request, Response, ResponseBody};
use crate::http::refusal::Refusal;
use crate::http::serving;

/// Paths of the node's own on every site.
pub const OWN: &str = "/.nagaya/";

/// Prefix of the path of a waiting page's stream. The lane follows it.
const WAIT: &str = "/.nagaya/wait/";

/// Interval at which a page gets its position. It also keeps proxies in between from giving up.
const TOLD_EVERY: Duration = Duration::from_secs(5);

/// Asks proxies of nginx's kind to pass on each piece at once.
const X_ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// Returns the path of the stream for waiting pages of this lane.
pub fn events_path(lane: &EdgeLane) -> String {
    format!("{WAIT}{}", lanes::short(lane))
}

/// Returns the node's own answer, if the request is for a path of its own.
///
/// # Errors
/// Fails if there is nothing at that path.
pub fn answer(gate: &Gate, route: &SiteLane, request: &Request) -> Result<Option<Response>, Refusal> {
    let head = &request.head;
    if !head.path.starts_with(OWN) {
        return Ok(None);
    }
    let lane = head.path.strip_prefix(WAIT).ok_or(Refusal::NotFound)?;
    if head.method != Method::GET {
        return Err(Refusal::MethodNotAllowed("GET"));
    }
    let tickets = gate.tickets.get().ok_or(Refusal::NotFound)?;
    let lanes = &gate.lanes;
    let lane = lanes.by_short(&route.lane, lane).ok_or(Refusal::NotFound)?;
    let shown = tickets.shown(&lane, head, gate.mark())?.ok_or(Refusal::NotFound)?;
    let nonce = shown.ticket.nonce;
    serving::need_client();
    let called = match lanes.listen(nonce) {
        Ok(called) => called,
        // This is the one status after which a page does not ask again. It enters when its slot
        // begins.
        Err(TicketListenError::Others) => return Ok(Some(Response::new(StatusCode::NO_CONTENT))),
        Err(TicketListenError::TooMany) => return Err(Refusal::Overloaded("too many waiting pages listen")),
    };
    let mut every = interval(TOLD_EVERY);
    every.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut events =
        TicketEvents { lanes: Arc::clone(lanes), nonce, called: Some(called), every, is_over: false };
    let stream = PolledBody::new(move |cx| events.poll(cx));
    Ok(Some(
        Response::new(StatusCode::OK)
            .with_header(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"))
            .with_header(CACHE_CONTROL, HeaderValue::from_static("no-store"))
            .with_header(X_ACCEL_BUFFERING, HeaderValue::from_static("no"))
            .with_body(ResponseBody::stream(stream)),
    ))
}

struct TicketEvents {
    lanes: Arc<LaneSet>,
    nonce: Nonce,
    /// `None` if it will not be called. A receiver that has ended must not be polled again.
    called: Option<oneshot::Receiver<Moment>>,
    every: Interval,
    is_over: bool,
}

impl TicketEvents {
    /// Returns the next event. The last one ends the stream.
    fn say(&mut self) -> String {
        match self.lanes.standing(self.nonce) {
            TicketStatus::Later { begins_in, ahead } => {
                let begins = seconds(Some(begins_in));
                let place = serde_json::json!({ "ahead": ahead, "wait_seconds": begins, "begins_in_seconds": begins });
                format!("event: place\ndata: {place}\n\n")
            }
            // The holder may come, or its page has had its turn. A new request tells the page its
            // position.
            TicketStatus::Open { .. } | TicketStatus::Late | TicketStatus::Used | TicketStatus::Unknown => {
                self.come()
            }
        }
    }

    fn come(&mut self) -> String {
        self.is_over = true;
        "event: come\ndata: {}\n\n".into()
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<FrameResult>> {
        if self.is_over {
            return Poll::Ready(None);
        }
        let call = self.called.as_mut().map(|called| Pin::new(called).poll(cx));
        if let Some(Poll::Ready(_)) = call {
            self.called = None;
        }
        let said = if let Some(Poll::Ready(Ok(_))) = call {
            self.come()
        } else {
            ready!(self.every.poll_tick(cx));
            self.say()
        };
        Poll::Ready(Some(Ok(Frame::data(Bytes::from(said)))))
    }
}

impl Drop for TicketEvents {
    fn drop(&mut self) {
        self.called = None;
        self.lanes.hang_up(self.nonce);
    }
}
