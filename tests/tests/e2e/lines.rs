//! What a full line holds back, and what it does not: files, challenges, preflights, and who was let in before.
//!
//! Not here: the line itself (`limits`, `admission`).

use nagaya_tests::client::{self, Response};
use nagaya_tests::suite::{Suite, Tests};
use nagaya_tests::world::World;
use nagaya_tests::{machine, wait};
use serde_json::{Value, json};

use crate::admission::{RUNNING, ask as ask_shop, builder, node_of, occupy};
use crate::limits::Held;

pub const SUITE: Suite = Suite {
    name: "lines",
    needs_root: true,
    tests: Tests::Alone(nagaya_tests::tests![
        files_meet_no_line,
        a_lane_that_a_rule_names_holds_files,
        a_preflight_passes_a_full_line,
        visitor_already_let_in_goes_before_newcomers,
    ]),
};

const VERSIONS: [&str; 2] = ["--http1.1", "--http2-prior-knowledge"];

/// A PHP program that runs until it is let go.
const HELD: &str = "<?php header('Access-Control-Allow-Origin: https://app.example');
    if ($_SERVER['REQUEST_METHOD'] === 'OPTIONS') exit;
    file_put_contents('begun', ''); while (!file_exists('go')) { clearstatcache(); usleep(1000); } echo 'done';";

/// The same as a CGI program.
const HELD_CGI: &str = "#!/bin/sh\nprintf 'Content-Type: text/plain\\r\\n\\r\\n'\n: > begun\n\
    while [ ! -e go ]; do sleep 0.01; done\n";

/// A site of alice's, in whose line nobody waits.
fn site(name: &str, backend: Value) -> Value {
    json!({ "name": name, "tenant": "alice", "hosts": [format!("{name}.test")], "backend": backend,
        "admission": { "waiting": 0, "tickets": false } })
}

/// A tenant of whose requests one runs at once.
fn world() -> World {
    let world = World::builder()
        .set("edge.networks", "requests_per_second = 100000\nrequests_burst = 100000")
        .set("tenants", "max_concurrent = 1\nphp_workers = 2")
        .tenant("alice")
        .site(site("www", json!({ "kind": "static", "root": "www" })))
        .site(site("php", json!({ "kind": "php", "root": "php", "front_controller": "held.php" })))
        .site(site("plain", json!({ "kind": "php", "root": "plain" })))
        .site(site("cgi", json!({ "kind": "cgi", "root": "cgi" })))
        .start();
    world.write("alice", "php/held.php", HELD);
    world.write("alice", "plain/a.php", "<?php echo 1;");
    world.write_program("alice", "cgi/held.cgi", HELD_CGI);
    for root in ["www", "php", "cgi"] {
        world.write("alice", &format!("{root}/a.txt"), "alpha");
        world.write("alice", &format!("{root}/.well-known/acme-challenge/token"), "challenge");
    }
    world
}

/// Asks by curl: the head and the body.
fn ask(world: &World, version: &str, host: &str, target: &str, more: &[&str]) -> String {
    let connect = format!("{host}:80:{}", world.http());
    let url = format!("http://{host}{target}");
    let mut arguments = vec!["-sSi", version, "--connect-to", &connect];
    arguments.extend(more);
    arguments.push(&url);
    machine::run("curl", &arguments)
}

fn files_meet_no_line() {
    let world = world();
    for (host, program, root) in [("php.test", "/held.php", "php"), ("cgi.test", "/held.cgi", "cgi")] {
        let mut running = client::Connection::open(world.http());
        running.send(format!("GET {program} HTTP/1.1\r\nHost: {host}\r\n\r\n"));
        wait::until("it runs", || world.home("alice").join(root).join("begun").exists());
        world.get(host, program).expect(503);
        for version in VERSIONS {
            for site in ["www.test", "php.test", "cgi.test"] {
                for (target, text) in
                    [("/a.txt", "alpha"), ("/.well-known/acme-challenge/token", "challenge")]
                {
                    let answer = ask(&world, version, site, target, &[]);
                    assert!(answer.contains(" 200") && answer.ends_with(text), "{version} {site}: {answer}");
                }
            }
            // What no file has is a program's, where there is one for it.
            assert!(ask(&world, version, "php.test", "/none", &[]).contains(" 503"));
            assert!(ask(&world, version, "cgi.test", "/none", &[]).contains(" 404"));
        }
        for site in ["www.test", host] {
            let authority = format!(":authority: {site}");
            let url = format!("http://{}/a.txt", world.http());
            let burst = ["-n", "6000", "-c", "24", "-m", "100", "-H", &authority, &url];
            let output = machine::run("h2load", &burst);
            assert!(output.contains("status codes: 6000 2xx"), "{site}: {output}");
        }
        world.write("alice", &format!("{root}/go"), "");
        running.response().expect(200);
    }
    world.stop();
}

