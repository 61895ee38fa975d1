//! The embedded store: one redb file, owned by one process.
//!
//! | table | key | value |
//! |---|---|---|
//! | `meta` | `format`, `revision`, `next_uid` | number |
//! | `meta` | in a replica: `cluster_revision`, `cluster_count` | number |
//! | `tenants`, `sites` | name | record as JSON |
//! | `settings` | key | record as JSON |
//! | `rules` | name | record as JSON |
//! | `nodes`, `placements` | node, site | record as JSON; empty unless a replica |
//! | `ticket_keys` | `keys` | record as JSON, likewise. Secret: only the owner reads the file |
//! | `hosts` | host pattern, path | the one site that has it |
//! | `uids` | uid | the one tenant that has it |
//! | `sites_of_tenant` | tenant, site | nothing |
//!
//! A format never changes in place. A new one gets a new number and a migration (`migrate`). An
//! older store goes through it when it is opened.
//!
//! A node of a cluster also keeps it beside the cluster's store (`etcd`), which alone changes it
//! then. Not here: what may be stored (`plan`, `check`), damaged files (`guard`).

mod migrate;

use std::fs::{self, OpenOptions};
use std::io;
use std::ops::Bound::{Excluded, Included, Unbounded};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use redb::{
    Builder, Database, Durability, ReadOnlyTable, ReadTransaction, ReadableDatabase, ReadableTable,
    ReadableTableMetadata, Table, TableDefinition, WriteTransaction,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::plan::{ChangePlan, StoreView};
use super::{
    ChangeMode, CommittedChanges, PAGE_LEN_MAX, RecordCounts, RecordKind, SiteFilter, Store, StoreError,
    TransactionError, Visitor, guard,
};
use nagaya_records::names::{RuleName, SiteName, TenantName};
use nagaya_records::record::{
    NodeRecord, Placement, RecordChange, RuleRecord, Setting, Site, Tenant, TicketKeys,
};

/// The format that this program writes. It converts older ones to this one.
pub const FORMAT: u64 = 2;

/// Memory for the database's page cache. The store is read at start and by administrators; `Table`
/// answers requests.
const CACHE_BYTES: usize = 16 << 20;

const META: TableDefinition<'_, &str, u64> = TableDefinition::new("meta");
const TENANTS: TableDefinition<'_, &str, &str> = TableDefinition::new("tenants");
const SITES: TableDefinition<'_, &str, &str> = TableDefinition::new("sites");
const SETTINGS: TableDefinition<'_, &str, &str> = TableDefinition::new("settings");
const RULES: TableDefinition<'_, &str, &str> = TableDefinition::new("rules");
const NODES: TableDefinition<'_, &str, &str> = TableDefinition::new("nodes");
const PLACEMENTS: TableDefinition<'_, &str, &str> = TableDefinition::new("placements");
const TICKET_KEYS: TableDefinition<'_, &str, &str> = TableDefinition::new("ticket_keys");
const HOSTS: TableDefinition<'_, (&str, &str), &str> = TableDefinition::new("hosts");
const UIDS: TableDefinition<'_, u32, &str> = TableDefinition::new("uids");
const SITES_OF_TENANT: TableDefinition<'_, (&str, &str), ()> = TableDefinition::new("sites_of_tenant");

/// Key of the only record in its table.
const TICKET_KEYS_KEY: &str = "keys";

#[derive(Debug)]
pub struct RedbStore {
    path: PathBuf,
    database: Database,
}

/// A point in the history of a cluster's store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReplicaPosition {
    /// etcd's own revision.
    pub revision: u64,
    /// Count of changes to configuration, from etcd's key `revision`.
    pub count: u64,
}

/// Changes that a replica took over.
#[derive(Debug)]
pub struct ReplicateResult {
    pub committed: CommittedChanges,
    /// Records that stay as they were here, each with the reason.
    pub left_out: Vec<String>,
}

