//! Output of tenants' programs, and the edge's requests to PHP workers through the gate.

use std::io::{self, Read, Write};

use bytes::BytesMut;
use nagaya_base::fuzz::copy_seeds;
use nagaya_keeper_api::fastcgi::{self, FastCgiDecoder, FastCgiEvent, ProtocolError, UsageReport};
use nagaya_records::cell::RequestUsage;
use nagaya_records::record::{DatabaseKind, DatabaseTag};

use crate::gate::opening::{AnswerRecords, BodyRecords, CheckedOpening, OPENING_MAX};
use crate::instances::run::internal_requests;
use crate::log::lines::{LINE_LEN_MAX, LineSplitter};
use crate::relay::ask;
use crate::relay::query_tag::find_tag;
use crate::relay::turns::QueryTracker;

use super::split_step;

// === FastCGI: answers ===

fn record(kind: u8, content: &[u8], padding: u8) -> Vec<u8> {
    let len = u16::try_from(content.len()).unwrap_or_default().to_be_bytes();
    [&[1, kind, 0, 1, len[0], len[1], padding, 0][..], content, &vec![0; padding.into()]].concat()
}

pub(super) fn fastcgi_answers() -> Vec<Vec<u8>> {
    let end = record(3, &[0, 0, 0, 9, 0, 0, 0, 0], 2);
    vec![
        [&[3][..], &record(6, b"Status: 200\r\n\r\nhello", 3), &record(7, b"warning", 1), &end].concat(),
        [&[1][..], &record(6, b"", 0), &record(7, b"", 0), &end, b"next"].concat(),
        [&[9][..], &record(3, &[0, 0, 0, 0, 2, 0, 0, 0], 0)].concat(),
        [&[9][..], &record(9, b"x", 0)].concat(),
        [&[200][..], &fastcgi::whole_answer(b"a: b\r\n\r\nc")].concat(),
        [&[200][..], &fastcgi::whole_answer(b""), &UsageReport::Known(RequestUsage::default()).record()]
            .concat(),
    ]
}

#[derive(Debug, Default, PartialEq)]
struct Answered {
    output: Vec<u8>,
    errors: Vec<u8>,
    status: Option<u32>,
    /// Bytes behind the end.
    left: usize,
}

/// The edge and the gate find the end at the same place, however the response is cut.
pub(super) fn read_fastcgi(bytes: &[u8]) {
    let Some((step, wire)) = split_step(bytes) else { return };
    let whole = decode_answer(wire, wire.len().max(1));
    assert_eq!(decode_answer(wire, step), whole, "pieces mean the same as the whole");
    let Some(whole) = whole else { return };
    assert!(whole.output.len() + whole.errors.len() + whole.left <= wire.len());
    let mut records = AnswerRecords::default();
    let (answer, behind) = wire.split_at(wire.len() - whole.left);
    assert_eq!(answer.chunks(step).map(|piece| records.look(piece)).sum::<usize>(), 0);
    assert_eq!(records.has_ended(), whole.status.is_some());
    // The report of a request's use comes behind the end.
    let mut left = BytesMut::from(behind);
    let report = UsageReport::take(&mut left);
    let is_taken = matches!(report, Ok(Some(_)) | Err(ProtocolError::Usage));
    assert!(is_taken || left == behind, "only a whole one is taken");
    if let (true, Some((_, before))) = (whole.status.is_some(), answer.split_last()) {
        let mut records = AnswerRecords::default();
        assert_eq!(records.look(before), 0);
        assert!(!records.has_ended(), "it has not ended a byte before, {} behind", behind.len());
    }
}

