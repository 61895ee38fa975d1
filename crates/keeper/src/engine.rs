//! The verbs: who may have what, and getting it.
//!
//! It knows records and limits; nothing in it knows of sockets or messages. Not here: the connection
//! (`server`), instances of applications (`instances`), how things are opened and started (`roots`, `spawn`), cells (`cells`).

use std::cell::{OnceCell, RefCell};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use nagaya_base::limits::KEEPER_MESSAGE_MAX;
use nagaya_cmdb::cell::{CellChange, Confinement, Usage};
use nagaya_cmdb::check::IdPolicy;
use nagaya_cmdb::{Backend, Site, SiteName, Table, Tenant, TenantName};
use parking_lot::RwLock;
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio::time::sleep_until;

use crate::authority::{Authority, NO_WARDEN};
use crate::cells::{Cells, Home, Leaf, Numbers};
use crate::enclosure::Enclosures;
use crate::fault::{self, Fault};
use crate::gate::{Gate, ScriptRule, SiteScripts};
use crate::image::{self, TransferEnd, TransferOrder};
use crate::instances::{self, Instances};
use crate::log::{Budget, Writer};
use crate::metrics::{ImageEvent, Metrics};
use crate::options::Options;
use crate::process::{Handle, KINDS, Kind, Order, Process, Processes, Request};
use crate::protocol::{Failure, OpenedRoot, ProcessId, Reply};
use crate::relay::{ForbiddenPlaces, Relay};
use crate::root_mounts::RootMounts;
use crate::sandbox::{self, Launcher};
use crate::spawn::{self, PhpStart, Runner};
use crate::sys::Identity;
use crate::workers::Workers;
use crate::{cgi, confinement, huge_pages, roots, server_socket};

/// Bytes of named cells in one answer; the rest of the message is less than a thousand.
const NAMED_CELLS_JSON_MAX: usize = KEEPER_MESSAGE_MAX - 1024;

/// Everything the verbs need, on the keeper's one thread.
pub struct Engine {
    options: RefCell<Rc<Options>>,
    table: Arc<RwLock<Table>>,
    /// Until when what is placed here may run.
    pub authority: Authority,
    pub workers: Workers,
    pub processes: Rc<Processes>,
    pub instances: Instances,
    pub metrics: Metrics,
    /// None: without root, or it could not be started.
    launcher: Option<Arc<Launcher>>,
    /// Where sockets of PHP workers have a name for a moment.
    php_sockets: Arc<OwnedFd>,
    /// Begins with the first application that needs it.
    relay: OnceCell<Relay>,
    /// Begins with the first PHP worker.
    gate: OnceCell<Gate>,
    /// What CGI programs and PHP workers run in.
    enclosures: OnceCell<Arc<Enclosures>>,
    root_mounts: Arc<RootMounts>,
    /// Some tenant gives way, or some site goes first.
    way: Notify,
    is_root: bool,
    /// Whether a sandbox can be made, or why not. Empty: that is not known yet.
    trial: OnceCell<Result<(), String>>,
}

#[derive(Debug, thiserror::Error)]
#[error("{what} {path}: {error}")]
pub struct EngineError {
    what: &'static str,
    path: String,
    #[source]
    error: io::Error,
}

