//! The operator's Ruby: what it sees, what it decides, that a change holds for the next request, and that a bad rule
//! harms nobody.
//!
//! Not here: whether limits hold (`cells`), the whole Ruby interface (the tests of the rules themselves).

use std::fs;
use std::sync::atomic::{AtomicU32, Ordering};

use nagaya_tests::client::{self, Connection};
use nagaya_tests::suite::{Suite, Tests};
use nagaya_tests::wait;
use nagaya_tests::world::{Builder, World};
use serde_json::{Value, json};

use crate::limits::Held;

/// The published figure, unchanged but for what its scan had lost.
const FIGURE_4: &str = include_str!("../../../crates/rules/fixtures/figure4.rb");

pub const SUITE: Suite = Suite {
    name: "rules",
    needs_root: true,
    tests: Tests::Alone(nagaya_tests::tests![
        a_rule_answers_and_changes_fields,
        an_edited_rule_holds_for_the_next_request,
        a_rule_replaced_by_renaming_holds_for_the_next_request,
        a_cached_rule_is_not_looked_at_again,
        a_half_written_rule_is_not_obeyed,
        a_deleted_rule_is_said_and_harms_nobody,
        bad_rules_are_said_once_with_their_line_and_harm_nobody,
        a_rule_that_must_not_fail_refuses_instead,
        one_long_call_of_a_rule_is_ended_and_others_are_answered,
        a_text_that_takes_long_to_compile_is_refused,
        the_check_of_a_rule_has_no_rights,
        a_rule_is_tried_without_a_request,
        figure_4_runs_unchanged,
        a_request_goes_on_in_ten_percent_of_a_core,
        settings_come_from_the_store,
        phases_run_in_their_order_and_share_notes,
        a_lane_lets_one_request_in_after_the_other,
        a_lane_finds_its_own_bound,
        wrong_name_in_a_rule_is_logged_and_harms_nobody,
        a_syntax_error_is_found_before_the_node_starts,
        a_stored_rule_holds_at_once_and_a_broken_one_is_refused,
        rules_of_the_store_outlast_the_node_and_come_with_an_import,
        a_limiter_written_as_a_rule_counts_requests_of_all_threads,
        a_detector_of_floods_shuts_out_a_host_and_lets_it_in_again,
    ]),
};

/// A node with a CGI site at `a.test` and `b.test`.
fn builder() -> Builder {
    let cgi = json!({ "kind": "cgi", "root": "cgi" });
    World::builder().site_of("alice", "a", cgi.clone()).site_of("alice", "b", cgi)
}

fn start(builder: Builder) -> World {
    let world = builder.start();
    world.write_program("alice", "cgi/x.cgi", "#!/bin/sh\nprintf 'Content-Type: text/plain\\n\\nfine'\n");
    world.write_program("alice", "cgi/env.cgi", "#!/bin/sh\nprintf 'Content-Type: text/plain\\n\\n'\nenv\n");
    world
}

fn with_rule(text: &str) -> World {
    start(builder().rule("one", "access_checker", text, ""))
}