/// An error of the database before the path is known.
type Fallible<T> = Result<T, redb::Error>;

impl RedbStore {
    /// Opens the file, or makes an empty store if there is none. An older format is converted to
    /// this program's. Damaged, newer and already open files are refused and left as they are.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let exists = path.try_exists().map_err(|error| StoreError::Io { path: path.into(), error })?;
        if !exists {
            return Self::create(path);
        }
        let mut format = FORMAT;
        guard::verify(path, CACHE_BYTES, |database| match number(database, "format") {
            Ok(found @ migrate::OLDEST..=FORMAT) => {
                format = found;
                Ok(())
            }
            Ok(found) => Err(StoreError::Version { path: path.into(), found, known: FORMAT }),
            Err(error) => Err(store_error(path, error)),
        })?;
        let database = builder().open(path).map_err(|error| store_error(path, error))?;
        let store = Self { path: path.into(), database };
        if format < FORMAT {
            store.migrate(format, &migrate::STEPS).map_err(|error| store.failed(error))?;
        }
        Ok(store)
    }

    fn migrate(&self, found: u64, steps: &[migrate::Step]) -> Fallible<()> {
        let write = self.begin_write()?;
        migrate::run(&write, found, steps)?;
        write.commit()?;
        Ok(())
    }

    /// Creates a store. The file gets its name only once it is complete. So a crash now leaves no
    /// empty store, which would be refused as damaged.
    fn create(path: &Path) -> Result<Self, StoreError> {
        let io = |path: &Path| {
            let path = path.to_path_buf();
            move |error: io::Error| StoreError::Io { path, error }
        };
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(io(parent))?;
        }
        let mut draft = path.as_os_str().to_owned();
        draft.push(format!(".{}.new", std::process::id()));
        let draft = PathBuf::from(draft);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&draft)
            .map_err(io(&draft))?;
        let made = builder().create_file(file).map_err(redb::Error::from).and_then(|database| {
            let write = database.begin_write()?;
            WriteTables::open(&write)?.meta.insert("format", FORMAT)?;
            write.commit()?;
            Ok(database)
        });
        // A link, unlike a rename, fails if another process was faster.
        let linked = made
            .map_err(|error| store_error(&draft, error))
            .and_then(|database| fs::hard_link(&draft, path).map_err(io(path)).map(|()| database));
        let removed = fs::remove_file(&draft).map_err(io(&draft));
        let database = linked?;
        removed?;
        Ok(Self { path: path.into(), database })
    }

    fn failed(&self, error: impl Into<redb::Error>) -> StoreError {
        store_error(&self.path, error)
    }

    fn read<T>(&self, look: impl FnOnce(&ReadTransaction) -> Fallible<T>) -> Result<T, StoreError> {
        let read = self.database.begin_read().map_err(|error| self.failed(error))?;
        look(&read).map_err(|error| self.failed(error))
    }

    fn planner(&self) -> Result<RedbView<'_>, StoreError> {
        self.read(|read| {
            Ok(RedbView {
                path: &self.path,
                meta: read.open_table(META)?,
                tenants: read.open_table(TENANTS)?,
                sites: read.open_table(SITES)?,
                settings: read.open_table(SETTINGS)?,
                rules: read.open_table(RULES)?,
                nodes: read.open_table(NODES)?,
                placements: read.open_table(PLACEMENTS)?,
                ticket_keys: read.open_table(TICKET_KEYS)?,
                hosts: read.open_table(HOSTS)?,
                uids: read.open_table(UIDS)?,
                sites_of_tenant: read.open_table(SITES_OF_TENANT)?,
            })
        })
    }

    fn write(
        &self,
        write: WriteTransaction,
        plan: &ChangePlan,
        reached: Option<ReplicaPosition>,
    ) -> Fallible<u64> {
        let mut tables = WriteTables::open(&write)?;
        let revision = tables.write(plan)?;
        if let Some(reached) = reached {
            tables.meta.insert("cluster_revision", reached.revision)?;
            tables.meta.insert("cluster_count", reached.count)?;
        }
        drop(tables);
        if reached.is_some() || !plan.is_empty() {
            write.commit()?;
        }
        Ok(revision)
    }

    // === As a replica ===

    /// Takes over the state of the cluster's store, all of it or nothing. It was checked there.
    /// Records that this store cannot have stay as they were, and `ReplicateResult::left_out` names
    /// them. Changes that a crash loses come again from the cluster, so the disk is not waited for
    /// unless `durable`.
    pub fn replicate(
        &self,
        changes: Vec<RecordChange>,
        reached: ReplicaPosition,
        durable: bool,
    ) -> Result<ReplicateResult, StoreError> {
        let mut write = self.begin_write().map_err(|error| self.failed(error))?;
        if !durable {
            write.set_quick_repair(false);
            write.set_durability(Durability::None).map_err(|error| self.failed(redb::Error::from(error)))?;
        }
        let (plan, left_out) = ChangePlan::from_replica(changes, &self.planner()?)?;
        let revision = self.write(write, &plan, Some(reached)).map_err(|error| self.failed(error))?;
        Ok(ReplicateResult {
            committed: CommittedChanges { revision, changes: plan.into_changes() },
            left_out,
        })
    }

    /// Returns how far this replica had followed the cluster's store when it was last written.
    pub fn reached(&self) -> Result<ReplicaPosition, StoreError> {
        self.planner()?.reached()
    }

    /// Plans a list of changes. Returns the plan, and the point in the cluster's store on which it
    /// rests.
    pub(super) fn plan(
        &self,
        changes: Vec<RecordChange>,
        mode: ChangeMode,
    ) -> Result<(ChangePlan, ReplicaPosition), TransactionError> {
        let planner = self.planner()?;
        let plan = ChangePlan::make(changes, mode, &planner)?;
        Ok((plan, planner.reached()?))
    }

    /// Returns the first uid from here on that no tenant has.
    pub(super) fn free_uid(&self, first: u32) -> Result<Option<u32>, StoreError> {
        self.read(|read| free_uid(&read.open_table(UIDS)?, first))
    }

    fn begin_write(&self) -> Fallible<WriteTransaction> {
        let mut write = self.database.begin_write()?;
        // Two-phase commits with the free space map. After a crash, the last commit is found at
        // once, without guessing by checksums.
        write.set_quick_repair(true);
        Ok(write)
    }
}