impl Engine {
    pub fn new(
        options: Options,
        table: Arc<RwLock<Table>>,
        launcher: Option<Arc<Launcher>>,
        authority: Authority,
    ) -> Result<Rc<Self>, EngineError> {
        let because = |what, path: &Path| {
            let path = path.display().to_string();
            move |error| EngineError { what, path, error }
        };
        let is_root = rustix::process::geteuid().is_root();
        let cells = Arc::new(Cells::open(options.back_end, options.processes_per_tenant));
        let workers =
            Workers::start().map_err(because("cannot start threads for", Path::new("the keeper")))?;
        let metrics = Metrics::new();
        let php = options.runtime_dir.join("php");
        let apps = options.runtime_dir.join("apps");
        // Tenants pass through the directory of their applications' sockets; nobody lists it.
        fresh_directory(&apps, 0o711).map_err(because("cannot make", &apps))?;
        fresh_directory(&php, 0o700).map_err(because("cannot make", &php))?;
        let php_sockets = spawn::open_directory(&php).map_err(because("cannot open", &php))?;
        huge_pages::apply(options.instances.huge_pages);
        let logs = instances::logs_dir(&options);
        let logs = Writer::start(logs.clone(), instances::log_bounds(&options), metrics.clone())
            .map_err(because("cannot start the thread for", &logs))?;
        let instances = Instances::new(apps, &options, logs);
        let processes = Processes::new(cells, workers.clone(), metrics.clone(), options.processes_max);
        Ok(Rc::new(Self {
            options: RefCell::new(Rc::new(options)),
            table,
            authority,
            workers,
            processes,
            instances,
            launcher,
            metrics,
            php_sockets: Arc::new(php_sockets),
            relay: OnceCell::new(),
            gate: OnceCell::new(),
            enclosures: OnceCell::new(),
            root_mounts: Arc::new(RootMounts::new(is_root)),
            way: Notify::new(),
            is_root,
            trial: OnceCell::new(),
        }))
    }

    /// Takes changed settings over; those that hold for life are left as they are.
    pub fn set_options(self: &Rc<Self>, mut options: Options) {
        let old = self.options();
        options.runtime_dir.clone_from(&old.runtime_dir);
        options.instances.images.clone_from(&old.instances.images);
        let joins = old.node.is_none() && options.node.is_some();
        if old.node.is_some() {
            options.node.clone_from(&old.node);
        }
        (options.ids.edge_uid, options.back_end) = (old.ids.edge_uid, old.back_end);
        self.processes.set_total_max(options.processes_max);
        if options.processes_per_tenant != old.processes_per_tenant {
            self.cells().apply_records(&self.table.read(), options.processes_per_tenant);
        }
        huge_pages::apply(options.instances.huge_pages);
        if let Some(relay) = self.relay.get() {
            relay.set_etcd(&options.etcd);
        }
        if let Some(enclosures) = self.enclosures.get() {
            enclosures.set_options(&options.programs);
        }
        *self.options.borrow_mut() = Rc::new(options);
        self.instances.options_changed(self);
        if joins {
            self.join_cluster();
        }
    }

    /// What has run so far was nobody's to stop: it is given up as it falls idle, and starts anew where it is placed.
    fn join_cluster(self: &Rc<Self>) {
        if let Err(error) = self.authority.begin(self.launcher.as_deref()) {
            tracing::error!(%error, "{}: nothing that is placed on this node can be started", NO_WARDEN);
        }
        let engine = Rc::clone(self);
        tokio::task::spawn_local(async move { engine.instances.release_all(&engine).await });
    }

    pub fn options(&self) -> Rc<Options> {
        Rc::clone(&self.options.borrow())
    }

    pub fn table(&self) -> &Arc<RwLock<Table>> {
        &self.table
    }

    pub fn is_root(&self) -> bool {
        self.is_root
    }

    /// Finds out whether an application could run here, before one is asked for.
    pub async fn try_sandbox(&self) {
        let Some(launcher) = self.launcher.clone() else { return };
        let tried = self.on_worker(move || {
            Ok(sandbox::try_sandbox(&launcher).map_err(|error| (error.code(), sandbox::explain(&error))))
        });
        let Ok(tried) = tried.await else { return };
        if let Err((code, why)) = &tried {
            tracing::error!("{code}: no application can run on this node: {why}");
        }
        // It is asked once.
        let _ = self.trial.set(tried.map_err(|(code, why)| format!("{code}: {why}")));
    }

    fn trial_status(&self) -> Value {
        match (self.trial.get(), &self.launcher) {
            (Some(Ok(())), _) => json!("ok"),
            (Some(Err(why)), _) => json!(why),
            (None, Some(_)) => Value::Null,
            (None, None) if self.is_root => {
                json!(format!("{}: the launcher could not be started", sandbox::LAUNCHER))
            }
            (None, None) => json!("none without root"),
        }
    }

