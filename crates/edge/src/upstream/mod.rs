//! Requests passed on to an application that speaks HTTP/1.1: one that already runs, or one the keeper keeps.
//!
//! In reading order: this file (the exchange), `transfer` (the bytes of one exchange), `pool` (connections kept
//! for the next). Not here: which headers are added (`forward`), starting applications (`keeper`).

mod pool;
mod transfer;

use std::rc::Rc;
use std::time::Duration;

use bytes::BytesMut;
use http::header::{CONTENT_LENGTH, HeaderValue};
use http::{Method, StatusCode, Version};

pub use pool::{Address, Connector, NoConnection, Pool, Socket, dial, watch_socket};
use transfer::{Broken, Transfer};

use crate::http1::framing::Framing;
use crate::http1::response_head::ResponseHead;
use crate::message::{Head, RequestBody, Response, ResponseBody};
use crate::place::Retries;
use crate::refusal::Refusal;
use crate::serving;

/// A reused connection may turn out to have been closed: one more try, on a fresh one.
const STALE_MAX: u32 = 1;

/// Interim answers (RFC 9110 section 15.2) of one request together, in bytes.
const INTERIM_BYTES_MAX: usize = 64 << 10;

/// Room for what is neither path nor fields: method, version, framing.
const ENCODED_LEN: usize = 96;

/// Bounds of one exchange.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    pub connect: Duration,
    /// Until the head of the answer.
    pub head: Duration,
    /// Longest silence while the answer's body arrives.
    pub idle: Duration,
    pub head_bytes: usize,
}

/// The head as it is sent on.
#[derive(Debug, Clone, Copy)]
pub struct Outgoing<'a> {
    /// Method, target and upgrade are the client's own.
    pub head: &'a Head,
    /// The header section, as `Forwarding::request` writes it.
    pub fields: &'a [u8],
    /// Names of fields behind the body that go on.
    pub trailers: &'a [String],
}

/// An exchange that came to no answer.
#[derive(Debug)]
pub struct Failed {
    pub refusal: Refusal,
    /// The request's body, if the connection failed and the request may be sent again: it was not sent, or its method does
    /// no harm when it is done twice (RFC 9110 section 9.2.2).
    pub again: Option<RequestBody>,
}

impl From<Failed> for Refusal {
    fn from(failed: Failed) -> Self {
        failed.refusal
    }
}

/// Sends the request on and gives its answer back, streaming both ways.
pub async fn exchange(
    pool: &Rc<Pool>,
    address: &Address,
    connector: &impl Connector,
    outgoing: Outgoing<'_>,
    body: RequestBody,
    bounds: Bounds,
    retries: &Retries,
) -> Result<Response, Failed> {
    let head = outgoing.head;
    let framing = framing_of(&body);
    let mut body = body;
    let mut tries = 0;
    loop {
        let (connection, reused) = match pool.checkout(address, connector, bounds.connect, tries > 0).await {
            Ok(connection) => connection,
            Err(failure) => {
                let again = matches!(failure, NoConnection::Refused(_)).then_some(body);
                return Err(Failed { refusal: failure.into(), again });
            }
        };
        let encode = |out: &mut BytesMut| encode(&outgoing, framing, out);
        let seat = connector.seat(address, &connection.socket).await;
        let mut transfer = Transfer::new(connection, encode, body, framing, seat);
        if !outgoing.trailers.is_empty() {
            transfer.allow_trailers(outgoing.trailers);
        }
        match answer(&mut transfer, head, bounds).await {
            Ok(answer) => return Ok(respond(pool, address, transfer, answer, bounds)),
            Err(broken) => {
                // Safe to say again only what has no effect of its own, of which no byte of body is gone, and to which no
                // byte of answer came.
                let safe = transfer.is_unsent() || (head.method.is_idempotent() && transfer.is_untouched());
                if !safe || !matches!(broken, Broken::Connection(_)) {
                    return Err(Failed { refusal: broken.into(), again: None });
                }
                body = transfer.into_body();
                // A connection that has aged may have been closed meanwhile; a new one that breaks says more.
                if !reused || tries >= STALE_MAX || !retries.take() {
                    return Err(Failed { refusal: broken.into(), again: Some(body) });
                }
                tries += 1;
                pool.count_retry();
            }
        }
    }
}

