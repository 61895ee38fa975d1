//! Holds the beginning of another node's response until it is complete, or for a moment.
//!
//! Once its head has gone to the client, a request cannot be sent anywhere else. Most responses
//! are short, and their body follows the head at once. A node that falls silent in between would
//! leave its client with half a page. So a short response is passed on when all of it is here. A
//! long or slow one is passed on as it arrives.
//!
//! Not here: receiving it (`peers::carry`), whether its node is there (`peer_forward`).

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::Pin;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::CONTENT_TYPE;
use http_body::{Body, Frame};
use tokio::time::sleep;

use crate::http::body_adapters::{FrameResult, PrefixedBody};
use crate::http::message::{BodyError, Response, ResponseBody};

/// Maximum number of body bytes that are held.
const HELD_BYTES: usize = 64 << 10;

/// Maximum time from the head for which they are held. Finding out that a node is silent takes
/// that long, unless the network is slow. It delays a response that is shown while it is written.
const HELD_FOR: Duration = Duration::from_millis(100);

type RemainingBody = Pin<Box<dyn Body<Data = Bytes, Error = BodyError>>>;

/// Waits for the held part of the body. The error says that the node was lost before anything was
/// passed on.
pub async fn hold(mut response: Response) -> Result<Response, String> {
    if is_stream_of_events(&response) {
        return Ok(response);
    }
    response.body = match response.body {
        ResponseBody::Stream(body) => whole(body).await?,
        other => other,
    };
    Ok(response)
}

/// Returns whether the reader waits for each event. None of these can be requested again.
fn is_stream_of_events(response: &Response) -> bool {
    let kind = response.headers.get(CONTENT_TYPE);
    kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"))
}

async fn whole(mut rest: RemainingBody) -> Result<ResponseBody, String> {
    let (mut held, mut bytes) = (VecDeque::new(), 0);
    let mut late = std::pin::pin!(async { sleep(HELD_FOR).await });
    while bytes <= HELD_BYTES {
        let next = tokio::select! {
            biased;
            next = poll_fn(|cx| rest.as_mut().poll_frame(cx)) => next,
            () = &mut late => break,
        };
        match next {
            None => {
                if let Some(bytes) = all(&mut held) {
                    return Ok(ResponseBody::Bytes(bytes));
                }
                break;
            }
            Some(Err(BodyError::NodeLost(why))) => return Err(why),
            Some(Err(error)) => {
                // The error is the application's own. Its client sees it as it would have without
                // us.
                held.push_back(Err(error));
                break;
            }
            // Usually all of it is here, and there is nothing to wait for.
            Some(Ok(frame)) if held.is_empty() && frame.is_data() && rest.is_end_stream() => {
                return Ok(ResponseBody::Bytes(frame.into_data().unwrap_or_default()));
            }
            Some(Ok(frame)) => {
                bytes += frame.data_ref().map_or(0, Bytes::len);
                held.push_back(Ok(frame));
            }
        }
    }
    Ok(ResponseBody::stream(PrefixedBody::new(held, rest)))
}

