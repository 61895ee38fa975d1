//! Runs the programs of a site. There are three kinds:
//!
//! - CGI: one process per request
//! - PHP: workers that serve one request at a time
//! - scripts of an application that speaks FastCGI
//!
//! Not here: which file of a site is a program (`files`, `path`), the processes themselves
//! (`keeper`), waking an application (`instances`). Nor redirects inside the server (`exchange`,
//! which limits them).
//!
//! In reading order:
//!
//! - `environment`: the variables of a program
//! - `cgi`, `pool` and `php`, or `instance`: how it is run
//! - `responder`: FastCGI over one connection
//! - `response` and `answer`: the use of its output
//! - `patience`: its time limits

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nagaya_keeper_api::client::{KeeperCallError, KeeperClient};
use nagaya_keeper_api::fastcgi::ConnectionReuse;
use nagaya_keeper_api::protocol::FailureKind as KeeperFailure;
use nagaya_records::{Site, Tenant};

use crate::backends::programs::after::BackgroundJobs;
use crate::backends::programs::answer::{ProgramFailure, TimedOutput};
use crate::backends::programs::environment::{EnvironmentFacts, opening};
use crate::backends::programs::patience::{ProgramAlarm, ProgramTimeouts, UsageGauge};
use crate::backends::programs::php::ServingWorker;
use crate::backends::programs::pool::paths::ScriptPlace;
use crate::backends::programs::pool::{PhpPools, PoolWorker, WorkerCell, WorkerGuard};
use crate::backends::programs::responder::{ErrorLines, FastCgiExchange};
use crate::backends::programs::response::HeadReader;
use crate::backends::programs::script::{
    CgiRunningGuard, ProgramOutcome, ProgramScript, ScriptHooks, files_of,
};
use crate::http::message::{RequestBody, RequestHead, Response, ResponseBody};
use crate::http::receipt_field;
use crate::http::refusal::Refusal;
use crate::metrics::EdgeMetrics;
use crate::options::{EdgeConfig, EdgeLimits};
use crate::record::execution::CellExecution;
use crate::record::receipt::disclose;
use crate::shaping::quota_debt::QuotaDebt;
use crate::shaping::shared_buckets::SharedBuckets;

pub mod after;
pub mod answer;
pub mod cgi;
pub mod environment;
pub mod instance;
pub mod patience;
pub mod php;
pub mod pool;
pub mod responder;
pub(crate) mod response;
pub mod script;

#[cfg(test)]
pub(crate) mod testing;

/// First and longest pause before a busy keeper is asked again. Each is twice as long as the one
/// before. A long one would let requests that came later take each free place.
const BUSY_PAUSE: Duration = Duration::from_millis(1);
const BUSY_PAUSE_MAX: Duration = Duration::from_millis(16);

/// Time in which a busy keeper is asked again.
const BUSY_MAX: Duration = Duration::from_secs(2);

/// Maximum number of PHP workers that get one request, one after the other, until one reads it.
const WORKERS_PER_REQUEST_MAX: u32 = 3;

/// Resources of one edge thread for running programs.
pub struct ProgramRunner {
    keeper: Rc<KeeperClient>,
    pools: Arc<PhpPools>,
    ledger: Arc<SharedBuckets>,
    limits: RefCell<EdgeLimits>,
    after: Rc<BackgroundJobs>,
    metrics: Arc<EdgeMetrics>,
}

impl ProgramRunner {
    pub fn new(
        keeper: Rc<KeeperClient>,
        pools: Arc<PhpPools>,
        ledger: Arc<SharedBuckets>,
        options: &EdgeConfig,
        metrics: Arc<EdgeMetrics>,
    ) -> Self {
        let limits = RefCell::new(options.limits.clone());
        Self { keeper, pools, ledger, limits, after: Rc::default(), metrics }
    }

    /// Returns the present moment, for a look at a script's path (`ScriptPlace`).
    pub fn path_moment(&self) -> u64 {
        self.pools.path_moment()
    }

    /// Sets the options. They hold from the next request on.
    pub fn set_options(&self, options: &EdgeConfig) {
        *self.limits.borrow_mut() = options.limits.clone();
    }

    /// Returns the runner of work that remains after responses have ended.
    pub fn after(&self) -> &Rc<BackgroundJobs> {
        &self.after
    }

