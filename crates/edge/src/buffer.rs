//! Takes in the answer of a backend ahead of its client, so that a slow client holds no worker, process, instance or permit.
//!
//! What the client does not take yet waits in memory, and on disk beyond that. When neither has room, the backend is held
//! back. When the answer is complete, all that the backend held is given back; the client takes the rest at its own speed.
//! Event streams, answers with `X-Accel-Buffering: no`, and upgraded connections go as they come.
//! Not here: the files (`spool`), what is given back (`account`), how fast a client must read (`http1`, `http2`).
//!
//! Invariant: bytes on disk come after those in memory that were there before, so memory takes no more until they are read.

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
use http::{HeaderMap, HeaderName};
use http_body::{Body, Frame, SizeHint};
use nagaya_cmdb::TenantName;
use tokio::task::{AbortHandle, spawn_local};

use crate::account::{Account, Release};
use crate::message::{BodyError, Response, ResponseBody};
use crate::spool::{MemoryQuota, Spool, SpoolFile};

/// An answer waits in memory up to this length, bytes.
const MEMORY_MAX: u64 = 128 << 10;

/// And on disk up to this one.
const DISK_MAX: u64 = 1 << 30;

/// A small piece is copied, because a slice of a read buffer keeps all of that buffer.
const COPIED_MAX: usize = 8 << 10;

/// What one piece costs beside its bytes.
const PIECE_BYTES: u64 = 64;

/// Written to disk together, if so much is there at once.
const WRITE_LEN: u64 = 256 << 10;

const X_ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

type Stream = Pin<Box<dyn Body<Data = Bytes, Error = BodyError>>>;

/// Has the rest of the answer taken in, if it is one that may be.
///
/// # Errors
/// If the body breaks before its first byte: the client can still be told so.
pub fn keep(
    spool: &Arc<Spool>,
    tenant: &TenantName,
    account: &mut Account,
    mut response: Response,
) -> Result<Response, BodyError> {
    if is_passed_as_it_comes(&response.headers) {
        return Ok(response);
    }
    response.body = match response.body {
        ResponseBody::Stream(body) if !body.is_end_stream() => {
            ResponseBody::stream(take_ahead(spool, tenant, account.lend(response.status), body)?)
        }
        other => other,
    };
    Ok(response)
}

/// Its reader waits for each piece, or its program says so as it would to nginx.
fn is_passed_as_it_comes(headers: &HeaderMap) -> bool {
    let is_events = headers
        .get(CONTENT_TYPE)
        .and_then(|kind| kind.as_bytes().get(..EVENTS.len()))
        .is_some_and(|kind| kind.eq_ignore_ascii_case(EVENTS));
    is_events
        || headers.get(X_ACCEL_BUFFERING).is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"no"))
}

const EVENTS: &[u8] = b"text/event-stream";

fn take_ahead(
    spool: &Arc<Spool>,
    tenant: &TenantName,
    release: Rc<Release>,
    mut body: Stream,
) -> Result<Ahead, BodyError> {
    let left = body.size_hint().exact();
    let mut queue = Queue::new(spool.memory());
    let first = queue.fill(&mut body);
    if let Some(end) = queue.end.take() {
        release.end(end.is_ok());
        match end {
            Err(error) if queue.memory.is_empty() => return Err(error),
            end => queue.end = Some(end),
        }
        let queue = Rc::new(RefCell::new(queue));
        return Ok(Ahead { queue, reading: None, left, task: None });
    }
    let queue = Rc::new(RefCell::new(queue));
    let pump =
        Pump { queue: Rc::clone(&queue), spool: Arc::clone(spool), tenant: tenant.clone(), may_spool: true };
    let task = spawn_local(async move {
        let is_whole = pump.run(body, first).await;
        release.end(is_whole);
    });
    Ok(Ahead { queue, reading: None, left, task: Some(task.abort_handle()) })
}

/// What was taken in and not sent yet.
struct Queue {
    memory: VecDeque<Bytes>,
    /// Of `memory`, with what each piece costs beside its bytes.
    cost: u64,
    quota: MemoryQuota,
    file: Option<SpoolFile>,
    /// Of the file, sent already.
    read: u64,
    trailers: Option<HeaderMap>,
    /// The backend has said all, or broken off.
    end: Option<Result<(), BodyError>>,
    /// Waits for something to send.
    reader: Option<Waker>,
    /// Waits for room.
    writer: Option<Waker>,
}

impl Queue {
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

    /// Takes what is there at once, so that it goes with the head. Returns a piece that found no room.
    fn fill(&mut self, body: &mut Stream) -> Option<Bytes> {
        // Whoever polls it next is woken instead.
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

    /// Keeps the piece in memory, if it may be there.
    fn push(&mut self, data: Bytes) -> Result<(), Bytes> {
        let cost = data.len() as u64 + PIECE_BYTES;
        // One piece may be there whatever its length, or nothing would ever move.
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

/// Takes in what the backend says.
struct Pump {
    queue: Rc<RefCell<Queue>>,
    spool: Arc<Spool>,
    tenant: TenantName,
    /// The disk has not failed yet.
    may_spool: bool,
}

impl Pump {
    /// True if the backend has said all.
    async fn run(mut self, mut body: Stream, first: Option<Bytes>) -> bool {
        let end = self.take_all(&mut body, first).await;
        // The backend is free before the client knows it.
        drop(body);
        let is_whole = end.is_ok();
        let mut queue = self.queue.borrow_mut();
        queue.end = Some(end);
        queue.wake_reader();
        is_whole
    }

    async fn take_all(&mut self, body: &mut Stream, first: Option<Bytes>) -> Result<(), BodyError> {
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

    /// Memory is full: writes to disk this piece, and those that are there at once; or waits for room.
    async fn put_aside(&mut self, body: &mut Stream, first: Bytes) -> Result<(), BodyError> {
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

    /// False: they are not on disk.
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
            // All of it was sent: its room is used again.
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

type Reading = Pin<Box<dyn Future<Output = io::Result<Bytes>>>>;

/// The answer as its client gets it.
struct Ahead {
    queue: Rc<RefCell<Queue>>,
    /// From disk.
    reading: Option<Reading>,
    /// Bytes that are still to come, where the backend said how many.
    left: Option<u64>,
    /// Takes in the rest. `None` if all was there at once.
    task: Option<AbortHandle>,
}

impl Ahead {
    fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        let mut queue = self.queue.borrow_mut();
        if let Some(data) = queue.pop() {
            return Poll::Ready(Some(Ok(data)));
        }
        if self.reading.is_none() && queue.is_on_disk() {
            let read = queue.file.as_ref().map(|file| file.read(queue.read));
            self.reading = read.map(|read| -> Reading { Box::pin(read) });
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

impl Body for Ahead {
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

impl Drop for Ahead {
    fn drop(&mut self) {
        // Its client has left, or has it all. In the first case the backend learns it by this.
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

#[cfg(test)]
mod tests;
