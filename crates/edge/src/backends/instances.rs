//! Manages one edge thread's use of instances. The thread requests each instance once, however
//! many requests wait for it. It keeps the instance while a request needs it, and gives it back
//! soon after.
//!
//! A request that needs an instance has an [`InstanceRef`] on it. It has it from the moment its
//! site is known until its body has ended. So a wake goes on while the request waits its turn. An
//! upgraded connection keeps its instance until it closes. Not here: waking and resting (`keeper`),
//! messages to an instance (`upstream`), reports of a wake (`receipt`).

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nagaya_base::RequestId;
use nagaya_keeper_api::client::{InstanceGuard, InstanceUse, KeeperCallError, KeeperClient};
use nagaya_keeper_api::database_waits::{DatabaseWaitsReader, now_us};
use nagaya_keeper_api::protocol::{FailureKind, InstanceId};
use nagaya_records::SiteName;
use nagaya_records::instance::WakeReport;
use tokio::sync::{Notify, watch};
use tokio::task::{AbortHandle, spawn_local};
use tokio::time::{Instant, sleep, timeout_at};

use crate::backends::instances::demand::{DemandTable, ThreadDemand};
use crate::backends::upstream::pool::{
    Connector, UpstreamAddress, UpstreamPool, UpstreamSocket, watch_socket,
};
use crate::http::refusal::Refusal;
use crate::metrics::EdgeMetrics;
use crate::record::turnaround::Turnaround;

/// Time from its last request until a thread closes its connections to an instance. The thread
/// then tells the keeper that it may rest: with the keeper's `quiet_ms` it is quiet after 100 ms.
/// The requests of one page come closer together, and share one use of the instance.
pub const LEAVE_AFTER: Duration = Duration::from_millis(50);

/// Maximum number of attempts while the keeper restarts, with this pause: about two seconds.
const KEEPER_TRIES_MAX: u32 = 20;
const KEEPER_PAUSE: Duration = Duration::from_millis(100);

/// The instances one thread uses.
pub struct InstanceTable {
    keeper: Rc<KeeperClient>,
    pool: Rc<UpstreamPool>,
    metrics: Arc<EdgeMetrics>,
    needs: Arc<DemandTable>,
    /// Instances that are requested or awake. Failed or lost ones are removed: the next request
    /// asks again.
    uses: RefCell<HashMap<SiteName, Rc<ThreadInstance>>>,
}

/// One site's instance, as this thread uses it.
struct ThreadInstance {
    site: SiteName,
    /// In a cluster: epoch of the placement at the request for it.
    epoch: Option<u64>,
    phase: watch::Sender<InstancePhase>,
    /// Number of requests that need it.
    holds: Cell<u32>,
    /// Time since when no request needs it.
    idle_since: Cell<Instant>,
    /// It has ended, or is to end here, or the keeper that knew of this use has ended.
    is_lost: Cell<bool>,
    /// The task that requests and then tends it waits for `turn` and for nothing else.
    is_parked: Cell<bool>,
    turn: Notify,
    /// Keeps it awake.
    guard: RefCell<Option<InstanceGuard>>,
    /// The questions that the instance asks databases. `None` if it can reach none.
    tally: RefCell<Option<Rc<DatabaseWaitsReader>>>,
    /// The connection that came with the answer, until a request takes it.
    first: RefCell<Option<OwnedFd>>,
    /// Its cell, if its processes serve several requests at once. Then no request gets a cell of
    /// its own.
    shared_cell: RefCell<Option<Box<str>>>,
    task: RefCell<Option<AbortHandle>>,
    share: ThreadDemand,
}

#[derive(Debug, Clone)]
enum InstancePhase {
    Asked,
    Awake { instance: InstanceId, wake: Option<Arc<WakeReport>> },
    Failed(KeeperCallError),
}

impl InstanceTable {
    pub fn new(
        keeper: Rc<KeeperClient>,
        pool: Rc<UpstreamPool>,
        metrics: Arc<EdgeMetrics>,
        needs: Arc<DemandTable>,
    ) -> Rc<Self> {
        Rc::new(Self { keeper, pool, metrics, needs, uses: RefCell::default() })
    }

