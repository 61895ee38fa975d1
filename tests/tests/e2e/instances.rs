//! Instances: real applications that start with their first request, rest deeper and deeper, wake for the next one, and
//! say what that took.
//!
//! Not here: what a hostile application can try (`keeper/tests/kernel`), proxying as such (`proxy`).

use std::path::Path;
use std::process::Command;
use std::sync::mpsc;

use nagaya_tests::client::{self, Connection, Response};
use nagaya_tests::suite::{Suite, Tests, skip};
use nagaya_tests::world::World;
use nagaya_tests::{machine, wait};
use serde_json::{Value, json};

use crate::programs;
use crate::resting::{
    add_site, builder, builder_without_criu, check, get, has, listed, rest, until_image, wake, woken_from,
};

pub const SUITE: Suite = Suite {
    name: "instances",
    needs_root: true,
    tests: Tests::Sharing(
        world,
        nagaya_tests::tests![
            a_first_request_starts_an_application_and_reports_the_time,
            the_same_is_in_the_log_the_metrics_and_the_explanation,
            a_sandbox_fork_is_small_and_programs_keep_normal_pages,
            a_socket_a_port_and_a_descriptor_are_ways_to_listen,
            phps_own_server_is_an_application,
            an_idle_application_rests_in_steps_and_keeps_its_memory,
            an_application_returns_from_its_image_as_it_was_at_start,
            fifty_first_requests_start_it_once,
            a_crash_between_two_requests_is_invisible_to_a_get,
            a_request_that_kills_its_application_is_retried_once,
            a_post_is_never_done_twice,
            an_upgraded_connection_keeps_an_application_awake,
            a_slow_answer_keeps_it_awake,
            a_crawler_is_answered_without_waking_anybody,
            a_crawler_gets_pages_of_a_site_that_is_awake,
            an_operator_lists_wakes_rests_and_stops_instances,
            a_command_runs_in_an_instance_as_if_it_ran_here,
            time_in_a_database_is_told_of_a_request_that_was_alone,
            time_in_a_database_on_a_unix_socket_is_told_too,
            impossible_command_of_an_operator_is_refused_with_a_reason,
            top_shows_who_runs_and_rests,
            a_record_with_mistakes_is_refused_with_all_of_them,
            a_secret_comes_from_its_file_and_is_in_no_record,
            one_that_is_not_ready_gets_no_request,
            a_client_that_leaves_waits_for_no_wake,
        ],
    ),
};

/// Those that end a process which the others stand on.
pub const ALONE: Suite = Suite {
    name: "instances_alone",
    needs_root: true,
    tests: Tests::Alone(nagaya_tests::tests![
        a_keeper_that_is_started_anew_is_waited_for,
        a_new_keeper_brings_back_from_images_from_its_first_moment,
        without_a_criu_that_works_applications_rest_without_images,
        an_instance_outlives_a_killed_edge,
    ]),
};

const CRAWLERS: &str =
    "answer 503, \"Not now.\\n\" if request.header[\"User-Agent\"].to_s.include?(\"crawler\")\n";

/// Those are welcome where they wake nobody.
const INDEXERS: &str = "answer 503, \"It rests.\\n\" if site_rests? and request.user_agent =~ /indexer/\n";

/// All that a CRIU says that Debian 12 has.
const OLD_CRIU: &str = "#include <stdio.h>\nint main(void) { puts(\"Version: 3.17.1\"); return 0; }\n";

fn world() -> World {
    let world = builder()
        .rule("crawlers", "access_checker", CRAWLERS, "")
        .rule("indexers", "access_checker", INDEXERS, "")
        .start();
    world.write_program("alice", "app/app.py", programs::INSTANCE);
    world.write("alice", "app/secret", "hunter2\n");
    world.write("alice", "php/index.php", "<?php echo 'php ', getmypid(), ' ', PHP_SAPI;");
    world
}

/// A site at `NAME.test` whose application has its name on its command line, so that its processes can be told from others.
fn add(world: &World, name: &str, more: Value) {
    let backend = json!({
        "kind": "app", "directory": "app", "command": ["./app.py", machine::mark("instances", name)], "start_seconds": 20,
        "env": { "NAME": name },
    });
    add_site(world, name, backend, more);
}

