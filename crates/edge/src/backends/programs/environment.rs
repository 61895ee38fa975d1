//! Builds the variables of a program: those of RFC 3875 section 4.1, and others that Apache and
//! PHP applications expect.
//!
//! Not here: how they reach the program (as FastCGI parameters, or through the keeper as an
//! environment). Nor the keeper's additions for CGI (`PATH`, paths on disk, the site's own
//! `env`).
//!
//! `Authorization` is passed on as `HTTP_AUTHORIZATION`, because applications do their own
//! authentication. A program runs under its tenant's uid, and no other tenant reads its
//! environment. `AUTH_TYPE` and `REMOTE_USER` are not set, because nagaya itself authenticates
//! nobody. The choice of fields that become variables is the same for every kind of backend
//! (`forward::fields`). Trusted proxies in front may name the client (`forward::client`).

use std::borrow::Cow;
use std::fmt::Write as _;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path};

use http::header::{CONTENT_LENGTH, CONTENT_TYPE, COOKIE, VIA};
use http::{HeaderMap, HeaderName, Version};
use nagaya_keeper_api::fastcgi::{ConnectionReuse, RequestOpening};
use nagaya_records::record::{FileRoot, Site, Tenant};

use crate::backends::programs::environment;
use crate::backends::programs::script::ProgramScript;
use crate::http::message::RequestHead;
use crate::http::proxy_headers::client::ClientView;
use crate::http::proxy_headers::fields::{FieldFate, fate};
use crate::http::proxy_headers::trace;
use crate::http::refusal::Refusal;

/// Usual length of the longest text that is put together for a variable, bytes.
const TEXT_LEN: usize = 128;

/// Source of the variables.
pub struct EnvironmentFacts<'a> {
    pub head: &'a RequestHead,
    /// Length of the request body. `None` if it is not known. Then a CGI program reads the body
    /// to its end.
    pub body_len: Option<u64>,
    pub site: &'a Site,
    pub tenant: &'a Tenant,
    pub files: &'a FileRoot,
    pub script: &'a ProgramScript,
}

/// Calls `put` with each variable of a CGI program, each name once. The keeper adds the paths on
/// disk and the operator's settings for the site. It reads them from its own copy of the records.
pub(super) fn for_cgi(facts: &EnvironmentFacts<'_>, mut put: impl FnMut(&str, &[u8])) -> Result<(), Refusal> {
    by_rules(facts, &mut put);
    common(facts, &mut |name: &str, value: &[u8]| {
        if !is_by_rules(facts, name) {
            put(name, value);
        }
    })
}

/// Calls `put` with each variable of a script over FastCGI, each name once. The operator's
/// settings for the site (`env`) replace variables of the same name. So no client's field can
/// take their place.
pub(super) fn for_fastcgi(
    facts: &EnvironmentFacts<'_>,
    mut put: impl FnMut(&str, &[u8]),
) -> Result<(), Refusal> {
    by_rules(facts, &mut put);
    let mut put = |name: &str, value: &[u8]| {
        if !is_by_rules(facts, name) {
            put(name, value);
        }
    };
    let operator = &facts.files.env;
    for (name, value) in operator {
        if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
            return Err(Refusal::SiteBroken(format!(
                "site {}: variable '{}' cannot be set: no '=' or NUL may be in it",
                facts.site.name,
                name.escape_debug()
            )));
        }
        put(name, value.as_bytes());
    }
    let mut set = |name: &str, value: &[u8]| {
        if operator.is_empty() || !operator.contains_key(name) {
            put(name, value);
        }
    };
    common(facts, &mut set)?;
    paths(facts, &mut set)
}

/// Puts the variables that rules set for this one request.
fn by_rules(facts: &EnvironmentFacts<'_>, put: &mut impl FnMut(&str, &[u8])) {
    for (name, value) in &facts.script.variables {
        if let Some(value) = value {
            put(name, value.as_bytes());
        }
    }
}

fn is_by_rules(facts: &EnvironmentFacts<'_>, name: &str) -> bool {
    facts.script.variables.iter().any(|(have, _)| **have == *name)
}

