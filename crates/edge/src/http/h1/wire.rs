//! Holds one client's byte stream: unused bytes that were read, the body read from it, and
//! bounded writes.
//!
//! All methods take `&self`. The request's body is read while the response is written, both on
//! one task of one thread. No borrow is held across an await. Not here: heads (`head`), the loop
//! (`connection`).

use std::cell::{Cell, RefCell};
use std::io;
use std::io::IoSlice;
use std::os::fd::BorrowedFd;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::StatusCode;
use http_body::{Body, Frame, SizeHint};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, Interest};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep};

use crate::http::arrival::{ArrivalLimits, ArrivalTimer};
use crate::http::h1::framing::{BodyDecoder, BodyFraming, DecodedPart, HeadSender};
use crate::http::h1::write;
use crate::http::message::BodyError;
use crate::http::serving::InterimResponse;
use crate::options::EdgeLimits;
use crate::sys;

/// Bytes read at once while a head is expected, and while a body arrives.
const HEAD_READ: usize = 8 << 10;
const BODY_READ: usize = 64 << 10;

/// Maximum number of bytes read ahead while a request runs, to notice that the client left.
const AHEAD_MAX: usize = 64 << 10;

/// Maximum number of bytes for one `sendfile` call. It keeps one fast client from occupying the
/// thread.
const SENDFILE_MAX: usize = 1 << 20;

/// Maximum rest of an unread body that is skipped so that the connection can be used again.
const SKIP_MAX: u64 = 64 << 10;

/// Maximum time in which a client may take sent bytes before a reset would destroy them.
/// `TAKEN_EVERY` is the interval of the check.
const TAKEN_MAX: Duration = Duration::from_secs(5);
const TAKEN_EVERY: Duration = Duration::from_millis(20);

/// Maximum number of empty buffers per thread kept for the next connection with bytes to read.
const SPARE_MAX: usize = 64;

thread_local! {
    static SPARE: RefCell<Vec<BytesMut>> = const { RefCell::new(Vec::new()) };
}

const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// A client's byte stream: plain TCP, or TLS over it.
pub trait ClientStream: AsyncRead + AsyncWrite + Unpin + 'static {
    /// Returns the socket, if bytes need no processing on the way. Then files can go through the
    /// kernel.
    fn as_tcp(&self) -> Option<&TcpStream> {
        None
    }
    /// Returns the number of written bytes that the client has not taken. `None` if the kernel
    /// does not report it.
    fn queued(&self) -> Option<u64> {
        None
    }
    /// Makes the following close a reset, so that a truncated response cannot pass for a complete
    /// one.
    fn reset_on_close(&self);
}

impl ClientStream for TcpStream {
    fn as_tcp(&self) -> Option<&TcpStream> {
        Some(self)
    }

    fn queued(&self) -> Option<u64> {
        sys::queued(self).ok()
    }

    fn reset_on_close(&self) {
        // It fails only on a socket that is closed already, which is the aim.
        let _ = self.set_zero_linger();
    }
}

impl ClientStream for tokio_rustls::server::TlsStream<TcpStream> {
    fn queued(&self) -> Option<u64> {
        sys::queued(self.get_ref().0).ok()
    }

    fn reset_on_close(&self) {
        let _ = self.get_ref().0.set_zero_linger();
    }
}

pub struct Http1Wire<S> {
    stream: RefCell<S>,
    input: RefCell<BytesMut>,
    decoder: RefCell<BodyDecoder>,
    /// The client waits for `100 Continue`.
    expects: Cell<bool>,
    /// Interim responses that the client has not taken yet.
    interim: RefCell<Vec<u8>>,
    /// The client has finished sending.
    finished: Cell<bool>,
    /// Longest silence while a body arrives or a response is taken.
    idle: Cell<Duration>,
    body_failed: Cell<bool>,
}

impl<S: ClientStream> Http1Wire<S> {
    /// `input` was read before it was known to be HTTP/1.
    pub fn new(stream: S, input: BytesMut, idle: Duration) -> Self {
        Self {
            stream: RefCell::new(stream),
            input: RefCell::new(input),
            decoder: RefCell::new(BodyDecoder::new(BodyFraming::None, HeadSender::Client)),
            expects: Cell::new(false),
            interim: RefCell::default(),
            finished: Cell::new(false),
            idle: Cell::new(idle),
            body_failed: Cell::new(false),
        }
    }