/// A target nobody used before, so that its line in the access log is this request's.
fn fresh(target: &str) -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("{target}?r={}", NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Asks, and gives the access log's line of it.
#[track_caller]
fn logged(world: &World, host: &str, target: &str, status: u16) -> Value {
    let target = fresh(target);
    world.get(host, &target).expect(status);
    wait::until_some("the request is logged", || {
        world.access_log().into_iter().find(|line| line["target"] == target.as_str())
    })
}

fn a_rule_answers_and_changes_fields() {
    let world = with_rule(
        "r = Apache::Request.new\n\
         answer 403, \"not here\\n\" if request.path == \"/x.cgi\" && request.host == \"b.test\"\n\
         r.headers_in[\"X-Rule\"] = \"asked #{r.method}\"\n\
         r.headers_out[\"X-Said\"] = \"by the rule\"\n",
    );
    let refused = world.get("b.test", "/x.cgi").expect(403);
    assert_eq!(refused.text(), "not here\n");
    let answer = world.get("a.test", "/env.cgi").expect(200);
    assert!(answer.text().contains("HTTP_X_RULE=asked GET"), "{}", answer.text());
    assert_eq!(answer.header("x-said"), Some("by the rule"));
    world.stop();
}

fn an_edited_rule_holds_for_the_next_request() {
    let world = with_rule("answer 403\n");
    let mut connection = Connection::open(world.http());
    // On one connection, so that nothing but the rule differs between two requests.
    for turn in 0..50 {
        let status = if turn % 2 == 0 { 404 } else { 410 };
        world.write_rule("one", &format!("answer {status}\n"));
        connection.send("GET /x.cgi HTTP/1.1\r\nHost: a.test\r\n\r\n");
        assert_eq!(connection.response().status, status, "turn {turn}");
    }
    world.stop();
}

fn a_rule_replaced_by_renaming_holds_for_the_next_request() {
    let world = with_rule("answer 403\n");
    world.get("a.test", "/x.cgi").expect(403);
    let file = world.path("rules/one.rb");
    for status in [404, 410] {
        let new = world.path("rules/new.rb");
        fs::write(&new, format!("answer {status}\n")).expect("our own directory");
        fs::rename(&new, &file).expect("our own directory");
        world.get("a.test", "/x.cgi").expect(status);
    }
    world.stop();
}

fn a_cached_rule_is_not_looked_at_again() {
    let world = start(builder().rule("one", "access_checker", "answer 403\n", "cache = true"));
    world.get("a.test", "/x.cgi").expect(403);
    world.write_rule("one", "answer 410\n");
    world.get("a.test", "/x.cgi").expect(403);
    world.stop();
}

fn a_half_written_rule_is_not_obeyed() {
    use std::io::Write as _;
    let world = with_rule("answer 403\n");
    world.get("a.test", "/x.cgi").expect(403);
    // Opened and being written, as by an editor on a slow disk.
    let mut file = fs::File::create(world.path("rules/one.rb")).expect("our own file");
    file.write_all(b"answer 404\nif request.path ==").expect("our own file");
    let status = world.get("a.test", "/x.cgi").status;
    assert!(status == 403 || status == 200, "half a rule was obeyed: {status}");
    file.write_all(b" \"/x.cgi\"\n  answer 410\nend\n").expect("our own file");
    drop(file);
    // A program that another test starts just now has the file open too, until it runs.
    wait::until("the whole rule is obeyed", || world.get("a.test", "/x.cgi").status == 410);
    world.stop();
}

fn a_deleted_rule_is_said_and_harms_nobody() {
    let world = with_rule("answer 403\n");
    world.get("a.test", "/x.cgi").expect(403);
    fs::remove_file(world.path("rules/one.rb")).expect("our own file");
    world.get("a.test", "/x.cgi").expect(200);
    wait::until("the missing file is logged", || world.log().contains("one.rb"));
    world.write_rule("one", "answer 410\n");
    world.get("a.test", "/x.cgi").expect(410);
    world.stop();
}

fn bad_rules_are_said_once_with_their_line_and_harm_nobody() {
    const GUARD: &str = "# the second line fails\n";
    let world = with_rule("");
    for (name, line) in [
        ("syntax error", "request.path )"),
        ("exception", "raise \"on purpose\""),
        ("wrong type", "Cgroup::CPU.new(7)"),
        ("unknown limit", "limit speed: \"10%\""),
        ("endless loop", "loop {}"),
        ("loop that rescues", "begin; while true; end; rescue Exception; retry; end"),
        ("endless ensure", "begin; loop {}; ensure; loop {}; end"),
        ("memory bomb", "\"a\" * (1 << 30)"),
        ("growing array", "a = []; loop { a << \"x\" * 1000 }"),
        ("symbol flood", "i = 0; loop { \"s#{i += 1}\".to_sym }"),
        ("deep recursion", "def f(n); f(n + 1); end; f(0)"),
        ("no such method", "request.colour"),
    ] {
        let before = world.log().len();
        world.write_rule("one", &format!("{GUARD}{line}\n"));
        for _ in 0..3 {
            world.get("a.test", "/x.cgi").expect(200);
        }
        let said = || {
            let log = world.log()[before..].to_owned();
            log.lines().filter(|line| line.contains("one.rb:2")).map(str::to_owned).collect::<Vec<_>>()
        };
        wait::until(&format!("{name}: the log names file and line"), || !said().is_empty());
        // Two edge threads may each meet the failure of an evaluation once; neither repeats it.
        assert!(said().len() <= 2, "{name}: {:?}", said());
        assert!(said()[0].contains("NGY06"), "{name}: {:?}", said());
    }
    world.write_rule("one", "answer 410\n");
    world.get("a.test", "/x.cgi").expect(410);
    world.stop();
}

fn a_rule_that_must_not_fail_refuses_instead() {
    let world = start(builder().rule("one", "access_checker", "raise \"broken\"\n", "on_error = \"refuse\""));
    let refused = world.get("a.test", "/x.cgi").expect(503);
    assert!(refused.text().contains("NGY04"), "{refused:?}");
    assert!(!refused.text().contains("one.rb"), "the client is told of the operator's files: {refused:?}");
    world.write_rule("one", "# nothing\n");
    world.get("a.test", "/x.cgi").expect(200);
    world.stop();
}

/// How the only rule fares.
fn rule_status(world: &World) -> Value {
    fn find(value: &Value) -> Option<&Value> {
        match value {
            Value::Object(map) => map
                .get("rules")
                .filter(|rules| rules[0]["killed"].is_u64())
                .or_else(|| map.values().find_map(find)),
            Value::Array(list) => list.iter().find_map(find),
            _ => None,
        }
    }
    let status = world.status();
    find(&status).unwrap_or_else(|| panic!("no rule in {status}"))[0].clone()
}

fn one_long_call_of_a_rule_is_ended_and_others_are_answered() {
    // Twenty seconds of one thread, in one instruction.
    const LONG: &str = "(\"a\" * 800_000).index(\"a\" * 400_000 + \"b\")";
    let text = format!("x = 1\n{LONG} if request.path == \"/long.cgi\"\n");
    let world = start(builder().rule("one", "access_checker", &text, "").set("edge", "threads = 1"));
    world.write_program("alice", "cgi/long.cgi", "#!/bin/sh\nprintf 'Content-Type: text/plain\\n\\nfine'\n");
    let mut long = Connection::open(world.http());
    let mut other = Connection::open(world.http());
    for _ in 0..4 {
        long.send("GET /long.cgi HTTP/1.1\r\nHost: a.test\r\n\r\n");
        other.send(format!("GET {} HTTP/1.1\r\nHost: b.test\r\n\r\n", fresh("/x.cgi")));
        assert_eq!(other.response().status, 200);
        assert_eq!(long.response().status, 200, "it goes on without the rule");
    }
    wait::until("the log names file and line", || {
        world.log().lines().any(|line| line.contains("NGY0609") && line.contains("one.rb:2"))
    });
    let status = rule_status(&world);
    assert_eq!(status["killed"], 4, "{status}");
    assert_eq!(status["state"], "in_force", "others in between were fine: {status}");

    world.write_rule("one", &format!("{LONG}\n"));
    for _ in 0..5 {
        world.get("a.test", "/x.cgi").expect(200);
    }
    let status = rule_status(&world);
    assert_eq!(status["killed"], 7, "a rule that is set aside is not evaluated: {status}");
    assert_eq!(status["state"]["set_aside"]["kind"], "time", "{status}");
    wait::until("it is said", || world.log().matches("NGY0612").count() == 1);
    world.write_rule("one", "answer 410\n");
    world.get("a.test", "/x.cgi").expect(410);
    assert_eq!(rule_status(&world)["state"], "in_force");
    world.stop();
}

/// Short for a text, long for a compiler.
fn long_to_compile() -> String {
    format!("f({}1)\n", "1,".repeat(23_000))
}

fn a_text_that_takes_long_to_compile_is_refused() {
    let world = start(builder().stored_rule("limits", "access_checker", ""));
    let refused = world.try_set_rule("limits", &long_to_compile());
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("NGY0610"), "{said}");
    // The supervisor itself is asked here.
    let line = json!({ "rule": { "name": "limits", "text": long_to_compile() } }).to_string();
    let refused = world.try_import(&line);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("compiling it takes more than"), "{said}");
    world.set_rule("limits", "answer 410\n");
    world.get("a.test", "/x.cgi").expect(410);
    world.stop();
}

