//! The account of one request: opened when it arrives, written to log and counters when its body has gone.
//!
//! Not here: the forms of the log (`access_log`), the counters (`metrics`).

use std::cell::Cell;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Instant, SystemTime};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use nagaya_base::RequestId;

use crate::access_log::{AccessRecord, ThreadLog};
use crate::gate::Permits;
use crate::message::{BodyError, ConnInfo, Receipt, Request, RequestBody, Response};
use crate::metrics::Metrics;
use crate::node::Node;
use crate::refusal::{Blame, Refusal, Row};
use crate::route::Route;

/// What a request has cost so far. Dropped without an answer, its client has left.
pub struct Account {
    record: AccessRecord,
    started: Instant,
    route: Option<Rc<Route>>,
    /// The right to run, given back when the response's body has ended.
    permits: Option<Permits>,
    received: Option<Rc<Cell<u64>>>,
    recorder: Rc<Recorder>,
}

/// Where a thread's accounts are written when they are closed.
pub struct Recorder {
    pub log: Option<Rc<ThreadLog>>,
    pub metrics: Arc<Metrics>,
}

impl Account {
    /// Boxed from the start: it is large, and goes with the response in the end.
    pub fn open(node: &Node, request: &Request) -> Box<Self> {
        let client = node.forwarding.client(&request.head);
        Self::new(node, AccessRecord::begin(&request.head, client, node.recorder().log.is_some()))
    }

    /// Of something that was no request.
    pub fn without_request(node: &Node, id: RequestId, conn: &ConnInfo) -> Box<Self> {
        Self::new(node, AccessRecord::without_head(id, conn))
    }

    fn new(node: &Node, mut record: AccessRecord) -> Box<Self> {
        let gone = Refusal::ClientGone.row();
        record.status = gone.status;
        record.refusal = Some(gone.reason);
        Box::new(Self {
            record,
            started: Instant::now(),
            route: None,
            permits: None,
            received: None,
            recorder: node.recorder(),
        })
    }

    pub fn id(&self) -> RequestId {
        self.record.id
    }

    pub fn belongs_to(&mut self, route: &Rc<Route>) {
        self.record.site = Some(Arc::clone(&route.site));
        self.route = Some(Rc::clone(route));
    }

    pub fn route(&self) -> Option<&Route> {
        self.route.as_deref()
    }

    /// Counts what arrives of the body.
    pub fn count_body(&mut self, request: &mut Request) {
        if request.body.is_empty() {
            return;
        }
        let received = Rc::new(Cell::new(0));
        let body = std::mem::replace(&mut request.body, RequestBody::empty());
        request.body = RequestBody::new(Counted { body, received: Rc::clone(&received) });
        self.received = Some(received);
    }

    /// It may run, until this account is closed.
    pub fn admitted(&mut self, permits: Permits) {
        if permits.waited {
            self.record.queued = self.started.elapsed();
        }
        self.permits = Some(permits);
    }

    /// The backend has begun to answer.
    pub fn backend_answered(&mut self) {
        self.record.backend = self.started.elapsed().saturating_sub(self.record.queued);
    }

    pub fn refused(&mut self, refusal: &Refusal, row: &Row) {
        self.record.refusal = Some(row.reason);
        if row.blame != Blame::Client {
            let site = self.record.site.as_ref().map_or("-", |site| site.name.as_str());
            tracing::warn!(code = %row.code, site, request = %self.record.id, "{refusal}");
        }
    }

    /// Goes with the response from here on.
    pub fn answer(mut self: Box<Self>, mut response: Response) -> Response {
        self.record.status = response.status;
        if self.record.refusal == Some(Refusal::ClientGone.row().reason) && response.status.as_u16() != 499 {
            self.record.refusal = None;
        }
        response.receipt = Some(self);
        response
    }
}

impl Receipt for Account {
    fn sent(&mut self, bytes: u64, complete: bool) {
        self.record.bytes_out = bytes;
        if !complete && self.record.refusal.is_none() {
            self.record.refusal = Some("broken_off");
        }
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.record.took = self.started.elapsed();
        if let Some(received) = &self.received {
            self.record.bytes_in = received.get();
        }
        self.recorder.metrics.request(&self.record);
        if let Some(log) = &self.recorder.log {
            self.record.started = SystemTime::now() - self.record.took;
            log.write(&self.record);
        }
    }
}

struct Counted {
    body: RequestBody,
    received: Rc<Cell<u64>>,
}

impl Body for Counted {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        if let Poll::Ready(Some(Ok(frame))) = &polled
            && let Some(data) = frame.data_ref()
        {
            self.received.set(self.received.get() + data.len() as u64);
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
