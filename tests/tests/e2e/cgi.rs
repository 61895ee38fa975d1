//! CGI programs: what they are told, what becomes of their output, and that nothing of them outlives the request.
//!
//! Not here: PHP (`php`), ambiguous requests (`smuggling`).

use nagaya_tests::client::{self, Connection};
use nagaya_tests::suite::{Suite, Tests};
use nagaya_tests::world::World;
use nagaya_tests::{machine, wait};
use serde_json::json;

pub const SUITE: Suite = Suite {
    name: "cgi",
    needs_root: true,
    tests: Tests::Sharing(
        world,
        nagaya_tests::tests![
            a_program_is_told_the_request,
            a_program_runs_as_its_tenant_and_nobody_else,
            status_location_and_fields_are_the_programs,
            a_local_redirect_is_followed_inside,
            a_body_arrives_on_standard_input,
            a_long_answer_arrives_whole,
            a_program_that_ignores_its_input_still_answers,
            bad_output_is_502_with_the_requests_id,
            a_program_that_never_ends_is_504_and_its_tree_is_gone,
            a_daemon_does_not_outlive_its_request,
            a_client_that_leaves_ends_the_program,
            a_program_goes_on_when_its_client_has_left,
            programs_of_clients_that_left_keep_their_permits,
            a_site_ends_each_stream_in_its_time,
            want_of_memory_is_named_where_it_ended_a_program,
            a_program_that_breaks_off_breaks_the_answer_off,
            complaints_of_a_program_are_logged,
            programs_are_never_sent_as_files,
            a_front_controller_is_told_the_whole_path,
            a_program_names_a_file_to_be_sent,
        ],
    ),
};

fn world() -> World {
    let world = World::builder()
        .tenant("alice")
        .tenant("erin")
        .site(json!({ "name": "ends", "tenant": "alice", "hosts": ["ends.test"], "stream_seconds": 2,
            "backend": { "kind": "cgi", "root": "cgi", "linger_seconds": 0 } }))
        .site(json!({ "name": "small", "tenant": "erin", "hosts": ["small.test"],
            "backend": { "kind": "cgi", "root": "cgi" } }))
        .site(json!({ "name": "cgi", "tenant": "alice", "hosts": ["cgi.test"],
            "backend": { "kind": "cgi", "root": "cgi", "timeout_seconds": 1, "env": { "OPERATOR": "says so" } } }))
        .site(json!({ "name": "slow", "tenant": "alice", "hosts": ["slow.test"],
            "backend": { "kind": "cgi", "root": "cgi", "linger_seconds": 300 } }))
        .site(json!({ "name": "brief", "tenant": "alice", "hosts": ["brief.test"],
            "backend": { "kind": "cgi", "root": "cgi", "linger_seconds": 0 } }))
        .site(json!({ "name": "one", "tenant": "alice", "hosts": ["one.test"], "max_concurrent": 1,
            "backend": { "kind": "cgi", "root": "cgi" } }))
        .site(json!({ "name": "front", "tenant": "alice", "hosts": ["front.test"], "path": "/at",
            "backend": { "kind": "cgi", "root": "front", "front_controller": "app", "deny": ["/data"] } }))
        .start();
    world.write("alice", "cgi/page.html", "a file beside programs");
    world
}

/// Writes a shell program that begins with a proper head.
fn program(world: &World, name: &str, body: &str) {
    raw_program(world, name, &format!("printf 'Content-Type: text/plain\\r\\n\\r\\n'\n{body}"));
}

fn raw_program(world: &World, name: &str, body: &str) {
    world.write_program("alice", &format!("cgi/{name}"), &format!("#!/bin/sh\n{body}\n"));
}

/// Of a program, as its command line has it.
fn path(world: &World, name: &str) -> String {
    world.home("alice").join("cgi").join(name).display().to_string()
}

