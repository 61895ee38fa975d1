//! Parts of the keeper that all verbs and instances need: settings, records, cells, worker threads,
//! processes and counters.
//!
//! It is used on the keeper's one thread. Invariant: nothing in it knows a verb, an instance or a
//! connection. Not here: the verbs (`verbs`), instances of applications (`instances`), the
//! connection of an edge (`server`).

use std::cell::{OnceCell, RefCell};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use nagaya_keeper_api::protocol::FailureKind;
use nagaya_records::cell::Confinement;
use nagaya_records::check::IdPolicy;
use nagaya_records::{RecordIndex, Site, SiteName, Tenant, TenantName};
use parking_lot::RwLock;
use tokio::sync::Notify;
use tokio::time::sleep_until;

use crate::authority::PlacementLease;
use crate::bases::{BaseLimits, BaseStore};
use crate::cells::{CellParent, KeeperCells};
use crate::fault::{self, Fault};
use crate::log::{self, LogBudget, LogWriter};
use crate::machines::MachineTemplates;
use crate::metrics::KeeperMetrics;
use crate::options::KeeperConfig;
use crate::paths::roots;
use crate::process::{CellRequest, ProcessKind, Processes, SpawnOrder};
use crate::relay::{ForbiddenPlaces, Relay};
use crate::sandbox::{self, Launcher};
use crate::spawn::RunAs;
use crate::sys::UnixIdentity;
use crate::workers::ThreadPool;
use crate::{confinement, huge_pages, mail};

/// Settings, records and the means to act on them.
pub struct KeeperContext {
    options: RefCell<Rc<KeeperConfig>>,
    table: Arc<RwLock<RecordIndex>>,
    /// The time until which placed applications may run here.
    pub authority: PlacementLease,
    pub workers: ThreadPool,
    pub processes: Rc<Processes>,
    pub metrics: KeeperMetrics,
    /// Writes the logs of applications.
    pub logs: LogWriter,
    /// Bases that come as OCI images.
    pub bases: Arc<BaseStore>,
    /// Templates of machines.
    pub machines: Arc<MachineTemplates>,
    /// `None` without root, or if it could not be started.
    launcher: Option<Arc<Launcher>>,
    /// Started with the first application that needs it.
    relay: OnceCell<Relay>,
    /// Notified when a tenant's CPU priority is lowered, or a site's is raised.
    priority_changed: Notify,
    is_root: bool,
}

/// Why the keeper cannot begin.
#[derive(Debug, thiserror::Error)]
#[error("{what} {path}: {error}")]
pub struct SetupError {
    what: &'static str,
    path: String,
    #[source]
    error: io::Error,
}

impl SetupError {
    /// Names what failed at which path.
    pub fn at(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.display().to_string();
        move |error| Self { what, path, error }
    }
}

impl KeeperContext {
    pub fn new(
        options: KeeperConfig,
        table: Arc<RwLock<RecordIndex>>,
        launcher: Option<Arc<Launcher>>,
        authority: PlacementLease,
    ) -> Result<Rc<Self>, SetupError> {
        let is_root = rustix::process::geteuid().is_root();
        let cells = Arc::new(KeeperCells::open(options.back_end, options.processes_per_tenant));
        let workers = ThreadPool::start()
            .map_err(SetupError::at("cannot start threads for", Path::new("the keeper")))?;
        let metrics = KeeperMetrics::new();
        // Tenants pass through the directory of their applications' sockets. Nobody lists it.
        let apps = apps_dir(&options);
        fresh_directory(&apps, 0o711).map_err(SetupError::at("cannot make", &apps))?;
        huge_pages::apply(options.instances.huge_pages);
        let logs = logs_dir(&options);
        let logs = LogWriter::start(logs.clone(), log_bounds(&options), metrics.clone())
            .map_err(SetupError::at("cannot start the thread for", &logs))?;
        let bases = BaseStore::new(options.instances.images.with_file_name("bases"), BaseLimits::NODE);
        let processes = Processes::new(cells, workers.clone(), metrics.clone(), options.processes_max);
        Ok(Rc::new(Self {
            options: RefCell::new(Rc::new(options)),
            table,
            authority,
            workers,
            processes,
            metrics,
            logs,
            bases: Arc::new(bases),
            machines: Arc::default(),
            launcher,
            relay: OnceCell::new(),
            priority_changed: Notify::new(),
            is_root,
        }))
    }

