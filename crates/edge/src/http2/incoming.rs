//! A request body as it arrives over HTTP/2, within its limits of size, rate and silence.
//!
//! Not here: its flow control (h2's: what is not read is not granted anew).

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use h2::RecvStream;
use http::HeaderMap;
use http::header::CONTENT_LENGTH;
use http_body::{Body, Frame, SizeHint};

use crate::arrival::{Allowance, Arrival};
use crate::http1::framing::is_forbidden_trailer;
use crate::message::BodyError;
use crate::options::Limits;

/// The length that the head announces. h2 holds the body to it.
pub(super) fn announced(headers: &HeaderMap) -> Option<u64> {
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

pub(super) struct Arriving {
    recv: RecvStream,
    /// Bytes that are still to come, if the head told their number.
    left: Option<u64>,
    seen: u64,
    limit: u64,
    arrival: Arrival,
}

impl Arriving {
    pub(super) fn new(recv: RecvStream, announced: Option<u64>, limits: &Limits) -> Self {
        let arrival = Arrival::new(Allowance::of_body(limits));
        Self { recv, left: announced, seen: 0, limit: limits.body_bytes, arrival }
    }

    fn poll_arrived(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, h2::Error>>> {
        if let Some(data) = ready!(self.recv.poll_data(cx)) {
            return Poll::Ready(Some(data.map(|data| {
                // What is read makes room for more; a stream that is over needs none.
                let _ = self.recv.flow_control().release_capacity(data.len());
                Frame::data(data)
            })));
        }
        let trailers = ready!(self.recv.poll_trailers(cx)).transpose();
        Poll::Ready(trailers.map(|trailers| trailers.map(|trailers| Frame::trailers(allowed(trailers)))))
    }
}

/// Without fields that must not be there, as over HTTP/1.1.
fn allowed(trailers: HeaderMap) -> HeaderMap {
    if trailers.keys().any(is_forbidden_trailer) {
        let all = trailers.iter().filter(|(name, _)| !is_forbidden_trailer(name));
        return all.map(|(name, value)| (name.clone(), value.clone())).collect();
    }
    trailers
}

impl Body for Arriving {
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
    // A body that is longer or shorter than announced is the one protocol error a body can have.
    if error.reason() == Some(h2::Reason::PROTOCOL_ERROR) {
        BodyError::Malformed("it does not have the announced length")
    } else {
        BodyError::ClientGone
    }
}
