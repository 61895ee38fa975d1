//! An HTTP/2 client that sends exactly the fields it is given, also those that no library would send.
//!
//! One request on a connection, no Huffman code, no dynamic table. Not here: what honest clients do (curl, nghttp, h2load).

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use crate::wait;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Frame types and flags (RFC 9113 section 6).
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const ACK: u8 = 1;

/// Names and values, in order.
pub type Fields<'a> = &'a [(&'a str, &'a str)];

/// What became of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// The status of the final head, those of the interim ones before it, and the body.
    Response { status: u16, interim: Vec<u16>, body: Vec<u8> },
    /// Its stream was reset with this error code, perhaps after a head with this status.
    Reset { status: Option<u16>, code: u32 },
    /// The connection ended.
    Closed,
}

impl Answer {
    /// The status, if there is one.
    pub fn status(&self) -> Option<u16> {
        match self {
            Self::Response { status, .. } => Some(*status),
            _ => None,
        }
    }
}

/// Sends a request with these fields, pseudo-header fields first. With `body`, trailers follow it.
#[track_caller]
pub fn ask(address: SocketAddr, fields: Fields<'_>, body: Option<(&[u8], Fields<'_>)>) -> Answer {
    let mut stream = TcpStream::connect(address).expect("the node listens");
    stream.set_read_timeout(Some(wait::SOON.saturating_mul(wait::STRETCH_MAX))).expect("an open connection");
    let mut out = PREFACE.to_vec();
    put_frame(&mut out, SETTINGS, 0, 0, &[]);
    let ends = if body.is_none() { END_STREAM } else { 0 };
    put_frame(&mut out, HEADERS, END_HEADERS | ends, 1, &encode(fields));
    if let Some((data, trailers)) = body {
        put_frame(&mut out, DATA, if trailers.is_empty() { END_STREAM } else { 0 }, 1, data);
        if !trailers.is_empty() {
            put_frame(&mut out, HEADERS, END_HEADERS | END_STREAM, 1, &encode(trailers));
        }
    }
    stream.write_all(&out).expect("the node takes a request");
    read_answer(&mut stream)
}

fn read_answer(stream: &mut TcpStream) -> Answer {
    let mut statuses = Vec::new();
    let mut body = Vec::new();
    while let Some((kind, flags, id, payload)) = read_frame(stream) {
        match kind {
            SETTINGS if flags & ACK == 0 => {
                let mut out = Vec::new();
                put_frame(&mut out, SETTINGS, ACK, 0, &[]);
                // It may have closed already.
                let _ = stream.write_all(&out);
            }
            HEADERS if id == 1 => statuses.extend(read_status(&payload)),
            DATA if id == 1 => body.extend(payload),
            RST_STREAM if id == 1 => {
                let code = payload.try_into().map_or(0, u32::from_be_bytes);
                return Answer::Reset { status: statuses.pop(), code };
            }
            GOAWAY => return Answer::Closed,
            _ => {}
        }
        if id == 1 && matches!(kind, HEADERS | DATA) && flags & END_STREAM != 0 {
            let Some(status) = statuses.pop() else { return Answer::Closed };
            return Answer::Response { status, interim: statuses, body };
        }
    }
    Answer::Closed
}

/// Each field as a literal without indexing (RFC 7541 section 6.2.2).
fn encode(fields: Fields<'_>) -> Vec<u8> {
    let mut out = Vec::new();
    for (name, value) in fields {
        out.push(0);
        for text in [name, value] {
            put_length(&mut out, text.len());
            out.extend_from_slice(text.as_bytes());
        }
    }
    out
}

/// An integer with a prefix of 7 bits (RFC 7541 section 5.1).
fn put_length(out: &mut Vec<u8>, length: usize) {
    let Some(mut rest) = length.checked_sub(127) else {
        return out.push(u8::try_from(length).expect("below 127"));
    };
    out.push(127);
    while rest >= 128 {
        out.push(u8::try_from(rest % 128 + 128).expect("a byte"));
        rest /= 128;
    }
    out.push(u8::try_from(rest).expect("below 128"));
}

/// The status in front of a header block: from the static table, or a literal with its name.
fn read_status(block: &[u8]) -> Option<u16> {
    match block {
        [0x88, ..] => Some(200),
        [0x89, ..] => Some(204),
        [0x8a, ..] => Some(206),
        [0x8b, ..] => Some(304),
        [0x8c, ..] => Some(400),
        [0x8d, ..] => Some(404),
        [0x8e, ..] => Some(500),
        [0x08 | 0x48, 3, digits @ ..] => std::str::from_utf8(digits.get(..3)?).ok()?.parse().ok(),
        // Digits in Huffman code: 0 to 2 are 00000 to 00010, 3 to 9 are 011001 to 011111 (RFC 7541 appendix B).
        [0x08 | 0x48, coded, bytes @ ..] if coded & 0x80 != 0 => {
            read_digits(bytes.get(..usize::from(coded & 0x7f))?)
        }
        _ => None,
    }
}

fn read_digits(bytes: &[u8]) -> Option<u16> {
    let mut bits = bytes.iter().flat_map(|byte| (0..8).rev().map(move |at| byte >> at & 1));
    let mut status = 0;
    for _ in 0..3 {
        let mut code = 0;
        for _ in 0..5 {
            code = code << 1 | bits.next()?;
        }
        let digit = if code <= 2 { code } else { (code << 1 | bits.next()?).checked_sub(0b01_1001)? + 3 };
        status = status * 10 + u16::from(digit);
    }
    Some(status)
}

fn put_frame(out: &mut Vec<u8>, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
    let length = u32::try_from(payload.len()).expect("a frame of a test is short");
    out.extend_from_slice(&length.to_be_bytes()[1..]);
    out.extend_from_slice(&[kind, flags]);
    out.extend_from_slice(&stream.to_be_bytes());
    out.extend_from_slice(payload);
}

/// Type, flags, stream and payload. `None` if the connection ends.
fn read_frame(stream: &mut TcpStream) -> Option<(u8, u8, u32, Vec<u8>)> {
    let mut head = [0; 9];
    stream.read_exact(&mut head).ok()?;
    let [a, b, c, kind, flags, w, x, y, z] = head;
    let mut payload = vec![0; usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c)];
    stream.read_exact(&mut payload).ok()?;
    Some((kind, flags, u32::from_be_bytes([w, x, y, z]) & 0x7fff_ffff, payload))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_are_read_in_each_form() {
        // `302` is the example of RFC 7541 appendix C.6.1, `307` that of C.6.2.
        for (block, status) in [
            (&[0x88][..], 200),
            (&[0x48, 3, b'1', b'0', b'3'], 103),
            (&[0x48, 0x82, 0x64, 0x02], 302),
            (&[0x48, 0x83, 0x64, 0x0e, 0xff], 307),
        ] {
            assert_eq!(read_status(block), Some(status), "{block:?}");
        }
    }
}
