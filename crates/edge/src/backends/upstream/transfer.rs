//! Moves the bytes of one exchange with an application: the request is sent while the answer
//! arrives.
//!
//! Polling drives both directions. So an application may answer before it has read the request,
//! and no direction can starve the other. Not here: connections between exchanges (`pool`).

use std::future::poll_fn;
use std::io;
use std::io::Write as _;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use http::{HeaderMap, HeaderName};
use http_body::{Body, Frame, SizeHint};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};

use crate::backends::cell_lease::RequestCell;
use crate::backends::upstream::pool::{PooledConnection, UpstreamAddress, UpstreamPool};
use crate::http::h1::framing::{BodyDecoder, BodyFraming, DecodedPart, HeadSender, is_forbidden_trailer};
use crate::http::h1::response_head;
use crate::http::h1::response_head::ResponseHead;
use crate::http::message::{BodyError, RequestBody};
use crate::http::proxy_headers::fields::{FieldFate, fate};
use crate::http::receipt_field::RECEIPT;

/// Number of bytes read from the application at once.
const READ: usize = 64 << 10;
const HEAD_READ: usize = 16 << 10;

/// Maximum number of encoded request bytes that the application has not accepted yet.
const PENDING_MAX: usize = 64 << 10;

/// Reason why an exchange broke before its answer began.
#[derive(Debug)]
pub enum BrokenExchange {
    Connection(io::Error),
    Invalid(&'static str),
    /// The client's part of it failed.
    Request(BodyError),
    TimedOut,
}

pub struct UpstreamTransfer {
    connection: PooledConnection,
    body: RequestBody,
    framing: BodyFraming,
    body_left: bool,
    body_touched: bool,
    /// Trailers that are forwarded.
    trailers: Box<[HeaderName]>,
    /// The application's side has taken some of it.
    written: bool,
    /// Writing failed. The answer may have arrived in spite of that.
    write_failed: bool,
    answer_seen: bool,
    /// The request's own cell. It is left when all of this is dropped.
    seat: Option<RequestCell>,
    scanned: usize,
    /// Length of all heads that arrived, bytes.
    heads_len: usize,
    decoder: BodyDecoder,
    keep_alive: bool,
}

impl UpstreamTransfer {
    /// `encode` writes the request's head.
    pub fn new(
        mut connection: PooledConnection,
        encode: impl FnOnce(&mut BytesMut),
        body: RequestBody,
        framing: BodyFraming,
        seat: Option<RequestCell>,
    ) -> Self {
        encode(&mut connection.output);
        Self {
            connection,
            body,
            framing,
            body_left: framing != BodyFraming::None,
            body_touched: false,
            trailers: Box::default(),
            written: false,
            write_failed: false,
            answer_seen: false,
            seat,
            scanned: 0,
            heads_len: 0,
            decoder: BodyDecoder::new(BodyFraming::None, HeadSender::Backend),
            keep_alive: false,
        }
    }

    /// Forwards these trailer fields (RFC 9110 section 6.5.1). Without this call none are. A
    /// receiver may merge them into the header, so a client could set forbidden fields there.
    pub fn allow_trailers(&mut self, names: &[String]) {
        let names = names.iter().filter_map(|name| HeaderName::from_bytes(name.as_bytes()).ok());
        let is_harmless =
            |name: &HeaderName| !is_forbidden_trailer(name) && fate(name.as_str()) == FieldFate::Kept;
        self.trailers = names.filter(is_harmless).collect();
    }

    /// Returns whether no byte of the body was taken and no byte of an answer arrived.
    pub fn is_untouched(&self) -> bool {
        !self.body_touched && !self.answer_seen
    }

    /// Returns whether nothing of the request was sent.
    pub fn is_unsent(&self) -> bool {
        !self.written && self.is_untouched()
    }

    pub fn into_body(self) -> RequestBody {
        self.body
    }

    /// Sends as much of the request as the application accepts. `Err` is the client's fault.
    fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BodyError>> {
        loop {
            while self.body_left && self.connection.output.len() < PENDING_MAX {
                self.body_touched = true;
                match Pin::new(&mut self.body).poll_frame(cx) {
                    Poll::Pending => break,
                    Poll::Ready(Some(frame)) => self.encode(frame?),
                    Poll::Ready(None) => {
                        self.body_left = false;
                        if self.framing == BodyFraming::Chunked {
                            self.connection.output.extend_from_slice(b"0\r\n\r\n");
                        }
                    }
                }
            }
            if self.write_failed {
                self.connection.output.clear();
            }
            if self.connection.output.is_empty() {
                return if self.body_left && !self.write_failed {
                    Poll::Pending
                } else {
                    Poll::Ready(Ok(()))
                };
            }
            match ready!(Pin::new(&mut self.connection.socket).poll_write(cx, &self.connection.output)) {
                Ok(wrote) if wrote > 0 => {
                    self.written = true;
                    self.connection.output.advance(wrote);
                }
                // The application may have answered and closed. Reading shows it.
                _ => self.write_failed = true,
            }
        }
    }