/// The final head; interim ones go to the client.
async fn answer(transfer: &mut Transfer, head: &Head, bounds: Bounds) -> Result<ResponseHead, Broken> {
    loop {
        let answer = transfer.head(head.method == Method::HEAD, bounds.head_bytes, bounds.head).await?;
        match answer.status {
            StatusCode::SWITCHING_PROTOCOLS if is_offered(head.upgrade.as_ref(), answer.upgrade.as_ref()) => {
                return Ok(answer);
            }
            StatusCode::SWITCHING_PROTOCOLS => {
                return Err(Broken::Invalid("it switches to a protocol nobody asked for"));
            }
            status if status.is_informational() => {
                if transfer.heads_len() > INTERIM_BYTES_MAX {
                    return Err(Broken::Invalid("it sends interim answers without end"));
                }
                serving::send_interim(status, answer.headers);
            }
            _ => return Ok(answer),
        }
    }
}

/// Whether all protocols of `taken` are among those of `offered`.
fn is_offered(offered: Option<&HeaderValue>, taken: Option<&HeaderValue>) -> bool {
    let words = |value: &HeaderValue| -> Vec<String> {
        let words = value.to_str().unwrap_or_default().split(',');
        words.map(|word| word.trim().to_ascii_lowercase()).collect()
    };
    let Some((offered, taken)) = offered.map(words).zip(taken.map(words)) else { return false };
    taken.iter().all(|protocol| offered.contains(protocol))
}

fn respond(
    pool: &Rc<Pool>,
    address: &Address,
    mut transfer: Transfer,
    answer: ResponseHead,
    bounds: Bounds,
) -> Response {
    let mut response = Response::new(answer.status);
    response.headers = answer.headers.into();
    if answer.status == StatusCode::SWITCHING_PROTOCOLS {
        if let Some(protocol) = answer.upgrade {
            response.headers.insert(http::header::UPGRADE, protocol);
        }
        return response.with_body(ResponseBody::Tunnel(Box::new(transfer.into_duplex())));
    }
    if answer.framing == Framing::None {
        // What a HEAD or a 304 says of the body it does not send is passed on.
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
    let body = transfer::AnswerBody::new(transfer, Rc::clone(pool), address.clone(), bounds.idle);
    response.with_body(ResponseBody::stream(body))
}

fn framing_of(body: &RequestBody) -> Framing {
    match body.len() {
        _ if body.is_empty() => Framing::None,
        Some(length) => Framing::Length(length),
        None => Framing::Chunked,
    }
}

pub(crate) fn encode(outgoing: &Outgoing<'_>, framing: Framing, out: &mut BytesMut) {
    let Outgoing { head, fields, .. } = *outgoing;
    out.reserve(ENCODED_LEN + head.path.len() + fields.len());
    let mut put = |parts: &[&[u8]]| parts.iter().for_each(|part| out.extend_from_slice(part));
    put(&[head.method.as_str().as_bytes(), b" ", head.path.as_bytes()]);
    if let Some(query) = &head.query {
        put(&[b"?", query.as_bytes()]);
    }
    put(&[b" HTTP/1.1", fields]);
    match framing {
        Framing::Length(length) => {
            put(&[b"\r\ncontent-length: ", itoa::Buffer::new().format(length).as_bytes()]);
        }
        Framing::Chunked => put(&[b"\r\ntransfer-encoding: chunked"]),
        // RFC 9110 section 8.6: a method that usually has a body says that there is none.
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

impl From<Broken> for Refusal {
    fn from(broken: Broken) -> Self {
        match broken {
            Broken::Connection(error) => Self::BackendUnreachable(error.to_string()),
            Broken::Invalid(what) => Self::BackendInvalid(what.into()),
            Broken::Request(error) => error.into(),
            Broken::TimedOut => Self::BackendTimeout,
        }
    }
}

#[cfg(test)]
mod tests;
