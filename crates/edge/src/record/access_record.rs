//! Figures of one request, filled in on its way. They are complete when its body has ended and the
//! usage of its programs is known.
//!
//! Not here: how they are written (`access_log`, `receipt`), how they are counted (`counting`).

use std::net::IpAddr;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant, SystemTime};

use http::header::{REFERER, USER_AGENT};
use http::{HeaderValue, Method, StatusCode, Version};
use nagaya_base::{Code, RequestId};
use nagaya_records::cell::{Boost, Confinement, RequestUsage};
use nagaya_records::instance::WakeReport;
use nagaya_records::{NodeName, PlacementReason, Site, Tenant};
use smallvec::SmallVec;

use crate::http::message::{ConnInfo, RequestHead};
use crate::http::meter;
use crate::record::turnaround::Turnaround;

/// Maximum number of rule files that are recorded as having decided about one request.
const RULED_BY_MAX: usize = 16;

/// Data about one request. It begins with the head, and is filled in on the way. It is complete
/// when the body has ended and the usage of its programs is known.
#[derive(Debug, Clone)]
pub struct AccessRecord {
    pub id: RequestId,
    /// Time when the request arrived.
    pub begun: Instant,
    /// The same as a date; set when the context is closed, where there is a log.
    pub started: SystemTime,
    /// The client: the peer of the connection, or the client that a trusted proxy names.
    pub client: IpAddr,
    pub port: u16,
    /// `None` if the head could not be read.
    pub method: Option<Method>,
    pub version: Version,
    /// Host and target in one allocation. The target begins at `target_at`.
    pub(crate) text: String,
    pub(crate) target_at: usize,
    pub referer: Option<HeaderValue>,
    pub user_agent: Option<HeaderValue>,
    /// `TLSv1_3` and the like. `None` on plain connections.
    pub tls: Option<&'static str>,
    /// Its site, once routed. It also gives tenant and kind of backend.
    pub site: Option<Arc<Site>>,
    pub status: StatusCode,
    /// Bytes of the request's body.
    pub bytes_in: u64,
    /// Bytes of the response's body.
    pub bytes_out: u64,
    /// From the first byte of the request to the end of the response.
    pub took: Duration,
    /// Time waiting for its turn.
    pub queued: Duration,
    /// Time in the rules.
    pub ruled: Duration,
    /// Time in the backend, until the head of its answer.
    pub backend: Duration,
    /// CPU time of this thread for it.
    pub edge_cpu: Duration,
    /// Reason of a refusal and its code, as in `refusal::Row`.
    pub refusal: Option<&'static str>,
    pub code: Option<Code>,
    /// Data that only few requests have.
    pub more: Option<Box<AccessDetails>>,
}

/// Data about a request with a rule, a limit, a program or a wake.
#[derive(Debug, Clone, Default)]
pub struct AccessDetails {
    /// The cell of its programs, as `nagaya cells` shows it.
    pub cell: Option<Arc<str>>,
    /// For an application: whether the cell is the request's own.
    pub cell_of: Option<UsageScope>,
    /// Factor by which limits of its site's application were raised for it.
    pub raised: Boost,
    pub used: ProgramUsage,
    /// Time by which limits delayed its bodies, microseconds.
    pub paced_us: u64,
    /// Predicted wait for its turn, when it got in line.
    pub predicted: Option<Duration>,
    /// The lane that a rule named for it.
    pub lane: Option<Box<str>>,
    /// Its confinement within its site's limits. `None` if there was none.
    pub confinement: Option<Arc<Confinement>>,
    /// The rule files that decided something.
    pub ruled_by: SmallVec<[Arc<str>; 2]>,
    /// Its tenant at that time.
    pub tenant: Option<Arc<Tenant>>,
    /// The wake of its site's instance that it waited for.
    pub woken: Option<WakeWait>,
    /// The other node that answered it.
    pub passed: Option<ForwardedTo>,
    /// The moves of its site that it has requested.
    pub relocated: Vec<Relocation>,
    /// Time waited for this node's lease.
    pub held: Duration,
    /// Time waited, with the instance ready, for the previous node's lease to expire.
    pub fence: Duration,
    /// How its time in its site's instance is split by databases. `None` if that is not known.
    pub turnaround: Option<Turnaround>,
    /// The usual split of its site's requests before it.
    pub usual: Option<Turnaround>,
    /// The fault, if the site or the node was to blame.
    pub fault: Option<Box<str>>,
}

/// The wait of a request for an instance that rested.
#[derive(Debug, Clone)]
pub struct WakeWait {
    /// Shared by all requests of a thread that waited for it.
    pub wake: Arc<WakeReport>,
    /// Time this one waited, without the wait for its turn.
    pub waited: Duration,
}

impl AccessDetails {
    /// Returns its confinement within its site's limits.
    pub fn confinement(&self) -> &Confinement {
        static NOTHING: LazyLock<Confinement> = LazyLock::new(Confinement::default);
        self.confinement.as_deref().unwrap_or(&NOTHING)
    }
}

/// Usage of a request's programs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ProgramUsage {
    /// There was no program.
    #[default]
    Nothing,
    /// There was a program, and its usage was not reported: the keeper ended, or took too long.
    Unknown,
    Known(RequestUsage),
}

/// Duration above which a request is kept longer, so that the delay can be explained.
pub const SLOW: Duration = Duration::from_millis(100);

impl AccessRecord {
    /// Returns the factor by which limits of its application were raised, if they were.
    pub fn raised(&self) -> Option<Boost> {
        self.more.as_ref().map(|more| more.raised).filter(|raised| !raised.is_empty())
    }

