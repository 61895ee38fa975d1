//! Images show the present: what a tenant deploys is served at the next wake, by programs that keep in memory what they read when
//! they start.
//!
//! Not here: each way in which a file can change (`keeper/tests/kernel/fresh`), how instances rest (`instances`).

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use nagaya_tests::client::{self, Connection};
use nagaya_tests::suite::{Suite, Tests, skip};
use nagaya_tests::wait;
use nagaya_tests::world::World;
use serde_json::{Value, json};

use crate::resting::{add_site, builder, get, has, listed, rest, until_image, wake};

pub const SUITE: Suite = Suite {
    name: "fresh",
    needs_root: true,
    tests: Tests::Sharing(
        world,
        nagaya_tests::tests![
            settings_that_are_read_at_import_are_those_of_now,
            a_changed_server_js_is_served,
            a_changed_module_of_express_is_served,
            a_program_of_go_comes_back_from_its_image,
            rows_of_a_database_end_an_image,
            a_tenant_deploys_by_a_touch,
            an_operator_starts_one_anew,
            application_in_use_restarts_without_an_error,
            sessions_in_memory_survive_where_the_record_wants_that,
            an_open_database_with_a_log_returns_with_the_image,
            an_open_database_with_a_log_survives_without_an_image,
        ],
    ),
};

fn world() -> World {
    builder().start()
}

/// Where this program is missing, the test ends here.
fn need(program: &str) {
    if !Path::new(program).exists() {
        skip("its program is not installed here");
    }
}

/// The text it answers with, having come back from its image.
#[track_caller]
fn restored(world: &World, name: &str) -> String {
    let answer = get(world, name, "/").expect(200);
    let woken = wake(&answer).expect("it was woken");
    assert!(woken.contains(";restore=") && !woken.contains(";boot="), "{woken}: {}", answer.text());
    answer.text()
}

/// The text it answers with, having been started because its image is of the past.
#[track_caller]
fn started(world: &World, name: &str) -> String {
    let answer = get(world, name, "/").expect(200);
    let woken = wake(&answer).expect("it was woken");
    assert!(woken.contains(";boot="), "{woken}: {}", answer.text());
    answer.text()
}

#[track_caller]
fn until_at_image(world: &World, name: &str) {
    rest(world, name, "image");
    wait::until("it is an image", || listed(world, name)["tier"] == "image");
}

/// Each of them serves a text that it has read at its start, and that is changed while it rests.
#[track_caller]
fn serves_the_present(world: &World, name: &str, first: &str, second: &str, deploy: impl FnOnce()) {
    assert_eq!(get(world, name, "/").expect(200).text(), first);
    until_image(world, name);
    until_at_image(world, name);
    assert_eq!(restored(world, name), first);
    until_at_image(world, name);
    deploy();
    assert_eq!(started(world, name), second);
    until_image(world, name);
    until_at_image(world, name);
    assert_eq!(restored(world, name), second, "it has an image again");
}

fn app(directory: &str, command: &[&str]) -> Value {
    json!({ "kind": "app", "directory": directory, "command": command, "start_seconds": 60 })
}

const WSGI: &str = "import settings\n\
    def application(environ, start_response):\n\
    \x20   start_response('200 OK', [('Content-Type', 'text/plain')])\n\
    \x20   return [settings.TITLE.encode()]\n";

fn add_wsgi(world: &World, name: &str, more: Value) {
    need("/usr/bin/gunicorn");
    world.write("alice", &format!("{name}/wsgi.py"), WSGI);
    world.write("alice", &format!("{name}/settings.py"), "TITLE = 'one'\n");
    let command = ["/usr/bin/gunicorn", "--timeout", "0", "wsgi:application"];
    let mut backend = app(name, &command);
    backend["listen"] = json!("fd");
    add_site(world, name, backend, more);
}

fn settings_that_are_read_at_import_are_those_of_now(world: &World) {
    add_wsgi(world, "wsgi", json!({}));
    serves_the_present(world, "wsgi", "one", "second", || {
        world.write("alice", "wsgi/settings.py", "TITLE = 'second'\n");
    });
    let shown = world.cli(&["instance", "show", "wsgi"]);
    for part in ["settings.py was changed since", "restart.txt is touched", "before its first visitor"] {
        assert!(shown.contains(part), "'{part}' is not in\n{shown}");
    }
}

/// Reads its title from Redis at import, as many programs read their settings.
const SETTINGS_OF_REDIS: &str = "import socket\n\
    client = socket.socket(socket.AF_UNIX)\n\
    client.connect('SOCKET')\n\
    client.sendall(b'SELECT 3\\r\\nGET title\\r\\n')\n\
    lines = client.makefile('r')\n\
    lines.readline(), lines.readline()\n\
    TITLE = lines.readline().strip()\n\
    client.close()\n";

