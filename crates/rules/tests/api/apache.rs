//! `Apache`: what rules of mod_mruby read, set and answer.

use nagaya_rules::{HeaderAction, LogLevel, NumberFact, RulePhase, RuleResponse, TextFact, Verdict};

use crate::world::World;

fn world() -> World {
    World::get("http://www.example.com/cgi/a.cgi?x=1")
}

#[test]
fn a_request_is_read_as_in_apache() {
    let world = world().header("Range", "bytes=0-1").header("Authorization", "Basic bWF0c3U6c2VjcmV0");
    for (method, value) in [
        ("hostname", "\"www.example.com\""),
        ("method", "\"GET\""),
        ("method_number", "0"),
        ("uri", "\"/cgi/a.cgi\""),
        ("unparsed_uri", "\"/cgi/a.cgi?x=1\""),
        ("args", "\"x=1\""),
        ("the_request", "\"GET /cgi/a.cgi?x=1 HTTP/1.1\""),
        ("protocol", "\"HTTP/1.1\""),
        ("proto_num", "1001"),
        ("scheme", "\"http\""),
        ("user", "\"matsu\""),
        ("ap_auth_type", "\"Basic\""),
        ("filename", "\"/home/demo/www/cgi/a.cgi\""),
        ("document_root", "\"/home/demo/www\""),
        ("path_info", "nil"),
        ("range", "\"bytes=0-1\""),
        ("status", "200"),
        ("status_line", "nil"),
        ("content_length", "0"),
        ("content_type", "nil"),
        ("header_only", "0"),
        ("assbackwards", "0"),
        ("proxyreq", "0"),
        ("response_time", "0.0015"),
        ("main?", "false"),
    ] {
        assert_eq!(world.value(&format!("Apache::Request.new.{method}")), value, "{method}");
    }
    assert_eq!(World::get("http://a/").text(TextFact::Hostname, "").value("Apache::Request.new.args"), "nil");
    let head = World::request("HEAD", "http://a/");
    assert_eq!(head.value("r = Apache::Request.new; [r.header_only, r.method_number]"), "[1, 0]");
    let post = World::request("POST", "http://a/").text(TextFact::Protocol, "HTTP/2.0");
    assert_eq!(post.value("r = Apache::Request.new; [r.method_number, r.proto_num]"), "[2, 2000]");
    assert_eq!(World::request("BREW", "http://a/").value("Apache::Request.new.method_number"), "26");
}

#[test]
fn a_user_is_only_what_can_be_one() {
    for (field, user) in [
        ("Basic bWF0c3U6c2VjcmV0", "\"matsu\""),
        ("basic  bWF0c3U6", "\"matsu\""),
        ("Basic OnNlY3JldA==", "nil"),
        ("Basic !!!", "nil"),
        ("Basic bWF0c3U", "nil"),
        ("Basic AToB", "nil"),
        ("Bearer bWF0c3U6", "nil"),
        ("Basic", "nil"),
    ] {
        assert_eq!(world().header("Authorization", field).value("Apache::Request.new.user"), user, "{field}");
    }
}

#[test]
fn a_status_ends_the_request_but_not_the_script() {
    let verdict = world().decide("Apache.return(Apache::HTTP_FORBIDDEN); Apache.rputs 'after'");
    let answer = RuleResponse { status: 403, body: b"after".to_vec(), ..RuleResponse::default() };
    assert_eq!(verdict.answer, Some(answer));
}

#[test]
fn ok_and_declined_mean_to_go_on() {
    for status in ["Apache::OK", "Apache::DECLINED"] {
        let verdict = world().decide(&format!("Apache.return({status})"));
        assert_eq!(verdict.answer, None, "{status}");
        let verdict = world().decide(&format!("Apache.return(503); Apache.return({status})"));
        assert_eq!(verdict.answer, None, "{status}");
    }
    let verdict = world().decide("Apache.echo 'hello'; Apache.return(Apache::OK)");
    assert_eq!(verdict.answer, Some(RuleResponse { body: b"hello\n".to_vec(), ..RuleResponse::default() }));
}