    /// Runs a CGI program once, in the cell of its execution. The response's body holds its
    /// resources and gives them back at its end.
    pub async fn cgi(
        &self,
        site: &Arc<Site>,
        tenant: &Arc<Tenant>,
        script: ProgramScript,
        (head, body): (&RequestHead, RequestBody),
        execution: &Rc<CellExecution>,
    ) -> Result<ProgramOutcome, Refusal> {
        let files = files_of(site)?;
        let facts = EnvironmentFacts { head, body_len: body.len(), site, tenant, files, script: &script };
        let mut env = Vec::with_capacity(40);
        // The keeper's messages are text. A field that is not text is passed on as similar text.
        environment::for_cgi(&facts, |name, value| {
            env.push((name.to_owned(), String::from_utf8_lossy(value).into_owned()));
        })?;
        self.after.begin();
        let debt = QuotaDebt::of(&self.ledger, &tenant.name, execution);
        let patience = ProgramTimeouts::of(files, &self.limits.borrow());
        let whose =
            cgi::ProgramLabel { site: site.name.clone(), script: script.file.clone(), request: head.id };
        let takes_body = !http_body::Body::is_end_stream(&body);
        let shared = (execution, &self.after, &self.metrics);
        let starting =
            cgi::StartingCgi::begin(&self.keeper, site, (whose, env), (patience, takes_body), shared);
        let (started, whose) = (starting.finish().await)
            .map_err(|error| not_started(&format!("{} of site {}", script.file, site.name), error))?;
        execution.set_cell(started.cell.into());
        let gauge = UsageGauge::of(&self.keeper, started.guard.id(), (site, tenant), execution.confinement());
        let running = CgiRunningGuard::begin(&self.metrics);
        let tree =
            cgi::CgiTree::new(whose, started.guard, execution.begin(), Rc::clone(&self.after), running);
        let run = cgi::CgiRun::new(started.stdin, started.stdout, tree, body)
            .map_err(|error| Refusal::BackendUnreachable(format!("{}: its pipes: {error}", script.file)))?;
        let mut run = TimedOutput::new(run, ProgramAlarm::new(patience, gauge));
        let refusal = |failure: ProgramFailure| failure.refusal(&script.file);
        let (answer, rest) = run.head_by(HeadReader::of_program(&script.file)).await.map_err(refusal)?;
        let outcome = run.outcome(&head.method, answer, rest).await.map_err(refusal)?;
        Ok(finish(outcome, debt, execution).await)
    }

    /// Runs a PHP script in one of the tenant's workers, where its execution says.
    pub async fn php(
        &self,
        site: &Arc<Site>,
        (tenant, place): (&Arc<Tenant>, ScriptPlace),
        script: ProgramScript,
        (head, mut body): (&RequestHead, RequestBody),
        (execution, hooks): (&Rc<CellExecution>, &dyn ScriptHooks),
    ) -> Result<ProgramOutcome, Refusal> {
        let files = files_of(site)?;
        let facts = EnvironmentFacts { head, body_len: body.len(), site, tenant, files, script: &script };
        let mut opening = opening(&facts, ConnectionReuse::Kept)?;
        self.after.begin();
        // Workers have a queue of their own, without predictions.
        let lease = self.pools.lease(tenant, |opcache| self.start_php(site, opcache)).await;
        let mut lease = lease.map_err(|refusal| hooks.explain_refusal(refusal, head))?;
        lease.settle(&site.name, place, |opcache| self.start_php(site, opcache)).await?;
        let mut workers = 1;
        if self.enter(&mut lease, site, execution).await.is_err() {
            // The worker may have died, or belong to an earlier keeper. That is no fault of the
            // request.
            self.replace(&mut lease, site, execution, &mut workers).await?;
        }
        let debt = QuotaDebt::of(&self.ledger, &tenant.name, execution);
        let patience = ProgramTimeouts::of(files, &self.limits.borrow());
        let mut errors = ErrorLines::new("PHP", site.name.clone(), head.id);
        let mut due = execution.begin();
        let refusal = |failure: ProgramFailure| failure.refusal(&script.file);
        let (exchange, answer, rest) = loop {
            let gauge =
                UsageGauge::of(&self.keeper, lease.worker().id, (site, tenant), execution.confinement());
            let serving = ServingWorker::new(lease, due, Rc::clone(&self.keeper), Rc::clone(&self.after));
            let exchange = FastCgiExchange::new(serving, opening, body, errors);
            let mut exchange = TimedOutput::new(exchange, ProgramAlarm::new(patience, gauge));
            match exchange.head().await {
                Ok((answer, rest)) => break (exchange, answer, rest),
                Err(ProgramFailure::Unread) if workers < WORKERS_PER_REQUEST_MAX => {
                    // A worker ended before it read the request. So nobody has acted on the
                    // request, whatever its method.
                    let retry = exchange.into_output().and_then(FastCgiExchange::into_retry);
                    let retry = retry.ok_or_else(|| refusal(ProgramFailure::Unread))?;
                    (opening, body, errors) = (retry.opening, retry.body, retry.errors);
                    (lease, due) = retry.link.into_lease();
                    self.replace(&mut lease, site, execution, &mut workers).await?;
                }
                Err(failure) => return Err(refusal(failure)),
            }
        };
        let outcome = exchange.outcome(&head.method, answer, rest).await.map_err(refusal)?;
        Ok(finish(outcome, debt, execution).await)
    }

