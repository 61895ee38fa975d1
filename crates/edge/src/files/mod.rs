//! Answering from files beneath a document root: the *static* backend, and the look-ups *cgi* and *php* begin with.
//!
//! A request for a small hot file is the hottest path of the server. It costs one hash look-up, one `statx` and one
//! clone of a prebuilt header map; nothing is formatted and nothing but the header map is allocated.
//!
//! No look of an edge thread waits for a disk or a network. What the kernel has in memory is looked at at once; everything else
//! runs on the blocking pool, with a share for each device. Of remote file systems (by the keeper's word) everything does, and bodies too.
//! Small files are read as a whole; larger ones are opened, and sent by whoever sends the body.
//!
//! `X-Content-Type-Options` is not sent with a tenant's files: the type is derived from the name, and what a site's own
//! pages make of it is the site's choice. Not here: text to path (`path`), opening the root itself (`keeper`),
//! sending (`http1`, `http2`).

mod beneath;
mod cache;
pub(crate) mod conditional;
pub(crate) mod encoding;
mod listing;
mod load;
pub(crate) mod range;
mod remote;
mod root;
mod script;
#[cfg(test)]
mod tests;

use std::cell::{Cell, RefCell};
use std::os::fd::AsFd as _;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::header::{
    ALLOW, CACHE_CONTROL, CONTENT_LOCATION, CONTENT_TYPE, ETAG, HeaderValue, LAST_MODIFIED, LOCATION, RANGE,
    VARY,
};
use http::{HeaderMap, Method, StatusCode};
use nagaya_base::{Clock, SystemClock};
use nagaya_cmdb::record::{Files, Site};
use nagaya_keeper::protocol::OpenedRoot;
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use tokio::time::timeout;

pub use self::cache::LARGE_FILES_MAX;
pub use self::load::SMALL_FILE_MAX;
pub use self::range::RANGES_MAX;
pub use self::root::{ROOT_AGE_MAX, ROOTS_MAX, Root};
pub use self::script::{Program, Programs};

use self::beneath::{Access, Look, LookupError, Opened};
use self::cache::Cache;
use self::conditional::Outcome;
use self::load::{Entry, Loaded, Representation};
use self::range::Wanted;
use self::root::Roots;
use crate::blocking::BlockingPool;
use crate::message::{Head, Headers, Response, ResponseBody};
use crate::path::{RelPath, SitePath, matches_prefix};
use crate::refusal::Refusal;
use crate::target;
use crate::turns::Turns;

/// The methods files answer to.
const ALLOWED: &str = "GET, HEAD, OPTIONS";

/// What nobody asked for since this long is forgotten, and its descriptors closed.
pub const IDLE_MAX: Duration = Duration::from_secs(30);

/// How long a file system may take to answer one look.
const HANG_MAX: Duration = Duration::from_secs(20);

/// What must be escaped in the path of a URL: all but the unreserved characters and the delimiters that mean nothing
/// special between two slashes (RFC 3986 section 3.3).
pub const PATH_ESCAPED: &AsciiSet = &CONTROLS
    .add(b' ')
    .add(b'"')
    .add(b'#')
    .add(b'%')
    .add(b'<')
    .add(b'>')
    .add(b'?')
    .add(b'[')
    .add(b'\\')
    .add(b']')
    .add(b'^')
    .add(b'`')
    .add(b'{')
    .add(b'|')
    .add(b'}');

/// One thread's file server: its open roots and its cache.
pub struct FileServer {
    roots: Roots,
    cache: RefCell<Cache>,
    /// Where paths of index files are put together, so that a request for a directory allocates nothing.
    scratch: RefCell<String>,
    clock: Rc<dyn Clock>,
    turns: Rc<Turns>,
    pool: Arc<BlockingPool>,
    hits: Cell<u64>,
    misses: Cell<u64>,
}

/// What a request for a file is answered from.
#[derive(Clone, Copy)]
pub struct Ctx<'a> {
    pub head: &'a Head,
    pub files: &'a Files,
    /// Which of the files are programs: those are never sent as they are.
    pub programs: Programs,
    pub root: &'a Root,
    /// The whole path, for redirects.
    pub path: &'a SitePath<'a>,
    /// The path below the site's.
    pub rel: RelPath<'a>,
}

/// What is at a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    File,
    Directory,
    Missing,
}

/// A site's own page for an error status.
pub struct ErrorDocument {
    pub content_type: HeaderValue,
    pub body: ResponseBody,
}

impl FileServer {
    /// `cache_bytes` bounds what is kept of files, in bytes (`Limits::file_cache_bytes`); 0 keeps nothing.
    pub fn new(cache_bytes: usize, turns: Rc<Turns>, pool: Arc<BlockingPool>) -> Self {
        Self::with_clock(cache_bytes, Rc::new(SystemClock), turns, pool)
    }