    fn encode(&mut self, frame: Frame<Bytes>) {
        match frame.into_data() {
            Ok(data) if data.is_empty() => {}
            Ok(data) if self.framing == BodyFraming::Chunked => {
                let mut size = [0; 20];
                let mut rest = size.as_mut_slice();
                write!(rest, "{:x}\r\n", data.len()).expect("a size in hexadecimal and CR LF fit 20 bytes");
                let used = 20 - rest.len();
                self.connection.output.extend_from_slice(&size[..used]);
                self.connection.output.extend_from_slice(&data);
                self.connection.output.extend_from_slice(b"\r\n");
            }
            Ok(data) => self.connection.output.extend_from_slice(&data),
            Err(frame) => {
                if let (BodyFraming::Chunked, Ok(trailers)) = (self.framing, frame.into_trailers()) {
                    self.encode_trailers(&trailers);
                    self.body_left = false;
                }
            }
        }
    }

    fn encode_trailers(&mut self, trailers: &HeaderMap) {
        self.connection.output.extend_from_slice(b"0\r\n");
        for (name, value) in trailers.iter().filter(|(name, _)| self.trailers.contains(name)) {
            self.connection.output.extend_from_slice(name.as_str().as_bytes());
            self.connection.output.extend_from_slice(b": ");
            self.connection.output.extend_from_slice(value.as_bytes());
            self.connection.output.extend_from_slice(b"\r\n");
        }
        self.connection.output.extend_from_slice(b"\r\n");
    }

    fn poll_fill(&mut self, cx: &mut Context<'_>, reserve: usize) -> Poll<io::Result<usize>> {
        self.connection.input.reserve(reserve);
        let read = ready!(pin!(self.connection.socket.read_buf(&mut self.connection.input)).poll(cx));
        if matches!(read, Ok(read) if read > 0) {
            self.answer_seen = true;
        }
        Poll::Ready(read)
    }

    /// Sends the request and reads the next head of its answer.
    pub async fn head(
        &mut self,
        to_head: bool,
        bytes_max: usize,
        patience: Duration,
    ) -> Result<ResponseHead, BrokenExchange> {
        self.connection.silence.begin(patience);
        poll_fn(|cx| {
            loop {
                if let Poll::Ready(Err(error)) = self.poll_send(cx) {
                    return Poll::Ready(Err(BrokenExchange::Request(error)));
                }
                let input = &mut self.connection.input;
                match response_head::find_end(input, &mut self.scanned, bytes_max) {
                    Ok(Some(end)) => {
                        self.scanned = 0;
                        self.heads_len += end;
                        let head = response_head::parse(input, end, to_head);
                        return Poll::Ready(head.map_err(BrokenExchange::Invalid));
                    }
                    Ok(None) => {}
                    Err(what) => return Poll::Ready(Err(BrokenExchange::Invalid(what))),
                }
                let Poll::Ready(read) = self.poll_fill(cx, HEAD_READ) else {
                    return self.connection.silence.poll_over(cx).map(|()| Err(BrokenExchange::TimedOut));
                };
                match read {
                    Ok(0) if self.answer_seen => {
                        return Poll::Ready(Err(BrokenExchange::Invalid(
                            "it closed in the middle of its head",
                        )));
                    }
                    Ok(0) => {
                        let error =
                            io::Error::new(io::ErrorKind::UnexpectedEof, "it closed without an answer");
                        return Poll::Ready(Err(BrokenExchange::Connection(error)));
                    }
                    Ok(_) => {}
                    Err(error) => return Poll::Ready(Err(BrokenExchange::Connection(error))),
                }
            }
        })
        .await
    }

    /// Returns the length of all heads that arrived, with the interim ones.
    pub fn heads_len(&self) -> usize {
        self.heads_len
    }

