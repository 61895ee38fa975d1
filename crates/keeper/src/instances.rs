//! Instances: each site's application, woken when a request needs it, resting when none does.
//!
//! What happens is told to the instance's `lifecycle`, which says what to do; here it is done, on the keeper's one thread,
//! with tasks for what takes time. Each instance has a number of its own and counts its runs, so the id of a run says
//! which instance it is of. Not here: who asks (`server`), starting (`start`), resting (`rest`), HTTP (`edge`).

mod acts;
mod address;
mod after_wake;
mod alarms;
mod boosts;
pub(crate) mod carried;
mod collection;
mod costs;
mod door;
mod driver;
mod exec;
pub(crate) mod get;
pub(crate) mod holder;
mod housing;
mod lateness;
mod ledger;
mod lifecycle;
mod load;
mod measured;
mod placed;
mod policy;
mod precedence;
mod pressure;
mod rest;
mod restarts;
mod seats;
mod show;
mod start;
mod surroundings;
mod transfer;
mod wakes;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nagaya_cmdb::cell::Boost;
use nagaya_cmdb::instance::{Stage, Tier, Wake};
use nagaya_cmdb::record::App;
use nagaya_cmdb::{Backend, Site, SiteName, Tenant, TenantName};
use tokio::sync::{Notify, oneshot, watch};
use tokio::time::timeout;

use crate::bases::{Bases, Bounds, Unpacked};
use crate::engine::{Engine, same_runner, wrong_kind};
use crate::fault::{self, Fault};
use crate::image::{Image, Images, Subject};
use crate::log::{Journal, Owner, Writer};
use crate::options::Options;
use crate::protocol::{Failure, InstanceId};
use crate::roll::Roll;
use alarms::Alarms;
pub use boosts::BoostLease;
use boosts::Boosts;
pub use collection::{log_bounds, logs_dir};
use costs::Costs;
pub use costs::Whose;
pub use holder::unix_diag;
use housing::what_runs;
use ledger::Ledger;
use lifecycle::{Event, Lifecycle, Op, Refusal, Run, Waiter};
use measured::Back;
pub use measured::of_node;
use policy::Terms;
use precedence::Allowance;
pub use seats::{ACCEPT_MAX, Placed, SeatLease};
use start::{Body, Way};
use wakes::{Key, Wakes};

/// Longest time an application may be given to become ready, whatever its record says.
pub const START_MAX: Duration = Duration::from_secs(300);

/// Longest wait for an instance: for its turn, a restoration that fails and a start. Five hundred slow ones that are all
/// asked for at once on two cores need a quarter of an hour.
pub const WAKE_MAX: Duration = Duration::from_secs(900);

/// Instances of one tenant that have processes. What these may take is bounded by the tenant's cell.
const PER_TENANT_MAX: u32 = 4096;

/// An instance that ended between its answer and the connection is asked for again, so often.
const TRIES_MAX: u32 = 3;

/// How long after the end of a process the keeper knows of it, at most, on a busy node.
const NOTICE_MAX: Duration = Duration::from_millis(500);