    /// What makes sandboxes.
    pub fn launcher(&self) -> Result<Arc<Launcher>, Fault> {
        self.launcher.clone().ok_or_else(|| {
            let message = "no sandbox can be made: its launcher could not be started; the log of nagaya's start says why";
            Fault::new(Failure::Broken, sandbox::LAUNCHER, message)
        })
    }

    /// What passes applications' connections on.
    pub fn relay(&self) -> Result<Relay, Fault> {
        if let Some(relay) = self.relay.get() {
            return Ok(relay.clone());
        }
        let forbidden = ForbiddenPlaces::new(Arc::clone(&self.table), self.options().etcd.clone());
        let relay = Relay::start(self.metrics.clone(), forbidden).map_err(|error| {
            let message = format!("the relay of applications' connections cannot be started: {error}");
            Fault::new(Failure::Busy, fault::OUTLET, message)
        })?;
        Ok(self.relay.get_or_init(|| relay).clone())
    }

    /// What CGI programs and PHP workers run in. The first call tries whether there can be any.
    pub fn enclosures(&self) -> Arc<Enclosures> {
        let start = || {
            let all = Enclosures::start(&self.options(), self.is_root, self.relay());
            if let Some(why) = all.off() {
                let code = fault::ENCLOSURE;
                tracing::warn!(
                    "{code}: CGI programs and PHP workers share the node's network, /tmp and /proc: {why}"
                );
            }
            Arc::new(all)
        };
        Arc::clone(self.enclosures.get_or_init(start))
    }

    /// What stands before PHP workers.
    fn gate(&self) -> Result<Gate, Fault> {
        if let Some(gate) = self.gate.get() {
            return Ok(gate.clone());
        }
        let gate = Gate::start().map_err(|error| {
            let message = format!("the gate before PHP workers cannot be started: {error}");
            Fault::new(Failure::Busy, fault::SPAWN, message)
        })?;
        Ok(self.gate.get_or_init(|| gate).clone())
    }

    pub fn cells(&self) -> &Arc<Cells> {
        self.processes.cells()
    }

    /// Ends what runs for tenants and sites that are gone or are somebody else now; the others get their new limits.
    pub fn records_changed(self: &Rc<Self>) {
        self.instances.records_changed(self);
        let table = self.table.read();
        self.cells().apply_records(&table, self.options().processes_per_tenant);
        self.processes.refresh(|site| table.site(site.name.as_str()));
        self.processes.refresh_scripts(|name, tenant| {
            let site = table.site(name.as_str()).filter(|site| site.tenant == tenant.name)?;
            // One whose root is not known any more has no scripts either.
            SiteScripts::of(&site, &*table.tenant(tenant.name.as_str())?).ok().flatten()
        });
        self.processes.end_where(|process| {
            process.kind != Kind::App
                && table
                    .tenant(process.tenant.name.as_str())
                    .is_none_or(|now| !same_runner(&now, &process.tenant))
        });
    }

    pub fn site(&self, name: &SiteName) -> Result<(Arc<Site>, Arc<Tenant>), Fault> {
        let table = self.table.read();
        let known = table
            .site(name.as_str())
            .and_then(|site| table.tenant(site.tenant.as_str()).map(|tenant| (site, tenant)));
        known.ok_or_else(|| {
            Fault::new(Failure::NotFound, fault::UNKNOWN, format!("there is no site '{name}'"))
        })
    }

    /// Where a site's application is, for who looks for it here. A node that was removed does not know.
    pub fn elsewhere(&self, name: &SiteName, message: String) -> Reply {
        let placed = self.table.read().placement(name.as_str()).filter(|_| !self.authority.is_removed());
        let (node, epoch) = placed.map(|placed| (placed.node, placed.epoch)).unzip();
        Reply::Elsewhere { node, epoch, message }
    }

