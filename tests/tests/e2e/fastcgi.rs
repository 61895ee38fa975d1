//! Applications that speak FastCGI: a real php-fpm as an instance, with files beside its scripts.
//!
//! Not here: instances as such (`instances`), PHP in the node's own workers (`php`), WordPress (`./dev demo --check`).

use std::os::unix::fs::symlink;
use std::path::PathBuf;

use nagaya_tests::client::{self, Connection};
use nagaya_tests::suite::{Suite, Tests, skip};
use nagaya_tests::world::World;
use nagaya_tests::{machine, wait};
use serde_json::{Value, json};

use crate::resting::{add_site, builder, get, listed, rest, until_image, woken_from};

pub const SUITE: Suite = Suite {
    name: "fastcgi",
    needs_root: true,
    tests: Tests::Sharing(
        world,
        nagaya_tests::tests![
            a_script_runs_in_the_instance_and_is_told_the_request,
            files_and_scripts_behind_a_tenants_own_link_are_served,
            files_are_served_and_wake_nobody,
            bodies_arrive_whole_with_and_without_a_length,
            a_descriptor_is_a_way_to_listen,
            one_that_is_not_ready_gets_no_request,
            sessions_survive_each_rest_and_images_have_compiled_code,
            a_process_that_dies_is_502_and_a_post_is_done_once,
            an_end_between_two_requests_is_invisible,
            a_script_that_says_nothing_is_504,
            a_client_that_leaves_frees_its_process,
            complaints_of_a_script_are_logged,
        ],
    ),
};

const CONFIG: &str = "[global]\nerror_log = /dev/null\nlog_level = warning\n[site]\nlisten = ${NAGAYA_SOCKET}\n\
    pm = static\npm.max_children = 1\nclear_env = no\n\
    php_admin_value[session.save_path] = /srv/sessions\n";

const SCRIPTS: [(&str, &str); 10] = [
    ("index.php", "<?php echo 'front ', $_SERVER['REQUEST_URI'];"),
    ("info.php", "<?php echo json_encode($_SERVER + ['uid' => posix_getuid(), 'pid' => getmypid()]);"),
    (
        "echo.php",
        "<?php $body = file_get_contents('php://input'); echo $_SERVER['CONTENT_LENGTH'] ?? 0, ' ', strlen($body), ' ', md5($body);",
    ),
    ("count.php", "<?php session_start(); echo ++$_SESSION['count'];"),
    (
        "compiled.php",
        "<?php $all = opcache_get_status(); echo json_encode(['start' => $all['opcache_statistics']['start_time'],
            'scripts' => array_map('basename', array_keys($all['scripts']))]);",
    ),
    (
        "die.php",
        "<?php file_put_contents('../died', \"x\\n\", FILE_APPEND); posix_kill(getmypid(), 9); sleep(60);",
    ),
    ("silent.php", "<?php sleep(60);"),
    (
        "endless.php",
        "<?php ignore_user_abort(false); echo 'begun'; while (true) { echo str_repeat(' ', 4096); @ob_flush(); flush(); usleep(1000); }",
    ),
    ("fails.php", "<?php error_log('it does not work'); no_such_function();"),
    (
        "ready.php",
        "<?php $asked = @file('../asked') ?: []; file_put_contents('../asked', \"x\\n\", FILE_APPEND);
            if (count($asked) < 3) http_response_code(503); echo count($asked);",
    ),
];

fn world() -> World {
    let world = builder().start();
    let sessions = world.home("alice").join("wp/sessions").display().to_string();
    world.write("alice", "wp/fpm.conf", CONFIG.replace("/srv/sessions", &sessions));
    world.write("alice", "wp/sessions/.keep", "");
    for (name, text) in SCRIPTS {
        world.write("alice", &format!("wp/html/{name}"), text);
    }
    world.write("alice", "wp/html/style.css", "body {}\n");
    world.write("alice", "wp/html/sub/index.php", "<?php echo 'index of sub';");
    world.write("alice", "wp/html/private/key.txt", "hunter2");
    world.give("alice");
    world
}

/// Of whatever version.
fn php_fpm() -> PathBuf {
    let names = std::fs::read_dir("/usr/sbin").expect("a directory of programs");
    let found = names.flatten().find(|entry| entry.file_name().to_string_lossy().starts_with("php-fpm"));
    found.map_or_else(|| skip("there is no php-fpm here"), |entry| entry.path())
}