    pub fn with_input<T>(&self, act: impl FnOnce(&mut BytesMut) -> T) -> T {
        act(&mut self.input.borrow_mut())
    }

    /// Reads bytes of the client. Returns 0 if it closed.
    pub fn poll_fill(&self, cx: &mut Context<'_>, reserve: usize) -> Poll<io::Result<usize>> {
        let mut stream = self.stream.borrow_mut();
        let mut input = self.input.borrow_mut();
        if let Some(tcp) = stream.as_tcp() {
            // An idle connection holds no buffer. It takes one only when there is something to
            // read.
            ready!(tcp.poll_read_ready(cx))?;
        }
        if input.capacity() == 0 {
            *input = SPARE.with_borrow_mut(Vec::pop).unwrap_or_default();
        }
        input.reserve(reserve);
        pin!(stream.read_buf(&mut *input)).poll(cx)
    }

    pub fn poll_fill_head(&self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        self.poll_fill(cx, HEAD_READ)
    }

    /// Gives the buffer of a silent connection to the next one that needs it.
    pub fn release_idle(&self) {
        let mut input = self.input.borrow_mut();
        if input.is_empty() {
            SPARE.with_borrow_mut(|spare| {
                let buffer = std::mem::take(&mut *input);
                if spare.len() < SPARE_MAX {
                    spare.push(buffer);
                }
            });
        }
    }

    /// Begins the body of a request.
    pub fn begin_body(
        self: &Rc<Self>,
        framing: BodyFraming,
        expect_continue: bool,
        limits: &EdgeLimits,
    ) -> WireBody<S> {
        *self.decoder.borrow_mut() = BodyDecoder::new(framing, HeadSender::Client);
        self.body_failed.set(false);
        self.expects.set(expect_continue && framing != BodyFraming::None);
        self.resume_body(limits)
    }

    /// Returns the rest of the body of the request that was just answered.
    pub fn resume_body(self: &Rc<Self>, limits: &EdgeLimits) -> WireBody<S> {
        let arrival = ArrivalTimer::new(ArrivalLimits::of_body(limits));
        WireBody { wire: Rc::clone(self), received: 0, limit: limits.body_bytes, arrival }
    }

    /// Returns whether the request's body has been read to its end, so that the next request
    /// follows.
    pub fn body_is_complete(&self) -> bool {
        self.decoder.borrow().is_end() && !self.body_failed.get()
    }

    /// Returns whether the rest of the request's body is empty, or cheaper to skip than a new
    /// connection.
    pub fn body_is_complete_or_short(&self) -> bool {
        let left = self.decoder.borrow().remaining();
        !self.body_failed.get() && left.is_some_and(|left| left <= SKIP_MAX)
    }