    pub fn with_clock(
        cache_bytes: usize,
        clock: Rc<dyn Clock>,
        turns: Rc<Turns>,
        pool: Arc<BlockingPool>,
    ) -> Self {
        Self {
            pool,
            roots: Roots::new(),
            cache: RefCell::new(Cache::new(cache_bytes)),
            scratch: RefCell::new(String::new()),
            hits: Cell::new(0),
            misses: Cell::new(0),
            clock,
            turns,
        }
    }

    /// The site's document root. `open` asks the keeper for it; it is called when the site has none open, or one older
    /// than `ROOT_AGE_MAX`, or its record names another root than before.
    pub async fn root<E: From<std::io::Error>>(
        &self,
        site: &Site,
        open: impl AsyncFnOnce() -> Result<OpenedRoot, E>,
    ) -> Result<Root, E> {
        self.roots.get(site, &*self.clock, open).await
    }

    /// Closes and forgets what was idle for `IDLE_MAX`. To be called every few seconds.
    pub fn drop_idle(&self, now: Instant) {
        self.cache.borrow_mut().drop_idle(now, IDLE_MAX);
        self.roots.close_idle(now, IDLE_MAX);
    }

    /// Answers from memory and from disk since the last call, and the bytes kept in memory now.
    pub fn take_counts(&self) -> (u64, u64, usize) {
        (self.hits.take(), self.misses.take(), self.cache.borrow().bytes())
    }

    /// The program that answers this path, if one does; otherwise `serve` answers.
    pub async fn find_program(
        &self,
        root: &Root,
        rel: RelPath<'_>,
        files: &Files,
        programs: Programs,
    ) -> Result<Option<Program>, Refusal> {
        if programs == Programs::None {
            return Ok(None);
        }
        let cached = (!root.is_remote()).then(|| {
            script::find_program(Look { dir: root.dir(), access: Access::Cached }, rel, files, programs)
        });
        match cached {
            Some(Ok(found)) => Ok(found),
            Some(Err(LookupError::Refused(refusal))) => Err(refusal),
            Some(Err(LookupError::WouldBlock)) | None => {
                let (rel, files) = (rel.to_owned(), files.clone());
                let find = move |look: Look<'_>| script::find_program(look, rel.borrow(), &files, programs);
                Box::pin(self.elsewhere(root, find)).await
            }
        }
    }

    /// Looks into the root on another thread.
    async fn elsewhere<T: Send + 'static>(
        &self,
        root: &Root,
        look: impl FnOnce(Look<'_>) -> Result<T, LookupError> + Send + 'static,
    ) -> Result<T, Refusal> {
        let dir = root.shared_dir();
        let call = move || look(Look { dir: dir.as_fd(), access: Access::Blocking });
        match timeout(HANG_MAX, self.pool.run(root.share(), call)).await {
            Ok(Ok(Ok(found))) => Ok(found),
            Ok(Ok(Err(LookupError::Refused(refusal)))) => Err(refusal),
            // Nothing that may block says so.
            Ok(Ok(Err(LookupError::WouldBlock)) | Err(_)) | Err(_) => Err(Refusal::FilesHang),
        }
    }

    /// The answer to a request for a file or a directory. The body is there for HEAD too: its length is announced,
    /// and whoever sends the response leaves it out.
    pub async fn serve(&self, ctx: &Ctx<'_>) -> Result<Response, Refusal> {
        match ctx.head.method {
            Method::GET | Method::HEAD => {}
            Method::OPTIONS => {
                return Ok(Response::new(StatusCode::NO_CONTENT)
                    .with_header(ALLOW, HeaderValue::from_static(ALLOWED)));
            }
            ref method if target::is_known(method) => return Err(Refusal::MethodNotAllowed(ALLOWED)),
            _ => return Err(Refusal::MethodUnknown),
        }
        refuse_unservable(ctx.rel, ctx.files)?;
        if ctx.rel.is_directory() {
            return Box::pin(self.serve_directory(ctx)).await;
        }
        // `find_program` had the first look; a program that comes here has just appeared, or is never run.
        if ctx.programs.is_source(ctx.files, ctx.rel.name()) {
            return Err(Refusal::NotFound);
        }
        match self.fetch(ctx, ctx.rel.as_str()).await? {
            Fetched::File(entry, chosen) => Ok(self.respond(ctx, &entry, chosen)),
            Fetched::Directory => Ok(redirect_to_directory(ctx)),
            Fetched::Missing => Err(Refusal::NotFound),
        }
    }

