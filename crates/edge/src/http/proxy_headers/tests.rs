//! Tests of forwarding: what a client may claim, what an application gets, where circles end.

use std::rc::Rc;

use http::{Method, StatusCode};
use nagaya_base::RequestId;
use proptest::prelude::*;

use super::*;
use crate::http::message::{ConnInfo, TlsInfo};

fn forwarding(trusted: &[&str]) -> ForwardingRules {
    let trusted_proxies = trusted.iter().map(ToString::to_string).collect();
    ForwardingRules::new(&EdgeConfig { node: "node 1".into(), trusted_proxies, ..EdgeConfig::default() })
}

fn head(peer: &str, is_tls: bool, fields: &[(&'static str, &str)]) -> RequestHead {
    let tls = is_tls.then(|| TlsInfo {
        server_name: None,
        protocol: "TLSv1.3",
        cipher: "",
        certificate_names: Rc::from([]),
    });
    let mut headers = HeaderMap::new();
    for (name, value) in fields {
        headers.append(*name, value.parse().unwrap());
    }
    RequestHead {
        id: RequestId(0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10),
        method: Method::GET,
        path: "/".into(),
        query: None,
        host: "www.example.org".into(),
        port: None,
        version: Version::HTTP_11,
        headers,
        upgrade: None,
        conn: Rc::new(ConnInfo {
            peer: std::net::SocketAddr::new(peer.parse().unwrap(), 5000),
            local: "192.0.2.1:41780".parse().unwrap(),
            tls,
            carried: None,
            network: None,
        }),
    }
}

/// The fields of the request as the application gets them.
fn written(forwarding: &ForwardingRules, head: &RequestHead) -> Result<HeaderMap, Refusal> {
    let mut head = head.clone();
    forwarding.strip_claims(&mut head);
    let mut out = Vec::new();
    forwarding.request(&head, None, &mut out)?;
    out.extend_from_slice(b"\r\n\r\n");
    let mut parsed = [httparse::EMPTY_HEADER; 64];
    let (_, fields) = httparse::parse_headers(&out[2..], &mut parsed).unwrap().unwrap();
    let pair = |f: &httparse::Header<'_>| {
        let name = HeaderName::from_bytes(f.name.as_bytes()).unwrap();
        (name, HeaderValue::from_bytes(f.value).unwrap())
    };
    let mut headers = HeaderMap::new();
    fields.iter().map(pair).for_each(|(name, value)| {
        headers.append(name, value);
    });
    Ok(headers)
}

/// The same without Host, by name.
fn sent(forwarding: &ForwardingRules, head: &RequestHead) -> Vec<(String, String)> {
    let headers = written(forwarding, head).unwrap();
    let mut fields: Vec<_> = headers
        .iter()
        .filter(|(name, _)| *name != http::header::HOST)
        .map(|(n, v)| (n.to_string(), v.to_str().unwrap().to_owned()))
        .collect();
    fields.sort();
    fields
}

fn field<'a>(fields: &'a [(String, String)], name: &str) -> &'a str {
    fields.iter().find(|(n, _)| n == name).map_or("", |(_, v)| v)
}