/// Returns a body that is complete here, if it is only data.
fn all(held: &mut VecDeque<FrameResult>) -> Option<Bytes> {
    let is_data = |piece: &FrameResult| piece.as_ref().is_ok_and(Frame::is_data);
    if !held.iter().all(is_data) {
        return None;
    }
    let mut data = held.drain(..).filter_map(|piece| piece.ok()?.into_data().ok());
    let first = data.next().unwrap_or_default();
    let mut whole: Option<BytesMut> = None;
    for piece in data {
        whole.get_or_insert_with(|| BytesMut::from(&first[..])).extend_from_slice(&piece);
    }
    Some(whole.map_or(first, BytesMut::freeze))
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, HeaderValue, StatusCode};
    use http_body_util::BodyExt as _;
    use tokio::sync::mpsc::{Sender, channel};

    use super::*;
    use crate::http::body_adapters::testing::received;

    fn answer() -> (Sender<FrameResult>, Response) {
        let (sender, pieces) = channel(64);
        let body = ResponseBody::stream(received(pieces));
        (sender, Response::new(StatusCode::OK).with_body(body))
    }

    fn data(byte: u8, len: usize) -> FrameResult {
        Ok(Frame::data(vec![byte; len].into()))
    }

    async fn rest_of(response: Response) -> Result<(Vec<u8>, bool), BodyError> {
        let ResponseBody::Stream(body) = response.body else { panic!("it was whole") };
        let collected = body.collect().await?;
        let has_trailers = collected.trailers().is_some();
        Ok((collected.to_bytes().to_vec(), has_trailers))
    }

    #[tokio::test(start_paused = true)]
    async fn a_short_answer_is_passed_on_whole() {
        for pieces in [vec![], vec![data(b'a', 3)], vec![data(b'a', 1), data(b'b', 2), data(b'c', 3)]] {
            let (sender, response) = answer();
            let len: usize =
                pieces.iter().map(|piece| piece.as_ref().unwrap().data_ref().unwrap().len()).sum();
            for piece in pieces {
                sender.send(piece).await.unwrap();
            }
            drop(sender);
            let ResponseBody::Bytes(bytes) = hold(response).await.unwrap().body else {
                panic!("it came in parts")
            };
            assert_eq!((bytes.len(), bytes.is_sorted()), (len, true));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn slow_answer_passes_on_after_a_moment_and_loses_nothing() {
        let (sender, response) = answer();
        sender.send(data(b'a', 3)).await.unwrap();
        // Time goes on by itself while nothing else does.
        let response = hold(response).await.unwrap();
        sender.send(data(b'b', 3)).await.unwrap();
        sender.send(Ok(Frame::trailers(HeaderMap::new()))).await.unwrap();
        drop(sender);
        assert_eq!(rest_of(response).await.unwrap(), (b"aaabbb".to_vec(), true));
    }

    #[tokio::test(start_paused = true)]
    async fn long_answer_is_passed_on_at_once() {
        let (sender, response) = answer();
        for _ in 0..5 {
            sender.send(data(b'x', HELD_BYTES / 4)).await.unwrap();
        }
        let begun = tokio::time::Instant::now();
        let response = hold(response).await.unwrap();
        assert_eq!(begun.elapsed(), Duration::ZERO);
        drop(sender);
        assert_eq!(rest_of(response).await.unwrap().0.len(), HELD_BYTES / 4 * 5);
    }

    #[tokio::test(start_paused = true)]
    async fn trailers_of_a_whole_answer_are_passed_on() {
        let (sender, response) = answer();
        sender.send(data(b'a', 1)).await.unwrap();
        sender.send(Ok(Frame::trailers(HeaderMap::new()))).await.unwrap();
        drop(sender);
        assert_eq!(rest_of(hold(response).await.unwrap()).await.unwrap(), (b"a".to_vec(), true));
    }

    #[tokio::test(start_paused = true)]
    async fn lost_node_is_reported_and_a_backend_break_stays_a_break() {
        let (sender, response) = answer();
        sender.send(data(b'a', 1)).await.unwrap();
        sender.send(Err(BodyError::NodeLost("reset".into()))).await.unwrap();
        assert_eq!(hold(response).await.err(), Some("reset".into()));

        let (sender, response) = answer();
        sender.send(data(b'a', 1)).await.unwrap();
        sender.send(Err(BodyError::Backend("it ended".into()))).await.unwrap();
        let response = hold(response).await.unwrap();
        assert!(matches!(rest_of(response).await, Err(BodyError::Backend(_))));
    }

    #[tokio::test(start_paused = true)]
    async fn events_are_passed_on_as_they_come() {
        let (_sender, response) = answer();
        let kind = HeaderValue::from_static("text/event-stream; charset=utf-8");
        let begun = tokio::time::Instant::now();
        assert!(hold(response.with_header(CONTENT_TYPE, kind)).await.is_ok());
        assert_eq!(begun.elapsed(), Duration::ZERO);
    }
}
