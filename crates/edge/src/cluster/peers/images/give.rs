//! Answers other nodes about an image here, and sends its bytes as the keeper writes them to a
//! pipe.
//!
//! Not here: whether the other node is a member (`acceptor`, before this), limits on transfers
//! and their speed (the keeper).

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use http::StatusCode;
use http::header::{CONTENT_TYPE, HeaderValue};
use http_body::Frame;
use nagaya_keeper_api::client::{ImageOffer, KeeperCallError, KeeperClient};
use nagaya_keeper_api::protocol::FailureKind;
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::sync::mpsc;
use tokio::task::spawn_local;
use tokio::time::timeout;

use crate::cluster::peers::images::{ImageRequest, OfferedImage, PIECE_LEN, STALL_MAX};
use crate::http::body_adapters::{FrameResult, PolledBody};
use crate::http::message::{BodyError, Response, ResponseBody};
use crate::metrics::{EdgeMetrics, ImageDirection};

/// Maximum number of pieces that wait for the other node.
const PIECES_MAX: usize = 4;

/// Answers another node:
///
/// - `200` with the requested data
/// - `204` if there is no image
/// - `403` if the keeper does not accept the order
/// - `409` if it is another image by now
/// - `503` if the keeper cannot tell
pub async fn give(keeper: &KeeperClient, metrics: &Arc<EdgeMetrics>, asked: ImageRequest) -> Response {
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

impl From<KeeperCallError> for NotGiven {
    fn from(error: KeeperCallError) -> Self {
        let status = match &error {
            KeeperCallError::Refused { failure: FailureKind::NotFound | FailureKind::Invalid, .. } => {
                StatusCode::CONFLICT
            }
            KeeperCallError::Refused { failure: FailureKind::Forbidden, .. } => StatusCode::FORBIDDEN,
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

async fn offer(keeper: &KeeperClient, asked: &ImageRequest) -> Result<Response, NotGiven> {
    let Some(ImageOffer { offer, digest, bytes }) = keeper.offer_image(&asked.site, &asked.order).await?
    else {
        return Ok(Response::new(StatusCode::NO_CONTENT));
    };
    let text = serde_json::to_vec(&OfferedImage { offer, digest, bytes }).map_err(io::Error::from)?;
    let mut response = Response::new(StatusCode::OK).with_body(ResponseBody::Bytes(text.into()));
    response.headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(response)
}

fn send(pipe: OwnedFd, metrics: Arc<EdgeMetrics>) -> Result<Response, NotGiven> {
    let pipe = pipe::Receiver::from_owned_fd(pipe)?;
    let (pieces, mut arriving) = mpsc::channel(PIECES_MAX);
    spawn_local(pump(pipe, pieces, metrics));
    let body = PolledBody::new(move |cx| arriving.poll_recv(cx));
    Ok(Response::new(StatusCode::OK).with_body(ResponseBody::stream(body)))
}

/// Reads the pipe while the other node takes data. A stalled node occupies no thread of the
/// keeper.
async fn pump(mut pipe: pipe::Receiver, pieces: mpsc::Sender<FrameResult>, metrics: Arc<EdgeMetrics>) {
    let mut buffer = BytesMut::new();
    loop {
        buffer.reserve(PIECE_LEN);
        let piece = match pipe.read_buf(&mut buffer).await {
            Ok(0) => return,
            Ok(len) => {
                metrics.image_bytes(ImageDirection::Out, len);
                Ok(Frame::data(buffer.split().freeze()))
            }
            Err(error) => Err(BodyError::Backend(error.to_string())),
        };
        let is_over = piece.is_err();
        if !matches!(timeout(STALL_MAX, pieces.send(piece)).await, Ok(Ok(()))) || is_over {
            return;
        }
    }
}
