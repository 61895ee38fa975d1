//! Limits the waste that one HTTP/2 client can cause: control frames without progress, and
//! cancelled responses.
//!
//! h2 answers each SETTINGS and PING, and accepts each PRIORITY, WINDOW_UPDATE and unknown frame,
//! without counting them. So this module inspects the bytes on their way to h2: nine bytes of
//! each frame. Cancelled responses are counted at the end of streams (`streams`). In both cases
//! the connection ends with GOAWAY and `ENHANCE_YOUR_CALM` (RFC 9113 section 10.5). Not here:
//! frames that h2 itself limits (CONTINUATION, empty DATA, resets of streams that were not
//! accepted).

use std::cell::{Cell, RefCell};
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::time::{Instant, timeout};

use crate::http::h1::wire::ClientStream;

/// Maximum number of control frames at once without progress.
pub const CONTROL_FRAMES_MAX: u32 = 10_000;

/// Number of further control frames allowed per second, for pings and the windows of quiet
/// streams.
const CONTROL_FRAMES_PER_SECOND: u32 = 100;

/// Number of control frames that a frame with a request or data earns.
const FRAMES_EARNED: u32 = 8;

/// Number of response bytes that earn one control frame. A smaller frame only answers a control
/// frame.
const BYTES_PER_FRAME: usize = 256;

/// Length of the client's connection preface (RFC 9113 section 3.4). A frame's header has
/// `HEADER_LEN` bytes (section 4.1).
const PREFACE_LEN: usize = 24;
const HEADER_LEN: usize = 9;

/// Frame types (RFC 9113 section 6).
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const GOAWAY: u8 = 7;
const CONTINUATION: u8 = 9;

/// Error code `ENHANCE_YOUR_CALM` (RFC 9113 section 7).
const ENHANCE_YOUR_CALM: u8 = 0xb;

/// Maximum time for sending the last frame.
const GOODBYE: Duration = Duration::from_secs(1);

/// A number of events that may happen at once, and a rate for further ones.
#[derive(Debug)]
pub struct RefillBudget {
    most: u64,
    per_second: f64,
    left: f64,
    since: Instant,
}

impl RefillBudget {
    pub fn new(most: u32, per_second: f64) -> Self {
        Self { most: most.into(), per_second, left: f64::from(most), since: Instant::now() }
    }

    /// Spends from the budget. Returns false if it is used up.
    pub fn spend(&mut self, count: u32) -> bool {
        // The clock is read only if it can matter.
        if self.left < f64::from(count) {
            let now = Instant::now();
            let earned = now.duration_since(self.since).as_secs_f64() * self.per_second;
            self.since = now;
            self.add(earned);
        }
        self.left -= f64::from(count);
        self.left >= 0.0
    }

    pub fn earn(&mut self, count: u32) {
        self.add(f64::from(count));
    }

    #[expect(clippy::cast_precision_loss, reason = "it was made from a u32")]
    fn add(&mut self, count: f64) {
        self.left = (self.left + count).min(self.most as f64);
    }
}

/// Finds the headers of frames in the bytes of a connection.
#[derive(Debug)]
struct FrameMeter {
    /// Bytes until the next header.
    skip: usize,
    header: [u8; HEADER_LEN],
    /// Bytes of the header that are there already.
    filled: usize,
    budget: RefillBudget,
}

impl FrameMeter {
    fn new() -> Self {
        let budget = RefillBudget::new(CONTROL_FRAMES_MAX, CONTROL_FRAMES_PER_SECOND.into());
        Self { skip: PREFACE_LEN, header: [0; HEADER_LEN], filled: 0, budget }
    }

