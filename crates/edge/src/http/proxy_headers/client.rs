//! Describes the client and its request as seen behind the trusted proxies in front of the node.
//!
//! Not here: whether the peer is trusted, header fields about it (`proxy_headers`).

use std::net::IpAddr;

use http::header::HeaderMap;
use http::{HeaderName, HeaderValue};

use crate::http::host;
use crate::http::host::UriAuthority;
use crate::http::message::RequestHead;
use crate::http::proxy_headers::addresses;
use crate::http::proxy_headers::addresses::VouchedHop;
use crate::http::proxy_headers::names::{X_FORWARDED_HOST, X_FORWARDED_PORT, X_FORWARDED_PROTO};

/// The client's side of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientView {
    pub address: IpAddr,
    /// `None` if a proxy in front did not report it.
    pub port: Option<u16>,
    pub scheme: &'static str,
    /// The client's host, if a proxy in front reported another one than it requested itself.
    pub host: Option<Box<str>>,
    /// The port that the client connected to.
    pub server_port: u16,
    /// A trusted proxy forwarded the request.
    pub is_relayed: bool,
}

impl ClientView {
    /// Returns the view if the peer is the client.
    pub fn direct(head: &RequestHead) -> Self {
        let conn = &head.conn;
        Self {
            address: conn.peer.ip().to_canonical(),
            port: Some(conn.peer.port()),
            scheme: conn.scheme(),
            host: None,
            server_port: conn.local.port(),
            is_relayed: false,
        }
    }

    /// Returns the view if the peer is a trusted proxy. Its invalid values count as missing.
    pub(super) fn relayed(head: &RequestHead, is_trusted: impl Fn(IpAddr) -> bool) -> Self {
        let headers = &head.headers;
        let VouchedHop { address, port, element } =
            addresses::find_client(headers, head.conn.peer.ip().to_canonical(), is_trusted);
        let parameter = |name| element.and_then(|element| addresses::parameter(element, name));
        let said_scheme = last(headers, &X_FORWARDED_PROTO).or_else(|| parameter("proto")).and_then(scheme);
        let said_host = last(headers, &X_FORWARDED_HOST)
            .or_else(|| parameter("host"))
            .and_then(|text| host::parse(text).ok());
        let (host, host_port) =
            said_host.map_or((None, None), |UriAuthority { host, port }| (Some(host), port));
        let said_port =
            last(headers, &X_FORWARDED_PORT).and_then(|text| text.parse().ok()).filter(|port| *port > 0);
        let scheme_port = said_scheme.map(|scheme| if scheme == "https" { 443 } else { 80 });
        let direct = Self::direct(head);
        Self {
            address,
            port: if element.is_none() { direct.port } else { port },
            scheme: said_scheme.unwrap_or(direct.scheme),
            host: host.filter(|host| !host.is_empty()),
            server_port: said_port.or(host_port).or(scheme_port).unwrap_or(direct.server_port),
            is_relayed: true,
        }
    }
}

/// Returns the last element of a list, which the nearest proxy wrote.
fn last<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    let value: &HeaderValue = headers.get_all(name).iter().next_back()?;
    let word = value.to_str().ok()?.rsplit(',').next()?.trim();
    (!word.is_empty()).then_some(word)
}

fn scheme(word: &str) -> Option<&'static str> {
    let is_any = |names: &[&str]| names.iter().any(|name| name.eq_ignore_ascii_case(word));
    if is_any(&["https", "wss"]) { Some("https") } else { is_any(&["http", "ws"]).then_some("http") }
}
