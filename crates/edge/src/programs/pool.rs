//! PHP workers: who has one, who waits for one, and which ones wait for work.
//!
//! One pool per tenant, shared by all edge threads. A tenant's requests get workers in the order they came; the number of
//! its workers, of its waiting requests and their time are bounded. An idle worker stays registered with the reactor of
//! the thread that used it last, and that thread takes it again if it can: then no system call is needed to take it, and
//! a worker that died meanwhile is already known to be dead.
//!
//! Not here: what is said to a worker (`php`), its process (`keeper`).

mod handover;

use std::collections::HashMap;
use std::future::{Future, pending};
use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use bytes::BytesMut;
use nagaya_cmdb::cell::{Confinement, Usage};
use nagaya_cmdb::record::ProgramNetwork;
use nagaya_cmdb::{SiteName, Tenant, TenantName};
use nagaya_keeper::client::ProcessGuard;
use nagaya_keeper::protocol::ProcessId;
use parking_lot::{Mutex, RwLock};
use tokio::net::UnixStream;
use tokio::runtime::{self, Handle};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, TryAcquireError};

use crate::metrics::Metrics;
use crate::options::Options;
use crate::refusal::Refusal;

/// Workers of all tenants together. At about 10 MiB of private memory each, 20 GiB: a node that is asked for more is told
/// so by requests that are refused, not by the kernel's out-of-memory killer.
const WORKERS_MAX: u32 = 2048;

/// Pools kept at once. Only tenants with a worker or a request in progress need one.
const POOLS_MAX: usize = 16 * 1024;

/// Longest and shortest time between two looks at idle workers.
const SWEEP_MAX: Duration = Duration::from_secs(5);
const SWEEP_MIN: Duration = Duration::from_millis(20);

/// One PHP process, able to serve one request at a time. Dropping it ends the process.
pub(super) struct Worker {
    /// What the keeper calls it, over the connection of any thread.
    pub id: ProcessId,
    /// Where it is; `None` until it serves its first request.
    pub place: Option<Box<Place>>,
    pub stream: UnixStream,
    /// Room for what it sends; kept for the next request.
    pub buffer: BytesMut,
    /// The runtime whose reactor watches the stream: that of one edge thread.
    runtime: runtime::Id,
    served: u32,
    idle_since: Instant,
    process: Box<dyn Process>,
}

/// The process of a worker, which ends when this is dropped.
pub(super) trait Process: Send + 'static {
    /// Ends it and says what it used since it last entered or left its cell, if the keeper says so.
    fn end(self: Box<Self>) -> Pin<Box<dyn Future<Output = Option<Usage>>>>;
}

impl Process for ProcessGuard {
    fn end(self: Box<Self>) -> Pin<Box<dyn Future<Output = Option<Usage>>>> {
        Box::pin(async move { (*self).end().await.ok().map(|(_, usage)| usage) })
    }
}

/// The cell a worker stays in from one request to the next, as long as they run under the same conditions.
#[derive(Debug)]
pub(super) struct Place {
    pub site: SiteName,
    pub confinement: Arc<Confinement>,
    /// As `nagaya cells` shows it.
    pub cell: Box<str>,
}

impl Place {
    /// A request of this site that is so confined may run here.
    pub fn suits(&self, site: &SiteName, confinement: &Confinement) -> bool {
        self.site == *site && *self.confinement == *confinement
    }
}

impl Worker {
    /// `socket` is the FastCGI connection to a process that ends when `process` is dropped.
    pub fn new(socket: OwnedFd, id: ProcessId, process: impl Process) -> io::Result<Self> {
        let stream = std::os::unix::net::UnixStream::from(socket);
        stream.set_nonblocking(true)?;
        Ok(Self {
            id,
            place: None,
            stream: UnixStream::from_std(stream)?,
            buffer: BytesMut::new(),
            runtime: Handle::current().id(),
            served: 0,
            idle_since: Instant::now(),
            process: Box::new(process),
        })
    }

