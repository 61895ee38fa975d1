//! Answers requests from files below a document root. This is the *static* backend, and the
//! look-ups with which *cgi* and *php* begin.
//!
//! A request for a small hot file is the hottest path of the server. It costs one hash look-up,
//! one `statx` and one clone of a prebuilt header map. Nothing is formatted, and only the header
//! map is allocated.
//!
//! Invariant: no look-up of an edge thread waits for a disk or a network. An edge thread uses
//! only data that the kernel has in memory. All else runs on the blocking pool, with a share for
//! each device. For remote file systems (as the keeper reports) everything does, bodies included.
//! Small files are read as a whole. Larger ones are opened, and sent by the code that sends the
//! body.
//!
//! `X-Content-Type-Options` is not sent with a tenant's files. The type is derived from the name,
//! and its use by a site's own pages is the site's choice. Not here: text to path (`path`), opening
//! the root itself (`keeper`), sending (`h1`, `h2`).

pub mod beneath;
pub mod cache;
pub(crate) mod conditional;
pub(crate) mod encoding;
pub mod links;
pub mod listing;
pub mod load;
pub(crate) mod range;
pub mod remote;
pub mod root;
pub mod script;
#[cfg(test)]
mod tests;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::header::{
    ALLOW, CACHE_CONTROL, CONTENT_LOCATION, CONTENT_TYPE, ETAG, HeaderValue, LAST_MODIFIED, LOCATION, RANGE,
    VARY,
};
use http::{HeaderMap, Method, StatusCode};
use nagaya_base::Clock;
use nagaya_keeper_api::protocol::OpenedRoot;
use nagaya_records::record::{FileRoot, LinkPolicy, Site};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use tokio::time::timeout;

use crate::backends::files::beneath::{LookupAccess, LookupBase, LookupError, OpenedPath};
use crate::backends::files::cache::FileCache;
use crate::backends::files::conditional::PreconditionResult;
use crate::backends::files::links::{LinkCache, LinkOpener, LinkedRoot};
use crate::backends::files::load::{LoadedPath, Representation, ServedFile};
use crate::backends::files::range::WantedRanges;
use crate::backends::files::root::{DirectoryId, DocumentRoot, OpenBase, RootCache};
use crate::backends::files::script::{FoundProgram, ProgramKind};
use crate::blocking::BlockingPool;
use crate::http::message::{RequestHead, Response, ResponseBody, ResponseFields};
use crate::http::meter::PollClock;
use crate::http::path::{RelPath, SitePath, matches_prefix};
use crate::http::refusal::Refusal;
use crate::http::target;
use crate::loop_ticks::LoopTicks;

/// The methods that files support.
const ALLOWED: &str = "GET, HEAD, OPTIONS";

/// Time without a request after which an entry is dropped and its descriptors are closed.
pub const IDLE_MAX: Duration = Duration::from_secs(30);

/// Maximum time in which a file system may answer one look-up.
const HANG_MAX: Duration = Duration::from_secs(20);

/// Characters that must be escaped in the path of a URL. Unreserved characters and delimiters
/// without a meaning between two slashes are not (RFC 3986 section 3.3).
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
    roots: RootCache,
    links: LinkCache,
    cache: RefCell<FileCache>,
    /// Buffer for paths of index files, so that a request for a directory allocates nothing.
    scratch: RefCell<String>,
    clock: Rc<dyn Clock>,
    turns: Rc<LoopTicks>,
    pool: Arc<BlockingPool>,
    hits: Cell<u64>,
    misses: Cell<u64>,
}

/// Context of a request for a file.
#[derive(Clone, Copy)]
pub struct FileContext<'a> {
    pub head: &'a RequestHead,
    pub files: &'a FileRoot,
    /// Which of the files are programs. Those are never sent as they are.
    pub programs: ProgramKind,
    pub root: &'a DocumentRoot,
    /// The whole path, for redirects.
    pub path: &'a SitePath<'a>,
    /// The path below the site's.
    pub rel: RelPath<'a>,
}

