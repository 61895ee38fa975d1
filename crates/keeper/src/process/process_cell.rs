//! The cell of one process: the process enters for a request, is measured, demoted step by step,
//! and leaves.
//!
//! A PHP worker stays in its cell between requests and moves only if the next one must run
//! elsewhere. Processes that a request leaves running are ended when it leaves, as for CGI. So a
//! script cannot leave work behind that is charged to somebody else. Not here: cells (`cells`), the
//! process's start and end (`process`), the callers (`verbs`).

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nagaya_keeper_api::protocol::FailureKind;
use nagaya_records::Site;
use nagaya_records::cell::{Confinement, Demotion, LimitSet, RequestUsage};
use tokio::sync::{Mutex, Notify};
use tokio::task::{AbortHandle, spawn_local};
use tokio::time::sleep;

use crate::cells::{self, CellParent, Leaf};
use crate::confinement;
use crate::fault::{self, Fault};
use crate::metrics::KeeperMetrics;
use crate::process::{END_TIMEOUT, ProcessKind, ProcessTree, Processes, wait_empty, wait_removed};

/// Minimum time between two readings of a request's use. A reading costs some microseconds.
const LOOK_MIN: Duration = Duration::from_millis(5);

/// Maximum time between two readings while a request uses nothing: it waits for a database, or for
/// its client.
const LOOK_IDLE_MAX: Duration = Duration::from_millis(100);

/// Time after a move in which the kernel makes another one without waiting: half of the measured
/// value.
const MOVES_STAY_HOT: Duration = Duration::from_millis(5);

/// Maximum number of cells that a process has left and in which something still lives. Each is gone
/// in a moment, unless the kernel does not release a process.
const RETIRING_MAX: u32 = 16;

/// The cell of a process, its limits, and since when its use is counted.
pub(super) struct ProcessCell {
    leaf: RefCell<Arc<Leaf>>,
    request: RefCell<CellRequest>,
    /// Whether a request is being served, as far as the edge has reported.
    serves: Cell<bool>,
    /// Held while the process is moved, and from its end on. Its number means this process only
    /// until it is reaped.
    pub(super) turn: Mutex<()>,
    pub(super) over: Cell<bool>,
    /// Number of demotion steps taken by the request.
    demoted: Rc<Cell<u8>>,
    watch: RefCell<Option<AbortHandle>>,
    retiring: Cell<u32>,
    retired: Notify,
}

/// The purpose of a process in its cell.
#[derive(Debug, Clone)]
pub struct CellRequest {
    pub home: CellParent,
    /// The confinement that the edge sent.
    asked: Confinement,
    /// The effective confinement: with the site's own limits below.
    holds: Confinement,
}

impl CellRequest {
    pub fn new(home: CellParent, asked: Confinement) -> Self {
        let holds = match &home.site {
            Some(site) => confinement::of_site(site, &asked),
            None => asked.clone(),
        };
        Self { home, asked, holds }
    }

    pub fn confinement(&self) -> &Confinement {
        &self.holds
    }

    /// Makes the value for an application, or for a worker that waits for its first request.
    pub fn none(home: CellParent) -> Self {
        Self { home, asked: Confinement::default(), holds: Confinement::default() }
    }
}

impl ProcessCell {
    pub(super) fn new(leaf: Arc<Leaf>, request: CellRequest) -> Self {
        leaf.count_kills();
        Self {
            leaf: RefCell::new(leaf),
            request: RefCell::new(request),
            serves: Cell::new(false),
            turn: Mutex::new(()),
            over: Cell::new(false),
            demoted: Rc::default(),
            watch: RefCell::default(),
            retiring: Cell::new(0),
            retired: Notify::new(),
        }
    }

    pub(super) fn leaf(&self) -> Arc<Leaf> {
        Arc::clone(&self.leaf.borrow())
    }

    pub(super) fn usage(&self) -> RequestUsage {
        RequestUsage { demoted: self.demoted.get(), ..self.leaf.borrow().usage() }
    }

    /// Returns how many processes were killed in its cell since its request began. Where its cell
    /// has no count of its own, those of its site or tenant count, too.
    pub(super) fn memory_kills(&self) -> u64 {
        self.leaf.borrow().kills_since_begin()
    }

    pub(super) fn stop_watch(&self) {
        if let Some(watch) = self.watch.take() {
            watch.abort();
        }
    }

    /// Returns once nothing lives in cells the process was in before.
    pub(super) async fn wait_until_retired(&self) {
        loop {
            let retired = self.retired.notified();
            if self.retiring.get() == 0 {
                return;
            }
            retired.await;
        }
    }
}