/// A site at `NAME.test`.
fn add(world: &World, name: &str, more: Value) {
    let config = world.home("alice").join("wp/fpm.conf");
    let backend = json!({
        "kind": "app", "directory": "wp", "start_seconds": 20, "protocol": "fastcgi",
        // All that is kept of compiled scripts is in an image.
        "command": [
            php_fpm(), "--nodaemonize", "--force-stderr", "--fpm-config", config, "-d", format!("fcgi.name={}", machine::mark("fastcgi", name)),
            "-d", "opcache.memory_consumption=16", "-d", "opcache.file_update_protection=0",
        ],
        "files": { "root": "wp/html", "front_controller": "index.php", "deny": ["/private"] },
    });
    add_site(world, name, backend, more);
}

// === Requests ===

fn files_and_scripts_behind_a_tenants_own_link_are_served(world: &World) {
    world.write("alice", "wp/shared/note.txt", "a note");
    world.write("alice", "wp/shared/who.php", "<?php echo posix_getuid(), ' ', $_SERVER['SCRIPT_NAME'];");
    symlink("../shared", world.home("alice").join("wp/html/shared")).expect("our own directory");
    world.give("alice");
    add(world, "linked", json!({}));
    assert_eq!(get(world, "linked", "/shared/note.txt").expect(200).text(), "a note");
    let expected = format!("{} /shared/who.php", world.uid("alice"));
    assert_eq!(get(world, "linked", "/shared/who.php").expect(200).text(), expected);
    world.cli(&["site", "set", "linked", "--links", "none"]);
    get(world, "linked", "/shared/note.txt").expect(403);
}

fn a_script_runs_in_the_instance_and_is_told_the_request(world: &World) {
    add(world, "told", json!({}));
    let answer = get(world, "told", "/info.php/rest?a=b").expect(200);
    assert_eq!(woken_from(&answer), "cold");
    let told: Value = serde_json::from_str(&answer.text()).expect("JSON");
    let root = world.home("alice").join("wp/html");
    for (name, expected) in [
        ("REQUEST_METHOD", "GET"),
        ("REQUEST_URI", "/info.php/rest?a=b"),
        ("QUERY_STRING", "a=b"),
        ("SCRIPT_NAME", "/info.php"),
        ("PATH_INFO", "/rest"),
        ("HTTP_HOST", "told.test"),
        ("REMOTE_ADDR", "127.0.0.1"),
        ("DOCUMENT_ROOT", root.to_str().expect("UTF-8")),
        ("SCRIPT_FILENAME", root.join("info.php").to_str().expect("UTF-8")),
    ] {
        assert_eq!(told[name], expected, "{name}");
    }
    assert_eq!(told["uid"], world.uid("alice"));
    let pid = i32::try_from(told["pid"].as_u64().expect("a pid")).expect("a pid");
    // Numbers in there begin anew, and go on after that of CRIU where it took an image.
    assert!(pid < 100 || (30_000..30_100).contains(&pid), "it is in a sandbox: {pid}");
    assert_eq!(get(world, "told", "/a/pretty/path?x").expect(200).text(), "front /a/pretty/path?x");
    assert_eq!(get(world, "told", "/sub/").expect(200).text(), "index of sub");
    assert_eq!(get(world, "told", "/sub").expect(301).header("location"), Some("/sub/"));
    let head = Connection::open(world.http())
        .send("HEAD /info.php HTTP/1.1\r\nHost: told.test\r\n\r\n")
        .response_to_head();
    assert_eq!(head.expect(200).body, b"");
}

fn files_are_served_and_wake_nobody(world: &World) {
    add(world, "files", json!({}));
    let style = get(world, "files", "/style.css").expect(200);
    assert_eq!(
        (style.text().as_str(), style.header("content-type")),
        ("body {}\n", Some("text/css; charset=utf-8"))
    );
    get(world, "files", "/private/key.txt").expect(403);
    let tier = &listed(world, "files")["tier"];
    assert!(tier.is_null() || tier == "cold", "nothing was started: {tier}");
    // Nobody is told whether there is such a file: it is the program's to answer.
    assert_eq!(get(world, "files", "/.htaccess").expect(200).text(), "front /.htaccess");
    assert_eq!(listed(world, "files")["tier"], "running");
}

fn bodies_arrive_whole_with_and_without_a_length(world: &World) {
    add(world, "bodies", json!({}));
    for len in [0, 5, 70_000, 3_000_000] {
        let body = "x".repeat(len);
        let sent = client::post(world.http(), "bodies.test", "/echo.php", &body).expect(200).text();
        let mut connection = Connection::open(world.http());
        connection.send("POST /echo.php HTTP/1.1\r\nHost: bodies.test\r\nTransfer-Encoding: chunked\r\n\r\n");
        if len > 0 {
            connection.send(format!("{len:x}\r\n{body}\r\n"));
        }
        let chunked = connection.send("0\r\n\r\n").response().expect(200).text();
        assert!(sent.starts_with(&format!("{len} {len} ")), "{sent}");
        assert_eq!(chunked, sent);
    }
}

