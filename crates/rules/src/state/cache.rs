//! Caches: texts by key, within bounds for each tenant and for all.
//!
//! Keys come from requests, so new entries displace old ones. The entries of the tenant that were
//! not set for longest go first. If the whole cache is full, those of the largest tenant go. Pure,
//! except for one log line. Not here: locking (`super`).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use foldhash::fast::RandomState;
use nagaya_base::Code;

/// Entries of one owner, and bytes of them with their keys.
pub const ENTRIES_MAX: usize = 131_072;
pub const BYTES_MAX: usize = 64 << 20;

/// Entries, and their bytes, that may have been set during requests of one tenant.
pub const TENANT_ENTRIES_MAX: usize = 16_384;
pub const TENANT_BYTES_MAX: usize = 8 << 20;

/// One key: longer than a document root and a path together.
pub const KEY_LEN_MAX: usize = 8 << 10;

/// One value.
pub const VALUE_LEN_MAX: usize = 64 << 10;

/// The name of a cache, and of a lock.
pub const NAME_LEN_MAX: usize = 1024;

/// Bytes taken for each entry in addition to its own, roughly.
const OVERHEAD: usize = 256;

/// Time after which the log reports again that entries were dropped.
const TOLD_AGAIN_AFTER: Duration = Duration::from_secs(60);

const CODE_FULL: Code = Code(614);

/// Why an entry is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CacheFull {
    #[error("a key of a Cache is longer than {KEY_LEN_MAX} bytes")]
    Key,
    #[error("a value of a Cache is longer than {VALUE_LEN_MAX} bytes")]
    Value,
}

/// Fill level.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheUsage {
    pub bytes: usize,
    pub bytes_max: usize,
}

/// One cache.
type Space = HashMap<Arc<[u8]>, CacheEntry, RandomState>;

#[derive(Debug, Default)]
pub struct CacheTable {
    spaces: HashMap<Arc<str>, Space, RandomState>,
    tenants: HashMap<Arc<str>, TenantPart, RandomState>,
    /// Tenants by the bytes of their parts.
    by_bytes: BTreeSet<(usize, Arc<str>)>,
    entries: usize,
    bytes: usize,
    /// Number of the next change.
    next: u64,
    /// Entries dropped since the last log line about it, and when that was.
    given_up: u64,
    told: Option<Instant>,
}

#[derive(Debug)]
struct CacheEntry {
    value: Box<[u8]>,
    tenant: Arc<str>,
    set: u64,
}

/// Entries set during requests of one tenant, in that order.
#[derive(Debug, Default)]
struct TenantPart {
    bytes: usize,
    order: BTreeMap<u64, (Arc<str>, Arc<[u8]>)>,
}

impl CacheTable {
    pub fn get(&self, space: &str, key: &[u8]) -> Option<&[u8]> {
        Some(&self.spaces.get(space)?.get(key)?.value)
    }

    pub fn len(&self, space: &str) -> usize {
        self.spaces.get(space).map_or(0, HashMap::len)
    }

    pub fn usage(&self) -> CacheUsage {
        CacheUsage { bytes: self.bytes, bytes_max: BYTES_MAX }
    }

    /// Returns the number of the next change: entries set from now on have this or a higher one.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Sets an entry. `tenant` is empty if there is no request.
    pub fn set(&mut self, space: &str, key: &[u8], value: &[u8], tenant: &str) -> Result<(), CacheFull> {
        if key.len() > KEY_LEN_MAX {
            return Err(CacheFull::Key);
        }
        if value.len() > VALUE_LEN_MAX {
            return Err(CacheFull::Value);
        }
        self.remove(space, key);
        let set = self.next;
        self.next += 1;
        let known = |(name, _): (&Arc<str>, _)| Arc::clone(name);
        let tenant = self.tenants.get_key_value(tenant).map_or_else(|| Arc::from(tenant), known);
        let space =
            self.spaces.get_key_value(space).map_or_else(|| Arc::from(space), |(name, _)| Arc::clone(name));
        let key: Arc<[u8]> = Arc::from(key);
        self.weigh(&tenant, |part| {
            part.bytes += weight(&space, &key, value);
            part.order.insert(set, (Arc::clone(&space), Arc::clone(&key)));
        });
        self.entries += 1;
        self.bytes += weight(&space, &key, value);
        let entry = CacheEntry { value: value.into(), tenant: Arc::clone(&tenant), set };
        self.spaces.entry(space).or_default().insert(key, entry);
        self.make_room(&tenant);
        Ok(())
    }

    /// Removes an entry. Returns whether it existed.
    pub fn remove(&mut self, space: &str, key: &[u8]) -> bool {
        let Some(entries) = self.spaces.get_mut(space) else { return false };
        let Some(CacheEntry { value, tenant, set }) = entries.remove(key) else { return false };
        if entries.is_empty() {
            self.spaces.remove(space);
        }
        let weight = weight(space, key, &value);
        self.entries -= 1;
        self.bytes -= weight;
        self.weigh(&tenant, |part| {
            part.bytes -= weight;
            part.order.remove(&set);
        });
        true
    }

