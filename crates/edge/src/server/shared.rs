//! Holds the state that the threads of one edge share: records, settings, limits across threads,
//! counters and log.
//!
//! Threads only read it on a request's path. Not here: the state of one thread (`node`).

use std::os::fd::OwnedFd;
use std::sync::Arc;

use nagaya_base::AnchoredClock;
use nagaya_records::record::{RecordChange, TicketKeys};
use nagaya_records::table::TableError;
use nagaya_rules::RuleSet;
use parking_lot::RwLock;

use crate::admission::lanes::LaneSet;
use crate::admission::tickets::CurrentTickets;
use crate::backends::instances::demand::DemandTable;
use crate::backends::programs::pool::PhpPools;
use crate::blocking::BlockingPool;
use crate::cluster::membership::{ClusterChange, EdgeCluster};
use crate::http::clients::network::ClientNetworks;
use crate::metrics::EdgeMetrics;
use crate::options::{CurrentOptions, EdgeConfig};
use crate::record::access_log::AccessLog;
use crate::record::receipt::ring::ReceiptRings;
use crate::record_table::RecordTable;
use crate::rules::cells::NamedCells;
use crate::rules::load::LoadReadings;
use crate::rules::shared_rules::{LogOnce, SharedRules};
use crate::shaping::shared_buckets::SharedBuckets;
use crate::spool::Spool;

/// State that the threads of one edge share, part by part.
pub struct SharedContext {
    pub table: Arc<RecordTable>,
    pub options: Arc<CurrentOptions>,
    log: RwLock<Option<Arc<AccessLog>>>,
    /// Running and waiting requests.
    pub lanes: Arc<LaneSet>,
    pub tickets: Arc<CurrentTickets>,
    pub metrics: Arc<EdgeMetrics>,
    pub php: Arc<PhpPools>,
    /// Charges to the cells that requests share.
    pub ledger: Arc<SharedBuckets>,
    /// Requests that need instances.
    pub needs: Arc<DemandTable>,
    /// The last requests, for `nagaya explain`.
    pub receipts: ReceiptRings,
    pub rules: Arc<SharedRules>,
    /// Networks of clients.
    pub networks: Arc<ClientNetworks>,
    /// The other nodes, and the sites that this one may run.
    pub cluster: Arc<EdgeCluster>,
    /// Threads for calls that may block.
    pub blocking: Arc<BlockingPool>,
    /// Bodies that wait.
    pub spool: Arc<Spool>,
}

impl SharedContext {
    pub fn new(
        options: EdgeConfig,
        log: Option<Arc<AccessLog>>,
        metrics: Arc<EdgeMetrics>,
        anchored_clock: AnchoredClock,
        spool: Option<OwnedFd>,
    ) -> Self {
        let blocking = Arc::<BlockingPool>::default();
        let table = Arc::<RecordTable>::default();
        let ledger = Arc::<SharedBuckets>::default();
        let lanes = LaneSet::new(&options, metrics.waiting.clone(), anchored_clock);
        let spool = Arc::new(Spool::new(spool, &options.spool, Arc::clone(&blocking)));
        let php = PhpPools::new(&options, Arc::clone(&metrics));
        let cluster = Arc::new(EdgeCluster::new(&options, Arc::clone(&table)));
        let set = RuleSet::new(options.rules.clone(), options.rule_limits);
        let options = Arc::new(CurrentOptions::new(options));
        let rules = SharedRules {
            set,
            named: NamedCells::default(),
            load: LoadReadings::new(),
            told: LogOnce::default(),
            ledger: Arc::clone(&ledger),
            lanes: Arc::clone(&lanes),
            metrics: Arc::clone(&metrics),
            table: Arc::clone(&table),
            options: Arc::clone(&options),
        };
        Self {
            table,
            options,
            log: RwLock::new(log),
            lanes,
            tickets: Arc::default(),
            metrics,
            php,
            ledger,
            needs: Arc::default(),
            receipts: ReceiptRings::default(),
            rules: Arc::new(rules),
            networks: Arc::default(),
            cluster,
            blocking,
            spool,
        }
    }

    /// Applies the changes as one: no request sees only some of them.
    pub fn apply(&self, changes: impl IntoIterator<Item = RecordChange>) -> Result<(), TableError> {
        let options = self.options.get();
        let mut touched = Vec::new();
        let result = self.table.change(|table| {
            let result = changes.into_iter().try_for_each(|change| {
                if self.cluster.is_member() {
                    touched.extend(ClusterChange::by(&change));
                }
                match &change {
                    RecordChange::PutSite(site) => self.lanes.site_changed(site, &options),
                    RecordChange::PutTenant(tenant) => self.lanes.tenant_changed(tenant, &options),
                    RecordChange::DropSite(site) => self.lanes.drop_site(site),
                    RecordChange::PutTicketKeys(keys) => self.take_ticket_keys(Some(keys)),
                    RecordChange::DropTicketKeys => self.take_ticket_keys(None),
                    _ => {}
                }
                table.apply(change)
            });
            self.metrics.sites.set(i64::try_from(table.site_count()).unwrap_or(i64::MAX));
            self.metrics.tenants.set(i64::try_from(table.tenant_count()).unwrap_or(i64::MAX));
            result
        });
        self.table.raise_generation();
        self.cluster.caught_up(touched.iter());
        result
    }

    pub fn set_revision(&self, revision: u64) {
        self.table.change(|table| table.set_revision(revision));
    }

    pub fn set_options(&self, options: EdgeConfig) {
        self.php.set_options(&options);
        self.set_rules(&options);
        self.lanes.set_options(&options);
        self.spool.set_options(&options.spool);
        self.cluster.set_options(&options);
        self.table.read(|table| self.cluster.arrive_all(table));
        self.options.set(options);
        self.table.raise_generation();
    }

    fn set_rules(&self, options: &EdgeConfig) {
        let set = &self.rules.set;
        if self.options.get().rules != options.rules {
            set.set_files(options.rules.clone());
        }
        set.set_budget(options.rule_limits);
    }

    fn take_ticket_keys(&self, keys: Option<&TicketKeys>) {
        if let Some(tickets) = self.tickets.get() {
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
