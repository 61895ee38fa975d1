//! Bringing an instance up: its processes, until it listens and answers as its record wants, and nagaya's own requests
//! before any visitor's.
//!
//! A start that is given up or fails leaves nothing: it is over only when no process of it is left. Not here: whether it
//! is to be started (`lifecycle`), what is run (`spawn`).

use std::cell::RefCell;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Arc, Weak};
use std::time::Duration;

use nagaya_cmdb::instance::Stage;
use nagaya_cmdb::record::{App, Base, ImageWhen, Outbound, Ready};
use nagaya_cmdb::{Backend, Site, TenantName};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::spawn_local;
use tokio::time::{Instant, sleep, timeout_at};

use super::door::Door;
use super::get::Asked;
use super::housing::{Housing, Made, NotRestored};
use super::lifecycle::{Blame, Op};
use super::rest::Resting;
use super::restarts::RestartFile;
use super::seats::Seats;
use super::{Instance, PER_TENANT_MAX, START_MAX, address, after_wake, surroundings};
use crate::bases::{Sought, Unpacked};
use crate::cells::{Home, Kills, Leaf};
use crate::engine::{Engine, wrong_kind};
use crate::fault::{self, Fault};
use crate::image::{self, Image, Images, ReadRecorder};
use crate::process::{Handle, Kind, Order, Request};
use crate::protocol::{Exit, Failure};
use crate::relay::{Outlets, Plan, Traffic};
use crate::sandbox::Sandbox;
use crate::spawn;
use crate::tenant_path::PathOwner;

/// Name of the socket the keeper listens on for an application.
const SOCKET: &str = "app.sock";

/// Characters of the site's name in the name of its socket's directory, so that the path stays short.
const DIR_NAME_MAX: usize = 32;

/// First and longest pause between two tries whether it answers as it must.
const TRY_FIRST: Duration = Duration::from_millis(10);
const TRY_MAX: Duration = Duration::from_millis(500);

/// How long what came back from an image may take to answer the first time, before a start is the better try.
const TRIAL_MAX: Duration = Duration::from_secs(5);

/// How long warming up may take altogether, while those who asked first wait. What takes longer is no reason not to go on.
const WARM_UP_MAX: Duration = Duration::from_secs(20);

/// First and longest pause between two times at which it is taken in what an application has read.
const DRAIN_FIRST: Duration = Duration::from_millis(100);
const DRAIN_MAX: Duration = Duration::from_secs(2);

/// Pauses before what could not be imaged is tried again. A program on a busy node may not have closed yet what nagaya's own
/// requests have opened.
const TAKE_PAUSES: [Duration; 3] =
    [Duration::from_millis(50), Duration::from_millis(250), Duration::from_millis(1000)];

/// The processes of an instance that can answer.
pub struct Body {
    /// None: its end has begun.
    handle: RefCell<Option<Handle>>,
    leaf: Arc<Leaf>,
    door: Door,
    pub resting: Arc<Resting>,
    /// Its processes that are in cells of requests.
    pub seats: Seats,
    /// It was brought back from this one.
    pub image: Option<Image>,
    /// For an image to be taken of it, until that is done or not wanted.
    inside: RefCell<Option<Arc<Inside>>>,
    /// None: nobody counts.
    kills: Option<Kills>,
    pub restart_file: Option<Arc<RestartFile>>,
    /// The ways out of its sandbox, and to its databases, which go with it.
    outlets: Option<Outlets>,
    /// It stays on disk as long as the processes see it.
    _base: Option<Arc<Unpacked>>,
    _dir: Directory,
}

/// What an image of it takes.
struct Inside {
    housing: Arc<Housing>,
    made: Made,
}

/// How it comes to be.
#[derive(Clone)]
pub enum How {
    Boot,
    Restore(Arc<Images>),
}

/// How its end is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// It is told, and has a moment.
    Notice,
    /// It runs no line more.
    Kill,
}

/// Where its socket is; it goes with the processes.
struct Directory(PathBuf);

impl Drop for Directory {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(%error, "{} cannot be removed", self.0.display());
        }
    }
}

/// Why there is no body, once nothing of it is left.
pub enum NoBody {
    Failed(Fault),
    NotRestored(NotRestored),
    /// It came back from this image, and does not answer.
    Mute(Box<Image>, Fault),
    /// Its end was wanted before it could answer.
    GivenUp,
}

