//! Heads of HTTP/1 messages (RFC 9112 sections 2 to 5), checked so strictly that no two parsers can disagree.
//!
//! Not here: bodies (`framing`), reading from a socket (`connection`, `upstream`).

use std::sync::LazyLock;

use bytes::{Bytes, BytesMut};
use http::header::{
    CONNECTION, CONTENT_LENGTH, EXPECT, HOST, HeaderName, HeaderValue, PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use http::{HeaderMap, Method, StatusCode, Version};
use memchr::memmem::Finder;

use crate::authority::{self, Authority};
use crate::http1::framing::Framing;
use crate::options::HEADER_FIELDS_MAX;
use crate::refusal::Refusal;

/// Most header fields the parser has room for.
pub const FIELDS_MAX: usize = HEADER_FIELDS_MAX;

/// Bounds for one head.
#[derive(Debug, Clone, Copy)]
pub struct HeadLimits {
    pub bytes: usize,
    pub fields: usize,
}

/// A request head that can be read in only one way.
#[derive(Debug)]
pub struct RequestHead {
    pub method: Method,
    pub path: Box<str>,
    pub query: Option<Box<str>>,
    pub authority: Authority,
    pub version: Version,
    /// Without Host and the fields that concern only this connection.
    pub headers: HeaderMap,
    pub framing: Framing,
    pub keep_alive: bool,
    pub expect_continue: bool,
    pub upgrade: Option<HeaderValue>,
    /// The client takes trailers (`TE: trailers`).
    pub trailers: bool,
}

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

/// Finding it is prepared once: that takes longer than looking through an ordinary head.
static END: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\r\n\r\n"));

/// Where the head in `buffer` ends, or why it never will. `scanned` remembers what was looked at before.
pub fn find_end(buffer: &[u8], scanned: &mut usize, limits: HeadLimits) -> Result<Option<usize>, Refusal> {
    let from = scanned.saturating_sub(3);
    if let Some(at) = END.find(&buffer[from..]) {
        let end = from + at + 4;
        return if end > limits.bytes { Err(Refusal::HeadTooLarge) } else { Ok(Some(end)) };
    }
    // A bare line feed would make some parsers see an end here: refuse it now instead of waiting for more.
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

/// No NUL, and CR and LF only as a pair.
fn check_lines(head: &[u8]) -> Result<(), &'static str> {
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

/// Parses the `end` bytes at the front of `buffer`, which it takes away.
pub fn parse_request(buffer: &mut BytesMut, end: usize, limits: HeadLimits) -> Result<RequestHead, Refusal> {
    let bytes = buffer.split_to(end).freeze();
    // RFC 9112 section 2.2: one empty line before a request is tolerated.
    let bytes = if bytes.starts_with(b"\r\n") { bytes.slice(2..) } else { bytes };
    check_lines(&bytes).map_err(Refusal::BadRequest)?;
    let mut fields = [const { std::mem::MaybeUninit::uninit() }; FIELDS_MAX];
    let room = limits.fields.min(FIELDS_MAX);
    let mut parsed = httparse::Request::new(&mut []);
    match parsed.parse_with_uninit_headers(&bytes, &mut fields[..room]) {
        Ok(httparse::Status::Complete(_)) => {}
        Ok(httparse::Status::Partial) => return Err(Refusal::BadRequest("the head ends too early")),
        Err(error) => return Err(refuse(error)),
    }
    let version = match parsed.version {
        Some(1) => Version::HTTP_11,
        Some(0) => Version::HTTP_10,
        _ => return Err(Refusal::VersionNotSupported),
    };
    let method = Method::from_bytes(parsed.method.unwrap_or_default().as_bytes())
        .map_err(|_| Refusal::BadRequest("the method is not a token"))?;
    let mut fields = Fields::collect(&bytes, parsed.headers).map_err(Refusal::BadRequest)?;
    let target = Target::parse(parsed.path.unwrap_or_default(), &method)?;
    let authority = authority(&target, fields.host.take(), version)?;
    let framing = fields.request_framing(version).map_err(Refusal::BadRequest)?;
    let expect_continue = match &fields.expect {
        None => false,
        Some(value) if value.eq_ignore_ascii_case(b"100-continue") => version == Version::HTTP_11,
        Some(_) => return Err(Refusal::ExpectationFailed),
    };
    fields.strip_hop_by_hop();
    Ok(RequestHead {
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

/// Parses a backend's response head, which it takes away. `to_head` says that the request was HEAD.
pub fn parse_response(
    buffer: &mut BytesMut,
    end: usize,
    to_head: bool,
) -> Result<ResponseHead, &'static str> {
    let bytes = buffer.split_to(end).freeze();
    check_lines(&bytes)?;
    let mut fields = [const { std::mem::MaybeUninit::uninit() }; FIELDS_MAX];
    let mut parsed = httparse::Response::new(&mut []);
    let config = httparse::ParserConfig::default();
    match config.parse_response_with_uninit_headers(&mut parsed, &bytes, &mut fields) {
        Ok(httparse::Status::Complete(_)) => {}
        Ok(httparse::Status::Partial) => return Err("the head ends too early"),
        Err(httparse::Error::TooManyHeaders) => return Err("too many header fields"),
        Err(_) => return Err("the head is not HTTP/1"),
    }
    let version = if parsed.version == Some(1) { Version::HTTP_11 } else { Version::HTTP_10 };
    let status = StatusCode::from_u16(parsed.code.unwrap_or_default()).map_err(|_| "no valid status code")?;
    let mut fields = Fields::collect(&bytes, parsed.headers)?;
    let framing = if to_head || status.is_informational() || status == 204 || status == 304 {
        // RFC 9112 section 6.3: no body whatever the fields say. They must still not contradict each other.
        fields.response_framing(version)?;
        Framing::None
    } else {
        fields.response_framing(version)?
    };
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

fn refuse(error: httparse::Error) -> Refusal {
    match error {
        httparse::Error::HeaderName => Refusal::BadRequest("a header name is not a token"),
        httparse::Error::HeaderValue => Refusal::BadRequest("a header value has a control character"),
        httparse::Error::NewLine => Refusal::BadRequest("a line does not end in CR LF"),
        httparse::Error::TooManyHeaders => Refusal::HeadTooLarge,
        httparse::Error::Version => Refusal::VersionNotSupported,
        _ => Refusal::BadRequest("the request line is not 'METHOD target HTTP/1.1'"),
    }
}

/// The fields of a head, those that frame or concern the connection taken out.
#[derive(Default)]
struct Fields {
    headers: HeaderMap,
    host: Option<Bytes>,
    content_length: Option<u64>,
    transfer_encoding: bool,
    close: bool,
    keep: bool,
    wants_upgrade: bool,
    upgrade: Option<HeaderValue>,
    te_trailers: bool,
    expect: Option<Bytes>,
    /// Names that Connection listed: they end here.
    listed: Vec<HeaderName>,
}

impl Fields {
    fn collect(bytes: &Bytes, parsed: &[httparse::Header<'_>]) -> Result<Self, &'static str> {
        let mut fields = Self::default();
        for field in parsed {
            let name =
                HeaderName::from_bytes(field.name.as_bytes()).map_err(|_| "a header name is not a token")?;
            let value = bytes.slice_ref(field.value);
            if let Some(value) = fields.take(&name, value)? {
                if fields.headers.is_empty() {
                    // At once for all, and not at all for a head that has nothing but a Host.
                    fields.headers.reserve(parsed.len());
                }
                fields.headers.append(name, value);
            }
        }
        Ok(fields)
    }

    /// Keeps what concerns framing and connection; gives back what goes on.
    fn take(&mut self, name: &HeaderName, value: Bytes) -> Result<Option<HeaderValue>, &'static str> {
        match *name {
            HOST => {
                if self.host.replace(value).is_some() {
                    return Err("more than one Host");
                }
            }
            CONTENT_LENGTH => {
                if self.content_length.replace(parse_length(&value)?).is_some() {
                    return Err("more than one Content-Length");
                }
            }
            TRANSFER_ENCODING => {
                // Any coding but a single `chunked` (also `identity`, `gzip, chunked`) is where smuggling lives.
                if self.transfer_encoding || !value.eq_ignore_ascii_case(b"chunked") {
                    return Err("a Transfer-Encoding other than 'chunked'");
                }
                self.transfer_encoding = true;
            }
            CONNECTION => self.connection(&value)?,
            // These end here whether Connection lists them or not.
            TRAILER | PROXY_AUTHENTICATE | PROXY_AUTHORIZATION => {}
            _ if matches!(name.as_str(), "keep-alive" | "proxy-connection") => {}
            EXPECT => match self.expect {
                None => self.expect = Some(value),
                Some(_) => return Err("more than one Expect"),
            },
            UPGRADE => self.upgrade = Some(header_value(value)?),
            TE => self.te_trailers |= value.eq_ignore_ascii_case(b"trailers"),
            _ => return header_value(value).map(Some),
        }
        Ok(None)
    }

    fn connection(&mut self, value: &[u8]) -> Result<(), &'static str> {
        for token in value.split(|&b| b == b',').map(<[u8]>::trim_ascii).filter(|t| !t.is_empty()) {
            if token.eq_ignore_ascii_case(b"close") {
                self.close = true;
            } else if token.eq_ignore_ascii_case(b"keep-alive") {
                self.keep = true;
            } else if token.eq_ignore_ascii_case(b"upgrade") {
                self.wants_upgrade = true;
            } else {
                let name = HeaderName::from_bytes(token)
                    .map_err(|_| "Connection lists something that is no name")?;
                self.listed.push(name);
            }
        }
        Ok(())
    }

    fn request_framing(&self, version: Version) -> Result<Framing, &'static str> {
        match (self.transfer_encoding, self.content_length) {
            (true, Some(_)) => Err("both Content-Length and Transfer-Encoding"),
            (true, None) if version == Version::HTTP_10 => Err("Transfer-Encoding in HTTP/1.0"),
            (true, None) => Ok(Framing::Chunked),
            (false, None | Some(0)) => Ok(Framing::None),
            (false, Some(length)) => Ok(Framing::Length(length)),
        }
    }

    fn response_framing(&self, version: Version) -> Result<Framing, &'static str> {
        match (self.transfer_encoding, self.content_length) {
            (true, Some(_)) => Err("both Content-Length and Transfer-Encoding"),
            (true, None) if version == Version::HTTP_10 => Err("Transfer-Encoding in HTTP/1.0"),
            (true, None) => Ok(Framing::Chunked),
            (false, Some(length)) => Ok(Framing::Length(length)),
            (false, None) => Ok(Framing::ToEnd),
        }
    }

    fn keep_alive(&self, version: Version) -> bool {
        !self.close && (version == Version::HTTP_11 || self.keep)
    }

    /// RFC 9110 section 7.6.1. What Connection lists goes too, except fields that mean something beyond
    /// this connection: a client could otherwise delete, say, Authorization on the way to a backend.
    fn strip_hop_by_hop(&mut self) {
        for name in std::mem::take(&mut self.listed) {
            if !is_end_to_end(&name) {
                self.headers.remove(name);
            }
        }
        self.upgrade = self.upgrade.take().filter(|_| self.wants_upgrade).and_then(other_protocols);
    }
}

/// What of `Upgrade` may be offered to a backend: all but versions of HTTP and TLS, which are this connection's. Over `h2c` requests
/// would pass that nobody here has read (RFC 9110 section 7.8).
fn other_protocols(upgrade: HeaderValue) -> Option<HeaderValue> {
    let is_other = |protocol: &&str| {
        let name = protocol.split('/').next().unwrap_or_default();
        !name.is_empty()
            && !["h2c", "h2", "h3", "http", "tls"].iter().any(|own| own.eq_ignore_ascii_case(name))
    };
    let words = || upgrade.to_str().unwrap_or_default().split(',').map(str::trim);
    let others: Vec<_> = words().filter(is_other).collect();
    if others.len() == words().count() {
        return Some(upgrade);
    }
    HeaderValue::try_from(others.join(", ")).ok().filter(|value| !value.is_empty())
}

fn is_end_to_end(name: &HeaderName) -> bool {
    use http::header;
    [
        header::AUTHORIZATION,
        header::COOKIE,
        header::CONTENT_TYPE,
        header::CONTENT_ENCODING,
        header::CONTENT_RANGE,
        header::CACHE_CONTROL,
        header::FORWARDED,
        header::VIA,
        header::RANGE,
        header::IF_MATCH,
        header::IF_NONE_MATCH,
        header::ORIGIN,
        header::REFERER,
        header::SET_COOKIE,
        header::LOCATION,
    ]
    .contains(name)
        || name.as_str().starts_with("x-forwarded-")
}

fn header_value(value: Bytes) -> Result<HeaderValue, &'static str> {
    HeaderValue::from_maybe_shared(value).map_err(|_| "a header value has a control character")
}

/// RFC 9110 section 8.6: digits only. A list like `5, 5` is refused, though it may be accepted.
fn parse_length(value: &[u8]) -> Result<u64, &'static str> {
    if value.is_empty() || value.len() > 18 || !value.iter().all(u8::is_ascii_digit) {
        return Err("Content-Length is not one number");
    }
    Ok(value.iter().fold(0, |sum, digit| sum * 10 + u64::from(digit - b'0')))
}

/// The request target (RFC 9112 section 3.2).
struct Target<'a> {
    authority: Option<&'a str>,
    path: &'a str,
    query: Option<&'a str>,
}

