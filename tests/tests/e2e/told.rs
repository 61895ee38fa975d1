//! The request as each kind of backend is told it: whom it is from, what it is for, and nothing that a client made up.
//!
//! Each test is a table over both versions of HTTP and all kinds of backend. Not here: messages that two parsers could read
//! differently (`smuggling`), what else a program is told (`cgi`, `php`, `fastcgi`).

use std::path::PathBuf;

use nagaya_tests::backend::{Backend, Peer};
use nagaya_tests::client::Connection;
use nagaya_tests::suite::{Suite, Tests};
use nagaya_tests::world::World;
use nagaya_tests::{machine, wait};
use serde_json::{Value, json};

pub const SUITE: Suite = Suite {
    name: "told",
    needs_root: true,
    tests: Tests::Sharing(
        world,
        nagaya_tests::tests![
            a_client_passes_for_nobody_else,
            behind_a_trusted_proxy_the_client_is_its_client,
            trailers_end_at_the_node_unless_the_site_names_them,
            the_routed_path_is_the_forwarded_path,
            a_path_that_servers_read_differently_is_400,
            a_target_that_http1_refuses_is_refused_over_http2,
            trace_is_405_and_reaches_nobody,
            no_other_version_of_http_is_offered_to_a_backend,
            rules_set_what_is_theirs_and_nothing_of_the_servers,
        ],
    ),
};

/// A kind of backend, which is the first part of its site's host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Http,
    App,
    Cgi,
    Php,
    FastCgi,
}

/// Loopback addresses: a client's, and a trusted proxy's.
const CLIENT: &str = "127.0.0.1";
const PROXY: &str = "127.0.0.2";

/// In everything that a client makes up.
const FORGED: &str = "10.9.8.7";

const VERSIONS: [&str; 2] = ["--http1.1", "--http2-prior-knowledge"];

const CGI: &str = "#!/bin/sh\nprintf 'Content-Type: text/plain\\r\\n\\r\\n'\nenv\n";
const PHP: &str =
    "<?php foreach ($_SERVER as $name => $value) if (is_scalar($value)) echo \"$name=$value\\n\";\n";

/// Answers all bytes of each request, trailers too.
const APP: &str = r#"#!/usr/bin/python3
import os, socket
server = socket.socket(socket.AF_UNIX)
server.bind(os.environ["NAGAYA_SOCKET"])
server.listen(64)
while True:
    client, _ = server.accept()
    read = b""
    while not (b"\r\n\r\n" in read and (b"chunked" not in read or b"\r\n0\r\n" in read and read.endswith(b"\r\n\r\n"))):
        more = client.recv(65536)
        if not more:
            break
        read += more
    if read:
        client.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(read), read))
    client.close()
"#;

const FPM: &str = "[global]\nerror_log = /dev/null\n[site]\nlisten = ${NAGAYA_SOCKET}\npm = static\n\
                   pm.max_children = 1\nclear_env = no\n";

const RULE: &str = "e = Apache::Env.new\n\
    e[\"FOO\"] = \"of a rule\"\n\
    e[\"SCRIPT_FILENAME\"] = \"/etc/passwd\"\n\
    e[\"LD_PRELOAD\"] = \"/tmp/x.so\"\n\
    e[\"PHP_VALUE\"] = \"auto_prepend_file=/etc/passwd\"\n\
    e[\"REMOTE_ADDR\"] = \"10.9.8.7\"\n\
    h = Apache::Headers_in.new\n\
    h[\"X-Remote-User\"] = \"ann\"\n\
    h[\"X-Rule-Scheme\"] = Apache::Request.new.scheme\n\
    h[\"X-Rule-Port\"] = Apache::Connection.new.remote_port.to_s\n";

