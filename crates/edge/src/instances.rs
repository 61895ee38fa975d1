//! One edge thread's use of instances: asked for once however many requests wait for it, kept while one of them needs it,
//! given back soon after.
//!
//! A request that needs an instance has a [`Hold`] on it from the moment its site is known until its body has ended, so a
//! wake goes on while the request waits its turn, and an upgraded connection keeps its instance for as long as it lives.
//! Not here: waking and resting (`keeper`), what is said to an instance (`upstream`), telling of a wake (`receipt`).

mod needs;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nagaya_cmdb::SiteName;
use nagaya_cmdb::instance::Wake;
use nagaya_keeper::client::{ClientError, InstanceGuard, InstanceUse, Keeper};
use nagaya_keeper::protocol::{Failure, InstanceId};
use nagaya_keeper::tally::{TallyReader, Totals};
use tokio::sync::{Notify, watch};
use tokio::task::{AbortHandle, spawn_local};
use tokio::time::{Instant, sleep, timeout_at};

use crate::metrics::Metrics;
use crate::refusal::Refusal;
pub use needs::Needs;
use needs::Share;

use crate::upstream::{Address, Connector, Pool, Socket, watch_socket};

/// So long after the last request that needed it, a thread closes its connections to an instance and tells the keeper that
/// it may rest. Long enough that a browser's next request finds them open, short against the first step of rest.
pub const LEAVE_AFTER: Duration = Duration::from_millis(500);

/// A keeper that is started anew is waited for this often, with this pause: about two seconds.
const KEEPER_TRIES_MAX: u32 = 20;
const KEEPER_PAUSE: Duration = Duration::from_millis(100);

/// The instances one thread uses.
pub struct Instances {
    keeper: Rc<Keeper>,
    pool: Rc<Pool>,
    metrics: Arc<Metrics>,
    needs: Arc<Needs>,
    /// Asked for, or awake. What failed or was lost is not here any more: the next request asks anew.
    uses: RefCell<HashMap<SiteName, Rc<Use>>>,
}

/// One site's instance, as this thread uses it.
struct Use {
    site: SiteName,
    /// In a cluster: the placement's when it was asked for.
    epoch: Option<u64>,
    phase: watch::Sender<Phase>,
    /// Requests that need it.
    holds: Cell<u32>,
    /// Since when none does.
    idle_since: Cell<Instant>,
    /// It has ended, or is to end here, or the keeper that knew of this use has ended.
    is_lost: Cell<bool>,
    /// The task that asks and then tends waits for `turn` and for nothing else.
    is_parked: Cell<bool>,
    turn: Notify,
    /// Keeps it awake.
    guard: RefCell<Option<InstanceGuard>>,
    /// How long the instance waits for databases. None: it can reach none.
    tally: RefCell<Option<Rc<TallyReader>>>,
    /// The connection that came with the answer, until somebody takes it.
    first: RefCell<Option<OwnedFd>>,
    /// Its cell, if its processes serve several requests at once: then no request gets one of its own.
    shared_cell: RefCell<Option<Box<str>>>,
    task: RefCell<Option<AbortHandle>>,
    share: Share,
}

#[derive(Debug, Clone)]
enum Phase {
    Asked,
    Awake { instance: InstanceId, wake: Option<Arc<Wake>> },
    Failed(ClientError),
}

impl Instances {
    pub fn new(keeper: Rc<Keeper>, pool: Rc<Pool>, metrics: Arc<Metrics>, needs: Arc<Needs>) -> Rc<Self> {
        Rc::new(Self { keeper, pool, metrics, needs, uses: RefCell::default() })
    }

    /// A request needs the instance of this site: it is asked for now, unless this thread uses it or has asked already. In a
    /// cluster: the one under this epoch.
    pub fn hold(self: &Rc<Self>, site: &SiteName, epoch: Option<u64>) -> Hold {
        let used = self.used(site, epoch);
        let waits = matches!(*used.phase.borrow(), Phase::Asked);
        used.take();
        Hold {
            instances: Rc::clone(self),
            used: RefCell::new(used),
            waits: Cell::new(waits),
            mark: RefCell::default(),
        }
    }

