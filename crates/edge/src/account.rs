//! The account of one request: opened when it arrives, written to log and counters when its body has gone and what its
//! programs used is known.
//!
//! Not here: the forms of the log (`access_log`), the counters (`metrics`).

use std::cell::{Cell, OnceCell, RefCell};
use std::net::IpAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use http::StatusCode;
use http::header::SET_COOKIE;
use http_body::{Body, Frame, SizeHint};
use ipnet::IpNet;
use nagaya_admission::Prediction;
use nagaya_base::{Code, RequestId};
use nagaya_cmdb::cell::Confinement;
use nagaya_cmdb::instance::Wake;
use nagaya_keeper::client::BoostGuard;

use crate::access_log::{AccessRecord, More, ThreadLog, Used, Woken};
use crate::admission::{Lane, Permit, take_away};
use crate::forward;
use crate::instances::Hold;
use crate::message::{BodyError, ConnInfo, Receipt, Request, RequestBody, Response, ResponseBody};
use crate::metrics::Metrics;
use crate::node::Node;
use crate::peers::carry::Lost;
use crate::peers::fields;
use crate::place::{Passed, Relocated, Retries, Stint, wait};
use crate::receipt::{self, Disclosure, Figures, Ring};
use crate::refusal::{Blame, Refusal, Row};
use crate::route::Route;
use crate::rules::Ruling;
use crate::shared::Shared;
use crate::stay::Stay;

const CODE_BAD_CLIENT: Code = Code(433);

/// Rule files that are remembered as having decided about one request.
const RULED_BY_MAX: usize = 16;

/// Records kept as blanks of later requests, per thread: about as many requests as run at once and are forgotten.
const BLANKS_MAX: usize = 64;

/// What a request has cost so far. Dropped without an answer, its client has left.
pub struct Account {
    /// `None` once it is closed.
    record: Option<Box<AccessRecord>>,
    route: Option<Rc<Route>>,
    /// What its backend holds.
    working: Working,
    /// The same, once the answer is taken in apart from its sending.
    lent: Option<Rc<Release>>,
    /// For learning how long requests run, once the answer is complete.
    ended: Option<Ended>,
    /// A cookie the client need not keep any more.
    cookie: Option<String>,
    received: Option<Rc<Cell<u64>>>,
    /// What the operator's rules decided; none where there are no rules.
    ruling: Option<Box<Ruling>>,
    /// Made when a rule, a limit or a program concerns the request.
    stay: OnceCell<Rc<Stay>>,
    /// Its right to be served here, where its site is placed.
    stint: Option<Stint>,
    retries: Retries,
    /// Until its site has a place and is awake there.
    wait: Option<wait::Wait>,
    /// Whether the node that answers it is lost in the middle of that.
    lost: Option<Lost>,
    /// Another node has sent it here, and is told what became of it.
    is_carried: bool,
    /// The client is told its receipt.
    disclosed: bool,
    recorder: Rc<Recorder>,
}

/// What a backend holds while it works for a request.
#[derive(Default)]
struct Working {
    /// The right to run.
    permit: Option<Permit>,
    /// Keeps the site's instance awake.
    hold: Option<Rc<Hold>>,
    /// Keeps limits of that instance higher.
    boost: Option<BoostGuard>,
}

impl Working {
    /// Gives all of it back. Returns how long it ran, if `is_throttled`: its programs may have been slowed down.
    fn end(self, (begun, queued): (Instant, Duration), is_whole: bool, is_throttled: bool) -> Option<Ended> {
        let mut permit = self.permit?;
        if !is_throttled && !permit.is_timed() {
            return None;
        }
        let service = begun.elapsed().saturating_sub(queued);
        permit.ended(service, is_whole);
        is_throttled.then(|| Ended { lane: Arc::clone(permit.lane()), service })
    }
}

/// How long a request ran until its answer was complete, for its lane.
struct Ended {
    lane: Arc<Lane>,
    service: Duration,
}

/// What a backend holds, in the hands of whoever takes in its answer.
pub struct Release {
    working: RefCell<Working>,
    times: (Instant, Duration),
    is_throttled: bool,
    is_error: bool,
    ended: RefCell<Option<Ended>>,
    /// What its instance had waited for databases when the answer was complete.
    database: Cell<Option<Duration>>,
}

impl Release {
    #[cfg(test)]
    pub fn of_nothing() -> Rc<Self> {
        Rc::new(Self {
            working: RefCell::default(),
            times: (Instant::now(), Duration::ZERO),
            is_throttled: false,
            is_error: false,
            ended: RefCell::default(),
            database: Cell::new(None),
        })
    }

