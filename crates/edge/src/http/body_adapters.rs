//! Makes bodies out of other bodies and of functions, with a length and an end as the wires need
//! them.
//!
//! http-body-util has adapters, too: those that pass both on are used. Not here: bodies with a
//! state of their own (`body`, `h1`, `h2`, `backends`).

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

use crate::http::message::BodyError;

pub type FrameResult = Result<Frame<Bytes>, BodyError>;

/// Returns the number of data bytes. Trailers and errors have none.
pub fn data_len(frame: &FrameResult) -> usize {
    frame.as_ref().ok().and_then(Frame::data_ref).map_or(0, Bytes::len)
}

/// A body whose beginning was read before. The beginning comes first, then the rest.
pub struct PrefixedBody<B> {
    frames: VecDeque<FrameResult>,
    /// Number of bytes in `frames`.
    held: usize,
    rest: B,
}

impl<B> PrefixedBody<B> {
    pub fn new(frames: VecDeque<FrameResult>, rest: B) -> Self {
        let held = frames.iter().map(data_len).sum();
        Self { frames, held, rest }
    }
}

impl<B: Body<Data = Bytes, Error = BodyError> + Unpin> Body for PrefixedBody<B> {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<FrameResult>> {
        let Some(frame) = self.frames.pop_front() else { return Pin::new(&mut self.rest).poll_frame(cx) };
        self.held -= data_len(&frame);
        Poll::Ready(Some(frame))
    }

    fn is_end_stream(&self) -> bool {
        self.frames.is_empty() && self.rest.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (rest, held) = (self.rest.size_hint(), self.held as u64);
        let mut hint = SizeHint::new();
        hint.set_lower(rest.lower() + held);
        if let Some(upper) = rest.upper() {
            hint.set_upper(upper + held);
        }
        hint
    }
}

/// A body whose frames a function returns. The function is dropped with the body, and with it
/// all that it holds.
pub struct PolledBody<F> {
    poll: F,
    /// Number of bytes still to come, if the length is known.
    left: Option<u64>,
    is_over: bool,
}

impl<F: FnMut(&mut Context<'_>) -> Poll<Option<FrameResult>>> PolledBody<F> {
    pub fn new(poll: F) -> Self {
        Self::with_len(None, poll)
    }

    /// Returns a body that ends after `len` bytes, if that is known.
    pub fn with_len(len: Option<u64>, poll: F) -> Self {
        Self { poll, left: len, is_over: false }
    }
}

impl<F: FnMut(&mut Context<'_>) -> Poll<Option<FrameResult>> + Unpin> Body for PolledBody<F> {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<FrameResult>> {
        let frame = ready!((self.poll)(cx));
        let len = frame.as_ref().map_or(0, data_len);
        self.left = self.left.map(|left| left.saturating_sub(len as u64));
        // Nothing follows trailers.
        self.is_over |= frame.as_ref().is_none_or(|frame| frame.as_ref().is_ok_and(Frame::is_trailers));
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.is_over || self.left == Some(0)
    }

    fn size_hint(&self) -> SizeHint {
        self.left.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

#[cfg(test)]
pub mod testing;

#[cfg(test)]
mod tests {
    use http::HeaderMap;
    use http_body_util::BodyExt;

    use super::testing::of_frames;
    use super::*;

    fn data(text: &'static str) -> FrameResult {
        Ok(Frame::data(Bytes::from_static(text.as_bytes())))
    }

    #[tokio::test]
    async fn a_beginning_comes_before_the_rest_and_counts() {
        let rest = of_frames(Some(3), [data("two"), Ok(Frame::trailers(HeaderMap::new()))]);
        let mut body = PrefixedBody::new([data("one "), data("and ")].into(), rest);
        for (left, text) in [(11, "one "), (7, "and "), (3, "two")] {
            assert_eq!((body.size_hint().exact(), body.is_end_stream()), (Some(left), false));
            assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), text);
        }
        assert!(body.is_end_stream());
        assert!(body.frame().await.unwrap().unwrap().is_trailers());
        assert!(body.frame().await.is_none());

        let mut open = PrefixedBody::new([data("one")].into(), of_frames(None, []));
        assert_eq!((open.size_hint().exact(), open.size_hint().lower()), (None, 3));
        assert_eq!(open.frame().await.unwrap().unwrap().into_data().unwrap(), "one");
        assert!(!open.is_end_stream(), "the rest has not said so yet");
    }

    #[tokio::test]
    async fn a_polled_body_ends_after_its_length_or_trailers() {
        let mut sized = of_frames(Some(3), [data("one")]);
        assert_eq!((sized.size_hint().exact(), sized.is_end_stream()), (Some(3), false));
        assert_eq!(sized.frame().await.unwrap().unwrap().into_data().unwrap(), "one");
        assert_eq!((sized.size_hint().exact(), sized.is_end_stream()), (Some(0), true));

        let mut open = of_frames(None, [data("one"), Ok(Frame::trailers(HeaderMap::new()))]);
        for is_last in [false, true] {
            assert!(open.frame().await.is_some());
            assert_eq!((open.size_hint().exact(), open.is_end_stream()), (None, is_last));
        }

        let mut broken = of_frames(None, [Err(BodyError::ClientGone)]);
        assert!(broken.frame().await.unwrap().is_err());
        assert!(!broken.is_end_stream(), "a break is not an end");
    }
}
