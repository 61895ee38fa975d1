//! The process trees that run now: each is started in its cell, watched, and ended as a whole.
//!
//! The caller that started a tree holds its `ProcessRef`, and dropping that ends the tree. Not
//! here: the programs (`spawn`), cells (`cells`), a worker's moves from cell to cell
//! (`process_cell`), the holders of handles (`server`, `instances`).

mod counts;
mod kind;
mod process_cell;
mod root;
mod started;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nagaya_keeper_api::limits::START_TIMEOUT;
use nagaya_keeper_api::protocol::{FailureKind, ProcessExit, ProcessId};
use nagaya_records::cell::RequestUsage;
use nagaya_records::record::STOP_SECONDS;
use nagaya_records::{SiteName, Tenant};
use rustix::process::{Pid, Signal};
use tokio::io::Interest;
use tokio::sync::{Notify, oneshot, watch};
use tokio::task::spawn_local;
use tokio::time::{Instant, sleep, timeout};

use crate::cells::{KeeperCells, LOOK_AGAIN_MAX, Leaf};
use crate::enclosure::Enclosure;
use crate::fault::{self, Fault};
use crate::gate::{ScriptRule, SiteScripts};
use crate::log::{self, LogBudget, SiteLog};
use crate::metrics::KeeperMetrics;
use crate::php_parent::PhpParent;
use crate::process::process_cell::ProcessCell;
use crate::workers::ThreadPool;

use self::counts::{ProcessCountGuard, ProcessCounts};

pub use crate::process::process_cell::{CellRequest, slow_down};
pub use kind::{KINDS, ProcessKind};
pub use root::TreeRoot;
pub use started::StartedProgram;

/// Default time of a kept program after `SIGTERM`.
const GRACE: Duration = Duration::from_secs(STOP_SECONDS as u64);

/// Time for a program that has sent all its output and is about to end. Waiting costs less than
/// ending it. A program whose client has left gets no more.
const LAST_STEPS: Duration = Duration::from_millis(2);

/// Time after which a tree that survives `SIGKILL` is reported, and its end no longer waited for.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum wait for the last lines of a log once the tree is gone.
const LOG_TIMEOUT: Duration = Duration::from_secs(1);

/// Parameters of one start.
pub struct SpawnOrder {
    pub kind: ProcessKind,
    /// The cell to run in.
    pub request: CellRequest,
    /// Name in logs: the site, or the tenant of a PHP worker.
    pub label: String,
    /// Maximum number of this kind for the tenant.
    pub per_tenant_max: u32,
    pub log: LogBudget,
    /// The log that keeps its lines.
    pub journal: Option<Rc<SiteLog>>,
    /// For a PHP worker.
    pub scripts: Option<Arc<ScriptRule>>,
    /// The parent that makes it, kept while it runs.
    pub parent: Option<Rc<PhpParent>>,
}

/// All trees of this keeper.
pub struct Processes {
    cells: Arc<KeeperCells>,
    workers: ThreadPool,
    running: RefCell<HashMap<ProcessId, Rc<ProcessTree>>>,
    counts: Rc<ProcessCounts>,
    metrics: KeeperMetrics,
    next_id: Cell<u64>,
    closing: Cell<bool>,
    /// Time of the last move of a process.
    moved: Cell<Option<std::time::Instant>>,
}

/// One tree.
pub struct ProcessTree {
    id: ProcessId,
    pub kind: ProcessKind,
    pub tenant: Arc<Tenant>,
    label: String,
    /// For a child of the keeper's.
    pid: Option<Pid>,
    stay: ProcessCell,
    end_wanted: Notify,
    /// Time it has after `SIGTERM`, if it is kept.
    grace: Cell<Duration>,
    /// The time it had, if it was killed after it.
    grace_cut: Rc<Cell<Option<Duration>>>,
    /// The scripts that a PHP worker may be given.
    scripts: Option<Arc<ScriptRule>>,
    /// The enclosure it runs in.
    enclosure: Option<Arc<Enclosure>>,
    /// The parent of a PHP worker.
    parent: Option<Rc<PhpParent>>,
}

impl ProcessTree {
    fn expect_alive(&self) -> Result<(), Fault> {
        if self.stay.over.get() { Err(unknown(self.id)) } else { Ok(()) }
    }