/// What one run of the program calls itself: another one after each start, the same for as long as its memory lives.
#[track_caller]
fn run_of(world: &World, name: &str) -> String {
    get(world, name, "/run").expect(200).text()
}

fn starts(world: &World, name: &str) -> usize {
    let path = world.home("alice").join(format!("app/{name}.starts"));
    std::fs::read_to_string(path).unwrap_or_default().lines().count()
}

fn tier(world: &World, name: &str) -> String {
    listed(world, name)["tier"].as_str().expect("every instance has a tier").to_owned()
}

#[track_caller]
fn until_tier(world: &World, name: &str, tiers: &[&str]) {
    wait::until(&format!("{name} rests at one of {tiers:?}"), || tiers.contains(&&*tier(world, name)));
}

fn processes(name: &str) -> Vec<i32> {
    machine::processes_with(&machine::mark("instances", name))
}

// === Waking ===

fn a_first_request_starts_an_application_and_reports_the_time(world: &World) {
    add(world, "first", json!({}));
    assert!(processes("first").is_empty());
    let answer = get(world, "first", "/who").expect(200);
    assert_eq!(answer.text(), format!("uid {}", world.uid("alice")));
    let wake_of_first = wake(&answer).expect("it waited for the start");
    for part in [";from=cold", ";boot=", ";connect=", ";first_byte="] {
        assert!(wake_of_first.contains(part), "{part} is not in {wake_of_first}");
    }
    let timing = answer.header("server-timing").expect("timing goes with the receipt");
    assert!(timing.contains("wake;dur=") && timing.contains("wake-boot;dur="), "{timing}");
    let again = get(world, "first", "/who").expect(200);
    assert_eq!(wake(&again), None, "the second one finds it running");
    assert_eq!(starts(world, "first"), 1);
}

fn the_same_is_in_the_log_the_metrics_and_the_explanation(world: &World) {
    add(world, "told", json!({}));
    let metric = |name: &str, labels: &str| world.metric(name, labels);
    let before = metric("nagaya_instance_wake_stage_seconds_count", "stage=\"boot\"");
    get(world, "told", "/run?told").expect(200);
    let line = wait::until_some("the request is logged", || {
        world.access_log().into_iter().find(|line| line["target"] == "/run?told")
    });
    let us = |value: &Value| value.as_u64().unwrap_or_else(|| panic!("not a number: {value} in {line}"));
    assert_eq!(line["woken"]["from"], "cold", "{line}");
    assert!(us(&line["woken"]["boot_us"]) > 0 && us(&line["wake_us"]) > 0, "{line}");
    assert!(us(&line["wake_us"]) <= us(&line["duration_us"]), "{line}");
    let id = line["id"].as_str().expect("every request has an id");
    let text = world.cli(&["explain", id]);
    for part in ["waking", "Waking its application (it was cold)", "boot", "first_byte"] {
        assert!(text.contains(part), "'{part}' is not in\n{text}");
    }
    assert!(metric("nagaya_instance_wake_stage_seconds_count", "stage=\"boot\"") > before);
    assert!(metric("nagaya_instance_wake_wait_seconds_count", "from=\"cold\"") > 0.0);
}

fn a_sandbox_fork_is_small_and_programs_keep_normal_pages(world: &World) {
    add(world, "paged", json!({}));
    run_of(world, "paged");
    let number = |id: i32, name: &str| -> i32 {
        let value = machine::status_field(id, name).unwrap_or_else(|| panic!("{id} has no {name}"));
        value.split_whitespace().next().and_then(|number| number.parse().ok()).expect("a number")
    };
    let own = number(world.pid(), "THP_enabled");
    let program = || *processes("paged").first().expect("it runs");
    let init = number(program(), "PPid");
    assert_eq!(number(init, "THP_enabled"), 0, "hundreds of processes share its memory");
    let anonymous = number(init, "RssAnon");
    // A build that is not optimised has more pages of its own: the addresses in it that are filled in when it is started.
    assert!(anonymous < 6144, "{anonymous} KiB of it are to be walked through in each");
    for id in [program(), world.pid_of("keeper"), world.pid_of("edge")] {
        assert_eq!(number(id, "THP_enabled"), own, "{}", machine::command_line(id));
    }
    let rest = || world.try_cli(&["instance", "rest", "paged", "--to", "image"]).status.success();
    wait::until("its visitor has gone", rest);
    wait::until("it is an image", || processes("paged").is_empty());
    run_of(world, "paged");
    assert_eq!(number(program(), "THP_enabled"), own, "also one that an image brought back");
}

