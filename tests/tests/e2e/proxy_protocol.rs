//! The PROXY protocol: behind a real proxy the client is the proxy's client, everywhere; and nobody else may say so.
//!
//! Not here: forms of headers (unit tests of the edge), what proxies say in header fields (`told`).

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};

use nagaya_tests::client::Connection;
use nagaya_tests::machine;
use nagaya_tests::suite::{Suite, Tests, skip};
use nagaya_tests::wait;
use nagaya_tests::world::World;
use serde_json::{Value, json};

pub const SUITE: Suite = Suite {
    name: "proxy_protocol",
    needs_root: true,
    tests: Tests::Sharing(
        world,
        nagaya_tests::tests![
            behind_haproxy_all_that_is_told_is_the_clients,
            tls_and_http2_work_behind_haproxy,
            haproxys_own_health_checks_are_answered,
            curls_header_is_understood,
            a_client_with_its_own_header_is_closed,
            an_address_without_proxies_takes_no_header,
            a_proxy_without_a_header_is_closed,
            limits_hold_for_the_told_client,
            header_fields_of_the_told_client_are_not_believed,
        ],
    ),
};

/// The only proxy that is believed.
const PROXY: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 9);
const CLIENT: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 77);

/// Says what it is told of the client.
const PROGRAM: &str = "#!/bin/sh\n\
    printf 'Content-Type: text/plain\\r\\n\\r\\n%s %s %s' \"$REMOTE_ADDR\" \"$REMOTE_PORT\" \"$SERVER_PORT\"\n";

const RULE: &str = "Apache::Request.new.headers_out['X-Rule-Saw'] = Apache::Connection.new.remote_ip\n";

fn world() -> World {
    let world = World::builder()
        .tls()
        .listen_behind_proxy()
        .set("edge.networks", "exempt = [\"127.0.0.0/8\"]\nrequests_per_second = 1\nrequests_burst = 5")
        .rule("saw", "fixups", RULE, "")
        .site_of("alice", "cgi", json!({ "kind": "cgi", "root": "cgi-bin" }))
        .site_of("alice", "www", json!({ "kind": "static", "root": "www" }))
        .start();
    world.write_program("alice", "cgi-bin/told.cgi", PROGRAM);
    world.write("alice", "www/a.txt", "alpha");
    super::tls::certify(&world, "default", &["cgi.test", "www.test"]);
    world
}

/// A running HAProxy that passes connections on as they are, with these words for its server.
struct Haproxy {
    process: Child,
    address: SocketAddr,
}

impl Haproxy {
    fn start(world: &World, name: &str, server: SocketAddr, words: &str) -> Self {
        if Command::new("haproxy").arg("-v").stdout(Stdio::null()).status().is_err() {
            skip("the package haproxy is not installed");
        }
        // HAProxy chooses no port by itself: it is given the socket, as its standard input.
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback has ports");
        let address = listener.local_addr().expect("it is bound");
        let config = world.path(&format!("{name}.cfg"));
        let text = format!(
            "defaults\n  mode tcp\n  timeout connect 10s\n  timeout client 60s\n  timeout server 60s\n\
             frontend clients\n  bind fd@0\n  default_backend nodes\n\
             backend nodes\n  source {PROXY}\n  server node {server} {words}\n"
        );
        machine::write(&config, text);
        let log = fs::File::create(world.path(&format!("{name}.log"))).expect("our own file");
        let process = Command::new("haproxy")
            .args(["-db", "-f"])
            .arg(&config)
            .stdin(OwnedFd::from(listener))
            .stderr(log)
            .spawn()
            .expect("haproxy is installed");
        Self { address, process }
    }
}

