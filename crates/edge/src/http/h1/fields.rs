//! Reads the fields of a head. Fields that frame the message or concern the connection are taken
//! out of it.
//!
//! A client's fields are read strictly. A backend's may be sloppy where that leaves one reading.
//! `docs/http-readings.md` has the table. Not here: lines and their ends (`head`, `response_head`),
//! fields that go on (`proxy_headers`).

use bytes::Bytes;
use http::header::{
    CONNECTION, CONTENT_LENGTH, EXPECT, HOST, HeaderName, HeaderValue, PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use http::{HeaderMap, Version};

use crate::http::h1::framing::{BodyFraming, HeadSender};
use crate::http::target::is_continue;

/// The value of `Transfer-Encoding`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum TransferCoding {
    /// The field is absent.
    #[default]
    Absent,
    /// `identity` alone, which means no coding (RFC 2616 section 3.6). Backends only.
    Identity,
    Chunked,
}

/// The fields of a head, without those that frame the message or concern the connection.
#[derive(Default)]
pub(super) struct HeadFields {
    pub headers: HeaderMap,
    pub host: Option<Bytes>,
    pub content_length: Option<u64>,
    pub upgrade: Option<HeaderValue>,
    pub te_trailers: bool,
    pub expect: Option<Bytes>,
    peer: HeadSender,
    coding: TransferCoding,
    close: bool,
    keep: bool,
    wants_upgrade: bool,
    /// Names listed in Connection. These fields end here.
    listed: Vec<HeaderName>,
}

impl HeadFields {
    pub fn collect(
        bytes: &Bytes,
        parsed: &[httparse::Header<'_>],
        peer: HeadSender,
    ) -> Result<Self, &'static str> {
        let mut fields = Self { peer, ..Self::default() };
        for field in parsed {
            let name =
                HeaderName::from_bytes(field.name.as_bytes()).map_err(|_| "a header name is not a token")?;
            let value = bytes.slice_ref(field.value);
            if let Some(value) = fields.take(&name, value)? {
                if fields.headers.is_empty() {
                    // One allocation for all, and none for a head with only a Host.
                    fields.headers.reserve(parsed.len());
                }
                fields.headers.append(name, value);
            }
        }
        Ok(fields)
    }