impl<'a> Target<'a> {
    fn parse(text: &'a str, method: &Method) -> Result<Self, Refusal> {
        if !text.bytes().all(|b| matches!(b, 0x21..=0x7e) && b != b'#') {
            return Err(Refusal::BadRequest("the target has a character that must be percent-encoded"));
        }
        // An answer to TRACE shows what the request had of credentials (RFC 9110 section 9.3.8).
        if *method == Method::CONNECT || *method == Method::TRACE {
            return Err(Refusal::MethodNotAllowed("GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"));
        }
        if text == "*" {
            return if *method == Method::OPTIONS {
                Ok(Self { authority: None, path: "*", query: None })
            } else {
                Err(Refusal::BadRequest("the target '*' is for OPTIONS only"))
            };
        }
        let (authority, rest) = match scheme_end(text) {
            Some(at) => {
                let rest = &text[at..];
                let end = rest.find(['/', '?']).unwrap_or(rest.len());
                (Some(&rest[..end]), &rest[end..])
            }
            None => (None, text),
        };
        let (path, query) = match rest.split_once('?') {
            Some((path, query)) => (path, Some(query)),
            None => (rest, None),
        };
        match (path.is_empty(), authority) {
            (true, Some(_)) if *method == Method::OPTIONS && query.is_none() => {
                Ok(Self { authority, path: "*", query })
            }
            (true, Some(_)) => Ok(Self { authority, path: "/", query }),
            _ if path.starts_with('/') => Ok(Self { authority, path, query }),
            _ => Err(Refusal::BadRequest("the target does not begin with '/'")),
        }
    }
}

