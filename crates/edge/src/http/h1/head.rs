//! Parses heads of HTTP/1 requests (RFC 9112 sections 2 to 5) so strictly that no two parsers can
//! disagree.
//!
//! Not here: single fields (`fields`), responses of backends (`response_head`), bodies
//! (`framing`), reading from a socket (`connection`).

use std::sync::LazyLock;

use bytes::{Bytes, BytesMut};
use http::header::HeaderValue;
use http::{HeaderMap, Method, Version};
use memchr::memmem::Finder;

use crate::http::h1::fields::HeadFields;
use crate::http::h1::framing::{BodyFraming, HeadSender};
use crate::http::host::UriAuthority;
use crate::http::refusal::Refusal;
use crate::http::target;
use crate::http::target::HostNames;
use crate::options::HEADER_FIELDS_MAX;

/// Maximum number of header fields that the parser can hold.
pub const FIELDS_MAX: usize = HEADER_FIELDS_MAX;

/// Limits for one head.
#[derive(Debug, Clone, Copy)]
pub struct HeadLimits {
    pub bytes: usize,
    pub fields: usize,
}

/// A request head with only one possible reading.
#[derive(Debug)]
pub struct ParsedHead {
    pub method: Method,
    pub path: Box<str>,
    pub query: Option<Box<str>>,
    pub authority: UriAuthority,
    pub version: Version,
    /// Without Host and the fields that concern only this connection.
    pub headers: HeaderMap,
    pub framing: BodyFraming,
    pub keep_alive: bool,
    pub expect_continue: bool,
    pub upgrade: Option<HeaderValue>,
    /// The client accepts trailers (`TE: trailers`).
    pub trailers: bool,
}

/// Prepared once, because that takes longer than a search through an ordinary head.
static END: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\r\n\r\n"));

/// Returns the end of the head in `buffer`, or an error if there can be none. `scanned` remembers
/// the bytes of earlier calls.
pub fn find_end(buffer: &[u8], scanned: &mut usize, limits: HeadLimits) -> Result<Option<usize>, Refusal> {
    let from = scanned.saturating_sub(3);
    if let Some(at) = END.find(&buffer[from..]) {
        let end = from + at + 4;
        return if end > limits.bytes { Err(Refusal::HeadTooLarge) } else { Ok(Some(end)) };
    }
    // Some parsers take a bare line feed for an end. It is refused now, without a wait for more
    // bytes.
    let is_bare = |at: usize| at == 0 || buffer[at - 1] != b'\r';
    if memchr::memchr_iter(b'\n', &buffer[*scanned..]).any(|at| is_bare(*scanned + at)) {
        return Err(Refusal::BadRequest("a line ends in a bare line feed"));
    }
    if buffer.len() >= limits.bytes {
        let in_first_line = memchr::memchr(b'\n', buffer).is_none();
        return Err(if in_first_line { Refusal::TargetTooLong } else { Refusal::HeadTooLarge });
    }
    *scanned = buffer.len();
    Ok(None)
}

/// Checks that there is no NUL, and CR and LF only as a pair.
pub(super) fn check_lines(head: &[u8]) -> Result<(), &'static str> {
    let mut from = 0;
    while let Some(at) = memchr::memchr3(b'\r', b'\n', 0, &head[from..]) {
        let at = from + at;
        match head[at] {
            b'\r' if head.get(at + 1) == Some(&b'\n') => from = at + 2,
            b'\r' => return Err("a bare carriage return"),
            b'\n' => return Err("a line ends in a bare line feed"),
            _ => return Err("a NUL byte"),
        }
    }
    Ok(())
}

/// Parses the first `end` bytes of `buffer` and removes them.
pub fn parse_request(buffer: &mut BytesMut, end: usize, limits: HeadLimits) -> Result<ParsedHead, Refusal> {
    let bytes = buffer.split_to(end).freeze();
    // RFC 9112 section 2.2: one empty line before a request is tolerated.
    let bytes = if bytes.starts_with(b"\r\n") { bytes.slice(2..) } else { bytes };
    check_lines(&bytes).map_err(Refusal::BadRequest)?;
    read_request(bytes, limits)
}

