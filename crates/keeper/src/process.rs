//! The process trees that run now: each is started in its fence, watched, and ended as a whole.
//!
//! Whoever asked for a tree holds its `Handle`; dropping that ends the tree. Not here: what is started
//! (`spawn`), the fence itself (`tree`), who holds handles (`server`, `apps`).

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nagaya_cmdb::{Tenant, TenantName};
use rustix::process::{Signal, pidfd_send_signal};
use tokio::io::Interest;
use tokio::sync::{Notify, oneshot, watch};
use tokio::task::spawn_local;
use tokio::time::{Instant, sleep, timeout};

use crate::fault::{self, Fault};
use crate::log::{self, Budget};
use crate::metrics::Metrics;
use crate::protocol::{Exit, Failure, ProcessId};
use crate::spawn::Started;
use crate::sys::{self, Child};
use crate::tree::{Fence, LOOK_AGAIN_MAX, Leaf};
use crate::workers::Workers;

/// A program that has not begun to run after this is ended: a tenant may have stopped it on its way.
const START_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a kept program has after `SIGTERM`.
const GRACE: Duration = Duration::from_secs(2);

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
    pub tenant: Arc<Tenant>,
    /// Name in logs: the site, or the tenant of a PHP worker.
    pub label: String,
    /// How many of this kind the tenant may have.
    pub per_tenant_max: u32,
    pub log: Budget,
}

/// All trees of this keeper.
pub struct Processes {
    fence: Arc<Fence>,
    workers: Workers,
    running: RefCell<HashMap<ProcessId, Rc<Process>>>,
    counts: RefCell<HashMap<(Kind, TenantName), u32>>,
    total: Cell<u32>,
    total_max: Cell<u32>,
    metrics: Metrics,
    next_id: Cell<u64>,
    closing: Cell<bool>,
    one_less: Notify,
}

/// One tree.
pub struct Process {
    id: ProcessId,
    pub kind: Kind,
    pub tenant: Arc<Tenant>,
    label: String,
    leaf: Arc<Leaf>,
    end_wanted: Notify,
}

/// Holding it keeps the tree running.
pub struct Handle {
    process: Rc<Process>,
    exit: watch::Receiver<Option<Exit>>,
}

impl Handle {
    pub fn id(&self) -> ProcessId {
        self.process.id
    }

    /// Resolves once nothing of the tree is left.
    pub fn ended(&self) -> impl Future<Output = Exit> + use<> {
        let mut exit = self.exit.clone();
        async move {
            let unknown = Exit { status: None, signal: None, cpu_us: 0 };
            // The sender is gone only together with the runtime.
            exit.wait_for(Option::is_some).await.map_or(unknown, |exit| exit.unwrap_or(unknown))
        }
    }
}

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
    pub fn new(fence: Arc<Fence>, workers: Workers, metrics: Metrics, total_max: u32) -> Rc<Self> {
        Rc::new(Self {
            fence,
            workers,
            running: RefCell::default(),
            counts: RefCell::default(),
            total: Cell::new(0),
            total_max: Cell::new(total_max),
            metrics,
            next_id: Cell::new(1),
            closing: Cell::new(false),
            one_less: Notify::new(),
        })
    }

    pub fn set_total_max(&self, total_max: u32) {
        self.total_max.set(total_max);
    }

    pub fn fence(&self) -> &Fence {
        &self.fence
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
        let leaf = self.fence.leaf().map(Arc::new).map_err(|error| {
            Fault::new(
                Failure::Broken,
                fault::SPAWN,
                format!("cannot make a cgroup for '{}': {error}", order.label),
            )
        })?;
        let for_worker = Arc::clone(&leaf);
        let making = self.workers.run(move || make(&for_worker))?;
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
        let key = (order.kind, order.tenant.name.clone());
        let mut counts = self.counts.borrow_mut();
        let count = counts.get(&key).copied().unwrap_or(0);
        if count >= order.per_tenant_max {
            let kind = order.kind.as_str();
            return refuse(format!(
                "tenant '{}' has {count} {kind} processes, as many as it may have",
                order.tenant.name
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
            tenant: order.tenant,
            label: order.label,
            leaf,
            end_wanted: Notify::new(),
        });
        self.running.borrow_mut().insert(id, Rc::clone(&process));
        if self.closing.get() {
            process.end_wanted.notify_one();
        }
        let who = format!("{} {}", process.kind.as_str(), process.label);
        let log = spawn_local(log::follow(started.log, who, order.log));
        let (say_exit, exit) = watch::channel(None);
        // Who asked may have left; the handle is dropped then, which ends the tree.
        let _ = answer.send(Ok((Handle { process: Rc::clone(&process), exit }, started.fds)));

        let mut ending = Ending { process: &process, child: started.child };
        let (exit, gone) = ending.run().await;
        let log_end = log.abort_handle();
        if timeout(LOG_TIMEOUT, log).await.is_err() {
            log_end.abort();
        }
        self.running.borrow_mut().remove(&id);
        let _ = say_exit.send(Some(exit));
        if !gone {
            ending.outwait().await;
        }
        drop(place);
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
                let _ = process.leaf.end(None);
            }
        }
        self.fence.close();
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
    child: Child,
}

