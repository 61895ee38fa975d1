//! Messages that two parsers could read differently. Each is sent to every kind of backend: it must be refused with
//! 400, the connection must end, and nothing of it may reach the backend.
//!
//! The second half are valid messages with a sting: they are served, and the sting stays out. Not here: what
//! *backends* send wrong (`proxy`).

use std::fs;
use std::path::PathBuf;

use nagaya_tests::backend::Backend;
use nagaya_tests::client::{self, Connection};
use nagaya_tests::suite::{Suite, Tests};
use nagaya_tests::wait;
use nagaya_tests::world::World;
use serde_json::json;

pub const SUITE: Suite = Suite {
    name: "smuggling",
    needs_root: false,
    tests: Tests::Sharing(
        world,
        nagaya_tests::tests![
            nothing_ambiguous_reaches_any_backend,
            both_lengths_at_once_are_refused,
            no_second_request_hides_in_a_body,
            a_body_that_a_backend_leaves_unread_poisons_nobody,
            bad_chunks_end_the_connection,
            encoded_line_breaks_make_no_header,
            a_backend_cannot_smuggle_through_its_answer,
            trailers_do_not_become_headers,
        ],
    ),
};

/// Stands in every message, so that it is found wherever something of it arrives.
const MARK: &str = "SMUGGLED";

const HOSTS: [&str; 4] = ["http.test", "cgi.test", "php.test", "app.test"];

/// Logs each request it gets, then answers.
const CGI: &str = "#!/bin/sh\n{ echo \"$REQUEST_METHOD $REQUEST_URI\"; env; cat; } >> requests.log\n\
                   printf 'Content-Type: text/plain\\r\\n\\r\\nok'\n";

const PHP: &str = "<?php file_put_contents(__DIR__ . '/requests.log', $_SERVER['REQUEST_URI'] . print_r($_SERVER, true) \
                   . file_get_contents('php://input'), FILE_APPEND); echo 'ok';\n";

/// A server in a few lines of Perl: one connection after the other, all that was sent goes to the log.
const APP: &str = r#"#!/usr/bin/perl
use strict;
use warnings;
use Socket;
use IO::Socket::UNIX;
$SIG{PIPE} = 'IGNORE';
my $server = IO::Socket::UNIX->new(Type => SOCK_STREAM, Local => $ENV{NAGAYA_SOCKET}, Listen => 64) or die "listen: $!";
while (my $client = $server->accept) {
    # The keeper looks whether somebody listens, and says nothing.
    sysread($client, my $bytes, 65536) or next;
    open(my $log, '>>', 'requests.log') or die "log: $!";
    print $log $bytes;
    close $log;
    print $client "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok";
    close $client;
}
"#;

fn world() -> World {
    let backend = Backend::answering(|peer, _| peer.answer("200 OK", "ok"));
    let site = |name: &str, backend: serde_json::Value| json!({ "name": name, "tenant": "alice", "hosts": [format!("{name}.test")], "backend": backend });
    let world = World::builder()
        .tenant("alice")
        .site(site("http", json!({ "kind": "http", "address": backend.address.to_string() })))
        .site(site("cgi", json!({ "kind": "cgi", "root": "cgi", "front_controller": "index.cgi" })))
        .site(site("php", json!({ "kind": "php", "root": "php", "front_controller": "index.php" })))
        .site(site("app", json!({ "kind": "app", "directory": "app", "command": ["./app.pl"] })))
        .start();
    world.write_program("alice", "cgi/index.cgi", CGI);
    world.write("alice", "php/index.php", PHP);
    world.write_program("alice", "app/app.pl", APP);
    for host in HOSTS {
        assert_eq!(world.get(host, "/any/path").expect(200).text(), "ok", "{host} takes every path");
    }
    assert_eq!(
        asked(&world).matches("REQUEST_URI=/any/path").count(),
        1,
        "the CGI program logs what it is asked"
    );
    assert!(asked(&world).matches("/any/path").count() >= 3, "so do the PHP script and the application");
    world.keep(backend);
    world
}

/// What the programs among the backends were asked so far.
fn asked(world: &World) -> String {
    let logs = ["cgi", "php", "app"].map(|name| world.home("alice").join(name).join("requests.log"));
    logs.iter().map(|log: &PathBuf| fs::read_to_string(log).unwrap_or_default()).collect()
}