fn read_request(bytes: Bytes, limits: HeadLimits) -> Result<ParsedHead, Refusal> {
    let mut fields = [const { std::mem::MaybeUninit::uninit() }; FIELDS_MAX];
    let room = limits.fields.min(FIELDS_MAX);
    let mut parsed = httparse::Request::new(&mut []);
    match parsed.parse_with_uninit_headers(&bytes, &mut fields[..room]) {
        Ok(httparse::Status::Complete(_)) => {}
        Ok(httparse::Status::Partial) => return Err(Refusal::BadRequest("the head ends too early")),
        Err(httparse::Error::Version) => {
            let known = with_known_version(&bytes).ok_or(Refusal::VersionNotSupported)?;
            return read_request(known, limits);
        }
        Err(error) => return Err(refuse(error)),
    }
    let version = match parsed.version {
        Some(1) => Version::HTTP_11,
        Some(0) => Version::HTTP_10,
        _ => return Err(Refusal::VersionNotSupported),
    };
    let method = Method::from_bytes(parsed.method.unwrap_or_default().as_bytes())
        .map_err(|_| Refusal::BadRequest("the method is not a token"))?;
    let mut fields =
        HeadFields::collect(&bytes, parsed.headers, HeadSender::Client).map_err(Refusal::BadRequest)?;
    let target = RequestTarget::parse(parsed.path.unwrap_or_default(), &method)?;
    let host = fields.host.take();
    let names = HostNames { target: target.authority, scheme: target.scheme, field: host.as_deref() };
    let authority = target::read_authority(version, names)?;
    let framing = fields.request_framing(version).map_err(Refusal::BadRequest)?;
    let expect_continue = match &fields.expect {
        None => false,
        Some(value) if target::is_continue(value) => version == Version::HTTP_11,
        Some(_) => return Err(Refusal::ExpectationFailed),
    };
    fields.strip_hop_by_hop();
    Ok(ParsedHead {
        method,
        path: target.path.into(),
        query: target.query.map(Into::into),
        authority,
        version,
        framing,
        keep_alive: fields.keep_alive(version),
        expect_continue,
        upgrade: if version == Version::HTTP_11 { fields.upgrade.take() } else { None },
        trailers: fields.te_trailers,
        headers: fields.headers,
    })
}

/// Returns the head as one of HTTP/1.1, if it has a higher minor version (RFC 9110 section 2.5).
fn with_known_version(bytes: &Bytes) -> Option<Bytes> {
    let end = memchr::memmem::find(bytes, b"\r\n")?;
    let minor = end.checked_sub(1)?;
    let is_higher = bytes[..minor].ends_with(b" HTTP/1.") && matches!(bytes[minor], b'2'..=b'9');
    is_higher.then(|| {
        let mut known = BytesMut::from(&bytes[..]);
        known[minor] = b'1';
        known.freeze()
    })
}

fn refuse(error: httparse::Error) -> Refusal {
    match error {
        httparse::Error::HeaderName => Refusal::BadRequest("a header name is not a token"),
        httparse::Error::HeaderValue => Refusal::BadRequest("a header value has a control character"),
        httparse::Error::NewLine => Refusal::BadRequest("a line does not end in CR LF"),
        httparse::Error::TooManyHeaders => Refusal::HeadTooLarge,
        _ => Refusal::BadRequest("the request line is not 'METHOD target HTTP/1.1'"),
    }
}

/// The request target (RFC 9112 section 3.2).
struct RequestTarget<'a> {
    scheme: Option<&'a str>,
    authority: Option<&'a str>,
    path: &'a str,
    query: Option<&'a str>,
}

impl<'a> RequestTarget<'a> {
    fn parse(text: &'a str, method: &Method) -> Result<Self, Refusal> {
        target::check_method(method)?;
        let Some(at) = scheme_end(text) else {
            let (path, query) = target::split(text, method)?;
            return Ok(Self { scheme: None, authority: None, path, query });
        };
        target::check_characters(text)?;
        let (scheme, rest) = (text[..at].strip_suffix("://"), &text[at..]);
        let (authority, rest) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
        let (path, query) = match rest.strip_prefix('?') {
            // RFC 9112 section 3.2.4: without a path it is about the server.
            None if rest.is_empty() && *method == Method::OPTIONS => ("*", None),
            None if rest.is_empty() => ("/", None),
            Some(query) => ("/", Some(query)),
            None => target::split(rest, method)?,
        };
        Ok(Self { scheme, authority: Some(authority), path, query })
    }
}

fn scheme_end(text: &str) -> Option<usize> {
    ["http://", "https://"]
        .iter()
        .find(|scheme| text.get(..scheme.len()).is_some_and(|front| front.eq_ignore_ascii_case(scheme)))
        .map(|scheme| scheme.len())
}

#[cfg(test)]
#[path = "head_tests.rs"]
mod tests;