fn a_rule_is_tried_without_a_request() {
    let world = with_rule("");
    world.cli(&["setting", "set", "www.test", "fast"]);
    let file = world.path("tried.rb");
    let file = file.to_str().expect("UTF-8");
    let test = |text: &str| {
        fs::write(file, text).expect("it can be written");
        let path = "/search?q=1";
        let output = world.try_cli(&[
            "rule",
            "test",
            file,
            "--host",
            "www.test",
            "--path",
            path,
            "--header",
            "User-Agent: bot",
        ]);
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let text = "answer 403 if request.header['User-Agent'] == 'bot' && request.query == 'q=1'\nlimit KVS[request.host]\n";
    let (code, said) = test(text);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.starts_with("answer: 403, 0 bytes\nREFUSED: NGY0613: "), "{said}");
    assert!(said.contains("tried.rb:2: limit takes words with amounts"), "{said}");
    assert_eq!(test("answer 410 if request.path == '/x'"), (Some(0), "it decides nothing\n".into()));
    let (code, said) = test("if");
    assert!(code == Some(1) && said.contains("NGY0602"), "{said}");
    // The same for a request.
    world.write_rule("one", text);
    client::get_with(world.http(), "a.test", "/x.cgi?q=1", "User-Agent: bot\r\n").expect(403);
    world.stop();
}

