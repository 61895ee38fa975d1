//! HTTP/1.1 as clients speak it: several requests on a connection, bodies in pieces, and limits.
//!
//! Not here: messages that two parsers could read differently (`smuggling`), clients that stall (`slow_clients`).

use nagaya_tests::backend::Backend;
use nagaya_tests::client::{Connection, Response};
use nagaya_tests::suite::{Suite, Tests};
use nagaya_tests::world::World;
use serde_json::json;

pub const SUITE: Suite = Suite {
    name: "http1",
    needs_root: false,
    tests: Tests::Sharing(
        world,
        nagaya_tests::tests![
            pipelined_requests_are_answered_in_order,
            chunked_bodies_arrive_whole_and_so_do_trailers,
            a_client_that_expects_100_is_told_to_go_on,
            a_refused_upload_is_not_asked_for,
            the_target_decides_over_the_host_field,
            connections_stay_open_as_long_as_both_sides_want,
            a_connection_ends_after_its_number_of_requests,
            oversized_heads_are_refused,
            an_oversized_body_is_refused,
            a_refused_upload_may_be_sent_to_its_end,
            both_address_families_are_served,
        ],
    ),
};

const KEEP_ALIVE_REQUESTS: usize = 6;

fn world() -> World {
    let backend = Backend::answering(|peer, request| {
        let trailer = "X-Sum: 42\r\n";
        match request.target() {
            "/chunked" => peer.send(format!(
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n\
                 5\r\nhello\r\n6;ext=1\r\n world\r\n0\r\n{trailer}\r\n"
            )),
            _ => peer.answer("200 OK", &String::from_utf8_lossy(&request.body)),
        }
    });
    let world = World::builder()
        .set(
            "edge.limits",
            &format!(
                "head_bytes = \"8KiB\"\nheader_fields = 50\nbody_bytes = \"1MiB\"\nkeep_alive_requests = {KEEP_ALIVE_REQUESTS}"
            ),
        )
        .listen("[::1]:0")
        .tenant("alice")
        .site(json!({ "name": "www", "tenant": "alice", "hosts": ["www.test"],
            "backend": { "kind": "static", "root": "www" } }))
        .site(json!({ "name": "echo", "tenant": "alice", "hosts": ["echo.test"],
            "backend": { "kind": "http", "address": backend.address.to_string() } }))
        .start();
    world.write("alice", "www/a.txt", "alpha");
    world.write("alice", "www/b.txt", "beta");
    world.keep(backend);
    world
}

fn open(world: &World) -> Connection {
    Connection::open(world.http())
}

fn pipelined_requests_are_answered_in_order(world: &World) {
    let mut connection = open(world);
    connection.send(
        "GET /a.txt HTTP/1.1\r\nHost: www.test\r\n\r\n\
         POST / HTTP/1.1\r\nHost: echo.test\r\nContent-Length: 4\r\n\r\nbody\
         GET /missing HTTP/1.1\r\nHost: www.test\r\n\r\n\
         POST / HTTP/1.1\r\nHost: echo.test\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n\
         GET /b.txt HTTP/1.1\r\nHost: www.test\r\n\r\n",
    );
    let answers: Vec<_> =
        (0..5).map(|_| connection.response()).map(|answer| (answer.status, answer.text())).collect();
    assert_eq!(answers[0], (200, "alpha".into()));
    assert_eq!(answers[1], (200, "body".into()));
    assert_eq!(answers[2].0, 404);
    assert_eq!(answers[3], (200, "abc".into()));
    assert_eq!(answers[4], (200, "beta".into()));
}

fn chunked_bodies_arrive_whole_and_so_do_trailers(world: &World) {
    let mut connection = open(world);
    connection.send("POST / HTTP/1.1\r\nHost: echo.test\r\nTransfer-Encoding: chunked\r\n\r\n");
    // Cut at every place that a reader could stumble over.
    for piece in ["4", "\r", "\nWi", "ki\r\n5;a=b\r\npedia", "\r\n0\r\n", "X-Trailer: 1\r\n", "\r\n"] {
        connection.send(piece);
    }
    assert_eq!(connection.response().expect(200).text(), "Wikipedia");
    connection.send("GET /chunked HTTP/1.1\r\nHost: echo.test\r\nTE: trailers\r\nConnection: TE\r\n\r\n");
    let answer = connection.response().expect(200);
    assert_eq!(answer.text(), "hello world");
    assert_eq!(answer.trailers, [("x-sum".to_owned(), "42".to_owned())]);
}

fn a_client_that_expects_100_is_told_to_go_on(world: &World) {
    let mut connection = open(world);
    connection
        .send("POST / HTTP/1.1\r\nHost: echo.test\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n");
    connection.head().expect(100);
    assert_eq!(connection.send("body").response().expect(200).text(), "body");
    // Something else expected: nobody can promise that.
    connection.send("GET /a.txt HTTP/1.1\r\nHost: www.test\r\nExpect: a-miracle\r\n\r\n");
    connection.response().expect(417);
}