    /// What its instance has waited for databases, until now or until its answer was complete.
    fn database_time(&self) -> Option<Duration> {
        let working = self.working.borrow();
        self.database.get().or_else(|| working.hold.as_ref()?.database_time())
    }

    /// The backend has said all, or broken off. Only the first call counts.
    pub fn end(&self, is_whole: bool) {
        let working = self.working.take();
        if let Some(hold) = &working.hold {
            self.database.set(hold.database_time());
        }
        if let Some(ended) = working.end(self.times, is_whole && !self.is_error, self.is_throttled) {
            *self.ended.borrow_mut() = Some(ended);
        }
    }
}

/// Where a thread's accounts are written when they are closed.
pub struct Recorder {
    pub log: Option<Rc<ThreadLog>>,
    pub metrics: Arc<Metrics>,
    ring: Arc<Ring>,
    /// How many receipts the ring keeps.
    keep: usize,
    #[expect(clippy::vec_box, reason = "records move between requests and rings without being copied")]
    blanks: RefCell<Vec<Box<AccessRecord>>>,
    node: Rc<str>,
    /// Clients that are told their receipts.
    allow: Vec<IpNet>,
}

impl Recorder {
    /// The calling thread's, with the settings as they are now. Call it inside a `LocalSet`.
    pub fn new(shared: &Shared) -> Rc<Self> {
        let options = shared.options();
        Rc::new(Self {
            log: shared.log().map(|log| log.for_thread(&options.node)),
            metrics: Arc::clone(&shared.metrics),
            ring: shared.receipts.for_thread(),
            keep: options.receipts.keep,
            blanks: RefCell::default(),
            node: options.node.as_str().into(),
            allow: allowed(&options.receipts.allow),
        })
    }

    /// Whether the edge measures its own time on requests.
    pub fn measures(&self) -> bool {
        self.keep > 0
    }

    fn is_allowed(&self, client: IpAddr) -> bool {
        self.allow.iter().any(|network| network.contains(&client))
    }

    fn blank(&self) -> Option<Box<AccessRecord>> {
        self.blanks.borrow_mut().pop()
    }

    /// Says everywhere what became of a request that came so long ago.
    fn close(&self, mut record: Box<AccessRecord>, age: Duration) {
        self.metrics.request(&record);
        if let Some(log) = &self.log {
            record.started = SystemTime::now() - age;
            log.write(&record);
        }
        // The memory of a connection is not kept for the sake of what only the log says.
        record.let_go();
        if let Some(blank) = self.ring.push(record, self.keep) {
            let mut blanks = self.blanks.borrow_mut();
            if blanks.len() < BLANKS_MAX {
                blanks.push(blank);
            }
        }
    }
}

fn allowed(networks: &[String]) -> Vec<IpNet> {
    let read = |text: &String| {
        let network = forward::network(text);
        if network.is_none() {
            tracing::error!(
                "{CODE_BAD_CLIENT}: '{text}' in receipts.allow is not an address or a network like 192.0.2.0/24; no client gets receipts because of it"
            );
        }
        network
    };
    networks.iter().filter_map(read).collect()
}

impl Account {
    /// Boxed from the start: it goes with the response in the end.
    pub fn open(node: &Node, request: &Request) -> Box<Self> {
        let client = node.forwarding.client(&request.head);
        let recorder = node.recorder();
        let mut record = recorder
            .blank()
            .unwrap_or_else(|| Box::new(AccessRecord::without_head(request.head.id, &request.head.conn)));
        record.begin(&request.head, client, recorder.log.is_some());
        let mut account = Self::new(recorder, record);
        if let Some(carried) = &request.head.conn.carried {
            account.is_carried = true;
            account.retries = Retries::new(Some(carried.retries));
        }
        account
    }

    /// Of something that was no request.
    pub fn without_request(node: &Node, id: RequestId, conn: &ConnInfo) -> Box<Self> {
        Self::new(node.recorder(), Box::new(AccessRecord::without_head(id, conn)))
    }

    fn new(recorder: Rc<Recorder>, mut record: Box<AccessRecord>) -> Box<Self> {
        let gone = Refusal::ClientGone.row();
        record.status = gone.status;
        record.refusal = Some(gone.reason);
        Box::new(Self {
            disclosed: recorder.is_allowed(record.client),
            record: Some(record),
            route: None,
            working: Working::default(),
            lent: None,
            ended: None,
            cookie: None,
            received: None,
            ruling: None,
            stay: OnceCell::new(),
            stint: None,
            retries: Retries::new(None),
            wait: None,
            lost: None,
            is_carried: false,
            recorder,
        })
    }