fn scheme_end(text: &str) -> Option<usize> {
    ["http://", "https://"]
        .iter()
        .find(|scheme| text.get(..scheme.len()).is_some_and(|front| front.eq_ignore_ascii_case(scheme)))
        .map(|scheme| scheme.len())
}

/// Whom the request is for. RFC 9112 section 3.2.2 lets the target win over Host; they must agree here.
fn authority(target: &Target<'_>, host: Option<Bytes>, version: Version) -> Result<Authority, Refusal> {
    let host = match &host {
        Some(bytes) => {
            Some(std::str::from_utf8(bytes).map_err(|_| Refusal::BadRequest("Host is not a host name"))?)
        }
        None if version == Version::HTTP_11 => return Err(Refusal::BadRequest("no Host")),
        None => None,
    };
    let read =
        |text: &str| authority::parse(text).map_err(|_| Refusal::BadRequest("Host is not a host name"));
    match (target.authority, host) {
        (Some(from_target), Some(from_host)) => {
            let authority = read(from_target)?;
            if read(from_host)? == authority {
                Ok(authority)
            } else {
                Err(Refusal::BadRequest("Host and target name different hosts"))
            }
        }
        (Some(text), None) | (None, Some(text)) if !text.is_empty() => read(text),
        // RFC 9112 section 3.2: an empty Host is valid where the target has no authority; it is the default site's.
        _ => Ok(Authority::default()),
    }
}

#[cfg(test)]
#[path = "head_tests.rs"]
mod tests;
