//! Programs that ask a site of their own tenant by its public name, through the edge of their own node.
//!
//! Not here: what else programs reach (`outbound`, `tenants`).

use std::net::TcpListener;

use nagaya_tests::client;
use nagaya_tests::suite::{Suite, Tests};
use nagaya_tests::world::World;
use nagaya_tests::{machine, wait};
use serde_json::{Value, json};

pub const SUITE: Suite = Suite {
    name: "own_sites",
    needs_root: true,
    tests: Tests::Sharing(
        world,
        nagaya_tests::tests![
            an_application_asks_its_own_site_by_its_name,
            an_application_reaches_its_tenants_sites_and_no_other,
            an_application_reaches_the_edge_alone,
            it_asks_by_tls_with_the_name_of_its_site,
            cgi_and_php_ask_their_own_sites,
            site_that_asks_its_node_is_no_proxy_and_gets_no_receipt,
            a_site_that_asks_itself_without_end_is_bounded,
        ],
    ),
};

/// Answers with what it finds at the place that the request names: `/ask?SCHEME/HOST/CONNECT-TO/PORT/PATH`.
const ASKS: &str = r#"
import http.client, http.server, os, socket, socketserver, ssl
class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        path, _, query = self.path.partition('?')
        try:
            body = ask(query) if path == '/ask' else 'client ' + self.headers.get('X-Forwarded-For', '')
        except Exception as error:
            body = type(error).__name__
        body = body.encode()
        self.send_response(200); self.send_header('Content-Length', str(len(body))); self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args): pass
    def address_string(self): return ''
def ask(query):
    scheme, host, to, port, path = query.split('/', 4)
    # Who asks within a request that asks gives up soon.
    seconds = 2 if path.startswith('ask') else 20
    connection = http.client.HTTPConnection(to, int(port), timeout=seconds)
    if scheme == 'https':
        context = ssl._create_unverified_context()
        plain = socket.create_connection((to, int(port)), timeout=20)
        connection.sock = context.wrap_socket(plain, server_hostname=host)
    connection.request('GET', '/' + path, headers={'Host': host, 'X-Forwarded-For': '203.0.113.9'})
    answer = connection.getresponse()
    receipt = 'receipt ' if answer.getheader('Nagaya-Receipt') else ''
    return f'{answer.status} {receipt}{answer.read().decode()}'
Server(os.environ['NAGAYA_SOCKET'], Handler).serve_forever()
"#;

const CGI: &str = r#"#!/bin/sh
printf 'Content-Type: text/plain\r\n\r\n'
curl -s --noproxy '*' -m 20 -w ' %{http_code}' -H 'X-Forwarded-For: 203.0.113.9' -H "Host: $QUERY_STRING" "http://127.0.0.1:PORT/"
"#;

const PHP: &str = r#"<?php
$c = curl_init('http://127.0.0.1:PORT/');
echo stream_get_contents(fopen('http://127.0.0.1:PORT/', 'r', false,
    stream_context_create(['http' => ['header' => "Host: {$_GET['host']}\r\nX-Forwarded-For: 203.0.113.9", 'ignore_errors' => true]])));
"#;

fn world() -> World {
    let app = |more: Value| {
        let mut backend = json!({ "kind": "app", "directory": "app", "command": ["python3", "asks.py"] });
        more.as_object().expect("an object").iter().for_each(|(key, value)| backend[key] = value.clone());
        backend
    };
    let builder = World::builder()
        .tls()
        .set("receipts", "allow = [\"127.0.0.0/8\"]")
        .set("edge", "trusted_proxies = [\"127.0.0.0/8\"]")
        .site_of("alice", "asks", app(json!({})))
        .site_of("alice", "all", app(json!({ "outbound": "nat" })))
        .site_of("alice", "named", app(json!({ "outbound": ["page.test:1"] })))
        .site_of("alice", "page", json!({ "kind": "static", "root": "www" }))
        .site_of("alice", "cgi", json!({ "kind": "cgi", "root": "cgi" }))
        .site_of("alice", "php", json!({ "kind": "php", "root": "php" }))
        .site_of("bob", "bobs", json!({ "kind": "static", "root": "www" }));
    let certificates = builder.path("certificates");
    make_certificate(&certificates, "page.test");
    let world = builder.start();
    world.write("alice", "app/asks.py", ASKS);
    world.write("alice", "www/index.html", "alice's page");
    world.write("bob", "www/index.html", "bob's page");
    let port = world.http().port().to_string();
    world.write_program("alice", "cgi/asks.cgi", &CGI.replace("PORT", &port));
    world.write(
        "alice",
        "php/asks.php",
        PHP.replace("$c = curl_init('http://127.0.0.1:PORT/');\n", "").replace("PORT", &port),
    );
    world.give("alice");
    world.give("bob");
    world
}

fn make_certificate(dir: &std::path::Path, name: &str) {
    let key = dir.join("key");
    let chain = dir.join("chain");
    let [key_path, chain_path] = [&key, &chain].map(|path| path.to_string_lossy().into_owned());
    let subject = format!("/CN={name}");
    let alternative = format!("subjectAltName=DNS:{name}");
    machine::run(
        "openssl",
        &[
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
            "-keyout",
            &key_path,
            "-out",
            &chain_path,
            "-subj",
            &subject,
            "-addext",
            &alternative,
        ],
    );
    let mut pem = std::fs::read_to_string(&chain).expect("openssl wrote it");
    pem.push_str(&std::fs::read_to_string(&key).expect("openssl wrote it"));
    machine::write(&dir.join(format!("{name}.pem")), pem);
    for path in [key, chain] {
        std::fs::remove_file(path).expect("our own file");
    }
}

