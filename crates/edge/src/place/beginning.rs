//! The beginning of an answer that comes from another node: held until it is whole, or for a moment.
//!
//! Once its head has gone to the client, a request cannot be sent anywhere else. Most answers are short, and their body comes
//! just after the head; a node that falls silent in between would leave its client with half a page. So what is short is passed on
//! when all of it is here. What is long, or takes its time, is passed on as it comes.
//!
//! Not here: receiving it (`peers::carry`), whether its node is there (`hop`).

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::CONTENT_TYPE;
use http_body::{Body, Frame, SizeHint};
use tokio::time::sleep;

use crate::message::{BodyError, Response, ResponseBody};

/// So much of a body is held.
const HELD_BYTES: usize = 64 << 10;

/// And for so long, from its head: as long as it takes to find out that a node is silent, unless the network is slow. An answer that
/// is meant to be seen while it is written begins no later than this.
const HELD_FOR: Duration = Duration::from_millis(100);

type Piece = Result<Frame<Bytes>, BodyError>;
type Rest = Pin<Box<dyn Body<Data = Bytes, Error = BodyError>>>;

/// Waits for what is held of the body. The error: the node was lost before anything was passed on.
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

/// Its reader waits for each event, and none of it can be had again.
fn is_stream_of_events(response: &Response) -> bool {
    let kind = response.headers.get(CONTENT_TYPE);
    kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"))
}

async fn whole(mut rest: Rest) -> Result<ResponseBody, String> {
    let (mut held, mut bytes) = (VecDeque::new(), 0);
    let mut late = std::pin::pin!(async { sleep(HELD_FOR).await });
    let left = rest.size_hint().exact();
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
                // The application's own doing: its client learns of it as it would have without us.
                held.push_back(Err(error));
                break;
            }
            // Mostly all of it is here, and nothing else has to be waited for.
            Some(Ok(frame)) if held.is_empty() && frame.is_data() && rest.is_end_stream() => {
                return Ok(ResponseBody::Bytes(frame.into_data().unwrap_or_default()));
            }
            Some(Ok(frame)) => {
                bytes += frame.data_ref().map_or(0, Bytes::len);
                held.push_back(Ok(frame));
            }
        }
    }
    Ok(ResponseBody::stream(Held { held, rest, is_over: false, left }))
}

/// A body that is here from its first to its last byte, if it is nothing but data.
fn all(held: &mut VecDeque<Piece>) -> Option<Bytes> {
    let is_data = |piece: &Piece| piece.as_ref().is_ok_and(Frame::is_data);
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

/// What was held, and what follows.
struct Held {
    held: VecDeque<Piece>,
    rest: Rest,
    is_over: bool,
    /// Bytes left of the whole, where its length was told.
    left: Option<u64>,
}

impl Body for Held {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Piece>> {
        let this = &mut *self;
        let next = match this.held.pop_front() {
            Some(piece) => Some(piece),
            None if this.is_over => None,
            None => std::task::ready!(this.rest.as_mut().poll_frame(cx)),
        };
        this.is_over |= !matches!(next, Some(Ok(_)));
        let sent = next.as_ref().and_then(|piece| piece.as_ref().ok()?.data_ref()).map_or(0, Bytes::len);
        this.left = this.left.map(|left| left.saturating_sub(sent as u64));
        Poll::Ready(next)
    }

    fn is_end_stream(&self) -> bool {
        self.held.is_empty() && (self.is_over || self.rest.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        self.left.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, HeaderValue, StatusCode};
    use http_body_util::BodyExt as _;
    use tokio::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    struct Pieces(Receiver<Piece>);

    impl Body for Pieces {
        type Data = Bytes;
        type Error = BodyError;

        fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Piece>> {
            self.0.poll_recv(cx)
        }
    }

    fn answer() -> (Sender<Piece>, Response) {
        let (sender, pieces) = channel(64);
        let body = ResponseBody::stream(Pieces(pieces));
        (sender, Response::new(StatusCode::OK).with_body(body))
    }

    fn data(byte: u8, len: usize) -> Piece {
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
    async fn what_takes_its_time_is_passed_on_after_a_moment_and_loses_nothing() {
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
    async fn what_is_long_is_passed_on_at_once() {
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
    async fn a_lost_node_is_said_and_what_the_application_broke_off_stays_so() {
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
