//! The contract of each store, and the types in its calls: [`Store`].
//!
//! Not here: the stores themselves (`redb`, `etcd`).

use std::io;

use nagaya_records::record::{
    NodeRecord, Placement, RecordChange, RuleRecord, Setting, Site, Tenant, TicketKeys,
};
use serde::{Deserialize, Serialize};

use crate::error::{StoreError, TransactionError};

/// Longest record as JSON, in bytes: the 64 KiB that `feed::FRAME_LEN_MAX` assumes, less its
/// wrapping.
pub const RECORD_LEN_MAX: usize = (64 << 10) - WRAPPING_LEN;

/// Largest uid whose use by a tenant is remembered: sandboxes have only tenants of smaller ones.
pub const UID_KEPT_MAX: u32 = (1 << 31) - 1;

/// Room for `{"put_setting":`, `}` and a comma around a record.
pub(crate) const WRAPPING_LEN: usize = 64;

/// Most records on one page of a listing.
pub const PAGE_LEN_MAX: usize = 1000;

/// Result of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommittedChanges {
    pub revision: u64,
    /// The real changes, in an order in which `Table::apply` takes them. If empty, nothing
    /// differed, and the revision is the old one.
    pub changes: Vec<RecordChange>,
}

/// Treatment of records that a transaction does not name.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ChangeMode {
    /// They stay.
    #[default]
    Merge,
    /// They go: the changes are the complete new state.
    Replace,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RecordKind {
    Tenant,
    Site,
    Setting,
    Rule,
    Node,
    Placement,
    /// There is at most one.
    TicketKeys,
}

/// The sites on a page. All given conditions must hold.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SiteFilter {
    pub tenant: Option<String>,
    /// A host pattern exactly as a site has it.
    pub host: Option<String>,
    /// Only names after this one.
    pub after: Option<String>,
    /// At most this many; `PAGE_LEN_MAX` bounds it.
    pub limit: usize,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordCounts {
    pub tenants: u64,
    pub sites: u64,
    pub settings: u64,
}

/// Gets each record's kind and JSON; an error ends the walk.
pub type Visitor<'a> = dyn FnMut(RecordKind, &str) -> io::Result<()> + 'a;

/// A store of records. Every call sees the state of one moment. Calls block on the disk.
pub trait Store: Send + Sync {
    /// Returns the revision. It grows with each transaction that changed something: by one, unless
    /// the store splits a long transaction.
    fn revision(&self) -> Result<u64, StoreError>;
    fn counts(&self) -> Result<RecordCounts, StoreError>;
    fn tenant(&self, name: &str) -> Result<Option<Tenant>, StoreError>;
    fn site(&self, name: &str) -> Result<Option<Site>, StoreError>;
    /// Returns tenants in order of name, after the given one, at most `limit`; `PAGE_LEN_MAX`
    /// bounds it.
    fn tenants(&self, after: Option<&str>, limit: usize) -> Result<Vec<Tenant>, StoreError>;
    fn sites(&self, select: &SiteFilter) -> Result<Vec<Site>, StoreError>;
    fn setting(&self, key: &str) -> Result<Option<Setting>, StoreError>;
    /// Like [`Store::tenants`], in order of key.
    fn settings(&self, after: Option<&str>, limit: usize) -> Result<Vec<Setting>, StoreError>;
    fn rule(&self, name: &str) -> Result<Option<RuleRecord>, StoreError>;
    /// Returns all rules, in order of name: there are at most `RULES_MAX`.
    fn rules(&self) -> Result<Vec<RuleRecord>, StoreError>;
    /// Returns the cluster's nodes, in order of name. They are few.
    fn nodes(&self) -> Result<Vec<NodeRecord>, StoreError>;
    fn node(&self, name: &str) -> Result<Option<NodeRecord>, StoreError>;
    /// Returns where this site's application runs. `None` in a store without a cluster.
    fn placement(&self, site: &str) -> Result<Option<Placement>, StoreError>;
    /// Like [`Store::tenants`], in order of site.
    fn placements(&self, after: Option<&str>, limit: usize) -> Result<Vec<Placement>, StoreError>;
    /// Returns the keys that sign tickets. `None` in a store without a cluster, unless they are put
    /// there.
    fn ticket_keys(&self) -> Result<Option<TicketKeys>, StoreError>;
    /// Writes these keys if `seen` are the present ones (`None` if there are none). Returns `None`
    /// if others are present, in which case nothing was changed. They are not configuration: no
    /// transaction changes them, and no export shows them.
    fn put_ticket_keys(
        &self,
        keys: TicketKeys,
        seen: Option<&TicketKeys>,
    ) -> Result<Option<CommittedChanges>, StoreError>;
    /// Visits all tenants, then all sites, settings, rules, nodes, placements and ticket keys. Each
    /// kind is in order of name, one record in memory at a time. Returns their revision.
    fn walk(&self, visit: &mut Visitor<'_>) -> Result<u64, StoreError>;
    /// Makes all changes or none. The final state is checked, not each step, so two sites can swap
    /// hosts in one transaction. A refusal names every mistake.
    fn transaction(
        &self,
        changes: Vec<RecordChange>,
        mode: ChangeMode,
    ) -> Result<CommittedChanges, TransactionError>;
    /// Allocates a uid from `base` upwards that no tenant has and that was never allocated before.
    /// Files of a removed tenant must not become another's.
    fn allocate_uid(&self, base: u32) -> Result<u32, StoreError>;
    /// Returns the limit below which no uid is allocated any more. Each uid that was allocated, or
    /// that a tenant had and gave up, is below it. A store that replaces this one must continue
    /// from there.
    fn next_uid(&self) -> Result<u32, StoreError>;
    /// Makes sure that no uid below `next` is allocated any more. It never allows a uid that was
    /// not allowed before.
    fn raise_next_uid(&self, next: u32) -> Result<(), StoreError>;
    /// Returns whether this store itself reports changes to the receiver it was opened with. Then
    /// the maker of a transaction must not report its changes, too.
    fn tells_changes(&self) -> bool {
        false
    }
}
