//! A client's HTTP/2 connection: h2's server, its bounds set by name, and requests and responses as the
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
mod keep_alive;
mod send;
mod streams;

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use h2::server::{Builder, Connection, SendResponse};
use h2::{Reason, RecvStream};
use http::header::{CONTENT_LENGTH, DATE, EXPECT, SERVER};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};

use crate::body::{Outgoing, Pace};
use crate::date;
use crate::drain::Entered;
use crate::http1::connection::Host;
use crate::http1::wire::Stream;
use crate::message::{ConnInfo, Request, RequestBody, Response, ResponseBody};
use crate::options::Limits;
use crate::receipt::{Covers, metered};
use crate::refusal::Refusal;
use crate::serving;
use guard::GuardedIo;
use incoming::Arriving;
use keep_alive::KeepAlive;
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
) -> Result<(), h2::Error>
where
    IO: Stream,
    H: Host,
{
    let limits = host.limits();
    let peer = conn.peer;
    let (guarded, shared) = GuardedIo::new(input, io);
    let watched = Rc::downgrade(&shared);
    let queued = Box::new(move || watched.upgrade()?.queued());
    let streams = Streams::new(&limits, entered.phases(), queued);
    let builder = builder(&limits, host.windows(), host.pending_resets());
    let idle = Duration::from_millis(limits.keep_alive_ms);
    let exchange = Exchange { conn, host, streams: streams.clone() };
    // Boxed, so that it can be gone before the client is told why.
    let serving = Box::pin(until_end(builder, guarded, exchange, &entered, idle));
    let ended = tokio::select! {
        ended = serving => ended,
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

/// Serves until the client has had enough, or is told that it has.
async fn until_end<IO, H>(
    builder: Builder,
    io: GuardedIo<IO>,
    exchange: Exchange<H>,
    entered: &Entered,
    idle: Duration,
) -> Result<(), h2::Error>
where
    IO: Stream,
    H: Host,
{
    let streams = exchange.streams.clone();
    let heard = io.heard();
    let connection = tokio::select! {
        connection = builder.handshake(io) => connection?,
        () = drained(entered) => return Ok(()),
        () = streams.idle_for(idle) => return Ok(()),
    };
    let mut server = Server { keep_alive: None, connection, exchange };
    server.keep_alive = server.connection.ping_pong().map(|pings| KeepAlive::new(pings, heard));
    tokio::select! {
        ended = poll_fn(|cx| server.poll_streams(cx)) => return ended,
        () = drained(entered) => {}
        () = streams.idle_for(idle) => {}
        () = streams.used_up() => {}
    }
    // GOAWAY: streams that were begun are still answered, and no new one is taken.
    server.connection.graceful_shutdown();
    tokio::select! {
        ended = poll_fn(|cx| server.poll_streams(cx)) => ended,
        () = streams.idle_for(GOODBYE) => Ok(()),
    }
}

fn builder(limits: &Limits, (stream, connection): (u32, u32), pending_resets: usize) -> Builder {
    let mut builder = Builder::new();
    builder
        .max_concurrent_streams(limits.h2_streams)
        .max_header_list_size(u32::try_from(limits.head_bytes).unwrap_or(u32::MAX))
        .max_local_error_reset_streams(Some(OWN_RESETS_MAX))
        .max_pending_accept_reset_streams(pending_resets)
        .initial_window_size(stream)
        .initial_connection_window_size(connection)
        .max_frame_size(FRAME_BYTES)
        .max_send_buffer_size(SEND_BUFFER_BYTES)
        .header_table_size(HPACK_TABLE_BYTES);
    builder
}

/// A connection after its handshake.
struct Server<IO, H>
where
    IO: Stream,
{
    connection: Connection<GuardedIo<IO>, Bytes>,
    keep_alive: Option<KeepAlive>,
    exchange: Exchange<H>,
}

impl<IO, H> Server<IO, H>
where
    IO: Stream,
    H: Host,
{
    /// Begins the streams that come, and moves the bytes of all. Ready when the connection has ended.
    fn poll_streams(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), h2::Error>> {
        loop {
            if let Some(keep_alive) = &mut self.keep_alive
                && keep_alive.poll_dead(cx).is_ready()
            {
                self.keep_alive = None;
                self.connection.abrupt_shutdown(Reason::NO_ERROR);
            }
            match ready!(self.connection.poll_accept(cx)) {
                Some(stream) => {
                    let (request, respond) = stream?;
                    self.exchange.begin(request, respond);
                }
                None => return Poll::Ready(Ok(())),
            }
        }
    }
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

/// What each stream needs of its connection.
struct Exchange<H> {
    conn: Rc<ConnInfo>,
    host: Rc<H>,
    streams: Streams,
}

impl<H: Host> Exchange<H> {
    /// Serves one stream, in a task of its own.
    fn begin(&self, request: http::Request<RecvStream>, mut respond: SendResponse<Bytes>) {
        let pace = self.streams.begin();
        let (host, conn, paced) = (Rc::clone(&self.host), Rc::clone(&self.conn), Rc::clone(&pace));
        let stream = Box::pin(async move {
            let covers = host.measures().then_some(Covers::Answer);
            let expects = request.headers().contains_key(EXPECT);
            let serving = pin!(metered(covers, exchange(&*host, conn, request, paced)));
            if let Some(response) = until_reset(serving, &mut respond, expects).await {
                send::respond(respond, response).await;
            }
        });
        self.streams.spawn(stream, pace);
    }
}

/// Serves a request unless its client gives it up. Interim answers go out before; `100 Continue` only if the client
/// `expects` it.
async fn until_reset<T>(
    mut serving: Pin<&mut impl Future<Output = T>>,
    respond: &mut SendResponse<Bytes>,
    mut expects: bool,
) -> Option<T> {
    poll_fn(|cx| {
        let (served, said) = serving::listen(|| serving.as_mut().poll(cx));
        for interim in said.interim {
            if interim.status == StatusCode::CONTINUE && !std::mem::take(&mut expects) {
                continue;
            }
            let mut head = http::Response::new(());
            (*head.status_mut(), *head.headers_mut()) = (interim.status, interim.headers);
            strip_connection(head.headers_mut());
            // A client that has gone is noticed below.
            let _ = respond.send_informational(head);
        }
        match served {
            Poll::Ready(served) => Poll::Ready(Some(served)),
            Poll::Pending => respond.poll_reset(cx).map(|_| None),
        }
    })
    .await
}

/// Fields of one connection of HTTP/1.1 (RFC 9113 section 8.2.2).
fn strip_connection(headers: &mut HeaderMap) {
    const NAMES: [HeaderName; 6] = [
        http::header::CONNECTION,
        http::header::TE,
        http::header::TRANSFER_ENCODING,
        http::header::UPGRADE,
        HeaderName::from_static("keep-alive"),
        HeaderName::from_static("proxy-connection"),
    ];
    for name in NAMES {
        headers.remove(name);
    }
}

async fn exchange<H: Host>(
    host: &H,
    conn: Rc<ConnInfo>,
    request: http::Request<RecvStream>,
    pace: Rc<Pace>,
) -> http::Response<Outgoing> {
    let (parts, body) = request.into_parts();
    let is_head = parts.method == Method::HEAD;
    let limits = host.limits();
    let id = host.request_id();
    let is_empty = body.is_end_stream();
    let announced = incoming::announced(&parts.headers);
    let response = match head::read(parts, Rc::clone(&conn), &limits, id) {
        Err(refusal) => host.refuse(&conn, refusal, id),
        Ok(_) if announced.is_some_and(|len| len > limits.body_bytes) => {
            host.refuse(&conn, Refusal::BodyTooLarge, id)
        }
        Ok(head) => {
            let body = if is_empty {
                RequestBody::empty()
            } else {
                RequestBody::new(Arriving::new(body, announced, &limits))
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

/// The response as it goes out, with the fields that the wire adds.
fn into_wire(mut response: Response, is_head: bool, pace: Rc<Pace>) -> http::Response<Outgoing> {
    let bodiless = is_head || matches!(response.status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
    let length = response.body.len();
    let body = Outgoing::take(&mut response, !bodiless).paced(pace);
    let mut headers = response.headers.into_map();
    // An application's own Server stays, as its Date does.
    strip_connection(&mut headers);
    headers.entry(SERVER).or_insert(HeaderValue::from_static("nagaya"));
    headers.entry(DATE).or_insert_with(date::header_value);
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
