//! Evaluates conditional requests: whether the client already has the representation (RFC 9110
//! section 13).
//!
//! Not here: choosing the representation (`encoding`), the ranges themselves (`range`).

use std::time::UNIX_EPOCH;

use http::header::{
    HeaderMap, HeaderName, HeaderValue, IF_MATCH, IF_MODIFIED_SINCE, IF_NONE_MATCH, IF_RANGE,
    IF_UNMODIFIED_SINCE,
};

/// Validators of a representation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Validators<'a> {
    /// Entity tag as sent: quoted, with `W/` in front if weak.
    pub etag: &'a HeaderValue,
    /// Last modification, seconds since 1970. `None` if it is not sent.
    pub modified: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PreconditionResult {
    /// Send the representation.
    Send,
    /// Respond with 304.
    NotModified,
    /// Respond with 412.
    Failed,
}

/// Evaluates in the order of RFC 9110 section 13.2.2, for GET and HEAD of an existing
/// representation.
pub(crate) fn evaluate(headers: &HeaderMap, now: Validators<'_>) -> PreconditionResult {
    if headers.contains_key(IF_MATCH) {
        if !any_tag(headers, IF_MATCH, |tag| is_same_strong(tag, now.etag)) {
            return PreconditionResult::Failed;
        }
    } else if let Some(date) = date(headers, IF_UNMODIFIED_SINCE)
        && now.modified.is_some_and(|modified| modified > date)
    {
        return PreconditionResult::Failed;
    }
    if headers.contains_key(IF_NONE_MATCH) {
        if any_tag(headers, IF_NONE_MATCH, |tag| opaque(tag) == opaque(now.etag.as_bytes())) {
            return PreconditionResult::NotModified;
        }
    } else if let Some(date) = date(headers, IF_MODIFIED_SINCE)
        && now.modified.is_some_and(|modified| modified <= date)
    {
        return PreconditionResult::NotModified;
    }
    PreconditionResult::Send
}

/// Returns whether a `Range` beside these fields still means this representation (section
/// 13.1.5).
pub(crate) fn range_applies(headers: &HeaderMap, now: Validators<'_>) -> bool {
    let Some(condition) = headers.get(IF_RANGE) else { return true };
    let text = condition.as_bytes();
    if text.starts_with(b"\"") || text.starts_with(b"W/") {
        return is_same_strong(text, now.etag);
    }
    // A weak tag means that the file changed too recently for its date to identify it (section
    // 8.8.2.2).
    let strong = !now.etag.as_bytes().starts_with(b"W/");
    strong && now.modified.is_some() && date(headers, IF_RANGE) == now.modified
}

fn is_same_strong(tag: &[u8], etag: &HeaderValue) -> bool {
    !tag.starts_with(b"W/") && tag == etag.as_bytes()
}

/// Returns the tag without its `W/`.
fn opaque(tag: &[u8]) -> &[u8] {
    tag.strip_prefix(b"W/").unwrap_or(tag)
}

/// Returns whether the list is `*`, or contains a tag that is `wanted`.
fn any_tag(headers: &HeaderMap, name: HeaderName, wanted: impl Fn(&[u8]) -> bool) -> bool {
    headers.get_all(name).iter().any(|value| {
        let text = value.as_bytes().trim_ascii();
        text == b"*" || EntityTags(text).any(&wanted)
    })
}

/// Iterates over the entity tags of a list. Ends at the first malformed one, because the rest is
/// ambiguous.
struct EntityTags<'a>(&'a [u8]);

impl<'a> Iterator for EntityTags<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let skip = self.0.iter().take_while(|byte| matches!(byte, b' ' | b'\t' | b',')).count();
        let rest = &self.0[skip..];
        let weak = if rest.starts_with(b"W/") { 2 } else { 0 };
        let quoted = rest.get(weak..)?.strip_prefix(b"\"")?;
        let length = weak + memchr::memchr(b'"', quoted)? + 2;
        self.0 = &rest[length..];
        Some(&rest[..length])
    }
}

