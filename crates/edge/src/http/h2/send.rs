//! Sends a response into its stream.
//!
//! Not here: how the response comes to be (`h2`), its body (`body`).

use std::future::poll_fn;
use std::pin::pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use h2::server::SendResponse;
use h2::{Reason, SendStream};
use http_body::Body;

use crate::http::body::OutgoingBody;
use crate::http::h2::streams::behind_others;

/// Bytes passed on at once. A client that takes this many within the allowed time has not
/// stalled. It is one frame of the usual size.
const SLICE_BYTES: usize = 16 << 10;

/// Sends head and body. It ends if the client gives up.
pub(super) async fn respond(mut respond: SendResponse<Bytes>, response: http::Response<OutgoingBody>) {
    let (parts, body) = response.into_parts();
    let is_end = body.is_end_stream();
    let mut stream = match respond.send_response(http::Response::from_parts(parts, ()), is_end) {
        Ok(stream) => stream,
        Err(error) => {
            tracing::debug!(%error, "an HTTP/2 response cannot be sent");
            return respond.send_reset(Reason::INTERNAL_ERROR);
        }
    };
    if is_end {
        return;
    }
    let mut body = pin!(body);
    let mut held = None;
    let is_broken = poll_fn(|cx| {
        let body: &mut OutgoingBody = &mut body;
        poll_body(cx, &mut stream, body, &mut held)
    });
    if is_broken.await {
        // A reset discards unsent bytes, so the connection's task first sends as many as it can.
        behind_others().await;
        stream.send_reset(Reason::INTERNAL_ERROR);
    }
}

/// Moves the body on. Ready when it has ended, or its client has gone. Returns true if it broke
/// off.
fn poll_body(
    cx: &mut Context<'_>,
    stream: &mut SendStream<Bytes>,
    body: &mut OutgoingBody,
    held: &mut Option<(Bytes, bool)>,
) -> Poll<bool> {
    loop {
        if stream.poll_reset(cx).is_ready() {
            return Poll::Ready(false);
        }
        if held.is_some() {
            while stream.capacity() == 0 {
                match ready!(stream.poll_capacity(cx)) {
                    Some(Ok(_)) => {}
                    Some(Err(_)) | None => return Poll::Ready(false),
                }
            }
        }
        if let Some((mut data, is_end)) = held.take() {
            let slice = data.split_to(data.len().min(SLICE_BYTES));
            let is_last = is_end && data.is_empty();
            if stream.send_data(slice, is_last).is_err() || is_last {
                return Poll::Ready(false);
            }
            if !data.is_empty() {
                body.client_took();
                stream.reserve_capacity(1);
                *held = Some((data, is_end));
            }
            continue;
        }
        let frame = match ready!(std::pin::Pin::new(&mut *body).poll_frame(cx)) {
            Some(Ok(frame)) => frame,
            Some(Err(_)) => return Poll::Ready(true),
            None => {
                // It fails for a client that has gone.
                let _ = stream.send_data(Bytes::new(), true);
                return Poll::Ready(false);
            }
        };
        match frame.into_data() {
            Ok(data) => {
                let is_end = body.is_end_stream();
                // Claims one byte, and only when there is data. Claimed capacity is not available
                // to other streams.
                if !data.is_empty() {
                    stream.reserve_capacity(1);
                    *held = Some((data, is_end));
                } else if is_end {
                    let _ = stream.send_data(data, true);
                    return Poll::Ready(false);
                }
            }
            Err(frame) => {
                if let Ok(trailers) = frame.into_trailers() {
                    stream.reserve_capacity(0);
                    let _ = stream.send_trailers(trailers);
                    return Poll::Ready(false);
                }
            }
        }
    }
}