    /// True as long as nothing is known to have happened on an idle connection: neither its end nor a byte that
    /// nobody asked for. Costs a system call only if something did happen.
    fn is_quiet(&self) -> bool {
        matches!(self.stream.try_read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }

    /// Has this thread's reactor watch the stream.
    fn moved_here(mut self) -> io::Result<Self> {
        let here = Handle::current().id();
        if self.runtime != here {
            self.stream = UnixStream::from_std(self.stream.into_std()?)?;
            self.runtime = here;
        }
        Ok(self)
    }
}

/// The PHP workers of this node.
pub struct PhpPools {
    pools: Mutex<HashMap<TenantName, Arc<Pool>>>,
    workers: AtomicU32,
    settings: RwLock<Settings>,
    metrics: Arc<Metrics>,
}

#[derive(Debug, Clone, Copy)]
struct Settings {
    workers: u32,
    requests: u32,
    idle: Duration,
    waiting: u32,
    wait: Duration,
}

/// One tenant's workers.
struct Pool {
    /// As many permits as workers may be busy. A worker is started only by a holder of a permit who finds none
    /// idle, so busy and idle ones together are never more than that either.
    turns: Arc<Semaphore>,
    waiting: AtomicU32,
    state: Mutex<State>,
}

struct State {
    /// In the order they became idle.
    idle: Vec<Worker>,
    /// Workers the tenant may have.
    max: u32,
    /// Permits to be destroyed when they come back, because the tenant may now have fewer workers.
    surplus: u32,
    /// What a worker's process was started with; one started with something else is not used again.
    account: Account,
}

/// What makes a tenant's processes its own, and what they reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Account {
    uid: u32,
    gid: u32,
    network: Option<ProgramNetwork>,
}

impl From<&Tenant> for Account {
    fn from(tenant: &Tenant) -> Self {
        Self { uid: tenant.uid, gid: tenant.gid, network: tenant.network }
    }
}

impl From<&Options> for Settings {
    fn from(options: &Options) -> Self {
        Self {
            workers: options.php_workers,
            requests: options.php_requests.max(1),
            idle: Duration::from_millis(options.php_idle_ms),
            waiting: options.max_waiting,
            wait: Duration::from_millis(options.wait_ms),
        }
    }
}

impl PhpPools {
    pub fn new(options: &Options, metrics: Arc<Metrics>) -> Arc<Self> {
        Arc::new(Self {
            pools: Mutex::default(),
            workers: AtomicU32::new(0),
            settings: RwLock::new(options.into()),
            metrics,
        })
    }

    /// Holds from the next request on.
    pub fn set_options(&self, options: &Options) {
        *self.settings.write() = options.into();
    }

    fn settings(&self) -> Settings {
        *self.settings.read()
    }

    /// Ends workers that were idle for too long, for as long as it is polled. One task of the process runs it.
    pub async fn tend(self: Arc<Self>) {
        loop {
            tokio::time::sleep((self.settings().idle / 4).clamp(SWEEP_MIN, SWEEP_MAX)).await;
            self.sweep(Instant::now());
        }
    }

    /// Ends the workers of a tenant that exists no more; those still at work end with their request.
    pub fn forget(&self, tenant: &TenantName) {
        let pool = self.pools.lock().remove(tenant);
        if let Some(pool) = pool {
            pool.turns.close();
            let idle = std::mem::take(&mut pool.state.lock().idle);
            self.end(idle);
        }
    }

    /// Workers that exist now, busy or idle.
    pub fn workers(&self) -> u32 {
        self.workers.load(Ordering::Relaxed)
    }

    /// A worker of this tenant: an idle one, or one made by `start`. Waits for its turn if all are busy.
    pub(super) async fn lease<S, F>(self: &Arc<Self>, tenant: &Tenant, start: S) -> Result<Lease, Refusal>
    where
        S: FnOnce() -> F,
        F: Future<Output = Result<Worker, Refusal>>,
    {
        let account = Account::from(tenant);
        let pool = self.pool(tenant)?;
        let turn = match self.turn(&pool).await? {
            Turn::Mine(turn) => turn,
            Turn::With(lease) if lease.account == account => return Ok(lease),
            Turn::With(mut lease) => {
                lease.renew(start).await?;
                lease.account = account;
                return Ok(lease);
            }
        };
        let mut lease = Lease {
            worker: None,
            turn: Some(turn),
            account,
            turn_since: Instant::now(),
            pool,
            pools: self.clone(),
        };
        match lease.pool.take_idle(self) {
            Some(worker) => lease.worker = Some(worker),
            None => lease.start(start).await?,
        }
        Ok(lease)
    }

    fn pool(&self, tenant: &Tenant) -> Result<Arc<Pool>, Refusal> {
        let max = tenant.php_workers.unwrap_or(self.settings().workers).max(1);
        let account = Account::from(tenant);
        let mut pools = self.pools.lock();
        if let Some(pool) = pools.get(&tenant.name) {
            let pool = pool.clone();
            drop(pools);
            self.end(pool.adapt(max, account));
            return Ok(pool);
        }
        if pools.len() >= POOLS_MAX {
            pools.retain(|_, pool| pool.is_needed());
            if pools.len() >= POOLS_MAX {
                return Err(Refusal::Overloaded("too many tenants use PHP at once"));
            }
        }
        let pool = Arc::new(Pool::new(max, account));
        pools.insert(tenant.name.clone(), pool.clone());
        Ok(pool)
    }