impl Processes {
    /// Moves a worker to the cell of this request. Returns the cell's name.
    pub async fn enter(
        self: &Rc<Self>,
        process: &Rc<ProcessTree>,
        request: CellRequest,
    ) -> Result<String, Fault> {
        let stay = &process.stay;
        let _turn = stay.turn.lock().await;
        process.expect_alive()?;
        stay.stop_watch();
        let leaf = stay.leaf();
        if !self.cells.refit(&leaf, &request.home, &request.holds)? {
            self.move_to(process, &request).await?;
            self.retire(process, leaf);
        }
        process.let_gate_report(&request);
        stay.request.replace(request);
        self.metrics.enters.inc();
        stay.leaf().begin();
        self.watch(process);
        Ok(stay.leaf().name().to_owned())
    }

    /// Ends the worker's request and returns its use. Processes that it left running are ended.
    pub async fn leave(self: &Rc<Self>, process: &Rc<ProcessTree>) -> Result<RequestUsage, Fault> {
        let stay = &process.stay;
        let _turn = stay.turn.lock().await;
        process.expect_alive()?;
        stay.stop_watch();
        stay.serves.set(false);
        let usage = match process.pid.and_then(|pid| stay.leaf().begin_next(pid, |_| true)) {
            Some(used) => RequestUsage { demoted: stay.demoted.get(), ..used },
            None => {
                let usage = self.leave_behind(process).await?;
                stay.leaf().begin();
                usage
            }
        };
        if stay.demoted.replace(0) > 0 {
            stay.leaf().set(&stay.request.borrow().holds.limits);
        }
        Ok(usage)
    }

    /// Watches from now on whether the request's use requires a demotion.
    pub(super) fn watch(self: &Rc<Self>, process: &ProcessTree) {
        let stay = &process.stay;
        stay.demoted.set(0);
        stay.serves.set(true);
        let request = stay.request.borrow();
        stay.watch.replace(slow_down(&self.metrics, stay.leaf(), &request.holds, &stay.demoted));
    }

    /// Applies changed records: running requests get the present limits of their site's record.
    pub fn refresh(self: &Rc<Self>, current: impl Fn(&Site) -> Option<Arc<Site>>) {
        for process in self.running.borrow().values() {
            let request = process.stay.request.borrow();
            let Some(old) = &request.home.site else { continue };
            let Some(site) = current(old) else { continue };
            let is_changed = (&site.request_limits, &site.demotions) != (&old.request_limits, &old.demotions);
            if is_changed && process.kind != ProcessKind::App {
                spawn_local(Rc::clone(self).renew(Rc::clone(process), site));
            }
        }
    }

    /// Renews a request's limits. Its earlier use still counts, because the request does not begin
    /// again.
    async fn renew(self: Rc<Self>, process: Rc<ProcessTree>, site: Arc<Site>) {
        let stay = &process.stay;
        let _turn = stay.turn.lock().await;
        let now = stay.request.borrow().clone();
        // It may have ended, or entered for another site, while this waited.
        if stay.over.get() || now.home.site.as_ref().is_none_or(|of| of.name != site.name) {
            return;
        }
        stay.stop_watch();
        let request = CellRequest::new(CellParent { site: Some(site), ..now.home }, now.asked);
        stay.leaf().set(&request.holds.limits);
        process.let_gate_report(&request);
        stay.request.replace(request);
        if stay.serves.get() {
            self.watch(&process);
        }
    }

    /// Moves the process to a fresh cell for this request. Its earlier cell stays as it was.
    async fn move_to(self: &Rc<Self>, process: &Rc<ProcessTree>, request: &CellRequest) -> Result<(), Fault> {
        let stay = &process.stay;
        if stay.retiring.get() >= RETIRING_MAX {
            let message = format!("{RETIRING_MAX} cells the worker was in before cannot be emptied");
            return Err(Fault::new(FailureKind::Busy, fault::UNKILLABLE, message));
        }
        let leaf = self.cells.leaf(&request.home, &request.holds)?;
        if let Err(error) = self.adopt(process, &leaf).await {
            // It may be in the old cell by one controller and in the new one by another. It can
            // only be ended.
            process.end_wanted.notify_one();
            self.retire(process, leaf);
            return Err(error);
        }
        leaf.count_kills();
        if let (Some(rule), Some(pid)) = (&process.scripts, process.pid) {
            rule.set_cell(Arc::clone(&leaf), pid);
        }
        stay.leaf.replace(leaf);
        self.metrics.moves.inc();
        Ok(())
    }