impl Drop for Haproxy {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The response to a GET that curl sends to `address` from the client's address.
fn curl(address: SocketAddr, url: &str, more: &[&str]) -> String {
    let from = CLIENT.to_string();
    let host = url.split('/').nth(2).expect("a URL");
    let connect = format!("{host}:{}:{address}", if url.starts_with("https") { 443 } else { 80 });
    let words = ["-sSk", "--interface", &from, "--connect-to", &connect];
    machine::run("curl", &[&words[..], more, &[url]].concat())
}

/// The last line of the access log for this target.
fn logged(world: &World, target: &str) -> Value {
    wait::until_some("the request is in the access log", || {
        world.access_log().into_iter().rfind(|line| line["target"] == target)
    })
}

fn behind_haproxy_all_that_is_told_is_the_clients(world: &World) {
    for words in ["send-proxy", "send-proxy-v2", "send-proxy-v2 proxy-v2-options crc32c,unique-id,authority"]
    {
        let name = words.replace([' ', ','], "-");
        let haproxy = Haproxy::start(world, &name, world.behind_proxy(false), words);
        let shown = curl(haproxy.address, &format!("http://cgi.test/told.cgi?{name}"), &["-i"]);
        let body = shown.rsplit("\r\n\r\n").next().expect("a body");
        let words: Vec<&str> = body.split(' ').collect();
        assert_eq!(words[0], CLIENT.to_string(), "{name}: {shown}");
        assert_ne!(words[1], "0");
        // The port that the client came to is the proxy's.
        assert_eq!(words[2], haproxy.address.port().to_string(), "{name}: {shown}");
        assert!(shown.to_lowercase().contains(&format!("x-rule-saw: {CLIENT}\r\n")), "{name}: {shown}");
        assert_eq!(logged(world, &format!("/told.cgi?{name}"))["client"], CLIENT.to_string());
    }
}

fn tls_and_http2_work_behind_haproxy(world: &World) {
    for words in ["send-proxy", "send-proxy-v2"] {
        let haproxy = Haproxy::start(world, &format!("tls-{words}"), world.behind_proxy(true), words);
        for version in ["--http1.1", "--http2"] {
            let shown =
                curl(haproxy.address, "https://cgi.test/told.cgi", &[version, "-w", " %{http_version}"]);
            let words: Vec<&str> = shown.split(' ').collect();
            assert_eq!(words[0], CLIENT.to_string(), "{shown}");
            assert_eq!(words[3], if version == "--http2" { "2" } else { "1.1" });
        }
    }
}

fn haproxys_own_health_checks_are_answered(world: &World) {
    // They say LOCAL, and the node answers them as requests of the proxy's own.
    let words = "send-proxy-v2 check check-send-proxy inter 100ms";
    let checks = "option httpchk\n  http-check send meth GET uri /checked ver HTTP/1.1 hdr Host www.test";
    let haproxy = Haproxy::start(world, "checks", world.behind_proxy(false), &format!("{words}\n  {checks}"));
    let line = logged(world, "/checked");
    assert_eq!(line["client"], PROXY.to_string());
    drop(haproxy);
}

fn curls_header_is_understood(world: &World) {
    // curl tells its own end of the connection, so it connects from the address of the proxy.
    let address = world.behind_proxy(false);
    let from = PROXY.to_string();
    let url = format!("http://{address}/told.cgi");
    let words = ["-sS", "--haproxy-protocol", "--interface", &from, "-H", "Host: cgi.test", &url];
    let shown = machine::run("curl", &words);
    assert!(shown.starts_with(&format!("{from} ")), "{shown}");
}

/// The header of a proxy's client in front of a request.
fn told(client: &str) -> String {
    format!("PROXY TCP4 {client} 192.0.2.254 5000 80\r\nGET /a.txt HTTP/1.1\r\nHost: www.test\r\n\r\n")
}

fn a_client_with_its_own_header_is_closed(world: &World) {
    let mut connection = Connection::open_from(CLIENT, world.behind_proxy(false));
    let _ = connection.try_send(told("192.0.2.1"));
    assert!(connection.is_closed());
    // Without one too: nobody but the proxy is served there.
    let mut connection = Connection::open_from(CLIENT, world.behind_proxy(false));
    let _ = connection.try_send("GET /a.txt HTTP/1.1\r\nHost: www.test\r\n\r\n");
    assert!(connection.is_closed());
    wait::until("the log says it", || world.log().contains("NGY0484"));
    assert!(world.metric("nagaya_client_limits_total", "limit=\"proxy_header\"") >= 2.0);
    let mut proxy = Connection::open_from(PROXY, world.behind_proxy(false));
    proxy.send(told("192.0.2.1")).response().expect(200);
}

fn an_address_without_proxies_takes_no_header(world: &World) {
    for from in [CLIENT, PROXY] {
        let mut connection = Connection::open_from(from, world.http());
        // To HTTP, its last word is a version that is not spoken.
        connection.send(told("192.0.2.1")).response().expect(505);
        assert!(connection.is_closed());
        let mut connection = Connection::open_from(from, world.http());
        let binary = b"\r\n\r\n\0\r\nQUIT\n\x20\0\0\0GET /a.txt HTTP/1.1\r\nHost: www.test\r\n\r\n";
        connection.send(binary).response().expect(400);
        assert!(connection.is_closed());
    }
}

fn a_proxy_without_a_header_is_closed(world: &World) {
    for bytes in [
        "GET /a.txt HTTP/1.1\r\nHost: www.test\r\n\r\n",
        "PROXY TCP4 192.0.2.1 192.0.2.254 5000 http\r\nGET /a.txt HTTP/1.1\r\nHost: www.test\r\n\r\n",
        "PROXY TCP4 192.0.2.1",
    ] {
        let mut connection = Connection::open_from(PROXY, world.behind_proxy(false));
        let _ = connection.try_send(bytes);
        assert!(connection.is_closed(), "{bytes}");
    }
}

fn limits_hold_for_the_told_client(world: &World) {
    let address = world.behind_proxy(false);
    let status = |client: &str| {
        let mut connection = Connection::open_from(PROXY, address);
        connection.send(told(client)).response().status
    };
    assert_eq!(status("198.51.100.1"), 200);
    wait::until("the told client is limited", || status("198.51.100.1") == 429);
    assert_eq!(status("198.51.100.2"), 200, "another one is not");
}

fn header_fields_of_the_told_client_are_not_believed(world: &World) {
    let mut connection = Connection::open_from(PROXY, world.behind_proxy(false));
    let request = "PROXY TCP4 203.0.113.5 192.0.2.254 5000 80\r\nGET /told.cgi HTTP/1.1\r\nHost: cgi.test\r\nX-Forwarded-For: 192.0.2.66\r\n\r\n";
    let shown = connection.send(request).response().expect(200).text();
    assert_eq!(shown, "203.0.113.5 5000 80");
}
