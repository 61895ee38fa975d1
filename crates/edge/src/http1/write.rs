//! Writes one response to an HTTP/1 client: its head, then its body in the way that costs least.
//!
//! Small bodies go with the head in one call, files by `sendfile` on plain TCP, streams as they come. A body that
//! fails midway ends the connection so that nobody takes half for whole: by a close where length or chunks show it, else by a
//! reset. Not here: HTTP/2 (`http2`).

use std::cell::RefCell;
use std::future::poll_fn;
use std::io::{self, IoSlice, Write};
use std::os::fd::AsFd;
use std::pin::Pin;
use std::task::Poll;

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, DATE, HeaderMap, SERVER, TRAILER};
use http::{StatusCode, Version};
use http_body::Body;

use crate::date;
use crate::http1::wire::{Stream, Wire};
use crate::message::{BodyError, Part, Response, ResponseBody};
use crate::pace::{Flow, Slow};
use crate::serving::Interim;

/// Bodies up to this many bytes are copied behind their head and sent with it.
const JOIN_MAX: usize = 16 << 10;

/// Read from a file at once where the kernel cannot send it by itself (TLS).
const FILE_CHUNK: usize = 64 << 10;

/// What the request said that its response depends on.
#[derive(Debug, Clone, Copy)]
pub struct Asked {
    pub version: Version,
    pub is_head: bool,
    pub keep_alive: bool,
    pub trailers: bool,
    /// A program or a server works for it: a client that has finished sending counts as gone.
    pub needs_client: bool,
}

/// What became of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sent {
    /// Bytes of body, framing not counted.
    pub bytes: u64,
    /// To its end, as announced.
    pub complete: bool,
    /// Another request may follow on this connection.
    pub keep_alive: bool,
    /// What was sent shows by itself that it is not all, so the connection may end with a proper close.
    pub is_visibly_short: bool,
}

/// How the end of this body is told to the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    NoBody,
    Length(u64),
    Chunked,
    Close,
}

