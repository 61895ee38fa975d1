//! Fuzzes heads of requests and responses, and the hosts and paths in them.
//!
//! Not here: single header fields (`fields`).

use std::rc::Rc;

use bytes::BytesMut;
use http::header::HeaderMap;
use http::{Version, header, request};
use nagaya_base::RequestId;
use nagaya_base::fuzz::copy_seeds;

use crate::backends::upstream;
use crate::backends::upstream::UpstreamHead;
use crate::fuzzing::inputs::{read_lines, split_step};
use crate::http::h1::framing::BodyFraming;
use crate::http::h1::head::{HeadLimits, ParsedHead};
use crate::http::h1::{head, response_head};
use crate::http::message::{ConnInfo, RequestHead};
use crate::http::path::SitePath;
use crate::http::proxy_headers::ForwardingRules;
use crate::http::{host, path, proxy_protocol};
use crate::options::{EdgeConfig, EdgeLimits};

const LIMITS: HeadLimits = HeadLimits { bytes: 8 << 10, fields: 100 };

/// Limits for a written head, which has more fields than the read one.
const LIMITS_AGAIN: HeadLimits = HeadLimits { bytes: 64 << 10, fields: head::FIELDS_MAX };

/// Fields that a backend gets unchanged.
const KEPT: [header::HeaderName; 4] =
    [header::COOKIE, header::ACCEPT, header::USER_AGENT, header::AUTHORIZATION];

pub(super) fn connection() -> Rc<ConnInfo> {
    let address = |last| std::net::SocketAddr::from(([192, 0, 2, last], 5000));
    Rc::new(ConnInfo { peer: address(7), local: address(1), tls: None, carried: None, network: None })
}

// === Before HTTP ===

pub(super) fn proxy_headers() -> Vec<Vec<u8>> {
    copy_seeds(&[
        b"PROXY TCP4 192.0.2.7 192.0.2.1 5000 443\r\nGET",
        b"PROXY TCP6 2001:db8::7 2001:db8::1 5000 443\r\n",
        b"PROXY UNKNOWN whatever\r\n",
        b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c\xc0\0\x02\x07\xc0\0\x02\x01\x13\x88\x01\xbbGET",
        b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x13\xc0\0\x02\x07\xc0\0\x02\x01\x13\x88\x01\xbb\x03\0\x04\x01\x02\x03\x04",
        b"\r\n\r\n\0\r\nQUIT\n\x20\0\0\x02ab",
    ])
}

/// Checks that a header ends where it says, whatever follows, and that none of its beginnings is
/// one.
pub(super) fn read_proxy_header(bytes: &[u8]) {
    let Ok(Some(header)) = proxy_protocol::parse(bytes) else { return };
    assert!(header.len <= bytes.len() && header.len <= proxy_protocol::HEADER_LEN_MAX);
    let whole = &bytes[..header.len];
    assert_eq!(proxy_protocol::parse(whole).expect("it was one").expect("it was whole"), header);
    for end in 1..whole.len() {
        assert!(matches!(proxy_protocol::parse(&whole[..end]), Ok(None)), "{end} of {} bytes", whole.len());
    }
}

// === HTTP/1 ===

pub(super) fn http1_requests() -> Vec<Vec<u8>> {
    copy_seeds(&[
        b"\x01GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\x05GET http://a.example:80/b%20c?d=e HTTP/1.1\r\nHost: a.example:80\r\nAccept: */*\r\nCookie: a=b\r\n\r\n",
        b"\x10POST /x HTTP/1.1\r\nHost: [::1]:8080\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\nabc",
        b"\x03POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTE: trailers\r\n\r\n0\r\n\r\n",
        b"\x40GET /chat HTTP/1.1\r\nHost: a\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"\xffOPTIONS * HTTP/1.1\r\nHost: a\r\nVia: 1.1 x\r\nX-Forwarded-For: 1.2.3.4\r\nForwarded: for=1.2.3.4\r\n\r\n",
        b"\x07\r\nGET / HTTP/1.0\r\nConnection: close, x\r\nx: y\r\nA_b: c\r\n\r\n",
        b"\x02OPTIONS HTTP://a HTTP/1.1\r\nhost:a\r\ncontent-length:0\r\nproxy-connection: x\r\n\r\n",
        b"\x02GET / HTTP/1.1\r\nHost: a\r\ntraceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n\r\n",
        b"\x02PUT / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"\x02GET / HTTP/1.1\nHost: a\n\n",
        b"\x02GET / HTTP/1.1\r\nHost : a\r\n b\r\n\r\n",
    ])
}

