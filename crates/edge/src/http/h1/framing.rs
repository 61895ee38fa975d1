//! Finds the end of an HTTP/1 body and decodes its data (RFC 9112 sections 6 and 7).
//!
//! A client's chunks are read strictly. Those of a backend may be sloppy if only one reading
//! remains (`docs/http-readings.md`). Not here: reading from a socket (`connection`, `upstream`),
//! choosing a framing (`head`).

use bytes::{Buf, Bytes, BytesMut};
use http::HeaderMap;
use http::header::{HeaderName, HeaderValue};

use crate::http::h1::lines::{find_empty_line, rewrite_lines};

/// Maximum length of a chunk-size line, extensions included, in bytes. Extensions are skipped and
/// never forwarded.
const CHUNK_LINE_MAX: usize = 256;

/// Maximum length of all chunk extensions of one body together, in bytes. It limits the work a
/// peer can cause without sending data.
const EXTENSIONS_MAX: usize = 16 << 10;

/// Maximum length of the trailer section in bytes, and number of its fields.
const TRAILERS_MAX: usize = 8 << 10;
const TRAILER_FIELDS_MAX: usize = 32;

/// Framing of a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BodyFraming {
    None,
    Length(u64),
    Chunked,
    /// Until the connection ends: responses only.
    ToEnd,
}

#[derive(Debug)]
pub enum DecodedPart {
    Data(Bytes),
    Trailers(HeaderMap),
    /// More bytes are needed from the peer.
    More,
    End,
}

/// Decodes a body from the bytes that were read.
#[derive(Debug)]
pub struct BodyDecoder {
    state: DecoderState,
    peer: HeadSender,
    extension_bytes: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DecoderState {
    Length(u64),
    ChunkSize,
    ChunkData(u64),
    ChunkEnd,
    Trailers,
    ToEnd,
    End,
}

impl BodyDecoder {
    /// Returns the decoder for a body that `peer` sends.
    pub fn new(framing: BodyFraming, peer: HeadSender) -> Self {
        let state = match framing {
            BodyFraming::None | BodyFraming::Length(0) => DecoderState::End,
            BodyFraming::Length(length) => DecoderState::Length(length),
            BodyFraming::Chunked => DecoderState::ChunkSize,
            BodyFraming::ToEnd => DecoderState::ToEnd,
        };
        Self { state, peer, extension_bytes: 0 }
    }

    pub fn is_end(&self) -> bool {
        self.state == DecoderState::End
    }

    /// Returns the number of bytes still to come, if it is known.
    pub fn remaining(&self) -> Option<u64> {
        match self.state {
            DecoderState::End => Some(0),
            DecoderState::Length(left) => Some(left),
            _ => None,
        }
    }

    /// Ends the body, because the peer has closed. Returns true if that is a proper end of it.
    pub fn close(&mut self) -> bool {
        // RFC 9112 section 8: a chunked body is complete once its last chunk has arrived. Its
        // trailers would be dropped.
        let is_whole = self.state == DecoderState::Trailers && self.peer == HeadSender::Backend;
        if self.state == DecoderState::ToEnd || is_whole {
            self.state = DecoderState::End;
        }
        self.is_end()
    }

