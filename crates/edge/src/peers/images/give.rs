//! What another node is told of an image here, and its bytes as the keeper writes them to a pipe.
//!
//! Not here: whether whoever asks is a member (`acceptor`, before this), bounds on images under way and their speed (the keeper).

use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use http::StatusCode;
use http::header::{CONTENT_TYPE, HeaderValue};
use http_body::{Body, Frame};
use nagaya_keeper::client::{ClientError, ImageOffer, Keeper};
use nagaya_keeper::protocol::Failure;
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::sync::mpsc;
use tokio::task::spawn_local;
use tokio::time::timeout;

use super::{Asked, Offered, PIECE_LEN, STALL_MAX};
use crate::message::{BodyError, Response, ResponseBody};
use crate::metrics::{Direction, Metrics};

/// Pieces that wait for the other node.
const PIECES_MAX: usize = 4;

/// Answers another node: `200` with what was asked for, `204` where there is no image, `403` where the keeper does not take its
/// order, `409` where it is another one by now, `503` where the keeper cannot say.
pub async fn give(keeper: &Keeper, metrics: &Arc<Metrics>, asked: Asked) -> Response {
    let answered = match &asked.part {
        None => offer(keeper, &asked).await,
        Some((digest, offset)) => match keeper.send_image(&asked.site, &asked.order, (digest, *offset)).await
        {
            Ok(pipe) => send(pipe, Arc::clone(metrics)),
            Err(error) => Err(error.into()),
        },
    };
    answered.unwrap_or_else(|NotGiven { status, why }| {
        tracing::debug!(site = %asked.site, "another node does not get its image: {why}");
        Response::new(status).with_body(ResponseBody::Bytes(Bytes::from(why)))
    })
}

struct NotGiven {
    status: StatusCode,
    why: String,
}

impl From<ClientError> for NotGiven {
    fn from(error: ClientError) -> Self {
        let status = match &error {
            ClientError::Refused { failure: Failure::NotFound | Failure::Invalid, .. } => {
                StatusCode::CONFLICT
            }
            ClientError::Refused { failure: Failure::Forbidden, .. } => StatusCode::FORBIDDEN,
            _ => StatusCode::SERVICE_UNAVAILABLE,
        };
        Self { status, why: error.to_string() }
    }
}

impl From<io::Error> for NotGiven {
    fn from(error: io::Error) -> Self {
        Self { status: StatusCode::SERVICE_UNAVAILABLE, why: format!("the pipe from the keeper: {error}") }
    }
}

async fn offer(keeper: &Keeper, asked: &Asked) -> Result<Response, NotGiven> {
    let Some(ImageOffer { offer, digest, bytes }) = keeper.offer_image(&asked.site, &asked.order).await?
    else {
        return Ok(Response::new(StatusCode::NO_CONTENT));
    };
    let text = serde_json::to_vec(&Offered { offer, digest, bytes }).map_err(io::Error::from)?;
    let mut response = Response::new(StatusCode::OK).with_body(ResponseBody::Bytes(text.into()));
    response.headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(response)
}

fn send(pipe: OwnedFd, metrics: Arc<Metrics>) -> Result<Response, NotGiven> {
    let pipe = pipe::Receiver::from_owned_fd(pipe)?;
    let (pieces, arriving) = mpsc::channel(PIECES_MAX);
    spawn_local(pump(pipe, pieces, metrics));
    Ok(Response::new(StatusCode::OK).with_body(ResponseBody::stream(Pieces(arriving))))
}

/// Reads the pipe for as long as the other node takes what comes. One that stands still keeps no thread of the keeper.
async fn pump(
    mut pipe: pipe::Receiver,
    pieces: mpsc::Sender<Result<Bytes, BodyError>>,
    metrics: Arc<Metrics>,
) {
    let mut buffer = BytesMut::new();
    loop {
        buffer.reserve(PIECE_LEN);
        let piece = match pipe.read_buf(&mut buffer).await {
            Ok(0) => return,
            Ok(len) => {
                metrics.image_bytes(Direction::Out, len);
                Ok(buffer.split().freeze())
            }
            Err(error) => Err(BodyError::Backend(error.to_string())),
        };
        let is_over = piece.is_err();
        if !matches!(timeout(STALL_MAX, pieces.send(piece)).await, Ok(Ok(()))) || is_over {
            return;
        }
    }
}

struct Pieces(mpsc::Receiver<Result<Bytes, BodyError>>);

impl Body for Pieces {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        Poll::Ready(ready!(self.0.poll_recv(cx)).map(|piece| piece.map(Frame::data)))
    }
}