fn a_socket_a_port_and_a_descriptor_are_ways_to_listen(world: &World) {
    for listen in ["socket", "port", "fd"] {
        let name = format!("by-{listen}");
        add(world, &name, json!({ "listen": listen }));
        assert_eq!(get(world, &name, "/listens").expect(200).text(), listen);
    }
}

fn phps_own_server_is_an_application(world: &World) {
    if !std::path::Path::new("/usr/bin/php").exists() {
        skip("there is no php here");
    }
    let command = ["/usr/bin/php", "-S", "127.0.0.1:{port}", "-t", "."];
    add(world, "php-server", json!({ "listen": "port", "directory": "php", "command": command }));
    let text = get(world, "php-server", "/").expect(200).text();
    assert!(text.starts_with("php ") && text.ends_with("cli-server"), "{text}");
}

fn fifty_first_requests_start_it_once(world: &World) {
    add(world, "fifty", json!({}));
    let address = world.http();
    let (tell, told) = mpsc::channel();
    for _ in 0..50 {
        let tell = tell.clone();
        std::thread::spawn(move || tell.send(client::get(address, "fifty.test", "/run").expect(200).text()));
    }
    drop(tell);
    let mut runs: Vec<_> = told.iter().collect();
    assert_eq!(runs.len(), 50);
    runs.dedup();
    assert_eq!(runs.len(), 1, "{runs:?}");
    assert_eq!(starts(world, "fifty"), 1);
}

fn one_that_is_not_ready_gets_no_request(world: &World) {
    add(
        world,
        "warming",
        json!({ "ready": { "path": "/ready" }, "env": { "NAME": "warming", "WARM_UP": "3" } }),
    );
    let answer = get(world, "warming", "/asked-before-ready").expect(200);
    assert_eq!(answer.text(), "no", "the first request came when it was ready");
    assert!(wake(&answer).expect("it was started").contains(";ready="), "{answer:?}");
}

fn a_client_that_leaves_waits_for_no_wake(world: &World) {
    add(
        world,
        "left",
        json!({ "command": ["/bin/sh", "-c", "while :; do sleep 1; done", machine::mark("instances", "left")] }),
    );
    let waiting = || {
        let shown: Value =
            serde_json::from_str(&world.cli(&["instance", "show", "left", "--json"])).expect("JSON");
        shown["waiting"].as_u64().expect("a number of waiters")
    };
    let mut connections = [(); 3].map(|()| Connection::open(world.http()));
    for connection in &mut connections {
        connection.send("GET /run HTTP/1.1\r\nHost: left.test\r\n\r\n");
    }
    wait::until("they wait", || waiting() > 0);
    drop(connections);
    wait::until("nobody waits", || waiting() == 0);
}

// === Resting ===

fn an_idle_application_rests_in_steps_and_keeps_its_memory(world: &World) {
    let never = json!({ "quiet": 1, "frozen": 2, "reclaimed": 4, "image": "never", "cold": "never" });
    add(world, "rests", json!({ "idle": never }));
    let run = run_of(world, "rests");
    until_tier(world, "rests", &["frozen"]);
    let answer = get(world, "rests", "/run").expect(200);
    assert_eq!(woken_from(&answer), "frozen");
    assert_eq!(answer.text(), run, "its memory is what it was");
    if has(world, "swap") {
        until_tier(world, "rests", &["reclaimed"]);
        let answer = get(world, "rests", "/run").expect(200);
        assert_eq!((woken_from(&answer).as_str(), answer.text()), ("reclaimed", run));
    }
    let none = json!({ "quiet": 0, "frozen": 0, "reclaimed": "never", "image": 1, "cold": 1 });
    add(world, "ends", json!({ "idle": none }));
    run_of(world, "ends");
    until_tier(world, "ends", &["image", "cold"]);
    wait::until("it has no process", || processes("ends").is_empty());
    let answer = get(world, "ends", "/run").expect(200);
    assert!(matches!(woken_from(&answer).as_str(), "image" | "cold"), "{answer:?}");
}

