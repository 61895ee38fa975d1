//! A request body as it arrives over HTTP/2, within its limits of size, rate and silence.
//!
//! Not here: its flow control (h2's: what is not read is not granted anew).

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;

use crate::arrival::{Allowance, Arrival};
use crate::message::BodyError;
use crate::options::Limits;

pub(super) struct Arriving {
    incoming: Incoming,
    seen: u64,
    limit: u64,
    arrival: Arrival,
}

impl Arriving {
    pub(super) fn new(incoming: Incoming, limits: &Limits) -> Self {
        let arrival = Arrival::new(Allowance::of_body(limits));
        Self { incoming, seen: 0, limit: limits.body_bytes, arrival }
    }
}

impl Body for Arriving {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        let Poll::Ready(frame) = Pin::new(&mut this.incoming).poll_frame(cx) else {
            return this.arrival.poll_late(cx).map(|()| Some(Err(BodyError::Stalled)));
        };
        Poll::Ready(frame.map(|frame| {
            let frame = frame.map_err(|error| why(&error))?;
            let bytes = frame.data_ref().map_or(0, Bytes::len);
            this.arrival.received(bytes);
            this.seen += bytes as u64;
            if this.seen > this.limit { Err(BodyError::TooLarge(this.limit)) } else { Ok(frame) }
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.size_hint()
    }
}

fn why(error: &hyper::Error) -> BodyError {
    let h2 = std::error::Error::source(error).and_then(|source| source.downcast_ref::<h2::Error>());
    // A body that is longer or shorter than announced is the one protocol error a body can have.
    if h2.and_then(h2::Error::reason) == Some(h2::Reason::PROTOCOL_ERROR) {
        BodyError::Malformed("it does not have the announced length")
    } else {
        BodyError::ClientGone
    }
}
