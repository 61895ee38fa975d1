//! What other projects' tests of HTTP make of the node: h2spec, and messages of http-parser and httparse. `./dev conformance` brings them here.
//!
//! Each result is compared with a table in `tests/conformance`; whatever changes fails, also for the better. Not here: the same readings with
//! their reasons (`http_readings`, `smuggling`).

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use nagaya_tests::backend::{Backend, Peer, Request};
use nagaya_tests::client::Connection;
use nagaya_tests::corpus::{self, Message};
use nagaya_tests::machine;
use nagaya_tests::suite::{self, Suite, Tests};
use nagaya_tests::world::World;
use serde_json::json;

use super::tls::certify;

pub const SUITE: Suite = Suite {
    name: "conformance",
    needs_root: false,
    tests: Tests::Alone(nagaya_tests::tests![
        h2spec_finds_what_the_table_says,
        requests_are_read_as_the_table_says,
        answers_are_read_as_the_table_says,
    ]),
};

/// Connections at once. Most of the time they wait for a limit of the node.
const CLIENTS: usize = 16;

/// Longest wait for an answer: far longer than any limit of the node.
const PATIENCE: Duration = Duration::from_secs(30);

/// Bytes of a body that stand in a table.
const BODY_SHOWN: usize = 60;

/// Behind each request on its connection: tells whether the node still knows where a request begins.
const PROBE_TARGET: &str = "/probe";

/// Where `./dev conformance` has put what others wrote.
fn sources() -> PathBuf {
    match std::env::var_os("NAGAYA_CONFORMANCE") {
        Some(directory) => directory.into(),
        None => suite::skip("needs what others wrote: './dev conformance' fetches it"),
    }
}

fn read_source(name: &str) -> String {
    let path = sources().join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn messages(are_requests: bool) -> Vec<Message> {
    let mut all = corpus::read_http_parser(&read_source("http_parser_test.c"));
    all.extend(corpus::read_httparse(&read_source("httparse.rs")));
    all.retain(|message| message.is_request == are_requests);
    assert!(all.len() > 30, "only {} messages were found in the sources", all.len());
    all
}

/// Compares with a table that is checked in; the new one is written beside the sources. Lines that begin with `#` are for its reader, and
/// those that begin with `?` may be missing among the results.
#[track_caller]
fn assert_table(name: &str, results: &[String]) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("conformance").join(name);
    let table = std::fs::read_to_string(&path).unwrap_or_default();
    let (notes, known): (Vec<_>, Vec<_>) =
        table.lines().partition(|line| line.starts_with('#') || line.starts_with('?'));
    let optional: Vec<&str> = notes.iter().filter_map(|line| line.strip_prefix("? ")).collect();
    let results: Vec<&str> =
        results.iter().map(|line| &**line).filter(|line| !optional.contains(line)).collect();
    let new_path = sources().join(name);
    machine::write(&new_path, [&notes[..], &results[..], &[""]].concat().join("\n"));
    let gone = known.iter().filter(|line| !results.contains(line)).map(|line| format!("- {line}\n"));
    let new = results.iter().filter(|line| !known.contains(line)).map(|line| format!("+ {line}\n"));
    let changes: String = gone.chain(new).collect();
    assert!(
        changes.is_empty() && known.len() == results.len(),
        "results changed. If they are right, copy {} to {}:\n{changes}",
        new_path.display(),
        path.display()
    );
}

/// Does something with each message, several at once, and returns the results in their order.
fn each<T: Sync>(items: &[T], work: impl Fn(usize, &T) -> String + Sync) -> Vec<String> {
    let next = AtomicUsize::new(0);
    let results = Mutex::new(BTreeMap::new());
    std::thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(item) = items.get(at) else { return };
                    let result = work(at, item);
                    results.lock().expect("no thread panicked with it").insert(at, result);
                }
            });
        }
    });
    results.into_inner().expect("no thread panicked with it").into_values().collect()
}

fn shown(bytes: &[u8]) -> String {
    let cut = if bytes.len() > BODY_SHOWN { "..." } else { "" };
    format!("{}{cut}", bytes[..bytes.len().min(BODY_SHOWN)].escape_ascii())
}

