//! Server and client of the admin interface over a real socket and a real store.
//!
//! Not here: the commands (`cli`), rules of records (`nagaya_records`).

use std::io::{Cursor, Read};
use std::path::PathBuf;
use std::thread::JoinHandle;

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use nagaya_store::ChangeMode;
use nagaya_store::RedbStore;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::UnixListener;
use tokio::sync::oneshot;

use super::*;
use crate::config::settings::AdminSettings;

struct TestNode;

const KNOWN: &str = "0123456789abcdef0123456789abcdef";
const SILENT: &str = "ffffffffffffffffffffffffffffffff";

impl AdminNode for TestNode {
    fn metrics(&self) -> BoxFuture<'_, String> {
        Box::pin(async { "nagaya_sites 3\n".into() })
    }

    fn health(&self) -> BoxFuture<'_, NodeHealth> {
        Box::pin(async { NodeHealth { ok: false, text: "the edge is starting".into() } })
    }

    /// Its processes got the first three changes.
    fn serves_by(&self, revision: u64) -> BoxFuture<'_, bool> {
        Box::pin(async move { revision <= 3 })
    }

    fn status(&self) -> BoxFuture<'_, Value> {
        Box::pin(async { json!({"edge": {"pid": 7}}) })
    }

    fn cells(&self) -> BoxFuture<'_, Option<String>> {
        Box::pin(async { Some(r#"{"cells":[]}"#.into()) })
    }

    fn instances(&self) -> BoxFuture<'_, Option<String>> {
        Box::pin(async { Some(r#"{"instances":[{"site":"wiki"}]}"#.into()) })
    }

    fn cluster(&self, _: ClusterCommand) -> BoxFuture<'_, Result<Value, Box<ProblemReply>>> {
        Box::pin(async { Ok(json!({"nodes": []})) })
    }

    /// Runs nothing: says which command it would.
    fn exec(&self, exec: ExecCommand, connection: OwnedFd) -> bool {
        use std::io::Write as _;
        let mut connection = std::os::unix::net::UnixStream::from(connection);
        connection.set_nonblocking(false).unwrap();
        connection.read_exact(&mut [0]).unwrap();
        connection.write_all(exec.command.join(" ").as_bytes()).unwrap();
        true
    }

    /// Knows one site, and is silent about another.
    fn instance(&self, site: String, act: InstanceCommand) -> BoxFuture<'_, Option<String>> {
        Box::pin(async move {
            match (site.as_str(), act) {
                ("wiki", InstanceCommand::Stop) => {
                    Some(json!({ "error": "it is in use", "code": "NGY0311" }).to_string())
                }
                ("wiki", act) => Some(json!({ "ok": true, "act": act }).to_string()),
                ("silent", _) => None,
                _ => Some("null".into()),
            }
        })
    }

    fn balance(&self, site: &str) -> Value {
        json!({ "site": site, "now": null, "decisions": [] })
    }

    fn requests(&self) -> BoxFuture<'_, Option<String>> {
        Box::pin(async { Some(r#"{"instances":[],"lanes":[]}"#.into()) })
    }

    /// Knows one request, and is silent about another.
    fn explain(&self, id: String) -> BoxFuture<'_, Option<String>> {
        Box::pin(async move {
            match id.as_str() {
                KNOWN => Some(json!({ "id": KNOWN, "status": 200 }).to_string()),
                SILENT => None,
                _ => Some("null".into()),
            }
        })
    }
}

type Told = Arc<Mutex<Vec<(Vec<RecordChange>, u64)>>>;

/// A served store; it ends with this value.
struct World {
    client: AdminClient,
    told: Told,
    socket: PathBuf,
    stop: Option<oneshot::Sender<()>>,
    server: Option<JoinHandle<()>>,
    _directory: tempfile::TempDir,
}

fn world() -> World {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("admin.sock");
    let store = Arc::new(RedbStore::open(&directory.path().join("store.redb")).unwrap());
    let told = Told::default();
    let hear = told.clone();
    let on_change: OnChange = Arc::new(move |changes, revision| hear.lock().push((changes, revision)));
    let parts = AdminParts {
        store,
        node: Arc::new(TestNode),
        on_change,
        ids: crate::tenant_ids::IdSource::from_base(7000),
        access: AccessList::new(&AdminSettings::default(), nix::unistd::Uid::effective().as_raw()),
    };
    // Bound here, so that it is there before anybody connects.
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    listener.set_nonblocking(true).unwrap();
    let (stop, stopped) = oneshot::channel();
    let server = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async move {
            let listener = UnixListener::from_std(listener).unwrap();
            tokio::select! {
                () = serve(listener, parts) => {}
                _ = stopped => {}
            }
        });
    });
    let client = AdminClient::open(&socket).unwrap();
    World { client, told, socket, stop: Some(stop), server: Some(server), _directory: directory }
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = self.stop.take().map(|stop| stop.send(()));
        let _ = self.server.take().map(JoinHandle::join);
    }
}