fn a_program_is_told_the_request(world: &World) {
    program(world, "env.cgi", "env; pwd");
    let fields = "X-Own: v\u{61}lue\r\nProxy: http://evil.test\r\nAuthorization: Basic eDp5\r\n";
    let text = client::get_with(world.http(), "cgi.test:81", "/env.cgi/path%20info?a=1&b=%20", fields)
        .expect(200)
        .text();
    for line in [
        "REQUEST_METHOD=GET",
        "QUERY_STRING=a=1&b=%20",
        "SCRIPT_NAME=/env.cgi",
        "PATH_INFO=/path info",
        "REQUEST_URI=/env.cgi/path%20info?a=1&b=%20",
        "GATEWAY_INTERFACE=CGI/1.1",
        "SERVER_PROTOCOL=HTTP/1.1",
        "SERVER_NAME=cgi.test",
        "REMOTE_ADDR=127.0.0.1",
        "HTTP_X_OWN=value",
        "OPERATOR=says so",
    ] {
        assert!(text.lines().any(|known| known == line), "no {line} in\n{text}");
    }
    assert!(text.contains("PATH_TRANSLATED=") && text.contains("/cgi/path info"), "{text}");
    assert!(!text.contains("HTTP_PROXY"), "{text}");
    assert!(text.lines().last().is_some_and(|dir| dir.ends_with("/alice/cgi")), "{text}");
    // Nothing of the node's own environment.
    assert!(!text.contains("NAGAYA") && !text.contains("CARGO"), "{text}");
}

fn a_program_runs_as_its_tenant_and_nobody_else(world: &World) {
    program(world, "id.cgi", "id -u; id -G; cat /proc/self/status; ls /proc/self/fd");
    let text = world.get("cgi.test", "/id.cgi").expect(200).text();
    let mut lines = text.lines();
    let uid = world.uid("alice").to_string();
    assert_eq!((lines.next(), lines.next()), (Some(uid.as_str()), Some(uid.as_str())), "{text}");
    for name in ["CapPrm", "CapEff", "CapInh", "CapAmb"] {
        let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_default();
        assert!(line.ends_with("0000000000000000"), "{line}");
    }
    let fds: Vec<u32> = lines.filter_map(|line| line.parse().ok()).collect();
    // Its three, and the directory that `ls` reads.
    assert!(fds.iter().all(|fd| *fd <= 3), "the program has descriptors of the node: {fds:?}");
}

fn status_location_and_fields_are_the_programs(world: &World) {
    raw_program(
        world,
        "made.cgi",
        "printf 'Status: 201 Created\\nX-Made: yes\\nContent-Type: text/x\\n\\nmade'",
    );
    let answer = world.get("cgi.test", "/made.cgi").expect(201);
    assert_eq!((answer.text().as_str(), answer.header("x-made")), ("made", Some("yes")));
    raw_program(world, "away.cgi", "printf 'Location: https://example.org/x\\r\\n\\r\\n'");
    let answer = world.get("cgi.test", "/away.cgi").expect(302);
    assert_eq!(answer.header("location"), Some("https://example.org/x"));
    // What frames the message is the node's.
    raw_program(
        world,
        "frame.cgi",
        "printf 'Content-Type: a/b\\nContent-Length: 3\\nConnection: keep-alive\\n\\nabc'",
    );
    assert_eq!(world.get("cgi.test", "/frame.cgi").expect(200).text(), "abc");
}

fn a_local_redirect_is_followed_inside(world: &World) {
    raw_program(world, "inside.cgi", "printf 'Location: /page.html\\n\\n'");
    assert_eq!(world.get("cgi.test", "/inside.cgi").expect(200).text(), "a file beside programs");
    raw_program(world, "circle.cgi", "printf 'Location: /circle.cgi\\n\\n'");
    world.get("cgi.test", "/circle.cgi").expect(502);
}

fn a_body_arrives_on_standard_input(world: &World) {
    program(world, "cat.cgi", "echo \"$CONTENT_LENGTH\"; head -c \"$CONTENT_LENGTH\"");
    let body = "line\n".repeat(50_000);
    let answer = client::post(world.http(), "slow.test", "/cat.cgi", &body).expect(200);
    assert!(answer.text() == format!("{}\n{body}", body.len()));
}

fn a_long_answer_arrives_whole(world: &World) {
    program(world, "long.cgi", "head -c 20000000 /dev/zero");
    let answer = world.get("slow.test", "/long.cgi").expect(200);
    assert!(answer.body.len() == 20_000_000 && answer.body.iter().all(|byte| *byte == 0), "{answer:?}");
}

fn a_program_that_ignores_its_input_still_answers(world: &World) {
    program(world, "deaf.cgi", "echo done");
    let answer = client::post(world.http(), "slow.test", "/deaf.cgi", &"x".repeat(300_000));
    assert_eq!(answer.expect(200).text(), "done\n");
}