/// A server that ends with the test.
struct RedisServer(std::process::Child);

impl Drop for RedisServer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn rows_of_a_database_end_an_image(world: &World) {
    // The server is one program with Debian's `redis-check-rdb`, and looks at the name it is called by.
    need("/usr/bin/redis-check-rdb");
    need("/usr/bin/redis-cli");
    let (program, socket) = (world.path("redis-server"), world.path("redis.sock"));
    symlink("/usr/bin/redis-check-rdb", &program).expect("our own directory");
    let at = socket.display().to_string();
    let server = Command::new(&program)
        .args([
            "--port",
            "0",
            "--unixsocket",
            &at,
            "--unixsocketperm",
            "777",
            "--save",
            "",
            "--appendonly",
            "no",
        ])
        .current_dir(socket.parent().expect("a directory"))
        .stdout(std::process::Stdio::null())
        .spawn();
    let _server = RedisServer(server.expect("it can be started"));
    let set = |title: &str| {
        let said = Command::new("redis-cli").args(["-s", &at, "-n", "3", "SET", "title", title]).output();
        said.is_ok_and(|said| said.status.success() && said.stdout == b"OK\n")
    };
    wait::until("Redis answers", || set("one"));
    add_wsgi(world, "rows", json!({}));
    world.write("alice", "rows/settings.py", SETTINGS_OF_REDIS.replace("SOCKET", &at));
    let tag = format!("redis {at} 3 GET title");
    world.cli(&["site", "set", "rows", "--database", &at, "--image-tag", &tag]);
    serves_the_present(world, "rows", "one", "second", || assert!(set("second")));
    let shown = world.cli(&["instance", "show", "rows"]);
    assert!(shown.contains("GET title"), "{shown}");
}

const SERVER_JS: &str = "const text = require('fs').readFileSync('text', 'utf8');\n\
    require('http').createServer((asked, answer) => answer.end('one ' + text)).listen(process.env.NAGAYA_SOCKET);\n";

fn a_changed_server_js_is_served(world: &World) {
    need("/usr/bin/node");
    world.write("alice", "js/server.js", SERVER_JS);
    world.write("alice", "js/text", "page");
    add_site(world, "js", app("js", &["/usr/bin/node", "server.js"]), json!({}));
    serves_the_present(world, "js", "one page", "second page", || {
        world.write("alice", "js/server.js", SERVER_JS.replace("one", "second"));
    });
}

const EXPRESS_JS: &str = "const app = require('express')();\n\
    app.use('/', require('./routes'));\n\
    app.listen(process.env.NAGAYA_SOCKET);\n";

const ROUTES_JS: &str = "const router = require('express').Router();\n\
    router.get('/', (asked, answer) => answer.type('text').send('one page'));\n\
    module.exports = router;\n";

/// Express as Debian has it, whichever Node runs it.
fn a_changed_module_of_express_is_served(world: &World) {
    need("/usr/bin/node");
    need("/usr/share/nodejs/express/index.js");
    world.write("alice", "express/server.js", EXPRESS_JS);
    world.write("alice", "express/routes.js", ROUTES_JS);
    let more = json!({ "env": { "NODE_PATH": "/usr/share/nodejs", "NODE_ENV": "production" } });
    add_site(world, "express", app("express", &["/usr/bin/node", "server.js"]), more);
    serves_the_present(world, "express", "one page", "second page", || {
        world.write("alice", "express/routes.js", ROUTES_JS.replace("one", "second"));
    });
}

/// Go listens by MPTCP where it can.
const GO: &str = r#"package main

import (
	"bufio"
	"fmt"
	"net"
	"os"
)

func main() {
	text, _ := os.ReadFile("text")
	listener, err := net.Listen("tcp", "127.0.0.1:"+os.Getenv("PORT"))
	if err != nil {
		panic(err)
	}
	for {
		client, err := listener.Accept()
		if err != nil {
			panic(err)
		}
		reader := bufio.NewReader(client)
		for line := " "; len(line) > 2 || line == " "; {
			if line, err = reader.ReadString('\n'); err != nil {
				break
			}
		}
		fmt.Fprintf(client, "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s", len(text), text)
		client.Close()
	}
}
"#;