    async fn serve_directory(&self, ctx: &Ctx<'_>) -> Result<Response, Refusal> {
        for name in ctx.programs.index(ctx.files) {
            if ctx.programs.contains(ctx.files, name) {
                continue;
            }
            // The buffer is taken, not borrowed: another request may be answered while this one waits.
            let mut path = self.scratch.take();
            path.clear();
            push_joined(&mut path, ctx.rel.as_str(), name);
            refuse_denied(&path, ctx.files)?;
            let fetched = self.fetch(ctx, &path).await;
            self.scratch.replace(path);
            if let Fetched::File(entry, chosen) = fetched? {
                return Ok(self.respond(ctx, &entry, chosen));
            }
        }
        let (path, files) = (ctx.rel.as_str().to_owned(), ctx.files.clone());
        let list = move |look: Look<'_>| match beneath::open(look, if path.is_empty() { "." } else { &path })?
        {
            Opened::Directory(directory) if files.listing => listing::read(&directory, &path, &files),
            Opened::Directory(_) => Err(Refusal::Forbidden("the directory has no index").into()),
            Opened::File(..) | Opened::Missing => Err(Refusal::NotFound.into()),
        };
        Ok(listing::respond(ctx, self.elsewhere(ctx.root, list).await?))
    }

    /// The answer with this file. One that may hang is not given to the kernel to send.
    fn respond(&self, ctx: &Ctx<'_>, entry: &Entry, chosen: Option<usize>) -> Response {
        let response = respond(ctx.head, entry.representation(chosen));
        if entry.is_remote() {
            remote::sent_from_pool(response, &self.pool, ctx.root.share())
        } else {
            response
        }
    }

    /// The site's own page for `status`, if it has one that can be read.
    pub async fn error_document(
        &self,
        root: &Root,
        files: &Files,
        status: StatusCode,
    ) -> Option<ErrorDocument> {
        let path = files.error_documents.get(status.as_str())?;
        match self.fetch_for(root, path.trim_start_matches('/'), None, &HeaderMap::new()).await {
            Ok(Fetched::File(entry, _)) => {
                let plain = entry.representation(None);
                let content_type = plain.headers[CONTENT_TYPE].clone();
                let body = range::whole(&plain.content);
                let body =
                    if entry.is_remote() { remote::body(body, &self.pool, root.share()) } else { body };
                Some(ErrorDocument { content_type, body })
            }
            Ok(Fetched::Directory | Fetched::Missing) => None,
            Err(refusal) => {
                tracing::debug!(%status, path, error = %refusal, "an error document cannot be read");
                None
            }
        }
    }

    async fn fetch(&self, ctx: &Ctx<'_>, path: &str) -> Result<Fetched, Refusal> {
        self.fetch_for(ctx.root, path, ctx.files.cache_control.as_deref(), &ctx.head.headers).await
    }

    /// The file at `path` and which of its codings suits `headers`: from the cache if it still is what lies on disk.
    async fn fetch_for(
        &self,
        root: &Root,
        path: &str,
        cache_control: Option<&str>,
        headers: &HeaderMap,
    ) -> Result<Fetched, Refusal> {
        let now = self.clock.now();
        let kept = self.cache.borrow_mut().get(root.id(), path, now);
        if let Some(entry) = kept {
            let chosen = entry.choose(headers);
            let is_current = if entry.is_remote() {
                Box::pin(self.is_current_elsewhere(root, &entry, chosen, cache_control, now)).await?
            } else {
                entry.is_current(root, chosen, cache_control, (now, self.turns.now()))
            };
            if is_current {
                self.hits.set(self.hits.get() + 1);
                return Ok(Fetched::File(entry, chosen));
            }
            self.cache.borrow_mut().remove(root.id(), path);
        }
        // Boxed, because most requests find their file kept.
        Box::pin(self.load(root, path, cache_control, headers, now)).await
    }

    async fn is_current_elsewhere(
        &self,
        root: &Root,
        entry: &Entry,
        chosen: Option<usize>,
        cache_control: Option<&str>,
        now: Instant,
    ) -> Result<bool, Refusal> {
        let looks = entry.looks(chosen, now);
        let is_current = self.elsewhere(root, move |look| Ok(looks.hold(look.dir))).await?;
        Ok(is_current && entry.is_for_cache_control(cache_control))
    }

