//! Serves a client's HTTP/1 connection, request after request, until one side ends it.
//!
//! It reads a head, checks it, lets `serve` answer it, and writes the response. After a doubtful
//! message it answers once and closes. Not here: the syntax of the head (`head`), the request's
//! processing (`request`).

use std::cell::Cell;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::BytesMut;
use http::{Method, Version};
use http_body::Body;
use nagaya_base::RequestId;
use tokio::time::timeout;

use crate::http::arrival::{ArrivalLimits, ArrivalTimer};
use crate::http::connections::ConnectionGuard;
use crate::http::h1::framing::BodyFraming;
use crate::http::h1::head::{HeadLimits, ParsedHead};
use crate::http::h1::wire::{ClientStream, Http1Wire, WireBody};
use crate::http::h1::write::{ResponseContext, SendResult};
use crate::http::h1::{head, tunnel, write};
use crate::http::handler::ConnectionHost;
use crate::http::message::{ConnInfo, Request, RequestBody, RequestHead, Response, ResponseBody};
use crate::http::meter::{MeterScope, metered};
use crate::http::refusal::Refusal;
use crate::http::serving;
use crate::idle_timer::IdleTimer;
use crate::metrics::ConnectionPhase;
use crate::options::EdgeLimits;

/// Maximum number of bytes read and dropped after a response that ends the connection.
/// `LINGER_MAX` limits the time. The client may still be sending, e.g. a whole upload. Otherwise
/// the reset would destroy the response on its way (RFC 9112 section 9.6).
const LINGER_BYTES: usize = 64 << 20;
const LINGER_MAX: Duration = Duration::from_secs(30);
const LINGER_FIRST: Duration = Duration::from_secs(2);

/// Bytes that extend that time by one second. A client that sends slower is not waited for.
const LINGER_RATE: u64 = 64 << 10;

/// Time in which a client that is turned away may send its request.
const TURN_AWAY_WAIT: Duration = Duration::from_secs(2);

/// Context of the response to input that was no request.
const REFUSED: ResponseContext = ResponseContext {
    version: Version::HTTP_11,
    is_head: false,
    keep_alive: false,
    trailers: false,
    needs_client: false,
};

/// Serves the connection to its end. `input` was already read from it.
pub async fn serve<S: ClientStream, H: ConnectionHost>(
    stream: S,
    input: BytesMut,
    conn: Rc<ConnInfo>,
    entered: ConnectionGuard,
    host: Rc<H>,
) {
    let limits = host.limits();
    let mut wire = Rc::new(Http1Wire::new(stream, input, Duration::from_millis(limits.idle_body_ms)));
    let mut silence = IdleTimer::new(Duration::from_millis(limits.head_ms));
    let mut served = 0;
    loop {
        let limits = host.limits();
        let head = match read_head(&wire, &entered, &mut silence, &limits, served == 0).await {
            Ok(Some(head)) => head,
            Ok(None) => return,
            Err(refusal) => {
                let response = host.refuse(&conn, refusal, host.request_id());
                write::respond(&wire, REFUSED, response).await;
                return linger(&wire, &entered).await;
            }
        };
        served += 1;
        let may_stay = head.keep_alive && served < limits.keep_alive_requests && !entered.is_draining();
        let asked = ResponseContext {
            version: head.version,
            is_head: head.method == Method::HEAD,
            keep_alive: may_stay,
            trailers: head.trailers,
            needs_client: false,
        };
        entered.begin(if head.framing == BodyFraming::None {
            ConnectionPhase::Working
        } else {
            ConnectionPhase::Arriving
        });
        let body = wire.begin_body(head.framing, head.expect_continue, &limits);
        let request = request(head, body, Rc::clone(&conn), host.request_id());
        let covers = host.measures().then_some(MeterScope::Everything);
        let end = {
            let work = pin!(exchange(&wire, &*host, request, asked, &entered));
            metered(covers, work).await
        };
        let sent = match end {
            ExchangeEnd::Answered(sent) => sent,
            ExchangeEnd::Switched(response) => {
                if wire.end_interim().await.is_ok() {
                    tunnel::run(wire, response).await;
                }
                return;
            }
            ExchangeEnd::Gone => return,
        };
        if !sent.complete && !sent.is_visibly_short {
            return;
        }
        if !sent.keep_alive {
            return linger(&wire, &entered).await;
        }
        if !wire.body_is_complete() && skip_body(&wire, &limits).await.is_err() {
            return;
        }
        // All guards of the exchange are gone, so the wire has no other owner.
        debug_assert!(Rc::get_mut(&mut wire).is_some(), "a body outlived its request");
    }
}

