//! Clients that take their time, on purpose or not: each is waited for only as long as the limits say.
//!
//! Not here: slow backends (`proxy`).

use std::time::Duration;

use nagaya_tests::backend::Backend;
use nagaya_tests::client::Connection;
use nagaya_tests::suite::{Suite, Tests};
use nagaya_tests::wait;
use nagaya_tests::world::World;
use serde_json::json;

pub const SUITE: Suite = Suite {
    name: "slow_clients",
    needs_root: false,
    tests: Tests::Sharing(
        world,
        nagaya_tests::tests![
            a_head_that_does_not_end_is_408,
            a_head_that_trickles_is_408,
            a_body_that_stops_is_408,
            an_idle_connection_is_closed_without_a_word,
            a_client_that_does_not_read_is_let_go,
            a_body_that_drips_is_408,
            a_body_at_the_least_rate_is_taken,
        ],
    ),
};

fn world() -> World {
    let backend = Backend::answering(|peer, request| peer.answer("200 OK", &request.body.len().to_string()));
    let world = World::builder()
        .set("edge.limits", "head_timeout = \"1s\"\nhead_timeout_max = \"1s\"\nidle_body_timeout = \"2s\"\nkeep_alive_timeout = \"1s\"\n\
             body_timeout = \"1s\"\nbody_min_rate = \"10B\"")
        .tenant("alice")
        .site(json!({ "name": "www", "tenant": "alice", "hosts": ["www.test"],
            "backend": { "kind": "static", "root": "www" } }))
        .site(json!({ "name": "echo", "tenant": "alice", "hosts": ["echo.test"],
            "backend": { "kind": "http", "address": backend.address.to_string() } }))
        .start();
    world.write("alice", "www/a.txt", "alpha");
    world.write("alice", "www/big.bin", vec![7; 64 << 20]);
    world.keep(backend);
    world
}

fn a_head_that_does_not_end_is_408(world: &World) {
    let mut connection = Connection::open(world.http());
    let answer = connection.send("GET / HTTP/1.1\r\nHost: www.test\r\n").response().expect(408);
    assert_eq!(answer.header("connection"), Some("close"));
    assert!(connection.is_closed());
}

fn a_head_that_trickles_is_408(world: &World) {
    let mut connection = Connection::open(world.http());
    connection.send("GET / HTTP/1.1\r\nHost: www.test\r\nX-Slow: ");
    // Steady bytes do not move the limit.
    let mut other_side = connection.clone_stream();
    let sender = std::thread::spawn(move || {
        wait::within(wait::SOON, || std::io::Write::write_all(&mut other_side, b"x").is_err().then_some(()))
    });
    connection.response().expect(408);
    assert!(connection.is_closed());
    drop(connection);
    assert!(sender.join().expect("it only writes").is_some(), "the node still reads");
}

fn a_body_that_stops_is_408(world: &World) {
    let mut connection = Connection::open(world.http());
    connection.send("POST / HTTP/1.1\r\nHost: echo.test\r\nContent-Length: 100\r\n\r\nbegun");
    connection.response().expect(408);
    assert!(connection.is_closed());
}

fn an_idle_connection_is_closed_without_a_word(world: &World) {
    let mut connection = Connection::open(world.http());
    connection.send("GET /a.txt HTTP/1.1\r\nHost: www.test\r\n\r\n").response().expect(200);
    assert!(connection.is_closed());
}

fn a_client_that_does_not_read_is_let_go(world: &World) {
    let mut connection = Connection::open(world.http());
    connection.send("GET /big.bin HTTP/1.1\r\nHost: www.test\r\n\r\n");
    connection.head().expect(200);
    // It has taken the head and nothing more. What says that it was let go is the log of the request.
    wait::until("the request is in the access log", || {
        world.access_log().iter().any(|line| line["target"] == "/big.bin")
    });
    drop(connection);
}

fn a_body_that_drips_is_408(world: &World) {
    let mut connection = Connection::open(world.http());
    connection.send("POST / HTTP/1.1\r\nHost: echo.test\r\nContent-Length: 500\r\n\r\n");
    // Never silent for as long as it may be, and slower than the least rate.
    let answered = wait::within(wait::SOON, || {
        let _ = connection.try_send("x");
        wait::within(Duration::from_millis(200), || connection.is_answered().then_some(()))
    });
    assert!(answered.is_some(), "it goes on for ever");
    let answer = connection.response().expect(408);
    assert_eq!(answer.header("connection"), Some("close"));
    assert!(connection.is_closed());
}

fn a_body_at_the_least_rate_is_taken(world: &World) {
    let mut connection = Connection::open(world.http());
    connection.send("POST / HTTP/1.1\r\nHost: echo.test\r\nContent-Length: 500\r\n\r\n");
    // Longer than any of the limits in sum, and never slower than the least rate.
    let mut sent = 0;
    wait::until("the body is sent", || {
        connection.send("x");
        sent += 1;
        sent == 500
    });
    assert_eq!(connection.response().expect(200).text(), "500");
}
