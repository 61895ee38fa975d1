//! Provides a response's body as a stream of chunks, for wires that cannot hand a file to the
//! kernel.
//!
//! Not here: plain HTTP/1, which sends files by `sendfile` (`h1::write`).

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use rustix::buffer::spare_capacity;
use tokio::time::{Instant, sleep_until};

use crate::http::message::{BodyError, BodyPart, Response, ResponseBody, SendObserver};
use crate::http::throttle::flow::{BodyPacer, PacedBody};

/// Maximum number of bytes read or passed on at once. It is four HTTP/2 frames or TLS records of
/// the usual size. Reading that much from the page cache takes some 10 us, less than a hand-over
/// to another thread.
const CHUNK_BYTES: usize = 64 << 10;

/// The body of a response while it is sent, with all guards of the response. They are released
/// when the body is dropped: at its end, or when the client leaves.
pub struct OutgoingBody {
    source: BodyContent,
    sent: u64,
    failed: bool,
    receipt: Option<Box<dyn SendObserver>>,
    pace: Option<Rc<SendProgress>>,
}

pub(crate) enum BodyContent {
    Parts { parts: VecDeque<BodyPart>, left: u64 },
    Stream(Pin<Box<dyn Body<Data = Bytes, Error = BodyError>>>),
}

impl OutgoingBody {
    /// Takes the body and its guards out of `response`, and leaves status and headers.
    /// `with_body` is false if the response has no body on the wire (HEAD, 204, 304).
    pub fn take(response: &mut Response, with_body: bool) -> Self {
        let body = std::mem::replace(&mut response.body, ResponseBody::Empty);
        let source = match response.flow.take() {
            Some(flow) if with_body => BodyContent::slow(body, flow),
            _ if with_body => BodyContent::new(body),
            _ => BodyContent::new(ResponseBody::Empty),
        };
        Self { source, sent: 0, failed: false, receipt: response.receipt.take(), pace: None }
    }

    /// Records that the client has taken some bytes.
    pub fn client_took(&self) {
        if let Some(pace) = &self.pace {
            pace.client_took();
        }
    }

    /// Records in `pace` whose turn it is.
    pub fn paced(mut self, pace: Rc<SendProgress>) -> Self {
        self.pace = Some(pace);
        self
    }
}

impl BodyContent {
    pub fn new(body: ResponseBody) -> Self {
        let parts = match body {
            ResponseBody::Empty => VecDeque::new(),
            ResponseBody::Bytes(bytes) => VecDeque::from([BodyPart::Bytes(bytes)]),
            ResponseBody::File { file, offset, len } => {
                VecDeque::from([BodyPart::File { file, offset, len }])
            }
            ResponseBody::Parts(parts) => parts.into(),
            ResponseBody::Stream(stream) => return Self::Stream(stream),
            // A tunnel goes to `http1`. It has no body here.
            ResponseBody::Tunnel(_) => VecDeque::new(),
        };
        let left = parts.iter().map(BodyPart::len).sum();
        Self::Parts { parts, left }
    }

    /// Returns the body held to the limits of `flow`.
    fn slow(body: ResponseBody, flow: Box<BodyPacer>) -> Self {
        match Self::new(body) {
            Self::Stream(stream) => Self::Stream(Box::pin(PacedBody::new(stream, flow))),
            parts @ Self::Parts { .. } => Self::Stream(Box::pin(PacedBody::new(parts, flow))),
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match self {
            Self::Stream(stream) => stream.as_mut().poll_frame(cx),
            Self::Parts { parts, left } => {
                let chunk = next_chunk(parts);
                if let Some(Ok(bytes)) = &chunk {
                    *left -= bytes.len() as u64;
                }
                Poll::Ready(chunk.map(|chunk| chunk.map(Frame::data).map_err(BodyError::File)))
            }
        }
    }

    fn is_end(&self) -> bool {
        match self {
            Self::Parts { left, .. } => *left == 0,
            Self::Stream(stream) => stream.is_end_stream(),
        }
    }
}

impl Body for BodyContent {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        self.poll(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.is_end()
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Parts { left, .. } => SizeHint::with_exact(*left),
            Self::Stream(stream) => stream.size_hint(),
        }
    }
}