    /// Keeps fields of framing and connection. Returns the value of a field that is forwarded.
    fn take(&mut self, name: &HeaderName, value: Bytes) -> Result<Option<HeaderValue>, &'static str> {
        match *name {
            CONTENT_LENGTH => self.take_length(&value)?,
            TRANSFER_ENCODING => self.take_coding(&value)?,
            CONNECTION => self.take_connection(&value)?,
            // Request fields: in a response they mean nothing.
            HOST | EXPECT if self.peer == HeadSender::Backend => {}
            HOST => {
                if self.host.replace(value).is_some() {
                    return Err("more than one Host");
                }
            }
            // These end here whether Connection lists them or not.
            TRAILER | PROXY_AUTHENTICATE | PROXY_AUTHORIZATION => {}
            _ if matches!(name.as_str(), "keep-alive" | "proxy-connection") => {}
            // An expectation that cannot be met decides.
            EXPECT if self.expect.is_some() && is_continue(&value) => {}
            EXPECT => self.expect = Some(value),
            UPGRADE => self.upgrade = Some(header_value(value)?),
            TE => self.te_trailers |= value.eq_ignore_ascii_case(b"trailers"),
            _ => return header_value(value).map(Some),
        }
        Ok(None)
    }

    fn take_length(&mut self, value: &[u8]) -> Result<(), &'static str> {
        match self.peer {
            HeadSender::Client => {
                if self.content_length.replace(parse_length(value)?).is_some() {
                    return Err("more than one Content-Length");
                }
            }
            // RFC 9110 section 8.6: several equal numbers count as one.
            HeadSender::Backend => {
                for part in value.split(|&byte| byte == b',') {
                    let length = parse_length(part.trim_ascii())?;
                    if self.content_length.replace(length).is_some_and(|before| before != length) {
                        return Err("two values of Content-Length");
                    }
                }
            }
        }
        Ok(())
    }

    fn take_coding(&mut self, value: &[u8]) -> Result<(), &'static str> {
        // Any coding but a single `chunked` (also `gzip, chunked`) allows smuggling.
        const OTHER: &str = "a Transfer-Encoding other than 'chunked'";
        let is_first = self.coding == TransferCoding::Absent;
        self.coding = match self.peer {
            HeadSender::Client if is_first && value.eq_ignore_ascii_case(b"chunked") => {
                TransferCoding::Chunked
            }
            HeadSender::Backend if is_first => {
                // RFC 9110 section 5.6.1: empty elements of a list are ignored.
                let mut codings = value
                    .split(|&byte| byte == b',')
                    .map(<[u8]>::trim_ascii)
                    .filter(|coding| !coding.is_empty());
                match (codings.next(), codings.next()) {
                    (Some(coding), None) if coding.eq_ignore_ascii_case(b"chunked") => {
                        TransferCoding::Chunked
                    }
                    (Some(coding), None) if coding.eq_ignore_ascii_case(b"identity") => {
                        TransferCoding::Identity
                    }
                    _ => return Err(OTHER),
                }
            }
            _ => return Err(OTHER),
        };
        Ok(())
    }

    fn take_connection(&mut self, value: &[u8]) -> Result<(), &'static str> {
        for token in value.split(|&b| b == b',').map(<[u8]>::trim_ascii).filter(|t| !t.is_empty()) {
            if token.eq_ignore_ascii_case(b"close") {
                self.close = true;
            } else if token.eq_ignore_ascii_case(b"keep-alive") {
                self.keep = true;
            } else if token.eq_ignore_ascii_case(b"upgrade") {
                self.wants_upgrade = true;
            } else {
                match (HeaderName::from_bytes(token), self.peer) {
                    (Ok(name), _) => self.listed.push(name),
                    (Err(_), HeadSender::Client) => return Err("Connection lists something that is no name"),
                    // It is no field name. The sender may have meant to end the connection
                    // (`close;x`), so it ends.
                    (Err(_), HeadSender::Backend) => self.close = true,
                }
            }
        }
        Ok(())
    }

    pub fn request_framing(&self, version: Version) -> Result<BodyFraming, &'static str> {
        match (self.coding == TransferCoding::Chunked, self.content_length) {
            (true, Some(_)) => Err("both Content-Length and Transfer-Encoding"),
            (true, None) if version == Version::HTTP_10 => Err("Transfer-Encoding in HTTP/1.0"),
            (true, None) => Ok(BodyFraming::Chunked),
            (false, None | Some(0)) => Ok(BodyFraming::None),
            (false, Some(length)) => Ok(BodyFraming::Length(length)),
        }
    }

    pub fn response_framing(&self) -> Result<BodyFraming, &'static str> {
        match (self.coding, self.content_length) {
            (TransferCoding::Absent, Some(length)) => Ok(BodyFraming::Length(length)),
            (_, Some(_)) => Err("both Content-Length and Transfer-Encoding"),
            (TransferCoding::Chunked, None) => Ok(BodyFraming::Chunked),
            // RFC 9112 section 6.3 item 4, and item 8.
            (TransferCoding::Identity | TransferCoding::Absent, None) => Ok(BodyFraming::ToEnd),
        }
    }

    /// Returns whether another message may follow on the connection.
    pub fn keep_alive(&self, version: Version) -> bool {
        // RFC 9112 section 6.1: an HTTP/1.0 message with a transfer coding may be framed wrongly.
        let is_doubtful = version == Version::HTTP_10 && self.coding != TransferCoding::Absent;
        !self.close && !is_doubtful && (version == Version::HTTP_11 || self.keep)
    }

    /// Removes hop-by-hop fields (RFC 9110 section 7.6.1). Fields listed in Connection go, too,
    /// except those with a meaning beyond this connection. Otherwise a client could delete e.g.
    /// Authorization on the way to a backend.
    pub fn strip_hop_by_hop(&mut self) {
        for name in std::mem::take(&mut self.listed) {
            if !is_end_to_end(&name) {
                self.headers.remove(name);
            }
        }
        self.upgrade = self.upgrade.take().filter(|_| self.wants_upgrade).and_then(other_protocols);
    }
}

/// Returns the part of `Upgrade` that may be offered to a backend: all but versions of HTTP and
/// TLS. Those concern this connection. Requests over `h2c` would bypass our checks (RFC 9110
/// section 7.8).
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

/// Parses a length of digits only (RFC 9110 section 8.6). A list like `5, 5` is refused, though
/// it may be accepted.
fn parse_length(value: &[u8]) -> Result<u64, &'static str> {
    if value.is_empty() || value.len() > 18 || !value.iter().all(u8::is_ascii_digit) {
        return Err("Content-Length is not one number");
    }
    Ok(value.iter().fold(0, |sum, digit| sum * 10 + u64::from(digit - b'0')))
}