fn builder() -> Builder {
    let mut builder = Builder::new();
    builder.set_cache_size(CACHE_BYTES);
    builder
}

fn store_error(path: &Path, error: impl Into<redb::Error>) -> StoreError {
    let path = path.to_path_buf();
    match error.into() {
        redb::Error::Io(error) => StoreError::Io { path, error },
        redb::Error::PreviousIo => {
            StoreError::Io { path, error: io::Error::other("an earlier write failed: restart the node") }
        }
        redb::Error::DatabaseAlreadyOpen => StoreError::Locked { path },
        error => StoreError::Damaged { path, detail: error.to_string() },
    }
}

/// Decodes a record. A failure is one that checksums cannot see, for example after another program
/// wrote it.
fn decode<T: DeserializeOwned>(json: &str) -> Fallible<T> {
    serde_json::from_str(json).map_err(|error| redb::Error::Corrupted(format!("{error} in record {json}")))
}

/// The error omits unreadable content: it is secret.
fn find_keys(table: &impl ReadableTable<&'static str, &'static str>) -> Fallible<Option<TicketKeys>> {
    let read = |json: &str| {
        let unread = |_| redb::Error::Corrupted("the record of the keys of tickets cannot be read".into());
        serde_json::from_str(json).map_err(unread)
    };
    table.get(TICKET_KEYS_KEY)?.map(|json| read(json.value())).transpose()
}

fn encode(record: &impl Serialize) -> Fallible<String> {
    serde_json::to_string(record).map_err(|error| redb::Error::Io(error.into()))
}