/// Returns `None` if this is no response.
fn decode_answer(wire: &[u8], step: usize) -> Option<Answered> {
    let (mut decoder, mut buffer, mut answered) =
        (FastCgiDecoder::default(), BytesMut::new(), Answered::default());
    let mut pieces = wire.chunks(step);
    loop {
        match decoder.next(&mut buffer).ok()? {
            Some(FastCgiEvent::Stdout(piece)) => answered.output.extend_from_slice(&piece),
            Some(FastCgiEvent::Stderr(piece)) => answered.errors.extend_from_slice(&piece),
            Some(FastCgiEvent::End { app_status }) => {
                answered.status = Some(app_status);
                answered.left = buffer.len() + pieces.map(<[u8]>::len).sum::<usize>();
                return Some(answered);
            }
            None => match pieces.next() {
                Some(piece) => buffer.extend_from_slice(piece),
                None => return Some(answered),
            },
        }
    }
}

// === FastCGI: requests ===

pub(super) fn gate_openings() -> Vec<Vec<u8>> {
    let opening = |params: &[(&str, &str)]| {
        let mut opening = fastcgi::RequestOpening::new(fastcgi::ConnectionReuse::Kept);
        params.iter().for_each(|(name, value)| {
            // Each is short.
            let _ = opening.put(name.as_bytes(), value.as_bytes());
        });
        opening.finish()
    };
    let long = "x".repeat(200);
    vec![
        [&[7][..], &opening(&[("SCRIPT_FILENAME", "/a/b.php"), ("HTTP_COOKIE", &long)])].concat(),
        [&[3][..], &opening(&[("CONTENT_LENGTH", "3")]), &record(5, b"abc", 0), &record(5, b"", 0)].concat(),
        [&[1][..], &opening(&[("DOCUMENT_ROOT", "/a"), ("DOCUMENT_ROOT", "/b")])].concat(),
        [&[1][..], &opening(&[("PHP_VALUE", "auto_prepend_file=/x")])].concat(),
        [&[1][..], &opening(&[("CONTENT_LENGTH", "99999999999999999999")])].concat(),
    ]
}

/// The gate passes on exactly the checked bytes, and no more of a body than its length.
pub(super) fn read_gate(bytes: &[u8]) {
    let Some((step, wire)) = split_step(bytes) else { return };
    let mut buffer = BytesMut::from(wire);
    let whole = CheckedOpening::take(&mut buffer);
    let (mut pieces, mut taken) = (BytesMut::new(), None);
    let mut passed = 0;
    for piece in wire.chunks(step) {
        pieces.extend_from_slice(piece);
        passed += piece.len();
        match CheckedOpening::take(&mut pieces) {
            Ok(None) => {}
            other => {
                taken = other.ok().flatten();
                break;
            }
        }
    }
    let Ok(Some(opening)) = whole else {
        assert!(taken.is_none(), "pieces mean the same as the whole");
        return;
    };
    let again = taken.expect("pieces mean the same as the whole");
    assert_eq!((&opening.bytes[..], &again.bytes[..]), (&wire[..opening.bytes.len()], &opening.bytes[..]));
    assert!(opening.bytes.len() <= OPENING_MAX && pieces.len() + opening.bytes.len() == passed);
    let Ok(len) = opening.body_len() else { return };
    let (mut records, mut to) = (BodyRecords::new(len), BytesMut::new());
    let before = buffer.len();
    let is_fine = records.pass(&mut buffer, &mut to).is_ok();
    assert_eq!(buffer.len() + to.len(), before, "nothing is lost or made up");
    assert!(!(is_fine && records.is_complete()) || to.len() as u64 >= len);
}

// === Databases ===

pub(super) fn turns() -> Vec<Vec<u8>> {
    copy_seeds(&[
        b"\x04\x4a\x00\x00\x00\x0a8.0\x00 greeting of MySQL",
        b"\x01\x00\x00\x00\x08\x00\x03\x00\x00\x50\x00\x00\x00\x08 a client of PostgreSQL",
        b"\x10GET / HTTP/1.1\r\n\r\n",
        b"\x02\x01\x00\x00\x00\x0a\x04\x00\x00\x01\x05\x00\x00\x00\x01\x00\x00\x00\x03",
    ])
}