fn an_application_returns_from_its_image_as_it_was_at_start(world: &World) {
    add(world, "imaged", json!({ "release": "1", "warm_up": ["/count", "/count"] }));
    let run = run_of(world, "imaged");
    assert_eq!(get(world, "imaged", "/count").expect(200).text(), "3", "two were of the warm-up");
    until_image(world, "imaged");
    rest(world, "imaged", "image");
    wait::until("it has no process", || processes("imaged").is_empty());
    assert_eq!(tier(world, "imaged"), "image");
    let answer = get(world, "imaged", "/run").expect(200);
    assert_eq!((woken_from(&answer).as_str(), answer.text()), ("image", run), "the same run goes on");
    assert!(wake(&answer).expect("it woke").contains(";restore="), "{answer:?}");
    assert_eq!(get(world, "imaged", "/count").expect(200).text(), "3", "no visitor's request is in an image");
    assert_eq!(starts(world, "imaged"), 1);
}

fn a_slow_answer_keeps_it_awake(world: &World) {
    add(
        world,
        "slow",
        json!({ "idle": { "quiet": 0, "frozen": 0, "reclaimed": "never", "image": "never", "cold": "never" } }),
    );
    let slow = get(world, "slow", "/slow").expect(200);
    // It writes a line every tenth of a second, for longer than every time after which it may rest.
    assert_eq!(slow.text().lines().count(), 20);
    until_tier(world, "slow", &["frozen"]);
}

fn an_upgraded_connection_keeps_an_application_awake(world: &World) {
    add(
        world,
        "socket",
        json!({ "idle": { "quiet": 0, "frozen": 0, "reclaimed": "never", "image": "never", "cold": "never" } }),
    );
    let mut connection = Connection::open(world.http());
    connection
        .send("GET /echo HTTP/1.1\r\nHost: socket.test\r\nConnection: upgrade\r\nUpgrade: echo\r\n\r\n");
    let answer = connection.head();
    assert_eq!(answer.status, 101, "{answer:?}");
    // Another request begins and ends meanwhile, and half a second later its thread needs the instance no more for it.
    run_of(world, "socket");
    for round in 0..20 {
        let word = format!("{round:04}");
        assert_eq!(connection.send(&word).bytes(4), word.as_bytes());
        assert_eq!(tier(world, "socket"), "running");
    }
    drop(connection);
    until_tier(world, "socket", &["frozen"]);
}

fn a_crawler_is_answered_without_waking_anybody(world: &World) {
    add(world, "crawled", json!({}));
    let answer =
        client::get_with(world.http(), "crawled.test", "/run", "User-Agent: a crawler\r\n").expect(503);
    assert_eq!(answer.text(), "Not now.\n");
    assert_eq!(starts(world, "crawled"), 0);
    run_of(world, "crawled");
    assert_eq!(starts(world, "crawled"), 1);
}

fn a_crawler_gets_pages_of_a_site_that_is_awake(world: &World) {
    add(world, "indexed", json!({}));
    let index = || client::get_with(world.http(), "indexed.test", "/run", "User-Agent: an indexer\r\n");
    // More than once: what the rule said is remembered.
    (0..5).for_each(|_| assert_eq!(index().expect(503).text(), "It rests.\n"));
    assert_eq!(starts(world, "indexed"), 0);
    let run = run_of(world, "indexed");
    (0..5).for_each(|_| assert_eq!(index().expect(200).text(), run));
    rest(world, "indexed", "frozen");
    (0..5).for_each(|_| assert_eq!(index().expect(503).text(), "It rests.\n"));
    assert_eq!(tier(world, "indexed"), "frozen");
    assert_eq!(run_of(world, "indexed"), run);
    assert_eq!(index().expect(200).text(), run);
}

