//! The gate in front of PHP workers. It reads the edge's requests first. It passes one on only if
//! that names a script of the worker's site.
//!
//! A worker runs any file that it is given, with its tenant's rights. So the edge never holds its
//! connection. The gate reads only names and lengths; values and bodies are passed on unchanged.
//! PHP does not promise that it never takes an unread part of a body for the next request. So a
//! request with a body is the last one of its connection with the worker. A new connection follows.
//!
//! A body is passed on only once the worker has read all of the opening. A worker that ends before
//! that got nothing it could act on, whatever the method. The edge is notified, and gives the
//! request to another one. A worker that has read the opening may have acted. So the edge is not
//! notified and does not repeat the request (RFC 9110 section 9.2.2). Invariant: `NOT_BEGUN` is
//! sent only for a request of which the worker has not read the whole opening.
//!
//! An edge that closes its direction while a script runs reports that the client has left. The
//! script learns it when it writes.
//!
//! The gate reports the use of each request behind its answer, on the same connection. A worker
//! must not be able to do that. So nothing that a worker sends behind its end record goes on.
//!
//! Short parts of an answer go on together. A worker has its share of CPU time while it serves, and
//! for a moment after.
//!
//! The gate has threads of its own, and reads the disk on others. Not here: starting workers
//! (`spawn`), which site a worker serves (`process`).

pub(crate) mod opening;
mod scripts;

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use bytes::{Buf, BytesMut};
use nagaya_keeper_api::fastcgi::{self, NOT_BEGUN, UsageReport};
use nagaya_keeper_api::quiet_stream::{QuietStream, StreamReadiness};
use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType};
use tokio::sync::mpsc;
use tokio::task::{LocalSet, spawn_blocking, spawn_local};
use tokio::time::{Instant, Sleep, sleep, sleep_until};

use crate::cells::CpuDemand;
use crate::{fault, sched_slice, sys};

use self::opening::{AnswerRecords, BodyRecords, CheckedOpening, RequestViolation};
use self::scripts::{ScriptLookup, SeenScripts};

pub use scripts::{ScriptRule, SiteScripts};

/// Number of CPUs for each thread, and the maximum number of threads.
const PROCESSORS_PER_THREAD: usize = 8;
const THREADS_MAX: usize = 4;

/// Maximum number of workers that wait for one thread.
const ORDERS_MAX: usize = 4096;

/// Threads that read the disk, for each thread of the gate.
const LOOKERS_MAX: usize = 8;

/// Maximum number of bytes of one request that wait to be passed on, in each direction.
const BUFFER_LEN: usize = 64 << 10;

/// Longest time in which an edge takes nothing of an answer whose worker has sent its last byte.
/// The worker may be gone, so no other limit bounds what the edge leaves here.
const UNTAKEN_MAX: Duration = Duration::from_secs(120);

/// Length of a part of an answer that is passed on at once, and the longest time in which a shorter
/// part waits for more. PHP writes a page in pieces of at most 8 KiB, one right after the other.
/// Each piece that is passed on wakes the edge, and its client.
const PART_LEN: usize = 16 << 10;
const PART_WAIT: Duration = Duration::from_millis(1);

/// Time without a request after which a worker gives up its share of CPU time. Until then quiet
/// instances of its tenant run with that share, at the cost of other tenants. To give it up after
/// each request would cost each request two changes.
const SHARE_KEPT: Duration = Duration::from_millis(100);

/// Number of bytes read at once.
const READ_LEN: usize = BUFFER_LEN / 4;

thread_local! {
    /// Buffer for reads, before the bytes have a place of their own.
    static SCRATCH: RefCell<Box<[u8]>> = RefCell::new(vec![0; READ_LEN].into());
}

/// `FCGI_GET_VALUES` for nothing (FastCGI 1.0, section 4.1).
const ASK_VALUES: [u8; 8] = [1, 9, 0, 0, 0, 0, 0, 0];

/// PHP's response for a script that is missing.
const NO_FILE: &[u8] = b"Status: 404 Not Found\r\nContent-Type: text/plain\r\n\r\nNo input file specified.\n";