    /// Returns a hold on the instance of this site. It is requested now, unless this thread uses
    /// or has requested it. In a cluster, the hold is for this epoch.
    pub fn hold(self: &Rc<Self>, site: &SiteName, epoch: Option<u64>) -> InstanceRef {
        let used = self.used(site, epoch);
        let waits = matches!(*used.phase.borrow(), InstancePhase::Asked);
        used.take();
        InstanceRef {
            instances: Rc::clone(self),
            used: RefCell::new(used),
            waits: Cell::new(waits),
            mark: RefCell::default(),
        }
    }

    fn used(self: &Rc<Self>, site: &SiteName, epoch: Option<u64>) -> Rc<ThreadInstance> {
        if let Some(used) = self.uses.borrow().get(site)
            && used.epoch >= epoch
            && self.is_kept(used)
        {
            return Rc::clone(used);
        }
        let used = Rc::new(ThreadInstance {
            site: site.clone(),
            epoch,
            phase: watch::Sender::new(InstancePhase::Asked),
            holds: Cell::new(0),
            idle_since: Cell::new(Instant::now()),
            is_lost: Cell::new(false),
            is_parked: Cell::new(false),
            turn: Notify::new(),
            guard: RefCell::default(),
            tally: RefCell::default(),
            first: RefCell::default(),
            shared_cell: RefCell::default(),
            task: RefCell::default(),
            share: self.needs.share(site),
        });
        if let Some(lost) = self.uses.borrow_mut().insert(site.clone(), Rc::clone(&used)) {
            lost.lose();
        }
        let task = spawn_local(Rc::clone(self).live(Rc::clone(&used)));
        *used.task.borrow_mut() = Some(task.abort_handle());
        used
    }

    /// Gives instances of these sites back as soon as no request needs them, without the usual
    /// delay.
    pub fn give_up(&self, leaves: impl Fn(&SiteName) -> bool) {
        self.uses.borrow().values().filter(|used| leaves(&used.site)).for_each(|used| used.lose());
    }

    /// Returns whether the keeper still knows that this thread uses it. A keeper that restarted
    /// does not.
    fn is_kept(&self, used: &ThreadInstance) -> bool {
        match &*used.phase.borrow() {
            InstancePhase::Asked => true,
            InstancePhase::Awake { .. } => {
                used.guard.borrow().as_ref().is_some_and(|guard| self.keeper.knows(guard))
            }
            InstancePhase::Failed(_) => false,
        }
    }

    /// Requests it, and gives it back when no request needs it any more.
    async fn live(self: Rc<Self>, used: Rc<ThreadInstance>) {
        let InstanceUse { socket, guard, tally, wake } = match self.ask(&used).await {
            Ok(using) => using,
            Err(error) => {
                self.forget(&used);
                used.phase.send_replace(InstancePhase::Failed(error));
                return;
            }
        };
        let instance = guard.id();
        if let Some(wake) = &wake {
            self.metrics.wake(wake);
        }
        *used.guard.borrow_mut() = Some(guard);
        *used.tally.borrow_mut() = tally.map(Rc::new);
        // No request is about to use it. Left open, it would occupy a program that serves one
        // connection after the other.
        let is_waited_for = used.phase.receiver_count() > 0;
        *used.first.borrow_mut() = is_waited_for.then_some(socket);
        used.phase.send_replace(InstancePhase::Awake { instance, wake: wake.map(Arc::new) });
        used.until_needless().await;
        self.forget(&used);
        // The keeper may let it rest soon after this. No request may wait for an answer on these
        // connections.
        used.first.take();
        self.pool.forget(&UpstreamAddress::Instance(instance));
        used.guard.take();
    }

    /// Requests the instance. The waiting requests have sent nothing yet, so it waits for a
    /// keeper that restarts. It also waits until the keeper has learned that this node may run
    /// the placement.
    async fn ask(&self, used: &ThreadInstance) -> Result<InstanceUse, KeeperCallError> {
        for _ in 1..KEEPER_TRIES_MAX {
            match self.keeper.use_instance(&used.site, used.epoch).await {
                Err(
                    KeeperCallError::Gone | KeeperCallError::Refused { failure: FailureKind::Fenced, .. },
                ) => {
                    sleep(KEEPER_PAUSE).await;
                }
                asked => return asked,
            }
        }
        self.keeper.use_instance(&used.site, used.epoch).await
    }

