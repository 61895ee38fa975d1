//! Holds one body to the rates of its cells.
//!
//! It goes in slices. Each waits for its turn in every bucket it is charged to, then goes as fast
//! as it can. Not here: which rates hold (`shaping`), the sending (`h1::write`, `body`).

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use smallvec::SmallVec;
use tokio::time::{Instant, Sleep, sleep_until};

use crate::http::message::{BodyError, RequestBody};
use crate::http::throttle::bucket::RateBucket;

/// Slices per second. More would be smoother and cost more. At 64 even the slowest timer keeps
/// up.
const SLICES_PER_SECOND: u64 = 64;

/// Minimum size of one slice, bytes: below it, heads of packets would cost more than their
/// content. `SLICE_MAX` is the maximum: above it, other requests of the thread would wait for the
/// copying.
const SLICE_MIN: u64 = 512;
const SLICE_MAX: u64 = 256 << 10;

/// Sums up how much longer bodies took because of their rates.
pub trait PacedTime: std::fmt::Debug {
    fn add_paced(&self, time: Duration);
}

/// Bytes of one body, charged to one or more buckets.
#[derive(Debug)]
pub struct BodyPacer {
    buckets: SmallVec<[Arc<RateBucket>; 2]>,
    slice: u64,
    paced: Rc<dyn PacedTime>,
    /// The turn of the slice that waits.
    turn: Option<SliceTurn>,
}

#[derive(Debug)]
struct SliceTurn {
    asked: Instant,
    sleep: Pin<Box<Sleep>>,
}

impl BodyPacer {
    /// Returns `None` if there is no bucket.
    pub fn new(buckets: SmallVec<[Arc<RateBucket>; 2]>, paced: Rc<dyn PacedTime>) -> Option<Self> {
        let rate = buckets.iter().map(|bucket| bucket.rate()).min()?;
        // At most a second's bytes, or a client that left would go unnoticed for longer.
        let slice = (rate / SLICES_PER_SECOND).clamp(SLICE_MIN, SLICE_MAX).min(rate);
        Some(Self { buckets, slice, paced, turn: None })
    }

    /// Returns a pacer with one rate of its own.
    #[cfg(test)]
    pub fn limited(rate: u64, paced: Rc<dyn PacedTime>) -> Option<Self> {
        Self::new(SmallVec::from_iter([Arc::new(RateBucket::new(rate))]), paced)
    }

    /// Returns the maximum number of bytes to take at once.
    pub fn slice(&self) -> u64 {
        self.slice
    }

    /// Ready when `bytes` may go. While it is pending, further polls must be for the same bytes.
    pub fn poll_take(&mut self, cx: &mut Context<'_>, bytes: u64) -> Poll<()> {
        if self.turn.is_none() && self.try_take(bytes) {
            return Poll::Ready(());
        }
        if let Some(turn) = &mut self.turn {
            ready!(turn.sleep.as_mut().poll(cx));
            self.paced.add_paced(turn.asked.elapsed());
            self.turn = None;
        }
        Poll::Ready(())
    }

    /// Returns whether `bytes` may go now. If not, their turn is recorded for `poll_take`, which
    /// must then be called for the same bytes.
    pub fn try_take(&mut self, bytes: u64) -> bool {
        let asked = Instant::now();
        let turn = self.buckets.iter().map(|bucket| bucket.take(bytes)).max().unwrap_or(asked);
        if turn <= asked {
            return true;
        }
        self.turn = Some(SliceTurn { asked, sleep: Box::pin(sleep_until(turn)) });
        false
    }

    pub async fn take(&mut self, bytes: u64) {
        poll_fn(|cx| self.poll_take(cx, bytes)).await;
    }

    /// Holds a request's body to the rate as it arrives.
    pub fn hold(self, body: RequestBody) -> RequestBody {
        RequestBody::new(PacedBody::new(body, Box::new(self)))
    }
}

/// A body limited to its rate.
pub struct PacedBody<B> {
    body: B,
    flow: Box<BodyPacer>,
    /// A piece that is there, and not passed on yet.
    piece: Bytes,
}

