//! Runs one request over a FastCGI connection: its body is sent while the answer arrives.
//!
//! Its `ResponderLink` decides about the connection: a PHP worker's (`php`) or an instance's
//! (`instance`). Not here: the records (`keeper::fastcgi`), the meaning of the output (`answer`).

use std::future::{Future, poll_fn};
use std::io;
use std::io::IoSlice;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes, BytesMut};
use http_body::Body;
use nagaya_base::{Code, RequestId};
use nagaya_keeper_api::fastcgi;
use nagaya_keeper_api::fastcgi::{CONTENT_MAX, FastCgiDecoder, FastCgiEvent, OVERLOADED, ProtocolError};
use nagaya_keeper_api::quiet_stream::QuietStream;
use nagaya_records::SiteName;
use tokio::io::AsyncReadExt;
use tokio::time::timeout_at;

use crate::backends::programs::after::BackgroundJobs;
use crate::backends::programs::answer::{FailureInquiry, OutputSource, ProgramFailure};
use crate::backends::programs::patience::LingerTimes;
use crate::http::message::{BodyError, RequestBody};
use crate::sys;

/// Bytes read from the connection at once. PHP sends at most 8 KiB with one call.
const READ_LEN: usize = 16 << 10;

/// Maximum number of error output lines logged for one request. `ERROR_LINE_LEN_MAX` is the
/// maximum length of each, bytes.
const ERROR_LINES_MAX: u32 = 32;
const ERROR_LINE_LEN_MAX: usize = 2048;
const FIRST_UNLOGGED: u32 = ERROR_LINES_MAX + 1;

/// The connection that carries a request.
pub(super) trait ResponderLink: Unpin + 'static {
    /// An empty record ends the body, as the protocol requires.
    const ENDS_BODY: bool;

    /// The program runs on for a request whose client has left. The closed direction tells it so.
    const LINGERS: bool;

    /// A record with the request's use follows the answer. `leave` takes it.
    const REPORTS: bool;

    /// Returns the stream, and received bytes that were not used yet.
    fn line(&mut self) -> (&mut QuietStream, &mut BytesMut);

    /// Returns whether the request may be given to another program although this one may have
    /// begun with it.
    fn may_repeat(&self) -> bool;

    fn after(&self) -> &Rc<BackgroundJobs>;

    /// Ends the use: the request has ended and left nothing behind.
    fn leave(self);

    /// Gives up the program at the other end.
    fn abandon(self);

    /// Gives up the program, and returns its cause of death.
    fn autopsy(self) -> FailureInquiry;
}

/// A request that a program serves.
pub(super) struct FastCgiExchange<L: ResponderLink> {
    request: RequestSender,
    answer: ResponseReceiver<L>,
}

impl<L: ResponderLink> FastCgiExchange<L> {
    /// `body` has an exact length, which the parameters contain.
    pub fn new(link: L, opening: Vec<u8>, body: RequestBody, errors: ErrorLines) -> Self {
        let len = body.len().expect("a body without a length was taken in before");
        let record = BodyRecord::default();
        let request =
            RequestSender { opening, opening_sent: 0, body, len, taken: 0, record, end_left: L::ENDS_BODY };
        let answer = ResponseReceiver {
            link: Some(link),
            decoder: FastCgiDecoder::default(),
            errors,
            heard: false,
            had_body: len > 0,
        };
        Self { request, answer }
    }

    /// Returns the data for another attempt, if nothing of the request's body is lost. It is
    /// kept, or nothing was taken of it.
    pub fn into_retry(mut self) -> Option<UnreadRequest<L>> {
        let RequestSender { opening, mut body, taken, .. } = self.request;
        if taken > 0 && !body.is_kept() {
            return None;
        }
        body.rewind();
        let errors = self.answer.errors.clone();
        Some(UnreadRequest { link: self.answer.link.take()?, opening, body, errors })
    }
}

/// A request that nobody has read.
pub(super) struct UnreadRequest<L> {
    pub link: L,
    pub opening: Vec<u8>,
    pub body: RequestBody,
    pub errors: ErrorLines,
}

