//! Brings an instance up: starts its processes and waits until it listens and answers as its record
//! requires. Then nagaya sends its own requests before any visitor's.
//!
//! A start that is given up or fails leaves nothing. It is over only when none of its processes is
//! left. Not here: whether it is to be started (`lifecycle`), the programs (`spawn`).

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::sync::{Arc, Weak};
use std::time::Duration;

use nagaya_base::{CallerReach, OwnCaller};
use nagaya_keeper_api::protocol::FailureKind;
use nagaya_records::instance::WakeStage;
use nagaya_records::record::{APP_PORT, App, AppListen, BaseRecord, ImageWhen, OutboundRules, ReadyCheck};
use nagaya_records::{Backend, Site, Tenant, TenantName};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::spawn_local;
use tokio::time::{Instant, sleep, timeout_at};

use crate::bases::{BaseLookup, UnpackedBase};
use crate::cells::{CellParent, Leaf};
use crate::context::{KeeperContext, wrong_kind};
use crate::fault::{self, Fault};
use crate::image::{self, Image, NodeImages, ReadRecorder};
use crate::instances::decide::lifecycle::FailureCause;
use crate::instances::decide::stop_mode::{EndRequest, StopMode};
use crate::instances::run::app_launch::{AppLaunch, LaunchResult, NotRestored, OutsideAccess};
use crate::instances::run::app_machine::MachineFiles;
use crate::instances::run::endpoint::InstanceEndpoint;
use crate::instances::run::internal_requests::InternalTarget;
use crate::instances::run::processes::{ImageSource, InstanceProcesses, SocketDir, StartMode, end};
use crate::instances::run::{after_wake, app_machine, machine_state, plain_address, sandbox_spec};
use crate::instances::state::instance::SiteInstance;
use crate::mail::{MAIL_ADDRESS, MailSender};
use crate::paths::tenant_path::PathOwner;
use crate::process::{CellRequest, ProcessKind, ProcessRef, SpawnOrder};
use crate::relay::{EgressPlan, OWN_NAMES_MAX, OwnSites};
use crate::sandbox::{Sandbox, UnixIdentity};
use crate::spawn;

/// Maximum time for an application to become ready, whatever its record says.
const START_MAX: Duration = Duration::from_secs(300);

/// Maximum number of instances of one tenant that have processes. The tenant's cell limits what
/// these use.
const PER_TENANT_MAX: u32 = 4096;

/// Name of the socket that the keeper listens on for an application.
const SOCKET: &str = "app.sock";

/// Characters of the site's name in the name of its socket's directory, so that the path stays
/// short.
const DIR_NAME_MAX: usize = 32;

/// First and longest pause between two readiness checks.
const TRY_FIRST: Duration = Duration::from_millis(10);
const TRY_MAX: Duration = Duration::from_millis(500);

/// Time in which a restored instance must answer for the first time. After it a start is the better
/// try.
const TRIAL_MAX: Duration = Duration::from_secs(5);

/// Maximum time of all warm-up requests, while the first waiters wait. A longer warm-up does not
/// stop the start.
const WARM_UP_MAX: Duration = Duration::from_secs(20);

/// First and longest pause between two reads of the recorded file accesses.
const DRAIN_FIRST: Duration = Duration::from_millis(100);
const DRAIN_MAX: Duration = Duration::from_secs(2);

/// Pauses before another try to take an image. A program on a busy node may not have closed yet
/// what nagaya's own requests opened.
const TAKE_PAUSES: [Duration; 3] =
    [Duration::from_millis(50), Duration::from_millis(250), Duration::from_millis(1000)];

/// Why there are no processes, once nothing of it is left.
pub enum StartError {
    Failed(Fault),
    NotRestored(NotRestored),
    /// It was restored from this image, and does not answer.
    Mute(Box<Image>, Fault),
    /// Its end was wanted before it could answer.
    GivenUp,
}

impl From<Fault> for StartError {
    fn from(fault: Fault) -> Self {
        Self::Failed(fault)
    }
}

