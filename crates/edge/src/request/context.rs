//! Holds the resources and the figures of one request, from its arrival on. The figures go to log
//! and counters when the body is gone and the usage of its programs is known.
//!
//! Not here: the formats of the log (`access_log`), the counters (`metrics`).

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::header::{ORIGIN, SET_COOKIE};
use http::{HeaderValue, StatusCode};
use http_body_util::BodyExt;
use nagaya_base::RequestId;

use crate::admission::admit::Admitted;
use crate::admission::permit::Permit;
use crate::admission::site_lane::SiteLane;
use crate::backends::exchange::HeldInstance;
use crate::backends::read_ahead::BackendWork;
use crate::cluster::peers::peer_exchange::LostNode;
use crate::cluster::retry_budget::RetryBudget;
use crate::cluster::serving_epoch::ServingEpoch;
use crate::cluster::wait_estimate;
use crate::http::message::{BodyError, ConnInfo, Request, RequestBody, Response, ResponseBody, SendObserver};
use crate::http::proxy_headers::ForwardingRules;
use crate::http::refusal::{Refusal, RefusalBlame, RefusalRow};
use crate::http::{meter, peer_fields};
use crate::record::access_record::{AccessDetails, AccessRecord, ForwardedTo, ProgramUsage};
use crate::record::execution::ExecutionSlot;
use crate::record::receipt::disclose;
use crate::record::receipt::disclose::ReceiptDisclosure;
use crate::record::receipt::figures::ReceiptFigures;
use crate::record::recorder::RequestRecorder;
use crate::record::turnaround::TurnaroundSource;
use crate::request::work::{BackendHolds, LentHolds, ServiceSample, WorkEnd};
use crate::rules;
use crate::rules::AppliedVerdict;

/// Holds a request's resources on its way, and all that is known about the request so far. If it is
/// dropped without an answer, the client has left.
pub struct RequestContext {
    /// `None` once it was handed to the recorder.
    record: Option<Box<AccessRecord>>,
    route: Option<Rc<SiteLane>>,
    /// Guards that its backend holds.
    pub work: BackendHolds,
    /// The same guards, once the answer is taken in apart from its sending.
    lent: Option<Rc<LentHolds>>,
    /// Sample for the service times of the lane, once the answer is complete.
    ended: Option<ServiceSample>,
    client: AskingClient,
    received: Option<Rc<Cell<u64>>>,
    /// Result of the operator's rules; `None` if there are no rules.
    pub applied: Option<Box<AppliedVerdict>>,
    /// Set when a rule, a limit or a program concerns the request.
    pub execution: ExecutionSlot,
    /// The right to be served here, if its site is placed.
    pub serving: Option<ServingEpoch>,
    /// How often it may still be sent again.
    pub retries: RetryBudget,
    /// Set until its site has a place and is awake there.
    wait: Option<wait_estimate::PlacementWait>,
    /// Tells whether the answering node is lost in the middle of the answer.
    lost: Option<LostNode>,
    recorder: Rc<RequestRecorder>,
}

/// The requesting client, and additions to its response.
#[derive(Default)]
struct AskingClient {
    /// Origin of the requesting script, if it belongs to another site.
    origin: Option<HeaderValue>,
    /// Cookies that the client is to keep or to delete.
    cookies: Vec<HeaderValue>,
    /// Another node has forwarded the request and gets a report of the outcome.
    is_carried: bool,
}

impl RequestContext {
    /// Opens the context of a request. It is boxed from the start, because it ends up in the
    /// response.
    pub fn open(recorder: Rc<RequestRecorder>, forwarding: &ForwardingRules, request: &Request) -> Box<Self> {
        let client = forwarding.client(&request.head);
        let mut record = recorder
            .blank()
            .unwrap_or_else(|| Box::new(AccessRecord::without_head(request.head.id, &request.head.conn)));
        record.begin(&request.head, client, recorder.log.is_some());
        let mut context = Self::new(recorder, record);
        context.client.origin = request.head.headers.get(ORIGIN).cloned();
        if let Some(carried) = &request.head.conn.carried {
            context.client.is_carried = true;
            context.retries = RetryBudget::new(Some(carried.retries));
        }
        context
    }

    /// Opens a context for input that was no request.
    pub fn without_request(recorder: Rc<RequestRecorder>, id: RequestId, conn: &ConnInfo) -> Box<Self> {
        Self::new(recorder, Box::new(AccessRecord::without_head(id, conn)))
    }

