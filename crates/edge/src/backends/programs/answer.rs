//! Turns the output of a running program into the response to a request: the head and the body's
//! length.
//!
//! It is the same for CGI processes and PHP workers. Not here: the grammar of the head
//! (`response`), time limits (`patience`), the source of the output (`cgi`, `php`).

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use http::{Method, StatusCode};
use http_body::{Body, Frame, SizeHint};
use nagaya_base::Code;

use crate::backends::programs::patience::{LingerTimes, ProgramAlarm};
use crate::backends::programs::response::{HeadError, HeadReader, ScriptHead};
use crate::backends::programs::script::ProgramOutcome;
use crate::http::message::{BodyError, Response, ResponseBody};
use crate::http::refusal::Refusal;

/// The same code as the keeper's for applications.
const CODE_MEMORY: Code = Code(324);

/// Maximum number of bytes collected with the head, to see whether the answer is complete
/// already.
const GATHER_MAX: usize = 64 << 10;

/// Maximum number of unused output bytes that are read, so that the program can end by itself.
/// Output is unused behind the declared length, or of an answer without body.
const DISCARD_MAX: u64 = 16 << 20;

/// Returns the failure that ended a program, once that is known.
pub(super) type FailureInquiry = Pin<Box<dyn Future<Output = Option<ProgramFailure>>>>;

/// The output of a running program. Polling it also feeds the program's standard input.
pub(super) trait OutputSource: Unpin + 'static {
    /// Returns the next piece, never empty. `None` once the program is done.
    fn poll_output(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, ProgramFailure>>;

    /// Returns the number of request body bytes given to the program so far.
    fn fed(&self) -> u64;

    /// Lets the program run on for a limited time, although the rest of the answer is not needed.
    fn let_finish(self, linger: LingerTimes);

    /// Ends the rest of a failed program, and returns its cause of death. `None` if none is
    /// known.
    fn autopsy(self) -> FailureInquiry;
}

/// Reason why a program gave no answer, or no complete one.
#[derive(Debug, thiserror::Error)]
pub(super) enum ProgramFailure {
    /// The fault is the client's, not the program's.
    #[error(transparent)]
    Request(#[from] BodyError),
    #[error("{0}")]
    Head(#[from] HeadError),
    #[error("it made no progress in time")]
    Timeout,
    #[error("it ended in the middle of its answer")]
    Died,
    /// The kernel killed it at a memory limit.
    #[error(
        "out of memory: the kernel killed it at the memory limit of its tenant or of the node [{CODE_MEMORY}]"
    )]
    OutOfMemory,
    /// It ended before it read the request, which can be given to another one.
    #[error("it was gone before it read the request")]
    Unread,
    #[error("it broke the protocol: {0}")]
    Protocol(String),
    #[error("its connection failed: {0}")]
    Io(#[from] io::Error),
}

impl ProgramFailure {
    /// Returns the refusal for a request without any byte of an answer yet.
    pub fn refusal(self, program: &str) -> Refusal {
        match self {
            Self::Request(BodyError::ClientGone) => Refusal::ClientGone,
            Self::Request(BodyError::Malformed(why)) => Refusal::BadRequest(why),
            Self::Request(BodyError::TooLarge(_)) => Refusal::BodyTooLarge,
            Self::Request(BodyError::Stalled) => Refusal::RequestTimeout,
            Self::Timeout => Refusal::BackendTimeout,
            other => Refusal::BackendInvalid(format!("{program}: {other}")),
        }
    }

    /// Returns the error for an answer that has begun.
    fn body_error(self) -> BodyError {
        match self {
            Self::Request(error) => error,
            other => BodyError::Backend(other.to_string()),
        }
    }
}

/// Output under a time limit. If it is dropped before its end, the rest is not needed. Then the
/// program may still come to its end, within a time limit.
pub(super) struct TimedOutput<O: OutputSource> {
    /// `None` once it has ended, failed or been taken.
    output: Option<O>,
    /// The program broke off, and the cause is being determined.
    autopsy: Option<FailureInquiry>,
    /// The head of the answer is not complete, so an end now is an error.
    wants_head: bool,
    alarm: ProgramAlarm,
    fed: u64,
}

impl<O: OutputSource> TimedOutput<O> {
    pub fn new(output: O, alarm: ProgramAlarm) -> Self {
        Self { output: Some(output), autopsy: None, wants_head: true, alarm, fed: 0 }
    }

    /// Returns the output, unless it has ended.
    pub fn into_output(mut self) -> Option<O> {
        self.output.take()
    }

