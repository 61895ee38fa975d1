//! What the threads of one edge share: the records, the settings, limits that span threads, counters and log.
//!
//! Threads only read it on a request's path. Not here: what a thread has for itself (`node`).

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nagaya_base::Reckoning;
use nagaya_cmdb::record::{Change, TicketKeys};
use nagaya_cmdb::table::{self, Table, TableError};
use nagaya_rules::RuleSet;
use parking_lot::RwLock;

use crate::access_log::AccessLog;
use crate::admission::{Lanes, Tickets};
use crate::blocking::BlockingPool;
use crate::clients::ClientNetworks;
use crate::cluster::{Cluster, Touched};
use crate::instances::Needs;
use crate::metrics::Metrics;
use crate::options::Options;
use crate::pace::Ledger;
use crate::programs::PhpPools;
use crate::receipt::Rings;
use crate::rules::{Load, NamedCells, Told};
use crate::spool::Spool;

pub struct Shared {
    table: RwLock<Table>,
    /// Raised by every change of records or settings: what threads remember of them is void then.
    generation: AtomicU64,
    options: RwLock<Arc<Options>>,
    log: RwLock<Option<Arc<AccessLog>>>,
    /// Who runs and who waits.
    pub lanes: Arc<Lanes>,
    /// None where there is nowhere to keep them.
    tickets: RwLock<Option<Arc<Tickets>>>,
    pub metrics: Arc<Metrics>,
    pub php: Arc<PhpPools>,
    /// What cells that requests share have been charged.
    pub ledger: Arc<Ledger>,
    /// Requests that need instances.
    pub needs: Arc<Needs>,
    /// The last requests, for `nagaya explain`.
    pub receipts: Rings,
    /// The operator's rules, as they are on disk.
    pub rules: Arc<RuleSet>,
    /// Named cells, as rules see them.
    pub named: NamedCells,
    pub load: Load,
    /// Networks of clients.
    pub networks: ClientNetworks,
    /// The other nodes, and what this one may run.
    pub cluster: Cluster,
    /// What was said about rules already.
    pub told: Told,
    /// Threads for calls that may block.
    pub blocking: Arc<BlockingPool>,
    /// Bodies that wait.
    pub spool: Arc<Spool>,
}

impl Shared {
    pub fn new(
        options: Options,
        log: Option<Arc<AccessLog>>,
        metrics: Arc<Metrics>,
        reckoning: Reckoning,
        spool: Option<OwnedFd>,
    ) -> Self {
        let blocking = Arc::<BlockingPool>::default();
        Self {
            spool: Arc::new(Spool::new(spool, &options.spool, Arc::clone(&blocking))),
            blocking,
            table: RwLock::new(Table::new()),
            generation: AtomicU64::new(1),
            php: PhpPools::new(&options, Arc::clone(&metrics)),
            rules: RuleSet::new(options.rules.clone(), options.rule_limits),
            named: NamedCells::default(),
            load: Load::new(),
            networks: ClientNetworks::default(),
            cluster: Cluster::new(&options),
            told: Told::default(),
            lanes: Lanes::new(&options, metrics.waiting.clone(), reckoning),
            tickets: RwLock::default(),
            options: RwLock::new(Arc::new(options)),
            log: RwLock::new(log),
            metrics,
            ledger: Arc::default(),
            needs: Arc::default(),
            receipts: Rings::default(),
        }
    }

    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Applies the changes as one: no request sees a part of them.
    pub fn apply(&self, changes: impl IntoIterator<Item = Change>) -> Result<(), TableError> {
        let mut table = self.table.write();
        let (lanes, options) = (&self.lanes, self.options());
        let mut touched = Vec::new();
        let result = changes.into_iter().try_for_each(|change| {
            if self.cluster.is_member() {
                touched.extend(Touched::by(&change));
            }
            match &change {
                Change::PutSite(site) => lanes.site_changed(site, &options),
                Change::PutTenant(tenant) => lanes.tenant_changed(tenant, &options),
                Change::DropSite(site) => lanes.drop_site(site),
                Change::PutTicketKeys(keys) => self.take_ticket_keys(Some(keys)),
                Change::DropTicketKeys => self.take_ticket_keys(None),
                _ => {}
            }
            table.apply(change)
        });
        self.metrics.sites.set(i64::try_from(table.site_count()).unwrap_or(i64::MAX));
        self.metrics.tenants.set(i64::try_from(table.tenant_count()).unwrap_or(i64::MAX));
        drop(table);
        self.generation.fetch_add(1, Ordering::Release);
        self.cluster.caught_up(touched.iter());
        result
    }

    pub fn set_revision(&self, revision: u64) {
        self.table.write().set_revision(revision);
        self.metrics.revision.set(i64::try_from(revision).unwrap_or(i64::MAX));
    }

    pub fn routes(&self, host: &str) -> Vec<table::Route> {
        self.table.read().routes(host)
    }

    pub fn with_table<T>(&self, look: impl FnOnce(&Table) -> T) -> T {
        look(&self.table.read())
    }

    pub fn options(&self) -> Arc<Options> {
        Arc::clone(&self.options.read())
    }

    pub fn set_options(&self, options: Options) {
        self.php.set_options(&options);
        self.set_rules(&options);
        self.lanes.set_options(&options);
        self.spool.set_options(&options.spool);
        self.cluster.set_options(&options);
        self.with_table(|table| self.cluster.arrive_all(table));
        *self.options.write() = Arc::new(options);
        self.generation.fetch_add(1, Ordering::Release);
    }

    fn set_rules(&self, options: &Options) {
        if self.options.read().rules != options.rules {
            self.rules.set_files(options.rules.clone());
        }
        self.rules.set_budget(options.rule_limits);
    }

    pub fn tickets(&self) -> Option<Arc<Tickets>> {
        self.tickets.read().clone()
    }

    /// From now on tickets are given, and those of an earlier start are known.
    pub fn set_tickets(&self, tickets: Tickets) {
        *self.tickets.write() = Some(Arc::new(tickets));
    }

    fn take_ticket_keys(&self, keys: Option<&TicketKeys>) {
        if let Some(tickets) = self.tickets() {
            tickets.set_cluster_keys(keys);
        }
    }

    pub fn log(&self) -> Option<Arc<AccessLog>> {
        self.log.read().clone()
    }

    pub fn set_log(&self, log: Option<Arc<AccessLog>>) {
        *self.log.write() = log;
    }
}