/// All instances of this node.
pub struct Instances {
    /// Sockets of applications.
    dir: PathBuf,
    sites: RefCell<HashMap<SiteName, Rc<Instance>>>,
    /// Also those whose site is gone, until their processes are.
    all: RefCell<HashMap<Key, Rc<Instance>>>,
    next_key: Cell<Key>,
    wakes: RefCell<Wakes>,
    alarms: RefCell<Alarms>,
    /// Those that nobody needs, by since when.
    idle: RefCell<Alarms>,
    first_alarm_changed: Notify,
    /// What has happened and was not acted on yet.
    inbox: RefCell<VecDeque<(Rc<Instance>, Event)>>,
    is_acting: Cell<bool>,
    /// None: no image can be taken or restored here, or not yet.
    images: RefCell<Option<Arc<Images>>>,
    /// Why not.
    no_images: RefCell<Option<String>>,
    /// Bases that come as images.
    bases: Arc<Bases>,
    /// What writes their logs.
    logs: Writer,
    /// Sites whose record says that they always run.
    kept: RefCell<BTreeSet<SiteName>>,
    /// Commands that run in instances.
    execs: Cell<usize>,
    /// Images that come from other nodes, or came and nobody has asked since.
    fetches: RefCell<HashMap<SiteName, transfer::Fetch>>,
    /// Images on their way from or to other nodes.
    transfers: Cell<usize>,
    /// Of a cluster's node: what all instances were told last. It begins so.
    is_fenced: Cell<bool>,
    /// That, or where the table says that sites are, may be something else.
    standing_changed: Notify,
    /// How long tenants' wakes may go first.
    allowances: RefCell<HashMap<TenantName, Allowance>>,
    /// What tiers cost, as all instances of the node have measured.
    costs: Cell<Costs>,
    /// Number of the next seat in any of them.
    next_seat: Cell<u64>,
    /// Whether the kernel tells who is connected to whom over Unix sockets. None: nobody needed to know yet.
    unix_diag: Cell<Option<bool>>,
    /// And of the next boost.
    next_boost: Cell<u64>,
    /// Who is awake, for the edge. None: there is no memory for it.
    roll: RefCell<Option<Roll>>,
}

/// One site's.
struct Instance {
    key: Key,
    site: RefCell<Arc<Site>>,
    tenant: RefCell<Arc<Tenant>>,
    life: RefCell<Lifecycle>,
    waiting: RefCell<HashMap<Waiter, Waiting>>,
    next_waiter: Cell<u64>,
    /// Of the present run, once it can answer.
    body: RefCell<Option<Rc<Body>>>,
    /// The last that was taken of it or brought it back.
    image: RefCell<Option<Image>>,
    /// Its base, if that is one of `bases`: it stays on disk while it rests.
    base: RefCell<Option<Arc<Unpacked>>>,
    /// Of what no image could be taken.
    refused: RefCell<Option<Subject>>,
    /// When the one was taken that is known to answer once it is back.
    proven: Cell<Option<u64>>,
    /// It is given up: the epoch under which it does not run here again.
    released: Cell<Option<Option<u64>>>,
    /// Tells the present run's task that its end is wanted.
    end_wanted: RefCell<watch::Sender<Option<(Op, Way)>>>,
    /// Of the wake under way, or the last.
    ledger: RefCell<Option<Ledger>>,
    last_wake: RefCell<Option<Wake>>,
    wakes: Cell<u64>,
    /// It was woken, and those who waited have no answer yet.
    back: Cell<Option<Back>>,
    /// It goes first on the processor. None: as others.
    goes_first_until: Cell<Option<Instant>>,
    /// What requests of the present run want, and what its site's cell has of it.
    boosts: RefCell<Boosts>,
    boosted: Cell<Boost>,
    /// Where it was when last looked at, and since when.
    tier: Cell<(Tier, Instant)>,
    fault: RefCell<Option<Fault>>,
    /// Why it ended by itself the last time, and when.
    last_end: RefCell<Option<(String, Instant)>>,
    /// Why it does not rest as deep as it should.
    note: RefCell<Option<String>>,
    /// Why it has no image.
    no_image: RefCell<Option<String>>,
    /// Why its last image was not used, though it was whole.
    image_end: RefCell<Option<String>>,
    /// Another one when its site is another tenant's.
    journal: RefCell<Rc<Journal>>,
    /// Commands that run beside it.
    execs: Cell<usize>,
    /// Something about it is different now.
    changed: Notify,
}

/// Where the answer to one who waits goes.
type Waiting = oneshot::Sender<Result<Run, Refusal>>;

/// One use of a running instance, until it is dropped.
pub struct Lease {
    engine: Rc<Engine>,
    instance: Rc<Instance>,
    run: Run,
}

/// An instance that can answer now.
pub struct Using {
    pub id: InstanceId,
    pub socket: OwnedFd,
    /// How long it waits for databases, if it may reach any, or any place outside.
    pub tally: Option<OwnedFd>,
    /// What was waited for. None: it ran.
    pub wake: Option<Wake>,
    pub lease: Lease,
}