#[test]
fn numbers_that_are_no_status_are_errors() {
    for (rule, class) in [
        ("Apache.return(99)", "ArgumentError"),
        ("Apache.return(100000)", "ArgumentError"),
        ("Apache.return(-7)", "ArgumentError"),
        ("Apache.return('403')", "TypeError"),
    ] {
        let rescued = format!("begin; {rule}; rescue => e; Apache.rputs e.class; end");
        assert_eq!(world().written(&rescued), class, "{rule}");
    }
}

#[test]
fn written_values_become_text() {
    assert_eq!(
        world().written("Apache.rputs 1; Apache.rputs :a; Apache.echo 2.5; Apache.rputs true"),
        "1a2.5\ntrue"
    );
}

#[test]
fn header_fields_are_read_with_what_rules_have_set() {
    let mut world = world().header("User-Agent", "ab").header("Accept", "a").header("accept", "b");
    world.headers_out = vec![("Server".to_owned(), "x".to_owned())];
    for (expression, value) in [
        ("Apache::Request.new.headers_in['user-agent']", "\"ab\""),
        ("Apache::Request.new.headers_in.user_agent", "\"ab\""),
        ("Apache::Request.new.headers_in.referer", "nil"),
        ("h = Apache::Request.new.headers_in; h['X'] = 'y'; h['x']", "\"y\""),
        ("h = Apache::Request.new.headers_in; h['User-Agent'] = nil; h['User-Agent']", "nil"),
        (
            "h = Apache::Headers_in.new; h['X'] = 'y'; h.all",
            "{\"User-Agent\" => \"ab\", \"Accept\" => \"b\", \"X\" => \"y\"}",
        ),
        ("Apache::Request.new.headers_out['Server']", "\"x\""),
        ("Apache::Request.new.headers_out['Absent']", "nil"),
        ("h = Apache::Headers_out.new; h['Server'] = 'z'; h.all", "{\"Server\" => \"z\"}"),
        ("(Apache::Headers_out.new['X'] = 'y')", "\"y\""),
    ] {
        let value = value.replace("\" => ", "\"=>");
        assert_eq!(world.value(expression).replace("\" => ", "\"=>"), value, "{expression}");
    }
}

#[test]
fn cookies_are_added_and_other_fields_replaced() {
    let verdict = world().decide(
        "h = Apache::Request.new.headers_out
         h['Set-Cookie'] = 'a=1'
         h['Set-Cookie'] = 'b=2'
         h['X-A'] = '1'
         h['X-A'] = '2'",
    );
    let edits: Vec<_> = verdict.headers_out.iter().map(|edit| (&*edit.name, &edit.action)).collect();
    let [add_a, add_b] = ["a=1", "b=2"].map(|value| HeaderAction::Add(value.into()));
    let set = HeaderAction::Set("2".into());
    assert_eq!(edits, [("Set-Cookie", &add_a), ("Set-Cookie", &add_b), ("X-A", &set)]);
}

#[test]
fn a_field_cannot_smuggle_another_one() {
    for rule in [
        "Apache::Request.new.headers_out['X'] = \"a\\r\\nSet-Cookie: b\"",
        "Apache::Request.new.headers_out[\"X: y\\r\\nZ\"] = 'a'",
        "Apache::Request.new.headers_in['X'] = 1",
    ] {
        world().fault(rule);
    }
}

#[test]
fn notes_last_from_one_phase_to_the_next() {
    let mut verdict = Verdict::default();
    let world = world();
    world
        .evaluate(RulePhase::PostReadRequest, "Apache::Request.new.notes['slow'] = 'yes'", &mut verdict)
        .unwrap();
    world
        .evaluate(RulePhase::Fixups, "Apache.rputs Apache::Request.new.notes['slow']", &mut verdict)
        .unwrap();
    assert_eq!(verdict.answer.unwrap().body, b"yes");
    assert_eq!(world.value("Apache::Notes.new['absent']"), "nil");
}