fn world() -> World {
    let backend = Backend::start(echo);
    let address = backend.address.to_string();
    let site = |name: &str, path: &str, host: &str, backend: &Value| json!({ "name": name, "tenant": "alice", "hosts": [format!("{host}.test")], "path": path, "backend": backend });
    let mut builder = World::builder()
        .set("edge", &format!("trusted_proxies = [\"{PROXY}\"]"))
        .tenant("alice")
        .rule("env", "access_checker", RULE, "");
    let home = builder.path("home/alice");
    let mut backends = vec![
        ("http", json!({ "kind": "http", "address": address })),
        ("app", json!({ "kind": "app", "directory": "app", "command": ["./app.py"] })),
        ("cgi", json!({ "kind": "cgi", "root": "cgi", "front_controller": "index.cgi" })),
        ("php", json!({ "kind": "php", "root": "php", "front_controller": "index.php" })),
    ];
    if let Some(fpm) = php_fpm() {
        backends.push((
            "fastcgi",
            json!({ "kind": "app", "directory": "app", "protocol": "fastcgi",
            "command": [fpm, "--nodaemonize", "--force-stderr", "--fpm-config", home.join("app/fpm.conf")],
            "files": { "root": "app/php", "front_controller": "index.php" } }),
        ));
    }
    for (host, backend) in &backends {
        builder = builder.site(site(host, "/", host, backend)).site(site(
            &format!("{host}-pub"),
            "/pub",
            host,
            backend,
        ));
    }
    let trailing = json!({ "kind": "http", "address": address, "request_trailers": ["X-Sum", "X-Real-IP"] });
    let world = builder.site(site("trailing", "/", "trailing", &trailing)).start();
    world.write_program("alice", "app/app.py", APP);
    world.write("alice", "app/fpm.conf", FPM);
    world.write_program("alice", "cgi/index.cgi", CGI);
    world.write("alice", "php/index.php", PHP);
    world.write("alice", "app/php/index.php", PHP);
    world.give("alice");
    world.keep(backend);
    world
}

/// Answers all bytes of a request, trailers too.
fn echo(peer: &mut Peer) {
    let mut read = Vec::new();
    let is_whole = |read: &[u8]| {
        let text = String::from_utf8_lossy(read);
        let Some((head, body)) = text.split_once("\r\n\r\n") else { return false };
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
        match length {
            Some(length) => body.len() >= length,
            None => !head.contains("chunked") || (text.contains("\r\n0\r\n") && text.ends_with("\r\n\r\n")),
        }
    };
    while let Some(bytes) = peer.some_bytes() {
        read.extend_from_slice(&bytes);
        if is_whole(&read) {
            peer.answer("200 OK", &String::from_utf8_lossy(&read));
            read.clear();
        }
    }
}

fn php_fpm() -> Option<PathBuf> {
    let names = std::fs::read_dir("/usr/sbin").ok()?;
    let found = names.flatten().find(|entry| entry.file_name().to_string_lossy().starts_with("php-fpm"));
    found.map(|entry| entry.path())
}

/// Those that can be here; without php-fpm the last one cannot.
fn kinds() -> Vec<Kind> {
    let mut kinds = vec![Kind::Http, Kind::App, Kind::Cgi, Kind::Php];
    kinds.extend(php_fpm().map(|_| Kind::FastCgi));
    kinds
}

impl Kind {
    fn host(self) -> String {
        format!("{self:?}.test").to_ascii_lowercase()
    }

    fn is_program(self) -> bool {
        matches!(self, Self::Cgi | Self::Php | Self::FastCgi)
    }

    /// A header field as this kind is told it.
    fn field(self, told: &str, name: &str) -> Option<String> {
        let start = if self.is_program() {
            format!("HTTP_{}=", name.replace('-', "_").to_ascii_uppercase())
        } else {
            format!("{}: ", name.to_ascii_lowercase())
        };
        told.lines().find_map(|line| line.strip_prefix(&start)).map(|value| value.trim().to_owned())
    }

    /// What this kind is told in a variable, or in the field that servers get.
    fn fact(self, told: &str, variable: &str, field: &str) -> Option<String> {
        if !self.is_program() {
            return self.field(told, field);
        }
        told.lines().find_map(|line| line.strip_prefix(&format!("{variable}="))).map(str::to_owned)
    }

    fn target(self, told: &str) -> Option<String> {
        if self.is_program() {
            self.fact(told, "REQUEST_URI", "")
        } else {
            told.split(' ').nth(1).map(str::to_owned)
        }
    }
}

/// Asks by curl; the status and the body.
#[track_caller]
fn ask(world: &World, from: &str, version: &str, host: &str, target: &str, more: &[&str]) -> (u16, String) {
    let port = world.http().port();
    let connect = format!("{host}:80:127.0.0.1:{port}");
    let url = format!("http://{host}{target}");
    let mut arguments = vec!["-sS", "--path-as-is", version, "--interface", from, "--connect-to", &connect];
    arguments.extend(["-w", "\n%{http_code}"]);
    arguments.extend(more);
    arguments.push(&url);
    let answer = machine::run("curl", &arguments);
    let (body, status) = answer.rsplit_once('\n').expect("curl writes the status last");
    (status.trim().parse().expect("a status"), body.to_owned())
}

