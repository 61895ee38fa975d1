//! Roles on the admin socket: each user does what its role allows, and no more. Real users' processes ask.
//!
//! Not here: which route needs which role (unit tests of `admin::roles`), tenants (`tenants`).

use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Stdio};

use nagaya_tests::machine;
use nagaya_tests::suite::{Suite, Tests};
use nagaya_tests::wait;
use nagaya_tests::world::World;
use serde_json::{Value, json};

pub const SUITE: Suite = Suite {
    name: "admin_roles",
    needs_root: true,
    tests: Tests::Sharing(
        world,
        nagaya_tests::tests![
            a_reader_looks_and_changes_nothing,
            a_reader_sees_no_secret,
            an_operator_moves_and_changes_no_record,
            all_is_all,
            a_stranger_is_refused_whatever_it_asks,
            a_group_gives_its_role,
        ],
    ),
};

pub const ALONE: Suite = Suite {
    name: "admin_roles",
    needs_root: true,
    tests: Tests::Alone(nagaya_tests::tests![nobody_shuts_root_out_by_connections]),
};

// Users and groups that no common machine has. Numbers need no entry in its lists.
const READER: u32 = 238_001;
const OPERATOR: u32 = 238_002;
const MASTER: u32 = 238_003;
const STRANGER: u32 = 238_004;
const READERS: u32 = 238_101;
const OPERATORS: u32 = 238_102;

const SECRET: &str = "s3cret-of-the-application";

/// An application that answers whatever is asked.
const APP: &str = r#"#!/usr/bin/python3
import os, socket
server = socket.socket(socket.AF_UNIX)
server.bind(os.environ["NAGAYA_SOCKET"])
server.listen(8)
while True:
    client, _ = server.accept()
    with client:
        try:
            client.recv(65536)
            client.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok")
        except OSError:
            # It was only tried whether anybody listens.
            pass
"#;

fn world() -> World {
    let roles = format!(
        "read = [\"{READER}\", \"@{READERS}\"]\noperate = [\"{OPERATOR}\", \"@{OPERATORS}\"]\nall = [\"{MASTER}\"]"
    );
    let app = json!({ "kind": "app", "directory": "app", "command": ["./app.py"], "env": { "KEY": SECRET } });
    let world = World::builder().set("admin", &roles).site_of("alice", "app", app).start();
    // The directory of tests is closed to others; a node's is not.
    let open = std::fs::Permissions::from_mode(0o755);
    let dir = world.path("run").parent().expect("a directory").to_owned();
    std::fs::set_permissions(dir, open).expect("our own directory");
    world.write_program("alice", "app/app.py", APP);
    world
}

/// Somebody who asks.
#[derive(Clone, Copy)]
struct User {
    uid: u32,
    /// Beside the group of the uid's number.
    group: Option<u32>,
}

const fn user(uid: u32) -> User {
    User { uid, group: None }
}

impl User {
    /// A program that runs as this user.
    fn command(self, program: &str, words: &[&str]) -> Command {
        let mut command = Command::new("setpriv");
        command.arg(format!("--reuid={}", self.uid)).arg(format!("--regid={}", self.uid));
        match self.group {
            Some(group) => command.arg(format!("--groups={group}")),
            None => command.arg("--clear-groups"),
        };
        command.arg(program).args(words);
        command
    }

    /// What the node answers to this user.
    fn ask(self, world: &World, method: &str, path: &str, body: &str) -> (u16, String) {
        let socket = world.path("run/admin.sock");
        let url = format!("http://nagaya{path}");
        let mut words = vec!["-sS", "-X", method, "-w", "\n%{http_code}", "--unix-socket"];
        let socket = socket.to_string_lossy();
        words.push(&socket);
        if !body.is_empty() {
            words.extend(["-d", body]);
        }
        words.push(&url);
        let output = self.command("curl", &words).output().expect("setpriv and curl are installed");
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let (text, status) = text.rsplit_once('\n').expect("the status is in a line of its own");
        (status.parse().expect("a status"), text.to_owned())
    }