fn a_refused_upload_is_not_asked_for(world: &World) {
    let mut connection = open(world);
    connection
        .send("POST / HTTP/1.1\r\nHost: nobody.test\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n");
    connection.response().expect(404);
}

fn the_target_decides_over_the_host_field(world: &World) {
    let ask = |line: &str, host: &str| {
        open(world).send(format!("{line} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")).response()
    };
    assert_eq!(ask("GET http://www.test/a.txt", "www.test").expect(200).text(), "alpha");
    // RFC 9112 section 3.2.2: the field is ignored. Refusing the contradiction is as safe.
    let contradiction = ask("GET http://www.test/a.txt", "nobody.test");
    assert!(matches!(contradiction.status, 200 | 400), "{contradiction:?}");
    // No proxy for everybody.
    assert!(ask("CONNECT www.test:443", "www.test:443").status >= 400);
}

fn connections_stay_open_as_long_as_both_sides_want(world: &World) {
    let get = |line: &str| format!("GET /a.txt {line}\r\n\r\n");
    let mut connection = open(world);
    connection.send(get("HTTP/1.1\r\nHost: www.test")).response().expect(200);
    let last = connection.send(get("HTTP/1.1\r\nHost: www.test\r\nConnection: close")).response().expect(200);
    assert_eq!(last.header("connection"), Some("close"));
    assert!(connection.is_closed());
    let mut old = open(world);
    old.send(get("HTTP/1.0\r\nHost: www.test")).response().expect(200);
    assert!(old.is_closed());
    let mut old = open(world);
    let stays = |answer: Response| {
        answer.header("connection").map(str::to_ascii_lowercase) == Some("keep-alive".into())
    };
    assert!(stays(
        old.send(get("HTTP/1.0\r\nHost: www.test\r\nConnection: keep-alive")).response().expect(200)
    ));
    old.send(get("HTTP/1.0\r\nHost: www.test")).response().expect(200);
}

fn a_connection_ends_after_its_number_of_requests(world: &World) {
    let mut connection = open(world);
    for number in 1..=KEEP_ALIVE_REQUESTS {
        let answer = connection.send("GET /a.txt HTTP/1.1\r\nHost: www.test\r\n\r\n").response().expect(200);
        assert_eq!(answer.header("connection") == Some("close"), number == KEEP_ALIVE_REQUESTS, "{number}");
    }
    assert!(connection.is_closed());
}

fn oversized_heads_are_refused(world: &World) {
    let refuse = |request: String| {
        let mut connection = open(world);
        // The node may refuse before all of it is sent.
        let _ = connection.try_send(request);
        let answer = connection.response();
        assert_eq!(answer.header("connection"), Some("close"));
        assert!(connection.is_closed());
        answer.status
    };
    let long = "x".repeat(10_000);
    assert_eq!(refuse(format!("GET /{long} HTTP/1.1\r\nHost: www.test\r\n\r\n")), 414);
    assert_eq!(refuse(format!("GET / HTTP/1.1\r\nHost: www.test\r\nX-Long: {long}\r\n\r\n")), 431);
    let many: String = (0..60).map(|n| format!("X-{n}: 1\r\n")).collect();
    assert_eq!(refuse(format!("GET / HTTP/1.1\r\nHost: www.test\r\n{many}\r\n")), 431);
}

fn an_oversized_body_is_refused(world: &World) {
    let mut connection = open(world);
    connection.send("POST / HTTP/1.1\r\nHost: echo.test\r\nContent-Length: 9999999\r\n\r\n");
    connection.response().expect(413);
    // One that does not say how long it is, is refused when it has become too long.
    let mut connection = open(world);
    connection.send("POST / HTTP/1.1\r\nHost: echo.test\r\nTransfer-Encoding: chunked\r\n\r\n");
    let chunk = format!("{:x}\r\n{}\r\n", 65_536, "x".repeat(65_536));
    while connection.try_send(&chunk).is_ok() {}
    assert!(connection.try_response().map_or(true, |answer| answer.status == 413));
}

fn both_address_families_are_served(world: &World) {
    let answer = nagaya_tests::client::get(world.address("[::1]", false), "www.test", "/a.txt").expect(200);
    assert_eq!(answer.text(), "alpha");
}

fn a_refused_upload_may_be_sent_to_its_end(world: &World) {
    const LEN: usize = 12 << 20;
    let piece = vec![b'x'; 1 << 20];
    for framing in [format!("Content-Length: {LEN}"), "Transfer-Encoding: chunked".to_owned()] {
        let mut connection = open(world);
        connection.send(format!("POST / HTTP/1.1\r\nHost: echo.test\r\n{framing}\r\n\r\n"));
        for _ in 0..LEN / piece.len() {
            if framing.contains("chunked") {
                connection.send(format!("{:x}\r\n", piece.len())).send(&piece).send("\r\n");
            } else {
                connection.send(&piece);
            }
        }
        // Nothing was read until here, and nothing of the answer is lost.
        connection.response().expect(413);
        assert!(connection.next_error().is_none(), "{framing}: it ends by a reset");
    }
}
