//! nagaya as systemd's service: the unit that is shipped, started by a real service manager, serves sites of every kind.
//!
//! It takes the machine's own places (`/etc/nagaya`, `/usr/bin/nagaya`), so it runs only where `NAGAYA_UNIT` names the unit: in
//! the guest of `./dev guest --service`. Not here: what each kind of site can do (`static_files`, `cgi`, `php`, `proxy`, `app`).

use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::{env, fs};

use nagaya_tests::backend::Backend;
use nagaya_tests::client::{self, Response};
use nagaya_tests::suite::{Suite, Tests, skip};
use nagaya_tests::{machine, wait, world};
use serde_json::{Value, json};

use crate::programs;

pub const SUITE: Suite = Suite {
    name: "service",
    needs_root: true,
    tests: Tests::Alone(nagaya_tests::tests![
        sites_of_every_kind_answer,
        an_application_comes_back_from_its_image,
        an_application_reaches_what_is_outside_by_nat,
        doctor_finds_that_a_sandbox_can_be_made,
        a_mistake_in_the_configuration_does_not_reach_the_service,
    ]),
};

const UNIT: &str = "nagaya.service";
const PROGRAM: &str = "/usr/bin/nagaya";
const CONFIGURATION: &str = "/etc/nagaya/nagaya.toml";
const HOME: &str = "/srv/alice";
const ADDRESS: &str = "127.0.0.1:8080";

/// Applications rest only when they are told to.
const SETTINGS: &str = r#"
[[listen]]
address = "127.0.0.1:8080"

[receipts]
allow = ["127.0.0.1"]

[instances]
quiet_after = "365d"
frozen_after = "365d"
reclaimed_after = "365d"
image_after = "365d"
cold_after = "365d"
"#;

/// Whether this machine's systemd may be given the unit.
pub fn is_asked_for() -> bool {
    env::var_os("NAGAYA_UNIT").is_some()
}

/// The running service. There is one at a time.
struct Service {
    _alone: MutexGuard<'static, ()>,
}

impl Service {
    /// Installs the unit as docs/start.md says, and starts it.
    #[track_caller]
    fn start() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        // A test that failed has said so itself.
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let unit = env::var("NAGAYA_UNIT").expect("the suite runs only where it is set");
        fs::copy(world::program(), PROGRAM).expect("root writes to /usr/bin");
        machine::make_executable(Path::new(PROGRAM));
        fs::copy(unit, format!("/etc/systemd/system/{UNIT}")).expect("root writes to /etc");
        machine::write(Path::new(CONFIGURATION), SETTINGS);
        machine::run("systemctl", &["daemon-reload"]);
        let started = machine::output("systemctl", &["start", UNIT]);
        let service = Self { _alone: alone };
        assert!(started.status.success(), "{}", journal());
        service
    }

    /// Adds alice, if she is not there yet, and a site of hers at `NAME.test`.
    #[track_caller]
    fn add_site(&self, name: &str, backend: &Value) {
        let added = machine::output(PROGRAM, &["tenant", "add", "alice", "--home", HOME]);
        assert!(added.status.success() || cli(&["tenant", "list"]).contains("alice"), "{added:?}");
        let record =
            json!({ "name": name, "tenant": "alice", "hosts": [format!("{name}.test")], "backend": backend });
        let file = Path::new("/run/site.json");
        machine::write(file, json!({ "site": record }).to_string());
        cli(&["site", "import", "/run/site.json"]);
    }

    #[track_caller]
    fn get(&self, name: &str, target: &str) -> Response {
        let address: SocketAddr = ADDRESS.parse().expect("an address");
        let answer = client::get(address, &format!("{name}.test"), target);
        assert_eq!(answer.status, 200, "{answer:?}\n{}", journal());
        answer
    }

    /// Ends the service, and checks that it ended by itself and left nothing.
    #[track_caller]
    fn stop(self) {
        machine::run("systemctl", &["stop", UNIT]);
        let shown = machine::run("systemctl", &["show", "--property=Result,ActiveState,NRestarts", UNIT]);
        let mut shown: Vec<&str> = shown.lines().collect();
        shown.sort_unstable();
        assert_eq!(shown, ["ActiveState=inactive", "NRestarts=0", "Result=success"], "{}", journal());
        assert!(!Path::new("/run/nagaya").exists(), "the runtime directory is left");
        machine::wait_until_gone(PROGRAM);
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // For a test that failed; a stopped service stays as it is.
        let _ = machine::output("systemctl", &["stop", UNIT]);
    }
}

/// The end of what the service said.
fn journal() -> String {
    let said = machine::output("journalctl", &["--unit", UNIT, "--output=cat", "--no-pager", "--lines=40"]);
    String::from_utf8_lossy(&said.stdout).into_owned()
}

#[track_caller]
fn cli(arguments: &[&str]) -> String {
    machine::run(PROGRAM, arguments)
}

/// Writes a file of alice's.
#[track_caller]
fn write(name: &str, content: &str, mode: &str) {
    let path = format!("{HOME}/{name}");
    machine::write(Path::new(&path), content);
    machine::run("chmod", &[mode, &path]);
    let tenant: Value = serde_json::from_str(&cli(&["tenant", "show", "alice", "--json"])).expect("JSON");
    machine::run("chown", &["-R", &tenant["uid"].to_string(), HOME]);
}