    fn used(self: &Rc<Self>, site: &SiteName, epoch: Option<u64>) -> Rc<Use> {
        if let Some(used) = self.uses.borrow().get(site)
            && used.epoch >= epoch
            && self.is_kept(used)
        {
            return Rc::clone(used);
        }
        let used = Rc::new(Use {
            site: site.clone(),
            epoch,
            phase: watch::Sender::new(Phase::Asked),
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

    /// Instances of these sites are given back as soon as no request needs them, and not only when none has for a while.
    pub fn give_up(&self, leaves: impl Fn(&SiteName) -> bool) {
        self.uses.borrow().values().filter(|used| leaves(&used.site)).for_each(|used| used.lose());
    }

    /// Whether the keeper still knows that this thread uses it: one that was started anew does not.
    fn is_kept(&self, used: &Use) -> bool {
        match &*used.phase.borrow() {
            Phase::Asked => true,
            Phase::Awake { .. } => used.guard.borrow().as_ref().is_some_and(|guard| self.keeper.knows(guard)),
            Phase::Failed(_) => false,
        }
    }

    /// Asks for it, and gives it back when nobody needs it any more.
    async fn live(self: Rc<Self>, used: Rc<Use>) {
        let InstanceUse { socket, guard, tally, wake } = match self.ask(&used).await {
            Ok(using) => using,
            Err(error) => {
                self.forget(&used);
                used.phase.send_replace(Phase::Failed(error));
                return;
            }
        };
        let instance = guard.id();
        if let Some(wake) = &wake {
            self.metrics.wake(wake);
        }
        *used.guard.borrow_mut() = Some(guard);
        *used.tally.borrow_mut() = tally.map(Rc::new);
        // Nobody is about to use it: left open, it would occupy a program that serves one connection after the other.
        let is_waited_for = used.phase.receiver_count() > 0;
        *used.first.borrow_mut() = is_waited_for.then_some(socket);
        used.phase.send_replace(Phase::Awake { instance, wake: wake.map(Arc::new) });
        used.until_needless().await;
        self.forget(&used);
        // The keeper may let it rest from the next line but one on: nobody may wait for an answer on these.
        used.first.take();
        self.pool.forget(&Address::Instance(instance));
        used.guard.take();
    }

    /// Nothing has been sent of the requests that wait, so a keeper that went is waited for, and one that has not heard yet
    /// that this node may run what is placed on it.
    async fn ask(&self, used: &Use) -> Result<InstanceUse, ClientError> {
        for _ in 1..KEEPER_TRIES_MAX {
            match self.keeper.use_instance(&used.site, used.epoch).await {
                Err(ClientError::Gone | ClientError::Refused { failure: Failure::Fenced, .. }) => {
                    sleep(KEEPER_PAUSE).await;
                }
                asked => return asked,
            }
        }
        self.keeper.use_instance(&used.site, used.epoch).await
    }

    /// Takes it off the list, unless another has its place already.
    fn forget(&self, used: &Rc<Use>) {
        let mut uses = self.uses.borrow_mut();
        if uses.get(&used.site).is_some_and(|listed| Rc::ptr_eq(listed, used)) {
            uses.remove(&used.site);
        }
    }
}

impl Use {
    /// Waits until no request has needed it for `LEAVE_AFTER`; for one that is lost, until none does.
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
            // A loss ends the wait early; requests that come and go meanwhile only move `idle_since`.
            let _ = timeout_at(until, self.turn.notified()).await;
        }
    }

    fn is_awake(&self, this: InstanceId) -> bool {
        matches!(*self.phase.borrow(), Phase::Awake { instance, .. } if instance == this)
    }

    fn lose(&self) {
        self.is_lost.set(true);
        self.turn.notify_one();
    }

    /// One request more needs it.
    fn take(&self) {
        self.holds.set(self.holds.get() + 1);
        self.share.begin();
    }

    /// One request fewer needs it. True: it was the last one, and there is no answer yet.
    fn let_go(&self) -> bool {
        self.holds.set(self.holds.get() - 1);
        self.share.end();
        if self.holds.get() > 0 {
            return false;
        }
        self.idle_since.set(Instant::now());
        if self.is_parked.get() {
            self.turn.notify_one();
        }
        matches!(*self.phase.borrow(), Phase::Asked)
    }
}

/// A request's need of an instance.
pub struct Hold {
    instances: Rc<Instances>,
    used: RefCell<Rc<Use>>,
    /// It was not awake yet when the request came.
    waits: Cell<bool>,
    /// When the instance could answer.
    mark: RefCell<Option<Mark>>,
}

/// What was known when a request was about to be sent, so that its part in the instance's waits can be told.
struct Mark {
    tally: Rc<TallyReader>,
    before: Totals,
    alone: u64,
}

/// An instance that can answer.
#[derive(Debug, Clone)]
pub struct Awake {
    pub instance: InstanceId,
    /// If the request came before it was awake: what waking it took.
    pub wake: Option<Arc<Wake>>,
}

impl Hold {
    /// Waits until the instance can answer.
    pub async fn awake(&self) -> Result<Awake, Refusal> {
        let used = Rc::clone(&self.used.borrow());
        if let Phase::Awake { instance, wake } = &*used.phase.borrow() {
            return Ok(self.found(*instance, wake.as_ref()));
        }
        let _waiting = matches!(*used.phase.borrow(), Phase::Asked).then(|| used.share.wait());
        let mut phase = used.phase.subscribe();
        let phase = phase.wait_for(|phase| !matches!(phase, Phase::Asked)).await;
        match phase.as_deref() {
            Ok(Phase::Awake { instance, wake }) => Ok(self.found(*instance, wake.as_ref())),
            Ok(Phase::Failed(error)) => Err(refuse(error.clone())),
            // The sender is in `used`, which this holds; and only a thread that ends drops its tasks.
            Ok(Phase::Asked) | Err(_) => Err(Refusal::Overloaded("the node is being stopped")),
        }
    }

