//! Manages PHP workers: which request has one, which waits for one, and which workers are idle.
//!
//! There is one pool per tenant, shared by all edge threads. A tenant's requests get workers in
//! order of arrival. Limits hold for the number of its workers, the number of its waiting
//! requests and their time. An idle worker stays registered with the reactor of the thread that
//! used it last, and that thread prefers it. Then taking it needs no system call, and a worker
//! that died meanwhile is already known to be dead.
//!
//! Not here: the data sent to a worker (`php`), its process (`keeper`).

pub mod handover;
pub mod paths;

use std::collections::HashMap;
use std::future::{Future, pending};
use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use bytes::BytesMut;
use nagaya_keeper_api::client::ProcessGuard;
use nagaya_keeper_api::protocol::{ProcessExit, ProcessId};
use nagaya_keeper_api::quiet_stream::QuietStream;
use nagaya_records::cell::{Confinement, RequestUsage};
use nagaya_records::record::ProgramNetwork;
use nagaya_records::{SiteName, Tenant, TenantName};
use parking_lot::{Mutex, RwLock};
use tokio::runtime;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, TryAcquireError};

use crate::backends::programs::pool::paths::{KnownPaths, OpcacheCount, ScriptPlace};
use crate::http::refusal::Refusal;
use crate::metrics::EdgeMetrics;
use crate::options::EdgeConfig;

/// Maximum number of workers of all tenants together. At about 10 MiB of private memory each,
/// they use 20 GiB. A node under more load refuses requests before the kernel's out-of-memory
/// killer acts.
const WORKERS_MAX: u32 = 2048;

/// Maximum number of pools. Only tenants with a worker or a running request need one.
const POOLS_MAX: usize = 16 * 1024;

/// Longest and shortest time between two checks of idle workers.
const SWEEP_MAX: Duration = Duration::from_secs(5);
const SWEEP_MIN: Duration = Duration::from_millis(20);

/// One PHP process, able to serve one request at a time. Dropping it ends the process.
pub(super) struct PoolWorker {
    /// Its id in the keeper, valid over the connection of any thread.
    pub id: ProcessId,
    /// Its cell. `None` until it serves its first request.
    pub place: Option<Box<WorkerCell>>,
    pub stream: QuietStream,
    /// Read buffer, kept for the next request.
    pub buffer: BytesMut,
    /// The runtime whose reactor watches the stream: that of one edge thread.
    runtime: runtime::Id,
    served: u32,
    idle_since: Instant,
    /// Number of the opcache that was present when it was started.
    opcache: u64,
    /// It shares that with nobody.
    is_alone: bool,
    process: Box<dyn WorkerProcess>,
}

/// Returns how a process ended and its usage, if that is known.
pub(super) type EndFuture = Pin<Box<dyn Future<Output = Option<(ProcessExit, RequestUsage)>>>>;

/// The process of a worker. It ends when this is dropped.
pub(super) trait WorkerProcess: Send + 'static {
    /// Ends it and returns how it ended. Also returns its usage since it last entered or left its
    /// cell, if the keeper reports it.
    fn end(self: Box<Self>) -> EndFuture;
}

impl WorkerProcess for ProcessGuard {
    fn end(self: Box<Self>) -> EndFuture {
        Box::pin(async move { (*self).end().await.ok() })
    }
}

/// The cell in which a worker stays between requests, while they run under the same conditions.
#[derive(Debug)]
pub(super) struct WorkerCell {
    pub site: SiteName,
    pub confinement: Arc<Confinement>,
    /// Name, as `nagaya cells` shows it.
    pub cell: Arc<str>,
}

impl WorkerCell {
    /// Returns whether a request of this site with this confinement may run here.
    pub fn suits(&self, site: &SiteName, confinement: &Confinement) -> bool {
        self.site == *site && *self.confinement == *confinement
    }
}

impl PoolWorker {
    /// `socket` is the FastCGI connection to a process that ends when `process` is dropped.
    pub fn new(socket: OwnedFd, id: ProcessId, process: impl WorkerProcess) -> io::Result<Self> {
        Ok(Self {
            id,
            place: None,
            stream: QuietStream::new(socket)?,
            buffer: BytesMut::new(),
            runtime: Handle::current().id(),
            served: 0,
            idle_since: Instant::now(),
            opcache: 0,
            is_alone: false,
            process: Box::new(process),
        })
    }