fn the_check_of_a_rule_has_no_rights() {
    use std::io::Write as _;
    use std::process::{Command, Stdio};
    let check = |text: &str, look: &dyn Fn(u32)| {
        let mut command = Command::new(nagaya_tests::world::program());
        let command = command.args(["rule-check", "probe.rb"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("the built program starts");
        look(child.id());
        let mut text_to = child.stdin.take().expect("it is piped");
        text_to.write_all(text.as_bytes()).expect("it reads");
        drop(text_to);
        let output = child.wait_with_output().expect("it ends");
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice::<Value>(&output.stdout).expect("a verdict")
    };
    let has_no_rights = |pid: u32| {
        let status = |task: &std::path::Path| fs::read_to_string(task.join("status")).unwrap_or_default();
        let tasks = || fs::read_dir(format!("/proc/{pid}/task")).expect("it waits for its text");
        wait::until("each thread has its filter", || {
            let tasks: Vec<_> = tasks().map(|task| status(&task.expect("it is there").path())).collect();
            tasks.len() == 2 && tasks.iter().all(|status| status.contains("Seccomp:\t2\n"))
        });
        for task in tasks() {
            let status = status(&task.expect("it is there").path());
            for line in [
                "Uid:\t65534\t65534\t65534\t65534",
                "Gid:\t65534\t65534\t65534\t65534",
                "NoNewPrivs:\t1",
                "CapEff:\t0000000000000000",
                "CapPrm:\t0000000000000000",
                "CapBnd:\t0000000000000000",
                "Groups:\t ",
            ] {
                assert!(status.contains(&format!("{line}\n")), "{line}: {status}");
            }
        }
        let open = fs::read_dir(format!("/proc/{pid}/fd")).expect("root may look").count();
        assert_eq!(open, 3, "the standard streams alone");
    };
    assert_eq!(check("answer 410\n", &has_no_rights), Value::Null);
    let verdict = check("if request.path ==\nend\n", &|_| ());
    assert_eq!((&verdict["kind"], &verdict["line"]), (&json!("syntax"), &json!(2)), "{verdict}");
    assert_eq!(check(&long_to_compile(), &|_| ())["kind"], "compile");
}

/// The named cell of the node with this name, while it is listed.
fn named(world: &World, name: &str) -> Option<Value> {
    world.cells().into_iter().find(|cell| {
        cell["kind"] == "named" && cell["path"].as_str().is_some_and(|path| path.ends_with(name))
    })
}

fn figure_4_runs_unchanged() {
    let cgi = json!({ "kind": "cgi", "root": "cgi" });
    let world = World::builder()
        .tenant("alice")
        .site(
            json!({ "name": "target", "tenant": "alice", "hosts": ["target1.example.com"], "backend": cgi }),
        )
        .site(json!({ "name": "other", "tenant": "alice", "hosts": ["other.example.com"], "backend": cgi }))
        .rule("figure4", "access_checker", FIGURE_4, "")
        .start();
    world.write_program("alice", "cgi/x.cgi", "#!/bin/sh\nprintf 'Content-Type: text/plain\\n\\nfine'\n");
    let line = logged(&world, "target1.example.com", "/x.cgi", 200);
    let cell = line["cell"].as_str().expect("every request of a program has a cell").to_owned();
    assert!(cell.contains("httpd-limited") || cell.contains("httpd-limiterd"), "{cell}");
    let limited = named(&world, "httpd-limiterd").expect("the group of the first branch");
    assert_eq!(limited["limits"]["cpu_shares"], 25, "{limited}");
    let line = logged(&world, "other.example.com", "/x.cgi", 200);
    assert!(line["cell"].as_str().is_some_and(|cell| cell.contains("httpd")), "{line}");
    let others = named(&world, "httpd").expect("the group of the other branch");
    assert_eq!(others["limits"]["cpu_shares"], 75, "{others}");
    // The figure's disk is not in every machine. Then that is said, and the request goes on.
    if !std::path::Path::new("/sys/dev/block/8:0").exists() {
        wait::until("the missing device is logged", || world.log().contains("8:0"));
    }
    assert!(!world.log().contains("NGY06"), "the figure fails:\n{}", world.log());
    world.stop();
}

fn a_request_goes_on_in_ten_percent_of_a_core() {
    let rule = "r = Apache::Request.new\nif r.uri == \"/cpu.cgi\"\n  c = Cgroup::CPU.new \"cpu10\"\n  \
                c.cfs_period_us = 10000\n  c.cfs_quota_us = 1000\n  c.create\n  c.attach\nend\n";
    let world = with_rule(rule);
    world.write_program(
        "alice",
        "cgi/cpu.cgi",
        // A tenth of a second of CPU time, however fast the processor is.
        "#!/usr/bin/perl\nmy $n; do { $n++ for 1 .. 1000 } while ((times)[0] + (times)[1] < 0.1);\n\
         print \"Content-Type: text/plain\\n\\n$n\";\n",
    );
    let line = logged(&world, "a.test", "/cpu.cgi", 200);
    let number = |name: &str| line[name].as_u64().unwrap_or_else(|| panic!("no {name} in {line}"));
    // Ten times its CPU time, less what is rounded away.
    assert!(number("duration_us") * 20 >= number("cpu_us") * 10 * 19, "{line}");
    assert!(line["cell"].as_str().is_some_and(|cell| cell.contains("cpu10")), "{line}");
    let line = logged(&world, "a.test", "/x.cgi", 200);
    assert!(line["cell"].as_str().is_some_and(|cell| !cell.contains("cpu10")), "{line}");
    world.stop();
}

fn settings_come_from_the_store() {
    let world = with_rule("status = KVS.get(request.host, \"status\")\nanswer status if status\n");
    world.get("a.test", "/x.cgi").expect(200);
    world.cli(&["setting", "set", "a.test", "--json", "{\"status\": 410}"]);
    world.get("a.test", "/x.cgi").expect(410);
    world.get("b.test", "/x.cgi").expect(200);
    world.cli(&["setting", "set", "a.test", "--json", "{\"status\": 404}"]);
    world.get("a.test", "/x.cgi").expect(404);
    world.cli(&["setting", "delete", "a.test"]);
    world.get("a.test", "/x.cgi").expect(200);
    world.stop();
}

fn phases_run_in_their_order_and_share_notes() {
    let note =
        |word: &str| format!("n = Apache::Request.new.notes\nn[\"seen\"] = \"#{{n[\"seen\"]}}{word} \"\n");
    let world = start(
        builder()
            .rule(
                "fixups",
                "fixups",
                &format!("{}Apache::Request.new.headers_out[\"X-Seen\"] = n[\"seen\"]\n", note("fixups")),
                "",
            )
            .rule("access", "access_checker", &note("access"), "")
            .rule("read", "post_read_request", &note("read"), "")
            .rule(
                "log",
                "log_transaction",
                "r = Apache::Request.new\nApache.errlogger Apache::APLOG_WARNING, \
                   \"ended with #{r.status} after #{r.notes[\"seen\"]}\"\n",
                "",
            ),
    );
    let answer = world.get("a.test", "/x.cgi").expect(200);
    assert_eq!(answer.header("x-seen").map(str::trim), Some("read access fixups"));
    wait::until("the last phase has run", || world.log().contains("ended with 200 after read access fixups"));
    world.stop();
}

fn a_lane_lets_one_request_in_after_the_other() {
    let held = Held::start();
    let address = held.backend.address.to_string();
    let world = World::builder()
        .site_of("alice", "slow", json!({ "kind": "http", "address": address }))
        .rule("one", "access_checker", "lane \"one-by-one\", run: 1\n", "")
        .start();
    let mut asked: Vec<Connection> = (0..3)
        .map(|n| {
            let mut connection = Connection::open(world.http());
            connection.send(format!("GET /{n} HTTP/1.1\r\nHost: slow.test\r\n\r\n"));
            wait::until(&format!("request {n} runs or waits"), || {
                let waiting = world.metric("nagaya_requests_waiting", "");
                waiting == f64::from(n) && !held.arrived().is_empty()
            });
            connection
        })
        .collect();
    assert_eq!(held.arrived(), ["/0"]);
    for (n, connection) in asked.iter_mut().enumerate() {
        held.let_go(1);
        assert_eq!(connection.response().expect(200).text(), format!("/{n}"));
    }
    world.stop();
}

fn a_lane_finds_its_own_bound() {
    let held = Held::start();
    let address = held.backend.address.to_string();
    let world = World::builder()
        .site_of("alice", "slow", json!({ "kind": "http", "address": address }))
        .rule("found", "access_checker", "lane \"found\", run: \"auto\"\n", "")
        .start();
    let mut asked: Vec<Connection> = (0..12)
        .map(|n| {
            let mut connection = Connection::open(world.http());
            connection.send(format!("GET /{n} HTTP/1.1\r\nHost: slow.test\r\n\r\n"));
            connection
        })
        .collect();
    let counts = || {
        let lanes: Value = serde_json::from_str(&world.cli(&["lanes", "--json"])).expect("JSON");
        let lanes = lanes.as_array().cloned().unwrap_or_default();
        let found =
            lanes.into_iter().find(|lane| lane["name"].as_str().is_some_and(|name| name.ends_with("found")));
        found.map(|lane| ["run", "running", "waiting"].map(|count| lane[count].as_u64().unwrap_or(0)))
    };
    wait::until("as many run as it lets, and the others wait", || {
        counts()
            .is_some_and(|[run, running, waiting]| run == running && running > 0 && running + waiting == 12)
    });
    assert!(
        counts().is_some_and(|[run, ..]| run < 12),
        "nobody said a number, and not all run: {:?}",
        counts()
    );
    held.let_go(12);
    for (n, connection) in asked.iter_mut().enumerate() {
        assert_eq!(connection.response().expect(200).text(), format!("/{n}"));
    }
    world.stop();
}

fn wrong_name_in_a_rule_is_logged_and_harms_nobody() {
    let world = with_rule("");
    for (text, said) in [
        ("c = Cgroup::CPU.new \"../../escape\"\nc.shares = 10\nc.create\nc.attach\n", "escape"),
        ("c = Cgroup::CPU.new \"a/b\"\nc.shares = 10\nc.create\nc.attach\n", "a/b"),
        (
            "b = Cgroup::BLKIO.new \"disk\"\nb.throttle_read_bps_device = \"4095:7 1000000\"\nb.create\nb.attach\n",
            "4095:7",
        ),
        (
            "b = Cgroup::BLKIO.new \"disk\"\nb.throttle_read_bps_device = \"sda 1000000\"\nb.create\nb.attach\n",
            "sda",
        ),
    ] {
        world.write_rule("one", text);
        world.get("a.test", "/x.cgi").expect(200);
        wait::until(&format!("the log mentions {said}"), || world.log().contains(said));
    }
    assert!(!std::path::Path::new("/sys/fs/cgroup/cpu/escape").exists());
    world.stop();
}

fn a_syntax_error_is_found_before_the_node_starts() {
    let world = builder().rule("one", "access_checker", "# fine\nif (\n", "").prepare();
    let output = world.try_cli(&["check-config"]);
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(text.contains("one.rb:"), "{text}");
    world.launch();
    client::get(world.http(), "nobody.test", "/").expect(404);
    world.stop();
}

fn a_stored_rule_holds_at_once_and_a_broken_one_is_refused() {
    let world = start(builder().stored_rule("limits", "access_checker", ""));
    // Named and not there: a missing file.
    world.get("a.test", "/x.cgi").expect(200);
    wait::until("the missing rule is logged", || world.log().contains("limits.rb: cannot be read"));
    let mut connection = Connection::open(world.http());
    for turn in 0..10 {
        let status = if turn % 2 == 0 { 404 } else { 410 };
        world.set_rule("limits", &format!("answer {status}\n"));
        connection.send("GET /x.cgi HTTP/1.1\r\nHost: a.test\r\n\r\n");
        assert_eq!(connection.response().status, status, "turn {turn}");
    }
    let broken = world.try_set_rule("limits", "answer 403\nif request.path ==\nend\n");
    let said = String::from_utf8_lossy(&broken.stderr).into_owned();
    assert!(
        !broken.status.success() && said.contains("drafts/limits.rb:3: ") && said.contains("NGY0602"),
        "{said}"
    );
    let line = json!({ "rule": { "name": "limits", "text": "answer 403\nend\n" } }).to_string();
    let said = String::from_utf8_lossy(&world.try_import(&line).stderr).into_owned();
    assert!(said.contains("line 1: store:limits:2: ") && said.contains("NGY0212"), "{said}");
    world.get("a.test", "/x.cgi").expect(410);
    assert_eq!(world.cli(&["rule", "show", "limits"]), "answer 410\n");
    let listed: Value = serde_json::from_str(&world.cli(&["rule", "list", "--json"])).expect("it is JSON");
    assert_eq!(listed, json!([{ "name": "limits", "bytes": 11, "lines": 1 }]));
    only_the_node_reads(&world.path("run/rules/limits.rb"));
    world.cli(&["rule", "remove", "limits"]);
    world.get("a.test", "/x.cgi").expect(200);
    let again = world.try_cli(&["rule", "remove", "limits"]);
    assert!(String::from_utf8_lossy(&again.stderr).contains("NGY0211"), "{again:?}");
    world.stop();
}

/// Neither the file nor the directory it is in.
fn only_the_node_reads(file: &std::path::Path) {
    use std::os::unix::fs::PermissionsExt as _;
    for path in [file, file.parent().expect("it is in a directory")] {
        let mode = fs::metadata(path).expect("it is there").permissions().mode();
        assert_eq!(mode & 0o027, 0, "{}: {mode:o}", path.display());
    }
}

fn rules_of_the_store_outlast_the_node_and_come_with_an_import() {
    let world = start(builder().stored_rule("limits", "access_checker", "on_error = \"refuse\""));
    world.get("a.test", "/x.cgi").expect(503);
    world.set_rule("limits", "answer 404\n");
    let exported = world.cli(&["site", "export"]);
    assert!(
        exported.ends_with("{\"rule\":{\"name\":\"limits\",\"text\":\"answer 404\\n\"}}\n"),
        "{exported}"
    );
    // Killed, it leaves its files behind; what counts is what the store has then.
    nagaya_tests::machine::signal(world.pid(), "KILL");
    world.wait_for_end();
    world.set_rule("limits", "answer 410\n");
    world.launch();
    world.get("a.test", "/x.cgi").expect(410);
    world.import_lines(&exported);
    world.get("a.test", "/x.cgi").expect(404);
    world.stop();
}

/// As limiters written for mod_mruby are made: classes and what is shared in one file, counting up and down in two others.
const LIMITER_INIT: &str = "
Userdata.new.shared_mutex = Mutex.new :global => true
Userdata.new.shared_cache = Cache.new :namespace => 'limiter'
Userdata.new.shared_cache.clear
class Limiter
  def initialize(cache, key)
    @cache, @key = cache, key
  end

  def current
    @cache[@key].to_i
  end

  def add(by)
    @cache[@key] = [current + by, 0].max.to_s
  end
end
";

const LIMITER_UP: &str = "
Server = get_server_class
r = Server::Request.new
limit = Limiter.new(Userdata.new.shared_cache, r.hostname)
mutex = Userdata.new.shared_mutex
if r.uri == '/count'
  answer 200, limit.current.to_s
else
  late = mutex.try_lock_loop(50000) do
    begin
      limit.add 1
      Server.return Server::HTTP_SERVICE_UNAVAILABLE if limit.current > 2
    ensure
      mutex.unlock
    end
  end
  Server.errlogger Server::LOG_ERR, 'limiter: the lock was not free' if late
end
";

const LIMITER_DOWN: &str = "
r = get_server_class::Request.new
mutex = Userdata.new.shared_mutex
unless r.uri == '/count'
  mutex.try_lock_loop(50000) do
    Limiter.new(Userdata.new.shared_cache, r.hostname).add(-1)
    mutex.unlock
  end
end
";

fn a_limiter_written_as_a_rule_counts_requests_of_all_threads() {
    let held = Held::start();
    let http = json!({ "kind": "http", "address": held.backend.address.to_string() });
    let world = World::builder()
        .set("edge", "threads = 4")
        .site_of("alice", "a", http.clone())
        .site_of("bob", "b", http)
        .rule("init", "init", LIMITER_INIT, "")
        .rule("up", "access_checker", LIMITER_UP, "on_error = \"refuse\"")
        .rule("down", "log_transaction", LIMITER_DOWN, "")
        .start();
    let count = |host: &str| world.get(host, "/count").expect(200).text().to_owned();
    let ask = |target: &str| {
        let mut connection = Connection::open(world.http());
        connection.send(format!("GET {target} HTTP/1.1\r\nHost: a.test\r\n\r\n"));
        connection
    };
    let mut running = vec![ask("/0"), ask("/1")];
    wait::until("two run", || held.arrived().len() == 2);
    assert_eq!((count("a.test"), count("b.test")), ("2".into(), "0".into()), "each host has a counter");
    // Each connection may be another thread's.
    for turn in 0..20 {
        assert_eq!(ask("/more").response().status, 503, "turn {turn}");
    }
    wait::until("those that were refused are counted no more", || count("a.test") == "2");
    // One is answered, and the client of the other leaves.
    drop(running.pop());
    wait::until("who has left is counted no more", || count("a.test") == "1");
    held.let_those_go(2);
    running[0].response().expect(200);
    wait::until("nobody is counted", || count("a.test") == "0");
    held.let_go(1);
    ask("/again").response().expect(200);
    wait::until("nobody is counted", || count("a.test") == "0");
    // A thread whose Ruby is made anew empties nobody's counter.
    let mut running = ask("/2");
    wait::until("one runs", || count("a.test") == "1");
    world.write_rule("down", "loop {}");
    for _ in 0..20 {
        assert_eq!(count("a.test"), "1");
    }
    held.let_go(1);
    running.response().expect(200);
    assert!(!world.log().contains("the lock was not free"), "{}", world.log());
    world.stop();
}

/// Five requests of a host within a second shut it out for ten. Tests bring their own time.
const DETECTOR: &str = "
cache, lock = Cache.new(:namespace => 'floods'), Mutex.new(:name => 'floods')
at = request.header['X-At'].to_f
lock.try_lock_loop do
  begin
    since, count, until_ = cache[request.host].to_s.split(' ').map(&:to_f)
    if until_ && until_ > at
      answer 503, 'flood'
    else
      since, count = at, 0 if since.nil? || at - since > 1 || until_ && until_ > 0
      count += 1
      cache[request.host] = \"#{since} #{count} #{count >= 5 ? at + 10 : 0}\"
    end
  ensure
    lock.unlock
  end
end
";

fn a_detector_of_floods_shuts_out_a_host_and_lets_it_in_again() {
    let world = with_rule(DETECTOR);
    let ask = |host: &str, at: &str| {
        let mut connection = Connection::open(world.http());
        connection.send(format!("GET /x.cgi HTTP/1.1\r\nHost: {host}\r\nX-At: {at}\r\n\r\n"));
        connection.response().status
    };
    // Slowly, nobody minds.
    for second in 0..10 {
        assert_eq!(ask("a.test", &format!("{}", 100 + 2 * second)), 200);
    }
    let flood: Vec<u16> = (0..8).map(|n| ask("a.test", &format!("200.{n}"))).collect();
    assert_eq!(flood, [200, 200, 200, 200, 200, 503, 503, 503]);
    assert_eq!((ask("b.test", "201"), ask("a.test", "205")), (200, 503), "it is one host's");
    assert_eq!(ask("a.test", "211"), 200);
    world.stop();
}
