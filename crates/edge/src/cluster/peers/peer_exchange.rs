//! Forwards one request to another node and relays its response, streaming both ways.
//!
//! Not here: connections (`pool`), whether the node is there (`probe`), requests that got no answer
//! (`placement`).

use std::cell::{Cell, OnceCell};
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::{Buf, Bytes};
use h2::client::ResponseFuture;
use h2::{Reason, RecvStream, SendStream};
use http::header::{
    CONNECTION, CONTENT_LENGTH, EXPECT, HOST, HeaderName, HeaderValue, TE, TRANSFER_ENCODING, UPGRADE,
};
use http::{HeaderMap, Method, StatusCode};
use http_body::{Body, Frame, SizeHint};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::sleep;

use crate::cluster::peers::pool::StreamSlot;
use crate::cluster::peers::upload::PeerUpload;
use crate::http::message::{BodyError, RequestBody, RequestHead, Response, ResponseBody};
use crate::http::peer_meta::{PeerDenial, PeerRequestMeta};
use crate::http::refusal::Refusal;
use crate::http::{peer_fields, serving};

/// Fields of one connection alone, which are never forwarded.
const HOP_BY_HOP: [HeaderName; 8] = [
    CONNECTION,
    EXPECT,
    HOST,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    TE,
    TRANSFER_ENCODING,
    UPGRADE,
];

/// Outcome of a request at another node.
pub enum PeerOutcome {
    Response {
        response: Response,
        /// Times it spent there.
        stages: Option<Box<str>>,
        lost: LostNode,
    },
    /// The other node did nothing.
    Denied(PeerDenial),
}

/// Reason why its node was lost in the middle of a response, once it was.
#[derive(Debug, Clone, Default)]
pub struct LostNode(Rc<OnceCell<String>>);

impl LostNode {
    pub fn why(&self) -> Option<&str> {
        self.0.get().map(String::as_str)
    }

    fn note(&self, why: &str) {
        // The first reason counts.
        let _ = self.0.set(why.to_owned());
    }
}

/// A request without a response.
#[derive(Debug)]
pub struct BrokenForward {
    pub why: Refusal,
    /// The client caused it, so nobody needs another attempt.
    pub by_client: bool,
}

/// Sends the request and waits for the head of the response. The body is sent while the
/// response's body is read.
///
/// `handed` becomes true when some of it may have reached the other node.
pub async fn send(
    seat: StreamSlot,
    head: &RequestHead,
    carried: &PeerRequestMeta,
    body: RequestBody,
    idle: Duration,
    handed: &Cell<bool>,
) -> Result<PeerOutcome, BrokenForward> {
    let unsent = |error: h2::Error| BrokenForward { why: unreachable(&error), by_client: false };
    let mut sender = match seat.sender().ready().await {
        Ok(sender) => sender,
        Err(error) => {
            seat.spoil();
            return Err(unsent(error));
        }
    };
    let wants_tunnel = head.upgrade.is_some() && body.is_empty();
    let ends = body.is_empty() && !wants_tunnel;
    let request = request(head, carried, &body, wants_tunnel);
    let (answer, stream) = match sender.send_request(request, ends) {
        Ok(sent) => sent,
        Err(error) => {
            seat.spoil();
            return Err(unsent(error));
        }
    };
    drop(sender);
    handed.set(true);
    let mut outgoing = match (ends, wants_tunnel) {
        (true, _) => RequestRemainder::Nothing,
        (false, true) => RequestRemainder::Open(stream),
        (false, false) => RequestRemainder::Body(PeerUpload::new(stream, body)),
    };
    let answer = wait(answer, &mut outgoing, &seat, handed).await?;
    Ok(respond(answer, outgoing, seat, head, idle))
}

/// Returns the request in the form for this connection.
fn request(
    head: &RequestHead,
    carried: &PeerRequestMeta,
    body: &RequestBody,
    wants_tunnel: bool,
) -> http::Request<()> {
    let mut headers = head.headers.clone();
    for name in HOP_BY_HOP {
        headers.remove(name);
    }
    headers.remove(CONTENT_LENGTH);
    if let (false, Some(len)) = (wants_tunnel || body.is_empty(), body.len()) {
        headers.insert(CONTENT_LENGTH, HeaderValue::from(len));
    }
    peer_fields::write(&mut headers, head, carried, Instant::now());
    let uri = peer_fields::target(head, &mut headers);
    let mut request = http::Request::new(());
    *request.method_mut() = head.method.clone();
    *request.uri_mut() = uri;
    *request.headers_mut() = headers;
    request
}

/// The part of the request that is still to be sent.
enum RequestRemainder {
    Nothing,
    Body(PeerUpload),
    /// Kept open for an upgraded connection.
    Open(SendStream<Bytes>),
}