/// Each kind over each version, with what it was told.
#[track_caller]
fn each_told(world: &World, from: &str, target: &str, more: &[&str], check: impl Fn(Kind, &str, &str)) {
    for kind in kinds() {
        for version in VERSIONS {
            let (status, told) = ask(world, from, version, &kind.host(), target, more);
            assert_eq!(status, 200, "{kind:?} {version} {target}: {told}");
            check(kind, &told, &format!("{kind:?} {version}: {told}"));
        }
    }
}

const CLAIMS: &[&str] = &[
    "X-Forwarded-For",
    "X-Forwarded-Proto",
    "X-Forwarded-Host",
    "X-Forwarded-Port",
    "X-Forwarded-Prefix",
    "X-Forwarded-User",
    "Forwarded",
    "X-Real-IP",
    "X-Client-IP",
    "True-Client-IP",
    "Client-IP",
    "CF-Connecting-IP",
    "X-Cluster-Client-IP",
    "Fastly-Client-IP",
    "X-Original-Forwarded-For",
    "X-Original-URL",
    "X-Rewrite-URL",
    "X-Remote-Addr",
    "X-Authenticated-User",
    "Remote-User",
    "X-WebAuth-User",
    "SSL-Client-Verify",
    "SSL-Client-Cert",
    "X-SSL-Client-CN",
    "Client-Cert",
    "Front-End-Https",
    "nagaya-peer-request",
    "nagaya-peer-x",
    "Redirect-Status",
    "X-Request-Id",
    "Proxy",
    "X_Real_IP",
    "X.Real.IP",
    "X_Forwarded_For",
    "X-Accel-Mapping",
    "traceparent",
];

fn a_client_passes_for_nobody_else(world: &World) {
    let claims: Vec<_> = CLAIMS.iter().map(|name| format!("{name}: {FORGED}")).collect();
    let mut more: Vec<_> = claims.iter().flat_map(|claim| ["-H", claim]).collect();
    more.extend(["-H", "X-Own: kept", "-H", "Authorization: Basic eDp5", "-H", "Cookie: a=b"]);
    let port = world.http().port().to_string();
    each_told(world, CLIENT, "/x", &more, |kind, told, why| {
        assert!(!told.contains(FORGED), "{why}");
        assert_eq!(kind.fact(told, "REMOTE_ADDR", "x-forwarded-for").as_deref(), Some(CLIENT), "{why}");
        assert_eq!(kind.fact(told, "REQUEST_SCHEME", "x-forwarded-proto").as_deref(), Some("http"), "{why}");
        assert_eq!(
            kind.fact(told, "SERVER_NAME", "x-forwarded-host").as_deref(),
            Some(&*kind.host()),
            "{why}"
        );
        assert_eq!(kind.fact(told, "SERVER_PORT", "x-forwarded-port").as_deref(), Some(&*port), "{why}");
        assert_eq!(kind.field(told, "x-own").as_deref(), Some("kept"), "{why}");
        assert_eq!(kind.field(told, "authorization").as_deref(), Some("Basic eDp5"), "{why}");
        assert_eq!(kind.field(told, "cookie").as_deref(), Some("a=b"), "{why}");
        assert!(kind.field(told, "x-request-id").is_some_and(|id| id.len() == 32), "{why}");
        assert!(kind.field(told, "traceparent").is_some_and(|trace| trace.starts_with("00-")), "{why}");
        if kind.is_program() {
            assert!(!told.contains("HTTPS=") && !told.contains("HTTP_X_FORWARDED"), "{why}");
        }
    });
}