pub(super) fn read_http1_request(bytes: &[u8]) {
    let Some((step, wire)) = split_step(bytes) else { return };
    let Some((end, parsed)) = parse_request(wire, wire.len().max(1), LIMITS) else { return };
    let in_pieces = parse_request(wire, step, LIMITS);
    assert_eq!(in_pieces.map(|(end, _)| end), Some(end), "pieces mean the same as the whole");
    let head = RequestHead {
        id: RequestId(1),
        method: parsed.method,
        path: parsed.path,
        query: parsed.query,
        host: parsed.authority.host,
        port: parsed.authority.port,
        version: parsed.version,
        headers: parsed.headers,
        upgrade: parsed.upgrade,
        conn: connection(),
    };
    check_forwarded(head, parsed.framing);
}

/// Returns the head in these bytes, which come in pieces, and its length. `None` if it is
/// refused, or incomplete.
fn parse_request(wire: &[u8], step: usize, limits: HeadLimits) -> Option<(usize, ParsedHead)> {
    let (mut buffer, mut scanned) = (BytesMut::new(), 0);
    for piece in wire.chunks(step) {
        buffer.extend_from_slice(piece);
        if let Some(end) = head::find_end(&buffer, &mut scanned, limits).ok()? {
            return Some((end, head::parse_request(&mut buffer, end, limits).ok()?));
        }
    }
    None
}

/// Writes the head for a backend, and checks the result. It must be read as the same request, and
/// only our fields may identify the client.
fn check_forwarded(mut head: RequestHead, framing: BodyFraming) {
    let forwarding = ForwardingRules::new(&EdgeConfig::default());
    forwarding.strip_claims(&mut head);
    let mut fields = Vec::new();
    if forwarding.request(&head, None, &mut fields).is_err() {
        return;
    }
    let mut wire = BytesMut::new();
    upstream::encode(&UpstreamHead { head: &head, fields: &fields, trailers: &[] }, framing, &mut wire);
    let (end, again) = parse_request(&wire, wire.len(), LIMITS_AGAIN)
        .unwrap_or_else(|| panic!("a backend refuses {}", wire.escape_ascii()));
    let wire_text = wire.escape_ascii();
    assert_eq!(end, wire.len(), "nothing comes behind the head: {}", wire.escape_ascii());
    assert_eq!((&again.method, &again.path, &again.query), (&head.method, &head.path, &head.query));
    let plain = |framing| if framing == BodyFraming::Length(0) { BodyFraming::None } else { framing };
    assert_eq!(plain(again.framing), plain(framing));
    if !head.host.is_empty() {
        assert_eq!((&again.authority.host, again.authority.port), (&head.host, head.port));
    }
    let upgrade = head.upgrade.as_ref().filter(|_| head.version == Version::HTTP_11);
    assert_eq!(again.upgrade.as_ref(), upgrade);
    for name in KEPT {
        assert!(all(&again.headers, &name).eq(all(&head.headers, &name)), "{name}: {wire_text}");
    }
    assert!(all(&again.headers, "x-forwarded-for").eq([&b"192.0.2.7"[..]]));
    assert!(again.headers.keys().all(|name| !name.as_str().contains('_')));
}

fn all(headers: &HeaderMap, name: impl header::AsHeaderName) -> impl Iterator<Item = &[u8]> {
    headers.get_all(name).into_iter().map(|value| value.as_bytes().trim_ascii())
}

pub(super) fn http1_responses() -> Vec<Vec<u8>> {
    copy_seeds(&[
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: x\r\n\r\n",
        b"HTTP/1.0 200\r\n\r\nto the end",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"HTTP/1.1 304 Not Modified\r\nETag: \"a\"\r\nContent-Length: 3\r\nConnection: close\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n",
        b"HTTP/1.2  200 OK\nContent-Length : 3, 3\nX: a\n b\nConnection: close;x\n\nabc",
        b"HTTP/1.0 200 OK\r\nTransfer-Encoding: ,chunked\r\n\r\n",
    ])
}

pub(super) fn read_http1_response(wire: &[u8]) {
    for to_head in [false, true] {
        let mut buffer = BytesMut::from(wire);
        let Ok(Some(end)) = response_head::find_end(&buffer, &mut 0, LIMITS.bytes) else { return };
        let Ok(head) = response_head::parse(&mut buffer, end, to_head) else { continue };
        assert!(!to_head || head.framing == BodyFraming::None, "an answer to HEAD has no body");
        assert!(
            !(head.keep_alive && head.framing == BodyFraming::ToEnd),
            "its end is that of the connection"
        );
        for name in [header::CONNECTION, header::TRANSFER_ENCODING, header::CONTENT_LENGTH, header::UPGRADE] {
            assert!(!head.headers.contains_key(&name), "{name} is of one connection");
        }
    }
}