impl From<Fault> for NoBody {
    fn from(fault: Fault) -> Self {
        Self::Failed(fault)
    }
}

/// Whether the next try is to wait for what this one failed of.
pub fn blame(fault: &Fault) -> Blame {
    if fault.failure == Failure::Busy { Blame::Node } else { Blame::Program }
}

impl Body {
    /// A connection to it, non-blocking.
    pub async fn connect(&self) -> io::Result<OwnedFd> {
        self.door.connect().await
    }

    /// No image is taken of it any more: what was kept for that is let go.
    pub fn needs_no_image(&self) {
        self.inside.take();
    }

    /// Where it listens in its sandbox: the port, or none if that is a socket. None: it has no sandbox.
    pub fn port(&self) -> Option<Option<u16>> {
        self.door.port()
    }

    /// What its processes are in; None: they see the whole node.
    pub fn sandbox(&self) -> Option<Arc<Sandbox>> {
        self.door.sandbox()
    }

    /// Where its processes are.
    pub fn leaf(&self) -> &Arc<Leaf> {
        &self.leaf
    }

    /// Of its processes so many were killed for want of memory.
    pub fn memory_kills(&self) -> u64 {
        self.kills.as_ref().map_or(0, Kills::count)
    }

    /// For who is to know how long it waits for databases.
    pub fn tally(&self) -> Option<OwnedFd> {
        // Without it only a figure is missing.
        self.outlets.as_ref().and_then(|outlets| outlets.tally().ok())
    }

    /// What it has open outside and with databases. None: its record names none.
    pub fn traffic(&self) -> Option<Traffic> {
        self.outlets.as_ref().map(Outlets::traffic)
    }

    /// Why it ended by itself, in words.
    pub fn why_ended(&self, exit: Exit) -> String {
        why_ended(self.memory_kills(), exit)
    }

    /// Resolves once nothing of it is left.
    pub fn ended(&self) -> impl Future<Output = Exit> + use<> {
        let ended = self.handle.borrow().as_ref().map(Handle::ended);
        async move {
            match ended {
                Some(ended) => ended.await.0,
                None => std::future::pending().await,
            }
        }
    }

    /// Kills what is in it now, also what stands still. `end` sees to the rest.
    pub fn kill(&self) {
        if let Err(error) = self.leaf.end(None) {
            tracing::warn!(%error, "cell {} cannot be killed at once", self.leaf.name());
        }
    }

    /// Ends it, and returns once nothing of it is left.
    pub async fn end(&self) {
        let handle = self.handle.take();
        if let Some(handle) = handle {
            end(handle).await;
        }
        self.bury();
    }

    /// Nothing of it is left.
    pub fn bury(&self) {
        self.leaf.forget_freezer();
    }
}

async fn end(handle: Handle) {
    let ended = handle.ended();
    drop(handle);
    ended.await;
}

/// Brings it up, and returns when it can answer.
pub async fn bring_up(
    engine: &Rc<Engine>,
    instance: &Instance,
    how: &How,
    number: u64,
    mut end_wanted: watch::Receiver<Option<(Op, Way)>>,
) -> Result<Body, NoBody> {
    let site = instance.site();
    let Backend::App(app) = &site.backend else { return Err(wrong_kind(&site, "app").into()) };
    let began = Instant::now();
    let node_max = Duration::from_millis(engine.options().app_start_ms);
    let within = app.start_seconds.map_or(node_max, |seconds| Duration::from_secs(seconds.into()));
    let until = began + within.min(START_MAX);
    let body = spawn(engine, instance, app, number, how).await?;
    let ended = body.ended();
    let ready = tokio::select! {
        _ = end_wanted.wait_for(Option::is_some) => Err(NoBody::GivenUp),
        exit = ended => {
            let code = if body.memory_kills() > 0 { fault::OUT_OF_MEMORY } else { fault::APP };
            let why = format!("ended before it could answer ({})", body.why_ended(exit));
            Err(broken(&site, code, &why).into())
        }
        ready = make_ready(engine, instance, app, &body, until) => ready.map_err(NoBody::Failed),
    };
    let why = match ready {
        Ok(()) if body.image.is_some() => {
            after_wake::tell(engine, instance, app, &body).await;
            return Ok(body);
        }
        Ok(()) => return Ok(body),
        Err(why) => why,
    };
    if matches!(*end_wanted.borrow(), Some((_, Way::Kill))) {
        body.kill();
    }
    body.end().await;
    Err(match (why, body.image.clone()) {
        // The program started well once: it is the image that is wrong.
        (NoBody::Failed(fault), Some(image)) => NoBody::Mute(Box::new(image), fault),
        (why, _) => why,
    })
}