/// A question for an instance; dropping it before the answer takes it back.
struct Asking {
    engine: Rc<Engine>,
    instance: Rc<Instance>,
    waiter: Waiter,
    answer: oneshot::Receiver<Result<Run, Refusal>>,
    is_done: bool,
}

impl Instances {
    pub fn new(dir: PathBuf, options: &Options, logs: Writer) -> Self {
        Self {
            dir,
            sites: RefCell::default(),
            all: RefCell::default(),
            next_key: Cell::new(1),
            wakes: RefCell::new(Wakes::new(at_once(options))),
            alarms: RefCell::default(),
            idle: RefCell::default(),
            first_alarm_changed: Notify::new(),
            inbox: RefCell::default(),
            is_acting: Cell::new(false),
            images: RefCell::default(),
            no_images: RefCell::default(),
            bases: Arc::new(Bases::new(options.instances.images.with_file_name("bases"), Bounds::NODE)),
            logs,
            kept: RefCell::default(),
            execs: Cell::new(0),
            fetches: RefCell::default(),
            transfers: Cell::new(0),
            is_fenced: Cell::new(true),
            standing_changed: Notify::new(),
            allowances: RefCell::default(),
            costs: Cell::default(),
            next_seat: Cell::new(1),
            unix_diag: Cell::new(None),
            next_boost: Cell::new(1),
            roll: RefCell::new(roll()),
        }
    }

    /// Wakes the site's instance if need be, and connects to it.
    /// In a cluster it must be placed here, as of this epoch or a later one.
    pub async fn use_site(
        &self,
        engine: &Rc<Engine>,
        name: &SiteName,
        epoch: Option<u64>,
    ) -> Result<Using, Fault> {
        self.until_placed(engine, name, epoch).await?;
        let mut tries = 1;
        loop {
            match self.try_use(engine, name).await {
                Err(Unusable::Ended) if tries < TRIES_MAX => tries += 1,
                Err(Unusable::Ended) => {
                    let message =
                        format!("the application of '{name}' ends as soon as it runs; its log says why");
                    return Err(Fault::new(Failure::Broken, fault::APP, message));
                }
                Err(Unusable::Fault(fault)) => return Err(fault),
                Ok(using) => return Ok(using),
            }
        }
    }

    async fn try_use(&self, engine: &Rc<Engine>, name: &SiteName) -> Result<Using, Unusable> {
        let instance = self.of_site(engine, name)?;
        self.restart_if_touched(engine, &instance).await;
        let asked = Instant::now();
        let was_awake = instance.is_awake();
        let mut asking = Asking::new(engine, &instance);
        let predicted = self.predicted(&instance, asked);
        let answered = timeout(WAKE_MAX, &mut asking.answer).await;
        let run = match answered {
            Ok(Ok(Ok(run))) => run,
            Ok(Ok(Err(refusal))) => {
                asking.is_done = true;
                return Err(instance.fault_of(refusal).into());
            }
            // The sender goes only with the instance.
            Ok(Err(_)) => return Err(instance.fault_of(Refusal::Gone).into()),
            Err(_) => {
                let message = format!("the application of '{name}' did not come to its turn in {WAKE_MAX:?}");
                return Err(Fault::new(Failure::Busy, fault::LIMIT, message).into());
            }
        };
        let lease = asking.lease(run);
        let body = instance.body_of(run).ok_or(Unusable::Ended)?;
        let answered = Instant::now();
        let socket = match body.connect().await {
            Ok(socket) => socket,
            Err(_) if instance.is_about_gone(run).await => return Err(Unusable::Ended),
            Err(error) => {
                let message = format!("the application of '{name}' does not take a connection: {error}");
                return Err(Fault::new(Failure::Broken, fault::APP, message).into());
            }
        };
        let wake = (!was_awake).then(|| instance.wake_of(asked, answered)).flatten();
        let wake = wake.map(|wake| Wake { predicted_us: predicted, ..wake });
        Ok(Using { id: instance.id(run), socket, tally: body.tally(), wake, lease })
    }

    /// Microseconds until its turn to wake, if it waits for that.
    fn predicted(&self, instance: &Instance, now: Instant) -> Option<u64> {
        let wait =
            instance.life.borrow().is_queued().then(|| self.wakes.borrow().predicted(instance.key, now));
        wait.map(|wait| u64::try_from(wait.as_micros()).unwrap_or(u64::MAX))
    }

