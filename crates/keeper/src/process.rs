//! The process trees that run now: each is started in its cell, watched, and ended as a whole.
//!
//! Whoever asked for a tree holds its `Handle`; dropping that ends the tree. Not here: what is started
//! (`spawn`), cells (`cells`), a worker's way from cell to cell (`stay`), who holds handles (`server`, `instances`).

mod root;
mod stay;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nagaya_cmdb::cell::Usage;
use nagaya_cmdb::{SiteName, Tenant, TenantName};
use rustix::process::{Pid, Signal};
use tokio::io::Interest;
use tokio::sync::{Notify, oneshot, watch};
use tokio::task::spawn_local;
use tokio::time::{Instant, sleep, timeout};

use crate::cells::{Cells, LOOK_AGAIN_MAX, Leaf};
use crate::enclosure::Enclosure;
use crate::fault::{self, Fault};
use crate::gate::{ScriptRule, SiteScripts};
use crate::log::{self, Budget, Journal};
use crate::metrics::Metrics;
use crate::protocol::{Exit, Failure, ProcessId};
use crate::spawn::Started;
use crate::sys;
use crate::workers::Workers;

pub use root::Root;
use stay::Stay;
pub use stay::{Request, slow_down};

/// A program that has not begun to run after this is ended: a tenant may have stopped it on its way. Long, because in a
/// cell that is out of CPU time all programs begin slowly.
pub const START_TIMEOUT: Duration = Duration::from_secs(300);

/// How long a kept program has after `SIGTERM`.
const GRACE: Duration = Duration::from_secs(2);

/// A program that has said all it had to say is about to end. Letting it costs less than ending it, and more is not given
/// to one whose client has left.
const LAST_STEPS: Duration = Duration::from_millis(2);

/// After this a tree that survives `SIGKILL` is reported, and its end no longer waited for.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the last lines of a log are waited for once the tree is gone.
const LOG_TIMEOUT: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    Cgi,
    Php,
    App,
}

/// All kinds; the position of each is its number.
pub const KINDS: [Kind; 3] = [Kind::Cgi, Kind::Php, Kind::App];

impl Kind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Cgi => "cgi",
            Self::Php => "php",
            Self::App => "app",
        }
    }

    /// Kept programs get a chance to end by themselves; the others only serve a request that is over.
    fn is_kept(self) -> bool {
        self == Self::App
    }
}

/// What is wanted of one start.
pub struct Order {
    pub kind: Kind,
    /// Where it is to run.
    pub request: Request,
    /// Name in logs: the site, or the tenant of a PHP worker.
    pub label: String,
    /// How many of this kind the tenant may have.
    pub per_tenant_max: u32,
    pub log: Budget,
    /// Where its lines are kept.
    pub journal: Option<Rc<Journal>>,
    /// Of a PHP worker.
    pub scripts: Option<Arc<ScriptRule>>,
}

/// All trees of this keeper.
pub struct Processes {
    cells: Arc<Cells>,
    workers: Workers,
    running: RefCell<HashMap<ProcessId, Rc<Process>>>,
    counts: RefCell<HashMap<(Kind, TenantName), u32>>,
    total: Cell<u32>,
    total_max: Cell<u32>,
    metrics: Metrics,
    next_id: Cell<u64>,
    closing: Cell<bool>,
    one_less: Notify,
    /// When a process was last moved.
    moved: Cell<Option<std::time::Instant>>,
}

/// One tree.
pub struct Process {
    id: ProcessId,
    pub kind: Kind,
    pub tenant: Arc<Tenant>,
    label: String,
    /// Of a child of the keeper's.
    pid: Option<Pid>,
    stay: Stay,
    end_wanted: Notify,
    /// Which scripts a PHP worker may be given.
    scripts: Option<Arc<ScriptRule>>,
    /// What it runs in.
    _enclosure: Option<Arc<Enclosure>>,
}

impl Process {
    fn expect_alive(&self) -> Result<(), Fault> {
        if self.stay.over.get() { Err(unknown(self.id)) } else { Ok(()) }
    }