impl Store for RedbStore {
    fn revision(&self) -> Result<u64, StoreError> {
        number(&self.database, "revision").map_err(|error| self.failed(error))
    }

    fn counts(&self) -> Result<RecordCounts, StoreError> {
        self.read(|read| {
            Ok(RecordCounts {
                tenants: read.open_table(TENANTS)?.len()?,
                sites: read.open_table(SITES)?.len()?,
                settings: read.open_table(SETTINGS)?.len()?,
            })
        })
    }

    fn tenant(&self, name: &str) -> Result<Option<Tenant>, StoreError> {
        self.read(|read| find(&read.open_table(TENANTS)?, name))
    }

    fn site(&self, name: &str) -> Result<Option<Site>, StoreError> {
        self.read(|read| find(&read.open_table(SITES)?, name))
    }

    fn tenants(&self, after: Option<&str>, limit: usize) -> Result<Vec<Tenant>, StoreError> {
        self.read(|read| page(&read.open_table(TENANTS)?, after, page_len(limit)))
    }

    fn sites(&self, select: &SiteFilter) -> Result<Vec<Site>, StoreError> {
        self.read(|read| {
            let sites = read.open_table(SITES)?;
            let after = select.after.as_deref();
            let limit = page_len(select.limit);
            let names = match (&select.host, &select.tenant) {
                (None, None) => return page(&sites, after, limit),
                (Some(host), _) => sites_at(read, &host.to_ascii_lowercase())?,
                (None, Some(tenant)) => sites_of(&read.open_table(SITES_OF_TENANT)?, tenant, after, limit)?,
            };
            let mut found = Vec::new();
            for name in names.iter().filter(|name| after.is_none_or(|after| name.as_str() > after)) {
                let site: Site = find(&sites, name)?.ok_or_else(|| missing("site", name))?;
                if select.tenant.as_deref().is_none_or(|tenant| site.tenant.as_str() == tenant) {
                    found.push(site);
                }
                if found.len() == limit {
                    break;
                }
            }
            Ok(found)
        })
    }

    fn setting(&self, key: &str) -> Result<Option<Setting>, StoreError> {
        self.read(|read| find(&read.open_table(SETTINGS)?, key))
    }

    fn settings(&self, after: Option<&str>, limit: usize) -> Result<Vec<Setting>, StoreError> {
        self.read(|read| page(&read.open_table(SETTINGS)?, after, page_len(limit)))
    }

    fn rule(&self, name: &str) -> Result<Option<RuleRecord>, StoreError> {
        self.read(|read| find(&read.open_table(RULES)?, name))
    }

    fn rules(&self) -> Result<Vec<RuleRecord>, StoreError> {
        self.read(|read| page(&read.open_table(RULES)?, None, usize::MAX))
    }

    fn nodes(&self) -> Result<Vec<NodeRecord>, StoreError> {
        self.read(|read| page(&read.open_table(NODES)?, None, usize::MAX))
    }

    fn node(&self, name: &str) -> Result<Option<NodeRecord>, StoreError> {
        self.read(|read| find(&read.open_table(NODES)?, name))
    }

    fn placement(&self, site: &str) -> Result<Option<Placement>, StoreError> {
        self.read(|read| find(&read.open_table(PLACEMENTS)?, site))
    }

    fn placements(&self, after: Option<&str>, limit: usize) -> Result<Vec<Placement>, StoreError> {
        self.read(|read| page(&read.open_table(PLACEMENTS)?, after, page_len(limit)))
    }

    fn ticket_keys(&self) -> Result<Option<TicketKeys>, StoreError> {
        self.read(|read| find_keys(&read.open_table(TICKET_KEYS)?))
    }