fn a_program_of_go_comes_back_from_its_image(world: &World) {
    let go = ["/usr/local/go/bin/go", "/usr/bin/go"].into_iter().find(|path| Path::new(path).exists());
    let Some(go) = go else { skip("there is no go here") };
    if !has(world, "criu") {
        skip("there is no CRIU here that works");
    }
    let source = world.write("alice", "go/main.go", GO);
    let directory = source.parent().expect("it has a directory");
    let cache = world.path("go-cache");
    let built = Command::new(go)
        .args(["build", "-o", "served", "main.go"])
        .current_dir(directory)
        .envs([("GOCACHE", cache.as_os_str()), ("HOME", cache.as_os_str()), ("CGO_ENABLED", "0".as_ref())])
        .output()
        .expect("go runs");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    world.write("alice", "go/text", "one");
    let mut backend = app("go", &["./served"]);
    backend["listen"] = json!("port");
    add_site(world, "go", backend, json!({}));
    serves_the_present(world, "go", "one", "second", || {
        world.write("alice", "go/text", "second");
    });
}

fn a_tenant_deploys_by_a_touch(world: &World) {
    add_wsgi(world, "touched", json!({}));
    assert_eq!(get(world, "touched", "/").expect(200).text(), "one");
    world.write("alice", "touched/settings.py", "TITLE = 'second'\n");
    world.write("alice", "touched/tmp/restart.txt", "");
    wait::until("what runs is started anew", || get(world, "touched", "/").expect(200).text() == "second");
}

fn an_operator_starts_one_anew(world: &World) {
    add_wsgi(world, "anew", json!({}));
    assert_eq!(get(world, "anew", "/").expect(200).text(), "one");
    world.write("alice", "anew/settings.py", "TITLE = 'second'\n");
    let said = world.cli(&["instance", "restart", "anew"]);
    assert!(said.contains("starts anew"), "{said}");
    assert_eq!(get(world, "anew", "/").expect(200).text(), "second");
}

/// Answers with the version it has read at its start; to `/hold?NAME` in two parts, the second when `go-NAME` is there.
const HOLDS: &str = r#"
import http.server, os, socketserver, time
VERSION = open('version', 'rb').read()
class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 128
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    def do_GET(self):
        path, _, name = self.path.partition('?')
        first = b'begun ' if path == '/hold' else b''
        self.send_response(200)
        self.send_header('Content-Length', str(len(first + VERSION)))
        self.end_headers()
        self.wfile.write(first)
        self.wfile.flush()
        while first and not os.path.exists('go-' + name): time.sleep(0.01)
        self.wfile.write(VERSION)
    def log_message(self, *args): pass
    def address_string(self): return ''
Server(os.environ['NAGAYA_SOCKET'], Handler).serve_forever()
"#;

/// Asks without a pause on another thread until it is told to stop. Returns how many answers there were.
fn ask_meanwhile(world: &World, host: &'static str, stop: &Arc<AtomicBool>) -> JoinHandle<usize> {
    let address = world.http();
    let stop = Arc::clone(stop);
    std::thread::spawn(move || {
        let mut count = 0;
        while !stop.load(Ordering::Relaxed) {
            client::get(address, host, "/").expect(200);
            count += 1;
        }
        count
    })
}

/// How many use the run of it that is to end; null where none is.
#[track_caller]
fn draining(world: &World) -> Value {
    let shown = world.cli(&["instance", "show", "beside", "--json"]);
    let shown: Value = serde_json::from_str(&shown).expect("JSON");
    shown["draining"].clone()
}

fn application_in_use_restarts_without_an_error(world: &World) {
    for release in ["1", "2"] {
        world.write("alice", &format!("beside/{release}/app.py"), HOLDS);
    }
    let home = world.home("alice").join("beside");
    let current = home.join("current");
    let next = home.join("next");
    symlink("1", &current).expect("our own directory");
    symlink("2", &next).expect("our own directory");
    world.write("alice", "beside/1/version", "one");
    add_site(world, "beside", app("beside/current", &["/usr/bin/python3", "app.py"]), json!({}));
    assert_eq!(get(world, "beside", "/").expect(200).text(), "one");
    let stop = Arc::new(AtomicBool::new(false));
    let others = ask_meanwhile(world, "beside.test", &stop);

    let mut old = "one";
    for (way, directory, new) in [("operator", "1", "two"), ("touch", "1", "six"), ("link", "2", "ten")] {
        let mut held = Connection::open(world.http());
        held.send(format!("GET /hold?{way} HTTP/1.1\r\nHost: beside.test\r\n\r\n"));
        held.head().expect(200);
        assert_eq!(held.bytes(6), b"begun ");
        world.write("alice", &format!("beside/{directory}/version"), new);
        match way {
            "operator" => drop(world.cli(&["instance", "restart", "beside"])),
            "touch" => drop(world.write("alice", "beside/1/tmp/restart.txt", "")),
            _ => std::fs::rename(&next, &current).expect("our own directory"),
        }
        wait::until("who comes meets the new run", || get(world, "beside", "/").expect(200).text() == new);
        assert!(draining(world).as_u64() >= Some(1), "{way}: one request is of the old run");
        // The old run is in the directory it was started in.
        world.write("alice", &format!("beside/1/go-{way}"), "");
        assert_eq!(held.bytes(old.len()), old.as_bytes(), "{way}: it ends as it began");
        wait::until("the old run ends then", || draining(world).is_null());
        assert_eq!(get(world, "beside", "/").expect(200).text(), new);
        old = new;
    }
    stop.store(true, Ordering::Relaxed);
    assert!(others.join().expect("no request fails meanwhile") > 0);
}

