//! Carries an upgraded connection to an application here, for a client at another node. Its two
//! directions are the bodies of a request and its response.
//!
//! Both ends of the connection between nodes are ours, so this needs no CONNECT (RFC 8441). CONNECT
//! could not say that an application answered without switching. Not here: the client's end
//! (`h1::tunnel`), the other node's (`peer_exchange`).

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::BytesMut;
use http::StatusCode;
use http::header::{HeaderValue, UPGRADE};
use http_body::{Body, Frame};
use tokio::io::{AsyncRead, AsyncWriteExt, ReadBuf, ReadHalf, WriteHalf};
use tokio::task::{AbortHandle, spawn_local};

use crate::http::body_adapters::{FrameResult, PolledBody};
use crate::http::message::{BodyError, Duplex, RequestBody, Response, ResponseBody};
use crate::http::peer_fields;

/// Number of bytes read from the application at once.
const READ: usize = 16 << 10;

/// Turns a response that switches protocols into one for another node. `upward` is the client's
/// data. Any other response stays as it is.
pub fn open(mut response: Response, upward: RequestBody) -> Response {
    let backend = match std::mem::replace(&mut response.body, ResponseBody::Empty) {
        ResponseBody::Tunnel(backend) => backend,
        other => return response.with_body(other),
    };
    let protocol = response.headers.remove(UPGRADE).unwrap_or(HeaderValue::from_static("upgraded"));
    peer_fields::switch(&mut response.headers, &protocol);
    response.status = StatusCode::OK;
    let (read, write) = tokio::io::split(backend);
    let pump = spawn_local(pump(upward, write)).abort_handle();
    let mut downward = DownstreamReader { read, buffer: BytesMut::new(), pump };
    response.with_body(ResponseBody::stream(PolledBody::new(move |cx| downward.poll(cx))))
}

/// Writes the client's data until its end. If either side breaks, reading from the application
/// ends, too.
async fn pump(mut upward: RequestBody, mut write: WriteHalf<Box<dyn Duplex>>) -> io::Result<()> {
    while let Some(frame) = poll_fn(|cx| Pin::new(&mut upward).poll_frame(cx)).await {
        let Ok(frame) = frame else { break };
        if let Ok(mut data) = frame.into_data() {
            write.write_all_buf(&mut data).await?;
        }
    }
    write.shutdown().await
}

/// The application's data. Dropping it ends the other direction.
struct DownstreamReader {
    read: ReadHalf<Box<dyn Duplex>>,
    buffer: BytesMut,
    pump: AbortHandle,
}

impl DownstreamReader {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<FrameResult>> {
        self.buffer.resize(READ, 0);
        let mut read = ReadBuf::new(&mut self.buffer);
        let result = ready!(Pin::new(&mut self.read).poll_read(cx, &mut read));
        let len = read.filled().len();
        Poll::Ready(match result {
            Err(error) => Some(Err(BodyError::Backend(error.to_string()))),
            Ok(()) if len == 0 => None,
            Ok(()) => Some(Ok(Frame::data(self.buffer.split_to(len).freeze()))),
        })
    }
}

impl Drop for DownstreamReader {
    fn drop(&mut self) {
        self.pump.abort();
    }
}