/// Returns the next bytes of the first part that has any.
fn next_chunk(parts: &mut VecDeque<BodyPart>) -> Option<io::Result<Bytes>> {
    while parts.front().is_some_and(BodyPart::is_empty) {
        parts.pop_front();
    }
    match parts.front_mut()? {
        BodyPart::Bytes(bytes) => Some(Ok(bytes.split_to(bytes.len().min(CHUNK_BYTES)))),
        BodyPart::File { file, offset, len } => {
            let want = usize::try_from(*len).map_or(CHUNK_BYTES, |len| len.min(CHUNK_BYTES));
            let read = read_at(file, *offset, want);
            if let Ok(bytes) = &read {
                *offset += bytes.len() as u64;
                *len -= bytes.len() as u64;
            }
            Some(read)
        }
    }
}

/// Reads between 1 and `want` bytes from `offset`. A file that ended before is an error, because
/// its length is already announced.
fn read_at(file: &OwnedFd, offset: u64, want: usize) -> io::Result<Bytes> {
    let mut buffer = Vec::with_capacity(want);
    let read = rustix::io::retry_on_intr(|| rustix::io::pread(file, spare_capacity(&mut buffer), offset))?;
    if read == 0 {
        return Err(io::Error::new(
            io::ErrorKind::UnexpectedEof,
            "the file became shorter while it was sent",
        ));
    }
    buffer.truncate(want);
    Ok(Bytes::from(buffer))
}

impl Body for OutgoingBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        if let Some(pace) = &this.pace {
            pace.backends_turn();
        }
        let frame = ready!(this.source.poll(cx));
        if let Some(pace) = &this.pace {
            pace.clients_turn();
        }
        match &frame {
            Some(Ok(frame)) => this.sent += frame.data_ref().map_or(0, |data| data.len() as u64),
            Some(Err(why)) => {
                this.failed = true;
                if let Some(receipt) = &mut this.receipt {
                    receipt.broke(why);
                }
            }
            // Only now is a stream of unknown length known to be complete.
            None => this.source = BodyContent::new(ResponseBody::Empty),
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.source.is_end()
    }

    fn size_hint(&self) -> SizeHint {
        self.source.size_hint()
    }
}

impl Drop for OutgoingBody {
    fn drop(&mut self) {
        let is_complete = !self.failed && self.source.is_end();
        if let Some(pace) = &self.pace {
            pace.is_ended.set(is_complete || self.failed);
        }
        if let Some(mut receipt) = self.receipt.take() {
            receipt.sent(self.sent, is_complete);
            if let Some(pace) = &self.pace {
                pace.receipt.replace(Some(receipt));
            }
        }
    }
}

/// Records whose turn it is while a body is sent. It distinguishes a client that takes nothing
/// from a backend that is slow.
#[derive(Default)]
pub struct SendProgress {
    /// Time since when the client has had something to take. `None` while it is not its turn.
    client_since: Cell<Option<Instant>>,
    /// The body has ended, or its backend failed. Nobody cancelled it.
    is_ended: Cell<bool>,
    /// Receipt of the body, once that has ended.
    receipt: RefCell<Option<Box<dyn SendObserver>>>,
}

impl std::fmt::Debug for SendProgress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pace").field("client_since", &self.client_since).finish_non_exhaustive()
    }
}

impl SendProgress {
    fn clients_turn(&self) {
        self.client_since.set(Some(Instant::now()));
    }

    fn backends_turn(&self) {
        self.client_since.set(None);
    }

    /// Returns false if the client has reset the stream, or left.
    pub fn is_ended(&self) -> bool {
        self.is_ended.get()
    }

    /// Returns the receipt of a body that has ended. Dropping it writes the request's record,
    /// which takes time.
    pub fn take_receipt(&self) -> Option<Box<dyn SendObserver>> {
        self.receipt.take()
    }

    /// Records that the client has taken some bytes.
    pub fn client_took(&self) {
        if self.client_since.get().is_some() {
            self.client_since.set(Some(Instant::now()));
        }
    }

    /// Completes when the client has taken nothing for `patience` though it could have. `queued`
    /// returns the bytes that wait in its connection. A socket accepts more only when a third of
    /// its queue is free. So a client that empties it slowly has not stalled.
    pub async fn client_stalled(&self, patience: Duration, queued: impl Fn() -> Option<u64>) {
        loop {
            let since = self.client_since.get();
            sleep_until(since.unwrap_or_else(Instant::now) + patience / 2).await;
            if since.is_none() || self.client_since.get() != since {
                continue;
            }
            let before = queued();
            sleep_until(Instant::now() + patience / 2).await;
            if self.client_since.get() == since {
                if queued() >= before {
                    return;
                }
                self.client_took();
            }
        }
    }
}

#[cfg(test)]
mod tests;
