//! Parses the head of a program's answer strictly (RFC 3875 section 6). It arrives in pieces of
//! any size.
//!
//! Not here: the body behind it (`answer`), the source of the bytes (`cgi`, `php`).
//!
//! These points are open in the RFC:
//! - A body without `Content-Type` is passed on without one, as Apache does.
//! - `Location: /path` is a local redirect only if it is the sole field. With any other field the
//!   answer is a redirect for the client. So a cookie set along with it is not lost (Apache loses
//!   it).
//! - `Transfer-Encoding` is dropped: the server frames the body, and the output is passed on as
//!   it is.
//! - `Status`, `Content-Type`, `Location` and `Content-Length` may appear twice with the same
//!   value.
//! - Connection fields, `Date` and `Server` belong to the edge and are dropped.
//! - No folded lines, no bare CR.
//! - A program whose name begins with `nph-` (RFC 3875 section 5) prints a status line in front.
//!   It is read like a `Status` field. The edge still frames the answer.

use bytes::{Bytes, BytesMut};
use http::header::{CONNECTION, LOCATION};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

use crate::http::h1::lines::find_empty_line;

/// Maximum length of a head, in bytes, with its empty line.
pub(crate) const HEAD_BYTES_MAX: usize = 64 << 10;

/// Maximum number of fields in one head. A framework sets about 20. Each costs 32 bytes of stack
/// while parsing.
pub(crate) const HEAD_FIELDS_MAX: usize = 128;

/// A program's answer, apart from the body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ScriptHead {
    Document {
        status: StatusCode,
        headers: HeaderMap,
        /// `Content-Length` as the program declared it. It is no longer among the fields.
        length: Option<u64>,
    },
    /// Answer the request again, as if it were for this path.
    LocalRedirect { path: String, query: Option<String> },
}