    pub(crate) fn record(&self) -> &AccessRecord {
        self.record.as_ref().expect("it is closed by being dropped only")
    }

    fn record_mut(&mut self) -> &mut AccessRecord {
        self.record.as_mut().expect("it is closed by being dropped only")
    }

    fn more(&mut self) -> &mut More {
        self.record_mut().more.get_or_insert_default()
    }

    pub fn id(&self) -> RequestId {
        self.record().id
    }

    pub fn belongs_to(&mut self, route: &Rc<Route>) {
        self.record_mut().site = Some(Arc::clone(&route.site));
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

    pub fn set_ruling(&mut self, ruling: Box<Ruling>) {
        self.ruling = Some(ruling);
    }

    pub fn take_ruling(&mut self) -> Option<Box<Ruling>> {
        self.ruling.take()
    }

    pub fn ruling(&self) -> Option<&Ruling> {
        self.ruling.as_deref()
    }

    pub fn ruling_mut(&mut self) -> Option<&mut Ruling> {
        self.ruling.as_deref_mut()
    }

    /// Where its programs are to run, and which limits hold for it. Before it runs.
    pub fn confine(&mut self, confinement: Arc<Confinement>) {
        let stay = Stay::of(confinement, self.disclosed);
        // Its body may have been held back before.
        if let Some(before) = self.stay.get() {
            stay.add_paced(Duration::from_micros(before.paced_us()));
        }
        self.stay = OnceCell::from(stay);
    }

    /// Its stay in its cell: as it was confined, or else in a cell of its own without limits of its own.
    pub fn stay(&self) -> Rc<Stay> {
        Rc::clone(self.stay.get_or_init(|| Stay::of(Confinement::default(), self.disclosed)))
    }

    /// The stay, if a rule, a limit or a program made one.
    pub fn confined(&self) -> Option<&Rc<Stay>> {
        self.stay.get()
    }

    /// So long the rules took, all phases together.
    pub fn ruled(&mut self, took: Duration) {
        self.record_mut().ruled += took;
    }

    /// This rule file had something to say.
    pub fn ruled_by(&mut self, file: &Arc<str>) {
        let files = &mut self.more().ruled_by;
        if files.len() < RULED_BY_MAX && !files.contains(file) {
            files.push(Arc::clone(file));
        }
    }

    /// It waits in the line that a rule named.
    pub fn in_lane(&mut self, lane: &str) {
        self.more().lane = Some(lane.into());
    }

    /// It may run, until its answer is complete.
    pub fn admitted(&mut self, permit: Permit, waited: Option<Prediction>) {
        if let Some(prediction) = waited {
            self.more().predicted = prediction.wait;
            let record = self.record_mut();
            record.queued = record.begun.elapsed().saturating_sub(record.ruled);
        }
        self.working.permit = Some(permit);
    }

    /// The client's cookie of this name is to be taken away.
    pub fn take_cookie(&mut self, name: String) {
        self.cookie = Some(name);
    }

    /// It needs its site's instance, until its answer is complete.
    pub fn need(&mut self, hold: impl FnOnce() -> Hold) -> Rc<Hold> {
        Rc::clone(self.working.hold.get_or_insert_with(|| Rc::new(hold())))
    }

    /// Limits of its site's instance are higher because of it, until its answer is complete.
    pub fn set_boost(&mut self, boost: Option<BoostGuard>) {
        self.working.boost = boost;
    }

    /// What it needed the instance for will not happen here.
    pub fn needs_no_instance(&mut self) {
        (self.working.hold, self.working.boost) = (None, None);
        if let Some(lent) = self.lent.take() {
            lent.end(false);
        }
    }

    /// It is to be served here, where its site is placed.
    pub fn stay_here(&mut self, stint: Stint) {
        self.stint = Some(stint);
    }

    pub fn stint(&self) -> Option<Stint> {
        self.stint.clone()
    }

    /// How often it may still be sent again.
    pub fn retries(&self) -> &Retries {
        &self.retries
    }

    /// It waits for a place from now on, if it does not yet: for how long as was thought then.
    pub fn waits_for_place(&mut self, begin: impl FnOnce() -> wait::Wait) -> Option<Duration> {
        self.wait.get_or_insert_with(begin).predicted
    }

    /// It has asked for another place for its site.
    pub fn relocated(&mut self, relocated: Relocated) {
        self.more().relocated.push(relocated);
    }

    /// How often it has.
    pub fn relocations(&self) -> usize {
        self.record().more.as_ref().map_or(0, |more| more.relocated.len())
    }

    /// It waited so long for this node's authority.
    pub fn was_held(&mut self, time: Duration) {
        self.more().held += time;
    }

    /// Its site's instance was ready, and it waited so long until nobody else could serve the site.
    pub fn was_fenced(&mut self, time: Duration) {
        if !time.is_zero() {
            self.more().fence += time;
        }
    }

    pub fn held(&self) -> Duration {
        self.record().more.as_ref().map_or(Duration::ZERO, |more| more.held)
    }

    /// Another node has begun to answer it, and may be lost before it has ended.
    pub fn passed(&mut self, passed: Passed, lost: Lost) {
        self.more().passed = Some(passed);
        self.lost = Some(lost);
        self.backend_answered();
    }

    /// It waited so long for this wake of its site's instance.
    pub fn woken(&mut self, wake: Arc<Wake>, waited: Duration) {
        let before = self.record().woken().map_or(Duration::ZERO, |woken| woken.waited);
        self.more().woken = Some(Woken { wake, waited: before + waited });
    }

    /// The backend has begun to answer.
    pub fn backend_answered(&mut self) {
        let paced = Duration::from_micros(self.stay.get().map_or(0, |stay| stay.paced_us()));
        let record = self.record_mut();
        // What comes before it, and what its end was held back for, are told by themselves.
        let woken = record.woken().map_or(Duration::ZERO, |woken| woken.waited);
        let fence = record.more.as_ref().map_or(Duration::ZERO, |more| more.fence);
        let apart = record.queued + record.ruled + woken + fence + paced;
        record.backend = record.begun.elapsed().saturating_sub(apart);
    }

    pub fn refused(&mut self, refusal: &Refusal, row: &Row) {
        let record = self.record_mut();
        (record.refusal, record.code) = (Some(row.reason), Some(row.code));
        if row.blame != Blame::Client {
            let record = self.record();
            let site = record.site.as_ref().map_or("-", |site| site.name.as_str());
            tracing::warn!(code = %row.code, site, request = %record.id, "{refusal}");
            self.more().fault = Some(refusal.to_string().into());
        }
    }

    /// Lends out what its backend holds, to whoever takes in the answer.
    pub fn lend(&mut self, status: StatusCode) -> Rc<Release> {
        let record = self.record();
        let release = Rc::new(Release {
            times: (record.begun, record.queued),
            is_throttled: self.stay.get().is_some(),
            is_error: status.is_server_error(),
            working: RefCell::new(std::mem::take(&mut self.working)),
            ended: RefCell::default(),
            database: Cell::new(None),
        });
        self.lent = Some(Rc::clone(&release));
        release
    }

    /// Goes with the response from here on.
    pub fn answer(mut self: Box<Self>, mut response: Response) -> Response {
        self.note_database();
        let record = self.record_mut();
        record.status = response.status;
        if record.refusal == Some(Refusal::ClientGone.row().reason) && response.status.as_u16() != 499 {
            record.refusal = None;
        }
        let is_answered = record.refusal.is_none();
        if let Some(spent) = receipt::spent_on_answer() {
            record.edge_cpu = spent;
        }
        if let Some(wait) = self.wait.take()
            && is_answered
            && let Some(more) = &self.record().more
        {
            wait.answered(more);
        }
        // A file, and what is in memory, needs nobody but the client.
        if self.lent.is_none() && !matches!(response.body, ResponseBody::Stream(_) | ResponseBody::Tunnel(_))
        {
            self.ended = self.end_work();
        }
        if let Some(name) = self.cookie.take() {
            response.headers.append(SET_COOKIE, take_away(&name));
        }
        if self.is_carried {
            self.tell_sender(&mut response);
        }
        if self.disclosed
            && let Some(more) = &self.record().more
        {
            receipt::tell_moves(&mut response, more.relocated.iter());
        }
        let was_passed = self.record().more.as_ref().is_some_and(|more| more.passed.is_some());
        if was_passed {
            self.tell_hop(&mut response);
        } else if self.disclosed {
            self.disclose(&mut response);
        } else if !self.record().queued.is_zero() {
            // Whoever was held may know it.
            let record = self.record();
            let predicted = record.more.as_ref().and_then(|more| more.predicted);
            receipt::tell_queued(&mut response, record.queued, predicted);
        }
        response.receipt = Some(self);
        response
    }
}

impl Account {
    /// What its site's instance has waited for databases until now, as far as it is this request's doing.
    fn note_database(&mut self) {
        let waited = match (&self.lent, &self.working.hold) {
            (Some(lent), _) => lent.database_time(),
            (None, Some(hold)) => hold.database_time(),
            (None, None) => return,
        };
        if waited.is_some() || self.record().more.is_some() {
            self.more().database = waited;
        }
    }

