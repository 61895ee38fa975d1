//! Tables of heads that are accepted, and of heads that two parsers could read differently and that are refused.

use proptest::prelude::*;

use super::*;

const LIMITS: HeadLimits = HeadLimits { bytes: 4096, fields: 20 };

fn parse(text: &[u8]) -> Result<ParsedHead, Refusal> {
    let mut buffer = BytesMut::from(text);
    let mut scanned = 0;
    match find_end(&buffer, &mut scanned, LIMITS)? {
        Some(end) => parse_request(&mut buffer, end, LIMITS),
        None => Err(Refusal::BadRequest("incomplete")),
    }
}

#[test]
fn ordinary_heads_are_read() {
    let head =
        parse(b"GET /a/b?c=d HTTP/1.1\r\nHost: Example.org:81\r\nX-A: 1\r\nConnection: keep-alive\r\n\r\n")
            .unwrap();
    assert_eq!((&*head.path, head.query.as_deref()), ("/a/b", Some("c=d")));
    assert_eq!((&*head.authority.host, head.authority.port), ("example.org", Some(81)));
    assert_eq!(head.headers.len(), 1);
    assert!(head.keep_alive);
    let head = parse(
        b"POST http://a.b/x HTTP/1.1\r\nHost: a.b\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n",
    )
    .unwrap();
    assert_eq!((&*head.path, head.framing, head.expect_continue), ("/x", BodyFraming::Length(5), true));
    let head =
        parse(b"PUT / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: Chunked\r\nTE: trailers\r\n\r\n").unwrap();
    assert_eq!((head.framing, head.trailers), (BodyFraming::Chunked, true));
    let head = parse(b"GET / HTTP/1.0\r\n\r\n").unwrap();
    assert_eq!((&*head.authority.host, head.keep_alive), ("", false));
    let head = parse(b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    assert_eq!(&*head.path, "*");
}

#[test]
fn a_higher_minor_version_is_read_as_the_highest_known() {
    for minor in 2..=9 {
        let text = format!("GET /a HTTP/1.{minor}\r\nHost: a\r\nX: HTTP/1.{minor}\r\n\r\n");
        let head = parse(text.as_bytes()).unwrap();
        assert_eq!((head.version, &*head.path, head.keep_alive), (Version::HTTP_11, "/a", true), "{text}");
        assert_eq!(head.headers["x"], format!("HTTP/1.{minor}"));
    }
}

#[test]
fn no_other_version_of_http_is_offered_on() {
    for (asked, offered) in [
        ("websocket", Some("websocket")),
        ("WebSocket, x/2", Some("WebSocket, x/2")),
        ("h2c", None),
        ("H2C", None),
        ("h2c, h2, HTTP/2.0, TLS/1.2", None),
        ("h2c, websocket", Some("websocket")),
    ] {
        let wire = format!(
            "GET / HTTP/1.1\r\nHost: a\r\nConnection: upgrade, HTTP2-Settings\r\nUpgrade: {asked}\r\nHTTP2-Settings: AAM\r\n\r\n"
        );
        let head = parse(wire.as_bytes()).unwrap();
        assert_eq!(head.upgrade.as_ref().map(|value| value.to_str().unwrap()), offered, "{asked}");
        assert!(head.headers.is_empty());
    }
    let trace = parse(b"TRACE / HTTP/1.1\r\nHost: a\r\nCookie: a=b\r\n\r\n").unwrap_err();
    assert_eq!(trace.row().status, 405);
}

#[test]
fn ambiguous_heads_are_refused() {
    let bad: &[&str] = &[
        "GET / HTTP/1.1\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a, b\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: u@a\r\n\r\n",
        "GET http://b/ HTTP/1.1\r\nHost: a\r\n\r\n",
        "GET / HTTP/1.1\r\nHost : a\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a\r\nX y: 1\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a\r\nX: 1\r\n 2\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a\nX: 1\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a\r\nX: 1\rY: 2\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a\r\nX: \0\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a\r\n: 1\r\n\r\n",
        "GET  / HTTP/1.1\r\nHost: a\r\n\r\n",
        "GET /a b HTTP/1.1\r\nHost: a\r\n\r\n",
        "GET /\u{e4} HTTP/1.1\r\nHost: a\r\n\r\n",
        "GET /#f HTTP/1.1\r\nHost: a\r\n\r\n",
        "GET a HTTP/1.1\r\nHost: a\r\n\r\n",
        "GET * HTTP/1.1\r\nHost: a\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5, 5\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +5\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5 5\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: \r\n\r\n",
        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0x5\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: identity\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: \"chunked\"\r\n\r\n",
        "POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: a\r\nExpect: 200-maybe\r\n\r\n",
        "GET / HTTP/2.0\r\nHost: a\r\n\r\n",
        "GET / HTTP/1.10\r\nHost: a\r\n\r\n",
        "GET / HTTP/1.x\r\nHost: a\r\n\r\n",
        "GET /HTTP/1.2\r\nHost: a\r\n\r\n",
        "GET / HTTP/1.1 \r\nHost: a\r\n\r\n",
        "GET / http/1.1\r\nHost: a\r\n\r\n",
        "G\u{7f}T / HTTP/1.1\r\nHost: a\r\n\r\n",
        "CONNECT a:443 HTTP/1.1\r\nHost: a:443\r\n\r\n",
        "GET /\r\nHost: a\r\n\r\n",
    ];
    for text in bad {
        assert!(parse(text.as_bytes()).is_err(), "{text:?}");
    }
    // Transfer-Encoding hidden behind a tab or a vertical tab.
    assert!(parse(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding:\x0bchunked\r\n\r\n").is_err());
    assert!(parse(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding\t: chunked\r\n\r\n").is_err());
}

#[test]
fn limits_have_their_own_refusals() {
    let long = format!("GET /{} HTTP/1.1\r\nHost: a\r\n\r\n", "x".repeat(5000));
    assert_eq!(parse(long.as_bytes()).unwrap_err(), Refusal::HeadTooLarge);
    assert_eq!(parse(&long.as_bytes()[..4200]).unwrap_err(), Refusal::TargetTooLong);
    let fields = format!("GET / HTTP/1.1\r\nHost: a\r\n{}\r\n", "X: 1\r\n".repeat(30));
    assert_eq!(parse(fields.as_bytes()).unwrap_err(), Refusal::HeadTooLarge);
}

#[test]
fn as_many_fields_are_read_as_may_be_configured() {
    let limits = HeadLimits { bytes: 96 << 10, fields: HEADER_FIELDS_MAX };
    for (count, is_read) in [(256, true), (HEADER_FIELDS_MAX, true), (HEADER_FIELDS_MAX + 1, false)] {
        let more: String = (1..count).map(|number| format!("X-{number}: 1\r\n")).collect();
        let text = format!("GET / HTTP/1.1\r\nHost: a\r\n{more}\r\n");
        let mut buffer = BytesMut::from(text.as_bytes());
        let end = find_end(&buffer, &mut 0, limits).unwrap().unwrap();
        assert_eq!(parse_request(&mut buffer, end, limits).is_ok(), is_read, "{count} fields");
    }
}

#[test]
fn connection_names_end_here_but_cannot_remove_what_matters() {
    let head = parse(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: X-Hop, Authorization, close\r\nX-Hop: 1\r\nAuthorization: b\r\n\r\n").unwrap();
    assert!(!head.keep_alive);
    assert_eq!(head.headers.keys().map(|k| k.as_str()).collect::<Vec<_>>(), ["authorization"]);
    let head = parse(b"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\n\r\n").unwrap();
    assert!(head.upgrade.is_none(), "without Connection: upgrade it is not one");
}

proptest! {
    #[test]
    fn no_bytes_make_the_parser_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = parse(&bytes);
    }

    #[test]
    fn whatever_is_accepted_has_one_framing(fields in proptest::collection::vec(prop_oneof![
        Just("Content-Length: 5"), Just("Content-Length: 6"), Just("Transfer-Encoding: chunked"),
        Just("Transfer-Encoding: identity"), Just("content-length:5"), Just("X: y"), Just("Transfer-Encoding : chunked"),
    ], 0..4)) {
        let text = format!("POST / HTTP/1.1\r\nHost: a\r\n{}\r\n", fields.iter().map(|f| format!("{f}\r\n")).collect::<String>());
        if parse(text.as_bytes()).is_ok() {
            let framing = fields.iter().filter(|f| !f.starts_with('X')).count();
            prop_assert!(framing <= 1, "{text}");
        }
    }
}