    /// Makes the gate pass scripts of this site to it, and no others.
    pub fn serve_scripts(&self, site: &SiteName, scripts: SiteScripts) {
        if let Some(rule) = &self.scripts {
            rule.set(site.clone(), Some(scripts));
        }
    }

    /// Lets the gate report the use of requests like this one. A request that is demoted step by
    /// step has a watcher, which ends when the edge says that the request has left.
    fn let_gate_report(&self, request: &CellRequest) {
        if let Some(rule) = &self.scripts {
            rule.let_report(request.confinement().demotions.is_empty());
        }
    }

    /// Returns its use for its present request so far.
    pub fn usage(&self) -> RequestUsage {
        self.stay.usage()
    }

    /// Returns the name of its cell.
    pub fn cell(&self) -> String {
        self.stay.leaf().name().to_owned()
    }
}

fn unknown(id: ProcessId) -> Fault {
    Fault::new(FailureKind::NotFound, fault::UNKNOWN, format!("there is no process {} any more", id.0))
}

/// Keeps the tree running while it is held.
pub struct ProcessRef {
    process: Rc<ProcessTree>,
    end: watch::Receiver<Option<TreeEnd>>,
}

/// How a tree ended, and its use since the last reading.
pub type TreeEnd = (ProcessExit, RequestUsage);

impl ProcessRef {
    pub fn id(&self) -> ProcessId {
        self.process.id
    }

    /// Returns the name of its cell.
    pub fn cell(&self) -> String {
        self.process.cell()
    }

    /// Returns its cell.
    pub fn leaf(&self) -> Arc<Leaf> {
        self.process.stay.leaf()
    }

    /// Returns its number, for a child of the keeper's.
    pub fn pid(&self) -> Option<Pid> {
        self.process.pid
    }

    /// Returns the enclosure it runs in.
    pub fn enclosure(&self) -> Option<Arc<Enclosure>> {
        self.process.enclosure.clone()
    }

    /// Sets the time it has after `SIGTERM`, from the next requested end on.
    pub fn set_grace(&self, grace: Duration) {
        self.process.grace.set(grace);
    }

    /// Returns a slot that will hold the time it had, if it is killed after it.
    pub fn grace_cut(&self) -> Rc<Cell<Option<Duration>>> {
        Rc::clone(&self.process.grace_cut)
    }

    /// Resolves once nothing of the tree is left.
    pub fn ended(&self) -> impl Future<Output = TreeEnd> + use<> {
        let mut end = self.end.clone();
        async move {
            // The sender is gone only together with the runtime.
            end.wait_for(Option::is_some).await.ok().and_then(|end| *end).unwrap_or(UNKNOWN_END)
        }
    }
}

/// End of a tree that the kernel does not release.
const UNKNOWN_END: TreeEnd = (
    ProcessExit { status: None, signal: None, cpu_us: 0, out_of_memory: false },
    RequestUsage { cpu_us: 0, read_bytes: 0, write_bytes: 0, throttled_us: 0, demoted: 0 },
);

impl Drop for ProcessRef {
    fn drop(&mut self) {
        self.process.end_wanted.notify_one();
    }
}

impl Processes {
    pub fn new(
        cells: Arc<KeeperCells>,
        workers: ThreadPool,
        metrics: KeeperMetrics,
        total_max: u32,
    ) -> Rc<Self> {
        Rc::new(Self {
            cells,
            workers,
            running: RefCell::default(),
            counts: ProcessCounts::new(metrics.clone(), total_max),
            metrics,
            next_id: Cell::new(1),
            closing: Cell::new(false),
            moved: Cell::new(None),
        })
    }

    pub fn set_total_max(&self, total_max: u32) {
        self.counts.set_total_max(total_max);
    }

    /// Whether everything is being ended.
    pub fn is_closing(&self) -> bool {
        self.closing.get()
    }

    pub fn cells(&self) -> &Arc<KeeperCells> {
        &self.cells
    }

    /// Returns a running process.
    pub fn find(&self, id: ProcessId) -> Result<Rc<ProcessTree>, Fault> {
        self.running.borrow().get(&id).cloned().ok_or_else(|| unknown(id))
    }