/// Starts its processes, wherever they are to be.
async fn spawn(
    engine: &Rc<Engine>,
    instance: &Instance,
    app: &App,
    number: u64,
    how: &How,
) -> Result<Body, NoBody> {
    let site = instance.site();
    let short: String = site.name.as_str().chars().take(DIR_NAME_MAX).collect();
    let dir = Directory(engine.instances.dir.join(format!("{short}.{number}")));
    let (handle, door, mut inside) = if engine.is_root() {
        let (handle, door, inside) = spawn_sandboxed(engine, instance, app, &dir.0, how).await?;
        (handle, door, Some(inside))
    } else {
        let (handle, door) = spawn_plain(engine, instance, app, &dir.0).await?;
        (handle, door, None)
    };
    let leaf = handle.leaf();
    let resting = Arc::new(Resting::new(Arc::clone(&leaf)));
    let outlets = inside.as_mut().and_then(|inside| inside.made.outlets.take());
    let image = inside.as_ref().and_then(|inside| inside.made.image.clone());
    let base = inside.as_ref().and_then(|inside| inside.housing.unpacked.clone());
    let restart_file = inside.as_mut().and_then(|inside| inside.made.restart_file.take());
    let (handle, inside) = (RefCell::new(Some(handle)), RefCell::new(inside.map(Arc::new)));
    let kills = leaf.kills();
    let seats = Seats::default();
    Ok(Body {
        handle,
        leaf,
        door,
        resting,
        seats,
        image,
        inside,
        kills,
        restart_file,
        outlets,
        _base: base,
        _dir: dir,
    })
}

/// Without root there are no sandboxes: all of the node runs as one.
async fn spawn_plain(
    engine: &Rc<Engine>,
    instance: &Instance,
    app: &App,
    dir: &Path,
) -> Result<(Handle, Door), Fault> {
    let tenant = instance.tenant();
    let runner = engine.runner(&tenant)?;
    let owner = runner.identity.map(|identity| identity.uid);
    let given = {
        let (listen, path, runner) = (app.listen, dir.to_owned(), runner.clone());
        engine.on_worker(move || address::give(listen, &path, &runner)).await?
    };
    instance.mark(Stage::Boot, Instant::now().into());
    let (listener, address) = (given.listener, given.address.clone());
    let (app, name, authority) = (app.clone(), instance.site().name.clone(), engine.authority.clone());
    let make = move |leaf: &Leaf| {
        if let Some(guard) = authority.guard(&name, leaf)? {
            leaf.keep_guarded(guard);
        }
        spawn::app(&app, &tenant, &address, listener, &runner, leaf)
    };
    let handle = engine.processes.start(order(engine, instance), make).await?.0;
    Ok((handle, Door::Plain { address: given.address, owner }))
}

/// Its base, if that is an image of a layout: unpacked now if it is not yet.
async fn unpacked(
    engine: &Rc<Engine>,
    instance: &Instance,
    app: &App,
    owner: PathOwner,
) -> Result<Option<Arc<Unpacked>>, Fault> {
    let Some(Base::Layout { path, tag }) = app.base.clone() else {
        instance.base.take();
        return Ok(None);
    };
    let (bases, site) = (Arc::clone(&engine.instances.bases), instance.site());
    let find = {
        let bases = Arc::clone(&bases);
        move || Ok(bases.find(&path, tag.as_deref(), &owner)?)
    };
    let unpacked = match engine.on_worker(find).await? {
        Sought::There(unpacked) => unpacked,
        Sought::Missing(missing) => {
            let began = Instant::now();
            let _turn = bases.turn().await;
            let bases = Arc::clone(&bases);
            let unpacked = engine.on_worker(move || Ok(bases.unpack(&missing)?)).await?;
            let took = began.elapsed();
            tracing::info!(site = %site.name, digest = unpacked.digest, ?took, "its base is ready");
            unpacked
        }
    };
    instance.base.replace(Some(Arc::clone(&unpacked)));
    Ok(Some(unpacked))
}

