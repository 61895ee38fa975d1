//! Checks the head of an HTTP/2 request. Its target is parsed as over HTTP/1 (`target`).
//!
//! h2 has already refused these by resetting the stream (RFC 9113 section 8.1.1):
//! - connection-specific fields, and `te` other than `trailers`
//! - repeated, missing or misplaced pseudo-header fields
//! - upper-case names
//! - bodies that do not have the announced length
//!
//! An invalid path or authority gets a status (`vendor/h2/NAGAYA.md`). Not here: header fields
//! between proxies (`proxy_headers`).

use std::rc::Rc;

use h2::ext::RawTarget;
use http::header::{CONTENT_LENGTH, COOKIE, EXPECT, HOST, TE};
use http::uri::Scheme;
use http::{HeaderMap, HeaderValue, Version, request};
use nagaya_base::RequestId;

use crate::http::host::UriAuthority;
use crate::http::message::{ConnInfo, RequestHead};
use crate::http::refusal::Refusal;
use crate::http::target;
use crate::http::target::HostNames;
use crate::options::EdgeLimits;

pub(crate) fn read(
    parts: request::Parts,
    conn: Rc<ConnInfo>,
    limits: &EdgeLimits,
    id: RequestId,
) -> Result<RequestHead, Refusal> {
    let request::Parts { method, uri, mut headers, extensions, .. } = parts;
    target::check_method(&method)?;
    // Before they are counted, because a client may send each cookie as a field of its own.
    join_cookies(&mut headers);
    if headers.len() > limits.header_fields {
        return Err(Refusal::HeadTooLarge);
    }
    // h2 drops the scheme if there is no authority, and has checked it.
    if uri.scheme().is_some_and(|scheme| *scheme != Scheme::HTTP && *scheme != Scheme::HTTPS) {
        return Err(Refusal::BadRequest("the scheme is neither http nor https"));
    }
    let raw = extensions.get::<RawTarget>();
    let UriAuthority { host, port } = {
        let mut hosts = headers.get_all(HOST).iter();
        let field = hosts.next().map(HeaderValue::as_bytes);
        if hosts.next().is_some() {
            return Err(Refusal::BadRequest("more than one Host"));
        }
        let authority = uri.authority().map(http::uri::Authority::as_str);
        let target = authority.or_else(|| raw.and_then(RawTarget::authority));
        target::read_authority(Version::HTTP_2, HostNames { target, scheme: uri.scheme_str(), field })?
    };
    let text = uri.path_and_query().map_or("", |target| target.as_str());
    let (path, query) = target::split(raw.and_then(RawTarget::path).unwrap_or(text), &method)?;
    check_expectation(&headers)?;
    if headers.get_all(CONTENT_LENGTH).iter().count() > 1 {
        return Err(Refusal::BadRequest("more than one Content-Length"));
    }
    for field in [HOST, TE, EXPECT] {
        headers.remove(field);
    }
    Ok(RequestHead {
        id,
        path: path.into(),
        query: query.map(Into::into),
        method,
        host,
        port,
        version: Version::HTTP_2,
        headers,
        upgrade: None,
        conn,
    })
}

/// Checks `Expect`. `100-continue` needs no response of its own here: a client may send its body
/// within the flow-control window.
fn check_expectation(headers: &HeaderMap) -> Result<(), Refusal> {
    let met = headers.get_all(EXPECT).iter().all(|value| target::is_continue(value.as_bytes()));
    if met { Ok(()) } else { Err(Refusal::ExpectationFailed) }
}