/// Reason why a head is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum HeadError {
    #[error("it printed nothing")]
    Nothing,
    #[error("it ended within its header")]
    Incomplete,
    #[error("it printed a body without a header before it")]
    Missing,
    #[error("its header is larger than {HEAD_BYTES_MAX} bytes")]
    TooLarge,
    #[error("its header has more than {HEAD_FIELDS_MAX} fields")]
    TooManyFields,
    #[error("its header is malformed: {0}")]
    Malformed(&'static str),
    #[error("its header field {0} occurs twice")]
    Twice(&'static str),
    #[error("its Status is not one from 200 to 599")]
    Status,
    #[error("its Content-Length is not a number")]
    Length,
    #[error("its Location is not a path and query")]
    Location,
}

/// Collects output until the head is complete.
#[derive(Debug, Default)]
pub(crate) struct HeadReader {
    buffer: BytesMut,
    has_status_line: bool,
}

impl HeadReader {
    /// Returns the reader for the program with this file name.
    pub fn of_program(file: &str) -> Self {
        let name = file.rsplit('/').next().unwrap_or(file);
        Self { has_status_line: name.starts_with("nph-"), ..Self::default() }
    }

    /// Takes the next piece of output. Returns the head and the bytes behind it, once the head is
    /// complete.
    pub fn feed(&mut self, piece: Bytes) -> Result<Option<(ScriptHead, Bytes)>, HeadError> {
        if self.buffer.is_empty() {
            // Nearly always the first piece contains the whole head, and nothing is copied.
            if let Some(end) = end_of_head(&piece, 0) {
                return cut(piece, end, self.has_status_line).map(Some);
            }
        }
        // The end may straddle the pieces: "\n" and "\r" of it may have been there already.
        let from = self.buffer.len().saturating_sub(2);
        self.buffer.extend_from_slice(&piece);
        match end_of_head(&self.buffer, from) {
            Some(end) => cut(std::mem::take(&mut self.buffer).freeze(), end, self.has_status_line).map(Some),
            None if self.buffer.len() >= HEAD_BYTES_MAX => Err(HeadError::TooLarge),
            None => Ok(None),
        }
    }

    /// Returns the error for output that ended here.
    pub fn ended(&self) -> HeadError {
        if self.buffer.is_empty() { HeadError::Nothing } else { HeadError::Incomplete }
    }
}

fn cut(mut output: Bytes, end: usize, has_status_line: bool) -> Result<(ScriptHead, Bytes), HeadError> {
    if end > HEAD_BYTES_MAX {
        return Err(HeadError::TooLarge);
    }
    let body = output.split_off(end);
    let status = if has_status_line { take_status_line(&mut output)? } else { None };
    parse(output, status).map(|head| (head, body))
}

/// Returns the end of the head: behind the first empty line. Lines end in LF or CRLF. Searches
/// behind `from`.
fn end_of_head(bytes: &[u8], from: usize) -> Option<usize> {
    if from == 0 {
        match bytes {
            [b'\n', ..] => return Some(1),
            [b'\r', b'\n', ..] => return Some(2),
            _ => {}
        }
    }
    find_empty_line(bytes, from)
}

/// Cuts off `HTTP/1.1 200 OK`. Returns `None` if there is none, and the program answers like any
/// other.
fn take_status_line(head: &mut Bytes) -> Result<Option<StatusCode>, HeadError> {
    if !head.starts_with(b"HTTP/") {
        return Ok(None);
    }
    let end = memchr::memchr(b'\n', head).map_or(head.len(), |at| at + 1);
    let line = head.split_to(end);
    let behind = line.iter().position(|byte| *byte == b' ').map_or(&b""[..], |at| &line[at + 1..]);
    let value = HeaderValue::from_bytes(behind.trim_ascii()).map_err(|_| HeadError::Status)?;
    status(&value).map(Some)
}

fn parse(head: Bytes, status: Option<StatusCode>) -> Result<ScriptHead, HeadError> {
    let mut fields = [httparse::EMPTY_HEADER; HEAD_FIELDS_MAX];
    let fields = match httparse::parse_headers(&head, &mut fields) {
        Ok(httparse::Status::Complete((len, fields))) if len == head.len() => fields,
        Ok(_) => return Err(HeadError::Malformed("a line end within a field")),
        Err(httparse::Error::TooManyHeaders) => return Err(HeadError::TooManyFields),
        Err(httparse::Error::HeaderName) => return Err(HeadError::Malformed("a line that is no field")),
        Err(_) => return Err(HeadError::Malformed("a control character in a field")),
    };
    if fields.is_empty() && status.is_none() {
        return Err(HeadError::Missing);
    }
    let mut draft = HeadDraft { status, ..HeadDraft::default() };
    for field in fields.iter() {
        let name = HeaderName::from_bytes(field.name.as_bytes())
            .map_err(|_| HeadError::Malformed("a field name"))?;
        let value = HeaderValue::from_maybe_shared(head.slice_ref(field.value))
            .map_err(|_| HeadError::Malformed("a field value"))?;
        draft.take(name, value)?;
    }
    draft.finish(fields.len())
}

#[derive(Default)]
struct HeadDraft {
    status: Option<StatusCode>,
    headers: HeaderMap,
    length: Option<u64>,
    /// Field names that `Connection` lists: they are hop-by-hop, too (RFC 9110 section 7.6.1).
    nominated: Vec<HeaderName>,
}

impl HeadDraft {
    fn take(&mut self, name: HeaderName, value: HeaderValue) -> Result<(), HeadError> {
        match name.as_str() {
            "status" => {
                let status = status(&value)?;
                if self.status.replace(status).is_some_and(|before| before != status) {
                    return Err(HeadError::Twice("Status"));
                }
            }
            "content-length" => {
                let length = length(&value)?;
                // Two equal lengths are unambiguous, two different ones never are.
                if self.length.replace(length).is_some_and(|before| before != length) {
                    return Err(HeadError::Twice("Content-Length"));
                }
            }
            "connection" => self.nominate(&value),
            "keep-alive" | "proxy-connection" | "te" | "trailer" | "transfer-encoding" | "upgrade"
            | "date" | "server" => {}
            "content-type" if self.is_other(&name, &value) => return Err(HeadError::Twice("Content-Type")),
            "location" if self.is_other(&name, &value) => return Err(HeadError::Twice("Location")),
            "content-type" | "location" => drop(self.headers.insert(name, value)),
            _ => {
                self.headers.append(name, value);
            }
        }
        Ok(())
    }

    /// Returns whether the field is there already, with another value.
    fn is_other(&self, name: &HeaderName, value: &HeaderValue) -> bool {
        self.headers.get(name).is_some_and(|before| before != value)
    }

    fn nominate(&mut self, value: &HeaderValue) {
        let names = value.as_bytes().split(|&byte| byte == b',').map(<[u8]>::trim_ascii);
        self.nominated.extend(names.filter_map(|name| HeaderName::from_bytes(name).ok()));
    }

    fn finish(mut self, fields: usize) -> Result<ScriptHead, HeadError> {
        for name in &self.nominated {
            if name != CONNECTION {
                self.headers.remove(name);
            }
        }
        if fields == 1
            && let Some(location) = self.headers.get(LOCATION)
            && is_local(location.as_bytes())
        {
            return local_redirect(location);
        }
        let redirect = self.headers.contains_key(LOCATION);
        let default = if redirect { StatusCode::FOUND } else { StatusCode::OK };
        Ok(ScriptHead::Document {
            status: self.status.unwrap_or(default),
            headers: self.headers,
            length: self.length,
        })
    }
}

/// Returns whether it is a path on this server. `//host/path` names another one, and a fragment
/// is only for clients.
fn is_local(location: &[u8]) -> bool {
    location.starts_with(b"/") && !location.starts_with(b"//") && !location.contains(&b'#')
}

fn local_redirect(location: &HeaderValue) -> Result<ScriptHead, HeadError> {
    // As strict as a request line, because it takes the place of one.
    let text = location.to_str().map_err(|_| HeadError::Location)?;
    if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(HeadError::Location);
    }
    let (path, query) = match text.split_once('?') {
        Some((path, query)) => (path, Some(query.to_owned())),
        None => (text, None),
    };
    Ok(ScriptHead::LocalRedirect { path: path.to_owned(), query })
}

/// Parses `404` or `404 Not Found`. The reason is for people and is dropped.
fn status(value: &HeaderValue) -> Result<StatusCode, HeadError> {
    let (digits, rest) = value.as_bytes().split_at_checked(3).ok_or(HeadError::Status)?;
    let status = StatusCode::from_bytes(digits).map_err(|_| HeadError::Status)?;
    let acceptable =
        (200..600).contains(&status.as_u16()) && matches!(rest.first(), None | Some(b' ' | b'\t'));
    if acceptable { Ok(status) } else { Err(HeadError::Status) }
}

fn length(value: &HeaderValue) -> Result<u64, HeadError> {
    let digits = value.to_str().map_err(|_| HeadError::Length)?;
    // `parse` alone would accept a leading plus.
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(HeadError::Length);
    }
    digits.parse().map_err(|_| HeadError::Length)
}

#[cfg(test)]
mod tests;
