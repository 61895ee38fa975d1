//! One request over the connection to a PHP worker: its body goes out while the answer comes in.
//!
//! Not here: the records (`fastcgi`), whose turn it is (`pool`), what the output means (`answer`).
//!
//! A worker serves another request only if this one left nothing behind: everything was sent, everything was read by the worker,
//! the end record came and no byte after it. The second is not a formality: PHP forgets how much of a body record a
//! script left unread (a `PUT` handler that reads only the beginning), and would take the rest of the body, which a
//! visitor chose, for the next FastCGI request.
//!
//! It also serves others only after the keeper has said what this request used: the answer may come over another
//! connection than the next request's, so asking and going on would charge one request for the next one's work. A tenant's
//! other workers do not wait, and neither does the client, unless a CPU quota is to be settled.

use std::future::{Future, poll_fn};
use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use http_body::Body;
use nagaya_base::RequestId;
use nagaya_cmdb::SiteName;
use nagaya_keeper::client::Keeper;
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::time::{Instant, timeout, timeout_at};

use super::after::After;
use super::answer::{Failure, Output};
use super::fastcgi::{self, CONTENT_MAX, Decoder, Event};
use super::pool::{Lease, Worker};
use crate::message::{BodyError, RequestBody};
use crate::stay::Due;
use crate::sys;

/// Asked of the connection at once, bytes: PHP sends at most 8 KiB with one call.
const READ_LEN: usize = 16 << 10;

/// Lines of error output logged for one request, and the bytes of each.
const ERROR_LINES_MAX: u32 = 32;
const ERROR_LINE_LEN_MAX: usize = 2048;
const FIRST_UNLOGGED: u32 = ERROR_LINES_MAX + 1;

/// A request that a worker serves.
pub(super) struct Exchange {
    request: Sending,
    answer: Receiving,
}

/// A worker that serves a request, and what is to be done when it has.
pub(super) struct Serving {
    lease: Lease,
    due: Due,
    keeper: Rc<Keeper>,
    after: Rc<After>,
}

/// So long the keeper may take to say what a request used.
const LEAVE_MAX: Duration = Duration::from_secs(2);

impl Serving {
    pub fn new(lease: Lease, due: Due, keeper: Rc<Keeper>, after: Rc<After>) -> Self {
        Self { lease, due, keeper, after }
    }

    fn worker(&mut self) -> &mut Worker {
        self.lease.worker()
    }

    /// For asking another worker in the place of one that has read nothing.
    pub fn into_lease(self) -> (Lease, Due) {
        (self.lease, self.due)
    }

    /// The request has ended and left nothing behind: the worker serves others, once it is known what this one used.
    fn leave(self) {
        let Self { mut lease, due, keeper, after } = self;
        after.run(async move {
            match timeout(LEAVE_MAX, keeper.leave(lease.worker().id)).await {
                Ok(Ok(usage)) => {
                    due.pay(usage);
                    lease.give_back();
                }
                _ => end(lease, due).await,
            }
        });
    }

    /// Ends the worker.
    fn abandon(self) {
        let Self { lease, due, after, .. } = self;
        after.run(end(lease, due));
    }
}

async fn end(lease: Lease, due: Due) {
    let Some(process) = lease.into_process() else { return };
    if let Ok(Some(usage)) = timeout(LEAVE_MAX, process.end()).await {
        due.pay(usage);
    }
}

impl Exchange {
    /// `body` has an exact length, the one the parameters name.
    pub fn new(serving: Serving, opening: Vec<u8>, body: RequestBody, errors: ErrorLines) -> Self {
        let len = body.len().expect("a body without a length was taken in before");
        let request = Sending { opening, opening_sent: 0, body, len, taken: 0, record: Record::default() };
        let answer = Receiving {
            serving: Some(serving),
            decoder: Decoder::default(),
            errors,
            heard: false,
            had_body: len > 0,
        };
        Self { request, answer }
    }

    /// What is needed to ask another worker, if nothing of the request's body is gone.
    pub fn into_retry(mut self) -> Option<Retry> {
        let Sending { opening, body, taken: 0, .. } = self.request else { return None };
        let errors = self.answer.errors.clone();
        Some(Retry { serving: self.answer.serving.take()?, opening, body, errors })
    }
}

/// A request that no worker has read.
pub(super) struct Retry {
    pub serving: Serving,
    pub opening: Vec<u8>,
    pub body: RequestBody,
    pub errors: ErrorLines,
}