    /// Returns how many of this kind run now, were ever started, and failed to start.
    pub fn numbers(&self, kind: ProcessKind) -> (u32, u64, u64) {
        let at = [kind as usize];
        (self.counts.of_kind(kind), self.metrics.started.get(at), self.metrics.failed.get(at))
    }

    /// Starts a tree. `make` runs on a worker thread. If this future is dropped, the started tree
    /// is ended.
    pub async fn start(
        self: &Rc<Self>,
        order: SpawnOrder,
        make: impl FnOnce(&Leaf) -> Result<StartedProgram, Fault> + Send + 'static,
    ) -> Result<(ProcessRef, Vec<OwnedFd>), Fault> {
        let place = self.take_place(&order)?;
        let leaf = self.cells.leaf(&order.request.home, order.request.confinement())?;
        let for_worker = Arc::clone(&leaf);
        let tenant = &order.request.home.tenant.name;
        let making = self.workers.start_for(tenant, move || make(&for_worker))?;
        let (answer, answered) = oneshot::channel();
        // A task of its own: the started tree needs care even if the caller leaves.
        spawn_local(Rc::clone(self).live(order, place, leaf, making, answer));
        answered.await.unwrap_or_else(|_| {
            Err(Fault::new(
                FailureKind::Broken,
                fault::SPAWN,
                "starting it failed inside the keeper; see its log",
            ))
        })
    }

    fn take_place(&self, order: &SpawnOrder) -> Result<ProcessCountGuard, Fault> {
        let refuse = |why: String| Err(Fault::new(FailureKind::Busy, fault::LIMIT, why));
        if self.closing.get() {
            return refuse("the keeper is ending; its successor takes requests in a moment".into());
        }
        let tenant = &order.request.home.tenant.name;
        ProcessCounts::take(&self.counts, (order.kind, tenant.clone()), order.per_tenant_max).or_else(refuse)
    }

    /// Runs the life of one tree, from its start until nothing is left of it.
    async fn live(
        self: Rc<Self>,
        order: SpawnOrder,
        place: ProcessCountGuard,
        leaf: Arc<Leaf>,
        making: oneshot::Receiver<Result<StartedProgram, Fault>>,
        answer: oneshot::Sender<Result<(ProcessRef, Vec<OwnedFd>), Fault>>,
    ) {
        let started = match wait_started(making, &leaf, &order.label).await {
            Ok(started) => started,
            Err(fault) => {
                self.metrics.failed.add([order.kind as usize], 1);
                wait_removed(&leaf, &order.label, END_TIMEOUT).await;
                // Returned before the answer, so that the caller can try again at once.
                drop(place);
                let _ = answer.send(Err(fault));
                return;
            }
        };
        self.metrics.started.add([order.kind as usize], 1);
        let id = ProcessId(self.next_id.replace(self.next_id.get() + 1));
        let process = Rc::new(ProcessTree {
            id,
            kind: order.kind,
            tenant: Arc::clone(&order.request.home.tenant),
            label: order.label,
            pid: started.root.pid(),
            stay: ProcessCell::new(leaf, order.request),
            end_wanted: Notify::new(),
            grace: Cell::new(GRACE),
            grace_cut: Rc::default(),
            scripts: order.scripts,
            enclosure: started.enclosure,
            parent: order.parent,
        });
        if let (Some(rule), Some(pid)) = (&process.scripts, process.pid) {
            rule.set_cell(process.stay.leaf(), pid);
        }
        self.running.borrow_mut().insert(id, Rc::clone(&process));
        if self.closing.get() {
            process.end_wanted.notify_one();
        }
        let who = format!("{} {}", process.kind.as_str(), process.label);
        let log = spawn_local(log::follow(started.log, who, order.log, order.journal));
        if process.kind == ProcessKind::Cgi {
            self.watch(&process);
        }
        let (say_end, end) = watch::channel(None);
        // The caller may have left. Then the handle is dropped, which ends the tree.
        let _ = answer.send(Ok((ProcessRef { process: Rc::clone(&process), end }, started.fds)));

        let mut ending = TreeEnding { process: &process, root: started.root };
        let (end, gone) = ending.run().await;
        if let Some(parent) = &process.parent {
            parent.worker_ended(&end.0);
        }
        let log_end = log.abort_handle();
        if timeout(LOG_TIMEOUT, log).await.is_err() {
            log_end.abort();
        }
        self.running.borrow_mut().remove(&id);
        let _ = say_end.send(Some(end));
        if !gone {
            ending.outwait().await;
        }
        drop(place);
    }