// === What goes wrong ===

fn a_crash_between_two_requests_is_invisible_to_a_get(world: &World) {
    for round in 1..=3 {
        let name = format!("crash-{round}");
        add(world, &name, json!({}));
        run_of(world, &name);
        let before = processes(&name);
        assert!(!before.is_empty());
        for id in &before {
            machine::signal(*id, "KILL");
        }
        // At once: the edge may still have connections to what has just ended.
        run_of(world, &name);
        let after = processes(&name);
        assert!(after.iter().all(|id| !before.contains(id)), "{before:?} {after:?}");
    }
}

fn a_request_that_kills_its_application_is_retried_once(world: &World) {
    add(world, "fatal", json!({}));
    run_of(world, "fatal");
    let answer = get(world, "fatal", "/exit");
    assert!(matches!(answer.status, 502 | 503), "{answer:?}");
    assert!(starts(world, "fatal") <= 2, "{} starts", starts(world, "fatal"));
    wait::until("it serves again", || get(world, "fatal", "/run").status == 200);
}

fn a_post_is_never_done_twice(world: &World) {
    add(world, "post", json!({}));
    run_of(world, "post");
    let answer = client::post(world.http(), "post.test", "/note-and-exit", "x");
    assert_eq!(answer.status, 502, "{answer:?}");
    let noted =
        std::fs::read_to_string(world.home("alice").join("app/post.notes")).expect("it was done once");
    assert_eq!(noted.lines().count(), 1, "{noted}");
}

fn a_keeper_that_is_started_anew_is_waited_for() {
    let world = world();
    add(&world, "survivor", json!({}));
    run_of(&world, "survivor");
    let keeper = world.pid_of("keeper");
    machine::signal(keeper, "KILL");
    wait::until("the old one is gone", || !machine::is_running(keeper));
    get(&world, "survivor", "/run").expect(200);
    world.stop();
}

/// Also what is to run always, which is started before anybody asks for anything.
fn a_new_keeper_brings_back_from_images_from_its_first_moment() {
    let world = world();
    add(&world, "kept", json!({ "min": 1 }));
    add(&world, "asked", json!({}));
    let runs = ["kept", "asked"].map(|name| {
        let run = run_of(&world, name);
        until_image(&world, name);
        run
    });
    let keeper = world.pid_of("keeper");
    machine::signal(keeper, "KILL");
    wait::until("the old one is gone", || !machine::is_running(keeper));
    assert_eq!([run_of(&world, "asked"), run_of(&world, "kept")], [runs[1].clone(), runs[0].clone()]);
    assert_eq!((starts(&world, "asked"), starts(&world, "kept")), (1, 1));
    world.stop();
}

/// Running, frozen, and while it serves a request.
fn an_instance_outlives_a_killed_edge() {
    let world = world();
    add(&world, "outlives", json!({}));
    let run = run_of(&world, "outlives");
    let before = processes("outlives");
    for tier in ["running", "frozen", "serving"] {
        if tier == "frozen" {
            rest(&world, "outlives", "frozen");
        }
        let _served = (tier == "serving").then(|| {
            let mut connection = Connection::open(world.http());
            connection.send("GET /slow HTTP/1.1\r\nHost: outlives.test\r\n\r\n");
            assert_eq!(connection.head().status, 200);
            connection
        });
        let edge = world.pid_of("edge");
        machine::signal(edge, "KILL");
        wait::until("the old one is gone", || !machine::is_running(edge));
        assert_eq!(run_of(&world, "outlives"), run, "{tier}");
        assert_eq!((processes("outlives"), starts(&world, "outlives")), (before.clone(), 1), "{tier}");
    }
    // What the dead ones used keeps nobody awake.
    rest(&world, "outlives", "frozen");
    assert_eq!(run_of(&world, "outlives"), run);
    world.stop();
}

