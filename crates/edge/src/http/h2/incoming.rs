//! Reads a request body over HTTP/2, within its limits of size, rate and silence.
//!
//! Not here: its flow control. h2 grants no new window for bytes that are not read.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use h2::RecvStream;
use http::HeaderMap;
use http::header::CONTENT_LENGTH;
use http_body::{Body, Frame, SizeHint};

use crate::http::arrival::{ArrivalLimits, ArrivalTimer};
use crate::http::h1::framing::is_forbidden_trailer;
use crate::http::message::BodyError;
use crate::options::EdgeLimits;

/// Returns the announced length. h2 enforces it.
pub(super) fn announced(headers: &HeaderMap) -> Option<u64> {
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

pub(super) struct Http2Body {
    recv: RecvStream,
    /// Number of bytes still to come, if the head announced a length.
    left: Option<u64>,
    seen: u64,
    limit: u64,
    arrival: ArrivalTimer,
}

impl Http2Body {
    pub(super) fn new(recv: RecvStream, announced: Option<u64>, limits: &EdgeLimits) -> Self {
        let arrival = ArrivalTimer::new(ArrivalLimits::of_body(limits));
        Self { recv, left: announced, seen: 0, limit: limits.body_bytes, arrival }
    }

    fn poll_arrived(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, h2::Error>>> {
        if let Some(data) = ready!(self.recv.poll_data(cx)) {
            return Poll::Ready(Some(data.map(|data| {
                // Read bytes make room for more. A stream that is over needs none.
                let _ = self.recv.flow_control().release_capacity(data.len());
                Frame::data(data)
            })));
        }
        let trailers = ready!(self.recv.poll_trailers(cx)).transpose();
        Poll::Ready(trailers.map(|trailers| trailers.map(|trailers| Frame::trailers(allowed(trailers)))))
    }
}

/// Removes forbidden fields, as over HTTP/1.1.
fn allowed(trailers: HeaderMap) -> HeaderMap {
    if trailers.keys().any(is_forbidden_trailer) {
        let all = trailers.iter().filter(|(name, _)| !is_forbidden_trailer(name));
        return all.map(|(name, value)| (name.clone(), value.clone())).collect();
    }
    trailers
}

impl Body for Http2Body {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        let Poll::Ready(frame) = this.poll_arrived(cx) else {
            return this.arrival.poll_late(cx).map(|()| Some(Err(BodyError::Stalled)));
        };
        Poll::Ready(frame.map(|frame| {
            let frame = frame.map_err(|error| why(&error))?;
            let bytes = frame.data_ref().map_or(0, Bytes::len);
            this.arrival.received(bytes);
            this.seen += bytes as u64;
            this.left = this.left.map(|left| left.saturating_sub(bytes as u64));
            if this.seen > this.limit { Err(BodyError::TooLarge(this.limit)) } else { Ok(frame) }
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.recv.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.left.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

fn why(error: &h2::Error) -> BodyError {
    // A body that breaks its announced length is the only protocol error of a body.
    if error.reason() == Some(h2::Reason::PROTOCOL_ERROR) {
        BodyError::Malformed("it does not have the announced length")
    } else {
        BodyError::ClientGone
    }
}
