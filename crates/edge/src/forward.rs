//! Header fields between the client and an application behind us: what must not be passed on, and what a
//! proxy adds.
//!
//! What a client says about who it is (`Forwarded`, `X-Forwarded-*`) is believed and continued only if it
//! comes from a trusted proxy; from anybody else it is thrown away. Not here: CGI variables (`programs`), the
//! connection to the application (`upstream`).

mod addresses;
mod trace;

use std::cell::RefCell;
use std::net::IpAddr;

use http::header::{
    CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, EXPECT, FORWARDED, HeaderMap, HeaderName, PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION, TE, TRANSFER_ENCODING, UPGRADE, VIA,
};
use http::{HeaderValue, Version};
use ipnet::IpNet;
use nagaya_base::Code;

use crate::message::{Head, Response, ResponseBody};
use crate::options::Options;
use crate::refusal::Refusal;

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const X_FORWARDED_PORT: HeaderName = HeaderName::from_static("x-forwarded-port");
const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Fields that say who the client is, besides `Forwarded` and `X-Forwarded-*`.
const CLIENT_CLAIMS: [&str; 3] = ["x-real-ip", "x-client-ip", "true-client-ip"];

/// Hop-by-hop fields that need not be listed in Connection (RFC 9110 section 7.6.1), and `Proxy`, which is no field
/// of HTTP but becomes the variable `HTTP_PROXY` in programs that talk CGI (CVE-2016-5385).
const HOP_BY_HOP: [HeaderName; 10] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    HeaderName::from_static("http2-settings"),
    HeaderName::from_static("proxy"),
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    TE,
    TRANSFER_ENCODING,
    UPGRADE,
];

/// Fields that Connection cannot declare hop-by-hop: without them the message means something else, or who
/// sent it is forgotten.
const ESSENTIAL: [HeaderName; 8] = [
    CONTENT_LENGTH,
    CONTENT_TYPE,
    http::header::HOST,
    http::header::AUTHORIZATION,
    http::header::COOKIE,
    FORWARDED,
    X_FORWARDED_FOR,
    VIA,
];

/// How often a request may pass through this node. Twice has its uses (a cache between two sites); beyond
/// this it goes in circles.
const HOPS_MAX: usize = 4;

const CODE_BAD_PROXY: Code = Code(432);

/// A request as the application shall see it.
#[derive(Debug)]
pub struct Proxied {
    pub headers: HeaderMap,
    /// For the Host field: what the client asked for, with the port it gave.
    pub host: String,
}

/// One thread's rules of forwarding.
#[derive(Debug)]
pub struct Forwarding(RefCell<Settings>);

#[derive(Debug)]
struct Settings {
    /// This node in Via.
    name: Box<str>,
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
        addresses::client(&head.headers, peer, |address| settings.trusts(address))
    }

    /// The head for the application.
    ///
    /// # Errors
    /// If the request has been here too often already.
    pub fn request(&self, head: &Head) -> Result<Proxied, Refusal> {
        let settings = self.0.borrow();
        if settings.passes(&head.headers) >= HOPS_MAX {
            return Err(Refusal::LoopDetected);
        }
        let mut headers = head.headers.clone();
        strip_hop_by_hop(&mut headers);
        headers.remove(EXPECT);
        remove_ambiguous_names(&mut headers);
        if !settings.trusts(head.conn.peer.ip().to_canonical()) {
            remove_claims(&mut headers);
        }
        let host = match head.port {
            Some(port) => format!("{}:{port}", head.host),
            None => head.host.to_string(),
        };
        add_forwarding(&mut headers, head, &host);
        trace::continue_or_begin(&mut headers, head.id);
        headers.insert(X_REQUEST_ID, value(head.id.to_string()));
        append(&mut headers, VIA, &settings.via(head.version));
        Ok(Proxied { headers, host })
    }

    /// The application's answer, for the client.
    pub fn response(&self, response: &mut Response) {
        // The fields of a protocol change belong to the two connections that become one.
        if !matches!(response.body, ResponseBody::Tunnel(_)) {
            strip_hop_by_hop(&mut response.headers);
        }
        append(&mut response.headers, VIA, &self.0.borrow().via(Version::HTTP_11));
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
        Self { name: token(&options.node), trusted: trusted.collect() }
    }

    fn trusts(&self, address: IpAddr) -> bool {
        self.trusted.iter().any(|network| network.contains(&address))
    }

    /// `1.1 node`: the protocol the message came by, and who received it (RFC 9110 section 7.6.3).
    fn via(&self, received: Version) -> String {
        let version = match received {
            Version::HTTP_10 => "1.0",
            Version::HTTP_2 => "2.0",
            _ => "1.1",
        };
        format!("{version} {}", self.name)
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
fn network(text: &str) -> Option<IpNet> {
    text.parse().ok().or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from)).map(|network| network.trunc())
}