fn a_record_with_mistakes_is_refused_with_all_of_them(world: &World) {
    let output = world.try_cli(&[
        "site",
        "add",
        "wrong",
        "--tenant",
        "alice",
        "--host",
        "wrong.test",
        "--backend",
        "app",
        "--directory",
        "app",
        "--command",
        "{port}",
        "--listen",
        "fd",
        "--base",
        "relative",
        "--ready",
        "no-slash",
        "--release",
        "a b",
        "--idle",
        "frozen=9",
        "--idle",
        "reclaimed=8",
        "--max",
        "17",
        "--json",
    ]);
    assert!(!output.status.success());
    let problem: Value = serde_json::from_slice(&output.stderr).expect("a problem document");
    let fields: Vec<_> = problem["mistakes"]
        .as_array()
        .expect("mistakes")
        .iter()
        .filter_map(|m| m["field"].as_str())
        .collect();
    for field in ["command", "base", "ready.path", "release", "idle.reclaimed", "max"] {
        assert!(fields.contains(&field), "{field} is not in {fields:?}");
    }
}

fn a_secret_comes_from_its_file_and_is_in_no_record(world: &World) {
    add(world, "secret", json!({ "secrets": { "PASSWORD": "app/secret" } }));
    assert_eq!(get(world, "secret", "/password").expect(200).text(), "hunter2");
    for shown in [world.cli(&["site", "show", "secret"]), world.cli(&["instance", "show", "secret"])] {
        assert!(!shown.contains("hunter2"), "{shown}");
    }
}

// === Commands ===

fn an_operator_lists_wakes_rests_and_stops_instances(world: &World) {
    add(world, "ops", json!({}));
    world.cli(&["instance", "wake", "ops"]);
    assert_eq!((starts(world, "ops"), tier(world, "ops").as_str()), (1, "running"));
    let run = run_of(world, "ops");
    rest(world, "ops", "frozen");
    assert_eq!(tier(world, "ops"), "frozen");
    let table = world.cli(&["instance", "list", "--tenant", "alice"]);
    assert!(table.lines().any(|line| line.starts_with("ops ") && line.contains("frozen")), "{table}");
    assert_eq!(run_of(world, "ops"), run);
    let shown = world.cli(&["instance", "show", "ops"]);
    assert!(shown.lines().any(|line| line.starts_with("site ") && line.ends_with("ops")), "{shown}");
    let logs = world.cli(&["instance", "logs", "ops"]);
    assert!(logs.contains("the application ops listens"), "{logs}");
    world.cli(&["instance", "stop", "ops"]);
    wait::until("it has no process", || processes("ops").is_empty());
    assert!(matches!(tier(world, "ops").as_str(), "cold" | "image"));
    let answer = get(world, "ops", "/run").expect(200);
    assert!(matches!(woken_from(&answer).as_str(), "cold" | "image"), "{answer:?}");
}

fn a_command_runs_in_an_instance_as_if_it_ran_here(world: &World) {
    add(world, "commanded", json!({}));
    let exec = |more: &[&str]| world.try_cli(&[&["instance", "exec"], more].concat());
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let refused = exec(&["commanded", "--", "true"]);
    assert_eq!(refused.status.code(), Some(125));
    assert!(said(&refused.stderr).contains("`--wake` wakes it first") && processes("commanded").is_empty());
    let done =
        exec(&["--wake", "commanded", "--", "sh", "-c", "echo $NAME; hostname; echo aside >&2; exit 7"]);
    assert_eq!((said(&done.stdout), said(&done.stderr)), ("commanded\ncommanded\n".into(), "aside\n".into()));
    assert_eq!(done.status.code(), Some(7));
    let many = exec(&["commanded", "--", "sh", "-c", "yes | head -c 300000"]);
    assert_eq!((many.stdout.len(), many.status.code()), (300_000, Some(0)), "more than a pipe holds");
    let killed = exec(&["commanded", "--", "sh", "-c", "kill -15 $$"]);
    assert_eq!(killed.status.code(), Some(128 + 15));
    let missing = exec(&["commanded", "--", "no-such-program"]);
    assert_eq!(missing.status.code(), Some(125));
    assert!(said(&missing.stderr).contains("[NGY0332]"), "{}", said(&missing.stderr));
    assert_eq!(starts(world, "commanded"), 1);
}