    fn new(recorder: Rc<RequestRecorder>, mut record: Box<AccessRecord>) -> Box<Self> {
        let gone = Refusal::ClientGone.row();
        record.status = gone.status;
        record.refusal = Some(gone.reason);
        Box::new(Self {
            client: AskingClient::default(),
            execution: ExecutionSlot::new(recorder.is_allowed(record.client)),
            record: Some(record),
            route: None,
            work: BackendHolds::default(),
            lent: None,
            ended: None,
            received: None,
            applied: None,
            serving: None,
            retries: RetryBudget::new(None),
            wait: None,
            lost: None,
            recorder,
        })
    }

    pub fn record(&self) -> &AccessRecord {
        self.record.as_ref().expect("it is closed by being dropped only")
    }

    pub fn record_mut(&mut self) -> &mut AccessRecord {
        self.record.as_mut().expect("it is closed by being dropped only")
    }

    /// Returns the verdict of the rules, and the figures that they add to.
    pub fn verdict_and_record(&mut self) -> (&mut Option<Box<AppliedVerdict>>, &mut AccessRecord) {
        let record = self.record.as_mut().expect("it is closed by being dropped only");
        (&mut self.applied, record)
    }

    /// Returns the parts that a backend gets, each by itself.
    pub fn split(&mut self) -> ContextParts<'_> {
        ContextParts {
            applied: self.applied.as_deref(),
            serving: self.serving.as_ref(),
            retries: &self.retries,
            execution: &self.execution,
            held: &mut self.work.instance,
            record: self.record.as_mut().expect("it is closed by being dropped only"),
        }
    }

    pub fn id(&self) -> RequestId {
        self.record().id
    }

    pub fn belongs_to(&mut self, route: &Rc<SiteLane>) {
        self.record_mut().site = Some(Arc::clone(&route.site));
        self.route = Some(Rc::clone(route));
    }

    pub fn origin(&self) -> Option<&HeaderValue> {
        self.client.origin.as_ref()
    }

    pub fn route(&self) -> Option<&SiteLane> {
        self.route.as_deref()
    }

    /// Counts the bytes of the body as they arrive.
    pub fn count_body(&mut self, request: &mut Request) {
        if request.body.is_empty() {
            return;
        }
        let received = Rc::new(Cell::new(0));
        let body = std::mem::replace(&mut request.body, RequestBody::empty());
        let counter = Rc::clone(&received);
        request.body = RequestBody::new(body.inspect_frame(move |frame| {
            let len = frame.data_ref().map_or(0, |data| data.len() as u64);
            counter.set(counter.get() + len);
        }));
        self.received = Some(received);
    }

    /// Notes that the request may run now, how long it waited, and the cookies for its client.
    /// Returns the right to run.
    pub fn note_admission(&mut self, admitted: Admitted) -> Permit {
        let Admitted { permit, waited, cookies } = admitted;
        self.client.cookies.extend(cookies);
        if let Some(prediction) = waited {
            let record = self.record_mut();
            record.details().predicted = prediction.wait;
            record.queued = record.begun.elapsed().saturating_sub(record.ruled);
        }
        permit
    }

    /// Returns whether it waited in line before it could run.
    pub fn has_waited(&self) -> bool {
        !self.record().queued.is_zero()
    }

    /// Releases the instance, because the request does not run here.
    pub fn needs_no_instance(&mut self) {
        self.work.instance = HeldInstance::default();
        if let Some(lent) = self.lent.take() {
            lent.end(false);
        }
    }

    /// Starts the wait for a place, unless it has started. Returns the wait that was predicted
    /// then.
    pub fn waits_for_place(
        &mut self,
        begin: impl FnOnce() -> wait_estimate::PlacementWait,
    ) -> Option<Duration> {
        self.wait.get_or_insert_with(begin).predicted
    }

    /// How often it has asked for another place for its site.
    pub fn relocations(&self) -> usize {
        self.record().more.as_ref().map_or(0, |more| more.relocated.len())
    }

    /// Records that another node has begun to answer. That node may be lost before the answer
    /// ends.
    pub fn passed(&mut self, passed: ForwardedTo, lost: LostNode) {
        self.record_mut().details().passed = Some(passed);
        self.lost = Some(lost);
        self.backend_answered();
    }

    /// Records that the backend has begun to answer.
    pub fn backend_answered(&mut self) {
        let paced = self.execution.paced();
        self.record_mut().backend_answered(paced);
    }

    pub fn refused(&mut self, refusal: &Refusal, row: &RefusalRow) {
        let record = self.record_mut();
        (record.refusal, record.code) = (Some(row.reason), Some(row.code));
        if row.blame != RefusalBlame::Client {
            let site = record.site.as_ref().map_or("-", |site| site.name.as_str());
            tracing::warn!(code = %row.code, site, request = %record.id, "{refusal}");
            record.details().fault = Some(refusal.to_string().into());
        }
    }

    /// Changes the response as the rules set it.
    pub fn apply_rules(&mut self, response: &mut Response) {
        let id = self.id();
        let route = self.route.as_deref().map(|lane| &lane.route);
        rules::on_response(response, self.applied.as_deref_mut(), route, id);
    }

    /// Moves the guards of its backend to the code that takes in the answer.
    pub fn lend(&mut self, status: StatusCode) -> Rc<LentHolds> {
        let times = (self.record().begun, self.record().queued);
        let working = std::mem::take(&mut self.work);
        let execution = self.execution.get().cloned();
        let release = LentHolds::new(self.id(), working, times, execution, status.is_server_error());
        self.lent = Some(Rc::clone(&release));
        release
    }

    /// Attaches the context to the response.
    pub fn answer(mut self: Box<Self>, mut response: Response) -> Response {
        self.note_turnaround();
        let record = self.record_mut();
        record.status = response.status;
        if record.refusal == Some(Refusal::ClientGone.row().reason) && response.status.as_u16() != 499 {
            record.refusal = None;
        }
        let is_answered = record.refusal.is_none();
        if let Some(spent) = meter::spent_on_answer() {
            record.edge_cpu = spent;
        }
        if let Some(wait) = self.wait.take()
            && is_answered
            && let Some(more) = &self.record().more
        {
            wait.answered(more);
        }
        // A file or a body in memory needs no guard, only the client.
        if self.lent.is_none() && !matches!(response.body, ResponseBody::Stream(_) | ResponseBody::Tunnel(_))
        {
            self.ended = self.end_work();
        }
        for cookie in self.client.cookies.drain(..) {
            response.headers.append(SET_COOKIE, cookie);
        }
        if self.client.is_carried {
            self.write_sender(&mut response);
        }
        if self.execution.is_disclosed()
            && let Some(more) = &self.record().more
        {
            disclose::write_moves(&mut response, more.relocated.iter());
        }
        let was_passed = self.record().more.as_ref().is_some_and(|more| more.passed.is_some());
        if was_passed {
            self.write_hop(&mut response);
        } else if self.execution.is_disclosed() {
            self.disclose(&mut response);
        } else if !self.record().queued.is_zero() {
            // A client that was held back may learn it.
            let record = self.record();
            let predicted = record.more.as_ref().and_then(|more| more.predicted);
            disclose::write_queued(&mut response, record.queued, predicted);
        }
        response.receipt = Some(self);
        response
    }
}

