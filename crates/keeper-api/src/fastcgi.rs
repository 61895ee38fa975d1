//! FastCGI records: a web server's messages to a program, and the program's replies.
//!
//! This is own code rather than a crate. `fastcgi-client` 0.12, the maintained one, writes the
//! whole request body before it reads the first byte of the answer. A script that answers while it
//! reads would block both sides for ever. The crate also copies every piece, and cannot say whether
//! the connection is still clean. Only one request at a time is needed, which is a small part of
//! the protocol.
//!
//! Used by the edge, for PHP workers and for instances that speak it, and by the keeper for its own
//! requests to those. Not here: the connection and its life (`edge::programs`, `instances::get`),
//! the meaning of the output.
//!
//! A record is: version, type, request id (2 bytes), content length (2), padding length, reserved;
//! then content and padding.

use bytes::{Buf, Bytes, BytesMut};
use nagaya_records::cell::RequestUsage;

use crate::codec;

pub const VERSION: u8 = 1;
pub const BEGIN_REQUEST: u8 = 1;
pub const END_REQUEST: u8 = 3;
pub const PARAMS: u8 = 4;
pub const STDIN: u8 = 5;
const STDOUT: u8 = 6;
const STDERR: u8 = 7;
pub const ROLE_RESPONDER: u8 = 1;
const KEEP_CONN: u8 = 1;
pub const HEADER_LEN: usize = 8;
const END_REQUEST_LEN: usize = 8;

/// Every connection carries one request at a time, always under this id.
pub const REQUEST_ID: [u8; 2] = [0, 1];

/// Maximum length of one record's content.
pub const CONTENT_MAX: usize = u16::MAX as usize;

// === Sending ===

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a variable is longer than a FastCGI record")]
pub struct ParametersTooLong;

/// The first bytes of a request: its beginning and its parameters.
#[derive(Debug)]
pub struct RequestOpening {
    bytes: Vec<u8>,
    /// Begin of the parameter record that is still open.
    record: usize,
}

/// State of the connection after the end of the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectionReuse {
    /// It carries another request.
    Kept,
    /// The program closes it.
    Closed,
}

impl RequestOpening {
    pub fn new(connection: ConnectionReuse) -> Self {
        let flags = match connection {
            ConnectionReuse::Kept => KEEP_CONN,
            ConnectionReuse::Closed => 0,
        };
        // A usual request has about 1,500 bytes of parameters.
        let mut bytes = Vec::with_capacity(4096);
        bytes.extend_from_slice(&header(BEGIN_REQUEST, 8));
        bytes.extend_from_slice(&[0, ROLE_RESPONDER, flags, 0, 0, 0, 0, 0]);
        let record = bytes.len();
        bytes.extend_from_slice(&header(PARAMS, 0));
        Self { bytes, record }
    }

    /// Adds one parameter. It never crosses a record: the protocol allows that, but PHP parses
    /// record by record.
    pub fn put(&mut self, name: &[u8], value: &[u8]) -> Result<(), ParametersTooLong> {
        let len = len_of_len(name) + len_of_len(value) + name.len() + value.len();
        if len > CONTENT_MAX {
            return Err(ParametersTooLong);
        }
        if self.open_len() + len > CONTENT_MAX {
            self.close_record();
            self.record = self.bytes.len();
            self.bytes.extend_from_slice(&header(PARAMS, 0));
        }
        put_len(&mut self.bytes, name);
        put_len(&mut self.bytes, value);
        self.bytes.extend_from_slice(name);
        self.bytes.extend_from_slice(value);
        Ok(())
    }

    /// Ends the parameters. Returns the bytes to send, after which the body follows, if there is
    /// one.
    ///
    /// The empty record that ends the body (`END_OF_BODY`) is not sent to PHP workers. PHP takes
    /// the length from `CONTENT_LENGTH` and does not read that record, and so it would hide what
    /// matters more: whether the worker has read *everything* it was sent. If so, the connection is
    /// clean; if not when it dies, it had not begun.
    pub fn finish(mut self) -> Vec<u8> {
        if self.open_len() > 0 {
            self.close_record();
            self.bytes.extend_from_slice(&header(PARAMS, 0));
        }
        self.bytes
    }