/// A query is open from its beginning to its response, and two are never open.
pub(super) fn read_turns(bytes: &[u8]) {
    let Some((step, mut said)) = split_step(bytes) else { return };
    let (mut turns, mut open, mut is_client) = (QueryTracker::default(), 0_i64, step % 2 == 0);
    while !said.is_empty() {
        let (piece, rest) = said.split_at(step.min(said.len()));
        if is_client {
            open += i64::from(turns.asks(piece));
            // Any text may be in a query.
            let _ = find_tag(piece);
        } else {
            open -= i64::from(turns.answers(piece));
        }
        assert!((0..=1).contains(&open));
        is_client = piece.last().is_some_and(|byte| byte % 2 == 0);
        said = rest;
    }
    assert_eq!(i64::from(turns.end()), open);
    assert!(!turns.end());
}

// === What they print ===

pub(super) fn log_lines() -> Vec<Vec<u8>> {
    vec![b"\x03one\ntwo\n\nthree".to_vec(), [&[100][..], &[b'x'; 5000], b"\ny"].concat()]
}

pub(super) fn read_log_lines(bytes: &[u8]) {
    let Some((step, output)) = split_step(bytes) else { return };
    let whole = cut_lines(output, output.len().max(1));
    assert_eq!(cut_lines(output, step), whole, "pieces mean the same as the whole");
    assert!(whole.iter().all(|line| line.len() <= LINE_LEN_MAX && !line.contains(&b'\n')));
}

fn cut_lines(output: &[u8], step: usize) -> Vec<Vec<u8>> {
    let (mut lines, mut cut) = (LineSplitter::default(), Vec::new());
    for piece in output.chunks(step) {
        lines.take(piece, |line| cut.push(line.to_vec()));
    }
    lines.finish(|line| cut.push(line.to_vec()));
    cut
}

pub(super) fn status_lines() -> Vec<Vec<u8>> {
    copy_seeds(&[b"HTTP/1.1 200 OK\r\n", b"HTTP/1.0 999 x\n", b"HTTP/1.1 ", b"\n", &[b'x'; 300]])
}

pub(super) fn read_status_line(bytes: &[u8]) {
    if let Ok(Some(status)) = internal_requests::status_of(bytes) {
        assert!((100..=599).contains(&status) && bytes.starts_with(b"HTTP/1."));
    }
}

// === Databases: answers to the keeper's own question ===

pub(super) fn database_answers() -> Vec<Vec<u8>> {
    let mysql =
        b"\x29\0\0\0\x0a5.5.5-10.11.6-MariaDB\0\x01\0\0\0abcdefgh\0\xff\xf7\x2d\x02\0\x03\0\0\x02\0\0\0\
        \x01\0\0\x01\x01\x03\0\0\x02\x03de\x05\0\0\x03\xfe\0\0\0\0\x02\0\0\x04\x011\x05\0\0\x05\xfe\0\0\0\0";
    let postgresql = b"R\0\0\0\x08\0\0\0\0Z\0\0\0\x05IT\0\0\0\x06\0\x01D\0\0\0\x0b\0\x01\0\0\0\x011C\0\0\0\x05\0Z\0\0\0\x05I";
    let redis = b"+OK\r\n*2\r\n$1\r\n1\r\n$-1\r\n";
    [&mysql[..], postgresql, redis]
        .into_iter()
        .enumerate()
        .map(|(kind, says)| [&[u8::try_from(kind).unwrap_or_default()], says].concat())
        .collect()
}

/// A database that receives nothing. Its words are read to an end, and the same each time.
struct Said<'a>(&'a [u8]);

impl Read for Said<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.0.read(to)
    }
}

impl Write for Said<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

pub(super) fn read_database_answer(bytes: &[u8]) {
    let Some((kind, says)) = bytes.split_first() else { return };
    let kinds = [DatabaseKind::Mysql, DatabaseKind::Postgresql, DatabaseKind::Redis];
    let kind = kinds[usize::from(*kind) % kinds.len()];
    let tag = DatabaseTag { kind, user: None, database: Some("1".into()), ask: "SELECT 1".into() };
    let ask = || ask::converse(Said(says), &tag, "alice").map_err(|error| error.to_string());
    assert_eq!(ask(), ask());
}