/// Writes `response` and drops it, with all it holds, when its body has been sent or has failed.
pub async fn respond<S: Stream>(wire: &Wire<S>, asked: Asked, mut response: Response) -> Sent {
    let interim = wire.end_interim().await;
    let ending = ending(asked, &response);
    let keep_alive = asked.keep_alive && ending != Ending::Close && wire.body_is_complete_or_short();
    let mut head = scratch();
    encode_head(&mut head, asked, &response, ending, keep_alive);
    let body = std::mem::replace(&mut response.body, ResponseBody::Empty);
    let body = if ending == Ending::NoBody { ResponseBody::Empty } else { body };
    let mut sent = 0;
    let result = match response.flow.take() {
        _ if interim.is_err() => interim,
        None => send(wire, &mut head, body, ending, asked, &mut sent).await,
        // Boxed, or what only limited bodies need would be part of every response.
        Some(flow) => Box::pin(send_slowly(wire, &mut head, body, ending, asked, flow, &mut sent)).await,
    };
    give_back(head);
    let mut is_visibly_short = false;
    let complete = match result {
        Ok(()) => wire.flush().await.is_ok(),
        Err(error) => {
            // Of a client that left only the connection tells.
            let why = error.get_ref().and_then(|inner| inner.downcast_ref::<BodyError>());
            if let Some((receipt, why)) = response.receipt.as_mut().zip(why) {
                receipt.broke(why);
            }
            // A client that is still there gets what was sent: a reset would destroy what is on its way.
            let is_there = !matches!(why, None | Some(BodyError::ClientGone)) && wire.flush().await.is_ok();
            is_visibly_short = is_there && matches!(ending, Ending::Length(_) | Ending::Chunked);
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
    Sent { bytes: sent, complete, keep_alive: keep_alive && complete, is_visibly_short }
}

fn ending(asked: Asked, response: &Response) -> Ending {
    let bodiless = response.status.is_informational()
        || matches!(response.status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
    if bodiless || asked.is_head {
        return Ending::NoBody;
    }
    match response.body.len() {
        Some(length) => Ending::Length(length),
        None if asked.version == Version::HTTP_11 => Ending::Chunked,
        None => Ending::Close,
    }
}

fn encode_head(out: &mut Vec<u8>, asked: Asked, response: &Response, ending: Ending, keep_alive: bool) {
    out.extend_from_slice(b"HTTP/1.1 ");
    out.extend_from_slice(response.status.as_str().as_bytes());
    out.push(b' ');
    out.extend_from_slice(response.status.canonical_reason().unwrap_or("").as_bytes());
    // An application's own Server and Date are the origin's, and stay (RFC 9110 sections 6.6.1 and 10.2.4).
    if !response.headers.contains_key(SERVER) {
        field(out, b"server", b"nagaya");
    }
    if !response.headers.contains_key(DATE) {
        date::with_now(|date| field(out, b"date", date));
    }
    for (name, value) in response.headers.iter() {
        // Where no trailers can follow none are promised.
        let follows = asked.trailers && ending == Ending::Chunked;
        if *name != CONTENT_LENGTH && (follows || *name != TRAILER) {
            field(out, name.as_str().as_bytes(), value.as_bytes());
        }
    }
    match ending {
        Ending::Length(length) => number_field(out, b"content-length", length),
        Ending::Chunked => field(out, b"transfer-encoding", b"chunked"),
        Ending::NoBody => content_length_without_body(out, asked, response),
        Ending::Close => {}
    }
    if !keep_alive {
        field(out, b"connection", b"close");
    } else if asked.version == Version::HTTP_10 {
        field(out, b"connection", b"keep-alive");
    }
    out.extend_from_slice(b"\r\n\r\n");
}

/// RFC 9110 section 8.6: HEAD and 304 may say how long the body would be; 1xx and 204 must not.
fn content_length_without_body(out: &mut Vec<u8>, asked: Asked, response: &Response) {
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

/// An interim answer, complete.
pub(super) fn encode_interim(out: &mut Vec<u8>, interim: &Interim) {
    out.extend_from_slice(b"HTTP/1.1 ");
    out.extend_from_slice(interim.status.as_str().as_bytes());
    out.push(b' ');
    out.extend_from_slice(interim.status.canonical_reason().unwrap_or("").as_bytes());
    for (name, value) in &interim.headers {
        field(out, name.as_str().as_bytes(), value.as_bytes());
    }
    out.extend_from_slice(b"\r\n\r\n");
}

/// The head of a `101`, after which the connection belongs to another protocol.
pub fn encode_switch(response: &Response) -> Vec<u8> {
    let mut out = Vec::with_capacity(256);
    out.extend_from_slice(b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade");
    for (name, value) in response.headers.iter() {
        field(&mut out, name.as_str().as_bytes(), value.as_bytes());
    }
    out.extend_from_slice(b"\r\n\r\n");
    out
}

async fn send<S: Stream>(
    wire: &Wire<S>,
    head: &mut Vec<u8>,
    body: ResponseBody,
    ending: Ending,
    asked: Asked,
    sent: &mut u64,
) -> io::Result<()> {
    match body {
        ResponseBody::Empty | ResponseBody::Tunnel(_) => wire.write(&mut [IoSlice::new(head)]).await,
        ResponseBody::Bytes(bytes) => {
            *sent = bytes.len() as u64;
            send_bytes(wire, head, &bytes).await
        }
        ResponseBody::File { file, offset, len } => {
            let part = Part::File { file, offset, len };
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

/// Sends a body slice by slice, each when its turn has come.
async fn send_slowly<S: Stream>(
    wire: &Wire<S>,
    head: &mut Vec<u8>,
    body: ResponseBody,
    ending: Ending,
    asked: Asked,
    mut flow: Box<Flow>,
    sent: &mut u64,
) -> io::Result<()> {
    let parts = match body {
        ResponseBody::Bytes(bytes) => vec![Part::Bytes(bytes)],
        ResponseBody::File { file, offset, len } => vec![Part::File { file, offset, len }],
        ResponseBody::Parts(parts) => parts,
        ResponseBody::Stream(body) => {
            let slow = Box::pin(Slow::new(body, flow));
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
async fn turn<S: Stream>(wire: &Wire<S>, flow: &mut Flow, len: u64, needs_client: bool) -> io::Result<()> {
    poll_fn(|cx| {
        if flow.poll_take(cx, len).is_ready() {
            return Poll::Ready(Ok(()));
        }
        match wire.poll_gone(cx, needs_client) {
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            // More may have come, and the end of it is what is waited for.
            Poll::Ready(Ok(())) => {
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

async fn send_bytes<S: Stream>(wire: &Wire<S>, head: &mut Vec<u8>, bytes: &Bytes) -> io::Result<()> {
    if bytes.len() <= JOIN_MAX {
        head.extend_from_slice(bytes);
        wire.write(&mut [IoSlice::new(head)]).await
    } else {
        wire.write(&mut [IoSlice::new(head), IoSlice::new(bytes)]).await
    }
}

async fn send_part<S: Stream>(wire: &Wire<S>, head: &mut Vec<u8>, part: &Part) -> io::Result<()> {
    match part {
        Part::Bytes(bytes) => send_bytes(wire, head, bytes).await,
        Part::File { file, offset, len } if wire.is_plain_tcp() => {
            wire.send_file(head, file.as_fd(), *offset, *len).await
        }
        Part::File { file, offset, len } => {
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

async fn send_stream<S: Stream>(
    wire: &Wire<S>,
    head: &mut Vec<u8>,
    mut body: Pin<Box<dyn Body<Data = Bytes, Error = BodyError>>>,
    ending: Ending,
    asked: Asked,
    sent: &mut u64,
) -> io::Result<()> {
    // The head waits for the first piece of the body only as long as that is there at once.
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
                if matches!(ending, Ending::Length(length) if *sent > length) {
                    return Err(broken("it is longer than announced"));
                }
                send_frame(wire, &mut front, &data, ending).await?;
                front.clear();
            }
            Err(frame) => {
                if let (Ending::Chunked, true, Ok(trailers)) = (ending, asked.trailers, frame.into_trailers())
                {
                    front.extend_from_slice(b"0");
                    encode_trailers(&mut front, &trailers);
                    return wire.write(&mut [IoSlice::new(&front)]).await;
                }
            }
        }
    }
    match ending {
        Ending::Length(length) if *sent != length => {
            // Nothing may stay unsaid: a receipt and the client both learn that this is not all.
            wire.write(&mut [IoSlice::new(&front)]).await?;
            return Err(broken("it is shorter than announced"));
        }
        Ending::Chunked => front.extend_from_slice(b"0\r\n\r\n"),
        _ => {}
    }
    wire.write(&mut [IoSlice::new(&front)]).await
}

/// The fault of a backend that does not keep to the length it announced.
fn broken(what: &str) -> io::Error {
    io::Error::other(BodyError::Backend(what.into()))
}

async fn send_frame<S: Stream>(
    wire: &Wire<S>,
    front: &mut Vec<u8>,
    data: &Bytes,
    ending: Ending,
) -> io::Result<()> {
    if data.is_empty() {
        return Ok(());
    }
    let tail: &[u8] = if ending == Ending::Chunked {
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
        if !crate::http1::framing::is_forbidden_trailer(name) {
            field(out, name.as_str().as_bytes(), value.as_bytes());
        }
    }
    out.extend_from_slice(b"\r\n\r\n");
}

// === scratch buffers ===

/// Buffers kept for heads, per thread, and the largest worth keeping.
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