#[test]
fn an_application_learns_who_asks_and_by_what_way() {
    let got = sent(&forwarding(&[]), &head("2001:db8::7", true, &[("x", "y")]));
    let expected = [
        ("forwarded", r#"for="[2001:db8::7]";host="www.example.org";proto=https"#),
        ("traceparent", "00-0102030405060708090a0b0c0d0e0f10-090a0b0c0d0e0f10-01"),
        ("via", "1.1 node-1"),
        ("x", "y"),
        ("x-forwarded-for", "2001:db8::7"),
        ("x-forwarded-host", "www.example.org"),
        ("x-forwarded-port", "41780"),
        ("x-forwarded-proto", "https"),
        ("x-request-id", "0102030405060708090a0b0c0d0e0f10"),
    ];
    assert_eq!(got, expected.map(|(n, v)| (n.to_owned(), v.to_owned())));

    let mut with_port = head("::ffff:192.0.2.7", false, &[]);
    (with_port.port, with_port.version) = (Some(8080), Version::HTTP_2);
    let headers = written(&forwarding(&[]), &with_port).unwrap();
    assert_eq!(headers["host"], "www.example.org:8080");
    assert_eq!(headers["x-forwarded-port"], "41780");
    assert_eq!(headers["forwarded"], r#"for=192.0.2.7;host="www.example.org:8080";proto=http"#);
    assert_eq!(headers["via"], "2.0 node-1");
}

#[test]
fn claims_are_believed_only_from_trusted_proxies() {
    let claims = [
        ("forwarded", "for=203.0.113.9"),
        ("x-forwarded-for", "203.0.113.9"),
        ("x-forwarded-proto", "https"),
        ("x-forwarded-host", "admin"),
        ("x-forwarded-prefix", "/admin"),
        ("x-real-ip", "203.0.113.9"),
    ];
    let trusting = forwarding(&["10.0.0.0/8", "2001:db8::/32", "not a network", "192.0.2.9"]);
    let stranger = head("192.0.2.7", false, &claims);
    let got = sent(&trusting, &stranger);
    assert_eq!(field(&got, "x-forwarded-for"), "192.0.2.7");
    assert_eq!(field(&got, "x-forwarded-proto"), "http");
    assert_eq!(field(&got, "x-forwarded-host"), "www.example.org");
    assert_eq!(field(&got, "x-real-ip"), "");
    assert_eq!(field(&got, "x-forwarded-prefix"), "");
    assert!(!field(&got, "forwarded").contains("203.0.113.9"));
    assert_eq!(trusting.client(&stranger).to_string(), "192.0.2.7");

    for peer in ["10.1.2.3", "2001:db8:1::1", "192.0.2.9", "::ffff:10.0.0.1"] {
        let proxy = head(peer, false, &claims);
        let got = sent(&trusting, &proxy);
        assert!(field(&got, "x-forwarded-for").starts_with("203.0.113.9, "), "{peer}");
        assert!(field(&got, "forwarded").starts_with("for=203.0.113.9, for="), "{peer}");
        assert_eq!(field(&got, "x-forwarded-proto"), "https");
        assert_eq!(field(&got, "x-forwarded-prefix"), "/admin");
        assert_eq!(trusting.client(&proxy).to_string(), "203.0.113.9");
    }
}

#[test]
fn the_client_is_the_nearest_address_nobody_vouches_for() {
    let trusting = forwarding(&["10.0.0.0/8"]);
    for (field, chain, client) in [
        ("x-forwarded-for", "1.1.1.1, 203.0.113.9, 10.0.0.2", "203.0.113.9"),
        ("x-forwarded-for", "203.0.113.9:4711, 10.0.0.2", "203.0.113.9"),
        ("x-forwarded-for", "203.0.113.9, gibberish, 10.0.0.2", "10.0.0.2"),
        ("x-forwarded-for", "10.0.0.3, 10.0.0.2", "10.0.0.3"),
        ("x-forwarded-for", "", "10.0.0.1"),
        ("forwarded", "for=1.1.1.1, For=\"[2001:db8::9]:80\";proto=http, for=10.0.0.2", "2001:db8::9"),
        ("forwarded", "proto=http", "10.0.0.1"),
    ] {
        let head = head("10.0.0.1", false, &[(field, chain)]);
        assert_eq!(trusting.client(&head).to_string(), client, "{field}: {chain}");
    }
}

#[test]
fn the_client_is_seen_past_trusted_proxies() {
    let trusting = forwarding(&["10.0.0.0/8"]);
    let direct = ("10.0.0.1", Some(5000), "http", None, 41780);
    type Fields = &'static [(&'static str, &'static str)];
    type Seen = (&'static str, Option<u16>, &'static str, Option<&'static str>, u16);
    let table: &[(Fields, Seen)] = &[
        (&[], direct),
        (&[("x-forwarded-for", "203.0.113.9")], ("203.0.113.9", None, "http", None, 41780)),
        (&[("x-forwarded-for", "203.0.113.9:4711")], ("203.0.113.9", Some(4711), "http", None, 41780)),
        (&[("x-forwarded-proto", "https")], ("10.0.0.1", Some(5000), "https", None, 443)),
        (&[("x-forwarded-proto", "http, HTTPS")], ("10.0.0.1", Some(5000), "https", None, 443)),
        (
            &[
                ("x-forwarded-proto", "https"),
                ("x-forwarded-port", "8443"),
                ("x-forwarded-host", "A.example:81"),
            ],
            ("10.0.0.1", Some(5000), "https", Some("a.example"), 8443),
        ),
        (&[("x-forwarded-host", "a.example:81")], ("10.0.0.1", Some(5000), "http", Some("a.example"), 81)),
        (
            &[("forwarded", "for=1.1.1.1;proto=http, for=\"[2001:db8::9]:80\";proto=https;host=b.example")],
            ("2001:db8::9", Some(80), "https", Some("b.example"), 443),
        ),
        // Words that make no sense count as not said.
        (&[("x-forwarded-proto", "gopher")], direct),
        (&[("x-forwarded-port", "0")], direct),
        (&[("x-forwarded-port", "99999")], direct),
        (&[("x-forwarded-host", "u@a")], direct),
        (&[("x-forwarded-proto", "")], direct),
    ];
    for (fields, expected) in table {
        let view = trusting.view_client(&head("10.0.0.1", false, fields));
        let address = view.address.to_string();
        let seen = (address.as_str(), view.port, view.scheme, view.host.as_deref(), view.server_port);
        assert_eq!(seen, *expected, "{fields:?}");
        assert!(view.is_relayed);
        let stranger = trusting.view_client(&head("192.0.2.7", false, fields));
        assert_eq!(stranger, ClientView::direct(&head("192.0.2.7", false, &[])), "{fields:?}");
    }
}

#[test]
fn a_field_that_a_rule_sets_is_not_a_claim() {
    let forwarding = forwarding(&[]);
    let mut head = head("192.0.2.7", false, &[("x-remote-user", "forged"), ("x-real-ip", "1.1.1.1")]);
    forwarding.strip_claims(&mut head);
    assert!(head.headers.is_empty());
    head.headers.insert("x-remote-user", HeaderValue::from_static("ann"));
    let mut out = Vec::new();
    forwarding.request(&head, None, &mut out).unwrap();
    assert!(String::from_utf8(out).unwrap().contains("\r\nx-remote-user: ann"));
}

#[test]
fn settings_are_taken_while_running() {
    let forwarding = forwarding(&[]);
    let head = head("10.0.0.1", false, &[("x-forwarded-for", "203.0.113.9")]);
    assert_eq!(forwarding.client(&head).to_string(), "10.0.0.1");
    forwarding.set_options(&EdgeConfig { trusted_proxies: vec!["10.0.0.1".into()], ..EdgeConfig::default() });
    assert_eq!(forwarding.client(&head).to_string(), "203.0.113.9");
}

#[test]
fn fields_not_for_the_application_are_removed() {
    let fields = [
        ("proxy", "http://evil"),
        ("expect", "100-continue"),
        ("te", "trailers"),
        ("transfer-encoding", "chunked"),
        ("proxy-authorization", "Basic x"),
        ("x_forwarded_for", "1.1.1.1"),
        ("authorization", "Basic y"),
        ("cookie", "a=b"),
    ];
    let got = sent(&forwarding(&[]), &head("192.0.2.7", false, &fields));
    let added = ["forwarded", "traceparent", "via", "x-request-id"];
    let kept: Vec<&str> = got
        .iter()
        .map(|(name, _)| name.as_str())
        .filter(|name| !added.contains(name) && !name.starts_with("x-forwarded-"))
        .collect();
    assert_eq!(kept, ["authorization", "cookie"]);
    assert_eq!(field(&got, "x-forwarded-for"), "192.0.2.7");

    let mut response = Response::new(StatusCode::OK);
    response.headers.insert(VIA, HeaderValue::from_static("1.0 cache"));
    forwarding(&[]).response(&mut response);
    assert_eq!(response.headers[VIA], "1.0 cache, 1.1 node-1");
}

#[test]
fn a_circle_ends() {
    let forwarding = forwarding(&[]);
    let mut next = head("192.0.2.7", false, &[("via", "1.1 other, 1.1 node-10")]);
    for _ in 0..HOPS_MAX {
        next.headers = written(&forwarding, &next).unwrap();
    }
    assert_eq!(written(&forwarding, &next).unwrap_err(), Refusal::LoopDetected);
    let mut odd = head("192.0.2.7", false, &[]);
    for _ in 0..HOPS_MAX {
        odd.headers.append(VIA, HeaderValue::from_static("HTTP/1.1  NODE-1 (a comment)"));
    }
    assert_eq!(written(&forwarding, &odd).unwrap_err(), Refusal::LoopDetected);
}

#[test]
fn a_sound_trace_is_continued_and_any_other_begun() {
    let trace = "0af7651916cd43dd8448eb211c80319c";
    let ours = "090a0b0c0d0e0f10";
    for (given, expected) in [
        (format!("00-{trace}-b7ad6b7169203331-00"), format!("00-{trace}-{ours}-00")),
        (format!("cc-{trace}-b7ad6b7169203331-01-more"), format!("00-{trace}-{ours}-01")),
        (format!("00-{trace}-b7ad6b7169203331-00-more"), String::new()),
        (format!("ff-{trace}-b7ad6b7169203331-00"), String::new()),
        (format!("00-{}-b7ad6b7169203331-00", "0".repeat(32)), String::new()),
        (format!("00-{trace}-0000000000000000-00"), String::new()),
        (format!("00-{}-b7ad6b7169203331-00", trace.to_uppercase()), String::new()),
        (format!("00-{trace}"), String::new()),
    ] {
        let head = head("192.0.2.7", false, &[("traceparent", &given), ("tracestate", "a=b")]);
        let got = sent(&forwarding(&[]), &head);
        let state = field(&got, "tracestate");
        if expected.is_empty() {
            assert_eq!(field(&got, "traceparent"), format!("00-0102030405060708{ours}-{ours}-01"), "{given}");
            assert_eq!(state, "");
        } else {
            assert_eq!((field(&got, "traceparent"), state), (expected.as_str(), "a=b"), "{given}");
        }
    }
}

proptest! {
    #[test]
    fn no_stranger_can_choose_what_an_application_believes(
        fields in prop::collection::vec(
            ("(x[-_.])?forwarded([-_](for|proto|host|port|prefix))?|x-real-ip|client-ip|cf-connecting-ip|ssl-client-verify\
              |x-original-url|nagaya-peer-request|connection|via|traceparent", "[ -~]{0,40}"), 0..8),
    ) {
        let mut head = head("192.0.2.7", false, &[]);
        for (name, value) in &fields {
            head.headers.append(HeaderName::from_bytes(name.as_bytes()).unwrap(), value.parse().unwrap());
        }
        let forwarding = forwarding(&["10.0.0.0/8"]);
        prop_assert_eq!(forwarding.client(&head).to_string(), "192.0.2.7");
        if let Ok(headers) = written(&forwarding, &head) {
            for (name, value) in [
                ("x-forwarded-for", "192.0.2.7"),
                ("x-forwarded-proto", "http"),
                ("x-forwarded-host", "www.example.org"),
                ("x-forwarded-port", "41780"),
                ("forwarded", "for=192.0.2.7;host=\"www.example.org\";proto=http"),
            ] {
                let all: Vec<_> = headers.get_all(name).iter().collect();
                prop_assert_eq!(all, [value]);
            }
            prop_assert!(headers.keys().all(|name| !name.as_str().contains(['_', '.'])));
            for name in ["x-real-ip", "client-ip", "cf-connecting-ip", "ssl-client-verify", "x-original-url",
                         "nagaya-peer-request", "x-forwarded-prefix"] {
                prop_assert!(!headers.contains_key(name), "{}", name);
            }
            prop_assert_eq!(headers.get_all("traceparent").iter().count(), 1);
        }
    }
}