/// A node with a site on a server of ours, which ends what is incomplete soon.
fn world(backend: Backend) -> World {
    let world = World::builder()
        .set(
            "edge.limits",
            "head_timeout = \"1s\"\nhead_timeout_max = \"1s\"\nbody_timeout = \"1s\"\nbody_min_rate = \"0B\"",
        )
        .set("edge.networks", "exempt = [\"127.0.0.0/8\"]")
        .tls()
        .tenant("alice")
        .site(json!({ "name": "www", "tenant": "alice", "hosts": ["127.0.0.1"],
            "backend": { "kind": "static", "root": "www" } }))
        .site(json!({ "name": "proxied", "tenant": "alice", "hosts": ["127.0.0.1"], "path": "/proxied",
            "backend": { "kind": "http", "address": backend.address.to_string() } }))
        .site(json!({ "name": "corpus", "tenant": "alice", "hosts": ["*.corpus.test"],
            "backend": { "kind": "http", "address": backend.address.to_string() } }))
        .start();
    world.keep(backend);
    world
}

// === h2spec ===

fn h2spec_finds_what_the_table_says() {
    let program = sources().join("h2spec");
    let world = world(Backend::answering(|peer, _| peer.answer("200 OK", "proxied")));
    world.write("alice", "www/a.txt", "alpha");
    certify(&world, "default", &["127.0.0.1"]);
    let targets = [("a file", "/a.txt"), ("a server", "/proxied/")];
    let mut lines: Vec<String> =
        each(&targets, |_, (name, target)| run_h2spec(&program, &world, name, target))
            .iter()
            .flat_map(|lines| lines.lines())
            .map(str::to_owned)
            .collect();
    lines.sort();
    assert_table("h2spec.txt", &lines);
    world.stop();
}

/// A line for each case that failed or was skipped, and one that counts all.
fn run_h2spec(program: &Path, world: &World, name: &str, target: &str) -> String {
    let report = world.path(&format!("h2spec-{}.xml", name.replace(' ', "-")));
    let port = world.https().port().to_string();
    let output = Command::new(program)
        .args(["--host", "127.0.0.1", "--port", &port, "--tls", "--insecure", "--strict", "--path", target])
        .args(["--junit-report", &report.to_string_lossy()])
        .output()
        .unwrap_or_else(|error| panic!("{}: {error}", program.display()));
    let xml = std::fs::read_to_string(&report).unwrap_or_else(|error| {
        panic!("h2spec left no report: {error}: {}", String::from_utf8_lossy(&output.stdout))
    });
    let mut count = 0;
    let mut lines = String::new();
    for case in xml.split("<testcase ").skip(1) {
        count += 1;
        let value = |key: &str| {
            case.split_once(&format!("{key}=\""))
                .and_then(|(_, rest)| rest.split_once('"'))
                .map_or("", |(value, _)| value)
        };
        let result = match (case.contains("<failure"), case.contains("<error"), case.contains("<skipped")) {
            (false, false, false) => continue,
            (_, _, true) => "skipped",
            _ => "failed",
        };
        let _ = writeln!(
            lines,
            "{name}: {result}: {}: {}",
            value("package"),
            value("classname").replace("&#34;", "\"")
        );
    }
    let _ = writeln!(lines, "{name}: {count} cases");
    lines
}

// === Requests ===

/// The message with a host of the node in place of its own: whose host it is is not what these messages are about.
fn with_host(message: &[u8], host: &str) -> Vec<u8> {
    let is_host = |line: &[u8]| line.len() >= 5 && line[..5].eq_ignore_ascii_case(b"host:");
    let mut lines: Vec<Vec<u8>> =
        message.split_inclusive(|byte| *byte == b'\n').map(<[u8]>::to_vec).collect();
    let end = lines.iter().position(|line| line == b"\r\n" || line == b"\n").unwrap_or(lines.len());
    // Empty lines in front of a request are its own business.
    let first = lines.iter().position(|line| line != b"\r\n" && line != b"\n").unwrap_or(0);
    let end = if end < first { lines.len() } else { end };
    let field = format!("Host: {host}\r\n").into_bytes();
    match lines[..end].iter().position(|line| is_host(line)) {
        Some(at) => lines[at] = field,
        None if lines.get(first).is_some_and(|line| line.ends_with(b"\n")) => lines.insert(first + 1, field),
        None => {}
    }
    lines.concat()
}