    /// Resets the record for a new request. `in_full` includes the data that only a log line
    /// contains. A node without a log does not pay for it.
    pub fn begin(&mut self, head: &RequestHead, client: IpAddr, in_full: bool) {
        let mut text = std::mem::take(&mut self.text);
        text.clear();
        let query = head.query.as_deref();
        text.reserve(head.host.len() + head.path.len() + query.map_or(0, |query| 1 + query.len()));
        text.push_str(&head.host);
        text.push_str(&head.path);
        if let Some(query) = query {
            text.push('?');
            text.push_str(query);
        }
        let field = |name| in_full.then(|| head.headers.get(name).cloned()).flatten();
        *self = Self {
            method: Some(head.method.clone()),
            version: head.version,
            client,
            text,
            target_at: head.host.len(),
            referer: field(REFERER),
            user_agent: field(USER_AGENT),
            ..Self::without_head(head.id, &head.conn)
        };
    }

    /// Returns the record of a request that ended before its head was understood.
    pub fn without_head(id: RequestId, conn: &ConnInfo) -> Self {
        Self {
            id,
            begun: meter::now(),
            started: SystemTime::UNIX_EPOCH,
            client: conn.peer.ip(),
            port: conn.peer.port(),
            method: None,
            version: Version::HTTP_11,
            text: String::new(),
            target_at: 0,
            referer: None,
            user_agent: None,
            tls: conn.tls.as_ref().map(|tls| tls.protocol),
            site: None,
            status: StatusCode::OK,
            bytes_in: 0,
            bytes_out: 0,
            took: Duration::ZERO,
            queued: Duration::ZERO,
            ruled: Duration::ZERO,
            backend: Duration::ZERO,
            edge_cpu: Duration::ZERO,
            refusal: None,
            code: None,
            more: None,
        }
    }

    /// Returns the requested host, in lower case. Empty if there was none.
    pub fn host(&self) -> &str {
        &self.text[..self.target_at]
    }

    /// Returns path and query as sent. Empty if the head could not be read.
    pub fn target(&self) -> &str {
        &self.text[self.target_at..]
    }

    /// Returns the usage of its programs.
    pub fn used(&self) -> ProgramUsage {
        self.more.as_ref().map_or(ProgramUsage::Nothing, |more| more.used)
    }

    /// The wake it waited for.
    pub fn woken(&self) -> Option<&WakeWait> {
        self.more.as_ref()?.woken.as_ref()
    }

    /// Returns the figures that only few requests have. Makes them if there are none yet.
    pub fn details(&mut self) -> &mut AccessDetails {
        self.more.get_or_insert_default()
    }

    /// Records that this rule file decided something.
    pub fn add_rule(&mut self, file: &Arc<str>) {
        let files = &mut self.details().ruled_by;
        if files.len() < RULED_BY_MAX && !files.contains(file) {
            files.push(Arc::clone(file));
        }
    }

    /// Records this wake of its site's instance and the time that the request waited for it.
    pub fn add_wake(&mut self, wake: Arc<WakeReport>, waited: Duration) {
        let before = self.woken().map_or(Duration::ZERO, |woken| woken.waited);
        self.details().woken = Some(WakeWait { wake, waited: before + waited });
    }

    /// Adds time that it waited, with the instance ready, until no other node could serve the
    /// site.
    pub fn add_fence(&mut self, time: Duration) {
        if !time.is_zero() {
            self.details().fence += time;
        }
    }

    /// Adds time that it waited for this node's lease.
    pub fn add_held(&mut self, time: Duration) {
        self.details().held += time;
    }

    /// How long it has waited for this node's authority.
    pub fn held(&self) -> Duration {
        self.more.as_ref().map_or(Duration::ZERO, |more| more.held)
    }

    /// The backend has begun to answer. `paced` is how long its bodies were held back until now.
    pub fn backend_answered(&mut self, paced: Duration) {
        // The wake and the hold at the end have figures of their own.
        let woken = self.woken().map_or(Duration::ZERO, |woken| woken.waited);
        let fence = self.more.as_ref().map_or(Duration::ZERO, |more| more.fence);
        let apart = self.queued + self.ruled + woken + fence + paced;
        self.backend = self.begun.elapsed().saturating_sub(apart);
    }

    /// Returns whether more happened than that a file was sent.
    pub fn is_noteworthy(&self) -> bool {
        self.more.is_some() || self.refusal.is_some() || !self.queued.is_zero() || self.took >= SLOW
    }

    /// Releases the data that refers to the memory of its connection.
    pub fn detach_from_connection(&mut self) {
        self.referer = None;
        self.user_agent = None;
    }
}

/// A move of its site that a request has requested.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Relocation {
    pub why: PlacementReason,
    /// The previous node.
    pub from: Option<NodeName>,
    pub to: NodeName,
    pub epoch: u64,
    /// Time from sending the request there until it was known that it will not be answered.
    pub detect: Duration,
    /// Time to choose a node, and time until the store agreed. Both are zero if the site had
    /// moved already.
    pub decide: Duration,
    pub store: Duration,
    /// Time from the question to the supervisor until its answer arrived.
    pub asked: Duration,
    /// Predicted wait from the question until the application answers at its new place. `None` if
    /// nothing was known.
    pub predicted: Option<Duration>,
}

/// A request that another node answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForwardedTo {
    pub node: NodeName,
    /// Time until the head of its response.
    pub took: Duration,
    /// Part of it spent waiting for a connection.
    pub connect: Duration,
    /// Times of that node, by its own report: `backend_us=120 cpu_us=15`.
    pub stages: Box<str>,
}

/// The owner of the cell in which a request to an application ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UsageScope {
    /// Its own cell: its limits hold for it alone.
    Request,
    /// The instance's cell, with the limits of the whole instance. The request's own limits hold
    /// for its bodies only.
    Instance,
}

impl UsageScope {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Request => "request",
            Self::Instance => "instance",
        }
    }
}