    /// Gives back what its backend held.
    fn end_work(&mut self) -> Option<Ended> {
        let record = self.record();
        let is_whole = record.refusal.is_none() && !record.status.is_server_error();
        let times = (record.begun, record.queued);
        std::mem::take(&mut self.working).end(times, is_whole, self.stay.get().is_some())
    }

    /// The same at its very end, if nobody did before. What was lent comes back unless its client has left.
    fn ended(&mut self) -> Option<Ended> {
        let Some(lent) = self.lent.take() else { return self.ended.take().or_else(|| self.end_work()) };
        lent.end(false);
        if let Some(waited) = lent.database.take() {
            self.more().database = Some(waited);
        }
        lent.ended.take()
    }

    /// The node that answered it was lost before it had said all.
    fn note_lost(&mut self) {
        let why = self.lost.as_ref().and_then(|lost| lost.why()).map(ToOwned::to_owned);
        let node = self.record().more.as_ref().and_then(|more| Some(more.passed.as_ref()?.node.clone()));
        if let Some((why, node)) = why.zip(node) {
            let refusal = Refusal::AnswerLost { node, why };
            self.refused(&refusal, &refusal.row());
        }
    }

    /// What the node that sent the request here writes into its log.
    fn tell_sender(&self, response: &mut Response) {
        let figures = Figures::of(self.record());
        let turn = self.record().more.as_ref().map(|more| wait::turn(more).as_micros());
        let turn = turn.map(|us| (wait::TURN, u64::try_from(us).unwrap_or(u64::MAX)));
        fields::serve(&mut response.headers, &self.recorder.node, figures.named().chain(turn));
    }