/// Joins Cookie fields. Clients may split them for compression (RFC 9113 section 8.2.3), and
/// backends expect one field.
fn join_cookies(headers: &mut HeaderMap) {
    if headers.get_all(COOKIE).iter().count() < 2 {
        return;
    }
    // Empty ones mean nothing, and would leave a separator at an end.
    let cookies = headers.get_all(COOKIE).iter().map(|cookie| cookie.as_bytes().trim_ascii());
    let cookies: Vec<_> = cookies.filter(|cookie| !cookie.is_empty()).collect();
    let joined = cookies.join(&b"; "[..]);
    let joined = HeaderValue::from_bytes(&joined).expect("joined of valid values by valid bytes");
    headers.insert(COOKIE, joined);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(method: &str, uri: &str, fields: &[(&str, &str)]) -> Result<RequestHead, Refusal> {
        check_uri(method, uri.parse().unwrap(), fields)
    }

    fn check_uri(method: &str, uri: http::Uri, fields: &[(&str, &str)]) -> Result<RequestHead, Refusal> {
        let mut request = http::Request::builder().method(method).uri(uri);
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        let conn = Rc::new(ConnInfo {
            peer: "192.0.2.7:5000".parse().unwrap(),
            local: "192.0.2.1:443".parse().unwrap(),
            tls: None,
            carried: None,
            network: None,
        });
        let (parts, ()) = request.body(()).unwrap().into_parts();
        read(parts, conn, &EdgeLimits::default(), RequestId(1))
    }

    #[test]
    fn a_head_is_taken_apart() {
        let fields = [
            ("host", "example.ORG:8443"),
            ("te", "trailers"),
            ("cookie", "a=1"),
            ("cookie", "b=2"),
            ("x", "y"),
        ];
        let head = check("GET", "https://Example.org:8443/a%20b?c=d?e", &fields).unwrap();
        assert_eq!((&*head.host, head.port), ("example.org", Some(8443)));
        assert_eq!((&*head.path, head.query.as_deref()), ("/a%20b", Some("c=d?e")));
        assert_eq!(head.headers.len(), 2);
        assert_eq!(head.headers["cookie"], "a=1; b=2");
    }

    #[test]
    fn empty_cookies_leave_no_separator() {
        for (cookies, joined) in
            [(&["a=1", ""][..], "a=1"), (&["", "a=1", " ", "b=2"], "a=1; b=2"), (&["", ""], "")]
        {
            let fields: Vec<_> = cookies.iter().map(|cookie| ("cookie", *cookie)).collect();
            let head = check("GET", "https://a/", &fields).unwrap();
            assert_eq!(head.headers["cookie"], joined);
        }
    }

    #[test]
    fn a_star_is_a_target_of_options_only() {
        let star = || {
            let star = http::Uri::builder().scheme("https").authority("a").path_and_query("*");
            star.build().unwrap()
        };
        assert_eq!(check_uri("OPTIONS", star(), &[]).map(|head| head.path), Ok("*".into()));
        assert_eq!(check_uri("GET", star(), &[]).unwrap_err().row().reason, "bad_request");
    }

    #[test]
    fn ambiguous_head_is_refused() {
        for (method, uri, fields, reason) in [
            ("GET", "https://a/", &[("host", "b")][..], "bad_request"),
            ("GET", "https://a/", &[("host", "a:80")], "bad_request"),
            ("GET", "https://a/", &[("host", "a"), ("host", "a")], "bad_request"),
            ("GET", "https://u@a/", &[], "bad_request"),
            ("GET", "https://a:99999/", &[], "bad_request"),
            ("GET", "/", &[], "bad_request"),
            ("GET", "ftp://a/", &[], "bad_request"),
            ("POST", "https://a/", &[("content-length", "1"), ("content-length", "1")], "bad_request"),
            ("CONNECT", "a:443", &[], "method"),
            ("TRACE", "https://a/", &[], "method"),
            ("GET", "https://a/\u{e4}", &[], "bad_request"),
            ("GET", "https://a/?\u{e4}", &[], "bad_request"),
            ("GET", "https://a/", &[("expect", "a miracle")], "expectation"),
        ] {
            let refusal = check(method, uri, fields).unwrap_err();
            assert_eq!(refusal.row().reason, reason, "{method} {uri} {fields:?}");
        }
        let many: Vec<_> = (0..=EdgeLimits::default().header_fields).map(|n| format!("x{n}")).collect();
        let many: Vec<_> = many.iter().map(|name| (name.as_str(), "")).collect();
        assert_eq!(check("GET", "https://a/", &many).unwrap_err(), Refusal::HeadTooLarge);
    }
}
