//! Images show the present: what a tenant deploys is served at the next wake, by programs that keep in memory what they read when
//! they start.
//!
//! Not here: each way in which a file can change (`keeper/tests/kernel/fresh`), how instances rest (`instances`).

use std::path::Path;
use std::process::Command;

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
            a_program_of_go_comes_back_from_its_image,
            a_tenant_deploys_by_a_touch,
            an_operator_starts_one_anew,
            sessions_in_memory_survive_where_the_record_wants_that,
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