impl Ending<'_> {
    /// Waits until the program ends or is to end, then ends the rest. The second value: all is gone.
    async fn run(&mut self) -> (Exit, bool) {
        let pidfd = self.child.pidfd.as_fd();
        // Registering fails only without memory for it; then the tree is ended instead of watched.
        let watched = sys::watch(pidfd, Interest::READABLE).ok();
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
        if asked && self.process.kind.is_kept() && pidfd_send_signal(pidfd, Signal::TERM).is_ok() {
            let _ = timeout(GRACE, &mut dies).await;
        }
        let label = &self.process.label;
        if let Err(error) = self.process.leaf.end(Some(self.child.pid)) {
            tracing::warn!(program = label, %error, "its cgroup cannot be ended; ending the program alone");
            // Already dead is as good.
            let _ = pidfd_send_signal(pidfd, Signal::KILL);
        }
        let exit = self.reap(END_TIMEOUT).await;
        let gone = wait_removed(&self.process.leaf, label, END_TIMEOUT).await;
        let unknown = Exit { status: None, signal: None, cpu_us: 0 };
        (exit.unwrap_or(unknown), gone && exit.is_some())
    }

    async fn reap(&self, within: Duration) -> Option<Exit> {
        let pidfd = self.child.pidfd.as_fd();
        let until = Instant::now() + within;
        let mut pause = Duration::from_millis(1);
        loop {
            match sys::try_reap(pidfd) {
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
        while !self.process.leaf.remove().unwrap_or(true)
            || matches!(sys::try_reap(self.child.pidfd.as_fd()), Ok(None))
        {
            sleep(END_TIMEOUT).await;
        }
    }
}

/// True once the leaf is gone; what still lives in it is killed again.
async fn wait_removed(leaf: &Leaf, label: &str, within: Duration) -> bool {
    let until = Instant::now() + within;
    let mut pause = Duration::from_millis(1);
    loop {
        match leaf.remove() {
            Ok(true) => return true,
            Ok(false) if Instant::now() < until => {
                // It may be gone by now; the next `remove` tells.
                let _ = leaf.end(None);
                sleep(pause).await;
            }
            Ok(false) => {
                let code = fault::UNKILLABLE;
                tracing::error!(program = label, "{code}: processes survived SIGKILL for {within:?}");
                return false;
            }
            Err(error) => {
                tracing::error!(program = label, %error, "its cgroup cannot be removed");
                return true;
            }
        }
        pause = (pause * 2).min(LOOK_AGAIN_MAX);
    }
}