/// Time limits of a passage: `PART_WAIT` and `UNTAKEN_MAX`, if no test sets others.
#[derive(Debug, Clone, Copy)]
struct PassageTimes {
    part_wait: Duration,
    untaken_max: Duration,
}

/// One worker and the edge's connection with it.
pub struct GatedWorker {
    /// The gate's end of the edge's connection.
    pub edge: OwnedFd,
    /// The first connection with the worker.
    pub worker: OwnedFd,
    /// The socket the worker listens on, opened as a path: it has no name any more.
    pub door: OwnedFd,
    pub rule: Arc<ScriptRule>,
    /// Its name in the log.
    pub whose: String,
}

/// The keeper's end.
#[derive(Clone)]
pub struct ScriptGate {
    threads: Arc<[mpsc::Sender<GatedWorker>]>,
    next: Arc<AtomicUsize>,
}

impl ScriptGate {
    /// Starts its threads, which end with the last clone of this.
    pub fn start() -> io::Result<Self> {
        Self::start_with(PassageTimes { part_wait: PART_WAIT, untaken_max: UNTAKEN_MAX })
    }

    fn start_with(times: PassageTimes) -> io::Result<Self> {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let count = processors.div_ceil(PROCESSORS_PER_THREAD).min(THREADS_MAX);
        let threads = (0..count).map(|number| start_thread(number, times)).collect::<io::Result<_>>()?;
        Ok(Self { threads, next: Arc::default() })
    }

    /// Passes requests on until either end is closed.
    pub fn open(&self, passage: GatedWorker) -> io::Result<()> {
        let number = self.next.fetch_add(1, Ordering::Relaxed) % self.threads.len();
        let busy = |_| io::Error::new(io::ErrorKind::WouldBlock, "the gate before PHP workers is busy");
        self.threads[number].try_send(passage).map_err(busy)
    }
}

fn start_thread(number: usize, times: PassageTimes) -> io::Result<mpsc::Sender<GatedWorker>> {
    let (sender, mut incoming) = mpsc::channel::<GatedWorker>(ORDERS_MAX);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(LOOKERS_MAX)
        .build()?;
    let serve = move || {
        sched_slice::request_short_slice();
        LocalSet::new().block_on(&runtime, async move {
            while let Some(passage) = incoming.recv().await {
                spawn_local(keep_open(passage, times));
            }
        });
    };
    thread::Builder::new().name(format!("keeper-gate-{number}")).spawn(serve)?;
    Ok(sender)
}

