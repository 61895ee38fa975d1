//! Networks of clients: who holds many connections or asks fast shuts out nobody but itself.
//!
//! Each address of 127.0.0.0/8 is a network here. Not here: limits of tenants and sites (`limits`).

use std::net::Ipv4Addr;

use nagaya_tests::backend::Backend;
use nagaya_tests::client::{Connection, Response};
use nagaya_tests::machine;
use nagaya_tests::suite::{Suite, Tests};
use nagaya_tests::wait;
use nagaya_tests::world::{Builder, World};
use serde_json::json;

pub const SUITE: Suite = Suite {
    name: "networks",
    needs_root: false,
    tests: Tests::Alone(nagaya_tests::tests![
        idle_connections_of_one_network_make_room_for_others,
        dripping_uploads_of_one_network_make_room_for_others,
        slow_readers_of_one_network_make_room_for_others,
        a_full_node_says_so_to_the_network_that_fills_it,
        an_idle_http2_connection_says_goodbye_when_it_makes_room,
        a_network_has_as_many_connections_as_it_may,
        a_network_asks_as_fast_as_it_may_by_any_protocol,
        clients_behind_a_trusted_proxy_are_counted_by_themselves,
        a_network_begins_as_many_handshakes_as_it_may,
    ]),
};

const HOARDER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
const STRANGER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 3);

/// Connections that the one thread of a node has places for.
const PLACES: usize = 40;

/// Newcomers that must get in.
const NEWCOMERS: usize = 12;

const GET: &str = "GET /a.txt HTTP/1.1\r\nHost: www.test\r\n\r\n";

fn builder(networks: &str) -> Builder {
    World::builder()
        .set("edge", "threads = 1")
        .set("edge.networks", &format!("exempt = []\n{networks}"))
        .tenant("alice")
        .site_of("alice", "www", json!({ "kind": "static", "root": "www" }))
}

fn small(networks: &str) -> Builder {
    builder(networks).set("edge.limits", &format!("connections = {PLACES}"))
}

fn start(builder: Builder) -> World {
    let world = builder.start();
    world.write("alice", "www/a.txt", "alpha");
    world.write("alice", "www/big.bin", vec![7; 64 << 20]);
    world
}

/// A connection that has sent this.
fn sending(world: &World, from: Ipv4Addr, text: &str) -> Connection {
    let mut connection = Connection::open_from(from, world.http());
    connection.send(text);
    connection
}

fn get(world: &World, from: Ipv4Addr) -> Response {
    sending(world, from, GET).response()
}

/// All places are taken by connections that have sent this; `is_begun` says that the node has seen it.
fn hoard(world: &World, text: &str, is_begun: impl Fn(&mut Connection)) -> Vec<Connection> {
    let mut hoard = Vec::new();
    for _ in 0..PLACES {
        let mut connection = sending(world, HOARDER, text);
        is_begun(&mut connection);
        hoard.push(connection);
    }
    wait::until("all places are taken", || world.metric("nagaya_connections_open", "") >= PLACES as f64);
    hoard
}

/// Newcomers are served, and stay, while others hold all places.
fn newcomers_get_in(world: &World, phase: &str) {
    let mut stayed: Vec<_> = (0..NEWCOMERS).map(|_| sending(world, STRANGER, GET)).collect();
    for newcomer in &mut stayed {
        assert_eq!(newcomer.response().expect(200).text(), "alpha");
    }
    for newcomer in &mut stayed {
        newcomer.send(GET).response().expect(200);
    }
    let phase = format!("phase=\"{phase}\"");
    assert_eq!(world.metric("nagaya_connections_evicted_total", &phase), NEWCOMERS as f64);
    assert_eq!(world.metric("nagaya_connections_evicted_total", ""), NEWCOMERS as f64);
}

fn idle_connections_of_one_network_make_room_for_others() {
    let world = start(small(""));
    let mut hoard = hoard(&world, GET, |connection| drop(connection.response().expect(200)));
    newcomers_get_in(&world, "idle");
    // The longest idle were closed, and the others were not.
    let last = hoard.split_off(NEWCOMERS);
    assert!(hoard.iter_mut().all(Connection::is_closed));
    for mut connection in last {
        connection.send(GET).response().expect(200);
    }
}

