//! Serves a client's HTTP/2 connection: h2's server with named limits, and requests and responses
//! in the edge's own types.
//!
//! These limits hold against a hostile client (RFC 9113 section 10.5):
//!
//! - Many streams at once: `SETTINGS_MAX_CONCURRENT_STREAMS` = `limits.h2_streams`. h2 refuses
//!   the next.
//! - Rapid reset (CVE-2023-44487): `PENDING_RESETS_MAX` streams reset before they were accepted,
//!   then GOAWAY. A reset drops the stream's task.
//! - Resets that the client makes us send (CVE-2025-8671): `OWN_RESETS_MAX`, then GOAWAY.
//! - CONTINUATION flood (CVE-2024-27316): h2 counts frames against the header list limit, then
//!   GOAWAY.
//! - Header bombs by HPACK: `SETTINGS_MAX_HEADER_LIST_SIZE` = `limits.head_bytes` decoded. Above
//!   it 431, far above it GOAWAY. Also `HPACK_TABLE_BYTES`.
//! - Responses that are requested and cancelled: `limits.pace.h2_resets` at once, and as many in
//!   each minute, then GOAWAY.
//! - Requests without end: `limits.keep_alive_requests`, then GOAWAY.
//! - Requests without a pause: `TOGETHER_MAX` streams, then the thread's other connections run.
//! - Floods of SETTINGS, PING, PRIORITY, WINDOW_UPDATE, RST_STREAM and unknown frames:
//!   `CONTROL_FRAMES_MAX` without progress, then GOAWAY. h2 queues one answer of each, and reads
//!   nothing while it cannot be written.
//! - Empty or tiny DATA frames: h2's budget per connection for framing overhead.
//! - Unwanted data: `STREAM_WINDOW_BYTES`, `CONNECTION_WINDOW_BYTES`. In total
//!   `limits.body_bytes`.
//! - Responses that the client does not take: `SEND_BUFFER_BYTES` per stream. A stream that is
//!   taken too slowly ends after `limits.idle_body_ms`.
//! - A dead or idle peer: pings every `PING_EVERY`. `limits.keep_alive_ms` without a stream:
//!   GOAWAY.
//!
//! Not here: the steps of a request (`request`), TLS (`tls`), HTTP/1 (`h1`), checks of a head
//! (`head`).

pub mod guard;
pub(crate) mod head;
pub mod incoming;
pub mod keep_alive;
pub mod send;
pub mod streams;

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use h2::server::{Builder, Connection, SendResponse};
use h2::{Reason, RecvStream};
use http::header::{CONTENT_LENGTH, DATE, EXPECT, SERVER};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};

use crate::http::body::{OutgoingBody, SendProgress};
use crate::http::connections::ConnectionGuard;
use crate::http::h1::wire::ClientStream;
use crate::http::h2::guard::GuardedIo;
use crate::http::h2::incoming::Http2Body;
use crate::http::h2::keep_alive::KeepAlive;
use crate::http::h2::streams::StreamSet;
use crate::http::handler::ConnectionHost;
use crate::http::message::{ConnInfo, Request, RequestBody, Response, ResponseBody};
use crate::http::meter::{MeterScope, metered};
use crate::http::refusal::Refusal;
use crate::http::{date, serving};
use crate::options::EdgeLimits;

/// Maximum number of streams that we reset because of the client's errors.
const OWN_RESETS_MAX: usize = 128;

/// The smallest possible frame size, which keeps streams from waiting long for each other (RFC
/// 9113 section 4.2).
const FRAME_BYTES: u32 = 16 << 10;

/// Maximum response body bytes that wait in memory for the client, per stream.
const SEND_BUFFER_BYTES: usize = 64 << 10;

/// Maximum number of streams of one connection that begin before other connections run.
const TOGETHER_MAX: usize = 64;

/// Dynamic table of the header decoder (RFC 7541 section 4.2): the default of the protocol.
const HPACK_TABLE_BYTES: u32 = 4096;

/// Time that the client has to close after GOAWAY, once no stream is left.
const GOODBYE: Duration = Duration::from_secs(2);

