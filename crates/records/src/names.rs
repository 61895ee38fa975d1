//! Names that are valid once they exist: tenants, sites, and the host patterns of sites.
//!
//! Not here: paths inside a site; `record` checks those.

use std::fmt;
use std::sync::Arc;

use nagaya_base::limits::{HOST_LEN_MAX, NAME_LEN_MAX};
use serde::{Deserialize, Serialize};

use crate::punycode;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    #[error(
        "'{0}' is not a name: use 1 to {NAME_LEN_MAX} of a-z, 0-9, '-', '_' and '.', beginning with a letter or digit"
    )]
    Name(String),
    #[error(
        "'{0}' is not a host name: use letters, digits, '-' and '.', at most {HOST_LEN_MAX} characters; '*.' only in front; '*' alone is the default site{hint}",
        hint = hint(.0)
    )]
    Host(String),
}

/// Browsers send such a name in this form.
fn hint(host: &str) -> String {
    punycode::ascii_form(host)
        .map_or_else(String::new, |ascii| format!("; in DNS this name is {ascii}: write it so"))
}

macro_rules! name_type {
    ($(#[$doc:meta])* $type:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $type(Arc<str>);

        impl $type {
            pub fn new(text: &str) -> Result<Self, NameError> {
                let ok = (1..=NAME_LEN_MAX).contains(&text.len())
                    && text.as_bytes()[0].is_ascii_alphanumeric()
                    && text.bytes().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.'));
                if ok { Ok(Self(text.into())) } else { Err(NameError::Name(text.into())) }
            }

            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $type {
            type Error = NameError;
            fn try_from(text: String) -> Result<Self, NameError> {
                Self::new(&text)
            }
        }

        impl From<$type> for String {
            fn from(name: $type) -> String {
                (*name.0).to_owned()
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl std::borrow::Borrow<str> for $type {
            fn borrow(&self) -> &str {
                &self.0
            }
        }
    };
}

name_type! {
    /// An owner of sites, with a uid and limits.
    TenantName
}
name_type! {
    /// Host names that are served in one way.
    SiteName
}
name_type! {
    /// A machine of a cluster.
    NodeName
}
name_type! {
    /// A rule in the store.
    RuleName
}

/// `www.example.org`, `*.example.org` or `*` (the default site), in lower case, without a port.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct HostPattern(Box<str>);

impl HostPattern {
    pub fn new(text: &str) -> Result<Self, NameError> {
        let lower = text.to_ascii_lowercase();
        let rest = lower.strip_prefix("*.").unwrap_or(&lower);
        if lower == "*" || is_host_name(rest) || is_address(rest) {
            Ok(Self(lower.into()))
        } else {
            Err(NameError::Host(text.into()))
        }
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Returns whether it has labels of letters, digits, `-` and `_`, each 1 to 63 long (RFC 1035
/// 2.3.4). `_` is in use, though not in RFC 952.
pub fn is_host_name(text: &str) -> bool {
    (1..=HOST_LEN_MAX).contains(&text.len())
        && text.split('.').all(|label| {
            (1..=63).contains(&label.len())
                && !label.starts_with('-')
                && !label.ends_with('-')
                && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
        })
}

/// Returns whether it is `[::1]`: an IPv6 literal as in a Host field. IPv4 literals pass as host
/// names.
fn is_address(text: &str) -> bool {
    text.strip_prefix('[')
        .and_then(|t| t.strip_suffix(']'))
        .is_some_and(|t| t.parse::<std::net::Ipv6Addr>().is_ok())
}

impl TryFrom<String> for HostPattern {
    type Error = NameError;
    fn try_from(text: String) -> Result<Self, NameError> {
        Self::new(&text)
    }
}

impl From<HostPattern> for String {
    fn from(pattern: HostPattern) -> String {
        pattern.0.into()
    }
}

impl fmt::Display for HostPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_could_leave_a_directory_are_refused() {
        for bad in ["", ".", "..", ".x", "a/b", "A", "ä", "a b", "-x", &"a".repeat(129)] {
            assert!(SiteName::new(bad).is_err(), "{bad}");
        }
        for good in ["a", "wiki", "www.example.org", "0-9_a.b"] {
            assert!(SiteName::new(good).is_ok(), "{good}");
        }
    }

    #[test]
    fn host_patterns_allow_a_star_only_in_front() {
        for good in ["example.org", "*.example.org", "*", "LOCALHOST", "127.0.0.1", "[::1]", "a_b.c"] {
            assert!(HostPattern::new(good).is_ok(), "{good}");
        }
        for bad in ["", "a.*.b", "**", "*.", "a..b", "-a.b", "a b", "a/b", "a:80", "[::g]", &"a".repeat(64)] {
            assert!(HostPattern::new(bad).is_err(), "{bad}");
        }
        assert_eq!(HostPattern::new("WWW.Example.ORG").unwrap().as_str(), "www.example.org");
    }
}