fn dripping_uploads_of_one_network_make_room_for_others() {
    let backend = Backend::answering(|peer, _| peer.answer("200 OK", "taken"));
    let address = backend.address.to_string();
    let world = start(small("").site_of("alice", "up", json!({ "kind": "http", "address": address })));
    world.keep(backend);
    let begun = "POST / HTTP/1.1\r\nHost: up.test\r\nContent-Length: 100\r\nExpect: 100-continue\r\n\r\n";
    // That the node asks for the body shows that it waits for it.
    let _hoard = hoard(&world, begun, |connection| {
        connection.head().expect(100);
        connection.send("x");
    });
    newcomers_get_in(&world, "arriving");
}

fn slow_readers_of_one_network_make_room_for_others() {
    let world = start(small("").set("tenants", "max_concurrent = 1000"));
    let begun = "GET /big.bin HTTP/1.1\r\nHost: www.test\r\n\r\n";
    let _hoard = hoard(&world, begun, |connection| drop(connection.head().expect(200)));
    let mut newcomers: Vec<Connection> = Vec::new();
    // One at work ends only for a network that holds far less.
    for last in 10..14 {
        let newcomer = sending(&world, Ipv4Addr::new(127, 0, 0, last), GET);
        newcomers.push(newcomer);
    }
    for newcomer in &mut newcomers {
        newcomer.response().expect(200);
    }
    assert_eq!(world.metric("nagaya_connections_evicted_total", "phase=\"working\""), 4.0);
}

fn a_full_node_says_so_to_the_network_that_fills_it() {
    let world = start(small(""));
    let begun = "GET /big.bin HTTP/1.1\r\nHost: www.test\r\n\r\n";
    let _hoard = hoard(&world, begun, |connection| drop(connection.head().expect(200)));
    let refused = get(&world, HOARDER).expect(503);
    assert_eq!(refused.header("retry-after"), Some("5"));
    assert_eq!(refused.header("connection"), Some("close"));
    assert!(refused.text().contains("NGY0483"), "{refused:?}");
    assert_eq!(world.metric("nagaya_connections_refused_total", ""), 1.0);
    assert_eq!(world.metric("nagaya_client_limits_total", "limit=\"full\""), 1.0);
    assert!(world.log().contains("NGY0483"));
}

fn an_idle_http2_connection_says_goodbye_when_it_makes_room() {
    let world = start(small(""));
    let mut preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    // An empty SETTINGS frame (RFC 9113 section 6.5).
    preface.extend([0, 0, 0, 4, 0, 0, 0, 0, 0]);
    let mut http2 = Connection::open_from(HOARDER, world.http());
    http2.send(&preface);
    // The node's own SETTINGS have come: it serves HTTP/2.
    assert_eq!(http2.bytes(4)[3], 4);
    let _others: Vec<_> = (1..PLACES)
        .map(|_| {
            let mut connection = sending(&world, HOARDER, GET);
            connection.response().expect(200);
            connection
        })
        .collect();
    get(&world, STRANGER).expect(200);
    let rest = http2.until_end();
    // GOAWAY has type 7, length 8 and stream 0.
    assert!(rest.windows(9).any(|frame| frame == [0, 0, 8, 7, 0, 0, 0, 0, 0]), "{rest:?}");
}

fn a_network_has_as_many_connections_as_it_may() {
    let world = start(builder("connections = 3"));
    let mut held: Vec<_> = (0..3).map(|_| sending(&world, HOARDER, GET)).collect();
    for connection in &mut held {
        connection.response().expect(200);
    }
    let refused = get(&world, HOARDER).expect(429);
    assert_eq!(refused.header("retry-after"), Some("5"));
    assert!(refused.text().contains("NGY0480"), "{refused:?}");
    assert!(world.log().contains("NGY0480") && world.log().contains("127.0.0.2/32"));
    get(&world, STRANGER).expect(200);
    // Those who are in are served as before, and a place that is given back is there for the next.
    held[0].send(GET).response().expect(200);
    held.pop();
    wait::until("there is a place again", || get(&world, HOARDER).status == 200);
}

