//! Carries out the verbs: decides whether the caller may have something, and gets it.
//!
//! It knows records and limits; nothing in it knows of sockets or messages. Not here: the
//! connection (`server`), what they share with instances (`context`), instances of applications
//! (`instances`), how things are opened and started (`roots`, `spawn`), cells (`cells`).

use std::cell::OnceCell;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use nagaya_base::limits::KEEPER_MESSAGE_MAX;
use nagaya_keeper_api::protocol::{FailureKind, OpenedRoot, ProcessId, VerbReply};
use nagaya_keeper_api::root_changes::RootMark;
use nagaya_records::cell::{CellChange, Confinement, RequestUsage};
use nagaya_records::{Backend, Site, SiteName, Tenant};
use serde_json::{Value, json};

use crate::authority::NO_WARDEN;
use crate::cells::{CellCounts, CellParent, Leaf, ProcessTracking};
use crate::context::{KeeperContext, SetupError, fresh_directory, same_runner, wrong_kind};
use crate::enclosure::Enclosures;
use crate::fault::{self, Fault};
use crate::gate::{ScriptGate, ScriptRule, SiteScripts};
use crate::image::{self, TransferEnd, TransferOrder};
use crate::instances::{self, NodeInstances};
use crate::metrics::ImageEvent;
use crate::options::KeeperConfig;
use crate::paths::root_watch::RootWatch;
use crate::paths::roots;
use crate::paths::tenant_path::{self, PathOwner};
use crate::php_parent::{PARENTS_PER_TENANT_MAX, ParentBasis, PhpParent, PhpParents};
use crate::process::{CellRequest, KINDS, ProcessKind, ProcessRef, ProcessTree};
use crate::root_mounts::RootMounts;
use crate::spawn::{self, PhpProgram, PhpStart, RunAs};
use crate::sys::UnixIdentity;
use crate::{cgi, confinement, sandbox, server_socket};

/// Maximum length of the list of named cells in one reply, bytes. The rest of the message is less
/// than a thousand.
const NAMED_CELLS_JSON_MAX: usize = KEEPER_MESSAGE_MAX - 1024;

/// Implements each verb, and holds the resources that only verbs need.
pub struct Verbs {
    pub context: Rc<KeeperContext>,
    pub instances: Rc<NodeInstances>,
    /// Directory in which the sockets of PHP workers have a name for a moment.
    php_sockets: Arc<OwnedFd>,
    /// Started with the first PHP worker.
    gate: OnceCell<ScriptGate>,
    /// The parents that make PHP workers.
    php_parents: PhpParents,
    /// The enclosures in which CGI programs and PHP workers run.
    enclosures: OnceCell<Arc<Enclosures>>,
    root_mounts: Arc<RootMounts>,
    root_watch: Arc<RootWatch>,
    /// Result of the test whether a sandbox can be made. Empty before the test.
    trial: OnceCell<Result<(), String>>,
}

impl Verbs {
    pub fn new(context: Rc<KeeperContext>) -> Result<Rc<Self>, SetupError> {
        let php = context.options().runtime_dir.join("php");
        fresh_directory(&php, 0o700).map_err(SetupError::at("cannot make", &php))?;
        let php_sockets = spawn::open_directory(&php).map_err(SetupError::at("cannot open", &php))?;
        Ok(Rc::new(Self {
            instances: NodeInstances::new(Rc::clone(&context)),
            php_sockets: Arc::new(php_sockets),
            gate: OnceCell::new(),
            php_parents: PhpParents::default(),
            enclosures: OnceCell::new(),
            root_mounts: Arc::new(RootMounts::new(context.is_root())),
            root_watch: Arc::new(RootWatch::new()),
            trial: OnceCell::new(),
            context,
        }))
    }

    /// Takes changed settings over.
    pub fn set_options(&self, options: KeeperConfig) {
        if let Some(enclosures) = self.enclosures.get() {
            enclosures.set_options(&options.programs, options.mail.relay);
        }
        let joins = self.context.set_options(options);
        instances::follow_options(&self.instances);
        if joins {
            self.join_cluster();
        }
    }

    /// Ends what no lease has covered so far. Each instance is given up as it becomes idle, and
    /// starts again on the node where it is placed.
    fn join_cluster(&self) {
        if let Err(error) = self.context.begin_authority() {
            tracing::error!(%error, "{}: nothing that is placed on this node can be started", NO_WARDEN);
        }
        let instances = Rc::clone(&self.instances);
        tokio::task::spawn_local(async move { instances::release_all(&instances).await });
    }