impl<L: ResponderLink> OutputSource for FastCgiExchange<L> {
    fn poll_output(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, ProgramFailure>> {
        let Self { request, answer } = self;
        if let Some(link) = &mut answer.link {
            match request.send(link.line().0, cx) {
                Ok(()) => {}
                // The program may have answered before it ended. Its last output decides.
                Err(ProgramFailure::Io(error)) if is_gone(&error) => {}
                Err(failure) => return Poll::Ready(Err(failure)),
            }
        }
        answer.poll_output(cx, request.progress())
    }

    fn fed(&self) -> u64 {
        self.request.taken
    }

    fn let_finish(self, linger: LingerTimes) {
        let Some(link) = &self.answer.link else { return };
        if self.request.progress() == SendStage::Done {
            let after = Rc::clone(link.after());
            // Dropping the rest after the time limit ends it.
            after.run(self.answer.linger(linger));
        }
    }

    fn autopsy(mut self) -> FailureInquiry {
        match self.answer.link.take() {
            Some(link) => link.autopsy(),
            None => Box::pin(async { None }),
        }
    }
}

fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
}

// === The request ===

struct RequestSender {
    opening: Vec<u8>,
    opening_sent: usize,
    body: RequestBody,
    /// Announced length of the body, and the part that has been taken.
    len: u64,
    taken: u64,
    record: BodyRecord,
    /// The record that ends the body is still to be sent.
    end_left: bool,
}

/// The body record being sent.
#[derive(Default)]
struct BodyRecord {
    header: [u8; 8],
    header_left: usize,
    /// Number of bytes of `piece` that belong to this record.
    content_left: usize,
    piece: Bytes,
}