    /// One more connection to a run that is in use.
    pub async fn connect(&self, id: InstanceId) -> Result<OwnedFd, Fault> {
        let (key, run) = parts(id);
        let ended = || Fault::new(Failure::NotFound, fault::UNKNOWN, format!("instance {} has ended", id.0));
        let instance = self.all.borrow().get(&key).cloned().ok_or_else(ended)?;
        let body = instance.body_of(run).ok_or_else(ended)?;
        match body.connect().await {
            Ok(socket) => Ok(socket),
            Err(_) if instance.is_about_gone(run).await => Err(ended()),
            Err(error) => {
                let name = &instance.site().name;
                let message = format!("the application of '{name}' does not take a connection: {error}");
                Err(Fault::new(Failure::Broken, fault::APP, message))
            }
        }
    }

    /// The site's instance, which may never have run.
    fn of_site(&self, engine: &Rc<Engine>, name: &SiteName) -> Result<Rc<Instance>, Fault> {
        if let Some(instance) = self.sites.borrow().get(name) {
            return Ok(Rc::clone(instance));
        }
        let (site, tenant) = engine.site(name)?;
        let Backend::App(app) = &site.backend else { return Err(wrong_kind(&site, "app")) };
        let key = self.next_key.replace(self.next_key.get() + 1);
        let now = Instant::now();
        let mut life = Lifecycle::new(now, self.terms(app, engine));
        // One without processes has nothing to do for that.
        for told in placed::told_at_birth(engine, name) {
            life.apply(now, told);
        }
        let tier = Cell::new((life.tier(), now));
        let journal = RefCell::new(self.journal(engine, &site));
        let instance = Rc::new(Instance {
            key,
            life: RefCell::new(life),
            site: RefCell::new(site),
            tenant: RefCell::new(tenant),
            waiting: RefCell::default(),
            next_waiter: Cell::new(0),
            body: RefCell::default(),
            image: RefCell::default(),
            base: RefCell::default(),
            refused: RefCell::default(),
            proven: Cell::new(None),
            released: Cell::new(None),
            end_wanted: RefCell::new(watch::Sender::new(None)),
            ledger: RefCell::default(),
            last_wake: RefCell::default(),
            wakes: Cell::new(0),
            back: Cell::new(None),
            goes_first_until: Cell::new(None),
            boosts: RefCell::default(),
            boosted: Cell::default(),
            tier,
            fault: RefCell::default(),
            last_end: RefCell::default(),
            note: RefCell::default(),
            no_image: RefCell::default(),
            image_end: RefCell::default(),
            journal,
            execs: Cell::new(0),
            changed: Notify::new(),
        });
        self.sites.borrow_mut().insert(name.clone(), Rc::clone(&instance));
        self.all.borrow_mut().insert(key, Rc::clone(&instance));
        Ok(instance)
    }

    fn journal(&self, engine: &Engine, site: &Site) -> Rc<Journal> {
        let owner = Owner { tenant: site.tenant.clone(), site: site.name.clone() };
        Journal::new(owner, &self.logs, &engine.workers)
    }

    // === Records and settings ===

    /// Ends instances whose record is not what they run with; sites that always run begin to.
    pub fn records_changed(&self, engine: &Rc<Engine>) {
        self.standing_changed.notify_waiters();
        let listed: Vec<_> = self.sites.borrow().values().cloned().collect();
        for instance in listed {
            let name = instance.site().name.clone();
            let now = engine.site(&name).ok().filter(|(site, _)| matches!(site.backend, Backend::App(_)));
            match now {
                Some((site, tenant)) => {
                    self.follow_placement(engine, &instance);
                    self.follow(engine, &instance, site, tenant);
                }
                None => {
                    self.sites.borrow_mut().remove(&name);
                    self.tell(engine, &instance, Event::Close);
                }
            }
        }
        let kept: Vec<SiteName> = self.kept.borrow().iter().cloned().collect();
        for name in kept {
            // Its record may be gone by the next change, which follows.
            if let Ok(instance) = self.of_site(engine, &name) {
                self.look_again(&instance);
            }
        }
    }