fn a_lane_that_a_rule_names_holds_files() {
    let world = World::builder()
        .rule("all.rb", "access_checker", "lane \"all\", run: 1\n", "")
        .site_of("alice", "php", json!({ "kind": "php", "root": "php" }))
        .start();
    world.write("alice", "php/held.php", HELD);
    world.write("alice", "php/a.txt", "alpha");
    let begin = |target: &str| {
        let mut connection = client::Connection::open(world.http());
        connection.send(format!("GET {target} HTTP/1.1\r\nHost: php.test\r\n\r\n"));
        connection
    };
    let mut running = begin("/held.php");
    wait::until("it runs", || world.home("alice").join("php/begun").exists());
    let mut file = begin("/a.txt");
    wait::until("the file waits", || world.metric("nagaya_requests_waiting", "") == 1.0);
    world.write("alice", "php/go", "");
    running.response().expect(200);
    assert_eq!(file.response().expect(200).text(), "alpha");
    world.stop();
}

fn a_preflight_passes_a_full_line() {
    let world = world();
    let mut running = client::Connection::open(world.http());
    running.send("GET /held.php HTTP/1.1\r\nHost: php.test\r\n\r\n");
    wait::until("it runs", || world.home("alice").join("php/begun").exists());
    let origin = "Origin: https://app.example";
    let asks = ["-X", "OPTIONS", "-H", origin, "-H", "Access-Control-Request-Method: POST"];
    for version in VERSIONS {
        let preflight = ask(&world, version, "php.test", "/held.php", &asks);
        let told = preflight.to_lowercase();
        assert!(told.contains(" 200"), "{preflight}");
        assert!(told.contains("access-control-allow-origin: https://app.example"), "{preflight}");
        // No preflight: it stands in line.
        assert!(ask(&world, version, "php.test", "/held.php", &asks[..2]).contains(" 503"));
        let may_read = |host: &str, target: &str, origin: &str| {
            let answer = ask(&world, version, host, target, &["-H", origin]).to_lowercase();
            assert!(answer.contains(" 503"), "{answer}");
            assert!(!answer.contains("access-control-allow-credentials"), "{answer}");
            answer.contains("access-control-allow-origin: https://app.example")
                && answer.contains("access-control-expose-headers: retry-after, nagaya-ticket")
        };
        assert!(may_read("php.test", "/held.php", origin));
        assert!(!may_read("php.test", "/held.php", "Origin: https://evil.example"));
        assert!(!may_read("plain.test", "/a.php", origin), "that site has allowed nobody");
    }
    world.write("alice", "php/go", "");
    running.response().expect(200);
    world.stop();
}

/// The cookie that makes who was let in a visitor.
fn visit(answer: &Response) -> Option<String> {
    let cookies = answer.headers.iter().filter(|(name, _)| name.eq_ignore_ascii_case("set-cookie"));
    let text = cookies.map(|(_, value)| value).find(|value| value.starts_with("nagaya-visit-"))?;
    text.split(';').next().map(|pair| format!("Cookie: {pair}\r\n"))
}

fn visitor_already_let_in_goes_before_newcomers() {
    let held = Held::start();
    let world = node_of(builder(), &held);
    let set = |more: &[&str]| world.cli(&[&["site", "set", "shop"], more].concat());
    let is_waiting = |count: f64| world.metric("nagaya_requests_waiting", "") == count;
    let wait_once = |client: u8, fields: &str| {
        set(&["--wait-seconds", "60"]);
        let mut first = occupy(&world, &held);
        let mut second = ask_shop(&world, "/second", client, fields);
        wait::until("it waits", || is_waiting(1.0));
        held.let_go(2);
        assert!(visit(&first.response().expect(200)).is_none(), "it has not waited");
        let answer = second.response().expect(200);
        set(&["--wait-seconds", "0"]);
        answer
    };
    let cookie = visit(&wait_once(7, "")).expect("it has waited");

    // It is put in no line: the next permit is its own, though nobody else may wait.
    let mut running = occupy(&world, &held);
    for (client, fields) in [(8, ""), (9, &*cookie), (7, "Cookie: nagaya-visit-00000000=x\r\n")] {
        ask_shop(&world, RUNNING, client, fields).response().expect(503);
    }
    let mut visitor = ask_shop(&world, "/visit", 7, &cookie);
    wait::until("it waits for the permit", || is_waiting(1.0));
    held.let_go(2);
    running.response().expect(200);
    assert!(visit(&visitor.response().expect(200)).is_none(), "a visit is not made longer by its requests");

    set(&["--visit-seconds", "0"]);
    assert!(visit(&wait_once(11, "")).is_none());
    world.stop();
}