/// Whether the next try has to wait after this failure.
pub fn blame(fault: &Fault) -> FailureCause {
    if fault.failure == FailureKind::Busy { FailureCause::Node } else { FailureCause::Program }
}

/// Shows the sandbox of processes that cannot answer yet to an operator's commands.
struct ComingGuard<'a>(&'a SiteInstance);

impl<'a> ComingGuard<'a> {
    fn new(instance: &'a SiteInstance, sandbox: Option<Arc<Sandbox>>) -> Self {
        instance.set_coming(sandbox);
        instance.changed.notify_waiters();
        Self(instance)
    }
}

impl Drop for ComingGuard<'_> {
    fn drop(&mut self) {
        self.0.set_coming(None);
    }
}

/// Brings it up, and returns when it can answer.
pub async fn bring_up(
    context: &Rc<KeeperContext>,
    instance: &SiteInstance,
    mode: &StartMode,
    number: u64,
    mut end_wanted: watch::Receiver<EndRequest>,
) -> Result<InstanceProcesses, StartError> {
    let site = instance.site();
    let Backend::App(app) = &site.backend else { return Err(wrong_kind(&site, "app").into()) };
    let began = Instant::now();
    let node_max = Duration::from_millis(context.options().app_start_ms);
    let within = app.start_seconds.map_or(node_max, |seconds| Duration::from_secs(seconds.into()));
    let until = began + within.min(START_MAX);
    let processes = spawn(context, instance, app, number, mode).await?;
    let _coming = ComingGuard::new(instance, processes.sandbox());
    let ended = processes.ended();
    let ready = tokio::select! {
        _ = end_wanted.wait_for(Option::is_some) => Err(StartError::GivenUp),
        exit = ended => {
            let code = if processes.memory_kills() > 0 { fault::OUT_OF_MEMORY } else { fault::APP };
            let why = format!("ended before it could answer ({})", processes.why_ended(exit));
            Err(broken(&site, code, &why).into())
        }
        ready = make_ready(context, instance, app, &processes, until) => ready.map_err(StartError::Failed),
    };
    let why = match ready {
        Ok(()) if processes.image.is_some() => {
            after_wake::tell(context, instance, app, &processes).await;
            return Ok(processes);
        }
        Ok(()) => return Ok(processes),
        Err(why) => why,
    };
    if matches!(*end_wanted.borrow(), Some((_, StopMode::Kill))) {
        processes.kill();
    }
    processes.end().await;
    Err(match (why, processes.image.clone()) {
        // The program started well once, so the image is wrong.
        (StartError::Failed(fault), Some(image)) => StartError::Mute(Box::new(image), fault),
        (why, _) => why,
    })
}

/// Starts its processes, in a sandbox or without one.
async fn spawn(
    context: &Rc<KeeperContext>,
    instance: &SiteInstance,
    app: &App,
    number: u64,
    mode: &StartMode,
) -> Result<InstanceProcesses, StartError> {
    let site = instance.site();
    let short: String = site.name.as_str().chars().take(DIR_NAME_MAX).collect();
    let dir = SocketDir(context.apps_dir().join(format!("{short}.{number}")));
    let (handle, endpoint, source) = if context.is_root() {
        let (handle, endpoint, source) = spawn_sandboxed(context, instance, app, &dir.0, mode).await?;
        (handle, endpoint, Some(source))
    } else {
        let (handle, endpoint) = spawn_plain(context, instance, app, &dir.0).await?;
        (handle, endpoint, None)
    };
    Ok(InstanceProcesses::new(context, app, (handle, endpoint), source, dir))
}

