//! The admin interface's server: HTTP/1.1 connections on a Unix socket. Work on the store runs on
//! threads that may block, so a large import does not block readers.
//!
//! Not here: what is done with records (`api`), what the node tells about itself (`AdminNode`).

use std::collections::HashMap;
use std::convert::Infallible;
use std::io::{self, BufReader};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use percent_encoding::percent_decode_str;
use serde_json::Value;
use tokio::net::{UnixListener, UnixStream};
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::{sleep, timeout};

use super::api::{self, AdminApi};
use super::roles::{self, AdminPeer, AdminRole, NeededRole};
use super::stream::{self, PassError};
use super::{AdminNode, AdminParts, ProblemReply, cluster, exec, instances};

/// Most connections at once; more wait in the socket's backlog.
const CONNECTIONS_MAX: usize = 64;

/// Most of these connections of one user other than root and the node's own, and of all such users
/// together. So no user can shut root out.
const USER_CONNECTIONS_MAX: usize = 16;
const USERS_CONNECTIONS_MAX: usize = 48;

/// Connections of users without a role. These get a refusal; more are closed.
const STRANGERS_MAX: usize = 4;

/// Longest time for the header section of a request, and of an idle connection.
const HEAD_WAIT_MAX: Duration = Duration::from_secs(60);

/// Longest time for the body of one record.
const RECORD_WAIT_MAX: Duration = Duration::from_secs(30);

/// Longest body that changes one record, in bytes: a record with room for white space.
const RECORD_BODY_LEN_MAX: usize = 2 * nagaya_store::RECORD_LEN_MAX;

/// Longest body of an import, in bytes: `import::LINES_MAX` lines of a kilobyte.
const IMPORT_BODY_LEN_MAX: u64 = 1 << 30;

/// Pause after `accept` failed, for example because file descriptors have run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Path of receipts, before the id.
const REQUESTS: &str = "/v1/requests/";

/// Path of the load of one site, before its name.
const BALANCE: &str = "/v1/balance/";

/// Path of one instance, before its site's name.
pub(super) const INSTANCES: &str = "/v1/instances/";

/// Length of a printed `nagaya_base::RequestId`.
const REQUEST_ID_LEN: usize = 32;

type Answer = Response<UnsyncBoxBody<Bytes, io::Error>>;

/// Shortest interval between log lines about refusals.
const REPORT_EVERY: Duration = Duration::from_secs(10);

struct ServerState {
    api: AdminApi,
    node: Arc<dyn AdminNode>,
    refusals: RefusalLog,
}

/// Log state of requests that lacked a role.
#[derive(Default)]
struct RefusalLog(Mutex<(Option<Instant>, u64)>);

impl RefusalLog {
    fn note(&self, uid: u32, method: &Method, path: &str, needed: AdminRole) {
        let mut state = self.0.lock();
        let (last, count) = &mut *state;
        *count += 1;
        if last.is_none_or(|last| last.elapsed() >= REPORT_EVERY) {
            *last = Some(Instant::now());
            let count = std::mem::take(count);
            let path = path.escape_debug();
            tracing::warn!(
                code = "NGY0530",
                uid,
                count,
                "admin requests were refused; the last one was {method} {path}, which needs the role '{needed}'"
            );
        }
    }
}

/// Serves until it is dropped, which closes all its connections.
pub async fn serve(listener: UnixListener, parts: AdminParts) {
    let AdminParts { store, node, on_change, ids, access } = parts;
    let shared = Arc::new(ServerState {
        api: AdminApi::new(store, ids, on_change),
        node,
        refusals: RefusalLog::default(),
    });
    let users = Arc::<RoleUsers>::default();
    let mut connections = JoinSet::new();
    loop {
        while connections.len() >= CONNECTIONS_MAX {
            connections.join_next().await;
        }
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    let peer = access.identify(&stream);
                    if let Some(user) = RoleUsers::enter(&users, peer, access.is_owner(peer.uid)) {
                        connections.spawn(converse(stream, shared.clone(), user));
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "the admin socket accepts no connection");
                    sleep(ACCEPT_PAUSE).await;
                }
            },
            Some(_) = connections.join_next() => {}
        }
    }
}

