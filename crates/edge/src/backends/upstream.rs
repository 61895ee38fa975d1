//! Forwards requests to an application that speaks HTTP/1.1: one that already runs, or one that
//! the keeper runs.
//!
//! In reading order: this file (the exchange), `transfer` (the bytes of one exchange), `pool`
//! (connections kept for the next). Not here: added header fields (`proxy_headers`), starting
//! applications (`keeper`).

pub mod pool;
pub mod transfer;

use std::rc::Rc;
use std::time::Duration;

use bytes::BytesMut;
use http::header::{CONTENT_LENGTH, HeaderValue};
use http::{Method, StatusCode, Version};

use crate::backends::upstream::pool::{Connector, NoConnection, UpstreamAddress, UpstreamPool};
use crate::backends::upstream::transfer::{BrokenExchange, UpstreamTransfer};
use crate::cluster::retry_budget::RetryBudget;
use crate::http::h1::framing::BodyFraming;
use crate::http::h1::response_head::ResponseHead;
use crate::http::message::{RequestBody, RequestHead, Response, ResponseBody};
use crate::http::refusal::Refusal;
use crate::http::serving;

/// Maximum number of further attempts on a fresh connection, because a reused one may be closed.
const STALE_MAX: u32 = 1;

/// Maximum size of all interim responses (RFC 9110 section 15.2) of one request together, in
/// bytes.
const INTERIM_BYTES_MAX: usize = 64 << 10;

/// Space for all but path and fields: method, version, framing.
const ENCODED_LEN: usize = 96;

/// Time and size limits of one exchange.
#[derive(Debug, Clone, Copy)]
pub struct ExchangeTimeouts {
    pub connect: Duration,
    /// Until the head of the answer.
    pub head: Duration,
    /// Longest silence while the answer's body arrives.
    pub idle: Duration,
    pub head_bytes: usize,
}

/// The head as it is forwarded.
#[derive(Debug, Clone, Copy)]
pub struct UpstreamHead<'a> {
    /// Method, target and upgrade are the client's own.
    pub head: &'a RequestHead,
    /// The header section, as `Forwarding::request` writes it.
    pub fields: &'a [u8],
    /// Names of trailer fields that are forwarded.
    pub trailers: &'a [String],
}

/// An exchange without an answer.
#[derive(Debug)]
pub struct FailedExchange {
    pub refusal: Refusal,
    /// The request's body, if the connection failed and the request may be sent again. It was not
    /// sent, or its method is idempotent (RFC 9110 section 9.2.2).
    pub again: Option<RequestBody>,
}

impl From<FailedExchange> for Refusal {
    fn from(failed: FailedExchange) -> Self {
        failed.refusal
    }
}

/// Forwards the request and returns its answer, streaming both ways.
pub async fn exchange(
    pool: &Rc<UpstreamPool>,
    address: &UpstreamAddress,
    connector: &impl Connector,
    outgoing: UpstreamHead<'_>,
    body: RequestBody,
    bounds: ExchangeTimeouts,
    retries: &RetryBudget,
) -> Result<Response, FailedExchange> {
    let head = outgoing.head;
    let framing = framing_of(&body);
    let mut body = body;
    let mut tries = 0;
    loop {
        let (connection, reused) = match pool.checkout(address, connector, bounds.connect, tries > 0).await {
            Ok(connection) => connection,
            Err(failure) => {
                let again = matches!(failure, NoConnection::Refused(_)).then_some(body);
                return Err(FailedExchange { refusal: failure.into(), again });
            }
        };
        let encode = |out: &mut BytesMut| encode(&outgoing, framing, out);
        let seat = connector.seat(address, &connection.socket).await;
        let mut transfer = UpstreamTransfer::new(connection, encode, body, framing, seat);
        if !outgoing.trailers.is_empty() {
            transfer.allow_trailers(outgoing.trailers);
        }
        match answer(&mut transfer, head, bounds).await {
            Ok(answer) => return Ok(respond(pool, address, transfer, answer, bounds)),
            Err(broken) => {
                // A repetition is safe if nothing was sent. It is also safe for an idempotent
                // method, if no byte of body or answer has moved.
                let safe = transfer.is_unsent() || (head.method.is_idempotent() && transfer.is_untouched());
                if !safe || !matches!(broken, BrokenExchange::Connection(_)) {
                    return Err(FailedExchange { refusal: broken.into(), again: None });
                }
                body = transfer.into_body();
                // An old connection may have been closed meanwhile. A failure of a new one is a
                // better reason.
                if !reused || tries >= STALE_MAX || !retries.take() {
                    return Err(FailedExchange { refusal: broken.into(), again: Some(body) });
                }
                tries += 1;
                pool.count_retry();
            }
        }
    }
}