fn common(facts: &EnvironmentFacts<'_>, set: &mut impl FnMut(&str, &[u8])) -> Result<(), Refusal> {
    let EnvironmentFacts { head, script, .. } = facts;
    for text in [script.file.as_bytes(), script.name.as_bytes(), &script.path_info] {
        if text.contains(&0) {
            return Err(Refusal::BadRequest("a NUL in the path"));
        }
    }
    // For all names and values that are put together: a request has no allocation for each.
    let mut text = String::with_capacity(TEXT_LEN);
    server(head, &script.client, &mut text, set);
    request(head, facts.body_len, &mut text, set);
    set("SCRIPT_NAME", script.name.as_bytes());
    if !script.path_info.is_empty() {
        set("PATH_INFO", &script.path_info);
    }
    // php-cgi's mark that a web server, not a visitor, chose the script. Applications check it,
    // too.
    set("REDIRECT_STATUS", b"200");
    headers(&head.headers, &mut text, set);
    restated(head, &script.client, &mut text, set);
    trace::each_field(&head.headers, head.id, |name, value| {
        write_variable(name, &mut text);
        set(&text, value);
    });
    Ok(())
}

/// Returns the document root as an absolute path. The edge itself never opens it: it comes from
/// the record alone.
pub fn document_root<'f>(
    site: &Site,
    tenant: &Tenant,
    files: &'f FileRoot,
) -> Result<Cow<'f, Path>, Refusal> {
    let root = if files.root.is_absolute() {
        Cow::Borrowed(&*files.root)
    } else {
        let home = tenant.home.as_deref().ok_or_else(|| {
            Refusal::SiteBroken(format!(
                "site {}: its root is relative and tenant {} has no home: set one of them",
                site.name, tenant.name
            ))
        })?;
        Cow::Owned(home.join(&files.root))
    };
    if root.components().any(|part| part == Component::ParentDir) {
        return Err(Refusal::SiteBroken(format!("site {}: its root may not contain '..'", site.name)));
    }
    if is_plain(&root) {
        return Ok(root);
    }
    // Collecting the components drops `.` and repeated or trailing slashes.
    Ok(Cow::Owned(root.components().collect()))
}

/// Returns whether an absolute path is written in its shortest form.
fn is_plain(path: &Path) -> bool {
    let below = path.as_os_str().as_bytes().strip_prefix(b"/").unwrap_or_default();
    below.is_empty() || below.split(|&byte| byte == b'/').all(|part| !matches!(part, b"" | b"."))
}

fn server(head: &RequestHead, client: &ClientView, text: &mut String, set: &mut impl FnMut(&str, &[u8])) {
    let conn = &head.conn;
    text.clear();
    set("GATEWAY_INTERFACE", b"CGI/1.1");
    set("SERVER_SOFTWARE", b"nagaya");
    let local = conn.local.ip().to_canonical();
    write!(text, "{local}").expect("a string takes everything");
    set("SERVER_ADDR", text.as_bytes());
    // An HTTP/1.0 client may name no host. Then the address it connected to is the only name.
    let host = client.host.as_deref().unwrap_or(&head.host);
    set("SERVER_NAME", if host.is_empty() { text.as_bytes() } else { host.as_bytes() });
    set("SERVER_PORT", itoa::Buffer::new().format(client.server_port).as_bytes());
    let protocol: &[u8] = match head.version {
        Version::HTTP_10 => b"HTTP/1.0",
        Version::HTTP_2 => b"HTTP/2.0",
        _ => b"HTTP/1.1",
    };
    set("SERVER_PROTOCOL", protocol);
    set("REQUEST_SCHEME", client.scheme.as_bytes());
    if client.scheme == "https" {
        set("HTTPS", b"on");
    }
    text.clear();
    write!(text, "{}", client.address).expect("a string takes everything");
    set("REMOTE_ADDR", text.as_bytes());
    if let Some(port) = client.port {
        set("REMOTE_PORT", itoa::Buffer::new().format(port).as_bytes());
    }
    // `Host` is not among the fields: the head keeps it apart, checked.
    if !head.host.is_empty() {
        text.clear();
        text.push_str(&head.host);
        if let Some(port) = head.port {
            write!(text, ":{port}").expect("a string takes everything");
        }
        set("HTTP_HOST", text.as_bytes());
    }
}

fn request(head: &RequestHead, body_len: Option<u64>, text: &mut String, set: &mut impl FnMut(&str, &[u8])) {
    set("REQUEST_METHOD", head.method.as_str().as_bytes());
    let query = head.query.as_deref().unwrap_or("");
    set("QUERY_STRING", query.as_bytes());
    match &head.query {
        None => set("REQUEST_URI", head.path.as_bytes()),
        Some(query) => {
            text.clear();
            text.extend([&*head.path, "?", query]);
            set("REQUEST_URI", text.as_bytes());
        }
    }
    // The length is that of the real body, which the head of an HTTP/2 request need not announce.
    match body_len {
        Some(0) if !head.headers.contains_key(CONTENT_LENGTH) => {}
        Some(len) => set("CONTENT_LENGTH", itoa::Buffer::new().format(len).as_bytes()),
        None => {}
    }
    if let Some(value) = head.headers.get(CONTENT_TYPE) {
        set("CONTENT_TYPE", value.as_bytes());
    }
    set("UNIQUE_ID", &head.id.digits());
}

