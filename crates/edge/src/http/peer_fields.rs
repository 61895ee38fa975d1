//! Reads and writes the header fields that two nodes exchange about a request. Nobody else may
//! send or see them.
//!
//! A request keeps its method, target and header fields. These fields add the facts that this
//! connection cannot show, since it is not the client's. These are the client, the way it came, the
//! site, the epoch, and the time left. An answer names the node that served it and its times, or
//! the reason why it was not served.
//!
//! Not here: the connection (`pool`, `acceptor`), fields between proxies (`proxy_headers`).

use std::cell::Cell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::uri::{Authority, Parts, PathAndQuery, Scheme};
use http::{Method, Uri, Version};
use nagaya_base::RequestId;
use nagaya_records::SiteName;
use rustls::crypto::ring;
use smallvec::SmallVec;

use crate::http::message::{ConnInfo, RequestHead, TlsInfo};
use crate::http::peer_meta::{PeerDenial, PeerRequestMeta};
use crate::http::proxy_headers::names::{hex, push_address};

/// Prefix of every private field.
const PRIVATE: &str = "nagaya-peer-";

/// Data of every request, in one field, because each field costs on both sides. It contains
/// version, the client's address, the address it came to, request id, site, epoch, milliseconds
/// left and retries left.
const REQUEST: HeaderName = HeaderName::from_static("nagaya-peer-request");
const TLS: HeaderName = HeaderName::from_static("nagaya-peer-tls");
const HOSTLESS: HeaderName = HeaderName::from_static("nagaya-peer-hostless");
const TARGET: HeaderName = HeaderName::from_static("nagaya-peer-target");
const UPGRADE: HeaderName = HeaderName::from_static("nagaya-peer-upgrade");

const SWITCHED: HeaderName = HeaderName::from_static("nagaya-peer-switched");
const REFUSED: HeaderName = HeaderName::from_static("nagaya-peer-refused");
/// Beside a refusal: number of times the request was given to the application before.
const TRIED: HeaderName = HeaderName::from_static("nagaya-peer-tried");
/// The node, then its stages: `b backend_us=120 cpu_us=15`.
const SERVED: HeaderName = HeaderName::from_static("nagaya-peer-served");

/// Replaces a missing host of an HTTP/1.0 client.
const NOBODY: &str = "nobody.nagaya.internal";

/// Usual maximum length of the fields of a request or a response, bytes.
const WORDS_LEN: usize = 192;

/// One in this many fields of a kind is still added to HTTP/2's table. It is a prime, so that
/// each kind gets there however many there are.
const REMEMBERED_ONE_IN: u32 = 251;

/// Maximum length of another node's stages that are accepted, bytes. Real ones are shorter.
const STAGES_MAX: usize = 1024;

/// Removes fields that only nodes may send.
pub fn strip(headers: &mut HeaderMap) {
    // Honest clients send none, so nothing is allocated for them.
    while let Some(name) = headers.keys().find(|name| name.as_str().starts_with(PRIVATE)).cloned() {
        headers.remove(name);
    }
}

// === Request ===

/// Writes the data for the receiver, so that it can handle the request like a client's. The
/// certificate names the forwarding node.
pub fn write(headers: &mut HeaderMap, head: &RequestHead, carried: &PeerRequestMeta, now: Instant) {
    strip(headers);
    let conn = &head.conn;
    let version = match head.version {
        Version::HTTP_10 => "1.0",
        Version::HTTP_2 => "2",
        _ => "1.1",
    };
    let left = carried.deadline.saturating_duration_since(now).as_millis();
    let left = u64::try_from(left).unwrap_or(u64::MAX);
    let mut words = FieldText::from_slice(version.as_bytes());
    words.push(b' ');
    push_socket(&mut words, conn.peer);
    words.push(b' ');
    push_socket(&mut words, conn.local);
    words.push(b' ');
    words.extend_from_slice(&hex::<32>(head.id.0));
    words.push(b' ');
    words.extend_from_slice(carried.site.as_str().as_bytes());
    for number in [carried.epoch, left, carried.retries.into()] {
        words.push(b' ');
        push_number(&mut words, number);
    }
    put_once(headers, REQUEST, &words);
    if let Some(tls) = &conn.tls {
        put(
            headers,
            TLS,
            format!("{} {} {}", tls.protocol, tls.cipher, tls.server_name.as_deref().unwrap_or("-")),
        );
    }
    if head.host.is_empty() {
        put(headers, HOSTLESS, "");
    }
    if let Some(protocol) = &head.upgrade {
        headers.insert(UPGRADE, protocol.clone());
    }
}

