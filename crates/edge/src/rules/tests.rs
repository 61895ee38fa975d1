//! Real rules on a node without a keeper: what they see, and what becomes of their verdicts.

use std::rc::Rc;
use std::sync::Arc;

use http::{HeaderName, HeaderValue, Method, StatusCode, Version};
use nagaya_base::{AnchoredClock, RequestId};
use nagaya_keeper_api::client::KeeperClient;
use nagaya_records::cell::{CellName, CpuQuota};
use nagaya_records::record::RecordChange;
use nagaya_rules::{OnError, RuleFile};
use tempfile::TempDir;
use tokio::task::LocalSet;

use super::*;
use crate::http::message::{ConnInfo, RequestBody, ResponseBody};
use crate::metrics::EdgeMetrics;
use crate::options::EdgeConfig;
use crate::request::context::RequestContext;
use crate::server::node::ThreadContext;
use crate::server::shared::SharedContext;

/// What a request came to before it would have been exchanged with its backend.
struct Came {
    answer: Result<Option<Response>, Refusal>,
    request: Request,
    context: Box<RequestContext>,
    waits_in: Option<Arc<EdgeLane>>,
    hints: AdmissionHints,
}

struct World {
    _directory: TempDir,
    node: ThreadContext,
}

impl World {
    fn new(rules: &[(RulePhase, &str)]) -> Self {
        Self::with(rules, OnError::Pass, "")
    }

    /// `more` is added to the site's record.
    fn with(rules: &[(RulePhase, &str)], on_error: OnError, more: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let write = |(at, (phase, text)): (usize, &(RulePhase, &str))| {
            let path = directory.path().join(format!("{at}.rb"));
            std::fs::write(&path, text).unwrap();
            RuleFile { phase: *phase, path, cache: false, on_error }
        };
        let rules = rules.iter().enumerate().map(write).collect();
        let options = EdgeConfig { rules, node: "here".into(), ..EdgeConfig::default() };
        let shared = Arc::new(SharedContext::new(
            options,
            None,
            Arc::new(EdgeMetrics::new()),
            AnchoredClock::of_wall(),
            None,
        ));
        let tenant = r#"{"name":"demo","uid":1000,"gid":1000,"home":"/srv/demo"}"#;
        let site = format!(
            r#"{{"name":"wiki","tenant":"demo","hosts":["wiki.test"],"path":"/w",
                "backend":{{"kind":"cgi","root":"web","env":{{"APP_ENV":"prod"}}}}{more}}}"#
        );
        let setting = r#"{"key":"wiki.test","value":{"cpu":"25%","run":2}}"#;
        let changes = [
            RecordChange::PutTenant(serde_json::from_str(tenant).unwrap()),
            RecordChange::PutSite(serde_json::from_str(&site).unwrap()),
            RecordChange::PutSetting(serde_json::from_str(setting).unwrap()),
        ];
        shared.apply(changes).unwrap();
        let keeper = KeeperClient::later(&directory.path().join("no-keeper"));
        Self { node: ThreadContext::new(shared, keeper), _directory: directory }
    }

    fn request(&self, target: &str) -> Request {
        let (path, query) =
            target.split_once('?').map_or((target, None), |(path, query)| (path, Some(query)));
        let mut headers = HeaderMap::new();
        headers.insert(HeaderName::from_static("accept"), HeaderValue::from_static("a"));
        let conn = ConnInfo {
            peer: "192.0.2.7:5511".parse().unwrap(),
            local: "192.0.2.1:80".parse().unwrap(),
            tls: None,
            carried: None,
            network: None,
        };
        let head = RequestHead {
            id: RequestId(0xabc),
            method: Method::GET,
            path: path.into(),
            query: query.map(Into::into),
            host: "wiki.test".into(),
            port: Some(8080),
            version: Version::HTTP_11,
            headers,
            upgrade: None,
            conn: Rc::new(conn),
        };
        Request { head: Box::new(head), body: RequestBody::empty() }
    }

    /// The steps of `request::run` up to the exchange.
    async fn ask(&self, target: &str) -> Came {
        let services = &self.node.services;
        let rules = &services.rules;
        let mut request = self.request(target);
        let mut context = RequestContext::open(services.recorder(), &services.forwarding, &request);
        let route = services.router.find(&request.head).unwrap();
        context.belongs_to(&route);
        let (applied, record) = context.verdict_and_record();
        let mut answer = on_arrival(rules, &route, &mut request, applied, record);
        let (waits_in, hints) = lane(rules, &route, applied.as_deref(), record);
        if matches!(answer, Ok(None)) {
            answer = on_admission(rules, &route, &mut request, applied.as_deref_mut(), record);
        }
        if matches!(answer, Ok(None)) {
            let id = context.id();
            let confinement = confine(rules, &route, context.applied.as_deref_mut(), id).await;
            if let Some(confinement) = confinement {
                context.execution.confine(confinement);
            }
        }
        Came { answer, request, context, waits_in, hints }
    }
}

