//! The first bytes of a FastCGI request, and the records around its body and its response. Pure.
//!
//! The sender may be hostile. Only one form is taken: a begin record of a responder, then
//! parameters, none of which crosses a record. PHP reads that form as this does
//! (`fcgi_read_request` of `main/fastcgi.c`). Not here: which parameters are allowed (`scripts`).

use std::collections::HashMap;

use bytes::{Buf, BytesMut};
use nagaya_keeper_api::fastcgi::{
    BEGIN_REQUEST, HEADER_LEN, PARAMS, REQUEST_ID, ROLE_RESPONDER, STDIN, VERSION,
};

use crate::enclosure::HiddenPath;

/// Maximum length of an opening, in bytes. It is more than the edge accepts of a client's head,
/// with its own additions.
pub const OPENING_MAX: usize = 1 << 20;

/// Position of the flags in an opening: behind the header and the role.
const FLAGS_AT: usize = HEADER_LEN + 2;

/// Length of the content of a begin record.
const BEGIN_LEN: usize = 8;

/// Parameters that decide which file PHP runs, or how. Each may come once.
const WATCHED: [&[u8]; 8] = [
    b"SCRIPT_FILENAME",
    b"PATH_TRANSLATED",
    b"DOCUMENT_ROOT",
    b"REDIRECT_URL",
    b"CONTENT_LENGTH",
    b"PHP_VALUE",
    b"PHP_ADMIN_VALUE",
    b"ORIG_SCRIPT_FILENAME",
];

/// Why a request is not passed on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestViolation {
    #[error("its first record is not the beginning of a responder's request")]
    Beginning,
    #[error("a record of type {0} where none may be")]
    Record(u8),
    #[error("a parameter that does not lie within its record")]
    Parameter,
    #[error("its parameters are longer than {OPENING_MAX} bytes")]
    TooLong,
    #[error("{0} is given twice")]
    Twice(String),
    #[error("{0} may not be given")]
    Refused(String),
    #[error("its script '{0}' is none of the site's")]
    Script(String),
    #[error(transparent)]
    Hidden(#[from] HiddenPath),
    #[error("its body is longer than it says")]
    Body,
}

/// A complete opening.
#[derive(Debug, Default)]
pub struct CheckedOpening {
    pub bytes: BytesMut,
    /// Parameters of `WATCHED` that it has.
    watched: HashMap<&'static [u8], Vec<u8>>,
}

impl CheckedOpening {
    /// Takes one out of the buffer. `None` if more has to arrive first.
    pub fn take(buffer: &mut BytesMut) -> Result<Option<Self>, RequestViolation> {
        let Some((len, watched)) = read_opening(buffer)? else {
            return if buffer.len() > OPENING_MAX { Err(RequestViolation::TooLong) } else { Ok(None) };
        };
        Ok(Some(Self { bytes: buffer.split_to(len), watched }))
    }

    /// Returns one of the watched parameters.
    pub fn param(&self, name: &str) -> Option<&[u8]> {
        self.watched.get(name.as_bytes()).map(Vec::as_slice)
    }

    /// Returns the length of the body in bytes, as PHP will take it. 0 if there is none.
    pub fn body_len(&self) -> Result<u64, RequestViolation> {
        let Some(text) = self.param("CONTENT_LENGTH") else { return Ok(0) };
        let digits = std::str::from_utf8(text).ok().filter(|text| text.bytes().all(|b| b.is_ascii_digit()));
        let refused = || RequestViolation::Refused("such a CONTENT_LENGTH".into());
        digits.and_then(|digits| digits.parse().ok()).ok_or_else(refused)
    }

    /// Makes PHP close the connection after the request: an unread part of a body is then no
    /// request.
    pub fn end_connection(&mut self) {
        self.bytes[FLAGS_AT] = 0;
    }
}

type WatchedParameters = HashMap<&'static [u8], Vec<u8>>;

/// Returns the length of the opening and its watched parameters. `None` if it is not complete.
fn read_opening(bytes: &[u8]) -> Result<Option<(usize, WatchedParameters)>, RequestViolation> {
    let Some((kind, len)) = read_header(bytes)? else { return Ok(None) };
    if kind != BEGIN_REQUEST || len != BEGIN_LEN {
        return Err(RequestViolation::Beginning);
    }
    let mut at = HEADER_LEN + BEGIN_LEN;
    if bytes.len() < at {
        return Ok(None);
    }
    if bytes[HEADER_LEN..FLAGS_AT] != [0, ROLE_RESPONDER] {
        return Err(RequestViolation::Beginning);
    }
    let mut watched = WatchedParameters::new();
    loop {
        let Some((kind, len)) = read_header(&bytes[at..])? else { return Ok(None) };
        if kind != PARAMS {
            return Err(RequestViolation::Record(kind));
        }
        at += HEADER_LEN;
        let Some(content) = bytes.get(at..at + len) else { return Ok(None) };
        at += len;
        if at > OPENING_MAX {
            return Err(RequestViolation::TooLong);
        }
        if len == 0 {
            return Ok(Some((at, watched)));
        }
        read_params(content, &mut watched)?;
    }
}