fn paths(facts: &EnvironmentFacts<'_>, set: &mut impl FnMut(&str, &[u8])) -> Result<(), Refusal> {
    let EnvironmentFacts { site, tenant, files, script, .. } = facts;
    let root = document_root(site, tenant, files)?;
    set("DOCUMENT_ROOT", bytes(&root));
    if site.path != "/" {
        // As in Apache for an alias: below this prefix, paths are below that directory.
        set("CONTEXT_PREFIX", site.path.trim_end_matches('/').as_bytes());
        set("CONTEXT_DOCUMENT_ROOT", bytes(&root));
    }
    let mut path = Vec::with_capacity(TEXT_LEN);
    write_below(&root, script.file.trim_start_matches('/').as_bytes(), &mut path);
    set("SCRIPT_FILENAME", &path);
    // A script may open this path, so it never leaves the root.
    if !script.path_info.is_empty()
        && !script.path_info.split(|&byte| byte == b'/').any(|segment| segment == b"..")
    {
        let rest = script.path_info.strip_prefix(b"/").unwrap_or(&script.path_info);
        write_below(&root, rest, &mut path);
        set("PATH_TRANSLATED", &path);
    }
    Ok(())
}

/// Writes the path of a file below the root into `path`.
fn write_below(root: &Path, file: &[u8], path: &mut Vec<u8>) {
    let root = bytes(root);
    path.clear();
    for part in [root.strip_suffix(b"/").unwrap_or(root), b"/", file] {
        path.extend_from_slice(part);
    }
}

fn bytes(path: &Path) -> &[u8] {
    path.as_os_str().as_bytes()
}

/// Puts values that are both client variables and fields of a trusted proxy: one value each, and
/// the same one.
fn restated(head: &RequestHead, client: &ClientView, text: &mut String, set: &mut impl FnMut(&str, &[u8])) {
    set("HTTP_X_REQUEST_ID", &head.id.digits());
    if !client.is_relayed {
        return;
    }
    text.clear();
    write!(text, "{}", client.address).expect("a string takes everything");
    set("HTTP_X_FORWARDED_FOR", text.as_bytes());
    set("HTTP_X_FORWARDED_PROTO", client.scheme.as_bytes());
    set("HTTP_X_FORWARDED_HOST", client.host.as_deref().unwrap_or(&head.host).as_bytes());
    set("HTTP_X_FORWARDED_PORT", itoa::Buffer::new().format(client.server_port).as_bytes());
}

fn headers(headers: &HeaderMap, variable: &mut String, set: &mut impl FnMut(&str, &[u8])) {
    let mut joined = Vec::new();
    for name in headers.keys().filter(|name| is_variable(name)) {
        write_variable(name, variable);
        let mut values = headers.get_all(name).iter();
        let first = values.next().expect("a name in the map has a value");
        match values.next() {
            None => set(variable, first.as_bytes()),
            Some(second) => {
                let separator: &[u8] = if name == COOKIE { b"; " } else { b", " };
                joined.clear();
                joined.extend_from_slice(first.as_bytes());
                for value in std::iter::once(second).chain(values) {
                    joined.extend_from_slice(separator);
                    joined.extend_from_slice(value.as_bytes());
                }
                set(variable, &joined);
            }
        }
    }
}

/// Returns whether the field is passed on as a variable with its own value.
fn is_variable(name: &HeaderName) -> bool {
    match fate(name.as_str()) {
        // The type of the body has a variable without a prefix.
        FieldFate::Kept | FieldFate::Trusted => name != CONTENT_TYPE,
        FieldFate::Continued => name == VIA,
        FieldFate::Replaced | FieldFate::Restated | FieldFate::Dropped => false,
    }
}

/// Writes the variable name of a header field into `variable`.
fn write_variable(name: &HeaderName, variable: &mut String) {
    variable.clear();
    variable.push_str("HTTP_");
    variable.extend(name.as_str().chars().map(|c| if c == '-' { '_' } else { c.to_ascii_uppercase() }));
}

#[cfg(test)]
mod tests;

pub fn opening(facts: &EnvironmentFacts<'_>, connection: ConnectionReuse) -> Result<Vec<u8>, Refusal> {
    let mut opening = RequestOpening::new(connection);
    let mut fits = true;
    environment::for_fastcgi(facts, |name, value| {
        fits = fits && opening.put(name.as_bytes(), value).is_ok();
    })?;
    if fits { Ok(opening.finish()) } else { Err(Refusal::HeadTooLarge) }
}