fn variables_of(context: &RequestContext) -> Vec<ScriptVariable> {
    let route = context.route().expect("it has a site");
    variables(context.applied.as_deref(), route, context.id())
}

/// What one rule makes of a request for `/w/a%20b/x.cgi/rest?q=1`.
async fn came_of(rule: &str) -> Came {
    World::new(&[(RulePhase::AccessChecker, rule)]).ask("/w/a%20b/x.cgi/rest?q=1").await
}

async fn body_of(rule: &str) -> String {
    let came = came_of(rule).await;
    match came.answer.unwrap().expect("the rule answers").body {
        ResponseBody::Bytes(body) => String::from_utf8(body.to_vec()).unwrap(),
        _ => panic!("a rule's answer has a body of bytes"),
    }
}

fn field(response: &Response, name: &str) -> Option<String> {
    response.headers.get(name).map(|value| value.to_str().unwrap().to_owned())
}

#[tokio::test]
async fn a_rule_sees_the_request_the_site_and_the_node() {
    for (asked, seen) in [
        ("r.hostname", "wiki.test"),
        ("r.method", "GET"),
        ("r.uri", "/w/a b/x.cgi/rest"),
        ("r.unparsed_uri", "/w/a%20b/x.cgi/rest?q=1"),
        ("r.args", "q=1"),
        ("r.protocol", "HTTP/1.1"),
        ("r.scheme", "http"),
        ("r.document_root", "/srv/demo/web"),
        ("r.filename", "/srv/demo/web/a b/x.cgi"),
        ("r.path_info", "/rest"),
        ("r.headers_in[\"Accept\"]", "a"),
        ("r.headers_in[\"Host\"]", "wiki.test:8080"),
        ("r.headers_in[\"X-None\"].inspect", "nil"),
        ("Apache::Connection.new.remote_ip", "192.0.2.7"),
        ("Apache::Connection.new.remote_port", "5511"),
        ("Apache::Connection.new.local_ip", "192.0.2.1"),
        ("Apache::Env.new[\"APP_ENV\"]", "prod"),
        ("request.site", "wiki"),
        ("request.tenant", "demo"),
        ("request.id.size", "32"),
        ("node.name", "here"),
        ("node.running", "0"),
        ("[site.running, site.waiting, site.wait_ms]", "[0, 0, 0]"),
        ("site.free == Apache::Scoreboard.new.idle_worker && site.free > 0", "true"),
        ("KVS.get(\"wiki.test\", \"cpu\")", "25%"),
        ("KVS.get(\"wiki.test\", \"run\")", "2"),
        ("KVS.get(\"nobody.test\").inspect", "nil"),
    ] {
        let rule = format!("r = Apache::Request.new\nanswer 200, \"#{{{asked}}}\"\n");
        assert_eq!(body_of(&rule).await, seen, "{asked}");
    }
}

#[tokio::test]
async fn a_rule_that_says_nothing_leaves_everything_as_it_was() {
    let mut came = came_of("Apache::Request.new.hostname\n").await;
    assert!(matches!(came.answer, Ok(None)));
    assert!(came.waits_in.is_none() && came.context.execution.get().is_none());
    assert_eq!(&*came.request.head.path, "/w/a%20b/x.cgi/rest");
    assert!(variables_of(&came.context).is_empty());
    let mut response = Response::new(StatusCode::OK);
    came.context.apply_rules(&mut response);
    assert_eq!((response.status, response.headers.len()), (StatusCode::OK, 0));
}

#[tokio::test]
async fn without_rules_nothing_is_kept() {
    let came = World::new(&[]).ask("/w/").await;
    assert!(came.context.applied.is_none() && came.context.execution.get().is_none());
}

#[tokio::test]
async fn answers_are_what_the_rule_wrote_or_a_refusal_in_our_words() {
    let answer = came_of("answer 403, \"no\"\n").await.answer.unwrap().unwrap();
    assert_eq!(answer.status, StatusCode::FORBIDDEN);
    assert_eq!(field(&answer, "content-type").as_deref(), Some("text/plain; charset=utf-8"));
    let refused = came_of("answer 404\n").await.answer;
    assert!(matches!(refused, Err(Refusal::Ruled(StatusCode::NOT_FOUND))));
    let moved = came_of("redirect \"https://wiki.test/\"\n").await.answer.unwrap().unwrap();
    assert!(moved.status.is_redirection());
    assert_eq!(field(&moved, "location").as_deref(), Some("https://wiki.test/"));
}

