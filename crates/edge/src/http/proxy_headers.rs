//! Writes header fields between the client and an application. It removes those that must not
//! pass, and adds those of a proxy. They are written directly to the output, without a second
//! map.
//!
//! A client's claims about its identity (`Forwarded`, `X-Forwarded-*`) are believed and continued
//! only from a trusted proxy. From anybody else they are dropped before rules and applications
//! see them. `fields` has the one table of fields and their treatment. `client` is the client as
//! it is then known. Hop-by-hop fields never get here: `http1::head` removes them in both
//! directions, and HTTP/2 refuses them. Not here: CGI variables (`programs`), the connection to
//! the application (`upstream`).

use std::cell::RefCell;
use std::net::IpAddr;

use http::header::{FORWARDED, HeaderMap, HeaderName, VIA};
use http::{HeaderValue, Version};
use ipnet::IpNet;
use nagaya_base::Code;

use crate::http::message::{RequestHead, Response};
use crate::http::networks::contains;
use crate::http::proxy_headers::client::ClientView;
use crate::http::proxy_headers::fields::{FieldFate, fate};
use crate::http::proxy_headers::names::{
    X_FORWARDED_FOR, X_FORWARDED_HOST, X_FORWARDED_PORT, X_FORWARDED_PROTO, hex, push_address, push_number,
};
use crate::http::receipt_field::RECEIPT;
use crate::http::refusal::Refusal;
use crate::options::EdgeConfig;

pub mod addresses;
pub mod client;
pub mod fields;
pub mod names;
pub mod trace;

/// Maximum number of times a request may pass through this node. Two have their uses (a cache
/// between two sites). More mean a loop.
const HOPS_MAX: usize = 4;

const CODE_BAD_PROXY: Code = Code(432);

/// One thread's rules of forwarding.
#[derive(Debug)]
pub struct ForwardingRules(RefCell<ForwardingSettings>);

#[derive(Debug)]
struct ForwardingSettings {
    /// This node in Via. `via` is its element in a response.
    name: Box<str>,
    via: HeaderValue,
    trusted: Vec<IpNet>,
}

impl ForwardingRules {
    pub fn new(options: &EdgeConfig) -> Self {
        Self(RefCell::new(ForwardingSettings::new(options)))
    }

    pub fn set_options(&self, options: &EdgeConfig) {
        *self.0.borrow_mut() = ForwardingSettings::new(options);
    }

    /// Returns the address of the client: the peer, or the client that trusted proxies in between
    /// name.
    pub fn client(&self, head: &RequestHead) -> IpAddr {
        let settings = self.0.borrow();
        let peer = head.conn.peer.ip().to_canonical();
        if !settings.trusts(peer) {
            return peer;
        }
        addresses::find_client(&head.headers, peer, |address| settings.trusts(address)).address
    }

    /// Returns the client's side of the request: the peer's, or as trusted proxies in between
    /// report it.
    pub fn view_client(&self, head: &RequestHead) -> ClientView {
        let settings = self.0.borrow();
        if settings.trusts(head.conn.peer.ip().to_canonical()) {
            ClientView::relayed(head, |address| settings.trusts(address))
        } else {
            ClientView::direct(head)
        }
    }

    /// Removes fields of the request that a client may not send. Fields that are added later are
    /// not the client's.
    pub fn strip_claims(&self, head: &mut RequestHead) {
        let trusted = self.0.borrow().trusts(head.conn.peer.ip().to_canonical());
        // Usually there is none, and nothing is allocated.
        while let Some(name) =
            head.headers.keys().find(|name| fields::is_claim(name.as_str(), trusted)).cloned()
        {
            head.headers.remove(name);
        }
    }

    /// Writes the header section for a server, from a request without claims (`strip_claims`).
    /// Host comes first. Each field is `name: value` between line ends: the first line end is
    /// written, the last is not. `host` replaces the client's host.
    ///
    /// # Errors
    /// Fails if the request has passed here too often already.
    pub fn request(&self, head: &RequestHead, host: Option<&str>, out: &mut Vec<u8>) -> Result<(), Refusal> {
        let settings = self.0.borrow();
        let trusted = settings.trusts(head.conn.peer.ip().to_canonical());
        let mut has_via = false;
        field(out, b"host");
        match host {
            Some(host) => out.extend_from_slice(host.as_bytes()),
            None => write_host(out, head),
        }
        for (name, value) in &head.headers {
            match fate(name.as_str()) {
                FieldFate::Kept | FieldFate::Trusted => {
                    field(out, name.as_str().as_bytes());
                    out.extend_from_slice(value.as_bytes());
                }
                FieldFate::Continued => has_via |= *name == VIA,
                FieldFate::Replaced | FieldFate::Restated | FieldFate::Dropped => {}
            }
        }
        if has_via && settings.passes(&head.headers) >= HOPS_MAX {
            return Err(Refusal::LoopDetected);
        }
        if trusted {
            let view = ClientView::relayed(head, |address| settings.trusts(address));
            write_forwarding(out, head, &head.headers, view.server_port);
        } else {
            write_forwarding(out, head, &HeaderMap::new(), head.conn.local.port());
        }
        trace::each_field(&head.headers, head.id, |name, value| {
            field(out, name.as_str().as_bytes());
            out.extend_from_slice(value);
        });
        field(out, b"x-request-id");
        out.extend_from_slice(&hex::<32>(head.id.0));
        field(out, b"via");
        if has_via {
            write_list(out, &head.headers, &VIA);
        }
        out.extend_from_slice(version(head.version).as_bytes());
        out.push(b' ');
        out.extend_from_slice(settings.name.as_bytes());
        Ok(())
    }