/// Kind of the file at a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PathKind {
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
    /// `cache_bytes` limits the cached bytes of files (`Limits::file_cache_bytes`). 0 keeps
    /// nothing.
    pub fn new(
        cache_bytes: usize,
        turns: Rc<LoopTicks>,
        pool: Arc<BlockingPool>,
        opener: Rc<dyn LinkOpener>,
    ) -> Self {
        Self::with_clock(cache_bytes, Rc::new(PollClock), turns, pool, opener)
    }

    pub fn with_clock(
        cache_bytes: usize,
        clock: Rc<dyn Clock>,
        turns: Rc<LoopTicks>,
        pool: Arc<BlockingPool>,
        opener: Rc<dyn LinkOpener>,
    ) -> Self {
        Self {
            pool,
            roots: RootCache::new(),
            links: LinkCache::new(opener),
            cache: RefCell::new(FileCache::new(cache_bytes)),
            scratch: RefCell::new(String::new()),
            hits: Cell::new(0),
            misses: Cell::new(0),
            clock,
            turns,
        }
    }

    /// Returns the site's document root. `open` requests it from the keeper. It is called if the
    /// site has no open root, or one older than `ROOT_AGE_MAX`. It is also called if the record
    /// names another root than before.
    pub async fn root<E: From<std::io::Error>>(
        &self,
        site: &Site,
        open: impl AsyncFnOnce() -> Result<OpenedRoot, E>,
    ) -> Result<DocumentRoot, E> {
        self.roots.get(site, &*self.clock, open).await
    }

    /// Closes and drops entries that were idle for `IDLE_MAX`. Call it every few seconds.
    pub fn drop_idle(&self, now: Instant) {
        self.cache.borrow_mut().drop_idle(now, IDLE_MAX);
        self.roots.close_idle(now, IDLE_MAX);
        self.links.close_idle(now, IDLE_MAX);
    }

    /// Returns the responses from memory and from disk since the last call, and the bytes in
    /// memory now.
    pub fn take_counts(&self) -> (u64, u64, usize) {
        (self.hits.take(), self.misses.take(), self.cache.borrow().bytes())
    }

    /// Returns the present directory of a script, for a comparison. `None` if it is not known.
    pub fn directory_of(&self, root: &DocumentRoot, files: &FileRoot, script: &str) -> Option<DirectoryId> {
        let directory = script.rsplit_once('/').map_or("", |(directory, _)| directory);
        let linked = self.links.known(root, files.links, directory, &*self.clock);
        let (base, skip) = linked.base(directory)?;
        base.id_beneath(&directory[skip..])
    }

    /// Returns the program that answers this path, if one does. Otherwise `serve` answers.
    pub async fn find_program(
        &self,
        root: &DocumentRoot,
        rel: RelPath<'_>,
        files: &FileRoot,
        programs: ProgramKind,
    ) -> Result<Option<FoundProgram>, Refusal> {
        if programs == ProgramKind::None {
            return Ok(None);
        }
        let mut linked = self.links.known(root, files.links, rel.as_str(), &*self.clock);
        loop {
            let cached = (!root.base().is_remote())
                .then(|| script::find_program(linked.look(LookupAccess::Cached), rel, files, programs));
            let found = match cached {
                Some(Err(LookupError::WouldBlock)) | None => {
                    let (rel, files) = (rel.to_owned(), files.clone());
                    let find = move |look: LookupBase<'_>| {
                        script::find_program(look, rel.borrow(), &files, programs)
                    };
                    Box::pin(self.elsewhere(&linked, find)).await
                }
                Some(found) => found,
            };
            match found {
                Ok(found) => return Ok(found),
                Err(error) => self.follow_link(&mut linked, files.links, error).await?,
            }
        }
    }

    /// Runs a look-up on another thread.
    async fn elsewhere<T: Send + 'static>(
        &self,
        linked: &LinkedRoot<'_>,
        look: impl FnOnce(LookupBase<'_>) -> Result<T, LookupError> + Send + 'static,
    ) -> Result<T, LookupError> {
        let (base, links) = linked.share_with_thread();
        let call = move || look(LookupBase { base: &base, access: LookupAccess::Blocking, links: &links });
        match timeout(HANG_MAX, self.pool.run(linked.last_base().share(), call)).await {
            Ok(Ok(looked)) => looked,
            Ok(Err(_)) | Err(_) => Err(Refusal::FilesHang.into()),
        }
    }

    /// Returns the response to a request for a file or a directory. It has a body for HEAD, too:
    /// its length is announced, and the sender leaves it out.
    pub async fn serve(&self, ctx: &FileContext<'_>) -> Result<Response, Refusal> {
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
        // `find_program` came first. A program found here has just appeared, or is never run.
        if ctx.programs.is_source(ctx.files, ctx.rel.name()) {
            return Err(Refusal::NotFound);
        }
        match self.fetch(ctx, ctx.rel.as_str()).await? {
            FetchedFile::File(entry, chosen) => Ok(self.respond(ctx, &entry, chosen)),
            FetchedFile::Directory => Ok(redirect_to_directory(ctx)),
            FetchedFile::Missing => Err(Refusal::NotFound),
        }
    }

    async fn serve_directory(&self, ctx: &FileContext<'_>) -> Result<Response, Refusal> {
        for name in ctx.programs.index(ctx.files) {
            if ctx.programs.contains(ctx.files, name) {
                continue;
            }
            // The buffer is taken, not borrowed: another request may be answered while this one
            // waits.
            let mut path = self.scratch.take();
            path.clear();
            push_joined(&mut path, ctx.rel.as_str(), name);
            refuse_denied(&path, ctx.files)?;
            let fetched = self.fetch(ctx, &path).await;
            self.scratch.replace(path);
            if let FetchedFile::File(entry, chosen) = fetched? {
                return Ok(self.respond(ctx, &entry, chosen));
            }
        }
        let mut linked = self.links.known(ctx.root, ctx.files.links, ctx.rel.as_str(), &*self.clock);
        loop {
            let (path, files) = (ctx.rel.as_str().to_owned(), ctx.files.clone());
            let list = move |look: LookupBase<'_>| match beneath::open(look, path.as_bytes())? {
                OpenedPath::Directory(directory) if files.listing => listing::read(&directory, &path, &files),
                OpenedPath::Directory(_) => Err(Refusal::Forbidden("the directory has no index").into()),
                OpenedPath::File(..) | OpenedPath::Missing => Err(Refusal::NotFound.into()),
            };
            match self.elsewhere(&linked, list).await {
                Ok(listed) => return Ok(listing::respond(ctx, listed)),
                Err(error) => self.follow_link(&mut linked, ctx.files.links, error).await?,
            }
        }
    }

    /// Returns the response with this file. The kernel must not send a file that may hang.
    fn respond(&self, ctx: &FileContext<'_>, entry: &ServedFile, chosen: Option<usize>) -> Response {
        let response = respond(ctx.head, entry.representation(chosen));
        match entry.remote_share() {
            Some(share) => remote::sent_from_pool(response, &self.pool, share),
            None => response,
        }
    }

    /// Returns the site's own page for `status`, if it has a readable one.
    pub async fn error_document(
        &self,
        root: &DocumentRoot,
        files: &FileRoot,
        status: StatusCode,
    ) -> Option<ErrorDocument> {
        let path = files.error_documents.get(status.as_str())?;
        let order = FetchOrder { policy: files.links, cache_control: None, headers: &HeaderMap::new() };
        match self.fetch_for(root, path.trim_start_matches('/'), order).await {
            Ok(FetchedFile::File(entry, _)) => {
                let plain = entry.representation(None);
                let content_type = plain.headers[CONTENT_TYPE].clone();
                let body = range::whole(&plain.content);
                let body = match entry.remote_share() {
                    Some(share) => remote::body(body, &self.pool, share),
                    None => body,
                };
                Some(ErrorDocument { content_type, body })
            }
            Ok(FetchedFile::Directory | FetchedFile::Missing) => None,
            Err(refusal) => {
                tracing::debug!(%status, path, error = %refusal, "an error document cannot be read");
                None
            }
        }
    }

    async fn fetch(&self, ctx: &FileContext<'_>, path: &str) -> Result<FetchedFile, Refusal> {
        let cache_control = ctx.files.cache_control.as_deref();
        let order = FetchOrder { policy: ctx.files.links, cache_control, headers: &ctx.head.headers };
        self.fetch_for(ctx.root, path, order).await
    }

    /// Returns the file at `path` and the best of its codings for the client. It comes from the
    /// cache if it is unchanged on disk.
    async fn fetch_for(
        &self,
        root: &DocumentRoot,
        path: &str,
        order: FetchOrder<'_>,
    ) -> Result<FetchedFile, Refusal> {
        match self.fetch_at_once(root, path, order) {
            Some(fetched) => Ok(fetched),
            // Boxed, because most requests find their file in the cache.
            None => Box::pin(self.fetch_later(root, path, order)).await,
        }
    }

    /// Returns it from the cache, if no check of it can hang.
    fn fetch_at_once(&self, root: &DocumentRoot, path: &str, order: FetchOrder<'_>) -> Option<FetchedFile> {
        let linked = self.links.known(root, order.policy, path, &*self.clock);
        let (base, _) = linked.base(path)?;
        let now = self.clock.now();
        let entry = self.cache.borrow_mut().get(base.id(), path, now)?;
        if entry.remote_share().is_some() {
            return None;
        }
        let chosen = entry.choose(order.headers);
        if entry.is_current(base, chosen, order.cache_control, (now, self.turns.now())) {
            self.hits.set(self.hits.get() + 1);
            return Some(FetchedFile::File(entry, chosen));
        }
        self.cache.borrow_mut().remove(base.id(), path);
        None
    }

    async fn fetch_later(
        &self,
        root: &DocumentRoot,
        path: &str,
        order: FetchOrder<'_>,
    ) -> Result<FetchedFile, Refusal> {
        let mut linked = self.links.known(root, order.policy, path, &*self.clock);
        loop {
            if let Some(kept) = self.fetch_kept(&linked, path, order).await? {
                return Ok(kept);
            }
            match self.load(&linked, path, order).await {
                Ok(fetched) => return Ok(fetched),
                Err(error) => self.follow_link(&mut linked, order.policy, error).await?,
            }
        }
    }

    /// Returns it from the cache, wherever the file is.
    async fn fetch_kept(
        &self,
        linked: &LinkedRoot<'_>,
        path: &str,
        order: FetchOrder<'_>,
    ) -> Result<Option<FetchedFile>, Refusal> {
        let Some((base, _)) = linked.base(path) else { return Ok(Some(FetchedFile::Missing)) };
        let now = self.clock.now();
        let kept = self.cache.borrow_mut().get(base.id(), path, now);
        let Some(entry) = kept else { return Ok(None) };
        let chosen = entry.choose(order.headers);
        let is_current = if entry.remote_share().is_some() {
            self.is_current_elsewhere(linked, base, &entry, chosen, (order.cache_control, now)).await?
        } else {
            entry.is_current(base, chosen, order.cache_control, (now, self.turns.now()))
        };
        if is_current {
            self.hits.set(self.hits.get() + 1);
            return Ok(Some(FetchedFile::File(entry, chosen)));
        }
        self.cache.borrow_mut().remove(base.id(), path);
        Ok(None)
    }

    async fn is_current_elsewhere(
        &self,
        linked: &LinkedRoot<'_>,
        base: &Arc<OpenBase>,
        entry: &ServedFile,
        chosen: Option<usize>,
        (cache_control, now): (Option<&str>, Instant),
    ) -> Result<bool, Refusal> {
        let (looks, base) = (entry.looks(chosen, now), Arc::clone(base));
        match self.elsewhere(linked, move |_| Ok(looks.hold(&base))).await {
            Ok(is_current) => Ok(is_current && entry.is_for_cache_control(cache_control)),
            Err(LookupError::Refused(refusal)) => Err(refusal),
            Err(LookupError::WouldBlock | LookupError::LeadsOut(_)) => Ok(false),
        }
    }

    /// Handles a failed look-up: opens the target of the link it has met, for the next look-up.
    async fn follow_link(
        &self,
        linked: &mut LinkedRoot<'_>,
        policy: LinkPolicy,
        error: LookupError,
    ) -> Result<(), Refusal> {
        match error {
            LookupError::LeadsOut(path) => {
                Box::pin(self.links.open(linked, policy, &path, &*self.clock)).await
            }
            LookupError::Refused(refusal) => Err(refusal),
            // A look-up that may block never returns this.
            LookupError::WouldBlock => Err(Refusal::FilesHang),
        }
    }

    async fn load(
        &self,
        linked: &LinkedRoot<'_>,
        path: &str,
        order: FetchOrder<'_>,
    ) -> Result<FetchedFile, LookupError> {
        let now = self.clock.now();
        self.misses.set(self.misses.get() + 1);
        // Read before the first check of the file, so that a later change is younger than this.
        let wall = self.clock.wall();
        let Some((base, skip)) = linked.base(path) else { return Ok(FetchedFile::Missing) };
        let cached = (!base.is_remote()).then(|| load::load(linked.look(LookupAccess::Cached), path));
        let loaded = match cached {
            Some(Err(LookupError::WouldBlock)) | None => {
                let path = path.to_owned();
                self.elsewhere(linked, move |look| load::load(look, &path)).await
            }
            Some(loaded) => loaded,
        };
        match loaded {
            Ok(LoadedPath::File(files)) => {
                let entry = files.into_entry((&**base, skip), order.cache_control, now, wall)?;
                if entry.is_settled() {
                    self.cache.borrow_mut().put(base.id(), path, entry.clone(), now);
                }
                let chosen = entry.choose(order.headers);
                Ok(FetchedFile::File(entry, chosen))
            }
            Ok(LoadedPath::Directory) => Ok(FetchedFile::Directory),
            Ok(LoadedPath::Missing) => Ok(FetchedFile::Missing),
            Err(error) => {
                // The missing descriptors may be those kept here. The next request finds them
                // free.
                if matches!(&error, LookupError::Refused(refusal) if *refusal == beneath::OUT_OF_DESCRIPTORS)
                {
                    self.cache.borrow_mut().clear();
                }
                Err(error)
            }
        }
    }
}

