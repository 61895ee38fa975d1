//! Programs of a site: CGI, one process per request, and PHP, workers that serve one request at a time.
//!
//! Not here: which file of a site is a program (`files`, `path`), the processes themselves (`keeper`), redirects that a program
//! wants followed inside the server (`request`, which bounds them).
//!
//! Read in this order: `environment` (what a program is told), `cgi` or `pool` and `php` (how it is run),
//! `response` and `answer` (what becomes of its output).

mod answer;
mod cgi;
mod environment;
mod fastcgi;
mod php;
mod pool;
mod response;
mod spool;

#[cfg(test)]
mod testing;

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nagaya_cmdb::record::Files;
use nagaya_cmdb::{Site, Tenant};
use nagaya_keeper::client::{ClientError, Keeper};
use nagaya_keeper::protocol::Failure as KeeperFailure;

use self::answer::{Failure, Patience, Timed};
use self::environment::Facts;
use self::fastcgi::Opening;
use self::php::{ErrorLines, Exchange, Retry};
pub use self::environment::document_root;
pub use self::pool::PhpPools;
use self::pool::Worker;
use self::spool::Spool;
use crate::message::{Request, Response};
use crate::metrics::Metrics;
use crate::options::{Limits, Options};
use crate::refusal::Refusal;

/// First pause before a busy keeper is asked again. Each is twice as long as the one before and the last is shorter than
/// `BUSY_PAUSE_MAX`, half a second in all.
const BUSY_PAUSE: Duration = Duration::from_millis(1);
const BUSY_PAUSE_MAX: Duration = Duration::from_millis(256);

/// A program that was found for a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Script {
    /// Path of the file beneath the document root, e.g. `wiki/doku.php`.
    pub file: String,
    /// Decoded path of the program in the URL, with the site's own path, e.g. `/wiki/doku.php`.
    pub name: String,
    /// The decoded rest of the request's path, e.g. `/start`, or nothing.
    pub path_info: String,
    /// What rules set, or with `None` take away, each name once. It comes before everything else of the same name.
    pub variables: Vec<Variable>,
}

pub type Variable = (Box<str>, Option<Box<str>>);

/// What came of running a program.
pub enum Outcome {
    Response(Response),
    /// Answer the request as if it had asked for this (RFC 3875 section 6.2.2): a `GET` without a body.
    LocalRedirect {
        /// Begins with one slash; as a client would have sent it.
        path: String,
        query: Option<String>,
    },
}

/// What one edge thread needs to run programs.
pub struct Programs {
    keeper: Rc<Keeper>,
    pools: Arc<PhpPools>,
    limits: RefCell<Limits>,
    spool: Spool,
    metrics: Arc<Metrics>,
}

impl Programs {
    pub fn new(keeper: Rc<Keeper>, pools: Arc<PhpPools>, options: &Options, metrics: Arc<Metrics>) -> Self {
        let limits = RefCell::new(options.limits.clone());
        Self { keeper, pools, limits, spool: Spool::default(), metrics }
    }

    /// Holds from the next request on.
    pub fn set_options(&self, options: &Options) {
        *self.limits.borrow_mut() = options.limits.clone();
    }

    /// Runs a CGI program once. What it holds is in the response's body and given back with it.
    pub async fn cgi(
        &self,
        site: &Arc<Site>,
        tenant: &Arc<Tenant>,
        script: Script,
        request: Request,
    ) -> Result<Outcome, Refusal> {
        let Request { head, body } = request;
        let files = files_of(site)?;
        let facts = Facts { head: &head, body_len: body.len(), site, tenant, files, script: &script };
        let mut env = Vec::with_capacity(40);
        // The keeper's messages are text; a header that is none is passed on as near as it can be.
        environment::for_cgi(&facts, |name, value| {
            env.push((name.to_owned(), String::from_utf8_lossy(value).into_owned()));
        })?;
        let patience = Patience::of(files, &self.limits.borrow());
        let started = self
            .keeper
            .spawn_cgi(&site.name, &script.file, env)
            .await
            .map_err(|error| not_started(&format!("{} of site {}", script.file, site.name), error))?;
        let running = Running::begin(&self.metrics);
        let run = cgi::Run::new(started.stdin, started.stdout, (started.guard, running), body)
            .map_err(|error| Refusal::BackendUnreachable(format!("{}: its pipes: {error}", script.file)))?;
        let mut run = Timed::new(run, patience);
        let refusal = |failure: Failure| failure.refusal(&script.file);
        let (answer, rest) = run.head().await.map_err(refusal)?;
        run.outcome(&head.method, answer, rest).await.map_err(refusal)
    }

