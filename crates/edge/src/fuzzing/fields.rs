//! Fuzzes single header fields of clients: ranges, conditions, codings, claims of proxies, traces
//! and tickets.

use std::net::IpAddr;

use http::header::{HeaderMap, HeaderValue};
use http::{Method, Version, header};
use nagaya_admission::{LaneName, Moment, Nonce, Ticket, TicketKeyring};
use nagaya_base::RequestId;
use nagaya_base::fuzz::copy_seeds;

use crate::backends::files::conditional::{PreconditionResult, Validators};
use crate::backends::files::encoding::{AcceptedCodings, ContentCoding};
use crate::backends::files::range::WantedRanges;
use crate::backends::files::{conditional, range};
use crate::fuzzing::heads;
use crate::fuzzing::inputs::read_lines;
use crate::http::message::RequestHead;
use crate::http::proxy_headers::{ForwardingRules, trace};
use crate::options::EdgeConfig;

// === Ranges ===

pub(super) fn ranges() -> Vec<Vec<u8>> {
    let of = |size: u64, text: &str| [&size.to_le_bytes()[..], text.as_bytes()].concat();
    vec![
        of(1000, "bytes=0-99"),
        of(1000, "bytes=500-,-200, 0-0"),
        of(0, "bytes=-1"),
        of(1 << 40, "bytes=0-0,1000000-1000001,18446744073709551615-"),
        of(10, "bytes = 1-2 , , 3-4"),
        of(10, "lines=1-2"),
        of(10, "bytes=5-1"),
    ]
}

/// The first eight bytes are the size of the file.
pub(super) fn read_range(bytes: &[u8]) {
    let Some((size, text)) = bytes.split_first_chunk::<8>() else { return };
    let Ok(value) = HeaderValue::from_bytes(text) else { return };
    let size = u64::from_le_bytes(*size);
    let headers = HeaderMap::from_iter([(header::RANGE, value)]);
    assert_eq!(range::wanted(&Method::POST, &headers, size), WantedRanges::Whole);
    let WantedRanges::Spans(spans) = range::wanted(&Method::GET, &headers, size) else { return };
    let mut spans: Vec<_> = spans.iter().map(|span| (span.first, span.end)).collect();
    spans.sort_unstable();
    assert!(spans.iter().all(|(first, end)| first < end && *end <= size), "{spans:?} of {size}");
    assert!(spans.windows(2).all(|pair| pair[0].1 < pair[1].0), "{spans:?} send a byte twice");
}

// === Conditions and codings ===

pub(super) fn conditions() -> Vec<Vec<u8>> {
    copy_seeds(&[
        b"if-none-match: \"a\", W/\"b\"\naccept-encoding: gzip;q=0.5, br, *;q=0",
        b"if-match: *\nif-range: \"a\"\naccept-encoding: identity;q=0, zstd;q=1.000",
        b"if-modified-since: Thu, 01 Jan 1970 00:00:10 GMT\nif-range: Thu, 01 Jan 1970 00:00:10 GMT",
        b"if-unmodified-since: Sunday, 06-Nov-94 08:49:37 GMT\naccept-encoding: gzip; q=1, br;q=2",
        b"if-none-match: \"unclosed\naccept-encoding: \xff",
    ])
}

pub(super) fn read_conditions(bytes: &[u8]) {
    let headers = read_lines(bytes);
    let etag = HeaderValue::from_static("\"a\"");
    let validators = Validators { etag: &etag, modified: Some(10) };
    let is_sent = conditional::evaluate(&headers, validators) == PreconditionResult::Send;
    assert!(conditional::range_applies(&headers, validators) || headers.contains_key(header::IF_RANGE));
    let has_condition =
        [header::IF_MATCH, header::IF_NONE_MATCH, header::IF_MODIFIED_SINCE, header::IF_UNMODIFIED_SINCE]
            .iter()
            .any(|name| headers.contains_key(name));
    assert!(is_sent || has_condition, "nothing is held back without a condition");
    let chosen =
        AcceptedCodings::read(&headers).best(ContentCoding::ALL.into_iter()).map(ContentCoding::token);
    assert!(chosen.is_none() || headers.contains_key(header::ACCEPT_ENCODING));
    if let Some(token) = chosen {
        let all = headers
            .get_all(header::ACCEPT_ENCODING)
            .iter()
            .map(|value| value.as_bytes().to_ascii_lowercase());
        let said = all.collect::<Vec<_>>().concat();
        let names = |word: &[u8]| said.windows(word.len()).any(|part| part == word);
        assert!(names(token.as_bytes()) || names(b"*"), "{token} was not offered");
    }
}

// === Claims ===