    async fn adopt(&self, process: &ProcessTree, leaf: &Arc<Leaf>) -> Result<(), Fault> {
        let (from, to) = (process.stay.leaf(), Arc::clone(leaf));
        let Some(pid) = process.pid else {
            return Err(Fault::new(
                FailureKind::Invalid,
                fault::WRONG_KIND,
                "what is in a sandbox stays in its cell",
            ));
        };
        if self.cells.fence() == cells::ProcessTracking::ProcessGroup {
            return Ok(to.adopt(pid, &from)?);
        }
        // On both versions a move waits some milliseconds for a grace period of the kernel, unless
        // another move just waited. So it is not made on the one thread. docs/cells.md has the
        // measurements.
        let is_hot =
            self.moved.replace(Some(Instant::now())).is_some_and(|last| last.elapsed() < MOVES_STAY_HOT);
        if is_hot {
            return Ok(to.adopt(pid, &from)?);
        }
        let adopted = self.workers.run(move || to.adopt(pid, &from))?.await;
        let panicked =
            |_| Fault::new(FailureKind::Broken, fault::SPAWN, "moving it panicked inside the keeper");
        Ok(adopted.map_err(panicked)??)
    }

    /// Moves the process to a cell like its own, and ends everything else in the old one.
    async fn leave_behind(self: &Rc<Self>, process: &Rc<ProcessTree>) -> Result<RequestUsage, Fault> {
        let stay = &process.stay;
        let left = stay.leaf();
        let request = stay.request.borrow().clone();
        self.move_to(process, &request).await?;
        // Their use until their end belongs to this request.
        wait_empty(&left, &process.label, END_TIMEOUT).await;
        let usage = RequestUsage { demoted: stay.demoted.get(), ..left.usage() };
        self.retire(process, left);
        Ok(usage)
    }

    /// Ends everything in a cell that a process was in, and returns the cell.
    fn retire(self: &Rc<Self>, process: &Rc<ProcessTree>, leaf: Arc<Leaf>) {
        if leaf.release().unwrap_or(false) {
            return;
        }
        let process = Rc::clone(process);
        process.stay.retiring.set(process.stay.retiring.get() + 1);
        spawn_local(async move {
            while !wait_removed(&leaf, &process.label, END_TIMEOUT).await {
                sleep(END_TIMEOUT).await;
            }
            process.stay.retiring.set(process.stay.retiring.get() - 1);
            process.stay.retired.notify_waiters();
        });
    }
}

/// Demotes the request in this leaf, step by step, while the returned task runs. `done` is the
/// number of steps taken. `None` if there are no steps.
pub fn slow_down(
    metrics: &KeeperMetrics,
    leaf: Arc<Leaf>,
    holds: &Confinement,
    done: &Rc<Cell<u8>>,
) -> Option<AbortHandle> {
    let Confinement { limits, demotions, .. } = holds;
    let demotions = DemotionSteps {
        metrics: metrics.clone(),
        leaf,
        limits: limits.clone(),
        steps: demotions.clone(),
        done: Rc::clone(done),
    };
    (!demotions.steps.is_empty()).then(|| spawn_local(demotions.watch()).abort_handle())
}

/// The demotion steps of one request.
struct DemotionSteps {
    metrics: KeeperMetrics,
    leaf: Arc<Leaf>,
    limits: LimitSet,
    steps: Vec<Demotion>,
    done: Rc<Cell<u8>>,
}

impl DemotionSteps {
    async fn watch(self) {
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u64);
        let mut limits = self.limits.clone();
        for step in &self.steps {
            self.wait_used(step.after_cpu_us, cores).await;
            limits = limits.overlaid(&step.limits);
            self.leaf.set(&limits);
            self.done.set(self.done.get() + 1);
            self.metrics.demotions.inc();
        }
    }

    /// Returns once this much CPU time is used, at most `LOOK_MIN` later while the request
    /// computes.
    async fn wait_used(&self, cpu_us: u64, cores: u64) {
        let (mut before, mut idle) = (0, LOOK_MIN);
        loop {
            let used = self.leaf.usage().cpu_us;
            let left = match cpu_us.checked_sub(used) {
                None | Some(0) => return,
                Some(left) => Duration::from_micros(left / cores),
            };
            idle = if used == before { (idle * 2).min(LOOK_IDLE_MAX) } else { LOOK_MIN };
            before = used;
            sleep(left.max(idle)).await;
        }
    }
}
