//! Clients that take their time with programs: they hold no worker, process, permit or backend connection meanwhile.
//!
//! Not here: clients and files (`slow_clients`), file systems that hang (`hung_files`).

use std::time::Duration;

use nagaya_tests::backend::Backend;
use nagaya_tests::client::{self, Connection};
use nagaya_tests::suite::{Suite, Tests};
use nagaya_tests::wait;
use nagaya_tests::world::World;
use serde_json::json;

pub const SUITE: Suite = Suite {
    name: "slow_programs",
    needs_root: true,
    tests: Tests::Sharing(
        world,
        nagaya_tests::tests![
            drip_uploads_hold_no_worker,
            drip_uploads_reach_no_server,
            slow_readers_of_long_answers_hold_no_worker,
            slow_readers_of_files_hold_no_permit,
            a_large_upload_arrives_whole,
            an_upload_of_unknown_length_has_one_for_its_program,
            an_upload_beyond_the_quota_is_503_with_its_code,
            an_upload_is_asked_for_before_its_worker_is_needed,
            events_reach_their_reader_as_they_come,
            cancelled_streams_end_their_connection,
        ],
    ),
};

/// Longer than what sockets take in by themselves.
const LONG: usize = 24 << 20;

/// The quota of one tenant.
const QUOTA: usize = 120 << 20;

fn world() -> World {
    let backend = Backend::answering(|peer, request| peer.answer("200 OK", &request.body.len().to_string()));
    let world = World::builder()
        .set("tenants", "php_workers = 2\nmax_concurrent = 4")
        .set("edge.limits", "h2_resets = 5")
        .set("edge.spool", &format!("tenant_bytes = \"{QUOTA}B\""))
        .site_of("alice", "php", json!({ "kind": "php", "root": "php" }))
        .site_of("erin", "files", json!({ "kind": "static", "root": "files" }))
        .site_of("frank", "long", json!({ "kind": "php", "root": "php" }))
        .site_of("gina", "events", json!({ "kind": "php", "root": "php" }))
        .site_of("bob", "other", json!({ "kind": "php", "root": "php" }))
        .site_of("carol", "cgi", json!({ "kind": "cgi", "root": "cgi", "linger_seconds": 0 }))
        .site_of("dave", "server", json!({ "kind": "http", "address": backend.address.to_string() }))
        .start();
    for tenant in ["alice", "bob"] {
        world.write(tenant, "php/len.php", "<?php echo strlen(file_get_contents('php://input'));");
    }
    for tenant in ["alice", "frank"] {
        world.write(tenant, "php/pid.php", "<?php echo getmypid();");
    }
    world.write(
        "frank",
        "php/long.php",
        format!("<?php for ($n = 0; $n < {}; $n++) echo str_repeat(chr(97 + $n % 26), 65536);", LONG >> 16),
    );
    world.write(
        "gina",
        "php/events.php",
        "<?php header('Content-Type: text/event-stream'); while (ob_get_level()) ob_end_flush(); echo \"data: 1\\n\\n\"; flush();
         while (!file_exists('go')) { clearstatcache(); usleep(1000); } echo \"data: 2\\n\\n\";",
    );
    world.write("erin", "files/long.bin", vec![7; LONG]);
    world.write("erin", "files/small.txt", "small");
    world.write_program(
        "carol",
        "cgi/len.cgi",
        "#!/bin/sh\nprintf 'Content-Type: text/plain\\r\\n\\r\\n%s ' \"$CONTENT_LENGTH\"\nwc -c\n",
    );
    world.write_program(
        "carol",
        "cgi/sleep.cgi",
        "#!/bin/sh\nprintf 'Content-Type: text/plain\\r\\n\\r\\n'\nexec sleep 60\n",
    );
    world.keep(backend);
    world
}

fn upload(world: &World, host: &str, target: &str) -> Connection {
    let mut connection = Connection::open(world.http());
    connection.send(format!(
        "POST {target} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/octet-stream\r\n\
         Content-Length: 100000\r\n\r\nx"
    ));
    connection
}

/// Requests whose head is read and whose answer is not.
fn readers(world: &World, host: &str, target: &str, count: usize) -> Vec<Connection> {
    let begin = || {
        let mut connection = Connection::open(world.http());
        connection.send(format!("GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n"));
        connection.head().expect(200);
        connection
    };
    (0..count).map(|_| begin()).collect()
}

fn drip_uploads_hold_no_worker(world: &World) {
    // More than there are workers, and more than may run at once.
    let mut drips: Vec<_> = (0..6).map(|_| upload(world, "php.test", "/len.php")).collect();
    for _ in 0..10 {
        world.get("php.test", "/pid.php").expect(200);
        for drip in &mut drips {
            drip.send("x");
        }
    }
    // Each is answered all the same once it is there.
    for mut drip in drips.into_iter().take(2) {
        let answer = drip.send(vec![b'x'; 100_000 - 11]).response().expect(200);
        assert_eq!(answer.text(), "100000");
    }
}

fn drip_uploads_reach_no_server(world: &World) {
    let opened = || world.with_kept(0, Backend::connections);
    let before = opened();
    let drips: Vec<_> = (0..6).map(|_| upload(world, "server.test", "/drip")).collect();
    assert_eq!(client::get(world.http(), "server.test", "/").expect(200).text(), "0");
    assert!(opened() <= before + 1, "a connection for each upload that is not there");
    assert!(!world.with_kept(0, Backend::received).contains("/drip"));
    drop(drips);
}