pub(super) fn forwarded() -> Vec<Vec<u8>> {
    copy_seeds(&[
        b"x-forwarded-for: 203.0.113.9, 10.0.0.1\nx-forwarded-proto: https\nx-forwarded-host: a.example:8443",
        b"forwarded: for=\"[2001:db8::1]:4711\";proto=https;host=\"b\", for=10.0.0.2",
        b"forwarded: for=unknown, for=_hidden;by=x\nvia: 1.1 a, 2 b",
        b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\ntracestate: a=b",
        b"traceparent: 01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more\ntracestate: a=b",
        b"x-real-ip: 1.2.3.4\nconnection: x-forwarded-for, host\ncf-connecting-ip: 1.2.3.4\nx_forwarded_for: 9",
        b"x-forwarded-for: [::ffff:10.0.0.1]:80,,\nx-forwarded-port: 99999",
    ])
}

pub(super) fn read_forwarded(bytes: &[u8]) {
    let head = RequestHead {
        id: RequestId(1),
        method: Method::GET,
        path: "/".into(),
        query: None,
        host: "www.example.org".into(),
        port: None,
        version: Version::HTTP_11,
        headers: read_lines(bytes),
        upgrade: None,
        conn: heads::connection(),
    };
    check_trace(&head.headers);
    let peer: IpAddr = head.conn.peer.ip();
    let stranger = ForwardingRules::new(&EdgeConfig::default());
    assert_eq!(stranger.client(&head), peer, "a stranger is who he is");
    assert_eq!(stranger.view_client(&head).address, peer);
    let trusted_proxies = vec![peer.to_string(), "10.0.0.0/8".into()];
    let proxy = ForwardingRules::new(&EdgeConfig { trusted_proxies, ..EdgeConfig::default() });
    assert_eq!(proxy.client(&head), proxy.view_client(&head).address);
    for forwarding in [stranger, proxy] {
        let (mut head, mut fields) = (head.clone(), Vec::new());
        forwarding.strip_claims(&mut head);
        if forwarding.request(&head, None, &mut fields).is_ok() {
            fields.extend_from_slice(b"\r\n\r\n");
            let mut parsed = [httparse::EMPTY_HEADER; 256];
            let whole = httparse::parse_headers(&fields[2..], &mut parsed);
            let is_whole =
                matches!(whole, Ok(httparse::Status::Complete((len, _))) if len + 2 == fields.len());
            assert!(is_whole, "{}", fields.escape_ascii());
        }
    }
}

/// Checks that an application gets exactly one valid context, continued unchanged.
fn check_trace(headers: &HeaderMap) {
    let mut sent = HeaderMap::new();
    trace::each_field(headers, RequestId(1), |name, value| {
        sent.append(name, HeaderValue::from_bytes(value).expect("a field that was one"));
    });
    let ours: Vec<_> = sent.get_all("traceparent").iter().cloned().collect();
    assert_eq!(ours.len(), 1);
    let mut again = HeaderMap::new();
    trace::each_field(&sent, RequestId(2), |name, value| {
        again.append(name, HeaderValue::from_bytes(value).expect("a field that was one"));
    });
    let trace = |value: &HeaderValue| value.as_bytes()[..36].to_vec();
    assert_eq!(trace(&again["traceparent"]), trace(&ours[0]), "what we send is continued by the next");
}

// === Tickets ===

const KEY: [u8; 32] = [7; 32];

pub(super) fn tickets() -> Vec<Vec<u8>> {
    let ticket = Ticket {
        lane: LaneName([1; 16]),
        begins: Moment(1000),
        ends: Moment(2000),
        epoch: 3,
        nonce: Nonce(4),
    };
    vec![TicketKeyring::new(5, &KEY).sign(&ticket).into_bytes(), b"short".to_vec(), vec![b'A'; 200]]
}

/// Checks that a text is a ticket only if signing that ticket gives the same text.
pub(super) fn read_ticket(bytes: &[u8]) {
    let keys = TicketKeyring::new(5, &KEY);
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(ticket) = keys.verify(text) {
        assert_eq!(keys.sign(&ticket), text, "a ticket has one text");
    }
    let mut number = [0; 16];
    let len = bytes.len().min(number.len());
    number[..len].copy_from_slice(&bytes[..len]);
    let nonce = u128::from_le_bytes(number);
    let moment = Moment(u64::from_le_bytes([number[0]; 8]));
    let ticket = Ticket {
        lane: LaneName(number),
        begins: moment,
        ends: moment,
        epoch: number[1].into(),
        nonce: Nonce(nonce),
    };
    let mut signed = keys.sign(&ticket).into_bytes();
    assert_eq!(keys.verify(str::from_utf8(&signed).expect("a ticket is ASCII")), Ok(ticket));
    if let [at, with, ..] = bytes {
        let at = usize::from(*at) % signed.len();
        let before = std::mem::replace(&mut signed[at], with & 0x7f);
        let is_same = signed[at] == before;
        let altered = str::from_utf8(&signed).expect("ASCII still");
        assert_eq!(keys.verify(altered).is_ok(), is_same, "{altered} is no ticket");
    }
}