/// A session in the memory of the program, as express-session's default store has it.
const SESSIONS_JS: &str = "let visits = 0;\n\
    require('http').createServer((asked, answer) => answer.end(`visit ${++visits}`)).listen(process.env.NAGAYA_SOCKET);\n";

fn sessions_in_memory_survive_where_the_record_wants_that(world: &World) {
    need("/usr/bin/node");
    if !has(world, "criu") {
        skip("there is no CRIU here that works");
    }
    world.write("alice", "sessions/server.js", SESSIONS_JS);
    let backend = app("sessions", &["/usr/bin/node", "server.js"]);
    add_site(world, "sessions", backend, json!({ "image_when": "rest" }));
    assert_eq!(get(world, "sessions", "/").expect(200).text(), "visit 1");
    for visit in 2..4 {
        until_at_image(world, "sessions");
        assert_eq!(restored(world, "sessions"), format!("visit {visit}"));
    }
}

/// Has a database in SQLite open for as long as it runs, with a write-ahead log, as PocketBase does. `/add/TEXT` writes, and all of it says what is there.
/// It closes its database when it ends well.
const HOLDER: &str = r#"
import http.server, signal, socket, socketserver, sqlite3, sys
held = sqlite3.connect('held.db', check_same_thread=False)
held.execute('pragma journal_mode=wal')
held.execute('create table if not exists notes(text)')
held.commit()
def end(*what):
    held.close()
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
class Handler(http.server.BaseHTTPRequestHandler):
    def address_string(self): return '-'
    def do_GET(self):
        if self.path.startswith('/add/'):
            held.execute('insert into notes values(?)', [self.path[5:]])
            held.commit()
        body = ' '.join(text for (text,) in held.execute('select text from notes order by rowid')).encode()
        self.send_response(200)
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)
class Server(socketserver.UnixStreamServer):
    request_queue_size = 128
server = Server('/nowhere', Handler, bind_and_activate=False)
server.socket = socket.socket(fileno=3)
server.serve_forever()
"#;

fn add_holder(world: &World, name: &str, more: Value) {
    need("/usr/bin/python3");
    if !has(world, "criu") {
        skip("there is no CRIU here that works");
    }
    world.write("alice", &format!("{name}/holder.py"), HOLDER);
    let mut backend = app(name, &["/usr/bin/python3", "holder.py"]);
    backend["listen"] = json!("fd");
    add_site(world, name, backend, more);
}

fn an_open_database_with_a_log_returns_with_the_image(world: &World) {
    add_holder(world, "held", json!({ "image_when": "rest" }));
    assert_eq!(get(world, "held", "/add/one").expect(200).text(), "one");
    let mut all = "one".to_owned();
    for text in ["two", "three", "four"] {
        until_at_image(world, "held");
        assert!(world.home("alice").join("held/held.db-wal").exists(), "its log is as the image has it");
        assert_eq!(restored(world, "held"), all);
        all = format!("{all} {text}");
        assert_eq!(get(world, "held", &format!("/add/{text}")).expect(200).text(), all);
    }
    // Somebody else writes while it rests, and takes the log away: the image is of no use, and the application starts.
    until_at_image(world, "held");
    let write = "import sqlite3; d = sqlite3.connect('held.db'); d.execute(\"insert into notes values('beside')\"); d.commit(); d.close()";
    let dir = world.home("alice").join("held");
    let wrote = Command::new("/usr/bin/python3").args(["-c", write]).current_dir(&dir).status();
    assert!(wrote.expect("Python runs").success());
    world.give("alice");
    assert!(!dir.join("held.db-wal").exists(), "who closes it last takes the log away");
    all.push_str(" beside");
    assert_eq!(started(world, "held"), all);
}

/// Its image is of the start, when the log was shorter, or of one that is gone since.
fn an_open_database_with_a_log_survives_without_an_image(world: &World) {
    add_holder(world, "closed", json!({}));
    let mut all = String::new();
    for text in ["one", "two", "three", "four"] {
        all = format!("{all} {text}").trim().to_owned();
        assert_eq!(get(world, "closed", &format!("/add/{text}")).expect(200).text(), all);
        rest(world, "closed", "image");
        wait::until("it has no process", || {
            ["image", "cold"].map(Value::from).contains(&listed(world, "closed")["tier"])
        });
    }
    assert_eq!(get(world, "closed", "/").expect(200).text(), all);
}