    /// Returns the program's next output. Its end, good or bad, ends this, too.
    fn poll_output(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, ProgramFailure>> {
        if let Some(autopsy) = &mut self.autopsy {
            let died_of = ready!(autopsy.as_mut().poll(cx));
            self.autopsy = None;
            return Poll::Ready(Err(died_of.unwrap_or(ProgramFailure::Died)));
        }
        let Some(output) = &mut self.output else { return Poll::Ready(Ok(None)) };
        let polled = output.poll_output(cx);
        if matches!(polled, Poll::Ready(Err(ProgramFailure::Died)))
            && let Some(output) = self.output.take()
        {
            self.autopsy = Some(output.autopsy());
            return self.poll_output(cx);
        }
        if self.wants_head && matches!(polled, Poll::Ready(Ok(None))) {
            // The reader of the head gets the reason for its absence.
            return polled;
        }
        // A worker that had not begun is still needed to retry the request.
        if matches!(polled, Poll::Ready(Ok(None) | Err(_)))
            && !matches!(polled, Poll::Ready(Err(ProgramFailure::Unread)))
        {
            self.output = None;
        }
        polled
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, ProgramFailure>> {
        if let Poll::Ready(ready) = self.poll_output(cx) {
            self.alarm.put_off();
            return Poll::Ready(ready);
        }
        // A continuing upload is no silence.
        let fed = self.output.as_ref().map_or(self.fed, OutputSource::fed);
        if std::mem::replace(&mut self.fed, fed) != fed {
            self.alarm.put_off();
        }
        ready!(self.alarm.poll(cx));
        self.output = None;
        Poll::Ready(Err(ProgramFailure::Timeout))
    }

    /// Reads the head of the answer, and the bytes that came with it.
    pub async fn head(&mut self) -> Result<(ScriptHead, Bytes), ProgramFailure> {
        self.head_by(HeadReader::default()).await
    }

    /// Reads the same by a reader for a known program.
    pub async fn head_by(&mut self, mut reader: HeadReader) -> Result<(ScriptHead, Bytes), ProgramFailure> {
        loop {
            match poll_fn(|cx| self.poll(cx)).await? {
                Some(piece) => {
                    if let Some(complete) = reader.feed(piece)? {
                        self.wants_head = false;
                        return Ok(complete);
                    }
                }
                None => {
                    let died_of = match self.output.take() {
                        Some(output) => output.autopsy().await,
                        None => None,
                    };
                    return Err(died_of.unwrap_or_else(|| reader.ended().into()));
                }
            }
        }
    }

    /// Reads unused output to its end. A program is not stopped in its work only because its
    /// answer needs no body. If it takes too long or fails, nothing changes for the client.
    async fn discard(mut self) {
        let mut left = DISCARD_MAX;
        while let Ok(Some(piece)) = poll_fn(|cx| self.poll(cx)).await {
            left = left.saturating_sub(piece.len() as u64);
            if left == 0 {
                return;
            }
        }
    }

    /// Takes the bytes that are there without waiting. Returns true if that is the end.
    async fn gather(&mut self, pieces: &mut VecDeque<Bytes>) -> Result<bool, ProgramFailure> {
        let mut room = GATHER_MAX;
        poll_fn(|cx| {
            while room > 0 {
                match self.poll_output(cx) {
                    Poll::Ready(Ok(Some(piece))) => {
                        self.alarm.put_off();
                        room = room.saturating_sub(piece.len());
                        pieces.push_back(piece);
                    }
                    Poll::Ready(Ok(None)) => return Poll::Ready(Ok(true)),
                    Poll::Ready(Err(failure)) => return Poll::Ready(Err(failure)),
                    Poll::Pending => break,
                }
            }
            Poll::Ready(Ok(false))
        })
        .await
    }

    /// Turns head and output into the request's outcome.
    pub async fn outcome(
        mut self,
        method: &Method,
        head: ScriptHead,
        rest: Bytes,
    ) -> Result<ProgramOutcome, ProgramFailure> {
        let (status, headers, length) = match head {
            ScriptHead::LocalRedirect { path, query } => {
                self.discard().await;
                return Ok(ProgramOutcome::LocalRedirect { path, query });
            }
            ScriptHead::Document { status, headers, length } => (status, headers, length),
        };
        let mut response = Response::new(status);
        response.headers = headers.into();
        let never_has_body =
            matches!(status, StatusCode::NO_CONTENT | StatusCode::RESET_CONTENT | StatusCode::NOT_MODIFIED);
        if never_has_body || method == Method::HEAD {
            self.discard().await;
            if !never_has_body {
                response.body = ResponseBody::stream(HeadOnlyBody { length });
            }
            return Ok(ProgramOutcome::Response(response));
        }
        let mut pieces = VecDeque::new();
        if !rest.is_empty() {
            pieces.push_back(rest);
        }
        let total = |pieces: &VecDeque<Bytes>| pieces.iter().map(|piece| piece.len() as u64).sum::<u64>();
        let ended = match self.gather(&mut pieces).await {
            Ok(ended) => ended,
            // A program that fails behind its declared length changes nothing for the client.
            Err(_) if length.is_some_and(|length| length <= total(&pieces)) => true,
            Err(failure) => return Err(failure),
        };
        response.body = if ended && length.is_none_or(|length| length == total(&pieces)) {
            ResponseBody::Bytes(joined(pieces))
        } else {
            let output = (!ended).then_some(self);
            ResponseBody::stream(ProgramBody { output, pieces, left: length, discarded: 0 })
        };
        Ok(ProgramOutcome::Response(response))
    }
}

impl<O: OutputSource> Drop for TimedOutput<O> {
    fn drop(&mut self) {
        if let Some(output) = self.output.take() {
            output.let_finish(self.alarm.linger());
        }
    }
}

fn joined(mut pieces: VecDeque<Bytes>) -> Bytes {
    if pieces.len() == 1 {
        return pieces.pop_front().expect("there is one");
    }
    let mut whole = BytesMut::with_capacity(pieces.iter().map(Bytes::len).sum());
    for piece in pieces {
        whole.extend_from_slice(&piece);
    }
    whole.freeze()
}

/// The body of an answer to `HEAD`. It has only the length that the program declared.
struct HeadOnlyBody {
    length: Option<u64>,
}

impl Body for HeadOnlyBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        Poll::Ready(None)
    }