impl RequestContext {
    /// Records how its time in its site's instance is split by databases, as far as that is known.
    fn note_turnaround(&mut self) {
        let split = match (&self.lent, &self.work.instance.lease) {
            (Some(lent), _) => lent.turnaround(),
            (None, Some(lease)) => lease.turnaround(self.id()),
            (None, None) => return,
        };
        if split.is_some() || self.record().more.is_some() {
            self.record_mut().details().turnaround = split;
        }
    }

    /// Gives back the guards of its backend.
    fn end_work(&mut self) -> Option<ServiceSample> {
        let record = self.record();
        let end = WorkEnd::of(record.refusal.is_none(), record.status.is_server_error());
        let times = (record.begun, record.queued);
        std::mem::take(&mut self.work).end(times, end, self.execution.get().map(Rc::as_ref))
    }

    /// Ends the work at the very end, unless that was done before. Lent guards come back unless
    /// the client has left.
    fn ended(&mut self) -> Option<ServiceSample> {
        let Some(lent) = self.lent.take() else { return self.ended.take().or_else(|| self.end_work()) };
        lent.end(false);
        if let Some(split) = lent.take_turnaround() {
            self.record_mut().details().turnaround = Some(split);
        }
        lent.take_ended()
    }

    /// Records that the answering node was lost before the answer ended.
    fn note_lost(&mut self) {
        let why = self.lost.as_ref().and_then(|lost| lost.why()).map(ToOwned::to_owned);
        let node = self.record().more.as_ref().and_then(|more| Some(more.passed.as_ref()?.node.clone()));
        if let Some((why, node)) = why.zip(node) {
            let refusal = Refusal::AnswerLost { node, why };
            self.refused(&refusal, &refusal.row());
        }
    }

