//! Carries out the changes of a verdict to the request and its response, if that is safe.
//!
//! A rule cannot change how a message is framed, nor lead a request out of its site's document
//! root. Such changes are left out, and the log names them. Not here: asking the rules and
//! keeping their verdict (`rules`), running in cells (`exchange`, `keeper`).

use std::fmt::Write as _;

use http::header::{CONTENT_TYPE, LOCATION};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use nagaya_keeper_api::variables::VariableOwner;
use nagaya_rules::{HeaderAction, HeaderEdit, RequestRewrites, RuleResponse};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

use crate::backends::programs::environment::document_root;
use crate::backends::programs::script::ScriptVariable;
use crate::http::message::{RequestHead, Response, ResponseBody};
use crate::http::path::{SitePath, canonicalize, matches_prefix};
use crate::http::refusal::Refusal;
use crate::http::route::SiteRoute;

/// Type of a response written by a rule, unless the rule sets one.
const ANSWER_TYPE: &str = "text/plain; charset=utf-8";

/// Characters that must be escaped in a decoded path from rules.
const PATH_ESCAPED: &AsciiSet = &CONTROLS
    .add(b' ')
    .add(b'"')
    .add(b'#')
    .add(b'%')
    .add(b'<')
    .add(b'>')
    .add(b'?')
    .add(b'`')
    .add(b'{')
    .add(b'}');

/// Characters that must be escaped in a query, which may contain escapes already.
const QUERY_ESCAPED: &AsciiSet = &CONTROLS.add(b' ').add(b'"').add(b'#').add(b'<').add(b'>');

/// Fields that frame a message or belong to one connection, and `Host`, by which the site was
/// found.
const OF_REQUEST_ALONE: &[&str] = &[
    "host",
    "content-length",
    "transfer-encoding",
    "connection",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "upgrade",
    "http2-settings",
    "expect",
];

/// The same of a response, and those that the wire adds.
const OF_RESPONSE_ALONE: &[&str] = &[
    "content-length",
    "transfer-encoding",
    "connection",
    "keep-alive",
    "proxy-connection",
    "trailer",
    "upgrade",
    "date",
    "server",
];

/// Parts of a verdict that are not carried out, for the log.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct LeftOut(pub Vec<String>);

impl LeftOut {
    fn add(&mut self, what: impl Into<String>) {
        self.0.push(what.into());
    }
}

/// Changes fields of the request.
pub fn headers_in(edits: &[HeaderEdit], headers: &mut HeaderMap, left_out: &mut LeftOut) {
    edit(edits, headers, OF_REQUEST_ALONE, "request", left_out);
}

/// Changes fields of the response.
pub fn headers_out(edits: &[HeaderEdit], headers: &mut HeaderMap, left_out: &mut LeftOut) {
    edit(edits, headers, OF_RESPONSE_ALONE, "response", left_out);
}

fn edit(edits: &[HeaderEdit], headers: &mut HeaderMap, fixed: &[&str], of: &str, left_out: &mut LeftOut) {
    for HeaderEdit { name, action } in edits {
        let Ok(field) = HeaderName::from_bytes(name.as_bytes()) else {
            left_out.add(format!("'{}' is no name of a field", name.escape_debug()));
            continue;
        };
        if fixed.contains(&field.as_str()) {
            left_out.add(format!("the {of} field {field} is not a rule's to change"));
            continue;
        }
        let value = match action {
            HeaderAction::Remove => {
                headers.remove(&field);
                continue;
            }
            HeaderAction::Set(value) | HeaderAction::Add(value) => HeaderValue::from_bytes(value.as_bytes()),
        };
        match (action, value) {
            (HeaderAction::Add(_), Ok(value)) => drop(headers.try_append(field, value)),
            (_, Ok(value)) => drop(headers.try_insert(field, value)),
            (_, Err(_)) => left_out.add(format!("the {of} field {field} cannot have that value")),
        }
    }
}

/// Returns the variables that rules may give to a program.
pub fn variables(wanted: &[ScriptVariable], left_out: &mut LeftOut) -> Vec<ScriptVariable> {
    let mut variables = Vec::with_capacity(wanted.len());
    for (name, value) in wanted {
        let why = match VariableOwner::of(name) {
            VariableOwner::Rules if value.as_deref().is_some_and(|value| value.contains('\0')) => {
                "cannot have a NUL in its value"
            }
            VariableOwner::Rules => {
                variables.push((name.clone(), value.clone()));
                continue;
            }
            VariableOwner::Server => "is the server's, which tells the program of its request by it",
            VariableOwner::Loader => "decides what a program loads: set it in the site's record (--env)",
            VariableOwner::Nobody => "is no name of a variable",
        };
        left_out.add(format!("the variable '{}' {why}", name.escape_debug()));
    }
    variables
}

