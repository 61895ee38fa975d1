//! One request over a FastCGI connection: its body goes out while the answer comes in.
//!
//! Over which connection, and what becomes of it, is for its `Link`: a PHP worker's (`php`) or an instance's (`instance`).
//! Not here: the records (`keeper::fastcgi`), what the output means (`answer`).

use std::future::{Future, poll_fn};
use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes, BytesMut};
use http_body::Body;
use nagaya_base::RequestId;
use nagaya_cmdb::SiteName;
use nagaya_keeper::fastcgi::{self, CONTENT_MAX, Decoder, Event, OVERLOADED, ProtocolError};
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::time::{Instant, timeout_at};

use super::after::After;
use super::answer::{Failure, Output};
use crate::message::{BodyError, RequestBody};
use crate::sys;

/// Asked of the connection at once, bytes: PHP sends at most 8 KiB with one call.
const READ_LEN: usize = 16 << 10;

/// Lines of error output logged for one request, and the bytes of each.
const ERROR_LINES_MAX: u32 = 32;
const ERROR_LINE_LEN_MAX: usize = 2048;
const FIRST_UNLOGGED: u32 = ERROR_LINES_MAX + 1;

/// The connection a request goes over.
pub(super) trait Link: Unpin + 'static {
    /// The body is ended by an empty record, as the protocol has it.
    const ENDS_BODY: bool;

    /// The stream, and what came over it and was not used yet.
    fn line(&mut self) -> (&mut UnixStream, &mut BytesMut);

    /// The request may be given to another program although this one may have begun with it.
    fn may_repeat(&self) -> bool;

    fn after(&self) -> &Rc<After>;

    /// The request has ended and left nothing behind.
    fn leave(self);

    /// Nothing more is wanted of whoever is at the other end.
    fn abandon(self);
}

/// A request that a program serves.
pub(super) struct Exchange<L: Link> {
    request: Sending,
    answer: Receiving<L>,
}

impl<L: Link> Exchange<L> {
    /// `body` has an exact length, the one the parameters name.
    pub fn new(link: L, opening: Vec<u8>, body: RequestBody, errors: ErrorLines) -> Self {
        let len = body.len().expect("a body without a length was taken in before");
        let record = Record::default();
        let request =
            Sending { opening, opening_sent: 0, body, len, taken: 0, record, end_left: L::ENDS_BODY };
        let answer = Receiving {
            link: Some(link),
            decoder: Decoder::default(),
            errors,
            heard: false,
            had_body: len > 0,
        };
        Self { request, answer }
    }

    /// What is needed to ask another one, if nothing of the request's body is gone: it is kept, or nothing was taken of it.
    pub fn into_retry(mut self) -> Option<Retry<L>> {
        let Sending { opening, mut body, taken, .. } = self.request;
        if taken > 0 && !body.is_kept() {
            return None;
        }
        body.rewind();
        let errors = self.answer.errors.clone();
        Some(Retry { link: self.answer.link.take()?, opening, body, errors })
    }
}

/// A request that nobody has read.
pub(super) struct Retry<L> {
    pub link: L,
    pub opening: Vec<u8>,
    pub body: RequestBody,
    pub errors: ErrorLines,
}