    fn put_ticket_keys(
        &self,
        keys: TicketKeys,
        seen: Option<&TicketKeys>,
    ) -> Result<Option<CommittedChanges>, StoreError> {
        let write = self.begin_write().map_err(|error| self.failed(error))?;
        let before = self.ticket_keys()?;
        if before.as_ref() != seen {
            return Ok(None);
        }
        let plan = ChangePlan::of_ticket_keys(before, keys);
        let revision = self.write(write, &plan, None).map_err(|error| self.failed(error))?;
        Ok(Some(CommittedChanges { revision, changes: plan.into_changes() }))
    }

    fn walk(&self, visit: &mut Visitor<'_>) -> Result<u64, StoreError> {
        let mut stopped = None;
        let revision = self.read(|read| {
            for (kind, definition) in [
                (RecordKind::Tenant, TENANTS),
                (RecordKind::Site, SITES),
                (RecordKind::Setting, SETTINGS),
                (RecordKind::Rule, RULES),
                (RecordKind::Node, NODES),
                (RecordKind::Placement, PLACEMENTS),
                (RecordKind::TicketKeys, TICKET_KEYS),
            ] {
                for record in read.open_table(definition)?.iter()? {
                    if let Err(error) = visit(kind, record?.1.value()) {
                        stopped = Some(error);
                        return Ok(0);
                    }
                }
            }
            Ok(read.open_table(META)?.get("revision")?.map_or(0, |value| value.value()))
        })?;
        stopped.map_or(Ok(revision), |error| Err(StoreError::Visitor(error)))
    }

    fn transaction(
        &self,
        changes: Vec<RecordChange>,
        mode: ChangeMode,
    ) -> Result<CommittedChanges, TransactionError> {
        // There is one writer at a time, so the state read now is the one on which this transaction
        // builds. Dropping it on any way out before `commit` undoes it.
        let write = self.begin_write().map_err(|error| self.failed(error))?;
        let plan = ChangePlan::make(changes, mode, &self.planner()?)?;
        let stored = self.write(write, &plan, None).map_err(|error| self.failed(error))?;
        Ok(CommittedChanges { revision: stored, changes: plan.into_changes() })
    }

    fn allocate_uid(&self, base: u32) -> Result<u32, StoreError> {
        let allocate = || {
            let write = self.begin_write()?;
            let mut tables = WriteTables::open(&write)?;
            let next = tables.meta.get("next_uid")?.map_or(0, |value| value.value());
            let first = u32::try_from(next).unwrap_or(u32::MAX).max(base).max(1);
            let free = free_uid(&tables.uids, first)?;
            if let Some(uid) = free {
                tables.meta.insert("next_uid", u64::from(uid) + 1)?;
                drop(tables);
                write.commit()?;
            }
            Ok(free)
        };
        let free = allocate().map_err(|error: redb::Error| self.failed(error))?;
        free.ok_or(StoreError::NoUid { base })
    }

    fn raise_next_uid(&self, next: u32) -> Result<(), StoreError> {
        let raise = || {
            let write = self.begin_write()?;
            let mut tables = WriteTables::open(&write)?;
            tables.raise_next_uid(next)?;
            drop(tables);
            write.commit()?;
            Ok(())
        };
        raise().map_err(|error: redb::Error| self.failed(error))
    }

    fn next_uid(&self) -> Result<u32, StoreError> {
        let next = number(&self.database, "next_uid").map_err(|error| self.failed(error))?;
        Ok(u32::try_from(next).unwrap_or(u32::MAX))
    }
}

// === Reading ===

fn number(database: &Database, key: &str) -> Fallible<u64> {
    Ok(database.begin_read()?.open_table(META)?.get(key)?.map_or(0, |value| value.value()))
}

fn page_len(limit: usize) -> usize {
    if limit == 0 { PAGE_LEN_MAX } else { limit.min(PAGE_LEN_MAX) }
}

fn find<T: DeserializeOwned>(
    table: &impl ReadableTable<&'static str, &'static str>,
    name: &str,
) -> Fallible<Option<T>> {
    table.get(name)?.map(|json| decode(json.value())).transpose()
}