    /// Takes changed settings over; those that hold for life are left as they are. `true`: the node
    /// joins a cluster.
    pub fn set_options(&self, mut options: KeeperConfig) -> bool {
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
            relay.set_mail(&options.mail);
        }
        self.logs.set_bounds(log_bounds(&options));
        *self.options.borrow_mut() = Rc::new(options);
        joins
    }

    /// Starts what stops placed applications in time, if the node is one of a cluster's.
    pub fn begin_authority(&self) -> io::Result<()> {
        self.authority.begin(self.launcher.as_deref())
    }

    /// Where sockets of applications are.
    pub fn apps_dir(&self) -> PathBuf {
        apps_dir(&self.options())
    }

    pub fn options(&self) -> Rc<KeeperConfig> {
        Rc::clone(&self.options.borrow())
    }

    pub fn table(&self) -> &Arc<RwLock<RecordIndex>> {
        &self.table
    }

    pub fn is_root(&self) -> bool {
        self.is_root
    }

    /// Returns the launcher of sandboxes.
    pub fn launcher(&self) -> Result<Arc<Launcher>, Fault> {
        self.launcher.clone().ok_or_else(|| {
            let message = "no sandbox can be made: its launcher could not be started; the log of nagaya's start says why";
            Fault::new(FailureKind::Broken, sandbox::LAUNCHER, message)
        })
    }

    /// Returns the relay of applications' connections.
    pub fn relay(&self) -> Result<Relay, Fault> {
        if let Some(relay) = self.relay.get() {
            return Ok(relay.clone());
        }
        let forbidden = ForbiddenPlaces::new(Arc::clone(&self.table), self.options().etcd.clone());
        let tallies = Arc::clone(&self.metrics.mail);
        let desk = mail::open_desk(Arc::clone(&self.table), &self.options(), tallies);
        let relay = Relay::start(self.metrics.clone(), forbidden, desk).map_err(|error| {
            let message = format!("the relay of applications' connections cannot be started: {error}");
            Fault::new(FailureKind::Busy, fault::OUTLET, message)
        })?;
        Ok(self.relay.get_or_init(|| relay).clone())
    }

    pub fn cells(&self) -> &Arc<KeeperCells> {
        self.processes.cells()
    }

    pub fn site(&self, name: &SiteName) -> Result<(Arc<Site>, Arc<Tenant>), Fault> {
        let table = self.table.read();
        let known = table
            .site(name.as_str())
            .and_then(|site| table.tenant(site.tenant.as_str()).map(|tenant| (site, tenant)));
        known.ok_or_else(|| {
            Fault::new(FailureKind::NotFound, fault::UNKNOWN, format!("there is no site '{name}'"))
        })
    }

    /// Returns the identity of the tenant's processes, or `None` without root.
    pub fn identity_of(&self, tenant: &Tenant) -> Option<UnixIdentity> {
        self.is_root.then_some(UnixIdentity { uid: tenant.uid, gid: tenant.gid })
    }

    /// Returns the rights with which a tenant's work runs. Without root everything runs as the
    /// keeper itself.
    pub fn runner(&self, tenant: &Tenant) -> Result<RunAs, Fault> {
        let options = self.options();
        if self.is_root
            && let Some(message) = refuse_ids(tenant, &options.ids)
        {
            return Err(Fault::new(FailureKind::Forbidden, fault::TENANT_UID, message));
        }
        // Raising a hard limit needs a separate capability, which a container's root may lack.
        let hard = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum;
        let open_files_max = options.open_files_max.min(hard.unwrap_or(u64::MAX));
        Ok(RunAs { identity: self.identity_of(tenant), open_files_max })
    }

    /// Returns the cell request of a request to this site.
    pub async fn request(
        &self,
        site: &Arc<Site>,
        tenant: &Arc<Tenant>,
        asked: Confinement,
    ) -> Result<CellRequest, Fault> {
        let mut home = CellParent { tenant: Arc::clone(tenant), site: Some(Arc::clone(site)), device: None };
        // Read from disk only where the answer matters: most requests are limited in other ways.
        if confinement::names_root_device(tenant, site, &asked) {
            let (site, tenant) = (Arc::clone(site), Arc::clone(tenant));
            let identity = self.runner(&tenant)?.identity;
            home.device = Some(self.on_worker(move || roots::device(&site, &tenant, identity)).await?);
        }
        Ok(CellRequest::new(home, asked))
    }

    pub fn order(
        &self,
        kind: ProcessKind,
        request: CellRequest,
        label: String,
        per_tenant_max: u32,
    ) -> SpawnOrder {
        let bytes_max = self.options().stderr_bytes_max as usize;
        let log = LogBudget { bytes_max, refills: kind != ProcessKind::Cgi };
        SpawnOrder { kind, request, label, per_tenant_max, log, journal: None, scripts: None, parent: None }
    }

    /// Raises the CPU priority of the site's processes until `until`.
    pub fn prioritize_site(&self, site: &SiteName, tenant: &TenantName, until: Instant) {
        self.cells().prioritize_site(site, tenant, until);
        self.priority_changed.notify_one();
    }

    /// Ends lowered and raised CPU priorities when their time is over. Never returns.
    pub async fn expire_priorities(&self) {
        loop {
            let next = self.cells().end_overdue(Instant::now());
            let due = async {
                match next {
                    Some(next) => sleep_until(next.into()).await,
                    None => std::future::pending().await,
                }
            };
            // A priority that is set meanwhile may end earlier.
            tokio::select! {
                () = due => {}
                () = self.priority_changed.notified() => {}
            }
        }
    }

    pub async fn on_worker<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> Result<T, Fault> + Send + 'static,
    ) -> Result<T, Fault> {
        self.workers.run(job)?.await.unwrap_or_else(|_| Err(failed_inside()))
    }

    /// Runs a job that accesses this tenant's files. If its file system hangs, it delays only the
    /// tenant's own programs.
    pub async fn on_worker_for<T: Send + 'static>(
        &self,
        tenant: &TenantName,
        job: impl FnOnce() -> Result<T, Fault> + Send + 'static,
    ) -> Result<T, Fault> {
        self.workers.start_for(tenant, job)?.await.unwrap_or_else(|_| Err(failed_inside()))
    }

    /// Lowers the CPU priority of some tenants for a while, and restores that of others. Tenants
    /// without running processes are skipped.
    pub fn deprioritize(&self, give_way: &[TenantName], resume: &[TenantName]) -> Result<(), Fault> {
        confinement::check_giving_way(give_way, resume)?;
        self.cells().deprioritize(give_way, resume, Instant::now());
        self.priority_changed.notify_one();
        Ok(())
    }
}

