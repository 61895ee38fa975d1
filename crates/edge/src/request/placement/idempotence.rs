//! Decides whether a request may be sent a second time.
//!
//! Not here: what of its body is kept for that (`replay_body`).

use http::Method;

/// The decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RepeatSafety {
    Yes,
    /// The reason in words, for the reader of the refusal.
    No(&'static str),
}

/// `handed` is true if a byte of it may have reached a node. `whole` is true if all of its body
/// that was read is kept.
pub fn may_repeat(method: &Method, handed: bool, whole: bool) -> RepeatSafety {
    if !whole {
        return RepeatSafety::No("its body was too long to be kept");
    }
    // RFC 9110 section 9.2.2: repeating an idempotent method has the same effect as one request.
    if !handed || method.is_idempotent() {
        return RepeatSafety::Yes;
    }
    RepeatSafety::No("its method may do something each time")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_harmless_or_undelivered_requests_are_repeated() {
        for (method, handed, whole, repeated) in [
            ("GET", false, true, true),
            ("GET", true, true, true),
            ("HEAD", true, true, true),
            ("OPTIONS", true, true, true),
            ("PUT", true, true, true),
            ("DELETE", true, true, true),
            ("PUT", true, false, false),
            ("PUT", false, false, false),
            ("POST", false, true, true),
            ("POST", false, false, false),
            ("POST", true, true, false),
            ("POST", true, false, false),
            ("PATCH", true, true, false),
            ("PATCH", false, true, true),
            ("BREW", true, true, false),
        ] {
            let method = Method::from_bytes(method.as_bytes()).unwrap();
            let got = may_repeat(&method, handed, whole) == RepeatSafety::Yes;
            assert_eq!(got, repeated, "{method} handed={handed} whole={whole}");
        }
    }
}
