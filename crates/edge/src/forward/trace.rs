//! The trace context of a request (W3C Trace Context, level 1): continued if it is sound, begun if there is none.
//!
//! Not here: spans and their export; a request's id is its trace id, which joins our log with the application's traces.

use http::header::{HeaderMap, HeaderName, HeaderValue};
use nagaya_base::RequestId;

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// `00-` trace id `-` parent id `-` flags.
const LENGTH: usize = 55;

/// Our span becomes the parent of the application's. Its id is the lower half of the request's.
pub(super) fn continue_or_begin(headers: &mut HeaderMap, id: RequestId) {
    // All zeroes would be invalid in both places.
    let (trace, span) = (id.0.max(1), (id.0 as u64).max(1));
    let mut fields = headers.get_all(TRACEPARENT).iter();
    let only = match (fields.next(), fields.next()) {
        (Some(field), None) => field.to_str().ok().and_then(sound),
        _ => None,
    };
    let parent = if let Some((trace, flags)) = only {
        format!("00-{trace}-{span:016x}-{flags}")
    } else {
        // The state belongs to the trace that is not continued. The flag says that the caller may have
        // recorded the request, which the access log does.
        headers.remove(TRACESTATE);
        format!("00-{trace:032x}-{span:016x}-01")
    };
    headers.insert(TRACEPARENT, HeaderValue::try_from(parent).expect("hexadecimal digits and dashes"));
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