/// Returns the target of the request for this connection. The parts of an HTTP/1 target that it
/// cannot express go into a field.
pub fn target(head: &RequestHead, headers: &mut HeaderMap) -> Uri {
    let query = head.query.as_deref();
    let target = || match query {
        Some(query) => format!("{}?{query}", head.path),
        None => head.path.to_string(),
    };
    let (host, port) = if head.host.is_empty() { (NOBODY, None) } else { (&*head.host, head.port) };
    let authority = port.map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"));
    let mut parts = Parts::default();
    parts.scheme = Some(if head.conn.tls.is_some() { Scheme::HTTPS } else { Scheme::HTTP });
    parts.authority = Authority::from_maybe_shared(Bytes::from(authority)).ok();
    parts.path_and_query = PathAndQuery::from_maybe_shared(Bytes::from(target())).ok();
    // The received and the sent target must be equal byte for byte. A rule or an application may
    // read each of them.
    let is_same = parts
        .authority
        .as_ref()
        .is_some_and(|sent| sent.host() == host && sent.port().map(|port| port.as_u16()) == port)
        && parts
            .path_and_query
            .as_ref()
            .is_some_and(|sent| sent.path() == &*head.path && sent.query() == query);
    if !is_same {
        if let Ok(target) = HeaderValue::from_bytes(target().as_bytes()) {
            headers.insert(TARGET, target);
        }
        parts.path_and_query = Some(PathAndQuery::from_static("/"));
    }
    Uri::from_parts(parts).unwrap_or_default()
}

fn put(headers: &mut HeaderMap, name: HeaderName, value: impl ToString) {
    // All of it is printable, except a server name without a handshake.
    if let Ok(value) = HeaderValue::try_from(value.to_string()) {
        headers.insert(name, value);
    }
}

/// Buffer for text of words and numbers in every request. It is written without `fmt`, which
/// would take longer than all the rest here.
type FieldText = SmallVec<[u8; WORDS_LEN]>;

fn push_number(words: &mut FieldText, number: u64) {
    words.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
}

fn push_socket(words: &mut FieldText, address: SocketAddr) {
    match address {
        SocketAddr::V4(address) => {
            push_address(words, (*address.ip()).into());
            words.push(b':');
            push_number(words, address.port().into());
        }
        SocketAddr::V6(address) => words.extend_from_slice(address.to_string().as_bytes()),
    }
}

fn put_once(headers: &mut HeaderMap, name: HeaderName, value: &[u8]) {
    if let Ok(value) = HeaderValue::from_bytes(value) {
        headers.insert(name, once(value));
    }
}

/// Marks a value that is different each time. So HTTP/2 does not remember it in place of repeated
/// ones (RFC 7541 section 6.2.3). Rarely it is remembered, so that the field's name becomes
/// known. An unknown name is spelt out.
pub fn once(mut value: HeaderValue) -> HeaderValue {
    thread_local! {
        static COUNT: Cell<u32> = const { Cell::new(0) };
    }
    let count = COUNT.get();
    COUNT.set((count + 1) % REMEMBERED_ONE_IN);
    value.set_sensitive(count > 0);
    value
}

