//! Sends a file that a program names instead of a body. The field is `X-Accel-Redirect: /path` as
//! in nginx, or `X-Sendfile: FILE` as in Apache's module. The program has decided who may have
//! the file, and does not have to read it.
//!
//! Only files below the site's own document root are sent. Those that `deny` hides from visitors
//! are included, so a path may be reachable only through a program. Invariant: the file is opened
//! below the root like any other. Hidden files and sources of programs are not sent.
//!
//! Not here: opening and sending (`files`).

use std::borrow::Cow;
use std::path::Path;

use http::header::{ACCEPT_RANGES, CONTENT_ENCODING, CONTENT_RANGE, ETAG, HeaderName, LAST_MODIFIED};
use http::{HeaderMap, Method, StatusCode};
use nagaya_records::record::FileRoot;
use percent_encoding::utf8_percent_encode;

use crate::backends::files::root::DocumentRoot;
use crate::backends::files::script::ProgramKind;
use crate::backends::files::{FileContext, FileServer, PATH_ESCAPED};
use crate::backends::programs::environment::document_root;
use crate::http::message::{RequestHead, Response};
use crate::http::path;
use crate::http::path::SitePath;
use crate::http::refusal::Refusal;
use crate::http::route::SiteRoute;

const X_ACCEL_REDIRECT: HeaderName = HeaderName::from_static("x-accel-redirect");
const X_SENDFILE: HeaderName = HeaderName::from_static("x-sendfile");

/// Fields that come from the file, whatever the program has set.
const OF_THE_FILE: [HeaderName; 7] =
    [ACCEPT_RANGES, CONTENT_ENCODING, CONTENT_RANGE, ETAG, LAST_MODIFIED, X_ACCEL_REDIRECT, X_SENDFILE];

/// Sends the file that the response names, if it names one.
pub async fn apply(
    server: &FileServer,
    (route, root): (&SiteRoute, &DocumentRoot),
    (files, programs): (&FileRoot, ProgramKind),
    head: &RequestHead,
    mut response: Response,
) -> Result<Response, Refusal> {
    if response.status != StatusCode::OK {
        return Ok(response);
    }
    let named = named(&response.headers, || document_root(&route.site, &route.tenant, files))?;
    let Some(named) = named else { return Ok(response) };
    let mount = route.site.path.trim_end_matches('/');
    let mut again = head.clone();
    again.path = format!("{mount}{named}").into();
    path::canonicalize(&mut again.path, &route.site.path)?;
    if again.method != Method::HEAD {
        again.method = Method::GET;
    }
    let files = FileRoot { deny: Vec::new(), ..files.clone() };
    let path = SitePath::parse(&again.path)?;
    let rel = path.below(&route.site.path)?.ok_or(Refusal::NotFound)?;
    let ctx = FileContext { head: &again, files: &files, programs, root, path: &path, rel };
    let mut sent = server.serve(&ctx).await?;
    (sent.receipt, sent.flow) = (response.receipt.take(), response.flow.take());
    if sent.status.is_success() {
        merge(&response.headers, &mut sent.headers);
    }
    Ok(sent)
}

/// Returns the path of the file relative to the document root, percent-encoded, with a slash in
/// front.
fn named<'r>(
    headers: &HeaderMap,
    root: impl FnOnce() -> Result<Cow<'r, Path>, Refusal>,
) -> Result<Option<String>, Refusal> {
    let invalid = |what: &str| Refusal::BackendInvalid(format!("a program named a file to be sent: {what}"));
    if let Some(value) = headers.get(X_ACCEL_REDIRECT) {
        let text = value.to_str().map_err(|_| invalid("X-Accel-Redirect is no path of a URL"))?;
        let text = text.split('?').next().unwrap_or(text);
        return match text.starts_with('/') {
            true => Ok(Some(text.to_owned())),
            false => Err(invalid("X-Accel-Redirect does not begin with a slash")),
        };
    }
    let Some(value) = headers.get(X_SENDFILE) else { return Ok(None) };
    let text = str::from_utf8(value.as_bytes()).map_err(|_| invalid("X-Sendfile is not UTF-8"))?;
    let file = Path::new(text);
    let root = root()?;
    let below = if file.is_absolute() { file.strip_prefix(&root).ok() } else { Some(file) };
    let below = below.and_then(Path::to_str).ok_or_else(|| {
        invalid(&format!("'{}' is not below the document root {}", text.escape_debug(), root.display()))
    })?;
    Ok(Some(format!("/{}", utf8_percent_encode(below, PATH_ESCAPED))))
}

/// Merges the fields. The program's fields override those of the file.
fn merge(said: &HeaderMap, to: &mut HeaderMap) {
    for name in said.keys().filter(|name| !OF_THE_FILE.contains(name)) {
        to.remove(name);
        for value in said.get_all(name) {
            to.append(name, value.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn named_by(name: &HeaderName, value: &str) -> Result<Option<String>, Refusal> {
        let headers = [(name.clone(), HeaderValue::from_str(value).unwrap())].into_iter().collect();
        named(&headers, || Ok(Path::new("/srv/t/www").into()))
    }

    #[test]
    fn a_file_is_named_as_nginx_or_apache_have_it() {
        for (name, value, path) in [
            (X_ACCEL_REDIRECT, "/data/a%20b.zip?x", "/data/a%20b.zip"),
            (X_SENDFILE, "/srv/t/www/data/a b#.zip", "/data/a%20b%23.zip"),
            (X_SENDFILE, "data/x", "/data/x"),
        ] {
            assert_eq!(named_by(&name, value), Ok(Some(path.to_owned())), "{value}");
        }
        for (name, value) in
            [(X_ACCEL_REDIRECT, "data/x"), (X_SENDFILE, "/etc/passwd"), (X_SENDFILE, "/srv/t/www2/x")]
        {
            assert!(matches!(named_by(&name, value), Err(Refusal::BackendInvalid(_))), "{value}");
        }
        assert_eq!(named(&HeaderMap::new(), || unreachable!("nothing is named")), Ok(None));
    }
}