/// Speaks as much of MySQL's protocol as it takes: greets, lets anybody in, and answers each query once it is told to.
fn serve_queries(mut stream: impl std::io::Read + std::io::Write, held: &mpsc::Receiver<()>) {
    let packet =
        |number: u8, body: &[u8]| [&[u8::try_from(body.len()).expect("short"), 0, 0, number], body].concat();
    let mut piece = [0; 4096];
    let mut go = stream.write_all(&packet(0, b"\x0a8.0.36\0greeting")).is_ok();
    go = go && stream.read(&mut piece).is_ok_and(|len| len > 0);
    go = go && stream.write_all(&packet(2, b"\0\0\0")).is_ok();
    while go && stream.read(&mut piece).is_ok_and(|len| len > 0) && held.recv().is_ok() {
        go = stream.write_all(&packet(1, b"answer")).is_ok();
    }
}

fn time_in_a_database_is_told_of_a_request_that_was_alone(world: &World) {
    let (tell, held) = mpsc::channel();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("it is bound").to_string();
    std::thread::spawn(move || {
        listener.incoming().flatten().for_each(|stream| serve_queries(stream, &held));
    });
    let more = json!({ "outbound": [address], "env": { "NAME": "asks", "DB": address } });
    add(world, "asks", more);
    time_in_a_database_is_told(world, "asks", &tell);
    add(world, "asks-nobody", json!({}));
    assert_eq!(
        figure(&get(world, "asks-nobody", "/who").expect(200), "db"),
        None,
        "an application without a database or a place outside has none"
    );
}

fn time_in_a_database_on_a_unix_socket_is_told_too(world: &World) {
    let (tell, held) = mpsc::channel();
    let path = world.path("database.sock");
    let listener = std::os::unix::net::UnixListener::bind(&path).expect("a new socket");
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o777)).expect("it is ours");
    std::thread::spawn(move || {
        listener.incoming().flatten().for_each(|stream| serve_queries(stream, &held));
    });
    let databases = json!([{ "socket": path, "inside": "/run/db.sock" }]);
    let env = json!({ "NAME": "asks-here", "DB": "/run/db.sock" });
    add(world, "asks-here", json!({ "databases": databases, "env": env }));
    time_in_a_database_is_told(world, "asks-here", &tell);
}

/// A figure of a receipt.
fn figure(answer: &Response, name: &str) -> Option<u64> {
    let receipt = answer.header("nagaya-receipt").expect("this client gets receipts");
    receipt.split(", ").find_map(|item| item.strip_prefix(name)?.strip_prefix('=')?.parse().ok())
}

fn time_in_a_database_is_told(world: &World, name: &str, tell: &mpsc::Sender<()>) {
    assert_eq!(figure(&get(world, name, "/run").expect(200), "db"), Some(0), "it has asked for nothing yet");
    // Two queries, answered at once.
    (tell.send(()), tell.send(())).0.expect("the database listens");
    let answer = get(world, name, "/query?2").expect(200);
    assert_eq!(answer.text(), "answer answer");
    let db = figure(&answer, "db").expect("it was alone");
    let backend = figure(&answer, "backend").expect("a figure");
    assert!(0 < db && db <= backend, "{db} of {backend}");
    let timing = answer.header("server-timing").expect("timing goes with the receipt");
    assert!(timing.contains("db;dur="), "{timing}");
    // Another comes and goes while this one waits for its answer.
    let answer = std::thread::scope(|scope| {
        let asking = scope.spawn(|| get(world, name, "/query?1").expect(200));
        let path = world.home("alice").join(format!("app/{name}.queries"));
        wait::until("the query is under way", || {
            std::fs::read_to_string(&path).is_ok_and(|text| text.lines().count() == 3)
        });
        let other = get(world, name, "/run").expect(200);
        assert_eq!(figure(&other, "db"), None, "whose waits they are is not known");
        tell.send(()).expect("the database listens");
        asking.join().expect("it is answered")
    });
    assert_eq!(figure(&answer, "db"), None, "{answer:?}");
    let outbound = show(world, name)["outbound"].clone();
    assert_eq!((&outbound["queries"], &outbound["failed"]), (&json!(3), &json!(0)), "{outbound}");
    assert!(world.metric("nagaya_instance_database_queries_total", "") >= 3.0);
}