    /// Returns false if there were too many control frames.
    fn scan(&mut self, mut bytes: &[u8]) -> bool {
        while !bytes.is_empty() {
            let skipped = self.skip.min(bytes.len());
            self.skip -= skipped;
            bytes = &bytes[skipped..];
            let taken = (HEADER_LEN - self.filled).min(bytes.len());
            self.header[self.filled..self.filled + taken].copy_from_slice(&bytes[..taken]);
            self.filled += taken;
            bytes = &bytes[taken..];
            if self.filled < HEADER_LEN {
                continue;
            }
            self.filled = 0;
            let [a, b, c, kind, ..] = self.header;
            self.skip = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
            match kind {
                // h2 itself limits those without content.
                DATA | HEADERS if self.skip > 0 => self.budget.earn(FRAMES_EARNED),
                DATA | HEADERS | CONTINUATION | GOAWAY => {}
                _ if !self.budget.spend(1) => return false,
                _ => {}
            }
        }
        true
    }

    fn wrote(&mut self, bytes: usize) {
        if bytes >= BYTES_PER_FRAME {
            self.budget.earn(u32::try_from(bytes / BYTES_PER_FRAME).unwrap_or(u32::MAX));
        }
    }
}

/// A connection for h2. Some of its bytes were read before.
pub struct GuardedIo<IO> {
    input: BytesMut,
    shared: Rc<SharedIo<IO>>,
}

/// A connection that outlives h2, so that the client can get the reason for its end.
pub struct SharedIo<IO> {
    io: RefCell<IO>,
    meter: RefCell<FrameMeter>,
    is_flooded: Cell<bool>,
    /// Time of the last read.
    heard: Rc<Cell<Instant>>,
}

impl<IO: AsyncRead + AsyncWrite + Unpin> GuardedIo<IO> {
    pub fn new(input: BytesMut, io: IO) -> (Self, Rc<SharedIo<IO>>) {
        let meter = RefCell::new(FrameMeter::new());
        let heard = Rc::new(Cell::new(Instant::now()));
        let shared = Rc::new(SharedIo { io: RefCell::new(io), meter, is_flooded: Cell::new(false), heard });
        shared.scan(&input);
        (Self { input, shared: Rc::clone(&shared) }, shared)
    }

    /// Returns the time of the last read.
    pub fn heard(&self) -> Rc<Cell<Instant>> {
        Rc::clone(&self.shared.heard)
    }
}

impl<IO: AsyncRead + AsyncWrite + Unpin> SharedIo<IO> {
    fn scan(&self, bytes: &[u8]) {
        if !self.meter.borrow_mut().scan(bytes) {
            self.is_flooded.set(true);
        }
    }

    /// Returns the number of written bytes that the client has not taken. `None` if the kernel
    /// does not report it.
    pub fn queued(&self) -> Option<u64>
    where
        IO: ClientStream,
    {
        self.io.borrow().queued()
    }

    /// Returns whether the client sent too many control frames.
    pub fn is_flooded(&self) -> bool {
        self.is_flooded.get()
    }

    /// Ends the connection because of its client's behaviour. Call it after h2 was dropped.
    pub async fn calm_down(self: Rc<Self>) {
        let Ok(shared) = Rc::try_unwrap(self).map_err(drop) else { return };
        let mut io = shared.io.into_inner();
        // Length 8, type GOAWAY, no flags, stream 0. The last stream is not known, so it is
        // 2^31-1: all may have been processed.
        let mut frame = [0; HEADER_LEN + 8];
        (frame[2], frame[3]) = (8, GOAWAY);
        frame[HEADER_LEN..HEADER_LEN + 4].copy_from_slice(&0x7fff_ffff_u32.to_be_bytes());
        frame[HEADER_LEN + 7] = ENHANCE_YOUR_CALM;
        // A client that does not take it is closed without it.
        let _ = timeout(GOODBYE, async {
            io.write_all(&frame).await?;
            io.shutdown().await
        })
        .await;
    }
}