#[tokio::test]
async fn fields_change_but_not_those_that_frame_a_message() {
    let rule = "r = Apache::Request.new\n\
                r.headers_in[\"X-Rule\"] = \"1\"\nr.headers_in[\"Accept\"] = \"b\"\nr.headers_in[\"Content-Length\"] = \"9\"\n\
                r.headers_out[\"X-Out\"] = \"2\"\nr.headers_out[\"Connection\"] = \"close\"\nr.headers_out[\"Set-Cookie\"] = \"a=1\"\n\
                r.headers_out[\"Set-Cookie\"] = \"b=2\"\nr.content_type = \"text/css\"\nr.status = 418\n";
    let mut came = came_of(rule).await;
    let headers = &came.request.head.headers;
    assert_eq!((&headers["x-rule"], &headers["accept"]), (&"1".parse().unwrap(), &"b".parse().unwrap()));
    assert!(!headers.contains_key("content-length"));
    let mut response = Response::new(StatusCode::OK);
    came.context.apply_rules(&mut response);
    assert_eq!(response.status.as_u16(), 418);
    assert_eq!(field(&response, "x-out").as_deref(), Some("2"));
    assert_eq!(field(&response, "content-type").as_deref(), Some("text/css"));
    assert_eq!(response.headers.get_all("set-cookie").iter().count(), 2);
    assert!(!response.headers.contains_key("connection"));
    let told = &came.context.applied.as_ref().unwrap().rules.shared.told;
    assert!(!told.first("the request field content-length is not a rule's to change"), "it is said");
}

#[tokio::test]
async fn a_status_that_does_not_fit_the_body_is_left_out() {
    for (before, rule, after) in [(206, "200", 206), (200, "304", 200), (304, "304", 304), (404, "200", 200)]
    {
        let mut came = came_of(&format!("Apache::Request.new.status = {rule}\n")).await;
        let mut response = Response::new(StatusCode::from_u16(before).unwrap());
        came.context.apply_rules(&mut response);
        assert_eq!(response.status.as_u16(), after, "{before} -> {rule}");
    }
}

#[tokio::test]
async fn paths_are_rewritten_beneath_the_document_root_only() {
    for (rule, path) in [
        ("r.uri = \"/w/c d.html\"", "/w/c%20d.html"),
        ("r.uri = \"/w//x/./c.html\"", "/w//x/c.html"),
        ("r.uri = \"/../c.html\"", "/w/a%20b/x.cgi/rest"),
        ("r.filename = \"/srv/demo/web/e/f.cgi\"", "/w/e/f.cgi"),
        ("r.filename = r.document_root + \"/g?h.html\"", "/w/g%3Fh.html"),
        ("r.filename = \"/srv/demo/webshop/f.cgi\"", "/w/a%20b/x.cgi/rest"),
        ("r.filename = \"/etc/passwd\"", "/w/a%20b/x.cgi/rest"),
        ("r.document_root = \"/srv/demo/web/old\"", "/w/old/a%20b/x.cgi/rest"),
        ("r.document_root = \"/srv/demo\"", "/w/a%20b/x.cgi/rest"),
        ("r.document_root = \"/srv/demo/web/../..\"", "/w/a%20b/x.cgi/rest"),
    ] {
        let came = came_of(&format!("r = Apache::Request.new\n{rule}\n")).await;
        assert_eq!(&*came.request.head.path, path, "{rule}");
    }
    let came = came_of("Apache::Request.new.args = \"a=%20 b\"\n").await;
    assert_eq!(came.request.head.query.as_deref(), Some("a=%20%20b"));
}

#[tokio::test]
async fn a_rules_limits_lie_over_the_sites() {
    let more = r#","request_limits":{"cpu":"50%","processes":20},"demotions":[{"after_cpu":"1s","limits":{"cpu":"5%"}}]"#;
    let site_only = World::with(&[], OnError::Pass, more).ask("/w/").await;
    let execution = site_only.context.execution.get().expect("the site's limits concern each request");
    assert_eq!(execution.confinement().limits.processes, Some(20));
    assert_eq!(execution.confinement().demotions[0].after_cpu_us, 1_000_000);

    let rule = "limit cpu: \"10%\"\ncell \"batch\", cpu: \"50%\"\ndemote after: \"500ms\", cpu: \"2%\"\n";
    let both = World::with(&[(RulePhase::Fixups, rule)], OnError::Pass, more).ask("/w/").await;
    let confinement = both.context.execution.get().unwrap().confinement();
    assert_eq!(confinement.limits.cpu, Some(CpuQuota::of_core(100)));
    assert_eq!(confinement.limits.processes, Some(20));
    assert_eq!(confinement.named[0].name.as_str(), "batch");
    let steps: Vec<_> = confinement.demotions.iter().map(|step| step.after_cpu_us).collect();
    assert_eq!(steps, [500_000]);
}