/// Returns type and content length of the first record. Padding is not accepted, because none is
/// needed.
fn read_header(bytes: &[u8]) -> Result<Option<(u8, usize)>, RequestViolation> {
    let Some(header) = bytes.get(..HEADER_LEN) else { return Ok(None) };
    if header[0] != VERSION || header[2..4] != REQUEST_ID || header[6] != 0 {
        return Err(RequestViolation::Record(header[1]));
    }
    Ok(Some((header[1], usize::from(u16::from_be_bytes([header[4], header[5]])))))
}

fn read_params(mut content: &[u8], watched: &mut WatchedParameters) -> Result<(), RequestViolation> {
    while !content.is_empty() {
        let name_len = take_len(&mut content)?;
        let value_len = take_len(&mut content)?;
        let name = take(&mut content, name_len)?;
        let value = take(&mut content, value_len)?;
        if let Some(known) = WATCHED.iter().find(|known| **known == name)
            && watched.insert(known, value.to_vec()).is_some()
        {
            return Err(RequestViolation::Twice(String::from_utf8_lossy(name).into_owned()));
        }
    }
    Ok(())
}

/// Takes one length: a byte, or four of which the first has its highest bit set (FastCGI 1.0,
/// section 3.4).
fn take_len(content: &mut &[u8]) -> Result<usize, RequestViolation> {
    let first = take(content, 1)?[0];
    if first < 128 {
        return Ok(usize::from(first));
    }
    let rest = take(content, 3)?;
    Ok(u32::from_be_bytes([first & 0x7f, rest[0], rest[1], rest[2]]) as usize)
}

fn take<'c>(content: &mut &'c [u8], len: usize) -> Result<&'c [u8], RequestViolation> {
    let (taken, rest) = content.split_at_checked(len).ok_or(RequestViolation::Parameter)?;
    *content = rest;
    Ok(taken)
}

// === The body ===

/// The records of a body. No others are passed on before the response has ended.
#[derive(Debug)]
pub struct BodyRecords {
    /// Length of content that may still come.
    left: u64,
    /// Rest of the open record.
    open: usize,
}

impl BodyRecords {
    pub fn new(len: u64) -> Self {
        Self { left: len, open: 0 }
    }

    /// Whether all of it has come, and the last record is complete.
    pub fn is_complete(&self) -> bool {
        self.left == 0 && self.open == 0
    }

    /// Moves complete parts from one buffer to the other: records are checked before their first
    /// byte is passed on.
    pub fn pass(&mut self, from: &mut BytesMut, to: &mut BytesMut) -> Result<(), RequestViolation> {
        loop {
            if self.open > 0 {
                let len = self.open.min(from.len());
                if len == 0 {
                    return Ok(());
                }
                to.extend_from_slice(&from.split_to(len));
                self.open -= len;
                continue;
            }
            let Some((kind, len)) = read_header(from)? else { return Ok(()) };
            if kind != STDIN {
                return Err(RequestViolation::Record(kind));
            }
            self.left = self.left.checked_sub(len as u64).ok_or(RequestViolation::Body)?;
            self.open = len;
            to.extend_from_slice(&from.split_to(HEADER_LEN));
        }
    }
}

// === The response ===

/// Finds the end of a response. All bytes of PHP's are passed on unchanged.
#[derive(Debug, Default)]
pub struct AnswerRecords {
    header: [u8; HEADER_LEN],
    header_len: usize,
    /// Rest of the open record: content and padding.
    open: usize,
    is_last: bool,
}

impl AnswerRecords {
    /// Processes the next bytes. Returns the number of bytes behind the end.
    pub fn look(&mut self, mut bytes: &[u8]) -> usize {
        while !self.has_ended() && !bytes.is_empty() {
            if self.header_len < HEADER_LEN {
                let len = (HEADER_LEN - self.header_len).min(bytes.len());
                self.header[self.header_len..self.header_len + len].copy_from_slice(&bytes[..len]);
                self.header_len += len;
                bytes.advance(len);
                if self.header_len == HEADER_LEN {
                    let [_, kind, _, _, high, low, padding, _] = self.header;
                    self.open = usize::from(u16::from_be_bytes([high, low])) + usize::from(padding);
                    self.is_last = kind == nagaya_keeper_api::fastcgi::END_REQUEST;
                }
            } else {
                let len = self.open.min(bytes.len());
                self.open -= len;
                bytes.advance(len);
            }
            if self.header_len == HEADER_LEN && self.open == 0 && !self.is_last {
                self.header_len = 0;
            }
        }
        bytes.len()
    }

    pub fn has_ended(&self) -> bool {
        self.is_last && self.header_len == HEADER_LEN && self.open == 0
    }
}