    /// Verifies that a supervisor of this node's cluster has ordered the transfer. Each refusal is counted, and those whose number
    /// is a power of two are logged: no edge that does as it should asks without an order.
    pub fn verify_order(
        &self,
        site: &SiteName,
        order: &str,
        end: TransferEnd,
    ) -> Result<TransferOrder, Fault> {
        let options = self.options();
        let keys = &options.instances.image_keys;
        image::verify_order(order, keys, options.node.as_deref(), site, end).map_err(|error| {
            let not_ordered = [ImageEvent::NotOrdered as usize];
            self.metrics.images.add(not_ordered, 1);
            let count = self.metrics.images.get(not_ordered);
            if count.is_power_of_two() {
                let code = image::NOT_ORDERED;
                tracing::warn!(%site, count, "{code}: the edge has asked for an image without an order: {error}");
            }
            let message = format!("the image of '{site}' stays where it is: {error}");
            Fault::new(Failure::Forbidden, image::NOT_ORDERED, message)
        })
    }

    /// What another node is to be told of a site's image.
    pub async fn offer_image(self: &Rc<Self>, name: &SiteName, order: &str) -> Result<Reply, Fault> {
        self.verify_order(name, order, TransferEnd::Either)?;
        let Some(offer) = self.instances.offer_image(self, name).await? else {
            return Ok(Reply::Offered { offer: None, digest: String::new(), bytes: 0 });
        };
        let (digest, bytes) = (offer.digest.to_string(), offer.bytes);
        let offer = serde_json::to_string(&offer).expect("an offer is made of texts and numbers");
        Ok(Reply::Offered { offer: Some(offer), digest, bytes })
    }

    /// Whose rights a tenant's work gets. Without root everything runs as the keeper itself.
    pub fn runner(&self, tenant: &Tenant) -> Result<Runner, Fault> {
        let options = self.options();
        let identity = Identity { uid: tenant.uid, gid: tenant.gid };
        if self.is_root
            && let Some(message) = refuse_ids(tenant, &options.ids)
        {
            return Err(Fault::new(Failure::Forbidden, fault::TENANT_UID, message));
        }
        // Raising a hard limit is a right of its own, which a container's root may lack.
        let hard = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum;
        let open_files_max = options.open_files_max.min(hard.unwrap_or(u64::MAX));
        Ok(Runner { identity: self.is_root.then_some(identity), open_files_max })
    }

    pub async fn open_root(&self, name: &SiteName) -> Result<OpenedRoot, Fault> {
        let (site, tenant) = self.site(name)?;
        let identity = self.runner(&tenant)?.identity;
        let mounts = Arc::clone(&self.root_mounts);
        let name = tenant.name.clone();
        let open = move || {
            let root = roots::open_root(&site, &tenant, identity)?;
            mounts.give(root).map_err(|error| {
                let what = "cannot make a mount of the document root of site";
                Fault::of_path(fault::ROOT, what, Path::new(site.name.as_str()), error)
            })
        };
        self.on_worker_for(&name, open).await
    }

    pub fn root_mounts(&self) -> &Arc<RootMounts> {
        &self.root_mounts
    }

    /// A connection to the Unix socket of a site's server, made with the rights of `peer`, which asks for it.
    pub async fn connect_server(&self, name: &SiteName, peer: Identity) -> Result<OwnedFd, Fault> {
        let (site, tenant) = self.site(name)?;
        let path = match &site.backend {
            Backend::Http(http) => http.address.strip_prefix("unix:").map(PathBuf::from),
            _ => None,
        };
        let Some(path) = path else { return Err(wrong_kind(&site, "http with a Unix socket")) };
        let whose = (self.is_root && peer.uid != 0).then_some(peer);
        let name = tenant.name.clone();
        // The file system that the socket is on may hang, too.
        self.on_worker_for(&name, move || server_socket::connect(&path, tenant.home.as_deref(), whose)).await
    }

    pub async fn open_certificate(&self, name: String) -> Result<OwnedFd, Fault> {
        let certificates = self.options().certificates.clone();
        self.on_worker(move || roots::open_certificate(certificates.as_deref(), &name)).await
    }