    /// Applies changed records: `current` returns the scripts that a worker of this site may be
    /// given.
    pub fn refresh_scripts(&self, current: impl Fn(&SiteName, &Tenant) -> Option<SiteScripts>) {
        for process in self.running.borrow().values() {
            if let Some(rule) = &process.scripts {
                let site = rule.site();
                let scripts = current(&site, &process.tenant);
                rule.set(site, scripts);
            }
        }
    }

    /// Ends the trees that `wanted` selects, e.g. those of a tenant that changed.
    pub fn end_where(&self, mut wanted: impl FnMut(&ProcessTree) -> bool) {
        for process in self.running.borrow().values() {
            if wanted(process) {
                process.end_wanted.notify_one();
            }
        }
    }

    /// Ends everything and starts nothing more. False: something survived for as long as `within`.
    pub async fn close(&self, within: Duration) -> bool {
        self.closing.set(true);
        self.end_where(|_| true);
        let empty = timeout(within, self.counts.wait_until_none()).await.is_ok();
        if !empty {
            // Trees within their grace period have none any more.
            for process in self.running.borrow().values() {
                let _ = process.stay.leaf().end(None);
            }
        }
        self.cells.close().await;
        empty
    }
}

/// Ends a start that hangs through its leaf, again and again, until the worker comes back from it.
async fn wait_started(
    mut making: oneshot::Receiver<Result<StartedProgram, Fault>>,
    leaf: &Leaf,
    label: &str,
) -> Result<StartedProgram, Fault> {
    loop {
        match timeout(START_TIMEOUT, &mut making).await {
            Ok(made) => {
                return made.unwrap_or_else(|_| {
                    let message = format!("starting '{label}' panicked inside the keeper");
                    Err(Fault::new(FailureKind::Broken, fault::SPAWN, message))
                });
            }
            Err(_) => {
                tracing::warn!(program = label, "it does not begin to run; ending it");
                if let Err(error) = leaf.end(None) {
                    tracing::warn!(program = label, %error, "its cgroup cannot be ended");
                }
            }
        }
    }
}

/// How a tree's end begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WaitEnd {
    /// Its first process has ended by itself.
    Ended,
    Kill,
}

/// The last part of a tree's life.
struct TreeEnding<'a> {
    process: &'a ProcessTree,
    root: TreeRoot,
}