    fn is_end_stream(&self) -> bool {
        true
    }

    fn size_hint(&self) -> SizeHint {
        self.length.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

/// A body that is produced while it is sent. Invariant: it never has another length than the
/// declared one. Surplus bytes are dropped. Missing ones are an error, for which the wire aborts
/// the response.
struct ProgramBody<O: OutputSource> {
    /// `None` once the program is done.
    output: Option<TimedOutput<O>>,
    /// Pieces that arrived before the body was polled.
    pieces: VecDeque<Bytes>,
    /// Rest of the declared length. `None` if the program declared none.
    left: Option<u64>,
    discarded: u64,
}

impl<O: OutputSource> ProgramBody<O> {
    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, ProgramFailure>> {
        if let Some(piece) = self.pieces.pop_front() {
            return Poll::Ready(Ok(Some(piece)));
        }
        match &mut self.output {
            Some(output) => output.poll(cx),
            None => Poll::Ready(Ok(None)),
        }
    }

    /// Cuts `piece` to the rest of the declared length.
    fn admit(&mut self, mut piece: Bytes) -> Option<Bytes> {
        if let Some(left) = &mut self.left {
            let whole = piece.len() as u64;
            let taken = whole.min(*left);
            *left -= taken;
            self.discarded += whole - taken;
            piece.truncate(usize::try_from(taken).expect("not longer than the piece"));
        }
        (!piece.is_empty()).then_some(piece)
    }
}

impl<O: OutputSource> Body for ProgramBody<O> {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        loop {
            let complete = self.left == Some(0);
            let Poll::Ready(piece) = self.poll_piece(cx) else {
                return Poll::Pending;
            };
            match piece {
                Ok(Some(piece)) => {
                    if let Some(piece) = self.admit(piece) {
                        return Poll::Ready(Some(Ok(Frame::data(piece))));
                    }
                    if self.discarded > DISCARD_MAX {
                        self.output = None;
                        self.pieces.clear();
                    }
                }
                Ok(None) => {
                    self.output = None;
                    return Poll::Ready(self.left.filter(|&left| left > 0).map(|left| {
                        Err(BodyError::Backend(format!(
                            "it ended {left} bytes before the length it had declared"
                        )))
                    }));
                }
                Err(failure) => {
                    self.output = None;
                    self.pieces.clear();
                    // A program that fails behind its declared length changes nothing for the
                    // client.
                    return Poll::Ready((!complete).then(|| Err(failure.body_error())));
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.output.is_none() && self.pieces.is_empty() && self.left.is_none_or(|left| left == 0)
    }

    fn size_hint(&self) -> SizeHint {
        self.left.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

impl<O: OutputSource> Drop for ProgramBody<O> {
    fn drop(&mut self) {
        // The wire stops polling when the declared length is sent. The program may have more to
        // do.
        if self.left == Some(0)
            && let Some(timed) = self.output.take()
        {
            let linger = timed.alarm.linger_complete();
            if let Some(output) = timed.into_output() {
                output.let_finish(linger);
            }
        }
    }
}

#[cfg(test)]
mod tests;