    /// This request begins to be answered: if it has waited for the wake of this instance, that is over.
    pub fn answered(&self, instance: InstanceId) {
        if self.waits.get() {
            self.instances.keeper.answered(instance);
        }
    }

    /// How long the instance has waited for databases since it could answer this request, if no other request has needed it
    /// since then. None: another has, or it can reach no database.
    pub fn database_time(&self) -> Option<Duration> {
        let mark = self.mark.borrow();
        let Mark { tally, before, alone } = mark.as_ref()?;
        if self.used.borrow().share.alone() != Some(*alone) {
            return None;
        }
        Some(Duration::from_micros(tally.read()?.waited_us.saturating_sub(before.waited_us)))
    }

    fn mark(&self) -> Option<Mark> {
        let used = self.used.borrow();
        let tally = used.tally.borrow().clone()?;
        let alone = used.share.alone()?;
        let before = tally.read()?;
        Some(Mark { tally, before, alone })
    }

    fn found(&self, instance: InstanceId, wake: Option<&Arc<Wake>>) -> Awake {
        let mark = self.mark();
        self.mark.replace(mark);
        Awake { instance, wake: wake.filter(|_| self.waits.get()).cloned() }
    }

    /// The cell of this instance, if it is known that no request gets one of its own.
    pub fn shared_cell(&self, instance: InstanceId) -> Option<Box<str>> {
        let used = self.used.borrow();
        if used.is_awake(instance) { used.shared_cell.borrow().clone() } else { None }
    }

    /// Remembers that none does.
    pub fn set_shared(&self, instance: InstanceId, cell: Box<str>) {
        let used = self.used.borrow();
        if used.is_awake(instance) {
            used.shared_cell.replace(Some(cell));
        }
    }

    /// A connection to `ended` broke before it had said anything, so the instance may have ended: it is asked for anew,
    /// once for all requests that noticed.
    pub fn renew(&self, ended: InstanceId) {
        let mut held = self.used.borrow_mut();
        if held.is_awake(ended) {
            self.instances.forget(&held);
            held.lose();
        }
        let next = self.instances.used(&held.site, held.epoch);
        next.take();
        self.waits.set(matches!(*next.phase.borrow(), Phase::Asked));
        self.give_back(&std::mem::replace(&mut *held, next));
    }

    fn give_back(&self, used: &Rc<Use>) {
        if used.let_go() {
            // Nobody waits for the answer: with the task goes the question, and what still comes is given back.
            self.instances.forget(used);
            if let Some(task) = used.task.take() {
                task.abort();
            }
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.give_back(&self.used.borrow());
    }
}

impl Connector for Hold {
    async fn connect(&self, address: &Address) -> Result<Socket, Refusal> {
        let Address::Instance(instance) = address else {
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

fn refuse(error: ClientError) -> Refusal {
    match error {
        ClientError::Refused { failure: Failure::Busy, message, .. } => {
            tracing::debug!("{message}");
            Refusal::Overloaded("the application restarts")
        }
        ClientError::Refused { failure: Failure::Fenced, message, .. } => {
            tracing::debug!("{message}");
            Refusal::Fenced
        }
        ClientError::Elsewhere { message, .. } => {
            tracing::debug!("{message}");
            Refusal::Moved
        }
        ClientError::Refused { message, .. } => Refusal::BackendUnreachable(message),
        ClientError::Gone => Refusal::Overloaded("the keeper restarts"),
        ClientError::TimedOut => Refusal::BackendTimeout,
    }
}

#[cfg(test)]
mod tests;
