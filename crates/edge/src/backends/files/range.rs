//! Implements byte ranges (RFC 9110 section 14): parses them and builds the response.
//!
//! Not here: whether the ranges apply at all (`conditional::range_applies`).

use bytes::Bytes;
use http::header::{ACCEPT_RANGES, CONTENT_RANGE, CONTENT_TYPE, HeaderMap, HeaderValue, RANGE};
use http::{Method, StatusCode};

use crate::backends::files::load::FileContent;
use crate::http::message::{BodyPart, Response, ResponseBody};

/// Maximum number of ranges in one request. More are not for reading a document (RFC 9110 section
/// 14.2), and get the whole file. Readers of large documents ask for a handful.
pub const RANGES_MAX: usize = 16;

/// Ranges with a smaller gap are sent as one. A part's own head is about as long as the gap.
const GAP_MIN: u64 = 128;

/// Bytes from `first` up to and not including `end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ByteSpan {
    pub first: u64,
    pub end: u64,
}

impl ByteSpan {
    fn len(self) -> u64 {
        self.end - self.first
    }
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum WantedRanges {
    /// The whole file, as a 200: there is no range, or none that is valid, or the file is empty.
    Whole,
    /// One or more separate spans, in the order of the request.
    Spans(Vec<ByteSpan>),
    /// Respond with 416.
    Nothing,
}

/// Returns the meaning of the `Range` field for `size` bytes. Only GET has ranges (section 14.2).
pub(crate) fn wanted(method: &Method, headers: &HeaderMap, size: u64) -> WantedRanges {
    let mut fields = headers.get_all(RANGE).iter();
    let (Some(field), None) = (fields.next(), fields.next()) else { return WantedRanges::Whole };
    if *method != Method::GET {
        return WantedRanges::Whole;
    }
    field.to_str().ok().and_then(|text| parse(text, size)).unwrap_or(WantedRanges::Whole)
}

/// Returns `None` if it is malformed, of another unit or too much.
fn parse(text: &str, size: u64) -> Option<WantedRanges> {
    let (unit, set) = text.split_once('=')?;
    if !unit.trim_ascii().eq_ignore_ascii_case("bytes") {
        return None;
    }
    let mut spans = Vec::new();
    let mut asked = 0;
    for spec in set.split(',').map(str::trim_ascii).filter(|spec| !spec.is_empty()) {
        asked += 1;
        if asked > RANGES_MAX {
            return None;
        }
        spans.extend(parse_spec(spec, size)?);
    }
    if asked == 0 {
        return None;
    }
    // An empty file has no byte for a range, and a 200 shows as much of it.
    if size == 0 {
        return None;
    }
    if spans.is_empty() {
        return Some(WantedRanges::Nothing);
    }
    // A range of the whole file is a range as well. After `bytes=0-`, a 200 would mean a server
    // without ranges.
    Some(WantedRanges::Spans(coalesce(spans)))
}

/// The outer `None` is a malformed spec, the inner one a spec without matching bytes.
fn parse_spec(spec: &str, size: u64) -> Option<Option<ByteSpan>> {
    let (first, last) = spec.split_once('-')?;
    let span = if first.is_empty() {
        let suffix = number(last)?;
        ByteSpan { first: size.saturating_sub(suffix), end: size }
    } else {
        let first = number(first)?;
        let last = if last.is_empty() { u64::MAX } else { number(last)? };
        if last < first {
            return None;
        }
        ByteSpan { first, end: last.saturating_add(1).min(size) }
    };
    Some((span.first < span.end).then_some(span))
}

/// Parses digits only, while `parse` alone accepts more. A number too large for us is larger than
/// any file.
fn number(digits: &str) -> Option<u64> {
    let well_formed = !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit());
    well_formed.then(|| digits.parse().unwrap_or(u64::MAX))
}

/// Joins spans that overlap or nearly touch, each at the place of its first part. The result is
/// never larger than the file. So overlapping ranges cannot multiply the work (section 17.15).
fn coalesce(spans: Vec<ByteSpan>) -> Vec<ByteSpan> {
    let mut sorted: Vec<(usize, ByteSpan)> = spans.into_iter().enumerate().collect();
    sorted.sort_by_key(|(_, span)| span.first);
    let mut joined: Vec<(usize, ByteSpan)> = Vec::with_capacity(sorted.len());
    for (place, span) in sorted {
        match joined.last_mut() {
            Some((earliest, last)) if span.first <= last.end.saturating_add(GAP_MIN) => {
                last.end = last.end.max(span.end);
                *earliest = place.min(*earliest);
            }
            _ => joined.push((place, span)),
        }
    }
    joined.sort_by_key(|(place, _)| *place);
    joined.into_iter().map(|(_, span)| span).collect()
}

/// Returns a 206 with the spans. `headers` are those of a 200. `boundary` separates several parts
/// and must not occur in the content, so it is random.
pub(super) fn partial(
    mut headers: HeaderMap,
    content: &FileContent,
    spans: &[ByteSpan],
    boundary: impl FnOnce() -> u128,
) -> Response {
    let size = content.len();
    let body = match spans {
        [span] => {
            headers.insert(CONTENT_RANGE, ascii(content_range(*span, size)));
            body_of(content, *span)
        }
        _ => {
            let boundary = format!("{:032x}", boundary());
            let multipart = ascii(format!("multipart/byteranges; boundary={boundary}"));
            let part_type = headers.insert(CONTENT_TYPE, multipart);
            ResponseBody::Parts(parts(content, spans, &boundary, part_type.as_ref()))
        }
    };
    Response { headers: headers.into(), ..Response::new(StatusCode::PARTIAL_CONTENT) }.with_body(body)
}

