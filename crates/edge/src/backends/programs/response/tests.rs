//! Facts about the heads programs may print.

use proptest::prelude::*;

use super::*;

/// The result of output that arrives in one piece and then ends.
fn read(output: &[u8]) -> Result<(ScriptHead, Bytes), HeadError> {
    let mut reader = HeadReader::default();
    match reader.feed(Bytes::copy_from_slice(output))? {
        Some(complete) => Ok(complete),
        None => Err(reader.ended()),
    }
}

fn read_in_pieces(output: &[u8], cuts: &[usize]) -> Result<(ScriptHead, Vec<u8>), HeadError> {
    let mut reader = HeadReader::default();
    let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut % (output.len() + 1)).collect();
    cuts.push(output.len());
    cuts.sort_unstable();
    let mut from = 0;
    for to in cuts {
        let piece = Bytes::copy_from_slice(&output[from..to]);
        from = to;
        if let Some((head, rest)) = reader.feed(piece)? {
            return Ok((head, [&rest[..], &output[to..]].concat()));
        }
    }
    Err(reader.ended())
}

fn document(output: &str) -> (u16, Vec<(String, String)>, Option<u64>, String) {
    let (head, body) = read(output.as_bytes()).unwrap();
    let ScriptHead::Document { status, headers, length } = head else { panic!("a redirect: {output:?}") };
    let headers =
        headers.iter().map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned())).collect();
    (status.as_u16(), headers, length, String::from_utf8(body.to_vec()).unwrap())
}

fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    pairs.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
}

#[test]
fn documents_are_read() {
    let html = ("content-type", "text/html");
    for (output, status, headers, length, body) in [
        ("Content-Type: text/html\n\nhi", 200, &[html][..], None, "hi"),
        ("Content-Type:text/html\r\n\r\nhi", 200, &[html], None, "hi"),
        ("Content-Type: text/html\r\n\nhi", 200, &[html], None, "hi"),
        ("Content-Type: text/html\n\r\nhi", 200, &[html], None, "hi"),
        ("Content-Type: text/html \t\n\n", 200, &[html], None, ""),
        ("Content-Type: text/html\n\n\n\nhi", 200, &[html], None, "\n\nhi"),
        ("Status: 404 Not Found\nContent-Type: text/html\n\n", 404, &[html], None, ""),
        ("status: 599\n\nx", 599, &[], None, "x"),
        ("X-A:\n\nx", 200, &[("x-a", "")], None, "x"),
        (
            "Set-Cookie: a=1\nSet-Cookie: b=2\n\n",
            200,
            &[("set-cookie", "a=1"), ("set-cookie", "b=2")],
            None,
            "",
        ),
        ("Content-Length: 2\ncontent-length: 2\n\nhi", 200, &[], Some(2), "hi"),
        ("Transfer-Encoding: chunked\nContent-Type: text/html\n\nhi", 200, &[html], None, "hi"),
        ("Content-Length: 2\nTransfer-Encoding: gzip\n\nhi", 200, &[], Some(2), "hi"),
        (
            "Status: 201\nContent-Type: text/html\nStatus: 201\nContent-Type: text/html\n\n",
            201,
            &[html],
            None,
            "",
        ),
        ("Location: /b\nLocation: /b\n\n", 302, &[("location", "/b")], None, ""),
        ("Location: http://example.org/\n\n", 302, &[("location", "http://example.org/")], None, ""),
        ("Status: 301\nLocation: /b\n\n", 301, &[("location", "/b")], None, ""),
        ("Location: /b\nX-A: 1\n\n", 302, &[("location", "/b"), ("x-a", "1")], None, ""),
        ("Location: //example.org/\n\n", 302, &[("location", "//example.org/")], None, ""),
        ("Location: /b#part\n\n", 302, &[("location", "/b#part")], None, ""),
        (
            "Connection: close, X-Hop\nX-Hop: 1\nKeep-Alive: 5\nServer: x\nDate: y\nX-A: 1\n\n",
            200,
            &[("x-a", "1")],
            None,
            "",
        ),
    ] {
        assert_eq!(document(output), (status, pairs(headers), length, body.to_owned()), "{output:?}");
    }
}