/// Why a passage is closed.
#[derive(Debug, thiserror::Error)]
enum CloseReason {
    #[error(transparent)]
    Refused(#[from] RequestViolation),
    /// The worker ended before it had read the opening of a request, or between two of them.
    #[error("the worker has not taken a request: {0}")]
    Untaken(io::Error),
    #[error("{0}")]
    Io(#[from] io::Error),
    /// One end has gone, or sends no more.
    #[error("one end has gone")]
    Gone,
    /// The edge sends no more while a request is at the worker: its client has left.
    #[error("the client has left")]
    HungUp,
}

async fn keep_open(passage: GatedWorker, times: PassageTimes) {
    let GatedWorker { edge, worker, door, rule, whose } = passage;
    let opened = QuietStream::new(edge).and_then(|edge| Ok((edge, QuietStream::new(worker)?)));
    let closed = match opened {
        Ok((edge, worker)) => {
            let share_end = Box::pin(sleep(SHARE_KEPT));
            let mut passage = OpenPassage { edge, door: &door, rule: &rule, times, share_end };
            let closed = passage.pass_requests(worker).await;
            tell_not_begun(&passage.edge, &closed);
            closed
        }
        Err(error) => error.into(),
    };
    match closed {
        CloseReason::Refused(violation) => {
            let code = match violation {
                RequestViolation::Hidden(_) => fault::HIDDEN,
                _ => fault::GATE,
            };
            tracing::warn!(
                worker = whose,
                "{code}: a request of the edge's is not passed on to PHP: {violation}"
            );
        }
        CloseReason::Untaken(error) | CloseReason::Io(error) => {
            tracing::debug!(worker = whose, %error, "a PHP worker's connection has ended")
        }
        CloseReason::Gone | CloseReason::HungUp => {}
    }
}

/// Notifies the edge if another worker may have the request. This is also sent between requests,
/// because the next one may be on its way. An edge that does not read its replies gets no notice.
fn tell_not_begun(edge: &QuietStream, closed: &CloseReason) {
    match closed {
        // The record may have changed, and the edge may have learned it first.
        CloseReason::Refused(_) | CloseReason::Untaken(_) => {
            let _ = edge.try_write(&NOT_BEGUN);
        }
        CloseReason::Io(_) | CloseReason::Gone | CloseReason::HungUp => {}
    }
}

/// The way between the edge and one worker.
struct OpenPassage<'a> {
    edge: QuietStream,
    door: &'a OwnedFd,
    rule: &'a ScriptRule,
    times: PassageTimes,
    /// When the worker may give up its share. One timer for all requests: a new one for each would
    /// wake the thread each time, because none is due before it.
    share_end: Pin<Box<Sleep>>,
}

impl OpenPassage<'_> {
    async fn pass_requests(&mut self, mut worker: QuietStream) -> CloseReason {
        let mut incoming = BytesMut::new();
        let mut seen = SeenScripts::default();
        loop {
            match self.pass_request(&worker, &mut seen, &mut incoming).await {
                Ok(WorkerReuse::Kept) => {}
                Ok(WorkerReuse::Anew) => match connect(self.door).and_then(QuietStream::new) {
                    Ok(fresh) => worker = fresh,
                    Err(error) => return CloseReason::Untaken(error),
                },
                Err(CloseReason::HungUp) => {
                    let ended = outlast(&worker, self.door).await;
                    return ended.map_or_else(CloseReason::Io, |()| CloseReason::HungUp);
                }
                Err(closed) => return closed,
            }
            self.edge.forget_writes();
            worker.forget_writes();
        }
    }

    async fn pass_request(
        &mut self,
        worker: &QuietStream,
        seen: &mut SeenScripts,
        incoming: &mut BytesMut,
    ) -> Result<WorkerReuse, CloseReason> {
        let Self { edge, rule, times, share_end, .. } = self;
        let (edge, rule, times) = (&*edge, *rule, *times);
        let mut opening = tokio::select! {
            biased;
            opening = read_opening(edge, worker, incoming) => opening?,
            reason = give_up_share(rule, share_end.as_mut()) => return Err(reason),
        };
        let body = opening.body_len()?;
        if !check(rule, seen, &opening).await? {
            answer_absent(edge, rule, BodyRecords::new(body), incoming).await?;
            return Ok(WorkerReuse::Kept);
        }
        rule.claim(CpuDemand::Share);
        let next = if body > 0 { WorkerReuse::Anew } else { WorkerReuse::Kept };
        if body > 0 {
            opening.end_connection();
        }
        let exchange = GateExchange {
            edge,
            worker,
            rule,
            to_worker: opening.bytes,
            to_edge: BytesMut::new(),
            body: BodyRecords::new(body),
            answer: AnswerRecords::default(),
            stage: RequestStage::Opening,
            worker_end: None,
            part_due: None,
            is_kept: body == 0,
            begun: Instant::now(),
            times,
        };
        exchange.run(incoming).await?;
        Ok(next)
    }
}

/// Gives up the share of a worker that has no request for a while. Never returns.
async fn give_up_share(rule: &ScriptRule, mut share_end: Pin<&mut Sleep>) -> CloseReason {
    let due = Instant::now() + SHARE_KEPT;
    share_end.as_mut().await;
    if Instant::now() < due {
        // It was set for an earlier request.
        share_end.as_mut().reset(due);
        share_end.await;
    }
    rule.claim(CpuDemand::Nothing);
    std::future::pending().await
}

/// Reports to the worker that its client has left, like a web server that closes its connection.
/// The script's next write fails. PHP then ends the script, unless that has requested to continue
/// (`ignore_user_abort`). Returns once PHP has finished the request: it takes the next connection
/// then, and answers a query for its limits. The edge limits the wait: it ends the worker, which
/// ends this.
async fn outlast(worker: &QuietStream, door: &OwnedFd) -> io::Result<()> {
    rustix::net::shutdown(worker, Shutdown::Both)?;
    let next = connect(door).and_then(QuietStream::new)?;
    next.try_write(&ASK_VALUES)?;
    loop {
        next.readable().await?;
        match next.try_read(&mut [0]) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            read => return read.map(drop),
        }
    }
}