/// Starts them without a sandbox: without root all of the node runs as one user.
async fn spawn_plain(
    context: &Rc<KeeperContext>,
    instance: &SiteInstance,
    app: &App,
    dir: &Path,
) -> Result<(ProcessRef, InstanceEndpoint), Fault> {
    let tenant = instance.tenant();
    let runner = context.runner(&tenant)?;
    let owner = runner.identity.map(|identity| identity.uid);
    let given = {
        let (listen, path, runner) = (app.listen, dir.to_owned(), runner.clone());
        context.on_worker(move || plain_address::give(listen, &path, &runner)).await?
    };
    instance.mark(WakeStage::Boot, Instant::now().into());
    let (listener, address) = (given.listener, given.address.clone());
    let (app, name, authority) = (app.clone(), instance.site().name.clone(), context.authority.clone());
    let make = move |leaf: &Leaf| {
        if let Some(guard) = authority.guard(&name, leaf)? {
            leaf.keep_guarded(guard);
        }
        spawn::app(&app, &tenant, &address, listener, &runner, leaf)
    };
    let handle = context.processes.start(order(context, instance), make).await?.0;
    Ok((handle, InstanceEndpoint::Plain { address: given.address, owner }))
}

/// Returns its base, if that is an OCI image. It is unpacked now if it is not yet.
async fn unpacked(
    context: &Rc<KeeperContext>,
    instance: &SiteInstance,
    app: &App,
    owner: PathOwner,
) -> Result<Option<Arc<UnpackedBase>>, Fault> {
    let Some(BaseRecord::Layout { path, tag }) = app.base.clone() else {
        instance.image.borrow_mut().base = None;
        return Ok(None);
    };
    let (bases, site) = (Arc::clone(&context.bases), instance.site());
    let find = {
        let bases = Arc::clone(&bases);
        move || Ok(bases.find(&path, tag.as_deref(), &owner)?)
    };
    let unpacked = match context.on_worker(find).await? {
        BaseLookup::There(unpacked) => unpacked,
        BaseLookup::Missing(missing) => {
            let began = Instant::now();
            let _turn = bases.turn().await;
            let bases = Arc::clone(&bases);
            let unpacked = context.on_worker(move || Ok(bases.unpack(&missing)?)).await?;
            let took = began.elapsed();
            tracing::info!(site = %site.name, digest = unpacked.digest, ?took, "its base is ready");
            unpacked
        }
    };
    instance.image.borrow_mut().base = Some(Arc::clone(&unpacked));
    Ok(Some(unpacked))
}

/// Returns what leads out of its sandbox.
fn outside_of(
    context: &KeeperContext,
    site: &Site,
    tenant: &Tenant,
    app: &App,
    identity: Option<UnixIdentity>,
) -> Result<Option<OutsideAccess>, Fault> {
    let options = context.options();
    let mut plan = EgressPlan::new(app.outbound.endpoints());
    let reach = match app.outbound {
        OutboundRules::Nat => CallerReach::AllSites,
        _ => CallerReach::OwnSites,
    };
    let has_network = app.outbound != OutboundRules::Host;
    let caller = identity.filter(|_| has_network).map(|identity| OwnCaller::new(identity.uid, reach));
    let own_sites = caller.map(|caller| OwnSites::new(&options.programs.own_addresses, caller));
    if let Some(sites) = &own_sites {
        let mut ports = sites.ports();
        // At this port it may listen itself, at all addresses.
        ports.retain(|port| app_machine::listen(app) != AppListen::Port || *port != APP_PORT);
        let names =
            context.table().read().hosts_of_tenant(tenant.name.as_str(), site.name.as_str(), OWN_NAMES_MAX);
        plan = match reach {
            CallerReach::OwnSites => plan.with_own_sites(names, &ports),
            CallerReach::AllSites => plan.with_own_sites_and_web(names, &ports),
        };
    }
    let has_mail = has_network && options.mail.relay && !plan.addresses().contains(&MAIL_ADDRESS);
    let sender = has_mail.then(|| MailSender { tenant: tenant.name.clone(), site: Some(site.name.clone()) });
    let reaches_nothing =
        plan.is_empty() && app.databases.is_empty() && app.outbound != OutboundRules::Nat && sender.is_none();
    if reaches_nothing {
        return Ok(None);
    }
    Ok(Some(OutsideAccess { plan, relay: context.relay()?, own_sites, sender }))
}

