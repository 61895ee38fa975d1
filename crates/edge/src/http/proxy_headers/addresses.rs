//! Finds the client's address in the fields of the proxies in front of us.
//!
//! Not here: whether they are believed (`proxy_headers`).

use std::net::{IpAddr, SocketAddr};

use http::header::{FORWARDED, HeaderMap, HeaderName};

use crate::http::proxy_headers::names::X_FORWARDED_FOR;

/// The farthest trusted hop.
pub(super) struct VouchedHop<'a> {
    pub address: IpAddr,
    /// The port beside the address.
    pub port: Option<u16>,
    /// Its element of Forwarded. For X-Forwarded-For, an address alone. `None` for the peer
    /// itself.
    pub element: Option<&'a str>,
}

/// Walks the chain of addresses from the nearest to the farthest. It continues while each hop is
/// trusted to report the previous one. `peer` is trusted. An element that is no address ends the
/// walk.
pub(super) fn find_client(
    headers: &HeaderMap,
    peer: IpAddr,
    is_trusted: impl Fn(IpAddr) -> bool,
) -> VouchedHop<'_> {
    let mut client = VouchedHop { address: peer, port: None, element: None };
    let usual = elements(headers, &X_FORWARDED_FOR);
    // The usual field goes first, because most proxies continue only that one.
    let is_usual = !usual.is_empty();
    let chain = if is_usual { usual } else { elements(headers, &FORWARDED) };
    for element in chain.into_iter().rev() {
        let word = if is_usual { element } else { parameter(element, "for").unwrap_or_default() };
        let Some((address, port)) = address(word) else { break };
        client = VouchedHop { address, port, element: Some(element) };
        if !is_trusted(address) {
            break;
        }
    }
    client
}

/// Returns the elements of a list in the order they were added.
fn elements<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Vec<&'a str> {
    let fields = headers.get_all(name).iter().map(|field| field.to_str().unwrap_or("unknown"));
    fields.flat_map(|field| field.split(',')).map(str::trim).collect()
}

/// Returns a parameter of one element of Forwarded (RFC 7239 section 4), without quotes.
pub(super) fn parameter<'a>(element: &'a str, wanted: &str) -> Option<&'a str> {
    let pairs = element.split(';').filter_map(|pair| pair.split_once('='));
    pairs
        .filter(|(name, _)| name.trim().eq_ignore_ascii_case(wanted))
        .map(|(_, value)| value.trim().trim_matches('"'))
        .next()
}

/// Parses an address with or without brackets and port.
fn address(word: &str) -> Option<(IpAddr, Option<u16>)> {
    let bare = word.strip_prefix('[').and_then(|w| w.strip_suffix(']')).unwrap_or(word);
    if let Ok(address) = bare.parse::<IpAddr>() {
        return Some((address.to_canonical(), None));
    }
    let socket: SocketAddr = word.parse().ok()?;
    Some((socket.ip().to_canonical(), Some(socket.port())))
}