/// Next use of the connection with the worker.
enum WorkerReuse {
    Kept,
    Anew,
}

/// Waits for the next request. A worker that has ended is noticed first.
async fn read_opening(
    edge: &QuietStream,
    worker: &QuietStream,
    incoming: &mut BytesMut,
) -> Result<CheckedOpening, CloseReason> {
    loop {
        if let Some(opening) = CheckedOpening::take(incoming)? {
            return Ok(opening);
        }
        tokio::select! {
            biased;
            ready = worker.readable() => {
                ready?;
                // It has nothing to send now, so it has ended.
                match worker.try_read(&mut [0]) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => return Err(CloseReason::Untaken(error)),
                    Ok(_) => return Err(CloseReason::Untaken(io::ErrorKind::ConnectionAborted.into())),
                }
            }
            ready = edge.readable() => {
                ready?;
                read_some(edge, incoming)?;
            }
        }
    }
}

/// Reads available bytes, at most `READ_LEN`.
fn read_available(stream: &QuietStream, into: &mut BytesMut) -> io::Result<usize> {
    SCRATCH.with_borrow_mut(|scratch| {
        let read = stream.try_read(scratch)?;
        into.extend_from_slice(&scratch[..read]);
        Ok(read)
    })
}

/// Reads available bytes, if there are any.
fn read_some(stream: &QuietStream, into: &mut BytesMut) -> Result<(), CloseReason> {
    match read_available(stream, into) {
        Ok(0) => Err(CloseReason::Gone),
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Returns false if the script is missing. It went just after the edge had seen it, or the edge did
/// not check.
async fn check(
    rule: &ScriptRule,
    seen: &mut SeenScripts,
    opening: &CheckedOpening,
) -> Result<bool, CloseReason> {
    let none = || RequestViolation::Script("of a site that is not there any more".into());
    let scripts = rule.get().ok_or_else(none)?;
    let Some(file) = scripts.check(opening)? else { return Ok(true) };
    if seen.contains(&scripts, file) {
        return Ok(true);
    }
    let found = match scripts.find(file, true) {
        Err(Errno::AGAIN) => {
            let (scripts, file) = (Arc::clone(&scripts), file.to_owned());
            let asked = spawn_blocking(move || scripts.find(&file, false)).await;
            asked.map_err(io::Error::other)?
        }
        found => found,
    };
    match found {
        Ok(ScriptLookup::File) => {
            seen.insert(&scripts, file);
            Ok(true)
        }
        Err(Errno::NOENT | Errno::NOTDIR) => Ok(false),
        Ok(ScriptLookup::Other) => {
            Err(RequestViolation::Script(format!("{}, which is no file", file.display())).into())
        }
        Ok(ScriptLookup::Hidden(hidden)) => Err(RequestViolation::Hidden(hidden).into()),
        Err(errno) => Err(RequestViolation::Script(format!("{} ({errno})", file.display())).into()),
    }
}

/// Answers a request for a missing script. The worker does not notice it, and serves the next one.
async fn answer_absent(
    edge: &QuietStream,
    rule: &ScriptRule,
    mut body: BodyRecords,
    incoming: &mut BytesMut,
) -> Result<(), CloseReason> {
    // First the body: for the edge an earlier response means that the worker is not clean.
    discard_body(edge, &mut body, incoming).await?;
    let mut answer = fastcgi::whole_answer(NO_FILE);
    answer.extend(usage_record(rule, Duration::ZERO));
    let mut left = &answer[..];
    while !left.is_empty() {
        match edge.try_write(left) {
            Ok(len) => left = &left[len..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => edge.writable().await?,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// The record that reports the use of the request whose response has just ended. `took`: its time
/// at the worker.
fn usage_record(rule: &ScriptRule, took: Duration) -> Vec<u8> {
    rule.settle(took).map_or(UsageReport::Ask, UsageReport::Known).record()
}

/// Reads the rest of a body, and discards it.
async fn discard_body(
    edge: &QuietStream,
    body: &mut BodyRecords,
    incoming: &mut BytesMut,
) -> Result<(), CloseReason> {
    let mut nowhere = BytesMut::new();
    loop {
        body.pass(incoming, &mut nowhere)?;
        nowhere.clear();
        if body.is_complete() {
            return Ok(());
        }
        edge.readable().await?;
        read_some(edge, incoming)?;
    }
}

/// Progress of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RequestStage {
    /// Only its opening was sent, and the worker may not have read all of that.
    Opening,
    /// The worker has read the opening, or has sent something.
    Begun,
}

/// One request between the edge and a worker.
struct GateExchange<'a> {
    edge: &'a QuietStream,
    worker: &'a QuietStream,
    rule: &'a ScriptRule,
    to_worker: BytesMut,
    to_edge: BytesMut,
    body: BodyRecords,
    answer: AnswerRecords,
    stage: RequestStage,
    /// The worker's end of the connection has ended before the answer did. The edge gets what came
    /// before that first.
    worker_end: Option<CloseReason>,
    /// When a part of the answer that is shorter than `PART_LEN` goes to the edge.
    part_due: Option<Instant>,
    /// The connection with the worker carries another request.
    is_kept: bool,
    /// When its opening was here.
    begun: Instant,
    times: PassageTimes,
}

impl GateExchange<'_> {
    /// Returns when the response has gone to the edge.
    async fn run(mut self, incoming: &mut BytesMut) -> Result<(), CloseReason> {
        loop {
            self.send_to_worker(incoming)?;
            self.send_to_edge()?;
            if self.to_edge.is_empty() {
                if let Some(reason) = self.worker_end.take() {
                    return Err(reason);
                }
                if self.answer.has_ended() {
                    return self.drain(incoming).await;
                }
            }
            self.wait(incoming).await?;
        }
    }

    fn send_to_worker(&mut self, incoming: &mut BytesMut) -> Result<(), CloseReason> {
        loop {
            if self.to_worker.is_empty() && !incoming.is_empty() && self.takes_body()? {
                self.body.pass(incoming, &mut self.to_worker)?;
            }
            if self.to_worker.is_empty() {
                return Ok(());
            }
            match self.worker.try_write(&self.to_worker) {
                Ok(len) => self.to_worker.advance(len),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if self.stage == RequestStage::Opening => return Err(CloseReason::Untaken(error)),
                // It may have responded before it left. Its last bytes decide.
                Err(_) => {
                    self.to_worker.clear();
                    return Ok(());
                }
            }
        }
    }

    /// Whether the worker may get more than the opening. If not, the kernel wakes this task when it
    /// has read more of that.
    fn takes_body(&mut self) -> Result<bool, CloseReason> {
        if self.stage == RequestStage::Begun || self.body.is_complete() {
            return Ok(true);
        }
        let look = |worker: BorrowedFd<'_>| match sys::is_all_read(&worker)? {
            true => Ok(()),
            false => Err(io::ErrorKind::WouldBlock.into()),
        };
        match self.worker.try_with_room(look) {
            // A worker that closes leaves nothing in its queue either. The kernel sets the error
            // before it empties that.
            Ok(()) => match self.worker.take_error()? {
                Some(error) => return Err(CloseReason::Untaken(error)),
                None => self.stage = RequestStage::Begun,
            },
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
        Ok(self.stage == RequestStage::Begun)
    }

    /// Whether the part of the answer that is here goes to the edge now.
    fn is_part_due(&self) -> bool {
        let is_last = self.answer.has_ended() || self.worker_end.is_some();
        is_last || self.to_edge.len() >= PART_LEN || self.part_due.is_some_and(|due| due <= Instant::now())
    }

    fn send_to_edge(&mut self) -> Result<(), CloseReason> {
        if !self.is_part_due() {
            return Ok(());
        }
        while !self.to_edge.is_empty() {
            match self.edge.try_write(&self.to_edge) {
                Ok(len) => self.to_edge.advance(len),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error.into()),
            }
        }
        // The rest of a part that has begun to go waits only for the edge.
        self.part_due = (!self.to_edge.is_empty()).then(Instant::now);
        Ok(())
    }

    /// Waits until something can be done, and reads new bytes.
    async fn wait(&mut self, incoming: &mut BytesMut) -> Result<(), CloseReason> {
        let has_room = self.to_worker.is_empty() && incoming.len() < BUFFER_LEN;
        let wants_body = has_room && !self.body.is_complete();
        // It has sent all of this request, and sends no more if its client leaves.
        let awaits_end = self.body.is_complete() && incoming.is_empty();
        // Asked once: either the edge is watched, or the time.
        let is_due = self.is_part_due();
        let of_edge =
            StreamReadiness { reads: wants_body || awaits_end, writes: !self.to_edge.is_empty() && is_due };
        let is_held = self.stage == RequestStage::Opening && !incoming.is_empty();
        let has_more = !self.to_worker.is_empty() || is_held;
        // A worker may close its connection as soon as its answer is complete. That is no failure.
        let has_answer_left = !self.answer.has_ended() && self.worker_end.is_none();
        let of_worker =
            StreamReadiness { reads: has_answer_left && self.to_edge.len() < BUFFER_LEN, writes: has_more };
        let untaken = async {
            if has_answer_left {
                std::future::pending::<()>().await;
            }
            sleep(self.times.untaken_max).await;
        };
        let part_due = async {
            match self.part_due.filter(|_| !is_due) {
                Some(due) => sleep_until(due).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = untaken => return Err(CloseReason::Gone),
            () = part_due => {}
            ready = self.worker.ready(of_worker) => {
                if ready?.reads {
                    self.worker_end = self.read_answer().err();
                }
            }
            ready = self.edge.ready(of_edge) => {
                if ready?.reads {
                    match read_some(self.edge, incoming) {
                        Err(CloseReason::Gone) if awaits_end && self.to_worker.is_empty() => {
                            return Err(CloseReason::HungUp);
                        }
                        read => read?,
                    }
                }
            }
        }
        Ok(())
    }

    fn read_answer(&mut self) -> Result<(), CloseReason> {
        let before = self.to_edge.len();
        match read_available(self.worker, &mut self.to_edge) {
            // It can have read no more than was sent.
            Ok(0) if !self.to_worker.is_empty() && self.stage == RequestStage::Opening => {
                Err(CloseReason::Untaken(io::ErrorKind::UnexpectedEof.into()))
            }
            Ok(0) => Err(CloseReason::Gone),
            Ok(_) => {
                self.stage = RequestStage::Begun;
                let behind = self.answer.look(&self.to_edge[before..]);
                if behind > 0 {
                    // A script has written to the connection itself. The edge ends the worker.
                    self.to_edge.truncate(self.to_edge.len() - behind);
                    return Err(CloseReason::Gone);
                }
                if self.answer.has_ended() {
                    self.to_edge.extend_from_slice(&usage_record(self.rule, self.begun.elapsed()));
                }
                self.part_due.get_or_insert_with(|| Instant::now() + self.times.part_wait);
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            // Linux reports this if the other end was closed with unread bytes in it: it had not
            // begun. Bytes that it had sent come first.
            Err(error)
                if error.kind() == io::ErrorKind::ConnectionReset && self.stage == RequestStage::Opening =>
            {
                Err(CloseReason::Untaken(error))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Discards the rest of the body, because the worker wants no more of it.
    async fn drain(mut self, incoming: &mut BytesMut) -> Result<(), CloseReason> {
        if self.is_kept && !self.to_worker.is_empty() {
            return Err(CloseReason::Gone);
        }
        discard_body(self.edge, &mut self.body, incoming).await
    }
}

/// Connects to a Unix socket that is open as a path, whether or not it has a name. Non-blocking.
pub fn connect(door: &OwnedFd) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let address = SocketAddrUnix::new(format!("/proc/self/fd/{}", door.as_raw_fd()))?;
    rustix::net::connect(&socket, &address)?;
    Ok(socket)
}

#[cfg(test)]
mod tests;