impl Output for Exchange {
    fn poll_output(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Failure>> {
        let Self { request, answer } = self;
        if let Some(serving) = &mut answer.serving {
            match request.send(&serving.worker().stream, cx) {
                Ok(()) => {}
                // The worker may have answered before it left; what it said last decides.
                Err(Failure::Io(error)) if is_gone(&error) => {}
                Err(failure) => return Poll::Ready(Err(failure)),
            }
        }
        answer.poll_output(cx, request.progress())
    }

    fn fed(&self) -> u64 {
        self.request.taken
    }

    fn let_finish(self, deadline: Instant) {
        let Some(serving) = &self.answer.serving else { return };
        if self.request.progress() == Progress::Done {
            let after = Rc::clone(&serving.after);
            after.run(async move {
                // What has not come to its end by then is ended by being dropped.
                let _ = timeout_at(deadline, self.answer.finish()).await;
            });
        }
    }
}

fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
}

// === The request ===

struct Sending {
    opening: Vec<u8>,
    opening_sent: usize,
    body: RequestBody,
    /// Length of the body as announced, and how much of it has been taken.
    len: u64,
    taken: u64,
    record: Record,
}

/// The body record being sent.
#[derive(Default)]
struct Record {
    header: [u8; 8],
    header_left: usize,
    /// What of `piece` belongs to this record.
    content_left: usize,
    piece: Bytes,
}

