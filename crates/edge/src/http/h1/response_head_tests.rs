//! Tables of answers' heads: sloppy ones that have one reading, and those that two readers could take in two ways.

use proptest::prelude::*;

use super::*;

const BYTES_MAX: usize = 4096;

/// What is read of a head that comes in pieces of `step` bytes, and what is left behind it.
fn read(text: &[u8], step: usize) -> Result<(ResponseHead, Vec<u8>), &'static str> {
    let (mut buffer, mut scanned) = (BytesMut::new(), 0);
    let mut pieces = text.chunks(step);
    while let Some(piece) = pieces.next() {
        buffer.extend_from_slice(piece);
        if let Some(end) = find_end(&buffer, &mut scanned, BYTES_MAX)? {
            let head = parse(&mut buffer, end, false)?;
            return Ok((head, [&buffer[..], &pieces.collect::<Vec<_>>().concat()].concat()));
        }
    }
    Err("incomplete")
}

/// What matters of an answer to whoever passes it on.
fn told(text: &str) -> Result<(u16, BodyFraming, bool, String), &'static str> {
    let whole = read(text.as_bytes(), text.len())?;
    for step in 1..text.len() {
        let pieces =
            read(text.as_bytes(), step).unwrap_or_else(|error| panic!("{text:?} by {step}: {error}"));
        assert_eq!((&pieces.0.headers, &pieces.1), (&whole.0.headers, &whole.1), "{text:?} by {step}");
    }
    let (head, rest) = whole;
    assert_eq!(rest, b"BODY", "{text:?}");
    let fields: Vec<_> =
        head.headers.iter().map(|(name, value)| format!("{name}={}", value.to_str().unwrap())).collect();
    Ok((head.status.as_u16(), head.framing, head.keep_alive, fields.join(",")))
}

#[test]
fn sloppy_heads_with_one_reading_are_read() {
    let (two, chunked, to_end) = (BodyFraming::Length(2), BodyFraming::Chunked, BodyFraming::ToEnd);
    for (text, framing, keeps, fields) in [
        ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX: y\r\n\r\n", two, true, "x=y"),
        // The same length again, and as a list.
        ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\n", two, true, ""),
        ("HTTP/1.1 200 OK\r\nContent-Length: 2, 2\r\ncontent-length: 02\r\n\r\n", two, true, ""),
        // Line ends.
        ("HTTP/1.1 200 OK\nContent-Length: 2\nX: y\n\n", two, false, "x=y"),
        ("HTTP/1.1 200 OK\r\nContent-Length: 2\nX: y\r\n\n", two, false, "x=y"),
        ("HTTP/1.1 200 OK\nContent-Length: 2\n\r\n", two, false, ""),
        // Codings.
        ("HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", chunked, false, ""),
        (
            "HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n",
            chunked,
            false,
            "",
        ),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: , Chunked ,\r\n\r\n", chunked, true, ""),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: identity\r\n\r\n", to_end, false, ""),
        // Tokens of Connection that name nothing, and fields that an answer does not have.
        ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close;x, (y)\r\n\r\n", two, false, ""),
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nHost: a\r\nHost: b\r\nExpect: c\r\nExpect: d\r\n\r\n",
            two,
            true,
            "",
        ),
        // Blanks and folds.
        ("HTTP/1.1 200 OK\r\nContent-Length : 2\r\nX\t: y\r\n\r\n", two, false, "x=y"),
        ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX: y\r\n  z\r\n\tw\r\n\r\n", two, false, "x=y z w"),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding:\r\n chunked\r\n\r\n", chunked, false, ""),
        ("HTTP/1.1   200 OK\r\nContent-Length: 2\r\n\r\n", two, false, ""),
        ("HTTP/1.1\t200\r\nContent-Length: 2\r\n\r\n", two, false, ""),
        ("HTTP/1.7 200 OK\r\nContent-Length: 2\r\n\r\n", two, false, ""),
    ] {
        let read = told(&format!("{text}BODY"));
        assert_eq!(read, Ok((200, framing, keeps, fields.to_owned())), "{text:?}");
    }
}