fn behind_a_trusted_proxy_the_client_is_its_client(world: &World) {
    let more = [
        "-H",
        "X-Forwarded-For: 203.0.113.9",
        "-H",
        "X-Forwarded-Proto: https",
        "-H",
        "X-Forwarded-Host: www.example.org",
        "-H",
        "X-Forwarded-Port: 8443",
        "-H",
        "X-Forwarded-Prefix: /app",
        "-H",
        "SSL-Client-Verify: SUCCESS",
    ];
    each_told(world, PROXY, "/x", &more, |kind, told, why| {
        let chain = if kind.is_program() { "203.0.113.9" } else { "203.0.113.9, 127.0.0.2" };
        for (variable, field, expected) in [
            ("REMOTE_ADDR", "x-forwarded-for", chain),
            ("REQUEST_SCHEME", "x-forwarded-proto", "https"),
            ("SERVER_NAME", "x-forwarded-host", "www.example.org"),
            ("SERVER_PORT", "x-forwarded-port", "8443"),
            ("HTTP_X_FORWARDED_FOR", "x-forwarded-for", chain),
            ("HTTP_X_FORWARDED_PREFIX", "x-forwarded-prefix", "/app"),
            ("HTTP_SSL_CLIENT_VERIFY", "ssl-client-verify", "SUCCESS"),
        ] {
            assert_eq!(kind.fact(told, variable, field).as_deref(), Some(expected), "{variable} {why}");
        }
        // The proxy does not say the client's port.
        for (field, expected) in [("x-rule-scheme", "https"), ("x-rule-port", "0")] {
            assert_eq!(kind.field(told, field).as_deref(), Some(expected), "{field} {why}");
        }
        if kind.is_program() {
            assert_eq!(kind.fact(told, "HTTPS", "").as_deref(), Some("on"), "{why}");
            assert!(kind.fact(told, "REMOTE_PORT", "").is_none(), "{why}");
        }
    });
}

fn trailers_end_at_the_node_unless_the_site_names_them(world: &World) {
    let fields = [
        "X-Forwarded-For",
        "Forwarded",
        "X-Real-IP",
        "Proxy",
        "Via",
        "X-Request-Id",
        "nagaya-peer-client",
        "X_Sum",
        "X-Other",
    ];
    let trailers: String = fields.iter().map(|name| format!("{name}: {FORGED}\r\n")).collect();
    let body = world.path("body");
    machine::write(&body, "body");
    for host in ["http.test", "app.test", "trailing.test"] {
        let mut connection = Connection::open(world.http());
        connection.send(format!(
            "POST /x HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n{trailers}X-Sum: 42\r\n\r\n"
        ));
        let http1 = connection.response().expect(200).text();
        let mut arguments: Vec<String> =
            ["-H", &format!(":authority: {host}"), "-d", &body.to_string_lossy(), "--no-content-length"]
                .map(Into::into)
                .into();
        for name in fields {
            arguments.push(format!("--trailer={}: {FORGED}", name.to_ascii_lowercase()));
        }
        arguments.push("--trailer=x-sum: 42".into());
        arguments.push(format!("http://{}/x", world.http()));
        let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
        let http2 = machine::run("nghttp", &arguments);
        for told in [http1, http2] {
            assert!(told.contains("body"), "{host}: {told}");
            assert!(!told.contains(FORGED), "{host}: {told}");
            let expected = host == "trailing.test";
            assert_eq!(told.to_ascii_lowercase().contains("x-sum: 42"), expected, "{host}: {told}");
        }
    }
}

fn the_routed_path_is_the_forwarded_path(world: &World) {
    for (target, expected) in [
        ("/pub/../x", "/x"),
        ("/pub/%2e%2E/x", "/x"),
        ("/x/../pub/./y", "/pub/y"),
        ("/%70ub/%7Ey?q=%7E", "/pub/~y?q=%7E"),
        ("//pub//y", "/pub//y"),
        ("/pub/a;b=c/y", "/pub/a;b=c/y"),
        ("/x/%252e%252e/y", "/x/%252e%252e/y"),
    ] {
        each_told(world, CLIENT, target, &[], |kind, told, why| {
            assert_eq!(kind.target(told).as_deref(), Some(expected), "{target} {why}");
            if kind == Kind::Cgi {
                // The program of a front controller is at the site's own path.
                let is_pub = told.lines().any(|line| line == "SCRIPT_NAME=/pub");
                assert_eq!(is_pub, expected.starts_with("/pub"), "{why}");
            }
        });
        // The log says what was asked for, and whose it was.
        let site = if expected.starts_with("/pub") { "http-pub" } else { "http" };
        wait::until("the request is in the log of the site it was routed to", || {
            world.access_log().iter().any(|line| line["target"] == target && line["site"] == site)
        });
    }
}