/// Changes the request's target as the rules set it. The part for the response stays in
/// `rewrites`.
pub fn rewrite(
    rewrites: &mut RequestRewrites,
    head: &mut RequestHead,
    route: &SiteRoute,
    left_out: &mut LeftOut,
) {
    if let Some(path) = rewrites.path.take() {
        match encode_path(&path, &route.site.path) {
            Some(path) => head.path = path,
            None => left_out.add("a path that does not begin with '/', or leads above the root"),
        }
    }
    if let Some(query) = rewrites.query.take() {
        let query = utf8_percent_encode(&query, QUERY_ESCAPED).to_string();
        head.query = (!query.is_empty()).then(|| query.into());
    }
    let file = rewrites.filename.take();
    let moved = rewrites.document_root.take();
    if let Some(to) = moved.filter(|_| file.is_none()) {
        match beneath(&to, route).zip(below_site(head, route)) {
            Some((directory, rel)) => set_path(head, route, &format!("{directory}/{rel}")),
            None => left_out.add("a document root that is not below the site's"),
        }
    }
    if let Some(file) = file {
        match beneath(&file, route) {
            Some(rel) => set_path(head, route, &rel),
            None => left_out.add("a file that is not below the site's document root"),
        }
    }
}

/// Returns a decoded path in the form of clients, for the site at `mount`.
fn encode_path(path: &str, mount: &str) -> Option<Box<str>> {
    let encoded = utf8_percent_encode(path, PATH_ESCAPED).to_string();
    let mut path = encoded.into();
    canonicalize(&mut path, mount).ok().map(|()| path)
}

/// Returns the part of an absolute `path` below the site's document root, without slashes at its
/// ends.
fn beneath(path: &str, route: &SiteRoute) -> Option<String> {
    let SiteRoute { site, tenant, .. } = route;
    let root = document_root(site, tenant, site.backend.files()?).ok()?;
    let root = root.to_str()?;
    if !path.starts_with('/') || path.split('/').any(|segment| segment == "..") || !matches_prefix(path, root)
    {
        return None;
    }
    let rest = path.trim_start_matches('/').get(root.trim_matches('/').len()..)?;
    Some(rest.trim_matches('/').to_owned())
}

/// Returns the request's decoded path below the site's.
fn below_site(head: &RequestHead, route: &SiteRoute) -> Option<String> {
    let path = SitePath::parse(&head.path).ok()?;
    let rel = path.below(&route.site.path).ok()??;
    let slash = if rel.is_directory() && !rel.as_str().is_empty() { "/" } else { "" };
    Some(format!("{}{slash}", rel.as_str()))
}

fn set_path(head: &mut RequestHead, route: &SiteRoute, rel: &str) {
    let mut path = route.site.path.trim_end_matches('/').to_owned();
    let _ = write!(path, "/{}", rel.trim_start_matches('/'));
    head.path = utf8_percent_encode(&path, PATH_ESCAPED).to_string().into();
}

/// Returns the response that a rule wrote. An error without a body gets nagaya's own text, or the
/// site's own document.
pub fn answer(answer: RuleResponse) -> Result<Response, Refusal> {
    let RuleResponse { status, body, content_type, location } = answer;
    let status = match status {
        0 => StatusCode::OK,
        status => StatusCode::from_u16(status).unwrap_or(StatusCode::OK),
    };
    if body.is_empty() && (status.is_client_error() || status.is_server_error()) {
        return Err(Refusal::Ruled(status));
    }
    let mut response = Response::new(status);
    if let Some(location) = location.and_then(|location| HeaderValue::try_from(&*location).ok()) {
        response.headers.insert(LOCATION, location);
    }
    if !body.is_empty() && !matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED) {
        let said = content_type.and_then(|said| HeaderValue::try_from(&*said).ok());
        let content_type = said.unwrap_or(HeaderValue::from_static(ANSWER_TYPE));
        response.headers.insert(CONTENT_TYPE, content_type);
        response.body = ResponseBody::Bytes(body.into());
    }
    Ok(response)
}

/// Changes the response as the rules set it.
pub fn response(
    edits: &[HeaderEdit],
    rewrites: &RequestRewrites,
    response: &mut Response,
    left_out: &mut LeftOut,
) {
    // Client and application have agreed upon an upgraded connection.
    if matches!(response.body, ResponseBody::Tunnel(_)) {
        return;
    }
    if let Some(content_type) = rewrites.content_type.as_deref() {
        match HeaderValue::try_from(content_type) {
            Ok(value) => drop(response.headers.insert(CONTENT_TYPE, value)),
            Err(_) => left_out.add("a content type that is no value of a field"),
        }
    }
    if let Some(status) = rewrites.status {
        match StatusCode::from_u16(status) {
            Ok(status) if may_replace(response.status, status) => response.status = status,
            _ => left_out.add(format!("status {status} in the place of {}", response.status.as_u16())),
        }
    }
    if !edits.is_empty() {
        headers_out(edits, &mut response.headers, left_out);
    }
}

/// Returns whether a response stays well-formed with another status. Some have no body, and a
/// partial response depends on its status.
fn may_replace(old: StatusCode, new: StatusCode) -> bool {
    let is_special = |status: StatusCode| {
        status.is_informational()
            || matches!(
                status,
                StatusCode::NO_CONTENT
                    | StatusCode::RESET_CONTENT
                    | StatusCode::PARTIAL_CONTENT
                    | StatusCode::NOT_MODIFIED
            )
    };
    old == new || !(is_special(old) || is_special(new))
}