    /// Adds the fields that the forwarding node writes into its log.
    fn write_sender(&self, response: &mut Response) {
        let figures = ReceiptFigures::of(self.record());
        let turn = self.record().more.as_ref().map(|more| wait_estimate::turn(more).as_micros());
        let turn = turn.map(|us| (wait_estimate::TURN, u64::try_from(us).unwrap_or(u64::MAX)));
        peer_fields::serve(&mut response.headers, &self.recorder.node, figures.named().chain(turn));
    }

    /// Adds the hop to the fields for the client. The receipt of the other node passes unchanged.
    fn write_hop(&self, response: &mut Response) {
        if !self.execution.is_disclosed() {
            return;
        }
        if let Some(passed) = self.record().more.as_ref().and_then(|more| more.passed.as_ref()) {
            disclose::write_hop(response, &passed.node, passed.took);
        }
    }

    /// Adds the receipt to the response: known figures now, the others at the end.
    fn disclose(&mut self, response: &mut Response) {
        let now = Instant::now();
        let record = self.record_mut();
        record.edge_cpu = meter::spent(now).unwrap_or_default();
        let record = self.record();
        let mut figures = ReceiptFigures::of(record);
        let mut more = AccessDetails::default();
        if let Some(execution) = self.execution.get() {
            execution.tell(&mut more);
        }
        figures.update(&more, now.saturating_duration_since(record.begun));
        let (id, node, execution) =
            (record.id, Rc::clone(&self.recorder.node), self.execution.get().cloned());
        let wake = record.woken().map(|woken| Arc::clone(&woken.wake));
        let split = self.lent.clone().map(|lent| -> Rc<dyn TurnaroundSource> { lent });
        ReceiptDisclosure { id, node, begun: record.begun, figures, wake, execution, split }.put(response);
    }
}

impl SendObserver for RequestContext {
    fn broke(&mut self, why: &BodyError) {
        let refusal = match why {
            BodyError::Backend(what) => Refusal::AnswerBroken(what.clone()),
            BodyError::File(error) => Refusal::AnswerBroken(error.to_string()),
            // A lost node is recorded by itself. The answer is not at fault if a client left or
            // sent an invalid body.
            _ => return,
        };
        if self.record().refusal.is_none() {
            self.refused(&refusal, &refusal.row());
        }
    }

    fn sent(&mut self, bytes: u64, complete: bool) {
        let record = self.record_mut();
        record.bytes_out = bytes;
        if !complete && record.refusal.is_none() {
            record.refusal = Some("broken_off");
        }
    }
}

impl Drop for RequestContext {
    fn drop(&mut self) {
        if self.record.is_some() {
            self.note_turnaround();
            self.note_lost();
        }
        let ended = self.record.is_some().then(|| self.ended()).flatten();
        let Some(mut record) = self.record.take() else { return };
        let now = Instant::now();
        record.took = now.saturating_duration_since(record.begun);
        // If the body is sent elsewhere (HTTP/2), only the time until the answer is known.
        record.edge_cpu = meter::spent(now).unwrap_or(record.edge_cpu);
        if let Some(received) = &self.received {
            record.bytes_in = received.get();
        }
        let recorder = Rc::clone(&self.recorder);
        let applied = self.applied.take();
        let Some(execution) = self.execution.take() else {
            if let Some(applied) = applied {
                applied.close(&record);
            }
            let age = record.took;
            return recorder.close(record, age);
        };
        let tenant = self.route.as_ref().map(|route| Arc::clone(&route.tenant));
        // The line is written when the usage of the programs is known. The client does not wait
        // for it.
        Rc::clone(&execution).on_complete(move || {
            let more = record.more.get_or_insert_default();
            more.tenant = tenant;
            execution.hand_over(more);
            if let (Some(ended), ProgramUsage::Known(used)) = (ended, &more.used) {
                ended.lane.throttled(used.throttled_us, ended.service);
            }
            if let Some(applied) = applied {
                applied.close(&record);
            }
            let age = record.begun.elapsed();
            recorder.close(record, age);
        });
    }
}

/// The parts of a request that its backend reads or writes.
pub struct ContextParts<'a> {
    pub applied: Option<&'a AppliedVerdict>,
    pub serving: Option<&'a ServingEpoch>,
    pub retries: &'a RetryBudget,
    pub execution: &'a ExecutionSlot,
    pub held: &'a mut HeldInstance,
    pub record: &'a mut AccessRecord,
}