/// Turns a forwarded request into the request of the client. Fails with the reason if it is
/// invalid.
pub fn read(head: &mut RequestHead, now: Instant) -> Result<(), &'static str> {
    const WRONG: &str = "another node sent a request without its required fields";
    let headers = &head.headers;
    let mut words = text(headers, &REQUEST).ok_or(WRONG)?.split(' ');
    let mut word = || words.next().ok_or(WRONG);
    let version = match word()? {
        "1.0" => Version::HTTP_10,
        "2" => Version::HTTP_2,
        "1.1" => Version::HTTP_11,
        _ => return Err(WRONG),
    };
    let peer: SocketAddr = word()?.parse().map_err(|_| WRONG)?;
    let local: SocketAddr = word()?.parse().map_err(|_| WRONG)?;
    let id = Some(word()?).filter(|id| id.len() == 32).ok_or(WRONG)?;
    let id = u128::from_str_radix(id, 16).map_err(|_| WRONG)?;
    let carried = PeerRequestMeta {
        site: SiteName::new(word()?).map_err(|_| WRONG)?,
        epoch: word()?.parse().map_err(|_| WRONG)?,
        deadline: now
            + Duration::from_millis(word()?.parse::<u64>().map_err(|_| WRONG)?.min(DEADLINE_MS_MAX)),
        retries: word()?.parse().map_err(|_| WRONG)?,
    };
    if words.next().is_some() {
        return Err(WRONG);
    }
    if let Some(target) = headers.get(TARGET) {
        let target = std::str::from_utf8(target.as_bytes()).map_err(|_| WRONG)?;
        let (path, query) =
            target.split_once('?').map_or((target, None), |(path, query)| (path, Some(query)));
        (head.path, head.query) = (path.into(), query.map(Into::into));
    }
    if headers.contains_key(HOSTLESS) {
        (head.host, head.port) = ("".into(), None);
    }
    let tls = match text(headers, &TLS) {
        Some(text) => Some(read_tls(text, &head.host).ok_or(WRONG)?),
        None => None,
    };
    let upgrade = headers.get(UPGRADE).cloned();
    if upgrade.is_some() && head.method != Method::GET {
        return Err(WRONG);
    }
    (head.id, head.version, head.upgrade) = (RequestId(id), version, upgrade);
    head.conn = Rc::new(ConnInfo { peer, local, tls, carried: Some(Box::new(carried)), network: None });
    head.headers.remove(REQUEST);
    strip(&mut head.headers);
    Ok(())
}

/// Longest accepted deadline: a day.
const DEADLINE_MS_MAX: u64 = 86_400_000;

/// Reads the TLS data. The node that received the request has checked that its certificate is for
/// the host.
fn read_tls(text: &str, host: &str) -> Option<TlsInfo> {
    let mut words = text.split(' ');
    let (protocol, cipher, name) = (words.next()?, words.next()?, words.next()?);
    let known = ring::ALL_CIPHER_SUITES.iter().filter_map(|suite| suite.suite().as_str());
    Some(TlsInfo {
        server_name: (name != "-").then(|| name.into()),
        protocol: if protocol == "TLSv1.3" { "TLSv1.3" } else { "TLSv1.2" },
        cipher: known.into_iter().find(|known| *known == cipher).unwrap_or("unknown"),
        certificate_names: Rc::from([host.into()]),
    })
}

fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

// === Response ===

/// Writes that nothing was done, and why.
pub fn deny(headers: &mut HeaderMap, denied: PeerDenial) {
    match denied {
        PeerDenial::NotPlacedHere { epoch, tries } => {
            put(headers, REFUSED, format!("not-placed-here {epoch}"));
            put_tries(headers, tries);
        }
        PeerDenial::Fenced { tries } => {
            put(headers, REFUSED, "fenced");
            put_tries(headers, tries);
        }
        PeerDenial::OtherSite => put(headers, REFUSED, "other-site"),
    }
}

fn put_tries(headers: &mut HeaderMap, tries: u32) {
    if tries > 0 {
        put(headers, TRIED, tries);
    } else {
        headers.remove(TRIED);
    }
}

pub fn denied(headers: &HeaderMap) -> Option<PeerDenial> {
    let tries = text(headers, &TRIED).and_then(|tries| tries.parse().ok()).unwrap_or(0);
    match text(headers, &REFUSED)? {
        "fenced" => Some(PeerDenial::Fenced { tries }),
        "other-site" => Some(PeerDenial::OtherSite),
        other => {
            let epoch = other.strip_prefix("not-placed-here ")?.parse().ok()?;
            Some(PeerDenial::NotPlacedHere { epoch, tries })
        }
    }
}

