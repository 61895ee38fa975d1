//! Bringing an instance up: its processes, until it listens and answers as its record wants, and nagaya's own requests
//! before any visitor's.
//!
//! A start that is given up or fails leaves nothing: it is over only when no process of it is left. Not here: whether it
//! is to be started (`lifecycle`), what is run (`spawn`).

use std::cell::RefCell;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use nagaya_cmdb::instance::Stage;
use nagaya_cmdb::record::{App, Listen, Ready};
use nagaya_cmdb::{Backend, Site, Tenant};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout_at};

use super::door::Door;
use super::lifecycle::{Blame, Op};
use super::rest::Resting;
use super::surroundings::{self, Scratch};
use super::{Instance, PER_TENANT_MAX, START_MAX, address, get};
use crate::cells::{Home, Leaf};
use crate::engine::{Engine, wrong_kind};
use crate::fault::{self, Fault};
use crate::options::Options;
use crate::process::{Handle, Kind, Order, Request, Root};
use crate::protocol::{Exit, Failure};
use crate::sandbox::{Launcher, Program, ROOT_PID, Sandbox, SandboxError};
use crate::spawn::{self, Runner, Started};

/// Name of the socket the keeper listens on for an application.
const SOCKET: &str = "app.sock";

/// Characters of the site's name in the name of its socket's directory, so that the path stays short.
const DIR_NAME_MAX: usize = 32;

/// First and longest pause between two tries whether it answers as it must.
const TRY_FIRST: Duration = Duration::from_millis(10);
const TRY_MAX: Duration = Duration::from_millis(500);

/// Longest answer to one of nagaya's own requests to warm it up. One that takes longer is no reason not to go on.
const WARM_UP_MAX: Duration = Duration::from_secs(10);

/// The processes of an instance that can answer.
pub struct Body {
    /// None: its end has begun.
    handle: RefCell<Option<Handle>>,
    leaf: Arc<Leaf>,
    door: Door,
    pub resting: Arc<Resting>,
    _dir: Directory,
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

    /// Where its processes are.
    pub fn leaf(&self) -> &Arc<Leaf> {
        &self.leaf
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

    /// Ends it, and returns once nothing of it is left.
    pub async fn end(&self) {
        let handle = self.handle.take();
        if let Some(handle) = handle {
            let ended = handle.ended();
            drop(handle);
            ended.await;
        }
        self.bury();
    }

    /// Nothing of it is left.
    pub fn bury(&self) {
        self.leaf.forget_freezer();
    }
}

/// Starts the program, and returns when it can answer.
pub async fn boot(
    engine: &Rc<Engine>,
    instance: &Instance,
    number: u64,
    mut end_wanted: watch::Receiver<Option<Op>>,
) -> Result<Body, NoBody> {
    let site = instance.site();
    let Backend::App(app) = &site.backend else { return Err(wrong_kind(&site, "app").into()) };
    let began = Instant::now();
    let node_max = Duration::from_millis(engine.options().app_start_ms);
    let within = app.start_seconds.map_or(node_max, |seconds| Duration::from_secs(seconds.into()));
    let until = began + within.min(START_MAX);
    let body = spawn(engine, instance, app, number).await?;
    let ended = body.ended();
    let ready = tokio::select! {
        _ = end_wanted.wait_for(Option::is_some) => Err(NoBody::GivenUp),
        exit = ended => {
            let Exit { status, signal, .. } = exit;
            let why = format!("ended before it could answer (status {status:?}, signal {signal:?})");
            Err(broken(&site, fault::APP, &why).into())
        }
        ready = make_ready(engine, instance, app, &body, until) => ready.map_err(NoBody::Failed),
    };
    match ready {
        Ok(()) => Ok(body),
        Err(why) => {
            body.end().await;
            Err(why)
        }
    }
}

/// Starts its processes, wherever they are to be.
async fn spawn(engine: &Rc<Engine>, instance: &Instance, app: &App, number: u64) -> Result<Body, Fault> {
    let site = instance.site();
    let short: String = site.name.as_str().chars().take(DIR_NAME_MAX).collect();
    let dir = Directory(engine.instances.dir.join(format!("{short}.{number}")));
    let (handle, door) = match engine.is_root() {
        true => spawn_sandboxed(engine, instance, app, &dir.0).await?,
        false => spawn_plain(engine, instance, app, &dir.0).await?,
    };
    let leaf = handle.leaf();
    let resting = Arc::new(Resting::new(Arc::clone(&leaf)));
    Ok(Body { handle: RefCell::new(Some(handle)), leaf, door, resting, _dir: dir })
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
    let app = app.clone();
    let make = move |leaf: &_| spawn::app(&app, &tenant, &address, listener, &runner, leaf);
    let handle = engine.processes.start(order(engine, instance), make).await?.0;
    Ok((handle, Door::Plain { address: given.address, owner }))
}

async fn spawn_sandboxed(
    engine: &Rc<Engine>,
    instance: &Instance,
    app: &App,
    dir: &Path,
) -> Result<(Handle, Door), Fault> {
    let (site, tenant) = (instance.site(), instance.tenant());
    let (runner, launcher, options) = (engine.runner(&tenant)?, engine.launcher()?, engine.options());
    let listens_at = dir.join(SOCKET);
    let address = surroundings::address(app.listen, &listens_at);
    let home = Housing { site, tenant, app: app.clone(), runner, options: (*options).clone(), listens_at };
    // Out of the worker's hands once it is made.
    let housed = Arc::new(OnceLock::new());
    let told = Arc::clone(&housed);
    let make = move |leaf: &Leaf| {
        let sandbox = Arc::new(home.make(&launcher, leaf)?);
        // Nobody else fills it.
        let _ = told.set((Arc::clone(&sandbox), std::time::Instant::now()));
        home.run(sandbox)
    };
    let handle = engine.processes.start(order(engine, instance), make).await?.0;
    let (sandbox, since) = housed.get().expect("what runs has a sandbox").clone();
    instance.mark(Stage::Boot, since);
    Ok((handle, Door::Sandboxed { sandbox, address, workers: engine.workers.clone() }))
}

/// All that a worker needs to put an application into a sandbox.
struct Housing {
    site: Arc<Site>,
    tenant: Arc<Tenant>,
    app: App,
    runner: Runner,
    options: Options,
    /// On the node, for a socket the keeper listens on.
    listens_at: PathBuf,
}

impl Housing {
    fn make(&self, launcher: &Launcher, leaf: &Leaf) -> Result<Sandbox, Fault> {
        let Self { site, tenant, app, options, .. } = self;
        let identity = self.runner.identity.expect("sandboxes are made by root for tenants");
        let scratch = Scratch::of(site, options);
        scratch.make(identity)?;
        let spec = surroundings::spec(site, tenant, app, &scratch, options, (identity, leaf.entrance()));
        launcher.create(&spec).map_err(|error| of_sandbox(&error))
    }