impl<IO: AsyncRead + AsyncWrite + Unpin> AsyncRead for GuardedIo<IO> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.shared.is_flooded() {
            return Poll::Ready(Err(io::Error::other("the client sends control frames without end")));
        }
        if !self.input.is_empty() {
            let n = self.input.len().min(into.remaining());
            into.put_slice(&self.input[..n]);
            self.input.advance(n);
            return Poll::Ready(Ok(()));
        }
        let before = into.filled().len();
        ready!(Pin::new(&mut *self.shared.io.borrow_mut()).poll_read(cx, into))?;
        self.shared.scan(&into.filled()[before..]);
        self.shared.heard.set(Instant::now());
        Poll::Ready(Ok(()))
    }
}

impl<IO: AsyncRead + AsyncWrite + Unpin> AsyncWrite for GuardedIo<IO> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let wrote = ready!(Pin::new(&mut *self.shared.io.borrow_mut()).poll_write(cx, buf))?;
        self.shared.meter.borrow_mut().wrote(wrote);
        Poll::Ready(Ok(wrote))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let wrote = ready!(Pin::new(&mut *self.shared.io.borrow_mut()).poll_write_vectored(cx, bufs))?;
        self.shared.meter.borrow_mut().wrote(wrote);
        Poll::Ready(Ok(wrote))
    }

    fn is_write_vectored(&self) -> bool {
        self.shared.io.borrow().is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.shared.io.borrow_mut()).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.shared.io.borrow_mut()).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, len: usize) -> Vec<u8> {
        let size = u32::try_from(len).unwrap().to_be_bytes();
        let mut frame = vec![size[1], size[2], size[3], kind, 0, 0, 0, 0, 1];
        frame.resize(HEADER_LEN + len, 0xff);
        frame
    }

    /// How many of these in a row are taken.
    fn taken(meter: &mut FrameMeter, kind: u8, len: usize, most: u32) -> u32 {
        let frame = frame(kind, len);
        (0..most).find(|_| !meter.scan(&frame)).unwrap_or(most)
    }

    fn begun() -> FrameMeter {
        let mut meter = FrameMeter::new();
        assert!(meter.scan(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"));
        meter
    }

    #[tokio::test(start_paused = true)]
    async fn each_kind_of_control_frame_has_an_end() {
        // PRIORITY, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, and one that nobody knows.
        for (kind, len) in [(2, 5), (3, 4), (4, 0), (6, 8), (8, 4), (0x42, 100)] {
            assert_eq!(taken(&mut begun(), kind, len, 50_000), CONTROL_FRAMES_MAX, "type {kind}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn requests_data_and_responses_pay_for_control_frames() {
        let mut meter = begun();
        for _ in 0..10_000 {
            assert!(meter.scan(&frame(HEADERS, 30)) && taken(&mut meter, 8, 4, 8) == 8);
            meter.wrote(16 << 10);
            assert_eq!(taken(&mut meter, 8, 4, 64), 64);
        }
        // The answers to pings pay for nothing.
        let mut meter = begun();
        let ping = frame(6, 8);
        let pings = (0..50_000).take_while(|_| {
            meter.wrote(17);
            meter.scan(&ping)
        });
        assert_eq!(pings.count(), CONTROL_FRAMES_MAX as usize);
    }

    #[tokio::test(start_paused = true)]
    async fn frames_are_found_wherever_reads_cut_them() {
        let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        for n in 0..CONTROL_FRAMES_MAX as usize {
            bytes.extend(frame(if n % 2 == 0 { 6 } else { 0x42 }, n % 20));
        }
        for cut in [1, 7, 9, 1000] {
            let mut meter = FrameMeter::new();
            assert!(bytes.chunks(cut).all(|piece| meter.scan(piece)));
            assert!(!meter.scan(&frame(6, 8)), "cut at {cut}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn time_gives_a_budget_back() {
        let mut budget = RefillBudget::new(10, 2.0);
        assert!((0..10).all(|_| budget.spend(1)) && !budget.spend(1));
        tokio::time::advance(Duration::from_secs(3)).await;
        assert_eq!((0..10).filter(|_| budget.spend(1)).count(), 5);
    }
}