    /// Waits until a worker may be used, as long and with as many others as the settings allow.
    async fn turn(&self, pool: &Arc<Pool>) -> Result<Turn, Refusal> {
        let removed = Refusal::Overloaded("the tenant was just removed");
        match pool.turns.clone().try_acquire_owned() {
            Ok(turn) => return Ok(Turn::Mine(turn)),
            Err(TryAcquireError::NoPermits) => {}
            Err(TryAcquireError::Closed) => return Err(removed),
        }
        let Settings { waiting, wait, .. } = self.settings();
        let retry_after_seconds = u32::try_from(wait.as_secs()).unwrap_or(u32::MAX).max(1);
        let full = Refusal::QueueFull { retry_after_seconds, notice: None };
        let _spot = Spot::take(&pool.waiting, waiting).ok_or(full)?;
        let given = handover::line_up(pool);
        let given = async {
            match given.await {
                Ok(lease) => lease,
                Err(_) => pending().await,
            }
        };
        let next = async {
            tokio::select! {
                biased;
                lease = given => Ok(Turn::With(lease)),
                turn = pool.turns.clone().acquire_owned() => turn.map(Turn::Mine).map_err(|_| removed),
            }
        };
        let too_long = Refusal::QueueTimeout { retry_after_seconds, notice: None };
        tokio::time::timeout(wait, next).await.unwrap_or(Err(too_long))
    }

    /// Makes room for one more worker, if need be by ending the one of any tenant that was idle longest.
    fn count_one(&self) -> Result<(), Refusal> {
        let add = |workers| (workers < WORKERS_MAX).then_some(workers + 1);
        if self.workers.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok() {
            self.metrics.php_workers.add(1);
            return Ok(());
        }
        let oldest = {
            let pools = self.pools.lock();
            let since = |pool: &&Arc<Pool>| pool.state.lock().idle.first().map(|worker| worker.idle_since);
            let pool = pools.values().filter(|pool| since(pool).is_some()).min_by_key(since);
            pool.and_then(|pool| {
                let idle = &mut pool.state.lock().idle;
                (!idle.is_empty()).then(|| idle.remove(0))
            })
        };
        // The new worker takes over the place of the old one in the count.
        drop(oldest.ok_or(Refusal::Overloaded("too many PHP workers are busy"))?);
        Ok(())
    }

    /// Each end talks to the keeper: never under a lock.
    fn end(&self, workers: impl IntoIterator<Item = Worker>) {
        for worker in workers {
            drop(worker);
            self.uncount_one();
        }
    }

    fn uncount_one(&self) {
        self.workers.fetch_sub(1, Ordering::Relaxed);
        self.metrics.php_workers.add(-1);
    }

    /// Ends workers idle since before the limit, and forgets pools that nobody needs.
    fn sweep(&self, now: Instant) {
        let mut ended = Vec::new();
        let idle = self.settings().idle;
        self.pools.lock().retain(|_, pool| {
            let mut state = pool.state.lock();
            let old = |worker: &Worker| now.duration_since(worker.idle_since) >= idle;
            ended.extend(state.idle.extract_if(.., |worker| old(worker) || !worker.is_quiet()));
            drop(state);
            pool.is_needed()
        });
        self.end(ended);
    }
}

/// What waiting brought.
enum Turn {
    Mine(OwnedSemaphorePermit),
    /// A turn and a worker, from the request before.
    With(Lease),
}

/// One place among those who wait.
struct Spot<'a>(&'a AtomicU32);

impl<'a> Spot<'a> {
    fn take(waiting: &'a AtomicU32, max: u32) -> Option<Self> {
        let add = |waiting| (waiting < max).then_some(waiting + 1);
        waiting.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).ok().map(|_| Self(waiting))
    }
}

impl Drop for Spot<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Pool {
    fn new(max: u32, account: Account) -> Self {
        Self {
            turns: Arc::new(Semaphore::new(max as usize)),
            waiting: AtomicU32::new(0),
            state: Mutex::new(State { idle: Vec::new(), max, surplus: 0, account }),
        }
    }

    /// True if it has a worker, or a request has it in hand. Called with the map locked, so that nobody takes it
    /// meanwhile.
    fn is_needed(self: &Arc<Self>) -> bool {
        Arc::strong_count(self) > 1 || !self.state.lock().idle.is_empty()
    }

