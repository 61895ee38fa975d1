//! Fuzzes bodies of HTTP/1, and the output of CGI programs.
//!
//! Not here: FastCGI, which the keeper reads, too (`nagaya_keeper::fuzzing`).

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use nagaya_base::fuzz::copy_seeds;

use crate::backends::programs::response::{HEAD_FIELDS_MAX, HeadReader, ScriptHead};
use crate::fuzzing::inputs::split_step;
use crate::http::h1::framing::{BodyDecoder, BodyFraming, DecodedPart, HeadSender, is_forbidden_trailer};

pub(super) fn http1_bodies() -> Vec<Vec<u8>> {
    copy_seeds(&[
        b"\x013\r\nabc\r\nA;x=y\r\n0123456789\r\n0\r\nX-T: 1\r\n\r\nNEXT",
        b"\x050\r\n\r\n",
        b"\x02ffffffffffffffff\r\n",
        b"\x031;a=\"\r\n\"\r\nx\r\n0\r\n\r\n",
        b"\x030\r\nContent-Length: 1\r\n\r\n",
        b"\x033 \nabc\n000 ;a\nb : c\n d\n\n",
        b"\x031 \r\nx\r\n0\r\na: b\n\r\n\r\n",
    ])
}

/// The decoded part of a body, and the number of bytes behind it.
#[derive(Debug, Default, PartialEq)]
struct FuzzedBody {
    data: Vec<u8>,
    trailers: Option<HeaderMap>,
    left: usize,
}

/// Checks that a body has the same result in pieces as in one, chunked or of known length.
pub(super) fn read_http1_body(bytes: &[u8]) {
    let Some((step, wire)) = split_step(bytes) else { return };
    let framings =
        [BodyFraming::Chunked, BodyFraming::Length(step as u64), BodyFraming::ToEnd, BodyFraming::None];
    for (peer, framing) in
        [HeadSender::Client, HeadSender::Backend].into_iter().flat_map(|peer| framings.map(|f| (peer, f)))
    {
        let whole = decode_body(peer, framing, wire, wire.len().max(1));
        assert_eq!(decode_body(peer, framing, wire, step), whole, "{peer:?} {framing:?}");
        let Some(body) = whole else { continue };
        assert!(body.data.len() + body.left <= wire.len());
        if let BodyFraming::Length(len) = framing {
            assert_eq!(body.data.len() as u64, len);
        }
        assert!(body.trailers.iter().flat_map(HeaderMap::keys).all(|name| !is_forbidden_trailer(name)));
    }
}

/// Returns `None` if it is refused, or incomplete.
fn decode_body(peer: HeadSender, framing: BodyFraming, wire: &[u8], step: usize) -> Option<FuzzedBody> {
    let (mut decoder, mut body, mut buffer) =
        (BodyDecoder::new(framing, peer), FuzzedBody::default(), BytesMut::new());
    let mut pieces = wire.chunks(step);
    loop {
        match decoder.decode(&mut buffer).ok()? {
            DecodedPart::Data(data) => body.data.extend_from_slice(&data),
            DecodedPart::Trailers(trailers) => body.trailers = Some(trailers),
            DecodedPart::End => {
                body.left = buffer.len() + pieces.map(<[u8]>::len).sum::<usize>();
                return Some(body);
            }
            DecodedPart::More => match pieces.next() {
                Some(piece) => buffer.extend_from_slice(piece),
                None => return decoder.close().then_some(body),
            },
        }
    }
}

pub(super) fn cgi_heads() -> Vec<Vec<u8>> {
    copy_seeds(&[
        b"\x01Content-Type: text/plain\n\nbody",
        b"\x05Status: 404 Not Found\r\nContent-Type: a/b\r\nContent-Length: 4\r\n\r\nbody",
        b"\x10Location: /a?b\n\n",
        b"\x03Location: https://a.example/\nStatus: 301\nSet-Cookie: a=b\nSet-Cookie: c=d\n\n",
        b"\x03Connection: x-a\nX-A: b\nContent-Type: a/b\n\n",
        b"\x03Transfer-Encoding: chunked\n\n",
        b"\x03Status: 100\n\n",
        b"\x03\n",
    ])
}

pub(super) fn read_cgi_head(bytes: &[u8]) {
    let Some((step, output)) = split_step(bytes) else { return };
    let whole = read_head(output, output.len().max(1));
    assert_eq!(read_head(output, step), whole, "pieces mean the same as the whole");
    match whole {
        Some((ScriptHead::Document { status, headers, .. }, body)) => {
            assert!((200..600).contains(&status.as_u16()));
            assert!(headers.len() <= HEAD_FIELDS_MAX && body < output.len());
            for name in ["transfer-encoding", "connection", "content-length", "status", "upgrade"] {
                assert!(!headers.contains_key(name), "{name} frames the response");
            }
        }
        Some((ScriptHead::LocalRedirect { path, query }, _)) => {
            assert!(path.starts_with('/') && !path.starts_with("//"), "{path} is of another server");
            let both = path + query.as_deref().unwrap_or_default();
            assert!(both.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'#'), "{both}");
        }
        None => {}
    }
}

/// Returns the head, and the number of bytes behind it.
fn read_head(output: &[u8], step: usize) -> Option<(ScriptHead, usize)> {
    let mut reader = HeadReader::default();
    let mut pieces = output.chunks(step);
    while let Some(piece) = pieces.next() {
        if let Some((head, behind)) = reader.feed(Bytes::copy_from_slice(piece)).ok()? {
            return Some((head, behind.len() + pieces.map(<[u8]>::len).sum::<usize>()));
        }
    }
    None
}
