//! Parses the target of a request in the same way for every version of HTTP: method, path, query
//! and host.
//!
//! `docs/http-readings.md` has the table. Not here: the meaning of the path (`path`), the site of
//! the host (`router`).

use http::{Method, Version};

use crate::http::host;
use crate::http::host::UriAuthority;
use crate::http::refusal::Refusal;

/// All methods but CONNECT and TRACE.
const ALLOWED: &str = "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS";

/// The parts of a request that name its host.
#[derive(Debug, Clone, Copy, Default)]
pub struct HostNames<'a> {
    /// Of an absolute target, or `:authority`.
    pub target: Option<&'a str>,
    /// Its scheme, if it is known.
    pub scheme: Option<&'a str>,
    /// The field `Host`.
    pub field: Option<&'a [u8]>,
}

/// # Errors
/// Fails if no site supports this method.
pub fn check_method(method: &Method) -> Result<(), Refusal> {
    // A response to TRACE shows the credentials of the request (RFC 9110 section 9.3.8).
    if *method == Method::CONNECT || *method == Method::TRACE {
        return Err(Refusal::MethodNotAllowed(ALLOWED));
    }
    Ok(())
}

/// Returns whether the method is one of RFC 9110 section 9 or RFC 5789. They define the response
/// if it is not allowed.
pub fn is_known(method: &Method) -> bool {
    [
        Method::GET,
        Method::HEAD,
        Method::POST,
        Method::PUT,
        Method::PATCH,
        Method::DELETE,
        Method::OPTIONS,
        Method::CONNECT,
        Method::TRACE,
    ]
    .contains(method)
}

/// Splits path and query, as sent in a request line or in `:path`.
///
/// Some characters must be encoded by RFC 3986, but have only one meaning. These (`"`, `<`, `>`,
/// `` ` `` and others of ASCII) are accepted unchanged.
///
/// # Errors
/// Fails if it is neither a path nor `*`, or has a character that servers read differently.
pub fn split<'a>(text: &'a str, method: &Method) -> Result<(&'a str, Option<&'a str>), Refusal> {
    check_characters(text)?;
    if text == "*" {
        return if *method == Method::OPTIONS {
            Ok(("*", None))
        } else {
            Err(Refusal::BadRequest("the target '*' is for OPTIONS only"))
        };
    }
    if !text.starts_with('/') {
        return Err(Refusal::BadRequest("the target does not begin with '/'"));
    }
    Ok(match text.split_once('?') {
        Some((path, query)) => (path, Some(query)),
        None => (text, None),
    })
}

/// # Errors
/// Fails on whitespace, a control character, a byte that is not ASCII, or a fragment.
pub fn check_characters(text: &str) -> Result<(), Refusal> {
    if text.bytes().all(|byte| matches!(byte, 0x21..=0x7e) && byte != b'#') {
        Ok(())
    } else {
        Err(Refusal::BadRequest("the target has a character that must be percent-encoded"))
    }
}

/// Returns the host of the request. By RFC 9112 section 3.2.2 the target overrides Host. Here
/// they must agree.
///
/// # Errors
/// Fails if nothing names a host, if it is no host name, or if two hosts are named.
pub fn read_authority(version: Version, names: HostNames<'_>) -> Result<UriAuthority, Refusal> {
    let read = |text: &str| host::parse(text).map_err(|_| Refusal::BadRequest("Host is not a host name"));
    let field = match names.field.map(std::str::from_utf8) {
        Some(text) => Some(text.map_err(|_| Refusal::BadRequest("Host is not a host name"))?),
        // RFC 9112 section 3.2. An absolute target does not replace it.
        None if version == Version::HTTP_11 => return Err(Refusal::BadRequest("no Host")),
        None => None,
    };
    match (names.target, field) {
        (Some(target), Some(field)) => {
            let authority = read(target)?;
            if is_same(&authority, &read(field)?, names.scheme) {
                Ok(authority)
            } else {
                Err(Refusal::BadRequest("Host and target name different hosts"))
            }
        }
        (Some(text), None) | (None, Some(text)) if !text.is_empty() => read(text),
        (None, None) if version != Version::HTTP_10 => Err(Refusal::BadRequest("no Host")),
        // RFC 9112 section 3.2: an empty Host is valid if the target has no authority. It means
        // the default site.
        _ => Ok(UriAuthority::default()),
    }
}