impl TreeEnding<'_> {
    /// Waits until the program ends or must end, then ends the rest. The second value: all is gone.
    async fn run(&mut self) -> (TreeEnd, bool) {
        let wait_end = self.wait_end().await;
        let (process, stay) = (self.process, &self.process.stay);
        // Nobody moves the process until it is returned, and its number is its own until it is
        // reaped.
        let _turn = stay.turn.lock().await;
        stay.over.set(true);
        stay.stop_watch();
        let (leaf, label) = (stay.leaf(), &process.label);
        if let Err(error) = leaf.end(self.root.pid()) {
            tracing::warn!(program = label, %error, "its cgroup cannot be ended; ending the program alone");
        }
        if wait_end == WaitEnd::Kill {
            // In case the cell could not be ended. A process that is dead already is as good.
            let _ = self.root.kill();
        }
        let exit = self.reap(END_TIMEOUT).await.map(|exit| self.name_memory(exit));
        let removed = wait_removed(&leaf, label, END_TIMEOUT).await;
        // A returned cell knows its use at the moment when nothing ran in it any more.
        let usage = stay.usage();
        let gone = removed && timeout(END_TIMEOUT, stay.wait_until_retired()).await.is_ok();
        ((exit.unwrap_or(UNKNOWN_END.0), usage), gone && exit.is_some())
    }

    /// Waits until the program ends, or must be killed.
    async fn wait_end(&self) -> WaitEnd {
        // Registering fails only for lack of memory. Then the tree is ended instead of watched.
        let watched = nagaya_keeper_api::watch(self.root.end(), Interest::READABLE).ok();
        let dies = async {
            if let Some(watched) = &watched {
                let _ = watched.readable().await;
            }
        };
        tokio::pin!(dies);
        let asked = tokio::select! {
            () = &mut dies => false,
            () = self.process.end_wanted.notified() => true,
        };
        if !asked {
            return WaitEnd::Ended;
        }
        let is_kept = self.process.kind.is_kept();
        if is_kept && self.root.signal(Signal::TERM).is_err() {
            return WaitEnd::Kill;
        }
        let grace = self.process.grace.get();
        match timeout(if is_kept { grace } else { LAST_STEPS }, &mut dies).await {
            Ok(()) => WaitEnd::Ended,
            Err(_) => {
                self.process.grace_cut.set(is_kept.then_some(grace));
                WaitEnd::Kill
            }
        }
    }

    /// Reports whether a process that serves requests died for lack of memory. Kernels count per
    /// cell. So only a process that was killed counts, and only if something was killed there since
    /// its request began.
    fn name_memory(&self, exit: ProcessExit) -> ProcessExit {
        let process = self.process;
        let is_killed = match (exit.signal, exit.status) {
            (Some(signal), _) => signal == Signal::KILL.as_raw(),
            // A shell reports its program in this way.
            (None, status) => process.kind == ProcessKind::Cgi && status == Some(128 + Signal::KILL.as_raw()),
        };
        if process.kind == ProcessKind::App || !is_killed || process.stay.memory_kills() == 0 {
            return exit;
        }
        // Also if its end was asked for meanwhile: a process that the kernel kills closes its
        // connection some time before it is gone.
        let (code, kind, cell) = (fault::OUT_OF_MEMORY, process.kind.as_str(), process.stay.leaf());
        tracing::warn!(
            tenant = %process.tenant.name, program = process.label,
            "{code}: out of memory: the kernel killed a {kind} process at the memory limit of cell {}", cell.name()
        );
        ProcessExit { out_of_memory: true, ..exit }
    }

    async fn reap(&self, within: Duration) -> Option<ProcessExit> {
        let until = Instant::now() + within;
        let mut pause = Duration::from_millis(1);
        loop {
            match self.root.try_reap() {
                Ok(Some(exit)) => return Some(exit),
                Ok(None) if Instant::now() < until => sleep(pause).await,
                Ok(None) => return None,
                Err(error) => {
                    tracing::error!(program = self.process.label, %error, "its end cannot be learnt");
                    return None;
                }
            }
            pause = (pause * 2).min(LOOK_AGAIN_MAX);
        }
    }

    /// Keeps the slot of a tree that is stuck in the kernel until the kernel releases it.
    async fn outwait(&self) {
        self.process.stay.wait_until_retired().await;
        while !self.process.stay.leaf().release().unwrap_or(true) || matches!(self.root.try_reap(), Ok(None))
        {
            sleep(END_TIMEOUT).await;
        }
    }
}

/// Waits until the cell is empty, and kills its processes again. True once it is empty.
async fn wait_empty(leaf: &Leaf, label: &str, within: Duration) -> bool {
    // A list that cannot be read is left to `wait_removed`, which reports it.
    outlast(leaf, label, within, || leaf.pids().map_or(true, |pids| pids.is_empty())).await
}

/// Waits until the cell is empty and returned, and kills its processes again. True once that is
/// done.
async fn wait_removed(leaf: &Leaf, label: &str, within: Duration) -> bool {
    let released = || {
        leaf.release().unwrap_or_else(|error| {
            tracing::error!(program = label, %error, "its cgroup cannot be removed");
            true
        })
    };
    outlast(leaf, label, within, released).await
}

async fn outlast(leaf: &Leaf, label: &str, within: Duration, is_gone: impl Fn() -> bool) -> bool {
    let until = Instant::now() + within;
    let mut pause = Duration::from_millis(1);
    loop {
        if is_gone() {
            return true;
        }
        if Instant::now() >= until {
            let code = fault::UNKILLABLE;
            tracing::error!(program = label, "{code}: processes survived SIGKILL for {within:?}");
            return false;
        }
        // It may be gone by now. The next check finds out.
        let _ = leaf.end(None);
        sleep(pause).await;
        pause = (pause * 2).min(LOOK_AGAIN_MAX);
    }
}