fn bad_output_is_502_with_the_requests_id(world: &World) {
    raw_program(world, "nothing.cgi", "exit 0");
    raw_program(world, "failing.cgi", "exit 1");
    raw_program(world, "no-head.cgi", "echo hello world");
    raw_program(world, "no-end.cgi", "echo 'Content-Type: text/plain'");
    raw_program(
        world,
        "huge-head.cgi",
        "while :; do echo 'X-Filler: 0123456789012345678901234567890123456789'; done",
    );
    raw_program(world, "nph.cgi", "printf 'HTTP/1.1 200 OK\\r\\n\\r\\nfine'");
    raw_program(world, "split.cgi", "printf 'Content-Type: a/b\\rX-Injected: 1\\n\\nx'");
    raw_program(world, "status.cgi", "printf 'Status: fine\\n\\nx'");
    world.write_program("alice", "cgi/no-interpreter.cgi", "#!/proc/nonexistent/interpreter\n");
    for name in
        ["nothing", "failing", "no-head", "no-end", "huge-head", "nph", "split", "status", "no-interpreter"]
    {
        let answer = world.get("cgi.test", &format!("/{name}.cgi"));
        assert_eq!(answer.status, 502, "{name}: {answer:?}");
        let text = answer.text();
        let id = text.split("request ").nth(1).and_then(|rest| rest.get(..32)).unwrap_or_default().to_owned();
        wait::until(&format!("{name}: the log has request '{id}'"), || {
            id.len() == 32 && world.log().contains(&id)
        });
    }
}

fn a_program_that_never_ends_is_504_and_its_tree_is_gone(world: &World) {
    raw_program(
        world,
        "never.cgi",
        "sh -c 'while :; do sleep 1; done # '\"$PWD\"/tree-of-never &\nwhile :; do sleep 1; done",
    );
    let answer = world.get("cgi.test", "/never.cgi").expect(504);
    assert!(answer.text().contains("NGY0419"));
    machine::wait_until_gone(&path(world, "tree-of-never"));
    machine::wait_until_gone(&path(world, "never.cgi"));
}

fn a_daemon_does_not_outlive_its_request(world: &World) {
    // Forks twice, in a session of its own, and lets go of all its files.
    program(
        world,
        "daemon.cgi",
        "(setsid sh -c 'while :; do sleep 1; done # '\"$PWD\"/the-daemon </dev/null >/dev/null 2>&1 &)\n\
         for try in 1 2 3 4 5 6 7 8 9; do\n  grep -l the-daemon /proc/[0-9]*/cmdline >/dev/null 2>&1 && break\ndone\necho started",
    );
    assert_eq!(world.get("slow.test", "/daemon.cgi").expect(200).text(), "started\n");
    machine::wait_until_gone(&path(world, "the-daemon"));
}

fn a_client_that_leaves_ends_the_program(world: &World) {
    program(world, "left.cgi", "echo begun; while :; do sleep 1; done # the-left-one");
    let mut connection = Connection::open(world.http());
    connection.send("GET /left.cgi HTTP/1.1\r\nHost: brief.test\r\n\r\n");
    connection.head().expect(200);
    assert!(!machine::processes_with(&path(world, "left.cgi")).is_empty());
    drop(connection);
    machine::wait_until_gone(&path(world, "left.cgi"));
    // Also before it has answered at all.
    raw_program(world, "mute.cgi", "while :; do sleep 1; done");
    let mut connection = Connection::open(world.http());
    connection.send("GET /mute.cgi HTTP/1.1\r\nHost: brief.test\r\n\r\n");
    wait::until("the program runs", || !machine::processes_with(&path(world, "mute.cgi")).is_empty());
    drop(connection);
    machine::wait_until_gone(&path(world, "mute.cgi"));
}

/// Asks for a program that begins, waits for a file and writes another one, and leaves it. Returns the path of the last.
fn ask_and_leave(world: &World, host: &str, name: &str, waits: &str) -> std::path::PathBuf {
    let at = |what: &str| world.home("alice").join(format!("cgi/{name}.{what}"));
    raw_program(
        world,
        &format!("{name}.cgi"),
        &format!(
            "printf 'Content-Type: text/plain\\r\\n\\r\\n'; while [ ! -e {name}.go ]; do {waits} sleep 0.05; done; touch {name}.end"
        ),
    );
    let mut connection = Connection::open(world.http());
    connection.send(format!("GET /{name}.cgi HTTP/1.1\r\nHost: {host}\r\n\r\n"));
    // From then on the node knows of it.
    connection.head().expect(200);
    at("end")
}