    /// Decodes the next piece in `buffer`.
    pub fn decode(&mut self, buffer: &mut BytesMut) -> Result<DecodedPart, &'static str> {
        loop {
            match self.state {
                DecoderState::End => return Ok(DecodedPart::End),
                DecoderState::ToEnd if buffer.is_empty() => return Ok(DecodedPart::More),
                DecoderState::ToEnd => return Ok(DecodedPart::Data(buffer.split().freeze())),
                DecoderState::Length(left) => {
                    let Some((data, left)) = take(buffer, left) else { return Ok(DecodedPart::More) };
                    self.state = if left == 0 { DecoderState::End } else { DecoderState::Length(left) };
                    return Ok(DecodedPart::Data(data));
                }
                DecoderState::ChunkData(left) => {
                    let Some((data, left)) = take(buffer, left) else { return Ok(DecodedPart::More) };
                    self.state =
                        if left == 0 { DecoderState::ChunkEnd } else { DecoderState::ChunkData(left) };
                    return Ok(DecodedPart::Data(data));
                }
                DecoderState::ChunkEnd => match buffer.as_ref() {
                    [b'\r', b'\n', ..] => {
                        buffer.advance(2);
                        self.state = DecoderState::ChunkSize;
                    }
                    [b'\n', ..] if self.peer == HeadSender::Backend => {
                        buffer.advance(1);
                        self.state = DecoderState::ChunkSize;
                    }
                    [] | [b'\r'] => return Ok(DecodedPart::More),
                    _ => return Err("a chunk is longer than its size says"),
                },
                DecoderState::ChunkSize => match self.chunk_size(buffer)? {
                    None => return Ok(DecodedPart::More),
                    Some(0) => self.state = DecoderState::Trailers,
                    Some(size) => self.state = DecoderState::ChunkData(size),
                },
                DecoderState::Trailers => return self.trailers(buffer),
            }
        }
    }

    fn chunk_size(&mut self, buffer: &mut BytesMut) -> Result<Option<u64>, &'static str> {
        let window = &buffer[..buffer.len().min(CHUNK_LINE_MAX)];
        let Some(at) = memchr::memchr(b'\n', window) else {
            return if buffer.len() >= CHUNK_LINE_MAX {
                Err("a chunk size line is too long")
            } else {
                Ok(None)
            };
        };
        let line = match (window[..at].strip_suffix(b"\r"), self.peer) {
            (Some(line), _) => line,
            (None, HeadSender::Backend) => &window[..at],
            (None, HeadSender::Client) => return Err("a chunk size line ends in a bare line feed"),
        };
        let line = match self.peer {
            HeadSender::Client => line,
            HeadSender::Backend => skip_zeros(line),
        };
        let digits = line.iter().take_while(|b| b.is_ascii_hexdigit()).count();
        if !(1..=15).contains(&digits) {
            return Err("a chunk size is not a hexadecimal number");
        }
        let size = line[..digits].iter().fold(0u64, |sum, &digit| {
            sum * 16 + u64::from((digit as char).to_digit(16).expect("counted as a hexadecimal digit"))
        });
        let extension = &line[digits..];
        if extension.iter().any(|&b| b == b'\r' || b == 0) {
            return Err("a chunk size line has a bare carriage return or a NUL byte");
        }
        // RFC 9112 section 7.1.1: whitespace may precede an extension. A backend may pad the size
        // with it.
        match extension.iter().find(|&&b| !matches!(b, b' ' | b'\t')) {
            None if extension.is_empty() || self.peer == HeadSender::Backend => {}
            Some(b';') => {}
            _ => return Err("a chunk size line has something behind the size"),
        }
        self.extension_bytes += extension.len();
        if self.extension_bytes > EXTENSIONS_MAX {
            return Err("too many chunk extensions");
        }
        buffer.advance(at + 1);
        Ok(Some(size))
    }

    fn trailers(&mut self, buffer: &mut BytesMut) -> Result<DecodedPart, &'static str> {
        let Some(end) = self.trailers_end(buffer) else {
            return if buffer.len() > TRAILERS_MAX {
                Err("the trailers are too large")
            } else {
                Ok(DecodedPart::More)
            };
        };
        let section = buffer.split_to(end).freeze();
        if section.len() > TRAILERS_MAX {
            return Err("the trailers are too large");
        }
        self.state = DecoderState::End;
        let trailers = match self.peer {
            HeadSender::Client => parse_trailers(&section)?,
            // The body is complete: unreadable trailers do not change that.
            HeadSender::Backend => parse_trailers(&section)
                .or_else(|_| parse_trailers(&rewrite_lines(&section, false)?))
                .unwrap_or_default(),
        };
        Ok(if trailers.is_empty() { DecodedPart::End } else { DecodedPart::Trailers(trailers) })
    }

    /// Returns the end of the section, including the empty line.
    fn trailers_end(&self, buffer: &[u8]) -> Option<usize> {
        match (buffer, self.peer) {
            ([b'\r', b'\n', ..], _) => Some(2),
            ([b'\n', ..], HeadSender::Backend) => Some(1),
            (_, HeadSender::Backend) => find_empty_line(buffer, 0),
            (_, HeadSender::Client) => memchr::memmem::find(buffer, b"\r\n\r\n").map(|at| at + 4),
        }
    }
}