    pub fn begin_answer(&mut self, framing: BodyFraming, keep_alive: bool) {
        self.decoder = BodyDecoder::new(framing, HeadSender::Backend);
        self.keep_alive = keep_alive;
    }

    /// Returns the answer's body, if all of it has arrived and all of the request was sent.
    pub fn take_whole(&mut self) -> Option<Bytes> {
        let left = self.decoder.remaining()?;
        if left > self.connection.input.len() as u64 || self.body_left || !self.connection.output.is_empty() {
            return None;
        }
        match self.decoder.decode(&mut self.connection.input) {
            Ok(DecodedPart::Data(bytes)) => Some(bytes),
            Ok(DecodedPart::End) => Some(Bytes::new()),
            _ => None,
        }
    }

    /// Returns the connection, if the exchange left it clean.
    pub fn into_reusable(self) -> Option<PooledConnection> {
        let clean = self.keep_alive
            && self.decoder.is_end()
            && !self.body_left
            && !self.write_failed
            && self.connection.output.is_empty()
            && self.connection.input.is_empty();
        clean.then_some(self.connection)
    }

    pub fn take_seat(&mut self) -> Option<RequestCell> {
        self.seat.take()
    }

    pub fn into_duplex(self) -> UpgradedStream {
        UpgradedStream { connection: self.connection, _seat: self.seat }
    }
}

/// The body of an answer, and the rest of the request.
pub struct UpstreamBody {
    transfer: Option<UpstreamTransfer>,
    pool: Rc<UpstreamPool>,
    address: UpstreamAddress,
    idle: Duration,
    waiting: bool,
}

impl UpstreamBody {
    pub fn new(
        transfer: UpstreamTransfer,
        pool: Rc<UpstreamPool>,
        address: UpstreamAddress,
        idle: Duration,
    ) -> Self {
        Self { transfer: Some(transfer), pool, address, idle, waiting: false }
    }

    fn finish(&mut self) {
        if let Some(transfer) = self.transfer.take() {
            self.pool.give_back(&self.address, transfer);
        }
    }

    fn fail(&mut self, error: BodyError) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        self.transfer = None;
        Poll::Ready(Some(Err(error)))
    }
}

impl Body for UpstreamBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        loop {
            let Some(transfer) = &mut this.transfer else { return Poll::Ready(None) };
            if let Poll::Ready(Err(error)) = transfer.poll_send(cx) {
                return this.fail(error);
            }
            match transfer.decoder.decode(&mut transfer.connection.input) {
                Err(what) => return this.fail(BodyError::Backend(what.into())),
                Ok(DecodedPart::Data(data)) => {
                    if transfer.decoder.is_end() {
                        this.finish();
                    }
                    return Poll::Ready(Some(Ok(Frame::data(data))));
                }
                Ok(DecodedPart::Trailers(mut trailers)) => {
                    this.finish();
                    trailers.remove(&RECEIPT);
                    return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
                }
                Ok(DecodedPart::End) => {
                    this.finish();
                    return Poll::Ready(None);
                }
                Ok(DecodedPart::More) => {}
            }
            match transfer.poll_fill(cx, READ) {
                Poll::Ready(Ok(0)) if transfer.decoder.close() => {
                    this.transfer = None;
                    return Poll::Ready(None);
                }
                Poll::Ready(Ok(0)) => {
                    return this.fail(BodyError::Backend("it closed before the end".into()));
                }
                Poll::Ready(Ok(_)) => this.waiting = false,
                Poll::Ready(Err(error)) => return this.fail(BodyError::Backend(error.to_string())),
                Poll::Pending => {
                    if !std::mem::replace(&mut this.waiting, true) {
                        transfer.connection.silence.begin(this.idle);
                    }
                    ready!(transfer.connection.silence.poll_over(cx));
                    return this.fail(BodyError::Backend("it stopped in the middle".into()));
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.transfer.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        let remaining = self.transfer.as_ref().map_or(Some(0), |transfer| transfer.decoder.remaining());
        remaining.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

/// The application's side of an upgraded connection. Bytes that were read before come first.
pub struct UpgradedStream {
    connection: PooledConnection,
    _seat: Option<RequestCell>,
}

impl AsyncRead for UpgradedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let input = &mut self.connection.input;
        if input.is_empty() {
            return Pin::new(&mut self.connection.socket).poll_read(cx, buf);
        }
        let len = input.len().min(buf.remaining());
        buf.put_slice(&input.split_to(len));
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for UpgradedStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.connection.socket).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection.socket).poll_shutdown(cx)
    }
}
