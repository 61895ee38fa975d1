//! Header fields between the client and an application behind us: what must not be passed on, and what a
//! proxy adds. They are written as they go out; no second map of them is made.
//!
//! What a client says about who it is (`Forwarded`, `X-Forwarded-*`) is believed and continued only if it
//! comes from a trusted proxy; from anybody else it is thrown away before rules and applications see it. `fields` has the
//! one table of what becomes of which field; `client` is the client as it is then known. Hop-by-hop fields never get here:
//! `http1::head` takes them out of both directions, and HTTP/2 refuses them. Not here: CGI variables (`programs`), the
//! connection to the application (`upstream`).

mod addresses;
mod client;
pub mod fields;
pub mod trace;

use std::cell::RefCell;
use std::net::IpAddr;

use http::header::{FORWARDED, HeaderMap, HeaderName, VIA};
use http::{HeaderValue, Version};
use ipnet::IpNet;
use nagaya_base::Code;

pub use self::client::ClientView;
use self::fields::{Fate, fate};
use crate::message::{Head, Response};
use crate::options::Options;
use crate::receipt::RECEIPT;
use crate::refusal::Refusal;

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const X_FORWARDED_PORT: HeaderName = HeaderName::from_static("x-forwarded-port");

/// How often a request may pass through this node. Twice has its uses (a cache between two sites); beyond
/// this it goes in circles.
const HOPS_MAX: usize = 4;

const CODE_BAD_PROXY: Code = Code(432);

/// One thread's rules of forwarding.
#[derive(Debug)]
pub struct Forwarding(RefCell<Settings>);

#[derive(Debug)]
struct Settings {
    /// This node in Via, and what it adds there to an answer.
    name: Box<str>,
    via: HeaderValue,
    trusted: Vec<IpNet>,
}

impl Forwarding {
    pub fn new(options: &Options) -> Self {
        Self(RefCell::new(Settings::new(options)))
    }

    pub fn set_options(&self, options: &Options) {
        *self.0.borrow_mut() = Settings::new(options);
    }

    /// Address of the client: the peer, or whom the trusted proxies between say they speak for.
    pub fn client(&self, head: &Head) -> IpAddr {
        let settings = self.0.borrow();
        let peer = head.conn.peer.ip().to_canonical();
        if !settings.trusts(peer) {
            return peer;
        }
        addresses::find_client(&head.headers, peer, |address| settings.trusts(address)).address
    }

    /// The client's side of the request: the peer's, or what the trusted proxies between say of it.
    pub fn view_client(&self, head: &Head) -> ClientView {
        let settings = self.0.borrow();
        if settings.trusts(head.conn.peer.ip().to_canonical()) {
            ClientView::relayed(head, |address| settings.trusts(address))
        } else {
            ClientView::direct(head)
        }
    }

    /// Takes out of the request what is not for the client to say. What is added later is not the client's.
    pub fn strip_claims(&self, head: &mut Head) {
        let trusted = self.0.borrow().trusts(head.conn.peer.ip().to_canonical());
        // Mostly there is none, and nothing is allocated.
        while let Some(name) =
            head.headers.keys().find(|name| fields::is_claim(name.as_str(), trusted)).cloned()
        {
            head.headers.remove(name);
        }
    }

    /// Writes the header section for a server, from a request without claims (`strip_claims`): Host first, each field as `name: value` between line ends;
    /// the first line end is written, the last is not. `host` is sent in place of what the client asked for.
    ///
    /// # Errors
    /// If the request has been here too often already.
    pub fn request(&self, head: &Head, host: Option<&str>, out: &mut Vec<u8>) -> Result<(), Refusal> {
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
                Fate::Kept | Fate::Trusted => {
                    field(out, name.as_str().as_bytes());
                    out.extend_from_slice(value.as_bytes());
                }
                Fate::Continued => has_via |= *name == VIA,
                Fate::Replaced | Fate::Restated | Fate::Dropped => {}
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
        push_hex(out, head.id.0, 32);
        field(out, b"via");
        if has_via {
            write_list(out, &head.headers, &VIA);
        }
        out.extend_from_slice(version(head.version).as_bytes());
        out.push(b' ');
        out.extend_from_slice(settings.name.as_bytes());
        Ok(())
    }

    /// The application's answer, for the client. What the application calls a receipt is not the node's.
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

impl Settings {
    fn new(options: &Options) -> Self {
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
        self.trusted.iter().any(|network| network.contains(&address))
    }

    /// How often Via says that this node has passed the request on.
    fn passes(&self, headers: &HeaderMap) -> usize {
        let entries = headers.get_all(VIA).iter().filter_map(|v| v.to_str().ok()).flat_map(|v| v.split(','));
        entries
            .filter_map(|entry| entry.split_ascii_whitespace().nth(1))
            .filter(|by| by.eq_ignore_ascii_case(&self.name))
            .count()
    }
}

/// An address stands for itself alone.
pub(crate) fn network(text: &str) -> Option<IpNet> {
    text.parse().ok().or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from)).map(|network| network.trunc())
}

/// The node's name as a pseudonym in Via, which is a token (RFC 9110 section 5.6.2).
fn token(name: &str) -> Box<str> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
    let token: String = name.chars().map(|c| if fits(c) { c } else { '-' }).collect();
    if token.is_empty() { "nagaya".into() } else { token.into() }
}

/// The protocol the message came by (RFC 9110 section 7.6.3).
fn version(received: Version) -> &'static str {
    match received {
        Version::HTTP_10 => "1.0",
        Version::HTTP_2 => "2.0",
        _ => "1.1",
    }
}

/// What the client asked for, with the port it gave.
fn write_host(out: &mut Vec<u8>, head: &Head) {
    out.extend_from_slice(head.host.as_bytes());
    if let Some(port) = head.port {
        out.push(b':');
        push_number(out, port);
    }
}

/// Says who the client is, in the standard's way (RFC 7239) and in the usual one. `before` is what trusted
/// proxies said, `port` the one the client came to.
fn write_forwarding(out: &mut Vec<u8>, head: &Head, before: &HeaderMap, port: u16) {
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
    // A trusted proxy in front has seen the client's own connection; its word stays.
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

/// The elements so far, on one line, ready for one more: some applications read only the first line.
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

fn push_number(out: &mut impl Extend<u8>, number: u16) {
    out.extend(itoa::Buffer::new().format(number).bytes());
}

/// Nearly every address is IPv4, and `fmt` takes longer for its four numbers than for the rest of the head.
pub fn push_address(out: &mut impl Extend<u8>, address: IpAddr) {
    match address {
        IpAddr::V4(address) => {
            for (place, octet) in address.octets().into_iter().enumerate() {
                if place > 0 {
                    out.extend([b'.']);
                }
                push_number(out, octet.into());
            }
        }
        IpAddr::V6(address) => out.extend(address.to_string().bytes()),
    }
}

/// The lowest `digits` hexadecimal digits of `number`.
pub fn push_hex(out: &mut impl Extend<u8>, number: u128, digits: u32) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    out.extend((0..digits).rev().map(|place| DIGITS[(number >> (place * 4)) as usize & 15]));
}

#[cfg(test)]
mod tests;