fn without_a_criu_that_works_applications_rest_without_images() {
    let absent = |_: &Path| {};
    let old = |criu: &Path| {
        let source = criu.with_extension("c");
        machine::write(&source, OLD_CRIU);
        match Command::new("cc").arg("-o").args([criu, &source]).status() {
            Ok(built) => assert!(built.success(), "a program of one line is built"),
            Err(_) => skip("there is no C compiler here"),
        }
    };
    let makes: [&dyn Fn(&Path); 2] = [&absent, &old];
    for (make, why) in makes.into_iter().zip(["there is no such file", "version 3.17.1 is older than 4.1"]) {
        let builder = builder_without_criu();
        let criu = builder.path("criu");
        make(&criu);
        let world = builder.set("instances", &format!("criu = {criu:?}")).start();
        world.write_program("alice", "app/app.py", programs::INSTANCE);
        let row = check(&world, "criu");
        assert_eq!(row["state"], "off", "{row}");
        assert!(row.to_string().contains(why) && row.to_string().contains("NGY0334"), "{row}");
        let of_status = || world.status()["keeper"]["instances"]["images"]["none"].clone();
        wait::until("the node says that it takes no images", || {
            of_status().as_str().is_some_and(|none| none.contains("NGY0334") && none.contains(why))
        });
        add(&world, "imageless", json!({}));
        let first = run_of(&world, "imageless");
        // What it can keep in memory it does.
        rest(&world, "imageless", "frozen");
        assert_eq!(run_of(&world, "imageless"), first);
        rest(&world, "imageless", "image");
        until_tier(&world, "imageless", &["cold"]);
        let answer = get(&world, "imageless", "/run").expect(200);
        assert_eq!(woken_from(&answer), "cold");
        assert_ne!(answer.text(), first);
        assert!(world.metric("nagaya_keeper_images_total", "event=\"taken\"") < 1.0);
        world.stop();
    }
}

fn show(world: &World, name: &str) -> Value {
    serde_json::from_str(&world.cli(&["instance", "show", name, "--json"])).expect("JSON")
}

fn impossible_command_of_an_operator_is_refused_with_a_reason(world: &World) {
    let refused = |arguments: &[&str]| {
        let output = world.try_cli(arguments);
        assert!(!output.status.success(), "{arguments:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let text = refused(&["instance", "wake", "nobody"]);
    assert!(text.contains("nobody") && text.contains("NGY0"), "{text}");
    let text = refused(&["instance", "rest", "nobody", "--to", "running"]);
    assert!(text.contains("quiet, frozen"), "{text}");
    add(world, "in-use", json!({}));
    let mut connection = Connection::open(world.http());
    connection
        .send("GET /echo HTTP/1.1\r\nHost: in-use.test\r\nConnection: upgrade\r\nUpgrade: echo\r\n\r\n");
    assert_eq!(connection.head().status, 101);
    let text = refused(&["instance", "rest", "in-use", "--to", "frozen"]);
    assert!(text.contains("NGY0"), "{text}");
    assert_eq!(connection.send("here").bytes(4), b"here");
}

fn top_shows_who_runs_and_rests(world: &World) {
    add(world, "watched", json!({}));
    let mut connection = Connection::open(world.http());
    connection
        .send("GET /echo HTTP/1.1\r\nHost: watched.test\r\nConnection: upgrade\r\nUpgrade: echo\r\n\r\n");
    assert_eq!(connection.head().status, 101);
    let rows: Value = serde_json::from_str(&world.cli(&["top", "--once", "--json"])).expect("JSON");
    let row = rows.as_array().and_then(|rows| rows.iter().find(|row| row["site"] == "watched"));
    let row = row.unwrap_or_else(|| panic!("it is not in {rows}"));
    assert_eq!(
        (&row["tier"], &row["running"], &row["tenant"]),
        (&json!("running"), &json!(1), &json!("alice"))
    );
    let text = world.cli(&["top", "--once", "--limit", "1000"]);
    assert!(text.starts_with("instances: ") && text.contains("\nwatched "), "{text}");
}