/// Collects all that is needed to put it into a sandbox.
pub async fn prepare_launch(
    context: &Rc<KeeperContext>,
    instance: &SiteInstance,
    app: &App,
    listens_at: &Path,
) -> Result<Arc<AppLaunch>, Fault> {
    let (site, tenant) = (instance.site(), instance.tenant());
    let (runner, options) = (context.runner(&tenant)?, Arc::new((*context.options()).clone()));
    let outside = outside_of(context, &site, &tenant, app, runner.identity)?;
    let workers = context.workers.clone();
    let owner = PathOwner::of(&tenant, runner.identity);
    let unpacked = unpacked(context, instance, app, owner.clone()).await?;
    let machine = match app.machine.clone() {
        Some(machine) => {
            let (launcher, options) = (context.launcher()?, Arc::clone(&options));
            let templates = Arc::clone(&context.machines);
            let _turn = context.machines.turn().await;
            let prepare = move || MachineFiles::prepare(&machine, &options, &owner, &launcher, &templates);
            Some(context.on_worker(prepare).await?)
        }
        None => None,
    };
    let (app, listens_at, authority) = (app.clone(), listens_at.to_owned(), context.authority.clone());
    let of = AppLaunch {
        site,
        tenant,
        app,
        runner,
        options,
        listens_at,
        outside,
        workers,
        unpacked,
        machine,
        authority,
    };
    Ok(Arc::new(of))
}

async fn spawn_sandboxed(
    context: &Rc<KeeperContext>,
    instance: &SiteInstance,
    app: &App,
    dir: &Path,
    mode: &StartMode,
) -> Result<(ProcessRef, InstanceEndpoint, ImageSource), StartError> {
    let launcher = context.launcher()?;
    let listens_at = dir.join(SOCKET);
    let address = sandbox_spec::address(app_machine::listen(app), &listens_at);
    let launch = prepare_launch(context, instance, app, &listens_at).await?;
    // Result of the worker besides the processes, or why there are none.
    let reported: Arc<Mutex<Option<Result<LaunchResult, NotRestored>>>> = Arc::default();
    let (for_worker, report, mode) = (Arc::clone(&launch), Arc::clone(&reported), mode.clone());
    let authority = context.authority.clone();
    let make = move |leaf: &Leaf| {
        // Before it has a process, and until it has none.
        if let Some(guard) = authority.guard(&for_worker.site.name, leaf)? {
            leaf.keep_guarded(guard);
        }
        let made = match &mode {
            StartMode::Boot => for_worker.boot(&launcher, leaf).map_err(NotRestored::Failed),
            StartMode::Restore(images) => for_worker.restore(&launcher, images, leaf),
        };
        let (started, made) = match made {
            Ok((started, made)) => (Ok(started), Ok(made)),
            Err(why) => {
                let fault = match &why {
                    NotRestored::Failed(fault) | NotRestored::PutAside(fault) => fault.clone(),
                    NotRestored::Nothing | NotRestored::Stale(_) | NotRestored::ImageImpossible(..) => {
                        Fault::new(FailureKind::NotFound, fault::BAD_IMAGE, "it has no image")
                    }
                };
                (Err(fault), Err(why))
            }
        };
        *report.lock() = Some(made);
        started
    };
    let started = context.processes.start(order(context, instance), make).await;
    let reported = reported.lock().take();
    let (handle, made) = match (started, reported) {
        (Ok((handle, _)), Some(Ok(made))) => (handle, made),
        (Err(_), Some(Err(why))) => return Err(StartError::NotRestored(why)),
        (Err(fault), _) => return Err(fault.into()),
        (Ok((handle, _)), _) => {
            end(handle).await;
            return Err(Fault::new(
                FailureKind::Broken,
                fault::SPAWN,
                "its start was lost inside the keeper",
            )
            .into());
        }
    };
    if let Some(reads) = &made.reads {
        let tenant = instance.site().tenant.clone();
        spawn_local(drain_reads(Rc::clone(context), tenant, Arc::downgrade(reads)));
    }
    instance.mark(if made.image.is_some() { WakeStage::Restore } else { WakeStage::Boot }, made.since);
    let sandbox = Arc::clone(&made.sandbox);
    let door = InstanceEndpoint::Sandboxed { sandbox, address, workers: context.workers.clone() };
    Ok((handle, door, ImageSource { launch, made }))
}