/// Returns the kind of `rel`, without a check of read permission. Refuses paths that the site
/// does not serve.
fn lookup(look: LookupBase<'_>, rel: RelPath<'_>, files: &FileRoot) -> Result<PathKind, LookupError> {
    refuse_unservable(rel, files)?;
    find(look, rel.as_str())
}

fn find(look: LookupBase<'_>, path: &str) -> Result<PathKind, LookupError> {
    Ok(match beneath::find(look, path.as_bytes())? {
        OpenedPath::File(..) => PathKind::File,
        OpenedPath::Directory(_) => PathKind::Directory,
        OpenedPath::Missing => PathKind::Missing,
    })
}

/// Options of a request for a file.
#[derive(Clone, Copy)]
struct FetchOrder<'a> {
    policy: LinkPolicy,
    cache_control: Option<&'a str>,
    /// The client's fields.
    headers: &'a HeaderMap,
}

enum FetchedFile {
    /// With the index of the chosen variant.
    File(Rc<ServedFile>, Option<usize>),
    Directory,
    Missing,
}

fn respond(head: &RequestHead, found: &Representation) -> Response {
    match conditional::evaluate(&head.headers, found.validators()) {
        PreconditionResult::Send => {}
        PreconditionResult::NotModified => return not_modified(found),
        PreconditionResult::Failed => return Response::new(StatusCode::PRECONDITION_FAILED),
    }
    if head.headers.contains_key(RANGE) && conditional::range_applies(&head.headers, found.validators()) {
        match range::wanted(&head.method, &head.headers, found.content.len()) {
            WantedRanges::Whole => {}
            WantedRanges::Spans(spans) => {
                return range::partial(HeaderMap::clone(&found.headers), &found.content, &spans, random);
            }
            WantedRanges::Nothing => return range::unsatisfiable(found.content.len()),
        }
    }
    Response { headers: ResponseFields::Shared(Rc::clone(&found.headers)), ..Response::new(StatusCode::OK) }
        .with_body(range::whole(&found.content))
}

