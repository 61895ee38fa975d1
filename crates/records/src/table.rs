//! The complete in-memory copy of tenants, sites, settings, nodes, placements and ticket keys that
//! each process holds. So a request never queries the store.
//!
//! It is made for 100,000 sites. A record is kept as its compact JSON and decoded on demand. The
//! indexes hold 32-bit slots and hashes instead of names. Settings are kept decoded, because rules
//! read them many times in one request.
//!
//! Not here: the choice among a host's paths (`edge::route`, which also keeps hot records decoded),
//! checks of records (`check`: the store has accepted all that arrives here), the wire (`feed`).

mod cluster;

use std::collections::BTreeSet;
use std::fmt;
use std::hash::BuildHasher;
use std::sync::Arc;

use foldhash::fast::RandomState;
use hashbrown::HashTable;
use nagaya_base::limits::HOST_LEN_MAX;
use serde::Serialize;
use serde::de::DeserializeOwned;

use self::cluster::ClusterTable;
use crate::names::NodeName;
use crate::record::{NodeRecord, Placement, PlacementView, RecordChange, Setting, Site, Tenant, TicketKeys};

/// A change that does not fit the table's contents. The store never commits such a change. So a
/// process with this error is out of step with the store and must reload everything.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    #[error("site '{site}' names tenant '{tenant}', which this process does not know")]
    NoTenant { site: String, tenant: String },
    #[error("tenant '{tenant}' cannot be dropped: it still has {sites} sites here")]
    TenantInUse { tenant: String, sites: u32 },
    #[error("tenant '{0}' cannot be dropped: this process does not know it")]
    UnknownTenant(String),
    #[error("site '{0}' cannot be dropped: this process does not know it")]
    UnknownSite(String),
    #[error("setting '{0}' cannot be dropped: this process does not know it")]
    UnknownSetting(String),
    #[error("node '{0}' cannot be dropped: this process does not know it")]
    UnknownNode(String),
    #[error("the placement of '{0}' cannot be dropped: this process does not know it")]
    UnknownPlacement(String),
}

/// A site that serves a host, with its owner.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SiteMatch {
    pub site: Arc<Site>,
    pub tenant: Arc<Tenant>,
}

#[derive(Default)]
pub struct RecordIndex {
    /// `NamedRecord::link` is the number of its sites.
    tenants: RecordList,
    /// `NamedRecord::link` is the slot of its tenant.
    sites: RecordList,
    hosts: HashTable<HostEntry>,
    settings: SettingTable,
    cluster: ClusterTable,
    ticket_keys: Option<TicketKeys>,
    hasher: RandomState,
    /// Records are written here first, so that the final allocation is exactly as long as the
    /// record.
    scratch: Vec<u8>,
    revision: u64,
}

/// One host pattern of one site. Several sites share a pattern if their paths differ. The pattern
/// itself is only in the record, which settles the rare case of two patterns with one 32-bit hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct HostEntry {
    hash: u32,
    site: u32,
}

/// Writes counts and no record: there may be a hundred thousand, with secrets in them.
impl fmt::Debug for RecordIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tenants = self.tenant_count();
        let sites = self.site_count();
        f.debug_struct("Table")
            .field("revision", &self.revision)
            .field("tenants", &tenants)
            .field("sites", &sites)
            .finish_non_exhaustive()
    }
}

impl RecordIndex {
    pub fn new() -> Self {
        Self::default()
    }

    /// Applies one step. Within a batch, put a tenant before its sites and drop it after them.
    pub fn apply(&mut self, change: RecordChange) -> Result<(), TableError> {
        match change {
            RecordChange::PutTenant(tenant) => self.put_tenant(&tenant),
            RecordChange::DropTenant(name) => return self.drop_tenant(name.as_str()),
            RecordChange::PutSite(site) => return self.put_site(&site),
            RecordChange::DropSite(name) => return self.drop_site(name.as_str()),
            RecordChange::PutSetting(setting) => self.settings.put(setting),
            RecordChange::DropSetting(key) if self.settings.remove(&key) => {}
            RecordChange::DropSetting(key) => return Err(TableError::UnknownSetting(key)),
            // Processes that run rules have them as files.
            RecordChange::PutRule(_) | RecordChange::DropRule(_) => {}
            RecordChange::PutNode(node) => self.cluster.put_node(*node),
            RecordChange::DropNode(name) if self.cluster.drop_node(name.as_str()) => {}
            RecordChange::DropNode(name) => return Err(TableError::UnknownNode(name.into())),
            RecordChange::PutPlacement(placement) => self.cluster.put_placement(placement),
            RecordChange::DropPlacement(site) if self.cluster.drop_placement(site.as_str()) => {}
            RecordChange::DropPlacement(site) => return Err(TableError::UnknownPlacement(site.into())),
            RecordChange::PutTicketKeys(keys) => self.ticket_keys = Some(keys),
            RecordChange::DropTicketKeys => self.ticket_keys = None,
        }
        Ok(())
    }

