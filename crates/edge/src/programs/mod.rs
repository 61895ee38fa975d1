//! Programs of a site: CGI, one process per request; PHP, workers that serve one request at a time; and the scripts of an
//! application that speaks FastCGI.
//!
//! Not here: which file of a site is a program (`files`, `path`), the processes themselves (`keeper`), waking an application
//! (`instances`), redirects that a program wants followed inside the server (`exchange`, which bounds them).
//!
//! Read in this order: `environment` (what a program is told), `cgi`, `pool` and `php`, or `instance` (how it is run),
//! `responder` (FastCGI over one connection), `response` and `answer` (what becomes of its output), `patience` (how long it
//! may take).

mod after;
mod answer;
mod cgi;
mod environment;
mod instance;
mod patience;
mod php;
mod pool;
mod responder;
pub(crate) mod response;

#[cfg(test)]
pub(crate) mod testing;

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nagaya_cmdb::record::Files;
use nagaya_cmdb::{Site, Tenant};
use nagaya_keeper::client::{ClientError, Keeper};
use nagaya_keeper::fastcgi::{Connection, Opening};
use nagaya_keeper::protocol::Failure as KeeperFailure;

pub use self::after::After;
use self::answer::{Failure, Timed};
use self::environment::Facts;
pub use self::environment::document_root;
pub use self::instance::{Call, Unanswered};
use self::patience::{Alarm, Gauge, Patience};
use self::php::Serving;
pub use self::pool::PhpPools;
use self::pool::{Lease, Place, Worker};
use self::responder::{ErrorLines, Exchange};
use self::response::HeadReader;
use crate::admission::without_ticket;
use crate::forward::ClientView;
use crate::message::{Request, Response, ResponseBody};
use crate::metrics::Metrics;
use crate::options::{Limits, Options};
use crate::pace::{Debt, Ledger};
use crate::receipt;
use crate::refusal::Refusal;
use crate::stay::Stay;

/// First pause before a busy keeper is asked again. Each is twice as long as the one before and the last is shorter than
/// `BUSY_PAUSE_MAX`, half a second in all.
const BUSY_PAUSE: Duration = Duration::from_millis(1);
const BUSY_PAUSE_MAX: Duration = Duration::from_millis(256);

/// PHP workers that one request is given to, one after the other, until one reads it.
const WORKERS_PER_REQUEST_MAX: u32 = 3;

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
    /// Whom the program is told to answer.
    pub client: ClientView,
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
    ledger: Arc<Ledger>,
    limits: RefCell<Limits>,
    after: Rc<After>,
    metrics: Arc<Metrics>,
}

impl Programs {
    pub fn new(
        keeper: Rc<Keeper>,
        pools: Arc<PhpPools>,
        ledger: Arc<Ledger>,
        options: &Options,
        metrics: Arc<Metrics>,
    ) -> Self {
        let limits = RefCell::new(options.limits.clone());
        Self { keeper, pools, ledger, limits, after: Rc::default(), metrics }
    }

    /// Holds from the next request on.
    pub fn set_options(&self, options: &Options) {
        *self.limits.borrow_mut() = options.limits.clone();
    }

    /// What does what is still to be done when responses have ended.
    pub fn after(&self) -> &Rc<After> {
        &self.after
    }