#[tokio::test]
async fn a_group_a_rule_makes_is_there_for_the_next_request() {
    let rule = "c = Cgroup::CPU.new \"httpd\"\nseen = c.exist?\nc.shares = 25\nc.create\nc.attach\n\
                Apache::Request.new.headers_in[\"X-Seen\"] = seen.to_s\n";
    let world = World::new(&[(RulePhase::AccessChecker, rule)]);
    let mut seen = Vec::new();
    for _ in 0..2 {
        let came = world.ask("/w/").await;
        seen.push(came.request.head.headers["x-seen"].to_str().unwrap().to_owned());
        assert_eq!(came.context.execution.get().unwrap().confinement().named.len(), 1);
    }
    assert_eq!(seen, ["false", "true"]);
    let httpd = world.node.shared.rules.named.get(&CellName::parse("httpd").unwrap()).unwrap();
    assert_eq!(httpd.limits.cpu_shares, Some(25));
    // Attaching says it all: no message to the keeper is needed beside that of the program.
    assert!(world.node.services.rules.to_keeper.take().unwrap().try_recv().is_err());
}

#[tokio::test]
async fn a_group_that_nothing_runs_in_is_the_keepers_to_make_once() {
    let rule = "c = Cgroup::CPU.new \"httpd\"\nc.shares = 25\nc.create\n";
    let world = World::new(&[(RulePhase::AccessChecker, rule)]);
    for _ in 0..3 {
        world.ask("/w/").await;
    }
    let mut to_keeper = world.node.services.rules.to_keeper.take().unwrap();
    assert_eq!(to_keeper.try_recv().unwrap().len(), 1);
    assert!(to_keeper.try_recv().is_err());
}

#[tokio::test]
async fn a_rule_that_answers_can_make_a_group_too() {
    let rule = "Cgroup::CPU.new(\"seen\").create\nanswer 403, \"no\"\n";
    let world = World::new(&[(RulePhase::AccessChecker, rule)]);
    let came = world.ask("/w/").await;
    LocalSet::new().run_until(async { drop(came.context.answer(came.answer.unwrap().unwrap())) }).await;
    assert_eq!(world.node.services.rules.to_keeper.take().unwrap().try_recv().unwrap().len(), 1);
}

#[tokio::test]
async fn a_lane_is_found_by_its_name_and_its_site() {
    let world = World::new(&[(RulePhase::AccessChecker, "lane \"slow\", run: 3\n")]);
    let (first, second) = (world.ask("/w/").await, world.ask("/w/").await);
    let (first, second) = (first.waits_in.unwrap(), second.waits_in.unwrap());
    assert!(Arc::ptr_eq(&first, &second));
    assert_eq!(&*first.label, "lane wiki slow");
}

#[tokio::test]
async fn a_rule_says_who_goes_first_and_who_is_not_held_back() {
    let came = World::new(&[(RulePhase::AccessChecker, "priority 5\n")]).ask("/w/").await;
    assert_eq!(came.hints, AdmissionHints { priority: 5, passes: false });
    let came = World::new(&[(RulePhase::AccessChecker, "bypass\n")]).ask("/w/").await;
    assert_eq!(came.hints, AdmissionHints { priority: 0, passes: true });
}

#[tokio::test]
async fn a_rule_that_fails_lets_pass_or_refuses_as_its_file_says() {
    for (on_error, refuses) in [(OnError::Pass, false), (OnError::Refuse, true)] {
        let rules = [(RulePhase::AccessChecker, "limit cpu: \"10%\"\nraise \"broken\"\n")];
        let came = World::with(&rules, on_error, "").ask("/w/").await;
        assert_eq!(matches!(came.answer, Err(Refusal::RuleBroken(_))), refuses);
        assert!(came.context.execution.get().is_none(), "half a verdict is none");
    }
}