#[test]
fn usual_heads_are_read() {
    let head = |text: &str| read(text.as_bytes(), text.len()).unwrap().0;
    assert_eq!(head("HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n").framing, BodyFraming::None);
    assert_eq!(head("HTTP/1.1 103 Early Hints\r\nLink: <a>\r\n\r\n").framing, BodyFraming::None);
    assert_eq!(head("HTTP/1.0 200 OK\r\n\r\n").framing, BodyFraming::ToEnd);
    assert!(head("HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 0\r\n\r\n").keep_alive);
    let many = "X: 1\r\n".repeat(900);
    assert_eq!(
        read(format!("HTTP/1.1 200 OK\r\n{many}\r\n").as_bytes(), 7).unwrap_err(),
        "its head is too large"
    );
}

#[test]
fn heads_with_two_readings_are_refused_with_their_reason() {
    for (text, reason) in [
        ("HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", "two values of Content-Length"),
        ("HTTP/1.1 200 OK\r\nContent-Length: 5, 6\r\n\r\n", "two values of Content-Length"),
        ("HTTP/1.1 200 OK\r\nContent-Length: 5,\r\n\r\n", "Content-Length is not one number"),
        ("HTTP/1.1 200 OK\r\nContent-Length: +5\r\n\r\n", "Content-Length is not one number"),
        ("HTTP/1.1 200 OK\r\nContent-Length: 1\r\n 2\r\n\r\n", "Content-Length is not one number"),
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
            "both Content-Length and Transfer-Encoding",
        ),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: identity\r\nContent-Length: 5\r\n\r\n",
            "both Content-Length and Transfer-Encoding",
        ),
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding : chunked\r\n\r\n",
            "both Content-Length and Transfer-Encoding",
        ),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
            "a Transfer-Encoding other than 'chunked'",
        ),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
            "a Transfer-Encoding other than 'chunked'",
        ),
        ("HTTP/1.1 200 OK\r\nX: a\rb\r\n\r\n", "a bare carriage return or a NUL byte"),
        ("HTTP/1.1 200 OK\r\nX: a\0b\r\n\r\n", "a bare carriage return or a NUL byte"),
        ("HTTP/1.1 200 OK\r\n X: a\r\n\r\n", "a line begins with a blank before the first field"),
        ("HTTP/1.1 200 OK\r\nno field\r\n\r\n", "a line that is no field"),
        ("HTTP/1.1 200 OK\r\nX y: a\r\n\r\n", "a header name is not a token"),
        ("HTTP/1.1 200 OK\r\n: a\r\n\r\n", "a header name is not a token"),
        ("ICY 200 OK\r\n\r\n", "its head is not HTTP/1"),
        ("HTTP/2.0 200 OK\r\n\r\n", "its head is not HTTP/1"),
        ("HTTP/1.1200 OK\r\n\r\n", "its head is not HTTP/1"),
        ("HTTP/1.10 200 OK\r\n\r\n", "its head is not HTTP/1"),
        ("hello\r\n\r\n", "its head is not HTTP/1"),
        ("HTTP/1.1 99 Low\r\n\r\n", "its head is not HTTP/1"),
    ] {
        let read = read(text.as_bytes(), text.len()).map(|(head, _)| head);
        assert_eq!(read.map(|head| format!("{head:?}")), Err(reason), "{text:?}");
    }
}

proptest! {
    #[test]
    fn no_bytes_make_the_parser_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300), step in 1usize..50) {
        let _ = read(&bytes, step);
        let _ = read(&[b"HTTP/1.1 200 OK\n", &bytes[..], b"\n\n"].concat(), step);
    }

    #[test]
    fn rewritten_head_keeps_all_names_and_values(
        lines in proptest::collection::vec(("[a-z]{1,5}", "[ \t]{0,2}", "[ -~]{0,12}", prop_oneof![Just("\n"), Just("\r\n")]), 0..6),
    ) {
        let text: String = lines.iter().map(|(name, blank, value, end)| format!("x-{name}{blank}:{value}{end}")).collect();
        let (head, _) = read(format!("HTTP/1.1 200 OK\n{text}\r\n").as_bytes(), 9).unwrap();
        let got: Vec<_> = head.headers.iter().map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned())).collect();
        let mut sent: Vec<_> = lines.iter().map(|(name, _, value, _)| (format!("x-{name}"), value.trim_matches([' ', '\t']).to_owned())).collect();
        let mut got = got;
        got.sort();
        sent.sort();
        prop_assert_eq!(got, sent);
    }
}