    /// Returns true while nothing has happened on an idle connection: neither its end nor an
    /// unexpected byte. Costs a system call only if something did happen.
    fn is_quiet(&self) -> bool {
        matches!(self.stream.try_read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }

    /// Registers the stream with this thread's reactor.
    fn moved_here(mut self) -> io::Result<Self> {
        let here = Handle::current().id();
        if self.runtime != here {
            self.stream = QuietStream::new(self.stream.into_socket())?;
            self.runtime = here;
        }
        Ok(self)
    }
}

/// The PHP workers of this node.
pub struct PhpPools {
    pools: Mutex<HashMap<TenantName, Arc<TenantPool>>>,
    workers: AtomicU32,
    opcaches: OpcacheCount,
    settings: RwLock<PoolSettings>,
    metrics: Arc<EdgeMetrics>,
}

#[derive(Debug, Clone, Copy)]
struct PoolSettings {
    workers: u32,
    requests: u32,
    idle: Duration,
    waiting: u32,
    wait: Duration,
}

/// One tenant's workers.
struct TenantPool {
    /// One permit for each worker that may be busy. A worker is started only by the holder of a
    /// permit who finds none idle. So busy and idle ones together never exceed that number.
    turns: Arc<Semaphore>,
    waiting: AtomicU32,
    state: Mutex<PoolState>,
}

struct PoolState {
    /// Idle workers, in the order they became idle.
    idle: Vec<PoolWorker>,
    /// Maximum number of workers of the tenant.
    max: u32,
    /// Number of permits to destroy when they come back, because the tenant may now have fewer
    /// workers.
    surplus: u32,
    /// Identity with which a worker's process was started. A worker with another one is not used
    /// again.
    account: TenantIds,
    paths: KnownPaths,
    /// It has had more than one worker at once. The first one is started alone: most sites need no
    /// other, and it is there sooner.
    is_shared: bool,
}

/// Identity of a tenant's processes: their ids, and the network they reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct TenantIds {
    uid: u32,
    gid: u32,
    network: Option<ProgramNetwork>,
}

impl From<&Tenant> for TenantIds {
    fn from(tenant: &Tenant) -> Self {
        Self { uid: tenant.uid, gid: tenant.gid, network: tenant.network }
    }
}