    /// Whether nothing but the process itself is in its cell. A cell that cannot be read is taken to hold more.
    fn is_alone(&self) -> bool {
        self.stay.leaf().pids().is_ok_and(|pids| pids.iter().all(|pid| Some(*pid) == self.pid))
    }

    /// From now on the gate lets scripts of this site through to it, and no others.
    pub fn serve_scripts(&self, site: &SiteName, scripts: SiteScripts) {
        if let Some(rule) = &self.scripts {
            rule.set(site.clone(), Some(scripts));
        }
    }

    /// What it has used for its present request so far.
    pub fn usage(&self) -> Usage {
        self.stay.usage()
    }

    /// Where it is.
    pub fn cell(&self) -> String {
        self.stay.leaf().name().to_owned()
    }
}

fn unknown(id: ProcessId) -> Fault {
    Fault::new(Failure::NotFound, fault::UNKNOWN, format!("there is no process {} any more", id.0))
}

/// Holding it keeps the tree running.
pub struct Handle {
    process: Rc<Process>,
    end: watch::Receiver<Option<End>>,
}

/// How a tree ended, and what it used since it was last asked about.
pub type End = (Exit, Usage);

impl Handle {
    pub fn id(&self) -> ProcessId {
        self.process.id
    }

    /// Where it is.
    pub fn cell(&self) -> String {
        self.process.cell()
    }

    /// The cell itself.
    pub fn leaf(&self) -> Arc<Leaf> {
        self.process.stay.leaf()
    }

    /// Resolves once nothing of the tree is left.
    pub fn ended(&self) -> impl Future<Output = End> + use<> {
        let mut end = self.end.clone();
        async move {
            // The sender is gone only together with the runtime.
            end.wait_for(Option::is_some).await.ok().and_then(|end| *end).unwrap_or(UNKNOWN_END)
        }
    }
}

/// Of a tree that the kernel does not let go of.
const UNKNOWN_END: End = (
    Exit { status: None, signal: None, cpu_us: 0 },
    Usage { cpu_us: 0, read_bytes: 0, write_bytes: 0, throttled_us: 0, demoted: 0 },
);

impl Drop for Handle {
    fn drop(&mut self) {
        self.process.end_wanted.notify_one();
    }
}

/// Counts one tree until it is dropped.
struct Place {
    processes: Rc<Processes>,
    key: (Kind, TenantName),
}

impl Drop for Place {
    fn drop(&mut self) {
        let all = &self.processes;
        all.total.set(all.total.get() - 1);
        all.metrics.processes.add(-1);
        let mut counts = all.counts.borrow_mut();
        if let Some(count) = counts.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.key);
            }
        }
        all.one_less.notify_waiters();
    }
}

impl Processes {
    pub fn new(cells: Arc<Cells>, workers: Workers, metrics: Metrics, total_max: u32) -> Rc<Self> {
        Rc::new(Self {
            cells,
            workers,
            running: RefCell::default(),
            counts: RefCell::default(),
            total: Cell::new(0),
            total_max: Cell::new(total_max),
            metrics,
            next_id: Cell::new(1),
            closing: Cell::new(false),
            one_less: Notify::new(),
            moved: Cell::new(None),
        })
    }

    pub fn set_total_max(&self, total_max: u32) {
        self.total_max.set(total_max);
    }

    /// Everything is being ended.
    pub fn is_closing(&self) -> bool {
        self.closing.get()
    }

    pub fn cells(&self) -> &Arc<Cells> {
        &self.cells
    }

    /// A process that runs.
    pub fn find(&self, id: ProcessId) -> Result<Rc<Process>, Fault> {
        self.running.borrow().get(&id).cloned().ok_or_else(|| unknown(id))
    }

    /// How many of this kind run now, were ever started, and failed to start.
    pub fn numbers(&self, kind: Kind) -> (u32, u64, u64) {
        let counts = self.counts.borrow();
        let now = counts.iter().filter(|((of, _), _)| *of == kind).map(|(_, count)| count).sum();
        let at = [kind as usize];
        (now, self.metrics.started.get(at), self.metrics.failed.get(at))
    }