/// The node's name as a pseudonym in Via, which is a token (RFC 9110 section 5.6.2).
fn token(name: &str) -> Box<str> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
    let token: String = name.chars().map(|c| if fits(c) { c } else { '-' }).collect();
    if token.is_empty() { "nagaya".into() } else { token.into() }
}

/// Takes out what concerns only the connection the message came by, also what its Connection field names.
pub fn strip_hop_by_hop(headers: &mut HeaderMap) {
    let listed: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|field| field.to_str().ok())
        .flat_map(|field| field.split(','))
        .filter_map(|name| HeaderName::from_bytes(name.trim().as_bytes()).ok())
        .filter(|name| !ESSENTIAL.contains(name))
        .collect();
    for name in listed.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}

/// `X_Forwarded_For` and `X-Forwarded-For` are one variable to a program that talks CGI or WSGI: a client could
/// say what a proxy says. Nobody else uses such names.
fn remove_ambiguous_names(headers: &mut HeaderMap) {
    let ambiguous: Vec<HeaderName> = headers.keys().filter(|n| n.as_str().contains('_')).cloned().collect();
    for name in ambiguous {
        headers.remove(name);
    }
}

fn remove_claims(headers: &mut HeaderMap) {
    let is_claim = |name: &HeaderName| {
        *name == FORWARDED
            || name.as_str().starts_with("x-forwarded-")
            || CLIENT_CLAIMS.contains(&name.as_str())
    };
    let claims: Vec<HeaderName> = headers.keys().filter(|name| is_claim(name)).cloned().collect();
    for name in claims {
        headers.remove(name);
    }
}

/// Says who the client is, in the standard's way (RFC 7239) and in the usual one.
fn add_forwarding(headers: &mut HeaderMap, head: &Head, host: &str) {
    let peer = head.conn.peer.ip().to_canonical();
    let scheme = head.conn.scheme();
    let node = if peer.is_ipv6() { format!("\"[{peer}]\"") } else { peer.to_string() };
    append(headers, FORWARDED, &format!("for={node};host=\"{host}\";proto={scheme}"));
    append(headers, X_FORWARDED_FOR, &peer.to_string());
    // A trusted proxy in front has seen the client's own connection; its word stays.
    let port = head.port.unwrap_or(if scheme == "https" { 443 } else { 80 });
    headers.entry(X_FORWARDED_PROTO).or_insert(HeaderValue::from_static(scheme));
    headers.entry(X_FORWARDED_HOST).or_insert_with(|| value(host.to_owned()));
    headers.entry(X_FORWARDED_PORT).or_insert(HeaderValue::from(port));
}

/// Adds to a list field, keeping it on one line: some applications read only the first.
fn append(headers: &mut HeaderMap, name: HeaderName, element: &str) {
    let mut list = Vec::new();
    for field in headers.get_all(&name) {
        list.extend_from_slice(field.as_bytes());
        list.extend_from_slice(b", ");
    }
    list.extend_from_slice(element.as_bytes());
    headers.insert(name, HeaderValue::from_bytes(&list).expect("joined of valid values by valid bytes"));
}

fn value(text: String) -> HeaderValue {
    HeaderValue::try_from(text).expect("made of host names, addresses and numbers only")
}

#[cfg(test)]
mod tests;