/// What the application of this site is told there.
#[track_caller]
fn asked(world: &World, site: &str, scheme: &str, host: &str, to: &str, port: u16) -> String {
    let target = format!("/ask?{scheme}/{host}/{to}/{port}/");
    world.get(&format!("{site}.test"), &target).expect(200).text()
}

fn an_application_asks_its_own_site_by_its_name(world: &World) {
    let port = world.http().port();
    assert_eq!(asked(world, "asks", "http", "page.test", "page.test", port), "200 alice's page");
    // A place of its record with the name of its site leads to the site all the same.
    assert_eq!(asked(world, "named", "http", "page.test", "page.test", port), "200 alice's page");
    // Its own site, within itself.
    let said = asked(world, "asks", "http", "asks.test", "asks.test", port);
    assert!(said.starts_with("200 client 127.1"), "{said}");
}

fn an_application_reaches_its_tenants_sites_and_no_other(world: &World) {
    let port = world.http().port();
    let said = asked(world, "asks", "http", "bobs.test", "page.test", port);
    assert!(said.starts_with("404 ") && said.contains("NGY0402"), "{said}");
    assert_eq!(asked(world, "asks", "http", "bobs.test", "bobs.test", port), "gaierror");
    assert_eq!(world.get("bobs.test", "/").expect(200).text(), "bob's page", "it is there for visitors");
}

fn an_application_reaches_the_edge_alone(world: &World) {
    let service = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = service.local_addr().expect("it is bound").port();
    for site in ["asks", "named", "all"] {
        for to in ["page.test", "127.0.0.1"] {
            let said = asked(world, site, "http", "page.test", to, port);
            assert!(
                ["ConnectionRefusedError", "gaierror"].contains(&said.as_str()),
                "{site} at {to}: {said}"
            );
        }
    }
    service.set_nonblocking(true).expect("our own socket");
    assert!(service.accept().is_err(), "nobody came");
}

fn it_asks_by_tls_with_the_name_of_its_site(world: &World) {
    let port = world.https().port();
    assert_eq!(asked(world, "asks", "https", "page.test", "page.test", port), "200 alice's page");
}

fn cgi_and_php_ask_their_own_sites(world: &World) {
    for (site, target) in [("cgi", "/asks.cgi?page.test"), ("php", "/asks.php?host=page.test")] {
        let said = world.get(&format!("{site}.test"), target).expect(200).text();
        assert!(said.starts_with("alice's page"), "{site}: {said}");
    }
    // Others' sites are public, and their programs reach what everybody reaches.
    let said = world.get("cgi.test", "/asks.cgi?bobs.test").expect(200).text();
    assert_eq!(said, "bob's page 200");
}

fn site_that_asks_its_node_is_no_proxy_and_gets_no_receipt(world: &World) {
    let port = world.http().port();
    let from_here =
        client::get_with(world.http(), "asks.test", "/", "X-Forwarded-For: 203.0.113.9\r\n").expect(200);
    assert_eq!(from_here.text(), "client 203.0.113.9, 127.0.0.1", "the test itself is a trusted proxy");
    assert!(from_here.header("nagaya-receipt").is_none(), "the client is somebody else");
    assert!(client::get(world.http(), "asks.test", "/").header("nagaya-receipt").is_some());
    let said = asked(world, "asks", "http", "asks.test", "asks.test", port);
    assert!(said.starts_with("200 client 127.1") && !said.contains("203.0.113.9"), "{said}");
    for (site, target) in [("cgi", "/asks.cgi?asks.test"), ("php", "/asks.php?host=asks.test")] {
        let said = world.get(&format!("{site}.test"), target).expect(200).text();
        assert!(said.starts_with("client 127.1") && !said.contains("203.0.113.9"), "{site}: {said}");
    }
    let clients: Vec<String> = world
        .access_log()
        .iter()
        .filter_map(|line| Some(line["client"].as_str()?.to_owned()))
        .filter(|client| client.starts_with("127.1"))
        .collect();
    assert!(!clients.is_empty() && clients.iter().all(|client| client != "127.0.0.1"), "{clients:?}");
}

fn a_site_that_asks_itself_without_end_is_bounded(world: &World) {
    world.cli(&["tenant", "set", "alice", "--max-concurrent", "4"]);
    let port = world.http().port();
    // Each request asks the same again, one level deeper, until no more may run.
    let mut target = String::from("/");
    for _ in 0..12 {
        target = format!("/ask?http/asks.test/asks.test/{port}{target}");
    }
    let mut connection = client::Connection::open(world.http());
    connection.send(format!("GET {target} HTTP/1.1\r\nHost: asks.test\r\nConnection: close\r\n\r\n"));
    let answer = connection.response();
    assert!(answer.status >= 200, "{answer:?}");
    world.cli(&["tenant", "set", "alice", "--unset", "max-concurrent"]);
    wait::until("its other sites answer", || world.get("page.test", "/").status == 200);
}
