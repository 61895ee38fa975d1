//! What two nodes tell each other about a request, in header fields that nobody outside of them may send or see.
//!
//! A request keeps its method, target and header fields; what this connection cannot say of it, since it is not the
//! client's, stands here: who the client is, how it came, which site it is for, under which epoch, and how long is left. An
//! answer says which node served it and where its time went, or that it was not served and why.
//!
//! Not here: the connection (`pool`, `acceptor`), fields between proxies (`forward`).

use std::cell::Cell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::uri::{Authority, Parts, PathAndQuery, Scheme};
use http::{Method, Uri, Version};
use nagaya_base::RequestId;
use nagaya_cmdb::SiteName;
use rustls::crypto::ring;
use smallvec::SmallVec;

use crate::forward::{push_address, push_hex};
use crate::message::{ConnInfo, Head, TlsInfo};

/// Every private field begins so.
const PRIVATE: &str = "nagaya-peer-";

/// What every request has, in one field, because each field costs on both sides: version, the client's address, the address it
/// came to, request id, site, epoch, milliseconds left, retries left.
const REQUEST: HeaderName = HeaderName::from_static("nagaya-peer-request");
const TLS: HeaderName = HeaderName::from_static("nagaya-peer-tls");
const HOSTLESS: HeaderName = HeaderName::from_static("nagaya-peer-hostless");
const TARGET: HeaderName = HeaderName::from_static("nagaya-peer-target");
const UPGRADE: HeaderName = HeaderName::from_static("nagaya-peer-upgrade");

const SWITCHED: HeaderName = HeaderName::from_static("nagaya-peer-switched");
const REFUSED: HeaderName = HeaderName::from_static("nagaya-peer-refused");
/// Beside a refusal: how often the application was given the request before, if it was.
const TRIED: HeaderName = HeaderName::from_static("nagaya-peer-tried");
/// The node, then its stages: `b backend_us=120 cpu_us=15`.
const SERVED: HeaderName = HeaderName::from_static("nagaya-peer-served");

/// In place of a host where an HTTP/1.0 client named none.
const NOBODY: &str = "nobody.nagaya.internal";

/// Bytes that the fields of every request and every answer mostly take at most.
const WORDS_LEN: usize = 192;

/// One in so many fields of a kind is remembered by HTTP/2 after all. A prime, so that each kind is among them however many there are.
const REMEMBERED_ONE_IN: u32 = 251;

/// Stages of another node that are taken over, in bytes. They are fewer.
const STAGES_MAX: usize = 1024;

/// What a forwarded request has beside itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Carried {
    pub site: SiteName,
    /// Of the placement it was sent for.
    pub epoch: u64,
    /// When the sender gives it up.
    pub deadline: Instant,
    /// How often the receiver may give it to the application after the first time.
    pub retries: u32,
}

/// Why another node did not serve a request: nothing of it was carried out that does harm when it is done again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Denied {
    /// The site runs elsewhere, as far as it knows: it knows this epoch. `tries`: so often the application that was here was given
    /// the request.
    NotPlacedHere { epoch: u64, tries: u32 },
    /// It has no authority now; `tries` as above.
    Fenced { tries: u32 },
    /// To it, the request is another site's.
    OtherSite,
}

/// Takes out what only nodes may say.
pub fn strip(headers: &mut HeaderMap) {
    // Nobody honest sends any: nothing is allocated for them.
    while let Some(name) = headers.keys().find(|name| name.as_str().starts_with(PRIVATE)).cloned() {
        headers.remove(name);
    }
}

// === Request ===

