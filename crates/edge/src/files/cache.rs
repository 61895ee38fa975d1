//! What a thread remembers of the files it served: the least recently used goes first, within a budget of bytes.
//!
//! An entry is never believed without looking at the file again in each turn of the event loop; that check is
//! `load::Entry::is_current`. Not here: reading files (`load`).

use std::hash::BuildHasher;
use std::rc::Rc;
use std::time::{Duration, Instant};

use foldhash::fast::RandomState;
use lru::LruCache;

use super::load::Entry;
use super::root::RootId;

/// Open descriptors of large files per edge thread. Each is charged its share of the byte budget, so this bound
/// follows from that one.
pub const LARGE_FILES_MAX: usize = 512;

/// What an entry costs beside its content: itself, its header map, its path and the list's node, added up from their
/// sizes and rounded up.
const ENTRY_BYTES: usize = 2048;

pub(super) struct Cache {
    /// By a 64-bit hash of root and path, which costs a look-up neither an allocation nor an owned key. The entry
    /// knows its root and path: two that collide merely displace each other.
    entries: LruCache<u64, Held, RandomState>,
    hasher: RandomState,
    bytes_max: usize,
    bytes: usize,
}

struct Held {
    entry: Rc<Entry>,
    cost: usize,
    used: Instant,
}

impl Cache {
    pub(super) fn new(bytes_max: usize) -> Self {
        Self {
            entries: LruCache::unbounded_with_hasher(RandomState::default()),
            hasher: RandomState::default(),
            bytes_max,
            bytes: 0,
        }
    }

    pub(super) fn get(&mut self, root: RootId, path: &str, now: Instant) -> Option<Rc<Entry>> {
        let held = self.entries.get_mut(&self.hasher.hash_one((root, path)))?;
        if !held.entry.is_for(root, path) {
            return None;
        }
        held.used = now;
        Some(held.entry.clone())
    }

    /// Takes it in, if it fits at all, in place of what was there.
    pub(super) fn put(&mut self, root: RootId, path: &str, entry: Rc<Entry>, now: Instant) {
        let cost = self.cost(&entry);
        if cost > self.bytes_max {
            return self.remove(root, path);
        }
        let held = Held { entry, cost, used: now };
        if let Some(old) = self.entries.put(self.hasher.hash_one((root, path)), held) {
            self.bytes -= old.cost;
        }
        self.bytes += cost;
        while self.bytes > self.bytes_max {
            self.pop();
        }
    }

    pub(super) fn remove(&mut self, root: RootId, path: &str) {
        if let Some(old) = self.entries.pop(&self.hasher.hash_one((root, path))) {
            self.bytes -= old.cost;
        }
    }

    /// Forgets everything, which closes the descriptors that no response is using.
    pub(super) fn clear(&mut self) {
        self.entries.clear();
        self.bytes = 0;
    }

    /// Forgets what was not asked for since `idle_max`. A deleted file keeps its disk space while its descriptor is
    /// open, so idle entries must go even if nothing needs their room.
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

    fn cost(&self, entry: &Entry) -> usize {
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
