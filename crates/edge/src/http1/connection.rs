//! A client's HTTP/1 connection: request after request, until one side has had enough.
//!
//! Read a head, check it, let `serve` answer it, write the answer; on anything doubtful answer once and close.
//! Not here: what the head may look like (`head`), what happens to a request (`request`).

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

use crate::arrival::{Allowance, Arrival};
use crate::clients::crowd::Phase;
use crate::drain::Entered;
use crate::http1::framing::Framing;
use crate::http1::head::{self, HeadLimits, RequestHead};
use crate::http1::tunnel;
use crate::http1::wire::{Incoming, Stream, Wire};
use crate::http1::write::{self, Asked, Sent};
use crate::http2;
use crate::message::{ConnInfo, Head, Request, RequestBody, Response, ResponseBody};
use crate::options::Limits;
use crate::receipt::{Covers, metered};
use crate::refusal::Refusal;
use crate::serving;
use crate::silence::Silence;

/// After an answer that ends the connection the client may still be sending, a whole upload for one: it is read over for so
/// long and so much, or the reset would destroy the answer on its way (RFC 9112 section 9.6).
const LINGER_BYTES: usize = 64 << 20;
const LINGER_MAX: Duration = Duration::from_secs(30);
const LINGER_FIRST: Duration = Duration::from_secs(2);

/// Beyond the first time, so many bytes earn a second: a client that drips is not waited for.
const LINGER_RATE: u64 = 64 << 10;

/// A client that is turned away may take so long to ask.
const TURN_AWAY_WAIT: Duration = Duration::from_secs(2);

/// Of what was no request.
const REFUSED: Asked = Asked {
    version: Version::HTTP_11,
    is_head: false,
    keep_alive: false,
    trailers: false,
    needs_client: false,
};

/// What a connection needs of the thread it lives on.
pub trait Host: 'static {
    fn limits(&self) -> Rc<Limits>;
    fn request_id(&self) -> RequestId;
    /// The life of the request. Never fails: a refusal is a response too.
    fn serve(&self, request: Request) -> impl Future<Output = Response>;
    /// The answer to what was no request; `conn` is for the log.
    fn refuse(&self, conn: &ConnInfo, refusal: Refusal, id: RequestId) -> Response;
    /// Counts the connection in for as long as it lives.
    fn enter(&self) -> Entered;
    /// Whether the thread's own time on each request is wanted.
    fn measures(&self) -> bool;
    /// Over HTTP/2: how much of request bodies may be under way before it is read, on one stream and on all together.
    fn windows(&self) -> (u32, u32) {
        (http2::STREAM_WINDOW_BYTES, http2::CONNECTION_WINDOW_BYTES)
    }
    /// Over HTTP/2: so many streams may be reset before they were taken up.
    fn pending_resets(&self) -> usize {
        http2::PENDING_RESETS_MAX
    }
}

/// Serves the connection to its end. `input` is what was already read of it.
pub async fn serve<S: Stream, H: Host>(
    stream: S,
    input: BytesMut,
    conn: Rc<ConnInfo>,
    entered: Entered,
    host: Rc<H>,
) {
    let limits = host.limits();
    let mut wire = Rc::new(Wire::new(stream, input, Duration::from_millis(limits.idle_body_ms)));
    let mut silence = Silence::new(Duration::from_millis(limits.head_ms));
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
        let asked = Asked {
            version: head.version,
            is_head: head.method == Method::HEAD,
            keep_alive: may_stay,
            trailers: head.trailers,
            needs_client: false,
        };
        entered.begin(if head.framing == Framing::None { Phase::Working } else { Phase::Arriving });
        let body = wire.begin_body(head.framing, head.expect_continue, &limits);
        let request = request(head, body, Rc::clone(&conn), host.request_id());
        let sent = match metered(
            host.measures().then_some(Covers::Everything),
            exchange(&wire, &*host, request, asked, &entered),
        )
        .await
        {
            Exchanged::Answered(sent) => sent,
            Exchanged::Switched(response) => {
                if wire.end_interim().await.is_ok() {
                    tunnel::run(wire, response).await;
                }
                return;
            }
            Exchanged::Gone => return,
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
        // All guards of the exchange are gone, so the wire is ours alone again.
        debug_assert!(Rc::get_mut(&mut wire).is_some(), "a body outlived its request");
    }
}

/// Answers whatever request comes first with `refusal`, and closes. A client that says nothing soon, or begins with HTTP/2, is
/// closed without an answer.
pub async fn turn_away<S: Stream, H: Host>(stream: S, conn: Rc<ConnInfo>, refusal: Refusal, host: Rc<H>) {
    let wire = Rc::new(Wire::new(stream, BytesMut::new(), TURN_AWAY_WAIT));
    let spoken = timeout(TURN_AWAY_WAIT, poll_fn(|cx| wire.poll_fill_head(cx))).await;
    if !matches!(spoken, Ok(Ok(bytes)) if bytes > 0) || wire.with_input(|input| input.starts_with(b"PRI ")) {
        return;
    }
    let response = host.refuse(&conn, refusal, host.request_id());
    write::respond(&wire, REFUSED, response).await;
    linger(&wire, &host.enter()).await;
}

/// What came of a request.
enum Exchanged {
    Answered(Sent),
    /// From here on the connection speaks another protocol.
    Switched(Response),
    /// The client left.
    Gone,
}