/// Writes what the receiver needs to take the request as if the client had come to it. Who passes it on, the certificate says.
pub fn write(headers: &mut HeaderMap, head: &Head, carried: &Carried, now: Instant) {
    strip(headers);
    let conn = &head.conn;
    let version = match head.version {
        Version::HTTP_10 => "1.0",
        Version::HTTP_2 => "2",
        _ => "1.1",
    };
    let left = carried.deadline.saturating_duration_since(now).as_millis();
    let left = u64::try_from(left).unwrap_or(u64::MAX);
    let mut words = Words::from_slice(version.as_bytes());
    words.push(b' ');
    push_socket(&mut words, conn.peer);
    words.push(b' ');
    push_socket(&mut words, conn.local);
    words.push(b' ');
    push_hex(&mut words, head.id.0, 32);
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

/// The address of the request for this connection. What it cannot say of a target that HTTP/1 could goes into a field.
pub fn target(head: &Head, headers: &mut HeaderMap) -> Uri {
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
    // What was read and what is sent must be the same byte for byte: a rule or an application may look at each.
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
    // All that is written is printable, but for a server name no handshake was made with.
    if let Ok(value) = HeaderValue::try_from(value.to_string()) {
        headers.insert(name, value);
    }
}

/// What is made of words and numbers for every request: written without `fmt`, which takes longer for that than all the rest here.
type Words = SmallVec<[u8; WORDS_LEN]>;

fn push_number(words: &mut Words, number: u64) {
    words.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
}

fn push_socket(words: &mut Words, address: SocketAddr) {
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

/// What is different each time: HTTP/2 is not to remember it in place of what comes again (RFC 7541 section 6.2.3). Seldom it does,
/// and then knows the field's name, which is spelt out where it is not known.
pub fn once(mut value: HeaderValue) -> HeaderValue {
    thread_local! {
        static COUNT: Cell<u32> = const { Cell::new(0) };
    }
    let count = COUNT.get();
    COUNT.set((count + 1) % REMEMBERED_ONE_IN);
    value.set_sensitive(count > 0);
    value
}

/// What came from another node becomes the request that the client made. The reason if it cannot be one.
pub fn read(head: &mut Head, now: Instant) -> Result<(), &'static str> {
    const WRONG: &str = "another node did not say what it has to say of a request";
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
    let carried = Carried {
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

/// Longest deadline that is believed: a day.
const DEADLINE_MS_MAX: u64 = 86_400_000;

/// The node that took the request from the client has seen that its certificate is for the host.
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

/// Says that nothing was done, and why.
pub fn deny(headers: &mut HeaderMap, denied: Denied) {
    match denied {
        Denied::NotPlacedHere { epoch, tries } => {
            put(headers, REFUSED, format!("not-placed-here {epoch}"));
            put_tries(headers, tries);
        }
        Denied::Fenced { tries } => {
            put(headers, REFUSED, "fenced");
            put_tries(headers, tries);
        }
        Denied::OtherSite => put(headers, REFUSED, "other-site"),
    }
}

fn put_tries(headers: &mut HeaderMap, tries: u32) {
    if tries > 0 {
        put(headers, TRIED, tries);
    } else {
        headers.remove(TRIED);
    }
}

pub fn denied(headers: &HeaderMap) -> Option<Denied> {
    let tries = text(headers, &TRIED).and_then(|tries| tries.parse().ok()).unwrap_or(0);
    match text(headers, &REFUSED)? {
        "fenced" => Some(Denied::Fenced { tries }),
        "other-site" => Some(Denied::OtherSite),
        other => {
            let epoch = other.strip_prefix("not-placed-here ")?.parse().ok()?;
            Some(Denied::NotPlacedHere { epoch, tries })
        }
    }
}

/// Says who served it, and where the time went until now.
pub fn serve(headers: &mut HeaderMap, node: &str, stages: impl Iterator<Item = (&'static str, u64)>) {
    let mut words = Words::from_slice(node.as_bytes());
    for (name, us) in stages.filter(|(_, us)| *us > 0) {
        words.push(b' ');
        words.extend_from_slice(name.as_bytes());
        words.push(b'=');
        push_number(&mut words, us);
    }
    put_once(headers, SERVED, &words);
}

/// Where another node's time went: `backend_us=120 cpu_us=15`. Names are those of `Figures`, times microseconds; mostly nobody asks
/// for them.
pub fn take_served(headers: &mut HeaderMap) -> Option<Box<str>> {
    let said = headers.remove(SERVED)?;
    let (_, stages) = said.to_str().ok()?.split_once(' ')?;
    (stages.len() <= STAGES_MAX).then(|| stages.into())
}

/// From here on the two bodies are the two directions of an upgraded connection.
pub fn switch(headers: &mut HeaderMap, protocol: &HeaderValue) {
    headers.insert(SWITCHED, protocol.clone());
}

pub fn switched(headers: &HeaderMap) -> Option<HeaderValue> {
    headers.get(SWITCHED).cloned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(tls: bool) -> Head {
        let tls = tls.then(|| TlsInfo {
            server_name: Some("wiki.example".into()),
            protocol: "TLSv1.3",
            cipher: "TLS13_AES_128_GCM_SHA256",
            certificate_names: Rc::from(["wiki.example".into()]),
        });
        Head {
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

    fn carried(now: Instant) -> Carried {
        Carried {
            site: SiteName::new("wiki").unwrap(),
            epoch: 7,
            deadline: now + Duration::from_millis(1500),
            retries: 2,
        }
    }

    /// As it comes out of the other node's HTTP/2.
    fn arrived(mut headers: HeaderMap) -> Head {
        headers.insert("accept", HeaderValue::from_static("*/*"));
        let conn = ConnInfo {
            peer: "10.0.0.1:9".parse().unwrap(),
            local: "10.0.0.2:9".parse().unwrap(),
            tls: None,
            carried: None,
            network: None,
        };
        Head {
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
            let sent =
                Head { path: path.into(), query: query.map(Into::into), host: host.into(), ..head(false) };
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
    fn what_a_client_says_in_the_nodes_name_is_taken_out() {
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
    fn what_an_answer_says_comes_back_as_it_was() {
        let mut headers = HeaderMap::new();
        let not_here = |tries| Denied::NotPlacedHere { epoch: 12, tries };
        let fenced = |tries| Denied::Fenced { tries };
        for said in [not_here(0), not_here(3), fenced(0), fenced(2), Denied::OtherSite] {
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
