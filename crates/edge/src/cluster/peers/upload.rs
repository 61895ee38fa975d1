//! Sends the body of a request to another node, as fast as that accepts it.
//!
//! Not here: its end at the other node (`h2`), the answer (`peer_exchange`).

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use h2::{Reason, SendStream};
use http_body::Body;

use crate::http::message::{BodyError, RequestBody};

pub(super) struct PeerUpload {
    send: SendStream<Bytes>,
    body: RequestBody,
    /// Bytes taken from the body and not yet accepted by the other node's window.
    pending: Bytes,
}

impl PeerUpload {
    pub fn new(send: SendStream<Bytes>, body: RequestBody) -> Self {
        Self { send, body, pending: Bytes::new() }
    }

    /// Moves the body on. Ready when all of it is sent, or the other node needs no more of it. An
    /// error is the client's.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BodyError>> {
        loop {
            if !self.pending.is_empty() {
                match self.poll_window(cx) {
                    Poll::Ready(Some(window)) => {
                        let chunk = self.pending.split_to(window.min(self.pending.len()));
                        if self.send.send_data(chunk, false).is_err() {
                            return Poll::Ready(Ok(()));
                        }
                        continue;
                    }
                    Poll::Ready(None) => return Poll::Ready(Ok(())),
                    Poll::Pending => return self.poll_refused(cx),
                }
            }
            match Pin::new(&mut self.body).poll_frame(cx) {
                Poll::Pending => return self.poll_refused(cx),
                Poll::Ready(None) => {
                    let _ = self.send.send_data(Bytes::new(), true);
                    return Poll::Ready(Ok(()));
                }
                Poll::Ready(Some(Err(error))) => {
                    self.send.send_reset(Reason::CANCEL);
                    return Poll::Ready(Err(error));
                }
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) => self.pending = data,
                    Err(frame) => {
                        if let Ok(trailers) = frame.into_trailers() {
                            let _ = self.send.send_trailers(trailers);
                            return Poll::Ready(Ok(()));
                        }
                    }
                },
            }
        }
    }

    /// Returns the number of bytes that the other node accepts now. `None` if it accepts no more.
    fn poll_window(&mut self, cx: &mut Context<'_>) -> Poll<Option<usize>> {
        self.send.reserve_capacity(self.pending.len());
        while self.send.capacity() == 0 {
            match self.send.poll_capacity(cx) {
                Poll::Ready(Some(Ok(_))) => {}
                Poll::Ready(_) => return Poll::Ready(None),
                Poll::Pending => return Poll::Pending,
            }
        }
        Poll::Ready(Some(self.send.capacity()))
    }

    /// Polls for a reset. A node that has answered in full may reset the stream with the unread
    /// body.
    fn poll_refused(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BodyError>> {
        self.send.poll_reset(cx).map(|_| Ok(()))
    }
}
