//! The access log: one line per request, written by a thread of its own so that no request ever waits for a disk.
//!
//! Each edge thread collects lines in a buffer and hands it over when it is full, or a second after its
//! first line. If the writer falls behind, or the disk is full, lines are dropped and counted: a log
//! must not stop a server. The file is opened with the edge's own rights.
//!
//! Not here: the shape of a line (`format`), the writing thread (`writer`), diagnostics of the node (`tracing`).

mod format;
mod writer;

use std::cell::RefCell;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::rc::{Rc, Weak};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant, SystemTime};

use http::header::{REFERER, USER_AGENT};
use http::{HeaderValue, Method, StatusCode, Version};
use nagaya_base::{Code, RequestId};
use nagaya_cmdb::cell::{Boost, Confinement, Usage};
use nagaya_cmdb::instance::Wake;
use nagaya_cmdb::{Site, Tenant};
use smallvec::SmallVec;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use crate::message::{ConnInfo, Head};
use crate::metrics::Metrics;
use crate::options::LogFormat;
use crate::place::{Passed, Relocated};
use crate::receipt;
use crate::stay::CellOf;
use format::Formatter;
pub use format::stages;
use writer::{Chunk, Writer};

/// Lines one edge thread collects before it hands them over, in bytes. About 300 lines.
const BUFFER_BYTES: usize = 64 << 10;

/// How long a line may wait in its thread's buffer.
const FLUSH_AFTER: Duration = Duration::from_secs(1);

const CODE_CANNOT_OPEN: Code = Code(441);

/// Everything that is said of one request. Begun with its head, filled in on its way, complete when its body has ended and
/// what its programs used is known.
#[derive(Debug, Clone)]
pub struct AccessRecord {
    pub id: RequestId,
    /// When the request came.
    pub begun: Instant,
    /// The same as a date; set when the account is closed, where there is a log.
    pub started: SystemTime,
    /// The client: the peer of the connection, or whom a trusted proxy says it speaks for.
    pub client: IpAddr,
    pub port: u16,
    /// None if the head could not be read.
    pub method: Option<Method>,
    pub version: Version,
    /// Host and target in one allocation; the target begins at `target_at`.
    text: String,
    target_at: usize,
    pub referer: Option<HeaderValue>,
    pub user_agent: Option<HeaderValue>,
    /// `TLSv1_3` and the like; None on plain connections.
    pub tls: Option<&'static str>,
    /// Its site, once routed. Gives tenant and kind of backend too.
    pub site: Option<Arc<Site>>,
    pub status: StatusCode,
    /// Bytes of the request's body.
    pub bytes_in: u64,
    /// Bytes of the response's body.
    pub bytes_out: u64,
    /// From the first byte of the request to the end of the response.
    pub took: Duration,
    /// Waiting for its turn.
    pub queued: Duration,
    /// In the rules.
    pub ruled: Duration,
    /// In the backend, until the head of its answer.
    pub backend: Duration,
    /// This thread's own time on it.
    pub edge_cpu: Duration,
    /// Reason of a refusal and its code, as in `refusal::Row`.
    pub refusal: Option<&'static str>,
    pub code: Option<Code>,
    /// What only few requests have.
    pub more: Option<Box<More>>,
}

/// What is said of a request that a rule, a limit, a program or a wake concerned.
#[derive(Debug, Clone, Default)]
pub struct More {
    /// Where its programs ran, as `nagaya cells` shows it.
    pub cell: Option<Box<str>>,
    /// For an application: whether that is the request's own.
    pub cell_of: Option<CellOf>,
    /// How far limits of its site's application were raised for it.
    pub raised: Boost,
    pub used: Used,
    /// How much longer its bodies took because of limits, microseconds.
    pub paced_us: u64,
    /// How long it was predicted to wait its turn, when it got in line.
    pub predicted: Option<Duration>,
    /// The line a rule had it wait in.
    pub lane: Option<Box<str>>,
    /// What held for it beneath its site's limits; none, if nothing did.
    pub confinement: Option<Arc<Confinement>>,
    /// The rule files that said something.
    pub ruled_by: SmallVec<[Arc<str>; 2]>,
    /// Its tenant, as it was then.
    pub tenant: Option<Arc<Tenant>>,
    /// The wake of its site's instance that it waited for.
    pub woken: Option<Woken>,
    /// The other node that answered it.
    pub passed: Option<Passed>,
    /// The moves of its site that it has asked for.
    pub relocated: Vec<Relocated>,
    /// So long it waited for this node's authority.
    pub held: Duration,
    /// So long it waited, beside an instance that was ready, until no node that had the site before could serve it any more.
    pub fence: Duration,
    /// So long its site's instance waited for databases for it, and for no other.
    pub database: Option<Duration>,
    /// What was wrong, if the site or the node was to blame.
    pub fault: Option<Box<str>>,
}

/// A request that came to an instance that rested.
#[derive(Debug, Clone)]
pub struct Woken {
    /// Shared by all requests of a thread that waited for it.
    pub wake: Arc<Wake>,
    /// How long this one waited, apart from waiting its turn.
    pub waited: Duration,
}

impl More {
    /// What held for it beneath its site's limits.
    pub fn confinement(&self) -> &Confinement {
        static NOTHING: LazyLock<Confinement> = LazyLock::new(Confinement::default);
        self.confinement.as_deref().unwrap_or(&NOTHING)
    }
}

/// What the programs of a request used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Used {
    /// There was no program.
    #[default]
    Nothing,
    /// There was, and what it used was not told: the keeper went, or took too long.
    Unknown,
    Known(Usage),
}

/// Slower than this, a request is remembered longer, for whoever asks why.
const SLOW: Duration = Duration::from_millis(100);