fn page<T: DeserializeOwned>(
    table: &impl ReadableTable<&'static str, &'static str>,
    after: Option<&str>,
    limit: usize,
) -> Fallible<Vec<T>> {
    let from = after.map_or(Unbounded, Excluded);
    table.range::<&str>((from, Unbounded))?.take(limit).map(|record| decode(record?.1.value())).collect()
}

fn sites_of(
    table: &impl ReadableTable<(&'static str, &'static str), ()>,
    tenant: &str,
    after: Option<&str>,
    limit: usize,
) -> Fallible<Vec<String>> {
    let from = after.map_or(Included((tenant, "")), |after| Excluded((tenant, after)));
    let mut names = Vec::new();
    for entry in table.range::<(&str, &str)>((from, Unbounded))?.take(limit) {
        let (key, ()) = entry.map(|(key, value)| (key, value.value()))?;
        if key.value().0 != tenant {
            break;
        }
        names.push(key.value().1.to_owned());
    }
    Ok(names)
}

/// Returns the sites with this host pattern, in order of name. They are as few as its paths.
fn sites_at(read: &ReadTransaction, host: &str) -> Fallible<Vec<String>> {
    let mut names = Vec::new();
    for entry in read.open_table(HOSTS)?.range::<(&str, &str)>((Included((host, "")), Unbounded))? {
        let (key, site) = entry?;
        if key.value().0 != host {
            break;
        }
        names.push(site.value().to_owned());
    }
    names.sort_unstable();
    Ok(names)
}

fn free_uid(uids: &impl ReadableTable<u32, &'static str>, first: u32) -> Fallible<Option<u32>> {
    for uid in first..u32::MAX {
        if uids.get(uid)?.is_none() {
            return Ok(Some(uid));
        }
    }
    Ok(None)
}

fn missing(kind: &str, name: &str) -> redb::Error {
    redb::Error::Corrupted(format!("an index names {kind} '{name}', which has no record"))
}

// === Writing ===

/// All tables of one write transaction.
struct WriteTables<'txn> {
    meta: Table<'txn, &'static str, u64>,
    tenants: Table<'txn, &'static str, &'static str>,
    sites: Table<'txn, &'static str, &'static str>,
    settings: Table<'txn, &'static str, &'static str>,
    rules: Table<'txn, &'static str, &'static str>,
    nodes: Table<'txn, &'static str, &'static str>,
    placements: Table<'txn, &'static str, &'static str>,
    ticket_keys: Table<'txn, &'static str, &'static str>,
    hosts: Table<'txn, (&'static str, &'static str), &'static str>,
    uids: Table<'txn, u32, &'static str>,
    sites_of_tenant: Table<'txn, (&'static str, &'static str), ()>,
}

impl<'txn> WriteTables<'txn> {
    fn open(write: &'txn WriteTransaction) -> Fallible<Self> {
        Ok(Self {
            meta: write.open_table(META)?,
            tenants: write.open_table(TENANTS)?,
            sites: write.open_table(SITES)?,
            settings: write.open_table(SETTINGS)?,
            rules: write.open_table(RULES)?,
            nodes: write.open_table(NODES)?,
            placements: write.open_table(PLACEMENTS)?,
            ticket_keys: write.open_table(TICKET_KEYS)?,
            hosts: write.open_table(HOSTS)?,
            uids: write.open_table(UIDS)?,
            sites_of_tenant: write.open_table(SITES_OF_TENANT)?,
        })
    }

