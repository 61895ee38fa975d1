//! The stay of one process in its cell: it enters for a request, is measured, slowed down step by step, and leaves.
//!
//! A PHP worker stays in its cell between requests and moves only where the next one must run elsewhere. What a
//! request leaves running is ended when it leaves, as it is for CGI: a script cannot put work aside to be done on
//! somebody else's account. Not here: cells (`cells`), the process's start and end (`process`), who may ask (`engine`).

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nagaya_cmdb::Site;
use nagaya_cmdb::cell::{Confinement, Demotion, Limits, Usage};
use tokio::sync::{Mutex, Notify};
use tokio::task::{AbortHandle, spawn_local};
use tokio::time::sleep;

use super::{END_TIMEOUT, Kind, Process, Processes, wait_empty, wait_removed};
use crate::cells::{self, Claim, Home, Leaf};
use crate::confinement;
use crate::fault::{self, Fault};
use crate::metrics::Metrics;
use crate::protocol::Failure;

/// Shortest time between two looks at what a request has used. A look costs some microseconds.
const LOOK_MIN: Duration = Duration::from_millis(5);

/// Longest time between two looks while a request uses nothing: it waits for a database, or for its client.
const LOOK_IDLE_MAX: Duration = Duration::from_millis(100);

/// So shortly after a move the kernel takes another one without waiting: half of what was measured.
const MOVES_STAY_HOT: Duration = Duration::from_millis(5);

/// Cells a process has left and in which something still lives, at most. Each is gone in a moment, unless the kernel
/// does not let go of a process.
const RETIRING_MAX: u32 = 16;

/// Where a process is, under which limits, and since when its use is counted.
pub(super) struct Stay {
    leaf: RefCell<Arc<Leaf>>,
    request: RefCell<Request>,
    /// Whether a request is being served, as far as the edge has said.
    serves: Cell<bool>,
    /// Held by who moves the process, and from its end on: its number means this process only until it is reaped.
    pub(super) turn: Mutex<()>,
    pub(super) over: Cell<bool>,
    /// How many steps down the request is.
    demoted: Rc<Cell<u8>>,
    watch: RefCell<Option<AbortHandle>>,
    retiring: Cell<u32>,
    retired: Notify,
}

/// For what a process is in its cell.
#[derive(Debug, Clone)]
pub struct Request {
    pub home: Home,
    /// As the edge asked for it.
    asked: Confinement,
    /// What holds: with the site's own limits beneath.
    holds: Confinement,
}

impl Request {
    pub fn new(home: Home, asked: Confinement) -> Self {
        let holds = match &home.site {
            Some(site) => confinement::of_site(site, &asked),
            None => asked.clone(),
        };
        Self { home, asked, holds }
    }

    pub fn confinement(&self) -> &Confinement {
        &self.holds
    }

    /// What is no request: an application, or a worker that waits for its first one.
    pub fn none(home: Home) -> Self {
        Self { home, asked: Confinement::default(), holds: Confinement::default() }
    }
}