    /// Adjusts the application's response for the client. The application must not send the
    /// node's receipt fields.
    pub fn response(&self, response: &mut Response) {
        response.headers.remove(&RECEIPT);
        let settings = self.0.borrow();
        if response.headers.contains_key(VIA) {
            let mut list = Vec::new();
            write_list(&mut list, &response.headers, &VIA);
            list.extend_from_slice(settings.via.as_bytes());
            let joined = HeaderValue::from_bytes(&list).expect("valid values, joined by valid bytes");
            response.headers.insert(VIA, joined);
        } else {
            response.headers.insert(VIA, settings.via.clone());
        }
    }
}

impl ForwardingSettings {
    fn new(options: &EdgeConfig) -> Self {
        let trusted = options.trusted_proxies.iter().filter_map(|text| match network(text) {
            Some(network) => Some(network),
            None => {
                tracing::error!(
                    "{CODE_BAD_PROXY}: trusted proxy '{text}' is not an address or a network like 192.0.2.0/24; it is not trusted"
                );
                None
            }
        });
        let name = token(&options.node);
        let via = HeaderValue::try_from(format!("1.1 {name}")).expect("a token and a version");
        Self { name, via, trusted: trusted.collect() }
    }

    fn trusts(&self, address: IpAddr) -> bool {
        contains(&self.trusted, address)
    }

    /// Returns how often this node is in Via.
    fn passes(&self, headers: &HeaderMap) -> usize {
        let entries = headers.get_all(VIA).iter().filter_map(|v| v.to_str().ok()).flat_map(|v| v.split(','));
        entries
            .filter_map(|entry| entry.split_ascii_whitespace().nth(1))
            .filter(|by| by.eq_ignore_ascii_case(&self.name))
            .count()
    }
}

/// Parses a network. A single address is a network of its own.
pub(crate) fn network(text: &str) -> Option<IpNet> {
    text.parse().ok().or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from)).map(|network| network.trunc())
}

/// Returns the node's name as a pseudonym in Via, which is a token (RFC 9110 section 5.6.2).
fn token(name: &str) -> Box<str> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
    let token: String = name.chars().map(|c| if fits(c) { c } else { '-' }).collect();
    if token.is_empty() { "nagaya".into() } else { token.into() }
}

/// Returns the protocol by which the message arrived (RFC 9110 section 7.6.3).
fn version(received: Version) -> &'static str {
    match received {
        Version::HTTP_10 => "1.0",
        Version::HTTP_2 => "2.0",
        _ => "1.1",
    }
}

/// Writes the client's host and port.
fn write_host(out: &mut Vec<u8>, head: &RequestHead) {
    out.extend_from_slice(head.host.as_bytes());
    if let Some(port) = head.port {
        out.push(b':');
        push_number(out, port);
    }
}

/// Writes the client's identity, in the standard's form (RFC 7239) and in the usual one. `before`
/// holds the values of trusted proxies, `port` is the one the client connected to.
fn write_forwarding(out: &mut Vec<u8>, head: &RequestHead, before: &HeaderMap, port: u16) {
    let peer = head.conn.peer.ip().to_canonical();
    let scheme = head.conn.scheme();
    field(out, b"forwarded");
    write_list(out, before, &FORWARDED);
    out.extend_from_slice(if peer.is_ipv6() { b"for=\"[" } else { b"for=" });
    push_address(out, peer);
    out.extend_from_slice(if peer.is_ipv6() { b"]\";host=\"" } else { b";host=\"" });
    write_host(out, head);
    out.extend_from_slice(b"\";proto=");
    out.extend_from_slice(scheme.as_bytes());
    field(out, b"x-forwarded-for");
    write_list(out, before, &X_FORWARDED_FOR);
    push_address(out, peer);
    // A trusted proxy in front has seen the client's own connection, so its value stays.
    or_else(out, before, &X_FORWARDED_PROTO, |out| out.extend_from_slice(scheme.as_bytes()));
    or_else(out, before, &X_FORWARDED_HOST, |out| write_host(out, head));
    or_else(out, before, &X_FORWARDED_PORT, |out| push_number(out, port));
}

fn or_else(out: &mut Vec<u8>, before: &HeaderMap, name: &HeaderName, write: impl FnOnce(&mut Vec<u8>)) {
    field(out, name.as_str().as_bytes());
    match before.get(name) {
        Some(value) => out.extend_from_slice(value.as_bytes()),
        None => write(out),
    }
}

/// Writes the elements so far on one line, ready for one more. Some applications read only the
/// first line.
fn write_list(out: &mut Vec<u8>, headers: &HeaderMap, name: &HeaderName) {
    for value in headers.get_all(name) {
        out.extend_from_slice(value.as_bytes());
        out.extend_from_slice(b", ");
    }
}

fn field(out: &mut Vec<u8>, name: &[u8]) {
    out.extend_from_slice(b"\r\n");
    out.extend_from_slice(name);
    out.extend_from_slice(b": ");
}

#[cfg(test)]
mod tests;
