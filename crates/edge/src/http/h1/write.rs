//! Writes one response to an HTTP/1 client: its head, then its body in the cheapest way.
//!
//! Small bodies go with the head in one call, files by `sendfile` on plain TCP, streams as they
//! come. A body that fails midway ends the connection, so that nobody takes half for whole. A close
//! is enough where length or chunks show it. Otherwise the connection is reset. Not here: HTTP/2
//! (`h2`).

use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::io::{IoSlice, Write};
use std::os::fd::AsFd;
use std::pin::Pin;
use std::task::Poll;

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, DATE, HeaderMap, SERVER, TRAILER};
use http::{StatusCode, Version};
use http_body::Body;

use crate::http::date;
use crate::http::h1::wire::{ClientStream, Http1Wire};
use crate::http::message::{BodyError, BodyPart, Response, ResponseBody};
use crate::http::serving::InterimResponse;
use crate::http::throttle::flow::{BodyPacer, PacedBody};

/// Maximum number of bytes of a body that is copied behind its head and sent with it.
const JOIN_MAX: usize = 16 << 10;

/// Bytes read from a file at once if the kernel cannot send it by itself (TLS).
const FILE_CHUNK: usize = 64 << 10;

/// Properties of the request on which its response depends.
#[derive(Debug, Clone, Copy)]
pub struct ResponseContext {
    pub version: Version,
    pub is_head: bool,
    pub keep_alive: bool,
    pub trailers: bool,
    /// A program or a server works for it. So a client that has finished sending counts as gone.
    pub needs_client: bool,
}

/// Outcome of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SendResult {
    /// Number of body bytes, without framing.
    pub bytes: u64,
    /// The body was sent to its announced end.
    pub complete: bool,
    /// Another request may follow on this connection.
    pub keep_alive: bool,
    /// The client can see that the response is truncated, so the connection may end with a proper
    /// close.
    pub is_visibly_short: bool,
}

/// Marks the end of this body for the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BodyEnding {
    NoBody,
    Length(u64),
    Chunked,
    Close,
}

/// Writes `response`. Drops it with all its guards when its body has been sent or has failed.
pub async fn respond<S: ClientStream>(
    wire: &Http1Wire<S>,
    asked: ResponseContext,
    mut response: Response,
) -> SendResult {
    let interim = wire.end_interim().await;
    let ending = ending(asked, &response);
    let keep_alive = asked.keep_alive && ending != BodyEnding::Close && wire.body_is_complete_or_short();
    let mut head = scratch();
    encode_head(&mut head, asked, &response, ending, keep_alive);
    let body = std::mem::replace(&mut response.body, ResponseBody::Empty);
    let body = if ending == BodyEnding::NoBody { ResponseBody::Empty } else { body };
    let mut sent = 0;
    let result = match response.flow.take() {
        _ if interim.is_err() => interim,
        None => send(wire, &mut head, body, ending, asked, &mut sent).await,
        // Boxed. Otherwise the state for limited bodies would be part of every response.
        Some(flow) => Box::pin(send_slowly(wire, &mut head, body, ending, asked, flow, &mut sent)).await,
    };
    give_back(head);
    let mut is_visibly_short = false;
    let complete = match result {
        Ok(()) => wire.flush().await.is_ok(),
        Err(error) => {
            // If the client left, only the connection reports it.
            let why = error.get_ref().and_then(|inner| inner.downcast_ref::<BodyError>());
            if let Some((receipt, why)) = response.receipt.as_mut().zip(why) {
                receipt.broke(why);
            }
            // A client that is still there gets the sent bytes: a reset would destroy those on
            // their way.
            let is_there = !matches!(why, None | Some(BodyError::ClientGone)) && wire.flush().await.is_ok();
            is_visibly_short = is_there && matches!(ending, BodyEnding::Length(_) | BodyEnding::Chunked);
            if is_there && !is_visibly_short {
                wire.until_taken().await;
            }
            if !is_visibly_short {
                wire.reset_on_close();
            }
            false
        }
    };
    if let Some(receipt) = &mut response.receipt {
        receipt.sent(sent, complete);
    }
    SendResult { bytes: sent, complete, keep_alive: keep_alive && complete, is_visibly_short }
}

