//! The gate before PHP workers: what the edge sends to one is read here first, and goes on only if it names a script of
//! the site that the worker serves.
//!
//! A worker runs whatever file it is told to, with its tenant's rights, so the edge never holds its connection. Only names
//! and lengths are read here; values and bodies go on as they are. Nothing promises that
//! PHP takes no unread part of a body for the next request, so a request with a body is the last one of its connection with
//! the worker: a new one is made.
//!
//! A body goes on only once the worker has read all of the opening. A worker that ends before that has got nothing it could
//! act on, whatever the method: the edge is told so, and gives the request to another one. Who has read the opening may have
//! acted, so the edge is told nothing and does not repeat it (RFC 9110 section 9.2.2).
//! Invariant: `NOT_BEGUN` is sent only for a request of which the worker has not read the whole opening.
//!
//! The gate has threads of its own, and asks the disk on others. Not here: starting workers (`spawn`), which site a
//! worker serves (`process`).

pub(crate) mod opening;
mod scripts;

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use bytes::{Buf, BytesMut};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::task::{LocalSet, spawn_blocking, spawn_local};

use self::opening::{AnswerRecords, BodyRecords, Opening, Violation};
use crate::fastcgi::{self, NOT_BEGUN};
use crate::fault;
use crate::slice;
use crate::sys;

pub use scripts::{ScriptRule, SiteScripts};

/// Processors for each thread, and the most threads there are.
const PROCESSORS_PER_THREAD: usize = 8;
const THREADS_MAX: usize = 4;

/// Workers that may wait to be taken up by one thread.
const ORDERS_MAX: usize = 4096;

/// Threads that ask the disk, for each thread of the gate.
const LOOKERS_MAX: usize = 8;

/// Bytes of one request that wait to be passed on, in each direction.
const BUFFER_LEN: usize = 64 << 10;

/// As PHP answers for a script that is not there.
const NO_FILE: &[u8] = b"Status: 404 Not Found\r\nContent-Type: text/plain\r\n\r\nNo input file specified.\n";

/// One worker and the edge's connection with it.
pub struct Passage {
    /// The gate's end of the edge's connection. Not blocking.
    pub edge: OwnedFd,
    /// The first connection with the worker. Not blocking.
    pub worker: OwnedFd,
    /// The socket the worker listens on, opened as a path: it has no name any more.
    pub door: OwnedFd,
    pub rule: Arc<ScriptRule>,
    /// As it is called in the log.
    pub whose: String,
}

/// The keeper's end.
#[derive(Clone)]
pub struct Gate {
    threads: Arc<[mpsc::Sender<Passage>]>,
    next: Arc<AtomicUsize>,
}

impl Gate {
    /// Starts its threads, which end with the last of these.
    pub fn start() -> io::Result<Self> {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let count = processors.div_ceil(PROCESSORS_PER_THREAD).min(THREADS_MAX);
        let threads = (0..count).map(start_thread).collect::<io::Result<_>>()?;
        Ok(Self { threads, next: Arc::default() })
    }

    /// Passes requests on until either end is closed.
    pub fn open(&self, passage: Passage) -> io::Result<()> {
        let number = self.next.fetch_add(1, Ordering::Relaxed) % self.threads.len();
        let busy = |_| io::Error::new(io::ErrorKind::WouldBlock, "the gate before PHP workers is busy");
        self.threads[number].try_send(passage).map_err(busy)
    }
}

fn start_thread(number: usize) -> io::Result<mpsc::Sender<Passage>> {
    let (sender, mut incoming) = mpsc::channel::<Passage>(ORDERS_MAX);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .max_blocking_threads(LOOKERS_MAX)
        .build()?;
    let serve = move || {
        slice::shorten();
        LocalSet::new().block_on(&runtime, async move {
            while let Some(passage) = incoming.recv().await {
                spawn_local(keep_open(passage));
            }
        });
    };
    thread::Builder::new().name(format!("keeper-gate-{number}")).spawn(serve)?;
    Ok(sender)
}