/// Serves the connection to its end. `input` was already read from it. Ends with an error if the
/// client broke the protocol or the connection failed. Nobody is left to receive it.
pub async fn serve<IO, H>(
    io: IO,
    input: BytesMut,
    conn: Rc<ConnInfo>,
    entered: ConnectionGuard,
    host: Rc<H>,
) -> Result<(), h2::Error>
where
    IO: ClientStream,
    H: ConnectionHost,
{
    let limits = host.limits();
    let peer = conn.peer;
    let (guarded, shared) = GuardedIo::new(input, io);
    let watched = Rc::downgrade(&shared);
    let queued = Box::new(move || watched.upgrade()?.queued());
    let streams = StreamSet::new(&limits, entered.phases(), queued);
    let builder = builder(&limits, host.windows(), host.pending_resets());
    let idle = Duration::from_millis(limits.keep_alive_ms);
    let exchange = StreamContext { conn, host, streams: streams.clone() };
    // Boxed, so that it can be dropped before the client gets the reason.
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

/// Serves until the client ends the connection, or a limit ends it.
async fn until_end<IO, H>(
    builder: Builder,
    io: GuardedIo<IO>,
    exchange: StreamContext<H>,
    entered: &ConnectionGuard,
    idle: Duration,
) -> Result<(), h2::Error>
where
    IO: ClientStream,
    H: ConnectionHost,
{
    let streams = exchange.streams.clone();
    let heard = io.heard();
    let connection = tokio::select! {
        connection = builder.handshake(io) => connection?,
        () = drained(entered) => return Ok(()),
        () = streams.idle_for(idle) => return Ok(()),
    };
    let mut server = Http2Server { keep_alive: None, connection, exchange };
    server.keep_alive = server.connection.ping_pong().map(|pings| KeepAlive::new(pings, heard));
    tokio::select! {
        ended = poll_fn(|cx| server.poll_streams(cx)) => return ended,
        () = drained(entered) => {}
        () = streams.idle_for(idle) => {}
        () = streams.used_up() => {}
    }
    // GOAWAY: streams that were begun are still answered, and no new one is accepted.
    server.connection.graceful_shutdown();
    tokio::select! {
        ended = poll_fn(|cx| server.poll_streams(cx)) => ended,
        () = streams.idle_for(GOODBYE) => Ok(()),
    }
}

fn builder(limits: &EdgeLimits, (stream, connection): (u32, u32), pending_resets: usize) -> Builder {
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
struct Http2Server<IO, H>
where
    IO: ClientStream,
{
    connection: Connection<GuardedIo<IO>, Bytes>,
    keep_alive: Option<KeepAlive>,
    exchange: StreamContext<H>,
}

impl<IO, H> Http2Server<IO, H>
where
    IO: ClientStream,
    H: ConnectionHost,
{
    /// Begins new streams, and moves the bytes of all. Ready when the connection has ended.
    ///
    /// Streams that arrive together begin together, so that immediate responses are sent at once.
    /// A client that always has more begins `TOGETHER_MAX` streams. Then other tasks of the
    /// thread run.
    fn poll_streams(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), h2::Error>> {
        let mut accepted = Vec::new();
        let mut left = TOGETHER_MAX;
        loop {
            if let Some(keep_alive) = &mut self.keep_alive
                && keep_alive.poll_dead(cx).is_ready()
            {
                self.keep_alive = None;
                self.connection.abrupt_shutdown(Reason::NO_ERROR);
            }
            let next = self.connection.poll_accept(cx);
            if left == TOGETHER_MAX {
                // The responses of the previous turn have been sent.
                self.exchange.streams.write_accounts();
            }
            let ended = match next {
                Poll::Ready(Some(Ok(stream))) => {
                    accepted.push(stream);
                    if accepted.len() < left {
                        continue;
                    }
                    None
                }
                Poll::Ready(Some(Err(error))) => Some(Err(error)),
                Poll::Ready(None) => Some(Ok(())),
                Poll::Pending if accepted.is_empty() => {
                    self.exchange.streams.write_accounts();
                    return Poll::Pending;
                }
                Poll::Pending => None,
            };
            left -= accepted.len();
            if !accepted.is_empty() {
                self.exchange.begin_all(accepted.drain(..));
            }
            if let Some(ended) = ended {
                self.exchange.streams.write_accounts();
                return Poll::Ready(ended);
            }
            if left == 0 {
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
        }
    }
}

/// Completes when draining begins.
pub(crate) async fn drained(entered: &ConnectionGuard) {
    poll_fn(|cx| {
        if entered.is_draining() {
            return Poll::Ready(());
        }
        entered.wake_on_drain(cx.waker());
        Poll::Pending
    })
    .await;
}

/// Data of the connection that each stream needs.
struct StreamContext<H> {
    conn: Rc<ConnInfo>,
    host: Rc<H>,
    streams: StreamSet,
}

impl<H: ConnectionHost> StreamContext<H> {
    /// Serves streams that arrived together. The connection is not idle between two of them.
    fn begin_all(&self, accepted: impl Iterator<Item = (http::Request<RecvStream>, SendResponse<Bytes>)>) {
        let _busy = self.streams.hold();
        accepted.for_each(|(request, respond)| self.begin(request, respond));
    }

    /// Serves one stream.
    fn begin(&self, request: http::Request<RecvStream>, mut respond: SendResponse<Bytes>) {
        let pace = self.streams.begin();
        let (host, conn, paced) = (Rc::clone(&self.host), Rc::clone(&self.conn), Rc::clone(&pace));
        let stream = Box::pin(async move {
            let covers = host.measures().then_some(MeterScope::Answer);
            let expects = request.headers().contains_key(EXPECT);
            // Gone before the response is sent. So both have the same place in a stream's memory.
            let response = {
                let work = pin!(exchange(&*host, conn, request, paced));
                until_reset(pin!(metered(covers, work)), &mut respond, expects).await
            };
            if let Some(response) = response {
                send::respond(respond, response).await;
            }
        });
        self.streams.run(stream, pace);
    }
}

/// Serves a request unless its client gives it up. Interim responses are sent before.
/// `100 Continue` is sent only if the client `expects` it.
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

/// Removes fields of an HTTP/1.1 connection (RFC 9113 section 8.2.2).
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

async fn exchange<H: ConnectionHost>(
    host: &H,
    conn: Rc<ConnInfo>,
    request: http::Request<RecvStream>,
    pace: Rc<SendProgress>,
) -> http::Response<OutgoingBody> {
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
                RequestBody::new(Http2Body::new(body, announced, &limits))
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

/// Returns the response with the fields that the wire adds.
fn into_wire(mut response: Response, is_head: bool, pace: Rc<SendProgress>) -> http::Response<OutgoingBody> {
    let bodiless = is_head || matches!(response.status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
    let length = response.body.len();
    let body = OutgoingBody::take(&mut response, !bodiless).paced(pace);
    let mut headers = response.headers.into_map();
    // An application's own Server stays, as its Date does.
    strip_connection(&mut headers);
    headers.entry(SERVER).or_insert(HeaderValue::from_static("nagaya"));
    headers.entry(DATE).or_insert_with(date::header_value);
    // RFC 9110 section 8.6: HEAD and 304 may have the length of the missing body. 204 must not.
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