    pub fn site(&self, name: &str) -> Option<Arc<Site>> {
        Some(Arc::new(self.sites.decode(self.sites.find(name)?)))
    }

    pub fn tenant(&self, name: &str) -> Option<Arc<Tenant>> {
        Some(Arc::new(self.tenants.decode(self.tenants.find(name)?)))
    }

    /// Returns the setting with exactly this key.
    pub fn setting(&self, key: &str) -> Option<Arc<Setting>> {
        self.settings.find(key).cloned()
    }

    /// Returns the sites for a host name without port, in any case, longest path first. The most
    /// specific pattern that any site has wins entirely. The order is the name itself, then `*.`
    /// with the longest rest, then `*`. An unknown name costs some hashing and no allocation.
    pub fn routes(&self, host: &str) -> Vec<SiteMatch> {
        // Room for the host and one byte before it, for the star of a wildcard.
        let mut text = [0; 1 + HOST_LEN_MAX];
        let host = host.as_bytes();
        if (1..=HOST_LEN_MAX).contains(&host.len()) {
            let text = &mut text[..=host.len()];
            text[1..].copy_from_slice(host);
            text.make_ascii_lowercase();
            let exact = self.routes_of(&text[1..]);
            if !exact.is_empty() {
                return exact;
            }
            // From left to right the rests get shorter, and the star overwrites only used bytes.
            for dot in 2..text.len() {
                if text[dot] == b'.' {
                    text[dot - 1] = b'*';
                    let wildcard = self.routes_of(&text[dot - 1..]);
                    if !wildcard.is_empty() {
                        return wildcard;
                    }
                }
            }
        }
        self.routes_of(b"*")
    }

    /// Returns the host names of a tenant's sites, without patterns, each once. At most `max`;
    /// those of the site `first` come first.
    ///
    /// It scans the index of all hosts, and decodes at most `max` records, all of this tenant.
    pub fn hosts_of_tenant(&self, tenant: &str, first: &str, max: usize) -> Vec<String> {
        let Some(tenant) = self.tenants.find(tenant) else { return Vec::new() };
        let is_of_tenant = |slot: &u32| self.sites.record(*slot).link == tenant;
        let first = self.sites.find(first).filter(is_of_tenant);
        let own: BTreeSet<u32> = self.hosts.iter().map(|entry| entry.site).filter(is_of_tenant).collect();
        let others = own.into_iter().filter(|slot| Some(*slot) != first);
        let mut names: Vec<String> = Vec::new();
        let mut known = BTreeSet::new();
        for slot in first.into_iter().chain(others).take(max) {
            let site: Site = self.sites.decode(slot);
            for name in site.hosts.iter().map(|host| host.as_str()).filter(|name| !name.contains('*')) {
                if names.len() < max && known.insert(name.to_owned()) {
                    names.push(name.to_owned());
                }
            }
        }
        names
    }

    pub fn site_count(&self) -> usize {
        self.sites.names.len()
    }

    pub fn tenant_count(&self) -> usize {
        self.tenants.names.len()
    }

    pub fn setting_count(&self) -> usize {
        self.settings.table.len()
    }