/// Answers the first request with `refusal`, and closes. A client that stays silent, or begins
/// with HTTP/2, gets no response.
pub async fn turn_away<S: ClientStream, H: ConnectionHost>(
    stream: S,
    conn: Rc<ConnInfo>,
    refusal: Refusal,
    host: Rc<H>,
) {
    let wire = Rc::new(Http1Wire::new(stream, BytesMut::new(), TURN_AWAY_WAIT));
    let spoken = timeout(TURN_AWAY_WAIT, poll_fn(|cx| wire.poll_fill_head(cx))).await;
    if !matches!(spoken, Ok(Ok(bytes)) if bytes > 0) || wire.with_input(|input| input.starts_with(b"PRI ")) {
        return;
    }
    let response = host.refuse(&conn, refusal, host.request_id());
    write::respond(&wire, REFUSED, response).await;
    linger(&wire, &host.enter()).await;
}

/// Outcome of a request.
enum ExchangeEnd {
    Answered(SendResult),
    /// From here on the connection uses another protocol.
    Switched(Response),
    /// The client left.
    Gone,
}

async fn exchange<S: ClientStream, H: ConnectionHost>(
    wire: &Http1Wire<S>,
    host: &H,
    request: Request,
    mut asked: ResponseContext,
    entered: &ConnectionGuard,
) -> ExchangeEnd {
    // The client left: dropping the unfinished future releases everything.
    let mut serving = pin!(host.serve(request));
    let needs_client = Cell::new(false);
    let listening = poll_fn(|cx| {
        let (served, said) = serving::listen(|| serving.as_mut().poll(cx));
        needs_client.set(needs_client.get() || said.needs_client);
        if asked.version == Version::HTTP_11 {
            said.interim.iter().for_each(|interim| wire.put_interim(interim));
        }
        // A client that does not take them is noticed at the final response.
        let _ = wire.poll_interim(cx);
        if entered.phase() == ConnectionPhase::Arriving && (served.is_ready() || wire.body_is_complete()) {
            entered.begin(ConnectionPhase::Working);
        }
        served
    });
    let served = until_gone(wire, &needs_client, pin!(listening)).await;
    asked.needs_client = needs_client.get();
    match served {
        None => ExchangeEnd::Gone,
        Some(response) if matches!(response.body, ResponseBody::Tunnel(_)) => ExchangeEnd::Switched(response),
        Some(response) => ExchangeEnd::Answered(write::respond(wire, asked, response).await),
    }
}

/// Returns the next head. `None` if the client (or draining) ended the connection between two
/// requests.
async fn read_head<S: ClientStream>(
    wire: &Http1Wire<S>,
    entered: &ConnectionGuard,
    silence: &mut IdleTimer,
    limits: &EdgeLimits,
    first: bool,
) -> Result<Option<ParsedHead>, Refusal> {
    silence.begin(Duration::from_millis(if first { limits.head_ms } else { limits.keep_alive_ms }));
    if !until_input(wire, entered, silence).await {
        return Ok(None);
    }
    let bounds = HeadLimits { bytes: limits.head_bytes, fields: limits.header_fields };
    let mut scanned = 0;
    if let Some(head) = take_head(wire, &mut scanned, bounds)? {
        return Ok(Some(head));
    }
    entered.begin(ConnectionPhase::Arriving);
    let mut arrival = ArrivalTimer::new(ArrivalLimits::of_head(limits));
    loop {
        let filled = poll_fn(|cx| match wire.poll_fill_head(cx) {
            Poll::Pending => arrival.poll_late(cx).map(|()| None),
            Poll::Ready(filled) => Poll::Ready(Some(filled)),
        });
        match filled.await {
            None => return Err(Refusal::RequestTimeout),
            // Half a request is no request, so nobody needs a response.
            Some(Ok(0) | Err(_)) => return Ok(None),
            Some(Ok(bytes)) => arrival.received(bytes),
        }
        if let Some(head) = take_head(wire, &mut scanned, bounds)? {
            return Ok(Some(head));
        }
    }
}