/// Heads that must be refused, `H` standing for the Host field.
const AMBIGUOUS: &[(&str, &str)] = &[
    ("no host", "GET /SMUGGLED HTTP/1.1\r\nX: y\r\n\r\n"),
    ("two hosts", "GET /SMUGGLED HTTP/1.1\r\nHOST\r\nHOST\r\n\r\n"),
    ("host with a path", "GET /SMUGGLED HTTP/1.1\r\nHost: http.test/x\r\n\r\n"),
    ("host with userinfo", "GET /SMUGGLED HTTP/1.1\r\nHost: a@http.test\r\n\r\n"),
    ("space before colon", "GET /SMUGGLED HTTP/1.1\r\nHOST\r\nContent-Length : 5\r\n\r\nhello"),
    ("space in a name", "GET /SMUGGLED HTTP/1.1\r\nHOST\r\nX Y: 1\r\n\r\n"),
    ("folded field", "GET /SMUGGLED HTTP/1.1\r\nHOST\r\nX: 1\r\n Transfer-Encoding: chunked\r\n\r\n"),
    ("folded first field", "GET /SMUGGLED HTTP/1.1\r\n X: 1\r\nHOST\r\n\r\n"),
    ("bare line feed", "GET /SMUGGLED HTTP/1.1\nHOST\n\n"),
    ("one bare line feed", "GET /SMUGGLED HTTP/1.1\r\nHOST\nX: 1\r\n\r\n"),
    ("bare carriage return", "GET /SMUGGLED HTTP/1.1\r\nHOST\r\nX: 1\rTransfer-Encoding: chunked\r\n\r\n"),
    ("NUL in a value", "GET /SMUGGLED HTTP/1.1\r\nHOST\r\nX: a\0b\r\n\r\n"),
    ("NUL in a name", "GET /SMUGGLED HTTP/1.1\r\nHOST\r\nX\0: a\r\n\r\n"),
    ("no colon", "GET /SMUGGLED HTTP/1.1\r\nHOST\r\nnonsense\r\n\r\n"),
    ("empty name", "GET /SMUGGLED HTTP/1.1\r\nHOST\r\n: x\r\n\r\n"),
    ("two spaces", "GET  /SMUGGLED HTTP/1.1\r\nHOST\r\n\r\n"),
    ("space in the target", "GET /SMUGGLED /x HTTP/1.1\r\nHOST\r\n\r\n"),
    ("tab in the request line", "GET\t/SMUGGLED\tHTTP/1.1\r\nHOST\r\n\r\n"),
    ("no version", "GET /SMUGGLED\r\nHOST\r\n\r\n"),
    ("version in lower case", "GET /SMUGGLED http/1.1\r\nHOST\r\n\r\n"),
    ("target without a slash", "GET SMUGGLED HTTP/1.1\r\nHOST\r\n\r\n"),
    ("fragment", "GET /SMUGGLED#x HTTP/1.1\r\nHOST\r\n\r\n"),
    (
        "two lengths",
        "POST /SMUGGLED HTTP/1.1\r\nHOST\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    ),
    (
        "the same length twice",
        "POST /SMUGGLED HTTP/1.1\r\nHOST\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    ),
    ("a list of lengths", "POST /SMUGGLED HTTP/1.1\r\nHOST\r\nContent-Length: 5, 5\r\n\r\nhello"),
    ("negative length", "POST /SMUGGLED HTTP/1.1\r\nHOST\r\nContent-Length: -5\r\n\r\nhello"),
    ("length with a plus", "POST /SMUGGLED HTTP/1.1\r\nHOST\r\nContent-Length: +5\r\n\r\nhello"),
    ("length in hex", "POST /SMUGGLED HTTP/1.1\r\nHOST\r\nContent-Length: 0x5\r\n\r\nhello"),
    (
        "length beyond 64 bits",
        "POST /SMUGGLED HTTP/1.1\r\nHOST\r\nContent-Length: 18446744073709551621\r\n\r\nhello",
    ),
    ("empty length", "POST /SMUGGLED HTTP/1.1\r\nHOST\r\nContent-Length:\r\n\r\n"),
    ("TE identity", "POST /SMUGGLED HTTP/1.1\r\nHOST\r\nTransfer-Encoding: identity\r\n\r\n"),
    (
        "TE gzip, chunked",
        "POST /SMUGGLED HTTP/1.1\r\nHOST\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    ),
    (
        "TE chunked, chunked",
        "POST /SMUGGLED HTTP/1.1\r\nHOST\r\nTransfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    ),
    ("TE xchunked", "POST /SMUGGLED HTTP/1.1\r\nHOST\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n"),
    ("TE quoted", "POST /SMUGGLED HTTP/1.1\r\nHOST\r\nTransfer-Encoding: \"chunked\"\r\n\r\n0\r\n\r\n"),
    (
        "TE with vertical tab",
        "POST /SMUGGLED HTTP/1.1\r\nHOST\r\nTransfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    ),
    (
        "TE.TE",
        "POST /SMUGGLED HTTP/1.1\r\nHOST\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n0\r\n\r\n",
    ),
    (
        "TE twice",
        "POST /SMUGGLED HTTP/1.1\r\nHOST\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ),
    ("TE in HTTP/1.0", "POST /SMUGGLED HTTP/1.0\r\nHOST\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    (
        "TE with a space before the colon",
        "POST /SMUGGLED HTTP/1.1\r\nHOST\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    ),
    ("Connection lists no name", "GET /SMUGGLED HTTP/1.1\r\nHOST\r\nConnection: a b\r\n\r\n"),
];

fn nothing_ambiguous_reaches_any_backend(world: &World) {
    for host in HOSTS {
        for (name, template) in AMBIGUOUS {
            // What follows would be the smuggled request.
            let follow = format!("GET /{MARK}-after HTTP/1.1\r\nHost: {host}\r\n\r\n");
            let message = template.replace("HOST", &format!("Host: {host}")) + &follow;
            must_refuse(world, &format!("{host}, {name}"), &message);
        }
    }
    must_have_reached_nobody(world);
}

fn must_refuse(world: &World, name: &str, message: &str) {
    let mut connection = Connection::open(world.http());
    connection.send(message);
    let answer = connection.response();
    assert!(matches!(answer.status, 400 | 505), "{name}: {answer:?}");
    assert_eq!(answer.header("connection"), Some("close"), "{name}");
    assert!(connection.is_closed(), "{name}: the connection goes on");
}

fn must_have_reached_nobody(world: &World) {
    // A request that is served afterwards has passed whatever was on its way before.
    for host in HOSTS {
        world.get(host, "/last");
    }
    assert!(!asked(world).contains(MARK), "{}", asked(world));
    world.with_kept(0, |backend| assert!(!backend.received().contains(MARK), "{}", backend.received()));
}

fn both_lengths_at_once_are_refused(world: &World) {
    for host in HOSTS {
        let cl_te = format!(
            "POST /{MARK} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nG"
        );
        must_refuse(world, &format!("{host}, CL.TE"), &cl_te);
        let te_cl = format!(
            "POST /{MARK} HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n\
             5c\r\nGPOST /{MARK} HTTP/1.1\r\nContent-Length: 15\r\n\r\nx=1\r\n0\r\n\r\n"
        );
        must_refuse(world, &format!("{host}, TE.CL"), &te_cl);
    }
    must_have_reached_nobody(world);
}

fn no_second_request_hides_in_a_body(world: &World) {
    // CL.0: who overlooks the length of a GET or takes the body of an unlikely method for the next request.
    for host in HOSTS {
        for method in ["GET", "POST", "OPTIONS", "DELETE"] {
            let hidden = format!("GET /hidden-in-{host} HTTP/1.1\r\nHost: {host}\r\n\r\n");
            let mut connection = Connection::open(world.http());
            connection.send(format!(
                "{method} /cover HTTP/1.1\r\nHost: {host}\r\nContent-Length: {}\r\n\r\n{hidden}\
                 GET /next HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n",
                hidden.len()
            ));
            // Two answers: to the cover and to the next, and none to what was hidden.
            connection.response();
            if let Ok(second) = connection.try_response() {
                assert_eq!(second.header("connection"), Some("close"), "{method} to {host}: {second:?}");
            }
            assert!(connection.is_closed(), "{method} to {host}: a third answer");
        }
    }
    assert!(!asked(world).contains("GET /hidden-in-cgi.test\n"), "the hidden request became one");
}

fn a_body_that_a_backend_leaves_unread_poisons_nobody(world: &World) {
    // The backend answers at once and would take what follows for a request on the same connection.
    let backend = Backend::start(|peer| {
        while peer.head().is_some() {
            peer.answer("200 OK", "answered without reading");
        }
    });
    world.import(&[json!({ "name": "lazy", "tenant": "alice", "hosts": ["lazy.test"],
        "backend": { "kind": "http", "address": backend.address.to_string() } })]);
    let hidden = "GET /hidden HTTP/1.1\r\nHost: lazy.test\r\n\r\n";
    for _ in 0..10 {
        let mut connection = Connection::open(world.http());
        let length = hidden.len();
        connection
            .send(format!("POST / HTTP/1.1\r\nHost: lazy.test\r\nContent-Length: {length}\r\n\r\n{hidden}"));
        assert_eq!(connection.response().expect(200).text(), "answered without reading");
        let next = connection.send("GET /next HTTP/1.1\r\nHost: lazy.test\r\n\r\n");
        // Its own answer, or a closed connection; never two answers for one request.
        if next.try_response().is_ok() {
            assert!(connection.finish().is_closed(), "an answer to a request that was never made");
        }
    }
}

fn bad_chunks_end_the_connection(world: &World) {
    let backend_asks = |world: &World| asked(world).matches("/bad-chunk").count();
    for body in [
        "5\nhello\n0\n\n",
        "5\r\nhello0\r\n\r\n",
        "5\r\nhelloworld\r\n0\r\n\r\n",
        "0x5\r\nhello\r\n0\r\n\r\n",
        "+5\r\nhello\r\n0\r\n\r\n",
        "-1\r\nhello\r\n0\r\n\r\n",
        " 5\r\nhello\r\n0\r\n\r\n",
        "5 \r\nhello\r\n0\r\n\r\n",
        "fffffffffffffffff\r\nhello\r\n0\r\n\r\n",
        "5;a=\n\r\nhello\r\n0\r\n\r\n",
        "5\r\nhello\r\n0\r\nX : 1\r\n\r\n",
        "5\r\nhello\r\n0\r\nbad\r\n\r\n",
        "\r\n5\r\nhello\r\n0\r\n\r\n",
    ] {
        for host in HOSTS {
            let mut connection = Connection::open(world.http());
            connection.send(format!(
                "POST /bad-chunk HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\n{body}\
                 GET /{MARK} HTTP/1.1\r\nHost: {host}\r\n\r\n"
            ));
            // A program may have answered before the end of its input was seen; then the connection just ends.
            if let Ok(answer) = connection.try_response() {
                assert!(matches!(answer.status, 400 | 200 | 404 | 502), "{host} {body:?}: {answer:?}");
            }
            assert!(connection.is_closed(), "{host} {body:?}: the connection goes on");
        }
    }
    // Never answered as if it were complete by a backend that wants the body first.
    assert!(backend_asks(world) <= 13 * HOSTS.len());
    must_have_reached_nobody(world);
}

fn encoded_line_breaks_make_no_header(world: &World) {
    for host in HOSTS {
        for target in [
            "/%0d%0aX-Injected:%201",
            "/dir%0d%0aX-Injected:%201?q=%0d%0aX-Injected:%201",
            "/%0aX-Injected:1",
        ] {
            let answer = world.get(host, target);
            assert_eq!(answer.header("x-injected"), None, "{host}{target}");
        }
    }
    world.with_kept(0, |backend| {
        assert!(!backend.received().lines().any(|line| line.to_ascii_lowercase().starts_with("x-injected")));
    });
}

fn a_backend_cannot_smuggle_through_its_answer(world: &World) {
    // A second answer behind the first one must not become the answer to somebody else's request.
    let backend = Backend::answering(|peer, request| {
        match request.target() {
        "/two" => peer.send("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nfirstHTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nsecond"),
        _ => peer.answer("200 OK", "mine"),
    }
    });
    world.import(&[json!({ "name": "two", "tenant": "alice", "hosts": ["two.test"],
        "backend": { "kind": "http", "address": backend.address.to_string() } })]);
    let mut connection = Connection::open(world.http());
    for _ in 0..10 {
        connection.send("GET /two HTTP/1.1\r\nHost: two.test\r\n\r\n");
        assert_eq!(connection.response().expect(200).text(), "first");
        connection.send("GET /mine HTTP/1.1\r\nHost: two.test\r\n\r\n");
        let next = connection.response();
        assert!(next.status == 502 || next.text() == "mine", "{next:?}");
    }
}

fn trailers_do_not_become_headers(world: &World) {
    for host in HOSTS {
        let mut connection = Connection::open(world.http());
        connection.send(format!(
            "POST /trailers HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\n\
             2\r\nok\r\n0\r\nX-{MARK}: 1\r\nContent-Length: 100\r\nHost: other.test\r\n\r\n"
        ));
        // Refusing fields that no trailer may have is as good as dropping them.
        let status = connection.response().status;
        assert!(matches!(status, 200 | 400 | 404), "{host}: {status}");
    }
    wait::until("nothing is on its way", || client::get(world.http(), "http.test", "/").status == 200);
    assert!(!asked(world).contains(&format!("HTTP_X_{MARK}")), "a trailer became a variable");
}