    /// Starts a tree. `make` runs on a worker thread. What runs when this future is dropped is ended.
    pub async fn start(
        self: &Rc<Self>,
        order: Order,
        make: impl FnOnce(&Leaf) -> Result<Started, Fault> + Send + 'static,
    ) -> Result<(Handle, Vec<OwnedFd>), Fault> {
        let place = self.take_place(&order)?;
        let leaf = self.cells.leaf(&order.request.home, order.request.confinement())?;
        let for_worker = Arc::clone(&leaf);
        let tenant = &order.request.home.tenant.name;
        let making = self.workers.start_for(tenant, move || make(&for_worker))?;
        let (answer, answered) = oneshot::channel();
        // A task of its own, because what the worker starts must be looked after even if the caller leaves.
        spawn_local(Rc::clone(self).live(order, place, leaf, making, answer));
        answered.await.unwrap_or_else(|_| {
            Err(Fault::new(
                Failure::Broken,
                fault::SPAWN,
                "starting it failed inside the keeper; see its log",
            ))
        })
    }

    fn take_place(self: &Rc<Self>, order: &Order) -> Result<Place, Fault> {
        let refuse = |why: String| Err(Fault::new(Failure::Busy, fault::LIMIT, why));
        if self.closing.get() {
            return refuse("the keeper is ending; its successor takes requests in a moment".into());
        }
        if self.total.get() >= self.total_max.get() {
            return refuse(format!(
                "{} processes run already, as many as this node allows",
                self.total.get()
            ));
        }
        let key = (order.kind, order.request.home.tenant.name.clone());
        let mut counts = self.counts.borrow_mut();
        let count = counts.get(&key).copied().unwrap_or(0);
        if count >= order.per_tenant_max {
            let kind = order.kind.as_str();
            return refuse(format!(
                "tenant '{}' has {count} {kind} processes, as many as it may have",
                order.request.home.tenant.name
            ));
        }
        counts.insert(key.clone(), count + 1);
        self.total.set(self.total.get() + 1);
        self.metrics.processes.add(1);
        Ok(Place { processes: Rc::clone(self), key })
    }