fn parts(
    content: &FileContent,
    spans: &[ByteSpan],
    boundary: &str,
    part_type: Option<&HeaderValue>,
) -> Vec<BodyPart> {
    let part_type = part_type.and_then(|value| value.to_str().ok()).unwrap_or("application/octet-stream");
    let mut parts = Vec::with_capacity(spans.len() * 2 + 1);
    let mut newline = "";
    for span in spans {
        let range = content_range(*span, content.len());
        let head =
            format!("{newline}--{boundary}\r\nContent-Type: {part_type}\r\nContent-Range: {range}\r\n\r\n");
        parts.push(BodyPart::Bytes(Bytes::from(head)));
        parts.push(match content {
            FileContent::Memory(bytes) => {
                BodyPart::Bytes(bytes.slice(span.first as usize..span.end as usize))
            }
            FileContent::Open { file, .. } => {
                BodyPart::File { file: file.clone(), offset: span.first, len: span.len() }
            }
        });
        newline = "\r\n";
    }
    parts.push(BodyPart::Bytes(Bytes::from(format!("\r\n--{boundary}--\r\n"))));
    parts
}

/// Returns all of `content`.
pub(super) fn whole(content: &FileContent) -> ResponseBody {
    match content {
        FileContent::Memory(bytes) => ResponseBody::Bytes(bytes.clone()),
        FileContent::Open { .. } => body_of(content, ByteSpan { first: 0, end: content.len() }),
    }
}

fn body_of(content: &FileContent, span: ByteSpan) -> ResponseBody {
    match content {
        FileContent::Memory(bytes) => {
            ResponseBody::Bytes(bytes.slice(span.first as usize..span.end as usize))
        }
        FileContent::Open { file, .. } => {
            ResponseBody::File { file: file.clone(), offset: span.first, len: span.len() }
        }
    }
}

/// Returns a 416 with the length of the file, so that the client can correct its request.
pub(super) fn unsatisfiable(size: u64) -> Response {
    Response::new(StatusCode::RANGE_NOT_SATISFIABLE)
        .with_header(CONTENT_RANGE, ascii(format!("bytes */{size}")))
        .with_header(ACCEPT_RANGES, HeaderValue::from_static("bytes"))
}

fn content_range(span: ByteSpan, size: u64) -> String {
    format!("bytes {}-{}/{size}", span.first, span.end - 1)
}

fn ascii(text: String) -> HeaderValue {
    HeaderValue::try_from(text).expect("digits and tokens are printable ASCII")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spans(text: &str, size: u64) -> Option<Vec<(u64, u64)>> {
        match parse(text, size) {
            Some(WantedRanges::Spans(spans)) => {
                Some(spans.iter().map(|span| (span.first, span.end)).collect())
            }
            Some(WantedRanges::Nothing) => Some(vec![]),
            Some(WantedRanges::Whole) | None => None,
        }
    }

    #[test]
    fn specs_are_read_as_the_rfc_says() {
        for (text, expected) in [
            ("bytes=0-0", Some(vec![(0, 1)])),
            ("bytes=0-9", Some(vec![(0, 10)])),
            ("bytes=990-", Some(vec![(990, 1000)])),
            ("bytes=990-5000", Some(vec![(990, 1000)])),
            ("bytes=0-99999999999999999999999", Some(vec![(0, 1000)])),
            ("bytes=-1", Some(vec![(999, 1000)])),
            ("bytes=-5000", Some(vec![(0, 1000)])),
            ("Bytes= 0-0 , 500-500 ,", Some(vec![(0, 1), (500, 501)])),
            ("bytes=500-500,0-0", Some(vec![(500, 501), (0, 1)])),
            ("bytes=0-0,2000-", Some(vec![(0, 1)])),
            // Nothing satisfiable.
            ("bytes=1000-", Some(vec![])),
            ("bytes=-0", Some(vec![])),
            ("bytes=99999999999999999999999-", Some(vec![])),
            // Ignored.
            ("bytes=", None),
            ("bytes=,", None),
            ("bytes=5-2", None),
            ("bytes=+1-2", None),
            ("bytes=1 -2", None),
            ("bytes=a-b", None),
            ("bytes=--1", None),
            ("bytes=5", None),
            ("bytes 0-1", None),
            ("seconds=0-1", None),
            ("bytes=0-0,x", None),
        ] {
            assert_eq!(spans(text, 1000), expected, "{text}");
        }
        for text in ["bytes=0-", "bytes=0-0", "bytes=-1", "bytes=5-", "bytes=0-,-1"] {
            assert_eq!(spans(text, 0), None, "{text}: an empty file is sent whole");
        }
    }

    #[test]
    fn overlapping_and_neighbouring_ranges_become_one() {
        assert_eq!(spans("bytes=0-10,5-20", 1000), Some(vec![(0, 21)]));
        assert_eq!(spans("bytes=600-700,0-10,8-20,20-40", 1000), Some(vec![(600, 701), (0, 41)]));
        assert_eq!(spans("bytes=0-9,100-109", 1000), Some(vec![(0, 110)]));
        assert_eq!(spans("bytes=0-,0-,0-,0-", 1000), Some(vec![(0, 1000)]));
    }

    #[test]
    fn too_many_ranges_mean_the_whole_file() {
        let ranges = |count: u64| {
            let specs: Vec<_> = (0..count).map(|at| format!("{0}-{0}", at * 1000)).collect();
            format!("bytes={}", specs.join(","))
        };
        assert_eq!(spans(&ranges(RANGES_MAX as u64), 1 << 20).map(|spans| spans.len()), Some(RANGES_MAX));
        assert_eq!(spans(&ranges(RANGES_MAX as u64 + 1), 1 << 20), None);
    }
}