impl Stay {
    pub(super) fn new(leaf: Arc<Leaf>, request: Request) -> Self {
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

    pub(super) fn usage(&self) -> Usage {
        Usage { demoted: self.demoted.get(), ..self.leaf.borrow().usage() }
    }

    pub(super) fn stop_watch(&self) {
        if let Some(watch) = self.watch.take() {
            watch.abort();
        }
    }

    /// Returns once nothing lives in cells the process was in before.
    pub(super) async fn all_retired(&self) {
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
    /// Moves a worker to where this request is to run. Returns the cell's name.
    pub async fn enter(self: &Rc<Self>, process: &Rc<Process>, request: Request) -> Result<String, Fault> {
        let stay = &process.stay;
        let _turn = stay.turn.lock().await;
        process.expect_alive()?;
        stay.stop_watch();
        let leaf = stay.leaf();
        if !self.cells.refit(&leaf, &request.home, &request.holds)? {
            self.move_to(process, &request).await?;
            self.retire(process, leaf);
        }
        stay.request.replace(request);
        self.metrics.enters.inc();
        stay.leaf().begin();
        self.watch(process);
        Ok(stay.leaf().name().to_owned())
    }

    /// The worker's request has ended: what it used. What it left running is ended.
    pub async fn leave(self: &Rc<Self>, process: &Rc<Process>) -> Result<Usage, Fault> {
        let stay = &process.stay;
        let _turn = stay.turn.lock().await;
        process.expect_alive()?;
        stay.stop_watch();
        stay.serves.set(false);
        let usage = if process.is_alone() { stay.usage() } else { self.leave_behind(process).await? };
        if stay.demoted.replace(0) > 0 {
            stay.leaf().set(&stay.request.borrow().holds.limits);
        }
        stay.leaf().begin();
        // It waits for the next one. What its tenant has at rest is not urgent for that.
        stay.leaf().claim(Claim::Nothing);
        Ok(usage)
    }

    /// Looks from now on whether the request has used so much that it must be slowed down.
    pub(super) fn watch(self: &Rc<Self>, process: &Process) {
        let stay = &process.stay;
        stay.demoted.set(0);
        stay.serves.set(true);
        let request = stay.request.borrow();
        stay.watch.replace(slow_down(&self.metrics, stay.leaf(), &request.holds, &stay.demoted));
    }

    /// Acts on changed records: running requests get what their site's record says now.
    pub fn refresh(self: &Rc<Self>, current: impl Fn(&Site) -> Option<Arc<Site>>) {
        for process in self.running.borrow().values() {
            let request = process.stay.request.borrow();
            let Some(old) = &request.home.site else { continue };
            let Some(site) = current(old) else { continue };
            let is_changed = (&site.request_limits, &site.demotions) != (&old.request_limits, &old.demotions);
            if is_changed && process.kind != Kind::App {
                spawn_local(Rc::clone(self).renew(Rc::clone(process), site));
            }
        }
    }

    /// What was used before counts on: a request does not begin anew because its site's limits change.
    async fn renew(self: Rc<Self>, process: Rc<Process>, site: Arc<Site>) {
        let stay = &process.stay;
        let _turn = stay.turn.lock().await;
        let now = stay.request.borrow().clone();
        // It may have ended, or entered for another site, while this waited.
        if stay.over.get() || now.home.site.as_ref().is_none_or(|of| of.name != site.name) {
            return;
        }
        stay.stop_watch();
        let request = Request::new(Home { site: Some(site), ..now.home }, now.asked);
        stay.leaf().set(&request.holds.limits);
        stay.request.replace(request);
        if stay.serves.get() {
            self.watch(&process);
        }
    }

    /// Puts the process into a fresh cell for this request. The cell it was in before is as it was.
    async fn move_to(self: &Rc<Self>, process: &Rc<Process>, request: &Request) -> Result<(), Fault> {
        let stay = &process.stay;
        if stay.retiring.get() >= RETIRING_MAX {
            let message = format!("{RETIRING_MAX} cells the worker was in before cannot be emptied");
            return Err(Fault::new(Failure::Busy, fault::UNKILLABLE, message));
        }
        let leaf = self.cells.leaf(&request.home, &request.holds)?;
        if let Err(error) = self.adopt(process, &leaf).await {
            // It may be in the old cell by one controller and in the new one by another: it can only be ended.
            process.end_wanted.notify_one();
            self.retire(process, leaf);
            return Err(error);
        }
        stay.leaf.replace(leaf);
        self.metrics.moves.inc();
        Ok(())
    }

    async fn adopt(&self, process: &Process, leaf: &Arc<Leaf>) -> Result<(), Fault> {
        let (from, to) = (process.stay.leaf(), Arc::clone(leaf));
        let Some(pid) = process.pid else {
            return Err(Fault::new(
                Failure::Invalid,
                fault::WRONG_KIND,
                "what is in a sandbox stays in its cell",
            ));
        };
        if self.cells.fence() == cells::Kind::ProcessGroup {
            return Ok(to.adopt(pid, &from)?);
        }
        // Both versions make who moves a running process wait for a grace period, some milliseconds, unless another
        // move has just done so: not the one thread. It is measured in docs/cells.md.
        let is_hot =
            self.moved.replace(Some(Instant::now())).is_some_and(|last| last.elapsed() < MOVES_STAY_HOT);
        if is_hot {
            return Ok(to.adopt(pid, &from)?);
        }
        let adopted = self.workers.run(move || to.adopt(pid, &from))?.await;
        let panicked = |_| Fault::new(Failure::Broken, fault::SPAWN, "moving it panicked inside the keeper");
        Ok(adopted.map_err(panicked)??)
    }

    /// Leaves everything else that is in the cell behind there and ends it: the process moves to a cell like it.
    async fn leave_behind(self: &Rc<Self>, process: &Rc<Process>) -> Result<Usage, Fault> {
        let stay = &process.stay;
        let left = stay.leaf();
        let request = stay.request.borrow().clone();
        self.move_to(process, &request).await?;
        // What they used until they were ended belongs to this request.
        wait_empty(&left, &process.label, END_TIMEOUT).await;
        let usage = Usage { demoted: stay.demoted.get(), ..left.usage() };
        self.retire(process, left);
        Ok(usage)
    }

    /// Ends what lives in a cell that a process was in, and gives the cell back.
    fn retire(self: &Rc<Self>, process: &Rc<Process>, leaf: Arc<Leaf>) {
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

/// Slows the request in this leaf down, step by step, as long as the task runs that this returns. `done` is how many steps it
/// has gone. None: there are none.
pub fn slow_down(
    metrics: &Metrics,
    leaf: Arc<Leaf>,
    holds: &Confinement,
    done: &Rc<Cell<u8>>,
) -> Option<AbortHandle> {
    let Confinement { limits, demotions, .. } = holds;
    let demotions = Demotions {
        metrics: metrics.clone(),
        leaf,
        limits: limits.clone(),
        steps: demotions.clone(),
        done: Rc::clone(done),
    };
    (!demotions.steps.is_empty()).then(|| spawn_local(demotions.watch()).abort_handle())
}

/// The steps in which one request is slowed down.
struct Demotions {
    metrics: Metrics,
    leaf: Arc<Leaf>,
    limits: Limits,
    steps: Vec<Demotion>,
    done: Rc<Cell<u8>>,
}

impl Demotions {
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

    /// Returns once this much CPU time is used, later by `LOOK_MIN` at most while the request computes.
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