    fn follow(&self, engine: &Rc<Engine>, instance: &Rc<Instance>, site: Arc<Site>, tenant: Arc<Tenant>) {
        let Backend::App(app) = &site.backend else { return };
        let terms = self.terms(app, engine);
        let (old_site, old_tenant) = (instance.site(), instance.tenant());
        let is_same = match &old_site.backend {
            Backend::App(old) => what_runs(old) == what_runs(app),
            _ => false,
        };
        let is_same = is_same && site.tenant == old_site.tenant && same_runner(&tenant, &old_tenant);
        if site.tenant != old_site.tenant {
            instance.journal.replace(self.journal(engine, &site));
        }
        instance.site.replace(site);
        instance.tenant.replace(tenant);
        instance.follow_boosts(engine);
        if is_same {
            self.tell(engine, instance, Event::Terms(terms));
        } else {
            tracing::info!(site = %old_site.name, "its record changed; ending what runs with the old one");
            instance.forget_troubles();
            self.tell(engine, instance, Event::Renew(terms));
        }
    }

    /// Takes changed settings over.
    pub fn options_changed(&self, engine: &Rc<Engine>) {
        self.wakes.borrow_mut().set_at_once(at_once(&engine.options()));
        if let Some(images) = &*self.images.borrow() {
            images.set_limits(collection::limits(&engine.options()));
        }
        self.logs.set_bounds(log_bounds(&engine.options()));
        let listed: Vec<_> = self.sites.borrow().values().cloned().collect();
        for instance in listed {
            if let Backend::App(app) = &instance.site().backend {
                self.tell(engine, &instance, Event::Terms(self.terms(app, engine)));
                instance.follow_boosts(engine);
            }
        }
    }

    fn terms(&self, app: &App, engine: &Engine) -> Terms {
        let node = &engine.options().instances;
        let images = self.images.borrow().is_some() && node.image_bytes_max > 0;
        Terms::new(app, &node.idle, images)
    }

    /// What the edge reads to know who is awake.
    pub fn roll(&self) -> Option<OwnedFd> {
        let reader = self.roll.borrow().as_ref()?.reader();
        if let Err(error) = &reader {
            tracing::warn!(%error, "the edge does not learn which applications are awake");
        }
        reader.ok()
    }

    /// The sites whose record says that they always run. They begin to with the next `records_changed`.
    pub fn set_kept(&self, kept: BTreeSet<SiteName>) {
        self.kept.replace(kept);
    }
}

/// Why an instance was not used.
enum Unusable {
    Fault(Fault),
    /// It ended between its answer and the connection.
    Ended,
}

impl From<Fault> for Unusable {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

impl Instance {
    fn site(&self) -> Arc<Site> {
        Arc::clone(&self.site.borrow())
    }

    fn tenant(&self) -> Arc<Tenant> {
        Arc::clone(&self.tenant.borrow())
    }

    fn journal(&self) -> Rc<Journal> {
        Rc::clone(&self.journal.borrow())
    }

    fn id(&self, run: Run) -> InstanceId {
        InstanceId(u64::from(self.key) << 32 | u64::from(run.0))
    }

    fn is_awake(&self) -> bool {
        let life = self.life.borrow();
        life.tier() == Tier::Running && life.doing().is_none()
    }

    /// The processes of this run, if it is still the present one and can answer.
    fn body_of(&self, run: Run) -> Option<Rc<Body>> {
        if self.life.borrow().run() == run { self.body.borrow().clone() } else { None }
    }

    /// What went wrong with another record says nothing about this one.
    fn forget_troubles(&self) {
        self.fault.take();
        self.note.take();
        self.no_image.take();
        self.image_end.take();
        self.refused.take();
    }

    /// What came back from this image has answered.
    fn prove(&self, image: &Image) {
        self.proven.set(Some(image.taken_at()));
        self.image.replace(Some(image.clone()));
    }

    fn is_proven(&self, image: &Image) -> bool {
        self.proven.get() == Some(image.taken_at())
    }

