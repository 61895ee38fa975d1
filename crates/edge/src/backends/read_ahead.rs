//! Takes in the answer of a backend ahead of its client. So a slow client holds no worker,
//! process, instance or permit.
//!
//! Bytes that the client does not take yet wait in memory, and on disk beyond that. When neither
//! has room, the backend is held back. When the answer is complete, all that the backend held is
//! given back. The client takes the rest at its own speed. Event streams, answers with
//! `X-Accel-Buffering: no`, and upgraded connections are not kept. Not here: the files (`spool`),
//! the resources that are given back (`request::context`), the minimum speed of a client (`h1`,
//! `h2`).
//!
//! Invariant: bytes on disk follow those in memory that were there before. So memory takes no
//! more until they are read.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderName, StatusCode};
use http_body::{Body, Frame, SizeHint};
use nagaya_records::TenantName;
use tokio::task::{AbortHandle, spawn_local};

use crate::http::message::{BodyError, Response, ResponseBody};
use crate::spool::{MemoryQuota, Spool, SpoolFile};

/// Maximum number of bytes of an answer that wait in memory.
const MEMORY_MAX: u64 = 128 << 10;

/// Maximum number of bytes that wait on disk.
const DISK_MAX: u64 = 1 << 30;

/// A small piece is copied, because a slice of a read buffer keeps all of that buffer.
const COPIED_MAX: usize = 8 << 10;

/// Memory of one piece in addition to its bytes.
const PIECE_BYTES: u64 = 64;

/// Number of bytes written to disk together, if they are there at once.
const WRITE_LEN: u64 = 256 << 10;

const X_ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

type BodyStream = Pin<Box<dyn Body<Data = Bytes, Error = BodyError>>>;

/// A backend's resources while it works for a request. They are notified when its answer is
/// complete or has broken off.
pub trait BackendWork: 'static {
    /// Gives all of it back. Only the first call counts.
    fn end(&self, is_whole: bool);
}

/// Takes in the rest of the answer, if that is allowed.
///
/// # Errors
/// Fails if the body breaks before its first byte. The client can still be informed.
pub fn keep<W: BackendWork>(
    spool: &Arc<Spool>,
    tenant: &TenantName,
    lend: impl FnOnce(StatusCode) -> Rc<W>,
    mut response: Response,
) -> Result<Response, BodyError> {
    if is_passed_as_it_comes(&response.headers) {
        return Ok(response);
    }
    response.body = match response.body {
        ResponseBody::Stream(body) if !body.is_end_stream() => {
            ResponseBody::stream(take_ahead(spool, tenant, lend(response.status), body)?)
        }
        other => other,
    };
    Ok(response)
}

/// Returns whether its reader waits for each piece, or its program asks for no buffering, as it
/// would with nginx.
fn is_passed_as_it_comes(headers: &HeaderMap) -> bool {
    let is_events = headers
        .get(CONTENT_TYPE)
        .and_then(|kind| kind.as_bytes().get(..EVENTS.len()))
        .is_some_and(|kind| kind.eq_ignore_ascii_case(EVENTS));
    is_events
        || headers.get(X_ACCEL_BUFFERING).is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"no"))
}

const EVENTS: &[u8] = b"text/event-stream";

fn take_ahead<W: BackendWork>(
    spool: &Arc<Spool>,
    tenant: &TenantName,
    work: Rc<W>,
    mut body: BodyStream,
) -> Result<BufferedResponseBody, BodyError> {
    let left = body.size_hint().exact();
    let mut queue = BufferQueue::new(spool.memory());
    let first = queue.fill(&mut body);
    if let Some(end) = queue.end.take() {
        work.end(end.is_ok());
        match end {
            Err(error) if queue.memory.is_empty() => return Err(error),
            end => queue.end = Some(end),
        }
        let queue = Rc::new(RefCell::new(queue));
        return Ok(BufferedResponseBody { queue, reading: None, left, task: None });
    }
    let queue = Rc::new(RefCell::new(queue));
    let pump = BufferPump {
        queue: Rc::clone(&queue),
        spool: Arc::clone(spool),
        tenant: tenant.clone(),
        may_spool: true,
    };
    let task = spawn_local(async move {
        let is_whole = pump.run(body, first).await;
        work.end(is_whole);
    });
    Ok(BufferedResponseBody { queue, reading: None, left, task: Some(task.abort_handle()) })
}