fn a_path_that_servers_read_differently_is_400(world: &World) {
    for target in [
        "/pub/..%2fx",
        "/pub/%2e%2e%2Fx",
        "/pub/..%5cx",
        "/pub/..;/x",
        "/pub/..;a=b/x",
        "/pub/.;/x",
        "/pub/x%2f..",
        "/pub/%zz",
        "/pub/%",
        "/pub/a%00b",
        "/../x",
        "/pub/../../x",
    ] {
        for kind in kinds() {
            for version in VERSIONS {
                let (status, told) = ask(world, CLIENT, version, &kind.host(), target, &[]);
                assert_eq!(status, 400, "{kind:?} {version} {target}: {told}");
            }
        }
    }
    // To a server and to a front controller an encoded slash alone means something; no file has such a name.
    for version in VERSIONS {
        let (status, told) = ask(world, CLIENT, version, "http.test", "/a%2Fb", &[]);
        assert_eq!((status, Kind::Http.target(&told).as_deref()), (200, Some("/a%2Fb")), "{version}");
        assert_eq!(ask(world, CLIENT, version, "php.test", "/a%2Fb", &[]).0, 200, "{version}");
    }
}

fn a_target_that_http1_refuses_is_refused_over_http2(world: &World) {
    let url = format!("http://{}/", world.http());
    for kind in kinds() {
        let authority = format!(":authority: {}", kind.host());
        for (path, is_taken) in
            [("/a", true), ("/\u{e4}", false), ("/a?\u{e4}", false), ("/a\u{7f}", false), ("/a b", false)]
        {
            let pseudo = format!(":path: {path}");
            let output = machine::output("nghttp", &["-v", "-H", &authority, "-H", &pseudo, &url]);
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            assert_eq!(text.contains(":status: 200"), is_taken, "{kind:?} {path:?}: {text}");
        }
    }
}

fn trace_is_405_and_reaches_nobody(world: &World) {
    for kind in kinds() {
        for version in VERSIONS {
            let more =
                ["-X", "TRACE", "-H", "Cookie: secret=of the visitor", "-H", "Authorization: Basic eDp5"];
            let (status, told) = ask(world, CLIENT, version, &kind.host(), "/trace", &more);
            assert_eq!(status, 405, "{kind:?} {version}");
            assert!(!told.contains("of the visitor"), "{told}");
        }
    }
    assert!(!world.with_kept(0, Backend::received).contains("TRACE"));
}

fn no_other_version_of_http_is_offered_to_a_backend(world: &World) {
    for (kind, offered) in
        [(Kind::Http, Some("websocket")), (Kind::App, Some("websocket")), (Kind::Php, None)]
    {
        for (asked, expected) in [("h2c", None), ("HTTP/2.0, h2c", None), ("h2c, websocket", offered)] {
            let upgrade = format!("Upgrade: {asked}");
            let more = [
                "-H",
                "Connection: Upgrade, HTTP2-Settings",
                "-H",
                &upgrade,
                "-H",
                "HTTP2-Settings: AAMAAABkAAQ",
            ];
            let (status, told) = ask(world, CLIENT, "--http1.1", &kind.host(), "/x", &more);
            assert_eq!(status, 200, "{told}");
            assert_eq!(kind.field(&told, "upgrade").as_deref(), expected, "{told}");
            assert_eq!(kind.field(&told, "http2-settings"), None, "{told}");
        }
    }
}

fn rules_set_what_is_theirs_and_nothing_of_the_servers(world: &World) {
    each_told(world, CLIENT, "/x", &[], |kind, told, why| {
        assert_eq!(kind.field(told, "x-remote-user").as_deref(), Some("ann"), "{why}");
        assert_eq!(kind.field(told, "x-rule-scheme").as_deref(), Some("http"), "{why}");
        let port = kind.field(told, "x-rule-port").and_then(|port| port.parse::<u16>().ok());
        assert!(port.is_some_and(|port| port > 0), "{why}");
        assert!(
            !told.contains(FORGED) && !told.contains("/tmp/x.so") && !told.contains("auto_prepend"),
            "{why}"
        );
        if kind.is_program() {
            assert_eq!(kind.fact(told, "FOO", "").as_deref(), Some("of a rule"), "{why}");
            let file = kind.fact(told, "SCRIPT_FILENAME", "").unwrap_or_default();
            assert!(file.contains("/alice/") && file.contains("/index."), "{why}");
        }
    });
    for name in ["SCRIPT_FILENAME", "LD_PRELOAD", "PHP_VALUE", "REMOTE_ADDR"] {
        let log = world.log();
        let said: Vec<_> = log
            .lines()
            .filter(|line| line.contains("NGY0429") && line.contains(&format!("'{name}'")))
            .collect();
        assert_eq!(said.len(), 1, "{name} is said once: {said:?}");
    }
}
