//! Parses `host[:port]` of Host, `:authority` and absolute targets (RFC 3986 section 3.2.2, RFC
//! 9110 section 7.2).
//!
//! Not here: which site answers to the host (`router`).

use nagaya_base::limits::HOST_LEN_MAX;

/// A host in lower case and its port, if there was one. An empty host means an HTTP/1.0 request
/// without Host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UriAuthority {
    pub host: Box<str>,
    pub port: Option<u16>,
}

/// The text is not `host` or `host:port`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a host name with an optional port")]
pub struct NotAnAuthority;

/// Parses strictly: no userinfo, no empty host, no percent-encoding. The port has digits up to
/// 65535, or none behind the colon.
pub fn parse(text: &str) -> Result<UriAuthority, NotAnAuthority> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (address, after) = rest.split_once(']').ok_or(NotAnAuthority)?;
            address.parse::<std::net::Ipv6Addr>().map_err(|_| NotAnAuthority)?;
            let port = if after.is_empty() { "" } else { after.strip_prefix(':').ok_or(NotAnAuthority)? };
            (&text[..address.len() + 2], port)
        }
        None => {
            let end = name_len(text.as_bytes()).ok_or(NotAnAuthority)?;
            let host = &text[..end];
            let port = match text.as_bytes().get(end) {
                None => "",
                Some(b':') => &text[end + 1..],
                Some(_) => return Err(NotAnAuthority),
            };
            (host.strip_suffix('.').unwrap_or(host), port)
        }
    };
    let port = match port {
        "" => None,
        digits if digits.bytes().all(|b| b.is_ascii_digit()) => {
            Some(digits.parse().map_err(|_| NotAnAuthority)?)
        }
        _ => return Err(NotAnAuthority),
    };
    let mut host: Box<str> = host.into();
    host.make_ascii_lowercase();
    Ok(UriAuthority { host, port })
}

/// Returns the number of bytes in front that are a host name. `None` if there are none, or too
/// many, or a label is empty.
fn name_len(text: &[u8]) -> Option<usize> {
    let mut last = b'.';
    let mut len = 0;
    for &byte in text {
        match byte {
            b'.' if last == b'.' => return None,
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' => {}
            _ => break,
        }
        last = byte;
        len += 1;
    }
    // The dot of the root may follow the longest name.
    (1..=HOST_LEN_MAX + usize::from(last == b'.')).contains(&len).then_some(len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_lowered_and_ports_split() {
        let ok = |text, host: &str, port| {
            assert_eq!(parse(text), Ok(UriAuthority { host: host.into(), port }), "{text}");
        };
        ok("Example.ORG", "example.org", None);
        ok("example.org.:80", "example.org", Some(80));
        ok("a_b:", "a_b", None);
        ok("127.0.0.1:65535", "127.0.0.1", Some(65535));
        ok("[::1]:8080", "[::1]", Some(8080));
        ok("[2001:DB8::1]", "[2001:db8::1]", None);
    }

    #[test]
    fn text_that_is_not_a_host_is_refused() {
        let long = "a".repeat(HOST_LEN_MAX + 1);
        for text in [
            "",
            ":80",
            "a b",
            "user@host",
            "a:b",
            "a:70000",
            "a:-1",
            "a:+1",
            "[::1",
            "[::1]x",
            "[g]",
            "a/b",
            ".a",
            "a..b",
            "ä",
            "a%41",
            "a,b",
            &long,
        ] {
            assert_eq!(parse(text), Err(NotAnAuthority), "{text}");
        }
    }
}