    /// Whether this run has ended, or does so at once: its sockets go before the keeper learns of its end.
    async fn is_about_gone(&self, run: Run) -> bool {
        let gone = async {
            loop {
                let changed = self.changed.notified();
                if self.body_of(run).is_none() {
                    return;
                }
                changed.await;
            }
        };
        timeout(NOTICE_MAX, gone).await.is_ok()
    }

    /// A stage of the wake under way begins.
    fn mark(&self, stage: Stage, since: Instant) {
        if let Some(ledger) = &mut *self.ledger.borrow_mut() {
            ledger.mark(stage, since);
        }
    }

    /// What one who asked then has waited for, connecting included.
    fn wake_of(&self, asked: Instant, answered: Instant) -> Option<Wake> {
        let mut wake = self.ledger.borrow().as_ref()?.wake(asked, answered);
        let connected = u64::try_from(answered.elapsed().as_micros()).unwrap_or(u64::MAX);
        wake.stages.push((Stage::Connect, connected));
        Some(wake)
    }

    fn fault_of(&self, refusal: Refusal) -> Fault {
        let name = &self.site().name;
        let busy = |code, why: String| Fault::new(Failure::Busy, code, why);
        match refusal {
            Refusal::Failed => {
                let unknown = || busy(fault::APP, format!("the application of '{name}' was not started"));
                self.fault.borrow().clone().unwrap_or_else(unknown)
            }
            Refusal::Backoff { failures, left } => {
                let message = format!(
                    "the application of '{name}' failed {failures} times and is started again in {:.1} s; its log says why",
                    left.as_secs_f32()
                );
                busy(fault::APP_BACKOFF, message)
            }
            Refusal::Full => busy(
                fault::LIMIT,
                format!("as many as may wait for the application of '{name}', or for its turn, do"),
            ),
            Refusal::Fenced => placed::fenced(name),
            Refusal::Elsewhere => placed::elsewhere(name),
            Refusal::Stopped => {
                busy(fault::APP, format!("the application of '{name}' was ended by its operator"))
            }
            Refusal::Gone => {
                Fault::new(Failure::NotFound, fault::UNKNOWN, format!("site '{name}' was removed"))
            }
        }
    }
}

impl Asking {
    fn new(engine: &Rc<Engine>, instance: &Rc<Instance>) -> Self {
        let waiter = Waiter(instance.next_waiter.replace(instance.next_waiter.get() + 1));
        let (sender, answer) = oneshot::channel();
        instance.waiting.borrow_mut().insert(waiter, sender);
        let asking =
            Self { engine: Rc::clone(engine), instance: Rc::clone(instance), waiter, answer, is_done: false };
        engine.instances.tell(engine, instance, Event::Ask(waiter));
        asking
    }

    /// Keeps it awake from now on.
    fn lease(mut self, run: Run) -> Lease {
        self.is_done = true;
        Lease { engine: Rc::clone(&self.engine), instance: Rc::clone(&self.instance), run }
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        if self.is_done {
            return;
        }
        let event = match self.answer.try_recv() {
            // It was answered, and nobody took the answer.
            Ok(Ok(run)) => Event::Leave(run),
            Ok(Err(_)) => return,
            Err(_) => {
                self.instance.waiting.borrow_mut().remove(&self.waiter);
                Event::Cancel(self.waiter)
            }
        };
        self.engine.instances.tell(&self.engine, &self.instance, event);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.engine.instances.tell(&self.engine, &self.instance, Event::Leave(self.run));
    }
}

/// Instance and run of an id.
fn parts(id: InstanceId) -> (Key, Run) {
    let low = |number: u64| u32::try_from(number & u64::from(u32::MAX)).expect("masked to 32 bits");
    (low(id.0 >> 32), Run(low(id.0)))
}

fn roll() -> Option<Roll> {
    let roll = Roll::new();
    if let Err(error) = &roll {
        tracing::warn!(%error, "rules are told of every application that it is awake: the list of them cannot be made");
    }
    roll.ok()
}

fn at_once(options: &Options) -> usize {
    match options.instances.wakes_at_once {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        number => number as usize,
    }
}