impl<L: Link> Output for Exchange<L> {
    fn poll_output(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Failure>> {
        let Self { request, answer } = self;
        if let Some(link) = &mut answer.link {
            match request.send(link.line().0, cx) {
                Ok(()) => {}
                // It may have answered before it left; what it said last decides.
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
        let Some(link) = &self.answer.link else { return };
        if self.request.progress() == Progress::Done {
            let after = Rc::clone(link.after());
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
    /// The record that ends the body is still to be sent.
    end_left: bool,
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
        } else if std::mem::take(&mut self.end_left) {
            record.header = fastcgi::END_OF_BODY;
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
        } else if self.taken == self.len
            && !self.end_left
            && self.record.is_sent()
            && self.record.piece.is_empty()
        {
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

struct Receiving<L: Link> {
    /// `None` once the request is done.
    link: Option<L>,
    decoder: Decoder,
    errors: ErrorLines,
    /// The program said something.
    heard: bool,
    had_body: bool,
}

impl<L: Link> Receiving<L> {
    fn poll_output(&mut self, cx: &mut Context<'_>, sent: Progress) -> Poll<Result<Option<Bytes>, Failure>> {
        loop {
            let Some(link) = &mut self.link else { return Poll::Ready(Ok(None)) };
            let (stream, buffer) = link.line();
            let event = self.decoder.next(buffer);
            match event.map_err(protocol_failure)? {
                Some(Event::Stdout(piece)) => return Poll::Ready(Ok(Some(piece))),
                Some(Event::Stderr(piece)) => self.errors.take(&piece),
                Some(Event::End { .. }) => {
                    self.release(sent == Progress::Done);
                    return Poll::Ready(Ok(None));
                }
                None => match ready!(poll_read(stream, buffer, cx)) {
                    Ok(0) => return Poll::Ready(Err(self.death(sent, false))),
                    Ok(_) => self.heard = true,
                    Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                        return Poll::Ready(Err(self.death(sent, true)));
                    }
                    Err(error) => return Poll::Ready(Err(error.into())),
                },
            }
        }
    }

    /// Linux says that a connection was reset if its other end was closed with unread bytes in it. A program reads all of the
    /// opening before it begins, so if nothing else was sent, it had not begun. The end of a body tells nothing: it may lie
    /// there unread for as long as a program runs.
    fn death(&self, sent: Progress, is_reset: bool) -> Failure {
        let only_opening = !self.had_body || sent == Progress::Opened;
        let is_unread = sent == Progress::Opening || is_reset && only_opening && !L::ENDS_BODY;
        let may_repeat = only_opening && self.link.as_ref().is_some_and(Link::may_repeat);
        if (is_unread || may_repeat) && !self.heard { Failure::Unread } else { Failure::Died }
    }

    /// Gives the connection back if it is clean, and ends it otherwise.
    fn release(&mut self, all_sent: bool) {
        self.errors.end();
        let Some(mut link) = self.link.take() else { return };
        let (stream, buffer) = link.line();
        let clean =
            all_sent && buffer.is_empty() && (!self.had_body || sys::all_read(stream).unwrap_or(false));
        if clean {
            link.leave();
        } else {
            link.abandon();
        }
    }

    /// Waits for the end record of a request whose answer is complete, so that the program can be used again.
    async fn finish(mut self) {
        while let Ok(Some(_)) = poll_fn(|cx| self.poll_output(cx, Progress::Done)).await {}
    }
}

impl<L: Link> Drop for Receiving<L> {
    fn drop(&mut self) {
        if let Some(link) = self.link.take() {
            link.abandon();
        }
    }
}

/// Who is overloaded has not begun with the request.
fn protocol_failure(error: ProtocolError) -> Failure {
    match error {
        ProtocolError::Rejected(OVERLOADED) => Failure::Unread,
        other => Failure::Protocol(other.to_string()),
    }
}

fn poll_read(
    stream: &mut UnixStream,
    buffer: &mut BytesMut,
    cx: &mut Context<'_>,
) -> Poll<io::Result<usize>> {
    buffer.reserve(READ_LEN);
    // Unlike `try_read_buf` this notes when a read took all there was, which saves the next one.
    pin!(stream.read_buf(buffer)).poll(cx)
}

// === Error output ===

/// What a script says on its error output, as lines of the node's log.
#[derive(Clone)]
pub(super) struct ErrorLines {
    /// As the lines begin.
    whose: &'static str,
    site: SiteName,
    id: RequestId,
    line: Vec<u8>,
    lines: u32,
}

impl ErrorLines {
    pub fn new(whose: &'static str, site: SiteName, id: RequestId) -> Self {
        Self { whose, site, id, line: Vec::new(), lines: 0 }
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
        let whose = self.whose;
        match self.lines {
            ..=ERROR_LINES_MAX => tracing::warn!(site = %self.site, request = %self.id, "{whose}: {text}"),
            FIRST_UNLOGGED => {
                tracing::warn!(site = %self.site, request = %self.id, "{whose}: more error output, not logged");
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_output_is_bounded_whatever_its_lines() {
        let mut errors = ErrorLines::new("PHP", SiteName::new("demo").unwrap(), RequestId(1));
        errors.take(&vec![b'x'; 3 * ERROR_LINE_LEN_MAX]);
        assert_eq!(errors.line.len(), ERROR_LINE_LEN_MAX);
        assert_eq!(errors.lines, 0, "a line is logged when it ends");
        errors.take(b"y\n\nsecond\nthird");
        assert_eq!((errors.lines, errors.line.as_slice()), (2, &b"third"[..]));
        errors.end();
        assert_eq!((errors.lines, errors.line.len()), (3, 0));
    }
}