    /// Replaces a useless worker by a fresh one. `workers` counts all that the request has had.
    async fn replace(
        &self,
        lease: &mut WorkerGuard,
        site: &Site,
        execution: &CellExecution,
        workers: &mut u32,
    ) -> Result<(), Refusal> {
        while *workers < WORKERS_PER_REQUEST_MAX {
            *workers += 1;
            lease.renew(|opcache| self.start_php(site, opcache)).await?;
            match self.enter(lease, site, execution).await {
                Ok(()) => return Ok(()),
                // The keeper does not know it any more: this one has ended, too.
                Err(KeeperCallError::Refused { failure: KeeperFailure::NotFound, .. }) => {}
                Err(error) => {
                    return Err(not_started(&format!("a PHP worker for site {}", site.name), error));
                }
            }
        }
        let what = format!("PHP workers for site {} end as soon as they are started", site.name);
        Err(Refusal::BackendUnreachable(what))
    }

    /// Moves the worker to the cell of the request, unless it is there already.
    async fn enter(
        &self,
        lease: &mut WorkerGuard,
        site: &Site,
        execution: &CellExecution,
    ) -> Result<(), KeeperCallError> {
        let worker = lease.worker();
        let confinement = execution.confinement();
        // From here on the keeper counts the usage for which a request may be slowed down.
        let is_watched = !confinement.demotions.is_empty() || !site.demotions.is_empty();
        if let Some(place) = &worker.place
            && !is_watched
            && place.suits(&site.name, confinement)
        {
            execution.set_cell(Arc::clone(&place.cell));
            return Ok(());
        }
        // If this is cancelled or fails, the worker's cell is not known.
        worker.place = None;
        let cell: Arc<str> = self.keeper.enter(worker.id, &site.name, confinement).await?.into();
        execution.set_cell(Arc::clone(&cell));
        let place = WorkerCell { site: site.name.clone(), confinement: Arc::clone(confinement), cell };
        worker.place = Some(Box::new(place));
        Ok(())
    }

    async fn start_php(&self, site: &Site, opcache: Option<u64>) -> Result<PoolWorker, Refusal> {
        let (begun, mut pause) = (Instant::now(), BUSY_PAUSE);
        let started = loop {
            match self.keeper.spawn_php(&site.name, opcache).await {
                // The keeper counts a worker until nothing of it is left, which is a little
                // longer than its use.
                Err(KeeperCallError::Refused { failure: KeeperFailure::Busy, .. })
                    if begun.elapsed() < BUSY_MAX =>
                {
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(BUSY_PAUSE_MAX);
                }
                result => {
                    let what = || format!("a PHP worker for site {}", site.name);
                    break result.map_err(|error| not_started(&what(), error))?;
                }
            }
        };
        PoolWorker::new(started.socket, started.guard.id(), started.guard)
            .map_err(|error| Refusal::BackendUnreachable(format!("the connection to a PHP worker: {error}")))
    }
}

/// Finishes a program's outcome like `finish_answer`. A redirect has no client to delay, but its
/// debt is settled.
pub async fn finish(
    outcome: ProgramOutcome,
    debt: Option<QuotaDebt>,
    execution: &CellExecution,
) -> ProgramOutcome {
    match outcome {
        ProgramOutcome::Response(response) => {
            ProgramOutcome::Response(finish_answer(response, debt, execution).await)
        }
        redirect @ ProgramOutcome::LocalRedirect { .. } => {
            if let Some(debt) = debt {
                debt.settle().await;
            }
            redirect
        }
    }
}

/// Finishes a response before it is sent. Its end waits for the program's debt to CPU quotas. The
/// whole of it waits briefly for the figures, if the client gets them.
pub async fn finish_answer(
    mut response: Response,
    debt: Option<QuotaDebt>,
    execution: &CellExecution,
) -> Response {
    // An upgraded connection ends when either side wants it to.
    if matches!(response.body, ResponseBody::Tunnel(_)) {
        return response;
    }
    if let Some(debt) = debt {
        response = debt.hold(response).await;
    }
    // A program must not send the node's receipt fields.
    response.headers.remove(&receipt_field::RECEIPT);
    if execution.is_disclosed() {
        response.body = disclose::gather(response.body).await;
        if response.body.len().is_some() && !matches!(response.body, ResponseBody::Stream(_)) {
            execution.wait_all_reported().await;
        }
    }
    response
}

/// Returns the refusal for a program that was not started. The client sees little of the reason;
/// the operator finds it in the log.
fn not_started(what: &str, error: KeeperCallError) -> Refusal {
    let KeeperCallError::Refused { failure, .. } = &error else {
        return Refusal::BackendUnreachable(format!("{what}: {error}"));
    };
    let refusal = match failure {
        KeeperFailure::NotFound => return Refusal::NotFound,
        KeeperFailure::Forbidden => Refusal::Forbidden("the program may not be run"),
        KeeperFailure::Busy => Refusal::Overloaded("too many programs run"),
        KeeperFailure::Invalid => Refusal::SiteBroken(format!("{what}: {error}")),
        // The last two are about instances.
        KeeperFailure::Broken | KeeperFailure::Fenced | KeeperFailure::Elsewhere => {
            Refusal::BackendUnreachable(format!("{what}: {error}"))
        }
    };
    tracing::warn!("{what} is not started: {error}");
    refusal
}