/// RFC 9110 section 4.2.3: the scheme's own port is the same as none.
fn is_same(a: &UriAuthority, b: &UriAuthority, scheme: Option<&str>) -> bool {
    let own = match scheme {
        Some(scheme) if scheme.eq_ignore_ascii_case("http") => Some(80),
        Some(scheme) if scheme.eq_ignore_ascii_case("https") => Some(443),
        _ => None,
    };
    let port = |authority: &UriAuthority| authority.port.or(own);
    a.host == b.host && port(a) == port(b)
}

/// Returns whether a value of `Expect` is the supported one.
pub fn is_continue(value: &[u8]) -> bool {
    value.eq_ignore_ascii_case(b"100-continue")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_split_as_they_are() {
        let get = Method::GET;
        for (text, path, query) in [
            ("/", "/", None),
            ("/a?b?c", "/a", Some("b?c")),
            ("/?", "/", Some("")),
            ("/file<1>`2`", "/file<1>`2`", None),
            ("/x?q=\"a\"&r=<b>^|{}", "/x", Some("q=\"a\"&r=<b>^|{}")),
        ] {
            assert_eq!(split(text, &get), Ok((path, query)), "{text}");
        }
        assert_eq!(split("*", &Method::OPTIONS), Ok(("*", None)));
        for text in ["", "*", "a", "?a", "/a b", "/a#b", "/a?b#c", "/\u{e4}", "/a?\u{e4}", "/\u{7f}", "/\t"] {
            assert!(matches!(split(text, &get), Err(Refusal::BadRequest(_))), "{text}");
        }
    }

    #[test]
    fn names_of_one_host_agree() {
        let read = |version, target, scheme, field: Option<&'static str>| {
            let field = field.map(str::as_bytes);
            let authority = read_authority(version, HostNames { target, scheme, field });
            authority.map(|authority| format!("{}:{:?}", authority.host, authority.port)).ok()
        };
        let (h10, h11, h2) = (Version::HTTP_10, Version::HTTP_11, Version::HTTP_2);
        for (version, target, scheme, field, expected) in [
            (h11, None, None, Some("A.test"), Some("a.test:None")),
            (h11, Some("a.test"), Some("http"), Some("a.test:80"), Some("a.test:None")),
            (h11, Some("a.test:80"), Some("HTTP"), Some("a.test"), Some("a.test:Some(80)")),
            (h11, Some("a.test"), Some("https"), Some("a.test:443"), Some("a.test:None")),
            (h11, Some("a.test"), Some("https"), Some("a.test:80"), None),
            (h11, Some("a.test"), Some("http"), Some("b.test"), None),
            (h11, Some("a.test"), Some("http"), None, None),
            (h11, None, None, None, None),
            (h11, None, None, Some(""), Some(":None")),
            (h10, None, None, None, Some(":None")),
            (h10, Some("a.test"), Some("http"), None, Some("a.test:None")),
            (h2, Some("a.test"), Some("https"), None, Some("a.test:None")),
            (h2, Some("a.test"), Some("https"), Some("a.test:443"), Some("a.test:None")),
            (h2, None, None, Some("a.test:8443"), Some("a.test:Some(8443)")),
            (h2, Some("u@a.test"), None, None, None),
            (h2, None, None, None, None),
        ] {
            assert_eq!(
                read(version, target, scheme, field).as_deref(),
                expected,
                "{version:?} {target:?} {field:?}"
            );
        }
    }
}