    /// Follows a changed record of the tenant. The workers to end.
    fn adapt(&self, max: u32, account: Account) -> Vec<Worker> {
        let mut state = self.state.lock();
        if max > state.max {
            let more = max - state.max;
            let kept = more.min(state.surplus);
            state.surplus -= kept;
            self.turns.add_permits((more - kept) as usize);
        } else if max < state.max {
            let fewer = state.max - max;
            let gone = u32::try_from(self.turns.forget_permits(fewer as usize)).expect("at most `fewer`");
            state.surplus += fewer - gone;
        }
        let lower = max < state.max;
        state.max = max;
        if account != state.account {
            state.account = account;
            return std::mem::take(&mut state.idle);
        }
        // How many may be idle beside the busy ones is not known here; ending all is rare and safe.
        if lower { std::mem::take(&mut state.idle) } else { Vec::new() }
    }

    /// The best idle worker that still lives.
    fn take_idle(&self, pools: &PhpPools) -> Option<Worker> {
        let here = Handle::current().id();
        loop {
            let worker = {
                let idle = &mut self.state.lock().idle;
                let at = idle.iter().rposition(|worker| worker.runtime == here);
                at.or(idle.len().checked_sub(1)).map(|at| idle.remove(at))?
            };
            if worker.is_quiet() {
                match worker.moved_here() {
                    Ok(worker) => return Some(worker),
                    Err(error) => tracing::debug!("a PHP worker cannot be moved to another thread: {error}"),
                }
            }
            pools.uncount_one();
        }
    }
}

/// A worker in use. Dropped, it ends the worker, because nobody knows what the connection still carries.
pub(super) struct Lease {
    worker: Option<Worker>,
    turn: Option<OwnedSemaphorePermit>,
    account: Account,
    /// When it was got in the line of all; since then it may have gone from request to request on one thread.
    turn_since: Instant,
    pool: Arc<Pool>,
    pools: Arc<PhpPools>,
}

impl Lease {
    pub fn worker(&mut self) -> &mut Worker {
        self.worker.as_mut().expect("a lease has a worker until it is given back")
    }

    /// Ends the worker and starts another one in its place.
    pub async fn renew<S, F>(&mut self, start: S) -> Result<(), Refusal>
    where
        S: FnOnce() -> F,
        F: Future<Output = Result<Worker, Refusal>>,
    {
        self.end_worker();
        self.start(start).await
    }

    async fn start<S, F>(&mut self, start: S) -> Result<(), Refusal>
    where
        S: FnOnce() -> F,
        F: Future<Output = Result<Worker, Refusal>>,
    {
        self.pools.count_one()?;
        let counted = Counted(&self.pools);
        let worker = start().await?;
        std::mem::forget(counted);
        self.worker = Some(worker);
        self.pools.metrics.php_spawned.add(1);
        Ok(())
    }

    /// The request is done and the connection is clean: the worker may serve another one.
    pub fn give_back(mut self) {
        let Some(mut worker) = self.worker.take() else { return };
        worker.served += 1;
        let used_up = worker.served >= self.pools.settings().requests;
        self.worker = Some(worker);
        if used_up || !self.may_go_on() {
            return;
        }
        if let Some(mut lease) = handover::pass_on(self)
            && let Some(mut worker) = lease.worker.take()
        {
            worker.idle_since = Instant::now();
            lease.pool.state.lock().idle.push(worker);
        }
    }

    /// Takes the worker's process out, to end it; the next request has its turn.
    pub fn into_process(mut self) -> Option<Box<dyn Process>> {
        let worker = self.worker.take()?;
        self.pools.uncount_one();
        Some(worker.process)
    }

    /// The tenant is as it was when the worker was started.
    fn may_go_on(&self) -> bool {
        let state = self.pool.state.lock();
        state.account == self.account && state.surplus == 0 && !self.pool.turns.is_closed()
    }

    fn end_worker(&mut self) {
        self.pools.end(self.worker.take());
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.end_worker();
        // Only now may the next request have its turn: it finds the worker that was given back, or room for one.
        let turn = self.turn.take();
        let mut state = self.pool.state.lock();
        if state.surplus > 0
            && let Some(turn) = turn
        {
            state.surplus -= 1;
            turn.forget();
        }
    }
}

/// Takes back the count of a worker that did not start.
struct Counted<'a>(&'a PhpPools);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.uncount_one();
    }
}

#[cfg(test)]
mod tests;