impl World {
    fn send(&self, request: http::request::Builder, body: &str) -> Response<Bytes> {
        let request = request.header(header::HOST, "localhost");
        self.client.call(request.body(Bytes::from(body.to_owned())).unwrap()).unwrap()
    }

    fn call(&self, method: Method, path: &str, body: &str) -> (u16, Value) {
        let response = self.send(Request::builder().method(method).uri(path), body);
        let value = serde_json::from_slice(response.body()).unwrap_or_default();
        (response.status().as_u16(), value)
    }

    fn export(&self) -> String {
        let mut bytes = Vec::new();
        self.client.export(&mut bytes).unwrap();
        String::from_utf8(bytes).unwrap()
    }
}

const SITE: &str =
    r#"{"tenant":"t","hosts":["S.test","*.s.test"],"backend":{"kind":"static","root":"/srv/s"}}"#;

#[test]
fn the_connection_of_a_command_becomes_its_own() {
    use std::io::Write as _;
    let world = world();
    let exec: ExecCommand = serde_json::from_value(json!({ "command": ["ls", "-l"] })).unwrap();
    let mut connection = std::os::unix::net::UnixStream::from(world.client.exec("wiki", &exec).unwrap());
    connection.set_nonblocking(false).unwrap();
    connection.write_all(b"\n").unwrap();
    let mut said = String::new();
    connection.read_to_string(&mut said).unwrap();
    assert_eq!(said, "ls -l");
    assert_eq!(world.call(Method::GET, "/v1/instances/wiki/exec", "").0, 405);
    assert_eq!(world.call(Method::POST, "/v1/instances/wiki/exec", "{}").0, 426, "it is no upgrade");
}