async fn exchange<S: Stream, H: Host>(
    wire: &Wire<S>,
    host: &H,
    request: Request,
    mut asked: Asked,
    entered: &Entered,
) -> Exchanged {
    // The client left: dropping the unfinished future gives everything back.
    let mut serving = pin!(host.serve(request));
    let needs_client = Cell::new(false);
    let listening = poll_fn(|cx| {
        let (served, said) = serving::listen(|| serving.as_mut().poll(cx));
        needs_client.set(needs_client.get() || said.needs_client);
        if asked.version == Version::HTTP_11 {
            said.interim.iter().for_each(|interim| wire.put_interim(interim));
        }
        // A client that does not take them is noticed when it is to take the answer.
        let _ = wire.poll_interim(cx);
        if entered.phase() == Phase::Arriving && (served.is_ready() || wire.body_is_complete()) {
            entered.begin(Phase::Working);
        }
        served
    });
    let served = until_gone(wire, &needs_client, pin!(listening)).await;
    asked.needs_client = needs_client.get();
    match served {
        None => Exchanged::Gone,
        Some(response) if matches!(response.body, ResponseBody::Tunnel(_)) => Exchanged::Switched(response),
        Some(response) => Exchanged::Answered(write::respond(wire, asked, response).await),
    }
}

/// The next head, `None` where the client (or draining) ended the connection between two requests.
async fn read_head<S: Stream>(
    wire: &Wire<S>,
    entered: &Entered,
    silence: &mut Silence,
    limits: &Limits,
    first: bool,
) -> Result<Option<RequestHead>, Refusal> {
    silence.begin(Duration::from_millis(if first { limits.head_ms } else { limits.keep_alive_ms }));
    if !until_input(wire, entered, silence).await {
        return Ok(None);
    }
    let bounds = HeadLimits { bytes: limits.head_bytes, fields: limits.header_fields };
    let mut scanned = 0;
    if let Some(head) = take_head(wire, &mut scanned, bounds)? {
        return Ok(Some(head));
    }
    entered.begin(Phase::Arriving);
    let mut arrival = Arrival::new(Allowance::of_head(limits));
    loop {
        let filled = poll_fn(|cx| match wire.poll_fill_head(cx) {
            Poll::Pending => arrival.poll_late(cx).map(|()| None),
            Poll::Ready(filled) => Poll::Ready(Some(filled)),
        });
        match filled.await {
            None => return Err(Refusal::RequestTimeout),
            // Half a request is nobody's request: there is no one to answer.
            Some(Ok(0) | Err(_)) => return Ok(None),
            Some(Ok(bytes)) => arrival.received(bytes),
        }
        if let Some(head) = take_head(wire, &mut scanned, bounds)? {
            return Ok(Some(head));
        }
    }
}

/// Waits until there is something to parse. False: the connection ends here.
async fn until_input<S: Stream>(wire: &Wire<S>, entered: &Entered, silence: &mut Silence) -> bool {
    if wire.with_input(|input| !input.is_empty()) {
        return true;
    }
    wire.release_idle();
    entered.begin(Phase::Idle);
    poll_fn(|cx| {
        if entered.is_draining() {
            return Poll::Ready(false);
        }
        match wire.poll_fill_head(cx) {
            Poll::Ready(Ok(0) | Err(_)) => Poll::Ready(false),
            Poll::Ready(Ok(_)) => Poll::Ready(true),
            Poll::Pending => {
                entered.wake_on_drain(cx.waker());
                // Who says nothing is not answered: there was no request.
                silence.poll_over(cx).map(|()| false)
            }
        }
    })
    .await
}

fn take_head<S: Stream>(
    wire: &Wire<S>,
    scanned: &mut usize,
    limits: HeadLimits,
) -> Result<Option<RequestHead>, Refusal> {
    wire.with_input(|input| {
        // One empty line in front is tolerated; `find_end` must not take it for the end of a head.
        if *scanned == 0 && input.starts_with(b"\r\n") {
            let _ = input.split_to(2);
        }
        match head::find_end(input, scanned, limits)? {
            Some(end) => head::parse_request(input, end, limits).map(Some),
            None => Ok(None),
        }
    })
}

fn request<S: Stream>(head: RequestHead, body: Incoming<S>, conn: Rc<ConnInfo>, id: RequestId) -> Request {
    let body = if head.framing == Framing::None { RequestBody::empty() } else { RequestBody::new(body) };
    let head = Box::new(Head {
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
async fn until_gone<S: Stream, T>(
    wire: &Wire<S>,
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

/// Reads over the rest of a body that nobody wanted.
async fn skip_body<S: Stream>(wire: &Rc<Wire<S>>, limits: &Limits) -> Result<(), ()> {
    let mut rest = Box::pin(wire.resume_body(limits));
    while let Some(frame) = poll_fn(|cx| rest.as_mut().poll_frame(cx)).await {
        frame.map_err(|_| ())?;
    }
    Ok(())
}

/// Says goodbye and reads over what still comes, so that the answer is not lost to a reset. Meanwhile the connection gives way
/// to others.
async fn linger<S: Stream>(wire: &Wire<S>, entered: &Entered) {
    entered.begin(Phase::Idle);
    if wire.shutdown().await.is_err() {
        return;
    }
    let mut left = LINGER_BYTES;
    let mut arrival = Arrival::new(Allowance::of_linger(LINGER_FIRST, LINGER_RATE, LINGER_MAX));
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
    // Whether it ends by itself or by the clock, the connection is closed now.
    let _ = timeout(LINGER_MAX, drain).await;
}
