//! How messages are read that others would spell differently: the same over both versions of HTTP, and of every kind of backend.
//!
//! Not here: messages that two parsers could read differently (`smuggling`), faults of a backend that has no answer (`proxy`).

use std::path::PathBuf;

use nagaya_tests::backend::{Backend, Peer, Request};
use nagaya_tests::client::Connection;
use nagaya_tests::http2::{self, Answer};
use nagaya_tests::suite::{Suite, Tests};
use nagaya_tests::world::World;
use nagaya_tests::{machine, wait};
use serde_json::json;

pub const SUITE: Suite = Suite {
    name: "http_readings",
    needs_root: true,
    tests: Tests::Sharing(
        world,
        nagaya_tests::tests![
            sloppy_answers_with_one_reading_are_passed_on,
            answers_with_two_readings_are_502_with_their_reason,
            a_fault_in_a_body_leaves_its_reason,
            a_transfer_encoding_of_a_program_is_dropped,
            targets_are_read_alike_over_both_versions,
            paths_without_a_file_reach_every_program,
            a_host_is_named_alike_over_both_versions,
            crumbs_of_a_cookie_are_one_field,
            trailers_that_must_not_be_there_are_dropped,
            loose_requests_with_one_reading_are_answered,
            interim_answers_reach_the_client,
            interim_answers_without_end_are_502,
            a_client_that_has_finished_sending_is_answered,
            a_short_answer_arrives_as_far_as_it_goes,
        ],
    ),
};

const VERSIONS: [&str; 2] = ["--http1.1", "--http2-prior-knowledge"];

/// An answer and how it is read.
struct Case {
    name: &'static str,
    wire: &'static str,
    read: Reading,
}