impl RequestRemainder {
    fn poll(&mut self, cx: &mut Context<'_>) -> Result<(), BodyError> {
        if let Self::Body(upload) = self
            && let Poll::Ready(done) = upload.poll(cx)
        {
            *self = Self::Nothing;
            return done;
        }
        Ok(())
    }
}

async fn wait(
    mut answer: ResponseFuture,
    outgoing: &mut RequestRemainder,
    seat: &StreamSlot,
    handed: &Cell<bool>,
) -> Result<http::Response<RecvStream>, BrokenForward> {
    poll_fn(|cx| {
        if let Err(error) = outgoing.poll(cx) {
            return Poll::Ready(Err(BrokenForward { why: error.into(), by_client: true }));
        }
        while let Poll::Ready(Some(Ok(interim))) = answer.poll_informational(cx) {
            let (parts, ()) = interim.into_parts();
            serving::send_interim(parts.status, parts.headers);
        }
        Pin::new(&mut answer).poll(cx).map_err(|error| {
            // A stream that was reset proves nothing about the others.
            if !error.is_reset() {
                seat.spoil();
            }
            if is_untouched(&error) {
                handed.set(false);
            }
            BrokenForward { why: unreachable(&error), by_client: false }
        })
    })
    .await
}

/// Returns whether the other side reports that it has not processed the request (RFC 9113 section
/// 8.7).
fn is_untouched(error: &h2::Error) -> bool {
    let reason = error.reason();
    error.is_remote()
        && (reason == Some(Reason::REFUSED_STREAM) || error.is_go_away() && reason == Some(Reason::NO_ERROR))
}

fn unreachable(error: &h2::Error) -> Refusal {
    Refusal::BackendUnreachable(format!("the node that runs the application: {error}"))
}

fn respond(
    answer: http::Response<RecvStream>,
    outgoing: RequestRemainder,
    seat: StreamSlot,
    head: &RequestHead,
    idle: Duration,
) -> PeerOutcome {
    let (parts, recv) = answer.into_parts();
    let mut headers = parts.headers;
    if let Some(denied) = peer_fields::denied(&headers) {
        return PeerOutcome::Denied(denied);
    }
    let (stages, switched) = (peer_fields::take_served(&mut headers), peer_fields::switched(&headers));
    peer_fields::strip(&mut headers);
    let lost = LostNode::default();
    let response = match (switched, outgoing) {
        (Some(protocol), RequestRemainder::Open(send)) => {
            headers.remove(CONTENT_LENGTH);
            headers.insert(UPGRADE, protocol);
            let mut response = Response::new(StatusCode::SWITCHING_PROTOCOLS);
            response.headers = headers.into();
            response.with_body(ResponseBody::Tunnel(Box::new(PeerChannel {
                recv,
                send,
                read: Bytes::new(),
                silence: None,
                lost: lost.clone(),
                seat,
            })))
        }
        (_, outgoing) => {
            let outgoing = match outgoing {
                // The application did not switch protocols: there is no more to send.
                RequestRemainder::Open(mut send) => {
                    let _ = send.send_data(Bytes::new(), true);
                    RequestRemainder::Nothing
                }
                other => other,
            };
            // The lengths that HEAD and 304 announce without a body are passed on. The wire sets
            // the length of a real body.
            let is_told = head.method == Method::HEAD || parts.status == StatusCode::NOT_MODIFIED;
            let length = if is_told { None } else { take_length(&mut headers) };
            let bodiless = is_told || recv.is_end_stream();
            let mut response = Response::new(parts.status);
            response.headers = headers.into();
            if bodiless {
                response
            } else {
                let body = PeerResponseBody {
                    recv,
                    outgoing,
                    left: length,
                    idle,
                    silence: None,
                    is_over: false,
                    lost: lost.clone(),
                    seat,
                };
                response.with_body(ResponseBody::stream(body))
            }
        }
    };
    PeerOutcome::Response { response, stages, lost }
}

