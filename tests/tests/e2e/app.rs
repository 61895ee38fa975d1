//! Applications that nagaya starts and keeps: on demand, anew when they end, under their tenant's uid.
//!
//! Not here: what is proxied to them (`proxy`), ambiguous requests (`smuggling`).

use std::sync::mpsc;

use nagaya_tests::client::{self, Connection};
use nagaya_tests::suite::{Suite, Tests, skip};
use nagaya_tests::world::World;
use nagaya_tests::{machine, wait};
use serde_json::json;

use crate::programs;

pub const SUITE: Suite = Suite {
    name: "app",
    needs_root: true,
    tests: Tests::Sharing(
        world,
        nagaya_tests::tests![
            an_application_is_started_by_its_first_request,
            many_first_requests_start_one_application,
            an_application_that_ended_is_started_anew,
            an_application_that_never_listens_is_refused_in_time,
            an_application_that_ends_at_once_is_refused,
            an_application_may_listen_on_a_port,
            an_application_ends_with_its_site,
            output_of_an_application_is_logged,
            a_site_ends_each_stream_in_its_time,
            php_keeps_sessions_that_no_other_tenant_reads,
        ],
    ),
};

fn world() -> World {
    let world = World::builder().tenant("alice").tenant("bob").start();
    world.write_program("alice", "app/app.pl", programs::ONE_ANSWER_PER_CONNECTION);
    world
}

/// A site whose application has its name on its command line, so that its processes can be told from others.
fn add(world: &World, name: &str, command: &[&str], more: serde_json::Value) {
    let mut command: Vec<_> = command.iter().map(|word| (*word).to_owned()).collect();
    command.push(machine::mark("app", name));
    let mut backend = json!({ "kind": "app", "directory": "app", "command": command, "start_seconds": 10 });
    for (key, value) in more.as_object().expect("an object") {
        backend[key] = value.clone();
    }
    world.import(&[
        json!({ "name": name, "tenant": "alice", "hosts": [format!("{name}.test")], "backend": backend }),
    ]);
}

fn running(name: &str) -> Vec<i32> {
    machine::processes_with(&machine::mark("app", name))
}

fn an_application_is_started_by_its_first_request(world: &World) {
    add(world, "demand", &["./app.pl"], json!({}));
    assert!(running("demand").is_empty());
    let text = world.get("demand.test", "/").expect(200).text();
    assert!(text.ends_with(&format!("uid {}", world.uid("alice"))), "{text}");
    assert_eq!(running("demand").len(), 1);
    assert_eq!(world.get("demand.test", "/").expect(200).text(), text, "the same one answers again");
}

fn many_first_requests_start_one_application(world: &World) {
    add(world, "many", &["./app.pl"], json!({}));
    let address = world.http();
    let (tell, told) = mpsc::channel();
    for _ in 0..16 {
        let tell = tell.clone();
        std::thread::spawn(move || {
            tell.send(nagaya_tests::client::get(address, "many.test", "/").expect(200).text())
        });
    }
    drop(tell);
    let mut answers: Vec<_> = told.iter().collect();
    assert_eq!(answers.len(), 16);
    answers.dedup();
    assert_eq!(answers.len(), 1, "{answers:?}");
}

fn an_application_that_ended_is_started_anew(world: &World) {
    add(world, "crash", &["./app.pl"], json!({}));
    for way in ["/crash", "/exit"] {
        world.get("crash.test", "/").expect(200);
        let before = running("crash");
        world.get("crash.test", way).expect(502);
        // Its number may soon be another process'.
        wait::until("the old one is gone", || running("crash").iter().all(|id| !before.contains(id)));
        // Between two starts there may be a pause, in which it says when to come back.
        wait::until("it answers again", || {
            let answer = world.get("crash.test", "/");
            assert!(matches!(answer.status, 200 | 502 | 503), "{answer:?}");
            answer.status == 200
        });
        let after = running("crash");
        assert!(!after.is_empty() && after.iter().all(|id| !before.contains(id)), "{before:?} {after:?}");
    }
}

fn an_application_that_never_listens_is_refused_in_time(world: &World) {
    add(world, "deaf", &["/bin/sh", "-c", "while :; do sleep 1; done"], json!({ "start_seconds": 1 }));
    let answer = world.get("deaf.test", "/");
    assert!(matches!(answer.status, 502 | 504), "{answer:?}");
    machine::wait_until_gone(&machine::mark("app", "deaf"));
}

fn an_application_that_ends_at_once_is_refused(world: &World) {
    add(world, "brief", &["/bin/false"], json!({}));
    for _ in 0..3 {
        let answer = world.get("brief.test", "/");
        assert!(matches!(answer.status, 502 | 503), "{answer:?}");
    }
}

fn an_application_may_listen_on_a_port(world: &World) {
    add(world, "port", &["./app.pl"], json!({ "listen": "port" }));
    world.get("port.test", "/").expect(200);
}

fn an_application_ends_with_its_site(world: &World) {
    add(world, "removed", &["./app.pl"], json!({}));
    world.get("removed.test", "/").expect(200);
    assert_eq!(running("removed").len(), 1);
    world.cli(&["site", "remove", "removed"]);
    machine::wait_until_gone(&machine::mark("app", "removed"));
}