impl<B> PacedBody<B> {
    pub fn new(body: B, flow: Box<BodyPacer>) -> Self {
        Self { body, flow, piece: Bytes::new() }
    }
}

impl<B: Body<Data = Bytes, Error = BodyError> + Unpin> Body for PacedBody<B> {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        while this.piece.is_empty() {
            match ready!(Pin::new(&mut this.body).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => this.piece = data,
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                end => return Poll::Ready(end),
            }
        }
        let len = (this.piece.len() as u64).min(this.flow.slice());
        ready!(this.flow.poll_take(cx, len));
        let slice = this.piece.split_to(usize::try_from(len).expect("not longer than the piece"));
        Poll::Ready(Some(Ok(Frame::data(slice))))
    }

    fn is_end_stream(&self) -> bool {
        self.piece.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let held = self.piece.len() as u64;
        match self.body.size_hint().exact() {
            Some(left) => SizeHint::with_exact(left + held),
            None => SizeHint::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use smallvec::smallvec;

    use super::*;

    #[derive(Debug, Default)]
    struct Sum(Cell<Duration>);

    impl PacedTime for Sum {
        fn add_paced(&self, time: Duration) {
            self.0.set(self.0.get() + time);
        }
    }

    fn flow_into(sum: &Rc<Sum>, rates: &[u64]) -> BodyPacer {
        let buckets = rates.iter().map(|&rate| Arc::new(RateBucket::new(rate))).collect();
        BodyPacer::new(buckets, Rc::<Sum>::clone(sum)).unwrap()
    }

    fn flow(rates: &[u64]) -> BodyPacer {
        flow_into(&Rc::default(), rates)
    }

    #[tokio::test(start_paused = true)]
    async fn a_hundred_megabytes_take_as_long_as_their_rate_says() {
        let (len, rate) = (100_000_000, 20_000_000);
        let sum = Rc::default();
        let mut flow = flow_into(&sum, &[rate]);
        let start = Instant::now();
        let mut left: u64 = len;
        while left > 0 {
            let bytes = left.min(flow.slice());
            flow.take(bytes).await;
            left -= bytes;
        }
        let took = start.elapsed().as_secs_f64();
        assert!((4.9..5.1).contains(&took), "{took} s");
        let paced = sum.0.get().as_micros();
        assert!((4_900_000..5_100_000).contains(&paced), "{paced} us");
    }

    #[tokio::test(start_paused = true)]
    async fn the_narrowest_cell_decides_and_the_others_are_charged_too() {
        let shared = Arc::new(RateBucket::new(10_000));
        let buckets = smallvec![Arc::new(RateBucket::new(1000)), Arc::clone(&shared)];
        let mut flow = BodyPacer::new(buckets, Rc::<Sum>::default()).unwrap();
        let start = Instant::now();
        for _ in 0..4 {
            flow.take(500).await;
        }
        assert_eq!(start.elapsed().as_millis(), 1500);
        assert!(BodyPacer::new(SmallVec::new(), Rc::<Sum>::default()).is_none());
    }

    #[test]
    fn slices_fit_their_rate() {
        for (rate, slice) in [(1, 1), (100, 100), (20_000_000, 256 << 10), (6_400_000, 100_000)] {
            assert_eq!(flow(&[rate]).slice(), slice, "{rate}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_upload_arrives_whole_at_its_rate() {
        let whole: Bytes = (0..5000u32).map(|n| n as u8).collect();
        let body = crate::backends::programs::testing::known(whole.clone());
        let mut held = flow(&[1000]).hold(body);
        assert_eq!(held.len(), Some(5000));
        let start = Instant::now();
        let mut got = Vec::new();
        while let Some(frame) = poll_fn(|cx| Pin::new(&mut held).poll_frame(cx)).await {
            got.extend_from_slice(&frame.unwrap().into_data().unwrap());
        }
        assert!(got == whole);
        let took = start.elapsed();
        assert!((Duration::from_millis(4000)..=Duration::from_secs(5)).contains(&took), "{took:?}");
    }
}