/// Returns a 304 with those fields of the 200 that update the client's copy (RFC 9110 section
/// 15.4.5).
fn not_modified(found: &Representation) -> Response {
    let mut response = Response::new(StatusCode::NOT_MODIFIED);
    for name in [ETAG, LAST_MODIFIED, CACHE_CONTROL, CONTENT_LOCATION, VARY] {
        if let Some(value) = found.headers.get(&name) {
            response.headers.insert(name, value.clone());
        }
    }
    response
}

/// Redirects `/a` to `/a/`, with the query. The decoded, normal path is encoded again. It begins
/// with exactly one slash and has no backslash, so no browser reads `//evil.example` in it.
fn redirect_to_directory(ctx: &FileContext<'_>) -> Response {
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

fn refuse_unservable(rel: RelPath<'_>, files: &FileRoot) -> Result<(), Refusal> {
    // Hidden files count as missing: the existence of a `.git` is already information.
    if rel.is_hidden() {
        return Err(Refusal::NotFound);
    }
    refuse_denied(rel.as_str(), files)
}

fn refuse_denied(path: &str, files: &FileRoot) -> Result<(), Refusal> {
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

/// Returns a boundary that nobody can put into a file beforehand.
fn random() -> u128 {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).expect("the kernel's random source is seeded before anything listens");
    u128::from_ne_bytes(bytes)
}