// === HTTP/2 ===

pub(super) fn http2_heads() -> Vec<Vec<u8>> {
    copy_seeds(&[
        b"GET https://a.example/b?c=d\ncookie: a=1\ncookie: b=2\nte: trailers",
        b"POST http://a.example:80/\nhost: a.example:80\ncontent-length: 3\nexpect: 100-continue",
        b"OPTIONS https://[::1]:443/*\nx-forwarded-for: 1.2.3.4\nvia: 2 x",
        b"GET /only/a/path\nhost: a\nhost: b",
        b"CONNECT a:80\n",
    ])
}

/// Reads method and target from the first line, fields from the others. Input that HTTP/2 itself
/// refuses does not get here.
pub(super) fn read_http2_head(bytes: &[u8]) {
    let (first, rest) = bytes.split_at(bytes.iter().position(|byte| *byte == b'\n').unwrap_or(bytes.len()));
    let Some(at) = first.iter().position(|byte| *byte == b' ') else { return };
    let request = http::Request::builder().method(&first[..at]).uri(&first[at + 1..]).body(());
    let Ok(request) = request else { return };
    let (mut parts, ()): (request::Parts, ()) = request.into_parts();
    parts.headers = read_lines(rest);
    for name in ["connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade"] {
        parts.headers.remove(name);
    }
    let Ok(head) = crate::http::h2::head::read(parts, connection(), &EdgeLimits::default(), RequestId(1))
    else {
        return;
    };
    assert!(head.upgrade.is_none());
    assert!(all(&head.headers, header::COOKIE).count() <= 1);
    check_forwarded(head, BodyFraming::None);
}

// === In them ===

pub(super) fn authorities() -> Vec<Vec<u8>> {
    copy_seeds(&[
        b"a.example",
        b"A.example.:8080",
        b"[::1]:443",
        b"[v1.x]",
        b"a..b",
        b"a:",
        b"a:65536",
        b"u@a",
        b"10.0.0.1:80",
    ])
}

pub(super) fn read_authority(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let Ok(found) = host::parse(text) else { return };
    assert!(!found.host.is_empty() && !found.host.bytes().any(|byte| byte.is_ascii_uppercase()));
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:[]".contains(&byte);
    assert!(found.host.bytes().all(is_plain), "{}", found.host);
    let written = match found.port {
        Some(port) => format!("{}:{port}", found.host),
        None => found.host.to_string(),
    };
    assert_eq!(host::parse(&written), Ok(found));
}

pub(super) fn site_paths() -> Vec<Vec<u8>> {
    copy_seeds(&[
        b"/",
        b"/a/b.php",
        b"/a/../b",
        b"/a//b/./c/",
        b"/%61%2fb",
        b"/..%2f..%2fetc",
        b"/a%00b",
        b"/.git/x",
        b"/a/..",
        b"/../a",
        b"/%e4%b8%ad",
        b"/%ff",
        b"/a%",
        b"/a;b/%2e%2e/c",
        b"/x//..//y",
    ])
}

pub(super) fn read_site_path(bytes: &[u8]) {
    let Ok(raw) = std::str::from_utf8(bytes) else { return };
    let found = SitePath::parse(raw);
    let mut canonical: Box<str> = raw.into();
    if path::canonicalize(&mut canonical, "/").is_ok() {
        let mut again = canonical.clone();
        assert_eq!(path::canonicalize(&mut again, "/"), Ok(()));
        assert_eq!(again, canonical, "a canonical path is its own canonical form");
        let (Ok(found), Ok(same)) = (&found, SitePath::parse(&canonical)) else {
            panic!("{canonical} is no path");
        };
        assert_eq!(same.as_str(), found.as_str(), "all readers agree on {canonical}");
    }
    let Ok(found) = found else { return };
    let is_name = |part: &str| !matches!(part, "" | "." | "..");
    let inner = found.as_str().strip_prefix('/').expect("a path begins with a slash");
    let inner = inner.strip_suffix('/').unwrap_or(inner);
    assert!(inner.is_empty() || inner.split('/').all(is_name), "{inner}");
    for mount in ["/", "/a", "/a/b"] {
        let Ok(Some(below)) = found.below(mount) else { continue };
        let text = below.as_str();
        assert!(text.is_empty() || text.split('/').all(is_name), "{text}");
        assert!(!text.contains('\0'), "{text:?}");
    }
}
