//! Heads of backends' answers (RFC 9112 sections 2 to 5).
//!
//! A head in the usual form is parsed as it is. Another one is written in that form first, if it can be read in one way only;
//! `docs/http-readings.md` has the table of forms. Not here: single fields (`fields`), bodies (`framing`).

use bytes::{BufMut, Bytes, BytesMut};
use http::header::HeaderValue;
use http::{HeaderMap, StatusCode, Version};

use crate::http1::fields::{Fields, Peer};
use crate::http1::framing::Framing;
use crate::http1::head::{FIELDS_MAX, check_lines};

/// A response head from a backend.
#[derive(Debug)]
pub struct ResponseHead {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub framing: Framing,
    /// As announced, also where there is no body (HEAD, 304).
    pub content_length: Option<u64>,
    pub keep_alive: bool,
    pub upgrade: Option<HeaderValue>,
}

/// Where the head in `buffer` ends: behind its first empty line. `scanned` remembers what was looked at before.
///
/// # Errors
/// If it is longer than `bytes_max`.
pub fn find_end(buffer: &[u8], scanned: &mut usize, bytes_max: usize) -> Result<Option<usize>, &'static str> {
    let from = scanned.saturating_sub(2);
    *scanned = buffer.len();
    match find_empty_line(buffer, from) {
        Some(end) if end > bytes_max => Err("its head is too large"),
        None if buffer.len() >= bytes_max => Err("its head is too large"),
        end => Ok(end),
    }
}

/// Where the lines end, which end in CR LF or LF: behind the first empty one. Looks at line ends from `from` on; a line in
/// front of it does not count as empty.
pub fn find_empty_line(bytes: &[u8], from: usize) -> Option<usize> {
    memchr::memchr_iter(b'\n', &bytes[from..]).find_map(|at| {
        let behind = from + at + 1;
        match &bytes[behind..] {
            [b'\n', ..] => Some(behind + 1),
            [b'\r', b'\n', ..] => Some(behind + 2),
            _ => None,
        }
    })
}

/// Parses the `end` bytes at the front of `buffer`, which it takes away. `to_head` says that the request was HEAD.
///
/// # Errors
/// If it could be read in two ways, or in none.
pub fn parse(buffer: &mut BytesMut, end: usize, to_head: bool) -> Result<ResponseHead, &'static str> {
    let bytes = buffer.split_to(end).freeze();
    match check_lines(&bytes).and_then(|()| parse_usual(&bytes, to_head)) {
        Ok(head) => Ok(head),
        // A server that writes its heads by hand is not trusted with a second answer on the connection.
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
    let mut fields = Fields::collect(bytes, parsed.headers, Peer::Backend)?;
    // RFC 9112 section 6.3: some have no body whatever the fields say. They must still not contradict each other.
    let framing = fields.response_framing()?;
    let has_body = !(to_head || status.is_informational() || status == 204 || status == 304);
    let framing = if has_body { framing } else { Framing::None };
    fields.strip_hop_by_hop();
    Ok(ResponseHead {
        status,
        framing,
        content_length: fields.content_length,
        keep_alive: fields.keep_alive(version) && framing != Framing::ToEnd,
        upgrade: fields.upgrade.take(),
        headers: fields.headers,
    })
}

/// Writes lines in the usual form: CR LF, no folded lines, no blanks around names. `has_status` says that a status line stands
/// in front of the fields.
pub(super) fn rewrite_lines(section: &[u8], has_status: bool) -> Result<BytesMut, &'static str> {
    let mut out = BytesMut::with_capacity(section.len() + 64);
    let mut fields = 0;
    for (number, line) in section.split(|&byte| byte == b'\n').enumerate() {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if memchr::memchr2(b'\r', 0, line).is_some() {
            return Err("a bare carriage return or a NUL byte");
        }
        if has_status && number == 0 {
            put_status_line(&mut out, line)?;
            continue;
        }
        if line.is_empty() {
            break;
        }
        if is_blank(line[0]) {
            // RFC 9112 section 5.2: a folded line goes on with a space.
            if fields == 0 {
                return Err("a line begins with a blank before the first field");
            }
            out.truncate(out.len() - 2);
            out.put_u8(b' ');
            out.put_slice(trim_blanks(line));
        } else {
            // RFC 9112 section 5.1: a proxy removes blanks between name and colon.
            let (name, value) = line.split_at(memchr::memchr(b':', line).ok_or("a line that is no field")?);
            out.put_slice(trim_blanks(name));
            out.put_slice(value);
            fields += 1;
        }
        out.put_slice(b"\r\n");
    }
    out.put_slice(b"\r\n");
    Ok(out)
}

/// `HTTP/1.x 200 reason`, with one blank in each place and a version that is known.
fn put_status_line(out: &mut BytesMut, line: &[u8]) -> Result<(), &'static str> {
    const NONE: &str = "its head is not HTTP/1";
    let minor = line.strip_prefix(b"HTTP/1.").and_then(|rest| rest.first()).ok_or(NONE)?;
    // RFC 9110 section 2.5: a higher minor version is read as the highest that is known.
    let version: &[u8] = match minor {
        b'0' => b"HTTP/1.0 ",
        b'1'..=b'9' => b"HTTP/1.1 ",
        _ => return Err(NONE),
    };
    let rest = &line[b"HTTP/1.x".len()..];
    if !rest.first().is_some_and(|&byte| is_blank(byte)) {
        return Err(NONE);
    }
    out.put_slice(version);
    out.put_slice(trim_blanks(rest));
    out.put_slice(b"\r\n");
    Ok(())
}

fn is_blank(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t')
}

fn trim_blanks(bytes: &[u8]) -> &[u8] {
    let begin = bytes.iter().position(|&byte| !is_blank(byte)).unwrap_or(bytes.len());
    let end = bytes.iter().rposition(|&byte| !is_blank(byte)).map_or(begin, |last| last + 1);
    &bytes[begin..end]
}

#[cfg(test)]
#[path = "response_head_tests.rs"]
mod tests;
