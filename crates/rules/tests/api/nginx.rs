//! `Nginx`: what rules of ngx_mruby read, set and answer.

use nagaya_rules::{HeaderAction, LogLevel, RuleResponse, TextFact};

use crate::world::World;

fn world() -> World {
    World::get("http://www.example.com/cgi/a.cgi?x=1&y=2").text(TextFact::Authority, "www.example.com:8080")
}

#[test]
fn a_request_is_read_as_in_nginx() {
    let world =
        world().header("X-Forwarded-Proto", "https").header("Authorization", "Basic bWF0c3U6c2VjcmV0");
    for (expression, value) in [
        ("Nginx::Request.new.hostname", "\"www.example.com\""),
        ("Nginx::Request.new.authority", "\"www.example.com:8080\""),
        ("Nginx::Request.new.request_line", "\"GET /cgi/a.cgi?x=1&y=2 HTTP/1.1\""),
        ("Nginx::Request.new.uri", "\"/cgi/a.cgi\""),
        ("Nginx::Request.new.uri_args['y']", "\"2\""),
        ("Nginx::Request.new.user", "\"matsu\""),
        ("Nginx::Request.new.filename", "\"/home/demo/www/cgi/a.cgi\""),
        ("Nginx::Request.new.content_type", "nil"),
        ("Nginx::Request.new.sub_request?", "false"),
        ("Nginx::Request.new.read_body", "0"),
        ("Nginx::Request.new.headers_in['x-forwarded-proto']", "\"https\""),
        ("Nginx::Request.new.var.http_x_forwarded_proto", "\"https\""),
        ("Nginx.var.arg_x", "\"1\""),
        ("Nginx::Var.new.remote_addr", "\"192.0.2.7\""),
        ("Nginx::Var.new.server_port", "\"80\""),
        ("Nginx::Var.new.no_such_variable", "nil"),
        ("Nginx::Var.new.exist?('host')", "true"),
        ("Nginx::Var.new.exist?('hostess')", "false"),
        ("Nginx::Connection.new.remote_ip", "\"192.0.2.7\""),
        ("Nginx::Connection.new.remote_port", "\"40000\""),
        ("Nginx::Server.new.document_root", "\"/home/demo/www\""),
        ("[Nginx::TRUE, Nginx::FALSE, Nginx::DECLINED]", "[\"1\", \"0\", -5]"),
    ] {
        assert_eq!(world.value(expression), value, "{expression}");
    }
    assert_eq!(World::get("http://a/").value("Nginx::Request.new.uri_args"), "{}");
}

#[test]
fn a_status_above_0_answers_and_others_go_on() {
    let verdict = world().decide("Nginx.echo 'busy'; Nginx.return Nginx::HTTP_TOO_MANY_REQUESTS");
    assert_eq!(
        verdict.answer,
        Some(RuleResponse { status: 429, body: b"busy\n".to_vec(), ..RuleResponse::default() })
    );
    for rule in
        ["Nginx.return Nginx::DECLINED", "Nginx.status_code = 0", "Nginx.return 403; Nginx.send_header -1"]
    {
        assert_eq!(world().decide(rule).answer, None, "{rule}");
    }
}

#[test]
fn a_redirection_names_where_to() {
    let verdict = world().decide("Nginx.redirect 'https://www.example.com/'");
    let answer = verdict.answer.unwrap();
    assert_eq!((answer.status, answer.location.as_deref()), (302, Some("https://www.example.com/")));
    let verdict = world().decide("Nginx.redirect 'http://example.org/', Nginx::HTTP_MOVED_PERMANENTLY");
    assert_eq!(verdict.answer.unwrap().status, 301);
    for rule in [
        "Nginx.redirect '/elsewhere'",
        "Nginx.redirect 'https://a/', 200",
        "Nginx.redirect \"http://a/\\r\\nX: y\"",
    ] {
        world().fault(rule);
    }
}

#[test]
fn header_fields_are_set_and_deleted() {
    let verdict = world().decide(
        "r = Nginx::Request.new
         r.headers_in['X-A'] = 'a'
         r.headers_in.delete('Accept')
         r.headers_out['X-B'] = 'b'
         r.content_type = 'text/plain'",
    );
    assert_eq!(verdict.headers_in[0].action, HeaderAction::Set("a".into()));
    assert_eq!(verdict.headers_in[1].action, HeaderAction::Remove);
    assert_eq!(verdict.headers_out.len(), 1);
    assert_eq!(verdict.rewrites.content_type.as_deref(), Some("text/plain"));
}

#[test]
fn levels_of_the_log_are_nginxs() {
    let verdict = world().decide("Nginx.log Nginx::LOG_ERR, 'a'; Nginx.errlogger Nginx::LOG_DEBUG, 'b'");
    let levels: Vec<_> = verdict.log.iter().map(|(level, _)| *level).collect();
    assert_eq!(levels, [LogLevel::Error, LogLevel::Debug]);
}
