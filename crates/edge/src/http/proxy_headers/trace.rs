//! Handles the trace context of a request (W3C Trace Context, level 1): continues a valid one, or
//! begins one.
//!
//! Not here: spans and their export. A request's id is its trace id, which joins our log with the
//! application's traces.

use http::header::{HeaderMap, HeaderName};
use nagaya_base::RequestId;
use smallvec::SmallVec;

use crate::http::proxy_headers::names::hex;

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// `00-` trace id `-` parent id `-` flags.
const LENGTH: usize = 55;

/// Calls `put` with each field. Our span becomes the parent of the application's. Its id is the
/// lower half of the request's.
pub fn each_field(headers: &HeaderMap, id: RequestId, mut put: impl FnMut(&HeaderName, &[u8])) {
    // All zeroes would be invalid in both places.
    let trace = id.0.max(1);
    let mut fields = headers.get_all(TRACEPARENT).iter();
    let only = match (fields.next(), fields.next()) {
        (Some(field), None) => field.to_str().ok().and_then(sound),
        _ => None,
    };
    let mut parent: SmallVec<[u8; LENGTH]> = SmallVec::from_slice(b"00-");
    match only {
        Some((trace, _)) => parent.extend_from_slice(trace.as_bytes()),
        None => parent.extend_from_slice(&hex::<32>(trace)),
    }
    parent.push(b'-');
    parent.extend_from_slice(&hex::<16>(if trace << 64 == 0 { 1 } else { trace }));
    parent.push(b'-');
    // A new trace is flagged: the caller may have recorded the request, as the access log does.
    parent.extend_from_slice(only.map_or("01", |(_, flags)| flags).as_bytes());
    put(&TRACEPARENT, &parent);
    // The state belongs to the trace, so it is forwarded only with it.
    for value in headers.get_all(TRACESTATE).iter().filter(|_| only.is_some()) {
        put(&TRACESTATE, value.as_bytes());
    }
}

/// Returns trace id and flags of a valid value. A later version may be longer, and is read as
/// this one (section 4.3).
fn sound(text: &str) -> Option<(&str, &str)> {
    let is_hex = |part: &str| part.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    let is_zero = |part: &str| part.bytes().all(|b| b == b'0');
    if !text.is_ascii() || text.len() < LENGTH || (text.len() > LENGTH && text.as_bytes()[LENGTH] != b'-') {
        return None;
    }
    let mut parts = text[..LENGTH].split('-');
    let (version, trace, parent, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    let lengths = [version.len(), trace.len(), parent.len(), flags.len()];
    let valid = lengths == [2, 32, 16, 2]
        && [version, trace, parent, flags].into_iter().all(is_hex)
        && version != "ff"
        && (version != "00" || text.len() == LENGTH)
        && !is_zero(trace)
        && !is_zero(parent);
    valid.then_some((trace, flags))
}