    /// Runs a CGI program once, where its stay says. What it holds is in the response's body and given back with it.
    pub async fn cgi(
        &self,
        site: &Arc<Site>,
        tenant: &Arc<Tenant>,
        script: Script,
        request: Request,
        stay: &Rc<Stay>,
    ) -> Result<Outcome, Refusal> {
        let Request { head, body } = request;
        let files = files_of(site)?;
        let facts = Facts { head: &head, body_len: body.len(), site, tenant, files, script: &script };
        let mut env = Vec::with_capacity(40);
        // The keeper's messages are text; a header that is none is passed on as near as it can be.
        environment::for_cgi(&facts, |name, value| {
            env.push((name.to_owned(), String::from_utf8_lossy(value).into_owned()));
        })?;
        self.after.begin();
        let debt = Debt::of(&self.ledger, &tenant.name, stay);
        let patience = Patience::of(files, &self.limits.borrow());
        let started = self
            .keeper
            .spawn_cgi(&site.name, &script.file, env, stay.confinement())
            .await
            .map_err(|error| not_started(&format!("{} of site {}", script.file, site.name), error))?;
        stay.set_cell(&started.cell);
        let gauge = Gauge::of(&self.keeper, started.guard.id(), (site, tenant), stay.confinement());
        let running = Running::begin(&self.metrics);
        let tree = cgi::Tree::new(started.guard, stay.begin(), Rc::clone(&self.after), running);
        let run = cgi::Run::new(started.stdin, started.stdout, tree, body)
            .map_err(|error| Refusal::BackendUnreachable(format!("{}: its pipes: {error}", script.file)))?;
        let mut run = Timed::new(run, Alarm::new(patience, gauge));
        let refusal = |failure: Failure| failure.refusal(&script.file);
        let (answer, rest) = run.head_by(HeadReader::of_program(&script.file)).await.map_err(refusal)?;
        let outcome = run.outcome(&head.method, answer, rest).await.map_err(refusal)?;
        Ok(finish(outcome, debt, stay).await)
    }

    /// Runs a PHP script in one of the tenant's workers, where its stay says.
    pub async fn php(
        &self,
        site: &Arc<Site>,
        tenant: &Arc<Tenant>,
        script: Script,
        request: Request,
        stay: &Rc<Stay>,
    ) -> Result<Outcome, Refusal> {
        let Request { head, body } = request;
        let files = files_of(site)?;
        let facts = Facts { head: &head, body_len: body.len(), site, tenant, files, script: &script };
        let mut opening = opening(&facts, Connection::Kept)?;
        let mut body = body;
        self.after.begin();
        // Workers have a line of their own, of which nothing is predicted.
        let lease = self.pools.lease(tenant, || self.start_php(site)).await;
        let mut lease = lease.map_err(|refusal| without_ticket(refusal, None, site, &head))?;
        let mut workers = 1;
        if self.enter(&mut lease, site, stay).await.is_err() {
            // It may have died, or have been another keeper's, which is no fault of the request.
            self.replace(&mut lease, site, stay, &mut workers).await?;
        }
        let debt = Debt::of(&self.ledger, &tenant.name, stay);
        let patience = Patience::of(files, &self.limits.borrow());
        let mut errors = ErrorLines::new("PHP", site.name.clone(), head.id);
        let mut due = stay.begin();
        let refusal = |failure: Failure| failure.refusal(&script.file);
        let (exchange, answer, rest) = loop {
            let gauge = Gauge::of(&self.keeper, lease.worker().id, (site, tenant), stay.confinement());
            let serving = Serving::new(lease, due, Rc::clone(&self.keeper), Rc::clone(&self.after));
            let exchange = Exchange::new(serving, opening, body, errors);
            let mut exchange = Timed::new(exchange, Alarm::new(patience, gauge));
            match exchange.head().await {
                Ok((answer, rest)) => break (exchange, answer, rest),
                Err(Failure::Unread) if workers < WORKERS_PER_REQUEST_MAX => {
                    // A worker ended before it read the request: nobody has acted on that, whatever its method.
                    let retry = exchange.into_output().and_then(Exchange::into_retry);
                    let retry = retry.ok_or_else(|| refusal(Failure::Unread))?;
                    (opening, body, errors) = (retry.opening, retry.body, retry.errors);
                    (lease, due) = retry.link.into_lease();
                    self.replace(&mut lease, site, stay, &mut workers).await?;
                }
                Err(failure) => return Err(refusal(failure)),
            }
        };
        let outcome = exchange.outcome(&head.method, answer, rest).await.map_err(refusal)?;
        Ok(finish(outcome, debt, stay).await)
    }

