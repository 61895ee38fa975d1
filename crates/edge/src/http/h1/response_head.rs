//! Parses heads of backends' responses (RFC 9112 sections 2 to 5).
//!
//! A head in the usual form is parsed directly. Another one is first rewritten in that form, if
//! it has only one reading. `docs/http-readings.md` has the table of forms. Not here: single
//! fields (`fields`), bodies (`framing`).

use bytes::{Bytes, BytesMut};
use http::header::HeaderValue;
use http::{HeaderMap, StatusCode, Version};

use crate::http::h1::fields::HeadFields;
use crate::http::h1::framing::{BodyFraming, HeadSender};
use crate::http::h1::head::{FIELDS_MAX, check_lines};
use crate::http::h1::lines::{find_empty_line, rewrite_lines};

/// A response head from a backend.
#[derive(Debug)]
pub struct ResponseHead {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub framing: BodyFraming,
    /// As announced, also for a response without a body (HEAD, 304).
    pub content_length: Option<u64>,
    pub keep_alive: bool,
    pub upgrade: Option<HeaderValue>,
}

/// Returns the end of the head in `buffer`: behind its first empty line. `scanned` remembers the
/// bytes of earlier calls.
///
/// # Errors
/// Fails if it is longer than `bytes_max`.
pub fn find_end(buffer: &[u8], scanned: &mut usize, bytes_max: usize) -> Result<Option<usize>, &'static str> {
    let from = scanned.saturating_sub(2);
    *scanned = buffer.len();
    match find_empty_line(buffer, from) {
        Some(end) if end > bytes_max => Err("its head is too large"),
        None if buffer.len() >= bytes_max => Err("its head is too large"),
        end => Ok(end),
    }
}

/// Parses the first `end` bytes of `buffer` and removes them. `to_head` is true if the request
/// was HEAD.
///
/// # Errors
/// Fails if it has two readings, or none.
pub fn parse(buffer: &mut BytesMut, end: usize, to_head: bool) -> Result<ResponseHead, &'static str> {
    let bytes = buffer.split_to(end).freeze();
    match check_lines(&bytes).and_then(|()| parse_usual(&bytes, to_head)) {
        Ok(head) => Ok(head),
        // A server with hand-written heads is not trusted with a second response on the
        // connection.
        Err(_) => {
            let head = parse_usual(&rewrite_lines(&bytes, true)?.freeze(), to_head)?;
            Ok(ResponseHead { keep_alive: false, ..head })
        }
    }
}

fn parse_usual(bytes: &Bytes, to_head: bool) -> Result<ResponseHead, &'static str> {
    let mut fields = [const { std::mem::MaybeUninit::uninit() }; FIELDS_MAX];
    let mut parsed = httparse::Response::new(&mut []);
    let config = httparse::ParserConfig::default();
    match config.parse_response_with_uninit_headers(&mut parsed, bytes, &mut fields) {
        Ok(httparse::Status::Complete(_)) => {}
        Ok(httparse::Status::Partial) => return Err("its head ends too early"),
        Err(httparse::Error::TooManyHeaders) => return Err("too many header fields"),
        Err(httparse::Error::HeaderName) => return Err("a header name is not a token"),
        Err(httparse::Error::HeaderValue) => return Err("a header value has a control character"),
        Err(_) => return Err("its head is not HTTP/1"),
    }
    let version = if parsed.version == Some(1) { Version::HTTP_11 } else { Version::HTTP_10 };
    let status = StatusCode::from_u16(parsed.code.unwrap_or_default()).map_err(|_| "no valid status code")?;
    let mut fields = HeadFields::collect(bytes, parsed.headers, HeadSender::Backend)?;
    // RFC 9112 section 6.3: some have no body in any case. Their fields must still not contradict
    // each other.
    let framing = fields.response_framing()?;
    let has_body = !(to_head || status.is_informational() || status == 204 || status == 304);
    let framing = if has_body { framing } else { BodyFraming::None };
    fields.strip_hop_by_hop();
    Ok(ResponseHead {
        status,
        framing,
        content_length: fields.content_length,
        keep_alive: fields.keep_alive(version) && framing != BodyFraming::ToEnd,
        upgrade: fields.upgrade.take(),
        headers: fields.headers,
    })
}

#[cfg(test)]
#[path = "response_head_tests.rs"]
mod tests;