/// Returns the fields of a trailer section. Forbidden ones are dropped (RFC 9110 section 6.5.1).
fn parse_trailers(section: &[u8]) -> Result<HeaderMap, &'static str> {
    if section == b"\r\n" {
        return Ok(HeaderMap::new());
    }
    let pairs = memchr::memmem::find_iter(section, b"\r\n").count();
    if memchr::memchr_iter(b'\n', section).count() != pairs
        || memchr::memchr_iter(b'\r', section).count() != pairs
    {
        return Err("a trailer line ends in a bare line feed");
    }
    let mut fields = [httparse::EMPTY_HEADER; TRAILER_FIELDS_MAX];
    let Ok(httparse::Status::Complete((_, fields))) = httparse::parse_headers(section, &mut fields) else {
        return Err("the trailers are not header fields");
    };
    let mut trailers = HeaderMap::with_capacity(fields.len());
    for field in fields.iter() {
        let name =
            HeaderName::from_bytes(field.name.as_bytes()).map_err(|_| "a trailer name is not a token")?;
        let value =
            HeaderValue::from_bytes(field.value).map_err(|_| "a trailer value has a control character")?;
        if !is_forbidden_trailer(&name) {
            trailers.append(name, value);
        }
    }
    Ok(trailers)
}

/// Removes leading zeros, but not the last digit.
fn skip_zeros(line: &[u8]) -> &[u8] {
    let zeros = line.iter().take_while(|&&byte| byte == b'0').count();
    let has_more = line.get(zeros).is_some_and(u8::is_ascii_hexdigit);
    &line[if has_more { zeros } else { zeros.saturating_sub(1) }..]
}

/// Returns whether it is a field for framing, routing, authentication or request modifiers (RFC
/// 9110 section 6.5.1).
pub fn is_forbidden_trailer(name: &HeaderName) -> bool {
    use http::header as h;
    [
        h::CONTENT_LENGTH,
        h::TRANSFER_ENCODING,
        h::HOST,
        h::CONNECTION,
        h::TRAILER,
        h::TE,
        h::UPGRADE,
        h::AUTHORIZATION,
        h::COOKIE,
        h::SET_COOKIE,
        h::CONTENT_TYPE,
        h::CONTENT_ENCODING,
        h::CONTENT_RANGE,
        h::EXPECT,
        h::RANGE,
    ]
    .contains(name)
}

fn take(buffer: &mut BytesMut, left: u64) -> Option<(Bytes, u64)> {
    if buffer.is_empty() {
        return None;
    }
    let len = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
    Some((buffer.split_to(len).freeze(), left - len as u64))
}

