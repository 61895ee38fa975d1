//! Applications that already run somewhere: what they are told, and what becomes of their mistakes.
//!
//! Not here: applications that nagaya starts (`programs`), requests that two parsers could read differently
//! (`smuggling`).

use std::time::Duration;

use nagaya_tests::backend::{Backend, Peer, Request};
use nagaya_tests::client::{self, Connection};
use nagaya_tests::http2::{self, Answer};
use nagaya_tests::suite::{Suite, Tests};
use nagaya_tests::wait;
use nagaya_tests::world::World;
use serde_json::json;

pub const SUITE: Suite = Suite {
    name: "proxy",
    needs_root: false,
    tests: Tests::Sharing(
        world,
        nagaya_tests::tests![
            the_application_is_told_who_asks,
            claims_of_a_client_are_not_passed_on,
            a_backend_that_answers_nothing_is_502,
            invalid_answers_are_502,
            a_backend_that_is_not_there_is_502,
            a_backend_that_stays_silent_is_504,
            an_answer_that_breaks_off_is_broken_off,
            a_trickling_answer_arrives_whole,
            an_answer_before_the_end_of_the_request_is_passed_on,
            an_aged_connection_is_replaced_only_where_that_is_safe,
            bytes_stream_both_ways_at_once,
            an_upgraded_connection_carries_anything,
            an_upgraded_connection_ends_soon_after_one_side,
            a_refused_upgrade_is_an_ordinary_answer,
            a_site_ends_each_stream_in_its_time,
            connections_to_a_backend_are_reused,
            a_client_that_leaves_frees_the_backend,
            unix_sockets_are_addresses_too,
        ],
    ),
};

fn world() -> World {
    let site = |name: &str, host: &str, address: String| {
        json!({ "name": name, "tenant": "alice", "hosts": [host],
            "backend": { "kind": "http", "address": address, "timeout_seconds": 1 } })
    };
    let backend = Backend::answering(misbehave);
    let unused = std::net::TcpListener::bind("127.0.0.1:0").expect("a loopback port");
    let nobody = unused.local_addr().expect("a bound socket has an address");
    drop(unused);
    let world = World::builder()
        .tenant("alice")
        .site(json!({ "name": "ends", "tenant": "alice", "hosts": ["ends.test"], "stream_seconds": 1,
            "backend": { "kind": "http", "address": backend.address.to_string(), "request_buffering": "off" } }))
        .site(json!({ "name": "files", "tenant": "alice", "hosts": ["files.test"], "stream_seconds": 1,
            "backend": { "kind": "static", "root": "files" } }))
        .site(site("app", "app.test", backend.address.to_string()))
        .site(site("nobody", "nobody.test", nobody.to_string()))
        .start();
    world.keep(backend);
    world
}