/// Returns the final head. Interim ones go to the client.
async fn answer(
    transfer: &mut UpstreamTransfer,
    head: &RequestHead,
    bounds: ExchangeTimeouts,
) -> Result<ResponseHead, BrokenExchange> {
    loop {
        let answer = transfer.head(head.method == Method::HEAD, bounds.head_bytes, bounds.head).await?;
        match answer.status {
            StatusCode::SWITCHING_PROTOCOLS if is_offered(head.upgrade.as_ref(), answer.upgrade.as_ref()) => {
                return Ok(answer);
            }
            StatusCode::SWITCHING_PROTOCOLS => {
                return Err(BrokenExchange::Invalid("it switches to a protocol that was not requested"));
            }
            status if status.is_informational() => {
                if transfer.heads_len() > INTERIM_BYTES_MAX {
                    return Err(BrokenExchange::Invalid("it sends interim answers without end"));
                }
                serving::send_interim(status, answer.headers);
            }
            _ => return Ok(answer),
        }
    }
}

/// Returns whether all protocols of `taken` are among those of `offered`.
fn is_offered(offered: Option<&HeaderValue>, taken: Option<&HeaderValue>) -> bool {
    let words = |value: &HeaderValue| -> Vec<String> {
        let words = value.to_str().unwrap_or_default().split(',');
        words.map(|word| word.trim().to_ascii_lowercase()).collect()
    };
    let Some((offered, taken)) = offered.map(words).zip(taken.map(words)) else { return false };
    taken.iter().all(|protocol| offered.contains(protocol))
}

fn respond(
    pool: &Rc<UpstreamPool>,
    address: &UpstreamAddress,
    mut transfer: UpstreamTransfer,
    answer: ResponseHead,
    bounds: ExchangeTimeouts,
) -> Response {
    let mut response = Response::new(answer.status);
    response.headers = answer.headers.into();
    if answer.status == StatusCode::SWITCHING_PROTOCOLS {
        if let Some(protocol) = answer.upgrade {
            response.headers.insert(http::header::UPGRADE, protocol);
        }
        return response.with_body(ResponseBody::Tunnel(Box::new(transfer.into_duplex())));
    }
    if answer.framing == BodyFraming::None {
        // The length that a HEAD or a 304 announces without a body is passed on.
        if let Some(length) = answer.content_length {
            response.headers.insert(CONTENT_LENGTH, HeaderValue::from(length));
        }
    }
    transfer.begin_answer(answer.framing, answer.keep_alive);
    if let Some(bytes) = transfer.take_whole() {
        // All of it is here: the connection is free before the client has its answer.
        pool.give_back(address, transfer);
        return response.with_body(ResponseBody::Bytes(bytes));
    }
    let body = transfer::UpstreamBody::new(transfer, Rc::clone(pool), address.clone(), bounds.idle);
    response.with_body(ResponseBody::stream(body))
}

fn framing_of(body: &RequestBody) -> BodyFraming {
    match body.len() {
        _ if body.is_empty() => BodyFraming::None,
        Some(length) => BodyFraming::Length(length),
        None => BodyFraming::Chunked,
    }
}

pub(crate) fn encode(outgoing: &UpstreamHead<'_>, framing: BodyFraming, out: &mut BytesMut) {
    let UpstreamHead { head, fields, .. } = *outgoing;
    out.reserve(ENCODED_LEN + head.path.len() + fields.len());
    let mut put = |parts: &[&[u8]]| parts.iter().for_each(|part| out.extend_from_slice(part));
    put(&[head.method.as_str().as_bytes(), b" ", head.path.as_bytes()]);
    if let Some(query) = &head.query {
        put(&[b"?", query.as_bytes()]);
    }
    put(&[b" HTTP/1.1", fields]);
    match framing {
        BodyFraming::Length(length) => {
            put(&[b"\r\ncontent-length: ", itoa::Buffer::new().format(length).as_bytes()]);
        }
        BodyFraming::Chunked => put(&[b"\r\ntransfer-encoding: chunked"]),
        // RFC 9110 section 8.6: a method that usually has a body announces that there is none.
        _ if matches!(head.method, Method::POST | Method::PUT | Method::PATCH) => {
            put(&[b"\r\ncontent-length: 0"]);
        }
        _ => {}
    }
    match &head.upgrade {
        Some(protocol) if head.version == Version::HTTP_11 => {
            put(&[b"\r\nconnection: upgrade\r\nupgrade: ", protocol.as_bytes()]);
        }
        _ => {}
    }
    put(&[b"\r\n\r\n"]);
}

impl From<BrokenExchange> for Refusal {
    fn from(broken: BrokenExchange) -> Self {
        match broken {
            BrokenExchange::Connection(error) => Self::BackendUnreachable(error.to_string()),
            BrokenExchange::Invalid(what) => Self::BackendInvalid(what.into()),
            BrokenExchange::Request(error) => error.into(),
            BrokenExchange::TimedOut => Self::BackendTimeout,
        }
    }
}

#[cfg(test)]
mod tests;