/// Writes which node served it, and its times until now.
pub fn serve(headers: &mut HeaderMap, node: &str, stages: impl Iterator<Item = (&'static str, u64)>) {
    let mut words = FieldText::from_slice(node.as_bytes());
    for (name, us) in stages.filter(|(_, us)| *us > 0) {
        words.push(b' ');
        words.extend_from_slice(name.as_bytes());
        words.push(b'=');
        push_number(&mut words, us);
    }
    put_once(headers, SERVED, &words);
}

/// Removes and returns another node's times: `backend_us=120 cpu_us=15`. Names are those of
/// `Figures`, times are microseconds. They are rarely used.
pub fn take_served(headers: &mut HeaderMap) -> Option<Box<str>> {
    let said = headers.remove(SERVED)?;
    let (_, stages) = said.to_str().ok()?.split_once(' ')?;
    (stages.len() <= STAGES_MAX).then(|| stages.into())
}

/// Marks that the two bodies are from here on the two directions of an upgraded connection.
pub fn switch(headers: &mut HeaderMap, protocol: &HeaderValue) {
    headers.insert(SWITCHED, protocol.clone());
}

pub fn switched(headers: &HeaderMap) -> Option<HeaderValue> {
    headers.get(SWITCHED).cloned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(tls: bool) -> RequestHead {
        let tls = tls.then(|| TlsInfo {
            server_name: Some("wiki.example".into()),
            protocol: "TLSv1.3",
            cipher: "TLS13_AES_128_GCM_SHA256",
            certificate_names: Rc::from(["wiki.example".into()]),
        });
        RequestHead {
            id: RequestId(0x1234),
            method: Method::GET,
            path: "/a".into(),
            query: None,
            host: "wiki.example".into(),
            port: None,
            version: Version::HTTP_10,
            headers: HeaderMap::new(),
            upgrade: Some(HeaderValue::from_static("websocket")),
            conn: Rc::new(ConnInfo {
                peer: "[2001:db8::7]:5000".parse().unwrap(),
                local: "192.0.2.1:443".parse().unwrap(),
                tls,
                carried: None,
                network: None,
            }),
        }
    }

    fn carried(now: Instant) -> PeerRequestMeta {
        PeerRequestMeta {
            site: SiteName::new("wiki").unwrap(),
            epoch: 7,
            deadline: now + Duration::from_millis(1500),
            retries: 2,
        }
    }

    /// As it comes out of the other node's HTTP/2.
    fn arrived(mut headers: HeaderMap) -> RequestHead {
        headers.insert("accept", HeaderValue::from_static("*/*"));
        let conn = ConnInfo {
            peer: "10.0.0.1:9".parse().unwrap(),
            local: "10.0.0.2:9".parse().unwrap(),
            tls: None,
            carried: None,
            network: None,
        };
        RequestHead {
            headers,
            upgrade: None,
            version: Version::HTTP_2,
            id: RequestId(9),
            conn: Rc::new(conn),
            ..head(false)
        }
    }

    #[test]
    fn the_receiver_sees_the_clients_request_and_nothing_of_the_way() {
        let now = Instant::now();
        for with_tls in [false, true] {
            let sent = head(with_tls);
            let mut headers = HeaderMap::new();
            write(&mut headers, &sent, &carried(now), now);
            let mut got = arrived(headers);
            read(&mut got, now).unwrap();
            assert_eq!((got.id, got.version, &got.upgrade), (sent.id, sent.version, &sent.upgrade));
            assert_eq!((got.conn.peer, got.conn.local), (sent.conn.peer, sent.conn.local));
            assert_eq!(got.conn.scheme(), sent.conn.scheme());
            if let (Some(got), Some(sent)) = (&got.conn.tls, &sent.conn.tls) {
                assert_eq!((got.protocol, got.cipher), (sent.protocol, sent.cipher));
                assert_eq!(got.server_name, sent.server_name);
            }
            assert_eq!(got.conn.carried.as_deref(), Some(&carried(now)));
            assert_eq!(got.headers.keys().map(HeaderName::as_str).collect::<Vec<_>>(), ["accept"]);
        }
    }

    #[test]
    fn any_target_and_host_that_http1_takes_arrives_as_it_was() {
        let now = Instant::now();
        for (path, query, host) in [
            ("/a%20b/~x", Some("q=1&r=%C3%A4"), "wiki.example"),
            ("/a<b>`c", Some("x=<y>"), "wiki.example"),
            ("/\u{e4}", None, "wiki.example"),
            ("/a", Some(""), ""),
            ("//x/../y", None, "[2001:db8::1]"),
        ] {
            let sent = RequestHead {
                path: path.into(),
                query: query.map(Into::into),
                host: host.into(),
                ..head(false)
            };
            let mut headers = HeaderMap::new();
            write(&mut headers, &sent, &carried(now), now);
            let uri = target(&sent, &mut headers);
            let mut got = arrived(headers);
            (got.path, got.query) = (uri.path().into(), uri.query().map(Into::into));
            got.host = uri.host().unwrap().into();
            read(&mut got, now).unwrap();
            assert_eq!((&*got.path, got.query.as_deref(), &*got.host), (path, query, host));
        }
    }

    #[test]
    fn peer_fields_sent_by_a_client_are_removed() {
        let mut headers = HeaderMap::new();
        for name in ["nagaya-peer-epoch", "nagaya-peer-client", "nagaya-peer-anything", "x-kept"] {
            headers.append(HeaderName::from_static(name), HeaderValue::from_static("9"));
            headers.append(HeaderName::from_static(name), HeaderValue::from_static("10"));
        }
        strip(&mut headers);
        assert_eq!(headers.keys().map(HeaderName::as_str).collect::<Vec<_>>(), ["x-kept"]);
        let now = Instant::now();
        let mut forged = HeaderMap::new();
        forged.insert(REFUSED, HeaderValue::from_static("fenced"));
        write(&mut forged, &head(false), &carried(now), now);
        assert_eq!(denied(&forged), None);
    }

    #[test]
    fn a_request_that_lacks_a_field_is_not_taken() {
        let now = Instant::now();
        let mut whole = HeaderMap::new();
        write(&mut whole, &head(false), &carried(now), now);
        let said = whole[REQUEST].to_str().unwrap().to_owned();
        let words: Vec<_> = said.split(' ').collect();
        assert_eq!(words.len(), 8);
        let lacks = (0..words.len()).map(|at| {
            let rest = words.iter().enumerate().filter(|(other, _)| *other != at);
            rest.map(|(_, word)| *word).collect::<Vec<_>>().join(" ")
        });
        for wrong in lacks.chain([String::new(), said.clone() + " more"]) {
            let mut headers = whole.clone();
            headers.insert(REQUEST, HeaderValue::try_from(&wrong).unwrap());
            assert!(read(&mut arrived(headers), now).is_err(), "{wrong}");
        }
        whole.remove(REQUEST);
        assert!(read(&mut arrived(whole), now).is_err());
    }

    #[test]
    fn peer_fields_of_an_answer_come_back_unchanged() {
        let mut headers = HeaderMap::new();
        let not_here = |tries| PeerDenial::NotPlacedHere { epoch: 12, tries };
        let fenced = |tries| PeerDenial::Fenced { tries };
        for said in [not_here(0), not_here(3), fenced(0), fenced(2), PeerDenial::OtherSite] {
            deny(&mut headers, said);
            assert_eq!(denied(&headers), Some(said));
        }
        serve(&mut headers, "b", [("wake_us", 5), ("queue_us", 0), ("backend_us", 9)].into_iter());
        assert_eq!(take_served(&mut headers).as_deref(), Some("wake_us=5 backend_us=9"));
        assert_eq!(headers.get(SERVED), None);
        strip(&mut headers);
        assert!(headers.is_empty());
    }

    #[test]
    fn of_each_kind_of_field_http2_remembers_one_now_and_then() {
        // Four kinds to a message, as an answer has them.
        let mut remembered = [0; 4];
        for _ in 0..10 * REMEMBERED_ONE_IN {
            for kind in &mut remembered {
                *kind += u32::from(!once(HeaderValue::from_static("x")).is_sensitive());
            }
        }
        assert_eq!(remembered, [10; 4]);
    }
}