    /// Returns the store's revision that this copy has reached.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    pub fn set_revision(&mut self, revision: u64) {
        self.revision = revision;
    }

    /// Returns the bytes this table has allocated, without the allocator's own rounding.
    pub fn heap_bytes(&self) -> usize {
        self.tenants.heap_bytes()
            + self.sites.heap_bytes()
            + self.hosts.allocation_size()
            + self.settings.heap_bytes()
            + self.cluster.heap_bytes()
            + self.scratch.capacity()
    }

    /// Returns the member of the cluster with this name.
    pub fn node(&self, name: &str) -> Option<Arc<NodeRecord>> {
        self.cluster.node(name).cloned()
    }

    /// Returns all members of the cluster, in no order.
    pub fn nodes(&self) -> Vec<Arc<NodeRecord>> {
        self.cluster.nodes().cloned().collect()
    }

    /// Returns where the application of this site runs. `None` if it was never requested, or if
    /// there is no cluster.
    pub fn placement(&self, site: &str) -> Option<Placement> {
        self.cluster.placement(site)
    }

    /// Returns a node's view of the placement of a site. `None` if the site is placed nowhere.
    pub fn standing(&self, site: &str, node: &NodeName) -> Option<PlacementView> {
        self.cluster.standing(site, node)
    }

    /// Returns all placements, in no order.
    pub fn placements(&self) -> impl Iterator<Item = Placement> {
        self.cluster.placements()
    }

    pub fn placement_count(&self) -> usize {
        self.cluster.placement_count()
    }

    /// Returns the keys that sign the tickets of all nodes. `None` if there is no cluster, or if no
    /// key was made yet.
    pub fn ticket_keys(&self) -> Option<&TicketKeys> {
        self.ticket_keys.as_ref()
    }

    fn put_tenant(&mut self, tenant: &Tenant) {
        let name = tenant.name.as_str();
        let sites = self.tenants.find(name).map_or(0, |slot| self.tenants.record(slot).link);
        let json = write_json(&mut self.scratch, tenant);
        self.tenants.put(name, json, sites);
    }

    fn drop_tenant(&mut self, name: &str) -> Result<(), TableError> {
        let slot = self.tenants.find(name).ok_or_else(|| TableError::UnknownTenant(name.into()))?;
        let sites = self.tenants.record(slot).link;
        if sites > 0 {
            return Err(TableError::TenantInUse { tenant: name.into(), sites });
        }
        self.tenants.remove(name);
        Ok(())
    }

    fn put_site(&mut self, site: &Site) -> Result<(), TableError> {
        let name = site.name.as_str();
        let Some(tenant) = self.tenants.find(site.tenant.as_str()) else {
            return Err(TableError::NoTenant { site: name.into(), tenant: site.tenant.to_string() });
        };
        if let Some(slot) = self.sites.find(name) {
            self.unlink(slot);
        }
        let json = write_json(&mut self.scratch, site);
        let slot = self.sites.put(name, json, tenant);
        self.tenants.record_mut(tenant).link += 1;
        for host in &site.hosts {
            let entry = HostEntry { hash: self.host_hash(host.as_str().as_bytes()), site: slot };
            // A repeated pattern, or two of this site's with one hash: one entry finds both.
            self.hosts.entry(entry.spread(), |other| *other == entry, HostEntry::spread).or_insert(entry);
        }
        Ok(())
    }

    fn drop_site(&mut self, name: &str) -> Result<(), TableError> {
        let slot = self.sites.find(name).ok_or_else(|| TableError::UnknownSite(name.into()))?;
        self.unlink(slot);
        self.sites.remove(name);
        Ok(())
    }

    /// Removes a site that is about to change or go from its tenant's count and the index of hosts.
    fn unlink(&mut self, slot: u32) {
        let tenant = self.sites.record(slot).link;
        self.tenants.record_mut(tenant).link -= 1;
        let site: Site = self.sites.decode(slot);
        for host in &site.hosts {
            let entry = HostEntry { hash: self.host_hash(host.as_str().as_bytes()), site: slot };
            if let Ok(found) = self.hosts.find_entry(entry.spread(), |other| *other == entry) {
                found.remove();
            }
        }
    }

    /// Returns the sites that have exactly this pattern.
    fn routes_of(&self, pattern: &[u8]) -> Vec<SiteMatch> {
        let hash = self.host_hash(pattern);
        let mut routes: Vec<SiteMatch> = self
            .hosts
            .iter_hash(spread(hash))
            .filter(|entry| entry.hash == hash)
            .map(|entry| (entry, self.sites.decode::<Site>(entry.site)))
            .filter(|(_, site)| site.hosts.iter().any(|host| host.as_str().as_bytes() == pattern))
            .map(|(entry, site)| SiteMatch {
                site: Arc::new(site),
                tenant: Arc::new(self.tenants.decode(self.sites.record(entry.site).link)),
            })
            .collect();
        routes.sort_by(|a, b| {
            b.site.path.len().cmp(&a.site.path.len()).then_with(|| a.site.name.cmp(&b.site.name))
        });
        routes
    }

    #[expect(clippy::cast_possible_truncation, reason = "both halves are folded into the 32 bits kept")]
    fn host_hash(&self, pattern: &[u8]) -> u32 {
        let hash = self.hasher.hash_one(pattern);
        (hash ^ (hash >> 32)) as u32
    }
}