    /// Removes some of the cache's entries that were set before this number. Returns true if there
    /// may be more.
    pub fn clear(&mut self, space: &str, before: u64, most: usize) -> bool {
        let Some(entries) = self.spaces.get(space) else { return false };
        let old = entries.iter().filter(|(_, entry)| entry.set < before);
        let keys: Vec<_> = old.map(|(key, _)| Arc::clone(key)).take(most).collect();
        for key in &keys {
            self.remove(space, key);
        }
        keys.len() == most
    }

    /// Changes a tenant's part, and keeps the order of tenants.
    fn weigh(&mut self, tenant: &Arc<str>, change: impl FnOnce(&mut TenantPart)) {
        let part = self.tenants.entry(Arc::clone(tenant)).or_default();
        self.by_bytes.remove(&(part.bytes, Arc::clone(tenant)));
        change(part);
        if part.order.is_empty() {
            self.tenants.remove(tenant);
        } else {
            self.by_bytes.insert((part.bytes, Arc::clone(tenant)));
        }
    }

    fn make_room(&mut self, tenant: &Arc<str>) {
        let is_over =
            |part: &TenantPart| part.bytes > TENANT_BYTES_MAX || part.order.len() > TENANT_ENTRIES_MAX;
        while self.tenants.get(tenant).is_some_and(is_over) {
            self.give_up_oldest(&Arc::clone(tenant));
        }
        while self.bytes > BYTES_MAX || self.entries > ENTRIES_MAX {
            let Some((_, heaviest)) = self.by_bytes.last().cloned() else { return };
            self.give_up_oldest(&heaviest);
        }
    }

    fn give_up_oldest(&mut self, tenant: &Arc<str>) {
        let oldest = self.tenants.get(tenant).and_then(|part| part.order.values().next());
        let Some((space, key)) = oldest.cloned() else { return };
        self.remove(&space, &key);
        self.given_up += 1;
        if self.told.is_none_or(|at| at.elapsed() >= TOLD_AGAIN_AFTER) {
            self.told = Some(Instant::now());
            let given_up = std::mem::take(&mut self.given_up);
            tracing::warn!(
                code = %CODE_FULL,
                tenant = &**tenant,
                given_up,
                "what rules keep in a Cache is full: the entries that were not set for longest are given up"
            );
        }
    }
}