    fn status(self, world: &World, method: &str, path: &str, body: &str) -> u16 {
        self.ask(world, method, path, body).0
    }

    #[track_caller]
    fn is_refused(self, world: &World, method: &str, path: &str, body: &str, needed: &str) {
        let (status, text) = self.ask(world, method, path, body);
        let problem: Value = serde_json::from_str(&text).unwrap_or_default();
        assert_eq!((status, problem["code"].as_str()), (403, Some("NGY0530")), "{method} {path}: {text}");
        let detail = problem["detail"].as_str().unwrap_or_default();
        assert!(detail.contains(&format!("needs the role '{needed}'")), "{method} {path}: {detail}");
    }
}

/// What only looks.
const LOOKS: &[&str] =
    &["/metrics", "/healthz", "/v1/status", "/v1/sites", "/v1/tenants/alice", "/v1/instances"];

fn a_reader_looks_and_changes_nothing(world: &World) {
    let reader = user(READER);
    for path in LOOKS {
        assert_eq!(reader.status(world, "GET", path, ""), 200, "{path}");
    }
    reader.is_refused(world, "POST", "/v1/instances/app/wake", "", "operate");
    reader.is_refused(world, "GET", "/v1/instances/app/logs", "", "operate");
    for (method, path, body) in [
        ("PUT", "/v1/settings/a", "{\"value\":\"x\"}"),
        ("DELETE", "/v1/sites/app", ""),
        ("POST", "/v1/import?mode=replace", "{}"),
        ("GET", "/v1/export", ""),
        ("GET", "/v1/settings", ""),
        ("POST", "/v1/instances/app/exec", "{\"command\":[\"id\"]}"),
        ("POST", "/v1/cluster", "{}"),
        ("DELETE", "/v1/nodes/n1", ""),
    ] {
        reader.is_refused(world, method, path, body, "all");
    }
    assert_eq!(reader.status(world, "GET", "/v1/nothing", ""), 404);
    assert_eq!(reader.status(world, "POST", "/v1/status", ""), 405);
    assert!(world.log().contains("NGY0530"));
}

fn a_reader_sees_no_secret(world: &World) {
    for path in ["/v1/sites", "/v1/sites/app", "/v1/instances", "/v1/instances/app", "/v1/status"] {
        for asking in [user(READER), user(OPERATOR)] {
            let (status, text) = asking.ask(world, "GET", path, "");
            assert!(status == 200 && !text.contains(SECRET), "{path}: {text}");
        }
    }
    let (_, text) = user(READER).ask(world, "GET", "/v1/sites/app", "");
    assert!(text.contains("\"KEY\":\"(hidden)\""), "{text}");
    assert!(user(MASTER).ask(world, "GET", "/v1/sites/app", "").1.contains(SECRET));
}

fn an_operator_moves_and_changes_no_record(world: &World) {
    let operator = user(OPERATOR);
    for path in LOOKS {
        assert_eq!(operator.status(world, "GET", path, ""), 200, "{path}");
    }
    let (status, text) = operator.ask(world, "POST", "/v1/instances/app/wake", "");
    assert_eq!(status, 200, "{text}");
    // What is under way, as an image that is being taken, may be in the way of these; the role is not.
    for path in ["/v1/instances/app/rest", "/v1/instances/app/stop", "/v1/nodes/n1/drain"] {
        let (status, text) = operator.ask(world, "POST", path, "");
        assert!(status != 403 && !text.contains("NGY0530"), "{path}: {status} {text}");
    }
    assert_eq!(operator.status(world, "GET", "/v1/instances/app/logs", ""), 200);
    operator.is_refused(world, "PUT", "/v1/settings/a", "{\"value\":\"x\"}", "all");
    operator.is_refused(world, "POST", "/v1/instances/app/exec", "{\"command\":[\"id\"]}", "all");
    operator.is_refused(world, "GET", "/v1/export", "", "all");
}