impl Sending {
    /// Sends what can be sent now. Opening and the first of the body go out together.
    fn send(&mut self, stream: &UnixStream, cx: &mut Context<'_>) -> Result<(), Failure> {
        loop {
            self.take_body(cx)?;
            let record = &self.record;
            let opening = &self.opening[self.opening_sent..];
            if opening.is_empty() && record.is_sent() {
                return Ok(());
            }
            let Poll::Ready(ready) = stream.poll_write_ready(cx) else { return Ok(()) };
            ready?;
            let header = &record.header[record.header.len() - record.header_left..];
            let content = &record.piece[..record.content_left];
            match stream.try_write_vectored(&[
                IoSlice::new(opening),
                IoSlice::new(header),
                IoSlice::new(content),
            ]) {
                Ok(sent) => self.sent(sent),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Begins the next record as soon as there is something for it.
    fn take_body(&mut self, cx: &mut Context<'_>) -> Result<(), Failure> {
        let record = &mut self.record;
        if !record.is_sent() {
            return Ok(());
        }
        while record.piece.is_empty() && self.taken < self.len {
            let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(cx) else { return Ok(()) };
            let Some(frame) = frame.transpose()? else {
                return Err(BodyError::Malformed("the body is shorter than announced").into());
            };
            let Ok(data) = frame.into_data() else { continue };
            self.taken += data.len() as u64;
            // One byte too many would be read as the beginning of another request.
            if self.taken > self.len {
                return Err(BodyError::Malformed("the body is longer than announced").into());
            }
            record.piece = data;
        }
        if !record.piece.is_empty() {
            record.content_left = record.piece.len().min(CONTENT_MAX);
            let len = u16::try_from(record.content_left).expect("at most CONTENT_MAX");
            record.header = fastcgi::body_header(len);
            record.header_left = record.header.len();
        }
        Ok(())
    }

    fn sent(&mut self, mut bytes: usize) {
        let mut part = |left: usize| {
            let sent = left.min(bytes);
            bytes -= sent;
            sent
        };
        self.opening_sent += part(self.opening.len() - self.opening_sent);
        self.record.header_left -= part(self.record.header_left);
        let content = part(self.record.content_left);
        self.record.content_left -= content;
        self.record.piece.advance(content);
    }

    fn progress(&self) -> Progress {
        if self.opening_sent < self.opening.len() {
            Progress::Opening
        } else if self.taken == self.len && self.record.is_sent() && self.record.piece.is_empty() {
            Progress::Done
        } else if self.taken == 0 {
            Progress::Opened
        } else {
            Progress::Body
        }
    }
}

/// How much of a request has been sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Progress {
    /// Not all of the opening.
    Opening,
    /// The opening, and nothing of a body.
    Opened,
    /// A part of the body.
    Body,
    /// All of it.
    Done,
}

impl Record {
    fn is_sent(&self) -> bool {
        self.header_left == 0 && self.content_left == 0
    }
}

// === The answer ===

struct Receiving {
    /// `None` once the request is done and the worker serves others or is ended.
    serving: Option<Serving>,
    decoder: Decoder,
    errors: ErrorLines,
    /// The worker said something.
    heard: bool,
    had_body: bool,
}

impl Receiving {
    fn poll_output(&mut self, cx: &mut Context<'_>, sent: Progress) -> Poll<Result<Option<Bytes>, Failure>> {
        loop {
            let Some(serving) = &mut self.serving else { return Poll::Ready(Ok(None)) };
            let worker = serving.worker();
            let event = self.decoder.next(&mut worker.buffer);
            match event.map_err(|error| Failure::Protocol(error.to_string()))? {
                Some(Event::Stdout(piece)) => return Poll::Ready(Ok(Some(piece))),
                Some(Event::Stderr(piece)) => self.errors.take(&piece),
                Some(Event::End { .. }) => {
                    self.release(sent == Progress::Done);
                    return Poll::Ready(Ok(None));
                }
                None => match ready!(poll_read(worker, cx)) {
                    Ok(0) => return Poll::Ready(Err(self.death(sent == Progress::Opening))),
                    Ok(_) => self.heard = true,
                    // Linux says so if the worker's end was closed with unread bytes in it. A worker reads all of the
                    // opening before it begins, so if nothing else was sent, it had not begun.
                    Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                        let only_opening = !self.had_body || sent == Progress::Opened;
                        return Poll::Ready(Err(self.death(only_opening || sent == Progress::Opening)));
                    }
                    Err(error) => return Poll::Ready(Err(error.into())),
                },
            }
        }
    }

    fn death(&self, unread: bool) -> Failure {
        if unread && !self.heard { Failure::Unread } else { Failure::Died }
    }

    /// Gives the worker back if the connection is clean, and ends it otherwise.
    fn release(&mut self, all_sent: bool) {
        self.errors.end();
        let Some(mut serving) = self.serving.take() else { return };
        let worker = serving.worker();
        let clean = all_sent
            && worker.buffer.is_empty()
            && (!self.had_body || sys::all_read(&worker.stream).unwrap_or(false));
        if clean {
            serving.leave();
        } else {
            serving.abandon();
        }
    }

    /// Waits for the end record of a request whose answer is complete, so that the worker can be used again.
    async fn finish(mut self) {
        while let Ok(Some(_)) = poll_fn(|cx| self.poll_output(cx, Progress::Done)).await {}
    }
}

impl Drop for Receiving {
    fn drop(&mut self) {
        if let Some(serving) = self.serving.take() {
            serving.abandon();
        }
    }
}

fn poll_read(worker: &mut Worker, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
    let Worker { stream, buffer, .. } = worker;
    buffer.reserve(READ_LEN);
    // Unlike `try_read_buf` this notes when a read took all there was, which saves the next one.
    pin!(stream.read_buf(buffer)).poll(cx)
}

// === Error output ===

/// What a script says on its error output, as lines of the node's log.
#[derive(Clone)]
pub(super) struct ErrorLines {
    site: SiteName,
    id: RequestId,
    line: Vec<u8>,
    lines: u32,
}

impl ErrorLines {
    pub fn new(site: SiteName, id: RequestId) -> Self {
        Self { site, id, line: Vec::new(), lines: 0 }
    }

    fn take(&mut self, output: &[u8]) {
        for part in output.split_inclusive(|&byte| byte == b'\n') {
            let room = ERROR_LINE_LEN_MAX - self.line.len();
            let text = part.strip_suffix(b"\n").unwrap_or(part);
            self.line.extend_from_slice(&text[..text.len().min(room)]);
            if part.ends_with(b"\n") {
                self.end();
            }
        }
    }

    /// Logs the line collected so far.
    fn end(&mut self) {
        if self.line.is_empty() {
            return;
        }
        // A script must not be able to forge lines or move a terminal's cursor.
        let text: String = String::from_utf8_lossy(&self.line)
            .chars()
            .map(|letter| if letter.is_control() { ' ' } else { letter })
            .collect();
        self.line.clear();
        self.lines = self.lines.saturating_add(1);
        match self.lines {
            ..=ERROR_LINES_MAX => tracing::warn!(site = %self.site, request = %self.id, "PHP: {text}"),
            FIRST_UNLOGGED => {
                tracing::warn!(site = %self.site, request = %self.id, "PHP: more error output, not logged");
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests;
