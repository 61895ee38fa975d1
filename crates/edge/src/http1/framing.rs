//! Where an HTTP/1 body ends, and what of it has arrived (RFC 9112 sections 6 and 7).
//!
//! A client's chunks are read strictly; those of a backend may be sloppy where that leaves one reading (`docs/http-readings.md`).
//! Not here: reading from a socket (`connection`, `upstream`), choosing a framing (`head`).

use bytes::{Buf, Bytes, BytesMut};
use http::HeaderMap;
use http::header::{HeaderName, HeaderValue};

use crate::http1::fields::Peer;
use crate::http1::response_head::{find_empty_line, rewrite_lines};

/// Longest chunk-size line, extensions included, in bytes. Extensions are read over and never forwarded.
const CHUNK_LINE_MAX: usize = 256;

/// All chunk extensions of one body together, in bytes: bounds the work a peer can cause without sending data.
const EXTENSIONS_MAX: usize = 16 << 10;

/// Trailer section, in bytes, and its fields.
const TRAILERS_MAX: usize = 8 << 10;
const TRAILER_FIELDS_MAX: usize = 32;

/// How the length of a body is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Framing {
    None,
    Length(u64),
    Chunked,
    /// Until the connection ends: responses only.
    ToEnd,
}

#[derive(Debug)]
pub enum Decoded {
    Data(Bytes),
    Trailers(HeaderMap),
    /// More bytes are needed from the peer.
    More,
    End,
}

/// Takes a body out of what was read.
#[derive(Debug)]
pub struct Decoder {
    state: State,
    peer: Peer,
    extension_bytes: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Length(u64),
    ChunkSize,
    ChunkData(u64),
    ChunkEnd,
    Trailers,
    ToEnd,
    End,
}

impl Decoder {
    /// Of a body that `peer` sends.
    pub fn new(framing: Framing, peer: Peer) -> Self {
        let state = match framing {
            Framing::None | Framing::Length(0) => State::End,
            Framing::Length(length) => State::Length(length),
            Framing::Chunked => State::ChunkSize,
            Framing::ToEnd => State::ToEnd,
        };
        Self { state, peer, extension_bytes: 0 }
    }

    pub fn is_end(&self) -> bool {
        self.state == State::End
    }

    /// Bytes still to come, where known.
    pub fn remaining(&self) -> Option<u64> {
        match self.state {
            State::End => Some(0),
            State::Length(left) => Some(left),
            _ => None,
        }
    }

    /// The peer has closed: true if that is a proper end of this body.
    pub fn close(&mut self) -> bool {
        // RFC 9112 section 8: a chunked body is whole once its last chunk has come. What follows it would be dropped.
        let is_whole = self.state == State::Trailers && self.peer == Peer::Backend;
        if self.state == State::ToEnd || is_whole {
            self.state = State::End;
        }
        self.is_end()
    }

    /// The next piece that `buffer` holds.
    pub fn decode(&mut self, buffer: &mut BytesMut) -> Result<Decoded, &'static str> {
        loop {
            match self.state {
                State::End => return Ok(Decoded::End),
                State::ToEnd if buffer.is_empty() => return Ok(Decoded::More),
                State::ToEnd => return Ok(Decoded::Data(buffer.split().freeze())),
                State::Length(left) => {
                    let Some((data, left)) = take(buffer, left) else { return Ok(Decoded::More) };
                    self.state = if left == 0 { State::End } else { State::Length(left) };
                    return Ok(Decoded::Data(data));
                }
                State::ChunkData(left) => {
                    let Some((data, left)) = take(buffer, left) else { return Ok(Decoded::More) };
                    self.state = if left == 0 { State::ChunkEnd } else { State::ChunkData(left) };
                    return Ok(Decoded::Data(data));
                }
                State::ChunkEnd => match buffer.as_ref() {
                    [b'\r', b'\n', ..] => {
                        buffer.advance(2);
                        self.state = State::ChunkSize;
                    }
                    [b'\n', ..] if self.peer == Peer::Backend => {
                        buffer.advance(1);
                        self.state = State::ChunkSize;
                    }
                    [] | [b'\r'] => return Ok(Decoded::More),
                    _ => return Err("a chunk is longer than its size says"),
                },
                State::ChunkSize => match self.chunk_size(buffer)? {
                    None => return Ok(Decoded::More),
                    Some(0) => self.state = State::Trailers,
                    Some(size) => self.state = State::ChunkData(size),
                },
                State::Trailers => return self.trailers(buffer),
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
            (None, Peer::Backend) => &window[..at],
            (None, Peer::Client) => return Err("a chunk size line ends in a bare line feed"),
        };
        let line = match self.peer {
            Peer::Client => line,
            Peer::Backend => skip_zeros(line),
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
        // RFC 9112 section 7.1.1: blanks may stand in front of an extension. A backend may pad the size with them.
        match extension.iter().find(|&&b| !matches!(b, b' ' | b'\t')) {
            None if extension.is_empty() || self.peer == Peer::Backend => {}
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

    fn trailers(&mut self, buffer: &mut BytesMut) -> Result<Decoded, &'static str> {
        let Some(end) = self.trailers_end(buffer) else {
            return if buffer.len() > TRAILERS_MAX {
                Err("the trailers are too large")
            } else {
                Ok(Decoded::More)
            };
        };
        let section = buffer.split_to(end).freeze();
        if section.len() > TRAILERS_MAX {
            return Err("the trailers are too large");
        }
        self.state = State::End;
        let trailers = match self.peer {
            Peer::Client => parse_trailers(&section)?,
            // The body is whole: fields behind it that cannot be read take nothing away from it.
            Peer::Backend => parse_trailers(&section)
                .or_else(|_| parse_trailers(&rewrite_lines(&section, false)?))
                .unwrap_or_default(),
        };
        Ok(if trailers.is_empty() { Decoded::End } else { Decoded::Trailers(trailers) })
    }

    /// Where the section ends, with the empty line.
    fn trailers_end(&self, buffer: &[u8]) -> Option<usize> {
        match (buffer, self.peer) {
            ([b'\r', b'\n', ..], _) => Some(2),
            ([b'\n', ..], Peer::Backend) => Some(1),
            (_, Peer::Backend) => find_empty_line(buffer, 0),
            (_, Peer::Client) => memchr::memmem::find(buffer, b"\r\n\r\n").map(|at| at + 4),
        }
    }
}

/// The fields of a trailer section, without those that must not be there: they are dropped (RFC 9110 section 6.5.1).
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

/// Without zeros in front of the last digit.
fn skip_zeros(line: &[u8]) -> &[u8] {
    let zeros = line.iter().take_while(|&&byte| byte == b'0').count();
    let has_more = line.get(zeros).is_some_and(u8::is_ascii_hexdigit);
    &line[if has_more { zeros } else { zeros.saturating_sub(1) }..]
}

/// RFC 9110 section 6.5.1: fields for framing, routing, authentication or request modifiers.
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Decodes `wire` fed in pieces of `step` bytes: the data, the trailers' count, what was left over.
    fn run(framing: Framing, wire: &[u8], step: usize) -> Result<(Vec<u8>, usize, usize), &'static str> {
        read(Peer::Client, framing, wire, step)
    }

