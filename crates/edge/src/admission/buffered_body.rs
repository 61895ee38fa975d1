//! Takes in a request's body while the request waits its turn. Bytes are taken in up to a limit,
//! and read from here later.
//!
//! So a slow upload happens in line and not under a permit. A client that sends first and then
//! listens is not blocked. Beyond the limit the connection holds the client back. Not here: the
//! lane (`admission`).

use std::collections::VecDeque;

use http_body_util::BodyExt;

use crate::http::body_adapters::{FrameResult, PrefixedBody, data_len};
use crate::http::message::RequestBody;

/// Maximum number of bytes taken in for one request. Forms and most posts are smaller, uploads of
/// files are not.
pub const BYTES_MAX: usize = 64 << 10;

pub struct BufferedBody {
    frames: VecDeque<FrameResult>,
    bytes: usize,
    /// The part that has not arrived yet.
    rest: RequestBody,
}

impl BufferedBody {
    pub fn new(body: RequestBody) -> Self {
        Self { frames: VecDeque::new(), bytes: 0, rest: body }
    }

    /// Takes in bytes until the limit, the end, or an error. Takes nothing of a body that is kept
    /// already.
    pub async fn fill(&mut self) {
        while !self.rest.is_kept() && self.bytes < BYTES_MAX && !self.rest.is_empty() {
            let Some(frame) = self.rest.frame().await else { return };
            let is_error = frame.is_err();
            self.bytes += data_len(&frame);
            self.frames.push_back(frame);
            if is_error {
                return;
            }
        }
    }

    /// Returns the whole body, from its beginning.
    pub fn into_body(self) -> RequestBody {
        if self.frames.is_empty() {
            return self.rest;
        }
        RequestBody::new(PrefixedBody::new(self.frames, self.rest))
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http_body::{Body, Frame};

    use super::*;
    use crate::http::body_adapters::testing::of_frames;
    use crate::http::message::BodyError;

    fn held(parts: Vec<Result<&'static [u8], BodyError>>) -> BufferedBody {
        let frames = parts.into_iter().map(|part| part.map(|data| Frame::data(Bytes::from_static(data))));
        BufferedBody::new(RequestBody::new(of_frames(None, frames)))
    }

    async fn read(body: RequestBody) -> Result<Vec<u8>, BodyError> {
        Ok(body.collect().await?.to_bytes().to_vec())
    }

    #[tokio::test]
    async fn nothing_is_lost_or_changed() {
        let mut held = held(vec![Ok(b"one "), Ok(b"two")]);
        held.fill().await;
        let body = held.into_body();
        assert_eq!(body.size_hint().lower(), 7);
        assert_eq!(read(body).await.unwrap(), b"one two");
    }

    #[tokio::test]
    async fn a_body_that_is_kept_stays_so() {
        let mut held = BufferedBody::new(crate::backends::intake::testing::kept("all of it").await);
        held.fill().await;
        let body = held.into_body();
        assert!(body.is_kept());
        assert_eq!(read(body).await.unwrap(), b"all of it");
    }

    #[tokio::test]
    async fn no_more_is_taken_in_than_the_bound() {
        static PART: [u8; BYTES_MAX / 2 + 1] = [b'x'; BYTES_MAX / 2 + 1];
        let mut held = held(vec![Ok(&PART), Ok(&PART), Ok(&PART)]);
        held.fill().await;
        assert_eq!(held.frames.len(), 2);
        assert_eq!(read(held.into_body()).await.unwrap().len(), 3 * PART.len());
    }

    #[tokio::test]
    async fn an_error_comes_where_it_came() {
        let mut held = held(vec![Ok(b"part"), Err(BodyError::ClientGone)]);
        held.fill().await;
        let mut body = held.into_body();
        assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "part");
        assert!(matches!(body.frame().await, Some(Err(BodyError::ClientGone))));
    }

    #[tokio::test]
    async fn a_request_without_a_body_stays_so() {
        let mut held = BufferedBody::new(RequestBody::empty());
        held.fill().await;
        assert!(held.into_body().is_empty());
    }
}