fn take_length(headers: &mut HeaderMap) -> Option<u64> {
    headers.remove(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// The body of a response, while the rest of the request may still be sent. If it is dropped
/// early, the stream is reset.
struct PeerResponseBody {
    recv: RecvStream,
    outgoing: RequestRemainder,
    left: Option<u64>,
    /// Longest silence.
    idle: Duration,
    silence: Option<Pin<Box<dyn Future<Output = BodyError>>>>,
    is_over: bool,
    lost: LostNode,
    seat: StreamSlot,
}

/// Error of a node that was lost while its response paused.
const SILENT: &str = "it was silent for longer than its lease";

impl PeerResponseBody {
    /// Polled when no data is there. Ends when that takes too long, or the node is lost.
    fn poll_silence(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let silence = self.silence.get_or_insert_with(|| {
            let (idle, lost) = (self.idle, self.seat.lost());
            Box::pin(async move {
                tokio::select! {
                    () = sleep(idle) => BodyError::Backend("another node stopped sending its response".into()),
                    () = lost => BodyError::NodeLost(SILENT.into()),
                }
            })
        });
        let error = ready!(silence.as_mut().poll(cx));
        if matches!(error, BodyError::NodeLost(_)) {
            self.seat.spoil();
        }
        Poll::Ready(self.end(error))
    }

    fn end(&mut self, error: BodyError) -> Option<Result<Frame<Bytes>, BodyError>> {
        self.is_over = true;
        if let BodyError::NodeLost(why) = &error {
            self.lost.note(why);
        }
        Some(Err(error))
    }
}

/// Returns the error of a reset stream. It is the application's fault, not the node's.
fn broken(error: h2::Error) -> BodyError {
    let what = error.to_string();
    if error.is_reset() { BodyError::Backend(what) } else { BodyError::NodeLost(what) }
}

impl Body for PeerResponseBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        if this.is_over {
            return Poll::Ready(None);
        }
        if let Err(error) = this.outgoing.poll(cx) {
            this.is_over = true;
            return Poll::Ready(Some(Err(error)));
        }
        match this.recv.poll_data(cx) {
            Poll::Pending => return this.poll_silence(cx),
            Poll::Ready(Some(Ok(data))) => {
                this.silence = None;
                let _ = this.recv.flow_control().release_capacity(data.len());
                this.left = this.left.map(|left| left.saturating_sub(data.len() as u64));
                return Poll::Ready(Some(Ok(Frame::data(data))));
            }
            Poll::Ready(Some(Err(error))) => return Poll::Ready(this.end(broken(error))),
            Poll::Ready(None) => {}
        }
        match this.recv.poll_trailers(cx) {
            Poll::Pending => this.poll_silence(cx),
            Poll::Ready(Ok(trailers)) => {
                this.is_over = true;
                Poll::Ready(trailers.map(|trailers| Ok(Frame::trailers(trailers))))
            }
            Poll::Ready(Err(error)) => Poll::Ready(this.end(broken(error))),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.is_over || self.recv.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.left.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

/// The two directions of an upgraded connection that continues at another node.
struct PeerChannel {
    recv: RecvStream,
    send: SendStream<Bytes>,
    /// Received bytes that were not read yet.
    read: Bytes,
    /// Completes when the node is lost while nothing arrives.
    silence: Option<Pin<Box<dyn Future<Output = ()>>>>,
    lost: LostNode,
    seat: StreamSlot,
}

impl PeerChannel {
    fn poll_silence(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let silence = self.silence.get_or_insert_with(|| Box::pin(self.seat.lost()));
        ready!(silence.as_mut().poll(cx));
        self.seat.spoil();
        self.lost.note(SILENT);
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, SILENT)))
    }
}

/// Number of bytes written at once. Longer data goes in pieces.
const PIECE: usize = 16 << 10;

fn broke(error: h2::Error) -> io::Error {
    if error.is_io() {
        error.into_io().unwrap_or_else(|| io::ErrorKind::BrokenPipe.into())
    } else {
        io::Error::new(io::ErrorKind::BrokenPipe, error)
    }
}

impl AsyncRead for PeerChannel {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        while self.read.is_empty() {
            match self.recv.poll_data(cx) {
                Poll::Pending => return self.poll_silence(cx),
                Poll::Ready(None) => return Poll::Ready(Ok(())),
                Poll::Ready(Some(data)) => self.read = data.map_err(broke)?,
            }
            self.silence = None;
        }
        let len = self.read.len().min(into.remaining());
        into.put_slice(&self.read[..len]);
        self.read.advance(len);
        let _ = self.recv.flow_control().release_capacity(len);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for PeerChannel {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
        if from.is_empty() {
            return Poll::Ready(Ok(0));
        }
        self.send.reserve_capacity(from.len().min(PIECE));
        while self.send.capacity() == 0 {
            match ready!(self.send.poll_capacity(cx)) {
                Some(Ok(_)) => {}
                Some(Err(error)) => return Poll::Ready(Err(broke(error))),
                None => return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
            }
        }
        let len = from.len().min(PIECE).min(self.send.capacity());
        self.send.send_data(Bytes::copy_from_slice(&from[..len]), false).map_err(broke)?;
        Poll::Ready(Ok(len))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        // The other direction may go on.
        let _ = self.send.send_data(Bytes::new(), true);
        Poll::Ready(Ok(()))
    }
}