#[test]
fn a_change_is_answered_with_whether_it_is_served() {
    let world = world();
    let served = |method: &Method, path: &str, body: &str| world.call(method.clone(), path, body).1;
    let put = served(&Method::PUT, "/v1/settings/a", r#"{"value":"x"}"#);
    assert_eq!((put["revision"].as_u64(), put["served"].as_bool()), (Some(1), Some(true)));
    let same = served(&Method::PUT, "/v1/settings/a", r#"{"value":"x"}"#);
    assert_eq!(
        (same["changed"].as_bool(), same.get("served")),
        (Some(false), None),
        "nobody waits for nothing"
    );
    let lines = |value: u32| format!("{{\"setting\":{{\"key\":\"b\",\"value\":\"{value}\"}}}}\n");
    let import = |lines: String| world.client.import(std::io::Cursor::new(lines), ChangeMode::Merge).unwrap();
    assert_eq!(import(lines(2)).served, Some(true));
    assert_eq!(import(lines(2)).served, None);
    assert_eq!(served(&Method::DELETE, "/v1/settings/a", "")["served"], true);
    assert_eq!(import(lines(3)).served, Some(false), "it is stored all the same");
    assert_eq!(served(&Method::GET, "/v1/settings/b", "")["setting"]["value"], "3");
}

#[test]
fn records_go_in_and_come_out() {
    let world = world();
    let (status, tenant) = world.call(Method::PUT, "/v1/tenants/t", "{}");
    assert_eq!((status, &tenant["tenant"]), (200, &json!({"name": "t", "uid": 7000, "gid": 7000})));
    assert_eq!(world.call(Method::PUT, "/v1/sites/s", SITE).0, 200);
    let (status, site) = world.call(Method::GET, "/v1/sites/s", "");
    assert_eq!((status, &site["site"]["hosts"]), (200, &json!(["s.test", "*.s.test"])));
    for (query, expected) in [
        ("", 1),
        ("?tenant=t", 1),
        ("?tenant=u", 0),
        ("?host=%2A.s.test", 1),
        ("?host=x", 0),
        ("?after=s", 0),
    ] {
        let (status, page) = world.call(Method::GET, &format!("/v1/sites{query}"), "");
        assert_eq!((status, page["sites"].as_array().unwrap().len()), (200, expected), "{query}");
    }
    assert_eq!(world.call(Method::DELETE, "/v1/tenants/t", "").0, 422);
    assert_eq!(world.call(Method::DELETE, "/v1/sites/s", "").0, 200);
    assert_eq!(world.call(Method::DELETE, "/v1/tenants/t", "").0, 200);
    assert_eq!(world.call(Method::GET, "/v1/tenants", "").1["tenants"], json!([]));
    let revisions: Vec<u64> = world.told.lock().iter().map(|(_, revision)| *revision).collect();
    assert_eq!(revisions, [1, 2, 3, 4]);
}

#[test]
fn errors_are_problem_documents() {
    let world = world();
    for (method, path, body, status, code) in [
        (Method::GET, "/v1/sites/none", "", 404, "NGY0211"),
        (Method::DELETE, "/v1/tenants/none", "", 404, "NGY0211"),
        (Method::PUT, "/v1/sites/s", SITE, 422, "NGY0210"),
        (Method::PUT, "/v1/sites/s", "{", 400, "NGY0220"),
        (Method::PUT, "/v1/sites/s", r#"{"name":"other"}"#, 400, "NGY0220"),
        (Method::PUT, "/v1/sites/s", r#"{"hosts":[]}"#, 422, "NGY0220"),
        (Method::PUT, "/v1/tenants/t", r#"{"uid":0}"#, 422, "NGY0210"),
        (Method::POST, "/v1/sites/s", "", 405, "NGY0220"),
        (Method::DELETE, "/v1/export", "", 405, "NGY0220"),
        (Method::GET, "/v1/sites?colour=red", "", 400, "NGY0220"),
        (Method::GET, "/v1/sites?limit=0", "", 400, "NGY0220"),
        (Method::POST, "/v1/import?mode=both", "", 400, "NGY0220"),
        (Method::GET, "/", "", 404, "NGY0220"),
        (Method::PUT, "/v1/sites/s", &" ".repeat(2 * nagaya_store::RECORD_LEN_MAX + 1), 413, "NGY0220"),
    ] {
        let response = world.send(Request::builder().method(method.clone()).uri(path), body);
        let problem: ProblemReply = serde_json::from_slice(response.body()).expect(path);
        assert_eq!((response.status().as_u16(), problem.code.as_str()), (status, code), "{method} {path}");
        assert_eq!(response.headers()[header::CONTENT_TYPE], "application/problem+json");
    }
    assert!(world.told.lock().is_empty());
}

#[test]
fn a_condition_that_does_not_hold_changes_nothing() {
    let world = world();
    let put = |name, value: &str, body: &str| {
        let request = Request::builder().method(Method::PUT).uri("/v1/tenants/t").header(name, value);
        let response = world.send(request, body);
        let code = serde_json::from_slice::<ProblemReply>(response.body()).map(|problem| problem.code);
        (response.status().as_u16(), code.unwrap_or_default())
    };
    assert_eq!(put(header::IF_NONE_MATCH, "*", "{}"), (200, String::new()));
    assert_eq!(put(header::IF_NONE_MATCH, "*", "{}"), (412, "NGY0215".into()));
    assert_eq!(put(header::IF_MATCH, "\"0\"", r#"{"max_concurrent":2}"#), (412, "NGY0216".into()));
    let seen = world.send(Request::builder().uri("/v1/tenants/t"), "");
    let tag = seen.headers()[header::ETAG].to_str().unwrap();
    assert_eq!(put(header::IF_MATCH, tag, r#"{"max_concurrent":2}"#), (200, String::new()));
    assert_eq!(world.told.lock().len(), 2);
}

fn lines(sites: usize) -> String {
    let mut text = r#"{"tenant":{"name":"t","uid":9000,"gid":9000}}"#.to_owned();
    for n in 0..sites {
        text.push_str(&format!(
            "\n{{\"site\":{{\"name\":\"s{n}\",\"tenant\":\"t\",\"hosts\":[\"s{n}.test\"],\"backend\":{{\"kind\":\"static\",\"root\":\"/s\"}}}}}}"
        ));
    }
    text
}

#[test]
fn an_import_arrives_whole_or_not_at_all() {
    let world = world();
    let summary = world.client.import(Cursor::new(lines(20_000)), ChangeMode::Merge).unwrap();
    assert_eq!((summary.revision, summary.tenants_put, summary.sites_put), (1, 1, 20_000));
    assert_eq!(world.told.lock()[0].0.len(), 20_001);
    let exported = world.export();
    assert_eq!(exported.lines().count(), 20_001);

    let bad = lines(20_000).replace("\"s19000.test\"", "\"no host\"").replace("\"/s\"", "\"/changed\"");
    let Err(ClientError::Refused(problem)) = world.client.import(Cursor::new(bad), ChangeMode::Merge) else {
        panic!("a line is bad");
    };
    assert_eq!((problem.code.as_str(), problem.bad_lines), ("NGY0212", Some(1)));
    assert_eq!(problem.lines[0].line, Some(19_002));

    let summary = world.client.import(Cursor::new(lines(5)), ChangeMode::Replace).unwrap();
    assert_eq!((summary.sites_put, summary.sites_removed), (0, 19_995));
    assert_eq!(world.export(), exported_of_five(&exported));
    assert_eq!(world.told.lock().len(), 2);
}

fn exported_of_five(exported: &str) -> String {
    let kept =
        |line: &&str| line.contains("tenant\":{") || (0..5).any(|n| line.contains(&format!("\"s{n}\"")));
    exported.lines().filter(kept).map(|line| format!("{line}\n")).collect()
}

/// Gives some lines, then fails as a disk does.
struct Failing(Cursor<String>);

impl Read for Failing {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        match self.0.read(out)? {
            0 => Err(std::io::Error::other("the disk is gone")),
            len => Ok(len),
        }
    }
}

#[test]
fn an_import_whose_source_fails_changes_nothing() {
    let world = world();
    let error = world.client.import(Failing(Cursor::new(lines(5_000))), ChangeMode::Merge).unwrap_err();
    assert!(matches!(&error, ClientError::Source(_)), "{error}");
    assert_eq!(world.export(), "");
    assert!(world.told.lock().is_empty());
}

#[test]
fn the_node_tells_about_itself() {
    let world = world();
    let metrics = world.send(Request::builder().uri("/metrics"), "");
    assert_eq!(metrics.body(), "nagaya_sites 3\n");
    assert_eq!(metrics.headers()[header::CONTENT_TYPE], "text/plain; version=0.0.4; charset=utf-8");
    let health = world.send(Request::builder().uri("/healthz"), "");
    assert_eq!(
        (health.status(), &health.body()[..]),
        (StatusCode::SERVICE_UNAVAILABLE, &b"the edge is starting"[..])
    );
    assert_eq!(world.call(Method::GET, "/v1/status", ""), (200, json!({"edge": {"pid": 7}})));
}

#[test]
fn settings_are_records_by_their_key() {
    let world = world();
    let key = "/v1/settings/www.example.org%3Anight%2Fcpu";
    let (status, reply) = world.call(Method::PUT, key, r#"{"value":{"cpu":20,"on":true}}"#);
    let setting = json!({"key": "www.example.org:night/cpu", "value": {"cpu": 20, "on": true}});
    assert_eq!((status, &reply["setting"], &reply["changed"]), (200, &setting, &json!(true)));
    assert_eq!(world.call(Method::PUT, key, &setting.to_string()).1["changed"], json!(false));
    assert_eq!(world.call(Method::GET, key, "").1["setting"], setting);
    assert_eq!(world.call(Method::PUT, "/v1/settings/a", r#"{"value":"x"}"#).0, 200);
    for (query, expected) in [("", 2), ("?limit=1", 1), ("?after=a", 1), ("?after=www.example.org%3An", 1)] {
        let (status, page) = world.call(Method::GET, &format!("/v1/settings{query}"), "");
        assert_eq!((status, page["settings"].as_array().unwrap().len()), (200, expected), "{query}");
    }
    for (method, path, body, status) in [
        (Method::PUT, key, r#"{"key":"other","value":"x"}"#, 400),
        (Method::PUT, key, r#"{"value":["x"]}"#, 422),
        (Method::PUT, key, r#"{"value":"x","colour":1}"#, 422),
        (Method::PUT, "/v1/settings/a%0Ab", r#"{"value":"x"}"#, 422),
        (Method::POST, "/v1/settings", "", 405),
        (Method::DELETE, "/v1/settings/none", "", 404),
        (Method::DELETE, key, "", 200),
        (Method::GET, key, "", 404),
    ] {
        assert_eq!(world.call(method.clone(), path, body).0, status, "{method} {path} {body}");
    }
    assert_eq!(world.told.lock().len(), 3);
}

#[test]
fn rules_are_compiled_before_they_are_stored() {
    let world = world();
    let path = "/v1/rules/limits";
    let text = "answer 403\n";
    let put = |text: &str| world.call(Method::PUT, path, &json!({ "text": text }).to_string());
    assert_eq!(put(text).1["changed"], true);
    assert_eq!(put(text).1["changed"], false);
    let (status, problem) = put("x = 1\nif x ==\nend\n");
    assert_eq!((status, &problem["code"]), (422, &json!("NGY0602")));
    assert!(problem["detail"].as_str().unwrap().starts_with("store:limits:3: "), "{problem}");
    assert_eq!(put("x = 1\0").0, 422);
    assert_eq!(world.call(Method::GET, path, "").1["rule"], json!({ "name": "limits", "text": text }));
    let row = json!([{ "name": "limits", "bytes": 11, "lines": 1 }]);
    for (query, rows) in [("", &row), ("?limit=1", &row), ("?after=limits", &json!([]))] {
        assert_eq!(world.call(Method::GET, &format!("/v1/rules{query}"), "").1["rules"], *rows, "{query}");
    }
    for (method, path, body, status) in [
        (Method::PUT, path, r#"{"name":"other","text":""}"#, 400),
        (Method::PUT, path, r#"{"text":"","colour":1}"#, 422),
        (Method::PUT, "/v1/rules/..%2Fx", r#"{"text":""}"#, 422),
        (Method::POST, "/v1/rules", "", 405),
        (Method::DELETE, "/v1/rules/none", "", 404),
        (Method::DELETE, path, "", 200),
        (Method::GET, path, "", 404),
    ] {
        assert_eq!(world.call(method.clone(), path, body).0, status, "{method} {path} {body}");
    }
    assert_eq!(world.told.lock().len(), 2);
    let bad = r#"{"rule":{"name":"b","text":"if ("}}"#;
    let Err(ClientError::Refused(problem)) = world.client.import(Cursor::new(bad), ChangeMode::Merge) else {
        panic!("it does not compile");
    };
    assert_eq!((problem.code.as_str(), problem.lines[0].line), ("NGY0212", Some(1)));
    assert!(problem.lines[0].message.starts_with("store:b:1: "), "{problem}");
}

/// A row whose route nobody answers would be a mistake in the table; a route without a row is answered to nobody.
#[test]
fn each_route_of_the_table_is_answered() {
    let world = world();
    for route in roles::ROUTES {
        let path = route.path.replace("**", KNOWN).replace('*', KNOWN);
        let method = Method::from_bytes(route.method.as_bytes()).unwrap();
        let (status, body) = world.call(method, &path, "");
        let detail = body["detail"].as_str().unwrap_or_default();
        assert!(status != 405 && !detail.contains("there is nothing at"), "{} {path}: {body}", route.method);
    }
}

#[test]
fn a_request_is_explained_by_its_id() {
    let world = world();
    let ask = |id: &str| world.call(Method::GET, &format!("/v1/requests/{id}"), "");
    assert_eq!(ask(KNOWN), (200, json!({ "id": KNOWN, "status": 200 })));
    assert_eq!(ask(&KNOWN.to_uppercase()).0, 200);
    let (status, problem) = ask("00000000000000000000000000000000");
    assert_eq!((status, &problem["code"]), (404, &json!("NGY0511")));
    let (status, problem) = ask(SILENT);
    assert_eq!((status, &problem["code"]), (503, &json!("NGY0510")));
    assert_eq!(ask("").0, 404);
    for bad in ["x", "0123", "g123456789abcdef0123456789abcdef"] {
        assert_eq!(ask(bad).0, 400, "{bad}");
    }
    assert_eq!(world.call(Method::DELETE, &format!("/v1/requests/{KNOWN}"), "").0, 405);
    assert_eq!(world.call(Method::GET, "/v1/cells", ""), (200, json!({ "cells": [] })));
}

#[test]
fn changes_of_many_writers_are_told_in_order() {
    let world = world();
    let socket = &world.socket;
    std::thread::scope(|scope| {
        for writer in 0..4 {
            scope.spawn(move || {
                let client = AdminClient::open(socket).unwrap();
                for n in 0..10 {
                    let request =
                        Request::put(format!("/v1/tenants/w{writer}n{n}")).header(header::HOST, "x");
                    let response = client.call(request.body(Bytes::from_static(b"{}")).unwrap()).unwrap();
                    assert_eq!(response.status(), StatusCode::OK);
                }
            });
        }
    });
    let told = world.told.lock();
    assert!(told.iter().map(|(_, revision)| *revision).eq(1..=40), "{told:?}");
}

#[test]
fn instances_are_listed_and_told_what_to_do() {
    let world = world();
    let call = |method: Method, path: &str| world.call(method, path, "");
    assert_eq!(call(Method::GET, "/v1/instances").1["instances"][0]["site"], "wiki");
    let (status, answer) = call(Method::POST, "/v1/instances/wiki/rest?to=frozen");
    assert_eq!((status, answer), (200, json!({ "ok": true, "act": { "rest": { "to": "frozen" } } })));
    let (status, problem) = call(Method::POST, "/v1/instances/wiki/stop");
    assert_eq!((status, &problem["code"]), (409, &json!("NGY0311")));
    assert_eq!(problem["detail"], "it is in use");
    let (status, problem) = call(Method::GET, "/v1/instances/other");
    assert_eq!((status, &problem["code"]), (404, &json!("NGY0211")));
    assert_eq!(call(Method::GET, "/v1/instances/silent").0, 503);
    assert_eq!(call(Method::GET, "/v1/instances/wiki/stop").0, 405);
    assert_eq!(call(Method::DELETE, "/v1/instances").0, 405);
    assert_eq!(call(Method::GET, "/v1/balance/w%69ki").1["site"], "wiki");
    assert_eq!(call(Method::POST, "/v1/balance/wiki").0, 405);
    assert_eq!(call(Method::GET, "/v1/requests"), (200, json!({ "instances": [], "lanes": [] })));
}