fn a_descriptor_is_a_way_to_listen(world: &World) {
    let env = json!({ "NAGAYA_SOCKET": "/run/php-fpm.sock", "FPM_SOCKETS": "/run/php-fpm.sock=3" });
    add(world, "by-fd", json!({ "listen": "fd", "env": env }));
    assert_eq!(get(world, "by-fd", "/").expect(200).text(), "front /");
}

fn one_that_is_not_ready_gets_no_request(world: &World) {
    add(world, "warming", json!({ "ready": { "path": "/ready.php" } }));
    let answer = get(world, "warming", "/index.php").expect(200);
    assert!(answer.header("nagaya-receipt").expect("a receipt").contains(";ready="), "{answer:?}");
    let asked = std::fs::read_to_string(world.home("alice").join("wp/asked")).expect("it was asked");
    assert_eq!(asked.lines().count(), 4, "until it said yes");
}

// === Rest ===

fn sessions_survive_each_rest_and_images_have_compiled_code(world: &World) {
    add(world, "session", json!({ "release": "1", "warm_up": ["/compiled.php", "/index.php"] }));
    let cookie = {
        let first = get(world, "session", "/count.php").expect(200);
        assert_eq!(first.text(), "1");
        let cookie = first.header("set-cookie").expect("a session").to_owned();
        cookie.split(';').next().expect("a cookie").to_owned()
    };
    let count = || {
        let fields = format!("Cookie: {cookie}\r\n");
        client::get_with(world.http(), "session.test", "/count.php", &fields).expect(200)
    };
    let compiled = || -> Value {
        serde_json::from_str(&get(world, "session", "/compiled.php").expect(200).text()).expect("JSON")
    };
    let before = compiled();
    rest(world, "session", "frozen");
    let answer = count();
    assert_eq!((answer.text().as_str(), woken_from(&answer).as_str()), ("2", "frozen"));
    until_image(world, "session");
    for expected in ["3", "4"] {
        rest(world, "session", "image");
        let answer = count();
        assert_eq!((answer.text().as_str(), woken_from(&answer).as_str()), (expected, "image"));
    }
    rest(world, "session", "image");
    let after = compiled();
    assert_eq!(after["start"], before["start"], "the same run goes on");
    let scripts = |of: &Value| of["scripts"].as_array().expect("a list").clone();
    assert!(scripts(&after).contains(&json!("index.php")), "it was compiled before the image: {after}");
    assert!(!scripts(&after).contains(&json!("count.php")), "no visitor's request is in an image: {after}");
}

// === Failures ===

fn a_process_that_dies_is_502_and_a_post_is_done_once(world: &World) {
    add(world, "dies", json!({}));
    let died = || {
        let text = std::fs::read_to_string(world.home("alice").join("wp/died")).unwrap_or_default();
        text.lines().count()
    };
    let answer = client::post(world.http(), "dies.test", "/die.php", "x");
    assert_eq!((answer.status, died()), (502, 1), "{answer:?}");
    assert_eq!((get(world, "dies", "/die.php").status, died()), (502, 3), "a GET is tried once more");
    assert_eq!(get(world, "dies", "/").expect(200).text(), "front /", "php-fpm has another one");
}

fn an_end_between_two_requests_is_invisible(world: &World) {
    add(world, "ended", json!({}));
    get(world, "ended", "/").expect(200);
    for id in machine::processes_with(&machine::mark("fastcgi", "ended")) {
        machine::signal(id, "KILL");
    }
    assert_eq!(get(world, "ended", "/").expect(200).text(), "front /");
}

fn a_script_that_says_nothing_is_504(world: &World) {
    add(world, "silent", json!({ "timeout_seconds": 1 }));
    get(world, "silent", "/silent.php").expect(504);
}

fn a_client_that_leaves_frees_its_process(world: &World) {
    add(world, "left", json!({}));
    let mut connection = Connection::open(world.http());
    connection.send("GET /endless.php HTTP/1.1\r\nHost: left.test\r\n\r\n");
    connection.head().expect(200);
    drop(connection);
    // There is one process, which would be at it for ever.
    assert_eq!(get(world, "left", "/").expect(200).text(), "front /");
}

fn complaints_of_a_script_are_logged(world: &World) {
    add(world, "fails", json!({}));
    get(world, "fails", "/fails.php").expect(500);
    wait::until("the log has it", || {
        let log = world.log();
        log.contains("it does not work") && log.contains("no_such_function")
    });
}
