//! Caches a thread's served files. The least recently used one goes first, within a budget of
//! bytes.
//!
//! Invariant: an entry is used only after a check in the same turn of the event loop
//! (`load::ServedFile::is_current`). Not here: reading files (`load`).

use std::hash::BuildHasher;
use std::rc::Rc;
use std::time::{Duration, Instant};

use foldhash::fast::RandomState;
use lru::LruCache;

use crate::backends::files::load::ServedFile;
use crate::backends::files::root::DirectoryId;

/// Maximum number of open descriptors of large files per edge thread. Each is charged its share
/// of the byte budget, so that budget sets this limit.
pub const LARGE_FILES_MAX: usize = 512;

/// Memory of an entry in addition to its content. It is the sum of entry, header map, path and
/// list node, rounded up.
const ENTRY_BYTES: usize = 2048;

pub(super) struct FileCache {
    /// Key: a 64-bit hash of root and path. So a look-up needs neither an allocation nor an owned
    /// key. The entry knows its root and path: two with the same hash only displace each other.
    entries: LruCache<u64, CachedEntry, RandomState>,
    hasher: RandomState,
    bytes_max: usize,
    bytes: usize,
}

struct CachedEntry {
    entry: Rc<ServedFile>,
    cost: usize,
    used: Instant,
}

impl FileCache {
    pub(super) fn new(bytes_max: usize) -> Self {
        Self {
            entries: LruCache::unbounded_with_hasher(RandomState::default()),
            hasher: RandomState::default(),
            bytes_max,
            bytes: 0,
        }
    }

    pub(super) fn get(&mut self, root: DirectoryId, path: &str, now: Instant) -> Option<Rc<ServedFile>> {
        let held = self.entries.get_mut(&self.hasher.hash_one((root, path)))?;
        if !held.entry.is_for(root, path) {
            return None;
        }
        held.used = now;
        Some(held.entry.clone())
    }

    /// Adds the entry, if it fits at all, and replaces an older one.
    pub(super) fn put(&mut self, root: DirectoryId, path: &str, entry: Rc<ServedFile>, now: Instant) {
        let cost = self.cost(&entry);
        if cost > self.bytes_max {
            return self.remove(root, path);
        }
        let held = CachedEntry { entry, cost, used: now };
        if let Some(old) = self.entries.put(self.hasher.hash_one((root, path)), held) {
            self.bytes -= old.cost;
        }
        self.bytes += cost;
        while self.bytes > self.bytes_max {
            self.pop();
        }
    }

    pub(super) fn remove(&mut self, root: DirectoryId, path: &str) {
        if let Some(old) = self.entries.pop(&self.hasher.hash_one((root, path))) {
            self.bytes -= old.cost;
        }
    }

    /// Drops everything, which closes descriptors that no response is using.
    pub(super) fn clear(&mut self) {
        self.entries.clear();
        self.bytes = 0;
    }

    /// Drops entries without a request since `idle_max`. A deleted file keeps its disk space
    /// while its descriptor is open. So idle entries must go even if nothing needs their memory.
    pub(super) fn drop_idle(&mut self, now: Instant, idle_max: Duration) {
        while let Some((_, held)) = self.entries.peek_lru()
            && now.saturating_duration_since(held.used) >= idle_max
        {
            self.pop();
        }
    }

    fn pop(&mut self) {
        let (_, held) =
            self.entries.pop_lru().expect("an empty cache costs nothing, so something is left to drop");
        self.bytes -= held.cost;
    }

    fn cost(&self, entry: &ServedFile) -> usize {
        let (bytes, descriptors) = entry.weight();
        ENTRY_BYTES + bytes + descriptors * (self.bytes_max / LARGE_FILES_MAX)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}
