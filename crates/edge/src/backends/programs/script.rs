//! A program that was found for a request, and what came of running it.

use std::sync::Arc;

use nagaya_records::Site;
use nagaya_records::record::FileRoot;

use crate::http::message::{RequestHead, Response};
use crate::http::proxy_headers::client::ClientView;
use crate::http::refusal::Refusal;
use crate::metrics::EdgeMetrics;

/// A program that was found for a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramScript {
    /// Path of the file relative to the document root, e.g. `wiki/doku.php`.
    pub file: String,
    /// Decoded path of the program in the URL, with the site's own path, e.g. `/wiki/doku.php`.
    pub name: String,
    /// The decoded rest of the request's path, e.g. `/start`, or nothing. It is not always UTF-8.
    pub path_info: Vec<u8>,
    /// Variables that rules set, or remove with `None`, each name once. They override all others
    /// of the same name.
    pub variables: Vec<ScriptVariable>,
    /// The client, as the program sees it.
    pub client: ClientView,
}

pub type ScriptVariable = (Box<str>, Option<Box<str>>);

/// Facts about a request that the steps above know and only scripts need.
pub trait ScriptHooks {
    /// Returns the variables that the rules set for the request's programs.
    fn variables(&self) -> Vec<ScriptVariable>;

    /// Adds the explanation for people and programs to a refusal of a line. Returns other refusals
    /// as they are.
    fn explain_refusal(&self, refusal: Refusal, head: &RequestHead) -> Refusal;
}

/// Outcome of running a program.
pub enum ProgramOutcome {
    Response(Response),
    /// Answer the request as if it were for this path (RFC 3875 section 6.2.2): a `GET` without a
    /// body.
    LocalRedirect {
        /// It begins with one slash, in the form of a client's request.
        path: String,
        query: Option<String>,
    },
}

/// Counts a CGI program while it runs.
pub struct CgiRunningGuard(Arc<EdgeMetrics>);

impl CgiRunningGuard {
    pub fn begin(metrics: &Arc<EdgeMetrics>) -> Self {
        metrics.cgi_spawned.add(1);
        metrics.cgi_running.add(1);
        Self(Arc::clone(metrics))
    }
}

impl Drop for CgiRunningGuard {
    fn drop(&mut self) {
        self.0.cgi_running.add(-1);
    }
}

pub fn files_of(site: &Site) -> Result<&FileRoot, Refusal> {
    site.backend
        .files()
        .ok_or_else(|| Refusal::SiteBroken(format!("site {} has no document root", site.name)))
}