    pub async fn spawn_cgi(
        &self,
        name: &SiteName,
        script: String,
        env: Vec<(String, String)>,
        asked: Confinement,
    ) -> Result<(Handle, Vec<OwnedFd>), Fault> {
        let (site, tenant) = self.site(name)?;
        let Backend::Cgi(files) = &site.backend else { return Err(wrong_kind(&site, "cgi")) };
        cgi::check_script(files, &script)?;
        confinement::check(&asked)?;
        let most = self.options().cgi_per_tenant_max;
        let runner = self.runner(&tenant)?;
        let request = self.request(&site, &tenant, asked).await?;
        let order = self.order(Kind::Cgi, request, site.name.to_string(), most);
        let enclosures = self.enclosures();
        let start = move |leaf: &Leaf| spawn::cgi(&site, &tenant, &script, env, &runner, (leaf, &enclosures));
        self.processes.start(order, start).await
    }

    /// A worker of the site's tenant. It may serve the tenant's other sites later (`enter`).
    pub async fn spawn_php(&self, name: &SiteName) -> Result<(Handle, Vec<OwnedFd>), Fault> {
        let (site, tenant) = self.site(name)?;
        let scripts = SiteScripts::of(&site, &tenant)?.ok_or_else(|| wrong_kind(&site, "php"))?;
        let options = self.options();
        let runner = self.runner(&tenant)?;
        let most = tenant.php_workers.unwrap_or(options.php_workers_per_tenant);
        let request = Request::none(Home { tenant: Arc::clone(&tenant), site: None, device: None });
        let mut order = self.order(Kind::Php, request, tenant.name.to_string(), most);
        let scripts = ScriptRule::new(site.name.clone(), scripts);
        order.scripts = Some(Arc::clone(&scripts));
        let start = PhpStart {
            php_cgi: options.php_cgi.clone(),
            sockets: Arc::clone(&self.php_sockets),
            gate: self.gate()?,
            scripts,
            enclosures: self.enclosures(),
        };
        self.processes.start(order, move |leaf| spawn::php(&start, &tenant, &runner, leaf)).await
    }

    /// Moves a worker of the site's tenant to where the request is to run. Returns its cell's name.
    pub async fn enter(&self, id: ProcessId, name: &SiteName, asked: Confinement) -> Result<String, Fault> {
        let process = self.worker(id)?;
        let (site, tenant) = self.site(name)?;
        let scripts = SiteScripts::of(&site, &tenant)?.ok_or_else(|| wrong_kind(&site, "php"))?;
        if tenant.name != process.tenant.name {
            let message = format!("site '{name}' is of another tenant than process {}", id.0);
            return Err(Fault::new(Failure::Forbidden, fault::UNKNOWN, message));
        }
        confinement::check(&asked)?;
        let request = self.request(&site, &tenant, asked).await?;
        let cell = self.processes.enter(&process, request).await?;
        process.serve_scripts(&site.name, scripts);
        Ok(cell)
    }

    pub async fn leave(&self, id: ProcessId) -> Result<Usage, Fault> {
        self.processes.leave(&self.worker(id)?).await
    }

    pub fn measure(&self, id: ProcessId) -> Result<Usage, Fault> {
        self.processes.find(id).map(|process| process.usage())
    }

    fn worker(&self, id: ProcessId) -> Result<Rc<Process>, Fault> {
        let process = self.processes.find(id)?;
        if process.kind == Kind::Php {
            return Ok(process);
        }
        let message = format!("process {} serves no more than one request: it cannot enter or leave", id.0);
        Err(Fault::new(Failure::Invalid, fault::WRONG_KIND, message))
    }