    fn open_len(&self) -> usize {
        self.bytes.len() - self.record - HEADER_LEN
    }

    fn close_record(&mut self) {
        let len = u16::try_from(self.open_len()).expect("put keeps a record below its longest");
        self.bytes[self.record + 4..self.record + 6].copy_from_slice(&len.to_be_bytes());
    }
}

/// The record that ends a request's body.
pub const END_OF_BODY: [u8; HEADER_LEN] = [VERSION, STDIN, REQUEST_ID[0], REQUEST_ID[1], 0, 0, 0, 0];

/// Protocol status of an end record: the program has not begun with the request (FastCGI 1.0,
/// section 5.5).
pub const OVERLOADED: u8 = 2;

/// An end record with that status.
pub const NOT_BEGUN: [u8; HEADER_LEN + END_REQUEST_LEN] =
    [VERSION, END_REQUEST, REQUEST_ID[0], REQUEST_ID[1], 0, 8, 0, 0, 0, 0, 0, 0, OVERLOADED, 0, 0, 0];

/// Type of the record that follows the end record of a PHP worker's response, from the gate before
/// it. The protocol names types up to 11 (FastCGI 1.0, section 8).
const USAGE: u8 = 128;

/// The use of a request, as the gate before its worker reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UsageReport {
    Known(RequestUsage),
    /// The keeper has to be asked for it (`Verb::Leave`).
    Ask,
}

impl UsageReport {
    /// Builds its record.
    pub fn record(self) -> Vec<u8> {
        let content = match self {
            Self::Known(usage) => postcard::to_stdvec(&usage).expect("numbers are encoded in memory"),
            Self::Ask => Vec::new(),
        };
        let len = u16::try_from(content.len()).expect("a number has at most ten bytes");
        [&header(USAGE, len)[..], &content].concat()
    }

    /// Takes its record out of `buffer`. `None` if more has to arrive first.
    pub fn take(buffer: &mut BytesMut) -> Result<Option<Self>, ProtocolError> {
        let Some(header) = buffer.first_chunk::<HEADER_LEN>() else { return Ok(None) };
        let [_, kind, _, _, high, low, ..] = *header;
        let end = HEADER_LEN + usize::from(u16::from_be_bytes([high, low]));
        if kind != USAGE {
            return Err(ProtocolError::Kind(kind));
        }
        if buffer.len() < end {
            return Ok(None);
        }
        let record = buffer.split_to(end);
        match &record[HEADER_LEN..] {
            [] => Ok(Some(Self::Ask)),
            content => {
                let usage = codec::decode(content).map_err(|_| ProtocolError::Usage)?;
                Ok(Some(Self::Known(usage)))
            }
        }
    }
}

/// Builds a complete response with this output, which is shorter than a record.
pub fn whole_answer(output: &[u8]) -> Vec<u8> {
    let len = u16::try_from(output.len()).expect("shorter than a record");
    let end = [&header(END_REQUEST, 8)[..], &[0; END_REQUEST_LEN]].concat();
    [&header(STDOUT, len)[..], output, &end].concat()
}

/// Returns the header of a record that carries `len` bytes of request body.
pub fn body_header(len: u16) -> [u8; HEADER_LEN] {
    header(STDIN, len)
}

fn header(kind: u8, len: u16) -> [u8; HEADER_LEN] {
    let len = len.to_be_bytes();
    [VERSION, kind, REQUEST_ID[0], REQUEST_ID[1], len[0], len[1], 0, 0]
}

fn len_of_len(text: &[u8]) -> usize {
    if text.len() < 128 { 1 } else { 4 }
}