    /// Returns the resulting revision. All old entries are removed from the unique indexes before
    /// any new entry is added. The reason is that two records may swap values.
    fn write(&mut self, plan: &ChangePlan) -> Fallible<u64> {
        for tenant in plan.tenants.values().filter_map(|step| step.before.as_ref()) {
            self.uids.remove(tenant.uid)?;
        }
        for site in plan.sites.values().filter_map(|step| step.before.as_ref()) {
            for host in &site.hosts {
                self.hosts.remove((host.as_str(), site.path.as_str()))?;
            }
            self.sites_of_tenant.remove((site.tenant.as_str(), site.name.as_str()))?;
        }
        for (name, step) in &plan.tenants {
            match &step.after {
                Some(tenant) => {
                    self.tenants.insert(name.as_str(), encode(tenant)?.as_str())?;
                    self.uids.insert(tenant.uid, name.as_str())?;
                }
                None => drop(self.tenants.remove(name.as_str())?),
            }
        }
        for (name, step) in &plan.sites {
            match &step.after {
                Some(site) => self.put_site(site)?,
                None => drop(self.sites.remove(name.as_str())?),
            }
        }
        for (key, step) in &plan.settings {
            match &step.after {
                Some(setting) => drop(self.settings.insert(&**key, encode(setting)?.as_str())?),
                None => drop(self.settings.remove(&**key)?),
            }
        }
        for (name, step) in &plan.rules {
            match &step.after {
                Some(rule) => drop(self.rules.insert(name.as_str(), encode(rule)?.as_str())?),
                None => drop(self.rules.remove(name.as_str())?),
            }
        }
        for (name, step) in &plan.nodes {
            match &step.after {
                Some(node) => drop(self.nodes.insert(name.as_str(), encode(node)?.as_str())?),
                None => drop(self.nodes.remove(name.as_str())?),
            }
        }
        for (site, step) in &plan.placements {
            match &step.after {
                Some(placement) => {
                    drop(self.placements.insert(site.as_str(), encode(placement)?.as_str())?);
                }
                None => drop(self.placements.remove(site.as_str())?),
            }
        }
        self.write_ticket_keys(plan)?;
        if let Some(uid) = plan.left_uid() {
            self.raise_next_uid(uid + 1)?;
        }
        let revision = self.meta.get("revision")?.map_or(0, |value| value.value());
        if plan.is_empty() {
            return Ok(revision);
        }
        self.meta.insert("revision", revision + 1)?;
        Ok(revision + 1)
    }

    fn raise_next_uid(&mut self, next: u32) -> Fallible<()> {
        let held = self.meta.get("next_uid")?.map_or(0, |value| value.value());
        if held < u64::from(next) {
            self.meta.insert("next_uid", u64::from(next))?;
        }
        Ok(())
    }

    fn write_ticket_keys(&mut self, plan: &ChangePlan) -> Fallible<()> {
        match plan.ticket_keys.as_ref().map(|step| &step.after) {
            Some(Some(keys)) => drop(self.ticket_keys.insert(TICKET_KEYS_KEY, encode(keys)?.as_str())?),
            Some(None) => drop(self.ticket_keys.remove(TICKET_KEYS_KEY)?),
            None => {}
        }
        Ok(())
    }

    fn put_site(&mut self, site: &Site) -> Fallible<()> {
        let name = site.name.as_str();
        self.sites.insert(name, encode(site)?.as_str())?;
        for host in &site.hosts {
            self.hosts.insert((host.as_str(), site.path.as_str()), name)?;
        }
        self.sites_of_tenant.insert((site.tenant.as_str(), name), ())?;
        Ok(())
    }
}

/// The state of one moment, as planning queries it.
struct RedbView<'a> {
    path: &'a Path,
    meta: ReadOnlyTable<&'static str, u64>,
    tenants: ReadOnlyTable<&'static str, &'static str>,
    sites: ReadOnlyTable<&'static str, &'static str>,
    settings: ReadOnlyTable<&'static str, &'static str>,
    rules: ReadOnlyTable<&'static str, &'static str>,
    nodes: ReadOnlyTable<&'static str, &'static str>,
    placements: ReadOnlyTable<&'static str, &'static str>,
    ticket_keys: ReadOnlyTable<&'static str, &'static str>,
    hosts: ReadOnlyTable<(&'static str, &'static str), &'static str>,
    uids: ReadOnlyTable<u32, &'static str>,
    sites_of_tenant: ReadOnlyTable<(&'static str, &'static str), ()>,
}