fn a_program_goes_on_when_its_client_has_left(world: &World) {
    let end = ask_and_leave(world, "slow.test", "silent", "");
    ask_and_leave(world, "slow.test", "talks", "echo X-A: 1;");
    // What writes is ended by its writing, later than the other was left.
    machine::wait_until_gone(&path(world, "talks.cgi"));
    assert!(!machine::processes_with(&path(world, "silent.cgi")).is_empty(), "it writes nothing");
    std::fs::write(world.home("alice").join("cgi/silent.go"), "").expect("a file");
    wait::until("it goes on to its end", || end.exists());
}

fn programs_of_clients_that_left_keep_their_permits(world: &World) {
    let end = ask_and_leave(world, "one.test", "holds", "");
    raw_program(
        world,
        "next.cgi",
        "printf 'Content-Type: text/plain\\r\\n\\r\\n'; [ -e holds.end ] && echo after || echo beside",
    );
    let mut next = Connection::open(world.http());
    next.send("GET /next.cgi HTTP/1.1\r\nHost: one.test\r\n\r\n");
    for _ in 0..5 {
        world.get("slow.test", "/page.html").expect(200);
    }
    std::fs::write(world.home("alice").join("cgi/holds.go"), "").expect("a file");
    assert_eq!(next.response().expect(200).text(), "after\n");
    assert!(end.exists());
}

fn a_site_ends_each_stream_in_its_time(world: &World) {
    program(world, "quick.cgi", "echo quick");
    assert_eq!(world.get("ends.test", "/quick.cgi").expect(200).text(), "quick\n");
    program(world, "endless.cgi", "while :; do echo more; sleep 0.05; done");
    let mut endless = Connection::open(world.http());
    endless.send("GET /endless.cgi HTTP/1.1\r\nHost: ends.test\r\n\r\n");
    assert!(endless.try_response().is_err());
    machine::wait_until_gone(&path(world, "endless.cgi"));
    raw_program(world, "silent.cgi", "while :; do sleep 1; done");
    world.get("ends.test", "/silent.cgi").expect(504);
    machine::wait_until_gone(&path(world, "silent.cgi"));
    // A body that does not come to an end.
    program(world, "reads.cgi", "cat > /dev/null");
    let mut upload = Connection::open(world.http());
    upload.send("POST /reads.cgi HTTP/1.1\r\nHost: ends.test\r\nContent-Length: 10\r\n\r\nhalf");
    let answer = upload.response();
    assert!(matches!(answer.status, 408 | 504), "{answer:?}");
    machine::wait_until_gone(&path(world, "reads.cgi"));
}

/// The words of `nagaya explain` about a request whose program ended without an answer.
fn explained(world: &World, host: &str, target: &str) -> String {
    let text = world.get(host, target).expect(502).text();
    let id = text.split(|c: char| !c.is_ascii_hexdigit()).find(|word| word.len() == 32);
    world.cli(&["explain", id.unwrap_or_else(|| panic!("it has an id: {text}"))])
}

fn want_of_memory_is_named_where_it_ended_a_program(world: &World) {
    world.cli(&["tenant", "set", "erin", "--memory", "128M"]);
    let program = |name: &str, body: &str| {
        world.write_program("erin", &format!("cgi/{name}"), &format!("#!/bin/sh\n{body}\n"));
    };
    let hungry = "perl -e 'push @a, \"x\" x (1 << 20) while 1'";
    program("other.cgi", "kill -9 $$");
    program("hungry.cgi", &format!("exec {hungry}"));
    // A shell that says by its status of what its program died.
    program("child.cgi", hungry);
    // The keeper names the cell, and each time anew.
    let is_said =
        |line: &&str| line.contains("out of memory: the kernel killed a cgi") && line.contains("erin");
    let times_said = || world.log().lines().filter(is_said).count();
    let other = explained(world, "small.test", "/other.cgi");
    assert!(!other.contains("out of memory"), "it died of another cause: {other}");
    for (name, times) in [("hungry.cgi", 1), ("child.cgi", 2)] {
        let text = explained(world, "small.test", &format!("/{name}"));
        assert!(text.contains("out of memory") && text.contains("NGY0324"), "{name}: {text}");
        wait::until("the keeper says so, too", || times_said() == times);
    }
}