fn apps_dir(options: &KeeperConfig) -> PathBuf {
    options.runtime_dir.join("apps")
}

/// Returns the directory of instances' logs. It is beside the images, and hidden from applications
/// as these are.
fn logs_dir(options: &KeeperConfig) -> PathBuf {
    options.instances.images.with_file_name("instance-logs")
}

fn log_bounds(options: &KeeperConfig) -> log::LogBounds {
    let options = &options.instances;
    log::LogBounds { bytes_max: options.log_bytes_max, files_max: options.log_files_max }
}

/// Says why this tenant's programs are not run. `None` if they are.
fn refuse_ids(tenant: &Tenant, ids: &IdPolicy) -> Option<String> {
    if tenant.uid == 0 || tenant.gid == 0 {
        let Tenant { name, uid, gid, .. } = tenant;
        return Some(format!("tenant '{name}' has uid {uid} and gid {gid}: neither may be root's"));
    }
    ids.refusal(tenant)
}

fn failed_inside() -> Fault {
    Fault::new(FailureKind::Broken, fault::PROTOCOL, "the keeper failed inside; see its log")
}

/// Whether processes of one tenant may continue as the other's.
pub fn same_runner(a: &Tenant, b: &Tenant) -> bool {
    (a.uid, a.gid, &a.home) == (b.uid, b.gid, &b.home)
}

pub fn wrong_kind(site: &Site, wanted: &str) -> Fault {
    let message = format!("site '{}' is of kind {}, not {wanted}", site.name, site.backend.kind());
    Fault::new(FailureKind::Invalid, fault::WRONG_KIND, message)
}

/// Makes an empty directory with exactly this mode. A dead keeper can have left sockets in it on
/// which nobody listens.
pub fn fresh_directory(path: &Path, mode: u32) -> io::Result<()> {
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent)?;
    }
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    std::fs::DirBuilder::new().mode(mode).create(path)?;
    // The process's umask may have removed bits.
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode))
}
