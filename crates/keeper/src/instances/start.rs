//! Bringing an instance up: its processes, until it listens and answers as its record wants, and nagaya's own requests
//! before any visitor's.
//!
//! A start that is given up or fails leaves nothing: it is over only when no process of it is left. Not here: whether it
//! is to be started (`lifecycle`), what is run (`spawn`).

use std::cell::RefCell;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nagaya_cmdb::instance::Stage;
use nagaya_cmdb::record::App;
use nagaya_cmdb::{Backend, Site, Tenant};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout_at};

use super::lifecycle::{Blame, Op};
use super::rest::Resting;
use super::{Instance, PER_TENANT_MAX, START_MAX, address, get};
use crate::cells::{Home, Leaf};
use crate::engine::{Engine, wrong_kind};
use crate::fault::{self, Fault};
use crate::process::{Handle, Kind, Order, Request};
use crate::protocol::{Exit, Failure};
use crate::spawn::{self, Address};

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
    address: Address,
    /// Whose socket it must be.
    owner: Option<u32>,
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
        address::connect(&self.address, self.owner).await
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

async fn spawn(engine: &Rc<Engine>, instance: &Instance, app: &App, number: u64) -> Result<Body, Fault> {
    let (site, tenant) = (instance.site(), instance.tenant());
    let runner = engine.runner(&tenant)?;
    let owner = runner.identity.map(|identity| identity.uid);
    let short: String = site.name.as_str().chars().take(DIR_NAME_MAX).collect();
    let dir = Directory(engine.instances.dir.join(format!("{short}.{number}")));
    let given = {
        let (listen, path, runner) = (app.listen, dir.0.clone(), runner.clone());
        engine.on_worker(move || address::give(listen, &path, &runner)).await?
    };
    let (address, listener) = (given.address, given.listener);
    instance.mark(Stage::Boot);
    let order = order(engine, instance, &site, &tenant);
    let handle = {
        let (app, address) = (app.clone(), address.clone());
        let make = move |leaf: &_| spawn::app(&app, &tenant, &address, listener, &runner, leaf);
        engine.processes.start(order, make).await?.0
    };
    let leaf = handle.leaf();
    let resting = Arc::new(Resting::new(Arc::clone(&leaf)));
    Ok(Body { handle: RefCell::new(Some(handle)), leaf, address, owner, resting, _dir: dir })
}

fn order(engine: &Engine, instance: &Instance, site: &Arc<Site>, tenant: &Arc<Tenant>) -> Order {
    let home = Home { tenant: Arc::clone(tenant), site: Some(Arc::clone(site)), device: None };
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
    match timeout_at(until, address::until_listening(&body.address, body.owner)).await {
        Err(_) => return Err(broken(&site, fault::APP, "does not listen in the time it has to start")),
        Ok(Err(error)) => return Err(broken(&site, fault::APP, &format!("cannot be used: {error}"))),
        Ok(Ok(())) => {}
    }
    if let Address::Port(port) = body.address {
        let owner = body.owner;
        engine.on_worker(move || address::is_owner(port, owner)).await?;
    }
    let Some(ready) = &app.ready else { return Ok(()) };
    instance.mark(Stage::Ready);
    let until = ready
        .within_seconds
        .map_or(until, |seconds| Instant::now() + Duration::from_secs(seconds.into()).min(START_MAX));
    let said = timeout_at(until, until_ready(body, &host(&site), &ready.path)).await;
    said.map_err(|_| {
        let why = format!("listens, but does not answer GET {} with a status below 500 in time", ready.path);
        broken(&site, fault::NOT_READY, &why)
    })
}

async fn until_ready(body: &Body, host: &str, path: &str) {
    let mut pause = TRY_FIRST;
    loop {
        if let Ok(socket) = body.connect().await
            && get::get(socket, host, path, START_MAX).await.is_ok_and(|status| status < 500)
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