fn a_program_that_breaks_off_breaks_the_answer_off(world: &World) {
    raw_program(world, "short.cgi", "printf 'Content-Type: a/b\\nContent-Length: 100\\n\\nonly this'");
    let mut connection = Connection::open(world.http());
    connection.send("GET /short.cgi HTTP/1.1\r\nHost: slow.test\r\n\r\n");
    let answer = connection.try_response();
    assert!(answer.is_err(), "{answer:?}");
}

fn complaints_of_a_program_are_logged(world: &World) {
    program(world, "complains.cgi", "printf 'the disk is \\033[31mred\\n' >&2");
    world.get("cgi.test", "/complains.cgi").expect(200);
    wait::until("the complaint is logged", || world.log().contains("the disk is "));
    assert!(!world.log().contains('\u{1b}'), "an escape sequence reaches the operator's terminal");
}

fn programs_are_never_sent_as_files(world: &World) {
    world.write("alice", "cgi/secret.cgi", "#!/bin/sh\n# password=hunter2\n");
    let answer = world.get("cgi.test", "/secret.cgi");
    assert_eq!(answer.status, 403, "it is not executable: {answer:?}");
    for target in ["/secret.cgi/", "/secret.cgi/x", "/secret.cgi%00.html", "/./secret.cgi"] {
        assert!(!world.get("cgi.test", target).text().contains("hunter2"), "{target}");
    }
    let answer = client::get_with(world.http(), "cgi.test", "/secret.cgi", "Range: bytes=0-100\r\n");
    assert!(!answer.text().contains("hunter2"));
}

/// As Apache's `ScriptAlias /at /.../app` does.
fn a_front_controller_is_told_the_whole_path(world: &World) {
    let body = "#!/bin/sh\nprintf 'Content-Type: text/plain\\r\\n\\r\\n'\nenv\n";
    world.write_program("alice", "front/app", body);
    for (target, path_info) in [("/at/a/b", "/a/b"), ("/at/a%20b/?q=1", "/a b/"), ("/at/", "/")] {
        let text = world.get("front.test", target).expect(200).text();
        for line in
            ["SCRIPT_NAME=/at".to_owned(), format!("PATH_INFO={path_info}"), format!("REQUEST_URI={target}")]
        {
            assert!(text.lines().any(|found| found == line), "{target}: {line} is missing in\n{text}");
        }
    }
    let text = world.get("front.test", "/at/app").expect(200).text();
    assert!(text.lines().any(|line| line == "SCRIPT_NAME=/at/app"), "{text}");
}

fn a_program_names_a_file_to_be_sent(world: &World) {
    world.write("alice", "front/data/a b.txt", "0123456789");
    world.write("alice", "front/data/x.cgi", "#!/bin/sh");
    world.write("alice", "front/data/.hidden", "x");
    let field =
        r#"printf 'Content-Type: a/b\r\nContent-Disposition: attachment\r\n%s\r\n\r\nbody' "$QUERY_STRING""#;
    world.write_program("alice", "front/send.cgi", &format!("#!/bin/sh\n{field}\n"));
    let send = |field: &str| world.get("front.test", &format!("/at/send.cgi?{field}"));
    world.get("front.test", "/at/data/a%20b.txt").expect(403);
    let root = world.home("alice").join("front").display().to_string();
    world.write("alice", "front/data/plain.txt", "0123456789");
    for field in ["X-Accel-Redirect:/data/a%20b.txt".to_owned(), format!("X-Sendfile:{root}/data/plain.txt")]
    {
        let answer = send(&field).expect(200);
        assert_eq!(
            (answer.text().as_str(), answer.header("content-type")),
            ("0123456789", Some("a/b")),
            "{field}"
        );
        assert_eq!(answer.header("content-disposition"), Some("attachment"));
        assert!(answer.header("x-accel-redirect").or(answer.header("x-sendfile")).is_none(), "{answer:?}");
    }
    let part = client::get_with(
        world.http(),
        "front.test",
        "/at/send.cgi?X-Accel-Redirect:/data/plain.txt",
        "Range: bytes=2-3\r\n",
    );
    assert_eq!(part.expect(206).text(), "23");
    for (field, status) in [
        ("X-Accel-Redirect:/data/none", 404),
        ("X-Accel-Redirect:/data/.hidden", 404),
        // A program's text is not sent, by nobody's word.
        ("X-Accel-Redirect:/data/x.cgi", 404),
        ("X-Sendfile:/etc/passwd", 502),
        ("X-Sendfile:../../etc/passwd", 400),
    ] {
        send(field).expect(status);
    }
}