    /// What a request of this site is to run under.
    pub async fn request(
        &self,
        site: &Arc<Site>,
        tenant: &Arc<Tenant>,
        asked: Confinement,
    ) -> Result<Request, Fault> {
        let mut home = Home { tenant: Arc::clone(tenant), site: Some(Arc::clone(site)), device: None };
        // Asked of the disk only where the answer matters: most requests are limited by other things.
        if confinement::names_root_device(tenant, site, &asked) {
            let (site, tenant) = (Arc::clone(site), Arc::clone(tenant));
            let identity = self.runner(&tenant)?.identity;
            home.device = Some(self.on_worker(move || roots::device(&site, &tenant, identity)).await?);
        }
        Ok(Request::new(home, asked))
    }

    /// Stops at the first change that fails; those before it hold.
    pub fn change_cells(&self, changes: &[CellChange]) -> Result<(), Fault> {
        confinement::check_changes(changes)?;
        Ok(changes.iter().try_for_each(|change| self.cells().change(change))?)
    }

    /// Some tenants give way to others for a while, some do so no more. Those for whom nothing runs are passed over.
    pub fn give_way(&self, give_way: &[TenantName], resume: &[TenantName]) -> Result<(), Fault> {
        confinement::check_giving_way(give_way, resume)?;
        self.cells().give_way(give_way, resume, Instant::now());
        self.way.notify_one();
        Ok(())
    }

    /// What runs for this site goes first on the processor until then.
    pub fn precede(&self, site: &SiteName, tenant: &TenantName, until: Instant) {
        self.cells().precede(site, tenant, until);
        self.way.notify_one();
    }

    /// Sees to it that nobody gives way or goes first for longer than was asked for.
    pub async fn mind_the_way(&self) {
        loop {
            let next = self.cells().end_in_time(Instant::now());
            let due = async {
                match next {
                    Some(next) => sleep_until(next.into()).await,
                    None => std::future::pending().await,
                }
            };
            // What is asked for meanwhile may be over sooner.
            tokio::select! {
                () = due => {}
                () = self.way.notified() => {}
            }
        }
    }

    /// Named cells for rules that ask, as many as fit in one answer.
    pub async fn named_cells(&self) -> Result<String, Fault> {
        let cells = Arc::clone(self.cells());
        self.on_worker(move || Ok(fitted(cells.show_named(), NAMED_CELLS_JSON_MAX).to_string())).await
    }

    /// The tree of cells, for `nagaya cells`. It reads some thousand files, so not on the one thread.
    pub async fn show_cells(&self) -> String {
        let cells = Arc::clone(self.cells());
        let shown = self.on_worker(move || Ok(cells.show().to_string())).await;
        shown.unwrap_or_else(|fault| json!({"error": fault.to_string()}).to_string())
    }

    pub fn order(&self, kind: Kind, request: Request, label: String, per_tenant_max: u32) -> Order {
        let bytes_max = self.options().stderr_bytes_max as usize;
        let log = Budget { bytes_max, refills: kind != Kind::Cgi };
        Order { kind, request, label, per_tenant_max, log, journal: None, scripts: None }
    }

    /// Prometheus text.
    pub fn encode_metrics(&self) -> String {
        self.metrics.images.add([ImageEvent::Quarantined as usize], self.instances.take_found_wrong());
        self.metrics.encode(self.cells(), &self.instances)
    }

    /// For `nagaya status`.
    pub fn status(&self) -> String {
        let kinds = KINDS.iter().map(|kind| {
            let (running, started, failed) = self.processes.numbers(*kind);
            (kind.as_str().to_owned(), json!({"running": running, "started": started, "failed": failed}))
        });
        let (revision, sites) = {
            let table = self.table.read();
            (table.revision(), table.site_count())
        };
        json!({
            "fence": self.cells().fence().as_str(),
            "root": self.is_root,
            "revision": revision,
            "sites": sites,
            "connections": self.metrics.connections.get(),
            "processes": kinds.collect::<serde_json::Map<_, _>>(),
            "cluster": self.authority.status(),
            "cells": self.cells_status(),
            "instances": self.instances.status(),
            "sandbox": self.trial_status(),
            "enclosures": self.enclosures_status(),
        })
        .to_string()
    }

