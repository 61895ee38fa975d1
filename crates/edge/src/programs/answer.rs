//! From a running program's output to the answer of a request: the head and the body's length.
//!
//! The same for CGI processes and PHP workers. Not here: the grammar of the head (`response`), how long it may take
//! (`patience`), where the output comes
//! from (`cgi`, `php`).

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{Method, StatusCode};
use http_body::{Body, Frame, SizeHint};
use tokio::time::Instant;

use super::Outcome;
use super::patience::Alarm;
use super::response::{HeadError, HeadReader, ScriptHead};
use crate::message::{BodyError, Response, ResponseBody};
use crate::refusal::Refusal;

/// What has arrived together with the head is looked at up to here, bytes, to see whether the answer is complete already.
const GATHER_MAX: usize = 64 << 10;

/// Output that nobody will get (behind the declared length, or of an answer without body) is read up to here,
/// bytes, so that the program can end by itself.
const DISCARD_MAX: u64 = 16 << 20;

/// A program whose client has left may still take so long to come to its end. Long enough for an ordinary page: ending
/// and starting a PHP worker costs more than letting it finish, and a client could make the node do so at will.
const ABANDONED_MAX: Duration = Duration::from_secs(1);

/// The output of a running program. Whoever polls it also feeds the program's standard input.
pub(super) trait Output: Unpin + 'static {
    /// The next piece, never empty; `None` once the program is done.
    fn poll_output(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Failure>>;

    /// Bytes of request body the program has been given so far.
    fn fed(&self) -> u64;

    /// Nobody wants more of the answer although the program still runs: may it go on, not longer than until `deadline`?
    fn let_finish(self, deadline: Instant);
}

