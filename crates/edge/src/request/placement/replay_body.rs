//! Keeps a request's body so that it can be read again from its beginning, if little of it was
//! read.
//!
//! Not here: whether the request may be sent again (`idempotence`).

use std::cell::RefCell;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};

use crate::admission::buffered_body::BYTES_MAX as BODY_HELD_MAX;
use crate::http::message::{BodyError, RequestBody};

/// The body, and its part that was read. `None` if there is no body.
pub struct ReplayBody(Option<Rc<RefCell<KeptBody>>>);

struct KeptBody {
    /// `None` once it was too much.
    read: Option<Vec<ReplayPiece>>,
    bytes: usize,
    /// Length of all of it, if that was announced.
    len: Option<u64>,
    rest: RequestBody,
}

#[derive(Clone)]
enum ReplayPiece {
    Data(Bytes),
    Trailers(HeaderMap),
}

impl ReplayBody {
    pub fn new(body: RequestBody) -> Self {
        let is_empty = body.is_empty();
        let len = body.len();
        let kept = || Rc::new(RefCell::new(KeptBody { read: Some(Vec::new()), bytes: 0, len, rest: body }));
        Self((!is_empty).then(kept))
    }

    /// Returns whether all that was read of it is kept, so that it can be read from its
    /// beginning.
    pub fn is_whole(&self) -> bool {
        self.0.as_ref().is_none_or(|kept| kept.borrow().read.is_some())
    }

    /// Returns the body from its beginning. An earlier copy must not be read any further.
    pub fn body(&self) -> RequestBody {
        let is_over = |kept: &KeptBody| kept.read.as_ref().is_none_or(Vec::is_empty) && kept.rest.is_empty();
        match &self.0 {
            Some(kept) if !is_over(&kept.borrow()) => {
                RequestBody::new(BufferRead { kept: Rc::clone(kept), at: 0, given: 0 })
            }
            _ => RequestBody::empty(),
        }
    }

    /// Returns the body from its beginning, for the last time.
    pub fn into_body(self) -> RequestBody {
        let Some(kept) = self.0 else { return RequestBody::empty() };
        match Rc::try_unwrap(kept) {
            Ok(kept) if kept.borrow().bytes == 0 => kept.into_inner().rest,
            Ok(kept) => Self(Some(Rc::new(kept))).body(),
            Err(kept) => Self(Some(kept)).body(),
        }
    }
}

struct BufferRead {
    kept: Rc<RefCell<KeptBody>>,
    /// Index of the next piece of the part that was read before.
    at: usize,
    /// Number of bytes returned.
    given: u64,
}

impl Body for BufferRead {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        let mut kept = this.kept.borrow_mut();
        if let Some(piece) = kept.read.as_ref().and_then(|read| read.get(this.at)) {
            this.at += 1;
            this.given += piece.len();
            return Poll::Ready(Some(Ok(match piece.clone() {
                ReplayPiece::Data(data) => Frame::data(data),
                ReplayPiece::Trailers(trailers) => Frame::trailers(trailers),
            })));
        }
        let frame = std::task::ready!(Pin::new(&mut kept.rest).poll_frame(cx));
        if let Some(Ok(frame)) = &frame {
            kept.note(frame);
            this.at += 1;
            this.given += frame.data_ref().map_or(0, |data| data.len() as u64);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        let kept = self.kept.borrow();
        kept.read.as_ref().is_none_or(|read| self.at >= read.len()) && kept.rest.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        let len = self.kept.borrow().len;
        len.map_or_else(SizeHint::default, |len| SizeHint::with_exact(len.saturating_sub(self.given)))
    }
}

impl KeptBody {
    fn note(&mut self, frame: &Frame<Bytes>) {
        let Some(read) = &mut self.read else { return };
        self.bytes += frame.data_ref().map_or(0, Bytes::len);
        if self.bytes > BODY_HELD_MAX {
            self.read = None;
            return;
        }
        read.extend(frame.data_ref().cloned().map(ReplayPiece::Data));
        read.extend(frame.trailers_ref().cloned().map(ReplayPiece::Trailers));
    }
}

impl ReplayPiece {
    fn len(&self) -> u64 {
        match self {
            Self::Data(data) => data.len() as u64,
            Self::Trailers(_) => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::{BodyExt, Full};

    use super::*;

    fn body(len: usize) -> RequestBody {
        RequestBody::new(Full::new(Bytes::from(vec![b'x'; len])).map_err(|never| match never {}))
    }

    async fn read(body: RequestBody) -> usize {
        body.collect().await.unwrap().to_bytes().len()
    }

    #[tokio::test]
    async fn kept_body_is_read_again_with_the_same_length() {
        let keep = ReplayBody::new(body(1000));
        assert_eq!(keep.body().len(), Some(1000));
        assert_eq!(read(keep.body()).await, 1000);
        assert!(keep.is_whole());
        let again = keep.body();
        assert_eq!(again.len(), Some(1000));
        assert_eq!(read(again).await, 1000);
        assert_eq!(read(keep.into_body()).await, 1000);
    }

    #[tokio::test]
    async fn a_long_body_is_not_kept() {
        let keep = ReplayBody::new(body(BODY_HELD_MAX + 1));
        assert_eq!(read(keep.body()).await, BODY_HELD_MAX + 1);
        assert!(!keep.is_whole());
    }

    #[tokio::test]
    async fn a_request_without_a_body_stays_so() {
        let keep = ReplayBody::new(RequestBody::empty());
        assert!(keep.body().is_empty() && keep.is_whole() && keep.into_body().is_empty());
    }
}