/// Waits until there is something to parse. Returns false if the connection ends here.
async fn until_input<S: ClientStream>(
    wire: &Http1Wire<S>,
    entered: &ConnectionGuard,
    silence: &mut IdleTimer,
) -> bool {
    if wire.with_input(|input| !input.is_empty()) {
        return true;
    }
    wire.release_idle();
    entered.begin(ConnectionPhase::Idle);
    poll_fn(|cx| {
        if entered.is_draining() {
            return Poll::Ready(false);
        }
        match wire.poll_fill_head(cx) {
            Poll::Ready(Ok(0) | Err(_)) => Poll::Ready(false),
            Poll::Ready(Ok(_)) => Poll::Ready(true),
            Poll::Pending => {
                entered.wake_on_drain(cx.waker());
                // A silent client gets no response, because there was no request.
                silence.poll_over(cx).map(|()| false)
            }
        }
    })
    .await
}

fn take_head<S: ClientStream>(
    wire: &Http1Wire<S>,
    scanned: &mut usize,
    limits: HeadLimits,
) -> Result<Option<ParsedHead>, Refusal> {
    wire.with_input(|input| {
        // One empty line in front is tolerated. `find_end` must not take it for the end of a
        // head.
        if *scanned == 0 && input.starts_with(b"\r\n") {
            let _ = input.split_to(2);
        }
        match head::find_end(input, scanned, limits)? {
            Some(end) => head::parse_request(input, end, limits).map(Some),
            None => Ok(None),
        }
    })
}

fn request<S: ClientStream>(
    head: ParsedHead,
    body: WireBody<S>,
    conn: Rc<ConnInfo>,
    id: RequestId,
) -> Request {
    let body = if head.framing == BodyFraming::None { RequestBody::empty() } else { RequestBody::new(body) };
    let head = Box::new(RequestHead {
        id,
        method: head.method,
        path: head.path,
        query: head.query,
        host: head.authority.host,
        port: head.authority.port,
        version: head.version,
        headers: head.headers,
        upgrade: head.upgrade,
        conn,
    });
    Request { head, body }
}

/// Runs `work` unless the client leaves first.
async fn until_gone<S: ClientStream, T>(
    wire: &Http1Wire<S>,
    needs_client: &Cell<bool>,
    mut work: Pin<&mut impl Future<Output = T>>,
) -> Option<T> {
    poll_fn(|cx| {
        loop {
            if let Poll::Ready(done) = work.as_mut().poll(cx) {
                return Poll::Ready(Some(done));
            }
            match wire.poll_gone(cx, needs_client.get()) {
                // Something arrived, perhaps the body that `work` waits for.
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(_)) => return Poll::Ready(None),
                Poll::Pending => return Poll::Pending,
            }
        }
    })
    .await
}

/// Reads and drops the rest of an unread body.
async fn skip_body<S: ClientStream>(wire: &Rc<Http1Wire<S>>, limits: &EdgeLimits) -> Result<(), ()> {
    let mut rest = Box::pin(wire.resume_body(limits));
    while let Some(frame) = poll_fn(|cx| rest.as_mut().poll_frame(cx)).await {
        frame.map_err(|_| ())?;
    }
    Ok(())
}

/// Shuts down writing and drops incoming data, so that no reset destroys the response. Meanwhile
/// the connection gives way to others.
async fn linger<S: ClientStream>(wire: &Http1Wire<S>, entered: &ConnectionGuard) {
    entered.begin(ConnectionPhase::Idle);
    if wire.shutdown().await.is_err() {
        return;
    }
    let mut left = LINGER_BYTES;
    let mut arrival = ArrivalTimer::new(ArrivalLimits::of_linger(LINGER_FIRST, LINGER_RATE, LINGER_MAX));
    let drain = async {
        while left > 0 && !entered.is_draining() {
            wire.with_input(BytesMut::clear);
            let filled = poll_fn(|cx: &mut Context<'_>| match wire.poll_fill_head(cx) {
                Poll::Pending => arrival.poll_late(cx).map(|()| None),
                Poll::Ready(filled) => Poll::Ready(filled.ok().filter(|read| *read > 0)),
            });
            let Some(read) = filled.await else { return };
            arrival.received(read);
            left = left.saturating_sub(read);
        }
    };
    // The connection is closed now, whether it ended by itself or by the timeout.
    let _ = timeout(LINGER_MAX, drain).await;
}
