//! A client's HTTP/2 connection: hyper's server, its bounds set by name, and requests and responses as the
//! rest of the edge knows them.
//!
//! What bounds a hostile client (RFC 9113 section 10.5):
//!
//! | attack | bound |
//! |---|---|
//! | many streams at once | `SETTINGS_MAX_CONCURRENT_STREAMS` = `limits.h2_streams`; h2 refuses the next |
//! | rapid reset (CVE-2023-44487) | `PENDING_RESETS_MAX` streams reset before they were taken up, then GOAWAY; a reset drops the stream's task |
//! | resets it makes us send (CVE-2025-8671) | `OWN_RESETS_MAX`, then GOAWAY |
//! | CONTINUATION flood (CVE-2024-27316) | h2 counts frames against the header list bound, then GOAWAY |
//! | header bombs by HPACK | `SETTINGS_MAX_HEADER_LIST_SIZE` = `limits.head_bytes` decoded: 431, far above it GOAWAY; `HPACK_TABLE_BYTES` |
//! | responses that are asked for and cancelled | `limits.pace.h2_resets` at once, and as many in each minute, then GOAWAY |
//! | requests without end | `limits.keep_alive_requests`, then GOAWAY |
//! | floods of SETTINGS, PING, PRIORITY, WINDOW_UPDATE, RST_STREAM and unknown frames | `CONTROL_FRAMES_MAX` without progress, then GOAWAY; h2 queues one answer of each, and reads nothing while it cannot be written |
//! | empty or tiny DATA frames | h2's budget per connection for framing overhead |
//! | data nobody asked for | `STREAM_WINDOW_BYTES`, `CONNECTION_WINDOW_BYTES`; `limits.body_bytes` in all |
//! | answers nobody takes | `SEND_BUFFER_BYTES` per stream; a stream taken from too slowly ends after `limits.idle_body_ms` |
//! | a dead or idle peer | pings every `PING_EVERY`; `limits.keep_alive_ms` without a stream: GOAWAY |
//!
//! Not here: what happens to a request (`request`), TLS (`tls`), HTTP/1 (`http1`), how a head is read (`head`).

mod guard;
pub(crate) mod head;
mod incoming;
mod streams;

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use bytes::BytesMut;
use http::header::{CONTENT_LENGTH, SERVER};
use http::{HeaderValue, Method, StatusCode};
use hyper::body::Incoming;
use hyper::server::conn::http2::{Builder, Connection};
use hyper::service::Service;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};

use crate::body::{Outgoing, Pace};
use crate::drain::Entered;
use crate::http1::connection::Host;
use crate::message::{ConnInfo, Request, RequestBody, Response, ResponseBody};
use crate::options::Limits;
use crate::receipt::{Covers, metered};
use crate::refusal::Refusal;
use guard::GuardedIo;
use incoming::Arriving;
use streams::Streams;

/// Streams a client may reset before they were taken up. Honest clients reset a few at a time.
pub const PENDING_RESETS_MAX: usize = 20;

/// Streams that may be reset because what the client sent on them was wrong.
const OWN_RESETS_MAX: usize = 128;

/// Of a request body, so much may be under way before it is read: one stream, and the connection. The second
/// bounds the memory of a connection, as long as bodies are not read: 1 MiB.
pub const STREAM_WINDOW_BYTES: u32 = 256 << 10;
pub const CONNECTION_WINDOW_BYTES: u32 = 1 << 20;

/// The smallest there is, which keeps streams from waiting long for each other (RFC 9113 section 4.2).
const FRAME_BYTES: u32 = 16 << 10;

/// Of a response body, so much waits in memory for the client, per stream.
const SEND_BUFFER_BYTES: usize = 64 << 10;

/// Dynamic table of the header decoder (RFC 7541 section 4.2); the default of the protocol.
const HPACK_TABLE_BYTES: u32 = 4096;

/// A peer that is silent so long is asked whether it lives, and has so long to answer.
const PING_EVERY: Duration = Duration::from_secs(30);
const PING_PATIENCE: Duration = Duration::from_secs(10);

/// After GOAWAY, once no stream is left: how long the client may take to close.
const GOODBYE: Duration = Duration::from_secs(2);

/// Serves the connection to its end. `input` is what was already read of it. Ends with an error if the client broke
/// the protocol or the connection broke; there is nobody left to tell.
pub async fn serve<IO, H>(
    io: IO,
    input: BytesMut,
    conn: Rc<ConnInfo>,
    entered: Entered,
    host: Rc<H>,
) -> Result<(), hyper::Error>
where
    IO: AsyncRead + AsyncWrite + Unpin + 'static,
    H: Host,
{
    let limits = host.limits();
    let streams = Streams::new(&limits, entered.phases());
    let peer = conn.peer;
    let service = Exchange { conn, host: Rc::clone(&host), streams: streams.clone() };
    let (guarded, shared) = GuardedIo::new(input, io);
    let mut builder = builder(&limits, host.windows(), streams.clone());
    builder.max_pending_accept_reset_streams(host.pending_resets());
    // Boxed, so that it can be gone before the client is told why.
    let connection = Box::pin(builder.serve_connection(TokioIo::new(guarded), service));
    let idle = Duration::from_millis(limits.keep_alive_ms);
    let ended = tokio::select! {
        ended = until_end(connection, &streams, &entered, idle) => ended,
        () = streams.cancelled_too_often() => {
            tracing::debug!(%peer, "an HTTP/2 client cancels its requests too often");
            Ok(())
        }
    };
    if shared.is_flooded() || streams.is_over() {
        shared.calm_down().await;
    }
    ended
}