impl From<&EdgeConfig> for PoolSettings {
    fn from(options: &EdgeConfig) -> Self {
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
    pub fn new(options: &EdgeConfig, metrics: Arc<EdgeMetrics>) -> Arc<Self> {
        Arc::new(Self {
            pools: Mutex::default(),
            workers: AtomicU32::new(0),
            opcaches: OpcacheCount::new(),
            settings: RwLock::new(options.into()),
            metrics,
        })
    }

    /// Sets the options. They hold from the next request on. All workers are replaced, because
    /// PHP's own settings may have changed, too.
    pub fn set_options(&self, options: &EdgeConfig) {
        *self.settings.write() = options.into();
        let renew = |pool: &Arc<TenantPool>| {
            let mut state = pool.state.lock();
            state.paths = KnownPaths::new(&self.opcaches);
            std::mem::take(&mut state.idle)
        };
        let stale: Vec<PoolWorker> = self.pools.lock().values().flat_map(renew).collect();
        self.end(stale);
    }

    fn settings(&self) -> PoolSettings {
        *self.settings.read()
    }

    /// Ends workers that were idle for too long, while it is polled. One task of the process runs
    /// it.
    pub async fn tend(self: Arc<Self>) {
        loop {
            tokio::time::sleep((self.settings().idle / 4).clamp(SWEEP_MIN, SWEEP_MAX)).await;
            self.sweep(Instant::now());
        }
    }

    /// Ends the workers of a removed tenant. Those still at work end with their request.
    pub fn forget(&self, tenant: &TenantName) {
        let pool = self.pools.lock().remove(tenant);
        if let Some(pool) = pool {
            pool.turns.close();
            let idle = std::mem::take(&mut pool.state.lock().idle);
            self.end(idle);
        }
    }

    /// Returns the number of workers, busy or idle.
    pub fn workers(&self) -> u32 {
        self.workers.load(Ordering::Relaxed)
    }

    /// Returns the present moment, for looks at paths.
    pub fn path_moment(&self) -> u64 {
        self.opcaches.now()
    }

    /// Returns a worker of this tenant: an idle one, or one made by `start` for the opcache with
    /// this number, or for none. Waits for its turn if all are busy.
    pub(super) async fn lease<S, F>(
        self: &Arc<Self>,
        tenant: &Tenant,
        start: S,
    ) -> Result<WorkerGuard, Refusal>
    where
        S: FnOnce(Option<u64>) -> F,
        F: Future<Output = Result<PoolWorker, Refusal>>,
    {
        let account = TenantIds::from(tenant);
        let pool = self.pool(tenant)?;
        let turn = match self.turn(&pool).await? {
            LeaseTurn::Mine(turn) => turn,
            LeaseTurn::With(lease) if lease.account == account => return Ok(*lease),
            LeaseTurn::With(mut lease) => {
                lease.renew(start).await?;
                lease.account = account;
                return Ok(*lease);
            }
        };
        let mut lease = WorkerGuard {
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

    fn pool(&self, tenant: &Tenant) -> Result<Arc<TenantPool>, Refusal> {
        let max = tenant.php_workers.unwrap_or(self.settings().workers).max(1);
        let account = TenantIds::from(tenant);
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
        let pool = Arc::new(TenantPool::new(max, account, &self.opcaches));
        pools.insert(tenant.name.clone(), pool.clone());
        Ok(pool)
    }

    /// Waits until a worker may be used. The settings limit the time and the number of waiting
    /// requests.
    async fn turn(&self, pool: &Arc<TenantPool>) -> Result<LeaseTurn, Refusal> {
        let removed = Refusal::Overloaded("the tenant was just removed");
        match pool.turns.clone().try_acquire_owned() {
            Ok(turn) => return Ok(LeaseTurn::Mine(turn)),
            Err(TryAcquireError::NoPermits) => {}
            Err(TryAcquireError::Closed) => return Err(removed),
        }
        let PoolSettings { waiting, wait, .. } = self.settings();
        let retry_after_seconds = u32::try_from(wait.as_secs()).unwrap_or(u32::MAX).max(1);
        let full = Refusal::QueueFull { retry_after_seconds, notice: None };
        let _spot = WaitSlot::take(&pool.waiting, waiting).ok_or(full)?;
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
                lease = given => Ok(LeaseTurn::With(Box::new(lease))),
                turn = pool.turns.clone().acquire_owned() => turn.map(LeaseTurn::Mine).map_err(|_| removed),
            }
        };
        let too_long = Refusal::QueueTimeout { retry_after_seconds, notice: None };
        tokio::time::timeout(wait, next).await.unwrap_or(Err(too_long))
    }

    /// Makes room for one more worker. If necessary it ends the one of any tenant that was idle
    /// longest.
    fn count_one(&self) -> Result<(), Refusal> {
        let add = |workers| (workers < WORKERS_MAX).then_some(workers + 1);
        if self.workers.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok() {
            self.metrics.php_workers.add(1);
            return Ok(());
        }
        let oldest = {
            let pools = self.pools.lock();
            let since =
                |pool: &&Arc<TenantPool>| pool.state.lock().idle.first().map(|worker| worker.idle_since);
            let pool = pools.values().filter(|pool| since(pool).is_some()).min_by_key(since);
            pool.and_then(|pool| {
                let idle = &mut pool.state.lock().idle;
                (!idle.is_empty()).then(|| idle.remove(0))
            })
        };
        // The new worker takes the place of the old one in the count.
        drop(oldest.ok_or(Refusal::Overloaded("too many PHP workers are busy"))?);
        Ok(())
    }

    /// Ends workers. Each end calls the keeper, so never do it under a lock.
    fn end(&self, workers: impl IntoIterator<Item = PoolWorker>) {
        for worker in workers {
            drop(worker);
            self.uncount_one();
        }
    }

    fn uncount_one(&self) {
        self.workers.fetch_sub(1, Ordering::Relaxed);
        self.metrics.php_workers.add(-1);
    }

    /// Ends workers that were idle for too long, and drops unused pools.
    fn sweep(&self, now: Instant) {
        let mut ended = Vec::new();
        let idle = self.settings().idle;
        self.pools.lock().retain(|_, pool| {
            let mut state = pool.state.lock();
            let old = |worker: &PoolWorker| now.duration_since(worker.idle_since) >= idle;
            ended.extend(state.idle.extract_if(.., |worker| old(worker) || !worker.is_quiet()));
            drop(state);
            pool.is_needed()
        });
        self.end(ended);
    }
}

/// Result of a wait.
enum LeaseTurn {
    Mine(OwnedSemaphorePermit),
    /// A turn and a worker, from the request before.
    With(Box<WorkerGuard>),
}

/// One of the places for waiting requests.
struct WaitSlot<'a>(&'a AtomicU32);

impl<'a> WaitSlot<'a> {
    fn take(waiting: &'a AtomicU32, max: u32) -> Option<Self> {
        let add = |waiting| (waiting < max).then_some(waiting + 1);
        waiting.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).ok().map(|_| Self(waiting))
    }
}

impl Drop for WaitSlot<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl TenantPool {
    fn new(max: u32, account: TenantIds, opcaches: &OpcacheCount) -> Self {
        let paths = KnownPaths::new(opcaches);
        Self {
            turns: Arc::new(Semaphore::new(max as usize)),
            waiting: AtomicU32::new(0),
            state: Mutex::new(PoolState {
                idle: Vec::new(),
                max,
                surplus: 0,
                account,
                paths,
                is_shared: false,
            }),
        }
    }