impl HostEntry {
    fn spread(&self) -> u64 {
        spread(self.hash)
    }
}

/// Spreads a hash. The hash table picks a bucket by the low bits and a tag by the high ones. An odd
/// factor fills both.
fn spread(hash: u32) -> u64 {
    u64::from(hash).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn write_json<'a>(scratch: &'a mut Vec<u8>, record: &impl Serialize) -> &'a str {
    scratch.clear();
    serde_json::to_writer(&mut *scratch, record).expect("records have text keys and writing to memory works");
    str::from_utf8(scratch).expect("JSON is UTF-8")
}

// === Settings ===

#[derive(Debug, Default)]
struct SettingTable {
    table: HashTable<Arc<Setting>>,
    hasher: RandomState,
}

impl SettingTable {
    fn find(&self, key: &str) -> Option<&Arc<Setting>> {
        self.table.find(self.hasher.hash_one(key), |setting| &*setting.key == key)
    }

    fn put(&mut self, setting: Setting) {
        let Self { table, hasher } = self;
        let key = &*setting.key;
        let entry = table.entry(
            hasher.hash_one(key),
            |other| &*other.key == key,
            |other| hasher.hash_one(&*other.key),
        );
        entry.insert(Arc::new(setting));
    }

    fn remove(&mut self, key: &str) -> bool {
        let found = self.table.find_entry(self.hasher.hash_one(key), |setting| &*setting.key == key);
        found.map(|entry| entry.remove()).is_ok()
    }

    fn heap_bytes(&self) -> usize {
        // The counts of its `Arc` come before the setting.
        let each = size_of::<Setting>() + 2 * size_of::<usize>();
        self.table.iter().map(|setting| each + setting.heap_bytes()).sum::<usize>()
            + self.table.allocation_size()
    }
}

// === Records ===

/// Beginning of the JSON of every record: `name` is the first field, and names need no escapes.
const BEFORE_NAME: &str = "{\"name\":\"";

#[derive(Debug, Default)]
struct NamedRecord {
    json: Box<str>,
    link: u32,
}

impl NamedRecord {
    fn name(&self) -> &str {
        let rest = &self.json[BEFORE_NAME.len()..];
        &rest[..rest.find('"').expect("a record's name is closed")]
    }
}

/// Records of one kind, found by name. A slot keeps its position while its record lives.
#[derive(Debug, Default)]
struct RecordList {
    slots: Vec<NamedRecord>,
    free: Vec<u32>,
    names: HashTable<u32>,
    hasher: RandomState,
}

impl RecordList {
    fn find(&self, name: &str) -> Option<u32> {
        self.names.find(self.hasher.hash_one(name), |&slot| self.record(slot).name() == name).copied()
    }

    fn record(&self, slot: u32) -> &NamedRecord {
        &self.slots[slot as usize]
    }

    fn record_mut(&mut self, slot: u32) -> &mut NamedRecord {
        &mut self.slots[slot as usize]
    }

    fn decode<T: DeserializeOwned>(&self, slot: u32) -> T {
        serde_json::from_str(&self.record(slot).json).expect("the table wrote this record itself")
    }

    fn put(&mut self, name: &str, json: &str, link: u32) -> u32 {
        debug_assert!(json.starts_with(BEFORE_NAME), "{json}");
        let record = NamedRecord { json: json.into(), link };
        if let Some(slot) = self.find(name) {
            *self.record_mut(slot) = record;
            return slot;
        }
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(NamedRecord::default());
            u32::try_from(self.slots.len() - 1).expect("memory ends before 2^32 records")
        });
        *self.record_mut(slot) = record;
        let Self { slots, names, hasher, .. } = self;
        names.insert_unique(hasher.hash_one(name), slot, |&other| {
            hasher.hash_one(slots[other as usize].name())
        });
        slot
    }

    fn remove(&mut self, name: &str) {
        let Self { slots, names, hasher, free } = self;
        let same = |&slot: &u32| slots[slot as usize].name() == name;
        if let Ok(found) = names.find_entry(hasher.hash_one(name), same) {
            let (slot, _) = found.remove();
            slots[slot as usize] = NamedRecord::default();
            free.push(slot);
        }
    }

    fn heap_bytes(&self) -> usize {
        self.slots.iter().map(|record| record.json.len()).sum::<usize>()
            + self.slots.capacity() * size_of::<NamedRecord>()
            + self.free.capacity() * size_of::<u32>()
            + self.names.allocation_size()
    }
}

#[cfg(test)]
mod tests;