/// Connections of users other than root and the node's own.
#[derive(Default)]
struct RoleUsers(Mutex<HashMap<u32, usize>>);

/// One connection of a user.
struct RoleUser {
    peer: AdminPeer,
    /// `None` if it is not counted.
    counted: Option<Arc<RoleUsers>>,
}

impl RoleUsers {
    /// Counts a connection. `None` if the user has the maximum already.
    fn enter(users: &Arc<Self>, peer: AdminPeer, is_owner: bool) -> Option<RoleUser> {
        if is_owner {
            return Some(RoleUser { peer, counted: None });
        }
        let mut counts = users.0.lock();
        // All users without a role count as one.
        let (key, most) = match peer.role {
            Some(_) => (peer.uid, USER_CONNECTIONS_MAX),
            None => (u32::MAX, STRANGERS_MAX),
        };
        let all: usize = counts.values().sum();
        let count = counts.entry(key).or_default();
        if *count >= most || all >= USERS_CONNECTIONS_MAX {
            return None;
        }
        *count += 1;
        drop(counts);
        Some(RoleUser { peer, counted: Some(Arc::clone(users)) })
    }
}

impl Drop for RoleUser {
    fn drop(&mut self) {
        let Some(users) = &self.counted else { return };
        let key = if self.peer.role.is_some() { self.peer.uid } else { u32::MAX };
        let mut counts = users.0.lock();
        if let Some(count) = counts.get_mut(&key) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&key);
            }
        }
    }
}

async fn converse(stream: UnixStream, shared: Arc<ServerState>, user: RoleUser) {
    let peer = user.peer;
    let service = service_fn(move |request| {
        let shared = shared.clone();
        async move { Ok::<_, Infallible>(admit(shared, peer, request).await) }
    });
    let mut connection = http1::Builder::new();
    connection.timer(TokioTimer::new()).header_read_timeout(HEAD_WAIT_MAX);
    if let Err(error) = connection.serve_connection(TokioIo::new(stream), service).with_upgrades().await {
        tracing::debug!(%error, "an admin connection ended early");
    }
    drop(user);
}

/// Answers if the other end has the role in the table of routes.
async fn admit(shared: Arc<ServerState>, peer: AdminPeer, request: Request<Incoming>) -> Answer {
    let method = request.method();
    let path = request.uri().path();
    match roles::needed(method, path) {
        NeededRole::Role(needed) if peer.role >= Some(needed) => {
            let answer = answer(shared, request).await;
            if peer.role == Some(AdminRole::All) { answer } else { hide_secrets(answer).await }
        }
        NeededRole::Role(needed) => {
            shared.refusals.note(peer.uid, method, path, needed);
            whole(api::refuse(&ProblemReply::forbidden(peer.role, needed)))
        }
        // A user without a role does not learn which paths exist.
        _ if peer.role.is_none() => whole(api::refuse(&ProblemReply::forbidden(None, AdminRole::Read))),
        NeededRole::Methods(methods) => {
            whole(api::refuse(&api::wrong_method(method, &roles::list_methods(&methods))))
        }
        NeededRole::Unknown => whole(api::refuse(&api::unknown_path(path))),
    }
}

/// Longest response from which secrets are removed, in bytes: a page of the longest records.
const HIDDEN_LEN_MAX: usize = 128 << 20;

/// Returns the response without values of variables, for users that may not read all.
async fn hide_secrets(answer: Answer) -> Answer {
    let (mut head, body) = answer.into_parts();
    let Ok(body) = Limited::new(body, HIDDEN_LEN_MAX).collect().await else { return whole(broken()) };
    let bytes = body.to_bytes();
    // A body that is not JSON has no records in it.
    let Ok(mut value) = serde_json::from_slice::<Value>(&bytes) else {
        return whole(Response::from_parts(head, bytes));
    };
    roles::hide_values(&mut value);
    head.headers.remove(header::CONTENT_LENGTH);
    whole(Response::from_parts(head, value.to_string().into()))
}