#[track_caller]
fn add_application(service: &Service, name: &str) {
    let backend = json!({
        "kind": "app", "directory": "app", "command": ["./app.py"], "start_seconds": 120, "env": { "NAME": name },
    });
    service.add_site(name, &backend);
    write("app/app.py", programs::INSTANCE, "755");
}

fn sites_of_every_kind_answer() {
    let service = Service::start();
    service.add_site("files", &json!({ "kind": "static", "root": "files" }));
    write("files/index.html", "a file", "644");
    assert_eq!(service.get("files", "/").text(), "a file");

    service.add_site("cgi", &json!({ "kind": "cgi", "root": "cgi" }));
    write("cgi/who.cgi", "#!/bin/sh\nprintf 'Content-Type: text/plain\\n\\nuid %s' \"$(id -u)\"\n", "755");
    let tenant: Value = serde_json::from_str(&cli(&["tenant", "show", "alice", "--json"])).expect("JSON");
    let uid = format!("uid {}", tenant["uid"]);
    assert_eq!(service.get("cgi", "/who.cgi").text(), uid);

    service.add_site("php", &json!({ "kind": "php", "root": "php" }));
    write("php/index.php", "<?php echo 'uid ', getmyuid();", "644");
    assert_eq!(service.get("php", "/").text(), uid);

    let backend = Backend::answering(|peer, request| {
        peer.answer("200 OK", &format!("asked for {}", request.target()));
        true
    });
    service.add_site("http", &json!({ "kind": "http", "address": backend.address }));
    assert_eq!(service.get("http", "/x").text(), "asked for /x");

    add_application(&service, "app");
    assert_eq!(service.get("app", "/who").text(), uid);
    let status: Value = serde_json::from_str(&cli(&["status", "--json"])).expect("JSON");
    assert_eq!(status["healthy"], true, "{status}");
    service.stop();
}

fn an_application_comes_back_from_its_image() {
    if !Path::new("/usr/local/lib/nagaya/criu").exists() {
        skip("there is no CRIU in this guest");
    }
    let service = Service::start();
    add_application(&service, "rests");
    let run = service.get("rests", "/run").text();
    let shown =
        || -> Value { serde_json::from_str(&cli(&["instance", "show", "rests", "--json"])).expect("JSON") };
    wait::until("it has an image, or says why not", || {
        let row = shown();
        assert!(row["note"].is_null(), "{row}\n{}", journal());
        row["image"].is_object()
    });
    wait::until("it is not in use any more", || {
        machine::output(PROGRAM, &["instance", "rest", "rests", "--to", "image"]).status.success()
    });
    assert_eq!(service.get("rests", "/run").text(), run, "the same run goes on");
    service.stop();
}

fn an_application_reaches_what_is_outside_by_nat() {
    let service = Service::start();
    let backend = json!({
        "kind": "app", "directory": "nat", "command": ["python3", "reaches.py"], "start_seconds": 120, "outbound": "nat",
    });
    service.add_site("nat", &backend);
    let answers = include_str!("../../../crates/keeper/fixtures/answers.py");
    let reaches = include_str!("../../../crates/keeper/fixtures/reaches.py");
    write("nat/reaches.py", &format!("{reaches}{answers}"), "644");
    // Its first word tells that the relay's network is there; where it leads nothing answers.
    let said = service.get("nat", "/try/127.0.0.1/9").text();
    assert_eq!(said, "ConnectionRefusedError");
    let row: Value = serde_json::from_str(&cli(&["instance", "show", "nat", "--json"])).expect("JSON");
    assert!(row["note"].is_null(), "{row}");
    service.stop();
}

fn doctor_finds_that_a_sandbox_can_be_made() {
    let service = Service::start();
    // With the rights that the unit leaves, and not with root's.
    let status = wait::until_some("the node has tried one", || {
        let status: Value = serde_json::from_str(&cli(&["status", "--json"])).expect("JSON");
        status["keeper"]["sandbox"].is_string().then_some(status)
    });
    assert_eq!(status["keeper"]["sandbox"], "ok", "{status}");
    let checks: Value = serde_json::from_str(&cli(&["doctor", "--json"])).expect("JSON");
    let rows = checks.as_array().expect("a list");
    for name in ["sandbox", "node-sandbox", "tenants", "cgroup-v2"] {
        let row = rows.iter().find(|row| row["name"] == name).expect("there is such a row");
        assert_eq!(row["state"], "ok", "{row}");
    }
    assert!(!journal().contains("NGY0348"), "it has a group of its own: {}", journal());
    service.stop();
}

fn a_mistake_in_the_configuration_does_not_reach_the_service() {
    let service = Service::start();
    let pid = machine::run("systemctl", &["show", "--property=MainPID", UNIT]);
    machine::write(Path::new(CONFIGURATION), "[[listen]]\naddress = 7\n");
    let reloaded = machine::output("systemctl", &["reload", UNIT]);
    assert!(!reloaded.status.success(), "the mistake is told");
    machine::write(Path::new(CONFIGURATION), SETTINGS);
    machine::run("systemctl", &["reload", UNIT]);
    assert_eq!(machine::run("systemctl", &["show", "--property=MainPID", UNIT]), pid);
    service.stop();
}