    /// Ready when the client has left while its request runs, or has sent something. Reads ahead
    /// within a limit, and stays pending beyond it. A client that only finishes sending counts as
    /// gone if the request `needs_client`.
    pub fn poll_gone(&self, cx: &mut Context<'_>, needs_client: bool) -> Poll<io::Result<()>> {
        if !self.finished.get() {
            if self.input.borrow().len() >= AHEAD_MAX {
                return Poll::Pending;
            }
            if ready!(self.poll_fill(cx, HEAD_READ))? > 0 {
                return Poll::Ready(Ok(()));
            }
            self.finished.set(true);
        }
        if needs_client { Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into())) } else { Poll::Pending }
    }

    fn poll_continue(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.put_continue();
        self.poll_interim(cx)
    }

    /// Sends `100 Continue`, if the client waits for it.
    fn put_continue(&self) {
        if self.expects.replace(false) {
            self.interim.borrow_mut().extend_from_slice(CONTINUE);
        }
    }

    /// Sends an interim response of the backend to the client. `100 Continue` is only for a
    /// client that waits for it.
    pub fn put_interim(&self, interim: &InterimResponse) {
        if interim.status == StatusCode::CONTINUE {
            return self.put_continue();
        }
        write::encode_interim(&mut self.interim.borrow_mut(), interim);
    }

    /// Writes the interim responses that wait.
    pub fn poll_interim(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut interim = self.interim.borrow_mut();
        if interim.is_empty() {
            return Poll::Ready(Ok(()));
        }
        let mut stream = self.stream.borrow_mut();
        while !interim.is_empty() {
            let wrote = ready!(Pin::new(&mut *stream).poll_write(cx, &interim))?;
            if wrote == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            interim.drain(..wrote);
        }
        Pin::new(&mut *stream).poll_flush(cx)
    }

    /// Begins the final response. Interim ones are written before it, and no other may be sent.
    pub async fn end_interim(&self) -> io::Result<()> {
        if self.expects.replace(false) {
            // The client may or may not send its body now: the connection cannot be used again.
            self.body_failed.set(true);
        }
        if self.interim.borrow().is_empty() {
            return Ok(());
        }
        self.within_idle(|cx| self.poll_interim(cx)).await
    }

    /// Writes the slices in order. Fails when the client takes nothing for too long.
    pub async fn write(&self, mut slices: &mut [IoSlice<'_>]) -> io::Result<()> {
        IoSlice::advance_slices(&mut slices, 0);
        while !slices.is_empty() {
            let wrote = self
                .within_idle(|cx| {
                    let mut stream = self.stream.borrow_mut();
                    if slices.len() > 1 && stream.is_write_vectored() {
                        Pin::new(&mut *stream).poll_write_vectored(cx, slices)
                    } else {
                        Pin::new(&mut *stream).poll_write(cx, &slices[0])
                    }
                })
                .await?;
            if wrote == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            IoSlice::advance_slices(&mut slices, wrote);
        }
        Ok(())
    }

    pub async fn flush(&self) -> io::Result<()> {
        self.within_idle(|cx| Pin::new(&mut *self.stream.borrow_mut()).poll_flush(cx)).await
    }

    /// Hands a range of a file to the kernel. `head` goes in front, in the same segment if it
    /// fits. Only on plain TCP.
    pub async fn send_file(
        &self,
        head: &[u8],
        file: BorrowedFd<'_>,
        mut offset: u64,
        mut len: u64,
    ) -> io::Result<()> {
        let mut head = head;
        while !head.is_empty() {
            let wrote = self
                .socket_io(|socket| Ok(rustix::net::send(socket, head, rustix::net::SendFlags::MORE)?))
                .await?;
            head = &head[wrote..];
        }
        while len > 0 {
            let want = usize::try_from(len).unwrap_or(usize::MAX).min(SENDFILE_MAX);
            let sent = self
                .socket_io(|socket| Ok(rustix::fs::sendfile(socket, file, Some(&mut offset), want)?))
                .await?;
            if sent == 0 {
                let what = "the file became shorter while it was sent";
                return Err(io::Error::other(BodyError::Backend(what.into())));
            }
            len -= sent as u64;
        }
        Ok(())
    }

    async fn socket_io(&self, mut act: impl FnMut(&TcpStream) -> io::Result<usize>) -> io::Result<usize> {
        self.within_idle(|cx| {
            let stream = self.stream.borrow();
            let tcp = stream.as_tcp().expect("files go through the kernel on plain TCP only");
            loop {
                ready!(tcp.poll_write_ready(cx))?;
                match tcp.try_io(Interest::WRITABLE, || act(tcp)) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    other => return Poll::Ready(other),
                }
            }
        })
        .await
    }

    pub fn is_plain_tcp(&self) -> bool {
        self.stream.borrow().as_tcp().is_some()
    }

    pub fn reset_on_close(&self) {
        self.stream.borrow().reset_on_close();
    }

    /// Shuts down writing.
    pub async fn shutdown(&self) -> io::Result<()> {
        self.within_idle(|cx| Pin::new(&mut *self.stream.borrow_mut()).poll_shutdown(cx)).await
    }

    /// Waits until the client has taken the written bytes, within a time limit.
    pub async fn until_taken(&self) {
        let begun = Instant::now();
        while self.stream.borrow().queued().is_some_and(|queued| queued > 0) && begun.elapsed() < TAKEN_MAX {
            sleep(TAKEN_EVERY).await;
        }
    }

    /// Runs `poll` with a limit on the client's silence. A client that takes written bytes is not
    /// silent, however slow it is. A socket accepts more only when a third of its queue is free.
    pub async fn within_idle<T>(
        &self,
        mut poll: impl FnMut(&mut Context<'_>) -> Poll<io::Result<T>>,
    ) -> io::Result<T> {
        let mut waiting: Option<(Pin<Box<Sleep>>, Option<u64>)> = None;
        std::future::poll_fn(|cx| {
            if let Poll::Ready(result) = poll(cx) {
                return Poll::Ready(result);
            }
            let idle = self.idle.get();
            let (timer, before) =
                waiting.get_or_insert_with(|| (Box::pin(sleep(idle)), self.stream.borrow().queued()));
            loop {
                ready!(timer.as_mut().poll(cx));
                let queued = self.stream.borrow().queued();
                if queued >= *before {
                    return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
                }
                *before = queued;
                timer.as_mut().reset(Instant::now() + idle);
            }
        })
        .await
    }

    /// Returns the stream and its unused bytes, for another protocol.
    pub fn into_parts(self) -> (S, BytesMut) {
        (self.stream.into_inner(), self.input.into_inner())
    }
}

