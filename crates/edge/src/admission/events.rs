//! The stream of a waiting page (server-sent events of the HTML standard): where its holder stands, and when to come.
//!
//! It holds no permit. A holder who listens can be called before its slot begins, when capacity has freed early; its place is
//! kept until then. Not here: who is called (`nagaya_admission`), the page that listens (`page`).

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName};
use http::{HeaderValue, Method, StatusCode};
use http_body::{Body, Frame};
use nagaya_admission::{Moment, Nonce, Standing};
use tokio::sync::oneshot;
use tokio::time::{Interval, MissedTickBehavior, interval};

use super::lanes::{Lane, Lanes, Untold};
use super::tickets;
use super::turned::seconds;
use crate::message::{BodyError, Request, Response, ResponseBody};
use crate::node::Node;
use crate::refusal::Refusal;
use crate::route::Route;
use crate::serving;

/// Paths of the node's own on every site.
pub const OWN: &str = "/.nagaya/";

/// What follows is the lane.
const WAIT: &str = "/.nagaya/wait/";

/// So often a page is told where it stands. It also keeps proxies between from giving up.
const TOLD_EVERY: Duration = Duration::from_secs(5);

/// Not every proxy hands on what it gets at once; those of nginx's kind are asked to.
const X_ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// Where a waiting page of this lane listens.
pub fn events_path(lane: &Lane) -> String {
    format!("{WAIT}{}", tickets::short(lane))
}

/// The node's own answer, if the request is for a path of its own.
///
/// # Errors
/// If there is nothing at that path.
pub fn answer(node: &Node, route: &Route, request: &Request) -> Result<Option<Response>, Refusal> {
    let head = &request.head;
    if !head.path.starts_with(OWN) {
        return Ok(None);
    }
    let lane = head.path.strip_prefix(WAIT).ok_or(Refusal::NotFound)?;
    if head.method != Method::GET {
        return Err(Refusal::MethodNotAllowed("GET"));
    }
    let tickets = node.shared.tickets().ok_or(Refusal::NotFound)?;
    let lanes = &node.shared.lanes;
    let lane = lanes.by_short(&route.lane, lane).ok_or(Refusal::NotFound)?;
    let shown = tickets.shown(&lane, head, node.shared.cluster.ticket_mark())?.ok_or(Refusal::NotFound)?;
    let nonce = shown.ticket.nonce;
    serving::need_client();
    let called = match lanes.listen(nonce) {
        Ok(called) => called,
        // The one status by which a page is told not to ask again. It enters when its slot begins.
        Err(Untold::Others) => return Ok(Some(Response::new(StatusCode::NO_CONTENT))),
        Err(Untold::TooMany) => return Err(Refusal::Overloaded("too many waiting pages listen")),
    };
    let mut every = interval(TOLD_EVERY);
    every.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let stream = Events { lanes: Arc::clone(lanes), nonce, called: Some(called), every, is_over: false };
    Ok(Some(
        Response::new(StatusCode::OK)
            .with_header(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"))
            .with_header(CACHE_CONTROL, HeaderValue::from_static("no-store"))
            .with_header(X_ACCEL_BUFFERING, HeaderValue::from_static("no"))
            .with_body(ResponseBody::Stream(Box::pin(stream))),
    ))
}

struct Events {
    lanes: Arc<Lanes>,
    nonce: Nonce,
    /// `None`: it will not be called. What has ended must not be asked again.
    called: Option<oneshot::Receiver<Moment>>,
    every: Interval,
    is_over: bool,
}

impl Events {
    /// What there is to say; the last word ends the stream.
    fn say(&mut self) -> String {
        match self.lanes.standing(self.nonce) {
            Standing::Later { begins_in, ahead } => {
                let begins = seconds(Some(begins_in));
                let place = serde_json::json!({ "ahead": ahead, "wait_seconds": begins, "begins_in_seconds": begins });
                format!("event: place\ndata: {place}\n\n")
            }
            // It may come; or its page has had its turn, and asking anew tells it how it stands.
            Standing::Open { .. } | Standing::Late | Standing::Used | Standing::Unknown => self.come(),
        }
    }

    fn come(&mut self) -> String {
        self.is_over = true;
        "event: come\ndata: {}\n\n".into()
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.called = None;
        self.lanes.hang_up(self.nonce);
    }
}

impl Body for Events {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
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