    fn run(&self, sandbox: Arc<Sandbox>) -> Result<Started, Fault> {
        let Self { tenant, app, runner, listens_at, .. } = self;
        let address = surroundings::told(app.listen, listens_at);
        let mut env = spawn::app_environment(app, tenant, &address);
        // The sandbox says that itself.
        env.remove("LISTEN_FDS");
        env.extend(spawn::secrets(app, tenant, runner)?);
        let listener = match app.listen {
            Listen::Fd => Some(self.listen(&sandbox)?),
            Listen::Socket | Listen::Port => None,
        };
        let (log, output) = sandbox.pipe().map_err(|error| {
            Fault::new(Failure::Busy, fault::SPAWN, format!("cannot make the pipe of its log: {error}"))
        })?;
        let program = Program {
            argv: spawn::app_command(app, &address)?.into_iter().map(OsString::from).collect(),
            env: env.into_iter().map(|(name, value)| (name.into(), value.into())).collect(),
            directory: spawn::home(tenant).join(&app.directory),
            stdin: None,
            stdout: Some(output.as_fd()),
            stderr: Some(output.as_fd()),
            listener: listener.as_ref().map(AsFd::as_fd),
            pid: Some(ROOT_PID),
            open_files_max: runner.open_files_max,
        };
        let task = sandbox.run(&program).map_err(|error| of_sandbox(&error))?;
        Ok(Started { root: Root::Sandboxed { sandbox, task }, log, fds: Vec::new() })
    }

    fn listen(&self, sandbox: &Sandbox) -> Result<OwnedFd, Fault> {
        let dir = self.listens_at.parent().expect("a file in a directory");
        let listening =
            fs::DirBuilder::new().mode(0o700).create(dir).and_then(|()| sandbox.listener(&self.listens_at));
        listening.map_err(|error| Fault::of_path(fault::APP, "cannot listen on", &self.listens_at, error))
    }
}

fn of_sandbox(error: &SandboxError) -> Fault {
    let failure = match error {
        SandboxError::Run { error, .. } | SandboxError::Create { error, .. }
            if matches!(error.kind(), io::ErrorKind::OutOfMemory | io::ErrorKind::WouldBlock) =>
        {
            Failure::Busy
        }
        _ => Failure::Broken,
    };
    Fault::new(failure, error.code(), error.to_string())
}

fn order(engine: &Engine, instance: &Instance) -> Order {
    let site = instance.site();
    let home = Home { tenant: instance.tenant(), site: Some(Arc::clone(&site)), device: None };
    let order = engine.order(Kind::App, Request::none(home), site.name.to_string(), PER_TENANT_MAX);
    Order { tail: Some(Rc::clone(&instance.tail)), ..order }
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
    let said = timeout_at(until, until_answered(body, &host(&site), path, below)).await;
    said.map_err(|_| {
        let why = format!("listens, but does not answer GET {path} with a status below {below} in time");
        broken(&site, fault::NOT_READY, &why)
    })
}

async fn until_answered(body: &Body, host: &str, path: &str, below: u16) {
    let mut pause = TRY_FIRST;
    loop {
        if let Ok(socket) = body.connect().await
            && get::get(socket, host, path, START_MAX).await.is_ok_and(|status| status < below)
        {
            return;
        }
        sleep(pause).await;
        pause = (pause * 2).min(TRY_MAX);
    }
}

/// nagaya's own requests, so that what a first visitor's would load is loaded. What they answer is of no account.
pub async fn warm_up(site: &Site, app: &App, body: &Body) {
    for path in &app.warm_up {
        let Ok(socket) = body.connect().await else { return };
        match get::get(socket, &host(site), path, WARM_UP_MAX).await {
            Ok(status) => tracing::debug!(site = %site.name, path, status, "warmed up"),
            Err(error) => {
                tracing::info!(site = %site.name, path, %error, "warming it up with this path failed")
            }
        }
    }
}

/// A name the application is known by. One that stands for many stands for none here.
fn host(site: &Site) -> String {
    let plain = site.hosts.iter().map(|host| host.as_str()).find(|host| !host.contains('*'));
    plain.unwrap_or("localhost").to_owned()
}

fn broken(site: &Site, code: nagaya_base::Code, why: &str) -> Fault {
    let message = format!("the application of '{}' {why}; `nagaya instance logs` says more", site.name);
    Fault::new(Failure::Broken, code, message)
}