impl RedbView<'_> {
    fn reached(&self) -> Result<ReplicaPosition, StoreError> {
        let number =
            |key: &str| -> Fallible<u64> { Ok(self.meta.get(key)?.map_or(0, |value| value.value())) };
        let look =
            || Ok(ReplicaPosition { revision: number("cluster_revision")?, count: number("cluster_count")? });
        self.ask(look())
    }

    fn ask<T>(&self, answer: Fallible<T>) -> Result<T, StoreError> {
        answer.map_err(|error| store_error(self.path, error))
    }
}

fn site_name(text: &str) -> Fallible<SiteName> {
    SiteName::new(text).map_err(|error| redb::Error::Corrupted(error.to_string()))
}

fn tenant_name(text: &str) -> Fallible<TenantName> {
    TenantName::new(text).map_err(|error| redb::Error::Corrupted(error.to_string()))
}

fn rule_name(text: &str) -> Fallible<RuleName> {
    RuleName::new(text).map_err(|error| redb::Error::Corrupted(error.to_string()))
}

impl StoreView for RedbView<'_> {
    fn tenant(&self, name: &str) -> Result<Option<Tenant>, StoreError> {
        self.ask(find(&self.tenants, name))
    }

    fn site(&self, name: &str) -> Result<Option<Site>, StoreError> {
        self.ask(find(&self.sites, name))
    }

    fn tenant_of_uid(&self, uid: u32) -> Result<Option<TenantName>, StoreError> {
        let look = || self.uids.get(uid)?.map(|name| tenant_name(name.value())).transpose();
        self.ask(look())
    }

    fn site_at(&self, host: &str, path: &str) -> Result<Option<SiteName>, StoreError> {
        let look = || self.hosts.get((host, path))?.map(|name| site_name(name.value())).transpose();
        self.ask(look())
    }

    fn sites_of(&self, tenant: &str) -> Result<Vec<SiteName>, StoreError> {
        let look = || {
            let names = sites_of(&self.sites_of_tenant, tenant, None, usize::MAX)?;
            names.iter().map(|name| site_name(name)).collect()
        };
        self.ask(look())
    }

    fn tenant_names(&self) -> Result<Vec<TenantName>, StoreError> {
        let look = || self.tenants.iter()?.map(|entry| tenant_name(entry?.0.value())).collect();
        self.ask(look())
    }

    fn site_names(&self) -> Result<Vec<SiteName>, StoreError> {
        let look = || self.sites.iter()?.map(|entry| site_name(entry?.0.value())).collect();
        self.ask(look())
    }

    fn setting(&self, key: &str) -> Result<Option<Setting>, StoreError> {
        self.ask(find(&self.settings, key))
    }

    fn setting_keys(&self) -> Result<Vec<Box<str>>, StoreError> {
        let look = || self.settings.iter()?.map(|entry| Ok(entry?.0.value().into())).collect();
        self.ask(look())
    }

    fn setting_count(&self) -> Result<u64, StoreError> {
        self.ask(self.settings.len().map_err(Into::into))
    }

    fn rule(&self, name: &str) -> Result<Option<RuleRecord>, StoreError> {
        self.ask(find(&self.rules, name))
    }

    fn rule_names(&self) -> Result<Vec<RuleName>, StoreError> {
        let look = || self.rules.iter()?.map(|entry| rule_name(entry?.0.value())).collect();
        self.ask(look())
    }

    fn node(&self, name: &str) -> Result<Option<NodeRecord>, StoreError> {
        self.ask(find(&self.nodes, name))
    }

    fn placement(&self, site: &str) -> Result<Option<Placement>, StoreError> {
        self.ask(find(&self.placements, site))
    }

    fn ticket_keys(&self) -> Result<Option<TicketKeys>, StoreError> {
        self.ask(find_keys(&self.ticket_keys))
    }
}

#[cfg(test)]
mod tests;