fn all_is_all(world: &World) {
    let master = user(MASTER);
    assert_eq!(master.status(world, "PUT", "/v1/settings/of-all", "{\"value\":\"x\"}"), 200);
    assert_eq!(master.status(world, "DELETE", "/v1/settings/of-all", ""), 200);
    let (status, text) = master.ask(world, "GET", "/v1/export", "");
    assert!(status == 200 && text.contains(SECRET), "{text}");
    assert!(world.cli(&["site", "list"]).contains("app"), "and so is root");
}

fn a_stranger_is_refused_whatever_it_asks(world: &World) {
    let stranger = user(STRANGER);
    for path in LOOKS {
        stranger.is_refused(world, "GET", path, "", "read");
    }
    stranger.is_refused(world, "DELETE", "/v1/sites/app", "", "all");
    // Not even which paths there are.
    assert_eq!(stranger.status(world, "GET", "/v1/nothing", ""), 403);
    // A tenant has no role.
    user(world.uid("alice")).is_refused(world, "GET", "/v1/status", "", "read");
}

fn a_group_gives_its_role(world: &World) {
    let with = |group| User { uid: STRANGER, group: Some(group) };
    assert_eq!(with(READERS).status(world, "GET", "/v1/status", ""), 200);
    // Another test has the application stop and start.
    with(READERS).is_refused(world, "POST", "/v1/instances/nobody/stop", "", "operate");
    assert_eq!(with(OPERATORS).status(world, "POST", "/v1/instances/nobody/stop", ""), 404);
    // The first group counts as well.
    let socket = world.path("run/admin.sock");
    let status = Command::new("setpriv")
        .args([format!("--reuid={STRANGER}"), format!("--regid={READERS}"), "--clear-groups".to_owned()])
        .args(["curl", "-sf", "-o", "/dev/null", "--unix-socket"])
        .arg(&socket)
        .arg("http://nagaya/v1/status")
        .status()
        .expect("setpriv and curl are installed");
    assert!(status.success());
}

/// Opens connections to the socket without a word on them, says how many, and keeps them until its input ends.
const HOARD: &str = r#"
import socket, sys
kept = []
for _ in range(200):
    s = socket.socket(socket.AF_UNIX)
    s.settimeout(5)
    try:
        s.connect(sys.argv[1])
    except OSError:
        break
    kept.append(s)
print(len(kept), flush=True)
sys.stdin.read()
"#;

/// Connections that the node serves at once.
const PLACES: usize = 64;

fn nobody_shuts_root_out_by_connections() {
    let world = &world();
    let socket = world.path("run/admin.sock");
    let script = world.path("hoard.py");
    machine::write(&script, HOARD);
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o644)).expect("our own file");
    let words = [script.to_string_lossy(), socket.to_string_lossy()];
    let mut hoards = Vec::new();
    let mut kept = 0;
    for user in [user(STRANGER), user(READER), user(OPERATOR), user(MASTER)] {
        let mut command = user.command("/usr/bin/python3", &[&words[0], &words[1]]);
        let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut hoard = piped.spawn().expect("python3 is installed");
        let mut line = String::new();
        let mut output = std::io::BufReader::new(hoard.stdout.take().expect("it is piped"));
        std::io::BufRead::read_line(&mut output, &mut line).expect("it says how many");
        kept += line.trim().parse::<usize>().expect("a number");
        hoards.push(hoard);
    }
    assert!(kept > PLACES, "only {kept} connections were made");
    // Root is served at once, though more connections are open than there are places.
    wait::until("root is answered", || world.try_status().is_some());
    assert!(world.cli(&["site", "list"]).contains("app"));
    for mut hoard in hoards {
        drop(hoard.stdin.take());
        let _ = hoard.wait();
    }
}