/// Returns the bytes for which an entry counts.
fn weight(space: &str, key: &[u8], value: &[u8]) -> usize {
    // The name of a cache is stored once, but one cache for each entry is possible.
    space.len() + key.len() + value.len() + OVERHEAD
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    impl CacheTable {
        /// That all sums and orders agree with the entries.
        fn check(&self) {
            let all = || {
                self.spaces
                    .iter()
                    .flat_map(|(space, entries)| entries.iter().map(move |entry| (space, entry)))
            };
            let of = |space: &Arc<str>, key: &Arc<[u8]>, entry: &CacheEntry| weight(space, key, &entry.value);
            assert_eq!(self.entries, all().count());
            assert_eq!(self.bytes, all().map(|(space, (key, entry))| of(space, key, entry)).sum::<usize>());
            assert!(self.bytes <= BYTES_MAX && self.entries <= ENTRIES_MAX);
            assert!(self.spaces.values().all(|entries| !entries.is_empty()), "an empty cache takes nothing");
            for (tenant, part) in &self.tenants {
                let own = || all().filter(|(_, (_, entry))| entry.tenant == *tenant);
                assert_eq!(
                    part.bytes,
                    own().map(|(space, (key, entry))| of(space, key, entry)).sum::<usize>()
                );
                assert_eq!(part.order.len(), own().count());
                assert!(part.bytes <= TENANT_BYTES_MAX && part.order.len() <= TENANT_ENTRIES_MAX);
                assert!(self.by_bytes.contains(&(part.bytes, Arc::clone(tenant))));
            }
            assert_eq!(self.by_bytes.len(), self.tenants.len());
        }
    }

    #[derive(Debug, Clone)]
    enum Act {
        Set(u8, u8, usize, u8),
        Remove(u8, u8),
        Clear(u8),
    }

    fn act() -> impl Strategy<Value = Act> {
        prop_oneof![
            8 => (0..3_u8, 0..40_u8, prop_oneof![0..100_usize, Just(VALUE_LEN_MAX)], 0..3_u8)
                .prop_map(|(space, key, len, tenant)| Act::Set(space, key, len, tenant)),
            2 => (0..3_u8, 0..40_u8).prop_map(|(space, key)| Act::Remove(space, key)),
            1 => (0..3_u8).prop_map(Act::Clear),
        ]
    }

    proptest! {
        #[test]
        fn caches_are_maps_whose_sums_agree(acts in prop::collection::vec(act(), 0..200)) {
            let mut caches = CacheTable::default();
            let mut model = HashMap::new();
            for act in acts {
                match act {
                    Act::Set(space, key, len, tenant) => {
                        caches.set(&space.to_string(), &[key], &vec![key; len], &tenant.to_string()).unwrap();
                        model.insert((space, key), len);
                    }
                    Act::Remove(space, key) => {
                        let was_there = caches.remove(&space.to_string(), &[key]);
                        prop_assert_eq!(was_there, model.remove(&(space, key)).is_some());
                    }
                    Act::Clear(space) => {
                        let before = caches.next();
                        while caches.clear(&space.to_string(), before, 7) {}
                        model.retain(|(of, _), _| *of != space);
                    }
                }
                caches.check();
            }
            // 120 keys of 64 KiB are less than a tenant's 8 MiB: nothing is given up.
            for ((space, key), len) in &model {
                prop_assert_eq!(caches.get(&space.to_string(), &[*key]).map(<[u8]>::len), Some(*len));
            }
            for space in 0..3_u8 {
                prop_assert_eq!(caches.len(&space.to_string()), model.keys().filter(|(of, _)| *of == space).count());
            }
        }
    }

    #[test]
    fn clients_of_one_tenant_push_out_that_tenants_entries_only() {
        let mut caches = CacheTable::default();
        caches.set("c", b"victim", b"1", "alice").unwrap();
        caches.set("c", b"node", b"1", "").unwrap();
        for n in 0..2 * TENANT_ENTRIES_MAX {
            caches.set("c", format!("flood {n}").as_bytes(), b"1", "mallory").unwrap();
        }
        caches.check();
        assert_eq!(caches.len("c"), TENANT_ENTRIES_MAX + 2);
        assert!(caches.get("c", b"victim").is_some() && caches.get("c", b"node").is_some());
        assert_eq!(caches.get("c", b"flood 0"), None, "the oldest went first");
        assert!(caches.get("c", format!("flood {}", 2 * TENANT_ENTRIES_MAX - 1).as_bytes()).is_some());
    }

    #[test]
    fn one_tenants_bytes_are_bounded() {
        let mut caches = CacheTable::default();
        for n in 0..300_u32 {
            caches.set("c", &n.to_le_bytes(), &vec![0; VALUE_LEN_MAX], "mallory").unwrap();
        }
        caches.check();
        assert!(caches.usage().bytes <= TENANT_BYTES_MAX, "{:?}", caches.usage());
        // Many caches with long names are no way around it.
        for n in 0..30_000 {
            caches.set(&format!("{n}{}", "x".repeat(NAME_LEN_MAX - 8)), b"k", b"v", "mallory").unwrap();
        }
        caches.check();
    }

    #[test]
    fn where_all_is_full_the_tenant_that_has_most_makes_room() {
        let mut caches = CacheTable::default();
        caches.set("c", b"small", b"1", "small").unwrap();
        for n in 0..20_u32 {
            for tenant in 0..BYTES_MAX / TENANT_BYTES_MAX + 2 {
                for part in 0..10 {
                    let key = format!("{tenant} {n} {part}");
                    caches.set("c", key.as_bytes(), &vec![0; VALUE_LEN_MAX], &tenant.to_string()).unwrap();
                }
            }
        }
        caches.check();
        assert!(caches.get("c", b"small").is_some());
        assert!(caches.usage().bytes > BYTES_MAX - 2 * VALUE_LEN_MAX, "{:?}", caches.usage());
    }

    #[test]
    fn keys_and_values_are_bounded() {
        let mut caches = CacheTable::default();
        assert_eq!(caches.set("c", &vec![b'k'; KEY_LEN_MAX + 1], b"", "t"), Err(CacheFull::Key));
        assert_eq!(caches.set("c", b"k", &vec![b'v'; VALUE_LEN_MAX + 1], "t"), Err(CacheFull::Value));
        assert_eq!(caches.set("c", &vec![b'k'; KEY_LEN_MAX], &vec![b'v'; VALUE_LEN_MAX], "t"), Ok(()));
        caches.check();
    }

    #[test]
    fn last_tenant_to_set_an_entry_is_charged_for_it() {
        let mut caches = CacheTable::default();
        caches.set("c", b"k", b"1", "alice").unwrap();
        caches.set("c", b"k", b"2", "bob").unwrap();
        caches.check();
        assert_eq!(caches.tenants.keys().map(|name| &**name).collect::<Vec<_>>(), ["bob"]);
        assert_eq!(caches.get("c", b"k"), Some(&b"2"[..]));
    }
}