async fn answer(shared: Arc<ServerState>, request: Request<Incoming>) -> Answer {
    let method = request.method().clone();
    let path = request.uri().path().to_owned();
    match (&method, path.as_str()) {
        (&Method::GET, "/metrics") => {
            text(StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8", shared.node.metrics().await)
        }
        (&Method::GET, "/healthz") => {
            let health = shared.node.health().await;
            let status = if health.ok { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
            text(status, "text/plain; charset=utf-8", health.text)
        }
        (&Method::GET, "/v1/status") => {
            text(StatusCode::OK, "application/json", shared.node.status().await.to_string())
        }
        (&Method::GET, "/v1/cells") => json(shared.node.cells().await, "keeper"),
        (&Method::GET, "/v1/requests") => json(shared.node.requests().await, "edge"),
        (&Method::GET, "/v1/instances") => json(shared.node.instances().await, "keeper"),
        (method, path) if let Some(site) = exec::site_of(path) => {
            let method = method.clone();
            let site = site.into_owned();
            whole(exec::answer(&shared.node, &method, site, request).await)
        }
        (method, path) if let Some(rest) = path.strip_prefix(INSTANCES) => {
            let query = request.uri().query().unwrap_or_default();
            whole(instances::answer(&*shared.node, method, rest, query).await)
        }
        (_, path) if cluster::is_asked(path) => whole(cluster::answer(&*shared.node, request).await),
        (&Method::GET, path) if let Some(site) = path.strip_prefix(BALANCE) => {
            let site = percent_decode_str(site).decode_utf8_lossy();
            text(StatusCode::OK, "application/json", shared.node.balance(&site).to_string())
        }
        (&Method::GET, path) if let Some(id) = path.strip_prefix(REQUESTS) => explain(&shared, id).await,
        (&Method::GET, "/v1/export") => export(shared),
        (&Method::POST, "/v1/import") => whole(import(shared, request).await),
        _ => whole(records(shared, request).await),
    }
}

/// Returns the response of a process, or a refusal if it did not reply.
fn json(answer: Option<String>, process: &str) -> Answer {
    match answer {
        Some(json) => text(StatusCode::OK, "application/json", json),
        None => whole(api::refuse(&ProblemReply::silent(process))),
    }
}

/// Returns the receipt of one request.
async fn explain(shared: &ServerState, id: &str) -> Answer {
    if id.len() != REQUEST_ID_LEN || !id.bytes().all(|b| b.is_ascii_hexdigit()) {
        let detail = format!(
            "'{id}' is not a request's id: it has {REQUEST_ID_LEN} hexadecimal digits, as error pages and logs show it"
        );
        return whole(api::refuse(&ProblemReply::request(StatusCode::BAD_REQUEST, detail)));
    }
    let id = id.to_ascii_lowercase();
    let Some(receipt) = shared.node.explain(id.clone()).await else {
        return whole(api::refuse(&ProblemReply::silent("edge")));
    };
    let parsed: Value = serde_json::from_str(&receipt).unwrap_or_default();
    match parsed.get("id") {
        Some(_) => text(StatusCode::OK, "application/json", receipt),
        None => whole(api::refuse(&ProblemReply::no_receipt(&id, parsed["kept"].as_u64()))),
    }
}

async fn records(shared: Arc<ServerState>, request: Request<Incoming>) -> Response<Bytes> {
    let (head, body) = request.into_parts();
    let body = match short_body(body).await {
        Ok(body) => body,
        Err(problem) => return api::refuse(&problem),
    };
    let request = Request::from_parts(head, body);
    let node = shared.node.clone();
    match spawn_blocking(move || shared.api.answer(&request)).await {
        Ok(response) => once_served(&*node, response).await,
        Err(_) => broken(),
    }
}

/// Delays the response until the change is in effect, as the writer of a record requests it next.
async fn once_served(node: &dyn AdminNode, response: Response<Bytes>) -> Response<Bytes> {
    let (head, bytes) = response.into_parts();
    let mut body: Value = serde_json::from_slice(&bytes).unwrap_or_default();
    match body["revision"].as_u64() {
        Some(revision) if body["changed"] == true => {
            body["served"] = node.serves_by(revision).await.into();
            Response::from_parts(head, body.to_string().into())
        }
        _ => Response::from_parts(head, bytes),
    }
}

/// Returns the whole body of a request that is not an import.
pub(super) async fn short_body(body: Incoming) -> Result<Bytes, Box<ProblemReply>> {
    let body = timeout(RECORD_WAIT_MAX, Limited::new(body, RECORD_BODY_LEN_MAX).collect()).await;
    match body {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => {
            let detail = format!("the body is longer than {RECORD_BODY_LEN_MAX} bytes");
            Err(ProblemReply::request(StatusCode::PAYLOAD_TOO_LARGE, detail))
        }
        Ok(Err(error)) => Err(ProblemReply::request(StatusCode::BAD_REQUEST, error)),
        Err(_) => {
            let detail = format!("the body took longer than {} s", RECORD_WAIT_MAX.as_secs());
            Err(ProblemReply::request(StatusCode::REQUEST_TIMEOUT, detail))
        }
    }
}

async fn import(shared: Arc<ServerState>, request: Request<Incoming>) -> Response<Bytes> {
    let mode = match api::mode(request.uri().query().unwrap_or_default()) {
        Ok(mode) => mode,
        Err(problem) => return api::refuse(&problem),
    };
    let (sender, receiver) = stream::channel();
    let node = shared.node.clone();
    let work = spawn_blocking(move || shared.api.import(BufReader::new(receiver), mode));
    // If this future is dropped here, the reader sees the lines cut off and stores nothing.
    let passed = sender.pass_on(request.into_body(), IMPORT_BODY_LEN_MAX).await;
    match (passed, work.await) {
        (Err(error @ PassError::TooLong { .. }), _) => {
            api::refuse(&ProblemReply::request(StatusCode::PAYLOAD_TOO_LARGE, error))
        }
        (Err(error), _) => api::refuse(&ProblemReply::request(StatusCode::BAD_REQUEST, error)),
        (Ok(()), Ok(Ok(mut summary))) => {
            if summary.is_changed() {
                summary.served = Some(node.serves_by(summary.revision).await);
            }
            let body = serde_json::to_vec(&summary).expect("a summary has text keys");
            let mut response = Response::new(body.into());
            let json = HeaderValue::from_static("application/json");
            response.headers_mut().insert(header::CONTENT_TYPE, json);
            response
        }
        (Ok(()), Ok(Err(problem))) => api::refuse(&problem),
        (Ok(()), Err(_)) => broken(),
    }
}

fn export(shared: Arc<ServerState>) -> Answer {
    let (mut sender, receiver) = stream::channel();
    spawn_blocking(move || {
        let exported = shared.api.export(&mut sender).map_err(|error| (error.code(), error.to_string()));
        // Without `finish` the client sees the body cut off.
        match exported {
            Ok(_) => drop(sender.finish()),
            Err((code, error)) => tracing::warn!(%code, %error, "an export was not finished"),
        }
    });
    let mut response = Response::new(receiver.boxed_unsync());
    let lines = HeaderValue::from_static("application/jsonl");
    response.headers_mut().insert(header::CONTENT_TYPE, lines);
    response
}

fn text(status: StatusCode, content_type: &'static str, text: String) -> Answer {
    let mut response = Response::new(Bytes::from(text));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    whole(response)
}

fn whole(response: Response<Bytes>) -> Answer {
    response.map(|body| Full::new(body).map_err(|never| match never {}).boxed_unsync())
}

/// Returns the response after a task of ours panicked; the panic itself was logged.
fn broken() -> Response<Bytes> {
    let detail = "the request met a defect of nagaya: its log shows where; look whether the change happened";
    api::refuse(&ProblemReply::request(StatusCode::INTERNAL_SERVER_ERROR, detail))
}
