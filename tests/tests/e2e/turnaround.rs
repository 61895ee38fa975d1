//! Where a request's time in its application went: before its questions to a database, in them, between them and after
//! them. Whose questions they are, what is usual, and who tells it.
//!
//! Not here: real databases (`keeper/tests/kernel/databases`), time in databases of an instance (`instances`).

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use nagaya_tests::client::Response;
use nagaya_tests::suite::{Suite, Tests};
use nagaya_tests::wait;
use nagaya_tests::world::World;
use serde_json::{Value, json};

use crate::resting::{add_site, builder, get};

pub const SUITE: Suite = Suite {
    name: "turnaround",
    needs_root: true,
    tests: Tests::Sharing(
        world,
        nagaya_tests::tests![
            a_request_alone_is_split_at_its_questions,
            a_request_without_a_question_is_all_before_it,
            the_part_that_grew_is_named,
            requests_at_once_are_split_by_the_tags_of_their_queries,
            requests_at_once_without_tags_are_not_split,
        ],
    ),
};

/// Sleeps and asks as its query says: `before`, `between` and `after` in milliseconds, `db` of each of `n` questions. With
/// `both`, two requests begin their questions together and end together.
const PROGRAM: &str = r#"#!/usr/bin/python3
import http.server, os, socket, socketserver, threading, time
from urllib.parse import parse_qsl

both = threading.Barrier(2)

def packet(number, body):
    return len(body).to_bytes(3, "little") + bytes([number]) + body

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *words):
        pass

    def do_GET(self):
        asked = dict(parse_qsl(self.path.partition("?")[2]))
        wait = lambda name: time.sleep(int(asked.get(name, 0)) / 1000)
        tag = "/*nagaya='" + self.headers["X-Request-Id"] + "'*/" if "tag" in asked else ""
        if "both" in asked: both.wait()
        wait("before")
        database = None
        for number in range(int(asked.get("n", 1))):
            if database is None:
                host, port = os.environ["DB"].rsplit(":", 1)
                database = socket.create_connection((host, int(port)))
                database.recv(4096)
                database.sendall(packet(1, bytes(36)))
                database.recv(4096)
            else:
                wait("between")
            database.sendall(packet(0, b"\x03SLEEP " + asked.get("db", "0").encode() + b" " + tag.encode()))
            answer = b""
            while b"rows" not in answer: answer += database.recv(4096)
        wait("after")
        if "both" in asked: both.wait()
        self.send_response(200)
        self.send_header("Content-Length", "4")
        self.end_headers()
        self.wfile.write(b"done")

class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True

server = Server(("", 0), Handler, bind_and_activate=False)
server.socket.close()
server.socket = socket.socket(socket.AF_UNIX)
server.socket.bind(os.environ["NAGAYA_SOCKET"])
server.socket.listen(128)
server.serve_forever(poll_interval=3600)
"#;

fn world() -> World {
    let world = builder().start();
    world.write_program("alice", "app/split.py", PROGRAM);
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("it is bound").to_string();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || serve_queries(stream));
        }
    });
    let backend = json!({ "kind": "app", "directory": "app", "command": ["./split.py"], "start_seconds": 60,
        "listen": "socket", "outbound": [address], "env": { "DB": address } });
    for name in ["alone", "nothing", "usual", "tagged", "untagged"] {
        add_site(&world, name, backend.clone(), json!({}));
    }
    world
}

/// Speaks as much of MySQL's protocol as it takes. A query says how long its answer takes, in milliseconds.
fn serve_queries(mut stream: TcpStream) {
    let packet =
        |number: u8, body: &[u8]| [&[u8::try_from(body.len()).expect("short"), 0, 0, number], body].concat();
    let mut piece = [0; 4096];
    let mut go = stream.write_all(&packet(0, b"\x0a8.0.36\0greeting")).is_ok();
    go = go && stream.read(&mut piece).is_ok_and(|len| len > 0);
    go = go && stream.write_all(&packet(2, b"\0\0\0")).is_ok();
    while go && let Ok(len @ 1..) = stream.read(&mut piece) {
        let query = String::from_utf8_lossy(&piece[..len]).into_owned();
        let ms = query.split(' ').nth(1).and_then(|ms| ms.parse().ok());
        std::thread::sleep(Duration::from_millis(ms.expect("a query with a time")));
        // The first byte comes at once, the last one when the time is over again.
        go = stream.write_all(&packet(1, b"answer")).is_ok();
        std::thread::sleep(Duration::from_millis(ms.expect("a query with a time")));
        go = go && stream.write_all(&packet(2, b"rows")).is_ok();
    }
}