/// Takes in which files it reads, so that the kernel need not keep that, until nobody wants to
/// know.
async fn drain_reads(context: Rc<KeeperContext>, tenant: TenantName, reads: Weak<ReadRecorder>) {
    let mut pause = DRAIN_FIRST;
    loop {
        sleep(pause).await;
        let Some(reads) = reads.upgrade() else { return };
        // If no worker is free, the next round does it.
        let count = context.on_worker_for(&tenant, move || Ok(reads.drain())).await.unwrap_or_default();
        pause = if count > 0 { DRAIN_FIRST } else { (pause * 2).min(DRAIN_MAX) };
    }
}

fn order(context: &KeeperContext, instance: &SiteInstance) -> SpawnOrder {
    let site = instance.site();
    let home = CellParent { tenant: instance.tenant(), site: Some(Arc::clone(&site)), device: None };
    let order =
        context.order(ProcessKind::App, CellRequest::none(home), site.name.to_string(), PER_TENANT_MAX);
    SpawnOrder { journal: Some(instance.journal()), ..order }
}

/// Waits until it listens and answers as its record requires.
async fn make_ready(
    context: &KeeperContext,
    instance: &SiteInstance,
    app: &App,
    processes: &InstanceProcesses,
    until: Instant,
) -> Result<(), Fault> {
    let site = instance.site();
    // A machine learns the time, and gets randomness of its own, before anything else.
    if app.machine.is_some() && processes.image.is_some() {
        machine_state::wake(context, processes, processes.image_source().as_ref()).await?;
    }
    match timeout_at(until, processes.endpoint.wait_until_open()).await {
        Err(_) => return Err(broken(&site, fault::APP, "does not listen in the time it has to start")),
        Ok(Err(error)) => return Err(broken(&site, fault::APP, &format!("cannot be used: {error}"))),
        Ok(Ok(())) => {}
    }
    if let Some((port, owner)) = processes.endpoint.shared_port() {
        context.on_worker(move || plain_address::is_owner(port, owner)).await?;
    }
    let (path, below, until) = match &app.ready {
        // A restored instance was ready when its image was taken. Its first wake is checked, too.
        _ if processes.image.as_ref().is_some_and(|image| instance.is_verified(image)) => return Ok(()),
        Some(ReadyCheck { path, within_seconds }) => {
            let until = within_seconds
                .map_or(until, |seconds| Instant::now() + Duration::from_secs(seconds.into()).min(START_MAX));
            (path.as_str(), 500, until)
        }
        // A connection is queued before the program is there. A response of any kind shows that it
        // is.
        None if processes.endpoint.is_kept_open() => {
            (app.warm_up.first().map_or("/", String::as_str), 600, until)
        }
        None => return Ok(()),
    };
    instance.mark(WakeStage::Ready, Instant::now().into());
    let until = if processes.image.is_some() { until.min(Instant::now() + TRIAL_MAX) } else { until };
    let asked = InternalTarget::of(&site, &instance.tenant(), app)?;
    let last = RefCell::default();
    let said = timeout_at(until, wait_until_answered(processes, &asked, path, below, &last)).await;
    said.map_err(|_| {
        let last = last.take().unwrap_or_else(|| "it has sent no response".into());
        let why =
            format!("listens, but does not answer GET {path} with a status below {below} in time: {last}");
        broken(&site, fault::NOT_READY, &why)
    })
}

