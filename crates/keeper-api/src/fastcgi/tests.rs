//! Facts about FastCGI records.

use nagaya_records::cell::RequestUsage;
use proptest::prelude::*;

use super::*;

fn record(kind: u8, content: &[u8], padding: u8) -> Vec<u8> {
    let len = u16::try_from(content.len()).unwrap().to_be_bytes();
    let mut bytes = vec![1, kind, 0, 1, len[0], len[1], padding, 0];
    bytes.extend_from_slice(content);
    bytes.resize(bytes.len() + usize::from(padding), 0xee);
    bytes
}

fn end(app_status: u32, protocol: u8) -> Vec<u8> {
    let mut content = app_status.to_be_bytes().to_vec();
    content.extend_from_slice(&[protocol, 0, 0, 0]);
    record(END_REQUEST, &content, 0)
}

/// Everything the decoder says about bytes that arrive in pieces of `step`: both outputs, the end,
/// and what is left.
#[derive(Debug, Default, PartialEq, Eq)]
struct Heard {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    end: Option<u32>,
    left: Vec<u8>,
}

fn hear(bytes: &[u8], step: usize) -> Result<Heard, ProtocolError> {
    let mut decoder = FastCgiDecoder::default();
    let mut buffer = BytesMut::new();
    let mut heard = Heard::default();
    for piece in bytes.chunks(step) {
        buffer.extend_from_slice(piece);
        while heard.end.is_none() {
            match decoder.next(&mut buffer)? {
                Some(FastCgiEvent::Stdout(piece)) => heard.stdout.extend_from_slice(&piece),
                Some(FastCgiEvent::Stderr(piece)) => heard.stderr.extend_from_slice(&piece),
                Some(FastCgiEvent::End { app_status }) => heard.end = Some(app_status),
                None => break,
            }
        }
    }
    heard.left = buffer.to_vec();
    Ok(heard)
}

/// Splits what was sent into records again: kind and content.
fn records(mut bytes: &[u8]) -> Vec<(u8, Vec<u8>)> {
    let mut all = Vec::new();
    while let [1, kind, 0, 1, high, low, 0, 0, rest @ ..] = bytes {
        let (content, rest) = rest.split_at(usize::from(u16::from_be_bytes([*high, *low])));
        all.push((*kind, content.to_vec()));
        bytes = rest;
    }
    assert!(bytes.is_empty(), "what was sent is whole records");
    all
}

fn read_len(bytes: &mut &[u8]) -> usize {
    if bytes[0] < 128 { usize::from(bytes.get_u8()) } else { (bytes.get_u32() & !(1 << 31)) as usize }
}

/// The parameters of one record, which PHP reads on its own.
fn pairs(mut content: &[u8]) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut all = Vec::new();
    while !content.is_empty() {
        let name = read_len(&mut content);
        let value = read_len(&mut content);
        let (name, rest) = content.split_at(name);
        let (value, rest) = rest.split_at(value);
        all.push((name.to_vec(), value.to_vec()));
        content = rest;
    }
    all
}

#[test]
fn a_request_without_parameters_is_begun_and_ended() {
    let sent = records(&RequestOpening::new(ConnectionReuse::Kept).finish());
    assert_eq!(sent, [(BEGIN_REQUEST, vec![0, 1, 1, 0, 0, 0, 0, 0]), (PARAMS, vec![])]);
    let mut once = RequestOpening::new(ConnectionReuse::Closed).finish();
    once.extend_from_slice(&END_OF_BODY);
    let closed = (BEGIN_REQUEST, vec![0, 1, 0, 0, 0, 0, 0, 0]);
    assert_eq!(records(&once), [closed, (PARAMS, vec![]), (STDIN, vec![])]);
}

#[test]
fn a_parameter_longer_than_a_record_is_refused() {
    let mut opening = RequestOpening::new(ConnectionReuse::Kept);
    assert_eq!(opening.put(b"A", &vec![b'x'; CONTENT_MAX]), Err(ParametersTooLong));
    // Five bytes of lengths and the name.
    assert_eq!(opening.put(b"A", &vec![b'x'; CONTENT_MAX - 6]), Ok(()));
}

#[test]
fn an_answer_is_cut_into_its_streams() {
    let bytes = [
        record(STDOUT, b"hello ", 2),
        record(STDERR, b"noise", 0),
        record(STDOUT, b"world", 255),
        record(STDOUT, b"", 0),
        end(7, 0),
        b"next".to_vec(),
    ]
    .concat();
    let expected = Heard {
        stdout: b"hello world".to_vec(),
        stderr: b"noise".to_vec(),
        end: Some(7),
        left: b"next".to_vec(),
    };
    assert_eq!(hear(&bytes, bytes.len()).unwrap(), expected);
}

