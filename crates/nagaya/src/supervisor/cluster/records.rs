//! The store for the rest of the node: this node's own file. In a cluster it is a copy of the
//! cluster's store. Reading is the same in both cases; changes go to the authoritative store.
//!
//! Not here: either store (`nagaya_records`).

use std::sync::Arc;

use nagaya_records::{NodeRecord, Placement, RecordChange, RuleRecord, Setting, Site, Tenant, TicketKeys};
use nagaya_store::{
    ChangeMode, ClusterStore, CommittedChanges, RecordCounts, RedbStore, SiteFilter, Store, StoreError,
    TransactionError, Visitor,
};
use parking_lot::RwLock;

pub struct NodeRecords {
    file: Arc<RedbStore>,
    cluster: RwLock<Option<Arc<ClusterStore>>>,
}

impl NodeRecords {
    pub fn new(file: RedbStore) -> Self {
        Self { file: Arc::new(file), cluster: RwLock::default() }
    }

    /// Returns this node's file, which a cluster's store keeps up to date.
    pub fn file(&self) -> &Arc<RedbStore> {
        &self.file
    }

    /// Sends changes to the cluster's store from now on.
    pub fn follow(&self, cluster: Arc<ClusterStore>) {
        *self.cluster.write() = Some(cluster);
    }

    /// Sends changes only to the file from now on, until a cluster is followed again.
    pub fn unfollow(&self) {
        *self.cluster.write() = None;
    }

    fn cluster(&self) -> Option<Arc<ClusterStore>> {
        self.cluster.read().clone()
    }
}

impl Store for NodeRecords {
    fn revision(&self) -> Result<u64, StoreError> {
        self.file.revision()
    }

    fn counts(&self) -> Result<RecordCounts, StoreError> {
        self.file.counts()
    }

    fn tenant(&self, name: &str) -> Result<Option<Tenant>, StoreError> {
        self.file.tenant(name)
    }

    fn site(&self, name: &str) -> Result<Option<Site>, StoreError> {
        self.file.site(name)
    }

    fn tenants(&self, after: Option<&str>, limit: usize) -> Result<Vec<Tenant>, StoreError> {
        self.file.tenants(after, limit)
    }

    fn sites(&self, select: &SiteFilter) -> Result<Vec<Site>, StoreError> {
        self.file.sites(select)
    }

    fn setting(&self, key: &str) -> Result<Option<Setting>, StoreError> {
        self.file.setting(key)
    }

    fn settings(&self, after: Option<&str>, limit: usize) -> Result<Vec<Setting>, StoreError> {
        self.file.settings(after, limit)
    }

    fn rule(&self, name: &str) -> Result<Option<RuleRecord>, StoreError> {
        self.file.rule(name)
    }

    fn rules(&self) -> Result<Vec<RuleRecord>, StoreError> {
        self.file.rules()
    }

    fn nodes(&self) -> Result<Vec<NodeRecord>, StoreError> {
        self.file.nodes()
    }

    fn node(&self, name: &str) -> Result<Option<NodeRecord>, StoreError> {
        self.file.node(name)
    }

    fn placement(&self, site: &str) -> Result<Option<Placement>, StoreError> {
        self.file.placement(site)
    }

    fn placements(&self, after: Option<&str>, limit: usize) -> Result<Vec<Placement>, StoreError> {
        self.file.placements(after, limit)
    }

    fn ticket_keys(&self) -> Result<Option<TicketKeys>, StoreError> {
        self.file.ticket_keys()
    }

    fn put_ticket_keys(
        &self,
        keys: TicketKeys,
        seen: Option<&TicketKeys>,
    ) -> Result<Option<CommittedChanges>, StoreError> {
        match self.cluster() {
            Some(cluster) => cluster.put_ticket_keys(keys, seen),
            None => self.file.put_ticket_keys(keys, seen),
        }
    }

    fn walk(&self, visit: &mut Visitor<'_>) -> Result<u64, StoreError> {
        self.file.walk(visit)
    }

    fn transaction(
        &self,
        changes: Vec<RecordChange>,
        mode: ChangeMode,
    ) -> Result<CommittedChanges, TransactionError> {
        match self.cluster() {
            Some(cluster) => cluster.transaction(changes, mode),
            None => self.file.transaction(changes, mode),
        }
    }

    fn allocate_uid(&self, base: u32) -> Result<u32, StoreError> {
        match self.cluster() {
            Some(cluster) => cluster.allocate_uid(base),
            None => self.file.allocate_uid(base),
        }
    }

    /// Returns the cluster's value. If it is unreachable, this is at least the value of this node's
    /// file: an export is possible without etcd.
    fn next_uid(&self) -> Result<u32, StoreError> {
        let own = self.file.next_uid()?;
        match self.cluster().map(|cluster| cluster.next_uid()) {
            Some(Ok(next)) => Ok(next.max(own)),
            Some(Err(_)) | None => Ok(own),
        }
    }

    fn raise_next_uid(&self, next: u32) -> Result<(), StoreError> {
        match self.cluster() {
            Some(cluster) => cluster.raise_next_uid(next),
            None => self.file.raise_next_uid(next),
        }
    }

    fn tells_changes(&self) -> bool {
        self.cluster().is_some()
    }
}