#[test]
fn a_sole_location_with_a_path_is_a_local_redirect() {
    let local = |path: &str, query: Option<&str>| ScriptHead::LocalRedirect {
        path: path.into(),
        query: query.map(Into::into),
    };
    for (output, expected) in [
        ("Location: /b\n\n", local("/b", None)),
        ("Location: /b?c=%20d?e\n\nignored", local("/b", Some("c=%20d?e"))),
    ] {
        assert_eq!(read(output.as_bytes()).unwrap().0, expected, "{output:?}");
    }
    for output in ["Location: /a b\n\n", "Location: /\u{e4}\n\n"] {
        assert_eq!(read(output.as_bytes()).unwrap_err(), HeadError::Location, "{output:?}");
    }
}

#[test]
fn programs_named_nph_print_a_status_line() {
    let read = |file: &str, output: &'static str| {
        let read = HeadReader::of_program(file).feed(Bytes::from_static(output.as_bytes()));
        read.map(|complete| match complete.expect("it is whole") {
            (ScriptHead::Document { status, headers, length }, body) => {
                (status.as_u16(), headers.len(), length, String::from_utf8(body.to_vec()).unwrap())
            }
            (other, _) => panic!("{other:?}"),
        })
    };
    let (file, whole) = ("bin/nph-x.cgi", "HTTP/1.1 404 Not Found\r\nServer: x\r\nX-A: 1\r\n\r\nbody");
    assert_eq!(read(file, whole), Ok((404, 1, None, "body".into())));
    assert_eq!(
        read(file, "HTTP/1.0 200 OK\nContent-Length: 4\n\nbody"),
        Ok((200, 0, Some(4), "body".into()))
    );
    assert_eq!(read(file, "HTTP/1.1 204\r\n\r\n"), Ok((204, 0, None, "".into())));
    assert_eq!(read(file, "X-A: 1\n\nbody"), Ok((200, 1, None, "body".into())), "as all others do");
    assert_eq!(read(file, "HTTP/1.1 100 Continue\r\n\r\n"), Err(HeadError::Status));
    assert_eq!(read(file, "HTTP/1.1 200 OK\nStatus: 201\n\n"), Err(HeadError::Twice("Status")));
    assert!(read("nph-dir/x.cgi", whole).is_err());
}