    /// The receipt is the other node's, and passes as it is; the client is told of the hop beside it.
    fn tell_hop(&self, response: &mut Response) {
        if !self.disclosed {
            return;
        }
        if let Some(passed) = self.record().more.as_ref().and_then(|more| more.passed.as_ref()) {
            receipt::tell_hop(response, &passed.node, passed.took);
        }
    }

    /// Tells the client what is known so far, and what will be known at the end.
    fn disclose(&mut self, response: &mut Response) {
        let now = Instant::now();
        let record = self.record_mut();
        record.edge_cpu = receipt::spent(now).unwrap_or_default();
        let record = self.record();
        let mut figures = Figures::of(record);
        let mut more = More::default();
        if let Some(stay) = self.stay.get() {
            stay.tell(&mut more);
        }
        figures.update(&more, now.saturating_duration_since(record.begun));
        let (id, node, stay) = (record.id, Rc::clone(&self.recorder.node), self.stay.get().cloned());
        let wake = record.woken().map(|woken| Arc::clone(&woken.wake));
        Disclosure { id, node, begun: record.begun, figures, wake, stay }.put(response);
    }
}

impl Receipt for Account {
    fn broke(&mut self, why: &BodyError) {
        let refusal = match why {
            BodyError::Backend(what) => Refusal::AnswerBroken(what.clone()),
            BodyError::File(error) => Refusal::AnswerBroken(error.to_string()),
            // A lost node is told by itself, and a client that left or sent nonsense is no fault of the answer.
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

impl Drop for Account {
    fn drop(&mut self) {
        if self.record.is_some() {
            self.note_database();
            self.note_lost();
        }
        let ended = self.record.is_some().then(|| self.ended()).flatten();
        let Some(mut record) = self.record.take() else { return };
        let now = Instant::now();
        record.took = now.saturating_duration_since(record.begun);
        // Where the body is sent elsewhere (HTTP/2), only the time until the answer is known.
        record.edge_cpu = receipt::spent(now).unwrap_or(record.edge_cpu);
        if let Some(received) = &self.received {
            record.bytes_in = received.get();
        }
        let recorder = Rc::clone(&self.recorder);
        let ruling = self.ruling.take();
        let Some(stay) = self.stay.take() else {
            if let Some(ruling) = ruling {
                ruling.close(&record);
            }
            let age = record.took;
            return recorder.close(record, age);
        };
        let tenant = self.route.as_ref().map(|route| Arc::clone(&route.tenant));
        // The line is written when it is known what the programs used; the client does not wait for it.
        Rc::clone(&stay).when_paid(move || {
            let more = record.more.get_or_insert_default();
            more.tenant = tenant;
            stay.hand_over(more);
            if let (Some(ended), Used::Known(used)) = (ended, &more.used) {
                ended.lane.throttled(used.throttled_us, ended.service);
            }
            if let Some(ruling) = ruling {
                ruling.close(&record);
            }
            let age = record.begun.elapsed();
            recorder.close(record, age);
        });
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