/// One server with a path for each way to answer. False ends the connection.
fn misbehave(peer: &mut Peer, request: &Request) -> bool {
    let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
    match request.target() {
        "/told" => peer.answer("200 OK", &request.head),
        "/nothing" => false,
        "/garbage" => only(peer, "SSH-2.0-OpenSSH_9.2\r\n\r\n"),
        "/two-lengths" => peer.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nabc"),
        "/length-and-chunked" => {
            peer.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
        }
        "/split-field" => peer.send("HTTP/1.1 200 OK\r\nX-A: 1\rX-B: 2\r\nContent-Length: 2\r\n\r\nab"),
        "/huge-head" => peer.send(format!("HTTP/1.1 200 OK\r\nX-Huge: {}\r\n\r\n", "x".repeat(1 << 20))),
        "/uninvited-switch" => {
            peer.send("HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n")
        }
        "/silent" => {
            peer.wait_for_end();
            false
        }
        "/short" => only(peer, "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nonly this"),
        "/short-chunked" => only(peer, format!("{chunked}5\r\nhello\r\n")),
        "/bad-chunk" => only(peer, format!("{chunked}5\r\nhello\r\nzz\r\n")),
        "/trickle" => {
            peer.send("HTTP/1.1 200 OK\r\nContent-Length: 30\r\n\r\n")
                && peer.trickle(&[b't'; 30], Duration::from_millis(10))
        }
        "/endless" => {
            peer.send("HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
                && peer.trickle(&[b'e'; 1_000_000], Duration::from_millis(10))
        }
        "/upgrade" if request.field("upgrade").is_some() => upgrade(peer),
        _ => peer.answer("200 OK", &String::from_utf8_lossy(&request.body)),
    }
}

/// Sends this and ends the connection.
fn only(peer: &mut Peer, bytes: impl AsRef<[u8]>) -> bool {
    peer.send(bytes);
    false
}

fn upgrade(peer: &mut Peer) -> bool {
    peer.send("HTTP/1.1 101 Switching Protocols\r\nUpgrade: echo\r\nConnection: Upgrade\r\n\r\nready");
    while let Some(bytes) = peer.some_bytes() {
        if !peer.send(bytes) {
            break;
        }
    }
    false
}

fn the_application_is_told_who_asks(world: &World) {
    let told = world.get("APP.test:8080", "/told").expect(200);
    let head = Request { head: told.text(), body: Vec::new() };
    let has = |name: &str, part: &str| {
        let value = head.field(name).unwrap_or_default();
        assert!(value.contains(part), "{name}: '{value}' has no '{part}' in\n{}", head.head);
    };
    assert!(head.head.starts_with("GET /told HTTP/1.1\r\n"), "{}", head.head);
    has("host", "app.test:8080");
    has("x-forwarded-for", "127.0.0.1");
    has("x-forwarded-proto", "http");
    has("x-forwarded-host", "app.test");
    has("forwarded", "for=127.0.0.1");
    has("forwarded", "proto=http");
    has("via", "1.1 test");
    has("traceparent", "00-");
    assert!(told.header("via").is_some_and(|via| via.contains("test")));
    let id = head.field("x-request-id").expect("the request has an id");
    wait::until("the access log has the id", || {
        world.access_log().iter().any(|line| line["id"] == id.as_str())
    });
}

fn claims_of_a_client_are_not_passed_on(world: &World) {
    let fields = "X-Forwarded-For: 10.9.8.7\r\nForwarded: for=10.9.8.7\r\nX-Real-IP: 10.9.8.7\r\n\
                  X_Forwarded_For: 10.9.8.7\r\nProxy: http://10.9.8.7\r\nKeep-Alive: timeout=10.9\r\n\
                  Connection: X-Private\r\nX-Private: 10.9.8.7\r\nX-Kept: yes\r\n";
    let head = client::get_with(world.http(), "app.test", "/told", fields).expect(200).text();
    assert!(!head.contains("10.9"), "{head}");
    assert!(head.to_ascii_lowercase().contains("x-kept: yes"), "{head}");
    // Where it has been so far is continued, and the trace too.
    let fields =
        "Via: 1.1 before\r\ntraceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n";
    let head = client::get_with(world.http(), "app.test", "/told", fields).expect(200).text();
    assert!(head.contains("before") && head.contains("0af7651916cd43dd8448eb211c80319c"), "{head}");
}

fn a_backend_that_answers_nothing_is_502(world: &World) {
    let answer = world.get("app.test", "/nothing").expect(502);
    assert!(answer.text().contains("NGY0417") || answer.text().contains("NGY0418"), "{}", answer.text());
}

fn invalid_answers_are_502(world: &World) {
    for target in
        ["/garbage", "/two-lengths", "/length-and-chunked", "/split-field", "/huge-head", "/uninvited-switch"]
    {
        let answer = world.get("app.test", target);
        assert_eq!(answer.status, 502, "{target}: {answer:?}");
        assert!(answer.text().contains("request "), "{target}: the page has the request's id");
    }
}

fn a_backend_that_is_not_there_is_502(world: &World) {
    world.get("nobody.test", "/").expect(502);
}

fn a_backend_that_stays_silent_is_504(world: &World) {
    let answer = world.get("app.test", "/silent").expect(504);
    assert!(answer.text().contains("NGY0419"), "{}", answer.text());
}

fn an_answer_that_breaks_off_is_broken_off(world: &World) {
    for target in ["/short", "/short-chunked", "/bad-chunk"] {
        let mut connection = Connection::open(world.http());
        connection.send(format!("GET {target} HTTP/1.1\r\nHost: app.test\r\n\r\n"));
        let answer = connection.try_response();
        assert!(answer.is_err(), "{target} passes for complete: {answer:?}");
    }
    // To an old client, the end of the connection is the end of the body: it must not be a quiet end.
    let mut old = Connection::open(world.http());
    old.send("GET /short-chunked HTTP/1.0\r\nHost: app.test\r\n\r\n");
    assert_eq!(old.head().status, 200);
    assert_eq!(old.bytes(5), b"hello");
    assert!(old.next_error().is_some(), "the connection ends as if the body were complete");
}

fn a_trickling_answer_arrives_whole(world: &World) {
    assert_eq!(world.get("app.test", "/trickle").expect(200).text(), "t".repeat(30));
}

fn an_answer_before_the_end_of_the_request_is_passed_on(world: &World) {
    let backend = Backend::start(|peer| {
        peer.head();
        peer.send("HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno");
        peer.wait_for_end();
    });
    world.import(&[streaming_site_at("early", "early.test", &backend)]);
    let mut connection = Connection::open(world.http());
    connection
        .send("POST / HTTP/1.1\r\nHost: early.test\r\nContent-Length: 1000000\r\n\r\nonly the beginning");
    assert_eq!(connection.response().expect(403).text(), "no");
    // What is left of the request would be taken for the next one.
    assert!(connection.is_closed());
}

fn site_at(name: &str, host: &str, backend: &Backend) -> serde_json::Value {
    json!({ "name": name, "tenant": "alice", "hosts": [host],
        "backend": { "kind": "http", "address": backend.address.to_string() } })
}

/// Its server gets request bodies as they come.
fn streaming_site_at(name: &str, host: &str, backend: &Backend) -> serde_json::Value {
    let mut site = site_at(name, host, backend);
    site["backend"]["request_buffering"] = "off".into();
    site
}

fn an_aged_connection_is_replaced_only_where_that_is_safe(world: &World) {
    // Answers one request of each connection, takes a second one, and closes without an answer.
    let backend = Backend::start(|peer| {
        if peer.request().is_some() {
            peer.answer("200 OK", "first of its connection");
            peer.request();
        }
    });
    world.import(&[site_at("aging", "aging.test", &backend)]);
    // Both on one connection of ours, so that one thread with one pool serves them.
    let ask = |second: &str| {
        let mut connection = Connection::open(world.http());
        connection.send("GET /1 HTTP/1.1\r\nHost: aging.test\r\n\r\n").response().expect(200);
        let before = backend.received().matches("/second").count();
        let answer = connection.send(second).response();
        (answer.status, backend.received().matches("/second").count() - before)
    };
    let (status, sent) = ask("GET /second HTTP/1.1\r\nHost: aging.test\r\n\r\n");
    assert_eq!((status, sent), (200, 2), "a GET is asked again");
    let (status, sent) = ask("POST /second HTTP/1.1\r\nHost: aging.test\r\nContent-Length: 3\r\n\r\nbuy");
    assert_eq!((status, sent), (502, 1), "a POST may have been carried out");
}

fn bytes_stream_both_ways_at_once(world: &World) {
    // Answers each chunk as it comes, long before the request has ended.
    let backend = Backend::start(|peer| {
        peer.head();
        peer.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
        while let Some(bytes) = peer.some_bytes() {
            peer.send(&bytes);
            if bytes.ends_with(b"0\r\n\r\n") {
                return;
            }
        }
    });
    world.import(&[streaming_site_at("stream", "stream.test", &backend)]);
    let mut connection = Connection::open(world.http());
    connection.send("POST / HTTP/1.1\r\nHost: stream.test\r\nTransfer-Encoding: chunked\r\n\r\n");
    connection.head().expect(200);
    for round in 0..20 {
        let chunk = format!("5\r\nab{round:03}\r\n");
        assert_eq!(connection.send(&chunk).bytes(chunk.len()), chunk.as_bytes());
    }
    assert_eq!(connection.send("0\r\n\r\n").bytes(5), b"0\r\n\r\n");
}

fn an_upgraded_connection_carries_anything(world: &World) {
    let mut connection = Connection::open(world.http());
    connection.send(
        "GET /upgrade HTTP/1.1\r\nHost: app.test\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\
         Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
    );
    let head = connection.head().expect(101);
    assert_eq!(head.header("upgrade"), Some("echo"));
    assert_eq!(connection.bytes(5), b"ready");
    let noise: Vec<u8> = (0..=255).cycle().take(100_000).collect();
    let mut sender = connection.clone_stream();
    let sent = noise.clone();
    let thread = std::thread::spawn(move || std::io::Write::write_all(&mut sender, &sent));
    assert!(connection.bytes(noise.len()) == noise);
    thread.join().expect("it only writes").expect("the node takes it");
    connection.finish();
    assert!(connection.is_closed());
}

/// TCP does not tell a side that only sends no more from one that has left: the other is not kept for ever.
fn an_upgraded_connection_ends_soon_after_one_side(world: &World) {
    let (tell, told) = std::sync::mpsc::channel();
    let (release, hold) = std::sync::mpsc::channel::<()>();
    let hold = std::sync::Mutex::new(hold);
    let backend = Backend::start(move |peer| {
        let Some(head) = peer.head() else { return };
        let own = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\nready";
        peer.send(own);
        if head.target() == "/server-ends" {
            peer.finish();
        }
        peer.wait_for_end();
        let _ = tell.send(head.target().to_owned());
        // It does not leave by itself: that the client is told of the end is the node's doing.
        let _ = hold.lock().expect("no holder panics").recv();
    });
    world.import(&[site_at("half", "half.test", &backend)]);
    for ends in ["/server-ends", "/client-ends"] {
        let mut connection = Connection::open(world.http());
        let head =
            format!("GET {ends} HTTP/1.1\r\nHost: half.test\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n");
        connection.send(head);
        connection.head().expect(101);
        assert_eq!(connection.bytes(5), b"ready");
        if ends == "/client-ends" {
            connection.finish();
        }
        assert_eq!(connection.until_end(), b"");
        let told = told.recv_timeout(wait::SOON);
        assert_eq!(told.as_deref(), Ok(ends), "the server is told of the end");
        release.send(()).expect("the server waits for it");
    }
}

fn a_refused_upgrade_is_an_ordinary_answer(world: &World) {
    let mut connection = Connection::open(world.http());
    connection.send("GET /other HTTP/1.1\r\nHost: app.test\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n");
    connection.response().expect(200);
    // And the connection is as good as before.
    connection.send("GET /other HTTP/1.1\r\nHost: app.test\r\n\r\n").response().expect(200);
}

fn a_site_ends_each_stream_in_its_time(world: &World) {
    world.get("ends.test", "/silent").expect(504);
    assert_eq!(world.get("ends.test", "/told").expect(200).status, 200);
    // An answer, over both versions.
    let mut endless = Connection::open(world.http());
    endless.send("GET /endless HTTP/1.1\r\nHost: ends.test\r\n\r\n");
    assert!(endless.try_response().is_err());
    let fields =
        [(":method", "GET"), (":scheme", "http"), (":path", "/endless"), (":authority", "ends.test")];
    let answer = http2::ask(world.http(), &fields, None);
    assert!(matches!(answer, Answer::Reset { status: Some(200), .. }), "{answer:?}");
    // A tunnel of which neither side ends.
    let mut tunnel = Connection::open(world.http());
    tunnel.send("GET /upgrade HTTP/1.1\r\nHost: ends.test\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n");
    tunnel.head().expect(101);
    assert_eq!(tunnel.bytes(5), b"ready");
    assert!(tunnel.is_closed());
    // A body that does not come to an end.
    let mut upload = Connection::open(world.http());
    upload.send("POST /told HTTP/1.1\r\nHost: ends.test\r\nContent-Length: 10\r\n\r\nhalf");
    upload.response().expect(408);
    // And what needs no server.
    world.write("alice", "files/a.txt", "alpha");
    assert_eq!(world.get("files.test", "/a.txt").expect(200).text(), "alpha");
}

fn connections_to_a_backend_are_reused(world: &World) {
    let backend = Backend::answering(|peer, _| peer.answer("200 OK", "x"));
    world.import(&[site_at("pooled", "pooled.test", &backend)]);
    let mut connection = Connection::open(world.http());
    for _ in 0..20 {
        connection.send("GET / HTTP/1.1\r\nHost: pooled.test\r\n\r\n").response().expect(200);
    }
    assert_eq!(backend.connections(), 1);
}

fn a_client_that_leaves_frees_the_backend(world: &World) {
    let (tell, told) = std::sync::mpsc::channel();
    let backend = Backend::start(move |peer| {
        peer.head();
        let _ = tell.send("asked");
        peer.wait_for_end();
        let _ = tell.send("left");
    });
    world.import(&[site_at("leaving", "leaving.test", &backend)]);
    let mut connection = Connection::open(world.http());
    connection.send("GET / HTTP/1.1\r\nHost: leaving.test\r\n\r\n");
    assert_eq!(told.recv_timeout(wait::SOON), Ok("asked"));
    drop(connection);
    assert_eq!(told.recv_timeout(wait::SOON), Ok("left"));
}

fn unix_sockets_are_addresses_too(world: &World) {
    use std::io::{Read as _, Write as _};
    let path = world.path("app.sock");
    let listener = std::os::unix::net::UnixListener::bind(&path).expect("our own directory");
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o666))
        .expect("our own socket");
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let mut stream = stream;
            let mut head = [0; 4096];
            let _ = stream.read(&mut head);
            let _ =
                stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\nunix");
        }
    });
    world.import(&[json!({ "name": "unix", "tenant": "alice", "hosts": ["unix.test"],
        "backend": { "kind": "http", "address": format!("unix:{}", path.display()) } })]);
    assert_eq!(world.get("unix.test", "/").expect(200).text(), "unix");
}