impl AccessRecord {
    /// How far limits of its application were raised, if they were.
    fn raised(&self) -> Option<Boost> {
        self.more.as_ref().map(|more| more.raised).filter(|raised| !raised.is_empty())
    }

    /// Becomes the record of a new request. `in_full`: with what only a line of the log says. A node without a log does
    /// not pay for it.
    pub fn begin(&mut self, head: &Head, client: IpAddr, in_full: bool) {
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

    /// For a request that ended before its head was understood.
    pub fn without_head(id: RequestId, conn: &ConnInfo) -> Self {
        Self {
            id,
            begun: receipt::now(),
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

    /// The host asked for, lower case; empty if there was none.
    pub fn host(&self) -> &str {
        &self.text[..self.target_at]
    }

    /// Path and query as sent; empty if the head could not be read.
    pub fn target(&self) -> &str {
        &self.text[self.target_at..]
    }

    /// What its programs used.
    pub fn used(&self) -> Used {
        self.more.as_ref().map_or(Used::Nothing, |more| more.used)
    }

    /// The wake it waited for.
    pub fn woken(&self) -> Option<&Woken> {
        self.more.as_ref()?.woken.as_ref()
    }

    /// There is more to explain than that a file was sent.
    pub fn is_noteworthy(&self) -> bool {
        self.more.is_some() || self.refusal.is_some() || !self.queued.is_zero() || self.took >= SLOW
    }

    /// Gives up what refers to the memory of the connection it came by.
    pub fn let_go(&mut self) {
        self.referer = None;
        self.user_agent = None;
    }
}

#[derive(Debug, thiserror::Error)]
pub enum AccessLogError {
    #[error(
        "{CODE_CANNOT_OPEN}: cannot open access log '{path}': {error}. Its directory must exist and be writable for the edge's user"
    )]
    Open { path: PathBuf, error: std::io::Error },
    #[error("cannot start the thread that writes access log '{path}': {error}")]
    Thread { path: PathBuf, error: std::io::Error },
}

/// The log of one process. Dropping the last reference writes out what was handed over, then ends the writer.
#[derive(Debug)]
pub struct AccessLog {
    writer: Writer,
    format: LogFormat,
    metrics: Arc<Metrics>,
}

impl AccessLog {
    /// Opens or creates the file (mode 0640) for appending.
    pub fn open(path: &Path, format: LogFormat, metrics: Arc<Metrics>) -> Result<Arc<Self>, AccessLogError> {
        let writer = Writer::start(path, Arc::clone(&metrics))?;
        Ok(Arc::new(Self { writer, format, metrics }))
    }

    /// Closes the file and opens its path anew, after it was moved away. Returns at once; lines handed over
    /// before still go to the old file.
    pub fn reopen(&self) {
        self.writer.reopen();
    }

    /// The calling thread's end of the log. Call it inside a `LocalSet`: a task there hands lines over in time.
    pub fn for_thread(self: &Arc<Self>, node: &str) -> Rc<ThreadLog> {
        Rc::new_cyclic(|this| {
            let first_line = Rc::new(Notify::new());
            ThreadLog {
                log: Arc::clone(self),
                pending: RefCell::new(Pending {
                    chunk: Chunk::default(),
                    formatter: Formatter::new(self.format, node),
                }),
                flusher: tokio::task::spawn_local(flush_in_time(Weak::clone(this), Rc::clone(&first_line))),
                first_line,
            }
        })
    }
}

/// One edge thread's buffer. Dropping it hands over what it holds.
#[derive(Debug)]
pub struct ThreadLog {
    log: Arc<AccessLog>,
    pending: RefCell<Pending>,
    first_line: Rc<Notify>,
    flusher: JoinHandle<()>,
}

#[derive(Debug)]
struct Pending {
    chunk: Chunk,
    formatter: Formatter,
}

impl ThreadLog {
    /// Adds the line of a request that is over. Never blocks.
    pub fn write(&self, record: &AccessRecord) {
        let mut pending = self.pending.borrow_mut();
        let Pending { chunk, formatter } = &mut *pending;
        if chunk.lines == 0 {
            chunk.bytes.reserve(BUFFER_BYTES);
            self.first_line.notify_one();
        }
        formatter.line(record, &mut chunk.bytes);
        chunk.lines += 1;
        // A line is bounded by the head's limit; the buffer grows past its size by at most one line.
        if chunk.bytes.len() >= BUFFER_BYTES {
            let chunk = std::mem::take(chunk);
            self.hand_over(chunk);
        }
    }

    /// Hands over what is collected, without waiting for the time to come.
    pub fn flush(&self) {
        let chunk = std::mem::take(&mut self.pending.borrow_mut().chunk);
        self.hand_over(chunk);
    }

    fn hand_over(&self, chunk: Chunk) {
        if chunk.lines == 0 {
            return;
        }
        if let Err(chunk) = self.log.writer.offer(chunk) {
            self.log.metrics.log_lines_dropped(chunk.lines);
            self.log.writer.complain(&"the disk is slower than the log grows");
        }
    }
}

impl Drop for ThreadLog {
    fn drop(&mut self) {
        self.flusher.abort();
        let chunk = std::mem::take(&mut self.pending.get_mut().chunk);
        if chunk.lines > 0
            && let Err(chunk) = self.log.writer.offer_patiently(chunk)
        {
            self.log.metrics.log_lines_dropped(chunk.lines);
            self.log.writer.complain(&"the disk did not take the last lines in time");
        }
    }
}

async fn flush_in_time(log: Weak<ThreadLog>, first_line: Rc<Notify>) {
    loop {
        first_line.notified().await;
        tokio::time::sleep(FLUSH_AFTER).await;
        let Some(log) = log.upgrade() else { return };
        log.flush();
    }
}

#[cfg(test)]
pub(crate) mod tests;