/// Tries until it answers acceptably. `last` is its response to the latest try.
async fn wait_until_answered(
    processes: &InstanceProcesses,
    asked: &InternalTarget,
    path: &str,
    below: u16,
    last: &RefCell<Option<String>>,
) {
    let mut pause = TRY_FIRST;
    loop {
        if let Ok(socket) = processes.connect().await {
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

/// Takes an image of it: warmed up and before it has served anything, or as it goes to rest. It
/// goes on in any case, unless it dies of it.
pub async fn take_image(
    context: &KeeperContext,
    instance: &SiteInstance,
    images: Arc<NodeImages>,
    processes: &InstanceProcesses,
) -> Result<Image, Fault> {
    let source = processes.image_source();
    let unfit = || Fault::new(FailureKind::Broken, fault::BAD_IMAGE, "it runs in no sandbox");
    let source = source.ok_or_else(unfit)?;
    let subject = source.made.subject.clone().ok_or_else(unfit)?;
    if source.launch.app.image_when == ImageWhen::Start {
        // There is no second image of this run.
        processes.needs_no_image();
        warm_up(&source.launch, processes).await;
    }
    instance.mark(WakeStage::Image, Instant::now().into());
    let saves_state = source.launch.saves_state();
    let leaf = Arc::clone(processes.leaf());
    let what = Arc::new((Arc::clone(&source), images, subject.clone(), leaf));
    let mut pauses = TAKE_PAUSES.into_iter();
    let taken = loop {
        let (read, kept) = (Arc::clone(&what), Arc::clone(&what));
        let find_watched = move || {
            let (source, _, _, leaf) = &*read;
            let pids: Vec<i32> =
                leaf.pids().unwrap_or_default().iter().map(|pid| pid.as_raw_nonzero().get()).collect();
            let reads = source.made.reads.as_ref();
            let watched = reads.map(|reads| reads.finish(&source.launch.owner(), &pids)).unwrap_or_default();
            Ok(watched.with_tags(source.made.tags.clone()))
        };
        let take = move |watched| {
            let (source, images, of, _) = &*kept;
            let ImageSource { launch, made } = &**source;
            let taken = launch.take(images, &made.sandbox, of, &made.handover, watched);
            taken.map_err(|error| Fault::new(FailureKind::Broken, error.code(), error.to_string()))
        };
        // Connections that no image carries are closed meanwhile.
        let closed = match &processes.outlets {
            Some(outlets) => Some(outlets.pause().await),
            None => None,
        };
        let taken = match context.on_worker_for(&instance.site().tenant, find_watched).await {
            Ok(watched) if saves_state => match machine_state::save(context, processes).await {
                Ok(()) => context.on_worker(move || take(watched)).await,
                Err(fault) => Err(fault),
            },
            Ok(watched) => context.on_worker(move || take(watched)).await,
            Err(fault) => Err(fault),
        };
        drop(closed);
        if saves_state {
            machine_state::resume(context, &source).await?;
        }
        match (taken, pauses.next()) {
            (Err(fault), Some(pause)) if is_tried_again(&fault, pause) => {
                tracing::debug!(site = %instance.site().name, "taking an image of it is tried again: {fault}");
                sleep(pause).await;
            }
            (taken, _) => break taken,
        }
    };
    let is_remembered = taken.as_ref().is_err_and(|fault| fault.code != image::UNSETTLED);
    instance.image.borrow_mut().refused = is_remembered.then_some(subject);
    taken
}

/// Whether another try makes sense. A pending connection that is not accepted yet may need more
/// time than an open one.
fn is_tried_again(fault: &Fault, pause: Duration) -> bool {
    fault.code == image::UNSETTLED || (fault.code == image::UNFIT && pause <= TAKE_PAUSES[1])
}

/// Sends nagaya's own requests, so that the application loads what a first visitor would have to
/// wait for. Their responses do not matter.
async fn warm_up(launch: &AppLaunch, processes: &InstanceProcesses) {
    let AppLaunch { site, tenant, app, .. } = launch;
    let until = Instant::now() + WARM_UP_MAX;
    let asked = match InternalTarget::of(site, tenant, app) {
        Ok(asked) => asked,
        Err(fault) => return tracing::info!(site = %site.name, "it is not warmed up: {fault}"),
    };
    for path in &app.warm_up {
        let left = until.saturating_duration_since(Instant::now());
        let Ok(socket) = processes.connect().await else { return };
        match asked.get(socket, path, left).await {
            Ok(answer) if answer.status >= 300 => {
                tracing::info!(
                    site = %site.name,
                    "warming it up with {path} loads little, as it seems: it answers {answer}"
                );
            }
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
    Fault::new(FailureKind::Broken, code, message)
}