impl RequestSender {
    /// Sends as much as possible now. The opening and the first part of the body go together.
    fn send(&mut self, stream: &QuietStream, cx: &mut Context<'_>) -> Result<(), ProgramFailure> {
        loop {
            self.take_body(cx)?;
            let record = &self.record;
            let opening = &self.opening[self.opening_sent..];
            if opening.is_empty() && record.is_sent() {
                return Ok(());
            }
            let header = &record.header[record.header.len() - record.header_left..];
            let content = &record.piece[..record.content_left];
            match stream.try_write_vectored(&[
                IoSlice::new(opening),
                IoSlice::new(header),
                IoSlice::new(content),
            ]) {
                Ok(sent) => self.sent(sent),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let Poll::Ready(ready) = stream.poll_write_ready(cx) else { return Ok(()) };
                    ready?;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Begins the next record as soon as there are bytes for it.
    fn take_body(&mut self, cx: &mut Context<'_>) -> Result<(), ProgramFailure> {
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
            // A surplus byte would be read as the beginning of another request.
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

    fn progress(&self) -> SendStage {
        if self.opening_sent < self.opening.len() {
            SendStage::Opening
        } else if self.taken == self.len
            && !self.end_left
            && self.record.is_sent()
            && self.record.piece.is_empty()
        {
            SendStage::Done
        } else if self.taken == 0 {
            SendStage::Opened
        } else {
            SendStage::Body
        }
    }
}

/// The part of a request that has been sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SendStage {
    /// A part of the opening.
    Opening,
    /// The opening, and nothing of a body.
    Opened,
    /// A part of the body.
    Body,
    /// All of it.
    Done,
}

impl BodyRecord {
    fn is_sent(&self) -> bool {
        self.header_left == 0 && self.content_left == 0
    }
}

// === The answer ===

struct ResponseReceiver<L: ResponderLink> {
    /// `None` once the request is done.
    link: Option<L>,
    decoder: FastCgiDecoder,
    errors: ErrorLines,
    /// The program has sent something.
    heard: bool,
    had_body: bool,
}

impl<L: ResponderLink> ResponseReceiver<L> {
    fn poll_output(
        &mut self,
        cx: &mut Context<'_>,
        sent: SendStage,
    ) -> Poll<Result<Option<Bytes>, ProgramFailure>> {
        loop {
            let Some(link) = &mut self.link else { return Poll::Ready(Ok(None)) };
            let (stream, buffer) = link.line();
            let event = self.decoder.next(buffer);
            match event.map_err(protocol_failure)? {
                Some(FastCgiEvent::Stdout(piece)) => return Poll::Ready(Ok(Some(piece))),
                Some(FastCgiEvent::Stderr(piece)) => self.errors.take(&piece),
                Some(FastCgiEvent::End { .. }) => {
                    self.release(sent == SendStage::Done);
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

    /// Returns the failure of a program that ended. Linux reports a reset if the other end was
    /// closed with unread bytes in it. A program reads all of the opening before it begins. So if
    /// only that was sent, it had not begun. The end of a body proves nothing: it may stay unread
    /// while a program runs.
    fn death(&self, sent: SendStage, is_reset: bool) -> ProgramFailure {
        let only_opening = !self.had_body || sent == SendStage::Opened;
        let is_unread = sent == SendStage::Opening || is_reset && only_opening && !L::ENDS_BODY;
        let may_repeat = only_opening && self.link.as_ref().is_some_and(ResponderLink::may_repeat);
        if (is_unread || may_repeat) && !self.heard { ProgramFailure::Unread } else { ProgramFailure::Died }
    }

    /// Gives the connection back if it is clean, and ends it otherwise.
    fn release(&mut self, all_sent: bool) {
        self.errors.end();
        let Some(mut link) = self.link.take() else { return };
        let (stream, buffer) = link.line();
        let clean = all_sent
            && (L::REPORTS || buffer.is_empty())
            && (!self.had_body || sys::all_read(stream).unwrap_or(false));
        if clean {
            link.leave();
        } else {
            link.abandon();
        }
    }

    /// Waits for the end record of a request, so that the program can be used again. Then waits
    /// for its end.
    async fn linger(mut self, linger: LingerTimes) {
        if timeout_at(linger.read_until, self.finish()).await.is_ok() {
            return;
        }
        if !L::LINGERS || !self.hang_up() {
            return;
        }
        if timeout_at(linger.end, self.finish()).await.is_err() {
            let ErrorLines { whose, site, id, .. } = &self.errors;
            tracing::warn!(
                code = %STILL_AT_WORK, %site, request = %id,
                "{whose}: a script was ended because it still ran when the site's linger_seconds after its client left were over"
            );
        }
    }

    /// Returns once the program has finished the request, or its connection has ended.
    async fn finish(&mut self) {
        while let Ok(Some(_)) = poll_fn(|cx| self.poll_output(cx, SendStage::Done)).await {}
    }

    /// Closes the direction to the program. A gate that sees this closes the other one at PHP.
    /// The script notices at its next write that its client has left. Returns false if the
    /// connection is gone.
    fn hang_up(&mut self) -> bool {
        let Some(link) = &mut self.link else { return false };
        // A program that has ended already ends the wait that follows.
        let _ = rustix::net::shutdown(link.line().0, rustix::net::Shutdown::Write);
        true
    }
}

impl<L: ResponderLink> Drop for ResponseReceiver<L> {
    fn drop(&mut self) {
        if let Some(link) = self.link.take() {
            link.abandon();
        }
    }
}

/// Returns the failure for a protocol error. An overloaded program has not begun with the
/// request.
fn protocol_failure(error: ProtocolError) -> ProgramFailure {
    match error {
        ProtocolError::Rejected(OVERLOADED) => ProgramFailure::Unread,
        other => ProgramFailure::Protocol(other.to_string()),
    }
}

fn poll_read(
    stream: &mut QuietStream,
    buffer: &mut BytesMut,
    cx: &mut Context<'_>,
) -> Poll<io::Result<usize>> {
    buffer.reserve(READ_LEN);
    // Unlike `try_read_buf`, this records that a read took all there was, which saves the next
    // one.
    pin!(stream.read_buf(buffer)).poll(cx)
}

/// Code for a program that is ended although it was at work.
pub(super) const STILL_AT_WORK: Code = Code(479);

// === Error output ===

/// Writes a script's error output as lines of the node's log.
#[derive(Clone)]
pub(super) struct ErrorLines {
    /// Prefix of the lines.
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