    fn enclosures_status(&self) -> Value {
        let all = self.enclosures();
        let (now, made) = all.numbers();
        json!({"now": now, "made": made, "off": all.off()})
    }

    fn cells_status(&self) -> Value {
        let Numbers { tenants, sites, named, giving_way, requests, free, made, reused } =
            self.cells().numbers();
        json!({
            "tenants": tenants,
            "sites": sites,
            "named": named,
            "requests": requests,
            "free": free,
            "made": made,
            "reused": reused,
            "giving_way": giving_way,
            "enters": self.metrics.enters.get(),
            "moves": self.metrics.moves.get(),
            "demotions": self.metrics.demotions.get(),
            "limit_failures": self.cells().complaints(),
            "orphans": self.cells().orphans(),
        })
    }

    pub async fn on_worker<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> Result<T, Fault> + Send + 'static,
    ) -> Result<T, Fault> {
        self.workers.run(job)?.await.unwrap_or_else(|_| Err(failed_inside()))
    }

    /// The same for what looks at this tenant's files. Its file system may hang: then it holds up the tenant's own programs, and nobody
    /// else's.
    pub async fn on_worker_for<T: Send + 'static>(
        &self,
        tenant: &TenantName,
        job: impl FnOnce() -> Result<T, Fault> + Send + 'static,
    ) -> Result<T, Fault> {
        self.workers.start_for(tenant, job)?.await.unwrap_or_else(|_| Err(failed_inside()))
    }
}

/// Why this tenant's programs are not run, if they are not.
fn refuse_ids(tenant: &Tenant, ids: &IdPolicy) -> Option<String> {
    if tenant.uid == 0 || tenant.gid == 0 {
        let Tenant { name, uid, gid, .. } = tenant;
        return Some(format!("tenant '{name}' has uid {uid} and gid {gid}: neither may be root's"));
    }
    ids.refusal(tenant)
}

fn failed_inside() -> Fault {
    Fault::new(Failure::Broken, fault::PROTOCOL, "the keeper failed inside; see its log")
}

/// Whether processes of one may go on as the other's.
pub fn same_runner(a: &Tenant, b: &Tenant) -> bool {
    (a.uid, a.gid, &a.home) == (b.uid, b.gid, &b.home)
}

pub fn wrong_kind(site: &Site, wanted: &str) -> Fault {
    let message = format!("site '{}' is of kind {}, not {wanted}", site.name, site.backend.kind());
    Fault::new(Failure::Invalid, fault::WRONG_KIND, message)
}

/// A list of cells, cut so that it is no longer than this many bytes as text.
fn fitted(mut shown: Value, len_max: usize) -> Value {
    let mut room = len_max;
    let Some(cells) = shown["cells"].as_array_mut() else { return shown };
    let fits = |cell: &&Value| {
        let left = room.checked_sub(cell.to_string().len() + 1);
        room = left.unwrap_or(0);
        left.is_some()
    };
    let fitting = cells.iter().take_while(fits).count();
    let cut = cells.len() - fitting;
    cells.truncate(fitting);
    shown["left_out"] = json!(shown["left_out"].as_u64().unwrap_or(0) + cut as u64);
    shown
}

/// An empty directory with exactly this mode. What a dead keeper left in it are sockets nobody listens on.
fn fresh_directory(path: &Path, mode: u32) -> io::Result<()> {
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent)?;
    }
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    std::fs::DirBuilder::new().mode(mode).create(path)?;
    // The process's umask may have taken bits away.
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_cells_is_cut_to_what_fits_and_says_so() {
        let cells = |n: usize| json!({"cells": vec![json!({"path": "named/x"}); n], "left_out": 5});
        let len = json!({"path": "named/x"}).to_string().len() + 1;
        assert_eq!(fitted(cells(3), 3 * len), cells(3));
        let cut = fitted(cells(3), 3 * len - 1);
        assert_eq!((cut["cells"].as_array().unwrap().len(), &cut["left_out"]), (2, &json!(6)));
    }
}
