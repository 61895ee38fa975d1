//! A response's body as a stream of chunks, for wires that cannot hand a file to the kernel.
//!
//! Not here: plain HTTP/1, which sends files by `sendfile` (`http1::write`).

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

use crate::message::{BodyError, Part, Receipt, Response, ResponseBody};
use crate::pace::{Flow, Slow};

/// Most that is read or handed on at once. Four HTTP/2 frames or TLS records of the usual size; reading that
/// much of a file out of the page cache takes some 10 us, less than handing it to another thread.
const CHUNK_BYTES: usize = 64 << 10;

/// The body of a response on its way out, with everything the response holds. What it holds is given back
/// when the body is dropped: at its end, or when the client leaves.
pub struct Outgoing {
    source: Source,
    sent: u64,
    failed: bool,
    receipt: Option<Box<dyn Receipt>>,
    pace: Option<Rc<Pace>>,
}

enum Source {
    Parts { parts: VecDeque<Part>, left: u64 },
    Stream(Pin<Box<dyn Body<Data = Bytes, Error = BodyError>>>),
}

impl Outgoing {
    /// Takes the body and what it holds out of `response`, and leaves status and headers. `with_body` is false
    /// where the answer has none on the wire (HEAD, 204, 304).
    pub fn take(response: &mut Response, with_body: bool) -> Self {
        let body = std::mem::replace(&mut response.body, ResponseBody::Empty);
        let source = match response.flow.take() {
            Some(flow) if with_body => Source::slow(body, flow),
            _ if with_body => Source::new(body),
            _ => Source::new(ResponseBody::Empty),
        };
        Self { source, sent: 0, failed: false, receipt: response.receipt.take(), pace: None }
    }

    /// The client has taken some of what it was given.
    pub fn client_took(&self) {
        if let Some(pace) = &self.pace {
            pace.client_took();
        }
    }

    /// Notes in `pace` whose turn it is.
    pub fn paced(mut self, pace: Rc<Pace>) -> Self {
        self.pace = Some(pace);
        self
    }
}

impl Source {
    fn new(body: ResponseBody) -> Self {
        let parts = match body {
            ResponseBody::Empty => VecDeque::new(),
            ResponseBody::Bytes(bytes) => VecDeque::from([Part::Bytes(bytes)]),
            ResponseBody::File { file, offset, len } => VecDeque::from([Part::File { file, offset, len }]),
            ResponseBody::Parts(parts) => parts.into(),
            ResponseBody::Stream(stream) => return Self::Stream(stream),
            // Whoever makes a tunnel gives it to `http1`; here nothing of it can be said.
            ResponseBody::Tunnel(_) => VecDeque::new(),
        };
        let left = parts.iter().map(Part::len).sum();
        Self::Parts { parts, left }
    }

    /// Held to the limits of `flow`.
    fn slow(body: ResponseBody, flow: Box<Flow>) -> Self {
        match Self::new(body) {
            Self::Stream(stream) => Self::Stream(Box::pin(Slow::new(stream, flow))),
            parts @ Self::Parts { .. } => Self::Stream(Box::pin(Slow::new(parts, flow))),
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

impl Body for Source {
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

/// The next bytes of the first part that has any.
fn next_chunk(parts: &mut VecDeque<Part>) -> Option<io::Result<Bytes>> {
    while parts.front().is_some_and(Part::is_empty) {
        parts.pop_front();
    }
    match parts.front_mut()? {
        Part::Bytes(bytes) => Some(Ok(bytes.split_to(bytes.len().min(CHUNK_BYTES)))),
        Part::File { file, offset, len } => {
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

/// Between 1 and `want` bytes from `offset`. A file that ended before is an error: its length is already promised.
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

impl Body for Outgoing {
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
            // Only now does a stream of unknown length know that it is complete.
            None => this.source = Source::new(ResponseBody::Empty),
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

impl Drop for Outgoing {
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

/// Whose turn it is while a body is sent, so that a client that takes nothing can be told from a backend
/// that thinks.
#[derive(Default)]
pub struct Pace {
    /// Since when the client has had something to take; None while it is not its turn.
    client_since: Cell<Option<Instant>>,
    /// The body has ended, or its backend broke off: nobody cancelled it.
    is_ended: Cell<bool>,
    /// What the body had, once that has ended.
    receipt: RefCell<Option<Box<dyn Receipt>>>,
}

impl std::fmt::Debug for Pace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pace").field("client_since", &self.client_since).finish_non_exhaustive()
    }
}

impl Pace {
    fn clients_turn(&self) {
        self.client_since.set(Some(Instant::now()));
    }

    fn backends_turn(&self) {
        self.client_since.set(None);
    }

    /// False: the client has reset the stream, or left.
    pub fn is_ended(&self) -> bool {
        self.is_ended.get()
    }

    /// The receipt of a body that has ended. Dropping it writes the request's account, which takes its time.
    pub fn take_receipt(&self) -> Option<Box<dyn Receipt>> {
        self.receipt.take()
    }

    /// The client has taken some of what it was given.
    pub fn client_took(&self) {
        if self.client_since.get().is_some() {
            self.client_since.set(Some(Instant::now()));
        }
    }

    /// Ends when the client has taken nothing for `patience` though it could have. `queued` tells what waits in its
    /// connection: a socket takes more only when a third of its queue is free, and a client that empties it slowly has not
    /// stalled.
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
