//! Chooses a precompressed sibling of a file that the client accepts (`Accept-Encoding`, RFC 9110
//! section 12.5.3).
//!
//! Not here: finding the siblings (`load`). Nagaya compresses nothing itself.

use http::HeaderValue;
use http::header::{ACCEPT_ENCODING, HeaderMap};

/// A content coding for which nagaya finds siblings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ContentCoding {
    Brotli,
    Zstd,
    Gzip,
}

impl ContentCoding {
    /// Order of preference if the client has none: the usually smaller one first.
    pub(crate) const ALL: [Self; 3] = [Self::Brotli, Self::Zstd, Self::Gzip];

    pub(crate) fn extension(self) -> &'static str {
        match self {
            Self::Brotli => ".br",
            Self::Zstd => ".zst",
            Self::Gzip => ".gz",
        }
    }

    /// Returns its registered name.
    pub(crate) fn token(self) -> &'static str {
        match self {
            Self::Brotli => "br",
            Self::Zstd => "zstd",
            Self::Gzip => "gzip",
        }
    }

    pub(crate) fn value(self) -> HeaderValue {
        HeaderValue::from_static(self.token())
    }

    fn is_named(self, token: &str) -> bool {
        token.eq_ignore_ascii_case(self.token())
            // RFC 9110 section 8.4.1.3: the old name means the same.
            || (self == Self::Gzip && token.eq_ignore_ascii_case("x-gzip"))
    }
}

/// The weights, in thousandths, that a client gave the codings. Without the field everything is
/// plain.
pub(crate) struct AcceptedCodings {
    of: [Option<u16>; 3],
    identity: Option<u16>,
    others: Option<u16>,
}

impl AcceptedCodings {
    pub(crate) fn read(headers: &HeaderMap) -> Self {
        let mut accepted = Self { of: [None; 3], identity: None, others: None };
        for value in headers.get_all(ACCEPT_ENCODING) {
            // A value that is not text names no known coding.
            let Ok(text) = value.to_str() else { continue };
            for item in text.split(',') {
                accepted.take(item);
            }
        }
        accepted
    }

    fn take(&mut self, item: &str) {
        let (token, parameter) = item.split_once(';').unwrap_or((item, ""));
        let token = token.trim_matches([' ', '\t']);
        // An unreadable weight refuses the coding: sending the plain file is always right.
        let weight = weight(parameter).unwrap_or(0);
        if token == "*" {
            self.others = Some(weight);
        } else if token.eq_ignore_ascii_case("identity") {
            self.identity = Some(weight);
        } else if let Some(place) = ContentCoding::ALL.iter().position(|coding| coding.is_named(token)) {
            self.of[place] = Some(weight);
        }
    }

    /// Returns the best of `offered`, or `None` for the plain file.
    pub(crate) fn best(&self, offered: impl Iterator<Item = ContentCoding>) -> Option<ContentCoding> {
        let mut best = None;
        // If the client does not mention the plain file, any accepted coding is better.
        let mut best_weight = self.identity.unwrap_or(1).max(1);
        for coding in offered {
            let weight = self.of[coding as usize].or(self.others).unwrap_or(0);
            if weight > best_weight || (weight == best_weight && best.is_none()) {
                best = Some(coding);
                best_weight = weight;
            }
        }
        best
    }
}

/// Returns `q=0.5` in thousandths. Without a parameter it is 1.
fn weight(parameter: &str) -> Option<u16> {
    let parameter = parameter.trim_matches([' ', '\t']);
    if parameter.is_empty() {
        return Some(1000);
    }
    let value = parameter.strip_prefix("q=").or_else(|| parameter.strip_prefix("Q="))?;
    let (whole, fraction) = value.split_once('.').unwrap_or((value, ""));
    if fraction.len() > 3 || !fraction.bytes().all(|digit| digit.is_ascii_digit()) {
        return None;
    }
    let thousandths =
        fraction.bytes().chain(*b"000").take(3).fold(0, |sum, digit| sum * 10 + u16::from(digit - b'0'));
    match whole {
        "0" => Some(thousandths),
        "1" if thousandths == 0 => Some(1000),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(accept: &'static str) -> Option<ContentCoding> {
        let mut headers = HeaderMap::new();
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static(accept));
        AcceptedCodings::read(&headers).best(ContentCoding::ALL.into_iter())
    }

    #[test]
    fn weights_decide_and_then_our_preference() {
        use ContentCoding::{Brotli, Gzip, Zstd};
        for (accept, expected) in [
            ("gzip, deflate, br, zstd", Some(Brotli)),
            ("gzip, zstd", Some(Zstd)),
            ("gzip", Some(Gzip)),
            ("x-GZIP", Some(Gzip)),
            ("br;q=0.5, gzip;q=0.8", Some(Gzip)),
            ("br;q=0, gzip", Some(Gzip)),
            ("br;q=0.001", Some(Brotli)),
            ("*", Some(Brotli)),
            ("*;q=0.3, br;q=0", Some(Zstd)),
            ("identity, gzip;q=0.5", None),
            ("identity;q=0.5, gzip;q=0.5", Some(Gzip)),
            ("identity;q=0, gzip", Some(Gzip)),
            ("identity;q=0", None),
            ("*;q=0", None),
            ("deflate", None),
            ("", None),
            ("br;q=2", None),
            ("br;q=0.1234", None),
            ("br;level=3", None),
            ("br ; q=1.000 ,", Some(Brotli)),
        ] {
            assert_eq!(chosen(accept), expected, "{accept}");
        }
        assert_eq!(AcceptedCodings::read(&HeaderMap::new()).best(ContentCoding::ALL.into_iter()), None);
    }
}