/// Why a passage is closed.
#[derive(Debug, thiserror::Error)]
enum Closed {
    #[error(transparent)]
    Refused(#[from] Violation),
    /// The worker ended before it had read the opening of a request, or between two of them.
    #[error("the worker has not taken a request: {0}")]
    Untaken(io::Error),
    #[error("{0}")]
    Io(#[from] io::Error),
    /// One end has gone, or says no more.
    #[error("one end has gone")]
    Gone,
}

async fn keep_open(passage: Passage) {
    let Passage { edge, worker, door, rule, whose } = passage;
    let opened = UnixStream::from_std(edge.into()).and_then(|edge| Ok((edge, stream(worker)?)));
    let closed = match opened {
        Ok((edge, worker)) => {
            let closed = pass_requests(&edge, worker, &door, &rule).await;
            tell_not_begun(&edge, &closed);
            closed
        }
        Err(error) => error.into(),
    };
    match closed {
        Closed::Refused(violation) => {
            let code = fault::GATE;
            tracing::warn!(
                worker = whose,
                "{code}: a request of the edge's is not passed on to PHP: {violation}"
            );
        }
        Closed::Untaken(error) | Closed::Io(error) => {
            tracing::debug!(worker = whose, %error, "a PHP worker's connection has ended")
        }
        Closed::Gone => {}
    }
}

/// Tells the edge that another worker may have the request, if that is so. It is also told while it asks nothing: its request
/// may be on its way. Of an edge that does not read its answers nothing more is known.
fn tell_not_begun(edge: &UnixStream, closed: &Closed) {
    match closed {
        // The record may have changed, and the edge may have heard of it first.
        Closed::Refused(_) | Closed::Untaken(_) => {
            let _ = edge.try_write(&NOT_BEGUN);
        }
        Closed::Io(_) | Closed::Gone => {}
    }
}

fn stream(fd: OwnedFd) -> io::Result<UnixStream> {
    UnixStream::from_std(fd.into())
}

async fn pass_requests(
    edge: &UnixStream,
    mut worker: UnixStream,
    door: &OwnedFd,
    rule: &ScriptRule,
) -> Closed {
    let mut incoming = BytesMut::new();
    loop {
        match pass_request(edge, &worker, rule, &mut incoming).await {
            Ok(Next::Kept) => {}
            Ok(Next::Anew) => match connect(door).and_then(stream) {
                Ok(fresh) => worker = fresh,
                Err(error) => return Closed::Untaken(error),
            },
            Err(closed) => return closed,
        }
    }
}

/// What becomes of the connection with the worker.
enum Next {
    Kept,
    Anew,
}

async fn pass_request(
    edge: &UnixStream,
    worker: &UnixStream,
    rule: &ScriptRule,
    incoming: &mut BytesMut,
) -> Result<Next, Closed> {
    let mut opening = read_opening(edge, worker, incoming).await?;
    let body = opening.body_len()?;
    if !check(rule, &opening).await? {
        answer_absent(edge, BodyRecords::new(body), incoming).await?;
        return Ok(Next::Kept);
    }
    let next = if body > 0 { Next::Anew } else { Next::Kept };
    if body > 0 {
        opening.end_connection();
    }
    let exchange = Exchange {
        edge,
        worker,
        to_worker: opening.bytes,
        to_edge: BytesMut::new(),
        body: BodyRecords::new(body),
        answer: AnswerRecords::default(),
        stage: Stage::Opening,
        is_kept: body == 0,
    };
    exchange.run(incoming).await?;
    Ok(next)
}

/// Waits for the next request. A worker that has ended is noticed first.
async fn read_opening(
    edge: &UnixStream,
    worker: &UnixStream,
    incoming: &mut BytesMut,
) -> Result<Opening, Closed> {
    loop {
        if let Some(opening) = Opening::take(incoming)? {
            return Ok(opening);
        }
        tokio::select! {
            biased;
            ready = worker.ready(Interest::READABLE) => {
                ready?;
                // It has nothing to say now, so it has ended.
                match worker.try_read(&mut [0]) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => return Err(Closed::Untaken(error)),
                    Ok(_) => return Err(Closed::Untaken(io::ErrorKind::ConnectionAborted.into())),
                }
            }
            ready = edge.ready(Interest::READABLE) => {
                ready?;
                read_some(edge, incoming)?;
            }
        }
    }
}

/// Reads what is there, if anything is.
fn read_some(stream: &UnixStream, into: &mut BytesMut) -> Result<(), Closed> {
    into.reserve(BUFFER_LEN / 4);
    match stream.try_read_buf(into) {
        Ok(0) => Err(Closed::Gone),
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// False: the script is not there. It went just after the edge had seen it, or nobody looked.
async fn check(rule: &ScriptRule, opening: &Opening) -> Result<bool, Closed> {
    let none = || Violation::Script("of a site that is not there any more".into());
    let scripts = rule.get().ok_or_else(none)?;
    let Some(file) = scripts.check(opening)? else { return Ok(true) };
    let found = match scripts.is_beneath(file, true) {
        Err(Errno::AGAIN) => {
            let (scripts, file) = (Arc::clone(&scripts), file.to_owned());
            let asked = spawn_blocking(move || scripts.is_beneath(&file, false)).await;
            asked.map_err(io::Error::other)?
        }
        found => found,
    };
    match found {
        Ok(true) => Ok(true),
        Err(Errno::NOENT | Errno::NOTDIR) => Ok(false),
        Ok(false) => Err(Violation::Script(format!("{}, which is no file", file.display())).into()),
        Err(errno) => Err(Violation::Script(format!("{} ({errno})", file.display())).into()),
    }
}

/// Answers a request for a script that is not there. The worker learns nothing of it, and serves the next one.
async fn answer_absent(
    edge: &UnixStream,
    mut body: BodyRecords,
    incoming: &mut BytesMut,
) -> Result<(), Closed> {
    // First the body: the edge takes an answer before that for a sign that the worker is not clean.
    discard_body(edge, &mut body, incoming).await?;
    let answer = fastcgi::whole_answer(NO_FILE);
    let mut left = &answer[..];
    while !left.is_empty() {
        edge.writable().await?;
        match edge.try_write(left) {
            Ok(len) => left = &left[len..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Reads what still comes of a body, and throws it away.
async fn discard_body(
    edge: &UnixStream,
    body: &mut BodyRecords,
    incoming: &mut BytesMut,
) -> Result<(), Closed> {
    let mut nowhere = BytesMut::new();
    loop {
        body.pass(incoming, &mut nowhere)?;
        nowhere.clear();
        if body.is_complete() {
            return Ok(());
        }
        edge.ready(Interest::READABLE).await?;
        read_some(edge, incoming)?;
    }
}

/// How far a request has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Nothing but its opening was sent, and it is not known that the worker has read all of that.
    Opening,
    /// The worker has read the opening, or has said something.
    Begun,
}

/// One request between the two.
struct Exchange<'a> {
    edge: &'a UnixStream,
    worker: &'a UnixStream,
    to_worker: BytesMut,
    to_edge: BytesMut,
    body: BodyRecords,
    answer: AnswerRecords,
    stage: Stage,
    /// The connection with the worker carries another request.
    is_kept: bool,
}

impl Exchange<'_> {
    /// Returns when the answer has gone to the edge.
    async fn run(mut self, incoming: &mut BytesMut) -> Result<(), Closed> {
        loop {
            self.send_to_worker(incoming)?;
            self.send_to_edge()?;
            if self.answer.has_ended() && self.to_edge.is_empty() {
                return self.drain(incoming).await;
            }
            self.wait(incoming).await?;
        }
    }

    fn send_to_worker(&mut self, incoming: &mut BytesMut) -> Result<(), Closed> {
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
                Err(error) if self.stage == Stage::Opening => return Err(Closed::Untaken(error)),
                // It may have answered before it left; what it said last decides.
                Err(_) => {
                    self.to_worker.clear();
                    return Ok(());
                }
            }
        }
    }

    /// Whether the worker may get more than the opening. If not, the kernel wakes us when it has read more of that.
    fn takes_body(&mut self) -> Result<bool, Closed> {
        if self.stage == Stage::Begun || self.body.is_complete() {
            return Ok(true);
        }
        let look =
            || if sys::is_all_read(self.worker)? { Ok(()) } else { Err(io::ErrorKind::WouldBlock.into()) };
        match self.worker.try_io(Interest::WRITABLE, look) {
            // A worker that closes leaves nothing in its queue either. The kernel sets the error before it empties that.
            Ok(()) => match self.worker.take_error()? {
                Some(error) => return Err(Closed::Untaken(error)),
                None => self.stage = Stage::Begun,
            },
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
        Ok(self.stage == Stage::Begun)
    }

    fn send_to_edge(&mut self) -> Result<(), Closed> {
        while !self.to_edge.is_empty() {
            match self.edge.try_write(&self.to_edge) {
                Ok(len) => self.to_edge.advance(len),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Waits until something can be done, and reads what has come.
    async fn wait(&mut self, incoming: &mut BytesMut) -> Result<(), Closed> {
        let has_room = self.to_worker.is_empty() && incoming.len() < BUFFER_LEN;
        let wants_body = has_room && !self.body.is_complete();
        let of_edge = interest(wants_body, !self.to_edge.is_empty());
        let is_held = self.stage == Stage::Opening && !incoming.is_empty();
        let has_more = !self.to_worker.is_empty() || is_held;
        let of_worker = interest(self.to_edge.len() < BUFFER_LEN, has_more);
        let ready_of = async |stream: &UnixStream, interest: Option<Interest>| match interest {
            Some(interest) => stream.ready(interest).await,
            None => std::future::pending().await,
        };
        tokio::select! {
            biased;
            ready = ready_of(self.worker, of_worker) => {
                if ready?.is_readable() {
                    self.read_answer()?;
                }
            }
            ready = ready_of(self.edge, of_edge) => {
                if ready?.is_readable() && wants_body {
                    read_some(self.edge, incoming)?;
                }
            }
        }
        Ok(())
    }

    fn read_answer(&mut self) -> Result<(), Closed> {
        let before = self.to_edge.len();
        self.to_edge.reserve(BUFFER_LEN / 4);
        match self.worker.try_read_buf(&mut self.to_edge) {
            // It can have read no more than was sent.
            Ok(0) if !self.to_worker.is_empty() && self.stage == Stage::Opening => {
                Err(Closed::Untaken(io::ErrorKind::UnexpectedEof.into()))
            }
            Ok(0) => Err(Closed::Gone),
            Ok(_) => {
                self.stage = Stage::Begun;
                self.answer.look(&self.to_edge[before..]);
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            // Linux says so if the other end was closed with unread bytes in it: it had not begun.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset && self.stage == Stage::Opening => {
                Err(Closed::Untaken(error))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// The worker wants no more of the body: what still comes of it is thrown away.
    async fn drain(mut self, incoming: &mut BytesMut) -> Result<(), Closed> {
        if self.is_kept && !self.to_worker.is_empty() {
            return Err(Closed::Gone);
        }
        discard_body(self.edge, &mut self.body, incoming).await
    }
}

/// `None`: of nothing.
fn interest(reads: bool, writes: bool) -> Option<Interest> {
    match (reads, writes) {
        (true, true) => Some(Interest::READABLE | Interest::WRITABLE),
        (true, false) => Some(Interest::READABLE),
        (false, true) => Some(Interest::WRITABLE),
        (false, false) => None,
    }
}

/// Connects to a Unix socket that is open as a path, whether or not it has a name. Not blocking.
pub fn connect(door: &OwnedFd) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let address = SocketAddrUnix::new(format!("/proc/self/fd/{}", door.as_raw_fd()))?;
    rustix::net::connect(&socket, &address)?;
    Ok(socket)
}

#[cfg(test)]
mod tests;
