//! Brings up what answers a site, in the cell the request was given, and lets it answer, by kind of backend.
//!
//! Not here: how each kind works (`files`, `programs`, `upstream`), which cell that is (`rules`), how bodies are held to
//! limits that no program's cell can hold them to (`pace`), the order of a request's steps (`request`).

use std::time::Duration;

use http::Method;
use nagaya_cmdb::Backend;
use nagaya_cmdb::record::{App, Files, Http, Listen};

use crate::account::Account;
use crate::files::{Ctx, Programs};
use crate::message::{Head, Request, RequestBody, Response};
use crate::node::Node;
use crate::pace;
use crate::path::SitePath;
use crate::programs::{Outcome, Script};
use crate::refusal::Refusal;
use crate::route::Route;
use crate::rules;
use crate::upstream::{self, Address, Bounds, Outgoing};

/// What the fields of a request to an application mostly take, in bytes.
const FIELDS_LEN: usize = 1024;

/// A program may answer "serve that path instead" (RFC 3875 section 6.2.2) this often for one request.
const LOCAL_REDIRECTS_MAX: u32 = 10;

pub async fn run(
    node: &Node,
    route: &Route,
    mut request: Request,
    account: &mut Account,
) -> Result<Response, Refusal> {
    pace::upload(node, route, account, &mut request);
    let response = match &route.site.backend {
        // The edge itself answers: there is no backend to time.
        Backend::Static(files) => {
            let response = from_static(node, route, files, &request.head).await?;
            return Ok(pace::apply(node, route, account, response));
        }
        // Boxed, or the state of the largest exchange would be part of every request's, a file's too.
        Backend::Cgi(files) | Backend::Php(files) => {
            Box::pin(from_files(node, route, files, request, account)).await
        }
        Backend::Http(http) => Box::pin(from_server(node, http, request)).await,
        Backend::App(app) => Box::pin(from_app(node, route, app, request)).await,
    }?;
    account.backend_answered();
    Ok(pace::apply(node, route, account, response))
}

/// A file.
async fn from_static(node: &Node, route: &Route, files: &Files, head: &Head) -> Result<Response, Refusal> {
    let path = SitePath::parse(&head.path)?;
    let rel = path.below(&route.site.path)?.ok_or(Refusal::NotFound)?;
    let root = node.root(&route.site).await?;
    node.files.serve(&Ctx { head, files, programs: Programs::None, root: &root, path: &path, rel })
}

/// A file, or the answer of a program among the files.
async fn from_files(
    node: &Node,
    route: &Route,
    files: &Files,
    mut request: Request,
    account: &Account,
) -> Result<Response, Refusal> {
    let programs = Programs::of(&route.site.backend);
    let root = node.root(&route.site).await?;
    for _ in 0..=LOCAL_REDIRECTS_MAX {
        let head = &request.head;
        let path = SitePath::parse(&head.path)?;
        let rel = path.below(&route.site.path)?.ok_or(Refusal::NotFound)?;
        let Some(program) = node.files.find_program(&root, rel, files, programs)? else {
            return node.files.serve(&Ctx { head, files, programs, root: &root, path: &path, rel });
        };
        let mount = route.site.path.trim_end_matches('/');
        let script = Script {
            name: format!("{mount}/{}", program.script),
            file: program.script,
            path_info: program.path_info,
            variables: rules::variables(account),
        };
        let mut again = request.head.clone();
        let stay = account.stay();
        let outcome = match programs {
            Programs::Php => node.programs.php(&route.site, &route.tenant, script, request, &stay).await?,
            _ => node.programs.cgi(&route.site, &route.tenant, script, request, &stay).await?,
        };
        match outcome {
            Outcome::Response(response) => return Ok(response),
            Outcome::LocalRedirect { path, query } => {
                again.path = path.into();
                again.query = query.map(Into::into);
                if again.method != Method::HEAD {
                    again.method = Method::GET;
                }
                request = Request { head: again, body: RequestBody::empty() };
            }
        }
    }
    Err(Refusal::BackendInvalid(format!(
        "its programs redirect each other more than {LOCAL_REDIRECTS_MAX} times"
    )))
}

/// A server that already runs somewhere.
async fn from_server(node: &Node, http: &Http, request: Request) -> Result<Response, Refusal> {
    let address = Address::parse(&http.address);
    proxy(node, &address, http.host_header.as_deref(), http.timeout_seconds, request).await
}

/// A server that the keeper starts when it is needed; the connection comes from there.
async fn from_app(node: &Node, route: &Route, app: &App, request: Request) -> Result<Response, Refusal> {
    let address = Address::App { site: route.site.name.clone(), tcp: app.listen == Listen::Port };
    proxy(node, &address, None, app.timeout_seconds, request).await
}

async fn proxy(
    node: &Node,
    address: &Address,
    host: Option<&str>,
    timeout_seconds: Option<u32>,
    request: Request,
) -> Result<Response, Refusal> {
    let limits = node.limits();
    let bounds = Bounds {
        connect: Duration::from_millis(limits.backend_connect_ms),
        head: timeout_seconds
            .map_or(Duration::from_millis(limits.backend_ms), |seconds| Duration::from_secs(seconds.into())),
        idle: Duration::from_millis(limits.idle_body_ms),
        head_bytes: limits.head_bytes,
    };
    let Request { head, body } = request;
    let mut fields = Vec::with_capacity(FIELDS_LEN);
    node.forwarding.request(&head, host, &mut fields)?;
    let outgoing = Outgoing { head: &head, fields: &fields };
    let mut response = upstream::exchange(&node.upstream, address, node, outgoing, body, bounds).await?;
    node.forwarding.response(&mut response);
    Ok(response)
}