fn put_len(bytes: &mut Vec<u8>, text: &[u8]) {
    let len = u32::try_from(text.len()).expect("put has checked that it fits a record");
    match u8::try_from(len) {
        Ok(short) if short < 128 => bytes.push(short),
        _ => bytes.extend_from_slice(&(len | 1 << 31).to_be_bytes()),
    }
}

// === Receiving ===

/// A message of a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FastCgiEvent {
    /// A piece of output, perhaps only a part of its record.
    Stdout(Bytes),
    Stderr(Bytes),
    /// The request is done. `app_status` is the exit status of the script.
    End {
        app_status: u32,
    },
}

/// The worker does not speak the protocol. Nothing it sends can be trusted from here on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    #[error("a FastCGI record of version {0}")]
    Version(u8),
    #[error("a FastCGI record of type {0}, which no worker sends")]
    Kind(u8),
    #[error("a FastCGI record for request {0}, which was not asked")]
    RequestId(u16),
    #[error("a FastCGI end record of {0} bytes")]
    EndLength(u16),
    #[error("a record of a request's use that does not decode")]
    Usage,
    #[error("the worker did not take the request (protocol status {0})")]
    Rejected(u8),
}

/// Cuts a worker's bytes into events, without copying.
#[derive(Debug, Default)]
pub struct FastCgiDecoder {
    open: Option<FastCgiRecord>,
}

#[derive(Debug, Clone, Copy)]
struct FastCgiRecord {
    kind: u8,
    content: usize,
    padding: usize,
}

impl FastCgiDecoder {
    /// Takes the next event out of `buffer`. `None` if more has to arrive first. It must not be
    /// called again after `End`: the next byte belongs to another request.
    pub fn next(&mut self, buffer: &mut BytesMut) -> Result<Option<FastCgiEvent>, ProtocolError> {
        loop {
            let record = match &mut self.open {
                Some(record) => record,
                None if buffer.len() < HEADER_LEN => return Ok(None),
                None => self.open.insert(read_header(buffer)?),
            };
            if record.kind == END_REQUEST {
                // The padding of the last record must not remain for the next request.
                if buffer.len() < record.content + record.padding {
                    return Ok(None);
                }
                let mut content = buffer.split_to(record.content + record.padding);
                self.open = None;
                let app_status = content.get_u32();
                return match content.get_u8() {
                    0 => Ok(Some(FastCgiEvent::End { app_status })),
                    status => Err(ProtocolError::Rejected(status)),
                };
            }
            if record.content > 0 {
                if buffer.is_empty() {
                    return Ok(None);
                }
                let piece = buffer.split_to(record.content.min(buffer.len())).freeze();
                record.content -= piece.len();
                let stdout = record.kind == STDOUT;
                return Ok(Some(if stdout {
                    FastCgiEvent::Stdout(piece)
                } else {
                    FastCgiEvent::Stderr(piece)
                }));
            }
            let skipped = record.padding.min(buffer.len());
            buffer.advance(skipped);
            record.padding -= skipped;
            if record.padding > 0 {
                return Ok(None);
            }
            // Also the end of a stream, an empty record: `End` follows anyway and decides.
            self.open = None;
        }
    }
}

fn read_header(buffer: &mut BytesMut) -> Result<FastCgiRecord, ProtocolError> {
    let mut header = buffer.split_to(HEADER_LEN);
    let version = header.get_u8();
    let kind = header.get_u8();
    let id = header.get_u16();
    let content = header.get_u16();
    let padding = header.get_u8();
    if version != VERSION {
        return Err(ProtocolError::Version(version));
    }
    if !matches!(kind, STDOUT | STDERR | END_REQUEST) {
        return Err(ProtocolError::Kind(kind));
    }
    if id != u16::from_be_bytes(REQUEST_ID) {
        return Err(ProtocolError::RequestId(id));
    }
    if kind == END_REQUEST && usize::from(content) != END_REQUEST_LEN {
        return Err(ProtocolError::EndLength(content));
    }
    Ok(FastCgiRecord { kind, content: content.into(), padding: padding.into() })
}

#[cfg(test)]
mod tests;