type GuardedConnection<IO, H> = Connection<TokioIo<GuardedIo<IO>>, Exchange<H>, Streams>;

/// Serves until the client has had enough, or is told that it has.
async fn until_end<IO, H>(
    mut connection: Pin<Box<GuardedConnection<IO, H>>>,
    streams: &Streams,
    entered: &Entered,
    idle: Duration,
) -> Result<(), hyper::Error>
where
    IO: AsyncRead + AsyncWrite + Unpin + 'static,
    H: Host,
{
    tokio::select! {
        ended = connection.as_mut() => return ended,
        () = drained(entered) => {}
        () = streams.idle_for(idle) => {}
        () = streams.used_up() => {}
    }
    // GOAWAY: streams that were begun are still answered, and no new one is taken.
    connection.as_mut().graceful_shutdown();
    tokio::select! {
        ended = connection => ended,
        () = streams.idle_for(GOODBYE) => Ok(()),
    }
}

fn builder(limits: &Limits, (stream, connection): (u32, u32), streams: Streams) -> Builder<Streams> {
    let mut builder = Builder::new(streams);
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(limits.h2_streams)
        .max_header_list_size(u32::try_from(limits.head_bytes).unwrap_or(u32::MAX))
        .max_local_error_reset_streams(OWN_RESETS_MAX)
        .initial_stream_window_size(stream)
        .initial_connection_window_size(connection)
        .max_frame_size(FRAME_BYTES)
        .max_send_buf_size(SEND_BUFFER_BYTES)
        .header_table_size(HPACK_TABLE_BYTES)
        .keep_alive_interval(PING_EVERY)
        .keep_alive_timeout(PING_PATIENCE)
        .auto_date_header(true);
    builder
}

/// Ends when draining begins.
pub(crate) async fn drained(entered: &Entered) {
    poll_fn(|cx| {
        if entered.is_draining() {
            return Poll::Ready(());
        }
        entered.wake_on_drain(cx.waker());
        Poll::Pending
    })
    .await;
}

/// What hyper calls for each stream.
struct Exchange<H> {
    conn: Rc<ConnInfo>,
    host: Rc<H>,
    streams: Streams,
}

impl<H: Host> Service<http::Request<Incoming>> for Exchange<H> {
    type Response = http::Response<Outgoing>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>>>>;

    fn call(&self, request: http::Request<Incoming>) -> Self::Future {
        let pace = self.streams.begin();
        let (host, conn) = (Rc::clone(&self.host), Rc::clone(&self.conn));
        Box::pin(async move {
            let covers = host.measures().then_some(Covers::Answer);
            Ok(metered(covers, exchange(&*host, conn, request, pace)).await)
        })
    }
}

async fn exchange<H: Host>(
    host: &H,
    conn: Rc<ConnInfo>,
    request: http::Request<Incoming>,
    pace: Rc<Pace>,
) -> http::Response<Outgoing> {
    let (parts, body) = request.into_parts();
    let is_head = parts.method == Method::HEAD;
    let limits = host.limits();
    let id = host.request_id();
    let announced = http_body::Body::size_hint(&body).exact();
    let response = match head::read(parts, Rc::clone(&conn), &limits, id) {
        Err(refusal) => host.refuse(&conn, refusal, id),
        Ok(_) if announced.is_some_and(|len| len > limits.body_bytes) => {
            host.refuse(&conn, Refusal::BodyTooLarge, id)
        }
        Ok(head) => {
            let body = if http_body::Body::is_end_stream(&body) {
                RequestBody::empty()
            } else {
                RequestBody::new(Arriving::new(body, &limits))
            };
            host.serve(Request { head: Box::new(head), body }).await
        }
    };
    let impossible = response.status.is_informational() || matches!(response.body, ResponseBody::Tunnel(_));
    let response = if impossible {
        host.refuse(&conn, Refusal::BackendInvalid("it changes the protocol of an HTTP/2 request".into()), id)
    } else {
        response
    };
    into_wire(response, is_head, pace)
}

/// The response as hyper takes it. hyper adds `Date`, and `Content-Length` where the body's length is known.
fn into_wire(mut response: Response, is_head: bool, pace: Rc<Pace>) -> http::Response<Outgoing> {
    let bodiless = is_head || matches!(response.status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
    let length = response.body.len();
    let body = Outgoing::take(&mut response, !bodiless).paced(pace);
    let mut headers = response.headers.into_map();
    // An application's own Server stays, as its Date does.
    headers.entry(SERVER).or_insert(HeaderValue::from_static("nagaya"));
    // RFC 9110 section 8.6: HEAD and 304 may say how long the body would be; 204 must not.
    if !bodiless || response.status == StatusCode::NO_CONTENT {
        headers.remove(CONTENT_LENGTH);
    }
    if response.status != StatusCode::NO_CONTENT
        && (!bodiless || is_head)
        && !headers.contains_key(CONTENT_LENGTH)
        && let Some(length) = length
    {
        headers.insert(CONTENT_LENGTH, HeaderValue::from(length));
    }
    let mut out = http::Response::new(body);
    *out.status_mut() = response.status;
    *out.headers_mut() = headers;
    out
}

#[cfg(test)]
mod tests;