#[tokio::test]
async fn notes_live_over_all_phases_and_the_last_sees_the_response() {
    let add =
        |word: &str| format!("n = Apache::Request.new.notes\nn[\"seen\"] = \"#{{n[\"seen\"]}}{word}\"\n");
    let (read, access, fixups) = (add("1"), add("2"), add("3"));
    let log = "r = Apache::Request.new\n\
               Cgroup::CPU.new(\"#{r.notes[\"seen\"]}-#{r.status}-#{r.headers_out[\"X-A\"]}-#{r.hostname}\").create\n";
    let world = World::new(&[
        (RulePhase::Fixups, &fixups),
        (RulePhase::LogTransaction, log),
        (RulePhase::PostReadRequest, &read),
        (RulePhase::AccessChecker, &access),
    ]);
    LocalSet::new()
        .run_until(async {
            let mut came = world.ask("/w/").await;
            let mut response = Response::new(StatusCode::CREATED);
            response.headers.insert("x-a", HeaderValue::from_static("b"));
            came.context.apply_rules(&mut response);
            drop(came.context.answer(response));
        })
        .await;
    let made = CellName::parse("123-201-b-wiki.test").unwrap();
    assert!(world.node.shared.rules.named.get(&made).is_some());
}

#[tokio::test]
async fn variables_go_to_the_programs() {
    let rule = "e = Apache::Env.new\ne[\"A\"] = \"1\"\ne[\"B\"] = nil\nApache::Request.new.user = \"ann\"\n";
    let came = came_of(rule).await;
    let variables = variables_of(&came.context);
    let plain: Vec<_> = variables.iter().map(|(name, value)| (&**name, value.as_deref())).collect();
    assert_eq!(plain, [("A", Some("1")), ("B", None), ("REMOTE_USER", Some("ann"))]);
}

#[tokio::test]
async fn variables_that_are_not_a_rules_are_left_out() {
    let names = [
        "SCRIPT_FILENAME",
        "DOCUMENT_ROOT",
        "PATH_TRANSLATED",
        "REMOTE_ADDR",
        "SERVER_NAME",
        "HTTPS",
        "CONTENT_LENGTH",
        "QUERY_STRING",
        "HTTP_ACCEPT",
        "PHP_VALUE",
        "PHP_ADMIN_VALUE",
        "LD_PRELOAD",
        "PATH",
        "BASH_ENV",
        "A-B",
    ];
    let set: String = names.iter().map(|name| format!("e[\"{name}\"] = \"x\"\n")).collect();
    let came =
        came_of(&format!("e = Apache::Env.new\n{set}e[\"SERVER_NAME\"] = nil\ne[\"FOO\"] = \"bar\"\n")).await;
    let variables = variables_of(&came.context);
    let plain: Vec<_> = variables.iter().map(|(name, value)| (&**name, value.as_deref())).collect();
    assert_eq!(plain, [("FOO", Some("bar"))]);
}

#[test]
fn variables_that_are_left_out_are_reported() {
    let wanted = [("LD_PRELOAD", "x"), ("SCRIPT_NAME", "x"), ("FOO", "a\0b"), ("A=B", "x"), ("BAR", "x")];
    let wanted = wanted.map(|(name, value)| (name.into(), Some(value.into())));
    let mut left_out = LeftOut::default();
    assert_eq!(apply::variables(&wanted, &mut left_out), [("BAR".into(), Some("x".into()))]);
    let names: Vec<_> = left_out.0.iter().map(|what| what.split('\'').nth(1).unwrap()).collect();
    assert_eq!(names, ["LD_PRELOAD", "SCRIPT_NAME", "FOO", "A=B"]);
}

#[tokio::test]
async fn settings_change_while_requests_run() {
    let world = World::new(&[]);
    let file = world._directory.path().join("later.rb");
    std::fs::write(&file, "answer 403\n").unwrap();
    let rule =
        RuleFile { phase: RulePhase::AccessChecker, path: file, cache: false, on_error: OnError::Pass };
    let options = EdgeConfig { rules: vec![rule], ..EdgeConfig::default() };
    world.node.shared.set_options(options);
    world.node.refresh();
    assert!(world.ask("/w/").await.answer.is_err());
    world.node.shared.set_options(EdgeConfig::default());
    world.node.refresh();
    assert!(world.ask("/w/").await.answer.is_ok());
}

/// It is made for each request, on the stack, and moved once or twice: what only some backends need is in boxes.
#[tokio::test]
async fn future_of_a_file_request_is_small() {
    let world = World::new(&[]);
    let serving = crate::request::serve(&world.node.services, world.request("/"));
    let len = size_of_val(&serving);
    assert!(len <= 1120, "{len} bytes");
}