/// Bytes that were taken in and not sent yet.
struct BufferQueue {
    memory: VecDeque<Bytes>,
    /// Size of `memory`, including the memory of each piece in addition to its bytes.
    cost: u64,
    quota: MemoryQuota,
    file: Option<SpoolFile>,
    /// Number of bytes of the file that were sent already.
    read: u64,
    trailers: Option<HeaderMap>,
    /// Set when the backend has ended or failed.
    end: Option<Result<(), BodyError>>,
    /// Waits for bytes to send.
    reader: Option<Waker>,
    /// Waits for space.
    writer: Option<Waker>,
}

impl BufferQueue {
    fn new(quota: MemoryQuota) -> Self {
        Self {
            memory: VecDeque::new(),
            cost: 0,
            quota,
            file: None,
            read: 0,
            trailers: None,
            end: None,
            reader: None,
            writer: None,
        }
    }

    /// Takes the bytes that are there at once, so that they go with the head. Returns a piece for
    /// which there was no space.
    fn fill(&mut self, body: &mut BodyStream) -> Option<Bytes> {
        // The next task that polls it is woken instead.
        let mut cx = Context::from_waker(Waker::noop());
        loop {
            match body.as_mut().poll_frame(&mut cx) {
                Poll::Pending => return None,
                Poll::Ready(None) => self.end = Some(Ok(())),
                Poll::Ready(Some(Err(error))) => self.end = Some(Err(error)),
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) if data.is_empty() => {}
                    Ok(data) => {
                        if let Err(data) = self.push(data) {
                            return Some(data);
                        }
                    }
                    Err(frame) => self.trailers = frame.into_trailers().ok(),
                },
            }
            if self.end.is_none() && body.is_end_stream() {
                self.end = Some(Ok(()));
            }
            if self.end.is_some() {
                return None;
            }
        }
    }

    fn is_on_disk(&self) -> bool {
        self.file.as_ref().is_some_and(|file| self.read < file.len())
    }

    fn is_drained(&self) -> bool {
        self.memory.is_empty() && !self.is_on_disk()
    }

    /// Keeps the piece in memory, if there is space.
    fn push(&mut self, data: Bytes) -> Result<(), Bytes> {
        let cost = data.len() as u64 + PIECE_BYTES;
        // One piece is accepted whatever its length. Otherwise nothing would ever move.
        let has_room = self.memory.is_empty() || self.cost + cost <= MEMORY_MAX;
        if self.is_on_disk() || !has_room || (!self.quota.try_grow(cost) && !self.memory.is_empty()) {
            return Err(data);
        }
        let data = if data.len() <= COPIED_MAX { Bytes::copy_from_slice(&data) } else { data };
        self.cost += cost;
        self.memory.push_back(data);
        self.wake_reader();
        Ok(())
    }

    fn pop(&mut self) -> Option<Bytes> {
        let data = self.memory.pop_front()?;
        let cost = data.len() as u64 + PIECE_BYTES;
        self.cost -= cost;
        self.quota.shrink(cost);
        self.wake_writer();
        Some(data)
    }

    fn wake_reader(&mut self) {
        self.reader.take().into_iter().for_each(Waker::wake);
    }

    fn wake_writer(&mut self) {
        self.writer.take().into_iter().for_each(Waker::wake);
    }
}

/// Takes in the bytes of the backend.
struct BufferPump {
    queue: Rc<RefCell<BufferQueue>>,
    spool: Arc<Spool>,
    tenant: TenantName,
    /// The disk has not failed yet.
    may_spool: bool,
}

impl BufferPump {
    /// Returns true if the backend's answer is complete.
    async fn run(mut self, mut body: BodyStream, first: Option<Bytes>) -> bool {
        let end = self.take_all(&mut body, first).await;
        // Releases the backend before the client knows it.
        drop(body);
        let is_whole = end.is_ok();
        let mut queue = self.queue.borrow_mut();
        queue.end = Some(end);
        queue.wake_reader();
        is_whole
    }

    async fn take_all(&mut self, body: &mut BodyStream, first: Option<Bytes>) -> Result<(), BodyError> {
        if let Some(data) = first {
            self.put_aside(body, data).await?;
        }
        while let Some(frame) = poll_fn(|cx| body.as_mut().poll_frame(cx)).await {
            match frame?.into_data() {
                Ok(data) if data.is_empty() => {}
                Ok(data) => {
                    let pushed = self.queue.borrow_mut().push(data);
                    if let Err(data) = pushed {
                        self.put_aside(body, data).await?;
                    }
                }
                Err(frame) => self.queue.borrow_mut().trailers = frame.into_trailers().ok(),
            }
            if body.is_end_stream() {
                break;
            }
        }
        Ok(())
    }