    /// Runs a PHP script in one of the tenant's workers.
    pub async fn php(
        &self,
        site: &Arc<Site>,
        tenant: &Arc<Tenant>,
        script: Script,
        request: Request,
    ) -> Result<Outcome, Refusal> {
        let Request { head, body } = request;
        let files = files_of(site)?;
        let body = self.spool.take_in(body).await?;
        let facts = Facts { head: &head, body_len: body.len(), site, tenant, files, script: &script };
        let opening = opening(&facts)?;
        let lease = self.pools.lease(tenant, || self.start_php(tenant)).await?;
        let patience = Patience::of(files, &self.limits.borrow());
        let errors = ErrorLines::new(site.name.clone(), head.id);
        let mut exchange = Timed::new(Exchange::new(lease, opening, body, errors), patience);
        let refusal = |failure: Failure| failure.refusal(&script.file);
        let (answer, rest) = match exchange.head().await {
            Ok(complete) => complete,
            Err(Failure::Unread) => {
                // An idle worker died just now. A fresh one is asked, once: if that does not read either, the
                // fault is not the old one's.
                let Some(retry) = exchange.into_output().and_then(Exchange::into_retry) else {
                    return Err(refusal(Failure::Unread));
                };
                let Retry { mut lease, opening, body, errors } = retry;
                lease.renew(|| self.start_php(tenant)).await?;
                exchange = Timed::new(Exchange::new(lease, opening, body, errors), patience);
                exchange.head().await.map_err(refusal)?
            }
            Err(failure) => return Err(refusal(failure)),
        };
        exchange.outcome(&head.method, answer, rest).await.map_err(refusal)
    }

    async fn start_php(&self, tenant: &Tenant) -> Result<Worker, Refusal> {
        let mut pause = BUSY_PAUSE;
        let started = loop {
            match self.keeper.spawn_php(&tenant.name).await {
                // The keeper counts a worker until nothing of it is left, which is a little longer than it is used.
                Err(ClientError::Refused { failure: KeeperFailure::Busy, .. }) if pause < BUSY_PAUSE_MAX => {
                    tokio::time::sleep(pause).await;
                    pause *= 2;
                }
                result => {
                    let what = || format!("a PHP worker of tenant {}", tenant.name);
                    break result.map_err(|error| not_started(&what(), error))?;
                }
            }
        };
        Worker::new(started.socket, started.guard)
            .map_err(|error| Refusal::BackendUnreachable(format!("the connection to a PHP worker: {error}")))
    }
}

/// Counts a CGI program for as long as it runs.
struct Running(Arc<Metrics>);

impl Running {
    fn begin(metrics: &Arc<Metrics>) -> Self {
        metrics.cgi_spawned.add(1);
        metrics.cgi_running.add(1);
        Self(Arc::clone(metrics))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.cgi_running.add(-1);
    }
}

fn files_of(site: &Site) -> Result<&Files, Refusal> {
    site.backend
        .files()
        .ok_or_else(|| Refusal::SiteBroken(format!("site {} has no document root", site.name)))
}

fn opening(facts: &Facts<'_>) -> Result<Vec<u8>, Refusal> {
    let mut opening = Opening::new();
    let mut fits = true;
    environment::for_php(facts, |name, value| {
        fits = fits && opening.put(name.as_bytes(), value).is_ok();
    })?;
    if fits { Ok(opening.finish()) } else { Err(Refusal::HeadTooLarge) }
}

/// What the client sees of it is little; the operator finds the reason in the log.
fn not_started(what: &str, error: ClientError) -> Refusal {
    let ClientError::Refused { failure, .. } = &error else {
        return Refusal::BackendUnreachable(format!("{what}: {error}"));
    };
    let refusal = match failure {
        KeeperFailure::NotFound => return Refusal::NotFound,
        KeeperFailure::Forbidden => Refusal::Forbidden("the program may not be run"),
        KeeperFailure::Busy => Refusal::Overloaded("too many programs run"),
        KeeperFailure::Invalid => Refusal::SiteBroken(format!("{what}: {error}")),
        KeeperFailure::Broken => Refusal::BackendUnreachable(format!("{what}: {error}")),
    };
    tracing::warn!("{what} is not started: {error}");
    refusal
}