/// The sender of the head.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum HeadSender {
    #[default]
    Client,
    Backend,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Decodes `wire` fed in pieces of `step` bytes: the data, the trailers' count, what was left over.
    fn run(framing: BodyFraming, wire: &[u8], step: usize) -> Result<(Vec<u8>, usize, usize), &'static str> {
        read(HeadSender::Client, framing, wire, step)
    }

    fn read(
        peer: HeadSender,
        framing: BodyFraming,
        wire: &[u8],
        step: usize,
    ) -> Result<(Vec<u8>, usize, usize), &'static str> {
        let mut decoder = BodyDecoder::new(framing, peer);
        let (mut data, mut trailers) = (Vec::new(), 0);
        let mut buffer = BytesMut::new();
        let mut pieces = wire.chunks(step.max(1));
        loop {
            match decoder.decode(&mut buffer)? {
                DecodedPart::Data(bytes) => data.extend_from_slice(&bytes),
                DecodedPart::Trailers(map) => trailers = map.len(),
                DecodedPart::End => {
                    return Ok((data, trailers, buffer.len() + pieces.map(<[u8]>::len).sum::<usize>()));
                }
                DecodedPart::More => match pieces.next() {
                    Some(piece) => buffer.extend_from_slice(piece),
                    None if decoder.close() => return Ok((data, trailers, 0)),
                    None => return Err("cut off"),
                },
            }
        }
    }

    #[test]
    fn bodies_end_where_their_framing_says() {
        let chunked = b"3\r\nabc\r\nA;x=y\r\n0123456789\r\n0\r\nX-T: 1\r\n\r\nNEXT";
        for step in 1..chunked.len() {
            assert_eq!(
                run(BodyFraming::Chunked, chunked, step),
                Ok((b"abc0123456789".to_vec(), 1, 4)),
                "{step}"
            );
        }
        assert_eq!(run(BodyFraming::Length(3), b"abcNEXT", 2), Ok((b"abc".to_vec(), 0, 4)));
        assert_eq!(run(BodyFraming::ToEnd, b"abc", 1), Ok((b"abc".to_vec(), 0, 0)));
        assert_eq!(run(BodyFraming::None, b"NEXT", 4), Ok((vec![], 0, 4)));
        assert_eq!(run(BodyFraming::Length(5), b"abc", 4), Err("cut off"));
    }

    #[test]
    fn chunks_that_parsers_read_differently_are_refused() {
        let bad: [&[u8]; 15] = [
            b"\r\n",
            b" 3\r\nabc\r\n0\r\n\r\n",
            b"3 \r\nabc\r\n0\r\n\r\n",
            b"0x3\r\nabc\r\n0\r\n\r\n",
            b"+3\r\nabc\r\n0\r\n\r\n",
            b"-3\r\nabc\r\n0\r\n\r\n",
            b"3\nabc\r\n0\r\n\r\n",
            b"3\r\nabcd\r\n0\r\n\r\n",
            b"3\r\nabc\n0\r\n\r\n",
            b"3 a;b\r\nabc\r\n0\r\n\r\n",
            b"3\x0b;b\r\nabc\r\n0\r\n\r\n",
            b"3\r\nabc\r\n0\r\nX y: 3\r\n\r\n",
            b"3\r\nabc\r\n0\r\nX: a\nY: b\r\n\r\n",
            b"ffffffffffffffff\r\nabc\r\n0\r\n\r\n",
            b"3\r;\r\nabc\r\n0\r\n\r\n",
        ];
        for wire in bad {
            assert!(run(BodyFraming::Chunked, wire, 64).is_err(), "{}", String::from_utf8_lossy(wire));
        }
    }

    #[test]
    fn trailers_that_must_not_be_there_are_dropped() {
        for peer in [HeadSender::Client, HeadSender::Backend] {
            for (fields, kept) in [
                ("Content-Length: 3\r\n", 0),
                ("Transfer-Encoding: chunked\r\nX: 1\r\n", 1),
                ("Content-Type: text/plain\r\nSet-Cookie: a=b\r\nX: 1\r\nX: 2\r\n", 2),
            ] {
                let wire = format!("3\r\nabc\r\n0\r\n{fields}\r\nNEXT");
                for step in [1, 7, 200] {
                    let whole = read(peer, BodyFraming::Chunked, wire.as_bytes(), step);
                    assert_eq!(whole, Ok((b"abc".to_vec(), kept, 4)), "{peer:?} {fields}");
                }
            }
        }
    }

    #[test]
    fn sloppy_chunks_of_backends_have_one_reading() {
        let spelled: [(&[u8], usize); 12] = [
            (b"3  \r\nabc\r\n0\r\n\r\n", 0),
            (b"3\t;x=y\r\nabc\r\n0 \r\n\r\n", 0),
            (b"00000000000000000003\r\nabc\r\n000\r\n\r\n", 0),
            (b"3\nabc\n0\n\n", 0),
            (b"3\r\nabc\n0\r\n\n", 0),
            (b"3\r\nabc\r\n0\r\nX: 1\nY: 2\n\n", 2),
            (b"3\r\nabc\r\n0\r\nX : 1\r\n\r\n", 1),
            (b"3\r\nabc\r\n0\r\nX: 1\r\n 2\r\n\r\n", 1),
            (b"3\r\nabc\r\n0\r\nno field\r\n\r\n", 0),
            (b"3\r\nabc\r\n0\r\n", 0),
            (b"3\r\nabc\r\n0\r\nX: 1\r\n", 0),
            (b"0003;a=\"b\"\r\nabc\r\n0;c\r\n\r\n", 0),
        ];
        for (wire, trailers) in spelled {
            for step in 1..wire.len() {
                let whole = read(HeadSender::Backend, BodyFraming::Chunked, wire, step);
                assert_eq!(whole, Ok((b"abc".to_vec(), trailers, 0)), "{} by {step}", wire.escape_ascii());
            }
        }
        let bad: [&[u8]; 10] = [
            b" 3\r\nabc\r\n0\r\n\r\n",
            b"3 4\r\nabc\r\n0\r\n\r\n",
            b"0x3\r\nabc\r\n0\r\n\r\n",
            b"-3\r\nabc\r\n0\r\n\r\n",
            b"3\r\r\nabc\r\n0\r\n\r\n",
            b"3\r\nabcd\r\n0\r\n\r\n",
            b"3\r\nabc\r0\r\n\r\n",
            b"3\r\nabc\r\n",
            b"3\r\nabc\r\n0",
            b"ffffffffffffffff\r\nabc\r\n0\r\n\r\n",
        ];
        for wire in bad {
            let read = read(HeadSender::Backend, BodyFraming::Chunked, wire, 64);
            assert!(read.is_err(), "{}: {read:?}", wire.escape_ascii());
        }
    }

    #[test]
    fn endless_lines_and_extensions_are_bounded() {
        let long = [b"3;".as_slice(), &[b'x'; 300]].concat();
        assert!(run(BodyFraming::Chunked, &long, 1).is_err());
        let many = b"1;xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\r\na\r\n".repeat(400);
        assert_eq!(run(BodyFraming::Chunked, &many, 4096), Err("too many chunk extensions"));
        // Blanks in front of an extension count with it.
        for wire in [&b"3 ;a=b\r\nabc\r\n0\r\n\r\n"[..], b"3\t \t;a\r\nabc\r\n0\r\n\r\n"] {
            assert_eq!(run(BodyFraming::Chunked, wire, 1), Ok((b"abc".to_vec(), 0, 0)));
        }
        let trailers = [b"0\r\n".as_slice(), &b"X: yyyyyyyyyyyyyyyy\r\n".repeat(600)].concat();
        assert!(run(BodyFraming::Chunked, &trailers, 4096).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_in_any_pieces_end_or_fail(wire in proptest::collection::vec(any::<u8>(), 0..200), step in 1usize..50) {
            for peer in [HeadSender::Client, HeadSender::Backend] {
                let _ = read(peer, BodyFraming::Chunked, &wire, step);
            }
        }

        #[test]
        fn pieces_do_not_matter(chunks in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 1..40), 0..6), step in 1usize..50) {
            let mut wire = Vec::new();
            for chunk in &chunks {
                wire.extend_from_slice(format!("{:x}\r\n", chunk.len()).as_bytes());
                wire.extend_from_slice(chunk);
                wire.extend_from_slice(b"\r\n");
            }
            wire.extend_from_slice(b"0\r\n\r\n");
            for peer in [HeadSender::Client, HeadSender::Backend] {
                prop_assert_eq!(read(peer, BodyFraming::Chunked, &wire, step), Ok((chunks.concat(), 0, 0)));
            }
        }
    }
}