/// Why a program gave no answer, or no complete one.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    /// The client's side, not the program's.
    #[error(transparent)]
    Request(#[from] BodyError),
    #[error("{0}")]
    Head(#[from] HeadError),
    #[error("it did not go on in time")]
    Timeout,
    #[error("it ended in the middle of its answer")]
    Died,
    /// It was gone before it read the request, which can be given to another one.
    #[error("it was gone before it read the request")]
    Unread,
    #[error("it broke the protocol: {0}")]
    Protocol(String),
    #[error("its connection failed: {0}")]
    Io(#[from] io::Error),
}

impl Failure {
    /// For a request that has got no byte of an answer yet.
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

    /// For an answer that has begun.
    fn body_error(self) -> BodyError {
        match self {
            Self::Request(error) => error,
            other => BodyError::Backend(other.to_string()),
        }
    }
}

/// Output under a time limit.
/// Dropped before the output's end, nobody wants the rest: the program may come to its end, within a bound.
pub(super) struct Timed<O: Output> {
    /// `None` once it has ended, failed or been taken.
    output: Option<O>,
    alarm: Alarm,
    fed: u64,
}

impl<O: Output> Timed<O> {
    pub fn new(output: O, alarm: Alarm) -> Self {
        Self { output: Some(output), alarm, fed: 0 }
    }

    /// The output, unless it has ended.
    pub fn into_output(mut self) -> Option<O> {
        self.output.take()
    }

    /// What the program says now. Its end, well or not, is the end of this too.
    fn poll_output(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Failure>> {
        let Some(output) = &mut self.output else { return Poll::Ready(Ok(None)) };
        let polled = output.poll_output(cx);
        // A worker that had not begun is still needed, for what it was asked.
        if matches!(polled, Poll::Ready(Ok(None) | Err(_)))
            && !matches!(polled, Poll::Ready(Err(Failure::Unread)))
        {
            self.output = None;
        }
        polled
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Failure>> {
        if let Poll::Ready(ready) = self.poll_output(cx) {
            self.alarm.put_off();
            return Poll::Ready(ready);
        }
        // An upload that goes on is no silence.
        let fed = self.output.as_ref().map_or(self.fed, Output::fed);
        if std::mem::replace(&mut self.fed, fed) != fed {
            self.alarm.put_off();
        }
        ready!(self.alarm.poll(cx));
        self.output = None;
        Poll::Ready(Err(Failure::Timeout))
    }

    /// Reads the head of the answer, and what came together with it.
    pub async fn head(&mut self) -> Result<(ScriptHead, Bytes), Failure> {
        self.head_by(HeadReader::default()).await
    }

    /// The same by a reader that knows which program it is.
    pub async fn head_by(&mut self, mut reader: HeadReader) -> Result<(ScriptHead, Bytes), Failure> {
        loop {
            match poll_fn(|cx| self.poll(cx)).await? {
                Some(piece) => {
                    if let Some(complete) = reader.feed(piece)? {
                        return Ok(complete);
                    }
                }
                None => return Err(reader.ended().into()),
            }
        }
    }

    /// Reads to the end what nobody will get. A program is not stopped in the middle of its work just because its answer
    /// needs no body; if it goes on for too long or fails, that changes nothing for the client.
    async fn discard(mut self) {
        let mut left = DISCARD_MAX;
        while let Ok(Some(piece)) = poll_fn(|cx| self.poll(cx)).await {
            left = left.saturating_sub(piece.len() as u64);
            if left == 0 {
                return;
            }
        }
    }

    /// Takes what can be had without waiting. True if that is the end.
    async fn gather(&mut self, pieces: &mut VecDeque<Bytes>) -> Result<bool, Failure> {
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
    ) -> Result<Outcome, Failure> {
        let (status, headers, length) = match head {
            ScriptHead::LocalRedirect { path, query } => {
                self.discard().await;
                return Ok(Outcome::LocalRedirect { path, query });
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
                response.body = ResponseBody::stream(NoBody { length });
            }
            return Ok(Outcome::Response(response));
        }
        let mut pieces = VecDeque::new();
        if !rest.is_empty() {
            pieces.push_back(rest);
        }
        let total = |pieces: &VecDeque<Bytes>| pieces.iter().map(|piece| piece.len() as u64).sum::<u64>();
        let ended = match self.gather(&mut pieces).await {
            Ok(ended) => ended,
            // A program that fails behind its declared length takes nothing away from the client.
            Err(_) if length.is_some_and(|length| length <= total(&pieces)) => true,
            Err(failure) => return Err(failure),
        };
        response.body = if ended && length.is_none_or(|length| length == total(&pieces)) {
            ResponseBody::Bytes(joined(pieces))
        } else {
            let output = (!ended).then_some(self);
            ResponseBody::stream(ProgramBody { output, pieces, left: length, discarded: 0 })
        };
        Ok(Outcome::Response(response))
    }
}

impl<O: Output> Drop for Timed<O> {
    fn drop(&mut self) {
        if let Some(output) = self.output.take() {
            output.let_finish(self.alarm.deadline().min(Instant::now() + ABANDONED_MAX));
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

/// The body of an answer to `HEAD`: only its length is told, as the program declared it.
struct NoBody {
    length: Option<u64>,
}

impl Body for NoBody {
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

/// A body that is produced while it is sent. It never has another length than the one declared: what is too much
/// is left out, and what is missing is an error, which the wire turns into an aborted response.
struct ProgramBody<O: Output> {
    /// `None` once the program is done.
    output: Option<Timed<O>>,
    /// Arrived before the body was asked for.
    pieces: VecDeque<Bytes>,
    /// Bytes the declared length still leaves; `None` if the program declared none.
    left: Option<u64>,
    discarded: u64,
}

impl<O: Output> ProgramBody<O> {
    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Failure>> {
        if let Some(piece) = self.pieces.pop_front() {
            return Poll::Ready(Ok(Some(piece)));
        }
        match &mut self.output {
            Some(output) => output.poll(cx),
            None => Poll::Ready(Ok(None)),
        }
    }

    /// Cuts `piece` to what the declared length leaves.
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

impl<O: Output> Body for ProgramBody<O> {
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
                    // A program that fails behind its declared length takes nothing away from the client.
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

impl<O: Output> Drop for ProgramBody<O> {
    fn drop(&mut self) {
        // The wire stops asking as soon as the declared length is sent; the program may have more to do.
        if self.left == Some(0)
            && let Some(timed) = self.output.take()
        {
            let deadline = timed.alarm.deadline();
            if let Some(output) = timed.into_output() {
                output.let_finish(deadline);
            }
        }
    }
}

#[cfg(test)]
mod tests;
