//! The trace context of a request (W3C Trace Context, level 1): continued if it is sound, begun if there is none.
//!
//! Not here: spans and their export; a request's id is its trace id, which joins our log with the application's traces.

use http::header::{HeaderMap, HeaderName};
use nagaya_base::RequestId;
use smallvec::SmallVec;

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// `00-` trace id `-` parent id `-` flags.
const LENGTH: usize = 55;

/// Calls `put` with each field. Our span becomes the parent of the application's; its id is the lower half of the request's.
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
        None => super::push_hex(&mut parent, trace, 32),
    }
    parent.push(b'-');
    super::push_hex(&mut parent, if trace << 64 == 0 { 1 } else { trace }, 16);
    parent.push(b'-');
    // A new trace is flagged: the caller may have recorded the request, which the access log does.
    parent.extend_from_slice(only.map_or("01", |(_, flags)| flags).as_bytes());
    put(&TRACEPARENT, &parent);
    // The state belongs to the trace: it goes on only with it.
    for value in headers.get_all(TRACESTATE).iter().filter(|_| only.is_some()) {
        put(&TRACESTATE, value.as_bytes());
    }
}

/// Trace id and flags of a valid value. A later version may be longer, and is read as this one (section 4.3).
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