    /// The life of one tree, from its start until nothing is left of it.
    async fn live(
        self: Rc<Self>,
        order: Order,
        place: Place,
        leaf: Arc<Leaf>,
        making: oneshot::Receiver<Result<Started, Fault>>,
        answer: oneshot::Sender<Result<(Handle, Vec<OwnedFd>), Fault>>,
    ) {
        let started = match wait_started(making, &leaf, &order.label).await {
            Ok(started) => started,
            Err(fault) => {
                self.metrics.failed.add([order.kind as usize], 1);
                wait_removed(&leaf, &order.label, END_TIMEOUT).await;
                // Given back before the answer, so that who is told can ask again at once.
                drop(place);
                let _ = answer.send(Err(fault));
                return;
            }
        };
        self.metrics.started.add([order.kind as usize], 1);
        let id = ProcessId(self.next_id.replace(self.next_id.get() + 1));
        let process = Rc::new(Process {
            id,
            kind: order.kind,
            tenant: Arc::clone(&order.request.home.tenant),
            label: order.label,
            pid: started.root.pid(),
            stay: Stay::new(leaf, order.request),
            end_wanted: Notify::new(),
            scripts: order.scripts,
            _enclosure: started.enclosure,
        });
        self.running.borrow_mut().insert(id, Rc::clone(&process));
        if self.closing.get() {
            process.end_wanted.notify_one();
        }
        let who = format!("{} {}", process.kind.as_str(), process.label);
        let log = spawn_local(log::follow(started.log, who, order.log, order.journal));
        if process.kind == Kind::Cgi {
            self.watch(&process);
        }
        let (say_end, end) = watch::channel(None);
        // Who asked may have left; the handle is dropped then, which ends the tree.
        let _ = answer.send(Ok((Handle { process: Rc::clone(&process), end }, started.fds)));

        let mut ending = Ending { process: &process, root: started.root };
        let (end, gone) = ending.run().await;
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

    /// Acts on changed records: what `current` says of a worker's site is what it may be given.
    pub fn refresh_scripts(&self, current: impl Fn(&SiteName, &Tenant) -> Option<SiteScripts>) {
        for process in self.running.borrow().values() {
            if let Some(rule) = &process.scripts {
                let site = rule.site();
                let scripts = current(&site, &process.tenant);
                rule.set(site, scripts);
            }
        }
    }

    /// Ends trees this finds, e.g. those of a tenant that changed.
    pub fn end_where(&self, mut wanted: impl FnMut(&Process) -> bool) {
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
        let emptied = async {
            loop {
                let one_less = self.one_less.notified();
                if self.total.get() == 0 {
                    return;
                }
                one_less.await;
            }
        };
        let empty = timeout(within, emptied).await.is_ok();
        if !empty {
            // Whoever is still in its grace has none any more.
            for process in self.running.borrow().values() {
                let _ = process.stay.leaf().end(None);
            }
        }
        self.cells.close();
        empty
    }
}

/// A start that hangs is ended through its leaf, again and again, until the worker comes back from it.
async fn wait_started(
    mut making: oneshot::Receiver<Result<Started, Fault>>,
    leaf: &Leaf,
    label: &str,
) -> Result<Started, Fault> {
    loop {
        match timeout(START_TIMEOUT, &mut making).await {
            Ok(made) => {
                return made.unwrap_or_else(|_| {
                    let message = format!("starting '{label}' panicked inside the keeper");
                    Err(Fault::new(Failure::Broken, fault::SPAWN, message))
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

/// The last part of a tree's life.
struct Ending<'a> {
    process: &'a Process,
    root: Root,
}

impl Ending<'_> {
    /// Waits until the program ends or is to end, then ends the rest. The second value: all is gone.
    async fn run(&mut self) -> (End, bool) {
        let asked = self.wait_end().await;
        let (process, stay) = (self.process, &self.process.stay);
        // Until it is given back nobody moves the process, and its number is its own until it is reaped.
        let _turn = stay.turn.lock().await;
        stay.over.set(true);
        stay.stop_watch();
        let (leaf, label) = (stay.leaf(), &process.label);
        if let Err(error) = leaf.end(self.root.pid()) {
            tracing::warn!(program = label, %error, "its cgroup cannot be ended; ending the program alone");
        }
        if asked {
            // Where the cell could not be ended. Already dead is as good.
            let _ = self.root.kill();
        }
        let exit = self.reap(END_TIMEOUT).await;
        let removed = wait_removed(&leaf, label, END_TIMEOUT).await;
        // A cell that was given back knows what it had used when nothing ran in it any more.
        let usage = stay.usage();
        let gone = removed && timeout(END_TIMEOUT, stay.all_retired()).await.is_ok();
        ((exit.unwrap_or(UNKNOWN_END.0), usage), gone && exit.is_some())
    }

    /// Waits until the program ends or is to end. True: it is to end.
    async fn wait_end(&self) -> bool {
        // Registering fails only without memory for it; then the tree is ended instead of watched.
        let watched = sys::watch(self.root.end(), Interest::READABLE).ok();
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
        if asked {
            let is_kept = self.process.kind.is_kept();
            if !is_kept || self.root.signal(Signal::TERM).is_ok() {
                let _ = timeout(if is_kept { GRACE } else { LAST_STEPS }, &mut dies).await;
            }
        }
        asked
    }

    async fn reap(&self, within: Duration) -> Option<Exit> {
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

    /// A tree stuck in the kernel keeps its place until the kernel lets it go.
    async fn outwait(&self) {
        self.process.stay.all_retired().await;
        while !self.process.stay.leaf().release().unwrap_or(true) || matches!(self.root.try_reap(), Ok(None))
        {
            sleep(END_TIMEOUT).await;
        }
    }
}

/// True once nothing lives in the cell; what still does is killed again.
async fn wait_empty(leaf: &Leaf, label: &str, within: Duration) -> bool {
    // What cannot be read is looked at by `wait_removed`, which reports it.
    outlast(leaf, label, within, || leaf.pids().map_or(true, |pids| pids.is_empty())).await
}

/// True once nothing lives in the cell and it is given back; what still does is killed again.
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
        // It may be gone by now; the next look tells.
        let _ = leaf.end(None);
        sleep(pause).await;
        pause = (pause * 2).min(LOOK_AGAIN_MAX);
    }
}