enum Reading {
    /// 200 with the body `ok`.
    Ok,
    /// 502, and this in log and `explain`.
    Refused(&'static str),
    /// The head has gone out: the body breaks off, and this is in log and `explain`.
    Broken(&'static str),
}

macro_rules! hint {
    () => {
        "HTTP/1.1 103 Early Hints\r\nLink: </s.css>; rel=preload\r\nNagaya-Receipt: forged\r\nConnection: X-Hop\r\nX-Hop: 1\r\n\r\n"
    };
}

const CASES: &[Case] = &[
    ok("hint", concat!(hint!(), "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")),
    ok(
        "hints",
        concat!(
            "HTTP/1.1 102 Processing\r\n\r\n",
            hint!(),
            hint!(),
            hint!(),
            hint!(),
            hint!(),
            hint!(),
            hint!(),
            hint!(),
            hint!(),
            hint!(),
            hint!(),
            hint!(),
            "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
        ),
    ),
    ok("continue", "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"),
    ok("lengths-agree", "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX: y\r\nContent-Length: 2\r\n\r\nok"),
    ok("length-list", "HTTP/1.1 200 OK\r\nContent-Length: 2, 2\r\n\r\nok"),
    ok("line-feeds", "HTTP/1.1 200 OK\nX: y\nContent-Length: 2\n\nok"),
    ok("line-feeds-mixed", "HTTP/1.1 200 OK\r\nContent-Length: 2\nX: y\r\n\nok"),
    ok("line-feeds-chunked", "HTTP/1.1 200 OK\nTransfer-Encoding: chunked\n\n2\nok\n0\n\n"),
    ok(
        "chunked-in-1.0",
        "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n",
    ),
    ok("padded-size", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2   \r\nok\r\n0\t\r\n\r\n"),
    ok(
        "zeros",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n000000000000000000002\r\nok\r\n00\r\n\r\n",
    ),
    ok("extension", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2 ; a=\"b\"\r\nok\r\n0\r\n\r\n"),
    ok(
        "trailers",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nSet-Cookie: a=b\r\nContent-Length: 9\r\n\r\n",
    ),
    ok(
        "no-trailers",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nno field\r\n\r\n",
    ),
    ok("no-last-line", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n"),
    ok("coding-list", "HTTP/1.1 200 OK\r\nTransfer-Encoding: ,chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"),
    ok("identity", "HTTP/1.1 200 OK\r\nTransfer-Encoding: identity\r\n\r\nok"),
    ok("connection-token", "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close;q=1, \"x\"\r\n\r\nok"),
    ok("folded", "HTTP/1.1 200 OK\r\nX: y\r\n  z\r\nContent-Length: 2\r\n\r\nok"),
    ok("blank-before-colon", "HTTP/1.1 200 OK\r\nContent-Length : 2\r\n\r\nok"),
    ok("blanks-in-status", "HTTP/1.1  200  OK\r\nContent-Length: 2\r\n\r\nok"),
    ok("no-reason", "HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nok"),
    ok("minor-version", "HTTP/1.3 200 OK\r\nContent-Length: 2\r\n\r\nok"),
    ok("fields-of-requests", "HTTP/1.1 200 OK\r\nHost: a\r\nHost: b\r\nContent-Length: 2\r\n\r\nok"),
    refused(
        "lengths-differ",
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok",
        "two values",
    ),
    refused(
        "length-and-chunked",
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        "both Content-Length and Transfer-Encoding",
    ),
    refused(
        "coding-twice",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked, chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        "a Transfer-Encoding other than",
    ),
    refused(
        "carriage-return",
        "HTTP/1.1 200 OK\r\nX: y\rContent-Length: 2\r\n\r\nok",
        "a bare carriage return",
    ),
    refused("no-field", "HTTP/1.1 200 OK\r\nContent-Length 2\r\n\r\nok", "a line that is no field"),
    refused(
        "size-of-two-numbers",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2 2\r\nok\r\n0\r\n\r\n",
        "behind the size",
    ),
    broken(
        "data-too-long",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok!\r\n0\r\n\r\n",
        "a chunk is longer than its size says",
    ),
    broken("cut-off", "HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\nok", "it closed before the end"),
    broken(
        "cut-off-chunked",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n",
        "it closed before the end",
    ),
];

const fn ok(name: &'static str, wire: &'static str) -> Case {
    Case { name, wire, read: Reading::Ok }
}

const fn refused(name: &'static str, wire: &'static str, reason: &'static str) -> Case {
    Case { name, wire, read: Reading::Refused(reason) }
}

const fn broken(name: &'static str, wire: &'static str, reason: &'static str) -> Case {
    Case { name, wire, read: Reading::Broken(reason) }
}

/// Answers as the file that the target names says, and ends the connection.
const APP: &str = r#"#!/usr/bin/python3
import os, socket
server = socket.socket(socket.AF_UNIX)
server.bind(os.environ["NAGAYA_SOCKET"])
server.listen(64)
while True:
    client, _ = server.accept()
    read = b""
    while b"\r\n\r\n" not in read:
        more = client.recv(65536)
        if not more:
            break
        read += more
    if read:
        name = read.split(b" ")[1].decode().strip("/").split("?")[0]
        path = "cases/" + name
        target = read.split(b" ")[1]
        if name.startswith("told"):
            data = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(target), target)
        else:
          data = open(path, "rb").read() if name and os.path.exists(path) else b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
        client.sendall(data)
    client.close()
"#;

const FPM: &str = "[global]\nerror_log = /dev/null\n[site]\nlisten = ${NAGAYA_SOCKET}\npm = static\n\
                   pm.max_children = 1\nclear_env = no\n";

const ECHO: &str = "<?php echo file_get_contents('php://input');";

fn php_fpm() -> Option<PathBuf> {
    let names = std::fs::read_dir("/usr/sbin").ok()?;
    let found = names.flatten().find(|entry| entry.file_name().to_string_lossy().starts_with("php-fpm"));
    found.map(|entry| entry.path())
}

fn world() -> World {
    let backend = Backend::answering(answer);
    let address = backend.address.to_string();
    let mut builder = World::builder();
    let home = builder.path("home/alice");
    builder = builder
        .site_of("alice", "http", json!({ "kind": "http", "address": address, "timeout_seconds": 5 }))
        .site_of("alice", "app", json!({ "kind": "app", "directory": "app", "command": ["./app.py"] }))
        .site_of("alice", "cgi", json!({ "kind": "cgi", "root": "cgi" }))
        .site_of("alice", "php", json!({ "kind": "php", "root": "php" }))
        .site_of(
            "alice",
            "front-cgi",
            json!({ "kind": "cgi", "root": "cgi", "front_controller": "front.cgi" }),
        )
        .site_of(
            "alice",
            "front-php",
            json!({ "kind": "php", "root": "php", "front_controller": "front.php" }),
        )
        .site_of("alice", "www", json!({ "kind": "static", "root": "www" }));
    if let Some(fpm) = php_fpm() {
        let command = [
            fpm,
            "--nodaemonize".into(),
            "--force-stderr".into(),
            "--fpm-config".into(),
            home.join("fpm/fpm.conf"),
        ];
        let mut backend = json!({ "kind": "app", "directory": "fpm", "protocol": "fastcgi", "command": command,
            "files": { "root": "fpm/php" } });
        builder = builder.site_of("alice", "fastcgi", backend.clone());
        backend["files"]["front_controller"] = "front.php".into();
        builder = builder.site_of("alice", "front-fastcgi", backend);
    }
    let world = builder.start();
    world.write_program("alice", "app/app.py", APP);
    for case in CASES {
        world.write("alice", &format!("app/cases/{}", case.name), case.wire);
    }
    world.write("alice", "fpm/fpm.conf", FPM);
    world.write("alice", "www/a.txt", "alpha");
    world.write("alice", "www/dir/index.html", "index");
    world.write("alice", "www/big.bin", vec![b'b'; SHORT_LEN]);
    world.write("alice", "php/a.txt", "alpha");
    for (file, coding) in [("chunked", "chunked"), ("gzip", "gzip")] {
        let php = format!("<?php header('Transfer-Encoding: {coding}'); echo 'plain';");
        world.write("alice", &format!("php/{file}.php"), &php);
        world.write("alice", &format!("fpm/php/{file}.php"), &php);
        let cgi = format!(
            "#!/bin/sh\nprintf 'Content-Type: text/plain\\r\\nTransfer-Encoding: {coding}\\r\\n\\r\\nplain'\n"
        );
        world.write_program("alice", &format!("cgi/{file}.cgi"), &cgi);
    }
    write_front_controllers(&world);
    world.write("alice", "php/echo.php", ECHO);
    world.write("alice", "fpm/php/echo.php", ECHO);
    world.write_program(
        "alice",
        "cgi/echo.cgi",
        "#!/bin/sh\nprintf 'Content-Type: text/plain\\r\\n\\r\\n'\ncat\n",
    );
    world.give("alice");
    world.keep(backend);
    world
}

/// Each tells the path that it was asked for.
fn write_front_controllers(world: &World) {
    for root in ["php", "fpm/php"] {
        world.write("alice", &format!("{root}/front.php"), "<?php echo $_SERVER['REQUEST_URI'];");
        world.write("alice", &format!("{root}/.hidden"), "nobody may know of it");
    }
    world.write_program(
        "alice",
        "cgi/front.cgi",
        "#!/bin/sh\nprintf 'Content-Type: text/plain\\r\\n\\r\\n%s' \"$REQUEST_URI\"\n",
    );
}

/// More than the sockets and the memory of the edge hold.
const SHORT_LEN: usize = 6 << 20;

/// Answers as the case that the target names says, and ends the connection.
fn answer(peer: &mut Peer, request: &Request) -> bool {
    let name = request.target().trim_start_matches('/').split('?').next().unwrap_or_default();
    if name.starts_with("told") {
        let cookie = request.field("cookie").unwrap_or_default();
        return peer.answer("200 OK", &format!("{} {cookie}", request.target()));
    }
    if name == "hints-without-end" {
        return (0..2000).all(|_| peer.send(hint!()));
    }
    if name == "short" {
        peer.send(format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", 2 * SHORT_LEN));
        peer.send(vec![b's'; SHORT_LEN]);
        return false;
    }
    if name == "short-chunked" {
        peer.send(format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{SHORT_LEN:x}\r\n"));
        peer.send(vec![b's'; SHORT_LEN]);
        peer.send("\r\n");
        return false;
    }
    match CASES.iter().find(|case| case.name == name) {
        Some(case) => {
            peer.send(case.wire);
            false
        }
        None => peer.answer("200 OK", &String::from_utf8_lossy(&request.body)),
    }
}

/// Asks by curl: whether the answer was whole, its status, request id and body.
#[track_caller]
fn ask(world: &World, version: &str, host: &str, target: &str, more: &[&str]) -> (bool, u16, String) {
    let connect = format!("{host}:80:{}", world.http());
    let url = format!("http://{host}{target}");
    let mut arguments =
        vec!["-sS", "--path-as-is", version, "--connect-to", &connect, "-w", "\n%{http_code}"];
    arguments.extend(more);
    arguments.push(&url);
    let output = machine::output("curl", &arguments);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let (body, status) = text.rsplit_once('\n').expect("curl writes the status last");
    (output.status.success(), status.trim().parse().expect("a status"), body.to_owned())
}

/// Each kind of server over each version of HTTP.
fn each_server(check: impl Fn(&str, &str, &str)) {
    for host in ["http.test", "app.test"] {
        for version in VERSIONS {
            check(host, version, &format!("{host} {version}"));
        }
    }
}

fn sloppy_answers_with_one_reading_are_passed_on(world: &World) {
    each_server(|host, version, place| {
        for case in CASES.iter().filter(|case| matches!(case.read, Reading::Ok)) {
            let answer = ask(world, version, host, &format!("/{}", case.name), &[]);
            assert_eq!(answer, (true, 200, "ok".into()), "{place} {}", case.name);
        }
    });
}

/// What log and `explain` say of the last request for this target.
#[track_caller]
fn reason(world: &World, host: &str, target: &str) -> String {
    let mut found = None;
    wait::until("the access log has the request", || {
        found = world.access_log().into_iter().rfind(|line| line["host"] == host && line["target"] == target);
        found.is_some()
    });
    let id = found.and_then(|line| line["id"].as_str().map(str::to_owned)).expect("a request has an id");
    let log: Vec<_> = world.log().lines().filter(|line| line.contains(&id)).map(str::to_owned).collect();
    format!("{}\nexplain: {}", log.join("\n"), world.cli(&["explain", &id]))
}

#[track_caller]
fn assert_reason(world: &World, host: &str, target: &str, reason: &str, place: &str) {
    let told = self::reason(world, host, target);
    let (log, explained) = told.split_once("explain: ").expect("both are there");
    assert!(log.contains(reason), "{place}: the log does not say '{reason}': {told}");
    assert!(explained.contains(reason), "{place}: explain does not say '{reason}': {told}");
}

fn answers_with_two_readings_are_502_with_their_reason(world: &World) {
    each_server(|host, version, place| {
        for case in CASES {
            let Reading::Refused(reason) = case.read else { continue };
            let target = format!("/{}?{}", case.name, &version[2..7]);
            let (is_whole, status, _) = ask(world, version, host, &target, &[]);
            assert_eq!((is_whole, status), (true, 502), "{place} {}", case.name);
            assert_reason(world, host, &target, reason, &format!("{place} {}", case.name));
        }
    });
}

fn a_fault_in_a_body_leaves_its_reason(world: &World) {
    each_server(|host, version, place| {
        for case in CASES {
            let Reading::Broken(reason) = case.read else { continue };
            let target = format!("/{}?{}", case.name, &version[2..7]);
            if version == "--http1.1" {
                let (is_whole, status, _) = ask(world, version, host, &target, &[]);
                assert_eq!((is_whole, status), (false, 200), "{place} {}", case.name);
            } else {
                // curl forgets a head that comes together with a reset.
                let fields =
                    [(":method", "GET"), (":scheme", "http"), (":path", &*target), (":authority", host)];
                let answer = http2::ask(world.http(), &fields, None);
                assert_eq!(answer, Answer::Reset { status: Some(200), code: 2 }, "{place} {}", case.name);
            }
            assert_reason(world, host, &target, reason, &format!("{place} {}", case.name));
        }
    });
}

fn a_transfer_encoding_of_a_program_is_dropped(world: &World) {
    let mut programs = vec![("cgi.test", "cgi"), ("php.test", "php")];
    programs.extend(php_fpm().map(|_| ("fastcgi.test", "php")));
    for (host, ending) in programs {
        for (version, file) in VERSIONS.iter().flat_map(|version| [(version, "chunked"), (version, "gzip")]) {
            let answer = ask(world, version, host, &format!("/{file}.{ending}"), &[]);
            assert_eq!(answer, (true, 200, "plain".into()), "{host} {version} {file}");
        }
    }
}

/// Hosts of all kinds of backend that are here.
fn hosts() -> Vec<&'static str> {
    let mut hosts = vec!["www.test", "http.test", "app.test", "cgi.test", "php.test"];
    hosts.extend(php_fpm().map(|_| "fastcgi.test"));
    hosts
}

/// The status and body over HTTP/1.1, and what became of the same over HTTP/2.
#[track_caller]
fn both(world: &World, host: &str, target: &str) -> ((u16, String), Answer) {
    let mut connection = Connection::open(world.http());
    connection.send(format!("GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n"));
    let first = connection.response();
    let fields = [(":method", "GET"), (":scheme", "http"), (":path", target), (":authority", host)];
    ((first.status, first.text()), http2::ask(world.http(), &fields, None))
}

fn targets_are_read_alike_over_both_versions(world: &World) {
    for (target, expected) in [
        ("/told?q=\"a\"", 200),
        ("/told?q=<b>", 200),
        ("/told<1>", 200),
        ("/told`x`\"y\"", 200),
        ("/told^|{}[]\\'", 200),
        ("/told?^`|{}[]\\'", 200),
        ("/told/\u{65e5}", 400),
        ("/told?\u{e9}", 400),
        ("/told#part", 400),
        ("/told?a#part", 400),
        ("/told\u{7f}", 400),
        ("told", 400),
        ("?told", 400),
        ("*", 400),
    ] {
        for host in hosts() {
            let (first, second) = both(world, host, target);
            assert_eq!(second.status(), Some(first.0), "{host} {target}: {first:?} {second:?}");
            match host {
                "http.test" => assert_eq!(first.0, expected, "{target}: {first:?}"),
                "app.test" => assert_eq!(first.0, expected, "{target}: {first:?}"),
                // A file that is not there.
                _ => assert!(
                    first.0 == 400 || (expected == 200 && first.0 == 404),
                    "{host} {target}: {first:?}"
                ),
            }
            if host == "http.test" && expected == 200 {
                let Answer::Response { body, .. } = second else { panic!("{second:?}") };
                assert_eq!((first.1.trim(), String::from_utf8_lossy(&body).trim()), (target, target));
            }
        }
    }
}

/// As `try_files $uri /front.php` of nginx and `FallbackResource` of Apache have it.
fn paths_without_a_file_reach_every_program(world: &World) {
    let mut hosts = vec!["http.test", "app.test", "front-cgi.test", "front-php.test"];
    hosts.extend(php_fpm().map(|_| "front-fastcgi.test"));
    let long = format!("/told/{}", "x/".repeat(2000));
    for (target, told) in [
        ("/told/a%2Fb", Some("/told/a%2Fb")),
        ("/told/a%2fb?q=%2F%FF", Some("/told/a%2fb?q=%2F%FF")),
        ("/told/caf%E9", Some("/told/caf%E9")),
        ("/told/%FF%fe/", Some("/told/%FF%fe/")),
        ("/told/%C3%A9", Some("/told/%C3%A9")),
        ("/told/a%5Cb", Some("/told/a%5Cb")),
        ("/told/a\\b", Some("/told/a\\b")),
        ("/told/a%0D%0Ab", Some("/told/a%0D%0Ab")),
        ("/told//a", Some("/told//a")),
        ("/told/.env", Some("/told/.env")),
        ("/told/a/../b", Some("/told/b")),
        (&long, Some(&long)),
        // Nobody knows how others would read these.
        ("/told/a%00b", None),
        ("/told/..%2Fb", None),
        ("/told/..%5Cb", None),
        ("/told/%zz", None),
        ("/../told", None),
    ] {
        for host in &hosts {
            let (first, second) = both(world, host, target);
            let Answer::Response { status, body, .. } = second else { panic!("{host} {target}: {second:?}") };
            assert_eq!(first.0, status, "{host} {target}");
            assert_eq!(status, if told.is_some() { 200 } else { 400 }, "{host} {target}: {first:?}");
            if let Some(told) = told {
                assert_eq!((first.1.trim(), String::from_utf8_lossy(&body).trim()), (told, told), "{host}");
            }
        }
    }
    for host in &hosts[2..] {
        let (hidden, _) = both(world, host, "/.hidden");
        assert_eq!(hidden, (200, "/.hidden".into()), "{host}");
    }
}

fn a_host_is_named_alike_over_both_versions(world: &World) {
    for host in hosts() {
        let with_port = format!("{host}:80");
        for (authority, field, expected) in [
            (Some(host), None, None),
            (None, Some(host), None),
            (Some(host), Some(host), None),
            (Some(host), Some(&*with_port), None),
            (Some(&*with_port), Some(host), None),
            (Some(host), Some("other.test"), Some(400)),
            (None, None, Some(400)),
            (Some("u@www.test"), None, Some(400)),
            (Some("a\"b"), None, Some(400)),
        ] {
            let target = authority.map_or("/told".into(), |authority| format!("http://{authority}/told"));
            let fields = field.or(authority).map_or(String::new(), |host| format!("Host: {host}\r\n"));
            let mut connection = Connection::open(world.http());
            connection.send(format!("GET {target} HTTP/1.1\r\n{fields}\r\n"));
            let first = connection.response().status;
            let mut fields = vec![(":method", "GET"), (":scheme", "http"), (":path", "/told")];
            fields.extend(authority.map(|authority| (":authority", authority)));
            fields.extend(field.map(|field| ("host", field)));
            let second = http2::ask(world.http(), &fields, None);
            let expected =
                expected.unwrap_or(if matches!(host, "http.test" | "app.test") { 200 } else { 404 });
            assert_eq!(
                (first, second.status()),
                (expected, Some(expected)),
                "{authority:?} {field:?}: {second:?}"
            );
        }
    }
}

fn crumbs_of_a_cookie_are_one_field(world: &World) {
    let crumbs: Vec<_> = (0..150).map(|number| format!("c{number}=v")).collect();
    for host in hosts() {
        let mut fields =
            vec![(":method", "GET"), (":scheme", "http"), (":path", "/told"), (":authority", host)];
        fields.extend(crumbs.iter().map(|crumb| ("cookie", crumb.as_str())));
        let answer = http2::ask(world.http(), &fields, None);
        let Answer::Response { status, body, .. } = answer else { panic!("{host}: {answer:?}") };
        let expected = if matches!(host, "http.test" | "app.test") { 200 } else { 404 };
        assert_eq!(status, expected, "{host}");
        if host == "http.test" {
            assert_eq!(String::from_utf8_lossy(&body), format!("/told {}", crumbs.join("; ")));
        }
    }
}

fn trailers_that_must_not_be_there_are_dropped(world: &World) {
    let trailers =
        [("content-type", "text/x"), ("content-length", "9"), ("host", "other.test"), ("x-sum", "1")];
    let lines: String = trailers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    for (host, target) in [
        ("http.test", "/"),
        ("cgi.test", "/echo.cgi"),
        ("php.test", "/echo.php"),
        ("fastcgi.test", "/echo.php"),
    ] {
        if !hosts().contains(&host) {
            continue;
        }
        let mut connection = Connection::open(world.http());
        connection.send(format!(
            "POST {target} HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n{lines}\r\n"
        ));
        assert_eq!(connection.response().expect(200).text(), "hello", "{host}");
        // The next request begins where the trailers end.
        connection.send("GET /missing HTTP/1.1\r\nHost: www.test\r\n\r\n").response().expect(404);
        let fields = [(":method", "POST"), (":scheme", "http"), (":path", target), (":authority", host)];
        let answer = http2::ask(world.http(), &fields, Some((b"hello", &trailers)));
        assert_eq!(
            answer,
            Answer::Response { status: 200, interim: vec![], body: b"hello".into() },
            "{host}"
        );
    }
}

fn loose_requests_with_one_reading_are_answered(world: &World) {
    let chunked = "POST / HTTP/1.1\r\nHost: http.test\r\nTransfer-Encoding: chunked\r\n\r\n";
    for (request, status, body) in [
        ("GET /a.txt HTTP/1.2\r\nHost: www.test\r\n\r\n".to_owned(), 200, Some("alpha")),
        ("GET http://www.test/a.txt HTTP/1.1\r\nHost: www.test:80\r\n\r\n".into(), 200, Some("alpha")),
        ("GET http://www.test:80/a.txt HTTP/1.1\r\nHost: www.test\r\n\r\n".into(), 200, Some("alpha")),
        (format!("{chunked}5 ; a=b\r\nhello\r\n0\t;c\r\n\r\n"), 200, Some("hello")),
        // What two readers take in two ways.
        ("GET http://www.test:81/a.txt HTTP/1.1\r\nHost: www.test:80\r\n\r\n".into(), 400, None),
        ("GET /a.txt HTTP/2.0\r\nHost: www.test\r\n\r\n".into(), 505, None),
        (format!("{chunked}5 \r\nhello\r\n0\r\n\r\n"), 400, None),
        (format!("{chunked}5\nhello\r\n0\r\n\r\n"), 400, None),
        ("GET /a.txt HTTP/1.1\nHost: www.test\n\n".into(), 400, None),
        (
            "POST / HTTP/1.1\r\nHost: http.test\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nhello"
                .into(),
            400,
            None,
        ),
    ] {
        let answer = Connection::open(world.http()).send(&request).response();
        assert_eq!(answer.status, status, "{request:?}: {answer:?}");
        if let Some(body) = body {
            assert_eq!(answer.text(), body, "{request:?}");
        }
    }
}

/// Heads of answers as curl shows them, and the body.
#[track_caller]
fn heads(world: &World, version: &str, host: &str, target: &str, more: &[&str]) -> Vec<String> {
    let more = [&["-D", "-"], more].concat();
    let (is_whole, status, text) = ask(world, version, host, target, &more);
    assert!(is_whole && status == 200, "{host} {version} {target}: {text}");
    text.split("\r\n\r\n").map(str::to_ascii_lowercase).collect()
}

fn interim_answers_reach_the_client(world: &World) {
    each_server(|host, version, place| {
        for (target, statuses) in [
            ("/hint", vec!["103"]),
            ("/hints", [vec!["102"], vec!["103"; 12]].concat()),
            ("/continue", vec![]),
        ] {
            let heads = heads(world, version, host, target, &[]);
            let rest = &heads[statuses.len()..];
            let interim = &heads[..statuses.len()];
            for (head, status) in interim.iter().zip(&statuses) {
                assert_eq!(head.split(' ').nth(1), Some(*status), "{place} {target}: {heads:?}");
                assert_eq!(
                    head.contains("link: </s.css>; rel=preload"),
                    *status == "103",
                    "{place} {heads:?}"
                );
                assert!(!head.contains("forged") && !head.contains("x-hop"), "{place}: {heads:?}");
            }
            assert_eq!(rest[0].split(' ').nth(1), Some("200"), "{place} {target}: {heads:?}");
            assert_eq!(rest[1], "ok", "{place} {target}");
        }
        // Who asked to be told to go on is told so once, whoever says it first.
        let heads = heads(world, version, host, "/continue", &["-H", "Expect: 100-continue", "-d", "body"]);
        let told = heads.iter().filter(|head| head.split(' ').nth(1) == Some("100")).count();
        assert!(told <= 1 && (told == 1 || version != "--http1.1"), "{place}: {heads:?}");
    });
    // HTTP/1.0 has none.
    let mut old = Connection::open(world.http());
    assert_eq!(
        old.send("GET /hints HTTP/1.0\r\nHost: http.test\r\n\r\n").response().expect(200).text(),
        "ok"
    );
}

fn interim_answers_without_end_are_502(world: &World) {
    for version in VERSIONS {
        let target = format!("/hints-without-end?{}", &version[2..7]);
        let (is_whole, status, _) = ask(world, version, "http.test", &target, &[]);
        assert_eq!((is_whole, status), (true, 502), "{version}");
        assert_reason(world, "http.test", &target, "it sends interim answers without end", version);
    }
}

fn a_client_that_has_finished_sending_is_answered(world: &World) {
    for (host, target, status, len) in [
        ("www.test", "/a.txt", 200, Some(5)),
        ("www.test", "/big.bin", 200, Some(SHORT_LEN)),
        ("www.test", "/dir", 301, None),
        ("www.test", "/missing", 404, None),
        ("www.test", "/../x", 400, None),
        ("php.test", "/a.txt", 200, Some(5)),
        ("php.test", "/missing", 404, None),
        ("cgi.test", "/missing", 404, None),
        ("nobody.test", "/", 404, None),
    ] {
        for version in ["1.0", "1.1"] {
            let mut connection = Connection::open(world.http());
            connection.send(format!("GET {target} HTTP/{version}\r\nHost: {host}\r\n\r\n")).finish();
            let answer = connection.response();
            assert_eq!(answer.status, status, "{host}{target} HTTP/{version}: {answer:?}");
            assert!(
                len.is_none_or(|len| answer.body.len() == len),
                "{host}{target} HTTP/{version}: {answer:?}"
            );
            assert!(connection.is_closed(), "nothing more can be asked");
        }
    }
    // All of several requests are answered.
    let mut connection = Connection::open(world.http());
    let get = |target: &str| format!("GET {target} HTTP/1.1\r\nHost: www.test\r\n\r\n");
    connection.send([get("/missing"), get("/big.bin"), get("/a.txt")].concat()).finish();
    let statuses = [(); 3].map(|()| connection.response().status);
    assert_eq!(statuses, [404, 200, 200]);
}

fn a_short_answer_arrives_as_far_as_it_goes(world: &World) {
    for target in ["/short", "/short-chunked"] {
        let mut connection = Connection::open(world.http());
        connection.send(format!("GET {target} HTTP/1.1\r\nHost: http.test\r\n\r\n"));
        // The backend has said all it says before a byte of it is read here.
        let logged = || world.log().contains("it closed before the end");
        wait::until("the edge knows that the answer is short", || connection.is_answered() || logged());
        let read = connection.until_end();
        let count = read.iter().filter(|&&byte| byte == b's').count();
        assert!(count >= SHORT_LEN, "{target}: {count} of {SHORT_LEN} bytes");
    }
}