    /// Returns whether it has a worker, or a request uses it. Call it under the map's lock, so
    /// that nobody takes it meanwhile.
    fn is_needed(self: &Arc<Self>) -> bool {
        Arc::strong_count(self) > 1 || !self.state.lock().idle.is_empty()
    }

    /// Applies a changed record of the tenant. Returns the workers to end.
    fn adapt(&self, max: u32, account: TenantIds) -> Vec<PoolWorker> {
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
        // The allowed number of idle workers beside the busy ones is not known here. Ending all
        // is rare and safe.
        if lower { std::mem::take(&mut state.idle) } else { Vec::new() }
    }

    /// Returns the best idle worker that is still alive.
    fn take_idle(&self, pools: &PhpPools) -> Option<PoolWorker> {
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

/// A worker in use. Dropping it ends the worker, because the state of the connection is not
/// known.
pub(super) struct WorkerGuard {
    worker: Option<PoolWorker>,
    turn: Option<OwnedSemaphorePermit>,
    account: TenantIds,
    /// Time when it was taken in the common queue. Since then it may have gone from request to
    /// request on one thread.
    turn_since: Instant,
    pool: Arc<TenantPool>,
    pools: Arc<PhpPools>,
}

impl WorkerGuard {
    pub fn worker(&mut self) -> &mut PoolWorker {
        self.worker.as_mut().expect("a lease has a worker until it is given back")
    }

    /// Ensures a worker whose opcache remembers no other directory in the place of the script's.
    pub async fn settle<S, F>(&mut self, site: &SiteName, place: ScriptPlace, start: S) -> Result<(), Refusal>
    where
        S: FnOnce(Option<u64>) -> F,
        F: Future<Output = Result<PoolWorker, Refusal>>,
    {
        let (opcache, is_shared, stale) = {
            let mut state = self.pool.state.lock();
            let is_changed = state.paths.note(site, place, &self.pools.opcaches);
            let stale = if is_changed { std::mem::take(&mut state.idle) } else { Vec::new() };
            (state.paths.opcache(), state.is_shared, stale)
        };
        self.pools.end(stale);
        let worker = self.worker();
        let is_current = worker.opcache == opcache && !(worker.is_alone && is_shared);
        if is_current { Ok(()) } else { self.renew(start).await }
    }

    /// Ends the worker and starts another one in its place.
    pub async fn renew<S, F>(&mut self, start: S) -> Result<(), Refusal>
    where
        S: FnOnce(Option<u64>) -> F,
        F: Future<Output = Result<PoolWorker, Refusal>>,
    {
        self.end_worker();
        self.start(start).await
    }

    async fn start<S, F>(&mut self, start: S) -> Result<(), Refusal>
    where
        S: FnOnce(Option<u64>) -> F,
        F: Future<Output = Result<PoolWorker, Refusal>>,
    {
        self.pools.count_one()?;
        let counted = CountedWorker(&self.pools);
        let (opcache, is_alone) = {
            let mut state = self.pool.state.lock();
            let busy = (state.max as usize).saturating_sub(self.pool.turns.available_permits());
            state.is_shared |= busy > 1 || !state.idle.is_empty();
            (state.paths.opcache(), !state.is_shared)
        };
        let mut worker = start((!is_alone).then_some(opcache)).await?;
        (worker.opcache, worker.is_alone) = (opcache, is_alone);
        std::mem::forget(counted);
        self.worker = Some(worker);
        self.pools.metrics.php_spawned.add(1);
        Ok(())
    }

    /// Returns the worker for other requests: this one is done and the connection is clean.
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

    /// Takes the worker's process out, to end it. The next request gets its turn.
    pub fn into_process(mut self) -> Option<Box<dyn WorkerProcess>> {
        let worker = self.worker.take()?;
        self.pools.uncount_one();
        Some(worker.process)
    }

    /// Returns whether the tenant has not changed since the worker was started.
    fn may_go_on(&self) -> bool {
        let state = self.pool.state.lock();
        state.account == self.account && state.surplus == 0 && !self.pool.turns.is_closed()
    }

    fn end_worker(&mut self) {
        self.pools.end(self.worker.take());
    }
}

impl Drop for WorkerGuard {
    fn drop(&mut self) {
        self.end_worker();
        // The next request gets its turn only now. It finds the returned worker, or room for one.
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
struct CountedWorker<'a>(&'a PhpPools);

impl Drop for CountedWorker<'_> {
    fn drop(&mut self) {
        self.0.uncount_one();
    }
}

#[cfg(test)]
mod tests;