fn output_of_an_application_is_logged(world: &World) {
    add(world, "chatty", &["./app.pl"], json!({}));
    world.get("chatty.test", "/").expect(200);
    wait::until("its words are logged", || {
        world.log().lines().any(|line| line.contains("the application listens") && line.contains("chatty"))
    });
}

/// A path for each kind of stream. None of them ends by itself.
const STREAMS: &str = r#"
import os, socket, threading, time
listener = socket.socket(socket.AF_UNIX)
listener.bind(os.environ['NAGAYA_SOCKET'])
listener.listen(64)
def serve(client):
    try:
        head = b''
        while b'\r\n\r\n' not in head:
            piece = client.recv(4096)
            if not piece: return
            head += piece
        target = head.split()[1]
        if target == b'/endless':
            client.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n')
            while True:
                client.sendall(b'e')
                time.sleep(0.01)
        elif target == b'/silent':
            client.recv(1)
        elif target == b'/upgrade':
            client.sendall(b'HTTP/1.1 101 Switching Protocols\r\nUpgrade: echo\r\nConnection: Upgrade\r\n\r\nready')
            client.recv(1)
        else:
            client.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok')
    except OSError:
        pass
    finally:
        client.close()
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"#;

fn a_site_ends_each_stream_in_its_time(world: &World) {
    world.write("alice", "streams/app.py", STREAMS);
    let backend = json!({ "kind": "app", "directory": "streams", "command": ["/usr/bin/python3", "app.py"] });
    world.import(&[json!({ "name": "ends", "tenant": "alice", "hosts": ["ends.test"], "stream_seconds": 2,
        "backend": backend })]);
    // Its start is no stream of a request.
    world.cli(&["instance", "wake", "ends"]);
    assert_eq!(world.get("ends.test", "/").expect(200).text(), "ok");
    world.get("ends.test", "/silent").expect(504);
    let mut endless = Connection::open(world.http());
    endless.send("GET /endless HTTP/1.1\r\nHost: ends.test\r\n\r\n");
    assert!(endless.try_response().is_err());
    // A tunnel of which neither side ends.
    let mut tunnel = Connection::open(world.http());
    tunnel.send("GET /upgrade HTTP/1.1\r\nHost: ends.test\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n");
    tunnel.head().expect(101);
    assert_eq!(tunnel.bytes(5), b"ready");
    assert_eq!(tunnel.until_end(), b"");
    assert_eq!(world.get("ends.test", "/").expect(200).text(), "ok", "it is as good as before");
}

const COUNTS: &str = "<?php session_start(); $_SESSION['count'] = ($_SESSION['count'] ?? 0) + 1; \
    echo json_encode([$_SESSION['count'], session_id(), ini_get('session.save_path')]);";

/// The sessions that this tenant's PHP finds where another's are.
const LOOKS: &str = "<?php echo json_encode([array_map('basename', glob('/var/lib/php/sessions/*')), \
    @file_get_contents('/var/lib/php/sessions/sess_' . ($_GET['id'] ?? ''))]);";

fn php_keeps_sessions_that_no_other_tenant_reads(world: &World) {
    if !std::path::Path::new("/usr/bin/php").exists()
        || !std::path::Path::new("/var/lib/php/sessions").exists()
    {
        skip("there is no PHP here that keeps sessions as Debian's does");
    }
    for (tenant, text) in [("alice", COUNTS), ("bob", LOOKS)] {
        world.write(tenant, "sessions/index.php", text);
        let command = ["/usr/bin/php", "-S", "127.0.0.1:{port}", "-t", "."];
        let backend = json!({ "kind": "app", "directory": "sessions", "listen": "port", "command": command });
        let name = format!("sessions-{tenant}");
        let hosts = [format!("{name}.test")];
        world.import(&[json!({ "name": name, "tenant": tenant, "hosts": hosts, "backend": backend })]);
    }
    let read = |text: String| serde_json::from_str(&text).unwrap_or_else(|_| panic!("{text}"));
    let first = world.get("sessions-alice.test", "/").expect(200);
    let cookie =
        first.header("set-cookie").expect("a session").split(';').next().unwrap_or_default().to_owned();
    let told: serde_json::Value = read(first.text());
    let id = told[1].as_str().expect("a session's id");
    assert!(
        told[0] == 1 && ["", "/var/lib/php/sessions"].contains(&told[2].as_str().unwrap_or("?")),
        "{told}"
    );
    let fields = format!("Cookie: {cookie}\r\n");
    let second = client::get_with(world.http(), "sessions-alice.test", "/", &fields).expect(200);
    let told: serde_json::Value = read(second.text());
    assert_eq!((&told[0], told[1].as_str()), (&json!(2), Some(id)));

    let looked = world.get("sessions-bob.test", &format!("/?id={id}")).expect(200);
    assert_eq!(read(looked.text()), json!([[], false]));
    // Nor does who runs on the node itself with the other tenant's uid.
    let found = machine::run("find", &[&world.path(".").to_string_lossy(), "-name", &format!("sess_{id}")]);
    let files: Vec<&str> = found.lines().collect();
    assert_eq!(files.len(), 1, "it is kept at one place: {found}");
    let uid = world.uid("bob").to_string();
    let as_bob = ["--reuid", &uid, "--regid", &uid, "--clear-groups", "cat", files[0]];
    let read = machine::output("setpriv", &as_bob);
    assert!(!read.status.success() && read.stdout.is_empty(), "{read:?}");
}