    /// Removes it from the table, unless another one has replaced it.
    fn forget(&self, used: &Rc<ThreadInstance>) {
        let mut uses = self.uses.borrow_mut();
        if uses.get(&used.site).is_some_and(|listed| Rc::ptr_eq(listed, used)) {
            uses.remove(&used.site);
        }
    }
}

impl ThreadInstance {
    /// Waits until no request has needed it for `LEAVE_AFTER`. A lost one is left at once when no
    /// request needs it.
    async fn until_needless(&self) {
        loop {
            if self.holds.get() > 0 {
                self.is_parked.set(true);
                self.turn.notified().await;
                self.is_parked.set(false);
                continue;
            }
            let until = self.idle_since.get() + LEAVE_AFTER;
            if self.is_lost.get() || until <= Instant::now() {
                return;
            }
            // A loss ends the wait early. Requests that come and go meanwhile only move
            // `idle_since`.
            let _ = timeout_at(until, self.turn.notified()).await;
        }
    }

    fn is_awake(&self, this: InstanceId) -> bool {
        matches!(*self.phase.borrow(), InstancePhase::Awake { instance, .. } if instance == this)
    }

    fn lose(&self) {
        self.is_lost.set(true);
        self.turn.notify_one();
    }

    /// Counts one more request.
    fn take(&self) {
        self.holds.set(self.holds.get() + 1);
        self.share.begin();
    }

    /// Counts one request less. Returns true if it was the last one, and there is no answer yet.
    fn release(&self) -> bool {
        self.holds.set(self.holds.get() - 1);
        self.share.end();
        if self.holds.get() > 0 {
            return false;
        }
        self.idle_since.set(Instant::now());
        if self.is_parked.get() {
            self.turn.notify_one();
        }
        matches!(*self.phase.borrow(), InstancePhase::Asked)
    }
}

/// A request's need of an instance.
pub struct InstanceRef {
    instances: Rc<InstanceTable>,
    used: RefCell<Rc<ThreadInstance>>,
    /// The instance was not awake yet when the request arrived.
    waits: Cell<bool>,
    /// The state when the request was sent to it.
    mark: RefCell<Option<WaitBaseline>>,
}

/// The state just before a request is sent. It yields the questions that are the request's own.
struct WaitBaseline {
    tally: Rc<DatabaseWaitsReader>,
    sent_us: u64,
    /// Number of questions before it.
    questions: u64,
    /// `None` if another request had the instance then.
    alone: Option<u64>,
}

/// An instance that can answer.
#[derive(Debug, Clone)]
pub struct AwakeInstance {
    pub instance: InstanceId,
    /// The wake, if the request arrived before the instance was awake.
    pub wake: Option<Arc<WakeReport>>,
}

impl InstanceRef {
    /// Waits until the instance can answer.
    pub async fn awake(&self) -> Result<AwakeInstance, Refusal> {
        let used = Rc::clone(&self.used.borrow());
        if let InstancePhase::Awake { instance, wake } = &*used.phase.borrow() {
            return Ok(self.found(*instance, wake.as_ref()));
        }
        let _waiting = matches!(*used.phase.borrow(), InstancePhase::Asked).then(|| used.share.wait());
        let mut phase = used.phase.subscribe();
        let phase = phase.wait_for(|phase| !matches!(phase, InstancePhase::Asked)).await;
        match phase.as_deref() {
            Ok(InstancePhase::Awake { instance, wake }) => Ok(self.found(*instance, wake.as_ref())),
            Ok(InstancePhase::Failed(error)) => Err(refuse(error.clone())),
            // The sender is in `used`, which this holds. Only a thread that ends drops its tasks.
            Ok(InstancePhase::Asked) | Err(_) => Err(Refusal::Overloaded("the node is being stopped")),
        }
    }

    /// Records that the answer to this request begins. A wait for the wake of this instance is
    /// then over.
    pub fn answered(&self, instance: InstanceId) {
        if self.waits.get() {
            self.instances.keeper.answered(instance);
        }
    }

    /// Records that the request is sent to the instance now.
    pub fn sends(&self) {
        let mark = self.mark();
        self.mark.replace(mark);
    }