#[test]
fn hostile_records_are_refused() {
    let with = |at: usize, value: u8| {
        let mut bytes = record(STDOUT, b"x", 0);
        bytes[at] = value;
        bytes
    };
    for (bytes, error) in [
        (with(0, 2), ProtocolError::Version(2)),
        (with(0, 0), ProtocolError::Version(0)),
        (with(1, BEGIN_REQUEST), ProtocolError::Kind(BEGIN_REQUEST)),
        (with(1, STDIN), ProtocolError::Kind(STDIN)),
        (with(1, 11), ProtocolError::Kind(11)),
        (with(2, 1), ProtocolError::RequestId(0x101)),
        (with(3, 0), ProtocolError::RequestId(0)),
        (record(END_REQUEST, b"", 0), ProtocolError::EndLength(0)),
        (record(END_REQUEST, &[0; 9], 0), ProtocolError::EndLength(9)),
        (end(0, 1), ProtocolError::Rejected(1)),
        (b"Content-Type: text/html\n\n".to_vec(), ProtocolError::Version(b'C')),
    ] {
        assert_eq!(hear(&bytes, 1), Err(error), "{bytes:?}");
    }
}

proptest! {
    #[test]
    fn parameters_come_back_whole_from_each_record(
        sizes in prop::collection::vec((0usize..300, prop_oneof![0usize..300, 20_000usize..60_000]), 0..12),
    ) {
        let all: Vec<(Vec<u8>, Vec<u8>)> =
            sizes.into_iter().map(|(name, value)| (vec![b'N'; name], vec![b'v'; value])).collect();
        let mut opening = RequestOpening::new(ConnectionReuse::Kept);
        for (name, value) in &all {
            opening.put(name, value).unwrap();
        }
        let mut sent = records(&opening.finish());
        prop_assert_eq!(sent.remove(0).0, BEGIN_REQUEST);
        prop_assert_eq!(sent.pop().unwrap(), (PARAMS, vec![]));
        let mut back = Vec::new();
        for (kind, content) in sent {
            prop_assert_eq!(kind, PARAMS);
            prop_assert!(!content.is_empty(), "an empty record would end the parameters");
            back.extend(pairs(&content));
        }
        prop_assert_eq!(back, all);
    }

    #[test]
    fn the_pieces_of_an_answer_make_no_difference(
        parts in prop::collection::vec((any::<bool>(), prop::collection::vec(any::<u8>(), 0..40), any::<u8>()), 0..8),
        step in 1usize..50,
    ) {
        let mut bytes = Vec::new();
        for (stdout, content, padding) in &parts {
            bytes.extend(record(if *stdout { STDOUT } else { STDERR }, content, *padding));
        }
        bytes.extend(end(1, 0));
        let stream = |wanted: bool| {
            parts.iter().filter(|part| part.0 == wanted).flat_map(|part| part.1.clone()).collect::<Vec<u8>>()
        };
        let heard = hear(&bytes, step).unwrap();
        prop_assert_eq!(heard, Heard { stdout: stream(true), stderr: stream(false), end: Some(1), left: vec![] });
    }

    #[test]
    fn any_bytes_end_in_events_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300), step in 1usize..20) {
        let whole = hear(&bytes, bytes.len().max(1));
        prop_assert_eq!(hear(&bytes, step).is_ok(), whole.is_ok());
    }
}

#[test]
fn a_report_of_use_is_taken_whole_and_nothing_behind_it() {
    let usage = RequestUsage { cpu_us: 4711, read_bytes: u64::MAX, ..RequestUsage::default() };
    for report in [UsageReport::Known(usage), UsageReport::Ask] {
        let mut buffer = BytesMut::new();
        for byte in report.record() {
            assert_eq!(UsageReport::take(&mut buffer), Ok(None));
            buffer.extend_from_slice(&[byte]);
        }
        buffer.extend_from_slice(b"rest");
        assert_eq!(UsageReport::take(&mut buffer), Ok(Some(report)));
        assert_eq!(&buffer[..], b"rest");
    }
    let take = |bytes: Vec<u8>| UsageReport::take(&mut BytesMut::from(&bytes[..]));
    assert_eq!(take(end(0, 0)), Err(ProtocolError::Kind(END_REQUEST)));
    let mut short = UsageReport::Known(usage).record();
    short[5] -= 1;
    assert_eq!(take(short), Err(ProtocolError::Usage));
}