    fn read(
        peer: Peer,
        framing: Framing,
        wire: &[u8],
        step: usize,
    ) -> Result<(Vec<u8>, usize, usize), &'static str> {
        let mut decoder = Decoder::new(framing, peer);
        let (mut data, mut trailers) = (Vec::new(), 0);
        let mut buffer = BytesMut::new();
        let mut pieces = wire.chunks(step.max(1));
        loop {
            match decoder.decode(&mut buffer)? {
                Decoded::Data(bytes) => data.extend_from_slice(&bytes),
                Decoded::Trailers(map) => trailers = map.len(),
                Decoded::End => {
                    return Ok((data, trailers, buffer.len() + pieces.map(<[u8]>::len).sum::<usize>()));
                }
                Decoded::More => match pieces.next() {
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
            assert_eq!(run(Framing::Chunked, chunked, step), Ok((b"abc0123456789".to_vec(), 1, 4)), "{step}");
        }
        assert_eq!(run(Framing::Length(3), b"abcNEXT", 2), Ok((b"abc".to_vec(), 0, 4)));
        assert_eq!(run(Framing::ToEnd, b"abc", 1), Ok((b"abc".to_vec(), 0, 0)));
        assert_eq!(run(Framing::None, b"NEXT", 4), Ok((vec![], 0, 4)));
        assert_eq!(run(Framing::Length(5), b"abc", 4), Err("cut off"));
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
            assert!(run(Framing::Chunked, wire, 64).is_err(), "{}", String::from_utf8_lossy(wire));
        }
    }

    #[test]
    fn trailers_that_must_not_be_there_are_dropped() {
        for peer in [Peer::Client, Peer::Backend] {
            for (fields, kept) in [
                ("Content-Length: 3\r\n", 0),
                ("Transfer-Encoding: chunked\r\nX: 1\r\n", 1),
                ("Content-Type: text/plain\r\nSet-Cookie: a=b\r\nX: 1\r\nX: 2\r\n", 2),
            ] {
                let wire = format!("3\r\nabc\r\n0\r\n{fields}\r\nNEXT");
                for step in [1, 7, 200] {
                    let whole = read(peer, Framing::Chunked, wire.as_bytes(), step);
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
                let whole = read(Peer::Backend, Framing::Chunked, wire, step);
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
            let read = read(Peer::Backend, Framing::Chunked, wire, 64);
            assert!(read.is_err(), "{}: {read:?}", wire.escape_ascii());
        }
    }

    #[test]
    fn endless_lines_and_extensions_are_bounded() {
        let long = [b"3;".as_slice(), &[b'x'; 300]].concat();
        assert!(run(Framing::Chunked, &long, 1).is_err());
        let many = b"1;xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\r\na\r\n".repeat(400);
        assert_eq!(run(Framing::Chunked, &many, 4096), Err("too many chunk extensions"));
        // Blanks in front of an extension count with it.
        for wire in [&b"3 ;a=b\r\nabc\r\n0\r\n\r\n"[..], b"3\t \t;a\r\nabc\r\n0\r\n\r\n"] {
            assert_eq!(run(Framing::Chunked, wire, 1), Ok((b"abc".to_vec(), 0, 0)));
        }
        let trailers = [b"0\r\n".as_slice(), &b"X: yyyyyyyyyyyyyyyy\r\n".repeat(600)].concat();
        assert!(run(Framing::Chunked, &trailers, 4096).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_in_any_pieces_end_or_fail(wire in proptest::collection::vec(any::<u8>(), 0..200), step in 1usize..50) {
            for peer in [Peer::Client, Peer::Backend] {
                let _ = read(peer, Framing::Chunked, &wire, step);
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
            for peer in [Peer::Client, Peer::Backend] {
                prop_assert_eq!(read(peer, Framing::Chunked, &wire, step), Ok((chunks.concat(), 0, 0)));
            }
        }
    }
}