    /// Splits the time since the request was sent by its questions to databases. All questions of
    /// the instance are the request's if no other request has needed it since then. Otherwise those
    /// are that name it. `None` if none does, if there were too many, or if the instance can reach
    /// no database.
    pub fn turnaround(&self, id: RequestId) -> Option<Turnaround> {
        let mark = self.mark.borrow();
        let WaitBaseline { tally, sent_us, questions, alone } = mark.as_ref()?;
        let now_us = now_us();
        let mut asked = tally.questions(*questions, tally.read()?.questions)?;
        if alone.is_none() || self.used.borrow().share.alone() != *alone {
            asked.retain(|question| question.request == Some(id.0));
            if asked.is_empty() {
                return None;
            }
        }
        Some(Turnaround::of(&asked, *sent_us, now_us))
    }

    fn mark(&self) -> Option<WaitBaseline> {
        let used = self.used.borrow();
        let tally = used.tally.borrow().clone()?;
        let (alone, questions) = (used.share.alone(), tally.read()?.questions);
        Some(WaitBaseline { tally, sent_us: now_us(), questions, alone })
    }

    fn found(&self, instance: InstanceId, wake: Option<&Arc<WakeReport>>) -> AwakeInstance {
        AwakeInstance { instance, wake: wake.filter(|_| self.waits.get()).cloned() }
    }

    /// Returns the cell of this instance, if it is known that no request gets one of its own.
    pub fn shared_cell(&self, instance: InstanceId) -> Option<Box<str>> {
        let used = self.used.borrow();
        if used.is_awake(instance) { used.shared_cell.borrow().clone() } else { None }
    }

    /// Records that no request gets a cell of its own.
    pub fn set_shared(&self, instance: InstanceId, cell: Box<str>) {
        let used = self.used.borrow();
        if used.is_awake(instance) {
            used.shared_cell.replace(Some(cell));
        }
    }

    /// Requests the instance again after a connection to `ended` broke before any response. The
    /// instance may have ended. It is requested once for all requests that noticed.
    pub fn renew(&self, ended: InstanceId) {
        let mut held = self.used.borrow_mut();
        if held.is_awake(ended) {
            self.instances.forget(&held);
            held.lose();
        }
        let next = self.instances.used(&held.site, held.epoch);
        next.take();
        self.waits.set(matches!(*next.phase.borrow(), InstancePhase::Asked));
        self.give_back(&std::mem::replace(&mut *held, next));
    }

    fn give_back(&self, used: &Rc<ThreadInstance>) {
        if used.release() {
            // No request waits for the answer. The task and its question end together, and a late
            // answer is given back.
            self.instances.forget(used);
            if let Some(task) = used.task.take() {
                task.abort();
            }
        }
    }
}

impl Drop for InstanceRef {
    fn drop(&mut self) {
        self.give_back(&self.used.borrow());
    }
}

impl Connector for InstanceRef {
    async fn connect(&self, address: &UpstreamAddress) -> Result<UpstreamSocket, Refusal> {
        let UpstreamAddress::Instance(instance) = address else {
            return Err(Refusal::SiteBroken("an instance has no other address".into()));
        };
        let used = Rc::clone(&self.used.borrow());
        let first = used.first.take();
        let socket = match first {
            Some(socket) => socket,
            None => self.instances.keeper.connect_instance(*instance).await.map_err(refuse)?,
        };
        watch_socket(socket).map_err(|error| Refusal::BackendUnreachable(error.to_string()))
    }
}

fn refuse(error: KeeperCallError) -> Refusal {
    match error {
        KeeperCallError::Refused { failure: FailureKind::Busy, message, .. } => {
            tracing::debug!("{message}");
            Refusal::Overloaded("the application restarts")
        }
        KeeperCallError::Refused { failure: FailureKind::Fenced, message, .. } => {
            tracing::debug!("{message}");
            Refusal::Fenced
        }
        KeeperCallError::Elsewhere { message, .. } => {
            tracing::debug!("{message}");
            Refusal::Moved
        }
        KeeperCallError::Refused { message, .. } => Refusal::BackendUnreachable(message),
        KeeperCallError::Gone => Refusal::Overloaded("the keeper restarts"),
        KeeperCallError::TimedOut => Refusal::BackendTimeout,
    }
}

pub mod demand;
#[cfg(test)]
mod tests;