    /// Runs when memory is full. Writes this piece and those that are there at once to disk, or
    /// waits for space.
    async fn put_aside(&mut self, body: &mut BodyStream, first: Bytes) -> Result<(), BodyError> {
        let mut pieces = vec![first];
        let mut bytes = pieces[0].len() as u64;
        let mut rest = Ok(());
        while bytes < WRITE_LEN && !body.is_end_stream() {
            let next = poll_fn(|cx| match body.as_mut().poll_frame(cx) {
                Poll::Ready(frame) => Poll::Ready(Some(frame)),
                Poll::Pending => Poll::Ready(None),
            });
            match next.await {
                Some(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) => {
                        bytes += data.len() as u64;
                        pieces.push(data);
                    }
                    Err(frame) => self.queue.borrow_mut().trailers = frame.into_trailers().ok(),
                },
                Some(Some(Err(error))) => {
                    rest = Err(error);
                    break;
                }
                Some(None) | None => break,
            }
        }
        if !self.append(&pieces).await {
            for piece in pieces {
                self.push_when_free(piece).await;
            }
        }
        rest
    }

    /// Returns false if they are not on disk.
    async fn append(&mut self, pieces: &[Bytes]) -> bool {
        let taken = self.queue.borrow_mut().file.take();
        let file = match taken {
            Some(file) => Some(file),
            None if self.may_spool => self.spool.open(&self.tenant).await.ok(),
            None => None,
        };
        let Some(mut file) = file else {
            self.may_spool = false;
            return false;
        };
        if self.queue.borrow().read == file.len() {
            // All of it was sent: its space is used again.
            file.rewind();
            self.queue.borrow_mut().read = 0;
        }
        let is_kept = file.len() < DISK_MAX && file.append(pieces.to_vec()).await.is_ok();
        let mut queue = self.queue.borrow_mut();
        queue.file = Some(file);
        queue.wake_reader();
        is_kept
    }

    async fn push_when_free(&self, data: Bytes) {
        let mut data = Some(data);
        poll_fn(|cx| {
            let mut queue = self.queue.borrow_mut();
            match data.take().map(|data| queue.push(data)) {
                Some(Err(refused)) => {
                    data = Some(refused);
                    queue.writer = Some(cx.waker().clone());
                    Poll::Pending
                }
                _ => Poll::Ready(()),
            }
        })
        .await;
    }
}

type AheadRead = Pin<Box<dyn Future<Output = io::Result<Bytes>>>>;

/// The answer for its client.
struct BufferedResponseBody {
    queue: Rc<RefCell<BufferQueue>>,
    /// Pending read from disk.
    reading: Option<AheadRead>,
    /// Number of bytes still to come, if the backend announced a length.
    left: Option<u64>,
    /// Takes in the rest. `None` if all was there at once.
    task: Option<AbortHandle>,
}

impl BufferedResponseBody {
    fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        let mut queue = self.queue.borrow_mut();
        if let Some(data) = queue.pop() {
            return Poll::Ready(Some(Ok(data)));
        }
        if self.reading.is_none() && queue.is_on_disk() {
            let read = queue.file.as_ref().map(|file| file.read(queue.read));
            self.reading = read.map(|read| -> AheadRead { Box::pin(read) });
        }
        let Some(reading) = &mut self.reading else { return Poll::Ready(None) };
        drop(queue);
        let read = ready!(reading.as_mut().poll(cx));
        self.reading = None;
        let mut queue = self.queue.borrow_mut();
        queue.read += read.as_ref().map_or(0, |data| data.len() as u64);
        queue.wake_writer();
        Poll::Ready(Some(read))
    }
}

impl Body for BufferedResponseBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        if let Some(data) = ready!(this.poll_data(cx)) {
            let data = data?;
            if let Some(left) = &mut this.left {
                *left = left.saturating_sub(data.len() as u64);
            }
            return Poll::Ready(Some(Ok(Frame::data(data))));
        }
        let mut queue = this.queue.borrow_mut();
        match queue.end.take() {
            None => {
                queue.reader = Some(cx.waker().clone());
                Poll::Pending
            }
            Some(Err(error)) => {
                queue.end = Some(Ok(()));
                Poll::Ready(Some(Err(error)))
            }
            Some(Ok(())) => {
                queue.end = Some(Ok(()));
                Poll::Ready(queue.trailers.take().map(|trailers| Ok(Frame::trailers(trailers))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        let queue = self.queue.borrow();
        matches!(queue.end, Some(Ok(()))) && queue.is_drained() && queue.trailers.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        self.left.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

impl Drop for BufferedResponseBody {
    fn drop(&mut self) {
        // The client has left, or has all of it. In the first case this ends the backend's work.
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

#[cfg(test)]
mod tests;