fn ending(asked: ResponseContext, response: &Response) -> BodyEnding {
    let bodiless = response.status.is_informational()
        || matches!(response.status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
    if bodiless || asked.is_head {
        return BodyEnding::NoBody;
    }
    match response.body.len() {
        Some(length) => BodyEnding::Length(length),
        None if asked.version == Version::HTTP_11 => BodyEnding::Chunked,
        None => BodyEnding::Close,
    }
}

fn encode_head(
    out: &mut Vec<u8>,
    asked: ResponseContext,
    response: &Response,
    ending: BodyEnding,
    keep_alive: bool,
) {
    out.extend_from_slice(b"HTTP/1.1 ");
    out.extend_from_slice(response.status.as_str().as_bytes());
    out.push(b' ');
    out.extend_from_slice(response.status.canonical_reason().unwrap_or("").as_bytes());
    // An application's own Server and Date are the origin's, and stay (RFC 9110 sections 6.6.1
    // and 10.2.4).
    if !response.headers.contains_key(SERVER) {
        field(out, b"server", b"nagaya");
    }
    if !response.headers.contains_key(DATE) {
        date::with_now(|date| field(out, b"date", date));
    }
    for (name, value) in response.headers.iter() {
        // Trailers are announced only if they can follow.
        let follows = asked.trailers && ending == BodyEnding::Chunked;
        if *name != CONTENT_LENGTH && (follows || *name != TRAILER) {
            field(out, name.as_str().as_bytes(), value.as_bytes());
        }
    }
    match ending {
        BodyEnding::Length(length) => number_field(out, b"content-length", length),
        BodyEnding::Chunked => field(out, b"transfer-encoding", b"chunked"),
        BodyEnding::NoBody => content_length_without_body(out, asked, response),
        BodyEnding::Close => {}
    }
    if !keep_alive {
        field(out, b"connection", b"close");
    } else if asked.version == Version::HTTP_10 {
        field(out, b"connection", b"keep-alive");
    }
    out.extend_from_slice(b"\r\n\r\n");
}

/// Writes the length of a missing body (RFC 9110 section 8.6). HEAD and 304 may have it, 1xx and
/// 204 must not.
fn content_length_without_body(out: &mut Vec<u8>, asked: ResponseContext, response: &Response) {
    if response.status.is_informational() || response.status == StatusCode::NO_CONTENT {
        return;
    }
    if let Some(value) = response.headers.get(CONTENT_LENGTH) {
        field(out, b"content-length", value.as_bytes());
    } else if asked.is_head
        && let Some(length) = response.body.len()
    {
        number_field(out, b"content-length", length);
    }
}

fn field(out: &mut Vec<u8>, name: &[u8], value: &[u8]) {
    out.extend_from_slice(b"\r\n");
    out.extend_from_slice(name);
    out.extend_from_slice(b": ");
    out.extend_from_slice(value);
}

fn number_field(out: &mut Vec<u8>, name: &[u8], number: u64) {
    field(out, name, itoa::Buffer::new().format(number).as_bytes());
}

/// Writes an interim response.
pub(super) fn encode_interim(out: &mut Vec<u8>, interim: &InterimResponse) {
    out.extend_from_slice(b"HTTP/1.1 ");
    out.extend_from_slice(interim.status.as_str().as_bytes());
    out.push(b' ');
    out.extend_from_slice(interim.status.canonical_reason().unwrap_or("").as_bytes());
    for (name, value) in &interim.headers {
        field(out, name.as_str().as_bytes(), value.as_bytes());
    }
    out.extend_from_slice(b"\r\n\r\n");
}

/// Returns the head of a `101`, after which the connection belongs to another protocol.
pub fn encode_switch(response: &Response) -> Vec<u8> {
    let mut out = Vec::with_capacity(256);
    out.extend_from_slice(b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade");
    for (name, value) in response.headers.iter() {
        field(&mut out, name.as_str().as_bytes(), value.as_bytes());
    }
    out.extend_from_slice(b"\r\n\r\n");
    out
}

async fn send<S: ClientStream>(
    wire: &Http1Wire<S>,
    head: &mut Vec<u8>,
    body: ResponseBody,
    ending: BodyEnding,
    asked: ResponseContext,
    sent: &mut u64,
) -> io::Result<()> {
    match body {
        ResponseBody::Empty | ResponseBody::Tunnel(_) => wire.write(&mut [IoSlice::new(head)]).await,
        ResponseBody::Bytes(bytes) => {
            *sent = bytes.len() as u64;
            send_bytes(wire, head, &bytes).await
        }
        ResponseBody::File { file, offset, len } => {
            let part = BodyPart::File { file, offset, len };
            send_part(wire, head, &part).await?;
            *sent = len;
            Ok(())
        }
        ResponseBody::Parts(parts) => {
            let mut front = std::mem::take(head);
            for part in &parts {
                send_part(wire, &mut front, part).await?;
                front.clear();
                *sent += part.len();
            }
            Ok(())
        }
        ResponseBody::Stream(body) => send_stream(wire, head, body, ending, asked, sent).await,
    }
}

/// Sends a body slice by slice, each at its turn.
async fn send_slowly<S: ClientStream>(
    wire: &Http1Wire<S>,
    head: &mut Vec<u8>,
    body: ResponseBody,
    ending: BodyEnding,
    asked: ResponseContext,
    mut flow: Box<BodyPacer>,
    sent: &mut u64,
) -> io::Result<()> {
    let parts = match body {
        ResponseBody::Bytes(bytes) => vec![BodyPart::Bytes(bytes)],
        ResponseBody::File { file, offset, len } => vec![BodyPart::File { file, offset, len }],
        ResponseBody::Parts(parts) => parts,
        ResponseBody::Stream(body) => {
            let slow = Box::pin(PacedBody::new(body, flow));
            return send_stream(wire, head, slow, ending, asked, sent).await;
        }
        other => return send(wire, head, other, ending, asked, sent).await,
    };
    let mut front = std::mem::take(head);
    for mut part in parts {
        while !part.is_empty() {
            let slice = part.split_to(flow.slice());
            turn(wire, &mut flow, slice.len(), asked.needs_client).await?;
            send_part(wire, &mut front, &slice).await?;
            front.clear();
            *sent += slice.len();
        }
    }
    wire.write(&mut [IoSlice::new(&front)]).await
}

/// Waits for the turn of the next slice, unless the client leaves.
async fn turn<S: ClientStream>(
    wire: &Http1Wire<S>,
    flow: &mut BodyPacer,
    len: u64,
    needs_client: bool,
) -> io::Result<()> {
    poll_fn(|cx| {
        if flow.poll_take(cx, len).is_ready() {
            return Poll::Ready(Ok(()));
        }
        match wire.poll_gone(cx, needs_client) {
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            // More may have arrived. The wait is for its end.
            Poll::Ready(Ok(())) => {
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

async fn send_bytes<S: ClientStream>(
    wire: &Http1Wire<S>,
    head: &mut Vec<u8>,
    bytes: &Bytes,
) -> io::Result<()> {
    if bytes.len() <= JOIN_MAX {
        head.extend_from_slice(bytes);
        wire.write(&mut [IoSlice::new(head)]).await
    } else {
        wire.write(&mut [IoSlice::new(head), IoSlice::new(bytes)]).await
    }
}

async fn send_part<S: ClientStream>(
    wire: &Http1Wire<S>,
    head: &mut Vec<u8>,
    part: &BodyPart,
) -> io::Result<()> {
    match part {
        BodyPart::Bytes(bytes) => send_bytes(wire, head, bytes).await,
        BodyPart::File { file, offset, len } if wire.is_plain_tcp() => {
            wire.send_file(head, file.as_fd(), *offset, *len).await
        }
        BodyPart::File { file, offset, len } => {
            wire.write(&mut [IoSlice::new(head)]).await?;
            let (mut offset, end) = (*offset, *offset + *len);
            let mut chunk = vec![0; FILE_CHUNK.min(usize::try_from(*len).unwrap_or(FILE_CHUNK))];
            while offset < end {
                let want = chunk.len().min(usize::try_from(end - offset).unwrap_or(usize::MAX));
                let read = rustix::io::pread(file, &mut chunk[..want], offset)?;
                if read == 0 {
                    return Err(broken("the file became shorter while it was sent"));
                }
                wire.write(&mut [IoSlice::new(&chunk[..read])]).await?;
                offset += read as u64;
            }
            Ok(())
        }
    }
}

async fn send_stream<S: ClientStream>(
    wire: &Http1Wire<S>,
    head: &mut Vec<u8>,
    mut body: Pin<Box<dyn Body<Data = Bytes, Error = BodyError>>>,
    ending: BodyEnding,
    asked: ResponseContext,
    sent: &mut u64,
) -> io::Result<()> {
    // The head waits for the first piece of the body only if that is there at once.
    let mut front = std::mem::take(head);
    loop {
        let next = poll_fn(|cx| match body.as_mut().poll_frame(cx) {
            Poll::Pending if !front.is_empty() => Poll::Ready(None),
            Poll::Pending => match wire.poll_gone(cx, asked.needs_client) {
                Poll::Ready(Err(_)) => Poll::Ready(Some(Some(Err(BodyError::ClientGone)))),
                Poll::Ready(Ok(())) => {
                    cx.waker().wake_by_ref();
                    Poll::Pending
                }
                Poll::Pending => Poll::Pending,
            },
            Poll::Ready(frame) => Poll::Ready(Some(frame)),
        })
        .await;
        let frame = match next {
            None => {
                wire.write(&mut [IoSlice::new(&front)]).await?;
                wire.flush().await?;
                front.clear();
                continue;
            }
            Some(None) => break,
            Some(Some(Ok(frame))) => frame,
            Some(Some(Err(error))) => {
                wire.write(&mut [IoSlice::new(&front)]).await?;
                return Err(io::Error::other(error));
            }
        };
        match frame.into_data() {
            Ok(data) => {
                *sent += data.len() as u64;
                if matches!(ending, BodyEnding::Length(length) if *sent > length) {
                    return Err(broken("it is longer than announced"));
                }
                send_frame(wire, &mut front, &data, ending).await?;
                front.clear();
            }
            Err(frame) => {
                if let (BodyEnding::Chunked, true, Ok(trailers)) =
                    (ending, asked.trailers, frame.into_trailers())
                {
                    front.extend_from_slice(b"0");
                    encode_trailers(&mut front, &trailers);
                    return wire.write(&mut [IoSlice::new(&front)]).await;
                }
            }
        }
    }
    match ending {
        BodyEnding::Length(length) if *sent != length => {
            // The client must get all written bytes, so that it and the receipt both see the
            // truncation.
            wire.write(&mut [IoSlice::new(&front)]).await?;
            return Err(broken("it is shorter than announced"));
        }
        BodyEnding::Chunked => front.extend_from_slice(b"0\r\n\r\n"),
        _ => {}
    }
    wire.write(&mut [IoSlice::new(&front)]).await
}

/// Returns the error of a backend that breaks its announced length.
fn broken(what: &str) -> io::Error {
    io::Error::other(BodyError::Backend(what.into()))
}

async fn send_frame<S: ClientStream>(
    wire: &Http1Wire<S>,
    front: &mut Vec<u8>,
    data: &Bytes,
    ending: BodyEnding,
) -> io::Result<()> {
    if data.is_empty() {
        return Ok(());
    }
    let tail: &[u8] = if ending == BodyEnding::Chunked {
        write!(front, "{:x}\r\n", data.len())?;
        b"\r\n"
    } else {
        b""
    };
    if data.len() <= JOIN_MAX {
        front.extend_from_slice(data);
        front.extend_from_slice(tail);
        wire.write(&mut [IoSlice::new(front)]).await?;
    } else {
        wire.write(&mut [IoSlice::new(front), IoSlice::new(data), IoSlice::new(tail)]).await?;
    }
    wire.flush().await
}

fn encode_trailers(out: &mut Vec<u8>, trailers: &HeaderMap) {
    for (name, value) in trailers {
        if !crate::http::h1::framing::is_forbidden_trailer(name) {
            field(out, name.as_str().as_bytes(), value.as_bytes());
        }
    }
    out.extend_from_slice(b"\r\n\r\n");
}

// === scratch buffers ===

/// Maximum number of head buffers kept per thread, and the maximum size of a kept one.
const SCRATCH_MAX: usize = 64;
const SCRATCH_LEN_MAX: usize = 64 << 10;

thread_local! {
    static SCRATCH: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
}

fn scratch() -> Vec<u8> {
    SCRATCH.with_borrow_mut(Vec::pop).unwrap_or_else(|| Vec::with_capacity(1024))
}

fn give_back(mut buffer: Vec<u8>) {
    buffer.clear();
    if buffer.capacity() > 0 && buffer.capacity() <= SCRATCH_LEN_MAX {
        SCRATCH.with_borrow_mut(|pool| {
            if pool.len() < SCRATCH_MAX {
                pool.push(buffer);
            }
        });
    }
}

#[cfg(test)]
#[path = "write_tests.rs"]
mod tests;
