//! Facts about the variables programs get.

use std::collections::BTreeMap;
use std::rc::Rc;

use http::{HeaderValue, Method};
use nagaya_base::RequestId;
use nagaya_records::record::Backend;

use super::*;
use crate::http::message::{ConnInfo, TlsInfo};

fn head(headers: &[(&'static str, &[u8])]) -> RequestHead {
    let mut map = HeaderMap::new();
    for (name, value) in headers {
        map.append(HeaderName::from_static(name), HeaderValue::from_bytes(value).unwrap());
    }
    RequestHead {
        id: RequestId(0xabc),
        method: Method::POST,
        path: "/wiki/doku.php/a%20b".into(),
        query: Some("id=start&x=%2F".into()),
        host: "wiki.localhost".into(),
        port: Some(8080),
        version: Version::HTTP_11,
        headers: map,
        upgrade: None,
        conn: Rc::new(ConnInfo {
            peer: "[::ffff:192.0.2.7]:5511".parse().unwrap(),
            local: "[2001:db8::1]:8443".parse().unwrap(),
            tls: None,
            carried: None,
            network: None,
        }),
    }
}

fn tenant() -> Tenant {
    serde_json::from_str(r#"{"name":"demo","uid":2000,"gid":2000,"home":"/srv/demo"}"#).unwrap()
}

fn site(backend: &str) -> Site {
    let text = format!(
        r#"{{"name":"w","tenant":"demo","hosts":["wiki.localhost"],"path":"/wiki","backend":{backend}}}"#
    );
    serde_json::from_str(&text).unwrap()
}

fn script() -> ProgramScript {
    script_for(ClientView::direct(&head(&[])))
}

fn script_for(client: ClientView) -> ProgramScript {
    ProgramScript {
        file: "doku.php".into(),
        name: "/wiki/doku.php".into(),
        path_info: b"/a b".into(),
        variables: Vec::new(),
        client,
    }
}

/// All variables, and a check that none is given twice.
fn collected(
    each: impl FnOnce(&mut dyn FnMut(&str, &[u8])) -> Result<(), Refusal>,
) -> Result<BTreeMap<String, String>, Refusal> {
    let mut all = BTreeMap::new();
    each(&mut |name, value| {
        let value = String::from_utf8_lossy(value).into_owned();
        assert_eq!(all.insert(name.to_owned(), value), None, "{name} is given twice");
    })?;
    Ok(all)
}

fn php(
    head: &RequestHead,
    site: &Site,
    script: &ProgramScript,
    body_len: Option<u64>,
) -> Result<BTreeMap<String, String>, Refusal> {
    let tenant = tenant();
    let files = site.backend.files().unwrap();
    let facts = EnvironmentFacts { head, body_len, site, tenant: &tenant, files, script };
    collected(|put| for_fastcgi(&facts, put))
}

fn cgi(head: &RequestHead, site: &Site) -> BTreeMap<String, String> {
    cgi_for(head, site, ClientView::direct(head))
}

fn cgi_for(head: &RequestHead, site: &Site, client: ClientView) -> BTreeMap<String, String> {
    let tenant = tenant();
    let files = site.backend.files().unwrap();
    let script = script_for(client);
    let facts = EnvironmentFacts { head, body_len: None, site, tenant: &tenant, files, script: &script };
    collected(|put| for_cgi(&facts, put)).unwrap()
}

#[test]
fn a_php_script_gets_every_variable() {
    let head = head(&[
        ("content-type", b"text/plain"),
        ("content-length", b"5"),
        ("accept", b"a"),
        ("accept", b"b"),
        ("cookie", b"x=1"),
        ("cookie", b"y=2"),
        ("authorization", b"Basic abc"),
        ("x-odd.name", b"dropped"),
        ("foo_bar", b"dropped"),
        ("proxy", b"http://evil"),
    ]);
    let site = site(r#"{"kind":"php","root":"./web//wiki/","env":{"APP_ENV":"prod"}}"#);
    let all = php(&head, &site, &script(), Some(5)).unwrap();
    let expected = [
        ("APP_ENV", "prod"),
        ("CONTENT_LENGTH", "5"),
        ("CONTENT_TYPE", "text/plain"),
        ("CONTEXT_DOCUMENT_ROOT", "/srv/demo/web/wiki"),
        ("CONTEXT_PREFIX", "/wiki"),
        ("DOCUMENT_ROOT", "/srv/demo/web/wiki"),
        ("GATEWAY_INTERFACE", "CGI/1.1"),
        ("HTTP_ACCEPT", "a, b"),
        ("HTTP_AUTHORIZATION", "Basic abc"),
        ("HTTP_COOKIE", "x=1; y=2"),
        ("HTTP_HOST", "wiki.localhost:8080"),
        ("HTTP_TRACEPARENT", "00-00000000000000000000000000000abc-0000000000000abc-01"),
        ("HTTP_X_REQUEST_ID", "00000000000000000000000000000abc"),
        ("PATH_INFO", "/a b"),
        ("PATH_TRANSLATED", "/srv/demo/web/wiki/a b"),
        ("QUERY_STRING", "id=start&x=%2F"),
        ("REDIRECT_STATUS", "200"),
        ("REMOTE_ADDR", "192.0.2.7"),
        ("REMOTE_PORT", "5511"),
        ("REQUEST_METHOD", "POST"),
        ("REQUEST_SCHEME", "http"),
        ("REQUEST_URI", "/wiki/doku.php/a%20b?id=start&x=%2F"),
        ("SCRIPT_FILENAME", "/srv/demo/web/wiki/doku.php"),
        ("SCRIPT_NAME", "/wiki/doku.php"),
        ("SERVER_ADDR", "2001:db8::1"),
        ("SERVER_NAME", "wiki.localhost"),
        ("SERVER_PORT", "8443"),
        ("SERVER_PROTOCOL", "HTTP/1.1"),
        ("SERVER_SOFTWARE", "nagaya"),
        ("UNIQUE_ID", "00000000000000000000000000000abc"),
    ];
    let expected: BTreeMap<String, String> =
        expected.into_iter().map(|(name, value)| (name.into(), value.into())).collect();
    assert_eq!(all, expected);
}

#[test]
fn edge_gives_cgi_no_disk_path_and_no_operator_variable() {
    let site = site(r#"{"kind":"cgi","root":"web","env":{"APP_ENV":"prod"}}"#);
    let all = cgi(&head(&[]), &site);
    for name in ["APP_ENV", "DOCUMENT_ROOT", "SCRIPT_FILENAME", "PATH_TRANSLATED", "CONTEXT_PREFIX", "PATH"] {
        assert!(!all.contains_key(name), "{name} is the keeper's");
    }
    assert_eq!(all["SCRIPT_NAME"], "/wiki/doku.php");
    assert!(!all.contains_key("CONTENT_LENGTH"), "a body of unknown length has none");
}

#[test]
fn tls_and_http2_are_told() {
    let mut head = head(&[]);
    head.version = Version::HTTP_2;
    let conn = Rc::get_mut(&mut head.conn).unwrap();
    conn.tls = Some(TlsInfo {
        server_name: None,
        protocol: "TLSv1.3",
        cipher: "x",
        certificate_names: Rc::default(),
    });
    let all = cgi(&head, &site(r#"{"kind":"cgi","root":"web"}"#));
    assert_eq!(all["HTTPS"], "on");
    assert_eq!(all["REQUEST_SCHEME"], "https");
    assert_eq!(all["SERVER_PROTOCOL"], "HTTP/2.0");
}

#[test]
fn behind_a_trusted_proxy_all_variables_are_the_clients() {
    let client = ClientView {
        address: "203.0.113.9".parse().unwrap(),
        port: None,
        scheme: "https",
        host: Some("www.example.org".into()),
        server_port: 443,
        is_relayed: true,
    };
    let claims = head(&[
        ("x-forwarded-for", b"1.1.1.1, 203.0.113.9"),
        ("x-forwarded-proto", b"https"),
        ("forwarded", b"for=203.0.113.9"),
        ("x-forwarded-prefix", b"/app"),
    ]);
    let all = cgi_for(&claims, &site(r#"{"kind":"cgi","root":"web"}"#), client);
    for (name, value) in [
        ("REMOTE_ADDR", "203.0.113.9"),
        ("REQUEST_SCHEME", "https"),
        ("HTTPS", "on"),
        ("SERVER_NAME", "www.example.org"),
        ("SERVER_PORT", "443"),
        ("HTTP_X_FORWARDED_FOR", "203.0.113.9"),
        ("HTTP_X_FORWARDED_PROTO", "https"),
        ("HTTP_X_FORWARDED_HOST", "www.example.org"),
        ("HTTP_X_FORWARDED_PORT", "443"),
        ("HTTP_X_FORWARDED_PREFIX", "/app"),
        ("HTTP_HOST", "wiki.localhost:8080"),
    ] {
        assert_eq!(all.get(name).map(String::as_str), Some(value), "{name}");
    }
    assert!(!all.contains_key("REMOTE_PORT") && !all.contains_key("HTTP_FORWARDED"));
}

#[test]
fn no_variable_is_made_of_a_field_that_others_write() {
    let names = [
        "x-forwarded-for",
        "x-forwarded-proto",
        "x-forwarded-host",
        "x-forwarded-port",
        "forwarded",
        "proxy",
        "nagaya-peer-x",
        "redirect-status",
        "te",
        "x_real_ip",
        "x.real.ip",
        "x-request-id",
        "traceparent",
    ];
    for name in names {
        let all = cgi(&head(&[(name, b"forged")]), &site(r#"{"kind":"cgi","root":"web"}"#));
        assert!(all.values().all(|value| value != "forged"), "{name}");
    }
    let all = cgi(&head(&[("via", b"1.1 cache")]), &site(r#"{"kind":"cgi","root":"web"}"#));
    assert_eq!(all["HTTP_VIA"], "1.1 cache");
}

#[test]
fn without_a_host_the_address_is_the_name() {
    let mut head = head(&[]);
    head.host = "".into();
    let all = cgi(&head, &site(r#"{"kind":"cgi","root":"web"}"#));
    assert_eq!(all["SERVER_NAME"], "2001:db8::1");
    assert!(!all.contains_key("HTTP_HOST"));
}

#[test]
fn a_client_cannot_take_the_place_of_an_operators_variable() {
    let site = site(r#"{"kind":"php","root":"web","env":{"HTTP_X_TRUSTED":"yes","HTTPS":"on"}}"#);
    let all = php(&head(&[("x-trusted", b"forged")]), &site, &script(), Some(0)).unwrap();
    assert_eq!(all["HTTP_X_TRUSTED"], "yes");
    assert_eq!(all["HTTPS"], "on");
}

#[test]
fn variables_of_rules_precede_all_others() {
    let site = site(r#"{"kind":"php","root":"web","env":{"APP_ENV":"prod"}}"#);
    let variables = [("APP_ENV", Some("test")), ("HTTP_ACCEPT", None), ("REMOTE_USER", Some("ann"))];
    let variables = variables.map(|(name, value)| (name.into(), value.map(Into::into))).to_vec();
    let script = ProgramScript { variables, ..script() };
    let head = head(&[("accept", b"a")]);
    let (tenant, files) = (tenant(), site.backend.files().unwrap());
    let facts = EnvironmentFacts {
        head: &head,
        body_len: None,
        site: &site,
        tenant: &tenant,
        files,
        script: &script,
    };
    for all in [collected(|put| for_fastcgi(&facts, put)), collected(|put| for_cgi(&facts, put))] {
        let all = all.unwrap();
        assert_eq!((&*all["APP_ENV"], &*all["REMOTE_USER"]), ("test", "ann"));
        assert!(!all.contains_key("HTTP_ACCEPT"));
    }
}

#[test]
fn an_empty_body_has_a_length_only_if_the_client_said_so() {
    let site = site(r#"{"kind":"php","root":"web"}"#);
    let all = php(&head(&[]), &site, &script(), Some(0)).unwrap();
    assert!(!all.contains_key("CONTENT_LENGTH"));
    let all = php(&head(&[("content-length", b"0")]), &site, &script(), Some(0)).unwrap();
    assert_eq!(all["CONTENT_LENGTH"], "0");
}

#[test]
fn a_path_behind_the_script_never_leaves_the_root() {
    let site = site(r#"{"kind":"php","root":"web"}"#);
    for (path_info, expected) in [
        (&b"/../../etc/passwd"[..], None),
        (b"//etc/passwd", Some("/srv/demo/web//etc/passwd")),
        (b"/", Some("/srv/demo/web/")),
    ] {
        let script = ProgramScript { path_info: path_info.into(), ..script() };
        let all = php(&head(&[]), &site, &script, Some(0)).unwrap();
        assert_eq!(all.get("PATH_TRANSLATED").map(|path| &**path), expected, "{}", path_info.escape_ascii());
    }
}

#[test]
fn text_that_cannot_be_a_variable_is_refused() {
    let site_ok = site(r#"{"kind":"php","root":"web"}"#);
    let nul = ProgramScript { path_info: b"/a\0b".into(), ..script() };
    assert!(matches!(php(&head(&[]), &site_ok, &nul, Some(0)), Err(Refusal::BadRequest(_))));
    for env in [r#"{"A=B":"x"}"#, r#"{"":"x"}"#, r#"{"A":"x\u0000y"}"#] {
        let site = site(&format!(r#"{{"kind":"php","root":"web","env":{env}}}"#));
        assert!(matches!(php(&head(&[]), &site, &script(), Some(0)), Err(Refusal::SiteBroken(_))), "{env}");
    }
}

#[test]
fn document_roots_are_absolute_and_plain() {
    let root = |root: &str, tenant: &Tenant| {
        let site = site(&format!(r#"{{"kind":"php","root":"{root}"}}"#));
        let Backend::Php(files) = &site.backend else { unreachable!("it was made as php") };
        document_root(&site, tenant, files).map(Cow::into_owned)
    };
    let homeless = Tenant { home: None, ..tenant() };
    assert_eq!(root("web", &tenant()).unwrap(), Path::new("/srv/demo/web"));
    for same in ["/usr/share/dokuwiki/", "/usr//share/./dokuwiki", "/usr/share/dokuwiki"] {
        assert_eq!(root(same, &homeless).unwrap(), Path::new("/usr/share/dokuwiki"));
    }
    assert_eq!(root("/", &homeless).unwrap(), Path::new("/"));
    assert!(matches!(root("web", &homeless), Err(Refusal::SiteBroken(_))));
    assert!(matches!(root("web/../../other", &tenant()), Err(Refusal::SiteBroken(_))));
}
