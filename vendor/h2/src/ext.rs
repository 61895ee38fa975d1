//! Extensions specific to the HTTP/2 protocol.

use crate::hpack::BytesStr;

use bytes::Bytes;
use std::fmt;

/// Represents the `:protocol` pseudo-header used by
/// the [Extended CONNECT Protocol].
///
/// [Extended CONNECT Protocol]: https://datatracker.ietf.org/doc/html/rfc8441#section-4
#[derive(Clone, Eq, PartialEq)]
pub struct Protocol {
    value: BytesStr,
}

impl Protocol {
    /// Converts a static string to a protocol name.
    pub const fn from_static(value: &'static str) -> Self {
        Self {
            value: BytesStr::from_static(value),
        }
    }

    /// Returns a str representation of the header.
    pub fn as_str(&self) -> &str {
        self.value.as_str()
    }

    pub(crate) fn try_from(bytes: Bytes) -> Result<Self, std::str::Utf8Error> {
        Ok(Self {
            value: BytesStr::try_from(bytes)?,
        })
    }
}

impl<'a> From<&'a str> for Protocol {
    fn from(value: &'a str) -> Self {
        Self {
            value: BytesStr::from(value),
        }
    }
}

impl AsRef<[u8]> for Protocol {
    fn as_ref(&self) -> &[u8] {
        self.value.as_ref()
    }
}

impl fmt::Debug for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.value.fmt(f)
    }
}

/// nagaya: pseudo-header fields of a request that `http::Uri` cannot hold. A server finds it among the
/// extensions of the request, whose `Uri` then has a path of `/` or no authority, and answers with a status.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct RawTarget {
    authority: Option<BytesStr>,
    path: Option<BytesStr>,
}

impl RawTarget {
    /// `:authority` as it came, if it is no `http::uri::Authority`.
    pub fn authority(&self) -> Option<&str> {
        self.authority.as_ref().map(BytesStr::as_str)
    }

    /// `:path` as it came, if it is no `http::uri::PathAndQuery`, or one of which a fragment was cut off.
    pub fn path(&self) -> Option<&str> {
        self.path.as_ref().map(BytesStr::as_str)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.authority.is_none() && self.path.is_none()
    }

    pub(crate) fn set_authority(&mut self, authority: BytesStr) {
        self.authority = Some(authority);
    }

    pub(crate) fn set_path(&mut self, path: BytesStr) {
        self.path = Some(path);
    }
}