/// The parts of a request, by its line in the log.
#[derive(Debug)]
struct Parts {
    before: u64,
    db: u64,
    between: u64,
    after: u64,
    questions: u64,
    took: u64,
}

fn id_of(answer: &Response) -> String {
    answer.header("x-request-id").expect("this client gets receipts").to_owned()
}

#[track_caller]
fn parts(world: &World, id: &str) -> Parts {
    let line = world.logged(id);
    let number = |name: &str| line[name].as_u64().unwrap_or_else(|| panic!("no {name} in {line}"));
    Parts {
        before: number("before_us"),
        db: number("db_us"),
        between: number("between_us"),
        after: number("after_us"),
        questions: number("questions"),
        took: number("duration_us"),
    }
}

fn a_request_alone_is_split_at_its_questions(world: &World) {
    get(world, "alone", "/?n=0").expect(200);
    let answer = get(world, "alone", "/?n=2&before=30&db=25&between=45&after=70").expect(200);
    let timing = answer.header("server-timing").expect("timing goes with the receipt");
    for name in ["app-before", "db", "app-after"] {
        assert!(timing.contains(&format!("{name};dur=")), "{timing}");
    }
    let parts = parts(world, &id_of(&answer));
    // The log-in is a question, too.
    assert_eq!(parts.questions, 3, "{parts:?}");
    assert!(parts.before >= 30_000 && parts.between >= 45_000 && parts.after >= 70_000, "{parts:?}");
    // From the first byte of each question to the last byte of its answer.
    assert!(parts.db >= 100_000, "{parts:?}");
    let sum = parts.before + parts.db + parts.between + parts.after;
    assert!(sum <= parts.took, "{parts:?}");
}

fn a_request_without_a_question_is_all_before_it(world: &World) {
    get(world, "nothing", "/?n=0").expect(200);
    let answer = get(world, "nothing", "/?n=0&before=20").expect(200);
    let parts = parts(world, &id_of(&answer));
    assert!(parts.before >= 20_000, "{parts:?}");
    assert_eq!((parts.db, parts.between, parts.after, parts.questions), (0, 0, 0, 0), "{parts:?}");
}

fn the_part_that_grew_is_named(world: &World) {
    let explained = |id: &str| -> Value {
        world.logged(id);
        serde_json::from_str(&world.cli(&["explain", id, "--json"])).expect("JSON")
    };
    let first = get(world, "usual", "/?after=5").expect(200);
    assert_eq!(explained(&id_of(&first))["turnaround"]["usual"], Value::Null, "nothing is usual yet");
    for _ in 0..12 {
        get(world, "usual", "/?after=5").expect(200);
    }
    let id = id_of(&get(world, "usual", "/?after=2000").expect(200));
    let split = explained(&id)["turnaround"].clone();
    assert_eq!(split["grew"], "after", "{split}");
    assert!(split["usual"]["after_us"].as_u64().is_some_and(|us| us < 2_000_000), "{split}");
    let text = world.cli(&["explain", &id]);
    assert!(text.contains("In its application (2 questions to databases)"), "{text}");
    assert!(text.contains("; this part grew most"), "{text}");
    let name = "nagaya_site_turnaround_seconds_count";
    let labels = "site=\"usual\",part=\"after\"";
    wait::until("all are counted", || world.metric(name, labels) >= 14.0);
}

/// The answers to two requests at once, of one question and of three.
fn both(world: &World, name: &str, more: &str) -> [Response; 2] {
    get(world, name, "/?n=0").expect(200);
    std::thread::scope(|scope| {
        let ask = |n: u32| get(world, name, &format!("/?both=1&n={n}&db=5&between=12{more}")).expect(200);
        let [one, other] = [1, 3].map(|n| scope.spawn(move || ask(n)));
        [one.join().expect("it is answered"), other.join().expect("it is answered")]
    })
}

fn requests_at_once_are_split_by_the_tags_of_their_queries(world: &World) {
    for (answer, count) in both(world, "tagged", "&tag=1").iter().zip([1, 3]) {
        let parts = parts(world, &id_of(answer));
        // A log-in has no tag.
        assert_eq!(parts.questions, count, "{parts:?}");
        assert!(parts.db >= count * 10_000, "{parts:?}");
    }
}

fn requests_at_once_without_tags_are_not_split(world: &World) {
    for answer in both(world, "untagged", "") {
        let line = world.logged(&id_of(&answer));
        assert!(line["db_us"].is_null() && line["questions"].is_null(), "{line}");
    }
}