    async fn load(
        &self,
        root: &Root,
        path: &str,
        cache_control: Option<&str>,
        headers: &HeaderMap,
        now: Instant,
    ) -> Result<Fetched, Refusal> {
        self.misses.set(self.misses.get() + 1);
        // Read before the first look at the file, so that a change after that look is younger than this.
        let wall = self.clock.wall();
        let cached =
            (!root.is_remote()).then(|| load::load(Look { dir: root.dir(), access: Access::Cached }, path));
        let loaded = match cached {
            Some(Ok(loaded)) => Ok(loaded),
            Some(Err(LookupError::Refused(refusal))) => Err(refusal),
            Some(Err(LookupError::WouldBlock)) | None => {
                let path = path.to_owned();
                self.elsewhere(root, move |look| load::load(look, &path)).await
            }
        };
        match loaded {
            Ok(Loaded::File(files)) => {
                let entry = files.into_entry(root, cache_control, now, wall)?;
                if entry.is_settled() {
                    self.cache.borrow_mut().put(root.id(), path, entry.clone(), now);
                }
                let chosen = entry.choose(headers);
                Ok(Fetched::File(entry, chosen))
            }
            Ok(Loaded::Directory) => Ok(Fetched::Directory),
            Ok(Loaded::Missing) => Ok(Fetched::Missing),
            Err(refusal) => {
                // The descriptors kept here may be the ones that are missing; the next request finds them free.
                if refusal == beneath::OUT_OF_DESCRIPTORS {
                    self.cache.borrow_mut().clear();
                }
                Err(refusal)
            }
        }
    }
}

/// What is at `rel`, whoever may read it. Refuses what the site does not serve.
fn lookup(look: Look<'_>, rel: RelPath<'_>, files: &Files) -> Result<Found, LookupError> {
    refuse_unservable(rel, files)?;
    find(look, rel.as_str())
}

fn find(look: Look<'_>, path: &str) -> Result<Found, LookupError> {
    Ok(match beneath::find(look, if path.is_empty() { "." } else { path })? {
        Opened::File(..) => Found::File,
        Opened::Directory(_) => Found::Directory,
        Opened::Missing => Found::Missing,
    })
}

enum Fetched {
    /// With the place of the chosen variant.
    File(Rc<Entry>, Option<usize>),
    Directory,
    Missing,
}

fn respond(head: &Head, found: &Representation) -> Response {
    match conditional::evaluate(&head.headers, found.validators()) {
        Outcome::Send => {}
        Outcome::NotModified => return not_modified(found),
        Outcome::Failed => return Response::new(StatusCode::PRECONDITION_FAILED),
    }
    if head.headers.contains_key(RANGE) && conditional::range_applies(&head.headers, found.validators()) {
        match range::wanted(&head.method, &head.headers, found.content.len()) {
            Wanted::Whole => {}
            Wanted::Spans(spans) => {
                return range::partial(HeaderMap::clone(&found.headers), &found.content, &spans, random);
            }
            Wanted::Nothing => return range::unsatisfiable(found.content.len()),
        }
    }
    Response { headers: Headers::Shared(Rc::clone(&found.headers)), ..Response::new(StatusCode::OK) }
        .with_body(range::whole(&found.content))
}

/// RFC 9110 section 15.4.5: the fields of the 200 that update what the client kept, and no others.
fn not_modified(found: &Representation) -> Response {
    let mut response = Response::new(StatusCode::NOT_MODIFIED);
    for name in [ETAG, LAST_MODIFIED, CACHE_CONTROL, CONTENT_LOCATION, VARY] {
        if let Some(value) = found.headers.get(&name) {
            response.headers.insert(name, value.clone());
        }
    }
    response
}

/// `/a` to `/a/`, with the query. The decoded, normal path is encoded anew: it begins with exactly one slash and has no
/// backslash, so that no browser reads `//evil.example` in it.
fn redirect_to_directory(ctx: &Ctx<'_>) -> Response {
    let mut location = utf8_percent_encode(ctx.path.as_str(), PATH_ESCAPED).to_string();
    location.push('/');
    if let Some(query) = &ctx.head.query {
        location.push('?');
        location.push_str(query);
    }
    match HeaderValue::try_from(location) {
        Ok(location) => Response::new(StatusCode::MOVED_PERMANENTLY).with_header(LOCATION, location),
        // Only the query is as the client sent it.
        Err(_) => Response::new(StatusCode::BAD_REQUEST),
    }
}

fn refuse_unservable(rel: RelPath<'_>, files: &Files) -> Result<(), Refusal> {
    // As if they did not exist: that there is a `.git` is already something to know.
    if rel.is_hidden() {
        return Err(Refusal::NotFound);
    }
    refuse_denied(rel.as_str(), files)
}

fn refuse_denied(path: &str, files: &Files) -> Result<(), Refusal> {
    if files.deny.iter().any(|prefix| matches_prefix(path, prefix)) {
        return Err(Refusal::Forbidden("the site does not serve it"));
    }
    Ok(())
}

fn join(directory: &str, name: &str) -> String {
    let mut path = String::with_capacity(directory.len() + 1 + name.len());
    push_joined(&mut path, directory, name);
    path
}

fn push_joined(path: &mut String, directory: &str, name: &str) {
    path.push_str(directory);
    if !directory.is_empty() {
        path.push('/');
    }
    path.push_str(name);
}

/// A boundary nobody can put into a file beforehand.
fn random() -> u128 {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).expect("the kernel's random source is seeded before anything listens");
    u128::from_ne_bytes(bytes)
}