/// All that is needed to put it into a sandbox.
pub async fn housing(
    engine: &Rc<Engine>,
    instance: &Instance,
    app: &App,
    listens_at: &Path,
) -> Result<Arc<Housing>, Fault> {
    let (site, tenant) = (instance.site(), instance.tenant());
    let (runner, options) = (engine.runner(&tenant)?, Arc::new((*engine.options()).clone()));
    let plan = Plan::new(app.outbound.endpoints());
    let reaches_nothing = plan.is_empty() && app.databases.is_empty() && app.outbound != Outbound::Nat;
    let outside = if reaches_nothing { None } else { Some((plan, engine.relay()?)) };
    let workers = engine.workers.clone();
    let owner = PathOwner::of(&tenant, runner.identity);
    let unpacked = unpacked(engine, instance, app, owner).await?;
    let (app, listens_at, authority) = (app.clone(), listens_at.to_owned(), engine.authority.clone());
    let of =
        Housing { site, tenant, app, runner, options, listens_at, outside, workers, unpacked, authority };
    Ok(Arc::new(of))
}

async fn spawn_sandboxed(
    engine: &Rc<Engine>,
    instance: &Instance,
    app: &App,
    dir: &Path,
    how: &How,
) -> Result<(Handle, Door, Inside), NoBody> {
    let launcher = engine.launcher()?;
    let listens_at = dir.join(SOCKET);
    let address = surroundings::address(app.listen, &listens_at);
    let housing = housing(engine, instance, app, &listens_at).await?;
    // What the worker has made besides the processes, or why it has made none.
    let told: Arc<Mutex<Option<Result<Made, NotRestored>>>> = Arc::default();
    let (house, tell, how) = (Arc::clone(&housing), Arc::clone(&told), how.clone());
    let authority = engine.authority.clone();
    let make = move |leaf: &Leaf| {
        // Before it has a process, and until it has none.
        if let Some(guard) = authority.guard(&house.site.name, leaf)? {
            leaf.keep_guarded(guard);
        }
        let made = match &how {
            How::Boot => house.boot(&launcher, leaf).map_err(NotRestored::Failed),
            How::Restore(images) => house.restore(&launcher, images, leaf),
        };
        let (started, made) = match made {
            Ok((started, made)) => (Ok(started), Ok(made)),
            Err(why) => {
                let fault = match &why {
                    NotRestored::Failed(fault) | NotRestored::PutAside(fault) => fault.clone(),
                    NotRestored::Nothing | NotRestored::Stale(_) | NotRestored::Unfit(..) => {
                        Fault::new(Failure::NotFound, fault::BAD_IMAGE, "it has no image")
                    }
                };
                (Err(fault), Err(why))
            }
        };
        *tell.lock() = Some(made);
        started
    };
    let started = engine.processes.start(order(engine, instance), make).await;
    let told = told.lock().take();
    let (handle, made) = match (started, told) {
        (Ok((handle, _)), Some(Ok(made))) => (handle, made),
        (Err(_), Some(Err(why))) => return Err(NoBody::NotRestored(why)),
        (Err(fault), _) => return Err(fault.into()),
        (Ok((handle, _)), _) => {
            end(handle).await;
            return Err(
                Fault::new(Failure::Broken, fault::SPAWN, "its start was lost inside the keeper").into()
            );
        }
    };
    if let Some(reads) = &made.reads {
        let tenant = instance.site().tenant.clone();
        spawn_local(drain_reads(Rc::clone(engine), tenant, Arc::downgrade(reads)));
    }
    instance.mark(if made.image.is_some() { Stage::Restore } else { Stage::Boot }, made.since);
    let sandbox = Arc::clone(&made.sandbox);
    let door = Door::Sandboxed { sandbox, address, workers: engine.workers.clone() };
    Ok((handle, door, Inside { housing, made }))
}

/// Takes in which files it reads, so that the kernel need not keep that, until nobody wants to know.
async fn drain_reads(engine: Rc<Engine>, tenant: TenantName, reads: Weak<ReadRecorder>) {
    let mut pause = DRAIN_FIRST;
    loop {
        sleep(pause).await;
        let Some(reads) = reads.upgrade() else { return };
        // Should no worker be free, the next time does it.
        let count = engine.on_worker_for(&tenant, move || Ok(reads.drain())).await.unwrap_or_default();
        pause = if count > 0 { DRAIN_FIRST } else { (pause * 2).min(DRAIN_MAX) };
    }
}