fn slow_readers_of_long_answers_hold_no_worker(world: &World) {
    let mut readers = readers(world, "long.test", "/long.php", 4);
    for _ in 0..10 {
        world.get("long.test", "/pid.php").expect(200);
    }
    // What the workers said before is not lost.
    let mut reader = readers.pop().expect("there are four");
    let mut rest = Vec::new();
    while !rest.ends_with(b"\r\n0\r\n\r\n") {
        rest.extend(reader.bytes(1));
        let more = rest.len().max(1 << 16);
        if rest.len() + more < LONG {
            rest.extend(reader.bytes(more));
        }
    }
    let letters = rest.iter().filter(|byte| byte.is_ascii_lowercase()).count();
    assert!(letters >= LONG, "{letters} bytes of {LONG}");
}

fn slow_readers_of_files_hold_no_permit(world: &World) {
    // Twice as many as may run at once.
    let _readers = readers(world, "files.test", "/long.bin", 8);
    assert_eq!(world.get("files.test", "/small.txt").expect(200).text(), "small");
}

fn a_large_upload_arrives_whole(world: &World) {
    let body = vec![b'y'; 5 << 20];
    let mut connection = Connection::open(world.http());
    connection.send(format!(
        "POST /len.php HTTP/1.1\r\nHost: other.test\r\nContent-Type: application/octet-stream\r\n\
         Content-Length: {}\r\n\r\n",
        body.len()
    ));
    assert_eq!(connection.send(&body).response().expect(200).text(), body.len().to_string());
}

fn an_upload_of_unknown_length_has_one_for_its_program(world: &World) {
    let mut connection = Connection::open(world.http());
    connection.send(
        "POST /len.cgi HTTP/1.1\r\nHost: cgi.test\r\nTransfer-Encoding: chunked\r\n\r\n\
         5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n",
    );
    assert_eq!(connection.response().expect(200).text().trim(), "11 11");
}

fn an_upload_beyond_the_quota_is_503_with_its_code(world: &World) {
    let mut connection = Connection::open(world.http());
    let length = QUOTA + (4 << 20);
    connection.send(format!(
        "POST /len.php HTTP/1.1\r\nHost: other.test\r\nContent-Type: application/octet-stream\r\n\
         Content-Length: {length}\r\n\r\n"
    ));
    let piece = vec![b'z'; 1 << 20];
    let mut sent = 0;
    while sent < length && !connection.is_answered() && connection.try_send(&piece).is_ok() {
        sent += piece.len();
    }
    let answer = connection.response().expect(503);
    assert!(answer.text().contains("NGY0471"), "{answer:?}");
    assert!(answer.header("retry-after").is_some());
    drop(connection);
    // Its room is free again.
    a_large_upload_arrives_whole(world);
}

fn an_upload_is_asked_for_before_its_worker_is_needed(world: &World) {
    let mut connection = Connection::open(world.http());
    connection.send(
        "POST /len.php HTTP/1.1\r\nHost: other.test\r\nContent-Type: text/plain\r\nContent-Length: 4\r\n\
         Expect: 100-continue\r\n\r\n",
    );
    connection.head().expect(100);
    assert_eq!(connection.send("body").response().expect(200).text(), "4");
}

fn events_reach_their_reader_as_they_come(world: &World) {
    let mut connection = Connection::open(world.http());
    connection.send("GET /events.php HTTP/1.1\r\nHost: events.test\r\n\r\n");
    connection.head().expect(200);
    assert!(String::from_utf8_lossy(&connection.bytes(12)).contains("data: 1"));
    world.write("gina", "php/go", "");
    wait::until("the second event comes", || connection.bytes(1) == b"2");
}

// === HTTP/2, by hand ===

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("a frame is short").to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// A literal header field without indexing, its name in the static table (RFC 7541 section 6.2.2).
fn literal(name: u8, value: &str) -> Vec<u8> {
    let length = u8::try_from(value.len()).expect("a value is short");
    [&[name, length], value.as_bytes()].concat()
}

fn cancelled_streams_end_their_connection(world: &World) {
    let mut connection = Connection::open(world.http());
    connection.send([b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(), frame(4, 0, 0, &[])].concat());
    // `:method: GET`, `:scheme: http`, `:path`, `:authority`.
    let block = [vec![0x82, 0x86], literal(4, "/sleep.cgi"), literal(1, "cgi.test")].concat();
    let spawned = || world.metric("nagaya_cgi_spawned_total", "");
    let mut taken = 0_u32;
    for n in 0..50 {
        let before = spawned();
        if connection.try_send(frame(1, 5, 2 * n + 1, &block)).is_err() {
            break;
        }
        // The program has begun, or the connection is not served any more.
        let begun = wait::within(Duration::from_secs(2), || (spawned() > before).then_some(()));
        if begun.is_none() {
            break;
        }
        taken += 1;
        if connection.try_send(frame(3, 0, 2 * n + 1, &8_u32.to_be_bytes())).is_err() {
            break;
        }
    }
    assert!((5..=8).contains(&taken), "{taken} programs were started and cancelled");
    // The last frame is GOAWAY, ENHANCE_YOUR_CALM.
    let all = connection.until_end();
    assert!(all.windows(17).any(|bytes| bytes[..4] == [0, 0, 8, 7] && bytes[16] == 0xb), "no GOAWAY");
}