/// Returns a date field in seconds since 1970. `None` if it is missing, repeated or not a date
/// (section 13.1.3: ignored).
fn date(headers: &HeaderMap, name: HeaderName) -> Option<u64> {
    let mut values = headers.get_all(name).iter();
    let date = httpdate::parse_http_date(values.next()?.to_str().ok()?).ok()?;
    if values.next().is_some() {
        return None;
    }
    Some(date.duration_since(UNIX_EPOCH).ok()?.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODIFIED: u64 = 1_700_000_000;
    const SAME: &str = "Tue, 14 Nov 2023 22:13:20 GMT";
    const BEFORE: &str = "Tue, 14 Nov 2023 22:13:19 GMT";
    const AFTER: &str = "Tue, 14 Nov 2023 22:13:21 GMT";

    fn headers(fields: &[(HeaderName, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            headers.append(name, HeaderValue::from_static(value));
        }
        headers
    }

    fn outcome(fields: &[(HeaderName, &'static str)]) -> PreconditionResult {
        let etag = HeaderValue::from_static("\"a,b\"");
        evaluate(&headers(fields), Validators { etag: &etag, modified: Some(MODIFIED) })
    }

    #[test]
    fn each_condition_alone() {
        use PreconditionResult::{Failed, NotModified, Send};
        for (name, value, expected) in [
            (IF_MATCH, "\"a,b\"", Send),
            (IF_MATCH, "\"x\", \"a,b\"", Send),
            (IF_MATCH, "*", Send),
            (IF_MATCH, "W/\"a,b\"", Failed),
            (IF_MATCH, "\"a\"", Failed),
            (IF_MATCH, "a,b", Failed),
            (IF_UNMODIFIED_SINCE, SAME, Send),
            (IF_UNMODIFIED_SINCE, AFTER, Send),
            (IF_UNMODIFIED_SINCE, BEFORE, Failed),
            (IF_UNMODIFIED_SINCE, "yesterday", Send),
            (IF_NONE_MATCH, "\"a,b\"", NotModified),
            (IF_NONE_MATCH, "W/\"a,b\"", NotModified),
            (IF_NONE_MATCH, "\"x\" , W/\"y\",\"a,b\"", NotModified),
            (IF_NONE_MATCH, "*", NotModified),
            (IF_NONE_MATCH, "\"a\"", Send),
            (IF_NONE_MATCH, "\"unclosed", Send),
            (IF_MODIFIED_SINCE, SAME, NotModified),
            (IF_MODIFIED_SINCE, AFTER, NotModified),
            (IF_MODIFIED_SINCE, BEFORE, Send),
            (IF_MODIFIED_SINCE, "0", Send),
            // The two obsolete forms of RFC 9110 section 5.6.7.
            (IF_MODIFIED_SINCE, "Tuesday, 14-Nov-23 22:13:20 GMT", NotModified),
            (IF_MODIFIED_SINCE, "Tue Nov 14 22:13:20 2023", NotModified),
        ] {
            assert_eq!(outcome(&[(name.clone(), value)]), expected, "{name}: {value}");
        }
    }

    #[test]
    fn the_order_of_precedence_is_that_of_the_rfc() {
        use PreconditionResult::{Failed, NotModified, Send};
        for (fields, expected) in [
            // If-Match decides alone where If-Unmodified-Since would fail.
            (vec![(IF_MATCH, "\"a,b\""), (IF_UNMODIFIED_SINCE, BEFORE)], Send),
            (vec![(IF_MATCH, "\"x\""), (IF_NONE_MATCH, "\"a,b\"")], Failed),
            (vec![(IF_UNMODIFIED_SINCE, BEFORE), (IF_NONE_MATCH, "\"a,b\"")], Failed),
            (vec![(IF_MATCH, "\"a,b\""), (IF_NONE_MATCH, "\"a,b\"")], NotModified),
            // If-None-Match decides alone where If-Modified-Since would say 304.
            (vec![(IF_NONE_MATCH, "\"x\""), (IF_MODIFIED_SINCE, SAME)], Send),
            (vec![(IF_NONE_MATCH, "\"x\""), (IF_NONE_MATCH, "\"a,b\"")], NotModified),
            (vec![(IF_MODIFIED_SINCE, SAME), (IF_MODIFIED_SINCE, SAME)], Send),
        ] {
            assert_eq!(outcome(&fields), expected, "{fields:?}");
        }
    }

    #[test]
    fn a_range_applies_only_to_exactly_what_the_client_has() {
        let applies = |etag, condition| {
            let etag = HeaderValue::from_static(etag);
            let now = Validators { etag: &etag, modified: Some(MODIFIED) };
            range_applies(&headers(&[(IF_RANGE, condition)]), now)
        };
        assert!(applies("\"a\"", "\"a\""));
        assert!(applies("\"a\"", SAME));
        for (etag, condition) in [
            ("\"a\"", "\"b\""),
            ("\"a\"", "W/\"a\""),
            ("W/\"a\"", "W/\"a\""),
            ("W/\"a\"", SAME),
            ("\"a\"", AFTER),
            ("\"a\"", BEFORE),
            ("\"a\"", "soon"),
        ] {
            assert!(!applies(etag, condition), "{etag} {condition}");
        }
    }
}