fn order(engine: &Engine, instance: &Instance) -> Order {
    let site = instance.site();
    let home = Home { tenant: instance.tenant(), site: Some(Arc::clone(&site)), device: None };
    let order = engine.order(Kind::App, Request::none(home), site.name.to_string(), PER_TENANT_MAX);
    Order { journal: Some(instance.journal()), ..order }
}

/// Waits until it listens and answers as its record wants.
async fn make_ready(
    engine: &Engine,
    instance: &Instance,
    app: &App,
    body: &Body,
    until: Instant,
) -> Result<(), Fault> {
    let site = instance.site();
    match timeout_at(until, body.door.until_open()).await {
        Err(_) => return Err(broken(&site, fault::APP, "does not listen in the time it has to start")),
        Ok(Err(error)) => return Err(broken(&site, fault::APP, &format!("cannot be used: {error}"))),
        Ok(Ok(())) => {}
    }
    if let Some((port, owner)) = body.door.shared_port() {
        engine.on_worker(move || address::is_owner(port, owner)).await?;
    }
    let (path, below, until) = match &app.ready {
        // Whoever comes back from an image was ready when it was taken. The first time that is looked at, too.
        _ if body.image.as_ref().is_some_and(|image| instance.is_proven(image)) => return Ok(()),
        Some(Ready { path, within_seconds }) => {
            let until = within_seconds
                .map_or(until, |seconds| Instant::now() + Duration::from_secs(seconds.into()).min(START_MAX));
            (path.as_str(), 500, until)
        }
        // Whoever connects is queued before the program is there; an answer of any kind says that it is.
        None if body.door.is_kept_open() => (app.warm_up.first().map_or("/", String::as_str), 600, until),
        None => return Ok(()),
    };
    instance.mark(Stage::Ready, Instant::now().into());
    let until = if body.image.is_some() { until.min(Instant::now() + TRIAL_MAX) } else { until };
    let asked = Asked::of(&site, &instance.tenant(), app)?;
    let last = RefCell::default();
    let said = timeout_at(until, until_answered(body, &asked, path, below, &last)).await;
    said.map_err(|_| {
        let last = last.take().unwrap_or_else(|| "it has answered nothing".into());
        let why =
            format!("listens, but does not answer GET {path} with a status below {below} in time: {last}");
        broken(&site, fault::NOT_READY, &why)
    })
}

/// Why an application ended by itself, of whose processes the kernel has killed so many at its memory limit. It may have gone on
/// for long after such a kill.
fn why_ended(memory_kills: u64, exit: Exit) -> String {
    const KILLED: i32 = 9;
    /// What a shell says of a child that was killed.
    const CHILD_KILLED: i32 = 128 + KILLED;
    let end = match exit {
        Exit { status: Some(CHILD_KILLED), .. } | Exit { signal: Some(KILLED), .. } if memory_kills > 0 => {
            return format!(
                "out of memory: the kernel killed it at the memory limit of its cell [{}]",
                fault::OUT_OF_MEMORY
            );
        }
        Exit { status: Some(status), .. } => format!("exit status {status}"),
        Exit { signal: Some(signal), .. } => format!("signal {signal}"),
        _ => "nobody knows why".into(),
    };
    match memory_kills {
        0 => end,
        kills => format!(
            "{end}; before that the kernel had killed {kills} of its processes at the memory limit of its cell [{}]",
            fault::OUT_OF_MEMORY
        ),
    }
}

/// `last` is what it said to the latest try.
async fn until_answered(body: &Body, asked: &Asked, path: &str, below: u16, last: &RefCell<Option<String>>) {
    let mut pause = TRY_FIRST;
    loop {
        if let Ok(socket) = body.connect().await {
            let told = match asked.get(socket, path, START_MAX).await {
                Ok(answer) if answer.status < below => return,
                Ok(answer) => format!("its last answer was {answer}"),
                Err(error) => format!("the last try failed: {error}"),
            };
            last.replace(Some(told));
        }
        sleep(pause).await;
        pause = (pause * 2).min(TRY_MAX);
    }
}