#[test]
fn unacceptable_heads_are_refused() {
    let fields = "X-A: 1\n".repeat(HEAD_FIELDS_MAX + 1) + "\n";
    let malformed = |error: &HeadError| matches!(error, HeadError::Malformed(_));
    let is = |expected: HeadError| move |error: &HeadError| *error == expected;
    type Fits = Box<dyn Fn(&HeadError) -> bool>;
    let cases: Vec<(&str, Fits)> = vec![
        ("", Box::new(is(HeadError::Nothing))),
        ("X-A: 1\n", Box::new(is(HeadError::Incomplete))),
        ("\nhello", Box::new(is(HeadError::Missing))),
        ("\r\nhello", Box::new(is(HeadError::Missing))),
        ("hello\n\n", Box::new(malformed)),
        ("HTTP/1.1 200 OK\r\nX-A: 1\r\n\r\n", Box::new(malformed)),
        ("X A: 1\n\n", Box::new(malformed)),
        ("X-A : 1\n\n", Box::new(malformed)),
        (": 1\n\n", Box::new(malformed)),
        ("X-A: 1\n folded\n\n", Box::new(malformed)),
        (" X-A: 1\n\n", Box::new(malformed)),
        ("X-A: 1\rX-B: 2\n\n", Box::new(malformed)),
        ("X-A: 1\r\r\n\r\n", Box::new(malformed)),
        ("X-A: a\0b\n\n", Box::new(malformed)),
        ("X-A: a\x1bb\n\n", Box::new(malformed)),
        (&fields, Box::new(is(HeadError::TooManyFields))),
        ("Status: 100\n\n", Box::new(is(HeadError::Status))),
        ("Status: 101 Switching Protocols\n\n", Box::new(is(HeadError::Status))),
        ("Status: 600\n\n", Box::new(is(HeadError::Status))),
        ("Status: 20\n\n", Box::new(is(HeadError::Status))),
        ("Status: 2000\n\n", Box::new(is(HeadError::Status))),
        ("Status: OK\n\n", Box::new(is(HeadError::Status))),
        ("Status: 200\nStatus: 201\n\n", Box::new(is(HeadError::Twice("Status")))),
        ("Content-Length: 1\nContent-Length: 2\n\n", Box::new(is(HeadError::Twice("Content-Length")))),
        ("Content-Length: +1\n\n", Box::new(is(HeadError::Length))),
        ("Content-Length: 1, 1\n\n", Box::new(is(HeadError::Length))),
        ("Content-Length: 99999999999999999999\n\n", Box::new(is(HeadError::Length))),
        ("Content-Type: a/b\nContent-Type: a/c\n\n", Box::new(is(HeadError::Twice("Content-Type")))),
        ("Location: /a\nLocation: /b\n\n", Box::new(is(HeadError::Twice("Location")))),
    ];
    for (output, fits) in cases {
        let error = read(output.as_bytes()).map(|(head, _)| head).unwrap_err();
        assert!(fits(&error), "{output:?}: {error:?}");
    }
}

#[test]
fn a_head_has_a_largest_size() {
    // "X-A: " and the two line ends are seven bytes.
    let largest = format!("X-A: {}\n\nbody", "a".repeat(HEAD_BYTES_MAX - 7));
    assert!(read(largest.as_bytes()).is_ok());
    let larger = format!("X-A: {}\n\nbody", "a".repeat(HEAD_BYTES_MAX - 6));
    assert_eq!(read(larger.as_bytes()).unwrap_err(), HeadError::TooLarge);
    let endless = vec![b'a'; HEAD_BYTES_MAX];
    assert_eq!(read(&endless).unwrap_err(), HeadError::TooLarge);
}

/// Output made of what matters to the parser, so that heads, ends and errors really occur.
fn output() -> impl Strategy<Value = Vec<u8>> {
    let token = prop_oneof![
        Just("\n"),
        Just("\r\n"),
        Just("\r"),
        Just("\n\n"),
        Just("\r\n\r\n"),
        Just("Status: 404"),
        Just("Location: /x"),
        Just("Content-Length: 5"),
        Just("X-A: b"),
        Just(": "),
        Just("hello"),
        Just("\0"),
    ];
    prop::collection::vec(token, 0..12).prop_map(|tokens| tokens.concat().into_bytes())
}

proptest! {
    #[test]
    fn the_pieces_of_output_make_no_difference(
        output in output(),
        cuts in prop::collection::vec(any::<usize>(), 0..6),
    ) {
        let whole = read(&output).map(|(head, rest)| (head, rest.to_vec()));
        prop_assert_eq!(read_in_pieces(&output, &cuts), whole.clone());
        let every: Vec<usize> = (0..output.len()).collect();
        prop_assert_eq!(read_in_pieces(&output, &every), whole);
    }

    #[test]
    fn any_bytes_end_in_a_head_or_an_error(output in prop::collection::vec(any::<u8>(), 0..200)) {
        if let Ok((ScriptHead::Document { headers, .. }, _)) = read(&output) {
            for value in headers.values() {
                prop_assert!(!value.as_bytes().iter().any(|byte| matches!(byte, b'\r' | b'\n' | 0)));
            }
        }
    }
}