    /// Tests whether an application could run here, before one is needed.
    pub async fn try_sandbox(&self) {
        let Ok(launcher) = self.context.launcher() else { return };
        let tried = self.context.on_worker(move || {
            Ok(sandbox::try_sandbox(&launcher).map_err(|error| (error.code(), sandbox::explain(&error))))
        });
        let Ok(tried) = tried.await else { return };
        if let Err((code, why)) = &tried {
            tracing::error!("{code}: no application can run on this node: {why}");
        }
        // The test runs once.
        let _ = self.trial.set(tried.map_err(|(code, why)| format!("{code}: {why}")));
    }

    fn trial_status(&self) -> Value {
        match (self.trial.get(), self.context.launcher()) {
            (Some(Ok(())), _) => json!("ok"),
            (Some(Err(why)), _) => json!(why),
            (None, Ok(_)) => Value::Null,
            (None, Err(_)) if self.context.is_root() => {
                json!(format!("{}: the launcher could not be started", sandbox::LAUNCHER))
            }
            (None, Err(_)) => json!("none without root"),
        }
    }

    /// Returns the enclosures of CGI programs and PHP workers. The first call tests whether there
    /// can be any.
    pub fn enclosures(&self) -> Arc<Enclosures> {
        let start = || {
            let all =
                Enclosures::start(&self.context.options(), self.context.is_root(), self.context.relay());
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

    /// Returns the gate in front of PHP workers.
    fn gate(&self) -> Result<ScriptGate, Fault> {
        if let Some(gate) = self.gate.get() {
            return Ok(gate.clone());
        }
        let gate = ScriptGate::start().map_err(|error| {
            let message = format!("the gate before PHP workers cannot be started: {error}");
            Fault::new(FailureKind::Busy, fault::SPAWN, message)
        })?;
        Ok(self.gate.get_or_init(|| gate).clone())
    }

    /// Ends everything that runs for tenants and sites that are gone or have changed their owner.
    /// The others get their new limits.
    pub fn records_changed(&self) {
        instances::follow_records(&self.instances);
        let table = self.context.table().read();
        self.context.cells().apply_records(&table, self.context.options().processes_per_tenant);
        self.context.processes.refresh(|site| table.site(site.name.as_str()));
        self.context.processes.refresh_scripts(|name, tenant| {
            let site = table.site(name.as_str()).filter(|site| site.tenant == tenant.name)?;
            // A site whose root is no longer known has no scripts either.
            let tenant = table.tenant(tenant.name.as_str())?;
            self.find_scripts(&site, &tenant).ok().flatten()
        });
        self.context.processes.end_where(|process| {
            process.kind != ProcessKind::App
                && table
                    .tenant(process.tenant.name.as_str())
                    .is_none_or(|now| !same_runner(&now, &process.tenant))
        });
    }

    /// Says where a site's application is, for a caller that looks for it here. A removed node does
    /// not know.
    pub fn elsewhere(&self, name: &SiteName, message: String) -> VerbReply {
        let placed = self
            .context
            .table()
            .read()
            .placement(name.as_str())
            .filter(|_| !self.context.authority.is_removed());
        let (node, epoch) = placed.map(|placed| (placed.node, placed.epoch)).unzip();
        VerbReply::Elsewhere { node, epoch, message }
    }

    /// Verifies that a supervisor of this node's cluster has ordered the transfer. Each refusal is
    /// counted. Refusals whose number is a power of two are logged: a correct edge never calls
    /// without an order.
    pub fn verify_order(
        &self,
        site: &SiteName,
        order: &str,
        end: TransferEnd,
    ) -> Result<TransferOrder, Fault> {
        let options = self.context.options();
        let keys = &options.instances.image_keys;
        image::verify_order(order, keys, options.node.as_deref(), site, end).map_err(|error| {
            let not_ordered = [ImageEvent::NotOrdered as usize];
            self.context.metrics.images.add(not_ordered, 1);
            let count = self.context.metrics.images.get(not_ordered);
            if count.is_power_of_two() {
                let code = image::NOT_ORDERED;
                tracing::warn!(%site, count, "{code}: the edge has asked for an image without an order: {error}");
            }
            let message = format!("the image of '{site}' stays where it is: {error}");
            Fault::new(FailureKind::Forbidden, image::NOT_ORDERED, message)
        })
    }

    /// Describes a site's image for another node.
    pub async fn offer_image(&self, name: &SiteName, order: &str) -> Result<VerbReply, Fault> {
        self.verify_order(name, order, TransferEnd::Either)?;
        let Some(offer) = instances::offer_image(&self.instances, name).await? else {
            return Ok(VerbReply::Offered { offer: None, digest: String::new(), bytes: 0 });
        };
        let (digest, bytes) = (offer.digest.to_string(), offer.bytes);
        let offer = serde_json::to_string(&offer).expect("an offer is made of texts and numbers");
        Ok(VerbReply::Offered { offer: Some(offer), digest, bytes })
    }

    /// Opens the site's document root. The mark is its change count, if the path to it is watched.
    pub async fn open_root(&self, name: &SiteName) -> Result<(OpenedRoot, Option<RootMark>), Fault> {
        let (site, tenant) = self.context.site(name)?;
        let identity = self.context.runner(&tenant)?.identity;
        let (mounts, watch) = (Arc::clone(&self.root_mounts), Arc::clone(&self.root_watch));
        let name = tenant.name.clone();
        let give = move || {
            let open = || {
                let root = roots::open_root(&site, &tenant, identity)?;
                mounts.give(root).map_err(|error| {
                    let what = "cannot make a mount of the document root of site";
                    Fault::of_path(fault::ROOT, what, Path::new(site.name.as_str()), error)
                })
            };
            watch.open(&site, open, || roots::trace_root(&site, &tenant, identity))
        };
        self.context.on_worker_for(&name, give).await
    }

    /// Opens the end of a link out of the site's document root. A file is opened with the rights of
    /// `peer`, which requested it. So links let it read nothing that it could not read below the
    /// root.
    pub async fn open_link(
        &self,
        name: &SiteName,
        path: String,
        peer: UnixIdentity,
    ) -> Result<OpenedRoot, Fault> {
        let (site, tenant) = self.context.site(name)?;
        let identity = self.context.runner(&tenant)?.identity;
        let mounts = Arc::clone(&self.root_mounts);
        let Some(look) = mounts.begin_link_look(&tenant.name).await else {
            let message = format!("too many links of tenant '{}' are looked up at once", tenant.name);
            return Err(Fault::new(FailureKind::Busy, fault::LIMIT, message));
        };
        let reader = PathOwner::new(None, (self.context.is_root() && peer.uid != 0).then_some(peer));
        let whose = tenant.name.clone();
        let give = move || {
            let _look = look;
            let found = roots::open_link(&site, &tenant, identity, &path)?;
            let given = match tenant_path::is_directory(&found) {
                Ok(true) => mounts.give_link(found, &tenant.name),
                Ok(false) => give_file(&reader, &mounts, &found),
                Err(error) => Err(error),
            };
            let what = "cannot give what a link leads to:";
            given.map_err(|error| Fault::of_path(fault::LINK, what, Path::new(&path), error))
        };
        self.context.on_worker_for(&whose, give).await
    }

    pub fn root_watch(&self) -> &RootWatch {
        &self.root_watch
    }

    /// Lets the edge reopen document roots whose paths lead to other directories now. Never
    /// returns.
    pub async fn follow_roots(&self) {
        self.root_watch.follow(|site| instances::look_at_site(&self.instances, site)).await;
    }

    pub fn root_mounts(&self) -> &Arc<RootMounts> {
        &self.root_mounts
    }

    /// Connects to the Unix socket of a site's server, with the rights of `peer`, which requested
    /// it.
    pub async fn connect_server(&self, name: &SiteName, peer: UnixIdentity) -> Result<OwnedFd, Fault> {
        let (site, tenant) = self.context.site(name)?;
        let path = match &site.backend {
            Backend::Http(http) => http.address.strip_prefix("unix:").map(PathBuf::from),
            _ => None,
        };
        let Some(path) = path else { return Err(wrong_kind(&site, "http with a Unix socket")) };
        let whose = (self.context.is_root() && peer.uid != 0).then_some(peer);
        let name = tenant.name.clone();
        // The file system that the socket is on may hang, too.
        self.context
            .on_worker_for(&name, move || server_socket::connect(&path, tenant.home.as_deref(), whose))
            .await
    }

    pub async fn open_certificate(&self, name: String) -> Result<OwnedFd, Fault> {
        let certificates = self.context.options().certificates.clone();
        self.context.on_worker(move || roots::open_certificate(certificates.as_deref(), &name)).await
    }

    pub async fn spawn_cgi(
        &self,
        name: &SiteName,
        script: String,
        env: Vec<(String, String)>,
        asked: Confinement,
    ) -> Result<(ProcessRef, Vec<OwnedFd>), Fault> {
        let (site, tenant) = self.context.site(name)?;
        let Backend::Cgi(files) = &site.backend else { return Err(wrong_kind(&site, "cgi")) };
        cgi::check_script(files, &script)?;
        confinement::check(&asked)?;
        let most = self.context.options().cgi_per_tenant_max;
        let runner = self.context.runner(&tenant)?;
        let request = self.context.request(&site, &tenant, asked).await?;
        let order = self.context.order(ProcessKind::Cgi, request, site.name.to_string(), most);
        let enclosures = self.enclosures();
        let start = move |leaf: &Leaf| spawn::cgi(&site, &tenant, &script, env, &runner, (leaf, &enclosures));
        self.context.processes.start(order, start).await
    }

    /// Starts a worker of the site's tenant. It may serve the tenant's other sites later (`enter`).
    pub async fn spawn_php(
        &self,
        name: &SiteName,
        opcache: Option<u64>,
    ) -> Result<(ProcessRef, Vec<OwnedFd>), Fault> {
        let (site, tenant) = self.context.site(name)?;
        let scripts = self.scripts_of(&site, &tenant)?;
        let options = self.context.options();
        let runner = self.context.runner(&tenant)?;
        let most = tenant.php_workers.unwrap_or(options.php_workers_per_tenant);
        let program = PhpProgram { php_cgi: options.php_cgi.clone(), enclosures: self.enclosures() };
        let request = CellRequest::none(CellParent { tenant: Arc::clone(&tenant), site: None, device: None });
        let parent = self.php_parent((&tenant, opcache), &program, &runner, &request).await?;
        let mut order = self.context.order(ProcessKind::Php, request, tenant.name.to_string(), most);
        let scripts = ScriptRule::new(site.name.clone(), scripts);
        order.scripts = Some(Arc::clone(&scripts));
        let start = PhpStart {
            program,
            parent: parent.as_ref().map(|parent| Arc::clone(&parent.channel)),
            sockets: Arc::clone(&self.php_sockets),
            gate: self.gate()?,
            scripts,
        };
        order.parent = parent;
        self.context.processes.start(order, move |leaf| spawn::php(&start, &tenant, &runner, leaf)).await
    }

    /// Returns the parent of the tenant's PHP workers, started if there is none. `None` if the
    /// worker starts without one. Only a cgroup shows which
    /// process is one of its workers.
    async fn php_parent(
        &self,
        (tenant, opcache): (&Arc<Tenant>, Option<u64>),
        program: &PhpProgram,
        runner: &RunAs,
        request: &CellRequest,
    ) -> Result<Option<Rc<PhpParent>>, Fault> {
        let Some(opcache) = opcache else { return Ok(None) };
        if self.context.cells().fence() == ProcessTracking::ProcessGroup {
            return Ok(None);
        }
        let (of, home, run_as) = (program.clone(), tenant.home.clone(), runner.clone());
        let basis = self.context.on_worker(move || Ok(ParentBasis::new(opcache, &of, home, &run_as))).await?;
        let start = async || {
            let label = tenant.name.to_string();
            let most = PARENTS_PER_TENANT_MAX;
            let order = self.context.order(ProcessKind::PhpParent, request.clone(), label, most);
            let library = self.php_parents.library().map_err(|error| {
                let message = format!("the library of the parent cannot be opened: {error}");
                Fault::new(FailureKind::Busy, fault::SPAWN, message)
            })?;
            let (program, tenant, runner) = (program.clone(), Arc::clone(tenant), runner.clone());
            let make = move |leaf: &Leaf| spawn::php_parent(&program, &library, &tenant, &runner, leaf);
            let (process, fds) = self.context.processes.start(order, make).await?;
            Ok(PhpParent::new(process, fds, basis.clone()))
        };
        Ok(self.php_parents.of(&tenant.name, &basis, start).await)
    }

    /// Moves a worker of the site's tenant to the cell of the request. Returns its cell's name.
    pub async fn enter(&self, id: ProcessId, name: &SiteName, asked: Confinement) -> Result<String, Fault> {
        let process = self.worker(id)?;
        let (site, tenant) = self.context.site(name)?;
        let scripts = self.scripts_of(&site, &tenant)?;
        if tenant.name != process.tenant.name {
            let message = format!("site '{name}' is of another tenant than process {}", id.0);
            return Err(Fault::new(FailureKind::Forbidden, fault::UNKNOWN, message));
        }
        confinement::check(&asked)?;
        let request = self.context.request(&site, &tenant, asked).await?;
        let cell = self.context.processes.enter(&process, request).await?;
        process.serve_scripts(&site.name, scripts);
        Ok(cell)
    }

    fn scripts_of(&self, site: &Site, tenant: &Tenant) -> Result<SiteScripts, Fault> {
        self.find_scripts(site, tenant)?.ok_or_else(|| wrong_kind(site, "php"))
    }

    /// Returns `None` if the site is not of kind php.
    fn find_scripts(&self, site: &Site, tenant: &Tenant) -> Result<Option<SiteScripts>, Fault> {
        let identity = self.context.identity_of(tenant);
        SiteScripts::of(site, tenant, identity, || self.enclosures().view(tenant, identity))
    }

    pub async fn leave(&self, id: ProcessId) -> Result<RequestUsage, Fault> {
        self.context.processes.leave(&self.worker(id)?).await
    }

    pub fn measure(&self, id: ProcessId) -> Result<RequestUsage, Fault> {
        self.context.processes.find(id).map(|process| process.usage())
    }

    fn worker(&self, id: ProcessId) -> Result<Rc<ProcessTree>, Fault> {
        let process = self.context.processes.find(id)?;
        if process.kind == ProcessKind::Php {
            return Ok(process);
        }
        let message = format!("process {} serves no more than one request: it cannot enter or leave", id.0);
        Err(Fault::new(FailureKind::Invalid, fault::WRONG_KIND, message))
    }

    /// Applies changes to named cells. Stops at the first change that fails; those before it hold.
    pub fn change_cells(&self, changes: &[CellChange]) -> Result<(), Fault> {
        confinement::check_changes(changes)?;
        Ok(changes.iter().try_for_each(|change| self.context.cells().change(change))?)
    }

    /// Lists named cells for rules that read them, as many as fit in one reply.
    pub async fn named_cells(&self) -> Result<String, Fault> {
        let cells = Arc::clone(self.context.cells());
        self.context.on_worker(move || Ok(fitted(cells.show_named(), NAMED_CELLS_JSON_MAX).to_string())).await
    }

    /// Lists the tree of cells, for `nagaya cells`. It reads some thousand files, so it runs on a
    /// worker thread.
    pub async fn show_cells(&self) -> String {
        let cells = Arc::clone(self.context.cells());
        let shown = self.context.on_worker(move || Ok(cells.show().to_string())).await;
        shown.unwrap_or_else(|fault| json!({"error": fault.to_string()}).to_string())
    }

    /// Encodes the metrics as Prometheus text.
    pub fn encode_metrics(&self) -> String {
        let metrics = &self.context.metrics;
        metrics.images.add([ImageEvent::Quarantined as usize], self.instances.images.take_found_wrong());
        metrics.encode(self.context.cells(), &instances::figures(&self.instances))
    }

    /// Describes the keeper's state for `nagaya status`.
    pub fn status(&self) -> String {
        let kinds = KINDS.iter().map(|kind| {
            let (running, started, failed) = self.context.processes.numbers(*kind);
            (kind.as_str().to_owned(), json!({"running": running, "started": started, "failed": failed}))
        });
        let (revision, sites) = {
            let table = self.context.table().read();
            (table.revision(), table.site_count())
        };
        json!({
            "fence": self.context.cells().fence().as_str(),
            "root": self.context.is_root(),
            "revision": revision,
            "sites": sites,
            "connections": self.context.metrics.connections.get(),
            "processes": kinds.collect::<serde_json::Map<_, _>>(),
            "cluster": self.context.authority.status(),
            "cells": self.cells_status(),
            "instances": instances::status(&self.instances),
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
        let CellCounts { tenants, sites, named, giving_way, requests, free, made, reused } =
            self.context.cells().numbers();
        json!({
            "tenants": tenants,
            "sites": sites,
            "named": named,
            "requests": requests,
            "free": free,
            "made": made,
            "reused": reused,
            "giving_way": giving_way,
            "enters": self.context.metrics.enters.get(),
            "moves": self.context.metrics.moves.get(),
            "demotions": self.context.metrics.demotions.get(),
            "limit_failures": self.context.cells().complaints(),
            "orphans": self.context.cells().orphans(),
        })
    }
}

fn give_file(reader: &PathOwner, mounts: &RootMounts, found: &OwnedFd) -> io::Result<OpenedRoot> {
    let is_remote = mounts.is_remote(found)?;
    Ok(OpenedRoot { dir: reader.open_found(found)?.into(), is_remote, stamp: None })
}

/// Shortens a list of cells so that its text has at most `len_max` bytes.
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