/// Takes an image of it: warmed up and before it has served anybody, or as it goes to rest. It goes on in any case, unless it dies of it.
pub async fn take_image(
    engine: &Engine,
    instance: &Instance,
    images: Arc<Images>,
    body: &Body,
) -> Result<Image, Fault> {
    let inside = body.inside.borrow().clone();
    let unfit = || Fault::new(Failure::Broken, fault::BAD_IMAGE, "it runs in no sandbox");
    let inside = inside.ok_or_else(unfit)?;
    let subject = inside.made.subject.clone().ok_or_else(unfit)?;
    if inside.housing.app.image_when == ImageWhen::Start {
        // There is no second one of this run.
        body.needs_no_image();
        warm_up(&inside.housing, body).await;
    }
    instance.mark(Stage::Image, Instant::now().into());
    let leaf = Arc::clone(&body.leaf);
    let what = Arc::new((inside, images, subject.clone(), leaf));
    let mut pauses = TAKE_PAUSES.into_iter();
    let taken = loop {
        let (read, kept) = (Arc::clone(&what), Arc::clone(&what));
        let find_watched = move || {
            let (inside, _, _, leaf) = &*read;
            let pids: Vec<i32> =
                leaf.pids().unwrap_or_default().iter().map(|pid| pid.as_raw_nonzero().get()).collect();
            let reads = inside.made.reads.as_ref();
            Ok(reads.map(|reads| reads.finish(&inside.housing.owner(), &pids)).unwrap_or_default())
        };
        let take = move |watched| {
            let (inside, images, of, _) = &*kept;
            let Inside { housing, made } = &**inside;
            let taken = housing.take(images, &made.sandbox, of, &made.handover, watched);
            taken.map_err(|error| Fault::new(Failure::Broken, error.code(), error.to_string()))
        };
        // What no image carries is closed meanwhile.
        let closed = match &body.outlets {
            Some(outlets) => Some(outlets.pause().await),
            None => None,
        };
        let taken = match engine.on_worker_for(&instance.site().tenant, find_watched).await {
            Ok(watched) => engine.on_worker(move || take(watched)).await,
            Err(fault) => Err(fault),
        };
        drop(closed);
        match (taken, pauses.next()) {
            (Err(fault), Some(pause)) if is_tried_again(&fault, pause) => {
                tracing::debug!(site = %instance.site().name, "an image of it is tried again: {fault}");
                sleep(pause).await;
            }
            (taken, _) => break taken,
        }
    };
    let is_remembered = taken.as_ref().is_err_and(|fault| fault.code != image::UNSETTLED);
    instance.refused.replace(is_remembered.then_some(subject));
    taken
}

/// What has a connection that it has not taken yet may need longer than what has one open.
fn is_tried_again(fault: &Fault, pause: Duration) -> bool {
    fault.code == image::UNSETTLED || (fault.code == image::UNFIT && pause <= TAKE_PAUSES[1])
}

/// nagaya's own requests, so that what a first visitor's would load is loaded. What they answer is of no account.
async fn warm_up(housing: &Housing, body: &Body) {
    let Housing { site, tenant, app, .. } = housing;
    let until = Instant::now() + WARM_UP_MAX;
    let asked = match Asked::of(site, tenant, app) {
        Ok(asked) => asked,
        Err(fault) => return tracing::info!(site = %site.name, "it is not warmed up: {fault}"),
    };
    for path in &app.warm_up {
        let left = until.saturating_duration_since(Instant::now());
        let Ok(socket) = body.connect().await else { return };
        match asked.get(socket, path, left).await {
            Ok(answer) => {
                tracing::debug!(site = %site.name, path, status = answer.status, "warmed up");
            }
            Err(error) => {
                tracing::info!(site = %site.name, path, %error, "warming it up with this path failed")
            }
        }
    }
}

fn broken(site: &Site, code: nagaya_base::Code, why: &str) -> Fault {
    let message = format!("the application of '{}' {why}; `nagaya instance logs` says more", site.name);
    Fault::new(Failure::Broken, code, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn want_of_memory_is_named_where_it_ended_the_application() {
        let of = |kills, status, signal| why_ended(kills, Exit { status, signal, cpu_us: 0 });
        assert_eq!(of(0, Some(1), None), "exit status 1");
        assert_eq!(of(0, None, Some(9)), "signal 9");
        for end in [of(1, None, Some(9)), of(2, Some(137), None)] {
            assert!(end.starts_with("out of memory: "), "{end}");
        }
        let later = of(1, Some(0), None);
        assert!(
            later.starts_with("exit status 0; before that the kernel had killed 1 of its processes"),
            "{later}"
        );
    }
}