#[test]
fn a_request_can_be_led_elsewhere() {
    let verdict = world().decide(
        "r = Apache::Request.new
         r.uri = '/sorry.html'
         r.args = nil
         r.user = 'someone'
         r.content_type = 'text/plain'
         r.content_encoding = 'identity'
         r.status = 404
         Apache.rputs r.uri if r.uri != '/sorry.html'",
    );
    let rewrites = &verdict.rewrites;
    assert_eq!(rewrites.path.as_deref(), Some("/sorry.html"));
    assert_eq!((rewrites.user.as_deref(), rewrites.status), (Some("someone"), Some(404)));
    assert_eq!(rewrites.content_type.as_deref(), Some("text/plain"));
    assert_eq!(verdict.headers_out.len(), 1);
    assert_eq!(verdict.answer, None);
    for rule in
        ["uri = 'relative'", "uri = '/a/../b'", "filename = 'x'", "document_root = '..'", "status = 1"]
    {
        world().fault(&format!("Apache::Request.new.{rule}"));
    }
}

#[test]
fn variables_of_programs_are_read_and_set() {
    let mut world = world();
    world.env = vec![("MODE", "test")];
    let verdict = world.decide("e = Apache::Env.new; e['LIMITED'] = e['MODE']; e['MODE'] = nil");
    assert_eq!(verdict.env("LIMITED"), Some(Some("test")));
    assert_eq!(verdict.env("MODE"), Some(None));
    let all = world.value("e = Apache::Env.new; e['B'] = 'b'; e.all['MODE'] + e.all['B'] + e['B']");
    assert_eq!(all, "\"testbb\"");
}

#[test]
fn connection_server_and_scoreboard_say_what_there_is_to_say() {
    let mut world = world().number(NumberFact::SiteFree, 3);
    world.load = [0.5, 1.0, 2.25];
    for (expression, value) in [
        ("Apache::Connection.new.remote_ip", "\"192.0.2.7\""),
        ("Apache::Connection.new.remote_port", "40000"),
        ("Apache::Connection.new.local_ip", "\"198.51.100.1\""),
        ("Apache::Connection.new.local_port", "80"),
        ("Apache::Connection.new.remote_host", "nil"),
        ("Apache::Connection.new.keepalives", "2"),
        ("Apache::Server.new.document_root", "\"/home/demo/www\""),
        ("Apache::Server.new.hostname", "\"www.example.com\""),
        ("Apache::Scoreboard.new.loadavg", "[0.5, 1.0, 2.25]"),
        ("Apache::Scoreboard.new.busy_worker", "17"),
        ("Apache::Scoreboard.new.idle_worker", "3"),
        ("server_name", "\"Apache\""),
        ("get_server_class.equal?(Apache)", "true"),
        ("Apache.module_name", "\"nagaya\""),
        ("Apache.get_tid", "0"),
    ] {
        assert_eq!(world.value(expression), value, "{expression}");
    }
}

#[test]
fn the_response_is_known_in_the_last_phase() {
    let world = world()
        .number(NumberFact::Status, 404)
        .number(NumberFact::BytesOut, 512)
        .text(TextFact::StatusLine, "404 Not Found")
        .text(TextFact::ContentType, "text/html");
    let mut verdict = Verdict::default();
    let rule = "r = Apache::Request.new; Apache.log Apache::LOG_INFO, [r.status, r.content_length, r.status_line, r.content_type].join(' ')";
    world.evaluate(RulePhase::LogTransaction, rule, &mut verdict).unwrap();
    assert_eq!(verdict.log, [(LogLevel::Info, "404 512 404 Not Found text/html".to_owned())]);
}

#[test]
fn lines_of_the_log_have_the_level_that_was_named() {
    let verdict = world().decide(
        "Apache.log Apache::LOG_CRIT, 'a'
         Apache.errlogger Apache::APLOG_WARNING, 'b'
         Apache.syslogger 'notice', 'c'
         Apache::Request.new.log Apache::LOG_DEBUG, 'd'
         Apache.log 'too few'",
    );
    let levels: Vec<_> = verdict.log.iter().map(|(level, _)| *level).collect();
    assert_eq!(
        levels,
        [LogLevel::Error, LogLevel::Warning, LogLevel::Notice, LogLevel::Debug, LogLevel::Warning]
    );
}
