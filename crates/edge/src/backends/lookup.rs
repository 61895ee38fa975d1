//! Finds out whether a file or a program answers a request of a site with files. This is known
//! before the request waits in a lane. Only requests for a program, a server or an application
//! wait there.
//!
//! A file is served as it was found. If the request has waited or a rule has changed its path,
//! the look-up is repeated.
//!
//! Invariant: a request without a permit reaches no program. A file that has become a program
//! since its look-up is not sent (`files`). A client cannot exhaust the threads for files. Each
//! request holds its connection or stream, and both are bounded. Look-ups that may block use the
//! tenant's share of the threads (`blocking`).
//!
//! Not here: look-ups in the document root (`files`), running a program (`programs`), the lanes
//! (`admission`).

use nagaya_records::record::{App, AppProtocol, FileRoot};
use nagaya_records::{Backend, Site};

use crate::backends::backend_set::Backends;
use crate::backends::files::root::DocumentRoot;
use crate::backends::files::script::{FoundProgram, ProgramKind};
use crate::http::message::RequestHead;
use crate::http::path::SitePath;
use crate::http::refusal::Refusal;
use crate::http::route::SiteRoute;

/// The handler of one request: a file or a program of this root.
pub struct FoundHandler {
    pub root: DocumentRoot,
    /// `None` if a file answers, or an error that needs no program.
    pub program: Option<FoundProgram>,
}

/// Result of a look-up before the request waited in a lane. `None` if the site has no files
/// beside programs. It is boxed, so that requests without one stay small.
#[derive(Default)]
pub struct HandlerLookup(Option<Box<LookupResult>>);

struct LookupResult {
    found: Result<FoundHandler, Refusal>,
    /// The path of the look-up, kept if a rule may still change it.
    path: Option<Box<str>>,
}

/// Finds the file or program of the request, if the site has both.
///
/// `may_move`: a rule may still change the path.
pub async fn find(
    backends: &Backends,
    route: &SiteRoute,
    head: &RequestHead,
    may_move: bool,
) -> HandlerLookup {
    match files_beside_programs(&route.site) {
        None => HandlerLookup::default(),
        Some(files) => Box::pin(find_among(backends, route, files, head, may_move)).await,
    }
}

async fn find_among(
    backends: &Backends,
    route: &SiteRoute,
    files: &FileRoot,
    head: &RequestHead,
    may_move: bool,
) -> HandlerLookup {
    let path = may_move.then(|| head.path.clone());
    let found = look(backends, route, files, &head.path).await;
    HandlerLookup(Some(Box::new(LookupResult { found, path })))
}

/// Returns the document root of a site, and the program in it that answers for `path`.
///
/// # Errors
/// Fails if the path is refused, or if the root cannot be read.
pub async fn look(
    backends: &Backends,
    route: &SiteRoute,
    files: &FileRoot,
    path: &str,
) -> Result<FoundHandler, Refusal> {
    let path = SitePath::parse(path)?;
    let rel = path.below_of_any(&route.site.path).ok_or(Refusal::NotFound)?;
    let programs = ProgramKind::of(&route.site.backend);
    let root = backends.root(&route.site).await?;
    let program = backends.files.find_program(&root, rel, files, programs).await?;
    Ok(FoundHandler { root, program })
}

/// Returns the files of a site that also has programs.
fn files_beside_programs(site: &Site) -> Option<&FileRoot> {
    match &site.backend {
        Backend::Cgi(files) | Backend::Php(files) => Some(files),
        Backend::App(App { protocol: AppProtocol::FastCgi, files, .. }) => files.as_deref(),
        Backend::Static(_) | Backend::Http(_) | Backend::App(_) => None,
    }
}

impl HandlerLookup {
    /// Returns whether the request needs a permit. A lane named by a rule makes it wait there in
    /// every case. So does a limit in the record of a site that has only files.
    pub fn needs_permit(&self, site: &Site, has_lane: bool) -> bool {
        let uses_program = match (&self.0, &site.backend) {
            (Some(_), _) => self.is_program(),
            (None, Backend::Static(_)) => site.max_concurrent.is_some() || site.admission.auto,
            (None, _) => true,
        };
        uses_program || has_lane
    }

    /// Returns whether a program was found.
    pub fn is_program(&self) -> bool {
        let found = self.0.as_ref().and_then(|looked| looked.found.as_ref().ok());
        found.is_some_and(|found| found.program.is_some())
    }

    /// Returns the result for the request as it runs. The look-up is repeated if the request has
    /// waited, or if a rule has changed its path.
    pub async fn renew(
        self,
        backends: &Backends,
        route: &SiteRoute,
        head: &RequestHead,
        (has_waited, may_move): (bool, bool),
    ) -> Self {
        let Some(looked) = &self.0 else { return self };
        let is_moved = looked.path.as_ref().is_some_and(|path| *path != head.path);
        if is_moved || has_waited { find(backends, route, head, may_move).await } else { self }
    }

    /// Returns the result. `None` if there was no look-up.
    pub fn into_found(self) -> Option<Result<FoundHandler, Refusal>> {
        self.0.map(|looked| looked.found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_site_of_files_has_a_line_if_its_record_bounds_it() {
        for (backend, more, expected) in [
            (r#"{"kind":"static","root":"w"}"#, "", false),
            (r#"{"kind":"static","root":"w"}"#, r#","max_concurrent":3"#, true),
            (r#"{"kind":"static","root":"w"}"#, r#","admission":{"auto":true}"#, true),
            (r#"{"kind":"static","root":"w"}"#, r#","admission":{"wait_seconds":3}"#, false),
            (r#"{"kind":"http","address":"127.0.0.1:80"}"#, "", true),
        ] {
            let text = format!(r#"{{"name":"s","tenant":"t","hosts":["s.test"],"backend":{backend}{more}}}"#);
            let site: Site = serde_json::from_str(&text).expect("a record");
            assert_eq!(HandlerLookup::default().needs_permit(&site, false), expected, "{text}");
        }
        let site = r#"{"name":"s","tenant":"t","hosts":["s.test"],"backend":{"kind":"php","root":"w"}}"#;
        let site: Site = serde_json::from_str(site).expect("a record");
        let refused =
            HandlerLookup(Some(Box::new(LookupResult { found: Err(Refusal::NotFound), path: None })));
        assert!(!refused.needs_permit(&site, false), "no program is needed to say so");
    }
}
