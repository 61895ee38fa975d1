//! Who the client is, as the proxies in front of us tell it.
//!
//! Not here: whether they are believed (`forward`).

use std::net::{IpAddr, SocketAddr};

use http::header::{FORWARDED, HeaderMap};

use super::X_FORWARDED_FOR;

/// Walks the chain of addresses from the nearest to the farthest, as far as each hop is trusted to have
/// reported the one before it. `peer` is trusted. A word that is no address ends the walk.
pub(super) fn client(headers: &HeaderMap, peer: IpAddr, is_trusted: impl Fn(IpAddr) -> bool) -> IpAddr {
    let mut client = peer;
    for word in chain(headers).iter().rev() {
        let Some(address) = address(word) else { break };
        client = address;
        if !is_trusted(address) {
            break;
        }
    }
    client
}

/// The addresses in the order they were added. The usual field first: most proxies continue only that one.
fn chain(headers: &HeaderMap) -> Vec<&str> {
    let words = |name: &http::HeaderName| -> Vec<&str> {
        let fields = headers.get_all(name).iter().map(|field| field.to_str().unwrap_or("unknown"));
        fields.flat_map(|field| field.split(',')).map(str::trim).collect()
    };
    let usual = words(&X_FORWARDED_FOR);
    if !usual.is_empty() {
        return usual;
    }
    words(&FORWARDED).into_iter().map(forwarded_for).collect()
}

/// The `for` of one element of Forwarded; "unknown" if it has none (RFC 7239 section 6.2).
fn forwarded_for(element: &str) -> &str {
    let pairs = element.split(';').filter_map(|pair| pair.split_once('='));
    pairs
        .filter(|(name, _)| name.trim().eq_ignore_ascii_case("for"))
        .map(|(_, node)| node.trim().trim_matches('"'))
        .next()
        .unwrap_or("unknown")
}

/// An address with or without brackets and port.
fn address(word: &str) -> Option<IpAddr> {
    let bare = word.strip_prefix('[').and_then(|w| w.strip_suffix(']')).unwrap_or(word);
    let address = bare.parse::<IpAddr>().ok().or_else(|| word.parse::<SocketAddr>().ok().map(|s| s.ip()))?;
    Some(address.to_canonical())
}
