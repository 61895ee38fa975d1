//! Whether a request may be sent a second time.
//!
//! Not here: what of its body is kept for that (`keep`).

use http::Method;

/// The rule's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Repeat {
    Yes,
    /// In words for whoever reads the refusal.
    No(&'static str),
}

/// `handed`: a byte of it may have reached a node. `whole`: all of its body that was taken is kept.
pub fn may_repeat(method: &Method, handed: bool, whole: bool) -> Repeat {
    if !whole {
        return Repeat::No("its body was too long to be kept");
    }
    // RFC 9110 section 9.2.2: done twice is as good as done once.
    if !handed || method.is_idempotent() {
        return Repeat::Yes;
    }
    Repeat::No("its method may do something each time")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_no_harm_twice_is_repeated_and_nothing_else_that_may_have_arrived() {
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
            let got = may_repeat(&method, handed, whole) == Repeat::Yes;
            assert_eq!(got, repeated, "{method} handed={handed} whole={whole}");
        }
    }
}