fn a_network_asks_as_fast_as_it_may_by_any_protocol() {
    // So slow that none is earned meanwhile.
    let world = start(builder("requests_per_second = 1\nrequests_burst = 10").set("edge", "h2c = true"));
    // Over HTTP/2, on a connection of its own; the first burst is used up soon.
    let url = format!("http://127.0.0.1:{}/a.txt", world.http().port());
    let http2 = || {
        let from = HOARDER.to_string();
        let words = ["-s", "--http2-prior-knowledge", "--interface", &from, "-H", "Host: www.test"];
        machine::run("curl", &[&words[..], &["-o", "/dev/null", "-w", "%{http_code}", &url]].concat())
    };
    assert_eq!(http2(), "200");
    let mut connection = Connection::open_from(HOARDER, world.http());
    let refused = wait::until_some("the burst is used up", || {
        let answer = connection.send(GET).response();
        (answer.status != 200).then_some(answer)
    });
    let refused = refused.expect(429);
    assert!(refused.text().contains("NGY0481"), "{refused:?}");
    assert!(refused.header("retry-after").is_some_and(|seconds| seconds.parse::<u32>().is_ok()));
    wait::until("HTTP/2 is counted with it", || http2() == "429");
    get(&world, STRANGER).expect(200);
    assert!(world.metric("nagaya_http_refusals_total", "reason=\"network_requests\"") >= 2.0);
    // The connection is good again once the rate allows it.
    wait::until("a request is earned", || connection.send(GET).response().status == 200);
}

fn clients_behind_a_trusted_proxy_are_counted_by_themselves() {
    let limits = "connections = 2\nrequests_per_second = 1\nrequests_burst = 5";
    let world = start(builder(limits).set("edge", "trusted_proxies = [\"127.0.0.2\"]"));
    let asking =
        |client: &str| format!("GET /a.txt HTTP/1.1\r\nHost: www.test\r\nX-Forwarded-For: {client}\r\n\r\n");
    // More connections than one network may have.
    let mut connections: Vec<_> = (0..10).map(|_| Connection::open_from(HOARDER, world.http())).collect();
    for (n, connection) in connections.iter_mut().enumerate() {
        for _ in 0..5 {
            connection.send(asking(&format!("192.0.2.{n}"))).response().expect(200);
        }
    }
    wait::until("one client has asked too fast", || {
        connections[0].send(asking("192.0.2.77")).response().status == 429
    });
    connections[0].send(asking("192.0.2.78")).response().expect(200);
    // A claim of somebody who is not trusted changes nothing.
    let mut liar = Connection::open_from(STRANGER, world.http());
    let mut n = 0;
    wait::until("the liar is counted by its own address", || {
        n += 1;
        liar.send(asking(&format!("198.51.100.{}", n % 250))).response().status == 429
    });
}

fn a_network_begins_as_many_handshakes_as_it_may() {
    let world = start(builder("handshakes_per_second = 1\nhandshakes_burst = 2").tls());
    super::tls::certify(&world, "default", &["www.test"]);
    let port = world.https().port();
    let connect = format!("www.test:{port}:127.0.0.1:{port}");
    let url = format!("https://www.test:{port}/a.txt");
    let shown = |from: Ipv4Addr| {
        let from = from.to_string();
        let words = ["-sk", "--interface", &from, "--connect-to", &connect, &url];
        let output = machine::output("curl", &words);
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    assert_eq!(shown(HOARDER), "alpha");
    wait::until("it has begun too many", || shown(HOARDER).is_empty());
    assert_eq!(shown(STRANGER), "alpha");
    assert!(world.metric("nagaya_client_limits_total", "limit=\"handshakes\"") >= 1.0);
    assert!(world.log().contains("NGY0482"));
}