/// The body of a request, read from the wire.
pub struct WireBody<S> {
    wire: Rc<Http1Wire<S>>,
    received: u64,
    limit: u64,
    arrival: ArrivalTimer,
}

impl<S: ClientStream> WireBody<S> {
    fn fail(&self, error: BodyError) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        self.wire.body_failed.set(true);
        Poll::Ready(Some(Err(error)))
    }
}

impl<S: ClientStream> Body for WireBody<S> {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let wire = Rc::clone(&self.wire);
        loop {
            let decoded = wire.decoder.borrow_mut().decode(&mut wire.input.borrow_mut());
            match decoded {
                Err(what) => return self.fail(BodyError::Malformed(what)),
                Ok(DecodedPart::End) => return Poll::Ready(None),
                Ok(DecodedPart::Trailers(trailers)) => {
                    return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
                }
                Ok(DecodedPart::Data(data)) => {
                    self.received += data.len() as u64;
                    self.arrival.received(data.len());
                    if self.received > self.limit {
                        return self.fail(BodyError::TooLarge(self.limit));
                    }
                    return Poll::Ready(Some(Ok(Frame::data(data))));
                }
                Ok(DecodedPart::More) => {}
            }
            if ready!(wire.poll_continue(cx)).is_err() {
                return self.fail(BodyError::ClientGone);
            }
            match wire.poll_fill(cx, BODY_READ) {
                Poll::Ready(Ok(0) | Err(_)) => return self.fail(BodyError::ClientGone),
                Poll::Ready(Ok(_)) => {}
                Poll::Pending => {
                    ready!(self.arrival.poll_late(cx));
                    return self.fail(BodyError::Stalled);
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.wire.decoder.borrow().is_end()
    }

    fn size_hint(&self) -> SizeHint {
        self.wire.decoder.borrow().remaining().map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::ReadBuf;

    use super::*;

    /// Takes a byte only when its client has taken what is queued, each time that somebody looks.
    struct Socket {
        queued: Cell<u64>,
        taken: u64,
    }

    impl AsyncRead for Socket {
        fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, _: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
            Poll::Pending
        }
    }

    impl AsyncWrite for Socket {
        fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
            if self.queued.get() == 0 { Poll::Ready(Ok(bytes.len())) } else { Poll::Pending }
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    impl ClientStream for Socket {
        fn queued(&self) -> Option<u64> {
            let queued = self.queued.get();
            self.queued.set(queued.saturating_sub(self.taken));
            Some(queued)
        }

        fn reset_on_close(&self) {}
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_empties_its_queue_slowly_is_not_silent() {
        let idle = Duration::from_secs(30);
        for (queued, taken, outlasts) in [(10, 1, true), (1000, 250, true), (10, 0, false)] {
            let wire = Http1Wire::new(Socket { queued: Cell::new(queued), taken }, BytesMut::new(), idle);
            let begun = Instant::now();
            let written = wire.write(&mut [IoSlice::new(b"more")]).await;
            assert_eq!(written.is_ok(), outlasts, "{queued} by {taken}");
            let turns = if outlasts { queued.div_ceil(taken) } else { 1 };
            assert_eq!(begun.elapsed().as_secs(), turns * 30, "{queued} by {taken}");
        }
    }
}
