//! Bodies for tests.

use http_body::Body;
use tokio::sync::mpsc::Receiver;

use super::*;

/// A body of these frames, one by one. `len` is the length that it announces.
pub fn of_frames(
    len: Option<u64>,
    frames: impl IntoIterator<Item = FrameResult, IntoIter: Unpin>,
) -> impl Body<Data = Bytes, Error = BodyError> + Unpin {
    let mut frames = frames.into_iter();
    PolledBody::with_len(len, move |_| Poll::Ready(frames.next()))
}

/// A body of the frames that a test sends.
pub fn received(mut frames: Receiver<FrameResult>) -> impl Body<Data = Bytes, Error = BodyError> + Unpin {
    PolledBody::new(move |cx| frames.poll_recv(cx))
}