/// Sends the bytes and a request behind them, and reads until the node ends the connection. Statuses of all answers.
fn statuses_of(address: SocketAddr, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).expect("the node listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a limit that is not zero");
    // The node may have refused what came first, and closed.
    let _ = stream.write_all(bytes);
    let mut read = Vec::new();
    let mut buffer = [0; 16 << 10];
    let end = loop {
        match stream.read(&mut buffer) {
            Ok(0) => break "",
            Ok(count) => read.extend_from_slice(&buffer[..count]),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => break "",
            Err(_) => break " and stays open",
        }
    };
    let text = String::from_utf8_lossy(&read);
    let statuses: Vec<&str> = text.split("HTTP/1.1 ").skip(1).filter_map(|answer| answer.get(..3)).collect();
    format!("{}{end}", statuses.join(" "))
}

fn requests_are_read_as_the_table_says() {
    let messages = messages(true);
    let seen: Arc<Mutex<BTreeMap<String, Vec<String>>>> = Arc::default();
    let theirs = Arc::clone(&seen);
    let world = world(Backend::answering(move |peer, request| {
        let host = request.field("host").unwrap_or_default();
        let mut line = format!("{} {}", request.method(), request.target());
        if !request.body.is_empty() {
            let _ = write!(line, " {:?}", shown(&request.body));
        }
        theirs.lock().expect("no thread panicked with it").entry(host).or_default().push(line);
        peer.answer("200 OK", "")
    }));
    let host_of = |at: usize| format!("m{at}.corpus.test");
    let statuses = each(&messages, |at, message| {
        let host = host_of(at);
        let probe = format!("GET {PROBE_TARGET} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        let mut bytes = with_host(&message.bytes, &host);
        bytes.extend(probe.as_bytes());
        statuses_of(world.http(), &bytes)
    });
    let seen = seen.lock().expect("no thread panicked with it");
    let lines: Vec<String> = messages
        .iter()
        .zip(statuses)
        .enumerate()
        .map(|(at, (message, statuses))| {
            let seen = seen.get(&host_of(at)).map(|lines| lines.join(", ")).unwrap_or_default();
            format!("{} | {statuses} | {seen}", message.name)
        })
        .collect();
    assert_table("requests.txt", &lines);
    world.stop();
}

// === Answers ===

fn answers_are_read_as_the_table_says() {
    let messages = messages(false);
    let answers: Vec<Vec<u8>> = messages.iter().map(|message| message.bytes.clone()).collect();
    let world = world(Backend::answering(move |peer, request| {
        send_answer(peer, request, &answers);
        false
    }));
    let lines = each(&messages, |at, message| {
        let mut connection = Connection::open(world.http());
        connection
            .send(format!("GET /{at} HTTP/1.1\r\nHost: answers.corpus.test\r\nConnection: close\r\n\r\n"));
        let mut line = format!("{} |", message.name);
        loop {
            match connection.try_response() {
                // Its text is the node's own.
                Ok(response) if response.status == 502 => line.push_str(" 502"),
                Ok(response) => {
                    let _ = write!(line, " {} \"{}\"", response.status, shown(&response.body));
                    if response.status >= 200 {
                        break line;
                    }
                    continue;
                }
                Err(_) => line.push_str(" broken off"),
            }
            break line;
        }
    });
    assert_table("answers.txt", &lines);
    world.stop();
}

fn send_answer(peer: &mut Peer, request: &Request, answers: &[Vec<u8>]) {
    let at = request.target().trim_start_matches('/').parse::<usize>().ok();
    if let Some(answer) = at.and_then(|at| answers.get(at)) {
        peer.send(answer);
    }
}