    /// Has a fresh worker in the place of one that is of no use any more. `workers` counts all that the request has had.
    async fn replace(
        &self,
        lease: &mut Lease,
        site: &Site,
        stay: &Stay,
        workers: &mut u32,
    ) -> Result<(), Refusal> {
        while *workers < WORKERS_PER_REQUEST_MAX {
            *workers += 1;
            lease.renew(|| self.start_php(site)).await?;
            match self.enter(lease, site, stay).await {
                Ok(()) => return Ok(()),
                // The keeper does not know it any more: this one has ended, too.
                Err(ClientError::Refused { failure: KeeperFailure::NotFound, .. }) => {}
                Err(error) => {
                    return Err(not_started(&format!("a PHP worker for site {}", site.name), error));
                }
            }
        }
        let what = format!("PHP workers for site {} end as soon as they are started", site.name);
        Err(Refusal::BackendUnreachable(what))
    }

    /// Moves the worker to where the request is to run, unless it is there already.
    async fn enter(&self, lease: &mut Lease, site: &Site, stay: &Stay) -> Result<(), ClientError> {
        let worker = lease.worker();
        let confinement = stay.confinement();
        // The keeper counts from here how much a request used that may be slowed down for it.
        let is_watched = !confinement.demotions.is_empty() || !site.demotions.is_empty();
        if let Some(place) = &worker.place
            && !is_watched
            && place.suits(&site.name, confinement)
        {
            stay.set_cell(&place.cell);
            return Ok(());
        }
        // If this is given up, or fails, nobody knows where the worker is.
        worker.place = None;
        let cell = self.keeper.enter(worker.id, &site.name, confinement).await?;
        stay.set_cell(&cell);
        let place = Place { site: site.name.clone(), confinement: Arc::clone(confinement), cell };
        worker.place = Some(Box::new(place));
        Ok(())
    }

    async fn start_php(&self, site: &Site) -> Result<Worker, Refusal> {
        let mut pause = BUSY_PAUSE;
        let started = loop {
            match self.keeper.spawn_php(&site.name).await {
                // The keeper counts a worker until nothing of it is left, which is a little longer than it is used.
                Err(ClientError::Refused { failure: KeeperFailure::Busy, .. }) if pause < BUSY_PAUSE_MAX => {
                    tokio::time::sleep(pause).await;
                    pause *= 2;
                }
                result => {
                    let what = || format!("a PHP worker for site {}", site.name);
                    break result.map_err(|error| not_started(&what(), error))?;
                }
            }
        };
        Worker::new(started.socket, started.guard.id(), started.guard)
            .map_err(|error| Refusal::BackendUnreachable(format!("the connection to a PHP worker: {error}")))
    }
}

/// The same as `finish_answer` of what a program said; a redirect has no client to hold up, but pays what it owes.
pub async fn finish(outcome: Outcome, debt: Option<Debt>, stay: &Stay) -> Outcome {
    match outcome {
        Outcome::Response(response) => Outcome::Response(finish_answer(response, debt, stay).await),
        redirect @ Outcome::LocalRedirect { .. } => {
            if let Some(debt) = debt {
                debt.settle().await;
            }
            redirect
        }
    }
}

/// What is left to do with an answer before it goes: its end waits for what the program owes to CPU quotas, and all of
/// it for the figures, if the client is told them and that does not take long.
pub async fn finish_answer(mut response: Response, debt: Option<Debt>, stay: &Stay) -> Response {
    // What goes both ways ends when either side wants it to.
    if matches!(response.body, ResponseBody::Tunnel(_)) {
        return response;
    }
    if let Some(debt) = debt {
        response = debt.hold(response).await;
    }
    // What a program calls a receipt is not the node's.
    response.headers.remove(&receipt::RECEIPT);
    if stay.is_disclosed() {
        response.body = receipt::gather(response.body).await;
        if response.body.len().is_some() && !matches!(response.body, ResponseBody::Stream(_)) {
            stay.paid().await;
        }
    }
    response
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

fn opening(facts: &Facts<'_>, connection: Connection) -> Result<Vec<u8>, Refusal> {
    let mut opening = Opening::new(connection);
    let mut fits = true;
    environment::for_fastcgi(facts, |name, value| {
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
        // The last two are of instances.
        KeeperFailure::Broken | KeeperFailure::Fenced | KeeperFailure::Elsewhere => {
            Refusal::BackendUnreachable(format!("{what}: {error}"))
        }
    };
    tracing::warn!("{what} is not started: {error}");
    refusal
}
